/* topology.c - reads what the kernel lets this process have of the host's cores. */
#define _GNU_SOURCE /* sched_getaffinity, CPU_ALLOC */
#include "base/topology.h"

#include <errno.h>
#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/sysfile.h"

enum {
    MAX_MASK_BITS = 1 << 20,
};

/* cpu.max holds "quota period", or "max period"; version 1 has a file for each, -1 for no limit. */
static void limit_by_folder(void *context, const char *root, const char *folder, bool is_v2)
{
    double *cores = context;
    char text[64];
    int64_t quota = 0, period = 0;
    bool is_read;
    if (is_v2) {
        is_read = gm_sysfile_read(root, folder, "/cpu.max", text, sizeof text) &&
                  sscanf(text, "%" SCNd64 " %" SCNd64, &quota, &period) == 2;
    } else {
        is_read = gm_sysfile_read(root, folder, "/cpu.cfs_quota_us", text, sizeof text) &&
                  sscanf(text, "%" SCNd64, &quota) == 1 &&
                  gm_sysfile_read(root, folder, "/cpu.cfs_period_us", text, sizeof text) &&
                  sscanf(text, "%" SCNd64, &period) == 1;
    }
    if (!is_read || quota <= 0 || period <= 0) {
        return;
    }
    double granted = (double)quota / (double)period;
    *cores = *cores > 0 && *cores < granted ? *cores : granted;
}

double gm_topology_quota(const char *root)
{
    double cores = 0;
    gm_sysfile_cgroups(root, "cpu", limit_by_folder, &cores);
    return cores;
}

/* Rounded down: with one thread more than the quota is worth, all of them stand still for a part of
 * each period, and a job takes as long as its last thread. */
unsigned gm_topology_threads(size_t n_cores, double quota)
{
    if (quota <= 0 || quota >= (double)n_cores) {
        return (unsigned)n_cores;
    }
    return quota < 1 ? 1 : (unsigned)quota;
}

gm_status gm_topology_mask(unsigned **out, size_t *out_n)
{
    /* The kernel refuses a set smaller than its own: grow until it fits. */
    for (size_t n_bits = 1024; n_bits <= MAX_MASK_BITS; n_bits *= 2) {
        cpu_set_t *set = CPU_ALLOC(n_bits);
        size_t set_bytes = CPU_ALLOC_SIZE(n_bits);
        unsigned *numbers = malloc(n_bits * sizeof *numbers);
        if (!set || !numbers) {
            CPU_FREE(set);
            free(numbers);
            return GM_FAIL(GM_ERR_NOMEM, "host memory: no room for a list of %zu cores", n_bits);
        }
        int error = sched_getaffinity(0, set_bytes, set) ? errno : 0;
        size_t n = 0;
        for (unsigned i = 0; !error && i < n_bits; i++) {
            if (CPU_ISSET_S(i, set_bytes, set)) {
                numbers[n++] = i;
            }
        }
        CPU_FREE(set);
        if (n > 0) {
            *out = numbers;
            *out_n = n;
            return GM_OK;
        }
        free(numbers);
        GM_FAIL_IF(error != EINVAL, GM_ERR_DEVICE, "sched_getaffinity: %s", strerror(error));
    }
    return GM_FAIL(GM_ERR_DEVICE, "sched_getaffinity: more than %d cores", MAX_MASK_BITS);
}
