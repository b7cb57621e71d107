/* room.c - the engine's share of the device: what chunks may take beside others of this process, and giving it back.
 *
 * Invariant 7 of engine.c is kept here and by the plan. */
#include "engine/engine_impl.h"

/* The bytes of blocks that chunks may take now. */
size_t gm_engine_chunk_limit(const gm_engine *engine)
{
    if (engine->budget == SIZE_MAX) {
        return engine->shed_limit;
    }
    size_t outside = engine->outside_bytes ? engine->outside_bytes(engine->outside_context) : 0;
    outside += engine->n_sums_blocks * engine->device->block_bytes;
    size_t limit = engine->budget > outside ? engine->budget - outside : 0;
    return limit < engine->shed_limit ? limit : engine->shed_limit;
}

bool gm_engine_reserve(gm_engine *engine, size_t bytes)
{
    pthread_mutex_lock(&engine->lock);
    size_t limit = gm_engine_chunk_limit(engine), held = 0;
    bool has_room = limit == SIZE_MAX;
    if (!has_room && limit >= bytes) {
        gm_chunks_stats stats;
        gm_chunks_get_stats(engine->chunks, &stats);
        if (stats.device_bytes >
            limit - bytes) { /* more than was measured: the plan asks too much */
            (void)gm_replay_leave_plan(engine);
        }
        has_room = gm_chunks_set_limit(engine->chunks, limit - bytes, &held) == GM_OK &&
                   held <= limit - bytes;
    }
    pthread_mutex_unlock(&engine->lock);
    return has_room;
}

bool gm_engine_shed(gm_engine *engine, size_t bytes)
{
    pthread_mutex_lock(&engine->lock);
    gm_chunks_stats stats;
    gm_chunks_get_stats(engine->chunks, &stats);
    size_t before = stats.device_bytes, held = before;
    engine->shed_limit = before > bytes ? before - bytes : 0;
    bool is_done =
        gm_replay_leave_plan(engine) == GM_OK &&
        gm_chunks_set_limit(engine->chunks, gm_engine_chunk_limit(engine), &held) == GM_OK;
    engine->shed_limit = held;
    pthread_mutex_unlock(&engine->lock);
    return is_done && held < before;
}

gm_status gm_engine_forget_outside(gm_engine *engine)
{
    GM_TRY(gm_engine_begin_call(engine));
    gm_book_forget_outside(engine->book);
    return gm_engine_end_call(engine, GM_OK);
}

/* Bytes of blocks that a unit's chunks take while they are used, beside their shards: the most of all units. */
static size_t largest_transient(const gm_engine *engine)
{
    size_t largest = 0;
    for (uint32_t unit = 0; unit < engine->n_units; unit++) {
        size_t bytes = 0;
        for (uint32_t i = engine->unit_begin[unit]; i < engine->unit_begin[unit + 1]; i++) {
            bytes += gm_engine_piece_blocks(engine, engine->unit_chunks[i], GM_GATHERED) +
                     gm_engine_piece_blocks(engine, engine->unit_chunks[i], GM_UNREDUCED);
        }
        largest = bytes > largest ? bytes : largest;
    }
    return largest;
}

gm_status gm_engine_settle(gm_engine *engine, size_t reserve_bytes)
{
    GM_TRY(gm_engine_begin_call(engine));
    gm_status status = GM_OK;
    size_t limit = gm_engine_chunk_limit(engine), needed = reserve_bytes;
    if (engine->policy != GM_POLICY_AUTO || engine->plan) {
        return gm_engine_end_call(engine, GM_OK);
    }
    uint32_t n = gm_layout_n_chunks(engine->layout);
    for (uint32_t id = 0; id < n; id++) {
        needed += gm_engine_piece_blocks(engine, id, GM_WEIGHT);
    }
    needed += 2 * largest_transient(engine);
    status = gm_chunks_set_limit(engine->chunks, limit, NULL);
    for (uint32_t id = 0; id < n && status == GM_OK; id++) {
        needed += gm_engine_piece_blocks(engine, id, GM_STATE) +
                  gm_engine_piece_blocks(engine, id, GM_GRAD);
        if (needed > limit) {
            break;
        }
        if (gm_chunk_spec(engine, id)->has_moments) {
            status = gm_chunks_settle(engine->chunks, id);
            if (status == GM_ERR_NOMEM) { /* the device is fuller than the budget says */
                status = GM_OK;
                break;
            }
        }
    }
    return gm_engine_end_call(engine, status);
}
