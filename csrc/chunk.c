/* chunk.c - the chunk table and its state machine; see chunk.h for the diagram.
 *
 * Invariants (gm_chunks_check executes them)
 *   1. A block is free or owned by exactly one resident piece: n_free + owned == n_blocks.
 *   2. A piece is resident (CLEAN, DIRTY) exactly when it owns as many blocks as its bytes need.
 *   3. n_blocks * block_bytes <= limit, except for what pins hold after the limit was lowered.
 *   4. A block is handed on only after the host has waited for its last owner's `idle` event and for the
 *      copy that wrote it back: no work on the device can still touch it.
 *   5. A piece's bytes are right in exactly one place, or in both and equal (CLEAN).
 *   6. Readers of a fetched piece wait for its `ready` event on their own stream.
 *
 * Above the length budget because the state machine and its pool are one: who frees a block must know its piece.
 * Ranges keep their mapping after an eviction in aliased mode (another piece's bytes show there); before a
 * block is destroyed every range that still shows it is poisoned.  So a range always shows something. */
#include "chunk.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum piece_state { HOME, CLEAN, DIRTY, N_STATES } piece_state;

static const bool may_move[N_STATES][N_STATES] = {
    [HOME] = {[CLEAN] = true, [DIRTY] = true}, /* HOME -> DIRTY: made resident without a home */
    [CLEAN] = {[HOME] = true, [DIRTY] = true},
    [DIRTY] = {[CLEAN] = true},
};

typedef struct piece {
    piece_state state;
    bool is_mapped; /* the range shows blocks[], owned or stale */
    bool has_ready, has_idle;
    uint32_t pins, n_blocks;
    uint32_t *blocks; /* (n_blocks,) owned when resident, stale after an eviction */
    uint64_t last_use;
    size_t bytes;
    uintptr_t address;
    uint8_t *home;
    gm_event ready; /* the fetch has landed */
    gm_event idle;  /* the last reader or writer has passed */
} piece;

struct gm_chunks {
    gm_device *device;
    uint32_t n_chunks;
    piece *pieces;    /* (n_chunks, GM_N_PIECES) */
    bool *is_settled; /* (n_chunks,) */
    bool is_strict, has_homes;
    uintptr_t span[GM_N_PIECES];
    size_t span_bytes[GM_N_PIECES];
    gm_stream copies; /* fetches, refreshes and write-backs, in issue order */

    gm_block *blocks;      /* (capacity,) handles */
    uint32_t *free_blocks; /* (capacity,) stack of indices */
    uint32_t *holes;       /* (capacity,) stack of indices whose block was destroyed */
    gm_block *scratch;     /* (capacity,) handles for one map call */
    uint32_t capacity, n_blocks, n_free, n_holes, n_indices;
    size_t limit;
    uint64_t clock;
    gm_chunks_stats stats;
};

static piece *piece_at(const gm_chunks *chunks, uint32_t id, gm_piece kind)
{
    GM_ASSERT(id < chunks->n_chunks);
    return &chunks->pieces[(size_t)id * GM_N_PIECES + (size_t)kind];
}

static void piece_move(piece *p, piece_state to)
{
    GM_ASSERT(may_move[p->state][to]);
    p->state = to;
}

static bool is_resident(const piece *p)
{
    return p->state != HOME;
}

size_t gm_chunks_home_bytes(const size_t (*piece_bytes)[GM_N_PIECES], uint32_t n_chunks)
{
    size_t total = 0;
    for (uint32_t id = 0; id < n_chunks; id++) {
        for (int kind = 0; kind < GM_N_PIECES; kind++) {
            total += gm_round_up(piece_bytes[id][kind], 4096);
        }
    }
    return total;
}

size_t gm_chunks_block_bytes(const gm_device *device, size_t piece_bytes)
{
    return gm_round_up(piece_bytes, device->block_bytes);
}

/* ---- construction ---- */

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
    if (blocks_needed > UINT32_MAX) {
        return GM_FAIL(GM_ERR_ARG, "block_size %zu gives %zu blocks: choose a larger block_size",
                       block_bytes, blocks_needed);
    }
    chunks->capacity = (uint32_t)blocks_needed;
    for (uint32_t id = 0; id < chunks->n_chunks; id++) {
        for (int kind = 0; kind < GM_N_PIECES; kind++) {
            piece *p = piece_at(chunks, id, (gm_piece)kind);
            p->bytes = options->piece_bytes[id][kind];
            p->n_blocks = (uint32_t)(gm_round_up(p->bytes, block_bytes) / block_bytes);
            if (options->has_homes) {
                p->home = home;
                home += gm_round_up(p->bytes, 4096);
            }
            GM_TRY(device->ops->event_new(device, &p->ready));
            GM_TRY(device->ops->event_new(device, &p->idle));
            p->blocks = calloc(p->n_blocks ? p->n_blocks : 1, sizeof *p->blocks);
            if (!p->blocks) {
                return GM_FAIL(GM_ERR_NOMEM, "HOST: chunk table: %u blocks", p->n_blocks);
            }
        }
    }
    for (int kind = 0; kind < GM_N_PIECES; kind++) {
        uintptr_t address = chunks->span[kind];
        for (uint32_t id = 0; id < chunks->n_chunks; id++) {
            piece *p = piece_at(chunks, id, (gm_piece)kind);
            p->address = address;
            address += (size_t)p->n_blocks * block_bytes;
            if (p->n_blocks > 0) { /* torch makes tensors only on mapped addresses */
                GM_TRY(device->ops->poison(device, p->address, p->n_blocks));
            }
        }
    }
    return GM_OK;
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
    chunks->is_strict = options->is_strict;
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
    if (!chunks->blocks || !chunks->free_blocks || !chunks->holes || !chunks->scratch) {
        status = GM_FAIL(GM_ERR_NOMEM, "HOST: block table of %zu blocks", n);
        goto fail;
    }
    GM_TRY_GOTO(status, fail, chunks->device->ops->stream_new(chunks->device, &chunks->copies));
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
    if (chunks->copies) {
        (void)device->ops->stream_sync(device, chunks->copies);
    }
    for (size_t i = 0; chunks->pieces && i < (size_t)chunks->n_chunks * GM_N_PIECES; i++) {
        piece *p = &chunks->pieces[i];
        if (p->has_idle) {
            (void)device->ops->event_sync(device, p->idle);
        }
        if (p->ready) {
            device->ops->event_free(device, p->ready);
        }
        if (p->idle) {
            device->ops->event_free(device, p->idle);
        }
        free(p->blocks);
    }
    for (int kind = 0; kind < GM_N_PIECES; kind++) {
        if (chunks->span[kind]) {
            device->ops->range_free(device, chunks->span[kind], chunks->span_bytes[kind]);
        }
    }
    for (uint32_t i = 0; chunks->blocks && i < chunks->n_indices; i++) {
        if (chunks->blocks[i]) {
            device->ops->block_free(device, chunks->blocks[i]);
        }
    }
    if (chunks->copies) {
        device->ops->stream_free(device, chunks->copies);
    }
    free(chunks->pieces);
    free(chunks->is_settled);
    free(chunks->blocks);
    free(chunks->free_blocks);
    free(chunks->holes);
    free(chunks->scratch);
    free(chunks);
}

/* ---- reading the table ---- */

uintptr_t gm_chunks_address(const gm_chunks *chunks, uint32_t id, gm_piece kind)
{
    return piece_at(chunks, id, kind)->address;
}

void gm_chunks_weight_span(const gm_chunks *chunks, uintptr_t *begin, uintptr_t *end)
{
    *begin = chunks->span[GM_WEIGHT];
    *end = *begin + chunks->span_bytes[GM_WEIGHT];
}

uint32_t gm_chunks_at(const gm_chunks *chunks, uintptr_t address)
{
    uint32_t low = 0, high = chunks->n_chunks;
    while (low < high) { /* first chunk whose weights end beyond the address */
        uint32_t middle = low + (high - low) / 2;
        const piece *p = piece_at(chunks, middle, GM_WEIGHT);
        if (p->address + (size_t)p->n_blocks * chunks->device->block_bytes > address) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    bool is_inside = low < chunks->n_chunks && piece_at(chunks, low, GM_WEIGHT)->address <= address;
    return is_inside ? low : UINT32_MAX;
}

bool gm_chunks_is_resident(const gm_chunks *chunks, uint32_t id, gm_piece kind)
{
    return is_resident(piece_at(chunks, id, kind));
}

bool gm_chunks_is_dirty(const gm_chunks *chunks, uint32_t id, gm_piece kind)
{
    return piece_at(chunks, id, kind)->state == DIRTY;
}

uint32_t gm_chunks_pins(const gm_chunks *chunks, uint32_t id, gm_piece kind)
{
    return piece_at(chunks, id, kind)->pins;
}

uint8_t *gm_chunks_home(const gm_chunks *chunks, uint32_t id, gm_piece kind)
{
    return piece_at(chunks, id, kind)->home;
}

bool gm_chunks_is_settled(const gm_chunks *chunks, uint32_t id)
{
    return chunks->is_settled[id];
}

void gm_chunks_get_stats(const gm_chunks *chunks, gm_chunks_stats *out)
{
    *out = chunks->stats;
    out->n_blocks = chunks->n_blocks;
    out->device_bytes = (size_t)chunks->n_blocks * chunks->device->block_bytes;
}

/* ---- blocks ---- */

/* The host waits until no work on the device can touch the piece any more. */
static gm_status wait_idle(gm_chunks *chunks, piece *p)
{
    if (p->has_ready) {
        GM_TRY(chunks->device->ops->event_sync(chunks->device, p->ready));
    }
    if (p->has_idle) {
        GM_TRY(chunks->device->ops->event_sync(chunks->device, p->idle));
    }
    return GM_OK;
}

/* Every range that shows a block from an earlier residence shows poison, before the block is destroyed. */
static gm_status forget_stale(gm_chunks *chunks, uint32_t index)
{
    gm_device *device = chunks->device;
    if (chunks->is_strict) {
        return GM_OK; /* evicted ranges show poison, never a block */
    }
    for (size_t i = 0; i < (size_t)chunks->n_chunks * GM_N_PIECES; i++) {
        piece *p = &chunks->pieces[i];
        if (!p->is_mapped || is_resident(p)) {
            continue;
        }
        for (uint32_t b = 0; b < p->n_blocks; b++) {
            if (p->blocks[b] == index) {
                GM_TRY(device->ops->poison(device, p->address, p->n_blocks));
                p->is_mapped = false;
                break;
            }
        }
    }
    return GM_OK;
}

/* Gives the memory of one free block back to the device. */
static gm_status destroy_free_block(gm_chunks *chunks)
{
    uint32_t index = chunks->free_blocks[chunks->n_free - 1];
    GM_TRY(forget_stale(chunks, index));
    chunks->n_free--;
    chunks->device->ops->block_free(chunks->device, chunks->blocks[index]);
    chunks->blocks[index] = 0;
    chunks->holes[chunks->n_holes++] = index;
    chunks->n_blocks--;
    return GM_OK;
}

static gm_status create_block(gm_chunks *chunks)
{
    gm_block block;
    GM_TRY(chunks->device->ops->block_new(chunks->device, &block));
    GM_ASSERT(chunks->n_blocks < chunks->capacity);
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

static bool may_create_block(const gm_chunks *chunks)
{
    return ((size_t)chunks->n_blocks + 1) * chunks->device->block_bytes <= chunks->limit;
}

gm_status gm_chunks_write_back(gm_chunks *chunks, uint32_t id, gm_piece kind)
{
    piece *p = piece_at(chunks, id, kind);
    if (p->state != DIRTY) {
        return GM_OK;
    }
    if (!chunks->has_homes) {
        return GM_FAIL(GM_ERR_STATE, "chunk %u has no home on the host (policy \"cuda\")", id);
    }
    gm_device *device = chunks->device;
    GM_TRY(wait_idle(chunks, p));
    GM_TRY(device->ops->copy_d2h(device, p->home, p->address, p->bytes, chunks->copies));
    GM_TRY(device->ops->stream_sync(device, chunks->copies));
    chunks->stats.evicted_bytes += p->bytes;
    piece_move(p, CLEAN);
    return GM_OK;
}

gm_status gm_chunks_evict(gm_chunks *chunks, uint32_t id, gm_piece kind)
{
    piece *p = piece_at(chunks, id, kind);
    if (!is_resident(p)) {
        return GM_OK;
    }
    if (p->pins > 0) {
        return GM_FAIL(GM_ERR_STATE, "chunk %u is in use and cannot be evicted", id);
    }
    GM_TRY(gm_chunks_write_back(chunks, id, kind));
    GM_TRY(wait_idle(chunks, p)); /* invariant 4 */
    if (chunks->is_strict && p->n_blocks > 0) {
        GM_TRY(chunks->device->ops->poison(chunks->device, p->address, p->n_blocks));
        p->is_mapped = false;
    }
    for (uint32_t b = 0; b < p->n_blocks; b++) {
        chunks->free_blocks[chunks->n_free++] = p->blocks[b];
    }
    p->has_ready = p->has_idle = false;
    piece_move(p, HOME);
    chunks->is_settled[id] = false;
    chunks->stats.evictions++;
    return GM_OK;
}

/* Evicts the piece that is needed last: the least recently used weights of a chunk that is not settled;
 * then (the last settled first) the states and gradient of a settled chunk.  *out is false if nothing can go. */
static gm_status evict_one(gm_chunks *chunks, bool *out)
{
    *out = false;
    if (!chunks->has_homes) {
        return GM_OK;
    }
    uint32_t victim = UINT32_MAX;
    for (uint32_t id = 0; id < chunks->n_chunks; id++) {
        const piece *p = piece_at(chunks, id, GM_WEIGHT);
        if (is_resident(p) && p->pins == 0 && !chunks->is_settled[id] && p->n_blocks > 0 &&
            (victim == UINT32_MAX || p->last_use < piece_at(chunks, victim, GM_WEIGHT)->last_use)) {
            victim = id;
        }
    }
    if (victim != UINT32_MAX) {
        *out = true;
        return gm_chunks_evict(chunks, victim, GM_WEIGHT);
    }
    for (uint32_t id = chunks->n_chunks; id-- > 0;) {
        const piece *state = piece_at(chunks, id, GM_STATE), *grad = piece_at(chunks, id, GM_GRAD);
        bool is_here = chunks->is_settled[id] || is_resident(state) || is_resident(grad);
        if (is_here && state->pins == 0 && grad->pins == 0) {
            GM_TRY(gm_chunks_evict(chunks, id, GM_STATE));
            GM_TRY(gm_chunks_evict(chunks, id, GM_GRAD));
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
        if (may_create_block(chunks)) {
            gm_status status = create_block(chunks);
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

/* ---- moving ---- */

/* HOME -> resident on blocks of its own; the bytes are fetched if there is a home. */
static gm_status make_resident(gm_chunks *chunks, piece *p)
{
    gm_device *device = chunks->device;
    if (p->n_blocks > 0) {
        GM_TRY(take_blocks(chunks, p->n_blocks, p->blocks));
        for (uint32_t b = 0; b < p->n_blocks; b++) {
            chunks->scratch[b] = chunks->blocks[p->blocks[b]];
        }
        gm_status status = device->ops->map(device, p->address, chunks->scratch, p->n_blocks);
        if (status == GM_OK) { /* without a home the bytes start as zeros, as an arena's do */
            status =
                p->home
                    ? device->ops->copy_h2d(device, p->address, p->home, p->bytes, chunks->copies)
                    : device->ops->fill(device, p->address, 0,
                                        (size_t)p->n_blocks * device->block_bytes, chunks->copies);
        }
        if (status != GM_OK) { /* nothing half done: the blocks go back */
            for (uint32_t b = p->n_blocks; b-- > 0;) {
                chunks->free_blocks[chunks->n_free++] = p->blocks[b];
            }
            p->is_mapped = false;
            (void)device->ops->poison(device, p->address, p->n_blocks);
            return status;
        }
        p->is_mapped = true;
        GM_TRY(device->ops->event_record(device, p->ready, chunks->copies));
        p->has_ready = true;
        chunks->stats.fetches++;
        chunks->stats.fetched_bytes += chunks->has_homes ? p->bytes : 0;
    }
    piece_move(p, chunks->has_homes ? CLEAN : DIRTY);
    return GM_OK;
}

gm_status gm_chunks_pin(gm_chunks *chunks, uint32_t id, gm_piece kind, gm_stream stream)
{
    piece *p = piece_at(chunks, id, kind);
    if (!is_resident(p)) {
        GM_TRY(make_resident(chunks, p));
    }
    GM_TRY(gm_chunks_wait_ready(chunks, id, kind, stream)); /* invariant 6 */
    p->pins++;
    p->last_use = ++chunks->clock;
    return GM_OK;
}

gm_status gm_chunks_wait_ready(gm_chunks *chunks, uint32_t id, gm_piece kind, gm_stream stream)
{
    piece *p = piece_at(chunks, id, kind);
    return p->has_ready ? chunks->device->ops->event_wait(chunks->device, p->ready, stream) : GM_OK;
}

/* `idle` comes to mean: every reader so far, on whatever stream, and what `stream` has now. */
static gm_status mark_idle(gm_chunks *chunks, piece *p, gm_stream stream)
{
    gm_device *device = chunks->device;
    if (p->has_idle) {
        GM_TRY(device->ops->event_wait(device, p->idle, stream));
    }
    GM_TRY(device->ops->event_record(device, p->idle, stream));
    p->has_idle = true;
    return GM_OK;
}

gm_status gm_chunks_unpin(gm_chunks *chunks, uint32_t id, gm_piece kind, gm_stream stream)
{
    piece *p = piece_at(chunks, id, kind);
    if (p->pins == 0) {
        return GM_FAIL(GM_ERR_STATE, "chunk %u: unpinned more often than pinned", id);
    }
    GM_TRY(mark_idle(chunks, p, stream));
    p->pins--;
    p->last_use = ++chunks->clock;
    return GM_OK;
}

void gm_chunks_note_write(gm_chunks *chunks, uint32_t id, gm_piece kind)
{
    piece *p = piece_at(chunks, id, kind);
    if (p->state == CLEAN) {
        piece_move(p, DIRTY);
    }
}

gm_status gm_chunks_claim_home(gm_chunks *chunks, uint32_t id, gm_piece kind)
{
    piece *p = piece_at(chunks, id, kind);
    GM_TRY(gm_chunks_write_back(chunks, id, kind));
    return p->has_ready ? chunks->device->ops->event_sync(chunks->device, p->ready) : GM_OK;
}

gm_status gm_chunks_home_written(gm_chunks *chunks, uint32_t id, gm_piece kind, gm_stream stream)
{
    gm_device *device = chunks->device;
    piece *p = piece_at(chunks, id, kind);
    GM_ASSERT(p->state != DIRTY);
    if (p->state != CLEAN || p->n_blocks == 0) {
        return GM_OK;
    }
    if (p->pins > 0) {
        GM_TRY(mark_idle(chunks, p, stream));
    }
    if (p->has_idle) { /* the refresh must not overtake the last reader */
        GM_TRY(device->ops->event_wait(device, p->idle, chunks->copies));
    }
    GM_TRY(device->ops->copy_h2d(device, p->address, p->home, p->bytes, chunks->copies));
    GM_TRY(device->ops->event_record(device, p->ready, chunks->copies));
    p->has_ready = true;
    chunks->stats.fetched_bytes += p->bytes;
    return p->pins > 0 ? gm_chunks_wait_ready(chunks, id, kind, stream) : GM_OK;
}

gm_status gm_chunks_read_device(gm_chunks *chunks, uint32_t id, gm_piece kind, size_t offset,
                                size_t bytes, void *dst)
{
    gm_device *device = chunks->device;
    piece *p = piece_at(chunks, id, kind);
    GM_ASSERT(is_resident(p) && offset + bytes <= p->bytes);
    GM_TRY(wait_idle(chunks, p));
    GM_TRY(device->ops->copy_d2h(device, dst, p->address + offset, bytes, chunks->copies));
    return device->ops->stream_sync(device, chunks->copies);
}

gm_status gm_chunks_read(gm_chunks *chunks, uint32_t id, gm_piece kind, size_t offset, size_t bytes,
                         void *dst)
{
    piece *p = piece_at(chunks, id, kind);
    GM_ASSERT(offset + bytes <= p->bytes);
    if (bytes == 0) {
        return GM_OK;
    }
    if (p->state != DIRTY) {
        memcpy(dst, p->home + offset, bytes);
        return GM_OK;
    }
    return gm_chunks_read_device(chunks, id, kind, offset, bytes, dst);
}

gm_status gm_chunks_write(gm_chunks *chunks, uint32_t id, gm_piece kind, size_t offset,
                          size_t bytes, const void *src, gm_stream stream)
{
    gm_device *device = chunks->device;
    piece *p = piece_at(chunks, id, kind);
    GM_ASSERT(offset + bytes <= p->bytes);
    if (bytes == 0) {
        return GM_OK;
    }
    if (is_resident(p)) {
        if (p->pins > 0) { /* its readers have not been marked yet */
            GM_TRY(device->ops->stream_sync(device, stream));
        }
        GM_TRY(wait_idle(chunks, p));
        GM_TRY(device->ops->copy_h2d(device, p->address + offset, src, bytes, chunks->copies));
        GM_TRY(device->ops->event_record(device, p->ready, chunks->copies));
        p->has_ready = true;
        GM_TRY(device->ops->stream_sync(device, chunks->copies)); /* src is the caller's */
    }
    if (p->state != DIRTY) {
        memcpy(p->home + offset, src, bytes);
    }
    return GM_OK;
}

gm_status gm_chunks_settle(gm_chunks *chunks, uint32_t id)
{
    gm_status status = GM_OK;
    int n_pinned = 0;
    while (n_pinned < GM_N_PIECES && status == GM_OK) {
        piece *p = piece_at(chunks, id, (gm_piece)n_pinned);
        status = is_resident(p) ? GM_OK : make_resident(chunks, p);
        if (status == GM_OK) { /* none of the three makes room for another */
            p->pins++;
            p->last_use = ++chunks->clock;
            n_pinned++;
        }
    }
    while (n_pinned-- > 0) {
        piece_at(chunks, id, (gm_piece)n_pinned)->pins--;
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
    chunks->limit = device_limit;
    while ((size_t)chunks->n_blocks * chunks->device->block_bytes > device_limit) {
        if (chunks->n_free > 0) {
            GM_TRY(destroy_free_block(chunks));
            continue;
        }
        bool evicted;
        GM_TRY(evict_one(chunks, &evicted));
        if (!evicted) {
            break; /* pins hold the rest */
        }
    }
    if (out_bytes) {
        *out_bytes = (size_t)chunks->n_blocks * chunks->device->block_bytes;
    }
    return GM_OK;
}

gm_status gm_chunks_check(const gm_chunks *chunks)
{
    size_t owned = 0;
    for (uint32_t id = 0; id < chunks->n_chunks; id++) {
        for (int kind = 0; kind < GM_N_PIECES; kind++) {
            const piece *p = piece_at(chunks, id, (gm_piece)kind);
            if (!is_resident(p)) {
                if (p->pins > 0) {
                    return GM_FAIL(GM_ERR_STATE, "invariant 2: chunk %u is pinned but not resident",
                                   id);
                }
                continue;
            }
            owned += p->n_blocks;
            if (p->n_blocks > 0 && !p->is_mapped) {
                return GM_FAIL(GM_ERR_STATE, "invariant 2: chunk %u is resident but not mapped",
                               id);
            }
            if (p->state == CLEAN && !chunks->has_homes) {
                return GM_FAIL(GM_ERR_STATE, "invariant 5: chunk %u is clean without a home", id);
            }
            for (uint32_t b = 0; b < p->n_blocks; b++) {
                if (!chunks->blocks[p->blocks[b]]) {
                    return GM_FAIL(GM_ERR_STATE, "invariant 1: chunk %u owns a destroyed block",
                                   id);
                }
                for (uint32_t f = 0; f < chunks->n_free; f++) {
                    if (chunks->free_blocks[f] == p->blocks[b]) {
                        return GM_FAIL(GM_ERR_STATE, "invariant 1: block %u of chunk %u is free",
                                       p->blocks[b], id);
                    }
                }
            }
        }
    }
    if (owned + chunks->n_free != chunks->n_blocks) {
        return GM_FAIL(GM_ERR_STATE, "invariant 1: %zu owned + %u free blocks, %u exist", owned,
                       chunks->n_free, chunks->n_blocks);
    }
    return GM_OK;
}
