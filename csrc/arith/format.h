/* format.h - the number formats, bit by bit: bf16 and fp16 to and from fp32, in integers only.
 *
 * The written reference for every other implementation (vector registers, CUDA).
 * Invariants
 *   1. No floating-point operation: nothing here depends on rounding mode or flush-to-zero.
 *   2. A NaN never leaves with a payload or a sign: 0x7fc00000, 0x7fc0, 0x7e00. */
#pragma once

#include <string.h>

#include "base/base.h"

#define GM_F32_NAN  UINT32_C(0x7fc00000)
#define GM_BF16_NAN UINT16_C(0x7fc0)
#define GM_F16_NAN  UINT16_C(0x7e00)

static inline uint32_t gm_f32_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float gm_f32_from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline bool gm_bits_are_nan(uint32_t bits)
{
    return (bits & UINT32_C(0x7fffffff)) > UINT32_C(0x7f800000);
}

static inline uint32_t gm_canonical_bits(uint32_t bits)
{
    return gm_bits_are_nan(bits) ? GM_F32_NAN : bits;
}

static inline float gm_canonical(float value)
{
    return gm_f32_from_bits(gm_canonical_bits(gm_f32_bits(value)));
}

static inline uint32_t gm_bf16_to_bits(uint16_t value)
{
    return (uint32_t)value << 16;
}

/* Nearest, ties to even: for gradients, as torch rounds.  Masters use gm_pack_bf16 instead. */
static inline uint16_t gm_bits_to_bf16(uint32_t bits)
{
    if (gm_bits_are_nan(bits)) {
        return GM_BF16_NAN;
    }
    return (uint16_t)((bits + UINT32_C(0x7fff) + ((bits >> 16) & 1u)) >> 16);
}

/* Exact. */
static inline uint32_t gm_f16_to_bits(uint16_t value)
{
    uint32_t sign = (uint32_t)(value & 0x8000u) << 16;
    uint32_t exponent = (value >> 10) & 31u;
    uint32_t fraction = value & 0x3ffu;
    if (exponent == 31) {
        return fraction ? GM_F32_NAN : sign | UINT32_C(0x7f800000);
    }
    if (exponent == 0) {
        if (fraction == 0) {
            return sign;
        }
        /* fraction * 2^-24: shift the leading one up to bit 10, where a normal fp16 has it */
        uint32_t shift = (uint32_t)__builtin_clz(fraction) - 21u;
        fraction = (fraction << shift) & 0x3ffu;
        exponent = 1u - shift; /* wraps; the bias below brings it back to 103..112 */
    }
    return sign | ((exponent + 112u) << 23) | (fraction << 13);
}

/* Nearest, ties to even; 65520 and more is infinity. */
static inline uint16_t gm_bits_to_f16(uint32_t bits)
{
    uint32_t magnitude = bits & UINT32_C(0x7fffffff);
    uint32_t sign = (bits >> 16) & 0x8000u;
    if (magnitude > UINT32_C(0x7f800000)) {
        return GM_F16_NAN;
    }
    if (magnitude >= UINT32_C(0x477ff000)) {
        return (uint16_t)(sign | 0x7c00u);
    }
    if (magnitude < UINT32_C(0x38800000)) { /* below 2^-14: a multiple of 2^-24 */
        if (magnitude <= UINT32_C(0x33000000)) {
            return (uint16_t)sign; /* at most 2^-25, half of the least fp16: to even, 0 */
        }
        uint32_t shift = 126u - (magnitude >> 23); /* 14..24 */
        uint32_t significand = (magnitude & UINT32_C(0x7fffff)) | UINT32_C(0x800000);
        uint32_t quotient = significand >> shift;
        uint32_t rest = significand & ((UINT32_C(1) << shift) - 1u);
        uint32_t half = UINT32_C(1) << (shift - 1u);
        quotient += (rest > half || (rest == half && (quotient & 1u))) ? 1u : 0u;
        return (uint16_t)(sign | quotient);
    }
    uint32_t rebased = magnitude - UINT32_C(0x38000000);
    return (uint16_t)(sign | ((rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13));
}

/* Element i of an array of `dtype` as fp32 bits. */
static inline uint32_t gm_load_bits(const void *data, gm_dtype dtype, size_t i)
{
    switch (dtype) {
    case GM_BF16: return gm_bf16_to_bits(((const uint16_t *)data)[i]);
    case GM_F16: return gm_f16_to_bits(((const uint16_t *)data)[i]);
    case GM_F32: break;
    }
    return gm_f32_bits(((const float *)data)[i]);
}

/* The packed master of a bf16 weight (arith.h). */
static inline uint32_t gm_merge_bf16(uint16_t hi, int16_t lo)
{
    return ((uint32_t)hi << 16) + (uint32_t)(int32_t)lo;
}

static inline void gm_pack_bf16(uint32_t master, uint16_t *hi, int16_t *lo)
{
    uint32_t bits = gm_canonical_bits(master);
    uint32_t high = (bits + UINT32_C(0x8000)) >> 16;
    uint32_t rest = bits - (high << 16); /* -0x8000..0x7fff modulo 2^32 */
    *hi = (uint16_t)high;
    *lo = (int16_t)(int32_t)rest;
}
