/* ring.h - who has the blocks of a plan's rings: neighbours in a ring take them from each other.
 *
 * Blocks have the plan's numbers; those of different rings are apart, so that one array serves all
 * rings. */
#pragma once

#include "plan/plan.h"

#define GM_NO_OWNER UINT32_MAX

/* (n_blocks,) without owners, for free(). */
gm_status gm_owners_new(uint32_t n_blocks, uint32_t **out);
/* A walk over a place of n_blocks that `chunk` takes, from *at = 0: gives the block at which the
 * last call has stopped and the next ones to the chunk, and returns the owner of the first block
 * that another chunk has: a caller who stops there leaves it to that one.  GM_NO_OWNER: the chunk
 * has them all. */
uint32_t gm_owners_take(uint32_t *owners, const gm_place *place, uint32_t n_blocks, uint32_t chunk,
                        uint32_t *at);

typedef struct gm_rings {    /* while a course runs */
    uint32_t *owner, *until; /* (n_blocks,) the chunk that has a block, and until which tick */
} gm_rings;

gm_status gm_rings_new(uint32_t n_blocks, gm_rings *out);
void gm_rings_free(gm_rings *rings);
/* The tick from which the place's blocks are free for the chunk. */
uint32_t gm_rings_free_from(const gm_rings *rings, const gm_place *place, uint32_t n_blocks,
                            uint32_t chunk);
/* The chunk has its place until tick `end`.  Gives the tick from which it was free; GM_NO_TICK: the
 * chunk had it all. */
uint32_t gm_rings_claim(gm_rings *rings, const gm_place *place, uint32_t n_blocks, uint32_t chunk,
                        uint32_t end);
