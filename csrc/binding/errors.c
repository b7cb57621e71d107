/* errors.c - the translation of status codes into exceptions, and keeping one while something else
 * runs. */
#include "binding/common.h"

static PyObject *gemini_error, *memory_error, *device_error;
static PyObject *explainer; /* NULL: none */

/* What the ranks know of a failure in the place of the text; takes the reference. */
static PyObject *explained(PyObject *text, PyObject **type)
{
    PyObject *told = PyObject_CallFunctionObjArgs(explainer, text, NULL);
    if (!told) {
        PyErr_Clear();
    } else if (PyUnicode_Check(told)) {
        *type = gemini_error;
        Py_DECREF(text);
        return told;
    }
    Py_XDECREF(told);
    return text;
}

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
    if (text && explainer && (status == GM_ERR_STATE || status == GM_ERR_DEVICE)) {
        text = explained(text, &type);
    }
    if (text) {
        PyErr_SetObject(type, text);
        Py_DECREF(text);
    }
    return NULL;
}

static PyObject *explain_by(PyObject *Py_UNUSED(module), PyObject *callable)
{
    Py_XDECREF(explainer);
    explainer = Py_NewRef(callable);
    return Py_NewRef(Py_None);
}

PyMethodDef gm_py_error_methods[] = {
    GM_PY_METHOD("explain_by", explain_by, METH_O,
                 "explain_by(callable): it gets the text of each failure that may be about other "
                 "ranks, and gives the one that is raised, or None"),
    {NULL, NULL, 0, NULL},
};

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
