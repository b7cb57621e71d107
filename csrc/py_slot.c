/* py_slot.c - the Python type Slot, base of slot.py's: what units and backward nodes need of a parameter, and
 * taking its gradient; with it the functions of torch that they all call.
 *
 * Invariants
 *   1. A parameter's data is `shown` while a unit has it open, and `absent` at all other times.
 *   2. When the last user has gone, either nobody but the slot has the storage of `shown`, or that storage has pinned the
 *      chunk until it dies and the slot has let go of it.
 *   3. A gradient leaves torch's memory inside its accumulation hook. */
#include "py_unit.h"

#include <limits.h>
#include <stddef.h>
#include <structmember.h>

PyTypeObject *gm_py_slot_type;
gm_py_torch gm_torch;

/* ---- torch ---- */

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
        {&gm_torch.s_version, "_version"},
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
    };
    static const struct {
        PyObject **place;
        const char *module, *name;
    } functions[] = {
        {&gm_torch.current_node, "torch._C", "_current_autograd_node"},
        {&gm_torch.current_task, "torch._C", "_current_graph_task_id"},
        {&gm_torch.is_grad_enabled, "torch._C", "is_grad_enabled"},
        {&gm_torch.is_hooks_enabled, "torch._C._autograd", "_saved_tensors_hooks_is_enabled"},
        {&gm_torch.top_hooks, "torch._C._autograd", "_top_saved_tensors_default_hooks"},
        {&gm_torch.push_hooks, "torch._C._autograd", "_push_saved_tensors_default_hooks"},
        {&gm_torch.pop_hooks, "torch._C._autograd", "_pop_saved_tensors_default_hooks"},
        {&gm_torch.use_count, "torch._C", "_storage_Use_Count"},
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
    /* torch's own, whatever stands in their places on torch.Tensor or on a parameter's class. */
    static const struct {
        PyObject **place;
        const char *attribute, *method;
    } originals[] = {
        {&gm_torch.get_data_ptr, "data_ptr", NULL},
        {&gm_torch.set_data, "data", "__set__"},
        {&gm_torch.get_grad, "grad", "__get__"},
        {&gm_torch.set_grad, "grad", "__set__"},
    };
    PyObject *torch_c = PyImport_ImportModule("torch._C");
    PyObject *base = torch_c ? PyObject_GetAttrString(torch_c, "TensorBase") : NULL;
    Py_XDECREF(torch_c);
    for (size_t i = 0; base && i < sizeof originals / sizeof *originals; i++) {
        PyObject *found = PyObject_GetAttrString(base, originals[i].attribute);
        if (found && originals[i].method) {
            PyObject *descriptor = found;
            found = PyObject_GetAttrString(descriptor, originals[i].method);
            Py_DECREF(descriptor);
        }
        if (!found) {
            Py_CLEAR(base);
        }
        *originals[i].place = found;
    }
    if (!base) {
        return -1;
    }
    Py_DECREF(base);
    /* Builds of torch without CUDA do not have it, and do not need it. */
    PyObject *module = PyImport_ImportModule("torch._C");
    gm_torch.raw_stream = module ? PyObject_GetAttrString(module, "_cuda_getCurrentRawStream") : 0;
    Py_XDECREF(module);
    PyErr_Clear();
    is_done = true;
    return 0;
}

int gm_py_version(PyObject *tensor, long long *out)
{
    PyObject *version = PyObject_GetAttr(tensor, gm_torch.s_version);
    if (!version) {
        return -1;
    }
    *out = PyLong_AsLongLong(version);
    Py_DECREF(version);
    return *out == -1 && PyErr_Occurred() ? -1 : 0;
}

int gm_py_data_ptr(PyObject *tensor, uintptr_t *out)
{
    PyObject *address = PyObject_CallFunctionObjArgs(gm_torch.get_data_ptr, tensor, NULL);
    if (!address) {
        return -1;
    }
    *out = (uintptr_t)PyLong_AsUnsignedLongLong(address);
    Py_DECREF(address);
    return *out == UINTPTR_MAX && PyErr_Occurred() ? -1 : 0;
}

static int long_of(PyObject *number, long long *out)
{
    if (!number) {
        return -1;
    }
    *out = PyLong_AsLongLong(number);
    Py_DECREF(number);
    return *out == -1 && PyErr_Occurred() ? -1 : 0;
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
    return long_of(PyObject_CallNoArgs(gm_torch.current_task), out);
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
    if (!raw) {
        return -1;
    }
    *out = PyLong_AsUnsignedLongLong(raw);
    Py_DECREF(raw);
    return PyErr_Occurred() ? -1 : 0;
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

int gm_py_changes(const gm_py_slot *slot, long long *out)
{
    gm_py_net *net = (gm_py_net *)slot->net;
    if (gm_py_version(slot->parameter, out) < 0) {
        return -1;
    }
    if (net && (PyObject *)net != Py_None &&
        !gm_py_net_is_closed(net)) { /* updates in a backward */
        *out += (long long)gm_engine_n_immediate(gm_py_net_engine(net), (uint32_t)slot->id);
    }
    return 0;
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

/* ---- showing ---- */

static int set_data(const gm_py_slot *slot, PyObject *data)
{
    return gm_py_done(PyObject_CallFunctionObjArgs(gm_torch.set_data, slot->parameter, data, NULL));
}

int gm_py_slot_show(gm_py_slot *slot)
{
    if (slot->is_lent && gm_py_done(PyObject_CallMethod((PyObject *)slot, "collect", NULL)) < 0) {
        return -1;
    }
    return slot->shown && slot->shown != Py_None
               ? 0
               : gm_py_done(PyObject_CallMethod((PyObject *)slot, "show", NULL));
}

int gm_py_slot_open(gm_py_slot *slot, bool is_plain)
{
    slot->open_count++;
    if (slot->open_count > 1) {
        return 0;
    }
    if (gm_py_slot_show(slot) < 0 || set_data(slot, slot->shown) < 0 ||
        (is_plain && gm_py_set_class(slot->parameter, slot->plain_class) < 0)) {
        return -1;
    }
    return gm_py_version(slot->parameter, &slot->version);
}

int gm_py_slot_close(gm_py_slot *slot, bool is_plain)
{
    slot->open_count--;
    if (slot->open_count > 0) {
        return 0;
    }
    int result = is_plain ? gm_py_set_class(slot->parameter, slot->managed_class) : 0;
    return set_data(slot, slot->absent) < 0 ? -1 : result;
}

int gm_py_slot_settle(gm_py_slot *slot)
{
    if (slot->open_count > 0 || slot->touch_count > 0 || !slot->shown || slot->shown == Py_None) {
        return 0;
    }
    PyObject *count = PyObject_CallFunctionObjArgs(gm_torch.use_count, slot->shown_storage, NULL);
    long long uses = count ? PyLong_AsLongLong(count) : -1;
    Py_XDECREF(count);
    if (uses < 0) {
        return -1;
    }
    if (uses > slot->shown_count) {
        return gm_py_done(PyObject_CallMethod((PyObject *)slot, "let_go", NULL));
    }
    return slot->is_watched ? gm_py_done(PyObject_CallMethod((PyObject *)slot, "unwatch", NULL))
                            : 0;
}

/* ---- gradients ---- */

/* The gradient that torch holds, taken from it: a new reference, or NULL. */
static PyObject *detach_grad(PyObject *parameter)
{
    PyObject *grad = PyObject_CallFunctionObjArgs(gm_torch.get_grad, parameter, NULL);
    if (grad &&
        gm_py_done(PyObject_CallFunctionObjArgs(gm_torch.set_grad, parameter, Py_None, NULL)) < 0) {
        Py_CLEAR(grad);
    }
    return grad;
}

/* Whether the gradient lies in memory as the parameter does: 1 or 0; -1 with an exception set. */
static int is_in_order(PyObject *grad, const gm_py_slot *slot)
{
    PyObject *own = PyObject_GetAttrString((PyObject *)slot, "strides");
    PyObject *strides = PyObject_CallMethodObjArgs(grad, gm_torch.s_stride, NULL);
    int result = own && strides ? PyObject_RichCompareBool(own, strides, Py_EQ) : -1;
    Py_XDECREF(own);
    Py_XDECREF(strides);
    return result;
}

/* Whether the gradient can go to the core as it is: 1 or 0; -1 with an exception set. */
static int is_ordinary(PyObject *grad, const gm_py_slot *slot)
{
    if ((PyObject *)Py_TYPE(grad) != gm_torch.tensor_class || !slot->net ||
        !PyObject_TypeCheck(slot->net, gm_py_net_type)) {
        return 0;
    }
    /* With a graph of its own, or without bytes: engine.take_grad knows. */
    uintptr_t address;
    int has_graph = gm_py_is_true(PyObject_GetAttr(grad, gm_torch.s_requires_grad));
    if (has_graph == 0 && gm_py_data_ptr(grad, &address) < 0) {
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) {
            return -1;
        }
        PyErr_Clear();
        has_graph = 1;
    }
    if (has_graph) {
        return has_graph < 0 ? -1 : 0;
    }
    PyObject *plainly = PyObject_GetAttrString(slot->engine, "takes_plainly");
    PyObject *layout = PyObject_GetAttr(grad, gm_torch.s_layout);
    PyObject *dtype = PyObject_GetAttr(grad, gm_torch.s_dtype);
    int result = -1;
    if (plainly && layout && dtype) {
        result = plainly == Py_True && layout == gm_torch.strided && dtype == slot->dtype;
    }
    Py_XDECREF(plainly);
    Py_XDECREF(layout);
    Py_XDECREF(dtype);
    return result > 0 ? is_in_order(grad, slot) : result;
}

static int put_grad(PyObject *grad, gm_py_slot *slot)
{
    int ordinary = is_ordinary(grad, slot);
    if (ordinary <= 0) {
        return ordinary < 0
                   ? -1
                   : gm_py_done(PyObject_CallMethod(slot->engine, "take_grad", "OO", slot, grad));
    }
    gm_py_net *net = (gm_py_net *)slot->net;
    gm_engine *engine = gm_py_net_engine(net);
    uintptr_t address;
    gm_stream stream;
    /* The node that used the weights is done: an update inside backward may change them now. */
    if (!engine || gm_py_net_settle(net) < 0 || gm_py_data_ptr(grad, &address) < 0 ||
        gm_py_net_stream(net, &stream) < 0 ||
        PyObject_SetAttrString(slot->engine, "_sumsq", Py_None) < 0) {
        return -1;
    }
    gm_status status;
    GM_WITHOUT_GIL(engine, status,
                   gm_engine_grad_put(engine, (uint32_t)slot->id, (const void *)address,
                                      (gm_dtype)slot->format, stream));
    return gm_py_raised(status);
}

/* The accumulation hook of every parameter whose gradient the engine takes. */
static PyObject *take_grad(PyObject *module, PyObject *parameter)
{
    (void)module;
    PyObject *slot = PyObject_GetAttrString(parameter, "_gm_slot");
    if (!slot || !PyObject_TypeCheck(slot, gm_py_slot_type)) {
        Py_XDECREF(slot);
        return slot ? PyErr_Format(PyExc_TypeError, "_gm_slot is no slot") : NULL;
    }
    PyObject *grad = detach_grad(parameter);
    int result = !grad ? -1 : grad == Py_None ? 0 : put_grad(grad, (gm_py_slot *)slot);
    Py_XDECREF(grad);
    Py_DECREF(slot);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

/* ---- the type ---- */

static int slot_traverse(gm_py_slot *slot, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)slot));
    Py_VISIT(slot->parameter);
    Py_VISIT(slot->engine);
    Py_VISIT(slot->net);
    Py_VISIT(slot->absent);
    Py_VISIT(slot->shown);
    return 0;
}

static int slot_clear(gm_py_slot *slot)
{
    Py_CLEAR(slot->parameter);
    Py_CLEAR(slot->engine);
    Py_CLEAR(slot->net);
    Py_CLEAR(slot->absent);
    Py_CLEAR(slot->shown);
    return 0;
}

static void slot_dealloc(gm_py_slot *slot)
{
    PyTypeObject *type = Py_TYPE((PyObject *)slot);
    PyObject_GC_UnTrack(slot);
    slot_clear(slot);
    Py_XDECREF(slot->shown_storage);
    Py_XDECREF(slot->dtype);
    Py_XDECREF(slot->plain_class);
    Py_XDECREF(slot->managed_class);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(slot);
    Py_DECREF((PyObject *)type);
}

static PyMemberDef slot_members[] = {
    GM_PY_MEMBER(gm_py_slot, id, T_LONGLONG),
    GM_PY_MEMBER(gm_py_slot, format, T_LONGLONG),
    GM_PY_MEMBER(gm_py_slot, version, T_LONGLONG),
    GM_PY_MEMBER(gm_py_slot, open_count, T_LONGLONG),
    GM_PY_MEMBER(gm_py_slot, touch_count, T_LONGLONG),
    GM_PY_MEMBER(gm_py_slot, parameter, T_OBJECT),
    GM_PY_MEMBER(gm_py_slot, engine, T_OBJECT),
    GM_PY_MEMBER(gm_py_slot, net, T_OBJECT),
    GM_PY_MEMBER(gm_py_slot, dtype, T_OBJECT),
    GM_PY_MEMBER(gm_py_slot, plain_class, T_OBJECT),
    GM_PY_MEMBER(gm_py_slot, managed_class, T_OBJECT),
    GM_PY_MEMBER(gm_py_slot, absent, T_OBJECT),
    GM_PY_MEMBER(gm_py_slot, shown, T_OBJECT),
    GM_PY_MEMBER(gm_py_slot, shown_storage, T_OBJECT),
    GM_PY_MEMBER(gm_py_slot, shown_count, T_LONGLONG),
    GM_PY_MEMBER(gm_py_slot, is_watched, T_BOOL),
    GM_PY_MEMBER(gm_py_slot, is_lent, T_BOOL),
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slot_slots[] = {
    {Py_tp_new, (void *)PyType_GenericNew},
    {Py_tp_dealloc, (void *)slot_dealloc},
    {Py_tp_traverse, (void *)slot_traverse},
    {Py_tp_clear, (void *)slot_clear},
    {Py_tp_members, slot_members},
    {Py_tp_doc, "What every unit needs of a parameter; base of slot.Slot."},
    {0, NULL},
};

static PyType_Spec slot_spec = {
    .name = "gemini_strategy._C.Slot",
    .basicsize = sizeof(gm_py_slot),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = slot_slots,
};

static PyMethodDef module_methods[] = {
    GM_PY_METHOD("take_grad", take_grad, METH_O,
                 "take_grad(parameter): its gradient goes to the engine"),
    {NULL, NULL, 0, NULL},
};

int gm_py_slot_init(PyObject *module)
{
    gm_py_slot_type = (PyTypeObject *)PyType_FromSpec(&slot_spec);
    if (!gm_py_slot_type ||
        PyModule_AddObjectRef(module, "Slot", (PyObject *)gm_py_slot_type) < 0) {
        return -1;
    }
    return PyModule_AddFunctions(module, module_methods);
}
