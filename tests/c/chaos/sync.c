/* sync.c - the chaos device's streams and events: what waits for what, and what the host learns.
 *
 * 1. A wait refers to the latest record at the time of the call, as with CUDA; an event that was never recorded
 *    counts as reached.
 * 2. What is recorded on stream 0 is reached at once, as all its work has run.
 * 3. The host's clock advances by its own accesses and by waiting, by nothing else. */
#include "chaos/chaos_impl.h"

#define RECORD_SECONDS 50e-6 /* between two records that the clock counts */

/* The text of an operation that failed when it ran, long after the call that issued it. */
static gm_status first_failure(const gm_chaos_device *dev)
{
    return dev->failed == GM_OK ? GM_OK : GM_FAIL(dev->failed, "%s", dev->failed_text);
}

/* ---- streams ---- */

gm_status gm_chaos_stream_new(gm_device *base, gm_stream *out)
{
    gm_chaos_device *dev = gm_chaos_self(base);
    GM_TRY(gm_chaos_check_owner(dev));
    uint32_t i = GM_CHAOS_FIRST_STREAM;
    /* A place is free for another actor once everything that the old one did is known to the host. */
    while (i < GM_CHAOS_N_QUEUES &&
           (dev->queues[i].is_used ||
            dev->queues[i].clock.tick[i] > gm_chaos_host_clock(dev)->tick[i])) {
        i++;
    }
    GM_FAIL_IF(i == GM_CHAOS_N_QUEUES, GM_ERR_NOMEM, "chaos device: more than %d streams",
               GM_CHAOS_N_QUEUES - GM_CHAOS_FIRST_STREAM);
    gm_clock clock = {{0}};
    clock.tick[i] = dev->queues[i].clock.tick[i];
    dev->queues[i] =
        (gm_chaos_queue){.stream = ++dev->last_stream, .is_used = true, .speed = 1, .clock = clock};
    *out = dev->last_stream;
    return GM_OK;
}

void gm_chaos_stream_free(gm_device *base, gm_stream stream)
{
    gm_chaos_device *dev = gm_chaos_self(base);
    gm_chaos_queue *queue;
    bool is_made = stream && gm_chaos_find_queue(dev, stream, &queue) == GM_OK;
    GM_ASSERT(is_made);
    if (!is_made) {
        return;
    }
    if (gm_chaos_check_owner(dev) == GM_OK) {
        (void)gm_chaos_put_held(dev, queue);
        gm_chaos_run_queue(dev, queue);
        gm_chaos_run_queue(dev, &dev->queues[GM_CHAOS_RELEASED]); /* it may wait for this one */
    }
    gm_chaos_drop_queue(dev, queue);
    queue->is_used = false;
}

gm_status gm_chaos_stream_sync(gm_device *base, gm_stream stream)
{
    gm_chaos_device *dev = gm_chaos_self(base);
    gm_chaos_queue *queue;
    GM_TRY(gm_chaos_check_owner(dev));
    GM_TRY(gm_chaos_find_queue(dev, stream, &queue));
    gm_chaos_wander(dev);
    GM_TRY(gm_chaos_put_held(dev, queue));
    if (!gm_clock_covers(gm_chaos_host_clock(dev), &queue->clock) &&
        gm_chaos_pick(dev, GM_CHAOS_NO_STREAM_SYNC)) {
        return first_failure(dev);
    }
    gm_chaos_run_queue(dev, queue);
    gm_chaos_run_queue(dev, &dev->queues[GM_CHAOS_RELEASED]);
    gm_clock_join(gm_chaos_host_clock(dev), &queue->clock);
    return first_failure(dev);
}

/* ---- events ---- */

gm_status gm_chaos_event_new(gm_device *base, bool is_timed, gm_event *out)
{
    gm_chaos_device *dev = gm_chaos_self(base);
    GM_TRY(gm_chaos_check_owner(dev));
    size_t slot = 0;
    while (slot < dev->n_events && dev->events[slot].is_used) {
        slot++;
    }
    GM_TRY(GM_GROW(dev->events, slot, dev->n_events,
                   "host memory: no room for a table of %zu events"));
    gm_chaos_event *event = &dev->events[slot];
    *event = (gm_chaos_event){true, is_timed, event->generation + 1, NULL};
    *out = (gm_event)event->generation << 32 | (gm_event)(slot + 1);
    return GM_OK;
}

static gm_status find_event(const gm_chaos_device *dev, gm_event handle, gm_chaos_event **out)
{
    size_t slot = (size_t)(handle & UINT32_MAX) - 1; /* 0 wraps beyond every table */
    *out = NULL;
    GM_FAIL_IF(slot >= dev->n_events || !dev->events[slot].is_used ||
                   dev->events[slot].generation != handle >> 32,
               GM_ERR_ARG, "chaos device: %#llx is not an event", (unsigned long long)handle);
    *out = &dev->events[slot];
    return GM_OK;
}

void gm_chaos_event_free(gm_device *base, gm_event handle)
{
    gm_chaos_event *event;
    bool is_event = find_event(gm_chaos_self(base), handle, &event) == GM_OK;
    GM_ASSERT(is_event);
    if (is_event) { /* waits that refer to its record keep that */
        gm_chaos_mark_unref(event->latest);
        event->latest = NULL;
        event->is_used = false;
    }
}

gm_status gm_chaos_event_record(gm_device *base, gm_event handle, gm_stream stream)
{
    gm_chaos_device *dev = gm_chaos_self(base);
    gm_chaos_event *event;
    gm_chaos_queue *queue;
    GM_TRY(gm_chaos_check_owner(dev));
    GM_TRY(find_event(dev, handle, &event));
    GM_TRY(gm_chaos_find_queue(dev, stream, &queue));
    gm_chaos_wander(dev);
    bool is_compute = gm_chaos_number(dev, queue) == GM_CHAOS_COMPUTE;
    bool is_early =
        !is_compute && queue->has_unrecorded && gm_chaos_pick(dev, GM_CHAOS_EARLY_RECORD);
    gm_clock_join(&queue->clock, gm_chaos_host_clock(dev));
    gm_chaos_mark *mark;
    GM_TRY(gm_chaos_mark_new(gm_chaos_number(dev, queue),
                             is_early ? &queue->before_last : &queue->clock, &mark));
    if (is_compute) { /* invariant 2 */
        mark->is_reached = true;
    } else {
        GM_TRY_ELSE(gm_chaos_append_mark(dev, queue, GM_CHAOS_RECORD, mark, is_early),
                    gm_chaos_mark_unref(mark));
    }
    dev->n_records += is_compute || event->is_timed;
    mark->seconds = (double)dev->n_records * RECORD_SECONDS;
    queue->has_unrecorded = false;
    gm_chaos_mark_unref(event->latest);
    event->latest = mark;
    return GM_OK;
}

/* Only a wait that orders something new can be missed. */
static bool is_wait_dropped(gm_chaos_device *dev, const gm_chaos_queue *queue,
                            const gm_chaos_mark *mark)
{
    uint32_t waiting = gm_chaos_number(dev, queue);
    if (waiting == mark->queue || gm_clock_covers(&queue->clock, &mark->clock)) {
        return false;
    }
    return gm_chaos_pick(dev, waiting == GM_CHAOS_COMPUTE       ? GM_CHAOS_NO_WAIT_OF_COMPUTE
                              : mark->queue == GM_CHAOS_COMPUTE ? GM_CHAOS_NO_WAIT_FOR_COMPUTE
                                                                : GM_CHAOS_NO_WAIT_BETWEEN);
}

gm_status gm_chaos_event_wait(gm_device *base, gm_event handle, gm_stream stream)
{
    gm_chaos_device *dev = gm_chaos_self(base);
    gm_chaos_event *event;
    gm_chaos_queue *queue;
    GM_TRY(gm_chaos_check_owner(dev));
    GM_TRY(find_event(dev, handle, &event));
    GM_TRY(gm_chaos_find_queue(dev, stream, &queue));
    gm_chaos_wander(dev);
    gm_clock_join(&queue->clock, gm_chaos_host_clock(dev));
    gm_chaos_mark *mark = event->latest; /* invariant 3 */
    if (!mark || is_wait_dropped(dev, queue, mark)) {
        return GM_OK;
    }
    gm_clock_join(&queue->clock, &mark->clock);
    if (gm_chaos_number(dev, queue) == GM_CHAOS_COMPUTE) {
        gm_chaos_run_until(dev, mark);
        return GM_OK;
    }
    return mark->is_reached ? GM_OK : gm_chaos_append_mark(dev, queue, GM_CHAOS_WAIT, mark, false);
}

gm_status gm_chaos_event_sync(gm_device *base, gm_event handle)
{
    gm_chaos_device *dev = gm_chaos_self(base);
    gm_chaos_event *event;
    GM_TRY(gm_chaos_check_owner(dev));
    GM_TRY(find_event(dev, handle, &event));
    gm_chaos_wander(dev);
    gm_chaos_mark *mark = event->latest;
    bool is_new = mark && !gm_clock_covers(gm_chaos_host_clock(dev), &mark->clock);
    if (!mark || (is_new && gm_chaos_pick(dev, GM_CHAOS_NO_EVENT_SYNC))) {
        return first_failure(dev);
    }
    gm_chaos_run_until(dev, mark);
    gm_chaos_run_queue(dev, &dev->queues[GM_CHAOS_RELEASED]);
    gm_clock_join(gm_chaos_host_clock(dev), &mark->clock);
    return first_failure(dev);
}

/* Of what has come, and the host has not waited for, it says so now and then. */
gm_status gm_chaos_event_query(gm_device *base, gm_event handle, bool *out)
{
    gm_chaos_device *dev = gm_chaos_self(base);
    gm_chaos_event *event;
    *out = false;
    GM_TRY(gm_chaos_check_owner(dev));
    GM_TRY(find_event(dev, handle, &event));
    gm_chaos_wander(dev);
    gm_chaos_mark *mark = event->latest;
    *out = !mark || gm_clock_covers(gm_chaos_host_clock(dev), &mark->clock) ||
           (mark->is_reached && gm_chaos_draw(dev, 4));
    if (*out && mark) {
        gm_clock_join(gm_chaos_host_clock(dev), &mark->clock);
    }
    return first_failure(dev);
}

gm_status gm_chaos_event_elapsed(gm_device *base, gm_event start, gm_event end, double *seconds)
{
    gm_chaos_device *dev = gm_chaos_self(base);
    gm_chaos_event *from, *to;
    GM_TRY(gm_chaos_check_owner(dev));
    GM_TRY(find_event(dev, start, &from));
    GM_TRY(find_event(dev, end, &to));
    GM_FAIL_IF(!from->is_timed || !to->is_timed || !from->latest || !to->latest,
               from->is_timed && to->is_timed ? GM_ERR_STATE : GM_ERR_ARG,
               "chaos device: time between events of which one %s",
               from->is_timed && to->is_timed ? "was never recorded" : "is not timed");
    gm_chaos_run_until(dev, from->latest);
    gm_chaos_run_until(dev, to->latest);
    gm_clock_join(gm_chaos_host_clock(dev), &from->latest->clock);
    gm_clock_join(gm_chaos_host_clock(dev), &to->latest->clock);
    *seconds = to->latest->seconds - from->latest->seconds;
    return first_failure(dev);
}
