/* sumsq_acc.c - the accumulator of the exact sum of squares: adding to it, and the squares of any
 * values, one by one. */
#include "arith/format.h"
#include "arith/sumsq_impl.h"

#define LOW32 UINT64_C(0xffffffff)
/* A bin takes 2^16 squares of 48 bits. */
#define BIN_ELEMENTS 65536
#define BINS         254
#define MAX_DEPOSITS (UINT64_C(1) << 28)

void gm_sumsq_carry(gm_sumsq_acc *acc)
{
    for (int i = 0; i + 1 < GM_SUMSQ_LIMBS; i++) {
        int64_t digit = (int64_t)((uint64_t)acc->limb[i] & LOW32);
        acc->limb[i + 1] += (acc->limb[i] - digit) / (INT64_C(1) << 32);
        acc->limb[i] = digit;
    }
    acc->deposits = 0;
}

void gm_sumsq_deposit(gm_sumsq_acc *acc, unsigned position, uint64_t value, bool negative)
{
    unsigned first = position / 32;
    unsigned shift = position % 32;
    uint64_t low = (value & LOW32) << shift;
    uint64_t high = ((value >> 32) << shift) + (low >> 32);
    int64_t digits[3] = {(int64_t)(low & LOW32), (int64_t)(high & LOW32), (int64_t)(high >> 32)};
    for (unsigned i = 0; i < 3; i++) {
        acc->limb[first + i] += negative ? -digits[i] : digits[i];
    }
    if (++acc->deposits >= MAX_DEPOSITS) {
        gm_sumsq_carry(acc);
    }
}

void gm_sumsq_block_scalar(const void *data, gm_dtype dtype, size_t begin, size_t end,
                           gm_sumsq_acc *acc)
{
    uint64_t bins[BINS] = {0};
    while (begin < end) {
        size_t stop = end - begin > BIN_ELEMENTS ? begin + BIN_ELEMENTS : end;
        for (; begin < stop; begin++) {
            uint32_t bits = gm_load_bits(data, dtype, begin);
            uint32_t exponent = (bits >> 23) & 0xffu;
            uint64_t fraction = bits & UINT32_C(0x7fffff);
            if (exponent == 0xff) {
                *(fraction ? &acc->n_nan : &acc->n_inf) += 1;
                continue;
            }
            uint64_t significand = exponent ? fraction | UINT64_C(0x800000) : fraction;
            bins[exponent ? exponent - 1 : 0] += significand * significand;
        }
        for (unsigned e = 0; e < BINS; e++) {
            if (bins[e]) {
                gm_sumsq_deposit(acc, 2 * e, bins[e], false);
                bins[e] = 0;
            }
        }
    }
}
