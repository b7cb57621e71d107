/* saving.c - a checkpoint that is written while training goes on: a chunk that is still to be
 * written is copied before its weights or states change.
 *
 * Invariants
 *   1. While a chunk is due its weights and states are those of gm_saving_begin, or it has a copy
 *      of them: the chunk table, where every write begins, calls gm_saving_keep first.  So the
 *      writer, which reads a chunk under the engine's lock unless it has a copy, cannot see a later
 *      byte.
 *   2. Copies take no more than `limit` bytes, or one chunk's if that is larger, beside what
 *      gm_saving_keep_at_once makes.  A thread that is to change another chunk waits until the
 *      writer, which begins with these, has written one that has a copy.  It may hold the engine's
 *      lock: the writer needs that for no copy, and waits for no rank.
 *   3. A unit or a tensor on the device may write weights before anybody is told.  Where their home
 *      still has the old bytes, these are copied.  Where it has not, the checkpoint fails by name,
 *      and from the next one on the chunk is copied at the beginning.
 *   4. What is not due is refused to the writer.
 *   5. Between gm_saving_end and the next begin nothing is due or has a copy, but for one that
 *      gm_saving_keep is making: it drops that itself.
 *
 * `lock` comes after the engine's lock; a thread that holds it takes that only by trying.  The host
 * waits in: gm_saving_keep. */
#include "engine/engine_impl.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct gm_saved {
    /* Huge pages, first touched by all workers: half a checkpoint may be copied in one step. */
    gm_arena *copy;      /* of the weights and, at state_offset, the states; NULL: none */
    bool is_due;         /* the writer has not written all of it */
    bool was_read_dirty; /* from the device alone, while somebody used the weights there */
    bool is_unseen;      /* weights changed once before anybody was told: see invariant 3 */
} saved;

gm_status gm_saving_new(gm_engine *engine)
{
    uint32_t n = gm_layout_n_chunks(engine->layout);
    pthread_mutex_init(&engine->saving.lock, NULL);
    pthread_cond_init(&engine->saving.changed, NULL);
    atomic_init(&engine->saving.is_on, false);
    engine->saving.chunks = calloc((size_t)n + 1, sizeof(saved));
    return engine->saving.chunks ? GM_OK : GM_FAIL(GM_ERR_NOMEM, "HOST: table of %u chunks", n);
}

void gm_saving_free(gm_engine *engine)
{
    if (!engine->saving.chunks) {
        return;
    }
    gm_saving_end(engine, NULL);
    free(engine->saving.chunks);
    pthread_cond_destroy(&engine->saving.changed);
    pthread_mutex_destroy(&engine->saving.lock);
}

gm_status gm_saving_begin(gm_engine *engine, const uint32_t *params, uint32_t n, size_t limit)
{
    GM_FAIL_IF(atomic_load(&engine->saving.is_on), GM_ERR_STATE,
               "a checkpoint is being written already");
    engine->saving.limit = limit;
    engine->saving.used = (gm_saving_use){0};
    engine->saving.failure[0] = '\0';
    for (uint32_t i = 0; i < n; i++) {
        engine->saving.chunks[engine->params[params[i]].place.chunk].is_due = true;
    }
    atomic_store(&engine->saving.is_on, true);
    return GM_OK;
}

static size_t state_offset(const gm_engine *engine, uint32_t chunk)
{
    return gm_round_up(gm_engine_piece_bytes(engine, chunk, GM_WEIGHT), 64);
}

static size_t copy_bytes(const gm_engine *engine, uint32_t chunk)
{
    return state_offset(engine, chunk) + gm_engine_piece_bytes(engine, chunk, GM_STATE);
}

static void drop_copy(gm_engine *engine, uint32_t chunk)
{
    saved *s = &engine->saving.chunks[chunk];
    if (s->copy) {
        engine->saving.held -= copy_bytes(engine, chunk);
        gm_arena_free(s->copy);
        s->copy = NULL;
    }
    s->is_due = false;
}

void gm_saving_done(gm_engine *engine, uint32_t chunk)
{
    pthread_mutex_lock(&engine->saving.lock);
    drop_copy(engine, chunk);
    pthread_cond_broadcast(&engine->saving.changed);
    pthread_mutex_unlock(&engine->saving.lock);
}

void gm_saving_end(gm_engine *engine, gm_saving_use *out)
{
    pthread_mutex_lock(&engine->saving.lock);
    for (uint32_t chunk = 0; chunk < gm_layout_n_chunks(engine->layout); chunk++) {
        drop_copy(engine, chunk);
        engine->saving.chunks[chunk].was_read_dirty = false;
    }
    if (out) {
        *out = engine->saving.used;
    }
    atomic_store(&engine->saving.is_on, false);
    pthread_cond_broadcast(&engine->saving.changed);
    pthread_mutex_unlock(&engine->saving.lock);
}

/* ---- copies ---- */

/* With `lock`.  The checkpoint cannot be right any more; training is not concerned. */
static void fail(gm_engine *engine, uint32_t param, const char *why)
{
    if (!engine->saving.failure[0]) {
        snprintf(engine->saving.failure, sizeof engine->saving.failure, "%s: %s",
                 gm_engine_name(engine, param), why);
    }
}

/* With `lock`. */
static bool is_wanted(const gm_engine *engine, uint32_t chunk)
{
    const saved *s = &engine->saving.chunks[chunk];
    return s->is_due && !s->copy;
}

/* Waits for room.  Whether the chunk is still wanted: room is taken then. */
static bool take_room(gm_engine *engine, uint32_t chunk, bool waits)
{
    size_t bytes = copy_bytes(engine, chunk);
    pthread_mutex_lock(&engine->saving.lock);
    bool has_waited = false;
    while (waits && is_wanted(engine, chunk) && engine->saving.held > 0 &&
           (bytes > engine->saving.limit || engine->saving.held > engine->saving.limit - bytes)) {
        has_waited = true;
        pthread_cond_wait(&engine->saving.changed, &engine->saving.lock);
    }
    engine->saving.used.n_waits += has_waited;
    bool is_taken = is_wanted(engine, chunk) && !engine->saving.failure[0];
    if (is_taken) {
        engine->saving.held += bytes;
        engine->saving.used.copied += bytes;
        if (engine->saving.held > engine->saving.used.most) {
            engine->saving.used.most = engine->saving.held;
        }
    }
    pthread_mutex_unlock(&engine->saving.lock);
    return is_taken;
}

static gm_status keep(gm_engine *engine, uint32_t chunk, bool waits)
{
    saved *s = &engine->saving.chunks[chunk];
    if (!atomic_load(&engine->saving.is_on) || !take_room(engine, chunk, waits)) {
        return GM_OK;
    }
    if (waits) { /* who has the weights in use may have written them already, see invariant 3 */
        gm_saving_note_read(engine, chunk);
    }
    size_t weights = gm_engine_piece_bytes(engine, chunk, GM_WEIGHT);
    size_t states = gm_engine_piece_bytes(engine, chunk, GM_STATE);
    gm_arena *copy = NULL;
    (void)gm_arena_new(NULL, copy_bytes(engine, chunk), engine->workers, &copy);
    gm_status status = GM_OK;
    if (copy) {
        status = gm_chunks_read(engine->chunks, chunk, GM_WEIGHT, 0, weights, gm_arena_base(copy),
                                engine->workers);
    }
    if (copy && status == GM_OK) {
        status = gm_chunks_read(engine->chunks, chunk, GM_STATE, 0, states,
                                (uint8_t *)gm_arena_base(copy) + state_offset(engine, chunk),
                                engine->workers);
    }
    pthread_mutex_lock(&engine->saving.lock);
    if (!copy || status != GM_OK) {
        fail(engine, engine->chunk_params[engine->chunk_states[chunk].first_param],
             copy ? "its chunk could not be read for a copy"
                  : "the host has no memory for a copy of its chunk");
    }
    if (copy && status == GM_OK && s->is_due) {
        s->copy = copy;
    } else { /* not due: the checkpoint has failed meanwhile */
        engine->saving.held -= copy_bytes(engine, chunk);
        gm_arena_free(copy);
    }
    pthread_cond_broadcast(&engine->saving.changed);
    pthread_mutex_unlock(&engine->saving.lock);
    return status;
}

gm_status gm_saving_keep(void *context, uint32_t chunk)
{
    return keep(context, chunk, true);
}

gm_status gm_saving_keep_at_once(gm_engine *engine, uint32_t chunk)
{
    return keep(engine, chunk, false);
}

void gm_saving_note_unseen(gm_engine *engine, uint32_t param)
{
    uint32_t chunk = engine->params[param].place.chunk;
    saved *s = &engine->saving.chunks[chunk];
    bool is_lost = !gm_chunks_has_old_weight(engine->chunks, chunk);
    s->is_unseen |= !gm_chunk_spec(engine, chunk)->has_low; /* with one it has to have a home */
    pthread_mutex_lock(&engine->saving.lock);
    if (is_lost && (is_wanted(engine, chunk) || s->was_read_dirty)) {
        fail(engine, param,
             "its module wrote it in place while the checkpoint was being written, and nobody has "
             "the bytes from before: save again (it is copied first from now on)");
    }
    pthread_mutex_unlock(&engine->saving.lock);
}

bool gm_saving_is_unseen(const gm_engine *engine, uint32_t chunk)
{
    return engine->saving.chunks[chunk].is_unseen && engine->saving.chunks[chunk].is_due;
}

/* ---- the writer ---- */

void gm_saving_note_read(gm_engine *engine, uint32_t chunk)
{
    if (!gm_chunks_has_old_weight(engine->chunks, chunk) &&
        gm_chunks_pins(engine->chunks, chunk, GM_WEIGHT) > 0) {
        engine->saving.chunks[chunk].was_read_dirty = true;
    }
}

/* With `lock`: a chunk that has a copy, or GM_NO_CHUNK. */
static uint32_t first_copied(const gm_engine *engine)
{
    uint32_t n = gm_layout_n_chunks(engine->layout), chunk = 0;
    while (chunk < n && !engine->saving.chunks[chunk].copy) {
        chunk++;
    }
    return chunk < n ? chunk : GM_NO_CHUNK;
}

uint32_t gm_engine_save_next(gm_engine *engine)
{
    pthread_mutex_lock(&engine->saving.lock);
    uint32_t chunk = first_copied(engine);
    pthread_mutex_unlock(&engine->saving.lock);
    return chunk;
}

gm_status gm_saving_reach(gm_engine *engine, uint32_t chunk, gm_saving_way *out,
                          const uint8_t **out_weights, const uint8_t **out_states)
{
    gm_status status = GM_OK;
    *out = GM_SAVING_OTHERS_FIRST;
    pthread_mutex_lock(&engine->saving.lock);
    for (bool is_decided = false; !is_decided;) {
        const saved *s = &engine->saving.chunks[chunk];
        is_decided = true;
        if (engine->saving.failure[0]) {
            status = GM_FAIL(GM_ERR_STATE, "%s", engine->saving.failure);
        } else if (s->copy) {
            *out = GM_SAVING_COPIED;
            *out_weights = gm_arena_base(s->copy);
            *out_states = *out_weights + state_offset(engine, chunk);
        } else if (!s->is_due) { /* it may have changed since */
            status = GM_FAIL(GM_ERR_STATE, "chunk %u is no more to be written", chunk);
        } else if (pthread_mutex_trylock(&engine->lock) == 0) {
            *out = GM_SAVING_LOCKED;
        } else if (first_copied(engine) == GM_NO_CHUNK) {
            /* else who has the engine's lock may wait */
            pthread_cond_wait(&engine->saving.changed, &engine->saving.lock);
            is_decided = false;
        }
    }
    pthread_mutex_unlock(&engine->saving.lock);
    return status;
}

gm_status gm_saving_check(gm_engine *engine)
{
    pthread_mutex_lock(&engine->saving.lock);
    gm_status status =
        engine->saving.failure[0] ? GM_FAIL(GM_ERR_STATE, "%s", engine->saving.failure) : GM_OK;
    pthread_mutex_unlock(&engine->saving.lock);
    return status;
}
