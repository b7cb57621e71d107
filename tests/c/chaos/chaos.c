/* chaos.c - the chaos device: its operations, and how each is checked and queued.
 *
 * 1. An operation's clock joins what its stream has done, what its stream was made to wait for, and what the host
 *    knew when it issued it; the host learns only by waiting.  This does not depend on what has run.
 * 2. Work of stream 0 has run when its call returns; nothing is ever queued there.
 * 3. A forked child runs nothing: the inner device refuses by name. */
#include "chaos/chaos_impl.h"

#include <stdlib.h>
#include <string.h>

/* ---- issuing ---- */

/* The seeded faults that change an operation, not its order. */
static void spoil(gm_chaos_device *dev, gm_chaos_op *op, bool is_compute)
{
    switch (op->kind) {
    case GM_CHAOS_COPY_H2D: op->is_dropped = gm_chaos_pick(dev, GM_CHAOS_NO_H2D); break;
    case GM_CHAOS_COPY_D2H: op->is_dropped = gm_chaos_pick(dev, GM_CHAOS_NO_D2H); break;
    case GM_CHAOS_ADAM: op->is_twice = gm_chaos_pick(dev, GM_CHAOS_ADAM_TWICE); break;
    case GM_CHAOS_HOST_CALL:
        if (!is_compute) {
            op->is_early = gm_chaos_pick(dev, GM_CHAOS_EARLY_CALL);
            op->is_released = gm_chaos_pick(dev, GM_CHAOS_EARLY_RELEASE);
        }
        break;
    default: break;
    }
    if (op->kind <= GM_CHAOS_COPY_D2D && op->bytes > 1 && gm_chaos_pick(dev, GM_CHAOS_HALF_COPY)) {
        op->bytes /= 2;
    }
}

/* Takes the operation over; `status` is that of making it. */
static gm_status issue(gm_chaos_device *dev, gm_chaos_op *op, gm_status status, gm_stream stream)
{
    gm_chaos_queue *queue;
    GM_TRY_ELSE(status, gm_chaos_op_free(op));
    GM_TRY_ELSE(gm_chaos_find_queue(dev, stream, &queue), gm_chaos_op_free(op));
    gm_chaos_wander(dev);
    bool is_compute = gm_chaos_number(dev, queue) == GM_CHAOS_COMPUTE;
    bool must_end = op->has_foreign_host && !is_compute;
    spoil(dev, op, is_compute);
    if (!is_compute && !must_end && !queue->held && gm_chaos_pick(dev, GM_CHAOS_SWAP)) {
        queue->held = op;
        return GM_OK;
    }
    GM_TRY(gm_chaos_put(dev, queue, op));
    GM_TRY(gm_chaos_put_held(dev, queue));
    if (must_end) {
        gm_chaos_run_queue(dev, queue);
    }
    return GM_OK;
}

static gm_status new_op(gm_device *base, gm_chaos_kind kind, gm_chaos_op **out)
{
    GM_TRY(gm_chaos_check_owner(gm_chaos_self(base)));
    return gm_chaos_op_new(gm_chaos_self(base), kind, out);
}

static gm_status copy(gm_device *base, gm_chaos_kind kind, uintptr_t dst, uintptr_t src,
                      size_t bytes, gm_stream stream)
{
    gm_chaos_device *dev = gm_chaos_self(base);
    gm_chaos_op *op;
    GM_TRY(new_op(base, kind, &op));
    op->dst = dst;
    op->src = src;
    op->bytes = bytes;
    uintptr_t host = kind == GM_CHAOS_COPY_H2D ? src : dst;
    op->has_foreign_host =
        kind != GM_CHAOS_COPY_D2D && bytes > 0 && !gm_chaos_is_pinned(dev, host, bytes);
    gm_status status = gm_chaos_add_use(op, (const void *)src, bytes, false);
    status = status == GM_OK ? gm_chaos_add_use(op, (const void *)dst, bytes, true) : status;
    return issue(dev, op, status, stream);
}

static gm_status chaos_copy_h2d(gm_device *base, uintptr_t dst, const void *src, size_t bytes,
                                gm_stream s)
{
    return copy(base, GM_CHAOS_COPY_H2D, dst, (uintptr_t)src, bytes, s);
}

static gm_status chaos_copy_d2h(gm_device *base, void *dst, uintptr_t src, size_t bytes,
                                gm_stream s)
{
    return copy(base, GM_CHAOS_COPY_D2H, (uintptr_t)dst, src, bytes, s);
}

static gm_status chaos_copy_d2d(gm_device *base, uintptr_t dst, uintptr_t src, size_t bytes,
                                gm_stream s)
{
    return copy(base, GM_CHAOS_COPY_D2D, dst, src, bytes, s);
}

static gm_status chaos_fill(gm_device *base, uintptr_t dst, uint8_t byte, size_t bytes, gm_stream s)
{
    gm_chaos_op *op;
    GM_TRY(new_op(base, GM_CHAOS_FILL, &op));
    op->dst = dst;
    op->byte = byte;
    op->bytes = bytes;
    gm_status status = gm_chaos_add_use(op, (const void *)dst, bytes, true);
    return issue(gm_chaos_self(base), op, status, s);
}

static const void *element(const void *array, size_t index, size_t element_bytes)
{
    return (const void *)((uintptr_t)array + index * element_bytes);
}

static gm_status add_adam_uses(gm_chaos_op *op)
{
    const gm_adam_args *args = &op->adam;
    size_t weight_bytes = gm_dtype_bytes(args->format);
    size_t low_bytes = args->format == GM_BF16 ? 2 : 4,
           grad_bytes = gm_dtype_bytes(args->grad_dtype);
    for (size_t i = 0, next; i < args->n_ranges; i = next) {
        size_t begin = args->ranges[i].begin, end = args->ranges[i].end;
        for (next = i + 1; next < args->n_ranges && args->ranges[next].begin == end; next++) {
            end = args->ranges[next].end;
        }
        size_t n = end - begin;
        GM_TRY(gm_chaos_add_use(op, element(args->grad, begin, grad_bytes), n * grad_bytes, false));
        GM_TRY(gm_chaos_add_use(op, element(args->weight, begin, weight_bytes), n * weight_bytes,
                                true));
        if (args->low) {
            GM_TRY(gm_chaos_add_use(op, element(args->low, begin, low_bytes), n * low_bytes, true));
        }
        GM_TRY(gm_chaos_add_use(op, element(args->m, begin, 4), n * 4, true));
        GM_TRY(gm_chaos_add_use(op, element(args->v, begin, 4), n * 4, true));
    }
    return GM_OK;
}

static gm_status chaos_adam(gm_device *base, const gm_adam_args *args, gm_stream s)
{
    gm_chaos_op *op;
    GM_TRY(new_op(base, GM_CHAOS_ADAM, &op));
    op->adam = *args;
    op->ranges = malloc((args->n_ranges ? args->n_ranges : 1) * sizeof *op->ranges);
    gm_status status = GM_ERR_NOMEM;
    if (!op->ranges) {
        status = GM_FAIL(GM_ERR_NOMEM, "host memory: no room for %zu ranges", args->n_ranges);
    } else {
        if (args->n_ranges) { /* the caller may reuse its own as soon as the call returns */
            memcpy(op->ranges, args->ranges, args->n_ranges * sizeof *op->ranges);
        }
        op->adam.ranges = op->ranges;
        status = add_adam_uses(op);
        status = status == GM_OK && args->grad_scale
                     ? gm_chaos_add_use(op, args->grad_scale, sizeof *args->grad_scale, false)
                     : status;
    }
    return issue(gm_chaos_self(base), op, status, s);
}

static gm_status chaos_grad_add(gm_device *base, const gm_grad_add_args *args, gm_sumsq *sum,
                                gm_stream s)
{
    gm_chaos_op *op;
    GM_TRY(new_op(base, GM_CHAOS_GRAD_ADD, &op));
    op->grad_add = *args;
    op->sum = sum;
    gm_status status =
        gm_chaos_add_use(op, args->src, args->numel * gm_dtype_bytes(args->src_dtype), false);
    status = status == GM_OK ? gm_chaos_add_use(op, args->dst,
                                                args->numel * gm_dtype_bytes(args->dst_dtype), true)
                             : status;
    status = status == GM_OK && sum ? gm_chaos_add_use(op, sum, sizeof *sum, true) : status;
    return issue(gm_chaos_self(base), op, status, s);
}

static gm_status chaos_sumsq(gm_device *base, const void *data, gm_dtype dtype, size_t numel,
                             gm_sumsq *sum, gm_stream s)
{
    gm_chaos_op *op;
    GM_TRY(new_op(base, GM_CHAOS_SUMSQ, &op));
    op->src = (uintptr_t)data;
    op->dtype = dtype;
    op->numel = numel;
    op->sum = sum;
    gm_status status = gm_chaos_add_use(op, data, numel * gm_dtype_bytes(dtype), false);
    status = status == GM_OK ? gm_chaos_add_use(op, sum, sizeof *sum, true) : status;
    return issue(gm_chaos_self(base), op, status, s);
}

static gm_status chaos_clip(gm_device *base, const gm_clip_args *args, gm_stream s)
{
    gm_chaos_op *op;
    GM_TRY(new_op(base, GM_CHAOS_CLIP, &op));
    op->clip = *args;
    gm_status status = gm_chaos_add_use(op, args->sums, args->n * sizeof *args->sums, false);
    const void *out = args->total ? (const void *)args->total : args->out;
    size_t bytes = args->total ? sizeof *args->total : sizeof *args->out;
    status = status == GM_OK ? gm_chaos_add_use(op, out, bytes, true) : status;
    return issue(gm_chaos_self(base), op, status, s);
}

static gm_status chaos_host_call(gm_device *base, void (*fn)(void *context), void *context,
                                 gm_stream stream)
{
    gm_chaos_device *dev = gm_chaos_self(base);
    gm_chaos_queue *queue;
    GM_TRY(gm_chaos_check_owner(dev));
    GM_TRY(gm_chaos_find_queue(dev, stream, &queue));
    gm_chaos_op *op = queue->noted;
    if (op) {
        op->number = ++dev->last_number;
        queue->noted = NULL;
    } else {
        GM_TRY(gm_chaos_op_new(dev, GM_CHAOS_HOST_CALL, &op));
    }
    op->fn = fn;
    op->context = context;
    return issue(dev, op, GM_OK, stream);
}

/* ---- accesses that the device does not make ---- */

static gm_status note_host(gm_chaos_device *dev, const void *address, size_t bytes, bool is_write)
{
    gm_chaos_op *op;
    GM_TRY(gm_chaos_op_new(dev, GM_CHAOS_FOREIGN, &op));
    gm_status status = gm_chaos_add_use(op, address, bytes, is_write);
    if (status == GM_OK) {
        gm_chaos_wander(dev);
        gm_chaos_host_clock(dev)->tick[GM_CHAOS_HOST]++;
        status = gm_chaos_track(dev, op, GM_CHAOS_HOST, gm_chaos_host_clock(dev));
    }
    gm_chaos_op_free(op);
    return status;
}

static gm_status note_work(gm_chaos_device *dev, const void *address, size_t bytes, bool is_write,
                           gm_stream stream)
{
    gm_chaos_queue *queue;
    GM_TRY(gm_chaos_find_queue(dev, stream, &queue));
    if (gm_chaos_number(dev, queue) != GM_CHAOS_COMPUTE) {
        if (!queue->noted) {
            GM_TRY(gm_chaos_op_new(dev, GM_CHAOS_HOST_CALL, &queue->noted));
        }
        return gm_chaos_add_use(queue->noted, address, bytes, is_write);
    }
    gm_chaos_op *op;
    GM_TRY(gm_chaos_op_new(dev, GM_CHAOS_FOREIGN, &op));
    return issue(dev, op, gm_chaos_add_use(op, address, bytes, is_write), stream);
}

static void chaos_note_access(gm_device *base, const void *address, size_t bytes, bool is_write,
                              gm_stream stream)
{
    gm_chaos_device *dev = gm_chaos_self(base);
    gm_status status = gm_chaos_check_owner(dev);
    if (status == GM_OK) {
        status = stream == GM_STREAM_HOST ? note_host(dev, address, bytes, is_write)
                                          : note_work(dev, address, bytes, is_write, stream);
    }
    gm_chaos_keep_failure(dev, status); /* the caller learns it at its next wait */
}

/* ---- the device itself ---- */

static void chaos_free(gm_device *base)
{
    gm_chaos_device *dev = gm_chaos_self(base);
    if (!dev) {
        return;
    }
    for (uint32_t i = 0; i < GM_CHAOS_N_QUEUES; i++) {
        GM_ASSERT(i < GM_CHAOS_FIRST_STREAM || !dev->queues[i].is_used);
        gm_chaos_drop_queue(dev, &dev->queues[i]);
    }
    for (size_t i = 0; i < dev->n_events; i++) {
        GM_ASSERT(!dev->events[i].is_used);
        gm_chaos_mark_unref(dev->events[i].latest);
    }
    GM_ASSERT(dev->n_ranges == 0 && dev->n_pinned == 0);
    while (dev->n_ranges > 0) {
        gm_chaos_range_remove(dev, dev->ranges[0].address);
    }
    if (dev->view) {
        dev->inner->ops->range_free(dev->inner, dev->view, base->block_bytes);
    }
    if (dev->inner) {
        dev->inner->ops->free(dev->inner);
    }
    gm_order_free(dev->bytes);
    gm_order_free(dev->shown);
    free(dev->events);
    free(dev->ranges);
    free(dev->pinned);
    free(dev);
}

static const gm_device_ops chaos_ops = {.note_access = chaos_note_access,
                                        GM_DEVICE_OPS(chaos, gm_chaos, gm_chaos, chaos)};

gm_status gm_device_chaos_new(size_t block_bytes, gm_workers *pool, const gm_chaos_options *options,
                              gm_device **out)
{
    GM_FAIL_IF(options->fault < 0 || options->fault >= GM_CHAOS_N_FAULTS, GM_ERR_ARG,
               "chaos device: fault %d is none of 0 to %d", (int)options->fault,
               GM_CHAOS_N_FAULTS - 1);
    gm_chaos_device *dev;
    GM_TRY(GM_NEW(dev, "host memory: no room for a device's own %zu bytes"));
    gm_status status;
    dev->base.ops = &chaos_ops;
    dev->options = *options;
    dev->random = options->seed;
    for (uint32_t i = 0; i < GM_CHAOS_N_QUEUES; i++) {
        dev->queues[i].speed = 1;
    }
    dev->queues[GM_CHAOS_COMPUTE].is_used = true; /* as stream 0 */
    GM_TRY_GOTO(status, fail, gm_device_host_new(block_bytes, pool, &dev->inner));
    dev->base.granularity = dev->inner->granularity;
    dev->base.block_bytes = dev->inner->block_bytes;
    dev->base.is_host = dev->inner->is_host;
    GM_TRY_GOTO(status, fail,
                dev->inner->ops->range_new(dev->inner, dev->base.block_bytes, &dev->view));
    GM_TRY_GOTO(status, fail, gm_order_new(&dev->bytes));
    GM_TRY_GOTO(status, fail, gm_order_new(&dev->shown));
    *out = &dev->base;
    return GM_OK;
fail:
    chaos_free(&dev->base); /* every member is NULL, 0 or live */
    return status;
}

static gm_status check_chaos(const gm_device *dev)
{
    return dev->ops == &chaos_ops
               ? GM_OK
               : GM_FAIL(GM_ERR_ARG, "\"%s\" is not a chaos device", dev->ops->name);
}

gm_status gm_device_chaos_faults(gm_device *base, uint32_t *out_n, const char **out_first)
{
    GM_TRY(check_chaos(base));
    *out_n = gm_chaos_self(base)->n_faults;
    *out_first = gm_chaos_self(base)->first_fault;
    return GM_OK;
}

gm_status gm_device_chaos_stats(gm_device *base, gm_chaos_stats *out)
{
    GM_TRY(check_chaos(base));
    const gm_chaos_device *dev = gm_chaos_self(base);
    *out = (gm_chaos_stats){.n_operations = dev->n_run,
                            .order_hash = dev->order_hash,
                            .n_faults_applied = dev->n_applied,
                            .n_queued = dev->n_queued,
                            .n_spans = gm_order_n_spans(dev->bytes) + gm_order_n_spans(dev->shown)};
    return GM_OK;
}
