/* stay.c - chunks that stay on the device because the host has no room for the homes of all
 * (plan/stay.h).
 *
 * 1. They are chosen before anything is allocated, from the layout and a limit that the ranks
 *    share, and for good.
 * 2. What stays, and the largest unit beside it, fit the device: else the engine is not made. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine_impl.h"
#include "plan/stay.h"

typedef struct gm_stay_sizes { /* of the host and of the device */
    size_t *homes;             /* (n,) */
    uint32_t n;
    size_t all;         /* of the homes */
    size_t limit, room; /* for homes; for blocks */
} sizes;

void gm_stay_free(gm_engine *engine)
{
    free(engine->stay.chunks);
}

static void choose(gm_engine *engine, const sizes *s, size_t limit)
{
    memset(engine->stay.chunks, 0, s->n * sizeof *engine->stay.chunks);
    engine->stay.bytes = engine->stay.home_bytes = 0;
    gm_stay_choose(s->homes, s->n, limit, engine->stay.chunks);
    for (uint32_t id = 0; id < s->n; id++) {
        for (int piece = 0; engine->stay.chunks[id] && piece < GM_N_OWN_PIECES; piece++) {
            engine->stay.bytes += gm_engine_piece_blocks(engine, id, (gm_piece)piece);
        }
        engine->stay.home_bytes += engine->stay.chunks[id] ? s->homes[id] : 0;
    }
}

/* Beside what stays: what the largest unit needs to run, and gradients that wait for their sum over
 * ranks. */
static size_t floor_of(const gm_engine *engine)
{
    size_t most = 0, unreduced = 0;
    gm_engine_need need;
    for (uint32_t unit = 0; unit < engine->n_units; unit++) {
        size_t shown = 0, gathering = 0;
        for (uint32_t i = engine->unit_begin[unit]; i < engine->unit_begin[unit + 1]; i++) {
            gm_engine_chunk_need(engine, engine->unit_chunks[i], &need);
            shown += need.shown;
            gathering = need.gathering > gathering ? need.gathering : gathering;
            unreduced = need.unreduced > unreduced ? need.unreduced : unreduced;
            most = need.updating > most ? need.updating : most;
        }
        most = shown + gathering > most ? shown + gathering : most;
    }
    return most + unreduced;
}

static size_t needed(const gm_engine *engine)
{
    return engine->stay.bytes + floor_of(engine);
}

/* The least limit of homes, to about 1 %, with which the rest fits the device; 0: none does. */
static size_t find_enough(gm_engine *engine, const sizes *s)
{
    size_t low = s->limit, high = s->all;
    choose(engine, s, high);
    if (needed(engine) > s->room) {
        return 0;
    }
    while (high - low > high / 100 + 1) {
        size_t middle = low + (high - low) / 2;
        choose(engine, s, middle);
        *(needed(engine) > s->room ? &low : &high) = middle;
    }
    return high;
}

/* Invariant 2. */
static gm_status refuse(gm_engine *engine, const gm_engine_options *options, const sizes *s)
{
    size_t staying = engine->stay.bytes, floor = floor_of(engine);
    size_t lacking = staying + floor - s->room, enough = find_enough(engine, s);
    bool is_budget = options->host_budget <= s->limit;
    char host[160] = "";
    if (enough > 0) {
        (void)snprintf(host, sizeof host, "%s to at least %s (%zu bytes), ",
                       is_budget ? "host_budget" : "the memory that this host has free",
                       gm_wanted(enough).text, enough);
    }
    size_t budget = engine->room.budget < SIZE_MAX ? engine->room.budget : s->room;
    return GM_FAIL(
        GM_ERR_NOMEM,
        "HOST: %s wanted for weights, states and gradients, %s %s, and the device cannot keep what "
        "lacks: chunks of %s would stay there, which with %s for the largest module is %s more "
        "than "
        "%s has: raise %sdevice_budget to at least %s (%zu bytes), or freeze parameters",
        gm_wanted(s->all).text, is_budget ? "host_budget is" : "the host has room for",
        gm_there(s->limit).text, gm_wanted(staying).text, gm_wanted(floor).text,
        gm_wanted(lacking).text, engine->room.budget < SIZE_MAX ? "device_budget" : "it", host,
        gm_wanted(budget + lacking).text, budget + lacking);
}

static gm_status measure(gm_engine *engine, const gm_engine_options *options, sizes *s)
{
    size_t free_bytes, total_bytes;
    s->limit = options->host_limit;
    s->room = gm_room_limit(engine);
    GM_TRY(gm_new(&s->homes, (s->n + (size_t)1) * sizeof *s->homes,
                  "HOST: table of chunks: %zu bytes"));
    for (uint32_t id = 0; id < s->n; id++) {
        size_t bytes[1][GM_N_PIECES];
        for (int piece = 0; piece < GM_N_PIECES; piece++) {
            bytes[0][piece] = gm_engine_piece_bytes(engine, id, (gm_piece)piece);
        }
        s->homes[id] = gm_chunks_home_bytes((const size_t (*)[GM_N_PIECES])bytes, 1);
        s->all += s->homes[id];
    }
    if (!engine->device->is_host) {
        GM_TRY(engine->device->ops->memory(engine->device, &free_bytes, &total_bytes));
        s->room = free_bytes < s->room ? free_bytes : s->room;
    }
    return GM_OK;
}

gm_status gm_stay_new(gm_engine *engine, const gm_engine_options *options)
{
    sizes s = {.n = gm_layout_n_chunks(engine->layout)};
    if (engine->policy != GM_POLICY_AUTO || engine->inputs.state_share < 1) {
        return GM_OK; /* the caller has said what is where */
    }
    gm_status status = measure(engine, options, &s);
    if (status == GM_OK && s.all > s.limit) {
        status = gm_new(&engine->stay.chunks, s.n * sizeof *engine->stay.chunks,
                        "HOST: table of chunks: %zu bytes");
        if (status == GM_OK) {
            choose(engine, &s, s.limit);
            status = needed(engine) > s.room ? refuse(engine, options, &s) : GM_OK;
        }
    }
    free(s.homes);
    return status;
}
