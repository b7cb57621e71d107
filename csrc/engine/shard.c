/* shard.c - chunks of which each rank owns a part: gathering their weights, and summing their gradients.
 *
 * Invariants
 *   1. What begins a collective depends on the sequence of calls (units, backward nodes, leases that are made,
 *      gradients, steps) and on the plan that the ranks share, which are the same on all ranks; never on memory, on
 *      time, or on when a lease ends.  So is_gathered is kept apart from residence: it is set by a gathering, and
 *      cleared on demand with the last use, under a plan when another chunk is gathered into the plan's blocks of
 *      this one - also where this rank has left the plan's placement for lack of memory, and keeps to its order: what
 *      it has no room for meanwhile is on the host (spill.c).
 *   2. Every collective is issued on comm_stream, under the engine's lock, in the order of those calls.
 *   3. Gathered weights are pinned while anybody needs them, unreduced gradients from the first one until their
 *      reduction: nobody evicts a transient piece.
 *   4. A gradient that some rank has and another has not in the same reduction is lost to the one that has not.  So
 *      each parameter keeps a hash of its reductions, which ranks compare before a step or a norm (agreement.py).
 *   5. Gradients are divided by the power of two in the number of ranks before the sum, which is exact and keeps
 *      16-bit sums in range, and by the rest after it.
 *   6. Gradients that wait for others of their chunk take at most unreduced_limit bytes, a number that the ranks share: how
 *      many chunks a backward has begun at a time is the model's business, and some gradients never come.
 *
 * The host waits in: gm_shard_sum; and on demand where a piece is released. */
#include "engine/engine_impl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* purpose (8 bits), step (24), chunk (32) */
static void name_label(void *context, uint64_t label, char *out, size_t bytes)
{
    static const char *const purposes[GM_N_PURPOSES] = {"",
                                                        "gathering the weights of chunk",
                                                        "summing the gradients of chunk",
                                                        "the norm of all gradients",
                                                        "a common plan",
                                                        "whether a plan is due"};
    uint32_t purpose = (uint32_t)(label >> 56), step = (uint32_t)(label >> 32) & 0xffffff;
    uint32_t chunk = (uint32_t)label;
    (void)context;
    if (purpose == 0 || purpose >= GM_N_PURPOSES) {
        return;
    }
    if (purpose <= GM_FOR_REDUCE) {
        (void)snprintf(out, bytes, "%s %u after step %u", purposes[purpose], chunk, step);
    } else {
        (void)snprintf(out, bytes, "%s after step %u", purposes[purpose], step);
    }
}

void gm_shard_label(gm_engine *engine, gm_purpose purpose, uint32_t chunk)
{
    uint64_t label =
        (uint64_t)purpose << 56 | (engine->n_step_calls & UINT64_C(0xffffff)) << 32 | chunk;
    if (engine->shard_comm) {
        gm_comm_label(engine->shard_comm, label);
    }
    if (engine->replica_comm) {
        gm_comm_label(engine->replica_comm, label);
    }
}

gm_status gm_shard_compare(gm_engine *engine)
{
    if (engine->shard_comm) {
        GM_TRY(gm_comm_agree(engine->shard_comm, engine->comm_stream));
    }
    return engine->replica_comm ? gm_comm_agree(engine->replica_comm, engine->comm_stream) : GM_OK;
}

gm_status gm_shard_new(gm_engine *engine)
{
    gm_device *device = engine->device;
    uint32_t n = engine->n_shards * engine->n_replicas;
    engine->divisor_before = 1;
    while (2 * engine->divisor_before <= (float)n) {
        engine->divisor_before *= 2;
    }
    engine->divisor_after = (float)n / engine->divisor_before;
    if (n == 1) {
        return GM_OK;
    }
    GM_TRY(device->ops->stream_new(device, &engine->comm_stream));
    gm_comm *comms[] = {engine->shard_comm, engine->replica_comm};
    for (int i = 0; i < 2; i++) {
        if (comms[i]) {
            GM_TRY(gm_comm_attach(comms[i], device));
            gm_comm_set_namer(comms[i], name_label, NULL);
        }
    }
    return GM_OK;
}

static void leave(gm_engine *engine)
{
    if (engine->shard_comm || engine->replica_comm) {
        (void)engine->device->ops->stream_sync(engine->device, engine->comm_stream);
    }
    if (engine->shard_comm) {
        (void)gm_comm_attach(engine->shard_comm, NULL);
    }
    if (engine->replica_comm) {
        (void)gm_comm_attach(engine->replica_comm, NULL);
    }
    engine->shard_comm = engine->replica_comm = NULL;
}

void gm_engine_leave_ranks(gm_engine *engine)
{
    pthread_mutex_lock(&engine->lock);
    leave(engine);
    pthread_mutex_unlock(&engine->lock);
}

void gm_shard_free(gm_engine *engine)
{
    if (engine->comm_stream) {
        leave(engine);
        engine->device->ops->stream_free(engine->device, engine->comm_stream);
        free(engine->gathered_owners);
    }
}

static gm_status check_joined(const gm_engine *engine)
{
    return (engine->n_shards > 1 && !engine->shard_comm) ||
                   (engine->n_replicas > 1 && !engine->replica_comm)
               ? GM_FAIL(GM_ERR_STATE, "this engine is closed: its ranks have parted")
               : GM_OK;
}

bool gm_shard_has_unreduced(const gm_engine *engine)
{
    return engine->n_shards * engine->n_replicas > 1;
}

gm_status gm_shard_check(const gm_engine *engine)
{
    if (engine->shard_comm) {
        GM_TRY(gm_comm_check(engine->shard_comm));
    }
    return engine->replica_comm ? gm_comm_check(engine->replica_comm) : GM_OK;
}

/* ---- weights ---- */

/* The own shard goes to its place, the others' come. */
static gm_status issue_gather(gm_engine *engine, uint32_t chunk)
{
    gm_chunks *chunks = engine->chunks;
    gm_stream stream = engine->comm_stream;
    size_t bytes = gm_engine_piece_bytes(engine, chunk, GM_WEIGHT);
    uintptr_t whole = gm_chunks_address(chunks, chunk, GM_GATHERED);
    gm_shard_label(engine, GM_FOR_GATHER, chunk);
    GM_TRY(gm_chunks_begin_write(chunks, chunk, GM_GATHERED, stream));
    uint32_t entry = gm_timeline_begin(engine->timeline, GM_LOG_GATHER, GM_ON_COMM, chunk,
                                       GM_GATHERED, bytes * engine->n_shards, stream);
    GM_TRY(gm_chunks_begin_read(chunks, chunk, GM_WEIGHT, stream));
    GM_TRY(engine->device->ops->copy_d2d(engine->device, whole + engine->rank * bytes,
                                         gm_chunks_address(chunks, chunk, GM_WEIGHT), bytes,
                                         stream));
    GM_TRY(gm_chunks_end_read(chunks, chunk, GM_WEIGHT, stream));
    GM_TRY(gm_comm_all_gather(engine->shard_comm, whole, bytes, stream));
    gm_timeline_end(engine->timeline, entry, stream);
    engine->gathers++;
    engine->gathered_bytes += bytes * engine->n_shards;
    return gm_chunks_end_write(chunks, chunk, GM_GATHERED, stream);
}

static bool is_valid(const gm_chunk_state *state)
{
    return state->is_gathered && state->gathered == state->version;
}

static gm_status forget(gm_engine *engine, uint32_t chunk)
{
    engine->chunk_states[chunk].is_gathered = engine->chunk_states[chunk].is_doomed = false;
    gm_spill_forget(engine, chunk);
    return gm_chunks_discard(engine->chunks, chunk,
                             GM_GATHERED); /* unless a lease still shows it */
}

/* In the plan's blocks for gathered weights the chunk takes the place of others. */
static gm_status take_place(gm_engine *engine, uint32_t chunk)
{
    if (!engine->collectives) {
        return GM_OK;
    }
    const gm_place *place = gm_plan_place(engine->collectives, chunk, GM_GATHERED);
    uint32_t n = (uint32_t)(gm_engine_piece_blocks(engine, chunk, GM_GATHERED) /
                            engine->device->block_bytes);
    for (uint32_t i = 0; place->length > 0 && i < n; i++) {
        uint32_t *owner =
            &engine->gathered_owners[place->base + (place->offset + i) % place->length];
        if (*owner != chunk && *owner != GM_NO_CHUNK) {
            gm_chunk_state *other = &engine->chunk_states[*owner];
            other->is_doomed = other->n_uses > 0; /* then it goes with its last use */
            if (!other->is_doomed) {
                GM_TRY(forget(engine, *owner));
            }
        }
        *owner = chunk;
    }
    return GM_OK;
}

gm_status gm_shard_adopt(gm_engine *engine, gm_plan *plan)
{
    uint32_t n = gm_plan_n_blocks(plan);
    uint32_t *owners = malloc((n + (size_t)1) * sizeof *owners);
    if (!owners) {
        return GM_FAIL(GM_ERR_NOMEM, "HOST: a plan of %u blocks", n);
    }
    for (uint32_t i = 0; i < n; i++) {
        owners[i] = GM_NO_CHUNK;
    }
    free(engine->gathered_owners);
    engine->gathered_owners = owners;
    engine->collectives = plan;
    return GM_OK;
}

gm_status gm_shard_forget_all(gm_engine *engine)
{
    engine->collectives = NULL;
    for (uint32_t chunk = 0; chunk < gm_layout_n_chunks(engine->layout); chunk++) {
        gm_chunk_state *state = &engine->chunk_states[chunk];
        state->is_doomed = state->n_uses > 0;
        if (!state->is_doomed && engine->shown == GM_GATHERED) {
            GM_TRY(forget(engine, chunk));
        }
    }
    return GM_OK;
}

static gm_status gather(gm_engine *engine, uint32_t chunk)
{
    gm_chunks *chunks = engine->chunks;
    GM_TRY(check_joined(engine));
    GM_TRY(take_place(engine, chunk));
    bool is_shown = gm_chunks_pins(chunks, chunk, GM_GATHERED) > 0;
    if (is_shown) { /* by leases: what was written through them is kept, and their readers come first */
        GM_TRY(gm_lease_poll_watched(engine));
        GM_TRY(gm_chunks_note_readers(chunks, chunk, GM_GATHERED, engine->stream));
    }
    gm_stream stream = engine->comm_stream;
    GM_TRY(gm_engine_pin_piece(engine, chunk, GM_WEIGHT, stream));
    gm_status status = gm_engine_pin_piece(engine, chunk, GM_GATHERED, stream);
    if (status == GM_OK) {
        status = issue_gather(engine, chunk);
        gm_chunks_unpin_ordered(chunks, chunk, GM_GATHERED);
    }
    gm_chunks_unpin_ordered(chunks, chunk, GM_WEIGHT);
    if (status == GM_OK && engine->policy == GM_POLICY_CPU && !engine->plan) {
        status = gm_chunks_evict(chunks, chunk, GM_WEIGHT);
    }
    if (status == GM_OK) {
        gm_chunk_state *state = &engine->chunk_states[chunk];
        gm_spill_forget(engine, chunk);
        state->is_gathered = true;
        state->is_doomed = false;
        state->gathered = state->version;
        status = is_shown ? gm_lease_renew_snapshots(engine) : GM_OK;
    }
    return status;
}

gm_status gm_shard_prefetch(gm_engine *engine, uint32_t chunk)
{
    if (engine->shown != GM_GATHERED || is_valid(&engine->chunk_states[chunk])) {
        return GM_OK;
    }
    GM_TRY(gm_update_issue(engine, chunk));
    return gather(engine, chunk);
}

gm_status gm_shard_pin(gm_engine *engine, uint32_t chunk, gm_stream stream, bool is_use)
{
    gm_chunk_state *state = &engine->chunk_states[chunk];
    if (!is_valid(state)) {
        GM_TRY(gather(engine, chunk));
        state->is_gathered = is_use || engine->collectives || state->n_uses > 0;
    }
    GM_TRY(gm_spill_back(engine, chunk));
    GM_ASSERT(gm_chunks_is_resident(engine->chunks, chunk, GM_GATHERED));
    GM_TRY(gm_chunks_pin(engine->chunks, chunk, GM_GATHERED, stream));
    state->n_uses += is_use;
    return GM_OK;
}

gm_status gm_shard_unpin(gm_engine *engine, uint32_t chunk, gm_stream stream, bool is_use)
{
    GM_TRY(gm_chunks_unpin(engine->chunks, chunk, GM_GATHERED, stream));
    GM_ASSERT(!is_use || engine->chunk_states[chunk].n_uses > 0);
    gm_chunk_state *state = &engine->chunk_states[chunk];
    state->n_uses -= is_use;
    if (is_use && state->n_uses == 0 && (state->is_doomed || !engine->collectives)) {
        return forget(engine, chunk);
    }
    return state->is_gathered ? GM_OK : gm_chunks_discard(engine->chunks, chunk, GM_GATHERED);
}

gm_status gm_shard_unpin_for_retry(gm_engine *engine, uint32_t chunk, gm_stream stream)
{
    gm_chunk_state *state = &engine->chunk_states[chunk];
    GM_TRY(gm_chunks_unpin(engine->chunks, chunk, GM_GATHERED, stream));
    state->n_uses--;
    state->is_doomed |= !engine->collectives; /* it goes with its next last use */
    return GM_OK;
}

gm_status gm_shard_take_back(gm_engine *engine, const gm_param *p, const void *old,
                             const void *weight, gm_stream stream)
{
    if (p->part_numel == 0) {
        return GM_OK;
    }
    size_t width = p->spec.weight_bytes, at = p->part_first * width;
    const uint8_t *before = (const uint8_t *)old + at, *after = (const uint8_t *)weight + at;
    gm_slice s = gm_field_slice(engine, p, GM_FIELD_WEIGHT);
    uint8_t *present = malloc(2 * s.bytes);
    if (!present) {
        return GM_FAIL(GM_ERR_NOMEM, "HOST: %zu bytes of scratch", 2 * s.bytes);
    }
    uint8_t *wanted = present + s.bytes;
    gm_status status =
        gm_chunks_read(engine->chunks, p->place.chunk, GM_WEIGHT, s.offset, s.bytes, present);
    if (status == GM_OK) { /* what nobody wrote may be newer in the shard than in the tensor */
        memcpy(wanted, present, s.bytes);
        for (size_t i = 0; i < s.bytes; i += width) {
            if (memcmp(before + i, after + i, width) != 0) {
                memcpy(wanted + i, after + i, width);
            }
        }
        status = gm_field_reset_low(engine, p, present, wanted, stream);
    }
    if (status == GM_OK) {
        status = gm_chunks_write(engine->chunks, p->place.chunk, GM_WEIGHT, s.offset, s.bytes,
                                 wanted, stream);
    }
    free(present);
    return status;
}

/* ---- gradients ---- */

/* Invariant 6.  Those that have waited longest go first: what they wait for may not come at all. */
static gm_status make_room_for_unreduced(gm_engine *engine, size_t bytes)
{
    while (engine->unreduced_bytes > 0 &&
           bytes > engine->unreduced_limit - engine->unreduced_bytes) {
        uint32_t oldest = GM_NO_CHUNK;
        for (uint32_t id = 0; id < gm_layout_n_chunks(engine->layout); id++) {
            const gm_chunk_state *state = &engine->chunk_states[id];
            if (state->n_unreduced > 0 &&
                (oldest == GM_NO_CHUNK ||
                 state->unreduced_since < engine->chunk_states[oldest].unreduced_since)) {
                oldest = id;
            }
        }
        GM_TRY(gm_shard_reduce(engine, oldest));
    }
    return GM_OK;
}

static gm_status begin_unreduced(gm_engine *engine, uint32_t chunk, gm_stream stream)
{
    size_t bytes = gm_engine_piece_blocks(engine, chunk, GM_UNREDUCED);
    GM_TRY(make_room_for_unreduced(engine, bytes));
    GM_TRY(gm_engine_pin_piece(engine, chunk, GM_UNREDUCED, stream));
    engine->unreduced_bytes += bytes;
    engine->chunk_states[chunk].unreduced_since = engine->n_unreduced++;
    return GM_OK;
}

gm_status gm_engine_limit_unreduced(gm_engine *engine, size_t bytes)
{
    GM_TRY(gm_engine_begin_call(engine));
    for (uint32_t id = 0; id < gm_layout_n_chunks(engine->layout); id++) {
        size_t own = gm_engine_piece_blocks(engine, id, GM_UNREDUCED);
        bytes = bytes > own ? bytes : own;
    }
    engine->unreduced_limit = bytes;
    return gm_engine_end_call(engine, GM_OK);
}

gm_status gm_shard_take_grad(gm_engine *engine, gm_param *p, const void *grad, gm_dtype dtype,
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
    gm_status status = gm_chunks_begin_write(chunks, chunk, GM_UNREDUCED, stream);
    if (status == GM_OK && p->spec.numel > 0) {
        gm_grad_add_args args = {
            .dst = (void *)(whole + p->place.offset * gm_dtype_bytes(kept)),
            .src = grad,
            .dst_dtype = kept,
            .src_dtype = dtype,
            .numel = p->spec.numel,
            .accumulate = p->is_unreduced,
            .divisor = engine->divisor_before,
        };
        status = device->ops->grad_add(device, &args, NULL, stream);
    }
    gm_status ended = gm_chunks_end_write(chunks, chunk, GM_UNREDUCED, stream);
    status = status == GM_OK ? ended : status;
    if (status != GM_OK) {
        return gm_engine_die(engine, status); /* the other ranks sum what this one does not have */
    }
    state->n_unreduced += !p->is_unreduced;
    p->is_unreduced = true;
    return GM_OK;
}

static gm_status forget_unreduced(gm_engine *engine, uint32_t chunk)
{
    engine->unreduced_bytes -= gm_engine_piece_blocks(engine, chunk, GM_UNREDUCED);
    gm_chunks_unpin_ordered(engine->chunks, chunk, GM_UNREDUCED);
    return gm_chunks_discard(engine->chunks, chunk, GM_UNREDUCED);
}

gm_status gm_shard_drop_grad(gm_engine *engine, gm_param *p)
{
    if (!p->is_unreduced) {
        return GM_OK;
    }
    p->is_unreduced = false;
    return --engine->chunk_states[p->place.chunk].n_unreduced > 0
               ? GM_OK
               : forget_unreduced(engine, p->place.chunk);
}

/* Gradients that have not come count as zeros.  What lies between parameters is summed as it is: nobody reads it. */
static gm_status fill_absent(gm_engine *engine, uint32_t chunk, size_t width)
{
    const gm_chunk_state *state = &engine->chunk_states[chunk];
    uintptr_t whole = gm_chunks_address(engine->chunks, chunk, GM_UNREDUCED);
    for (uint32_t i = 0; i < state->n_params && state->n_unreduced < state->n_params; i++) {
        const gm_param *p = &engine->params[engine->chunk_params[state->first_param + i]];
        if (!p->is_unreduced && p->spec.numel > 0) {
            GM_TRY(engine->device->ops->fill(engine->device, whole + p->place.offset * width, 0,
                                             p->spec.numel * width, engine->comm_stream));
        }
    }
    return GM_OK;
}

/* The sum over ranks of this rank's shard, in its place. */
static gm_status issue_reduce(gm_engine *engine, uint32_t chunk, uintptr_t mine, gm_dtype dtype)
{
    gm_stream stream = engine->comm_stream;
    uint64_t numel = gm_layout_chunk(engine->layout, chunk)->shard_numel;
    gm_shard_label(engine, GM_FOR_REDUCE, chunk);
    GM_TRY(gm_chunks_begin_write(engine->chunks, chunk, GM_UNREDUCED, stream));
    GM_TRY(fill_absent(engine, chunk, gm_dtype_bytes(dtype)));
    uint32_t entry =
        gm_timeline_begin(engine->timeline, GM_LOG_REDUCE, GM_ON_COMM, chunk, GM_UNREDUCED,
                          gm_engine_piece_bytes(engine, chunk, GM_UNREDUCED), stream);
    if (engine->n_shards > 1) {
        GM_TRY(gm_comm_reduce_scatter(engine->shard_comm,
                                      gm_chunks_address(engine->chunks, chunk, GM_UNREDUCED), numel,
                                      (gm_comm_dtype)dtype, stream));
    }
    if (engine->n_replicas > 1) {
        GM_TRY(gm_comm_all_reduce(engine->replica_comm, mine, numel, (gm_comm_dtype)dtype,
                                  GM_COMM_SUM, stream));
    }
    gm_timeline_end(engine->timeline, entry, stream);
    engine->reduces++;
    engine->reduced_bytes += gm_engine_piece_bytes(engine, chunk, GM_UNREDUCED);
    return gm_chunks_end_write(engine->chunks, chunk, GM_UNREDUCED, stream);
}

static gm_status reduce(gm_engine *engine, uint32_t chunk)
{
    gm_chunks *chunks = engine->chunks;
    gm_stream stream = engine->comm_stream;
    gm_chunk_state *state = &engine->chunk_states[chunk];
    gm_dtype dtype = gm_grad_dtype(engine, gm_chunk_spec(engine, chunk));
    uintptr_t mine = gm_chunks_address(chunks, chunk, GM_UNREDUCED) +
                     engine->rank * gm_engine_piece_bytes(engine, chunk, GM_GRAD);
    GM_TRY(issue_reduce(engine, chunk, mine, dtype));
    GM_TRY(gm_chunks_begin_read(chunks, chunk, GM_UNREDUCED, stream));
    for (uint32_t i = 0; i < state->n_params; i++) {
        gm_param *p = &engine->params[engine->chunk_params[state->first_param + i]];
        if (!p->is_unreduced) {
            continue;
        }
        if (p->part_numel > 0) {
            GM_TRY(gm_gather_put(engine, p,
                                 (const void *)(mine + p->part_offset * gm_dtype_bytes(dtype)),
                                 dtype, engine->divisor_after, stream));
        }
        gm_gather_note_held(engine, p);
        p->sums = gm_fnv1a(p->sums, engine->reduces);
        p->is_unreduced = false;
    }
    state->n_unreduced = 0;
    GM_TRY(gm_chunks_end_read(chunks, chunk, GM_UNREDUCED, stream));
    return forget_unreduced(engine, chunk);
}

gm_status gm_shard_reduce(gm_engine *engine, uint32_t chunk)
{
    if (engine->chunk_states[chunk].n_unreduced == 0) {
        return GM_OK;
    }
    gm_status status = check_joined(engine);
    status = status == GM_OK ? reduce(engine, chunk) : status;
    return status == GM_OK ? GM_OK : gm_engine_die(engine, status);
}

gm_status gm_shard_reduce_all(gm_engine *engine)
{
    if (!gm_shard_has_unreduced(engine)) {
        return GM_OK;
    }
    for (uint32_t chunk = 0; chunk < gm_layout_n_chunks(engine->layout); chunk++) {
        GM_TRY(gm_shard_reduce(engine, chunk));
    }
    return gm_shard_check(engine);
}

gm_status gm_engine_catch_up(gm_engine *engine)
{
    GM_TRY(gm_engine_begin_call(engine));
    gm_status status = gm_shard_reduce_all(engine);
    if (status == GM_OK && gm_shard_has_unreduced(engine) && engine->device->is_host) {
        status = engine->device->ops->stream_sync(engine->device, engine->comm_stream);
        status = status == GM_OK ? gm_shard_check(engine) : status;
    }
    return gm_engine_end_call(engine, status);
}

void gm_engine_sums(const gm_engine *engine, uint64_t *out)
{
    for (uint32_t id = 0; id < engine->n_params; id++) {
        out[id] = engine->params[id].sums;
    }
}

/* ---- the norm ---- */

gm_status gm_shard_sum(gm_engine *engine, gm_sumsq *sum)
{
    gm_device *device = engine->device;
    gm_stream stream = engine->comm_stream;
    if (engine->n_shards == 1) {
        return GM_OK; /* replicas have the same gradients */
    }
    GM_TRY(check_joined(engine));
    gm_sumsq *here = &engine->sums_home[engine->n_params], *there = &engine->sums[engine->n_params];
    memset(here, 0, sizeof *here);
    gm_sumsq_merge(here, sum); /* without pending carries: 2^31 ranks fit */
    if (!device->is_host) {
        GM_TRY(device->ops->copy_h2d(device, (uintptr_t)there, here, sizeof *here, stream));
    }
    gm_shard_label(engine, GM_FOR_NORM, 0);
    GM_TRY(gm_comm_all_reduce(engine->shard_comm, (uintptr_t)there,
                              sizeof *there / sizeof(uint64_t), GM_COMM_U64, GM_COMM_SUM, stream));
    if (!device->is_host) {
        GM_TRY(device->ops->copy_d2h(device, here, (uintptr_t)there, sizeof *here, stream));
    }
    GM_TRY(device->ops->stream_sync(device, stream));
    GM_TRY(gm_shard_check(engine)); /* before the bytes are believed */
    *sum = *here;
    return GM_OK;
}
