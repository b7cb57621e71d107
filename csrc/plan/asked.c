/* asked.c - a hash table from choices to what they are worth. */
#include "plan/asked.h"

#include <stdlib.h>
#include <string.h>

gm_worth gm_worth_of(const gm_plan *plan)
{
    return plan ? (gm_worth){.has_plan = true,
                             .step_seconds = plan->info.step_seconds,
                             .comm_seconds = plan->info.comm_seconds,
                             .traffic = plan->info.h2d_bytes + plan->info.d2h_bytes,
                             .n_blocks = plan->n_blocks,
                             .n_ops = gm_plan_n_ops(plan)}
                : (gm_worth){.has_plan = false};
}

static size_t key_bytes(const gm_asked *asked)
{
    return asked->n * sizeof(gm_chosen) + sizeof((gm_choice *)0)->depth +
           sizeof((gm_choice *)0)->speculated;
}

static void make_key(gm_asked *asked, const gm_choice *choice)
{
    uint8_t *at = asked->key + asked->n * sizeof *choice->of;
    memcpy(asked->key, choice->of, asked->n * sizeof *choice->of);
    memcpy(at, choice->depth, sizeof choice->depth);
    memcpy(at + sizeof choice->depth, &choice->speculated, sizeof choice->speculated);
}

/* The place of a key in the table: where it is, or where it would be. */
static size_t *place_of(const gm_asked *asked, const uint8_t *key)
{
    size_t n_bytes = key_bytes(asked), n_places = 2 * asked->capacity;
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < n_bytes; i++) {
        hash = (hash ^ key[i]) * UINT64_C(0x100000001b3);
    }
    size_t at = (size_t)(hash % n_places);
    while (asked->table[at] &&
           memcmp(asked->keys + (asked->table[at] - 1) * n_bytes, key, n_bytes) != 0) {
        at = at + 1 == n_places ? 0 : at + 1;
    }
    return &asked->table[at];
}

static gm_status grow(gm_asked *asked)
{
    size_t capacity = asked->capacity > 0 ? 2 * asked->capacity : 64;
    uint8_t *keys = realloc(asked->keys, capacity * key_bytes(asked));
    asked->keys = keys ? keys : asked->keys;
    gm_worth *worths = realloc(asked->worths, capacity * sizeof *worths);
    asked->worths = worths ? worths : asked->worths;
    size_t *table = calloc(2 * capacity, sizeof *table);
    if (!keys || !worths || !table) {
        free(table);
        return GM_FAIL(GM_ERR_NOMEM, "host: no room to plan %u chunks", asked->n);
    }
    free(asked->table);
    asked->table = table;
    asked->capacity = capacity;
    for (size_t i = 0; i < asked->n_answers; i++) {
        *place_of(asked, asked->keys + i * key_bytes(asked)) = i + 1;
    }
    return GM_OK;
}

gm_status gm_asked_find(gm_asked *asked, uint32_t n, const gm_choice *choice, const gm_worth **out)
{
    *out = NULL;
    if (!asked->key) {
        asked->n = n;
        asked->key = malloc(key_bytes(asked));
        GM_FAIL_IF(!asked->key, GM_ERR_NOMEM, "host: no room to plan %u chunks", n);
    }
    GM_ASSERT(asked->n == n);
    make_key(asked, choice);
    if (asked->n_answers > 0) {
        size_t found = *place_of(asked, asked->key);
        *out = found ? &asked->worths[found - 1] : NULL;
    }
    return GM_OK;
}

gm_status gm_asked_add(gm_asked *asked, const gm_worth *worth)
{
    if (asked->n_answers == asked->capacity) {
        GM_TRY(grow(asked));
    }
    size_t *place = place_of(asked, asked->key);
    GM_ASSERT(*place == 0);
    memcpy(asked->keys + asked->n_answers * key_bytes(asked), asked->key, key_bytes(asked));
    asked->worths[asked->n_answers++] = *worth;
    *place = asked->n_answers;
    return GM_OK;
}

void gm_asked_clear(gm_asked *asked)
{
    free(asked->keys);
    free(asked->worths);
    free(asked->table);
    free(asked->key);
    *asked = (gm_asked){0};
}
