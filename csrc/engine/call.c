/* call.c - how every public call begins and ends: one caller at a time, no dead engine, ended
 * leases first. */
#include "engine/engine_impl.h"

#include <stdio.h>
#include <stdlib.h>

/* Every call asks; every parameter's storage is a lease: they are walked only after one has
 * ended. */
static gm_status free_ended_leases(gm_engine *engine)
{
    gm_status status = GM_OK;
    gm_lease *lease, **at = gm_watch_first_ended(engine);
    while (status == GM_OK && at) {
        status = gm_watch_next_ended(engine, &at, &lease);
        if (status == GM_OK && lease) {
            uint32_t chunk = engine->params[lease->param].place.chunk;
            bool was_pinned = lease->is_pinned;
            gm_stream stream = lease->stream;
            free(lease->old);
            free(lease);
            status = was_pinned ? gm_weights_unpin(engine, chunk, stream, false) : GM_OK;
        }
    }
    if (status != GM_OK) {
        gm_watch_note_ended(engine);
    }
    return status;
}

/* A host update that has failed on its stream closes the engine, too. */
static void notice_failed_update(gm_engine *engine)
{
    gm_status async = (gm_status)atomic_load(&engine->update.async_status);
    if (async != GM_OK && engine->dead == GM_OK) {
        (void)gm_engine_die(engine, GM_FAIL(async, "an update on the host failed"));
    }
}

gm_status gm_call_check(const gm_engine *engine)
{
    GM_FAIL_IF(engine->dead != GM_OK, engine->dead,
               "the engine is closed by an earlier error: %s; it can only be closed now: "
               "engine.close(), then load a checkpoint into model and optimizer and manage() again",
               engine->dead_text);
    return GM_OK;
}

gm_status gm_call_begin(gm_engine *engine)
{
    GM_TRY(gm_check_process(engine->owner)); /* before a lock that nobody here may hold */
    pthread_mutex_lock(&engine->lock);
    gm_status status = gm_opaque_wait(engine);
    if (status == GM_OK) {
        notice_failed_update(engine);
        status = gm_call_check(engine);
    }
    status = status == GM_OK ? free_ended_leases(engine) : status;
    if (status != GM_OK) {
        gm_engine_unlock(engine);
    }
    return status;
}

gm_status gm_call_begin_on(gm_engine *engine, gm_stream stream)
{
    GM_TRY(gm_call_begin(engine));
    engine->call.stream = stream;
    return GM_OK;
}

gm_status gm_call_end(gm_engine *engine, gm_status status)
{
#ifdef GM_DEBUG /* after an error, too: nothing is half done */
    GM_ASSERT(engine->dead != GM_OK || gm_check_state(engine) == GM_OK);
#endif
    gm_engine_unlock(engine);
    return status;
}

bool gm_engine_salvage(gm_engine *engine, char *text, size_t size)
{
    pthread_mutex_lock(&engine->lock);
    if (gm_opaque_wait(engine) != GM_OK) { /* what runs is not over */
        gm_engine_unlock(engine);
        return false;
    }
    notice_failed_update(engine);
    gm_status joined = gm_ranks_check(engine);
    if (joined != GM_OK && engine->dead == GM_OK) {
        (void)gm_engine_die(engine, joined);
    }
    bool was_dead = engine->dead != GM_OK;
    if (was_dead) {
        snprintf(text, size, "%s", engine->dead_text);
        gm_update_forget_all(engine);
        gm_engine_revive(engine);
    }
    if (joined != GM_OK) { /* nobody asks for it any more */
        gm_ranks_leave(engine);
    }
    gm_engine_unlock(engine);
    return was_dead;
}

gm_status gm_engine_drain(gm_engine *engine)
{
    GM_TRY(gm_call_begin(engine));
    return gm_call_end(engine, GM_OK);
}
