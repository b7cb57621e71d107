/* sumsq_avx2.c - the exact sum of squares, a block of GM_SUMSQ_BLOCK elements at a time.
 *
 * The squares of a block are added into two bands of doubles, placed below the block's greatest
 * magnitude.  With an accumulator A whose unit in the last place is u and stays u, t = A + x has
 * q = t - A, which is x rounded to a multiple of u, and the rest x - q; both are exact.  The rest
 * goes to a second band 44 bits below; what that cannot hold either is set aside element by
 * element.  Nothing is lost, so the result is the exact sum whatever the rounding was.
 *
 * Let T be the position of a bit above the greatest square, in units of 2^-298.
 *   band 0: u0 at T - 43.  256 squares per lane, below 2^(T+8) together = 2^51 u0.
 *   band 1: u1 at T - 87.  256 rests of at most u0 / 2 together, at most 2^7 u0 = 2^51 u1.
 * An accumulator starts at 1.5 * 2^52 u, so it stays in [2^52 u, 2^53 u], where the unit is u.
 * Where T - 87 < 0 the bands begin at bit 0: u1 = 2^-298 divides every square.
 * A square of fp32 is a multiple of its own T - 48, so elements down to 2^-19 of the greatest
 * (2^-35 for bf16) never need setting aside. */
#include "arith/sumsq_impl.h"

#if defined(__x86_64__)

#include "arith/format_avx2.h"

#define LANES     4
#define BAND_BITS 44
/* Elements set aside; a block with more of them is left to the reference, which is faster then. */
#define MAX_ASIDE 128

typedef struct bands {
    __m256d a0, a1;
} bands;

/* Greatest magnitude of the block, as fp32 bits. */
GM_AVX2_INLINE uint32_t greatest(const void *data, gm_dtype dtype, size_t begin)
{
    if (dtype == GM_F32) {
        const float *at = (const float *)data + begin;
        const __m256i mask = _mm256_set1_epi32(0x7fffffff);
        __m256i most = _mm256_setzero_si256();
        for (size_t i = 0; i < GM_SUMSQ_BLOCK; i += 8) {
            __m256i x = _mm256_castps_si256(_mm256_loadu_ps(at + i));
            most = _mm256_max_epi32(most, _mm256_and_si256(x, mask));
        }
        uint32_t lanes[8], result = 0;
        _mm256_storeu_si256((__m256i *)lanes, most);
        for (int i = 0; i < 8; i++) {
            result = lanes[i] > result ? lanes[i] : result;
        }
        return result;
    }
    const uint16_t *at = (const uint16_t *)data + begin;
    const __m256i mask = _mm256_set1_epi16(0x7fff);
    __m256i most = _mm256_setzero_si256();
    for (size_t i = 0; i < GM_SUMSQ_BLOCK; i += 16) {
        __m256i x = _mm256_loadu_si256((const __m256i *)(at + i));
        most = _mm256_max_epi16(most, _mm256_and_si256(x, mask));
    }
    uint16_t lanes[16], result = 0;
    _mm256_storeu_si256((__m256i *)lanes, most);
    for (int i = 0; i < 16; i++) {
        result = lanes[i] > result ? lanes[i] : result;
    }
    return gm_load_bits(&result, dtype, 0);
}

/* Adds x * x; returns what neither band could hold. */
GM_AVX2_INLINE __m256d add_square(bands *w, __m128 x)
{
    __m256d wide = _mm256_cvtps_pd(x);
    __m256d t0 = _mm256_fmadd_pd(wide, wide, w->a0);
    __m256d rest = _mm256_fmsub_pd(wide, wide, _mm256_sub_pd(t0, w->a0));
    __m256d t1 = _mm256_add_pd(rest, w->a1);
    __m256d held = _mm256_sub_pd(t1, w->a1);
    w->a0 = t0;
    w->a1 = t1;
    return _mm256_sub_pd(rest, held);
}

/* Appends the lanes that are not zero; room for LANES must be left. */
GM_AVX2 static size_t set_aside(double *aside, size_t n, __m256d rest)
{
    double lanes[LANES];
    _mm256_storeu_pd(lanes, rest);
    for (int i = 0; i < LANES; i++) {
        aside[n] = lanes[i];
        n += lanes[i] != 0.0;
    }
    return n;
}

/* A power of two, 2^exponent, -1022 <= exponent <= 1023. */
static double power_of_two(int exponent)
{
    uint64_t bits = (uint64_t)(exponent + 1023) << 52;
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* A finite non-zero double that is a multiple of 2^-298. */
static void deposit_double(gm_sumsq_acc *acc, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint64_t significand = (bits & UINT64_C(0xfffffffffffff)) | UINT64_C(0x10000000000000);
    int position = (int)((bits >> 52) & 0x7ffu) - 1075 - GM_SUMSQ_LEAST;
    if (position < 0) {
        significand >>= -position;
        position = 0;
    }
    gm_sumsq_deposit(acc, (unsigned)position, significand, bits >> 63);
}

/* What a band has summed over its lanes, in its units. */
GM_AVX2 static int64_t total_of(__m256d a, __m256d b, double start, double per_unit)
{
    double lanes[2 * LANES];
    int64_t total = 0;
    _mm256_storeu_pd(lanes, a);
    _mm256_storeu_pd(lanes + LANES, b);
    for (int i = 0; i < 2 * LANES; i++) {
        total += (int64_t)((lanes[i] - start) * per_unit);
    }
    return total;
}

GM_AVX2_INLINE bool block(const void *data, gm_dtype dtype, size_t begin, gm_sumsq_acc *acc)
{
    uint32_t most = greatest(data, dtype, begin);
    if (most >= UINT32_C(0x7f800000)) {
        return false;
    }
    int exponent = (int)(most >> 23);
    int top = 2 * (exponent ? exponent - 1 : 0) + 48;
    int position = top > 43 + BAND_BITS ? top - 43 - BAND_BITS : 0;
    double start1 = 1.5 * power_of_two(52 + position + GM_SUMSQ_LEAST);
    double start0 = 1.5 * power_of_two(52 + position + BAND_BITS + GM_SUMSQ_LEAST);
    bands even = {_mm256_set1_pd(start0), _mm256_set1_pd(start1)};
    bands odd = even;
    double aside[MAX_ASIDE + 2 * LANES];
    size_t n_aside = 0;
    for (size_t i = begin; i < begin + GM_SUMSQ_BLOCK; i += 8) {
        __m256 x = gm8_load(data, dtype, i);
        __m256d rest0 = add_square(&even, _mm256_castps256_ps128(x));
        __m256d rest1 = add_square(&odd, _mm256_extractf128_ps(x, 1));
        /* unordered: two rests or-ed together may look like a NaN */
        __m256d any = _mm256_cmp_pd(_mm256_or_pd(rest0, rest1), _mm256_setzero_pd(), _CMP_NEQ_UQ);
        if (__builtin_expect(_mm256_movemask_pd(any), 0)) {
            n_aside = set_aside(aside, n_aside, rest0);
            n_aside = set_aside(aside, n_aside, rest1);
            if (n_aside > MAX_ASIDE) {
                return false;
            }
        }
    }
    for (size_t i = 0; i < n_aside; i++) {
        deposit_double(acc, aside[i]);
    }
    double per_unit1 = power_of_two(-(position + GM_SUMSQ_LEAST));
    double per_unit0 = power_of_two(-(position + BAND_BITS + GM_SUMSQ_LEAST));
    int64_t high = total_of(even.a0, odd.a0, start0, per_unit0);
    int64_t low = total_of(even.a1, odd.a1, start1, per_unit1);
    gm_sumsq_deposit(acc, (unsigned)position + BAND_BITS, (uint64_t)high, false);
    gm_sumsq_deposit(acc, (unsigned)position, low < 0 ? 0 - (uint64_t)low : (uint64_t)low, low < 0);
    return true;
}

GM_AVX2 bool gm_sumsq_block_avx2(const void *data, gm_dtype dtype, size_t begin, gm_sumsq_acc *acc)
{
    switch (dtype) {
    case GM_BF16: return block(data, GM_BF16, begin, acc);
    case GM_F16: return block(data, GM_F16, begin, acc);
    case GM_F32: break;
    }
    return block(data, GM_F32, begin, acc);
}

#endif
