/* core.h - the Python type Core, for the files that implement its methods. */
#ifndef GM_PY_CORE_H
#define GM_PY_CORE_H

#include "binding/common.h"

#include <stdatomic.h>

#include "engine/engine.h"
#include "base/workers.h"

/* What others of this process hold on the device: torch's pool, counted by our allocator, and the rest
 * (driver context, modules, memory from before), told by Python. */
typedef struct outside {
    int ordinal; /* -1 on the host device */
    atomic_bool
        answers; /* for torch's pool: it counts here, and asks this engine before it grows */
    atomic_size_t external_bytes;
} outside;

typedef struct core {
    PyObject_HEAD gm_engine *engine; /* NULL after close() */
    gm_workers *workers;             /* owned when the caller chose a thread count, else NULL */
    outside *outside;
    gm_device *chaos;   /* the engine's, for its faults; NULL on every other device */
    gm_device *paper;   /* the engine's, if it is one on paper (device/paper.h), for its clock */
    PyObject *comms[2]; /* shards', replicas'; taken (comm.h) until close(), or NULL */
    uint32_t n_params;
} core;

extern PyTypeObject *gm_py_core_type;   /* engine.c makes it */
gm_engine *gm_py_engine_of(core *self); /* NULL with an exception after close() */
/* A sequence of non-negative integers; *out has room for one more than *out_n. */
int gm_py_parse_ids(PyObject *sequence, uint32_t **out, uint32_t *out_n);
int gm_py_parse_numbers(const char *name, PyObject *const *args, Py_ssize_t n_args,
                        Py_ssize_t n_wanted, unsigned long long *out);
PyObject *gm_py_finish(gm_status status); /* None, or the exception */

/* lease.c */
PyObject *gm_py_lease(core *self, PyObject *const *args, Py_ssize_t n_args);
PyObject *gm_py_lease_pin(core *self, PyObject *const *args, Py_ssize_t n_args);
PyObject *gm_py_lease_watch(core *self, PyObject *const *args, Py_ssize_t n_args);
PyObject *gm_py_lease_unwatch(core *self, PyObject *const *args, Py_ssize_t n_args);

/* step.c */
PyObject *gm_py_grad_sumsq(core *self, PyObject *args);
PyObject *gm_py_step(core *self, PyObject *args);
PyObject *gm_py_arm(core *self, PyObject *args);
PyObject *gm_py_announce(core *self, PyObject *args);
PyObject *gm_py_stats(core *self, PyObject *unused);
PyObject *gm_py_chunk_search(PyObject *module, PyObject *args);

/* save.c */
PyObject *gm_py_save_begin(core *self, PyObject *args);
PyObject *gm_py_save_read(core *self, PyObject *const *args, Py_ssize_t n_args);
PyObject *gm_py_save_next(core *self, PyObject *unused);
PyObject *gm_py_save_end(core *self, PyObject *unused);

/* room.c */
PyObject *gm_py_set_external(core *self, PyObject *const *args, Py_ssize_t n_args);
PyObject *gm_py_shed(core *self, PyObject *const *args, Py_ssize_t n_args);
PyObject *gm_py_forget_outside(core *self, PyObject *unused);
PyObject *gm_py_reserve(core *self, PyObject *const *args, Py_ssize_t n_args);
PyObject *gm_py_answer(core *self, PyObject *yes);
void gm_py_stop_answering(core *self);

/* paper.c */
PyObject *gm_py_replay(core *self, PyObject *events);
int gm_py_paper_init(PyObject *module); /* adds RECORDED: the kinds of events by name */

#endif
