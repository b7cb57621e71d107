/* gradient.c - the gradient of a chunk: packing what has arrived, and the sum over the ranks.
 *
 * A gradient is torch's memory and may be reused behind the work of the caller's stream: it is
 * packed into the chunk's own gradient on that stream, and never crosses to another.  The same
 * kernel leaves the exact sum of squares of what it wrote, once somebody has asked for the norm.
 *
 *            arrives               sum over ranks              update inside the backward, or the
 *                                  step that this announced
 *     NONE -----------> ARRIVED ---------------------> REDUCED ---------------------------> USED_UP
 *                                                       |   ^
 *                                    another arrives    v   |    sum over ranks
 *                                                      GROWING
 *
 * One rank has no sum: what arrives is REDUCED at once, as is what is written from outside.  A drop
 * leads from each state to NONE, and it alone from USED_UP; but where no update ran inside the
 * backward the bytes are still there, and gm_engine_keep_grads leads back to REDUCED.
 *
 * Invariants, with several ranks
 *   1. Every sum is issued on comm_stream, in an order that is the same on all ranks (invariants 1
 *      and 2 of weights.c).
 *   2. Unreduced gradients are pinned from the first one until their reduction: nobody evicts a
 *      transient piece.
 *   3. A gradient that some rank has and another has not in the same reduction is lost to the one
 *      that has not.  So each parameter keeps a hash of its reductions, which ranks compare before
 *      a step or a norm (agreement.py).
 *   4. Gradients are divided by the power of two in the number of ranks before the sum, which is
 *      exact and keeps 16-bit sums in range, and by the rest after it.
 *   5. Gradients that wait for others of their chunk take at most unreduced_limit bytes, a number
 *      that the ranks share: how many chunks a backward has begun at a time is the model's
 *      business, and some gradients never come.
 *
 * The host may wait in: add_at_home (a gradient that is added to one at home, on demand); and on
 * demand where a piece is released. */
#include "engine/engine_impl.h"

static const bool may_move[GM_N_GRAD_STATES][GM_N_GRAD_STATES] = {
    [GM_GRAD_NONE] = {[GM_GRAD_NONE] = true, [GM_GRAD_ARRIVED] = true, [GM_GRAD_REDUCED] = true},
    [GM_GRAD_ARRIVED] = {[GM_GRAD_NONE] = true, [GM_GRAD_ARRIVED] = true, [GM_GRAD_REDUCED] = true},
    [GM_GRAD_GROWING] = {[GM_GRAD_NONE] = true, [GM_GRAD_GROWING] = true, [GM_GRAD_REDUCED] = true},
    [GM_GRAD_REDUCED] = {[GM_GRAD_NONE] = true,
                         [GM_GRAD_GROWING] = true,
                         [GM_GRAD_REDUCED] = true,
                         [GM_GRAD_USED_UP] = true},
    [GM_GRAD_USED_UP] = {[GM_GRAD_NONE] = true, [GM_GRAD_REDUCED] = true, [GM_GRAD_USED_UP] = true},
};

static void move(gm_engine *engine, gm_param *p, gm_grad_state to)
{
    gm_chunk_state *state = &engine->chunk_states[p->place.chunk];
    GM_ASSERT(may_move[p->grad][to]);
    state->n_held -= gm_is_held(p);
    state->n_unreduced -= gm_is_unreduced(p);
    p->grad = to;
    state->n_held += gm_is_held(p);
    state->n_unreduced += gm_is_unreduced(p);
}

/* The gradient is another one now than sums[] has been made of. */
static void outdate_sum(gm_param *p)
{
    p->sum = p->sum == GM_SUM_ZERO ? GM_SUM_ZERO : GM_SUM_STALE;
}

/* ---- this rank's part ---- */

/* Device memory -> home through the staging area, converting and adding on the host, slice by
 * slice. */
static gm_status add_at_home(gm_engine *engine, uint32_t chunk, gm_grad_add_args *args,
                             gm_stream stream)
{
    gm_device *device = engine->device;
    size_t src_bytes = gm_dtype_bytes(args->src_dtype), dst_bytes = gm_dtype_bytes(args->dst_dtype);
    size_t slice = GM_STAGING_BYTES / src_bytes, numel = args->numel;
    uintptr_t src = (uintptr_t)args->src;
    uint8_t *dst = args->dst;
    GM_TRY(gm_chunks_claim_home(engine->chunks, chunk, GM_GRAD));
    if (device->is_host && gm_has_ranks(engine)) { /* it comes of a collective */
        GM_TRY(device->ops->stream_sync(device, stream));
    }
    for (size_t done = 0; done < numel && !device->is_paper; done += slice) {
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

static gm_status put(gm_engine *engine, gm_param *p, const void *grad, gm_dtype dtype,
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
        .accumulate = gm_is_held(p),
        .divisor = divisor,
    };
    uint32_t chunk = p->place.chunk;
    bool is_here;
    GM_TRY(is_on_device(engine, chunk, stream, &is_here));
    outdate_sum(p);
    if (is_here) {
        gm_sumsq *sum = engine->arrive.wants_sums ? &engine->sums.there[p - engine->params] : NULL;
        GM_TRY(gm_chunks_begin(chunks, chunk, GM_GRAD, GM_WRITE, stream));
        args.dst = (void *)(gm_chunks_address(chunks, chunk, GM_GRAD) + offset);
        GM_TRY(device->ops->grad_add(device, &args, sum, stream));
        p->sum = sum ? GM_SUM_RIGHT : p->sum;
        return gm_chunks_end(chunks, chunk, GM_GRAD, GM_WRITE, stream);
    }
    args.dst = gm_chunks_home(chunks, chunk, GM_GRAD) + offset;
    if (device->is_host || gm_is_held(p) || dtype != home_dtype || gm_grad_is_divided(&args)) {
        return add_at_home(engine, chunk, &args, stream);
    }
    GM_TRY(gm_chunks_begin(chunks, chunk, GM_GRAD, GM_HOME_WRITE, stream));
    GM_TRY(device->ops->copy_d2h(device, args.dst, (uintptr_t)grad,
                                 args.numel * gm_dtype_bytes(dtype), stream));
    return gm_chunks_end(chunks, chunk, GM_GRAD, GM_HOME_WRITE, stream);
}

/* ---- several ranks ---- */

void gm_gradient_init(gm_engine *engine)
{
    engine->gradient.unreduced_limit = SIZE_MAX;
    uint32_t n = engine->ranks.n_shards * engine->ranks.n_replicas;
    engine->gradient.divisor_before = 1;
    while (2 * engine->gradient.divisor_before <= (float)n) {
        engine->gradient.divisor_before *= 2;
    }
    engine->gradient.divisor_after = (float)n / engine->gradient.divisor_before;
}

void gm_gradient_limit(gm_engine *engine, size_t bytes)
{
    for (uint32_t id = 0; id < gm_layout_n_chunks(engine->layout); id++) {
        size_t own = gm_engine_piece_blocks(engine, id, GM_UNREDUCED);
        bytes = bytes > own ? bytes : own;
    }
    engine->gradient.unreduced_limit = bytes;
}

static gm_status forget_unreduced(gm_engine *engine, uint32_t chunk)
{
    engine->gradient.unreduced_bytes -= gm_engine_piece_blocks(engine, chunk, GM_UNREDUCED);
    engine->chunk_states[chunk].is_late = false;
    gm_chunks_unpin_ordered(engine->chunks, chunk, GM_UNREDUCED);
    return gm_chunks_discard(engine->chunks, chunk, GM_UNREDUCED);
}

/* Gradients that have not come count as zeros.  What lies between parameters is summed as it is:
 * nobody reads it. */
static gm_status fill_absent(gm_engine *engine, uint32_t chunk, size_t width)
{
    const gm_chunk_state *state = &engine->chunk_states[chunk];
    uintptr_t whole = gm_chunks_address(engine->chunks, chunk, GM_UNREDUCED);
    for (uint32_t i = 0; i < state->n_params && state->n_unreduced < state->n_params; i++) {
        const gm_param *p = &engine->params[engine->chunk_params[state->first_param + i]];
        if (!gm_is_unreduced(p) && p->spec.numel > 0) {
            GM_TRY(engine->device->ops->fill(engine->device, whole + p->place.offset * width, 0,
                                             p->spec.numel * width, engine->ranks.stream));
        }
    }
    return GM_OK;
}

/* The sum over ranks of this rank's shard, in its place. */
static gm_status issue_reduce(gm_engine *engine, uint32_t chunk, uintptr_t mine, gm_dtype dtype)
{
    gm_stream stream = engine->ranks.stream;
    uint64_t numel = gm_layout_chunk(engine->layout, chunk)->shard_numel;
    gm_ranks_label(engine, GM_FOR_REDUCE, chunk);
    GM_TRY(gm_chunks_begin(engine->chunks, chunk, GM_UNREDUCED, GM_WRITE, stream));
    GM_TRY(fill_absent(engine, chunk, gm_dtype_bytes(dtype)));
    uint32_t entry =
        gm_timeline_begin(engine->timeline, GM_LOG_REDUCE, GM_ON_COMM, chunk, GM_UNREDUCED,
                          gm_engine_piece_bytes(engine, chunk, GM_UNREDUCED), stream);
    if (engine->ranks.n_shards > 1) {
        GM_TRY(gm_comm_reduce_scatter(engine->ranks.shard_comm,
                                      gm_chunks_address(engine->chunks, chunk, GM_UNREDUCED), numel,
                                      (gm_comm_dtype)dtype, stream));
    }
    if (engine->ranks.n_replicas > 1) {
        GM_TRY(gm_comm_all_reduce(engine->ranks.replica_comm, mine, numel, (gm_comm_dtype)dtype,
                                  GM_COMM_SUM, stream));
    }
    gm_timeline_end(engine->timeline, entry, stream);
    engine->gradient.n_reduces++;
    engine->gradient.reduced_bytes += gm_engine_piece_bytes(engine, chunk, GM_UNREDUCED);
    return gm_chunks_end(engine->chunks, chunk, GM_UNREDUCED, GM_WRITE, stream);
}

static gm_status reduce(gm_engine *engine, uint32_t chunk)
{
    gm_chunks *chunks = engine->chunks;
    gm_stream stream = engine->ranks.stream;
    gm_chunk_state *state = &engine->chunk_states[chunk];
    gm_dtype dtype = gm_grad_dtype(engine, gm_chunk_spec(engine, chunk));
    uintptr_t mine = gm_chunks_address(chunks, chunk, GM_UNREDUCED) +
                     engine->ranks.rank * gm_engine_piece_bytes(engine, chunk, GM_GRAD);
    GM_TRY(issue_reduce(engine, chunk, mine, dtype));
    GM_TRY(gm_chunks_begin(chunks, chunk, GM_UNREDUCED, GM_READ, stream));
    for (uint32_t i = 0; i < state->n_params; i++) {
        gm_param *p = &engine->params[engine->chunk_params[state->first_param + i]];
        if (!gm_is_unreduced(p)) {
            continue;
        }
        if (p->part_numel > 0) {
            GM_TRY(put(engine, p, (const void *)(mine + p->part_offset * gm_dtype_bytes(dtype)),
                       dtype, engine->gradient.divisor_after, stream));
        }
        move(engine, p, GM_GRAD_REDUCED);
        p->sums = gm_fnv1a(p->sums, engine->gradient.n_reduces);
    }
    GM_TRY(gm_chunks_end(chunks, chunk, GM_UNREDUCED, GM_READ, stream));
    return forget_unreduced(engine, chunk);
}

gm_status gm_gradient_reduce(gm_engine *engine, uint32_t chunk)
{
    if (engine->chunk_states[chunk].n_unreduced == 0) {
        return GM_OK;
    }
    gm_status status = gm_ranks_check_joined(engine);
    status = status == GM_OK ? reduce(engine, chunk) : status;
    return status == GM_OK ? GM_OK : gm_engine_die(engine, status);
}

/* Invariant 5.  Those that have waited longest go first: what they wait for may not come at all. */
static gm_status make_room_for_unreduced(gm_engine *engine, size_t bytes)
{
    while (engine->gradient.unreduced_bytes > 0 &&
           bytes > engine->gradient.unreduced_limit - engine->gradient.unreduced_bytes) {
        uint32_t oldest = GM_NO_CHUNK;
        for (uint32_t id = 0; id < gm_layout_n_chunks(engine->layout); id++) {
            const gm_chunk_state *state = &engine->chunk_states[id];
            if (state->n_unreduced > 0 &&
                (oldest == GM_NO_CHUNK ||
                 state->unreduced_since < engine->chunk_states[oldest].unreduced_since)) {
                oldest = id;
            }
        }
        GM_TRY(gm_gradient_reduce(engine, oldest));
    }
    return GM_OK;
}

static gm_status begin_unreduced(gm_engine *engine, uint32_t chunk, gm_stream stream)
{
    size_t bytes = gm_engine_piece_blocks(engine, chunk, GM_UNREDUCED);
    GM_TRY(make_room_for_unreduced(engine, bytes));
    GM_TRY(gm_room_pin(engine, chunk, GM_UNREDUCED, stream));
    engine->gradient.unreduced_bytes += bytes;
    engine->chunk_states[chunk].unreduced_since = engine->gradient.n_unreduced++;
    return GM_OK;
}

static gm_status take_before_sum(gm_engine *engine, gm_param *p, const void *grad, gm_dtype dtype,
                                 gm_stream stream)
{
    gm_device *device = engine->device;
    gm_chunks *chunks = engine->chunks;
    uint32_t chunk = p->place.chunk;
    gm_chunk_state *state = &engine->chunk_states[chunk];
    gm_dtype kept = gm_grad_dtype(engine, &p->spec);
    uintptr_t whole = gm_chunks_address(chunks, chunk, GM_UNREDUCED);
    if (state->n_unreduced == 0) {
        GM_TRY(begin_unreduced(engine, chunk, stream));
    }
    gm_status status = gm_chunks_begin(chunks, chunk, GM_UNREDUCED, GM_WRITE, stream);
    if (status == GM_OK && p->spec.numel > 0) {
        gm_grad_add_args args = {
            .dst = (void *)(whole + p->place.offset * gm_dtype_bytes(kept)),
            .src = grad,
            .dst_dtype = kept,
            .src_dtype = dtype,
            .numel = p->spec.numel,
            .accumulate = gm_is_unreduced(p),
            .divisor = engine->gradient.divisor_before,
        };
        status = device->ops->grad_add(device, &args, NULL, stream);
    }
    gm_status ended = gm_chunks_end(chunks, chunk, GM_UNREDUCED, GM_WRITE, stream);
    status = status == GM_OK ? ended : status;
    if (status != GM_OK) {
        return gm_engine_die(engine, status); /* the other ranks sum what this one does not have */
    }
    move(engine, p, gm_is_held(p) ? GM_GRAD_GROWING : GM_GRAD_ARRIVED);
    return GM_OK;
}

gm_status gm_gradient_take(gm_engine *engine, gm_param *p, const void *grad, gm_dtype dtype,
                           gm_stream stream)
{
    atomic_fetch_add(&engine->gradient.version, 1);
    if (gm_has_ranks(engine)) {
        return take_before_sum(engine, p, grad, dtype, stream);
    }
    if (p->part_numel > 0) {
        GM_TRY(put(engine, p, grad, dtype, 1, stream));
    }
    move(engine, p, GM_GRAD_REDUCED);
    return GM_OK;
}

gm_status gm_gradient_drop(gm_engine *engine, gm_param *p)
{
    bool has_waited = gm_is_unreduced(p);
    move(engine, p, GM_GRAD_NONE);
    outdate_sum(p);
    p->sums = 0;
    return has_waited && engine->chunk_states[p->place.chunk].n_unreduced == 0
               ? forget_unreduced(engine, p->place.chunk)
               : GM_OK;
}

void gm_gradient_note_written(gm_engine *engine, gm_param *p)
{
    atomic_fetch_add(&engine->gradient.version, 1);
    move(engine, p, GM_GRAD_REDUCED);
}

void gm_gradient_use_up(gm_engine *engine, gm_param *p)
{
    move(engine, p, GM_GRAD_USED_UP);
}

bool gm_gradient_keep(gm_engine *engine, gm_param *p)
{
    bool was_used_up = p->grad == GM_GRAD_USED_UP;
    move(engine, p, was_used_up ? GM_GRAD_REDUCED : p->grad);
    return was_used_up;
}

gm_status gm_gradient_check_unused(const gm_engine *engine, uint32_t param)
{
    GM_FAIL_IF(engine->params[param].grad == GM_GRAD_USED_UP, GM_ERR_STATE,
               "the gradient of %s was used up by the update inside backward(step=True): call "
               "optimizer.step(), then zero_grad() before the next backward; to read, clip or keep "
               "gradients call backward without step=True",
               gm_engine_name(engine, param));
    return GM_OK;
}

uint64_t gm_engine_grads_version(const gm_engine *engine)
{
    return atomic_load(&engine->gradient.version) + atomic_load(&engine->opaque.n_written);
}

gm_status gm_gradient_reduce_all(gm_engine *engine)
{
    if (!gm_has_ranks(engine)) {
        return GM_OK;
    }
    for (uint32_t chunk = 0; chunk < gm_layout_n_chunks(engine->layout); chunk++) {
        GM_TRY(gm_gradient_reduce(engine, chunk));
    }
    return gm_ranks_check(engine);
}

void gm_gradient_note_step(gm_engine *engine)
{
    for (uint32_t chunk = 0; chunk < gm_layout_n_chunks(engine->layout); chunk++) {
        gm_habit_learn(&engine->chunk_states[chunk].arrivals);
    }
}
