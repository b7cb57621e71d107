/* layout.h - which parameter lives at which offset of which chunk.  Pure; immutable once built.
 *
 * Parameters are packed in the given order.  Parameters of different kinds (weight format,
 * trainable or frozen) never share a chunk, because their chunks carry different states.  A chunk
 * is closed when the next parameter of its kind would take it beyond chunk_bytes; a larger
 * parameter gets a chunk of its own.  Where there are several shards, and parameters of a kind that
 * may not be cut anywhere, shards.h says which of them share a chunk, and in which order.
 *
 * Invariants
 *   1. Each parameter starts at a multiple of GM_ALIGN bytes of weight, as torch's allocator would
 *      place it: libraries choose kernels by alignment, and other kernels mean other bits.
 *   2. Parameters of one chunk do not overlap and lie in [0, chunk.numel).
 *   3. chunk.numel is n_shards * shard_numel, and shard_numel * weight_bytes a multiple of
 *      GM_ALIGN. */
#pragma once

#include "base/base.h"

#define GM_ALIGN ((size_t)512)

typedef struct gm_layout gm_layout; /* opaque */

/* What a chunk consists of; each piece is moved and placed by itself.
 *
 * With one rank the first three are the chunk, and the others have no bytes.  With more, the first
 * three are this rank's shard: elements [rank, rank + 1) * shard_numel of the chunk, updated by
 * this rank alone.  The others are transient: whole chunks without a home, whose bytes come of a
 * collective or go into one. */
typedef enum gm_piece {
    GM_WEIGHT = 0,
    GM_STATE = 1,
    GM_GRAD = 2,
    GM_GATHERED = 3,  /* the weights of all ranks: what tensors show */
    GM_UNREDUCED = 4, /* this rank's gradients of one pass, before the sum over ranks */
    GM_N_PIECES = 5,
    GM_N_OWN_PIECES = 3
} gm_piece;

static inline bool gm_is_transient(gm_piece kind)
{
    return kind >= GM_N_OWN_PIECES;
}

typedef struct gm_param_spec {
    uint64_t numel;        /* may be 0 */
    uint32_t kind;         /* below 64; parameters of equal kind may share a chunk */
    uint32_t weight_bytes; /* of one element: 1, 2, 4, 8 or 16; equal within a kind */
    /* Shards of it begin at multiples of so many elements, and the last has as many; 0, 1: they
     * begin anywhere. */
    uint64_t cut;
} gm_param_spec;

typedef struct gm_param_place {
    uint32_t chunk;
    uint64_t offset; /* elements from the chunk's start */
    uint64_t numel;
} gm_param_place;

/* What one shard has of a parameter: elements [first, first + numel), at `offset` of the shard. */
typedef struct gm_part {
    uint64_t first, numel, offset; /* numel 0: nothing */
} gm_part;

typedef struct gm_chunk_shape {
    uint32_t kind;
    uint32_t weight_bytes;
    uint64_t numel;       /* elements with padding */
    uint64_t shard_numel; /* of them, of one rank */
    uint64_t used;        /* elements of parameters */
    uint32_t first_param; /* in the order of the kind; a chunk's have place.chunk == its id */
    uint32_t n_params;
} gm_chunk_shape;

/* chunk_bytes > 0: bytes of weights.  n_shards > 0: ranks that share each chunk.  GM_ERR_ARG on a
 * bad element size or numel that overflows. */
gm_status gm_layout_new(const gm_param_spec *params, uint32_t n_params, size_t chunk_bytes,
                        uint32_t n_shards, gm_layout **out);
void gm_layout_free(gm_layout *layout); /* NULL is fine */
uint32_t gm_layout_n_chunks(const gm_layout *layout);
const gm_chunk_shape *gm_layout_chunk(const gm_layout *layout, uint32_t chunk);
const gm_param_place *gm_layout_param(const gm_layout *layout, uint32_t param);
gm_part gm_layout_part(const gm_layout *layout, uint32_t param, uint32_t shard);
/* Identifies the layout: equal on ranks with equal models.  FNV-1a over all places. */
uint64_t gm_layout_hash(const gm_layout *layout);

/* The chunk size in [min_bytes, min_bytes + range_bytes], tried at n_grids + 1 even steps, that
 * leaves the least of each full-size chunk unused; the smallest of equals.  This is the originals'
 * search. */
gm_status gm_layout_search(const gm_param_spec *params, uint32_t n_params, size_t min_bytes,
                           size_t range_bytes, uint32_t n_grids, size_t *out_chunk_bytes);
