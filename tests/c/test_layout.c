/* test_layout.c - the layout's invariants over random models, and the search for a chunk size. */
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
    test_bad_input();
    test_search();
    puts("layout: 2000 random models, bad input, search");
    return 0;
}
