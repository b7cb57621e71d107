/* trace.c - the book of traces; see trace.h for what a trace is.
 *
 * 1. A pass writes its ticks into one run record, whether it is followed or new, and touches no
 *    trace before it ends.
 * 2. The record has room for the longest known trace, so a followed pass allocates nothing.
 * 3. While a trace is followed, the ticks so far are equal to its first ticks.
 * 4. No two traces are equal in is_grad and ticks. */
#include "plan/trace.h"

#include <stdlib.h>
#include <string.h>

struct gm_book {
    gm_trace traces[GM_TRACES_KEPT];
    uint32_t n_traces;
    uint32_t last;     /* the trace of the last pass that ended */
    uint64_t n_passes; /* ended so far: the clock of last_run */
    gm_tick *run;      /* (capacity,) what the open pass has done */
    uint32_t capacity, n_run;
    uint64_t hash;      /* of the open pass so far */
    uint32_t following; /* GM_NO_TRACE: recording */
    bool is_open, is_grad, has_backward;
    bool is_lost; /* the record had no room: the pass is not kept */
};

static uint64_t fnv1a(uint64_t hash, uint32_t value)
{
    for (int i = 0; i < 4; i++) {
        hash = (hash ^ ((value >> (8 * i)) & 0xff)) * UINT64_C(0x100000001b3);
    }
    return hash;
}

gm_status gm_book_new(gm_book **out)
{
    gm_book *book;
    GM_TRY(GM_NEW(book, "host: no room for the book of traces (%zu bytes)"));
    book->last = book->following = GM_NO_TRACE;
    *out = book;
    return GM_OK;
}

void gm_book_free(gm_book *book)
{
    if (book) {
        for (uint32_t i = 0; i < book->n_traces; i++) {
            free(book->traces[i].ticks);
        }
        free(book->run);
        free(book);
    }
}

static bool is_same(const gm_tick *a, const gm_tick *b)
{
    return a->kind == b->kind && a->id == b->id;
}

/* Whether the first n ticks of a trace are those of the open pass. */
static bool has_begun_like(const gm_trace *trace, const gm_book *book, uint32_t n)
{
    if (trace->is_grad != book->is_grad || trace->n < n) {
        return false;
    }
    for (uint32_t i = n; i-- > 0;) { /* traces differ late rather than early */
        if (!is_same(&trace->ticks[i], &book->run[i])) {
            return false;
        }
    }
    return true;
}

/* The latest trace of the open pass's kind that begins with all its ticks, the newest included. */
static uint32_t find_latest(const gm_book *book)
{
    uint32_t best = GM_NO_TRACE;
    for (uint32_t i = 0; i < book->n_traces; i++) {
        const gm_trace *trace = &book->traces[i];
        if ((best == GM_NO_TRACE || trace->last_run > book->traces[best].last_run) &&
            has_begun_like(trace, book, book->n_run)) {
            best = i;
        }
    }
    return best;
}

gm_status gm_book_begin(gm_book *book, bool is_grad)
{
    gm_status status = book->is_open ? gm_book_end(book, NULL) : GM_OK;
    book->is_open = true;
    book->is_grad = is_grad;
    book->has_backward = book->is_lost = false;
    book->n_run = 0;
    book->hash = fnv1a(UINT64_C(0xcbf29ce484222325), is_grad);
    uint32_t guess = book->last == GM_NO_TRACE ? GM_NO_TRACE : book->traces[book->last].next;
    if (guess == GM_NO_TRACE || book->traces[guess].is_grad != is_grad) {
        guess = find_latest(book);
    }
    book->following = guess;
    return status;
}

static gm_status make_room(gm_book *book)
{
    if (book->n_run < book->capacity) {
        return GM_OK;
    }
    uint32_t capacity = book->capacity ? 2 * book->capacity : 256;
    gm_tick *run =
        book->capacity < GM_NO_TICK / 2 ? realloc(book->run, (size_t)capacity * sizeof *run) : NULL;
    if (!run) {
        book->is_lost = true;
        book->following = GM_NO_TRACE;
        return GM_FAIL(GM_ERR_NOMEM, "host: no room for a pass of more than %u ticks",
                       book->capacity);
    }
    book->run = run;
    book->capacity = capacity;
    return GM_OK;
}

gm_status gm_book_tick(gm_book *book, gm_tick_kind kind, uint32_t id, size_t outside_bytes,
                       uint32_t *out_trace, uint32_t *out_tick)
{
    *out_trace = GM_NO_TRACE;
    *out_tick = GM_NO_TICK;
    GM_FAIL_IF(!book->is_open, GM_ERR_STATE, "trace: a tick (kind %d, id %u) outside of a pass",
               (int)kind, id);
    if (book->is_lost) {
        return GM_OK;
    }
    GM_TRY(make_room(book));
    uint32_t position = book->n_run++;
    /* No unit takes a gradient that is complete: its tick ends at once. */
    uint32_t until = kind == GM_TICK_GRAD ? position + 1 : GM_NO_TICK;
    book->run[position] = (gm_tick){(uint32_t)kind, id, until, 0, outside_bytes};
    book->hash = fnv1a(fnv1a(book->hash, (uint32_t)kind), id);
    book->has_backward |= kind != GM_TICK_ENTER;
    if (book->following != GM_NO_TRACE) {
        const gm_trace *trace = &book->traces[book->following];
        if (position >= trace->n || !is_same(&trace->ticks[position], &book->run[position])) {
            book->following = find_latest(book);
        }
    }
    *out_trace = book->following;
    *out_tick = position;
    return GM_OK;
}

void gm_book_forget_outside(gm_book *book)
{
    for (uint32_t t = 0; t < book->n_traces; t++) {
        for (uint32_t i = 0; i < book->traces[t].n; i++) {
            book->traces[t].ticks[i].outside_bytes = 0;
        }
    }
    for (uint32_t i = 0; i < book->n_run; i++) {
        book->run[i].outside_bytes = 0;
    }
}

void gm_book_release(gm_book *book, uint32_t tick)
{
    if (book->is_open && tick < book->n_run) {
        book->run[tick].until = book->n_run;
    }
}

/* The run record's maxima go into the trace that it equals. */
static void merge_run(const gm_book *book, gm_trace *trace)
{
    for (uint32_t i = 0; i < trace->n; i++) {
        gm_tick *known = &trace->ticks[i];
        const gm_tick *seen = &book->run[i];
        known->until = seen->until > known->until ? seen->until : known->until;
        if (seen->outside_bytes > known->outside_bytes) {
            known->outside_bytes = seen->outside_bytes;
        }
    }
}

/* An index for a new trace: a free one, or that of the trace that has not run for longest. */
static uint32_t free_index(gm_book *book)
{
    if (book->n_traces < GM_TRACES_KEPT) {
        return book->n_traces++;
    }
    uint32_t oldest = 0;
    for (uint32_t i = 1; i < GM_TRACES_KEPT; i++) {
        if (book->traces[i].last_run < book->traces[oldest].last_run) {
            oldest = i;
        }
    }
    for (uint32_t i = 0; i < GM_TRACES_KEPT; i++) {
        if (book->traces[i].next == oldest) {
            book->traces[i].next = GM_NO_TRACE;
        }
    }
    book->last = book->last == oldest ? GM_NO_TRACE : book->last;
    free(book->traces[oldest].ticks);
    return oldest;
}

static gm_status keep_run(gm_book *book, uint32_t *out)
{
    gm_tick *ticks = malloc(book->n_run * sizeof *ticks);
    GM_FAIL_IF(!ticks, GM_ERR_NOMEM, "host: no room to keep a trace of %u ticks", book->n_run);
    memcpy(ticks, book->run, book->n_run * sizeof *ticks);
    *out = free_index(book);
    book->traces[*out] = (gm_trace){.ticks = ticks,
                                    .n = book->n_run,
                                    .next = GM_NO_TRACE,
                                    .is_grad = book->is_grad,
                                    .has_backward = book->has_backward,
                                    .hash = book->hash};
    return GM_OK;
}

static void close_run(gm_book *book)
{
    book->is_open = false;
    book->following = GM_NO_TRACE;
    book->n_run = 0;
}

gm_status gm_book_end(gm_book *book, uint32_t *out_trace)
{
    uint32_t found = GM_NO_TRACE;
    if (out_trace) {
        *out_trace = GM_NO_TRACE;
    }
    if (!book->is_open || book->is_lost || book->n_run == 0) {
        close_run(book);
        return GM_OK;
    }
    for (uint32_t i = 0; i < book->n_run; i++) {
        if (book->run[i].until == GM_NO_TICK) {
            book->run[i].until = book->n_run;
        }
    }
    for (uint32_t i = 0; i < book->n_traces && found == GM_NO_TRACE; i++) {
        const gm_trace *trace = &book->traces[i];
        if (trace->n == book->n_run && trace->hash == book->hash &&
            has_begun_like(trace, book, book->n_run)) {
            found = i;
        }
    }
    gm_status status = GM_OK;
    if (found != GM_NO_TRACE) {
        merge_run(book, &book->traces[found]);
    } else {
        status = keep_run(book, &found);
    }
    close_run(book);
    if (status == GM_OK) {
        gm_trace *trace = &book->traces[found];
        trace->n_runs++;
        trace->last_run = ++book->n_passes;
        if (book->last != GM_NO_TRACE) {
            book->traces[book->last].next = found;
        }
        book->last = found;
        if (out_trace) {
            *out_trace = found;
        }
    }
    return status;
}

uint32_t gm_book_n_traces(const gm_book *book)
{
    return book->n_traces;
}

const gm_trace *gm_book_trace(const gm_book *book, uint32_t index)
{
    return index < book->n_traces ? &book->traces[index] : NULL;
}

uint32_t gm_book_count_timed(gm_book *book, uint64_t hash, bool is_planned, bool *out_has_backward)
{
    for (uint32_t i = 0; i < book->n_traces; i++) {
        gm_trace *trace = &book->traces[i];
        if (trace->hash == hash) {
            *out_has_backward = trace->has_backward;
            return ++trace->n_timed[is_planned];
        }
    }
    return 0;
}

void gm_book_time(gm_book *book, uint64_t hash, uint32_t tick, double seconds, bool replaces)
{
    for (uint32_t i = 0; i < book->n_traces; i++) {
        const gm_trace *trace = &book->traces[i];
        if (trace->hash == hash && tick < trace->n && seconds > 0) {
            float *known = &trace->ticks[tick].seconds;
            bool is_least = !(*known > 0 && (double)*known < seconds);
            *known = replaces || is_least ? (float)seconds : *known;
        }
    }
}

uint32_t gm_book_following(const gm_book *book)
{
    return book->following;
}
