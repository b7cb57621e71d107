/* ranks.c - this rank among the others: the communicators' life, what a collective is for, and the numbers that ranks
 * must know of each other: the largest of theirs, and sums.
 *
 * A largest value is the same on every rank whatever the order, so what is decided from it is, too.  Numbers are
 * unsigned; of doubles that are not negative the bits have their order, and ~value gives the smallest value where value
 * gives the largest.
 *
 * Invariants
 *   1. Every call is made by all ranks, at the same place in the order of collectives.
 *   2. A wish is answered one step later, on every rank at the same step: nobody waits for the slowest rank.
 *
 * The host waits in: gm_ranks_max, gm_ranks_sum. */
#include "engine/engine_impl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WISH_SUMS = 2, VALUES_OF_SUM = sizeof(gm_sumsq) / sizeof(uint64_t) };
enum { MOST = (GM_AGREE_SUMS - WISH_SUMS) * VALUES_OF_SUM };

/* purpose (8 bits), step (24), chunk (32) */
static void name_label(void *context, uint64_t label, char *out, size_t bytes)
{
    static const char *const purposes[GM_N_PURPOSES] = {"",
                                                        "gathering the weights of chunk",
                                                        "summing the gradients of chunk",
                                                        "the norm of all gradients",
                                                        "a common plan",
                                                        "whether a plan is due"};
    uint32_t purpose = (uint32_t)(label >> 56), step = (uint32_t)(label >> 32) & 0xffffff;
    uint32_t chunk = (uint32_t)label;
    (void)context;
    if (purpose == 0 || purpose >= GM_N_PURPOSES) {
        return;
    }
    if (purpose <= GM_FOR_REDUCE) {
        (void)snprintf(out, bytes, "%s %u after step %u", purposes[purpose], chunk, step);
    } else {
        (void)snprintf(out, bytes, "%s after step %u", purposes[purpose], step);
    }
}

void gm_ranks_label(gm_engine *engine, gm_purpose purpose, uint32_t chunk)
{
    uint64_t label =
        (uint64_t)purpose << 56 | (engine->n_step_calls & UINT64_C(0xffffff)) << 32 | chunk;
    if (engine->shard_comm) {
        gm_comm_label(engine->shard_comm, label);
    }
    if (engine->replica_comm) {
        gm_comm_label(engine->replica_comm, label);
    }
}

gm_status gm_ranks_compare(gm_engine *engine)
{
    if (engine->shard_comm) {
        GM_TRY(gm_comm_agree(engine->shard_comm, engine->comm_stream));
    }
    return engine->replica_comm ? gm_comm_agree(engine->replica_comm, engine->comm_stream) : GM_OK;
}

gm_status gm_ranks_new(gm_engine *engine)
{
    gm_device *device = engine->device;
    if (!gm_has_ranks(engine)) {
        return GM_OK;
    }
    GM_TRY(device->ops->stream_new(device, &engine->comm_stream));
    gm_comm *comms[] = {engine->shard_comm, engine->replica_comm};
    for (int i = 0; i < 2; i++) {
        if (comms[i]) {
            GM_TRY(gm_comm_attach(comms[i], device));
            gm_comm_set_namer(comms[i], name_label, NULL);
        }
    }
    GM_TRY(device->ops->event_new(device, false, &engine->wished[0]));
    return device->ops->event_new(device, false, &engine->wished[1]);
}

void gm_ranks_leave(gm_engine *engine)
{
    if (engine->shard_comm || engine->replica_comm) {
        (void)engine->device->ops->stream_sync(engine->device, engine->comm_stream);
    }
    if (engine->shard_comm) {
        (void)gm_comm_attach(engine->shard_comm, NULL);
    }
    if (engine->replica_comm) {
        (void)gm_comm_attach(engine->replica_comm, NULL);
    }
    engine->shard_comm = engine->replica_comm = NULL;
}

void gm_ranks_free(gm_engine *engine)
{
    for (int turn = 0; turn < 2; turn++) {
        if (engine->wished[turn]) {
            engine->device->ops->event_free(engine->device, engine->wished[turn]);
        }
    }
    if (engine->comm_stream) {
        gm_ranks_leave(engine);
        engine->device->ops->stream_free(engine->device, engine->comm_stream);
    }
}

gm_status gm_ranks_check_joined(const gm_engine *engine)
{
    return (engine->n_shards > 1 && !engine->shard_comm) ||
                   (engine->n_replicas > 1 && !engine->replica_comm)
               ? GM_FAIL(GM_ERR_STATE, "this engine is closed: its ranks have parted")
               : GM_OK;
}

gm_status gm_ranks_check(const gm_engine *engine)
{
    if (engine->shard_comm) {
        GM_TRY(gm_comm_check(engine->shard_comm));
    }
    return engine->replica_comm ? gm_comm_check(engine->replica_comm) : GM_OK;
}

/* ---- numbers of all ranks ---- */

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

gm_status gm_ranks_max(gm_engine *engine, uint64_t *values, size_t n)
{
    uint32_t index = engine->n_params + 1 + WISH_SUMS;
    gm_ranks_label(engine, GM_FOR_PLAN, 0);
    for (size_t done = 0; done < n; done += MOST) {
        size_t some = n - done < MOST ? n - done : MOST;
        memcpy(&engine->sums_home[index], values + done, some * sizeof *values);
        GM_TRY(issue(engine, index, some));
        GM_TRY(engine->device->ops->stream_sync(engine->device, engine->comm_stream));
        GM_TRY(gm_ranks_check(engine)); /* before the numbers are believed */
        memcpy(values + done, &engine->sums_home[index], some * sizeof *values);
    }
    return GM_OK;
}

gm_status gm_ranks_wish(gm_engine *engine, bool wish, bool *out)
{
    uint32_t turn = engine->n_wishes & 1, first = engine->n_params + 1;
    *out = false;
    if (engine->n_wishes > 0) {
        GM_TRY(engine->device->ops->event_sync(engine->device, engine->wished[1 - turn]));
        GM_TRY(gm_ranks_check(engine));
        *out = engine->sums_home[first + 1 - turn].limb[0] > 0;
    }
    engine->sums_home[first + turn].limb[0] = wish && !*out; /* it is being granted */
    gm_ranks_label(engine, GM_FOR_WISH, 0);
    GM_TRY(issue(engine, first + turn, 1));
    engine->n_wishes++;
    return engine->device->ops->event_record(engine->device, engine->wished[turn],
                                             engine->comm_stream);
}

gm_status gm_ranks_sum(gm_engine *engine, gm_sumsq *sum)
{
    gm_device *device = engine->device;
    gm_stream stream = engine->comm_stream;
    if (engine->n_shards == 1) {
        return GM_OK; /* replicas have the same gradients */
    }
    GM_TRY(gm_ranks_check_joined(engine));
    gm_sumsq *here = &engine->sums_home[engine->n_params], *there = &engine->sums[engine->n_params];
    memset(here, 0, sizeof *here);
    gm_sumsq_merge(here, sum); /* without pending carries: 2^31 ranks fit */
    if (!device->is_host) {
        GM_TRY(device->ops->copy_h2d(device, (uintptr_t)there, here, sizeof *here, stream));
    }
    gm_ranks_label(engine, GM_FOR_NORM, 0);
    GM_TRY(gm_comm_all_reduce(engine->shard_comm, (uintptr_t)there,
                              sizeof *there / sizeof(uint64_t), GM_COMM_U64, GM_COMM_SUM, stream));
    if (!device->is_host) {
        GM_TRY(device->ops->copy_d2h(device, here, (uintptr_t)there, sizeof *here, stream));
    }
    GM_TRY(device->ops->stream_sync(device, stream));
    GM_TRY(gm_ranks_check(engine)); /* before the bytes are believed */
    *sum = *here;
    return GM_OK;
}
