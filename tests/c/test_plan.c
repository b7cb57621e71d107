/* test_plan.c - what every plan must keep, over random models and budgets, and a checker that can fail. */
#include "plan_proof.h"

static uint64_t seed = 11;

/* Plans of random models under random budgets pass the checker and keep the budget. */
static void test_random_models(void)
{
    uint32_t n_fit = 0, n_not = 0, n_of_class[GM_N_CLASSES] = {0};
    for (uint32_t round = 0; round < cases(250); round++) {
        shape s = random_shape(&seed);
        s.is_cut = below(&seed, 3) == 0;
        model m;
        model_new(&m, &s, &seed);
        m.input.when = below(&seed, 2) ? GM_IMMEDIATE : GM_DEFERRED;
        random_wishes(&m, &seed);
        for (uint32_t c = 0; c < m.n_chunks; c++) {
            if (s.is_odd && below(&seed, 8) == 0) {
                m.chunks[c].numel = 0; /* gets gradients that no optimizer takes */
            }
        }
        size_t whole = whole_bytes(&m) / MODEL_BLOCK;
        m.input.device_bytes =
            (size_t)below(&seed, 1 + whole * (1 + below(&seed, 2))) * MODEL_BLOCK;
        gm_plan *plan = checked_plan(&m);
        for (uint32_t k = 0; k < GM_N_CLASSES && plan; k++) {
            n_of_class[k] += gm_plan_get_info(plan)->n_of_class[k];
        }
        n_fit += plan != NULL;
        n_not += plan == NULL;
        gm_plan_free(plan);
        model_free(&m);
    }
    CHECK(n_fit > finds(100) && n_not > finds(10));
    for (uint32_t k = 0; k < GM_N_CLASSES; k++) {
        CHECK(n_of_class[k] > finds(20));
    }
}

/* A forward in two passes: the chunks of the first one get their gradients, and updates, in one that never takes them. */
static void test_updates_of_chunks_not_taken(void)
{
    enum { N = 16, FIRST = 5 };
    uint32_t n_streamed = 0;
    for (uint32_t round = 0; round < cases(100); round++) {
        uint32_t trace, tick;
        model m;
        model_of_units(&m, N, 1 << 20, 0.1);
        CHECK_OK(gm_book_begin(m.book, true));
        for (uint32_t c = FIRST; c < N; c++) {
            CHECK_OK(gm_book_tick(m.book, GM_TICK_ENTER, c, 0, &trace, &tick));
            gm_book_release(m.book, tick);
        }
        for (uint32_t c = N, n_left = FIRST;
             c-- > FIRST;) { /* each is in use until the next one is */
            uint32_t before = tick;
            CHECK_OK(gm_book_tick(m.book, GM_TICK_TOUCH, c, 0, &trace, &tick));
            uint32_t touch = tick;
            gm_book_release(m.book, before);
            while (n_left > 0 && (c == FIRST || below(&seed, 2) == 0)) {
                CHECK_OK(gm_book_tick(m.book, GM_TICK_GRAD, --n_left, 0, &trace, &tick));
            }
            CHECK_OK(gm_book_tick(m.book, GM_TICK_GRAD, c, 0, &trace, &tick));
            tick = touch;
        }
        CHECK_OK(gm_book_end(m.book, &trace));
        m.traces[0] = gm_book_trace(m.book, trace);
        time_trace(&m, trace, 0.1);
        m.input.when = GM_IMMEDIATE;
        m.input.rates.host_adam = m.input.rates.host_adam_beside = 1e2;
        size_t whole = whole_bytes(&m) / MODEL_BLOCK;
        m.input.device_bytes = (whole / 8 + (size_t)below(&seed, whole)) * MODEL_BLOCK;
        gm_plan *plan = checked_plan(&m);
        for (uint32_t c = 0; c < FIRST && plan; c++) {
            n_streamed += gm_plan_class(plan, c) == GM_CLASS_S2;
        }
        gm_plan_free(plan);
        model_free(&m);
    }
    CHECK(n_streamed > finds(50));
}

/* Chunks of a few elements on blocks of a page: where states are streamed, the stage takes a slice of any. */
static void test_stage_has_slots(void)
{
    uint32_t n_streamed = 0;
    for (uint32_t round = 0; round < cases(100); round++) {
        shape s = random_shape(&seed);
        model m;
        model_new(&m, &s, &seed);
        m.input.when = round % 2 ? GM_IMMEDIATE : GM_DEFERRED;
        m.input.block_bytes = 4096;
        m.input.rates.host_adam = m.input.rates.host_adam_beside = 1e2;
        m.input.stage_blocks = (uint32_t)below(&seed, 4);
        size_t whole = 0;
        for (uint32_t c = 0; c < m.n_chunks; c++) {
            gm_plan_chunk *chunk = &m.chunks[c];
            uint64_t numel = 1 + below(&seed, 900);
            for (uint32_t piece = 0; piece < GM_N_PIECES; piece++) {
                chunk->bytes[piece] = chunk->bytes[piece] > 0 ? numel * 4 : 0;
                chunk->blocks[piece] = (uint32_t)((chunk->bytes[piece] + 4095) / 4096);
                whole += chunk->blocks[piece];
            }
            chunk->numel = chunk->numel > 0 ? numel : 0;
        }
        m.input.device_bytes = (whole / 4 + below(&seed, whole)) * 4096;
        gm_plan *plan = checked_plan(&m);
        if (plan) {
            const gm_plan_info *info = gm_plan_get_info(plan);
            if (info->n_of_class[GM_CLASS_S1] + info->n_of_class[GM_CLASS_S2] > 0) {
                CHECK(gm_slots_of(info->state_ring_bytes).bytes >= (size_t)GM_SLICE_UNIT * 12);
                n_streamed++;
            } else {
                CHECK(info->state_ring_bytes == 0);
            }
            gm_plan_free(plan);
        }
        model_free(&m);
    }
    CHECK(n_streamed > finds(20));
}

/* Parameters that are used outside units: a pass has nothing but gradients, and no tick comes before the first. */
static void test_gradients_alone(void)
{
    shape s = {.n_units = 6, .most_chunks_of_unit = 2, .n_blocks = 3, .n_runs = 1};
    for (uint32_t round = 0; round < cases(60); round++) {
        model m;
        uint32_t index, tick;
        model_new(&m, &s, &seed);
        CHECK_OK(gm_book_begin(m.book, true));
        for (uint32_t c = m.n_chunks; c-- > 0;) {
            CHECK_OK(gm_book_tick(m.book, GM_TICK_GRAD, c, 0, &index, &tick));
        }
        CHECK_OK(gm_book_end(m.book, &index));
        m.traces[0] = gm_book_trace(m.book, index);
        m.n_runs[0] = 1 + (uint32_t)below(&seed, 3);
        m.input.when = round % 2 ? GM_IMMEDIATE : GM_DEFERRED;
        m.input.policy = round % 3 ? GM_POLICY_AUTO : GM_POLICY_CPU;
        m.input.device_bytes = whole_bytes(&m) / 8 * (2 + below(&seed, 8));
        gm_plan *plan = checked_plan(&m);
        CHECK(plan);
        gm_plan_free(plan);
        model_free(&m);
    }
}

/* A plan of some random model in which memory is short enough that everything moves. */
static gm_plan *tight_plan(model *m, gm_when when)
{
    for (;;) {
        shape s = random_shape(&seed);
        s.n_units += 6;
        s.is_cut = below(&seed, 4) == 0;
        model_new(m, &s, &seed);
        m->input.when = when;
        m->input.device_bytes = whole_bytes(m) / (3 + below(&seed, 8));
        gm_plan *plan = checked_plan(m);
        if (plan) {
            return plan;
        }
        model_free(m);
    }
}

/* Takes all operations of a kind on a chunk out of all schedules. */
static uint32_t drop_ops(gm_plan *plan, gm_op_kind kind, uint32_t chunk)
{
    uint32_t n_dropped = 0;
    for (uint32_t k = 0; k < plan->n_schedules; k++) {
        gm_schedule *schedule = &plan->schedules[k];
        for (uint32_t i = 0; i < schedule->begin[schedule->n_ticks];) {
            if (schedule->ops[i].kind == (uint32_t)kind && schedule->ops[i].chunk == chunk) {
                drop_op(schedule, i);
                n_dropped++;
            } else {
                i++;
            }
        }
    }
    return n_dropped;
}

static bool is_used_by(const model *m, uint32_t chunk)
{
    for (uint32_t k = 0; k < m->n_traces; k++) {
        for (uint32_t t = 0; t < m->traces[k]->n; t++) {
            if (enters(m, &m->traces[k]->ticks[t], chunk)) {
                return true;
            }
        }
    }
    return false;
}

static bool is_updated(const model *m, uint32_t chunk)
{
    for (uint32_t k = 0; k < m->n_traces; k++) {
        for (uint32_t t = 0; t < m->traces[k]->n; t++) {
            const gm_tick *tick = &m->traces[k]->ticks[t];
            if (tick->kind == GM_TICK_GRAD && tick->id == chunk) {
                return m->chunks[chunk].numel > 0;
            }
        }
    }
    return false;
}

/* What is needed may not be missing: all fetches of a chunk, all updates, or all copies of an only gradient. */
static void test_checker_misses_nothing(void)
{
    uint32_t n_caught[GM_OP_UPDATE + 1] = {0};
    for (uint32_t round = 0; round < cases(160); round++) {
        model m;
        gm_plan *plan = tight_plan(&m, round % 2 ? GM_IMMEDIATE : GM_DEFERRED);
        uint32_t c = (uint32_t)below(&seed, m.n_chunks);
        gm_op_kind kind = (gm_op_kind)below(&seed, GM_OP_UPDATE + 1);
        bool is_streamed = gm_is_streamed(plan->class_of[c]);
        bool is_needed = kind == GM_OP_FETCH    ? is_streamed && is_used_by(&m, c)
                         : kind == GM_OP_UPDATE ? is_updated(&m, c)
                                                : false;
        uint32_t n = drop_ops(plan, kind, c);
        bool is_noticed = n > 0 && is_caught(plan, &m);
        CHECK(!is_needed || is_noticed);
        n_caught[kind] += is_noticed;
        gm_plan_free(plan);
        model_free(&m);
    }
    CHECK(n_caught[GM_OP_FETCH] > finds(10) && n_caught[GM_OP_UPDATE] > finds(10));
    CHECK(n_caught[GM_OP_GRAD_OUT] > finds(2));
}

/* Gradients that are added to must come back first. */
static void test_checker_sees_lost_sums(void)
{
    uint32_t n_caught = 0;
    for (uint32_t round = 0; round < cases(40); round++) {
        shape s = {
            .n_units = 12, .most_chunks_of_unit = 1, .n_blocks = 4, .n_runs = 3, .seconds = 0.01};
        model m;
        model_new(&m, &s, &seed);
        m.input.device_bytes = 36 * MODEL_BLOCK;
        m.input.policy = GM_POLICY_CPU;
        gm_plan *plan = checked_plan(&m);
        CHECK(plan);
        if (drop_ops(plan, GM_OP_GRAD_IN, (uint32_t)below(&seed, m.n_chunks)) > 0) {
            n_caught += is_caught(plan, &m);
        }
        gm_plan_free(plan);
        model_free(&m);
    }
    CHECK(n_caught > finds(20));
}

/* A fetch that goes out one tick before its place is free. */
static void test_checker_sees_early_fetches(void)
{
    uint32_t n_caught = 0;
    for (uint32_t round = 0; round < cases(40); round++) {
        model m;
        gm_plan *plan = tight_plan(&m, GM_DEFERRED);
        n_caught += count_early(plan, &m, GM_OP_FETCH);
        gm_plan_free(plan);
        model_free(&m);
    }
    CHECK(n_caught > finds(20));
}

static void test_checker_sees_wrong_places(void)
{
    uint32_t n_shifted = 0;
    for (uint32_t round = 0; round < cases(80); round++) {
        model m;
        gm_plan *plan = tight_plan(&m, round % 2 ? GM_IMMEDIATE : GM_DEFERRED);
        uint32_t c = (uint32_t)below(&seed, m.n_chunks),
                 i = (uint32_t)below(&seed, GM_N_OWN_PIECES);
        gm_place *place = &plan->places[c * GM_N_PIECES + i], kept = *place;
        if (place->length > 0) {
            check_wrong_place(plan, &m, place);
            if (!place->is_resident) {
                place->offset = (place->offset + 1) % place->length;
                n_shifted += is_caught(plan, &m);
                *place = kept;
            }
            place->is_resident = !place->is_resident;
            CHECK(is_caught(plan, &m) || (i == GM_GRAD && place->length == m.chunks[c].blocks[i]));
            *place = kept;
        }
        uint8_t cls = plan->class_of[c];
        plan->class_of[c] = (uint8_t)((cls + 1) % GM_N_CLASSES);
        bool is_same =
            m.chunks[c].numel == 0 && gm_is_streamed(cls) == gm_is_streamed(plan->class_of[c]);
        CHECK(is_same || is_caught(plan, &m));
        plan->class_of[c] = cls;
        m.input.device_bytes = gm_plan_get_info(plan)->device_bytes - 1;
        CHECK(is_caught(plan, &m));
        gm_plan_free(plan);
        model_free(&m);
    }
    CHECK(n_shifted > finds(5));
}

static void test_hash(void)
{
    for (uint32_t round = 0; round < cases(40); round++) {
        model m;
        gm_plan *again, *plan = tight_plan(&m, round % 2 ? GM_IMMEDIATE : GM_DEFERRED);
        CHECK_OK(gm_plan_new(&m.input, &again));
        CHECK(gm_plan_get_info(plan)->hash == gm_plan_get_info(again)->hash);
        CHECK(memcmp(gm_plan_get_info(plan), gm_plan_get_info(again), sizeof(gm_plan_info)) == 0);
        gm_plan_free(again);
        m.input.device_bytes = 2 * whole_bytes(&m);
        m.input.policy = GM_POLICY_CUDA;
        CHECK_OK(gm_plan_new(&m.input, &again));
        CHECK(gm_plan_get_info(plan)->hash != gm_plan_get_info(again)->hash);
        gm_plan_free(again);
        gm_plan_free(plan);
        model_free(&m);
    }
}

/* `cuda`: everything resident and no traffic; `cpu`: everything streamed; each says exactly what it needs. */
static void test_corners(void)
{
    for (uint32_t round = 0; round < cases(40); round++) {
        shape s = {.n_units = 3 + (uint32_t)below(&seed, 20),
                   .most_chunks_of_unit = 1 + (uint32_t)below(&seed, 2),
                   .n_blocks = 1 + (uint32_t)below(&seed, 5),
                   .has_evaluation = true,
                   .n_runs = 1 + (uint32_t)below(&seed, 3),
                   .seconds = 0.02};
        model m;
        gm_plan *plan;
        model_new(&m, &s, &seed);
        m.input.when = round % 2 ? GM_IMMEDIATE : GM_DEFERRED;
        m.input.policy = GM_POLICY_CUDA;
        m.input.device_bytes = whole_bytes(&m);
        plan = checked_plan(&m);
        CHECK(plan);
        const gm_plan_info *info = gm_plan_get_info(plan);
        CHECK(info->n_of_class[GM_CLASS_R] == m.n_chunks && info->h2d_bytes == 0);
        CHECK(info->d2h_bytes == 0 && info->device_bytes == whole_bytes(&m));
        gm_plan_free(plan);
        m.input.device_bytes--;
        CHECK(gm_plan_new(&m.input, &plan) == GM_ERR_NOMEM);
        char needed[32];
        (void)snprintf(needed, sizeof needed, "%zu bytes", whole_bytes(&m));
        CHECK(strstr(gm_last_error(), needed) && strstr(gm_last_error(), "'cuda'"));

        m.input.policy = GM_POLICY_CPU;
        m.input.device_bytes = whole_bytes(&m);
        plan = checked_plan(&m);
        CHECK(plan);
        info = gm_plan_get_info(plan);
        /* A touch that the random pass holds for long may keep a chunk's weights from sharing blocks. */
        CHECK(info->n_of_class[GM_CLASS_C2] + info->n_of_class[GM_CLASS_C1] == m.n_chunks);
        CHECK(info->n_of_class[GM_CLASS_C1] <= 1 + m.n_chunks / 8 && info->state_ring_bytes == 0);
        gm_plan_free(plan);
        model_free(&m);
    }
}

static void test_needed_bytes(void)
{
    for (uint32_t round = 0; round < cases(60); round++) {
        shape s = random_shape(&seed);
        model m;
        model_new(&m, &s, &seed);
        gm_plan_free(plan_of_least(&m));
        model_free(&m);
    }
}

static void test_one_more_trace(void)
{
    uint32_t n_fits = 0, n_misfits = 0;
    for (uint32_t round = 0; round < cases(60); round++) {
        shape s = random_shape(&seed);
        s.has_evaluation = s.has_second = true;
        model m;
        model_new(&m, &s, &seed);
        m.input.when = round % 2 ? GM_IMMEDIATE : GM_DEFERRED;
        add_traces(&m, &seed, &n_fits, &n_misfits);
        model_free(&m);
    }
    CHECK(n_fits > finds(50) && n_misfits < n_fits);
}

static void test_bad_input(void)
{
    shape s = {.n_units = 3, .most_chunks_of_unit = 1, .n_blocks = 2, .n_runs = 1};
    model m;
    gm_plan *plan;
    model_new(&m, &s, &seed);
    m.input.device_bytes = whole_bytes(&m);
    gm_plan_input input = m.input;
    input.rates.d2h = 0;
    CHECK(gm_plan_new(&input, &plan) == GM_ERR_ARG);
    input = m.input;
    input.n_units = 2; /* the trace enters a third one */
    CHECK(gm_plan_new(&input, &plan) == GM_ERR_ARG);
    input = m.input;
    input.n_chunks = 0;
    CHECK(gm_plan_new(&input, &plan) == GM_ERR_ARG);
    m.chunks[1].bytes[GM_STATE] += 100 * MODEL_BLOCK;
    CHECK(gm_plan_new(&m.input, &plan) == GM_ERR_ARG);
    model_free(&m);
}

int main(void)
{
    test_random_models();
    test_updates_of_chunks_not_taken();
    test_stage_has_slots();
    test_gradients_alone();
    test_checker_misses_nothing();
    test_checker_sees_lost_sums();
    test_checker_sees_early_fetches();
    test_checker_sees_wrong_places();
    test_hash();
    test_corners();
    test_needed_bytes();
    test_one_more_trace();
    test_bad_input();
    printf("test_plan: ok\n");
    return 0;
}
