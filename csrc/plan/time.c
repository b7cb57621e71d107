/* time.c - predicts a step: follows the schedules as the engine would, tick by tick, and lets sim.c
 * say when each copy, update and piece of compute would end.
 *
 * 1. The engine's rules of order are these: a copy into blocks waits for the last reader and the
 *    copy home of what was there; a host update waits for its gradient, and a fetch for the host
 *    update; a device update waits for weights, states and gradient; a deferred update waits for
 *    the end of the last backward, which has the norm.  A gather waits for the shard's weights and
 *    for the last reader of what was in its place, a use for its gather, a reduce for the last
 *    gradient; a reader of the sum waits for the reduce.
 * 2. The last of some equal steps counts, and it is never shorter than any one resource is busy.
 * 3. Streamed states pass slice by slice through the slots of their ring: of a chunk the first
 *    slices come in as soon as slots are free, the others once Adam has begun; each goes home
 *    behind Adam.  Opaque ones pass whole, each chunk's in its own blocks of the ring: a copy in,
 *    the update, in compute's own stream (opaque.c, 7), a copy out; how many chunks do so at once
 *    is the ring's length.
 * 4. Updates that a backward has not run run under the next forward; or, as the input says
 *    (is_at_step), between the two.
 * 5. What is speculated is what the step does: no clip fires. */
#include <stdlib.h>
#include <string.h>

#include "plan/plan_impl.h"
#include "plan/ring.h"
#include "plan/sim.h"

#define MANY_NODES    40000u /* a step of more is followed twice instead of three times */
#define SLICE_SECONDS 1.5e-5 /* that a slice costs beside its bytes */

typedef struct gm_item { /* one piece of one chunk */
    uint32_t filled, used, homed;
    bool is_there;
} gm_item;

typedef struct gm_followed { /* a chunk */
    bool is_pending, has_home_grad, is_dirty;
    uint32_t result; /* the end of a speculation that no update has taken; GM_NO_NODE: none */
    uint32_t use_pass, use_end;
} gm_followed;

typedef struct gm_gone { /* slices of states that have gone home */
    uint32_t node;
    uint64_t end; /* slices so far */
} gm_gone;

typedef struct gm_replay {
    const gm_problem *problem;
    const gm_plan *plan;
    gm_sim sim;
    gm_item *items;   /* (n, GM_N_PIECES) */
    uint32_t *owners; /* of the plan's blocks */
    /* The stage: slots for slices, taken in turn. */
    gm_gone *gone; /* (most_gone,), a queue: those without a waiter yet */
    uint32_t most_gone, first_gone, n_gone, n_slots, last_gone;
    uint64_t n_slices;
    double slot_bytes;
    gm_followed *chunks;         /* (n,) */
    bool is_last;                /* the present pass ends the step */
    uint32_t *node_of;           /* (ticks,) compute of each tick of the present pass */
    uint32_t norm;               /* the end of the last backward */
    uint32_t pass, tick, newest; /* newest: compute node */
    double weight;               /* how many equal passes the present one stands for */
    gm_load *load;
} gm_replay;

static gm_item *item(gm_replay *r, uint32_t chunk, gm_piece piece)
{
    return &r->items[chunk * GM_N_PIECES + piece];
}

static const gm_plan_chunk *chunk_of(const gm_replay *r, uint32_t chunk)
{
    return &r->problem->input->chunks[chunk];
}

/* What compute reads of a chunk. */
static gm_piece shown_piece(const gm_replay *r, uint32_t chunk)
{
    return gm_is_gathered(r->problem->input, chunk) ? GM_GATHERED : GM_WEIGHT;
}

/* What comes last of those that read a piece of weights, as far as the pass has come. */
static uint32_t last_reader(const gm_replay *r, uint32_t chunk, gm_piece piece)
{
    if (r->chunks[chunk].use_pass == r->pass && piece == shown_piece(r, chunk)) {
        uint32_t end = r->chunks[chunk].use_end < r->tick ? r->chunks[chunk].use_end : r->tick;
        return end > 0 ? r->node_of[end - 1] : r->newest;
    }
    return r->items[chunk * GM_N_PIECES + (uint32_t)piece].used;
}

static void wait_for_owner(gm_replay *r, uint32_t chunk, gm_piece piece)
{
    const gm_item *old = item(r, chunk, piece);
    gm_sim_wait(&r->sim, old->filled);
    gm_sim_wait(&r->sim, old->used);
    gm_sim_wait(&r->sim, old->homed);
    if (piece == GM_WEIGHT || piece == GM_GATHERED) {
        gm_sim_wait(&r->sim, last_reader(r, chunk, piece));
    }
}

/* The piece takes its blocks; the node added next waits for their last owner. */
static void claim(gm_replay *r, uint32_t chunk, gm_piece piece)
{
    const gm_place *place = &r->plan->places[chunk * GM_N_PIECES + piece];
    wait_for_owner(r, chunk, piece);
    if (!place->is_resident && place->length > 0) {
        uint32_t n = gm_plan_blocks(r->problem->input, chunk, piece, false), at = 0;
        uint32_t old, last = GM_NO_OWNER;
        while ((old = gm_owners_take(r->owners, place, n, chunk, &at)) != GM_NO_OWNER) {
            if (old != last) {
                wait_for_owner(r, old, piece);
                item(r, old, piece)->is_there = false;
                last = old;
            }
        }
    }
    item(r, chunk, piece)->is_there = true;
}

static uint32_t copy(gm_replay *r, gm_lane lane, size_t bytes)
{
    bool is_outward =
        lane == GM_LANE_EVICT || lane == GM_LANE_GRAD_OUT || lane == GM_LANE_STATE_OUT;
    if (r->problem->input->is_opaque && lane == GM_LANE_GRAD_IN) {
        lane = GM_LANE_STATE; /* one stream has both (chunk_impl.h) */
    }
    *(is_outward ? &r->load->out : &r->load->in) += r->weight * (double)bytes;
    return gm_sim_add(&r->sim, lane, (double)bytes);
}

static void fetch_in(gm_replay *r, uint32_t c, gm_lane lane)
{
    gm_item *w = item(r, c, GM_WEIGHT);
    if (w->is_there) {
        return;
    }
    claim(r, c, GM_WEIGHT);
    w->filled = copy(r, lane, chunk_of(r, c)->bytes[GM_WEIGHT]);
}

static void fetch(gm_replay *r, uint32_t c)
{
    fetch_in(r, c, GM_LANE_FETCH);
}

static void grad_out(gm_replay *r, uint32_t c)
{
    gm_item *g = item(r, c, GM_GRAD);
    if (g->is_there && r->chunks[c].is_dirty) {
        gm_sim_wait(&r->sim, g->filled);
        gm_sim_wait(&r->sim, g->homed);
        g->homed = copy(r, GM_LANE_GRAD_OUT, chunk_of(r, c)->bytes[GM_GRAD]);
        r->chunks[c].is_dirty = false;
        r->chunks[c].has_home_grad = true;
    }
}

static void grad_in(gm_replay *r, uint32_t c)
{
    gm_item *g = item(r, c, GM_GRAD);
    bool is_needless = r->chunks[c].is_pending && r->chunks[c].result != GM_NO_NODE;
    if (!g->is_there && r->chunks[c].has_home_grad && !is_needless) {
        claim(r, c, GM_GRAD);
        g->filled = copy(r, GM_LANE_GRAD_IN, chunk_of(r, c)->bytes[GM_GRAD]);
    }
}

static void update_on_host(gm_replay *r, uint32_t c)
{
    gm_item *w = item(r, c, GM_WEIGHT), *s = item(r, c, GM_STATE), *g = item(r, c, GM_GRAD);
    grad_out(r, c);
    gm_sim_wait(&r->sim, r->norm);
    gm_sim_wait(&r->sim, g->homed);
    gm_sim_wait(&r->sim, w->homed);
    gm_sim_wait(&r->sim, w->filled);
    r->load->host += r->weight * (double)chunk_of(r, c)->numel;
    uint32_t node = gm_sim_add(&r->sim, GM_LANE_HOST, (double)chunk_of(r, c)->numel);
    w->homed = s->homed = g->used = node;
    item(r, c, GM_GATHERED)->is_there = false; /* it holds no more */
    if (w->is_there) {
        wait_for_owner(r, c, GM_WEIGHT);
        w->filled = copy(r, GM_LANE_REFRESH, chunk_of(r, c)->bytes[GM_WEIGHT]);
    }
}

/* The next copy in needs slots whose last slices are among the first `end`. */
static void wait_for_slots(gm_replay *r, uint64_t end)
{
    while (r->n_gone > 0 && r->gone[r->first_gone].end + r->n_slots <= end) {
        r->last_gone = r->gone[r->first_gone].node;
        r->first_gone = r->first_gone + 1 == r->most_gone ? 0 : r->first_gone + 1;
        r->n_gone--;
    }
    gm_sim_wait(&r->sim, r->last_gone);
}

static void note_gone(gm_replay *r, uint32_t node, uint64_t end)
{
    uint32_t at = r->first_gone + r->n_gone;
    GM_ASSERT(r->n_gone < r->most_gone);
    r->gone[at < r->most_gone ? at : at - r->most_gone] = (gm_gone){node, end};
    r->n_gone++;
}

static double slice_work(const gm_replay *r, double n_slices, double bytes)
{
    return n_slices * bytes + (n_slices - 1) * SLICE_SECONDS * r->problem->input->rates.h2d;
}

/* Invariant 3.  Returns the end of Adam; *out_homed becomes that of the last copy home.
 * Speculation brings weights from their home unless they are there, takes them out with the states,
 * and waits for no norm. */
static uint32_t stream_states(gm_replay *r, uint32_t c, double seconds, bool is_speculation,
                              uint32_t *out_homed)
{
    gm_item *w = item(r, c, GM_WEIGHT), *s = item(r, c, GM_STATE), *g = item(r, c, GM_GRAD);
    double bytes = (double)chunk_of(r, c)->bytes[GM_STATE];
    bytes += is_speculation ? (double)chunk_of(r, c)->bytes[GM_WEIGHT] : 0;
    uint64_t n = 1 + (uint64_t)(bytes / r->slot_bytes), n_ahead = n < r->n_slots ? n : r->n_slots;
    double slice = bytes / (double)n;
    r->load->in += r->weight * bytes;
    r->load->out += r->weight * bytes;
    gm_sim_wait(&r->sim, s->homed);
    wait_for_slots(r, r->n_slices + 1);
    uint32_t first = gm_sim_add(&r->sim, GM_LANE_STATE, slice), last = first;
    if (n_ahead > 1) {
        wait_for_slots(r, r->n_slices + n_ahead);
        last = gm_sim_add(&r->sim, GM_LANE_STATE, slice_work(r, (double)(n_ahead - 1), slice));
    }
    gm_sim_wait(&r->sim, g->filled);
    gm_sim_wait(&r->sim, w->filled);
    gm_sim_wait(&r->sim, w->homed);
    if (!is_speculation) {
        gm_sim_wait(&r->sim, r->norm);
        gm_sim_wait(&r->sim, last_reader(r, c, GM_WEIGHT));
    }
    gm_sim_wait(&r->sim, first);
    uint32_t node = gm_sim_add(&r->sim, GM_LANE_UPDATE, seconds / (double)n);
    if (n > 1) {
        gm_sim_wait(&r->sim, node);
        *out_homed = gm_sim_add(&r->sim, GM_LANE_STATE_OUT, slice_work(r, (double)(n - 1), slice));
        note_gone(r, *out_homed, r->n_slices + n - 1);
        if (n > n_ahead) {
            gm_sim_wait(&r->sim, node);
            last = gm_sim_add(&r->sim, GM_LANE_STATE, slice_work(r, (double)(n - n_ahead), slice));
        }
        gm_sim_wait(&r->sim, last);
        node = gm_sim_add(&r->sim, GM_LANE_UPDATE, seconds * (double)(n - 1) / (double)n);
    }
    gm_sim_wait(&r->sim, node);
    *out_homed = gm_sim_add(&r->sim, GM_LANE_STATE_OUT, slice);
    r->n_slices += n;
    note_gone(r, *out_homed, r->n_slices);
    return node;
}

static uint32_t update_in_place(gm_replay *r, uint32_t c, double seconds, bool is_speculation)
{
    gm_item *s = item(r, c, GM_STATE);
    bool is_opaque = r->problem->input->is_opaque; /* it may write all three */
    gm_sim_wait(&r->sim, is_speculation ? item(r, c, GM_WEIGHT)->homed : r->norm);
    for (uint32_t piece = 0; piece < GM_N_OWN_PIECES; piece++) {
        gm_sim_wait(&r->sim, item(r, c, (gm_piece)piece)->filled);
        gm_sim_wait(&r->sim, is_opaque ? item(r, c, (gm_piece)piece)->homed : GM_NO_NODE);
    }
    gm_sim_wait(&r->sim, last_reader(r, c, GM_WEIGHT));
    gm_lane lane = is_opaque ? GM_LANE_COMPUTE : GM_LANE_UPDATE;
    uint32_t node = gm_sim_add(&r->sim, lane, seconds);
    s->filled = s->used = node;
    return node;
}

/* Of an opaque update, which has its three pieces one after the other. */
static void bring(gm_replay *r, uint32_t c)
{
    gm_item *s = item(r, c, GM_STATE);
    size_t bytes = chunk_of(r, c)->bytes[GM_STATE];
    if (!s->is_there && bytes > 0) {
        claim(r, c, GM_STATE);
        s->filled = copy(r, GM_LANE_STATE, bytes);
    }
    grad_in(r, c);
    fetch_in(r, c, GM_LANE_STATE);
}

static uint32_t pass_states(gm_replay *r, uint32_t c, double seconds, bool is_speculation)
{
    gm_item *s = item(r, c, GM_STATE);
    size_t bytes = chunk_of(r, c)->bytes[GM_STATE];
    uint32_t node = update_in_place(r, c, seconds, is_speculation);
    if (bytes > 0) {
        gm_sim_wait(&r->sim, node);
        s->homed = copy(r, GM_LANE_STATE_OUT, bytes);
    }
    return node;
}

static void update_on_device(gm_replay *r, uint32_t c)
{
    gm_item *w = item(r, c, GM_WEIGHT), *s = item(r, c, GM_STATE), *g = item(r, c, GM_GRAD);
    uint32_t cls = r->plan->class_of[c], node;
    double seconds = (double)chunk_of(r, c)->numel / r->problem->input->rates.device_adam;
    if (r->problem->input->is_opaque) {
        bring(r, c);
    } else {
        grad_in(r, c);
        fetch(r, c);
    }
    r->load->compute += r->weight * seconds;
    if (!gm_is_state_streamed(cls)) {
        node = update_in_place(r, c, seconds, false);
    } else if (r->problem->input->is_opaque) {
        node = pass_states(r, c, seconds, false);
    } else {
        node = stream_states(r, c, seconds, false, &s->homed);
    }
    g->used = w->filled = node;
    item(r, c, GM_GATHERED)->is_there = false;
    if (gm_is_streamed(cls)) {
        gm_sim_wait(&r->sim, node);
        w->homed = copy(r, GM_LANE_EVICT, chunk_of(r, c)->bytes[GM_WEIGHT]);
    }
}

/* In place, with all at home as well: weights with blocks of their own stay there, the rest goes to
 * the spares. */
static void speculate_in_place(gm_replay *r, uint32_t c, double seconds)
{
    gm_item *w = item(r, c, GM_WEIGHT), *s = item(r, c, GM_STATE), *g = item(r, c, GM_GRAD);
    grad_out(r, c);
    bring(r, c);
    w->filled = g->used = pass_states(r, c, seconds, true);
    s->is_there = false;
    r->chunks[c].result = w->filled;
    if (gm_is_streamed(r->plan->class_of[c])) {
        gm_sim_wait(&r->sim, w->filled);
        gm_sim_wait(&r->sim, s->homed);
        w->homed = copy(r, GM_LANE_EVICT, chunk_of(r, c)->bytes[GM_WEIGHT]);
        w->is_there = false;
        r->chunks[c].result = w->homed;
    }
}

static void speculate(gm_replay *r, uint32_t c)
{
    gm_item *w = item(r, c, GM_WEIGHT), *g = item(r, c, GM_GRAD);
    if (!r->is_last || r->chunks[c].result != GM_NO_NODE) {
        return;
    }
    if (gm_is_on_host(r->plan->class_of[c])) {
        grad_out(r, c);
        gm_sim_wait(&r->sim, g->homed);
        gm_sim_wait(&r->sim, w->homed);
        r->load->host += r->weight * (double)chunk_of(r, c)->numel;
        r->chunks[c].result = gm_sim_add(&r->sim, GM_LANE_HOST, (double)chunk_of(r, c)->numel);
    } else if (g->is_there) {
        double seconds = (double)chunk_of(r, c)->numel / r->problem->input->rates.device_adam;
        r->load->compute += r->weight * seconds;
        if (r->problem->input->is_opaque) {
            speculate_in_place(r, c, seconds);
        } else {
            g->used = stream_states(r, c, seconds, true, &r->chunks[c].result);
        }
    }
}

/* The result of a speculation is the update. */
static void take_result(gm_replay *r, uint32_t c)
{
    gm_item *w = item(r, c, GM_WEIGHT);
    bool is_opaque = r->problem->input->is_opaque;
    uint32_t result = r->chunks[c].result;
    r->chunks[c].result = GM_NO_NODE;
    item(r, c, GM_GATHERED)->is_there = false;
    if (is_opaque && w->is_there) {
        gm_sim_wait(&r->sim, result);
        w->homed = copy(r, GM_LANE_EVICT, chunk_of(r, c)->bytes[GM_WEIGHT]);
        return;
    }
    w->homed = item(r, c, GM_STATE)->homed = result;
    if (w->is_there) {
        gm_sim_wait(&r->sim, w->homed);
        wait_for_owner(r, c, GM_WEIGHT);
        w->filled = copy(r, GM_LANE_REFRESH, chunk_of(r, c)->bytes[GM_WEIGHT]);
    }
}

static void update(gm_replay *r, uint32_t c)
{
    if (!r->chunks[c].is_pending) {
        return;
    }
    r->chunks[c].is_pending = false;
    if (r->chunks[c].result != GM_NO_NODE) {
        take_result(r, c);
    } else if (gm_is_on_host(r->plan->class_of[c])) {
        update_on_host(r, c);
    } else {
        update_on_device(r, c);
    }
    r->chunks[c].has_home_grad = false;
    r->chunks[c].is_dirty = false;
    item(r, c, GM_GRAD)->is_there = false;
}

static uint32_t collective(gm_replay *r, size_t bytes, double rate)
{
    double seconds = rate > 0 ? (double)bytes / rate : 0;
    r->load->comm += r->weight * seconds;
    return gm_sim_add(&r->sim, GM_LANE_COMM, seconds);
}

static void gather(gm_replay *r, uint32_t c)
{
    gm_item *w = item(r, c, GM_WEIGHT), *whole = item(r, c, GM_GATHERED);
    if (whole->is_there) {
        return;
    }
    update(r, c);
    fetch(r, c);
    gm_sim_wait(&r->sim, w->filled);
    claim(r, c, GM_GATHERED);
    whole->filled =
        collective(r, chunk_of(r, c)->bytes[GM_GATHERED], r->problem->input->rates.gather);
    w->used = whole->filled;
}

/* The node added next adds to the gradient, or begins it. */
static void claim_grad(gm_replay *r, uint32_t c)
{
    const gm_item *g = item(r, c, GM_GRAD);
    grad_in(r, c);
    if (g->is_there) {
        gm_sim_wait(&r->sim, g->filled);
        gm_sim_wait(&r->sim, g->homed);
    } else {
        claim(r, c, GM_GRAD);
    }
}

/* All gradients of the pass have arrived. */
static void reduce(gm_replay *r, uint32_t c)
{
    gm_item *g = item(r, c, GM_GRAD), *whole = item(r, c, GM_UNREDUCED);
    claim_grad(r, c);
    gm_sim_wait(&r->sim, r->newest);
    g->filled = collective(r, chunk_of(r, c)->bytes[GM_UNREDUCED], r->problem->input->rates.reduce);
    whole->used = g->filled;
    whole->is_there = false;
}

/* Compute that is added next reads the weights. */
static void use(gm_replay *r, uint32_t c)
{
    if (gm_is_gathered(r->problem->input, c)) {
        gather(r, c);
    } else {
        update(r, c);
        fetch(r, c);
    }
}

static void follow_op(gm_replay *r, const gm_op *op)
{
    switch ((gm_op_kind)op->kind) {
    case GM_OP_FETCH:
        update(r, op->chunk);
        fetch(r, op->chunk);
        break;
    case GM_OP_GRAD_IN: grad_in(r, op->chunk); break;
    case GM_OP_GRAD_OUT: grad_out(r, op->chunk); break;
    case GM_OP_UPDATE: update(r, op->chunk); break;
    case GM_OP_GATHER: gather(r, op->chunk); break;
    case GM_OP_SPECULATE: speculate(r, op->chunk); break;
    }
}

/* A gradient of this pass begins to grow: the compute added next writes it. */
static void open_grad(gm_replay *r, uint32_t c)
{
    if (r->plan->places[c * GM_N_PIECES + GM_GRAD].length == 0) {
        return;
    }
    if (gm_is_reduced(r->problem->input, c)) {
        claim(r, c, GM_UNREDUCED);
    } else {
        claim_grad(r, c);
    }
}

static void follow_pass(gm_replay *r, const gm_course *course, const gm_schedule *schedule,
                        bool is_first, bool is_last, gm_load *loads)
{
    bool is_immediate = r->problem->input->when == GM_IMMEDIATE;
    bool is_at_step = r->problem->input->is_at_step;
    uint32_t most_issued = is_at_step ? UINT32_MAX : GM_ISSUED_BY_STEP, next_use = 0, next_open = 0;
    r->pass++;
    r->is_last = is_last;
    for (uint32_t t = 0; t < course->n; t++) {
        const gm_tick *tick = &course->trace->ticks[t];
        r->tick = t;
        bool has_updates = (is_first && !is_at_step && t < course->backward) ||
                           (is_immediate && is_last && t >= course->backward);
        r->load = &loads[has_updates ? 0 : 1];
        uint32_t n_before = r->sim.n;
        if (tick->kind == GM_TICK_GRAD && course->grad[tick->id] == t &&
            chunk_of(r, tick->id)->bytes[GM_GRAD] > 0) {
            if (gm_is_reduced(r->problem->input, tick->id)) {
                reduce(r, tick->id);
            } else {
                item(r, tick->id, GM_GRAD)->filled = r->newest;
                item(r, tick->id, GM_GRAD)->is_there = true;
            }
            r->chunks[tick->id].is_dirty = true;
            r->chunks[tick->id].is_pending =
                is_last && is_immediate && r->problem->is_trained[tick->id];
        }
        for (uint32_t i = schedule->begin[t]; i < schedule->begin[t + 1]; i++) {
            follow_op(r, &schedule->ops[i]);
        }
        uint32_t n_waits = r->sim.n_waits;
        for (uint32_t i = next_use; i < course->n_uses && course->uses[i].begin == t; i++) {
            use(r, course->uses[i].chunk);
        }
        for (uint32_t i = next_open; i < course->n_opens && course->opens[i].begin == t; i++) {
            if (!gm_is_reduced(r->problem->input, course->opens[i].chunk)) {
                grad_in(r, course->opens[i].chunk);
            }
        }
        for (; next_use < course->n_uses && course->uses[next_use].begin == t; next_use++) {
            uint32_t c = course->uses[next_use].chunk;
            gm_sim_wait(&r->sim, item(r, c, shown_piece(r, c))->filled);
            r->chunks[c].use_pass = r->pass;
            r->chunks[c].use_end = course->uses[next_use].end;
        }
        for (; next_open < course->n_opens && course->opens[next_open].begin == t; next_open++) {
            open_grad(r, course->opens[next_open].chunk);
        }
        r->load->compute += r->weight * (double)tick->seconds;
        bool is_free =
            r->sim.n == n_before && r->sim.n_waits == n_waits && t > 0 && r->newest != GM_NO_NODE;
        if (is_free) {
            r->sim.nodes[r->newest].work += (double)tick->seconds;
        } else {
            r->newest = gm_sim_add(&r->sim, GM_LANE_COMPUTE, (double)tick->seconds);
        }
        r->node_of[t] = r->newest;
    }
    r->tick = course->n;
    for (uint32_t c = 0; c < r->plan->n; c++) {
        if (r->chunks[c].use_pass == r->pass) {
            item(r, c, shown_piece(r, c))->used = r->node_of[r->chunks[c].use_end - 1];
        }
        if (is_last && r->problem->is_trained[c] &&
            (r->chunks[c].is_dirty || r->chunks[c].has_home_grad)) {
            r->chunks[c].is_pending = true; /* the step came: its gradients are complete */
        }
    }
    if (is_last && !is_immediate) {
        r->norm = r->newest;
        if (r->problem->has_unreduced) { /* the sum over ranks, behind all reduces */
            gm_sim_wait(&r->sim, r->newest);
            r->norm = collective(r, 0, 0);
        }
    }
    r->load = &loads[0];
    for (uint32_t i = 0, n_issued = 0; is_last && i < r->plan->n && n_issued < most_issued; i++) {
        n_issued += r->chunks[r->plan->order[i]].is_pending;
        update(r, r->plan->order[i]);
    }
}

/* Follows one step.  Returns the seconds of passes that stand for several: to be added for the
 * others. */
static void follow_step(gm_replay *r, gm_load *loads, uint32_t *ends, uint32_t *n_ends)
{
    uint32_t n_followed = 0;
    *n_ends = 0;
    for (uint32_t k = 0; k < r->problem->n_courses; k++) {
        const gm_course *course = &r->problem->courses[k];
        uint32_t n_runs = course->n_runs;
        if (r->problem->n_passes == 0 && k == r->problem->main) {
            n_runs = 1;
        }
        for (uint32_t run = 0; run < n_runs; run++) {
            bool is_middle = run == 1 && n_runs > 3;
            uint32_t stands_for = is_middle ? n_runs - 2 : 1;
            r->weight = (double)stands_for;
            bool is_last = n_followed + stands_for >= r->problem->n_passes;
            follow_pass(r, course, &r->plan->schedules[k], n_followed == 0, is_last, loads);
            n_followed += stands_for;
            run += stands_for - 1;
            ends[2 * *n_ends] = r->newest;
            ends[2 * *n_ends + 1] = stands_for;
            (*n_ends)++;
        }
    }
}

static gm_status replay_new(const gm_problem *problem, const gm_plan *plan, gm_replay *r)
{
    uint32_t n = problem->n;
    *r = (gm_replay){.problem = problem, .plan = plan, .norm = GM_NO_NODE, .newest = GM_NO_NODE};
    r->items = calloc((size_t)n * GM_N_PIECES, sizeof *r->items);
    r->chunks = calloc(n, sizeof *r->chunks);
    r->node_of = calloc((size_t)problem->most_ticks + 1, sizeof(uint32_t));
    size_t stage = (size_t)plan->ring[GM_STATE] * problem->input->block_bytes;
    gm_slots slots = gm_slots_of(stage);
    r->n_slots = slots.n;
    r->slot_bytes = (double)slots.bytes; /* 0: no states are streamed */
    r->most_gone = r->n_slots + 8;
    r->last_gone = GM_NO_NODE;
    r->gone = calloc(r->most_gone, sizeof *r->gone);
    bool has_all = r->gone && r->items && r->chunks && r->node_of;
    for (uint32_t c = 0; has_all && c < n; c++) {
        r->chunks[c].result = GM_NO_NODE;
    }
    GM_TRY(gm_owners_new(plan->n_blocks, &r->owners));
    GM_FAIL_IF(!has_all, GM_ERR_NOMEM, "host: no room to predict a plan of %u chunks", n);
    for (uint32_t i = 0; i < n * GM_N_PIECES; i++) {
        bool is_own = i % GM_N_PIECES < GM_N_OWN_PIECES;
        r->items[i] =
            (gm_item){GM_NO_NODE, GM_NO_NODE, GM_NO_NODE, is_own && plan->places[i].is_resident};
    }
    return GM_OK;
}

static void replay_free(gm_replay *r)
{
    gm_sim_free(&r->sim);
    free(r->items);
    free(r->gone);
    free(r->chunks);
    free(r->node_of);
    free(r->owners);
}

gm_status gm_plan_time(const gm_problem *problem, gm_plan *plan)
{
    gm_replay r;
    gm_load loads[2];
    uint32_t n_ends = 0;
    size_t most_ends = 4 * (size_t)problem->n_courses + 1;
    uint32_t *ends = calloc(2 * most_ends, sizeof *ends);
    gm_status status = replay_new(problem, plan, &r);
    if (status == GM_OK && !ends) {
        status = GM_FAIL(GM_ERR_NOMEM, "host: no room for %zu passes", most_ends);
    }
    if (status == GM_OK) {
        uint32_t before = GM_NO_NODE;
        gm_sim_begin(&r.sim);
        for (int cycle = 0; cycle < 3; cycle++) {
            before = r.newest;
            memset(loads, 0, sizeof loads);
            follow_step(&r, loads, ends, &n_ends);
            cycle += r.sim.n > MANY_NODES && cycle == 0 ? 1 : 0;
        }
        (void)gm_sim_run(&r.sim, &problem->input->rates);
        if (r.sim.has_failed) {
            status = GM_FAIL(GM_ERR_NOMEM, "host: no room to predict %u operations", r.sim.n);
        } else {
            double start = before == GM_NO_NODE ? 0 : r.sim.nodes[before].end, step = 0;
            for (uint32_t i = 0; i < n_ends; i++) {
                double end = r.sim.nodes[ends[2 * i]].end;
                step += (end - start) * (double)ends[2 * i + 1];
                start = end;
            }
            gm_plan_bound(problem, loads, step, plan);
        }
    }
    replay_free(&r);
    free(ends);
    return status;
}
