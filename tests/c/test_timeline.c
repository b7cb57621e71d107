/* test_timeline.c - the timeline on a device whose clock the test sets, and on real ones. */
#include "memory/timeline.h"

#include <string.h>

#include "check.h"
#include "chaos/chaos.h"

enum { N_EVENTS = 64, N_STREAMS = 4 };

/* Each stream has a clock of its own, as streams that run beside each other do. */
typedef struct fake_device {
    gm_device base;
    double now[N_STREAMS], times[N_EVENTS];
    bool is_alive[N_EVENTS], is_recorded[N_EVENTS], is_synced[N_EVENTS];
    int n_made, n_alive, n_recorded;
    int fail_new_after, fail_record_after, fail_elapsed_of; /* -1: never */
} fake_device;

static fake_device *fake_of(gm_device *dev)
{
    return (fake_device *)dev;
}

static gm_status fake_event_new(gm_device *dev, bool is_timed, gm_event *out)
{
    fake_device *fake = fake_of(dev);
    CHECK(is_timed && fake->n_made + 1 < N_EVENTS);
    if (fake->fail_new_after == fake->n_made) {
        return GM_FAIL(GM_ERR_DEVICE, "no more events");
    }
    *out = (gm_event)++fake->n_made;
    fake->is_alive[*out] = true;
    fake->n_alive++;
    return GM_OK;
}

static void fake_event_free(gm_device *dev, gm_event event)
{
    fake_device *fake = fake_of(dev);
    CHECK(event > 0 && event < N_EVENTS && fake->is_alive[event]);
    fake->is_alive[event] = false;
    fake->n_alive--;
}

static gm_status fake_event_record(gm_device *dev, gm_event event, gm_stream stream)
{
    fake_device *fake = fake_of(dev);
    CHECK(fake->is_alive[event] && stream < N_STREAMS && !fake->is_recorded[event]);
    if (fake->fail_record_after == fake->n_recorded) {
        return GM_FAIL(GM_ERR_DEVICE, "the stream is gone");
    }
    fake->n_recorded++;
    fake->is_recorded[event] = true;
    fake->times[event] = fake->now[stream];
    return GM_OK;
}

static gm_status fake_event_sync(gm_device *dev, gm_event event)
{
    CHECK(fake_of(dev)->is_recorded[event]);
    fake_of(dev)->is_synced[event] = true;
    return GM_OK;
}

static gm_status fake_event_elapsed(gm_device *dev, gm_event start, gm_event end, double *seconds)
{
    fake_device *fake = fake_of(dev);
    CHECK(fake->is_synced[start] && fake->is_synced[end]);
    if (fake->fail_elapsed_of == (int)end) {
        return GM_FAIL(GM_ERR_DEVICE, "the event is gone");
    }
    *seconds = fake->times[end] - fake->times[start];
    return GM_OK;
}

static const gm_device_ops fake_ops = {
    .name = "fake",
    .event_new = fake_event_new,
    .event_free = fake_event_free,
    .event_record = fake_event_record,
    .event_sync = fake_event_sync,
    .event_elapsed = fake_event_elapsed,
};

static fake_device fake_new(void)
{
    return (fake_device){.base = {.ops = &fake_ops},
                         .now = {100, 100, 100, 100},
                         .fail_new_after = -1,
                         .fail_record_after = -1,
                         .fail_elapsed_of = -1};
}

/* One span of `seconds` on a stream. */
static uint32_t span(fake_device *fake, gm_timeline *log, gm_log_kind kind, gm_log_stream where,
                     uint32_t chunk, gm_stream stream, double seconds)
{
    uint32_t entry = gm_timeline_begin(log, kind, where, chunk, GM_WEIGHT, 1000 + chunk, stream);
    fake->now[stream] += seconds;
    gm_timeline_end(log, entry, stream);
    return entry;
}

static void check_times_and_order(void)
{
    fake_device fake = fake_new();
    gm_timeline *log;
    CHECK_OK(gm_timeline_new(&fake.base, 8, &log));
    CHECK(fake.n_made == 16 && gm_timeline_is_open(log));
    gm_log_memory memory = {.weights = {1, 2, 3, 4, 5},
                            .states = 6,
                            .grads = 7,
                            .outside = 8,
                            .free_blocks = 9,
                            .host = 10};
    gm_timeline_mark(log, GM_LOG_HELD, 7, GM_STATE);
    gm_timeline_tick(log, 3, GM_TICK_ENTER, 11, &memory, 0);
    fake.now[1] = 98; /* a stream that has run ahead of compute */
    CHECK(span(&fake, log, GM_LOG_FETCH, GM_ON_FETCH, 5, 1, 1) == 2);
    fake.now[0] = 103;
    gm_timeline_work(log, 0);
    fake.now[0] = 104;
    gm_timeline_work(log, 0); /* it has begun */
    gm_timeline_tick(log, 4, GM_TICK_GRAD, 12, &memory, 0);
    uint32_t first = gm_timeline_begin(log, GM_LOG_STATE_OUT, GM_ON_STATE_OUT, 6, GM_STATE, 64, 2);
    CHECK(span(&fake, log, GM_LOG_HOST_UPDATE, GM_ON_HOST, 8, 3, 8) == 5); /* ends out of order */
    fake.now[2] += 2;
    gm_timeline_end(log, first, 2);
    gm_timeline_mark(log, GM_LOG_DROPPED, 6, GM_WEIGHT);
    CHECK(fake.n_made == 16); /* nothing is made while logging */
    CHECK_OK(gm_timeline_finish(log));
    CHECK(!gm_timeline_is_open(log) && gm_timeline_n(log) == 7);
    CHECK(gm_timeline_begin(log, GM_LOG_FETCH, GM_ON_FETCH, 0, GM_WEIGHT, 1, 1) == GM_NO_ENTRY);
    CHECK_OK(gm_timeline_finish(log)); /* once is enough */

    static const struct {
        gm_log_kind kind;
        gm_log_stream stream;
        uint32_t chunk, tick;
        double start, end;
    } wanted[7] = {
        {GM_LOG_HELD, GM_ON_COMPUTE, 7, 0, 0, 0},
        {GM_LOG_TICK, GM_ON_COMPUTE, 11, 3, 2, 6},
        {GM_LOG_FETCH, GM_ON_FETCH, 5, 3, 0, 1},
        {GM_LOG_TICK, GM_ON_COMPUTE, 12, 4, 6, 10}, /* to the end of everything */
        {GM_LOG_STATE_OUT, GM_ON_STATE_OUT, 6, 4, 2, 4},
        {GM_LOG_HOST_UPDATE, GM_ON_HOST, 8, 4, 2, 10},
        {GM_LOG_DROPPED, GM_ON_COMPUTE, 6, 4, 2, 2},
    };
    for (uint32_t i = 0; i < 7; i++) {
        const gm_log_entry *entry = gm_timeline_entry(log, i);
        CHECK(entry->kind == wanted[i].kind && entry->stream == wanted[i].stream);
        CHECK(entry->chunk == wanted[i].chunk && entry->tick == wanted[i].tick);
        CHECK(entry->start == wanted[i].start && entry->end == wanted[i].end);
    }
    CHECK(gm_timeline_entry(log, 2)->bytes == 1005 && gm_timeline_entry(log, 0)->piece == GM_STATE);
    CHECK(gm_timeline_entry(log, 3)->tick_kind == GM_TICK_GRAD);
    CHECK(gm_timeline_entry(log, 1)->work == 5 && gm_timeline_entry(log, 3)->work == 6);
    CHECK(memcmp(&gm_timeline_entry(log, 3)->memory, &memory, sizeof memory) == 0);
    CHECK(!gm_timeline_entry(log, 7) && gm_timeline_n_dropped(log) == 0);
    gm_timeline_free(log);
    CHECK(fake.n_alive == 0);
}

static void check_end_of_a_pass(void)
{
    fake_device fake = fake_new();
    gm_timeline *log;
    gm_log_memory memory = {0};
    CHECK_OK(gm_timeline_new(&fake.base, 8, &log));
    gm_timeline_pass_end(log, 0); /* there was no tick */
    for (uint32_t pass = 0; pass < 2; pass++) {
        fake.now[0] = 100 + 10 * pass;
        gm_timeline_tick(log, 0, GM_TICK_ENTER, 1, &memory, 0);
        fake.now[0] += 1;
        gm_timeline_work(log, 0);
        fake.now[0] += 3;
        gm_timeline_pass_end(log, 0);
        gm_timeline_work(log, 0);
        gm_timeline_pass_end(log, 0);
    }
    CHECK_OK(gm_timeline_finish(log));
    CHECK(gm_timeline_n(log) == 4);
    for (uint32_t pass = 0; pass < 2; pass++) {
        const gm_log_entry *tick = gm_timeline_entry(log, 2 * pass);
        const gm_log_entry *end = gm_timeline_entry(log, 2 * pass + 1);
        CHECK(tick->start == 10 * pass && tick->work == tick->start + 1);
        CHECK(end->kind == GM_LOG_PASS_END && end->start == end->end);
        CHECK(tick->end == end->start && end->start == tick->start + 4);
    }
    gm_timeline_free(log);
    CHECK(fake.n_alive == 0);
}

static void check_full_and_unfinished(void)
{
    fake_device fake = fake_new();
    gm_timeline *log;
    CHECK_OK(gm_timeline_new(&fake.base, 3, &log));
    gm_log_memory memory = {0};
    uint32_t open = gm_timeline_begin(log, GM_LOG_FETCH, GM_ON_FETCH, 0, GM_WEIGHT, 1, 1);
    CHECK(open == 0);
    (void)span(&fake, log, GM_LOG_FETCH, GM_ON_FETCH, 1, 1, 1);
    CHECK(gm_timeline_is_open(log));
    gm_timeline_tick(log, 0, GM_TICK_TOUCH, 1, &memory, 0);
    CHECK(!gm_timeline_is_open(log));
    CHECK(span(&fake, log, GM_LOG_FETCH, GM_ON_FETCH, 2, 1, 1) == GM_NO_ENTRY);
    gm_timeline_tick(log, 1, GM_TICK_TOUCH, 2, &memory, 0);
    gm_timeline_mark(log, GM_LOG_DROPPED, 2, GM_WEIGHT);
    CHECK(fake.n_recorded == 4); /* a full log touches no stream */
    CHECK_OK(gm_timeline_finish(log));
    CHECK(gm_timeline_n(log) == 3 && gm_timeline_n_dropped(log) == 3);
    CHECK(gm_timeline_entry(log, 0)->start == 0 && gm_timeline_entry(log, 0)->end == 0);
    CHECK(gm_timeline_entry(log, 1)->end == 1);
    gm_timeline_free(log);

    CHECK_OK(gm_timeline_new(&fake.base, 1, &log));
    CHECK_OK(gm_timeline_finish(log)); /* an empty log */
    CHECK(gm_timeline_n(log) == 0);
    gm_timeline_free(log);
    CHECK(fake.n_alive == 0);
}

static void check_failures(void)
{
    fake_device fake = fake_new();
    gm_timeline *log;
    CHECK(gm_timeline_new(&fake.base, 0, &log) == GM_ERR_ARG && !log);
    fake.fail_new_after = 3;
    CHECK(gm_timeline_new(&fake.base, 4, &log) == GM_ERR_DEVICE && !log);
    CHECK(fake.n_alive == 0);

    fake = fake_new();
    fake.fail_record_after = 3; /* the second entry has a start and no end */
    CHECK_OK(gm_timeline_new(&fake.base, 4, &log));
    CHECK(span(&fake, log, GM_LOG_FETCH, GM_ON_FETCH, 0, 1, 2) == 0);
    CHECK(span(&fake, log, GM_LOG_FETCH, GM_ON_FETCH, 1, 1, 2) == 1);
    CHECK(span(&fake, log, GM_LOG_FETCH, GM_ON_FETCH, 2, 1, 2) == GM_NO_ENTRY);
    CHECK(gm_timeline_finish(log) == GM_ERR_DEVICE);
    CHECK(strstr(gm_last_error(), "the stream is gone") && strstr(gm_last_error(), "2 entries"));
    CHECK(gm_timeline_n(log) == 2 && gm_timeline_entry(log, 0)->end == 2);
    CHECK(gm_timeline_entry(log, 1)->start == 2 && gm_timeline_entry(log, 1)->end == 2);
    gm_timeline_free(log);

    fake = fake_new();
    fake.fail_record_after = 2; /* the second entry has no start */
    CHECK_OK(gm_timeline_new(&fake.base, 4, &log));
    (void)span(&fake, log, GM_LOG_FETCH, GM_ON_FETCH, 0, 1, 2);
    CHECK(span(&fake, log, GM_LOG_FETCH, GM_ON_FETCH, 1, 1, 2) == GM_NO_ENTRY);
    CHECK(gm_timeline_finish(log) == GM_ERR_DEVICE && gm_timeline_n(log) == 1);
    CHECK(gm_timeline_n_dropped(log) == 1);
    gm_timeline_free(log);

    fake = fake_new();
    fake.fail_elapsed_of = 3; /* the second entry's start */
    CHECK_OK(gm_timeline_new(&fake.base, 4, &log));
    (void)span(&fake, log, GM_LOG_FETCH, GM_ON_FETCH, 0, 1, 2);
    (void)span(&fake, log, GM_LOG_FETCH, GM_ON_FETCH, 1, 1, 2);
    CHECK(gm_timeline_finish(log) == GM_ERR_DEVICE && gm_timeline_n(log) == 1);
    CHECK(strstr(gm_last_error(), "the event is gone"));
    gm_timeline_free(log);
    CHECK(fake.n_alive == 0);
}

static void check_off(void)
{
    gm_log_memory memory = {0};
    CHECK(gm_timeline_begin(NULL, GM_LOG_FETCH, GM_ON_FETCH, 0, GM_WEIGHT, 1, 1) == GM_NO_ENTRY);
    gm_timeline_end(NULL, GM_NO_ENTRY, 0);
    gm_timeline_end(NULL, 0, 0);
    gm_timeline_mark(NULL, GM_LOG_HELD, 0, GM_WEIGHT);
    gm_timeline_tick(NULL, 0, GM_TICK_ENTER, 0, &memory, 0);
    CHECK(!gm_timeline_is_open(NULL) && gm_timeline_n(NULL) == 0);
    CHECK(gm_timeline_n_dropped(NULL) == 0 && !gm_timeline_entry(NULL, 0));
    CHECK_OK(gm_timeline_finish(NULL));
    gm_timeline_free(NULL);
}

static void check_names(void)
{
    CHECK(strcmp(gm_log_kind_name(GM_LOG_TICK), "tick") == 0);
    CHECK(strcmp(gm_log_kind_name(GM_LOG_WEIGHT_OUT), "weight_out") == 0);
    CHECK(strcmp(gm_log_kind_name(GM_LOG_HOST_UPDATE), "host_update") == 0);
    CHECK(strcmp(gm_log_kind_name(GM_LOG_DROPPED), "dropped") == 0);
    CHECK(strcmp(gm_log_stream_name(GM_ON_STATE_OUT), "state_out") == 0);
    CHECK(strcmp(gm_log_stream_name(GM_ON_HOST), "host") == 0);
}

static void spin(void *context)
{
    volatile double *sum = context;
    for (int k = 0; k < 100000; k++) {
        *sum = *sum + k;
    }
}

/* On the chaos device what is issued runs late, and ticks, on compute, do not wait for it. */
static void check_device(gm_device *dev, bool runs_at_once)
{
    gm_stream stream;
    CHECK_OK(dev->ops->stream_new(dev, &stream));
    gm_timeline *log;
    CHECK_OK(gm_timeline_new(dev, 16, &log));
    gm_log_memory memory = {.host = 1};
    volatile double sum = 0;
    for (uint32_t i = 0; i < 4; i++) {
        gm_timeline_tick(log, i, GM_TICK_ENTER, i, &memory, 0);
        uint32_t entry =
            gm_timeline_begin(log, GM_LOG_HOST_UPDATE, GM_ON_HOST, i, GM_STATE, 1, stream);
        CHECK_OK(dev->ops->host_call(dev, spin, (void *)&sum, stream));
        gm_timeline_end(log, entry, stream);
    }
    CHECK_OK(gm_timeline_finish(log));
    CHECK(gm_timeline_n(log) == 8);
    double before = 0;
    for (uint32_t i = 0; i < 8; i += 2) {
        const gm_log_entry *tick = gm_timeline_entry(log, i), *work = gm_timeline_entry(log, i + 1);
        CHECK(tick->start <= work->start && before <= work->start && work->start < work->end);
        CHECK(!runs_at_once || work->end <= tick->end);
        CHECK(i == 6 || tick->end == gm_timeline_entry(log, i + 2)->start);
        CHECK(i != 6 || tick->end >= work->end);
        before = work->end;
    }
    CHECK(gm_timeline_entry(log, 0)->start == 0);
    gm_timeline_free(log);
    dev->ops->stream_free(dev, stream);
    dev->ops->free(dev);
}

static void check_devices(void)
{
    gm_device *dev;
    CHECK_OK(gm_device_host_new(4096, NULL, &dev));
    check_device(dev, true);
    for (uint64_t seed = 0; seed < 10; seed++) {
        gm_chaos_options options = {.seed = seed};
        CHECK_OK(gm_device_chaos_new(4096, NULL, &options, &dev));
        check_device(dev, false);
    }
}

int main(void)
{
    check_times_and_order();
    check_end_of_a_pass();
    check_full_and_unfinished();
    check_failures();
    check_off();
    check_names();
    check_devices();
    puts("test_timeline: ok");
    return 0;
}
