/* test_stay.c - chunks that stay on the device: which ones, that no plan lets them leave, and a checker that sees it. */
#include "plan/stay.h"
#include "plan_proof.h"

static uint64_t seed = 37;

/* ---- which ---- */

static size_t at_home(const size_t *homes, const bool *stays, uint32_t n)
{
    size_t sum = 0;
    for (uint32_t c = 0; c < n; c++) {
        sum += stays[c] ? 0 : homes[c];
    }
    return sum;
}

/* The rest fits, and with any one of those that stay it would not. */
static void check_choice(const size_t *homes, const bool *stays, uint32_t n, size_t limit)
{
    size_t sum = at_home(homes, stays, n);
    CHECK(sum <= limit);
    for (uint32_t c = 0; c < n; c++) {
        CHECK(!stays[c] || (homes[c] > 0 && sum + homes[c] > limit));
    }
}

static void test_no_more_than_has_to(void)
{
    enum { MOST = 40 };
    for (uint32_t round = 0; round < cases(2000); round++) {
        size_t homes[MOST], all = 0;
        bool stays[MOST] = {false}, again[MOST] = {false};
        uint32_t n = (uint32_t)below(&seed, MOST + 1);
        for (uint32_t c = 0; c < n; c++) {
            uint64_t most = below(&seed, 3) ? 100 : 5;
            homes[c] = below(&seed, 8) ? below(&seed, most) : 20 * most;
            all += homes[c];
        }
        size_t limit = below(&seed, 6) ? below(&seed, all + 2) : below(&seed, 2) ? 0 : all;
        gm_stay_choose(homes, n, limit, stays);
        check_choice(homes, stays, n, limit);
        CHECK(limit < all || at_home(homes, stays, n) == all);
        gm_stay_choose(homes, n, limit, again);
        CHECK(memcmp(stays, again, sizeof stays) == 0);
    }
    size_t equal[6] = {7, 7, 7, 7, 7, 7};
    bool first[6] = {false};
    gm_stay_choose(equal, 6, 20, first);
    CHECK(first[0] && first[1] && first[2] && first[3] && !first[4] && !first[5]);
}

/* ---- in plans ---- */

/* Some random model, of one rank or of several, on a host with room for some of its homes. */
static void random_staying(model *m)
{
    shape s = random_shape(&seed);
    size_t homes[400] = {0}, all = 0;
    bool stays[400] = {false};
    s.is_cut = below(&seed, 3) == 0;
    model_new(m, &s, &seed);
    if (below(&seed, 3) == 0) {
        share_model(m, 2 + (uint32_t)below(&seed, 7), below(&seed, 4) == 0,
                    below(&seed, 4) ? 0 : 1 + (uint32_t)below(&seed, 8), &seed);
    }
    CHECK(m->n_chunks <= 400);
    random_wishes(m, &seed);
    m->input.when = below(&seed, 2) ? GM_IMMEDIATE : GM_DEFERRED;
    for (uint32_t c = 0; c < m->n_chunks; c++) {
        if (s.is_odd && below(&seed, 8) == 0) {
            m->chunks[c].numel = 0; /* gets gradients that no optimizer takes */
        }
        for (uint32_t piece = 0; piece < GM_N_OWN_PIECES; piece++) {
            homes[c] += m->chunks[c].bytes[piece];
        }
        all += homes[c];
    }
    size_t limit = below(&seed, all + 1);
    gm_stay_choose(homes, m->n_chunks, limit, stays);
    for (uint32_t c = 0; c < m->n_chunks; c++) {
        m->chunks[c].stays = stays[c];
    }
}

static size_t staying_blocks(const model *m)
{
    size_t blocks = 0;
    for (uint32_t c = 0; c < m->n_chunks; c++) {
        for (uint32_t piece = 0; piece < GM_N_OWN_PIECES; piece++) {
            blocks += m->chunks[c].stays ? m->chunks[c].blocks[piece] : 0;
        }
    }
    return blocks;
}

static bool is_all_here(const gm_plan *plan, const gm_plan_chunk *chunk, uint32_t c)
{
    bool is_here = gm_plan_class(plan, c) == GM_CLASS_R && !gm_plan_is_speculated(plan, c);
    for (uint32_t piece = 0; piece < GM_N_OWN_PIECES; piece++) {
        const gm_place *place = gm_plan_place(plan, c, (gm_piece)piece);
        is_here &= chunk->blocks[piece] == 0 || place->is_resident;
    }
    return is_here;
}

/* Budgets of the device and of the host add up: what stays is there whole, and the rest as it can be.  A budget that has
 * no room for what stays is refused. */
static void test_nothing_of_them_leaves(void)
{
    uint32_t n_fit = 0, n_not = 0, n_streamed = 0, n_staying = 0;
    for (uint32_t round = 0; round < cases(250); round++) {
        model m;
        random_staying(&m);
        size_t whole = whole_bytes(&m) / MODEL_BLOCK, staying = staying_blocks(&m);
        m.input.device_bytes = below(&seed, 3)
                                   ? (staying + (size_t)below(&seed, whole + 1)) * MODEL_BLOCK
                                   : (size_t)below(&seed, whole + 1) * MODEL_BLOCK;
        gm_plan *plan = checked_plan(&m);
        CHECK(!plan || gm_plan_n_blocks(plan) >= staying);
        for (uint32_t c = 0; c < m.n_chunks && plan; c++) {
            CHECK(!m.chunks[c].stays || is_all_here(plan, &m.chunks[c], c));
            n_staying += m.chunks[c].stays;
            n_streamed += gm_plan_class(plan, c) != GM_CLASS_R;
        }
        n_fit += plan != NULL;
        n_not += plan == NULL;
        gm_plan_free(plan);
        model_free(&m);
    }
    CHECK(n_fit > finds(100) && n_not > finds(20));
    CHECK(n_staying > finds(200) && n_streamed > finds(200));
}

/* A plan that was made without them, as far as it lets one leave. */
static void test_checker_sees_who_leaves(void)
{
    uint32_t n_caught = 0, n_kept = 0, n_grads = 0;
    for (uint32_t round = 0; round < cases(120); round++) {
        model m;
        random_staying(&m);
        m.input.device_bytes = whole_bytes(&m) / (1 + below(&seed, 6)) + 4 * MODEL_BLOCK;
        for (uint32_t c = 0; c < m.n_chunks; c++) {
            m.chunks[c].stays = false;
        }
        gm_plan *plan = checked_plan(&m);
        for (uint32_t c = 0; c < m.n_chunks && plan; c++) {
            bool is_here = is_all_here(plan, &m.chunks[c], c);
            m.chunks[c].stays = true;
            CHECK(is_here || is_caught(plan, &m));
            n_caught += !is_here;
            if (is_here) {
                CHECK_OK(gm_plan_check(plan, &m.input));
                n_kept++;
                gm_schedule *schedule = &plan->schedules[0];
                uint32_t kind = GM_OP_GRAD_OUT, at = schedule->begin[schedule->n_ticks];
                if (at > 0 && m.chunks[c].bytes[GM_GRAD] > 0) {
                    gm_op before = schedule->ops[at - 1];
                    schedule->ops[at - 1] = (gm_op){kind, c};
                    CHECK(is_caught(plan, &m));
                    schedule->ops[at - 1] = before;
                    n_grads++;
                }
            }
            m.chunks[c].stays = false;
        }
        gm_plan_free(plan);
        model_free(&m);
    }
    CHECK(n_caught > finds(100) && n_kept > finds(100) && n_grads > finds(50));
}

/* With few chunks the search asks about every assignment; evaluation alone has no passes with gradients. */
static void test_few_chunks_and_no_passes(void)
{
    uint32_t n_planned = 0;
    for (uint32_t round = 0; round < cases(40); round++) {
        shape s = shape_of_few(&seed, 3, 30);
        model m;
        s.has_evaluation = true;
        model_new(&m, &s, &seed);
        m.input.when = round % 2 ? GM_IMMEDIATE : GM_DEFERRED;
        uint32_t c = (uint32_t)below(&seed, m.n_chunks);
        m.chunks[c].stays = true;
        if (below(&seed, 2) && !m.traces[m.n_traces - 1]->has_backward) {
            m.input.traces = &m.traces[m.n_traces - 1];
            m.input.n_traces = 1;
        }
        m.input.device_bytes =
            (staying_blocks(&m) + (size_t)below(&seed, whole_bytes(&m) / MODEL_BLOCK)) *
            MODEL_BLOCK;
        gm_plan *plan = checked_plan(&m);
        CHECK(!plan || is_all_here(plan, &m.chunks[c], c));
        n_planned += plan != NULL;
        gm_plan_free(plan);
        model_free(&m);
    }
    CHECK(n_planned > finds(20));
}

int main(void)
{
    test_no_more_than_has_to();
    test_nothing_of_them_leaves();
    test_checker_sees_who_leaves();
    test_few_chunks_and_no_passes();
    printf("stay: ok\n");
    return 0;
}
