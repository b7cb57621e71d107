/* agree.c - what ranks must know of each other before they plan: the largest of their numbers.
 *
 * A largest value is the same on every rank whatever the order, so what is decided from it is, too.  Numbers are
 * unsigned; of doubles that are not negative the bits have their order, and a smallest value is the complement of the
 * largest complement.
 *
 * Invariants
 *   1. Every call is made by all ranks, at the same place in the order of collectives.
 *   2. A wish is answered one step later, on every rank at the same step: nobody waits for the slowest rank. */
#include "engine/engine_impl.h"

#include <string.h>

enum { WISH_SUMS = 2, VALUES_OF_SUM = sizeof(gm_sumsq) / sizeof(uint64_t) };
enum { MOST = (GM_AGREE_SUMS - WISH_SUMS) * VALUES_OF_SUM };

gm_status gm_agree_new(gm_engine *engine)
{
    if (!engine->comm_stream) {
        return GM_OK;
    }
    GM_TRY(engine->device->ops->event_new(engine->device, false, &engine->wished[0]));
    return engine->device->ops->event_new(engine->device, false, &engine->wished[1]);
}

void gm_agree_free(gm_engine *engine)
{
    for (int turn = 0; turn < 2; turn++) {
        if (engine->wished[turn]) {
            engine->device->ops->event_free(engine->device, engine->wished[turn]);
        }
    }
}

/* The largest of each of n values at sums[index], on the device and back. */
static gm_status issue(gm_engine *engine, uint32_t index, size_t n)
{
    const gm_device_ops *ops = engine->device->ops;
    gm_stream stream = engine->comm_stream;
    uintptr_t there = (uintptr_t)&engine->sums[index];
    if (!engine->device->is_host) {
        GM_TRY(ops->copy_h2d(engine->device, there, &engine->sums_home[index], n * sizeof(uint64_t),
                             stream));
    }
    gm_comm *comms[] = {engine->shard_comm, engine->replica_comm};
    for (int i = 0; i < 2; i++) {
        if (comms[i]) {
            GM_TRY(gm_comm_all_reduce(comms[i], there, n, GM_COMM_U64, GM_COMM_MAX, stream));
        }
    }
    return engine->device->is_host ? GM_OK
                                   : ops->copy_d2h(engine->device, &engine->sums_home[index], there,
                                                   n * sizeof(uint64_t), stream);
}

gm_status gm_agree_max(gm_engine *engine, uint64_t *values, size_t n)
{
    uint32_t index = engine->n_params + 1 + WISH_SUMS;
    gm_shard_label(engine, GM_FOR_PLAN, 0);
    for (size_t done = 0; done < n; done += MOST) {
        size_t some = n - done < MOST ? n - done : MOST;
        memcpy(&engine->sums_home[index], values + done, some * sizeof *values);
        GM_TRY(issue(engine, index, some));
        GM_TRY(engine->device->ops->stream_sync(engine->device, engine->comm_stream));
        GM_TRY(gm_shard_check(engine)); /* before the numbers are believed */
        memcpy(values + done, &engine->sums_home[index], some * sizeof *values);
    }
    return GM_OK;
}

gm_status gm_agree_wish(gm_engine *engine, bool wish, bool *out)
{
    uint32_t turn = engine->n_wishes & 1, first = engine->n_params + 1;
    *out = false;
    if (engine->n_wishes > 0) {
        GM_TRY(engine->device->ops->event_sync(engine->device, engine->wished[1 - turn]));
        GM_TRY(gm_shard_check(engine));
        *out = engine->sums_home[first + 1 - turn].limb[0] > 0;
    }
    engine->sums_home[first + turn].limb[0] = wish && !*out; /* it is being granted */
    gm_shard_label(engine, GM_FOR_WISH, 0);
    GM_TRY(issue(engine, first + turn, 1));
    engine->n_wishes++;
    return engine->device->ops->event_record(engine->device, engine->wished[turn],
                                             engine->comm_stream);
}
