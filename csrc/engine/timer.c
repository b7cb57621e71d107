/* timer.c - how long each tick's own work takes.
 *
 * Timed events on the caller's stream bracket it: from after the engine's waits to the beginning of
 * the next tick, or of the step.  So copies, host waits and updates do not count as compute. */
#include "engine/engine_impl.h"

#include <stdlib.h>

/* Of each trace, on demand and again under a plan.  On demand the device waits often and then
 * computes faster than it will under a plan: a run under a plan replaces the times of those before
 * it; without one the least counts. */
enum { TIMED_RUNS = 2 };

/* A tick that the host took as long to issue, or nearly, may have had the device wait for it: of
 * such the least counts. */
#define HOST_SHARE 0.8

void gm_timer_free(gm_engine *engine)
{
    for (size_t i = 0; i < engine->timer.capacity; i++) {
        gm_free_event(engine->device, &engine->timer.ticks[i].start);
        gm_free_event(engine->device, &engine->timer.ticks[i].end);
    }
    free(engine->timer.ticks);
}

/* The events of one more tick; made only while a trace is new, or once per length. */
static bool has_room(gm_engine *engine, gm_tick_timer *timer)
{
    gm_device *device = engine->device;
    if (GM_GROW(timer->ticks, timer->n, timer->capacity, "HOST: a timer of %zu ticks") != GM_OK) {
        return false;
    }
    gm_timed_tick *tick = &timer->ticks[timer->n];
    return (tick->start || device->ops->event_new(device, true, &tick->start) == GM_OK) &&
           (tick->end || device->ops->event_new(device, true, &tick->end) == GM_OK);
}

void gm_timer_stop(gm_engine *engine, gm_stream stream)
{
    gm_tick_timer *timer = &engine->timer;
    if (timer->is_on && timer->is_open) {
        gm_timed_tick *tick = &timer->ticks[timer->n - 1];
        timer->is_open = false;
        tick->host = gm_seconds() - tick->issued;
        (void)engine->device->ops->event_record(engine->device, tick->end, stream);
    }
}

void gm_timer_start(gm_engine *engine, gm_stream stream)
{
    gm_tick_timer *timer = &engine->timer;
    gm_timeline_work(engine->timeline, stream);
    if (!timer->is_on || timer->is_open || timer->n != engine->pass.tick) {
        return;
    }
    if (!has_room(engine, timer)) {
        timer->is_on = false;
        return;
    }
    timer->is_open = engine->device->ops->event_record(engine->device, timer->ticks[timer->n].start,
                                                       stream) == GM_OK;
    timer->ticks[timer->n].issued = gm_seconds();
    timer->n++;
}

void gm_timer_begin(gm_engine *engine, const gm_trace *trace)
{
    gm_tick_timer *timer = &engine->timer;
    bool is_planned = engine->room.plan != NULL;
    bool is_known = trace && !is_planned && trace->n_timed[1] > 0; /* better than on demand */
    bool is_due = !trace || (!is_known && trace->n_timed[is_planned] < TIMED_RUNS);
    timer->is_on = is_due && !timer->has_result; /* one result at a time waits for the step's end */
    timer->n = timer->is_on ? 0 : timer->n;
    timer->is_planned = timer->is_on ? is_planned : timer->is_planned;
    timer->is_open = false;
}

void gm_timer_end(gm_engine *engine, const gm_trace *trace)
{
    gm_tick_timer *timer = &engine->timer;
    if (timer->is_on && trace && timer->n == trace->n) {
        timer->hash = trace->hash;
        timer->has_result = true;
    }
    timer->is_on = false;
}

bool gm_timer_has_settled(const gm_engine *engine)
{
    bool has_settled = false;
    for (uint32_t t = 0; t < gm_book_n_traces(engine->pass.book); t++) {
        const gm_trace *trace = gm_book_trace(engine->pass.book, t);
        has_settled = has_settled || (trace->has_backward && trace->n_timed[1] >= TIMED_RUNS);
    }
    return has_settled;
}

bool gm_timer_resolve(gm_engine *engine)
{
    gm_tick_timer *timer = &engine->timer;
    if (!timer->has_result) {
        return false;
    }
    timer->has_result = false;
    bool has_backward = false;
    uint32_t n_timed =
        gm_book_count_timed(engine->pass.book, timer->hash, timer->is_planned, &has_backward);
    for (uint32_t i = 0; i < timer->n; i++) {
        double seconds;
        if (engine->device->ops->event_elapsed(engine->device, timer->ticks[i].start,
                                               timer->ticks[i].end, &seconds) == GM_OK) {
            bool is_late = !engine->device->is_host && timer->ticks[i].host > HOST_SHARE * seconds;
            gm_book_time(engine->pass.book, timer->hash, i, seconds, timer->is_planned && !is_late);
        }
    }
    return timer->is_planned && has_backward && n_timed == TIMED_RUNS;
}
