/* args.h - what kernels.c passes to the kernels: plain structs by value, sizes known to both sides.
 *
 * Invariant: a kernel's parameters stay within 4 KiB, the limit of every driver and GPU. */
#pragma once

#include "arith/arith.h"

/* Threads of a block, and elements of a tile: what one block handles in adam and grad_add. */
#define GM_BLOCK_THREADS   256
#define GM_THREAD_ELEMENTS 8
#define GM_TILE_ELEMENTS   (GM_BLOCK_THREADS * GM_THREAD_ELEMENTS)

/* sumsq: 16-byte loads that a thread keeps in flight, what its block reads at a time, and blocks of
 * a multiprocessor, together enough to hide the latency of memory. */
#define GM_SUMSQ_UNROLL        2
#define GM_SUMSQ_BLOCKS_PER_SM 4
#define GM_SUMSQ_BLOCK_VECTORS (GM_BLOCK_THREADS * GM_SUMSQ_UNROLL)

/* grad_add with a sum: eights that a thread keeps in flight, and blocks of a multiprocessor. */
#define GM_GRAD_SUM_EIGHTS        2
#define GM_GRAD_SUM_BLOCKS_PER_SM 5
#define GM_GRAD_SUM_TILE_ELEMENTS (GM_TILE_ELEMENTS * GM_GRAD_SUM_EIGHTS)

/* One range of Adam, cut into tiles.  Tiles start at `origin` <= begin, chosen so that the threads
 * of a tile start at 16-byte boundaries; elements before begin and from end on are not touched. */
typedef struct gm_adam_piece {
    int64_t origin;
    int64_t begin, end;
    uint32_t first_tile; /* number of this piece's first tile within the launch */
    uint32_t is_aligned; /* every array has 16-byte boundaries where the threads start */
    gm_adam_scalars scalars;
} gm_adam_piece;

#define GM_ADAM_PIECES 48

typedef struct gm_adam_batch {
    void *weight, *low;
    float *m, *v;
    const void *grad;
    const float *grad_scale; /* NULL: that of the pieces */
    uint32_t n_pieces, n_tiles;
    gm_adam_piece piece[GM_ADAM_PIECES];
} gm_adam_batch;

typedef struct gm_grad_add_batch {
    void *dst;
    const void *src;
    int64_t origin; /* <= 0, as above */
    int64_t numel;
    uint32_t is_aligned, accumulate;
    float divisor; /* 1: none */
} gm_grad_add_batch;

/* A launch of one block overwrites *sum, a larger one adds to it. */
typedef struct gm_grad_sum_batch {
    gm_grad_add_batch add;
    uint32_t n_tiles; /* of GM_GRAD_SUM_TILE_ELEMENTS */
    gm_sumsq *sum;
} gm_grad_sum_batch;

/* Elements of data are head | n_vectors x 16 bytes | tail; the vectors are 16-byte aligned. */
typedef struct gm_sumsq_batch {
    const void *data;
    uint64_t head, n_vectors, tail;
    gm_sumsq *sum;
} gm_sumsq_batch;
