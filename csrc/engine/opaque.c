/* opaque.c - the update of a chunk whose states are bytes to the engine: the caller's own function
 * makes it, on the device, where weights, states and gradient are at their addresses.
 *
 * The piece of states has the low parts first, as other chunks have, and behind them the states of
 * one parameter after the other, each at a multiple of GM_ALIGN.
 *
 * Invariants
 *   1. While the function runs the chunk's three pieces are pinned and the engine is locked. Its
 *      thread calls nothing of the engine but what asks for room for others (room.c), which keeps
 *      a plan that is followed: an operation of that plan may be what runs.
 *   2. Its first error closes the engine.
 *   3. An update that begins ends before the call that has issued it.  One that is still to be
 *      issued when the step returns is issued at last by gm_engine_issue, which the caller calls
 *      before the numbers that the function reads become others.
 *
 * The host may wait in: gm_room_pin, for room; on devices whose streams the function knows nothing
 * of (the host), for the chunk's copies. */
#include "engine/engine_impl.h"

#include <stdlib.h>

enum { N_PIECES = GM_N_OWN_PIECES };

void gm_opaque_init(gm_engine *engine, const gm_engine_options *options)
{
    engine->opaque.caller = options->opaque;
}

void gm_opaque_lay_out(gm_engine *engine)
{
    uint32_t n = gm_is_opaque(engine) ? gm_layout_n_chunks(engine->layout) : 0;
    for (uint32_t chunk = 0; chunk < n; chunk++) {
        gm_chunk_state *state = &engine->chunk_states[chunk];
        size_t low = gm_low_bytes(gm_chunk_spec(engine, chunk)) *
                     gm_layout_chunk(engine->layout, chunk)->shard_numel;
        size_t at = gm_round_up(low, GM_ALIGN);
        for (uint32_t i = 0; i < state->n_params; i++) {
            gm_param *p = &engine->params[engine->chunk_params[state->first_param + i]];
            p->state_offset = at;
            at += gm_round_up(p->spec.state_bytes, GM_ALIGN);
            state->opaque_bytes = p->spec.state_bytes > 0 ? at - low : state->opaque_bytes;
        }
    }
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

gm_status gm_opaque_check_call(const gm_engine *engine)
{
    GM_FAIL_IF(engine->opaque.is_running, GM_ERR_STATE,
               "the optimizer's step() has used a parameter of the managed model, and not only "
               "those of its param_groups");
    return GM_OK;
}

gm_status gm_opaque_check_states(const gm_engine *engine, uint32_t id, uint64_t first, uint64_t n)
{
    GM_TRY(gm_engine_check_param(engine, id));
    uint64_t bytes = gm_is_opaque(engine) ? engine->params[id].spec.state_bytes : 0;
    GM_FAIL_IF(first > bytes || n > bytes - first, GM_ERR_ARG,
               "bytes %llu to %llu of the states of %s, which has %llu of them",
               (unsigned long long)first, (unsigned long long)(first + n),
               gm_engine_name(engine, id), (unsigned long long)bytes);
    return GM_OK;
}

gm_status gm_opaque_prefetch(gm_engine *engine, uint32_t chunk, bool *out)
{
    *out = true;
    for (int piece = 0; *out && piece < N_PIECES; piece++) {
        GM_TRY(gm_chunks_prefetch(engine->chunks, chunk, (gm_piece)piece, out));
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

static gm_status call(gm_engine *engine, uint32_t chunk, const gm_task *task, bool *wrote_grads)
{
    gm_device *device = engine->device;
    gm_opaque_call what = {.chunk = chunk,
                           .n_params = (uint32_t)task->n_ranges,
                           .grad_scale = task->ranges[0].scalars.grad_scale,
                           .stream = engine->update.stream};
    if (task->factor != GM_FACTOR_KNOWN) {
        GM_TRY(gm_clip_order(engine, false, what.stream, &what.late_scale));
    }
    GM_TRY(device->is_host ? device->ops->stream_sync(device, what.stream) : GM_OK);
    uint32_t *params = calloc(task->n_ranges, sizeof *params);
    GM_FAIL_IF(!params, GM_ERR_NOMEM, "HOST: table of %zu parameters", task->n_ranges);
    list_params(engine, chunk, task, params);
    what.params = params;
    uint32_t entry =
        gm_timeline_begin(engine->timeline, GM_LOG_DEVICE_UPDATE, GM_ON_UPDATE, chunk, GM_STATE,
                          gm_engine_piece_bytes(engine, chunk, GM_STATE), what.stream);
    engine->opaque.is_running = true;
    gm_status status = engine->opaque.caller.run(engine->opaque.caller.context, &what, wrote_grads);
    engine->opaque.is_running = false;
    gm_timeline_end(engine->timeline, entry, what.stream);
    free(params);
    return status;
}

static gm_status run(gm_engine *engine, uint32_t chunk, const gm_task *task)
{
    gm_chunks *chunks = engine->chunks;
    gm_stream stream = engine->update.stream;
    const gm_use uses[] = {
        {GM_WEIGHT, GM_WRITE, stream}, {GM_STATE, GM_WRITE, stream}, {GM_GRAD, GM_READ, stream}};
    bool wrote_grads = false;
    GM_TRY(gm_chunks_note_readers(chunks, chunk, GM_WEIGHT, engine->call.stream));
    GM_TRY(gm_chunks_begin_all(chunks, chunk, uses, N_PIECES));
    gm_status status = call(engine, chunk, task, &wrote_grads);
    gm_status ended = gm_chunks_end_all(chunks, chunk, uses, N_PIECES);
    if (wrote_grads && status == GM_OK) {
        status = gm_chunks_note_write(chunks, chunk, GM_GRAD);
    }
    return status == GM_OK ? ended : status;
}

/* What has a place in a ring goes home at once, while other chunks are updated. */
static gm_status send_home(gm_engine *engine, uint32_t chunk)
{
    for (int piece = GM_WEIGHT; engine->room.plan && piece <= GM_STATE; piece++) {
        bool is_any = gm_engine_piece_bytes(engine, chunk, (gm_piece)piece) > 0;
        if (is_any && !gm_plan_place(engine->room.plan, chunk, (gm_piece)piece)->is_resident) {
            GM_TRY(gm_chunks_send_home(engine->chunks, chunk, (gm_piece)piece));
        }
    }
    return GM_OK;
}

gm_status gm_opaque_update(gm_engine *engine, uint32_t chunk, const gm_task *task)
{
    gm_chunks *chunks = engine->chunks;
    /* Others that show the weights read on behind the update. */
    bool is_shown = gm_chunks_pins(chunks, chunk, GM_WEIGHT) > 0;
    gm_status status = GM_OK;
    int n_pinned = 0;
    for (; status == GM_OK && n_pinned < N_PIECES; n_pinned += status == GM_OK) {
        status = gm_room_pin(engine, chunk, (gm_piece)n_pinned, engine->update.stream);
    }
    status = status == GM_OK ? run(engine, chunk, task) : status;
    while (n_pinned-- > 0) {
        gm_chunks_unpin_ordered(chunks, chunk, (gm_piece)n_pinned);
    }
    if (status == GM_OK && is_shown) {
        status = gm_chunks_wait_ready(chunks, chunk, GM_WEIGHT, engine->call.stream);
    }
    return status == GM_OK ? send_home(engine, chunk) : status;
}
