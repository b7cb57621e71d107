/* bound.c - the least time that a plan's copies, updates and compute take, whatever their order. */
#include "plan/plan_impl.h"

/* Seconds of copies one way: beside the host's Adam, the other way, both or neither, each at its
 * own rate. */
static double link_seconds(double bytes, double other, double host, const double rates[4])
{
    double both = other < host ? other : host;
    const double parts[3] = {both, host - both, other - both};
    double seconds = 0;
    for (int i = 0; i < 3; i++) {
        double most = bytes / rates[i], part = parts[i] < most ? parts[i] : most;
        seconds += part;
        bytes -= part * rates[i];
    }
    return seconds + bytes / rates[3];
}

/* Seconds of each resource when all work at once, each for as long as it has work. */
static void busy_seconds(const gm_rates *rates, const gm_load *load, double *in, double *out,
                         double *host)
{
    const double in_rates[4] = {rates->h2d_beside, (rates->h2d + 3 * rates->h2d_beside) / 4,
                                rates->h2d_both, rates->h2d};
    const double out_rates[4] = {rates->d2h_beside, (rates->d2h + 3 * rates->d2h_beside) / 4,
                                 rates->d2h_both, rates->d2h};
    double both_in = load->in / rates->h2d_both, both_out = load->out / rates->d2h_both;
    double both = both_in < both_out ? both_in : both_out;
    double beside = load->host / rates->host_adam_beside;
    *host = beside <= both
                ? beside
                : both + (load->host - both * rates->host_adam_beside) / rates->host_adam;
    *in = link_seconds(load->in, both_out, *host, in_rates);
    *out = link_seconds(load->out, both_in, *host, out_rates);
}

static double most(double a, double b, double c, double d, double e)
{
    double left = a > b ? a : b, right = c > d ? c : d, all = left > right ? left : right;
    return all > e ? all : e;
}

void gm_plan_bound(const gm_problem *problem, const gm_load *loads, double step, gm_plan *plan)
{
    const gm_rates *rates = &problem->input->rates;
    gm_plan_info *info = &plan->info;
    gm_load all = {loads[0].compute + loads[1].compute, loads[0].in + loads[1].in,
                   loads[0].out + loads[1].out, loads[0].host + loads[1].host,
                   loads[0].comm + loads[1].comm};
    info->rates = *rates;
    info->compute_seconds = all.compute;
    info->comm_seconds = all.comm;
    info->h2d_bytes = (size_t)all.in;
    info->d2h_bytes = (size_t)all.out;
    busy_seconds(rates, &all, &info->h2d_seconds, &info->d2h_seconds, &info->host_seconds);
    double busiest =
        most(all.compute, info->h2d_seconds, info->d2h_seconds, info->host_seconds, all.comm);
    /* Updates fit only into a part of the step: the first forward and, if immediate, the last
     * backward. */
    info->bound_seconds = 0;
    for (int part = 0; part < 2; part++) {
        double in, out, host;
        busy_seconds(rates, &loads[part], &in, &out, &host);
        info->bound_seconds += most(loads[part].compute, in, out, host, loads[part].comm);
    }
    info->step_seconds = step > busiest ? step : busiest;
    if (info->bound_seconds > info->step_seconds) { /* copies for one part that ran in the other */
        info->bound_seconds = info->step_seconds;
    }
}
