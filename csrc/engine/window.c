/* window.c - the first steps under a plan, watched: how long they take and how fast Adam on the host is in them, for
 * tune.h, which then keeps or changes the rate that plans are made from.
 *
 * A window is whole after STEPS_SKIPPED steps that are not timed and STEPS_MEASURED that are.  One in which something
 * else ran is begun again.  The host waits where one ends: a few times, early in a run.
 *
 * With several ranks (planner_ranks.c joins what they have seen)
 *   1. what each rank has seen stays its own until it is judged: gm_window_judge and gm_window_believe get the same
 *      numbers on all ranks, at the same step, so tuner and rates are the same on all;
 *   2. a rank whose windows are never whole holds nobody up: the others' count.  It says so once; when all ranks have,
 *      there is nothing more to learn. */
#include "engine/engine_impl.h"

enum { LEAST_SEEN_NS = 10 * 1000 * 1000 };
enum { STEPS_SKIPPED = 1, STEPS_MEASURED = 2 }; /* of a window */
enum { MOST_SPOILED = 16 };                     /* windows that are begun again, in all */

void gm_window_init(gm_engine *engine, const gm_engine_options *options)
{
    engine->window.rates = options->rates;
    engine->window.is_tuned = options->is_tuned;
}

void gm_window_spoil(gm_engine *engine)
{
    engine->window.is_spoiled = true;
}

void gm_window_end_asking(gm_engine *engine)
{
    engine->window.is_asked = false;
}

static void start_counting(gm_engine *engine)
{
    engine->window.ns = atomic_load(&engine->update.host_ns);
    engine->window.params = atomic_load(&engine->update.host_params);
}

double gm_window_rate(const gm_engine *engine)
{
    if (!engine->room.plan) {
        return 0;
    }
    unsigned long long ns = atomic_load(&engine->update.host_ns) - engine->window.ns;
    unsigned long long n = atomic_load(&engine->update.host_params) - engine->window.params;
    return ns > LEAST_SEEN_NS ? (double)n / ((double)ns * 1e-9) : 0;
}

void gm_window_start(gm_engine *engine)
{
    start_counting(engine);
    engine->window.n_steps = 0;
    if (!engine->window.is_asked && !engine->window.tuner.is_done) {
        gm_tuner_forget(&engine->window.tuner); /* the plan is another one for other reasons */
    }
    engine->window.is_asked = engine->window.is_spoiled = false;
    engine->window.seconds = 0;
}

void gm_window_free(gm_engine *engine)
{
    gm_free_event(engine->device, &engine->window.begin);
    gm_free_event(engine->device, &engine->window.end);
}

/* Between the events are STEPS_MEASURED whole steps of the caller's stream. */
static gm_status end_window(gm_engine *engine)
{
    gm_window *window = &engine->window;
    double seconds;
    GM_TRY(
        engine->device->ops->event_elapsed(engine->device, window->begin, window->end, &seconds));
    window->seconds = seconds / STEPS_MEASURED;
    window->seen = gm_window_rate(engine);
    return GM_OK;
}

static gm_status count_step(gm_engine *engine)
{
    const gm_device_ops *ops = engine->device->ops;
    gm_window *window = &engine->window;
    if (window->is_spoiled) { /* its time is not that of steps: from the beginning */
        window->is_spoiled = false;
        window->n_steps = 0;
        window->is_hopeless = ++window->n_spoiled == MOST_SPOILED;
        return GM_OK;
    }
    window->n_steps++;
    if (window->n_steps == STEPS_SKIPPED) {
        if (!window->begin) {
            GM_TRY(ops->event_new(engine->device, true, &window->begin));
            GM_TRY(ops->event_new(engine->device, true, &window->end));
        }
        start_counting(engine);
        return ops->event_record(engine->device, window->begin, engine->call.stream);
    }
    if (window->n_steps < STEPS_SKIPPED + STEPS_MEASURED) {
        return GM_OK;
    }
    GM_TRY(ops->event_record(engine->device, window->end, engine->call.stream));
    return end_window(engine);
}

void gm_window_watch(gm_engine *engine)
{
    gm_window *window = &engine->window;
    bool is_watched = engine->window.is_tuned && !engine->window.tuner.is_done &&
                      engine->room.plan && !engine->room.wants_plan && window->seconds <= 0 &&
                      !window->is_hopeless;
    if (is_watched && count_step(engine) != GM_OK) {
        window->is_hopeless = true; /* without times there is nothing to learn */
    }
}

bool gm_window_has_verdict(const gm_engine *engine)
{
    const gm_window *window = &engine->window;
    return window->seconds > 0 ||
           (window->is_hopeless && !window->has_said_so && !engine->window.tuner.is_done);
}

bool gm_window_is_provisional(const gm_engine *engine)
{
    return !engine->room.plan || engine->room.wants_plan ||
           (engine->window.is_tuned && !engine->window.tuner.is_done);
}

bool gm_window_judge(gm_engine *engine, double seconds, double seen, bool is_hopeless)
{
    engine->window.seconds = 0;
    engine->window.has_said_so = engine->window.is_hopeless;
    if (engine->window.is_tuned && !engine->window.tuner.is_done) {
        if (seconds > 0) {
            engine->window.is_asked =
                gm_tuner_next(&engine->window.tuner, seen, seconds, &engine->window.rates);
        } else {
            engine->window.tuner.is_done = is_hopeless; /* the present plan stays */
        }
    }
    return engine->window.is_asked;
}

void gm_window_believe(gm_engine *engine, double seen)
{
    if (engine->window.is_tuned && !engine->window.tuner.is_done && !engine->window.is_asked &&
        seen > 0) {
        gm_rates_set_host(&engine->window.rates, seen);
    }
}
