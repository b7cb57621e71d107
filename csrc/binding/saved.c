/* saved.c - see saved.h. */
#include "binding/saved.h"

PyTypeObject *gm_py_saved_type;

saved *gm_py_saved_new(saved_kind kind, PyObject *owner)
{
    saved *self = PyObject_New(saved, gm_py_saved_type);
    if (self) {
        self->kind = kind;
        self->tensor = self->shape = self->stride = self->dtype = self->content = NULL;
        self->is_conj = self->is_neg = false;
        self->owner = Py_XNewRef(owner);
        self->address = 0;
        self->is_checked = true;
        self->version = -1;
    }
    return self;
}

saved *gm_py_saved_plain(PyObject *tensor)
{
    saved *self = gm_py_saved_new(SAVED_PLAIN, NULL);
    GM_PY_TRY(self);
    self->tensor = PyObject_CallMethodObjArgs(tensor, gm_torch.s_detach, NULL);
    if (self->tensor && gm_py_version(tensor, &self->version) < 0) {
        if (PyErr_ExceptionMatches(PyExc_RuntimeError)) { /* an inference tensor has none */
            PyErr_Clear();
            self->version = -1;
            return self;
        }
        Py_CLEAR(self->tensor);
    }
    if (!self->tensor) {
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    return self;
}

static void saved_dealloc(saved *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_XDECREF(self->tensor);
    Py_XDECREF(self->owner);
    Py_XDECREF(self->shape);
    Py_XDECREF(self->stride);
    Py_XDECREF(self->dtype);
    Py_XDECREF(self->content);
    PyObject_Free(self);
    Py_DECREF((PyObject *)type);
}

static PyType_Slot saved_parts[] = {
    {Py_tp_dealloc, (void *)saved_dealloc},
    {Py_tp_doc, "What autograd keeps in place of a saved tensor."},
    {0, NULL},
};

static PyType_Spec saved_spec = {
    .name = "gemini_strategy._C.Saved",
    .basicsize = sizeof(saved),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = saved_parts,
};

int gm_py_saved_init(void)
{
    gm_py_saved_type = (PyTypeObject *)PyType_FromSpec(&saved_spec);
    return gm_py_saved_type ? 0 : -1;
}
