/* issue.c - putting an operation into its stream's queue: its clock, its check against all before it, and when it runs; and
 * taking memory away. */
#include "chaos/chaos_impl.h"

gm_status gm_chaos_append_mark(gm_chaos_device *dev, gm_chaos_queue *queue, gm_chaos_kind kind,
                               gm_chaos_mark *mark, bool is_early)
{
    gm_chaos_op *op;
    GM_TRY(gm_chaos_op_new(dev, kind, &op));
    op->mark = mark;
    mark->references++;
    if (is_early) {
        gm_chaos_insert_early(dev, queue, op);
    } else {
        gm_chaos_append(dev, queue, op);
    }
    return GM_OK;
}

/* A host call that later work of its stream does not wait for; it waits itself for the earlier work. */
static gm_status append_released(gm_chaos_device *dev, gm_chaos_queue *queue, gm_chaos_op *op)
{
    gm_chaos_queue *released = &dev->queues[GM_CHAOS_RELEASED];
    gm_chaos_mark *mark;
    GM_TRY(gm_chaos_mark_new(gm_chaos_number(dev, queue), &queue->clock, &mark));
    gm_status status = gm_chaos_append_mark(dev, queue, GM_CHAOS_RECORD, mark, false);
    status =
        status == GM_OK ? gm_chaos_append_mark(dev, released, GM_CHAOS_WAIT, mark, false) : status;
    gm_chaos_mark_unref(mark);
    GM_TRY(status);
    gm_chaos_append(dev, released, op);
    return GM_OK;
}

gm_status gm_chaos_put(gm_chaos_device *dev, gm_chaos_queue *queue, gm_chaos_op *op)
{
    uint32_t actor = gm_chaos_number(dev, queue);
    gm_clock_join(&queue->clock, gm_chaos_host_clock(dev)); /* invariant 1 */
    queue->before_last = queue->clock;
    queue->has_unrecorded = true;
    gm_clock clock = op->is_early ? *gm_chaos_host_clock(dev) : queue->clock;
    if (op->is_early || op->is_released) {
        actor = GM_CHAOS_RELEASED;
    }
    clock.tick[actor] = ++dev->queues[actor].clock.tick[actor];
    gm_status status = gm_chaos_track(dev, op, actor, &clock);
    if (!op->is_released) {
        gm_clock_join(&queue->clock, &clock);
    }
    if (status == GM_OK && op->is_released) {
        status = append_released(dev, queue, op);
    } else if (status == GM_OK && (op->is_early || actor == GM_CHAOS_COMPUTE)) {
        gm_chaos_run(dev, op);
    } else if (status == GM_OK) {
        gm_chaos_append(dev, queue, op);
    }
    if (status != GM_OK) {
        gm_chaos_op_free(op);
    }
    return status;
}

gm_status gm_chaos_put_held(gm_chaos_device *dev, gm_chaos_queue *queue)
{
    gm_chaos_op *held = queue->held;
    queue->held = NULL;
    return held ? gm_chaos_put(dev, queue, held) : GM_OK;
}

gm_status gm_chaos_claim(gm_chaos_device *dev, gm_order *order, const char *what, uint64_t begin,
                         size_t bytes)
{
    for (uint32_t i = GM_CHAOS_FIRST_STREAM; i < GM_CHAOS_N_QUEUES; i++) {
        GM_TRY(gm_chaos_put_held(dev, &dev->queues[i]));
    }
    gm_clock *clock = &dev->queues[GM_CHAOS_HOST].clock;
    gm_access access = {.tick = ++clock->tick[GM_CHAOS_HOST],
                        .number = ++dev->last_number,
                        .bytes = bytes,
                        .kind = what,
                        .actor = GM_CHAOS_HOST,
                        .is_write = true};
    uint32_t n_before = dev->n_faults;
    GM_TRY(gm_chaos_note(dev, order, &access, clock, begin, begin + bytes));
    if (dev->n_faults > n_before) { /* what is queued must not run into memory that is gone */
        gm_chaos_run_all(dev);
    }
    return GM_OK;
}
