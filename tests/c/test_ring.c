/* test_ring.c - chunks that take the blocks of a ring from each other. */
#include "check.h"
#include "plan/ring.h"

#include <stdlib.h>

enum { BASE = 2, LENGTH = 5 };

static gm_place at(uint32_t offset)
{
    return (gm_place){.base = BASE, .length = LENGTH, .offset = offset};
}

/* The ring's end meets its beginning, and a walk that stops leaves the block at which it stood. */
static void test_take(void)
{
    uint32_t *owners, walk = 0;
    CHECK_OK(gm_owners_new(BASE + LENGTH + 1, &owners));
    gm_place first = at(3), second = at(4);
    CHECK(gm_owners_take(owners, &first, 3, 7, &walk) == GM_NO_OWNER);
    CHECK(owners[BASE + 3] == 7 && owners[BASE + 4] == 7 && owners[BASE] == 7);
    CHECK(owners[BASE - 1] == GM_NO_OWNER && owners[BASE + LENGTH] == GM_NO_OWNER);
    walk = 0;
    CHECK(gm_owners_take(owners, &second, 3, 8, &walk) == 7);
    CHECK(owners[BASE + 4] == 7 && owners[BASE] == 7);
    CHECK(gm_owners_take(owners, &second, 3, 8, &walk) == 7);
    CHECK(owners[BASE + 4] == 8 && owners[BASE] == 7);
    CHECK(gm_owners_take(owners, &second, 3, 8, &walk) == GM_NO_OWNER);
    CHECK(owners[BASE] == 8 && owners[BASE + 1] == 8 && owners[BASE + 3] == 7);
    walk = 0; /* what is the chunk's own stops no walk */
    CHECK(gm_owners_take(owners, &second, 3, 8, &walk) == GM_NO_OWNER);
    free(owners);
}

static void test_claim(void)
{
    gm_rings rings;
    gm_place first = at(3), second = at(0), third = at(1);
    CHECK_OK(gm_rings_new(BASE + LENGTH, &rings));
    CHECK(gm_rings_claim(&rings, &first, 3, 1, 10) == 0);
    CHECK(gm_rings_claim(&rings, &first, 3, 1, 8) == GM_NO_TICK); /* to 10 all the same */
    CHECK(gm_rings_free_from(&rings, &first, 3, 1) == 0);
    CHECK(gm_rings_free_from(&rings, &second, 2, 2) == 10);
    CHECK(gm_rings_free_from(&rings, &third, 2, 2) == 0);
    CHECK(gm_rings_claim(&rings, &second, 2, 2, 12) == 10);
    CHECK(gm_rings_claim(&rings, &first, 3, 1, 20) == 12);
    gm_rings_free(&rings);
}

int main(void)
{
    test_take();
    test_claim();
    printf("test_ring: ok\n");
    return 0;
}
