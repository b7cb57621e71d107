/* comm.h - collectives between the ranks of one training run, in place, on streams of the device.
 *
 * Implementations: gm_comm_nccl_new (NCCL, out of the copy that torch has loaded), gm_comm_host_new
 * (the host device; how bytes get to the other ranks is the creator's) and, for estimates,
 * gm_comm_paper_new.  A communicator knows no chunk and no plan.
 *
 * Every rank issues the same collectives, with the same sizes, in the same order.  Sizes that do
 * not divide are the layout's business: a shard is padded before it comes here. Ordering: a
 * collective has its place in the stream that it is issued on, as a copy has.  The collectives of
 * one communicator run in issue order, whatever their streams.  Those of two communicators do not:
 * where both are in use, events must give them one order, the same on every rank, or ranks may wait
 * for each other for ever. Threads: one at a time (the engine holds its lock); gm_comm_check and
 * gm_comm_abort at any time. A collective returns when it is issued, which may be before a failure
 * shows: ask gm_comm_check, after a wait of the host at the latest, before bytes that came from
 * other ranks are believed. Failure: the first one stands.  It ends the communicator, here at once
 * and on the other ranks as soon as they notice; every later call gives its text.  A rank that does
 * not come is noticed after `timeout` seconds, on a thread of the communicator where the device is
 * not the host, so a host that waits for its stream wakes up.  An error of the own device is
 * noticed by who asks or waits here, and by the others as a rank that does not come. Ranks that do
 * not issue the same collectives: the host's compare what they are at before any byte moves.  NCCL
 * cannot, so what its collectives leave is to be believed only once the ranks have compared
 * gm_comm_calls(). A transport that is written in Python takes the GIL inside a collective,
 * gm_comm_abort and gm_comm_free: whoever calls them, or waits for a lock that is held around them,
 * must have released it (debug builds assert it). A forked child has no communicator: calls fail by
 * name, gm_comm_free does nothing. */
#pragma once

#include "base/base.h"
#include "device/device.h"

typedef struct gm_comm gm_comm;

/* The first three are gm_dtype.  Values are part of the Python binding. */
typedef enum gm_comm_dtype {
    GM_COMM_F32 = GM_F32,
    GM_COMM_BF16 = GM_BF16,
    GM_COMM_F16 = GM_F16,
    GM_COMM_U64,
} gm_comm_dtype;

typedef enum gm_comm_op {
    GM_COMM_SUM = 0,
    GM_COMM_MAX, /* GM_COMM_U64 only; doubles that are not negative have the order of their bits */
} gm_comm_op;

int gm_comm_rank(const gm_comm *comm);
int gm_comm_size(const gm_comm *comm);
/* What texts call this communicator's rank r. */
int gm_comm_rank_name(const gm_comm *comm, int r);
/* What texts call the ranks, where these are a part of a run: rank r here is rank names[r] of `n`.
 * The names are copied. Before the first collective. */
gm_status gm_comm_name_ranks(gm_comm *comm, const int *names, int n);

/* Rank r's shard is at base + r * shard_bytes; afterwards every rank has all of them. */
gm_status gm_comm_all_gather(gm_comm *comm, uintptr_t base, size_t shard_bytes, gm_stream stream);
/* The sum over the ranks of shard r (shard_count elements of fp32, bf16 or fp16) is left in place
 * on rank r. What the other shards hold afterwards is not said. */
gm_status gm_comm_reduce_scatter(gm_comm *comm, uintptr_t base, size_t shard_count,
                                 gm_comm_dtype dtype, gm_stream stream);
/* The result has the same bits on every rank.  Sums of u64 are modulo 2^64. */
gm_status gm_comm_all_reduce(gm_comm *comm, uintptr_t data, size_t count, gm_comm_dtype dtype,
                             gm_comm_op op, gm_stream stream);

/* ---- words for what is being done ---- */

/* Says what the collectives from here on are for, 0: nothing.  Must be the same on every rank, and
 * is compared. */
void gm_comm_label(gm_comm *comm, uint64_t label);
/* Words for a label: "gather of chunk 12, step 3, unit model.layers.4".  NULL (or no words): its
 * number.  Called for texts only, on any thread and late: for labels of the last 512 collectives,
 * with a lock of the communicator held.  It must not call the communicator, nor take a lock that is
 * held around calls of it.  Once this returns, the namer before it is not called any more, and what
 * it had for a context has been dropped. */
typedef void (*gm_comm_namer)(void *context, uint64_t label, char *out, size_t bytes);
void gm_comm_set_namer(gm_comm *comm, gm_comm_namer namer, void *context,
                       void (*drop)(void *context));

#define GM_COMM_WORDS 384 /* bytes that hold any collective in words */
/* Collectives issued so far (the first has number 1), and a hash of what must be the same on all
 * ranks in all of them. */
void gm_comm_calls(gm_comm *comm, uint64_t *out_number, uint64_t *out_hash);
/* That in which the first failure was noticed; 0: there is none, or it has none. */
uint64_t gm_comm_failed_at(gm_comm *comm);
/* Collective `number` in words; false if it is not one of the last 512. */
bool gm_comm_recall(gm_comm *comm, uint64_t number, char out[GM_COMM_WORDS]);

/* ---- failure and end ---- */

/* The first failure, if there is one: another rank's end, a collective that did not end in time, an
 * abort. */
gm_status gm_comm_check(gm_comm *comm);
/* Whether nothing is under way any more: the collectives issued so far are over, or it has
 * failed. */
bool gm_comm_is_over(gm_comm *comm);
/* Ends the communicator; waits on its streams come back.  `reason` becomes the text of the first
 * failure. */
void gm_comm_abort(gm_comm *comm, const char *reason);
/* The device whose streams later collectives are issued on; NULL before that device is freed.
 * Needed on a host device whose streams run late; without a device the host's collectives run at
 * once. */
gm_status gm_comm_attach(gm_comm *comm, gm_device *dev);
/* Waits for what is issued, but not longer than the timeout, and up to 10 s each for other ranks
 * and for the device to let go; aborts what is left.  NULL is fine. */
void gm_comm_free(gm_comm *comm);

/* ---- NCCL ---- */

#define GM_COMM_ID_BYTES 128
/* What rank 0 makes and gives to the others.  path: a libnccl.so.2 to open if none is loaded yet,
 * or NULL. Both: GM_ERR_UNSUPPORTED, with the reason, in a build without CUDA and where there is no
 * NCCL that fits. */
gm_status gm_comm_nccl_id(const char *path, uint8_t id[GM_COMM_ID_BYTES]);
/* Returns when all `size` ranks have come, or fails after `timeout` seconds. */
gm_status gm_comm_nccl_new(const char *path, int ordinal, const uint8_t id[GM_COMM_ID_BYTES],
                           int rank, int size, double timeout, gm_comm **out);

/* ---- the host device ---- */

typedef struct gm_comm_piece {
    void *data;
    size_t bytes;
} gm_comm_piece;

/* How bytes get to other ranks.  Pieces whose bytes are 0, and the own rank's, do not travel. */
typedef struct gm_comm_transport {
    /* Sends out[r] to each rank r and receives in[r] from it (both arrays have one piece a rank),
     * and returns when all of it is done; false when it cannot be, with a text that names the rank.
     * One call at a time. */
    bool (*exchange)(void *context, const gm_comm_piece *out, const gm_comm_piece *in, char *why,
                     size_t why_bytes);
    /* Makes exchanges with this rank fail, here and there.  Any thread, any number of times. */
    void (*close)(void *context);
    void (*free)(void *context);
    void *context;
} gm_comm_transport;

/* Sums are taken in the order of the ranks, 16-bit types in fp32 and rounded once, on one rank for
 * each element: the same bits on every rank and in every run.  The transport belongs to the
 * communicator from here, also when this fails. */
gm_status gm_comm_host_new(const gm_comm_transport *transport, int rank, int size, gm_comm **out);

/* ---- on paper ---- */

/* Rank 0 of `size` that all do the same, for an engine on a device on paper (device/paper.h), and
 * for no other. */
gm_status gm_comm_paper_new(int size, gm_comm **out);
