/* engine.c - the ground that the engine's other files stand on: shapes, addresses, and how the
 * engine dies; see engine.h. The order of the files, from here up, is in README.md.
 *
 * Invariants (of all these files)
 *   1. A parameter's bytes are valid from enter to leave of its unit, from touch to
 *      release_touched, and for the life of a pinned lease; outside, its range may show anything.
 *   2. While a plan is followed, enter, leave, touch and the taking of a gradient allocate nothing,
 *      map nothing and do not wait; what they did of that is counted (n_replay_waits).
 *   3. Order between streams and the host is kept by the fences of chunk.c and by nothing else.
 *   4. Before a master is read, updated or saved, what was written through watched leases is
 *      reconciled.
 *   5. After an error inside a step the engine is dead: every call returns that first error, until
 *      it is closed.
 *   6. A chunk's pending update is issued before its bytes are used (update.c).
 *   7. Device bytes = blocks of the plan + sums + what others of this process hold, each at its
 *      peak: the sum that the plan keeps within the budget. */
#include "engine/engine_impl.h"

#include <stdio.h>

size_t gm_engine_piece_bytes(const gm_engine *engine, uint32_t chunk, gm_piece piece)
{
    const gm_chunk_shape *shape = gm_layout_chunk(engine->layout, chunk);
    const gm_engine_param *spec = gm_chunk_spec(engine, chunk);
    size_t grad_bytes = spec->has_grad ? gm_dtype_bytes(gm_grad_dtype(engine, spec)) : 0;
    switch (piece) {
    case GM_STATE:
        return gm_is_opaque(engine) ? gm_low_bytes(spec) * shape->shard_numel +
                                          engine->chunk_states[chunk].opaque_bytes
                                    : gm_state_shape_of(spec, shape->shard_numel).total;
    case GM_GRAD: return shape->shard_numel * grad_bytes;
    case GM_GATHERED: return engine->shown == piece ? shape->numel * shape->weight_bytes : 0;
    case GM_UNREDUCED: return gm_has_ranks(engine) ? shape->numel * grad_bytes : 0;
    default: return shape->shard_numel * shape->weight_bytes;
    }
}

size_t gm_engine_piece_blocks(const gm_engine *engine, uint32_t chunk, gm_piece piece)
{
    return gm_round_up(gm_engine_piece_bytes(engine, chunk, piece), engine->device->block_bytes);
}

/* The only place that lets the lock go: the thread that writes a checkpoint may wait for that
 * (saving.c). */
void gm_engine_unlock(gm_engine *engine)
{
    pthread_mutex_unlock(&engine->lock);
    if (atomic_load(&engine->saving.is_on)) {
        pthread_mutex_lock(&engine->saving.lock);
        pthread_cond_broadcast(&engine->saving.changed);
        pthread_mutex_unlock(&engine->saving.lock);
    }
}

uintptr_t gm_engine_address(const gm_engine *engine, uint32_t id)
{
    const gm_param *p = &engine->params[id];
    return gm_chunks_address(engine->chunks, p->place.chunk, engine->shown) +
           p->place.offset * p->spec.weight_bytes;
}

uint32_t gm_engine_chunk_of(const gm_engine *engine, uint32_t id)
{
    return engine->params[id].place.chunk;
}

void gm_engine_chunk_need(const gm_engine *engine, uint32_t chunk, gm_engine_need *out)
{
    size_t own = gm_stays(engine, chunk) ? 0 : gm_engine_piece_blocks(engine, chunk, GM_WEIGHT);
    bool is_gathered = engine->shown == GM_GATHERED;
    size_t updating = 0;
    for (int piece = 0; gm_is_opaque(engine) && !gm_stays(engine, chunk) && piece < GM_N_OWN_PIECES;
         piece++) {
        updating += gm_engine_piece_blocks(engine, chunk, (gm_piece)piece);
    }
    *out = (gm_engine_need){
        .shown = is_gathered ? gm_engine_piece_blocks(engine, chunk, GM_GATHERED) : own,
        .gathering = is_gathered ? own : 0,
        .unreduced = gm_engine_piece_blocks(engine, chunk, GM_UNREDUCED),
        .updating = updating,
    };
}

gm_status gm_engine_part(const gm_engine *engine, uint32_t id, uint64_t *first, uint64_t *n)
{
    GM_TRY(gm_engine_check_param(engine, id));
    *first = engine->params[id].part_first;
    *n = engine->params[id].part_numel;
    return GM_OK;
}

void gm_engine_weight_span(const gm_engine *engine, uintptr_t *begin, uintptr_t *end)
{
    gm_chunks_weight_span(engine->chunks, begin, end);
}

gm_status gm_engine_check_param(const gm_engine *engine, uint32_t id)
{
    return id < engine->n_params ? GM_OK : GM_FAIL(GM_ERR_ARG, "parameter %u does not exist", id);
}

const char *gm_engine_name(const gm_engine *engine, uint32_t id)
{
    const char *name = engine->params[id].spec.name;
    return name ? name : "a parameter";
}

uint64_t gm_engine_count_waits(const gm_engine *engine)
{
    gm_chunks_stats stats;
    gm_chunks_get_stats(engine->chunks, &stats);
    return stats.n_host_waits + stats.n_maps + engine->arrive.n_waits + engine->clip.n_waits +
           engine->ranks.n_waits;
}

void gm_habit_learn(gm_habit *habit)
{
    enum { FEWER = 8 }; /* in a row */
    bool is_fewer = habit->now < habit->most;
    if (habit->now == 0) {
        return;
    }
    habit->n_fewer = is_fewer ? habit->n_fewer + 1 : 0;
    if (!is_fewer || habit->n_fewer == FEWER) {
        habit->most = habit->now;
        habit->n_fewer = 0;
    }
    habit->now = 0;
}

gm_status gm_engine_die(gm_engine *engine, gm_status status)
{
    engine->dead = status;
    snprintf(engine->dead_text, sizeof engine->dead_text, "%s", gm_last_error());
    return status;
}

void gm_engine_revive(gm_engine *engine)
{
    engine->dead = GM_OK;
}
