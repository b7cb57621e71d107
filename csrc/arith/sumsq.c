/* sumsq.c - the exact sum of squares on host memory, and its rounding to double.
 *
 * A finite fp32 is M * 2^(e - 149) with M < 2^24 and 0 <= e <= 253, so its square is
 * M^2 * 2^(2e - 298): an integer multiple of 2^-298.  Integers are added, so no order matters.
 * Range: squares are below 2^256, 2^40 of them below 2^296; 20 limbs of 32 bits reach 2^342.
 *
 * Invariants
 *   1. A gm_sumsq that a function here has written has limbs below 2^32 (the last one excepted):
 *      equal sums have equal bytes.
 *   2. Signed accumulators end non-negative, because what they hold is a sum of squares. */
#include <math.h>
#include <pthread.h>

#include "arith/adam_impl.h"
#include "arith/clip.h"
#include "arith/format.h"
#include "arith/sumsq_impl.h"

#define ITEM        GM_SUMSQ_BLOCK
#define GRAIN_ITEMS 16

void gm_sumsq_merge(gm_sumsq *into, const gm_sumsq *from)
{
    gm_add_limbs(into->limb, from->limb);
    into->n_inf += from->n_inf;
    into->n_nan += from->n_nan;
}

/* Apart, so that nothing of them is computed outside the environment. */
static __attribute__((noinline)) double round_limbs(const gm_sumsq *sum)
{
    uint64_t limb[GM_SUMSQ_LIMBS] = {0};
    gm_add_limbs(limb, sum->limb);
    GM_ASSERT(limb[GM_SUMSQ_LIMBS - 1] <= GM_LOW32); /* the range above */
    return gm_round_limbs(limb);
}

static __attribute__((noinline)) void clip_of(const gm_sumsq *sum, const gm_clip_args *args)
{
    gm_clip_of(sum, args);
}

double gm_sumsq_value(const gm_sumsq *sum)
{
    if (sum->n_nan) {
        return (double)NAN;
    }
    if (sum->n_inf) {
        return (double)INFINITY;
    }
    fenv_t saved;
    gm_fenv_enter(&saved);
    double value = round_limbs(sum);
    gm_fenv_leave(&saved);
    return value;
}

void gm_clip_host(const gm_clip_args *args)
{
    gm_sumsq all = {{0}, 0, 0};
    for (size_t i = 0; i < args->n; i++) {
        gm_sumsq_merge(&all, &args->sums[i]);
    }
    fenv_t saved;
    gm_fenv_enter(&saved);
    clip_of(&all, args);
    gm_fenv_leave(&saved);
}

typedef struct sumsq_job {
    const void *data;
    gm_dtype dtype;
    size_t numel;
    bool vectors;
    gm_sumsq *sum;
    pthread_mutex_t lock; /* of *sum */
} sumsq_job;

static void run_items(void *context, size_t begin, size_t end)
{
    sumsq_job *job = context;
    gm_sumsq_acc acc = {.deposits = 0};
    size_t stop = end * ITEM < job->numel ? end * ITEM : job->numel;
    fenv_t saved;
    gm_fenv_enter(&saved);
    for (size_t i = begin * ITEM; i < stop;) {
        size_t next = stop - i > ITEM ? i + ITEM : stop;
        bool done = false;
#if GM_HAS_X86
        if (job->vectors && next - i == ITEM) {
            done = gm_sumsq_block_avx2(job->data, job->dtype, i, &acc);
        }
#endif
        if (!done) {
            gm_sumsq_block_scalar(job->data, job->dtype, i, next, &acc);
        }
        i = next;
    }
    gm_fenv_leave(&saved);
    gm_sumsq_carry(&acc);
    gm_sumsq part = {.n_inf = acc.n_inf, .n_nan = acc.n_nan};
    for (int i = 0; i < GM_SUMSQ_LIMBS; i++) {
        GM_ASSERT(acc.limb[i] >= 0);
        part.limb[i] = (uint64_t)acc.limb[i];
    }
    pthread_mutex_lock(&job->lock);
    gm_sumsq_merge(job->sum, &part);
    pthread_mutex_unlock(&job->lock);
}

void gm_sumsq_host(const void *data, gm_dtype dtype, size_t numel, gm_sumsq *sum, gm_workers *pool)
{
    sumsq_job job = {
        .data = data,
        .dtype = dtype,
        .numel = numel,
        .vectors = gm_isa_or_scalar() != GM_ISA_SCALAR,
        .sum = sum,
        .lock = PTHREAD_MUTEX_INITIALIZER,
    };
    gm_workers_for(pool, (numel + ITEM - 1) / ITEM, GRAIN_ITEMS, run_items, &job);
    pthread_mutex_destroy(&job.lock);
}
