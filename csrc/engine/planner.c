/* planner.c - when a plan is made of what was traced, adopting it, and learning from its steps.
 *
 * The host may wait in: gm_planner_run (between passes). */
#include "engine/engine_impl.h"

void gm_planner_learn(gm_engine *engine, const gm_trace *trace)
{
    gm_inputs in = {0};
    if (gm_inputs_fill(engine, &in) == GM_OK) {
        gm_room_want_plan(engine, gm_plan_add_trace(engine->room.plan, &in.plan, trace) != GM_OK);
    }
    gm_inputs_free(&in);
}

/* When another process has taken memory meanwhile, the plan is made again for what could be had. */
static gm_status adopt(gm_engine *engine, gm_inputs *in, gm_plan *plan)
{
    for (int i = 0;; i++) {
        uint32_t n_blocks = 0;
        size_t bytes = gm_plan_n_blocks(plan) * engine->device->block_bytes;
        gm_status status = gm_chunks_set_limit(engine->chunks, bytes, NULL);
        status = status == GM_OK ? gm_chunks_adopt(engine->chunks, plan, &n_blocks) : status;
        status = status == GM_OK ? gm_stage_new(engine) : status;
        if (status == GM_OK) {
            gm_room_follow(engine, plan);
            gm_speculation_take_room(engine);
            return GM_OK;
        }
        gm_plan_free(plan);
        (void)gm_chunks_set_limit(engine->chunks, gm_room_limit(engine), NULL);
        if (status != GM_ERR_NOMEM || i == GM_MOST_TRIES ||
            n_blocks == 0) { /* 0: the host's, maybe */
            return status;
        }
        size_t had = n_blocks * engine->device->block_bytes, has = gm_inputs_device_bytes(engine);
        in->plan.device_bytes = has < had ? has : had;
        GM_TRY(gm_plan_new(&in->plan, &plan));
    }
}

static bool has_same_plan(const gm_engine *engine, const gm_plan *plan)
{
    return engine->room.plan &&
           gm_plan_get_info(engine->room.plan)->hash == gm_plan_get_info(plan)->hash;
}

static gm_status run_alone(gm_engine *engine)
{
    if (!engine->room.wants_plan || engine->inputs.runs.n == 0 || engine->inputs.rates.h2d <= 0) {
        return GM_OK;
    }
    gm_plan *plan = NULL;
    gm_inputs in = {0};
    gm_room_end_wish(engine);
    gm_inputs_correct_rate(engine, gm_inputs_seen_rate(engine));
    gm_status status = gm_inputs_fill(engine, &in);
    status = status == GM_OK ? gm_plan_new(&in.plan, &plan) : status;
#ifdef GM_DEBUG
    GM_ASSERT(status != GM_OK || gm_plan_check(plan, &in.plan) == GM_OK);
#endif
    if (status == GM_OK && has_same_plan(engine, plan)) {
        gm_plan_free(engine->room.plan); /* same places and operations, newer predictions */
        gm_room_set_plan(engine, plan);
    } else if (status == GM_OK) {
        status = gm_update_issue_all(engine); /* in the places they know */
        gm_plan_free(engine->room.plan);
        gm_room_set_plan(engine, NULL);
        if (status == GM_OK) {
            status = adopt(engine, &in, plan);
        } else {
            gm_plan_free(plan);
        }
        if (status != GM_OK) {
            (void)gm_room_drop_plan(engine);
        }
    } else if (engine->room.plan) { /* the old plan is too large for what there is now */
        (void)gm_room_drop_plan(engine);
    }
    gm_inputs_free(&in);
    return status;
}

bool gm_planner_is_settling(const gm_engine *engine)
{
    return !engine->room.plan || engine->room.wants_plan ||
           (engine->inputs.is_tuned && !gm_timer_has_settled(engine));
}

/* The plan is there to stay: what it keeps on the device needs no homes. */
static gm_status settle(gm_engine *engine)
{
    if (engine->room.is_settled || gm_planner_is_settling(engine)) {
        return GM_OK;
    }
    gm_room_note_settled(engine);
    return gm_chunks_drop_homes(engine->chunks, engine->room.plan);
}

gm_status gm_planner_run(gm_engine *engine)
{
    gm_room_lift_limit(engine); /* a plan looks for itself at what the device has */
    gm_room_want_plan(engine, gm_timer_resolve(engine)); /* of the first steps only */
    gm_status status = engine->ranks.stream ? gm_planner_ranks_run(engine) : run_alone(engine);
    gm_inputs_forget_runs(engine);
    return status == GM_OK ? settle(engine) : status;
}
