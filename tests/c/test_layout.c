/* test_layout.c - the layout's invariants over random models, where shards cut parameters, and the
 * search for a chunk size. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "plan/layout.h"

static uint64_t state = 1;

static uint64_t next(uint64_t bound)
{
    return next_random(&state) % bound;
}

static void check_layout(const gm_param_spec *specs, uint32_t n, size_t chunk_bytes,
                         uint32_t n_shards)
{
    gm_layout *layout, *again;
    CHECK(gm_layout_new(specs, n, chunk_bytes, n_shards, &layout) == GM_OK);
    CHECK(gm_layout_new(specs, n, chunk_bytes, n_shards, &again) == GM_OK);
    CHECK(gm_layout_hash(layout) == gm_layout_hash(again));
    uint32_t n_chunks = gm_layout_n_chunks(layout);
    uint64_t *end = calloc(n_chunks + 1, sizeof *end), *used = calloc(n_chunks + 1, sizeof *used);
    for (uint32_t i = 0; i < n; i++) {
        const gm_param_place *place = gm_layout_param(layout, i);
        const gm_chunk_shape *chunk = gm_layout_chunk(layout, place->chunk);
        CHECK(chunk->kind == specs[i].kind && place->numel == specs[i].numel);
        CHECK(place->offset * specs[i].weight_bytes % GM_ALIGN == 0); /* invariant 1 */
        CHECK(place->offset >= end[place->chunk]);                    /* invariant 2 */
        CHECK(place->offset + place->numel <= chunk->numel);
        end[place->chunk] = place->offset + place->numel;
        used[place->chunk] += place->numel;
    }
    for (uint32_t id = 0; id < n_chunks; id++) {
        const gm_chunk_shape *chunk = gm_layout_chunk(layout, id);
        CHECK(chunk->used == used[id] && chunk->n_params > 0);
        CHECK(chunk->numel == n_shards * chunk->shard_numel); /* invariant 3 */
        CHECK(chunk->shard_numel * chunk->weight_bytes % GM_ALIGN == 0);
        size_t padding = n_shards * GM_ALIGN - GM_ALIGN;
        CHECK(chunk->n_params == 1 || chunk->numel * chunk->weight_bytes <= chunk_bytes + padding ||
              specs[chunk->first_param].numel == 0);
    }
    free(end);
    free(used);
    gm_layout_free(layout);
    gm_layout_free(again);
}

static void test_random_models(void)
{
    static const uint32_t widths[] = {2, 4, 2, 1};
    gm_param_spec specs[200];
    for (int round = 0; round < 2000; round++) {
        uint32_t n = (uint32_t)next(200);
        for (uint32_t i = 0; i < n; i++) {
            uint32_t kind = (uint32_t)next(4);
            uint64_t numel = next(8) == 0 ? 0 : next(4) == 0 ? next(100000) : next(700);
            specs[i] = (gm_param_spec){.numel = numel, .kind = kind, .weight_bytes = widths[kind]};
        }
        check_layout(specs, n, 512 + next(65536), round % 2 ? 1 : 1 + (uint32_t)next(9));
    }
}

/* ---- parameters that may not be cut anywhere ---- */

static int by_place(const void *left, const void *right)
{
    const gm_param_place *a = left, *b = right;
    if (a->chunk != b->chunk) {
        return a->chunk < b->chunk ? -1 : 1;
    }
    if (a->offset != b->offset) {
        return a->offset < b->offset ? -1 : 1;
    }
    return a->numel < b->numel ? -1 : a->numel > b->numel; /* what is empty takes no room */
}

/* The parts that shards have are whole pieces, in order, and all of each parameter. */
static void check_cuts(const gm_param_spec *specs, uint32_t n, const gm_layout *layout,
                       uint32_t n_shards)
{
    gm_param_place *places = calloc((size_t)n + 1, sizeof *places);
    for (uint32_t i = 0; i < n; i++) {
        const gm_param_place *place = gm_layout_param(layout, i);
        const gm_chunk_shape *chunk = gm_layout_chunk(layout, place->chunk);
        uint64_t end = 0;
        places[i] = *place;
        CHECK(place->numel == specs[i].numel && chunk->kind == specs[i].kind);
        CHECK(place->offset * specs[i].weight_bytes % GM_ALIGN == 0);
        CHECK(place->offset + place->numel <= chunk->numel);
        for (uint32_t shard = 0; shard < n_shards; shard++) {
            gm_part part = gm_layout_part(layout, i, shard);
            if (part.numel > 0) {
                CHECK(part.first == end);
                CHECK(part.first == 0 || part.offset == 0);
                CHECK(part.numel == specs[i].numel || specs[i].cut <= 1 ||
                      (part.first % specs[i].cut == 0 && part.numel >= specs[i].cut));
                end += part.numel;
            }
        }
        CHECK(end == specs[i].numel);
    }
    qsort(places, n, sizeof *places, by_place);
    for (uint32_t i = 1; i < n; i++) {
        CHECK(places[i].chunk != places[i - 1].chunk ||
              places[i].offset >= places[i - 1].offset + places[i - 1].numel);
    }
    for (uint32_t id = 0; id < gm_layout_n_chunks(layout); id++) {
        const gm_chunk_shape *chunk = gm_layout_chunk(layout, id);
        CHECK(chunk->n_params > 0 && chunk->numel == n_shards * chunk->shard_numel);
        CHECK(chunk->shard_numel * chunk->weight_bytes % GM_ALIGN == 0);
    }
    free(places);
}

static void test_random_cuts(void)
{
    static const uint32_t widths[] = {2, 4, 2, 1};
    gm_param_spec specs[150];
    for (int round = 0; round < 1000; round++) {
        uint32_t n = (uint32_t)next(150), n_shards = 1 + (uint32_t)next(8);
        for (uint32_t i = 0; i < n; i++) {
            uint32_t kind = (uint32_t)next(4);
            uint64_t numel = next(8) == 0 ? 0 : next(4) == 0 ? next(100000) : next(3000), rows;
            uint64_t cut = kind == 3 ? 1 : kind == 2 ? 256 : numel;
            if (kind == 1 && next(3) > 0) { /* between rows */
                cut = 1 + next(300);
                rows = 1 + next(300);
                numel = rows * cut;
            }
            specs[i] = (gm_param_spec){
                .numel = numel, .kind = kind, .weight_bytes = widths[kind], .cut = cut};
        }
        gm_layout *layout, *again;
        size_t chunk_bytes = 512 + next(65536);
        CHECK(gm_layout_new(specs, n, chunk_bytes, n_shards, &layout) == GM_OK);
        CHECK(gm_layout_new(specs, n, chunk_bytes, n_shards, &again) == GM_OK);
        CHECK(gm_layout_hash(layout) == gm_layout_hash(again));
        gm_layout_free(again);
        check_cuts(specs, n, layout, n_shards);
        if (n_shards == 1) { /* nothing is cut, so nothing is changed */
            for (uint32_t i = 0; i < n; i++) {
                specs[i].cut = 0;
            }
            CHECK(gm_layout_new(specs, n, chunk_bytes, 1, &again) == GM_OK);
            CHECK(gm_layout_hash(layout) == gm_layout_hash(again));
            gm_layout_free(again);
        }
        gm_layout_free(layout);
    }
}

enum { HIDDEN = 4096, INNER = 14336, VOCABULARY = 128256, LAYERS = 32, LLAMA = 2 + 9 * LAYERS + 1 };

typedef enum manner { ANYWHERE, BLOCKS, ROWS, NOWHERE } manner;

/* Llama-3.1-8B, bf16, in the order of its modules. */
static uint32_t llama(manner cuts, gm_param_spec *out)
{
    static const uint64_t layer[][2] = {
        {HIDDEN, HIDDEN}, {HIDDEN / 4, HIDDEN}, {HIDDEN / 4, HIDDEN},
        {HIDDEN, HIDDEN}, {INNER, HIDDEN},      {INNER, HIDDEN},
        {HIDDEN, INNER},  {1, HIDDEN},          {1, HIDDEN},
    };
    uint32_t n = 0;
    for (int i = 0; i < LLAMA; i++) {
        static const uint64_t vocabulary[] = {VOCABULARY, HIDDEN}, norm[] = {1, HIDDEN};
        const uint64_t *shape = i == 0 || i == LLAMA - 1 ? vocabulary
                                : i == LLAMA - 2         ? norm
                                                         : layer[(i - 1) % 9];
        uint64_t numel = shape[0] * shape[1], row = shape[0] > 1 ? shape[1] : numel;
        out[n++] = (gm_param_spec){.numel = numel,
                                   .weight_bytes = 2,
                                   .cut = cuts == ANYWHERE ? 1
                                          : cuts == BLOCKS ? 2048
                                          : cuts == ROWS   ? row
                                                           : numel};
    }
    return n;
}

/* No shard has more than 1.15 of the mean, and little of all is padding. */
static void check_balance(manner cuts, size_t chunk_bytes, uint32_t n_shards, double most_padding)
{
    static gm_param_spec specs[LLAMA];
    uint32_t n = llama(cuts, specs);
    gm_layout *layout;
    CHECK(gm_layout_new(specs, n, chunk_bytes, n_shards, &layout) == GM_OK);
    check_cuts(specs, n, layout, n_shards);
    double all = 0, used = 0, most = 0;
    for (uint32_t id = 0; id < gm_layout_n_chunks(layout); id++) {
        all += (double)gm_layout_chunk(layout, id)->numel;
        used += (double)gm_layout_chunk(layout, id)->used;
    }
    for (uint32_t shard = 0; shard < n_shards; shard++) {
        double own = 0;
        for (uint32_t i = 0; i < n; i++) {
            own += (double)gm_layout_part(layout, i, shard).numel;
        }
        most = own > most ? own : most;
    }
    CHECK(all <= used * (1 + most_padding));
    CHECK(most * n_shards <= used * 1.15);
    gm_layout_free(layout);
}

static void test_balance(void)
{
    for (uint32_t n_shards = 2; n_shards <= 8; n_shards *= 2) {
        for (size_t mib = 32; mib <= 512; mib *= 4) {
            for (manner cuts = ANYWHERE; cuts <= NOWHERE; cuts++) {
                check_balance(cuts, mib << 20, n_shards, n_shards < 8 ? 0.03 : 0.05);
            }
        }
    }
}

static void test_bad_input(void)
{
    gm_layout *layout;
    gm_param_spec spec = {.numel = 10, .kind = 0, .weight_bytes = 3};
    CHECK(gm_layout_new(&spec, 1, 4096, 1, &layout) == GM_ERR_ARG);
    CHECK(strstr(gm_last_error(), "3 bytes"));
    spec.weight_bytes = 4;
    CHECK(gm_layout_new(&spec, 1, 0, 1, &layout) == GM_ERR_ARG);
    CHECK(gm_layout_new(&spec, 1, 4096, 0, &layout) == GM_ERR_ARG);
    spec.numel = UINT64_MAX;
    CHECK(gm_layout_new(&spec, 1, 4096, 1, &layout) == GM_ERR_ARG);
    gm_param_spec two[2] = {{.numel = 1, .kind = 5, .weight_bytes = 2},
                            {.numel = 1, .kind = 5, .weight_bytes = 4}};
    CHECK(gm_layout_new(two, 2, 4096, 1, &layout) == GM_ERR_ARG);
    gm_layout_free(NULL);
}

static void test_search(void)
{
    gm_param_spec specs[12];
    size_t best;
    for (int i = 0; i < 12; i++) { /* parameters of 3,000 x 4 bytes, padded to 12,288 */
        specs[i] = (gm_param_spec){.numel = 3000, .kind = 0, .weight_bytes = 4};
    }
    CHECK(gm_layout_search(specs, 12, 8192, 40960, 40, &best) == GM_OK);
    CHECK(best ==
          8192); /* each parameter is larger: it gets a chunk of its own, nothing is wasted */
    CHECK(gm_layout_search(specs, 12, 20480, 20480, 40, &best) == GM_OK);
    CHECK(best == 24576);
    CHECK(gm_layout_search(specs, 12, 4096, 0, 1, &best) == GM_OK && best == 4096);
    CHECK(gm_layout_search(specs, 12, 4096, 4096, 0, &best) == GM_ERR_ARG);
}

int main(void)
{
    test_random_models();
    test_random_cuts();
    test_balance();
    test_bad_input();
    test_search();
    puts("layout: 3000 random models, balance, bad input, search");
    return 0;
}
