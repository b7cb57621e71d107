/* clip.h - from an exact sum of squares to the factor of a clip: the same bits on the host and on
 * the device, which compile these very lines (round to nearest; no fma: none is written, and none
 * may be made).
 *
 * Private to sumsq.c and clip.cu. */
#pragma once

#include <math.h>

#include "arith/sumsq_impl.h"

#ifdef __CUDACC__
#define GM_HERE static __device__ inline
#else
#define GM_HERE static inline
#endif

#define GM_LOW32 UINT64_C(0xffffffff)

/* Adds limbs of any size to limbs of any size; those that it leaves are below 2^32, the last one
 * excepted. */
GM_HERE void gm_add_limbs(uint64_t *into, const uint64_t *from)
{
    uint64_t carry = 0;
    for (int i = 0; i < GM_SUMSQ_LIMBS; i++) {
        uint64_t low = (into[i] & GM_LOW32) + (from[i] & GM_LOW32) + (carry & GM_LOW32);
        uint64_t high = (into[i] >> 32) + (from[i] >> 32) + (carry >> 32) + (low >> 32);
        bool last = i + 1 == GM_SUMSQ_LIMBS;
        into[i] = last ? (high << 32) | (low & GM_LOW32) : low & GM_LOW32;
        carry = high;
    }
}

/* The sum rounded once to double, to nearest even. */
GM_HERE double gm_round_limbs(const uint64_t *from)
{
    uint64_t limb[GM_SUMSQ_LIMBS] = {0};
    gm_add_limbs(limb, from);
    int top = GM_SUMSQ_LIMBS - 1;
    while (top > 0 && limb[top] == 0) {
        top--;
    }
    if (top < 2) {
        /* at most 64 bits: the conversion rounds once, to nearest even */
        return ldexp((double)((limb[1] << 32) | limb[0]), GM_SUMSQ_LEAST);
    }
    /* 65 bits or more: 64 of them, the highest set, go to `head`, the others to one sticky bit */
    int shift = 0;
    while ((limb[top] << shift & UINT64_C(0x80000000)) == 0) {
        shift++;
    }
    uint64_t head = (limb[top] << 32) | limb[top - 1];
    uint64_t next = limb[top - 2];
    if (shift > 0) {
        head = (head << shift) | (next >> (32 - shift));
        next = (next << shift) & GM_LOW32;
    }
    bool sticky = next != 0;
    for (int i = 0; i < top - 2; i++) {
        sticky |= limb[i] != 0;
    }
    /* 64 bits to 53: the eleven low bits decide; a sticky bit below them only breaks ties */
    return ldexp((double)(head | (sticky ? 1u : 0u)), 32 * (top - 1) - shift + GM_SUMSQ_LEAST);
}

/* As gm_clip_host; *sum is that of all. */
GM_HERE void gm_clip_of(const gm_sumsq *sum, const gm_clip_args *args)
{
    if (args->total) {
        gm_sumsq all = {{0}, sum->n_inf, sum->n_nan};
        gm_add_limbs(all.limb, sum->limb);
        *args->total = all;
        return;
    }
    double squares = sum->n_nan   ? (double)NAN
                     : sum->n_inf ? (double)INFINITY
                                  : gm_round_limbs(sum->limb);
    double norm = sqrt(squares), factor = args->max_norm / (norm + 1e-6);
    factor = factor > 1 ? 1 : factor;
    float shown = (float)norm;
    args->out->factor = factor;
    args->out->scale = (float)factor;
    if (args->norm) {
        *args->norm = isnan(shown) ? (float)NAN : shown;
    }
}
