/* layout.c - packs parameters into chunks; see layout.h for the rules and invariants. */
#include "plan/layout.h"

#include <stdlib.h>

#include "plan/shards.h"

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
    GM_FAIL_IF(spec->kind >= 64, GM_ERR_ARG, "parameter %u: kind %u is not below 64", index,
               spec->kind);
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

/* The parameters of one kind; *out stays as it is where all of them may be cut anywhere. */
static gm_status place_kind(const gm_param_spec *params, uint32_t n_params, uint32_t first,
                            size_t chunk_bytes, uint32_t n_shards, gm_shards_place *out)
{
    uint32_t kind = params[first].kind, width = params[first].weight_bytes, n = 0;
    gm_shards_item *items = calloc((size_t)n_params, sizeof *items);
    gm_shards_place *places = calloc((size_t)n_params, sizeof *places);
    gm_status status =
        items && places ? GM_OK : GM_FAIL(GM_ERR_NOMEM, "HOST: layout of %u parameters", n_params);
    bool is_free = true;
    for (uint32_t i = first; status == GM_OK && i < n_params; i++) {
        if (params[i].kind == kind) {
            items[n++] = (gm_shards_item){params[i].numel, params[i].cut};
            is_free = is_free && params[i].cut <= 1;
        }
    }
    if (status == GM_OK && !is_free) {
        status =
            gm_shards_place_all(items, n, GM_ALIGN / width, chunk_bytes / width, n_shards, places);
        n = 0;
        for (uint32_t i = first; status == GM_OK && i < n_params; i++) {
            if (params[i].kind == kind) {
                out[i] = places[n++];
                out[i].run++; /* 0: none */
            }
        }
    }
    free(items);
    free(places);
    return status;
}

/* Of every kind with parameters that may not be cut anywhere; run 0 for the others. */
static gm_status place_kinds(const gm_param_spec *params, uint32_t n_params, size_t chunk_bytes,
                             uint32_t n_shards, gm_shards_place *out)
{
    uint64_t is_seen = 0;
    for (uint32_t i = 0; i < n_params; i++) {
        uint64_t bit = UINT64_C(1) << params[i].kind;
        if (!(is_seen & bit)) {
            is_seen |= bit;
            GM_TRY(place_kind(params, n_params, i, chunk_bytes, n_shards, out));
        }
    }
    return GM_OK;
}

/* The chunk of a parameter, opened for it if the last one of its kind is not. */
static gm_chunk_shape *chunk_for(gm_layout *layout, const gm_param_spec *params, uint32_t id,
                                 size_t chunk_bytes, const gm_shards_place *given)
{
    const gm_param_spec *spec = &params[id];
    gm_chunk_shape *chunk = open_chunk(layout, spec->kind);
    bool is_its =
        chunk && (chunk->numel == 0 ||
                  (chunk->numel + padded_numel(spec)) * spec->weight_bytes <= chunk_bytes);
    if (given[id].run) {
        is_its = chunk && given[chunk->first_param].run == given[id].run;
    }
    if (!is_its) {
        chunk = &layout->chunks[layout->n_chunks++];
        chunk->kind = spec->kind;
        chunk->weight_bytes = spec->weight_bytes;
        chunk->first_param = id;
    }
    return chunk;
}

static gm_status pack(gm_layout *layout, const gm_param_spec *params, size_t chunk_bytes,
                      uint32_t n_shards, const gm_shards_place *given)
{
    for (uint32_t i = 0; i < layout->n_params; i++) {
        const gm_param_spec *spec = &params[i];
        gm_chunk_shape *chunk = chunk_for(layout, params, i, chunk_bytes, given);
        GM_FAIL_IF(chunk->weight_bytes != spec->weight_bytes, GM_ERR_ARG,
                   "parameter %u: kind %u has elements of %u and %u bytes", i, spec->kind,
                   chunk->weight_bytes, spec->weight_bytes);
        layout->places[i] = (gm_param_place){
            .chunk = (uint32_t)(chunk - layout->chunks),
            .offset = given[i].run ? given[i].offset : chunk->numel,
            .numel = spec->numel,
        };
        chunk->numel =
            given[i].run ? given[i].shard_numel * n_shards : chunk->numel + padded_numel(spec);
        chunk->used += spec->numel;
        chunk->n_params++;
    }
    for (uint32_t i = 0; i < layout->n_chunks; i++) { /* invariant 3 */
        gm_chunk_shape *chunk = &layout->chunks[i];
        uint64_t unit = GM_ALIGN / chunk->weight_bytes * n_shards;
        chunk->numel = (chunk->numel + unit - 1) / unit * unit;
        chunk->shard_numel = chunk->numel / n_shards;
    }
    return GM_OK;
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
    gm_shards_place *given = calloc((size_t)n_params + 1, sizeof *given);
    gm_status status = layout->places && layout->chunks && given
                           ? GM_OK
                           : GM_FAIL(GM_ERR_NOMEM, "HOST: layout of %u parameters", n_params);
    if (status == GM_OK && n_shards > 1) {
        status = place_kinds(params, n_params, chunk_bytes, n_shards, given);
    }
    if (status == GM_OK) {
        status = pack(layout, params, chunk_bytes, n_shards, given);
    }
    free(given);
    if (status != GM_OK) {
        gm_layout_free(layout);
        return status;
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

gm_part gm_layout_part(const gm_layout *layout, uint32_t param, uint32_t shard)
{
    const gm_param_place *place = gm_layout_param(layout, param);
    uint64_t shard_numel = gm_layout_chunk(layout, place->chunk)->shard_numel;
    uint64_t begin = shard * shard_numel, end = begin + shard_numel; /* in the chunk */
    uint64_t first = place->offset > begin ? place->offset : begin;
    uint64_t last = place->offset + place->numel;
    last = last < end ? last : end;
    return first < last ? (gm_part){first - place->offset, last - first, first - begin}
                        : (gm_part){0};
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
         * waste. Only the running fill of each kind matters. */
        uint64_t fill[64] = {0}, waste = 0;
        for (uint32_t i = 0; i < n_params; i++) {
            uint64_t take = padded_numel(&params[i]) * params[i].weight_bytes;
            uint64_t *used = &fill[params[i].kind];
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
