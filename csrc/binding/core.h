/* core.h - the Python type gemini_strategy._C.Core, and what the files share that implement its
 * methods. */
#pragma once

#include "binding/common.h"

#include <stdatomic.h>

#include "engine/engine.h"
#include "base/workers.h"

/* What others of this process hold on the device: torch's pool, counted by our allocator, and the
 * rest (driver context, modules, memory from before), told by Python. */
typedef struct outside {
    int ordinal;         /* -1 on the host device */
    atomic_bool answers; /* for torch's pool: it counts here, and asks before it grows */
    atomic_size_t external_bytes;
} outside;

typedef struct core {
    PyObject_HEAD gm_engine *engine; /* NULL after close() */
    gm_workers *workers;             /* owned when the caller chose a thread count, else NULL */
    outside *outside;
    gm_device *paper;   /* the engine's, if it is one on paper (device/paper.h), for its clock */
    PyObject *comms[2]; /* shards', replicas'; taken (comm.h) until close(), or NULL */
    PyObject *opaque;   /* that makes updates, (params, scale, address, stream) -> bool; or NULL */
    uint32_t n_params;
} core;

extern PyTypeObject *gm_py_core_type;    /* engine.c makes it */
int gm_py_engine_init(PyObject *module); /* adds the type; -1 with an exception set on failure */
/* A Core's engine, borrowed; NULL with an exception set when it is closed or `object` is something
 * else. */
gm_engine *gm_py_core_engine(PyObject *object);
bool gm_py_core_is_closed(PyObject *object);
gm_engine *gm_py_engine_of(core *self); /* NULL with an exception after close() */
/* The engine, and what a method is called with: `n_wanted` numbers.  NULL with an exception set. */
gm_engine *gm_py_begin(core *self, const char *name, PyObject *const *args, Py_ssize_t n_args,
                       Py_ssize_t n_wanted, unsigned long long *out);

/* A method that takes numbers, v[], at most GM_PY_MOST_NUMBERS, and calls an expression without the
 * GIL: a status, which leaves an `out` of a C type that `gives` makes a Python object of. */
enum { GM_PY_MOST_NUMBERS = 7 };
#define GM_PY_CALL_OUT(name, n_wanted, type, gives, expression)                        \
    static PyObject *core_##name(core *self, PyObject *const *args, Py_ssize_t n_args) \
    {                                                                                  \
        unsigned long long v[GM_PY_MOST_NUMBERS];                                      \
        gm_engine *engine = gm_py_begin(self, #name, args, n_args, n_wanted, v);       \
        GM_PY_TRY(engine);                                                             \
        type out;                                                                      \
        gm_status status;                                                              \
        GM_WITHOUT_GIL(engine, status = expression);                                   \
        return status == GM_OK ? gives(out) : gm_py_raise(status);                     \
    }
/* Where the expression is what `gives` gets. */
#define GM_PY_CALL(name, n_wanted, type, gives, expression) \
    GM_PY_CALL_OUT(name, n_wanted, type, gives, (out = expression, GM_OK))
/* Where that is a status. */
#define GM_PY_CALL_STATUS(name, n_wanted, expression) \
    GM_PY_CALL(name, n_wanted, gm_status, gm_py_finish, expression)
/* An entry of a table of methods: core_NAME, with the names of its arguments and what it gives. */
#define GM_CORE_METHOD(name, flags, signature) \
    GM_PY_METHOD(#name, core_##name, METH_##flags, #name signature)

/* Methods of Core that have files of their own. */
extern PyMethodDef gm_py_step_methods[], gm_py_save_methods[], gm_py_room_methods[],
    gm_py_paper_methods[], gm_py_opaque_methods[];

/* opaque.c */
gm_status gm_py_run_opaque(void *context, const gm_opaque_call *call, bool *wrote_grads);
/* step.c */
PyObject *gm_py_chunk_search(PyObject *module, PyObject *args);
/* room.c */
void gm_py_stop_answering(core *self);
/* paper.c */
int gm_py_paper_init(PyObject *module); /* adds RECORDED: the kinds of events by name */
