/* grad.c - gradients and masters on host memory: accumulate, split, merge, reconcile.
 *
 * The scalar loops here are the written reference; grad_avx2.c gives the same bits.
 * Invariants
 *   1. Every NaN that is stored by an addition, a conversion, a copy of gradients or a split is
 *      canonical (format.h); a merge, and a split or merge of fp32, moves bits as they are.
 *   2. An element depends on that element only, so no split over threads can change a bit. */
#include "arith/adam_impl.h"
#include "arith/format.h"

#define ITEM        64
#define GRAIN_ITEMS 1024
#define WIDENED     2048 /* masters that are made fp32 at a time: they stay in the cache */

static void store_bits(void *data, gm_dtype dtype, size_t i, uint32_t bits)
{
    switch (dtype) {
    case GM_BF16: ((uint16_t *)data)[i] = gm_bits_to_bf16(bits); return;
    case GM_F16: ((uint16_t *)data)[i] = gm_bits_to_f16(bits); return;
    case GM_F32: break;
    }
    ((float *)data)[i] = gm_f32_from_bits(gm_canonical_bits(bits));
}

static void grad_add_scalar(const gm_grad_add_args *args, size_t begin, size_t end)
{
    for (size_t i = begin; i < end; i++) {
        uint32_t bits = gm_load_bits(args->src, args->src_dtype, i);
        if (gm_grad_is_divided(args)) {
            bits = gm_f32_bits(gm_f32_from_bits(bits) / args->divisor);
        }
        if (args->accumulate) {
            uint32_t old = gm_load_bits(args->dst, args->dst_dtype, i);
            bits = gm_f32_bits(gm_f32_from_bits(old) + gm_f32_from_bits(bits));
        }
        store_bits(args->dst, args->dst_dtype, i, bits);
    }
}

static void split_scalar(gm_dtype format, const float *master, void *weight, void *low,
                         size_t begin, size_t end)
{
    for (size_t i = begin; i < end; i++) {
        uint32_t bits = gm_f32_bits(master[i]);
        if (format == GM_BF16) {
            gm_pack_bf16(bits, (uint16_t *)weight + i, (int16_t *)low + i);
        } else {
            ((float *)low)[i] = gm_f32_from_bits(gm_canonical_bits(bits));
            ((uint16_t *)weight)[i] = gm_bits_to_f16(bits);
        }
    }
}

static void merge_scalar(const void *weight, const void *low, float *master, size_t begin,
                         size_t end)
{
    for (size_t i = begin; i < end; i++) {
        uint32_t bits = gm_merge_bf16(((const uint16_t *)weight)[i], ((const int16_t *)low)[i]);
        master[i] = gm_f32_from_bits(bits);
    }
}

typedef struct span {
    size_t begin, end;
} span;

/* Items to elements; the last item may be cut short. */
static span elements(size_t begin, size_t end, size_t numel)
{
    return (span){begin * ITEM, end * ITEM < numel ? end * ITEM : numel};
}

static size_t items(size_t numel)
{
    return (numel + ITEM - 1) / ITEM;
}

static void run_grad_add(void *context, size_t begin, size_t end)
{
    const gm_grad_add_args *args = context;
    span s = elements(begin, end, args->numel);
    fenv_t saved;
    gm_fenv_enter(&saved);
#if GM_HAS_X86
    if (gm_isa_or_scalar() != GM_ISA_SCALAR) {
        s.begin = gm_grad_add_avx2(args, s.begin, s.end);
    }
#endif
    grad_add_scalar(args, s.begin, s.end);
    gm_fenv_leave(&saved);
}

void gm_grad_add_host(const gm_grad_add_args *args, gm_workers *pool)
{
    gm_grad_add_args job = *args;
    gm_workers_for(pool, items(args->numel), GRAIN_ITEMS, run_grad_add, &job);
}

typedef struct split_job {
    gm_dtype format, source;
    const char *master;
    char *weight, *low;
    size_t numel;
} split_job;

static void split(gm_dtype format, const float *master, void *weight, void *low, size_t numel)
{
    size_t begin = 0;
    if (format == GM_F32) {
        memcpy(weight, master, numel * sizeof(float));
        return;
    }
#if GM_HAS_X86
    if (gm_isa_or_scalar() != GM_ISA_SCALAR) {
        begin = gm_split_avx2(format, master, weight, low, 0, numel);
    }
#endif
    split_scalar(format, master, weight, low, begin, numel);
}

static void run_split(void *context, size_t begin, size_t end)
{
    const split_job *job = context;
    size_t low_bytes = job->format == GM_BF16 ? 2 : 4, n;
    span s = elements(begin, end, job->numel);
    float wide[WIDENED];
    fenv_t saved;
    gm_fenv_enter(&saved);
    for (size_t i = s.begin; i < s.end; i += n) {
        const char *master = job->master + i * gm_dtype_bytes(job->source);
        n = s.end - i < WIDENED ? s.end - i : WIDENED;
        for (size_t k = 0; job->source != GM_F32 && k < n; k++) {
            wide[k] = gm_f32_from_bits(gm_load_bits(master, job->source, k));
        }
        split(job->format, job->source == GM_F32 ? (const float *)(const void *)master : wide,
              job->weight + i * gm_dtype_bytes(job->format), job->low + i * low_bytes, n);
    }
    gm_fenv_leave(&saved);
}

void gm_split_host(gm_dtype format, gm_dtype source, const void *master, void *weight, void *low,
                   size_t numel, gm_workers *pool)
{
    if (!low && format != GM_F32) { /* as torch rounds: there is nothing to restore */
        gm_grad_add_args job = {
            .dst = weight, .src = master, .dst_dtype = format, .src_dtype = source, .numel = numel};
        gm_grad_add_host(&job, pool);
        return;
    }
    split_job job = {format, source, master, weight, low, numel};
    gm_workers_for(pool, items(numel), GRAIN_ITEMS, run_split, &job);
}

typedef struct merge_job {
    gm_dtype format;
    const void *weight, *low;
    float *master;
    size_t numel;
} merge_job;

static void run_merge(void *context, size_t begin, size_t end)
{
    const merge_job *job = context;
    span s = elements(begin, end, job->numel);
    if (job->format != GM_BF16) {
        const float *source = job->format == GM_F32 ? job->weight : job->low;
        memcpy(job->master + s.begin, source + s.begin, (s.end - s.begin) * sizeof(float));
        return;
    }
#if GM_HAS_X86
    if (gm_isa_or_scalar() != GM_ISA_SCALAR) {
        s.begin = gm_merge_avx2(job->weight, job->low, job->master, s.begin, s.end);
    }
#endif
    merge_scalar(job->weight, job->low, job->master, s.begin, s.end);
}

void gm_merge_host(gm_dtype format, const void *weight, const void *low, float *master,
                   size_t numel, gm_workers *pool)
{
    merge_job job = {format, weight, low, master, numel};
    gm_workers_for(pool, items(numel), GRAIN_ITEMS, run_merge, &job);
}

void gm_reconcile_host(gm_dtype format, const void *old_weight, const void *weight, void *low,
                       size_t numel)
{
    const uint16_t *was = old_weight, *is = weight;
    GM_ASSERT(format != GM_F32); /* which has no low part */
    for (size_t i = 0; i < numel; i++) {
        if (was[i] != is[i] && format == GM_BF16) {
            ((int16_t *)low)[i] = 0;
        } else if (was[i] != is[i]) {
            ((float *)low)[i] = gm_f32_from_bits(gm_f16_to_bits(is[i]));
        }
    }
}

void gm_fit_low_host(gm_dtype format, const void *weight, void *low, size_t numel)
{
    const uint16_t *is = weight;
    GM_ASSERT(format != GM_F32);
    for (size_t i = 0; i < numel; i++) {
        if (format == GM_BF16) {
            int16_t *lo = (int16_t *)low + i;
            *lo = gm_bits_are_nan(gm_merge_bf16(is[i], *lo)) ? 0 : *lo;
        } else if (gm_bits_to_f16(gm_f32_bits(((float *)low)[i])) != is[i]) {
            ((float *)low)[i] = gm_f32_from_bits(gm_f16_to_bits(is[i]));
        }
    }
}
