/* choice.h - what is chosen for each chunk, as a few dials and the memory there is give it.
 *
 * A choice (plan_impl.h) decides a plan; dials decide a choice.  The search turns dials, or changes
 * a choice by hand. */
#pragma once

#include "plan/plan_impl.h"

typedef struct gm_dials {         /* without padding: compared as bytes */
    uint32_t depth[GM_N_PIECES];  /* of the rings, in chunks */
    uint32_t blocks;              /* that may be taken */
    double host;                  /* share of the updates that are not resident, by parameters */
    double late_host, late_state; /* if immediate: of these put off to the next forward */
    double weights;               /* most that may be resident, a share */
    double states; /* share of the room beside weights and gradients that states may take */
    double first;  /* so many chunks, the first in use, have room for states before weights do */
    double kept;   /* share of the gathered weights that are kept whatever the rest gets */
    double speculated; /* gm_choice */
} gm_dials;

gm_status gm_choice_new(uint32_t n, gm_choice *out); /* to be freed even if it fails */
void gm_choice_free(gm_choice *choice);
void gm_choice_copy(uint32_t n, gm_choice *to, const gm_choice *from);

/* Whether the update can be at the gradient's tick: nothing of the pass uses the weights after
 * it. */
bool gm_may_be_early(const gm_problem *problem, uint32_t c);

/* Makes the choice that the dials give; *fits tells whether there is one.  *least_blocks becomes
 * what the smallest of all that were tried on the way would take, if that is less. */
gm_status gm_choose(const gm_problem *problem, const gm_dials *dials, gm_choice *choice,
                    uint64_t *least_blocks, bool *fits);
