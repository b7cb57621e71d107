/* table.c - making the chunk table, its end, and what holds between two calls. */
#include <stdlib.h>
#include <string.h>

#include "memory/chunk_impl.h"

#define STAGE_BYTES_MOST ((size_t)8 << 30)

/* ---- construction ---- */

static gm_status make_fences(gm_device *device, piece *p)
{
    GM_TRY(device->ops->event_new(device, false, &p->filled.event));
    GM_TRY(device->ops->event_new(device, false, &p->used.event));
    GM_TRY(device->ops->event_new(device, false, &p->homed.event));
    return device->ops->event_new(device, false, &p->home_used.event);
}

static gm_status lay_out_pieces(gm_chunks *chunks, const gm_chunks_options *options)
{
    gm_device *device = chunks->device;
    size_t block_bytes = device->block_bytes, blocks_needed = 0;
    size_t home = 0;
    for (int kind = 0; kind < GM_N_PIECES; kind++) {
        for (uint32_t id = 0; id < chunks->n_chunks; id++) {
            chunks->span_bytes[kind] += gm_round_up(options->piece_bytes[id][kind], block_bytes);
        }
        blocks_needed += chunks->span_bytes[kind] / block_bytes;
        if (chunks->span_bytes[kind] > 0) {
            GM_TRY(device->ops->range_new(device, chunks->span_bytes[kind], &chunks->span[kind]));
        }
    }
    chunks->shown = chunks->span_bytes[GM_GATHERED] > 0 ? GM_GATHERED : GM_WEIGHT;
    GM_FAIL_IF(blocks_needed > UINT32_MAX - 1, GM_ERR_ARG,
               "block_size %zu gives %zu blocks: choose a larger block_size", block_bytes,
               blocks_needed);
    chunks->capacity = (uint32_t)blocks_needed;
    GM_TRY(gm_new(&chunks->piece_blocks, (blocks_needed + 1) * sizeof *chunks->piece_blocks,
                  "HOST: chunk table: %zu bytes"));
    uint32_t *blocks = chunks->piece_blocks;
    for (uint32_t id = 0; id < chunks->n_chunks; id++) {
        for (int kind = 0; kind < GM_N_PIECES; kind++) {
            piece *p = gm_piece_at(chunks, id, (gm_piece)kind);
            p->bytes = options->piece_bytes[id][kind];
            p->n_blocks = (uint32_t)(gm_round_up(p->bytes, block_bytes) / block_bytes);
            if (!gm_is_transient((gm_piece)kind)) {
                p->home_from = gm_home_after(home, options->piece_bytes[id], kind);
            }
            p->blocks = blocks;
            blocks += p->n_blocks;
            GM_TRY(make_fences(device, p));
        }
        home = gm_home_after(home, options->piece_bytes[id], GM_N_OWN_PIECES);
    }
    for (int kind = 0; kind < GM_N_PIECES; kind++) {
        uintptr_t address = chunks->span[kind];
        for (uint32_t id = 0; id < chunks->n_chunks; id++) {
            piece *p = gm_piece_at(chunks, id, (gm_piece)kind);
            p->address = address;
            address += (size_t)p->n_blocks * block_bytes;
            if (p->n_blocks > 0 && kind == (int)chunks->shown) { /* see block.c */
                GM_TRY(device->ops->poison(device, p->address, p->n_blocks));
            }
        }
    }
    return GM_OK;
}

static gm_status make_streams(gm_chunks *chunks)
{
    gm_device *device = chunks->device;
    for (int kind = 0; kind < GM_N_OWN_PIECES; kind++) {
        bool is_shared = chunks->places_states && kind == GM_GRAD;
        GM_TRY(is_shared ? GM_OK : device->ops->stream_new(device, &chunks->in[kind]));
        chunks->in[kind] = is_shared ? chunks->in[GM_STATE] : chunks->in[kind];
        GM_TRY(device->ops->stream_new(device, &chunks->out[kind]));
    }
    return device->ops->stream_new(device, &chunks->refresh);
}

gm_status gm_chunks_new(const gm_chunks_options *options, gm_chunks **out)
{
    gm_status status;
    gm_chunks *chunks;
    GM_TRY(GM_NEW(chunks, "HOST: chunk table: %zu bytes"));
    chunks->device = options->device;
    chunks->n_chunks = options->n_chunks;
    chunks->has_homes = options->has_homes;
    chunks->homes = options->homes;
    chunks->home_limit = options->home_limit;
    chunks->stays = options->stays;
    chunks->places_states = options->places_states;
    chunks->workers = options->workers;
    chunks->on_change = options->on_change;
    chunks->context = options->context;
    chunks->limit = options->device_limit;
    size_t n = options->n_chunks ? options->n_chunks : 1;
    chunks->pieces = calloc(n * GM_N_PIECES, sizeof *chunks->pieces);
    chunks->is_all_resident = calloc(n, sizeof *chunks->is_all_resident);
    if (!chunks->pieces || !chunks->is_all_resident) {
        status = GM_FAIL(GM_ERR_NOMEM, "HOST: chunk table of %zu chunks", n);
        goto fail;
    }
    GM_TRY_GOTO(status, fail, lay_out_pieces(chunks, options));
    n = chunks->capacity ? chunks->capacity : 1;
    chunks->blocks = calloc(n, sizeof *chunks->blocks);
    chunks->free_blocks = calloc(n, sizeof *chunks->free_blocks);
    chunks->free_at = calloc(n, sizeof *chunks->free_at);
    chunks->holes = calloc(n, sizeof *chunks->holes);
    chunks->scratch = calloc(n, sizeof *chunks->scratch);
    chunks->owners = calloc(n, sizeof *chunks->owners);
    if (!chunks->blocks || !chunks->free_blocks || !chunks->free_at || !chunks->holes ||
        !chunks->scratch || !chunks->owners) {
        status = GM_FAIL(GM_ERR_NOMEM, "HOST: block table of %zu blocks", n);
        goto fail;
    }
    GM_TRY_GOTO(status, fail, make_streams(chunks));
    /* Addresses only: no more than all states (but what a stage must have), nor than a pipeline can
     * use. */
    size_t stage =
        chunks->places_states ? 0 : chunks->span_bytes[GM_STATE] / chunks->device->block_bytes;
    size_t most = STAGE_BYTES_MOST / chunks->device->block_bytes;
    size_t least = stage > 0 ? gm_stage_least(chunks->device->block_bytes) : 0;
    stage = stage > least ? stage : least;
    chunks->stage_capacity = (uint32_t)(stage < most ? stage : most);
    if (chunks->stage_capacity > 0 && options->has_homes) {
        GM_TRY_GOTO(status, fail,
                    chunks->device->ops->range_new(
                        chunks->device, chunks->stage_capacity * chunks->device->block_bytes,
                        &chunks->stage));
    }
    *out = chunks;
    return GM_OK;
fail:
    gm_chunks_free(chunks); /* every member is NULL, 0 or live */
    return status;
}

void gm_chunks_free(gm_chunks *chunks)
{
    if (!chunks) {
        return;
    }
    gm_device *device = chunks->device;
    if (chunks->pieces) {
        (void)gm_chunks_sync(chunks);
    }
    for (size_t i = 0; chunks->pieces && i < (size_t)chunks->n_chunks * GM_N_PIECES; i++) {
        piece *p = &chunks->pieces[i];
        gm_free_event(device, &p->filled.event);
        gm_free_event(device, &p->used.event);
        gm_free_event(device, &p->homed.event);
        gm_free_event(device, &p->home_used.event);
        gm_free_event(device, &p->spare_homed.event);
        gm_free_event(device, &p->spare_used.event);
    }
    for (int kind = 0; kind < GM_N_PIECES; kind++) {
        if (chunks->span[kind]) {
            device->ops->range_free(device, chunks->span[kind], chunks->span_bytes[kind]);
        }
    }
    if (chunks->stage) {
        device->ops->range_free(device, chunks->stage,
                                chunks->stage_capacity * device->block_bytes);
    }
    for (uint32_t i = 0; chunks->blocks && i < chunks->n_indices; i++) {
        if (chunks->blocks[i]) {
            device->ops->block_free(device, chunks->blocks[i]);
        }
    }
    if (chunks->in[GM_GRAD] == chunks->in[GM_STATE]) {
        chunks->in[GM_GRAD] = 0;
    }
    for (int kind = 0; kind < GM_N_OWN_PIECES; kind++) {
        gm_free_stream(device, &chunks->in[kind]);
        gm_free_stream(device, &chunks->out[kind]);
    }
    gm_free_stream(device, &chunks->refresh);
    free(chunks->pieces);
    free(chunks->piece_blocks);
    free(chunks->is_all_resident);
    free(chunks->blocks);
    free(chunks->free_blocks);
    free(chunks->free_at);
    free(chunks->holes);
    free(chunks->scratch);
    free(chunks->owners);
    free(chunks);
}

/* ---- the checker ---- */

static gm_status check_piece(const gm_chunks *chunks, const piece *p, uint32_t id, gm_piece kind)
{
    GM_FAIL_IF(p->shows_next && (gm_is_resident(p) || !chunks->has_placement), GM_ERR_STATE,
               "chunk.c: chunk %u shows bytes that come next, and has others there or no place",
               id);
    if (!gm_is_resident(p)) {
        GM_FAIL_IF(chunks->has_homes && !p->home && p->bytes > 0 && !gm_is_transient(kind),
                   GM_ERR_STATE, "home.c: chunk %u is neither resident nor at home", id);
        return p->pins == 0
                   ? GM_OK
                   : GM_FAIL(GM_ERR_STATE, "invariant 2: chunk %u is pinned but not resident", id);
    }
    GM_FAIL_IF(p->n_blocks > 0 && !p->is_mapped, GM_ERR_STATE,
               "invariant 2: chunk %u is resident but not mapped", id);
    GM_FAIL_IF(p->home && gm_has_to_stay(chunks, id), GM_ERR_STATE,
               "home.c: chunk %u stays on the device, and has a home", id);
    GM_FAIL_IF(p->state == CLEAN && !p->home && p->n_blocks > 0, GM_ERR_STATE,
               "invariant 5: chunk %u is clean without a home", id);
    for (uint32_t b = 0; b < p->n_blocks; b++) {
        GM_FAIL_IF(!chunks->blocks[p->blocks[b]], GM_ERR_STATE,
                   "invariant 1: chunk %u owns a destroyed block", id);
        GM_FAIL_IF(
            chunks->has_placement && chunks->owners[p->blocks[b]] != gm_piece_index(chunks, p),
            GM_ERR_STATE, "invariant 1: block %u of chunk %u has another owner", p->blocks[b], id);
    }
    return GM_OK;
}

/* Without a placement: a block is free or owned, once.  n_uses: (n_indices,) zeros. */
static gm_status check_blocks(const gm_chunks *chunks, uint32_t *n_uses)
{
    for (uint32_t f = 0; f < chunks->n_free; f++) {
        n_uses[chunks->free_blocks[f]]++;
    }
    for (size_t i = 0; i < (size_t)chunks->n_chunks * GM_N_PIECES; i++) {
        const piece *p = &chunks->pieces[i];
        for (uint32_t b = 0; gm_is_resident(p) && b < p->n_blocks; b++) {
            n_uses[p->blocks[b]]++;
        }
    }
    for (uint32_t i = 0; i < chunks->n_indices; i++) {
        GM_FAIL_IF(n_uses[i] != (chunks->blocks[i] ? 1 : 0), GM_ERR_STATE,
                   "invariant 1: block %u, which %s, is free or owned %u times", i,
                   chunks->blocks[i] ? "exists" : "is destroyed", n_uses[i]);
    }
    return GM_OK;
}

gm_status gm_chunks_check(const gm_chunks *chunks)
{
    for (uint32_t id = 0; id < chunks->n_chunks; id++) {
        for (int kind = 0; kind < GM_N_PIECES; kind++) {
            GM_TRY(
                check_piece(chunks, gm_piece_at(chunks, id, (gm_piece)kind), id, (gm_piece)kind));
        }
    }
    GM_FAIL_IF(chunks->n_blocks + chunks->n_holes != chunks->n_indices, GM_ERR_STATE,
               "invariant 1: %u blocks and %u holes in a table of %u", chunks->n_blocks,
               chunks->n_holes, chunks->n_indices);
    if (chunks->has_placement) {
        return GM_OK;
    }
    uint32_t *n_uses = calloc((size_t)chunks->n_indices + 1, sizeof *n_uses);
    gm_status status = n_uses ? check_blocks(chunks, n_uses)
                              : GM_FAIL(GM_ERR_NOMEM, "HOST: %u blocks", chunks->n_indices);
    free(n_uses);
    return status;
}

gm_status gm_chunks_check_bytes(const gm_chunks *chunks)
{
    if (!chunks->device->is_host || chunks->device->is_paper || chunks->device->ops->note_access) {
        return GM_OK;
    }
    for (uint32_t id = 0; id < chunks->n_chunks; id++) {
        for (int kind = 0; kind < GM_N_OWN_PIECES; kind++) {
            const piece *p = gm_piece_at(chunks, id, (gm_piece)kind);
            bool is_equal = p->state != CLEAN || p->pins > 0 || !p->home || p->bytes == 0 ||
                            memcmp(p->home, (const void *)p->address, p->bytes) == 0;
            GM_FAIL_IF(!is_equal, GM_ERR_STATE,
                       "invariant 5: piece %d of chunk %u is clean, but device and home have "
                       "different bytes",
                       kind, id);
        }
    }
    return GM_OK;
}
