/* test_chunk.c - the chunk table against a shadow: random pins, writes, evictions, limits and chunks all resident, on
 * the host device; every byte and every invariant after every step. */
#include <string.h>

#include "check.h"
#include "memory/chunk.h"

enum { N_CHUNKS = 9, MAX_BYTES = 20000, N_STEPS = 6000 };

static uint64_t state = 2;

static uint64_t next(uint64_t bound)
{
    return next_random(&state) % bound;
}

typedef struct world {
    gm_device *device;
    gm_chunks *chunks;
    uint8_t *homes;
    size_t bytes[N_CHUNKS][GM_N_PIECES];
    uint8_t shadow[N_CHUNKS][GM_N_PIECES][MAX_BYTES]; /* what every piece must hold */
    uint32_t pins[N_CHUNKS];                          /* of the weight pieces */
    size_t pinned_bytes;
} world;

static void check_piece(world *w, uint32_t id, gm_piece piece)
{
    uint8_t *copy = malloc(w->bytes[id][piece] + 1);
    CHECK(gm_chunks_read(w->chunks, id, piece, 0, w->bytes[id][piece], copy, NULL) == GM_OK);
    CHECK(memcmp(copy, w->shadow[id][piece], w->bytes[id][piece]) == 0);
    free(copy);
}

static void scribble(world *w, uint32_t id, gm_piece piece, uint8_t *where)
{
    size_t size = w->bytes[id][piece];
    for (int i = 0; i < 20 && size > 0; i++) {
        size_t at = next(size);
        where[at] = w->shadow[id][piece][at] = (uint8_t)next(256);
    }
}

static void pin(world *w, uint32_t id)
{
    if (gm_chunks_pin(w->chunks, id, GM_WEIGHT, 0) != GM_OK) {
        CHECK(strstr(gm_last_error(), "DEVICE")); /* full of pins; nothing has changed */
        return;
    }
    w->pins[id]++;
    uint8_t *shown = (uint8_t *)gm_chunks_address(w->chunks, id, GM_WEIGHT);
    CHECK(memcmp(shown, w->shadow[id][GM_WEIGHT], w->bytes[id][GM_WEIGHT]) == 0);
    if (next(2)) {
        scribble(w, id, GM_WEIGHT, shown);
        gm_chunks_note_write(w->chunks, id, GM_WEIGHT);
    }
}

static void write_home(world *w, uint32_t id, gm_piece piece)
{
    CHECK(gm_chunks_claim_home(w->chunks, id, piece) == GM_OK);
    scribble(w, id, piece, gm_chunks_home(w->chunks, id, piece));
    CHECK(gm_chunks_home_written(w->chunks, id, piece, 0) == GM_OK);
}

static void step(world *w)
{
    uint32_t id = (uint32_t)next(N_CHUNKS);
    gm_piece piece = (gm_piece)next(GM_N_OWN_PIECES);
    switch (next(9)) {
    case 0:
    case 1:
    case 2: pin(w, id); break;
    case 3:
    case 4:
        if (w->pins[id] > 0) {
            CHECK(gm_chunks_unpin(w->chunks, id, GM_WEIGHT, 0) == GM_OK);
            w->pins[id]--;
        } else {
            CHECK(gm_chunks_unpin(w->chunks, id, GM_WEIGHT, 0) == GM_ERR_STATE);
        }
        break;
    case 5:
        if (gm_chunks_evict(w->chunks, id, GM_WEIGHT) != GM_OK) {
            CHECK(w->pins[id] > 0);
        }
        break;
    case 6: write_home(w, id, piece); break;
    case 7: {
        size_t held, limit = next(12) * 4096;
        CHECK(gm_chunks_set_limit(w->chunks, limit, &held) == GM_OK);
        for (uint32_t k = 0; held > limit && k < N_CHUNKS; k++) { /* only pins may exceed it */
            CHECK(w->pins[k] > 0 || !gm_chunks_is_resident(w->chunks, k, GM_WEIGHT) ||
                  w->bytes[k][GM_WEIGHT] == 0);
        }
        break;
    }
    default: {
        size_t held;
        CHECK(gm_chunks_set_limit(w->chunks, 60 * 4096, &held) == GM_OK);
        if (gm_chunks_make_resident(w->chunks, id) == GM_OK) {
            CHECK(gm_chunks_is_resident(w->chunks, id, GM_STATE));
        }
        break;
    }
    }
    check_piece(w, id, piece);
    if (gm_chunks_check(w->chunks) != GM_OK) {
        fprintf(stderr, "%s\n", gm_last_error());
        CHECK(false);
    }
}

static void test_against_shadow(void)
{
    world *w = calloc(1, sizeof *w);
    CHECK(gm_device_host_new(4096, NULL, &w->device) == GM_OK);
    for (uint32_t id = 0; id < N_CHUNKS; id++) {
        for (int piece = 0; piece < GM_N_OWN_PIECES; piece++) {
            w->bytes[id][piece] = next(5) == 0 ? 0 : 1 + next(MAX_BYTES - 1);
        }
    }
    size_t home_bytes = gm_chunks_home_bytes((const size_t (*)[GM_N_PIECES])w->bytes, N_CHUNKS);
    w->homes = aligned_alloc(4096, home_bytes);
    memset(w->homes, 0, home_bytes);
    gm_chunks_options options = {
        .device = w->device,
        .n_chunks = N_CHUNKS,
        .piece_bytes = (const size_t (*)[GM_N_PIECES])w->bytes,
        .has_homes = true,
        .homes = w->homes,
        .device_limit = 30 * 4096,
    };
    CHECK(gm_chunks_new(&options, &w->chunks) == GM_OK);
    for (int i = 0; i < N_STEPS; i++) {
        step(w);
    }
    for (uint32_t id = 0; id < N_CHUNKS; id++) {
        for (int piece = 0; piece < GM_N_OWN_PIECES; piece++) {
            check_piece(w, id, (gm_piece)piece);
        }
        uintptr_t address = gm_chunks_address(w->chunks, id, GM_WEIGHT);
        CHECK(w->bytes[id][GM_WEIGHT] == 0 || gm_chunks_at(w->chunks, address) == id);
    }
    uintptr_t begin, end;
    gm_chunks_weight_span(w->chunks, &begin, &end);
    CHECK(gm_chunks_at(w->chunks, begin - 1) == UINT32_MAX &&
          gm_chunks_at(w->chunks, end) == UINT32_MAX);
    gm_chunks_stats stats;
    gm_chunks_get_stats(w->chunks, &stats);
    CHECK(stats.fetches > 100 && stats.evictions > 100);
    gm_chunks_free(w->chunks);
    w->device->ops->free(w->device);
    free(w->homes);
    free(w);
}

static void test_without_homes(void)
{
    gm_device *device;
    gm_chunks *chunks;
    size_t bytes[2][GM_N_PIECES] = {{4096, 8192, 4096}, {100, 200, 100}};
    CHECK(gm_device_host_new(4096, NULL, &device) == GM_OK);
    gm_chunks_options options = {.device = device,
                                 .n_chunks = 2,
                                 .device_limit = SIZE_MAX,
                                 .piece_bytes = (const size_t (*)[GM_N_PIECES])bytes};
    CHECK(gm_chunks_new(&options, &chunks) == GM_OK);
    CHECK(gm_chunks_make_resident(chunks, 0) == GM_OK &&
          gm_chunks_make_resident(chunks, 1) == GM_OK);
    uint8_t value = 7, read = 1;
    CHECK(gm_chunks_read(chunks, 1, GM_STATE, 199, 1, &read, NULL) == GM_OK && read == 0);
    CHECK(gm_chunks_write(chunks, 1, GM_STATE, 199, 1, &value, 0) == GM_OK);
    CHECK(gm_chunks_read(chunks, 1, GM_STATE, 199, 1, &read, NULL) == GM_OK && read == 7);
    CHECK(gm_chunks_evict(chunks, 0, GM_WEIGHT) == GM_ERR_STATE); /* nowhere to go */
    CHECK(gm_chunks_is_resident(chunks, 0, GM_WEIGHT) && gm_chunks_check(chunks) == GM_OK);
    gm_chunks_free(chunks);
    device->ops->free(device);
}

int main(void)
{
    test_against_shadow();
    test_without_homes();
    puts("chunk: 6000 random steps against a shadow, invariants after each");
    return 0;
}
