/* gathered.c - the gathered weights of a chunk: which state they are in, and those that wait on the
 * host.
 *
 *                  gather                       update, write
 *            NONE --------> HELD ----------------------------------> OLD
 *                          |  ^ |                                     ^
 *                    spill v  | | their place is taken in use         |
 *                       SPILLED '-----------------------> ENDING -----' update, write
 *
 * HELD, SPILLED and ENDING are what a use needs.  What is OLD is gathered anew, and what is SPILLED
 * brought back: both are HELD then.  ENDING and OLD end with the last use, HELD with it on demand,
 * or when another chunk takes its place.  What ends is NONE or, as long as leases show it, LEASED;
 * so is what is gathered on demand for a lease.
 *
 * Under a plan gathered weights stay until another chunk is gathered over them, which is decided
 * for all ranks alike (weights.c, invariant 1).  A rank that has left the plan's placement may need
 * their blocks before: it keeps the bytes here, and the others do not notice.
 *
 * The host waits in: gm_gathered_spill_one, gm_gathered_bring_back. */
#include "engine/engine_impl.h"

#include <stdlib.h>

static const bool may_move[GM_N_GATHERED_STATES][GM_N_GATHERED_STATES] = {
    [GM_GATHERED_NONE] = {[GM_GATHERED_LEASED] = true, [GM_GATHERED_HELD] = true},
    [GM_GATHERED_LEASED] = {[GM_GATHERED_NONE] = true, [GM_GATHERED_HELD] = true},
    [GM_GATHERED_HELD] = {[GM_GATHERED_NONE] = true,
                          [GM_GATHERED_LEASED] = true,
                          [GM_GATHERED_SPILLED] = true,
                          [GM_GATHERED_ENDING] = true,
                          [GM_GATHERED_OLD] = true},
    [GM_GATHERED_SPILLED] = {[GM_GATHERED_NONE] = true, [GM_GATHERED_HELD] = true},
    [GM_GATHERED_ENDING] = {[GM_GATHERED_NONE] = true,
                            [GM_GATHERED_LEASED] = true,
                            [GM_GATHERED_OLD] = true},
    [GM_GATHERED_OLD] = {[GM_GATHERED_NONE] = true,
                         [GM_GATHERED_LEASED] = true,
                         [GM_GATHERED_HELD] = true},
};

static void move(gm_chunk_state *state, gm_gathered_state to)
{
    GM_ASSERT(state->gathered == to || may_move[state->gathered][to]);
    GM_ASSERT(state->n_uses == 0 || (to != GM_GATHERED_NONE && to != GM_GATHERED_SPILLED));
    GM_ASSERT(state->n_uses > 0 || to != GM_GATHERED_ENDING);
    if (state->gathered == GM_GATHERED_SPILLED) {
        free(state->spilled);
        state->spilled = NULL;
    }
    state->gathered = to;
}

bool gm_gathered_is_valid(const gm_engine *engine, uint32_t chunk)
{
    gm_gathered_state now = engine->chunk_states[chunk].gathered;
    return now == GM_GATHERED_HELD || now == GM_GATHERED_SPILLED || now == GM_GATHERED_ENDING;
}

void gm_gathered_note(gm_engine *engine, uint32_t chunk, bool is_held)
{
    move(&engine->chunk_states[chunk], is_held ? GM_GATHERED_HELD : GM_GATHERED_LEASED);
}

void gm_gathered_outdate(gm_engine *engine, uint32_t chunk)
{
    gm_chunk_state *state = &engine->chunk_states[chunk];
    bool is_shown = state->gathered == GM_GATHERED_HELD || state->gathered == GM_GATHERED_ENDING ||
                    state->gathered == GM_GATHERED_OLD;
    move(state, is_shown ? GM_GATHERED_OLD : GM_GATHERED_NONE);
}

gm_status gm_gathered_end(gm_engine *engine, uint32_t chunk)
{
    gm_chunk_state *state = &engine->chunk_states[chunk];
    GM_TRY(gm_chunks_discard(engine->chunks, chunk, GM_GATHERED)); /* unless a lease shows it */
    bool is_leased = gm_chunks_is_resident(engine->chunks, chunk, GM_GATHERED) &&
                     state->gathered != GM_GATHERED_NONE && state->gathered != GM_GATHERED_OLD;
    move(state, is_leased ? GM_GATHERED_LEASED : GM_GATHERED_NONE);
    return GM_OK;
}

gm_status gm_gathered_lose_place(gm_engine *engine, uint32_t chunk)
{
    gm_chunk_state *state = &engine->chunk_states[chunk];
    if (state->n_uses == 0) {
        return gm_gathered_end(engine, chunk);
    }
    move(state, state->gathered == GM_GATHERED_OLD ? GM_GATHERED_OLD : GM_GATHERED_ENDING);
    return GM_OK;
}

/* ---- on the host ---- */

static gm_status spill(gm_engine *engine, uint32_t chunk)
{
    gm_chunk_state *state = &engine->chunk_states[chunk];
    size_t bytes = gm_engine_piece_bytes(engine, chunk, GM_GATHERED);
    uint8_t *copy = malloc(bytes);
    GM_FAIL_IF(!copy, GM_ERR_NOMEM, "HOST: %zu bytes for gathered weights", bytes);
    GM_TRY_ELSE(gm_chunks_read_device(engine->chunks, chunk, GM_GATHERED, 0, bytes, copy),
                free(copy));
    move(state, GM_GATHERED_SPILLED);
    state->spilled = copy;
    return gm_chunks_discard(engine->chunks, chunk, GM_GATHERED);
}

gm_status gm_gathered_spill_one(gm_engine *engine, bool *out)
{
    gm_chunks *chunks = engine->chunks;
    *out = false;
    for (uint32_t id = 0; engine->shown == GM_GATHERED && id < gm_layout_n_chunks(engine->layout);
         id++) {
        if (gm_chunks_is_resident(chunks, id, GM_GATHERED) &&
            gm_chunks_pins(chunks, id, GM_GATHERED) == 0 &&
            gm_engine_piece_bytes(engine, id, GM_GATHERED) > 0) {
            *out = true;
            return gm_gathered_is_valid(engine, id) ? spill(engine, id)
                                                    : gm_gathered_end(engine, id);
        }
    }
    return GM_OK;
}

gm_status gm_gathered_bring_back(gm_engine *engine, uint32_t chunk)
{
    gm_chunk_state *state = &engine->chunk_states[chunk];
    GM_TRY(gm_chunks_write(engine->chunks, chunk, GM_GATHERED, 0,
                           gm_engine_piece_bytes(engine, chunk, GM_GATHERED), state->spilled,
                           engine->ranks.stream));
    move(state, GM_GATHERED_HELD);
    return GM_OK;
}

void gm_gathered_free(gm_engine *engine)
{
    for (uint32_t id = 0; engine->chunk_states && id < gm_layout_n_chunks(engine->layout); id++) {
        free(engine->chunk_states[id].spilled);
    }
}
