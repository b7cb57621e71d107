/* test_plan_opaque.c - plans of opaque updates: none on the host, states that pass the device whole or are there, and, as the
 * input says, updates at the step or behind it. */
#include "plan_proof.h"

static uint64_t seed = 23;

static void random_opaque(model *m, bool is_shared)
{
    shape s = random_shape(&seed);
    s.is_cut = below(&seed, 3) == 0;
    model_new(m, &s, &seed);
    m->input.when = below(&seed, 2) ? GM_IMMEDIATE : GM_DEFERRED;
    random_wishes(m, &seed);
    make_opaque(m, &seed);
    m->input.spare_bytes =
        m->input.is_at_step || below(&seed, 2) ? 0 : below(&seed, 2 * whole_bytes(m));
    if (is_shared) {
        share_model(m, 2 + (uint32_t)below(&seed, 7), below(&seed, 3) == 0, 0, &seed);
    }
}

static void test_random_models(void)
{
    uint32_t n_fit = 0, n_not = 0, n_stateless = 0, n_of_class[GM_N_CLASSES] = {0};
    uint32_t n_speculating = 0;
    for (uint32_t round = 0; round < cases(240); round++) {
        model m;
        random_opaque(&m, round % 4 == 3);
        size_t whole = whole_bytes(&m) / MODEL_BLOCK;
        m.input.device_bytes =
            (size_t)below(&seed, 1 + whole * (1 + below(&seed, 2))) * MODEL_BLOCK;
        gm_plan *plan = checked_plan(&m);
        for (uint32_t c = 0; c < m.n_chunks && plan; c++) {
            gm_class cls = gm_plan_class(plan, c);
            bool is_streamed = cls == GM_CLASS_S1 || cls == GM_CLASS_S2;
            n_of_class[cls]++;
            n_stateless += is_streamed && m.chunks[c].blocks[GM_STATE] == 0;
        }
        uint32_t n_speculated = plan ? gm_plan_get_info(plan)->n_speculated : 0;
        CHECK(n_speculated == 0 || (m.input.spare_bytes > 0 && m.input.when == GM_DEFERRED));
        n_speculating += n_speculated > 0;
        CHECK(!plan || gm_plan_get_info(plan)->host_seconds <= 0);
        n_fit += plan != NULL;
        n_not += plan == NULL;
        gm_plan_free(plan);
        model_free(&m);
    }
    CHECK(n_fit > finds(80) && n_not > finds(10) && n_stateless > finds(10));
    CHECK(n_of_class[GM_CLASS_R] > finds(50) && n_of_class[GM_CLASS_S1] > finds(20));
    CHECK(n_of_class[GM_CLASS_S2] > finds(50) && n_speculating > finds(5));
}

static void test_hash(void)
{
    for (uint32_t round = 0; round < cases(30); round++) {
        model m;
        gm_plan *plan, *again;
        random_opaque(&m, false);
        m.input.policy = GM_POLICY_AUTO;
        m.input.device_bytes = whole_bytes(&m);
        CHECK_OK(gm_plan_new(&m.input, &plan));
        CHECK_OK(gm_plan_new(&m.input, &again));
        CHECK(memcmp(gm_plan_get_info(plan), gm_plan_get_info(again), sizeof(gm_plan_info)) == 0);
        gm_plan_free(again);
        gm_plan_free(plan);
        model_free(&m);
    }
}

static void test_against_brute_force(void)
{
    double worst = 0;
    uint32_t n_compared = 0;
    for (uint32_t round = 0; round < cases(90); round++) {
        shape s = shape_of_few(&seed, 4, 30);
        model m;
        model_new(&m, &s, &seed);
        make_opaque(&m, &seed);
        m.input.when = round % 2 ? GM_IMMEDIATE : GM_DEFERRED;
        m.input.device_bytes = whole_bytes(&m) / 100 * (50 + below(&seed, 50));
        gm_plan *plan = checked_plan(&m);
        if (m.n_chunks <= 5 && m.n_traces > 0 && plan) {
            compare_with_best(&m, plan, &worst);
            n_compared++;
        }
        gm_plan_free(plan);
        model_free(&m);
    }
    CHECK(n_compared > finds(15));
    printf("worst against brute force: %.3f over %u cases\n", worst, n_compared);
}

/* A model of equal units whose optimizer keeps so many bytes of an element. */
static void model_of_states(model *m, uint32_t n, uint64_t numel, uint64_t bytes, double seconds)
{
    model_of_units(m, n, numel, seconds);
    m->input.is_opaque = true;
    for (uint32_t c = 0; c < n; c++) {
        m->chunks[c].bytes[GM_STATE] = numel * bytes;
        m->chunks[c].blocks[GM_STATE] = (uint32_t)((numel * bytes + MODEL_BLOCK - 1) / MODEL_BLOCK);
    }
}

/* An optimizer without states streams weights that do not fit; with room for all it has all resident. */
static void test_no_states(void)
{
    for (int when = 0; when < 2; when++) {
        model m;
        model_of_states(&m, 40, 8000000, 0, 0.1);
        size_t weights = 40 * (size_t)m.chunks[0].blocks[GM_WEIGHT] * MODEL_BLOCK;
        gm_plan_info info = plan_of(&m, (gm_when)when, (double)weights / 2);
        CHECK(info.state_ring_bytes == 0 && info.n_of_class[GM_CLASS_S2] > 10);
        info = plan_of(&m, (gm_when)when, (double)whole_bytes(&m));
        CHECK(info.n_of_class[GM_CLASS_R] == 40 && info.h2d_bytes + info.d2h_bytes == 0);
        model_free(&m);
    }
}

/* With spares on the host a step whose clip is known last is hardly slower than one that is immediate. */
static void test_speculation(void)
{
    model m;
    gm_plan_info info, spared, immediate;
    model_of_states(&m, 60, 16000000, 2, 0.2);
    for (int policy = GM_POLICY_AUTO; policy <= GM_POLICY_CPU; policy++) {
        double bytes = (double)whole_bytes(&m) / 3;
        m.input.policy = (gm_policy)policy;
        m.input.spare_bytes = 0;
        info = plan_of(&m, GM_DEFERRED, bytes);
        immediate = plan_of(&m, GM_IMMEDIATE, bytes);
        m.input.spare_bytes = whole_bytes(&m);
        spared = plan_of(&m, GM_DEFERRED, bytes);
        print_info("speculated", &spared);
        CHECK(info.n_speculated == 0 && spared.n_speculated > 10);
        CHECK(spared.step_seconds < 0.95 * info.step_seconds);
        CHECK(spared.step_seconds < 1.08 * immediate.step_seconds);
        CHECK(spared.spare_bytes <= m.input.spare_bytes && spared.host_seconds <= 0);
    }
    model_free(&m);
}

/* Bytes of a step in which everything passes: weights for each use and for the update, states and gradients; and what the
 * time model makes of them. */
static void test_time(void)
{
    model m;
    gm_plan_info info, at_step;
    model_of_states(&m, 60, 16000000, 2, 0.2);
    size_t states = 60 * m.chunks[0].bytes[GM_STATE];
    m.input.policy = GM_POLICY_CPU;
    for (int when = 0; when < 2; when++) {
        m.input.is_at_step = false;
        info = plan_of(&m, (gm_when)when, (double)whole_bytes(&m) / 3);
        CHECK(info.n_of_class[GM_CLASS_S2] == 60 && info.host_seconds <= 0);
        CHECK(info.h2d_bytes > states - info.state_ring_bytes && info.d2h_bytes >= states);
        CHECK(info.step_seconds >= info.bound_seconds);
        m.input.is_at_step = true;
        at_step = plan_of(&m, (gm_when)when, (double)whole_bytes(&m) / 3);
        CHECK(at_step.h2d_bytes + at_step.d2h_bytes > states);
        CHECK(at_step.step_seconds >= at_step.bound_seconds);
        CHECK(at_step.step_seconds > 0.999 * info.step_seconds);
        print_info(when ? "immediate" : "deferred", &info);
        print_info("at the step", &at_step);
    }
    /* Nothing runs beside the updates of a step whose clip is known behind the last gradient. */
    m.input.when = GM_DEFERRED;
    m.input.policy = GM_POLICY_AUTO;
    at_step = plan_of(&m, GM_DEFERRED, (double)whole_bytes(&m) / 3);
    double out =
        (double)(60 - at_step.n_of_class[GM_CLASS_R]) * (double)m.chunks[0].bytes[GM_STATE];
    CHECK(at_step.step_seconds > 0.2 + 0.9 * out / m.input.rates.d2h);
    model_free(&m);
}

/* The tick of the chunk's operation in the plan's first schedule; GM_NO_TICK: it has none. */
static uint32_t tick_of(const gm_plan *plan, gm_op_kind kind, uint32_t chunk)
{
    const gm_schedule *schedule = &plan->schedules[0];
    for (uint32_t t = 0; t < schedule->n_ticks; t++) {
        for (uint32_t i = schedule->begin[t]; i < schedule->begin[t + 1]; i++) {
            const gm_op *op = &schedule->ops[i];
            if (op->kind == (uint32_t)kind && op->chunk == chunk) {
                return t;
            }
        }
    }
    return GM_NO_TICK;
}

/* Copies that an update would wait for have time, or are not made: what is speculated comes when two other gradients are
 * complete, and those of the step's own updates, at the end of the backward, stay.  Weights that are there need no spare. */
static void test_waits(void)
{
    model m;
    gm_plan *plan;
    size_t spares = 0;
    uint32_t n_in_place = 0, n_behind = 0, n_kept = 0;
    model_of_states(&m, 60, 16000000, 2, 0.2);
    m.input.when = GM_DEFERRED;
    m.input.device_bytes = whole_bytes(&m) / 2;
    m.input.spare_bytes = whole_bytes(&m) / 6;
    CHECK_OK(gm_plan_new(&m.input, &plan));
    CHECK_OK(gm_plan_check(plan, &m.input));
    const gm_trace *trace = m.traces[0];
    for (uint32_t t = 0, n_grads = 0; t < trace->n; t++) {
        uint32_t c = trace->ticks[t].id, ahead = t, n_later = 0;
        if (trace->ticks[t].kind != GM_TICK_GRAD) {
            continue;
        }
        n_grads++;
        for (uint32_t later = t + 1; later < trace->n && n_later < 2; later++) {
            bool is_grad = trace->ticks[later].kind == GM_TICK_GRAD;
            n_later += is_grad;
            ahead = is_grad ? later : ahead;
        }
        if (plan->is_speculated[c]) {
            CHECK(tick_of(plan, GM_OP_SPECULATE, c) == ahead);
            n_behind += ahead > t;
            bool is_in_place = !gm_is_streamed(plan->class_of[c]);
            n_in_place += is_in_place;
            spares += gm_spare_bytes(m.chunks[c].bytes[GM_STATE]);
            spares += is_in_place ? 0 : gm_spare_bytes(m.chunks[c].bytes[GM_WEIGHT]);
        }
        bool is_out = tick_of(plan, GM_OP_GRAD_OUT, c) == t;
        bool is_resident = plan->places[c * GM_N_PIECES + GM_GRAD].is_resident;
        CHECK(is_out || is_resident || n_grads > 60 - GM_ISSUED_BY_STEP);
        n_kept += !is_out && !is_resident;
    }
    CHECK(plan->n_behind == 2 && n_behind > 10 && n_in_place > 10 && n_kept > 0);
    CHECK(plan->info.spare_bytes == spares && spares <= m.input.spare_bytes);
    gm_plan_free(plan);
    model_free(&m);
}

/* With one chunk's states in the ring each waits for the one before to be home. */
static void test_depth(void)
{
    double seconds[3];
    model m;
    gm_problem problem;
    model_of_states(&m, 30, 16000000, 8, 0.001);
    m.input.when = GM_DEFERRED;
    m.input.device_bytes = whole_bytes(&m);
    CHECK_OK(gm_problem_new(&m.input, 0, &problem));
    gm_choice choice = {.of = calloc(30, sizeof *choice.of)};
    for (uint32_t c = 0; c < 30; c++) {
        choice.of[c] =
            (gm_chosen){.class_of = GM_CLASS_S1, .is_late = true, .is_grad_resident = true};
    }
    for (uint32_t i = 0; i < 3; i++) {
        gm_plan *plan;
        memcpy(choice.depth, (uint32_t[GM_N_PIECES]){1, i + 1, 1, 1, 1}, sizeof choice.depth);
        CHECK_OK(gm_plan_for_choice(&problem, &choice, &plan));
        CHECK_OK(gm_plan_check(plan, &m.input));
        CHECK(plan->ring[GM_STATE] == (i + 1) * m.chunks[0].blocks[GM_STATE]);
        seconds[i] = plan->info.step_seconds;
        gm_plan_free(plan);
    }
    double one_way = 30 * (double)m.chunks[0].bytes[GM_STATE] / m.input.rates.h2d;
    CHECK(seconds[0] > 1.9 * one_way && seconds[0] < 2.3 * one_way);
    CHECK(seconds[1] < 0.75 * seconds[0] && seconds[2] <= 1.001 * seconds[1]);
    gm_problem_free(&problem);
    free(choice.of);
    model_free(&m);
}

/* ---- the checker ---- */

static void test_checker(void)
{
    uint32_t n_host = 0, n_lost = 0, n_places = 0;
    for (uint32_t round = 0; round < cases(160); round++) {
        model m;
        random_opaque(&m, false);
        m.input.device_bytes = whole_bytes(&m) / (2 + below(&seed, 6));
        gm_plan *plan = checked_plan(&m);
        uint32_t c = (uint32_t)below(&seed, m.n_chunks);
        gm_place *place = plan ? &plan->places[c * GM_N_PIECES + GM_STATE] : NULL;
        if (plan && gm_is_state_streamed(plan->class_of[c]) && place->length > 0) {
            gm_place kept = *place;
            check_wrong_place(plan, &m, place);
            m.input.stage_blocks = 1;
            n_lost += m.chunks[c].blocks[GM_STATE] > 1 && is_caught(plan, &m);
            m.input.stage_blocks = 0;
            *place = (gm_place){0};
            plan->class_of[c] += GM_CLASS_C1 - GM_CLASS_S1;
            n_host += is_caught(plan, &m);
            plan->class_of[c] -= GM_CLASS_C1 - GM_CLASS_S1;
            *place = kept;
            n_places++;
        }
        gm_plan_free(plan);
        model_free(&m);
    }
    CHECK(n_places > finds(12) && n_host == n_places && n_lost > finds(8));
}

int main(void)
{
    test_random_models();
    test_hash();
    test_against_brute_force();
    test_no_states();
    test_time();
    test_speculation();
    test_waits();
    test_depth();
    test_checker();
    printf("test_plan_opaque: ok\n");
    return 0;
}
