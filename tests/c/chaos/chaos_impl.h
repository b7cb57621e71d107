/* chaos_impl.h - what the files of the chaos device share: its body, and the calls that are not in
 * chaos.c. */
#pragma once

#include "chaos/chaos.h"
#include "chaos/queue.h"
#include "device/ops.h"

typedef struct gm_chaos_range {
    uintptr_t address;
    size_t bytes;
    gm_block *blocks; /* (bytes / block_bytes,) 0: shows nothing */
} gm_chaos_range;

typedef struct gm_chaos_event {
    bool is_used, is_timed;
    uint32_t generation;   /* no two events have the same handle */
    gm_chaos_mark *latest; /* owned reference; NULL: never recorded, which counts as reached */
} gm_chaos_event;

struct gm_chaos_device {
    gm_device base;   /* first: a gm_device * is a gm_chaos_device * */
    gm_device *inner; /* owned host device: the memory, and the work itself */
    gm_chaos_options options;
    uint64_t n_occurrences, n_applied; /* of options.fault */
    uint64_t random;
    uint32_t mood, mood_left;
    gm_chaos_queue queues[GM_CHAOS_N_QUEUES];
    size_t n_queued;
    gm_stream last_stream;
    uint64_t last_number, n_run, order_hash;
    uint64_t n_records; /* on stream 0, and of timed events: their clock */
    bool is_running;    /* an operation: a host call must not call the device */
    gm_chaos_event *events;
    size_t n_events;
    gm_chaos_range *ranges; /* ascending */
    size_t n_ranges, range_capacity;
    gm_chaos_use *pinned; /* is_write: unused */
    size_t n_pinned, pinned_capacity;
    uintptr_t view;  /* an address range of one block, to fill new blocks through */
    gm_order *bytes; /* by block and offset, and by host address */
    gm_order *shown; /* by device address: what must be over before the mapping changes */
    size_t forget_at;
    uint32_t n_faults;
    char first_fault[640];
    gm_status failed; /* of the first operation that failed when it ran: every later sync says so */
    char failed_text[512];
};

static inline gm_chaos_device *gm_chaos_self(gm_device *dev)
{
    return (gm_chaos_device *)dev;
}

/* fault.c: is the seeded fault to be applied to this occurrence? */
bool gm_chaos_pick(gm_chaos_device *dev, gm_chaos_fault fault);

/* track.c */
#define GM_CHAOS_KEY_BLOCKS ((uint64_t)1 << 63) /* of blocks in the map `bytes` */
/* One access of one run of bytes; a fault is counted if nothing orders it behind an earlier one. */
gm_status gm_chaos_note(gm_chaos_device *dev, gm_order *order, const gm_access *access,
                        const gm_clock *clock, uint64_t begin, uint64_t end);
gm_chaos_range *gm_chaos_range_at(gm_chaos_device *dev, uintptr_t address);
gm_status gm_chaos_range_add(gm_chaos_device *dev, uintptr_t address, size_t bytes);
void gm_chaos_range_remove(gm_chaos_device *dev, uintptr_t address);
bool gm_chaos_is_pinned(const gm_chaos_device *dev, uintptr_t address, size_t bytes);
/* Notes what the operation uses; the clock includes its own tick of `actor`.  GM_ERR_STATE, and nothing noted,
 * when an address shows nothing. */
gm_status gm_chaos_track(gm_chaos_device *dev, const gm_chaos_op *op, uint32_t actor,
                         const gm_clock *clock);
void gm_chaos_fault_found(gm_chaos_device *dev, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* issue.c */
/* A record of the mark, or a wait for it.  is_early: in front of the last operation that has not run. */
gm_status gm_chaos_append_mark(gm_chaos_device *dev, gm_chaos_queue *queue, gm_chaos_kind kind,
                               gm_chaos_mark *mark, bool is_early);
/* Checks the operation against all before it and queues it.  Takes the operation over. */
gm_status gm_chaos_put(gm_chaos_device *dev, gm_chaos_queue *queue, gm_chaos_op *op);
/* Puts what GM_CHAOS_SWAP holds back into its queue. */
gm_status gm_chaos_put_held(gm_chaos_device *dev, gm_chaos_queue *queue);

/* The host takes away what has these keys in one of the maps: nothing that uses it may be under way.  If something is,
 * that is a fault, and all work is run. */
gm_status gm_chaos_claim(gm_chaos_device *dev, gm_order *order, const char *what, uint64_t begin,
                         size_t bytes);

/* memory.c: entries of the table of calls, and what each call begins with. */
gm_status gm_chaos_check_owner(gm_chaos_device *dev);
GM_DEVICE_MEMORY(GM_DEVICE_DECLARED, gm_chaos)

/* sync.c: entries of the table of calls. */
GM_DEVICE_SYNC(GM_DEVICE_DECLARED, gm_chaos)
