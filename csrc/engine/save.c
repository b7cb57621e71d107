/* save.c - the calls of whoever writes a checkpoint while training goes on; see saving.c.
 *
 * The writer is one thread.  It drains no leases and issues no updates: both may wait for it. */
#include "engine/engine_impl.h"

#include <string.h>

/* What may change before anybody is told is copied now. */
static gm_status copy_what_is_shown(gm_engine *engine)
{
    for (const gm_lease *lease = engine->watch.leases; lease; lease = lease->next) {
        if (engine->shown == GM_WEIGHT && gm_watch_is_on(engine, lease)) {
            GM_TRY(gm_saving_keep_at_once(engine, engine->params[lease->param].place.chunk));
        }
    }
    for (uint32_t chunk = 0; chunk < gm_layout_n_chunks(engine->layout); chunk++) {
        if (gm_saving_is_unseen(engine, chunk)) {
            GM_TRY(gm_saving_keep_at_once(engine, chunk));
        }
    }
    return GM_OK;
}

gm_status gm_engine_save_begin(gm_engine *engine, const uint32_t *params, uint32_t n, size_t limit)
{
    for (uint32_t i = 0; i < n; i++) {
        GM_TRY(gm_engine_check_param(engine, params[i]));
    }
    GM_TRY(gm_call_begin(engine));
    gm_status status = GM_OK;
    for (uint32_t i = 0; status == GM_OK && i < n; i++) {
        status = gm_update_check_between(engine, engine->params[params[i]].place.chunk);
    }
    status = status == GM_OK ? gm_watch_poll(engine) : status;
    status = status == GM_OK ? gm_glance_settle(engine) : status;
    status = status == GM_OK ? gm_update_issue_all(engine) : status;
    status = status == GM_OK ? gm_ranks_settle(engine) : status; /* later failures are not of it */
    if (status == GM_OK) {
        status = gm_saving_begin(engine, params, n, limit);
        if (status == GM_OK && (status = copy_what_is_shown(engine)) != GM_OK) {
            gm_saving_end(engine, NULL);
        }
    }
    return gm_call_end(engine, status);
}

/* Elements [first, first + n) of the part, out of the copy of its chunk. */
static void read_copy(const gm_engine *engine, const gm_param *p, gm_field field, uint64_t first,
                      uint64_t n, const uint8_t *weights, const uint8_t *states, void *dst)
{
    gm_slice s = gm_field_slice(engine, p, field);
    size_t width = s.bytes / p->part_numel;
    const uint8_t *from = (s.piece == GM_WEIGHT ? weights : states) + s.offset + width * first;
    if (field != GM_FIELD_MASTER) {
        memcpy(dst, from, width * n);
        return;
    }
    gm_slice high = gm_field_slice(engine, p, GM_FIELD_WEIGHT);
    gm_merge_host(p->spec.format, weights + high.offset + p->spec.weight_bytes * first, from, dst,
                  n, NULL);
}

/* What the chunk has may be read, under the engine's lock. */
static gm_status begin_locked(gm_engine *engine, uint32_t chunk)
{
    GM_FAIL_IF(engine->dead != GM_OK, engine->dead, "the engine was closed by an error: %s",
               engine->dead_text);
    GM_FAIL_IF(atomic_load(&engine->update.async_status) != GM_OK, GM_ERR_STATE,
               "an update on the host failed");
    gm_saving_note_read(engine, chunk);
    return GM_OK;
}

gm_status gm_engine_save_read(gm_engine *engine, uint32_t id, gm_field field, uint64_t first,
                              uint64_t n, void *dst, bool *out)
{
    *out = n == 0;
    GM_TRY(gm_engine_check_param(engine, id));
    const gm_param *p = &engine->params[id];
    bool is_inside = first >= p->part_first && first - p->part_first <= p->part_numel &&
                     n <= p->part_numel - (first - p->part_first);
    GM_FAIL_IF(!is_inside || field == GM_FIELD_GRAD ||
                   (field == GM_FIELD_MASTER && !p->spec.has_low),
               GM_ERR_ARG, "no such elements of %s here", gm_engine_name(engine, id));
    if (n == 0) {
        return GM_OK;
    }
    first -= p->part_first;
    gm_saving_way way;
    const uint8_t *weights, *states;
    GM_TRY(gm_saving_reach(engine, p->place.chunk, &way, &weights, &states));
    gm_status status = GM_OK;
    if (way == GM_SAVING_COPIED) { /* which only this thread drops */
        read_copy(engine, p, field, first, n, weights, states, dst);
    } else if (way == GM_SAVING_LOCKED) {
        status = begin_locked(engine, p->place.chunk);
        status = status == GM_OK ? gm_field_read(engine, p, field, first, n, dst) : status;
        gm_engine_unlock(engine);
    }
    *out = status == GM_OK && way != GM_SAVING_OTHERS_FIRST;
    return status;
}

gm_status gm_engine_save_states(gm_engine *engine, uint32_t id, uint64_t first, uint64_t n,
                                void *dst, bool *out)
{
    *out = n == 0;
    GM_TRY(gm_opaque_check_states(engine, id, first, n));
    if (n == 0) {
        return GM_OK;
    }
    const gm_param *p = &engine->params[id];
    uint32_t chunk = p->place.chunk;
    gm_saving_way way;
    const uint8_t *weights, *states;
    GM_TRY(gm_saving_reach(engine, chunk, &way, &weights, &states));
    gm_status status = GM_OK;
    size_t at = p->state_offset + first;
    if (way == GM_SAVING_COPIED) {
        memcpy(dst, states + at, n);
    } else if (way == GM_SAVING_LOCKED) {
        status = begin_locked(engine, chunk);
        status = status == GM_OK ? gm_chunks_read(engine->chunks, chunk, GM_STATE, at, n, dst, NULL)
                                 : status;
        gm_engine_unlock(engine);
    }
    *out = status == GM_OK && way != GM_SAVING_OTHERS_FIRST;
    return status;
}

gm_status gm_engine_save_done(gm_engine *engine, uint32_t chunk)
{
    GM_FAIL_IF(chunk >= gm_layout_n_chunks(engine->layout), GM_ERR_ARG, "chunk %u does not exist",
               chunk);
    gm_saving_done(engine, chunk);
    return gm_saving_check(engine);
}

gm_status gm_engine_save_end(gm_engine *engine, gm_saving_use *out)
{
    gm_status status = gm_saving_check(engine);
    gm_saving_end(engine, out);
    return status;
}
