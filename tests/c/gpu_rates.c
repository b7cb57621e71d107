/* gpu_rates.c - what the GPU, its kernels and the calls to it cost, and the rates of the machine (gm_rates_measure).
 * Prints; checks only that everything works.  Needs a GPU. */
#define _POSIX_C_SOURCE 200809L

#include <string.h>

#include "device/cuda/driver.h"
#include "gpu_check.h"
#include "engine/engine.h"

static gm_workers *workers;

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

typedef struct grad_add_call {
    gm_grad_add_args args;
    gm_sumsq *sum;
} grad_add_call;

static void run_grad_add(gm_device *dev, void *context)
{
    grad_add_call *call = context;
    CHECK_OK(dev->ops->grad_add(dev, &call->args, call->sum, 0));
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
        for (int mode = 0; mode < 4; mode++) {
            const bool accumulate = mode & 1, has_sum = mode & 2;
            grad_add_call add = {
                {(void *)weight.addr, (const void *)grad.addr, format, format, n, accumulate, 1},
                has_sum ? (gm_sumsq *)sum.addr : NULL};
            snprintf(name, sizeof name, "grad_%s %s%s", accumulate ? "add" : "copy",
                     formats[i].name, has_sum ? ", with sum" : "");
            double passes = accumulate ? 3 : 2;
            print_rate(dev, name, passes * (double)(n * gm_dtype_bytes(format)), run_grad_add,
                       &add);
        }
    }
    memory *all[] = {&weight, &low, &m, &v, &grad, &sum};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        memory_free(dev, all[i]);
    }
}

static void do_nothing(void *context)
{
    (void)context;
}

static void sleep_30ms(void *context)
{
    (void)context;
    nap(30000);
}

static void print_cost(const char *name, double begin, double n)
{
    printf("%-28s %6.2f us\n", name, (seconds() - begin) / n * 1e6);
}

/* What calls cost the host, with our context current and without; and a stream's way through the host. */
static void costs(void)
{
    enum { N = 2000 };
    gm_device *dev = NULL;
    gm_stream streams[2];
    gm_event event;
    const gm_cuda_api *api = NULL;
    CUcontext context;
    CUdevice device;
    CHECK_OK(gm_cuda(&api));
    CHECK_OK(gm_device_cuda_new(0, 2 * MIB, &dev));
    const gm_device_ops *ops = dev->ops;
    CHECK_OK(ops->stream_new(dev, &streams[0]));
    CHECK_OK(ops->stream_new(dev, &streams[1]));
    CHECK_OK(ops->event_new(dev, false, &event));
    CHECK(api->cuDeviceGet(&device, 0) == CUDA_SUCCESS);
    CHECK(api->cuDevicePrimaryCtxRetain(&context, device) == CUDA_SUCCESS);
    for (int is_current = 0; is_current < 2; is_current++) {
        CHECK(api->cuCtxSetCurrent(is_current ? context : NULL) == CUDA_SUCCESS);
        CHECK_OK(ops->event_record(dev, event, streams[0]));
        double begin = seconds();
        for (int i = 0; i < N; i++) {
            CHECK_OK(ops->event_record(dev, event, streams[0]));
        }
        print_cost(is_current ? "record, context current" : "record, context pushed", begin, N);
        begin = seconds();
        for (int i = 0; i < N; i++) {
            CHECK_OK(ops->event_wait(dev, event, streams[1]));
        }
        print_cost(is_current ? "wait, context current" : "wait, context pushed", begin, N);
    }
    double worst = 0, sum = 0;
    for (int i = 0; i < 200; i++) {
        double begin = seconds();
        CHECK_OK(ops->host_call(dev, do_nothing, NULL, streams[0]));
        CHECK_OK(ops->stream_sync(dev, streams[0]));
        double took = seconds() - begin;
        sum += i > 9 ? took : 0;
        worst = i > 9 && took > worst ? took : worst;
    }
    printf("host call                    %6.2f us and back, worst %.2f us\n", sum / 190 * 1e6,
           worst * 1e6);
    /* as in a step: calls pile up behind one that takes its time */
    static const int piles[] = {1, 8, 64, 512};
    for (size_t p = 0; p < sizeof piles / sizeof *piles; p++) {
        CHECK_OK(ops->host_call(dev, sleep_30ms, NULL, streams[0]));
        nap(1000);
        double begin = seconds();
        for (int i = 0; i < piles[p]; i++) {
            CHECK_OK(ops->host_call(dev, do_nothing, NULL, streams[0]));
        }
        printf("host call, to issue %-4d     %6.2f us\n", piles[p],
               (seconds() - begin) / piles[p] * 1e6);
        CHECK_OK(ops->stream_sync(dev, streams[0]));
    }
    /* does a call that takes its time delay other streams? */
    const size_t bytes = 32 * MIB;
    uint8_t *host = aligned_alloc(4096, bytes);
    CHECK(host);
    memset(host, 0, bytes);
    CHECK_OK(ops->pin(dev, host, bytes));
    memory device_memory = memory_new(dev, bytes);
    CHECK_OK(ops->copy_h2d(dev, device_memory.addr, host, bytes, streams[1]));
    CHECK_OK(ops->stream_sync(dev, streams[1]));
    for (int is_busy = 0; is_busy < 2; is_busy++) {
        if (is_busy) {
            CHECK_OK(ops->host_call(dev, sleep_30ms, NULL, streams[0]));
            nap(1000);
        }
        double begin = seconds();
        CHECK_OK(ops->copy_h2d(dev, device_memory.addr, host, bytes, streams[1]));
        CHECK_OK(ops->event_record(dev, event, streams[1]));
        double issued = seconds();
        CHECK_OK(ops->stream_sync(dev, streams[1]));
        printf("32 MiB %-16s      %6.2f us to issue, %.2f us in all\n",
               is_busy ? "beside a call" : "alone", (issued - begin) * 1e6,
               (seconds() - begin) * 1e6);
        CHECK_OK(ops->stream_sync(dev, streams[0]));
    }
    ops->unpin(dev, host);
    free(host);
    memory_free(dev, &device_memory);
    double begin = seconds();
    for (int i = 0; i < N; i++) {
        CHECK_OK(ops->host_call(dev, do_nothing, NULL, streams[0]));
    }
    CHECK_OK(ops->stream_sync(dev, streams[0]));
    print_cost("host call, in a row", begin, N);
    CHECK(api->cuCtxSetCurrent(NULL) == CUDA_SUCCESS);
    CHECK(api->cuDevicePrimaryCtxRelease(device) == CUDA_SUCCESS);
    ops->event_free(dev, event);
    ops->stream_free(dev, streams[0]);
    ops->stream_free(dev, streams[1]);
    ops->free(dev);
}

static void machine(void)
{
    gm_device *dev = NULL;
    gm_rates r;
    double begin = seconds();
    CHECK_OK(gm_device_cuda_new(0, 32 * MIB, &dev));
    double opened = seconds();
    CHECK_OK(gm_rates_measure(dev, workers, &r));
    printf("rates: device opened in %.3f s, measured in %.3f s with %u threads\n", opened - begin,
           seconds() - opened, gm_workers_count(workers));
    printf("  GB/s in %.1f out %.1f, both ways %.1f + %.1f, beside host Adam %.1f + %.1f\n",
           r.h2d * 1e-9, r.d2h * 1e-9, r.h2d_both * 1e-9, r.d2h_both * 1e-9, r.h2d_beside * 1e-9,
           r.d2h_beside * 1e-9);
    printf("  G parameters/s: host %.2f, beside copies %.2f, device %.1f\n", r.host_adam * 1e-9,
           r.host_adam_beside * 1e-9, r.device_adam * 1e-9);
    dev->ops->free(dev);
}

int main(void)
{
    gm_device *dev = NULL;
    setvbuf(stdout, NULL, _IOLBF, 0);
    CHECK_OK(gm_workers_new(0, &workers));
    costs();
    machine();
    machine();
    CHECK_OK(gm_device_cuda_new(0, 64 * MIB, &dev));
    rates(dev);
    dev->ops->free(dev);
    gm_workers_free(workers);
    return 0;
}
