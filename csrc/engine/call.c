/* call.c - how every public call begins and ends: one caller at a time, no dead engine, ended leases first. */
#include "engine/engine_impl.h"

#include <stdio.h>
#include <stdlib.h>

static gm_status free_ended(gm_engine *engine)
{
    gm_lease **link = &engine->leases;
    while (*link) {
        gm_lease *lease = *link;
        engine->n_leases_walked++;
        if (!atomic_load(&lease->is_ended)) {
            link = &lease->next;
            continue;
        }
        uint32_t chunk = engine->params[lease->param].place.chunk;
        if (gm_watch_is_on(lease)) {
            GM_TRY(gm_watch_look(engine, lease));
        }
        gm_watch_note_use(engine, lease);
        bool was_pinned = lease->is_pinned;
        gm_stream stream = lease->stream;
        *link = lease->next;
        free(lease->old);
        free(lease);
        if (was_pinned) {
            GM_TRY(gm_weights_unpin(engine, chunk, stream, false));
        }
    }
    return GM_OK;
}

/* Every call asks; every parameter's storage is a lease: they are walked only after one has ended. */
static gm_status process_ended_leases(gm_engine *engine)
{
    if (!atomic_load(&engine->has_ended_lease)) {
        return GM_OK;
    }
    atomic_store(&engine->has_ended_lease,
                 false); /* first: one that ends meanwhile is seen later */
    gm_status status = free_ended(engine);
    if (status != GM_OK) {
        atomic_store(&engine->has_ended_lease, true);
    }
    return status;
}

static gm_status fail_dead(const gm_engine *engine)
{
    return GM_FAIL(engine->dead, "the engine is closed by an earlier error: %s", engine->dead_text);
}

/* A host update that has failed on its stream closes the engine, too. */
static void notice_failed_update(gm_engine *engine)
{
    gm_status async = (gm_status)atomic_load(&engine->async_status);
    if (async != GM_OK && engine->dead == GM_OK) {
        (void)gm_engine_die(engine, GM_FAIL(async, "an update on the host failed"));
    }
}

gm_status gm_call_begin(gm_engine *engine)
{
    pthread_mutex_lock(&engine->lock);
    notice_failed_update(engine);
    gm_status status = engine->dead == GM_OK ? process_ended_leases(engine) : fail_dead(engine);
    if (status != GM_OK) {
        pthread_mutex_unlock(&engine->lock);
    }
    return status;
}

gm_status gm_call_end(gm_engine *engine, gm_status status)
{
#ifdef GM_DEBUG /* after an error, too: nothing is half done */
    GM_ASSERT(engine->dead != GM_OK || gm_check_state(engine) == GM_OK);
#endif
    pthread_mutex_unlock(&engine->lock);
    return status;
}

bool gm_engine_salvage(gm_engine *engine, char *text, size_t size)
{
    pthread_mutex_lock(&engine->lock);
    notice_failed_update(engine);
    bool was_dead = engine->dead != GM_OK;
    if (was_dead) {
        snprintf(text, size, "%s", engine->dead_text);
        gm_update_forget_all(engine);
        atomic_store(&engine->async_status, GM_OK); /* also of what ended just now */
        engine->dead = GM_OK;
    }
    pthread_mutex_unlock(&engine->lock);
    return was_dead;
}

gm_status gm_engine_drain(gm_engine *engine)
{
    GM_TRY(gm_call_begin(engine));
    return gm_call_end(engine, GM_OK);
}
