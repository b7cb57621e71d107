/* engine_impl.h - what the engine's files share: its body and the helpers that each offers the
 * others. Everything here expects the engine's lock to be held.
 *
 * Above the length budget because the engine is one state behind one lock. */
#pragma once

#include <pthread.h>
#include <stdatomic.h>

#include "memory/chunk.h"
#include "engine/engine.h"
#include "device/hostmem.h"
#include "plan/layout.h"
#include "plan/plan.h"
#include "plan/trace.h"

/* The gradient of a parameter; gradient.c draws the moves. */
typedef enum gm_grad_state {
    GM_GRAD_NONE,
    GM_GRAD_ARRIVED, /* GM_UNREDUCED holds it: it waits for its sum over ranks */
    GM_GRAD_GROWING, /* GM_GRAD holds what was summed before, GM_UNREDUCED what is added to it */
    GM_GRAD_REDUCED, /* GM_GRAD holds it */
    GM_GRAD_USED_UP, /* an update inside a backward, or the step that it announced, has taken it */
    GM_N_GRAD_STATES
} gm_grad_state;

/* What sums[] holds for a parameter. */
typedef enum gm_sum_state {
    GM_SUM_STALE, /* nothing that a norm may count */
    GM_SUM_ZERO,  /* 0, which counts in no norm */
    GM_SUM_RIGHT, /* the sum of squares of the gradient */
} gm_sum_state;

typedef struct gm_param {
    gm_engine_param spec;
    gm_param_place place;
    /* This rank's part: elements [part_first, part_first + part_numel), at part_offset of the
     * shard. */
    uint64_t part_first, part_numel, part_offset;
    size_t state_offset; /* of its part's opaque states, in the chunk's piece */
    size_t state_bytes;
    gm_grad_state grad; /* written in gradient.c alone */
    gm_sum_state sum;
    uint64_t arrival; /* the pass in which the last gradient arrived */
    uint64_t sums; /* hash of the numbers of the reductions that brought it since the drop, or 0 */
    /* This rank's weights, and behind them their low parts, as the last update or the last master
     * written has left them; NULL: nobody has written weights since, or they were bf16 whose low
     * parts are all 0. */
    uint8_t *before;
    uint64_t n_found;  /* writes of the weight that comparison has found (watch.c) */
    uint32_t n_looks;  /* at uses inside units */
    uint64_t n_writes; /* of the weight that the engine knows of, updates left out (glance.c) */
    bool is_low_given; /* low parts were written since, for any weight whose master they can be */
} gm_param;

struct gm_lease {
    gm_engine *engine;
    gm_lease *next;
    uint32_t param;
    bool is_pinned;
    uint32_t tick;    /* of the open pass, the last that had taken the chunk; GM_NO_TICK: none */
    uint32_t born;    /* the tick of the beginning; GM_NO_TICK: the chunk was in use then */
    gm_stream stream; /* where its tensor is used */
    atomic_bool is_watched, is_ended;
    void *old;       /* the weight's bytes when last compared; NULL unless watched */
    bool is_glanced; /* its use is number `glance` of a page (glance.c) */
    int glance_turn;
    size_t glance;
};

/* What the gradients of a task are multiplied by. */
typedef enum gm_factor {
    GM_FACTOR_KNOWN, /* the factor of each range */
    /* The step's clip, read when the task runs: the host has not seen it (clip.c). */
    GM_FACTOR_LATE,
    GM_FACTOR_REDO, /* the same, and the task has nothing to do if that did not fire */
} gm_factor;

/* A task as a host call. */
typedef enum gm_run {
    GM_RUN_NONE,    /* not issued, or it has ended */
    GM_RUN_ISSUED,  /* it has not ended */
    GM_RUN_DROPPED, /* likewise, and its result is not wanted: it need not begin */
} gm_run;

/* One chunk's update in one step.  Two per chunk take turns, because the host may prepare a step
 * while the host update of the last one has not run yet; a third one is for what is speculated. */
typedef struct gm_task {
    gm_engine *engine;
    gm_adam_args args;
    gm_adam_from from;     /* of a speculation */
    gm_adam_range *ranges; /* (the chunk's parameters,) */
    size_t n_ranges;
    _Atomic gm_run run;
    gm_factor factor;
} gm_task;

/* The update of a chunk; update.c draws the moves. */
typedef enum gm_update_state {
    GM_UPDATE_NONE,    /* there is none, or it has been issued */
    GM_UPDATE_ARMED,   /* task[] is ready for the backward that brings the gradient */
    GM_UPDATE_PENDING, /* task[] waits to be issued */
    GM_N_UPDATE_STATES
} gm_update_state;

/* The update that a chunk's next step will probably be; speculation.c draws the moves. */
typedef enum gm_result_state {
    GM_RESULT_NONE,
    GM_RESULT_NUMBERED, /* task[GM_SPECULATED] may run */
    GM_RESULT_MADE,     /* it has run, or will */
    GM_N_RESULT_STATES
} gm_result_state;

/* How many of something a step has, as far as the steps before tell: the most, until some steps in
 * a row had fewer. */
typedef struct gm_habit {
    uint32_t now, most, n_fewer; /* since the last step; 0: not known yet; steps in a row */
} gm_habit;

/* The gathered weights of a chunk, as all ranks see them; see gathered.c. */
typedef enum gm_gathered_state {
    GM_GATHERED_NONE,
    GM_GATHERED_LEASED,  /* on the device as long as leases show them: no rank counts on them */
    GM_GATHERED_HELD,    /* on the device, for the next use too */
    GM_GATHERED_SPILLED, /* on the host, unused, where the device had no room */
    GM_GATHERED_ENDING,  /* in use, and gone with the last one */
    GM_GATHERED_OLD,     /* of weights that have changed since */
    GM_N_GATHERED_STATES
} gm_gathered_state;

typedef struct gm_chunk_state {
    uint32_t first_param, n_params; /* in engine->chunk_params */
    size_t opaque_bytes;            /* of the piece of states, behind low parts; on any rank */
    uint32_t n_arrived;             /* of them, gradients in this pass */
    bool is_late;                   /* some came after those that are usual, and are not summed */
    uint32_t n_held;                /* of them, gm_is_held */
    uint32_t n_unreduced;           /* of them, gm_is_unreduced */
    uint64_t unreduced_since;       /* the first of these, in the order of all */
    uint32_t first_tick, tick;      /* of the open pass, first and last that took it; GM_NO_TICK */
    gm_gathered_state gathered;     /* written in gathered.c alone */
    uint8_t *spilled;               /* these weights; NULL unless GM_GATHERED_SPILLED */
    uint32_t n_uses;                /* units and touches that have them pinned */
    uint64_t arrival;               /* the pass that n_arrived counts */
    uint64_t updated;               /* the pass whose backward has updated the chunk */
    atomic_ullong n_immediate;      /* updates inside a backward, so far */
    gm_update_state update;         /* written in update.c alone */
    gm_task task[3];                /* of even steps, of odd ones, GM_SPECULATED */
    gm_result_state result;         /* written in speculation.c alone */
    uint64_t seen[GM_N_OWN_PIECES]; /* versions of the pieces that the result was made of */
    gm_habit backwards;             /* that completed its gradient */
    gm_habit arrivals;              /* of gradients in one backward, see arrive.c */
} gm_chunk_state;

enum { GM_SPECULATED = 2 };

/* ---- what each file has of its own: no other file writes it (tests/house) ---- */

/* The small numbers on the device (sums.c). */
typedef struct gm_sums {
    /* In device memory: of parameters, and behind them those that gm_sums_total() begins. */
    gm_sumsq *there;
    gm_sumsq *home; /* the same, pinned host memory */
    gm_block *blocks;
    size_t n_blocks;
} gm_sums;

/* See timer.c. */
typedef struct gm_timed_tick {
    gm_event start, end; /* 0: not made yet */
    double issued, host; /* when the host issued the start; seconds until it did the end */
} gm_timed_tick;

typedef struct gm_tick_timer {
    gm_timed_tick *ticks; /* (capacity,) */
    size_t capacity;
    uint32_t n;    /* ticks of the pass that is being timed, or was and waits to be resolved */
    uint64_t hash; /* of its trace, which may leave the book before the times are resolved */
    bool is_on, is_open; /* times the present pass; a start has been recorded */
    bool is_planned;     /* that pass follows a plan, as far as it can */
    bool has_result;
} gm_tick_timer;

/* See clip.c.  By turn: of even steps and of odd ones. */
typedef struct gm_clips {
    gm_stream stream;
    gm_event there[2], home[2], used[2][2]; /* used: on the device, on the host */
    bool has_word[2], is_used[2];
    uint64_t step; /* that the last one was for; 0: there has been none */
    uint64_t n_waits;
} gm_clips;

typedef struct gm_ranks {
    gm_comm *shard_comm, *replica_comm; /* NULL: one rank */
    uint32_t n_shards, rank, n_replicas;
    gm_stream stream;   /* of every collective */
    gm_event summed;    /* the last norm's sum */
    gm_event wished[2]; /* of the last two wishes */
    uint64_t n_wishes, n_waits;
} gm_ranks;

typedef struct gm_glance { /* one use of a weight; places of its bytes in the page */
    uint32_t param;
    size_t before, after, bytes;
    uint64_t n_writes; /* of the weight, as it began */
} gm_glance;

typedef struct gm_glance_page {
    gm_glance *glances;
    size_t n, capacity, used; /* used: bytes */
    gm_stream stream;         /* of all its uses */
    gm_event end;
    bool is_gone; /* on its way home, behind `end` */
} gm_glance_page;

typedef struct gm_glances {
    uintptr_t there; /* (2, bytes) */
    uint8_t *home;   /* the same, pinned */
    size_t bytes, n_blocks;
    gm_block *blocks;
    gm_stream stream; /* of copies home */
    gm_glance_page pages[2];
    int turn; /* the page that is filled */
    uint32_t n_open;
    bool is_pinned, is_refused;
} gm_glances;

typedef struct gm_watch {
    gm_lease *leases;
    uint32_t n_pinned;     /* of them */
    atomic_bool has_ended; /* one of them may have ended since they were last processed */
    uint64_t n_walked;     /* looked at for that, so far */
} gm_watch;

typedef struct gm_room {
    size_t budget;
    size_t shed_limit; /* of blocks, until the next plan; SIZE_MAX: none */
    size_t (*outside_bytes)(void *context);
    void *outside_context;
    gm_plan *plan;                           /* followed; NULL: on demand */
    unsigned long long host_ns, host_params; /* of updates on the host, before it */
    bool wants_plan;
    char refusal[512]; /* see gm_engine_refusal */
    bool is_settled;   /* the homes that the plan does not need have gone */
    uint64_t n_plans, n_breaks;
} gm_room;

typedef struct gm_stay {
    bool *chunks;      /* (n_chunks,) those that stay on the device; NULL: none */
    size_t bytes;      /* of their blocks */
    size_t home_bytes; /* that the arena has addresses for, and never memory */
} gm_stay;

typedef struct gm_updates {
    gm_adam_range *ranges;            /* (3, n_params) behind the tasks */
    uint32_t n_pending, next_pending; /* chunks pending; where the search for the next one starts */
    bool is_armed;
    gm_stream stream, host_stream;
    atomic_ullong host_ns, host_params; /* of updates on the host, so far */
    double told_rate;                   /* see gm_engine_tell_host_rate; 0: their time is taken */
    atomic_ullong n_late;               /* that took back what a speculation had done, so far */
    atomic_int async_status;
} gm_updates;

typedef struct gm_weights {
    uint64_t n_gathers, gathered_bytes;
    /* With more ranks than one: the plan that orders collectives.  It is the plan that is followed,
     * unless this rank had to leave that. */
    gm_plan *collectives;
    uint32_t *owners; /* (its blocks,) chunk whose gathered weights are there, or GM_NO_OWNER */
} gm_weights;

typedef struct gm_gradients {
    atomic_ullong version; /* counts what comes and what is written */
    uint64_t n_reduces, reduced_bytes;
    size_t unreduced_bytes, unreduced_limit; /* of blocks: now, and at most */
    uint64_t n_unreduced;                /* chunks so far that gradients have begun to wait in */
    float divisor_before, divisor_after; /* of gradients, around the sum over ranks */
} gm_gradients;

/* A checkpoint that is being written. */
typedef struct gm_saving {
    pthread_mutex_t lock; /* of all this */
    pthread_cond_t changed;
    atomic_bool is_on;
    size_t limit, held; /* bytes of copies: at most, and now */
    gm_saving_use used;
    char failure[512];       /* "": none */
    struct gm_saved *chunks; /* (n_chunks,) */
} gm_saving;

typedef struct gm_call {
    gm_stream stream; /* of the caller's last call: where tensors that show chunks are used */
} gm_call;

/* What happened since the last step, for the next plan. */
typedef struct gm_runs {
    uint32_t trace[GM_TRACES_KEPT];
    uint64_t hash[GM_TRACES_KEPT];
    uint32_t count[GM_TRACES_KEPT];
    uint32_t n;
} gm_runs;

typedef struct gm_plan_inputs {
    gm_runs runs;
    gm_rates rates; /* as measured at start-up; of Adam on the host, as steps have shown since */
    bool is_tuned;  /* steps show it */
    double state_share;
    size_t slack_bytes, outside_peak_bytes;
} gm_plan_inputs;

typedef struct gm_planner_ranks {
    uint64_t common_hash; /* of `collectives` when all ranks had it; one rank's own may follow */
} gm_planner_ranks;

typedef struct gm_pass {
    gm_book *book;
    uint32_t *unit_tick; /* (n_units,) the tick at which the unit was entered last */
    bool is_open, is_grad, has_backward, is_following;
    bool is_refused; /* the last enter or touch found no room for this: */
    gm_tick_kind refused_kind;
    uint32_t refused_id;
    uint32_t next_op; /* of the tick, after one that found no room; GM_NO_OP: all were done */
    uint32_t first_unit, tick;
    uint64_t n, waits;
    uint64_t n_deviations, n_replay_waits;
} gm_pass;

typedef struct gm_touch { /* a chunk that is pinned for backward nodes */
    uint32_t chunk, tick;
    gm_stream stream; /* on which the pin will end */
} gm_touch;

typedef struct gm_units {
    uint32_t n_entered, n_touched;
    gm_touch *touched; /* (n_chunks,) */
    bool *is_touched;  /* (n_chunks,) */
} gm_units;

typedef struct gm_steps {
    uint64_t n;
    uint64_t n_calls;            /* the same on all ranks, armed or not: for labels */
    bool wants_immediate;        /* plans have updates inside the backward */
    bool is_late;                /* the last one takes its factor from clip.c */
    bool is_announced;           /* the coming step is the end of its backward */
    unsigned n_others, patience; /* steps in a row that were not as planned; that change the plan */
} gm_steps;

enum { GM_MOST_SPARE_ARENAS = 8 };

typedef struct gm_speculation {
    size_t host_budget, limit; /* of the host in all; of spares, SIZE_MAX: not found out yet */
    size_t divisor;            /* spares take such a part of what is left */
    gm_arena *arenas[GM_MOST_SPARE_ARENAS];
    uint32_t n_arenas;
    size_t bytes;                       /* of these */
    double seconds;                     /* that taking and pinning them took */
    bool is_wanted;                     /* plans may speculate */
    bool has_norm;                      /* was asked for since the last step */
    uint64_t open_step;                 /* whether it clipped is not known yet; 0: none */
    unsigned n_quiet, n_loud;           /* steps in a row that asked and did not clip; others */
    unsigned patience;                  /* so many of them change is_wanted */
    uint64_t n_made, n_taken, n_redone; /* chunks so far */
} gm_speculation;

typedef struct gm_arrivals {
    uint64_t n_waits;             /* for a norm, or for a gradient that it needs */
    bool wants_sums, has_repeats; /* of gradients, for their norm; a gradient came in parts */
    bool is_home_zero;            /* the sum of gradients at home is 0 there */
} gm_arrivals;

enum { GM_OPAQUE_TIMED = 64 };

typedef struct gm_timed_update {
    gm_event began, ended;
    double numel;
} gm_timed_update;

typedef struct gm_opaques {
    gm_opaque caller; /* run NULL: updates are Adam's */
    gm_timed_update timed[GM_OPAQUE_TIMED];
    uint32_t n_timed;
    bool is_timed_planned; /* those of a plan's passes */
    gm_event done;         /* the end of the last update */
    gm_stream stream;      /* which it is on, or which waits for it: of the next one */
    bool has_run;
    bool is_running; /* on `thread`, which has let the lock go */
    pthread_t thread;
    pthread_cond_t ended;
    atomic_ullong n_written; /* chunks whose gradients it has changed, so far */
} gm_opaques;

struct gm_engine {
    /* Made with the engine (life.c). */
    pthread_mutex_t lock;
    atomic_uint references;
    gm_device *device;
    gm_workers *workers;
    gm_layout *layout;
    gm_chunks *chunks;
    gm_piece shown; /* what tensors show: GM_WEIGHT or GM_GATHERED */
    gm_arena *arena;
    double arena_seconds; /* that taking and pinning it took */
    uint8_t *staging;     /* pinned, GM_STAGING_BYTES; NULL on the host device */
    gm_policy policy;
    bool is_grad_f32;
    gm_param *params; /* (n_params,) */
    uint32_t n_params;
    uint32_t *unit_chunks; /* chunk ids, unit after unit, each chunk once per unit */
    uint32_t *unit_begin;  /* (n_units + 1,) */
    uint32_t n_units;
    struct gm_names *names;
    gm_chunk_state *chunk_states; /* (n_chunks,) */
    uint32_t *chunk_params;       /* (n_params,) chunk after chunk */

    pid_t owner;    /* a forked child does not have the memory */
    gm_status dead; /* engine.c: GM_OK, or the first error inside a step */
    char dead_text[512];
    gm_timeline *timeline; /* view.c; NULL: off */

    /* Named as the files. */
    gm_sums sums;
    gm_tick_timer timer;
    gm_clips clip;
    gm_ranks ranks;
    struct gm_stage *stage; /* NULL: no chunk's states are streamed */
    gm_watch watch;
    gm_room room;
    gm_stay stay;
    gm_updates update;
    gm_opaques opaque;
    gm_glances glance;
    gm_weights weights;
    gm_gradients gradient;
    gm_saving saving;
    gm_call call;
    gm_plan_inputs inputs;
    gm_planner_ranks planner_ranks;
    gm_pass pass;
    gm_units unit;
    gm_steps step;
    gm_speculation speculation;
    gm_arrivals arrive;
};

/* With several ranks gradients go through GM_UNREDUCED. */
static inline bool gm_has_ranks(const gm_engine *engine)
{
    return engine->ranks.n_shards * engine->ranks.n_replicas > 1;
}

/* GM_UNREDUCED holds a gradient of this pass. */
static inline bool gm_is_unreduced(const gm_param *p)
{
    return p->grad == GM_GRAD_ARRIVED || p->grad == GM_GRAD_GROWING;
}

/* GM_GRAD holds a gradient, or its update inside the backward has it. */
static inline bool gm_is_held(const gm_param *p)
{
    return p->grad >= GM_GRAD_GROWING;
}

static inline gm_dtype gm_grad_dtype(const gm_engine *engine, const gm_engine_param *spec)
{
    return engine->is_grad_f32 ? GM_F32 : spec->format;
}

static inline size_t gm_low_bytes(const gm_engine_param *spec)
{
    return !spec->has_low ? 0 : spec->format == GM_BF16 ? 2 : spec->format == GM_F16 ? 4 : 0;
}

/* Byte offsets of the arrays in a chunk's state piece: low, m, v. */
typedef struct gm_state_shape {
    size_t low, m, v, total;
} gm_state_shape;

static inline gm_state_shape gm_state_shape_of(const gm_engine_param *spec, uint64_t numel)
{
    gm_state_shape shape = {0};
    shape.m = gm_low_bytes(spec) * numel;
    shape.v = shape.m + (spec->has_moments ? 4 * numel : 0);
    shape.total = shape.v + (spec->has_moments ? 4 * numel : 0);
    return shape;
}

/* What the parameters of a chunk have in common. */
static inline const gm_engine_param *gm_chunk_spec(const gm_engine *engine, uint32_t chunk)
{
    return &engine->params[gm_layout_chunk(engine->layout, chunk)->first_param].spec;
}

/* The chunk's update in the last step. */
static inline gm_task *gm_task_of(const gm_engine *engine, uint32_t chunk)
{
    return &engine->chunk_states[chunk].task[engine->step.n & 1];
}

static inline bool gm_is_pending(const gm_engine *engine, uint32_t chunk)
{
    return engine->chunk_states[chunk].update == GM_UPDATE_PENDING;
}

/* It is on the device from the beginning to the end, and has no home. */
static inline bool gm_stays(const gm_engine *engine, uint32_t chunk)
{
    return engine->stay.chunks && engine->stay.chunks[chunk];
}

#define GM_NO_CHUNK UINT32_MAX
#define GM_NO_OP    UINT32_MAX

enum { GM_STAGING_BYTES = 16 << 20 };
/* Behind the sums of parameters and that of gradients at home: the sum of all these, as many
 * gm_sumsq for numbers that ranks tell each other (ranks.c), and as many for the words of
 * clip.c. */
enum { GM_RANKS_SUMS = 8, GM_CLIP_SUMS = 4 };

static inline size_t gm_sums_total(const gm_engine *engine)
{
    return (size_t)engine->n_params + 1;
}

static inline size_t gm_sums_ranks(const gm_engine *engine)
{
    return gm_sums_total(engine) + 1;
}

static inline size_t gm_sums_clip(const gm_engine *engine)
{
    return gm_sums_ranks(engine) + GM_RANKS_SUMS;
}

static inline size_t gm_sums_bytes(const gm_engine *engine)
{
    return (gm_sums_clip(engine) + GM_CLIP_SUMS) * sizeof(gm_sumsq);
}

/* From here down every file calls what is above it, and nothing below. */

/* engine.c */
gm_status gm_engine_check_param(const gm_engine *engine, uint32_t id);
/* As errors name it. */
const char *gm_engine_name(const gm_engine *engine, uint32_t id);
void gm_engine_unlock(gm_engine *engine);
size_t gm_engine_piece_bytes(const gm_engine *engine, uint32_t chunk, gm_piece piece);
/* Bytes of its blocks. */
size_t gm_engine_piece_blocks(const gm_engine *engine, uint32_t chunk, gm_piece piece);
/* Host waits and mappings so far; invariant 2. */
uint64_t gm_engine_count_waits(const gm_engine *engine);
/* The engine is closed from now on, with this as the cause; returns status. */
gm_status gm_engine_die(gm_engine *engine, gm_status status);
void gm_engine_revive(gm_engine *engine);
void gm_habit_learn(gm_habit *habit); /* at a step; one that had none tells nothing */

/* names.c */
typedef struct gm_names gm_names;
gm_status gm_names_new(gm_engine *engine, const gm_engine_options *options);
/* NULL as well when there is no memory: errors do without it. */
char *gm_names_copy(const char *name);
gm_names *gm_names_ref(gm_names *names);
void gm_names_unref(void *names);
void gm_names_unit(const gm_names *names, uint32_t unit, char *out, size_t bytes);
/* "chunk 3 (unit layers.4)" */
void gm_names_chunk(const gm_names *names, uint32_t chunk, char *out, size_t bytes);

/* sums.c */
gm_status gm_sums_new(gm_engine *engine);
void gm_sums_place_home(gm_engine *engine, void *home); /* gm_sums_bytes() of it */
void gm_sums_free(gm_engine *engine);

/* timer.c */
void gm_timer_free(gm_engine *engine);
/* A pass begins, which may follow this trace; it is timed if that is due. */
void gm_timer_begin(gm_engine *engine, const gm_trace *trace);
void gm_timer_start(gm_engine *engine, gm_stream stream);    /* the tick's own work begins */
void gm_timer_stop(gm_engine *engine, gm_stream stream);     /* it ends */
void gm_timer_end(gm_engine *engine, const gm_trace *trace); /* the pass was this; NULL: unknown */
/* Measured times go into the traces; the host waits.  True: a plan should be made from them. */
bool gm_timer_resolve(gm_engine *engine);
bool gm_timer_has_settled(const gm_engine *engine); /* that has been true before */

/* ranks.c */
void gm_ranks_init(gm_engine *engine, const gm_engine_options *options);
gm_status gm_ranks_new(gm_engine *engine);
void gm_ranks_free(gm_engine *engine);
void gm_ranks_leave(gm_engine *engine);
gm_status gm_ranks_check_joined(const gm_engine *engine);
/* What the collectives that follow are for, in texts about ranks that do different things. */
typedef enum gm_purpose {
    GM_FOR_GATHER = 1,
    GM_FOR_REDUCE,
    GM_FOR_NORM,
    GM_FOR_PLAN,
    GM_FOR_WISH,
    GM_FOR_SUM,
    GM_N_PURPOSES
} gm_purpose;
void gm_ranks_label(gm_engine *engine, gm_purpose purpose, uint32_t chunk);
/* A failure of the communicators that showed after a collective was issued. */
gm_status gm_ranks_check(const gm_engine *engine);
/* Waits for what other ranks have a part in, so far: none of it has failed. */
gm_status gm_ranks_settle(gm_engine *engine);
/* Each value becomes the largest that any rank has; all ranks call it with the same n, and wait. */
gm_status gm_ranks_max(gm_engine *engine, uint64_t *values, size_t n);
/* All ranks have issued the same collectives so far, and these are over; else it is the end of the
 * communicators. */
gm_status gm_ranks_agree(gm_engine *engine);
/* "... on ranks 0, 2, ... on rank 1": what each rank has for its value.  Likewise. */
gm_status gm_ranks_tell(gm_engine *engine, uint64_t value,
                        void (*say)(const gm_engine *engine, uint64_t value, char *out,
                                    size_t bytes),
                        char *out, size_t bytes);
/* Once a step, without waiting: *out is whether any rank had a wish at the last one. */
gm_status gm_ranks_wish(gm_engine *engine, bool wish, bool *out);
/* The total there, that ranks.stream has left, becomes the sum over the ranks, for what `stream`
 * gets from now on. */
gm_status gm_ranks_sum(gm_engine *engine, gm_stream stream);

/* saving.c */
gm_status gm_saving_new(gm_engine *engine);
void gm_saving_free(gm_engine *engine);
/* The chunks of these parameters are due, as they are now. */
gm_status gm_saving_begin(gm_engine *engine, const uint32_t *params, uint32_t n, size_t limit);
void gm_saving_done(gm_engine *engine, uint32_t chunk);    /* it has been written */
void gm_saving_end(gm_engine *engine, gm_saving_use *out); /* written or not; out may be NULL */
gm_status gm_saving_check(gm_engine *engine);              /* why it cannot be right any more */
/* Copies the chunk if it is still to be written, and may wait for the writer: what the chunk table
 * calls before weights or states change (context: the engine), and who lets others write where the
 * table does not see it. */
gm_status gm_saving_keep(void *context, uint32_t chunk);
gm_status gm_saving_keep_at_once(gm_engine *engine, uint32_t chunk); /* the same, without waiting */
/* A unit has changed the weight on the device; the chunk table has not been told yet. */
void gm_saving_note_unseen(gm_engine *engine, uint32_t param);
bool gm_saving_is_unseen(const gm_engine *engine, uint32_t chunk); /* due, and that has happened */
/* For the writer alone, without the engine's lock (as gm_engine_save_next): how it gets at a chunk.
 * It waits for the engine's lock as long as no chunk has a copy, and has to unlock it then. */
typedef enum gm_saving_way {
    GM_SAVING_LOCKED,
    GM_SAVING_COPIED,
    /* Those that have copies: a thread with the lock may wait for their memory. */
    GM_SAVING_OTHERS_FIRST,
} gm_saving_way;
gm_status gm_saving_reach(gm_engine *engine, uint32_t chunk, gm_saving_way *out,
                          const uint8_t **out_weights, const uint8_t **out_states);
void gm_saving_note_read(gm_engine *engine, uint32_t chunk); /* with the engine's lock */

/* clip.c */
gm_status gm_clip_new(gm_engine *engine);
void gm_clip_free(gm_engine *engine);
/* What `stream` gets from now on may change sums: it comes behind the clips that read them. */
gm_status gm_clip_order_sums(gm_engine *engine, gm_stream stream);
/* For the coming step, of the total there; norm: device memory, or NULL. */
gm_status gm_clip_issue(gm_engine *engine, double max_norm, float *norm, gm_stream stream);
gm_status gm_clip_note_issued(gm_engine *engine); /* all updates of the last step have been */
/* Without waiting: the factor of the step's clip has come home. */
bool gm_clip_is_known(gm_engine *engine, uint64_t step, float *out_scale);
gm_status gm_clip_wait(gm_engine *engine, uint64_t step, gm_clip *out);
/* Work that `stream` gets from now on may read the factor of the last step at *out, on the device
 * or at home. */
gm_status gm_clip_order(gm_engine *engine, bool is_at_home, gm_stream stream, const float **out);

/* stage.c */
gm_status gm_stage_new(gm_engine *engine); /* on the placement's stage; anew after each adoption */
void gm_stage_free(gm_engine *engine);
/* For a class that streams states: weights and gradient are on the device, the states at home. */
gm_status gm_stage_update(gm_engine *engine, uint32_t chunk, const gm_task *task);
/* The same into the spares; the weights may be at home as well. */
gm_status gm_stage_speculate(gm_engine *engine, uint32_t chunk, const gm_task *task);

/* field.c */
typedef struct gm_slice {
    gm_piece piece;
    size_t offset, bytes;
} gm_slice;

/* Where this rank's part of one field lies in its shard; GM_FIELD_MASTER: the low part. */
gm_slice gm_field_slice(const gm_engine *engine, const gm_param *p, gm_field field);
/* Where the whole weight lies in what tensors show. */
gm_slice gm_field_shown(const gm_engine *engine, const gm_param *p);
/* Bytes of one element of a field, as the caller has it. */
size_t gm_field_width(const gm_engine *engine, const gm_param *p, gm_field field);
/* Elements [first, first + n) of the part. */
gm_status gm_field_read(gm_engine *engine, const gm_param *p, gm_field field, uint64_t first,
                        uint64_t n, void *dst);
gm_status gm_field_write(gm_engine *engine, gm_param *p, gm_field field, const void *src,
                         gm_stream stream); /* src: whole */
/* The same, written; not of a gradient, nor of a weight with a low part. */
gm_status gm_field_fill(gm_engine *engine, gm_param *p, gm_field field, uint64_t first, uint64_t n,
                        gm_dtype source, const void *src, gm_stream stream);
/* The part's weights now hold new bytes (`weight`), before they held `old`: the master follows.
 * Where they are others than the last update has left they are their own master, and where they are
 * these again they have theirs again. */
gm_status gm_field_reset_low(gm_engine *engine, gm_param *p, const void *old, const void *weight,
                             gm_stream stream);
/* Weights and low parts are others now: what is written from here on is compared with these. */
void gm_field_forget_before(gm_param *p);
/* Tensors show new bytes of the parameter (`old`, `weight`: whole): the shard follows. */
gm_status gm_field_take_back(gm_engine *engine, gm_param *p, const void *old, const void *weight,
                             gm_stream stream);

/* watch.c */
void gm_watch_free(gm_engine *engine);
void gm_watch_add(gm_engine *engine, gm_lease *lease);
void gm_watch_note_pin(gm_engine *engine, gm_lease *lease); /* its chunk is pinned for it */
void gm_watch_wait(const gm_engine *engine); /* for what still uses what leases have pinned */
void gm_watch_note_ended(gm_engine *engine); /* a lease, or more; takes no lock */
/* Takes those that have ended off the list, one by one, after a last look at what was written: *at
 * begins with first_ended() and is NULL at the end.  *out: NULL, or the caller's. */
gm_lease **gm_watch_first_ended(gm_engine *engine);
gm_status gm_watch_next_ended(gm_engine *engine, gm_lease ***at, gm_lease **out);
bool gm_watch_is_any(const gm_engine *engine);
/* Its bytes are on the device, and writes to them are looked for. */
bool gm_watch_is_on(const gm_engine *engine, const gm_lease *lease);
gm_status gm_watch_begin(gm_lease *lease, gm_stream stream);
gm_status gm_watch_end(gm_lease *lease);
/* Finds what was written through watched leases since the last look. */
gm_status gm_watch_poll(gm_engine *engine);
/* The same of one parameter, behind the writes of `stream`. */
gm_status gm_watch_look_at(gm_engine *engine, uint32_t param, gm_stream stream);
/* The engine has read these bytes (what tensors show, whole) and does what comes of them. */
void gm_watch_note_seen(gm_engine *engine, uint32_t param, const void *weight);
/* The engine itself has written weights: later looks compare with what is there now. */
gm_status gm_watch_renew(gm_engine *engine);
/* The open pass is about to end: what leases still show is in use to its end, as the trace shall
 * know. */
void gm_watch_note_pass_end(gm_engine *engine);

/* glance.c */
void gm_glance_free(gm_engine *engine);
bool gm_glance_is_full(const gm_lease *lease); /* the page has no room for its use: turn it */
/* Before the lease's address is given away inside its unit; *out: it need not be watched. */
gm_status gm_glance_begin(gm_lease *lease, gm_stream stream, bool *out);
gm_status gm_glance_end(gm_lease *lease); /* its last user has gone; nothing, where none began */
gm_status gm_glance_end_of(gm_engine *engine, uint32_t chunk); /* before an update writes to it */
void gm_glance_drop(gm_lease *lease); /* its storage has gone in the middle of a use */
/* What was glanced at before is compared, or on its way to be; an error: a weight was written. */
gm_status gm_glance_turn(gm_engine *engine);
gm_status gm_glance_settle(gm_engine *engine); /* all of it is compared; the host waits */

/* gathered.c */
void gm_gathered_free(gm_engine *engine);
/* A use can have them, without another gathering. */
bool gm_gathered_is_valid(const gm_engine *engine, uint32_t chunk);
/* They have been gathered; is_held: all ranks count on them. */
void gm_gathered_note(gm_engine *engine, uint32_t chunk, bool is_held);
void gm_gathered_outdate(gm_engine *engine, uint32_t chunk);  /* the chunk's weights change */
gm_status gm_gathered_end(gm_engine *engine, uint32_t chunk); /* no rank counts on them now */
/* The same, with the last use. */
gm_status gm_gathered_lose_place(gm_engine *engine, uint32_t chunk);
/* Takes gathered weights that are not in use off the device; *out false: there are none. */
gm_status gm_gathered_spill_one(gm_engine *engine, bool *out);
gm_status gm_gathered_bring_back(gm_engine *engine, uint32_t chunk); /* pinned, and SPILLED */

/* room.c */
void gm_room_init(gm_engine *engine, const gm_engine_options *options);
void gm_room_lift_limit(gm_engine *engine);            /* that shedding has set */
void gm_room_want_plan(gm_engine *engine, bool wants); /* after this step, if any has wanted it */
void gm_room_end_wish(gm_engine *engine);
void gm_room_follow(gm_engine *engine, gm_plan *plan);   /* whose places have been adopted */
void gm_room_set_plan(gm_engine *engine, gm_plan *plan); /* with the same places; or NULL */
void gm_room_note_settled(gm_engine *engine);
/* Parameters/s of Adam on the host under the plan, so far; 0: too few to tell, or no plan. */
double gm_room_host_rate(const gm_engine *engine);
size_t gm_room_limit(const gm_engine *engine); /* bytes of blocks that chunks may take now */
/* On demand from here on, with what is resident and the whole budget; waits. */
gm_status gm_room_drop_plan(gm_engine *engine);
/* Makes one piece resident and pins it, with whatever it takes to find room. */
gm_status gm_room_pin(gm_engine *engine, uint32_t chunk, gm_piece piece, gm_stream stream);

/* stay.c */
gm_status gm_stay_new(gm_engine *engine,
                      const gm_engine_options *options); /* the layout is there */
void gm_stay_free(gm_engine *engine);                    /* the table is gone */

/* speculation.c */
void gm_speculation_init(gm_engine *engine, const gm_engine_options *options);
void gm_speculation_free(gm_engine *engine); /* nothing runs any more, and the table is gone */
size_t gm_speculation_budget(const gm_engine *engine); /* bytes of spares that a plan may take */
/* Of the device, that the driver will take to pin what a plan may take and has not yet. */
size_t gm_speculation_device_bytes(const gm_engine *engine);
bool gm_speculation_wants_numbers(gm_engine *engine); /* of the coming step */
void gm_speculation_note_norm(gm_engine *engine);
void gm_speculation_note_step(gm_engine *engine, const gm_update *updates, uint32_t n);
void gm_speculation_take_room(gm_engine *engine);     /* for what the plan speculates, or a part */
void gm_speculation_begin_numbers(gm_engine *engine); /* tasks of NUMBERED chunks get ranges */
void gm_speculation_end_numbers(gm_engine *engine);
gm_task *gm_speculation_due(gm_engine *engine, uint32_t chunk); /* that runs now; NULL: none */
void gm_speculation_note_result(gm_engine *engine, uint32_t chunk);
void gm_speculation_drop(gm_engine *engine); /* the results that no pending update wants */
/* Whether this task would give the result that there is. */
bool gm_speculation_is_of(const gm_engine *engine, uint32_t chunk, const gm_task *task);
/* Whether there was a result of this task, in the spares: it is not to run.  There is no result any
 * more. */
bool gm_speculation_take(gm_engine *engine, uint32_t chunk, const gm_task *task);
void gm_speculation_forget(gm_engine *engine);

/* opaque.c */
void gm_opaque_init(gm_engine *engine, const gm_engine_options *options);
double gm_opaque_rate(const gm_engine *engine); /* elements/s; 0: no update has run */
void gm_opaque_free(gm_engine *engine);
gm_status gm_opaque_lay_out(gm_engine *engine,
                            const gm_engine_options *options); /* chunks know their parameters */
static inline bool gm_is_opaque(const gm_engine *engine)
{
    return engine->opaque.caller.run != NULL;
}
/* The parameter has these bytes of states. */
gm_status gm_opaque_check_states(const gm_engine *engine, uint32_t id, uint64_t first, uint64_t n);
/* With the lock: for the end of an update on another thread; an error where it is this one. */
gm_status gm_opaque_wait(gm_engine *engine);
gm_status gm_opaque_join(gm_engine *engine); /* the call's stream comes behind all updates */
void gm_opaque_sync(gm_engine *engine);      /* the host does */
/* An error, and nothing has changed: these chunks' updates find no room beside what is in use. */
gm_status gm_opaque_check_room(gm_engine *engine, const gm_update *updates, uint32_t n);
/* All of the chunk is on the device, until gm_opaque_update has ended.  An error: nothing is. */
gm_status gm_opaque_pin(gm_engine *engine, uint32_t chunk);
gm_status gm_opaque_update(gm_engine *engine, uint32_t chunk, const gm_task *task);
/* Without leaving the plan; *out: the spares get what the update makes.  Else nothing has
 * changed. */
gm_status gm_opaque_speculate(gm_engine *engine, uint32_t chunk, const gm_task *task, bool *out);
gm_status gm_opaque_take(gm_engine *engine, uint32_t chunk, const gm_task *task);

/* update.c */
gm_status gm_update_new(gm_engine *engine);
void gm_update_free(gm_engine *engine);
/* Its pending update, if any.  An opaque one that finds no room (GM_ERR_NOMEM) stays pending. */
gm_status gm_update_issue(gm_engine *engine, uint32_t chunk);
/* Where it may come later: one that finds no room now stays pending, and a plan is not left. */
gm_status gm_update_issue_early(gm_engine *engine, uint32_t chunk);
gm_status gm_update_issue_some(gm_engine *engine, uint32_t most);
gm_status gm_update_issue_all(gm_engine *engine); /* every pending update */
/* Tasks for every chunk that has any of the updates (sorted by parameter): pending, or armed. */
gm_status gm_update_prepare(gm_engine *engine, const gm_update *updates, uint32_t n, bool arm);
/* The numbers that the coming step will probably have (sorted by parameter). */
gm_status gm_update_number(gm_engine *engine, const gm_update *updates, uint32_t n);
gm_status gm_update_speculate(gm_engine *engine, uint32_t chunk); /* if it is due */
void gm_update_make_pending(gm_engine *engine, uint32_t chunk);
void gm_update_disarm(gm_engine *engine);
void gm_update_forget_all(gm_engine *engine); /* those that wait; those that run are waited for */
bool gm_update_is_done(const gm_engine *engine, uint32_t chunk); /* inside the armed backward */
/* Backward needs the weights: the engine dies if that backward has updated them. */
gm_status gm_update_check_reuse(gm_engine *engine, uint32_t chunk);
/* Somebody else wants a part of the chunk: an error between its update inside backward and the
 * step. */
gm_status gm_update_check_between(const gm_engine *engine, uint32_t chunk);

/* weights.c */
void gm_weights_free(gm_engine *engine);
/* Pins what tensors show of the chunk.  is_use: by a unit or a backward node, which all ranks begin
 * and end alike; leases end when they like. */
gm_status gm_weights_pin(gm_engine *engine, uint32_t chunk, gm_stream stream, bool is_use);
gm_status gm_weights_unpin(gm_engine *engine, uint32_t chunk, gm_stream stream, bool is_use);
/* The use will be tried again: what was gathered for it is not gathered twice. */
gm_status gm_weights_unpin_for_retry(gm_engine *engine, uint32_t chunk, gm_stream stream);
/* Gathers now what a plan wants soon. */
gm_status gm_weights_prefetch(gm_engine *engine, uint32_t chunk);
/* The order of gatherings follows the plan from here on, which must outlive it; or, on demand
 * again, no plan. */
gm_status gm_weights_adopt(gm_engine *engine, gm_plan *plan);
void gm_weights_renew(gm_engine *engine, gm_plan *plan); /* the same places and operations */
gm_status gm_weights_forget_all(gm_engine *engine);

/* gradient.c */
void gm_gradient_init(gm_engine *engine);
void gm_gradient_limit(gm_engine *engine, size_t bytes); /* of unreduced ones */
/* A gradient of this pass, of this rank. */
gm_status gm_gradient_take(gm_engine *engine, gm_param *p, const void *grad, gm_dtype dtype,
                           gm_stream stream);
gm_status gm_gradient_drop(gm_engine *engine, gm_param *p);
void gm_gradient_note_written(gm_engine *engine, gm_param *p); /* from outside, after a drop */
void gm_gradient_use_up(gm_engine *engine, gm_param *p);
/* Whether it was used up: its bytes are there. */
bool gm_gradient_keep(gm_engine *engine, gm_param *p);
gm_status gm_gradient_check_unused(const gm_engine *engine, uint32_t param);
/* What has arrived of the chunk is summed over the ranks and becomes the shard's gradient. */
gm_status gm_gradient_reduce(gm_engine *engine, uint32_t chunk);
gm_status gm_gradient_reduce_all(gm_engine *engine);
void gm_gradient_note_step(gm_engine *engine); /* whose gradients all ranks have found alike */

/* check.c */
/* With assertions, every call ends with it. */
gm_status gm_check_state(const gm_engine *engine);

/* call.c */
gm_status gm_call_check(const gm_engine *engine); /* an error where one has closed the engine */
gm_status gm_call_begin(gm_engine *engine);       /* locks; drains ended leases */
gm_status gm_call_begin_on(gm_engine *engine, gm_stream stream);
gm_status gm_call_end(gm_engine *engine, gm_status status); /* unlocks; passes the status on */

/* inputs.c */
typedef struct gm_inputs {
    gm_plan_input plan;
    gm_plan_chunk *chunks;
    const gm_trace *traces[GM_TRACES_KEPT];
    uint32_t n_runs[GM_TRACES_KEPT];
    gm_trace *copies; /* several ranks: of the traces, with what all ranks know */
    gm_tick *ticks;
    bool has_left;
} gm_inputs;

void gm_inputs_init(gm_engine *engine, const gm_engine_options *options);
void gm_inputs_note_run(gm_engine *engine, uint32_t trace); /* a pass has ended */
void gm_inputs_forget_runs(gm_engine *engine);
/* Of Adam on the host, or of opaque updates, as steps have shown it; 0: not yet. */
double gm_inputs_seen_rate(const gm_engine *engine);
/* Plans are made from that rate from here on. */
void gm_inputs_correct_rate(gm_engine *engine, double seen);
enum { GM_MOST_TRIES = 4 }; /* of plans that do not fit what the device has by now */
gm_status gm_inputs_fill(gm_engine *engine, gm_inputs *in);
void gm_inputs_free(gm_inputs *in);
/* Blocks that a plan may have: what the budget and the device leave beside everything else at its
 * peak. */
size_t gm_inputs_device_bytes(gm_engine *engine);

/* planner_ranks.c */
/* With several ranks, after a step: plans and adopts, if there is something to plan.  An error is
 * one of the ranks', and ends the run; where there is no plan, there is no error. */
gm_status gm_planner_ranks_run(gm_engine *engine);

/* planner.c */
/* After a step: plans and adopts, if there is something to plan. */
gm_status gm_planner_run(gm_engine *engine);
bool gm_planner_is_settling(const gm_engine *engine); /* no plan, or another follows soon */
/* A schedule for a pass that the plan does not know, in the same places; without one it runs on
 * demand. */
void gm_planner_learn(gm_engine *engine, const gm_trace *trace);

/* pass.c */
gm_status gm_pass_new(gm_engine *engine);
void gm_pass_free(gm_engine *engine);
gm_status gm_pass_tick(gm_engine *engine, gm_tick_kind kind, uint32_t id, gm_stream stream);
gm_status gm_pass_enter(gm_engine *engine, uint32_t unit, gm_stream stream, uint32_t flags);
void gm_pass_end(gm_engine *engine);
/* The tick is recorded; the caller may try again at once, when there is room.  has_tick: what
 * failed came after it. */
void gm_pass_note_refusal(gm_engine *engine, gm_tick_kind kind, uint32_t id, bool has_tick,
                          gm_status status);
void gm_pass_begin_armed(gm_engine *engine); /* the backward's arrivals are counted from here */
/* Around a call that follows the plan: what it waits for is counted. */
gm_status gm_pass_begin_call(gm_engine *engine, gm_stream stream);
gm_status gm_pass_end_call(gm_engine *engine, gm_status status);

/* unit.c */
gm_status gm_unit_new(gm_engine *engine);
void gm_unit_free(gm_engine *engine);
