/* gather.c - gradients as they arrive from autograd, and their exact norm.
 *
 * A gradient is torch's memory and may be reused behind the work of the caller's stream: it is packed into the chunk's
 * own gradient on that stream, and never crosses to another.  The same kernel leaves the exact sum of squares of
 * what it wrote, once somebody has asked for the norm.
 *
 * The host may wait in: add_at_home (a gradient that is added to one at home, on demand), gm_engine_sumsq. */
#include <stdlib.h>
#include <string.h>

#include "engine/engine_impl.h"

gm_status gm_gather_new(gm_engine *engine)
{
    gm_device *device = engine->device;
    size_t bytes = gm_sums_bytes(engine);
    if (device->is_host) {
        engine->sums = calloc(1, bytes);
        engine->sums_home = engine->sums;
        return engine->sums ? GM_OK : GM_FAIL(GM_ERR_NOMEM, "HOST: %zu bytes of sums", bytes);
    }
    size_t n = gm_round_up(bytes, device->block_bytes) / device->block_bytes;
    uintptr_t address;
    engine->sums_blocks = calloc(n, sizeof *engine->sums_blocks);
    if (!engine->sums_blocks) {
        return GM_FAIL(GM_ERR_NOMEM, "HOST: %zu blocks of sums", n);
    }
    GM_TRY(device->ops->range_new(device, n * device->block_bytes, &address));
    engine->sums = (gm_sumsq *)address;
    for (; engine->n_sums_blocks < n; engine->n_sums_blocks++) {
        GM_TRY(device->ops->block_new(device, &engine->sums_blocks[engine->n_sums_blocks]));
    }
    return device->ops->map(device, address, engine->sums_blocks, n);
}

void gm_gather_free(gm_engine *engine)
{
    gm_device *device = engine->device;
    if (device && device->is_host) {
        free(engine->sums);
        return;
    }
    size_t n = gm_round_up(gm_sums_bytes(engine), device ? device->block_bytes : 1);
    if (engine->sums) {
        device->ops->range_free(device, (uintptr_t)engine->sums, n);
    }
    for (size_t i = 0; i < engine->n_sums_blocks; i++) {
        device->ops->block_free(device, engine->sums_blocks[i]);
    }
    free(engine->sums_blocks);
}

/* ---- arrival ---- */

/* Device memory -> home through the staging area, converting and adding on the host, slice by slice. */
static gm_status add_at_home(gm_engine *engine, uint32_t chunk, gm_grad_add_args *args,
                             gm_stream stream)
{
    gm_device *device = engine->device;
    size_t src_bytes = gm_dtype_bytes(args->src_dtype), dst_bytes = gm_dtype_bytes(args->dst_dtype);
    size_t slice = GM_STAGING_BYTES / src_bytes, numel = args->numel;
    uintptr_t src = (uintptr_t)args->src;
    uint8_t *dst = args->dst;
    GM_TRY(gm_chunks_claim_home(engine->chunks, chunk, GM_GRAD));
    if (device->is_host && gm_shard_has_unreduced(engine)) { /* it comes of a collective */
        GM_TRY(device->ops->stream_sync(device, stream));
    }
    for (size_t done = 0; done < numel; done += slice) {
        args->numel = numel - done < slice ? numel - done : slice;
        if (!device->is_host) {
            GM_TRY(device->ops->copy_d2h(device, engine->staging, src + done * src_bytes,
                                         args->numel * src_bytes, stream));
            GM_TRY(device->ops->stream_sync(device, stream));
        }
        args->src = device->is_host ? (const void *)(src + done * src_bytes) : engine->staging;
        args->dst = dst + done * dst_bytes;
        gm_grad_add_host(args, engine->workers);
    }
    return GM_OK;
}

/* The chunk's gradient is on the device, or can be without waiting. */
static gm_status is_on_device(gm_engine *engine, uint32_t chunk, gm_stream stream, bool *out)
{
    *out = gm_chunks_is_resident(engine->chunks, chunk, GM_GRAD);
    if (*out || !gm_chunks_has_placement(engine->chunks)) {
        return GM_OK;
    }
    return engine->chunk_states[chunk].n_held > 0
               ? gm_chunks_prefetch(engine->chunks, chunk, GM_GRAD, out)
               : gm_chunks_claim(engine->chunks, chunk, GM_GRAD, stream, out);
}

gm_status gm_gather_put(gm_engine *engine, gm_param *p, const void *grad, gm_dtype dtype,
                        float divisor, gm_stream stream)
{
    gm_device *device = engine->device;
    gm_chunks *chunks = engine->chunks;
    gm_dtype home_dtype = gm_grad_dtype(engine, &p->spec);
    size_t offset = p->part_offset * gm_dtype_bytes(home_dtype);
    gm_grad_add_args args = {
        .src = grad,
        .dst_dtype = home_dtype,
        .src_dtype = dtype,
        .numel = p->part_numel,
        .accumulate = p->is_held,
        .divisor = divisor,
    };
    uint32_t chunk = p->place.chunk;
    bool is_here;
    GM_TRY(is_on_device(engine, chunk, stream, &is_here));
    p->has_sum = false;
    if (is_here) {
        gm_sumsq *sum = engine->wants_sums ? &engine->sums[p - engine->params] : NULL;
        GM_TRY(gm_chunks_begin_write(chunks, chunk, GM_GRAD, stream));
        args.dst = (void *)(gm_chunks_address(chunks, chunk, GM_GRAD) + offset);
        GM_TRY(device->ops->grad_add(device, &args, sum, stream));
        p->has_sum = sum != NULL;
        return gm_chunks_end_write(chunks, chunk, GM_GRAD, stream);
    }
    args.dst = gm_chunks_home(chunks, chunk, GM_GRAD) + offset;
    if (device->is_host || p->is_held || dtype != home_dtype || gm_grad_is_divided(&args)) {
        return add_at_home(engine, chunk, &args, stream);
    }
    GM_TRY(gm_chunks_begin_home_write(chunks, chunk, GM_GRAD, stream));
    GM_TRY(device->ops->copy_d2h(device, args.dst, (uintptr_t)grad,
                                 args.numel * gm_dtype_bytes(dtype), stream));
    return gm_chunks_end_home_write(chunks, chunk, GM_GRAD, stream);
}

void gm_gather_note_held(gm_engine *engine, gm_param *p)
{
    engine->chunk_states[p->place.chunk].n_held += !p->is_held;
    p->is_held = true;
}

/* Counts the arrival; *out_complete says that it was the last one of its chunk in this pass. */
static void count_arrival(gm_engine *engine, gm_param *p, bool *out_complete)
{
    gm_chunk_state *chunk = &engine->chunk_states[p->place.chunk];
    if (chunk->arrival != engine->n_passes) {
        chunk->arrival = engine->n_passes;
        chunk->n_arrived = 0;
    }
    bool is_repeated = p->arrival == engine->n_passes;
    engine->has_repeats |= is_repeated;
    p->arrival = engine->n_passes;
    chunk->n_arrived += !is_repeated;
    p->has_grad = true;
    *out_complete = !is_repeated && chunk->n_arrived == chunk->n_params;
}

static gm_status take_grad(gm_engine *engine, gm_param *p, const void *grad, gm_dtype dtype,
                           gm_stream stream)
{
    if (p->is_used_up) {
        return GM_FAIL(
            GM_ERR_STATE,
            "a gradient arrived for parameter %u, whose last one was used up by the update "
            "inside backward(step=True); call optimizer.zero_grad() before the next backward",
            (unsigned)(p - engine->params));
    }
    GM_TRY(gm_update_check_reuse(engine, p->place.chunk));
    GM_TRY(gm_update_issue(engine, p->place.chunk)); /* it still reads the last gradient */
    if (gm_shard_has_unreduced(engine)) {
        GM_TRY(gm_shard_take_grad(engine, p, grad, dtype, stream));
    } else {
        if (p->part_numel > 0) {
            GM_TRY(gm_gather_put(engine, p, grad, dtype, 1, stream));
        }
        gm_gather_note_held(engine, p);
    }
    bool is_complete;
    count_arrival(engine, p, &is_complete);
    if (is_complete) {
        GM_TRY(gm_shard_reduce(engine, p->place.chunk));
    }
    return is_complete ? gm_update_grad_complete(engine, p->place.chunk, stream) : GM_OK;
}

gm_status gm_engine_grad_put(gm_engine *engine, uint32_t id, const void *grad, gm_dtype dtype,
                             gm_stream stream)
{
    GM_TRY(gm_engine_check_param(engine, id));
    GM_TRY(gm_engine_begin_call(engine));
    gm_param *p = &engine->params[id];
    gm_status status = p->spec.has_grad ? take_grad(engine, p, grad, dtype, stream)
                                        : GM_FAIL(GM_ERR_ARG, "parameter %u takes no gradient", id);
    return gm_engine_end_call(engine, status);
}

bool gm_engine_has_grad(const gm_engine *engine, uint32_t id)
{
    return id < engine->n_params && engine->params[id].has_grad;
}

gm_status gm_engine_grad_drop(gm_engine *engine, uint32_t id)
{
    GM_TRY(gm_engine_check_param(engine, id));
    GM_TRY(gm_engine_begin_call(engine));
    gm_param *p = &engine->params[id];
    gm_chunk_state *chunk = &engine->chunk_states[p->place.chunk];
    gm_status status = gm_update_check_between(engine, p->place.chunk);
    if (status != GM_OK) {
        return gm_engine_end_call(engine, status);
    }
    status = gm_shard_drop_grad(engine, p);
    chunk->n_held -= p->is_held;
    p->has_grad = p->is_held = p->has_sum = p->is_used_up = false;
    p->sums = 0;
    if (status == GM_OK && chunk->n_held == 0 && !chunk->is_pending) {
        status = gm_chunks_discard(engine->chunks, p->place.chunk, GM_GRAD);
    }
    return gm_engine_end_call(engine, status);
}

/* ---- the norm ---- */

/* A gradient on the device whose sum was not left by its last kernel. */
static gm_status sum_on_device(gm_engine *engine, gm_param *p, gm_stream stream)
{
    gm_device *device = engine->device;
    uint32_t chunk = p->place.chunk;
    gm_dtype dtype = gm_grad_dtype(engine, &p->spec);
    gm_sumsq *sum = &engine->sums[p - engine->params];
    GM_TRY(gm_chunks_begin_read(engine->chunks, chunk, GM_GRAD, stream));
    const void *data = (const void *)(gm_chunks_address(engine->chunks, chunk, GM_GRAD) +
                                      p->part_offset * gm_dtype_bytes(dtype));
    GM_TRY(device->ops->fill(device, (uintptr_t)sum, 0, sizeof *sum, stream));
    GM_TRY(device->ops->sumsq(device, data, dtype, p->part_numel, sum, stream));
    p->has_sum = true;
    return gm_chunks_end_read(engine->chunks, chunk, GM_GRAD, stream);
}

static gm_status sumsq(gm_engine *engine, const uint32_t *params, uint32_t n, gm_sumsq *out,
                       gm_stream stream)
{
    gm_device *device = engine->device;
    memset(out, 0, sizeof *out);
    engine->wants_sums = true;
    GM_TRY(gm_shard_reduce_all(engine));
    bool has_sums = false;
    for (uint32_t i = 0; i < n; i++) {
        gm_param *p = &engine->params[params[i]];
        if (p->is_used_up) {
            return GM_FAIL(
                GM_ERR_STATE,
                "gradients were used up by the update inside backward(step=True); a norm "
                "needs backward(loss) without it");
        }
        if (!p->is_held || p->part_numel == 0) {
            continue;
        }
        if (p->has_sum) { /* left by kernels of the stream that brought the gradient */
            GM_TRY(gm_chunks_wait_ready(engine->chunks, p->place.chunk, GM_GRAD, stream));
        } else if (gm_chunks_is_resident(engine->chunks, p->place.chunk, GM_GRAD)) {
            GM_TRY(sum_on_device(engine, p, stream));
        }
        has_sums |= p->has_sum;
    }
    if (has_sums && !device->is_host) {
        GM_TRY(device->ops->copy_d2h(device, engine->sums_home, (uintptr_t)engine->sums,
                                     engine->n_params * sizeof *engine->sums, stream));
        GM_TRY(device->ops->stream_sync(device, stream));
    } else if (has_sums) {
        GM_TRY(device->ops->stream_sync(device, stream));
    }
    for (uint32_t i = 0; i < n; i++) {
        const gm_param *p = &engine->params[params[i]];
        if (!p->is_held || p->part_numel == 0) {
            continue;
        }
        if (p->has_sum) {
            gm_sumsq_merge(out, &engine->sums_home[params[i]]);
            continue;
        }
        uint32_t chunk = p->place.chunk;
        gm_dtype dtype = gm_grad_dtype(engine, &p->spec);
        GM_TRY(gm_chunks_write_back(engine->chunks, chunk, GM_GRAD));
        gm_sumsq_host(gm_chunks_home(engine->chunks, chunk, GM_GRAD) +
                          p->part_offset * gm_dtype_bytes(dtype),
                      dtype, p->part_numel, out, engine->workers);
    }
    return gm_shard_sum(engine, out);
}

gm_status gm_engine_sumsq(gm_engine *engine, const uint32_t *params, uint32_t n, gm_sumsq *out,
                          gm_stream stream)
{
    for (uint32_t i = 0; i < n; i++) {
        GM_TRY(gm_engine_check_param(engine, params[i]));
    }
    GM_TRY(gm_engine_begin_call(engine));
    return gm_engine_end_call(engine, sumsq(engine, params, n, out, stream));
}
