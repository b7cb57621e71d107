/* home.c - the memory of homes: a chunk's come when its first piece is to leave the device
 * (residence.c gives them back).
 *
 * Invariant (gm_chunks_check): a chunk of which a piece is not on the device has homes for all its
 * pieces.  So a copy home, or an update that runs there, finds memory; and where there is none to
 * be had, nothing has left the device yet.  One that stays has none. */
#include <stdio.h>
#include <stdlib.h>

#include "memory/chunk_impl.h"

/* Where the arena goes on behind the first n own pieces of a chunk whose homes begin at `from`.
 * Pieces begin at multiples of 4096, chunks at those of a page: each is pinned and given back by
 * itself. */
size_t gm_home_after(size_t from, const size_t *piece_bytes, int n)
{
    for (int kind = 0; kind < n; kind++) {
        from += gm_round_up(piece_bytes[kind], 4096);
    }
    return n < GM_N_OWN_PIECES ? from : gm_round_up(from, gm_device_host_granularity());
}

bool gm_has_to_stay(const gm_chunks *chunks, uint32_t id)
{
    return !chunks->has_homes || (chunks->stays && chunks->stays[id]);
}

size_t gm_chunks_home_bytes(const size_t (*piece_bytes)[GM_N_PIECES], uint32_t n_chunks)
{
    size_t total = 0;
    for (uint32_t id = 0; id < n_chunks; id++) {
        total = gm_home_after(total, piece_bytes[id], GM_N_OWN_PIECES);
    }
    return total;
}

uint8_t *gm_home_made(const gm_chunks *chunks, const piece *p)
{
    return (uint8_t *)gm_arena_base(chunks->homes) + p->home_from;
}

static gm_extent extent_of(const gm_chunks *chunks, uint32_t id)
{
    size_t bytes[GM_N_OWN_PIECES];
    for (int kind = 0; kind < GM_N_OWN_PIECES; kind++) {
        bytes[kind] = gm_piece_at(chunks, id, (gm_piece)kind)->bytes;
    }
    size_t from = gm_piece_at(chunks, id, GM_WEIGHT)->home_from;
    return (gm_extent){from, gm_home_after(from, bytes, GM_N_OWN_PIECES) - from};
}

/* Of [begin, end) the chunks without homes; extents may be NULL. */
static size_t find_missing(const gm_chunks *chunks, uint32_t begin, uint32_t end,
                           gm_extent *extents, size_t *out_bytes)
{
    size_t n = 0;
    *out_bytes = 0;
    for (uint32_t id = begin; id < end; id++) {
        gm_extent extent = extent_of(chunks, id);
        if (!gm_piece_at(chunks, id, GM_WEIGHT)->home && extent.bytes > 0 &&
            !gm_has_to_stay(chunks, id)) {
            if (extents) {
                extents[n] = extent;
            }
            *out_bytes += extent.bytes;
            n++;
        }
    }
    return n;
}

gm_status gm_home_give(gm_chunks *chunks, uint32_t begin, uint32_t end)
{
    size_t bytes, n = find_missing(chunks, begin, end, NULL, &bytes);
    if (n == 0) {
        return GM_OK;
    }
    GM_FAIL_IF(bytes > chunks->home_limit - chunks->stats.home_bytes, GM_ERR_NOMEM,
               "HOST: %s wanted for weights, states and gradients, host_budget is %s: raise "
               "host_budget, or freeze parameters",
               gm_wanted(chunks->stats.home_bytes + bytes).text, gm_there(chunks->home_limit).text);
    gm_extent *extents;
    GM_TRY(gm_new(&extents, n * sizeof *extents, "HOST: chunk table: %zu bytes"));
    (void)find_missing(chunks, begin, end, extents, &bytes);
    double began = gm_seconds();
    gm_status status = gm_arena_hold(chunks->homes, extents, n, chunks->workers);
    free(extents);
    GM_TRY(status);
    chunks->stats.home_seconds += gm_seconds() - began;
    chunks->stats.home_bytes += bytes;
    for (uint32_t id = begin; id < end; id++) {
        piece *p = gm_piece_at(chunks, id, GM_WEIGHT);
        bool is_given = !p[GM_GRAD].home && !gm_has_to_stay(chunks, id);
        for (int kind = 0; is_given && kind < GM_N_OWN_PIECES; kind++) {
            p[kind].home = gm_home_made(chunks, &p[kind]);
        }
    }
    return GM_OK;
}

void gm_chunks_say_staying(const gm_chunks *chunks, char *out, size_t bytes)
{
    size_t all = 0, staying = 0;
    for (uint32_t id = 0; chunks->stays && id < chunks->n_chunks; id++) {
        all += extent_of(chunks, id).bytes;
        staying += chunks->stays[id] ? extent_of(chunks, id).bytes : 0;
    }
    out[0] = '\0';
    if (staying > 0) {
        const char *which =
            chunks->home_limit < SIZE_MAX ? "host_budget is" : "the host had room for";
        size_t limit = chunks->home_limit < SIZE_MAX ? chunks->home_limit : all - staying;
        (void)snprintf(
            out, bytes,
            "HOST: %s wanted for weights, states and gradients, %s %s, so that chunks of "
            "%s stay on the device",
            gm_wanted(all).text, which, gm_there(limit).text, gm_there(staying).text);
    }
}

gm_status gm_chunks_give_homes(gm_chunks *chunks)
{
    chunks->keeps_homes = true;
    return gm_home_give(chunks, 0, chunks->n_chunks);
}

void gm_home_drop(gm_chunks *chunks, uint32_t id)
{
    gm_extent extent = extent_of(chunks, id);
    for (int kind = 0; kind < GM_N_OWN_PIECES; kind++) {
        piece *p = gm_piece_at(chunks, id, (gm_piece)kind);
        GM_ASSERT(gm_is_resident(p) && !p->spare);
        p->home = NULL;
        p->state = DIRTY;
    }
    if (extent.bytes > 0) {
        gm_arena_drop(chunks->homes, extent.offset);
    }
    chunks->stats.home_bytes -= extent.bytes;
}
