/* test_topology.c - cores and nodes read from made-up machines, and their split among ranks. */
#define _GNU_SOURCE /* tree.h, sched_setaffinity */
#include "base/topology.h"

#include <sched.h>
#include <string.h>

#include "check.h"
#include "tree.h"

enum { MOST_CORES = 512, MOST_RANKS = 16 };

/* ---- reading ---- */

static gm_core *cores;
static size_t n_cores;

static void read_cores(void)
{
    free(cores);
    CHECK_OK(gm_topology_cores(root, &cores, &n_cores));
}

static void check_core(size_t i, unsigned number, int node, unsigned sibling)
{
    CHECK(i < n_cores);
    CHECK(cores[i].number == number && cores[i].node == node && cores[i].sibling == sibling);
}

static void check_quota(double expected)
{
    CHECK(gm_topology_quota(root) == expected);
}

static void check_one_node(void)
{
    make_tree();
    read_cores();
    CHECK(n_cores == 0); /* no /sys at all */
    put("/sys/devices/system/cpu/online", "0-3\n");
    read_cores();
    CHECK(n_cores == 4); /* no NUMA, no siblings told */
    for (unsigned i = 0; i < 4; i++) {
        check_core(i, i, -1, i);
    }
    put("/sys/devices/system/node/online", "0\n");
    put("/sys/devices/system/node/node0/cpulist", "0-3\n");
    put("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list", "0-1\n");
    put("/sys/devices/system/cpu/cpu1/topology/thread_siblings_list", "0-1\n");
    read_cores(); /* siblings are told for some only */
    check_core(0, 0, 0, 0);
    check_core(1, 1, 0, 0);
    check_core(2, 2, 0, 2);
    check_core(3, 3, 0, 3);
    remove_tree();
}

/* Two nodes, siblings far apart, some cores offline, and a node of memory alone. */
static void check_two_nodes(void)
{
    make_tree();
    put("/sys/devices/system/cpu/online", "0-2,4-7\n");
    put("/sys/devices/system/node/online", "0-2\n");
    put("/sys/devices/system/node/node0/cpulist", "0-1,4-5\n");
    put("/sys/devices/system/node/node1/cpulist", "2-3,6-7");
    put("/sys/devices/system/node/node2/cpulist", "\n");
    for (unsigned i = 0; i < 8; i++) {
        char path[128];
        (void)snprintf(path, sizeof path,
                       "/sys/devices/system/cpu/cpu%u/topology/thread_siblings_list", i);
        put(path, i % 4 == 3 ? "7\n" : "%u,%u\n", i % 4, i % 4 + 4);
    }
    read_cores();
    CHECK(n_cores == 7);
    static const gm_core expected[] = {{0, 0, 0}, {1, 0, 1}, {2, 1, 2}, {4, 0, 0},
                                       {5, 0, 1}, {6, 1, 2}, {7, 1, 7}};
    for (size_t i = 0; i < n_cores; i++) {
        check_core(i, expected[i].number, expected[i].node, expected[i].sibling);
    }
    static const char *const wrong[] = {"",       "\n",    "x\n",          "0-\n", "3-1\n",
                                        "0,,1\n", "0 1\n", "0-99999999\n", "-1\n"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        put("/sys/devices/system/cpu/online", "%s", wrong[i]);
        read_cores();
        CHECK(n_cores == 0);
    }
    remove_tree();
}

static void check_devices(void)
{
    make_tree();
    int node = 5;
    CHECK_OK(gm_topology_device_node(root, "0000:1b:00.0", &node));
    CHECK(node == -1); /* no such device is told of */
    put("/sys/bus/pci/devices/0000:1b:00.0/numa_node", "1\n");
    static const char *const names[] = {"0000:1b:00.0", "00000000:1B:00.0", "0:1b:0.0", "1b:00.0"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        CHECK_OK(gm_topology_device_node(root, names[i], &node));
        CHECK(node == 1);
    }
    put("/sys/bus/pci/devices/10000:01:00.0/numa_node", "3\n");
    CHECK_OK(gm_topology_device_node(root, "10000:01:00.0", &node));
    CHECK(node == 3);
    put("/sys/bus/pci/devices/0000:1b:00.0/numa_node", "-1\n");
    CHECK_OK(gm_topology_device_node(root, "0000:1b:00.0", &node));
    CHECK(node == -1);
    put("/sys/bus/pci/devices/0000:1b:00.0/numa_node", "none\n");
    CHECK_OK(gm_topology_device_node(root, "0000:1b:00.0", &node));
    CHECK(node == -1);
    static const char *const wrong[] = {"", "cuda:0", "1b:00", "0000:1b:00.0x", "0000:1b:00"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        CHECK(gm_topology_device_node(root, wrong[i], &node) == GM_ERR_ARG);
        CHECK(strstr(gm_last_error(), wrong[i]));
    }
    remove_tree();
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

    gm_core *here; /* this machine, whatever it is, can be read */
    size_t n_here;
    CHECK_OK(gm_topology_cores("", &here, &n_here));
    for (size_t i = 1; i < n_here; i++) {
        CHECK(here[i].number > here[i - 1].number);
    }
    free(here);
    CHECK(gm_topology_quota("") >= 0);
}

/* ---- splitting ---- */

static gm_core machine[MOST_CORES];
static size_t n_machine;
static unsigned masks[MOST_RANKS][MOST_CORES];
static gm_local_rank ranks[MOST_RANKS];
static unsigned part[MOST_RANKS][MOST_CORES];
static size_t n_part[MOST_RANKS];

/* Physical cores in blocks for each node; with two threads for each, siblings are numbered either
 * next to each other or one half of the numbers apart. */
static void make_machine(unsigned n_nodes, unsigned each, unsigned n_threads, bool is_far)
{
    unsigned n_physical = n_nodes * each;
    n_machine = (size_t)n_physical * n_threads;
    for (unsigned number = 0; number < n_machine; number++) {
        unsigned physical = is_far ? number % n_physical : number / n_threads;
        machine[number] =
            (gm_core){number, (int)(physical / each), is_far ? physical : physical * n_threads};
    }
}

/* Rank r may use `count` cores from `first` on, and its GPU is on `node`. */
static void make_rank(size_t r, unsigned first, size_t count, int node)
{
    for (size_t i = 0; i < count; i++) {
        masks[r][i] = first + (unsigned)i;
    }
    ranks[r] = (gm_local_rank){masks[r], count, node};
}

static void split_all(size_t n_ranks)
{
    for (size_t r = 0; r < n_ranks; r++) {
        memset(part[r], 0xff, sizeof part[r]);
        CHECK_OK(gm_topology_split(machine, n_machine, ranks, n_ranks, r, part[r], &n_part[r]));
        CHECK(n_part[r] >= 1 && n_part[r] <= ranks[r].n_mask);
        for (size_t i = 0; i < n_part[r]; i++) { /* in order, and within the mask */
            CHECK(i == 0 || part[r][i] > part[r][i - 1]);
            bool is_allowed = false;
            for (size_t j = 0; j < ranks[r].n_mask; j++) {
                is_allowed = is_allowed || ranks[r].mask[j] == part[r][i];
            }
            CHECK(is_allowed);
        }
    }
}

static size_t n_users(size_t n_ranks, unsigned number)
{
    size_t n = 0;
    for (size_t r = 0; r < n_ranks; r++) {
        for (size_t i = 0; i < n_part[r]; i++) {
            n += part[r][i] == number;
        }
    }
    return n;
}

static void check_none_shared(size_t n_ranks)
{
    for (unsigned number = 0; number < MOST_CORES; number++) {
        CHECK(n_users(n_ranks, number) <= 1);
    }
}

static void check_part(size_t r, unsigned first, size_t count)
{
    CHECK(n_part[r] == count);
    for (size_t i = 0; i < count; i++) {
        CHECK(part[r][i] == first + i);
    }
}

static int node_of(unsigned number)
{
    return number < n_machine ? machine[number].node : -1;
}

/* Every kind of machine, 1 to 16 ranks: nothing shared where there is enough, the same for equals, every
 * core on the right node. */
static void check_machines(void)
{
    static const unsigned node_counts[] = {1, 2, 8};
    for (size_t m = 0; m < 3 * 5; m++) {
        unsigned n_nodes = node_counts[m / 5], n_threads = m % 5 < 1 ? 1 : 2;
        unsigned each = m % 5 == 2 || m % 5 == 4 ? 7 : 16;
        make_machine(n_nodes, each, n_threads, m % 5 >= 3);
        for (unsigned n_ranks = 1; n_ranks <= MOST_RANKS; n_ranks++) {
            for (int has_gpus = 0; has_gpus < 2; has_gpus++) {
                for (unsigned r = 0; r < n_ranks; r++) {
                    int node = has_gpus ? (int)(r * n_nodes / n_ranks) : -1;
                    make_rank(r, 0, n_machine, node);
                }
                split_all(n_ranks);
                if (n_machine < n_ranks) {
                    continue;
                }
                check_none_shared(n_ranks);
                size_t total = 0, most = 0, least = n_machine;
                for (unsigned r = 0; r < n_ranks; r++) {
                    total += n_part[r];
                    most = n_part[r] > most ? n_part[r] : most;
                    least = n_part[r] < least ? n_part[r] : least;
                    for (size_t i = 0; has_gpus && n_ranks > 1 && i < n_part[r]; i++) {
                        CHECK(node_of(part[r][i]) == ranks[r].node);
                    }
                }
                CHECK(has_gpus || (total == n_machine && most - least <= 1));
                if (has_gpus && n_ranks % n_nodes == 0) {
                    CHECK(total == n_machine && most - least <= 1);
                }
            }
        }
    }
}

static void check_siblings(void)
{
    make_machine(2, 8, 2, true); /* cores 0-7, 16-23 on node 0; 8-15, 24-31 on node 1 */
    for (size_t r = 0; r < 4; r++) {
        make_rank(r, 0, n_machine, r < 2 ? 1 : 0);
    }
    split_all(4);
    check_none_shared(4);
    static const unsigned first[] = {8, 12, 0, 4};
    for (size_t r = 0; r < 4; r++) { /* both threads of a physical core */
        CHECK(n_part[r] == 8);
        for (unsigned i = 0; i < 4; i++) {
            CHECK(part[r][i] == first[r] + i && part[r][4 + i] == first[r] + 16 + i);
        }
    }
}

static void check_alone(void)
{
    make_machine(2, 8, 1, false);
    make_rank(0, 0, 16, 1);
    split_all(1);
    check_part(0, 0, 16); /* nobody else is here: the other node's cores too */
    make_rank(0, 3, 2, 1);
    split_all(1);
    check_part(0, 3, 2);
}

static void check_bindings(void)
{
    make_machine(2, 8, 1, false);
    for (size_t r = 0; r < 4; r++) { /* the launcher gave each its own: left as it is */
        make_rank(r, (unsigned)r * 4, 4, r < 2 ? 0 : 1);
    }
    split_all(4);
    for (size_t r = 0; r < 4; r++) {
        check_part(r, (unsigned)r * 4, 4);
    }
    for (size_t r = 0; r < 4; r++) { /* bound away from their GPUs: the binding stands */
        make_rank(r, (unsigned)r * 4, 4, r < 2 ? 1 : 0);
    }
    split_all(4);
    for (size_t r = 0; r < 4; r++) {
        check_part(r, (unsigned)r * 4, 4);
    }
    for (size_t r = 0; r < 4; r++) { /* two and two: those with the same mask divide it */
        make_rank(r, r < 2 ? 0 : 6, r < 2 ? 6 : 8, -1);
    }
    split_all(4);
    check_part(0, 0, 3);
    check_part(1, 3, 3);
    check_part(2, 6, 4);
    check_part(3, 10, 4);
    /* One GPU's node is known, the other's is not: it takes what the first does not want. */
    make_rank(0, 0, 16, 0);
    make_rank(1, 0, 16, -1);
    split_all(2);
    check_part(0, 0, 8);
    check_part(1, 8, 8);
    /* One rank was bound to a few cores that the others may use too: they leave them to it. */
    make_rank(0, 2, 2, -1);
    make_rank(1, 0, 8, -1);
    make_rank(2, 0, 8, -1);
    split_all(3);
    check_none_shared(3);
    check_part(0, 2, 2);
    CHECK(n_part[1] == 3 && n_part[2] == 3);
    /* A rank whose only core others have in their masks keeps it. */
    make_rank(0, 0, 3, -1);
    make_rank(1, 0, 1, -1);
    make_rank(2, 0, 2, -1);
    split_all(3);
    check_none_shared(3);
    check_part(0, 2, 1);
    check_part(1, 0, 1);
    check_part(2, 1, 1);
}

/* A container sees the machine's /sys, but may use some cores only. */
static void check_container(void)
{
    make_machine(2, 32, 2, true);
    for (size_t r = 0; r < 4; r++) {
        make_rank(r, 28, 8, r < 2 ? 0 : 1); /* 28-31 on node 0, 32-35 on node 1 */
    }
    split_all(4);
    for (size_t r = 0; r < 4; r++) {
        check_part(r, 28 + (unsigned)r * 2, 2);
    }
    for (size_t r = 0; r < 2; r++) {
        make_rank(r, 0, 8, 1); /* none of them on the GPUs' node */
    }
    split_all(2);
    check_part(0, 0, 4);
    check_part(1, 4, 4);
    n_machine = 0; /* nothing told: numbers alone */
    split_all(2);
    check_part(0, 0, 4);
    check_part(1, 4, 4);
    make_machine(1, 4, 1, false); /* cores that came online since */
    split_all(2);
    check_none_shared(2);
    CHECK(n_part[0] == 4 && n_part[1] == 4);
}

static void check_too_few(void)
{
    make_machine(1, 3, 1, false);
    for (size_t r = 0; r < 8; r++) {
        make_rank(r, 0, 3, 0);
    }
    split_all(8);
    for (size_t r = 0; r < 8; r++) {
        check_part(r, (unsigned)r % 3, 1);
    }
    for (size_t r = 0; r < 3; r++) { /* three ranks, two cores, one rank with a choice */
        make_rank(r, 0, r == 2 ? 2 : 1, -1);
    }
    split_all(3);
    check_part(0, 0, 1);
    check_part(1, 0, 1);
    check_part(2, 1, 1);
}

static void check_arguments(void)
{
    unsigned out[4];
    size_t n;
    make_machine(1, 4, 1, false);
    make_rank(0, 0, 4, -1);
    make_rank(1, 0, 0, -1);
    CHECK(gm_topology_split(machine, n_machine, ranks, 2, 2, out, &n) == GM_ERR_ARG);
    CHECK(gm_topology_split(machine, n_machine, ranks, 0, 0, out, &n) == GM_ERR_ARG);
    CHECK(gm_topology_split(machine, n_machine, ranks, 2, 0, out, &n) == GM_ERR_ARG);
    CHECK(strstr(gm_last_error(), "local rank 1"));
}

static bool is_wanted(size_t r, unsigned number)
{
    bool is_in_mask = false, has_near = false;
    for (size_t i = 0; i < ranks[r].n_mask; i++) {
        is_in_mask = is_in_mask || ranks[r].mask[i] == number;
        has_near = has_near || node_of(ranks[r].mask[i]) == ranks[r].node;
    }
    return is_in_mask && (!has_near || node_of(number) == ranks[r].node);
}

static size_t matched[MOST_CORES]; /* the rank that has the core, MOST_RANKS: none */
static bool tried[MOST_CORES];

static bool match(size_t r)
{
    for (unsigned number = 0; number < n_machine; number++) {
        if (!tried[number] && is_wanted(r, number)) {
            tried[number] = true;
            if (matched[number] == MOST_RANKS || match(matched[number])) {
                matched[number] = r;
                return true;
            }
        }
    }
    return false;
}

/* Whether every rank can have a wanted core that no other has. */
static bool is_enough(size_t n_ranks)
{
    for (unsigned number = 0; number < MOST_CORES; number++) {
        matched[number] = MOST_RANKS;
    }
    size_t n = 0;
    for (size_t r = 0; r < n_ranks; r++) {
        memset(tried, 0, sizeof tried);
        n += match(r);
    }
    return n == n_ranks;
}

/* Masks, nodes and machines at random: what every split must keep. */
static void check_random(void)
{
    uint64_t seed = 20;
    size_t n_enough = 0;
    for (unsigned round = 0; round < 3000; round++) {
        unsigned n_nodes = 1 + (unsigned)(next_random(&seed) % 4);
        make_machine(n_nodes, 1 + (unsigned)(next_random(&seed) % 8), 1 + round % 2, round % 4 > 1);
        size_t n_ranks = 1 + next_random(&seed) % 8;
        unsigned n_kinds = 1 + (unsigned)(next_random(&seed) % 3);
        for (size_t r = 0; r < n_ranks; r++) {
            unsigned kind = (unsigned)(next_random(&seed) % n_kinds);
            unsigned first = kind * (unsigned)n_machine / (2 * n_kinds);
            unsigned count = (unsigned)n_machine - first;
            count = kind % 2 && count > 3 ? 3 : count;
            make_rank(r, first, count, (int)(next_random(&seed) % (n_nodes + 1)) - 1);
        }
        split_all(n_ranks);
        if (is_enough(n_ranks)) {
            check_none_shared(n_ranks);
            n_enough++;
        }
        for (size_t a = 0; a < n_ranks; a++) { /* equals get the same, give or take one */
            for (size_t b = 0; b < a; b++) {
                bool is_equal = ranks[a].node == ranks[b].node &&
                                ranks[a].n_mask == ranks[b].n_mask &&
                                ranks[a].mask[0] == ranks[b].mask[0];
                size_t difference =
                    n_part[a] > n_part[b] ? n_part[a] - n_part[b] : n_part[b] - n_part[a];
                CHECK(!is_equal || difference <= 1);
            }
        }
    }
    CHECK(n_enough > 1000 && n_enough < 3000); /* both kinds were met */
}

int main(void)
{
    check_one_node();
    check_two_nodes();
    check_devices();
    check_quotas();
    check_mask();
    check_machines();
    check_siblings();
    check_alone();
    check_bindings();
    check_container();
    check_too_few();
    check_arguments();
    check_random();
    free(cores);
    puts("test_topology: ok");
    return 0;
}
