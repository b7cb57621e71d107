/* test_engine.c - the engine against a plain model of every parameter: random passes, steps, fields, leases and errors on
 * the host device and on the chaos device, with and without plans; every bit that a call shows.
 *
 * The model is what a parameter would be alone in memory: weight, low part, moments and gradient, changed by the same
 * arithmetic (arith.h).  Where its bytes are, when they move and when updates run is the engine's business; no call may
 * show it.  Each world is a function of its seed:  ENGINE_SEED=7 test_engine  plays one, on both devices. */
#include <string.h>

#include "arith/format.h"
#include "check.h"
#include "chaos/chaos.h"
#include "engine/engine.h"

enum {
    N_SEEDS = 200,
    N_STEPS = 14,
    MOST_PARAMS = 20,
    MOST_UNITS = 7,
    MOST_LINKS = MOST_UNITS * MOST_PARAMS,
    MOST_NUMEL = 3000,
    MOST_LEASES = 8,
    BLOCK = 4096
};

/* A parameter as the engine must show it. */
typedef struct model {
    gm_engine_param spec;
    gm_dtype grad_dtype;
    uint8_t *weight, *low, *grad;
    uint8_t *left_weight, *left_low; /* as the last update or the last master written left them */
    float *m, *v;
    int64_t step;
    bool has_grad;
    bool is_written; /* through a lease, and the engine has not looked since */
} model;

typedef struct shown {
    gm_lease *lease;
    uint32_t param;
    bool is_watched;
} shown;

typedef struct world {
    uint64_t random;
    gm_device *device; /* the engine's */
    bool is_chaos;
    gm_engine *engine;
    model params[MOST_PARAMS];
    uint32_t n_params, n_units;
    uint32_t unit_params[MOST_LINKS], unit_begin[MOST_UNITS + 1];
    bool is_in_pass[MOST_PARAMS]; /* a unit of the present pass uses it */
    shown leases[MOST_LEASES];
    uint32_t n_leases;
    gm_lease *uses[MOST_PARAMS]; /* through which units give addresses away */
    size_t outside;
    gm_adam_hyper hyper;
} world;

/* What all worlds together have met: a test that meets none of it proves nothing. */
static struct {
    unsigned long long plans, breaks, deviations, evictions, immediate, no_room, deaths, disarmed;
    unsigned long long found_writes, refused_writes, undone, clips, late, staying, refused_homes;
    unsigned long long late_writes;
} met;

static uint64_t seed;
static const char *device_name;
static bool is_playing;

static void say_seed(void)
{
    if (is_playing) {
        fprintf(stderr, "seed %llu on the %s device\n", (unsigned long long)seed, device_name);
    }
}

static uint64_t draw(world *w, uint64_t bound)
{
    return next_random(&w->random) % bound;
}

static bool chance(world *w, uint64_t one_in)
{
    return draw(w, one_in) == 0;
}

/* ---- the model ---- */

static void draw_floats(world *w, float *out, uint64_t n, float scale)
{
    for (uint64_t i = 0; i < n; i++) {
        int32_t bits = (int32_t)(next_random(&w->random) & 0xffffff) - 0x800000;
        out[i] = (float)bits * 0x1p-23f * scale;
    }
}

static size_t weight_bytes(const model *p)
{
    return p->spec.numel * p->spec.weight_bytes;
}

static size_t grad_bytes(const model *p)
{
    return p->spec.numel * gm_dtype_bytes(p->grad_dtype);
}

/* Random weights in the parameter's own dtype; any bytes where the engine does not compute with them.  Or those that were
 * left: what was written since is undone, as by who takes noise away again. */
static void draw_weight(world *w, const model *p, uint8_t *out)
{
    static float values[MOST_NUMEL];
    if (!p->spec.has_grad) {
        for (size_t i = 0; i < weight_bytes(p); i++) {
            out[i] = (uint8_t)next_random(&w->random);
        }
        return;
    }
    if (p->spec.has_low && chance(w, 3)) {
        met.undone += memcmp(p->weight, p->left_weight, weight_bytes(p)) != 0;
        memcpy(out, p->left_weight, weight_bytes(p));
        return;
    }
    draw_floats(w, values, p->spec.numel, 2);
    gm_grad_add_host(&(gm_grad_add_args){.dst = out,
                                         .src = values,
                                         .dst_dtype = p->spec.format,
                                         .src_dtype = GM_F32,
                                         .numel = p->spec.numel},
                     NULL);
}

/* Weights and low parts are of each other. */
static void note_left(model *p)
{
    memcpy(p->left_weight, p->weight, weight_bytes(p));
    memcpy(p->left_low, p->low, p->spec.numel * 4);
}

/* The weight has new bytes: where they are others than were left the master is the new weight, else it is the one that was
 * left.  So it does not matter what was written in between. */
static void set_weight(model *p, const uint8_t *weight)
{
    if (p->spec.has_low) {
        memcpy(p->low, p->left_low, p->spec.numel * 4);
        gm_reconcile_host(p->spec.format, p->left_weight, weight, p->low, p->spec.numel);
    }
    memcpy(p->weight, weight, weight_bytes(p));
}

static void set_master(model *p, const float *master)
{
    gm_split_host(p->spec.format, GM_F32, master, p->weight, p->low, p->spec.numel, NULL);
    note_left(p);
}

static void get_master(const model *p, float *out)
{
    if (p->spec.has_low) {
        gm_merge_host(p->spec.format, p->weight, p->low, out, p->spec.numel, NULL);
    } else {
        memcpy(out, p->weight, weight_bytes(p));
    }
}

static void add_grad(model *p, const void *grad, gm_dtype dtype)
{
    gm_grad_add_host(&(gm_grad_add_args){.dst = p->grad,
                                         .src = grad,
                                         .dst_dtype = p->grad_dtype,
                                         .src_dtype = dtype,
                                         .numel = p->spec.numel,
                                         .accumulate = p->has_grad,
                                         .divisor = 1},
                     NULL);
    p->has_grad = true;
}

static void update(model *p, const gm_adam_hyper *hyper)
{
    gm_adam_range range = {.end = p->spec.numel};
    CHECK_OK(gm_adam_scalars_init(hyper, &range.scalars));
    gm_adam_args args = {.format = p->spec.format,
                         .grad_dtype = p->grad_dtype,
                         .weight = p->weight,
                         .low = p->spec.has_low ? p->low : NULL,
                         .m = p->m,
                         .v = p->v,
                         .grad = p->grad,
                         .ranges = &range,
                         .n_ranges = 1};
    CHECK_OK(gm_adam_host(&args, NULL));
    note_left(p);
}

static void model_new(world *w, model *p, bool is_grad_f32)
{
    static const gm_dtype formats[] = {GM_F32, GM_BF16, GM_F16};
    gm_dtype format = formats[draw(w, 3)];
    bool has_grad = !chance(w, 6), has_moments = has_grad && !chance(w, 8);
    p->spec = (gm_engine_param){
        .numel = chance(w, 12) ? draw(w, 2) : 1 + draw(w, MOST_NUMEL - 1),
        .weight_bytes = has_grad ? (uint32_t)gm_dtype_bytes(format) : (uint32_t)1 << draw(w, 4),
        .format = format,
        .has_low = has_moments && format != GM_F32,
        .has_moments = has_moments,
        .has_grad = has_grad,
    };
    p->grad_dtype = is_grad_f32 ? GM_F32 : format;
    size_t n = MOST_NUMEL * 8;
    p->weight = calloc(1, n);
    p->low = calloc(1, n);
    p->left_weight = calloc(1, n);
    p->left_low = calloc(1, n);
    p->grad = calloc(1, n);
    p->m = calloc(1, n);
    p->v = calloc(1, n);
    CHECK(p->weight && p->low && p->left_weight && p->left_low && p->grad && p->m && p->v);
}

static void model_free(model *p)
{
    free(p->weight);
    free(p->low);
    free(p->left_weight);
    free(p->left_low);
    free(p->grad);
    free(p->m);
    free(p->v);
}

/* A copy that shares nothing. */
static model model_copy(const model *p)
{
    model copy = *p;
    size_t n = MOST_NUMEL * 8;
    copy.weight = memcpy(malloc(n), p->weight, n);
    copy.low = memcpy(malloc(n), p->low, n);
    copy.left_weight = memcpy(malloc(n), p->left_weight, n);
    copy.left_low = memcpy(malloc(n), p->left_low, n);
    copy.grad = memcpy(malloc(n), p->grad, n);
    copy.m = memcpy(malloc(n), p->m, n);
    copy.v = memcpy(malloc(n), p->v, n);
    return copy;
}

/* ---- what the engine shows ---- */

/* Whether all that can be read of the parameter is as in the model. */
static bool is_as(world *w, uint32_t id, const model *p)
{
    static uint8_t read[MOST_NUMEL * 8];
    static float master[MOST_NUMEL];
    CHECK_OK(gm_engine_read(w->engine, id, GM_FIELD_WEIGHT, 0, p->spec.numel, read));
    bool is_same = memcmp(read, p->weight, weight_bytes(p)) == 0;
    if (p->spec.has_moments) {
        CHECK_OK(gm_engine_read(w->engine, id, GM_FIELD_MASTER, 0, p->spec.numel, read));
        get_master(p, master);
        is_same = is_same && memcmp(read, master, p->spec.numel * 4) == 0;
        CHECK_OK(gm_engine_read(w->engine, id, GM_FIELD_M, 0, p->spec.numel, read));
        is_same = is_same && memcmp(read, p->m, p->spec.numel * 4) == 0;
        CHECK_OK(gm_engine_read(w->engine, id, GM_FIELD_V, 0, p->spec.numel, read));
        is_same = is_same && memcmp(read, p->v, p->spec.numel * 4) == 0;
    }
    CHECK(gm_engine_has_grad(w->engine, id) == p->has_grad);
    if (p->has_grad) {
        CHECK_OK(gm_engine_read(w->engine, id, GM_FIELD_GRAD, 0, p->spec.numel, read));
        is_same = is_same && memcmp(read, p->grad, grad_bytes(p)) == 0;
    }
    return is_same;
}

/* The engine has compared what leases show with what they showed. */
static void note_looked(world *w)
{
    for (uint32_t id = 0; id < w->n_params; id++) {
        met.found_writes += w->params[id].is_written;
        w->params[id].is_written = false;
    }
}

static void check_fields(world *w, uint32_t id)
{
    CHECK(is_as(w, id, &w->params[id]));
    note_looked(w);
}

/* The bytes at an address that shows a parameter now, as work of the caller's stream reads them. */
static void check_shown(world *w, uint32_t id, uintptr_t address)
{
    const model *p = &w->params[id];
    if (p->spec.numel > 0) {
        gm_note_access(w->device, (const void *)address, weight_bytes(p), false, 0);
        CHECK(memcmp((const void *)address, p->weight, weight_bytes(p)) == 0);
    }
}

static void check_leases(world *w)
{
    for (uint32_t i = 0; i < w->n_leases; i++) {
        check_shown(w, w->leases[i].param, gm_lease_address(w->leases[i].lease));
    }
}

/* ---- leases ---- */

static gm_status lease_new(gm_engine *engine, uint32_t id, bool is_watched, gm_lease **out)
{
    gm_status status = gm_lease_new(engine, id, out);
    if (status != GM_OK) {
        return status;
    }
    status = gm_lease_pin(*out, 0);
    if (status == GM_OK && is_watched) {
        status = gm_lease_watch(*out, 0);
    }
    if (status != GM_OK) {
        gm_lease_end(*out);
    }
    return status;
}

static void add_lease(world *w)
{
    uint32_t id = (uint32_t)draw(w, w->n_params);
    bool is_watched = chance(w, 2);
    if (w->n_leases == MOST_LEASES || w->params[id].spec.numel == 0) {
        return;
    }
    gm_lease *lease;
    gm_status status = lease_new(w->engine, id, is_watched, &lease);
    if (status == GM_ERR_NOMEM) { /* the others hold the budget; nothing has changed */
        met.no_room++;
        return;
    }
    CHECK_OK(status);
    w->leases[w->n_leases++] = (shown){lease, id, is_watched};
    check_shown(w, id, gm_lease_address(lease));
}

static void end_lease(world *w, uint32_t i)
{
    gm_lease_end(w->leases[i].lease);
    w->leases[i] = w->leases[--w->n_leases];
}

static void end_leases(world *w)
{
    while (w->n_leases > 0) {
        end_lease(w, w->n_leases - 1);
    }
}

/* Some elements change, by work of the caller's stream; `bytes` gets what was there. */
static void scribble(world *w, const model *p, uint8_t *at, uint8_t *bytes)
{
    static uint8_t weight[MOST_NUMEL * 8];
    memcpy(bytes, at, weight_bytes(p));
    draw_weight(w, p, weight);
    uint64_t first = draw(w, p->spec.numel), n = 1 + draw(w, p->spec.numel - first);
    gm_note_access(w->device, at, weight_bytes(p), true, 0);
    memcpy(at + first * p->spec.weight_bytes, weight + first * p->spec.weight_bytes,
           n * p->spec.weight_bytes);
}

static void write_through_lease(world *w, uint32_t i)
{
    static uint8_t old[MOST_NUMEL * 8];
    model *p = &w->params[w->leases[i].param];
    if (!w->leases[i].is_watched) {
        return;
    }
    uint8_t *at = (uint8_t *)gm_lease_address(w->leases[i].lease);
    do {
        scribble(w, p, at, old);
        set_weight(p, at);
        p->is_written = true;
        if (chance(w, 2)) {
            check_fields(w, w->leases[i].param);
        }
    } while (chance(w, 2));
}

/* ---- other calls, at any moment between two passes' ticks ---- */

static void write_field(world *w, uint32_t id)
{
    static float values[MOST_NUMEL];
    static uint8_t weight[MOST_NUMEL * 8];
    model *p = &w->params[id];
    uint64_t n = p->spec.numel;
    gm_field field = (gm_field)draw(w, 5);
    draw_floats(w, values, n, 1);
    if (field == GM_FIELD_WEIGHT) {
        draw_weight(w, p, weight);
        CHECK_OK(gm_engine_write(w->engine, id, field, weight, 0));
        set_weight(p, weight);
    } else if (field == GM_FIELD_GRAD && p->spec.has_grad) {
        p->has_grad = false;
        add_grad(p, values, GM_F32);
        CHECK_OK(gm_engine_write(w->engine, id, field, p->grad, 0));
    } else if (!p->spec.has_moments) {
        CHECK(field == GM_FIELD_MASTER ||
              gm_engine_write(w->engine, id, field, values, 0) == GM_ERR_STATE);
        return;
    } else {
        CHECK_OK(gm_engine_write(w->engine, id, field, values, 0));
        if (field == GM_FIELD_MASTER) {
            set_master(p, values);
        } else {
            memcpy(field == GM_FIELD_M ? p->m : p->v, values, 4 * n);
        }
    }
    note_looked(w);
}

/* Parameters to take the norm of, and its square. */
static uint32_t draw_norm(world *w, uint32_t *ids, gm_sumsq *want)
{
    uint32_t n = 0;
    memset(want, 0, sizeof *want);
    for (uint32_t id = 0; id < w->n_params; id++) {
        const model *p = &w->params[id];
        if (p->spec.has_grad && !chance(w, 4)) {
            ids[n++] = id;
            if (p->has_grad) {
                gm_sumsq_host(p->grad, p->grad_dtype, p->spec.numel, want, NULL);
            }
        }
    }
    return n;
}

static void check_norm(world *w)
{
    uint32_t ids[MOST_PARAMS];
    gm_sumsq found, want;
    uint32_t n = draw_norm(w, ids, &want);
    CHECK_OK(gm_engine_sumsq(w->engine, ids, n, &found, 0));
    double one = gm_sumsq_value(&found), other = gm_sumsq_value(&want);
    CHECK(memcmp(&one, &other, sizeof one) == 0);
}

static void drop_grad(world *w, uint32_t id)
{
    if (w->params[id].spec.has_grad) {
        CHECK_OK(gm_engine_grad_drop(w->engine, id));
        w->params[id].has_grad = false;
    }
}

static void do_something(world *w)
{
    uint32_t id = (uint32_t)draw(w, w->n_params);
    switch (draw(w, 14)) {
    case 12:
    case 13:
    case 0:
    case 1: add_lease(w); break;
    case 2:
        if (w->n_leases > 0) {
            end_lease(w, (uint32_t)draw(w, w->n_leases));
        }
        break;
    case 3:
    case 4:
        if (w->n_leases > 0) {
            write_through_lease(w, (uint32_t)draw(w, w->n_leases));
        }
        break;
    case 5: write_field(w, id); break;
    case 6: check_norm(w); break;
    case 7: w->outside = chance(w, 2) ? 0 : draw(w, 8) * BLOCK; break;
    case 8: (void)gm_engine_reserve(w->engine, draw(w, 6) * BLOCK); break;
    case 9:
        if (chance(w, 4)) {
            (void)gm_engine_shed(w->engine, draw(w, 6) * BLOCK);
        }
        break;
    case 10: CHECK_OK(gm_engine_drain(w->engine)); break;
    default: check_fields(w, id); break;
    }
    check_leases(w);
}

static void maybe_do_something(world *w, bool is_busy)
{
    while (is_busy && chance(w, 4)) {
        do_something(w);
    }
}

/* ---- passes ---- */

/* After a refusal for lack of room: what others hold is given back, and the same call must succeed. */
static void make_room(world *w)
{
    met.no_room++;
    CHECK(strstr(gm_last_error(), "DEVICE"));
    CHECK_OK(gm_engine_check(w->engine));
    check_leases(w);
    end_leases(w);
    w->outside = 0;
}

static void enter(world *w, uint32_t unit, uint32_t flags)
{
    gm_status status = gm_engine_enter(w->engine, unit, 0, flags);
    if (status == GM_ERR_NOMEM) {
        make_room(w);
        status = gm_engine_enter(w->engine, unit, 0, flags);
    }
    if (status == GM_ERR_NOMEM) { /* a backward has more pinned than a unit needs */
        CHECK_OK(gm_engine_release_touched(w->engine, 0));
        status = gm_engine_enter(w->engine, unit, 0, flags);
    }
    CHECK_OK(status);
    for (uint32_t i = w->unit_begin[unit]; i < w->unit_begin[unit + 1]; i++) {
        check_shown(w, w->unit_params[i], gm_engine_address(w->engine, w->unit_params[i]));
        w->is_in_pass[w->unit_params[i]] = true;
    }
}

/* The unit changes one of its own parameters. */
static void write_inside(world *w, uint32_t unit)
{
    static uint8_t old[MOST_NUMEL * 8];
    uint32_t n = w->unit_begin[unit + 1] - w->unit_begin[unit];
    uint32_t id = w->unit_params[w->unit_begin[unit] + draw(w, n)];
    model *p = &w->params[id];
    if (p->spec.numel == 0) {
        return;
    }
    uint8_t *at = (uint8_t *)gm_engine_address(w->engine, id);
    scribble(w, p, at, old);
    gm_status status = gm_engine_note_write(w->engine, id, 0);
    if (status == GM_ERR_STATE) { /* the old bytes are nowhere: the master could not follow */
        met.refused_writes++;
        CHECK(p->spec.has_low);
        gm_note_access(w->device, at, weight_bytes(p), true, 0);
        memcpy(at, old, weight_bytes(p));
        CHECK_OK(w->device->ops->stream_sync(w->device, 0)); /* nobody is told of this write */
        return;
    }
    CHECK_OK(status);
    set_weight(p, at);
}

/* A kernel of the unit gets an address, and reads. */
static void give_address(world *w, uint32_t unit, bool is_busy)
{
    uint32_t n = w->unit_begin[unit + 1] - w->unit_begin[unit];
    uint32_t id = w->unit_params[w->unit_begin[unit] + draw(w, n)];
    model *p = &w->params[id];
    if (p->spec.numel == 0) {
        return;
    }
    if (!w->uses[id]) {
        CHECK_OK(gm_lease_new(w->engine, id, &w->uses[id]));
    }
    CHECK_OK(gm_lease_watch(w->uses[id], 0));
    gm_note_access(w->device, (void *)gm_lease_address(w->uses[id]), weight_bytes(p), false, 0);
    while (is_busy && chance(w, 4)) {
        write_inside(w, unit);
    }
    maybe_do_something(w, is_busy);
    CHECK_OK(gm_lease_unwatch(w->uses[id]));
}

/* The units of a pass: unit 0 around all others, of which a shape leaves out some. */
static bool is_used(uint64_t shape, uint32_t unit)
{
    return unit == 0 || (shape >> unit & 1);
}

/* false: an error of the user's ended it. */
static bool forward(world *w, uint64_t shape, uint32_t flags, bool is_busy)
{
    memset(w->is_in_pass, 0, sizeof w->is_in_pass);
    uint32_t fails_at = is_busy && chance(w, 8) ? (uint32_t)draw(w, w->n_units) : UINT32_MAX;
    enter(w, 0, flags);
    for (uint32_t unit = 1; unit < w->n_units && unit <= fails_at; unit++) {
        if (is_used(shape, unit)) {
            enter(w, unit, flags);
            while (is_busy && chance(w, 4)) {
                write_inside(w, unit);
            }
            uint64_t random = w->random; /* what comes behind does not depend on these */
            for (uint64_t uses = draw(w, 4); uses > 0; uses--) {
                give_address(w, unit, is_busy);
            }
            w->random = random;
            maybe_do_something(w, is_busy);
            CHECK_OK(gm_engine_leave(w->engine, unit, 0));
        }
    }
    CHECK_OK(gm_engine_leave(w->engine, 0, 0));
    maybe_do_something(w, is_busy);
    return fails_at == UINT32_MAX;
}

static void touch(world *w, uint32_t id)
{
    uintptr_t address = gm_engine_address(w->engine, id);
    gm_status status = gm_engine_touch(w->engine, address, 0);
    if (status == GM_ERR_NOMEM) {
        make_room(w);
        status = gm_engine_touch(w->engine, address, 0);
    }
    if (status == GM_ERR_NOMEM) {
        CHECK_OK(gm_engine_release_touched(w->engine, 0));
        status = gm_engine_touch(w->engine, address, 0);
    }
    CHECK_OK(status);
    check_shown(w, id, address);
}

static void put_grad(world *w, uint32_t id)
{
    static float values[MOST_NUMEL];
    static uint8_t grad[MOST_NUMEL * 4];
    model *p = &w->params[id];
    gm_dtype dtype = chance(w, 4) ? GM_F32 : p->spec.format;
    draw_floats(w, values, p->spec.numel, 0x1p-6f);
    gm_grad_add_host(&(gm_grad_add_args){.dst = grad,
                                         .src = values,
                                         .dst_dtype = dtype,
                                         .src_dtype = GM_F32,
                                         .numel = p->spec.numel},
                     NULL);
    CHECK_OK(gm_engine_grad_put(w->engine, id, grad, dtype, 0));
    add_grad(p, grad, dtype);
    memset(grad, 0xff, sizeof grad); /* it was the caller's: by now it may be somebody else's */
}

/* Whether no unit before this one uses the parameter: its gradient is then complete. */
static bool is_first_use(const world *w, uint64_t shape, uint32_t unit, uint32_t id)
{
    for (uint32_t before = 0; before < unit; before++) {
        for (uint32_t i = w->unit_begin[before]; i < w->unit_begin[before + 1]; i++) {
            if (is_used(shape, before) && w->unit_params[i] == id) {
                return false;
            }
        }
    }
    return true;
}

/* Each unit's node needs its weights, then their gradients arrive.  false: an error of the user's ended it. */
static bool backward(world *w, uint64_t shape, bool is_recomputed, bool is_busy, bool may_fail)
{
    uint32_t fails_at = may_fail && chance(w, 4) ? (uint32_t)draw(w, w->n_units) : UINT32_MAX;
    for (uint32_t unit = w->n_units; unit-- > 0;) {
        if (unit == fails_at) {
            break;
        }
        if (!is_used(shape, unit)) {
            continue;
        }
        if (is_recomputed && unit > 0) {
            enter(w, unit, GM_ENTER_IN_BACKWARD | GM_ENTER_GRAD);
            CHECK_OK(gm_engine_leave(w->engine, unit, 0));
        }
        for (uint32_t i = w->unit_begin[unit]; i < w->unit_begin[unit + 1]; i++) {
            if (w->params[w->unit_params[i]].spec.numel > 0) {
                touch(w, w->unit_params[i]);
            }
        }
        if (!chance(w, 4)) { /* else it still reads them: the step itself must update them */
            CHECK_OK(gm_engine_release_touched(w->engine, 0));
        }
        for (uint32_t i = w->unit_begin[unit + 1]; i-- > w->unit_begin[unit];) {
            uint32_t id = w->unit_params[i];
            if (w->params[id].spec.has_grad && is_first_use(w, shape, unit, id)) {
                put_grad(w, id);
            }
            maybe_do_something(w, is_busy);
        }
        CHECK_OK(gm_engine_release_touched(w->engine, 0));
    }
    CHECK_OK(gm_engine_release_touched(w->engine, 0));
    return fails_at == UINT32_MAX;
}

/* ---- steps ---- */

/* Of every parameter with a gradient, or that will have one at the end of the present pass. */
static uint32_t list_updates(world *w, bool is_before_backward, gm_update *out)
{
    uint32_t n = 0;
    w->hyper.lr = 1e-2 / (double)(1 + draw(w, 4));
    w->hyper.grad_divisor = chance(w, 3) ? 8 : 1;
    for (uint32_t id = 0; id < w->n_params; id++) {
        const model *p = &w->params[id];
        bool will_have = is_before_backward && w->is_in_pass[id] && p->spec.has_grad;
        if (p->spec.has_moments && (p->has_grad || will_have)) {
            out[n] = (gm_update){.param = id, .hyper = w->hyper};
            out[n++].hyper.step = p->step + 1;
        }
    }
    return n;
}

/* What the engine tells of its chunks agrees with itself and with the model. */
static void check_chunks(world *w, uint32_t n_used)
{
    static gm_engine_chunk chunks[MOST_PARAMS];
    gm_engine_stats stats;
    uint32_t n_trained = 0, n_done = 0, n_pending = 0, n_gradients = 0;
    gm_engine_get_stats(w->engine, &stats);
    CHECK(stats.chunks <= MOST_PARAMS);
    gm_engine_chunks(w->engine, chunks);
    for (uint32_t id = 0; id < stats.chunks; id++) {
        const gm_engine_chunk *chunk = &chunks[id];
        for (int piece = 0; piece < GM_N_PIECES; piece++) {
            CHECK(chunk->is_resident[piece] || !chunk->is_dirty[piece]);
        }
        CHECK(chunk->n_uses == 0 || chunk->is_resident[GM_WEIGHT]);
        CHECK(chunk->n_done <= chunk->n_trained);
        n_trained += chunk->n_trained;
        n_done += chunk->n_done;
        n_pending += chunk->is_pending;
    }
    for (uint32_t id = 0; id < w->n_params; id++) {
        n_trained -= w->params[id].spec.has_grad;
        n_gradients += w->params[id].has_grad;
    }
    CHECK(n_trained == 0);
    CHECK(n_done == n_gradients - n_used);     /* an announced step uses up what it steps */
    CHECK(n_pending == stats.pending_updates); /* few worlds have more than a step issues itself */
}

/* Of the norm of some gradients: the factor. */
static double clip(world *w)
{
    uint32_t ids[MOST_PARAMS];
    gm_sumsq want;
    gm_clip found;
    float norm, seen;
    bool has_waited;
    uint32_t n = draw_norm(w, ids, &want);
    gm_clip_args args = {
        .sums = &want, .n = 1, .max_norm = chance(w, 2) ? 0.1 : 1e9, .out = &found, .norm = &norm};
    gm_clip_host(&args);
    CHECK_OK(gm_engine_clip(w->engine, ids, n, args.max_norm, &seen, 0, &has_waited));
    CHECK(memcmp(&seen, &norm, sizeof norm) == 0);
    met.clips += found.factor < 1;
    met.late += found.factor < 1 && !has_waited;
    return found.factor;
}

static void step(world *w, gm_update *updates, uint32_t n, bool is_announced, bool is_armed)
{
    uint64_t random = w->random;
    bool is_clipped = !is_armed && chance(w, 3);
    double factor = is_clipped ? clip(w) : 1;
    w->random = random; /* the rest of the world is the same without clips */
    for (uint32_t i = 0; is_clipped && i < n; i++) {
        updates[i].hyper.grad_divisor = 1;
    }
    CHECK_OK((is_clipped ? gm_engine_step_clipped : gm_engine_step)(w->engine, updates, n, 0));
    note_looked(w);
    for (uint32_t i = 0; i < n; i++) {
        model *p = &w->params[updates[i].param];
        updates[i].hyper.clip_factor = factor;
        update(p, &updates[i].hyper);
        p->step++;
    }
    check_leases(w);
    check_chunks(w, is_announced ? n : 0);
}

/* A backward that updated some weights has ended by an error: the engine is closed by name, and shows each parameter as
 * it was or as it was to be. */
static void check_dead(world *w, const gm_update *updates, uint32_t n, const uint64_t *n_immediate)
{
    char text[512];
    met.deaths++;
    CHECK(gm_engine_enter(w->engine, 0, 0, 0) == GM_ERR_STATE);
    CHECK(strstr(gm_last_error(), "closed by an earlier error"));
    CHECK(gm_engine_salvage(w->engine, text, sizeof text) && strstr(text, "step=True"));
    for (uint32_t i = 0; i < n; i++) {
        uint32_t id = updates[i].param;
        model old = model_copy(&w->params[id]), next = model_copy(&w->params[id]);
        bool may_differ = gm_engine_n_immediate(w->engine, id) != n_immediate[id] && old.has_grad;
        old.has_grad = next.has_grad = false; /* it may be used up */
        update(&next, &updates[i].hyper);
        CHECK_OK(gm_engine_grad_drop(w->engine, id));
        CHECK(is_as(w, id, &old) || (may_differ && is_as(w, id, &next)));
        model_free(&old);
        model_free(&next);
    }
}

/* false: the engine is dead. */
static bool train_step(world *w, uint64_t shape, bool is_busy)
{
    gm_update updates[MOST_PARAMS];
    uint64_t n_immediate[MOST_PARAMS];
    bool is_recomputed = chance(w, 4), wants_arm = chance(w, 2), is_armed = false;
    uint32_t n_micro = chance(w, 3) ? 2 : 1, n = 0;
    for (uint32_t micro = 0; micro < n_micro; micro++) {
        bool is_last = micro + 1 == n_micro;
        if (!forward(w, shape, GM_ENTER_GRAD, is_busy)) {
            return true; /* gradients of earlier micro-batches stay */
        }
        if (is_last && wants_arm) {
            n = list_updates(w, true, updates);
            CHECK_OK(gm_engine_arm(w->engine, updates, n, true, &is_armed));
            note_looked(w);
        }
        for (uint32_t id = 0; id < w->n_params; id++) {
            n_immediate[id] = gm_engine_n_immediate(w->engine, id);
        }
        if (backward(w, shape, is_recomputed, is_busy && !is_armed, is_busy)) {
            continue;
        }
        gm_status status = gm_engine_disarm(w->engine, "a test");
        if (status != GM_OK) {
            CHECK(is_armed && status == GM_ERR_STATE);
            check_dead(w, updates, n, n_immediate);
            return false;
        }
        met.disarmed += is_armed;
        for (uint32_t id = 0; id < w->n_params; id++) {
            CHECK(gm_engine_n_immediate(w->engine, id) == n_immediate[id]);
        }
        return true;
    }
    n = is_armed ? n : list_updates(w, false, updates);
    step(w, updates, n, wants_arm, is_armed);
    for (uint32_t id = 0; id < w->n_params; id++) {
        met.immediate += gm_engine_n_immediate(w->engine, id) - n_immediate[id];
        if (wants_arm || !is_busy || !chance(w, 4)) { /* others are added to */
            drop_grad(w, id);
        }
    }
    maybe_do_something(w, is_busy);
    return true;
}

/* ---- worlds ---- */

static size_t outside_bytes(void *context)
{
    return ((const world *)context)->outside;
}

static gm_rates draw_rates(world *w)
{
    gm_rates rates = {.h2d = 55e9,
                      .d2h = 54e9,
                      .h2d_both = 45e9,
                      .d2h_both = 50e9,
                      .host_adam = 5.3e9,
                      .host_adam_beside = 3.5e9,
                      .h2d_beside = 31e9,
                      .d2h_beside = 49e9,
                      .device_adam = 151e9};
    switch (draw(w, 5)) {
    case 0: rates.h2d = rates.h2d_both = rates.h2d_beside = 1e5; break;
    case 1: rates.host_adam = rates.host_adam_beside = 1e2; break;
    case 2: rates.host_adam = rates.host_adam_beside = 1e15; break;
    case 3: rates.h2d = 0; break; /* nothing is planned */
    default: break;
    }
    return rates;
}

/* Each parameter in one unit or in two; the last units in none of the first pass' shapes are fine, too. */
static void draw_units(world *w)
{
    uint32_t end = 0;
    uint32_t home[MOST_PARAMS], second[MOST_PARAMS];
    for (uint32_t id = 0; id < w->n_params; id++) {
        home[id] = (uint32_t)draw(w, w->n_units);
        second[id] = chance(w, 5) ? (uint32_t)draw(w, w->n_units) : home[id];
    }
    for (uint32_t unit = 0; unit < w->n_units; unit++) {
        w->unit_begin[unit] = end;
        for (uint32_t id = 0; id < w->n_params; id++) {
            if (home[id] == unit || second[id] == unit || (id == 0 && unit == 0)) {
                w->unit_params[end++] = id;
            }
        }
        if (w->unit_begin[unit] == end) {
            w->unit_params[end++] = (uint32_t)draw(w, w->n_params);
        }
    }
    w->unit_begin[w->n_units] = end;
}

/* The first bytes, as an adopted model gives them: in parts, or as a field. */
static void fill(world *w)
{
    static float values[MOST_NUMEL];
    static uint16_t halves[MOST_NUMEL];
    for (uint32_t id = 0; id < w->n_params; id++) {
        model *p = &w->params[id];
        uint64_t n = p->spec.numel, half = draw(w, n + 1);
        if (!p->spec.has_moments) {
            draw_weight(w, p, p->weight);
            CHECK_OK(gm_engine_fill(w->engine, id, GM_FIELD_WEIGHT, 0, half, GM_F32, p->weight, 0));
            CHECK_OK(gm_engine_fill(w->engine, id, GM_FIELD_WEIGHT, half, n - half, GM_F32,
                                    p->weight + half * p->spec.weight_bytes, 0));
            continue;
        }
        draw_floats(w, values, n, 2);
        for (uint64_t i = 0; i < n; i++) {
            halves[i] = (uint16_t)(gm_f32_bits(values[i]) >> 16);
            values[i] = id % 2 ? gm_f32_from_bits(gm_bf16_to_bits(halves[i])) : values[i];
        }
        set_master(p, values);
        gm_dtype source = id % 2 ? GM_BF16 : GM_F32;
        const char *from = id % 2 ? (const char *)halves : (const char *)values;
        if (chance(w, 2)) {
            CHECK_OK(gm_engine_write(w->engine, id, GM_FIELD_MASTER, values, 0));
        } else {
            CHECK_OK(gm_engine_fill(w->engine, id, GM_FIELD_MASTER, half, n - half, source,
                                    from + half * gm_dtype_bytes(source), 0));
            CHECK_OK(gm_engine_fill(w->engine, id, GM_FIELD_MASTER, 0, half, source, from, 0));
        }
    }
}

/* Bytes of blocks that unit 0 and one other may have pinned at once: the least budget. */
static size_t floor_bytes(const world *w, const gm_engine *engine)
{
    size_t most = 0;
    for (uint32_t unit = 0; unit < w->n_units; unit++) {
        bool is_seen[MOST_PARAMS] = {false}; /* by chunk */
        size_t bytes = 0;
        for (uint32_t i = 0; i < w->unit_begin[w->n_units]; i++) {
            bool is_here =
                i < w->unit_begin[1] || (i >= w->unit_begin[unit] && i < w->unit_begin[unit + 1]);
            uint32_t chunk = gm_engine_chunk_of(engine, w->unit_params[i]);
            if (is_here && !is_seen[chunk]) {
                is_seen[chunk] = true;
                gm_engine_need need;
                gm_engine_chunk_need(engine, chunk, &need);
                bytes += need.shown + need.gathering + need.unreduced;
            }
        }
        most = bytes > most ? bytes : most;
    }
    return most;
}

static gm_device *device_new(world *w, gm_workers *workers)
{
    gm_device *device;
    if (w->is_chaos) {
        gm_chaos_options how = {.seed = seed};
        CHECK_OK(gm_device_chaos_new(BLOCK, workers, &how, &device));
    } else {
        CHECK_OK(gm_device_host_new(BLOCK, workers, &device));
    }
    return device;
}

/* The same with room for some of the homes, or for none, and with chunks that stay.  Where these take more than the budget
 * the engine is refused, and made with what the text says suffices; units inside others may need more. */
static void engine_with_less_host(world *w, gm_workers *workers, gm_engine_options *options)
{
    uint64_t aside = seed;
    gm_engine_stats stats;
    gm_engine_get_stats(w->engine, &stats);
    gm_engine_unref(w->engine);
    options->state_share = 1;
    options->host_limit = options->host_budget =
        (size_t)next_random(&aside) % (stats.state_bytes + 1);
    options->device = device_new(w, workers);
    if (gm_engine_new(options, &w->engine) != GM_OK) {
        const char *text = strstr(gm_last_error(), "device_budget to at least");
        CHECK(text && strstr(gm_last_error(), "HOST") && strchr(text, '('));
        CHECK(sscanf(strchr(text, '('), "(%zu bytes)", &options->device_budget) == 1);
        met.refused_homes++;
        options->device = device_new(w, workers);
        CHECK_OK(gm_engine_new(options, &w->engine));
    }
    gm_engine_get_stats(w->engine, &stats);
    CHECK(stats.host_bytes <= options->host_limit);
    size_t least = stats.staying_bytes + floor_bytes(w, w->engine);
    if (options->device_budget < least) {
        gm_engine_unref(w->engine);
        options->device_budget = least;
        options->device = device_new(w, workers);
        CHECK_OK(gm_engine_new(options, &w->engine));
    }
    met.staying += stats.staying_bytes > 0;
}

static void engine_new(world *w, gm_workers *workers, bool is_grad_f32)
{
    gm_engine_param specs[MOST_PARAMS];
    for (uint32_t id = 0; id < w->n_params; id++) {
        model_new(w, &w->params[id], is_grad_f32);
        specs[id] = w->params[id].spec;
    }
    draw_units(w);
    gm_engine_options options = {
        .device = device_new(w, workers),
        .workers = workers,
        .params = specs,
        .n_params = w->n_params,
        .unit_params = w->unit_params,
        .unit_begin = w->unit_begin,
        .n_units = w->n_units,
        .chunk_bytes = 8 * MOST_NUMEL + draw(w, 4) * 3 * BLOCK,
        .device_budget = SIZE_MAX,
        .host_budget = SIZE_MAX,
        .host_limit = SIZE_MAX,
        .policy = (gm_policy)draw(w, 3),
        .is_grad_f32 = is_grad_f32,
        .rates = draw_rates(w),
        .state_share = (double)draw(w, 5) / 4,
        .outside_bytes = outside_bytes,
        .outside_context = w,
    };
    CHECK_OK(gm_engine_new(&options, &w->engine));
    if (options.policy != GM_POLICY_CUDA && !chance(w, 5)) { /* again, with a budget */
        gm_engine_stats stats;
        gm_engine_get_stats(w->engine, &stats);
        size_t least = floor_bytes(w, w->engine);
        options.device_budget = least;
        options.device_budget += chance(w, 2) ? 0 : draw(w, 4) * (stats.state_bytes - least) / 4;
        gm_engine_unref(w->engine);
        options.device = device_new(w, workers);
        CHECK_OK(gm_engine_new(&options, &w->engine));
    }
    if (options.policy == GM_POLICY_AUTO && seed < N_SEEDS && seed % 2 == 0) {
        engine_with_less_host(w, workers, &options);
    }
    w->device = options.device;
}

static void close(world *w, bool is_dead)
{
    gm_engine_stats stats;
    gm_engine_get_stats(w->engine, &stats);
    met.plans += stats.plans;
    met.breaks += stats.plan_breaks;
    met.deviations += stats.deviations;
    met.evictions += stats.evictions;
    for (uint32_t id = 0; id < w->n_params && !is_dead; id++) {
        check_fields(w, id);
    }
    if (!is_dead) {
        check_chunks(w, 0);
    }
    CHECK(gm_engine_check(w->engine) == GM_OK || is_dead);
    gm_engine_finish_updates(w->engine);
    gm_engine_leave_ranks(w->engine);
    if (w->is_chaos) {
        uint32_t n_faults;
        const char *first;
        CHECK_OK(gm_device_chaos_faults(w->device, &n_faults, &first));
        if (n_faults > 0) {
            fprintf(stderr, "%u accesses that nothing orders: %s\n", n_faults, first);
        }
        CHECK(n_faults == 0);
    }
    gm_engine_unref(w->engine);
    if (!is_dead) { /* what tensors still show outlives the engine */
        check_leases(w);
    }
    end_leases(w);
    for (uint32_t id = 0; id < w->n_params; id++) {
        if (w->uses[id]) {
            gm_lease_end(w->uses[id]);
        }
    }
}

/* What only read at first is found some steps later, where it writes: the engine ends by its name. */
static bool check_late_write(world *w)
{
    static uint8_t old[MOST_NUMEL * 8];
    uint32_t id = w->unit_params[w->unit_begin[0]];
    model *p = &w->params[id];
    gm_lease *lease;
    uint64_t n_found = 0;
    bool is_same = true;
    if (p->spec.numel == 0) {
        return true;
    }
    CHECK_OK(gm_lease_new(w->engine, id, &lease));
    uint8_t *at = (uint8_t *)gm_lease_address(lease);
    for (int use = 0; use < 4; use++) {
        enter(w, 0, 0);
        CHECK_OK(gm_lease_watch(lease, 0));
        if (use == 3) {
            scribble(w, p, at, old);
            is_same = memcmp(at, old, weight_bytes(p)) == 0;
        }
        CHECK_OK(gm_lease_unwatch(lease));
        if (use == 3) {
            CHECK_OK(gm_engine_n_found(w->engine, id, 0, &n_found));
            if (n_found > 0) { /* its like was watched on: it is a write like any other */
                set_weight(p, at);
            } else { /* the page has it, and the core's own checks need not */
                memcpy(at, old, weight_bytes(p));
            }
        }
        CHECK_OK(gm_engine_leave(w->engine, 0, 0));
    }
    CHECK_OK(gm_engine_step(w->engine, NULL, 0, 0));
    gm_status status = gm_engine_step(w->engine, NULL, 0, 0);
    CHECK(is_same || n_found > 0 ||
          (status == GM_ERR_STATE && strstr(gm_last_error(), "it was written inside its module")));
    met.late_writes += status != GM_OK;
    gm_lease_end(lease);
    return status == GM_OK;
}

static void play(bool is_chaos, gm_workers *workers)
{
    world *w = calloc(1, sizeof *w);
    CHECK(w);
    w->random = seed;
    w->is_chaos = is_chaos;
    device_name = is_chaos ? "chaos" : "host";
    w->n_params = 1 + (uint32_t)draw(w, MOST_PARAMS);
    w->n_units = 1 + (uint32_t)draw(w, MOST_UNITS);
    w->hyper = (gm_adam_hyper){.beta1 = 0.9,
                               .beta2 = 0.95,
                               .eps = 1e-8,
                               .weight_decay = chance(w, 2) ? 0.1 : 0,
                               .adamw = chance(w, 2),
                               .bias_correction = true,
                               .clip_factor = 1};
    engine_new(w, workers, chance(w, 2));
    fill(w);
    uint64_t shapes[2] = {next_random(&w->random), UINT64_MAX};
    bool is_alive = true;
    for (int number = 0; number < N_STEPS && is_alive; number++) {
        uint64_t shape = shapes[chance(w, 3)];
        bool is_busy = number > 2 && chance(w, 2); /* quiet steps are planned and followed */
        if (is_busy && chance(w, 3)) {
            (void)forward(w, shape, 0, true); /* an evaluation */
        }
        is_alive = train_step(w, shape, is_busy);
    }
    if (is_alive && seed % 4 == 0) {
        is_alive = check_late_write(w);
    }
    close(w, !is_alive);
    for (uint32_t id = 0; id < w->n_params; id++) {
        model_free(&w->params[id]);
    }
    free(w);
}

int main(void)
{
    const char *one = getenv("ENGINE_SEED");
    gm_workers *workers;
    CHECK_OK(gm_workers_new(2, &workers));
    CHECK(atexit(say_seed) == 0);
    is_playing = true;
    static const uint64_t more[] = {10821}; /* a write in a unit while the copy home is under way */
    uint64_t n = one ? 1 : N_SEEDS + sizeof more / sizeof *more;
    for (uint64_t i = 0; i < n; i++) {
        seed = one ? strtoull(one, NULL, 10) : i < N_SEEDS ? i : more[i - N_SEEDS];
        play(false, workers);
        play(true, workers);
    }
    is_playing = false;
    gm_workers_free(workers);
    printf("engine: %d worlds on two devices; plans %llu, left %llu, passes that deviated %llu, "
           "evictions %llu, immediate updates %llu, refusals for lack of room %llu, ends by an "
           "error %llu, backwards without their step %llu, writes found %llu, refused %llu, "
           "too late %llu, undone %llu, clips that fired %llu, of these without a wait %llu, with "
           "chunks that stay "
           "%llu, refused with them %llu\n",
           (int)n, met.plans, met.breaks, met.deviations, met.evictions, met.immediate, met.no_room,
           met.deaths, met.disarmed, met.found_writes, met.refused_writes, met.late_writes,
           met.undone, met.clips, met.late, met.staying, met.refused_homes);
    if (!one) {
        CHECK(met.plans && met.breaks && met.deviations && met.evictions && met.immediate);
        CHECK(met.no_room && met.deaths && met.disarmed);
        CHECK(met.found_writes && met.refused_writes && met.late_writes && met.undone);
        CHECK(met.clips > met.late && met.late);
        CHECK(met.staying && met.refused_homes);
    }
    return 0;
}
