/* pool.c - the blocks behind the chunk table, and the pool that serves on demand.  The placement of a plan is
 * in place.c, invariants are in chunk.c.
 *
 * Ranges keep their mapping after an eviction (another piece's bytes show there); before a block is destroyed every
 * range that still shows it is poisoned.  So a range always shows something.
 *
 * The host waits in: eviction without a placement, set_limit. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "memory/chunk_impl.h"

static const gm_log_kind log_of_fetch[GM_N_OWN_PIECES] = {GM_LOG_FETCH, GM_LOG_STATE_IN,
                                                          GM_LOG_GRAD_IN};

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
    uint8_t *home = options->homes;
    for (int kind = 0; kind < GM_N_PIECES; kind++) {
        for (uint32_t id = 0; id < chunks->n_chunks; id++) {
            chunks->span_bytes[kind] += gm_round_up(options->piece_bytes[id][kind], block_bytes);
        }
        blocks_needed += chunks->span_bytes[kind] / block_bytes;
        if (chunks->span_bytes[kind] > 0) {
            GM_TRY(device->ops->range_new(device, chunks->span_bytes[kind], &chunks->span[kind]));
        }
    }
    if (blocks_needed > UINT32_MAX - 1) {
        return GM_FAIL(GM_ERR_ARG, "block_size %zu gives %zu blocks: choose a larger block_size",
                       block_bytes, blocks_needed);
    }
    chunks->capacity = (uint32_t)blocks_needed;
    for (uint32_t id = 0; id < chunks->n_chunks; id++) {
        for (int kind = 0; kind < GM_N_PIECES; kind++) {
            piece *p = gm_piece_at(chunks, id, (gm_piece)kind);
            p->bytes = options->piece_bytes[id][kind];
            p->n_blocks = (uint32_t)(gm_round_up(p->bytes, block_bytes) / block_bytes);
            if (options->has_homes && !gm_is_transient((gm_piece)kind)) {
                p->home = home;
                home += gm_round_up(p->bytes, 4096);
            }
            GM_TRY(make_fences(device, p));
            p->blocks = calloc(p->n_blocks ? p->n_blocks : 1, sizeof *p->blocks);
            if (!p->blocks) {
                return GM_FAIL(GM_ERR_NOMEM, "HOST: chunk table: %u blocks", p->n_blocks);
            }
        }
    }
    for (int kind = 0; kind < GM_N_PIECES; kind++) {
        uintptr_t address = chunks->span[kind];
        for (uint32_t id = 0; id < chunks->n_chunks; id++) {
            piece *p = gm_piece_at(chunks, id, (gm_piece)kind);
            p->address = address;
            address += (size_t)p->n_blocks * block_bytes;
            if (p->n_blocks > 0) { /* torch makes tensors only on mapped addresses */
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
        GM_TRY(device->ops->stream_new(device, &chunks->in[kind]));
        GM_TRY(device->ops->stream_new(device, &chunks->out[kind]));
    }
    return device->ops->stream_new(device, &chunks->refresh);
}

static void free_stream(gm_device *device, gm_stream stream)
{
    if (stream) {
        device->ops->stream_free(device, stream);
    }
}

gm_status gm_chunks_new(const gm_chunks_options *options, gm_chunks **out)
{
    gm_status status;
    gm_chunks *chunks = calloc(1, sizeof *chunks);
    if (!chunks) {
        return GM_FAIL(GM_ERR_NOMEM, "HOST: chunk table: %zu bytes", sizeof *chunks);
    }
    chunks->device = options->device;
    chunks->n_chunks = options->n_chunks;
    chunks->has_homes = options->has_homes;
    chunks->limit = options->device_limit;
    size_t n = options->n_chunks ? options->n_chunks : 1;
    chunks->pieces = calloc(n * GM_N_PIECES, sizeof *chunks->pieces);
    chunks->is_settled = calloc(n, sizeof *chunks->is_settled);
    if (!chunks->pieces || !chunks->is_settled) {
        status = GM_FAIL(GM_ERR_NOMEM, "HOST: chunk table of %zu chunks", n);
        goto fail;
    }
    GM_TRY_GOTO(status, fail, lay_out_pieces(chunks, options));
    n = chunks->capacity ? chunks->capacity : 1;
    chunks->blocks = calloc(n, sizeof *chunks->blocks);
    chunks->free_blocks = calloc(n, sizeof *chunks->free_blocks);
    chunks->holes = calloc(n, sizeof *chunks->holes);
    chunks->scratch = calloc(n, sizeof *chunks->scratch);
    chunks->owners = calloc(n, sizeof *chunks->owners);
    if (!chunks->blocks || !chunks->free_blocks || !chunks->holes || !chunks->scratch ||
        !chunks->owners) {
        status = GM_FAIL(GM_ERR_NOMEM, "HOST: block table of %zu blocks", n);
        goto fail;
    }
    GM_TRY_GOTO(status, fail, make_streams(chunks));
    /* Addresses only: no more than all states (but what a stage must have), nor than a pipeline can use. */
    size_t stage = chunks->span_bytes[GM_STATE] / chunks->device->block_bytes;
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

static void free_fence(gm_device *device, fence *f)
{
    if (f->event) {
        device->ops->event_free(device, f->event);
    }
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
        free_fence(device, &p->filled);
        free_fence(device, &p->used);
        free_fence(device, &p->homed);
        free_fence(device, &p->home_used);
        free(p->blocks);
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
    for (int kind = 0; kind < GM_N_OWN_PIECES; kind++) {
        free_stream(device, chunks->in[kind]);
        free_stream(device, chunks->out[kind]);
    }
    free_stream(device, chunks->refresh);
    free(chunks->pieces);
    free(chunks->is_settled);
    free(chunks->blocks);
    free(chunks->free_blocks);
    free(chunks->holes);
    free(chunks->scratch);
    free(chunks->owners);
    free(chunks);
}

/* ---- mapping ---- */

gm_status gm_pool_map(gm_chunks *chunks, piece *p)
{
    for (uint32_t b = 0; b < p->n_blocks; b++) {
        chunks->scratch[b] = chunks->blocks[p->blocks[b]];
    }
    double began = gm_seconds();
    chunks->stats.n_maps++;
    GM_TRY(chunks->device->ops->map(chunks->device, p->address, chunks->scratch, p->n_blocks));
    chunks->stats.mapping_seconds += gm_seconds() - began;
    p->is_mapped = true;
    return GM_OK;
}

static gm_status poison_piece(gm_chunks *chunks, piece *p)
{
    chunks->stats.n_maps++;
    p->is_mapped = false;
    return chunks->device->ops->poison(chunks->device, p->address, p->n_blocks);
}

/* Every range that shows a block from an earlier residence shows poison, before the block is destroyed. */
static gm_status forget_stale(gm_chunks *chunks, uint32_t index)
{
    for (size_t i = 0; i < (size_t)chunks->n_chunks * GM_N_PIECES; i++) {
        piece *p = &chunks->pieces[i];
        bool shows = false;
        for (uint32_t b = 0; p->is_mapped && !gm_is_resident(p) && b < p->n_blocks; b++) {
            shows |= p->blocks[b] == index;
        }
        if (shows) {
            GM_TRY(poison_piece(chunks, p));
        }
    }
    return GM_OK;
}

gm_status gm_pool_shrink(gm_chunks *chunks)
{
    uint32_t index = chunks->free_blocks[chunks->n_free - 1];
    double began = gm_seconds();
    GM_TRY(forget_stale(chunks, index));
    chunks->n_free--;
    chunks->device->ops->block_free(chunks->device, chunks->blocks[index]);
    chunks->blocks[index] = 0;
    chunks->holes[chunks->n_holes++] = index;
    chunks->n_blocks--;
    chunks->stats.mapping_seconds += gm_seconds() - began;
    return GM_OK;
}

gm_status gm_pool_grow(gm_chunks *chunks)
{
    gm_block block;
    double began = gm_seconds();
    GM_TRY(chunks->device->ops->block_new(chunks->device, &block));
    chunks->stats.mapping_seconds += gm_seconds() - began;
    GM_ASSERT(chunks->n_blocks < chunks->capacity && gm_pool_may_grow(chunks)); /* invariant 3 */
    uint32_t index = chunks->n_holes ? chunks->holes[--chunks->n_holes] : chunks->n_indices++;
    chunks->blocks[index] = block;
    chunks->free_blocks[chunks->n_free++] = index;
    chunks->n_blocks++;
    size_t bytes = (size_t)chunks->n_blocks * chunks->device->block_bytes;
    if (bytes > chunks->stats.device_peak_bytes) {
        chunks->stats.device_peak_bytes = bytes;
    }
    return GM_OK;
}

bool gm_pool_may_grow(const gm_chunks *chunks)
{
    return ((size_t)chunks->n_blocks + 1) * chunks->device->block_bytes <= chunks->limit;
}

/* ---- the pool ---- */

static void give_blocks_back(gm_chunks *chunks, const piece *p)
{
    for (uint32_t b = p->n_blocks; b-- > 0;) {
        chunks->free_blocks[chunks->n_free++] = p->blocks[b];
    }
}

/* The piece is on the device no more; with it go its blocks, unless they are its own for good. */
static gm_status release(gm_chunks *chunks, piece *p, uint32_t id, gm_piece kind)
{
    if (!chunks->has_placement) {
        GM_TRY(gm_piece_wait_idle(chunks, p)); /* invariant 4 */
        give_blocks_back(chunks, p);
    }
    gm_timeline_mark(chunks->timeline, GM_LOG_DROPPED, id, kind);
    gm_piece_move(p, HOME);
    return GM_OK;
}

gm_status gm_chunks_evict(gm_chunks *chunks, uint32_t id, gm_piece kind)
{
    piece *p = gm_piece_at(chunks, id, kind);
    if (!gm_is_resident(p)) {
        return GM_OK;
    }
    if (p->pins > 0) {
        return GM_FAIL(GM_ERR_STATE, "chunk %u is in use and cannot be evicted", id);
    }
    if (gm_is_transient(kind)) {
        return release(chunks, p, id, kind);
    }
    if (!chunks->has_homes) {
        return GM_FAIL(GM_ERR_STATE, "chunk %u has no home on the host (policy \"cuda\")", id);
    }
    GM_TRY(gm_chunks_send_home(chunks, id, kind));
    GM_TRY(release(chunks, p, id, kind));
    chunks->is_settled[id] = false;
    chunks->stats.evictions++;
    return GM_OK;
}

gm_status gm_chunks_discard(gm_chunks *chunks, uint32_t id, gm_piece kind)
{
    piece *p = gm_piece_at(chunks, id, kind);
    bool is_possible = gm_is_transient(kind) || (chunks->has_homes && chunks->has_placement);
    return gm_is_resident(p) && p->pins == 0 && is_possible ? release(chunks, p, id, kind) : GM_OK;
}

/* Evicts the piece that is needed last: the least recently used weights of a chunk that is not settled;
 * then (the last settled first) the states and gradient of a chunk.  *out is false if nothing can go. */
static gm_status evict_one(gm_chunks *chunks, bool *out)
{
    *out = false;
    if (!chunks->has_homes) {
        return GM_OK;
    }
    uint32_t victim = UINT32_MAX;
    for (uint32_t id = 0; id < chunks->n_chunks; id++) {
        const piece *p = gm_piece_at(chunks, id, GM_WEIGHT);
        if (gm_is_resident(p) && p->pins == 0 && !chunks->is_settled[id] && p->n_blocks > 0 &&
            (victim == UINT32_MAX ||
             p->last_use < gm_piece_at(chunks, victim, GM_WEIGHT)->last_use)) {
            victim = id;
        }
    }
    if (victim != UINT32_MAX) {
        *out = true;
        return gm_chunks_evict(chunks, victim, GM_WEIGHT);
    }
    for (uint32_t id = chunks->n_chunks; id-- > 0;) {
        const piece *state = gm_piece_at(chunks, id, GM_STATE);
        const piece *grad = gm_piece_at(chunks, id, GM_GRAD);
        bool is_here = chunks->is_settled[id] || gm_is_resident(state) || gm_is_resident(grad);
        if (is_here && state->pins == 0 && grad->pins == 0) {
            GM_TRY(gm_chunks_evict(chunks, id, GM_STATE));
            GM_TRY(gm_chunks_evict(chunks, id, GM_GRAD));
            chunks->is_settled[id] = false;
            *out = true; /* its weights may go next */
            return GM_OK;
        }
    }
    return GM_OK;
}

/* n blocks for one piece, by creating or by evicting. */
static gm_status take_blocks(gm_chunks *chunks, uint32_t n, uint32_t *out)
{
    while (chunks->n_free < n) {
        if (gm_pool_may_grow(chunks)) {
            gm_status status = gm_pool_grow(chunks);
            if (status == GM_OK) {
                continue;
            }
            if (status != GM_ERR_NOMEM) {
                return status;
            } /* the device itself is full: evict instead */
        }
        bool evicted;
        GM_TRY(evict_one(chunks, &evicted));
        if (!evicted) {
            size_t block = chunks->device->block_bytes;
            return GM_FAIL(
                GM_ERR_NOMEM,
                "DEVICE: %zu bytes wanted, %zu of the %zu bytes allowed for chunks are in "
                "use at this moment and %zu are free; raise device_budget, or use a smaller "
                "chunk_size",
                (size_t)n * block, (size_t)(chunks->n_blocks - chunks->n_free) * block,
                chunks->limit, (size_t)chunks->n_free * block);
        }
    }
    for (uint32_t b = 0; b < n; b++) {
        out[b] = chunks->free_blocks[--chunks->n_free];
    }
    return GM_OK;
}

static gm_status make_resident_from_pool(gm_chunks *chunks, piece *p, gm_piece kind)
{
    bool is_filled = !gm_is_transient(kind); /* who claims a transient piece writes all of it */
    gm_device *device = chunks->device;
    GM_TRY(take_blocks(chunks, p->n_blocks, p->blocks));
    gm_status status = gm_pool_map(chunks, p);
    if (status == GM_OK && is_filled &&
        !p->home) { /* without a home the bytes start as zeros, as an arena's do */
        status = device->ops->fill(device, p->address, 0, (size_t)p->n_blocks * device->block_bytes,
                                   chunks->in[kind]);
        status = status == GM_OK ? device->ops->stream_sync(device, chunks->in[kind]) : status;
    } else if (status == GM_OK && is_filled) {
        status = gm_piece_fetch(chunks, p, kind, log_of_fetch[kind]);
    }
    if (status != GM_OK) { /* nothing half done: the blocks go back */
        give_blocks_back(chunks, p);
        (void)poison_piece(chunks, p);
    }
    return status;
}

gm_status gm_piece_make_resident(gm_chunks *chunks, piece *p, gm_piece kind, bool is_fetched,
                                 gm_stream stream, bool *out)
{
    *out = true;
    is_fetched = is_fetched && !gm_is_transient(kind);
    if (p->n_blocks > 0 && chunks->has_placement) {
        GM_TRY(gm_place_take(chunks, p, is_fetched ? chunks->in[kind] : stream, out));
        if (!*out) {
            return GM_OK;
        }
        GM_TRY(is_fetched ? gm_piece_fetch(chunks, p, kind, log_of_fetch[kind])
                          : gm_piece_claim(chunks, p, stream));
    } else if (p->n_blocks > 0) {
        GM_TRY(make_resident_from_pool(chunks, p, kind));
    }
    chunks->stats.fetches += p->n_blocks > 0 && is_fetched;
    gm_piece_move(p, chunks->has_homes && is_fetched ? CLEAN : DIRTY);
    return GM_OK;
}

/* ---- limits ---- */

gm_status gm_chunks_settle(gm_chunks *chunks, uint32_t id)
{
    gm_status status = GM_OK;
    int n_pinned = 0;
    bool is_done = true;
    GM_ASSERT(!chunks->has_placement);
    while (n_pinned < GM_N_OWN_PIECES && status == GM_OK) {
        piece *p = gm_piece_at(chunks, id, (gm_piece)n_pinned);
        status = gm_is_resident(p)
                     ? GM_OK
                     : gm_piece_make_resident(chunks, p, (gm_piece)n_pinned, true, 0, &is_done);
        if (status == GM_OK) { /* none of the three makes room for another */
            p->pins++;
            p->last_use = ++chunks->clock;
            n_pinned++;
        }
    }
    while (n_pinned-- > 0) {
        gm_piece_at(chunks, id, (gm_piece)n_pinned)->pins--;
    }
    if (status == GM_OK) {
        chunks->is_settled[id] = true;
    } else if (chunks->has_homes) { /* not by half; the text of the first error is what counts */
        char text[512];
        snprintf(text, sizeof text, "%s", gm_last_error());
        GM_TRY(gm_chunks_evict(chunks, id, GM_STATE));
        GM_TRY(gm_chunks_evict(chunks, id, GM_GRAD));
        return GM_FAIL(status, "%s", text);
    }
    return status;
}

gm_status gm_chunks_set_limit(gm_chunks *chunks, size_t device_limit, size_t *out_bytes)
{
    size_t block_bytes = chunks->device->block_bytes;
    chunks->limit = device_limit;
    if ((size_t)chunks->n_blocks * block_bytes > device_limit) {
        GM_TRY(gm_chunks_leave_placement(chunks));
    }
    while ((size_t)chunks->n_blocks * block_bytes > device_limit) {
        if (chunks->n_free > 0) {
            GM_TRY(gm_pool_shrink(chunks));
            continue;
        }
        bool evicted;
        GM_TRY(evict_one(chunks, &evicted));
        if (!evicted) {
            break; /* pins hold the rest */
        }
    }
    if (out_bytes) {
        *out_bytes = (size_t)chunks->n_blocks * block_bytes;
    }
    return GM_OK;
}

/* ---- the checker ---- */

static gm_status check_piece(const gm_chunks *chunks, const piece *p, uint32_t id)
{
    if (!gm_is_resident(p)) {
        return p->pins == 0
                   ? GM_OK
                   : GM_FAIL(GM_ERR_STATE, "invariant 2: chunk %u is pinned but not resident", id);
    }
    if (p->n_blocks > 0 && !p->is_mapped) {
        return GM_FAIL(GM_ERR_STATE, "invariant 2: chunk %u is resident but not mapped", id);
    }
    if (p->state == CLEAN && !chunks->has_homes && p->n_blocks > 0) {
        return GM_FAIL(GM_ERR_STATE, "invariant 5: chunk %u is clean without a home", id);
    }
    for (uint32_t b = 0; b < p->n_blocks; b++) {
        if (!chunks->blocks[p->blocks[b]]) {
            return GM_FAIL(GM_ERR_STATE, "invariant 1: chunk %u owns a destroyed block", id);
        }
        if (chunks->has_placement && chunks->owners[p->blocks[b]] != gm_piece_index(chunks, p)) {
            return GM_FAIL(GM_ERR_STATE, "invariant 1: block %u of chunk %u has another owner",
                           p->blocks[b], id);
        }
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
        if (n_uses[i] != (chunks->blocks[i] ? 1 : 0)) {
            return GM_FAIL(GM_ERR_STATE,
                           "invariant 1: block %u, which %s, is free or owned %u times", i,
                           chunks->blocks[i] ? "exists" : "is destroyed", n_uses[i]);
        }
    }
    return GM_OK;
}

gm_status gm_chunks_check(const gm_chunks *chunks)
{
    for (uint32_t id = 0; id < chunks->n_chunks; id++) {
        for (int kind = 0; kind < GM_N_PIECES; kind++) {
            GM_TRY(check_piece(chunks, gm_piece_at(chunks, id, (gm_piece)kind), id));
        }
    }
    if (chunks->n_blocks + chunks->n_holes != chunks->n_indices) {
        return GM_FAIL(GM_ERR_STATE, "invariant 1: %u blocks and %u holes in a table of %u",
                       chunks->n_blocks, chunks->n_holes, chunks->n_indices);
    }
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
    if (!chunks->device->is_host || chunks->device->ops->note_access) {
        return GM_OK;
    }
    for (uint32_t id = 0; id < chunks->n_chunks; id++) {
        for (int kind = 0; kind < GM_N_OWN_PIECES; kind++) {
            const piece *p = gm_piece_at(chunks, id, (gm_piece)kind);
            bool is_equal = p->state != CLEAN || p->pins > 0 || !p->home || p->bytes == 0 ||
                            memcmp(p->home, (const void *)p->address, p->bytes) == 0;
            if (!is_equal) {
                return GM_FAIL(GM_ERR_STATE,
                               "invariant 5: piece %d of chunk %u is clean, but device and home "
                               "have different bytes",
                               kind, id);
            }
        }
    }
    return GM_OK;
}
