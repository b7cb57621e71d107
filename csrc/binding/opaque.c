/* opaque.c - updates that Python makes (engine/opaque.c): what the engine calls, and where their
 * bytes are.
 *
 * An interrupt (Ctrl-C) neither ends an update in its middle nor is it lost: it comes out where
 * Python goes on behind the call that has made the engine update. */
#include <signal.h>

#include "binding/core.h"
#include "binding/unit.h"

/* What pends, as errors say it. */
static gm_status fail_as_raised(void)
{
    PyObject *error = gm_py_set_aside();
    PyObject *text = error ? PyObject_Str(error) : NULL;
    if (text && PyObject_Size(text) == 0) { /* an interrupt has none */
        Py_DECREF(text);
        text = PyObject_Repr(error);
    }
    const char *said = text ? PyUnicode_AsUTF8AndSize(text, NULL) : NULL;
    gm_status status =
        GM_FAIL(GM_ERR_STATE, "the optimizer's step() failed: %s", said ? said : "no text");
    PyErr_Clear();
    Py_XDECREF(text);
    Py_XDECREF(error);
    return status;
}

gm_status gm_py_run_opaque(void *context, const gm_opaque_call *call, bool *wrote_grads)
{
    const core *self = context;
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *ids = PyList_New(0), *error = NULL;
    for (uint32_t i = 0; ids && i < call->n_params; i++) {
        ids = gm_py_append(ids, PyLong_FromUnsignedLong(call->params[i]));
    }
    PyObject *args = ids ? Py_BuildValue("(OdKKi)", ids, (double)call->grad_scale,
                                         (unsigned long long)(uintptr_t)call->late_scale,
                                         (unsigned long long)call->stream, (int)call->how)
                         : NULL;
    int truth = gm_py_is_true(args ? gm_py_call_uninterrupted(self->opaque, args, &error) : NULL);
    Py_XDECREF(args);
    Py_XDECREF(ids);
    *wrote_grads = truth > 0;
    gm_status status = truth < 0 ? fail_as_raised() : GM_OK;
    if (error) { /* it had come already, and its handler has run: again, behind the engine */
        (void)PyErr_SetInterruptEx(SIGINT);
        Py_DECREF(error);
    }
    PyGILState_Release(state);
    return status;
}

static PyObject *core_opaque_place(core *self, PyObject *const *args, Py_ssize_t n_args)
{
    unsigned long long v[1];
    const gm_engine *engine = gm_py_begin(self, "opaque_place", args, n_args, 1, v);
    GM_PY_FAIL_IF(engine && *v >= self->n_params, PyExc_ValueError, "parameter %llu does not exist",
                  *v);
    GM_PY_TRY(engine);
    gm_opaque_place at;
    gm_engine_opaque_place(engine, (uint32_t)*v, &at);
    return Py_BuildValue("KKKK", (unsigned long long)at.weight, (unsigned long long)at.low,
                         (unsigned long long)at.grad, (unsigned long long)at.states);
}

GM_PY_CALL_STATUS(states_read, 4,
                  gm_engine_states_read(engine, (uint32_t)v[0], v[1], v[2],
                                        (void *)(uintptr_t)v[3]))
GM_PY_CALL_STATUS(states_write, 5,
                  gm_engine_states_write(engine, (uint32_t)v[0], v[1], v[2],
                                         (const void *)(uintptr_t)v[3], v[4]))

PyMethodDef gm_py_opaque_methods[] = {
    GM_CORE_METHOD(opaque_place, FASTCALL,
                   "(param) -> addresses of its weight, low part, gradient and states"),
    GM_CORE_METHOD(states_read, FASTCALL, "(param, first, n, host_address), in bytes"),
    GM_CORE_METHOD(states_write, FASTCALL, "(param, first, n, host_address, stream), in bytes"),
    {NULL, NULL, 0, NULL},
};
