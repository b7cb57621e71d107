/* exact.cuh - an exact sum of squares, made by a block in shared memory: the same number whatever
 * the order (band.cuh has the fast path).
 *
 * A finite fp32 value is m * 2^(k - 149), m < 2^24 an integer and k = max(exponent field, 1) - 1;
 * its square is m^2 shifted left by 2k bits above the accumulator's lowest bit, 2^-298.
 *
 * Invariants
 *   1. Integers only: no operation rounds, so no order, split or grid can change the result.
 *   2. Block limbs are carried before they are added to the result, so that each addition is below
 *      2^32 and the result takes 2^32 of them. */
#pragma once

#include "device/kernels/common.cuh"

#define WARP          32u
#define FULL          0xffffffffu
#define INFINITY_BITS 0x7f800000u

typedef unsigned long long limb_t;

/* gm_sumsq in shared memory. */
struct block_sum {
    limb_t limb[GM_SUMSQ_LIMBS];
    limb_t n_inf, n_nan;
};

/* |value| as fp32 bits; exact. */
template <typename Type>
static __device__ __forceinline__ uint32_t magnitude(typename Type::Bits bits)
{
    return __float_as_uint(Type::load(bits)) & 0x7fffffffu;
}

/* Any value, exactly, straight into the block's limbs. */
static __device__ void add_exact(block_sum *sum, uint32_t bits)
{
    if (bits == 0) {
        return;
    }
    if (bits >= INFINITY_BITS) {
        atomicAdd(bits == INFINITY_BITS ? &sum->n_inf : &sum->n_nan, (limb_t)1);
        return;
    }
    uint32_t field = bits >> 23;
    uint32_t m = field ? (bits & 0x7fffffu) | 0x800000u : bits;
    uint32_t position = 2u * (field ? field - 1u : 0u);
    uint32_t limb = position >> 5, shift = position & 31u; /* even: 0..30 */
    uint64_t square = (uint64_t)m * m;
    uint32_t low = (uint32_t)(square << shift);
    uint32_t middle = (uint32_t)(square >> (32u - shift));
    uint32_t high = (uint32_t)((square >> 32) >> (32u - shift));
    if (low) {
        atomicAdd(&sum->limb[limb], (limb_t)low);
    }
    if (middle) {
        atomicAdd(&sum->limb[limb + 1], (limb_t)middle);
    }
    if (high) {
        atomicAdd(&sum->limb[limb + 2], (limb_t)high);
    }
}

/* Adds the warp's bands, N_PARTS x 16 bits that begin at bit `position`, to the block's limbs. */
template <uint32_t N_PARTS>
static __device__ __noinline__ void flush(block_sum *sum, uint64_t low, uint64_t high,
                                          uint32_t position)
{
    const uint32_t lane = threadIdx.x % WARP;
    uint32_t mine = 0;
#pragma unroll
    for (uint32_t i = 0; i < N_PARTS; i++) {
        uint64_t half = i < 4 ? low : high;
        uint32_t total = __reduce_add_sync(FULL, (uint32_t)(half >> (16u * (i & 3u))) & 0xffffu);
        mine = lane == i ? total : mine;
    }
    if (mine) {
        position += 16u * lane;
        limb_t value = (limb_t)mine << (position & 31u); /* below 2^52 */
        atomicAdd(&sum->limb[position >> 5], value & 0xffffffffu);
        atomicAdd(&sum->limb[(position >> 5) + 1], value >> 32);
    }
}

/* All threads of the block call, first and last.  Between them *sum is changed by atomics only. */
static __device__ __forceinline__ void begin_sum(block_sum *sum)
{
    if (threadIdx.x < sizeof(*sum) / sizeof(limb_t)) {
        ((limb_t *)sum)[threadIdx.x] = 0;
    }
    __syncthreads();
}

/* Adds to *result, or overwrites it where this block is the only one. */
static __device__ __forceinline__ void end_sum(block_sum *sum, gm_sumsq *result, bool overwrites)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i + 1 < GM_SUMSQ_LIMBS; i++) {
            sum->limb[i + 1] += sum->limb[i] >> 32;
            sum->limb[i] &= 0xffffffffu;
        }
    }
    __syncthreads();
    if (threadIdx.x < sizeof(*sum) / sizeof(limb_t)) {
        limb_t value = ((limb_t *)sum)[threadIdx.x];
        if (overwrites) {
            ((limb_t *)result)[threadIdx.x] = value;
        } else if (value) {
            atomicAdd((limb_t *)result + threadIdx.x, value);
        }
    }
}

static_assert(sizeof(block_sum) == sizeof(gm_sumsq), "one layout");
