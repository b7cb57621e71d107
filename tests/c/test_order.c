/* test_order.c - the map of accesses finds exactly the unordered pairs that a history of every access to every
 * byte finds, and stays small. */
#include "chaos/order.h"

#include <string.h>

#include "check.h"

enum { N_BYTES = 64, N_ACTORS = 4, N_NOTES = 400, N_TRIALS = 200 };

typedef struct noted {
    gm_access access;
    uint64_t begin, end;
} noted;

/* Is any noted access unordered and in conflict with the new one? */
static bool is_conflict(const noted *all, size_t n, const gm_access *access, const gm_clock *clock,
                        uint64_t begin, uint64_t end)
{
    for (size_t i = 0; i < n; i++) {
        bool overlaps = all[i].begin < end && begin < all[i].end;
        bool is_ordered = clock->tick[all[i].access.actor] >= all[i].access.tick;
        if (overlaps && !is_ordered && (access->is_write || all[i].access.is_write)) {
            return true;
        }
    }
    return false;
}

/* Whether the map still knows of the conflict depends on earlier ones: an access that was in conflict replaces what
 * it was in conflict with.  So each trial ends with its first conflict. */
static bool run_trial(uint64_t seed, double *share)
{
    gm_order *order;
    CHECK_OK(gm_order_new(&order));
    gm_clock clocks[N_ACTORS] = {{{0}}}; /* actor 0 plays the host: everybody inherits from it */
    static noted all[N_NOTES];
    size_t n = 0;
    bool has_conflict = false;
    while (n < N_NOTES && !has_conflict) {
        uint32_t actor = (uint32_t)(next_random(&seed) % N_ACTORS);
        if (next_random(&seed) % 8 < 5) { /* ordering, often enough for long trials */
            uint32_t other = (uint32_t)(next_random(&seed) % N_ACTORS);
            gm_clock_join(&clocks[actor], &clocks[other]);
            CHECK(gm_clock_covers(&clocks[actor], &clocks[other]));
        }
        gm_clock_join(&clocks[actor], &clocks[0]);
        uint64_t begin = next_random(&seed) % N_BYTES;
        uint64_t end = begin + 1 + next_random(&seed) % (N_BYTES - begin);
        gm_access access = {.tick = ++clocks[actor].tick[actor],
                            .number = n,
                            .actor = actor,
                            .is_write = next_random(&seed) % 4 == 0};
        gm_conflict conflict;
        bool expected = is_conflict(all, n, &access, &clocks[actor], begin, end);
        if (expected && next_random(&seed) % 128 != 0) { /* go on without it */
            clocks[actor].tick[actor]--;
            continue;
        }
        CHECK_OK(gm_order_note(order, &access, &clocks[actor], begin, end, &conflict));
        CHECK(conflict.is_found == expected);
        if (conflict.is_found) {
            const noted *earlier = &all[conflict.earlier.number];
            CHECK(conflict.begin >= begin && conflict.end <= end && conflict.begin < conflict.end);
            CHECK(earlier->begin <= conflict.begin && conflict.end <= earlier->end);
            CHECK(earlier->access.tick == conflict.earlier.tick);
            CHECK(is_conflict(earlier, 1, &access, &clocks[actor], begin, end));
        }
        has_conflict = expected;
        all[n++] = (noted){access, begin, end};
        CHECK(gm_order_n_spans(order) <= N_BYTES);
        if (next_random(&seed) % 16 == 0) {
            gm_order_forget(order, &clocks[0]);
        }
    }
    *share += (double)n / N_NOTES / N_TRIALS;
    gm_clock everything = {{0}};
    for (uint32_t actor = 0; actor < N_ACTORS; actor++) {
        gm_clock_join(&everything, &clocks[actor]);
    }
    gm_order_forget(order, &everything);
    CHECK(gm_order_n_spans(order) == 0);
    gm_order_free(order);
    return has_conflict;
}

/* The number of spans depends on the ranges in use, not on how often they are used. */
static void check_stays_small(void)
{
    gm_order *order;
    CHECK_OK(gm_order_new(&order));
    gm_clock clock = {{0}};
    for (uint64_t i = 0; i < 100000; i++) {
        gm_access access = {.tick = ++clock.tick[1], .actor = 1, .is_write = i % 3 == 0};
        gm_conflict conflict;
        uint64_t begin = i % 16 * 100;
        CHECK_OK(gm_order_note(order, &access, &clock, begin, begin + 100, &conflict));
        CHECK(!conflict.is_found && gm_order_n_spans(order) <= 16);
    }
    gm_access all = {.tick = ++clock.tick[1], .actor = 1, .is_write = true};
    gm_conflict conflict;
    CHECK_OK(gm_order_note(order, &all, &clock, 0, 5000, &conflict));
    CHECK(gm_order_n_spans(order) == 1);
    gm_order_free(order);
    gm_order_free(NULL);
}

int main(void)
{
    int n_conflicts = 0;
    double share = 0;
    for (uint64_t trial = 0; trial < N_TRIALS; trial++) {
        n_conflicts += run_trial(trial, &share);
    }
    CHECK(n_conflicts > N_TRIALS / 4 && share > 0.1); /* both kinds of answer were asked for */
    check_stays_small();
    puts("test_order: ok");
    return 0;
}
