/* nccl_meet.c - how the ranks of an NCCL communicator come together, and find out whether each can read the memory of all
 * others: what a rank shows travels by NCCL, and gathers are copies only if that is so on every rank. */
#include "comm/comm_impl.h"

#ifdef GM_WITH_CUDA

#include <stdio.h>
#include <string.h>

#include "comm/nccl_impl.h"

static const double REHEARSAL_SECONDS = 10.0; /* at most; the others wait for the timeout */

/* The lock of the handle is held, the context current, in all of these. */

/* Until what was issued on the stream is over, or CUDA_ERROR_NOT_READY after `seconds`. */
static CUresult await(nccl_comm *c, CUstream stream, double seconds)
{
    CUevent event = gm_peers_event(c->peers);
    double end = gm_seconds() + seconds;
    CUresult result = c->cuda->cuEventRecord(event, stream);
    while (result == CUDA_SUCCESS) {
        result = c->cuda->cuEventQuery(event);
        if (result != CUDA_ERROR_NOT_READY || gm_seconds() > end) {
            break;
        }
        gm_nccl_rest(100000);
        result = CUDA_SUCCESS;
    }
    return result;
}

/* A collective on `bytes` at `here`, which go there and come back. */
static gm_status exchange(nccl_comm *c, gm_comm_call *call, void *here, size_t bytes,
                          double seconds, trouble *t)
{
    CUstream stream = gm_peers_stream(c->peers);
    CUdeviceptr there = 0;
    GM_CU(c->cuda->cuMemAlloc(&there, bytes));
    call->base = (uintptr_t)there;
    CUresult result = c->cuda->cuMemcpyHtoDAsync(there, here, bytes, stream);
    if (result == CUDA_SUCCESS) {
        gm_nccl_finish(c, gm_nccl_call(c, call, stream), seconds, "meeting the other ranks", t);
        result = t->is_there ? CUDA_SUCCESS : await(c, stream, seconds);
    }
    if (result == CUDA_ERROR_NOT_READY) {
        t->is_there = true;
        (void)snprintf(t->why, sizeof t->why, "meeting the other ranks took longer than %g s",
                       seconds);
        result = CUDA_SUCCESS;
    } else if (result == CUDA_SUCCESS && !t->is_there) {
        result = c->cuda->cuMemcpyDtoHAsync(here, there, bytes, stream);
        result = result == CUDA_SUCCESS ? c->cuda->cuStreamSynchronize(stream) : result;
    }
    if (t->is_there || result != CUDA_SUCCESS) {
        gm_nccl_stop(c); /* and with it the kernel that has the memory */
    }
    (void)c->cuda->cuMemFree(there);
    return gm_cuda_check(result, "meeting the other ranks");
}

/* The largest of the ranks' words; a barrier. */
static gm_status largest(nccl_comm *c, uint64_t *word, double seconds, trouble *t)
{
    gm_comm_call most = {.kind = GM_COMM_ALL_REDUCE, .count = 1, .dtype = GM_COMM_U64};
    most.op = GM_COMM_MAX;
    return exchange(c, &most, word, sizeof *word, seconds, t);
}

gm_status gm_nccl_part(nccl_comm *c, double seconds, trouble *t)
{
    gm_status status = GM_OK;
    uint64_t word = 0;
    if (c->peers) {
        gm_peers_close(c->peers);
        status = largest(c, &word, seconds, t);
        gm_peers_free(c->peers, t->is_there || status != GM_OK);
        c->peers = NULL;
    }
    return status;
}

/* Whether a gather brings what the ranks have shown: a driver may call copies done that an IOMMU has dropped. */
static bool rehearse(nccl_comm *c, const gm_peers_card *cards)
{
    gm_peers_card seen[GM_PEERS_MOST];
    size_t bytes = (size_t)c->base.size * sizeof *cards, own = (size_t)c->base.rank * sizeof *cards;
    CUdeviceptr there = 0;
    double seconds = c->timeout < 4 * REHEARSAL_SECONDS ? c->timeout / 4 : REHEARSAL_SECONDS;
    CUstream stream = NULL; /* of its own: the meeting goes on if it does not end */
    memset(seen, 0, sizeof seen);
    bool is_right = c->cuda->cuMemAlloc(&there, bytes) == CUDA_SUCCESS &&
                    c->cuda->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS &&
                    c->cuda->cuMemsetD8Async(there, 0, bytes, stream) == CUDA_SUCCESS &&
                    c->cuda->cuMemcpyHtoDAsync(there + own, &cards[c->base.rank], sizeof *cards,
                                               stream) == CUDA_SUCCESS &&
                    gm_peers_gather(c->peers, there, sizeof *cards, stream) == GM_OK &&
                    await(c, stream, seconds) == CUDA_SUCCESS;
    if (!is_right) {
        gm_peers_release(c->peers);
        (void)await(c, stream, seconds);
    }
    is_right = is_right && c->cuda->cuMemcpyDtoHAsync(seen, there, bytes, stream) == CUDA_SUCCESS &&
               c->cuda->cuStreamSynchronize(stream) == CUDA_SUCCESS &&
               memcmp(seen, cards, bytes) == 0;
    (void)(stream ? c->cuda->cuStreamDestroy(stream) : CUDA_SUCCESS);
    (void)(there ? c->cuda->cuMemFree(there) : CUDA_SUCCESS);
    return is_right;
}

/* Gathers are copies if every rank can read all others' memory. */
static gm_status meet_peers(nccl_comm *c, trouble *t)
{
    int size = c->base.size;
    gm_peers_card cards[GM_PEERS_MOST];
    gm_comm_call gather = {.kind = GM_COMM_ALL_GATHER, .count = sizeof *cards, .is_bytes = true};
    if (size < 2 || size > GM_PEERS_MOST) {
        return GM_OK;
    }
    memset(cards, 0, sizeof cards);
    GM_TRY(gm_peers_new(c->cuda, c->base.rank, size, &c->peers));
    cards[c->base.rank] = gm_peers_card_of(c->peers);
    GM_TRY(exchange(c, &gather, cards, (size_t)size * sizeof *cards, c->timeout, t));
    uint64_t is_missing = t->is_there || !gm_peers_open(c->peers, cards);
    for (int i = 0; i < 2 && !t->is_there; i++) { /* all can open them, then all have seen them */
        GM_TRY(largest(c, &is_missing, c->timeout, t));
        if (is_missing && !t->is_there) {
            return gm_nccl_part(c, c->timeout, t);
        }
        is_missing = i == 0 && !t->is_there && !rehearse(c, cards);
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
    pthread_mutex_lock(&c->handle_lock);
    gm_status status = GM_OK;
    nccl_result result = c->nccl->init_rank(&c->handle, c->base.size, id, c->base.rank, &config);
    if (c->handle) {
        gm_nccl_finish(c, result, c->timeout, "meeting the other ranks", &t);
        status = t.is_there ? GM_OK : meet_peers(c, &t);
        if (t.is_there || status != GM_OK) { /* the others wait for this rank */
            gm_nccl_stop(c);
        }
    } else {
        gm_nccl_tell(c, &t, result);
    }
    pthread_mutex_unlock(&c->handle_lock);
    gm_nccl_leave(c);
    GM_FAIL_IF(t.is_there, GM_ERR_DEVICE, "new communicator, rank %d of %d: %s", c->base.rank,
               c->base.size, t.why);
    return status;
}

#endif
