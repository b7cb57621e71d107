/* test_opaque.c - updates that a function of the caller's makes, against a plain model of every parameter: random passes,
 * steps, budgets, leases and errors on the host device and on the chaos device, with and without plans; every bit.
 *
 * The function mixes bytes of weights, low parts, gradients, states and the factor, at their addresses, and it asks for
 * room, from its own thread and from another.  Each world is a function of its seed:  OPAQUE_SEED=7 test_opaque  plays
 * one, on both devices. */
#include <pthread.h>
#include <stdatomic.h>
#include <math.h>
#include <string.h>

#include "arith/format.h"
#include "check.h"
#include "chaos/chaos.h"
#include "engine/engine.h"

enum {
    N_SEEDS = 160,
    N_STEPS = 12,
    MOST_PARAMS = 32,
    MOST_UNITS = 5,
    MOST_LINKS = MOST_UNITS * MOST_PARAMS,
    MOST_NUMEL = 2500,
    MOST_STATES = 9000,
    MOST_LEASES = 3,
    BLOCK = 4096
};

typedef struct model {
    gm_engine_param spec;
    uint64_t state_bytes;
    gm_dtype grad_dtype;
    uint8_t *weight, *low, *grad, *states;
    uint8_t *stepped; /* the gradient at the step */
    bool has_grad, is_in_pass;
    bool is_coming; /* in the step that comes, runs, or has left updates for later */
    float scale;    /* of its gradient there */
    uint32_t n_calls;
    int64_t ahead; /* the number with which it was stepped ahead last */
} model;

typedef struct world {
    uint64_t random, aside; /* aside: of what happens inside updates, whose order plans decide */
    gm_device *device;
    bool is_chaos, writes_grads, asks_room, defers;
    bool clips;               /* each step asks for the norm, and its numbers are announced */
    int64_t number;           /* of the step that comes, as Adam's */
    bool is_undone;           /* the function says AHEAD that the engine is to undo it */
    bool is_behind, is_taken; /* a step is, or has been taken; since the last gm_engine_issue */
    gm_engine *engine;
    model params[MOST_PARAMS];
    uint32_t n_params, n_units;
    uint32_t unit_params[MOST_LINKS], unit_begin[MOST_UNITS + 1];
    gm_lease *leases[MOST_LEASES];
    uint32_t leased[MOST_LEASES], n_leases;
    size_t outside;
    uint32_t fails_in;     /* calls until one fails; 0: none does */
    atomic_ullong n_ended; /* runs of the function */
    unsigned long long waits_for;
    pthread_t waiter; /* for an update's end */
    bool has_waiter;
} world;

/* What all worlds together have met: a test that meets none of it proves nothing. */
static struct {
    unsigned long long plans, breaks, deviations, evictions, immediate, late, written, calls,
        errors;
    unsigned long long shed, reserved, others, no_room, staying, stateless, behind;
    unsigned long long ahead, undone, taken, redone;
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

/* Inside updates. */
static bool chance_aside(world *w, uint64_t one_in)
{
    return next_random(&w->aside) % one_in == 0;
}

/* ---- the model ---- */

static size_t weight_bytes(const model *p)
{
    return p->spec.numel * p->spec.weight_bytes;
}

static size_t low_bytes(const model *p)
{
    return !p->spec.has_low ? 0 : p->spec.numel * (p->spec.format == GM_BF16 ? 2 : 4);
}

static size_t grad_bytes(const model *p)
{
    return p->spec.numel * gm_dtype_bytes(p->grad_dtype);
}

static void draw_floats(world *w, float *out, uint64_t n, float scale)
{
    for (uint64_t i = 0; i < n; i++) {
        int32_t bits = (int32_t)(next_random(&w->random) & 0xffffff) - 0x800000;
        out[i] = (float)bits * 0x1p-23f * scale;
    }
}

/* One update: all of these depend on all of those.  writes: the gradient changes, too. */
static void mix(const model *p, uint8_t *weight, uint8_t *low, uint8_t *grad, uint8_t *states,
                float scale, bool writes)
{
    uint32_t hash = gm_f32_bits(scale) * 2654435761u + 1;
    for (size_t i = 0; i < grad_bytes(p); i++) {
        hash = hash * 31 + grad[i];
    }
    for (size_t i = 0; i < p->state_bytes; i++) {
        hash = hash * 31 + states[i];
        states[i] = (uint8_t)(hash >> 11);
    }
    for (size_t i = 0; i < low_bytes(p); i++) {
        hash = hash * 31 + low[i];
        low[i] = (uint8_t)(hash >> 7);
    }
    for (size_t i = 0; i < weight_bytes(p); i++) {
        hash = hash * 31 + weight[i];
        weight[i] = (uint8_t)(hash >> 13);
    }
    for (size_t i = 0; writes && i < grad_bytes(p); i++) {
        grad[i] ^= 1;
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

static void model_new(world *w, model *p, gm_dtype format, bool has_low, bool is_grad_f32)
{
    static const uint64_t bytes[] = {0, 1, 4, 513, 4096, MOST_STATES};
    bool has_grad = !chance(w, 6), has_moments = has_grad && !chance(w, 8);
    p->spec = (gm_engine_param){
        .numel = chance(w, 12) ? draw(w, 2) : MOST_NUMEL / 4 + draw(w, MOST_NUMEL * 3 / 4),
        .weight_bytes = (uint32_t)gm_dtype_bytes(format),
        .format = format,
        .has_low = has_moments && has_low && format != GM_F32,
        .has_moments = has_moments,
        .has_grad = has_grad};
    p->state_bytes = has_moments && p->spec.numel > 0 ? bytes[draw(w, 6)] : 0;
    p->grad_dtype = is_grad_f32 ? GM_F32 : format;
    p->weight = calloc(MOST_NUMEL, 4);
    p->low = calloc(MOST_NUMEL, 4);
    p->grad = calloc(MOST_NUMEL, 4);
    p->states = calloc(MOST_STATES, 1);
    p->stepped = calloc(MOST_NUMEL, 4);
    CHECK(p->weight && p->low && p->grad && p->states && p->stepped);
    met.stateless += has_moments && p->state_bytes == 0;
}

/* A copy that shares nothing. */
static model model_copy(const model *p)
{
    model copy = *p;
    copy.weight = memcpy(malloc(4 * MOST_NUMEL), p->weight, 4 * MOST_NUMEL);
    copy.low = memcpy(malloc(4 * MOST_NUMEL), p->low, 4 * MOST_NUMEL);
    copy.grad = memcpy(malloc(4 * MOST_NUMEL), p->grad, 4 * MOST_NUMEL);
    copy.states = memcpy(malloc(MOST_STATES), p->states, MOST_STATES);
    copy.stepped = memcpy(malloc(4 * MOST_NUMEL), p->stepped, 4 * MOST_NUMEL);
    return copy;
}

static void model_free(model *p)
{
    free(p->weight);
    free(p->low);
    free(p->grad);
    free(p->states);
    free(p->stepped);
}

/* ---- the function ---- */

static void *reserve_elsewhere(void *context)
{
    world *w = context;
    gm_engine_stats stats;
    (void)gm_engine_reserve(w->engine, BLOCK);
    gm_engine_get_stats(w->engine, &stats);
    return NULL;
}

static void *drain_elsewhere(void *context)
{
    world *w = context;
    (void)gm_engine_drain(w->engine);                /* the engine may be dead by then */
    CHECK(atomic_load(&w->n_ended) >= w->waits_for); /* the next one may be under way */
    return NULL;
}

/* Others' memory grows while the optimizer steps: torch asks for room, on any thread. */
static void ask_for_room(world *w)
{
    pthread_t thread;
    if (chance_aside(w, 6)) {
        met.reserved += gm_engine_reserve(w->engine, (size_t)(1 + chance_aside(w, 3)) * BLOCK);
    }
    if (chance_aside(w, 30)) {
        met.shed += gm_engine_shed(w->engine, BLOCK);
    }
    if (chance_aside(w, 40)) {
        CHECK(pthread_create(&thread, NULL, reserve_elsewhere, w) == 0);
        CHECK(pthread_join(thread, NULL) == 0);
        met.others++;
    }
}

static bool is_same(const uint8_t *a, const uint8_t *b, size_t bytes)
{
    return bytes == 0 || memcmp(a, b, bytes) == 0;
}

/* What a kernel does later: at these addresses lies what the model had when it was issued. */
typedef struct job {
    model before;
    uint8_t *weight, *low, *grad, *states;
    const float *late_scale;
    bool writes_grads;
} job;

/* The caller's own part of a step that was stepped ahead. */
static void take(world *w, model *p)
{
    CHECK(p->is_coming && p->n_calls++ == 0 && w->is_behind);
    CHECK(p->ahead == w->number && p->scale >= 1 && p->scale <= 1);
    uint8_t *grad = memcpy(malloc(4 * MOST_NUMEL), p->stepped, 4 * MOST_NUMEL);
    mix(p, p->weight, p->low, grad, p->states, p->scale, false);
    free(grad);
}

static void run_job(void *context)
{
    job *j = context;
    model *p = &j->before;
    float scale = j->late_scale ? *j->late_scale : p->scale;
    CHECK(scale >= p->scale && scale <= p->scale);
    CHECK(is_same(j->weight, p->weight, weight_bytes(p)));
    CHECK(is_same(j->low, p->low, low_bytes(p)));
    CHECK(is_same(j->grad, p->grad, grad_bytes(p)));
    CHECK(is_same(j->states, p->states, p->state_bytes));
    mix(p, j->weight, j->low, j->grad, j->states, scale, j->writes_grads);
    model_free(p);
    free(j);
}

static gm_status step_one(world *w, uint32_t id, const gm_opaque_call *call)
{
    model *p = &w->params[id];
    gm_opaque_place at;
    gm_engine_opaque_place(w->engine, id, &at);
    CHECK(gm_engine_chunk_of(w->engine, id) == call->chunk);
    bool is_ahead = call->how == GM_OPAQUE_AHEAD, writes = w->writes_grads;
    float scale = is_ahead ? 1 : p->scale;
    if (is_ahead) { /* its writes are undone */
        p->ahead = w->number;
        writes = w->is_undone;
    } else {
        CHECK(p->is_coming && p->n_calls++ == 0);
        met.behind += w->is_taken;
    }
    CHECK(call->late_scale || (call->grad_scale >= scale && call->grad_scale <= scale));
    CHECK(p->state_bytes == 0 || at.states % GM_ALIGN == 0);
    job *j = malloc(sizeof *j);
    CHECK(j);
    *j = (job){.before = model_copy(p),
               .weight = (uint8_t *)at.weight,
               .low = (uint8_t *)at.low,
               .grad = (uint8_t *)at.grad,
               .states = (uint8_t *)at.states,
               .late_scale = call->late_scale,
               .writes_grads = writes};
    j->before.scale = scale;
    gm_note_access(w->device, j->weight, weight_bytes(p), true, call->stream);
    gm_note_access(w->device, j->grad, grad_bytes(p), writes, call->stream);
    if (low_bytes(p) > 0) {
        gm_note_access(w->device, j->low, low_bytes(p), true, call->stream);
    }
    if (p->state_bytes > 0) {
        gm_note_access(w->device, j->states, p->state_bytes, true, call->stream);
    }
    if (call->late_scale) {
        gm_note_access(w->device, call->late_scale, sizeof(float), false, call->stream);
    }
    if (!is_ahead && w->is_behind) { /* another gradient may have begun */
        memcpy(j->before.grad, p->stepped, grad_bytes(p));
    }
    if (!is_ahead) {
        mix(p, p->weight, p->low, writes ? p->grad : j->before.grad, p->states, scale, writes);
    }
    return w->device->ops->host_call(w->device, run_job, j, call->stream);
}

static gm_status run(void *context, const gm_opaque_call *call, bool *wrote_grads)
{
    world *w = context;
    bool is_ahead = call->how == GM_OPAQUE_AHEAD;
    met.late += call->late_scale != NULL;
    w->is_undone = is_ahead && chance_aside(w, 8);
    if (!w->has_waiter && chance_aside(w, 40)) { /* any other call waits */
        w->waits_for = atomic_load(&w->n_ended) + 1;
        CHECK(pthread_create(&w->waiter, NULL, drain_elsewhere, w) == 0);
        w->has_waiter = true;
    }
    if (chance_aside(w, 10)) { /* but not this thread's */
        uint8_t byte;
        CHECK(gm_engine_read(w->engine, call->params[0], GM_FIELD_WEIGHT, 0, 0, &byte) ==
              GM_ERR_STATE);
        CHECK(strstr(gm_last_error(), "the optimizer's step() has used the managed model"));
        CHECK(!gm_engine_salvage(w->engine, (char[512]){0}, 512));
    }
    for (uint32_t i = 0; i < call->n_params; i++) {
        if (w->asks_room) {
            ask_for_room(w);
        }
        if (call->how == GM_OPAQUE_TAKE) {
            take(w, &w->params[call->params[i]]);
        } else {
            CHECK_OK(step_one(w, call->params[i], call));
        }
    }
    *wrote_grads = is_ahead ? w->is_undone : w->writes_grads;
    met.written += w->writes_grads;
    met.undone += w->is_undone;
    met.ahead += is_ahead;
    met.taken += call->how == GM_OPAQUE_TAKE;
    met.calls++;
    atomic_fetch_add(&w->n_ended, 1);
    w->fails_in -= w->fails_in > 0 && (is_ahead || !w->clips);
    return w->fails_in == 1 ? GM_FAIL(GM_ERR_STATE, "the test's own optimizer fails") : GM_OK;
}

/* ---- what the engine shows ---- */

static void check_fields(world *w, uint32_t id)
{
    static uint8_t read[MOST_STATES + 4 * MOST_NUMEL];
    const model *p = &w->params[id];
    CHECK(gm_engine_has_grad(w->engine, id) == p->has_grad);
    if (p->has_grad) {
        CHECK_OK(gm_engine_read(w->engine, id, GM_FIELD_GRAD, 0, p->spec.numel, read));
        CHECK(!w->is_taken || p->n_calls == (p->is_coming && p->spec.numel > 0));
        CHECK(memcmp(read, p->grad, grad_bytes(p)) == 0);
    }
    CHECK_OK(gm_engine_read(w->engine, id, GM_FIELD_WEIGHT, 0, p->spec.numel, read));
    CHECK(memcmp(read, p->weight, weight_bytes(p)) == 0);
    if (p->spec.has_low) {
        CHECK_OK(gm_engine_read(w->engine, id, GM_FIELD_LOW, 0, p->spec.numel, read));
        CHECK(memcmp(read, p->low, low_bytes(p)) == 0);
    }
    CHECK_OK(gm_engine_states_read(w->engine, id, 0, p->state_bytes, read));
    CHECK(memcmp(read, p->states, p->state_bytes) == 0);
}

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
        check_shown(w, w->leased[i], gm_lease_address(w->leases[i]));
    }
}

static void end_leases(world *w)
{
    while (w->n_leases > 0) {
        gm_lease_end(w->leases[--w->n_leases]);
    }
}

static void add_lease(world *w)
{
    uint32_t id = (uint32_t)draw(w, w->n_params);
    gm_lease *lease;
    if (w->n_leases == MOST_LEASES) {
        return;
    }
    CHECK_OK(gm_lease_new(w->engine, id, &lease));
    gm_status status = gm_lease_pin(lease, 0);
    if (status != GM_OK) {
        CHECK(status == GM_ERR_NOMEM);
        gm_lease_end(lease);
        return;
    }
    w->leased[w->n_leases] = id;
    w->leases[w->n_leases++] = lease;
}

/* Of all gradients; ids: the parameters that may have one. */
static uint32_t norm_of(const world *w, uint32_t *ids, gm_sumsq *out)
{
    uint32_t n = 0;
    memset(out, 0, sizeof *out);
    for (uint32_t id = 0; id < w->n_params; id++) {
        const model *p = &w->params[id];
        if (p->spec.has_grad) {
            ids[n++] = id;
        }
        if (p->has_grad) {
            gm_sumsq_host(p->grad, p->grad_dtype, p->spec.numel, out, NULL);
        }
    }
    return n;
}

/* Behind what the step's updates make of gradients. */
static void check_norm(world *w)
{
    uint32_t ids[MOST_PARAMS];
    gm_sumsq found, want;
    uint32_t n = norm_of(w, ids, &want);
    CHECK_OK(gm_engine_sumsq(w->engine, ids, n, &found, 0));
    for (uint32_t id = 0; id < w->n_params && w->is_behind; id++) {
        const model *p = &w->params[id];
        CHECK(p->n_calls == (p->is_coming && p->spec.numel > 0));
    }
    (void)norm_of(w, ids, &want);
    double one = gm_sumsq_value(&found), other = gm_sumsq_value(&want);
    CHECK(memcmp(&one, &other, sizeof one) == 0);
}

/* What the program does between two calls of its model. */
static void do_something(world *w)
{
    uint32_t id = (uint32_t)draw(w, w->n_params);
    model *p = &w->params[id];
    switch (draw(w, 10)) {
    case 0:
    case 1: add_lease(w); break;
    case 2: end_leases(w); break;
    case 3: w->outside = chance(w, 2) ? 0 : draw(w, 4) * BLOCK; break;
    case 4: (void)gm_engine_reserve(w->engine, draw(w, 4) * BLOCK); break;
    case 5:
        CHECK_OK(
            gm_engine_issue(w->engine, 0)); /* else the model has them before the update does */
        for (size_t i = 0; i < p->state_bytes; i++) {
            p->states[i] = (uint8_t)next_random(&w->random);
        }
        CHECK_OK(gm_engine_states_write(w->engine, id, 0, p->state_bytes, p->states, 0));
        break;
    case 6: CHECK_OK(gm_engine_check(w->engine)); break;
    case 7: check_norm(w); break;
    default: check_fields(w, id); break;
    }
    check_leases(w);
}

static void maybe_do_something(world *w, bool is_busy)
{
    while (is_busy && chance(w, 3)) {
        do_something(w);
    }
}

/* ---- passes ---- */

/* After a refusal for lack of room the same call must succeed. */
static void make_room(world *w)
{
    met.no_room++;
    CHECK(strstr(gm_last_error(), "DEVICE"));
    CHECK_OK(gm_engine_check(w->engine));
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
    if (status == GM_ERR_NOMEM) {
        CHECK_OK(gm_engine_release_touched(w->engine, 0));
        status = gm_engine_enter(w->engine, unit, 0, flags);
    }
    CHECK_OK(status);
    for (uint32_t i = w->unit_begin[unit]; i < w->unit_begin[unit + 1]; i++) {
        check_shown(w, w->unit_params[i], gm_engine_address(w->engine, w->unit_params[i]));
        w->params[w->unit_params[i]].is_in_pass = true;
    }
}

static bool is_used(uint64_t shape, uint32_t unit)
{
    return unit == 0 || (shape >> unit & 1);
}

static void forward(world *w, uint64_t shape, uint32_t flags, bool is_busy)
{
    for (uint32_t id = 0; id < w->n_params; id++) {
        w->params[id].is_in_pass = false;
    }
    enter(w, 0, flags);
    for (uint32_t unit = 1; unit < w->n_units; unit++) {
        if (is_used(shape, unit)) {
            enter(w, unit, flags);
            maybe_do_something(w, is_busy);
            CHECK_OK(gm_engine_leave(w->engine, unit, 0));
        }
    }
    CHECK_OK(gm_engine_leave(w->engine, 0, 0));
    maybe_do_something(w, is_busy);
}

/* Its update may come within the call, and fail. */
static gm_status touch(world *w, uint32_t id)
{
    uintptr_t address = gm_engine_address(w->engine, id);
    gm_status status = gm_engine_touch(w->engine, address, 0);
    if (status == GM_ERR_NOMEM) {
        make_room(w);
        CHECK_OK(gm_engine_release_touched(w->engine, 0));
        status = gm_engine_touch(w->engine, address, 0);
    }
    if (status == GM_OK) {
        check_shown(w, id, address);
    }
    return status;
}

static gm_status put_grad(world *w, uint32_t id)
{
    static float values[MOST_NUMEL];
    static uint8_t grad[MOST_NUMEL * 4];
    model *p = &w->params[id];
    draw_floats(w, values, p->spec.numel, 0x1p-6f);
    gm_grad_add_host(&(gm_grad_add_args){.dst = grad,
                                         .src = values,
                                         .dst_dtype = p->spec.format,
                                         .src_dtype = GM_F32,
                                         .numel = p->spec.numel},
                     NULL);
    if (w->is_behind && w->writes_grads) { /* else the model would add before that write */
        CHECK_OK(gm_engine_issue(w->engine, 0));
    }
    add_grad(p, grad, p->spec.format); /* the update may come within the call */
    gm_status status = gm_engine_grad_put(w->engine, id, grad, p->spec.format, 0);
    memset(grad, 0xff, sizeof grad);
    return status;
}

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

static gm_status backward(world *w, uint64_t shape, bool is_busy)
{
    for (uint32_t unit = w->n_units; unit-- > 0;) {
        if (!is_used(shape, unit)) {
            continue;
        }
        for (uint32_t i = w->unit_begin[unit]; i < w->unit_begin[unit + 1]; i++) {
            if (w->params[w->unit_params[i]].spec.numel > 0) {
                GM_TRY(touch(w, w->unit_params[i]));
            }
        }
        if (!chance(w, 4)) { /* else the step itself must update them */
            CHECK_OK(gm_engine_release_touched(w->engine, 0));
        }
        for (uint32_t i = w->unit_begin[unit + 1]; i-- > w->unit_begin[unit];) {
            uint32_t id = w->unit_params[i];
            if (w->params[id].spec.has_grad && is_first_use(w, shape, unit, id)) {
                GM_TRY(put_grad(w, id));
            }
            maybe_do_something(w, is_busy);
        }
        CHECK_OK(gm_engine_release_touched(w->engine, 0));
    }
    return GM_OK;
}

/* ---- steps ---- */

static void end_waiter(world *w)
{
    if (w->has_waiter) {
        CHECK(pthread_join(w->waiter, NULL) == 0);
    }
    w->has_waiter = false;
}

/* Each parameter of the step was stepped, once. */
static void end_step(world *w)
{
    CHECK_OK(gm_engine_issue(w->engine, 0));
    end_waiter(w);
    w->is_behind = w->is_taken = false;
    for (uint32_t id = 0; id < w->n_params; id++) {
        model *p = &w->params[id];
        CHECK(p->n_calls == (p->is_coming && p->spec.numel > 0));
        p->is_coming = false;
        p->n_calls = 0;
    }
}

static gm_adam_hyper draw_hyper(world *w)
{
    return (gm_adam_hyper){.beta1 = 0.9,
                           .beta2 = 0.999,
                           .eps = 1e-8,
                           .step = w->number,
                           .adamw = true,
                           .bias_correction = true,
                           .clip_factor = 1,
                           .grad_divisor = !w->clips && chance(w, 3) ? 8 : 1};
}

/* The numbers of the step that its backward is going to make complete. */
static void announce(world *w)
{
    gm_update updates[MOST_PARAMS];
    uint32_t n = 0;
    gm_adam_hyper hyper = draw_hyper(w);
    for (uint32_t id = 0; id < w->n_params; id++) {
        const model *p = &w->params[id];
        if (p->spec.has_moments && (p->has_grad || p->is_in_pass)) {
            updates[n++] = (gm_update){.param = id, .hyper = hyper};
        }
    }
    if (gm_engine_wants_numbers(w->engine)) {
        CHECK_OK(gm_engine_announce(w->engine, updates, n));
    }
}

static uint32_t list_updates(world *w, bool is_before_backward, gm_update *out)
{
    uint32_t n = 0;
    w->number = w->clips && !chance(w, 6) ? w->number : 1 + (int64_t)draw(w, 3);
    gm_adam_hyper hyper = draw_hyper(w);
    end_step(w);
    w->writes_grads = !w->clips && chance(w, 4);
    for (uint32_t id = 0; id < w->n_params; id++) {
        model *p = &w->params[id];
        gm_adam_scalars scalars;
        bool will_have = is_before_backward && p->is_in_pass && p->spec.has_grad;
        p->is_coming = p->spec.has_moments && (p->has_grad || will_have);
        p->n_calls = 0;
        CHECK_OK(gm_adam_scalars_init(&hyper, &scalars));
        p->scale = scalars.grad_scale;
        if (p->is_coming) {
            out[n++] = (gm_update){.param = id, .hyper = hyper};
        }
    }
    return n;
}

/* A clip whose factor the host need not see. */
static void clip(world *w, gm_update *updates, uint32_t n)
{
    uint32_t ids[MOST_PARAMS];
    gm_sumsq want;
    gm_clip found;
    float norm, seen;
    bool has_waited;
    uint32_t n_ids = norm_of(w, ids, &want);
    bool fires = chance(w, w->clips ? 8 : 2);
    gm_clip_args args = {
        .sums = &want, .n = 1, .max_norm = fires ? 0.1 : 1e9, .out = &found, .norm = &norm};
    gm_clip_host(&args);
    CHECK_OK(gm_engine_clip(w->engine, ids, n_ids, args.max_norm, &seen, 0, &has_waited));
    CHECK(memcmp(&seen, &norm, sizeof norm) == 0);
    for (uint32_t i = 0; i < n; i++) {
        updates[i].hyper.grad_divisor = 1;
        w->params[updates[i].param].scale = found.scale;
    }
}

/* The function has failed: the engine says so from now on, and shows what there is. */
static void check_dead(world *w)
{
    char text[512];
    met.errors++;
    CHECK(strstr(gm_last_error(), "the test's own optimizer fails"));
    CHECK(gm_engine_enter(w->engine, 0, 0, 0) == GM_ERR_STATE);
    CHECK(strstr(gm_last_error(), "closed by an earlier error"));
    CHECK(strstr(gm_last_error(), "the test's own optimizer fails"));
    CHECK(gm_engine_salvage(w->engine, text, sizeof text));
    CHECK_OK(gm_engine_release_touched(w->engine, 0));
}

/* false: the engine is dead. */
static bool train_step(world *w, uint64_t shape, bool is_busy)
{
    gm_update updates[MOST_PARAMS];
    bool wants_arm = !w->clips && chance(w, 2), is_armed = false;
    uint32_t n_micro = chance(w, 3) ? 2 : 1, n = 0;
    for (uint32_t micro = 0; micro < n_micro; micro++) {
        bool is_last = micro + 1 == n_micro;
        forward(w, shape, GM_ENTER_GRAD, is_busy);
        if (is_last && wants_arm) {
            n = list_updates(w, true, updates);
            CHECK_OK(gm_engine_arm(w->engine, updates, n, true, &is_armed));
            for (uint32_t id = 0; id < w->n_params; id++) {
                w->params[id].is_coming &= is_armed;
            }
        }
        if (is_last && w->clips) {
            announce(w);
        }
        if (backward(w, shape, is_busy && !is_armed) != GM_OK) {
            return false;
        }
    }
    n = is_armed ? n : list_updates(w, false, updates);
    bool is_late = !wants_arm && (chance(w, 3) || (w->clips && chance(w, 2)));
    if (is_late) {
        clip(w, updates, n);
    } else if (w->clips) {
        check_norm(w);
    }
    for (uint32_t id = 0; id < w->n_params; id++) {
        memcpy(w->params[id].stepped, w->params[id].grad, grad_bytes(&w->params[id]));
    }
    w->is_behind = true;
    gm_status (*step)(gm_engine *, const gm_update *, uint32_t, gm_stream) =
        is_late ? gm_engine_step_clipped : gm_engine_step;
    gm_status status = step(w->engine, updates, n, 0);
    if (status == GM_ERR_NOMEM) { /* nothing has changed */
        if (!strstr(gm_last_error(), "for the update of")) {
            fprintf(stderr, "ERR %s\n", gm_last_error());
        }
        CHECK(strstr(gm_last_error(), "for the update of"));
        make_room(w);
        status = step(w->engine, updates, n, 0);
    }
    if (status != GM_OK) {
        return false;
    }
    w->is_taken = true;
    if (n > 0 && !wants_arm && chance(w, 4)) {
        check_fields(w, updates[n - 1].param);
    }
    if (!w->defers || chance(w, 4)) {
        end_step(w);
    }
    check_leases(w);
    CHECK_OK(gm_engine_check(w->engine));
    for (uint32_t id = 0; id < w->n_params; id++) {
        met.immediate += is_armed;
        if (w->params[id].spec.has_grad && (wants_arm || !is_busy || !chance(w, 4))) {
            CHECK_OK(gm_engine_grad_drop(w->engine, id));
            w->params[id].has_grad = false;
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

static void draw_units(world *w)
{
    uint32_t end = 0, home[MOST_PARAMS], second[MOST_PARAMS];
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

/* The least budget: unit 0 and one other in use, or one update. */
static size_t floor_bytes(const world *w, const gm_engine *engine)
{
    size_t most = 0;
    gm_engine_need need;
    for (uint32_t unit = 0; unit < w->n_units; unit++) {
        bool is_seen[MOST_PARAMS] = {false}; /* by chunk */
        size_t bytes = 0;
        for (uint32_t i = 0; i < w->unit_begin[w->n_units]; i++) {
            bool is_here =
                i < w->unit_begin[1] || (i >= w->unit_begin[unit] && i < w->unit_begin[unit + 1]);
            uint32_t chunk = gm_engine_chunk_of(engine, w->unit_params[i]);
            gm_engine_chunk_need(engine, chunk, &need);
            bytes += is_here && !is_seen[chunk] ? need.shown : 0;
            is_seen[chunk] |= is_here;
            most = need.updating > most ? need.updating : most;
        }
        most = bytes > most ? bytes : most;
    }
    return most;
}

static gm_device *device_new(world *w, gm_workers *workers)
{
    gm_device *device;
    gm_chaos_options how = {.seed = seed};
    CHECK_OK(w->is_chaos ? gm_device_chaos_new(BLOCK, workers, &how, &device)
                         : gm_device_host_new(BLOCK, workers, &device));
    return device;
}

static void engine_new(world *w, gm_workers *workers)
{
    gm_engine_param specs[MOST_PARAMS];
    uint64_t state_bytes[MOST_PARAMS];
    static const gm_dtype formats[] = {GM_F32, GM_BF16, GM_F16};
    gm_dtype format = formats[draw(w, 3)];
    bool is_grad_f32 = chance(w, 3), has_low = chance(w, 2);
    for (uint32_t id = 0; id < w->n_params; id++) {
        model_new(w, &w->params[id], format, has_low, is_grad_f32);
        specs[id] = w->params[id].spec;
        state_bytes[id] = w->params[id].state_bytes;
    }
    draw_units(w);
    gm_rates rates = {.h2d = 55e9,
                      .d2h = 54e9,
                      .h2d_both = 45e9,
                      .d2h_both = 50e9,
                      .host_adam = 5.3e9,
                      .host_adam_beside = 3.5e9,
                      .h2d_beside = 31e9,
                      .d2h_beside = 49e9,
                      .device_adam = 151e9};
    double slower = pow(0.1, 2 + (double)draw(w, 4));
    for (size_t i = 0; w->clips && i < sizeof rates / sizeof(double); i++) {
        ((double *)&rates)[i] *= slower;
    }
    gm_engine_options options = {
        .device = device_new(w, workers),
        .workers = workers,
        .params = specs,
        .n_params = w->n_params,
        .unit_params = w->unit_params,
        .unit_begin = w->unit_begin,
        .n_units = w->n_units,
        .chunk_bytes = gm_dtype_bytes(format) * MOST_NUMEL + draw(w, 2) * 2 * BLOCK,
        .device_budget = SIZE_MAX,
        .host_budget = SIZE_MAX,
        .host_limit = SIZE_MAX,
        .policy = w->clips ? GM_POLICY_AUTO : (gm_policy)draw(w, 3),
        .is_grad_f32 = is_grad_f32,
        .rates = !w->clips && chance(w, 6) ? (gm_rates){0} : rates,
        .state_share = (double)draw(w, 5) / 4,
        .outside_bytes = outside_bytes,
        .outside_context = w,
        .opaque = {run, w,
                   w->clips    ? GM_OPAQUE_SPECULATED
                   : w->defers ? GM_OPAQUE_DEFERRED
                               : GM_OPAQUE_AT_STEP},
        .state_bytes = state_bytes,
    };
    CHECK_OK(gm_engine_new(&options, &w->engine));
    w->device = options.device;
    if (options.policy == GM_POLICY_CUDA || (!w->clips && chance(w, 6))) {
        return;
    }
    gm_engine_stats stats; /* again, with a budget */
    gm_engine_get_stats(w->engine, &stats);
    size_t least = floor_bytes(w, w->engine), all = stats.state_bytes;
    options.device_budget = least + (chance(w, 2) ? 0 : draw(w, 4) * (all - least) / 4);
    if (w->clips) { /* room for a plan, and not for all */
        options.device_budget = least + (5 + draw(w, 3)) * (all - least) / 8;
    } else if (options.policy == GM_POLICY_AUTO &&
               chance(w, 4)) { /* and a host that has too little */
        options.host_limit = options.host_budget = draw(w, all + 1);
        options.device_budget = all + least;
        options.state_share = 1;
        met.staying++;
    }
    gm_engine_unref(w->engine);
    options.device = w->device = device_new(w, workers);
    CHECK_OK(gm_engine_new(&options, &w->engine));
}

static void fill(world *w)
{
    static float values[MOST_NUMEL];
    for (uint32_t id = 0; id < w->n_params; id++) {
        model *p = &w->params[id];
        draw_floats(w, values, p->spec.numel, 2);
        if (p->spec.has_low) {
            gm_split_host(p->spec.format, GM_F32, values, p->weight, p->low, p->spec.numel, NULL);
            CHECK_OK(gm_engine_write(w->engine, id, GM_FIELD_MASTER, values, 0));
            continue;
        }
        for (size_t i = 0; i < weight_bytes(p); i++) {
            p->weight[i] = (uint8_t)next_random(&w->random);
        }
        CHECK_OK(gm_engine_write(w->engine, id, GM_FIELD_WEIGHT, p->weight, 0));
    }
}

static void check_order(world *w)
{
    uint32_t n_faults;
    const char *first;
    CHECK_OK(gm_device_chaos_faults(w->device, &n_faults, &first));
    if (n_faults > 0) {
        fprintf(stderr, "%u accesses that nothing orders: %s\n", n_faults, first);
    }
    CHECK(n_faults == 0);
}

static void play(bool is_chaos, gm_workers *workers)
{
    world *w = calloc(1, sizeof *w);
    CHECK(w);
    w->random = w->aside = seed;
    w->is_chaos = is_chaos;
    device_name = is_chaos ? "chaos" : "host";
    w->n_params = 1 + (uint32_t)draw(w, MOST_PARAMS);
    w->n_units = 1 + (uint32_t)draw(w, MOST_UNITS);
    w->fails_in = chance(w, 5) ? 2 + (uint32_t)draw(w, 60) : 0;
    w->number = 1;
    w->clips = chance(w, 2);
    w->asks_room = chance(w, w->clips ? 8 : 3);
    w->defers = w->clips || (w->fails_in == 0 && chance(w, 2));
    engine_new(w, workers);
    fill(w);
    uint64_t shapes[2] = {next_random(&w->random), UINT64_MAX};
    bool is_alive = true;
    for (int number = 0; number < (w->clips ? 3 : 1) * N_STEPS && is_alive; number++) {
        uint64_t shape = shapes[w->clips || chance(w, 4)];
        bool is_busy =
            number > 2 && chance(w, w->clips ? 4 : 2); /* quiet steps are planned and followed */
        if (is_busy && chance(w, 3)) {
            forward(w, shape, 0, true); /* an evaluation */
        }
        is_alive = train_step(w, shape, is_busy);
    }
    if (is_alive && w->defers && !w->clips &&
        chance(w, 2)) { /* what is left fails, if there is anything */
        w->fails_in = 2;
        is_alive = gm_engine_issue(w->engine, 0) == GM_OK;
        w->fails_in = 0;
    }
    end_waiter(w);
    gm_engine_stats stats;
    gm_engine_get_stats(w->engine, &stats);
    met.plans += stats.plans;
    met.breaks += stats.plan_breaks;
    met.deviations += stats.deviations;
    met.evictions += stats.evictions;
    met.redone += stats.redone_updates;
    for (uint32_t id = 0; id < w->n_params && is_alive; id++) {
        check_fields(w, id);
    }
    end_waiter(w); /* reading fields may have begun another one */
    if (!is_alive) {
        check_dead(w);
    }
    CHECK_OK(gm_engine_check(w->engine));
    gm_engine_finish_updates(w->engine);
    if (w->is_chaos) {
        check_order(w);
    }
    end_leases(w);
    gm_engine_unref(w->engine);
    for (uint32_t id = 0; id < w->n_params; id++) {
        model_free(&w->params[id]);
    }
    free(w);
}

int main(void)
{
    const char *one = getenv("OPAQUE_SEED");
    gm_workers *workers;
    CHECK_OK(gm_workers_new(2, &workers));
    CHECK(atexit(say_seed) == 0);
    is_playing = true;
    for (uint64_t i = 0; i < (one ? 1 : N_SEEDS); i++) {
        seed = one ? strtoull(one, NULL, 10) : i;
        play(false, workers);
        play(true, workers);
    }
    is_playing = false;
    gm_workers_free(workers);
    printf("opaque: updates %llu, of them late %llu, that wrote gradients %llu; plans %llu, left "
           "%llu, passes that deviated %llu, evictions %llu, armed %llu, ends by an error %llu, "
           "room given %llu and taken %llu, on other threads %llu, refusals %llu, chunks that stay "
           "%llu, parameters without states %llu, updated behind their step's call %llu, ahead of "
           "it %llu, of these undone %llu, taken %llu, redone %llu\n",
           met.calls, met.late, met.written, met.plans, met.breaks, met.deviations, met.evictions,
           met.immediate, met.errors, met.reserved, met.shed, met.others, met.no_room, met.staying,
           met.stateless, met.behind, met.ahead, met.undone, met.taken, met.redone);
    if (!one) {
        CHECK(met.calls && met.late && met.written && met.plans && met.breaks && met.deviations);
        CHECK(met.evictions && met.immediate && met.errors && met.reserved && met.shed);
        CHECK(met.others && met.no_room && met.staying && met.stateless && met.behind);
        CHECK(met.ahead && met.undone && met.taken && met.redone);
    }
    return 0;
}
