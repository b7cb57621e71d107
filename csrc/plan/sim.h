/* sim.h - work on streams that run at shared, changing rates: the clock of the time model.
 *
 * Nodes are issued in order; one runs when everything before it on its stream and all it waits for
 * are done. */
#pragma once

#include "plan/budget.h"

typedef enum gm_lane {                  /* the streams of the engine */
                       GM_LANE_COMPUTE, /* work in seconds */
                       GM_LANE_UPDATE,  /* seconds on the device, at the expense of compute */
                       GM_LANE_FETCH,   /* bytes to the device */
                       GM_LANE_REFRESH,
                       GM_LANE_STATE,
                       GM_LANE_GRAD_IN,
                       GM_LANE_EVICT, /* bytes to the host */
                       GM_LANE_STATE_OUT,
                       GM_LANE_GRAD_OUT,
                       GM_LANE_HOST, /* parameters */
                       GM_LANE_COMM, /* seconds of collectives, one after the other */
                       GM_N_LANES
} gm_lane;

#define GM_NO_NODE UINT32_MAX

typedef struct gm_node {
    double work;
    double end; /* seconds, once gm_sim_run has run */
    uint32_t waits, n_waits, next, lane;
} gm_node;

typedef struct gm_sim {
    gm_node *nodes;
    uint32_t *waits; /* nodes that others wait for */
    uint32_t n, n_waits;
    size_t capacity, waits_capacity;
    uint32_t first[GM_N_LANES], last[GM_N_LANES];
    bool has_failed; /* no room: the result means nothing */
} gm_sim;

void gm_sim_begin(gm_sim *sim); /* no nodes; keeps its memory */
void gm_sim_free(gm_sim *sim);
/* The node that is added next will wait for this one, too (GM_NO_NODE: nothing). */
void gm_sim_wait(gm_sim *sim, uint32_t node);
uint32_t gm_sim_add(gm_sim *sim, gm_lane lane, double work);
/* Gives every node its end; returns the last. */
double gm_sim_run(gm_sim *sim, const gm_rates *rates);
