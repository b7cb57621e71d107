/* torch.c - the functions of torch that units, slots and nets call, and what Python calls answer. */
#include "binding/unit.h"

#include <limits.h>

gm_py_torch gm_torch;

/* torch's own, whatever stands in their places on torch.Tensor or on a parameter's class. */
static int find_originals(void)
{
    PyObject *torch_c = PyImport_ImportModule("torch._C");
    PyObject *base = torch_c ? PyObject_GetAttrString(torch_c, "TensorBase") : NULL;
    Py_XDECREF(torch_c);
    bool is_found = base && (gm_torch.get_data_ptr = PyObject_GetAttrString(base, "data_ptr")) &&
                    (gm_torch.data = PyObject_GetAttrString(base, "data")) &&
                    (gm_torch.version = PyObject_GetAttrString(base, "_version")) &&
                    (gm_torch.grad = PyObject_GetAttrString(base, "grad"));
    Py_XDECREF(base);
    return is_found ? 0 : -1;
}

int gm_py_torch_init(void)
{
    static bool is_done;
    if (is_done) {
        return 0;
    }
    static const struct {
        PyObject **place;
        const char *name;
    } names[] = {
        {&gm_torch.s_detach, "detach"},
        {&gm_torch.s_sequence_nr, "_sequence_nr"},
        {&gm_torch.s_class, "__class__"},
        {&gm_torch.s_shape, "shape"},
        {&gm_torch.s_stride, "stride"},
        {&gm_torch.s_base, "_base"},
        {&gm_torch.s_as_strided, "as_strided"},
        {&gm_torch.s_layout, "layout"},
        {&gm_torch.s_requires_grad, "requires_grad"},
        {&gm_torch.s_module, "__module__"},
        {&gm_torch.s_dtype, "dtype"},
        {&gm_torch.s_begin, "__enter__"},
        {&gm_torch.s_end, "__exit__"},
    };
    static const struct {
        PyObject **place;
        const char *module, *name;
    } functions[] = {
        {&gm_torch.current_node, "torch._C", "_current_autograd_node"},
        {&gm_torch.current_task, "torch._C", "_current_graph_task_id"},
        {&gm_torch.is_hooks_enabled, "torch._C._autograd", "_saved_tensors_hooks_is_enabled"},
        {&gm_torch.top_hooks, "torch._C._autograd", "_top_saved_tensors_default_hooks"},
        {&gm_torch.push_hooks, "torch._C._autograd", "_push_saved_tensors_default_hooks"},
        {&gm_torch.pop_hooks, "torch._C._autograd", "_pop_saved_tensors_default_hooks"},
        {&gm_torch.use_count, "torch._C", "_storage_Use_Count"},
        {&gm_torch.set_excluded, "torch._C", "_dispatch_tls_set_dispatch_key_excluded"},
        {&gm_torch.gate_key, "gemini_strategy.parameters.gate", "KEY"},
        {&gm_torch.n_modes, "torch._C", "_len_torch_dispatch_stack"},
        {&gm_torch.is_tracing, "torch._C", "_is_tracing"},
        {&gm_torch.without_subclasses, "torch._C", "DisableTorchFunctionSubclass"},
        {&gm_torch.strided, "torch", "strided"},
        {&gm_torch.tensor_class, "torch", "Tensor"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        *names[i].place = PyUnicode_InternFromString(names[i].name);
        if (!*names[i].place) {
            return -1;
        }
    }
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        PyObject *module = PyImport_ImportModule(functions[i].module);
        PyObject *found = module ? PyObject_GetAttrString(module, functions[i].name) : NULL;
        Py_XDECREF(module);
        if (!found) {
            return -1;
        }
        *functions[i].place = found;
    }
    if (find_originals() < 0) {
        return -1;
    }
    /* Builds of torch without CUDA do not have it, and do not need it. */
    PyObject *module = PyImport_ImportModule("torch._C");
    gm_torch.raw_stream = module ? PyObject_GetAttrString(module, "_cuda_getCurrentRawStream") : 0;
    Py_XDECREF(module);
    PyErr_Clear();
    is_done = true;
    return 0;
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
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    (void)gm_py_done(PyObject_CallNoArgs(PyTuple_GetItem(context, 1))); /* cannot fail */
    PyErr_Restore(type, error, trace);
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

/* A node's place in its thread's order of creation; -1 outside backward. */
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
        /* Nodes that accumulate a gradient all have the largest number there is, which is not to be -1. */
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

bool gm_py_is_checkpoint(PyObject *pack)
{
    PyObject *module = PyObject_GetAttr(pack, gm_torch.s_module);
    PyErr_Clear();
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
    PyObject *type, *error, *trace;
    if (!PyErr_ExceptionMatches(PyExc_MemoryError)) {
        return false;
    }
    PyErr_Fetch(&type, &error, &trace);
    int is_made = gm_py_is_true(PyObject_CallMethod(object, "make_room", "O", about));
    if (is_made == 1) {
        Py_XDECREF(type);
        Py_XDECREF(error);
        Py_XDECREF(trace);
        return true;
    }
    PyErr_Clear(); /* the first error is the one to tell */
    PyErr_Restore(type, error, trace);
    return false;
}

int gm_py_explain(PyObject *object, const char *method, PyObject *about)
{
    PyObject *type, *error, *trace;
    if (!PyErr_ExceptionMatches(PyExc_MemoryError)) {
        return -1;
    }
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (gm_py_done(PyObject_CallMethod(object, method, "OO", about, error)) == 0) {
        PyErr_SetObject(type, error);
    }
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    return -1;
}

int gm_py_is_true(PyObject *result)
{
    int truth = result ? PyObject_IsTrue(result) : -1;
    Py_XDECREF(result);
    return truth;
}

int gm_py_set_class(PyObject *parameter, PyObject *class)
{
    return PyObject_SetAttr(parameter, gm_torch.s_class, class);
}
