/* view.c - what the engine shows of itself: figures, its plan, a timeline.  Changes nothing. */
#include "engine/engine_impl.h"

#include <string.h>

void gm_engine_get_stats(gm_engine *engine, gm_engine_stats *out)
{
    pthread_mutex_lock(&engine->lock);
    gm_chunks_stats table;
    gm_chunks_get_stats(engine->chunks, &table);
    uint64_t n_late = atomic_load(&engine->update.n_late), n_immediate = 0;
    size_t state_bytes = 0, weight_bytes = 0;
    uint32_t n_with_states = 0, n_leases = 0;
    for (uint32_t id = 0; id < gm_layout_n_chunks(engine->layout); id++) {
        weight_bytes += gm_engine_piece_blocks(engine, id, GM_WEIGHT);
        for (int piece = 0; piece < GM_N_PIECES; piece++) {
            state_bytes += gm_engine_piece_blocks(engine, id, (gm_piece)piece);
        }
        n_immediate += atomic_load(&engine->chunk_states[id].n_immediate);
        n_with_states += gm_chunks_is_resident(engine->chunks, id, GM_STATE) &&
                         gm_engine_piece_blocks(engine, id, GM_STATE) > 0;
    }
    for (const gm_lease *lease = engine->watch.leases; lease; lease = lease->next) {
        n_leases += lease->is_pinned && !atomic_load(&lease->is_ended);
    }
#define X(type, name, value) .name = (value),
    *out = (gm_engine_stats){GM_ENGINE_COUNTS(X) GM_ENGINE_SECONDS(X)};
#undef X
    gm_engine_unlock(engine);
}

void gm_engine_leased(gm_engine *engine, bool *out)
{
    pthread_mutex_lock(&engine->lock);
    memset(out, 0, engine->n_params * sizeof *out);
    for (const gm_lease *lease = engine->watch.leases; lease; lease = lease->next) {
        out[lease->param] |= lease->is_pinned && !atomic_load(&lease->is_ended);
    }
    gm_engine_unlock(engine);
}

void gm_engine_chunks(gm_engine *engine, gm_engine_chunk *out)
{
    pthread_mutex_lock(&engine->lock);
    uint32_t n = gm_layout_n_chunks(engine->layout);
    for (uint32_t id = 0; id < n; id++) {
        const gm_chunk_state *state = &engine->chunk_states[id];
        out[id] = (gm_engine_chunk){.n_uses = gm_chunks_pins(engine->chunks, id, engine->shown),
                                    .is_pending = gm_is_pending(engine, id)};
        for (int piece = 0; piece < GM_N_PIECES; piece++) {
            bool is_resident = gm_chunks_is_resident(engine->chunks, id, (gm_piece)piece);
            out[id].is_resident[piece] = is_resident;
            out[id].is_dirty[piece] =
                is_resident && gm_chunks_is_dirty(engine->chunks, id, (gm_piece)piece);
            out[id].bytes[piece] = gm_engine_piece_bytes(engine, id, (gm_piece)piece);
        }
        for (uint32_t i = 0; i < state->n_params; i++) {
            const gm_param *p = &engine->params[engine->chunk_params[state->first_param + i]];
            out[id].n_trained += p->spec.has_grad;
            out[id].n_done += p->grad != GM_GRAD_NONE && p->grad != GM_GRAD_USED_UP;
        }
    }
    gm_engine_unlock(engine);
}

bool gm_engine_plan(gm_engine *engine, gm_plan_info *out, gm_class *out_classes)
{
    pthread_mutex_lock(&engine->lock);
    const gm_plan *plan = engine->room.plan;
    if (plan) {
        *out = *gm_plan_get_info(plan);
    }
    for (uint32_t id = 0; plan && id < gm_layout_n_chunks(engine->layout); id++) {
        out_classes[id] = gm_plan_class(plan, id);
    }
    gm_engine_unlock(engine);
    return plan != NULL;
}

gm_status gm_engine_timeline_begin(gm_engine *engine, uint32_t capacity)
{
    GM_TRY(gm_call_begin(engine));
    gm_status status = engine->timeline
                           ? GM_FAIL(GM_ERR_STATE, "a timeline is being recorded already")
                           : gm_timeline_new(engine->device, capacity, &engine->timeline);
    if (status == GM_OK) {
        gm_chunks_set_timeline(engine->chunks, engine->timeline);
    }
    return gm_call_end(engine, status);
}

gm_status gm_engine_timeline_end(gm_engine *engine, gm_timeline **out)
{
    GM_TRY(gm_call_begin(engine));
    *out = engine->timeline;
    engine->timeline = NULL;
    gm_chunks_set_timeline(engine->chunks, NULL);
    gm_status status =
        *out ? gm_timeline_finish(*out) : GM_FAIL(GM_ERR_STATE, "no timeline is being recorded");
    return gm_call_end(engine, status);
}

uint64_t gm_engine_n_immediate(const gm_engine *engine, uint32_t id)
{
    return id < engine->n_params
               ? atomic_load(&engine->chunk_states[engine->params[id].place.chunk].n_immediate)
               : 0;
}

gm_status gm_engine_check(gm_engine *engine)
{
    GM_TRY(gm_call_begin(engine));
    gm_status status = gm_check_state(engine);
    status = status == GM_OK ? gm_chunks_check_bytes(engine->chunks) : status;
    return gm_call_end(engine, status);
}
