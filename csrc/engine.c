/* engine.c - on-demand serving of units, gradients, the update, and leases; see engine.h.
 *
 * Invariants
 *   1. A parameter's bytes are valid from enter to leave of its unit, from touch to release_touched, and
 *      for the life of a pinned lease; outside, its range may show anything (aliased) or faults (strict).
 *   2. A chunk is settled, or its states and gradient are used at home: never half of each.
 *   3. A gradient that is copied home asynchronously is read by the host only after sync_grads().
 *   4. Before a master is read, updated or saved, what was written through watched leases is reconciled.
 *   5. After an error inside a step the engine is dead: every call returns that first error.
 *
 * The host may wait in: eviction and write-back (chunk.c), sync_grads, accumulate_at_home, sumsq, step, read,
 * write, and the processing of watched leases. */
#include "engine.h"

#include "chunk.h"
#include "hostmem.h"
#include "layout.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct param {
    gm_engine_param spec;
    gm_param_place place;
    bool has_grad; /* a gradient has arrived since the last drop */
} param;

struct gm_lease {
    gm_engine *engine;
    gm_lease *next;
    uint32_t param;
    bool is_pinned;
    atomic_bool is_watched, is_ended;
    void *old; /* the weight's bytes when last compared; NULL unless watched */
};

struct gm_engine {
    pthread_mutex_t lock;
    atomic_uint references;
    gm_device *device;
    gm_workers *workers;
    gm_layout *layout;
    gm_chunks *chunks;
    gm_arena *arena;
    bool is_pinned_arena;
    gm_policy policy;
    bool is_grad_f32;
    size_t budget;
    size_t (*outside_bytes)(void *context);
    void *outside_context;

    param *params;          /* (n_params,) */
    uint32_t n_params;
    uint32_t *unit_chunks;  /* chunk ids, unit after unit, each chunk once per unit */
    uint32_t *unit_begin;   /* (n_units + 1,) */
    uint32_t n_units;
    uint32_t *touched;      /* (n_chunks,) pinned by touch */
    uint32_t n_touched;
    bool *is_touched;       /* (n_chunks,) */
    gm_lease *leases;

    bool has_pending_grads; /* copies home in flight on pending_stream */
    gm_stream pending_stream;
    uint8_t *staging;       /* pinned, STAGING_BYTES; NULL on the host device */
    uintptr_t sums;         /* device memory for one gm_sumsq; 0 on the host device */
    gm_block sums_block;

    gm_status dead;         /* GM_OK, or the first error inside a step */
    char dead_text[512];
};

enum { STAGING_BYTES = 16 << 20 };

/* ---- shapes ---- */

static gm_dtype grad_dtype(const gm_engine *engine, const gm_engine_param *spec)
{
    return engine->is_grad_f32 ? GM_F32 : spec->format;
}

static size_t low_bytes(const gm_engine_param *spec)
{
    return !spec->has_low ? 0 : spec->format == GM_BF16 ? 2 : spec->format == GM_F16 ? 4 : 0;
}

/* Parameters share a chunk when all of this agrees; below 64, as layout.c's search expects. */
static uint32_t kind_of(const gm_engine_param *spec)
{
    uint32_t flags = (uint32_t)spec->has_low | (uint32_t)spec->has_moments << 1 |
                     (uint32_t)spec->has_grad << 2;
    if (flags) {
        return (uint32_t)spec->format * 8 + flags;
    }
    uint32_t log2 = 0;
    while (((uint32_t)1 << log2) < spec->weight_bytes) {
        log2++;
    }
    return 32 + log2;
}

/* Byte offsets of the arrays in a chunk's state piece: low, m, v. */
typedef struct state_shape {
    size_t low, m, v, total;
} state_shape;

static state_shape state_shape_of(const gm_engine_param *spec, uint64_t numel)
{
    state_shape shape = {0};
    shape.m = low_bytes(spec) * numel;
    shape.v = shape.m + (spec->has_moments ? 4 * numel : 0);
    shape.total = shape.v + (spec->has_moments ? 4 * numel : 0);
    return shape;
}

static const gm_engine_param *chunk_spec(const gm_engine *engine, uint32_t chunk)
{
    return &engine->params[gm_layout_chunk(engine->layout, chunk)->first_param].spec;
}

/* ---- life ---- */

static void engine_free(gm_engine *engine)
{
    if (!engine) {
        return;
    }
    gm_chunks_free(engine->chunks);
    while (engine->leases) {
        gm_lease *lease = engine->leases;
        engine->leases = lease->next;
        free(lease->old);
        free(lease);
    }
    if (engine->sums) {
        engine->device->ops->range_free(engine->device, engine->sums, engine->device->block_bytes);
    }
    if (engine->sums_block) {
        engine->device->ops->block_free(engine->device, engine->sums_block);
    }
    if (engine->is_pinned_arena) {
        engine->device->ops->unpin(engine->device, gm_arena_base(engine->arena));
    }
    gm_arena_free(engine->arena);
    gm_layout_free(engine->layout);
    if (engine->device) {
        engine->device->ops->free(engine->device);
    }
    free(engine->params);
    free(engine->unit_chunks);
    free(engine->unit_begin);
    free(engine->touched);
    free(engine->is_touched);
    pthread_mutex_destroy(&engine->lock);
    free(engine);
}

void gm_engine_unref(gm_engine *engine)
{
    if (engine && atomic_fetch_sub(&engine->references, 1) == 1) {
        engine_free(engine);
    }
}

static gm_status copy_params(gm_engine *engine, const gm_engine_options *options)
{
    uint32_t n = options->n_params;
    engine->n_params = n;
    engine->params = calloc(n ? n : 1, sizeof *engine->params);
    gm_param_spec *specs = calloc(n ? n : 1, sizeof *specs);
    if (!engine->params || !specs) {
        free(specs);
        return GM_FAIL(GM_ERR_NOMEM, "HOST: table of %u parameters", n);
    }
    for (uint32_t i = 0; i < n; i++) {
        engine->params[i].spec = options->params[i];
        specs[i] = (gm_param_spec){
            .numel = options->params[i].numel,
            .kind = kind_of(&options->params[i]),
            .weight_bytes = options->params[i].weight_bytes,
        };
    }
    gm_status status = gm_layout_new(specs, n, options->chunk_bytes, &engine->layout);
    free(specs);
    GM_TRY(status);
    for (uint32_t i = 0; i < n; i++) {
        engine->params[i].place = *gm_layout_param(engine->layout, i);
    }
    return GM_OK;
}

/* Which chunks each unit needs, each once. */
static gm_status index_units(gm_engine *engine, const gm_engine_options *options)
{
    uint32_t n_links = options->n_units ? options->unit_begin[options->n_units] : 0;
    engine->n_units = options->n_units;
    engine->unit_begin = calloc((size_t)options->n_units + 1, sizeof *engine->unit_begin);
    engine->unit_chunks = calloc(n_links ? n_links : 1, sizeof *engine->unit_chunks);
    if (!engine->unit_begin || !engine->unit_chunks) {
        return GM_FAIL(GM_ERR_NOMEM, "HOST: table of %u units", options->n_units);
    }
    uint32_t end = 0;
    for (uint32_t unit = 0; unit < options->n_units; unit++) {
        uint32_t begin = end;
        engine->unit_begin[unit] = begin;
        for (uint32_t i = options->unit_begin[unit]; i < options->unit_begin[unit + 1]; i++) {
            uint32_t chunk = engine->params[options->unit_params[i]].place.chunk;
            bool is_known = false;
            for (uint32_t k = begin; k < end && !is_known; k++) {
                is_known = engine->unit_chunks[k] == chunk;
            }
            if (!is_known) {
                engine->unit_chunks[end++] = chunk;
            }
        }
    }
    engine->unit_begin[options->n_units] = end;
    return GM_OK;
}

/* The homes, pinned, with a staging area behind them; checked against the host budget before allocating. */
static gm_status make_arena(gm_engine *engine, size_t home_bytes, size_t host_budget)
{
    size_t staging = engine->device->is_host ? 0 : STAGING_BYTES;
    if (home_bytes > host_budget) {
        return GM_FAIL(GM_ERR_NOMEM,
                       "HOST: %zu bytes wanted for weights, states and gradients, host_budget is %zu: raise "
                       "host_budget, or freeze parameters",
                       home_bytes, host_budget);
    }
    GM_TRY(gm_arena_new(home_bytes + staging, engine->workers, &engine->arena));
    if (home_bytes + staging > 0) {
        GM_TRY(engine->device->ops->pin(engine->device, gm_arena_base(engine->arena),
                                        home_bytes + staging));
        engine->is_pinned_arena = true;
    }
    if (staging) {
        engine->staging = (uint8_t *)gm_arena_base(engine->arena) + home_bytes;
    }
    return GM_OK;
}

static gm_status make_sums(gm_engine *engine)
{
    gm_device *device = engine->device;
    if (device->is_host) {
        return GM_OK;
    }
    GM_TRY(device->ops->range_new(device, device->block_bytes, &engine->sums));
    GM_TRY(device->ops->block_new(device, &engine->sums_block));
    return device->ops->map(device, engine->sums, &engine->sums_block, 1);
}

/* The bytes of blocks that chunks may take now. */
static size_t chunk_limit(const gm_engine *engine)
{
    if (engine->budget == SIZE_MAX) {
        return SIZE_MAX;
    }
    size_t outside = engine->outside_bytes ? engine->outside_bytes(engine->outside_context) : 0;
    outside += engine->sums ? engine->device->block_bytes : 0;
    return engine->budget > outside ? engine->budget - outside : 0;
}

static gm_status make_chunks(gm_engine *engine, const gm_engine_options *options)
{
    uint32_t n = gm_layout_n_chunks(engine->layout);
    size_t(*bytes)[GM_N_PIECES] = calloc(n ? n : 1, sizeof *bytes);
    engine->touched = calloc(n ? n : 1, sizeof *engine->touched);
    engine->is_touched = calloc(n ? n : 1, sizeof *engine->is_touched);
    gm_status status = GM_OK;
    if (!bytes || !engine->touched || !engine->is_touched) {
        status = GM_FAIL(GM_ERR_NOMEM, "HOST: table of %u chunks", n);
        goto done;
    }
    size_t needed = 0;
    for (uint32_t id = 0; id < n; id++) {
        const gm_chunk_shape *shape = gm_layout_chunk(engine->layout, id);
        const gm_engine_param *spec = chunk_spec(engine, id);
        bytes[id][GM_WEIGHT] = shape->numel * shape->weight_bytes;
        bytes[id][GM_STATE] = state_shape_of(spec, shape->numel).total;
        bytes[id][GM_GRAD] =
            spec->has_grad ? shape->numel * gm_dtype_bytes(grad_dtype(engine, spec)) : 0;
        for (int piece = 0; piece < GM_N_PIECES; piece++) {
            needed += gm_chunks_block_bytes(engine->device, bytes[id][piece]);
        }
    }
    size_t limit = chunk_limit(engine);
    bool has_homes = options->policy != GM_POLICY_CUDA;
    if (!has_homes && needed > limit) {
        status = GM_FAIL(GM_ERR_NOMEM,
                         "DEVICE: policy \"cuda\" keeps everything on the device: %zu bytes wanted, %zu "
                         "available: raise device_budget or use placement_policy=\"auto\"",
                         needed, limit);
        goto done;
    }
    if (has_homes) {
        GM_TRY_GOTO(status, done,
                    make_arena(engine, gm_chunks_home_bytes((const size_t(*)[GM_N_PIECES])bytes, n),
                               options->host_budget));
    }
    gm_chunks_options chunk_options = {
        .device = engine->device,
        .n_chunks = n,
        .piece_bytes = (const size_t(*)[GM_N_PIECES])bytes,
        .homes = has_homes ? gm_arena_base(engine->arena) : NULL,
        .device_limit = limit,
        .is_strict = options->is_strict,
    };
    GM_TRY_GOTO(status, done, gm_chunks_new(&chunk_options, &engine->chunks));
    for (uint32_t id = 0; !has_homes && id < n; id++) {
        GM_TRY_GOTO(status, done, gm_chunks_settle(engine->chunks, id));
    }
done:
    free(bytes);
    return status;
}

gm_status gm_engine_new(const gm_engine_options *options, gm_engine **out)
{
    gm_engine *engine = calloc(1, sizeof *engine);
    if (!engine) {
        return GM_FAIL(GM_ERR_NOMEM, "HOST: engine: %zu bytes", sizeof *engine);
    }
    pthread_mutex_init(&engine->lock, NULL);
    atomic_init(&engine->references, 1);
    engine->device = options->device;
    engine->workers = options->workers;
    engine->policy = options->policy;
    engine->is_grad_f32 = options->is_grad_f32;
    engine->budget = options->device_budget;
    engine->outside_bytes = options->outside_bytes;
    engine->outside_context = options->outside_context;
    gm_status status;
    GM_TRY_GOTO(status, fail, copy_params(engine, options));
    GM_TRY_GOTO(status, fail, index_units(engine, options));
    GM_TRY_GOTO(status, fail, make_sums(engine));
    GM_TRY_GOTO(status, fail, make_chunks(engine, options));
    *out = engine;
    return GM_OK;
fail:
    engine_free(engine); /* every member is NULL, 0 or live; the device goes with it */
    return status;
}

uintptr_t gm_engine_address(const gm_engine *engine, uint32_t id)
{
    const param *p = &engine->params[id];
    return gm_chunks_address(engine->chunks, p->place.chunk, GM_WEIGHT) +
           p->place.offset * p->spec.weight_bytes;
}

uint32_t gm_engine_chunk_of(const gm_engine *engine, uint32_t id)
{
    return engine->params[id].place.chunk;
}

size_t gm_engine_chunk_bytes(const gm_engine *engine, uint32_t chunk)
{
    const gm_chunk_shape *shape = gm_layout_chunk(engine->layout, chunk);
    return gm_chunks_block_bytes(engine->device, shape->numel * shape->weight_bytes);
}

void gm_engine_weight_span(const gm_engine *engine, uintptr_t *begin, uintptr_t *end)
{
    gm_chunks_weight_span(engine->chunks, begin, end);
}

/* ---- the lock ---- */

static gm_status process_leases(gm_engine *engine, gm_stream stream);

static gm_status fail_dead(const gm_engine *engine)
{
    return GM_FAIL(engine->dead, "the engine is closed by an earlier error: %s", engine->dead_text);
}

/* Every public call starts here: one caller at a time, no dead engine, ended leases first. */
static gm_status begin_call(gm_engine *engine, gm_stream stream)
{
    pthread_mutex_lock(&engine->lock);
    gm_status status = engine->dead == GM_OK ? process_leases(engine, stream) : fail_dead(engine);
    if (status != GM_OK) {
        pthread_mutex_unlock(&engine->lock);
    }
    return status;
}

static gm_status end_call(gm_engine *engine, gm_status status)
{
    pthread_mutex_unlock(&engine->lock);
    return status;
}

/* ---- units ---- */

static gm_status pin_weights(gm_engine *engine, uint32_t chunk, gm_stream stream)
{
    if (engine->outside_bytes && !gm_chunks_is_resident(engine->chunks, chunk, GM_WEIGHT)) {
        GM_TRY(gm_chunks_set_limit(engine->chunks, chunk_limit(engine), NULL));
    }
    return gm_chunks_pin(engine->chunks, chunk, GM_WEIGHT, stream);
}

static gm_status unpin_weights(gm_engine *engine, uint32_t chunk, gm_stream stream)
{
    GM_TRY(gm_chunks_unpin(engine->chunks, chunk, GM_WEIGHT, stream));
    if (engine->policy == GM_POLICY_CPU && gm_chunks_pins(engine->chunks, chunk, GM_WEIGHT) == 0) {
        return gm_chunks_evict(engine->chunks, chunk, GM_WEIGHT);
    }
    return GM_OK;
}

static gm_status check_unit(const gm_engine *engine, uint32_t unit)
{
    return unit < engine->n_units ? GM_OK : GM_FAIL(GM_ERR_ARG, "unit %u does not exist", unit);
}

gm_status gm_engine_enter(gm_engine *engine, uint32_t unit, gm_stream stream)
{
    GM_TRY(check_unit(engine, unit));
    GM_TRY(begin_call(engine, stream));
    gm_status status = GM_OK;
    uint32_t i = engine->unit_begin[unit];
    for (; i < engine->unit_begin[unit + 1] && status == GM_OK; i++) {
        status = pin_weights(engine, engine->unit_chunks[i], stream);
    }
    if (status != GM_OK) { /* all or nothing; the first error's text is what counts */
        for (i--; i-- > engine->unit_begin[unit];) {
            (void)gm_chunks_unpin(engine->chunks, engine->unit_chunks[i], GM_WEIGHT, stream);
        }
    }
    return end_call(engine, status);
}

gm_status gm_engine_leave(gm_engine *engine, uint32_t unit, gm_stream stream)
{
    GM_TRY(check_unit(engine, unit));
    GM_TRY(begin_call(engine, stream));
    gm_status status = GM_OK;
    for (uint32_t i = engine->unit_begin[unit]; i < engine->unit_begin[unit + 1]; i++) {
        gm_status one = unpin_weights(engine, engine->unit_chunks[i], stream);
        status = status == GM_OK ? one : status;
    }
    return end_call(engine, status);
}

gm_status gm_engine_touch(gm_engine *engine, uintptr_t address, gm_stream stream)
{
    GM_TRY(begin_call(engine, stream));
    uint32_t chunk = gm_chunks_at(engine->chunks, address);
    gm_status status = GM_OK;
    if (chunk == UINT32_MAX) {
        status = GM_FAIL(GM_ERR_ARG, "no chunk shows address %#zx", (size_t)address);
    } else if (!engine->is_touched[chunk]) {
        status = pin_weights(engine, chunk, stream);
        if (status == GM_OK) {
            engine->is_touched[chunk] = true;
            engine->touched[engine->n_touched++] = chunk;
        }
    }
    return end_call(engine, status);
}

gm_status gm_engine_release_touched(gm_engine *engine, gm_stream stream)
{
    GM_TRY(begin_call(engine, stream));
    gm_status status = GM_OK;
    while (engine->n_touched > 0) {
        uint32_t chunk = engine->touched[--engine->n_touched];
        engine->is_touched[chunk] = false;
        gm_status one = unpin_weights(engine, chunk, stream);
        status = status == GM_OK ? one : status;
    }
    return end_call(engine, status);
}

/* ---- gradients ---- */

static gm_status sync_grads(gm_engine *engine)
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
    size_t slice = STAGING_BYTES / src_bytes, numel = args->numel;
    uintptr_t src = (uintptr_t)args->src;
    uint8_t *dst = args->dst;
    GM_TRY(sync_grads(engine));
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

static gm_status put_grad(gm_engine *engine, param *p, const void *grad, gm_dtype dtype,
                          gm_stream stream)
{
    gm_device *device = engine->device;
    gm_dtype home_dtype = grad_dtype(engine, &p->spec);
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
        GM_TRY(sync_grads(engine));
    }
    /* On the caller's stream: the gradient is torch's memory and may be reused behind this copy. */
    GM_TRY(device->ops->copy_d2h(device, args.dst, (uintptr_t)grad,
                                 args.numel * gm_dtype_bytes(dtype), stream));
    engine->has_pending_grads = true;
    engine->pending_stream = stream;
    return GM_OK;
}

static gm_status check_param(const gm_engine *engine, uint32_t id)
{
    return id < engine->n_params ? GM_OK : GM_FAIL(GM_ERR_ARG, "parameter %u does not exist", id);
}

gm_status gm_engine_grad_put(gm_engine *engine, uint32_t id, const void *grad, gm_dtype dtype,
                             gm_stream stream)
{
    GM_TRY(check_param(engine, id));
    GM_TRY(begin_call(engine, stream));
    param *p = &engine->params[id];
    gm_status status;
    if (!p->spec.has_grad) {
        status = GM_FAIL(GM_ERR_ARG, "parameter %u takes no gradient", id);
    } else {
        status = p->spec.numel ? put_grad(engine, p, grad, dtype, stream) : GM_OK;
    }
    if (status == GM_OK) {
        p->has_grad = true;
    }
    return end_call(engine, status);
}

bool gm_engine_has_grad(const gm_engine *engine, uint32_t id)
{
    return id < engine->n_params && engine->params[id].has_grad;
}

gm_status gm_engine_grad_drop(gm_engine *engine, uint32_t id)
{
    GM_TRY(check_param(engine, id));
    GM_TRY(begin_call(engine, 0));
    engine->params[id].has_grad = false;
    return end_call(engine, GM_OK);
}

static gm_status sumsq_on_device(gm_engine *engine, const uint32_t *params, uint32_t n,
                                 gm_sumsq *out, gm_stream stream)
{
    gm_device *device = engine->device;
    GM_TRY(device->ops->fill(device, engine->sums, 0, sizeof *out, stream));
    for (uint32_t i = 0; i < n; i++) {
        const param *p = &engine->params[params[i]];
        uint32_t chunk = p->place.chunk;
        if (!p->has_grad || p->spec.numel == 0 ||
            !gm_chunks_is_resident(engine->chunks, chunk, GM_GRAD)) {
            continue;
        }
        gm_dtype dtype = grad_dtype(engine, &p->spec);
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
    GM_TRY(sync_grads(engine));
    for (uint32_t i = 0; i < n; i++) {
        const param *p = &engine->params[params[i]];
        uint32_t chunk = p->place.chunk;
        bool is_resident = gm_chunks_is_resident(engine->chunks, chunk, GM_GRAD);
        if (!p->has_grad || p->spec.numel == 0 || (is_resident && !engine->device->is_host)) {
            continue;
        }
        gm_dtype dtype = grad_dtype(engine, &p->spec);
        const uint8_t *base = is_resident
                                  ? (const uint8_t *)gm_chunks_address(engine->chunks, chunk, GM_GRAD)
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
        GM_TRY(check_param(engine, params[i]));
    }
    GM_TRY(begin_call(engine, stream));
    return end_call(engine, sumsq(engine, params, n, out, stream));
}

/* ---- fields ---- */

typedef struct slice {
    gm_piece piece;
    size_t offset, bytes;
} slice;

static slice slice_of(const gm_engine *engine, const param *p, gm_field field)
{
    const gm_chunk_shape *chunk = gm_layout_chunk(engine->layout, p->place.chunk);
    state_shape shape = state_shape_of(&p->spec, chunk->numel);
    size_t grad_bytes = gm_dtype_bytes(grad_dtype(engine, &p->spec));
    uint64_t offset = p->place.offset, numel = p->spec.numel;
    switch (field) {
    case GM_FIELD_M: return (slice){GM_STATE, shape.m + 4 * offset, 4 * numel};
    case GM_FIELD_V: return (slice){GM_STATE, shape.v + 4 * offset, 4 * numel};
    case GM_FIELD_GRAD: return (slice){GM_GRAD, grad_bytes * offset, grad_bytes * numel};
    case GM_FIELD_MASTER: /* the low part of it */
        return (slice){GM_STATE, low_bytes(&p->spec) * offset, low_bytes(&p->spec) * numel};
    case GM_FIELD_WEIGHT: break;
    }
    return (slice){GM_WEIGHT, p->spec.weight_bytes * offset, p->spec.weight_bytes * numel};
}

static gm_status read_slice(gm_engine *engine, const param *p, gm_field field, void *dst)
{
    slice s = slice_of(engine, p, field);
    return gm_chunks_read(engine->chunks, p->place.chunk, s.piece, s.offset, s.bytes, dst);
}

static gm_status write_slice(gm_engine *engine, const param *p, gm_field field, const void *src)
{
    slice s = slice_of(engine, p, field);
    return gm_chunks_write(engine->chunks, p->place.chunk, s.piece, s.offset, s.bytes, src);
}

/* Two scratch arrays for one parameter: weight and low part. */
static gm_status scratch_new(const param *p, uint8_t **out_weight, uint8_t **out_low)
{
    *out_weight = malloc(p->spec.numel * p->spec.weight_bytes + 1);
    *out_low = malloc(p->spec.numel * 4 + 1); /* the widest low part */
    if (!*out_weight || !*out_low) {
        free(*out_weight);
        free(*out_low);
        return GM_FAIL(GM_ERR_NOMEM, "HOST: %llu elements of scratch for a parameter",
                       (unsigned long long)p->spec.numel);
    }
    return GM_OK;
}

static gm_status read_master(gm_engine *engine, const param *p, float *dst)
{
    uint8_t *weight, *low;
    GM_TRY(scratch_new(p, &weight, &low));
    gm_status status = read_slice(engine, p, GM_FIELD_WEIGHT, weight);
    if (status == GM_OK && p->spec.has_low) {
        status = read_slice(engine, p, GM_FIELD_MASTER, low);
    } else if (status == GM_OK) { /* no low part: the weight is all there is */
        gm_grad_add_host(&(gm_grad_add_args){.dst = dst, .src = weight, .dst_dtype = GM_F32,
                                             .src_dtype = p->spec.format, .numel = p->spec.numel},
                         engine->workers);
    }
    if (status == GM_OK && p->spec.has_low) {
        gm_merge_host(p->spec.format, weight, low, dst, p->spec.numel, engine->workers);
    }
    free(weight);
    free(low);
    return status;
}

static gm_status write_master(gm_engine *engine, const param *p, const float *src)
{
    uint8_t *weight, *low;
    GM_TRY(scratch_new(p, &weight, &low));
    gm_status status;
    gm_split_host(p->spec.format, src, weight, low, p->spec.numel, engine->workers);
    status = write_slice(engine, p, GM_FIELD_WEIGHT, weight);
    if (status == GM_OK && p->spec.has_low) {
        status = write_slice(engine, p, GM_FIELD_MASTER, low);
    }
    free(weight);
    free(low);
    return status;
}

/* The weight now holds new bytes (`weight`), before it held `old`: the master follows. */
static gm_status reset_low(gm_engine *engine, const param *p, const void *old, const void *weight)
{
    if (!p->spec.has_low) {
        return GM_OK;
    }
    uint8_t *low = malloc(p->spec.numel * low_bytes(&p->spec) + 1);
    if (!low) {
        return GM_FAIL(GM_ERR_NOMEM, "HOST: %llu elements of scratch for a parameter",
                       (unsigned long long)p->spec.numel);
    }
    gm_status status = read_slice(engine, p, GM_FIELD_MASTER, low);
    if (status == GM_OK) {
        (void)gm_reconcile_host(p->spec.format, old, weight, low, p->spec.numel);
        status = write_slice(engine, p, GM_FIELD_MASTER, low);
    }
    free(low);
    return status;
}

static gm_status write_weight(gm_engine *engine, const param *p, const void *src)
{
    uint8_t *old = malloc(p->spec.numel * p->spec.weight_bytes + 1);
    if (!old) {
        return GM_FAIL(GM_ERR_NOMEM, "HOST: %llu elements of scratch for a parameter",
                       (unsigned long long)p->spec.numel);
    }
    gm_status status = read_slice(engine, p, GM_FIELD_WEIGHT, old);
    status = status == GM_OK ? reset_low(engine, p, old, src) : status;
    status = status == GM_OK ? write_slice(engine, p, GM_FIELD_WEIGHT, src) : status;
    free(old);
    return status;
}

static gm_status check_field(const param *p, uint32_t id, gm_field field)
{
    bool is_moment = field == GM_FIELD_M || field == GM_FIELD_V;
    if ((is_moment && !p->spec.has_moments) || (field == GM_FIELD_GRAD && !p->spec.has_grad)) {
        return GM_FAIL(GM_ERR_STATE, "parameter %u has no %s", id, is_moment ? "moments" : "gradient");
    }
    return GM_OK;
}

static gm_status poll_watched(gm_engine *engine);
static gm_status renew_snapshots(gm_engine *engine);

gm_status gm_engine_read(gm_engine *engine, uint32_t id, gm_field field, void *dst)
{
    GM_TRY(check_param(engine, id));
    const param *p = &engine->params[id];
    GM_TRY(check_field(p, id, field));
    GM_TRY(begin_call(engine, 0));
    gm_status status = field == GM_FIELD_GRAD ? sync_grads(engine) : poll_watched(engine);
    if (status == GM_OK && p->spec.numel > 0) {
        status = field == GM_FIELD_MASTER ? read_master(engine, p, dst)
                                          : read_slice(engine, p, field, dst);
    }
    return end_call(engine, status);
}

gm_status gm_engine_write(gm_engine *engine, uint32_t id, gm_field field, const void *src)
{
    GM_TRY(check_param(engine, id));
    param *p = &engine->params[id];
    GM_TRY(check_field(p, id, field));
    GM_TRY(begin_call(engine, 0));
    gm_status status = sync_grads(engine);
    status = status == GM_OK ? poll_watched(engine) : status;
    if (status == GM_OK && p->spec.numel > 0) {
        status = field == GM_FIELD_MASTER   ? write_master(engine, p, src)
                 : field == GM_FIELD_WEIGHT ? write_weight(engine, p, src)
                                            : write_slice(engine, p, field, src);
    }
    if (status == GM_OK && field == GM_FIELD_GRAD) {
        p->has_grad = true;
    }
    status = status == GM_OK ? renew_snapshots(engine) : status;
    return end_call(engine, status);
}

gm_status gm_engine_note_write(gm_engine *engine, uint32_t id)
{
    GM_TRY(check_param(engine, id));
    param *p = &engine->params[id];
    GM_TRY(begin_call(engine, 0));
    gm_status status = GM_OK;
    uint32_t chunk = p->place.chunk;
    if (p->spec.has_low && gm_chunks_is_dirty(engine->chunks, chunk, GM_WEIGHT)) {
        status = GM_FAIL(GM_ERR_STATE,
                         "a 16-bit weight was written in place inside its unit while its chunk had no "
                         "current home, so its fp32 master cannot follow");
    } else if (p->spec.has_low && p->spec.numel > 0) {
        uint8_t *weight = malloc(p->spec.numel * p->spec.weight_bytes);
        slice s = slice_of(engine, p, GM_FIELD_WEIGHT);
        status = weight ? gm_chunks_read_device(engine->chunks, chunk, GM_WEIGHT, s.offset, s.bytes,
                                                weight)
                        : GM_FAIL(GM_ERR_NOMEM, "HOST: %zu bytes of scratch", s.bytes);
        if (status == GM_OK) { /* the home is current: it holds the old bytes, and gets the new ones */
            uint8_t *home = gm_chunks_home(engine->chunks, chunk, GM_WEIGHT) + s.offset;
            status = reset_low(engine, p, home, weight);
            memcpy(home, weight, s.bytes);
        }
        free(weight);
    } else {
        gm_chunks_note_write(engine->chunks, chunk, GM_WEIGHT);
    }
    return end_call(engine, status);
}

/* ---- leases ---- */

static gm_status snapshot(gm_engine *engine, gm_lease *lease)
{
    const param *p = &engine->params[lease->param];
    slice s = slice_of(engine, p, GM_FIELD_WEIGHT);
    return s.bytes == 0 ? GM_OK
                        : gm_chunks_read_device(engine->chunks, p->place.chunk, GM_WEIGHT, s.offset,
                                                s.bytes, lease->old);
}

/* Finds what was written through the lease's tensor since the last look. */
static gm_status reconcile_lease(gm_engine *engine, gm_lease *lease)
{
    const param *p = &engine->params[lease->param];
    slice s = slice_of(engine, p, GM_FIELD_WEIGHT);
    if (s.bytes == 0) {
        return GM_OK;
    }
    uint8_t *weight = malloc(s.bytes);
    if (!weight) {
        return GM_FAIL(GM_ERR_NOMEM, "HOST: %zu bytes of scratch", s.bytes);
    }
    gm_status status = gm_chunks_read_device(engine->chunks, p->place.chunk, GM_WEIGHT, s.offset,
                                             s.bytes, weight);
    if (status == GM_OK && memcmp(weight, lease->old, s.bytes) != 0) {
        status = reset_low(engine, p, lease->old, weight);
        gm_chunks_note_write(engine->chunks, p->place.chunk, GM_WEIGHT);
        memcpy(lease->old, weight, s.bytes);
    }
    free(weight);
    return status;
}

/* The writes of streams that we do not know must have passed before bytes are compared. */
static gm_status poll_watched(gm_engine *engine)
{
    for (gm_lease *lease = engine->leases; lease; lease = lease->next) {
        if (lease->is_pinned && atomic_load(&lease->is_watched)) {
            GM_TRY(engine->device->ops->stream_sync(engine->device, 0));
            GM_TRY(reconcile_lease(engine, lease));
        }
    }
    return GM_OK;
}

static gm_status renew_snapshots(gm_engine *engine)
{
    for (gm_lease *lease = engine->leases; lease; lease = lease->next) {
        if (lease->is_pinned && atomic_load(&lease->is_watched)) {
            GM_TRY(snapshot(engine, lease));
        }
    }
    return GM_OK;
}

static gm_status process_leases(gm_engine *engine, gm_stream stream)
{
    gm_lease **link = &engine->leases;
    while (*link) {
        gm_lease *lease = *link;
        if (!atomic_load(&lease->is_ended)) {
            link = &lease->next;
            continue;
        }
        uint32_t chunk = engine->params[lease->param].place.chunk;
        if (lease->is_pinned && atomic_load(&lease->is_watched)) {
            GM_TRY(engine->device->ops->stream_sync(engine->device, stream));
            GM_TRY(reconcile_lease(engine, lease));
        }
        bool was_pinned = lease->is_pinned;
        *link = lease->next;
        free(lease->old);
        free(lease);
        if (was_pinned) {
            GM_TRY(unpin_weights(engine, chunk, stream));
        }
    }
    return GM_OK;
}

gm_status gm_lease_new(gm_engine *engine, uint32_t id, bool is_pinned, bool is_watched,
                       gm_stream stream, gm_lease **out)
{
    GM_TRY(check_param(engine, id));
    const param *p = &engine->params[id];
    gm_lease *lease = calloc(1, sizeof *lease);
    void *old = is_watched ? malloc(p->spec.numel * p->spec.weight_bytes + 1) : NULL;
    if (!lease || (is_watched && !old)) {
        free(lease);
        free(old);
        return GM_FAIL(GM_ERR_NOMEM, "HOST: lease of %llu elements", (unsigned long long)p->spec.numel);
    }
    *lease = (gm_lease){.engine = engine, .param = id, .is_pinned = is_pinned, .old = old};
    atomic_init(&lease->is_watched, is_watched);
    atomic_init(&lease->is_ended, false);
    gm_status status = begin_call(engine, stream);
    if (status != GM_OK) {
        free(old);
        free(lease);
        return status;
    }
    if (is_pinned) {
        status = pin_weights(engine, p->place.chunk, stream);
        if (status == GM_OK && is_watched) {
            /* Work that still writes the weight (the update) is on this stream. */
            status = engine->device->ops->stream_sync(engine->device, stream);
            status = status == GM_OK ? snapshot(engine, lease) : status;
            if (status != GM_OK) {
                (void)unpin_weights(engine, p->place.chunk, stream);
            }
        }
    }
    if (status != GM_OK) {
        free(old);
        free(lease);
        return end_call(engine, status);
    }
    atomic_fetch_add(&engine->references, 1);
    lease->next = engine->leases;
    engine->leases = lease;
    *out = lease;
    return end_call(engine, GM_OK);
}

void gm_lease_end(gm_lease *lease)
{
    gm_engine *engine = lease->engine; /* the lease may be freed once is_ended shows */
    atomic_store(&lease->is_ended, true);
    gm_engine_unref(engine);
}

void gm_lease_unwatch(gm_lease *lease)
{
    atomic_store(&lease->is_watched, false);
}

uintptr_t gm_lease_address(const gm_lease *lease)
{
    return gm_engine_address(lease->engine, lease->param);
}

gm_status gm_engine_drain(gm_engine *engine, gm_stream stream)
{
    GM_TRY(begin_call(engine, stream));
    return end_call(engine, GM_OK);
}

/* ---- the update ---- */

static gm_adam_args adam_args(const gm_engine *engine, uint32_t chunk, uint8_t *weight,
                              uint8_t *state, uint8_t *grad, const gm_adam_range *ranges, size_t n)
{
    const gm_engine_param *spec = chunk_spec(engine, chunk);
    state_shape shape = state_shape_of(spec, gm_layout_chunk(engine->layout, chunk)->numel);
    return (gm_adam_args){
        .format = spec->format,
        .grad_dtype = grad_dtype(engine, spec),
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
    gm_adam_args args = adam_args(
        engine, chunk, (uint8_t *)gm_chunks_address(engine->chunks, chunk, GM_WEIGHT),
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
                                size_t n)
{
    for (int piece = 0; piece < GM_N_PIECES; piece++) {
        GM_TRY(gm_chunks_claim_home(engine->chunks, chunk, (gm_piece)piece));
    }
    gm_adam_args args = adam_args(engine, chunk, gm_chunks_home(engine->chunks, chunk, GM_WEIGHT),
                                  gm_chunks_home(engine->chunks, chunk, GM_STATE),
                                  gm_chunks_home(engine->chunks, chunk, GM_GRAD), ranges, n);
    GM_TRY(gm_adam_host(&args, engine->workers));
    GM_TRY(gm_chunks_home_written(engine->chunks, chunk, GM_WEIGHT));
    return gm_chunks_home_written(engine->chunks, chunk, GM_STATE);
}

static int compare_updates(const void *a, const void *b)
{
    uint32_t left = ((const gm_update *)a)->param, right = ((const gm_update *)b)->param;
    return left < right ? -1 : left > right;
}

static gm_status run_step(gm_engine *engine, const gm_update *updates, uint32_t n,
                          gm_adam_range *ranges, gm_stream stream)
{
    GM_TRY(sync_grads(engine));
    GM_TRY(poll_watched(engine));
    bool *is_done = calloc(gm_layout_n_chunks(engine->layout) + (size_t)1, sizeof *is_done);
    if (!is_done) {
        return GM_FAIL(GM_ERR_NOMEM, "HOST: step over %u parameters", n);
    }
    gm_status status = GM_OK;
    for (uint32_t i = 0; i < n && status == GM_OK; i++) {
        uint32_t chunk = engine->params[updates[i].param].place.chunk;
        if (is_done[chunk]) {
            continue;
        }
        is_done[chunk] = true;
        size_t n_ranges = 0;
        for (uint32_t k = i; k < n && status == GM_OK; k++) {
            const param *p = &engine->params[updates[k].param];
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
                     : update_at_home(engine, chunk, ranges, n_ranges);
    }
    free(is_done);
    return status == GM_OK ? renew_snapshots(engine) : status;
}

gm_status gm_engine_step(gm_engine *engine, const gm_update *updates, uint32_t n, gm_stream stream)
{
    for (uint32_t i = 0; i < n; i++) { /* everything that can be refused is refused before the first write */
        GM_TRY(check_param(engine, updates[i].param));
        const param *p = &engine->params[updates[i].param];
        if (!p->spec.has_moments || !p->has_grad) {
            return GM_FAIL(GM_ERR_ARG, "parameter %u has no %s", updates[i].param,
                           p->has_grad ? "moments" : "gradient");
        }
        gm_adam_scalars scalars;
        GM_TRY(gm_adam_scalars_init(&updates[i].hyper, &scalars));
    }
    gm_update *sorted = malloc((n ? n : 1) * sizeof *sorted);
    gm_adam_range *ranges = malloc((n ? n : 1) * sizeof *ranges);
    if (!sorted || !ranges) {
        free(sorted);
        free(ranges);
        return GM_FAIL(GM_ERR_NOMEM, "HOST: step over %u parameters", n);
    }
    if (n) {
        memcpy(sorted, updates, n * sizeof *sorted);
        qsort(sorted, n, sizeof *sorted, compare_updates);
    }
    gm_status status = begin_call(engine, stream);
    if (status == GM_OK) {
        status = run_step(engine, sorted, n, ranges, stream);
        if (status != GM_OK) { /* invariant 5 */
            engine->dead = status;
            snprintf(engine->dead_text, sizeof engine->dead_text, "%s", gm_last_error());
        }
        (void)end_call(engine, status);
    }
    free(sorted);
    free(ranges);
    return status;
}

/* ---- memory ---- */

bool gm_engine_reserve(gm_engine *engine, size_t bytes)
{
    pthread_mutex_lock(&engine->lock);
    size_t limit = chunk_limit(engine), held = 0;
    bool has_room = limit == SIZE_MAX;
    if (!has_room && limit >= bytes) {
        has_room = gm_chunks_set_limit(engine->chunks, limit - bytes, &held) == GM_OK &&
                   held <= limit - bytes;
    }
    pthread_mutex_unlock(&engine->lock);
    return has_room;
}

gm_status gm_engine_settle(gm_engine *engine, size_t reserve_bytes)
{
    GM_TRY(begin_call(engine, 0));
    gm_status status = sync_grads(engine);
    size_t limit = chunk_limit(engine), needed = reserve_bytes;
    if (engine->policy != GM_POLICY_AUTO || status != GM_OK) {
        return end_call(engine, status);
    }
    uint32_t n = gm_layout_n_chunks(engine->layout);
    for (uint32_t id = 0; id < n; id++) {
        needed += gm_engine_chunk_bytes(engine, id);
    }
    for (uint32_t id = 0; id < n && status == GM_OK; id++) {
        const gm_engine_param *spec = chunk_spec(engine, id);
        uint64_t numel = gm_layout_chunk(engine->layout, id)->numel;
        needed += gm_chunks_block_bytes(engine->device, state_shape_of(spec, numel).total);
        needed += spec->has_grad
                      ? gm_chunks_block_bytes(engine->device,
                                              numel * gm_dtype_bytes(grad_dtype(engine, spec)))
                      : 0;
        if (needed > limit) {
            break;
        }
        if (spec->has_moments && !gm_chunks_is_settled(engine->chunks, id)) {
            status = gm_chunks_set_limit(engine->chunks, limit, NULL);
            status = status == GM_OK ? gm_chunks_settle(engine->chunks, id) : status;
        }
    }
    return end_call(engine, status);
}

void gm_engine_get_stats(gm_engine *engine, gm_engine_stats *out)
{
    pthread_mutex_lock(&engine->lock);
    gm_chunks_stats stats;
    gm_chunks_get_stats(engine->chunks, &stats);
    uint32_t n = gm_layout_n_chunks(engine->layout);
    *out = (gm_engine_stats){
        .fetches = stats.fetches,
        .evictions = stats.evictions,
        .fetched_bytes = stats.fetched_bytes,
        .evicted_bytes = stats.evicted_bytes,
        .device_bytes = stats.device_bytes,
        .device_peak_bytes = stats.device_peak_bytes,
        .device_budget_bytes = engine->budget,
        .host_bytes = engine->arena ? gm_arena_bytes(engine->arena) : 0,
        .n_chunks = n,
        .n_blocks = stats.n_blocks,
        .layout_hash = gm_layout_hash(engine->layout),
    };
    for (uint32_t id = 0; id < n; id++) {
        const gm_engine_param *spec = chunk_spec(engine, id);
        uint64_t numel = gm_layout_chunk(engine->layout, id)->numel;
        out->weight_bytes += gm_engine_chunk_bytes(engine, id);
        out->state_bytes += gm_engine_chunk_bytes(engine, id) +
                            gm_chunks_block_bytes(engine->device, state_shape_of(spec, numel).total);
        out->state_bytes += spec->has_grad
                                ? gm_chunks_block_bytes(engine->device,
                                                        numel * gm_dtype_bytes(grad_dtype(engine, spec)))
                                : 0;
        out->n_settled += gm_chunks_is_settled(engine->chunks, id);
    }
    for (const gm_lease *lease = engine->leases; lease; lease = lease->next) {
        out->n_leases += lease->is_pinned && !atomic_load(&lease->is_ended);
    }
    pthread_mutex_unlock(&engine->lock);
}

gm_status gm_engine_check(gm_engine *engine)
{
    GM_TRY(begin_call(engine, 0));
    gm_status status = gm_chunks_check(engine->chunks);
    for (uint32_t id = 0; status == GM_OK && id < gm_layout_n_chunks(engine->layout); id++) {
        bool state = gm_chunks_is_resident(engine->chunks, id, GM_STATE);
        bool grad = gm_chunks_is_resident(engine->chunks, id, GM_GRAD);
        if (gm_chunks_is_settled(engine->chunks, id) != (state && grad)) {
            status = GM_FAIL(GM_ERR_STATE, "invariant 2: chunk %u is half settled", id);
        }
    }
    return end_call(engine, status);
}
