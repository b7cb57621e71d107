/* place.c - where every piece lives: blocks of its own, or a place in the ring of its kind.
 *
 * 1. Pieces that are in use in the same tick of any trace share no block.  A weight or a gradient
 *    for which that would happen in its ring is made resident.
 * 2. Blocks of different rings and of resident pieces are disjoint, and [0, n_blocks) is all of
 *    them. */
#include <stdlib.h>
#include <string.h>

#include "plan/plan_impl.h"
#include "plan/ring.h"

typedef struct gm_ring {
    const gm_problem *problem;
    gm_plan *plan;
    gm_piece piece;
    const uint32_t *order; /* (n,) */
    bool *is_in;           /* (n,) */
    uint32_t depth, length;
    uint64_t *taken;       /* scratch, (most ticks + 2,) */
    const gm_use **latest; /* scratch, (n,) the last use so far */
    gm_needs *needs;       /* (n_courses,) once the gathered weights have their places */
} gm_ring;

static uint32_t blocks_of(const gm_ring *ring, uint32_t chunk)
{
    return gm_plan_blocks(ring->problem->input, chunk, ring->piece, false);
}

static const gm_use *uses_of(const gm_ring *ring, uint32_t which, uint32_t *n)
{
    const gm_course *course = &ring->problem->courses[which];
    switch (ring->piece) {
    case GM_GATHERED: *n = course->n_uses; return course->uses;
    case GM_UNREDUCED: *n = course->n_opens; return course->opens;
    case GM_GRAD: *n = course->n_opens; return course->sums;
    default: *n = ring->needs[which].n_uses; return ring->needs[which].uses;
    }
}

/* Most blocks of the ring's pieces in use in one tick of one course. */
static uint64_t most_at_once(const gm_ring *ring)
{
    uint64_t most = 0;
    for (uint32_t k = 0; k < ring->problem->n_courses; k++) {
        const gm_course *course = &ring->problem->courses[k];
        uint32_t n;
        const gm_use *uses = uses_of(ring, k, &n);
        memset(ring->taken, 0, ((size_t)course->n + 2) * sizeof *ring->taken);
        for (uint32_t i = 0; i < n; i++) {
            if (ring->is_in[uses[i].chunk]) {
                ring->taken[uses[i].begin] += blocks_of(ring, uses[i].chunk);
                ring->taken[uses[i].end] -= blocks_of(ring, uses[i].chunk);
            }
        }
        uint64_t now = 0;
        for (uint32_t t = 0; t <= course->n; t++) {
            now += ring->taken[t]; /* ends count as negative, modulo 2^64 */
            most = now > most ? now : most;
        }
    }
    return most;
}

static gm_status set_length(gm_ring *ring)
{
    uint64_t total = 0, n = 0, largest = 0;
    for (uint32_t c = 0; c < ring->problem->n; c++) {
        if (ring->is_in[c]) {
            total += blocks_of(ring, c);
            largest = blocks_of(ring, c) > largest ? blocks_of(ring, c) : largest;
            n++;
        }
    }
    uint64_t mean = n ? (total + n - 1) / n : 0, least = 0, length;
    if (ring->piece != GM_STATE) {
        least = most_at_once(ring);
        least = least > largest ? least : largest;
        length = least + ring->depth * mean;
    } else {
        length = n == 0 ? 0 : largest + (ring->depth > 0 ? ring->depth - 1 : 0) * mean;
    }
    length = length < total ? length : total;
    if (ring->piece == GM_STATE && n > 0 && !ring->problem->input->is_opaque) {
        uint32_t stage = gm_stage_least(ring->problem->input->block_bytes);
        length = length > stage ? length : stage;
    }
    GM_FAIL_IF(length > INT32_MAX, GM_ERR_NOMEM, "plan: a ring of %llu blocks is too long",
               (unsigned long long)length);
    ring->length = (uint32_t)length;
    uint64_t position = 0;
    for (uint32_t i = 0; i < ring->problem->n; i++) {
        uint32_t c = ring->order[i];
        if (ring->is_in[c]) {
            ring->plan->places[c * GM_N_PIECES + ring->piece] =
                (gm_place){.length = ring->length, .offset = (uint32_t)(position % length)};
            position += blocks_of(ring, c);
        }
    }
    return GM_OK;
}

/* Takes one of each two pieces that meet in a block out of the ring: the one in use for longer. */
static gm_status take_out_conflicts(gm_ring *ring, uint32_t which, bool *has_changed)
{
    uint32_t n, *owners;
    const gm_use *uses = uses_of(ring, which, &n);
    GM_TRY(gm_owners_new(ring->length, &owners));
    for (uint32_t i = 0; i < n; i++) {
        const gm_use *use = &uses[i];
        uint32_t c = use->chunk, at = 0, old;
        const gm_place *place = &ring->plan->places[c * GM_N_PIECES + ring->piece];
        if (!ring->is_in[c]) {
            continue;
        }
        while ((old = gm_owners_take(owners, place, blocks_of(ring, c), c, &at)) != GM_NO_OWNER &&
               ring->is_in[c]) {
            const gm_use *last = ring->latest[old];
            if (ring->is_in[old] && last->end > use->begin) {
                bool is_longer = last->end - last->begin >= use->end - use->begin;
                ring->is_in[is_longer ? old : c] = false;
                *has_changed = true;
            }
        }
        ring->latest[c] = use;
    }
    free(owners);
    return GM_OK;
}

static gm_status fit_ring(gm_ring *ring)
{
    for (bool is_done = false; !is_done;) {
        GM_TRY(set_length(ring));
        is_done = true;
        if (ring->piece == GM_STATE || ring->length == 0) {
            break; /* states are in use for one operation only */
        }
        bool has_changed = false;
        for (uint32_t k = 0; k < ring->problem->n_courses; k++) {
            GM_TRY(take_out_conflicts(ring, k, &has_changed));
        }
        is_done = !has_changed;
    }
    return GM_OK;
}

/* Late updates in the order of forward, then the others in the order of gradients. */
static void state_order(const gm_problem *problem, const gm_choice *choice, uint32_t *out)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < problem->n; i++) {
        if (choice->of[problem->order[i]].is_late) {
            out[n++] = problem->order[i];
        }
    }
    for (uint32_t i = 0; i < problem->n; i++) {
        if (!choice->of[problem->grad_order[i]].is_late) {
            out[n++] = problem->grad_order[i];
        }
    }
}

/* Whether the piece is to be in the ring of its kind. */
static bool is_wanted_in(const gm_ring *ring, const gm_choice *choice, uint32_t c)
{
    const gm_plan_chunk *chunk = &ring->problem->input->chunks[c];
    uint32_t cls = ring->plan->class_of[c];
    if (chunk->blocks[ring->piece] == 0 || chunk->bytes[ring->piece] == 0) {
        return false;
    }
    switch (ring->piece) {
    case GM_WEIGHT: return gm_is_streamed(cls);
    case GM_STATE: return gm_is_state_streamed(cls);
    case GM_GATHERED: return !choice->of[c].is_kept && !chunk->must_reside;
    case GM_GRAD: return ring->problem->n_passes > 0 && !choice->of[c].is_grad_resident;
    default: return ring->problem->n_passes > 0;
    }
}

static void make_resident(const gm_problem *problem, gm_plan *plan, uint32_t c)
{
    uint32_t cls = plan->class_of[c];
    bool is_frozen = problem->input->chunks[c].numel == 0;
    if (gm_is_streamed(cls) && problem->input->chunks[c].blocks[GM_WEIGHT] > 0) {
        plan->class_of[c] = cls == GM_CLASS_S2 ? GM_CLASS_S1 : is_frozen ? GM_CLASS_R : GM_CLASS_C1;
    }
}

static gm_status place_ring(const gm_choice *choice, gm_ring *ring, const uint32_t *state_order)
{
    const gm_problem *problem = ring->problem;
    gm_plan *plan = ring->plan;
    gm_piece piece = ring->piece;
    ring->depth = choice->depth[piece];
    ring->order = piece == GM_STATE                           ? state_order
                  : piece == GM_GRAD || piece == GM_UNREDUCED ? problem->grad_order
                                                              : problem->order;
    for (uint32_t c = 0; c < problem->n; c++) {
        ring->is_in[c] = is_wanted_in(ring, choice, c);
    }
    GM_TRY(fit_ring(ring));
    for (uint32_t c = 0; c < problem->n; c++) {
        if (ring->is_in[c]) {
            plan->places[c * GM_N_PIECES + piece].base = plan->n_blocks;
            continue;
        }
        plan->places[c * GM_N_PIECES + piece] = (gm_place){0};
        if (piece == GM_WEIGHT || (piece == GM_GATHERED && gm_is_gathered(problem->input, c))) {
            make_resident(problem, plan, c); /* kept weights have a shard that is resident */
        }
    }
    plan->ring[piece] = ring->length;
    GM_FAIL_IF(ring->length > UINT32_MAX - plan->n_blocks, GM_ERR_NOMEM,
               "plan: rings of more than %u blocks", UINT32_MAX);
    plan->n_blocks += ring->length;
    return GM_OK;
}

/* Gathered weights come first: when they are gathered says when shards are needed. */
static gm_status place_rings(const gm_choice *choice, gm_ring *ring, uint32_t *order)
{
    static const gm_piece pieces[] = {GM_WEIGHT, GM_STATE, GM_GRAD, GM_UNREDUCED};
    const gm_problem *problem = ring->problem;
    state_order(problem, choice, order);
    if (problem->has_gathered) {
        ring->piece = GM_GATHERED;
        GM_TRY(place_ring(choice, ring, order));
    }
    for (uint32_t k = 0; k < problem->n_courses; k++) {
        GM_TRY(gm_needs_new(problem->input, ring->plan, &problem->courses[k], &ring->needs[k]));
    }
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++) {
        ring->piece = pieces[i];
        if (pieces[i] != GM_UNREDUCED || problem->has_unreduced) {
            GM_TRY(place_ring(choice, ring, order));
        }
    }
    return GM_OK;
}

static bool is_resident(const gm_problem *problem, const gm_plan *plan, uint32_t c, uint32_t piece)
{
    uint32_t cls = plan->class_of[c];
    switch (piece) {
    case GM_WEIGHT: return !gm_is_streamed(cls);
    case GM_STATE: return cls == GM_CLASS_R;
    case GM_GATHERED: return true;
    case GM_GRAD: return problem->n_passes > 0 || problem->input->chunks[c].stays;
    default: return problem->n_passes > 0;
    }
}

/* Whether a chunk may be speculated. */
static bool is_candidate(const gm_problem *problem, const gm_plan *plan, uint32_t c)
{
    const gm_course *main = &problem->courses[problem->main];
    bool is_in_use = problem->input->is_opaque && main->ready[c] >= main->n; /* its weights are */
    return plan->class_of[c] != GM_CLASS_R && problem->is_trained[c] &&
           main->grad[c] != GM_NO_TICK && !is_in_use;
}

/* Streamed weights may become resident when the rings are placed: then this is too much. */
static size_t spare_of(const gm_problem *problem, const gm_plan *plan, uint32_t c)
{
    return gm_plan_spare(problem->input, c, (gm_class)plan->class_of[c]);
}

/* Opaque updates run in compute's stream, and several copies go out for each: they are spread over
 * the backward, so that the others' gradients go home in between. */
static void spread_speculated(const gm_problem *problem, const gm_choice *choice, size_t left,
                              gm_plan *plan)
{
    double spares = 0, seen = 0, taken = 0;
    for (uint32_t c = 0; c < problem->n; c++) {
        bool is_one = is_candidate(problem, plan, c);
        spares += is_one ? (double)spare_of(problem, plan, c) : 0;
    }
    double share = spares > 0 && (double)left < spares ? (double)left / spares : 1;
    share = choice->speculated < share ? choice->speculated : share;
    for (uint32_t i = problem->n; i-- > 0;) {
        uint32_t c = problem->order[i];
        double numel = (double)problem->input->chunks[c].numel;
        size_t spare = spare_of(problem, plan, c);
        if (!is_candidate(problem, plan, c)) {
            continue;
        }
        seen += numel;
        if (spare <= left && taken + numel / 2 <= share * seen) {
            left -= spare;
            taken += numel;
            plan->is_speculated[c] = true;
        }
    }
}

/* The last chunks of the forward have most of the backward before their step, and most of the
 * forward after it. */
static void choose_speculated(const gm_problem *problem, const gm_choice *choice, gm_plan *plan)
{
    const gm_plan_input *input = problem->input;
    size_t left = input->when == GM_DEFERRED ? input->spare_bytes : 0;
    double all = 0, taken = 0;
    if (input->is_opaque) {
        spread_speculated(problem, choice, left, plan);
        return;
    }
    for (uint32_t c = 0; c < problem->n; c++) {
        all += plan->class_of[c] == GM_CLASS_R ? 0 : (double)input->chunks[c].numel;
    }
    for (uint32_t i = problem->n; i-- > 0;) {
        uint32_t c = problem->order[i];
        size_t spare = spare_of(problem, plan, c);
        double numel = (double)input->chunks[c].numel;
        if (!is_candidate(problem, plan, c)) {
            continue;
        }
        if (spare > left || taken + numel > choice->speculated * all * (1 + 1e-9)) {
            return;
        }
        left -= spare;
        taken += numel;
        plan->is_speculated[c] = true;
    }
}

gm_status gm_plan_place_all(const gm_problem *problem, const gm_choice *choice, gm_plan *plan)
{
    gm_ring ring = {.problem = problem,
                    .plan = plan,
                    .is_in = calloc(problem->n, sizeof(bool)),
                    .latest = calloc(problem->n, sizeof(gm_use *)),
                    .taken = calloc((size_t)problem->most_ticks + 2, sizeof(uint64_t)),
                    .needs = calloc((size_t)problem->n_courses + 1, sizeof(gm_needs))};
    uint32_t *order = calloc(problem->n, sizeof *order);
    gm_status status = GM_OK;
    for (uint32_t c = 0; c < plan->n; c++) {
        plan->class_of[c] = choice->of[c].class_of;
        plan->is_late[c] = choice->of[c].is_late;
    }
    memset(plan->is_speculated, 0, plan->n * sizeof *plan->is_speculated);
    choose_speculated(problem, choice, plan);
    memset(plan->ring, 0, sizeof plan->ring);
    memset(plan->places, 0, (size_t)plan->n * GM_N_PIECES * sizeof *plan->places);
    plan->n_blocks = 0;
    if (!ring.is_in || !ring.latest || !ring.taken || !ring.needs || !order) {
        status = GM_FAIL(GM_ERR_NOMEM, "host: no room to place %u chunks", problem->n);
    } else {
        status = place_rings(choice, &ring, order);
    }
    uint64_t base = plan->n_blocks;
    for (uint32_t i = 0; i < problem->n && status == GM_OK; i++) {
        for (uint32_t piece = 0; piece < GM_N_PIECES; piece++) {
            gm_place *place = &plan->places[i * GM_N_PIECES + piece];
            uint32_t blocks = problem->input->chunks[i].blocks[piece];
            if (place->length == 0 && blocks > 0 && is_resident(problem, plan, i, piece)) {
                *place = (gm_place){.base = (uint32_t)base, .length = blocks, .is_resident = true};
                base += blocks;
            }
        }
    }
    if (status == GM_OK && base > INT32_MAX) {
        status = GM_FAIL(GM_ERR_NOMEM, "plan: %llu blocks are too many", (unsigned long long)base);
    }
    plan->n_blocks = (uint32_t)base;
    plan->info.device_bytes = (size_t)base * problem->input->block_bytes;
    free(ring.is_in);
    free(ring.taken);
    for (uint32_t k = 0; k < problem->n_courses && ring.needs; k++) {
        gm_needs_free(&ring.needs[k]);
    }
    free(ring.needs);
    free(ring.latest);
    free(order);
    return status;
}
