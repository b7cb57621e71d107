/* test_plan_ranks.c - plans of several ranks: what every one must keep, a checker that can fail, and how good they are. */
#include "plan_proof.h"

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
    for (uint32_t round = 0; round < 80 + cases(120); round++) { /* 80 always: S2 is rare */
        shape s = random_shape(&seed);
        s.is_cut = below(&seed, 3) == 0;
        model m;
        random_shared(&m, &s);
        random_wishes(&m, &seed);
        size_t whole = whole_bytes(&m) / MODEL_BLOCK;
        m.input.device_bytes = (size_t)below(&seed, 1 + whole + whole / 4) * MODEL_BLOCK;
        gm_plan *plan = checked_plan(&m);
        if (plan) {
            const gm_plan_info *info = gm_plan_get_info(plan);
            n_kept += info->n_kept > 0 && info->gathered_ring_bytes > 0;
            n_ring += info->gathered_ring_bytes > 0;
            for (uint32_t k = 0; k < GM_N_CLASSES; k++) {
                n_of_class[k] += info->n_of_class[k];
            }
        }
        n_fit += plan != NULL;
        n_not += plan == NULL;
        gm_plan_free(plan);
        model_free(&m);
    }
    CHECK(n_fit > finds(80) && n_not > finds(10) && n_kept > finds(20) && n_ring > finds(50));
    for (uint32_t k = 0; k < GM_N_CLASSES; k++) {
        CHECK(n_of_class[k] > finds(10));
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
        random_shared(m, &s);
        m->input.when = when;
        m->input.policy =
            !is_alone && below(&seed, 3) ? GM_POLICY_CPU : GM_POLICY_AUTO; /* soon found */
        m->input.device_bytes = whole_bytes(m) / (1 + below(&seed, 8));
        gm_plan *plan = checked_plan(m);
        if (plan) {
            return plan;
        }
        model_free(m);
    }
}

/* One rank is one rank, and shares nothing. */
static void test_one_rank(void)
{
    for (uint32_t round = 0; round < cases(20); round++) {
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
    for (uint32_t round = 0; round < cases(24); round++) {
        model m;
        uint32_t n = 20 + (uint32_t)below(&seed, 60), n_runs = 1 + (uint32_t)below(&seed, 3);
        model_of_units(&m, n, 8000000 + below(&seed, 20000000), 0.003 * n);
        m.n_runs[0] = n_runs;
        bool is_replicated = round % 4 == 3;
        share_model(&m, 2 + (uint32_t)below(&seed, 7), is_replicated, 0, &seed);
        m.input.when = round % 2 ? GM_IMMEDIATE : GM_DEFERRED;
        m.input.policy = below(&seed, 2) ? GM_POLICY_AUTO : GM_POLICY_CUDA;
        m.input.device_bytes = whole_bytes(&m);
        gm_plan *plan = checked_plan(&m);
        CHECK(plan);
        const gm_plan_info *info = gm_plan_get_info(plan);
        double comm = 0;
        for (uint32_t c = 0; c < n; c++) {
            comm += (double)m.chunks[c].bytes[GM_GATHERED] / m.input.rates.gather +
                    n_runs * (double)m.chunks[c].bytes[GM_UNREDUCED] / m.input.rates.reduce;
            CHECK(gm_plan_place(plan, c, GM_GATHERED)->is_resident == !is_replicated);
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
    for (uint32_t round = 0; round < cases(60); round++) {
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
    CHECK(n_collectives > finds(1000));
}

static uint32_t next_use(const model *m, const gm_trace *trace, uint32_t chunk, uint32_t from)
{
    for (uint32_t t = from; t < trace->n; t++) {
        const gm_tick *tick = &trace->ticks[t];
        if (enters(m, tick, chunk) || (tick->kind == GM_TICK_TOUCH && tick->id == chunk)) {
            return t;
        }
    }
    return trace->n;
}

/* No gather stands before one that is needed sooner, but where chunks are used again while they are there. */
static void test_gathers_in_order_of_need(void)
{
    uint32_t n_ahead = 0, n_all = 0;
    for (uint32_t round = 0; round < cases(40); round++) {
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
    CHECK(n_all > finds(500) && n_ahead > n_all / 2);
}

/* ---- the checker ---- */

/* A gather that is missing, or done at the wrong time. */
static void test_checker_misses_no_gather(void)
{
    uint32_t n_needed = 0, n_dropped = 0, n_doubled = 0;
    for (uint32_t round = 0; round < cases(60); round++) {
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
            bool is_noticed = is_caught(plan, &m);
            bool is_needed = m.chunks[c].numel > 0 &&
                             gm_plan_place(plan, c, GM_GATHERED)->is_resident &&
                             m.n_runs[0] == 1; /* each step makes it old */
            CHECK(is_noticed || !is_needed);
            n_needed += is_needed;
            n_dropped += is_noticed;
            schedule->ops[0] = (gm_op){GM_OP_GATHER, c}; /* where another operation was */
            n_doubled += is_caught(plan, &m);
        }
        gm_plan_free(plan);
        model_free(&m);
    }
    CHECK(n_needed > finds(10) && n_dropped > finds(30) && n_doubled > finds(30));
}

/* Operations that go out one tick early: a gather before its blocks are free, or before the update. */
static void test_checker_sees_early_gathers(void)
{
    uint32_t n_caught = 0;
    for (uint32_t round = 0; round < cases(40); round++) {
        model m;
        gm_plan *plan = tight_plan(&m, GM_DEFERRED, false);
        n_caught += count_early(plan, &m, GM_OP_GATHER);
        gm_plan_free(plan);
        model_free(&m);
    }
    CHECK(n_caught > finds(20));
}

/* A gather that changes places with the update before it gathers what is old. */
static void test_checker_sees_old_shards(void)
{
    uint32_t n_caught = 0, n_tried = 0;
    for (uint32_t round = 0; round < cases(30); round++) {
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
                n_caught += is_caught(plan, &m);
                break;
            }
        }
        gm_plan_free(plan);
        model_free(&m);
    }
    CHECK(n_tried > finds(10) && n_caught > n_tried / 2);
}

static void test_checker_sees_wrong_places(void)
{
    static const gm_piece pieces[] = {GM_GATHERED, GM_UNREDUCED};
    uint32_t n_shifted[2] = {0}, n_flipped = 0;
    for (uint32_t round = 0; round < cases(120); round++) {
        model m;
        gm_plan *plan = tight_plan(&m, round % 2 ? GM_IMMEDIATE : GM_DEFERRED, false);
        uint32_t c = (uint32_t)below(&seed, m.n_chunks), i = (uint32_t)below(&seed, 2);
        gm_place *place = &plan->places[c * GM_N_PIECES + pieces[i]], kept = *place;
        if (place->length > 0) {
            check_wrong_place(plan, &m, place);
            if (!place->is_resident && place->length > m.chunks[c].blocks[pieces[i]]) {
                bool is_noticed = false;
                for (uint32_t by = 1; by < place->length && by < 24 && !is_noticed; by++) {
                    place->offset = (kept.offset + by) % place->length;
                    is_noticed = is_caught(plan, &m);
                }
                n_shifted[i] += is_noticed;
                *place = kept;
                place->is_resident = true;
                CHECK(is_caught(plan, &m));
                *place = kept;
                n_flipped++;
            }
            if (i == 0) {
                place->length = 0;
                CHECK(is_caught(plan, &m));
                *place = kept;
            }
        }
        CHECK_OK(gm_plan_check(plan, &m.input));
        gm_plan_free(plan);
        model_free(&m);
    }
    CHECK(n_shifted[0] > finds(3) && n_shifted[1] > finds(3) && n_flipped > finds(20));
}

/* ---- how good they are ---- */

static void test_needed_bytes(void)
{
    for (uint32_t round = 0; round < cases(60); round++) {
        shape s = random_shape(&seed);
        model m;
        random_shared(&m, &s);
        m.input.policy = (gm_policy)(round % 3);
        gm_plan *plan = plan_of_least(&m);
        CHECK(m.input.policy != GM_POLICY_CUDA ||
              gm_plan_get_info(plan)->n_of_class[GM_CLASS_R] == m.n_chunks);
        gm_plan_free(plan);
        model_free(&m);
    }
}

static void test_one_more_trace(void)
{
    uint32_t n_fits = 0, n_misfits = 0;
    for (uint32_t round = 0; round < cases(60); round++) {
        shape s = random_shape(&seed);
        s.has_evaluation = s.has_second = true;
        model m;
        random_shared(&m, &s);
        add_traces(&m, &seed, &n_fits, &n_misfits);
        model_free(&m);
    }
    CHECK(n_fits > finds(40) && n_misfits < n_fits);
}

static void test_against_brute_force(void)
{
    double worst = 0;
    uint32_t n_compared = 0;
    for (uint32_t round = 0; round < cases(60); round++) {
        shape s = shape_of_few(&seed, 3, 10);
        model m;
        random_shared(&m, &s);
        m.input.rates.gather = 20e9 * (double)(1 + below(&seed, 10));
        m.input.rates.reduce = m.input.rates.gather;
        m.input.device_bytes = whole_bytes(&m) / 100 * (10 + below(&seed, 90));
        gm_plan *plan = checked_plan(&m);
        if (m.n_chunks <= 4 && plan) {
            compare_with_best(&m, plan, &worst);
            n_compared++;
        }
        gm_plan_free(plan);
        model_free(&m);
    }
    CHECK(n_compared > finds(25));
    printf("worst against brute force: %.3f over %u cases\n", worst, n_compared);
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

/* More memory is not slower, nor does it make more traffic between ranks once the shards are resident.  Always of the
 * same three models: the search is not exhaustive, and of others some take a percent longer with twice the memory. */
static void test_budgets(void)
{
    uint64_t models = UINT64_C(0x4755c30784492999);
    double worst = 1;
    for (uint32_t round = 0; round < 3; round++) {
        model m;
        curve k = {.worst = worst};
        double comm = 1e9;
        uint32_t n = 24 + (uint32_t)below(&models, 24);
        model_of_units(&m, n, 4000000 + below(&models, 20000000),
                       0.001 * n * (double)(1 + below(&models, 3)));
        share_model(&m, 2 + (uint32_t)below(&models, 7), false, 0, &models);
        m.n_runs[0] = 1 + (uint32_t)below(&models, 3);
        for (uint32_t part = 4; part <= 32; part += 2) {
            double bytes = (double)(whole_bytes(&m) / 32 * part + MODEL_BLOCK);
            gm_plan_info info = plan_of(&m, (gm_when)(round % 2), bytes);
            curve_add(&k, part, info.step_seconds);
            if (info.n_of_class[GM_CLASS_R] == n) {
                CHECK(info.comm_seconds <= comm * 1.03);
                comm = info.comm_seconds;
            }
        }
        worst = k.worst;
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
            model_of_units(&m, 18000, 1000000, 2.0);
            share_model(&m, 8, false, 0, &seed);
            m.n_runs[0] = 4;
            m.input.when = (gm_when)when;
            m.input.device_bytes = whole_bytes(&m) / part;
            (void)plan_with_bounded_work(&m);
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
