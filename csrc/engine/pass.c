/* pass.c - cutting what happens into passes and ticks, timing them, and letting the plan act at each tick.
 *
 * Where a pass begins is inferred, because nobody says so: at the first unit entered outside backward after a backward,
 * after a step, when the mode (gradients enabled) changes, or when the unit that began the pass is entered again with
 * no unit open.  A wrong cut costs speed, never bits: traces are then shorter or longer, and replay only wishes.
 *
 * Times.  Timed events on the caller's stream bracket each tick's own work: from after the engine's waits to the
 * beginning of the next tick.  So copies and host waits do not count as compute. */
#include <stdlib.h>

#include "engine/engine_impl.h"

/* Of each trace, on demand and again under a plan.  On demand the device waits often and then computes faster than it
 * will under a plan: a run under a plan replaces the times of those before it; without one the least counts. */
enum { TIMED_RUNS = 2 };

typedef struct gm_tick_timer {
    gm_event *start, *end; /* (capacity,) */
    uint32_t capacity;
    uint32_t n;    /* ticks of the pass that is being timed, or was and waits to be resolved */
    uint64_t hash; /* of its trace, which may leave the book before the times are resolved */
    bool is_on, is_open; /* times the present pass; a start has been recorded */
    bool is_planned;     /* that pass follows a plan, as far as it can */
    bool has_result;
} gm_tick_timer;

gm_status gm_pass_new(gm_engine *engine)
{
    engine->unit_tick = calloc((size_t)engine->n_units + 1, sizeof *engine->unit_tick);
    engine->timer = calloc(1, sizeof *engine->timer);
    engine->n_passes = 1;
    if (!engine->unit_tick || !engine->timer) {
        return GM_FAIL(GM_ERR_NOMEM, "HOST: ticks of %u units", engine->n_units);
    }
    return gm_book_new(&engine->book);
}

void gm_pass_free(gm_engine *engine)
{
    const gm_device_ops *ops = engine->device ? engine->device->ops : NULL;
    for (uint32_t i = 0; engine->timer && i < engine->timer->capacity; i++) {
        ops->event_free(engine->device, engine->timer->start[i]);
        ops->event_free(engine->device, engine->timer->end[i]);
    }
    if (engine->timer) {
        free(engine->timer->start);
        free(engine->timer->end);
    }
    free(engine->timer);
    free(engine->unit_tick);
    gm_book_free(engine->book);
}

/* ---- times ---- */

/* Room for one more tick; only while a trace is new, or at most once per length. */
static bool has_room(gm_engine *engine, gm_tick_timer *timer)
{
    if (timer->n < timer->capacity) {
        return true;
    }
    uint32_t capacity = timer->capacity ? 2 * timer->capacity : 256;
    gm_event *start = realloc(timer->start, capacity * sizeof *start);
    timer->start = start ? start : timer->start;
    gm_event *end = realloc(timer->end, capacity * sizeof *end);
    timer->end = end ? end : timer->end;
    if (!start || !end) {
        return false;
    }
    const gm_device_ops *ops = engine->device->ops;
    for (; timer->capacity < capacity; timer->capacity++) {
        if (ops->event_new(engine->device, true, &start[timer->capacity]) != GM_OK) {
            return false;
        }
        if (ops->event_new(engine->device, true, &end[timer->capacity]) != GM_OK) {
            ops->event_free(engine->device, start[timer->capacity]);
            return false;
        }
    }
    return true;
}

static void stop_timer(gm_engine *engine, gm_stream stream)
{
    gm_tick_timer *timer = engine->timer;
    if (timer->is_on && timer->is_open) {
        timer->is_open = false;
        (void)engine->device->ops->event_record(engine->device, timer->end[timer->n - 1], stream);
    }
}

void gm_pass_start_timer(gm_engine *engine, gm_stream stream)
{
    gm_tick_timer *timer = engine->timer;
    if (!timer->is_on || timer->is_open || timer->n != engine->tick) {
        return;
    }
    if (!has_room(engine, timer)) {
        timer->is_on = false;
        return;
    }
    timer->is_open =
        engine->device->ops->event_record(engine->device, timer->start[timer->n], stream) == GM_OK;
    timer->n++;
}

void gm_pass_resolve_times(gm_engine *engine)
{
    gm_tick_timer *timer = engine->timer;
    if (!timer->has_result) {
        return;
    }
    timer->has_result = false;
    bool has_backward = false;
    uint32_t n_timed =
        gm_book_count_timed(engine->book, timer->hash, timer->is_planned, &has_backward);
    engine->wants_plan |= timer->is_planned && has_backward && n_timed == TIMED_RUNS;
    for (uint32_t i = 0; i < timer->n; i++) {
        double seconds;
        if (engine->device->ops->event_elapsed(engine->device, timer->start[i], timer->end[i],
                                               &seconds) == GM_OK) {
            gm_book_time(engine->book, timer->hash, i, seconds, timer->is_planned);
        }
    }
}

/* ---- passes ---- */

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
    gm_tick_timer *timer = engine->timer;
    uint32_t index;
    stop_timer(engine, engine->stream);
    gm_lease_note_pass_end(engine);
    engine->is_pass_open = engine->is_following = false;
    if (gm_book_end(engine->book, &index) != GM_OK || index == GM_NO_TRACE) {
        timer->is_on = false;
        return;
    }
    const gm_trace *trace = gm_book_trace(engine->book, index);
    engine->window.is_spoiled |= !trace->has_backward;
    note_run(engine, index);
    if (timer->is_on && timer->n == trace->n) {
        timer->hash = trace->hash;
        timer->has_result = true;
    }
    timer->is_on = false;
    if (!engine->plan) {
        engine->wants_plan = true;
    } else if (!gm_plan_knows(engine->plan, trace->hash)) {
        /* A schedule without collectives is one rank's business; others are made by all, with the next plan. */
        engine->wants_plan |= trace->has_backward || engine->n_shards > 1;
        if (engine->n_shards == 1) {
            gm_replay_learn(engine, trace);
        }
    }
}

static gm_status begin_pass(gm_engine *engine, uint32_t unit, bool is_grad)
{
    gm_pass_end(engine);
    GM_TRY(gm_shard_reduce_all(engine)); /* chunks of which not every gradient has come */
    bool is_alone = !engine->comm_stream;
    bool is_unplanned = is_alone ? !engine->plan && engine->wants_plan : !engine->collectives;
    if (is_unplanned && engine->n_steps == 0 && engine->runs.n > 0 && engine->n_pending == 0) {
        /* evaluation or inference before any step, or without an optimizer */
        gm_status planned = gm_replay_plan(engine);
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
    gm_tick_timer *timer = engine->timer;
    uint32_t guess = gm_book_following(engine->book);
    const gm_trace *trace = guess == GM_NO_TRACE ? NULL : gm_book_trace(engine->book, guess);
    bool is_planned = engine->plan != NULL;
    if (!is_planned) {
        gm_pass_resolve_times(engine); /* on demand the host may wait */
    }
    bool is_known = trace && !is_planned && trace->n_timed[1] > 0; /* better than on demand */
    bool is_due = !trace || (!is_known && trace->n_timed[is_planned] < TIMED_RUNS);
    timer->is_on = is_due && !timer->has_result; /* one result at a time waits for the step's end */
    timer->n = timer->is_on ? 0 : timer->n;
    timer->is_planned = timer->is_on ? is_planned : timer->is_planned;
    timer->is_open = false;
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

bool gm_pass_is_retry(gm_engine *engine, gm_tick_kind kind, uint32_t id)
{
    bool is_retry = engine->is_refused && engine->is_pass_open && engine->refused_kind == kind &&
                    engine->refused_id == id;
    engine->is_refused = false;
    return is_retry;
}

/* What the tick had still to do when one of its operations found no room. */
static gm_status resume(gm_engine *engine)
{
    uint32_t trace = gm_book_following(engine->book), first = engine->next_op;
    engine->next_op = GM_NO_OP;
    return first == GM_NO_OP || trace == GM_NO_TRACE
               ? GM_OK
               : gm_replay_ops(engine, gm_book_trace(engine->book, trace), engine->tick, first);
}

gm_status gm_pass_tick(gm_engine *engine, gm_tick_kind kind, uint32_t id, gm_stream stream)
{
    if (gm_pass_is_retry(engine, kind, id)) {
        return resume(engine); /* it has its tick */
    }
    if (!engine->is_pass_open) { /* a backward that is resumed after a step, for example */
        GM_TRY(begin_pass(engine, GM_NO_TICK, true));
    }
    engine->has_pass_backward |= kind != GM_TICK_ENTER;
    stop_timer(engine, stream);
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
    return is_ordered ? gm_replay_ops(engine, gm_book_trace(engine->book, trace), engine->tick, 0)
                      : GM_OK;
}

gm_status gm_pass_enter(gm_engine *engine, uint32_t unit, gm_stream stream, uint32_t flags)
{
    bool is_grad = (flags & GM_ENTER_GRAD) != 0;
    if (gm_pass_is_retry(engine, GM_TICK_ENTER, unit)) {
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
