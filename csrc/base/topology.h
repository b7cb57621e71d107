/* topology.h - the cores and NUMA nodes of this host, and what each of its ranks may take of them.
 *
 * A core here is what the kernel schedules on (a hardware thread), by the kernel's number.  The ranks
 * of a host are separate processes: each computes the same split from what all of them told each
 * other, and takes its own part of it. */
#ifndef GM_TOPOLOGY_H
#define GM_TOPOLOGY_H

#include "base/base.h"

typedef struct gm_core {
    unsigned number;
    int node;         /* NUMA node, -1: not known */
    unsigned sibling; /* the lowest number of those that share its execution units, it included */
} gm_core;

/* A rank of this host, as it told the others. */
typedef struct gm_local_rank {
    const unsigned *mask; /* (n_mask,) the cores that it may use */
    size_t n_mask;
    int node; /* of its GPU; -1: not known, or no GPU */
} gm_local_rank;

/* The cores that are online, in ascending order; free(*out).  What the kernel does not tell (a
 * container without /sys) is left out: no cores at all, no nodes, no siblings.  `root`: see sysfile.h. */
gm_status gm_topology_cores(const char *root, gm_core **out, size_t *out_n);
/* The NUMA node of the PCI device "domain:bus:device.function" (hexadecimal; a domain of 4 or 8
 * digits, or none); -1 where it is not known. */
gm_status gm_topology_device_node(const char *root, const char *pci_bus_id, int *out);
/* How many cores' time this process's control groups grant; 0: no limit. */
double gm_topology_quota(const char *root);
/* Threads worth running on n_cores > 0 cores under a quota (0: none); at least one. */
unsigned gm_topology_threads(size_t n_cores, double quota);
/* The cores that the scheduler lets this thread run on, in ascending order; free(*out). */
gm_status gm_topology_mask(unsigned **out, size_t *out_n);

/* The cores of ranks[rank]; `out` has room for its whole mask.
 *
 * A rank wants the cores of its mask that are on its GPU's node, or its whole mask where there are none
 * or the node is not known.  Ranks that want the same cores get equal, neighbouring parts of them in
 * the order of nodes, siblings and numbers; a core that is wanted by several such groups goes to the one
 * that has the fewest for each of its ranks.  A rank that would go without shares a core with another.
 * A rank that is alone on its host keeps its mask.  Cores that `cores` lacks have no known node. */
gm_status gm_topology_split(const gm_core *cores, size_t n_cores, const gm_local_rank *ranks,
                            size_t n_ranks, size_t rank, unsigned *out, size_t *out_n);

#endif
