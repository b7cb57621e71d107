/* update.c - the update of one chunk in one step: prepared as a task, issued when the plan says so
 * or when somebody needs the result, run on the device or on the host, ordered by fences alone.
 *
 * Invariants
 *   1. A chunk with a pending update is updated before anything reads its weights or states, or
 *      writes its gradient.
 *   2. A task is rewritten only when its last run has ended.
 *   3. A task whose factor nobody has seen (is_late) reads it when it runs, behind the clip's
 *      fence, and only there: what speculation has made is taken as if no clip fired, and a call
 *      behind it steps again, from the old homes, which are the spares now, to the new ones, if one
 *      did.  Whoever uses the new homes comes behind that call.
 *   4. Immediate updates: a chunk that was updated inside a backward is not used again by that
 *      backward; it would see new weights where the gradient of the old ones is meant.  If it
 *      happens the engine dies with that text.
 *
 * The host may wait in: prepare_task (for a run of two steps ago), gm_update_issue (for
 * gm_saving_keep), and where chunk.c says. */
#include "engine/engine_impl.h"

#include <stdlib.h>
#include <string.h>

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

/* From the home to the spare, or back. */
static void set_out_of_place(gm_engine *engine, uint32_t chunk, gm_task *task, bool is_to_spare)
{
    uint8_t *pieces[2][2];
    uint8_t *grad = gm_chunks_home(engine->chunks, chunk, GM_GRAD);
    for (int piece = GM_WEIGHT; piece <= GM_STATE; piece++) {
        pieces[!is_to_spare][piece] = gm_chunks_home(engine->chunks, chunk, (gm_piece)piece);
        pieces[is_to_spare][piece] = gm_chunks_spare(engine->chunks, chunk, (gm_piece)piece);
    }
    set_arrays(engine, chunk, task, pieces[0][GM_WEIGHT], pieces[0][GM_STATE], grad);
    task->from = (gm_adam_from){task->args.weight, task->args.low, task->args.m, task->args.v};
    set_arrays(engine, chunk, task, pieces[1][GM_WEIGHT], pieces[1][GM_STATE], grad);
    task->args.from = &task->from;
}

static gm_status update_in_place(gm_engine *engine, uint32_t chunk, gm_task *task)
{
    gm_chunks *chunks = engine->chunks;
    gm_stream stream = engine->update.stream;
    GM_TRY(gm_chunks_begin(chunks, chunk, GM_WEIGHT, GM_WRITE, stream));
    GM_TRY(gm_chunks_begin(chunks, chunk, GM_STATE, GM_WRITE, stream));
    GM_TRY(gm_chunks_begin(chunks, chunk, GM_GRAD, GM_READ, stream));
    set_arrays(engine, chunk, task, (uint8_t *)gm_chunks_address(chunks, chunk, GM_WEIGHT),
               (uint8_t *)gm_chunks_address(chunks, chunk, GM_STATE),
               (uint8_t *)gm_chunks_address(chunks, chunk, GM_GRAD));
    GM_TRY(task->is_late ? gm_clip_order(engine, false, stream, &task->args.grad_scale) : GM_OK);
    uint32_t entry =
        gm_timeline_begin(engine->timeline, GM_LOG_DEVICE_UPDATE, GM_ON_UPDATE, chunk, GM_STATE,
                          gm_engine_piece_bytes(engine, chunk, GM_STATE), stream);
    GM_TRY(engine->device->ops->adam(engine->device, &task->args, stream));
    gm_timeline_end(engine->timeline, entry, stream);
    GM_TRY(gm_chunks_end(chunks, chunk, GM_WEIGHT, GM_WRITE, stream));
    GM_TRY(gm_chunks_end(chunks, chunk, GM_STATE, GM_WRITE, stream));
    return gm_chunks_end(chunks, chunk, GM_GRAD, GM_READ, stream);
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
    float scale = task->is_redo ? *task->args.grad_scale : 0;
    if (atomic_load(&task->is_dropped) || (scale >= 1 && scale <= 1)) {
        atomic_store(&task->is_running, false);
        return;
    }
    atomic_fetch_add(&engine->update.n_late, task->is_redo);
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
    atomic_store(&task->is_running, false);
}

/* A speculation reads the homes and writes the spares beside them. */
static void note_task(gm_engine *engine, uint32_t chunk, bool is_speculation, gm_stream stream)
{
    for (int piece = 0; piece < GM_N_OWN_PIECES; piece++) {
        size_t bytes = gm_engine_piece_bytes(engine, chunk, (gm_piece)piece);
        bool is_written = piece != GM_GRAD;
        gm_note_access(engine->device, gm_chunks_home(engine->chunks, chunk, (gm_piece)piece),
                       bytes, is_written && !is_speculation, stream);
        if (is_written && is_speculation) {
            gm_note_access(engine->device, gm_chunks_spare(engine->chunks, chunk, (gm_piece)piece),
                           bytes, true, stream);
        }
    }
}

static gm_status call_host(gm_engine *engine, uint32_t chunk, gm_task *task, gm_stream stream)
{
    if (task->args.grad_scale) {
        gm_note_access(engine->device, task->args.grad_scale, sizeof(float), false, stream);
    }
    atomic_store(&task->is_running, true);
    uint32_t entry =
        gm_timeline_begin(engine->timeline, GM_LOG_HOST_UPDATE, GM_ON_HOST, chunk, GM_STATE,
                          gm_engine_piece_bytes(engine, chunk, GM_STATE), stream);
    gm_status status = engine->device->ops->host_call(engine->device, run_host_task, task, stream);
    gm_timeline_end(engine->timeline, entry, stream);
    if (status != GM_OK) {
        atomic_store(&task->is_running, false);
    }
    return status;
}

static gm_status update_at_home(gm_engine *engine, uint32_t chunk, gm_task *task)
{
    gm_chunks *chunks = engine->chunks;
    gm_stream stream = engine->update.host_stream;
    for (int piece = 0; piece < GM_N_OWN_PIECES; piece++) {
        GM_TRY(gm_chunks_send_home(chunks, chunk, (gm_piece)piece));
    }
    GM_TRY(gm_chunks_begin(chunks, chunk, GM_WEIGHT, GM_HOME_WRITE, stream));
    GM_TRY(gm_chunks_begin(chunks, chunk, GM_STATE, GM_HOME_WRITE, stream));
    GM_TRY(gm_chunks_begin(chunks, chunk, GM_GRAD, GM_HOME_READ, stream));
    set_arrays(engine, chunk, task, gm_chunks_home(chunks, chunk, GM_WEIGHT),
               gm_chunks_home(chunks, chunk, GM_STATE), gm_chunks_home(chunks, chunk, GM_GRAD));
    GM_TRY(task->is_late ? gm_clip_order(engine, true, stream, &task->args.grad_scale) : GM_OK);
    note_task(engine, chunk, false, stream);
    GM_TRY(call_host(engine, chunk, task, stream));
    GM_TRY(gm_chunks_end(chunks, chunk, GM_WEIGHT, GM_HOME_WRITE, stream));
    GM_TRY(gm_chunks_end(chunks, chunk, GM_STATE, GM_HOME_WRITE, stream));
    GM_TRY(gm_chunks_end(chunks, chunk, GM_GRAD, GM_HOME_READ, stream));
    GM_TRY(gm_chunks_discard(chunks, chunk, GM_STATE)); /* stale; with a placement it is free */
    GM_TRY(gm_chunks_home_written(chunks, chunk, GM_STATE, engine->call.stream));
    return gm_chunks_home_written(chunks, chunk, GM_WEIGHT, engine->call.stream);
}

/* Invariant 3.  The result has just been taken. */
static gm_status redo_at_home(gm_engine *engine, uint32_t chunk, gm_task *task)
{
    gm_chunks *chunks = engine->chunks;
    gm_stream stream = engine->clip.stream; /* not behind the speculations of other chunks */
    GM_TRY(gm_chunks_send_home(chunks, chunk, GM_GRAD));
    GM_TRY(gm_chunks_begin(chunks, chunk, GM_GRAD, GM_HOME_READ, stream));
    for (int piece = GM_WEIGHT; piece <= GM_STATE; piece++) {
        GM_TRY(gm_chunks_begin(chunks, chunk, (gm_piece)piece, GM_SPARE_READ, stream));
        GM_TRY(gm_chunks_begin(chunks, chunk, (gm_piece)piece, GM_HOME_WRITE, stream));
        gm_note_access(engine->device, gm_chunks_spare(chunks, chunk, (gm_piece)piece),
                       gm_engine_piece_bytes(engine, chunk, (gm_piece)piece), false, stream);
    }
    set_out_of_place(engine, chunk, task, false);
    GM_TRY(gm_clip_order(engine, true, stream, &task->args.grad_scale));
    task->is_redo = true;
    note_task(engine, chunk, false, stream);
    GM_TRY(call_host(engine, chunk, task, stream));
    GM_TRY(gm_chunks_end(chunks, chunk, GM_GRAD, GM_HOME_READ, stream));
    for (int piece = GM_WEIGHT; piece <= GM_STATE; piece++) {
        GM_TRY(gm_chunks_end(chunks, chunk, (gm_piece)piece, GM_SPARE_READ, stream));
        GM_TRY(gm_chunks_end(chunks, chunk, (gm_piece)piece, GM_HOME_WRITE, stream));
    }
    return GM_OK;
}

static gm_status speculate_at_home(gm_engine *engine, uint32_t chunk, gm_task *task)
{
    gm_chunks *chunks = engine->chunks;
    gm_stream stream = engine->update.host_stream;
    for (int piece = 0; piece < GM_N_OWN_PIECES; piece++) {
        GM_TRY(gm_chunks_send_home(chunks, chunk, (gm_piece)piece));
        GM_TRY(gm_chunks_begin(chunks, chunk, (gm_piece)piece, GM_HOME_READ, stream));
    }
    GM_TRY(gm_chunks_begin(chunks, chunk, GM_WEIGHT, GM_SPARE_WRITE, stream));
    GM_TRY(gm_chunks_begin(chunks, chunk, GM_STATE, GM_SPARE_WRITE, stream));
    set_out_of_place(engine, chunk, task, true);
    note_task(engine, chunk, true, stream);
    GM_TRY(call_host(engine, chunk, task, stream));
    for (int piece = 0; piece < GM_N_OWN_PIECES; piece++) {
        GM_TRY(gm_chunks_end(chunks, chunk, (gm_piece)piece, GM_HOME_READ, stream));
    }
    GM_TRY(gm_chunks_end(chunks, chunk, GM_WEIGHT, GM_SPARE_WRITE, stream));
    return gm_chunks_end(chunks, chunk, GM_STATE, GM_SPARE_WRITE, stream);
}

gm_status gm_update_speculate(gm_engine *engine, uint32_t chunk)
{
    gm_task *task = gm_speculation_due(engine, chunk);
    if (!task) {
        return GM_OK;
    }
    gm_class class = gm_plan_class(engine->room.plan, chunk);
    bool is_streamed = class == GM_CLASS_S1 || class == GM_CLASS_S2;
    if (is_streamed && !gm_chunks_is_resident(engine->chunks, chunk, GM_GRAD)) {
        return GM_OK;
    }
    atomic_store(&task->is_dropped, false);
    gm_status status = gm_chunks_send_home(engine->chunks, chunk, GM_WEIGHT);
    if (status == GM_OK) {
        status = is_streamed ? gm_stage_speculate(engine, chunk, task)
                             : speculate_at_home(engine, chunk, task);
    }
    if (status != GM_OK) {
        return gm_engine_die(engine, status);
    }
    gm_speculation_note_result(engine, chunk);
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
static void settle(gm_engine *engine, gm_task *task)
{
    float scale;
    if (task->is_late && gm_clip_is_known(engine, engine->step.n, &scale)) {
        task->is_late = false;
        for (size_t i = 0; i < task->n_ranges; i++) {
            task->ranges[i].scalars.grad_scale = scale;
        }
    }
}

/* Home and spare have changed places.  What was made is the update, unless a clip fires that nobody
 * has seen. */
static gm_status take_result(gm_engine *engine, uint32_t chunk, gm_task *task)
{
    GM_TRY(task->is_late ? redo_at_home(engine, chunk, task) : GM_OK);
    GM_TRY(gm_chunks_home_written(engine->chunks, chunk, GM_STATE, engine->call.stream));
    return gm_chunks_home_written(engine->chunks, chunk, GM_WEIGHT, engine->call.stream);
}

static gm_status run(gm_engine *engine, uint32_t chunk, gm_task *task)
{
    bool is_on_device;
    GM_TRY(gm_saving_keep(engine, chunk));
    if (gm_speculation_take(engine, chunk, task)) {
        return take_result(engine, chunk, task);
    }
    GM_TRY(bring_to_device(engine, chunk, &is_on_device));
    return is_on_device ? update_on_device(engine, chunk, task)
                        : update_at_home(engine, chunk, task);
}

gm_status gm_update_issue(gm_engine *engine, uint32_t chunk)
{
    gm_chunk_state *state = &engine->chunk_states[chunk];
    if (!state->is_pending) {
        return GM_OK;
    }
    state->is_pending = false;
    engine->update.n_pending--;
    gm_task *task = &state->task[engine->step.n & 1];
    if (task->n_ranges == 0) {
        return GM_OK;
    }
    forget_before(engine, state, task);
    settle(engine, task);
    gm_status status = run(engine, chunk, task);
    return status == GM_OK ? GM_OK : gm_engine_die(engine, status);
}

gm_status gm_update_issue_some(gm_engine *engine, uint32_t most)
{
    uint32_t n = gm_layout_n_chunks(engine->layout);
    const uint32_t *order = engine->room.plan ? gm_plan_update_order(engine->room.plan) : NULL;
    for (; engine->update.n_pending > 0 && engine->update.next_pending < n && most > 0;
         engine->update.next_pending++) {
        uint32_t chunk = order ? order[engine->update.next_pending] : engine->update.next_pending;
        most -= engine->chunk_states[chunk].is_pending;
        GM_TRY(gm_update_issue(engine, chunk));
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
    gm_chunk_state *state = &engine->chunk_states[chunk];
    GM_ASSERT(!state->is_pending);
    state->is_armed = false;
    state->is_pending = true;
    engine->update.n_pending++;
}

/* The task of the coming step, empty.  Invariant 2. */
static gm_status prepare_task(gm_engine *engine, uint32_t chunk, gm_task **out)
{
    gm_task *task = &engine->chunk_states[chunk].task[engine->step.n & 1];
    if (atomic_load(&task->is_running)) {
        GM_TRY(gm_chunks_claim_home(engine->chunks, chunk, GM_STATE));
    }
    task->n_ranges = 0;
    task->is_late = engine->step.is_late;
    task->is_redo = false;
    *out = task;
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
        gm_task *task;
        if (p->grad != GM_GRAD_USED_UP && !state->is_pending && !state->is_armed) {
            GM_TRY(prepare_task(engine, p->place.chunk, &task));
            gm_update_make_pending(engine, p->place.chunk);
            if (!arm) {
                gm_gathered_outdate(engine, p->place.chunk);
            }
        }
    }
    for (uint32_t i = 0; i < n; i++) {
        const gm_param *p = &engine->params[updates[i].param];
        gm_chunk_state *state = &engine->chunk_states[p->place.chunk];
        if (p->grad != GM_GRAD_USED_UP) {
            GM_TRY(add_range(&state->task[engine->step.n & 1], p, &updates[i].hyper));
        }
    }
    for (uint32_t i = 0; arm && i < n; i++) {
        gm_chunk_state *state = &engine->chunk_states[engine->params[updates[i].param].place.chunk];
        engine->update.n_pending -= state->is_pending;
        state->is_armed |= state->is_pending;
        state->is_pending = false;
    }
    engine->update.next_pending = 0;
    engine->update.is_armed = arm;
    return GM_OK;
}

gm_status gm_update_number(gm_engine *engine, const gm_update *updates, uint32_t n)
{
    for (uint32_t chunk = 0; chunk < gm_layout_n_chunks(engine->layout); chunk++) {
        gm_chunk_state *state = &engine->chunk_states[chunk];
        state->has_result = gm_speculation_is_valid(engine, chunk);
        /* What is still running keeps its numbers, and what has a result: they are that of it. */
        state->is_numbered =
            !state->has_result && !atomic_load(&state->task[GM_SPECULATED].is_running);
        state->task[GM_SPECULATED].n_ranges *= !state->is_numbered;
    }
    for (uint32_t i = 0; i < n; i++) {
        const gm_param *p = &engine->params[updates[i].param];
        gm_chunk_state *state = &engine->chunk_states[p->place.chunk];
        if (state->is_numbered) {
            GM_TRY(add_range(&state->task[GM_SPECULATED], p, &updates[i].hyper));
        }
    }
    for (uint32_t chunk = 0; chunk < gm_layout_n_chunks(engine->layout); chunk++) {
        if (engine->chunk_states[chunk].is_numbered) {
            gm_speculation_check_numbers(engine, chunk);
        }
    }
    gm_speculation_note_numbers(engine);
    return GM_OK;
}

void gm_update_disarm(gm_engine *engine)
{
    for (uint32_t chunk = 0; chunk < gm_layout_n_chunks(engine->layout); chunk++) {
        engine->chunk_states[chunk].is_armed = false;
    }
    engine->update.is_armed = false;
}

void gm_update_forget_all(gm_engine *engine)
{
    gm_update_disarm(engine);
    gm_speculation_forget(engine);
    for (uint32_t chunk = 0; chunk < gm_layout_n_chunks(engine->layout); chunk++) {
        engine->chunk_states[chunk].is_pending = false;
    }
    engine->update.n_pending = 0;
    (void)engine->device->ops->stream_sync(engine->device, engine->update.host_stream);
    (void)engine->device->ops->stream_sync(engine->device, engine->update.stream);
    (void)engine->device->ops->stream_sync(engine->device, engine->clip.stream);
    atomic_store(&engine->update.async_status, GM_OK); /* also of what ended just now */
}
