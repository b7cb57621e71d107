/* sim.c - runs nodes on lanes: at each moment every lane whose next node has nothing to wait for
 * works, at the rate that the others leave it.
 *
 * 1. A node waits only for nodes issued before it, so the run always ends. */
#include "plan/sim.h"

#include <stdlib.h>

#define SPEED_BITS 6 /* of the number of sets of busy lanes whose rates a run remembers */

/* What a copy, a collective and a call of the host cost beside their bytes. */
#define COPY_SECONDS 8e-6
#define COMM_SECONDS 2e-5
#define HOST_SECONDS 1.5e-4
/* Of the device, what Adam gets beside compute: its threads wait for a place among those of the
 * products. */
#define UPDATE_SHARE 0.12
/* Of compute, what a collective takes: its threads have places of their own. */
#define COMM_SHARE 0.02

void gm_sim_begin(gm_sim *sim)
{
    sim->n = sim->n_waits = 0;
    sim->has_failed = false;
    for (int lane = 0; lane < GM_N_LANES; lane++) {
        sim->first[lane] = sim->last[lane] = GM_NO_NODE;
    }
}

void gm_sim_free(gm_sim *sim)
{
    free(sim->nodes);
    free(sim->waits);
    *sim = (gm_sim){0};
}

static uint32_t first_wait(const gm_sim *sim)
{
    return sim->n ? sim->nodes[sim->n - 1].waits + sim->nodes[sim->n - 1].n_waits : 0;
}

void gm_sim_wait(gm_sim *sim, uint32_t node)
{
    if (node == GM_NO_NODE ||
        (sim->n_waits > first_wait(sim) && sim->waits[sim->n_waits - 1] == node)) {
        return;
    }
    if (GM_GROW(sim->waits, sim->n_waits, sim->waits_capacity, "host: %zu waits") != GM_OK) {
        sim->has_failed = true;
        return;
    }
    sim->waits[sim->n_waits++] = node;
}

uint32_t gm_sim_add(gm_sim *sim, gm_lane lane, double work)
{
    uint32_t waits = first_wait(sim);
    if (GM_GROW(sim->nodes, sim->n, sim->capacity, "host: %zu pieces of work") != GM_OK) {
        sim->has_failed = true;
        sim->n_waits = waits;
        return GM_NO_NODE;
    }
    sim->nodes[sim->n] = (gm_node){.work = work,
                                   .end = -1,
                                   .waits = waits,
                                   .n_waits = sim->n_waits - waits,
                                   .next = GM_NO_NODE,
                                   .lane = (uint32_t)lane};
    if (sim->last[lane] == GM_NO_NODE) {
        sim->first[lane] = sim->n;
    } else {
        sim->nodes[sim->last[lane]].next = sim->n;
    }
    sim->last[lane] = sim->n;
    return sim->n++;
}

typedef struct gm_speed {
    uint32_t busy; /* the set of lanes that share so; 0: nothing yet */
    double rate[GM_N_LANES];
} gm_speed;

/* A link's rate: one way alone, both ways at once, and the same beside the host's Adam, which takes
 * most of what it takes from both ways from one way, too. */
static double link_rate(double alone, double both, double beside, bool is_both, bool is_host)
{
    double one_way = (alone + 3 * beside) / 4;
    return is_both ? (is_host ? beside : both) : is_host && one_way < alone ? one_way : alone;
}

static bool is_inward(int lane)
{
    return lane >= GM_LANE_FETCH && lane <= GM_LANE_GRAD_IN;
}

static bool is_outward(int lane)
{
    return lane >= GM_LANE_EVICT && lane <= GM_LANE_GRAD_OUT;
}

static gm_speed speed_of(const gm_rates *rates, uint32_t busy)
{
    uint32_t n_in = 0, n_out = 0;
    for (int lane = 0; lane < GM_N_LANES; lane++) {
        n_in += (busy >> lane & 1) && is_inward(lane);
        n_out += (busy >> lane & 1) && is_outward(lane);
    }
    bool is_host = (busy >> GM_LANE_HOST & 1), is_both = n_in > 0 && n_out > 0;
    double in = link_rate(rates->h2d, rates->h2d_both, rates->h2d_beside, is_both, is_host);
    double out = link_rate(rates->d2h, rates->d2h_both, rates->d2h_beside, is_both, is_host);
    double host = is_both                 ? rates->host_adam_beside
                  : n_in > 0 || n_out > 0 ? (rates->host_adam + rates->host_adam_beside) / 2
                                          : rates->host_adam;
    bool is_shared = (busy >> GM_LANE_COMPUTE & 1) && (busy >> GM_LANE_UPDATE & 1);
    gm_speed speed = {.busy = busy};
    for (int lane = 0; lane < GM_N_LANES; lane++) {
        speed.rate[lane] =
            is_inward(lane) ? in / (n_in > 0 ? n_in : 1) : out / (n_out > 0 ? n_out : 1);
    }
    speed.rate[GM_LANE_COMPUTE] = is_shared ? 1 - UPDATE_SHARE : 1;
    speed.rate[GM_LANE_UPDATE] = is_shared ? UPDATE_SHARE : 1;
    speed.rate[GM_LANE_HOST] = host;
    speed.rate[GM_LANE_COMM] = 1;
    if (busy >> GM_LANE_COMM & 1) {
        speed.rate[GM_LANE_COMPUTE] *= 1 - COMM_SHARE;
    }
    return speed;
}

/* What is left of a node once it runs, with its fixed cost. */
static double whole_work(const gm_node *node, const gm_rates *rates)
{
    int lane = (int)node->lane;
    return node->work + (is_inward(lane)        ? COPY_SECONDS * rates->h2d
                         : is_outward(lane)     ? COPY_SECONDS * rates->d2h
                         : lane == GM_LANE_HOST ? HOST_SECONDS * rates->host_adam
                         : lane == GM_LANE_COMM ? COMM_SECONDS
                                                : 0);
}

double gm_sim_run(gm_sim *sim, const gm_rates *rates)
{
    if (sim->has_failed) {
        return 0;
    }
    gm_speed speeds[1u << SPEED_BITS] = {0}; /* a set may take another's place */
    uint32_t head[GM_N_LANES], waited[GM_N_LANES] = {0}, busy = 0;
    double left[GM_N_LANES] = {0}, now = 0;
    for (int lane = 0; lane < GM_N_LANES; lane++) {
        head[lane] = sim->first[lane];
    }
    for (uint32_t n_done = 0; n_done < sim->n;) {
        for (int lane = 0; lane < GM_N_LANES; lane++) {
            if (busy >> lane & 1 || head[lane] == GM_NO_NODE) {
                continue;
            }
            const gm_node *node = &sim->nodes[head[lane]];
            while (waited[lane] < node->n_waits &&
                   sim->nodes[sim->waits[node->waits + waited[lane]]].end >= 0) {
                waited[lane]++;
            }
            if (waited[lane] == node->n_waits) {
                busy |= 1u << lane;
                left[lane] = whole_work(node, rates);
            }
        }
        gm_speed *speed = &speeds[busy * UINT32_C(0x9e3779b1) >> (32 - SPEED_BITS)];
        if (speed->busy != busy) {
            *speed = speed_of(rates, busy);
        }
        double step = -1;
        int soonest = 0;
        for (int lane = 0; lane < GM_N_LANES; lane++) {
            double need = busy >> lane & 1 ? left[lane] / speed->rate[lane] : 0;
            if (busy >> lane & 1 && (step < 0 || need < step)) {
                step = need;
                soonest = lane;
            }
        }
        GM_ASSERT(step >= 0);
        now += step;
        for (int lane = 0; lane < GM_N_LANES; lane++) {
            if (!(busy >> lane & 1)) {
                continue;
            }
            left[lane] -= step * speed->rate[lane];
            if (lane == soonest || left[lane] <= 0) {
                sim->nodes[head[lane]].end = now;
                head[lane] = sim->nodes[head[lane]].next;
                busy &= ~(1u << lane);
                waited[lane] = 0;
                n_done++;
            }
        }
    }
    return now;
}
