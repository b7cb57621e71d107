/* test_topology.c - quotas read from made-up machines, and the cores that this thread may use.  tests/unit/test_cores.py has
 * cores, nodes and their split among ranks. */
#define _GNU_SOURCE /* tree.h, sched_setaffinity */
#include "base/topology.h"

#include <sched.h>

#include "check.h"
#include "tree.h"

static void check_quota(double expected)
{
    CHECK(gm_topology_quota(root) == expected);
}

static void check_quotas(void)
{
    make_tree();
    check_quota(0);
    put("/proc/self/cgroup", "0::/pod/main\n");
    put("/proc/self/mountinfo", "31 22 0:28 / /sys/fs/cgroup rw - cgroup2 none rw\n");
    check_quota(0); /* the root group has no such file */
    put("/sys/fs/cgroup/pod/main/cpu.max", "max 100000\n");
    check_quota(0);
    put("/sys/fs/cgroup/pod/cpu.max", "600000 100000\n");
    check_quota(6);
    put("/sys/fs/cgroup/pod/main/cpu.max", "25000 10000\n");
    check_quota(2.5);
    put("/sys/fs/cgroup/pod/cpu.max", "50000 100000\n");
    check_quota(0.5); /* the least counts, wherever it is */
    put("/proc/self/cgroup", "4:cpu,cpuacct:/job\n3:cpuset:/other\n0::/\n");
    put("/proc/self/mountinfo",
        "30 1 0:27 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
        "31 1 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n");
    put("/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "-1\n");
    put("/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n");
    put("/sys/fs/cgroup/cpuset/other/cpu.cfs_quota_us", "100\n"); /* not its hierarchy */
    put("/sys/fs/cgroup/cpuset/other/cpu.cfs_period_us", "100000\n");
    check_quota(0);
    put("/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "400000\n");
    check_quota(4);
    remove_tree();

    CHECK(gm_topology_threads(16, 0) == 16);
    CHECK(gm_topology_threads(16, 64) == 16);
    CHECK(gm_topology_threads(16, 16) == 16);
    CHECK(gm_topology_threads(16, 3.9) == 3);
    CHECK(gm_topology_threads(16, 0.2) == 1);
    CHECK(gm_topology_threads(1, 0.2) == 1);
}

static void check_mask(void)
{
    unsigned *mask;
    size_t n;
    CHECK_OK(gm_topology_mask(&mask, &n));
    cpu_set_t before, one;
    CHECK(sched_getaffinity(0, sizeof before, &before) == 0);
    CHECK(n == (size_t)CPU_COUNT(&before));
    for (size_t i = 0; i < n; i++) {
        CHECK(CPU_ISSET(mask[i], &before) && (i == 0 || mask[i] > mask[i - 1]));
    }
    CPU_ZERO(&one);
    CPU_SET(mask[n - 1], &one);
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
    unsigned *narrow;
    size_t n_narrow;
    CHECK_OK(gm_topology_mask(&narrow, &n_narrow));
    CHECK(n_narrow == 1 && narrow[0] == mask[n - 1]);
    CHECK(sched_setaffinity(0, sizeof before, &before) == 0);
    free(mask);
    free(narrow);

    CHECK(gm_topology_quota("") >= 0);
}

int main(void)
{
    check_quotas();
    check_mask();
    puts("test_topology: ok");
    return 0;
}
