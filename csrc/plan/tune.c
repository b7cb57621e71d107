/* tune.c - see tune.h. */
#include "plan/tune.h"

#include <math.h>

#define SAME_RATE  0.06 /* a rate that differs by less makes no other plan */
#define CLEAR_GAIN 0.02 /* of a step's time: less is noise */

void gm_rates_set_host(gm_rates *rates, double seen)
{
    rates->host_adam = rates->host_adam_beside = seen;
}

void gm_tuner_forget(gm_tuner *tuner)
{
    *tuner = (gm_tuner){.n_windows = 0};
}

bool gm_tuner_next(gm_tuner *tuner, double seen, double seconds, gm_rates *rates)
{
    if (tuner->is_done) {
        return false;
    }
    double planned = rates->host_adam_beside;
    tuner->n_windows++;
    if (tuner->best_seconds <= 0 || seconds < tuner->best_seconds) {
        tuner->best_seconds = seconds;
        tuner->best = *rates;
    }
    bool is_same = seen <= 0 || fabs(seen / planned - 1) <= SAME_RATE;
    if (!is_same && tuner->n_windows < GM_TUNE_WINDOWS) {
        /* The first answer is believed; from then on half of it, or two plans could take turns. */
        gm_rates_set_host(rates, tuner->n_windows == 1 ? seen : sqrt(planned * seen));
        return true;
    }
    tuner->is_done = true;
    if (seconds <= tuner->best_seconds * (1 + CLEAR_GAIN)) {
        return false;
    }
    *rates = tuner->best;
    return true;
}
