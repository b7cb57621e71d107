/* workers.h - a fixed pool of threads for host compute (Adam, norms, parallel touch).
 *
 * gm_workers_for() splits [0, n) into contiguous spans of at least `grain` items, runs them on the
 * pool and on the calling thread, and returns when all are done.  The result of a job must not
 * depend on how the range was split.  One caller at a time per pool (a mutex makes others wait).
 * Own threads, not OpenMP: torchrun sets OMP_NUM_THREADS=1, and torch brings a libgomp of its
 * own. */
#pragma once

#include "base/base.h"

typedef struct gm_workers gm_workers; /* opaque; owns its threads */
typedef void (*gm_span_fn)(void *context, size_t begin, size_t end);

/* Threads of a pool for which no number is given: GEMINI_THREADS if it is set, else the cores that
 * this process may use (sched_getaffinity), or as many as its control groups' quota is worth, if
 * less. */
gm_status gm_workers_default(unsigned *out);
/* n_threads 0: gm_workers_default(). */
gm_status gm_workers_new(unsigned n_threads, gm_workers **out);
/* A pool whose threads, n_threads of them (0: one for each core), run on these cores only, each on
 * any of them.  The calling thread keeps its own cores and therefore only waits, unless the job is
 * too small to be split: what a job touches first lies on the cores' node.  n_cores 0:
 * gm_workers_new().  Where the system refuses to bind threads they run anywhere, and
 * gm_workers_is_bound() is false. */
gm_status gm_workers_new_on(const unsigned *cores, size_t n_cores, unsigned n_threads,
                            gm_workers **out);
bool gm_workers_is_bound(const gm_workers *pool);  /* NULL is not */
void gm_workers_free(gm_workers *pool);            /* joins; NULL is fine */
unsigned gm_workers_count(const gm_workers *pool); /* NULL counts as 1 */
/* pool NULL: runs on the calling thread. */
void gm_workers_for(gm_workers *pool, size_t n, size_t grain, gm_span_fn fn, void *context);
enum { GM_COPY_GRAIN = 256 << 10 }; /* bytes: the least copy that is worth a second thread */
/* memcpy by all of them. */
void gm_workers_copy(gm_workers *pool, void *dst, const void *src, size_t bytes);
