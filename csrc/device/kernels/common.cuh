/* common.cuh - number formats and vector access on the device; format.h is the written reference.
 *
 * Invariants
 *   1. A NaN that is stored is canonical: 0x7fc00000, 0x7fc0, 0x7e00.
 *   2. No contraction, no flush-to-zero: compiled with -fmad=false -ftz=false -prec-div=true
 *      -prec-sqrt=true, and the arithmetic is written with rounding intrinsics all the same. */
#pragma once

#include <cuda_fp16.h>
#include <stdint.h>

#include "device/kernels/args.h"

/* ---- formats ---- */

static __device__ __forceinline__ bool gm_is_nan_bits(uint32_t bits)
{
    return (bits & 0x7fffffffu) > 0x7f800000u;
}

static __device__ __forceinline__ float gm_canonical(float value)
{
    return gm_is_nan_bits(__float_as_uint(value)) ? __uint_as_float(0x7fc00000u) : value;
}

/* An element type: Bits as stored, bits of its significand (the implicit one included), exact
 * conversion to fp32, conversion from fp32 (nearest even). */
struct gm_type_f32 {
    typedef uint32_t Bits;
    static constexpr uint32_t SIGNIFICAND = 24;
    static __device__ __forceinline__ float load(Bits bits)
    {
        return __uint_as_float(bits);
    }
    static __device__ __forceinline__ Bits store(float value)
    {
        return __float_as_uint(gm_canonical(value));
    }
};

struct gm_type_bf16 {
    typedef uint16_t Bits;
    static constexpr uint32_t SIGNIFICAND = 8;
    static __device__ __forceinline__ float load(Bits bits)
    {
        return __uint_as_float((uint32_t)bits << 16);
    }
    static __device__ __forceinline__ Bits store(float value)
    {
        uint32_t bits = __float_as_uint(value);
        uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        return (Bits)(gm_is_nan_bits(bits) ? 0x7fc0u : rounded);
    }
};

struct gm_type_f16 {
    typedef uint16_t Bits;
    static constexpr uint32_t SIGNIFICAND = 11;
    static __device__ __forceinline__ float load(Bits bits)
    {
        return __half2float(__ushort_as_half(bits));
    }
    static __device__ __forceinline__ Bits store(float value)
    {
        Bits rounded = __half_as_ushort(__float2half_rn(value));
        return gm_is_nan_bits(__float_as_uint(value)) ? (Bits)0x7e00u : rounded;
    }
};

/* ---- eight consecutive elements, as 16-byte accesses ---- */

template <typename Bits> struct gm_eight {
    static_assert(sizeof(Bits) == 2 || sizeof(Bits) == 4, "element size");
    static constexpr int n_vectors = sizeof(Bits) / 2;
    union {
        uint4 vector[n_vectors];
        Bits element[GM_THREAD_ELEMENTS];
    };
    __device__ __forceinline__ void load(const Bits *from)
    {
#pragma unroll
        for (int i = 0; i < n_vectors; i++) {
            vector[i] = ((const uint4 *)from)[i];
        }
    }
    __device__ __forceinline__ void store(Bits *to) const
    {
#pragma unroll
        for (int i = 0; i < n_vectors; i++) {
            ((uint4 *)to)[i] = vector[i];
        }
    }
};
