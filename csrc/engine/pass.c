/* pass.c - cutting what happens into passes and ticks, and doing at each tick what the plan wants.
 *
 * Where a pass begins is inferred, because nobody says so: at the first unit entered outside
 * backward after a backward, after a step, when the mode (gradients enabled) changes, or when the
 * unit that began the pass is entered again with no unit open.  A wrong cut costs speed, never
 * bits: traces are then shorter or longer, and operations are wishes.
 *
 * Every operation is a wish: it is dropped when it holds already, or when the blocks it needs are
 * in use; whoever then needs the bytes gets them on demand.  So a pass may deviate from its trace
 * at any tick, and stays right. */
#include "engine/engine_impl.h"

#include <stdlib.h>

gm_status gm_pass_new(gm_engine *engine)
{
    engine->pass.unit_tick = calloc((size_t)engine->n_units + 1, sizeof *engine->pass.unit_tick);
    engine->pass.n = 1;
    engine->pass.next_op = GM_NO_OP;
    GM_FAIL_IF(!engine->pass.unit_tick, GM_ERR_NOMEM, "HOST: ticks of %u units", engine->n_units);
    return gm_book_new(&engine->pass.book);
}

void gm_pass_free(gm_engine *engine)
{
    free(engine->pass.unit_tick);
    gm_book_free(engine->pass.book);
}

void gm_pass_end(gm_engine *engine)
{
    if (!engine->pass.is_open) {
        return;
    }
    uint32_t index;
    gm_timer_stop(engine, engine->call.stream);
    gm_timeline_pass_end(engine->timeline, engine->call.stream);
    gm_watch_note_pass_end(engine);
    engine->pass.is_open = engine->pass.is_following = false;
    if (gm_book_end(engine->pass.book, &index) != GM_OK || index == GM_NO_TRACE) {
        gm_timer_end(engine, NULL);
        return;
    }
    const gm_trace *trace = gm_book_trace(engine->pass.book, index);
    gm_inputs_note_run(engine, index);
    gm_timer_end(engine, trace);
    if (!engine->room.plan) {
        gm_room_want_plan(engine, true);
    } else if (!gm_plan_knows(engine->room.plan, trace->hash)) {
        /* A schedule without collectives is one rank's business; others are made by all, with the
         * next plan. */
        gm_room_want_plan(engine, trace->has_backward || engine->ranks.n_shards > 1);
        if (engine->ranks.n_shards == 1) {
            gm_planner_learn(engine, trace);
        }
    }
}

static gm_status begin_pass(gm_engine *engine, uint32_t unit, bool is_grad)
{
    gm_pass_end(engine);
    GM_TRY(gm_gradient_reduce_all(engine)); /* chunks of which not every gradient has come */
    bool is_alone = !engine->ranks.stream;
    bool is_unplanned =
        is_alone ? !engine->room.plan && engine->room.wants_plan : !engine->weights.collectives;
    if (is_unplanned && engine->step.n == 0 && engine->inputs.runs.n > 0 &&
        engine->update.n_pending == 0) {
        /* evaluation or inference before any step, or without an optimizer */
        gm_status planned = gm_planner_run(engine);
        if (!is_alone && planned != GM_OK) { /* the other ranks may be at its collectives */
            return gm_engine_die(engine, planned);
        }
        engine->pass.waits = gm_engine_count_waits(engine); /* it may wait */
    }
    for (uint32_t chunk = 0; chunk < gm_layout_n_chunks(engine->layout); chunk++) {
        engine->chunk_states[chunk].first_tick = engine->chunk_states[chunk].tick = GM_NO_TICK;
    }
    engine->pass.is_open = true;
    engine->pass.is_grad = is_grad;
    engine->pass.has_backward = false;
    engine->pass.first_unit = unit;
    engine->pass.n += !engine->update.is_armed; /* an armed backward counts from its own start */
    if (gm_book_begin(engine->pass.book, is_grad) != GM_OK) {
        return GM_OK; /* unrecorded: on demand */
    }
    uint32_t guess = gm_book_following(engine->pass.book);
    if (!engine->room.plan) {
        gm_room_want_plan(engine, gm_timer_resolve(engine)); /* on demand the host may wait */
    }
    gm_timer_begin(engine, guess == GM_NO_TRACE ? NULL : gm_book_trace(engine->pass.book, guess));
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
            bytes[piece] = gm_chunks_is_resident(engine->chunks, chunk, (gm_piece)piece)
                               ? gm_engine_piece_blocks(engine, chunk, (gm_piece)piece)
                               : 0;
            live += bytes[piece];
        }
        gm_class class = engine->room.plan     ? gm_plan_class(engine->room.plan, chunk)
                         : bytes[GM_STATE] > 0 ? GM_CLASS_R
                                               : GM_CLASS_C2;
        memory.weights[class] += bytes[GM_WEIGHT];
        memory.states += bytes[GM_STATE];
        memory.grads += bytes[GM_GRAD];
        memory.gathered += bytes[GM_GATHERED];
        memory.unreduced += bytes[GM_UNREDUCED];
    }
    memory.free_blocks = stats.device_bytes > live ? stats.device_bytes - live : 0;
    memory.host = gm_arena_bytes(engine->arena) + engine->speculation.bytes;
    gm_timeline_tick(engine->timeline, engine->pass.tick, kind, id, &memory, stream);
}

static bool is_retry_of(gm_engine *engine, gm_tick_kind kind, uint32_t id)
{
    bool is_retry = engine->pass.is_refused && engine->pass.is_open &&
                    engine->pass.refused_kind == kind && engine->pass.refused_id == id;
    engine->pass.is_refused = false;
    return is_retry;
}

/* The chunk's update is pending, and will not read the gradient. */
static bool has_result(const gm_engine *engine, uint32_t chunk)
{
    return gm_is_pending(engine, chunk) &&
           gm_speculation_is_of(engine, chunk, gm_task_of(engine, chunk));
}

static gm_status run_op(gm_engine *engine, const gm_op *op)
{
    gm_chunks *chunks = engine->chunks;
    bool is_done;
    switch (op->kind) {
    case GM_OP_FETCH:
        /* A pending host update rewrites the home first; one on the device comes after the
         * fetch. */
        GM_TRY(gm_update_issue_early(engine, op->chunk));
        return gm_chunks_prefetch(chunks, op->chunk, GM_WEIGHT, &is_done);
    case GM_OP_SPECULATE: return gm_update_speculate(engine, op->chunk);
    case GM_OP_GRAD_IN:
        return engine->chunk_states[op->chunk].n_held > 0 && !has_result(engine, op->chunk)
                   ? gm_chunks_prefetch(chunks, op->chunk, GM_GRAD, &is_done)
                   : GM_OK;
    case GM_OP_GATHER: return gm_weights_prefetch(engine, op->chunk);
    case GM_OP_GRAD_OUT: return gm_chunks_send_home(chunks, op->chunk, GM_GRAD);
    default: return gm_update_issue_early(engine, op->chunk);
    }
}

/* The plan whose operations are due; NULL: there is none, or it has been left. */
static const gm_plan *plan_of_ops(const gm_engine *engine)
{
    return engine->room.plan ? engine->room.plan : engine->weights.collectives;
}

/* The operations of a tick from number `first` on; one that finds no room is the next_op of a
 * retry.  For lack of room any of them may leave the plan. */
static gm_status run_ops(gm_engine *engine, const gm_trace *trace, uint32_t tick, uint32_t first)
{
    uint32_t n = 0;
    const gm_plan *plan = plan_of_ops(engine);
    const gm_op *ops = plan ? gm_plan_ops(plan, trace->hash, tick, &n) : NULL;
    for (uint32_t i = first; i < n && plan == plan_of_ops(engine); i++) {
        gm_op op = ops[i];
        GM_TRY_ELSE(run_op(engine, &op), engine->pass.next_op = i);
    }
    return GM_OK;
}

/* What the tick had still to do when one of its operations found no room. */
static gm_status resume(gm_engine *engine)
{
    uint32_t trace = gm_book_following(engine->pass.book), first = engine->pass.next_op;
    engine->pass.next_op = GM_NO_OP;
    return first == GM_NO_OP || trace == GM_NO_TRACE
               ? GM_OK
               : run_ops(engine, gm_book_trace(engine->pass.book, trace), engine->pass.tick, first);
}

gm_status gm_pass_tick(gm_engine *engine, gm_tick_kind kind, uint32_t id, gm_stream stream)
{
    if (is_retry_of(engine, kind, id)) {
        return resume(engine); /* it has its tick */
    }
    if (!engine->pass.is_open) { /* a backward that is resumed after a step, for example */
        GM_TRY(begin_pass(engine, GM_NO_TICK, true));
    }
    engine->pass.has_backward |= kind != GM_TICK_ENTER;
    gm_timer_stop(engine, stream);
    uint32_t trace = GM_NO_TRACE;
    size_t outside =
        engine->room.outside_bytes ? engine->room.outside_bytes(engine->room.outside_context) : 0;
    bool was_following = engine->pass.is_following;
    if (gm_book_tick(engine->pass.book, kind, id, outside, &trace, &engine->pass.tick) != GM_OK) {
        trace = GM_NO_TRACE;
    }
    if (gm_timeline_is_open(engine->timeline)) {
        log_tick(engine, kind, id, outside, stream);
    }
    engine->pass.is_following = engine->room.plan && trace != GM_NO_TRACE;
    engine->pass.next_op = GM_NO_OP;
    bool is_ordered = (engine->room.plan || engine->weights.collectives) && trace != GM_NO_TRACE;
    engine->pass.n_deviations += was_following && !engine->pass.is_following;
    return is_ordered
               ? run_ops(engine, gm_book_trace(engine->pass.book, trace), engine->pass.tick, 0)
               : GM_OK;
}

gm_status gm_pass_enter(gm_engine *engine, uint32_t unit, gm_stream stream, uint32_t flags)
{
    bool is_grad = (flags & GM_ENTER_GRAD) != 0;
    if (is_retry_of(engine, GM_TICK_ENTER, unit)) {
        engine->pass.unit_tick[unit] = engine->pass.tick;
        return resume(engine);
    }
    if (!(flags & GM_ENTER_IN_BACKWARD)) {
        bool is_again = engine->unit.n_entered == 0 && unit == engine->pass.first_unit;
        if (!engine->pass.is_open || engine->pass.has_backward || is_again ||
            is_grad != engine->pass.is_grad) {
            GM_TRY(begin_pass(engine, unit, is_grad));
        }
    }
    GM_TRY(gm_pass_tick(engine, GM_TICK_ENTER, unit, stream));
    engine->pass.unit_tick[unit] = engine->pass.tick;
    return GM_OK;
}

void gm_pass_note_refusal(gm_engine *engine, gm_tick_kind kind, uint32_t id, bool has_tick,
                          gm_status status)
{
    engine->pass.is_refused =
        status == GM_ERR_NOMEM && (has_tick || engine->pass.next_op != GM_NO_OP);
    engine->pass.refused_kind = kind;
    engine->pass.refused_id = id;
}

void gm_pass_begin_armed(gm_engine *engine)
{
    engine->pass.n++;
}

gm_status gm_pass_begin_call(gm_engine *engine, gm_stream stream)
{
    GM_TRY(gm_call_begin_on(engine, stream));
    engine->pass.waits = gm_engine_count_waits(engine);
    return GM_OK;
}

gm_status gm_pass_end_call(gm_engine *engine, gm_status status)
{
    if (engine->pass.is_following) {
        engine->pass.n_replay_waits += gm_engine_count_waits(engine) - engine->pass.waits;
    }
    return gm_call_end(engine, status);
}
