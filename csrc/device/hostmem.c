/* hostmem.c - how much host memory there is, and the arena.
 *
 * 1. An arena touches memory only after gm_host_available() has covered all that is asked for.
 * 2. Every page of an extent is present when gm_arena_hold returns: the engine never waits for the
 *    kernel to find one, and a machine that cannot give them fails here, not amid a copy. */
#define _GNU_SOURCE /* MADV_* */
#include "device/hostmem.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
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
    GM_FAIL_IF(!gm_sysfile_read(root, "", "/proc/meminfo", text, sizeof text) ||
                   !number_after(text, "MemAvailable", &available_kib) ||
                   !number_after(text, "MemTotal", &total_kib),
               GM_ERR_DEVICE, "%s/proc/meminfo has no MemAvailable and MemTotal: is /proc mounted?",
               root);
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

/* Maps `bytes` at a multiple of the huge page size by mapping more and giving back the ends. */
static gm_status map_region(gm_arena *arena, size_t bytes)
{
    size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    bool is_paper = arena->device && arena->device->is_paper;
    size_t mapped_bytes = gm_round_up(bytes, page_bytes) + HUGE_PAGE_BYTES;
    char *mapped = mmap(NULL, mapped_bytes, is_paper ? PROT_NONE : PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    GM_FAIL_IF(mapped == MAP_FAILED, GM_ERR_NOMEM,
               "host memory: %s wanted, but the address space has no room: %s (ulimit -v?)",
               gm_wanted(bytes).text, strerror(errno));
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
    GM_FAIL_IF(madvise(arena->base, gm_round_up(bytes, page_bytes), MADV_DONTFORK) != 0,
               GM_ERR_DEVICE, "madvise(MADV_DONTFORK) on %zu bytes: %s", bytes, strerror(errno));
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
    GM_TRY_ELSE(bytes > 0 ? map_region(arena, bytes) : GM_OK, gm_arena_free(arena));
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

typedef struct hold_job {
    gm_arena *arena;
    const gm_extent *extents;
    size_t n;
    size_t *end;          /* (n,) huge pages of the extents up to this one */
    atomic_size_t *left;  /* (n,) of an extent that are still to be touched */
    pthread_mutex_t lock; /* of what follows, and of what the arena holds */
    gm_status status;
    char why[1024]; /* gm_last_error() of the thread that failed first */
} hold_job;

/* Makes the pages of [at, after) present, within one huge page; they stay zero.  A call for each of
 * these: with one for a whole span, fourteen threads got 9 GB/s where they get 25 so, and four of
 * them 20 (benchmarks/log.md, 2026-11-24). */
static int touch(char *at, char *after)
{
    if (madvise(at, (size_t)(after - at), MADV_POPULATE_WRITE) == 0) {
        return 0;
    }
    if (errno != EINVAL && errno != ENOSYS) {
        return errno;
    }
    for (; at < after; at += sysconf(_SC_PAGESIZE)) {
        *(volatile char *)at = 0;
    }
    return 0;
}

static gm_status touch_page(const hold_job *job, size_t id, size_t page)
{
    const gm_extent *extent = &job->extents[id];
    char *begin = job->arena->base + extent->offset, *end = begin + extent->bytes;
    char *at = begin - (uintptr_t)begin % HUGE_PAGE_BYTES + page * HUGE_PAGE_BYTES;
    char *after = at + HUGE_PAGE_BYTES < end ? at + HUGE_PAGE_BYTES : end;
    int error = touch(at < begin ? begin : at, after);
    return error
               ? GM_FAIL(GM_ERR_NOMEM,
                         "host memory: %s wanted, which seemed available, but the kernel says: %s",
                         gm_wanted(extent->bytes).text, strerror(error))
               : GM_OK;
}

static gm_status pin_locked(const hold_job *job, size_t id)
{
    gm_arena *arena = job->arena;
    const gm_extent *extent = &job->extents[id];
    if (arena->device) {
        GM_TRY(arena->device->ops->pin(arena->device, arena->base + extent->offset, extent->bytes));
    }
    arena->held[arena->n_held++] = *extent;
    arena->held_bytes += extent->bytes;
    return GM_OK;
}

/* Huge pages [begin, end) of the extents laid end to end.  The thread that touches the last one of
 * an extent pins it, one thread at a time, as the driver does, while the others go on touching. */
static void hold_span(void *context, size_t begin, size_t end)
{
    hold_job *job = context;
    bool is_paper = job->arena->device && job->arena->device->is_paper;
    for (size_t i = begin; i < end; i++) {
        size_t id = gm_up_to(job->end, job->n, sizeof *job->end, i);
        gm_status status = is_paper ? GM_OK : touch_page(job, id, i - (id ? job->end[id - 1] : 0));
        bool is_last = atomic_fetch_sub(&job->left[id], 1) == 1;
        if (status == GM_OK && !is_last) {
            continue;
        }
        pthread_mutex_lock(&job->lock);
        if (job->status == GM_OK) {
            job->status = status == GM_OK ? pin_locked(job, id) : status;
            if (job->status != GM_OK) {
                (void)snprintf(job->why, sizeof job->why, "%s", gm_last_error());
            }
        }
        status = job->status;
        pthread_mutex_unlock(&job->lock);
        if (status != GM_OK) {
            return;
        }
    }
}

static gm_status hold(hold_job *job, gm_workers *pool)
{
    gm_arena *arena = job->arena;
    size_t n_before = arena->n_held, pages = 0;
    for (size_t i = 0; i < job->n; i++) {
        const gm_extent *extent = &job->extents[i];
        size_t n = gm_round_up(extent->offset % HUGE_PAGE_BYTES + extent->bytes, HUGE_PAGE_BYTES) /
                   HUGE_PAGE_BYTES;
        n = extent->bytes ? n : 0;
        atomic_init(&job->left[i], n);
        job->end[i] = pages += n;
        GM_TRY(GM_GROW(arena->held, n_before + i, arena->held_capacity,
                       "host memory: no room for a table of %zu extents"));
    }
    pthread_mutex_init(&job->lock, NULL);
    gm_workers_for(pool, pages, 1, hold_span, job);
    pthread_mutex_destroy(&job->lock);
    if (job->status == GM_OK) {
        return GM_OK;
    }
    while (arena->n_held > n_before) {
        gm_arena_drop(arena, arena->held[arena->n_held - 1].offset);
    }
    for (size_t i = 0; i < job->n; i++) { /* touched and not held */
        give_back(arena, &job->extents[i]);
    }
    return GM_FAIL(job->status, "%s", job->why);
}

gm_status gm_arena_hold(gm_arena *arena, const gm_extent *extents, size_t n, gm_workers *pool)
{
    size_t bytes = 0;
    for (size_t i = 0; i < n; i++) {
        bytes += extents[i].bytes;
    }
    if (!arena->device || !arena->device->is_paper) {
        GM_TRY(check_available(bytes)); /* 1 */
    }
    hold_job job = {.arena = arena, .extents = extents, .n = n};
    job.end = malloc(n * sizeof *job.end + 1);
    job.left = malloc(n * sizeof *job.left + 1);
    gm_status status = job.end && job.left
                           ? hold(&job, pool)
                           : GM_FAIL(GM_ERR_NOMEM, "host memory: table of %zu extents", n);
    free(job.end);
    free(job.left);
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

gm_status gm_arena_new(gm_device *device, size_t bytes, gm_workers *pool, gm_arena **out)
{
    gm_arena *arena;
    if (!device || !device->is_paper) {
        GM_TRY(check_available(bytes)); /* before there are so many addresses */
    }
    GM_TRY(gm_arena_reserve(device, bytes, &arena));
    GM_TRY_ELSE(gm_arena_hold(arena, &(gm_extent){0, bytes}, 1, pool), gm_arena_free(arena));
    *out = arena;
    return GM_OK;
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
