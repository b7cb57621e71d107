/* lease.c - the life of one storage that shows a parameter, and what is written through it.
 *
 * While units or backward nodes use the storage they have the chunk pinned; a storage that outlives them, or that was
 * made outside them, pins it itself.  A lease ends on any thread, at any moment (a tensor's deleter): ending only sets a flag and drops a
 * reference.  The engine's next call, on whatever thread, does the rest: compares, unpins, frees. */
#include "engine/engine_impl.h"

#include <stdlib.h>
#include <string.h>

static gm_status snapshot(gm_engine *engine, gm_lease *lease)
{
    const gm_param *p = &engine->params[lease->param];
    gm_slice s = gm_field_shown(engine, p);
    return s.bytes == 0 ? GM_OK
                        : gm_chunks_read_device(engine->chunks, p->place.chunk, s.piece, s.offset,
                                                s.bytes, lease->old);
}

/* Finds what was written through the lease's tensor since the last look. */
static gm_status reconcile_lease(gm_engine *engine, gm_lease *lease)
{
    const gm_param *p = &engine->params[lease->param];
    gm_slice s = gm_field_shown(engine, p);
    if (s.bytes == 0) {
        return GM_OK;
    }
    uint8_t *weight = malloc(s.bytes);
    if (!weight) {
        return GM_FAIL(GM_ERR_NOMEM, "HOST: %zu bytes of scratch", s.bytes);
    }
    gm_status status =
        gm_chunks_read_device(engine->chunks, p->place.chunk, s.piece, s.offset, s.bytes, weight);
    if (status == GM_OK && memcmp(weight, lease->old, s.bytes) != 0) {
        if (s.piece == GM_GATHERED) {
            status = gm_shard_take_back(engine, p, lease->old, weight, lease->stream);
        } else {
            status = gm_field_reset_low(engine, p, lease->old, weight, lease->stream);
            gm_chunks_note_write(engine->chunks, p->place.chunk, GM_WEIGHT);
        }
        memcpy(lease->old, weight, s.bytes);
    }
    free(weight);
    return status;
}

/* Writes must have passed before bytes are compared: the tensor's stream's and the default one's. */
static gm_status wait_for_writes(gm_engine *engine, const gm_lease *lease)
{
    GM_TRY(engine->device->ops->stream_sync(engine->device, lease->stream));
    return engine->device->ops->stream_sync(engine->device, 0);
}

gm_status gm_lease_poll_watched(gm_engine *engine)
{
    for (gm_lease *lease = engine->leases; lease; lease = lease->next) {
        if (lease->is_pinned && atomic_load(&lease->is_watched)) {
            GM_TRY(wait_for_writes(engine, lease));
            GM_TRY(reconcile_lease(engine, lease));
        }
    }
    return GM_OK;
}

gm_status gm_lease_renew_snapshots(gm_engine *engine)
{
    for (gm_lease *lease = engine->leases; lease; lease = lease->next) {
        if (lease->is_pinned && atomic_load(&lease->is_watched)) {
            GM_TRY(snapshot(engine, lease));
        }
    }
    return GM_OK;
}

/* A chunk that a lease shows is in use, for longer than its unit was entered: the trace shall know, or a plan would give
 * its blocks away.  Not so what is read between two ticks, when no plan acts.  A lease that was there before the pass took
 * its chunk is known from that tick on. */
static void note_use(gm_engine *engine, const gm_lease *lease)
{
    if (lease->is_pinned && engine->is_pass_open && engine->tick != lease->born) {
        uint32_t chunk = engine->params[lease->param].place.chunk;
        uint32_t since = engine->chunk_states[chunk].first_tick;
        gm_book_release(engine->book, lease->tick != GM_NO_TICK ? lease->tick : since);
    }
}

static gm_status process_ended(gm_engine *engine)
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
        if (lease->is_pinned && atomic_load(&lease->is_watched)) {
            GM_TRY(wait_for_writes(engine, lease));
            GM_TRY(reconcile_lease(engine, lease));
        }
        note_use(engine, lease);
        bool was_pinned = lease->is_pinned;
        gm_stream stream = lease->stream;
        *link = lease->next;
        free(lease->old);
        free(lease);
        if (was_pinned) {
            GM_TRY(gm_engine_unpin_shown(engine, chunk, stream, false));
        }
    }
    return GM_OK;
}

void gm_lease_note_pass_end(gm_engine *engine)
{
    for (gm_lease *lease = engine->leases; lease; lease = lease->next) {
        note_use(engine, lease);
        lease->tick = lease->born = GM_NO_TICK; /* of this pass */
    }
}

/* Every call asks; every parameter's storage is a lease: they are walked only after one has ended. */
gm_status gm_lease_process_ended(gm_engine *engine)
{
    if (!atomic_load(&engine->has_ended_lease)) {
        return GM_OK;
    }
    atomic_store(&engine->has_ended_lease,
                 false); /* first: one that ends meanwhile is seen later */
    gm_status status = process_ended(engine);
    if (status != GM_OK) {
        atomic_store(&engine->has_ended_lease, true);
    }
    return status;
}

gm_status gm_lease_new(gm_engine *engine, uint32_t id, gm_lease **out)
{
    GM_TRY(gm_engine_check_param(engine, id));
    gm_lease *lease = calloc(1, sizeof *lease);
    if (!lease) {
        return GM_FAIL(GM_ERR_NOMEM, "HOST: a lease");
    }
    *lease = (gm_lease){
        .engine = engine, .param = id, .tick = GM_NO_TICK, .born = GM_NO_TICK, .old = NULL};
    atomic_init(&lease->is_watched, false);
    atomic_init(&lease->is_ended, false);
    gm_status status = gm_engine_begin_call(engine);
    if (status != GM_OK) {
        free(lease);
        return status;
    }
    atomic_fetch_add(&engine->references, 1);
    lease->next = engine->leases;
    engine->leases = lease;
    *out = lease;
    return gm_engine_end_call(engine, GM_OK);
}

static gm_status pin(gm_lease *lease, gm_stream stream)
{
    gm_engine *engine = lease->engine;
    uint32_t chunk = engine->params[lease->param].place.chunk;
    bool is_in_use = gm_chunks_pins(engine->chunks, chunk, engine->shown) > 0;
    GM_TRY(gm_update_check_between(engine, chunk));
    GM_TRY(gm_engine_pin_shown(engine, chunk, stream, false));
    if (engine->is_pass_open) { /* else these are the last pass's ticks */
        lease->tick = engine->chunk_states[chunk].tick;
        lease->born = is_in_use ? GM_NO_TICK : engine->tick;
    }
    lease->is_pinned = true;
    lease->stream = stream;
    return GM_OK;
}

gm_status gm_lease_pin(gm_lease *lease, gm_stream stream)
{
    GM_TRY(gm_engine_begin_call(lease->engine));
    return gm_engine_end_call(lease->engine, pin(lease, stream));
}

static gm_status watch(gm_lease *lease, gm_stream stream)
{
    const gm_engine *engine = lease->engine;
    const gm_param *p = &engine->params[lease->param];
    if (atomic_load(&lease->is_watched)) {
        return GM_OK;
    }
    size_t bytes = p->spec.numel * p->spec.weight_bytes + 1;
    if (!lease->old && !(lease->old = malloc(bytes))) {
        return GM_FAIL(GM_ERR_NOMEM, "HOST: a copy of %zu bytes to find writes", bytes - 1);
    }
    lease->stream = stream;
    GM_TRY(engine->device->ops->stream_sync(engine->device, stream)); /* what others still write */
    GM_TRY(snapshot(lease->engine, lease));
    atomic_store(&lease->is_watched, true);
    return GM_OK;
}

gm_status gm_lease_watch(gm_lease *lease, gm_stream stream)
{
    GM_TRY(gm_engine_begin_call(lease->engine));
    return gm_engine_end_call(lease->engine, watch(lease, stream));
}

gm_status gm_lease_unwatch(gm_lease *lease)
{
    GM_TRY(gm_engine_begin_call(lease->engine));
    gm_status status = GM_OK;
    if (atomic_load(&lease->is_watched)) {
        status = wait_for_writes(lease->engine, lease);
        status = status == GM_OK ? reconcile_lease(lease->engine, lease) : status;
        atomic_store(&lease->is_watched, false);
    }
    return gm_engine_end_call(lease->engine, status);
}

void gm_lease_end(gm_lease *lease)
{
    gm_engine *engine = lease->engine; /* the lease may be freed once is_ended shows */
    atomic_store(&lease->is_ended, true);
    atomic_store(&engine->has_ended_lease, true);
    gm_engine_unref(engine);
}

uintptr_t gm_lease_address(const gm_lease *lease)
{
    return gm_engine_address(lease->engine, lease->param);
}

gm_status gm_engine_drain(gm_engine *engine)
{
    GM_TRY(gm_engine_begin_call(engine));
    return gm_engine_end_call(engine, GM_OK);
}
