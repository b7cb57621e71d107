/* core.c - what every method of a Core begins and ends with: its engine, its arguments, its result; and the
 * numbers that Python has by name. */
#include "binding/core.h"

#include <stdlib.h>

#include "binding/engine.h"

PyTypeObject *gm_py_core_type;

gm_engine *gm_py_engine_of(core *self)
{
    if (!self->engine) {
        (void)GM_FAIL(GM_ERR_STATE, "this engine is closed: call gemini_strategy.manage() again");
        gm_py_raise(GM_ERR_STATE);
    }
    return self->engine;
}

bool gm_py_core_is_closed(PyObject *object)
{
    return !object || Py_TYPE(object) != gm_py_core_type || !((core *)object)->engine;
}

gm_engine *gm_py_core_engine(PyObject *object)
{
    if (!object || Py_TYPE(object) != gm_py_core_type) {
        PyErr_SetString(PyExc_TypeError, "a Core is wanted");
        return NULL;
    }
    return gm_py_engine_of((core *)object);
}

/* A sequence of non-negative integers; *out has room for one more than *out_n. */
int gm_py_parse_ids(PyObject *sequence, uint32_t **out, uint32_t *out_n)
{
    Py_ssize_t n = PySequence_Size(sequence);
    uint32_t *ids = n < 0 ? NULL : calloc((size_t)n + 1, sizeof *ids);
    if (!ids) {
        if (n >= 0) {
            PyErr_NoMemory();
        }
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PySequence_GetItem(sequence, i);
        unsigned long id = item ? PyLong_AsUnsignedLong(item) : 0;
        Py_XDECREF(item);
        if (!item || PyErr_Occurred()) {
            free(ids);
            return -1;
        }
        ids[i] = (uint32_t)id;
    }
    *out = ids;
    *out_n = (uint32_t)n;
    return 0;
}

int gm_py_parse_numbers(const char *name, PyObject *const *args, Py_ssize_t n_args,
                        Py_ssize_t n_wanted, unsigned long long *out)
{
    if (n_args != n_wanted) {
        PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", name, n_wanted, n_args);
        return -1;
    }
    for (Py_ssize_t i = 0; i < n_args; i++) {
        out[i] = PyLong_AsUnsignedLongLong(args[i]);
        if (out[i] == (unsigned long long)-1 && PyErr_Occurred()) {
            return -1;
        }
    }
    return 0;
}

PyObject *gm_py_finish(gm_status status)
{
    if (status != GM_OK) {
        return gm_py_raise(status);
    }
    Py_RETURN_NONE;
}

/* Numbers that Python code gives back to us, by name. */
int gm_py_add_numbers(PyObject *module, const char *name, const char *const *names, int n)
{
    PyObject *dict = PyDict_New();
    for (int i = 0; dict && i < n; i++) {
        PyObject *number = PyLong_FromLong(i);
        if (!number || PyDict_SetItemString(dict, names[i], number) < 0) {
            Py_CLEAR(dict);
        }
        Py_XDECREF(number);
    }
    int result = dict ? PyModule_AddObjectRef(module, name, dict) : -1;
    Py_XDECREF(dict);
    return result;
}
