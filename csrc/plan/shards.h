/* shards.h - where parameters that may not be cut anywhere lie in their chunks.  Pure.
 *
 * Parameters stay in their order as far as chunks go: each chunk has a run of them.  Within a chunk
 * they lie in any order, so that its shards are of equal size, and what lies across the boundary of
 * two may be cut there.  What no parameter can fill is padding; the runs are those with the least
 * of it in all. */
#pragma once

#include "base/base.h"

typedef struct gm_shards_item {
    uint64_t numel;
    uint64_t cut; /* it may be cut at multiples of so many elements, and keeps as many behind it */
} gm_shards_item;

typedef struct gm_shards_place {
    uint32_t run;         /* from 0 on, in the order of items */
    uint64_t offset;      /* in the run's chunk, a multiple of unit */
    uint64_t shard_numel; /* of that chunk, a multiple of unit */
} gm_shards_place;

/* out: (n,).  most: elements of a chunk, unless one item that is not cut asks for larger shards. */
gm_status gm_shards_place_all(const gm_shards_item *items, uint32_t n, uint64_t unit, uint64_t most,
                              uint32_t n_shards, gm_shards_place *out);
