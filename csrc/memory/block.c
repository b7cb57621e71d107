/* block.c - the blocks behind the chunk table, their mapping, and the pool that serves on demand.
 * The placement of a plan is in place.c, invariants are in chunk.c.
 *
 * Ranges keep their mapping after an eviction (another piece's bytes show there); before a block is
 * destroyed no range may show it any more.  What tensors show, which are made only on mapped
 * addresses, is poisoned then, and before it is mapped first: so it always shows something.
 * Mapping is what the pool costs (benchmarks/log.md): a piece that comes back gets the blocks that
 * it still shows, if it can, and a transient piece, which comes and goes within a pass, gets fresh
 * ones as long as the limit allows.
 *
 * The host waits in: eviction without a placement. */
#include "memory/chunk_impl.h"

const gm_log_kind gm_log_of_fetch[GM_N_OWN_PIECES] = {GM_LOG_FETCH, GM_LOG_STATE_IN,
                                                      GM_LOG_GRAD_IN};

/* ---- mapping ---- */

gm_status gm_block_map(gm_chunks *chunks, piece *p)
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
    const gm_device_ops *ops = chunks->device->ops;
    bool is_shown = gm_piece_index(chunks, p) % GM_N_PIECES == chunks->shown;
    chunks->stats.n_maps++;
    p->is_mapped = false;
    return (is_shown ? ops->poison : ops->unmap)(chunks->device, p->address, p->n_blocks);
}

/* No range shows the block from an earlier residence any more: it will be destroyed. */
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

gm_status gm_block_shrink(gm_chunks *chunks)
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

gm_status gm_block_grow(gm_chunks *chunks)
{
    gm_block block;
    double began = gm_seconds();
    GM_TRY(chunks->device->ops->block_new(chunks->device, &block));
    chunks->stats.mapping_seconds += gm_seconds() - began;
    GM_ASSERT(gm_block_may_grow(chunks)); /* invariant 3 */
    uint32_t index = chunks->n_holes ? chunks->holes[--chunks->n_holes] : chunks->n_indices++;
    chunks->blocks[index] = block;
    gm_block_push(chunks, index);
    chunks->n_blocks++;
    size_t bytes = (size_t)chunks->n_blocks * chunks->device->block_bytes;
    if (bytes > chunks->stats.device_peak_bytes) {
        chunks->stats.device_peak_bytes = bytes;
    }
    return GM_OK;
}

void gm_block_push(gm_chunks *chunks, uint32_t index)
{
    chunks->free_at[index] = chunks->n_free;
    chunks->free_blocks[chunks->n_free++] = index;
}

uint32_t gm_block_pop(gm_chunks *chunks)
{
    return chunks->free_blocks[--chunks->n_free];
}

bool gm_block_may_grow(const gm_chunks *chunks)
{
    return chunks->n_blocks < chunks->capacity &&
           ((size_t)chunks->n_blocks + 1) * chunks->device->block_bytes <= chunks->limit;
}

/* ---- the pool ---- */

static void give_blocks_back(gm_chunks *chunks, const piece *p)
{
    for (uint32_t b = p->n_blocks; b-- > 0;) {
        gm_block_push(chunks, p->blocks[b]);
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
    GM_FAIL_IF(p->pins > 0, GM_ERR_STATE, "chunk %u is in use and cannot be evicted", id);
    if (gm_is_transient(kind)) {
        return release(chunks, p, id, kind);
    }
    GM_FAIL_IF(gm_has_to_stay(chunks, id), GM_ERR_STATE,
               "chunk %u stays on the device and has no home on the host", id);
    GM_TRY(gm_chunks_send_home(chunks, id, kind));
    GM_TRY(release(chunks, p, id, kind));
    chunks->is_all_resident[id] = false;
    chunks->stats.evictions++;
    return GM_OK;
}

gm_status gm_chunks_discard(gm_chunks *chunks, uint32_t id, gm_piece kind)
{
    piece *p = gm_piece_at(chunks, id, kind);
    bool is_possible = gm_is_transient(kind) || (p->home && chunks->has_placement);
    if (!gm_is_resident(p) || p->pins > 0 || !is_possible) {
        return GM_OK;
    }
    p->version += p->state == DIRTY; /* its bytes are those of the home now */
    return release(chunks, p, id, kind);
}

gm_status gm_chunks_roll_back(gm_chunks *chunks, uint32_t id, gm_piece kind, bool keeps)
{
    piece *p = gm_piece_at(chunks, id, kind);
    GM_ASSERT(gm_is_resident(p) && p->pins == 0 && p->home && !gm_is_transient(kind));
    if (keeps && p->spare) {
        GM_TRY(gm_piece_send_to_spare(chunks, p, kind));
    }
    p->version++;
    GM_TRY(release(chunks, p, id, kind));
    p->shows_next = keeps && chunks->has_placement;
    return GM_OK;
}

gm_status gm_block_evict_one(gm_chunks *chunks, bool *out)
{
    *out = false;
    if (!chunks->has_homes) {
        return GM_OK;
    }
    uint32_t victim = UINT32_MAX;
    for (uint32_t id = 0; id < chunks->n_chunks; id++) {
        const piece *p = gm_piece_at(chunks, id, GM_WEIGHT);
        if (gm_is_resident(p) && p->pins == 0 && !chunks->is_all_resident[id] && p->n_blocks > 0 &&
            !gm_has_to_stay(chunks, id) &&
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
        bool is_here = chunks->is_all_resident[id] || gm_is_resident(state) || gm_is_resident(grad);
        if (is_here && !gm_has_to_stay(chunks, id) && state->pins == 0 && grad->pins == 0) {
            GM_TRY(gm_chunks_evict(chunks, id, GM_STATE));
            GM_TRY(gm_chunks_evict(chunks, id, GM_GRAD));
            chunks->is_all_resident[id] = false;
            *out = true; /* its weights may go next */
            return GM_OK;
        }
    }
    return GM_OK;
}

bool gm_block_take_shown(gm_chunks *chunks, const piece *p)
{
    bool is_free = p->is_mapped;
    for (uint32_t b = 0; is_free && b < p->n_blocks; b++) {
        uint32_t at = chunks->free_at[p->blocks[b]];
        is_free = at < chunks->n_free && chunks->free_blocks[at] == p->blocks[b];
    }
    /* The top of the stack takes the place of each. */
    for (uint32_t b = 0; is_free && b < p->n_blocks; b++) {
        uint32_t at = chunks->free_at[p->blocks[b]], top = gm_block_pop(chunks);
        chunks->free_blocks[at] = top;
        chunks->free_at[top] = at;
    }
    return is_free;
}

/* Nothing can be evicted now. */
static gm_status fail_full(const gm_chunks *chunks, uint32_t n)
{
    size_t block = chunks->device->block_bytes;
    gm_size_text wanted = gm_wanted((size_t)n * block);
    char why[256];
    gm_chunks_say_staying(chunks, why, sizeof why);
    const char *by = why[0] ? ".  " : "";
    GM_FAIL_IF(chunks->limit == 0, GM_ERR_NOMEM,
               "DEVICE: %s wanted for a chunk, and activations and what else is on the "
               "device take all of device_budget; raise it, or use fewer tokens or "
               "activation checkpointing%s%s",
               wanted.text, by, why);
    return GM_FAIL(GM_ERR_NOMEM,
                   "DEVICE: %s wanted, %s of the %s that are left for chunks are in use at this "
                   "moment and %s free; raise device_budget, or use a smaller chunk_size%s%s",
                   wanted.text, gm_there((size_t)(chunks->n_blocks - chunks->n_free) * block).text,
                   gm_there(chunks->limit).text, gm_there((size_t)chunks->n_free * block).text, by,
                   why);
}

/* n blocks for one piece, by creating or by evicting. */
static gm_status take_blocks(gm_chunks *chunks, uint32_t n, bool is_fresh, uint32_t *out)
{
    gm_status grown = GM_OK;
    for (uint32_t b = 0; is_fresh && b < n && grown == GM_OK && gm_block_may_grow(chunks); b++) {
        grown = gm_block_grow(chunks);
    }
    if (grown != GM_OK && grown != GM_ERR_NOMEM) {
        return grown;
    }
    while (chunks->n_free < n) {
        if (gm_block_may_grow(chunks)) {
            gm_status status = gm_block_grow(chunks);
            if (status == GM_OK) {
                continue;
            }
            if (status != GM_ERR_NOMEM) {
                return status;
            } /* the device itself is full: evict instead */
        }
        bool evicted;
        GM_TRY(gm_block_evict_one(chunks, &evicted));
        if (!evicted) {
            return fail_full(chunks, n);
        }
    }
    for (uint32_t b = 0; b < n; b++) {
        out[b] = gm_block_pop(chunks);
    }
    return GM_OK;
}

gm_status gm_block_make_resident(gm_chunks *chunks, piece *p, gm_piece kind)
{
    bool is_filled = !gm_is_transient(kind); /* who claims a transient piece writes all of it */
    gm_device *device = chunks->device;
    gm_status status = GM_OK;
    if (!gm_block_take_shown(chunks, p)) {
        GM_TRY(take_blocks(chunks, p->n_blocks, !is_filled, p->blocks));
        status = gm_block_map(chunks, p);
    }
    if (status == GM_OK && is_filled && !p->home) { /* it starts as zeros, as an arena does */
        status = device->ops->fill(device, p->address, 0, (size_t)p->n_blocks * device->block_bytes,
                                   chunks->in[kind]);
        status = status == GM_OK ? device->ops->stream_sync(device, chunks->in[kind]) : status;
    } else if (status == GM_OK && is_filled) {
        status = gm_piece_fetch(chunks, p, kind, gm_log_of_fetch[kind], chunks->in[kind]);
    }
    if (status != GM_OK) { /* nothing half done: the blocks go back */
        give_blocks_back(chunks, p);
        (void)poison_piece(chunks, p);
    }
    return status;
}
