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
#include <string.h>

#include "arith/adam_impl.h"
#include "arith/format.h"
#include "arith/sumsq_impl.h"

#define LOW32       UINT64_C(0xffffffff)
#define ITEM        GM_SUMSQ_BLOCK
#define GRAIN_ITEMS 16

/* Adds limbs of any size to limbs of any size; see invariant 1. */
static void add_limbs(uint64_t *into, const uint64_t *from)
{
    uint64_t carry = 0;
    for (int i = 0; i < GM_SUMSQ_LIMBS; i++) {
        uint64_t low = (into[i] & LOW32) + (from[i] & LOW32) + (carry & LOW32);
        uint64_t high = (into[i] >> 32) + (from[i] >> 32) + (carry >> 32) + (low >> 32);
        bool last = i + 1 == GM_SUMSQ_LIMBS;
        into[i] = last ? (high << 32) | (low & LOW32) : low & LOW32;
        carry = high;
    }
}

void gm_sumsq_merge(gm_sumsq *into, const gm_sumsq *from)
{
    add_limbs(into->limb, from->limb);
    into->n_inf += from->n_inf;
    into->n_nan += from->n_nan;
}

static __attribute__((noinline)) double round_limbs(const gm_sumsq *sum)
{
    uint64_t limb[GM_SUMSQ_LIMBS];
    const uint64_t zero[GM_SUMSQ_LIMBS] = {0};
    memcpy(limb, sum->limb, sizeof limb);
    add_limbs(limb, zero);
    int top = GM_SUMSQ_LIMBS - 1;
    while (top > 0 && limb[top] == 0) {
        top--;
    }
    if (top < 2) {
        /* at most 64 bits: the conversion rounds once, to nearest even */
        return ldexp((double)((limb[1] << 32) | limb[0]), GM_SUMSQ_LEAST);
    }
    /* 65 bits or more: 64 of them, the highest set, go to `head`, the others to one sticky bit */
    GM_ASSERT(limb[top] <= LOW32);
    int shift = __builtin_clzll(limb[top]) - 32;
    uint64_t head = (limb[top] << 32) | limb[top - 1];
    uint64_t next = limb[top - 2];
    if (shift > 0) {
        head = (head << shift) | (next >> (32 - shift));
        next = (next << shift) & LOW32;
    }
    bool sticky = next != 0;
    for (int i = 0; i < top - 2; i++) {
        sticky |= limb[i] != 0;
    }
    /* 64 bits to 53: the eleven low bits decide; a sticky bit below them only breaks ties */
    return ldexp((double)(head | (sticky ? 1u : 0u)), 32 * (top - 1) - shift + GM_SUMSQ_LEAST);
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
