/* choice.c - gives memory to chunks: weights first, then gradients that would have to go out and
 * come back, then states.  With several ranks these are of shards; a dial says how many gathered
 * weights are kept before all that, and what is left after it keeps more.
 *
 * 1. A choice that fits takes no more blocks than the dials allow. */
#include "plan/choice.h"

#include <stdlib.h>
#include <string.h>

gm_status gm_choice_new(uint32_t n, gm_choice *out)
{
    *out = (gm_choice){.of = calloc(n, sizeof *out->of)};
    return out->of ? GM_OK : GM_FAIL(GM_ERR_NOMEM, "host: no room to plan %u chunks", n);
}

void gm_choice_free(gm_choice *choice)
{
    free(choice->of);
}

void gm_choice_copy(uint32_t n, gm_choice *to, const gm_choice *from)
{
    memcpy(to->of, from->of, n * sizeof *to->of);
    memcpy(to->depth, from->depth, sizeof to->depth);
    to->speculated = from->speculated;
}

/* Picks members evenly: whether the next of `weight` belongs to the share, with the error carried
 * along. */
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

typedef struct gm_filling { /* a choice that is being made */
    const gm_problem *problem;
    const gm_dials *dials;
    gm_choice *choice;
    gm_plan *plan; /* scratch: the choice's places */
    gm_room room;
    uint64_t *least_blocks;
} gm_filling;

static void choose_classes(const gm_filling *f)
{
    const gm_problem *problem = f->problem;
    const gm_room *room = &f->room;
    gm_choice *choice = f->choice;
    double host_carry = 0, weight_carry = 0, kept_carry = 0;
    uint64_t states_left = room->states;
    bool is_all_cuda = problem->input->policy == GM_POLICY_CUDA, is_full = false;
    for (uint32_t i = 0; i < problem->n; i++) {
        uint32_t c = problem->order[i];
        const gm_plan_chunk *chunk = &problem->input->chunks[c];
        choice->of[c].is_kept = chunk->bytes[GM_GATHERED] > 0 &&
                                (chunk->must_reside || room->kept >= 1 ||
                                 pick(&kept_carry, chunk->blocks[GM_GATHERED], room->kept));
        bool has_to = is_all_cuda || chunk->stays; /* all of it be resident */
        bool is_resident = chunk->must_reside || has_to || chunk->blocks[GM_WEIGHT] == 0 ||
                           room->weights >= 1 || choice->of[c].is_kept ||
                           pick(&weight_carry, chunk->blocks[GM_WEIGHT], room->weights);
        bool is_frozen = chunk->numel == 0;
        /* Without states there is nothing to be given, but weights that are resident anyhow. */
        bool has_states = chunk->blocks[GM_STATE] > 0;
        bool is_fitting =
            has_to ||
            (problem->is_trained[c] &&
             (has_states ? !is_full && chunk->blocks[GM_STATE] <= states_left : is_resident));
        is_full |= !is_frozen && !is_fitting && has_states;
        gm_class cls;
        if (is_frozen) {
            cls = is_resident ? GM_CLASS_R : GM_CLASS_C2;
        } else if (is_fitting) {
            states_left -= has_to ? 0 : chunk->blocks[GM_STATE];
            cls = GM_CLASS_R;
        } else if (!problem->is_trained[c] ||
                   (!problem->input->is_opaque &&
                    (f->dials->depth[GM_STATE] == 0 ||
                     pick(&host_carry, (double)chunk->numel, f->dials->host)))) {
            cls = is_resident ? GM_CLASS_C1 : GM_CLASS_C2;
        } else {
            cls = is_resident ? GM_CLASS_S1 : GM_CLASS_S2;
        }
        choice->of[c].class_of = (uint8_t)cls;
    }
}

bool gm_may_be_early(const gm_problem *problem, uint32_t c)
{
    for (uint32_t k = 0; k < problem->n_courses; k++) {
        const gm_course *course = &problem->courses[k];
        if (course->grad[c] != GM_NO_TICK && course->ready[c] >= course->n) {
            return false;
        }
    }
    return problem->input->when == GM_IMMEDIATE;
}

static void choose_late(const gm_filling *f)
{
    const gm_problem *problem = f->problem;
    gm_choice *choice = f->choice;
    double host_carry = 0, state_carry = 0;
    for (uint32_t i = 0; i < problem->n; i++) {
        uint32_t c = problem->order[i];
        double numel = (double)problem->input->chunks[c].numel;
        bool is_late = !gm_may_be_early(problem, c);
        if (!is_late && gm_is_on_host(choice->of[c].class_of)) {
            is_late = pick(&host_carry, numel, f->dials->late_host);
        } else if (!is_late && gm_is_state_streamed(choice->of[c].class_of)) {
            is_late = pick(&state_carry, numel, f->dials->late_state);
        }
        choice->of[c].is_late = is_late && problem->is_trained[c];
    }
}

/* Whether a resident gradient saves copies; one that stays is there anyhow. */
static bool wants_grad(const gm_filling *f, uint32_t c)
{
    const gm_problem *problem = f->problem;
    const gm_choice *choice = f->choice;
    return problem->input->chunks[c].bytes[GM_GRAD] > 0 && !problem->input->chunks[c].stays &&
           (problem->n_passes > 1 ||
            (choice->of[c].is_late && !gm_is_on_host(choice->of[c].class_of)));
}

/* Makes the choice that the room gives, and finds out what it takes: plan->n_blocks. */
static gm_status choose(gm_filling *f)
{
    const gm_problem *problem = f->problem;
    bool is_all = problem->input->policy == GM_POLICY_CUDA;
    uint64_t left = f->room.grads;
    memcpy(f->choice->depth, f->dials->depth, sizeof f->choice->depth);
    f->choice->speculated = f->dials->speculated;
    choose_classes(f);
    choose_late(f);
    for (uint32_t i = 0; i < problem->n; i++) {
        uint32_t c = problem->order[i], blocks = problem->input->chunks[c].blocks[GM_GRAD];
        bool has_to = is_all || problem->input->chunks[c].stays;
        bool is_in = has_to || (wants_grad(f, c) && blocks <= left);
        f->choice->of[c].is_grad_resident = is_in;
        left -= is_in && !has_to ? blocks : 0;
    }
    GM_TRY(gm_plan_place_all(problem, f->choice, f->plan));
    *f->least_blocks = f->plan->n_blocks < *f->least_blocks ? f->plan->n_blocks : *f->least_blocks;
    return GM_OK;
}

/* Blocks of the states of the first chunks in use: their gradients come last and their weights are
 * needed first, so no time is left to update them elsewhere. */
static uint64_t first_states(const gm_problem *problem, const gm_dials *dials)
{
    /* A share of the rest for states leaves none ahead of the weights. */
    uint64_t blocks = 0, n = problem->input->state_share >= 1 ? (uint64_t)dials->first : 0;
    for (uint32_t i = 0; i < problem->n && n > 0; i++) {
        uint32_t c = problem->order[i];
        if (problem->is_trained[c] && !problem->input->chunks[c].stays) {
            blocks += problem->input->chunks[c].blocks[GM_STATE];
            n--;
        }
    }
    return blocks;
}

/* Gives what is left beside the weights to gradients that would move, then to states. */
static gm_status fill_states(gm_filling *f)
{
    const gm_problem *problem = f->problem;
    uint64_t blocks = f->dials->blocks, taken = f->plan->n_blocks;
    uint64_t left = blocks - taken, spare = problem->n_blocks - taken;
    double share = problem->input->state_share;
    uint64_t limit = share >= 1 ? UINT64_MAX : (uint64_t)(share * (double)spare);
    uint64_t first = first_states(problem, f->dials);
    gm_room best = f->room;
    for (int round = 0; round < 4; round++) {
        uint64_t wanted = 0, most = left < limit ? left : limit;
        for (uint32_t c = 0; c < problem->n; c++) {
            wanted += wants_grad(f, c) ? problem->input->chunks[c].blocks[GM_GRAD] : 0;
        }
        f->room.grads = wanted < most ? wanted : most;
        f->room.states = first + (uint64_t)((double)(most - f->room.grads) * f->dials->states);
        GM_TRY(choose(f));
        taken = f->plan->n_blocks;
        if (taken <= blocks) { /* rings have become shorter: there may be more */
            best = f->room;
            left += blocks - taken;
        } else {
            left -= taken - blocks < left ? taken - blocks : left;
        }
    }
    f->room = best;
    return choose(f);
}

/* As many resident weights as there is room for. */
static gm_status fill_weights(gm_filling *f)
{
    uint64_t weights = 1, blocks = f->dials->blocks;
    for (uint32_t c = 0; c < f->problem->n; c++) {
        const gm_plan_chunk *chunk = &f->problem->input->chunks[c];
        weights += chunk->stays ? 0 : chunk->blocks[GM_WEIGHT];
    }
    GM_TRY(choose(f));
    double best = 0, most = f->room.weights, *now = &f->room.weights;
    if (f->plan->n_blocks <= blocks || most <= 0) {
        return GM_OK;
    }
    *now = 0;
    for (int round = 0; round < 5; round++) {
        GM_TRY(choose(f));
        uint64_t taken = f->plan->n_blocks;
        if (taken <= blocks && *now > best) {
            best = *now;
        } else if (taken > blocks && round == 0) {
            return GM_OK; /* not even without */
        }
        *now += ((double)blocks - (double)taken) / (double)weights;
        *now = *now < 0 ? 0 : *now > most ? most : *now;
    }
    *now = best;
    return choose(f);
}

/* What the weights have left keeps gathered weights; if that was too much, because states took
 * some, less of them. */
static gm_status fill_kept(gm_filling *f, uint64_t left)
{
    uint64_t whole = 0, least = UINT64_MAX, ring = f->plan->ring[GM_GATHERED];
    for (uint32_t c = 0; c < f->problem->n; c++) {
        uint64_t blocks = f->problem->input->chunks[c].blocks[GM_GATHERED];
        whole += blocks;
        least = blocks > 0 && blocks < least ? blocks : least;
    }
    left += ring; /* not needed when all are kept */
    if (left < least + ring && left < whole) {
        return GM_OK;
    }
    double best = f->room.kept, *now = &f->room.kept;
    double part = 1 / (double)f->problem->n; /* at least a chunk less, where it was too much */
    *now += (double)left / (double)whole;
    for (int round = 0; round < 5 && best < 1; round++) {
        *now = *now < best ? best : *now > 1 ? 1 : *now;
        GM_TRY(choose(f));
        double spare = (double)f->dials->blocks - (double)f->plan->n_blocks;
        bool fits = spare >= 0;
        best = fits && *now > best ? *now : best;
        *now += spare / (double)whole - (fits ? 0 : part);
    }
    *now = best;
    return choose(f);
}

gm_status gm_choose(const gm_problem *problem, const gm_dials *dials, gm_choice *choice,
                    uint64_t *least_blocks, bool *fits)
{
    bool is_auto = problem->input->policy == GM_POLICY_AUTO;
    gm_filling f = {.problem = problem,
                    .dials = dials,
                    .choice = choice,
                    .room = {.weights = dials->weights,
                             .kept = dials->kept,
                             .states = is_auto ? first_states(problem, dials) : 0},
                    .least_blocks = least_blocks};
    GM_TRY(gm_plan_alloc(problem, &f.plan));
    gm_status status = fill_weights(&f);
    uint64_t left = (uint64_t)dials->blocks - f.plan->n_blocks;
    if (status == GM_OK && f.plan->n_blocks <= dials->blocks && is_auto) {
        status = fill_states(&f);
    }
    if (status == GM_OK && f.plan->n_blocks <= dials->blocks && problem->has_gathered &&
        problem->input->policy != GM_POLICY_CPU) {
        status = fill_kept(&f, left);
    }
    *fits = status == GM_OK && f.plan->n_blocks <= dials->blocks;
    gm_plan_free(f.plan);
    return status;
}

gm_status gm_plan_for_choice(const gm_problem *problem, const gm_choice *choice, gm_plan **out)
{
    gm_plan *plan;
    *out = NULL;
    GM_TRY(gm_plan_alloc(problem, &plan));
    gm_status status = gm_plan_place_all(problem, choice, plan);
    if (status != GM_OK || plan->n_blocks > problem->n_blocks) {
        gm_plan_free(plan);
        return status;
    }
    for (uint32_t k = 0; k < problem->n_courses && status == GM_OK; k++) {
        status = gm_schedule_new(problem, plan, &problem->courses[k], &plan->schedules[k]);
        plan->n_schedules += status == GM_OK;
    }
    if (status == GM_OK) {
        status = gm_plan_time(problem, plan);
    }
    GM_TRY_ELSE(status, gm_plan_free(plan));
    *out = plan;
    return GM_OK;
}
