/* life.c - making the engine and what it takes from the start, and its end. */
#include "engine/engine_impl.h"

#include <stdlib.h>
#include <unistd.h>

/* Parameters share a chunk when all of this agrees; below 64, as layout.c expects. */
static uint32_t kind_of(const gm_engine_param *spec)
{
    uint32_t flags =
        (uint32_t)spec->has_low | (uint32_t)spec->has_moments << 1 | (uint32_t)spec->has_grad << 2;
    if (flags) {
        return (uint32_t)spec->format * 8 + flags;
    }
    uint32_t log2 = 0;
    while (((uint32_t)1 << log2) < spec->weight_bytes) {
        log2++;
    }
    return 32 + log2;
}

static void engine_free(gm_engine *engine)
{
    if (engine->chunks) { /* nothing that still runs may lose its memory */
        gm_watch_wait(engine);
    }
    if (engine->ranks.stream) { /* collectives write the sums */
        (void)engine->device->ops->stream_sync(engine->device, engine->ranks.stream);
    }
    if (engine->chunks && engine->update.host_stream) { /* tasks read the engine */
        (void)engine->device->ops->stream_sync(engine->device, engine->update.host_stream);
        (void)engine->device->ops->stream_sync(engine->device, engine->update.stream);
    }
    gm_opaque_sync(engine);
    if (engine->device) {
        gm_glance_free(engine);
    }
    if (engine->clip.stream) { /* it copies words home, and has tasks, too */
        (void)engine->device->ops->stream_sync(engine->device, engine->clip.stream);
    }
    gm_saving_free(engine);
    gm_chunks_free(engine->chunks);
    if (engine->weights.collectives != engine->room.plan) {
        gm_plan_free(engine->weights.collectives);
    }
    gm_plan_free(engine->room.plan);
    gm_watch_free(engine);
    gm_stage_free(engine);
    gm_timeline_free(engine->timeline);
    gm_timer_free(engine);
    gm_pass_free(engine);
    gm_update_free(engine);
    gm_clip_free(engine);
    gm_opaque_free(engine);
    gm_sums_free(engine);
    gm_ranks_free(engine);
    gm_weights_free(engine);
    gm_gathered_free(engine);
    gm_arena_free(engine->arena);
    gm_stay_free(engine);
    gm_speculation_free(engine);
    gm_layout_free(engine->layout);
    engine->device->ops->free(engine->device);
    for (uint32_t i = 0; engine->params && i < engine->n_params; i++) {
        free((void *)engine->params[i].spec.name);
        gm_field_forget_before(&engine->params[i]);
    }
    free(engine->params);
    free(engine->unit_chunks);
    free(engine->unit_begin);
    gm_names_unref(engine->names);
    gm_unit_free(engine);
    free(engine->chunk_states);
    free(engine->chunk_params);
    pthread_mutex_destroy(&engine->lock);
    free(engine);
}

void gm_engine_finish_updates(gm_engine *engine)
{
    pthread_mutex_lock(&engine->lock);
    (void)gm_opaque_wait(engine);
    (void)engine->device->ops->stream_sync(engine->device, engine->update.host_stream);
    (void)engine->device->ops->stream_sync(engine->device, engine->clip.stream);
    gm_engine_unlock(engine);
}

void gm_engine_leave_ranks(gm_engine *engine)
{
    pthread_mutex_lock(&engine->lock);
    (void)gm_opaque_wait(engine);
    gm_ranks_leave(engine);
    gm_engine_unlock(engine);
}

void gm_engine_ref(gm_engine *engine)
{
    atomic_fetch_add(&engine->references, 1);
}

void gm_engine_unref(gm_engine *engine)
{
    if (engine && atomic_fetch_sub(&engine->references, 1) == 1) {
        engine_free(engine);
    }
}

gm_status gm_engine_lay_out(const gm_engine_param *params, uint32_t n, size_t chunk_bytes,
                            uint32_t n_shards, gm_layout **out)
{
    gm_param_spec *specs = calloc(n ? n : 1, sizeof *specs);
    GM_FAIL_IF(!specs, GM_ERR_NOMEM, "HOST: table of %u parameters", n);
    for (uint32_t i = 0; i < n; i++) {
        specs[i] = (gm_param_spec){
            .numel = params[i].numel,
            .kind = kind_of(&params[i]),
            .weight_bytes = params[i].weight_bytes,
            .cut = params[i].cut,
        };
    }
    gm_status status = gm_layout_new(specs, n, chunk_bytes, n_shards, out);
    free(specs);
    return status;
}

static gm_status copy_params(gm_engine *engine, const gm_engine_options *options)
{
    uint32_t n = options->n_params;
    engine->n_params = n;
    engine->params = calloc(n ? n : 1, sizeof *engine->params);
    GM_FAIL_IF(!engine->params, GM_ERR_NOMEM, "HOST: table of %u parameters", n);
    for (uint32_t i = 0; i < n; i++) {
        engine->params[i].spec = options->params[i];
        engine->params[i].spec.name = gm_names_copy(options->params[i].name);
    }
    GM_TRY(gm_engine_lay_out(options->params, n, options->chunk_bytes, engine->ranks.n_shards,
                             &engine->layout));
    for (uint32_t i = 0; i < n; i++) {
        gm_param *p = &engine->params[i];
        gm_part part = gm_layout_part(engine->layout, i, engine->ranks.rank);
        p->place = *gm_layout_param(engine->layout, i);
        p->part_first = part.first;
        p->part_numel = part.numel;
        p->part_offset = part.offset;
    }
    return GM_OK;
}

/* Which chunks each unit needs, each once. */
static gm_status index_units(gm_engine *engine, const gm_engine_options *options)
{
    uint32_t n_links = options->n_units ? options->unit_begin[options->n_units] : 0;
    engine->n_units = options->n_units;
    engine->unit_begin = calloc((size_t)options->n_units + 1, sizeof *engine->unit_begin);
    engine->unit_chunks = calloc(n_links ? n_links : 1, sizeof *engine->unit_chunks);
    GM_FAIL_IF(!engine->unit_begin || !engine->unit_chunks, GM_ERR_NOMEM, "HOST: table of %u units",
               options->n_units);
    uint32_t end = 0;
    for (uint32_t unit = 0; unit < options->n_units; unit++) {
        uint32_t begin = end;
        engine->unit_begin[unit] = begin;
        for (uint32_t i = options->unit_begin[unit]; i < options->unit_begin[unit + 1]; i++) {
            uint32_t chunk = engine->params[options->unit_params[i]].place.chunk;
            bool is_known = false;
            for (uint32_t k = begin; k < end && !is_known; k++) {
                is_known = engine->unit_chunks[k] == chunk;
            }
            if (!is_known) {
                engine->unit_chunks[end++] = chunk;
            }
        }
    }
    engine->unit_begin[options->n_units] = end;
    return GM_OK;
}

/* Addresses for homes, and a staging area behind them. */
static gm_status make_arena(gm_engine *engine, size_t home_bytes)
{
    size_t sums = gm_sums_bytes(engine);
    size_t staging = engine->device->is_host ? 0 : GM_STAGING_BYTES + sums;
    double began = gm_seconds();
    GM_TRY(gm_arena_reserve(engine->device, home_bytes + staging, &engine->arena));
    GM_TRY(gm_arena_hold(engine->arena, &(gm_extent){home_bytes, staging}, 1, engine->workers));
    engine->arena_seconds = gm_seconds() - began;
    if (staging) {
        engine->staging = (uint8_t *)gm_arena_base(engine->arena) + home_bytes;
        gm_sums_place_home(engine, engine->staging + GM_STAGING_BYTES);
    }
    return GM_OK;
}

/* Blocks for everything that stays on the device, and with several ranks for a quarter of the
 * weights and gradients that are whole there for a moment: one module's are what a pass cannot do
 * without. */
static size_t bytes_wanted(const gm_engine *engine)
{
    size_t own = engine->inputs.slack_bytes, whole = 0;
    for (uint32_t id = 0; id < gm_layout_n_chunks(engine->layout); id++) {
        for (int piece = 0; piece < GM_N_PIECES; piece++) {
            size_t bytes = gm_engine_piece_blocks(engine, id, (gm_piece)piece);
            own += piece < GM_N_OWN_PIECES ? bytes : 0;
            whole += piece < GM_N_OWN_PIECES ? 0 : bytes;
        }
    }
    return own + whole / 4;
}

/* Those that stay, or all. */
static gm_status make_resident(gm_engine *engine, bool is_all)
{
    gm_status status = GM_OK;
    for (uint32_t id = 0; status == GM_OK && id < gm_layout_n_chunks(engine->layout); id++) {
        status =
            is_all || gm_stays(engine, id) ? gm_chunks_make_resident(engine->chunks, id) : GM_OK;
    }
    return status;
}

/* Chunks that all fit begin on the device, and get homes when one of them has to go.  Else they
 * begin at home, but for those that have none. */
static gm_status give_places(gm_engine *engine)
{
    size_t free_bytes = SIZE_MAX, total_bytes, limit = gm_room_limit(engine);
    size_t wanted = bytes_wanted(engine);
    if (!engine->device->is_host) {
        GM_TRY(engine->device->ops->memory(engine->device, &free_bytes, &total_bytes));
    }
    bool is_all_here = engine->policy == GM_POLICY_AUTO && engine->inputs.state_share >= 1 &&
                       wanted <= limit && wanted <= free_bytes;
    GM_TRY(make_resident(engine, false));
    if (!is_all_here && engine->policy != GM_POLICY_CUDA) {
        return gm_chunks_give_homes(engine->chunks);
    }
    gm_status status = make_resident(engine, true);
    return status == GM_ERR_NOMEM && is_all_here ? gm_chunks_give_homes(engine->chunks) : status;
}

static gm_status make_chunks(gm_engine *engine, const gm_engine_options *options)
{
    uint32_t n = gm_layout_n_chunks(engine->layout);
    size_t (*bytes)[GM_N_PIECES] = calloc(n ? n : 1, sizeof *bytes);
    gm_status status = GM_OK;
    if (!bytes) {
        status = GM_FAIL(GM_ERR_NOMEM, "HOST: table of %u chunks", n);
        goto done;
    }
    size_t needed = 0;
    for (uint32_t id = 0; id < n; id++) {
        for (int piece = 0; piece < GM_N_PIECES; piece++) {
            bytes[id][piece] = gm_engine_piece_bytes(engine, id, (gm_piece)piece);
            needed += gm_engine_piece_blocks(engine, id, (gm_piece)piece);
        }
    }
    size_t limit = gm_room_limit(engine);
    bool has_homes = options->policy != GM_POLICY_CUDA;
    if (!has_homes && needed > limit) {
        status = GM_FAIL(GM_ERR_NOMEM,
                         "DEVICE: policy \"cuda\" keeps everything on the device: %s wanted, %s "
                         "available: raise device_budget or use placement_policy=\"auto\"",
                         gm_wanted(needed).text, gm_there(limit).text);
        goto done;
    }
    GM_TRY_GOTO(status, done, gm_stay_new(engine, options));
    GM_TRY_GOTO(
        status, done,
        make_arena(engine,
                   has_homes ? gm_chunks_home_bytes((const size_t (*)[GM_N_PIECES])bytes, n) : 0));
    gm_chunks_options chunk_options = {
        .device = engine->device,
        .n_chunks = n,
        .piece_bytes = (const size_t (*)[GM_N_PIECES])bytes,
        .has_homes = has_homes,
        .homes = engine->arena,
        .home_limit = options->host_budget,
        .stays = engine->stay.chunks,
        .workers = engine->workers,
        .on_change = gm_saving_keep,
        .context = engine,
        .places_states = gm_is_opaque(engine),
        .device_limit = limit,
    };
    GM_TRY_GOTO(status, done, gm_chunks_new(&chunk_options, &engine->chunks));
    status = give_places(engine);
done:
    free(bytes);
    return status;
}

/* The parameters of each chunk, one chunk after the other. */
static gm_status index_chunks(gm_engine *engine)
{
    uint32_t n = gm_layout_n_chunks(engine->layout), first = 0;
    engine->chunk_states = calloc((size_t)n + 1, sizeof *engine->chunk_states);
    engine->chunk_params = calloc((size_t)engine->n_params + 1, sizeof *engine->chunk_params);
    GM_FAIL_IF(!engine->chunk_states || !engine->chunk_params, GM_ERR_NOMEM,
               "HOST: table of %u chunks", n);
    for (uint32_t id = 0; id < engine->n_params; id++) {
        engine->chunk_states[engine->params[id].place.chunk].n_params++;
    }
    for (uint32_t chunk = 0; chunk < n; chunk++) {
        gm_chunk_state *state = &engine->chunk_states[chunk];
        state->first_param = first;
        state->first_tick = state->tick = GM_NO_TICK;
        first += state->n_params;
        state->n_params = 0;
    }
    for (uint32_t id = 0; id < engine->n_params; id++) {
        gm_chunk_state *state = &engine->chunk_states[engine->params[id].place.chunk];
        engine->chunk_params[state->first_param + state->n_params++] = id;
    }
    return GM_OK;
}

gm_status gm_engine_new(const gm_engine_options *options, gm_engine **out)
{
    gm_engine *engine = calloc(1, sizeof *engine);
    if (!engine) {
        options->device->ops->free(options->device);
        return GM_FAIL(GM_ERR_NOMEM, "HOST: engine: %zu bytes", sizeof *engine);
    }
    pthread_mutex_init(&engine->lock, NULL);
    engine->owner = getpid();
    atomic_init(&engine->references, 1);
    engine->device = options->device;
    engine->workers = options->workers;
    engine->policy = options->policy;
    engine->is_grad_f32 = options->is_grad_f32;
    gm_ranks_init(engine, options);
    gm_gradient_init(engine);
    gm_inputs_init(engine, options);
    gm_room_init(engine, options);
    gm_speculation_init(engine, options);
    gm_opaque_init(engine, options);
    engine->shown = engine->ranks.n_shards > 1 ? GM_GATHERED : GM_WEIGHT;
    gm_status status;
    GM_TRY_GOTO(status, fail, copy_params(engine, options));
    GM_TRY_GOTO(status, fail, index_units(engine, options));
    GM_TRY_GOTO(status, fail, index_chunks(engine));
    GM_TRY_GOTO(status, fail, gm_opaque_lay_out(engine, options));
    GM_TRY_GOTO(status, fail, gm_names_new(engine, options));
    GM_TRY_GOTO(status, fail, gm_sums_new(engine));
    GM_TRY_GOTO(status, fail, gm_saving_new(engine));
    GM_TRY_GOTO(status, fail, make_chunks(engine, options));
    GM_TRY_GOTO(status, fail, gm_ranks_new(engine));
    GM_TRY_GOTO(status, fail, gm_clip_new(engine));
    GM_TRY_GOTO(status, fail, gm_update_new(engine));
    GM_TRY_GOTO(status, fail, gm_unit_new(engine));
    GM_TRY_GOTO(status, fail, gm_pass_new(engine));
    *out = engine;
    return GM_OK;
fail:
    engine_free(engine); /* every member is NULL, 0 or live; the device goes with it */
    return status;
}

/* ---- before the first step ---- */

gm_status gm_engine_forget_outside(gm_engine *engine)
{
    GM_TRY(gm_call_begin(engine));
    gm_book_forget_outside(engine->pass.book);
    return gm_call_end(engine, GM_OK);
}

gm_status gm_engine_regain(gm_engine *engine)
{
    GM_TRY(gm_call_begin(engine));
    gm_book_forget_outside(engine->pass.book);
    gm_status status = GM_OK;
    if (engine->room.plan) { /* an engine that never steps makes one where it has none */
        gm_room_want_plan(engine, true);
        status = gm_room_drop_plan(engine);
    }
    return gm_call_end(engine, status);
}

gm_status gm_engine_limit_unreduced(gm_engine *engine, size_t bytes)
{
    GM_TRY(gm_call_begin(engine));
    gm_gradient_limit(engine, bytes);
    return gm_call_end(engine, GM_OK);
}
