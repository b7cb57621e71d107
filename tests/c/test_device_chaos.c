/* test_device_chaos.c - a pipeline over aliased ranges gives the right bytes in every order that its events
 * allow; a missing event is found whatever order happened to run; and every seeded fault is caught.
 *
 * The pipeline is a small training pass: weights, states and gradients of N_CHUNKS chunks share few slots.  Even
 * chunks are updated at home by a host call, odd ones on the device, the last is frozen. */
#define _GNU_SOURCE
#include "chaos/chaos.h"

#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

enum {
    NUMEL = 1200, /* more than one block, not two */
    N_CHUNKS = 7, /* the last is frozen */
    FROZEN = N_CHUNKS - 1,
    N_SLOTS = 3, /* for weights */
    N_STATE_SLOTS = 2,
    N_GRAD_SLOTS = 2,
    N_PASSES = 3,
    N_SEEDS = 200,
    BLOCK_BYTES = 4096,
};

typedef struct homes {
    float weight[N_CHUNKS][NUMEL];
    float state[N_CHUNKS][2 * NUMEL]; /* m, v */
    float grad[N_CHUNKS][NUMEL];
    gm_sumsq sums[N_CHUNKS];
} homes;

/* The waits of the pipeline, so that a test can leave one out. */
typedef enum site {
    FETCH_WAITS_FOR_SLOT,
    FETCH_WAITS_FOR_HOME,
    COMPUTE_WAITS_FOR_FETCH,
    COMPUTE_WAITS_FOR_GRAD_SLOT,
    EVICT_WAITS_FOR_COMPUTE,
    HOST_WAITS_FOR_GRAD,
    STATE_WAITS_FOR_SLOT,
    UPDATE_WAITS_FOR_COMPUTE,
    UPDATE_WAITS_FOR_STATE,
    EVICT_WAITS_FOR_UPDATE,
    SUMS_WAIT_FOR_COMPUTE,
    HOST_WAITS_FOR_SUMS,
    HOST_WAITS_FOR_FETCH,
    HOST_WAITS_FOR_HOMES,
    N_SITES
} site;

typedef struct adam_call { /* one host call's context */
    homes *homes;
    int chunk;
    gm_adam_range range;
} adam_call;

typedef struct pipeline {
    gm_device *dev;
    const gm_device_ops *ops;
    homes *homes; /* pinned */
    int left_out; /* a site, or N_SITES */
    gm_stream fetch, state, update, evict, host;
    gm_event filled[N_CHUNKS], computed[N_CHUNKS], grad_out[N_CHUNKS], state_filled[N_CHUNKS],
        updated[N_CHUNKS], homed[N_CHUNKS];
    gm_event slot_free[N_SLOTS], grad_free[N_GRAD_SLOTS], state_free[N_STATE_SLOTS], sums_out;
    uintptr_t weight[N_CHUNKS], states[N_CHUNKS], grad[N_CHUNKS], sums;
    size_t weight_blocks, state_blocks;
    gm_block blocks[64];
    size_t n_blocks;
    adam_call calls[N_PASSES][N_CHUNKS];
    uint64_t n_wrong; /* values that did not fit the reference on the way */
} pipeline;

static void adam_range(int pass, gm_adam_range *out)
{
    gm_adam_hyper hyper = {.lr = 0.125 * (pass + 1),
                           .beta1 = 0.5,
                           .beta2 = 0.75,
                           .eps = 1e-3,
                           .step = pass + 1,
                           .adamw = true,
                           .bias_correction = true,
                           .grad_divisor = 1,
                           .clip_factor = 1};
    *out = (gm_adam_range){.begin = 0, .end = NUMEL};
    CHECK_OK(gm_adam_scalars_init(&hyper, &out->scalars));
}

static gm_adam_args adam_args(float *weight, float *state, const float *grad,
                              const gm_adam_range *range)
{
    return (gm_adam_args){.format = GM_F32,
                          .grad_dtype = GM_F32,
                          .weight = weight,
                          .m = state,
                          .v = state + NUMEL,
                          .grad = grad,
                          .ranges = range,
                          .n_ranges = 1};
}

static void init_homes(homes *h)
{
    memset(h, 0, sizeof *h);
    for (int c = 0; c < N_CHUNKS; c++) {
        for (int i = 0; i < NUMEL; i++) {
            h->weight[c][i] = (float)(c * 1000 + i) / 64;
        }
    }
}

/* What torch's kernels would do with the weights of one chunk. */
static void backward(const float *weight, int pass, float *grad)
{
    for (int i = 0; i < NUMEL; i++) {
        grad[i] = weight[i] * 0.25f + (float)(i % 7) - (float)pass;
    }
}

/* Between passes the host rewrites the frozen chunk. */
static void edit_frozen(homes *h, int pass)
{
    for (int i = 0; i < NUMEL; i++) {
        h->weight[FROZEN][i] += (float)pass + 1;
    }
}

static void run_reference(homes *h)
{
    init_homes(h);
    for (int pass = 0; pass < N_PASSES; pass++) {
        for (int c = 0; c < N_CHUNKS; c++) {
            float grad[NUMEL];
            backward(h->weight[c], pass, grad);
            memset(&h->sums[c], 0, sizeof h->sums[c]);
            gm_sumsq_host(grad, GM_F32, NUMEL, &h->sums[c], NULL);
            if (c != FROZEN) {
                memcpy(h->grad[c], grad, sizeof grad);
                gm_adam_range range;
                adam_range(pass, &range);
                gm_adam_args args = adam_args(h->weight[c], h->state[c], grad, &range);
                CHECK_OK(gm_adam_host(&args, NULL));
            }
        }
        edit_frozen(h, pass);
    }
}

/* ---- building and taking apart ---- */

static void map_slots(pipeline *p, uintptr_t *addr, int n, int n_slots, size_t n_blocks,
                      bool is_odd_only)
{
    gm_block *first = &p->blocks[p->n_blocks];
    for (size_t i = 0; i < (size_t)n_slots * n_blocks; i++) {
        CHECK_OK(p->ops->block_new(p->dev, &p->blocks[p->n_blocks++]));
    }
    for (int c = 0; c < n; c++) {
        CHECK_OK(p->ops->range_new(p->dev, n_blocks * p->dev->block_bytes, &addr[c]));
        int slot = (is_odd_only ? c / 2 : c) % n_slots;
        CHECK_OK(p->ops->map(p->dev, addr[c], first + (size_t)slot * n_blocks, n_blocks));
    }
}

static void new_events(pipeline *p, gm_event *events, int n)
{
    for (int i = 0; i < n; i++) {
        CHECK_OK(p->ops->event_new(p->dev, false, &events[i]));
    }
}

static void pipeline_new(pipeline *p, const gm_chaos_options *options, int left_out)
{
    memset(p, 0, sizeof *p);
    p->left_out = left_out;
    CHECK_OK(gm_device_chaos_new(BLOCK_BYTES, NULL, options, &p->dev));
    p->ops = p->dev->ops;
    p->homes = malloc(sizeof *p->homes);
    CHECK(p->homes);
    init_homes(p->homes);
    CHECK_OK(p->ops->pin(p->dev, p->homes, sizeof *p->homes));
    p->weight_blocks = gm_round_up(sizeof p->homes->weight[0], BLOCK_BYTES) / BLOCK_BYTES;
    p->state_blocks = gm_round_up(sizeof p->homes->state[0], BLOCK_BYTES) / BLOCK_BYTES;
    map_slots(p, p->weight, N_CHUNKS, N_SLOTS, p->weight_blocks, false);
    map_slots(p, p->grad, N_CHUNKS, N_GRAD_SLOTS, p->weight_blocks, false);
    map_slots(p, p->states, N_CHUNKS, N_STATE_SLOTS, p->state_blocks, true);
    map_slots(p, &p->sums, 1, 1, 1, false);
    CHECK(((const unsigned char *)p->sums)[77] == 0xeb); /* new blocks are poisoned */
    gm_stream *streams[] = {&p->fetch, &p->state, &p->update, &p->evict, &p->host};
    for (size_t i = 0; i < sizeof streams / sizeof streams[0]; i++) {
        CHECK_OK(p->ops->stream_new(p->dev, streams[i]));
    }
    new_events(p, p->filled, N_CHUNKS);
    new_events(p, p->computed, N_CHUNKS);
    new_events(p, p->grad_out, N_CHUNKS);
    new_events(p, p->state_filled, N_CHUNKS);
    new_events(p, p->updated, N_CHUNKS);
    new_events(p, p->homed, N_CHUNKS);
    new_events(p, p->slot_free, N_SLOTS);
    new_events(p, p->grad_free, N_GRAD_SLOTS);
    new_events(p, p->state_free, N_STATE_SLOTS);
    new_events(p, &p->sums_out, 1);
}

static void free_events(pipeline *p, const gm_event *events, int n)
{
    for (int i = 0; i < n; i++) {
        p->ops->event_free(p->dev, events[i]);
    }
}

/* In an order that finds work still in flight: the ranges first. */
static void pipeline_free(pipeline *p)
{
    for (int c = 0; c < N_CHUNKS; c++) {
        p->ops->range_free(p->dev, p->weight[c], p->weight_blocks * p->dev->block_bytes);
        p->ops->range_free(p->dev, p->grad[c], p->weight_blocks * p->dev->block_bytes);
        p->ops->range_free(p->dev, p->states[c], p->state_blocks * p->dev->block_bytes);
    }
    p->ops->range_free(p->dev, p->sums, p->dev->block_bytes);
    for (size_t i = 0; i < p->n_blocks; i++) {
        p->ops->block_free(p->dev, p->blocks[i]);
    }
    gm_stream streams[] = {p->fetch, p->state, p->update, p->evict, p->host};
    for (size_t i = 0; i < sizeof streams / sizeof streams[0]; i++) {
        p->ops->stream_free(p->dev, streams[i]);
    }
    free_events(p, p->filled, N_CHUNKS);
    free_events(p, p->computed, N_CHUNKS);
    free_events(p, p->grad_out, N_CHUNKS);
    free_events(p, p->state_filled, N_CHUNKS);
    free_events(p, p->updated, N_CHUNKS);
    free_events(p, p->homed, N_CHUNKS);
    free_events(p, p->slot_free, N_SLOTS);
    free_events(p, p->grad_free, N_GRAD_SLOTS);
    free_events(p, p->state_free, N_STATE_SLOTS);
    free_events(p, &p->sums_out, 1);
    p->ops->unpin(p->dev, p->homes);
    free(p->homes);
    p->ops->free(p->dev);
}

/* ---- one pass ---- */

static void wait_for(pipeline *p, site where, gm_event event, gm_stream stream)
{
    if ((int)where != p->left_out) {
        CHECK_OK(p->ops->event_wait(p->dev, event, stream));
    }
}

static void record(pipeline *p, gm_event event, gm_stream stream)
{
    CHECK_OK(p->ops->event_record(p->dev, event, stream));
}

static void fetch_chunk(pipeline *p, int c)
{
    wait_for(p, FETCH_WAITS_FOR_SLOT, p->slot_free[c % N_SLOTS], p->fetch);
    wait_for(p, FETCH_WAITS_FOR_HOME, p->homed[c], p->fetch);
    CHECK_OK(p->ops->copy_h2d(p->dev, p->weight[c], p->homes->weight[c], sizeof p->homes->weight[c],
                              p->fetch));
    record(p, p->filled[c], p->fetch);
}

static void compute_chunk(pipeline *p, int c, int pass)
{
    float grad[NUMEL]; /* torch's memory, used on torch's stream only */
    wait_for(p, COMPUTE_WAITS_FOR_FETCH, p->filled[c], 0);
    gm_note_access(p->dev, (const void *)p->weight[c], sizeof grad, false, 0);
    backward((const float *)p->weight[c], pass, grad);
    wait_for(p, COMPUTE_WAITS_FOR_GRAD_SLOT, p->grad_free[c % N_GRAD_SLOTS], 0);
    gm_grad_add_args add = {(void *)p->grad[c], grad, GM_F32, GM_F32, NUMEL, false, 1};
    CHECK_OK(p->ops->grad_add(p->dev, &add, (gm_sumsq *)p->sums + c, 0));
    record(p, p->computed[c], 0);
}

static void call_adam(void *context)
{
    adam_call *call = context;
    homes *h = call->homes;
    gm_adam_args args = adam_args(h->weight[call->chunk], h->state[call->chunk],
                                  h->grad[call->chunk], &call->range);
    CHECK_OK(gm_adam_host(&args, NULL));
}

static void update_at_home(pipeline *p, int c, int pass)
{
    homes *h = p->homes;
    adam_call *call = &p->calls[pass][c];
    *call = (adam_call){.homes = h, .chunk = c};
    adam_range(pass, &call->range);
    record(p, p->slot_free[c % N_SLOTS], 0);
    wait_for(p, EVICT_WAITS_FOR_COMPUTE, p->computed[c], p->evict);
    CHECK_OK(p->ops->copy_d2h(p->dev, h->grad[c], p->grad[c], sizeof h->grad[c], p->evict));
    record(p, p->grad_out[c], p->evict);
    record(p, p->grad_free[c % N_GRAD_SLOTS], p->evict);
    wait_for(p, HOST_WAITS_FOR_GRAD, p->grad_out[c], p->host);
    gm_note_access(p->dev, h->grad[c], sizeof h->grad[c], false, p->host);
    gm_note_access(p->dev, h->weight[c], sizeof h->weight[c], true, p->host);
    gm_note_access(p->dev, h->state[c], sizeof h->state[c], true, p->host);
    CHECK_OK(p->ops->host_call(p->dev, call_adam, call, p->host));
    record(p, p->homed[c], p->host);
}

static void update_on_device(pipeline *p, int c, int pass)
{
    homes *h = p->homes;
    int slot = c / 2 % N_STATE_SLOTS;
    wait_for(p, STATE_WAITS_FOR_SLOT, p->state_free[slot], p->state);
    CHECK_OK(p->ops->copy_h2d(p->dev, p->states[c], h->state[c], sizeof h->state[c], p->state));
    record(p, p->state_filled[c], p->state);
    wait_for(p, UPDATE_WAITS_FOR_COMPUTE, p->computed[c], p->update);
    wait_for(p, UPDATE_WAITS_FOR_STATE, p->state_filled[c], p->update);
    gm_adam_range range;
    adam_range(pass, &range);
    gm_adam_args args =
        adam_args((float *)p->weight[c], (float *)p->states[c], (const float *)p->grad[c], &range);
    CHECK_OK(p->ops->adam(p->dev, &args, p->update));
    memset(&range, 0xff, sizeof range); /* the device has its own copy */
    record(p, p->updated[c], p->update);
    wait_for(p, EVICT_WAITS_FOR_UPDATE, p->updated[c], p->evict);
    CHECK_OK(p->ops->copy_d2h(p->dev, h->weight[c], p->weight[c], sizeof h->weight[c], p->evict));
    CHECK_OK(p->ops->copy_d2h(p->dev, h->state[c], p->states[c], sizeof h->state[c], p->evict));
    CHECK_OK(p->ops->copy_d2h(p->dev, h->grad[c], p->grad[c], sizeof h->grad[c], p->evict));
    record(p, p->homed[c], p->evict);
    record(p, p->slot_free[c % N_SLOTS], p->evict);
    record(p, p->grad_free[c % N_GRAD_SLOTS], p->evict);
    record(p, p->state_free[slot], p->evict);
}

static void run_pass(pipeline *p, int pass)
{
    homes *h = p->homes;
    size_t sums_bytes = sizeof h->sums;
    CHECK_OK(p->ops->fill(p->dev, p->sums, 0, sums_bytes, 0));
    fetch_chunk(p, 0);
    for (int c = 0; c < N_CHUNKS; c++) {
        if (c + 1 < N_CHUNKS) {
            fetch_chunk(p, c + 1);
        }
        compute_chunk(p, c, pass);
        if (c == FROZEN) {
            record(p, p->slot_free[c % N_SLOTS], 0);
        } else if (c % 2 == 0) {
            update_at_home(p, c, pass);
        } else {
            update_on_device(p, c, pass);
        }
    }
    wait_for(p, SUMS_WAIT_FOR_COMPUTE, p->computed[FROZEN], p->evict);
    CHECK_OK(p->ops->copy_d2h(p->dev, h->sums, p->sums, sums_bytes, p->evict));
    record(p, p->sums_out, p->evict);
    if (p->left_out != HOST_WAITS_FOR_FETCH) {
        CHECK_OK(p->ops->stream_sync(p->dev, p->fetch));
    }
    gm_note_access(p->dev, h->weight[FROZEN], sizeof h->weight[FROZEN], true, GM_STREAM_HOST);
    edit_frozen(h, pass);
    if (p->left_out != HOST_WAITS_FOR_SUMS) {
        CHECK_OK(p->ops->event_sync(p->dev, p->sums_out));
    }
    gm_note_access(p->dev, h->sums, sums_bytes, false, GM_STREAM_HOST);
}

typedef struct outcome {
    uint32_t n_faults;
    bool is_right; /* bytes */
    gm_chaos_stats stats;
    char first[640];
} outcome;

static outcome run_pipeline(const gm_chaos_options *options, int left_out, const homes *reference)
{
    pipeline p;
    pipeline_new(&p, options, left_out);
    for (int pass = 0; pass < N_PASSES; pass++) {
        run_pass(&p, pass);
    }
    if (left_out !=
        HOST_WAITS_FOR_HOMES) { /* the last host call; the sums came behind all copies */
        CHECK_OK(p.ops->event_sync(p.dev, p.homed[FROZEN - 2]));
    }
    gm_note_access(p.dev, p.homes, sizeof *p.homes, false, GM_STREAM_HOST);
    outcome out = {.is_right = memcmp(p.homes, reference, sizeof *reference) == 0};
    CHECK_OK(p.ops->stream_sync(p.dev, 0));
    gm_chaos_fault seeded = options->fault;
    const char *first;
    if (left_out == N_SITES && seeded == GM_CHAOS_NONE) {
        CHECK_OK(gm_device_chaos_stats(p.dev, &out.stats));
        for (int c = 0; c < N_CHUNKS; c++) { /* nothing is in flight: addresses may change */
            CHECK_OK(p.ops->poison(p.dev, p.weight[c], p.weight_blocks));
        }
    }
    CHECK_OK(gm_device_chaos_faults(p.dev, &out.n_faults, &first));
    CHECK((out.n_faults == 0) == (first[0] == 0));
    snprintf(out.first, sizeof out.first, "%s", first);
    CHECK_OK(gm_device_chaos_stats(p.dev, &out.stats));
    pipeline_free(&p);
    return out;
}

/* ---- what must hold of it ---- */

static void check_right_in_every_order(const homes *reference)
{
    uint64_t hashes[N_SEEDS];
    size_t n_distinct = 0;
    for (uint64_t seed = 0; seed < N_SEEDS; seed++) {
        outcome out = run_pipeline(&(gm_chaos_options){.seed = seed}, N_SITES, reference);
        if (out.n_faults || !out.is_right) {
            fprintf(stderr, "seed %llu: %u faults, bytes %s: %s\n", (unsigned long long)seed,
                    out.n_faults, out.is_right ? "right" : "wrong", out.first);
        }
        CHECK(out.n_faults == 0 && out.is_right);
        size_t i = 0;
        while (i < n_distinct && hashes[i] != out.stats.order_hash) {
            i++;
        }
        if (i == n_distinct) {
            hashes[n_distinct++] = out.stats.order_hash;
        }
        if (seed < 5) {
            outcome again = run_pipeline(&(gm_chaos_options){.seed = seed}, N_SITES, reference);
            CHECK(again.stats.order_hash == out.stats.order_hash);
        }
    }
    CHECK(n_distinct > N_SEEDS * 9 / 10);
}

static void check_missing_waits_are_found(const homes *reference)
{
    int n_lucky = 0, n_unlucky = 0;
    for (int where = 0; where < N_SITES; where++) {
        for (uint64_t seed = 0; seed < 25; seed++) {
            outcome out = run_pipeline(&(gm_chaos_options){.seed = seed}, where, reference);
            if (out.n_faults == 0) {
                fprintf(stderr, "wait %d left out, seed %llu: not found\n", where,
                        (unsigned long long)seed);
            }
            CHECK(out.n_faults > 0 && strstr(out.first, "nothing orders"));
            n_lucky += out.is_right;
            n_unlucky += !out.is_right;
        }
    }
    CHECK(n_lucky > 0 && n_unlucky > 0); /* found in both kinds of order */
}

static void check_seeded_faults_are_caught(const homes *reference)
{
    static const uint32_t periods[] = {1, 2, 3};
    for (int fault = GM_CHAOS_NONE + 1; fault < GM_CHAOS_N_FAULTS; fault++) {
        for (size_t i = 0; i < sizeof periods / sizeof periods[0]; i++) {
            for (uint64_t seed = 0; seed < 20; seed++) {
                gm_chaos_options options = {
                    .seed = seed, .fault = (gm_chaos_fault)fault, .fault_period = periods[i]};
                outcome out = run_pipeline(&options, N_SITES, reference);
                if (out.stats.n_faults_applied == 0 || (out.n_faults == 0 && out.is_right)) {
                    fprintf(stderr, "%s:%u, seed %llu: applied %llu times, not caught\n",
                            gm_chaos_fault_name(options.fault), options.fault_period,
                            (unsigned long long)seed,
                            (unsigned long long)out.stats.n_faults_applied);
                }
                CHECK(out.stats.n_faults_applied > 0);
                CHECK(out.n_faults > 0 || !out.is_right);
            }
        }
    }
}

/* ---- small cases ---- */

/* A device with one mapped range of four blocks and pinned host memory. */
typedef struct bench {
    gm_device *dev;
    const gm_device_ops *ops;
    gm_stream a, b;
    gm_event event, other;
    gm_block blocks[4];
    uintptr_t addr;
    size_t bytes;
    unsigned char *host; /* (2 * bytes,) pinned */
} bench;

static void bench_new(bench *t, uint64_t seed)
{
    memset(t, 0, sizeof *t);
    CHECK_OK(gm_device_chaos_new(BLOCK_BYTES, NULL, &(gm_chaos_options){.seed = seed}, &t->dev));
    t->ops = t->dev->ops;
    t->bytes = 4 * t->dev->block_bytes;
    CHECK_OK(t->ops->stream_new(t->dev, &t->a));
    CHECK_OK(t->ops->stream_new(t->dev, &t->b));
    CHECK_OK(t->ops->event_new(t->dev, true, &t->event));
    CHECK_OK(t->ops->event_new(t->dev, true, &t->other));
    for (int i = 0; i < 4; i++) {
        CHECK_OK(t->ops->block_new(t->dev, &t->blocks[i]));
    }
    CHECK_OK(t->ops->range_new(t->dev, t->bytes, &t->addr));
    CHECK_OK(t->ops->map(t->dev, t->addr, t->blocks, 4));
    t->host = calloc(2, t->bytes);
    CHECK(t->host);
    CHECK_OK(t->ops->pin(t->dev, t->host, 2 * t->bytes));
}

static uint32_t n_faults(const bench *t, const char *words)
{
    uint32_t n;
    const char *first;
    CHECK_OK(gm_device_chaos_faults(t->dev, &n, &first));
    if (n && !strstr(first, words)) {
        fprintf(stderr, "\"%s\" is not in: %s\n", words, first);
        exit(1);
    }
    return n;
}

static size_t n_queued(const bench *t)
{
    gm_chaos_stats stats;
    CHECK_OK(gm_device_chaos_stats(t->dev, &stats));
    return stats.n_queued;
}

static void bench_free(bench *t)
{
    t->ops->range_free(t->dev, t->addr, t->bytes);
    for (int i = 0; i < 4; i++) {
        t->ops->block_free(t->dev, t->blocks[i]);
    }
    t->ops->unpin(t->dev, t->host);
    t->ops->stream_free(t->dev, t->a);
    t->ops->stream_free(t->dev, t->b);
    t->ops->event_free(t->dev, t->event);
    t->ops->event_free(t->dev, t->other);
    t->ops->free(t->dev);
    free(t->host);
}

/* Issues a copy on stream a that is still queued when this returns: seeds differ in how soon work runs. */
static void bench_with_queued_copy(bench *t)
{
    for (uint64_t seed = 0;; seed++) {
        bench_new(t, seed);
        memset(t->host, 7, t->bytes);
        CHECK_OK(t->ops->copy_h2d(t->dev, t->addr, t->host, t->bytes, t->a));
        if (n_queued(t) == 1) {
            CHECK(*(unsigned char *)t->addr == 0xeb);
            return;
        }
        CHECK_OK(t->ops->stream_sync(t->dev, t->a));
        CHECK(n_queued(t) == 0 && *(unsigned char *)t->addr == 7);
        bench_free(t);
    }
}

static long microseconds(double seconds)
{
    return (long)(1e6 * seconds + 0.5);
}

/* A wait means the record that was the latest when it was issued; the device's clock counts records. */
static void check_records(void)
{
    for (uint64_t seed = 0; seed < 50; seed++) {
        bench t;
        bench_new(&t, seed);
        CHECK_OK(t.ops->event_wait(t.dev, t.event, t.b)); /* never recorded: reached */
        CHECK_OK(t.ops->event_sync(t.dev, t.event));
        double seconds;
        CHECK(t.ops->event_elapsed(t.dev, t.event, t.other, &seconds) == GM_ERR_STATE);
        CHECK_OK(t.ops->fill(t.dev, t.addr, 1, t.dev->block_bytes, t.a));
        CHECK_OK(t.ops->event_record(t.dev, t.event, t.a));
        CHECK_OK(t.ops->event_wait(t.dev, t.event, t.b));
        CHECK_OK(t.ops->event_wait(t.dev, t.event, t.a)); /* of its own past */
        CHECK_OK(t.ops->event_record(t.dev, t.event, t.b));
        CHECK_OK(t.ops->event_wait(t.dev, t.event, t.a));
        CHECK_OK(t.ops->fill(t.dev, t.addr, 2, t.dev->block_bytes, t.a));
        CHECK_OK(t.ops->event_record(t.dev, t.other, t.a));
        CHECK_OK(t.ops->event_wait(t.dev, t.event, 0)); /* the first fill, not the second */
        CHECK(*(unsigned char *)t.addr == 1 || *(unsigned char *)t.addr == 2);
        CHECK_OK(t.ops->event_elapsed(t.dev, t.event, t.other, &seconds));
        CHECK(microseconds(seconds) == 50 && *(unsigned char *)t.addr == 2);
        gm_event plain;
        CHECK_OK(t.ops->event_new(t.dev, false, &plain));
        CHECK(t.ops->event_elapsed(t.dev, t.event, plain, &seconds) == GM_ERR_ARG);
        CHECK_OK(t.ops->event_record(t.dev, plain, t.a)); /* which the clock does not count */
        CHECK_OK(t.ops->event_record(t.dev, plain, 0));
        CHECK_OK(t.ops->event_record(t.dev, t.other, t.b));
        CHECK_OK(t.ops->event_elapsed(t.dev, t.event, t.other, &seconds));
        CHECK(microseconds(seconds) == 150);
        CHECK_OK(t.ops->event_wait(t.dev, plain, t.a));
        t.ops->event_free(t.dev, plain); /* its record lives on */
        CHECK(t.ops->event_sync(t.dev, plain) == GM_ERR_ARG);
        CHECK_OK(t.ops->stream_sync(t.dev, t.a));
        CHECK(n_faults(&t, "") == 0);
        bench_free(&t);
    }
}

/* The compute stream waits for what it was told, and only for that. */
static void check_compute_stream(void)
{
    bool was_late = false;
    for (uint64_t seed = 0; seed < 50; seed++) {
        bench t;
        bench_new(&t, seed);
        size_t block = t.dev->block_bytes;
        CHECK_OK(t.ops->fill(t.dev, t.addr, 1, block, t.a));
        CHECK_OK(t.ops->event_record(t.dev, t.event, t.a));
        CHECK_OK(t.ops->fill(t.dev, t.addr + block, 2, block, t.a));
        CHECK_OK(t.ops->fill(t.dev, t.addr + 2 * block, 3, block, t.b));
        CHECK_OK(t.ops->event_wait(t.dev, t.event, 0));
        CHECK_OK(t.ops->copy_d2h(t.dev, t.host, t.addr, block, 0));
        CHECK(t.host[0] == 1 && t.host[block - 1] == 1); /* at once */
        was_late |= n_queued(&t) == 2;
        CHECK_OK(t.ops->copy_d2d(t.dev, t.addr + 3 * block, t.addr, block, 0));
        CHECK(*(unsigned char *)(t.addr + 3 * block) == 1);
        CHECK_OK(t.ops->stream_sync(t.dev, t.a));
        CHECK_OK(t.ops->stream_sync(t.dev, t.b));
        CHECK_OK(t.ops->stream_sync(t.dev, 0));
        CHECK(n_queued(&t) == 0 && n_faults(&t, "") == 0);
        bench_free(&t);
    }
    CHECK(was_late);
}

/* Two addresses on one block are the same bytes; the host's own accesses count; texts name both sides. */
static void check_faults_in_words(void)
{
    bench t;
    bench_new(&t, 3);
    uintptr_t alias;
    CHECK_OK(t.ops->range_new(t.dev, t.bytes, &alias));
    CHECK_OK(t.ops->map(t.dev, alias, &t.blocks[2], 2)); /* the first half shows the second */
    CHECK_OK(t.ops->fill(t.dev, t.addr, 1, t.bytes / 2, t.a));
    CHECK_OK(t.ops->fill(t.dev, alias, 2, 100, t.b));
    CHECK(n_faults(&t, "") == 0);
    CHECK_OK(t.ops->copy_h2d(t.dev, t.addr + t.bytes / 2 + 60, t.host, 80, t.a));
    CHECK(n_faults(&t, "nothing orders copy_h2d") == 1);
    CHECK(n_faults(&t, "on stream 1 (writes 80 bytes) behind fill") == 1);
    CHECK(n_faults(&t, "on stream 2 (writes 100 bytes): both touch 40 bytes from byte 60 of block "
                       "3") == 1);
    CHECK(t.ops->copy_d2h(t.dev, t.host, alias, t.bytes, t.b) == GM_ERR_STATE);
    CHECK(strstr(gm_last_error(), "show a block") && n_faults(&t, "") == 2);
    t.ops->range_free(t.dev, alias, t.bytes); /* stream b is not done with it */
    CHECK(n_faults(&t, "") == 3);
    CHECK_OK(t.ops->stream_sync(t.dev, t.a));
    CHECK_OK(t.ops->stream_sync(t.dev, t.b));
    bench_free(&t);

    for (int is_write = 0; is_write < 2; is_write++) {
        bench_new(&t, 4);
        CHECK_OK(t.ops->copy_h2d(t.dev, t.addr, t.host, 64, t.a));
        gm_note_access(t.dev, t.host + 32, 8, is_write, GM_STREAM_HOST);
        CHECK(n_faults(&t, "nothing orders noted access #") == (uint32_t)is_write);
        CHECK(n_faults(&t, "on the host (writes 8 bytes) behind copy_h2d #") == (uint32_t)is_write);
        CHECK_OK(t.ops->stream_sync(t.dev, t.a));
        gm_note_access(t.dev, t.host, 64, true, GM_STREAM_HOST); /* now it is ordered */
        CHECK(n_faults(&t, "") == (uint32_t)is_write);
        gm_note_access(t.dev, (const void *)t.addr, 64, false, 0); /* a kernel of others */
        CHECK_OK(t.ops->fill(t.dev, t.addr, 0, 8, t.b));
        CHECK(n_faults(&t, "") == 1 + (uint32_t)is_write);
        CHECK_OK(t.ops->stream_sync(t.dev, 0));
        CHECK_OK(t.ops->stream_sync(t.dev, t.b));
        bench_free(&t);
    }
}

/* Memory that is taken away while something may still use it: reported, and the work runs before. */
static void check_memory_in_use(void)
{
    bench t;
    uintptr_t second;
    for (int how = 0; how < 6; how++) {
        static const char *const words[] = {"nothing orders map",   "nothing orders poison",
                                            "nothing orders unmap", "nothing orders range_free",
                                            "nothing orders unpin", "nothing orders block_free"};
        bench_with_queued_copy(&t);
        CHECK_OK(t.ops->range_new(t.dev, t.bytes, &second)); /* idle: may be mapped freely */
        CHECK_OK(t.ops->map(t.dev, second, t.blocks, 4));
        CHECK(n_faults(&t, "") == 0);
        switch (how) {
        case 0: CHECK_OK(t.ops->map(t.dev, t.addr, t.blocks, 1)); break;
        case 1: CHECK_OK(t.ops->poison(t.dev, t.addr, 4)); break;
        case 2: CHECK_OK(t.ops->unmap(t.dev, t.addr + 3 * t.dev->block_bytes, 1)); break;
        case 3:
            t.ops->range_free(t.dev, t.addr, t.bytes);
            CHECK_OK(t.ops->range_new(t.dev, t.bytes, &t.addr));
            break;
        case 4:
            t.ops->unpin(t.dev, t.host);
            CHECK_OK(t.ops->pin(t.dev, t.host, 2 * t.bytes));
            break;
        default:
            t.ops->block_free(t.dev, t.blocks[1]); /* two addresses show it, too */
            CHECK(n_faults(&t, "") == 3);
            CHECK_OK(t.ops->block_new(t.dev, &t.blocks[1]));
            CHECK_OK(t.ops->map(t.dev, second + t.dev->block_bytes, &t.blocks[1], 1));
            CHECK(((unsigned char *)second)[t.dev->block_bytes] == 0xeb);
        }
        CHECK(n_queued(&t) == 0 && *(unsigned char *)second == 7);
        CHECK(n_faults(&t, words[how]) == (how == 5 ? 3 : 1));
        t.ops->range_free(t.dev, second, t.bytes);
        bench_free(&t);
    }
    bench_with_queued_copy(&t);
    CHECK_OK(t.ops->stream_sync(t.dev, t.a)); /* the same, in order */
    CHECK_OK(t.ops->poison(t.dev, t.addr, 4));
    CHECK_OK(t.ops->map(t.dev, t.addr, t.blocks, 4));
    CHECK(n_faults(&t, "") == 0 && *(unsigned char *)t.addr == 7);
    CHECK(t.ops->map(t.dev, t.addr + t.dev->block_bytes, t.blocks, 4) == GM_ERR_ARG);
    CHECK(t.ops->map(t.dev, t.addr + 8, t.blocks, 1) == GM_ERR_ARG);
    bench_free(&t);
}

/* Host memory that is not pinned may be gone when the call has returned. */
static void check_foreign_memory(void)
{
    for (uint64_t seed = 0; seed < 50; seed++) {
        bench t;
        bench_new(&t, seed);
        unsigned char mine[256];
        memset(mine, 9, sizeof mine);
        CHECK_OK(t.ops->copy_h2d(t.dev, t.addr, mine, sizeof mine, t.a));
        memset(mine, 0, sizeof mine);
        CHECK_OK(t.ops->copy_d2h(t.dev, mine, t.addr, sizeof mine, t.a));
        CHECK(mine[0] == 9 && mine[255] == 9 && n_queued(&t) == 0);
        CHECK_OK(t.ops->stream_sync(t.dev, t.a));
        bench_free(&t);
    }
}

static void count(void *context)
{
    ++*(int *)context;
}

/* Arithmetic on queues; an operation that fails when it runs says so at every later wait. */
static void check_arithmetic(void)
{
    for (uint64_t seed = 0; seed < 30; seed++) {
        bench t;
        bench_new(&t, seed);
        float *data = (float *)t.addr, host[16];
        gm_sumsq *sum = (gm_sumsq *)(t.addr + t.dev->block_bytes);
        int n_calls = 0;
        for (int i = 0; i < 16; i++) {
            host[i] = (float)i;
        }
        CHECK_OK(t.ops->copy_h2d(t.dev, t.addr, host, sizeof host, t.a));
        CHECK_OK(t.ops->fill(t.dev, (uintptr_t)sum, 0, sizeof *sum, t.a));
        CHECK_OK(t.ops->sumsq(t.dev, data, GM_F32, 16, sum, t.a));
        CHECK_OK(t.ops->sumsq(t.dev, data, GM_F32, 16, sum, t.a));
        gm_grad_add_args add = {data + 16, data, GM_F32, GM_F32, 16, false, 1};
        CHECK_OK(t.ops->grad_add(t.dev, &add, NULL, t.a));
        add.accumulate = true;
        CHECK_OK(t.ops->grad_add(t.dev, &add, sum + 1, t.a));
        memset(&add, 0, sizeof add);
        CHECK_OK(t.ops->host_call(t.dev, count, &n_calls, t.a));
        CHECK_OK(t.ops->host_call(t.dev, count, &n_calls, 0));
        CHECK(n_calls >= 1);
        CHECK_OK(t.ops->stream_sync(t.dev, t.a));
        CHECK(gm_sumsq_value(sum) == 2480 && gm_sumsq_value(sum + 1) == 4960 && n_calls == 2);
        CHECK(data[16 + 15] == 30 && n_faults(&t, "") == 0);
        gm_adam_range range = {.begin = 0, .end = 16};
        gm_adam_args adam = {.format = GM_BF16, .grad_dtype = GM_F16, .weight = data, .low = data};
        adam.ranges = &range;
        adam.n_ranges = 1;
        adam.m = adam.v = data;
        adam.grad = data;
        CHECK_OK(t.ops->adam(t.dev, &adam, t.a));
        CHECK(t.ops->stream_sync(t.dev, t.a) == GM_ERR_ARG);
        CHECK(t.ops->event_sync(t.dev, t.event) == GM_ERR_ARG);
        bench_free(&t);
    }
}

/* What the checks remember does not grow with time, though the host never waits. */
static void check_memory_is_bounded(void)
{
    bench t;
    bench_new(&t, 5);
    for (int i = 0; i < 30000; i++) {
        size_t at = (size_t)(i % 61) * 64;
        gm_stream mine = i % 2 ? t.a : t.b, other = i % 2 ? t.b : t.a;
        CHECK_OK(t.ops->copy_h2d(t.dev, t.addr + at, t.host + at, 64, mine));
        CHECK_OK(t.ops->event_record(t.dev, t.event, mine));
        CHECK_OK(t.ops->event_wait(t.dev, t.event, other));
        CHECK_OK(t.ops->event_wait(t.dev, t.event, 0));
        gm_chaos_stats stats;
        CHECK_OK(gm_device_chaos_stats(t.dev, &stats));
        CHECK(stats.n_spans <= 3 * 61 && stats.n_queued < 5000);
    }
    CHECK_OK(t.ops->stream_sync(t.dev, t.a));
    CHECK_OK(t.ops->stream_sync(t.dev, t.b));
    CHECK(n_faults(&t, "") == 0);
    gm_stream many[64];
    int n = 0;
    while (n < 64 && t.ops->stream_new(t.dev, &many[n]) == GM_OK) {
        CHECK_OK(t.ops->fill(t.dev, t.addr + (size_t)n * 64, 0, 64, many[n]));
        n++;
    }
    CHECK(n == 27 && strstr(gm_last_error(), "streams"));
    for (int i = 0; i < n; i++) {
        CHECK_OK(t.ops->stream_sync(t.dev, many[i]));
        t.ops->stream_free(t.dev, many[i]);
        CHECK_OK(t.ops->stream_new(t.dev, &many[i])); /* the place is free again */
        t.ops->stream_free(t.dev, many[i]);
    }
    CHECK(n_faults(&t, "") == 0);
    bench_free(&t);
}

static void check_fork(void)
{
    bench t;
    bench_with_queued_copy(&t);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK(t.ops->fill(t.dev, t.addr, 0, 1, t.a) == GM_ERR_STATE);
        CHECK(strstr(gm_last_error(), "forked"));
        CHECK(t.ops->event_wait(t.dev, t.event, 0) == GM_ERR_STATE);
        CHECK(t.ops->poison(t.dev, t.addr, 1) == GM_ERR_STATE);
        bench_free(&t); /* runs nothing: the range is not there */
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK_OK(t.ops->stream_sync(t.dev, t.a));
    CHECK(*(unsigned char *)t.addr == 7 && n_faults(&t, "") == 0);
    bench_free(&t);
}

static void check_errors(void)
{
    bench t;
    bench_new(&t, 0);
    gm_device *none = NULL;
    CHECK(gm_device_chaos_new(0, NULL, &(gm_chaos_options){0}, &none) == GM_ERR_ARG);
    gm_chaos_options beyond = {.fault = GM_CHAOS_N_FAULTS};
    CHECK(gm_device_chaos_new(1, NULL, &beyond, &none) == GM_ERR_ARG && !none);
    CHECK(t.ops->fill(t.dev, t.addr, 0, 1, 77) == GM_ERR_ARG && strstr(gm_last_error(), "stream"));
    CHECK(t.ops->event_wait(t.dev, 0, t.a) == GM_ERR_ARG && strstr(gm_last_error(), "event"));
    CHECK(t.ops->event_record(t.dev, t.event + 1000, t.a) == GM_ERR_ARG);
    CHECK(t.ops->event_record(t.dev, t.event, 77) == GM_ERR_ARG);
    CHECK(t.ops->stream_sync(t.dev, 77) == GM_ERR_ARG);
    gm_note_access(t.dev, t.host, 1, true, 77); /* returns nothing: the next wait says it */
    CHECK(t.ops->stream_sync(t.dev, 0) == GM_ERR_ARG && strstr(gm_last_error(), "77"));
    size_t free_bytes, total_bytes;
    CHECK_OK(t.ops->memory(t.dev, &free_bytes, &total_bytes));
    CHECK(free_bytes > 0 && t.dev->is_host && strcmp(t.ops->name, "chaos") == 0);
    bench_free(&t);
    t.ops->free(NULL);
    CHECK_OK(gm_device_host_new(BLOCK_BYTES, NULL, &none));
    uint32_t n;
    const char *first;
    gm_chaos_stats stats;
    CHECK(gm_device_chaos_faults(none, &n, &first) == GM_ERR_ARG);
    CHECK(gm_device_chaos_stats(none, &stats) == GM_ERR_ARG && strstr(gm_last_error(), "host"));
    gm_note_access(none, &n, sizeof n, true, 0); /* others have no such check */
    none->ops->free(none);
}

static void check_parse(void)
{
    gm_chaos_options options;
    CHECK_OK(gm_chaos_parse("18446744073709551615", &options));
    CHECK(options.seed == UINT64_MAX && options.fault == GM_CHAOS_NONE);
    CHECK(options.fault_period == 1);
    for (int fault = 0; fault < GM_CHAOS_N_FAULTS; fault++) {
        char text[64];
        const char *fault_name = gm_chaos_fault_name((gm_chaos_fault)fault);
        snprintf(text, sizeof text, "12:%s", fault_name);
        CHECK_OK(gm_chaos_parse(text, &options));
        CHECK(options.seed == 12 && (int)options.fault == fault && options.fault_period == 1);
        snprintf(text, sizeof text, "3:%s:4294967295", fault_name);
        CHECK_OK(gm_chaos_parse(text, &options));
        CHECK(options.seed == 3 && (int)options.fault == fault);
        CHECK(options.fault_period == UINT32_MAX);
    }
    CHECK(strcmp(gm_chaos_fault_name(GM_CHAOS_N_FAULTS), "unknown") == 0);
    static const char *const wrong[] = {"",
                                        "x",
                                        "-1",
                                        "18446744073709551616",
                                        "1:",
                                        "1:nonsense",
                                        "1:no-h2d:",
                                        "1:no-h2d:0",
                                        "1:no-h2",
                                        "1:no-h2d:1x",
                                        "1:no-h2d:1:",
                                        "1 ",
                                        "1:no-h2d:4294967296"};
    options.seed = 99;
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        CHECK(gm_chaos_parse(wrong[i], &options) == GM_ERR_ARG);
        CHECK(strstr(gm_last_error(), "no-h2d") && strstr(gm_last_error(), "swap"));
        CHECK(options.seed == 99);
    }
}

int main(void)
{
    static homes reference;
    run_reference(&reference);
    check_parse();
    check_errors();
    check_records();
    check_compute_stream();
    check_faults_in_words();
    check_memory_in_use();
    check_foreign_memory();
    check_arithmetic();
    check_memory_is_bounded();
    check_fork();
    check_right_in_every_order(&reference);
    check_missing_waits_are_found(&reference);
    check_seeded_faults_are_caught(&reference);
    puts("test_device_chaos: ok");
    return 0;
}
