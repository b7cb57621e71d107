/* check.c - what holds between any two calls of an engine that is not dead. */
#include "engine/engine_impl.h"

/* What is counted of a chunk is what its parameters say, and its update waits once. */
static gm_status check_counts(const gm_engine *engine, uint32_t chunk)
{
    const gm_chunk_state *state = &engine->chunk_states[chunk];
    uint32_t n_held = 0, n_unreduced = 0;
    for (uint32_t i = 0; i < state->n_params; i++) {
        const gm_param *p = &engine->params[engine->chunk_params[state->first_param + i]];
        n_held += gm_is_held(p);
        n_unreduced += gm_is_unreduced(p);
        GM_FAIL_IF(p->sum == GM_SUM_RIGHT && !gm_is_held(p), GM_ERR_STATE,
                   "chunk %u: a norm of a gradient that is not there", chunk);
    }
    GM_FAIL_IF(n_held != state->n_held || n_unreduced != state->n_unreduced, GM_ERR_STATE,
               "chunk %u: %u gradients and %u before their sum, %u and %u counted", chunk, n_held,
               n_unreduced, state->n_held, state->n_unreduced);
    GM_FAIL_IF(gm_chunks_pins(engine->chunks, chunk, GM_STATE) +
                       gm_chunks_pins(engine->chunks, chunk, GM_GRAD) >
                   0,
               GM_ERR_STATE, "chunk %u: states or gradient are pinned for an update that is over",
               chunk);
    return state->update != GM_UPDATE_ARMED || engine->update.is_armed
               ? GM_OK
               : GM_FAIL(GM_ERR_STATE, "chunk %u: its update waits for a backward that is over",
                         chunk);
}

/* Whatever tensors may read is pinned: what was touched, and what leases show. */
static gm_status check_pins(const gm_engine *engine)
{
    for (uint32_t i = 0; i < engine->unit.n_touched; i++) {
        uint32_t chunk = engine->unit.touched[i].chunk;
        GM_FAIL_IF(!engine->unit.is_touched[chunk] ||
                       gm_chunks_pins(engine->chunks, chunk, engine->shown) == 0,
                   GM_ERR_STATE, "chunk %u: touched and not pinned", chunk);
    }
    uint32_t n_pinned = 0;
    for (const gm_lease *lease = engine->watch.leases; lease; lease = lease->next) {
        n_pinned += lease->is_pinned;
        uint32_t chunk = engine->params[lease->param].place.chunk;
        GM_FAIL_IF(lease->is_pinned && gm_chunks_pins(engine->chunks, chunk, engine->shown) == 0,
                   GM_ERR_STATE, "chunk %u: leased and not pinned", chunk);
    }
    return n_pinned == engine->watch.n_pinned
               ? GM_OK
               : GM_FAIL(GM_ERR_STATE, "%u leases are pinned, %u counted", n_pinned,
                         engine->watch.n_pinned);
}

gm_status gm_check_state(const gm_engine *engine)
{
    uint32_t n_pending = 0;
    for (uint32_t chunk = 0; chunk < gm_layout_n_chunks(engine->layout); chunk++) {
        GM_TRY(check_counts(engine, chunk));
        n_pending += gm_is_pending(engine, chunk);
    }
    GM_FAIL_IF(n_pending != engine->update.n_pending, GM_ERR_STATE,
               "%u updates are pending, %u counted", n_pending, engine->update.n_pending);
    GM_FAIL_IF((engine->room.plan != NULL) != gm_chunks_has_placement(engine->chunks), GM_ERR_STATE,
               "a plan without its places, or places without a plan");
    GM_TRY(check_pins(engine));
    return gm_chunks_check(engine->chunks);
}
