/* watch.c - what is written through storages that show parameters, and how long a pass uses what
 * they show.
 *
 * Invariant: the copies of all watched leases of a parameter are the same: the bytes that the
 * engine has last seen.  With others of its own a lease would take what another tensor wrote for
 * what an update has left, or would not find a write that undoes that of another tensor. */
#include "engine/engine_impl.h"

#include <stdlib.h>
#include <string.h>

void gm_watch_free(gm_engine *engine)
{
    while (engine->watch.leases) {
        gm_lease *lease = engine->watch.leases;
        engine->watch.leases = lease->next;
        free(lease->old);
        free(lease);
    }
}

void gm_watch_add(gm_engine *engine, gm_lease *lease)
{
    lease->next = engine->watch.leases;
    engine->watch.leases = lease;
}

void gm_watch_note_pin(gm_engine *engine, gm_lease *lease)
{
    engine->watch.n_pinned += !lease->is_pinned;
    lease->is_pinned = true;
}

void gm_watch_wait(const gm_engine *engine)
{
    for (const gm_lease *lease = engine->watch.leases; lease; lease = lease->next) {
        if (lease->is_pinned) {
            (void)engine->device->ops->stream_sync(engine->device, lease->stream);
        }
    }
}

/* Its bytes are on the device, and writes to them are looked for: the lease has the chunk pinned
 * itself, or its users. */
bool gm_watch_is_on(const gm_engine *engine, const gm_lease *lease)
{
    uint32_t chunk = engine->params[lease->param].place.chunk;
    return atomic_load(&lease->is_watched) &&
           (lease->is_pinned || gm_chunks_pins(engine->chunks, chunk, engine->shown) > 0);
}

bool gm_watch_is_any(const gm_engine *engine)
{
    for (const gm_lease *lease = engine->watch.leases; lease; lease = lease->next) {
        if (gm_watch_is_on(engine, lease)) {
            return true;
        }
    }
    return false;
}

/* Any: their copies are the same. */
static gm_lease *watched(const gm_engine *engine, uint32_t param)
{
    gm_lease *lease = engine->watch.leases;
    while (lease && !(lease->param == param && gm_watch_is_on(engine, lease))) {
        lease = lease->next;
    }
    return lease;
}

void gm_watch_note_seen(gm_engine *engine, uint32_t param, const void *weight)
{
    size_t bytes = gm_field_shown(engine, &engine->params[param]).bytes;
    for (gm_lease *lease = engine->watch.leases; lease; lease = lease->next) {
        if (lease->param == param && atomic_load(&lease->is_watched)) {
            memcpy(lease->old, weight, bytes);
        }
    }
}

static gm_status snapshot(gm_engine *engine, gm_lease *lease)
{
    const gm_param *p = &engine->params[lease->param];
    gm_slice s = gm_field_shown(engine, p);
    return s.bytes == 0 ? GM_OK
                        : gm_chunks_read_device(engine->chunks, p->place.chunk, s.piece, s.offset,
                                                s.bytes, lease->old);
}

static gm_status reconcile(gm_engine *engine, gm_lease *lease)
{
    gm_param *p = &engine->params[lease->param];
    gm_slice s = gm_field_shown(engine, p);
    if (s.bytes == 0) {
        return GM_OK;
    }
    uint8_t *weight = malloc(s.bytes);
    GM_FAIL_IF(!weight, GM_ERR_NOMEM, "HOST: %zu bytes of scratch", s.bytes);
    gm_status status =
        gm_chunks_read_device(engine->chunks, p->place.chunk, s.piece, s.offset, s.bytes, weight);
    if (status == GM_OK && memcmp(weight, lease->old, s.bytes) != 0) {
        p->n_found++;
        p->n_writes++;
        if (s.piece == GM_GATHERED) {
            status = gm_field_take_back(engine, p, lease->old, weight, lease->stream);
        } else {
            status = gm_field_reset_low(engine, p, lease->old, weight, lease->stream);
            gm_status noted = gm_chunks_note_write(engine->chunks, p->place.chunk, GM_WEIGHT);
            status = status == GM_OK ? noted : status;
        }
        gm_watch_note_seen(engine, lease->param, weight);
    }
    free(weight);
    return status;
}

/* Finds what was written through the lease's tensor since the last look.  Writes must have passed
 * before bytes are compared: the tensor's stream's and the default one's. */
static gm_status look(gm_engine *engine, gm_lease *lease)
{
    GM_TRY(engine->device->ops->stream_sync(engine->device, lease->stream));
    GM_TRY(engine->device->ops->stream_sync(engine->device, 0));
    return reconcile(engine, lease);
}

gm_status gm_watch_look_at(gm_engine *engine, uint32_t param, gm_stream stream)
{
    gm_lease *lease = watched(engine, param);
    if (!lease) {
        return GM_OK;
    }
    GM_TRY(engine->device->ops->stream_sync(engine->device, stream));
    return look(engine, lease);
}

gm_status gm_watch_poll(gm_engine *engine)
{
    for (gm_lease *lease = engine->watch.leases; lease; lease = lease->next) {
        if (gm_watch_is_on(engine, lease)) {
            GM_TRY(look(engine, lease));
        }
    }
    return GM_OK;
}

gm_status gm_watch_renew(gm_engine *engine)
{
    for (gm_lease *lease = engine->watch.leases; lease; lease = lease->next) {
        if (gm_watch_is_on(engine, lease)) {
            GM_TRY(snapshot(engine, lease));
        }
    }
    return GM_OK;
}

gm_status gm_watch_begin(gm_lease *lease, gm_stream stream)
{
    const gm_engine *engine = lease->engine;
    const gm_param *p = &engine->params[lease->param];
    bool is_glanced;
    if (atomic_load(&lease->is_watched)) {
        return GM_OK;
    }
    if (gm_glance_is_full(lease)) { /* what is written through other storages is found first */
        GM_TRY(gm_watch_poll(lease->engine));
        GM_TRY(gm_glance_turn(lease->engine));
    }
    GM_TRY(gm_glance_begin(lease, stream, &is_glanced));
    if (is_glanced) {
        return GM_OK;
    }
    size_t bytes = p->spec.numel * p->spec.weight_bytes + 1;
    GM_FAIL_IF(!lease->old && !(lease->old = malloc(bytes)), GM_ERR_NOMEM,
               "HOST: a copy of %zu bytes to find writes", bytes - 1);
    lease->stream = stream;
    if (engine->shown == GM_WEIGHT) { /* what the tensor's owner writes is known only afterwards */
        GM_TRY(gm_saving_keep(lease->engine, p->place.chunk));
    }
    GM_TRY(engine->device->ops->stream_sync(engine->device, stream)); /* what others still write */
    const gm_lease *other = watched(engine, lease->param);
    if (other) {
        memcpy(lease->old, other->old, bytes - 1);
    } else {
        GM_TRY(snapshot(lease->engine, lease));
    }
    atomic_store(&lease->is_watched, true);
    return GM_OK;
}

gm_status gm_watch_end(gm_lease *lease)
{
    gm_status status = gm_glance_end(lease);
    if (atomic_load(&lease->is_watched)) {
        lease->engine->params[lease->param].n_looks++;
        status = look(lease->engine, lease);
        atomic_store(&lease->is_watched, false);
    }
    return status;
}

/* A chunk that a lease shows is in use, for longer than its unit was entered: the trace shall know,
 * or a plan would give its blocks away.  Not so what is read between two ticks, when no plan acts.
 * A lease that was there before the pass took its chunk is known from that tick on. */
static void note_use(gm_engine *engine, const gm_lease *lease)
{
    if (lease->is_pinned && engine->pass.is_open && engine->pass.tick != lease->born) {
        uint32_t chunk = engine->params[lease->param].place.chunk;
        uint32_t since = engine->chunk_states[chunk].first_tick;
        gm_book_release(engine->pass.book, lease->tick != GM_NO_TICK ? lease->tick : since);
    }
}

void gm_watch_note_pass_end(gm_engine *engine)
{
    if (engine->watch.n_pinned == 0) { /* as in most passes, while every parameter has a lease */
        return;
    }
    for (gm_lease *lease = engine->watch.leases; lease; lease = lease->next) {
        note_use(engine, lease);
        lease->tick = lease->born = GM_NO_TICK; /* of this pass */
    }
}

/* ---- those that have ended ---- */

void gm_watch_note_ended(gm_engine *engine)
{
    atomic_store(&engine->watch.has_ended, true);
}

gm_lease **gm_watch_first_ended(gm_engine *engine)
{
    if (!atomic_load(&engine->watch.has_ended)) {
        return NULL;
    }
    atomic_store(&engine->watch.has_ended, false); /* one that ends meanwhile is seen later */
    return &engine->watch.leases;
}

gm_status gm_watch_next_ended(gm_engine *engine, gm_lease ***at, gm_lease **out)
{
    gm_lease **link = *at, *lease;
    for (; (lease = *link); link = &lease->next) {
        engine->watch.n_walked++;
        if (atomic_load(&lease->is_ended)) {
            if (lease->is_pinned && gm_watch_is_on(engine, lease)) {
                /* else its users have looked */
                GM_TRY(look(engine, lease));
            }
            note_use(engine, lease);
            gm_glance_drop(lease);
            engine->watch.n_pinned -= lease->is_pinned;
            *link = lease->next;
            break;
        }
    }
    *at = lease ? link : NULL;
    *out = lease;
    return GM_OK;
}
