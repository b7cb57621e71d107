/* format_avx2.h - format.h on 8 lanes of AVX2 with F16C; the same bits.
 *
 * F16C ignores flush-to-zero and the rounding mode in MXCSR as used here, and quiets NaNs; NaNs are
 * made canonical before and after, as format.h says. */
#pragma once

#include <immintrin.h>

#include "arith/format.h"

#define GM_AVX2        __attribute__((target("avx2,fma,f16c")))
#define GM_AVX2_INLINE static inline __attribute__((always_inline, target("avx2,fma,f16c")))

GM_AVX2_INLINE __m256 gm8_canonical(__m256 x)
{
    __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32((int)GM_F32_NAN));
    return _mm256_blendv_ps(x, nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

/* The low 16 bits of each 32-bit lane, in order. */
GM_AVX2_INLINE __m128i gm8_narrow(__m256i x)
{
    const __m256i pick = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1,
                                          0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1);
    __m256i halves = _mm256_shuffle_epi8(x, pick);
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(halves, 0x08));
}

GM_AVX2_INLINE __m128i gm8_load16(const void *at)
{
    return _mm_loadu_si128((const __m128i *)at);
}

GM_AVX2_INLINE void gm8_store16(void *at, __m128i x)
{
    _mm_storeu_si128((__m128i *)at, x);
}

GM_AVX2_INLINE __m256i gm8_bf16_to_bits(__m128i x)
{
    return _mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16);
}

/* (hi << 16) + lo, lo signed. */
GM_AVX2_INLINE __m256 gm8_merge_bf16(__m128i hi, __m128i lo)
{
    return _mm256_castsi256_ps(_mm256_add_epi32(gm8_bf16_to_bits(hi), _mm256_cvtepi16_epi32(lo)));
}

GM_AVX2_INLINE void gm8_pack_bf16(__m256 master, void *hi, void *lo)
{
    __m256i bits = _mm256_castps_si256(gm8_canonical(master));
    __m256i high = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x8000)), 16);
    gm8_store16(hi, gm8_narrow(high));
    /* bits - (high << 16) has the low 16 bits of bits */
    gm8_store16(lo, gm8_narrow(bits));
}

GM_AVX2_INLINE __m128i gm8_to_bf16(__m256 x)
{
    __m256i bits = _mm256_castps_si256(gm8_canonical(x));
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    bits = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    return gm8_narrow(_mm256_srli_epi32(bits, 16));
}

GM_AVX2_INLINE __m128i gm8_to_f16(__m256 x)
{
    return _mm256_cvtps_ph(gm8_canonical(x), _MM_FROUND_TO_NEAREST_INT);
}

/* Elements i .. i + 7 as fp32; a NaN is a NaN, its payload is not canonical. */
GM_AVX2_INLINE __m256 gm8_load(const void *data, gm_dtype dtype, size_t i)
{
    switch (dtype) {
    case GM_BF16:
        return _mm256_castsi256_ps(gm8_bf16_to_bits(gm8_load16((const uint16_t *)data + i)));
    case GM_F16: return _mm256_cvtph_ps(gm8_load16((const uint16_t *)data + i));
    case GM_F32: break;
    }
    return _mm256_loadu_ps((const float *)data + i);
}

/* Rounds to nearest even; NaNs become canonical. */
GM_AVX2_INLINE void gm8_store(void *data, gm_dtype dtype, size_t i, __m256 x)
{
    switch (dtype) {
    case GM_BF16: gm8_store16((uint16_t *)data + i, gm8_to_bf16(x)); return;
    case GM_F16: gm8_store16((uint16_t *)data + i, gm8_to_f16(x)); return;
    case GM_F32: break;
    }
    _mm256_storeu_ps((float *)data + i, gm8_canonical(x));
}
