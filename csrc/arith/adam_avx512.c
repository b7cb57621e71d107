/* adam_avx512.c - Adam on 16 lanes: the operations of adam_scalar.c in the same order, so the same
 * bits.  Compiled everywhere, called only where the processor has AVX-512 F, BW, DQ and VL. */
#include "arith/adam_impl.h"

#if GM_HAS_X86

#include <immintrin.h>

#include "arith/format.h"

#define TARGET target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")
#define INLINE static inline __attribute__((always_inline, TARGET))

typedef struct lanes {
    __m512 grad_scale, weight_decay, decay, one_minus_beta1, beta2, one_minus_beta2;
    __m512 inv_sqrt_bias2, eps, step_size;
} lanes;

INLINE lanes broadcast(const gm_adam_scalars *s)
{
    return (lanes){
        .grad_scale = _mm512_set1_ps(s->grad_scale),
        .weight_decay = _mm512_set1_ps(s->weight_decay),
        .decay = _mm512_set1_ps(s->decay),
        .one_minus_beta1 = _mm512_set1_ps(s->one_minus_beta1),
        .beta2 = _mm512_set1_ps(s->beta2),
        .one_minus_beta2 = _mm512_set1_ps(s->one_minus_beta2),
        .inv_sqrt_bias2 = _mm512_set1_ps(s->inv_sqrt_bias2),
        .eps = _mm512_set1_ps(s->eps),
        .step_size = _mm512_set1_ps(s->step_size),
    };
}

INLINE __m512 canonical(__m512 x)
{
    __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32((int)GM_F32_NAN));
    return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), nan);
}

INLINE __m256i load16(const void *at)
{
    return _mm256_loadu_si256((const __m256i *)at);
}

/* past: by the cache, as no reader follows; `at` is then aligned to the vector. */
INLINE void store16(void *at, __m256i x, int past)
{
    if (past) {
        _mm256_stream_si256((__m256i *)at, x);
    } else {
        _mm256_storeu_si256((__m256i *)at, x);
    }
}

INLINE void store32(float *at, __m512 x, int past)
{
    if (past) {
        _mm512_stream_ps(at, x);
    } else {
        _mm512_storeu_ps(at, x);
    }
}

INLINE __m512i bf16_to_bits(__m256i x)
{
    return _mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16);
}

INLINE __m512 load(const void *data, gm_dtype dtype, size_t i)
{
    switch (dtype) {
    case GM_BF16: return _mm512_castsi512_ps(bf16_to_bits(load16((const uint16_t *)data + i)));
    case GM_F16: return _mm512_cvtph_ps(load16((const uint16_t *)data + i));
    case GM_F32: break;
    }
    return _mm512_loadu_ps((const float *)data + i);
}

/* Element i of both moments, from where `old` has them to where `args` has them. */
INLINE __m512 update(const lanes *s, int adamw, __m512 p, __m512 g, const gm_adam_from *old,
                     const gm_adam_args *args, size_t i, int past)
{
    __m512 m = _mm512_loadu_ps(old->m + i);
    __m512 v = _mm512_loadu_ps(old->v + i);
    g = _mm512_mul_ps(g, s->grad_scale);
    if (adamw) {
        p = _mm512_mul_ps(p, s->decay);
    } else {
        g = _mm512_fmadd_ps(s->weight_decay, p, g);
    }
    m = _mm512_fmadd_ps(_mm512_sub_ps(g, m), s->one_minus_beta1, m);
    v = _mm512_fmadd_ps(_mm512_mul_ps(g, g), s->one_minus_beta2, _mm512_mul_ps(v, s->beta2));
    store32(args->m + i, canonical(m), past);
    store32(args->v + i, canonical(v), past);
    __m512 d = _mm512_fmadd_ps(_mm512_sqrt_ps(v), s->inv_sqrt_bias2, s->eps);
    return _mm512_fnmadd_ps(s->step_size, _mm512_div_ps(m, d), p);
}

/* format, grad_dtype, adamw and past are constants wherever this is called. */
INLINE size_t run(const gm_adam_args *args, const gm_adam_scalars *scalars, size_t i, size_t end,
                  gm_dtype format, gm_dtype grad_dtype, int adamw, int past)
{
    const lanes s = broadcast(scalars);
    const gm_adam_from old =
        past ? *args->from : (gm_adam_from){args->weight, args->low, args->m, args->v};
    for (; end - i >= 16; i += 16) {
        __m512 g = load(args->grad, grad_dtype, i);
        if (format == GM_F32) {
            __m512 p = _mm512_loadu_ps((const float *)old.weight + i);
            p = update(&s, adamw, p, g, &old, args, i, past);
            store32((float *)args->weight + i, canonical(p), past);
        } else if (format == GM_BF16) {
            __m512i low = _mm512_cvtepi16_epi32(load16((const int16_t *)old.low + i));
            __m512i master =
                _mm512_add_epi32(bf16_to_bits(load16((const uint16_t *)old.weight + i)), low);
            __m512 p = update(&s, adamw, _mm512_castsi512_ps(master), g, &old, args, i, past);
            __m512i bits = _mm512_castps_si512(canonical(p));
            __m512i high = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x8000)), 16);
            store16((uint16_t *)args->weight + i, _mm512_cvtepi32_epi16(high), past);
            /* bits - (high << 16) has the low 16 bits of bits */
            store16((int16_t *)args->low + i, _mm512_cvtepi32_epi16(bits), past);
        } else {
            __m512 p = _mm512_loadu_ps((const float *)old.low + i);
            p = canonical(update(&s, adamw, p, g, &old, args, i, past));
            store32((float *)args->low + i, p, past);
            store16((uint16_t *)args->weight + i, _mm512_cvtps_ph(p, _MM_FROUND_TO_NEAREST_INT),
                    past);
        }
    }
    return i;
}

#define RUN(format, grad, past)                                                      \
    (scalars->is_adamw ? run(args, scalars, begin, end, (format), (grad), 1, (past)) \
                       : run(args, scalars, begin, end, (format), (grad), 0, (past)))

#define RUN_ALL(past)                                                                            \
    switch (args->format) {                                                                      \
    case GM_F32: done = RUN(GM_F32, GM_F32, past); break;                                        \
    case GM_BF16: done = wide ? RUN(GM_BF16, GM_F32, past) : RUN(GM_BF16, GM_BF16, past); break; \
    case GM_F16: done = wide ? RUN(GM_F16, GM_F32, past) : RUN(GM_F16, GM_F16, past); break;     \
    }

__attribute__((TARGET)) void gm_adam_span_avx512(const gm_adam_args *args,
                                                 const gm_adam_scalars *scalars, size_t begin,
                                                 size_t end)
{
    bool wide = args->grad_dtype == GM_F32;
    size_t done = begin;
    RUN_ALL(0)
    gm_adam_span_scalar(args, scalars, done, end);
}

static bool is_aligned(const void *array, size_t width, size_t begin)
{
    return ((uintptr_t)array + width * begin) % (16 * width) == 0;
}

__attribute__((TARGET)) size_t gm_adam_from_avx512(const gm_adam_args *args,
                                                   const gm_adam_scalars *scalars, size_t begin,
                                                   size_t end)
{
    bool wide = args->grad_dtype == GM_F32;
    size_t done = begin, low = args->format == GM_F16 ? 4 : 2;
    if (!is_aligned(args->weight, gm_dtype_bytes(args->format), begin) ||
        (args->low && !is_aligned(args->low, low, begin)) ||
        !is_aligned(args->m, sizeof(float), begin) || !is_aligned(args->v, sizeof(float), begin)) {
        return begin;
    }
    RUN_ALL(1)
    _mm_sfence();
    return done;
}

#endif
