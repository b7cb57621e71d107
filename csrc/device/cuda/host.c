/* host.c - host calls of the CUDA device: host work that has its place in a stream.
 *
 * Two ways, chosen at the first call by GEMINI_HOST_CALL:
 *
 * callback (the default): the driver's cuLaunchHostFunc.  On an H200 1.4 to 5 us to issue, however many
 * calls are outstanding, and 12 us from a stream to the host and back.
 *
 * thread: one thread of the device takes the calls in the order in which they were issued: it waits for
 * the event that was recorded on the call's stream, runs the function, and writes the call's number into
 * a pinned word; the stream waits for that number (a stream memory operation).  20 us there and back, and
 * the driver lets the issuing thread wait once some tens of such waits are outstanding, which is why this
 * is not the default; it is for drivers whose callbacks are slow or disturb.
 *
 * Invariants (of the thread; the driver keeps the like for callbacks)
 *   1. One queue, first in, first out, for all streams, and one word.  A call's event depends only on
 *      what was issued before it, hence only on calls further ahead in the queue: no order of calls
 *      and event waits can make it wait for itself.
 *   2. Number n in the word says that every call up to n is done; numbers ascend modulo 2^32, and the
 *      device compares them as such.
 *   3. A call is put into the queue last, after its event and its wait are in the stream: a failure to
 *      issue one leaves nothing behind.  No lock is held while the driver is called, since the driver
 *      may block until calls ahead are done.
 *   4. A function runs only if everything before it succeeded.  If not, the device refuses all further
 *      work (has_failed), and the word is written all the same, so that nothing waits for ever.
 *   5. The queue's end waits for all calls, and the word's memory outlives the last stream that reads it. */
#ifdef GM_WITH_CUDA

#define _GNU_SOURCE /* pthread_setname_np */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device/cuda/cuda_impl.h"

enum { FIRST_CAPACITY = 256 /* calls; more than a step of a large model has outstanding */ };

typedef struct host_entry {
    void (*fn)(void *context);
    void *context;
    CUevent event; /* belongs to the slot of the ring; NULL until the slot is first used */
    uint32_t number;
} host_entry;

struct gm_host_queue {
    cuda_device *device;
    bool is_callback; /* the driver takes the calls: no thread, no word, no ring */
    pid_t owner;      /* a forked child has neither the thread nor the context */
    pthread_t thread;
    bool has_thread;

    /* Everything below is read and written under `lock`, but for slots that are not in the queue, which
     * belong to the (one) caller. */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    host_entry *entries;      /* ring, (capacity,) */
    size_t capacity, head, n; /* entries head, head + 1, ... head + n - 1 are in the queue */
    bool is_stopping;

    uint32_t last_number; /* the caller's */
    atomic_uint *word;    /* pinned; the last number that is done */
    CUdeviceptr word_address;
};

/* ---- the thread ---- */

static void remember_failure(cuda_device *d)
{
    if (!atomic_load(&d->has_failed)) {
        (void)snprintf(d->failure, sizeof d->failure,
                       "DEVICE (cuda:%d): work before a host call failed, so its update was not "
                       "made and the run cannot go on: %.200s",
                       d->ordinal, gm_last_error());
        atomic_store_explicit(&d->has_failed, true, memory_order_release);
    }
}

static void take(cuda_device *d, const host_entry *entry)
{
    gm_status status = CHECK(d->api->cuEventSynchronize(entry->event));
    if (status != GM_OK) {
        remember_failure(d);
    }
    if (!atomic_load(&d->has_failed)) {
        entry->fn(entry->context);
    }
}

static void *thread_main(void *argument)
{
    gm_host_queue *q = argument;
    cuda_device *d = q->device;
    if (CHECK(d->api->cuCtxSetCurrent(d->context)) != GM_OK) {
        remember_failure(d);
    }
    pthread_mutex_lock(&q->lock);
    while (q->n > 0 || !q->is_stopping) {
        if (q->n == 0) {
            pthread_cond_wait(&q->wake, &q->lock);
            continue;
        }
        host_entry entry = q->entries[q->head];
        pthread_mutex_unlock(&q->lock);
        take(d, &entry);
        /* release: what fn wrote is in memory before the device may read it */
        atomic_store_explicit(q->word, entry.number, memory_order_release);
        pthread_mutex_lock(&q->lock);
        q->head = (q->head + 1) % q->capacity;
        q->n--;
    }
    pthread_mutex_unlock(&q->lock);
    return NULL;
}

/* ---- life ---- */

static gm_status start_thread(gm_host_queue *q)
{
    sigset_t all, before;
    sigfillset(&all); /* signals are the main thread's */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&q->thread, NULL, thread_main, q);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) {
        return GM_FAIL(GM_ERR_DEVICE, "host_call: no thread for host work: %s", strerror(error));
    }
    q->has_thread = true;
    (void)pthread_setname_np(q->thread, "gemini-host");
    return GM_OK;
}

/* Doubles the ring; the order of the queue stays, and so do the slots' events. */
static gm_status grow(gm_host_queue *q)
{
    size_t capacity = q->capacity ? 2 * q->capacity : FIRST_CAPACITY;
    host_entry *entries = calloc(capacity, sizeof *entries);
    if (!entries) {
        return GM_FAIL(GM_ERR_NOMEM, "HOST: no %zu bytes for %zu outstanding host calls",
                       capacity * sizeof *entries, capacity);
    }
    pthread_mutex_lock(&q->lock);
    for (size_t i = 0; i < q->capacity; i++) {
        entries[i] = q->entries[(q->head + i) % q->capacity];
    }
    host_entry *old = q->entries;
    q->entries = entries;
    q->capacity = capacity;
    q->head = 0;
    pthread_mutex_unlock(&q->lock);
    free(old);
    return GM_OK;
}

static gm_status open_queue(gm_host_queue *q)
{
    const gm_cuda_api *api = q->device->api;
    void *word = NULL;
    GM_TRY(CHECK(api->cuMemHostAlloc(&word, sizeof *q->word,
                                     CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_PORTABLE)));
    q->word = word;
    atomic_init(q->word, 0);
    GM_TRY(CHECK(api->cuMemHostGetDevicePointer(&q->word_address, word, 0)));
    GM_TRY(grow(q));
    return start_thread(q);
}

void gm_cuda_host_queue_free(gm_host_queue *q)
{
    if (!q) {
        return;
    }
    const gm_cuda_api *api = q->device->api;
    if (q->owner == getpid()) {
        if (q->has_thread) {
            pthread_mutex_lock(&q->lock);
            q->is_stopping = true;
            pthread_cond_signal(&q->wake);
            pthread_mutex_unlock(&q->lock);
            pthread_join(q->thread, NULL);
        }
        /* streams may still be about to read the word; the driver's own callbacks end here too */
        (void)api->cuCtxSynchronize();
        for (size_t i = 0; i < q->capacity; i++) {
            if (q->entries[i].event) {
                (void)api->cuEventDestroy(q->entries[i].event);
            }
        }
        if (q->word) {
            (void)api->cuMemFreeHost(q->word);
        }
        pthread_cond_destroy(&q->wake);
        pthread_mutex_destroy(&q->lock);
    }
    free(q->entries);
    free(q);
}

/* Does a thread of ours take the calls? */
static gm_status wants_thread(const cuda_device *d, bool *out)
{
    const char *wish = getenv("GEMINI_HOST_CALL");
    int has_words = 0, has_long_words = 0;
    *out = wish && strcmp(wish, "thread") == 0;
    if (!*out) {
        if (wish && *wish && strcmp(wish, "callback") != 0) {
            return GM_FAIL(GM_ERR_ARG, "GEMINI_HOST_CALL is \"%s\"; use callback or thread", wish);
        }
        return GM_OK;
    }
    GM_TRY(CHECK(d->api->cuDeviceGetAttribute(
        &has_words, CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1, d->device)));
    GM_TRY(CHECK(d->api->cuDeviceGetAttribute(
        &has_long_words, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, d->device)));
    if (!has_words && !has_long_words) {
        return GM_FAIL(GM_ERR_UNSUPPORTED,
                       "GEMINI_HOST_CALL is thread, but streams of cuda:%d cannot wait for a word "
                       "in memory; use callback",
                       d->ordinal);
    }
    return GM_OK;
}

static gm_status queue_new(cuda_device *d, gm_host_queue **out)
{
    bool has_thread = false;
    GM_TRY(wants_thread(d, &has_thread));
    gm_host_queue *q = calloc(1, sizeof *q);
    if (!q) {
        return GM_FAIL(GM_ERR_NOMEM, "HOST: no %zu bytes for the queue of host calls", sizeof *q);
    }
    q->device = d;
    q->is_callback = !has_thread;
    q->owner = getpid();
    pthread_mutex_init(&q->lock, NULL);
    pthread_cond_init(&q->wake, NULL);
    gm_status status = has_thread ? open_queue(q) : GM_OK;
    if (status != GM_OK) {
        gm_cuda_host_queue_free(q);
        return status;
    }
    *out = q;
    return GM_OK;
}

/* ---- calls ---- */

static gm_status put(gm_host_queue *q, void (*fn)(void *context), void *context, CUstream stream)
{
    const gm_cuda_api *api = q->device->api;
    pthread_mutex_lock(&q->lock);
    bool is_full = q->n == q->capacity;
    pthread_mutex_unlock(&q->lock);
    if (is_full) { /* waiting for room instead would stop the step that the calls should hide under */
        GM_TRY(grow(q));
    }
    /* the sum stays the same while the thread takes entries, so the slot does, too */
    pthread_mutex_lock(&q->lock);
    host_entry *slot = &q->entries[(q->head + q->n) % q->capacity];
    pthread_mutex_unlock(&q->lock);
    if (!slot->event) {
        GM_TRY(CHECK(
            api->cuEventCreate(&slot->event, CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC)));
    }
    uint32_t number = q->last_number + 1;
    GM_TRY(CHECK(api->cuEventRecord(slot->event, stream)));
    GM_TRY(
        CHECK(api->cuStreamWaitValue32(stream, q->word_address, number, CU_STREAM_WAIT_VALUE_GEQ)));
    q->last_number = number;
    slot->fn = fn;
    slot->context = context;
    slot->number = number;
    pthread_mutex_lock(&q->lock);
    q->n++;
    pthread_cond_signal(&q->wake);
    pthread_mutex_unlock(&q->lock);
    return GM_OK;
}

static gm_status host_call(cuda_device *d, void (*fn)(void *context), void *context,
                           CUstream stream)
{
    if (!d->host_queue) {
        GM_TRY(queue_new(d, &d->host_queue));
    }
    if (d->host_queue->is_callback) {
        return CHECK(d->api->cuLaunchHostFunc(stream, fn, context));
    }
    return put(d->host_queue, fn, context, stream);
}

gm_status gm_cuda_host_call(gm_device *dev, void (*fn)(void *context), void *context,
                            gm_stream stream)
{
    cuda_device *d = gm_cuda_self(dev);
    IN_CONTEXT(d, host_call(d, fn, context, gm_cuda_stream(stream)));
}

#else
/* ISO C forbids an empty translation unit. */
typedef int gm_device_cuda_host_not_built;
#endif
