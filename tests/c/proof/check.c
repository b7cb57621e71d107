/* check.c - replays a plan in a model of blocks and says what first goes wrong.
 *
 * Written from plan.h alone: it shares neither data nor code with what makes plans, so that a mistake there is not
 * made here again.  What it demands:
 * 1. Every piece has a place that fits its class; own blocks belong to one piece, rings to one kind.
 * 2. A chunk's weights are on the device, newest, from a tick that takes them to its end, and its pending update is
 *    issued before.
 * 3. Blocks are overwritten only when what they show is not in use, not growing, and not the only copy.
 * 4. A gradient that is added to is on the device when it grows; a pending one was consumed before.
 * 5. What was pending when a pass began is not at its end.
 * 6. Weights that are gathered are on the device, of the newest shards, when a tick takes them; a gather finds its
 *    blocks free and no update due, so that every rank can issue it, whatever it holds.
 * 7. A gradient that is summed over ranks has whole blocks while it grows, and what was summed before is on the device
 *    when the sum is added.
 * 8. Of a chunk that stays nothing leaves: class R, each piece in blocks of its own, and its gradient never goes home.
 * 9. Opaque updates: none is on the host; weights, gradient and all of the states are on the device at once; and, as the
 *    input says, the step leaves none of them to the next pass.
 * 10. What is speculated is of a complete gradient; the next update takes it in one step, and does without it in the next,
 *    as when a clip fires. */
#include <stdlib.h>
#include <string.h>

#include "plan/plan.h"

#define NOBODY UINT32_MAX

typedef struct gm_model_chunk {
    bool is_stale;      /* the host has newer weights than the device */
    bool is_outdated;   /* the gathered weights are older than the shard */
    bool is_pending;    /* an update is due */
    bool was_pending;   /* when the pass began, and still */
    bool is_spent;      /* updated with a gradient of the present pass */
    bool has_home_grad; /* the gradient summed so far is (also) at home */
    bool is_grad_dirty; /* it is on the device alone */
    bool has_result;    /* of a speculation */
    bool is_growing;
    uint32_t until;  /* weights, gathered if they are, are in use before this tick of the pass */
    uint32_t starts; /* tick of the present pass from which the gradient may grow */
    uint32_t ends;   /* tick at which it is complete */
    uint32_t touch;  /* first of backward; GM_NO_TICK: none */
    uint32_t next;   /* chunk whose gradient may grow from the same tick; NOBODY: none */
} gm_model_chunk;

typedef struct gm_model {
    const gm_plan *plan;
    const gm_plan_input *input;
    gm_model_chunk *chunks;
    uint32_t *shows;   /* (n_blocks,) piece: chunk * GM_N_PIECES + piece, or NOBODY */
    uint32_t *region;  /* (n_blocks,) who a block is given to: a piece, or a ring */
    uint32_t *started; /* (most ticks,) first of the chunks whose gradients may grow from a tick */
    const gm_trace *trace;
    uint32_t tick;
    bool is_last; /* the present pass ends the step */
    bool fires;   /* the step that ends now is not the one that was speculated */
} gm_model;

static const char *const piece_names[] = {"weights", "states", "gradient", "gathered weights",
                                          "unreduced gradient"};

#define VIOLATION(m, ...) violation((m), GM_FAIL(GM_ERR_STATE, __VA_ARGS__))
#define VIOLATION_IF(m, condition, ...)         \
    do {                                        \
        if (condition) {                        \
            return VIOLATION((m), __VA_ARGS__); \
        }                                       \
    } while (0)

/* Adds where it happened; the text of the failure is quoted. */
static gm_status violation(const gm_model *m, gm_status status)
{
    if (!m->trace) {
        return status;
    }
    return GM_FAIL(status, "plan, tick %u of %u: %s", m->tick, m->trace->n, gm_last_error());
}

static const gm_place *place_of(const gm_model *m, uint32_t chunk, uint32_t piece)
{
    return gm_plan_place(m->plan, chunk, (gm_piece)piece);
}

static uint32_t block_at(const gm_place *place, uint32_t j)
{
    return place->base + (uint32_t)(((uint64_t)place->offset + j) % place->length);
}

static bool is_gathered(const gm_model *m, uint32_t chunk)
{
    return m->input->chunks[chunk].bytes[GM_GATHERED] > 0;
}

static bool is_reduced(const gm_model *m, uint32_t chunk)
{
    return m->input->chunks[chunk].bytes[GM_UNREDUCED] > 0;
}

static bool is_on_device(const gm_model *m, uint32_t chunk, uint32_t piece)
{
    const gm_place *place = place_of(m, chunk, piece);
    for (uint32_t j = 0; j < gm_plan_blocks(m->input, chunk, piece, place->is_resident); j++) {
        if (place->length == 0 || m->shows[block_at(place, j)] != chunk * GM_N_PIECES + piece) {
            return false;
        }
    }
    return true;
}

/* Invariant 1 for one piece. */
static gm_status check_place(gm_model *m, uint32_t chunk, uint32_t piece)
{
    const gm_plan_chunk *shape = &m->input->chunks[chunk];
    const gm_place *place = place_of(m, chunk, piece);
    gm_class cls = gm_plan_class(m->plan, chunk);
    uint32_t blocks = gm_plan_blocks(m->input, chunk, piece, place->is_resident);
    bool has_own_weights = cls == GM_CLASS_R || cls == GM_CLASS_S1 || cls == GM_CLASS_C1;
    bool has_ring_states = cls == GM_CLASS_S1 || cls == GM_CLASS_S2;
    VIOLATION_IF(m,
                 cls >= GM_N_CLASSES || (shape->must_reside && !has_own_weights) ||
                     (shape->stays && cls != GM_CLASS_R),
                 "chunk %u may not be of class %d", chunk, (int)cls);
    VIOLATION_IF(m,
                 shape->stays && piece < GM_N_OWN_PIECES && shape->blocks[piece] > 0 &&
                     !place->is_resident,
                 "chunk %u stays on the device, and its %s have no blocks of their own", chunk,
                 piece_names[piece]);
    if (place->length == 0 || blocks == 0) {
        bool is_needed = piece == GM_WEIGHT || piece == GM_GATHERED ||
                         (piece == GM_STATE && (cls == GM_CLASS_R || has_ring_states));
        VIOLATION_IF(m, blocks > 0 && is_needed && shape->bytes[piece] > 0,
                     "chunk %u of class %d has no place for its %s", chunk, (int)cls,
                     piece_names[piece]);
        return GM_OK;
    }
    VIOLATION_IF(m,
                 place->offset >= place->length || blocks > place->length ||
                     (uint64_t)place->base + place->length > gm_plan_n_blocks(m->plan),
                 "chunk %u: %u blocks of %s at %u in [%u, +%u) of %u blocks", chunk, blocks,
                 piece_names[piece], place->offset, place->base, place->length,
                 gm_plan_n_blocks(m->plan));
    bool has_own = piece == GM_WEIGHT  ? has_own_weights
                   : piece == GM_STATE ? cls == GM_CLASS_R
                                       : place->is_resident;
    VIOLATION_IF(
        m,
        place->is_resident != has_own || (piece == GM_STATE && !has_own && !has_ring_states) ||
            (has_own && (place->length != blocks || place->offset != 0)),
        "chunk %u: the place of its %s does not fit class %d", chunk, piece_names[piece], (int)cls);
    VIOLATION_IF(
        m, piece == GM_GATHERED && (place->is_resident ? !has_own_weights : shape->must_reside),
        "chunk %u of class %d: its gathered weights may not be %s", chunk, (int)cls,
        place->is_resident ? "kept" : "in a ring");
    /* A ring is one region for all its pieces: it is named by its first piece. */
    uint32_t mine = chunk * GM_N_PIECES + piece, first = m->region[place->base];
    for (uint32_t j = 0; j < place->length; j++) {
        uint32_t *region = &m->region[place->base + j];
        bool is_shared = *region != NOBODY && !has_own && *region == first &&
                         *region % GM_N_PIECES == piece &&
                         !place_of(m, *region / GM_N_PIECES, piece)->is_resident &&
                         place_of(m, *region / GM_N_PIECES, piece)->base == place->base &&
                         place_of(m, *region / GM_N_PIECES, piece)->length == place->length;
        VIOLATION_IF(m, *region != NOBODY && !is_shared,
                     "block %u is given to the %s of chunk %u and the %s of chunk %u",
                     place->base + j, piece_names[*region % GM_N_PIECES], *region / GM_N_PIECES,
                     piece_names[piece], chunk);
        *region = is_shared ? *region : mine;
    }
    return GM_OK;
}

/* The piece's blocks show it from now on.  Invariant 3. */
static gm_status show(gm_model *m, uint32_t chunk, uint32_t piece)
{
    const gm_place *place = place_of(m, chunk, piece);
    uint32_t mine = chunk * GM_N_PIECES + piece;
    VIOLATION_IF(m, place->length == 0, "the %s of chunk %u have no place on the device",
                 piece_names[piece], chunk);
    for (uint32_t j = 0; j < gm_plan_blocks(m->input, chunk, piece, place->is_resident); j++) {
        uint32_t old = m->shows[block_at(place, j)];
        if (old == mine || old == NOBODY) {
            continue;
        }
        const gm_model_chunk *other = &m->chunks[old / GM_N_PIECES];
        uint32_t shown = is_gathered(m, old / GM_N_PIECES) ? GM_GATHERED : GM_WEIGHT;
        uint32_t grown = is_reduced(m, old / GM_N_PIECES) ? GM_UNREDUCED : GM_GRAD;
        bool is_growing = old % GM_N_PIECES == grown && other->is_growing;
        bool is_only = old % GM_N_PIECES == GM_GRAD && other->is_grad_dirty;
        VIOLATION_IF(m, old % GM_N_PIECES == shown && other->until > m->tick,
                     "the %s of chunk %u overwrite weights of chunk %u, in use until %u",
                     piece_names[piece], chunk, old / GM_N_PIECES, other->until);
        VIOLATION_IF(m, is_growing || is_only,
                     "the %s of chunk %u overwrite the gradient of chunk %u, which %s",
                     piece_names[piece], chunk, old / GM_N_PIECES,
                     is_growing ? "is growing" : "is nowhere else");
    }
    for (uint32_t j = 0; j < gm_plan_blocks(m->input, chunk, piece, place->is_resident); j++) {
        m->shows[block_at(place, j)] = mine;
    }
    return GM_OK;
}

static void give_back(gm_model *m, uint32_t c, uint32_t piece)
{
    const gm_place *place = place_of(m, c, piece);
    for (uint32_t j = 0; j < m->input->chunks[c].blocks[piece] && place->length > 0; j++) {
        if (m->shows[block_at(place, j)] == c * GM_N_PIECES + piece) {
            m->shows[block_at(place, j)] = NOBODY;
        }
    }
}

static void forget_grad(gm_model *m, uint32_t c)
{
    give_back(m, c, GM_GRAD);
    m->chunks[c].has_home_grad = m->chunks[c].is_grad_dirty = false;
}

static bool is_host_class(const gm_model *m, uint32_t c)
{
    return gm_plan_class(m->plan, c) == GM_CLASS_C1 || gm_plan_class(m->plan, c) == GM_CLASS_C2;
}

/* The result of a speculation is the update: home and spare change places. */
static void take_result(gm_model *m, uint32_t c)
{
    m->chunks[c].is_stale = m->chunks[c].is_outdated = true;
    m->chunks[c].is_spent = !m->chunks[c].was_pending;
    m->chunks[c].is_pending = m->chunks[c].was_pending = m->chunks[c].has_result = false;
    forget_grad(m, c);
}

static gm_status fetch(gm_model *m, uint32_t c)
{
    gm_model_chunk *chunk = &m->chunks[c];
    if (chunk->is_pending && chunk->has_result) {
        take_result(m, c);
    }
    if ((is_on_device(m, c, GM_WEIGHT) && !chunk->is_stale) ||
        (chunk->is_pending && is_host_class(m, c))) {
        return GM_OK;
    }
    VIOLATION_IF(m, chunk->until > m->tick && !is_gathered(m, c),
                 "weights of chunk %u are copied over while in use", c);
    GM_TRY(show(m, c, GM_WEIGHT));
    chunk->is_stale = false;
    return GM_OK;
}

/* Invariant 6. */
static gm_status gather(gm_model *m, uint32_t c)
{
    gm_model_chunk *chunk = &m->chunks[c];
    VIOLATION_IF(m, !is_gathered(m, c), "chunk %u is gathered, but has no such place", c);
    VIOLATION_IF(m, chunk->was_pending, "chunk %u is gathered before its pending update", c);
    if (is_on_device(m, c, GM_GATHERED) && !chunk->is_outdated) {
        return GM_OK;
    }
    VIOLATION_IF(m, chunk->until > m->tick, "chunk %u is gathered over weights in use until %u", c,
                 chunk->until);
    GM_TRY(fetch(m, c));
    VIOLATION_IF(m, !is_on_device(m, c, GM_WEIGHT) || chunk->is_stale,
                 "chunk %u is gathered, but its shard is %s", c,
                 chunk->is_stale ? "stale" : "not on the device");
    GM_TRY(show(m, c, GM_GATHERED));
    chunk->is_outdated = false;
    return GM_OK;
}

static gm_status grad_in(gm_model *m, uint32_t c)
{
    if (m->chunks[c].has_home_grad && !is_on_device(m, c, GM_GRAD)) {
        return show(m, c, GM_GRAD);
    }
    return GM_OK;
}

static gm_status grad_out(gm_model *m, uint32_t c)
{
    VIOLATION_IF(m, m->chunks[c].is_growing && !is_reduced(m, c),
                 "the gradient of chunk %u goes home while it grows", c);
    VIOLATION_IF(m, m->input->chunks[c].stays,
                 "the gradient of chunk %u goes home, and it has none", c);
    if (m->chunks[c].is_grad_dirty) {
        m->chunks[c].is_grad_dirty = false;
        m->chunks[c].has_home_grad = true;
    }
    return GM_OK;
}

/* Invariant 9. */
static gm_status check_opaque(gm_model *m, uint32_t c)
{
    const gm_place *states = place_of(m, c, GM_STATE);
    VIOLATION_IF(m, is_host_class(m, c), "chunk %u of class %d is updated by an opaque update", c,
                 (int)gm_plan_class(m->plan, c));
    VIOLATION_IF(m,
                 gm_plan_blocks(m->input, c, GM_STATE, states->is_resident) !=
                     m->input->chunks[c].blocks[GM_STATE],
                 "the states of chunk %u have a place for a part of them", c);
    for (uint32_t piece = 0; piece < GM_N_OWN_PIECES; piece++) {
        VIOLATION_IF(m, !is_on_device(m, c, piece),
                     "chunk %u is updated, and its %s are not on the device", c,
                     piece_names[piece]);
    }
    return GM_OK;
}

static gm_status update(gm_model *m, uint32_t c)
{
    gm_model_chunk *chunk = &m->chunks[c];
    gm_class cls = gm_plan_class(m->plan, c);
    if (!chunk->is_pending) {
        return GM_OK;
    }
    VIOLATION_IF(m, chunk->until > m->tick && !is_gathered(m, c),
                 "chunk %u is updated while its weights are in use", c);
    if (chunk->has_result) {
        take_result(m, c);
        return GM_OK;
    }
    if (is_host_class(m, c)) {
        GM_TRY(grad_out(m, c));
        chunk->is_stale = true;
    } else {
        GM_TRY(grad_in(m, c));
        GM_TRY(fetch(m, c));
        if (cls != GM_CLASS_R && m->input->chunks[c].blocks[GM_STATE] > 0) {
            GM_TRY(show(m, c, GM_STATE));
        }
    }
    GM_TRY(m->input->is_opaque ? check_opaque(m, c) : GM_OK);
    VIOLATION_IF(m, is_host_class(m, c) ? !chunk->has_home_grad : !is_on_device(m, c, GM_GRAD),
                 "the gradient of chunk %u is lost before its update", c);
    chunk->is_spent = !chunk->was_pending;
    chunk->is_outdated = true;
    chunk->is_pending = chunk->was_pending = false;
    forget_grad(m, c);
    return GM_OK;
}

/* Invariant 10. */
static gm_status speculate(gm_model *m, uint32_t c)
{
    gm_model_chunk *chunk = &m->chunks[c];
    gm_class cls = gm_plan_class(m->plan, c);
    bool has_states = cls == GM_CLASS_S1 || cls == GM_CLASS_S2;
    VIOLATION_IF(
        m, !gm_plan_is_speculated(m->plan, c) || cls == GM_CLASS_R || m->input->when != GM_DEFERRED,
        "chunk %u of class %d may not be speculated", c, (int)cls);
    VIOLATION_IF(m, !chunk->is_grad_dirty && !chunk->has_home_grad,
                 "chunk %u is speculated without its gradient", c);
    if (!m->is_last) {
        return GM_OK; /* the engine waits for the last gradient */
    }
    VIOLATION_IF(m, has_states && (chunk->is_growing || !is_on_device(m, c, GM_GRAD)),
                 "chunk %u is speculated, but its gradient is not on the device", c);
    if (m->input->is_opaque) { /* in place, and rolled back */
        VIOLATION_IF(m, chunk->until > m->tick && !is_gathered(m, c),
                     "chunk %u is speculated in its weights while they are in use", c);
        GM_TRY(fetch(m, c));
        GM_TRY(m->input->chunks[c].blocks[GM_STATE] > 0 ? show(m, c, GM_STATE) : GM_OK);
        GM_TRY(check_opaque(m, c));
        give_back(m, c, GM_WEIGHT);
        give_back(m, c, GM_STATE);
    } else {
        GM_TRY(has_states ? show(m, c, GM_STATE) : grad_out(m, c));
    }
    chunk->has_result = true;
    return GM_OK;
}

static gm_status run_op(gm_model *m, const gm_op *op)
{
    VIOLATION_IF(m, op->chunk >= m->input->n_chunks, "operation %u on chunk %u of %u", op->kind,
                 op->chunk, m->input->n_chunks);
    switch (op->kind) {
    case GM_OP_FETCH: return fetch(m, op->chunk);
    case GM_OP_GRAD_IN: return grad_in(m, op->chunk);
    case GM_OP_GRAD_OUT: return grad_out(m, op->chunk);
    case GM_OP_UPDATE: return update(m, op->chunk);
    case GM_OP_GATHER: return gather(m, op->chunk);
    case GM_OP_SPECULATE: return speculate(m, op->chunk);
    default: return VIOLATION(m, "operation of unknown kind %u", op->kind);
    }
}

/* Invariant 2 for a chunk that the present tick takes. */
static gm_status take(gm_model *m, uint32_t c, uint32_t until)
{
    gm_model_chunk *chunk = &m->chunks[c];
    VIOLATION_IF(m, chunk->is_spent, "chunk %u is used by the pass whose gradient has updated it",
                 c);
    VIOLATION_IF(m, chunk->was_pending, "chunk %u is used before its pending update", c);
    if (is_gathered(m, c)) {
        VIOLATION_IF(m, !is_on_device(m, c, GM_GATHERED) || chunk->is_outdated,
                     "chunk %u is used, but its gathered weights are %s", c,
                     chunk->is_outdated ? "outdated" : "not on the device");
    } else if (!is_on_device(m, c, GM_WEIGHT) || (chunk->is_stale && chunk->until <= m->tick)) {
        return VIOLATION(m, "chunk %u is used, but its weights are %s", c,
                         chunk->is_stale ? "stale" : "not on the device");
    }
    until = until > m->tick + 1 ? until : m->tick + 1;
    chunk->until = until > chunk->until ? until : chunk->until;
    return GM_OK;
}

/* Invariant 4: GM_GRAD is added to. */
static gm_status claim_grad(gm_model *m, uint32_t c)
{
    const gm_model_chunk *chunk = &m->chunks[c];
    VIOLATION_IF(m, chunk->is_pending, "a gradient of chunk %u grows onto one that is pending", c);
    VIOLATION_IF(m, chunk->has_home_grad && !is_on_device(m, c, GM_GRAD),
                 "the gradient of chunk %u is to be added to, but not on the device", c);
    return show(m, c, GM_GRAD);
}

static gm_status start_grad(gm_model *m, uint32_t c)
{
    GM_TRY(is_reduced(m, c) ? show(m, c, GM_UNREDUCED) : claim_grad(m, c));
    m->chunks[c].is_growing = true;
    return GM_OK;
}

/* All gradients of the pass have arrived.  Invariant 7. */
static gm_status complete_grad(gm_model *m, uint32_t c, bool is_last)
{
    gm_model_chunk *chunk = &m->chunks[c];
    if (m->tick == 0) { /* no operation comes before: the engine does on demand what is due */
        GM_TRY(update(m, c));
        GM_TRY(grad_in(m, c));
    }
    if (!chunk->is_growing) {
        GM_TRY(start_grad(m, c));
    }
    if (is_reduced(m, c)) {
        VIOLATION_IF(m, !is_on_device(m, c, GM_UNREDUCED),
                     "the gradient of chunk %u is lost before it is summed", c);
        GM_TRY(claim_grad(m, c));
        give_back(m, c, GM_UNREDUCED);
    }
    chunk->is_growing = false;
    chunk->is_grad_dirty = true;
    chunk->is_pending = is_last && m->input->when == GM_IMMEDIATE && m->input->chunks[c].numel > 0;
    return GM_OK;
}

/* First touch in backward of one of a unit's chunks, or GM_NO_TICK. */
static uint32_t touch_of_unit(const gm_model *m, uint32_t unit)
{
    uint32_t first = GM_NO_TICK;
    for (uint32_t i = m->input->unit_begin[unit]; i < m->input->unit_begin[unit + 1]; i++) {
        uint32_t touch = m->chunks[m->input->unit_chunks[i]].touch;
        first = touch < first ? touch : first;
    }
    return first;
}

static void start_unit(gm_model *m, uint32_t unit, uint32_t tick)
{
    for (uint32_t i = m->input->unit_begin[unit]; i < m->input->unit_begin[unit + 1]; i++) {
        gm_model_chunk *chunk = &m->chunks[m->input->unit_chunks[i]];
        chunk->starts = tick < chunk->starts ? tick : chunk->starts;
    }
}

/* A gradient may grow from the first touch of a chunk of a unit that the chunk belongs to; where a unit is never
 * touched, from when backward enters it. */
static void find_starts(gm_model *m)
{
    for (uint32_t c = 0; c < m->input->n_chunks; c++) {
        gm_model_chunk *chunk = &m->chunks[c];
        chunk->starts = chunk->ends = chunk->touch = GM_NO_TICK;
        chunk->until = 0;
        chunk->was_pending = chunk->is_pending;
        chunk->is_spent = false;
    }
    for (uint32_t t = 0; t < m->trace->n; t++) {
        const gm_tick *tick = &m->trace->ticks[t];
        if (tick->kind != GM_TICK_ENTER) {
            gm_model_chunk *chunk = &m->chunks[tick->id];
            chunk->starts = t < chunk->starts ? t : chunk->starts;
            chunk->touch = tick->kind == GM_TICK_TOUCH && t < chunk->touch ? t : chunk->touch;
            chunk->ends = tick->kind == GM_TICK_GRAD ? t : chunk->ends;
        }
    }
    for (uint32_t unit = 0; unit < m->input->n_units; unit++) {
        start_unit(m, unit, touch_of_unit(m, unit));
    }
    bool is_backward = false;
    for (uint32_t t = 0; t < m->trace->n; t++) {
        const gm_tick *tick = &m->trace->ticks[t];
        is_backward |= tick->kind != GM_TICK_ENTER;
        if (is_backward && tick->kind == GM_TICK_ENTER &&
            touch_of_unit(m, tick->id) == GM_NO_TICK) {
            start_unit(m, tick->id, t);
        }
    }
    memset(m->started, 0xff, m->trace->n * sizeof *m->started);
    for (uint32_t c = m->input->n_chunks; c-- > 0;) {
        uint32_t starts = m->chunks[c].starts;
        if (starts < m->chunks[c].ends && starts != GM_NO_TICK) {
            m->chunks[c].next = m->started[starts];
            m->started[starts] = c;
        }
    }
}

static bool has_grad(const gm_model *m, uint32_t c)
{
    return m->input->chunks[c].bytes[GM_GRAD] > 0 && m->chunks[c].ends != GM_NO_TICK;
}

static gm_status run_tick(gm_model *m, bool is_last)
{
    const gm_tick *tick = &m->trace->ticks[m->tick];
    uint32_t n_ops;
    bool is_grad = tick->kind == GM_TICK_GRAD;
    uint32_t begin = tick->kind == GM_TICK_ENTER ? m->input->unit_begin[tick->id] : 0;
    uint32_t end = tick->kind == GM_TICK_ENTER ? m->input->unit_begin[tick->id + 1] : 1;
    if (is_grad && m->chunks[tick->id].ends == m->tick && has_grad(m, tick->id)) {
        GM_TRY(complete_grad(m, tick->id, is_last));
    }
    const gm_op *ops = gm_plan_ops(m->plan, m->trace->hash, m->tick, &n_ops);
    for (uint32_t i = 0; i < n_ops; i++) {
        GM_TRY(run_op(m, &ops[i]));
    }
    for (uint32_t i = begin; i < end && !is_grad; i++) {
        uint32_t c = tick->kind == GM_TICK_ENTER ? m->input->unit_chunks[i] : tick->id;
        GM_TRY(take(m, c, tick->until < m->trace->n ? tick->until : m->trace->n));
    }
    for (uint32_t c = m->started[m->tick]; c != NOBODY && !is_grad; c = m->chunks[c].next) {
        if (has_grad(m, c)) {
            GM_TRY(start_grad(m, c));
        }
    }
    return GM_OK;
}

static gm_status run_pass(gm_model *m, const gm_trace *trace, bool is_last)
{
    m->trace = trace;
    m->tick = 0;
    m->is_last = is_last;
    VIOLATION_IF(m, !gm_plan_knows(m->plan, trace->hash), "there is no schedule for this trace");
    find_starts(m);
    for (; m->tick < trace->n; m->tick++) {
        GM_TRY(run_tick(m, is_last));
    }
    for (uint32_t c = 0; c < m->input->n_chunks; c++) {
        gm_model_chunk *chunk = &m->chunks[c];
        chunk->until = 0;
        if (chunk->was_pending && trace->n > 0) { /* invariant 5 */
            return VIOLATION(m, "the update of chunk %u was pending and still is", c);
        }
    }
    if (is_last) { /* also what an earlier pass of an immediate step has left */
        for (uint32_t c = 0; c < m->input->n_chunks; c++) {
            m->chunks[c].is_pending = (m->chunks[c].is_grad_dirty || m->chunks[c].has_home_grad) &&
                                      m->input->chunks[c].numel > 0;
            if (m->input->chunks[c].numel == 0) {
                forget_grad(m, c); /* no optimizer takes it: zero_grad drops it */
            }
            m->chunks[c].has_result &= !m->fires;
        }
        uint32_t n = m->input->is_at_step  ? m->input->n_chunks
                     : m->input->is_opaque ? GM_ISSUED_BY_STEP
                                           : 0;
        for (uint32_t i = 0; i < n && i < m->input->n_chunks; i++) {
            GM_TRY(update(m, gm_plan_update_order(m->plan)[i]));
        }
    }
    m->trace = NULL;
    return GM_OK;
}

/* One step, whose passes come in any order: it begins with trace `first`.  Of many equal passes three are as good as
 * all. */
static gm_status run_step(gm_model *m, uint32_t first, bool is_with_evaluation)
{
    const gm_plan_input *input = m->input;
    uint32_t last = UINT32_MAX;
    for (uint32_t i = 0; i < input->n_traces; i++) {
        uint32_t k = (first + i) % input->n_traces;
        if (input->traces[k]->has_backward && (!input->n_runs || input->n_runs[k] > 0)) {
            last = k;
        }
    }
    for (uint32_t i = 0; i < input->n_traces; i++) {
        uint32_t k = (first + i) % input->n_traces;
        bool is_training = input->traces[k]->has_backward;
        uint32_t n_runs = input->n_runs ? input->n_runs[k] : 1;
        n_runs = !is_training ? 0 : n_runs > 3 ? 3 : n_runs;
        for (uint32_t run = 0; run < n_runs; run++) {
            GM_TRY(run_pass(m, input->traces[k], k == last && run + 1 == n_runs));
        }
    }
    for (uint32_t k = 0; k < input->n_traces && is_with_evaluation; k++) {
        if (!input->traces[k]->has_backward) {
            GM_TRY(run_pass(m, input->traces[k], false));
        }
    }
    return GM_OK;
}

static gm_status check_order(const gm_model *m, bool *seen)
{
    const uint32_t *order = gm_plan_update_order(m->plan);
    for (uint32_t i = 0; i < m->input->n_chunks; i++) {
        VIOLATION_IF(m, order[i] >= m->input->n_chunks || seen[order[i]],
                     "the order of updates has chunk %u twice or out of range", order[i]);
        seen[order[i]] = true;
    }
    return GM_OK;
}

static gm_status run_check(gm_model *m)
{
    for (uint32_t c = 0; c < m->input->n_chunks; c++) {
        for (uint32_t piece = 0; piece < GM_N_PIECES; piece++) {
            GM_TRY(check_place(m, c, piece));
            if (place_of(m, c, piece)->is_resident && (piece == GM_WEIGHT || piece == GM_STATE)) {
                GM_TRY(show(m, c, piece));
            }
        }
    }
    uint32_t n_steps = m->input->n_traces > 3 ? m->input->n_traces : 3;
    for (uint32_t step = 0; step < n_steps; step++) {
        m->fires = step % 2 == 1;
        GM_TRY(run_step(m, step % m->input->n_traces, step != 1));
    }
    return GM_OK;
}

gm_status gm_plan_check(const gm_plan *plan, const gm_plan_input *input)
{
    uint32_t n_blocks = gm_plan_n_blocks(plan);
    gm_model m = {.plan = plan, .input = input};
    GM_FAIL_IF((uint64_t)n_blocks * input->block_bytes > input->device_bytes, GM_ERR_STATE,
               "plan: %u blocks of %zu bytes are more than the %zu bytes allowed", n_blocks,
               input->block_bytes, input->device_bytes);
    bool *seen = calloc((size_t)input->n_chunks + 1, sizeof *seen);
    m.chunks = calloc((size_t)input->n_chunks + 1, sizeof *m.chunks);
    m.shows = malloc(((size_t)n_blocks + 1) * sizeof *m.shows);
    m.region = malloc(((size_t)n_blocks + 1) * sizeof *m.region);
    size_t most_ticks = 1;
    for (uint32_t k = 0; k < input->n_traces; k++) {
        most_ticks = input->traces[k]->n > most_ticks ? input->traces[k]->n : most_ticks;
    }
    m.started = malloc(most_ticks * sizeof *m.started);
    gm_status status;
    if (!seen || !m.chunks || !m.shows || !m.region || !m.started) {
        status = GM_FAIL(GM_ERR_NOMEM, "host: no room to check a plan of %u blocks", n_blocks);
    } else {
        memset(m.shows, 0xff, n_blocks * sizeof *m.shows);
        memset(m.region, 0xff, n_blocks * sizeof *m.region);
        status = check_order(&m, seen);
        if (status == GM_OK) {
            status = run_check(&m);
        }
    }
    free(seen);
    free(m.chunks);
    free(m.shows);
    free(m.region);
    free(m.started);
    return status;
}
