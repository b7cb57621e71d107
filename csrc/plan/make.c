/* make.c - makes a plan, and adds a schedule to one.
 *
 * 1. A plan depends on its input alone: equal inputs give equal places, operations and hash. */
#include "plan/plan_impl.h"

#include <stdlib.h>

#define N_BEHIND 2u /* of a chunk's copy home, which takes as long as two others' backward */

static uint64_t hash_of(const gm_plan *plan)
{
    uint64_t hash = gm_fnv1a(UINT64_C(0xcbf29ce484222325), plan->n_blocks);
    for (uint32_t c = 0; c < plan->n; c++) {
        uint64_t what = (uint64_t)plan->class_of[c] << 1 | plan->is_late[c];
        what |= plan->is_speculated[c] ? 16 : 0;
        hash = gm_fnv1a(hash, what << 32 | plan->order[c]);
    }
    for (uint32_t i = 0; i < plan->n * GM_N_PIECES; i++) {
        const gm_place *place = &plan->places[i];
        hash = gm_fnv1a(hash, (uint64_t)place->base << 32 | place->length);
        hash = gm_fnv1a(hash, (uint64_t)place->offset << 1 | place->is_resident);
    }
    for (uint32_t i = 0; i < plan->n_schedules; i++) {
        const gm_schedule *schedule = &plan->schedules[i];
        hash = gm_fnv1a(hash, schedule->hash);
        for (uint32_t t = 0; t < schedule->n_ticks; t++) {
            hash = gm_fnv1a(hash, schedule->begin[t + 1]);
        }
        for (uint32_t j = 0; j < schedule->begin[schedule->n_ticks]; j++) {
            hash = gm_fnv1a(hash, (uint64_t)schedule->ops[j].kind << 32 | schedule->ops[j].chunk);
        }
    }
    return hash;
}

static void describe(const gm_problem *problem, gm_plan *plan)
{
    const gm_plan_input *input = problem->input;
    gm_plan_info *info = &plan->info;
    uint64_t ring_blocks = 0, ring_chunks = 0;
    for (uint32_t c = 0; c < plan->n; c++) {
        uint32_t cls = plan->class_of[c];
        const gm_place *grad = &plan->places[c * GM_N_PIECES + GM_GRAD];
        info->n_of_class[cls]++;
        info->bytes_of_class[cls] += input->chunks[c].bytes[GM_WEIGHT];
        if (input->chunks[c].numel == 0) {
            info->n_frozen_of_class[cls]++;
            info->frozen_bytes_of_class[cls] += input->chunks[c].bytes[GM_WEIGHT];
        }
        info->resident_grad_bytes += grad->is_resident ? grad->length * input->block_bytes : 0;
        const gm_place *gathered = &plan->places[c * GM_N_PIECES + GM_GATHERED];
        info->n_kept += gathered->is_resident;
        info->n_speculated += plan->is_speculated[c];
        info->spare_bytes += plan->is_speculated[c] ? gm_plan_spare(input, c, (gm_class)cls) : 0;
        info->kept_gathered_bytes +=
            gathered->is_resident ? gathered->length * input->block_bytes : 0;
        if (gm_is_streamed(cls)) {
            ring_chunks++;
            ring_blocks += input->chunks[c].blocks[GM_WEIGHT];
        }
    }
    info->weight_ring_bytes = plan->ring[GM_WEIGHT] * input->block_bytes;
    info->state_ring_bytes = plan->ring[GM_STATE] * input->block_bytes;
    info->grad_ring_bytes = plan->ring[GM_GRAD] * input->block_bytes;
    info->gathered_ring_bytes = plan->ring[GM_GATHERED] * input->block_bytes;
    info->unreduced_ring_bytes = plan->ring[GM_UNREDUCED] * input->block_bytes;
    info->prefetch = 0;
    if (ring_blocks > 0) {
        uint64_t held = plan->ring[GM_WEIGHT] * ring_chunks / ring_blocks;
        info->prefetch = held > 1 ? (uint32_t)held - 1 : 0;
    }
    info->n_blocks = plan->n_blocks;
    info->device_bytes = plan->n_blocks * input->block_bytes;
    info->when = input->when;
    info->n_ops = gm_plan_n_ops(plan);
    info->hash = hash_of(plan);
}

static gm_status make(const gm_plan_input *input, uint32_t n_behind, gm_plan **out)
{
    gm_problem problem;
    *out = NULL;
    GM_TRY(gm_problem_new(input, n_behind, &problem));
    gm_status status = gm_plan_search(&problem, out);
    if (status == GM_OK) {
        (*out)->n_behind = n_behind;
        describe(&problem, *out);
    }
    gm_problem_free(&problem);
    return status;
}

/* An opaque update that is speculated may write the gradient, and waits for its copy home: that
 * holds up compute, or, where the copy has time, memory. */
gm_status gm_plan_new(const gm_plan_input *input, gm_plan **out)
{
    gm_plan *late = NULL;
    bool has_copy = input->is_opaque && input->when == GM_DEFERRED && input->spare_bytes > 0;
    gm_status status = has_copy ? make(input, N_BEHIND, &late) : GM_OK;
    GM_TRY(status == GM_ERR_NOMEM ? GM_OK : status);
    status = make(input, 0, out);
    bool is_late_better =
        late && (status == GM_ERR_NOMEM ||
                 (status == GM_OK && late->info.step_seconds < (*out)->info.step_seconds));
    if (is_late_better) {
        gm_plan_free(*out);
        *out = late;
        return GM_OK;
    }
    gm_plan_free(late);
    return status;
}

gm_status gm_plan_add_trace(gm_plan *plan, const gm_plan_input *input, const gm_trace *trace)
{
    gm_problem problem;
    gm_course course;
    gm_schedule added;
    if (gm_plan_find(plan, trace->hash)) {
        return GM_OK;
    }
    GM_FAIL_IF(input->n_chunks != plan->n, GM_ERR_ARG, "plan: made for %u chunks, not for %u",
               plan->n, input->n_chunks);
    GM_TRY(gm_problem_new(input, plan->n_behind, &problem));
    gm_status status = gm_course_new(input, trace, 0, plan->n_behind, &course);
    if (status == GM_OK) {
        gm_schedule *schedules =
            realloc(plan->schedules, (plan->n_schedules + 1) * sizeof *schedules);
        if (schedules) {
            plan->schedules = schedules;
            status = gm_schedule_new(&problem, plan, &course, &added);
        } else {
            status = GM_FAIL(GM_ERR_NOMEM, "host: no room for one more schedule");
        }
        if (status == GM_OK) {
            plan->schedules[plan->n_schedules++] = added;
            plan->info.n_ops += added.begin[added.n_ticks];
            plan->info.hash = hash_of(plan);
        }
        gm_course_free(&course);
    }
    gm_problem_free(&problem);
    return status;
}
