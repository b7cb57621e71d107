/* gpu_device.c - the CUDA device and its kernels against the host: aliasing loses no word, poison
 * reads as NaN, wrong calls are refused by name, and Adam, gradient addition and the sum of squares
 * give the host's bits.  Needs a GPU.
 *
 *     gpu_device            the tests
 *     gpu_device --short    fewer visits and elements, for a memory checker
 *     gpu_device --rates    bytes per second of the kernels and of a copy */
#define _POSIX_C_SOURCE 200809L

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "arith.h"
#include "check.h"
#include "cuda_driver.h"
#include "device.h"
#include "format.h"
#include "torch_alloc.h"

#define MIB ((size_t)1 << 20)

static bool is_short;
static gm_workers *workers;
static uint64_t seed = 1;

/* ---- device memory for tests: a range with blocks of its own ---- */

typedef struct memory {
    uintptr_t addr;
    size_t bytes, n_blocks;
    gm_block *blocks;
} memory;

static memory memory_new(gm_device *dev, size_t bytes)
{
    memory m = {.bytes = gm_round_up(bytes ? bytes : 1, dev->block_bytes)};
    m.n_blocks = m.bytes / dev->block_bytes;
    m.blocks = calloc(m.n_blocks, sizeof *m.blocks);
    CHECK(m.blocks);
    CHECK_OK(dev->ops->range_new(dev, m.bytes, &m.addr));
    for (size_t i = 0; i < m.n_blocks; i++) {
        CHECK_OK(dev->ops->block_new(dev, &m.blocks[i]));
    }
    CHECK_OK(dev->ops->map(dev, m.addr, m.blocks, m.n_blocks));
    return m;
}

static void memory_free(gm_device *dev, memory *m)
{
    dev->ops->range_free(dev, m->addr, m->bytes);
    for (size_t i = 0; i < m->n_blocks; i++) {
        dev->ops->block_free(dev, m->blocks[i]);
    }
    free(m->blocks);
}

static void put(gm_device *dev, uintptr_t dst, const void *src, size_t bytes)
{
    CHECK_OK(dev->ops->copy_h2d(dev, dst, src, bytes, 0));
    CHECK_OK(dev->ops->stream_sync(dev, 0));
}

static void get(gm_device *dev, void *dst, uintptr_t src, size_t bytes)
{
    CHECK_OK(dev->ops->copy_d2h(dev, dst, src, bytes, 0));
    CHECK_OK(dev->ops->stream_sync(dev, 0));
}

/* ---- values: every kind that arithmetic could treat differently ---- */

enum { N_KINDS = 8 };

static uint32_t special_bits(uint64_t random)
{
    static const uint32_t bits[] = {
        0,          0x80000000, 1,          0x807fffff, 0x00800000, 0x7f800000,
        0xff800000, 0x7fc00001, 0xff923456, 0x7f7fffff, 0x3f800000, 0x3f80ffff,
        0x33000000, 0x33000001, 0x477fefff, 0x477ff000, 0x38800000, 0x387fffff,
    };
    return bits[random % (sizeof bits / sizeof *bits)];
}

/* A sum of uniform numbers: bell-shaped, as gradients and weights are. */
static float bell(uint64_t random)
{
    double sum = 0;
    for (int i = 0; i < 4; i++) {
        sum += (double)((random >> (16 * i)) & 0xffff) / 65536.0 - 0.5;
    }
    return (float)sum;
}

static uint32_t value_bits(int kind)
{
    uint64_t r = next_random(&seed);
    uint32_t low = (uint32_t)r;
    switch (kind) {
    case 0: return low; /* any bits */
    case 1: return gm_f32_bits(bell(r));
    case 2: return gm_f32_bits(bell(r) * 1e-4f);
    case 3: return r >> 61 ? gm_f32_bits(bell(r)) : special_bits(low);
    case 4: return r >> 62 ? 0 : gm_f32_bits(bell(r));                         /* mostly zeros */
    case 5: return low & 0x807fffffu;                                          /* denormals */
    case 6: return (low & 0x807fffffu) | (uint32_t)(r >> 63 ? 20 : 200) << 23; /* two scales */
    default:
        return (low & 0x807fffffu) | (uint32_t)((r >> 40) % 255) << 23; /* every finite scale */
    }
}

static void fill(void *data, gm_dtype dtype, size_t numel, int kind)
{
    for (size_t i = 0; i < numel; i++) {
        uint32_t bits = value_bits(kind);
        if (dtype == GM_F32) {
            ((uint32_t *)data)[i] = bits;
        } else if (dtype == GM_BF16) {
            ((uint16_t *)data)[i] = (uint16_t)(bits >> 16);
        } else {
            ((uint16_t *)data)[i] = kind == 0 ? (uint16_t)bits : gm_bits_to_f16(bits);
        }
    }
}

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
    CHECK_OK(ops->event_new(dev, &fetched));
    CHECK_OK(ops->event_new(dev, &computed));
    CHECK_OK(ops->range_new(dev, N_CHUNKS * chunk_bytes, &chunks));
    for (size_t s = 0; s < N_SLOTS; s++) {
        CHECK_OK(ops->event_new(dev, &slot_free[s]));
        for (size_t b = 0; b < BLOCKS; b++) {
            CHECK_OK(ops->block_new(dev, &blocks[s][b]));
        }
    }
    for (size_t c = 0; c < N_CHUNKS; c++) {
        CHECK_OK(ops->event_new(dev, &home_current[c]));
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
        gm_grad_add_args add = {(void *)addr, (const void *)steps.addr, GM_F32, GM_F32, n, true};
        CHECK_OK(ops->grad_add(dev, &add, compute));
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

static gm_adam_scalars some_scalars(bool adamw, int64_t step)
{
    gm_adam_hyper hyper = {.lr = 1e-3,
                           .beta1 = 0.9,
                           .beta2 = 0.999,
                           .eps = step % 2 ? 1e-8 : 0.0,
                           .weight_decay = 0.1,
                           .step = step,
                           .adamw = adamw,
                           .bias_correction = step % 3 != 0,
                           .grad_divisor = step % 5 ? 1.0 : 1024.0,
                           .clip_factor = step % 7 ? 1.0 : 0.37};
    gm_adam_scalars scalars;
    CHECK_OK(gm_adam_scalars_init(&hyper, &scalars));
    return scalars;
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
    CHECK_OK(dev->ops->adam(dev, &args, 0));
    memset(used, 0xff, sizeof used);
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

static void check_grad_add(gm_device *dev)
{
    static const size_t skews[][2] = {{0, 0}, {3, 3}, {0, 1}, {5, 2}};
    for (int dst = 0; dst < 3; dst++) {
        for (int src = 0; src < 3; src++) {
            for (int kind = 0; kind < N_KINDS; kind++) {
                const size_t *skew = skews[kind % 4];
                size_t numel = kind == 7 ? 3 : 20011;
                size_t dst_bytes = gm_dtype_bytes((gm_dtype)dst);
                size_t src_bytes = gm_dtype_bytes((gm_dtype)src);
                twin d = twin_new(dev, numel * dst_bytes, skew[0] * dst_bytes);
                twin s = twin_new(dev, numel * src_bytes, skew[1] * src_bytes);
                fill(twin_host(&d), (gm_dtype)dst, numel, kind);
                fill(twin_host(&s), (gm_dtype)src, numel, kind);
                twin_send(dev, &d);
                twin_send(dev, &s);
                for (int accumulate = 1; accumulate >= 0; accumulate--) {
                    gm_grad_add_args args = {twin_device(&d), twin_device(&s), (gm_dtype)dst,
                                             (gm_dtype)src,   numel,           accumulate != 0};
                    CHECK_OK(dev->ops->grad_add(dev, &args, 0));
                    args.dst = twin_host(&d);
                    args.src = twin_host(&s);
                    gm_grad_add_host(&args, workers);
                    twin_check(dev, &d, accumulate ? "grad_add: sum" : "grad_add: copy");
                }
                twin_free(dev, &d);
                twin_free(dev, &s);
            }
        }
    }
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

/* Long enough that every thread empties its window on the way, not only at the end. */
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
        memory_free(dev, &data);
        memory_free(dev, &sum);
    }
    free(host);
}

/* ---- torch's allocator ---- */

typedef struct referee {
    atomic_bool is_alive;
    size_t limit;
} referee;

static bool referee_allows(void *context, size_t bytes)
{
    referee *r = context;
    CHECK(atomic_load(&r->is_alive)); /* never called after it was replaced */
    return gm_torch_alloc_bytes(0) + bytes <= r->limit;
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

/* ---- rates ---- */

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

typedef void (*rate_fn)(gm_device *dev, void *context);

static void print_rate(gm_device *dev, const char *name, double bytes, rate_fn fn, void *context)
{
    enum { REPEATS = 10, ROUNDS = 5 };
    double best = 0;
    fn(dev, context);
    CHECK_OK(dev->ops->stream_sync(dev, 0));
    for (int round = 0; round < ROUNDS; round++) {
        double begin = seconds();
        for (int i = 0; i < REPEATS; i++) {
            fn(dev, context);
        }
        CHECK_OK(dev->ops->stream_sync(dev, 0));
        double rate = REPEATS * bytes / (seconds() - begin);
        best = rate > best ? rate : best;
    }
    printf("%-28s %6.3f TB/s\n", name, best * 1e-12);
}

static void run_adam(gm_device *dev, void *context)
{
    CHECK_OK(dev->ops->adam(dev, context, 0));
}

static void run_grad_add(gm_device *dev, void *context)
{
    CHECK_OK(dev->ops->grad_add(dev, context, 0));
}

typedef struct sumsq_call {
    const void *data;
    gm_dtype dtype;
    size_t numel;
    gm_sumsq *sum;
} sumsq_call;

static void run_sumsq(gm_device *dev, void *context)
{
    sumsq_call *call = context;
    CHECK_OK(dev->ops->sumsq(dev, call->data, call->dtype, call->numel, call->sum, 0));
}

typedef struct copy_call {
    uintptr_t dst, src;
    size_t bytes;
} copy_call;

static void run_copy(gm_device *dev, void *context)
{
    copy_call *call = context;
    CHECK_OK(dev->ops->copy_d2d(dev, call->dst, call->src, call->bytes, 0));
}

/* Fills device memory with bell-shaped numbers: a pattern of 64 MiB, again and again. */
static void fill_device(gm_device *dev, uintptr_t addr, size_t bytes, gm_dtype dtype, bool positive)
{
    const size_t part = 64 * MIB;
    uint8_t *host = malloc(part);
    CHECK(host);
    fill(host, dtype, part / gm_dtype_bytes(dtype), 1);
    size_t width = gm_dtype_bytes(dtype);
    for (size_t i = width - 1; positive && i < part; i += width) {
        host[i] &= 0x7f;
    }
    for (size_t at = 0; at < bytes; at += part) {
        put(dev, addr + at, host, bytes - at < part ? bytes - at : part);
    }
    free(host);
}

static void rates(gm_device *dev)
{
    const size_t n = (size_t)256 << 20;
    memory weight = memory_new(dev, 4 * n), low = memory_new(dev, 4 * n);
    memory m = memory_new(dev, 4 * n), v = memory_new(dev, 4 * n), grad = memory_new(dev, 4 * n);
    memory sum = memory_new(dev, sizeof(gm_sumsq));
    copy_call copy = {m.addr, v.addr, 4 * n};
    print_rate(dev, "copy on the device", 8.0 * (double)n, run_copy, &copy);
    enum { MANY = 256 };
    gm_adam_range ranges[MANY];
    for (size_t i = 0; i < MANY; i++) {
        ranges[i] = (gm_adam_range){i * (n / MANY), (i + 1) * (n / MANY), some_scalars(true, 5)};
    }
    gm_adam_range whole = {0, n, some_scalars(true, 5)};
    static const struct {
        const char *name;
        gm_dtype format;
        double bytes;
    } formats[] = {{"bf16", GM_BF16, 26}, {"f32", GM_F32, 28}, {"f16", GM_F16, 28}};
    for (size_t i = 0; i < 3; i++) {
        gm_dtype format = formats[i].format;
        char name[64];
        fill_device(dev, weight.addr, n * gm_dtype_bytes(format), format, false);
        fill_device(dev, low.addr, n * (format == GM_F16 ? 4 : 2),
                    format == GM_F16 ? GM_F32 : GM_BF16, false);
        fill_device(dev, m.addr, 4 * n, GM_F32, false);
        fill_device(dev, v.addr, 4 * n, GM_F32, true);
        fill_device(dev, grad.addr, n * gm_dtype_bytes(format), format, false);
        gm_adam_args args = {.format = format,
                             .grad_dtype = format,
                             .weight = (void *)weight.addr,
                             .low = (void *)low.addr,
                             .m = (void *)m.addr,
                             .v = (void *)v.addr,
                             .grad = (const void *)grad.addr,
                             .ranges = &whole,
                             .n_ranges = 1};
        snprintf(name, sizeof name, "adam %s, one range", formats[i].name);
        print_rate(dev, name, formats[i].bytes * (double)n, run_adam, &args);
        args.ranges = ranges;
        args.n_ranges = MANY;
        snprintf(name, sizeof name, "adam %s, %d ranges", formats[i].name, MANY);
        print_rate(dev, name, formats[i].bytes * (double)n, run_adam, &args);
        sumsq_call sumsq = {(const void *)grad.addr, format, n, (gm_sumsq *)sum.addr};
        snprintf(name, sizeof name, "sumsq %s", formats[i].name);
        print_rate(dev, name, (double)(n * gm_dtype_bytes(format)), run_sumsq, &sumsq);
        gm_grad_add_args add = {
            (void *)weight.addr, (const void *)grad.addr, format, format, n, true};
        snprintf(name, sizeof name, "grad_add %s", formats[i].name);
        print_rate(dev, name, (double)(3 * n * gm_dtype_bytes(format)), run_grad_add, &add);
    }
    memory *all[] = {&weight, &low, &m, &v, &grad, &sum};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        memory_free(dev, all[i]);
    }
}

int main(int argc, char **argv)
{
    gm_device *dev = NULL;
    bool wants_rates = argc > 1 && strcmp(argv[1], "--rates") == 0;
    setvbuf(stdout, NULL, _IOLBF, 0); /* a crash must not hide what passed */
    is_short = argc > 1 && strcmp(argv[1], "--short") == 0;
    CHECK_OK(gm_workers_new(0, &workers));
    if (wants_rates) {
        CHECK_OK(gm_device_cuda_new(0, 64 * MIB, &dev));
        rates(dev);
        dev->ops->free(dev);
        gm_workers_free(workers);
        return 0;
    }
    check_mapping_errors();
    puts("mapping errors: ok");
    check_poison();
    puts("poison: ok");
    check_threads();
    puts("threads: ok");
    check_aliasing_loses_nothing();
    puts("aliasing: ok");
    CHECK_OK(gm_device_cuda_new(0, 2 * MIB, &dev));
    check_adam(dev);
    puts("adam: ok");
    check_grad_add(dev);
    puts("grad_add: ok");
    check_sumsq(dev);
    puts("sumsq: ok");
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
