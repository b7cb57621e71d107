/* plan_search.c - looks for the choice with the least predicted step.
 *
 * A few dials (depths of the rings, the host's share of updates, the share of late ones) and the memory there is
 * give a choice: weights first, then gradients that would have to go out and come back, then states.  With several
 * ranks these are of shards; a dial says how many gathered weights are kept before all that, and what is left after it
 * keeps more.  The dials are turned one after the other as long as that helps; with few chunks, single chunks then change class.  How often the
 * time model may be asked depends on the size of the problem alone, so equal inputs give equal plans.
 *
 * 1. A choice that was found never takes more blocks than there are.
 *
 * Above the length budget because the dials, their moves and what they are asked are one search. */
#include <stdlib.h>
#include <string.h>

#include "plan_impl.h"

#define FEW_CHUNKS 5u

typedef struct gm_dials {        /* without padding: compared as bytes */
    uint32_t depth[GM_N_PIECES]; /* of the rings, in chunks */
    uint32_t blocks;             /* that may be taken */
    double host;                 /* share of the updates that are not resident, by parameters */
    double late_host,
        late_state; /* immediate only: shares of these updates put off to the next forward */
    double weights; /* most that may be resident, a share */
    double states;  /* share of the room beside weights and gradients that states may take */
    double
        first; /* so many chunks, the first in use, have room for their states before any weights have */
    double kept; /* share of the gathered weights that are kept whatever the rest gets */
} gm_dials;

enum { /* numbers of dials, behind those of the depths */
       DIAL_HOST = GM_N_PIECES,
       DIAL_LATE_HOST,
       DIAL_LATE_STATE,
       DIAL_STATES,
       DIAL_WEIGHTS,
       DIAL_FIRST,
       DIAL_KEPT
};

typedef struct gm_found { /* the best so far */
    gm_plan *plan;        /* NULL: nothing yet */
    gm_choice choice;
    gm_dials dials;
} gm_found;

typedef struct gm_search {
    const gm_problem *problem;
    gm_choice choice; /* that is being made */
    gm_found best;
    uint32_t n_left;       /* questions to the time model */
    bool has_all_weights;  /* as many weights are resident as fit: this dial is not turned */
    uint64_t least_blocks; /* of all choices that were tried and did not fit */
} gm_search;

static gm_status choice_new(uint32_t n, gm_choice *out)
{
    *out = (gm_choice){.class_of = calloc(n, 1),
                       .is_late = calloc(n, sizeof(bool)),
                       .is_grad_resident = calloc(n, sizeof(bool)),
                       .is_kept = calloc(n, sizeof(bool))};
    if (!out->class_of || !out->is_late || !out->is_grad_resident || !out->is_kept) {
        return GM_FAIL(GM_ERR_NOMEM, "host: no room to plan %u chunks", n);
    }
    return GM_OK;
}

static void choice_free(gm_choice *choice)
{
    free(choice->class_of);
    free(choice->is_late);
    free(choice->is_grad_resident);
    free(choice->is_kept);
}

static void choice_copy(uint32_t n, gm_choice *to, const gm_choice *from)
{
    memcpy(to->class_of, from->class_of, n);
    memcpy(to->is_late, from->is_late, n * sizeof(bool));
    memcpy(to->is_grad_resident, from->is_grad_resident, n * sizeof(bool));
    memcpy(to->is_kept, from->is_kept, n * sizeof(bool));
    memcpy(to->depth, from->depth, sizeof to->depth);
}

/* Picks members evenly: whether the next of `weight` belongs to the share, with the error carried along. */
static bool pick(double *carry, double weight, double share)
{
    *carry += weight * share;
    if (*carry < weight / 2 || share <= 0) {
        return false;
    }
    *carry -= weight;
    return true;
}

typedef struct gm_room { /* blocks that a choice may give away */
    double weights;      /* share of weights that are resident */
    double kept;         /* share of gathered weights that are kept */
    uint64_t grads, states;
} gm_room;

static void choose_classes(const gm_search *s, const gm_dials *dials, const gm_room *room,
                           gm_choice *choice)
{
    const gm_problem *problem = s->problem;
    double host_carry = 0, weight_carry = 0, kept_carry = 0;
    uint64_t states_left = room->states;
    bool is_all_cuda = problem->input->policy == GM_POLICY_CUDA, is_full = false;
    for (uint32_t i = 0; i < problem->n; i++) {
        uint32_t c = problem->order[i];
        const gm_plan_chunk *chunk = &problem->input->chunks[c];
        choice->is_kept[c] = chunk->bytes[GM_GATHERED] > 0 &&
                             (chunk->must_reside || room->kept >= 1 ||
                              pick(&kept_carry, chunk->blocks[GM_GATHERED], room->kept));
        bool is_resident = chunk->must_reside || is_all_cuda || chunk->blocks[GM_WEIGHT] == 0 ||
                           room->weights >= 1 || choice->is_kept[c] ||
                           pick(&weight_carry, chunk->blocks[GM_WEIGHT], room->weights);
        bool is_frozen = chunk->numel == 0;
        bool is_fitting = is_all_cuda || (!is_full && problem->is_trained[c] &&
                                          chunk->blocks[GM_STATE] <= states_left);
        is_full |= !is_frozen && !is_fitting;
        gm_class cls;
        if (is_frozen) {
            cls = is_resident ? GM_CLASS_R : GM_CLASS_C2;
        } else if (is_fitting) {
            states_left -= is_all_cuda ? 0 : chunk->blocks[GM_STATE];
            cls = GM_CLASS_R;
        } else if (!problem->is_trained[c] || dials->depth[GM_STATE] == 0 ||
                   pick(&host_carry, (double)chunk->numel, dials->host)) {
            cls = is_resident ? GM_CLASS_C1 : GM_CLASS_C2;
        } else {
            cls = is_resident ? GM_CLASS_S1 : GM_CLASS_S2;
        }
        choice->class_of[c] = (uint8_t)cls;
    }
}

/* Whether the update can be at the gradient's tick: nothing of the pass uses the weights after it. */
static bool may_be_early(const gm_problem *problem, uint32_t c)
{
    for (uint32_t k = 0; k < problem->n_courses; k++) {
        const gm_course *course = &problem->courses[k];
        if (course->grad[c] != GM_NO_TICK && course->settle[c] >= course->n) {
            return false;
        }
    }
    return problem->input->when == GM_IMMEDIATE;
}

static void choose_late(const gm_search *s, const gm_dials *dials, gm_choice *choice)
{
    const gm_problem *problem = s->problem;
    double host_carry = 0, state_carry = 0;
    for (uint32_t i = 0; i < problem->n; i++) {
        uint32_t c = problem->order[i];
        double numel = (double)problem->input->chunks[c].numel;
        bool is_late = !may_be_early(problem, c);
        if (!is_late && gm_is_on_host(choice->class_of[c])) {
            is_late = pick(&host_carry, numel, dials->late_host);
        } else if (!is_late && gm_is_state_streamed(choice->class_of[c])) {
            is_late = pick(&state_carry, numel, dials->late_state);
        }
        choice->is_late[c] = is_late && problem->is_trained[c];
    }
}

/* Whether a resident gradient saves copies. */
static bool wants_grad(const gm_problem *problem, const gm_choice *choice, uint32_t c)
{
    return problem->input->chunks[c].bytes[GM_GRAD] > 0 &&
           (problem->n_passes > 1 || (choice->is_late[c] && !gm_is_on_host(choice->class_of[c])));
}

static void choose(const gm_search *s, const gm_dials *dials, const gm_room *room,
                   gm_choice *choice)
{
    const gm_problem *problem = s->problem;
    uint64_t left = room->grads;
    memcpy(choice->depth, dials->depth, sizeof choice->depth);
    choose_classes(s, dials, room, choice);
    choose_late(s, dials, choice);
    for (uint32_t i = 0; i < problem->n; i++) {
        uint32_t c = problem->order[i], blocks = problem->input->chunks[c].blocks[GM_GRAD];
        bool is_all = problem->input->policy == GM_POLICY_CUDA;
        bool is_in = is_all || (wants_grad(problem, choice, c) && blocks <= left);
        choice->is_grad_resident[c] = is_in;
        left -= is_in && !is_all ? blocks : 0;
    }
}

/* Blocks that a choice takes. */
static gm_status measure(gm_search *s, gm_plan *plan, uint64_t *out)
{
    GM_TRY(gm_plan_place_all(s->problem, &s->choice, plan));
    *out = plan->n_blocks;
    s->least_blocks = *out < s->least_blocks ? *out : s->least_blocks;
    return GM_OK;
}

/* Blocks of the states of the first chunks in use: their gradients come last and their weights are needed first, so
 * no time is left to update them elsewhere. */
static uint64_t first_states(const gm_problem *problem, const gm_dials *dials)
{
    /* A share of the rest for states leaves none ahead of the weights. */
    uint64_t blocks = 0, n = problem->input->state_share >= 1 ? (uint64_t)dials->first : 0;
    for (uint32_t i = 0; i < problem->n && n > 0; i++) {
        uint32_t c = problem->order[i];
        if (problem->is_trained[c]) {
            blocks += problem->input->chunks[c].blocks[GM_STATE];
            n--;
        }
    }
    return blocks;
}

/* Gives what is left beside the weights to gradients that would move, then to states. */
static gm_status fill_states(gm_search *s, const gm_dials *dials, gm_plan *plan, gm_room *room,
                             uint64_t taken)
{
    const gm_problem *problem = s->problem;
    uint64_t left = dials->blocks - taken, spare = problem->n_blocks - taken;
    double share = problem->input->state_share;
    uint64_t limit = share >= 1 ? UINT64_MAX : (uint64_t)(share * (double)spare);
    uint64_t first = first_states(problem, dials);
    gm_room best = *room;
    for (int round = 0; round < 4; round++) {
        uint64_t wanted = 0, most = left < limit ? left : limit;
        for (uint32_t c = 0; c < problem->n; c++) {
            wanted +=
                wants_grad(problem, &s->choice, c) ? problem->input->chunks[c].blocks[GM_GRAD] : 0;
        }
        room->grads = wanted < most ? wanted : most;
        room->states = first + (uint64_t)((double)(most - room->grads) * dials->states);
        choose(s, dials, room, &s->choice);
        GM_TRY(measure(s, plan, &taken));
        if (taken <= dials->blocks) { /* rings have become shorter: there may be more */
            best = *room;
            left += dials->blocks - taken;
        } else {
            left -= taken - dials->blocks < left ? taken - dials->blocks : left;
        }
    }
    *room = best;
    choose(s, dials, room, &s->choice);
    return measure(s, plan, &taken);
}

/* As many resident weights as there is room for. */
static gm_status fill_weights(gm_search *s, const gm_dials *dials, gm_plan *plan, gm_room *room,
                              uint64_t *taken)
{
    uint64_t weights = 1;
    for (uint32_t c = 0; c < s->problem->n; c++) {
        weights += s->problem->input->chunks[c].blocks[GM_WEIGHT];
    }
    choose(s, dials, room, &s->choice);
    GM_TRY(measure(s, plan, taken));
    if (*taken <= dials->blocks || room->weights <= 0) {
        return GM_OK;
    }
    double best = 0, most = room->weights;
    room->weights = 0;
    for (int round = 0; round < 5; round++) {
        choose(s, dials, room, &s->choice);
        GM_TRY(measure(s, plan, taken));
        if (*taken <= dials->blocks && room->weights > best) {
            best = room->weights;
        } else if (*taken > dials->blocks && round == 0) {
            return GM_OK; /* not even without */
        }
        room->weights += ((double)dials->blocks - (double)*taken) / (double)weights;
        room->weights = room->weights < 0 ? 0 : room->weights > most ? most : room->weights;
    }
    room->weights = best;
    choose(s, dials, room, &s->choice);
    return measure(s, plan, taken);
}

/* What is left keeps gathered weights. */
static gm_status fill_kept(gm_search *s, const gm_dials *dials, gm_plan *plan, gm_room *room,
                           uint64_t *taken)
{
    uint64_t whole = 0, least = UINT64_MAX, left = dials->blocks - *taken;
    double best = room->kept;
    for (uint32_t c = 0; c < s->problem->n; c++) {
        uint64_t blocks = s->problem->input->chunks[c].blocks[GM_GATHERED];
        whole += blocks;
        least = blocks > 0 && blocks < least ? blocks : least;
    }
    left += plan->ring[GM_GATHERED]; /* not needed when all are kept */
    if (left < least + plan->ring[GM_GATHERED] && left < whole) {
        return GM_OK;
    }
    double part = 1 / (double)s->problem->n; /* at least a chunk less, where it was too much */
    room->kept += (double)left / (double)whole;
    for (int round = 0; round < 5 && best < 1; round++) {
        room->kept = room->kept < best ? best : room->kept > 1 ? 1 : room->kept;
        choose(s, dials, room, &s->choice);
        GM_TRY(measure(s, plan, taken));
        bool fits = *taken <= dials->blocks;
        best = fits && room->kept > best ? room->kept : best;
        room->kept += ((double)dials->blocks - (double)*taken) / (double)whole - (fits ? 0 : part);
    }
    room->kept = best;
    choose(s, dials, room, &s->choice);
    return measure(s, plan, taken);
}

/* Makes the choice that the dials and the memory give; *fits tells whether there is one. */
static gm_status fill(gm_search *s, const gm_dials *dials, bool *fits)
{
    gm_plan *plan;
    uint64_t taken = 0;
    bool is_auto = s->problem->input->policy == GM_POLICY_AUTO;
    gm_room room = {.weights = dials->weights,
                    .kept = dials->kept,
                    .states = is_auto ? first_states(s->problem, dials) : 0};
    GM_TRY(gm_plan_alloc(s->problem, &plan));
    gm_status status = fill_weights(s, dials, plan, &room, &taken);
    if (status == GM_OK && taken <= dials->blocks && is_auto) {
        status = fill_states(s, dials, plan, &room, taken);
    }
    if (status == GM_OK && plan->n_blocks <= dials->blocks && s->problem->has_gathered &&
        s->problem->input->policy != GM_POLICY_CPU) {
        status = fill_kept(s, dials, plan, &room, &taken);
    }
    *fits = status == GM_OK && plan->n_blocks <= dials->blocks;
    gm_plan_free(plan);
    return status;
}

/* Whether a is better than b: sooner, or equal with less traffic, or less of it over ranks, or with fewer blocks. */
static bool is_better(const gm_plan *a, const gm_plan *b)
{
    double near = b->info.step_seconds * 1e-6;
    size_t traffic_a = a->info.h2d_bytes + a->info.d2h_bytes;
    size_t traffic_b = b->info.h2d_bytes + b->info.d2h_bytes;
    if (a->info.step_seconds < b->info.step_seconds - near) {
        return true;
    }
    if (a->info.step_seconds > b->info.step_seconds + near || traffic_a != traffic_b) {
        return a->info.step_seconds <= b->info.step_seconds + near && traffic_a < traffic_b;
    }
    double near_comm = b->info.comm_seconds * 1e-6;
    return a->info.comm_seconds < b->info.comm_seconds - near_comm ||
           (a->info.comm_seconds <= b->info.comm_seconds + near_comm && a->n_blocks < b->n_blocks);
}

/* Asks the time model about s->choice; keeps it when it is the best. */
static gm_status ask(gm_search *s, bool *is_best)
{
    gm_plan *plan;
    *is_best = false;
    s->n_left -= s->n_left > 0;
    GM_TRY(gm_plan_for_choice(s->problem, &s->choice, &plan));
    if (plan && (!s->best.plan || is_better(plan, s->best.plan))) {
        gm_plan_free(s->best.plan);
        s->best.plan = plan;
        choice_copy(s->problem->n, &s->best.choice, &s->choice);
        *is_best = true;
    } else {
        gm_plan_free(plan);
    }
    return GM_OK;
}

static gm_status try_dials(gm_search *s, const gm_dials *dials, bool *is_best)
{
    bool fits = false;
    *is_best = false;
    if (s->n_left == 0 && s->best.plan) {
        return GM_OK;
    }
    GM_TRY(fill(s, dials, &fits));
    if (fits) {
        GM_TRY(ask(s, is_best));
        if (*is_best) {
            s->best.dials = *dials;
        }
    }
    return GM_OK;
}

/* The share that a dial beyond the depths is. */
static double *share_at(gm_dials *dials, uint32_t which)
{
    double *const shares[] = {&dials->host,   &dials->late_host, &dials->late_state,
                              &dials->states, &dials->weights,   &dials->first,
                              &dials->kept};
    return shares[which - DIAL_HOST];
}

/* Turns one dial through values, around the best dials so far. */
static gm_status turn(gm_search *s, uint32_t which, const double *values, uint32_t n, bool *helps)
{
    gm_dials start = s->best.dials;
    for (uint32_t i = 0; i < n; i++) {
        gm_dials dials = start;
        bool is_best;
        if (which < GM_N_PIECES) {
            dials.depth[which] = (uint32_t)values[i];
        } else {
            *share_at(&dials, which) = values[i];
        }
        if (memcmp(&dials, &start, sizeof dials) != 0) {
            GM_TRY(try_dials(s, &dials, &is_best));
            *helps |= is_best;
        }
    }
    return GM_OK;
}

/* The dials of what only several ranks have. */
static gm_status turn_ranks(gm_search *s, int round, bool *helps)
{
    static const double parts[] = {0, 0.25, 0.5, 0.75, 1}, depths[] = {1, 2, 3, 4, 6, 8};
    double kept = s->best.dials.kept, near[] = {kept - 0.1, kept + 0.1};
    near[0] = near[0] < 0 ? 0 : near[0];
    near[1] = near[1] > 1 ? 1 : near[1];
    if (s->problem->has_gathered && s->best.plan->ring[GM_GATHERED] > 0) {
        GM_TRY(turn(s, GM_GATHERED, depths + 1, 5, helps)); /* one ahead is for want of room */
        if (s->problem->input->policy == GM_POLICY_AUTO) {
            GM_TRY(round == 0 ? turn(s, DIAL_KEPT, parts, 5, helps)
                              : turn(s, DIAL_KEPT, near, 2, helps));
        }
    }
    return s->problem->has_unreduced ? turn(s, GM_UNREDUCED, depths, 4, helps) : GM_OK;
}

static gm_status turn_dials(gm_search *s, int n_rounds)
{
    static const double shares[] = {0, 0.2, 0.4, 0.6, 0.8, 1}, depths[] = {1, 2, 3, 4, 6, 8};
    static const double parts[] = {0.5, 0, 1, 0.25, 0.75}, firsts[] = {1, 0, 2, 4, 8, 16};
    const gm_plan_input *input = s->problem->input;
    double step = 0.1;
    for (int round = 0; round < n_rounds && s->n_left > 0; round++) {
        bool helps = false;
        double host = s->best.dials.host;
        double near[] = {host - step, host + step, host - step / 2, host + step / 2};
        for (int i = 0; i < 4; i++) {
            near[i] = near[i] < 0 ? 0 : near[i] > 1 ? 1 : near[i];
        }
        GM_TRY(round == 0 ? turn(s, DIAL_HOST, shares, 6, &helps)
                          : turn(s, DIAL_HOST, near, 4, &helps));
        if (input->state_share >= 1) {
            GM_TRY(turn(s, DIAL_FIRST, firsts, 6, &helps));
        }
        if (input->when == GM_IMMEDIATE) {
            GM_TRY(turn(s, DIAL_LATE_HOST, parts, 5, &helps));
            GM_TRY(turn(s, DIAL_LATE_STATE, parts, 5, &helps));
        }
        GM_TRY(turn_ranks(s, round, &helps));
        GM_TRY(turn(s, GM_STATE, depths + 1, 5, &helps));
        GM_TRY(turn(s, GM_GRAD, depths, 5, &helps));
        if (s->best.plan->ring[GM_WEIGHT] > 0) {
            GM_TRY(turn(s, GM_WEIGHT, depths, 6, &helps));
        }
        GM_TRY(s->has_all_weights ? GM_OK : turn(s, DIAL_WEIGHTS, parts, 5, &helps));
        GM_TRY(turn(s, DIAL_STATES, parts, 2, &helps));
        step = helps ? step : step / 2;
        if (!helps && step < 0.01) {
            break;
        }
    }
    return GM_OK;
}

static uint32_t draw(uint64_t *state, uint32_t bound)
{
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)((*state >> 33) % bound);
}

/* Turns one to three dials at once, drawn from a sequence that is always the same. */
static gm_status wander(gm_search *s, uint32_t n_questions_here)
{
    static const uint32_t all[] = {GM_WEIGHT,      GM_STATE,        GM_GRAD,     DIAL_HOST,
                                   DIAL_LATE_HOST, DIAL_LATE_STATE, DIAL_STATES, GM_UNREDUCED,
                                   GM_GATHERED,    DIAL_KEPT};
    uint32_t n_dials = s->problem->has_gathered ? 10 : s->problem->has_unreduced ? 8 : 7;
    uint64_t state = 1;
    s->n_left = n_questions_here;
    for (uint32_t i = 0; i < 2 * n_questions_here && s->n_left > 0; i++) {
        gm_dials dials = s->best.dials;
        bool is_best;
        for (uint32_t n = 1 + draw(&state, 3); n > 0; n--) {
            uint32_t which = all[draw(&state, n_dials)];
            if (which < GM_N_PIECES) {
                dials.depth[which] = 1 + draw(&state, which == GM_STATE ? 6 : 10);
                dials.depth[which] += which == GM_GATHERED;
            } else if (which == DIAL_STATES) {
                dials.first = draw(&state, 10);
            } else {
                double *share = share_at(&dials, which);
                *share += ((double)draw(&state, 11) - 5) / 50;
                *share = *share < 0 ? 0 : *share > 1 ? 1 : *share;
            }
        }
        GM_TRY(try_dials(s, &dials, &is_best));
    }
    return GM_OK;
}

/* Whether the choice may be changed so; changes it. */
static bool move_chunk(gm_search *s, uint32_t c, uint32_t move)
{
    const gm_problem *problem = s->problem;
    const gm_plan_chunk *chunk = &problem->input->chunks[c];
    gm_choice *choice = &s->choice;
    if (move == GM_N_CLASSES + 2) {
        choice->is_kept[c] = !choice->is_kept[c];
        return !chunk->must_reside && chunk->bytes[GM_GATHERED] > 0 &&
               (!choice->is_kept[c] || !gm_is_streamed(choice->class_of[c]));
    }
    if (move == GM_N_CLASSES) {
        choice->is_grad_resident[c] = !choice->is_grad_resident[c];
        return chunk->bytes[GM_GRAD] > 0;
    }
    if (move > GM_N_CLASSES) {
        choice->is_late[c] = !choice->is_late[c];
        return may_be_early(problem, c) && problem->is_trained[c] &&
               choice->class_of[c] != GM_CLASS_R;
    }
    bool is_bad = (gm_is_streamed(move) && (chunk->must_reside || choice->is_kept[c])) ||
                  (!problem->is_trained[c] && gm_is_state_streamed(move)) ||
                  (chunk->numel == 0 && move != GM_CLASS_R && move != GM_CLASS_C2) ||
                  choice->class_of[c] == move;
    choice->class_of[c] = (uint8_t)move;
    choice->is_late[c] &= move != GM_CLASS_R || !may_be_early(problem, c);
    return !is_bad;
}

/* Two chunks exchange how they are treated. */
static bool exchange(gm_search *s, uint32_t a, uint32_t b)
{
    const gm_problem *problem = s->problem;
    gm_choice *choice = &s->choice;
    uint8_t class_a = choice->class_of[a], class_b = choice->class_of[b];
    bool is_late_a = choice->is_late[a], is_grad_a = choice->is_grad_resident[a];
    if (class_a == class_b || !move_chunk(s, a, class_b) || !move_chunk(s, b, class_a)) {
        return false;
    }
    choice->is_late[a] = choice->is_late[b] || !may_be_early(problem, a);
    choice->is_late[b] = is_late_a || !may_be_early(problem, b);
    choice->is_late[a] &= problem->is_trained[a];
    choice->is_late[b] &= problem->is_trained[b];
    choice->is_grad_resident[a] = choice->is_grad_resident[b];
    choice->is_grad_resident[b] = is_grad_a;
    return true;
}

/* Chunks change class, gradient or time of update, alone or in pairs, and rings their depth, as long as that helps. */
static gm_status climb(gm_search *s, uint32_t limit)
{
    uint32_t n = s->problem->n, n_moves = GM_N_CLASSES + 2 + s->problem->has_gathered;
    bool has_ranks = s->problem->has_gathered || s->problem->has_unreduced;
    uint32_t n_depths = 2 * (has_ranks ? GM_N_PIECES : GM_N_OWN_PIECES);
    uint32_t n_all = n * n_moves + n_depths + n * n, n_quiet = 0;
    for (uint32_t at = 0; n_quiet < n_all && limit > 0; at = at + 1 == n_all ? 0 : at + 1) {
        bool is_allowed, is_best = false;
        choice_copy(n, &s->choice, &s->best.choice);
        if (at < n * n_moves) {
            is_allowed = move_chunk(s, at / n_moves, at % n_moves);
        } else if (at < n * n_moves + n_depths) {
            uint32_t piece = (at - n * n_moves) / 2, up = (at - n * n_moves) % 2;
            is_allowed = up || s->choice.depth[piece] > 0;
            s->choice.depth[piece] += up ? 1 : UINT32_MAX;
        } else {
            uint32_t pair = at - n * n_moves - n_depths;
            is_allowed = pair / n < pair % n && exchange(s, pair / n, pair % n);
        }
        if (is_allowed) {
            limit--;
            GM_TRY(ask(s, &is_best));
        }
        n_quiet = is_best ? 0 : n_quiet + 1;
    }
    return GM_OK;
}

/* Puts what was found aside, to search again from nothing; unite takes the better of both. */
static gm_status set_aside(gm_search *s, gm_found *aside)
{
    gm_choice fresh;
    GM_TRY(choice_new(s->problem->n, &fresh));
    *aside = s->best;
    s->best = (gm_found){.choice = fresh};
    return GM_OK;
}

static void unite(gm_search *s, gm_found *aside)
{
    bool is_aside_better = !s->best.plan || (aside->plan && !is_better(s->best.plan, aside->plan));
    if (is_aside_better) {
        gm_found worse = s->best;
        s->best = *aside;
        *aside = worse;
    }
    gm_plan_free(aside->plan);
    choice_free(&aside->choice);
}

/* Asks about every assignment of classes, with short rings. */
static gm_status ask_about_all(gm_search *s, bool is_late, bool is_kept)
{
    uint32_t n = s->problem->n, n_all = 1;
    for (uint32_t c = 0; c < n; c++) {
        n_all *= GM_N_CLASSES;
    }
    memcpy(s->choice.depth, (uint32_t[GM_N_PIECES]){1, 2, 1, 1, 1}, sizeof s->choice.depth);
    for (uint32_t code = 0; code < n_all; code++) {
        bool is_allowed = true, is_best;
        for (uint32_t c = 0, rest = code; c < n; c++, rest /= GM_N_CLASSES) {
            s->choice.class_of[c] = GM_N_CLASSES;
            s->choice.is_grad_resident[c] = false;
            s->choice.is_late[c] = true;
            s->choice.is_kept[c] = s->problem->input->chunks[c].bytes[GM_GATHERED] > 0 &&
                                   (is_kept || s->problem->input->chunks[c].must_reside);
            is_allowed &= move_chunk(s, c, rest % GM_N_CLASSES);
            s->choice.is_late[c] =
                s->problem->is_trained[c] &&
                (!may_be_early(s->problem, c) || (is_late && s->choice.class_of[c] != GM_CLASS_R));
        }
        GM_TRY(is_allowed ? ask(s, &is_best) : GM_OK);
    }
    return GM_OK;
}

/* With few chunks: climbs from what the dials gave, and from the best of all assignments. */
static gm_status climb_from_all(gm_search *s, uint32_t limit)
{
    gm_found aside;
    GM_TRY(climb(s, limit));
    GM_TRY(set_aside(s, &aside));
    gm_status status = GM_OK;
    for (uint32_t i = 0; i < 4 && status == GM_OK; i++) {
        bool is_late = i % 2, is_kept = i / 2;
        if ((!is_late || s->problem->input->when == GM_IMMEDIATE) &&
            (!is_kept || s->problem->has_gathered)) {
            status = ask_about_all(s, is_late, is_kept);
        }
    }
    if (status == GM_OK && s->best.plan) {
        status = climb(s, limit);
    }
    unite(s, &aside);
    return status;
}

static gm_status fail_for_room(const gm_search *s)
{
    const gm_plan_input *input = s->problem->input;
    double gib = 1.0 / (1024.0 * 1024.0 * 1024.0);
    size_t needed = (size_t)s->least_blocks * input->block_bytes;
    return GM_FAIL(
        GM_ERR_NOMEM,
        "device: the %s needs %zu bytes (%.2f GiB) for blocks, %zu (%.2f GiB) are available; %s",
        input->policy == GM_POLICY_CUDA  ? "policy 'cuda', everything on the device,"
        : input->policy == GM_POLICY_CPU ? "policy 'cpu'"
                                         : "smallest plan",
        needed, (double)needed * gib, input->device_bytes, (double)input->device_bytes * gib,
        input->policy == GM_POLICY_CUDA
            ? "use placement_policy='auto' or raise the budget"
            : "raise the budget, or use smaller chunks, a smaller batch or checkpointing");
}

static uint32_t n_questions(const gm_problem *problem)
{
    double size = 10.0 * problem->n, blocks = 0;
    for (uint32_t k = 0; k < problem->n_courses; k++) {
        const gm_course *course = &problem->courses[k];
        double passes = course->n_runs > 3 ? 3 : course->n_runs;
        size += (double)course->n * (1 + 3 * passes) + 4.0 * course->n_uses;
    }
    for (uint32_t c = 0; c < problem->n; c++) {
        blocks += problem->input->chunks[c].blocks[GM_STATE];
    }
    size *= problem->has_gathered ? 1.6 : 1;
    double n = 3.5e6 / (size + blocks);
    double least = problem->has_gathered ? 4 : 7; /* there a question is half as dear again */
    return (uint32_t)(n < least ? least : n > 600 ? 600 : n);
}

/* The corners: everything streamed with one chunk of prefetch (or none), or everything on the device.  What only several
 * ranks have is chosen: how far ahead they gather and reduce. */
static gm_status run_fixed(gm_search *s)
{
    static const uint32_t ahead[][2] = {{3, 2}, {2, 1}, {1, 1}, {0, 0}};
    bool is_cpu = s->problem->input->policy == GM_POLICY_CPU, is_best, helps = false;
    bool has_ranks = s->problem->has_gathered || s->problem->has_unreduced;
    uint32_t n = has_ranks ? 4 : 2;
    s->n_left = n_questions(s->problem) < 24 ? n_questions(s->problem) : 24;
    for (uint32_t i = 0; i < n && !s->best.plan; i++) {
        uint32_t own = i + 1 < n;
        gm_dials dials = {.depth = {own, 0, 2 * own},
                          .host = 1,
                          .weights = is_cpu ? 0 : 1,
                          .blocks = s->problem->n_blocks};
        dials.depth[GM_GATHERED] = s->problem->has_gathered ? ahead[i][0] : 0;
        dials.depth[GM_UNREDUCED] = s->problem->has_unreduced ? ahead[i][1] : 0;
        GM_TRY(try_dials(s, &dials, &is_best));
    }
    if (s->best.plan && has_ranks) {
        GM_TRY(turn_ranks(s, 0, &helps));
    }
    return s->best.plan ? GM_OK : fail_for_room(s);
}

/* Searches with at most `blocks` from where a search with fewer has ended. */
static gm_status run_level(gm_search *s, uint32_t blocks, uint32_t n_questions_here, int n_rounds)
{
    static const gm_dials starts[] = {
        {.depth = {2, 3, 3}, .host = 0.5, .states = 1, .late_host = 0.5, .weights = 1},
        {.depth = {2, 2, 2}, .host = 0.8, .states = 1, .weights = 1},
        {.depth = {8, 3, 10},
         .host = 0.75,
         .states = 0.5,
         .late_host = 0.2,
         .weights = 1,
         .first = 4},
        {.depth = {4, 3, 8}, .host = 0.65, .states = 1, .late_host = 0.2, .weights = 1, .first = 1},
        {.depth = {2, 0, 3}, .host = 1, .states = 1, .weights = 1},
        {.depth = {1, 0, 1}, .host = 1, .states = 1, .weights = 1},
        {.depth = {0, 0, 0}, .host = 1, .states = 1, .weights = 1},
    };
    bool is_best, has_best = s->best.plan != NULL;
    s->n_left = n_questions_here;
    if (has_best) {
        gm_dials dials = s->best.dials;
        dials.blocks = blocks;
        GM_TRY(try_dials(s, &dials, &is_best));
    }
    for (size_t i = 0; i < sizeof starts / sizeof *starts; i++) {
        static const uint32_t gathered[] = {2, 2, 4, 3, 2, 1, 0},
                              unreduced[] = {1, 1, 2, 2, 1, 1, 0};
        gm_dials dials = starts[i];
        dials.blocks = blocks;
        dials.depth[GM_GATHERED] = s->problem->has_gathered ? gathered[i] : 0;
        dials.depth[GM_UNREDUCED] = s->problem->has_unreduced ? unreduced[i] : 0;
        GM_TRY(i < 4 || !s->best.plan ? try_dials(s, &dials, &is_best) : GM_OK);
    }
    if (s->best.plan) {
        s->best.dials.blocks = blocks;
        GM_TRY(turn_dials(s, n_rounds));
    }
    return GM_OK;
}

/* Budgets from below up to what there is, so that what a smaller one can do is known to the larger. */
static gm_status run_search(gm_search *s)
{
    uint64_t whole = 0;
    uint32_t n_here = s->problem->has_gathered ? 56 : 40;
    uint32_t n = n_questions(s->problem), n_levels = n / n_here;
    n_levels = n_levels > 16 ? 16 : n_levels;
    for (uint32_t c = 0; c < s->problem->n; c++) {
        for (uint32_t piece = 0; piece < GM_N_PIECES; piece++) {
            whole += s->problem->input->chunks[c].blocks[piece];
        }
    }
    for (uint32_t level = 1; level < n_levels; level++) {
        uint64_t blocks = whole * level / n_levels;
        if (blocks < s->problem->n_blocks) {
            GM_TRY(run_level(s, (uint32_t)blocks, n_here, 1));
        }
    }
    uint32_t part = n_levels > 0 ? 2 * n / 3 : n;
    GM_TRY(run_level(s, s->problem->n_blocks, part, 4));
    if (n_levels > 0) { /* and from nothing: the smaller ones may have led into a corner */
        gm_found aside;
        GM_TRY(set_aside(s, &aside));
        s->has_all_weights = true;
        gm_status status = run_level(s, s->problem->n_blocks, part + s->n_left, 6);
        s->has_all_weights = false;
        unite(s, &aside);
        GM_TRY(status);
        GM_TRY(s->best.plan ? wander(s, part + s->n_left) : GM_OK);
    }
    if (!s->best.plan) {
        return fail_for_room(s);
    }
    return s->problem->n <= FEW_CHUNKS ? climb_from_all(s, n) : GM_OK;
}

/* Everything on the device, if there is room: nothing can then be in the way of compute, whatever the time model
 * thinks of updates that the host would do meanwhile. */
static gm_status search_all_resident(gm_search *s, const gm_problem *problem)
{
    gm_plan_input input = *problem->input;
    gm_problem all = *problem;
    input.policy = GM_POLICY_CUDA;
    all.input = &input;
    s->problem = &all;
    gm_status status = run_fixed(s);
    s->problem = problem;
    return status;
}

/* Whether shards are all resident, but gathers still hold up compute: memory may be better spent on fewer gathers. */
static bool is_held_up(const gm_search *s)
{
    const gm_plan_info *info = &s->best.plan->info;
    return s->best.plan->ring[GM_GATHERED] > 0 && info->step_seconds > 1.03 * info->compute_seconds;
}

static gm_status search_auto(gm_search *s)
{
    uint64_t own = 0; /* of all shards */
    for (uint32_t c = 0; c < s->problem->n; c++) {
        for (uint32_t piece = 0; piece < GM_N_OWN_PIECES; piece++) {
            own += s->problem->input->chunks[c].blocks[piece];
        }
    }
    bool has_grads = s->problem->n_passes > 0; /* without passes no gradient has a place */
    if (s->problem->input->state_share >= 1 && (own <= s->problem->n_blocks || !has_grads)) {
        gm_status status = search_all_resident(s, s->problem);
        if (status != GM_ERR_NOMEM && (status != GM_OK || !is_held_up(s))) {
            return status;
        }
    }
    return run_search(s);
}

gm_status gm_plan_search(const gm_problem *problem, gm_plan **out)
{
    gm_search s = {.problem = problem, .least_blocks = UINT64_MAX};
    gm_status status = choice_new(problem->n, &s.choice);
    if (status == GM_OK) {
        status = choice_new(problem->n, &s.best.choice);
    }
    if (status == GM_OK) {
        status = problem->input->policy == GM_POLICY_AUTO ? search_auto(&s) : run_fixed(&s);
    }
    choice_free(&s.choice);
    choice_free(&s.best.choice);
    if (status != GM_OK) {
        gm_plan_free(s.best.plan);
        return status;
    }
    *out = s.best.plan;
    return GM_OK;
}
