/* save.c - methods of Core for the thread that writes a checkpoint while training goes on. */
#include "binding/core.h"

#include <stdlib.h>

PyObject *gm_py_save_begin(core *self, PyObject *args)
{
    PyObject *sequence;
    unsigned long long limit;
    uint32_t *ids, n;
    gm_engine *engine = gm_py_engine_of(self);
    if (!engine || !PyArg_ParseTuple(args, "OK:save_begin", &sequence, &limit) ||
        gm_py_parse_ids(sequence, &ids, &n) < 0) {
        return NULL;
    }
    gm_status status;
    GM_WITHOUT_GIL(engine, status, gm_engine_save_begin(engine, ids, n, (size_t)limit));
    free(ids);
    return gm_py_finish(status);
}

PyObject *gm_py_save_read(core *self, PyObject *const *args, Py_ssize_t n_args)
{
    unsigned long long v[5];
    gm_engine *engine = gm_py_engine_of(self);
    if (!engine || gm_py_parse_numbers("save_read", args, n_args, 5, v) < 0) {
        return NULL;
    }
    bool is_read;
    gm_status status;
    GM_WITHOUT_GIL(engine, status,
                   gm_engine_save_read(engine, (uint32_t)v[0], (gm_field)v[1], v[2], v[3],
                                       (void *)(uintptr_t)v[4], &is_read));
    return status == GM_OK ? PyBool_FromLong(is_read) : gm_py_raise(status);
}

PyObject *gm_py_save_next(core *self, PyObject *Py_UNUSED(unused))
{
    gm_engine *engine = gm_py_engine_of(self);
    if (!engine) {
        return NULL;
    }
    uint32_t chunk;
    GM_WITHOUT_GIL(engine, chunk, gm_engine_save_next(engine));
    return PyLong_FromLongLong(chunk == UINT32_MAX ? -1 : (long long)chunk);
}

PyObject *gm_py_save_end(core *self, PyObject *Py_UNUSED(unused))
{
    gm_engine *engine = gm_py_engine_of(self);
    if (!engine) {
        return NULL;
    }
    gm_saving_use use;
    gm_status status;
    GM_WITHOUT_GIL(engine, status, gm_engine_save_end(engine, &use));
    return status == GM_OK
               ? Py_BuildValue("KKK", (unsigned long long)use.copied, (unsigned long long)use.most,
                               (unsigned long long)use.n_waits)
               : gm_py_raise(status);
}
