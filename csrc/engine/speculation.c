/* speculation.c - updates that run before anybody knows whether the clip fires: whether a loop is
 * one for it, the memory that they are written to, and whether what was made is what the step asks
 * for.
 *
 * In the backward a complete gradient is stepped as if the norm were below its limit, out of place:
 * the new weights and states go to a spare beside their home (chunk.h).  Nothing that anybody sees
 * changes.  The step prepares its tasks as always.  When a chunk's task is to be issued, and a
 * result is there that was made of the very same inputs, home and spare change places; else the
 * task runs, on weights, states and gradient that nobody has touched.  An opaque update is made in
 * place and rolled back (opaque.c, 6): its weights, if they have blocks of their own, wait there.
 *
 *             announced: numbers for all              its gradient is complete
 *     NONE ----------------------------> NUMBERED ----------------------------> MADE
 *      ^                                    |                                    |
 *      +----------- the step has come ------+------ taken, dropped, outdated ----+
 *
 * Invariants
 *   1. A result is taken only by an update with the same inputs, bit for bit: the same ranges with
 *      the same scalars (learning rate, step, decay, clip factor: everything that Adam gets), and
 *      weights, states and gradient of the same versions (chunk.h), which every write changes,
 *      whoever makes it.  There is no other way to a result, and no list of what would make it
 *      wrong; but what an opaque update reads beside them its caller tells by other scalars.  One
 *      that waits in blocks which something has taken is gone.
 *   2. Until it is taken a result is in no piece: readers, checkpoints and errors in between find
 *      the last step's bytes.  Taking it is issuing the pending update: whoever needs the bytes
 *      does that first (update.c, 1).
 *   3. Only chunks all of whose parameters have numbers are speculated: what is not updated would
 *      be missing in a spare.
 *   4. How many backwards bring a chunk's gradient is learnt from the steps before.  One that comes
 *      after a result changes the gradient's version; from then on that backward is waited for.
 *   5. A step is speculated unless the last one is known to have clipped, or did not ask for the
 *      norm.  A loop that does not ask, or has a loss scale, gets no spares.  Plans that speculate
 *      come with the first step, if it did not clip, or after some such in a row, and go again
 *      after some others: each time it takes twice as many.
 *   6. Memory for spares is taken between passes, within the host's budget, and kept; each plan
 *      deals it out.  A chunk that lacks a spare of what it needs one for is not speculated.
 *   7. The step drops what it does not want, and what has not begun on the host by then does not
 *      run.
 *   8. All this is a rank's own business but for the plan, which all make alike: a result and an
 *      update have the same bits, so ranks need not agree on which they have. */
#include "engine/engine_impl.h"

#include <stdlib.h>
#include <string.h>

enum { PINNED_BYTES_PER_ENTRY = 512 }; /* in the driver's tables on the device, of an H200 */
enum { PATIENCE = 4 };                 /* steps until a plan is changed */

static const bool may_move[GM_N_RESULT_STATES][GM_N_RESULT_STATES] = {
    [GM_RESULT_NONE] = {[GM_RESULT_NONE] = true, [GM_RESULT_NUMBERED] = true},
    [GM_RESULT_NUMBERED] = {[GM_RESULT_NONE] = true,
                            [GM_RESULT_NUMBERED] = true,
                            [GM_RESULT_MADE] = true},
    [GM_RESULT_MADE] = {[GM_RESULT_NONE] = true, [GM_RESULT_MADE] = true},
};

static void move(gm_chunk_state *state, gm_result_state to)
{
    GM_ASSERT(may_move[state->result][to]);
    state->result = to;
}

void gm_speculation_init(gm_engine *engine, const gm_engine_options *options)
{
    engine->speculation.host_budget = options->host_budget;
    engine->speculation.limit = SIZE_MAX;
    /* Of what the host has, whole or shared out to ranks, the rest is for loaders and
     * checkpoints. */
    engine->speculation.divisor =
        options->host_budget == SIZE_MAX || options->host_budget > options->host_limit ? 2 : 1;
    engine->speculation.patience = PATIENCE;
}

void gm_speculation_free(gm_engine *engine)
{
    for (uint32_t i = 0; i < engine->speculation.n_arenas; i++) {
        gm_arena_free(engine->speculation.arenas[i]);
    }
}

/* ---- whether to ---- */

/* Beside all homes, those that are still to come too: on paper none has a place. */
static gm_status find_available(const gm_engine *engine, size_t homes, size_t *out)
{
    size_t all = engine->device->host_bytes;
    if (!engine->device->is_paper) {
        GM_TRY(gm_host_available(&all));
        homes -= gm_arena_bytes(engine->arena);
    }
    *out = all > homes ? all - homes : 0;
    return GM_OK;
}

/* Of the host, for spares in all; what was found out first stays, so that equal steps give equal
 * plans. */
static size_t find_limit(gm_engine *engine)
{
    gm_speculation *s = &engine->speculation;
    size_t available = 0, homes = gm_arena_reserved(engine->arena) - engine->stay.home_bytes;
    if (s->limit == SIZE_MAX) {
        bool is_none =
            engine->policy == GM_POLICY_CUDA ||
            (gm_is_opaque(engine) && engine->opaque.caller.when != GM_OPAQUE_SPECULATED) ||
            find_available(engine, homes, &available) != GM_OK;
        size_t wished = s->host_budget > homes ? s->host_budget - homes : 0;
        s->limit = is_none ? 0 : (wished < available ? wished : available) / s->divisor;
    }
    return s->limit;
}

size_t gm_speculation_budget(const gm_engine *engine)
{
    return engine->speculation.is_wanted ? engine->speculation.limit : 0;
}

size_t gm_speculation_device_bytes(const gm_engine *engine)
{
    size_t most = gm_speculation_budget(engine), taken = engine->speculation.bytes, all = 0;
    for (uint32_t chunk = 0; most > 0 && chunk < gm_layout_n_chunks(engine->layout); chunk++) {
        all += gm_chunk_spec(engine, chunk)->has_moments
                   ? gm_spare_bytes(gm_engine_piece_bytes(engine, chunk, GM_WEIGHT)) +
                         gm_spare_bytes(gm_engine_piece_bytes(engine, chunk, GM_STATE))
                   : 0;
    }
    most = most < all ? most : all;
    return engine->device->is_host || most < taken ? 0 : (most - taken) / PINNED_BYTES_PER_ENTRY;
}

static uint32_t n_planned(const gm_engine *engine)
{
    return engine->room.plan ? gm_plan_get_info(engine->room.plan)->n_speculated : 0;
}

static void count_step(gm_engine *engine, bool has_norm, bool fires)
{
    gm_speculation *s = &engine->speculation;
    s->n_quiet = has_norm && !fires ? s->n_quiet + 1 : 0;
    s->n_loud = has_norm && !fires ? 0 : s->n_loud + 1;
}

/* The last step counts once its factor has come home; nobody waits for it, so one that is a whole
 * step late never does. */
static void settle(gm_engine *engine)
{
    gm_speculation *s = &engine->speculation;
    float scale;
    if (s->open_step > 0 && gm_clip_is_known(engine, s->open_step, &scale)) {
        s->open_step = 0;
        count_step(engine, true, !(scale >= 1 && scale <= 1));
    }
}

bool gm_speculation_wants_numbers(gm_engine *engine)
{
    settle(engine);
    return n_planned(engine) > 0 &&
           (engine->speculation.n_quiet > 0 || engine->speculation.open_step > 0) &&
           !engine->arrive.has_repeats && !engine->step.wants_immediate;
}

void gm_speculation_note_norm(gm_engine *engine)
{
    engine->speculation.has_norm = true;
}

/* Invariant 5. */
static void consider(gm_engine *engine)
{
    gm_speculation *s = &engine->speculation;
    const gm_plan *plan = /* that the ranks share */
        engine->ranks.stream ? engine->weights.collectives : engine->room.plan;
    bool is_all_resident = plan && gm_plan_get_info(plan)->n_of_class[GM_CLASS_R] ==
                                       gm_layout_n_chunks(engine->layout);
    unsigned patience = engine->step.n_calls > 1 ? s->patience : 1; /* no plan is changed yet */
    if (!s->is_wanted && s->n_quiet >= patience && !is_all_resident && find_limit(engine) > 0) {
        s->is_wanted = true;
        gm_room_want_plan(engine, true);
    } else if (s->is_wanted && s->n_loud >= s->patience) {
        s->is_wanted = false;
        s->patience *= 2;
        gm_room_want_plan(engine, true);
    }
}

void gm_speculation_note_step(gm_engine *engine, const gm_update *updates, uint32_t n)
{
    gm_speculation *s = &engine->speculation;
    bool fires = false;
    settle(engine);
    for (uint32_t i = 0; i < n; i++) { /* a loss scale, or a factor that is no number, fires, too */
        const gm_adam_hyper *hyper = &updates[i].hyper;
        fires |= !(hyper->clip_factor >= 1 && hyper->clip_factor <= 1) || hyper->grad_divisor != 1;
    }
    s->open_step = engine->step.is_late ? engine->step.n : 0;
    if (s->open_step == 0) {
        count_step(engine, s->has_norm, fires);
    }
    s->has_norm = false;
    for (uint32_t chunk = 0; chunk < gm_layout_n_chunks(engine->layout); chunk++) {
        gm_chunk_state *state = &engine->chunk_states[chunk];
        move(state, state->result == GM_RESULT_MADE ? GM_RESULT_MADE : GM_RESULT_NONE);
        gm_habit_learn(&state->backwards); /* invariant 4 */
    }
    consider(engine);
}

/* ---- spares ---- */

/* Under the plan.  Of weights that need none the home is what a spare would be. */
static bool is_spare_for(const gm_engine *engine, uint32_t chunk, gm_piece piece)
{
    const gm_plan *plan = engine->room.plan;
    bool needs_one =
        piece == GM_STATE || gm_spares_weights(gm_is_opaque(engine), gm_plan_class(plan, chunk));
    return gm_plan_is_speculated(plan, chunk) && needs_one &&
           gm_engine_piece_bytes(engine, chunk, piece) > 0;
}

static bool lacks_spare(const gm_engine *engine, uint32_t chunk, int piece)
{
    return is_spare_for(engine, chunk, (gm_piece)piece) &&
           !gm_chunks_spare(engine->chunks, chunk, (gm_piece)piece);
}

static size_t lacking_bytes(const gm_engine *engine, uint32_t chunk)
{
    size_t bytes = 0;
    for (int piece = GM_WEIGHT; piece <= GM_STATE; piece++) {
        bytes += lacks_spare(engine, chunk, piece)
                     ? gm_spare_bytes(gm_engine_piece_bytes(engine, chunk, (gm_piece)piece))
                     : 0;
    }
    return bytes;
}

/* What a plan that speculates has no use for. */
static gm_status take_back_spares(gm_engine *engine)
{
    for (uint32_t chunk = 0; chunk < gm_layout_n_chunks(engine->layout); chunk++) {
        for (int piece = GM_WEIGHT; piece <= GM_STATE; piece++) {
            if (gm_chunks_spare(engine->chunks, chunk, (gm_piece)piece) &&
                !is_spare_for(engine, chunk, (gm_piece)piece)) {
                move(&engine->chunk_states[chunk], GM_RESULT_NONE);
                GM_TRY(gm_chunks_take_back_spare(engine->chunks, chunk, (gm_piece)piece));
            }
        }
    }
    return GM_OK;
}

typedef struct gm_span {
    uint8_t *begin, *end;
} gm_span;

static int compare_spans(const void *a, const void *b)
{
    const gm_span *left = a, *right = b;
    return (left->begin > right->begin) - (left->begin < right->begin);
}

/* (2 n,) what has been given of the arenas, by address; NULL: no memory. */
static gm_span *list_given(const gm_engine *engine, size_t *out_n)
{
    uint32_t n = gm_layout_n_chunks(engine->layout);
    gm_span *spans = malloc(((size_t)n * 2 + 1) * sizeof *spans);
    *out_n = 0;
    for (uint32_t chunk = 0; spans && chunk < n; chunk++) {
        for (int piece = GM_WEIGHT; piece <= GM_STATE; piece++) {
            uint8_t *at = gm_chunks_given(engine->chunks, chunk, (gm_piece)piece);
            size_t bytes = gm_engine_piece_bytes(engine, chunk, (gm_piece)piece);
            if (at) {
                spans[(*out_n)++] = (gm_span){at, at + gm_spare_bytes(bytes)};
            }
        }
    }
    if (spans) {
        qsort(spans, *out_n, sizeof *spans, compare_spans);
    }
    return spans;
}

/* Gives [at, end), of which nothing is given, to chunks that find all there that they lack. */
static gm_status give_span(gm_engine *engine, uint8_t *at, const uint8_t *end)
{
    for (uint32_t chunk = 0; chunk < gm_layout_n_chunks(engine->layout); chunk++) {
        size_t bytes = lacking_bytes(engine, chunk);
        if (bytes == 0 || bytes > (size_t)(end - at)) {
            continue;
        }
        move(&engine->chunk_states[chunk], GM_RESULT_NONE); /* a result that needed none is gone */
        for (int piece = GM_WEIGHT; piece <= GM_STATE; piece++) {
            if (lacks_spare(engine, chunk, piece)) {
                GM_TRY(gm_chunks_give_spare(engine->chunks, chunk, (gm_piece)piece, at));
                at += gm_spare_bytes(gm_engine_piece_bytes(engine, chunk, (gm_piece)piece));
            }
        }
    }
    return GM_OK;
}

/* Deals out what of the arenas is not given. */
static gm_status give_rest(gm_engine *engine)
{
    gm_speculation *s = &engine->speculation;
    size_t n;
    gm_span *given = list_given(engine, &n);
    gm_status status = GM_OK;
    for (uint32_t i = 0; given && i < s->n_arenas; i++) {
        uint8_t *at = gm_arena_base(s->arenas[i]), *end = at + gm_arena_bytes(s->arenas[i]);
        for (size_t next = 0; next < n && status == GM_OK; next++) {
            if (given[next].begin >= at && given[next].begin < end) {
                status = give_span(engine, at, given[next].begin);
                at = given[next].end;
            }
        }
        status = status == GM_OK ? give_span(engine, at, end) : status;
    }
    free(given);
    return status;
}

void gm_speculation_take_room(gm_engine *engine)
{
    gm_speculation *s = &engine->speculation;
    if (n_planned(engine) == 0) {
        return;
    }
    gm_status status = take_back_spares(engine);
    status = status == GM_OK ? give_rest(engine) : status;
    if (status != GM_OK) { /* the device has failed */
        (void)gm_engine_die(engine, status);
        return;
    }
    size_t bytes = 0, left = s->limit - s->bytes;
    for (uint32_t chunk = 0; chunk < gm_layout_n_chunks(engine->layout); chunk++) {
        size_t own = lacking_bytes(engine, chunk);
        bytes += own <= left - bytes ? own : 0;
    }
    gm_arena *arena;
    if (bytes == 0 || s->n_arenas == GM_MOST_SPARE_ARENAS) {
        return;
    }
    double began = gm_seconds();
    if (gm_arena_new(engine->device, bytes, engine->workers, &arena) != GM_OK) {
        return; /* what has no spare is updated as without speculation */
    }
    engine->speculation.arenas[s->n_arenas++] = arena;
    s->bytes += bytes;
    uint8_t *base = gm_arena_base(arena);
    (void)give_span(engine, base, base + bytes);
    s->seconds += gm_seconds() - began;
}

/* ---- results ---- */

/* Invariant 3. */
static bool is_whole(const gm_engine *engine, uint32_t chunk, const gm_task *task)
{
    const gm_chunk_state *state = &engine->chunk_states[chunk];
    uint32_t n = 0;
    for (uint32_t i = 0; i < state->n_params; i++) {
        n += engine->params[engine->chunk_params[state->first_param + i]].part_numel > 0;
    }
    return n > 0 && n == task->n_ranges;
}

static bool may_be_made(const gm_engine *engine, uint32_t chunk)
{
    return lacking_bytes(engine, chunk) == 0 &&
           gm_chunks_pins(engine->chunks, chunk, GM_WEIGHT) == 0 &&
           (gm_is_opaque(engine) ? gm_chunks_pins(engine->chunks, chunk, GM_STATE) == 0
                                 : !gm_chunks_is_resident(engine->chunks, chunk, GM_STATE));
}

gm_task *gm_speculation_due(gm_engine *engine, uint32_t chunk)
{
    gm_chunk_state *state = &engine->chunk_states[chunk];
    gm_task *task = &state->task[GM_SPECULATED];
    bool is_due = engine->room.plan && gm_plan_is_speculated(engine->room.plan, chunk) &&
                  state->result == GM_RESULT_NUMBERED && state->update == GM_UPDATE_NONE &&
                  !engine->update.is_armed && state->n_held == state->n_params &&
                  state->backwards.now == state->backwards.most && may_be_made(engine, chunk);
    return is_due ? task : NULL;
}

static void read_versions(const gm_engine *engine, uint32_t chunk, uint64_t *out)
{
    for (int piece = 0; piece < GM_N_OWN_PIECES; piece++) {
        out[piece] = gm_chunks_version(engine->chunks, chunk, (gm_piece)piece);
    }
}

void gm_speculation_note_result(gm_engine *engine, uint32_t chunk)
{
    read_versions(engine, chunk, engine->chunk_states[chunk].seen);
    move(&engine->chunk_states[chunk], GM_RESULT_MADE);
    engine->speculation.n_made++;
}

/* Of the bytes that there are now. */
static bool is_valid(const gm_engine *engine, uint32_t chunk)
{
    const gm_chunk_state *state = &engine->chunk_states[chunk];
    uint64_t now[GM_N_OWN_PIECES];
    read_versions(engine, chunk, now);
    return state->result == GM_RESULT_MADE && memcmp(now, state->seen, sizeof now) == 0 &&
           gm_chunks_has_next(engine->chunks, chunk, GM_WEIGHT) &&
           gm_chunks_has_next(engine->chunks, chunk, GM_STATE);
}

void gm_speculation_begin_numbers(gm_engine *engine)
{
    for (uint32_t chunk = 0; chunk < gm_layout_n_chunks(engine->layout); chunk++) {
        gm_chunk_state *state = &engine->chunk_states[chunk];
        gm_task *task = &state->task[GM_SPECULATED];
        if (is_valid(engine, chunk)) {
            continue; /* the numbers are those of the result */
        }
        move(state, GM_RESULT_NONE);
        if (atomic_load(&task->run) == GM_RUN_NONE) { /* else it keeps its numbers */
            move(state, GM_RESULT_NUMBERED);
            task->n_ranges = 0;
        }
    }
}

void gm_speculation_end_numbers(gm_engine *engine)
{
    for (uint32_t chunk = 0; chunk < gm_layout_n_chunks(engine->layout); chunk++) {
        gm_chunk_state *state = &engine->chunk_states[chunk];
        if (state->result == GM_RESULT_NUMBERED &&
            !is_whole(engine, chunk, &state->task[GM_SPECULATED])) {
            move(state, GM_RESULT_NONE);
        }
    }
}

/* Invariant 1.  Ranges have no padding: they are compared as bytes. */
bool gm_speculation_is_of(const gm_engine *engine, uint32_t chunk, const gm_task *task)
{
    _Static_assert(sizeof(gm_adam_scalars) == 10 * 4 &&
                       sizeof(gm_adam_range) == 2 * sizeof(size_t) + sizeof(gm_adam_scalars),
                   "ranges have no padding");
    const gm_task *made = &engine->chunk_states[chunk].task[GM_SPECULATED];
    return is_valid(engine, chunk) && made->n_ranges == task->n_ranges &&
           memcmp(made->ranges, task->ranges, task->n_ranges * sizeof *task->ranges) == 0;
}

bool gm_speculation_take(gm_engine *engine, uint32_t chunk, const gm_task *task)
{
    gm_chunk_state *state = &engine->chunk_states[chunk];
    bool is_taken = gm_speculation_is_of(engine, chunk, task);
    engine->speculation.n_taken += is_taken;
    engine->speculation.n_redone += state->result == GM_RESULT_MADE && !is_taken;
    move(state, GM_RESULT_NONE);
    return is_taken;
}

void gm_speculation_drop(gm_engine *engine)
{
    for (uint32_t chunk = 0; chunk < gm_layout_n_chunks(engine->layout); chunk++) {
        gm_chunk_state *state = &engine->chunk_states[chunk];
        if (state->result == GM_RESULT_MADE && gm_is_pending(engine, chunk) &&
            !gm_speculation_is_of(engine, chunk, gm_task_of(engine, chunk))) {
            gm_run issued = GM_RUN_ISSUED;
            move(state, GM_RESULT_NONE);
            engine->speculation.n_redone++;
            atomic_compare_exchange_strong(&state->task[GM_SPECULATED].run, &issued,
                                           GM_RUN_DROPPED);
        }
    }
}

void gm_speculation_forget(gm_engine *engine)
{
    for (uint32_t chunk = 0; chunk < gm_layout_n_chunks(engine->layout); chunk++) {
        move(&engine->chunk_states[chunk], GM_RESULT_NONE);
    }
}
