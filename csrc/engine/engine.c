/* engine.c - the engine's life, entering and leaving units, and its share of the device; see engine.h.
 * Passes and ticks are in pass.c, the plan in replay.c, gradients in gather.c, the step in update.c, parameters'
 * fields in field.c, leases in lease.c.
 *
 * Invariants (of all these files)
 *   1. A parameter's bytes are valid from enter to leave of its unit, from touch to release_touched, and
 *      for the life of a pinned lease; outside, its range may show anything.
 *   2. While a plan is followed, enter, leave, touch and the taking of a gradient allocate nothing, map nothing and
 *      do not wait; what they did of that is counted (n_replay_waits).
 *   3. Order between streams and the host is kept by the fences of chunk.c and by nothing else.
 *   4. Before a master is read, updated or saved, what was written through watched leases is reconciled.
 *   5. After an error inside a step the engine is dead: every call returns that first error, until it is closed.
 *   6. A chunk's pending update is issued before its bytes are used (update.c).
 *   7. Device bytes = blocks of the plan + sums + what others of this process hold, each at its peak: the
 *      sum that the plan keeps within the budget. */
#include "engine/engine_impl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- shapes ---- */

/* Parameters share a chunk when all of this agrees; below 64, as layout.c's search expects. */
static uint32_t kind_of(const gm_engine_param *spec)
{
    uint32_t flags =
        (uint32_t)spec->has_low | (uint32_t)spec->has_moments << 1 | (uint32_t)spec->has_grad << 2;
    if (flags) {
        return (uint32_t)spec->format * 8 + flags;
    }
    uint32_t log2 = 0;
    while (((uint32_t)1 << log2) < spec->weight_bytes) {
        log2++;
    }
    return 32 + log2;
}

size_t gm_engine_piece_bytes(const gm_engine *engine, uint32_t chunk, gm_piece piece)
{
    const gm_chunk_shape *shape = gm_layout_chunk(engine->layout, chunk);
    const gm_engine_param *spec = gm_chunk_spec(engine, chunk);
    size_t grad_bytes = spec->has_grad ? gm_dtype_bytes(gm_grad_dtype(engine, spec)) : 0;
    switch (piece) {
    case GM_STATE: return gm_state_shape_of(spec, shape->shard_numel).total;
    case GM_GRAD: return shape->shard_numel * grad_bytes;
    case GM_GATHERED: return engine->shown == piece ? shape->numel * shape->weight_bytes : 0;
    case GM_UNREDUCED: return gm_shard_has_unreduced(engine) ? shape->numel * grad_bytes : 0;
    default: return shape->shard_numel * shape->weight_bytes;
    }
}

/* The same as blocks. */
size_t gm_engine_piece_blocks(const gm_engine *engine, uint32_t chunk, gm_piece piece)
{
    return gm_chunks_block_bytes(engine->device, gm_engine_piece_bytes(engine, chunk, piece));
}

/* ---- life ---- */

static void engine_free(gm_engine *engine)
{
    if (!engine) {
        return;
    }
    if (engine->chunks) { /* nothing that still runs may lose its memory */
        for (const gm_lease *lease = engine->leases; lease; lease = lease->next) {
            if (lease->is_pinned) {
                (void)engine->device->ops->stream_sync(engine->device, lease->stream);
            }
        }
    }
    if (engine->comm_stream) { /* collectives write the sums */
        (void)engine->device->ops->stream_sync(engine->device, engine->comm_stream);
    }
    if (engine->chunks && engine->host_stream) { /* tasks read the engine */
        (void)engine->device->ops->stream_sync(engine->device, engine->host_stream);
        (void)engine->device->ops->stream_sync(engine->device, engine->update_stream);
    }
    gm_chunks_free(engine->chunks);
    if (engine->collectives != engine->plan) {
        gm_plan_free(engine->collectives);
    }
    gm_plan_free(engine->plan);
    while (engine->leases) {
        gm_lease *lease = engine->leases;
        engine->leases = lease->next;
        free(lease->old);
        free(lease);
    }
    gm_stage_free(engine);
    gm_window_free(engine);
    gm_timeline_free(engine->timeline);
    gm_pass_free(engine);
    gm_update_free(engine);
    gm_gather_free(engine);
    gm_agree_free(engine);
    gm_shard_free(engine);
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
    free(engine->touched_stream);
    free(engine->touched_tick);
    free(engine->is_touched);
    pthread_mutex_destroy(&engine->lock);
    free(engine);
}

void gm_engine_finish_updates(gm_engine *engine)
{
    pthread_mutex_lock(&engine->lock);
    (void)engine->device->ops->stream_sync(engine->device, engine->host_stream);
    pthread_mutex_unlock(&engine->lock);
}

void gm_engine_ref(gm_engine *engine)
{
    atomic_fetch_add(&engine->references, 1);
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
    gm_status status =
        gm_layout_new(specs, n, options->chunk_bytes, engine->n_shards, &engine->layout);
    free(specs);
    GM_TRY(status);
    for (uint32_t i = 0; i < n; i++) {
        gm_param *p = &engine->params[i];
        p->place = *gm_layout_param(engine->layout, i);
        uint64_t shard = gm_layout_chunk(engine->layout, p->place.chunk)->shard_numel;
        uint64_t begin = engine->rank * shard, end = begin + shard; /* in the chunk */
        uint64_t first = p->place.offset > begin ? p->place.offset : begin;
        uint64_t last = p->place.offset + p->spec.numel;
        last = last < end ? last : end;
        if (first < last) {
            p->part_first = first - p->place.offset;
            p->part_numel = last - first;
            p->part_offset = first - begin;
        }
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
    size_t sums = gm_sums_bytes(engine);
    size_t staging = engine->device->is_host ? 0 : GM_STAGING_BYTES + sums;
    if (home_bytes > host_budget) {
        return GM_FAIL(
            GM_ERR_NOMEM,
            "HOST: %zu bytes wanted for weights, states and gradients, host_budget is %zu: raise "
            "host_budget, or freeze parameters",
            home_bytes, host_budget);
    }
    double began = gm_seconds();
    GM_TRY(gm_arena_new(home_bytes + staging, engine->workers, &engine->arena));
    if (home_bytes + staging > 0) {
        GM_TRY(engine->device->ops->pin(engine->device, gm_arena_base(engine->arena),
                                        home_bytes + staging));
        engine->is_pinned_arena = true;
    }
    engine->arena_seconds = gm_seconds() - began;
    if (staging) {
        engine->staging = (uint8_t *)gm_arena_base(engine->arena) + home_bytes;
        engine->sums_home = (gm_sumsq *)(void *)(engine->staging + GM_STAGING_BYTES);
    }
    return GM_OK;
}

static gm_status make_chunks(gm_engine *engine, const gm_engine_options *options)
{
    uint32_t n = gm_layout_n_chunks(engine->layout);
    size_t (*bytes)[GM_N_PIECES] = calloc(n ? n : 1, sizeof *bytes);
    engine->touched = calloc(n ? n : 1, sizeof *engine->touched);
    engine->touched_stream = calloc(n ? n : 1, sizeof *engine->touched_stream);
    engine->touched_tick = calloc(n ? n : 1, sizeof *engine->touched_tick);
    engine->is_touched = calloc(n ? n : 1, sizeof *engine->is_touched);
    gm_status status = GM_OK;
    if (!bytes || !engine->touched || !engine->touched_stream || !engine->touched_tick ||
        !engine->is_touched) {
        status = GM_FAIL(GM_ERR_NOMEM, "HOST: table of %u chunks", n);
        goto done;
    }
    size_t needed = 0;
    for (uint32_t id = 0; id < n; id++) {
        for (int piece = 0; piece < GM_N_PIECES; piece++) {
            bytes[id][piece] = gm_engine_piece_bytes(engine, id, (gm_piece)piece);
            needed += gm_engine_piece_blocks(engine, id, (gm_piece)piece);
        }
    }
    size_t limit = gm_engine_chunk_limit(engine);
    bool has_homes = options->policy != GM_POLICY_CUDA;
    if (!has_homes && needed > limit) {
        status =
            GM_FAIL(GM_ERR_NOMEM,
                    "DEVICE: policy \"cuda\" keeps everything on the device: %zu bytes wanted, %zu "
                    "available: raise device_budget or use placement_policy=\"auto\"",
                    needed, limit);
        goto done;
    }
    GM_TRY_GOTO(
        status, done,
        make_arena(engine,
                   has_homes ? gm_chunks_home_bytes((const size_t (*)[GM_N_PIECES])bytes, n) : 0,
                   options->host_budget));
    gm_chunks_options chunk_options = {
        .device = engine->device,
        .n_chunks = n,
        .piece_bytes = (const size_t (*)[GM_N_PIECES])bytes,
        .has_homes = has_homes,
        .homes = has_homes ? gm_arena_base(engine->arena) : NULL,
        .device_limit = limit,
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
        options->device->ops->free(options->device);
        return GM_FAIL(GM_ERR_NOMEM, "HOST: engine: %zu bytes", sizeof *engine);
    }
    pthread_mutex_init(&engine->lock, NULL);
    atomic_init(&engine->references, 1);
    atomic_init(&engine->has_ended_lease, false);
    atomic_init(&engine->host_adam_ns, 0);
    atomic_init(&engine->host_adam_params, 0);
    atomic_init(&engine->async_status, GM_OK);
    engine->device = options->device;
    engine->workers = options->workers;
    engine->policy = options->policy;
    engine->is_grad_f32 = options->is_grad_f32;
    engine->rates = options->rates;
    engine->is_tuned = options->is_tuned;
    engine->state_share = options->state_share;
    engine->slack_bytes = options->slack_bytes;
    engine->budget = options->device_budget;
    engine->shed_limit = engine->unreduced_limit = SIZE_MAX;
    engine->next_op = GM_NO_OP;
    engine->outside_bytes = options->outside_bytes;
    engine->outside_context = options->outside_context;
    engine->shard_comm = options->shard_comm;
    engine->replica_comm = options->replica_comm;
    engine->n_shards = options->shard_comm ? (uint32_t)gm_comm_size(options->shard_comm) : 1;
    engine->rank = options->shard_comm ? (uint32_t)gm_comm_rank(options->shard_comm) : 0;
    engine->n_replicas = options->replica_comm ? (uint32_t)gm_comm_size(options->replica_comm) : 1;
    engine->shown = engine->n_shards > 1 ? GM_GATHERED : GM_WEIGHT;
    gm_status status;
    GM_TRY_GOTO(status, fail, copy_params(engine, options));
    GM_TRY_GOTO(status, fail, index_units(engine, options));
    GM_TRY_GOTO(status, fail, gm_gather_new(engine));
    GM_TRY_GOTO(status, fail, make_chunks(engine, options));
    GM_TRY_GOTO(status, fail, gm_shard_new(engine));
    GM_TRY_GOTO(status, fail, gm_agree_new(engine));
    GM_TRY_GOTO(status, fail, gm_update_new(engine));
    GM_TRY_GOTO(status, fail, gm_pass_new(engine));
    *out = engine;
    return GM_OK;
fail:
    engine_free(engine); /* every member is NULL, 0 or live; the device goes with it */
    return status;
}

uintptr_t gm_engine_address(const gm_engine *engine, uint32_t id)
{
    const gm_param *p = &engine->params[id];
    return gm_chunks_address(engine->chunks, p->place.chunk, engine->shown) +
           p->place.offset * p->spec.weight_bytes;
}

uint32_t gm_engine_chunk_of(const gm_engine *engine, uint32_t id)
{
    return engine->params[id].place.chunk;
}

void gm_engine_chunk_need(const gm_engine *engine, uint32_t chunk, gm_engine_need *out)
{
    *out = (gm_engine_need){
        .shown = gm_engine_piece_blocks(engine, chunk, engine->shown),
        .gathering =
            engine->shown == GM_GATHERED ? gm_engine_piece_blocks(engine, chunk, GM_WEIGHT) : 0,
        .unreduced = gm_engine_piece_blocks(engine, chunk, GM_UNREDUCED),
    };
}

gm_status gm_engine_part(const gm_engine *engine, uint32_t id, uint64_t *first, uint64_t *n)
{
    GM_TRY(gm_engine_check_param(engine, id));
    *first = engine->params[id].part_first;
    *n = engine->params[id].part_numel;
    return GM_OK;
}

void gm_engine_weight_span(const gm_engine *engine, uintptr_t *begin, uintptr_t *end)
{
    gm_chunks_weight_span(engine->chunks, begin, end);
}

/* ---- the lock ---- */

static gm_status fail_dead(const gm_engine *engine)
{
    return GM_FAIL(engine->dead, "the engine is closed by an earlier error: %s", engine->dead_text);
}

gm_status gm_engine_die(gm_engine *engine, gm_status status)
{
    engine->dead = status;
    snprintf(engine->dead_text, sizeof engine->dead_text, "%s", gm_last_error());
    return status;
}

/* A host update that has failed on its stream closes the engine, too. */
static void notice_failed_update(gm_engine *engine)
{
    gm_status async = (gm_status)atomic_load(&engine->async_status);
    if (async != GM_OK && engine->dead == GM_OK) {
        (void)gm_engine_die(engine, GM_FAIL(async, "an update on the host failed"));
    }
}

/* Every public call starts here: one caller at a time, no dead engine, ended leases first. */
gm_status gm_engine_begin_call(gm_engine *engine)
{
    pthread_mutex_lock(&engine->lock);
    notice_failed_update(engine);
    gm_status status = engine->dead == GM_OK ? gm_lease_process_ended(engine) : fail_dead(engine);
    if (status != GM_OK) {
        pthread_mutex_unlock(&engine->lock);
    }
    return status;
}

gm_status gm_engine_end_call(gm_engine *engine, gm_status status)
{
#ifdef GM_DEBUG /* after an error, too: nothing is half done */
    GM_ASSERT(engine->dead != GM_OK || gm_engine_check_state(engine) == GM_OK);
#endif
    pthread_mutex_unlock(&engine->lock);
    return status;
}

bool gm_engine_salvage(gm_engine *engine, char *text, size_t size)
{
    pthread_mutex_lock(&engine->lock);
    notice_failed_update(engine);
    bool was_dead = engine->dead != GM_OK;
    if (was_dead) {
        snprintf(text, size, "%s", engine->dead_text);
        gm_update_forget_all(engine);
        atomic_store(&engine->async_status, GM_OK); /* also of what ended just now */
        engine->dead = GM_OK;
    }
    pthread_mutex_unlock(&engine->lock);
    return was_dead;
}

/* ---- units ---- */

gm_status gm_engine_pin_piece(gm_engine *engine, uint32_t chunk, gm_piece piece, gm_stream stream)
{
    if (gm_chunks_is_resident(engine->chunks, chunk, piece)) {
        return gm_chunks_pin(engine->chunks, chunk, piece, stream);
    }
    if (engine->plan) {
        gm_status status = gm_chunks_pin(engine->chunks, chunk, piece, stream);
        if (status != GM_ERR_NOMEM) {
            return status;
        } /* its blocks are in use: this pass is not the one that was planned */
        GM_TRY(gm_replay_leave_plan(engine));
    } else if (engine->outside_bytes) {
        GM_TRY(gm_chunks_set_limit(engine->chunks, gm_engine_chunk_limit(engine), NULL));
    }
    gm_status status = gm_chunks_pin(engine->chunks, chunk, piece, stream);
    if (status == GM_ERR_NOMEM &&
        engine->shed_limit != SIZE_MAX) { /* this cannot wait for a plan */
        engine->shed_limit = SIZE_MAX;
        GM_TRY(gm_chunks_set_limit(engine->chunks, gm_engine_chunk_limit(engine), NULL));
        status = gm_chunks_pin(engine->chunks, chunk, piece, stream);
    }
    for (bool has_more = true; status == GM_ERR_NOMEM && has_more;) {
        GM_TRY(gm_spill_one(engine, &has_more));
        status = has_more ? gm_chunks_pin(engine->chunks, chunk, piece, stream) : status;
    }
    return status;
}

gm_status gm_engine_pin_shown(gm_engine *engine, uint32_t chunk, gm_stream stream, bool is_use)
{
    GM_TRY(gm_update_issue(engine, chunk)); /* invariant 6 */
    return engine->shown == GM_GATHERED ? gm_shard_pin(engine, chunk, stream, is_use)
                                        : gm_engine_pin_piece(engine, chunk, GM_WEIGHT, stream);
}

gm_status gm_engine_unpin_shown(gm_engine *engine, uint32_t chunk, gm_stream stream, bool is_use)
{
    if (engine->shown == GM_GATHERED) {
        return gm_shard_unpin(engine, chunk, stream, is_use);
    }
    GM_TRY(gm_chunks_unpin(engine->chunks, chunk, GM_WEIGHT, stream));
    if (engine->policy == GM_POLICY_CPU && !engine->plan &&
        gm_chunks_pins(engine->chunks, chunk, GM_WEIGHT) == 0) {
        return gm_chunks_evict(engine->chunks, chunk, GM_WEIGHT);
    }
    return GM_OK;
}

gm_status gm_engine_check_param(const gm_engine *engine, uint32_t id)
{
    return id < engine->n_params ? GM_OK : GM_FAIL(GM_ERR_ARG, "parameter %u does not exist", id);
}

static gm_status check_unit(const gm_engine *engine, uint32_t unit)
{
    return unit < engine->n_units ? GM_OK : GM_FAIL(GM_ERR_ARG, "unit %u does not exist", unit);
}

/* Invariant 2: what the host waited for, or mapped, since the last look. */
uint64_t gm_engine_count_waits(const gm_engine *engine)
{
    gm_chunks_stats stats;
    gm_chunks_get_stats(engine->chunks, &stats);
    return stats.n_host_waits + stats.n_maps;
}

static gm_status begin_replay_call(gm_engine *engine, gm_stream stream)
{
    GM_TRY(gm_engine_begin_call(engine));
    engine->stream = stream;
    engine->pass_waits = gm_engine_count_waits(engine);
    return GM_OK;
}

static gm_status end_replay_call(gm_engine *engine, gm_status status)
{
    if (engine->is_following) {
        engine->n_replay_waits += gm_engine_count_waits(engine) - engine->pass_waits;
    }
    return gm_engine_end_call(engine, status);
}

/* Leases want to know since when the open pass uses the chunk. */
static void note_taken(gm_engine *engine, uint32_t chunk)
{
    gm_chunk_state *state = &engine->chunk_states[chunk];
    state->tick = engine->tick;
    state->first_tick = state->first_tick == GM_NO_TICK ? engine->tick : state->first_tick;
}

static gm_status pin_unit(gm_engine *engine, uint32_t unit, gm_stream stream, bool in_backward)
{
    gm_status status = GM_OK;
    uint32_t i = engine->unit_begin[unit];
    for (; i < engine->unit_begin[unit + 1] && status == GM_OK; i++) {
        uint32_t chunk = engine->unit_chunks[i];
        status = in_backward ? gm_update_check_reuse(engine, chunk)
                             : gm_update_check_between(engine, chunk);
        status = status == GM_OK ? gm_engine_pin_shown(engine, chunk, stream, true) : status;
        note_taken(engine, chunk);
    }
    if (status != GM_OK) { /* all or nothing; the first error's text is what counts */
        for (i--; i-- > engine->unit_begin[unit];) {
            uint32_t chunk = engine->unit_chunks[i];
            (void)(engine->shown == GM_GATHERED
                       ? gm_shard_unpin_for_retry(engine, chunk, stream)
                       : gm_engine_unpin_shown(engine, chunk, stream, true));
        }
    }
    return status;
}

/* The tick is recorded; the caller may try again at once, when there is room.  has_tick: what failed came after it. */
static void note_refusal(gm_engine *engine, gm_tick_kind kind, uint32_t id, bool has_tick,
                         gm_status status)
{
    engine->is_refused = status == GM_ERR_NOMEM && (has_tick || engine->next_op != GM_NO_OP);
    engine->refused_kind = kind;
    engine->refused_id = id;
}

gm_status gm_engine_enter(gm_engine *engine, uint32_t unit, gm_stream stream, uint32_t flags)
{
    GM_TRY(check_unit(engine, unit));
    GM_TRY(begin_replay_call(engine, stream));
    gm_status status = gm_pass_enter(engine, unit, stream, flags);
    bool has_tick = status == GM_OK;
    if (status == GM_OK) {
        status = pin_unit(engine, unit, stream, (flags & GM_ENTER_IN_BACKWARD) != 0);
    }
    note_refusal(engine, GM_TICK_ENTER, unit, has_tick, status);
    if (status == GM_OK) {
        engine->n_entered++;
        gm_pass_start_timer(engine, stream);
    }
    return end_replay_call(engine, status);
}

gm_status gm_engine_leave(gm_engine *engine, uint32_t unit, gm_stream stream)
{
    GM_TRY(check_unit(engine, unit));
    GM_TRY(begin_replay_call(engine, stream));
    gm_status status = GM_OK;
    for (uint32_t i = engine->unit_begin[unit]; i < engine->unit_begin[unit + 1]; i++) {
        gm_status one = gm_engine_unpin_shown(engine, engine->unit_chunks[i], stream, true);
        status = status == GM_OK ? one : status;
    }
    engine->n_entered -= engine->n_entered > 0;
    gm_book_release(engine->book, engine->unit_tick[unit]);
    return end_replay_call(engine, status);
}

/* The pin is there; it comes to end on this stream, behind the readers that it had on others. */
static gm_status touch_again(gm_engine *engine, uint32_t chunk, gm_stream stream)
{
    uint32_t i = engine->n_touched;
    while (engine->touched[--i] != chunk) {
    }
    if (engine->touched_stream[i] != stream) {
        GM_TRY(gm_chunks_note_readers(engine->chunks, chunk, engine->shown,
                                      engine->touched_stream[i]));
        engine->touched_stream[i] = stream;
    }
    return gm_chunks_wait_ready(engine->chunks, chunk, engine->shown, stream);
}

static gm_status touch(gm_engine *engine, uintptr_t address, gm_stream stream)
{
    uint32_t chunk = gm_chunks_at(engine->chunks, address);
    if (chunk == UINT32_MAX) {
        return GM_FAIL(GM_ERR_ARG, "no chunk shows address %#zx", (size_t)address);
    }
    GM_TRY(gm_update_check_reuse(engine, chunk));
    if (engine->is_touched[chunk]) {
        return touch_again(engine, chunk, stream);
    }
    gm_status status = gm_pass_tick(engine, GM_TICK_TOUCH, chunk, stream);
    bool has_tick = status == GM_OK;
    status = status == GM_OK ? gm_engine_pin_shown(engine, chunk, stream, true) : status;
    note_refusal(engine, GM_TICK_TOUCH, chunk, has_tick, status);
    GM_TRY(status);
    engine->is_touched[chunk] = true;
    engine->touched_stream[engine->n_touched] = stream;
    note_taken(engine, chunk);
    engine->touched_tick[engine->n_touched] = engine->tick;
    engine->touched[engine->n_touched++] = chunk;
    gm_pass_start_timer(engine, stream);
    return GM_OK;
}

gm_status gm_engine_touch(gm_engine *engine, uintptr_t address, gm_stream stream)
{
    GM_TRY(begin_replay_call(engine, stream));
    return end_replay_call(engine, touch(engine, address, stream));
}

uint32_t gm_engine_n_touched(const gm_engine *engine)
{
    return engine->n_touched;
}

gm_status gm_engine_release_touched(gm_engine *engine, uint32_t n_keep)
{
    GM_TRY(gm_engine_begin_call(engine));
    gm_status status = GM_OK;
    while (engine->n_touched > n_keep) {
        uint32_t chunk = engine->touched[--engine->n_touched];
        gm_stream stream = engine->touched_stream[engine->n_touched];
        engine->is_touched[chunk] = false;
        gm_book_release(engine->book, engine->touched_tick[engine->n_touched]);
        gm_status one = gm_engine_unpin_shown(engine, chunk, stream, true);
        status = status == GM_OK ? one : status;
    }
    return gm_engine_end_call(engine, status);
}
