/* lease.c - the life of one storage that shows a parameter, and what is written through it.
 *
 * While units or backward nodes use the storage they have the chunk pinned; a storage that outlives
 * them, or that was made outside them, pins it itself.  A lease ends on any thread, at any moment
 * (a tensor's deleter): ending only sets a flag and drops a reference.  The engine's next call, on
 * whatever thread, does the rest: compares, unpins, frees. */
#include "engine/engine_impl.h"

#include <stdlib.h>

gm_status gm_lease_new(gm_engine *engine, uint32_t id, gm_lease **out)
{
    GM_TRY(gm_engine_check_param(engine, id));
    gm_lease *lease = calloc(1, sizeof *lease);
    GM_FAIL_IF(!lease, GM_ERR_NOMEM, "HOST: a lease");
    *lease = (gm_lease){.engine = engine, .param = id, .tick = GM_NO_TICK, .born = GM_NO_TICK};
    GM_TRY_ELSE(gm_call_begin(engine), free(lease));
    atomic_fetch_add(&engine->references, 1);
    gm_watch_add(engine, lease);
    *out = lease;
    return gm_call_end(engine, GM_OK);
}

static gm_status pin(gm_lease *lease, gm_stream stream)
{
    gm_engine *engine = lease->engine;
    uint32_t chunk = engine->params[lease->param].place.chunk;
    bool is_in_use = gm_chunks_pins(engine->chunks, chunk, engine->shown) > 0;
    GM_TRY(gm_update_check_between(engine, chunk));
    GM_TRY(gm_weights_pin(engine, chunk, stream, false));
    if (engine->pass.is_open) { /* else these are the last pass's ticks */
        lease->tick = engine->chunk_states[chunk].tick;
        lease->born = is_in_use ? GM_NO_TICK : engine->pass.tick;
    }
    gm_watch_note_pin(engine, lease);
    lease->stream = stream;
    return GM_OK;
}

gm_status gm_lease_pin(gm_lease *lease, gm_stream stream)
{
    GM_TRY(gm_call_begin_on(lease->engine, stream));
    return gm_call_end(lease->engine, pin(lease, stream));
}

gm_status gm_lease_watch(gm_lease *lease, gm_stream stream)
{
    GM_TRY(gm_call_begin(lease->engine));
    return gm_call_end(lease->engine, gm_watch_begin(lease, stream));
}

gm_status gm_lease_keep(gm_lease *lease, gm_stream stream)
{
    GM_TRY(gm_call_begin(lease->engine));
    gm_status status = gm_glance_end(lease);
    lease->engine->params[lease->param].n_looks = 0; /* what outlives its use is watched */
    status = status == GM_OK ? gm_watch_begin(lease, stream) : status;
    return gm_call_end(lease->engine, status == GM_OK ? pin(lease, stream) : status);
}

gm_status gm_lease_unwatch(gm_lease *lease)
{
    GM_TRY(gm_call_begin(lease->engine));
    return gm_call_end(lease->engine, gm_watch_end(lease));
}

gm_status gm_engine_n_found(gm_engine *engine, uint32_t param, gm_stream stream, uint64_t *out)
{
    GM_TRY(gm_engine_check_param(engine, param));
    GM_TRY(gm_call_begin(engine));
    gm_status status = gm_watch_look_at(engine, param, stream);
    *out = engine->params[param].n_found;
    return gm_call_end(engine, status);
}

void gm_lease_end(gm_lease *lease)
{
    gm_engine *engine = lease->engine; /* the lease may be freed once is_ended shows */
    atomic_store(&lease->is_ended, true);
    gm_watch_note_ended(engine);
    gm_engine_unref(engine);
}

uintptr_t gm_lease_address(const gm_lease *lease)
{
    return gm_engine_address(lease->engine, lease->param);
}
