/* inputs.c - what a plan is made from: chunks, the passes since the last step, and the bytes that
 * it may have. */
#include "engine/engine_impl.h"

#include <stdlib.h>

enum { STAGE_BYTES = 80 << 20 }; /* of the stage, for each chunk that the plan lets pass at once */

void gm_inputs_init(gm_engine *engine, const gm_engine_options *options)
{
    engine->inputs.rates = options->rates;
    engine->inputs.is_tuned = options->is_tuned;
    engine->inputs.state_share = options->state_share;
    engine->inputs.slack_bytes = options->slack_bytes;
}

void gm_inputs_note_run(gm_engine *engine, uint32_t trace)
{
    gm_runs *runs = &engine->inputs.runs;
    uint64_t hash = gm_book_trace(engine->pass.book, trace)->hash;
    for (uint32_t i = 0; i < runs->n; i++) {
        if (runs->trace[i] == trace && runs->hash[i] == hash) {
            runs->count[i]++;
            return;
        }
    }
    if (runs->n < GM_TRACES_KEPT) {
        runs->trace[runs->n] = trace;
        runs->hash[runs->n] = hash;
        runs->count[runs->n++] = 1;
    }
}

void gm_inputs_forget_runs(gm_engine *engine)
{
    engine->inputs.runs.n = 0;
}

double gm_inputs_seen_rate(const gm_engine *engine)
{
    return gm_is_opaque(engine) ? gm_opaque_rate(engine) : gm_room_host_rate(engine);
}

/* Start-up measures the host's rate with nothing but copies beside it, in memory that is warm.  In
 * a step Adam on the host is hardly faster when nothing is copied: it shares its cores and caches
 * with the threads that feed the device all the time.  So what steps have shown stands for both.
 * An opaque update is not known before the first step. */
void gm_inputs_correct_rate(gm_engine *engine, double seen)
{
    gm_rates *rates = &engine->inputs.rates;
    if (engine->inputs.is_tuned && seen > 0 && gm_is_opaque(engine)) {
        rates->device_adam = seen;
    } else if (engine->inputs.is_tuned && seen > 0) {
        rates->host_adam = rates->host_adam_beside = seen;
    }
}

size_t gm_inputs_device_bytes(gm_engine *engine)
{
    size_t now =
        engine->room.outside_bytes ? engine->room.outside_bytes(engine->room.outside_context) : 0;
    size_t peak = now, limit = SIZE_MAX, free_bytes, total_bytes;
    for (uint32_t t = 0; t < gm_book_n_traces(engine->pass.book); t++) {
        const gm_trace *trace = gm_book_trace(engine->pass.book, t);
        for (uint32_t i = 0; trace && i < trace->n; i++) {
            peak = trace->ticks[i].outside_bytes > peak ? trace->ticks[i].outside_bytes : peak;
        }
    }
    peak += gm_speculation_device_bytes(engine);
    size_t beside =
        peak + engine->sums.n_blocks * engine->device->block_bytes + engine->inputs.slack_bytes;
    engine->inputs.outside_peak_bytes = beside - engine->inputs.slack_bytes;
    if (engine->room.budget != SIZE_MAX) {
        limit = engine->room.budget > beside ? engine->room.budget - beside : 0;
    }
    if (!engine->device->is_host &&
        engine->device->ops->memory(engine->device, &free_bytes, &total_bytes) == GM_OK) {
        gm_chunks_stats stats;
        gm_chunks_get_stats(engine->chunks, &stats);
        size_t room = free_bytes + stats.device_bytes,
               growth = peak - now + engine->inputs.slack_bytes;
        room = room > growth ? room - growth : 0;
        limit = room < limit ? room : limit;
    }
    return limit;
}

static gm_status describe_chunks(gm_engine *engine, gm_inputs *in)
{
    uint32_t n = gm_layout_n_chunks(engine->layout);
    in->chunks = calloc(n ? n : 1, sizeof *in->chunks);
    GM_FAIL_IF(!in->chunks, GM_ERR_NOMEM, "HOST: a plan of %u chunks", n);
    size_t block_bytes = engine->device->block_bytes;
    for (uint32_t id = 0; id < n; id++) {
        gm_plan_chunk *chunk = &in->chunks[id];
        for (int piece = 0; piece < GM_N_PIECES; piece++) {
            chunk->bytes[piece] = gm_engine_piece_bytes(engine, id, (gm_piece)piece);
            chunk->blocks[piece] =
                (uint32_t)(gm_round_up(chunk->bytes[piece], block_bytes) / block_bytes);
        }
        const gm_chunk_shape *shape = gm_layout_chunk(engine->layout, id);
        uint64_t most = shape->used < shape->shard_numel ? shape->used : shape->shard_numel;
        chunk->numel = gm_chunk_spec(engine, id)->has_moments ? most : 0;
        chunk->must_reside = gm_chunks_pins(engine->chunks, id, GM_WEIGHT) > 0;
        chunk->stays = gm_stays(engine, id);
    }
    in->plan.chunks = in->chunks;
    in->plan.n_chunks = n;
    return GM_OK;
}

/* The passes since the last step, then every other trace (evaluation), which does not decide;
 * without those where only replicas plan together, of which each may evaluate alone. */
static void list_traces(gm_engine *engine, gm_inputs *in)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < engine->inputs.runs.n; i++) {
        const gm_trace *trace = gm_book_trace(engine->pass.book, engine->inputs.runs.trace[i]);
        if (trace && trace->hash == engine->inputs.runs.hash[i]) {
            in->traces[n] = trace;
            in->n_runs[n++] = engine->inputs.runs.count[i];
        }
    }
    bool is_apart = engine->ranks.stream && engine->ranks.n_shards == 1;
    for (uint32_t t = 0; !is_apart && t < gm_book_n_traces(engine->pass.book) && n < GM_TRACES_KEPT;
         t++) {
        const gm_trace *trace = gm_book_trace(engine->pass.book, t);
        bool is_known = !trace || trace->has_backward;
        for (uint32_t i = 0; i < n && !is_known; i++) {
            is_known = in->traces[i] == trace;
        }
        if (!is_known) {
            in->traces[n] = trace;
            in->n_runs[n++] = 1;
        }
    }
    in->plan.traces = in->traces;
    in->plan.n_runs = in->n_runs;
    in->plan.n_traces = n;
}

gm_status gm_inputs_fill(gm_engine *engine, gm_inputs *in)
{
    in->plan.unit_chunks = engine->unit_chunks;
    in->plan.unit_begin = engine->unit_begin;
    in->plan.n_units = engine->n_units;
    in->plan.when =
        engine->step.wants_immediate && !engine->arrive.has_repeats ? GM_IMMEDIATE : GM_DEFERRED;
    in->plan.spare_bytes = gm_speculation_budget(engine);
    in->plan.policy = engine->policy;
    in->plan.block_bytes = engine->device->block_bytes;
    in->plan.is_opaque = gm_is_opaque(engine);
    in->plan.is_at_step = in->plan.is_opaque && engine->opaque.caller.when == GM_OPAQUE_AT_STEP;
    in->plan.stage_blocks = in->plan.is_opaque
                                ? 0
                                : (uint32_t)(gm_round_up(STAGE_BYTES, engine->device->block_bytes) /
                                             engine->device->block_bytes);
    in->plan.state_share = engine->inputs.state_share;
    in->plan.rates = engine->inputs.rates;
    in->plan.n_ranks = engine->ranks.n_shards * engine->ranks.n_replicas;
    GM_TRY(describe_chunks(engine, in));
    list_traces(engine, in);
    in->plan.device_bytes = gm_inputs_device_bytes(engine);
    return GM_OK;
}

void gm_inputs_free(gm_inputs *in)
{
    free(in->chunks);
    free(in->copies);
    free(in->ticks);
}
