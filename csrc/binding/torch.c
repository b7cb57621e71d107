/* torch.c - the functions of torch that units, slots and nets call, and what Python calls
 * answer. */
#include "binding/unit.h"

#include <limits.h>

gm_py_torch gm_torch;

/* What a module has under a name. */
static PyObject *of_module(const char *module, const char *name)
{
    PyObject *imported = PyImport_ImportModule(module);
    PyObject *found = imported ? PyObject_GetAttrString(imported, name) : NULL;
    Py_XDECREF(imported);
    return found;
}

int gm_py_torch_init(void)
{
    static bool is_done;
    if (is_done) {
        return 0;
    }
    gm_py_torch *t = &gm_torch;
    bool is_found = true;
#define X(field, name) \
    is_found = is_found && (t->field = of_module("gemini_strategy._torch", name));
    GM_TORCH_PRIVATE(X)
#undef X
#define X(field, name) \
    is_found = is_found && (t->field = PyObject_GetAttrString(t->tensor_base, name));
    GM_TORCH_OF_TENSORS(X)
#undef X
#define X(field, name) is_found = is_found && (t->field = PyUnicode_InternFromString(name));
    GM_TORCH_NAMES(X)
#undef X
    is_done = is_found && (t->strided = of_module("torch", "strided")) &&
              (t->tensor_class = of_module("torch", "Tensor")) &&
              (t->gate_key = of_module("gemini_strategy.parameters.gate", "KEY"));
    return is_done ? 0 : -1;
}

/* Of a descriptor in C: Python's way to call it takes as long as what it does. */
PyObject *gm_py_get(PyObject *attribute, PyObject *tensor)
{
    descrgetfunc get = (descrgetfunc)PyType_GetSlot(Py_TYPE(attribute), Py_tp_descr_get);
    return get(attribute, tensor, (PyObject *)Py_TYPE(tensor));
}

int gm_py_set(PyObject *attribute, PyObject *tensor, PyObject *value)
{
    descrsetfunc set = (descrsetfunc)PyType_GetSlot(Py_TYPE(attribute), Py_tp_descr_set);
    return set(attribute, tensor, value);
}

/* Both methods of a context of torch's, which keeps what it has to restore: one user at a time. */
static PyObject *new_context(void)
{
    PyObject *context = PyObject_CallNoArgs(gm_torch.without_subclasses);
    PyObject *begin = context ? PyObject_GetAttr(context, gm_torch.s_begin) : NULL;
    PyObject *end = begin ? PyObject_GetAttr(context, gm_torch.s_end) : NULL;
    PyObject *both = end ? PyTuple_Pack(2, begin, end) : NULL;
    Py_XDECREF(context);
    Py_XDECREF(begin);
    Py_XDECREF(end);
    return both;
}

static PyObject *spare_context;

PyObject *gm_py_without_subclasses(void)
{
    if (PyErr_Occurred()) {
        return NULL;
    }
    PyObject *context = spare_context;
    spare_context = NULL;
    context = context ? context : new_context();
    if (!context || gm_py_done(PyObject_CallNoArgs(PyTuple_GetItem(context, 0))) < 0) {
        PyErr_Clear();
        Py_CLEAR(context);
    }
    return context;
}

void gm_py_with_subclasses(PyObject *context)
{
    if (!context) {
        return;
    }
    PyObject *error = gm_py_set_aside();
    if (gm_py_done(PyObject_CallNoArgs(PyTuple_GetItem(context, 1))) < 0) {
        PyErr_Clear(); /* it cannot fail */
    }
    gm_py_put_back(error);
    PyObject *before = spare_context;
    spare_context = context;
    Py_XDECREF(before);
}

int gm_py_long(PyObject *number, long long *out)
{
    *out = number ? PyLong_AsLongLong(number) : -1;
    Py_XDECREF(number);
    return *out == -1 && PyErr_Occurred() ? -1 : 0;
}

/* The same for an address or a stream. */
static int address_of(PyObject *number, unsigned long long *out)
{
    *out = number ? PyLong_AsUnsignedLongLong(number) : ULLONG_MAX;
    Py_XDECREF(number);
    return *out == ULLONG_MAX && PyErr_Occurred() ? -1 : 0;
}

int gm_py_version(PyObject *tensor, long long *out)
{
    return gm_py_long(gm_py_get(gm_torch.version, tensor), out);
}

int gm_py_data_ptr(PyObject *tensor, uintptr_t *out)
{
    unsigned long long address;
    int result =
        address_of(PyObject_CallFunctionObjArgs(gm_torch.get_data_ptr, tensor, NULL), &address);
    *out = (uintptr_t)address;
    return result;
}

int gm_py_in_backward(void)
{
    PyObject *node = PyObject_CallNoArgs(gm_torch.current_node);
    Py_XDECREF(node);
    return node ? node != Py_None : -1;
}

int gm_py_node_key(long long *out)
{
    *out = -1;
    PyObject *node = PyObject_CallNoArgs(gm_torch.current_node);
    if (!node) {
        return -1;
    }
    int result = 0;
    if (node != Py_None) {
        PyObject *number = PyObject_CallMethodObjArgs(node, gm_torch.s_sequence_nr, NULL);
        result = number ? 0 : -1;
        /* Nodes that accumulate a gradient all have the largest number there is, which is not to be
         * -1. */
        *out = number ? (long long)(PyLong_AsUnsignedLongLongMask(number) & LLONG_MAX) : 0;
        Py_XDECREF(number);
    }
    Py_DECREF(node);
    return result;
}

int gm_py_task(long long *out)
{
    return gm_py_long(PyObject_CallNoArgs(gm_torch.current_task), out);
}

int gm_py_stream(int ordinal, gm_stream *out)
{
    *out = 0;
    if (ordinal < 0) {
        return 0;
    }
    PyObject *index = PyLong_FromLong(ordinal);
    PyObject *raw = index ? PyObject_CallFunctionObjArgs(gm_torch.raw_stream, index, NULL) : NULL;
    Py_XDECREF(index);
    unsigned long long stream;
    int result = address_of(raw, &stream);
    *out = stream;
    return result;
}

int gm_py_without(PyObject *missing)
{
    if (!PyErr_Occurred()) {
        return 0;
    }
    if (!PyErr_ExceptionMatches(missing)) {
        return -1; /* what it asked may have been Python, where a signal's handler has raised */
    }
    PyErr_Clear();
    return 0;
}

int gm_py_is_checkpoint(PyObject *pack)
{
    PyObject *module = PyObject_GetAttr(pack, gm_torch.s_module);
    if (gm_py_without(PyExc_AttributeError) < 0) {
        return -1;
    }
    bool is_checkpoint = module && PyUnicode_Check(module) &&
                         PyUnicode_CompareWithASCIIString(module, "torch.utils.checkpoint") == 0;
    Py_XDECREF(module);
    return is_checkpoint;
}

int gm_py_done(PyObject *result)
{
    Py_XDECREF(result);
    return result ? 0 : -1;
}

int gm_py_raised(gm_status status)
{
    return status == GM_OK ? 0 : gm_py_done(gm_py_raise(status));
}

bool gm_py_made_room(PyObject *object, PyObject *about)
{
    if (!PyErr_ExceptionMatches(PyExc_MemoryError)) {
        return false;
    }
    PyObject *error = gm_py_set_aside();
    bool is_made = gm_py_is_true(PyObject_CallMethod(object, "make_room", "O", about)) == 1;
    if (is_made) {
        Py_CLEAR(error);
    }
    gm_py_put_back(error); /* the first error is the one to tell */
    return is_made;
}

int gm_py_explain(PyObject *object, const char *method, PyObject *about)
{
    if (!PyErr_ExceptionMatches(PyExc_MemoryError)) {
        return -1;
    }
    PyObject *error = gm_py_set_aside();
    if (gm_py_done(PyObject_CallMethod(object, method, "OO", about, error)) == 0) {
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    }
    Py_DECREF(error);
    return -1;
}

int gm_py_is_true(PyObject *result)
{
    int truth = result ? PyObject_IsTrue(result) : -1;
    Py_XDECREF(result);
    return truth;
}
