/* timeline.h - a log of what the engine issued and when it ran: for people, never for decisions.
 *
 *     gm_timeline_new(device, 1 << 14, &log);
 *     uint32_t entry = gm_timeline_begin(log, GM_LOG_FETCH, GM_ON_FETCH, chunk, GM_WEIGHT, bytes,
 *     stream); ... issue the copy on `stream` ... gm_timeline_end(log, entry, stream);
 *     gm_timeline_finish(log);
 *
 * Every call takes NULL for a log that is off, and then does nothing.  Begin is called after the
 * waits of the work have been issued, so that an entry lasts as long as its work and not as long as
 * what it waited for.
 *
 * Threads: one caller at a time (the engine's lock). */
#pragma once

#include "base/base.h"
#include "device/device.h"
#include "plan/plan.h"

typedef struct gm_timeline gm_timeline; /* opaque */

typedef enum gm_log_kind {
    /* A unit entered, a chunk touched, a gradient complete; until the next, or its pass ends. */
    GM_LOG_TICK,
    GM_LOG_FETCH,
    GM_LOG_STATE_IN,
    GM_LOG_GRAD_IN,
    GM_LOG_REFRESH,    /* weights updated on the host, onto a copy that stays resident */
    GM_LOG_WEIGHT_OUT, /* written home; they leave the device with GM_LOG_DROPPED */
    GM_LOG_GRAD_OUT,
    GM_LOG_STATE_OUT,
    GM_LOG_DEVICE_UPDATE,
    GM_LOG_HOST_UPDATE,
    GM_LOG_GATHER,  /* of all ranks' weights */
    GM_LOG_REDUCE,  /* of a chunk's gradients, over the ranks */
    GM_LOG_HELD,    /* mark: the piece is on the device, as the log begins or without a copy */
    GM_LOG_DROPPED, /* mark: the piece is no longer on the device; no bytes had to move */
    /* On compute, without length: what follows until the next tick belongs to no unit. */
    GM_LOG_PASS_END,
    GM_N_LOG_KINDS
} gm_log_kind;

/* Which stream, by its task; one row of a chart each. */
typedef enum gm_log_stream {
    GM_ON_COMPUTE,
    GM_ON_FETCH,
    GM_ON_STATE,
    GM_ON_EVICT,
    GM_ON_STATE_OUT,
    GM_ON_UPDATE,
    GM_ON_HOST,
    GM_ON_COMM,
    GM_N_LOG_STREAMS
} gm_log_stream;

/* Bytes at a tick.  All but `host` are on the device, and add up to what this process holds
 * there. */
typedef struct gm_log_memory {
    size_t weights[GM_N_CLASSES]; /* live ones by class; without a plan: all resident R, else C2 */
    size_t states, grads;
    size_t gathered, unreduced;
    size_t outside;     /* torch and others of this process */
    size_t free_blocks; /* taken from the device, showing nothing that is live */
    size_t host;
} gm_log_memory;

typedef struct gm_log_entry {
    gm_log_kind kind;
    gm_log_stream stream;
    uint32_t chunk; /* of a tick: the unit (GM_TICK_ENTER) or chunk */
    gm_piece piece;
    gm_tick_kind tick_kind; /* of a tick */
    uint32_t tick;          /* position in its pass of the tick under which this was issued */
    size_t bytes;           /* moved or updated */
    double start, end;      /* seconds since the earliest entry; after gm_timeline_finish */
    double work; /* of a tick: when its own work could begin, all that it waited for being there */
    gm_log_memory memory; /* of a tick */
} gm_log_entry;

#define GM_NO_ENTRY UINT32_MAX

/* Room for `capacity` (> 0) entries and their events, all made now.  The device is borrowed and
 * must outlive the log. */
gm_status gm_timeline_new(gm_device *device, uint32_t capacity, gm_timeline **out);
void gm_timeline_free(gm_timeline *timeline);

/* Handle for gm_timeline_end; GM_NO_ENTRY when the log is off or full. */
uint32_t gm_timeline_begin(gm_timeline *timeline, gm_log_kind kind, gm_log_stream where,
                           uint32_t chunk, gm_piece piece, size_t bytes, gm_stream stream);
void gm_timeline_end(gm_timeline *timeline, uint32_t entry, gm_stream stream);
/* GM_LOG_HELD and GM_LOG_DROPPED: something that takes no time. */
void gm_timeline_mark(gm_timeline *timeline, gm_log_kind kind, uint32_t chunk, gm_piece piece);
/* `compute` is the stream of the units. */
void gm_timeline_tick(gm_timeline *timeline, uint32_t tick, gm_tick_kind kind, uint32_t id,
                      const gm_log_memory *memory, gm_stream compute);
/* What the latest tick waits for has been issued: its own work is next.  Later calls under the same
 * tick do nothing. */
void gm_timeline_work(gm_timeline *timeline, gm_stream compute);
void gm_timeline_pass_end(gm_timeline *timeline, gm_stream compute);
/* Is the log on, and does it take more?  Saves counting the memory of a tick for nothing. */
bool gm_timeline_is_open(const gm_timeline *timeline);

/* The host waits for everything logged; times become valid and the log takes no more.  An entry
 * that was begun and not ended has no length.  Fails with the first failure of an event; what was
 * logged before it is kept. */
gm_status gm_timeline_finish(gm_timeline *timeline);
uint32_t gm_timeline_n(const gm_timeline *timeline);
/* Entries that came when the log was full. */
uint64_t gm_timeline_n_dropped(const gm_timeline *timeline);
const gm_log_entry *gm_timeline_entry(const gm_timeline *timeline, uint32_t index);
const char *gm_log_kind_name(gm_log_kind kind);
const char *gm_log_stream_name(gm_log_stream stream);
