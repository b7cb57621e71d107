/* band.cuh - the fast path of the exact sum: squares added to registers.
 *
 * A warp agrees on a band of the accumulator's bits, whose lowest it takes from the largest
 * exponent that it has just read; each thread adds the squares that lie in the band to registers:
 * 64 bits for the 16-bit dtypes, where a value shifted to its place is a 32-bit integer whose
 * square takes one instruction, 128 bits for fp32.  Everything else (far smaller values, denormals)
 * goes to the block's limbs by atomics; infinities and NaNs are only counted.
 *
 * Invariants
 *   1. A band takes MAX_ADDS squares per thread between flushes, and MAX_ADDS of the largest that
 *      it takes fit.
 *   2. Bands are bases of a warp, never of a thread: a flush is a reduction over the warp. */
#pragma once

#include "device/kernels/exact.cuh"

#define LEAST_NORMAL_BITS 0x00800000u

/* Counts a value's exponent (field - 1 + DROP, a binade's number) from `base`, which is the same in
 * all of a warp; the lowest bit of the band is bit 2 * base of the accumulator. */
template <typename Type> struct band {
    typedef typename Type::Bits Bits;
    static constexpr bool IS_WIDE = Type::SIGNIFICAND > 16;
    static constexpr uint32_t BITS = IS_WIDE ? 128 : 64;
    static constexpr uint32_t LOG_MAX_ADDS = IS_WIDE ? 14 : 8;
    static constexpr uint32_t MAX_ADDS = 1u << LOG_MAX_ADDS;
    static constexpr uint32_t HEADROOM = IS_WIDE ? 4 : 2; /* binades kept free above the largest */
    static constexpr uint32_t DROP = 24u - Type::SIGNIFICAND; /* zero bits of an fp32 significand */
    static constexpr uint32_t LIMIT = (BITS - LOG_MAX_ADDS - 2u * Type::SIGNIFICAND) / 2u;
    /* a largest value below this moves the band down */
    static constexpr uint32_t MIN_HEIGHT = (LIMIT - HEADROOM) * 2u / 3u;
    static_assert(IS_WIDE || Type::SIGNIFICAND + LIMIT <= 32, "a shifted value has 32 bits");

    uint64_t low = 0, high = 0;
    uint32_t base = 0x80000000u; /* no value is in such a band: the first one places it */
    uint32_t n_adds = 0;

    /* += (m << height)^2; height <= LIMIT unless m is 0. */
    __device__ __forceinline__ void add(uint32_t m, uint32_t height)
    {
        if constexpr (!IS_WIDE) {
            uint32_t x = m << (height & 31u);
            low += (uint64_t)x * x;
            return;
        }
        /* shifts by 64 or more give 0 */
        asm("{\n\t"
            ".reg .u64 a, b, c;\n\t"
            ".reg .u32 n;\n\t"
            "shl.b64 a, %2, %3;\n\t"
            "sub.u32 n, 64, %3;\n\t"
            "shr.u64 b, %2, n;\n\t"
            "sub.u32 n, %3, 64;\n\t"
            "shl.b64 c, %2, n;\n\t"
            "or.b64 b, b, c;\n\t"
            "add.cc.u64 %0, %0, a;\n\t"
            "addc.u64 %1, %1, b;\n\t"
            "}"
            : "+l"(low), "+l"(high)
            : "l"((uint64_t)m * m), "r"(2u * height));
    }

    /* Zeros and denormals (field 0) wrap to beyond the limit, as base >= DROP. */
    __device__ __forceinline__ uint32_t height_of(uint32_t bits) const
    {
        return (bits >> 23) - 1u + DROP - base;
    }

    /* Adds the warp's bands to the block's limbs; the whole warp calls. */
    __device__ __forceinline__ void end(block_sum *sum) const
    {
        flush<BITS / 16>(sum, low, high, 2u * base);
    }

    /* Adds the squares of N elements of each thread; the whole warp calls.  read(i) gives element i
     * again, 0 where there is none (an index that the compiler does not know must not reach into
     * registers).  Non-finite
     * elements are replaced by 0. */
    template <uint32_t N, typename Read>
    __device__ __forceinline__ void take(block_sum *sum, Bits (&elements)[N], Read read)
    {
        uint32_t largest = 0;
#pragma unroll
        for (uint32_t i = 0; i < N; i++) {
            largest = max(largest, magnitude<Type>(elements[i]));
        }
        largest = __reduce_max_sync(FULL, largest);
        if (largest >= INFINITY_BITS) {
            largest = drop_non_finite(sum, elements);
        }
        if (largest == 0) {
            return;
        }
        if (largest >= LEAST_NORMAL_BITS) {
            uint32_t height = height_of(largest);
            bool is_low = height < MIN_HEIGHT && base > DROP;
            if (height > LIMIT || is_low || n_adds + N > MAX_ADDS) { /* above, below (wrapped) */
                end(sum);
                uint32_t top = height + base;
                low = high = 0;
                base = top > DROP + LIMIT - HEADROOM ? top - (LIMIT - HEADROOM) : DROP;
                n_adds = 0;
            }
        }
        uint32_t others = 0; /* is a bit set in an element that is not in the band? */
#pragma unroll
        for (uint32_t i = 0; i < N; i++) {
            uint32_t bits = magnitude<Type>(elements[i]), height = height_of(bits);
            bool is_inside = height <= LIMIT;
            add(is_inside ? ((bits & 0x7fffffu) | 0x800000u) >> DROP : 0u, height);
            others |= is_inside ? 0u : bits;
        }
        n_adds += N;
        for (uint32_t i = 0; others && i < N; i++) {
            uint32_t bits = magnitude<Type>(read(i));
            if (height_of(bits) > LIMIT && bits < INFINITY_BITS) {
                add_exact(sum, bits);
            }
        }
    }

  private:
    /* Counts infinities and NaNs and puts zeros in their place; returns the warp's largest of the
     * rest. */
    template <uint32_t N>
    static __device__ __forceinline__ uint32_t drop_non_finite(block_sum *sum, Bits (&elements)[N])
    {
        uint32_t n_inf = 0, n_nan = 0, largest = 0;
#pragma unroll
        for (uint32_t i = 0; i < N; i++) {
            uint32_t bits = magnitude<Type>(elements[i]);
            n_inf += bits == INFINITY_BITS;
            n_nan += bits > INFINITY_BITS;
            elements[i] = bits < INFINITY_BITS ? elements[i] : (Bits)0;
            largest = max(largest, bits < INFINITY_BITS ? bits : 0u);
        }
        n_inf = __reduce_add_sync(FULL, n_inf);
        n_nan = __reduce_add_sync(FULL, n_nan);
        if (threadIdx.x % WARP == 0) {
            atomicAdd(&sum->n_inf, (limb_t)n_inf);
            atomicAdd(&sum->n_nan, (limb_t)n_nan);
        }
        return __reduce_max_sync(FULL, largest);
    }
};
