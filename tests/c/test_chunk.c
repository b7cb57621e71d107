/* test_chunk.c - the chunk table against a shadow: random pins, writes, evictions, limits and chunks all resident, on
 * the host device; every byte and every invariant after every step. */
#include <string.h>

#include "check.h"
#define gm_use gm_use_of_plan /* chunk.h has another one */
#include "plan/plan_impl.h"
#undef gm_use
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
    gm_arena *homes;
    size_t bytes[N_CHUNKS][GM_N_PIECES];
    uint8_t shadow[N_CHUNKS][GM_N_PIECES][MAX_BYTES]; /* what every piece must hold */
    uint32_t pins[N_CHUNKS];                          /* of the weight pieces */
    size_t pinned_bytes;
    uint64_t n_told; /* changes that the table has told */
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

/* Before a change: weights and states are there to be copied, as they were. */
static gm_status note_change(void *context, uint32_t id)
{
    world *w = context;
    check_piece(w, id, GM_WEIGHT);
    check_piece(w, id, GM_STATE);
    w->n_told++;
    return GM_OK;
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
        uint64_t n_told = w->n_told;
        CHECK_OK(gm_chunks_note_write(w->chunks, id, GM_WEIGHT));
        CHECK(w->n_told == n_told + 1);
        scribble(w, id, GM_WEIGHT, shown);
    }
}

static void write_home(world *w, uint32_t id, gm_piece piece)
{
    uint64_t n_told = w->n_told;
    CHECK(gm_chunks_claim_home(w->chunks, id, piece) == GM_OK);
    CHECK(w->n_told - n_told == (piece != GM_GRAD));
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
    CHECK(gm_arena_reserve(w->device, home_bytes, &w->homes) == GM_OK);
    gm_chunks_options options = {
        .device = w->device,
        .n_chunks = N_CHUNKS,
        .piece_bytes = (const size_t (*)[GM_N_PIECES])w->bytes,
        .has_homes = true,
        .homes = w->homes,
        .home_limit = home_bytes,
        .on_change = note_change,
        .context = w,
        .device_limit = 200 * 4096,
    };
    CHECK(gm_chunks_new(&options, &w->chunks) == GM_OK);
    for (uint32_t id = 0; id < N_CHUNKS; id++) {
        CHECK(gm_chunks_make_resident(w->chunks, id) == GM_OK);
    }
    gm_chunks_stats stats;
    gm_chunks_get_stats(w->chunks, &stats);
    CHECK(stats.home_bytes == 0 && gm_arena_bytes(w->homes) == 0);
    CHECK(gm_chunks_set_limit(w->chunks, 30 * 4096, NULL) == GM_OK);
    gm_chunks_get_stats(w->chunks, &stats);
    CHECK(stats.home_bytes > 0 && stats.home_bytes == gm_arena_bytes(w->homes));
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
    gm_chunks_get_stats(w->chunks, &stats);
    CHECK(stats.fetches > 100 && stats.evictions > 100);
    gm_chunks_free(w->chunks);
    gm_arena_free(w->homes);
    w->device->ops->free(w->device);
    free(w);
}

/* Three chunks on the device, and room for two homes: the third stays where it is, with its bytes. */
static void test_home_limit(void)
{
    gm_device *device;
    gm_arena *homes;
    gm_chunks *chunks;
    CHECK(gm_device_host_new(4096, NULL, &device) == GM_OK);
    const size_t bytes[3][GM_N_PIECES] = {
        {8192, 8192, 4096}, {8192, 8192, 4096}, {8192, 8192, 4096}};
    size_t all = gm_chunks_home_bytes(bytes, 3);
    CHECK(gm_arena_reserve(device, all, &homes) == GM_OK);
    gm_chunks_options options = {.device = device,
                                 .n_chunks = 3,
                                 .piece_bytes = bytes,
                                 .has_homes = true,
                                 .homes = homes,
                                 .home_limit = all * 2 / 3,
                                 .device_limit = all};
    CHECK(gm_chunks_new(&options, &chunks) == GM_OK);
    uint8_t data[8192], copy[8192];
    for (uint32_t id = 0; id < 3; id++) {
        CHECK(gm_chunks_make_resident(chunks, id) == GM_OK);
        memset(data, (int)id + 1, sizeof data);
        CHECK(gm_chunks_write(chunks, id, GM_STATE, 0, sizeof data, data, 0) == GM_OK);
    }
    CHECK(gm_chunks_set_limit(chunks, 4096, NULL) == GM_ERR_NOMEM);
    CHECK(strstr(gm_last_error(), "HOST") && strstr(gm_last_error(), "host_budget"));
    CHECK(gm_arena_bytes(homes) == all * 2 / 3);
    CHECK(gm_chunks_check(chunks) == GM_OK);
    for (uint32_t id = 0; id < 3; id++) {
        memset(data, (int)id + 1, sizeof data);
        CHECK(gm_chunks_read(chunks, id, GM_STATE, 0, sizeof copy, copy, NULL) == GM_OK);
        CHECK(memcmp(copy, data, sizeof copy) == 0);
        CHECK(gm_chunks_is_resident(chunks, id, GM_STATE) == (id == 0)); /* the last go first */
    }
    gm_chunks_free(chunks);
    gm_arena_free(homes);
    device->ops->free(device);
}

static uint64_t n_maps(const gm_chunks *chunks)
{
    gm_chunks_stats stats;
    gm_chunks_get_stats(chunks, &stats);
    return stats.n_maps;
}

/* Gathered weights that come and go twice, as in a forward and its backward, are mapped once: also where each goes before
 * the next comes.  Where the limit has room for one alone they show the same blocks, and no more are there. */
static void test_blocks_that_are_shown(void)
{
    enum { N = 4 };
    gm_device *device;
    gm_chunks *chunks;
    CHECK(gm_device_host_new(4096, NULL, &device) == GM_OK);
    size_t bytes[N][GM_N_PIECES] = {0};
    for (int id = 0; id < N; id++) {
        bytes[id][GM_GATHERED] = 8192;
    }
    gm_chunks_options options = {.device = device,
                                 .n_chunks = N,
                                 .device_limit = N * 8192,
                                 .piece_bytes = (const size_t (*)[GM_N_PIECES])bytes};
    CHECK(gm_chunks_new(&options, &chunks) == GM_OK);
    for (int limit = N; limit >= 1; limit -= N - 1) {
        CHECK(gm_chunks_set_limit(chunks, (size_t)limit * 8192, NULL) == GM_OK);
        uint64_t before = n_maps(chunks);
        for (uint32_t i = 0; i < 2 * N; i++) {
            bool is_here;
            CHECK(gm_chunks_claim(chunks, i % N, GM_GATHERED, 0, &is_here) == GM_OK && is_here);
            memset((void *)gm_chunks_address(chunks, i % N, GM_GATHERED), (int)i, 8192);
            CHECK(gm_chunks_check(chunks) == GM_OK);
            CHECK(gm_chunks_discard(chunks, i % N, GM_GATHERED) == GM_OK);
        }
        CHECK(n_maps(chunks) - before == (limit == 1 ? N - 1 : N)); /* one shows its own still */
        gm_chunks_stats stats;
        gm_chunks_get_stats(chunks, &stats);
        CHECK(stats.device_bytes == (size_t)limit * 8192);
    }
    gm_chunks_free(chunks);
    device->ops->free(device);
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

/* ---- bytes that come next ---- */

enum { NEXT_BYTES = 8192, OLD = 1, NEW = 2 };

/* Two chunks: weights have blocks of their own, states one place for both. */
typedef struct pair {
    gm_device *device;
    gm_arena *homes;
    gm_chunks *chunks;
    uint8_t spare[NEXT_BYTES];
} pair;

static void check_all(pair *w, uint32_t id, gm_piece piece, int value)
{
    uint8_t copy[NEXT_BYTES];
    CHECK_OK(gm_chunks_read(w->chunks, id, piece, 0, sizeof copy, copy, NULL));
    for (size_t i = 0; i < sizeof copy; i++) {
        CHECK(copy[i] == value);
    }
    CHECK_OK(gm_chunks_check(w->chunks));
    CHECK_OK(gm_chunks_check_bytes(w->chunks));
}

static void set_all(pair *w, uint32_t id, gm_piece piece, int value)
{
    uint8_t data[NEXT_BYTES];
    memset(data, value, sizeof data);
    CHECK_OK(gm_chunks_write(w->chunks, id, piece, 0, sizeof data, data, 0));
}

static void pair_new(pair *w)
{
    static const size_t bytes[2][GM_N_PIECES] = {{NEXT_BYTES, NEXT_BYTES, 4096},
                                                 {NEXT_BYTES, NEXT_BYTES, 4096}};
    gm_place places[2 * GM_N_PIECES] = {
        [GM_WEIGHT] = {.base = 0, .length = 2, .is_resident = true},
        [GM_STATE] = {.base = 4, .length = 2},
        [GM_N_PIECES + GM_WEIGHT] = {.base = 2, .length = 2, .is_resident = true},
        [GM_N_PIECES + GM_STATE] = {.base = 4, .length = 2}};
    gm_plan plan = {.n = 2, .n_blocks = 6, .places = places};
    uint32_t n_blocks;
    CHECK_OK(gm_device_host_new(4096, NULL, &w->device));
    size_t all = gm_chunks_home_bytes(bytes, 2);
    CHECK_OK(gm_arena_reserve(w->device, all, &w->homes));
    gm_chunks_options options = {.device = w->device,
                                 .n_chunks = 2,
                                 .piece_bytes = bytes,
                                 .has_homes = true,
                                 .homes = w->homes,
                                 .home_limit = all,
                                 .places_states = true,
                                 .device_limit = 2 * all};
    CHECK_OK(gm_chunks_new(&options, &w->chunks));
    CHECK_OK(gm_chunks_give_homes(w->chunks));
    CHECK_OK(gm_chunks_adopt(w->chunks, &plan, &n_blocks));
    for (int piece = GM_WEIGHT; piece <= GM_STATE; piece++) {
        set_all(w, 0, (gm_piece)piece, OLD);
        set_all(w, 1, (gm_piece)piece, OLD);
    }
}

static void pair_free(pair *w)
{
    gm_chunks_free(w->chunks);
    gm_arena_free(w->homes);
    w->device->ops->free(w->device);
}

/* Work writes the piece on the device, and is rolled back. */
static void run_ahead(pair *w, gm_piece piece, bool keeps)
{
    bool is_done;
    CHECK_OK(gm_chunks_prefetch(w->chunks, 0, piece, &is_done));
    CHECK(is_done);
    CHECK_OK(gm_chunks_send_home(w->chunks, 0, piece));
    CHECK_OK(gm_chunks_begin(w->chunks, 0, piece, GM_WRITE, 0));
    memset((void *)gm_chunks_address(w->chunks, 0, piece), NEW, NEXT_BYTES);
    CHECK_OK(gm_chunks_end(w->chunks, 0, piece, GM_WRITE, 0));
    CHECK_OK(gm_chunks_roll_back(w->chunks, 0, piece, keeps));
    CHECK(!gm_chunks_is_resident(w->chunks, 0, piece));
    check_all(w, 0, piece, OLD);
}

static uint64_t n_copied(const pair *w, bool is_in)
{
    gm_chunks_stats stats;
    gm_chunks_get_stats(w->chunks, &stats);
    return is_in ? stats.fetched_bytes : stats.evicted_bytes;
}

static void take_next(pair *w, gm_piece piece, bool is_there)
{
    uint64_t before = n_copied(w, true);
    bool is_stale = true;
    CHECK(gm_chunks_has_next(w->chunks, 0, piece));
    CHECK_OK(gm_chunks_take_next(w->chunks, 0, piece, &is_stale));
    CHECK(!is_stale);
    CHECK(n_copied(w, true) == before); /* nothing came in */
    CHECK(gm_chunks_is_resident(w->chunks, 0, piece) == is_there);
    check_all(w, 0, piece, NEW);
}

/* Without a spare the piece's blocks have what comes next, unless something else has been there, or it was written. */
static void test_next_in_place(void)
{
    pair w;
    pair_new(&w);
    uint64_t before = n_copied(&w, false);
    run_ahead(&w, GM_WEIGHT, true);
    CHECK(n_copied(&w, false) == before); /* it waits on the device */
    take_next(&w, GM_WEIGHT, true);
    CHECK(n_copied(&w, false) == before + NEXT_BYTES);
    CHECK(!gm_chunks_has_next(w.chunks, 0, GM_WEIGHT));
    set_all(&w, 0, GM_WEIGHT, OLD);
    for (int way = 0; way < 4; way++) {
        run_ahead(&w, GM_WEIGHT, way > 0);
        CHECK(gm_chunks_has_next(w.chunks, 0, GM_WEIGHT) == (way > 0));
        if (way == 1) { /* a reader */
            CHECK_OK(gm_chunks_pin(w.chunks, 0, GM_WEIGHT, 0));
            CHECK(*(uint8_t *)gm_chunks_address(w.chunks, 0, GM_WEIGHT) == OLD);
            CHECK_OK(gm_chunks_unpin(w.chunks, 0, GM_WEIGHT, 0));
        } else if (way == 2) {
            set_all(&w, 0, GM_WEIGHT, OLD);
        } else if (way == 3) {
            CHECK_OK(gm_chunks_leave_placement(w.chunks));
        }
        CHECK(!gm_chunks_has_next(w.chunks, 0, GM_WEIGHT));
        check_all(&w, 0, GM_WEIGHT, OLD);
    }
    pair_free(&w);
}

/* With a spare it is there; the blocks may have it, too. */
static void test_next_in_spare(void)
{
    for (int is_lost = 0; is_lost < 2; is_lost++) {
        pair w;
        pair_new(&w);
        const uint8_t *made = gm_chunks_home(w.chunks, 0, GM_STATE);
        CHECK_OK(gm_chunks_give_spare(w.chunks, 0, GM_STATE, w.spare));
        run_ahead(&w, GM_STATE, true);
        if (is_lost) { /* the other chunk's have the same blocks */
            bool is_done;
            CHECK_OK(gm_chunks_prefetch(w.chunks, 1, GM_STATE, &is_done));
            CHECK(is_done);
        }
        take_next(&w, GM_STATE, !is_lost);
        CHECK(gm_chunks_home(w.chunks, 0, GM_STATE) == w.spare);
        CHECK(gm_chunks_spare(w.chunks, 0, GM_STATE) == made);
        CHECK(gm_chunks_given(w.chunks, 0, GM_STATE) == w.spare);
        CHECK_OK(
            gm_chunks_take_back_spare(w.chunks, 0, GM_STATE)); /* its memory may go elsewhere */
        memset(w.spare, 0, sizeof w.spare);
        CHECK(gm_chunks_home(w.chunks, 0, GM_STATE) == made);
        CHECK(!gm_chunks_spare(w.chunks, 0, GM_STATE) && !gm_chunks_given(w.chunks, 0, GM_STATE));
        check_all(&w, 0, GM_STATE, NEW);
        pair_free(&w);
    }
}

/* Who has read the old bytes meanwhile has them on the device: they are written anew. */
static void test_next_beside_a_reader(void)
{
    pair w;
    bool is_stale = false;
    pair_new(&w);
    CHECK_OK(gm_chunks_give_spare(w.chunks, 0, GM_WEIGHT, w.spare));
    run_ahead(&w, GM_WEIGHT, true);
    CHECK_OK(gm_chunks_pin(w.chunks, 0, GM_WEIGHT, 0));
    CHECK_OK(gm_chunks_unpin(w.chunks, 0, GM_WEIGHT, 0));
    CHECK_OK(gm_chunks_take_next(w.chunks, 0, GM_WEIGHT, &is_stale));
    CHECK(is_stale);
    CHECK_OK(gm_chunks_home_written(w.chunks, 0, GM_WEIGHT, 0));
    check_all(&w, 0, GM_WEIGHT, NEW);
    CHECK(*(uint8_t *)gm_chunks_address(w.chunks, 0, GM_WEIGHT) == NEW);
    pair_free(&w);
}

int main(void)
{
    test_against_shadow();
    test_without_homes();
    test_home_limit();
    test_blocks_that_are_shown();
    test_next_in_place();
    test_next_in_spare();
    test_next_beside_a_reader();
    puts("chunk: 6000 random steps against a shadow, invariants after each");
    return 0;
}
