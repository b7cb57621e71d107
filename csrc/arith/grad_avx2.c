/* grad_avx2.c - the loops of grad.c on 8 lanes; the same bits.  Used for AVX-512 processors too:
 * these loops wait for memory, not for arithmetic. */
#include "arith/adam_impl.h"

#if GM_HAS_X86

#include "arith/format_avx2.h"

/* dst, src and accumulate are constants wherever this is called. */
GM_AVX2_INLINE size_t add(const gm_grad_add_args *args, size_t i, size_t end, gm_dtype dst,
                          gm_dtype src, int accumulate)
{
    const bool is_divided = gm_grad_is_divided(args);
    const __m256 divisor = _mm256_set1_ps(args->divisor);
    for (; end - i >= 8; i += 8) {
        __m256 x = gm8_load(args->src, src, i);
        if (is_divided) {
            x = _mm256_div_ps(x, divisor);
        }
        if (accumulate) {
            x = _mm256_add_ps(gm8_load(args->dst, dst, i), x);
        }
        gm8_store(args->dst, dst, i, x);
    }
    return i;
}

#define ADD(dst, src)                                          \
    (args->accumulate ? add(args, begin, end, (dst), (src), 1) \
                      : add(args, begin, end, (dst), (src), 0))
#define ADD_TO(dst)                                     \
    (args->src_dtype == GM_F32    ? ADD((dst), GM_F32)  \
     : args->src_dtype == GM_BF16 ? ADD((dst), GM_BF16) \
                                  : ADD((dst), GM_F16))

GM_AVX2 size_t gm_grad_add_avx2(const gm_grad_add_args *args, size_t begin, size_t end)
{
    switch (args->dst_dtype) {
    case GM_BF16: return ADD_TO(GM_BF16);
    case GM_F16: return ADD_TO(GM_F16);
    case GM_F32: break;
    }
    return ADD_TO(GM_F32);
}

GM_AVX2 size_t gm_split_avx2(gm_dtype format, const float *master, void *weight, void *low,
                             size_t begin, size_t end)
{
    size_t i = begin;
    for (; end - i >= 8; i += 8) {
        __m256 x = _mm256_loadu_ps(master + i);
        if (format == GM_BF16) {
            gm8_pack_bf16(x, (uint16_t *)weight + i, (int16_t *)low + i);
        } else {
            gm8_store(low, GM_F32, i, x);
            gm8_store(weight, GM_F16, i, x);
        }
    }
    return i;
}

GM_AVX2 size_t gm_merge_avx2(const void *weight, const void *low, float *master, size_t begin,
                             size_t end)
{
    size_t i = begin;
    for (; end - i >= 8; i += 8) {
        __m128i hi = gm8_load16((const uint16_t *)weight + i);
        __m128i lo = gm8_load16((const int16_t *)low + i);
        _mm256_storeu_ps(master + i, gm8_merge_bf16(hi, lo));
    }
    return i;
}

#endif
