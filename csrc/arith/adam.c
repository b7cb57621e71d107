/* adam.c - Adam on host memory: hyperparameters to scalars, choice of implementation, threads.
 *
 * Invariants
 *   1. The scalars are computed here and nowhere else, in double, rounded once to fp32, without
 *      libm's pow: the same bits on every machine and for every implementation.
 *   2. An element's update reads and writes that element only, so no split can change a bit. */
#include <math.h>
#include <string.h>

#include "arith/adam_impl.h"

/* Elements that one work item covers: spans begin at multiples of it, so that a range that begins
 * on a cache line is cut on cache lines. */
#define ITEM        64
#define GRAIN_ITEMS 256
/* Elements of an update out of place that are copied at a time: they are still in the cache when
 * they are updated. */
#define COPIED 2048

/* base^exponent by repeated squaring; exact operations in a fixed order. */
static double power(double base, int64_t exponent)
{
    double result = 1.0;
    while (exponent > 0) {
        if (exponent & 1) {
            result *= base;
        }
        base *= base;
        exponent >>= 1;
    }
    return result;
}

static bool is_beta(double beta)
{
    return beta >= 0.0 && beta < 1.0;
}

static gm_status check_hyper(const gm_adam_hyper *h)
{
    GM_FAIL_IF(!(h->lr >= 0.0) || isinf(h->lr), GM_ERR_ARG,
               "Adam: lr is %g; it must be finite and >= 0", h->lr);
    GM_FAIL_IF(!is_beta(h->beta1) || !is_beta(h->beta2), GM_ERR_ARG,
               "Adam: betas are (%g, %g); both must be in [0, 1)", h->beta1, h->beta2);
    GM_FAIL_IF(!(h->eps >= 0.0) || isinf(h->eps), GM_ERR_ARG,
               "Adam: eps is %g; it must be finite and >= 0", h->eps);
    GM_FAIL_IF(!(h->weight_decay >= 0.0) || isinf(h->weight_decay), GM_ERR_ARG,
               "Adam: weight_decay is %g; it must be finite and >= 0", h->weight_decay);
    GM_FAIL_IF(h->step < 1, GM_ERR_ARG, "Adam: step is %lld; the first update is step 1",
               (long long)h->step);
    GM_FAIL_IF(!isfinite(h->grad_divisor) || h->grad_divisor == 0.0, GM_ERR_ARG,
               "Adam: grad_divisor is %g; it must be finite and not 0", h->grad_divisor);
    return GM_OK;
}

static __attribute__((noinline)) void compute_scalars(const gm_adam_hyper *h, gm_adam_scalars *out)
{
    double correction1 = h->bias_correction ? 1.0 - power(h->beta1, h->step) : 1.0;
    double correction2 = h->bias_correction ? 1.0 - power(h->beta2, h->step) : 1.0;
    out->grad_scale = (float)(h->clip_factor / h->grad_divisor);
    out->weight_decay = h->adamw ? 0.0f : (float)h->weight_decay;
    out->decay = h->adamw ? (float)(1.0 - h->lr * h->weight_decay) : 1.0f;
    out->one_minus_beta1 = (float)(1.0 - h->beta1);
    out->beta2 = (float)h->beta2;
    out->one_minus_beta2 = (float)(1.0 - h->beta2);
    out->inv_sqrt_bias2 = (float)(1.0 / sqrt(correction2));
    out->eps = (float)h->eps;
    out->step_size = (float)(h->lr / correction1);
    out->is_adamw = h->adamw;
}

gm_status gm_adam_scalars_init(const gm_adam_hyper *hyper, gm_adam_scalars *out)
{
    fenv_t saved;
    GM_TRY(check_hyper(hyper));
    gm_fenv_enter(&saved);
    compute_scalars(hyper, out);
    gm_fenv_leave(&saved);
    return GM_OK;
}

static gm_status check_args(const gm_adam_args *args)
{
    GM_FAIL_IF(args->format != GM_F32 && args->format != GM_BF16 && args->format != GM_F16,
               GM_ERR_ARG, "Adam: weight format %d is not known", (int)args->format);
    GM_FAIL_IF(
        args->grad_dtype != GM_F32 && args->grad_dtype != args->format, GM_ERR_ARG,
        "Adam: gradient dtype %d does not go with weight format %d; use the format's dtype or fp32",
        (int)args->grad_dtype, (int)args->format);
    for (size_t i = 0; i < args->n_ranges; i++) {
        GM_FAIL_IF(args->ranges[i].begin > args->ranges[i].end, GM_ERR_ARG,
                   "Adam: range %zu begins at %zu, after its end %zu", i, args->ranges[i].begin,
                   args->ranges[i].end);
    }
    return GM_OK;
}

typedef struct adam_job {
    const gm_adam_args *args;
    gm_adam_span_fn span;
    size_t total; /* elements of all ranges laid end to end */
} adam_job;

/* Elements [begin, end) of one array: from where the old values are to where the update works in
 * place. */
static void copy_old(void *to, const void *from, size_t width, size_t begin, size_t end)
{
    if (to) {
        memcpy((char *)to + width * begin, (const char *)from + width * begin,
               width * (end - begin));
    }
}

/* Out of place is in place on a copy, but where whole vectors can be written past the cache. */
static void run_span(const adam_job *job, const gm_adam_scalars *scalars, size_t begin, size_t end)
{
    const gm_adam_args *args = job->args;
    const gm_adam_from *from = args->from;
#if GM_HAS_X86
    if (from && job->span == gm_adam_span_avx512) {
        begin = gm_adam_from_avx512(args, scalars, begin, end);
    }
#endif
    size_t low = args->format == GM_F16 ? 4 : 2, step = from ? COPIED : end - begin;
    for (size_t first = begin; first < end; first += step) {
        size_t last = end - first < step ? end : first + step;
        if (from) {
            copy_old(args->weight, from->weight, gm_dtype_bytes(args->format), first, last);
            copy_old(args->low, from->low, low, first, last);
            copy_old(args->m, from->m, sizeof(float), first, last);
            copy_old(args->v, from->v, sizeof(float), first, last);
        }
        job->span(args, scalars, first, last);
    }
}

/* Items [begin, end) of the ranges laid end to end. */
static void run_items(void *context, size_t begin, size_t end)
{
    const adam_job *job = context;
    const gm_adam_args *args = job->args;
    size_t first = begin * ITEM;
    size_t last = end * ITEM < job->total ? end * ITEM : job->total;
    fenv_t saved;
    gm_fenv_enter(&saved);
    for (size_t i = 0, base = 0; i < args->n_ranges && base < last; i++) {
        const gm_adam_range *range = &args->ranges[i];
        size_t length = range->end - range->begin;
        size_t from = first > base ? first - base : 0;
        size_t to = last - base < length ? last - base : length;
        if (from < to) {
            gm_adam_scalars scalars = range->scalars;
            scalars.grad_scale = args->grad_scale ? *args->grad_scale : scalars.grad_scale;
            run_span(job, &scalars, range->begin + from, range->begin + to);
        }
        base += length;
    }
    gm_fenv_leave(&saved);
}

gm_status gm_adam_host(const gm_adam_args *args, gm_workers *pool)
{
    gm_isa isa;
    GM_TRY(gm_isa_get(&isa));
    GM_TRY(check_args(args));
    adam_job job = {.args = args, .span = gm_adam_span_scalar, .total = 0};
#if GM_HAS_X86
    if (isa == GM_ISA_AVX2) {
        job.span = gm_adam_span_avx2;
    } else if (isa == GM_ISA_AVX512) {
        job.span = gm_adam_span_avx512;
    }
#endif
    for (size_t i = 0; i < args->n_ranges; i++) {
        job.total += args->ranges[i].end - args->ranges[i].begin;
    }
    gm_workers_for(pool, (job.total + ITEM - 1) / ITEM, GRAIN_ITEMS, run_items, &job);
    return GM_OK;
}
