/* pass.c - cutting what happens into passes and ticks, and doing at each tick what the plan wants.
 *
 * Where a pass begins is inferred, because nobody says so: at the first unit entered outside backward after a backward,
 * after a step, when the mode (gradients enabled) changes, or when the unit that began the pass is entered again with
 * no unit open.  A wrong cut costs speed, never bits: traces are then shorter or longer, and operations are wishes.
 *
 * Every operation is a wish: it is dropped when it holds already, or when the blocks it needs are in use; whoever then
 * needs the bytes gets them on demand.  So a pass may deviate from its trace at any tick, and stays right. */
#include "engine/engine_impl.h"

#include <stdlib.h>

gm_status gm_pass_new(gm_engine *engine)
{
    engine->unit_tick = calloc((size_t)engine->n_units + 1, sizeof *engine->unit_tick);
    engine->n_passes = 1;
    if (!engine->unit_tick) {
        return GM_FAIL(GM_ERR_NOMEM, "HOST: ticks of %u units", engine->n_units);
    }
    return gm_book_new(&engine->book);
}

void gm_pass_free(gm_engine *engine)
{
    free(engine->unit_tick);
    gm_book_free(engine->book);
}

static void note_run(gm_engine *engine, uint32_t trace)
{
    gm_runs *runs = &engine->runs;
    uint64_t hash = gm_book_trace(engine->book, trace)->hash;
    for (uint32_t i = 0; i < runs->n; i++) {
        if (runs->trace[i] == trace && runs->hash[i] == hash) {
            runs->count[i]++;
            return;
        }
    }
    if (runs->n < GM_TRACES_KEPT) {
        runs->trace[runs->n] = trace;
        runs->hash[runs->n] = hash;
        runs->count[runs->n++] = 1;
    }
}

void gm_pass_end(gm_engine *engine)
{
    if (!engine->is_pass_open) {
        return;
    }
    uint32_t index;
    gm_timer_stop(engine, engine->stream);
    gm_watch_note_pass_end(engine);
    engine->is_pass_open = engine->is_following = false;
    if (gm_book_end(engine->book, &index) != GM_OK || index == GM_NO_TRACE) {
        gm_timer_end(engine, NULL);
        return;
    }
    const gm_trace *trace = gm_book_trace(engine->book, index);
    engine->window.is_spoiled |= !trace->has_backward;
    note_run(engine, index);
    gm_timer_end(engine, trace);
    if (!engine->plan) {
        engine->wants_plan = true;
    } else if (!gm_plan_knows(engine->plan, trace->hash)) {
        /* A schedule without collectives is one rank's business; others are made by all, with the next plan. */
        engine->wants_plan |= trace->has_backward || engine->n_shards > 1;
        if (engine->n_shards == 1) {
            gm_planner_learn(engine, trace);
        }
    }
}

static gm_status begin_pass(gm_engine *engine, uint32_t unit, bool is_grad)
{
    gm_pass_end(engine);
    GM_TRY(gm_gradient_reduce_all(engine)); /* chunks of which not every gradient has come */
    bool is_alone = !engine->comm_stream;
    bool is_unplanned = is_alone ? !engine->plan && engine->wants_plan : !engine->collectives;
    if (is_unplanned && engine->n_steps == 0 && engine->runs.n > 0 && engine->n_pending == 0) {
        /* evaluation or inference before any step, or without an optimizer */
        gm_status planned = gm_planner_run(engine);
        if (!is_alone && planned != GM_OK) { /* the other ranks may be at its collectives */
            return gm_engine_die(engine, planned);
        }
        engine->pass_waits = gm_engine_count_waits(engine); /* it may wait */
    }
    for (uint32_t chunk = 0; chunk < gm_layout_n_chunks(engine->layout); chunk++) {
        engine->chunk_states[chunk].first_tick = engine->chunk_states[chunk].tick = GM_NO_TICK;
    }
    engine->is_pass_open = true;
    engine->is_pass_grad = is_grad;
    engine->has_pass_backward = false;
    engine->pass_first_unit = unit;
    engine->n_passes +=
        !engine->is_armed; /* an armed backward counts its arrivals from its own start */
    if (gm_book_begin(engine->book, is_grad) != GM_OK) {
        return GM_OK; /* unrecorded: on demand */
    }
    uint32_t guess = gm_book_following(engine->book);
    if (!engine->plan) {
        engine->wants_plan |= gm_timer_resolve(engine); /* on demand the host may wait */
    }
    gm_timer_begin(engine, guess == GM_NO_TRACE ? NULL : gm_book_trace(engine->book, guess));
    return GM_OK;
}

/* What is where at this tick, for people. */
static void log_tick(gm_engine *engine, gm_tick_kind kind, uint32_t id, size_t outside,
                     gm_stream stream)
{
    gm_log_memory memory = {.outside = outside};
    gm_chunks_stats stats;
    gm_chunks_get_stats(engine->chunks, &stats);
    size_t live = 0;
    for (uint32_t chunk = 0; chunk < gm_layout_n_chunks(engine->layout); chunk++) {
        size_t bytes[GM_N_PIECES];
        for (int piece = 0; piece < GM_N_PIECES; piece++) {
            bytes[piece] =
                gm_chunks_is_resident(engine->chunks, chunk, (gm_piece)piece)
                    ? gm_chunks_block_bytes(engine->device,
                                            gm_engine_piece_bytes(engine, chunk, (gm_piece)piece))
                    : 0;
            live += bytes[piece];
        }
        gm_class class = engine->plan          ? gm_plan_class(engine->plan, chunk)
                         : bytes[GM_STATE] > 0 ? GM_CLASS_R
                                               : GM_CLASS_C2;
        memory.weights[class] += bytes[GM_WEIGHT];
        memory.states += bytes[GM_STATE];
        memory.grads += bytes[GM_GRAD];
        memory.gathered += bytes[GM_GATHERED];
        memory.unreduced += bytes[GM_UNREDUCED];
    }
    memory.free_blocks = stats.device_bytes > live ? stats.device_bytes - live : 0;
    memory.host = engine->arena ? gm_arena_bytes(engine->arena) : 0;
    gm_timeline_tick(engine->timeline, engine->tick, kind, id, &memory, stream);
}

static bool is_retry_of(gm_engine *engine, gm_tick_kind kind, uint32_t id)
{
    bool is_retry = engine->is_refused && engine->is_pass_open && engine->refused_kind == kind &&
                    engine->refused_id == id;
    engine->is_refused = false;
    return is_retry;
}

static gm_status run_op(gm_engine *engine, const gm_op *op)
{
    gm_chunks *chunks = engine->chunks;
    bool is_done;
    switch (op->kind) {
    case GM_OP_FETCH:
        /* A pending host update rewrites the home first; one on the device comes after the fetch. */
        GM_TRY(gm_update_issue(engine, op->chunk));
        return gm_chunks_prefetch(chunks, op->chunk, GM_WEIGHT, &is_done);
    case GM_OP_GRAD_IN:
        return engine->chunk_states[op->chunk].n_held > 0
                   ? gm_chunks_prefetch(chunks, op->chunk, GM_GRAD, &is_done)
                   : GM_OK;
    case GM_OP_GATHER: return gm_weights_prefetch(engine, op->chunk);
    case GM_OP_GRAD_OUT: return gm_chunks_send_home(chunks, op->chunk, GM_GRAD);
    default: return gm_update_issue(engine, op->chunk);
    }
}

/* The operations of a tick from number `first` on; one that finds no room is the next_op of a retry. */
static gm_status run_ops(gm_engine *engine, const gm_trace *trace, uint32_t tick, uint32_t first)
{
    uint32_t n;
    const gm_plan *plan = engine->plan ? engine->plan : engine->collectives;
    const gm_op *ops = gm_plan_ops(plan, trace->hash, tick, &n);
    for (uint32_t i = first; i < n; i++) {
        gm_status status = run_op(engine, &ops[i]);
        if (status != GM_OK) {
            engine->next_op = i;
            return status;
        }
    }
    return GM_OK;
}

/* What the tick had still to do when one of its operations found no room. */
static gm_status resume(gm_engine *engine)
{
    uint32_t trace = gm_book_following(engine->book), first = engine->next_op;
    engine->next_op = GM_NO_OP;
    return first == GM_NO_OP || trace == GM_NO_TRACE
               ? GM_OK
               : run_ops(engine, gm_book_trace(engine->book, trace), engine->tick, first);
}

gm_status gm_pass_tick(gm_engine *engine, gm_tick_kind kind, uint32_t id, gm_stream stream)
{
    if (is_retry_of(engine, kind, id)) {
        return resume(engine); /* it has its tick */
    }
    if (!engine->is_pass_open) { /* a backward that is resumed after a step, for example */
        GM_TRY(begin_pass(engine, GM_NO_TICK, true));
    }
    engine->has_pass_backward |= kind != GM_TICK_ENTER;
    gm_timer_stop(engine, stream);
    uint32_t trace = GM_NO_TRACE;
    size_t outside = engine->outside_bytes ? engine->outside_bytes(engine->outside_context) : 0;
    bool was_following = engine->is_following;
    if (gm_book_tick(engine->book, kind, id, outside, &trace, &engine->tick) != GM_OK) {
        trace = GM_NO_TRACE;
    }
    if (gm_timeline_is_open(engine->timeline)) {
        log_tick(engine, kind, id, outside, stream);
    }
    engine->is_following = engine->plan && trace != GM_NO_TRACE;
    engine->next_op = GM_NO_OP;
    bool is_ordered = (engine->plan || engine->collectives) && trace != GM_NO_TRACE;
    engine->n_deviations += was_following && !engine->is_following;
    return is_ordered ? run_ops(engine, gm_book_trace(engine->book, trace), engine->tick, 0)
                      : GM_OK;
}

gm_status gm_pass_enter(gm_engine *engine, uint32_t unit, gm_stream stream, uint32_t flags)
{
    bool is_grad = (flags & GM_ENTER_GRAD) != 0;
    if (is_retry_of(engine, GM_TICK_ENTER, unit)) {
        engine->unit_tick[unit] = engine->tick;
        return resume(engine);
    }
    if (!(flags & GM_ENTER_IN_BACKWARD)) {
        bool is_again = engine->n_entered == 0 && unit == engine->pass_first_unit;
        if (!engine->is_pass_open || engine->has_pass_backward || is_again ||
            is_grad != engine->is_pass_grad) {
            GM_TRY(begin_pass(engine, unit, is_grad));
        }
    }
    GM_TRY(gm_pass_tick(engine, GM_TICK_ENTER, unit, stream));
    engine->unit_tick[unit] = engine->tick;
    return GM_OK;
}

gm_status gm_pass_begin_call(gm_engine *engine, gm_stream stream)
{
    GM_TRY(gm_call_begin(engine));
    engine->stream = stream;
    engine->pass_waits = gm_engine_count_waits(engine);
    return GM_OK;
}

gm_status gm_pass_end_call(gm_engine *engine, gm_status status)
{
    if (engine->is_following) {
        engine->n_replay_waits += gm_engine_count_waits(engine) - engine->pass_waits;
    }
    return gm_call_end(engine, status);
}
