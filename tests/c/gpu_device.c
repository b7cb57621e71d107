/* gpu_device.c - the CUDA device and its kernels against the host: aliasing loses no word, poison
 * reads as NaN, wrong calls are refused by name, and Adam, gradient addition and the sum of squares
 * give the host's bits; host calls keep their place in their stream.  Needs a GPU.
 *
 *     gpu_device            the tests
 *     gpu_device --short    fewer visits and elements, for a memory checker
 *     gpu_device --fault    a kernel reads what is not mapped, and a host call follows it */
#define _POSIX_C_SOURCE 200809L

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "device/cuda/driver.h"
#include "gpu_check.h"
#include "torch/alloc.h"

static bool is_short;
static gm_workers *workers;

/* ---- mapping ---- */

/* Visits chunks at random: fetch, add a number, write back; everything ordered by events only. */
static void check_aliasing_loses_nothing(void)
{
    enum { N_CHUNKS = 24, N_SLOTS = 5, BLOCKS = 2 };
    const size_t n_visits = is_short ? 200 : 6000;
    gm_device *dev = NULL;
    CHECK_OK(gm_device_cuda_new(0, 2 * MIB, &dev));
    const gm_device_ops *ops = dev->ops;
    const size_t chunk_bytes = BLOCKS * dev->block_bytes, n = chunk_bytes / sizeof(float);
    gm_block blocks[N_SLOTS][BLOCKS];
    gm_event slot_free[N_SLOTS]; /* the last reader of the slot's blocks is done */
    gm_event home_current[N_CHUNKS], fetched, computed;
    gm_stream fetch, compute, evict;
    uintptr_t chunks = 0;
    float *homes = aligned_alloc(4096, N_CHUNKS * chunk_bytes);
    unsigned visits[N_CHUNKS] = {0};
    CHECK(homes);
    for (size_t i = 0; i < N_CHUNKS * n; i++) {
        homes[i] = (float)(i % 8191);
    }
    CHECK_OK(ops->pin(dev, homes, N_CHUNKS * chunk_bytes));
    memory steps = memory_new(dev, chunk_bytes); /* what a visit adds: 1, 2, 3, 1, ... */
    float *host_steps = malloc(chunk_bytes);
    CHECK(host_steps);
    for (size_t i = 0; i < n; i++) {
        host_steps[i] = (float)(i % 3 + 1);
    }
    put(dev, steps.addr, host_steps, chunk_bytes);
    CHECK_OK(ops->stream_new(dev, &fetch));
    CHECK_OK(ops->stream_new(dev, &compute));
    CHECK_OK(ops->stream_new(dev, &evict));
    CHECK_OK(ops->event_new(dev, false, &fetched));
    CHECK_OK(ops->event_new(dev, false, &computed));
    CHECK_OK(ops->range_new(dev, N_CHUNKS * chunk_bytes, &chunks));
    for (size_t s = 0; s < N_SLOTS; s++) {
        CHECK_OK(ops->event_new(dev, false, &slot_free[s]));
        for (size_t b = 0; b < BLOCKS; b++) {
            CHECK_OK(ops->block_new(dev, &blocks[s][b]));
        }
    }
    for (size_t c = 0; c < N_CHUNKS; c++) {
        CHECK_OK(ops->event_new(dev, false, &home_current[c]));
        CHECK_OK(ops->map(dev, chunks + c * chunk_bytes, blocks[c % N_SLOTS], BLOCKS));
    }
    for (size_t visit = 0; visit < n_visits; visit++) {
        size_t c = next_random(&seed) % N_CHUNKS, s = c % N_SLOTS;
        uintptr_t addr = chunks + c * chunk_bytes;
        float *home = homes + c * n;
        CHECK_OK(ops->event_wait(dev, slot_free[s], fetch));
        CHECK_OK(ops->event_wait(dev, home_current[c], fetch));
        CHECK_OK(ops->copy_h2d(dev, addr, home, chunk_bytes, fetch));
        CHECK_OK(ops->event_record(dev, fetched, fetch));
        CHECK_OK(ops->event_wait(dev, fetched, compute));
        gm_grad_add_args add = {(void *)addr, (const void *)steps.addr, GM_F32, GM_F32, n, true, 1};
        CHECK_OK(ops->grad_add(dev, &add, NULL, compute));
        CHECK_OK(ops->event_record(dev, computed, compute));
        CHECK_OK(ops->event_wait(dev, computed, evict));
        CHECK_OK(ops->copy_d2h(dev, home, addr, chunk_bytes, evict));
        CHECK_OK(ops->event_record(dev, slot_free[s], evict));
        CHECK_OK(ops->event_record(dev, home_current[c], evict));
        visits[c]++;
    }
    CHECK_OK(ops->stream_sync(dev, evict));
    size_t wrong = 0;
    for (size_t c = 0; c < N_CHUNKS; c++) {
        for (size_t i = 0; i < n; i++) {
            float expected = (float)((c * n + i) % 8191) + (float)visits[c] * host_steps[i];
            wrong += homes[c * n + i] != expected;
        }
    }
    CHECK(wrong == 0);
    ops->unpin(dev, homes);
    for (size_t c = 0; c < N_CHUNKS; c++) {
        ops->event_free(dev, home_current[c]);
    }
    ops->range_free(dev, chunks, N_CHUNKS * chunk_bytes);
    for (size_t s = 0; s < N_SLOTS; s++) {
        ops->event_free(dev, slot_free[s]);
        for (size_t b = 0; b < BLOCKS; b++) {
            ops->block_free(dev, blocks[s][b]);
        }
    }
    ops->event_free(dev, fetched);
    ops->event_free(dev, computed);
    ops->stream_free(dev, fetch);
    ops->stream_free(dev, compute);
    ops->stream_free(dev, evict);
    memory_free(dev, &steps);
    ops->free(dev);
    free(homes);
    free(host_steps);
}

static bool all_bytes(gm_device *dev, uintptr_t addr, size_t bytes, uint8_t byte)
{
    uint8_t *host = malloc(bytes);
    CHECK(host);
    get(dev, host, addr, bytes);
    size_t i = 0;
    while (i < bytes && host[i] == byte) {
        i++;
    }
    free(host);
    return i == bytes;
}

static void check_poison(void)
{
    gm_device *dev = NULL;
    CHECK_OK(gm_device_cuda_new(0, 4 * MIB, &dev));
    const gm_device_ops *ops = dev->ops;
    const size_t block = dev->block_bytes;
    memory m = memory_new(dev, 3 * block);
    CHECK_OK(ops->fill(dev, m.addr, 0x5a, m.bytes, 0));
    CHECK_OK(ops->stream_sync(dev, 0));
    CHECK_OK(ops->poison(dev, m.addr, 2));
    CHECK(all_bytes(dev, m.addr, 2 * block, 0xff));
    CHECK(all_bytes(dev, m.addr + 2 * block, block, 0x5a));
    /* a stray write does not outlive the next poison */
    CHECK_OK(ops->fill(dev, m.addr, 0, 64, 0));
    CHECK_OK(ops->stream_sync(dev, 0));
    CHECK_OK(ops->poison(dev, m.addr + 2 * block, 1));
    CHECK(all_bytes(dev, m.addr, 3 * block, 0xff));
    /* what was behind the poison is untouched */
    CHECK_OK(ops->map(dev, m.addr, m.blocks, 3));
    CHECK(all_bytes(dev, m.addr, 3 * block, 0x5a));
    CHECK_OK(ops->poison(dev, m.addr, 3)); /* range_free unmaps poison too */
    memory_free(dev, &m);
    ops->free(dev);
}

static void check_refused(gm_status status, gm_status expected, const char *words)
{
    if (status != expected || !strstr(gm_last_error(), words)) {
        fprintf(stderr, "expected status %d with \"%s\", got %d: %s\n", (int)expected, words,
                (int)status, gm_last_error());
        exit(1);
    }
}

static void check_mapping_errors(void)
{
    gm_device *dev = NULL;
    check_refused(gm_device_cuda_new(4096, MIB, &dev), GM_ERR_ARG, "cuda:4096");
    CHECK(!dev);
    check_refused(gm_device_cuda_new(0, 0, &dev), GM_ERR_ARG, "block_bytes is 0");
    CHECK_OK(gm_device_cuda_new(0, 3 * MIB, &dev));
    const gm_device_ops *ops = dev->ops;
    const size_t granule = dev->granularity, block = dev->block_bytes;
    CHECK(granule == 2 * MIB && block == 4 * MIB && !dev->is_host);
    uintptr_t addr = 0;
    check_refused(ops->range_new(dev, granule + 1, &addr), GM_ERR_ARG, "range_new");
    check_refused(ops->range_new(dev, 0, &addr), GM_ERR_ARG, "range_new");
    memory m = memory_new(dev, 4 * block);
    const gm_block none[1] = {0};
    check_refused(ops->map(dev, m.addr - granule, m.blocks, 1), GM_ERR_ARG, "in no range");
    check_refused(ops->map(dev, m.addr + m.bytes, m.blocks, 1), GM_ERR_ARG, "in no range");
    check_refused(ops->map(dev, m.addr + 1, m.blocks, 1), GM_ERR_ARG, "not a multiple");
    check_refused(ops->map(dev, m.addr + block, m.blocks, 4), GM_ERR_ARG, "end after the range");
    check_refused(ops->map(dev, m.addr, none, 1), GM_ERR_ARG, "blocks[0] is 0");
    check_refused(ops->map(dev, m.addr + granule, m.blocks, 1), GM_ERR_ARG, "cuts a mapped block");
    check_refused(ops->unmap(dev, m.addr + granule, 1), GM_ERR_ARG, "cuts a mapped block");
    /* none of these changed what is mapped */
    CHECK_OK(ops->fill(dev, m.addr, 1, m.bytes, 0));
    CHECK(all_bytes(dev, m.addr, m.bytes, 1));
    /* one block at several addresses; a fresh mapping replaces the old one */
    const gm_block twice[2] = {m.blocks[3], m.blocks[3]};
    CHECK_OK(ops->map(dev, m.addr, twice, 2));
    CHECK_OK(ops->fill(dev, m.addr + 3 * block, 7, block, 0));
    CHECK(all_bytes(dev, m.addr, 2 * block, 7));
    CHECK(all_bytes(dev, m.addr + 2 * block, block, 1));
    /* unmapping twice is fine; after it a block may be mapped across the old borders */
    CHECK_OK(ops->unmap(dev, m.addr, 2));
    CHECK_OK(ops->unmap(dev, m.addr, 2));
    CHECK_OK(ops->map(dev, m.addr + granule, m.blocks, 1));
    CHECK(all_bytes(dev, m.addr + granule, block, 1));
    memory_free(dev, &m);
    ops->free(dev);
    /* a block larger than any GPU */
    CHECK_OK(gm_device_cuda_new(0, (size_t)1 << 40, &dev));
    gm_block huge = 0;
    check_refused(dev->ops->block_new(dev, &huge), GM_ERR_NOMEM, "does not fit");
    CHECK(huge == 0);
    size_t free_bytes = 0, total_bytes = 0;
    CHECK_OK(dev->ops->memory(dev, &free_bytes, &total_bytes));
    CHECK(free_bytes > 0 && free_bytes <= total_bytes);
    CHECK_OK(dev->ops->pin(dev, NULL, 0));
    dev->ops->free(NULL);
    dev->ops->free(dev);
}

/* Every call from a thread without a context works and leaves it without one. */
static void *use_from_thread(void *context)
{
    gm_device *dev = context;
    const gm_cuda_api *api = NULL;
    CUcontext current = NULL;
    CHECK_OK(gm_cuda(&api));
    memory m = memory_new(dev, dev->block_bytes);
    CHECK_OK(dev->ops->fill(dev, m.addr, 9, m.bytes, 0));
    CHECK(all_bytes(dev, m.addr, m.bytes, 9));
    memory_free(dev, &m);
    CHECK(api->cuCtxGetCurrent(&current) == CUDA_SUCCESS && !current);
    return NULL;
}

static void check_threads(void)
{
    gm_device *dev = NULL;
    pthread_t thread;
    CHECK_OK(gm_device_cuda_new(0, 2 * MIB, &dev));
    CHECK(pthread_create(&thread, NULL, use_from_thread, dev) == 0);
    pthread_join(thread, NULL);
    dev->ops->free(dev);
}

/* ---- arithmetic against the host ---- */

/* One array on both sides, at the same distance from a 16-byte boundary. */
typedef struct twin {
    uint8_t *host;   /* what the host computes on */
    uint8_t *result; /* what came back from the device */
    memory device;
    size_t offset, bytes;
} twin;

static twin twin_new(gm_device *dev, size_t bytes, size_t offset)
{
    twin t = {.offset = offset, .bytes = bytes};
    t.host = aligned_alloc(64, gm_round_up(bytes + offset + 64, 64));
    t.result = malloc(bytes + 1);
    CHECK(t.host && t.result);
    t.device = memory_new(dev, bytes + offset);
    return t;
}

static void twin_free(gm_device *dev, twin *t)
{
    memory_free(dev, &t->device);
    free(t->host);
    free(t->result);
}

static void *twin_host(const twin *t)
{
    return t->host + t->offset;
}

static void *twin_device(const twin *t)
{
    return (void *)(t->device.addr + t->offset);
}

static void twin_send(gm_device *dev, const twin *t)
{
    put(dev, t->device.addr + t->offset, twin_host(t), t->bytes);
}

static void twin_check(gm_device *dev, twin *t, const char *what)
{
    get(dev, t->result, t->device.addr + t->offset, t->bytes);
    for (size_t i = 0; i < t->bytes; i++) {
        if (t->result[i] != t->host[t->offset + i]) {
            fprintf(stderr, "%s: byte %zu of %zu is %02x on the device, %02x on the host\n", what,
                    i, t->bytes, t->result[i], t->host[t->offset + i]);
            exit(1);
        }
    }
}

/* Ranges of all lengths with gaps between some of them. */
static size_t make_ranges(gm_adam_range *ranges, size_t capacity, size_t numel, bool adamw)
{
    size_t n = 0, at = 0;
    while (n < capacity && at < numel) {
        uint64_t r = next_random(&seed);
        size_t left = numel - at;
        size_t gap = r % 3 ? 0 : (r >> 8) % 20;
        size_t length = (r >> 16) % 5 ? (r >> 24) % 300 : (r >> 24) % 9000;
        gap = gap < left ? gap : left;
        length = length < left - gap ? length : left - gap;
        ranges[n].begin = at + gap;
        ranges[n].end = at + gap + length;
        ranges[n].scalars = some_scalars(adamw, (int64_t)n + 1);
        at = ranges[n].end;
        n++;
    }
    return n;
}

static void check_adam_case(gm_device *dev, gm_dtype format, gm_dtype grad_dtype, int kind,
                            bool adamw, size_t numel, const size_t skew[5])
{
    const size_t weight_bytes = gm_dtype_bytes(format), grad_bytes = gm_dtype_bytes(grad_dtype);
    const size_t low_bytes = format == GM_F32 ? 0 : format == GM_BF16 ? 2 : 4;
    enum { CAPACITY = 150 };
    gm_adam_range ranges[CAPACITY];
    size_t n_ranges = make_ranges(ranges, CAPACITY, numel, adamw);
    twin weight = twin_new(dev, numel * weight_bytes, skew[0] * weight_bytes);
    twin low = twin_new(dev, numel * low_bytes, skew[1] * low_bytes);
    twin m = twin_new(dev, numel * 4, skew[2] * 4);
    twin v = twin_new(dev, numel * 4, skew[3] * 4);
    twin grad = twin_new(dev, numel * grad_bytes, skew[4] * grad_bytes);
    fill(twin_host(&weight), format, numel, kind);
    if (low_bytes) {
        fill(twin_host(&low), low_bytes == 2 ? GM_BF16 : GM_F32, numel, low_bytes == 2 ? 0 : kind);
    }
    fill(twin_host(&m), GM_F32, numel, kind);
    fill(twin_host(&v), GM_F32, numel, kind);
    fill(twin_host(&grad), grad_dtype, numel, kind);
    for (size_t i = 0; i < numel; i += 1 + i % 2) { /* most second moments are not negative */
        ((uint8_t *)twin_host(&v))[4 * i + 3] &= 0x7f;
    }
    twin *twins[] = {&weight, &low, &m, &v, &grad};
    for (size_t i = 0; i < 5; i++) {
        twin_send(dev, twins[i]);
    }
    gm_adam_args args = {.format = format,
                         .grad_dtype = grad_dtype,
                         .weight = twin_device(&weight),
                         .low = low_bytes ? twin_device(&low) : NULL,
                         .m = twin_device(&m),
                         .v = twin_device(&v),
                         .grad = twin_device(&grad),
                         .ranges = ranges,
                         .n_ranges = n_ranges};
    gm_adam_range used[CAPACITY]; /* the device may not look at ranges after the call */
    memcpy(used, ranges, sizeof used);
    args.ranges = used;
    const float scale = 0.37f;
    memory scale_there = memory_new(dev, sizeof scale);
    put(dev, scale_there.addr, &scale, sizeof scale);
    args.grad_scale = adamw ? NULL : (const float *)scale_there.addr;
    CHECK_OK(dev->ops->adam(dev, &args, 0));
    memset(used, 0xff, sizeof used);
    args.grad_scale = adamw ? NULL : &scale;
    args.ranges = ranges;
    args.weight = twin_host(&weight);
    args.low = low_bytes ? twin_host(&low) : NULL;
    args.m = twin_host(&m);
    args.v = twin_host(&v);
    args.grad = twin_host(&grad);
    CHECK_OK(gm_adam_host(&args, workers));
    static const char *const names[] = {"adam: weight", "adam: low", "adam: m", "adam: v",
                                        "adam: grad"};
    for (size_t i = 0; i < 5; i++) {
        twin_check(dev, twins[i], names[i]);
        twin_free(dev, twins[i]);
    }
    memory_free(dev, &scale_there);
}

static void check_adam(gm_device *dev)
{
    static const size_t skews[][5] = {
        {0, 0, 0, 0, 0},                  /* all vectors */
        {8, 8, 8, 8, 8}, {3, 3, 3, 3, 3}, /* the same distance everywhere */
        {4, 4, 4, 4, 4}, {0, 0, 0, 1, 0}, /* one array out of step: elements one by one */
        {1, 2, 3, 5, 7},
    };
    static const gm_dtype pairs[][2] = {{GM_F32, GM_F32},
                                        {GM_BF16, GM_BF16},
                                        {GM_BF16, GM_F32},
                                        {GM_F16, GM_F16},
                                        {GM_F16, GM_F32}};
    for (size_t pair = 0; pair < sizeof pairs / sizeof *pairs; pair++) {
        for (int kind = 0; kind < N_KINDS; kind++) {
            size_t s = (size_t)kind % (sizeof skews / sizeof *skews);
            size_t numel = kind == 7 ? 1 : is_short ? 9001 : 60007;
            check_adam_case(dev, pairs[pair][0], pairs[pair][1], kind, true, numel, skews[s]);
            check_adam_case(dev, pairs[pair][0], pairs[pair][1], kind, false, numel, skews[s]);
            check_adam_case(dev, pairs[pair][0], pairs[pair][1], 3, kind % 2 == 0, numel, skews[0]);
        }
    }
    gm_adam_args bad = {.format = GM_BF16, .grad_dtype = GM_F16};
    gm_adam_range range = {0, 1, some_scalars(true, 1)};
    bad.ranges = &range;
    bad.n_ranges = 1;
    check_refused(dev->ops->adam(dev, &bad, 0), GM_ERR_ARG, "gradient dtype");
    bad.grad_dtype = GM_BF16;
    check_refused(dev->ops->adam(dev, &bad, 0), GM_ERR_ARG, "adam: weight");
    bad.n_ranges = 0;
    CHECK_OK(dev->ops->adam(dev, &bad, 0));
}

/* Equal sums may have different pending carries. */
static void check_same_sum(gm_device *dev, uintptr_t addr, const gm_sumsq *expected,
                           const char *what)
{
    gm_sumsq from_device, a = {.n_inf = 0}, b = {.n_inf = 0};
    get(dev, &from_device, addr, sizeof from_device);
    gm_sumsq_merge(&a, &from_device);
    gm_sumsq_merge(&b, expected);
    if (memcmp(&a, &b, sizeof a) != 0) {
        fprintf(stderr, "%s: %a on the device, %a on the host\n", what, gm_sumsq_value(&a),
                gm_sumsq_value(&b));
        exit(1);
    }
}

static void check_grad_add_case(gm_device *dev, gm_dtype dst, gm_dtype src, int kind, size_t numel,
                                const size_t skew[2], uintptr_t sum)
{
    const float divisor = numel % 3 == 0 ? 1.5f : 1;
    size_t dst_bytes = gm_dtype_bytes(dst), src_bytes = gm_dtype_bytes(src);
    twin d = twin_new(dev, numel * dst_bytes, skew[0] * dst_bytes);
    twin s = twin_new(dev, numel * src_bytes, skew[1] * src_bytes);
    fill(twin_host(&d), dst, numel, kind);
    fill(twin_host(&s), src, numel, kind);
    twin_send(dev, &d);
    twin_send(dev, &s);
    /* into nothing or into what is there, without and with the sum of squares of the results */
    for (int mode = 3; mode >= 0; mode--) {
        const bool accumulate = mode & 1, has_sum = mode & 2;
        gm_grad_add_args args = {twin_device(&d), twin_device(&s), dst,    src,
                                 numel,           accumulate,      divisor};
        CHECK_OK(dev->ops->fill(dev, sum, 0xff, sizeof(gm_sumsq), 0)); /* it is overwritten */
        CHECK_OK(dev->ops->grad_add(dev, &args, has_sum ? (gm_sumsq *)sum : NULL, 0));
        args.dst = twin_host(&d);
        args.src = twin_host(&s);
        gm_grad_add_host(&args, workers);
        twin_check(dev, &d, accumulate ? "grad_add: sum" : "grad_add: copy");
        if (has_sum) {
            gm_sumsq expected = {.n_inf = 0};
            gm_sumsq_host(twin_host(&d), dst, numel, &expected, workers);
            check_same_sum(dev, sum, &expected, "grad_add: sum of squares");
        }
    }
    twin_free(dev, &d);
    twin_free(dev, &s);
}

static void check_grad_add(gm_device *dev)
{
    static const size_t skews[][2] = {{0, 0}, {3, 3}, {0, 1}, {5, 2}, {8, 8}, {7, 0}};
    /* one block and several, whole tiles and parts, and more tiles than blocks */
    static const size_t lengths[] = {0, 1, 3, 8, 31, 2048, 4095, 4096, 4097, 8192, 20011, 49999};
    enum { N_SKEWS = sizeof skews / sizeof *skews, N_LENGTHS = sizeof lengths / sizeof *lengths };
    memory sum = memory_new(dev, sizeof(gm_sumsq));
    for (int dst = 0; dst < 3; dst++) {
        for (int src = 0; src < 3; src++) {
            const gm_dtype to = (gm_dtype)dst, from = (gm_dtype)src;
            for (int kind = 0; kind < N_KINDS; kind++) {
                check_grad_add_case(dev, to, from, kind, 20011, skews[kind % N_SKEWS], sum.addr);
            }
            for (size_t i = 0; i < N_LENGTHS; i++) {
                for (size_t s = 0; s < N_SKEWS; s += is_short ? 2 : 1) {
                    int kind = (int)(i + s) % N_KINDS;
                    check_grad_add_case(dev, to, from, kind, lengths[i], skews[s], sum.addr);
                }
            }
            if (!is_short) {
                check_grad_add_case(dev, to, from, 3, 5000011, skews[src % 2], sum.addr);
            }
        }
    }
    gm_grad_add_args args = {(void *)sum.addr, (void *)sum.addr, GM_F32, GM_F32, 1, false, 1};
    check_refused(dev->ops->grad_add(dev, &args, (gm_sumsq *)(sum.addr + 8), 0), GM_ERR_ARG,
                  "16-byte");
    memory_free(dev, &sum);
}

static void check_sumsq(gm_device *dev)
{
    memory sum = memory_new(dev, sizeof(gm_sumsq));
    for (int dtype = 0; dtype < 3; dtype++) {
        size_t bytes = gm_dtype_bytes((gm_dtype)dtype);
        for (int kind = 0; kind < N_KINDS; kind++) {
            static const size_t lengths[] = {0, 1, 7, 8, 31, 4097, 300007};
            gm_sumsq expected = {.n_inf = 0};
            CHECK_OK(dev->ops->fill(dev, sum.addr, 0, sizeof(gm_sumsq), 0));
            for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
                twin data = twin_new(dev, lengths[i] * bytes, (i * 3 % 11) * bytes);
                fill(twin_host(&data), (gm_dtype)dtype, lengths[i], kind);
                twin_send(dev, &data);
                CHECK_OK(dev->ops->sumsq(dev, twin_device(&data), (gm_dtype)dtype, lengths[i],
                                         (gm_sumsq *)sum.addr, 0));
                gm_sumsq_host(twin_host(&data), (gm_dtype)dtype, lengths[i], &expected, workers);
                check_same_sum(dev, sum.addr, &expected, "sumsq");
                twin_free(dev, &data);
            }
        }
    }
    check_refused(dev->ops->sumsq(dev, (void *)sum.addr, GM_F32, 1, (gm_sumsq *)(sum.addr + 8), 0),
                  GM_ERR_ARG, "16-byte");
    memory_free(dev, &sum);
}

/* The factor of a clip, of sums with all kinds of limbs; and Adam that reads it. */
static void check_clip(gm_device *dev)
{
    enum { MOST = 700 };
    static gm_sumsq sums[MOST];
    static const size_t counts[] = {0, 1, 2, 31, MOST};
    memory there = memory_new(dev, sizeof sums);
    memory out = memory_new(dev, sizeof(gm_sumsq));
    for (int kind = 0; kind < N_KINDS; kind++) {
        for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
            const size_t n = counts[c];
            gm_clip expected, found;
            float norm, shown;
            for (size_t i = 0; i < n; i++) {
                float values[64];
                memset(&sums[i], 0, sizeof sums[i]);
                fill(values, GM_F32, 64, kind);
                gm_sumsq_host(values, GM_F32, 64, &sums[i], NULL);
            }
            put(dev, there.addr, sums, sizeof sums);
            gm_clip_args args = {sums, n, 1.5, &expected, &norm, NULL};
            gm_clip_host(&args);
            args.sums = (const gm_sumsq *)there.addr;
            args.out = (gm_clip *)out.addr;
            args.norm = (float *)(out.addr + sizeof(gm_clip));
            CHECK_OK(dev->ops->clip(dev, &args, 0));
            get(dev, &found, out.addr, sizeof found);
            get(dev, &shown, out.addr + sizeof(gm_clip), sizeof shown);
            CHECK(isnan(expected.factor) ? isnan(found.factor) && isnan(found.scale)
                                         : memcmp(&found.factor, &expected.factor, 8) == 0 &&
                                               memcmp(&found.scale, &expected.scale, 4) == 0);
            CHECK(memcmp(&shown, &norm, sizeof norm) == 0);
            gm_sumsq total, total_found;
            gm_clip_host(&(gm_clip_args){.sums = sums, .n = n, .total = &total});
            args.total = (gm_sumsq *)out.addr;
            CHECK_OK(dev->ops->clip(dev, &args, 0));
            get(dev, &total_found, out.addr, sizeof total);
            CHECK(memcmp(&total_found, &total, sizeof total) == 0);
        }
    }
    memory_free(dev, &there);
    memory_free(dev, &out);
}

/* Long enough that every thread empties its band on the way, not only at the end. */
static void check_long_sumsq(gm_device *dev)
{
    const size_t part = 64 * MIB, n_parts = 84;
    uint16_t *host = malloc(part);
    CHECK(host);
    for (int dtype = GM_BF16; dtype <= GM_F16; dtype++) {
        memory data = memory_new(dev, part * n_parts);
        memory sum = memory_new(dev, sizeof(gm_sumsq));
        gm_sumsq one = {.n_inf = 0}, expected = {.n_inf = 0};
        for (size_t i = 0; i < part / 2; i++) {
            host[i] = (uint16_t)(0x3c00u + (unsigned)i * 2654435761u % 1021u);
        }
        gm_sumsq_host(host, (gm_dtype)dtype, part / 2, &one, workers);
        put(dev, data.addr, host, part);
        for (size_t i = 0; i < n_parts; i++) {
            gm_sumsq_merge(&expected, &one);
            if (i > 0) {
                CHECK_OK(dev->ops->copy_d2d(dev, data.addr + i * part, data.addr, part, 0));
            }
        }
        CHECK_OK(dev->ops->fill(dev, sum.addr, 0, sizeof(gm_sumsq), 0));
        CHECK_OK(dev->ops->sumsq(dev, (void *)data.addr, (gm_dtype)dtype, part * n_parts / 2,
                                 (gm_sumsq *)sum.addr, 0));
        check_same_sum(dev, sum.addr, &expected, "long sumsq");
        gm_grad_add_args add = {(void *)data.addr,
                                (void *)data.addr,
                                (gm_dtype)dtype,
                                (gm_dtype)dtype,
                                part * n_parts / 2,
                                false,
                                1};
        CHECK_OK(dev->ops->grad_add(dev, &add, (gm_sumsq *)sum.addr, 0));
        check_same_sum(dev, sum.addr, &expected, "long grad_add");
        memory_free(dev, &data);
        memory_free(dev, &sum);
    }
    free(host);
}

/* ---- host calls ---- */

/* Numbers that travel device -> host -> device on one stream; each visit to the host adds one. */
typedef struct chain {
    uint32_t *host;
    size_t n;
    uint32_t expected;
    atomic_size_t n_calls;
} chain;

static void add_one(void *context)
{
    chain *c = context;
    for (size_t i = 0; i < c->n; i++) {
        CHECK(c->host[i] == c->expected);
        c->host[i]++;
    }
    c->expected++;
    atomic_fetch_add(&c->n_calls, 1);
}

/* Three streams, each with a chain, and now and then one waits for another: copies and calls keep their
 * order though the host issues them without waiting. */
static void check_host_call_order(void)
{
    enum { N_STREAMS = 3, N = 4096 };
    const size_t n_visits = is_short ? 60 : 6000;
    gm_device *dev = NULL;
    gm_stream streams[N_STREAMS];
    gm_event event;
    memory device[N_STREAMS];
    chain chains[N_STREAMS];
    size_t visits[N_STREAMS] = {0};
    uint32_t *host = aligned_alloc(4096, N_STREAMS * N * 4);
    CHECK(host);
    memset(host, 0, N_STREAMS * N * 4);
    CHECK_OK(gm_device_cuda_new(0, 2 * MIB, &dev));
    const gm_device_ops *ops = dev->ops;
    CHECK_OK(ops->pin(dev, host, N_STREAMS * N * 4));
    CHECK_OK(ops->event_new(dev, false, &event));
    for (size_t i = 0; i < N_STREAMS; i++) {
        CHECK_OK(ops->stream_new(dev, &streams[i]));
        device[i] = memory_new(dev, N * 4);
        CHECK_OK(ops->fill(dev, device[i].addr, 0, N * 4, streams[i]));
        chains[i] = (chain){.host = host + i * N, .n = N};
    }
    for (size_t visit = 0; visit < n_visits; visit++) {
        uint64_t r = next_random(&seed);
        size_t i = r % N_STREAMS;
        chain *c = &chains[i];
        if ((r >> 8) % 4 == 0) {
            CHECK_OK(ops->event_record(dev, event, streams[(r >> 16) % N_STREAMS]));
            CHECK_OK(ops->event_wait(dev, event, streams[i]));
        }
        CHECK_OK(ops->copy_d2h(dev, c->host, device[i].addr, N * 4, streams[i]));
        CHECK_OK(ops->host_call(dev, add_one, c, streams[i]));
        CHECK_OK(ops->copy_h2d(dev, device[i].addr, c->host, N * 4, streams[i]));
        visits[i]++;
    }
    for (size_t i = 0; i < N_STREAMS; i++) {
        CHECK_OK(ops->stream_sync(dev, streams[i]));
        CHECK(atomic_load(&chains[i].n_calls) == visits[i]);
        memset(chains[i].host, 0xff, N * 4);
        get(dev, chains[i].host, device[i].addr, N * 4);
        for (size_t k = 0; k < N; k++) {
            CHECK(chains[i].host[k] == visits[i]);
        }
        ops->stream_free(dev, streams[i]);
        memory_free(dev, &device[i]);
    }
    ops->event_free(dev, event);
    ops->unpin(dev, host);
    ops->free(dev);
    free(host);
}

static void count_slowly(void *context)
{
    atomic_size_t *n = context;
    nap(*n == 0 ? 50000 : 100);
    atomic_fetch_add(n, 1);
}

/* Many calls, all outstanding behind a slow one; then the device goes. */
static void check_host_call_shutdown(void)
{
    const size_t n_calls = is_short ? 40 : 900;
    atomic_size_t n = 0;
    gm_device *dev = NULL;
    gm_stream stream;
    CHECK_OK(gm_device_cuda_new(0, 2 * MIB, &dev));
    CHECK_OK(dev->ops->stream_new(dev, &stream));
    for (size_t i = 0; i < n_calls; i++) {
        CHECK_OK(dev->ops->host_call(dev, count_slowly, &n, stream));
    }
    dev->ops->stream_free(dev, stream);
    dev->ops->free(dev);
    CHECK(atomic_load(&n) == n_calls);
}

static void sleep_20ms(void *context)
{
    (void)context;
    nap(20000);
}

static void check_elapsed(void)
{
    gm_device *dev = NULL;
    gm_stream stream;
    gm_event start, end, plain;
    double elapsed = 0;
    CHECK_OK(gm_device_cuda_new(0, 2 * MIB, &dev));
    const gm_device_ops *ops = dev->ops;
    CHECK_OK(ops->stream_new(dev, &stream));
    CHECK_OK(ops->event_new(dev, true, &start));
    CHECK_OK(ops->event_new(dev, true, &end));
    CHECK_OK(ops->event_new(dev, false, &plain));
    CHECK_OK(ops->event_record(dev, start, stream));
    check_refused(ops->event_elapsed(dev, start, end, &elapsed), GM_ERR_ARG, "event_elapsed");
    CHECK_OK(ops->host_call(dev, sleep_20ms, NULL, stream));
    CHECK_OK(ops->event_record(dev, end, stream));
    CHECK_OK(ops->event_record(dev, plain, stream));
    CHECK_OK(ops->event_elapsed(dev, start, end, &elapsed));
    CHECK(elapsed >= 0.02 && elapsed < 2);
    check_refused(ops->event_elapsed(dev, start, plain, &elapsed), GM_ERR_ARG, "event_elapsed");
    ops->event_free(dev, start);
    ops->event_free(dev, end);
    ops->event_free(dev, plain);
    ops->stream_free(dev, stream);
    ops->free(dev);
}

/* What ran before a host call failed: the call is dropped, nothing hangs, the device refuses to go on. */
static void fault(void)
{
    gm_device *dev = NULL;
    gm_stream stream;
    uintptr_t nowhere = 0;
    size_t a, b;
    atomic_size_t n = 0;
    alarm(60);
    CHECK_OK(gm_device_cuda_new(0, 2 * MIB, &dev));
    CHECK_OK(dev->ops->stream_new(dev, &stream));
    CHECK_OK(dev->ops->range_new(dev, 2 * MIB, &nowhere));
    CHECK_OK(dev->ops->host_call(dev, count_slowly, &n, stream));
    gm_grad_add_args args = {(void *)nowhere, (void *)nowhere, GM_F32, GM_F32, 999, true, 1};
    CHECK_OK(dev->ops->grad_add(dev, &args, NULL, stream));
    (void)dev->ops->host_call(dev, count_slowly, &n, stream); /* may already know */
    CHECK(dev->ops->stream_sync(dev, stream) == GM_ERR_DEVICE);
    CHECK(dev->ops->memory(dev, &a, &b) == GM_ERR_DEVICE);
    dev->ops->stream_free(dev, stream);
    dev->ops->range_free(dev, nowhere, 2 * MIB);
    dev->ops->free(dev);
    CHECK(atomic_load(&n) == 1);
}

/* In a process of its own: nothing of CUDA works there afterwards. */
static void check_fault(void)
{
    char program[4096];
    ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);
    CHECK(n > 0);
    program[n] = 0;
    pid_t child = fork();
    if (child == 0) {
        execl(program, program, "--fault", (char *)NULL);
        _exit(127);
    }
    int status = 0;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* ---- torch's allocator ---- */

typedef struct referee {
    atomic_bool is_alive;
    size_t limit;
    gm_device *dev;
    memory *spare;   /* given back when the device is full; NULL: nothing to give */
    uint32_t n_shed; /* how often that was asked */
} referee;

static bool referee_allows(void *context, size_t bytes, bool is_full)
{
    referee *r = context;
    CHECK(atomic_load(&r->is_alive)); /* never called after it was replaced */
    if (!is_full) {
        return gm_torch_alloc_bytes(0) + bytes <= r->limit;
    }
    r->n_shed++;
    if (!r->spare) {
        return false;
    }
    memory_free(r->dev, r->spare);
    r->spare = NULL;
    return true;
}

static atomic_bool stop_allocating;

static void *allocate_in_a_loop(void *unused)
{
    (void)unused;
    while (!atomic_load(&stop_allocating)) {
        void *p = gm_torch_alloc(2 * MIB, 0, NULL);
        if (p) {
            gm_torch_free(p, 2 * MIB, 0, NULL);
        }
    }
    return NULL;
}

/* The budget allows it, the device does not: the referee is asked once to give memory back. */
static void check_full_device(gm_device *dev)
{
    size_t free_bytes, total_bytes, refusals = gm_torch_alloc_refusals(0);
    const size_t spare_bytes = 64 * MIB;
    memory spare = memory_new(dev, spare_bytes);
    CHECK_OK(dev->ops->memory(dev, &free_bytes, &total_bytes));
    referee r = {.limit = SIZE_MAX, .dev = dev, .spare = &spare};
    atomic_store(&r.is_alive, true);
    gm_torch_alloc_set_reserve(0, referee_allows, &r);
    size_t wanted = (free_bytes / (2 * MIB) - 4) * 2 * MIB;
    void *most = gm_torch_alloc(wanted, 0, NULL);
    CHECK(most && r.n_shed == 0);
    void *more = gm_torch_alloc(spare_bytes, 0, NULL); /* fits only where the spare was */
    CHECK(more && r.n_shed == 1 && gm_torch_alloc_refusals(0) == refusals);
    CHECK(!gm_torch_alloc(spare_bytes, 0, NULL));
    CHECK(r.n_shed == 2 && gm_torch_alloc_refusals(0) == refusals + 1);
    gm_torch_free(more, spare_bytes, 0, NULL);
    gm_torch_free(most, wanted, 0, NULL);
    gm_torch_alloc_set_reserve(0, NULL, NULL);
    atomic_store(&r.is_alive, false);
    CHECK(gm_torch_alloc_bytes(0) == 0);
}

static void check_torch_alloc(gm_device *dev)
{
    referee a = {.limit = 6 * MIB}, b = {.limit = 0};
    atomic_store(&a.is_alive, true);
    atomic_store(&b.is_alive, true);
    CHECK(gm_torch_alloc_bytes(0) == 0 && gm_torch_alloc_bytes(-1) == 0);
    CHECK(!gm_torch_alloc(MIB, -1, NULL) && !gm_torch_alloc(MIB, 4096, NULL));
    gm_torch_alloc_set_reserve(0, referee_allows, &a);
    void *p = gm_torch_alloc(4 * MIB, 0, NULL);
    CHECK(p && gm_torch_alloc_bytes(0) == 4 * MIB);
    CHECK(!gm_torch_alloc(4 * MIB, 0, NULL) && gm_torch_alloc_bytes(0) == 4 * MIB);
    CHECK_OK(dev->ops->fill(dev, (uintptr_t)p, 3, 4 * MIB, 0));
    CHECK(all_bytes(dev, (uintptr_t)p, 4 * MIB, 3));
    gm_torch_free(p, 4 * MIB, 0, NULL);
    CHECK(gm_torch_alloc_bytes(0) == 0 && gm_torch_alloc_peak_bytes(0, true) == 4 * MIB);
    CHECK(gm_torch_alloc_peak_bytes(0, false) == 0);
    gm_torch_alloc_set_reserve(0, NULL, NULL);
    CHECK(!gm_torch_alloc((size_t)1 << 45, 0, NULL) && gm_torch_alloc_bytes(0) == 0);
    check_full_device(dev);
    pthread_t threads[2];
    for (size_t i = 0; i < 2; i++) {
        CHECK(pthread_create(&threads[i], NULL, allocate_in_a_loop, NULL) == 0);
    }
    for (int i = 0; i < (is_short ? 20 : 300); i++) {
        referee *now = i % 2 ? &a : &b, *before = i % 2 ? &b : &a;
        atomic_store(&now->is_alive, true);
        gm_torch_alloc_set_reserve(0, referee_allows, now);
        atomic_store(&before->is_alive, false);
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    }
    gm_torch_alloc_set_reserve(0, NULL, NULL);
    atomic_store(&a.is_alive, false);
    atomic_store(&b.is_alive, false);
    nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
    atomic_store(&stop_allocating, true);
    for (size_t i = 0; i < 2; i++) {
        pthread_join(threads[i], NULL);
    }
    CHECK(gm_torch_alloc_bytes(0) == 0);
}

int main(int argc, char **argv)
{
    gm_device *dev = NULL;
    setvbuf(stdout, NULL, _IOLBF, 0); /* a crash must not hide what passed */
    is_short = argc > 1 && strcmp(argv[1], "--short") == 0;
    if (argc > 1 && strcmp(argv[1], "--fault") == 0) {
        fault();
        return 0;
    }
    CHECK_OK(gm_workers_new(0, &workers));
    check_mapping_errors();
    puts("mapping errors: ok");
    check_poison();
    puts("poison: ok");
    check_threads();
    puts("threads: ok");
    check_aliasing_loses_nothing();
    puts("aliasing: ok");
    check_host_call_order();
    check_host_call_shutdown();
    if (!is_short) { /* a memory checker would report what is meant to fail */
        check_fault();
    }
    puts("host calls: ok");
    check_elapsed();
    puts("elapsed: ok");
    CHECK_OK(gm_device_cuda_new(0, 2 * MIB, &dev));
    check_adam(dev);
    puts("adam: ok");
    check_grad_add(dev);
    puts("grad_add: ok");
    check_sumsq(dev);
    puts("sumsq: ok");
    check_clip(dev);
    puts("clip: ok");
    check_torch_alloc(dev);
    puts("torch_alloc: ok");
    dev->ops->free(dev);
    if (!is_short) {
        CHECK_OK(gm_device_cuda_new(0, 64 * MIB, &dev));
        check_long_sumsq(dev);
        puts("long sumsq: ok");
        dev->ops->free(dev);
    }
    gm_workers_free(workers);
    return 0;
}
