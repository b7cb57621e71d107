/* common.h - what the binding files share: the limited API, one translator from status
 * to exception, and the method tables that module.c adds to the module `gemini_strategy._C`.
 * The binding holds no policy: parse arguments, call plain C, translate the result. */
#ifndef GM_PY_COMMON_H
#define GM_PY_COMMON_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "base/base.h"

/* Sets the Python exception for a failed status (text of gm_last_error()) and returns NULL. */
PyObject *gm_py_raise(gm_status status);
int gm_py_errors_init(void); /* before any of these; -1 with an exception set on failure */
/* The process-wide worker pool that host arithmetic uses (made at first use); NULL with an exception set on failure. */
struct gm_workers;
struct gm_workers *gm_py_workers(void);
/* A pool on this process's share of the host, which host_use() sets; n_threads 0: the share's number. */
gm_status gm_py_workers_new(unsigned n_threads, struct gm_workers **out); /* host.c */

/* Runs `call` of a gm_engine without the GIL; close() on another thread must not take the engine away. */
#define GM_WITHOUT_GIL(engine, result, call) \
    do {                                     \
        gm_engine_ref(engine);               \
        Py_BEGIN_ALLOW_THREADS(result)       \
        = (call);                            \
        gm_engine_unref(engine);             \
        Py_END_ALLOW_THREADS                 \
    } while (0)

extern PyMethodDef gm_py_arith_methods[]; /* arith.c */
extern PyMethodDef gm_py_host_methods[];  /* host.c */

/* core.c: adds a dict of these names, each with its place among them; -1 with an exception set on failure */
int gm_py_add_numbers(PyObject *module, const char *name, const char *const *names, int n);

int gm_py_rates_init(PyObject *module); /* rates.c: its function and RATES */

#endif
