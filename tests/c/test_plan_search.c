/* test_plan_search.c - how good plans are: against all choices on small cases, over budgets, on models of the size
 * that people train, and how long planning takes. */
#include "plan_proof.h"

static uint64_t seed = 5;

static void test_against_brute_force(void)
{
    double worst = 0;
    uint32_t n_compared = 0;
    for (uint32_t round = 0; round < cases(60); round++) {
        shape s = shape_of_few(&seed, 4, 30);
        model m;
        model_new(&m, &s, &seed);
        m.input.when = round % 2 ? GM_IMMEDIATE : GM_DEFERRED;
        m.input.device_bytes = whole_bytes(&m) / 100 * (10 + below(&seed, 90));
        gm_plan *plan = checked_plan(&m);
        if (m.n_chunks <= 5 && m.n_traces > 0 && plan) {
            compare_with_best(&m, plan, &worst);
            n_compared++;
        }
        gm_plan_free(plan);
        model_free(&m);
    }
    CHECK(n_compared > finds(25));
    printf("worst against brute force: %.3f over %u cases\n", worst, n_compared);
}

/* Models that people train, on the rates of one machine: what must be reached, and how near to the bound it is. */
static void test_real_sizes(void)
{
    static const struct {
        const char *name;
        uint32_t n;
        uint64_t numel;
        double compute, bytes;
        uint32_t n_runs;
        double most[2]; /* seconds, deferred and immediate */
    } cases[] = {
        {"3.4G, 24 GB", 215, 16000000, 0.68, 12e9, 1, {1.0, 0.75}},
        {"3.4G, 48 GB", 215, 16000000, 0.68, 36e9, 1, {0.73, 0.716}},
        {"6.7G, 24 GB", 400, 16750000, 0.665, 15e9, 1, {1.55, 1.0}},
        {"6.7G, 4 passes", 400, 16750000, 0.665, 15e9, 4, {3.69, 3.10}},
        {"3.4G, 4 GB", 215, 16000000, 0.68, 4e9, 1, {1.1, 0.75}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        model m;
        model_of_units(&m, cases[i].n, cases[i].numel, cases[i].compute);
        m.n_runs[0] = cases[i].n_runs;
        for (int when = 0; when < 2; when++) {
            gm_plan_info info = plan_of(&m, (gm_when)when, cases[i].bytes);
            print_info(cases[i].name, &info);
            CHECK(info.step_seconds <= cases[i].most[when]);
            CHECK(info.step_seconds <= 1.10 * info.bound_seconds);
        }
        model_free(&m);
    }
}

/* With spares on the host a deferred step is nearly an immediate one, and what they may take is kept to. */
static void test_speculation(void)
{
    static const struct {
        double bytes, spares, most; /* seconds */
    } cases[] = {{12e9, 0, 1.0}, {12e9, 20e9, 0.80}, {12e9, 35e9, 0.75}, {4e9, 35e9, 0.78}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        model m;
        model_of_units(&m, 215, 16000000, 0.68);
        m.input.device_bytes = (size_t)cases[i].bytes;
        m.input.spare_bytes = (size_t)cases[i].spares;
        gm_plan *plan = checked_plan(&m);
        const gm_plan_info *info = gm_plan_get_info(plan);
        CHECK(info->step_seconds <= cases[i].most);
        CHECK(info->spare_bytes <= m.input.spare_bytes);
        CHECK((info->n_speculated > 0) == (cases[i].spares > 0));
        gm_plan_free(plan);
        model_free(&m);
    }
}

/* More memory is slower by 6 % at most.  With room for everything the plan takes it, though the model would
 * hide some updates on the host for free. */
static void test_budgets(void)
{
    double worst = 1;
    for (uint32_t round = 0; round < cases(5); round++) {
        model m;
        curve k = {.worst = worst};
        uint32_t n = 8 + (uint32_t)below(&seed, 40);
        double compute = 0.001 * n * (double)(1 + below(&seed, 3));
        model_of_units(&m, n, 4000000 + below(&seed, 20000000), compute);
        m.n_runs[0] = 1 + (uint32_t)below(&seed, 3);
        for (uint32_t part = 3; part < 32; part++) {
            double bytes = (double)(whole_bytes(&m) / 32 * part);
            curve_add(&k, part, plan_of(&m, (gm_when)(round % 2), bytes).step_seconds);
        }
        worst = k.worst;
        gm_plan_info all = plan_of(&m, (gm_when)(round % 2), (double)whole_bytes(&m));
        CHECK(all.n_of_class[GM_CLASS_R] == m.input.n_chunks && all.h2d_bytes == 0);
        model_free(&m);
    }
    printf("slower with more memory: at most %.4f\n", worst);
    CHECK(worst <= 1.06);
}

/* With updates that cost no time only traffic counts, and more memory never means more of it, but for what the states
 * of one chunk may add where the search is not exhaustive. */
static void test_traffic(void)
{
    for (uint32_t round = 0; round < cases(4); round++) {
        model m;
        size_t before = SIZE_MAX / 2;
        model_of_units(&m, 8 + (uint32_t)below(&seed, 40), 4000000 + below(&seed, 20000000), 1e5);
        m.input.rates.host_adam = m.input.rates.host_adam_beside = 1e15;
        m.input.rates.device_adam = 1e15;
        for (uint32_t part = 3; part <= 33; part++) {
            gm_plan_info info =
                plan_of(&m, (gm_when)(round % 2), (double)(whole_bytes(&m) / 32 * part));
            CHECK(info.h2d_bytes + info.d2h_bytes <= before + m.chunks[0].bytes[GM_STATE]);
            before = info.h2d_bytes + info.d2h_bytes;
        }
        CHECK(before == 0);
        model_free(&m);
    }
}

/* A hundred thousand operations are planned within a second of this thread, search included. */
static void test_planning_time(void)
{
    for (int when = 0; when < 2; when++) {
        model m;
        model_of_units(&m, 28000, 1000000, 2.0);
        m.n_runs[0] = 4;
        m.input.when = (gm_when)when;
        m.input.device_bytes = whole_bytes(&m) / 5;
        CHECK(plan_with_bounded_work(&m) + m.traces[0]->n > 100000);
        model_free(&m);
    }
}

int main(void)
{
    test_against_brute_force();
    test_real_sizes();
    test_speculation();
    test_budgets();
    test_traffic();
    test_planning_time();
    printf("test_plan_search: ok\n");
    return 0;
}
