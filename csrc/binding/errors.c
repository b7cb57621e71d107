/* errors.c - the translation of status codes into exceptions, and keeping one while something else runs. */
#include "binding/common.h"

static PyObject *gemini_error, *memory_error, *device_error;

PyObject *gm_py_raise(gm_status status)
{
    PyObject *type = PyExc_RuntimeError;
    switch (status) {
    case GM_OK: break; /* not reached: callers raise failures only */
    case GM_ERR_ARG: type = PyExc_ValueError; break;
    case GM_ERR_STATE: type = gemini_error; break;
    case GM_ERR_NOMEM: type = memory_error; break;
    case GM_ERR_DEVICE: type = device_error; break;
    case GM_ERR_UNSUPPORTED: type = PyExc_NotImplementedError; break;
    }
    PyObject *text = gm_py_text(gm_last_error());
    if (text) {
        PyErr_SetObject(type, text);
        Py_DECREF(text);
    }
    return NULL;
}

PyObject *gm_py_finish(gm_status status)
{
    return status == GM_OK ? Py_NewRef(Py_None) : gm_py_raise(status);
}

PyObject *gm_py_set_aside(void)
{
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (error && trace) {
        (void)PyException_SetTraceback(error, trace);
    }
    Py_XDECREF(type);
    Py_XDECREF(trace);
    return error;
}

void gm_py_put_back(PyObject *error)
{
    PyObject *own = error ? gm_py_set_aside() : NULL;
    if (own && !PyErr_GivenExceptionMatches(own, PyExc_Exception)) {
        PyException_SetContext(own, error); /* an interrupt comes last, as in a `finally` */
        error = own;
        own = NULL;
    }
    Py_XDECREF(own);
    if (error) {
        PyErr_Restore(Py_NewRef((PyObject *)Py_TYPE(error)), error,
                      PyException_GetTraceback(error));
    }
}

/* The exceptions are classes of gemini_strategy.errors, so that they exist without this module. */
int gm_py_errors_init(void)
{
    PyObject *errors = PyImport_ImportModule("gemini_strategy.errors");
    if (!errors) {
        return -1;
    }
    gemini_error = PyObject_GetAttrString(errors, "GeminiError");
    memory_error = PyObject_GetAttrString(errors, "GeminiMemoryError");
    device_error = PyObject_GetAttrString(errors, "GeminiDeviceError");
    Py_DECREF(errors);
    return gemini_error && memory_error && device_error ? 0 : -1;
}
