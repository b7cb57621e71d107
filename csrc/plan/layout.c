/* layout.c - packs parameters into chunks; see layout.h for the rules and invariants. */
#include "plan/layout.h"

#include <stdlib.h>

struct gm_layout {
    uint32_t n_params, n_chunks;
    gm_param_place *places; /* (n_params,) */
    gm_chunk_shape *chunks; /* (n_chunks,), capacity n_params */
};

void gm_layout_free(gm_layout *layout)
{
    if (layout) {
        free(layout->places);
        free(layout->chunks);
        free(layout);
    }
}

static gm_status check_spec(const gm_param_spec *spec, uint32_t index)
{
    switch (spec->weight_bytes) {
    case 1:
    case 2:
    case 4:
    case 8:
    case 16: break;
    default:
        return GM_FAIL(GM_ERR_ARG, "parameter %u: an element of %u bytes is not supported", index,
                       spec->weight_bytes);
    }
    GM_FAIL_IF(spec->numel > (UINT64_C(1) << 50), GM_ERR_ARG,
               "parameter %u: %llu elements are more than 2^50", index,
               (unsigned long long)spec->numel);
    return GM_OK;
}

/* Elements that a parameter takes, with the padding that aligns its successor. */
static uint64_t padded_numel(const gm_param_spec *spec)
{
    uint64_t unit = GM_ALIGN / spec->weight_bytes;
    return (spec->numel + unit - 1) / unit * unit;
}

/* The open chunk of a kind, or NULL.  Kinds are few; the newest chunks are at the end. */
static gm_chunk_shape *open_chunk(gm_layout *layout, uint32_t kind)
{
    for (uint32_t i = layout->n_chunks; i-- > 0;) {
        if (layout->chunks[i].kind == kind) {
            return &layout->chunks[i];
        }
    }
    return NULL;
}

gm_status gm_layout_new(const gm_param_spec *params, uint32_t n_params, size_t chunk_bytes,
                        uint32_t n_shards, gm_layout **out)
{
    GM_FAIL_IF(chunk_bytes == 0 || n_shards == 0, GM_ERR_ARG,
               "chunk size and number of shards must be positive");
    for (uint32_t i = 0; i < n_params; i++) {
        GM_TRY(check_spec(&params[i], i));
    }
    gm_layout *layout;
    GM_TRY(GM_NEW(layout, "HOST: layout: %zu bytes"));
    layout->n_params = n_params;
    layout->places = calloc(n_params ? n_params : 1, sizeof *layout->places);
    layout->chunks = calloc(n_params ? n_params : 1, sizeof *layout->chunks);
    if (!layout->places || !layout->chunks) {
        gm_layout_free(layout);
        return GM_FAIL(GM_ERR_NOMEM, "HOST: layout of %u parameters", n_params);
    }
    for (uint32_t i = 0; i < n_params; i++) {
        uint64_t take = padded_numel(&params[i]);
        gm_chunk_shape *chunk = open_chunk(layout, params[i].kind);
        if (chunk && chunk->weight_bytes != params[i].weight_bytes) {
            gm_status status =
                GM_FAIL(GM_ERR_ARG, "parameter %u: kind %u has elements of %u and %u bytes", i,
                        params[i].kind, chunk->weight_bytes, params[i].weight_bytes);
            gm_layout_free(layout);
            return status;
        }
        if (!chunk || (chunk->numel + take) * params[i].weight_bytes > chunk_bytes) {
            if (!chunk || chunk->numel > 0) {
                chunk = &layout->chunks[layout->n_chunks++];
                chunk->kind = params[i].kind;
                chunk->weight_bytes = params[i].weight_bytes;
                chunk->first_param = i;
            }
        }
        layout->places[i] = (gm_param_place){
            .chunk = (uint32_t)(chunk - layout->chunks),
            .offset = chunk->numel,
            .numel = params[i].numel,
        };
        chunk->numel += take;
        chunk->used += params[i].numel;
        chunk->n_params++;
    }
    for (uint32_t i = 0; i < layout->n_chunks; i++) { /* invariant 3 */
        gm_chunk_shape *chunk = &layout->chunks[i];
        uint64_t unit = GM_ALIGN / chunk->weight_bytes * n_shards;
        chunk->numel = (chunk->numel + unit - 1) / unit * unit;
        chunk->shard_numel = chunk->numel / n_shards;
    }
    *out = layout;
    return GM_OK;
}

uint32_t gm_layout_n_chunks(const gm_layout *layout)
{
    return layout->n_chunks;
}

const gm_chunk_shape *gm_layout_chunk(const gm_layout *layout, uint32_t chunk)
{
    GM_ASSERT(chunk < layout->n_chunks);
    return &layout->chunks[chunk];
}

const gm_param_place *gm_layout_param(const gm_layout *layout, uint32_t param)
{
    GM_ASSERT(param < layout->n_params);
    return &layout->places[param];
}

uint64_t gm_layout_hash(const gm_layout *layout)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (uint32_t i = 0; i < layout->n_params; i++) {
        const gm_param_place *place = &layout->places[i];
        hash = gm_fnv1a(gm_fnv1a(gm_fnv1a(hash, place->chunk), place->offset), place->numel);
    }
    for (uint32_t i = 0; i < layout->n_chunks; i++) {
        const gm_chunk_shape *chunk = &layout->chunks[i];
        hash = gm_fnv1a(gm_fnv1a(gm_fnv1a(hash, chunk->kind), chunk->weight_bytes), chunk->numel);
    }
    return hash;
}

gm_status gm_layout_search(const gm_param_spec *params, uint32_t n_params, size_t min_bytes,
                           size_t range_bytes, uint32_t n_grids, size_t *out_chunk_bytes)
{
    GM_FAIL_IF(min_bytes == 0 || n_grids == 0, GM_ERR_ARG,
               "chunk search: min_chunk_size and chunk_search_n_grids must be positive");
    for (uint32_t i = 0; i < n_params; i++) {
        GM_TRY(check_spec(&params[i], i));
    }
    uint64_t best_waste = UINT64_MAX;
    size_t best = min_bytes, step = range_bytes / n_grids;
    for (uint32_t grid = 0; grid <= n_grids; grid++) {
        size_t candidate = gm_round_up(min_bytes + grid * step, GM_ALIGN);
        /* Parameters of each kind fill chunks one after the other; what a chunk cannot take is
         * waste. Only the running fill of each kind matters, and kinds are below 64 (see
         * engine.h). */
        uint64_t fill[64] = {0}, waste = 0;
        for (uint32_t i = 0; i < n_params; i++) {
            uint64_t take = padded_numel(&params[i]) * params[i].weight_bytes;
            uint64_t *used = &fill[params[i].kind % 64];
            if (*used > 0 && *used + take > candidate) {
                waste += candidate > *used ? candidate - *used : 0;
                *used = 0;
            }
            *used += take;
        }
        for (uint32_t kind = 0; kind < 64; kind++) {
            waste += fill[kind] && candidate > fill[kind] ? candidate - fill[kind] : 0;
        }
        if (waste < best_waste) {
            best_waste = waste;
            best = candidate;
        }
        if (step == 0) {
            break;
        }
    }
    *out_chunk_bytes = best;
    return GM_OK;
}
