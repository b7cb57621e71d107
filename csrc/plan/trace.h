/* trace.h - what passes did, tick by tick, and which known pass the present one follows.  Pure.
 *
 * A pass is a forward with the backward that belongs to it, or a forward alone.  A tick is a unit
 * entered, a chunk needed by a backward node, or a chunk whose last gradient of the pass has
 * arrived.  The book keeps one trace for each distinct sequence of ticks, and remembers which trace
 * came after which.
 *
 * Threads: one caller at a time (the engine's lock).  While a known trace is followed nothing
 * allocates. */
#pragma once

#include "base/base.h"

typedef enum gm_tick_kind {
    GM_TICK_ENTER = 0, /* id: unit */
    GM_TICK_TOUCH = 1, /* id: chunk */
    GM_TICK_GRAD = 2   /* id: chunk */
} gm_tick_kind;

typedef struct gm_tick {
    uint32_t kind, id;
    uint32_t until;       /* what the tick takes is in use during ticks [this, until) */
    float seconds;        /* compute from this tick to the next one; 0: not measured yet */
    size_t outside_bytes; /* most that others of this process held there up to the next tick */
} gm_tick;

typedef struct gm_trace {
    gm_tick *ticks; /* (n,) */
    uint32_t n;
    uint32_t next;       /* the trace that last came after this one; GM_NO_TRACE: none yet */
    bool is_grad;        /* gradients were enabled in its forward */
    bool has_backward;   /* has a TOUCH or GRAD tick */
    uint64_t hash;       /* FNV-1a over is_grad and every (kind, id) */
    uint64_t n_runs;     /* passes that followed it */
    uint32_t n_timed[2]; /* of them, timed on demand and under a plan */
    uint64_t last_run;
} gm_trace;

#define GM_NO_TRACE    UINT32_MAX
#define GM_NO_TICK     UINT32_MAX
#define GM_TRACES_KEPT 64 /* the least recently run trace makes room for a new one */

typedef struct gm_book gm_book; /* opaque */

gm_status gm_book_new(gm_book **out);
void gm_book_free(gm_book *book); /* NULL is fine */

/* A pass begins; one that is open ends.  The guess is the trace that came after the last one if its
 * is_grad agrees, else the one with this is_grad that ran last. */
gm_status gm_book_begin(gm_book *book, bool is_grad);

/* A tick of the open pass.  *out_trace is the trace that the pass follows up to and with this tick
 * (when the guess is wrong, another trace with the same beginning), or GM_NO_TRACE while a new one
 * is being recorded; *out_tick is the tick's position in the pass.  Maxima of outside_bytes over
 * runs are kept.  An allocation that fails (GM_ERR_NOMEM) leaves the pass unrecorded, and later
 * ticks of it give GM_NO_TRACE. */
gm_status gm_book_tick(gm_book *book, gm_tick_kind kind, uint32_t id, size_t outside_bytes,
                       uint32_t *out_trace, uint32_t *out_tick);
/* Forgets every outside_bytes of traces and of the open pass: what was held is held no more. */
void gm_book_forget_outside(gm_book *book);
/* What tick `tick` of the open pass has taken is released now (before the next tick): sets its
 * `until` while recording, and keeps the maximum over runs. */
void gm_book_release(gm_book *book, uint32_t tick);
/* The pass is over: a recorded one becomes a trace (or is found to equal one).  *out_trace (may be
 * NULL) is its index, GM_NO_TRACE for a pass without ticks or without room.  Unreleased ticks end
 * at n. */
gm_status gm_book_end(gm_book *book, uint32_t *out_trace);

uint32_t gm_book_n_traces(const gm_book *book);
/* NULL: no such trace.  Valid until the next begin or end. */
const gm_trace *gm_book_trace(const gm_book *book, uint32_t index);
/* A run of the trace with this hash was timed; how many by now, in *out_has_backward whether it is
 * one to plan for. 0: the book has it no more. */
uint32_t gm_book_count_timed(gm_book *book, uint64_t hash, bool is_planned, bool *out_has_backward);
/* Sets the measured seconds of one tick of the trace with this hash; the least counts of all since
 * the last one that replaces.  Nothing when the book has the trace no more: its index may be
 * another one's by now. */
void gm_book_time(gm_book *book, uint64_t hash, uint32_t tick, double seconds, bool replaces);
/* The trace that is followed now, or GM_NO_TRACE. */
uint32_t gm_book_following(const gm_book *book);
