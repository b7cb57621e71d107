/* test_trace.c - the book of traces: recording, following, changing one's mind, and what is kept. */
#include <malloc.h>
#include <string.h>

#include "check.h"
#include "plan/trace.h"

static uint64_t seed = 3;

typedef struct step {
    gm_tick_kind kind;
    uint32_t id;
} step;

static uint64_t below(uint64_t bound)
{
    return next_random(&seed) % bound;
}

/* Runs a pass; checks that positions count up; *n_followed: ticks at which a trace was followed. */
static uint32_t run(gm_book *book, bool is_grad, const step *steps, uint32_t n,
                    uint32_t *n_followed)
{
    uint32_t trace, tick, followed = 0;
    CHECK_OK(gm_book_begin(book, is_grad));
    for (uint32_t i = 0; i < n; i++) {
        CHECK_OK(gm_book_tick(book, steps[i].kind, steps[i].id, 0, &trace, &tick));
        CHECK(tick == i && trace == gm_book_following(book));
        followed += trace != GM_NO_TRACE;
        if (trace != GM_NO_TRACE) { /* what is followed agrees so far */
            const gm_trace *known = gm_book_trace(book, trace);
            CHECK(known->is_grad == is_grad && i < known->n);
            for (uint32_t j = 0; j <= i; j++) {
                CHECK(known->ticks[j].kind == (uint32_t)steps[j].kind);
                CHECK(known->ticks[j].id == steps[j].id);
            }
        }
    }
    CHECK_OK(gm_book_end(book, &trace));
    if (n_followed) {
        *n_followed = followed;
    }
    return trace;
}

static void test_first_pass_is_recorded_second_followed(void)
{
    static const step train[] = {
        {GM_TICK_ENTER, 0}, {GM_TICK_ENTER, 1}, {GM_TICK_TOUCH, 4}, {GM_TICK_GRAD, 4}};
    gm_book *book;
    uint32_t n_followed;
    CHECK_OK(gm_book_new(&book));
    CHECK(gm_book_n_traces(book) == 0);
    uint32_t first = run(book, true, train, 4, &n_followed);
    CHECK(first != GM_NO_TRACE && n_followed == 0 && gm_book_n_traces(book) == 1);
    CHECK(run(book, true, train, 4, &n_followed) == first && n_followed == 4);
    const gm_trace *trace = gm_book_trace(book, first);
    CHECK(trace->n == 4 && trace->is_grad && trace->has_backward && trace->n_runs == 2);
    CHECK(trace->next == first);
    CHECK(gm_book_trace(book, 1) == NULL);
    /* The same ticks without gradients are another trace. */
    uint32_t evaluation = run(book, false, train, 2, NULL);
    CHECK(evaluation != first && !gm_book_trace(book, evaluation)->has_backward);
    CHECK(gm_book_trace(book, evaluation)->hash != gm_book_trace(book, first)->hash);
    CHECK(gm_book_trace(book, first)->next == evaluation);
    gm_book_free(book);
}

/* Whatever passes come: every distinct one is one trace, and from its second time on each tick has a trace to follow. */
static void test_random_passes(void)
{
    enum { N = 12, MOST = 40 };
    for (int round = 0; round < 200; round++) {
        static step passes[N][MOST];
        uint32_t n[N], id[N];
        bool is_grad[N];
        gm_book *book;
        CHECK_OK(gm_book_new(&book));
        for (uint32_t k = 0; k < N; k++) {
            is_grad[k] = below(2) == 0;
            n[k] = 1 + (uint32_t)below(MOST);
            uint32_t common = k > 0 ? (uint32_t)below(n[k] + 1) : 0; /* begins like another */
            const step *other = k > 0 ? passes[below(k)] : NULL;
            for (uint32_t i = 0; i < MOST; i++) {
                passes[k][i] =
                    i < common ? other[i] : (step){(gm_tick_kind)below(3), (uint32_t)below(3)};
            }
            id[k] = GM_NO_TRACE;
        }
        for (int pass = 0; pass < 60; pass++) {
            uint32_t k = (uint32_t)below(N), n_followed;
            uint32_t trace = run(book, is_grad[k], passes[k], n[k], &n_followed);
            CHECK(trace != GM_NO_TRACE);
            CHECK(id[k] == GM_NO_TRACE || (id[k] == trace && n_followed == n[k]));
            id[k] = trace;
            for (uint32_t other = 0; other < N; other++) {
                bool is_same = is_grad[k] == is_grad[other] && n[k] == n[other] &&
                               memcmp(passes[k], passes[other], n[k] * sizeof(step)) == 0;
                CHECK(id[other] == GM_NO_TRACE || (id[other] == trace) == is_same);
            }
        }
        gm_book_free(book);
    }
}

/* A pass that stops in the middle of a known one is a trace of its own, and both are followed afterwards. */
static void test_early_end(void)
{
    static const step all[] = {{GM_TICK_ENTER, 0}, {GM_TICK_ENTER, 1}, {GM_TICK_TOUCH, 1}};
    gm_book *book;
    uint32_t n_followed;
    CHECK_OK(gm_book_new(&book));
    uint32_t whole = run(book, true, all, 3, NULL), part = run(book, true, all, 2, &n_followed);
    CHECK(whole != part && n_followed == 2);
    CHECK(run(book, true, all, 3, &n_followed) == whole && n_followed == 3);
    CHECK(run(book, true, all, 2, &n_followed) == part && n_followed == 2);
    CHECK(gm_book_n_traces(book) == 2);
    gm_book_free(book);
}

static void test_guess(void)
{
    static const step a[] = {{GM_TICK_ENTER, 0}}, b[] = {{GM_TICK_ENTER, 1}},
                      c[] = {{GM_TICK_ENTER, 2}};
    gm_book *book;
    CHECK_OK(gm_book_new(&book));
    uint32_t first = run(book, true, a, 1, NULL), second = run(book, true, b, 1, NULL);
    uint32_t third = run(book, false, c, 1, NULL);
    CHECK_OK(
        gm_book_begin(book, true)); /* nothing came after the third: the latest with gradients */
    CHECK(gm_book_following(book) == second);
    CHECK_OK(gm_book_end(book, NULL)); /* a pass without ticks leaves nothing */
    CHECK(gm_book_following(book) == GM_NO_TRACE);
    CHECK(run(book, true, a, 1, NULL) == first);
    CHECK_OK(gm_book_begin(book, true)); /* after the first came the second */
    CHECK(gm_book_following(book) == second);
    CHECK_OK(gm_book_begin(book, false)); /* which has gradients: the latest without */
    CHECK(gm_book_following(book) == third);
    CHECK_OK(gm_book_end(book, NULL));
    CHECK(gm_book_n_traces(book) == 3);
    gm_book_free(book);
}

static void test_measures(void)
{
    gm_book *book;
    uint32_t trace, tick;
    CHECK_OK(gm_book_new(&book));
    for (int pass = 0; pass < 2; pass++) {
        CHECK_OK(gm_book_begin(book, true));
        CHECK_OK(gm_book_tick(book, GM_TICK_ENTER, 0, pass == 0 ? 40 : 10, &trace, &tick));
        CHECK_OK(gm_book_tick(book, GM_TICK_ENTER, 1, pass == 0 ? 4 : 5, &trace, &tick));
        gm_book_release(book, 1);
        CHECK_OK(gm_book_tick(book, GM_TICK_TOUCH, 2, 7, &trace, &tick));
        gm_book_release(book, 0);
        CHECK_OK(gm_book_tick(book, GM_TICK_GRAD, 2, 0, &trace, &tick));
        gm_book_release(book, 77); /* no such tick */
    }
    CHECK_OK(gm_book_end(book, &trace));
    const gm_trace *known = gm_book_trace(book, trace);
    CHECK(known->n_runs == 2 && gm_book_n_traces(book) == 1);
    CHECK(known->ticks[0].outside_bytes == 40 && known->ticks[1].outside_bytes == 5);
    CHECK(known->ticks[0].until == 3 && known->ticks[1].until == 2);
    CHECK(known->ticks[2].until == 4); /* never released: to the end */
    CHECK(known->ticks[3].until == 4);
    gm_book_time(book, known->hash, 1, 2.0, false);
    gm_book_time(book, known->hash, 1, 0.5, false);
    gm_book_time(book, known->hash, 1, 1.0, false);
    gm_book_time(book, known->hash, 9, 1.0, false);
    gm_book_time(book, known->hash + 1, 0, 1.0, false);
    CHECK(gm_book_trace(book, trace)->ticks[1].seconds == 0.5F);
    gm_book_time(book, known->hash, 1, 3.0, true);
    CHECK(gm_book_trace(book, trace)->ticks[1].seconds == 3.0F);
    gm_book_time(book, known->hash, 1, 2.5, false);
    bool has_backward = false;
    CHECK(gm_book_count_timed(book, known->hash, true, &has_backward) == 1 && has_backward);
    CHECK(gm_book_count_timed(book, known->hash, true, &has_backward) == 2);
    CHECK(gm_book_count_timed(book, known->hash + 1, true, &has_backward) == 0);
    CHECK(known->n_timed[0] == 0 && known->n_timed[1] == 2);
    CHECK(gm_book_trace(book, trace)->ticks[1].seconds == 2.5F);
    CHECK(gm_book_trace(book, trace)->ticks[0].seconds == 0);
    /* Forgotten in the trace and in the pass that is open: only what comes counts. */
    CHECK_OK(gm_book_begin(book, true));
    CHECK_OK(gm_book_tick(book, GM_TICK_ENTER, 0, 90, &trace, &tick));
    gm_book_forget_outside(book);
    CHECK_OK(gm_book_tick(book, GM_TICK_ENTER, 1, 3, &trace, &tick));
    CHECK_OK(gm_book_tick(book, GM_TICK_TOUCH, 2, 0, &trace, &tick));
    CHECK_OK(gm_book_tick(book, GM_TICK_GRAD, 2, 0, &trace, &tick));
    CHECK_OK(gm_book_end(book, &trace));
    known = gm_book_trace(book, trace);
    CHECK(known->n_runs == 3 && known->ticks[0].outside_bytes == 0);
    CHECK(known->ticks[1].outside_bytes == 3 && known->ticks[1].seconds == 2.5F);
    gm_book_free(book);
}

static void test_ticks_outside_of_a_pass(void)
{
    gm_book *book;
    uint32_t trace, tick;
    CHECK_OK(gm_book_new(&book));
    CHECK(gm_book_tick(book, GM_TICK_ENTER, 0, 0, &trace, &tick) == GM_ERR_STATE);
    CHECK(trace == GM_NO_TRACE && tick == GM_NO_TICK);
    gm_book_release(book, 0);
    CHECK_OK(gm_book_end(book, &trace));
    CHECK(trace == GM_NO_TRACE);
    gm_book_free(book);
    gm_book_free(NULL);
}

/* The book keeps the traces that ran last; an index that is given anew is nobody's successor. */
static void test_book_is_bounded(void)
{
    gm_book *book;
    uint32_t n_followed;
    CHECK_OK(gm_book_new(&book));
    for (uint32_t k = 0; k < 3 * GM_TRACES_KEPT; k++) {
        step steps[2] = {{GM_TICK_ENTER, k}, {GM_TICK_ENTER, k}};
        step zero[2] = {{GM_TICK_ENTER, 0}, {GM_TICK_ENTER, 0}};
        (void)run(book, true, steps, 2, NULL);
        (void)run(book, true, zero, 2, &n_followed);
        CHECK(k == 0 || n_followed == 2); /* runs all the time, so it stays */
        CHECK(gm_book_n_traces(book) <= GM_TRACES_KEPT);
        for (uint32_t i = 0; i < gm_book_n_traces(book); i++) {
            const gm_trace *trace = gm_book_trace(book, i);
            CHECK(trace->next == GM_NO_TRACE || trace->next < gm_book_n_traces(book));
            CHECK(trace->next == GM_NO_TRACE || trace->ticks[0].id == 0 ||
                  gm_book_trace(book, trace->next)->ticks[0].id == 0);
        }
    }
    CHECK(gm_book_n_traces(book) == GM_TRACES_KEPT);
    gm_book_free(book);
}

/* Times that come after their trace has made room for another are nobody's, and those of a trace that came back are
 * its own, whatever index it has now. */
static void test_late_times(void)
{
    gm_book *book;
    CHECK_OK(gm_book_new(&book));
    step timed[2] = {{GM_TICK_ENTER, 0}, {GM_TICK_TOUCH, 7}};
    uint32_t index = run(book, true, timed, 2, NULL), newer = GM_NO_TRACE;
    uint64_t hash = gm_book_trace(book, index)->hash;
    for (uint32_t k = 1; k <= GM_TRACES_KEPT; k++) {
        newer = run(book, true, (step[]){{GM_TICK_ENTER, k}, {GM_TICK_TOUCH, k}}, 2, NULL);
    }
    CHECK(newer == index && gm_book_trace(book, index)->hash != hash); /* the 65th has its place */
    gm_book_time(book, hash, 0, 1.0, false);
    for (uint32_t i = 0; i < gm_book_n_traces(book); i++) {
        CHECK(gm_book_trace(book, i)->ticks[0].seconds == 0);
    }
    uint32_t again = run(book, true, timed, 2, NULL);
    CHECK(again != index);
    gm_book_time(book, hash, 0, 1.0, false);
    CHECK(gm_book_trace(book, again)->ticks[0].seconds == 1.0F);
    CHECK(gm_book_trace(book, index)->ticks[0].seconds == 0);
    gm_book_free(book);
}

/* While a known trace is followed nothing is allocated. */
static void test_following_allocates_nothing(void)
{
    gm_book *book;
    uint32_t trace, tick;
    CHECK_OK(gm_book_new(&book));
    for (int pass = 0; pass < 3; pass++) {
        CHECK_OK(gm_book_begin(book, true));
        size_t before = mallinfo2().uordblks;
        for (uint32_t i = 0; i < 5000; i++) {
            CHECK_OK(gm_book_tick(book, GM_TICK_ENTER, i, i, &trace, &tick));
            gm_book_release(book, tick);
            CHECK(pass == 0 || trace == 0);
        }
        CHECK(pass == 0 || mallinfo2().uordblks == before);
        CHECK_OK(gm_book_end(book, NULL));
        CHECK(pass == 0 || mallinfo2().uordblks == before);
    }
    gm_book_free(book);
}

int main(void)
{
    test_first_pass_is_recorded_second_followed();
    test_random_passes();
    test_early_end();
    test_guess();
    test_measures();
    test_ticks_outside_of_a_pass();
    test_book_is_bounded();
    test_late_times();
    test_following_allocates_nothing();
    printf("test_trace: ok\n");
    return 0;
}
