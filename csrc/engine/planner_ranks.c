/* planner_ranks.c - one plan for several ranks: what each must know of the others before, and
 * adopting it together. */
#include "engine/engine_impl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What ranks compare and join before they plan; each becomes the largest of all ranks. */
typedef struct common {
    uint64_t cannot;       /* something shown may not be moved, or nothing is known to plan from */
    uint64_t has_left;     /* the placement, for lack of memory */
    uint64_t spared_bytes; /* complement of those that a plan may have */
    uint64_t less_spares;  /* complement of those of the host that it may have for speculation */
    uint64_t when, has_repeats;
    uint64_t passes, other_passes; /* a hash of what ran, and its complement: equal if all agree */
    uint64_t n_ticks, other_n_ticks;
    uint64_t is_wanted; /* a plan */
    uint64_t slowness;  /* complement of the bits of gm_inputs_seen_rate, 0: not known */
} common;

static bool is_anything_shown(const gm_engine *engine)
{
    bool is_shown = engine->unit.n_touched > 0 || engine->unit.n_entered > 0;
    for (uint32_t id = 0; id < gm_layout_n_chunks(engine->layout); id++) {
        is_shown = is_shown || gm_chunks_pins(engine->chunks, id, engine->shown) > 0;
    }
    return is_shown;
}

static uint64_t bits_of(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static double double_of(uint64_t bits)
{
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void describe(const gm_engine *engine, const gm_inputs *in, common *out)
{
    double seen = gm_inputs_seen_rate(engine);
    uint64_t hash = UINT64_C(0xcbf29ce484222325), n_ticks = 0;
    for (uint32_t t = 0; t < in->plan.n_traces; t++) {
        hash = gm_fnv1a(gm_fnv1a(hash, in->traces[t]->hash), in->n_runs[t]);
        n_ticks += in->traces[t]->n;
    }
    *out = (common){
        .cannot = is_anything_shown(engine) || engine->inputs.rates.h2d <= 0 ||
                  engine->inputs.runs.n == 0,
        .has_left = engine->room.plan == NULL,
        .spared_bytes = ~(uint64_t)in->plan.device_bytes,
        .less_spares = ~(uint64_t)in->plan.spare_bytes,
        .when = in->plan.when,
        .has_repeats = engine->arrive.has_repeats,
        .passes = hash,
        .other_passes = ~hash,
        .n_ticks = n_ticks,
        .other_n_ticks = ~n_ticks,
        .is_wanted = engine->room.wants_plan || !engine->weights.collectives,
        .slowness = seen > 0 ? ~bits_of(seen) : 0,
    };
}

/* A tick in one number, 0 behind the last one. */
static uint64_t code_of(const gm_inputs *in, uint64_t number)
{
    for (uint32_t t = 0; t < in->plan.n_traces; number -= in->traces[t++]->n) {
        if (number < in->traces[t]->n) {
            const gm_tick *tick = &in->traces[t]->ticks[number];
            return (uint64_t)(tick->kind + 1) << 32 | tick->id;
        }
    }
    return 0;
}

static void say_tick(const gm_engine *engine, uint64_t code, char *out, size_t bytes)
{
    static const char *const kinds[] = {"nothing more", "unit %s is entered",
                                        "the backward needs %s",
                                        "the gradients of %s are complete"};
    char which[184] = "";
    if (code >> 32 == GM_TICK_ENTER + 1) {
        gm_names_unit(engine->names, (uint32_t)code, which, sizeof which);
    } else {
        gm_names_chunk(engine->names, (uint32_t)code, which, sizeof which);
    }
    (void)snprintf(out, bytes, kinds[code >> 32], which);
}

/* Names the first tick that is not the same on all ranks, of which one has `most`. */
static gm_status refuse_passes(gm_engine *engine, const gm_inputs *in, uint64_t most)
{
    const char *before = "the ranks have run different passes since the last step";
    const char *rule = "every rank must run the same units in the same order";
    uint64_t *values = calloc(2 * most + 1, sizeof *values);
    GM_FAIL_IF(!values, GM_ERR_NOMEM, "HOST: %s; %s", before, rule);
    for (uint64_t i = 0; i < most; i++) {
        values[2 * i] = code_of(in, i);
        values[2 * i + 1] = ~values[2 * i];
    }
    gm_status status = gm_ranks_max(engine, values, 2 * most);
    uint64_t first = 0; /* the same on all ranks */
    while (first < most && values[2 * first] == ~values[2 * first + 1]) {
        first++;
    }
    free(values);
    GM_TRY(status);
    GM_FAIL_IF(first == most, GM_ERR_STATE, "%s, the same ones but not as often; %s", before, rule);
    char said[600] = "";
    GM_TRY(gm_ranks_tell(engine, code_of(in, first), say_tick, said, sizeof said));
    return GM_FAIL(GM_ERR_STATE, "%s, from tick %llu on: %s; %s", before, (unsigned long long)first,
                   said, rule);
}

/* The traces with the longest times and the most memory of all ranks: copies, to be freed with
 * `in`. */
static gm_status join_traces(gm_engine *engine, gm_inputs *in, size_t n_ticks)
{
    enum { N = 3 };
    uint64_t *values = calloc(N * n_ticks + 1, sizeof *values), *at = values;
    in->copies = calloc(in->plan.n_traces + 1u, sizeof *in->copies);
    in->ticks = calloc(n_ticks + 1, sizeof *in->ticks);
    if (!values || !in->copies || !in->ticks) {
        free(values);
        return GM_FAIL(GM_ERR_NOMEM, "HOST: a plan of %zu ticks", n_ticks);
    }
    gm_tick *tick = in->ticks;
    for (uint32_t t = 0; t < in->plan.n_traces; t++) {
        in->copies[t] = *in->traces[t];
        in->copies[t].ticks = tick;
        memcpy(tick, in->traces[t]->ticks, in->traces[t]->n * sizeof *tick);
        for (uint32_t i = 0; i < in->traces[t]->n; i++, tick++, at += N) {
            at[0] = bits_of(tick->seconds);
            at[1] = tick->outside_bytes;
            at[2] = tick->until;
        }
        in->traces[t] = &in->copies[t];
    }
    gm_status status = gm_ranks_max(engine, values, N * n_ticks);
    for (size_t i = 0; i < n_ticks && status == GM_OK; i++) {
        in->ticks[i].seconds = (float)double_of(values[N * i]);
        in->ticks[i].outside_bytes = values[N * i + 1];
        in->ticks[i].until = (uint32_t)values[N * i + 2];
    }
    free(values);
    return status;
}

/* Makes the plan; *out is NULL where a rank cannot, on every rank. */
static gm_status make_common_plan(gm_engine *engine, gm_inputs *in, gm_plan **out)
{
    gm_plan *plan = NULL;
    gm_status made = gm_plan_new(&in->plan, &plan);
#ifdef GM_DEBUG
    GM_ASSERT(made != GM_OK || gm_plan_check(plan, &in->plan) == GM_OK);
#endif
    uint64_t hash = made == GM_OK ? gm_plan_get_info(plan)->hash : 0;
    uint64_t values[3] = {made != GM_OK, hash, ~hash};
    gm_status status = gm_ranks_max(engine, values, 3);
    if (status == GM_OK && values[0] == 0 && values[1] != ~values[2]) {
        status = GM_FAIL(GM_ERR_STATE, "the ranks have made different plans (here %016llx)",
                         (unsigned long long)hash);
    }
    if (status != GM_OK || values[0]) {
        gm_plan_free(plan);
        plan = NULL;
    }
    *out = plan;
    return status;
}

/* All ranks or none; *out_bytes is what a plan may have where this one did not fit a rank. */
static gm_status adopt_together(gm_engine *engine, gm_plan *plan, bool *out, size_t *out_bytes)
{
    uint32_t n_blocks = 0;
    size_t block_bytes = engine->device->block_bytes, bytes = gm_plan_n_blocks(plan) * block_bytes;
    gm_status status = gm_chunks_set_limit(engine->chunks, bytes, NULL);
    status = status == GM_OK ? gm_chunks_adopt(engine->chunks, plan, &n_blocks) : status;
    status = status == GM_OK ? gm_stage_new(engine) : status;
    status = status == GM_OK ? gm_weights_adopt(engine, plan) : status;
    size_t had = n_blocks * block_bytes, has = gm_inputs_device_bytes(engine);
    uint64_t values[2] = {status != GM_OK, ~(uint64_t)(has < had ? has : had)};
    GM_TRY(gm_ranks_max(engine, values, 2));
    *out = values[0] == 0;
    *out_bytes = (size_t)~values[1];
    if (*out) {
        gm_room_follow(engine, plan);
        gm_speculation_take_room(engine);
    }
    return GM_OK;
}

/* Back to demand, on all ranks. */
static gm_status part_from_plan(gm_engine *engine)
{
    gm_plan *old = engine->weights.collectives;
    GM_TRY(gm_room_drop_plan(engine)); /* which leaves it to this */
    GM_TRY(gm_weights_forget_all(engine));
    gm_plan_free(old);
    return GM_OK;
}

static gm_status plan_from(gm_engine *engine, gm_inputs *in)
{
    gm_plan *plan;
    bool is_done = false;
    for (int i = 0; i < GM_MOST_TRIES && !is_done; i++) {
        GM_TRY(make_common_plan(engine, in, &plan));
        if (!plan) {
            return part_from_plan(engine);
        }
        uint64_t hash = gm_plan_get_info(plan)->hash;
        if (i == 0 && !in->has_left && engine->weights.collectives &&
            engine->planner_ranks.common_hash == hash) {
            gm_plan_free(engine->weights.collectives); /* the same, with older predictions */
            gm_weights_renew(engine, plan);
            gm_room_set_plan(engine, plan);
            return GM_OK;
        }
        GM_TRY(gm_update_issue_all(engine)); /* in the places they know */
        GM_TRY(part_from_plan(engine));
        GM_TRY(adopt_together(engine, plan, &is_done, &in->plan.device_bytes));
        engine->planner_ranks.common_hash = hash;
        if (!is_done) {
            if (engine->weights.collectives != plan) {
                gm_plan_free(plan);
            }
            GM_TRY(part_from_plan(engine));
        }
    }
    return GM_OK;
}

gm_status gm_planner_ranks_run(gm_engine *engine)
{
    bool is_due = engine->weights.collectives == NULL;
    if (!is_due) {
        GM_TRY(gm_ranks_wish(engine, engine->room.wants_plan, &is_due));
    }
    if (!is_due) {
        return GM_OK;
    }
    gm_inputs in = {0};
    common here, all;
    gm_status status;
    GM_TRY_GOTO(status, done, gm_inputs_fill(engine, &in));
    describe(engine, &in, &here);
    all = here;
    GM_TRY_GOTO(status, done,
                gm_ranks_max(engine, (uint64_t *)&all, sizeof all / sizeof(uint64_t)));
    if (all.passes != ~all.other_passes || all.n_ticks != ~all.other_n_ticks) {
        status = refuse_passes(engine, &in, all.n_ticks);
        goto done;
    }
    gm_room_end_wish(engine);
    gm_room_want_plan(engine, all.is_wanted && all.cannot);
    if (all.is_wanted && !all.cannot) {
        gm_inputs_correct_rate(engine, all.slowness ? double_of(~all.slowness) : 0);
        in.plan.rates = engine->inputs.rates;
        in.has_left = all.has_left > 0;
        in.plan.device_bytes = (size_t)~all.spared_bytes;
        in.plan.spare_bytes = (size_t)~all.less_spares;
        in.plan.when = all.has_repeats ? GM_DEFERRED : (gm_when)all.when;
        status = join_traces(engine, &in, here.n_ticks);
        status = status == GM_OK ? plan_from(engine, &in) : status;
    }
done:
    gm_inputs_free(&in);
    return status;
}
