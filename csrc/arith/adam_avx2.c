/* adam_avx2.c - Adam on 8 lanes: the operations of adam_scalar.c in the same order, so the same
 * bits.  Compiled everywhere, called only where the processor has AVX2, FMA and F16C. */
#include "arith/adam_impl.h"

#if GM_HAS_X86

#include "arith/format_avx2.h"

typedef struct lanes {
    __m256 grad_scale, weight_decay, decay, one_minus_beta1, beta2, one_minus_beta2;
    __m256 inv_sqrt_bias2, eps, step_size;
} lanes;

GM_AVX2_INLINE lanes broadcast(const gm_adam_scalars *s)
{
    return (lanes){
        .grad_scale = _mm256_set1_ps(s->grad_scale),
        .weight_decay = _mm256_set1_ps(s->weight_decay),
        .decay = _mm256_set1_ps(s->decay),
        .one_minus_beta1 = _mm256_set1_ps(s->one_minus_beta1),
        .beta2 = _mm256_set1_ps(s->beta2),
        .one_minus_beta2 = _mm256_set1_ps(s->one_minus_beta2),
        .inv_sqrt_bias2 = _mm256_set1_ps(s->inv_sqrt_bias2),
        .eps = _mm256_set1_ps(s->eps),
        .step_size = _mm256_set1_ps(s->step_size),
    };
}

GM_AVX2_INLINE __m256 update(const lanes *s, int adamw, __m256 p, __m256 g, float *m_at,
                             float *v_at)
{
    __m256 m = _mm256_loadu_ps(m_at);
    __m256 v = _mm256_loadu_ps(v_at);
    g = _mm256_mul_ps(g, s->grad_scale);
    if (adamw) {
        p = _mm256_mul_ps(p, s->decay);
    } else {
        g = _mm256_fmadd_ps(s->weight_decay, p, g);
    }
    m = _mm256_fmadd_ps(_mm256_sub_ps(g, m), s->one_minus_beta1, m);
    v = _mm256_fmadd_ps(_mm256_mul_ps(g, g), s->one_minus_beta2, _mm256_mul_ps(v, s->beta2));
    _mm256_storeu_ps(m_at, gm8_canonical(m));
    _mm256_storeu_ps(v_at, gm8_canonical(v));
    __m256 d = _mm256_fmadd_ps(_mm256_sqrt_ps(v), s->inv_sqrt_bias2, s->eps);
    return _mm256_fnmadd_ps(s->step_size, _mm256_div_ps(m, d), p);
}

/* format, grad_dtype and adamw are constants wherever this is called. */
GM_AVX2_INLINE size_t run(const gm_adam_args *args, const gm_adam_scalars *scalars, size_t i,
                          size_t end, gm_dtype format, gm_dtype grad_dtype, int adamw)
{
    const lanes s = broadcast(scalars);
    float *m = args->m;
    float *v = args->v;
    for (; end - i >= 8; i += 8) {
        __m256 g = gm8_load(args->grad, grad_dtype, i);
        if (format == GM_F32) {
            float *weight = (float *)args->weight + i;
            __m256 p = update(&s, adamw, _mm256_loadu_ps(weight), g, m + i, v + i);
            _mm256_storeu_ps(weight, gm8_canonical(p));
        } else if (format == GM_BF16) {
            uint16_t *hi = (uint16_t *)args->weight + i;
            int16_t *lo = (int16_t *)args->low + i;
            __m256 p = gm8_merge_bf16(gm8_load16(hi), gm8_load16(lo));
            gm8_pack_bf16(update(&s, adamw, p, g, m + i, v + i), hi, lo);
        } else {
            float *master = (float *)args->low + i;
            __m256 p = update(&s, adamw, _mm256_loadu_ps(master), g, m + i, v + i);
            _mm256_storeu_ps(master, gm8_canonical(p));
            gm8_store16((uint16_t *)args->weight + i, gm8_to_f16(p));
        }
    }
    return i;
}

#define RUN(format, grad)                                                    \
    (scalars->is_adamw ? run(args, scalars, begin, end, (format), (grad), 1) \
                       : run(args, scalars, begin, end, (format), (grad), 0))

GM_AVX2 void gm_adam_span_avx2(const gm_adam_args *args, const gm_adam_scalars *scalars,
                               size_t begin, size_t end)
{
    bool wide = args->grad_dtype == GM_F32;
    size_t done = begin;
    switch (args->format) {
    case GM_F32: done = RUN(GM_F32, GM_F32); break;
    case GM_BF16: done = wide ? RUN(GM_BF16, GM_F32) : RUN(GM_BF16, GM_BF16); break;
    case GM_F16: done = wide ? RUN(GM_F16, GM_F32) : RUN(GM_F16, GM_F16); break;
    }
    gm_adam_span_scalar(args, scalars, done, end);
}

#endif
