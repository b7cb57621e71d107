/* timeline.c - the log of timeline.h: entries in issue order, two timed events each.
 *
 * 1. Nothing allocates between new and finish: entries and events exist from the start.
 * 2. Logging cannot fail the work that is logged: the first failure closes the log and is told by
 *    finish.
 * 3. Entries are in issue order, and an entry belongs to the latest tick before it. */
#include "memory/timeline.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct row {
    gm_log_entry entry;
    gm_event start, end; /* 0: never made */
    bool is_ended;
} row;

struct gm_timeline {
    gm_device *device;
    row *rows; /* (capacity,) */
    uint32_t capacity, n;
    uint32_t tick;     /* position of the latest tick */
    uint32_t tick_row; /* of the latest tick, until its pass ends; or GM_NO_ENTRY */
    uint64_t n_dropped;
    bool is_finished;
    gm_status status; /* the first failure */
    char error[256];
};

static const char *const kind_names[GM_N_LOG_KINDS] = {
    "tick",       "fetch",    "state_in",  "grad_in",       "refresh",
    "weight_out", "grad_out", "state_out", "device_update", "host_update",
    "gather",     "reduce",   "held",      "dropped",       "pass_end"};
static const char *const stream_names[GM_N_LOG_STREAMS] = {"compute",   "fetch",  "state", "evict",
                                                           "state_out", "update", "host",  "comm"};

const char *gm_log_kind_name(gm_log_kind kind)
{
    return kind_names[kind];
}

const char *gm_log_stream_name(gm_log_stream stream)
{
    return stream_names[stream];
}

gm_status gm_timeline_new(gm_device *device, uint32_t capacity, gm_timeline **out)
{
    *out = NULL;
    GM_FAIL_IF(capacity == 0, GM_ERR_ARG, "timeline: a capacity of 0 entries: give at least 1");
    gm_timeline *log = calloc(1, sizeof *log);
    row *rows = calloc(capacity, sizeof *rows);
    if (!log || !rows) {
        free(log);
        free(rows);
        return GM_FAIL(GM_ERR_NOMEM, "host memory: no room for a timeline of %u entries", capacity);
    }
    *log = (gm_timeline){
        .device = device, .rows = rows, .capacity = capacity, .tick_row = GM_NO_ENTRY};
    for (uint32_t i = 0; i < capacity; i++) {
        GM_TRY_ELSE(device->ops->event_new(device, true, &rows[i].start), gm_timeline_free(log));
        GM_TRY_ELSE(device->ops->event_new(device, true, &rows[i].end), gm_timeline_free(log));
    }
    *out = log;
    return GM_OK;
}

void gm_timeline_free(gm_timeline *log)
{
    if (!log) {
        return;
    }
    for (uint32_t i = 0; i < log->capacity; i++) {
        gm_free_event(log->device, &log->rows[i].start);
        gm_free_event(log->device, &log->rows[i].end);
    }
    free(log->rows);
    free(log);
}

bool gm_timeline_is_open(const gm_timeline *log)
{
    return log && !log->is_finished && log->status == GM_OK && log->n < log->capacity;
}

static void keep_error(gm_timeline *log, gm_status status)
{
    if (status != GM_OK && log->status == GM_OK) {
        log->status = status;
        (void)snprintf(log->error, sizeof log->error, "%s", gm_last_error());
    }
}

/* The next entry, or NULL when there is no room. */
static gm_log_entry *add(gm_timeline *log, gm_log_kind kind, gm_log_stream where, uint32_t chunk)
{
    if (!gm_timeline_is_open(log)) {
        if (log && !log->is_finished) {
            log->n_dropped++;
        }
        return NULL;
    }
    gm_log_entry *entry = &log->rows[log->n++].entry;
    entry->kind = kind;
    entry->stream = where;
    entry->chunk = chunk;
    entry->tick = log->tick;
    return entry;
}

static void record(gm_timeline *log, gm_event event, gm_stream stream)
{
    keep_error(log, log->device->ops->event_record(log->device, event, stream));
}

uint32_t gm_timeline_begin(gm_timeline *log, gm_log_kind kind, gm_log_stream where, uint32_t chunk,
                           gm_piece piece, size_t bytes, gm_stream stream)
{
    gm_log_entry *entry = add(log, kind, where, chunk);
    if (!entry) {
        return GM_NO_ENTRY;
    }
    entry->piece = piece;
    entry->bytes = bytes;
    uint32_t index = log->n - 1;
    record(log, log->rows[index].start, stream);
    if (log->status != GM_OK) {
        log->n--; /* it has no start */
        log->n_dropped++;
        return GM_NO_ENTRY;
    }
    return index;
}

void gm_timeline_end(gm_timeline *log, uint32_t index, gm_stream stream)
{
    if (!log || index == GM_NO_ENTRY || log->is_finished || log->status != GM_OK) {
        return;
    }
    GM_ASSERT(index < log->n && !log->rows[index].is_ended);
    record(log, log->rows[index].end, stream);
    log->rows[index].is_ended = log->status == GM_OK;
}

void gm_timeline_mark(gm_timeline *log, gm_log_kind kind, uint32_t chunk, gm_piece piece)
{
    GM_ASSERT(kind == GM_LOG_HELD || kind == GM_LOG_DROPPED);
    gm_log_entry *entry = add(log, kind, GM_ON_COMPUTE, chunk);
    if (entry) {
        entry->piece = piece;
    }
}

void gm_timeline_tick(gm_timeline *log, uint32_t tick, gm_tick_kind kind, uint32_t id,
                      const gm_log_memory *memory, gm_stream compute)
{
    if (!log) {
        return;
    }
    log->tick = tick;
    log->tick_row = GM_NO_ENTRY;
    uint32_t index = gm_timeline_begin(log, GM_LOG_TICK, GM_ON_COMPUTE, id, GM_WEIGHT, 0, compute);
    if (index != GM_NO_ENTRY) {
        log->rows[index].entry.tick_kind = kind;
        log->rows[index].entry.memory = *memory;
        log->tick_row = index;
    }
}

void gm_timeline_work(gm_timeline *log, gm_stream compute)
{
    if (log && log->tick_row != GM_NO_ENTRY && !log->rows[log->tick_row].is_ended) {
        gm_timeline_end(log, log->tick_row,
                        compute); /* a tick's second event, as the next tick ends it */
    }
}

void gm_timeline_pass_end(gm_timeline *log, gm_stream compute)
{
    if (log && log->tick_row != GM_NO_ENTRY) {
        log->tick_row = GM_NO_ENTRY;
        (void)gm_timeline_begin(log, GM_LOG_PASS_END, GM_ON_COMPUTE, 0, GM_WEIGHT, 0, compute);
    }
}

static bool is_mark(const gm_log_entry *entry)
{
    return entry->kind == GM_LOG_HELD || entry->kind == GM_LOG_DROPPED;
}

/* Seconds from the event `origin` to another one: negative for work of another stream that ran
 * before it. */
static gm_status seconds_from(gm_timeline *log, gm_event origin, gm_event event, double *out)
{
    const gm_device_ops *ops = log->device->ops;
    *out = 0;
    GM_TRY(ops->event_sync(log->device, event));
    if (event != origin) {
        GM_TRY(ops->event_elapsed(log->device, origin, event, out));
    }
    return GM_OK;
}

static gm_status resolve_one(gm_timeline *log, row *r, gm_event origin)
{
    GM_TRY(seconds_from(log, origin, r->start, &r->entry.start));
    r->entry.end = r->entry.start;
    return r->is_ended ? seconds_from(log, origin, r->end, &r->entry.end) : GM_OK;
}

static void resolve(gm_timeline *log)
{
    gm_event origin = 0;
    for (uint32_t i = 0; i < log->n; i++) {
        if (is_mark(&log->rows[i].entry)) {
            continue;
        }
        origin = origin ? origin : log->rows[i].start;
        gm_status status = resolve_one(log, &log->rows[i], origin);
        if (status != GM_OK) {
            keep_error(log, status);
            log->n_dropped += log->n - i;
            log->n = i;
        }
    }
}

/* A tick lasts until the next one or the end of its pass, the last one until everything is over; a
 * mark is where the entry before it began; the earliest entry begins at 0. */
static void complete(gm_timeline *log)
{
    double first = 0, last = 0;
    for (uint32_t i = 0; i < log->n; i++) {
        const gm_log_entry *entry = &log->rows[i].entry;
        if (!is_mark(entry)) {
            first = entry->start < first ? entry->start : first;
            last = entry->end > last ? entry->end : last;
        }
    }
    double next = last, before = first;
    for (uint32_t i = log->n; i-- > 0;) {
        gm_log_entry *entry = &log->rows[i].entry;
        if (entry->kind == GM_LOG_TICK) {
            entry->work = entry->end;
            entry->end = next > entry->start ? next : entry->start;
        }
        if (entry->kind == GM_LOG_TICK || entry->kind == GM_LOG_PASS_END) {
            next = entry->start;
        }
    }
    for (uint32_t i = 0; i < log->n; i++) {
        gm_log_entry *entry = &log->rows[i].entry;
        if (is_mark(entry)) {
            entry->start = entry->end = before;
        }
        before = entry->start;
    }
    for (uint32_t i = 0; i < log->n; i++) {
        log->rows[i].entry.start -= first;
        log->rows[i].entry.end -= first;
        log->rows[i].entry.work -= first;
    }
}

gm_status gm_timeline_finish(gm_timeline *log)
{
    if (!log || log->is_finished) {
        return GM_OK;
    }
    log->is_finished = true;
    resolve(log);
    complete(log);
    GM_FAIL_IF(log->status != GM_OK, log->status, "timeline: stopped after %u entries: %s", log->n,
               log->error);
    return GM_OK;
}

uint32_t gm_timeline_n(const gm_timeline *log)
{
    return log ? log->n : 0;
}

uint64_t gm_timeline_n_dropped(const gm_timeline *log)
{
    return log ? log->n_dropped : 0;
}

const gm_log_entry *gm_timeline_entry(const gm_timeline *log, uint32_t index)
{
    return log && index < log->n ? &log->rows[index].entry : NULL;
}
