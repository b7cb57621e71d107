/* engine.h - has what a unit needs on the device when it is entered (by plan, or on demand), takes
 * gradients as they arrive, and runs the update where each chunk's states are.
 *
 * Ownership: the engine is counted.  Its maker holds one reference; every tensor that shows engine
 * memory holds one through a lease, so that memory outlives the last tensor that can read it.
 * Threads: any thread may call; a mutex admits one at a time.  gm_lease_end() may come from any
 * thread at any moment (a tensor's deleter) and takes no lock.  gm_engine_has_grad, gm_engine_sums
 * and gm_engine_n_touched take none, either: they are for the threads that bring gradients and
 * touch, and say what these have done.
 *
 * Above the length budget because it is the whole face of the engine, and what is behind it is one
 * lock. */
#pragma once

#include "arith/arith.h"
#include "base/base.h"
#include "comm/comm.h"
#include "device/device.h"
#include "engine/counts.h"
#include "plan/plan.h"
#include "memory/timeline.h"

typedef struct gm_engine gm_engine; /* opaque */
typedef struct gm_lease gm_lease;   /* opaque */

typedef struct gm_engine_param {
    uint64_t numel;
    uint32_t weight_bytes; /* of one element */
    gm_dtype format;       /* meaningful when has_low, has_moments or has_grad */
    bool has_low;          /* keeps the fp32 master's low part (never for GM_F32) */
    bool has_moments;      /* Adam's m and v, or what gm_opaque keeps there */
    bool has_grad;         /* the engine takes its gradient */
    const char *name;      /* in errors; copied; NULL: it has none */
    uint64_t cut;          /* where ranks may have parts of it: gm_param_spec */
} gm_engine_param;

/* STEP makes an update.  AHEAD makes one that the coming step may be, in the same place, and what
 * the function itself keeps of it changes only with TAKE, which says that the step was that one. */
typedef enum gm_opaque_how { GM_OPAQUE_STEP, GM_OPAQUE_AHEAD, GM_OPAQUE_TAKE } gm_opaque_how;

/* When it may run: in the call of its step; behind that, too, until gm_engine_issue; and AHEAD. */
typedef enum gm_opaque_when {
    GM_OPAQUE_AT_STEP,
    GM_OPAQUE_DEFERRED,
    GM_OPAQUE_SPECULATED
} gm_opaque_when;

/* One opaque update (opaque.c): of these parameters of a chunk, whose weights, states and gradients
 * are at their addresses on the device until it returns. */
typedef struct gm_opaque_call {
    gm_opaque_how how;
    uint32_t chunk, n_params;
    const uint32_t *params;
    float grad_scale;        /* what gradients are multiplied by */
    const float *late_scale; /* likewise, in device memory, in place of it; NULL: that is it */
    gm_stream stream;        /* that all of it is issued to */
} gm_opaque_call;

/* Of an optimizer whose states are bytes to the engine.  run: GM_OK, or an error that closes the
 * engine; *wrote_grads: it has changed the gradients, or AHEAD something that only a step may: the
 * engine undoes what it has done to bytes, and the step asks for it again.  It runs without the
 * engine's lock.  Calls of its thread are refused, those of others wait for its end; what asks for
 * room (reserve, shed) and what only shows the engine is served. */
typedef struct gm_opaque {
    gm_status (*run)(void *context, const gm_opaque_call *call, bool *wrote_grads);
    void *context;
    gm_opaque_when when;
} gm_opaque;

typedef struct gm_engine_options {
    gm_device *device;   /* owned from the call on, also when it fails */
    gm_workers *workers; /* borrowed, may be NULL */
    const gm_engine_param *params;
    uint32_t n_params;
    const uint32_t *unit_params; /* (unit_begin[n_units],) parameter ids, unit after unit */
    const uint32_t *unit_begin;  /* (n_units + 1,) */
    uint32_t n_units;
    const char *const *unit_names; /* (n_units,) in errors; copied; NULL: their numbers */
    size_t chunk_bytes;
    size_t device_budget; /* SIZE_MAX: what the device has */
    size_t host_budget;   /* SIZE_MAX: what the host has */
    /* Of homes, the same on all ranks: where those of all chunks have more, and the policy is
     * "auto", some chunks stay on the device without one (plan/stay.h).  SIZE_MAX: none does. */
    size_t host_limit;
    gm_policy policy;
    bool is_grad_f32;   /* gradients are kept in fp32 instead of the weight's dtype */
    gm_rates rates;     /* h2d 0: unknown, and nothing is planned */
    bool is_tuned;      /* steps correct the rate of Adam on the host */
    double state_share; /* gm_plan_input */
    size_t slack_bytes; /* device bytes that a plan leaves free within the budget */
    /* Ranks that share every chunk, and ranks that have the same shard as this one; borrowed,
     * attached to the device; NULL: this rank alone. */
    gm_comm *shard_comm, *replica_comm;
    /* Bytes of device memory that others of this process hold, within the budget; NULL: none. */
    size_t (*outside_bytes)(void *context);
    void *outside_context;
    gm_opaque opaque; /* run NULL: updates are Adam's */
    /* (n_shards, n_params) bytes of the states that it keeps of each shard's part of a parameter;
     * NULL: none. */
    const uint64_t *state_bytes;
} gm_engine_options;

typedef enum gm_field {
    GM_FIELD_WEIGHT,
    GM_FIELD_MASTER,
    GM_FIELD_M,
    GM_FIELD_V,
    GM_FIELD_GRAD,
    /* What a 16-bit weight lacks to be its master, of the weight that the next update finds. */
    GM_FIELD_LOW
} gm_field;

typedef struct gm_engine_stats {
#define X(type, name, value) type name;
    GM_ENGINE_COUNTS(X) GM_ENGINE_SECONDS(X)
#undef X
} gm_engine_stats;

/* Fails with GM_ERR_NOMEM, before allocating, when the host has no room for the homes and the
 * device none for what would have to stay there, or when policy "cuda" does not fit the budget. */
gm_status gm_engine_new(const gm_engine_options *options, gm_engine **out);
/* The layout that it makes for these, before there is one. */
gm_status gm_engine_lay_out(const gm_engine_param *params, uint32_t n_params, size_t chunk_bytes,
                            uint32_t n_shards, gm_layout **out);
void gm_engine_ref(gm_engine *engine);
void gm_engine_unref(gm_engine *engine); /* frees with the last reference; NULL is fine */
/* Waits for updates that run on the workers: before they are freed, which the engine may
 * outlive. */
void gm_engine_finish_updates(gm_engine *engine);
/* Waits for its collectives, not longer than their timeout, and uses its communicators no more:
 * before they are given back, which the engine may outlive. */
void gm_engine_leave_ranks(gm_engine *engine);

/* Where a parameter's bytes are shown, for life. */
uintptr_t gm_engine_address(const gm_engine *engine, uint32_t param);
uint32_t gm_engine_chunk_of(const gm_engine *engine, uint32_t param);
/* Where opaque updates find the rest of a parameter. */
typedef struct gm_opaque_place {
    uintptr_t weight, low, grad, states;
} gm_opaque_place;
void gm_engine_opaque_place(const gm_engine *engine, uint32_t param, gm_opaque_place *out);
/* Bytes [first, first + n) of the states that this rank has of a parameter; the host waits. */
gm_status gm_engine_states_read(gm_engine *engine, uint32_t param, uint64_t first, uint64_t n,
                                void *dst);
gm_status gm_engine_states_write(gm_engine *engine, uint32_t param, uint64_t first, uint64_t n,
                                 const void *src, gm_stream stream);
/* The elements of a parameter that are in this rank's shard: [*first, *first + *n). */
gm_status gm_engine_part(const gm_engine *engine, uint32_t param, uint64_t *first, uint64_t *n);
/* Bytes of blocks that a chunk takes, beside those of chunks that stay, for the floor of the
 * budget: while its weights are used; beside these while they are gathered; from its first gradient
 * of a pass to their sum over ranks; all in all while an opaque update runs. */
typedef struct gm_engine_need {
    size_t shown, gathering, unreduced, updating;
} gm_engine_need;
void gm_engine_chunk_need(const gm_engine *engine, uint32_t chunk, gm_engine_need *out);
/* Gradients that wait for others of their chunk take no more than this, or else one chunk's: the
 * sum over ranks is made without the others then.  The same on all ranks, as it orders collectives.
 * Before: no limit. */
gm_status gm_engine_limit_unreduced(gm_engine *engine, size_t bytes);
void gm_engine_weight_span(const gm_engine *engine, uintptr_t *begin, uintptr_t *end);

/* What the calling thread is doing when it enters a unit. */
enum { GM_ENTER_IN_BACKWARD = 1, GM_ENTER_GRAD = 2 };
gm_status gm_engine_enter(gm_engine *engine, uint32_t unit, gm_stream stream, uint32_t flags);
gm_status gm_engine_leave(gm_engine *engine, uint32_t unit, gm_stream stream);
/* Pins the chunk whose weights are at `address` until gm_engine_release_touched: what a backward
 * node needs. */
gm_status gm_engine_touch(gm_engine *engine, uintptr_t address, gm_stream stream);
/* Ends all but the `n_keep` oldest of these pins. */
gm_status gm_engine_release_touched(gm_engine *engine, uint32_t n_keep);
uint32_t gm_engine_n_touched(const gm_engine *engine);

/* Takes a gradient (device memory, contiguous, numel elements): first is copied, later ones are
 * added. */
gm_status gm_engine_grad_put(gm_engine *engine, uint32_t param, const void *grad, gm_dtype dtype,
                             gm_stream stream);
bool gm_engine_has_grad(const gm_engine *engine, uint32_t param);
/* Changes with each gradient that comes or is written; takes no lock. */
uint64_t gm_engine_grads_version(const gm_engine *engine);
/* An error by name where one of these is used up.  keep: those of a step that ran no update inside
 * its backward are none from now on; *out: there were some. */
gm_status gm_engine_check_grads(gm_engine *engine, const uint32_t *params, uint32_t n);
gm_status gm_engine_keep_grads(gm_engine *engine, const uint32_t *params, uint32_t n, bool *out);
/* Forgets the gradient of one parameter. */
gm_status gm_engine_grad_drop(gm_engine *engine, uint32_t param);
/* The sum over all ranks of a gradient that torch keeps, in place: a collective; the host waits for
 * it, in the order of `stream`, and no rank has it that has not the same parameter's.  data: memory
 * of the device. */
gm_status gm_engine_sum(gm_engine *engine, uint32_t param, uintptr_t data, size_t count,
                        gm_dtype dtype, gm_stream stream);
/* Exact sum of squares of the gradients present among these (sorted), of all ranks: a collective;
 * the host waits. */
gm_status gm_engine_sumsq(gm_engine *engine, const uint32_t *params, uint32_t n, gm_sumsq *out,
                          gm_stream stream);
/* Clips by the same norm, in the coming step: the same collective.  norm: device memory that gets
 * it, in the order of `stream`, or NULL.  *out: the host has waited, as gradients at home had to be
 * summed; else nobody has. */
gm_status gm_engine_clip(gm_engine *engine, const uint32_t *params, uint32_t n, double max_norm,
                         float *norm, gm_stream stream, bool *out);
gm_status gm_engine_clip_wait(gm_engine *engine, gm_clip *out); /* what came of the last one */

typedef struct gm_update {
    uint32_t param;
    gm_adam_hyper hyper;
} gm_update;
/* One optimizer step for the parameters named (each with a gradient and moments).  Returns without
 * waiting for the device; whoever needs the result is ordered behind it.  An error in the middle
 * closes the engine: every later call returns it. */
gm_status gm_engine_step(gm_engine *engine, const gm_update *updates, uint32_t n, gm_stream stream);
/* Issues what the last step has left to be issued later. */
gm_status gm_engine_issue(gm_engine *engine, gm_stream stream);
/* As gm_engine_step; gradients are multiplied by the factor of the last gm_engine_clip, which was
 * for this step, instead of the factors of the updates, which are 1. */
gm_status gm_engine_step_clipped(gm_engine *engine, const gm_update *updates, uint32_t n,
                                 gm_stream stream);
/* The backward that comes now ends the step, with these numbers: where may_run says so, chunks may
 * be updated inside it, as soon as their gradients are complete; *out is false when that is not
 * possible now.  It is refused while gradients of the last such step are there: that step has used
 * them up, wherever its updates ran.  Then gm_engine_step with the same updates; or, when no step
 * comes, gm_engine_disarm: it closes the engine if weights have been updated already, else nothing
 * has changed.  cause: why no step comes, which later errors say. */
gm_status gm_engine_arm(gm_engine *engine, const gm_update *updates, uint32_t n, bool may_run,
                        bool *out);
gm_status gm_engine_disarm(gm_engine *engine, const char *cause);
/* Where a step may run before it is known (speculation.c): its numbers are wanted, by the first
 * gradient.  announce: these are they, if nothing comes in between; a step with others is as
 * right. */
bool gm_engine_wants_numbers(gm_engine *engine);
gm_status gm_engine_announce(gm_engine *engine, const gm_update *updates, uint32_t n);
/* How often updates inside a backward have changed the parameter; takes no lock. */
uint64_t gm_engine_n_immediate(const gm_engine *engine, uint32_t param);

/* Fields of one parameter, to and from host memory of numel elements; the host waits.  WEIGHT and
 * GRAD in their dtype, the others fp32.  Writing WEIGHT makes the master equal to it; writing
 * MASTER rounds the weight. Reading gives the elements [first, first + n), of which `dst` has place
 * for all. Of several ranks each reads and writes its own part (gm_engine_part) and leaves the rest
 * of `dst` as it is; all of them write, from the same `src`. */
gm_status gm_engine_read(gm_engine *engine, uint32_t param, gm_field field, uint64_t first,
                         uint64_t n, void *dst);
gm_status gm_engine_write(gm_engine *engine, uint32_t param, gm_field field, const void *src,
                          gm_stream stream);
/* Elements [first, first + n) of MASTER, which rounds the weight, of a moment, or of WEIGHT without
 * a low part.  For first values and checkpoints: nothing shows the parameter, and what was gathered
 * of it is old.  Masters may be of another dtype than fp32, `source`. */
gm_status gm_engine_fill(gm_engine *engine, uint32_t param, gm_field field, uint64_t first,
                         uint64_t n, gm_dtype source, const void *src, gm_stream stream);

/* A checkpoint that is written while training goes on, by one thread: weights, masters and moments
 * of `params` as they are at the begin, after the updates that wait.  A chunk that changes before
 * it has been written is copied first.  Copies take at most `limit` bytes, or one chunk's; then a
 * thread that is to change a chunk waits for the writer. read: as gm_engine_read, of elements of
 * this rank's part; states: as gm_engine_states_read. *out false: nothing was read, save_next's
 * chunk comes first. next: a chunk that
 * has a copy, or UINT32_MAX.  done: all of the chunk has been read.  end: always, also after an
 * error. An error of read, done and end says why the checkpoint is of no use; training is not
 * concerned. */
typedef struct gm_saving_use {
    uint64_t copied;  /* bytes, so far */
    uint64_t most;    /* of them at one time */
    uint64_t n_waits; /* changes that waited for the writer */
} gm_saving_use;
gm_status gm_engine_save_begin(gm_engine *engine, const uint32_t *params, uint32_t n, size_t limit);
gm_status gm_engine_save_read(gm_engine *engine, uint32_t param, gm_field field, uint64_t first,
                              uint64_t n, void *dst, bool *out);
gm_status gm_engine_save_states(gm_engine *engine, uint32_t param, uint64_t first, uint64_t n,
                                void *dst, bool *out);
uint32_t gm_engine_save_next(gm_engine *engine);
gm_status gm_engine_save_done(gm_engine *engine, uint32_t chunk);
gm_status gm_engine_save_end(gm_engine *engine, gm_saving_use *out);

/* A lease is the life of one storage on a parameter's address: it keeps the address range, and what
 * else is asked of it. pin: the chunk is resident until the lease ends (a collective of several
 * ranks; what is shown is as old as the last gathering of the chunk: after a step, the next use of
 * its unit). watch, while the chunk is pinned: what is written through the storage is found, before
 * each use of the master and at the end of the lease, by comparison with a copy made now.  unwatch:
 * likewise now, and no more. keep: watch and pin, with no step between the two. */
gm_status gm_lease_new(gm_engine *engine, uint32_t param, gm_lease **out);
gm_status gm_lease_pin(gm_lease *lease, gm_stream stream);
gm_status gm_lease_watch(gm_lease *lease, gm_stream stream);
gm_status gm_lease_keep(gm_lease *lease, gm_stream stream);
gm_status gm_lease_unwatch(gm_lease *lease);
void gm_lease_end(gm_lease *lease);
uintptr_t gm_lease_address(const gm_lease *lease);

/* The unit wrote the parameter in place while entered.  GM_ERR_STATE when the old bytes are gone
 * and the master can therefore not be kept (16-bit weights whose home is not current). */
gm_status gm_engine_note_write(gm_engine *engine, uint32_t param, gm_stream stream);
/* *out: how many writes of the weight have been found by comparison so far, those of now included:
 * what is written through memory that leases show, whether or not torch has counted it.  `stream`:
 * where it may have been written. */
gm_status gm_engine_n_found(gm_engine *engine, uint32_t param, gm_stream stream, uint64_t *out);

/* Issues the reductions that still wait for gradients, but for those that came late (arrive.c),
 * and, where collectives run on the host, runs what is issued: before the ranks talk to each other
 * by other means, so that no rank waits here and another one there. */
gm_status gm_engine_catch_up(gm_engine *engine);
/* The second half of it alone: what is issued has run, and gradients are not summed earlier than
 * they would be. */
gm_status gm_engine_settle(gm_engine *engine);
/* Of every parameter, a hash of which sums over ranks brought its gradient, or will: (n_params,),
 * equal on ranks that had gradients in the same backward passes. */
void gm_engine_sums(const gm_engine *engine, uint64_t *out);

/* Ended leases are processed at every call; this is such a call that does nothing else. */
gm_status gm_engine_drain(gm_engine *engine);
/* Before its end: after an error that has closed the engine, or has ended its communicators, fields
 * can be read again, as that error has left them; updates that still waited are forgotten.  `text`
 * gets that error; false: the engine is not closed, and nothing has changed. */
bool gm_engine_salvage(gm_engine *engine, char *text, size_t size);
/* Gives room of `bytes` to others: evicts as needed; false when the budget does not allow it. */
bool gm_engine_reserve(gm_engine *engine, size_t bytes);
/* The device has no room although the budget has: gives up to `bytes` of blocks back to it, and
 * takes no more until the next plan, which sees what there is.  false: nothing could be given. */
bool gm_engine_shed(gm_engine *engine, size_t bytes);
/* Why chunks could not leave the device the last time: the host has no memory for their homes.  "":
 * they could. */
void gm_engine_refusal(gm_engine *engine, char *text, size_t size);
/* Others of this process now hold what they need and no more: what they held before counts no
 * longer in plans. */
gm_status gm_engine_forget_outside(gm_engine *engine);
/* As gm_engine_forget_outside, and the budget has more room than the plan was made for: another
 * plan is made. */
gm_status gm_engine_regain(gm_engine *engine);

/* Before the first step: updates on the host count as if they ran at this rate, in parameters/s, so
 * that what the engine learns from their times depends on no clock. */
void gm_engine_tell_host_rate(gm_engine *engine, double rate);

void gm_engine_get_stats(gm_engine *engine, gm_engine_stats *out);

/* out (n_params,): whether a tensor outside units and backward nodes shows the parameter. */
void gm_engine_leased(gm_engine *engine, bool *out);
/* Where a chunk is and what waits in it, now and on this rank. */
typedef struct gm_engine_chunk {
    bool is_resident[GM_N_PIECES], is_dirty[GM_N_PIECES]; /* as chunk.h has them */
    size_t bytes[GM_N_PIECES];
    uint32_t n_uses;            /* units, backward nodes and leases that show it */
    uint32_t n_trained, n_done; /* parameters with gradients; of them, those that have one */
    bool is_pending;            /* its update is stepped and has not been issued */
} gm_engine_chunk;
/* out (n_chunks,), as gm_engine_get_stats has it.  Waits for nothing. */
void gm_engine_chunks(gm_engine *engine, gm_engine_chunk *out);
/* Of the plan that is followed, with the classes of chunks, (n_chunks,); false: there is none. */
bool gm_engine_plan(gm_engine *engine, gm_plan_info *out, gm_class *out_classes);
/* Logs from now on what is done and when it runs; the log is the caller's at the end, also when
 * that fails (*out may then be NULL). */
gm_status gm_engine_timeline_begin(gm_engine *engine, uint32_t capacity);
gm_status gm_engine_timeline_end(gm_engine *engine, gm_timeline **out);
gm_status gm_engine_check(gm_engine *engine); /* its own invariants and those of chunk.c */

/* Before there is an engine: measures the rates of `device` and of host Adam on `workers`, in about
 * a second.  Takes for that time at most 256 MiB of device memory and 512 MiB of pinned host
 * memory, and makes do with less of either. GM_ERR_NOMEM where not even a block and 16 MiB are to
 * be had. */
gm_status gm_rates_measure(gm_device *device, gm_workers *workers, gm_rates *out);
