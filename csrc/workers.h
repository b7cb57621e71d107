/* workers.h - a fixed pool of threads for host compute (Adam, norms, parallel touch).
 *
 * gm_workers_for() splits [0, n) into contiguous spans of at least `grain` items, runs them on the
 * pool and on the calling thread, and returns when all are done.  The result of a job must not
 * depend on how the range was split.  One caller at a time per pool (a mutex makes others wait).
 * Own threads, not OpenMP: torchrun sets OMP_NUM_THREADS=1, and torch brings a libgomp of its own. */
#ifndef GM_WORKERS_H
#define GM_WORKERS_H

#include "base.h"

typedef struct gm_workers gm_workers; /* opaque; owns its threads */
typedef void (*gm_span_fn)(void *context, size_t begin, size_t end);

/* n_threads 0: the cores this process may use (sched_getaffinity), or GEMINI_THREADS if set. */
gm_status gm_workers_new(unsigned n_threads, gm_workers **out);
void gm_workers_free(gm_workers *pool);            /* joins; NULL is fine */
unsigned gm_workers_count(const gm_workers *pool); /* NULL counts as 1 */
/* pool NULL: runs on the calling thread. */
void gm_workers_for(gm_workers *pool, size_t n, size_t grain, gm_span_fn fn, void *context);

#endif
