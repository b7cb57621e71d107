/* weights.c - what tensors show of a chunk: its weights or, where each rank owns a part of them,
 * the gathered weights of all ranks.
 *
 * Invariants
 *   1. What begins a collective depends on the sequence of calls (units, backward nodes, leases
 *      that are made, gradients, steps) and on the plan that the ranks share, which are the same on
 *      all ranks; never on memory, on time, or on when a lease ends.  So the state of gathered
 *      weights (gathered.c) is kept apart from residence: they are HELD from a gathering on, on
 *      demand until the last use, under a plan until another chunk is gathered into the plan's
 *      blocks of this one - also where this rank has left the plan's placement for lack of memory,
 *      and keeps to its order: what it has no room for meanwhile is on the host.
 *   2. Every collective is issued on comm_stream, under the engine's lock, in the order of those
 *      calls.
 *   3. Gathered weights are pinned while anybody needs them: nobody evicts a transient piece. */
#include "engine/engine_impl.h"
#include "plan/ring.h"

#include <stdlib.h>

void gm_weights_free(gm_engine *engine)
{
    free(engine->weights.owners);
}

/* The own shard goes to its place, the others' come. */
static gm_status issue_gather(gm_engine *engine, uint32_t chunk)
{
    gm_chunks *chunks = engine->chunks;
    gm_stream stream = engine->ranks.stream;
    size_t bytes = gm_engine_piece_bytes(engine, chunk, GM_WEIGHT);
    uintptr_t whole = gm_chunks_address(chunks, chunk, GM_GATHERED);
    gm_ranks_label(engine, GM_FOR_GATHER, chunk);
    GM_TRY(gm_chunks_begin(chunks, chunk, GM_GATHERED, GM_WRITE, stream));
    uint32_t entry = gm_timeline_begin(engine->timeline, GM_LOG_GATHER, GM_ON_COMM, chunk,
                                       GM_GATHERED, bytes * engine->ranks.n_shards, stream);
    GM_TRY(gm_chunks_begin(chunks, chunk, GM_WEIGHT, GM_READ, stream));
    GM_TRY(engine->device->ops->copy_d2d(engine->device, whole + engine->ranks.rank * bytes,
                                         gm_chunks_address(chunks, chunk, GM_WEIGHT), bytes,
                                         stream));
    GM_TRY(gm_chunks_end(chunks, chunk, GM_WEIGHT, GM_READ, stream));
    GM_TRY(gm_comm_all_gather(engine->ranks.shard_comm, whole, bytes, stream));
    gm_timeline_end(engine->timeline, entry, stream);
    engine->weights.n_gathers++;
    engine->weights.gathered_bytes += bytes * engine->ranks.n_shards;
    return gm_chunks_end(chunks, chunk, GM_GATHERED, GM_WRITE, stream);
}

/* In the plan's blocks for gathered weights the chunk takes the place of others. */
static gm_status take_place(gm_engine *engine, uint32_t chunk)
{
    if (!engine->weights.collectives) {
        return GM_OK;
    }
    const gm_place *place = gm_plan_place(engine->weights.collectives, chunk, GM_GATHERED);
    uint32_t n = place->length == 0
                     ? 0
                     : (uint32_t)(gm_engine_piece_blocks(engine, chunk, GM_GATHERED) /
                                  engine->device->block_bytes);
    uint32_t at = 0, old, *owners = engine->weights.owners;
    while ((old = gm_owners_take(owners, place, n, chunk, &at)) != GM_NO_OWNER) {
        GM_TRY(gm_gathered_lose_place(engine, old));
    }
    return GM_OK;
}

gm_status gm_weights_adopt(gm_engine *engine, gm_plan *plan)
{
    uint32_t *owners;
    GM_TRY(gm_owners_new(gm_plan_n_blocks(plan), &owners));
    free(engine->weights.owners);
    engine->weights.owners = owners;
    engine->weights.collectives = plan;
    return GM_OK;
}

void gm_weights_renew(gm_engine *engine, gm_plan *plan)
{
    engine->weights.collectives = plan;
}

gm_status gm_weights_forget_all(gm_engine *engine)
{
    engine->weights.collectives = NULL;
    uint32_t n = engine->shown == GM_GATHERED ? gm_layout_n_chunks(engine->layout) : 0;
    for (uint32_t chunk = 0; chunk < n; chunk++) {
        GM_TRY(gm_gathered_lose_place(engine, chunk));
    }
    return GM_OK;
}

/* is_use: as of gm_weights_pin. */
static gm_status gather(gm_engine *engine, uint32_t chunk, bool is_use)
{
    gm_chunks *chunks = engine->chunks;
    GM_TRY(gm_ranks_check_joined(engine));
    GM_TRY(take_place(engine, chunk));
    bool is_shown = gm_chunks_pins(chunks, chunk, GM_GATHERED) > 0;
    if (is_shown) { /* by leases: what was written through them is kept, readers come first */
        GM_TRY(gm_watch_poll(engine));
        GM_TRY(gm_chunks_note_readers(chunks, chunk, GM_GATHERED, engine->call.stream));
    }
    gm_stream stream = engine->ranks.stream;
    GM_TRY(gm_room_pin(engine, chunk, GM_WEIGHT, stream));
    gm_status status = gm_room_pin(engine, chunk, GM_GATHERED, stream);
    if (status == GM_OK) {
        status = issue_gather(engine, chunk);
        gm_chunks_unpin_ordered(chunks, chunk, GM_GATHERED);
    }
    gm_chunks_unpin_ordered(chunks, chunk, GM_WEIGHT);
    if (status == GM_OK && engine->policy == GM_POLICY_CPU && !engine->room.plan) {
        status = gm_chunks_evict(chunks, chunk, GM_WEIGHT);
    }
    if (status == GM_OK) {
        gm_chunk_state *state = &engine->chunk_states[chunk];
        gm_gathered_note(engine, chunk, is_use || engine->weights.collectives || state->n_uses > 0);
        status = is_shown ? gm_watch_renew(engine) : GM_OK;
    }
    return status;
}

gm_status gm_weights_prefetch(gm_engine *engine, uint32_t chunk)
{
    if (engine->shown != GM_GATHERED || gm_gathered_is_valid(engine, chunk)) {
        return GM_OK;
    }
    GM_TRY(gm_update_issue(engine, chunk));
    return gather(engine, chunk, true);
}

/* Onto the device, if they are on the host. */
static gm_status bring_back(gm_engine *engine, uint32_t chunk)
{
    if (engine->chunk_states[chunk].gathered != GM_GATHERED_SPILLED) {
        return GM_OK;
    }
    GM_TRY(gm_room_pin(engine, chunk, GM_GATHERED, engine->ranks.stream));
    gm_status status = gm_gathered_bring_back(engine, chunk);
    gm_chunks_unpin_ordered(engine->chunks, chunk, GM_GATHERED);
    return status;
}

static gm_status pin_gathered(gm_engine *engine, uint32_t chunk, gm_stream stream, bool is_use)
{
    if (!gm_gathered_is_valid(engine, chunk)) {
        GM_TRY(gather(engine, chunk, is_use));
    }
    GM_TRY(bring_back(engine, chunk));
    GM_ASSERT(gm_chunks_is_resident(engine->chunks, chunk, GM_GATHERED));
    GM_TRY(gm_chunks_pin(engine->chunks, chunk, GM_GATHERED, stream));
    engine->chunk_states[chunk].n_uses += is_use;
    return GM_OK;
}

static gm_status unpin_gathered(gm_engine *engine, uint32_t chunk, gm_stream stream, bool is_use)
{
    GM_TRY(gm_chunks_unpin(engine->chunks, chunk, GM_GATHERED, stream));
    GM_ASSERT(!is_use || engine->chunk_states[chunk].n_uses > 0);
    gm_chunk_state *state = &engine->chunk_states[chunk];
    state->n_uses -= is_use;
    gm_gathered_state now = state->gathered;
    bool is_last = state->n_uses == 0 && !(now == GM_GATHERED_HELD && engine->weights.collectives);
    bool ends = is_use ? is_last : now == GM_GATHERED_NONE || now == GM_GATHERED_LEASED;
    return ends ? gm_gathered_end(engine, chunk) : GM_OK;
}

gm_status gm_weights_pin(gm_engine *engine, uint32_t chunk, gm_stream stream, bool is_use)
{
    GM_TRY(gm_update_issue(engine, chunk)); /* invariant 6 */
    return engine->shown == GM_GATHERED ? pin_gathered(engine, chunk, stream, is_use)
                                        : gm_room_pin(engine, chunk, GM_WEIGHT, stream);
}

gm_status gm_weights_unpin(gm_engine *engine, uint32_t chunk, gm_stream stream, bool is_use)
{
    if (engine->shown == GM_GATHERED) {
        return unpin_gathered(engine, chunk, stream, is_use);
    }
    GM_TRY(gm_chunks_unpin(engine->chunks, chunk, GM_WEIGHT, stream));
    if (engine->policy == GM_POLICY_CPU && !engine->room.plan &&
        gm_chunks_pins(engine->chunks, chunk, GM_WEIGHT) == 0) {
        return gm_chunks_evict(engine->chunks, chunk, GM_WEIGHT);
    }
    return GM_OK;
}

gm_status gm_weights_unpin_for_retry(gm_engine *engine, uint32_t chunk, gm_stream stream)
{
    if (engine->shown != GM_GATHERED) {
        return gm_weights_unpin(engine, chunk, stream, true);
    }
    GM_TRY(gm_chunks_unpin(engine->chunks, chunk, GM_GATHERED, stream));
    gm_chunk_state *state = &engine->chunk_states[chunk];
    state->n_uses--;
    GM_ASSERT(state->gathered != GM_GATHERED_ENDING || state->n_uses > 0);
    return GM_OK;
}
