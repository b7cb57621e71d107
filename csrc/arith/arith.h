/* arith.h - the arithmetic of the optimizer: one written sequence of IEEE-754 operations.
 *
 * Every implementation (scalar reference, AVX2, AVX-512, CUDA) gives the same bits for every input,
 * length and alignment, denormals, infinities and NaNs included.  Compiled with -ffp-contract=off;
 * an fma is written where an fma is meant and nowhere else; no fast-math, no flush-to-zero; all
 * operations round to nearest even.  A NaN that is stored is stored as 0x7fc00000 (bf16/fp16
 * weight: 0x7fc0 / 0x7e00; remainder 0), because processors disagree about NaN payloads and signs.
 *
 * Weight formats
 *   GM_F32   weight is fp32; there is no low part.
 *   GM_BF16  weight is bf16 `hi`, low part is int16 `lo`, and the fp32 master is
 *            bits = (hi << 16) + lo (two's complement, modulo 2^32).  hi is the master rounded to
 *            nearest, ties away from zero: hi = (bits + 0x8000) >> 16, lo = bits - (hi << 16).
 *            (Ties to even is impossible in 32 bits: an even hi would need 65,537 remainders.)  A
 *            NaN master packs to hi 0x7fc0, lo 0.
 *   GM_F16   weight is fp16 (round to nearest even of the master), low part is the fp32 master.
 *
 * One element of Adam (all fp32; s = gm_adam_scalars):
 *   g  = float(grad) * s.grad_scale
 *   L2 mode only:  g = fma(s.weight_decay, p, g)
 *   AdamW only:    p = p * s.decay                       (decay = 1 - lr * weight_decay)
 *   m  = fma(g - m, s.one_minus_beta1, m)
 *   v  = fma(g * g, s.one_minus_beta2, v * s.beta2)
 *   d  = fma(sqrt(v), s.inv_sqrt_bias2, s.eps)
 *   p  = fma(-s.step_size, m / d, p)
 * In L2 mode p in the first line is the parameter before the update and there is no decay line. */
#pragma once

#include "base/base.h"
#include "base/workers.h"

/* What the user sets, per range. */
typedef struct gm_adam_hyper {
    double lr, beta1, beta2, eps, weight_decay;
    int64_t step; /* 1 for the first update */
    bool adamw;   /* decoupled decay; false: L2 decay added to the gradient */
    bool bias_correction;
    double grad_divisor; /* loss scale x what else the gradient must be divided by; not 0 */
    double clip_factor;  /* 1 when not clipping */
} gm_adam_hyper;

/* The same, computed in double and rounded once to fp32, in one place for all implementations. */
typedef struct gm_adam_scalars {
    float grad_scale;   /* clip_factor / grad_divisor */
    float weight_decay; /* L2 mode: weight_decay; AdamW: 0 */
    float decay;        /* AdamW: 1 - lr * weight_decay; L2 mode: 1 (unused) */
    float one_minus_beta1, beta2, one_minus_beta2;
    float inv_sqrt_bias2; /* 1 / sqrt(1 - beta2^step), or 1 */
    float eps;
    float step_size; /* lr / (1 - beta1^step), or lr */
    uint32_t is_adamw;
} gm_adam_scalars;

gm_status gm_adam_scalars_init(const gm_adam_hyper *hyper, gm_adam_scalars *out);

typedef struct gm_adam_range {
    size_t begin, end; /* elements of the arrays below; ranges do not overlap */
    gm_adam_scalars scalars;
} gm_adam_range;

/* Old values that an update reads, where its arrays are only written: as the arrays of
 * gm_adam_args. */
typedef struct gm_adam_from {
    const void *weight, *low;
    const float *m, *v;
} gm_adam_from;

typedef struct gm_adam_args {
    gm_dtype format;             /* weight format, as above                               */
    gm_dtype grad_dtype;         /* the format's dtype or GM_F32                          */
    void *weight;                /* (numel,) format                                       */
    void *low;                   /* (numel,) GM_BF16: int16; GM_F16: fp32; GM_F32: NULL   */
    float *m, *v;                /* (numel,) fp32                                         */
    const void *grad;            /* (numel,) grad_dtype                                   */
    const gm_adam_range *ranges; /* (n_ranges,) host memory, also for CUDA        */
    size_t n_ranges;             /* elements outside every range are untouched            */
    const gm_adam_from *from;    /* NULL: in place.  On the host alone */
    const float *grad_scale;     /* NULL: that of the ranges; else read, instead, when it runs */
} gm_adam_args;

/* dst = src, or dst = dst + src: converted to fp32, added in fp32, rounded to nearest even to
 * dst's dtype: what autograd's own accumulation does when both dtypes agree. */
typedef struct gm_grad_add_args {
    void *dst;
    const void *src;
    gm_dtype dst_dtype, src_dtype;
    size_t numel;
    bool accumulate;
    float divisor; /* of src, in fp32, before it is added or rounded; 0 or 1: none */
} gm_grad_add_args;

static inline bool gm_grad_is_divided(const gm_grad_add_args *args)
{
    return args->divisor > 0 && (args->divisor < 1 || args->divisor > 1);
}

/* Exact sum of squares: a fixed-point accumulator wide enough for any sum of 2^40 squares of fp32
 * values, in 64-bit limbs holding 32 bits each plus carries.  Exact, hence independent of order,
 * chunking, sharding and device.  All zero is an empty sum. */
#define GM_SUMSQ_LIMBS 20
typedef struct gm_sumsq {
    uint64_t limb[GM_SUMSQ_LIMBS]; /* limb[i] weighs 2^(32 i - 298); carries may be pending */
    uint64_t n_inf, n_nan;         /* non-finite elements seen */
} gm_sumsq;

void gm_sumsq_merge(gm_sumsq *into, const gm_sumsq *from); /* normalizes both carries as needed */
/* The sum rounded once to double (nearest even); NaN if n_nan, else +inf if n_inf. */
double gm_sumsq_value(const gm_sumsq *sum);

/* What clipping by the norm comes to, as torch.nn.utils.clip_grad_norm_ has it, in double. */
typedef struct gm_clip {
    double factor; /* min(1, max_norm / (norm + 1e-6)); NaN for a norm that is NaN */
    float scale;   /* the same, as gm_adam_scalars has it without a divisor */
} gm_clip;

typedef struct gm_clip_args {
    const gm_sumsq *sums; /* (n,) to be added */
    size_t n;
    double max_norm;
    gm_clip *out;
    float *norm; /* NULL: not wanted */
    /* NULL; else the sum is left here, without pending carries, so that ranks can add theirs, and
     * that is all. */
    gm_sumsq *total;
} gm_clip_args;

void gm_clip_host(const gm_clip_args *args);

/* ---- host implementations; pool may be NULL ---- */
/* "scalar", "avx2" or "avx512": the best this processor has, or what GEMINI_ISA forces
 * (GM_ERR_UNSUPPORTED names what is missing). */
gm_status gm_isa_name(const char **out);
gm_status gm_adam_host(const gm_adam_args *args, gm_workers *pool);
void gm_grad_add_host(const gm_grad_add_args *args, gm_workers *pool);
/* Adds the squares of data[0..numel) to *sum. */
void gm_sumsq_host(const void *data, gm_dtype dtype, size_t numel, gm_sumsq *sum, gm_workers *pool);
/* fp32 master <-> (weight, low).  split rounds; merge is exact.  GM_F32: plain copy of weight.
 * Masters to be split may be of another dtype, `source`; low NULL: there are no low parts, and a
 * tie goes to even, as in torch. */
void gm_split_host(gm_dtype format, gm_dtype source, const void *master, void *weight, void *low,
                   size_t numel, gm_workers *pool);
void gm_merge_host(gm_dtype format, const void *weight, const void *low, float *master,
                   size_t numel, gm_workers *pool);
/* The script wrote new weights, of a format with a low part: where the bits of weight and
 * old_weight differ, that is reset so that the master equals the new weight exactly. */
void gm_reconcile_host(gm_dtype format, const void *old_weight, const void *weight, void *low,
                       size_t numel);
/* The same for low parts that were given for weights of their own: reset where they cannot be the
 * master's of `weight`. */
void gm_fit_low_host(gm_dtype format, const void *weight, void *low, size_t numel);
