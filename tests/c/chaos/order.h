/* order.h - happens-before per byte range: finds two accesses that nothing orders, whatever order they
 * happened to run in.
 *
 * An actor does one thing after another: a stream, or the host.  What an actor does is numbered by its
 * ticks, from 1; a clock says of every actor how many of its ticks have certainly happened.  Access x happens
 * before an operation with clock c exactly when c.tick[x.actor] >= x.tick. */
#pragma once

#include "base/base.h"

enum { GM_ORDER_MAX_ACTORS = 32 };

typedef struct gm_clock {
    uint64_t tick[GM_ORDER_MAX_ACTORS];
} gm_clock;

/* clock becomes the later of both, actor by actor. */
void gm_clock_join(gm_clock *clock, const gm_clock *other);
/* Has everything that `other` knows of happened for `clock` too? */
bool gm_clock_covers(const gm_clock *clock, const gm_clock *other);

typedef struct gm_access {
    uint64_t tick;    /* of its actor; 0: no access */
    uint64_t number;  /* of the operation, for texts */
    uint64_t bytes;   /* of the whole access, for texts */
    const char *kind; /* static text: "copy_h2d" */
    uint32_t actor;
    bool is_write;
} gm_access;

typedef struct gm_conflict {
    bool is_found;
    gm_access earlier;   /* the first access that was noted and is not ordered before the new one */
    uint64_t begin, end; /* a run of bytes that both touch */
} gm_conflict;

typedef struct gm_order gm_order; /* opaque: who last wrote, and who has read since, per byte */

gm_status gm_order_new(gm_order **out);
void gm_order_free(gm_order *order); /* NULL is fine */

/* Notes an access to the bytes [begin, end) by an operation whose clock includes its own tick.  Two reads never
 * conflict.  *conflict says whether an earlier access is not ordered before this one. */
gm_status gm_order_note(gm_order *order, const gm_access *access, const gm_clock *clock,
                        uint64_t begin, uint64_t end, gm_conflict *conflict);
/* Forgets what happened before `floor`, which every later operation's clock must cover. */
void gm_order_forget(gm_order *order, const gm_clock *floor);
/* Runs of bytes with a history of their own: what the memory used grows with. */
size_t gm_order_n_spans(const gm_order *order);
