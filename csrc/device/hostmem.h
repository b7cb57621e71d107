/* hostmem.h - the host arena: one region that holds every chunk's home on the host.
 *
 * mmap + MADV_HUGEPAGE + parallel first touch; a device then registers (pins) what is there.
 * Exact sizes, no power-of-two rounding.  Made and freed as a whole, or reserved, and held part by
 * part. A forked child does not have the region: nothing is copied for it, and pinned pages stay
 * put. */
#pragma once

#include "base/base.h"
#include "base/workers.h"
#include "device/device.h"

typedef struct gm_arena gm_arena; /* opaque; owns the region */

/* Bytes this process may still take: the least of MemAvailable and what each enclosing cgroup
 * (v2 memory.max - memory.current, or v1) leaves. */
gm_status gm_host_available(size_t *out_bytes);
/* The same, and what the machine or the smallest enclosing cgroup has in all.  Reads below the
 * folder `root` in place of "/" (tests bring a /proc and /sys of their own); "" is this machine. */
gm_status gm_host_memory_at(const char *root, size_t *out_available, size_t *out_total);
/* Fails with GM_ERR_NOMEM before touching anything if `bytes` > gm_host_available().  The memory
 * reads as zeros.  bytes 0 gives a valid empty arena.  Pinned for the copies of a device, which
 * outlives it (NULL: of none); GM_ERR_NOMEM also where that cannot be.  For a device on paper:
 * addresses alone, which are not to be used, with no limit but the address space's. */
gm_status gm_arena_new(gm_device *device, size_t bytes, gm_workers *pool, gm_arena **out);
/* Address space for a device's copies, in which nothing is there yet. */
gm_status gm_arena_reserve(gm_device *device, size_t bytes, gm_arena **out);
/* [offset, offset + bytes) of it; apart from the end of the arena, whole pages. */
typedef struct gm_extent {
    size_t offset, bytes;
} gm_extent;
/* The extents, of which nothing is there, are from now on: zeros, and pinned one by one.
 * GM_ERR_NOMEM: none is. */
gm_status gm_arena_hold(gm_arena *arena, const gm_extent *extents, size_t n, gm_workers *pool);
/* One that is held goes back, with its bytes; nothing may use it. */
void gm_arena_drop(gm_arena *arena, size_t offset);
void gm_arena_free(gm_arena *arena); /* NULL is fine */
void *gm_arena_base(const gm_arena *arena);
size_t gm_arena_bytes(const gm_arena *arena);    /* that are there; NULL: 0 */
size_t gm_arena_reserved(const gm_arena *arena); /* and what may come */
