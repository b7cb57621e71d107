/* test_hostmem.c - the arena, and the memory figures read from made-up /proc and /sys folders. */
#define _GNU_SOURCE /* tree.h, syscall */
#include "device/hostmem.h"

#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "base/topology.h"
#include "tree.h"

static void check_memory(size_t available, size_t total)
{
    size_t got_available, got_total;
    CHECK_OK(gm_host_memory_at(root, &got_available, &got_total));
    if (got_available != available || got_total != total) {
        fprintf(stderr, "available %zu, expected %zu; total %zu, expected %zu\n", got_available,
                available, got_total, total);
        exit(1);
    }
}

static void check_figures(void)
{
    size_t available, total;
    CHECK(gm_host_memory_at(root, &available, &total) == GM_ERR_DEVICE);

    put("/proc/meminfo",
        "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    800 kB\n");
    check_memory(800 * 1024, 1000 * 1024); /* no cgroups at all */

    /* Version 2: every folder from the process's own to the top of the mount counts. */
    put("/proc/self/cgroup", "0::/user/job\n");
    put("/proc/self/mountinfo", "22 1 8:1 / / rw - ext4 /dev/sda rw\n31 22 0:28 / /sys/fs/cgroup "
                                "rw,nosuid shared:4 - cgroup2 none rw\n");
    check_memory(800 * 1024, 1000 * 1024);
    put("/sys/fs/cgroup/user/job/memory.max", "max\n");
    put("/sys/fs/cgroup/user/job/memory.current", "5000\n");
    check_memory(800 * 1024, 1000 * 1024);
    put("/sys/fs/cgroup/user/memory.max", "300000\n");
    put("/sys/fs/cgroup/user/memory.current", "100000\n");
    check_memory(200000, 300000);
    put("/sys/fs/cgroup/user/job/memory.max", "150000\n");
    put("/sys/fs/cgroup/user/job/memory.current", "90000\n");
    check_memory(60000, 150000);
    put("/sys/fs/cgroup/user/job/memory.stat", "anon 1\nactive_file 7000\ninactive_file 80000\n");
    check_memory(140000, 150000); /* old page cache is as good as free */
    put("/sys/fs/cgroup/user/memory.current", "299999\n");
    check_memory(1, 150000); /* the folder above leaves less */
    put("/sys/fs/cgroup/user/memory.current", "400000\n");
    check_memory(0, 150000);

    /* A container that sees the host's paths: the mount shows only its own folder. */
    put("/proc/self/mountinfo", "31 22 0:28 /user/job /sys/fs/cgroup rw - cgroup2 none rw\n");
    put("/sys/fs/cgroup/memory.max", "70000\n");
    put("/sys/fs/cgroup/memory.current", "30000\n");
    check_memory(40000, 70000);
    put("/proc/self/cgroup",
        "0::/../elsewhere\n"); /* outside of the mount: its top is what we have */
    check_memory(40000, 70000);

    /* Version 1, beside an empty version 2 hierarchy. */
    put("/proc/self/cgroup", "5:memory_other:/x\n4:cpu,memory:/job\n1:name=systemd:/\n0::/\n");
    put("/proc/self/mountinfo", "30 1 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
                                "32 1 0:29 / /mnt/cgroup/memory rw - cgroup cgroup rw,memory\n"
                                "33 1 0:30 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
    put("/mnt/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    put("/mnt/cgroup/memory/memory.usage_in_bytes", "123456\n");
    check_memory(800 * 1024, 1000 * 1024);
    put("/mnt/cgroup/memory/job/memory.limit_in_bytes", "50000\n");
    put("/mnt/cgroup/memory/job/memory.usage_in_bytes", "49000\n");
    put("/mnt/cgroup/memory/job/memory.stat", "inactive_file 1\ntotal_inactive_file 9000\n");
    check_memory(10000, 50000);
}

static void check_arena(gm_workers *pool, size_t bytes)
{
    gm_arena *arena;
    CHECK_OK(gm_arena_new(NULL, bytes, pool, &arena));
    CHECK(gm_arena_bytes(arena) == bytes);
    unsigned char *base = gm_arena_base(arena);
    if (bytes) {
        CHECK((uintptr_t)base % (2 << 20) == 0);
    }
    for (size_t i = 0; i < bytes; i++) {
        CHECK(base[i] == 0);
    }
    if (bytes) {
        memset(base, 0xab, bytes);
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            gm_arena_free(arena); /* must not unmap what may by now be somebody else's memory */
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
        CHECK(base[0] == 0xab && base[bytes - 1] == 0xab);
    }
    gm_arena_free(arena);
}

/* Parts of an arena come and go, in any order; what is there again reads as zeros, and its neighbours have kept theirs. */
static void check_parts(gm_workers *pool)
{
    gm_arena *arena;
    const gm_extent parts[] = {{8192, 4 << 20}, {8192 + (4 << 20), 4096}, {16 << 20, 12345}};
    CHECK_OK(gm_arena_reserve(NULL, (16 << 20) + 12345, &arena));
    CHECK(gm_arena_bytes(arena) == 0 && gm_arena_reserved(arena) == (16 << 20) + 12345);
    CHECK_OK(gm_arena_hold(arena, parts, 3, pool));
    CHECK(gm_arena_bytes(arena) == (4 << 20) + 4096 + 12345);
    unsigned char *base = gm_arena_base(arena);
    for (int i = 0; i < 3; i++) {
        memset(base + parts[i].offset, i + 1, parts[i].bytes);
    }
    gm_arena_drop(arena, parts[1].offset);
    CHECK(gm_arena_bytes(arena) == (4 << 20) + 12345);
    CHECK(base[parts[1].offset] == 0 && base[parts[1].offset - 1] == 1 && base[16 << 20] == 3);
    CHECK_OK(gm_arena_hold(arena, &parts[1], 1, pool));
    CHECK(base[parts[1].offset] == 0);
    gm_extent large = {9 << 20, SIZE_MAX / 2};
    CHECK(gm_arena_hold(arena, &large, 1, pool) == GM_ERR_NOMEM);
    CHECK(gm_arena_bytes(arena) == (4 << 20) + 4096 + 12345);
    gm_arena_free(arena);
}

/* A device that pins: how often, how often it has let go, and with which one it refuses. */
static int n_pins, n_unpins, first_refused;

static gm_status count_pin(gm_device *device, void *base, size_t bytes)
{
    static unsigned char there[64];
    (void)device;
    CHECK(bytes <= 64 * 4096 && mincore(base, bytes, there) == 0);
    for (size_t i = 0; i < (bytes + 4095) / 4096; i++) {
        CHECK(there[i] & 1); /* nobody pins what is still to be touched */
    }
    return ++n_pins == first_refused ? GM_FAIL(GM_ERR_NOMEM, "pin %d refused", n_pins) : GM_OK;
}

static void count_unpin(gm_device *device, void *base)
{
    (void)device;
    (void)base;
    n_unpins++;
}

/* Each part is pinned once, when all of it is there.  Where one cannot be, none is, and the text is of the first. */
static void check_pins(gm_workers *pool)
{
    enum { N = 700, BYTES = 40960 }; /* some across two huge pages */
    static const gm_device_ops ops = {.pin = count_pin, .unpin = count_unpin};
    static gm_extent parts[N];
    gm_device device = {.ops = &ops};
    gm_arena *arena;
    for (size_t i = 0; i < N; i++) {
        parts[i] = (gm_extent){i * BYTES, i % 7 ? BYTES : 0};
    }
    for (first_refused = 0; first_refused <= 500; first_refused += 250) {
        n_pins = n_unpins = 0;
        CHECK_OK(gm_arena_reserve(&device, N * BYTES, &arena));
        gm_status status = gm_arena_hold(arena, parts, N, pool);
        if (first_refused) {
            char text[32];
            (void)snprintf(text, sizeof text, "pin %d refused", first_refused);
            CHECK(status == GM_ERR_NOMEM && strcmp(gm_last_error(), text) == 0);
            CHECK(n_pins == first_refused && n_unpins == n_pins - 1);
            CHECK(gm_arena_bytes(arena) == 0);
        } else {
            CHECK(status == GM_OK && n_pins == N - N / 7 && n_unpins == 0);
            CHECK(gm_arena_bytes(arena) == (size_t)n_pins * BYTES);
        }
        gm_arena_free(arena);
        CHECK(n_unpins == n_pins - (first_refused > 0));
    }
}

#ifndef __SANITIZE_ADDRESS__ /* whose own memory about the arena the calling thread touches */
/* Page faults of the calling thread while it makes an arena. */
static long faults_of_arena(gm_workers *pool)
{
    struct rusage before, after;
    gm_arena *arena;
    CHECK(getrusage(RUSAGE_THREAD, &before) == 0);
    CHECK_OK(gm_arena_new(NULL, (size_t)128 << 20, pool, &arena));
    CHECK(getrusage(RUSAGE_THREAD, &after) == 0);
    gm_arena_free(arena);
    return after.ru_minflt - before.ru_minflt;
}

/* The threads of a bound pool touch an arena first, the calling thread, which may be anywhere, does not. */
static void check_first_touch(void)
{
    unsigned *mask;
    size_t n_mask;
    gm_workers *pool;
    CHECK_OK(gm_topology_mask(&mask, &n_mask));
    CHECK_OK(gm_workers_new_on(mask, 1, 1, &pool));
    if (faults_of_arena(NULL) < 64) {
        printf("test_hostmem: this system does not count page faults\n");
    } else {
        CHECK(faults_of_arena(pool) < 32);
    }
    gm_workers_free(pool);
    free(mask);
}
#endif

/* As the kernel tells it; -1: it does not. */
static int node_of(unsigned core)
{
    char path[64];
    for (int node = 0; node < 1024; node++) {
        (void)snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%u/node%d", core, node);
        if (access(path, F_OK) == 0) {
            return node;
        }
    }
    return -1;
}

/* Pages of a bound pool's arena lie on the node of the pool's cores. */
static void check_placement(void)
{
    unsigned *mask;
    size_t n_mask;
    CHECK_OK(gm_topology_mask(&mask, &n_mask));
    for (size_t c = 0; c < n_mask; c += n_mask > 8 ? n_mask / 8 : 1) {
        gm_workers *pool;
        gm_arena *arena;
        CHECK_OK(gm_workers_new_on(&mask[c], 1, 1, &pool));
        CHECK_OK(gm_arena_new(NULL, (size_t)20 << 20, pool, &arena));
        int node = node_of(mask[c]);
        void *pages[10];
        int nodes[10];
        for (size_t i = 0; i < 10; i++) {
            pages[i] = (char *)gm_arena_base(arena) + i * (2 << 20);
        }
        /* Without new nodes the call tells where each page is, or an error: not there. */
        long failed = syscall(SYS_move_pages, 0, 10UL, pages, NULL, nodes, 0);
        if (failed || node < 0 || !gm_workers_is_bound(pool)) {
            printf("test_hostmem: this system does not tell where pages are\n");
            c = n_mask;
        }
        for (size_t i = 0; i < 10 && c < n_mask; i++) {
            CHECK(nodes[i] == node);
        }
        gm_arena_free(arena);
        gm_workers_free(pool);
    }
    free(mask);
}

static size_t resident_bytes(void)
{
    FILE *file = fopen("/proc/self/statm", "r");
    size_t total_pages, pages;
    CHECK(file && fscanf(file, "%zu %zu", &total_pages, &pages) == 2);
    fclose(file);
    return pages * (size_t)sysconf(_SC_PAGESIZE);
}

int main(void)
{
    make_tree();
    check_figures();
    remove_tree();

    size_t available, total;
    CHECK_OK(gm_host_available(&available));
    CHECK(available > 0);
    CHECK_OK(gm_host_memory_at("", &available, &total));
    CHECK(available > 0 && available <= total);

    gm_workers *pool;
    CHECK_OK(gm_workers_new(3, &pool));
    static const size_t sizes[] = {0,       1, 4096, 4097, (2 << 20) - 1, 2 << 20, (2 << 20) + 1,
                                   33333333};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        check_arena(pool, sizes[i]);
        check_arena(NULL, sizes[i]);
    }
    unsigned *mask;
    size_t n_mask;
    gm_workers *bound;
    CHECK_OK(gm_topology_mask(&mask, &n_mask));
    CHECK_OK(gm_workers_new_on(mask, n_mask, 0, &bound));
    check_arena(bound, 1);
    check_arena(bound, 33333333);
    check_parts(bound);
    check_parts(NULL);
    check_pins(bound);
    check_pins(NULL);
    gm_workers_free(bound);
    free(mask);

#ifndef __SANITIZE_ADDRESS__
    check_first_touch();
#endif
    check_placement();

    size_t before = resident_bytes();
    gm_arena *arena = NULL;
    CHECK(gm_arena_new(NULL, total + 1, pool, &arena) == GM_ERR_NOMEM && !arena);
    CHECK(strstr(gm_last_error(), "host memory"));
    CHECK(gm_arena_new(NULL, SIZE_MAX, pool, &arena) == GM_ERR_NOMEM && !arena);
    CHECK(resident_bytes() < before + (64 << 20)); /* refused before anything was touched */
    gm_arena_free(NULL);
    gm_workers_free(pool);
    puts("test_hostmem: ok");
    return 0;
}
