/* workers.c - the thread pool.
 *
 * A job is cut into spans, a few per thread; idle threads and the caller (who in a pool with cores
 * of its own only waits) take them one by one, so a thread that wakes late, or whose core is busy
 * with something else, delays no other.  Threads are bound to all of the pool's cores, not to one
 * each, for the same reason: a core that a thread of the user's has taken is left to it.  Idle
 * threads look for work for some microseconds before they sleep: jobs come in rows (chunk after
 * chunk), and a sleeping thread takes longer to wake than a small job takes to run.
 *
 * 1. Every field that changes is written under `lock`; unfinished and n_jobs are also read without
 *    it, as hints.
 * 2. A thread runs a span only between taking it (next_span) and returning it (unfinished), so the
 *    job's fields, which the caller replaces only when unfinished == 0, are stable meanwhile.
 * 3. Exactly one caller at a time is between acquiring and releasing `caller_lock`.
 * 4. In a forked child the pool has no threads and its locks are in an unknown state: there,
 *    nothing of it is touched but `owner`, and jobs run on the calling thread. */
#define _GNU_SOURCE /* pthread_attr_setaffinity_np, pthread_setname_np */
#include "base/workers.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/topology.h"

enum {
    MAX_THREADS = 1024,
    SPANS_PER_THREAD = 4, /* enough to even out unequal cores; each costs one lock and unlock */
    SPIN_ROUNDS = 400,    /* about 20 us of looking for work */
};

struct gm_workers {
    pthread_mutex_t caller_lock;
    pthread_mutex_t lock;
    pthread_cond_t wake; /* to threads: a job has spans, or stop */
    pthread_cond_t done; /* to the caller: unfinished == 0 */

    gm_span_fn fn;
    void *context;
    size_t n;       /* items of the job */
    size_t n_spans; /* equal parts of it, the first n % n_spans one item longer */
    size_t next_span;
    atomic_size_t unfinished; /* spans not yet returned */
    atomic_uint n_jobs;       /* jobs so far, stopping counts as one */
    bool is_stopping;

    pid_t owner;
    unsigned n_threads; /* that run spans */
    bool is_bound;
    bool is_caller_waiting; /* the caller runs no spans: all n_threads are threads of the pool */
    unsigned n_started;     /* entries of threads[] that are live */
    unsigned spin_rounds;
    pthread_t threads[]; /* (n_threads,), one less if the caller is one of them */
};

/* Set while this thread runs a span: a job started from inside a job runs inline. */
static _Thread_local bool in_span;

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static bool has_span_locked(const gm_workers *pool)
{
    return pool->next_span != pool->n_spans;
}

/* Runs spans until none is left to take.  `lock` is held on entry and on return. */
static void run_spans_locked(gm_workers *pool)
{
    while (has_span_locked(pool)) {
        gm_span_fn fn = pool->fn;
        void *context = pool->context;
        size_t i = pool->next_span++;
        size_t share = pool->n / pool->n_spans;
        size_t longer = pool->n % pool->n_spans;
        size_t begin = i * share + (i < longer ? i : longer);
        size_t end = begin + share + (i < longer ? 1 : 0);
        pthread_mutex_unlock(&pool->lock);

        in_span = true;
        fn(context, begin, end);
        in_span = false;

        pthread_mutex_lock(&pool->lock);
        if (atomic_fetch_sub(&pool->unfinished, 1) == 1) {
            pthread_cond_signal(&pool->done);
        }
    }
}

/* Looks for a moment, without the lock, for a new job or for the end of the caller's: what it sees
 * is only a hint. */
static void spin_locked(gm_workers *pool, bool is_for_job)
{
    unsigned seen = atomic_load(&pool->n_jobs);
    pthread_mutex_unlock(&pool->lock);
    for (unsigned i = 0; i < pool->spin_rounds; i++) {
        if (is_for_job ? atomic_load_explicit(&pool->n_jobs, memory_order_relaxed) != seen
                       : atomic_load_explicit(&pool->unfinished, memory_order_relaxed) == 0) {
            break;
        }
        relax();
    }
    pthread_mutex_lock(&pool->lock);
}

static void *thread_main(void *argument)
{
    gm_workers *pool = argument;
    pthread_mutex_lock(&pool->lock);
    while (!pool->is_stopping) {
        if (has_span_locked(pool)) {
            run_spans_locked(pool);
            spin_locked(pool, true);
        } else {
            pthread_cond_wait(&pool->wake, &pool->lock);
        }
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

/* The cores that the scheduler lets this process run on. */
static unsigned usable_cores(void)
{
    unsigned *cores;
    size_t n;
    if (gm_topology_mask(&cores, &n) == GM_OK) {
        free(cores);
        return n < MAX_THREADS ? (unsigned)n : MAX_THREADS;
    }
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online < 1 ? 1 : online < MAX_THREADS ? (unsigned)online : MAX_THREADS;
}

gm_status gm_workers_default(unsigned *out)
{
    const char *text = getenv("GEMINI_THREADS");
    if (!text || !*text) {
        *out = gm_topology_threads(usable_cores(), gm_topology_quota(""));
        return GM_OK;
    }
    bool is_number = true;
    unsigned long value = 0;
    for (const char *c = text; *c; c++) {
        is_number = is_number && *c >= '0' && *c <= '9' && c - text < 8;
        value = is_number ? value * 10 + (unsigned long)(*c - '0') : 0;
    }
    GM_FAIL_IF(!is_number || value < 1 || value > MAX_THREADS, GM_ERR_ARG,
               "GEMINI_THREADS is \"%.40s\": set it to a whole number from 1 to %d, or unset it to "
               "use every core this process may use",
               text, MAX_THREADS);
    *out = (unsigned)value;
    return GM_OK;
}

/* Threads of the pool itself. */
static unsigned n_own_threads(const gm_workers *pool)
{
    return pool->n_threads - (pool->is_caller_waiting ? 0 : 1);
}

/* The threads start with every signal blocked: handlers belong to the threads of the program. */
static int start_threads(gm_workers *pool, const pthread_attr_t *attributes)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = 0;
    while (!error && pool->n_started < n_own_threads(pool)) {
        error = pthread_create(&pool->threads[pool->n_started], attributes, thread_main, pool);
        if (!error) {
            pthread_setname_np(pool->threads[pool->n_started], "gemini-worker");
            pool->n_started++;
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

/* The same on these cores only, from a thread's first instruction on.  An error may also mean that
 * the system refuses to bind: then no thread has started. */
static int start_bound(gm_workers *pool, const unsigned *cores, size_t n_cores)
{
    unsigned last = 0;
    for (size_t i = 0; i < n_cores; i++) {
        last = cores[i] > last ? cores[i] : last;
    }
    cpu_set_t *set = CPU_ALLOC((size_t)last + 1);
    if (!set) {
        return ENOMEM;
    }
    size_t set_bytes = CPU_ALLOC_SIZE((size_t)last + 1);
    CPU_ZERO_S(set_bytes, set);
    for (size_t i = 0; i < n_cores; i++) {
        CPU_SET_S(cores[i], set_bytes, set);
    }
    pthread_attr_t attributes;
    int error = pthread_attr_init(&attributes);
    if (!error) {
        error = pthread_attr_setaffinity_np(&attributes, set_bytes, set);
        error = error ? error : start_threads(pool, &attributes);
        pthread_attr_destroy(&attributes);
    }
    CPU_FREE(set);
    return error;
}

static gm_status make_pool(const unsigned *cores, size_t n_cores, unsigned n_threads,
                           gm_workers **out)
{
    GM_FAIL_IF(n_threads > MAX_THREADS, GM_ERR_ARG, "n_threads is %u: at most %d threads",
               n_threads, MAX_THREADS);
    gm_workers *pool = calloc(1, sizeof *pool + n_threads * sizeof pool->threads[0]);
    GM_FAIL_IF(!pool, GM_ERR_NOMEM, "host memory: no room for a pool of %u threads", n_threads);
    pool->owner = getpid();
    pool->n_threads = n_threads;
    pool->is_caller_waiting = n_cores > 0;
    /* With more threads than cores, a thread that spins takes the core of one that works. */
    bool is_crowded = n_cores > 0 ? n_threads >= n_cores : n_threads > usable_cores();
    pool->spin_rounds = is_crowded ? 0 : SPIN_ROUNDS;
    pthread_mutex_init(&pool->caller_lock, NULL);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pthread_cond_init(&pool->done, NULL);
    int error = 0;
    if (n_cores > 0) {
        error = start_bound(pool, cores, n_cores);
        pool->is_bound = !error;
    }
    if (n_cores == 0 || (error && pool->n_started == 0)) {
        error = start_threads(pool, NULL);
    }
    if (error) {
        gm_status status = GM_FAIL(
            GM_ERR_DEVICE,
            "thread %u of %u could not be started: %s; set GEMINI_THREADS to a smaller number",
            pool->n_started + 1 + (n_cores == 0), n_threads, strerror(error));
        gm_workers_free(pool);
        return status;
    }
    *out = pool;
    return GM_OK;
}

gm_status gm_workers_new(unsigned n_threads, gm_workers **out)
{
    if (n_threads == 0) {
        GM_TRY(gm_workers_default(&n_threads));
    }
    return make_pool(NULL, 0, n_threads, out);
}

gm_status gm_workers_new_on(const unsigned *cores, size_t n_cores, unsigned n_threads,
                            gm_workers **out)
{
    if (n_cores == 0) {
        return gm_workers_new(n_threads, out);
    }
    unsigned n_default = n_cores < MAX_THREADS ? (unsigned)n_cores : MAX_THREADS;
    return make_pool(cores, n_cores, n_threads ? n_threads : n_default, out);
}

void gm_workers_free(gm_workers *pool)
{
    if (!pool) {
        return;
    }
    if (pool->owner == getpid()) {
        pthread_mutex_lock(&pool->lock);
        GM_ASSERT(atomic_load(&pool->unfinished) == 0);
        pool->is_stopping = true;
        atomic_fetch_add(&pool->n_jobs, 1);
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->lock);
        for (unsigned i = 0; i < pool->n_started; i++) {
            pthread_join(pool->threads[i], NULL);
        }
        pthread_cond_destroy(&pool->done);
        pthread_cond_destroy(&pool->wake);
        pthread_mutex_destroy(&pool->lock);
        pthread_mutex_destroy(&pool->caller_lock);
    }
    free(pool);
}

bool gm_workers_is_bound(const gm_workers *pool)
{
    return pool && pool->owner == getpid() && pool->is_bound;
}

unsigned gm_workers_count(const gm_workers *pool)
{
    return pool && pool->owner == getpid() ? pool->n_threads : 1;
}

void gm_workers_for(gm_workers *pool, size_t n, size_t grain, gm_span_fn fn, void *context)
{
    if (n == 0) {
        return;
    }
    size_t most = n / (grain ? grain : 1);
    bool has_threads = pool && pool->owner == getpid() && n_own_threads(pool) > 0;
    if (most < 2 || in_span || !has_threads) {
        fn(context, 0, n);
        return;
    }
    size_t wanted = (size_t)pool->n_threads * SPANS_PER_THREAD;

    pthread_mutex_lock(&pool->caller_lock);
    pthread_mutex_lock(&pool->lock);
    pool->fn = fn;
    pool->context = context;
    pool->n = n;
    pool->n_spans = most < wanted ? most : wanted;
    pool->next_span = 0;
    atomic_store(&pool->unfinished, pool->n_spans);
    atomic_fetch_add(&pool->n_jobs, 1);
    if (pool->n_spans < pool->n_threads) {
        for (size_t i = pool->is_caller_waiting ? 0 : 1; i < pool->n_spans; i++) {
            pthread_cond_signal(&pool->wake);
        }
    } else {
        pthread_cond_broadcast(&pool->wake);
    }
    if (!pool->is_caller_waiting) {
        run_spans_locked(pool);
    }
    if (atomic_load(&pool->unfinished) != 0) {
        spin_locked(pool, false);
    }
    while (atomic_load(&pool->unfinished) != 0) {
        pthread_cond_wait(&pool->done, &pool->lock);
    }
    pthread_mutex_unlock(&pool->lock);
    pthread_mutex_unlock(&pool->caller_lock);
}

/* ---- copies ---- */

typedef struct copy_job {
    char *dst;
    const char *src;
} copy_job;

static void copy_span(void *context, size_t begin, size_t end)
{
    const copy_job *job = context;
    memcpy(job->dst + begin, job->src + begin, end - begin);
}

void gm_workers_copy(gm_workers *pool, void *dst, const void *src, size_t bytes)
{
    copy_job job = {.dst = dst, .src = src};
    gm_workers_for(pool, bytes, GM_COPY_GRAIN, copy_span, &job);
}
