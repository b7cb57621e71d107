/* budget.h - what a plan may use: the measured rates of this machine.  Pure data.
 *
 * Bytes allowed are fields of gm_plan_input; rates come from rates.c, once per machine. */
#ifndef GM_BUDGET_H
#define GM_BUDGET_H

#include "base.h"

/* Bytes/s and parameters/s (bf16 layout: weight 2, remainder 2, moments 8, gradient 2).  All > 0. */
typedef struct gm_rates {
    double h2d, d2h;               /* alone */
    double h2d_both, d2h_both;     /* both ways at once */
    double host_adam;              /* parameters/s, alone */
    double host_adam_beside;       /* parameters/s while copies run both ways */
    double h2d_beside, d2h_beside; /* both ways at once while the host runs Adam */
    double device_adam;            /* parameters/s, everything on the device */
} gm_rates;

#endif
