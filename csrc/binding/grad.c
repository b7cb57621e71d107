/* grad.c - taking a parameter's gradient.
 *
 * Invariant: a gradient leaves torch's memory inside its accumulation hook. */
#include "binding/unit.h"

/* The gradient that torch holds, taken from it: a new reference, or NULL. */
static PyObject *detach_grad(PyObject *parameter)
{
    PyObject *grad = gm_py_get(gm_torch.grad, parameter);
    if (grad && gm_py_set(gm_torch.grad, parameter, Py_None) < 0) {
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

/* Whether the gradient can go to the core as it is, and nothing else has to see it: 1 or 0; -1 with
 * an exception set. */
static int is_ordinary(PyObject *grad, const gm_py_slot *slot)
{
    if ((PyObject *)Py_TYPE(grad) != gm_torch.tensor_class) {
        return 0;
    }
    /* With a graph of its own, or without bytes: engine.ordinary_grad knows. */
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

/* To the core: an ordinary gradient, in one of its formats. */
static int put(PyObject *grad, long long format, gm_py_slot *slot)
{
    if (!slot->net || !PyObject_TypeCheck(slot->net, gm_py_net_type)) {
        PyErr_SetString(PyExc_RuntimeError, "a gradient for an engine that is closed");
        return -1;
    }
    gm_py_net *net = (gm_py_net *)slot->net;
    gm_engine *engine = gm_py_net_engine(net);
    uintptr_t address;
    gm_stream stream;
    /* The node that used the weights is done: an update inside backward may change them now. */
    if (!engine || gm_py_net_unpin(net) < 0 || gm_py_data_ptr(grad, &address) < 0 ||
        gm_py_net_stream(net, &stream) < 0) {
        return -1;
    }
    gm_status status;
    GM_WITHOUT_GIL(engine,
                   status = gm_engine_grad_put(engine, (uint32_t)slot->id, (const void *)address,
                                               (gm_dtype)format, stream));
    return gm_py_raised(status);
}

static int put_grad(PyObject *grad, gm_py_slot *slot)
{
    int ordinary = is_ordinary(grad, slot);
    if (ordinary != 0) {
        return ordinary < 0 ? -1 : put(grad, slot->format, slot);
    }
    PyObject *made = PyObject_CallMethod(slot->engine, "ordinary_grad", "OO", slot, grad);
    PyObject *tensor;
    long long format;
    int result =
        made && PyArg_ParseTuple(made, "OL", &tensor, &format) ? put(tensor, format, slot) : -1;
    Py_XDECREF(made);
    return result;
}

/* The accumulation hook of every parameter whose gradient the engine takes. */
static PyObject *take_grad(PyObject *Py_UNUSED(module), PyObject *parameter)
{
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

PyMethodDef gm_py_grad_methods[] = {
    GM_PY_METHOD("take_grad", take_grad, METH_O,
                 "take_grad(parameter): its gradient goes to the engine"),
    {NULL, NULL, 0, NULL},
};
