/* comm_impl.h - what the files of comm share: a collective in words, the table of an
 * implementation, the last collectives, and the first failure. */
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "comm/comm.h"

typedef enum gm_comm_kind {
    GM_COMM_ALL_GATHER,
    GM_COMM_REDUCE_SCATTER,
    GM_COMM_ALL_REDUCE,
    GM_COMM_N_KINDS,
} gm_comm_kind;

typedef struct gm_comm_call {
    uint64_t number; /* 1 for the communicator's first collective */
    gm_comm_kind kind;
    uintptr_t base;
    size_t count;        /* elements of a shard, or of everything where there are no shards */
    bool is_bytes;       /* elements are bytes, dtype says nothing */
    gm_comm_dtype dtype; /* of the elements */
    gm_comm_op op;
    uint64_t label;
    uint64_t hash; /* of all collectives before this one */
} gm_comm_call;

enum { GM_COMM_N_RECORDS = 512 };

typedef struct gm_comm_ops {
    const char *name; /* "nccl", "host" or "paper" */
    /* Arguments are right, there is more than one rank and something to do.  A failure is recorded
     * with gm_comm_break.  NULL: no byte moves. */
    gm_status (*issue)(gm_comm *comm, const gm_comm_call *call, gm_stream stream);
    gm_status (*attach)(gm_comm *comm, gm_device *dev);
    /* Looks for a failure and records it; whether a collective is still under way.  NULL: nobody
     * looks. */
    bool (*check)(gm_comm *comm);
    void (*end)(gm_comm *comm); /* after a failure; any thread, many times; may be NULL */
    void (*free)(gm_comm *comm);
} gm_comm_ops;

struct gm_comm {
    const gm_comm_ops *ops;
    int rank, size;
    int *names, n_named; /* for texts; NULL: rank r of size */
    pid_t owner;
    uint64_t label;       /* of the next collectives */
    atomic_int failed;    /* a gm_status; set once, after `failure` is complete */
    pthread_mutex_t lock; /* of the first failure */
    uint64_t failed_at;   /* its collective, or 0 */
    char failure[1000];   /* fits into gm_last_error() */

    pthread_mutex_t record; /* of what follows; held while the namer runs; the last to be taken */
    uint64_t n_calls, hash; /* the collectives so far */
    gm_comm_call records[GM_COMM_N_RECORDS]; /* number n at n % N */
    gm_comm_namer namer;
    void *namer_context;
    void (*drop_context)(void *context); /* when no namer will need it; may be NULL */
};

/* A communicator of `bytes`, all zeros but what this header knows of it.  GM_ERR_ARG for a rank or
 * a size that cannot be. */
gm_status gm_comm_new(const gm_comm_ops *ops, size_t bytes, int rank, int size, gm_comm **out);
void gm_comm_release(gm_comm *comm); /* the last of an implementation's free */

size_t gm_comm_element_bytes(const gm_comm_call *call);
/* All bytes that the collective reads or writes on a rank. */
size_t gm_comm_call_bytes(const gm_comm *comm, const gm_comm_call *call);
/* "reduce_scatter number 7 of 3 x 512 bytes (sum of bf16; gradients of chunk 4, step 3)" */
void gm_comm_describe(gm_comm *comm, const gm_comm_call *call, char out[GM_COMM_WORDS]);
/* Records the first failure: "CALL, rank 0 of 3: TEXT", without CALL where call is NULL.  Returns
 * the status of the first failure, its text in gm_last_error(). */
gm_status gm_comm_break(gm_comm *comm, const gm_comm_call *call, gm_status status,
                        const char *format, ...) __attribute__((format(printf, 4, 5), cold));
bool gm_comm_has_failed(gm_comm *comm);
/* The recorded failure of a communicator that has one. */
gm_status gm_comm_failure(gm_comm *comm);
