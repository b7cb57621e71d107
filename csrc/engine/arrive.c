/* arrive.c - gradients as they arrive from autograd, updates inside the backward that brings them,
 * and their exact norm.
 *
 * Some parameters never get a gradient.  So a chunk's are complete when as many have come as in the
 * steps before, which ranks know alike: they have compared what came (gradient.c, 3) before a step
 * counts.  Whatever comes later in a pass waits until they have compared again, as it may come on
 * some ranks only, which a collective would wait for.  An update inside the backward needs all, as
 * it would use up what comes too early: else the step makes it.
 *
 * The host may wait in: gm_engine_sumsq, gm_engine_clip_wait, gm_engine_sum; sum_at_home, for
 * gradients at home. */
#include "engine/engine_impl.h"

#include <string.h>

/* Counts the arrival; *out_complete says that no other one of its chunk is to come in this pass. */
static void count_arrival(gm_engine *engine, gm_param *p, bool *out_complete)
{
    gm_chunk_state *chunk = &engine->chunk_states[p->place.chunk];
    if (chunk->arrival != engine->pass.n) {
        chunk->arrival = engine->pass.n;
        chunk->n_arrived = 0;
    }
    gm_habit *habit = &chunk->arrivals;
    uint32_t usual = habit->most ? habit->most : chunk->n_params;
    chunk->is_late |= chunk->n_arrived >= usual;
    bool is_repeated = p->arrival == engine->pass.n;
    engine->arrive.has_repeats |= is_repeated;
    p->arrival = engine->pass.n;
    chunk->n_arrived += !is_repeated;
    habit->now = chunk->n_arrived > habit->now ? chunk->n_arrived : habit->now;
    *out_complete = !is_repeated && chunk->n_arrived == usual;
    chunk->backwards.now += !is_repeated && chunk->n_arrived == chunk->n_params;
}

/* The gradients of a chunk have come in this pass. */
static gm_status complete(gm_engine *engine, uint32_t chunk, gm_stream stream)
{
    gm_chunk_state *state = &engine->chunk_states[chunk];
    /* Weights that somebody still reads (a node that runs a backward of its own, a tensor that
     * shows them) are updated by the step itself. */
    bool is_updated = state->update == GM_UPDATE_ARMED && state->n_arrived == state->n_params &&
                      state->n_held == state->n_params; /* none was dropped since */
    if (!is_updated || gm_chunks_pins(engine->chunks, chunk, GM_WEIGHT) > 0) {
        GM_TRY(gm_pass_tick(engine, GM_TICK_GRAD, chunk, stream));
        gm_timer_start(engine, stream);
        return GM_OK;
    }
    gm_update_make_pending(engine, chunk);
    gm_gathered_outdate(engine, chunk);
    state->updated = engine->pass.n;
    atomic_fetch_add(&state->n_immediate, 1);
    GM_TRY(gm_pass_tick(engine, GM_TICK_GRAD, chunk, stream));
    /* Else the plan has just issued it, or wants it under the next forward. */
    if (!engine->pass.is_following) {
        GM_TRY(gm_update_issue_early(engine, chunk));
    }
    for (uint32_t i = 0; i < state->n_params; i++) {
        gm_gradient_use_up(engine, &engine->params[engine->chunk_params[state->first_param + i]]);
    }
    if (!gm_is_pending(engine, chunk)) {
        GM_TRY(gm_chunks_discard(engine->chunks, chunk, GM_GRAD));
    }
    gm_timer_start(engine, stream);
    return GM_OK;
}

static gm_status take_grad(gm_engine *engine, gm_param *p, const void *grad, gm_dtype dtype,
                           gm_stream stream)
{
    GM_TRY(gm_gradient_check_unused(engine, (uint32_t)(p - engine->params)));
    GM_TRY(gm_update_check_reuse(engine, p->place.chunk));
    GM_TRY(gm_update_issue(engine, p->place.chunk)); /* it still reads the last gradient */
    GM_TRY(gm_gradient_take(engine, p, grad, dtype, stream));
    bool is_complete;
    count_arrival(engine, p, &is_complete);
    if (is_complete) {
        GM_TRY(gm_gradient_reduce(engine, p->place.chunk));
    }
    return is_complete ? complete(engine, p->place.chunk, stream) : GM_OK;
}

gm_status gm_engine_grad_put(gm_engine *engine, uint32_t id, const void *grad, gm_dtype dtype,
                             gm_stream stream)
{
    GM_TRY(gm_engine_check_param(engine, id));
    GM_TRY(gm_call_begin_on(engine, stream));
    gm_param *p = &engine->params[id];
    gm_status status =
        p->spec.has_grad ? take_grad(engine, p, grad, dtype, stream)
                         : GM_FAIL(GM_ERR_ARG, "%s takes no gradient", gm_engine_name(engine, id));
    return gm_call_end(engine, status);
}

bool gm_engine_has_grad(const gm_engine *engine, uint32_t id)
{
    return id < engine->n_params && engine->params[id].grad != GM_GRAD_NONE;
}

gm_status gm_engine_grad_drop(gm_engine *engine, uint32_t id)
{
    GM_TRY(gm_engine_check_param(engine, id));
    GM_TRY(gm_call_begin(engine));
    gm_param *p = &engine->params[id];
    gm_chunk_state *chunk = &engine->chunk_states[p->place.chunk];
    gm_status status = gm_update_check_between(engine, p->place.chunk);
    if (status != GM_OK) {
        return gm_call_end(engine, status);
    }
    status = gm_gradient_drop(engine, p);
    chunk->backwards.now = chunk->n_held == 0 ? 0 : chunk->backwards.now;
    if (status == GM_OK && chunk->n_held == 0 && !gm_is_pending(engine, p->place.chunk)) {
        status = gm_chunks_discard(engine->chunks, p->place.chunk, GM_GRAD);
    }
    return gm_call_end(engine, status);
}

gm_status gm_engine_catch_up(gm_engine *engine)
{
    GM_TRY(gm_call_begin(engine));
    gm_status status = GM_OK;
    for (uint32_t i = 0; i < gm_layout_n_chunks(engine->layout) && status == GM_OK; i++) {
        status = engine->chunk_states[i].is_late ? GM_OK : gm_gradient_reduce(engine, i);
    }
    return gm_call_end(engine, status == GM_OK && engine->device->is_host ? gm_ranks_settle(engine)
                                                                          : status);
}

gm_status gm_engine_settle(gm_engine *engine)
{
    GM_TRY(gm_call_begin(engine));
    return gm_call_end(engine, engine->device->is_host ? gm_ranks_settle(engine) : GM_OK);
}

void gm_engine_sums(const gm_engine *engine, uint64_t *out)
{
    for (uint32_t id = 0; id < engine->n_params; id++) {
        const gm_param *p = &engine->params[id];
        out[id] = gm_is_unreduced(p) ? gm_fnv1a(p->sums, ~engine->gradient.n_reduces) : p->sums;
    }
}

/* ---- the norm ---- */

/* A gradient on the device whose sum was not left by its last kernel. */
static gm_status sum_on_device(gm_engine *engine, gm_param *p, gm_stream stream)
{
    gm_device *device = engine->device;
    uint32_t chunk = p->place.chunk;
    gm_dtype dtype = gm_grad_dtype(engine, &p->spec);
    gm_sumsq *sum = &engine->sums.there[p - engine->params];
    GM_TRY(gm_chunks_begin(engine->chunks, chunk, GM_GRAD, GM_READ, stream));
    const void *data = (const void *)(gm_chunks_address(engine->chunks, chunk, GM_GRAD) +
                                      p->part_offset * gm_dtype_bytes(dtype));
    GM_TRY(device->ops->fill(device, (uintptr_t)sum, 0, sizeof *sum, stream));
    GM_TRY(device->ops->sumsq(device, data, dtype, p->part_numel, sum, stream));
    p->sum = GM_SUM_RIGHT;
    return gm_chunks_end(engine->chunks, chunk, GM_GRAD, GM_READ, stream);
}

static gm_status check_not_used_up(const gm_engine *engine, const uint32_t *params, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        GM_TRY(gm_gradient_check_unused(engine, params[i]));
    }
    return GM_OK;
}

gm_status gm_engine_check_grads(gm_engine *engine, const uint32_t *params, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        GM_TRY(gm_engine_check_param(engine, params[i]));
    }
    GM_TRY(gm_call_begin(engine));
    return gm_call_end(engine, check_not_used_up(engine, params, n));
}

gm_status gm_engine_keep_grads(gm_engine *engine, const uint32_t *params, uint32_t n, bool *out)
{
    *out = false;
    for (uint32_t i = 0; i < n; i++) {
        GM_TRY(gm_engine_check_param(engine, params[i]));
    }
    GM_TRY(gm_call_begin(engine));
    for (uint32_t i = 0; i < n; i++) {
        *out |= gm_gradient_keep(engine, &engine->params[params[i]]);
    }
    return gm_call_end(engine, GM_OK);
}

/* All sums there count, so those of what is not asked for are made 0. */
static gm_status bring_sum(gm_engine *engine, gm_param *p, bool is_wanted, gm_stream stream)
{
    if (p->sum == GM_SUM_RIGHT) { /* left by the kernel that brought the gradient */
        GM_TRY(gm_chunks_wait_ready(engine->chunks, p->place.chunk, GM_GRAD, stream));
    } else if (is_wanted) {
        return sum_on_device(engine, p, stream);
    }
    if (is_wanted || p->sum == GM_SUM_ZERO) {
        return GM_OK;
    }
    p->sum = GM_SUM_ZERO;
    return engine->device->ops->fill(engine->device,
                                     (uintptr_t)&engine->sums.there[p - engine->params], 0,
                                     sizeof(gm_sumsq), stream);
}

static bool is_sum_there(const gm_engine *engine, const gm_param *p)
{
    return p->sum == GM_SUM_RIGHT || gm_chunks_is_resident(engine->chunks, p->place.chunk, GM_GRAD);
}

static bool has_own_grad(const gm_param *p)
{
    return gm_is_held(p) && p->part_numel > 0;
}

/* Of gradients for which the device had no room, behind the sums of parameters; none: 0. */
static gm_status sum_at_home(gm_engine *engine, const uint32_t *params, uint32_t n, bool is_any,
                             gm_stream stream)
{
    gm_device *device = engine->device;
    gm_sumsq *here = &engine->sums.home[engine->n_params], sum = {{0}, 0, 0};
    uintptr_t there = (uintptr_t)&engine->sums.there[engine->n_params];
    if (!is_any && engine->arrive.is_home_zero) {
        return GM_OK;
    }
    engine->arrive.is_home_zero = !is_any;
    if (!is_any) {
        return device->ops->fill(device, there, 0, sizeof sum, stream);
    }
    engine->arrive.n_waits++;
    for (uint32_t i = 0; i < n; i++) {
        const gm_param *p = &engine->params[params[i]];
        if (has_own_grad(p) && !is_sum_there(engine, p)) {
            gm_dtype dtype = gm_grad_dtype(engine, &p->spec);
            GM_TRY(gm_chunks_write_back(engine->chunks, p->place.chunk, GM_GRAD));
            gm_sumsq_host(gm_chunks_home(engine->chunks, p->place.chunk, GM_GRAD) +
                              p->part_offset * gm_dtype_bytes(dtype),
                          dtype, p->part_numel, &sum, engine->workers);
        }
    }
    GM_TRY(device->ops->stream_sync(device, stream)); /* which read the last one */
    gm_note_access(device, here, sizeof sum, true, GM_STREAM_HOST);
    *here = sum;
    return device->is_host ? GM_OK : device->ops->copy_h2d(device, there, here, sizeof sum, stream);
}

/* The exact sum of squares of these over all ranks, as the total there, for what `stream` gets from
 * now on.  Where there are ranks their stream has brought the gradients, and it writes all sums: a
 * rank's own ones, behind those the total, and behind that the collective, which is the same
 * whether a rank has waited for some of its gradients or not. */
static gm_status sum_all(gm_engine *engine, const uint32_t *params, uint32_t n, gm_stream stream,
                         bool *out_waited)
{
    *out_waited = false;
    engine->arrive.wants_sums = true;
    GM_TRY(check_not_used_up(engine, params, n));
    GM_TRY(gm_is_opaque(engine) ? gm_update_issue_all(engine) : GM_OK);
    gm_speculation_note_norm(engine);
    GM_TRY(gm_gradient_reduce_all(engine));
    if (engine->device->is_paper) { /* no gradient has bytes */
        return GM_OK;
    }
    gm_stream own = gm_has_ranks(engine) ? engine->ranks.stream : stream;
    uint32_t next = 0;
    GM_TRY(gm_clip_order_sums(engine, own));
    for (uint32_t id = 0; id < engine->n_params; id++) {
        gm_param *p = &engine->params[id];
        bool is_wanted = next < n && params[next] == id && has_own_grad(p);
        bool is_there = is_sum_there(engine, p);
        next += next < n && params[next] == id;
        *out_waited |= is_wanted && !is_there;
        GM_TRY(bring_sum(engine, p, is_wanted && is_there, own));
    }
    GM_ASSERT(next == n);
    GM_TRY(sum_at_home(engine, params, n, *out_waited, own));
    gm_clip_args args = {.sums = engine->sums.there,
                         .n = engine->n_params + 1,
                         .total = &engine->sums.there[gm_sums_total(engine)]};
    GM_TRY(engine->device->ops->clip(engine->device, &args, own));
    return gm_has_ranks(engine) ? gm_ranks_sum(engine, stream) : GM_OK;
}

static gm_status check_sorted(const gm_engine *engine, const uint32_t *params, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        GM_TRY(gm_engine_check_param(engine, params[i]));
        GM_FAIL_IF(i > 0 && params[i] <= params[i - 1], GM_ERR_ARG,
                   "parameter %u is not behind parameter %u", params[i], params[i - 1]);
    }
    return GM_OK;
}

static gm_status sumsq(gm_engine *engine, const uint32_t *params, uint32_t n, gm_sumsq *out,
                       gm_stream stream)
{
    gm_device *device = engine->device;
    size_t total = gm_sums_total(engine);
    bool has_waited;
    GM_TRY(sum_all(engine, params, n, stream, &has_waited));
    engine->arrive.n_waits++;
    if (!device->is_host) {
        GM_TRY(device->ops->copy_d2h(device, &engine->sums.home[total],
                                     (uintptr_t)&engine->sums.there[total], sizeof *out, stream));
    }
    GM_TRY(device->ops->stream_sync(device, stream));
    GM_TRY(gm_ranks_check(engine)); /* before the bytes are believed */
    gm_note_access(device, &engine->sums.home[total], sizeof *out, false, GM_STREAM_HOST);
    *out = engine->sums.home[total];
    return GM_OK;
}

gm_status gm_engine_sumsq(gm_engine *engine, const uint32_t *params, uint32_t n, gm_sumsq *out,
                          gm_stream stream)
{
    GM_TRY(check_sorted(engine, params, n));
    GM_TRY(gm_call_begin(engine));
    return gm_call_end(engine, sumsq(engine, params, n, out, stream));
}

gm_status gm_engine_clip(gm_engine *engine, const uint32_t *params, uint32_t n, double max_norm,
                         float *norm, gm_stream stream, bool *out)
{
    GM_TRY(check_sorted(engine, params, n));
    GM_TRY(gm_call_begin(engine));
    gm_status status = sum_all(engine, params, n, stream, out);
    status = status == GM_OK ? gm_clip_issue(engine, max_norm, norm, stream) : status;
    return gm_call_end(engine, status);
}

gm_status gm_engine_clip_wait(gm_engine *engine, gm_clip *out)
{
    GM_TRY(gm_call_begin(engine));
    gm_status status =
        engine->clip.step > 0
            ? gm_clip_wait(engine, engine->clip.step, out)
            : GM_FAIL(GM_ERR_STATE, "there has been no clip that could be waited for");
    return gm_call_end(engine, status == GM_OK ? gm_ranks_check(engine) : status);
}

/* ---- gradients that torch keeps ---- */

static gm_status sum_of_ranks(gm_engine *engine, uint32_t param, uintptr_t data, size_t count,
                              gm_dtype dtype, gm_stream stream)
{
    const gm_device_ops *ops = engine->device->ops;
    gm_comm *comms[] = {engine->ranks.shard_comm, engine->ranks.replica_comm};
    GM_TRY(gm_ranks_check_joined(engine));
    gm_ranks_label(engine, GM_FOR_SUM, param);
    GM_TRY(ops->event_record(engine->device, engine->ranks.summed, stream));
    GM_TRY(ops->event_wait(engine->device, engine->ranks.summed, engine->ranks.stream));
    for (int i = 0; i < 2; i++) {
        if (comms[i]) {
            GM_TRY(gm_comm_all_reduce(comms[i], data, count, (gm_comm_dtype)dtype, GM_COMM_SUM,
                                      engine->ranks.stream));
        }
    }
    return gm_ranks_agree(engine); /* no step of ours will compare, nor ask for a failure */
}

gm_status gm_engine_sum(gm_engine *engine, uint32_t param, uintptr_t data, size_t count,
                        gm_dtype dtype, gm_stream stream)
{
    GM_TRY(gm_call_begin_on(engine, stream));
    return gm_call_end(engine, gm_has_ranks(engine)
                                   ? sum_of_ranks(engine, param, data, count, dtype, stream)
                                   : GM_OK);
}
