/* nccl_meet.c - how the ranks of an NCCL communicator come together, and find out whether each can read the memory of all
 * others: what a rank shows travels by NCCL, and gathers are copies only if that is so on every rank. */
#include "comm/comm_impl.h"

#ifdef GM_WITH_CUDA

#include <stdio.h>
#include <string.h>

#include "comm/nccl_impl.h"

/* The lock is held, the context current.  What was issued on the peers' stream is over, or there is trouble. */
static gm_status await(nccl_comm *c, trouble *t)
{
    CUevent event = gm_peers_event(c->peers);
    CUresult result = CUDA_ERROR_NOT_READY;
    double end = gm_seconds() + c->timeout;
    GM_CU(c->cuda->cuEventRecord(event, gm_peers_stream(c->peers)));
    while (!t->is_there && result == CUDA_ERROR_NOT_READY) {
        gm_nccl_rest(100000);
        result = c->cuda->cuEventQuery(event);
        if (result == CUDA_ERROR_NOT_READY && gm_seconds() > end) {
            t->is_there = true;
            (void)snprintf(t->why, sizeof t->why, "meeting the other ranks took longer than %g s",
                           c->timeout);
        }
    }
    return t->is_there ? GM_OK : gm_cuda_check(result, "cuEventQuery");
}

/* The same, of a collective on `bytes` at `here`, which go there and come back. */
static gm_status exchange(nccl_comm *c, gm_comm_call *call, void *here, size_t bytes, trouble *t)
{
    CUstream stream = gm_peers_stream(c->peers);
    CUdeviceptr there = 0;
    GM_CU(c->cuda->cuMemAlloc(&there, bytes));
    call->base = (uintptr_t)there;
    gm_status status =
        gm_cuda_check(c->cuda->cuMemcpyHtoDAsync(there, here, bytes, stream), "cuMemcpyHtoDAsync");
    if (status == GM_OK) {
        gm_nccl_finish(c, gm_nccl_call(c, call, stream), c->timeout, "meeting the other ranks", t);
        status = await(c, t);
    }
    if (status == GM_OK && !t->is_there) {
        CUresult result = c->cuda->cuMemcpyDtoHAsync(here, there, bytes, stream);
        result = result == CUDA_SUCCESS ? c->cuda->cuStreamSynchronize(stream) : result;
        status = gm_cuda_check(result, "cuMemcpyDtoHAsync");
    }
    if (t->is_there) {
        gm_nccl_stop(c); /* and with it the kernel that has the memory */
    }
    (void)c->cuda->cuMemFree(there);
    return status;
}

/* The same.  Gathers are copies if every rank can read all others' memory. */
static gm_status meet_peers(nccl_comm *c, trouble *t)
{
    int size = c->base.size;
    gm_peers_card cards[GM_PEERS_MOST];
    gm_comm_call gather = {.kind = GM_COMM_ALL_GATHER, .count = sizeof *cards, .is_bytes = true};
    gm_comm_call most = {.kind = GM_COMM_ALL_REDUCE, .count = 1, .dtype = GM_COMM_U64};
    uint64_t is_missing = 1;
    most.op = GM_COMM_MAX;
    if (size < 2 || size > GM_PEERS_MOST) {
        return GM_OK;
    }
    memset(cards, 0, sizeof cards);
    GM_TRY(gm_peers_new(c->cuda, c->base.rank, size, &c->peers));
    cards[c->base.rank] = gm_peers_card_of(c->peers);
    GM_TRY(exchange(c, &gather, cards, (size_t)size * sizeof *cards, t));
    is_missing = t->is_there || !gm_peers_open(c->peers, cards);
    if (!t->is_there) {
        GM_TRY(exchange(c, &most, &is_missing, sizeof is_missing, t));
    }
    if (is_missing) {
        gm_peers_free(c->peers, 0);
        c->peers = NULL;
    }
    return GM_OK;
}

gm_status gm_nccl_meet(nccl_comm *c, const uint8_t *id_bytes)
{
    nccl_id id;
    trouble t = {0};
    const nccl_config config = {
        .size = sizeof config, .magic = 0xcafebeef, .version = 21400, .blocking = 0};
    memcpy(id.bytes, id_bytes, sizeof id.bytes);
    GM_TRY(gm_nccl_enter(c));
    pthread_mutex_lock(&c->lock);
    gm_status status = GM_OK;
    nccl_result result = c->nccl->init_rank(&c->handle, c->base.size, id, c->base.rank, &config);
    if (c->handle) {
        gm_nccl_finish(c, result, c->timeout, "meeting the other ranks", &t);
        status = t.is_there ? GM_OK : meet_peers(c, &t);
        if (t.is_there) {
            gm_nccl_stop(c);
        }
    } else {
        gm_nccl_tell(c, &t, result);
    }
    pthread_mutex_unlock(&c->lock);
    gm_nccl_leave(c);
    GM_FAIL_IF(t.is_there, GM_ERR_DEVICE, "new communicator, rank %d of %d: %s", c->base.rank,
               c->base.size, t.why);
    return status;
}

#endif
