/* asked.h - what the time model has said about each choice that it was asked about.
 *
 * The search comes back to choices: with few chunks, most ways to turn the dials give one that it
 * has had.
 *
 * 1. Choices are compared in full, so an answer is the one that asking again would give. */
#pragma once

#include "plan/plan_impl.h"

typedef struct gm_worth { /* what decides which of two plans is better */
    bool has_plan;        /* false: the choice takes more blocks than there are */
    double step_seconds, comm_seconds;
    size_t traffic; /* bytes over the bus, both ways */
    uint64_t n_blocks, n_ops;
} gm_worth;

typedef struct gm_asked { /* zeros: nothing yet */
    uint32_t n;           /* chunks of the choices */
    size_t n_answers, capacity;
    uint8_t *keys;    /* (capacity, what is chosen, as bytes) */
    gm_worth *worths; /* (capacity,) */
    size_t *table;    /* (2 * capacity,) the answer's number and one; 0: none */
    uint8_t *key;     /* of the choice that was looked up last */
} gm_asked;

gm_worth gm_worth_of(const gm_plan *plan); /* plan may be NULL */

/* What was said about this choice, valid until the next call; NULL if it was not asked about. */
gm_status gm_asked_find(gm_asked *asked, uint32_t n, const gm_choice *choice, const gm_worth **out);
/* Remembers what was said about the choice that was looked up last. */
gm_status gm_asked_add(gm_asked *asked, const gm_worth *worth);
void gm_asked_clear(gm_asked *asked); /* frees it; nothing was asked */
