/* fake_nccl.h - what a test sets and sees of the driver and the NCCL that fake_nccl.c plays. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <pthread.h>

enum { GM_FAKE_RANKS = 3 };

typedef struct gm_fake_ranks {
    pthread_barrier_t meeting;
    const void *src[GM_FAKE_RANKS];
} gm_fake_ranks;

typedef struct gm_fake {
    /* set by the test */
    atomic_int version;
    atomic_int is_device_done; /* events are reached, numbers written; gm_fake_finish sets it */
    atomic_int driver_error;   /* of cuEventQuery */
    atomic_int polls; /* of the asynchronous state that say "in progress" before async_error */
    atomic_int async_error;
    atomic_int call_result; /* of a collective */
    atomic_bool has_other;  /* `other` takes part in maxima of 4 words: another rank */
    uint64_t other[4];
    gm_fake_ranks *ranks;     /* GM_FAKE_RANKS, threads that meet; NULL: one rank alone */
    atomic_bool drops_copies; /* on the device */
    atomic_ulong kept_out;    /* a thread that may not come in while one waits in the driver */
    atomic_bool is_locked;    /* nobody asks for an event while a thread waits in the driver */
    atomic_int n_allocs;      /* of the device that succeed before one fails, if it is not 0 */
    atomic_int n_openings;    /* that succeed before one fails, if it is not 0 */
    /* seen */
    atomic_int n_gathers;                      /* of NCCL, between threads */
    atomic_int n_live, n_aborted, n_destroyed; /* communicators */
    atomic_int n_waiting;                      /* threads, in the driver */
    atomic_int n_events, n_contexts, n_buffers, n_copies, n_opened;
    uint64_t words[4]; /* the last maximum, before it is taken */
    const void *src;
    void *dst;
    size_t count;
    int dtype, op; /* or the root */
} gm_fake;

void gm_fake_finish(void);
