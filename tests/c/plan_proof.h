/* plan_proof.h - what the tests of plans prove alike for one rank and for several: what every plan keeps, that the
 * checker can fail, and how good plans are. */
#pragma once

#include "plan/plan.h"
#include "plan/plan_impl.h"
#include "plan_model.h"

/* Operations that a search may ask the time model about: some 0.6 us each, and twice what the largest model here takes. */
#define MOST_WEIGHED 1500000ULL

/* How many random cases a test takes.  Nearly all the time goes into searches, each of which asks for hundreds of plans:
 * a quarter of the cases leads a sanitizer, which needs six times as long for each, through the same code.  What only
 * many cases prove is proven without one (make test), where all are taken. */
static inline uint32_t cases(uint32_t n)
{
#ifdef __SANITIZE_ADDRESS__
    return (n + 3) / 4;
#else
    return n;
#endif
}

/* How many finds there must be among them: of few cases fewer, as they scatter more. */
static inline uint32_t finds(uint32_t n)
{
#ifdef __SANITIZE_ADDRESS__
    return n / 8;
#else
    return n;
#endif
}

/* ---- what every plan keeps ---- */

/* What a caller may want beside a budget. */
static inline void random_wishes(model *m, uint64_t *seed)
{
    m->input.policy = (gm_policy)(below(seed, 6) < 4 ? 0 : below(seed, 3));
    m->input.state_share = below(seed, 3) ? 1 : 0.01 * (double)below(seed, 100);
    m->input.stage_blocks = below(seed, 2) ? 0 : 1 + (uint32_t)below(seed, 12);
    m->input.spare_bytes = m->n_chunks % 3 * (whole_bytes(m) / 3); /* none, some, all */
}

/* The same of an opaque optimizer: states of any size, or none. */
static inline void make_opaque(model *m, uint64_t *seed)
{
    uint64_t per_element = below(seed, 5);
    m->input.is_opaque = true;
    m->input.is_at_step = below(seed, 2) == 0;
    m->input.stage_blocks = 0;
    m->input.spare_bytes = 0;
    for (uint32_t c = 0; c < m->n_chunks; c++) {
        gm_plan_chunk *chunk = &m->chunks[c];
        uint64_t bytes =
            per_element == 4 ? 1 + below(seed, 3 * MODEL_BLOCK) : chunk->numel * per_element * 2;
        chunk->bytes[GM_STATE] = chunk->numel > 0 && below(seed, 9) ? bytes : 0;
        chunk->blocks[GM_STATE] =
            (uint32_t)((chunk->bytes[GM_STATE] + MODEL_BLOCK - 1) / MODEL_BLOCK);
    }
}

/* The plan for the input, or NULL where there is too little memory, which the error then says. */
static inline gm_plan *checked_plan(const model *m)
{
    const gm_plan_input *input = &m->input;
    gm_plan *plan;
    gm_status status = gm_plan_new(input, &plan);
    if (status == GM_ERR_NOMEM) {
        CHECK(plan == NULL);
        CHECK(strstr(gm_last_error(), "bytes") && strstr(gm_last_error(), "available"));
        CHECK(input->device_bytes < whole_bytes(m) + input->block_bytes);
        return NULL;
    }
    CHECK_OK(status);
    CHECK_OK(gm_plan_check(plan, input));
    const gm_plan_info *info = gm_plan_get_info(plan);
    CHECK(info->device_bytes <= input->device_bytes);
    CHECK(info->device_bytes == (size_t)gm_plan_n_blocks(plan) * input->block_bytes);
    CHECK(info->step_seconds >= info->compute_seconds && info->step_seconds >= info->comm_seconds);
    return plan;
}

/* The plan for the least that an error asks for: that is enough, and one block less is not. */
static inline gm_plan *plan_of_least(model *m)
{
    gm_plan *plan;
    size_t needed;
    m->input.device_bytes = 0;
    CHECK(gm_plan_new(&m->input, &plan) == GM_ERR_NOMEM && plan == NULL);
    const char *number = strstr(gm_last_error(), "needs ");
    number = number ? strchr(number, '(') : NULL;
    CHECK(number && sscanf(number, "(%zu bytes)", &needed) == 1);
    m->input.device_bytes = needed - MODEL_BLOCK;
    CHECK(gm_plan_new(&m->input, &plan) == GM_ERR_NOMEM && plan == NULL);
    m->input.device_bytes = needed;
    plan = checked_plan(m);
    CHECK(plan);
    return plan;
}

/* A plan of the first trace takes in the others, one after the other, or says that there must be another plan. */
static inline void add_traces(model *m, uint64_t *seed, uint32_t *n_fits, uint32_t *n_misfits)
{
    uint32_t n_traces = m->input.n_traces, n_ops;
    m->input.n_traces = 1;
    m->input.device_bytes = whole_bytes(m) / (1 + below(seed, 3)) + 40 * MODEL_BLOCK;
    gm_plan *plan = checked_plan(m);
    CHECK(plan);
    for (uint32_t k = 1; k < n_traces; k++) {
        CHECK(!gm_plan_knows(plan, m->traces[k]->hash));
        CHECK(gm_plan_ops(plan, m->traces[k]->hash, 0, &n_ops) == NULL && n_ops == 0);
        uint64_t before = gm_plan_get_info(plan)->hash;
        gm_status status = gm_plan_add_trace(plan, &m->input, m->traces[k]);
        if (status == GM_ERR_STATE) {
            CHECK(strstr(gm_last_error(), "plan anew"));
            ++*n_misfits;
            continue;
        }
        CHECK_OK(status);
        CHECK(gm_plan_knows(plan, m->traces[k]->hash));
        CHECK(gm_plan_get_info(plan)->hash != before);
        gm_plan_input alone = m->input; /* a step of this trace, in the placement of the other */
        alone.traces = &m->traces[k];
        alone.n_runs = &m->n_runs[k];
        CHECK_OK(gm_plan_check(plan, &alone));
        ++*n_fits;
    }
    gm_plan_free(plan);
}

/* ---- the checker ---- */

static inline bool is_caught(const gm_plan *plan, const model *m)
{
    return gm_plan_check(plan, &m->input) == GM_ERR_STATE;
}

/* Whether a unit that the tick enters has the chunk. */
static inline bool enters(const model *m, const gm_tick *tick, uint32_t chunk)
{
    uint32_t i = tick->kind == GM_TICK_ENTER ? m->unit_begin[tick->id] : 0;
    uint32_t end = tick->kind == GM_TICK_ENTER ? m->unit_begin[tick->id + 1] : 0;
    while (i < end && m->unit_chunks[i] != chunk) {
        i++;
    }
    return i < end;
}

static inline void drop_op(gm_schedule *schedule, uint32_t at)
{
    uint32_t n = schedule->begin[schedule->n_ticks];
    memmove(schedule->ops + at, schedule->ops + at + 1, (n - at - 1) * sizeof *schedule->ops);
    for (uint32_t t = 0; t <= schedule->n_ticks; t++) {
        schedule->begin[t] -= schedule->begin[t] > at;
    }
}

/* How many operations of a kind are caught when they go out one tick early: before their blocks are free, say. */
static inline uint32_t count_early(const gm_plan *plan, const model *m, gm_op_kind kind)
{
    gm_schedule *schedule = &plan->schedules[0];
    uint32_t n_caught = 0;
    for (uint32_t t = 1; t < schedule->n_ticks; t++) {
        uint32_t first = schedule->begin[t];
        if (first < schedule->begin[t + 1] && schedule->ops[first].kind == (uint32_t)kind) {
            schedule->begin[t]++; /* the operation now belongs to the tick before */
            n_caught += is_caught(plan, m);
            schedule->begin[t]--;
        }
    }
    return n_caught;
}

/* A place of the plan, one block to the left or with an offset behind its end. */
static inline void check_wrong_place(const gm_plan *plan, const model *m, gm_place *place)
{
    gm_place kept = *place;
    place->base += place->base > 0 ? UINT32_MAX : 1;
    CHECK(is_caught(plan, m) || place->length == plan->n_blocks);
    *place = kept;
    place->offset = place->length;
    CHECK(is_caught(plan, m));
    *place = kept;
}

/* ---- how good plans are ---- */

/* The one of the choices in which all chunks have the classes of `code`; false: there is none. */
static inline bool choose_classes(const gm_problem *problem, uint64_t code, gm_chosen *of)
{
    bool is_allowed = true;
    for (uint32_t c = 0; c < problem->n; c++, code /= GM_N_CLASSES) {
        const gm_plan_chunk *chunk = &problem->input->chunks[c];
        uint8_t cls = of[c].class_of = (uint8_t)(code % GM_N_CLASSES);
        is_allowed &= chunk->numel > 0 || cls == GM_CLASS_R || cls == GM_CLASS_C2;
        is_allowed &= !chunk->must_reside || !gm_is_streamed(cls);
        is_allowed &= problem->is_trained[c] || !gm_is_state_streamed(cls);
        is_allowed &= !problem->input->is_opaque || !problem->is_trained[c] || !gm_is_on_host(cls);
    }
    return is_allowed;
}

/* The rest of a choice, by the bits of `variant`: the depth of rings, late updates, resident gradients and what is
 * kept; false: not with these classes. */
static inline bool choose_rest(const gm_problem *problem, uint32_t variant, gm_choice *choice)
{
    const gm_course *main = &problem->courses[problem->main];
    uint32_t deep = variant & 1 ? 2 : 1;
    bool is_allowed = true;
    for (uint32_t piece = 0; piece < GM_N_PIECES; piece++) {
        choice->depth[piece] = piece == GM_STATE ? 2 * deep : deep;
    }
    for (uint32_t c = 0; c < problem->n; c++) {
        gm_chosen *chosen = &choice->of[c];
        uint32_t cls = chosen->class_of;
        bool may_be_early = problem->input->when == GM_IMMEDIATE && main->ready[c] < main->n;
        chosen->is_late =
            problem->is_trained[c] && (!may_be_early || (variant & 2 && cls != GM_CLASS_R));
        chosen->is_grad_resident = variant & 4;
        chosen->is_kept = variant >> (3 + c) & 1;
        is_allowed &= !chosen->is_kept || !gm_is_streamed(cls);
    }
    return is_allowed;
}

/* The least predicted step over all classes of all chunks, and all of them kept or not; the rest as a few usual ones. */
static inline double brute_force(const gm_problem *problem)
{
    uint32_t n = problem->n, n_variants = 8u << (problem->has_gathered ? n : 0);
    uint64_t n_all = 1;
    double best = 1e9;
    gm_choice choice = {.of = calloc(n, sizeof *choice.of)};
    for (uint32_t c = 0; c < n; c++) {
        n_all *= GM_N_CLASSES;
    }
    for (uint64_t code = 0; code < n_all; code++) {
        bool is_allowed = choose_classes(problem, code, choice.of);
        for (uint32_t variant = 0; variant < n_variants && is_allowed; variant++) {
            gm_plan *plan = NULL;
            if (choose_rest(problem, variant, &choice)) {
                CHECK_OK(gm_plan_for_choice(problem, &choice, &plan));
            }
            if (plan) {
                best = plan->info.step_seconds < best ? plan->info.step_seconds : best;
                gm_plan_free(plan);
            }
        }
    }
    free(choice.of);
    return best;
}

/* Few enough chunks for brute force, and large ones. */
static inline shape shape_of_few(uint64_t *seed, uint32_t most_units, uint32_t most_milliseconds)
{
    shape s = random_shape(seed);
    s.n_units = 1 + (uint32_t)below(seed, most_units);
    s.most_chunks_of_unit = 1;
    s.n_blocks = 20 + (uint32_t)below(seed, 40);
    s.has_evaluation = s.has_second = false;
    s.n_runs = 1 + (uint32_t)below(seed, 2);
    s.seconds = 1e-3 * (double)(1 + below(seed, most_milliseconds));
    return s;
}

/* The plan's step is at most 5 % above the best; what is above it goes into *worst. */
static inline void compare_with_best(const model *m, const gm_plan *plan, double *worst)
{
    gm_problem problem;
    CHECK_OK(gm_problem_new(&m->input, 0, &problem));
    double best = brute_force(&problem), found = gm_plan_get_info(plan)->step_seconds;
    if (found > 1.05 * best) {
        fprintf(stderr, "%u chunks, when %d: %g, best %g\n", m->n_chunks, m->input.when, found,
                best);
    }
    CHECK(found <= 1.05 * best);
    *worst = found / best > *worst ? found / best : *worst;
    gm_problem_free(&problem);
}

static inline gm_plan_info plan_of(model *m, gm_when when, double device_bytes)
{
    m->input.when = when;
    m->input.device_bytes = (size_t)device_bytes;
    gm_plan *plan = checked_plan(m);
    CHECK(plan);
    gm_plan_info info = *gm_plan_get_info(plan);
    gm_plan_free(plan);
    return info;
}

static inline void print_info(const char *name, const gm_plan_info *info)
{
    printf("%-16s %.3f s (bound %.3f: compute %.3f, in %.3f, out %.3f, host %.3f, ranks %.3f) "
           "R/S1/S2/C1/C2 %u/%u/%u/%u/%u, %u kept, MB of rings %zu/%zu/%zu, of gradients %zu, "
           "gathered %zu, unreduced %zu\n",
           name, info->step_seconds, info->bound_seconds, info->compute_seconds, info->h2d_seconds,
           info->d2h_seconds, info->host_seconds, info->comm_seconds, info->n_of_class[0],
           info->n_of_class[1], info->n_of_class[2], info->n_of_class[3], info->n_of_class[4],
           info->n_kept, info->weight_ring_bytes >> 20, info->state_ring_bytes >> 20,
           info->grad_ring_bytes >> 20, info->resident_grad_bytes >> 20,
           info->gathered_ring_bytes >> 20, info->unreduced_ring_bytes >> 20);
}

typedef struct curve {  /* the step's seconds over budgets, which grow */
    double seconds[33]; /* with so many 32nds of all; 0: not asked */
    double least, worst;
} curve;

/* More memory is not slower: twice as much never by 0.5 %; *worst has what a little more may cost, as the search is not
 * exhaustive. */
static inline void curve_add(curve *k, uint32_t part, double seconds)
{
    k->seconds[part] = seconds;
    k->least = k->least <= 0 || seconds < k->least ? seconds : k->least;
    k->worst = seconds / k->least > k->worst ? seconds / k->least : k->worst;
    if (part % 2 == 0 && k->seconds[part / 2] > 0) {
        CHECK(seconds <= k->seconds[part / 2] * 1.005);
    }
}

/* Plans with the work that takes about a second of one core, search included; returns the number of operations. */
static inline uint64_t plan_with_bounded_work(const model *m)
{
    gm_plan *plan;
    CHECK_OK(gm_plan_new(&m->input, &plan));
    const gm_plan_info *info = gm_plan_get_info(plan);
    uint64_t n_ops = info->n_ops;
    printf("%u ticks, %llu operations, %llu weighed, step %.2f of %.2f\n", m->traces[0]->n,
           (unsigned long long)n_ops, (unsigned long long)info->n_weighed, info->step_seconds,
           info->bound_seconds);
    CHECK_OK(gm_plan_check(plan, &m->input));
    CHECK(info->n_weighed < MOST_WEIGHED);
    gm_plan_free(plan);
    return n_ops;
}
