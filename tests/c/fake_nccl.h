/* fake_nccl.h - what a test sets and sees of the driver and the NCCL that fake_nccl.c plays. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct gm_fake {
    /* set by the test */
    atomic_int version;
    atomic_int is_device_done; /* events are reached, numbers written; gm_fake_finish sets it */
    atomic_int driver_error;   /* of cuEventQuery */
    atomic_int polls; /* of the asynchronous state that say "in progress" before async_error */
    atomic_int async_error;
    atomic_int call_result;  /* of a collective */
    atomic_bool has_no_room; /* the host */
    atomic_bool
        is_full; /* the stream's queue: who puts a number there waits, until gm_fake_finish */
    /* seen */
    atomic_int n_live, n_aborted, n_destroyed; /* communicators */
    atomic_int n_waiting;                      /* threads, in the driver */
    atomic_int n_events, n_contexts, n_buffers;
    const void *src;
    void *dst;
    size_t count;
    int dtype, op; /* or the root */
} gm_fake;

void gm_fake_finish(void);
