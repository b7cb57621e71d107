/* nccl_call.c - one call of NCCL: in the context of its device, with an end to the wait for it, and
 * with words for what it says. */
#define _GNU_SOURCE /* nanosleep */
#include "comm/comm_impl.h"

#ifdef GM_WITH_CUDA

#include <sched.h>
#include <stdio.h>
#include <time.h>

#include "comm/nccl_impl.h"

static const double SPIN_SECONDS = 2e-4; /* a thread of NCCL's issues a collective in less */

void gm_nccl_rest(long nanoseconds)
{
    struct timespec t = {0, nanoseconds};
    (void)nanosleep(&t, NULL);
}

gm_status gm_nccl_enter(nccl_comm *c)
{
    return gm_cuda_check(c->cuda->cuCtxPushCurrent(c->context), "cuCtxPushCurrent");
}

void gm_nccl_leave(nccl_comm *c)
{
    CUcontext popped;
    (void)c->cuda->cuCtxPopCurrent(&popped);
}

void gm_nccl_tell(nccl_comm *c, trouble *t, nccl_result result)
{
    const char *words = c->nccl->last_error(c->handle);
    t->is_there = true;
    (void)snprintf(t->why, sizeof t->why, "NCCL: %s%s%.250s", c->nccl->error_string(result),
                   words && *words ? ": " : "", words ? words : "");
}

/* Waits until NCCL has done on the host what `result` says is in progress. */
void gm_nccl_finish(nccl_comm *c, nccl_result result, double seconds, const char *what, trouble *t)
{
    double began = gm_seconds();
    long pause = 5000; /* the system makes at least ten times that of it */
    while (result == NCCL_IN_PROGRESS) {
        nccl_result asked = c->nccl->async_error(c->handle, &result);
        result = asked == NCCL_SUCCESS ? result : asked;
        if (result != NCCL_IN_PROGRESS) {
            break;
        }
        if (atomic_load(&c->is_ending)) {
            t->is_there = true;
            return;
        }
        double since = gm_seconds() - began;
        if (since > seconds) {
            t->is_there = true;
            (void)snprintf(
                t->why, sizeof t->why,
                "%s took longer than %g s; a rank has not come, has stopped or has ended", what,
                seconds);
            return;
        }
        if (since < SPIN_SECONDS) {
            (void)sched_yield();
            continue;
        }
        gm_nccl_rest(pause);
        pause = pause < 1000000 ? 2 * pause : pause;
    }
    if (result != NCCL_SUCCESS) {
        gm_nccl_tell(c, t, result);
    }
}

void gm_nccl_stop(nccl_comm *c)
{
    if (c->handle) {
        (void)c->nccl->stop(c->handle);
        c->handle = NULL;
    }
}

static int nccl_dtype(const gm_comm_call *call)
{
    if (call->is_bytes) {
        return NCCL_U8;
    }
    switch (call->dtype) {
    case GM_COMM_F32: return NCCL_F32;
    case GM_COMM_BF16: return NCCL_BF16;
    case GM_COMM_F16: return NCCL_F16;
    case GM_COMM_U64: break;
    }
    return NCCL_U64;
}

nccl_result gm_nccl_call(nccl_comm *c, const gm_comm_call *call, CUstream stream)
{
    const nccl_api *n = c->nccl;
    int dtype = nccl_dtype(call), op = call->op == GM_COMM_MAX ? NCCL_MAX : NCCL_SUM;
    size_t shard_bytes = call->count * gm_comm_element_bytes(call);
    void *base = (void *)call->base;
    void *own = (char *)base + (size_t)c->base.rank * shard_bytes; /* of a range of shards */
    switch (call->kind) {
    case GM_COMM_ALL_GATHER: return n->all_gather(own, base, call->count, dtype, c->handle, stream);
    case GM_COMM_REDUCE_SCATTER:
        return n->reduce_scatter(base, own, call->count, dtype, op, c->handle, stream);
    case GM_COMM_ALL_REDUCE:
    case GM_COMM_N_KINDS: break;
    }
    return n->all_reduce(base, base, call->count, dtype, op, c->handle, stream);
}

#endif
