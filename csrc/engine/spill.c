/* spill.c - gathered weights that nobody uses now, on the host until they are used again or forgotten.
 *
 * Under a plan gathered weights stay until another chunk is gathered over them, which is decided for all ranks alike
 * (weights.c, invariant 1).  A rank that has left the plan's placement may need their blocks before: it keeps the bytes
 * here, and the others do not notice.
 *
 * The host waits in: gm_spill_one, gm_spill_write_back. */
#include "engine/engine_impl.h"

#include <stdlib.h>

void gm_spill_forget(gm_engine *engine, uint32_t chunk)
{
    free(engine->chunk_states[chunk].spilled);
    engine->chunk_states[chunk].spilled = NULL;
}

/* Device -> host. */
static gm_status save(gm_engine *engine, uint32_t chunk)
{
    size_t bytes = gm_engine_piece_bytes(engine, chunk, GM_GATHERED);
    uint8_t *copy = malloc(bytes);
    GM_FAIL_IF(!copy, GM_ERR_NOMEM, "HOST: %zu bytes for gathered weights", bytes);
    GM_TRY_ELSE(gm_chunks_read_device(engine->chunks, chunk, GM_GATHERED, 0, bytes, copy),
                free(copy));
    engine->chunk_states[chunk].spilled = copy;
    return GM_OK;
}

gm_status gm_spill_one(gm_engine *engine, bool *out)
{
    gm_chunks *chunks = engine->chunks;
    *out = false;
    for (uint32_t id = 0; engine->shown == GM_GATHERED && id < gm_layout_n_chunks(engine->layout);
         id++) {
        const gm_chunk_state *state = &engine->chunk_states[id];
        if (!gm_chunks_is_resident(chunks, id, GM_GATHERED) ||
            gm_chunks_pins(chunks, id, GM_GATHERED) > 0 ||
            gm_engine_piece_bytes(engine, id, GM_GATHERED) == 0) {
            continue;
        }
        if (state->is_gathered && state->gathered == state->version) { /* else gathered anew */
            GM_TRY(save(engine, id));
        }
        *out = true;
        return gm_chunks_discard(chunks, id, GM_GATHERED);
    }
    return GM_OK;
}

gm_status gm_spill_write_back(gm_engine *engine, uint32_t chunk)
{
    GM_TRY(gm_chunks_write(engine->chunks, chunk, GM_GATHERED, 0,
                           gm_engine_piece_bytes(engine, chunk, GM_GATHERED),
                           engine->chunk_states[chunk].spilled, engine->ranks.stream));
    gm_spill_forget(engine, chunk);
    return GM_OK;
}
