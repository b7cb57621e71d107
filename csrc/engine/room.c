/* room.c - the engine's share of the device: what chunks may take beside others of this process,
 * whatever it takes to have a piece there, and giving room back.
 *
 * Invariant 7 of engine.c is kept here and by the plan. */
#include "engine/engine_impl.h"

#include <stdio.h>

enum { LEAST_SEEN_NS = 10 * 1000 * 1000 }; /* of updates on the host, which tell their rate */

void gm_room_init(gm_engine *engine, const gm_engine_options *options)
{
    engine->room.budget = options->device_budget;
    engine->room.shed_limit = SIZE_MAX;
    engine->room.outside_bytes = options->outside_bytes;
    engine->room.outside_context = options->outside_context;
}

void gm_room_lift_limit(gm_engine *engine)
{
    engine->room.shed_limit = SIZE_MAX;
}

void gm_room_want_plan(gm_engine *engine, bool wants)
{
    engine->room.wants_plan |= wants;
}

void gm_room_end_wish(gm_engine *engine)
{
    engine->room.wants_plan = false;
}

void gm_room_set_plan(gm_engine *engine, gm_plan *plan)
{
    engine->room.plan = plan;
    engine->room.host_ns = atomic_load(&engine->update.host_ns);
    engine->room.host_params = atomic_load(&engine->update.host_params);
}

void gm_room_follow(gm_engine *engine, gm_plan *plan)
{
    gm_room_set_plan(engine, plan);
    engine->room.is_settled = false;
    engine->room.n_plans++;
}

double gm_room_host_rate(const gm_engine *engine)
{
    unsigned long long ns = atomic_load(&engine->update.host_ns) - engine->room.host_ns;
    unsigned long long n = atomic_load(&engine->update.host_params) - engine->room.host_params;
    bool is_known = engine->room.plan && ns > LEAST_SEEN_NS;
    return is_known ? (double)n / ((double)ns * 1e-9) : 0;
}

void gm_room_note_settled(gm_engine *engine)
{
    engine->room.is_settled = true;
}

size_t gm_room_limit(const gm_engine *engine)
{
    if (engine->room.budget == SIZE_MAX) {
        return engine->room.shed_limit;
    }
    size_t outside =
        engine->room.outside_bytes ? engine->room.outside_bytes(engine->room.outside_context) : 0;
    outside += engine->sums.n_blocks * engine->device->block_bytes;
    size_t limit = engine->room.budget > outside ? engine->room.budget - outside : 0;
    return limit < engine->room.shed_limit ? limit : engine->room.shed_limit;
}

gm_status gm_room_drop_plan(gm_engine *engine)
{
    if (engine->room.plan != engine->weights.collectives) {
        gm_plan_free(engine->room.plan);
    }
    engine->room.plan = NULL;
    GM_TRY(gm_chunks_leave_placement(engine->chunks)); /* waits: the stage is idle after it */
    gm_stage_free(engine);
    return gm_chunks_set_limit(engine->chunks, gm_room_limit(engine), NULL);
}

/* As gm_room_drop_plan, and a plan is made after this step. */
static gm_status leave_plan(gm_engine *engine)
{
    if (!engine->room.plan) {
        return GM_OK;
    }
    engine->room.wants_plan = true;
    engine->room.n_breaks++;
    return gm_room_drop_plan(engine);
}

gm_status gm_room_pin(gm_engine *engine, uint32_t chunk, gm_piece piece, gm_stream stream)
{
    if (gm_chunks_is_resident(engine->chunks, chunk, piece)) {
        return gm_chunks_pin(engine->chunks, chunk, piece, stream);
    }
    if (engine->room.plan) {
        gm_status status = gm_chunks_pin(engine->chunks, chunk, piece, stream);
        if (status != GM_ERR_NOMEM) {
            return status;
        } /* its blocks are in use: this pass is not the one that was planned */
        GM_TRY(leave_plan(engine));
    } else if (engine->room.outside_bytes) {
        GM_TRY(gm_chunks_set_limit(engine->chunks, gm_room_limit(engine), NULL));
    }
    gm_status status = gm_chunks_pin(engine->chunks, chunk, piece, stream);
    if (status == GM_ERR_NOMEM && engine->room.shed_limit != SIZE_MAX) { /* no plan lifts it now */
        engine->room.shed_limit = SIZE_MAX;
        GM_TRY(gm_chunks_set_limit(engine->chunks, gm_room_limit(engine), NULL));
        status = gm_chunks_pin(engine->chunks, chunk, piece, stream);
    }
    for (bool has_more = true; status == GM_ERR_NOMEM && has_more;) {
        GM_TRY(gm_gathered_spill_one(engine, &has_more));
        status = has_more ? gm_chunks_pin(engine->chunks, chunk, piece, stream) : status;
    }
    return status;
}

/* What stays on the device has its bytes: whoever has asked for the room goes without. */
static bool note_refusal(gm_engine *engine, gm_status status, bool is_enough)
{
    char *out = engine->room.refusal;
    if (status != GM_OK) {
        snprintf(out, sizeof engine->room.refusal, "%s", gm_last_error());
    } else if (is_enough) {
        out[0] = '\0';
    } else {
        gm_chunks_say_staying(engine->chunks, out, sizeof engine->room.refusal);
    }
    return status == GM_OK && is_enough;
}

void gm_engine_refusal(gm_engine *engine, char *text, size_t size)
{
    pthread_mutex_lock(&engine->lock);
    snprintf(text, size, "%s", engine->room.refusal);
    gm_engine_unlock(engine);
}

bool gm_engine_reserve(gm_engine *engine, size_t bytes)
{
    pthread_mutex_lock(&engine->lock);
    size_t limit = gm_room_limit(engine), held = 0;
    bool has_room = limit == SIZE_MAX;
    if (!has_room && limit >= bytes) {
        gm_chunks_stats stats;
        gm_chunks_get_stats(engine->chunks, &stats);
        if (stats.device_bytes > limit - bytes) { /* the plan asks too much */
            (void)leave_plan(engine);
        }
        gm_status status = gm_chunks_set_limit(engine->chunks, limit - bytes, &held);
        has_room = note_refusal(engine, status, held <= limit - bytes);
    }
    gm_engine_unlock(engine);
    return has_room;
}

bool gm_engine_shed(gm_engine *engine, size_t bytes)
{
    pthread_mutex_lock(&engine->lock);
    gm_chunks_stats stats;
    gm_chunks_get_stats(engine->chunks, &stats);
    size_t before = stats.device_bytes, held = before;
    engine->room.shed_limit = before > bytes ? before - bytes : 0;
    gm_status status = leave_plan(engine);
    status = status == GM_OK ? gm_chunks_set_limit(engine->chunks, gm_room_limit(engine), &held)
                             : status;
    bool is_done = note_refusal(engine, status, held < before);
    engine->room.shed_limit = held;
    gm_engine_unlock(engine);
    return is_done;
}
