/* plan_impl.h - what the plan's own files share: the problem as read from the traces, a plan under
 * construction, and the steps from one to the other.  No other file includes it, but for the tests
 * of the plan. */
#pragma once

#include "plan/plan.h"

/* A chunk's weights are needed in ticks [begin, end). */
typedef struct gm_use {
    uint32_t chunk, begin, end;
} gm_use;

/* What a trace asks for, whatever the plan. */
typedef struct gm_course {
    const gm_trace *trace;
    uint32_t n, n_runs, backward; /* its first tick of backward; n: none */
    gm_use *uses;                 /* (n_uses,) by begin; those of one chunk do not overlap */
    uint32_t n_uses;
    gm_use *opens; /* (n_opens,) by begin: a gradient grows from begin on, complete at end - 1 */
    uint32_t n_opens;
    gm_use *sums;    /* (n_opens,) by begin: GM_GRAD is in use; later than opens where ranks sum */
    uint32_t *first; /* (n_chunks,) tick of the first use; n: none */
    uint32_t *grad;  /* (n_chunks,) tick at which its gradient is complete; GM_NO_TICK: none */
    /* (n_chunks,) the first tick at which its update can run: its gradient is complete, and no use
     * follows, and then n_behind others are complete (what speculates); n: none */
    uint32_t *ready;
} gm_course;

typedef struct gm_problem {
    const gm_plan_input *input;
    uint32_t n; /* chunks */
    gm_course *courses;
    uint32_t n_courses, main; /* main: the course that decides the order of everything */
    uint32_t most_ticks;      /* of a course */
    uint32_t n_passes;        /* with backward, in one step */
    uint32_t n_behind;    /* gradients that are complete between a chunk's and its speculation */
    uint32_t *order;      /* (n,) chunks by first use in main */
    uint32_t *grad_order; /* (n,) chunks by gradient's tick in main; those without at the end */
    bool *is_trained;     /* (n,) has states, and a gradient in some course */
    bool has_gathered, has_unreduced; /* some chunk has such bytes */
    uint32_t n_blocks;                /* available */
} gm_problem;

/* Operations of one trace. */
typedef struct gm_schedule {
    uint64_t hash;
    uint32_t n_ticks;
    uint32_t *begin; /* (n_ticks + 1,) */
    gm_op *ops;
} gm_schedule;

struct gm_plan {
    uint32_t n, n_blocks, n_behind;
    uint8_t *class_of;          /* (n,) */
    bool *is_late;              /* (n,) updated under the next pass's forward */
    bool *is_speculated;        /* (n,) of the late ones */
    gm_place *places;           /* (n, GM_N_PIECES) */
    uint32_t *order;            /* (n,) of updates */
    uint32_t ring[GM_N_PIECES]; /* blocks */
    gm_schedule *schedules;
    uint32_t n_schedules;
    gm_plan_info info;
};

/* What decides a plan beside the problem. */
typedef struct gm_chosen { /* of a chunk; without padding: compared as bytes */
    uint8_t class_of;
    bool is_late, is_grad_resident, is_kept; /* kept: its gathered weights have own blocks */
} gm_chosen;

typedef struct gm_choice {
    gm_chosen *of;               /* (n,) */
    uint32_t depth[GM_N_PIECES]; /* chunks in each ring beyond the most in use at once */
    double speculated; /* share of the updates that are not resident, the last in use first */
} gm_choice;

static inline bool gm_is_streamed(uint32_t cls)
{
    return cls == GM_CLASS_S2 || cls == GM_CLASS_C2;
}
static inline bool gm_is_on_host(uint32_t cls)
{
    return cls == GM_CLASS_C1 || cls == GM_CLASS_C2;
}
static inline bool gm_is_state_streamed(uint32_t cls)
{
    return cls == GM_CLASS_S1 || cls == GM_CLASS_S2;
}

static inline bool gm_is_gathered(const gm_plan_input *input, uint32_t chunk)
{
    return input->chunks[chunk].bytes[GM_GATHERED] > 0;
}
static inline bool gm_is_reduced(const gm_plan_input *input, uint32_t chunk)
{
    return input->chunks[chunk].bytes[GM_UNREDUCED] > 0;
}

/* course.c */
gm_status gm_problem_new(const gm_plan_input *input, uint32_t n_behind, gm_problem *out);
void gm_problem_free(gm_problem *problem);
gm_status gm_course_new(const gm_plan_input *input, const gm_trace *trace, uint32_t n_runs,
                        uint32_t n_behind, gm_course *out);
void gm_course_free(gm_course *course);
int gm_by_begin(const void *left, const void *right); /* of gm_use, for qsort */
/* Sorts chunks by a key (beyond `limit`: as `limit`), equal ones in the order of `from`; NULL: by
 * number. */
gm_status gm_sort_chunks(const uint32_t *key, uint32_t limit, const uint32_t *from, uint32_t n,
                         uint32_t *out);

/* plan.c: a plan without places; the schedule for a trace, or NULL. */
gm_status gm_plan_alloc(const gm_problem *problem, gm_plan **out);
const gm_schedule *gm_plan_find(const gm_plan *plan, uint64_t trace_hash);

/* place.c: places every piece as chosen; weights and gradients that cannot share a ring become
 * resident. plan->n_blocks may exceed what is available. */
gm_status gm_plan_place_all(const gm_problem *problem, const gm_choice *choice, gm_plan *plan);

/* gather.c: what a course asks of GM_WEIGHT under a plan in which the gathered weights have their
 * places, and when it gathers.  Without gathered weights that is what it asks of weights. */
typedef struct gm_needs {
    gm_use *uses; /* (n_uses,) by begin; those of updates at the gradient's tick included */
    uint32_t n_uses;
    uint32_t *first; /* (n_chunks,) tick of the first use; n: none */
    gm_use *gathers; /* (n_gathers,) at the tick `begin`, in order, for the use at the tick `end` */
    uint32_t n_gathers;
    uint32_t misfit; /* a chunk whose gathered place is taken when it is needed; GM_NO_TICK: none */
} gm_needs;
gm_status gm_needs_new(const gm_plan_input *input, const gm_plan *plan, const gm_course *course,
                       gm_needs *out);
void gm_needs_free(gm_needs *needs);

/* schedule.c */
gm_status gm_schedule_new(const gm_problem *problem, const gm_plan *plan, const gm_course *course,
                          gm_schedule *out);
void gm_schedule_free(gm_schedule *schedule);

/* time.c: predicts the step; fills plan->info, by bound.c. */
gm_status gm_plan_time(const gm_problem *problem, gm_plan *plan);
typedef struct gm_load { /* what a part of a step asks of each resource */
    double compute, in, out, host, comm;
} gm_load;
void gm_plan_bound(const gm_problem *problem, const gm_load *loads, double step, gm_plan *plan);

/* choice.c: one plan for a choice; *out is NULL (and GM_OK) when it takes more blocks than there
 * are. */
gm_status gm_plan_for_choice(const gm_problem *problem, const gm_choice *choice, gm_plan **out);
/* search.c: the best plan found, schedules of all courses included. */
uint64_t gm_plan_n_ops(const gm_plan *plan); /* of all its schedules */
gm_status gm_plan_search(const gm_problem *problem, gm_plan **out);
