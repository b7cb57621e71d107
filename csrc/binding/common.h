/* common.h - what the binding files share: the limited API, one translator from status
 * to exception, and the method tables that module.c adds to the module `gemini_strategy._C`.
 * The binding holds no policy: parse arguments, call plain C, translate the result. */
#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "base/base.h"

/* Sets the Python exception for a failed status (text of gm_last_error()) and returns NULL. */
PyObject *gm_py_raise(gm_status status);
extern PyMethodDef gm_py_error_methods[];
PyObject *gm_py_finish(gm_status status); /* None, or the exception */
int gm_py_errors_init(void); /* before any of these; -1 with an exception set on failure */
/* The pending exception, which pends no more; NULL: there is none.  And back again, in place of any
 * other but an interrupt (KeyboardInterrupt, SystemExit), which gets it as its context; NULL: what
 * pends stays. */
PyObject *gm_py_set_aside(void);
void gm_py_put_back(PyObject *error);
/* signals.c: calls a function in which no handler of a signal runs.  *out_error: what the handler
 * of one that had come before has raised; the caller's. */
PyObject *gm_py_call_uninterrupted(PyObject *function, PyObject *args, PyObject **out_error);
/* The process-wide worker pool that host arithmetic uses (made at first use); NULL with an
 * exception set on failure. */
struct gm_workers;
struct gm_workers *gm_py_workers(void);
/* A pool on this process's share of the host, which host_use() sets; n_threads 0: the share's
 * number. */
gm_status gm_py_workers_new(unsigned n_threads, struct gm_workers **out); /* host.c */

/* As GM_FAIL_IF, in a function that gives a pointer: as PyErr_Format, and NULL. */
#define GM_PY_FAIL_IF(condition, type, ...)    \
    do {                                       \
        if (condition) {                       \
            PyErr_Format((type), __VA_ARGS__); \
            return NULL;                       \
        }                                      \
    } while (0)

/* As GM_TRY, in such a function: gives NULL on, with the exception that is set. */
#define GM_PY_TRY(pointer) \
    do {                   \
        if (!(pointer)) {  \
            return NULL;   \
        }                  \
    } while (0)

/* Runs a statement without the GIL. */
#define GM_NO_GIL(...)         \
    do {                       \
        Py_BEGIN_ALLOW_THREADS \
        __VA_ARGS__;           \
        Py_END_ALLOW_THREADS   \
    } while (0)
/* The same about a gm_engine; close() on another thread must not take the engine away. */
#define GM_WITHOUT_GIL(engine, ...)                      \
    do {                                                 \
        gm_engine_ref(engine);                           \
        GM_NO_GIL(__VA_ARGS__; gm_engine_unref(engine)); \
    } while (0)

#define GM_PY_METHOD(name, function, flags, doc) \
    {name, (PyCFunction)(void (*)(void))(function), flags, doc}

extern PyMethodDef gm_py_arith_methods[];  /* arith.c */
extern PyMethodDef gm_py_host_methods[];   /* host.c */
extern PyMethodDef gm_py_signal_methods[]; /* signals.c */

/* values.c */

/* As PyArg_ParseTuple: 1, or 0 with an exception set. */
typedef int (*gm_py_parse)(PyObject *item, void *out);
/* What `parse` makes of each item of a sequence, with room for one more; free() it.  NULL with an
 * exception set. */
void *gm_py_array(PyObject *sequence, size_t item_bytes, gm_py_parse parse, size_t *out_n);
/* The same for non-negative integers. */
uint32_t *gm_py_ids(PyObject *sequence, size_t *out_n);

typedef struct gm_py_count {
    const char *key;
    unsigned long long value;
} gm_py_count;

typedef struct gm_py_figure {
    const char *key;
    double value;
} gm_py_figure;

/* Puts `value` (a new reference, or NULL with an exception set) under `key` and gives the reference
 * away.  This and the following: -1 with an exception set on failure. */
int gm_py_put(PyObject *dict, const char *key, PyObject *value);
int gm_py_put_counts(PyObject *dict, const gm_py_count *counts, size_t n);
int gm_py_put_figures(PyObject *dict, const gm_py_figure *figures, size_t n);
/* Makes a type that lives as long as the process, and adds it under its name; NULL with an
 * exception set on failure. */
PyTypeObject *gm_py_add_type(PyObject *module, const char *name, size_t bytes, unsigned flags,
                             PyType_Slot *parts);
/* The list with one item more (a new reference, or NULL with an exception set), which is given
 * away; as gm_py_unless. */
PyObject *gm_py_append(PyObject *list, PyObject *item);
PyObject *gm_py_text(const char *text); /* which may be cut, inside a character */
/* Adds a dict of these names, each with its place among them. */
int gm_py_add_numbers(PyObject *module, const char *name, const char *const *names, int n);
/* The object; NULL and no object where something has failed. */
PyObject *gm_py_unless(PyObject *object, int failed);
/* What the dealloc of a type of ours ends with. */
void gm_py_free(PyObject *object);
#define GM_PY_N(array) (sizeof(array) / sizeof((array)[0]))

int gm_py_rates_init(PyObject *module); /* rates.c: its function and RATES */
