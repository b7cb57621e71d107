/* chaos.h - a host device for tests, whose streams are queues that run late and in a seeded random
 * order, and which finds work that no event orders even when the order it ran in was a lucky one.
 *
 * Stream 0 is the caller's compute, which on the host runs at once: so does work issued on it, once what it was
 * made to wait for has run.  Everything else runs inside later calls, when a random number says so or a
 * synchronisation asks for it.  The functions of host_call run there too, on whatever thread calls.
 *
 * Checked are the bytes of blocks, whatever address shows them, and of pinned host memory.  As with CUDA, a
 * copy from or to host memory that is not pinned has ended when the call returns; pin what a test must see
 * copied late.  New blocks are full of 0xeb.
 *
 * Timed events go by a clock of the device's own, which goes on by 50 us with each record on stream
 * 0 or of a timed event: what is planned from its times is the same on a busy machine. */
#pragma once

#include "device/device.h"

/* What the device does wrong on purpose, to show that a wrong order is found. */
typedef enum gm_chaos_fault {
    GM_CHAOS_NONE,
    GM_CHAOS_NO_WAIT_FOR_COMPUTE, /* a made stream does not wait for an event of stream 0 */
    GM_CHAOS_NO_WAIT_OF_COMPUTE,  /* stream 0 does not wait for an event */
    GM_CHAOS_NO_WAIT_BETWEEN,     /* a made stream does not wait for another's event */
    GM_CHAOS_EARLY_RECORD,        /* an event is recorded before its stream's last operation */
    GM_CHAOS_NO_H2D,              /* a copy does not happen */
    GM_CHAOS_NO_D2H,
    GM_CHAOS_HALF_COPY,     /* of any direction */
    GM_CHAOS_EARLY_CALL,    /* a host call does not wait for its stream's earlier work */
    GM_CHAOS_EARLY_RELEASE, /* later work of the stream does not wait for a host call */
    GM_CHAOS_NO_EVENT_SYNC, /* the host does not wait */
    GM_CHAOS_NO_STREAM_SYNC,
    GM_CHAOS_ADAM_TWICE,
    GM_CHAOS_SWAP, /* an operation runs behind the next one of its stream */
    GM_CHAOS_N_FAULTS
} gm_chaos_fault;

typedef struct gm_chaos_options {
    uint64_t seed;
    gm_chaos_fault fault;
    uint32_t fault_period; /* every n-th occurrence that could matter; 0 and 1: each */
    /* NULL, or told of each fault that is found, with `series` */
    void (*on_fault)(uint32_t series, const char *text);
    uint32_t series;
} gm_chaos_options;

typedef struct gm_chaos_stats {
    uint64_t n_operations;     /* that have run */
    uint64_t order_hash;       /* of the order in which they ran; calls and seeds decide it */
    uint64_t n_faults_applied; /* of options.fault */
    size_t n_queued;           /* that have not run */
    size_t n_spans;            /* what the memory used by the checks grows with */
} gm_chaos_stats;

gm_status gm_device_chaos_new(size_t block_bytes, gm_workers *pool, const gm_chaos_options *options,
                              gm_device **out);
/* Pairs of accesses that nothing orders, and memory taken away while it was in use: how many so far, and the
 * first one in words ("" if none; valid until the next call). */
gm_status gm_device_chaos_faults(gm_device *dev, uint32_t *out_n, const char **out_first);
gm_status gm_device_chaos_stats(gm_device *dev, gm_chaos_stats *out);

const char *gm_chaos_fault_name(gm_chaos_fault fault);
/* "seed[:fault[:period]]", the fault by its name.  GM_ERR_ARG lists the names. */
gm_status gm_chaos_parse(const char *text, gm_chaos_options *out);
