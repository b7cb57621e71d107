/* plan_place.c - where every piece lives: blocks of its own, or a place in the ring of its kind.
 *
 * 1. Pieces that are in use in the same tick of any trace share no block.  A weight or a gradient for which that
 *    would happen in its ring is made resident.
 * 2. Blocks of different rings and of resident pieces are disjoint, and [0, n_blocks) is all of them. */
#include <stdlib.h>
#include <string.h>

#include "plan_impl.h"

typedef struct gm_slot { /* a block of a ring while a course runs */
    uint32_t owner, begin, until;
} gm_slot;

typedef struct gm_ring {
    const gm_problem *problem;
    gm_plan *plan;
    gm_piece piece;
    const uint32_t *order; /* (n,) */
    bool *is_in;           /* (n,) */
    uint32_t depth, length;
    uint64_t *taken; /* scratch, (most ticks + 2,) */
    gm_slot *slots;  /* scratch, (length,) */
    gm_use *uses;    /* scratch, (most uses,) */
    uint32_t *latest;
} gm_ring;

gm_status gm_plan_alloc(const gm_problem *problem, gm_plan **out)
{
    size_t n = problem->n;
    gm_plan *plan = calloc(1, sizeof *plan);
    if (plan) {
        *plan = (gm_plan){.n = problem->n,
                          .class_of = calloc(n, 1),
                          .is_late = calloc(n, sizeof(bool)),
                          .places = calloc(n * GM_N_PIECES, sizeof(gm_place)),
                          .order = calloc(n, sizeof(uint32_t)),
                          .schedules = calloc(problem->n_courses, sizeof(gm_schedule))};
    }
    if (!plan || !plan->class_of || !plan->is_late || !plan->places || !plan->order ||
        !plan->schedules) {
        gm_plan_free(plan);
        return GM_FAIL(GM_ERR_NOMEM, "host: no room for a plan of %zu chunks", n);
    }
    memcpy(plan->order, problem->order, n * sizeof(uint32_t));
    *out = plan;
    return GM_OK;
}

void gm_plan_uses(const gm_plan *plan, const gm_plan_input *input, const gm_course *course,
                  uint32_t *latest, gm_use *out)
{
    memcpy(out, course->uses, course->n_uses * sizeof *out);
    if (input->when != GM_IMMEDIATE) {
        return;
    }
    memset(latest, 0xff, plan->n * sizeof *latest);
    for (uint32_t i = 0; i < course->n_uses; i++) {
        uint32_t c = out[i].chunk;
        if (course->grad[c] != GM_NO_TICK) {
            latest[c] = i;
        }
    }
    for (uint32_t c = 0; c < plan->n; c++) {
        if (latest[c] != UINT32_MAX && plan->class_of[c] == GM_CLASS_S2 && !plan->is_late[c]) {
            gm_use *use = &out[latest[c]];
            uint32_t end = course->settle[c] < course->n ? course->settle[c] + 1 : course->n;
            use->end = use->end > end ? use->end : end;
        }
    }
}

static uint32_t blocks_of(const gm_ring *ring, uint32_t chunk)
{
    return gm_plan_blocks(ring->problem->input, chunk, ring->piece, false);
}

static const gm_use *uses_of(const gm_ring *ring, const gm_course *course, uint32_t *n)
{
    if (ring->piece == GM_GRAD) {
        *n = course->n_opens;
        return course->opens;
    }
    *n = course->n_uses;
    gm_plan_uses(ring->plan, ring->problem->input, course, ring->latest, ring->uses);
    return ring->uses;
}

/* Most blocks of the ring's pieces in use in one tick of one course. */
static uint64_t most_at_once(const gm_ring *ring)
{
    uint64_t most = 0;
    for (uint32_t k = 0; k < ring->problem->n_courses; k++) {
        const gm_course *course = &ring->problem->courses[k];
        uint32_t n;
        const gm_use *uses = uses_of(ring, course, &n);
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
    if (ring->piece == GM_STATE && n > 0) {
        uint32_t stage = gm_stage_least(ring->problem->input->block_bytes);
        length = length > stage ? length : stage;
    }
    if (length > INT32_MAX) {
        return GM_FAIL(GM_ERR_NOMEM, "plan: a ring of %llu blocks is too long",
                       (unsigned long long)length);
    }
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
static bool take_out_conflicts(gm_ring *ring, const gm_course *course)
{
    uint32_t n;
    bool has_changed = false;
    const gm_use *uses = uses_of(ring, course, &n);
    memset(ring->slots, 0xff, ring->length * sizeof *ring->slots);
    for (uint32_t i = 0; i < n; i++) {
        const gm_use *use = &uses[i];
        if (!ring->is_in[use->chunk]) {
            continue;
        }
        uint32_t offset = ring->plan->places[use->chunk * GM_N_PIECES + ring->piece].offset;
        uint32_t count = blocks_of(ring, use->chunk);
        for (uint32_t j = 0; j < count && ring->is_in[use->chunk]; j++) {
            gm_slot *slot = &ring->slots[(offset + j) % ring->length];
            if (slot->owner != UINT32_MAX && slot->owner != use->chunk &&
                slot->until > use->begin && ring->is_in[slot->owner]) {
                bool is_owner_longer = slot->until - slot->begin >= use->end - use->begin;
                ring->is_in[is_owner_longer ? slot->owner : use->chunk] = false;
                has_changed = true;
            }
            uint32_t until =
                slot->owner == use->chunk && slot->until > use->end ? slot->until : use->end;
            *slot = (gm_slot){use->chunk, use->begin, until};
        }
    }
    return has_changed;
}

static gm_status fit_ring(gm_ring *ring)
{
    for (bool is_done = false; !is_done;) {
        GM_TRY(set_length(ring));
        is_done = true;
        if (ring->piece == GM_STATE || ring->length == 0) {
            break; /* states are in use for one operation only */
        }
        gm_slot *slots = realloc(ring->slots, ring->length * sizeof *slots);
        if (!slots) {
            return GM_FAIL(GM_ERR_NOMEM, "host: no room for a ring of %u blocks", ring->length);
        }
        ring->slots = slots;
        for (uint32_t k = 0; k < ring->problem->n_courses; k++) {
            is_done &= !take_out_conflicts(ring, &ring->problem->courses[k]);
        }
    }
    return GM_OK;
}

/* Late updates in the order of forward, then the others in the order of gradients. */
static void state_order(const gm_problem *problem, const gm_choice *choice, uint32_t *out)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < problem->n; i++) {
        if (choice->is_late[problem->order[i]]) {
            out[n++] = problem->order[i];
        }
    }
    for (uint32_t i = 0; i < problem->n; i++) {
        if (!choice->is_late[problem->grad_order[i]]) {
            out[n++] = problem->grad_order[i];
        }
    }
}

static gm_status place_rings(const gm_choice *choice, gm_ring *ring, uint32_t *order)
{
    const gm_problem *problem = ring->problem;
    gm_plan *plan = ring->plan;
    uint64_t base = 0;
    state_order(problem, choice, order);
    for (uint32_t piece = 0; piece < GM_N_OWN_PIECES; piece++) {
        ring->piece = (gm_piece)piece;
        ring->depth = choice->depth[piece];
        ring->order = piece == GM_STATE  ? order
                      : piece == GM_GRAD ? problem->grad_order
                                         : problem->order;
        for (uint32_t c = 0; c < problem->n; c++) {
            const gm_plan_chunk *chunk = &problem->input->chunks[c];
            uint32_t cls = plan->class_of[c];
            ring->is_in[c] =
                chunk->blocks[piece] > 0 && chunk->bytes[piece] > 0 &&
                (piece == GM_WEIGHT  ? gm_is_streamed(cls)
                 : piece == GM_STATE ? gm_is_state_streamed(cls)
                                     : problem->n_passes > 0 && !choice->is_grad_resident[c]);
        }
        GM_TRY(fit_ring(ring));
        for (uint32_t c = 0; c < problem->n; c++) {
            if (ring->is_in[c]) {
                plan->places[c * GM_N_PIECES + piece].base = (uint32_t)base;
            } else {
                plan->places[c * GM_N_PIECES + piece] = (gm_place){0};
            }
            if (piece == GM_WEIGHT && !ring->is_in[c] && gm_is_streamed(plan->class_of[c]) &&
                problem->input->chunks[c].blocks[piece] > 0) { /* its weights became resident */
                bool is_frozen = problem->input->chunks[c].numel == 0;
                plan->class_of[c] = plan->class_of[c] == GM_CLASS_S2 ? GM_CLASS_S1
                                    : is_frozen                      ? GM_CLASS_R
                                                                     : GM_CLASS_C1;
            }
        }
        plan->ring[piece] = ring->length;
        base += ring->length;
    }
    plan->n_blocks = base > UINT32_MAX ? UINT32_MAX : (uint32_t)base;
    return GM_OK;
}

static bool is_resident(const gm_problem *problem, const gm_plan *plan, uint32_t c, uint32_t piece)
{
    uint32_t cls = plan->class_of[c];
    switch (piece) {
    case GM_WEIGHT: return !gm_is_streamed(cls);
    case GM_STATE: return cls == GM_CLASS_R;
    default: return problem->n_passes > 0;
    }
}

gm_status gm_plan_place_all(const gm_problem *problem, const gm_choice *choice, gm_plan *plan)
{
    uint32_t n_ticks = 0, n_uses = 0;
    for (uint32_t k = 0; k < problem->n_courses; k++) {
        const gm_course *course = &problem->courses[k];
        n_ticks = course->n > n_ticks ? course->n : n_ticks;
        n_uses = course->n_uses > n_uses ? course->n_uses : n_uses;
    }
    gm_ring ring = {.problem = problem,
                    .plan = plan,
                    .is_in = calloc(problem->n, sizeof(bool)),
                    .taken = calloc((size_t)n_ticks + 2, sizeof(uint64_t)),
                    .uses = calloc((size_t)n_uses + 1, sizeof(gm_use)),
                    .latest = calloc(problem->n, sizeof(uint32_t))};
    uint32_t *order = calloc(problem->n, sizeof *order);
    gm_status status = GM_OK;
    memcpy(plan->class_of, choice->class_of, plan->n);
    memcpy(plan->is_late, choice->is_late, plan->n * sizeof(bool));
    if (!ring.is_in || !ring.taken || !ring.uses || !ring.latest || !order) {
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
    free(ring.uses);
    free(ring.latest);
    free(ring.slots);
    free(order);
    return status;
}
