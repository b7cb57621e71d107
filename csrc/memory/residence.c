/* residence.c - having a piece on the device: pinned, fetched ahead, or claimed for writing; and
 * how much may be there.
 *
 * The host waits in: gm_chunks_set_limit, gm_chunks_drop_homes, and in eviction without a
 * placement. */
#include <stdio.h>

#include "memory/chunk_impl.h"

/* HOME -> resident; *out false: only with a placement, its blocks are in use or it has none.
 * is_fetched: the bytes are fetched on `stream`, else they are undefined and it may write them. */
static gm_status make_resident(gm_chunks *chunks, piece *p, gm_piece kind, bool is_fetched,
                               gm_stream stream, bool *out)
{
    *out = true;
    is_fetched = is_fetched && !gm_is_transient(kind);
    if (p->n_blocks > 0 && chunks->has_placement) {
        GM_TRY(gm_place_take(chunks, p, stream, out));
        if (!*out) {
            return GM_OK;
        }
        GM_TRY(is_fetched ? gm_piece_fetch(chunks, p, kind, gm_log_of_fetch[kind], stream)
                          : gm_piece_claim(chunks, p, stream));
    } else if (p->n_blocks > 0) {
        GM_TRY(gm_block_make_resident(chunks, p, kind));
    }
    chunks->stats.fetches += p->n_blocks > 0 && is_fetched;
    gm_piece_move(p, p->home && is_fetched ? CLEAN : DIRTY);
    return GM_OK;
}

static gm_status fail_no_blocks(const gm_chunks *chunks, const piece *p)
{
    return GM_FAIL(GM_ERR_NOMEM,
                   "DEVICE: %s wanted, and all blocks of the plan that they may use (of %s in all) "
                   "are in use at this moment",
                   gm_wanted((size_t)p->n_blocks * chunks->device->block_bytes).text,
                   gm_there((size_t)chunks->n_blocks * chunks->device->block_bytes).text);
}

gm_status gm_chunks_pin(gm_chunks *chunks, uint32_t id, gm_piece kind, gm_stream stream)
{
    piece *p = gm_piece_at(chunks, id, kind);
    if (!gm_is_resident(p)) {
        bool is_done;
        gm_stream in = gm_is_transient(kind) ? stream : chunks->in[kind];
        GM_TRY(make_resident(chunks, p, kind, true, in, &is_done));
        if (!is_done) {
            return fail_no_blocks(chunks, p);
        }
    }
    GM_TRY(gm_chunks_wait_ready(chunks, id, kind, stream));
    GM_TRY(kind == GM_WEIGHT ? gm_piece_note_home(chunks, p, stream) : GM_OK);
    p->pins++;
    p->last_use = ++chunks->clock;
    return GM_OK;
}

gm_status gm_chunks_prefetch(gm_chunks *chunks, uint32_t id, gm_piece kind, bool *out)
{
    piece *p = gm_piece_at(chunks, id, kind);
    *out = gm_is_resident(p);
    gm_stream in = gm_is_transient(kind) ? 0 : chunks->in[kind];
    return *out || !chunks->has_placement ? GM_OK : make_resident(chunks, p, kind, true, in, out);
}

gm_status gm_chunks_bring(gm_chunks *chunks, uint32_t id, bool *out)
{
    static const gm_piece order[GM_N_OWN_PIECES] = {GM_STATE, GM_GRAD, GM_WEIGHT};
    *out = true;
    for (int i = 0; *out && i < GM_N_OWN_PIECES; i++) {
        piece *p = gm_piece_at(chunks, id, order[i]);
        *out = gm_is_resident(p);
        if (!*out && chunks->has_placement) {
            GM_TRY(make_resident(chunks, p, order[i], true, chunks->in[GM_STATE], out));
        }
    }
    return GM_OK;
}

gm_status gm_chunks_claim(gm_chunks *chunks, uint32_t id, gm_piece kind, gm_stream stream,
                          bool *out)
{
    piece *p = gm_piece_at(chunks, id, kind);
    GM_ASSERT(!gm_is_resident(p) && (chunks->has_placement || gm_is_transient(kind)));
    return make_resident(chunks, p, kind, false, stream, out);
}

/* ---- limits ---- */

/* All pieces stay on the device, and the homes are where they were made. */
static bool may_lose_homes(const gm_chunks *chunks, const gm_plan *plan, uint32_t id)
{
    bool is_kept = !chunks->keeps_homes;
    for (int kind = 0; is_kept && kind < GM_N_OWN_PIECES; kind++) {
        const piece *p = gm_piece_at(chunks, id, (gm_piece)kind);
        is_kept &= p->home == gm_home_made(chunks, p) && !p->spare &&
                   (p->n_blocks == 0 || gm_plan_place(plan, id, (gm_piece)kind)->is_resident);
    }
    return is_kept;
}

gm_status gm_chunks_drop_homes(gm_chunks *chunks, const gm_plan *plan)
{
    GM_ASSERT(chunks->has_placement);
    for (uint32_t id = 0; chunks->has_homes && id < chunks->n_chunks; id++) {
        bool is_kept = may_lose_homes(chunks, plan, id);
        for (int kind = 0; is_kept && kind < GM_N_OWN_PIECES; kind++) {
            GM_TRY(gm_chunks_prefetch(chunks, id, (gm_piece)kind, &is_kept));
            GM_TRY(gm_piece_wait_idle(chunks, gm_piece_at(chunks, id, (gm_piece)kind)));
        }
        if (is_kept) {
            gm_home_drop(chunks, id);
        }
    }
    return GM_OK;
}

gm_status gm_chunks_make_resident(gm_chunks *chunks, uint32_t id)
{
    gm_status status = GM_OK;
    int n_pinned = 0;
    bool is_done = true;
    GM_ASSERT(!chunks->has_placement);
    while (n_pinned < GM_N_OWN_PIECES && status == GM_OK) {
        piece *p = gm_piece_at(chunks, id, (gm_piece)n_pinned);
        status = gm_is_resident(p)
                     ? GM_OK
                     : make_resident(chunks, p, (gm_piece)n_pinned, true, 0, &is_done);
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
        chunks->is_all_resident[id] = true;
    } else if (!gm_has_to_stay(chunks, id)) { /* not by half; the text of the first error counts */
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
            GM_TRY(gm_block_shrink(chunks));
            continue;
        }
        bool evicted;
        GM_TRY(gm_block_evict_one(chunks, &evicted));
        if (!evicted) {
            break; /* pins hold the rest */
        }
    }
    if (out_bytes) {
        *out_bytes = (size_t)chunks->n_blocks * block_bytes;
    }
    return GM_OK;
}
