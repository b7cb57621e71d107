/* plan.h - (layout, traces, budget) -> where every piece lives and what is done at each tick.
 * Pure, deterministic, immutable once made.
 *
 * Placement.  The plan numbers the device's blocks 0..n_blocks-1.  A resident piece has blocks of
 * its own; the others of a kind (weights, states, gradients) share a ring of blocks: piece after
 * piece in the order of use, the end meeting the beginning, so that neighbours in time do not
 * overlap and a later one overwrites an earlier one.  The ring of states is the stage, of
 * gm_stage_least blocks at least.
 *
 * Classes (bytes per parameter in bf16; `deferred` adds what a gradient costs that leaves the
 * device)
 *   R   weights and states resident; updated on the device
 *   S1  weights resident, states streamed through the device for the update
 *   S2  weights and states streamed
 *   C1  weights resident, updated on the host, then refreshed
 *   C2  weights streamed, updated on the host
 * A chunk without states (frozen) is R (resident weights) or C2 (streamed).  One that stays is R,
 * and its gradient is resident, whatever the policy: nothing of it ever leaves.
 *
 * Operations are conditional and idempotent: each is a wish that the engine fulfils unless it holds
 * already, so a plan may be entered from any state.
 *
 * Several ranks (n_ranks > 1).  A chunk with GM_GATHERED bytes is used through its gathered
 * weights; its other pieces are this rank's shard, and a class speaks of the shard alone: its
 * weights are needed only to gather and to update.  The gathered weights are kept (blocks of their
 * own: gathered once after each update; the shard is then resident, too) or pass through a ring.
 * They hold until the shard is updated, a pass begins with an update of it pending, or something
 * else takes their blocks.  A chunk with GM_UNREDUCED bytes collects a pass's gradients there, in a
 * ring in the order of gradients; when they are complete they are reduced, the sum goes to GM_GRAD,
 * and their blocks are free.  The engine keeps these rules, and plans count on them:
 *   1. Gathers and reduces run one at a time in the order of issue.  What is issued depends on the
 *      sequence of ticks and on the plan alone: a GM_OP_GATHER is dropped when the gathered weights
 *      hold, and for no other reason.
 *   2. At a GRAD tick that completes a chunk in this pass: claim GM_GRAD, reduce, give
 *      GM_UNREDUCED's blocks back; then the tick's operations.  At other ticks operations come
 *      first, then what the tick takes is claimed.
 *   3. An update leaves gathered weights as they are; they hold no more.
 *
 * Speculation.  With spare_bytes a deferred plan may let updates run under the backward, out of
 * place (GM_OP_SPECULATE): new weights and states go to a spare beside their home, and the gradient
 * is kept.  If the step turns out to be that one, its update only exchanges home and spare, and the
 * weights on the device are refreshed; else it is an update as of any deferred plan, so such a plan
 * is one whatever comes.
 *
 * Above the length budget because what the engine and its plans agree on is in one place. */
#pragma once

#include "plan/budget.h"
#include "plan/layout.h"
#include "plan/trace.h"

typedef struct gm_plan gm_plan; /* opaque */

typedef enum gm_class {
    GM_CLASS_R,
    GM_CLASS_S1,
    GM_CLASS_S2,
    GM_CLASS_C1,
    GM_CLASS_C2,
    GM_N_CLASSES
} gm_class;

/* Pending updates that a step itself issues: the pipeline starts.  Plans count on it. */
#define GM_ISSUED_BY_STEP 8u

typedef enum gm_when {
    GM_DEFERRED, /* updates run under the next forward, in the order of its use */
    /* A chunk is updated as soon as its gradient is complete and the pass needs its weights no
     * more; a plan may put some chunks off to the next forward, where the host's threads would
     * otherwise be idle. */
    GM_IMMEDIATE
} gm_when;

typedef enum gm_policy { GM_POLICY_AUTO, GM_POLICY_CPU, GM_POLICY_CUDA } gm_policy;

typedef struct gm_plan_chunk {
    size_t bytes[GM_N_PIECES];    /* that a copy moves; 0 = none */
    uint32_t blocks[GM_N_PIECES]; /* that it takes on the device */
    uint64_t numel;               /* elements that Adam updates; 0: frozen */
    bool must_reside; /* a tensor shows its weights, gathered if they are: no eviction */
    bool stays;       /* it has no home (stay.h): class R, with its gradient, in every plan */
} gm_plan_chunk;

typedef struct gm_plan_input {
    const gm_plan_chunk *chunks;
    uint32_t n_chunks;
    uint32_t n_ranks;            /* 0 and 1: one, and no chunk has gathered or unreduced bytes */
    const uint32_t *unit_chunks; /* (unit_begin[n_units],) chunks of units, unit after unit */
    const uint32_t *unit_begin;  /* (n_units + 1,) */
    uint32_t n_units;
    const gm_trace *const *traces; /* (n_traces,) the passes of one optimizer step, each once */
    const uint32_t *n_runs;        /* (n_traces,) how often each runs in one step (micro-batches) */
    uint32_t n_traces; /* traces without backward (evaluation) have a schedule but do not decide */
    gm_when when;
    gm_policy policy;
    size_t block_bytes;
    uint32_t stage_blocks; /* of one chunk's states in their ring, at most (slices); 0: all */
    bool is_opaque;  /* no update runs on the host, and states have places in their ring, whole */
    bool is_at_step; /* what the backward has not updated the step does, all of it */
    size_t device_bytes; /* for blocks: the budget less everything else at its peak */
    double state_share;  /* in [0, 1]: share of what the weights leave for states and gradients */
    size_t spare_bytes;  /* of the host, for speculation; 0, or if immediate: none */
    gm_rates rates;
} gm_plan_input;

/* Bytes of the host that the spare of a piece takes. */
static inline size_t gm_spare_bytes(size_t piece_bytes)
{
    return gm_round_up(piece_bytes, 4096);
}
/* An opaque update is made in place: weights that stay on the device need no spare. */
static inline bool gm_spares_weights(bool is_opaque, gm_class class)
{
    return !is_opaque || class == GM_CLASS_S2;
}
/* Bytes that those of a chunk of a class take. */
static inline size_t gm_plan_spare(const gm_plan_input *input, uint32_t chunk, gm_class class)
{
    const size_t *bytes = input->chunks[chunk].bytes;
    bool has_weights = gm_spares_weights(input->is_opaque, class);
    return gm_spare_bytes(bytes[GM_STATE]) + (has_weights ? gm_spare_bytes(bytes[GM_WEIGHT]) : 0);
}

/* Blocks that a piece takes at its place. */
static inline uint32_t gm_plan_blocks(const gm_plan_input *input, uint32_t chunk, uint32_t piece,
                                      bool is_resident)
{
    uint32_t blocks = input->chunks[chunk].blocks[piece];
    bool is_passing = piece == GM_STATE && !is_resident && input->stage_blocks > 0;
    return is_passing && blocks > input->stage_blocks ? input->stage_blocks : blocks;
}

/* Where one piece lives: the end of a ring meets its beginning. */
typedef struct gm_place {
    uint32_t base, length; /* its ring (resident: its own blocks); length 0: never on the device */
    uint32_t offset;
    bool is_resident;
} gm_place;

/* Its block j, one of at most `length`. */
static inline uint32_t gm_place_block(const gm_place *place, uint32_t j)
{
    uint32_t at = place->offset + j;
    return place->base + (at < place->length ? at : at - place->length);
}

typedef enum gm_op_kind {
    /* Weights onto the device, also onto a resident copy that a host update has left behind. */
    GM_OP_FETCH,
    GM_OP_GRAD_IN, /* the gradient summed so far onto the device, to be added to; if there is one */
    GM_OP_GRAD_OUT, /* the gradient, complete in this pass, goes home */
    /* The chunk's pending update, if there is one, with the copies for it that were not made;
     * streamed states pass through the device with it. */
    GM_OP_UPDATE,
    /* A collective: the weights of all ranks into GM_GATHERED, unless they are there; first the
     * update that was pending when the pass began, and the shard's weights if they are not on the
     * device. */
    GM_OP_GATHER,
    /* The update that the step will probably be, out of place; streamed states and the weights pass
     * through the device to the spares.  The gradient is complete, on the device. */
    GM_OP_SPECULATE
} gm_op_kind;

typedef struct gm_op {
    uint32_t kind, chunk;
} gm_op;

typedef struct gm_plan_info {
    double step_seconds; /* predicted, everything included */
    /* perfect overlap: no step of this schedule can be shorter than the largest */
    double compute_seconds, h2d_seconds, d2h_seconds, host_seconds, comm_seconds;
    double
        bound_seconds;   /* of these: the maximum; if deferred: of backward's part + of forward's */
    size_t device_bytes; /* of blocks */
    size_t h2d_bytes, d2h_bytes; /* in one step */
    uint32_t n_blocks, n_of_class[GM_N_CLASSES];
    size_t bytes_of_class[GM_N_CLASSES];      /* of weights */
    uint32_t n_frozen_of_class[GM_N_CLASSES]; /* of these the chunks that no update ever reaches */
    size_t frozen_bytes_of_class[GM_N_CLASSES];
    size_t weight_ring_bytes, state_ring_bytes, grad_ring_bytes, resident_grad_bytes;
    size_t gathered_ring_bytes, unreduced_ring_bytes, kept_gathered_bytes;
    uint32_t n_kept;       /* chunks whose gathered weights are kept */
    uint32_t n_speculated; /* chunks */
    size_t spare_bytes;    /* of the host, that these take */
    uint32_t prefetch;     /* chunks in the weight ring beyond the one in use; 0: all resident */
    uint64_t n_ops;
    uint64_t n_weighed; /* operations that the search asked the time model about: its work */
    uint64_t hash;      /* of placement and operations: equal on all ranks */
    gm_when when;
    gm_rates rates; /* that it was made from */
} gm_plan_info;

/* GM_ERR_NOMEM: it cannot be done with device_bytes; the text has the bytes needed and
 * available. */
gm_status gm_plan_new(const gm_plan_input *input, gm_plan **out);
void gm_plan_free(gm_plan *plan); /* NULL is fine */

gm_class gm_plan_class(const gm_plan *plan, uint32_t chunk);
const gm_place *gm_plan_place(const gm_plan *plan, uint32_t chunk, gm_piece piece);
/* Whether its update is speculated. */
bool gm_plan_is_speculated(const gm_plan *plan, uint32_t chunk);
uint32_t gm_plan_n_blocks(const gm_plan *plan);
const gm_plan_info *gm_plan_get_info(const gm_plan *plan);
/* The order in which pending (deferred) updates are to be issued: (n_chunks,) every chunk once. */
const uint32_t *gm_plan_update_order(const gm_plan *plan);

/* The operations to issue when tick `tick` of a trace begins; NULL and 0 for a trace that the plan
 * does not know (gm_trace.hash identifies it). */
const gm_op *gm_plan_ops(const gm_plan *plan, uint64_t trace_hash, uint32_t tick, uint32_t *out_n);
bool gm_plan_knows(const gm_plan *plan, uint64_t trace_hash);
/* A schedule for one more trace under the same placement.  Not while ops of the plan are held.
 * GM_ERR_STATE: the placement does not serve this trace (it uses chunks at once that share blocks);
 * make a plan with it. */
gm_status gm_plan_add_trace(gm_plan *plan, const gm_plan_input *input, const gm_trace *trace);

/* Replays the plan for some steps in a model of blocks and events, with each trace once as the
 * first of a step: no block shows two live pieces, every unit finds its chunks, no dirty bytes are
 * lost, device_bytes holds.  GM_ERR_STATE names the first violation.  In asserted builds alone:
 * tests/c/proof/check.c. */
gm_status gm_plan_check(const gm_plan *plan, const gm_plan_input *input);
