/* adam_scalar.c - Adam, one element at a time: the written reference of arith.h.
 *
 * Every other implementation must give these bits for every input.
 * Invariants
 *   1. fmaf where arith.h says fma, and no other operation may be contracted or reordered
 *      (-ffp-contract=off; never -ffast-math).
 *   2. Whatever is stored passes gm_canonical or a pack function: no NaN payload reaches memory. */
#include <math.h>

#include "arith/adam_impl.h"
#include "arith/format.h"

/* Updates *m and *v and returns the new fp32 parameter (its NaN not yet canonical). */
static inline float update(const gm_adam_scalars *s, float p, float g, float *m, float *v)
{
    g = g * s->grad_scale;
    if (s->is_adamw) {
        p = p * s->decay;
    } else {
        g = fmaf(s->weight_decay, p, g);
    }
    float new_m = fmaf(g - *m, s->one_minus_beta1, *m);
    float new_v = fmaf(g * g, s->one_minus_beta2, *v * s->beta2);
    float d = fmaf(sqrtf(new_v), s->inv_sqrt_bias2, s->eps);
    *m = gm_canonical(new_m);
    *v = gm_canonical(new_v);
    return fmaf(-s->step_size, new_m / d, p);
}

void gm_adam_span_scalar(const gm_adam_args *args, const gm_adam_scalars *scalars, size_t begin,
                         size_t end)
{
    for (size_t i = begin; i < end; i++) {
        float g = gm_f32_from_bits(gm_load_bits(args->grad, args->grad_dtype, i));
        switch (args->format) {
        case GM_F32: {
            float *weight = args->weight;
            weight[i] = gm_canonical(update(scalars, weight[i], g, &args->m[i], &args->v[i]));
            break;
        }
        case GM_BF16: {
            uint16_t *hi = args->weight;
            int16_t *lo = args->low;
            float p = gm_f32_from_bits(gm_merge_bf16(hi[i], lo[i]));
            p = update(scalars, p, g, &args->m[i], &args->v[i]);
            gm_pack_bf16(gm_f32_bits(p), &hi[i], &lo[i]);
            break;
        }
        case GM_F16: {
            uint16_t *half = args->weight;
            float *master = args->low;
            float p = update(scalars, master[i], g, &args->m[i], &args->v[i]);
            master[i] = gm_canonical(p);
            half[i] = gm_bits_to_f16(gm_f32_bits(p));
            break;
        }
        }
    }
}
