/* save.c - methods of Core for the thread that writes a checkpoint while training goes on. */
#include "binding/core.h"

#include <stdlib.h>

static PyObject *core_save_begin(core *self, PyObject *args)
{
    PyObject *sequence;
    unsigned long long limit;
    size_t n;
    gm_engine *engine = gm_py_engine_of(self);
    bool is_parsed = engine && PyArg_ParseTuple(args, "OK:save_begin", &sequence, &limit);
    uint32_t *ids = is_parsed ? gm_py_ids(sequence, &n) : NULL;
    GM_PY_TRY(ids);
    gm_status status;
    GM_WITHOUT_GIL(engine, status = gm_engine_save_begin(engine, ids, (uint32_t)n, (size_t)limit));
    free(ids);
    return gm_py_finish(status);
}

static PyObject *number_of(uint32_t chunk)
{
    return PyLong_FromLongLong(chunk == UINT32_MAX ? -1 : (long long)chunk);
}

static PyObject *numbers_of(gm_saving_use use)
{
    return Py_BuildValue("KKK", (unsigned long long)use.copied, (unsigned long long)use.most,
                         (unsigned long long)use.n_waits);
}

GM_PY_CALL_OUT(save_read, 5, bool, PyBool_FromLong,
               gm_engine_save_read(engine, (uint32_t)v[0], (gm_field)v[1], v[2], v[3],
                                   (void *)(uintptr_t)v[4], &out))
GM_PY_CALL_OUT(save_states, 4, bool, PyBool_FromLong,
               gm_engine_save_states(engine, (uint32_t)v[0], v[1], v[2], (void *)(uintptr_t)v[3],
                                     &out))
GM_PY_CALL(save_next, 0, uint32_t, number_of, gm_engine_save_next(engine))
GM_PY_CALL_STATUS(save_done, 1, gm_engine_save_done(engine, (uint32_t)v[0]))
GM_PY_CALL_OUT(save_end, 0, gm_saving_use, numbers_of, gm_engine_save_end(engine, &out))

PyMethodDef gm_py_save_methods[] = {
    GM_CORE_METHOD(save_begin, VARARGS, "(params, limit)"),
    GM_CORE_METHOD(save_read, FASTCALL, "(param, field, first, n, host_address) -> bool"),
    GM_CORE_METHOD(save_states, FASTCALL, "(param, first, n, host_address) -> bool; in bytes"),
    GM_CORE_METHOD(save_next, FASTCALL, "() -> a chunk that comes first, or -1"),
    GM_CORE_METHOD(save_done, FASTCALL, "(chunk)"),
    GM_CORE_METHOD(save_end, FASTCALL,
                   "() -> (bytes copied, most at one time, changes that waited)"),
    {NULL, NULL, 0, NULL},
};
