/* budget.h - what a plan may use: the measured rates of this machine, and the stage for states.
 * Pure data.
 *
 * Bytes allowed are fields of gm_plan_input; rates come from rates.c, once per machine. */
#pragma once

#include "base/base.h"

/* Bytes/s and parameters/s (bf16 layout: weight 2, remainder 2, moments 8, gradient 2).  All > 0
 * but for the last two. */
typedef struct gm_rates {
    double h2d, d2h;               /* alone */
    double h2d_both, d2h_both;     /* both ways at once */
    double host_adam;              /* parameters/s, alone */
    double host_adam_beside;       /* parameters/s while copies run both ways */
    double h2d_beside, d2h_beside; /* both ways at once while the host runs Adam */
    double device_adam;            /* parameters/s, everything on the device */
    /* Bytes/s of the whole chunk, of large chunks one after the other; 0: they take no time. */
    double gather, reduce;
} gm_rates;

/* The stage is device memory through which streamed states pass, slice by slice, each in a slot. */
enum {
    GM_SLICE_UNIT = 256,      /* elements: slices begin where the kernels' wide loads can */
    GM_SLICE_BYTES = 40 << 20 /* about: copies of 8 and 16 MiB run at full speed */
};

typedef struct gm_slots {
    uint32_t n;
    size_t bytes; /* of each */
} gm_slots;

/* How a stage is cut: at least three slots, one each way and one in between. */
static inline gm_slots gm_slots_of(size_t stage_bytes)
{
    uint32_t n = (uint32_t)(stage_bytes / GM_SLICE_BYTES);
    n = n > 3 ? n : 3;
    return (gm_slots){n, stage_bytes / n / 4096 * 4096};
}

/* The least blocks of a stage: slots of a page each, which hold a slice of any states (12 bytes an
 * element). */
static inline uint32_t gm_stage_least(size_t block_bytes)
{
    return (uint32_t)(gm_round_up(3 * 4096, block_bytes) / block_bytes);
}
