/* order.c - a map from runs of bytes to who last wrote them and who has read them since.
 *
 * 1. Spans are ascending, not empty and apart from each other; bytes without a history have no span.
 * 2. A span holds at most one write, and at most one read of each actor: what happened before a later
 *    access of the span cannot be unordered with anything that is ordered behind that one, so it is dropped.
 * 3. Neighbours with equal histories are one span (after each note and forget): the number of spans depends on
 *    the ranges that are used, not on how often. */
#include "chaos/order.h"

#include <stdlib.h>
#include <string.h>

typedef struct history {
    gm_access write;
    uint32_t n_reads;
    gm_access reads[GM_ORDER_MAX_ACTORS];
} history;

typedef struct span {
    uint64_t begin, end;
    history *history; /* owned */
} span;

struct gm_order {
    span *spans; /* (n_spans,) */
    size_t n_spans, capacity;
};

void gm_clock_join(gm_clock *clock, const gm_clock *other)
{
    for (int a = 0; a < GM_ORDER_MAX_ACTORS; a++) {
        clock->tick[a] = other->tick[a] > clock->tick[a] ? other->tick[a] : clock->tick[a];
    }
}

bool gm_clock_covers(const gm_clock *clock, const gm_clock *other)
{
    for (int a = 0; a < GM_ORDER_MAX_ACTORS; a++) {
        if (other->tick[a] > clock->tick[a]) {
            return false;
        }
    }
    return true;
}

gm_status gm_order_new(gm_order **out)
{
    return GM_NEW(*out, "host memory: no room for a map's own %zu bytes");
}

void gm_order_free(gm_order *order)
{
    if (!order) {
        return;
    }
    for (size_t i = 0; i < order->n_spans; i++) {
        free(order->spans[i].history);
    }
    free(order->spans);
    free(order);
}

size_t gm_order_n_spans(const gm_order *order)
{
    return order->n_spans;
}

/* The first span that ends beyond `at`. */
static size_t span_at(const gm_order *order, uint64_t at)
{
    size_t low = 0, high = order->n_spans;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (order->spans[middle].end > at) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

/* A new span before spans[at], with a copy of `from`, or with no history yet. */
static gm_status insert(gm_order *order, size_t at, uint64_t begin, uint64_t end,
                        const history *from)
{
    GM_TRY(GM_GROW(order->spans, order->n_spans, order->capacity,
                   "host memory: no room for a map of %zu spans"));
    history *own;
    GM_TRY(GM_NEW(own, "host memory: no room for a span's %zu bytes"));
    if (from) {
        *own = *from;
    }
    memmove(&order->spans[at + 1], &order->spans[at],
            (order->n_spans - at) * sizeof order->spans[0]);
    order->spans[at] = (span){begin, end, own};
    order->n_spans++;
    return GM_OK;
}

/* No span crosses `at` afterwards. */
static gm_status split(gm_order *order, uint64_t at)
{
    size_t i = span_at(order, at);
    if (i == order->n_spans || order->spans[i].begin >= at) {
        return GM_OK;
    }
    GM_TRY(insert(order, i, order->spans[i].begin, at, order->spans[i].history));
    order->spans[i + 1].begin = at;
    return GM_OK;
}

static bool is_same_access(const gm_access *a, const gm_access *b)
{
    return a->tick == b->tick && a->actor == b->actor;
}

static bool is_same_history(const history *a, const history *b)
{
    bool is_same = is_same_access(&a->write, &b->write) && a->n_reads == b->n_reads;
    for (uint32_t i = 0; is_same && i < a->n_reads; i++) {
        is_same = is_same_access(&a->reads[i], &b->reads[i]);
    }
    return is_same;
}

/* Joins equal neighbours and drops spans without a history among spans[first..last]. */
static void tidy(gm_order *order, size_t first, size_t last)
{
    size_t kept = first;
    for (size_t i = first; i <= last && i < order->n_spans; i++) {
        span *now = &order->spans[i], *before = kept > 0 ? &order->spans[kept - 1] : NULL;
        bool is_empty = now->history->write.tick == 0 && now->history->n_reads == 0;
        bool is_joined = !is_empty && before && before->end == now->begin &&
                         is_same_history(before->history, now->history);
        if (is_joined) {
            before->end = now->end;
        }
        if (is_joined || is_empty) {
            free(now->history);
        } else {
            order->spans[kept++] = *now;
        }
    }
    size_t rest = last + 1 < order->n_spans ? last + 1 : order->n_spans;
    memmove(&order->spans[kept], &order->spans[rest],
            (order->n_spans - rest) * sizeof order->spans[0]);
    order->n_spans -= rest - kept;
}

static bool is_before(const gm_access *access, const gm_clock *clock)
{
    return clock->tick[access->actor] >= access->tick;
}

static void drop_reads(history *h, const gm_clock *clock)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < h->n_reads; i++) {
        if (!is_before(&h->reads[i], clock)) {
            h->reads[kept++] = h->reads[i];
        }
    }
    h->n_reads = kept;
}

static void find_conflict(const span *s, const gm_access *access, const gm_clock *clock,
                          gm_conflict *out)
{
    const gm_access *earlier = is_before(&s->history->write, clock) ? NULL : &s->history->write;
    for (uint32_t i = 0; access->is_write && !earlier && i < s->history->n_reads; i++) {
        earlier = is_before(&s->history->reads[i], clock) ? NULL : &s->history->reads[i];
    }
    if (!earlier) {
        return;
    }
    if (out->is_found && out->end == s->begin && is_same_access(&out->earlier, earlier)) {
        out->end = s->end;
    } else if (!out->is_found) {
        *out = (gm_conflict){true, *earlier, s->begin, s->end};
    }
}

static void add(history *h, const gm_access *access, const gm_clock *clock)
{
    if (access->is_write) {
        h->write = *access;
        h->n_reads = 0;
        return;
    }
    drop_reads(h, clock); /* an actor's own earlier read among them: no actor is there twice */
    GM_ASSERT(h->n_reads < GM_ORDER_MAX_ACTORS);
    h->reads[h->n_reads++] = *access;
}

gm_status gm_order_note(gm_order *order, const gm_access *access, const gm_clock *clock,
                        uint64_t begin, uint64_t end, gm_conflict *conflict)
{
    *conflict = (gm_conflict){0};
    GM_ASSERT(access->tick > 0 && access->actor < GM_ORDER_MAX_ACTORS);
    GM_ASSERT(is_before(access, clock) && begin <= end);
    if (begin >= end) {
        return GM_OK;
    }
    GM_TRY(split(order, begin));
    GM_TRY(split(order, end));
    size_t first = span_at(order, begin), i = first;
    for (uint64_t at = begin; at < end; i++) {
        bool is_gap = i == order->n_spans || order->spans[i].begin > at;
        if (is_gap) {
            bool is_last = i == order->n_spans || order->spans[i].begin > end;
            GM_TRY(insert(order, i, at, is_last ? end : order->spans[i].begin, NULL));
        }
        span *s = &order->spans[i];
        find_conflict(s, access, clock, conflict);
        add(s->history, access, clock);
        at = s->end;
    }
    tidy(order, first, i); /* i: the neighbour above may have become equal */
    return GM_OK;
}

void gm_order_forget(gm_order *order, const gm_clock *floor)
{
    for (size_t i = 0; i < order->n_spans; i++) {
        history *h = order->spans[i].history;
        if (is_before(&h->write, floor)) {
            h->write = (gm_access){0};
        }
        drop_reads(h, floor);
    }
    if (order->n_spans > 0) {
        tidy(order, 0, order->n_spans - 1);
    }
}
