/* host.c - a device whose memory is host memory: the default where there is no GPU, and the
 * bed on which tests prove the engine.
 *
 * Blocks are pieces of one memfd, and address ranges are mapped onto them with mmap, so aliasing is
 * real: two ranges on one block show the same bytes.  Streams run at once, on the calling thread
 * and the pool; hence an event is reached when it is recorded, and waiting costs nothing.  A timed
 * event carries the clock of that moment.
 *
 * 1. Block b is the file's bytes [(b - 1) * block_bytes, b * block_bytes); it has pages of its own
 *    from block_new to block_free (given at once, where the kernel can), and none otherwise.
 * 2. Every address of a range is at all times mapped onto a block or PROT_NONE: it is never free
 *    for another mmap of the process to land in.
 * 3. Ranges and blocks belong to the process that made the device.  A forked child does not have
 *    them: a call there that maps, takes or waits fails by name, as those of an engine do (call.c),
 *    and a stray access faults; a child can never change the parent's weights. */
#define _GNU_SOURCE /* memfd_create, fallocate, MAP_*, MADV_* */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "device/hostmem.h"
#include "device/ops.h"

enum {
    GROW_BLOCKS = 64, /* the file's size grows by this many blocks, or by half */
    /* So much is taken between two looks at what the machine has: a look reads a dozen files, which
     * takes longer than giving a small block its pages. */
    LOOK_BYTES = 16 << 20
};

typedef struct address_range {
    uintptr_t addr;
    size_t bytes;
} address_range;

/* Timed events are TIMED + a slot's index; others are plain numbers. */
#define TIMED ((gm_event)1 << 63)

typedef struct timed_event {
    bool is_used, is_recorded;
    double seconds; /* of the monotonic clock, at the latest record */
} timed_event;

typedef struct host_device {
    gm_device base; /* first: a gm_device * is a host_device * */
    gm_workers *pool;
    pid_t owner;
    int fd; /* the memfd that holds every block */

    bool *is_used;   /* (n_blocks,) is this block handed out? */
    size_t n_blocks; /* that fit into the file as it is */
    size_t n_used;
    size_t first_free; /* no block below it is free */
    size_t available;  /* of the host's memory when it was looked at, less what was taken since */
    size_t n_unseen;   /* bytes that may be taken without another look; at most `available` */

    address_range *ranges; /* (n_ranges,) ascending, apart from each other */
    size_t n_ranges, range_capacity;

    timed_event *timed; /* (n_timed,) */
    size_t n_timed;
    size_t first_free_timed;      /* no slot below it is free */
    uint64_t n_streams, n_events; /* alive */
    uint64_t last_id;             /* of streams and events; never used twice */
} host_device;

static host_device *as_host(gm_device *dev)
{
    return (host_device *)dev;
}

/* ---- address ranges ---- */

/* The number of ranges that begin at or below `addr`. */
static size_t ranges_up_to(const host_device *dev, uintptr_t addr)
{
    return gm_up_to(dev->ranges, dev->n_ranges, sizeof *dev->ranges, addr);
}

/* MAP_FIXED replaces whatever is there, so nothing outside of our ranges may get that far. */
static gm_status check_inside_range(const host_device *dev, const char *what, uintptr_t addr,
                                    size_t n_blocks)
{
    GM_TRY(gm_check_process(dev->owner));
    size_t count = ranges_up_to(dev, addr);
    if (count > 0 && addr % dev->base.granularity == 0) {
        const address_range *range = &dev->ranges[count - 1];
        size_t offset = addr - range->addr;
        if (offset <= range->bytes && n_blocks <= (range->bytes - offset) / dev->base.block_bytes) {
            return GM_OK;
        }
    }
    return GM_FAIL(GM_ERR_ARG,
                   "host device: %s of %zu blocks of %zu bytes at %#zx is not inside one range",
                   what, n_blocks, dev->base.block_bytes, (size_t)addr);
}

static gm_status mmap_failed(size_t bytes, int error)
{
    return GM_FAIL(error == EAGAIN ? GM_ERR_NOMEM : GM_ERR_DEVICE,
                   "host device: mmap of %zu bytes: %s%s", bytes, strerror(error),
                   error == ENOMEM ? "; this process may have reached vm.max_map_count: raise it "
                                     "with sysctl, or take a larger block_size"
                                   : "");
}

/* Takes away access and content; the addresses stay ours. */
static gm_status map_nothing(uintptr_t addr, size_t bytes)
{
    void *mapped = mmap((void *)addr, bytes, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return mapped == MAP_FAILED ? mmap_failed(bytes, errno) : GM_OK;
}

static gm_status host_range_new(gm_device *base, size_t bytes, uintptr_t *out)
{
    host_device *dev = as_host(base);
    GM_TRY(gm_check_process(dev->owner));
    GM_FAIL_IF(bytes == 0 || bytes % base->granularity != 0, GM_ERR_ARG,
               "host device: a range of %zu bytes: a multiple of %zu, not 0, is wanted", bytes,
               base->granularity);
    GM_TRY(GM_GROW(dev->ranges, dev->n_ranges, dev->range_capacity,
                   "host memory: no room for a table of %zu ranges"));
    void *mapped = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) {
        return mmap_failed(bytes, errno);
    }
    size_t at = ranges_up_to(dev, (uintptr_t)mapped);
    memmove(&dev->ranges[at + 1], &dev->ranges[at], (dev->n_ranges - at) * sizeof dev->ranges[0]);
    dev->ranges[at] = (address_range){(uintptr_t)mapped, bytes};
    dev->n_ranges++;
    *out = (uintptr_t)mapped;
    return GM_OK;
}

static void host_range_free(gm_device *base, uintptr_t addr, size_t bytes)
{
    host_device *dev = as_host(base);
    size_t count = ranges_up_to(dev, addr);
    bool is_known =
        count > 0 && dev->ranges[count - 1].addr == addr && dev->ranges[count - 1].bytes == bytes;
    GM_ASSERT(is_known);
    if (!is_known) {
        return; /* unmapping memory that is not ours would be worse than keeping some */
    }
    if (dev->owner == getpid()) {
        munmap((void *)addr, bytes);
    }
    memmove(&dev->ranges[count - 1], &dev->ranges[count],
            (dev->n_ranges - count) * sizeof dev->ranges[0]);
    dev->n_ranges--;
}

/* ---- blocks ---- */

static gm_status grow_file(host_device *dev)
{
    size_t more = dev->n_blocks / 2 > GROW_BLOCKS ? dev->n_blocks / 2 : GROW_BLOCKS;
    size_t n_blocks = dev->n_blocks + more;
    size_t file_bytes;
    GM_FAIL_IF(__builtin_mul_overflow(n_blocks, dev->base.block_bytes, &file_bytes) ||
                   file_bytes > INT64_MAX,
               GM_ERR_NOMEM, "host device: %zu blocks of %zu bytes exceed what a file can hold",
               n_blocks, dev->base.block_bytes);
    bool *is_used = realloc(dev->is_used, n_blocks * sizeof *is_used);
    GM_FAIL_IF(!is_used, GM_ERR_NOMEM, "host memory: no room for a table of %zu blocks", n_blocks);
    dev->is_used = is_used;
    if (ftruncate(dev->fd, (off_t)file_bytes) != 0) { /* a hole: free until it is written */
        return GM_FAIL(GM_ERR_DEVICE, "host device: a memfd of %zu bytes: %s", file_bytes,
                       strerror(errno));
    }
    memset(&is_used[dev->n_blocks], 0, more * sizeof *is_used);
    dev->n_blocks = n_blocks;
    return GM_OK;
}

/* Fails unless the machine has the memory of one more block. */
static gm_status check_available(host_device *dev)
{
    size_t bytes = dev->base.block_bytes;
    if (bytes <= dev->n_unseen) {
        return GM_OK;
    }
    dev->n_unseen = 0;
    GM_TRY(gm_host_available(&dev->available));
    GM_FAIL_IF(bytes > dev->available, GM_ERR_NOMEM,
               "host device: a block of %s wanted, %s of host memory available, %zu blocks held",
               gm_wanted(bytes).text, gm_there(dev->available).text, dev->n_used);
    dev->n_unseen = dev->available < LOOK_BYTES ? dev->available : LOOK_BYTES;
    return GM_OK;
}

/* Takes the pages now, so that memory that is not there fails here and not as a SIGBUS later. */
static gm_status give_pages(host_device *dev, size_t index)
{
    size_t bytes = dev->base.block_bytes;
    GM_TRY(check_available(dev));
    int failed;
    do {
        failed = fallocate(dev->fd, 0, (off_t)(index * bytes), (off_t)bytes);
    } while (failed && errno == EINTR);
    GM_FAIL_IF(failed && errno != EOPNOTSUPP && errno != ENOSYS,
               errno == ENOSPC || errno == ENOMEM ? GM_ERR_NOMEM : GM_ERR_DEVICE,
               "host device: a block of %s wanted, %s seemed available, but the kernel says: %s",
               gm_wanted(bytes).text, gm_there(dev->available).text, strerror(errno));
    dev->available -= bytes; /* which a look has covered */
    dev->n_unseen -= bytes < dev->n_unseen ? bytes : dev->n_unseen;
    return GM_OK;
}

/* The free block lowest in the file, so that blocks taken in a row are neighbours in the file and
 * one mmap maps them all: the number of mappings of a process is limited. */
static gm_status host_block_new(gm_device *base, gm_block *out)
{
    host_device *dev = as_host(base);
    GM_TRY(gm_check_process(dev->owner));
    size_t index = dev->first_free;
    while (index < dev->n_blocks && dev->is_used[index]) {
        index++;
    }
    if (index == dev->n_blocks) {
        GM_TRY(grow_file(dev));
    }
    GM_TRY(give_pages(dev, index));
    dev->is_used[index] = true;
    dev->first_free = index + 1;
    dev->n_used++;
    *out = index + 1;
    return GM_OK;
}

static bool is_block(const host_device *dev, gm_block block)
{
    return block >= 1 && block <= dev->n_blocks && dev->is_used[block - 1];
}

static void host_block_free(gm_device *base, gm_block block)
{
    host_device *dev = as_host(base);
    GM_ASSERT(is_block(dev, block));
    if (!is_block(dev, block) || dev->owner != getpid()) {
        return;
    }
    size_t index = (size_t)block - 1;
    /* Where a hole cannot be punched, the pages wait for the block's next owner. */
    (void)fallocate(dev->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                    (off_t)(index * base->block_bytes), (off_t)base->block_bytes);
    dev->is_used[index] = false;
    dev->first_free = index < dev->first_free ? index : dev->first_free;
    dev->n_used--;
}

/* ---- mapping ---- */

static gm_status map_run(host_device *dev, uintptr_t addr, gm_block first, size_t n)
{
    size_t bytes = n * dev->base.block_bytes;
    off_t offset = (off_t)((first - 1) * dev->base.block_bytes);
    /* The pages exist: populating writes the page table once instead of faulting on each. */
    void *mapped = mmap((void *)addr, bytes, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_FIXED | MAP_POPULATE, dev->fd, offset);
    if (mapped == MAP_FAILED) {
        return mmap_failed(bytes, errno);
    }
    GM_FAIL_IF(madvise(mapped, bytes, MADV_DONTFORK) != 0, GM_ERR_DEVICE,
               "host device: madvise(MADV_DONTFORK) on %zu bytes: %s", bytes, strerror(errno));
    return GM_OK;
}

static gm_status host_map(gm_device *base, uintptr_t addr, const gm_block *blocks, size_t n)
{
    host_device *dev = as_host(base);
    GM_TRY(check_inside_range(dev, "map", addr, n));
    for (size_t i = 0; i < n; i++) {
        GM_FAIL_IF(!is_block(dev, blocks[i]), GM_ERR_ARG,
                   "host device: map: block %zu of %zu (handle %llu) is not alive", i, n,
                   (unsigned long long)blocks[i]);
    }
    for (size_t i = 0, run; i < n; i += run) {
        for (run = 1; i + run < n && blocks[i + run] == blocks[i] + run; run++) {
        }
        gm_status status = map_run(dev, addr + i * base->block_bytes, blocks[i], run);
        if (status != GM_OK) {
            /* Half of the old and half of the new bytes must not be readable as data. */
            (void)mmap((void *)addr, n * base->block_bytes, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
            return status;
        }
    }
    return GM_OK;
}

static gm_status host_poison(gm_device *base, uintptr_t addr, size_t n_blocks)
{
    GM_TRY(check_inside_range(as_host(base), "poison", addr, n_blocks));
    return n_blocks ? map_nothing(addr, n_blocks * base->block_bytes) : GM_OK;
}

static gm_status host_unmap(gm_device *base, uintptr_t addr, size_t n_blocks)
{
    GM_TRY(check_inside_range(as_host(base), "unmap", addr, n_blocks));
    return n_blocks ? map_nothing(addr, n_blocks * base->block_bytes) : GM_OK;
}

/* ---- streams and events: names only, as all work is done when it is issued ---- */

static gm_status host_stream_new(gm_device *base, gm_stream *out)
{
    host_device *dev = as_host(base);
    dev->n_streams++;
    *out = ++dev->last_id;
    return GM_OK;
}

static void host_stream_free(gm_device *base, gm_stream stream)
{
    host_device *dev = as_host(base);
    GM_ASSERT(stream != 0 && stream <= dev->last_id && dev->n_streams > 0);
    dev->n_streams--;
}

static gm_status host_stream_sync(gm_device *base, gm_stream stream)
{
    GM_ASSERT(stream <= as_host(base)->last_id);
    return gm_check_process(as_host(base)->owner);
}

static gm_status timed_event_new(host_device *dev, gm_event *out)
{
    size_t slot = dev->first_free_timed;
    while (slot < dev->n_timed && dev->timed[slot].is_used) {
        slot++;
    }
    GM_TRY(
        GM_GROW(dev->timed, slot, dev->n_timed, "host memory: no room for a table of %zu events"));
    dev->timed[slot] = (timed_event){.is_used = true};
    dev->first_free_timed = slot + 1;
    *out = TIMED + slot;
    return GM_OK;
}

static gm_status host_event_new(gm_device *base, bool is_timed, gm_event *out)
{
    host_device *dev = as_host(base);
    if (is_timed) {
        GM_TRY(timed_event_new(dev, out));
    } else {
        *out = ++dev->last_id;
    }
    dev->n_events++;
    return GM_OK;
}

/* The slot of a timed event; NULL for any other. */
static timed_event *timed_of(const host_device *dev, gm_event event)
{
    bool is_timed = event >= TIMED && event - TIMED < dev->n_timed;
    return is_timed && dev->timed[event - TIMED].is_used ? &dev->timed[event - TIMED] : NULL;
}

static void host_event_free(gm_device *base, gm_event event)
{
    host_device *dev = as_host(base);
    timed_event *timed = timed_of(dev, event);
    GM_ASSERT((timed || (event != 0 && event <= dev->last_id)) && dev->n_events > 0);
    if (timed) {
        size_t slot = (size_t)(timed - dev->timed);
        timed->is_used = false;
        dev->first_free_timed = slot < dev->first_free_timed ? slot : dev->first_free_timed;
    }
    dev->n_events--;
}

static gm_status check_event(const host_device *dev, gm_event event)
{
    GM_FAIL_IF((event == 0 || event > dev->last_id) && !timed_of(dev, event), GM_ERR_ARG,
               "host device: %llu is not an event", (unsigned long long)event);
    return GM_OK;
}

static gm_status host_event_record(gm_device *base, gm_event event, gm_stream stream)
{
    GM_ASSERT(stream <= as_host(base)->last_id);
    GM_TRY(check_event(as_host(base), event));
    timed_event *timed = timed_of(as_host(base), event);
    if (timed) { /* all earlier work is done, so now is when the event is reached */
        timed->seconds = gm_seconds();
        timed->is_recorded = true;
    }
    return GM_OK;
}

static gm_status host_event_wait(gm_device *base, gm_event event, gm_stream stream)
{
    GM_ASSERT(stream <= as_host(base)->last_id);
    return check_event(as_host(base), event);
}

static gm_status host_event_sync(gm_device *base, gm_event event)
{
    return check_event(as_host(base), event);
}

static gm_status host_event_query(gm_device *base, gm_event event, bool *out)
{
    *out = true;
    return check_event(as_host(base), event);
}

static gm_status host_event_elapsed(gm_device *base, gm_event start, gm_event end, double *seconds)
{
    host_device *dev = as_host(base);
    const timed_event *from = timed_of(dev, start), *to = timed_of(dev, end);
    GM_FAIL_IF(!from || !to, GM_ERR_ARG, "host device: event %llu is not a timed event",
               (unsigned long long)(from ? end : start));
    GM_FAIL_IF(!from->is_recorded || !to->is_recorded, GM_ERR_STATE,
               "host device: timed event %llu was never recorded",
               (unsigned long long)((from->is_recorded ? end : start) - TIMED));
    *seconds = to->seconds - from->seconds;
    return GM_OK;
}

static gm_status host_host_call(gm_device *GM_UNUSED(base), void (*fn)(void *context),
                                void *context, gm_stream GM_UNUSED(stream))
{
    fn(context);
    return GM_OK;
}

/* ---- copies ---- */

static gm_status copy(gm_device *base, void *dst, const void *src, size_t bytes)
{
    GM_ASSERT((uintptr_t)dst + bytes <= (uintptr_t)src || (uintptr_t)src + bytes <= (uintptr_t)dst);
    gm_workers_copy(as_host(base)->pool, dst, src, bytes);
    return GM_OK;
}

static gm_status host_copy_h2d(gm_device *base, uintptr_t dst, const void *src, size_t bytes,
                               gm_stream GM_UNUSED(s))
{
    return copy(base, (void *)dst, src, bytes);
}

static gm_status host_copy_d2h(gm_device *base, void *dst, uintptr_t src, size_t bytes,
                               gm_stream GM_UNUSED(s))
{
    return copy(base, dst, (const void *)src, bytes);
}

static gm_status host_copy_d2d(gm_device *base, uintptr_t dst, uintptr_t src, size_t bytes,
                               gm_stream GM_UNUSED(s))
{
    return copy(base, (void *)dst, (const void *)src, bytes);
}

typedef struct fill_job {
    char *dst;
    uint8_t byte;
} fill_job;

static void fill_span(void *context, size_t begin, size_t end)
{
    const fill_job *job = context;
    memset(job->dst + begin, job->byte, end - begin);
}

static gm_status host_fill(gm_device *base, uintptr_t dst, uint8_t byte, size_t bytes,
                           gm_stream GM_UNUSED(s))
{
    fill_job job = {(char *)dst, byte};
    gm_workers_for(as_host(base)->pool, bytes, GM_COPY_GRAIN, fill_span, &job);
    return GM_OK;
}

/* ---- arithmetic ---- */

static gm_status host_adam(gm_device *base, const gm_adam_args *args, gm_stream GM_UNUSED(s))
{
    return gm_adam_host(args, as_host(base)->pool);
}

static gm_status host_grad_add(gm_device *base, const gm_grad_add_args *args, gm_sumsq *sum,
                               gm_stream GM_UNUSED(s))
{
    gm_grad_add_host(args, as_host(base)->pool);
    if (sum) {
        memset(sum, 0, sizeof *sum);
        gm_sumsq_host(args->dst, args->dst_dtype, args->numel, sum, as_host(base)->pool);
    }
    return GM_OK;
}

static gm_status host_sumsq(gm_device *base, const void *data, gm_dtype dtype, size_t numel,
                            gm_sumsq *sum, gm_stream GM_UNUSED(s))
{
    gm_sumsq_host(data, dtype, numel, sum, as_host(base)->pool);
    return GM_OK;
}

static gm_status host_clip(gm_device *GM_UNUSED(base), const gm_clip_args *args,
                           gm_stream GM_UNUSED(s))
{
    gm_clip_host(args);
    return GM_OK;
}

/* ---- the device itself ---- */

static gm_status host_pin(gm_device *GM_UNUSED(base), void *GM_UNUSED(region),
                          size_t GM_UNUSED(bytes))
{
    return GM_OK;
}

static void host_unpin(gm_device *GM_UNUSED(base), void *GM_UNUSED(region))
{
}

static gm_status host_memory(gm_device *GM_UNUSED(base), size_t *free_bytes, size_t *total_bytes)
{
    return gm_host_memory_at("", free_bytes, total_bytes);
}

static void host_free(gm_device *base)
{
    host_device *dev = as_host(base);
    if (!dev) {
        return;
    }
    /* In a forked child blocks stay: they are the parent's. */
    GM_ASSERT(dev->owner != getpid() || (dev->n_used == 0 && dev->n_ranges == 0));
    GM_ASSERT(dev->n_streams == 0 && dev->n_events == 0);
    if (dev->fd >= 0) {
        close(dev->fd);
    }
    free(dev->timed);
    free(dev->ranges);
    free(dev->is_used);
    free(dev);
}

static const gm_device_ops host_ops = {GM_DEVICE_OPS(host, host, host, host)};

size_t gm_device_host_granularity(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

gm_status gm_device_host_new(size_t block_bytes, gm_workers *pool, gm_device **out)
{
    size_t granularity = gm_device_host_granularity();
    GM_FAIL_IF(block_bytes == 0 || block_bytes > SIZE_MAX / 2, GM_ERR_ARG,
               "block_bytes is %zu: a size from 1 to %zu is wanted", block_bytes, SIZE_MAX / 2);
    host_device *dev;
    GM_TRY(GM_NEW(dev, "host memory: no room for a device's own %zu bytes"));
    dev->base = (gm_device){.ops = &host_ops,
                            .granularity = granularity,
                            .block_bytes = gm_round_up(block_bytes, granularity),
                            .is_host = 1};
    dev->pool = pool;
    dev->owner = getpid();
    dev->fd = memfd_create("gemini-blocks", MFD_CLOEXEC);
    if (dev->fd < 0) {
        gm_status status = GM_FAIL(GM_ERR_DEVICE, "host device: memfd_create: %s", strerror(errno));
        host_free(&dev->base);
        return status;
    }
    *out = &dev->base;
    return GM_OK;
}
