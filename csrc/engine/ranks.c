/* ranks.c - this rank among the others: the communicators' life, what a collective is for, and the
 * numbers that ranks must know of each other: the largest of theirs, and sums.
 *
 * A largest value is the same on every rank whatever the order, so what is decided from it is, too.
 * Numbers are unsigned; of doubles that are not negative the bits have their order, and ~value
 * gives the smallest value where value gives the largest.
 *
 * Invariants
 *   1. Every call is made by all ranks, at the same place in the order of collectives.
 *   2. A wish is answered one step later, on every rank at the same step: nobody waits for the
 *      slowest rank.
 *   3. A collective that fails lets what waits for it go on, with bytes that are no longer right.
 *      The failure is recorded before that, so whoever gives bytes away that a fence has let
 *      through asks gm_ranks_check first.
 *
 * The host waits in: gm_ranks_max, gm_ranks_agree, gm_ranks_settle; gm_ranks_wish, for what was
 * issued a step ago. */
#include "engine/engine_impl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WISH_SUMS = 2, VALUES_OF_SUM = sizeof(gm_sumsq) / sizeof(uint64_t) };
enum { MOST = (GM_RANKS_SUMS - WISH_SUMS) * VALUES_OF_SUM };

/* purpose (8 bits), step (24), chunk or parameter (32) */
static void name_label(void *names, uint64_t label, char *out, size_t bytes)
{
    static const char *const purposes[GM_N_PURPOSES] = {"",
                                                        "gathering the weights of",
                                                        "summing the gradients of",
                                                        "the norm of all gradients",
                                                        "a common plan",
                                                        "whether a plan is due",
                                                        "the gradient of parameter"};
    uint32_t purpose = (uint32_t)(label >> 56), step = (uint32_t)(label >> 32) & 0xffffff;
    uint32_t chunk = (uint32_t)label;
    if (purpose == 0 || purpose >= GM_N_PURPOSES) {
        return;
    }
    if (purpose <= GM_FOR_REDUCE) {
        char which[184];
        gm_names_chunk(names, chunk, which, sizeof which);
        (void)snprintf(out, bytes, "%s %s after step %u", purposes[purpose], which, step);
    } else if (purpose == GM_FOR_SUM) {
        (void)snprintf(out, bytes, "%s %u", purposes[purpose], chunk);
    } else {
        (void)snprintf(out, bytes, "%s after step %u", purposes[purpose], step);
    }
}

void gm_ranks_label(gm_engine *engine, gm_purpose purpose, uint32_t chunk)
{
    uint64_t label =
        (uint64_t)purpose << 56 | (engine->step.n_calls & UINT64_C(0xffffff)) << 32 | chunk;
    if (engine->ranks.shard_comm) {
        gm_comm_label(engine->ranks.shard_comm, label);
    }
    if (engine->ranks.replica_comm) {
        gm_comm_label(engine->ranks.replica_comm, label);
    }
}

void gm_ranks_init(gm_engine *engine, const gm_engine_options *options)
{
    gm_comm *shards = options->shard_comm, *replicas = options->replica_comm;
    engine->ranks.shard_comm = shards;
    engine->ranks.replica_comm = replicas;
    engine->ranks.n_shards = shards ? (uint32_t)gm_comm_size(shards) : 1;
    engine->ranks.rank = shards ? (uint32_t)gm_comm_rank(shards) : 0;
    engine->ranks.n_replicas = replicas ? (uint32_t)gm_comm_size(replicas) : 1;
}

gm_status gm_ranks_new(gm_engine *engine)
{
    gm_device *device = engine->device;
    if (!gm_has_ranks(engine)) {
        return GM_OK;
    }
    GM_TRY(device->ops->stream_new(device, &engine->ranks.stream));
    gm_comm *comms[] = {engine->ranks.shard_comm, engine->ranks.replica_comm};
    for (int i = 0; i < 2; i++) {
        if (comms[i]) {
            GM_TRY(gm_comm_attach(comms[i], device));
            gm_comm_set_namer(comms[i], name_label, gm_names_ref(engine->names), gm_names_unref);
        }
    }
    GM_TRY(device->ops->event_new(device, false, &engine->ranks.summed));
    GM_TRY(device->ops->event_new(device, false, &engine->ranks.wished[0]));
    return device->ops->event_new(device, false, &engine->ranks.wished[1]);
}

void gm_ranks_leave(gm_engine *engine)
{
    if (engine->ranks.shard_comm || engine->ranks.replica_comm) {
        (void)engine->device->ops->stream_sync(engine->device, engine->ranks.stream);
    }
    if (engine->ranks.shard_comm) {
        (void)gm_comm_attach(engine->ranks.shard_comm, NULL);
    }
    if (engine->ranks.replica_comm) {
        (void)gm_comm_attach(engine->ranks.replica_comm, NULL);
    }
    engine->ranks.shard_comm = engine->ranks.replica_comm = NULL;
}

void gm_ranks_free(gm_engine *engine)
{
    gm_free_event(engine->device, &engine->ranks.summed);
    gm_free_event(engine->device, &engine->ranks.wished[0]);
    gm_free_event(engine->device, &engine->ranks.wished[1]);
    if (engine->ranks.stream) {
        gm_ranks_leave(engine);
        gm_free_stream(engine->device, &engine->ranks.stream);
    }
}

gm_status gm_ranks_check_joined(const gm_engine *engine)
{
    return (engine->ranks.n_shards > 1 && !engine->ranks.shard_comm) ||
                   (engine->ranks.n_replicas > 1 && !engine->ranks.replica_comm)
               ? GM_FAIL(GM_ERR_STATE, "this engine is closed: its ranks have parted")
               : GM_OK;
}

gm_status gm_ranks_check(const gm_engine *engine)
{
    if (engine->ranks.shard_comm) {
        GM_TRY(gm_comm_check(engine->ranks.shard_comm));
    }
    return engine->ranks.replica_comm ? gm_comm_check(engine->ranks.replica_comm) : GM_OK;
}

gm_status gm_ranks_settle(gm_engine *engine)
{
    GM_TRY(engine->ranks.stream
               ? engine->device->ops->stream_sync(engine->device, engine->ranks.stream)
               : GM_OK);
    return gm_ranks_check(engine);
}

/* ---- numbers of all ranks ---- */

/* The largest of each of n values at sums[index], on the device and back. */
static gm_status issue(gm_engine *engine, size_t index, size_t n)
{
    const gm_device_ops *ops = engine->device->ops;
    gm_stream stream = engine->ranks.stream;
    uintptr_t there = (uintptr_t)&engine->sums.there[index];
    if (!engine->device->is_host) {
        GM_TRY(ops->copy_h2d(engine->device, there, &engine->sums.home[index], n * sizeof(uint64_t),
                             stream));
    }
    gm_comm *comms[] = {engine->ranks.shard_comm, engine->ranks.replica_comm};
    for (int i = 0; i < 2; i++) {
        if (comms[i]) {
            GM_TRY(gm_comm_all_reduce(comms[i], there, n, GM_COMM_U64, GM_COMM_MAX, stream));
        }
    }
    return engine->device->is_host ? GM_OK
                                   : ops->copy_d2h(engine->device, &engine->sums.home[index], there,
                                                   n * sizeof(uint64_t), stream);
}

gm_status gm_ranks_max(gm_engine *engine, uint64_t *values, size_t n)
{
    size_t index = gm_sums_ranks(engine) + WISH_SUMS;
    engine->ranks.n_waits++;
    gm_ranks_label(engine, GM_FOR_PLAN, 0);
    for (size_t done = 0; done < n; done += MOST) {
        size_t some = n - done < MOST ? n - done : MOST;
        memcpy(&engine->sums.home[index], values + done, some * sizeof *values);
        GM_TRY(issue(engine, index, some));
        GM_TRY(gm_ranks_settle(engine)); /* before the numbers are believed */
        memcpy(values + done, &engine->sums.home[index], some * sizeof *values);
    }
    return GM_OK;
}

gm_status gm_ranks_agree(gm_engine *engine)
{
    gm_comm *comms[] = {engine->ranks.shard_comm, engine->ranks.replica_comm};
    uint64_t mine[4] = {0}, all[8]; /* number and hash of each; their complements behind */
    bool is_same = true;
    for (int i = 0; i < 2; i++) {
        if (comms[i]) {
            gm_comm_calls(comms[i], &mine[2 * i], &mine[2 * i + 1]);
        }
    }
    for (int i = 0; i < 4; i++) {
        all[i] = mine[i];
        all[4 + i] = ~mine[i];
    }
    GM_TRY(gm_ranks_max(engine, all, 8));
    for (int i = 0; i < 4; i++) {
        is_same = is_same && all[i] == mine[i] && all[4 + i] == ~mine[i];
    }
    for (int i = 0; i < 2 && !is_same; i++) {
        gm_comm_abort(comms[i], "the ranks have not issued the same collectives; what these have "
                                "left is not to be used");
    }
    return gm_ranks_check(engine);
}

gm_status gm_ranks_tell(gm_engine *engine, uint64_t value,
                        void (*say)(const gm_engine *engine, uint64_t value, char *out,
                                    size_t bytes),
                        char *out, size_t bytes)
{
    gm_comm *shards = engine->ranks.shard_comm, *replicas = engine->ranks.replica_comm;
    uint32_t n = engine->ranks.n_shards * engine->ranks.n_replicas;
    uint32_t row = replicas ? (uint32_t)gm_comm_rank(replicas) : 0;
    uint64_t *values = calloc(2 * (size_t)n + 1, sizeof *values), *names = values + n;
    GM_FAIL_IF(!values, GM_ERR_NOMEM, "HOST: numbers of %u ranks", n);
    uint32_t mine = row * engine->ranks.n_shards + engine->ranks.rank;
    values[mine] = value;
    names[mine] = (uint64_t)(shards ? gm_comm_rank_name(shards, (int)engine->ranks.rank)
                                    : gm_comm_rank_name(replicas, (int)row));
    gm_status status = gm_ranks_max(engine, values, 2 * (size_t)n);
    size_t used = 0;
    for (uint32_t i = 0; i < n && status == GM_OK && used < bytes; i++) {
        uint32_t others = 0, earlier = 0;
        for (uint32_t k = 0; k < n; k++) {
            others += k > i && values[k] == values[i];
            earlier += k < i && values[k] == values[i];
        }
        if (earlier > 0) {
            continue;
        }
        char words[256];
        say(engine, values[i], words, sizeof words);
        used += (size_t)snprintf(out + used, bytes - used, "%s%s on rank%s %llu", used ? ", " : "",
                                 words, others ? "s" : "", (unsigned long long)names[i]);
        for (uint32_t k = i + 1; k < n && used < bytes; k++) {
            if (values[k] == values[i]) {
                used += (size_t)snprintf(out + used, bytes - used, ", %llu",
                                         (unsigned long long)names[k]);
            }
        }
    }
    free(values);
    return status;
}

gm_status gm_ranks_wish(gm_engine *engine, bool wish, bool *out)
{
    size_t turn = engine->ranks.n_wishes & 1, first = gm_sums_ranks(engine);
    *out = false;
    if (engine->ranks.n_wishes > 0) {
        GM_TRY(engine->device->ops->event_sync(engine->device, engine->ranks.wished[1 - turn]));
        GM_TRY(gm_ranks_check(engine));
        *out = engine->sums.home[first + 1 - turn].limb[0] > 0;
    }
    engine->sums.home[first + turn].limb[0] = wish && !*out; /* it is being granted */
    gm_ranks_label(engine, GM_FOR_WISH, 0);
    GM_TRY(issue(engine, first + turn, 1));
    engine->ranks.n_wishes++;
    return engine->device->ops->event_record(engine->device, engine->ranks.wished[turn],
                                             engine->ranks.stream);
}

gm_status gm_ranks_sum(gm_engine *engine, gm_stream stream)
{
    const gm_device_ops *ops = engine->device->ops;
    gm_sumsq *there = &engine->sums.there[gm_sums_total(engine)];
    if (engine->ranks.n_shards > 1) { /* replicas have the same gradients */
        GM_TRY(gm_ranks_check_joined(engine));
        gm_ranks_label(engine, GM_FOR_NORM, 0);
        GM_TRY(gm_comm_all_reduce(engine->ranks.shard_comm, (uintptr_t)there,
                                  sizeof *there / sizeof(uint64_t), GM_COMM_U64, GM_COMM_SUM,
                                  engine->ranks.stream));
    }
    GM_TRY(ops->event_record(engine->device, engine->ranks.summed, engine->ranks.stream));
    return ops->event_wait(engine->device, engine->ranks.summed, stream);
}
