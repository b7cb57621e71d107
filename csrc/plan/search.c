/* search.c - looks for the choice with the least predicted step.
 *
 * A few dials (depths of the rings, the host's share of updates, the share of late ones) give a
 * choice (choice.c). They are turned one after the other as long as that helps; with few chunks,
 * single chunks then change class.
 *
 * 1. A choice that was found never takes more blocks than there are.
 * 2. A choice that comes back is not weighed again, but counts as a question: what is found does
 *    not depend on it.
 * 3. How often the time model may be asked depends on the size of the problem alone, so equal
 *    inputs give equal plans. */
#include <string.h>

#include "plan/asked.h"
#include "plan/choice.h"

#define FEW_CHUNKS 5u

enum { /* numbers of dials, behind those of the depths */
       DIAL_HOST = GM_N_PIECES,
       DIAL_LATE_HOST,
       DIAL_LATE_STATE,
       DIAL_STATES,
       DIAL_WEIGHTS,
       DIAL_FIRST,
       DIAL_KEPT,
       DIAL_SPECULATED
};

typedef struct gm_found { /* the best so far */
    gm_plan *plan;        /* NULL: nothing yet */
    gm_worth worth;
    gm_choice choice;
    gm_dials dials;
} gm_found;

typedef struct gm_search {
    const gm_problem *problem;
    gm_choice choice; /* that is being made */
    gm_found best;
    gm_asked asked;        /* about the choices of `problem` */
    uint32_t n_left;       /* questions to the time model */
    uint64_t n_weighed;    /* operations in those that were asked */
    bool has_all_weights;  /* as many weights are resident as fit: this dial is not turned */
    uint64_t least_blocks; /* that a choice would have taken, of all that were tried */
} gm_search;

/* Whether a is better than b: sooner, or equal with less traffic, or less of it over ranks, or with
 * fewer blocks. */
static bool is_better(const gm_worth *a, const gm_worth *b)
{
    double near = b->step_seconds * 1e-6;
    if (a->step_seconds < b->step_seconds - near) {
        return true;
    }
    if (a->step_seconds > b->step_seconds + near || a->traffic != b->traffic) {
        return a->step_seconds <= b->step_seconds + near && a->traffic < b->traffic;
    }
    double near_comm = b->comm_seconds * 1e-6;
    return a->comm_seconds < b->comm_seconds - near_comm ||
           (a->comm_seconds <= b->comm_seconds + near_comm && a->n_blocks < b->n_blocks);
}

/* Asks the time model about s->choice, unless it has been asked; keeps the choice when it is the
 * best. */
static gm_status ask(gm_search *s, bool *is_best)
{
    gm_plan *plan = NULL;
    const gm_worth *known;
    *is_best = false;
    s->n_left -= s->n_left > 0;
    GM_TRY(gm_asked_find(&s->asked, s->problem->n, &s->choice, &known));
    bool is_new = !known;
    gm_worth worth;
    if (is_new) {
        GM_TRY(gm_plan_for_choice(s->problem, &s->choice, &plan));
        worth = gm_worth_of(plan);
    } else {
        worth = *known;
    }
    s->n_weighed += worth.n_ops;
    *is_best = worth.has_plan && (!s->best.plan || is_better(&worth, &s->best.worth));
    gm_status status = is_new ? gm_asked_add(&s->asked, &worth) : GM_OK;
    if (status == GM_OK && *is_best && !plan) {
        status = gm_plan_for_choice(s->problem, &s->choice, &plan);
    }
    if (status != GM_OK || !*is_best) {
        gm_plan_free(plan);
        return status;
    }
    gm_plan_free(s->best.plan);
    s->best.plan = plan;
    s->best.worth = worth;
    gm_choice_copy(s->problem->n, &s->best.choice, &s->choice);
    return GM_OK;
}

static gm_status try_dials(gm_search *s, const gm_dials *dials, bool *is_best)
{
    bool fits = false;
    *is_best = false;
    if (s->n_left == 0 && s->best.plan) {
        return GM_OK;
    }
    GM_TRY(gm_choose(s->problem, dials, &s->choice, &s->least_blocks, &fits));
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
                              &dials->kept,   &dials->speculated};
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
        if (input->when == GM_DEFERRED && input->spare_bytes > 0) {
            GM_TRY(turn(s, DIAL_SPECULATED, shares, 6, &helps));
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
        choice->of[c].is_kept = !choice->of[c].is_kept;
        return !chunk->must_reside && chunk->bytes[GM_GATHERED] > 0 &&
               (!choice->of[c].is_kept || !gm_is_streamed(choice->of[c].class_of));
    }
    if (move == GM_N_CLASSES) {
        choice->of[c].is_grad_resident = !choice->of[c].is_grad_resident;
        return chunk->bytes[GM_GRAD] > 0 && !chunk->stays;
    }
    if (move > GM_N_CLASSES) {
        choice->of[c].is_late = !choice->of[c].is_late;
        return gm_may_be_early(problem, c) && problem->is_trained[c] &&
               choice->of[c].class_of != GM_CLASS_R;
    }
    bool is_bad = (gm_is_streamed(move) && (chunk->must_reside || choice->of[c].is_kept)) ||
                  (!problem->is_trained[c] && gm_is_state_streamed(move)) ||
                  (problem->input->is_opaque && problem->is_trained[c] && gm_is_on_host(move)) ||
                  (chunk->numel == 0 && move != GM_CLASS_R && move != GM_CLASS_C2) ||
                  (chunk->stays && move != GM_CLASS_R) || choice->of[c].class_of == move;
    choice->of[c].class_of = (uint8_t)move;
    choice->of[c].is_late &= move != GM_CLASS_R || !gm_may_be_early(problem, c);
    return !is_bad;
}

/* Two chunks exchange how they are treated. */
static bool exchange(gm_search *s, uint32_t a, uint32_t b)
{
    const gm_problem *problem = s->problem;
    gm_choice *choice = &s->choice;
    uint8_t class_a = choice->of[a].class_of, class_b = choice->of[b].class_of;
    bool is_late_a = choice->of[a].is_late, is_grad_a = choice->of[a].is_grad_resident;
    if (class_a == class_b || !move_chunk(s, a, class_b) || !move_chunk(s, b, class_a)) {
        return false;
    }
    choice->of[a].is_late = choice->of[b].is_late || !gm_may_be_early(problem, a);
    choice->of[b].is_late = is_late_a || !gm_may_be_early(problem, b);
    choice->of[a].is_late &= problem->is_trained[a];
    choice->of[b].is_late &= problem->is_trained[b];
    choice->of[a].is_grad_resident = choice->of[b].is_grad_resident;
    choice->of[b].is_grad_resident = is_grad_a;
    return true;
}

/* Chunks change class, gradient or time of update, alone or in pairs, and rings their depth, as
 * long as that helps. */
static gm_status climb(gm_search *s, uint32_t limit)
{
    uint32_t n = s->problem->n, n_moves = GM_N_CLASSES + 2 + s->problem->has_gathered;
    bool has_ranks = s->problem->has_gathered || s->problem->has_unreduced;
    uint32_t n_depths = 2 * (has_ranks ? GM_N_PIECES : GM_N_OWN_PIECES);
    uint32_t n_all = n * n_moves + n_depths + n * n, n_quiet = 0;
    for (uint32_t at = 0; n_quiet < n_all && limit > 0; at = at + 1 == n_all ? 0 : at + 1) {
        bool is_allowed, is_best = false;
        gm_choice_copy(n, &s->choice, &s->best.choice);
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
    GM_TRY(gm_choice_new(s->problem->n, &fresh));
    *aside = s->best;
    s->best = (gm_found){.choice = fresh};
    return GM_OK;
}

static void unite(gm_search *s, gm_found *aside)
{
    bool is_aside_better =
        !s->best.plan || (aside->plan && !is_better(&s->best.worth, &aside->worth));
    if (is_aside_better) {
        gm_found worse = s->best;
        s->best = *aside;
        *aside = worse;
    }
    gm_plan_free(aside->plan);
    gm_choice_free(&aside->choice);
}

/* Asks about every assignment of classes, with short rings. */
static gm_status ask_about_all(gm_search *s, bool is_late, bool is_kept)
{
    uint32_t n = s->problem->n, n_all = 1;
    for (uint32_t c = 0; c < n; c++) {
        n_all *= GM_N_CLASSES;
    }
    memcpy(s->choice.depth, (uint32_t[GM_N_PIECES]){1, 2, 1, 1, 1}, sizeof s->choice.depth);
    s->choice.speculated = 1;
    for (uint32_t code = 0; code < n_all; code++) {
        bool is_allowed = true, is_best;
        for (uint32_t c = 0, rest = code; c < n; c++, rest /= GM_N_CLASSES) {
            s->choice.of[c].class_of = GM_N_CLASSES;
            s->choice.of[c].is_grad_resident = s->problem->input->chunks[c].stays;
            s->choice.of[c].is_late = true;
            s->choice.of[c].is_kept = s->problem->input->chunks[c].bytes[GM_GATHERED] > 0 &&
                                      (is_kept || s->problem->input->chunks[c].must_reside);
            is_allowed &= move_chunk(s, c, rest % GM_N_CLASSES);
            s->choice.of[c].is_late =
                s->problem->is_trained[c] && (!gm_may_be_early(s->problem, c) ||
                                              (is_late && s->choice.of[c].class_of != GM_CLASS_R));
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
    size_t needed = (size_t)s->least_blocks * input->block_bytes;
    return GM_FAIL(
        GM_ERR_NOMEM, "DEVICE: the %s needs %s (%zu bytes) for blocks, %s available; %s",
        input->policy == GM_POLICY_CUDA  ? "policy 'cuda', everything on the device,"
        : input->policy == GM_POLICY_CPU ? "policy 'cpu'"
                                         : "smallest plan",
        gm_wanted(needed).text, needed, gm_there(input->device_bytes).text,
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

/* The corners: everything streamed with one chunk of prefetch (or none), or everything on the
 * device.  What only several ranks have is chosen: how far ahead they gather and reduce. */
static gm_status run_fixed(gm_search *s)
{
    static const uint32_t ahead[][2] = {{3, 2}, {2, 1}, {1, 1}, {0, 0}};
    bool is_cpu = s->problem->input->policy == GM_POLICY_CPU, is_best, helps = false;
    bool has_ranks = s->problem->has_gathered || s->problem->has_unreduced;
    uint32_t n = has_ranks ? 4 : 2;
    s->n_left = n_questions(s->problem) < 24 ? n_questions(s->problem) : 24;
    for (uint32_t i = 0; i < n && !s->best.plan; i++) {
        uint32_t own = i + 1 < n;
        gm_dials dials = {.depth = {own, s->problem->input->is_opaque ? 2 * own : 0, 2 * own},
                          .host = 1,
                          .weights = is_cpu ? 0 : 1,
                          .speculated = own > 0 || !s->problem->input->is_opaque,
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
        /* What an opaque update speculates keeps weights on the device for longer. */
        dials.speculated = i < 4 || !s->problem->input->is_opaque;
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

/* Budgets from below up to what there is, so that what a smaller one can do is known to the
 * larger. */
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

/* Everything on the device, if there is room: nothing can then be in the way of compute, whatever
 * the time model thinks of updates that the host would do meanwhile. */
static gm_status search_all_resident(gm_search *s, const gm_problem *problem)
{
    gm_plan_input input = *problem->input;
    gm_problem all = *problem;
    input.policy = GM_POLICY_CUDA;
    all.input = &input;
    s->problem = &all;
    gm_status status = run_fixed(s);
    s->problem = problem;
    gm_asked_clear(&s->asked);
    return status;
}

/* Whether shards are all resident, but gathers still hold up compute: memory may be better spent on
 * fewer gathers. */
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
    gm_status status = gm_choice_new(problem->n, &s.choice);
    if (status == GM_OK) {
        status = gm_choice_new(problem->n, &s.best.choice);
    }
    if (status == GM_OK) {
        status = problem->input->policy == GM_POLICY_AUTO ? search_auto(&s) : run_fixed(&s);
    }
    gm_choice_free(&s.choice);
    gm_choice_free(&s.best.choice);
    gm_asked_clear(&s.asked);
    GM_TRY_ELSE(status, gm_plan_free(s.best.plan));
    s.best.plan->info.n_weighed = s.n_weighed;
    *out = s.best.plan;
    return GM_OK;
}
