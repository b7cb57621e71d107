/* opaque.c - the update of a chunk whose states are bytes to the engine: the caller's own function
 * makes it, on the device, where weights, states and gradient are at their addresses.
 *
 * The piece of states has the low parts first, as other chunks have, and behind them the states of
 * one parameter after the other, each at a multiple of GM_ALIGN.
 *
 * Invariants
 *   1. While the function runs the chunk's three pieces are pinned, and nothing is half done.  The
 *      engine's lock is free: the function wants locks of others (the GIL, torch's allocator's)
 *      which their owners may hold while they ask the engine for room.
 *   2. Meanwhile what asks for room (room.c) and what only shows the engine is served.  It may end
 *      with the plan left: who issues updates looks at the plan anew behind each.  All other calls
 *      wait for the update's end, or are refused on its own thread.
 *   3. Its first error closes the engine.
 *   4. An update that begins ends before the call that has issued it.  One that is still to be
 *      issued when the step returns is issued at last by gm_engine_issue, which the caller calls
 *      before the numbers that the function reads become others.
 *   5. It may write the gradient: who reads that issues it before.
 *   6. What is speculated (speculation.c) runs at the same addresses, where all is at home as well.
 *      What it has written there goes to the spares, or waits in blocks that are the weights' own,
 *      and is not resident when the call ends: nothing else reads it there.
 *   7. It is issued to the stream of the call that needs it, as a step() without an engine is: it
 *      may launch kernels on CUDA's default stream, whatever stream is told (bitsandbytes does),
 *      which comes in order with the caller's work only if that is the caller's stream.  An update
 *      on another stream than the last one's, and the next step, come behind that (`done`): what
 *      the function has beside the chunk's bytes nothing else orders.
 *
 * The host may wait in: gm_room_pin, for room; gm_opaque_wait; gm_opaque_rate, when a plan is made;
 * on devices whose streams the function knows nothing of (the host), for the chunk's copies. */
#include "engine/engine_impl.h"

#include <stdlib.h>
#include <string.h>

enum { N_PIECES = GM_N_OWN_PIECES };

void gm_opaque_init(gm_engine *engine, const gm_engine_options *options)
{
    engine->opaque.caller = options->opaque;
    atomic_init(&engine->opaque.n_written, 0);
    pthread_cond_init(&engine->opaque.ended, NULL);
}

void gm_opaque_free(gm_engine *engine)
{
    for (uint32_t i = 0; i < GM_OPAQUE_TIMED; i++) {
        gm_free_event(engine->device, &engine->opaque.timed[i].began);
        gm_free_event(engine->device, &engine->opaque.timed[i].ended);
    }
    gm_free_event(engine->device, &engine->opaque.done);
    pthread_cond_destroy(&engine->opaque.ended);
}

/* As the chunk has them on one rank; the pieces are as large as that of the rank with the most:
 * ranks share plans. */
static void lay_out(gm_engine *engine, uint32_t chunk, uint32_t rank, const uint64_t *bytes)
{
    gm_chunk_state *state = &engine->chunk_states[chunk];
    size_t low = gm_low_bytes(gm_chunk_spec(engine, chunk)) *
                 gm_layout_chunk(engine->layout, chunk)->shard_numel;
    size_t at = gm_round_up(low, GM_ALIGN), end = low;
    for (uint32_t i = 0; i < state->n_params; i++) {
        uint32_t id = engine->chunk_params[state->first_param + i];
        if (rank == engine->ranks.rank) {
            engine->params[id].state_offset = at;
            engine->params[id].state_bytes = bytes[id];
        }
        at += gm_round_up(bytes[id], GM_ALIGN);
        end = bytes[id] > 0 ? at : end;
    }
    state->opaque_bytes = end - low > state->opaque_bytes ? end - low : state->opaque_bytes;
}

gm_status gm_opaque_lay_out(gm_engine *engine, const gm_engine_options *options)
{
    uint32_t n = gm_is_opaque(engine) ? gm_layout_n_chunks(engine->layout) : 0;
    if (n > 0) {
        GM_TRY(engine->device->ops->event_new(engine->device, false, &engine->opaque.done));
    }
    GM_FAIL_IF(n && !options->state_bytes, GM_ERR_ARG, "no state_bytes of opaque updates");
    for (uint32_t chunk = 0; chunk < n; chunk++) {
        for (uint32_t rank = 0; rank < engine->ranks.n_shards; rank++) {
            lay_out(engine, chunk, rank, options->state_bytes + (size_t)rank * engine->n_params);
        }
    }
    return GM_OK;
}

void gm_engine_opaque_place(const gm_engine *engine, uint32_t id, gm_opaque_place *out)
{
    const gm_param *p = &engine->params[id];
    uint32_t chunk = p->place.chunk;
    uintptr_t states = gm_chunks_address(engine->chunks, chunk, GM_STATE);
    *out = (gm_opaque_place){
        .weight = gm_chunks_address(engine->chunks, chunk, GM_WEIGHT) +
                  p->part_offset * p->spec.weight_bytes,
        .low = states + p->part_offset * gm_low_bytes(&p->spec),
        .grad = gm_chunks_address(engine->chunks, chunk, GM_GRAD) +
                p->part_offset * gm_dtype_bytes(gm_grad_dtype(engine, &p->spec)),
        .states = states + p->state_offset,
    };
}

gm_status gm_opaque_wait(gm_engine *engine)
{
    gm_opaques *o = &engine->opaque;
    GM_FAIL_IF(o->is_running && pthread_equal(o->thread, pthread_self()), GM_ERR_STATE,
               "the optimizer's step() has used the managed model or its engine, and not only the "
               "parameters of its param_groups");
    while (o->is_running) {
        pthread_cond_wait(&o->ended, &engine->lock);
    }
    return GM_OK;
}

gm_status gm_opaque_check_states(const gm_engine *engine, uint32_t id, uint64_t first, uint64_t n)
{
    GM_TRY(gm_engine_check_param(engine, id));
    uint64_t bytes = gm_is_opaque(engine) ? engine->params[id].state_bytes : 0;
    GM_FAIL_IF(first > bytes || n > bytes - first, GM_ERR_ARG,
               "bytes %llu to %llu of the states of %s, which has %llu of them",
               (unsigned long long)first, (unsigned long long)(first + n),
               gm_engine_name(engine, id), (unsigned long long)bytes);
    return GM_OK;
}

/* Of the chunk's blocks on the device those that nothing moves off it now. */
static size_t held_bytes(const gm_engine *engine, uint32_t chunk)
{
    size_t bytes = 0;
    for (int piece = 0; piece < GM_N_PIECES; piece++) {
        bool is_held = gm_chunks_pins(engine->chunks, chunk, (gm_piece)piece) > 0 ||
                       (piece < N_PIECES && gm_stays(engine, chunk));
        bytes += is_held ? gm_engine_piece_blocks(engine, chunk, (gm_piece)piece) : 0;
    }
    return bytes;
}

/* What the update needs beside all that.  What is on the device now may not be any more by then:
 * the updates before it need room, too. */
static size_t wanted_bytes(const gm_engine *engine, uint32_t chunk)
{
    size_t bytes = 0;
    for (int piece = 0; piece < N_PIECES; piece++) {
        bytes += gm_chunks_pins(engine->chunks, chunk, (gm_piece)piece) > 0
                     ? 0
                     : gm_engine_piece_blocks(engine, chunk, (gm_piece)piece);
    }
    return bytes;
}

static gm_status check_room(const gm_engine *engine, uint32_t chunk, size_t held, size_t limit)
{
    size_t wanted = wanted_bytes(engine, chunk);
    uint32_t first = engine->chunk_params[engine->chunk_states[chunk].first_param];
    GM_FAIL_IF(
        wanted > 0 && held + wanted > limit, GM_ERR_NOMEM,
        "DEVICE: %s wanted for the update of %s and what shares its chunk, %s of the %s that "
        "are left for chunks are in use at this moment: raise device_budget, or let go of "
        "tensors that show weights; nothing has changed",
        gm_wanted(wanted).text, gm_engine_name(engine, first), gm_there(held).text,
        gm_there(limit).text);
    return GM_OK;
}

gm_status gm_opaque_check_room(gm_engine *engine, const gm_update *updates, uint32_t n)
{
    size_t held = 0, limit = gm_room_limit(engine);
    uint32_t n_chunks = gm_layout_n_chunks(engine->layout);
    if (!gm_is_opaque(engine) || engine->room.shed_limit != SIZE_MAX) { /* which an update lifts */
        return GM_OK;
    }
    for (uint32_t chunk = 0; chunk < n_chunks; chunk++) {
        held += held_bytes(engine, chunk);
    }
    for (uint32_t chunk = 0; chunk < n_chunks; chunk++) { /* of the last step */
        GM_TRY(gm_is_pending(engine, chunk) ? check_room(engine, chunk, held, limit) : GM_OK);
    }
    for (uint32_t i = 0; i < n; i++) {
        GM_TRY(check_room(engine, engine->params[updates[i].param].place.chunk, held, limit));
    }
    return GM_OK;
}

/* The task's parameters, (n_ranges,) of them. */
static void list_params(const gm_engine *engine, uint32_t chunk, const gm_task *task, uint32_t *out)
{
    const gm_chunk_state *state = &engine->chunk_states[chunk];
    for (size_t i = 0; i < task->n_ranges; i++) {
        for (uint32_t j = 0; j < state->n_params; j++) {
            uint32_t id = engine->chunk_params[state->first_param + j];
            const gm_param *p = &engine->params[id];
            if (p->part_numel > 0 && p->part_offset == task->ranges[i].begin) {
                out[i] = id;
            }
        }
    }
}

/* Invariant 7. */
gm_status gm_opaque_join(gm_engine *engine)
{
    gm_opaques *o = &engine->opaque;
    if (o->has_run && o->stream != engine->call.stream) {
        GM_TRY(engine->device->ops->event_wait(engine->device, o->done, engine->call.stream));
    }
    o->stream = engine->call.stream;
    return GM_OK;
}

void gm_opaque_sync(gm_engine *engine)
{
    if (engine->opaque.has_run) {
        (void)engine->device->ops->event_sync(engine->device, engine->opaque.done);
    }
}

/* Invariants 1 and 2. */
static gm_status call_without_lock(gm_engine *engine, const gm_opaque_call *what, bool *wrote_grads)
{
    gm_opaques *o = &engine->opaque;
    o->is_running = true;
    o->thread = pthread_self();
    gm_engine_unlock(engine);
    gm_status status = o->caller.run(o->caller.context, what, wrote_grads);
    pthread_mutex_lock(&engine->lock);
    o->is_running = false;
    pthread_cond_broadcast(&o->ended);
    return status;
}

static gm_status call(gm_engine *engine, uint32_t chunk, const gm_task *task, gm_opaque_how how,
                      bool *wrote_grads)
{
    gm_device *device = engine->device;
    gm_opaque_call what = {.how = how,
                           .chunk = chunk,
                           .n_params = (uint32_t)task->n_ranges,
                           .grad_scale = task->ranges[0].scalars.grad_scale,
                           .stream = engine->opaque.stream};
    if (task->factor != GM_FACTOR_KNOWN) {
        GM_TRY(gm_clip_order(engine, false, what.stream, &what.late_scale));
    }
    bool has_work = how != GM_OPAQUE_TAKE;
    GM_TRY(device->is_host && has_work ? device->ops->stream_sync(device, what.stream) : GM_OK);
    uint32_t *params = calloc(task->n_ranges, sizeof *params);
    GM_FAIL_IF(!params, GM_ERR_NOMEM, "HOST: table of %zu parameters", task->n_ranges);
    list_params(engine, chunk, task, params);
    what.params = params;
    gm_timeline *timeline = has_work ? engine->timeline : NULL;
    uint32_t entry =
        gm_timeline_begin(timeline, GM_LOG_DEVICE_UPDATE, GM_ON_UPDATE, chunk, GM_STATE,
                          gm_engine_piece_bytes(engine, chunk, GM_STATE), what.stream);
    gm_status status = call_without_lock(engine, &what, wrote_grads);
    gm_timeline_end(timeline, entry, what.stream);
    free(params);
    engine->opaque.has_run = true;
    gm_status done = device->ops->event_record(device, engine->opaque.done, what.stream);
    return status == GM_OK ? done : status;
}

/* Where an update of so many elements is timed, or NULL.  The largest count: the launches of one
 * that has biases alone say nothing about elements. */
static gm_timed_update *place_for(gm_opaques *o, double numel)
{
    if (o->n_timed < GM_OPAQUE_TIMED) {
        return &o->timed[o->n_timed++];
    }
    gm_timed_update *least = o->timed;
    for (uint32_t i = 1; i < GM_OPAQUE_TIMED; i++) {
        least = o->timed[i].numel < least->numel ? &o->timed[i] : least;
    }
    return least->numel < numel ? least : NULL;
}

/* On demand the device waits often, and for the host, too: of a plan's passes those count. */
static gm_status timed_call(gm_engine *engine, uint32_t chunk, const gm_task *task,
                            gm_opaque_how how, bool *wrote_grads)
{
    gm_device *device = engine->device;
    gm_opaques *o = &engine->opaque;
    if (engine->room.plan && !o->is_timed_planned) {
        o->is_timed_planned = true;
        o->n_timed = 0;
    }
    double numel = 0;
    for (size_t i = 0; i < task->n_ranges; i++) {
        numel += (double)(task->ranges[i].end - task->ranges[i].begin);
    }
    gm_timed_update *timed = engine->inputs.is_tuned ? place_for(o, numel) : NULL;
    if (!timed) {
        return call(engine, chunk, task, how, wrote_grads);
    }
    timed->numel = 0; /* until it has ended */
    GM_TRY(timed->began ? GM_OK : device->ops->event_new(device, true, &timed->began));
    GM_TRY(timed->ended ? GM_OK : device->ops->event_new(device, true, &timed->ended));
    GM_TRY(device->ops->event_record(device, timed->began, o->stream));
    GM_TRY(call(engine, chunk, task, how, wrote_grads));
    GM_TRY(device->ops->event_record(device, timed->ended, o->stream));
    timed->numel = numel;
    return GM_OK;
}

typedef struct seen_rate {
    double rate, numel;
} seen_rate;

static int compare_rates(const void *a, const void *b)
{
    double left = ((const seen_rate *)a)->rate, right = ((const seen_rate *)b)->rate;
    return (left > right) - (left < right);
}

/* The upper quartile of the elements: the first update of all may compile kernels, and the device
 * may have waited for the host in the middle of some. */
double gm_opaque_rate(const gm_engine *engine)
{
    seen_rate seen[GM_OPAQUE_TIMED];
    double seconds, total = 0, slower = 0;
    uint32_t n = 0, i = 0;
    for (uint32_t t = 0; t < engine->opaque.n_timed; t++) {
        const gm_timed_update *timed = &engine->opaque.timed[t];
        if (timed->numel > 0 &&
            engine->device->ops->event_elapsed(engine->device, timed->began, timed->ended,
                                               &seconds) == GM_OK) {
            double rate = timed->numel / (seconds > 1e-9 ? seconds : 1e-9);
            seen[n++] = (seen_rate){rate, timed->numel};
            total += timed->numel;
        }
    }
    qsort(seen, n, sizeof *seen, compare_rates);
    while (i + 1 < n && (slower += seen[i].numel) <= 0.75 * total) {
        i++;
    }
    return n > 0 ? seen[i].rate : 0;
}

/* The norm of these gradients is another one now, for all who know it. */
static void outdate_sums(gm_engine *engine, uint32_t chunk)
{
    const gm_chunk_state *state = &engine->chunk_states[chunk];
    for (uint32_t i = 0; i < state->n_params; i++) {
        gm_param *p = &engine->params[engine->chunk_params[state->first_param + i]];
        p->sum = p->sum == GM_SUM_RIGHT ? GM_SUM_STALE : p->sum;
    }
    atomic_fetch_add(&engine->opaque.n_written, 1);
}

static gm_status run(gm_engine *engine, uint32_t chunk, const gm_task *task, gm_opaque_how how,
                     bool *wrote_grads)
{
    gm_chunks *chunks = engine->chunks;
    gm_stream stream = engine->opaque.stream;
    /* Behind all that a write of the gradient has to come behind: only the end tells. */
    gm_use uses[] = {
        {GM_WEIGHT, GM_WRITE, stream}, {GM_STATE, GM_WRITE, stream}, {GM_GRAD, GM_WRITE, stream}};
    *wrote_grads = false;
    GM_TRY(gm_chunks_begin_all(chunks, chunk, uses, N_PIECES));
    gm_status status = timed_call(engine, chunk, task, how, wrote_grads);
    uses[GM_GRAD].work = *wrote_grads && how == GM_OPAQUE_STEP ? GM_WRITE : GM_READ;
    gm_status ended = gm_chunks_end_all(chunks, chunk, uses, N_PIECES);
    return status == GM_OK ? ended : status;
}

/* What has a place in a ring goes home at once, while other chunks are updated. */
static gm_status send_home(gm_engine *engine, uint32_t chunk)
{
    for (int piece = GM_WEIGHT; engine->room.plan && piece <= GM_STATE; piece++) {
        const gm_place *place = gm_plan_place(engine->room.plan, chunk, (gm_piece)piece);
        if (place->length > 0 && !place->is_resident) {
            GM_TRY(gm_chunks_send_home(engine->chunks, chunk, (gm_piece)piece));
        }
    }
    return GM_OK;
}

static void unpin(gm_engine *engine, uint32_t chunk, int n_pieces)
{
    while (n_pieces-- > 0) {
        gm_chunks_unpin_ordered(engine->chunks, chunk, (gm_piece)n_pieces);
    }
}

gm_status gm_opaque_pin(gm_engine *engine, uint32_t chunk)
{
    GM_TRY(gm_saving_keep(engine, chunk)); /* these pins are no users, which may have written */
    gm_status status = gm_opaque_join(engine);
    for (int piece = 0; status == GM_OK && piece < N_PIECES; piece++) {
        status = gm_room_pin(engine, chunk, (gm_piece)piece, engine->opaque.stream);
        if (status != GM_OK) {
            unpin(engine, chunk, piece);
        }
    }
    return status;
}

gm_status gm_opaque_update(gm_engine *engine, uint32_t chunk, const gm_task *task)
{
    bool wrote_grads;
    gm_status status = run(engine, chunk, task, GM_OPAQUE_STEP, &wrote_grads);
    unpin(engine, chunk, N_PIECES);
    if (wrote_grads) {
        outdate_sums(engine, chunk);
    }
    return status == GM_OK ? send_home(engine, chunk) : status;
}

/* Invariant 6. */
gm_status gm_opaque_speculate(gm_engine *engine, uint32_t chunk, const gm_task *task, bool *out)
{
    gm_chunks *chunks = engine->chunks;
    *out = false;
    for (int piece = 0; piece < N_PIECES; piece++) {
        GM_TRY(gm_chunks_send_home(chunks, chunk, (gm_piece)piece));
    }
    bool is_possible, wrote_grads;
    GM_TRY(gm_chunks_bring(chunks, chunk, &is_possible));
    if (!is_possible) {
        return GM_OK;
    }
    GM_TRY(gm_opaque_pin(engine, chunk));
    gm_status status = run(engine, chunk, task, GM_OPAQUE_AHEAD, &wrote_grads);
    unpin(engine, chunk, N_PIECES);
    *out = status == GM_OK && !wrote_grads;
    for (int piece = 0; piece < N_PIECES; piece++) {
        if (piece != GM_GRAD || !*out) {
            gm_status back = gm_chunks_roll_back(chunks, chunk, (gm_piece)piece, *out);
            status = status == GM_OK ? back : status;
        }
    }
    return status;
}

gm_status gm_opaque_take(gm_engine *engine, uint32_t chunk, const gm_task *task)
{
    bool wrote_grads = false;
    GM_ASSERT(task->factor == GM_FACTOR_KNOWN);
    GM_TRY(gm_opaque_join(engine));
    return call(engine, chunk, task, GM_OPAQUE_TAKE, &wrote_grads);
}
