/* plan.c - the plan as others see it: once it is made it is only read. */
#include "plan/plan.h"

#include <stdlib.h>
#include <string.h>

#include "plan/plan_impl.h"

void gm_plan_free(gm_plan *plan)
{
    if (plan) {
        for (uint32_t i = 0; i < plan->n_schedules; i++) {
            gm_schedule_free(&plan->schedules[i]);
        }
        free(plan->schedules);
        free(plan->class_of);
        free(plan->is_late);
        free(plan->is_speculated);
        free(plan->places);
        free(plan->order);
        free(plan);
    }
}

gm_status gm_plan_alloc(const gm_problem *problem, gm_plan **out)
{
    size_t n = problem->n;
    gm_plan *plan = calloc(1, sizeof *plan);
    if (plan) {
        *plan = (gm_plan){.n = problem->n,
                          .class_of = calloc(n, 1),
                          .is_late = calloc(n, sizeof(bool)),
                          .is_speculated = calloc(n, sizeof(bool)),
                          .places = calloc(n * GM_N_PIECES, sizeof(gm_place)),
                          .order = calloc(n, sizeof(uint32_t)),
                          .schedules = calloc(problem->n_courses, sizeof(gm_schedule))};
    }
    if (!plan || !plan->class_of || !plan->is_late || !plan->is_speculated || !plan->places ||
        !plan->order || !plan->schedules) {
        gm_plan_free(plan);
        return GM_FAIL(GM_ERR_NOMEM, "host: no room for a plan of %zu chunks", n);
    }
    memcpy(plan->order, problem->order, n * sizeof(uint32_t));
    *out = plan;
    return GM_OK;
}

uint64_t gm_plan_n_ops(const gm_plan *plan)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < plan->n_schedules; i++) {
        n += plan->schedules[i].begin[plan->schedules[i].n_ticks];
    }
    return n;
}

gm_class gm_plan_class(const gm_plan *plan, uint32_t chunk)
{
    return (gm_class)plan->class_of[chunk];
}

const gm_place *gm_plan_place(const gm_plan *plan, uint32_t chunk, gm_piece piece)
{
    return &plan->places[chunk * GM_N_PIECES + piece];
}

bool gm_plan_is_speculated(const gm_plan *plan, uint32_t chunk)
{
    return plan->is_speculated[chunk];
}

uint32_t gm_plan_n_blocks(const gm_plan *plan)
{
    return plan->n_blocks;
}

const gm_plan_info *gm_plan_get_info(const gm_plan *plan)
{
    return &plan->info;
}

const uint32_t *gm_plan_update_order(const gm_plan *plan)
{
    return plan->order;
}

const gm_schedule *gm_plan_find(const gm_plan *plan, uint64_t trace_hash)
{
    for (uint32_t i = 0; i < plan->n_schedules; i++) {
        if (plan->schedules[i].hash == trace_hash) {
            return &plan->schedules[i];
        }
    }
    return NULL;
}

const gm_op *gm_plan_ops(const gm_plan *plan, uint64_t trace_hash, uint32_t tick, uint32_t *out_n)
{
    const gm_schedule *schedule = gm_plan_find(plan, trace_hash);
    if (!schedule || tick >= schedule->n_ticks) {
        *out_n = 0;
        return NULL;
    }
    *out_n = schedule->begin[tick + 1] - schedule->begin[tick];
    return schedule->ops + schedule->begin[tick];
}

bool gm_plan_knows(const gm_plan *plan, uint64_t trace_hash)
{
    return gm_plan_find(plan, trace_hash) != NULL;
}
