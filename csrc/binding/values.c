/* values.c - arrays of what Python gives, dicts of what it gets, and the end of an object. */
#include "binding/common.h"

#include <stdlib.h>
#include <string.h>

void *gm_py_array(PyObject *sequence, size_t item_bytes, gm_py_parse parse, size_t *out_n)
{
    Py_ssize_t n = PySequence_Size(sequence);
    char *array = n < 0 ? NULL : calloc((size_t)n + 1, item_bytes);
    if (!array) {
        return n < 0 ? NULL : PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PySequence_GetItem(sequence, i);
        int is_parsed = item && parse(item, array + (size_t)i * item_bytes);
        Py_XDECREF(item);
        if (!is_parsed) {
            free(array);
            return NULL;
        }
    }
    *out_n = (size_t)n;
    return array;
}

static int parse_id(PyObject *item, void *out)
{
    unsigned long id = PyLong_AsUnsignedLong(item);
    *(uint32_t *)out = (uint32_t)id;
    return !PyErr_Occurred();
}

uint32_t *gm_py_ids(PyObject *sequence, size_t *out_n)
{
    return gm_py_array(sequence, sizeof(uint32_t), parse_id, out_n);
}

int gm_py_put(PyObject *dict, const char *key, PyObject *value)
{
    int result = value ? PyDict_SetItemString(dict, key, value) : -1;
    Py_XDECREF(value);
    return result;
}

int gm_py_put_counts(PyObject *dict, const gm_py_count *counts, size_t n)
{
    int result = 0;
    for (size_t i = 0; i < n && result == 0; i++) {
        result = gm_py_put(dict, counts[i].key, PyLong_FromUnsignedLongLong(counts[i].value));
    }
    return result;
}

int gm_py_put_figures(PyObject *dict, const gm_py_figure *figures, size_t n)
{
    int result = 0;
    for (size_t i = 0; i < n && result == 0; i++) {
        result = gm_py_put(dict, figures[i].key, PyFloat_FromDouble(figures[i].value));
    }
    return result;
}

PyObject *gm_py_unless(PyObject *object, int failed)
{
    if (failed) {
        Py_CLEAR(object);
    }
    return object;
}

PyObject *gm_py_append(PyObject *list, PyObject *item)
{
    int result = list && item ? PyList_Append(list, item) : -1;
    Py_XDECREF(item);
    return gm_py_unless(list, result < 0);
}

PyObject *gm_py_text(const char *text)
{
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

PyTypeObject *gm_py_add_type(PyObject *module, const char *name, size_t bytes, unsigned flags,
                             PyType_Slot *parts)
{
    PyType_Spec spec = {name, (int)bytes, 0, (unsigned)Py_TPFLAGS_DEFAULT | flags, parts};
    PyTypeObject *type = (PyTypeObject *)PyType_FromSpec(&spec);
    return type && PyModule_AddType(module, type) == 0 ? type : NULL;
}

int gm_py_add_numbers(PyObject *module, const char *name, const char *const *names, int n)
{
    PyObject *dict = PyDict_New();
    int result = dict ? 0 : -1;
    for (int i = 0; i < n && result == 0; i++) {
        result = gm_py_put(dict, names[i], PyLong_FromLong(i));
    }
    result = result < 0 ? result : PyModule_AddObjectRef(module, name, dict);
    Py_XDECREF(dict);
    return result;
}

void gm_py_free(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF((PyObject *)type);
}
