/* tune.h - which rate of Adam on the host makes the fastest plan, found from steps that followed plans.
 *
 * Start-up measures that rate with nothing but copies beside it, in memory that is warm.  In a step it is another one,
 * and depends on the plan in turn: the more copies, the slower.  So a plan is made from the rate that steps under its
 * predecessor showed, a few times, and the one whose steps took the least time stays.  Pure: knows no engine.
 *
 * 1. It ends: after at most GM_TUNE_WINDOWS windows, or when a window shows the rate that its plan counted on.
 * 2. It never ends on a plan whose steps took clearly more time than those of another one that it tried. */
#pragma once

#include "plan/budget.h"

enum { GM_TUNE_WINDOWS = 4 };

typedef struct gm_tuner { /* zeroed: nothing known */
    unsigned n_windows;
    bool is_done;
    double best_seconds; /* least time of a step; 0: no window yet */
    gm_rates best;       /* what that plan was made from */
} gm_tuner;

/* In a step the host was as fast as this, on average.  It is hardly faster when nothing is copied: it shares its cores
 * and caches with the threads that feed the device all the time, which a measurement alone does not show. */
void gm_rates_set_host(gm_rates *rates, double seen);

/* A window under a plan made from *rates has shown `seen` parameters/s of host Adam (0: none ran) and `seconds` per
 * step.  True: a plan should be made anew, from *rates as they are now. */
bool gm_tuner_next(gm_tuner *tuner, double seen, double seconds, gm_rates *rates);

/* What was learned belongs to plans that are no longer possible. */
void gm_tuner_forget(gm_tuner *tuner);
