/* test_device_host.c - the host device: aliasing loses no word, poison faults, freed blocks give
 * their memory back, a forked child cannot touch anything, timed events tell the time, and wrong calls are
 * refused by name. */
#define _GNU_SOURCE
#include "device/device.h"
#include "device/hostmem.h"

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

enum {
    N_CHUNKS = 24,
    BLOCKS_PER_CHUNK = 3,
    N_SLOTS = 5, /* of BLOCKS_PER_CHUNK blocks each: far fewer than chunks */
    N_VISITS = 6000,
};

/* Can this process read the byte?  Asked of the kernel, which answers instead of faulting. */
static bool is_readable(uintptr_t addr)
{
    int pipe_fds[2];
    CHECK(pipe(pipe_fds) == 0);
    ssize_t n = write(pipe_fds[1], (const void *)addr, 1);
    CHECK(n == 1 || errno == EFAULT);
    close(pipe_fds[0]);
    close(pipe_fds[1]);
    return n == 1;
}

/* The signal that ends a child that reads `addr`; 0 if it survives. */
static int signal_of_reading(uintptr_t addr)
{
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        signal(SIGSEGV, SIG_DFL); /* not a sanitizer's */
        _exit(*(const volatile char *)addr == 1 ? 0 : 1);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

static uint64_t word_of(uint64_t chunk, uint64_t version, uint64_t i)
{
    uint64_t state = chunk << 48 ^ version << 24 ^ i;
    return next_random(&state);
}

static void check_aliasing_loses_nothing(gm_device *dev)
{
    const gm_device_ops *ops = dev->ops;
    size_t chunk_bytes = BLOCKS_PER_CHUNK * dev->block_bytes;
    size_t n_words = chunk_bytes / sizeof(uint64_t);
    gm_arena *arena;
    CHECK_OK(gm_arena_new(NULL, N_CHUNKS * chunk_bytes, NULL, &arena));
    CHECK_OK(ops->pin(dev, gm_arena_base(arena), gm_arena_bytes(arena)));
    gm_stream fetch, evict;
    gm_event landed;
    CHECK_OK(ops->stream_new(dev, &fetch));
    CHECK_OK(ops->stream_new(dev, &evict));
    CHECK_OK(ops->event_new(dev, false, &landed));

    gm_block blocks[N_SLOTS][BLOCKS_PER_CHUNK];
    for (size_t slot = 0; slot < N_SLOTS; slot++) {
        for (size_t i = 0; i < BLOCKS_PER_CHUNK; i++) {
            CHECK_OK(ops->block_new(dev, &blocks[slot][i]));
        }
    }
    uintptr_t addr[N_CHUNKS];
    uint64_t *home[N_CHUNKS], version[N_CHUNKS] = {0};
    for (size_t chunk = 0; chunk < N_CHUNKS; chunk++) {
        CHECK_OK(ops->range_new(dev, chunk_bytes, &addr[chunk]));
        CHECK_OK(ops->map(dev, addr[chunk], blocks[chunk % N_SLOTS], BLOCKS_PER_CHUNK));
        home[chunk] = (uint64_t *)gm_arena_base(arena) + chunk * n_words;
        for (size_t i = 0; i < n_words; i++) {
            home[chunk][i] = word_of(chunk, 0, i);
        }
    }

    uint64_t state = 1, n_wrong = 0;
    for (int visit = 0; visit < N_VISITS; visit++) {
        size_t chunk = next_random(&state) % N_CHUNKS;
        CHECK_OK(ops->copy_h2d(dev, addr[chunk], home[chunk], chunk_bytes, fetch));
        CHECK_OK(ops->event_record(dev, landed, fetch));
        CHECK_OK(ops->event_wait(dev, landed, evict));
        uint64_t *words = (uint64_t *)addr[chunk];
        uint64_t next = version[chunk] + 1;
        for (size_t i = 0; i < n_words; i++) {
            n_wrong += words[i] != word_of(chunk, version[chunk], i);
            words[i] = word_of(chunk, next, i);
        }
        size_t neighbour = (chunk + N_SLOTS) % N_CHUNKS;
        if (neighbour % N_SLOTS == chunk % N_SLOTS) { /* same blocks, other address */
            CHECK(memcmp((void *)addr[neighbour], words, chunk_bytes) == 0);
        }
        CHECK_OK(ops->copy_d2h(dev, home[chunk], addr[chunk], chunk_bytes, evict));
        CHECK_OK(ops->event_sync(dev, landed));
        version[chunk] = next;
    }
    CHECK_OK(ops->stream_sync(dev, evict));
    for (size_t chunk = 0; chunk < N_CHUNKS; chunk++) {
        for (size_t i = 0; i < n_words; i++) {
            n_wrong += home[chunk][i] != word_of(chunk, version[chunk], i);
        }
    }
    CHECK(n_wrong == 0);

    CHECK_OK(ops->fill(dev, addr[0], 0x5a, chunk_bytes, fetch));
    CHECK_OK(ops->map(dev, addr[1], blocks[2], BLOCKS_PER_CHUNK)); /* replaces what was mapped */
    CHECK_OK(ops->copy_d2d(dev, addr[1], addr[0], chunk_bytes, fetch));
    CHECK(memcmp((void *)addr[1], (void *)addr[2], chunk_bytes) == 0);
    CHECK(*(unsigned char *)(addr[2] + chunk_bytes - 1) == 0x5a);

    for (size_t chunk = 0; chunk < N_CHUNKS; chunk++) {
        ops->range_free(dev, addr[chunk], chunk_bytes);
    }
    for (size_t i = 0; i < N_SLOTS * BLOCKS_PER_CHUNK; i++) {
        ops->block_free(dev, blocks[i / BLOCKS_PER_CHUNK][i % BLOCKS_PER_CHUNK]);
    }
    ops->event_free(dev, landed);
    ops->stream_free(dev, fetch);
    ops->stream_free(dev, evict);
    ops->unpin(dev, gm_arena_base(arena));
    gm_arena_free(arena);
}

static void check_poison(gm_device *dev)
{
    const gm_device_ops *ops = dev->ops;
    uintptr_t addr;
    gm_block blocks[4];
    CHECK_OK(ops->range_new(dev, 4 * dev->block_bytes, &addr));
    CHECK(!is_readable(addr)); /* a fresh range shows nothing */
    CHECK(signal_of_reading(addr) == SIGSEGV);
    for (size_t i = 0; i < 4; i++) {
        CHECK_OK(ops->block_new(dev, &blocks[i]));
    }
    CHECK_OK(ops->map(dev, addr, blocks, 4));
    memset((void *)addr, 7, 4 * dev->block_bytes);
    CHECK_OK(ops->poison(dev, addr + dev->block_bytes, 2));
    CHECK(is_readable(addr + dev->block_bytes - 1));
    CHECK(!is_readable(addr + dev->block_bytes));
    CHECK(!is_readable(addr + 3 * dev->block_bytes - 1));
    CHECK(is_readable(addr + 3 * dev->block_bytes));
    CHECK(signal_of_reading(addr + dev->block_bytes) == SIGSEGV);
    CHECK_OK(ops->map(dev, addr + dev->block_bytes, &blocks[1], 2));
    for (size_t i = 0; i < 4 * dev->block_bytes; i++) {
        CHECK(((unsigned char *)addr)[i] == 7); /* what was hidden was not lost */
    }
    CHECK_OK(ops->unmap(dev, addr, 4));
    CHECK(!is_readable(addr));
    CHECK_OK(ops->map(dev, addr, NULL, 0));
    CHECK_OK(ops->poison(dev, addr, 0));
    CHECK_OK(ops->unmap(dev, addr, 0));
    for (size_t i = 0; i < 4; i++) {
        ops->block_free(dev, blocks[i]);
    }
    ops->range_free(dev, addr, 4 * dev->block_bytes);
}

/* Bytes that the blocks' file holds in memory. */
static size_t file_bytes(void)
{
    DIR *folder = opendir("/proc/self/fd");
    CHECK(folder);
    size_t bytes = SIZE_MAX;
    for (struct dirent *entry = readdir(folder); entry; entry = readdir(folder)) {
        char name[300], target[64] = "";
        (void)snprintf(name, sizeof name, "/proc/self/fd/%s", entry->d_name);
        struct stat info;
        if (readlink(name, target, sizeof target - 1) > 0 &&
            strstr(target, "memfd:gemini-blocks") && stat(name, &info) == 0) {
            bytes = (size_t)info.st_blocks * 512;
        }
    }
    closedir(folder);
    CHECK(bytes != SIZE_MAX);
    return bytes;
}

static size_t n_mappings(void)
{
    FILE *file = fopen("/proc/self/maps", "r");
    CHECK(file);
    char line[1024];
    size_t count = 0;
    while (fgets(line, sizeof line, file)) {
        count += strstr(line, "memfd:gemini-blocks") != NULL;
    }
    fclose(file);
    return count;
}

static void check_blocks(gm_device *dev)
{
    enum { N_BLOCKS = 300 };
    const gm_device_ops *ops = dev->ops;
    static gm_block blocks[N_BLOCKS];
    CHECK(file_bytes() == 0);
    for (size_t i = 0; i < N_BLOCKS; i++) {
        CHECK_OK(ops->block_new(dev, &blocks[i]));
        CHECK(blocks[i] == blocks[0] + i && blocks[i] != 0);
    }
    CHECK(file_bytes() == N_BLOCKS * dev->block_bytes);
    uintptr_t addr;
    CHECK_OK(ops->range_new(dev, N_BLOCKS * dev->block_bytes, &addr));
    CHECK_OK(ops->map(dev, addr, blocks, N_BLOCKS));
    CHECK(n_mappings() == 1); /* neighbours in the file share one mapping */
    for (size_t i = 0; i < N_BLOCKS; i++) {
        memset((void *)(addr + i * dev->block_bytes), (int)(i % 251), dev->block_bytes);
    }
    CHECK_OK(ops->unmap(dev, addr, N_BLOCKS));
    for (size_t i = 0; i < N_BLOCKS; i += 2) {
        ops->block_free(dev, blocks[i]);
    }
    CHECK(file_bytes() == N_BLOCKS / 2 * dev->block_bytes); /* the memory really went back */
    for (size_t i = 1; i < N_BLOCKS; i += 2) {
        CHECK_OK(ops->map(dev, addr, &blocks[i], 1));
        CHECK(*(unsigned char *)addr == i % 251 &&
              *(unsigned char *)(addr + dev->block_bytes - 1) == i % 251);
    }
    CHECK_OK(ops->unmap(dev, addr, 1));
    gm_block again;
    CHECK_OK(ops->block_new(dev, &again));
    CHECK(again == blocks[0]); /* the lowest free one */
    ops->block_free(dev, again);
    for (size_t i = 1; i < N_BLOCKS; i += 2) {
        ops->block_free(dev, blocks[i]);
    }
    CHECK(file_bytes() == 0);
    ops->range_free(dev, addr, N_BLOCKS * dev->block_bytes);
}

static void check_fork(gm_device *dev)
{
    const gm_device_ops *ops = dev->ops;
    uintptr_t addr;
    gm_block block, other;
    CHECK_OK(ops->range_new(dev, dev->block_bytes, &addr));
    CHECK_OK(ops->block_new(dev, &block));
    CHECK_OK(ops->map(dev, addr, &block, 1));
    memset((void *)addr, 1, dev->block_bytes);
    CHECK(signal_of_reading(addr) == SIGSEGV); /* mapped here, but not in a child */
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK(ops->map(dev, addr, &block, 1) == GM_ERR_STATE);
        CHECK(strstr(gm_last_error(), "forked"));
        CHECK(ops->poison(dev, addr, 1) == GM_ERR_STATE);
        CHECK(ops->block_new(dev, &other) == GM_ERR_STATE);
        CHECK(ops->range_new(dev, dev->block_bytes, &addr) == GM_ERR_STATE);
        CHECK(ops->stream_sync(dev, 0) == GM_ERR_STATE);
        ops->block_free(dev, block); /* leaves the parent's bytes alone */
        ops->range_free(dev, addr, dev->block_bytes);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(*(char *)addr == 1 && *(char *)(addr + dev->block_bytes - 1) == 1);
    ops->range_free(dev, addr, dev->block_bytes);
    ops->block_free(dev, block);
}

static void check_arithmetic(gm_device *dev)
{
    const gm_device_ops *ops = dev->ops;
    uintptr_t addr;
    gm_block block;
    CHECK_OK(ops->range_new(dev, dev->block_bytes, &addr));
    CHECK_OK(ops->block_new(dev, &block));
    CHECK_OK(ops->map(dev, addr, &block, 1));
    CHECK_OK(ops->fill(dev, addr, 0, dev->block_bytes, 0));
    enum { NUMEL = 64 };
    float *weight = (float *)addr, *m = weight + NUMEL, *v = m + NUMEL, *grad = v + NUMEL;
    for (size_t i = 0; i < NUMEL; i++) {
        weight[i] = 1;
        grad[i] = 0.5f;
    }
    gm_grad_add_args add = {grad, grad, GM_F32, GM_F32, NUMEL, true, 1};
    CHECK_OK(ops->grad_add(dev, &add, NULL, 0));
    CHECK(grad[0] == 1 && grad[NUMEL - 1] == 1);

    gm_sumsq *sum = (gm_sumsq *)(grad + NUMEL);
    CHECK_OK(ops->sumsq(dev, grad, GM_F32, NUMEL, sum, 0));
    CHECK_OK(ops->sumsq(dev, grad, GM_F32, NUMEL, sum, 0));
    CHECK(gm_sumsq_value(sum) == 2 * NUMEL);
    CHECK_OK(ops->grad_add(dev, &add, sum, 0)); /* overwritten, not added to */
    CHECK(grad[0] == 2 && gm_sumsq_value(sum) == 4 * NUMEL);
    add.accumulate = false;
    for (size_t i = 0; i < NUMEL; i++) {
        grad[i] = 1;
    }
    CHECK_OK(ops->grad_add(dev, &add, sum, 0));
    CHECK(grad[0] == 1 && gm_sumsq_value(sum) == NUMEL);

    gm_adam_hyper hyper = {.lr = 0.25,
                           .beta1 = 0.5,
                           .beta2 = 0.75,
                           .step = 1,
                           .adamw = true,
                           .bias_correction = true,
                           .grad_divisor = 1,
                           .clip_factor = 1};
    gm_adam_range range = {.begin = 0, .end = NUMEL - 1};
    CHECK_OK(gm_adam_scalars_init(&hyper, &range.scalars));
    gm_adam_args adam = {.format = GM_F32,
                         .grad_dtype = GM_F32,
                         .weight = weight,
                         .m = m,
                         .v = v,
                         .grad = grad,
                         .ranges = &range,
                         .n_ranges = 1};
    CHECK_OK(ops->adam(dev, &adam, 0));
    CHECK(weight[0] == 0.75f && m[0] == 0.5f && v[0] == 0.25f);
    CHECK(weight[NUMEL - 1] == 1 && m[NUMEL - 1] == 0);
    ops->range_free(dev, addr, dev->block_bytes);
    ops->block_free(dev, block);
}

static void add_one(void *context)
{
    ++*(int *)context;
}

static void check_time_and_calls(gm_device *dev)
{
    const gm_device_ops *ops = dev->ops;
    gm_event events[40];
    double seconds;
    for (int i = 0; i < 40; i++) {
        CHECK_OK(ops->event_new(dev, i % 2 == 0, &events[i]));
    }
    CHECK(ops->event_elapsed(dev, events[0], events[38], &seconds) == GM_ERR_STATE);
    CHECK_OK(ops->event_record(dev, events[0], 0));
    struct timespec pause = {.tv_nsec = 20 * 1000 * 1000};
    CHECK(nanosleep(&pause, NULL) == 0);
    CHECK_OK(ops->event_record(dev, events[38], 0));
    CHECK_OK(ops->event_record(dev, events[1], 0));
    CHECK_OK(ops->event_elapsed(dev, events[0], events[38], &seconds));
    CHECK(seconds >= 0.02 && seconds < 10);
    CHECK_OK(ops->event_record(dev, events[0], 0)); /* the latest record counts */
    CHECK_OK(ops->event_elapsed(dev, events[0], events[38], &seconds));
    CHECK(seconds <= 0);
    CHECK(ops->event_elapsed(dev, events[0], events[1], &seconds) == GM_ERR_ARG &&
          strstr(gm_last_error(), "not a timed event"));
    CHECK_OK(ops->event_wait(dev, events[38], 0));
    ops->event_free(dev, events[38]);
    CHECK(ops->event_record(dev, events[38], 0) == GM_ERR_ARG);
    CHECK_OK(ops->event_new(dev, true, &events[38])); /* it was never recorded */
    CHECK(ops->event_elapsed(dev, events[0], events[38], &seconds) == GM_ERR_STATE);
    gm_event freed[] = {events[20], events[4]};
    for (int i = 0; i < 2;
         i++) { /* their slots are the next ones that are taken, the first first */
        ops->event_free(dev, freed[i]);
    }
    CHECK_OK(ops->event_new(dev, true, &events[4]));
    CHECK_OK(ops->event_new(dev, true, &events[20]));
    CHECK(events[20] == freed[0] && events[4] == freed[1]);
    CHECK_OK(ops->event_elapsed(dev, events[0], events[0], &seconds));
    for (int i = 0; i < 40; i++) {
        ops->event_free(dev, events[i]);
    }
    int n = 0;
    CHECK_OK(ops->host_call(dev, add_one, &n, 0));
    CHECK(n == 1); /* at once */
}

static void check_errors(gm_device *dev)
{
    const gm_device_ops *ops = dev->ops;
    gm_device *none = NULL;
    CHECK(gm_device_host_new(0, NULL, &none) == GM_ERR_ARG && !none);
    CHECK(gm_device_host_new(SIZE_MAX, NULL, &none) == GM_ERR_ARG && !none);

    uintptr_t addr = 0, second = 0;
    CHECK(ops->range_new(dev, 0, &addr) == GM_ERR_ARG);
    CHECK(ops->range_new(dev, dev->granularity + 1, &addr) == GM_ERR_ARG &&
          strstr(gm_last_error(), "multiple"));
    CHECK_OK(ops->range_new(dev, 2 * dev->block_bytes, &addr));
    CHECK_OK(ops->range_new(dev, 2 * dev->block_bytes, &second));
    gm_block block;
    CHECK_OK(ops->block_new(dev, &block));
    gm_block blocks[3] = {block, block, block}; /* one block may show twice */
    CHECK_OK(ops->map(dev, addr, blocks, 2));
    *(char *)addr = 9;
    CHECK(*(char *)(addr + dev->block_bytes) == 9);
    CHECK(ops->map(dev, addr, blocks, 3) == GM_ERR_ARG); /* past the end of the range */
    CHECK(ops->map(dev, addr + dev->block_bytes, blocks, 2) == GM_ERR_ARG);
    CHECK(ops->map(dev, addr + 8, blocks, 1) == GM_ERR_ARG);
    CHECK(ops->map(dev, (uintptr_t)&addr, blocks, 1) == GM_ERR_ARG); /* memory that is not ours */
    CHECK(ops->poison(dev, addr, 3) == GM_ERR_ARG && ops->unmap(dev, 0, 1) == GM_ERR_ARG);
    CHECK(strstr(gm_last_error(), "range"));
    blocks[1] = block + 1;
    CHECK(ops->map(dev, addr, blocks, 2) == GM_ERR_ARG && strstr(gm_last_error(), "not alive"));
    CHECK(*(char *)(addr + dev->block_bytes) == 9); /* a refused call changes nothing */
    blocks[1] = 0;
    CHECK(ops->map(dev, addr, blocks, 2) == GM_ERR_ARG);
    CHECK(ops->event_wait(dev, 0, 0) == GM_ERR_ARG &&
          ops->event_record(dev, 1 << 20, 0) == GM_ERR_ARG);
    ops->range_free(dev, addr, 2 * dev->block_bytes);
    CHECK(ops->map(dev, addr, &block, 1) == GM_ERR_ARG); /* no longer ours */
    ops->range_free(dev, second, 2 * dev->block_bytes);
    ops->block_free(dev, block);

    size_t free_bytes, total_bytes;
    CHECK_OK(ops->memory(dev, &free_bytes, &total_bytes));
    CHECK(free_bytes > 0 && free_bytes <= total_bytes);
    gm_device *huge;
    CHECK_OK(gm_device_host_new(total_bytes + 1, NULL, &huge));
    CHECK(ops->block_new(huge, &block) == GM_ERR_NOMEM && strstr(gm_last_error(), "available"));
    huge->ops->free(huge);
    CHECK_OK(gm_device_host_new(SIZE_MAX / 2, NULL, &huge));
    CHECK(ops->block_new(huge, &block) == GM_ERR_NOMEM);
    huge->ops->free(huge);
    ops->free(NULL);
}

int main(void)
{
    gm_workers *pool;
    CHECK_OK(gm_workers_new(2, &pool));
    gm_device *dev;
    CHECK_OK(gm_device_host_new(10000, pool, &dev));
    CHECK(dev->is_host && strcmp(dev->ops->name, "host") == 0);
    CHECK(dev->granularity == gm_device_host_granularity());
    CHECK(dev->block_bytes == gm_round_up(10000, dev->granularity));
    check_blocks(dev);
    check_poison(dev);
    check_aliasing_loses_nothing(dev);
    check_fork(dev);
    check_arithmetic(dev);
    check_time_and_calls(dev);
    check_errors(dev);
    CHECK(file_bytes() == 0);
    dev->ops->free(dev);

    CHECK_OK(gm_device_host_new(1 << 20, pool, &dev)); /* copies that the pool shares */
    check_poison(dev);
    check_fork(dev);
    dev->ops->free(dev);
    gm_workers_free(pool);
    puts("test_device_host: ok");
    return 0;
}
