/* update.c - from gradient to weight: taking gradients as they arrive, their exact norm, and the step.
 *
 * A settled chunk keeps its gradient on the device and is updated there; any other chunk's gradient goes
 * home and is updated at home, after which a resident copy of its weights is refreshed. */
#include "engine_impl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

gm_status gm_engine_sync_grads(gm_engine *engine)
{
    if (engine->has_pending_grads) {
        GM_TRY(engine->device->ops->stream_sync(engine->device, engine->pending_stream));
        engine->has_pending_grads = false;
    }
    return GM_OK;
}

/* Device memory -> home through the staging area, converting and adding on the host, slice by slice. */
static gm_status accumulate_at_home(gm_engine *engine, gm_grad_add_args *args, gm_stream stream)
{
    gm_device *device = engine->device;
    size_t src_bytes = gm_dtype_bytes(args->src_dtype), dst_bytes = gm_dtype_bytes(args->dst_dtype);
    size_t slice = GM_STAGING_BYTES / src_bytes, numel = args->numel;
    uintptr_t src = (uintptr_t)args->src;
    uint8_t *dst = args->dst;
    GM_TRY(gm_engine_sync_grads(engine));
    for (size_t done = 0; done < numel; done += slice) {
        args->numel = numel - done < slice ? numel - done : slice;
        GM_TRY(device->ops->copy_d2h(device, engine->staging, src + done * src_bytes,
                                     args->numel * src_bytes, stream));
        GM_TRY(device->ops->stream_sync(device, stream));
        args->src = engine->staging;
        args->dst = dst + done * dst_bytes;
        gm_grad_add_host(args, engine->workers);
    }
    return GM_OK;
}

static gm_status put_grad(gm_engine *engine, gm_param *p, const void *grad, gm_dtype dtype,
                          gm_stream stream)
{
    gm_device *device = engine->device;
    gm_dtype home_dtype = gm_grad_dtype(engine, &p->spec);
    size_t offset = p->place.offset * gm_dtype_bytes(home_dtype);
    gm_grad_add_args args = {
        .src = grad,
        .dst_dtype = home_dtype,
        .src_dtype = dtype,
        .numel = p->spec.numel,
        .accumulate = p->has_grad,
    };
    uint32_t chunk = p->place.chunk;
    if (gm_chunks_is_resident(engine->chunks, chunk, GM_GRAD)) {
        GM_TRY(gm_chunks_pin(engine->chunks, chunk, GM_GRAD, stream));
        args.dst = (void *)(gm_chunks_address(engine->chunks, chunk, GM_GRAD) + offset);
        gm_status status = device->ops->grad_add(device, &args, stream);
        gm_chunks_note_write(engine->chunks, chunk, GM_GRAD);
        gm_status unpinned = gm_chunks_unpin(engine->chunks, chunk, GM_GRAD, stream);
        return status == GM_OK ? unpinned : status;
    }
    args.dst = gm_chunks_home(engine->chunks, chunk, GM_GRAD) + offset;
    if (device->is_host) {
        gm_grad_add_host(&args, engine->workers);
        return GM_OK;
    }
    if (p->has_grad || dtype != home_dtype) {
        return accumulate_at_home(engine, &args, stream);
    }
    if (engine->has_pending_grads && engine->pending_stream != stream) {
        GM_TRY(gm_engine_sync_grads(engine));
    }
    /* On the caller's stream: the gradient is torch's memory and may be reused behind this copy. */
    GM_TRY(device->ops->copy_d2h(device, args.dst, (uintptr_t)grad,
                                 args.numel * gm_dtype_bytes(dtype), stream));
    engine->has_pending_grads = true;
    engine->pending_stream = stream;
    return GM_OK;
}

gm_status gm_engine_grad_put(gm_engine *engine, uint32_t id, const void *grad, gm_dtype dtype,
                             gm_stream stream)
{
    GM_TRY(gm_engine_check_param(engine, id));
    GM_TRY(gm_engine_begin_call(engine));
    gm_param *p = &engine->params[id];
    gm_status status;
    if (!p->spec.has_grad) {
        status = GM_FAIL(GM_ERR_ARG, "parameter %u takes no gradient", id);
    } else {
        status = p->spec.numel ? put_grad(engine, p, grad, dtype, stream) : GM_OK;
    }
    if (status == GM_OK) {
        p->has_grad = true;
    }
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
    engine->params[id].has_grad = false;
    return gm_engine_end_call(engine, GM_OK);
}

static gm_status sumsq_on_device(gm_engine *engine, const uint32_t *params, uint32_t n,
                                 gm_sumsq *out, gm_stream stream)
{
    gm_device *device = engine->device;
    GM_TRY(device->ops->fill(device, engine->sums, 0, sizeof *out, stream));
    for (uint32_t i = 0; i < n; i++) {
        const gm_param *p = &engine->params[params[i]];
        uint32_t chunk = p->place.chunk;
        if (!p->has_grad || p->spec.numel == 0 ||
            !gm_chunks_is_resident(engine->chunks, chunk, GM_GRAD)) {
            continue;
        }
        gm_dtype dtype = gm_grad_dtype(engine, &p->spec);
        GM_TRY(gm_chunks_pin(engine->chunks, chunk, GM_GRAD, stream));
        const void *data = (const void *)(gm_chunks_address(engine->chunks, chunk, GM_GRAD) +
                                          p->place.offset * gm_dtype_bytes(dtype));
        gm_status status = device->ops->sumsq(device, data, dtype, p->spec.numel,
                                              (gm_sumsq *)engine->sums, stream);
        gm_status unpinned = gm_chunks_unpin(engine->chunks, chunk, GM_GRAD, stream);
        GM_TRY(status == GM_OK ? unpinned : status);
    }
    GM_TRY(device->ops->copy_d2h(device, out, engine->sums, sizeof *out, stream));
    return device->ops->stream_sync(device, stream);
}

static gm_status sumsq(gm_engine *engine, const uint32_t *params, uint32_t n, gm_sumsq *out,
                       gm_stream stream)
{
    memset(out, 0, sizeof *out);
    if (!engine->device->is_host) {
        GM_TRY(sumsq_on_device(engine, params, n, out, stream));
    }
    GM_TRY(gm_engine_sync_grads(engine));
    for (uint32_t i = 0; i < n; i++) {
        const gm_param *p = &engine->params[params[i]];
        uint32_t chunk = p->place.chunk;
        bool is_resident = gm_chunks_is_resident(engine->chunks, chunk, GM_GRAD);
        if (!p->has_grad || p->spec.numel == 0 || (is_resident && !engine->device->is_host)) {
            continue;
        }
        gm_dtype dtype = gm_grad_dtype(engine, &p->spec);
        const uint8_t *base =
            is_resident ? (const uint8_t *)gm_chunks_address(engine->chunks, chunk, GM_GRAD)
                        : gm_chunks_home(engine->chunks, chunk, GM_GRAD);
        gm_sumsq_host(base + p->place.offset * gm_dtype_bytes(dtype), dtype, p->spec.numel, out,
                      engine->workers);
    }
    return GM_OK;
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

/* ---- the step ---- */

static gm_adam_args adam_args(const gm_engine *engine, uint32_t chunk, uint8_t *weight,
                              uint8_t *state, uint8_t *grad, const gm_adam_range *ranges, size_t n)
{
    const gm_engine_param *spec = gm_chunk_spec(engine, chunk);
    gm_state_shape shape = gm_state_shape_of(spec, gm_layout_chunk(engine->layout, chunk)->numel);
    return (gm_adam_args){
        .format = spec->format,
        .grad_dtype = gm_grad_dtype(engine, spec),
        .weight = weight,
        .low = spec->has_low ? state + shape.low : NULL,
        .m = (float *)(void *)(state + shape.m),
        .v = (float *)(void *)(state + shape.v),
        .grad = grad,
        .ranges = ranges,
        .n_ranges = n,
    };
}

/* Weights, states and gradient are on the device: the update runs there, on the caller's stream. */
static gm_status update_on_device(gm_engine *engine, uint32_t chunk, const gm_adam_range *ranges,
                                  size_t n, gm_stream stream)
{
    for (int piece = 0; piece < GM_N_PIECES; piece++) {
        GM_TRY(gm_chunks_pin(engine->chunks, chunk, (gm_piece)piece, stream));
    }
    gm_adam_args args =
        adam_args(engine, chunk, (uint8_t *)gm_chunks_address(engine->chunks, chunk, GM_WEIGHT),
                  (uint8_t *)gm_chunks_address(engine->chunks, chunk, GM_STATE),
                  (uint8_t *)gm_chunks_address(engine->chunks, chunk, GM_GRAD), ranges, n);
    GM_TRY(engine->device->ops->adam(engine->device, &args, stream));
    gm_chunks_note_write(engine->chunks, chunk, GM_WEIGHT);
    gm_chunks_note_write(engine->chunks, chunk, GM_STATE);
    for (int piece = 0; piece < GM_N_PIECES; piece++) {
        GM_TRY(gm_chunks_unpin(engine->chunks, chunk, (gm_piece)piece, stream));
    }
    return GM_OK;
}

/* The update runs at home; a resident copy of the weights is refreshed afterwards. */
static gm_status update_at_home(gm_engine *engine, uint32_t chunk, const gm_adam_range *ranges,
                                size_t n, gm_stream stream)
{
    for (int piece = 0; piece < GM_N_PIECES; piece++) {
        GM_TRY(gm_chunks_claim_home(engine->chunks, chunk, (gm_piece)piece));
    }
    gm_adam_args args = adam_args(engine, chunk, gm_chunks_home(engine->chunks, chunk, GM_WEIGHT),
                                  gm_chunks_home(engine->chunks, chunk, GM_STATE),
                                  gm_chunks_home(engine->chunks, chunk, GM_GRAD), ranges, n);
    GM_TRY(gm_adam_host(&args, engine->workers));
    GM_TRY(gm_chunks_home_written(engine->chunks, chunk, GM_WEIGHT, stream));
    return gm_chunks_home_written(engine->chunks, chunk, GM_STATE, stream);
}

static int compare_updates(const void *a, const void *b)
{
    uint32_t left = ((const gm_update *)a)->param, right = ((const gm_update *)b)->param;
    return left < right ? -1 : left > right;
}

static gm_status run_step(gm_engine *engine, const gm_update *updates, uint32_t n,
                          gm_adam_range *ranges, bool *is_done, gm_stream stream)
{
    gm_status status = GM_OK;
    for (uint32_t i = 0; i < n && status == GM_OK; i++) {
        uint32_t chunk = engine->params[updates[i].param].place.chunk;
        if (is_done[chunk]) {
            continue;
        }
        is_done[chunk] = true;
        size_t n_ranges = 0;
        for (uint32_t k = i; k < n && status == GM_OK; k++) {
            const gm_param *p = &engine->params[updates[k].param];
            if (p->place.chunk != chunk || p->spec.numel == 0) {
                continue;
            }
            gm_adam_range *range = &ranges[n_ranges++];
            range->begin = p->place.offset;
            range->end = p->place.offset + p->spec.numel;
            status = gm_adam_scalars_init(&updates[k].hyper, &range->scalars);
        }
        if (status != GM_OK || n_ranges == 0) {
            continue;
        }
        status = gm_chunks_is_settled(engine->chunks, chunk)
                     ? update_on_device(engine, chunk, ranges, n_ranges, stream)
                     : update_at_home(engine, chunk, ranges, n_ranges, stream);
    }
    return status == GM_OK ? gm_lease_renew_snapshots(engine) : status;
}

gm_status gm_engine_step(gm_engine *engine, const gm_update *updates, uint32_t n, gm_stream stream)
{
    for (uint32_t i = 0; i < n;
         i++) { /* everything that can be refused is refused before the first write */
        GM_TRY(gm_engine_check_param(engine, updates[i].param));
        const gm_param *p = &engine->params[updates[i].param];
        if (!p->spec.has_moments || !p->has_grad) {
            return GM_FAIL(GM_ERR_ARG, "parameter %u has no %s", updates[i].param,
                           p->has_grad ? "moments" : "gradient");
        }
        gm_adam_scalars scalars;
        GM_TRY(gm_adam_scalars_init(&updates[i].hyper, &scalars));
    }
    gm_update *sorted = malloc((n ? n : 1) * sizeof *sorted);
    gm_adam_range *ranges = malloc((n ? n : 1) * sizeof *ranges);
    bool *is_done = calloc(gm_layout_n_chunks(engine->layout) + (size_t)1, sizeof *is_done);
    if (!sorted || !ranges || !is_done) {
        free(sorted);
        free(ranges);
        free(is_done);
        return GM_FAIL(GM_ERR_NOMEM, "HOST: step over %u parameters", n);
    }
    if (n) {
        memcpy(sorted, updates, n * sizeof *sorted);
        qsort(sorted, n, sizeof *sorted, compare_updates);
    }
    gm_status status = gm_engine_begin_call(engine);
    if (status == GM_OK) { /* nothing is written before these three have passed */
        status = engine->device->ops->stream_sync(engine->device, stream);
        status = status == GM_OK ? gm_engine_sync_grads(engine) : status;
        status = status == GM_OK ? gm_lease_poll_watched(engine) : status;
        bool has_begun = status == GM_OK;
        if (has_begun) {
            status = run_step(engine, sorted, n, ranges, is_done, stream);
        }
        if (status != GM_OK && has_begun) { /* invariant 5 */
            engine->dead = status;
            snprintf(engine->dead_text, sizeof engine->dead_text, "%s", gm_last_error());
        }
        (void)gm_engine_end_call(engine, status);
    }
    free(sorted);
    free(ranges);
    free(is_done);
    return status;
}
