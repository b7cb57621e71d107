/* sumsq_impl.h - the accumulator that the exact sum of squares uses while it runs.  Private to
 * sumsq_acc.c, sumsq.c and the vector form.
 *
 * The same fixed point as gm_sumsq (bit 0 weighs 2^-298), but with signed limbs, so that a rounded
 * part may be corrected downwards later. */
#pragma once

#include "arith/arith.h"

/* Weight of bit 0: the square of the least fp32 denormal, 2^-149. */
#define GM_SUMSQ_LEAST (-298)

typedef struct gm_sumsq_acc {
    int64_t limb[GM_SUMSQ_LIMBS]; /* limb[i] weighs 2^(32 i - 298); |limb| < 2^63 at all times */
    uint64_t n_inf, n_nan;
    uint64_t deposits; /* since the carries went on; each adds less than 2^32 to a limb */
} gm_sumsq_acc;

/* Adds value * 2^(position - 298), or subtracts it. */
void gm_sumsq_deposit(gm_sumsq_acc *acc, unsigned position, uint64_t value, bool negative);
/* Carries go on to the next limbs. */
void gm_sumsq_carry(gm_sumsq_acc *acc);
/* Elements [begin, end) into *acc, one at a time; any values; the reference. */
void gm_sumsq_block_scalar(const void *data, gm_dtype dtype, size_t begin, size_t end,
                           gm_sumsq_acc *acc);

/* Elements that one band of the vector form covers. */
#define GM_SUMSQ_BLOCK 2048

#if defined(__x86_64__)
/* The same for [begin, begin + GM_SUMSQ_BLOCK).  False: the values do not suit it (non-finite, or
 * too far apart); *acc is then untouched. */
bool gm_sumsq_block_avx2(const void *data, gm_dtype dtype, size_t begin, gm_sumsq_acc *acc);
#endif
