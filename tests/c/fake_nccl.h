/* fake_nccl.h - what a test sets and sees of the driver and the NCCL that fake_nccl.c plays. */
#ifndef GM_TEST_FAKE_NCCL_H
#define GM_TEST_FAKE_NCCL_H

#include <stdatomic.h>
#include <stddef.h>

typedef struct gm_fake {
    /* set by the test */
    atomic_int version;
    atomic_int is_device_done; /* events are reached */
    atomic_int driver_error;   /* of cuEventQuery */
    atomic_int polls; /* of the asynchronous state that say "in progress" before async_error */
    atomic_int async_error;
    atomic_int call_result; /* of a collective */
    /* seen */
    atomic_int n_live, n_aborted, n_destroyed; /* communicators */
    atomic_int n_events, n_contexts;
    const void *src;
    void *dst;
    size_t count;
    int dtype, op; /* or the root */
} gm_fake;

#endif
