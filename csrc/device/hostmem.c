/* hostmem.c - how much host memory there is, and the arena.
 *
 * 1. An arena touches memory only after gm_host_available() has covered all that is asked for.
 * 2. Every page of an extent is present when gm_arena_hold returns: the engine never waits for the
 *    kernel to find one, and a machine that cannot give them fails here, not amid a copy. */
#define _GNU_SOURCE /* MADV_* */
#include "device/hostmem.h"

#include <errno.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/sysfile.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

/* ---- how much there is ---- */

typedef struct memory_figures {
    uint64_t available, total;
} memory_figures;

/* The number after `key` at the start of a line. */
static bool number_after(const char *text, const char *key, uint64_t *out)
{
    size_t key_bytes = strlen(key);
    for (const char *line = text; line; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (strncmp(line, key, key_bytes) == 0 && strchr(": \t", line[key_bytes])) {
            return sscanf(line + key_bytes, "%*[: \t]%" SCNu64, out) == 1;
        }
        if (!*line) {
            break;
        }
    }
    return false;
}

/* False also for "max", which is no limit. */
static bool cgroup_number(const char *root, const char *folder, const char *file, uint64_t *out)
{
    char text[64];
    return gm_sysfile_read(root, folder, file, text, sizeof text) &&
           sscanf(text, "%" SCNu64, out) == 1;
}

/* What one cgroup folder leaves.  Its page cache that was not used lately is counted as free, as
 * the kernel drops it before it fails: a model file just read must not look like used memory. */
static void limit_by_folder(void *context, const char *root, const char *folder, bool is_v2)
{
    memory_figures *figures = context;
    uint64_t limit, usage;
    if (!cgroup_number(root, folder, is_v2 ? "/memory.max" : "/memory.limit_in_bytes", &limit) ||
        !cgroup_number(root, folder, is_v2 ? "/memory.current" : "/memory.usage_in_bytes",
                       &usage)) {
        return;
    }
    char text[8192];
    uint64_t reclaimable = 0;
    if (gm_sysfile_read(root, folder, "/memory.stat", text, sizeof text)) {
        (void)number_after(text, is_v2 ? "inactive_file" : "total_inactive_file", &reclaimable);
    }
    uint64_t held = usage > reclaimable ? usage - reclaimable : 0;
    uint64_t left = limit > held ? limit - held : 0;
    figures->available = left < figures->available ? left : figures->available;
    figures->total = limit < figures->total ? limit : figures->total;
}

gm_status gm_host_memory_at(const char *root, size_t *out_available, size_t *out_total)
{
    char text[8192];
    uint64_t available_kib, total_kib;
    if (!gm_sysfile_read(root, "", "/proc/meminfo", text, sizeof text) ||
        !number_after(text, "MemAvailable", &available_kib) ||
        !number_after(text, "MemTotal", &total_kib)) {
        return GM_FAIL(GM_ERR_DEVICE,
                       "%s/proc/meminfo has no MemAvailable and MemTotal: is /proc mounted?", root);
    }
    memory_figures figures = {available_kib * 1024, total_kib * 1024};
    gm_sysfile_cgroups(root, "memory", limit_by_folder, &figures);
    *out_available = figures.available < SIZE_MAX ? (size_t)figures.available : SIZE_MAX;
    *out_total = figures.total < SIZE_MAX ? (size_t)figures.total : SIZE_MAX;
    return GM_OK;
}

gm_status gm_host_available(size_t *out_bytes)
{
    size_t total;
    return gm_host_memory_at("", out_bytes, &total);
}

/* ---- the arena ---- */

enum { HUGE_PAGE_BYTES = 2 << 20 };

struct gm_arena {
    char *base; /* NULL if bytes == 0; a multiple of HUGE_PAGE_BYTES unless on paper */
    size_t bytes, held_bytes;
    pid_t owner;       /* only there is the region mapped */
    gm_device *device; /* that has what is held pinned; NULL: none */
    gm_extent *held;   /* (n_held,) */
    size_t n_held, held_capacity;
};

typedef struct touch_job {
    char *begin, *end;
    atomic_int error; /* errno of a span that failed */
} touch_job;

/* Makes the pages of [begin, end) present, by units that end at multiples of the huge page size; they stay zero.  A call
 * for each: with one for a whole span, fourteen threads got 9 GB/s where they get 25 so, and four of them 20
 * (docs/log.md, 2026-11-24). */
static void touch_span(void *context, size_t begin, size_t end)
{
    touch_job *job = context;
    size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    char *first = job->begin - (uintptr_t)job->begin % HUGE_PAGE_BYTES;
    for (size_t i = begin; i < end; i++) {
        char *at = first + i * HUGE_PAGE_BYTES, *after = at + HUGE_PAGE_BYTES;
        at = at < job->begin ? job->begin : at;
        after = after < job->end ? after : job->end;
        if (madvise(at, (size_t)(after - at), MADV_POPULATE_WRITE) == 0) {
            continue;
        }
        if (errno != EINVAL && errno != ENOSYS) {
            atomic_store(&job->error, errno);
            return;
        }
        for (; at < after; at += page_bytes) {
            *(volatile char *)at = 0;
        }
    }
}

/* Maps `bytes` at a multiple of the huge page size by mapping more and giving back the ends. */
static gm_status map_region(gm_arena *arena, size_t bytes)
{
    size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    bool is_paper = arena->device && arena->device->is_paper;
    size_t mapped_bytes = gm_round_up(bytes, page_bytes) + HUGE_PAGE_BYTES;
    char *mapped = mmap(NULL, mapped_bytes, is_paper ? PROT_NONE : PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) {
        return GM_FAIL(GM_ERR_NOMEM,
                       "host memory: %s wanted, but the address space has no room: %s (ulimit -v?)",
                       gm_wanted(bytes).text, strerror(errno));
    }
    size_t before = gm_round_up((uintptr_t)mapped, HUGE_PAGE_BYTES) - (uintptr_t)mapped;
    size_t after = HUGE_PAGE_BYTES - before;
    arena->base = mapped + before;
    arena->bytes = bytes;
    if (before) {
        munmap(mapped, before);
    }
    if (after) {
        munmap(mapped + mapped_bytes - after, after);
    }
    (void)madvise(arena->base, bytes, MADV_HUGEPAGE); /* faster where it is granted */
    /* A child that writes nothing would still make the parent copy page after page, and a page
     * copied away under a device that reads the old one loses data. */
    if (madvise(arena->base, gm_round_up(bytes, page_bytes), MADV_DONTFORK) != 0) {
        return GM_FAIL(GM_ERR_DEVICE, "madvise(MADV_DONTFORK) on %zu bytes: %s", bytes,
                       strerror(errno));
    }
    return GM_OK;
}

static gm_status check_available(size_t bytes)
{
    size_t available;
    GM_TRY(gm_host_available(&available));
    return bytes <= available ? GM_OK
                              : GM_FAIL(GM_ERR_NOMEM,
                                        "host memory: %s wanted, %s available on this machine or "
                                        "in its cgroup; free or "
                                        "allow more host memory, or keep more on the device "
                                        "(placement_policy=\"cuda\" keeps all)",
                                        gm_wanted(bytes).text, gm_there(available).text);
}

gm_status gm_arena_reserve(gm_device *device, size_t bytes, gm_arena **out)
{
    gm_arena *arena;
    GM_TRY(GM_NEW(arena, "host memory: no room for an arena's own %zu bytes"));
    arena->owner = getpid();
    arena->device = device;
    gm_status status = bytes > 0 ? map_region(arena, bytes) : GM_OK;
    if (status != GM_OK) {
        gm_arena_free(arena);
        return status;
    }
    *out = arena;
    return GM_OK;
}

/* Pages back to the kernel; they read as zeros again. */
static void give_back(gm_arena *arena, const gm_extent *extent)
{
    if (!arena->device || !arena->device->is_paper) {
        size_t bytes = gm_round_up(extent->bytes, (size_t)sysconf(_SC_PAGESIZE));
        (void)madvise(arena->base + extent->offset, bytes, MADV_DONTNEED);
    }
}

static gm_status hold_one(gm_arena *arena, const gm_extent *extent, gm_workers *pool)
{
    char *at = arena->base + extent->offset;
    touch_job job = {.begin = at, .end = at + extent->bytes};
    if (!arena->device || !arena->device->is_paper) {
        size_t first = extent->offset / HUGE_PAGE_BYTES;
        size_t after =
            gm_round_up(extent->offset + extent->bytes, HUGE_PAGE_BYTES) / HUGE_PAGE_BYTES;
        gm_workers_for(pool, after - first, 1, touch_span, &job);
    }
    int error = atomic_load(&job.error);
    gm_status status = GM_OK;
    if (error) {
        status = GM_FAIL(GM_ERR_NOMEM,
                         "host memory: %s wanted, which seemed available, but the kernel says: %s",
                         gm_wanted(extent->bytes).text, strerror(error));
    } else if (arena->device) {
        status = arena->device->ops->pin(arena->device, at, extent->bytes);
    }
    if (status != GM_OK) {
        give_back(arena, extent);
        return status;
    }
    arena->held[arena->n_held++] = *extent;
    arena->held_bytes += extent->bytes;
    return GM_OK;
}

gm_status gm_arena_hold(gm_arena *arena, const gm_extent *extents, size_t n, gm_workers *pool)
{
    size_t bytes = 0, n_before = arena->n_held;
    for (size_t i = 0; i < n; i++) {
        bytes += extents[i].bytes;
    }
    if (!arena->device || !arena->device->is_paper) {
        GM_TRY(check_available(bytes)); /* 1 */
    }
    gm_status status = GM_OK;
    for (size_t i = 0; status == GM_OK && i < n; i++) {
        status = extents[i].bytes == 0 ? GM_OK
                                       : GM_GROW(arena->held, arena->n_held, arena->held_capacity,
                                                 "host memory: no room for a table of %zu extents");
        status =
            status == GM_OK && extents[i].bytes > 0 ? hold_one(arena, &extents[i], pool) : status;
    }
    while (status != GM_OK && arena->n_held > n_before) {
        gm_arena_drop(arena, arena->held[arena->n_held - 1].offset);
    }
    return status;
}

void gm_arena_drop(gm_arena *arena, size_t offset)
{
    size_t i = arena->n_held;
    while (i > 0 && arena->held[i - 1].offset != offset) {
        i--;
    }
    GM_ASSERT(i > 0);
    gm_extent extent = arena->held[i - 1];
    arena->held[i - 1] = arena->held[--arena->n_held];
    arena->held_bytes -= extent.bytes;
    if (arena->device) {
        arena->device->ops->unpin(arena->device, arena->base + offset);
    }
    give_back(arena, &extent);
}

gm_status gm_arena_new_for(gm_device *device, size_t bytes, gm_workers *pool, gm_arena **out)
{
    gm_arena *arena;
    if (!device || !device->is_paper) {
        GM_TRY(check_available(bytes)); /* before there are so many addresses */
    }
    GM_TRY(gm_arena_reserve(device, bytes, &arena));
    gm_status status = gm_arena_hold(arena, &(gm_extent){0, bytes}, 1, pool);
    if (status != GM_OK) {
        gm_arena_free(arena);
        return status;
    }
    *out = arena;
    return GM_OK;
}

gm_status gm_arena_new(size_t bytes, gm_workers *pool, gm_arena **out)
{
    return gm_arena_new_for(NULL, bytes, pool, out);
}

void gm_arena_free(gm_arena *arena)
{
    if (!arena) {
        return;
    }
    for (size_t i = 0; arena->device && i < arena->n_held; i++) {
        arena->device->ops->unpin(arena->device, arena->base + arena->held[i].offset);
    }
    if (arena->base && arena->owner == getpid()) {
        munmap(arena->base, gm_round_up(arena->bytes, (size_t)sysconf(_SC_PAGESIZE)));
    }
    free(arena->held);
    free(arena);
}

void *gm_arena_base(const gm_arena *arena)
{
    return arena->base;
}

size_t gm_arena_bytes(const gm_arena *arena)
{
    return arena ? arena->held_bytes : 0;
}

size_t gm_arena_reserved(const gm_arena *arena)
{
    return arena->bytes;
}
