/* topology.c - reads the host's cores and nodes, and divides cores among the ranks of a host.
 *
 * The split is a function of its arguments alone: every rank computes it, and the parts fit together
 * only because all of them have the same masks and nodes before them. */
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
    TEXT_BYTES = 8192,    /* a list of cores takes at most about 5 bytes for each */
    MAX_NUMBER = 1 << 16, /* of a core or node: more is no list of the kernel's */
    MAX_MASK_BITS = 1 << 20,
};

/* ---- what the kernel tells ---- */

/* The numbers of a list like "0-3,8,10-11".  False if it is none, or memory is out. */
static bool parse_list(const char *text, unsigned **out, size_t *out_n)
{
    unsigned *numbers = NULL;
    size_t n = 0, capacity = 0;
    const char *at = text;
    bool is_good = true;
    while (is_good && *at && *at != '\n') {
        char *end;
        unsigned long first = strtoul(at, &end, 10), last = first;
        is_good = end != at;
        at = end;
        if (is_good && *at == '-') {
            last = strtoul(at + 1, &end, 10);
            is_good = end != at + 1;
            at = end;
        }
        is_good = is_good && first <= last && last < MAX_NUMBER &&
                  (*at == ',' || *at == '\n' || *at == '\0');
        at += is_good && *at == ',';
        for (unsigned long i = first; is_good && i <= last; i++) {
            is_good = GM_GROW(numbers, n, capacity, "host memory: %zu cores") == GM_OK;
            if (is_good) {
                numbers[n++] = (unsigned)i;
            }
        }
    }
    if (!is_good || n == 0) {
        free(numbers);
        return false;
    }
    *out = numbers;
    *out_n = n;
    return true;
}

static bool read_list(const char *root, const char *folder, const char *name, unsigned **out,
                      size_t *out_n)
{
    char text[TEXT_BYTES];
    return gm_sysfile_read(root, folder, name, text, sizeof text) && parse_list(text, out, out_n);
}

static int by_number(const void *a, const void *b)
{
    unsigned x = *(const unsigned *)a, y = *(const unsigned *)b;
    return (x > y) - (x < y);
}

static gm_core *find_core(const gm_core *cores, size_t n, unsigned number)
{
    /* The number is first in each. */
    return n ? bsearch(&number, cores, n, sizeof *cores, by_number) : NULL;
}

static void read_nodes(const char *root, gm_core *cores, size_t n)
{
    static const char folder[] = "/sys/devices/system/node/";
    unsigned *nodes = NULL;
    size_t n_nodes = 0;
    if (!read_list(root, folder, "online", &nodes, &n_nodes)) {
        return;
    }
    for (size_t i = 0; i < n_nodes; i++) {
        char name[64];
        (void)snprintf(name, sizeof name, "node%u/cpulist", nodes[i]);
        unsigned *numbers = NULL;
        size_t n_numbers = 0;
        if (!read_list(root, folder, name, &numbers, &n_numbers)) {
            continue; /* a node of memory alone has an empty list */
        }
        for (size_t j = 0; j < n_numbers; j++) {
            gm_core *core = find_core(cores, n, numbers[j]);
            if (core) {
                core->node = (int)nodes[i];
            }
        }
        free(numbers);
    }
    free(nodes);
}

gm_status gm_topology_cores(const char *root, gm_core **out, size_t *out_n)
{
    static const char folder[] = "/sys/devices/system/cpu/";
    unsigned *numbers = NULL;
    size_t n = 0;
    (void)read_list(root, folder, "online", &numbers, &n);
    gm_core *cores = calloc(n + 1, sizeof *cores);
    if (!cores) {
        free(numbers);
        return GM_FAIL(GM_ERR_NOMEM, "host memory: no room for a list of %zu cores", n);
    }
    for (size_t i = 0; i < n; i++) {
        cores[i] = (gm_core){numbers[i], -1, numbers[i]};
        char name[64];
        (void)snprintf(name, sizeof name, "cpu%u/topology/thread_siblings_list", numbers[i]);
        unsigned *siblings = NULL;
        size_t n_siblings = 0;
        if (read_list(root, folder, name, &siblings, &n_siblings)) {
            cores[i].sibling = siblings[0] < numbers[i] ? siblings[0] : numbers[i];
            free(siblings);
        }
    }
    free(numbers);
    read_nodes(root, cores, n);
    *out = cores;
    *out_n = n;
    return GM_OK;
}

gm_status gm_topology_device_node(const char *root, const char *pci_bus_id, int *out)
{
    unsigned domain = 0, bus, device, function;
    char rest;
    if (sscanf(pci_bus_id, "%8x:%2x:%2x.%1x%c", &domain, &bus, &device, &function, &rest) != 4) {
        domain = 0;
        GM_FAIL_IF(
            sscanf(pci_bus_id, "%2x:%2x.%1x%c", &bus, &device, &function, &rest) != 3, GM_ERR_ARG,
            "\"%.40s\" is no PCI device: write domain:bus:device.function, as in 0000:1b:00.0",
            pci_bus_id);
    }
    char name[64], text[64];
    (void)snprintf(name, sizeof name, "%04x:%02x:%02x.%x/numa_node", domain, bus, device, function);
    *out = -1;
    if (gm_sysfile_read(root, "/sys/bus/pci/devices/", name, text, sizeof text) &&
        (sscanf(text, "%d", out) != 1 || *out < 0)) {
        *out = -1;
    }
    return GM_OK;
}

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

/* Rounded down: with one thread more than the quota is worth, all of them stand still for a part of each
 * period, and a job takes as long as its last thread. */
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

/* ---- the split ---- */

/* Ranks that want the same cores; group i is that of rank i, and empty if an earlier rank wants them. */
typedef struct group {
    size_t n_ranks, n_wanted, n_held;
} group;

typedef struct split {
    const gm_local_rank *ranks;
    size_t n_ranks, n_cores;
    gm_core *cores;   /* (n_cores,) all that any rank may use, in the order they are given out */
    bool *wanted;     /* (n_ranks, n_cores) */
    size_t *group_of; /* (n_ranks,) */
    group *groups;    /* (n_ranks,) */
    size_t *owner;    /* (n_cores,) a group, or n_ranks: wanted by none */
    bool *is_asked;   /* (n_ranks,) a group, in one search */
} split;

static int in_order(const void *a, const void *b)
{
    const gm_core *x = a, *y = b;
    if (x->node != y->node) {
        return x->node < y->node ? -1 : 1;
    }
    if (x->sibling != y->sibling) {
        return x->sibling < y->sibling ? -1 : 1;
    }
    return (x->number > y->number) - (x->number < y->number);
}

/* The cores of all masks, each once. */
static gm_status collect_cores(split *s, const gm_core *known, size_t n_known)
{
    size_t n = 0;
    for (size_t r = 0; r < s->n_ranks; r++) {
        GM_FAIL_IF(s->ranks[r].n_mask == 0, GM_ERR_ARG, "local rank %zu has an empty mask of cores",
                   r);
        n += s->ranks[r].n_mask;
    }
    unsigned *numbers = malloc(n * sizeof *numbers);
    s->cores = calloc(n, sizeof *s->cores);
    if (!numbers || !s->cores) {
        free(numbers);
        return GM_FAIL(GM_ERR_NOMEM, "host memory: no room for a list of %zu cores", n);
    }
    n = 0;
    for (size_t r = 0; r < s->n_ranks; r++) {
        memcpy(numbers + n, s->ranks[r].mask, s->ranks[r].n_mask * sizeof *numbers);
        n += s->ranks[r].n_mask;
    }
    qsort(numbers, n, sizeof *numbers, by_number);
    for (size_t i = 0; i < n; i++) {
        if (i > 0 && numbers[i] == numbers[i - 1]) {
            continue;
        }
        const gm_core *core = find_core(known, n_known, numbers[i]);
        s->cores[s->n_cores++] = core ? *core : (gm_core){numbers[i], -1, numbers[i]};
    }
    free(numbers);
    qsort(s->cores, s->n_cores, sizeof *s->cores, in_order);
    return GM_OK;
}

static bool has_core(const gm_local_rank *rank, unsigned number)
{
    for (size_t i = 0; i < rank->n_mask; i++) {
        if (rank->mask[i] == number) {
            return true;
        }
    }
    return false;
}

static size_t mark_wanted(split *s, size_t r, bool is_any_node)
{
    size_t n = 0;
    for (size_t c = 0; c < s->n_cores; c++) {
        bool is_near = is_any_node || s->cores[c].node == s->ranks[r].node;
        bool is_wanted = is_near && has_core(&s->ranks[r], s->cores[c].number);
        s->wanted[r * s->n_cores + c] = is_wanted;
        n += is_wanted;
    }
    return n;
}

static void make_groups(split *s)
{
    for (size_t r = 0; r < s->n_ranks; r++) {
        size_t n_wanted = mark_wanted(s, r, s->n_ranks == 1 || s->ranks[r].node < 0);
        n_wanted = n_wanted ? n_wanted : mark_wanted(s, r, true);
        size_t g = 0;
        while (memcmp(s->wanted + g * s->n_cores, s->wanted + r * s->n_cores,
                      s->n_cores * sizeof *s->wanted) != 0) {
            g++; /* ends at r itself */
        }
        s->group_of[r] = g;
        s->groups[g].n_ranks++;
        s->groups[g].n_wanted = n_wanted;
    }
}

static bool is_needier(const group *a, const group *b)
{
    size_t x = a->n_held * b->n_ranks, y = b->n_held * a->n_ranks;
    return x != y ? x < y : a->n_wanted < b->n_wanted;
}

/* Gives the cores that exactly `n_wanting` groups want to the neediest of them. */
static void give_out(split *s, size_t n_wanting)
{
    for (size_t c = 0; c < s->n_cores; c++) {
        size_t n = 0, best = s->n_ranks;
        for (size_t g = 0; g < s->n_ranks; g++) {
            if (s->groups[g].n_ranks > 0 && s->wanted[g * s->n_cores + c]) {
                n++;
                best = best == s->n_ranks || is_needier(&s->groups[g], &s->groups[best]) ? g : best;
            }
        }
        if (n == n_wanting) {
            s->owner[c] = best;
            s->groups[best].n_held++;
        }
    }
}

/* One more core for group `g`, from a group that can spare one, or can itself get one from another. */
static bool refill(split *s, size_t g)
{
    s->is_asked[g] = true;
    for (size_t c = 0; c < s->n_cores; c++) {
        size_t from = s->owner[c];
        if (!s->wanted[g * s->n_cores + c] || s->is_asked[from]) {
            continue;
        }
        if (s->groups[from].n_held > s->groups[from].n_ranks || refill(s, from)) {
            s->owner[c] = g;
            s->groups[from].n_held--;
            s->groups[g].n_held++;
            return true;
        }
    }
    return false;
}

/* What was given out core by core may have left a group short that need not be. */
static void even_out(split *s)
{
    for (size_t g = 0; g < s->n_ranks; g++) {
        bool is_moved = true;
        while (is_moved && s->groups[g].n_held < s->groups[g].n_ranks) {
            memset(s->is_asked, 0, s->n_ranks * sizeof *s->is_asked);
            is_moved = refill(s, g);
        }
    }
}

/* The part of a rank of what its group holds; without enough for all, one core that others have too. */
static size_t take_part(const split *s, size_t rank, unsigned *out)
{
    size_t g = s->group_of[rank], place = 0;
    for (size_t r = g; r < rank; r++) {
        place += s->group_of[r] == g;
    }
    size_t n_held = s->groups[g].n_held, n_ranks = s->groups[g].n_ranks;
    size_t begin = place * n_held / n_ranks, end = (place + 1) * n_held / n_ranks;
    if (n_held < n_ranks) {
        begin = place % (n_held ? n_held : s->groups[g].n_wanted);
        end = begin + 1;
    }
    size_t i = 0, n = 0;
    for (size_t c = 0; c < s->n_cores; c++) {
        if (n_held ? s->owner[c] == g : s->wanted[g * s->n_cores + c]) {
            if (i >= begin && i < end) {
                out[n++] = s->cores[c].number;
            }
            i++;
        }
    }
    qsort(out, n, sizeof *out, by_number);
    return n;
}

gm_status gm_topology_split(const gm_core *cores, size_t n_cores, const gm_local_rank *ranks,
                            size_t n_ranks, size_t rank, unsigned *out, size_t *out_n)
{
    GM_FAIL_IF(rank >= n_ranks, GM_ERR_ARG, "local rank %zu of %zu: it must be less", rank,
               n_ranks);
    split s = {.ranks = ranks, .n_ranks = n_ranks};
    gm_status status = GM_OK;
    GM_TRY_GOTO(status, done, collect_cores(&s, cores, n_cores));
    s.wanted = calloc(n_ranks * s.n_cores, sizeof *s.wanted);
    s.group_of = calloc(n_ranks, sizeof *s.group_of);
    s.groups = calloc(n_ranks, sizeof *s.groups);
    s.owner = calloc(s.n_cores, sizeof *s.owner);
    s.is_asked = calloc(n_ranks, sizeof *s.is_asked);
    if (!s.wanted || !s.group_of || !s.groups || !s.owner || !s.is_asked) {
        status = GM_FAIL(GM_ERR_NOMEM, "host memory: no room to split %zu cores", s.n_cores);
        goto done;
    }
    make_groups(&s);
    for (size_t c = 0; c < s.n_cores; c++) {
        s.owner[c] = n_ranks;
    }
    for (size_t n_wanting = 1; n_wanting <= n_ranks; n_wanting++) {
        give_out(&s, n_wanting);
    }
    even_out(&s);
    *out_n = take_part(&s, rank, out);
done:
    free(s.cores);
    free(s.wanted);
    free(s.group_of);
    free(s.groups);
    free(s.owner);
    free(s.is_asked);
    return status;
}
