/* place.c - the placement of a plan: every piece's blocks for good, mapped once.  Invariants are in
 * chunk.c.
 *
 * The host waits in: adopt, leave_placement. */
#include <stdio.h>
#include <stdlib.h>

#include "memory/chunk_impl.h"

gm_status gm_place_take(gm_chunks *chunks, piece *p, gm_stream stream, bool *out)
{
    uint32_t me = gm_piece_index(chunks, p);
    *out = p->is_placed;
    for (uint32_t b = 0; *out && b < p->n_blocks; b++) {
        uint32_t owner = chunks->owners[p->blocks[b]];
        const piece *last = owner == GM_NO_OWNER ? NULL : &chunks->pieces[owner];
        *out = !last || last == p || !gm_is_resident(last) || last->pins == 0;
    }
    for (uint32_t b = 0; *out && b < p->n_blocks; b++) {
        uint32_t owner = chunks->owners[p->blocks[b]];
        if (owner != GM_NO_OWNER && owner != me) {
            GM_TRY(gm_chunks_evict(chunks, owner / GM_N_PIECES, (gm_piece)(owner % GM_N_PIECES)));
            GM_TRY(gm_piece_order_write(chunks, &chunks->pieces[owner], stream));
        }
        chunks->owners[p->blocks[b]] = me; /* last: after an error the block is still the other's */
    }
    return GM_OK;
}

/* Before its blocks go elsewhere; nothing is in flight. */
static gm_status unmap_stage(gm_chunks *chunks)
{
    uint32_t n = chunks->stage_blocks;
    chunks->stage_blocks = 0;
    return n == 0 ? GM_OK : chunks->device->ops->unmap(chunks->device, chunks->stage, n);
}

static void disown_all(gm_chunks *chunks)
{
    for (uint32_t i = 0; i < chunks->n_indices; i++) {
        chunks->owners[i] = GM_NO_OWNER;
    }
}

gm_status gm_chunks_leave_placement(gm_chunks *chunks)
{
    if (!chunks->has_placement) {
        return GM_OK;
    }
    GM_TRY(gm_chunks_sync(chunks)); /* invariant 4 falls to the host now */
    GM_TRY(unmap_stage(chunks));
    chunks->has_placement = false;
    disown_all(chunks);
    for (size_t i = 0; i < (size_t)chunks->n_chunks * GM_N_PIECES; i++) {
        piece *p = &chunks->pieces[i];
        p->is_placed = p->shows_next = false;
        for (uint32_t b = 0; gm_is_resident(p) && b < p->n_blocks; b++) {
            chunks->owners[p->blocks[b]] = (uint32_t)i;
        }
    }
    chunks->n_free = 0;
    for (uint32_t i = chunks->n_indices; i-- > 0;) {
        if (chunks->blocks[i] && chunks->owners[i] == GM_NO_OWNER) {
            gm_block_push(chunks, i);
        }
    }
    return GM_OK;
}

/* What may stay where it is under the plan: resident now and resident then. */
static bool is_kept(const piece *p, const gm_place *place)
{
    return gm_is_resident(p) && place->is_resident && p->n_blocks > 0;
}

static gm_status evict_others(gm_chunks *chunks, const gm_plan *plan)
{
    for (uint32_t id = 0; id < chunks->n_chunks; id++) {
        for (int kind = 0; kind < GM_N_PIECES; kind++) {
            const piece *p = gm_piece_at(chunks, id, (gm_piece)kind);
            const gm_place *place = gm_plan_place(plan, id, (gm_piece)kind);
            GM_ASSERT(!place->is_resident || place->length == p->n_blocks);
            if (gm_is_resident(p) && p->n_blocks > 0 && !is_kept(p, place)) {
                GM_ASSERT(p->pins == 0); /* adopt has looked */
                GM_TRY(gm_chunks_evict(chunks, id, (gm_piece)kind));
            }
        }
    }
    return GM_OK;
}

/* physical[i] is the block behind the plan's number i: kept pieces keep theirs, others that will
 * stay take those that they show, the rest are free or new ones. */
static gm_status assign_blocks(gm_chunks *chunks, const gm_plan *plan, uint32_t *physical,
                               uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        physical[i] = UINT32_MAX;
    }
    for (uint32_t id = 0; id < chunks->n_chunks; id++) {
        for (int kind = 0; kind < GM_N_PIECES; kind++) {
            const piece *p = gm_piece_at(chunks, id, (gm_piece)kind);
            const gm_place *place = gm_plan_place(plan, id, (gm_piece)kind);
            bool has_own =
                is_kept(p, place) || (place->is_resident && p->n_blocks > 0 && !gm_is_resident(p) &&
                                      gm_block_take_shown(chunks, p));
            for (uint32_t b = 0; has_own && b < p->n_blocks; b++) {
                physical[gm_place_block(place, b)] = p->blocks[b];
            }
        }
    }
    for (uint32_t i = 0; i < n; i++) {
        if (physical[i] != UINT32_MAX) {
            continue;
        }
        if (chunks->n_free == 0) {
            GM_FAIL_IF(!gm_block_may_grow(chunks), GM_ERR_NOMEM,
                       "DEVICE: a plan of %s exceeds the %s that are left for chunks",
                       gm_wanted((size_t)n * chunks->device->block_bytes).text,
                       gm_there(chunks->limit).text);
            GM_TRY(gm_block_grow(chunks));
        }
        physical[i] = gm_block_pop(chunks);
    }
    return GM_OK;
}

/* The state ring's blocks, in a row, behind the range of the stage. */
static gm_status map_stage(gm_chunks *chunks, const gm_plan *plan, const uint32_t *physical)
{
    gm_device *device = chunks->device;
    const gm_place *ring = NULL;
    for (uint32_t id = 0; !chunks->places_states && id < chunks->n_chunks && !ring; id++) {
        const gm_place *place = gm_plan_place(plan, id, GM_STATE);
        ring = place->length > 0 && !place->is_resident ? place : NULL;
    }
    chunks->stage_blocks = !ring                                   ? 0
                           : ring->length < chunks->stage_capacity ? ring->length
                                                                   : chunks->stage_capacity;
    for (uint32_t b = 0; b < chunks->stage_blocks; b++) {
        chunks->scratch[b] = chunks->blocks[physical[ring->base + b]];
    }
    chunks->stats.n_maps++;
    return chunks->stage_blocks == 0
               ? GM_OK
               : device->ops->map(device, chunks->stage, chunks->scratch, chunks->stage_blocks);
}

static gm_status map_placement(gm_chunks *chunks, const gm_plan *plan, const uint32_t *physical)
{
    disown_all(chunks);
    for (uint32_t id = 0; id < chunks->n_chunks; id++) {
        for (int kind = 0; kind < GM_N_PIECES; kind++) {
            piece *p = gm_piece_at(chunks, id, (gm_piece)kind);
            const gm_place *place = gm_plan_place(plan, id, (gm_piece)kind);
            bool is_passing = kind == GM_STATE && !place->is_resident && !chunks->places_states;
            p->is_placed = place->length > 0 && p->n_blocks > 0 && !is_passing;
            if (!p->is_placed) {
                continue;
            }
            bool is_same = p->is_mapped;
            for (uint32_t b = 0; b < p->n_blocks; b++) {
                uint32_t index = physical[gm_place_block(place, b)];
                is_same = is_same && p->blocks[b] == index;
                p->blocks[b] = index;
                if (gm_is_resident(p)) {
                    chunks->owners[index] = gm_piece_index(chunks, p);
                }
            }
            if (!is_same) {
                GM_TRY(gm_block_map(chunks, p));
            }
        }
    }
    return GM_OK;
}

gm_status gm_chunks_adopt(gm_chunks *chunks, const gm_plan *plan, uint32_t *out_blocks)
{
    uint32_t n = gm_plan_n_blocks(plan);
    for (uint32_t id = 0; id < chunks->n_chunks; id++) {
        for (int kind = 0; kind < GM_N_PIECES; kind++) {
            const piece *p = gm_piece_at(chunks, id, (gm_piece)kind);
            GM_FAIL_IF(p->pins > 0 && !is_kept(p, gm_plan_place(plan, id, (gm_piece)kind)),
                       GM_ERR_STATE, "chunk %u is in use and cannot be placed", id);
        }
    }
    uint32_t *physical = calloc(n ? n : 1, sizeof *physical);
    GM_FAIL_IF(!physical, GM_ERR_NOMEM, "HOST: a plan of %u blocks", n);
    gm_status status;
    GM_TRY_GOTO(status, done, gm_chunks_leave_placement(chunks));
    GM_TRY_GOTO(status, done, evict_others(chunks, plan));
    GM_TRY_GOTO(status, done, gm_chunks_sync(chunks));
    status = assign_blocks(chunks, plan, physical, n);
    *out_blocks = chunks->n_blocks;
    if (status != GM_OK) { /* what had been taken is free again */
        disown_all(chunks);
        chunks->has_placement = true;
        char text[512];
        snprintf(text, sizeof text, "%s", gm_last_error());
        gm_status left = gm_chunks_leave_placement(chunks);
        status = left == GM_OK ? GM_FAIL(status, "%s", text) : left;
        goto done;
    }
    GM_TRY_GOTO(status, done, map_placement(chunks, plan, physical));
    GM_TRY_GOTO(status, done, map_stage(chunks, plan, physical));
    while (status == GM_OK && chunks->n_free > 0) {
        status = gm_block_shrink(chunks);
    }
    chunks->has_placement = status == GM_OK;
    GM_ASSERT(status != GM_OK || chunks->n_blocks == n); /* the plan's sum is all there is */
done:
    free(physical);
    return status;
}
