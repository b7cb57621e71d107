/* queue.c - the queues of the chaos device: operations that wait to be run, and who comes next.
 *
 * 1. An operation is run only as the first of its queue, and a wait only when its mark is reached (seeded faults
 *    rearrange queues before that, never here).
 * 2. A wait refers to a record that was issued before it, so waits never form a circle: while anything is
 *    queued, some queue's first operation is ready.
 * 3. Every mark that is not reached has its record in the queue that it names. */
#include "chaos/chaos_impl.h"

#include <stdio.h>
#include <stdlib.h>

enum {
    MAX_QUEUED = 4096, /* beyond it, issuing runs something */
    N_MOODS = 4,
};

static uint64_t random_bits(gm_chaos_device *dev)
{
    uint64_t z = (dev->random += 0x9e3779b97f4a7c15u); /* splitmix64 */
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* ---- operations and marks ---- */

gm_status gm_chaos_op_new(gm_chaos_device *dev, gm_chaos_kind kind, gm_chaos_op **out)
{
    gm_chaos_op *op;
    GM_TRY(GM_NEW(op, "host memory: no room for an operation's %zu bytes"));
    op->kind = kind;
    op->number = ++dev->last_number;
    *out = op;
    return GM_OK;
}

void gm_chaos_op_free(gm_chaos_op *op)
{
    if (op) {
        gm_chaos_mark_unref(op->mark);
        free(op->ranges);
        free(op->uses);
        free(op);
    }
}

gm_status gm_chaos_add_use(gm_chaos_op *op, const void *address, size_t bytes, bool is_write)
{
    GM_TRY(GM_GROW(op->uses, op->n_uses, op->use_capacity,
                   "host memory: no room for a list of %zu byte ranges"));
    op->uses[op->n_uses++] = (gm_chaos_use){(uintptr_t)address, bytes, is_write};
    return GM_OK;
}

gm_status gm_chaos_mark_new(uint32_t queue, const gm_clock *clock, gm_chaos_mark **out)
{
    gm_chaos_mark *mark;
    GM_TRY(GM_NEW(mark, "host memory: no room for a record's %zu bytes"));
    mark->references = 1;
    mark->queue = queue;
    mark->clock = *clock;
    *out = mark;
    return GM_OK;
}

void gm_chaos_mark_unref(gm_chaos_mark *mark)
{
    if (mark && --mark->references == 0) {
        free(mark);
    }
}

/* ---- queues ---- */

gm_status gm_chaos_find_queue(gm_chaos_device *dev, gm_stream stream, gm_chaos_queue **out)
{
    for (uint32_t i = GM_CHAOS_COMPUTE; i < GM_CHAOS_N_QUEUES; i++) {
        if (dev->queues[i].is_used && dev->queues[i].stream == stream) {
            *out = &dev->queues[i];
            return GM_OK;
        }
    }
    return GM_FAIL(GM_ERR_ARG, "chaos device: %llu is not a stream", (unsigned long long)stream);
}

uint32_t gm_chaos_number(const gm_chaos_device *dev, const gm_chaos_queue *queue)
{
    return (uint32_t)(queue - dev->queues);
}

gm_clock *gm_chaos_host_clock(gm_chaos_device *dev)
{
    return &dev->queues[GM_CHAOS_HOST].clock;
}

void gm_chaos_append(gm_chaos_device *dev, gm_chaos_queue *queue, gm_chaos_op *op)
{
    op->next = NULL;
    if (queue->last) {
        queue->last->next = op;
    } else {
        queue->first = op;
    }
    queue->last = op;
    dev->n_queued++;
}

void gm_chaos_insert_early(gm_chaos_device *dev, gm_chaos_queue *queue, gm_chaos_op *record)
{
    gm_chaos_op **at = NULL;
    for (gm_chaos_op **link = &queue->first; *link; link = &(*link)->next) {
        at = (*link)->kind < GM_CHAOS_RECORD ? link : at;
    }
    if (!at) { /* it has run already: no earlier place is left */
        gm_chaos_append(dev, queue, record);
        return;
    }
    record->next = *at;
    *at = record;
    dev->n_queued++;
}

static gm_chaos_op *take_first(gm_chaos_device *dev, gm_chaos_queue *queue)
{
    gm_chaos_op *op = queue->first;
    queue->first = op->next;
    if (!queue->first) {
        queue->last = NULL;
    }
    dev->n_queued--;
    return op;
}

void gm_chaos_drop_queue(gm_chaos_device *dev, gm_chaos_queue *queue)
{
    while (queue->first) {
        gm_chaos_op_free(take_first(dev, queue));
    }
    gm_chaos_op_free(queue->held);
    gm_chaos_op_free(queue->noted);
    queue->held = queue->noted = NULL;
}

/* ---- running ---- */

static gm_status run_on(gm_device *inner, gm_chaos_op *op)
{
    const gm_device_ops *ops = inner->ops;
    switch (op->kind) {
    case GM_CHAOS_COPY_H2D:
        return ops->copy_h2d(inner, op->dst, (const void *)op->src, op->bytes, 0);
    case GM_CHAOS_COPY_D2H: return ops->copy_d2h(inner, (void *)op->dst, op->src, op->bytes, 0);
    case GM_CHAOS_COPY_D2D: return ops->copy_d2d(inner, op->dst, op->src, op->bytes, 0);
    case GM_CHAOS_FILL: return ops->fill(inner, op->dst, op->byte, op->bytes, 0);
    case GM_CHAOS_ADAM:
        GM_TRY(ops->adam(inner, &op->adam, 0));
        return op->is_twice ? ops->adam(inner, &op->adam, 0) : GM_OK;
    case GM_CHAOS_GRAD_ADD: return ops->grad_add(inner, &op->grad_add, op->sum, 0);
    case GM_CHAOS_SUMSQ:
        return ops->sumsq(inner, (const void *)op->src, op->dtype, op->numel, op->sum, 0);
    case GM_CHAOS_CLIP: return ops->clip(inner, &op->clip, 0);
    case GM_CHAOS_HOST_CALL: return ops->host_call(inner, op->fn, op->context, 0);
    case GM_CHAOS_RECORD: op->mark->is_reached = true; return GM_OK;
    case GM_CHAOS_FOREIGN:
    case GM_CHAOS_WAIT:
    case GM_CHAOS_N_KINDS: break;
    }
    return GM_OK;
}

void gm_chaos_keep_failure(gm_chaos_device *dev, gm_status status)
{
    if (status != GM_OK && dev->failed == GM_OK) {
        dev->failed = status;
        snprintf(dev->failed_text, sizeof dev->failed_text, "%s", gm_last_error());
    }
}

void gm_chaos_run(gm_chaos_device *dev, gm_chaos_op *op)
{
    GM_ASSERT(!dev->is_running);
    dev->is_running = true;
    gm_status status = op->is_dropped ? GM_OK : run_on(dev->inner, op);
    dev->is_running = false;
    gm_chaos_keep_failure(dev, status);
    dev->n_run++;
    dev->order_hash = (dev->order_hash ^ op->number) * 0x100000001b3u;
    gm_chaos_op_free(op);
}

static bool is_ready(const gm_chaos_queue *queue)
{
    const gm_chaos_op *first = queue->first;
    return first && (first->kind != GM_CHAOS_WAIT || first->mark->is_reached);
}

/* A queue whose first operation is ready, by chance weighed with speed; NULL when nothing is queued. */
static gm_chaos_queue *any_ready(gm_chaos_device *dev)
{
    uint64_t total = 0;
    for (uint32_t i = 0; i < GM_CHAOS_N_QUEUES; i++) {
        total += is_ready(&dev->queues[i]) ? dev->queues[i].speed : 0;
    }
    GM_ASSERT((total > 0) == (dev->n_queued > 0)); /* invariant 2 */
    uint64_t chosen = total ? random_bits(dev) % total : 0;
    for (uint32_t i = 0; i < GM_CHAOS_N_QUEUES; i++) {
        gm_chaos_queue *queue = &dev->queues[i];
        if (!is_ready(queue)) {
            continue;
        }
        if (chosen < queue->speed) {
            return queue;
        }
        chosen -= queue->speed;
    }
    return NULL;
}

static bool run_any(gm_chaos_device *dev)
{
    gm_chaos_queue *queue = any_ready(dev);
    if (queue) {
        gm_chaos_run(dev, take_first(dev, queue));
    }
    return queue != NULL;
}

bool gm_chaos_draw(gm_chaos_device *dev, uint64_t n)
{
    return random_bits(dev) % n == 0;
}

void gm_chaos_wander(gm_chaos_device *dev)
{
    if (dev->mood_left == 0) { /* lazy and eager stretches; streams lag behind, then overtake */
        dev->mood = (uint32_t)(random_bits(dev) % N_MOODS);
        dev->mood_left = (uint32_t)(8 + random_bits(dev) % 56);
        for (uint32_t i = 0; i < GM_CHAOS_N_QUEUES; i++) {
            dev->queues[i].speed = 1u << (2 * (random_bits(dev) % 4));
        }
    }
    dev->mood_left--;
    uint64_t chance = random_bits(dev), n = 0;
    switch (dev->mood) {
    case 0: n = 0; break;
    case 1: n = chance % 4 == 0; break;
    case 2: n = (uint64_t)__builtin_ctzll(chance | 64); break;
    default: n = chance % 8; break;
    }
    for (; n > 0 && run_any(dev); n--) {
    }
    while (dev->n_queued > MAX_QUEUED) {
        run_any(dev);
    }
}

/* One step: something that the queue's progress needs, or just as often anything else. */
static void run_towards(gm_chaos_device *dev, gm_chaos_queue *queue)
{
    if (random_bits(dev) % 2 == 0) {
        run_any(dev);
        return;
    }
    while (!is_ready(queue)) {
        queue = &dev->queues[queue->first->mark->queue]; /* invariant 3 */
    }
    gm_chaos_run(dev, take_first(dev, queue));
}

void gm_chaos_run_until(gm_chaos_device *dev, const gm_chaos_mark *mark)
{
    while (!mark->is_reached) {
        run_towards(dev, &dev->queues[mark->queue]);
    }
}

void gm_chaos_run_queue(gm_chaos_device *dev, gm_chaos_queue *queue)
{
    while (queue->first) {
        run_towards(dev, queue);
    }
}

void gm_chaos_run_all(gm_chaos_device *dev)
{
    while (run_any(dev)) {
    }
}
