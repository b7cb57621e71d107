/* test_rates.c - measured rates are those of the device: exactly, on a device whose clock is made up; what
 * was taken is given back, whichever call fails; little memory is enough. */
#define _POSIX_C_SOURCE 200809L
#include "engine/engine.h"

#include <math.h>
#include <string.h>

#include "check.h"

#define MIB ((size_t)1 << 20)

/* ---- a device with a clock of its own: each stream copies at its rate, nothing is moved ---- */

#define IN_RATE   55e9
#define OUT_RATE  44e9
#define ADAM_RATE 145e9

enum { IN = 1, OUT = 2, MOST_EVENTS = 4096 };

typedef enum call {
    BLOCK_NEW,
    RANGE_NEW,
    MAP,
    STREAM_NEW,
    STREAM_SYNC,
    EVENT_NEW,
    RECORD,
    EVENT_SYNC,
    ELAPSED,
    H2D,
    D2H,
    FILL,
    ADAM,
    PIN,
    N_CALLS
} call;

typedef struct fake {
    gm_device base;
    double clock[3];           /* of a stream: when its work ends */
    double event[MOST_EVENTS]; /* index is the event's number */
    uint64_t n_events;
    int n_streams;
    int alive[N_CALLS]; /* blocks, ranges, streams, events, pins: made and not yet freed */
    int count[N_CALLS];
    call failing; /* the call that fails at its `fails_at`th time; N_CALLS: none */
    int fails_at;
    gm_status failure;
    int most_blocks;
    size_t most_pinned, pinned;
} fake;

static fake *as_fake(gm_device *dev)
{
    return (fake *)dev;
}

static gm_status enter(gm_device *dev, call which)
{
    fake *f = as_fake(dev);
    if (++f->count[which] == f->fails_at && which == f->failing) {
        return GM_FAIL(f->failure, "the test's failure");
    }
    return GM_OK;
}

static gm_status fake_block_new(gm_device *dev, gm_block *out)
{
    fake *f = as_fake(dev);
    GM_TRY(enter(dev, BLOCK_NEW));
    if (f->alive[BLOCK_NEW] == f->most_blocks) {
        return GM_FAIL(GM_ERR_NOMEM, "full");
    }
    f->alive[BLOCK_NEW]++;
    *out = 1;
    return GM_OK;
}

static void fake_block_free(gm_device *dev, gm_block block)
{
    CHECK(block == 1 && as_fake(dev)->alive[RANGE_NEW] == 0);
    as_fake(dev)->alive[BLOCK_NEW]--;
}

static gm_status fake_range_new(gm_device *dev, size_t bytes, uintptr_t *out)
{
    GM_TRY(enter(dev, RANGE_NEW));
    CHECK(bytes > 0 && bytes % dev->block_bytes == 0 && bytes <= 256 * MIB);
    as_fake(dev)->alive[RANGE_NEW]++;
    *out = 1 << 20;
    return GM_OK;
}

static void fake_range_free(gm_device *dev, uintptr_t addr, size_t bytes)
{
    CHECK(addr == 1 << 20 && bytes > 0);
    as_fake(dev)->alive[RANGE_NEW]--;
}

static gm_status fake_map(gm_device *dev, uintptr_t addr, const gm_block *blocks, size_t n)
{
    CHECK(addr == 1 << 20 && blocks && n == (size_t)as_fake(dev)->alive[BLOCK_NEW]);
    return enter(dev, MAP);
}

static gm_status fake_stream_new(gm_device *dev, gm_stream *out)
{
    GM_TRY(enter(dev, STREAM_NEW));
    as_fake(dev)->alive[STREAM_NEW]++;
    *out = (gm_stream)++as_fake(dev)->n_streams;
    return GM_OK;
}

static void fake_stream_free(gm_device *dev, gm_stream stream)
{
    CHECK(stream == IN || stream == OUT);
    as_fake(dev)->alive[STREAM_NEW]--;
}

static gm_status fake_stream_sync(gm_device *dev, gm_stream stream)
{
    CHECK(stream <= OUT);
    return enter(dev, STREAM_SYNC);
}

static gm_status fake_event_new(gm_device *dev, bool is_timed, gm_event *out)
{
    CHECK(is_timed);
    GM_TRY(enter(dev, EVENT_NEW));
    as_fake(dev)->alive[EVENT_NEW]++;
    *out = ++as_fake(dev)->n_events;
    CHECK(*out < MOST_EVENTS);
    return GM_OK;
}

static void fake_event_free(gm_device *dev, gm_event event)
{
    CHECK(event > 0);
    as_fake(dev)->alive[EVENT_NEW]--;
}

static gm_status fake_event_record(gm_device *dev, gm_event event, gm_stream stream)
{
    as_fake(dev)->event[event] = as_fake(dev)->clock[stream];
    return enter(dev, RECORD);
}

/* The host has waited: no stream is behind this. */
static gm_status fake_event_sync(gm_device *dev, gm_event event)
{
    for (int i = 0; i < 3; i++) {
        as_fake(dev)->clock[i] = fmax(as_fake(dev)->clock[i], as_fake(dev)->event[event]);
    }
    return enter(dev, EVENT_SYNC);
}

static gm_status fake_event_elapsed(gm_device *dev, gm_event start, gm_event end, double *seconds)
{
    *seconds = as_fake(dev)->event[end] - as_fake(dev)->event[start];
    GM_TRY(fake_event_sync(dev, end));
    return enter(dev, ELAPSED);
}

static void check_inside(gm_device *dev, uintptr_t addr, size_t bytes)
{
    size_t in_all = (size_t)as_fake(dev)->alive[BLOCK_NEW] * dev->block_bytes;
    CHECK(bytes > 0 && addr >= 1 << 20 && addr + bytes <= (1 << 20) + in_all);
}

static gm_status fake_h2d(gm_device *dev, uintptr_t dst, const void *src, size_t bytes, gm_stream s)
{
    CHECK(s == IN && src);
    check_inside(dev, dst, bytes);
    as_fake(dev)->clock[s] += (double)bytes / IN_RATE;
    return enter(dev, H2D);
}

static gm_status fake_d2h(gm_device *dev, void *dst, uintptr_t src, size_t bytes, gm_stream s)
{
    CHECK(s == OUT);
    check_inside(dev, src, bytes);
    memset(dst, 0x3c, 1); /* the ends of what would be written are ours */
    memset((uint8_t *)dst + bytes - 1, 0x3c, 1);
    as_fake(dev)->clock[s] += (double)bytes / OUT_RATE;
    return enter(dev, D2H);
}

static gm_status fake_fill(gm_device *dev, uintptr_t dst, uint8_t byte, size_t bytes, gm_stream s)
{
    (void)byte;
    CHECK(s <= OUT);
    check_inside(dev, dst, bytes);
    return enter(dev, FILL);
}

static gm_status fake_adam(gm_device *dev, const gm_adam_args *args, gm_stream s)
{
    CHECK(args->n_ranges == 1 && args->ranges[0].begin == 0 && args->ranges[0].end > 0);
    const size_t n = args->ranges[0].end;
    check_inside(dev, (uintptr_t)args->m, 4 * n);
    check_inside(dev, (uintptr_t)args->v, 4 * n);
    check_inside(dev, (uintptr_t)args->weight, 2 * n);
    check_inside(dev, (uintptr_t)args->low, 2 * n);
    check_inside(dev, (uintptr_t)args->grad, 2 * n);
    as_fake(dev)->clock[s] += (double)n / ADAM_RATE;
    return enter(dev, ADAM);
}

static gm_status fake_pin(gm_device *dev, void *base, size_t bytes)
{
    CHECK(base && bytes <= 512 * MIB);
    GM_TRY(enter(dev, PIN));
    if (bytes > as_fake(dev)->most_pinned) {
        return GM_FAIL(GM_ERR_NOMEM, "the limit on locked memory");
    }
    as_fake(dev)->alive[PIN]++;
    as_fake(dev)->pinned = bytes;
    return GM_OK;
}

static void fake_unpin(gm_device *dev, void *base)
{
    CHECK(base);
    as_fake(dev)->alive[PIN]--;
}

static const gm_device_ops fake_ops = {
    .name = "fake",
    .range_new = fake_range_new,
    .range_free = fake_range_free,
    .block_new = fake_block_new,
    .block_free = fake_block_free,
    .map = fake_map,
    .stream_new = fake_stream_new,
    .stream_free = fake_stream_free,
    .stream_sync = fake_stream_sync,
    .event_new = fake_event_new,
    .event_free = fake_event_free,
    .event_record = fake_event_record,
    .event_sync = fake_event_sync,
    .event_elapsed = fake_event_elapsed,
    .copy_h2d = fake_h2d,
    .copy_d2h = fake_d2h,
    .fill = fake_fill,
    .adam = fake_adam,
    .pin = fake_pin,
    .unpin = fake_unpin,
};

static fake fake_new(size_t block_bytes)
{
    return (fake){
        .base = {.ops = &fake_ops, .granularity = 4096, .block_bytes = block_bytes},
        .failing = N_CALLS,
        .failure = GM_ERR_DEVICE,
        .most_blocks = 1 << 20,
        .most_pinned = 512 * MIB,
    };
}

static void check_all_given_back(const fake *f)
{
    for (int i = 0; i < N_CALLS; i++) {
        CHECK(f->alive[i] == 0);
    }
}

/* ---- what is expected ---- */

static gm_workers *workers;

static void check_near(double value, double expected)
{
    CHECK(fabs(value / expected - 1) < 1e-6);
}

static void check_positive(const gm_rates *r)
{
    const double all[] = {r->h2d,        r->d2h,        r->h2d_both,   r->d2h_both,
                          r->host_adam,  r->h2d_beside, r->d2h_beside, r->host_adam_beside,
                          r->device_adam};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        CHECK(all[i] > 0 && isfinite(all[i]));
    }
    CHECK(r->h2d_both <= r->h2d && r->h2d_beside <= r->h2d_both);
    CHECK(r->d2h_both <= r->d2h && r->d2h_beside <= r->d2h_both);
    CHECK(r->host_adam_beside <= r->host_adam);
}

/* The test's device is a clock, so all but the host's Adam is known beforehand. */
static void check_figures(size_t block_bytes, int most_blocks, size_t most_pinned)
{
    gm_rates r;
    fake f = fake_new(block_bytes);
    f.most_blocks = most_blocks;
    f.most_pinned = most_pinned;
    CHECK_OK(gm_rates_measure(&f.base, workers, &r));
    check_all_given_back(&f);
    CHECK(f.pinned <= most_pinned);
    check_positive(&r);
    check_near(r.h2d, IN_RATE);
    check_near(r.d2h, OUT_RATE);
    check_near(r.h2d_both, IN_RATE);
    check_near(r.d2h_both, OUT_RATE);
    check_near(r.device_adam, ADAM_RATE);
    if (f.pinned >= 256 * MIB &&
        block_bytes >= 32 * MIB) { /* pieces long enough for a row of 60 ms */
        check_near(r.h2d_beside, IN_RATE);
        check_near(r.d2h_beside, OUT_RATE);
    }
}

static void check_failures_leave_nothing(void)
{
    for (int which = 0; which < N_CALLS; which++) {
        gm_rates r = {.h2d = 1};
        fake f = fake_new(32 * MIB);
        f.failing = (call)which;
        f.fails_at = which == BLOCK_NEW || which == PIN || which == MAP || which == RANGE_NEW ? 1
                     : which == STREAM_NEW || which == FILL                                   ? 2
                                                                                              : 3;
        if (which == STREAM_SYNC) {
            f.fails_at = 1; /* later ones are part of giving back */
        }
        CHECK(gm_rates_measure(&f.base, workers, &r) == GM_ERR_DEVICE);
        CHECK(strstr(gm_last_error(), "the test's failure"));
        CHECK(r.h2d == 0);
        check_all_given_back(&f);
    }
    gm_rates r;
    fake f = fake_new(32 * MIB);
    f.most_blocks = 0;
    CHECK(gm_rates_measure(&f.base, workers, &r) == GM_ERR_NOMEM);
    check_all_given_back(&f);
    f = fake_new(32 * MIB);
    f.most_pinned = MIB;
    CHECK(gm_rates_measure(&f.base, workers, &r) == GM_ERR_NOMEM);
    check_all_given_back(&f);
}

static void check_host_device(void)
{
    gm_device *dev = NULL;
    gm_rates r;
    CHECK_OK(gm_device_host_new(4 * MIB, workers, &dev));
    CHECK_OK(gm_rates_measure(dev, workers, &r));
    check_positive(&r);
    CHECK(r.h2d > 1e8 && r.h2d < 1e13 && r.host_adam > 1e5 && r.host_adam < 1e12);
    dev->ops->free(dev);
}

int main(void)
{
    CHECK_OK(gm_workers_new(0, &workers));
    check_figures(32 * MIB, 1 << 20, 512 * MIB);
    check_figures(2 * MIB, 1, 64 * MIB); /* one small block, little memory that may be locked */
    check_figures(4096, 1, 16 * MIB);
    check_figures(1024 * MIB / 4, 1, 512 * MIB);
    check_failures_leave_nothing();
    check_host_device();
    gm_workers_free(workers);
    puts("test_rates: ok");
    return 0;
}
