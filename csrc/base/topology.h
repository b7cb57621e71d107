/* topology.h - what this process may have of the host's cores.
 *
 * A core here is what the kernel schedules on (a hardware thread), by the kernel's number.  Their
 * nodes, and what each rank of the host takes of them, are Python's (machine/cores.py). */
#pragma once

#include "base/base.h"

/* How many cores' time this process's control groups grant; 0: no limit. */
double gm_topology_quota(const char *root);
/* Threads worth running on n_cores > 0 cores under a quota (0: none); at least one. */
unsigned gm_topology_threads(size_t n_cores, double quota);
/* The cores that the scheduler lets this thread run on, in ascending order; free(*out). */
gm_status gm_topology_mask(unsigned **out, size_t *out_n);
