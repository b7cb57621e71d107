/* device.h - the little that the engine needs of a device: address ranges, blocks of physical
 * memory, streams, events, copies, and the arithmetic of arith.h on device memory.
 *
 * Implementations: gm_device_host_new (memfd + mmap aliasing, streams run at once),
 * gm_device_cuda_new (driver API), gm_device_paper_new (paper.h) and what another library makes
 * (library.h).  A device knows no chunk, no plan and no reason why.
 *
 * Threads: any thread may call, one at a time (the engine holds its lock).
 * Ordering: work on one stream runs in issue order; across streams only events order it.
 * Copies and kernels are asynchronous to the host; *_sync functions and block/map calls may
 * wait. */
#pragma once

#include "arith/arith.h"
#include "base/base.h"

typedef struct gm_device gm_device;
typedef uint64_t gm_stream; /* a CUstream as an integer (torch's own too); 0 = default stream */
typedef uint64_t gm_event;  /* opaque, 0 = none */
typedef uint64_t gm_block;  /* physical memory handle, opaque, 0 = none */

#define GM_STREAM_HOST UINT64_MAX /* for note_access: not a stream, the host itself */

typedef struct gm_device_ops {
    const char *name; /* "host", "cuda", "paper" */

    void (*free)(gm_device *dev); /* NULL is fine; blocks, ranges, streams must be gone before */

    /* Address ranges: reserved once, mapped onto blocks, never moved.  bytes is a multiple of the
     * granularity. A fresh range is unmapped. */
    gm_status (*range_new)(gm_device *dev, size_t bytes, uintptr_t *out);
    void (*range_free)(gm_device *dev, uintptr_t addr, size_t bytes); /* unmaps what is mapped */

    /* Blocks: every block of one device has the same size (given at gm_device_*_new). */
    gm_status (*block_new)(gm_device *dev, gm_block *out); /* GM_ERR_NOMEM: the device is full */
    void (*block_free)(gm_device *dev, gm_block block);    /* must be mapped nowhere */

    /* Maps n consecutive blocks' worth of [addr, addr + n * block_bytes) onto blocks[0..n),
     * replacing what was mapped there.  No work may be in flight on that range. */
    gm_status (*map)(gm_device *dev, uintptr_t addr, const gm_block *blocks, size_t n);
    /* Makes the range unreadable as data: host: PROT_NONE; cuda: one shared block full of NaN bytes
     * (0xff). */
    gm_status (*poison)(gm_device *dev, uintptr_t addr, size_t n_blocks);
    /* Unmaps; range_free does so by itself. */
    gm_status (*unmap)(gm_device *dev, uintptr_t addr, size_t n_blocks);

    gm_status (*stream_new)(gm_device *dev, gm_stream *out);
    void (*stream_free)(gm_device *dev, gm_stream stream);
    gm_status (*stream_sync)(gm_device *dev, gm_stream stream); /* host waits */
    /* is_timed: may be given to event_elapsed. */
    gm_status (*event_new)(gm_device *dev, bool is_timed, gm_event *out);
    void (*event_free)(gm_device *dev, gm_event event);
    gm_status (*event_record)(gm_device *dev, gm_event event, gm_stream stream);
    gm_status (*event_wait)(gm_device *dev, gm_event event, gm_stream stream); /* stream waits */
    gm_status (*event_sync)(gm_device *dev, gm_event event);                   /* host waits */
    /* Whether it has come, without waiting; what comes before it is then seen by the host.  It may
     * still say no. */
    gm_status (*event_query)(gm_device *dev, gm_event event, bool *out);
    /* Seconds between two timed events that both were recorded; the host waits for the later
     * one. */
    gm_status (*event_elapsed)(gm_device *dev, gm_event start, gm_event end, double *seconds);

    /* Runs fn(context) on a host thread once everything before it on `stream` is done; later work
     * of the stream waits for its end.  fn must not call the device, nor take a lock that a caller
     * of the device may hold, nor wait for such a thread: where the device is host memory, it runs
     * inside a call of the device. */
    gm_status (*host_call)(gm_device *dev, void (*fn)(void *context), void *context,
                           gm_stream stream);

    gm_status (*copy_h2d)(gm_device *dev, uintptr_t dst, const void *src, size_t bytes,
                          gm_stream s);
    gm_status (*copy_d2h)(gm_device *dev, void *dst, uintptr_t src, size_t bytes, gm_stream s);
    gm_status (*copy_d2d)(gm_device *dev, uintptr_t dst, uintptr_t src, size_t bytes, gm_stream s);
    gm_status (*fill)(gm_device *dev, uintptr_t dst, uint8_t byte, size_t bytes, gm_stream s);

    /* arith.h on device memory; pointers inside args are device addresses (ranges[] is host memory
     * and may be reused as soon as the call returns). */
    gm_status (*adam)(gm_device *dev, const gm_adam_args *args, gm_stream s);
    /* sum: NULL, or device memory (16-byte aligned) that is overwritten with the exact sum of
     * squares (and non-finite counts) of the numel results, in the same pass over the data. */
    gm_status (*grad_add)(gm_device *dev, const gm_grad_add_args *args, gm_sumsq *sum, gm_stream s);
    /* *sum is device memory (sizeof(gm_sumsq) bytes, 16-byte aligned), added to. */
    gm_status (*sumsq)(gm_device *dev, const void *data, gm_dtype dtype, size_t numel,
                       gm_sumsq *sum, gm_stream s);

    /* gm_clip_host on device memory. */
    gm_status (*clip)(gm_device *dev, const gm_clip_args *args, gm_stream s);

    /* Host memory that copies use: registers (pins) a region; no-op on the host device. */
    gm_status (*pin)(gm_device *dev, void *base, size_t bytes);
    void (*unpin)(gm_device *dev, void *base);

    /* Says that bytes are used in a way that the device cannot see: by the caller itself, now
     * (GM_STREAM_HOST); by foreign work that the compute stream has now (0); or, given a stream
     * that stream_new made, by the function of the next host_call issued on it.  Only a device that
     * checks the order of accesses has it: NULL in all others, so call gm_note_access. */
    void (*note_access)(gm_device *dev, const void *address, size_t bytes, bool is_write,
                        gm_stream stream);

    /* Whole device, the driver's figures.  Host: total = the budget-independent machine memory. */
    gm_status (*memory)(gm_device *dev, size_t *free_bytes, size_t *total_bytes);
} gm_device_ops;

struct gm_device {
    const gm_device_ops *ops;
    size_t granularity; /* bytes; blocks and ranges are multiples of it */
    size_t block_bytes;
    int is_host;       /* device memory is host memory: pointers may be dereferenced */
    bool is_paper;     /* neither its memory nor the homes beside it have bytes (device/paper.h) */
    size_t host_bytes; /* on paper: of a host that has nothing of the engine's yet; else 0 */
};

static inline void gm_note_access(gm_device *dev, const void *address, size_t bytes, bool is_write,
                                  gm_stream stream)
{
    if (dev->ops->note_access) {
        dev->ops->note_access(dev, address, bytes, is_write, stream);
    }
}

/* Each does nothing where there is none, and there is none afterwards. */
static inline void gm_free_event(gm_device *dev, gm_event *event)
{
    if (*event) {
        dev->ops->event_free(dev, *event);
        *event = 0;
    }
}

static inline void gm_free_stream(gm_device *dev, gm_stream *stream)
{
    if (*stream) {
        dev->ops->stream_free(dev, *stream);
        *stream = 0;
    }
}

/* block_bytes is rounded up to the granularity (host: page size; cuda: 2 MiB as the driver
 * says). */
gm_status gm_device_host_new(size_t block_bytes, gm_workers *pool, gm_device **out);
/* ordinal: CUDA device index; uses its primary context (torch's).  GM_ERR_UNSUPPORTED, with the
 * reason, in a build without CUDA, without a driver, or without virtual memory management. */
gm_status gm_device_cuda_new(int ordinal, size_t block_bytes, gm_device **out);
/* The driver's granularity without making a device. */
size_t gm_device_host_granularity(void);
