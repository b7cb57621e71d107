/* ring.c - who has the blocks of a plan's rings, and until when. */
#include "plan/ring.h"

#include <stdlib.h>
#include <string.h>

gm_status gm_owners_new(uint32_t n_blocks, uint32_t **out)
{
    size_t bytes = ((size_t)n_blocks + 1) * sizeof **out;
    *out = malloc(bytes);
    GM_FAIL_IF(!*out, GM_ERR_NOMEM, "host: no room for the owners of %u blocks", n_blocks);
    memset(*out, 0xff, bytes);
    return GM_OK;
}

uint32_t gm_owners_take(uint32_t *owners, const gm_place *place, uint32_t n_blocks, uint32_t chunk,
                        uint32_t *at)
{
    if (*at > 0) {
        owners[gm_place_block(place, *at - 1)] = chunk;
    }
    while (*at < n_blocks) {
        uint32_t *owner = &owners[gm_place_block(place, (*at)++)];
        if (*owner != chunk && *owner != GM_NO_OWNER) {
            return *owner;
        }
        *owner = chunk;
    }
    return GM_NO_OWNER;
}

gm_status gm_rings_new(uint32_t n_blocks, gm_rings *out)
{
    *out = (gm_rings){.until = calloc((size_t)n_blocks + 1, sizeof(uint32_t))};
    GM_FAIL_IF(!out->until, GM_ERR_NOMEM, "host: no room for rings of %u blocks", n_blocks);
    gm_status status = gm_owners_new(n_blocks, &out->owner);
    GM_TRY_ELSE(status, gm_rings_free(out));
    return GM_OK;
}

void gm_rings_free(gm_rings *rings)
{
    free(rings->owner);
    free(rings->until);
    memset(rings, 0, sizeof *rings);
}

uint32_t gm_rings_free_from(const gm_rings *rings, const gm_place *place, uint32_t n_blocks,
                            uint32_t chunk)
{
    uint32_t from = 0;
    for (uint32_t j = 0; j < n_blocks; j++) {
        uint32_t block = gm_place_block(place, j), until = rings->until[block];
        from = rings->owner[block] != chunk && until > from ? until : from;
    }
    return from;
}

uint32_t gm_rings_claim(gm_rings *rings, const gm_place *place, uint32_t n_blocks, uint32_t chunk,
                        uint32_t end)
{
    uint32_t from = gm_rings_free_from(rings, place, n_blocks, chunk);
    bool was_there = true;
    for (uint32_t j = 0; j < n_blocks; j++) {
        uint32_t block = gm_place_block(place, j);
        bool is_mine = rings->owner[block] == chunk;
        was_there &= is_mine;
        rings->until[block] = is_mine && rings->until[block] > end ? rings->until[block] : end;
        rings->owner[block] = chunk;
    }
    return was_there ? GM_NO_TICK : from;
}
