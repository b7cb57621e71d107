/* rates.c - measures copies, Adam on the host and on the device, and what they cost each other.
 *
 * Copies are rows of pieces with a timed event after each; a row runs alone, both ways, or both
 * ways beside Adam on the host's threads.  What runs at the same time is compared over the time in
 * which all of it ran.  Every figure is the median of some rounds, after a first one that does not
 * count (page tables, caches and clocks are cold then).
 *
 * 1. Whatever was taken (blocks, pinned memory, streams, events) is given back, on failure too, and
 *    not before the work that uses it is done.
 * 2. Rates are positive and finite, also on a device that does all work when it is issued: there,
 *    what shares the time takes turns, and a share of it is the figure.
 * 3. Nothing is faster in company than alone: where chance says so, the lesser figure is kept.
 *
 * Every figure goes round through as much memory as there is, since caches may hold hundreds of
 * MiB, and chunks come from memory. */
#include "engine/engine.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "device/hostmem.h"

#define MIB ((size_t)1 << 20)

enum {
    ROUNDS = 5,
    BESIDE_ROUNDS = 3,
    MAX_PIECES = 256,        /* of a row */
    BYTES_PER_PARAMETER = 14 /* bf16: weight 2, remainder 2, moments 8, gradient 2 */
};

#define DEVICE_BYTES     (256 * MIB)
#define HOST_BYTES       (512 * MIB)
#define LEAST_HOST_BYTES (16 * MIB)
#define PIECE_BYTES      (32 * MIB)
#define ROW_SECONDS      0.012 /* a row of copies */
#define BESIDE_SECONDS   0.060 /* a row beside Adam */
#define PASS_SECONDS     0.040 /* a pass of host Adam takes at most about this */
#define REPEAT_SECONDS   0.004 /* a row of passes of device Adam */

/* Pieces one way: where they go round on the host and on the device, and when each was done. */
typedef struct lane {
    gm_stream stream; /* 0: not made yet */
    uint8_t *host;
    uintptr_t device;
    gm_event done[MAX_PIECES];
    size_t n_events;
    double end[MAX_PIECES]; /* seconds after `begin` */
} lane;

typedef struct bench {
    gm_device *device;
    gm_workers *workers;

    uintptr_t addr;
    size_t range_bytes; /* 0: no range */
    size_t device_bytes;
    gm_block *blocks;
    size_t n_blocks;

    gm_arena *arena;

    size_t piece_bytes, n_host_pieces, n_device_pieces; /* each way */
    gm_event begin;
    lane in, out;
    size_t numel; /* of host Adam, whose arrays are where the arena begins */
} bench;

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, size_t n)
{
    qsort(values, n, sizeof *values, ascending);
    return values[n / 2];
}

/* How often something of `each` seconds fits into `total`, within bounds. */
static size_t times_within(double total, double each, size_t low, size_t high)
{
    double n = total / fmax(each, 1e-9);
    return n <= (double)low ? low : n >= (double)high ? high : (size_t)n;
}

/* ---- what it takes, and giving it back ---- */

static gm_status take_device_memory(bench *b)
{
    const gm_device_ops *ops = b->device->ops;
    size_t wanted = DEVICE_BYTES / b->device->block_bytes;
    wanted = wanted ? wanted : 1;
    b->blocks = calloc(wanted, sizeof *b->blocks);
    GM_FAIL_IF(!b->blocks, GM_ERR_NOMEM, "HOST: no %zu bytes to measure rates",
               wanted * sizeof *b->blocks);
    gm_status status = GM_OK;
    while (b->n_blocks < wanted && status == GM_OK) {
        status = ops->block_new(b->device, &b->blocks[b->n_blocks]);
        b->n_blocks += status == GM_OK;
    }
    if (status != GM_OK && (b->n_blocks == 0 || status != GM_ERR_NOMEM)) {
        return status;
    }
    b->device_bytes = b->n_blocks * b->device->block_bytes;
    GM_TRY(ops->range_new(b->device, b->device_bytes, &b->addr));
    b->range_bytes = b->device_bytes;
    GM_TRY(ops->map(b->device, b->addr, b->blocks, b->n_blocks));
    /* finite, normal, positive numbers in every dtype, so that Adam computes as it does in
     * training */
    GM_TRY(ops->fill(b->device, b->addr, 0x3c, b->device_bytes, 0));
    return ops->stream_sync(b->device, 0);
}

static gm_status take_host_memory(bench *b)
{
    size_t available = 0;
    GM_TRY(gm_host_available(&available));
    size_t bytes = least(HOST_BYTES, available / 4);
    GM_FAIL_IF(bytes < LEAST_HOST_BYTES, GM_ERR_NOMEM,
               "HOST: measuring the machine's rates needs %s, a fourth of what is available, which "
               "is %s; free host memory, or give rates in GEMINI_RATES",
               gm_wanted(LEAST_HOST_BYTES).text, gm_there(available).text);
    gm_status status = gm_arena_new(b->device, bytes, b->workers, &b->arena);
    while (status == GM_ERR_NOMEM && bytes / 2 >= LEAST_HOST_BYTES) { /* a limit on locked memory */
        bytes /= 2;
        status = gm_arena_new(b->device, bytes, b->workers, &b->arena);
    }
    return status;
}

static void fill_span(void *context, size_t begin, size_t end)
{
    memset((uint8_t *)context + begin, 0x3c, end - begin);
}

/* Host memory: Adam's arrays | pieces in | pieces out.  Device memory: pieces in | pieces out. */
static void divide_memory(bench *b, size_t adam_bytes)
{
    uint8_t *base = gm_arena_base(b->arena);
    size_t bytes = gm_arena_bytes(b->arena);
    adam_bytes = adam_bytes / 4096 * 4096;
    b->numel = adam_bytes / BYTES_PER_PARAMETER / 64 * 64;
    size_t way_bytes = (bytes - adam_bytes) / 2, device_way_bytes = b->device_bytes / 2;
    if (way_bytes > 0) {
        b->piece_bytes = least(PIECE_BYTES, least(way_bytes, device_way_bytes)) / 256 * 256;
        b->n_host_pieces = way_bytes / b->piece_bytes;
        b->n_device_pieces = device_way_bytes / b->piece_bytes;
        b->in.host = base + adam_bytes;
        b->out.host = b->in.host + b->n_host_pieces * b->piece_bytes;
        b->in.device = b->addr;
        b->out.device = b->addr + b->n_device_pieces * b->piece_bytes;
    }
    gm_workers_for(b->workers, adam_bytes, MIB, fill_span, base);
}

static gm_status open_lane(bench *b, lane *way)
{
    const gm_device_ops *ops = b->device->ops;
    GM_TRY(ops->stream_new(b->device, &way->stream));
    for (; way->n_events < MAX_PIECES; way->n_events++) {
        GM_TRY(ops->event_new(b->device, true, &way->done[way->n_events]));
    }
    return GM_OK;
}

static gm_status open_bench(bench *b)
{
    GM_TRY(take_device_memory(b));
    GM_TRY(take_host_memory(b));
    GM_TRY(b->device->ops->event_new(b->device, true, &b->begin));
    GM_TRY(open_lane(b, &b->in));
    return open_lane(b, &b->out);
}

static void close_lane(bench *b, lane *way)
{
    for (size_t i = 0; i < way->n_events; i++) {
        gm_free_event(b->device, &way->done[i]);
    }
    gm_free_stream(b->device, &way->stream);
}

static void close_bench(bench *b)
{
    const gm_device_ops *ops = b->device->ops;
    if (b->in.stream) {
        (void)ops->stream_sync(b->device, b->in.stream);
    }
    if (b->out.stream) {
        (void)ops->stream_sync(b->device, b->out.stream);
    }
    close_lane(b, &b->in);
    close_lane(b, &b->out);
    gm_free_event(b->device, &b->begin);
    gm_arena_free(b->arena);
    if (b->range_bytes) {
        ops->range_free(b->device, b->addr, b->range_bytes);
    }
    for (size_t i = 0; i < b->n_blocks; i++) {
        ops->block_free(b->device, b->blocks[i]);
    }
    free(b->blocks);
}

/* ---- copies ---- */

static gm_status issue_piece(bench *b, lane *way, size_t i)
{
    const gm_device_ops *ops = b->device->ops;
    uint8_t *host = way->host + i % b->n_host_pieces * b->piece_bytes;
    uintptr_t device = way->device + i % b->n_device_pieces * b->piece_bytes;
    if (way == &b->in) {
        GM_TRY(ops->copy_h2d(b->device, device, host, b->piece_bytes, way->stream));
    } else {
        GM_TRY(ops->copy_d2h(b->device, host, device, b->piece_bytes, way->stream));
    }
    return ops->event_record(b->device, way->done[i], way->stream);
}

/* n_in and n_out pieces, both ways at once; *start is the host's clock at `begin`.  Does not wait
 * for them. */
static gm_status issue_row(bench *b, size_t n_in, size_t n_out, double *start)
{
    const gm_device_ops *ops = b->device->ops;
    GM_TRY(ops->event_record(b->device, b->begin, b->in.stream));
    GM_TRY(ops->event_sync(b->device, b->begin));
    *start = gm_seconds();
    for (size_t i = 0; i < n_in || i < n_out; i++) {
        if (i < n_in) {
            GM_TRY(issue_piece(b, &b->in, i));
        }
        if (i < n_out) {
            GM_TRY(issue_piece(b, &b->out, i));
        }
    }
    return GM_OK;
}

static gm_status finish_lane(bench *b, lane *way, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        GM_TRY(b->device->ops->event_elapsed(b->device, b->begin, way->done[i], &way->end[i]));
    }
    return GM_OK;
}

/* Bytes of the first n pieces that were through at `time`. */
static double bytes_at(const bench *b, const lane *way, size_t n, double time)
{
    double begin = 0;
    for (size_t i = 0; i < n; i++) {
        if (way->end[i] > time) {
            double part = (time - begin) / (way->end[i] - begin);
            return (double)b->piece_bytes * ((double)i + fmax(part, 0));
        }
        begin = way->end[i];
    }
    return (double)b->piece_bytes * (double)n;
}

static gm_status time_row(bench *b, size_t n_in, size_t n_out, double *in_rate, double *out_rate)
{
    double start;
    GM_TRY(issue_row(b, n_in, n_out, &start));
    GM_TRY(finish_lane(b, &b->in, n_in));
    GM_TRY(finish_lane(b, &b->out, n_out));
    double end = n_in ? b->in.end[n_in - 1] : b->out.end[n_out - 1];
    if (n_in && n_out && b->out.end[n_out - 1] < end) {
        end = b->out.end[n_out - 1]; /* from here on one way runs alone */
    }
    end = fmax(end, 1e-9);
    *in_rate = bytes_at(b, &b->in, n_in, end) / end;
    *out_rate = bytes_at(b, &b->out, n_out, end) / end;
    return GM_OK;
}

static gm_status time_rows(bench *b, bool goes_in, bool goes_out, double *in_rate, double *out_rate)
{
    double in[ROUNDS], out[ROUNDS];
    size_t n = 2;
    GM_TRY(time_row(b, goes_in ? n : 0, goes_out ? n : 0, &in[0], &out[0]));
    double slower = goes_in && goes_out && out[0] < in[0] ? out[0] : goes_in ? in[0] : out[0];
    n = times_within(ROW_SECONDS * slower, (double)b->piece_bytes, 2, MAX_PIECES);
    for (size_t i = 0; i < ROUNDS; i++) {
        GM_TRY(time_row(b, goes_in ? n : 0, goes_out ? n : 0, &in[i], &out[i]));
    }
    if (goes_in) {
        *in_rate = median(in, ROUNDS);
    }
    if (goes_out) {
        *out_rate = median(out, ROUNDS);
    }
    return GM_OK;
}

/* ---- Adam ---- */

static gm_adam_args adam_arrays(uintptr_t base, size_t numel, const gm_adam_range *range)
{
    return (gm_adam_args){.format = GM_BF16,
                          .grad_dtype = GM_BF16,
                          .m = (float *)base,
                          .v = (float *)(base + 4 * numel),
                          .weight = (void *)(base + 8 * numel),
                          .low = (void *)(base + 10 * numel),
                          .grad = (const void *)(base + 12 * numel),
                          .ranges = range,
                          .n_ranges = 1};
}

static gm_status some_range(size_t numel, gm_adam_range *out)
{
    const gm_adam_hyper hyper = {.lr = 1e-3,
                                 .beta1 = 0.9,
                                 .beta2 = 0.999,
                                 .eps = 1e-8,
                                 .weight_decay = 0.01,
                                 .step = 10,
                                 .adamw = true,
                                 .bias_correction = true,
                                 .grad_divisor = 1,
                                 .clip_factor = 1};
    out->begin = 0;
    out->end = numel;
    return gm_adam_scalars_init(&hyper, &out->scalars);
}

static gm_status host_pass(bench *b, double *seconds)
{
    gm_adam_range range;
    GM_TRY(some_range(b->numel, &range));
    gm_adam_args args = adam_arrays((uintptr_t)gm_arena_base(b->arena), b->numel, &range);
    double begin = gm_seconds();
    GM_TRY(gm_adam_host(&args, b->workers));
    *seconds = fmax(gm_seconds() - begin, 1e-9);
    return GM_OK;
}

/* Few or slow cores: fewer parameters tell as much. */
static void shorten_passes(bench *b, double rate)
{
    double most = PASS_SECONDS * rate;
    if ((double)b->numel > most) {
        b->numel = most < 64 ? 64 : (size_t)most / 64 * 64;
    }
}

static gm_status time_host_adam(bench *b, double *rate)
{
    double rates[ROUNDS], seconds;
    divide_memory(b, gm_arena_bytes(b->arena));
    GM_TRY(host_pass(b, &seconds));
    shorten_passes(b, (double)b->numel / seconds);
    for (size_t i = 0; i < ROUNDS; i++) {
        GM_TRY(host_pass(b, &seconds));
        rates[i] = (double)b->numel / seconds;
    }
    *rate = median(rates, ROUNDS);
    return GM_OK;
}

static gm_status device_passes(bench *b, size_t n, double *seconds)
{
    const gm_device_ops *ops = b->device->ops;
    gm_adam_range range;
    size_t numel = b->device_bytes / BYTES_PER_PARAMETER / 64 * 64;
    GM_TRY(some_range(numel, &range));
    gm_adam_args args = adam_arrays(b->addr, numel, &range);
    GM_TRY(ops->event_record(b->device, b->begin, b->in.stream));
    for (size_t i = 0; i < n; i++) {
        GM_TRY(ops->adam(b->device, &args, b->in.stream));
    }
    GM_TRY(ops->event_record(b->device, b->in.done[0], b->in.stream));
    GM_TRY(ops->event_elapsed(b->device, b->begin, b->in.done[0], seconds));
    *seconds = fmax(*seconds, 1e-9) / (double)n / (double)numel; /* of one parameter */
    return GM_OK;
}

static gm_status time_device_adam(bench *b, double *rate)
{
    const gm_device_ops *ops = b->device->ops;
    double seconds[ROUNDS];
    GM_TRY(ops->fill(b->device, b->addr, 0x3c, b->device_bytes, b->in.stream));
    GM_TRY(device_passes(b, 1, &seconds[0]));
    size_t numel = b->device_bytes / BYTES_PER_PARAMETER;
    size_t n = times_within(REPEAT_SECONDS, seconds[0] * (double)numel, 1, 64);
    for (size_t i = 0; i < ROUNDS; i++) {
        GM_TRY(device_passes(b, n, &seconds[i]));
    }
    *rate = 1 / median(seconds, ROUNDS);
    return GM_OK;
}

/* ---- copies both ways and Adam on the host, at the same time ---- */

typedef struct beside {
    double adam, in, out;
} beside;

static gm_status time_beside_once(bench *b, size_t n, double adam_seconds, beside *out)
{
    double start, seconds;
    size_t n_passes = 0;
    GM_TRY(issue_row(b, n, n, &start));
    double begin = gm_seconds() - start, end = begin;
    do {
        GM_TRY(host_pass(b, &seconds));
        n_passes++;
        end = gm_seconds() - start;
    } while (end - begin < adam_seconds);
    GM_TRY(finish_lane(b, &b->in, n));
    GM_TRY(finish_lane(b, &b->out, n));
    double last = fmin(b->in.end[n - 1], b->out.end[n - 1]);
    out->adam = (double)n_passes * (double)b->numel / (end - begin);
    end = last < end ? last : end;
    if (end <= begin) { /* the copies were done when they had been issued */
        *out = (beside){.adam = out->adam / 2, .in = 0, .out = 0};
        return GM_OK;
    }
    out->in = (bytes_at(b, &b->in, n, end) - bytes_at(b, &b->in, n, begin)) / (end - begin);
    out->out = (bytes_at(b, &b->out, n, end) - bytes_at(b, &b->out, n, begin)) / (end - begin);
    return GM_OK;
}

static gm_status time_beside(bench *b, gm_rates *r)
{
    double adam[BESIDE_ROUNDS], in[BESIDE_ROUNDS], out[BESIDE_ROUNDS];
    divide_memory(b, gm_arena_bytes(b->arena) / 4 * 3);
    shorten_passes(b, r->host_adam);
    double pass_seconds = (double)b->numel / r->host_adam;
    double faster = fmax(r->h2d_both, r->d2h_both);
    double wanted = fmax(BESIDE_SECONDS, 3 * pass_seconds);
    size_t n = times_within(wanted * faster, (double)b->piece_bytes, 4, MAX_PIECES);
    /* Adam ends before the faster way does, which is not faster than without Adam */
    double adam_seconds = 0.8 * (double)n * (double)b->piece_bytes / faster - pass_seconds;
    for (size_t i = 0; i < BESIDE_ROUNDS; i++) {
        beside found;
        GM_TRY(time_beside_once(b, n, adam_seconds, &found));
        adam[i] = found.adam;
        in[i] = found.in > 0 ? found.in : r->h2d_both / 2;
        out[i] = found.out > 0 ? found.out : r->d2h_both / 2;
    }
    r->host_adam_beside = median(adam, BESIDE_ROUNDS);
    r->h2d_beside = median(in, BESIDE_ROUNDS);
    r->d2h_beside = median(out, BESIDE_ROUNDS);
    return GM_OK;
}

/* ---- all of it ---- */

static gm_status measure(bench *b, gm_rates *r)
{
    GM_TRY(open_bench(b));
    divide_memory(b, 0);
    GM_TRY(time_rows(b, true, false, &r->h2d, &r->d2h));
    GM_TRY(time_rows(b, false, true, &r->h2d, &r->d2h));
    GM_TRY(time_rows(b, true, true, &r->h2d_both, &r->d2h_both));
    GM_TRY(time_host_adam(b, &r->host_adam));
    GM_TRY(time_beside(b, r));
    GM_TRY(time_device_adam(b, &r->device_adam));
    r->h2d_both = fmin(r->h2d_both, r->h2d);
    r->d2h_both = fmin(r->d2h_both, r->d2h);
    r->h2d_beside = fmin(r->h2d_beside, r->h2d_both);
    r->d2h_beside = fmin(r->d2h_beside, r->d2h_both);
    r->host_adam_beside = fmin(r->host_adam_beside, r->host_adam);
    return GM_OK;
}

gm_status gm_rates_measure(gm_device *device, gm_workers *workers, gm_rates *out)
{
    *out = (gm_rates){.h2d = 0};
    bench *b;
    GM_TRY(GM_NEW(b, "HOST: no %zu bytes to measure rates"));
    b->device = device;
    b->workers = workers;
    gm_rates rates = {.h2d = 0};
    gm_status status = measure(b, &rates);
    close_bench(b);
    free(b);
    if (status == GM_OK) {
        *out = rates;
    }
    return status;
}
