/* plain.c - the Python type NoTorchFunction: an attribute that says for a class that torch is to treat its tensors as
 * plain ones.
 *
 * torch asks every tensor of a subclass for __torch_function__ at every operation.  What a class has as a mere value is
 * looked for in the tensor's own dict first, which nothing else needs then; a descriptor that can be set comes before that
 * dict. */
#include "binding/unit.h"

static PyObject *plain_get(PyObject *self, PyObject *object, PyObject *type)
{
    (void)self, (void)object, (void)type;
    return gm_py_torch_init() < 0 ? NULL : Py_NewRef(gm_torch.disabled_torch_function);
}

static int plain_set(PyObject *self, PyObject *object, PyObject *value)
{
    (void)self, (void)object, (void)value;
    PyErr_SetString(PyExc_AttributeError, "__torch_function__ is the class's");
    return -1;
}

static PyType_Slot plain_slots[] = {
    {Py_tp_new, (void *)PyType_GenericNew},
    {Py_tp_descr_get, (void *)plain_get},
    {Py_tp_descr_set, (void *)plain_set},
    {Py_tp_doc, "torch's disabled __torch_function__, found at once."},
    {0, NULL},
};

static PyType_Spec plain_spec = {
    .name = "gemini_strategy._C.NoTorchFunction",
    .basicsize = sizeof(PyObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = plain_slots,
};

int gm_py_plain_init(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&plain_spec);
    int result = type ? PyModule_AddType(module, (PyTypeObject *)type) : -1;
    Py_XDECREF(type);
    return result;
}
