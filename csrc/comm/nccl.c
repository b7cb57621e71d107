/* nccl.c - collectives by NCCL, looked up in the copy that torch has loaded.
 *
 * The communicator is a non-blocking one: a call of NCCL that has to meet other ranks returns at once and is
 * waited for here, with an end to the wait.  Work on the device is watched by a thread: an event behind each
 * collective, and NCCL's own asynchronous errors.  Aborting makes the kernels of a collective return, and with
 * them whoever waits for their stream.
 *
 * Invariants
 *   1. `lock` is held around every call of NCCL that names the handle, and while `flights` is read or written.  It is
 *      never held while a failure is recorded, which aborts and so takes it.
 *   2. Once aborted or destroyed the handle is NULL and never named again.
 *   3. flights[] has the collectives that may still run, oldest first.  NCCL runs them in that order, so the
 *      event of one says the same of all before it; where the ring is full the newest is recorded anew.
 *   4. Time runs against the oldest flight only, from when it was issued or became the oldest: a long queue is not
 *      a late rank.
 *   5. An agreement is three things in one stream: {hash, ~hash, number, ~number} to the device, their maximum over the
 *      ranks, and that back to the host.  Where the maximum of x is not the complement of the maximum of ~x the ranks
 *      differ, and every rank sees it.  Each has a slot of its own until its event is reached: streams may differ, so
 *      only the event says that a slot is free.
 *   6. Where every rank can read every other's memory (peers.h) gathers are copies, of which NCCL knows nothing: a
 *      collective waits for the one before it if that is on another stream. */
#define _GNU_SOURCE /* pthread_setname_np, pthread_condattr_setclock */
#include "comm/comm_impl.h"

#ifdef GM_WITH_CUDA

#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "comm/nccl_impl.h"
#include "comm/peers.h"

/* ---- the communicator ---- */

enum { N_FLIGHTS = 256, N_AGREEMENTS = 16 };
static const double LOOK_SECONDS = 0.1;      /* between two looks of the watching thread */
static const double SPIN_SECONDS = 2e-4;     /* a thread of NCCL's issues a collective in less */
static const double FAREWELL_SECONDS = 10.0; /* at most, for an orderly end */

typedef struct flight {
    CUevent event; /* belongs to the slot of the ring; NULL until the slot is first used */
    gm_comm_call call;
    double issued_at;
} flight;

/* What the ranks compare, and the maxima of it. */
typedef struct digest {
    uint64_t hash, not_hash, number, not_number;
} digest;

typedef struct agreement {
    CUevent event;
    bool is_pending;
    gm_comm_call call;
    CUdeviceptr data;        /* a digest */
    digest *sent, *received; /* pinned host memory */
} agreement;

typedef struct nccl_comm {
    gm_comm base; /* first: a gm_comm * is an nccl_comm * */
    const nccl_api *nccl;
    const gm_cuda_api *cuda;
    CUdevice device;
    CUcontext context;
    double timeout;
    atomic_bool is_ending; /* a failure is recorded: whoever waits under `lock` gives up */

    pthread_mutex_t lock;
    pthread_cond_t wake;
    nccl_handle handle;
    gm_peers *peers;           /* NULL: gathers are NCCL's */
    CUstream last_stream;      /* of the newest flight */
    flight flights[N_FLIGHTS]; /* ring: head, head + 1, ... head + n - 1 */
    size_t head, n;
    double progress_at;  /* when the oldest flight became the oldest */
    CUdeviceptr digests; /* N_AGREEMENTS on the device */
    void *host_digests;  /* 2 * N_AGREEMENTS, pinned */
    /* A ring: the oldest pending one is at next_agreement or behind it. */
    agreement agreements[N_AGREEMENTS];
    size_t next_agreement;
    uint64_t agreed_at; /* the collectives before this one are the same on all ranks */
    bool is_stopping;
    bool has_watcher;
    pthread_t watcher;
} nccl_comm;

static nccl_comm *as_nccl(gm_comm *comm)
{
    return (nccl_comm *)comm;
}

static void rest(long nanoseconds)
{
    struct timespec t = {0, nanoseconds};
    (void)nanosleep(&t, NULL);
}

static gm_status enter(nccl_comm *c)
{
    return gm_cuda_check(c->cuda->cuCtxPushCurrent(c->context), "cuCtxPushCurrent");
}

static void leave(nccl_comm *c)
{
    CUcontext popped;
    (void)c->cuda->cuCtxPopCurrent(&popped);
}

typedef struct trouble {
    bool is_there, has_call;
    gm_status status; /* GM_OK: the device's */
    gm_comm_call call;
    char why[400];
} trouble;

static void tell(nccl_comm *c, trouble *t, nccl_result result)
{
    const char *words = c->nccl->last_error(c->handle);
    t->is_there = true;
    (void)snprintf(t->why, sizeof t->why, "NCCL: %s%s%.250s", c->nccl->error_string(result),
                   words && *words ? ": " : "", words ? words : "");
}

/* The lock is held.  Waits until NCCL has done on the host what `result` says is in progress. */
static void finish_call(nccl_comm *c, nccl_result result, double seconds, const char *what,
                        trouble *t)
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
        rest(pause);
        pause = pause < 1000000 ? 2 * pause : pause;
    }
    if (result != NCCL_SUCCESS) {
        tell(c, t, result);
    }
}

/* NCCL waits for its kernels, and they for copies before them. */
static void stop_now(nccl_comm *c)
{
    if (c->handle) {
        if (c->peers) {
            gm_peers_release(c->peers);
        }
        (void)c->nccl->stop(c->handle);
        c->handle = NULL;
    }
}

static void nccl_end(gm_comm *comm)
{
    nccl_comm *c = as_nccl(comm);
    atomic_store(&c->is_ending, true);
    pthread_mutex_lock(&c->lock);
    if (c->handle && enter(c) == GM_OK) {
        stop_now(c);
        leave(c);
    }
    pthread_mutex_unlock(&c->lock);
}

static gm_status report(nccl_comm *c, const trouble *t)
{
    return gm_comm_break(&c->base, t->has_call ? &t->call : NULL,
                         t->status == GM_OK ? GM_ERR_DEVICE : t->status, "%s", t->why);
}

static void tell_result(trouble *t, const gm_comm_call *call, CUresult result)
{
    (void)gm_cuda_check(result, "cuEventQuery");
    t->is_there = t->has_call = true;
    t->call = *call;
    (void)snprintf(t->why, sizeof t->why, "%.390s", gm_last_error());
}

/* ---- agreement ---- */

static void compare(nccl_comm *c, const agreement *a, trouble *t)
{
    const digest *most = a->received;
    uint64_t least_number = ~most->not_number;
    if (most->hash == ~most->not_hash && most->number == least_number &&
        most->hash == a->sent->hash && most->number == a->sent->number) {
        c->agreed_at = a->call.number > c->agreed_at ? a->call.number : c->agreed_at;
        return;
    }
    t->is_there = t->has_call = true;
    t->status = GM_ERR_STATE;
    t->call = a->call;
    (void)snprintf(t->why, sizeof t->why,
                   "the ranks have not issued the same collectives after number %llu: %llu here, "
                   "%llu to %llu over the ranks, of different kinds, sizes or labels; what they "
                   "have left since is not to be used",
                   (unsigned long long)c->agreed_at, (unsigned long long)a->sent->number,
                   (unsigned long long)least_number, (unsigned long long)most->number);
}

/* The lock is held, the context current. */
static void look_at_agreements(nccl_comm *c, trouble *t)
{
    for (size_t i = 0; i < N_AGREEMENTS && !t->is_there; i++) {
        agreement *a = &c->agreements[(c->next_agreement + i) % N_AGREEMENTS];
        CUresult result = a->is_pending ? c->cuda->cuEventQuery(a->event) : CUDA_ERROR_NOT_READY;
        if (result == CUDA_SUCCESS) {
            a->is_pending = false;
            compare(c, a, t);
        } else if (result != CUDA_ERROR_NOT_READY) {
            a->is_pending = false;
            tell_result(t, &a->call, result);
        }
    }
}

/* The context is current.  All that agreements will ever need. */
static gm_status new_agreements(nccl_comm *c)
{
    GM_CU(c->cuda->cuMemAlloc(&c->digests, N_AGREEMENTS * sizeof(digest)));
    GM_CU(c->cuda->cuMemHostAlloc(&c->host_digests, 2 * N_AGREEMENTS * sizeof(digest), 0));
    for (size_t i = 0; i < N_AGREEMENTS; i++) {
        agreement *a = &c->agreements[i];
        GM_CU(c->cuda->cuEventCreate(&a->event, CU_EVENT_DISABLE_TIMING));
        a->data = c->digests + i * sizeof(digest);
        a->sent = (digest *)c->host_digests + 2 * i;
        a->received = a->sent + 1;
    }
    return GM_OK;
}

/* The context is current, nothing is watched any more. */
static void free_agreements(nccl_comm *c)
{
    bool is_pending = false;
    double end = gm_seconds() + FAREWELL_SECONDS;
    for (size_t i = 0; i < N_AGREEMENTS; i++) {
        agreement *a = &c->agreements[i];
        while (a->is_pending && c->cuda->cuEventQuery(a->event) == CUDA_ERROR_NOT_READY &&
               gm_seconds() < end) {
            rest(200000);
        }
        is_pending = is_pending || (a->is_pending && gm_seconds() >= end);
        if (a->event) {
            (void)c->cuda->cuEventDestroy(a->event);
        }
    }
    if (is_pending) {
        return; /* a copy may still come: the few bytes stay */
    }
    if (c->digests) {
        (void)c->cuda->cuMemFree(c->digests);
    }
    if (c->host_digests) {
        (void)c->cuda->cuMemFreeHost(c->host_digests);
    }
}

/* ---- flights ---- */

/* The lock is held, the context current. */
static gm_status track(nccl_comm *c, const gm_comm_call *call, CUstream stream)
{
    bool is_full = c->n == N_FLIGHTS;
    flight *f = &c->flights[(c->head + c->n - (is_full ? 1 : 0)) % N_FLIGHTS];
    if (!f->event) {
        GM_CU(c->cuda->cuEventCreate(&f->event, CU_EVENT_DISABLE_TIMING));
    }
    GM_CU(c->cuda->cuEventRecord(f->event, stream));
    f->call = *call;
    f->issued_at = gm_seconds();
    c->n += is_full ? 0 : 1;
    GM_ASSERT(c->n <= N_FLIGHTS);
    return GM_OK;
}

/* The lock is held, the context current. */
static void look(nccl_comm *c, trouble *t)
{
    nccl_result error = NCCL_SUCCESS;
    while (c->n > 0) {
        flight *f = &c->flights[c->head];
        CUresult result = c->cuda->cuEventQuery(f->event);
        if (result == CUDA_ERROR_NOT_READY) {
            break;
        }
        if (result != CUDA_SUCCESS) {
            tell_result(t, &f->call, result);
            return;
        }
        c->head = (c->head + 1) % N_FLIGHTS;
        c->n--;
        c->progress_at = gm_seconds();
    }
    look_at_agreements(c, t);
    if (t->is_there) {
        return;
    }
    t->has_call = c->n > 0;
    t->call = c->flights[c->head].call;
    nccl_result asked = c->nccl->async_error(c->handle, &error);
    error = asked == NCCL_SUCCESS ? error : asked;
    if (error != NCCL_SUCCESS && error != NCCL_IN_PROGRESS) {
        tell(c, t, error);
        return;
    }
    if (c->n > 0) {
        double issued_at = c->flights[c->head].issued_at;
        double since = issued_at > c->progress_at ? issued_at : c->progress_at;
        if (gm_seconds() - since > c->timeout) {
            t->is_there = true;
            (void)snprintf(
                t->why, sizeof t->why,
                "not done after %g s; a rank has not issued it, has stopped or has ended",
                c->timeout);
        }
    }
}

static void nccl_check(gm_comm *comm)
{
    nccl_comm *c = as_nccl(comm);
    trouble t = {0};
    if (enter(c) != GM_OK) {
        return; /* the caller's next call of the driver fails in the same way */
    }
    pthread_mutex_lock(&c->lock);
    if (c->handle) {
        look(c, &t);
    }
    pthread_mutex_unlock(&c->lock);
    leave(c);
    if (t.is_there) {
        (void)report(c, &t);
    }
}

static void *watch(void *context)
{
    nccl_comm *c = context;
    (void)pthread_setname_np(pthread_self(), "gm-comm");
    (void)c->cuda->cuCtxSetCurrent(c->context);
    pthread_mutex_lock(&c->lock);
    while (!c->is_stopping) {
        trouble t = {0};
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += (long)(LOOK_SECONDS * 1e9);
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        (void)pthread_cond_timedwait(&c->wake, &c->lock, &until);
        if (c->is_stopping || !c->handle) {
            break;
        }
        look(c, &t);
        if (t.is_there) {
            pthread_mutex_unlock(&c->lock);
            (void)report(c, &t);
            pthread_mutex_lock(&c->lock);
        }
    }
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

static gm_status start_watcher(nccl_comm *c)
{
    sigset_t all, before;
    sigfillset(&all); /* signals are for the process's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&c->watcher, NULL, watch, c);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    GM_FAIL_IF(error, GM_ERR_DEVICE, "rank %d of %d: no thread to watch the communicator: %s",
               c->base.rank, c->base.size, strerror(error));
    c->has_watcher = true;
    return GM_OK;
}

/* ---- collectives ---- */

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

static nccl_result call_nccl(nccl_comm *c, const gm_comm_call *call, CUstream stream)
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
        return n->all_reduce(base, base, call->count, dtype, op, c->handle, stream);
    case GM_COMM_AGREE:
    case GM_COMM_N_KINDS: break;
    }
    return n->all_reduce(base, base, call->count, NCCL_U64, NCCL_MAX, c->handle, stream);
}

/* The lock is held, the context current.  Invariant 6. */
static gm_status follow(nccl_comm *c, CUstream stream)
{
    if (c->peers && c->n > 0 && stream != c->last_stream) {
        CUevent newest = c->flights[(c->head + c->n - 1) % N_FLIGHTS].event;
        GM_CU(c->cuda->cuStreamWaitEvent(stream, newest, 0));
    }
    c->last_stream = stream;
    return GM_OK;
}

/* The lock is held, the context current. */
static gm_status start(nccl_comm *c, const gm_comm_call *call, CUstream stream, trouble *t)
{
    if (call->kind == GM_COMM_ALL_GATHER && c->peers) {
        return gm_peers_gather(c->peers, call->base, call->count, stream);
    }
    finish_call(c, call_nccl(c, call, stream), c->timeout, "issuing it", t);
    return GM_OK;
}

/* The lock is held, and let go while the slot is waited for. */
static agreement *next_agreement(nccl_comm *c, trouble *t)
{
    agreement *a = &c->agreements[c->next_agreement];
    double end = gm_seconds() + c->timeout;
    for (look_at_agreements(c, t); a->is_pending && !t->is_there; look_at_agreements(c, t)) {
        pthread_mutex_unlock(&c->lock);
        rest(200000);
        pthread_mutex_lock(&c->lock);
        if (!c->handle) { /* the watcher has found a failure */
            t->is_there = true;
        } else if (gm_seconds() > end) {
            t->is_there = t->has_call = true;
            t->call = a->call;
            (void)snprintf(t->why, sizeof t->why, "not done after %g s", c->timeout);
        }
    }
    c->next_agreement = (c->next_agreement + 1) % N_AGREEMENTS;
    return a;
}

/* The lock is held, the context current. */
static gm_status issue_agreement(nccl_comm *c, const gm_comm_call *call, CUstream stream,
                                 trouble *t)
{
    agreement *a = next_agreement(c, t);
    if (t->is_there) {
        return GM_OK;
    }
    gm_comm_call on_digest = *call; /* on the device it is a maximum */
    on_digest.base = (uintptr_t)a->data;
    on_digest.count = sizeof(digest) / sizeof(uint64_t);
    a->call = *call;
    *a->sent = (digest){call->hash, ~call->hash, call->number, ~call->number};
    GM_CU(c->cuda->cuMemcpyHtoDAsync(a->data, a->sent, sizeof(digest), stream));
    finish_call(c, call_nccl(c, &on_digest, stream), c->timeout, "issuing it", t);
    if (t->is_there) {
        return GM_OK;
    }
    GM_CU(c->cuda->cuMemcpyDtoHAsync(a->received, a->data, sizeof(digest), stream));
    GM_CU(c->cuda->cuEventRecord(a->event, stream));
    a->is_pending = true;
    return track(c, call, stream);
}

static gm_status nccl_issue(gm_comm *comm, const gm_comm_call *call, gm_stream stream)
{
    nccl_comm *c = as_nccl(comm);
    CUstream cuda_stream = (CUstream)(uintptr_t)stream;
    trouble t = {.has_call = true, .call = *call};
    gm_status status = GM_OK;
    GM_TRY(enter(c));
    pthread_mutex_lock(&c->lock);
    if (!c->handle) { /* the watcher has just found a failure */
        t.is_there = true;
    } else if (call->kind == GM_COMM_AGREE) {
        status = follow(c, cuda_stream);
        status = status == GM_OK ? issue_agreement(c, call, cuda_stream, &t) : status;
    } else {
        look_at_agreements(c, &t);
        status = t.is_there ? GM_OK : follow(c, cuda_stream);
        status = t.is_there || status != GM_OK ? status : start(c, call, cuda_stream, &t);
        status = t.is_there || status != GM_OK ? status : track(c, call, cuda_stream);
    }
    pthread_mutex_unlock(&c->lock);
    leave(c);
    if (t.is_there) {
        return report(c, &t); /* says what came first */
    }
    if (status != GM_OK) { /* it runs unwatched */
        return gm_comm_break(comm, call, status, "%s", gm_last_error());
    }
    return GM_OK;
}

static gm_status nccl_attach(gm_comm *comm, gm_device *dev)
{
    GM_FAIL_IF(dev && dev->is_host, GM_ERR_ARG,
               "rank %d of %d: this communicator is for CUDA devices, not %s", comm->rank,
               comm->size, dev->ops->name);
    return GM_OK; /* streams are the driver's: it needs nothing of a device */
}

/* ---- life ---- */

/* The lock is held, the context current: the work that is issued, then NCCL's own farewell. */
static void say_farewell(nccl_comm *c)
{
    trouble t = {0};
    double seconds = c->timeout < FAREWELL_SECONDS ? c->timeout : FAREWELL_SECONDS;
    for (look(c, &t); c->n > 0 && !t.is_there; look(c, &t)) {
        rest(200000);
    }
    if (!t.is_there) {
        finish_call(c, c->nccl->finalize(c->handle), seconds, "the end", &t);
    }
    if (!t.is_there) {
        (void)c->nccl->destroy(c->handle);
        c->handle = NULL;
    }
    stop_now(c); /* if it is still there */
}

static void nccl_free(gm_comm *comm)
{
    nccl_comm *c = as_nccl(comm);
    bool is_orderly = !gm_comm_has_failed(comm);
    if (c->has_watcher) {
        pthread_mutex_lock(&c->lock);
        c->is_stopping = true;
        pthread_cond_signal(&c->wake);
        pthread_mutex_unlock(&c->lock);
        pthread_join(c->watcher, NULL);
    }
    if (c->context) {
        if (enter(c) == GM_OK) {
            if (c->handle) {
                say_farewell(c);
            }
            for (size_t i = 0; i < N_FLIGHTS; i++) {
                if (c->flights[i].event) {
                    (void)c->cuda->cuEventDestroy(c->flights[i].event);
                }
            }
            gm_peers_free(c->peers, is_orderly ? FAREWELL_SECONDS : 0);
            free_agreements(c);
            leave(c);
        }
        (void)c->cuda->cuDevicePrimaryCtxRelease(c->device);
    }
    pthread_cond_destroy(&c->wake);
    pthread_mutex_destroy(&c->lock);
    gm_comm_release(comm);
}

static const gm_comm_ops nccl_ops = {
    .name = "nccl",
    .issue = nccl_issue,
    .attach = nccl_attach,
    .check = nccl_check,
    .end = nccl_end,
    .free = nccl_free,
};

/* The lock is held, the context current.  What was issued on the peers' stream is over, or there is trouble. */
static gm_status await(nccl_comm *c, trouble *t)
{
    CUevent event = gm_peers_event(c->peers);
    CUresult result = CUDA_ERROR_NOT_READY;
    double end = gm_seconds() + c->timeout;
    GM_CU(c->cuda->cuEventRecord(event, gm_peers_stream(c->peers)));
    while (!t->is_there && result == CUDA_ERROR_NOT_READY) {
        rest(100000);
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
        finish_call(c, call_nccl(c, call, stream), c->timeout, "meeting the other ranks", t);
        status = await(c, t);
    }
    if (status == GM_OK && !t->is_there) {
        CUresult result = c->cuda->cuMemcpyDtoHAsync(here, there, bytes, stream);
        result = result == CUDA_SUCCESS ? c->cuda->cuStreamSynchronize(stream) : result;
        status = gm_cuda_check(result, "cuMemcpyDtoHAsync");
    }
    if (t->is_there) {
        stop_now(c); /* and with it the kernel that has the memory */
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

static gm_status meet(nccl_comm *c, const uint8_t *id_bytes)
{
    nccl_id id;
    trouble t = {0};
    const nccl_config config = {
        .size = sizeof config, .magic = 0xcafebeef, .version = 21400, .blocking = 0};
    memcpy(id.bytes, id_bytes, sizeof id.bytes);
    GM_TRY(enter(c));
    pthread_mutex_lock(&c->lock);
    gm_status status = new_agreements(c);
    if (status != GM_OK) {
        pthread_mutex_unlock(&c->lock);
        leave(c);
        return status;
    }
    nccl_result result = c->nccl->init_rank(&c->handle, c->base.size, id, c->base.rank, &config);
    if (c->handle) {
        finish_call(c, result, c->timeout, "meeting the other ranks", &t);
        status = t.is_there ? GM_OK : meet_peers(c, &t);
        if (t.is_there) {
            stop_now(c);
        }
    } else {
        tell(c, &t, result);
    }
    pthread_mutex_unlock(&c->lock);
    leave(c);
    GM_FAIL_IF(t.is_there, GM_ERR_DEVICE, "new communicator, rank %d of %d: %s", c->base.rank,
               c->base.size, t.why);
    return status;
}

static void init_locks(nccl_comm *c)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->wake, &attributes);
    pthread_condattr_destroy(&attributes);
    atomic_init(&c->is_ending, false);
}

gm_status gm_comm_nccl_new(const char *path, int ordinal, const uint8_t id[GM_COMM_ID_BYTES],
                           int rank, int size, double timeout, gm_comm **out)
{
    const nccl_api *n;
    const gm_cuda_api *cuda;
    gm_comm *made;
    *out = NULL;
    GM_FAIL_IF(!(timeout > 0 && timeout <= 1e9), GM_ERR_ARG, "timeout is %g s; it must be positive",
               timeout);
    GM_TRY(gm_nccl(path, &n));
    GM_TRY(gm_cuda(&cuda));
    GM_TRY(gm_comm_new(&nccl_ops, sizeof(nccl_comm), rank, size, &made));
    nccl_comm *c = as_nccl(made);
    gm_status status;
    init_locks(c);
    c->nccl = n;
    c->cuda = cuda;
    c->timeout = timeout;
    c->progress_at = gm_seconds();
    CUresult result = cuda->cuDeviceGet(&c->device, ordinal);
    GM_TRY_GOTO(status, fail, gm_cuda_check(result, "cuDeviceGet"));
    result = cuda->cuDevicePrimaryCtxRetain(&c->context, c->device);
    GM_TRY_GOTO(status, fail, gm_cuda_check(result, "cuDevicePrimaryCtxRetain"));
    GM_TRY_GOTO(status, fail, meet(c, id));
    GM_TRY_GOTO(status, fail, start_watcher(c));
    *out = made;
    return GM_OK;
fail:
    nccl_free(made);
    return status;
}

#endif
