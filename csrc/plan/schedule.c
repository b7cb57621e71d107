/* schedule.c - which operations are issued at which tick of a trace.
 *
 * 1. A fetch into a ring is issued no earlier than the tick at which the last use of every piece
 *    that it overwrites has ended, and no later than the use that it serves.
 * 2. Every chunk with states has an update no later than its first use, and before any gradient of
 *    this pass grows.
 * 3. Operations of one tick go out in the order of gm_phase, those of one phase in the order of
 *    need. */
#include <stdlib.h>
#include <string.h>

#include "plan/plan_impl.h"
#include "plan/ring.h"

/* Updates on the host that are issued ahead of the first use of their weights. */
#define HOST_AHEAD 16u
/* The same of opaque updates. */
#define OPAQUE_AHEAD 4u

typedef enum gm_phase {
    PHASE_GRAD_OUT,
    PHASE_SPECULATE,
    PHASE_EARLY_UPDATE, /* on the host, or at the gradient's tick: a fetch may depend on it */
    PHASE_FETCH,
    PHASE_UPDATE,
    PHASE_GATHER,
    PHASE_GRAD_IN,
    N_PHASES
} gm_phase;

typedef struct gm_note { /* an operation with its tick and phase */
    uint32_t when;
    gm_op op;
} gm_note;

typedef struct gm_writer {
    const gm_problem *problem;
    const gm_plan *plan;
    const gm_course *course;
    gm_needs needs, other;
    const gm_needs *main; /* of the main course */
    gm_note *notes;
    size_t n_notes, capacity;
    uint32_t *update;      /* (n,) tick of the update in forward; GM_NO_TICK: no states */
    const uint32_t *first; /* (n,) tick of the first use of weights, or of shards; n: none */
    uint32_t *order; /* (n,) chunks by first use in this course, equal ones in the plan's order */
    gm_rings rings;
    gm_use *list;     /* scratch, (2 n + 1,) */
    uint32_t *latest; /* scratch, (n,) */
    uint32_t misfit;  /* a chunk whose place is taken when it is needed; GM_NO_TICK: none */
    bool has_failed;
} gm_writer;

/* Whether the gradient goes home at its tick. */
static bool is_out_at_grad(const gm_problem *problem, const gm_plan *plan, uint32_t chunk)
{
    bool is_on_host = gm_is_on_host(plan->class_of[chunk]);
    bool is_kept = !problem->is_trained[chunk]; /* no update takes it: a script may read it */
    const gm_place *place = &plan->places[chunk * GM_N_PIECES + GM_GRAD];
    if (place->is_resident) {
        return !is_kept && is_on_host && problem->n_passes == 1;
    }
    return place->length > 0 &&
           (is_kept || plan->is_late[chunk] || is_on_host || problem->n_passes > 1);
}

void gm_schedule_free(gm_schedule *schedule)
{
    free(schedule->begin);
    free(schedule->ops);
    memset(schedule, 0, sizeof *schedule);
}

static void note(gm_writer *w, uint32_t tick, gm_phase phase, gm_op_kind kind, uint32_t chunk)
{
    if (GM_GROW(w->notes, w->n_notes, w->capacity, "host: no room for %zu operations") != GM_OK) {
        w->has_failed = true;
        return;
    }
    w->notes[w->n_notes++] = (gm_note){tick * N_PHASES + (uint32_t)phase, {(uint32_t)kind, chunk}};
}

static const gm_place *place_of(const gm_writer *w, uint32_t chunk, gm_piece piece)
{
    return &w->plan->places[chunk * GM_N_PIECES + piece];
}

static uint32_t blocks_of(const gm_writer *w, uint32_t chunk, gm_piece piece)
{
    return gm_plan_blocks(w->problem->input, chunk, piece, false);
}

static uint32_t claim(gm_writer *w, gm_piece piece, uint32_t chunk, uint32_t end)
{
    uint32_t n_blocks = blocks_of(w, chunk, piece);
    return gm_rings_claim(&w->rings, place_of(w, chunk, piece), n_blocks, chunk, end);
}

static bool is_in_ring(const gm_writer *w, uint32_t chunk, gm_piece piece)
{
    const gm_place *place = place_of(w, chunk, piece);
    return place->length > 0 && !place->is_resident;
}

/* How many updates are issued ahead of the first use that needs one: enough for the rings and the
 * host's workers to be busy, few enough that a pass does not begin with all of them.  An opaque one
 * holds up compute, in whose stream it runs. */
static uint32_t lookahead(const gm_writer *w)
{
    if (w->problem->input->is_opaque) {
        return OPAQUE_AHEAD;
    }
    uint32_t n = 0, n_streamed = 0;
    uint64_t blocks = 0;
    for (uint32_t c = 0; c < w->plan->n; c++) {
        n += w->update[c] != GM_NO_TICK;
        if (is_in_ring(w, c, GM_STATE)) {
            n_streamed++;
            blocks += blocks_of(w, c, GM_STATE);
        }
    }
    uint64_t held = blocks ? (uint64_t)w->plan->ring[GM_STATE] * n_streamed / blocks + 2 : 2;
    uint64_t ahead = n_streamed ? held * n / n_streamed : 0;
    ahead = ahead > 8 ? ahead : 8;
    ahead = ahead > n / 8 ? ahead : n / 8;
    return ahead > 64 ? (held > 64 ? (uint32_t)held : 64) : (uint32_t)ahead;
}

/* Streamed weights that are not used by this pass, or, updated on the device, not by its forward:
 * they borrow their place for the update before anybody else comes. */
static bool is_passed_by(const gm_writer *w, uint32_t chunk)
{
    const gm_course *course = w->course;
    uint32_t end = gm_is_on_host(w->plan->class_of[chunk]) ? course->n : course->backward;
    return w->first[chunk] >= end && is_in_ring(w, chunk, GM_WEIGHT);
}

/* When pending updates are issued in forward, before fetches are known: no later than the first
 * use, and before backward, where gradients that grow take the places of those that updates
 * read. */
static void place_updates(gm_writer *w)
{
    const gm_course *course = w->course;
    uint32_t n = w->plan->n, n_updates = 0;
    uint32_t last = course->backward > 0 ? course->backward - 1 : 0;
    for (uint32_t c = 0; c < n; c++) {
        w->update[c] = w->problem->input->chunks[c].numel > 0 ? 0 : GM_NO_TICK;
    }
    uint32_t ahead = lookahead(w), n_host = 0;
    bool is_deferred = w->problem->input->when != GM_IMMEDIATE;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t c = w->order[i];
        if (w->update[c] == GM_NO_TICK) {
            continue;
        }
        uint32_t first = w->first[c] < last ? w->first[c] : last, tick = first;
        if (gm_is_on_host(w->plan->class_of[c]) && (is_deferred || w->plan->is_late[c])) {
            tick = n_host < HOST_AHEAD ? 0 : w->list[n_host - HOST_AHEAD].begin;
            w->list[n_host++].begin = first;
        } else if (is_deferred || w->plan->is_late[c]) {
            tick = n_updates < ahead ? 0 : w->latest[n_updates - ahead];
            w->latest[n_updates++] = first;
        }
        w->update[c] = is_passed_by(w, c) ? 0 : tick;
    }
}

/* The beginning of the next pass, whose first fetches go out at the end of this one. */
static void write_tail_fetches(gm_writer *w)
{
    for (uint32_t i = 0; i < w->main->n_uses; i++) {
        const gm_use *use = &w->main->uses[i];
        uint32_t c = use->chunk;
        if (!is_in_ring(w, c, GM_WEIGHT)) {
            continue;
        }
        /* What the host is going to update is stale until then. */
        bool is_stale = w->plan->class_of[c] == GM_CLASS_C2 && w->problem->is_trained[c] &&
                        w->plan->is_late[c] && w->problem->n_passes == 1;
        is_stale |= w->plan->is_speculated[c]; /* the step will probably make it so */
        uint32_t n_blocks = blocks_of(w, c, GM_WEIGHT);
        const gm_place *place = place_of(w, c, GM_WEIGHT);
        if (gm_rings_free_from(&w->rings, place, n_blocks, c) >= w->course->n) {
            return;
        }
        uint32_t from = claim(w, GM_WEIGHT, c, w->course->n + use->end);
        if (from != GM_NO_TICK && !is_stale) {
            note(w, from, PHASE_FETCH, GM_OP_FETCH, c);
        }
    }
}

static void write_fetches(gm_writer *w)
{
    for (uint32_t i = 0; i < w->needs.n_uses; i++) {
        const gm_use *use = &w->needs.uses[i];
        uint32_t c = use->chunk;
        if (!is_in_ring(w, c, GM_WEIGHT)) {
            continue;
        }
        uint32_t from = claim(w, GM_WEIGHT, c, use->end);
        if (use->begin == w->first[c] && w->update[c] != GM_NO_TICK && !is_passed_by(w, c)) {
            uint32_t earliest = from == GM_NO_TICK ? 0 : from;
            bool is_before = gm_is_on_host(w->plan->class_of[c]) ? w->update[c] > earliest
                                                                 : w->update[c] < earliest;
            w->update[c] = is_before ? earliest : w->update[c];
        }
        if (from != GM_NO_TICK && from > use->begin) {
            w->misfit = c;
        } else if (from != GM_NO_TICK) {
            note(w, from, PHASE_FETCH, GM_OP_FETCH, c);
        }
    }
    write_tail_fetches(w);
}

/* Copies of what the host has updated, or a speculation, and that stays on the device. */
static void write_refreshes(gm_writer *w)
{
    uint32_t ahead = 8, n = 0;
    for (uint32_t i = 0; i < w->plan->n; i++) {
        uint32_t c = w->order[i];
        bool is_refreshed = w->plan->class_of[c] == GM_CLASS_C1 ||
                            (w->plan->class_of[c] == GM_CLASS_S1 && w->plan->is_speculated[c]);
        if (!is_refreshed || w->update[c] == GM_NO_TICK) {
            continue;
        }
        uint32_t first = w->first[c] < w->course->n ? w->first[c] : w->course->n - 1;
        w->latest[n] = first;
        uint32_t tick = n < ahead ? 0 : w->latest[n - ahead];
        tick = tick > w->update[c] ? tick : w->update[c];
        note(w, tick > first ? first : tick, PHASE_FETCH, GM_OP_FETCH, c);
        n++;
    }
}

/* Of a chunk that is updated in forward the update is issued by then: updates come no later than
 * the first use. */
static void write_gathers(gm_writer *w)
{
    for (uint32_t i = 0; i < w->needs.n_gathers; i++) {
        note(w, w->needs.gathers[i].begin, PHASE_GATHER, GM_OP_GATHER, w->needs.gathers[i].chunk);
    }
    if (w->needs.misfit != GM_NO_TICK) {
        w->misfit = w->needs.misfit;
    }
}

/* Whether each gradient of the pass finds its place free. */
static void check_unreduced(gm_writer *w)
{
    for (uint32_t i = 0; i < w->course->n_opens; i++) {
        const gm_use *open = &w->course->opens[i];
        if (!gm_is_reduced(w->problem->input, open->chunk)) {
            continue;
        }
        const gm_place *place = place_of(w, open->chunk, GM_UNREDUCED);
        bool is_taken = place->length == 0;
        if (is_in_ring(w, open->chunk, GM_UNREDUCED)) {
            uint32_t from = claim(w, GM_UNREDUCED, open->chunk, open->end);
            is_taken = from != GM_NO_TICK && from > open->begin;
        }
        w->misfit = is_taken ? open->chunk : w->misfit;
    }
}

static bool is_at_grad(const gm_writer *w, uint32_t chunk)
{
    return w->problem->input->when == GM_IMMEDIATE && !w->plan->is_late[chunk] &&
           w->course->ready[chunk] < w->course->n && w->problem->input->chunks[chunk].numel > 0;
}

/* Whether the gradient's place is its own until the pass ends: no other one comes there. */
static bool is_last_there(const gm_writer *w, uint32_t chunk)
{
    const gm_place *place = place_of(w, chunk, GM_GRAD);
    uint32_t n = blocks_of(w, chunk, GM_GRAD), j = 0;
    while (j < n && (place->is_resident || w->rings.owner[gm_place_block(place, j)] == chunk)) {
        j++;
    }
    return j == n;
}

static bool is_among(const uint32_t *chunks, uint32_t n, uint32_t chunk)
{
    uint32_t i = 0;
    while (i < n && chunks[i] != chunk) {
        i++;
    }
    return i < n;
}

/* How many of the updates that the step itself issues find their gradients where the pass has left
 * them: these do not go home.  An opaque update would wait for that, as it may write them. */
static uint32_t n_at_step(const gm_writer *w)
{
    uint32_t n = 0;
    const gm_plan_input *input = w->problem->input;
    bool is_open = input->is_opaque && input->when == GM_DEFERRED && w->problem->n_passes == 1;
    while (is_open && n < w->plan->n && n < GM_ISSUED_BY_STEP) {
        uint32_t c = w->plan->order[n];
        is_open = w->problem->is_trained[c] && !gm_is_on_host(w->plan->class_of[c]) &&
                  is_last_there(w, c);
        n += is_open;
    }
    return n;
}

/* Behind write_grads_in, which has claimed the gradients' places. */
static void write_grad_ticks(gm_writer *w)
{
    uint32_t n_kept = n_at_step(w);
    for (uint32_t i = 0; i < w->course->n_opens; i++) {
        uint32_t c = w->course->opens[i].chunk, tick = w->course->grad[c];
        if (is_out_at_grad(w->problem, w->plan, c) && !is_among(w->plan->order, n_kept, c)) {
            note(w, tick, PHASE_GRAD_OUT, GM_OP_GRAD_OUT, c);
        }
        uint32_t ahead = w->problem->input->is_opaque ? w->course->ready[c] : tick;
        if (w->plan->is_speculated[c] && ahead < w->course->n) {
            note(w, ahead, PHASE_SPECULATE, GM_OP_SPECULATE, c);
        }
        if (is_at_grad(w, c)) {
            note(w, w->course->ready[c], PHASE_EARLY_UPDATE, GM_OP_UPDATE, c);
            if (w->plan->class_of[c] == GM_CLASS_C1 && w->plan->ring[GM_WEIGHT] == 0) {
                note(w, w->course->ready[c], PHASE_FETCH, GM_OP_FETCH, c);
            }
        }
    }
}

static void write_updates(gm_writer *w)
{
    for (uint32_t i = 0; i < w->plan->n; i++) {
        uint32_t c = w->order[i];
        if (w->update[c] != GM_NO_TICK) {
            bool is_early = gm_is_on_host(w->plan->class_of[c]) || is_passed_by(w, c);
            note(w, w->update[c], is_early ? PHASE_EARLY_UPDATE : PHASE_UPDATE, GM_OP_UPDATE, c);
        }
    }
}

/* Gradients that come back: to be added to, or for an update on the device.  An opaque update
 * brings its own: one stream has all that comes in, in the order of need. */
static void write_grads_in(gm_writer *w)
{
    const gm_course *course = w->course;
    uint32_t n = 0;
    bool is_adding = w->problem->n_passes > 1, is_opaque = w->problem->input->is_opaque;
    for (uint32_t i = 0; i < w->plan->n; i++) {
        uint32_t c = w->order[i];
        /* Of several passes, one before the last may have left a gradient to any chunk. */
        if (is_in_ring(w, c, GM_GRAD) && w->problem->is_trained[c] &&
            (w->plan->is_late[c] || is_adding) && !gm_is_on_host(w->plan->class_of[c]) &&
            w->update[c] != GM_NO_TICK) {
            w->list[n++] = (gm_use){c, w->update[c], i};
        }
    }
    for (uint32_t i = 0; i < course->n_opens; i++) {
        if (place_of(w, course->sums[i].chunk, GM_GRAD)->length == 0) {
            w->misfit = course->sums[i].chunk; /* made without a backward */
        } else if (is_in_ring(w, course->sums[i].chunk, GM_GRAD)) {
            w->list[n++] = (gm_use){course->sums[i].chunk, course->sums[i].begin, w->plan->n + i};
        }
    }
    /* `end` holds the place in the order of need. */
    qsort(w->list, n, sizeof *w->list, gm_by_begin);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t c = w->list[i].chunk, begin = w->list[i].begin;
        bool is_update = w->list[i].end < w->plan->n;
        uint32_t end = is_update ? begin : course->sums[w->list[i].end - w->plan->n].end;
        uint32_t from = claim(w, GM_GRAD, c, end);
        if (is_update && !is_adding && from != GM_NO_TICK && from < begin && !is_opaque) {
            note(w, from, PHASE_GRAD_IN, GM_OP_GRAD_IN, c);
        } else if (!is_update && from != GM_NO_TICK && from > begin) {
            w->misfit = c;
        } else if (!is_update && is_adding) {
            from = from == GM_NO_TICK ? 0 : from;
            if (w->update[c] != GM_NO_TICK && from < w->update[c]) {
                from = w->update[c]; /* the pending update reads what the last step summed */
            }
            note(w, from, PHASE_GRAD_IN, GM_OP_GRAD_IN, c);
        }
    }
}

static gm_status sort_notes(const gm_writer *w, gm_schedule *out)
{
    size_t n_keys = (size_t)w->course->n * N_PHASES;
    uint32_t *count = calloc(n_keys + 1, sizeof *count);
    out->begin = calloc((size_t)w->course->n + 1, sizeof *out->begin);
    out->ops = calloc(w->n_notes + 1, sizeof *out->ops);
    if (!count || !out->begin || !out->ops || w->has_failed) {
        free(count);
        gm_schedule_free(out);
        return GM_FAIL(GM_ERR_NOMEM, "host: no room for %zu operations", w->n_notes);
    }
    for (size_t i = 0; i < w->n_notes; i++) {
        count[w->notes[i].when + 1]++;
    }
    for (size_t i = 0; i < n_keys; i++) {
        count[i + 1] += count[i];
    }
    for (uint32_t t = 0; t <= w->course->n; t++) {
        out->begin[t] = count[(size_t)t * N_PHASES];
    }
    for (size_t i = 0; i < w->n_notes; i++) {
        out->ops[count[w->notes[i].when]++] = w->notes[i].op;
    }
    free(count);
    return GM_OK;
}

static gm_status find_needs(gm_writer *w)
{
    const gm_plan_input *input = w->problem->input;
    GM_TRY(gm_needs_new(input, w->plan, w->course, &w->needs));
    const gm_course *main = &w->problem->courses[w->problem->main];
    if (w->course == main) {
        w->main = &w->needs;
    } else {
        GM_TRY(gm_needs_new(input, w->plan, main, &w->other));
        w->main = &w->other;
    }
    w->first = w->needs.first;
    return gm_sort_chunks(w->first, w->course->n, w->plan->order, w->plan->n, w->order);
}

gm_status gm_schedule_new(const gm_problem *problem, const gm_plan *plan, const gm_course *course,
                          gm_schedule *out)
{
    uint32_t n = plan->n;
    gm_writer w = {.problem = problem,
                   .plan = plan,
                   .course = course,
                   .misfit = GM_NO_TICK,
                   .update = calloc(n, sizeof(uint32_t)),
                   .order = calloc(n, sizeof(uint32_t)),
                   .list = calloc(2 * (size_t)n + 1, sizeof(gm_use)),
                   .latest = calloc(n, sizeof(uint32_t))};
    gm_status status = gm_rings_new(plan->n_blocks, &w.rings);
    *out = (gm_schedule){.hash = course->trace->hash, .n_ticks = course->n};
    if (status == GM_OK && (!w.update || !w.order || !w.list || !w.latest)) {
        status = GM_FAIL(GM_ERR_NOMEM, "host: no room to schedule %u ticks", course->n);
    }
    if (status == GM_OK) {
        status = find_needs(&w);
    }
    if (status != GM_OK) {
        gm_schedule_free(out);
    } else if (course->n > UINT32_MAX / N_PHASES - 1) {
        status = GM_FAIL(GM_ERR_NOMEM, "plan: a trace of %u ticks is too long", course->n);
    } else {
        if (course->n > 0) {
            place_updates(&w);
            write_fetches(&w);
            write_refreshes(&w);
            write_gathers(&w);
            write_updates(&w);
            write_grads_in(&w);
            write_grad_ticks(&w);
            check_unreduced(&w);
        }
        status = w.misfit != GM_NO_TICK ? GM_FAIL(GM_ERR_STATE,
                                                  "plan: chunk %u's place is taken when a pass of "
                                                  "%u ticks needs it; plan anew with this trace",
                                                  w.misfit, course->n)
                                        : sort_notes(&w, out);
    }
    free(w.update);
    free(w.order);
    gm_rings_free(&w.rings);
    gm_needs_free(&w.needs);
    gm_needs_free(&w.other);
    free(w.list);
    free(w.latest);
    free(w.notes);
    return status;
}
