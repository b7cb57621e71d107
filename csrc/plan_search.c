/* plan_search.c - looks for the choice with the least predicted step.
 *
 * A few dials (depths of the rings, the host's share of updates, the share of late ones) and the memory there is
 * give a choice: weights first, then gradients that would have to go out and come back, then states.  The dials are
 * turned one after the other as long as that helps; with few chunks, single chunks then change class.  How often the
 * time model may be asked depends on the size of the problem alone, so equal inputs give equal plans.
 *
 * 1. A choice that was found never takes more blocks than there are. */
#include <stdlib.h>
#include <string.h>

#include "plan_impl.h"

#define FEW_CHUNKS 24u

typedef struct gm_dials {
    uint32_t depth[GM_N_PIECES]; /* of the rings, in chunks */
    double host;                 /* share of the updates that are not resident, by parameters */
    double late_host,
        late_state; /* immediate only: shares of these updates put off to the next forward */
    double states;  /* share of the room beside weights and gradients that states may take */
} gm_dials;

typedef struct gm_search {
    const gm_problem *problem;
    gm_choice choice;
    gm_plan *best;
    gm_choice best_choice;
    gm_dials best_dials;
    uint32_t n_left;       /* questions to the time model */
    uint64_t least_blocks; /* of all choices that were tried and did not fit */
} gm_search;

static gm_status choice_new(uint32_t n, gm_choice *out)
{
    *out = (gm_choice){.class_of = calloc(n, 1),
                       .is_late = calloc(n, sizeof(bool)),
                       .is_grad_resident = calloc(n, sizeof(bool))};
    if (!out->class_of || !out->is_late || !out->is_grad_resident) {
        return GM_FAIL(GM_ERR_NOMEM, "host: no room to plan %u chunks", n);
    }
    return GM_OK;
}

static void choice_free(gm_choice *choice)
{
    free(choice->class_of);
    free(choice->is_late);
    free(choice->is_grad_resident);
}

static void choice_copy(uint32_t n, gm_choice *to, const gm_choice *from)
{
    memcpy(to->class_of, from->class_of, n);
    memcpy(to->is_late, from->is_late, n * sizeof(bool));
    memcpy(to->is_grad_resident, from->is_grad_resident, n * sizeof(bool));
    memcpy(to->depth, from->depth, sizeof to->depth);
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
    if (status != GM_OK) {
        gm_plan_free(plan);
        return status;
    }
    *out = plan;
    return GM_OK;
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
    uint64_t grads, states;
} gm_room;

static bool needs_update(const gm_problem *problem, uint32_t c)
{
    return problem->is_trained[c];
}

static void choose_classes(const gm_search *s, const gm_dials *dials, const gm_room *room,
                           gm_choice *choice)
{
    const gm_problem *problem = s->problem;
    double host_carry = 0, weight_carry = 0;
    uint64_t states_left = room->states;
    bool is_all_cuda = problem->input->policy == GM_POLICY_CUDA, is_full = false;
    for (uint32_t i = 0; i < problem->n; i++) {
        uint32_t c = problem->order[i];
        const gm_plan_chunk *chunk = &problem->input->chunks[c];
        bool is_resident = chunk->must_reside || is_all_cuda || chunk->blocks[GM_WEIGHT] == 0 ||
                           room->weights >= 1 ||
                           pick(&weight_carry, chunk->blocks[GM_WEIGHT], room->weights);
        bool is_frozen = chunk->numel == 0;
        bool is_fitting = is_all_cuda || (!is_full && needs_update(problem, c) &&
                                          chunk->blocks[GM_STATE] <= states_left);
        is_full |= !is_frozen && !is_fitting;
        gm_class cls;
        if (is_frozen) {
            cls = is_resident ? GM_CLASS_R : GM_CLASS_C2;
        } else if (is_fitting) {
            states_left -= is_all_cuda ? 0 : chunk->blocks[GM_STATE];
            cls = GM_CLASS_R;
        } else if (!needs_update(problem, c) || dials->depth[GM_STATE] == 0 ||
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

static uint64_t all_weights(const gm_problem *problem)
{
    uint64_t sum = 0;
    for (uint32_t c = 0; c < problem->n; c++) {
        sum += problem->input->chunks[c].blocks[GM_WEIGHT];
    }
    return sum;
}

/* Gives what is left beside all weights to gradients, then to states. */
static gm_status fill_states(gm_search *s, const gm_dials *dials, gm_plan *plan, uint64_t taken)
{
    const gm_problem *problem = s->problem;
    uint64_t room_beside =
        problem->n_blocks > all_weights(problem) ? problem->n_blocks - all_weights(problem) : 0;
    uint64_t limit = (uint64_t)((double)room_beside * problem->input->state_share);
    uint64_t left = problem->n_blocks - taken;
    left = left < limit ? left : limit;
    gm_room room = {.weights = 1};
    for (int round = 0; round < 4; round++) {
        uint64_t wanted = 0;
        choose(s, dials, &room, &s->choice);
        for (uint32_t c = 0; c < problem->n; c++) {
            wanted +=
                wants_grad(problem, &s->choice, c) ? problem->input->chunks[c].blocks[GM_GRAD] : 0;
        }
        room.grads = wanted < left ? wanted : left;
        room.states = (uint64_t)((double)(left - room.grads) * dials->states);
        choose(s, dials, &room, &s->choice);
        GM_TRY(measure(s, plan, &taken));
        if (taken <= problem->n_blocks && problem->n_blocks - taken <= problem->n_blocks / 64) {
            return GM_OK;
        }
        uint64_t more = left + problem->n_blocks - taken; /* modulo 2^64 when it is less */
        if (taken > problem->n_blocks && taken - problem->n_blocks > left) {
            more = 0;
        }
        if (round == 3 && taken > problem->n_blocks) {
            more = 0;
        }
        left = more < limit ? more : limit;
    }
    room.grads = room.grads < left ? room.grads : left;
    room.states = room.states < left - room.grads ? room.states : left - room.grads;
    choose(s, dials, &room, &s->choice);
    return measure(s, plan, &taken);
}

/* Makes the choice that the dials and the memory give; *fits tells whether there is one. */
static gm_status fill(gm_search *s, const gm_dials *dials, bool *fits)
{
    const gm_problem *problem = s->problem;
    gm_plan *plan;
    uint64_t taken = 0;
    gm_room room = {.weights = problem->input->policy == GM_POLICY_CPU ? 0 : 1};
    GM_TRY(gm_plan_alloc(problem, &plan));
    choose(s, dials, &room, &s->choice);
    gm_status status = measure(s, plan, &taken);
    bool is_fixed = problem->input->policy != GM_POLICY_AUTO;
    if (status == GM_OK && taken <= problem->n_blocks && !is_fixed) {
        status = fill_states(s, dials, plan, taken);
    } else if (status == GM_OK && !is_fixed) {
        uint64_t weights = all_weights(problem);
        room.weights = 0;
        choose(s, dials, &room, &s->choice);
        status = measure(s, plan, &taken);
        if (status == GM_OK && taken < problem->n_blocks) {
            gm_room best = room;
            for (int round = 0; round < 5 && status == GM_OK; round++) {
                double more = ((double)problem->n_blocks - (double)taken) / (double)(weights + 1);
                room.weights += more;
                room.weights = room.weights > 0 ? room.weights : 0;
                choose(s, dials, &room, &s->choice);
                status = measure(s, plan, &taken);
                if (taken <= problem->n_blocks && room.weights > best.weights) {
                    best = room;
                }
            }
            if (status == GM_OK) {
                choose(s, dials, &best, &s->choice);
                status = measure(s, plan, &taken);
            }
        }
    }
    *fits = status == GM_OK && plan->n_blocks <= problem->n_blocks;
    gm_plan_free(plan);
    return status;
}

/* Whether a is better than b: sooner, or equal with less traffic. */
static bool is_better(const gm_plan *a, const gm_plan *b)
{
    double near = b->info.step_seconds * 1e-6;
    if (a->info.step_seconds < b->info.step_seconds - near) {
        return true;
    }
    return a->info.step_seconds <= b->info.step_seconds + near &&
           a->info.h2d_bytes + a->info.d2h_bytes < b->info.h2d_bytes + b->info.d2h_bytes;
}

/* Asks the time model about s->choice; keeps it when it is the best. */
static gm_status ask(gm_search *s, bool *is_best)
{
    gm_plan *plan;
    *is_best = false;
    s->n_left -= s->n_left > 0;
    GM_TRY(gm_plan_for_choice(s->problem, &s->choice, &plan));
    if (plan && (!s->best || is_better(plan, s->best))) {
        gm_plan_free(s->best);
        s->best = plan;
        choice_copy(s->problem->n, &s->best_choice, &s->choice);
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
    if (s->n_left == 0 && s->best) {
        return GM_OK;
    }
    GM_TRY(fill(s, dials, &fits));
    if (fits) {
        GM_TRY(ask(s, is_best));
        if (*is_best) {
            s->best_dials = *dials;
        }
    }
    return GM_OK;
}

/* Turns one dial through values, around the best dials so far. */
static gm_status turn(gm_search *s, uint32_t which, const double *values, uint32_t n, bool *helps)
{
    gm_dials start = s->best_dials;
    for (uint32_t i = 0; i < n; i++) {
        gm_dials dials = start;
        bool is_best;
        switch (which) {
        case 0: dials.host = values[i]; break;
        case 1: dials.depth[GM_STATE] = (uint32_t)values[i]; break;
        case 2: dials.depth[GM_GRAD] = (uint32_t)values[i]; break;
        case 3: dials.depth[GM_WEIGHT] = (uint32_t)values[i]; break;
        case 4: dials.late_host = values[i]; break;
        case 5: dials.late_state = values[i]; break;
        default: dials.states = values[i]; break;
        }
        if (memcmp(&dials, &start, sizeof dials) != 0) {
            GM_TRY(try_dials(s, &dials, &is_best));
            *helps |= is_best;
        }
    }
    return GM_OK;
}

static gm_status turn_dials(gm_search *s)
{
    static const double shares[] = {0, 0.2, 0.4, 0.6, 0.8, 1}, depths[] = {1, 2, 3, 4, 6, 8};
    static const double parts[] = {0.5, 0, 1, 0.25, 0.75};
    const gm_plan_input *input = s->problem->input;
    double step = 0.1;
    for (int round = 0; round < 6 && s->n_left > 0; round++) {
        bool helps = false;
        double host = s->best_dials.host;
        double near[] = {host - step, host + step, host - step / 2, host + step / 2};
        for (int i = 0; i < 4; i++) {
            near[i] = near[i] < 0 ? 0 : near[i] > 1 ? 1 : near[i];
        }
        GM_TRY(round == 0 ? turn(s, 0, shares, 6, &helps) : turn(s, 0, near, 4, &helps));
        if (input->when == GM_IMMEDIATE) {
            GM_TRY(turn(s, 4, parts, 5, &helps));
            GM_TRY(turn(s, 5, parts, 5, &helps));
        }
        GM_TRY(turn(s, 1, depths + 1, 5, &helps));
        GM_TRY(turn(s, 2, depths, 5, &helps));
        if (s->best->ring[GM_WEIGHT] > 0) {
            GM_TRY(turn(s, 3, depths, 6, &helps));
        }
        GM_TRY(turn(s, 6, parts, 2, &helps));
        step = helps ? step : step / 2;
        if (!helps && step < 0.01) {
            break;
        }
    }
    return GM_OK;
}

/* Single chunks change class, gradient or time of update, as long as one of them helps. */
static gm_status turn_chunks(gm_search *s)
{
    const gm_problem *problem = s->problem;
    for (bool helps = true; helps && s->n_left > 0;) {
        helps = false;
        for (uint32_t c = 0; c < problem->n && s->n_left > 0; c++) {
            const gm_plan_chunk *chunk = &problem->input->chunks[c];
            for (uint32_t move = 0; move < GM_N_CLASSES + 2; move++) {
                choice_copy(problem->n, &s->choice, &s->best_choice);
                if (move < GM_N_CLASSES) {
                    bool is_bad = (gm_is_streamed(move) && chunk->must_reside) ||
                                  (!problem->is_trained[c] && gm_is_state_streamed(move)) ||
                                  (chunk->numel == 0 && move != GM_CLASS_R && move != GM_CLASS_C2);
                    if (is_bad || s->choice.class_of[c] == move) {
                        continue;
                    }
                    s->choice.class_of[c] = (uint8_t)move;
                    s->choice.is_late[c] &=
                        move != GM_CLASS_R || problem->input->when == GM_DEFERRED;
                } else if (move == GM_N_CLASSES) {
                    s->choice.is_grad_resident[c] = !s->choice.is_grad_resident[c];
                } else {
                    s->choice.is_late[c] = !s->choice.is_late[c];
                    if (!may_be_early(problem, c) || !problem->is_trained[c] ||
                        s->choice.class_of[c] == GM_CLASS_R) {
                        continue;
                    }
                }
                bool is_best;
                GM_TRY(ask(s, &is_best));
                helps |= is_best;
            }
        }
    }
    return GM_OK;
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
    double n = 4e6 / (size + blocks);
    return n < 10 ? 10 : n > 600 ? 600 : (uint32_t)n;
}

static gm_status run_search(gm_search *s)
{
    const gm_plan_input *input = s->problem->input;
    bool is_best;
    gm_dials dials = {.depth = {1, 0, 2}, .host = 1, .states = 1};
    if (input->policy != GM_POLICY_AUTO) {
        for (uint32_t depth = 0; depth < 2 && !s->best; depth++) { /* with prefetch, else without */
            dials.depth[GM_WEIGHT] = 1 - depth;
            dials.depth[GM_GRAD] = 2 - 2 * depth;
            GM_TRY(try_dials(s, &dials, &is_best));
        }
        return s->best ? GM_OK : fail_for_room(s);
    }
    static const gm_dials starts[] = {
        {.depth = {2, 3, 3}, .host = 0.5, .states = 1, .late_host = 0.5},
        {.depth = {2, 2, 2}, .host = 0.8, .states = 1},
        {.depth = {2, 0, 3}, .host = 1, .states = 1},
        {.depth = {1, 0, 1}, .host = 1, .states = 1},
        {.depth = {0, 0, 0}, .host = 1, .states = 1},
    };
    for (size_t i = 0; i < sizeof starts / sizeof *starts; i++) {
        bool is_needed = i < 2 || !s->best;
        GM_TRY(is_needed ? try_dials(s, &starts[i], &is_best) : GM_OK);
    }
    if (!s->best) {
        return fail_for_room(s);
    }
    GM_TRY(turn_dials(s));
    return s->problem->n <= FEW_CHUNKS ? turn_chunks(s) : GM_OK;
}

gm_status gm_plan_search(const gm_problem *problem, gm_plan **out)
{
    gm_search s = {.problem = problem, .least_blocks = UINT64_MAX, .n_left = n_questions(problem)};
    gm_status status = choice_new(problem->n, &s.choice);
    if (status == GM_OK) {
        status = choice_new(problem->n, &s.best_choice);
    }
    if (status == GM_OK) {
        status = run_search(&s);
    }
    choice_free(&s.choice);
    choice_free(&s.best_choice);
    if (status != GM_OK) {
        gm_plan_free(s.best);
        return status;
    }
    *out = s.best;
    return GM_OK;
}
