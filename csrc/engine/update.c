/* update.c - the update of one chunk in one step: prepared as a task, issued when the plan says so
 * or when somebody needs the result, run on the device or on the host, ordered by fences alone.
 *
 *                armed                its gradient is complete
 *     NONE ------------------> ARMED -------------------------> PENDING
 *      ^ ^                      |                                  |
 *      | +------ disarmed ------+                                  |
 *      +---------------- issued, or forgotten --------------------+
 *
 * What no armed backward has updated the step leads from NONE to PENDING.
 *
 * Invariants
 *   1. A chunk with a pending update is updated before anything reads its weights or states, or
 *      writes its gradient.
 *   2. A task is rewritten only when its last run has ended.
 *   3. A task whose factor the host has not seen (GM_FACTOR_LATE) reads it when it runs, behind the
 *      clip's fence, and only there: what speculation has made is taken as if no clip fired, and a
 *      call behind it steps again, from the old homes, which are the spares now, to the new ones,
 *      if one did.  Whoever uses the new homes comes behind that call.  Of an opaque update the
 *      host waits for the factor instead.
 *   4. Immediate updates: a chunk that was updated inside a backward is not used again by that
 *      backward; it would see new weights where the gradient of the old ones is meant.  If it
 *      happens the engine dies with that text.
 *
 * The host may wait in: prepare_task (for a run of two steps ago), prepare_opaque (for the factor
 * of a clip), and where chunk.c says. */
#include "engine/engine_impl.h"

#include <stdlib.h>
#include <string.h>

static const bool may_move[GM_N_UPDATE_STATES][GM_N_UPDATE_STATES] = {
    [GM_UPDATE_NONE] = {[GM_UPDATE_ARMED] = true, [GM_UPDATE_PENDING] = true},
    [GM_UPDATE_ARMED] = {[GM_UPDATE_NONE] = true, [GM_UPDATE_PENDING] = true},
    [GM_UPDATE_PENDING] = {[GM_UPDATE_NONE] = true},
};

static void move(gm_engine *engine, uint32_t chunk, gm_update_state to)
{
    gm_chunk_state *state = &engine->chunk_states[chunk];
    GM_ASSERT(may_move[state->update][to]);
    engine->update.n_pending -= state->update == GM_UPDATE_PENDING;
    engine->update.n_pending += to == GM_UPDATE_PENDING;
    state->update = to;
}

static const gm_place *place_of(const gm_engine *engine, uint32_t chunk, gm_piece piece)
{
    return engine->room.plan ? gm_plan_place(engine->room.plan, chunk, piece) : NULL;
}

void gm_engine_tell_host_rate(gm_engine *engine, double rate)
{
    engine->update.told_rate = rate;
}

gm_status gm_update_new(gm_engine *engine)
{
    atomic_init(&engine->update.host_ns, 0);
    atomic_init(&engine->update.host_params, 0);
    atomic_init(&engine->update.n_late, 0);
    atomic_init(&engine->update.async_status, GM_OK);
    engine->update.ranges = calloc(3 * (size_t)engine->n_params + 1, sizeof *engine->update.ranges);
    GM_FAIL_IF(!engine->update.ranges, GM_ERR_NOMEM, "HOST: tasks of %u parameters",
               engine->n_params);
    for (uint32_t chunk = 0; chunk < gm_layout_n_chunks(engine->layout); chunk++) {
        gm_chunk_state *state = &engine->chunk_states[chunk];
        for (int turn = 0; turn < 3; turn++) {
            state->task[turn].engine = engine;
            state->task[turn].ranges =
                &engine->update.ranges[3 * state->first_param + (uint32_t)turn * state->n_params];
        }
    }
    GM_TRY(engine->device->ops->stream_new(engine->device, &engine->update.stream));
    return engine->device->ops->stream_new(engine->device, &engine->update.host_stream);
}

void gm_update_free(gm_engine *engine)
{
    gm_free_stream(engine->device, &engine->update.stream);
    gm_free_stream(engine->device, &engine->update.host_stream);
    free(engine->update.ranges);
}

/* ---- running one update ---- */

static void set_arrays(gm_engine *engine, uint32_t chunk, gm_task *task, uint8_t *weight,
                       uint8_t *state, uint8_t *grad)
{
    const gm_engine_param *spec = gm_chunk_spec(engine, chunk);
    gm_state_shape shape =
        gm_state_shape_of(spec, gm_layout_chunk(engine->layout, chunk)->shard_numel);
    task->args = (gm_adam_args){
        .format = spec->format,
        .grad_dtype = gm_grad_dtype(engine, spec),
        .weight = weight,
        .low = spec->has_low ? state + shape.low : NULL,
        .m = (float *)(void *)(state + shape.m),
        .v = (float *)(void *)(state + shape.v),
        .grad = grad,
        .ranges = task->ranges,
        .n_ranges = task->n_ranges,
    };
}

/* What kernels and the host multiply gradients by, where the host has not seen it: behind its
 * fence. */
static gm_status order_factor(gm_engine *engine, gm_task *task, bool is_at_home, gm_stream stream)
{
    return task->factor == GM_FACTOR_KNOWN
               ? GM_OK
               : gm_clip_order(engine, is_at_home, stream, &task->args.grad_scale);
}

static gm_status update_in_place(gm_engine *engine, uint32_t chunk, gm_task *task)
{
    gm_chunks *chunks = engine->chunks;
    gm_stream stream = engine->update.stream;
    const gm_use uses[] = {
        {GM_WEIGHT, GM_WRITE, stream}, {GM_STATE, GM_WRITE, stream}, {GM_GRAD, GM_READ, stream}};
    GM_TRY(gm_chunks_begin_all(chunks, chunk, uses, 3));
    set_arrays(engine, chunk, task, (uint8_t *)gm_chunks_address(chunks, chunk, GM_WEIGHT),
               (uint8_t *)gm_chunks_address(chunks, chunk, GM_STATE),
               (uint8_t *)gm_chunks_address(chunks, chunk, GM_GRAD));
    GM_TRY(order_factor(engine, task, false, stream));
    uint32_t entry =
        gm_timeline_begin(engine->timeline, GM_LOG_DEVICE_UPDATE, GM_ON_UPDATE, chunk, GM_STATE,
                          gm_engine_piece_bytes(engine, chunk, GM_STATE), stream);
    GM_TRY(engine->device->ops->adam(engine->device, &task->args, stream));
    gm_timeline_end(engine->timeline, entry, stream);
    return gm_chunks_end_all(chunks, chunk, uses, 3);
}

/* Weights and gradient are on the device; so are the states, or they pass through the stage. */
static gm_status update_on_device(gm_engine *engine, uint32_t chunk, gm_task *task)
{
    gm_chunks *chunks = engine->chunks;
    GM_TRY(gm_chunks_note_readers(chunks, chunk, GM_WEIGHT, engine->call.stream));
    GM_TRY(gm_chunks_is_resident(chunks, chunk, GM_STATE) ? update_in_place(engine, chunk, task)
                                                          : gm_stage_update(engine, chunk, task));
    if (gm_chunks_pins(chunks, chunk, GM_WEIGHT) > 0) { /* who shows them may read on */
        GM_TRY(gm_chunks_wait_ready(chunks, chunk, GM_WEIGHT, engine->call.stream));
    }
    const gm_place *weight = place_of(engine, chunk, GM_WEIGHT);
    return weight && !weight->is_resident ? gm_chunks_send_home(chunks, chunk, GM_WEIGHT) : GM_OK;
}

static void run_host_task(void *context)
{
    gm_task *task = context;
    gm_engine *engine = task->engine;
    bool is_redo = task->factor == GM_FACTOR_REDO;
    float scale = is_redo ? *task->args.grad_scale : 0;
    if (atomic_load(&task->run) == GM_RUN_DROPPED || (scale >= 1 && scale <= 1)) {
        atomic_store(&task->run, GM_RUN_NONE);
        return;
    }
    atomic_fetch_add(&engine->update.n_late, is_redo);
    double began = gm_seconds(), told = engine->update.told_rate;
    gm_status status = gm_adam_host(&task->args, engine->workers);
    double ns = (gm_seconds() - began) * 1e9;
    unsigned long long n = 0;
    for (size_t i = 0; i < task->n_ranges; i++) {
        n += task->ranges[i].end - task->ranges[i].begin;
    }
    ns = told > 0 ? (double)n * 1e9 / told : ns;
    atomic_fetch_add(&engine->update.host_ns, (unsigned long long)ns);
    atomic_fetch_add(&engine->update.host_params, n);
    if (status != GM_OK) {
        atomic_store(&engine->update.async_status, (int)status);
    }
    atomic_store(&task->run, GM_RUN_NONE);
}

/* How a task runs on the host: weights and states that it reads and that it writes, and its
 * accesses. */
typedef struct host_way {
    uint8_t *(*from)(const gm_chunks *chunks, uint32_t id, gm_piece piece); /* NULL: in place */
    uint8_t *(*to)(const gm_chunks *chunks, uint32_t id, gm_piece piece);
    size_t n;
    gm_use uses[5]; /* the stream comes with the run */
} host_way;

static const host_way at_home = {
    NULL,
    gm_chunks_home,
    3,
    {{GM_WEIGHT, GM_HOME_WRITE, 0}, {GM_STATE, GM_HOME_WRITE, 0}, {GM_GRAD, GM_HOME_READ, 0}}};
static const host_way speculated = {gm_chunks_home,
                                    gm_chunks_spare,
                                    5,
                                    {{GM_WEIGHT, GM_HOME_READ, 0},
                                     {GM_STATE, GM_HOME_READ, 0},
                                     {GM_GRAD, GM_HOME_READ, 0},
                                     {GM_WEIGHT, GM_SPARE_WRITE, 0},
                                     {GM_STATE, GM_SPARE_WRITE, 0}}};
static const host_way redone = {gm_chunks_spare,
                                gm_chunks_home,
                                5,
                                {{GM_GRAD, GM_HOME_READ, 0},
                                 {GM_WEIGHT, GM_SPARE_READ, 0},
                                 {GM_STATE, GM_SPARE_READ, 0},
                                 {GM_WEIGHT, GM_HOME_WRITE, 0},
                                 {GM_STATE, GM_HOME_WRITE, 0}}};

static void set_way(gm_engine *engine, uint32_t chunk, gm_task *task, const host_way *way)
{
    const gm_chunks *chunks = engine->chunks;
    uint8_t *grad = gm_chunks_home(chunks, chunk, GM_GRAD);
    if (way->from) {
        set_arrays(engine, chunk, task, way->from(chunks, chunk, GM_WEIGHT),
                   way->from(chunks, chunk, GM_STATE), grad);
        task->from = (gm_adam_from){task->args.weight, task->args.low, task->args.m, task->args.v};
    }
    set_arrays(engine, chunk, task, way->to(chunks, chunk, GM_WEIGHT),
               way->to(chunks, chunk, GM_STATE), grad);
    task->args.from = way->from ? &task->from : NULL;
}

static gm_status call_host(gm_engine *engine, uint32_t chunk, gm_task *task, gm_stream stream)
{
    atomic_store(&task->run, GM_RUN_ISSUED);
    uint32_t entry =
        gm_timeline_begin(engine->timeline, GM_LOG_HOST_UPDATE, GM_ON_HOST, chunk, GM_STATE,
                          gm_engine_piece_bytes(engine, chunk, GM_STATE), stream);
    gm_status status = engine->device->ops->host_call(engine->device, run_host_task, task, stream);
    gm_timeline_end(engine->timeline, entry, stream);
    if (status != GM_OK) {
        atomic_store(&task->run, GM_RUN_NONE);
    }
    return status;
}

static gm_status run_on_host(gm_engine *engine, uint32_t chunk, gm_task *task, host_way way,
                             gm_stream stream)
{
    gm_chunks *chunks = engine->chunks;
    for (int piece = 0; piece < GM_N_OWN_PIECES; piece++) {
        GM_TRY(gm_chunks_send_home(chunks, chunk, (gm_piece)piece));
    }
    for (size_t i = 0; i < way.n; i++) {
        way.uses[i].stream = stream;
    }
    GM_TRY(gm_chunks_begin_all(chunks, chunk, way.uses, way.n));
    set_way(engine, chunk, task, &way);
    GM_TRY(order_factor(engine, task, true, stream));
    if (task->args.grad_scale) {
        gm_note_access(engine->device, task->args.grad_scale, sizeof(float), false, stream);
    }
    for (const gm_use *use = way.uses; use < way.uses + way.n; use++) {
        gm_note_access(engine->device,
                       use->work >= GM_SPARE_READ ? gm_chunks_spare(chunks, chunk, use->piece)
                                                  : gm_chunks_home(chunks, chunk, use->piece),
                       gm_engine_piece_bytes(engine, chunk, use->piece),
                       use->work == GM_HOME_WRITE || use->work == GM_SPARE_WRITE, stream);
    }
    GM_TRY(call_host(engine, chunk, task, stream));
    return gm_chunks_end_all(chunks, chunk, way.uses, way.n);
}

/* The homes have the new bytes.  They go to the device as well, where it has the old ones. */
static gm_status update_at_home(gm_engine *engine, uint32_t chunk, gm_task *task)
{
    GM_TRY(run_on_host(engine, chunk, task, at_home, engine->update.host_stream));
    GM_TRY(gm_chunks_discard(engine->chunks, chunk, GM_STATE)); /* with a placement it is free */
    GM_TRY(gm_chunks_home_written(engine->chunks, chunk, GM_STATE, engine->call.stream));
    return gm_chunks_home_written(engine->chunks, chunk, GM_WEIGHT, engine->call.stream);
}

gm_status gm_update_speculate(gm_engine *engine, uint32_t chunk)
{
    gm_task *task = gm_speculation_due(engine, chunk);
    if (!task) {
        return GM_OK;
    }
    gm_class class = gm_plan_class(engine->room.plan, chunk);
    bool is_streamed = class == GM_CLASS_S1 || class == GM_CLASS_S2, is_made = true;
    if (is_streamed && !gm_chunks_is_resident(engine->chunks, chunk, GM_GRAD)) {
        return GM_OK;
    }
    gm_status status = gm_glance_end_of(engine, chunk);
    status = status == GM_OK ? gm_chunks_send_home(engine->chunks, chunk, GM_WEIGHT) : status;
    if (status == GM_OK && gm_is_opaque(engine)) {
        status = gm_opaque_speculate(engine, chunk, task, &is_made);
    } else if (status == GM_OK) {
        status = is_streamed
                     ? gm_stage_speculate(engine, chunk, task)
                     : run_on_host(engine, chunk, task, speculated, engine->update.host_stream);
    }
    if (status != GM_OK) {
        return gm_engine_die(engine, status);
    }
    if (is_made) {
        gm_speculation_note_result(engine, chunk);
    }
    return GM_OK;
}

/* Whether all three pieces are or can come onto the device, without waiting. */
static gm_status bring_to_device(gm_engine *engine, uint32_t chunk, bool *out)
{
    gm_chunks *chunks = engine->chunks;
    if (engine->room.plan) {
        gm_class class = gm_plan_class(engine->room.plan, chunk);
        *out = class == GM_CLASS_R || class == GM_CLASS_S1 || class == GM_CLASS_S2;
    } else {
        *out = gm_chunks_is_resident(chunks, chunk, GM_STATE) &&
               gm_chunks_is_resident(chunks, chunk, GM_GRAD);
    }
    bool is_streamed = *out && !gm_chunks_is_resident(chunks, chunk, GM_STATE) &&
                       !(place_of(engine, chunk, GM_STATE)->is_resident);
    for (int piece = 0; *out && piece < GM_N_OWN_PIECES; piece++) {
        if (piece != GM_STATE || !is_streamed) {
            GM_TRY(gm_chunks_prefetch(chunks, chunk, (gm_piece)piece, out));
        }
    }
    return GM_OK;
}

/* The update gives its parameters other weights, which have other low parts. */
static void forget_before(gm_engine *engine, const gm_chunk_state *state, const gm_task *task)
{
    for (uint32_t i = 0; i < state->n_params; i++) {
        gm_param *p = &engine->params[engine->chunk_params[state->first_param + i]];
        for (size_t j = 0; (p->before || p->is_low_given) && j < task->n_ranges; j++) {
            if (task->ranges[j].begin == p->part_offset) {
                gm_field_forget_before(p);
            }
        }
    }
}

/* The step's factor may have come home meanwhile: the task is one like any other then. */
static void look_at_factor(gm_engine *engine, gm_task *task)
{
    float scale;
    if (task->factor == GM_FACTOR_LATE && gm_clip_is_known(engine, engine->step.n, &scale)) {
        task->factor = GM_FACTOR_KNOWN;
        for (size_t i = 0; i < task->n_ranges; i++) {
            task->ranges[i].scalars.grad_scale = scale;
        }
    }
}

/* The result is there, and is the update unless a clip fires that the host has not seen:
 * invariant 3. */
static gm_status take_result(gm_engine *engine, uint32_t chunk, gm_task *task)
{
    bool is_stale[GM_N_OWN_PIECES] = {false};
    for (int piece = GM_WEIGHT; piece <= GM_STATE; piece++) {
        GM_TRY(gm_chunks_take_next(engine->chunks, chunk, (gm_piece)piece, &is_stale[piece]));
    }
    if (task->factor == GM_FACTOR_LATE) { /* not behind the speculations of other chunks */
        task->factor = GM_FACTOR_REDO;
        GM_TRY(run_on_host(engine, chunk, task, redone, engine->clip.stream));
    }
    for (int piece = GM_WEIGHT; piece <= GM_STATE; piece++) {
        GM_TRY(is_stale[piece] ? gm_chunks_home_written(engine->chunks, chunk, (gm_piece)piece,
                                                        engine->call.stream)
                               : GM_OK);
    }
    return gm_is_opaque(engine) ? gm_opaque_take(engine, chunk, task) : GM_OK;
}

static gm_status run(gm_engine *engine, uint32_t chunk, gm_task *task)
{
    bool is_on_device;
    if (gm_speculation_take(engine, chunk, task)) {
        return take_result(engine, chunk, task);
    }
    if (gm_is_opaque(engine)) {
        return gm_opaque_update(engine, chunk, task);
    }
    GM_TRY(bring_to_device(engine, chunk, &is_on_device));
    return is_on_device ? update_on_device(engine, chunk, task)
                        : update_at_home(engine, chunk, task);
}

/* What is taken needs no room.  No call behind it could step again, so the host waits for a factor
 * that has not come home. */
static gm_status prepare_opaque(gm_engine *engine, uint32_t chunk, gm_task *task)
{
    gm_clip clip;
    if (gm_speculation_is_of(engine, chunk, task) && task->factor == GM_FACTOR_LATE) {
        GM_TRY(gm_clip_wait(engine, engine->step.n, &clip));
    }
    look_at_factor(engine, task);
    return gm_speculation_is_of(engine, chunk, task) ? GM_OK : gm_opaque_pin(engine, chunk);
}

gm_status gm_update_issue(gm_engine *engine, uint32_t chunk)
{
    gm_task *task = gm_task_of(engine, chunk);
    if (!gm_is_pending(engine, chunk)) {
        return GM_OK;
    }
    GM_TRY(gm_glance_end_of(engine, chunk));
    if (gm_is_opaque(engine) && task->n_ranges > 0) {
        GM_TRY(prepare_opaque(engine, chunk, task));
    }
    move(engine, chunk, GM_UPDATE_NONE);
    if (task->n_ranges == 0) {
        return GM_OK;
    }
    forget_before(engine, &engine->chunk_states[chunk], task);
    look_at_factor(engine, task);
    gm_status status = run(engine, chunk, task);
    return status == GM_OK ? GM_OK : gm_engine_die(engine, status);
}

gm_status gm_update_issue_early(gm_engine *engine, uint32_t chunk)
{
    bool is_possible = true;
    if (gm_is_opaque(engine) && gm_is_pending(engine, chunk) && engine->room.plan &&
        !gm_speculation_is_of(engine, chunk, gm_task_of(engine, chunk))) {
        GM_TRY(gm_chunks_bring(engine->chunks, chunk, &is_possible));
    }
    gm_status status = is_possible ? gm_update_issue(engine, chunk) : GM_OK;
    return status == GM_ERR_NOMEM && gm_is_pending(engine, chunk) ? GM_OK : status;
}

gm_status gm_update_issue_some(gm_engine *engine, uint32_t most)
{
    uint32_t n = gm_layout_n_chunks(engine->layout);
    while (engine->update.n_pending > 0 && engine->update.next_pending < n && most > 0) {
        const gm_plan *plan = engine->room.plan;
        uint32_t next = engine->update.next_pending++;
        uint32_t chunk = plan ? gm_plan_update_order(plan)[next] : next;
        most -= gm_is_pending(engine, chunk);
        GM_TRY(gm_update_issue(engine, chunk));
        if (plan != engine->room.plan) { /* left for lack of room: the order is another one */
            engine->update.next_pending = 0;
        }
    }
    return GM_OK;
}

gm_status gm_update_issue_all(gm_engine *engine)
{
    if (engine->update.n_pending > 0) {
        engine->update.next_pending = 0; /* the order may have changed with the plan */
        GM_TRY(gm_update_issue_some(engine, UINT32_MAX));
    }
    GM_ASSERT(engine->update.n_pending == 0);
    return GM_OK;
}

/* ---- immediate updates ---- */

bool gm_update_is_done(const gm_engine *engine, uint32_t chunk)
{
    return engine->update.is_armed && engine->chunk_states[chunk].updated == engine->pass.n;
}

/* The first of a chunk, as errors name it. */
static const char *name_of(const gm_engine *engine, uint32_t chunk)
{
    return gm_engine_name(engine, engine->chunk_params[engine->chunk_states[chunk].first_param]);
}

gm_status gm_update_check_between(const gm_engine *engine, uint32_t chunk)
{
    return gm_update_is_done(engine, chunk)
               ? GM_FAIL(
                     GM_ERR_STATE,
                     "%s: backward(step=True) has updated this weight already, and others not yet: "
                     "call optimizer.step() before anything else uses weights, states or "
                     "gradients",
                     name_of(engine, chunk))
               : GM_OK;
}

gm_status gm_update_check_reuse(gm_engine *engine, uint32_t chunk)
{
    if (gm_update_is_done(engine, chunk)) {
        return gm_engine_die(
            engine,
            GM_FAIL(
                GM_ERR_STATE,
                "%s: a weight that backward(step=True) has already updated is used again in the "
                "same backward (a detached use, or a gradient that comes in parts): call "
                "backward without step=True for this model",
                name_of(engine, chunk)));
    }
    return GM_OK;
}

/* ---- tasks ---- */

void gm_update_make_pending(gm_engine *engine, uint32_t chunk)
{
    move(engine, chunk, GM_UPDATE_PENDING);
}

/* The task of the coming step, empty.  Invariant 2. */
static gm_status prepare_task(gm_engine *engine, uint32_t chunk)
{
    gm_task *task = gm_task_of(engine, chunk);
    if (atomic_load(&task->run) != GM_RUN_NONE) {
        GM_TRY(gm_chunks_claim_home(engine->chunks, chunk, GM_STATE));
    }
    task->n_ranges = 0;
    task->factor = engine->step.is_late ? GM_FACTOR_LATE : GM_FACTOR_KNOWN;
    return GM_OK;
}

static gm_status add_range(gm_task *task, const gm_param *p, const gm_adam_hyper *hyper)
{
    if (p->part_numel == 0) {
        return GM_OK;
    }
    gm_adam_range *range = &task->ranges[task->n_ranges++];
    range->begin = p->part_offset;
    range->end = p->part_offset + p->part_numel;
    return gm_adam_scalars_init(hyper, &range->scalars);
}

/* Those that an immediate update has done already are left out. */
gm_status gm_update_prepare(gm_engine *engine, const gm_update *updates, uint32_t n, bool arm)
{
    for (uint32_t i = 0; i < n; i++) {
        /* empty first: a chunk's parameters need not be neighbours */
        const gm_param *p = &engine->params[updates[i].param];
        gm_chunk_state *state = &engine->chunk_states[p->place.chunk];
        if (p->grad != GM_GRAD_USED_UP && state->update == GM_UPDATE_NONE) {
            GM_TRY(prepare_task(engine, p->place.chunk));
            move(engine, p->place.chunk, arm ? GM_UPDATE_ARMED : GM_UPDATE_PENDING);
            if (!arm) {
                gm_gathered_outdate(engine, p->place.chunk);
            }
        }
    }
    for (uint32_t i = 0; i < n; i++) {
        const gm_param *p = &engine->params[updates[i].param];
        if (p->grad != GM_GRAD_USED_UP) {
            GM_TRY(add_range(gm_task_of(engine, p->place.chunk), p, &updates[i].hyper));
        }
    }
    engine->update.next_pending = 0;
    engine->update.is_armed = arm;
    return GM_OK;
}

gm_status gm_update_number(gm_engine *engine, const gm_update *updates, uint32_t n)
{
    gm_status status = GM_OK;
    gm_speculation_begin_numbers(engine);
    for (uint32_t i = 0; status == GM_OK && i < n; i++) {
        const gm_param *p = &engine->params[updates[i].param];
        gm_chunk_state *state = &engine->chunk_states[p->place.chunk];
        if (state->result == GM_RESULT_NUMBERED) {
            status = add_range(&state->task[GM_SPECULATED], p, &updates[i].hyper);
        }
    }
    gm_speculation_end_numbers(engine);
    return status;
}

static void move_all(gm_engine *engine, gm_update_state from)
{
    for (uint32_t chunk = 0; chunk < gm_layout_n_chunks(engine->layout); chunk++) {
        if (engine->chunk_states[chunk].update == from) {
            move(engine, chunk, GM_UPDATE_NONE);
        }
    }
}

void gm_update_disarm(gm_engine *engine)
{
    move_all(engine, GM_UPDATE_ARMED);
    engine->update.is_armed = false;
}

void gm_update_forget_all(gm_engine *engine)
{
    gm_update_disarm(engine);
    gm_speculation_forget(engine);
    move_all(engine, GM_UPDATE_PENDING);
    (void)engine->device->ops->stream_sync(engine->device, engine->update.host_stream);
    (void)engine->device->ops->stream_sync(engine->device, engine->update.stream);
    gm_opaque_sync(engine);
    (void)engine->device->ops->stream_sync(engine->device, engine->clip.stream);
    atomic_store(&engine->update.async_status, GM_OK); /* also of what ended just now */
}
