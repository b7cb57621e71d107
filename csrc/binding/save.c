/* save.c - methods of Core for the thread that writes a checkpoint while training goes on. */
#include "binding/core.h"

#include <stdlib.h>

static PyObject *core_save_begin(core *self, PyObject *args)
{
    PyObject *sequence;
    unsigned long long limit;
    size_t n;
    gm_engine *engine = gm_py_engine_of(self);
    if (!engine || !PyArg_ParseTuple(args, "OK:save_begin", &sequence, &limit)) {
        return NULL;
    }
    uint32_t *ids = gm_py_ids(sequence, &n);
    if (!ids) {
        return NULL;
    }
    gm_status status;
    GM_WITHOUT_GIL(engine, status = gm_engine_save_begin(engine, ids, (uint32_t)n, (size_t)limit));
    free(ids);
    return gm_py_finish(status);
}

static PyObject *core_save_read(core *self, PyObject *const *args, Py_ssize_t n_args)
{
    unsigned long long v[5];
    gm_engine *engine = gm_py_begin(self, "save_read", args, n_args, 5, v);
    if (!engine) {
        return NULL;
    }
    bool is_read;
    gm_status status;
    GM_WITHOUT_GIL(engine,
                   status = gm_engine_save_read(engine, (uint32_t)v[0], (gm_field)v[1], v[2], v[3],
                                                (void *)(uintptr_t)v[4], &is_read));
    return status == GM_OK ? PyBool_FromLong(is_read) : gm_py_raise(status);
}

static PyObject *number_of(uint32_t chunk)
{
    return PyLong_FromLongLong(chunk == UINT32_MAX ? -1 : (long long)chunk);
}

GM_PY_CALL(save_next, 0, uint32_t, number_of, gm_engine_save_next(engine))
GM_PY_CALL_STATUS(save_done, 1, gm_engine_save_done(engine, (uint32_t)v[0]))

static PyObject *core_save_end(core *self, PyObject *Py_UNUSED(unused))
{
    gm_engine *engine = gm_py_engine_of(self);
    if (!engine) {
        return NULL;
    }
    gm_saving_use use;
    gm_status status;
    GM_WITHOUT_GIL(engine, status = gm_engine_save_end(engine, &use));
    return status == GM_OK
               ? Py_BuildValue("KKK", (unsigned long long)use.copied, (unsigned long long)use.most,
                               (unsigned long long)use.n_waits)
               : gm_py_raise(status);
}

PyMethodDef gm_py_save_methods[] = {
    GM_PY_METHOD("save_begin", core_save_begin, METH_VARARGS, "save_begin(params, limit)"),
    GM_PY_METHOD("save_read", core_save_read, METH_FASTCALL,
                 "save_read(param, field, first, n, host_address) -> bool"),
    GM_PY_METHOD("save_next", core_save_next, METH_FASTCALL,
                 "save_next() -> a chunk that comes first, or -1"),
    GM_PY_METHOD("save_done", core_save_done, METH_FASTCALL, "save_done(chunk)"),
    GM_PY_METHOD("save_end", core_save_end, METH_NOARGS,
                 "save_end() -> (bytes copied, most at one time, changes that waited)"),
    {NULL, NULL, 0, NULL},
};
