/* test_plan_ranks.c - plans of several ranks: what every one must keep, a checker that can fail, and how good they are. */
#include <time.h>

#include "plan.h"
#include "plan_impl.h"
#include "plan_model.h"

static uint64_t seed = 23;

static void random_shared(model *m, const shape *s)
{
    model_new(m, s, &seed);
    share_model(m, 2 + (uint32_t)below(&seed, 7), below(&seed, 6) == 0,
                below(&seed, 4) ? 0 : 1 + (uint32_t)below(&seed, 8), &seed);
    m->input.when = below(&seed, 2) ? GM_IMMEDIATE : GM_DEFERRED;
}

static void test_random_models(void)
{
    uint32_t n_fit = 0, n_not = 0, n_of_class[GM_N_CLASSES] = {0}, n_kept = 0, n_ring = 0;
    for (int round = 0; round < 250; round++) {
        shape s = random_shape(&seed);
        s.is_cut = below(&seed, 3) == 0;
        model m;
        random_shared(&m, &s);
        m.input.policy = (gm_policy)(below(&seed, 6) < 4 ? 0 : below(&seed, 3));
        m.input.state_share = below(&seed, 3) ? 1 : 0.01 * (double)below(&seed, 100);
        m.input.stage_blocks = below(&seed, 2) ? 0 : 1 + (uint32_t)below(&seed, 12);
        size_t whole = whole_bytes(&m) / MODEL_BLOCK;
        m.input.device_bytes = (size_t)below(&seed, 1 + whole + whole / 4) * MODEL_BLOCK;
        gm_plan *plan;
        gm_status status = gm_plan_new(&m.input, &plan);
        if (status == GM_ERR_NOMEM) {
            CHECK(strstr(gm_last_error(), "bytes") && strstr(gm_last_error(), "available"));
            CHECK(m.input.device_bytes < whole_bytes(&m) + MODEL_BLOCK);
            n_not++;
        } else {
            CHECK_OK(status);
            if (gm_plan_check(plan, &m.input) != GM_OK) {
                fprintf(stderr, "round %d when %d policy %d\n", round, m.input.when,
                        m.input.policy);
            }
            CHECK_OK(gm_plan_check(plan, &m.input));
            const gm_plan_info *info = gm_plan_get_info(plan);
            CHECK(info->device_bytes <= m.input.device_bytes);
            CHECK(info->step_seconds >= info->compute_seconds);
            CHECK(info->step_seconds >= info->comm_seconds);
            n_kept += info->n_kept > 0 && info->gathered_ring_bytes > 0;
            n_ring += info->gathered_ring_bytes > 0;
            for (uint32_t k = 0; k < GM_N_CLASSES; k++) {
                n_of_class[k] += info->n_of_class[k];
            }
            gm_plan_free(plan);
            n_fit++;
        }
        model_free(&m);
    }
           n_of_class[0], n_of_class[1], n_of_class[2], n_of_class[3], n_of_class[4]);
    CHECK(n_fit > 100 && n_not > 10 && n_kept > 20 && n_ring > 50);
    for (uint32_t k = 0; k < GM_N_CLASSES; k++) {
        CHECK(n_of_class[k] > 10);
    }
}

int main(void)
{
    test_random_models();
    printf("test_plan_ranks: ok\n");
    return 0;
}
