/* nccl.c - collectives by NCCL, looked up in the copy that torch has loaded.
 *
 * The communicator is a non-blocking one: a call of NCCL that has to meet other ranks returns at
 * once and is waited for here, with an end to the wait.  Work on the device is watched by a thread:
 * a number that each collective leaves in host memory, and NCCL's own asynchronous errors.
 * Aborting makes the kernels of a collective return, and with them whoever waits for their stream.
 *
 * Invariants
 *   1. `handle_lock` is held around every call of NCCL that names the handle, and around no other
 *      of the driver's: a thread that waits in the driver does not keep others from aborting.
 *      `lock` is held while flights are read or written, and taken before.  Neither is held while a
 *      failure is recorded, which aborts.
 *   2. Once aborted or destroyed the handle is NULL and never named again.
 *   3. flights[] has the collectives that may still run, oldest first.  A collective waits for the
 *      one before it, on whatever stream, so `done` only grows and says the same of all before;
 *      where the ring is full the newest takes another number.
 *   4. Time runs against the oldest flight only, from when it was issued or became the oldest: a
 *      long queue is not a late rank.  Whoever looks at the time asks the driver nothing and does
 *      not wait for `lock`: another thread may be in the driver, with the driver's own lock and
 *      this one, until what is late ends.  Errors of the device are for those who wait or ask. */
#define _GNU_SOURCE /* pthread_setname_np, pthread_condattr_setclock */
#include "comm/comm_impl.h"

#ifdef GM_WITH_CUDA

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "comm/nccl_impl.h"

/* ---- the communicator ---- */

static const double LOOK_SECONDS = 0.1; /* between two looks of the watching thread */
enum { MOST_KEPT_OUT = 10 }; /* looks, before the watching thread speaks without the lock */
static const double FAREWELL_SECONDS = 10.0; /* at most, for an orderly end */

static nccl_comm *as_nccl(gm_comm *comm)
{
    return (nccl_comm *)comm;
}

static void nccl_end(gm_comm *comm)
{
    nccl_comm *c = as_nccl(comm);
    atomic_store(&c->is_ending, true);
    CUcontext current = NULL;
    (void)c->cuda->cuCtxGetCurrent(&current); /* the thread's own: the watching one asks no more */
    bool is_entered = current != c->context && gm_nccl_enter(c) == GM_OK;
    pthread_mutex_lock(&c->handle_lock);
    gm_nccl_stop(c);
    pthread_mutex_unlock(&c->handle_lock);
    if (is_entered) {
        gm_nccl_leave(c);
    }
}

static bool is_ending(nccl_comm *c)
{
    return atomic_load(&c->is_ending);
}

static gm_status report(nccl_comm *c, const trouble *t)
{
    return gm_comm_break(&c->base, t->has_call ? &t->call : NULL, GM_ERR_DEVICE, "%s", t->why);
}

static void tell_result(trouble *t, const gm_comm_call *call, CUresult result)
{
    (void)gm_cuda_check(result, "cuEventQuery");
    t->is_there = t->has_call = true;
    t->call = *call;
    (void)snprintf(t->why, sizeof t->why, "%.390s", gm_last_error());
}

static bool is_over(const nccl_comm *c, uint32_t number)
{
    return (int32_t)(__atomic_load_n(c->done, __ATOMIC_ACQUIRE) - number) >= 0;
}

/* ---- flights ---- */

/* The context is current.  All that flights will ever need. */
static gm_status prepare(nccl_comm *c)
{
    void *done;
    GM_CU(c->cuda->cuMemHostAlloc(&done, sizeof *c->done, 0));
    c->done = done;
    *c->done = 0;
    GM_CU(c->cuda->cuEventCreate(&c->newest, CU_EVENT_DISABLE_TIMING));
    return GM_OK;
}

/* The lock is held, the context current. */
static gm_status track(nccl_comm *c, const gm_comm_call *call, CUstream stream)
{
    bool is_full = c->n == N_FLIGHTS;
    uint32_t number = atomic_load(&c->n_flights) + 1;
    CUdeviceptr done = (CUdeviceptr)(uintptr_t)c->done; /* pinned memory has one address */
    flight *f = &c->flights[(c->head + c->n - (is_full ? 1 : 0)) % N_FLIGHTS];
    c->is_untracked = true;
    GM_CU(c->cuda->cuStreamWriteValue32(stream, done, number, CU_STREAM_WRITE_VALUE_DEFAULT));
    GM_CU(c->cuda->cuEventRecord(c->newest, stream));
    c->is_untracked = false;
    f->call = *call;
    f->number = number;
    c->n += is_full ? 0 : 1;
    if (is_over(c, number - 1)) {
        atomic_store(&c->busy_at, gm_seconds());
    }
    atomic_store(&c->n_flights, number);
    GM_ASSERT(c->n <= N_FLIGHTS);
    return GM_OK;
}

/* The lock is held. */
static void look(nccl_comm *c, trouble *t)
{
    nccl_result error = NCCL_SUCCESS;
    while (c->n > 0 && is_over(c, c->flights[c->head].number)) {
        c->head = (c->head + 1) % N_FLIGHTS;
        c->n--;
    }
    t->has_call = c->n > 0;
    t->call = c->flights[c->head].call;
    pthread_mutex_lock(&c->handle_lock);
    nccl_result asked = c->handle ? c->nccl->async_error(c->handle, &error) : NCCL_SUCCESS;
    error = asked == NCCL_SUCCESS ? error : asked;
    if (error != NCCL_SUCCESS && error != NCCL_IN_PROGRESS) {
        gm_nccl_tell(c, t, error);
    }
    pthread_mutex_unlock(&c->handle_lock);
}

/* The lock is held, the context current. */
static void ask_driver(nccl_comm *c, trouble *t)
{
    CUresult result = c->n > 0 ? c->cuda->cuEventQuery(c->newest) : CUDA_SUCCESS;
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_NOT_READY && !t->is_there) {
        tell_result(t, &c->flights[c->head].call, result);
    }
}

static bool nccl_check(gm_comm *comm)
{
    nccl_comm *c = as_nccl(comm);
    trouble t = {0};
    if (gm_nccl_enter(c) != GM_OK) {
        return false; /* the caller's next call of the driver fails in the same way */
    }
    pthread_mutex_lock(&c->lock);
    if (!is_ending(c)) {
        look(c, &t);
        ask_driver(c, &t);
    }
    bool is_under_way = c->n > 0;
    pthread_mutex_unlock(&c->lock);
    gm_nccl_leave(c);
    if (t.is_there) {
        (void)report(c, &t);
    }
    return is_under_way;
}

/* ---- the watching thread ---- */

typedef struct progress {
    uint32_t done;
    double at; /* when something was seen to be done, or nothing to do */
    int n_kept_out;
} progress;

static bool is_late(nccl_comm *c, progress *p)
{
    uint32_t done = __atomic_load_n(c->done, __ATOMIC_ACQUIRE);
    double now = gm_seconds();
    if (done != p->done || done == atomic_load(&c->n_flights)) {
        p->done = done;
        p->at = now;
    }
    double busy_at = atomic_load(&c->busy_at); /* after n_flights */
    return now - (busy_at > p->at ? busy_at : p->at) > c->timeout;
}

/* Invariant 4.  False: there is nothing more to watch. */
static bool look_once(nccl_comm *c, progress *p, trouble *t)
{
    bool has_lock = pthread_mutex_trylock(&c->lock) == 0, is_there = !is_ending(c);
    p->n_kept_out = has_lock ? 0 : p->n_kept_out + 1;
    if (has_lock && is_there) {
        look(c, t);
    }
    if (is_late(c, p) && !t->is_there && is_there && (has_lock || p->n_kept_out > MOST_KEPT_OUT)) {
        t->is_there = true;
        (void)snprintf(
            t->why, sizeof t->why,
            "not done after %g s; a rank has not issued it, has stopped or has ended, or "
            "its device has failed",
            c->timeout);
    }
    if (has_lock) {
        pthread_mutex_unlock(&c->lock);
    }
    return is_there;
}

/* False: it is to stop. */
static bool rest(nccl_comm *c)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += (long)(LOOK_SECONDS * 1e9);
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&c->rest);
    if (!c->is_stopping) {
        (void)pthread_cond_timedwait(&c->wake, &c->rest, &until);
    }
    bool goes_on = !c->is_stopping;
    pthread_mutex_unlock(&c->rest);
    return goes_on;
}

static void *watch(void *context)
{
    nccl_comm *c = context;
    bool is_there = true;
    (void)pthread_setname_np(pthread_self(), "gm-comm");
    (void)c->cuda->cuCtxSetCurrent(c->context);
    progress p = {.at = gm_seconds()};
    while (is_there && rest(c)) {
        trouble t = {0};
        is_there = look_once(c, &p, &t);
        if (t.is_there) {
            (void)report(c, &t);
        }
    }
    return NULL;
}

static void stop_watcher(nccl_comm *c)
{
    if (c->has_watcher) {
        pthread_mutex_lock(&c->rest);
        c->is_stopping = true;
        pthread_cond_signal(&c->wake);
        pthread_mutex_unlock(&c->rest);
        pthread_join(c->watcher, NULL);
    }
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

/* The lock is held, the context current.  Invariant 3. */
static gm_status follow(nccl_comm *c, CUstream stream)
{
    if (c->n > 0) {
        GM_CU(c->cuda->cuStreamWaitEvent(stream, c->newest, 0));
    }
    return GM_OK;
}

/* The lock is held, the context current. */
static void call_nccl(nccl_comm *c, const gm_comm_call *call, CUstream stream, trouble *t)
{
    pthread_mutex_lock(&c->handle_lock);
    t->is_there = !c->handle; /* the watcher has just found a failure */
    if (c->handle) {
        gm_nccl_finish(c, gm_nccl_call(c, call, stream), c->timeout, "issuing it", t);
    }
    pthread_mutex_unlock(&c->handle_lock);
}

/* The lock is held, the context current. */
static gm_status start(nccl_comm *c, const gm_comm_call *call, CUstream stream, trouble *t)
{
    GM_TRY(follow(c, stream));
    call_nccl(c, call, stream, t);
    return t->is_there ? GM_OK : track(c, call, stream);
}

static gm_status nccl_issue(gm_comm *comm, const gm_comm_call *call, gm_stream stream)
{
    nccl_comm *c = as_nccl(comm);
    CUstream cuda_stream = (CUstream)(uintptr_t)stream;
    trouble t = {.has_call = true, .call = *call};
    gm_status status = GM_OK;
    GM_TRY(gm_nccl_enter(c));
    pthread_mutex_lock(&c->lock);
    if (is_ending(c)) { /* the watcher has just found a failure */
        t.is_there = true;
    } else {
        status = start(c, call, cuda_stream, &t);
    }
    pthread_mutex_unlock(&c->lock);
    gm_nccl_leave(c);
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

/* Until the work that is issued is over; the watcher still sees to it that it ends. */
static void await_flights(nccl_comm *c, trouble *t)
{
    pthread_mutex_lock(&c->lock);
    while (!is_ending(c) && !t->is_there) {
        look(c, t);
        ask_driver(c, t);
        if (c->n == 0) {
            break;
        }
        pthread_mutex_unlock(&c->lock);
        gm_nccl_rest(200000);
        pthread_mutex_lock(&c->lock);
    }
    pthread_mutex_unlock(&c->lock);
}

/* The lock of the handle is held, the context current.  NCCL's own farewell, unless something is
 * wrong. */
static void say_farewell(nccl_comm *c, trouble *t)
{
    double seconds = c->timeout < FAREWELL_SECONDS ? c->timeout : FAREWELL_SECONDS;
    if (!t->is_there) {
        gm_nccl_finish(c, c->nccl->finalize(c->handle), seconds, "the end", t);
    }
    if (!t->is_there) {
        (void)c->nccl->destroy(c->handle);
        c->handle = NULL;
    }
    gm_nccl_stop(c); /* if it is still there */
}

/* Nothing is watched any more: what the device may still use stays. */
static void free_memory(nccl_comm *c)
{
    CUresult result = CUDA_SUCCESS;
    double end = gm_seconds() + FAREWELL_SECONDS;
    while (c->n > 0 && (result = c->cuda->cuEventQuery(c->newest)) == CUDA_ERROR_NOT_READY &&
           gm_seconds() < end) {
        gm_nccl_rest(200000);
    }
    if (result != CUDA_ERROR_NOT_READY && !c->is_untracked) {
        (void)(c->done ? c->cuda->cuMemFreeHost(c->done) : CUDA_SUCCESS);
    }
    (void)(c->newest ? c->cuda->cuEventDestroy(c->newest) : CUDA_SUCCESS);
}

static void nccl_free(gm_comm *comm)
{
    nccl_comm *c = as_nccl(comm);
    trouble t = {0};
    bool is_here = c->context && gm_nccl_enter(c) == GM_OK;
    if (is_here && c->has_watcher) {
        await_flights(c, &t);
    }
    stop_watcher(c);
    if (is_here) {
        pthread_mutex_lock(&c->handle_lock);
        if (c->handle) {
            say_farewell(c, &t);
        }
        pthread_mutex_unlock(&c->handle_lock);
        free_memory(c);
        gm_nccl_leave(c);
    }
    if (c->context) {
        (void)c->cuda->cuDevicePrimaryCtxRelease(c->device);
    }
    pthread_cond_destroy(&c->wake);
    pthread_mutex_destroy(&c->rest);
    pthread_mutex_destroy(&c->handle_lock);
    pthread_mutex_destroy(&c->lock);
    gm_comm_release(comm);
}

/* Makes the handle; the ranks are all there when it returns, or it fails after the timeout. */
static gm_status meet(nccl_comm *c, const uint8_t *id_bytes)
{
    nccl_id id;
    trouble t = {0};
    const nccl_config config = {
        .size = sizeof config, .magic = 0xcafebeef, .version = 21400, .blocking = 0};
    memcpy(id.bytes, id_bytes, sizeof id.bytes);
    pthread_mutex_lock(&c->handle_lock);
    nccl_result result = c->nccl->init_rank(&c->handle, c->base.size, id, c->base.rank, &config);
    if (c->handle) {
        gm_nccl_finish(c, result, c->timeout, "meeting the other ranks", &t);
        if (t.is_there) { /* the others wait for this rank */
            gm_nccl_stop(c);
        }
    } else {
        gm_nccl_tell(c, &t, result);
    }
    pthread_mutex_unlock(&c->handle_lock);
    GM_FAIL_IF(t.is_there, GM_ERR_DEVICE, "new communicator, rank %d of %d: %s", c->base.rank,
               c->base.size, t.why);
    return GM_OK;
}

static const gm_comm_ops nccl_ops = {
    .name = "nccl",
    .issue = nccl_issue,
    .attach = nccl_attach,
    .check = nccl_check,
    .end = nccl_end,
    .free = nccl_free,
};

static void init_locks(nccl_comm *c)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&c->lock, NULL);
    pthread_mutex_init(&c->handle_lock, NULL);
    pthread_mutex_init(&c->rest, NULL);
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
    CUresult result = cuda->cuDeviceGet(&c->device, ordinal);
    GM_TRY_GOTO(status, fail, gm_cuda_check(result, "cuDeviceGet"));
    result = cuda->cuDevicePrimaryCtxRetain(&c->context, c->device);
    GM_TRY_GOTO(status, fail, gm_cuda_check(result, "cuDevicePrimaryCtxRetain"));
    GM_TRY_GOTO(status, fail, gm_nccl_enter(c));
    status = prepare(c);
    status = status == GM_OK ? meet(c, id) : status;
    gm_nccl_leave(c);
    GM_TRY_GOTO(status, fail, status);
    GM_TRY_GOTO(status, fail, start_watcher(c));
    *out = made;
    return GM_OK;
fail:
    nccl_free(made);
    return status;
}

#endif
