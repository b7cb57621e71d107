/* test_plan_ranks.c - plans of several ranks: what every one must keep, a checker that can fail, and how good they are. */
#include <time.h>

#include "plan.h"
#include "plan_impl.h"
#include "plan_model.h"

static uint64_t seed = 23;

static void random_shared(model *m, const shape *s)
{
    model_new(m, s, &seed);
    share_model(m, 2 + (uint32_t)below(&seed, 7), below(&seed, 6) == 0,
                below(&seed, 4) ? 0 : 1 + (uint32_t)below(&seed, 8), &seed);
    m->input.when = below(&seed, 2) ? GM_IMMEDIATE : GM_DEFERRED;
}

static void test_random_models(void)
{
    uint32_t n_fit = 0, n_not = 0, n_of_class[GM_N_CLASSES] = {0}, n_kept = 0, n_ring = 0;
    for (int round = 0; round < 200; round++) {
        shape s = random_shape(&seed);
        s.is_cut = below(&seed, 3) == 0;
        model m;
        random_shared(&m, &s);
        m.input.policy = (gm_policy)(below(&seed, 6) < 4 ? 0 : below(&seed, 3));
        m.input.state_share = below(&seed, 3) ? 1 : 0.01 * (double)below(&seed, 100);
        m.input.stage_blocks = below(&seed, 2) ? 0 : 1 + (uint32_t)below(&seed, 12);
        size_t whole = whole_bytes(&m) / MODEL_BLOCK;
        m.input.device_bytes = (size_t)below(&seed, 1 + whole + whole / 4) * MODEL_BLOCK;
        gm_plan *plan;
        gm_status status = gm_plan_new(&m.input, &plan);
        if (status == GM_ERR_NOMEM) {
            CHECK(strstr(gm_last_error(), "bytes") && strstr(gm_last_error(), "available"));
            CHECK(m.input.device_bytes < whole_bytes(&m) + MODEL_BLOCK);
            n_not++;
        } else {
            CHECK_OK(status);
            if (gm_plan_check(plan, &m.input) != GM_OK) {
                fprintf(stderr, "round %d when %d policy %d\n", round, m.input.when,
                        m.input.policy);
            }
            CHECK_OK(gm_plan_check(plan, &m.input));
            const gm_plan_info *info = gm_plan_get_info(plan);
            CHECK(info->device_bytes <= m.input.device_bytes);
            CHECK(info->step_seconds >= info->compute_seconds);
            CHECK(info->step_seconds >= info->comm_seconds);
            n_kept += info->n_kept > 0 && info->gathered_ring_bytes > 0;
            n_ring += info->gathered_ring_bytes > 0;
            for (uint32_t k = 0; k < GM_N_CLASSES; k++) {
                n_of_class[k] += info->n_of_class[k];
            }
            gm_plan_free(plan);
            n_fit++;
        }
        model_free(&m);
    }
    CHECK(n_fit > 80 && n_not > 10 && n_kept > 20 && n_ring > 50);
    for (uint32_t k = 0; k < GM_N_CLASSES; k++) {
        CHECK(n_of_class[k] > 10);
    }
}

/* A plan of some random shared model in which memory is short; is_alone: of one pass. */
static gm_plan *tight_plan(model *m, gm_when when, bool is_alone)
{
    for (;;) {
        shape s = random_shape(&seed);
        s.n_units += 6;
        if (is_alone) {
            s.has_second = s.has_evaluation = false;
            s.n_runs = 1;
        }
        gm_plan *plan;
        random_shared(m, &s);
        m->input.when = when;
        m->input.policy =
            !is_alone && below(&seed, 3) ? GM_POLICY_CPU : GM_POLICY_AUTO; /* soon found */
        m->input.device_bytes = whole_bytes(m) / (1 + below(&seed, 8));
        if (gm_plan_new(&m->input, &plan) == GM_OK) {
            CHECK_OK(gm_plan_check(plan, &m->input));
            return plan;
        }
        model_free(m);
    }
}

/* One rank is one rank, and shares nothing. */
static void test_one_rank(void)
{
    for (int round = 0; round < 20; round++) {
        shape s = random_shape(&seed);
        model m;
        gm_plan *none, *one;
        model_new(&m, &s, &seed);
        m.input.when = round % 2 ? GM_IMMEDIATE : GM_DEFERRED;
        m.input.device_bytes = whole_bytes(&m) / 2 + 40 * MODEL_BLOCK;
        CHECK_OK(gm_plan_new(&m.input, &none));
        m.input.n_ranks = 1;
        m.input.rates.gather = m.input.rates.reduce = 1e9;
        CHECK_OK(gm_plan_new(&m.input, &one));
        const gm_plan_info *info = gm_plan_get_info(one);
        CHECK(info->hash == gm_plan_get_info(none)->hash && info->comm_seconds == 0);
        CHECK(info->gathered_ring_bytes + info->unreduced_ring_bytes == 0 && info->n_kept == 0);
        gm_plan_free(one);
        gm_plan_free(none);
        m.chunks[0].bytes[GM_UNREDUCED] = m.chunks[0].blocks[GM_UNREDUCED] = 1;
        CHECK(gm_plan_new(&m.input, &one) == GM_ERR_ARG);
        model_free(&m);
    }
}

static uint32_t count_ops(const gm_plan *plan, const gm_trace *trace, gm_op_kind kind)
{
    uint32_t count = 0, n;
    for (uint32_t t = 0; t < trace->n; t++) {
        const gm_op *ops = gm_plan_ops(plan, trace->hash, t, &n);
        for (uint32_t i = 0; i < n; i++) {
            count += ops[i].kind == (uint32_t)kind;
        }
    }
    return count;
}

/* With room for everything: all resident, all kept, one gather of each chunk in a step however many passes it has, and
 * nothing to wait for but the first. */
static void test_room_for_all(void)
{
    for (int round = 0; round < 24; round++) {
        model m;
        gm_plan *plan;
        uint32_t n = 20 + (uint32_t)below(&seed, 60), n_runs = 1 + (uint32_t)below(&seed, 3);
        model_of_units(&m, n, 8000000 + below(&seed, 20000000), 0.003 * n);
        m.n_runs[0] = n_runs;
        bool is_replicated = round % 4 == 3;
        share_model(&m, 2 + (uint32_t)below(&seed, 7), is_replicated, 0, &seed);
        m.input.when = round % 2 ? GM_IMMEDIATE : GM_DEFERRED;
        m.input.policy = below(&seed, 2) ? GM_POLICY_AUTO : GM_POLICY_CUDA;
        m.input.device_bytes = whole_bytes(&m);
        CHECK_OK(gm_plan_new(&m.input, &plan));
        CHECK_OK(gm_plan_check(plan, &m.input));
        const gm_plan_info *info = gm_plan_get_info(plan);
        double comm = 0;
        for (uint32_t c = 0; c < n; c++) {
            comm += (double)m.chunks[c].bytes[GM_GATHERED] / m.input.rates.gather +
                    n_runs * (double)m.chunks[c].bytes[GM_UNREDUCED] / m.input.rates.reduce;
            CHECK(gm_plan_is_kept(plan, c) == !is_replicated);
        }
        CHECK(info->n_of_class[GM_CLASS_R] == n && info->h2d_bytes + info->d2h_bytes == 0);
        CHECK(info->n_kept == (is_replicated ? 0 : n) && info->gathered_ring_bytes == 0);
        CHECK(info->unreduced_ring_bytes > 0);
        CHECK(count_ops(plan, m.traces[0], GM_OP_GATHER) == (is_replicated ? 0 : n));
        CHECK(info->comm_seconds > 0.999 * comm && info->comm_seconds < 1.001 * comm);
        CHECK(info->step_seconds < 1.03 * info->compute_seconds + 0.005);
        gm_plan_free(plan);
        model_free(&m);
    }
}

/* ---- the order of collectives ---- */

typedef struct rank { /* what one rank does with its operations, in the model of plan.h */
    const model *m;
    const gm_plan *plan;
    uint32_t *owner,
        *pinned; /* of blocks: whose gathered weights, and until when they are in use */
    bool *is_outdated, *is_pending;
    uint64_t seed; /* by chance it has to drop what it may drop */
    uint64_t log;  /* hash of its collectives */
    uint32_t n;
} rank;

static void log_collective(rank *r, uint32_t chunk, uint32_t what)
{
    r->log = (r->log ^ (2 * chunk + what + 1)) * UINT64_C(0x100000001b3);
    r->n++;
}

static void update_rank(rank *r, uint32_t c)
{
    r->is_outdated[c] |= r->is_pending[c];
    r->is_pending[c] = false;
}

static void gather_rank(rank *r, uint32_t c, uint32_t tick)
{
    const gm_place *place = gm_plan_place(r->plan, c, GM_GATHERED);
    bool holds = !r->is_outdated[c] && !r->is_pending[c];
    for (uint32_t j = 0; j < r->m->chunks[c].blocks[GM_GATHERED]; j++) {
        holds &= r->owner[place->base + (place->offset + j) % place->length] == c;
    }
    if (holds) {
        return;
    }
    update_rank(r, c);
    log_collective(r, c, 0);
    r->is_outdated[c] = false;
    for (uint32_t j = 0; j < r->m->chunks[c].blocks[GM_GATHERED]; j++) {
        uint32_t at = place->base + (place->offset + j) % place->length;
        CHECK(r->pinned[at] <= tick); /* it can be done, whatever was dropped */
        r->owner[at] = c;
    }
}

static void take_rank(rank *r, uint32_t c, uint32_t tick, uint32_t until)
{
    const gm_place *place = gm_plan_place(r->plan, c, GM_GATHERED);
    if (r->m->chunks[c].bytes[GM_GATHERED] == 0) {
        return;
    }
    uint32_t before = r->n;
    gather_rank(r, c, tick);
    CHECK(r->n == before); /* it was gathered ahead */
    for (uint32_t j = 0; j < r->m->chunks[c].blocks[GM_GATHERED]; j++) {
        uint32_t *pinned = &r->pinned[place->base + (place->offset + j) % place->length];
        *pinned = until > *pinned ? until : *pinned;
    }
}

static void pass_rank(rank *r, const gm_trace *trace, bool is_last)
{
    const model *m = r->m;
    memset(r->pinned, 0, (gm_plan_n_blocks(r->plan) + 1) * sizeof *r->pinned);
    for (uint32_t t = 0; t < trace->n; t++) {
        const gm_tick *tick = &trace->ticks[t];
        uint32_t n_ops, until = tick->until > t ? tick->until : t + 1;
        const gm_op *ops = gm_plan_ops(r->plan, trace->hash, t, &n_ops);
        if (tick->kind == GM_TICK_GRAD && m->chunks[tick->id].bytes[GM_UNREDUCED] > 0) {
            log_collective(r, tick->id, 1);
        }
        for (uint32_t i = 0; i < n_ops; i++) {
            if (ops[i].kind == GM_OP_GATHER) {
                gather_rank(r, ops[i].chunk, t);
            } else if (ops[i].kind == GM_OP_UPDATE && below(&r->seed, 3) > 0) {
                update_rank(r, ops[i].chunk);
            }
        }
        if (tick->kind == GM_TICK_TOUCH) {
            take_rank(r, tick->id, t, until);
        } else if (tick->kind == GM_TICK_ENTER) {
            for (uint32_t i = m->unit_begin[tick->id]; i < m->unit_begin[tick->id + 1]; i++) {
                take_rank(r, m->unit_chunks[i], t, until);
            }
        }
    }
    for (uint32_t c = 0; c < m->n_chunks && is_last; c++) {
        r->is_pending[c] = m->chunks[c].numel > 0;
    }
}

static void run_rank(rank *r)
{
    size_t n_blocks = gm_plan_n_blocks(r->plan) + 1;
    r->owner = malloc(n_blocks * sizeof *r->owner);
    r->pinned = malloc(n_blocks * sizeof *r->pinned);
    r->is_outdated = calloc(r->m->n_chunks, sizeof(bool));
    r->is_pending = calloc(r->m->n_chunks, sizeof(bool));
    memset(r->owner, 0xff, n_blocks * sizeof *r->owner);
    for (int step = 0; step < 3; step++) {
        for (uint32_t k = 0; k < r->m->n_traces; k++) {
            bool is_last = k + 1 == r->m->n_traces;
            for (uint32_t run = 0; run < r->m->n_runs[k]; run++) {
                pass_rank(r, r->m->traces[k], is_last && run + 1 == r->m->n_runs[k]);
            }
        }
    }
    free(r->owner);
    free(r->pinned);
    free(r->is_outdated);
    free(r->is_pending);
}

/* Ranks that drop what each may drop for itself issue the same collectives, which find their blocks free. */
static void test_ranks_agree(void)
{
    uint32_t n_collectives = 0;
    for (int round = 0; round < 60; round++) {
        model m;
        gm_plan *plan = tight_plan(&m, GM_DEFERRED, false);
        rank first = {.m = &m, .plan = plan, .seed = 1}, other = {.m = &m, .plan = plan};
        run_rank(&first);
        for (uint64_t chance = 2; chance < 5; chance++) {
            other.seed = chance;
            other.log = 0;
            other.n = 0;
            run_rank(&other);
            CHECK(other.log == first.log && other.n == first.n);
        }
        n_collectives += first.n;
        gm_plan_free(plan);
        model_free(&m);
    }
    CHECK(n_collectives > 1000);
}

static uint32_t next_use(const model *m, const gm_trace *trace, uint32_t chunk, uint32_t from)
{
    for (uint32_t t = from; t < trace->n; t++) {
        const gm_tick *tick = &trace->ticks[t];
        uint32_t i = tick->kind == GM_TICK_ENTER ? m->unit_begin[tick->id] : 0;
        uint32_t end = tick->kind == GM_TICK_ENTER ? m->unit_begin[tick->id + 1] : 0;
        for (; i < end; i++) {
            if (m->unit_chunks[i] == chunk) {
                return t;
            }
        }
        if (tick->kind == GM_TICK_TOUCH && tick->id == chunk) {
            return t;
        }
    }
    return trace->n;
}

/* No gather stands before one that is needed sooner, but where chunks are used again while they are there. */
static void test_gathers_in_order_of_need(void)
{
    uint32_t n_ahead = 0, n_all = 0;
    for (int round = 0; round < 40; round++) {
        model m;
        gm_plan *plan = tight_plan(&m, round % 2 ? GM_IMMEDIATE : GM_DEFERRED, false);
        for (uint32_t k = 0; k < m.n_traces; k++) {
            const gm_trace *trace = m.traces[k];
            uint32_t n, latest = 0;
            for (uint32_t t = 0; t < trace->n; t++) {
                const gm_op *ops = gm_plan_ops(plan, trace->hash, t, &n);
                for (uint32_t i = 0; i < n; i++) {
                    if (ops[i].kind == GM_OP_GATHER) {
                        uint32_t use = next_use(&m, trace, ops[i].chunk, t);
                        CHECK(use < trace->n && use >= latest);
                        latest = use;
                        n_ahead += use > t;
                        n_all++;
                    }
                }
            }
        }
        gm_plan_free(plan);
        model_free(&m);
    }
    CHECK(n_all > 500 && n_ahead > n_all / 2);
}

/* ---- the checker ---- */

static void drop_op(gm_schedule *schedule, uint32_t at)
{
    uint32_t n = schedule->begin[schedule->n_ticks];
    memmove(schedule->ops + at, schedule->ops + at + 1, (n - at - 1) * sizeof *schedule->ops);
    for (uint32_t t = 0; t <= schedule->n_ticks; t++) {
        schedule->begin[t] -= schedule->begin[t] > at;
    }
}

/* A gather that is missing, or done at the wrong time. */
static void test_checker_misses_no_gather(void)
{
    uint32_t n_needed = 0, n_dropped = 0, n_doubled = 0;
    for (int round = 0; round < 60; round++) {
        model m;
        gm_plan *plan = tight_plan(&m, round % 2 ? GM_IMMEDIATE : GM_DEFERRED, true);
        gm_schedule *schedule = &plan->schedules[0];
        uint32_t n = schedule->begin[schedule->n_ticks], gather = GM_NO_TICK;
        uint64_t n_seen = 0;
        for (uint32_t i = 0; i < n; i++) {
            if (schedule->ops[i].kind == GM_OP_GATHER && below(&seed, ++n_seen) == 0) {
                gather = i;
            }
        }
        if (gather != GM_NO_TICK) {
            uint32_t c = schedule->ops[gather].chunk;
            drop_op(schedule, gather);
            bool is_caught = gm_plan_check(plan, &m.input) == GM_ERR_STATE;
            bool is_needed = m.chunks[c].numel > 0 && gm_plan_is_kept(plan, c) &&
                             m.n_runs[0] == 1; /* each step makes it old */
            CHECK(is_caught || !is_needed);
            n_needed += is_needed;
            n_dropped += is_caught;
            schedule->ops[0] = (gm_op){GM_OP_GATHER, c}; /* where another operation was */
            n_doubled += gm_plan_check(plan, &m.input) == GM_ERR_STATE;
        }
        gm_plan_free(plan);
        model_free(&m);
    }
    CHECK(n_needed > 10 && n_dropped > 30 && n_doubled > 30);
}

/* Operations that go out one tick early: a gather before its blocks are free, or before the update. */
static void test_checker_sees_early_gathers(void)
{
    uint32_t n_caught = 0;
    for (int round = 0; round < 40; round++) {
        model m;
        gm_plan *plan = tight_plan(&m, GM_DEFERRED, false);
        gm_schedule *schedule = &plan->schedules[0];
        for (uint32_t t = 1; t < schedule->n_ticks; t++) {
            uint32_t first = schedule->begin[t];
            if (first < schedule->begin[t + 1] && schedule->ops[first].kind == GM_OP_GATHER) {
                schedule->begin[t]++;
                n_caught += gm_plan_check(plan, &m.input) == GM_ERR_STATE;
                schedule->begin[t]--;
            }
        }
        gm_plan_free(plan);
        model_free(&m);
    }
    CHECK(n_caught > 20);
}

/* A gather that changes places with the update before it gathers what is old. */
static void test_checker_sees_old_shards(void)
{
    uint32_t n_caught = 0, n_tried = 0;
    for (int round = 0; round < 30; round++) {
        model m;
        gm_plan *plan = tight_plan(&m, GM_DEFERRED, false);
        gm_schedule *schedule = &plan->schedules[0];
        uint32_t n = schedule->begin[schedule->n_ticks], at = (uint32_t)below(&seed, n / 8 + 1);
        for (uint32_t i = at; i < n; i++) {
            gm_op *before = &schedule->ops[i], *op = before + 1, *end = schedule->ops + n;
            while (op < end && (op->kind != GM_OP_GATHER || op->chunk != before->chunk)) {
                op++;
            }
            if (before->kind == GM_OP_UPDATE && op < end) {
                gm_op kept = *op;
                *op = *before;
                *before = kept;
                n_tried++;
                n_caught += gm_plan_check(plan, &m.input) == GM_ERR_STATE;
                break;
            }
        }
        gm_plan_free(plan);
        model_free(&m);
    }
    CHECK(n_tried > 10 && n_caught > n_tried / 2);
}

static void test_checker_sees_wrong_places(void)
{
    static const gm_piece pieces[] = {GM_GATHERED, GM_UNREDUCED};
    uint32_t n_shifted[2] = {0}, n_flipped = 0;
    for (int round = 0; round < 120; round++) {
        model m;
        gm_plan *plan = tight_plan(&m, round % 2 ? GM_IMMEDIATE : GM_DEFERRED, false);
        uint32_t c = (uint32_t)below(&seed, m.n_chunks), i = (uint32_t)below(&seed, 2);
        gm_place *place = &plan->places[c * GM_N_PIECES + pieces[i]], kept = *place;
        if (place->length > 0) {
            place->base += place->base > 0 ? UINT32_MAX : 1;
            CHECK(gm_plan_check(plan, &m.input) == GM_ERR_STATE || place->length == plan->n_blocks);
            *place = kept;
            place->offset = place->length;
            CHECK(gm_plan_check(plan, &m.input) == GM_ERR_STATE);
            *place = kept;
            if (!place->is_resident && place->length > m.chunks[c].blocks[pieces[i]]) {
                bool is_caught = false;
                for (uint32_t by = 1; by < place->length && by < 24 && !is_caught; by++) {
                    place->offset = (kept.offset + by) % place->length;
                    is_caught = gm_plan_check(plan, &m.input) == GM_ERR_STATE;
                }
                n_shifted[i] += is_caught;
                *place = kept;
                place->is_resident = true;
                CHECK(gm_plan_check(plan, &m.input) == GM_ERR_STATE);
                *place = kept;
                n_flipped++;
            }
            if (i == 0) {
                place->length = 0;
                CHECK(gm_plan_check(plan, &m.input) == GM_ERR_STATE);
                *place = kept;
            }
        }
        CHECK_OK(gm_plan_check(plan, &m.input));
        gm_plan_free(plan);
        model_free(&m);
    }
    CHECK(n_shifted[0] > 3 && n_shifted[1] > 3 && n_flipped > 20);
}

/* ---- how good they are ---- */

/* The least that an error asks for is enough, and one block less is not. */
static void test_needed_bytes(void)
{
    for (int round = 0; round < 60; round++) {
        shape s = random_shape(&seed);
        model m;
        gm_plan *plan;
        size_t needed;
        random_shared(&m, &s);
        m.input.policy = (gm_policy)(round % 3);
        m.input.device_bytes = 0;
        CHECK(gm_plan_new(&m.input, &plan) == GM_ERR_NOMEM && plan == NULL);
        const char *number = strstr(gm_last_error(), "needs ");
        CHECK(number && sscanf(number, "needs %zu bytes", &needed) == 1);
        m.input.device_bytes = needed;
        CHECK_OK(gm_plan_new(&m.input, &plan));
        CHECK_OK(gm_plan_check(plan, &m.input));
        CHECK(m.input.policy != GM_POLICY_CUDA ||
              gm_plan_get_info(plan)->n_of_class[GM_CLASS_R] == m.n_chunks);
        gm_plan_free(plan);
        m.input.device_bytes = needed - MODEL_BLOCK;
        CHECK(gm_plan_new(&m.input, &plan) == GM_ERR_NOMEM);
        model_free(&m);
    }
}

static void test_one_more_trace(void)
{
    uint32_t n_fits = 0, n_misfits = 0;
    for (int round = 0; round < 60; round++) {
        shape s = random_shape(&seed);
        s.has_evaluation = s.has_second = true;
        model m;
        gm_plan *plan;
        random_shared(&m, &s);
        uint32_t n_traces = m.input.n_traces;
        m.input.n_traces = 1;
        m.input.device_bytes = whole_bytes(&m) / (1 + below(&seed, 3)) + 40 * MODEL_BLOCK;
        CHECK_OK(gm_plan_new(&m.input, &plan));
        for (uint32_t k = 1; k < n_traces; k++) {
            gm_status status = gm_plan_add_trace(plan, &m.input, m.traces[k]);
            if (status == GM_ERR_STATE) {
                CHECK(strstr(gm_last_error(), "plan anew"));
                n_misfits++;
                continue;
            }
            CHECK_OK(status);
            gm_plan_input alone = m.input;
            alone.traces = &m.traces[k];
            alone.n_runs = &m.n_runs[k];
            CHECK_OK(gm_plan_check(plan, &alone));
            n_fits++;
        }
        gm_plan_free(plan);
        model_free(&m);
    }
    CHECK(n_fits > 40 && n_misfits < n_fits);
}

/* The least predicted step over all classes, with what is kept and the depths of rings as a few usual ones. */
static double brute_force(const gm_problem *problem)
{
    uint32_t n = problem->n;
    double best = 1e9;
    uint64_t n_all = 1;
    uint8_t *class_of = calloc(n, 1);
    bool *flags = calloc(3 * (size_t)n, sizeof *flags);
    gm_choice choice = {.class_of = class_of,
                        .is_late = flags,
                        .is_grad_resident = flags + n,
                        .is_kept = flags + 2 * (size_t)n};
    for (uint32_t c = 0; c < n; c++) {
        n_all *= GM_N_CLASSES;
    }
    for (uint64_t code = 0; code < n_all; code++) {
        uint64_t rest = code;
        bool is_fine = true;
        for (uint32_t c = 0; c < n; c++, rest /= GM_N_CLASSES) {
            class_of[c] = (uint8_t)(rest % GM_N_CLASSES);
            is_fine &= problem->input->chunks[c].numel > 0 || class_of[c] == GM_CLASS_R ||
                       class_of[c] == GM_CLASS_C2;
            is_fine &= !problem->input->chunks[c].must_reside || !gm_is_streamed(class_of[c]);
            is_fine &= problem->is_trained[c] || !gm_is_state_streamed(class_of[c]);
        }
        for (uint32_t variant = 0; variant < (8u << n) && is_fine; variant++) {
            gm_plan *plan;
            uint32_t deep = variant & 1 ? 2 : 1;
            for (uint32_t piece = 0; piece < GM_N_PIECES; piece++) {
                choice.depth[piece] = piece == GM_STATE ? 2 * deep : deep;
            }
            bool is_allowed = true;
            for (uint32_t c = 0; c < n; c++) {
                const gm_course *main = &problem->courses[problem->main];
                bool may_be_early =
                    problem->input->when == GM_IMMEDIATE && main->settle[c] < main->n;
                choice.is_late[c] = problem->is_trained[c] &&
                                    (!may_be_early || (variant & 2 && class_of[c] != GM_CLASS_R));
                choice.is_grad_resident[c] = variant & 4;
                choice.is_kept[c] = variant >> (3 + c) & 1;
                is_allowed &= !choice.is_kept[c] || !gm_is_streamed(class_of[c]);
            }
            if (is_allowed) {
                CHECK_OK(gm_plan_for_choice(problem, &choice, &plan));
                if (plan) {
                    best = plan->info.step_seconds < best ? plan->info.step_seconds : best;
                    gm_plan_free(plan);
                }
            }
        }
    }
    free(class_of);
    free(flags);
    return best;
}

static void test_against_brute_force(void)
{
    double worst = 0;
    uint32_t n_compared = 0;
    for (int round = 0; round < 60; round++) {
        shape s = random_shape(&seed);
        s.n_units = 1 + (uint32_t)below(&seed, 3);
        s.most_chunks_of_unit = 1;
        s.n_blocks = 20 + (uint32_t)below(&seed, 40);
        s.has_evaluation = s.has_second = false;
        s.n_runs = 1 + (uint32_t)below(&seed, 2);
        s.seconds = 1e-3 * (double)(1 + below(&seed, 10));
        model m;
        gm_plan *plan;
        gm_problem problem;
        random_shared(&m, &s);
        m.input.rates.gather = 20e9 * (double)(1 + below(&seed, 10));
        m.input.rates.reduce = m.input.rates.gather;
        m.input.device_bytes = whole_bytes(&m) / 100 * (10 + below(&seed, 90));
        gm_status status = gm_plan_new(&m.input, &plan);
        if (m.n_chunks <= 4 && status == GM_OK) {
            CHECK_OK(gm_problem_new(&m.input, &problem));
            double best = brute_force(&problem), found = gm_plan_get_info(plan)->step_seconds;
            double ratio = found / best;
            worst = ratio > worst ? ratio : worst;
            n_compared++;
            if (ratio > 1.05) {
                fprintf(stderr, "round %d: %g, best %g\n", round, found, best);
            }
            CHECK(ratio <= 1.05);
            gm_problem_free(&problem);
        }
        gm_plan_free(plan);
        model_free(&m);
    }
    CHECK(n_compared > 25);
    printf("worst against brute force: %.3f over %u cases\n", worst, n_compared);
}

static gm_plan_info plan_of(model *m, gm_when when, double device_bytes)
{
    gm_plan *plan;
    m->input.when = when;
    m->input.device_bytes = (size_t)device_bytes;
    CHECK_OK(gm_plan_new(&m->input, &plan));
    CHECK_OK(gm_plan_check(plan, &m->input));
    gm_plan_info info = *gm_plan_get_info(plan);
    gm_plan_free(plan);
    return info;
}

static void print_info(const char *name, const gm_plan_info *info)
{
    printf("%-14s %.3f s (bound %.3f: compute %.3f, in %.3f, out %.3f, host %.3f, ranks %.3f) "
           "R/S1/S2/C1/C2 %u/%u/%u/%u/%u, %u kept, MB of gathered %zu, unreduced %zu\n",
           name, info->step_seconds, info->bound_seconds, info->compute_seconds, info->h2d_seconds,
           info->d2h_seconds, info->host_seconds, info->comm_seconds, info->n_of_class[0],
           info->n_of_class[1], info->n_of_class[2], info->n_of_class[3], info->n_of_class[4],
           info->n_kept, info->gathered_ring_bytes >> 20, info->unreduced_ring_bytes >> 20);
}

/* 8 G on 8 devices of one host, from room for everything down to shards that mostly live on the host. */
static void test_real_sizes(void)
{
    static const struct {
        const char *name;
        double bytes;
        uint32_t n_runs, least_kept, most_kept;
        double most[2]; /* times the bound, deferred and immediate */
    } cases[] = {
        {"8G, 60 GB", 60e9, 1, 256, 256, {1.02, 1.02}},
        {"8G, 24 GB", 24e9, 1, 100, 200, {1.02, 1.02}}, /* shards resident, half of it kept */
        {"8G, 16 GB", 16e9, 1, 0, 20, {1.02, 1.02}},    /* shards resident, a ring */
        {"8G, 4 passes", 16e9, 4, 0, 20, {1.02, 1.02}},
        {"8G, 8 GB", 8e9, 1, 0, 20, {1.06, 1.06}},
        {"8G, 1 GB", 1e9, 1, 0, 20, {1.06, 1.06}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        model m;
        model_of_units(&m, 256, 32000000, 0.45);
        share_model(&m, 8, false, 0, &seed);
        m.n_runs[0] = cases[i].n_runs;
        gm_rates *rates = &m.input.rates;
        rates->h2d = rates->d2h = rates->h2d_both = rates->d2h_both = 12e9;
        rates->h2d_beside = rates->d2h_beside = 12e9;
        rates->host_adam = 0.6e9; /* of one rank's share of the host */
        rates->host_adam_beside = 0.5e9;
        for (int when = 0; when < 2; when++) {
            gm_plan_info info = plan_of(&m, (gm_when)when, cases[i].bytes);
            print_info(cases[i].name, &info);
            CHECK(info.step_seconds <= cases[i].most[when] * info.bound_seconds);
            CHECK(info.n_kept >= cases[i].least_kept && info.n_kept <= cases[i].most_kept);
        }
        model_free(&m);
    }
}

/* More memory is not slower, nor does it make more traffic between ranks once the shards are resident. */
static void test_budgets(void)
{
    double worst = 1;
    for (int round = 0; round < 3; round++) {
        model m;
        double seconds[34], least = 1e9, comm = 1e9;
        uint32_t n = 24 + (uint32_t)below(&seed, 24);
        model_of_units(&m, n, 4000000 + below(&seed, 20000000),
                       0.001 * n * (double)(1 + below(&seed, 3)));
        share_model(&m, 2 + (uint32_t)below(&seed, 7), false, 0, &seed);
        m.n_runs[0] = 1 + (uint32_t)below(&seed, 3);
        for (uint32_t part = 4; part <= 32; part += 2) {
            gm_plan_info info = plan_of(&m, (gm_when)(round % 2),
                                        (double)(whole_bytes(&m) / 32 * part + MODEL_BLOCK));
            seconds[part] = info.step_seconds;
            worst = seconds[part] / least > worst ? seconds[part] / least : worst;
            least = seconds[part] < least ? seconds[part] : least;
            if (info.n_of_class[GM_CLASS_R] == n) {
                CHECK(info.comm_seconds <= comm * 1.03);
                comm = info.comm_seconds;
            }
            CHECK(part < 8 || part % 4 || seconds[part] <= seconds[part / 2] * 1.005);
        }
        model_free(&m);
    }
    printf("slower with more memory: at most %.4f\n", worst);
    CHECK(worst <= 1.06);
}

/* A hundred thousand operations are planned within a second of this thread, search included. */
static void test_planning_time(void)
{
    for (int when = 0; when < 2; when++) {
        for (uint32_t part = 2; part <= 10; part += 4) {
            model m;
            gm_plan *plan;
            model_of_units(&m, 18000, 1000000, 2.0);
            share_model(&m, 8, false, 0, &seed);
            m.n_runs[0] = 4;
            m.input.when = (gm_when)when;
            m.input.device_bytes = whole_bytes(&m) / part;
            clock_t start = clock();
            CHECK_OK(gm_plan_new(&m.input, &plan));
            double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
            const gm_plan_info *info = gm_plan_get_info(plan);
            printf("%u ticks, %llu operations: %.2f s, step %.2f of %.2f\n", m.traces[0]->n,
                   (unsigned long long)info->n_ops, seconds, info->step_seconds,
                   info->bound_seconds);
            CHECK_OK(gm_plan_check(plan, &m.input));
#ifndef __SANITIZE_ADDRESS__
            CHECK(seconds < 1.0);
#endif
            gm_plan_free(plan);
            model_free(&m);
        }
    }
}

int main(void)
{
    test_random_models();
    test_one_rank();
    test_room_for_all();
    test_ranks_agree();
    test_gathers_in_order_of_need();
    test_checker_misses_no_gather();
    test_checker_sees_early_gathers();
    test_checker_sees_old_shards();
    test_checker_sees_wrong_places();
    test_needed_bytes();
    test_one_more_trace();
    test_against_brute_force();
    test_real_sizes();
    test_budgets();
    test_planning_time();
    printf("test_plan_ranks: ok\n");
    return 0;
}
