/* test_workers.c - every item runs exactly once, from many callers, nested, and after a fork. */
#define _GNU_SOURCE /* sched_setaffinity, pthread_getaffinity_np */
#include "base/workers.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "base/topology.h"

enum { MOST_ITEMS = 5000 };

typedef struct count_job {
    unsigned char n_runs[MOST_ITEMS];
    size_t grain, n;
    gm_workers *nested; /* a pool to start a job on from inside the job, or NULL */
} count_job;

static void add_one(void *context, size_t begin, size_t end)
{
    atomic_fetch_add((atomic_size_t *)context, end - begin);
}

static void count_span(void *context, size_t begin, size_t end)
{
    count_job *job = context;
    CHECK(begin < end && end <= job->n);
    CHECK(end - begin >= job->grain || (begin == 0 && end == job->n));
    for (size_t i = begin; i < end; i++) {
        job->n_runs[i]++;
    }
    if (job->nested) {
        atomic_size_t sum = 0;
        gm_workers_for(job->nested, 1000, 1, add_one, &sum);
        CHECK(atomic_load(&sum) == 1000);
    }
}

static void check_every_item_runs_once(gm_workers *pool, size_t n, size_t grain, gm_workers *nested)
{
    static _Thread_local count_job job;
    memset(&job, 0, sizeof job);
    job.n = n;
    job.grain = grain ? grain : 1;
    job.nested = nested;
    gm_workers_for(pool, n, grain, count_span, &job);
    for (size_t i = 0; i < MOST_ITEMS; i++) {
        CHECK(job.n_runs[i] == (i < n));
    }
}

static void check_sizes(gm_workers *pool)
{
    static const size_t sizes[] = {0, 1, 2, 3, 7, 64, 100, 1023, 4999, MOST_ITEMS};
    static const size_t grains[] = {0, 1, 2, 5, 64, 2500, 4999, 1 << 20};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (size_t j = 0; j < sizeof grains / sizeof *grains; j++) {
            check_every_item_runs_once(pool, sizes[i], grains[j], NULL);
            check_every_item_runs_once(pool, sizes[i], grains[j], pool);
        }
    }
}

static void *caller_thread(void *pool)
{
    for (int i = 0; i < 500; i++) {
        check_every_item_runs_once(pool, 1 + (size_t)i * 7 % 900, 1, NULL);
    }
    return NULL;
}

static void check_many_callers(gm_workers *pool)
{
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) {
        CHECK(pthread_create(&threads[i], NULL, caller_thread, pool) == 0);
    }
    for (int i = 0; i < 4; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
}

#ifndef __SANITIZE_THREAD__ /* which takes the parent's threads for threads of the child */
/* A child has no threads of the pool: its jobs run inline, and nothing hangs. */
static void check_fork(gm_workers *pool)
{
    pthread_t busy;
    CHECK(pthread_create(&busy, NULL, caller_thread, pool) == 0); /* the locks are in use */
    for (int i = 0; i < 20; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            alarm(20);
            CHECK(gm_workers_count(pool) == 1);
            check_every_item_runs_once(pool, 1000, 1, NULL);
            gm_workers_free(pool);
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    CHECK(pthread_join(busy, NULL) == 0);
}
#endif

static void check_bad_setting(const char *value)
{
    gm_workers *pool = NULL;
    setenv("GEMINI_THREADS", value, 1);
    CHECK(gm_workers_new(0, &pool) == GM_ERR_ARG && !pool);
    CHECK(strstr(gm_last_error(), "GEMINI_THREADS") && strstr(gm_last_error(), value));
}

static void check_settings(void)
{
    check_bad_setting("0");
    check_bad_setting("-1");
    check_bad_setting("two");
    check_bad_setting("2 ");
    check_bad_setting("1025");
    check_bad_setting("99999999999999999999");
    gm_workers *pool = NULL;
    setenv("GEMINI_THREADS", "3", 1);
    CHECK_OK(gm_workers_new(0, &pool));
    CHECK(gm_workers_count(pool) == 3);
    gm_workers_free(pool);
    CHECK_OK(gm_workers_new(2, &pool)); /* a number in the call stands above the environment */
    CHECK(gm_workers_count(pool) == 2);
    gm_workers_free(pool);
    setenv("GEMINI_THREADS", "", 1);
    CHECK_OK(gm_workers_new(0, &pool));
    CHECK(gm_workers_count(pool) >= 1);
    gm_workers_free(pool);
    unsetenv("GEMINI_THREADS");
    CHECK(gm_workers_new(1025, &pool) == GM_ERR_ARG);

    cpu_set_t one, before;
    CHECK(sched_getaffinity(0, sizeof before, &before) == 0);
    size_t first = 0;
    while (!CPU_ISSET(first, &before)) {
        first++;
    }
    CPU_ZERO(&one);
    CPU_SET(first, &one);
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
    CHECK_OK(gm_workers_new(0, &pool));
    CHECK(gm_workers_count(pool) == 1);
    gm_workers_free(pool);
    CHECK(sched_setaffinity(0, sizeof before, &before) == 0);
}

/* ---- pools with cores of their own ---- */

typedef struct place_job {
    pthread_t caller;
    const cpu_set_t *allowed;
    atomic_size_t n_items, n_spans;
    atomic_bool is_by_caller, is_elsewhere;
} place_job;

static void note_place(void *context, size_t begin, size_t end)
{
    place_job *job = context;
    cpu_set_t mine;
    CHECK(pthread_getaffinity_np(pthread_self(), sizeof mine, &mine) == 0);
    if (!CPU_EQUAL(&mine, job->allowed) || !CPU_ISSET((size_t)sched_getcpu(), job->allowed)) {
        atomic_store(&job->is_elsewhere, true);
    }
    if (pthread_equal(pthread_self(), job->caller)) {
        atomic_store(&job->is_by_caller, true);
    }
    atomic_fetch_add(&job->n_items, end - begin);
    atomic_fetch_add(&job->n_spans, 1);
}

static void check_places(const unsigned *cores, size_t n_cores, unsigned n_threads)
{
    cpu_set_t allowed, before, after;
    CPU_ZERO(&allowed);
    for (size_t i = 0; i < n_cores; i++) {
        CPU_SET(cores[i], &allowed);
    }
    CHECK(pthread_getaffinity_np(pthread_self(), sizeof before, &before) == 0);
    gm_workers *pool;
    CHECK_OK(gm_workers_new_on(cores, n_cores, n_threads, &pool));
    CHECK(gm_workers_count(pool) == (n_threads ? n_threads : n_cores));
    CHECK(gm_workers_is_bound(pool));
    place_job job = {.caller = pthread_self(), .allowed = &allowed};
    for (int i = 0; i < 100; i++) {
        atomic_store(&job.n_items, 0);
        gm_workers_for(pool, 1000, 1, note_place, &job);
        CHECK(atomic_load(&job.n_items) == 1000);
    }
    CHECK(atomic_load(&job.n_spans) > 100); /* it was split */
    CHECK(!atomic_load(&job.is_by_caller) && !atomic_load(&job.is_elsewhere));
    CHECK(pthread_getaffinity_np(pthread_self(), sizeof after, &after) == 0);
    CHECK(CPU_EQUAL(&before, &after)); /* the caller's own binding is the caller's */
    check_sizes(pool);
    check_many_callers(pool);
#ifndef __SANITIZE_THREAD__
    check_fork(pool);
#endif
    gm_workers_free(pool);
}

static void check_bound_pools(void)
{
    unsigned *mask;
    size_t n_mask;
    CHECK_OK(gm_topology_mask(&mask, &n_mask));
    check_places(mask, n_mask, 0);
    check_places(mask, n_mask, 3);
    check_places(mask, 1, 0);
    check_places(mask + n_mask - 1, 1, 2); /* more threads than cores */

    cpu_set_t one, before; /* the launcher bound this thread; its pool was given another core */
    CHECK(sched_getaffinity(0, sizeof before, &before) == 0);
    CPU_ZERO(&one);
    CPU_SET(mask[0], &one);
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
    check_places(mask + n_mask - 1, 1, 0);
    CHECK(sched_setaffinity(0, sizeof before, &before) == 0);

    gm_workers *pool = NULL;
    CHECK_OK(gm_workers_new_on(NULL, 0, 2, &pool)); /* no cores: a pool like any other */
    CHECK(gm_workers_count(pool) == 2 && !gm_workers_is_bound(pool));
    gm_workers_free(pool);
    pool = NULL;
    CHECK(gm_workers_new_on(mask, 1, 1025, &pool) == GM_ERR_ARG && !pool);

    /* Cores that are not there: the threads run anywhere, and the work is done. */
    const unsigned absent[] = {60001, 60002};
    CHECK_OK(gm_workers_new_on(absent, 2, 0, &pool));
    CHECK(gm_workers_count(pool) == 2 && !gm_workers_is_bound(pool));
    check_sizes(pool);
    gm_workers_free(pool);
    CHECK(!gm_workers_is_bound(NULL));
    free(mask);
}

static void check_copies(gm_workers *pool)
{
    enum { BYTES = (5 << 20) + 3 };
    static unsigned char from[BYTES + 1], to[BYTES + 2];
    for (size_t i = 0; i < BYTES; i++) {
        from[i] = (unsigned char)(i * 31 + i / 4099);
    }
    static const size_t sizes[] = {0, 1, 4096, (1 << 20) + 1, BYTES};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        memset(to, 0xee, sizeof to);
        gm_workers_copy(pool, to + 1, from, sizes[i]);
        CHECK(memcmp(to + 1, from, sizes[i]) == 0);
        CHECK(to[0] == 0xee && to[sizes[i] + 1] == 0xee);
    }
}

int main(void)
{
    alarm(300); /* a hang is a failure */
    check_sizes(NULL);
    check_copies(NULL);
    CHECK(gm_workers_count(NULL) == 1);
    gm_workers_free(NULL);
    check_settings();
    check_bound_pools();
    for (unsigned n_threads = 1; n_threads <= 5; n_threads++) {
        gm_workers *pool;
        CHECK_OK(gm_workers_new(n_threads, &pool));
        CHECK(gm_workers_count(pool) == n_threads);
        check_sizes(pool);
        check_copies(pool);
        check_many_callers(pool);
#ifndef __SANITIZE_THREAD__
        check_fork(pool);
#endif
        gm_workers_free(pool);
    }
    for (int i = 0; i < 100; i++) { /* freed while the threads are still on their way to sleep */
        gm_workers *pool;
        CHECK_OK(gm_workers_new(3, &pool));
        if (i % 2) {
            check_every_item_runs_once(pool, 100, 1, NULL);
        }
        gm_workers_free(pool);
    }
    puts("test_workers: ok");
    return 0;
}
