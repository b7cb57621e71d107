/* paper.c - see paper.h.
 *
 * 1. No address that it gives can be read or written on any machine: a use of one faults.
 * 2. A timed event carries the told time at its latest record. */
#include "device/paper.h"

#include <stdlib.h>
#include <string.h>

#include "device/ops.h"

/* Between what user space and the kernel may have. */
#define FIRST_ADDRESS    ((uintptr_t)1 << 56)
#define CUDA_GRANULARITY ((size_t)2 << 20)

typedef struct paper_device {
    gm_device base; /* first: a gm_device * is a paper_device * */
    uintptr_t next_address;
    uint64_t last_id; /* of streams, blocks and events; never used twice */
    double seconds;   /* that were told so far */
    double *recorded; /* (capacity,) by event */
    size_t capacity;
} paper_device;

static paper_device *as_paper(gm_device *dev)
{
    return (paper_device *)dev;
}

void gm_device_paper_elapse(gm_device *dev, double seconds)
{
    as_paper(dev)->seconds += seconds;
}

static void paper_free(gm_device *dev)
{
    if (dev) {
        free(as_paper(dev)->recorded);
        free(dev);
    }
}

static gm_status paper_range_new(gm_device *dev, size_t bytes, uintptr_t *out)
{
    *out = as_paper(dev)->next_address;
    as_paper(dev)->next_address += bytes;
    return GM_OK;
}

static void paper_range_free(gm_device *GM_UNUSED(dev), uintptr_t GM_UNUSED(addr),
                             size_t GM_UNUSED(bytes))
{
}

static gm_status new_id(gm_device *dev, uint64_t *out)
{
    *out = ++as_paper(dev)->last_id;
    return GM_OK;
}

static void free_id(gm_device *GM_UNUSED(dev), uint64_t GM_UNUSED(id))
{
}

static gm_status paper_map(gm_device *GM_UNUSED(dev), uintptr_t GM_UNUSED(addr),
                           const gm_block *GM_UNUSED(blocks), size_t GM_UNUSED(n))
{
    return GM_OK;
}

static gm_status paper_unmap(gm_device *dev, uintptr_t addr, size_t n_blocks)
{
    return paper_map(dev, addr, NULL, n_blocks);
}

static gm_status paper_stream_sync(gm_device *GM_UNUSED(dev), gm_stream GM_UNUSED(stream))
{
    return GM_OK;
}

static gm_status paper_event_new(gm_device *dev, bool is_timed, gm_event *out)
{
    paper_device *self = as_paper(dev);
    GM_TRY(new_id(dev, out));
    if (is_timed && *out >= self->capacity) {
        size_t capacity = 2 * (size_t)*out;
        double *grown = realloc(self->recorded, capacity * sizeof *grown);
        GM_FAIL_IF(!grown, GM_ERR_NOMEM, "HOST: a table of %zu events", capacity);
        memset(&grown[self->capacity], 0, (capacity - self->capacity) * sizeof *grown);
        self->recorded = grown;
        self->capacity = capacity;
    }
    return GM_OK;
}

static gm_status paper_event_record(gm_device *dev, gm_event event, gm_stream GM_UNUSED(stream))
{
    if (event < as_paper(dev)->capacity) {
        as_paper(dev)->recorded[event] = as_paper(dev)->seconds;
    }
    return GM_OK;
}

static gm_status paper_event_wait(gm_device *dev, gm_event GM_UNUSED(event), gm_stream stream)
{
    return paper_stream_sync(dev, stream);
}

static gm_status paper_event_query(gm_device *dev, gm_event event, bool *out)
{
    *out = true;
    return paper_stream_sync(dev, event);
}

static gm_status paper_event_elapsed(gm_device *dev, gm_event start, gm_event end, double *seconds)
{
    const paper_device *self = as_paper(dev);
    GM_FAIL_IF(start >= self->capacity || end >= self->capacity, GM_ERR_ARG,
               "paper device: event %llu is not a timed event",
               (unsigned long long)(start >= self->capacity ? start : end));
    *seconds = self->recorded[end] - self->recorded[start];
    return GM_OK;
}

static gm_status paper_host_call(gm_device *dev, void (*fn)(void *context),
                                 void *GM_UNUSED(context), gm_stream stream)
{
    (void)fn;
    return paper_stream_sync(dev, stream);
}

static gm_status paper_copy_h2d(gm_device *dev, uintptr_t GM_UNUSED(dst),
                                const void *GM_UNUSED(src), size_t GM_UNUSED(bytes), gm_stream s)
{
    return paper_stream_sync(dev, s);
}

static gm_status paper_copy_d2h(gm_device *dev, void *dst, uintptr_t src, size_t bytes, gm_stream s)
{
    return paper_copy_h2d(dev, src, dst, bytes, s);
}

static gm_status paper_copy_d2d(gm_device *dev, uintptr_t dst, uintptr_t GM_UNUSED(src),
                                size_t bytes, gm_stream s)
{
    return paper_copy_h2d(dev, dst, NULL, bytes, s);
}

static gm_status paper_fill(gm_device *dev, uintptr_t dst, uint8_t GM_UNUSED(byte), size_t bytes,
                            gm_stream s)
{
    return paper_copy_h2d(dev, dst, NULL, bytes, s);
}

static gm_status paper_adam(gm_device *dev, const gm_adam_args *GM_UNUSED(args), gm_stream s)
{
    return paper_stream_sync(dev, s);
}

static gm_status paper_grad_add(gm_device *dev, const gm_grad_add_args *GM_UNUSED(args),
                                gm_sumsq *GM_UNUSED(sum), gm_stream s)
{
    return paper_stream_sync(dev, s);
}

static gm_status paper_sumsq(gm_device *dev, const void *GM_UNUSED(data), gm_dtype GM_UNUSED(dtype),
                             size_t GM_UNUSED(numel), gm_sumsq *GM_UNUSED(sum), gm_stream s)
{
    return paper_stream_sync(dev, s);
}

static gm_status paper_clip(gm_device *dev, const gm_clip_args *GM_UNUSED(args), gm_stream s)
{
    return paper_stream_sync(dev, s);
}

static gm_status paper_pin(gm_device *GM_UNUSED(dev), void *GM_UNUSED(base),
                           size_t GM_UNUSED(bytes))
{
    return GM_OK;
}

static void paper_unpin(gm_device *GM_UNUSED(dev), void *GM_UNUSED(base))
{
}

/* As much as anybody asks for: budgets are what bounds. */
static gm_status paper_memory(gm_device *GM_UNUSED(dev), size_t *free_bytes, size_t *total_bytes)
{
    *free_bytes = *total_bytes = (size_t)1 << 60;
    return GM_OK;
}

/* Operations of one body. */
#define paper_block_new   new_id
#define paper_stream_new  new_id
#define paper_block_free  free_id
#define paper_stream_free free_id
#define paper_event_free  free_id
#define paper_event_sync  paper_stream_sync
#define paper_poison      paper_unmap

static const gm_device_ops paper_ops = {GM_DEVICE_OPS(paper, paper, paper, paper)};

gm_status gm_device_paper_new(size_t block_bytes, bool is_host, size_t host_bytes, gm_device **out)
{
    size_t granularity = is_host ? gm_device_host_granularity() : CUDA_GRANULARITY;
    paper_device *dev;
    GM_TRY(GM_NEW(dev, "HOST: a device of %zu bytes"));
    dev->base = (gm_device){.ops = &paper_ops,
                            .granularity = granularity,
                            .block_bytes = gm_round_up(block_bytes, granularity),
                            .is_host = is_host,
                            .is_paper = true,
                            .host_bytes = host_bytes};
    dev->next_address = FIRST_ADDRESS;
    *out = &dev->base;
    return GM_OK;
}
