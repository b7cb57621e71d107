/* hostmem.h - the host arena: one region that holds every chunk's home on the host.
 *
 * mmap + MADV_HUGEPAGE + parallel first touch; a device then registers (pins) the region.
 * Exact sizes, no power-of-two rounding.  Freed as a whole.
 * A forked child does not have the region: nothing is copied for it, and pinned pages stay put. */
#ifndef GM_HOSTMEM_H
#define GM_HOSTMEM_H

#include "base/base.h"
#include "base/workers.h"
#include "device/device.h"

typedef struct gm_arena gm_arena; /* opaque; owns the region */

/* Bytes this process may still take: the least of MemAvailable and what each enclosing cgroup
 * (v2 memory.max - memory.current, or v1) leaves. */
gm_status gm_host_available(size_t *out_bytes);
/* The same, and what the machine or the smallest enclosing cgroup has in all.  Reads below the folder
 * `root` in place of "/" (tests bring a /proc and /sys of their own); "" is this machine. */
gm_status gm_host_memory_at(const char *root, size_t *out_available, size_t *out_total);
/* Fails with GM_ERR_NOMEM before touching anything if `bytes` > gm_host_available().
 * The memory reads as zeros.  bytes 0 gives a valid empty arena. */
gm_status gm_arena_new(size_t bytes, gm_workers *pool, gm_arena **out);
/* The same, pinned for the copies of a device, which outlives it; GM_ERR_NOMEM also where that cannot be.  For a device on
 * paper: addresses alone, which nobody may use, with no limit but the address space's. */
gm_status gm_arena_new_for(gm_device *device, size_t bytes, gm_workers *pool, gm_arena **out);
void gm_arena_free(gm_arena *arena); /* NULL is fine */
void *gm_arena_base(const gm_arena *arena);
size_t gm_arena_bytes(const gm_arena *arena); /* NULL: 0 */

#endif
