/* handle.c - the Python type Handle, base of engine.py's Engine: what a person holds of a runtime.
 *
 * A runtime, its slots, units and hooks refer to each other.  When the handle of a closed one goes,
 * it takes from them what refers to the model: else a model that is closed and dropped would keep
 * its memory until Python looks for cycles.
 *
 * Invariant: no Python of ours runs here, and there is no finalizer.  A handle goes wherever its
 * last holder does, where Python drops what a signal's handler raises; and what a finalizer has
 * seen, the cycle collector lets go in its next run only. */
#include "binding/unit.h"

#include <structmember.h>

typedef struct handle {
    PyObject_HEAD PyObject *runtime;
} handle;

/* Of a slot: a parameter of no model, in place of its own. */
static int empty_slot(PyObject *slot, PyObject *gone)
{
    PyObject *none = PyList_New(0);
    int result = none && PyObject_SetAttrString(slot, "parameter", gone) == 0
                     ? PyObject_SetAttrString(slot, "aliases", none)
                     : -1;
    Py_XDECREF(none);
    return result;
}

/* Nobody can call the closed runtime any more: of all it has, it keeps that it is closed, which is
 * its class's. */
static int forget(PyObject *type, PyObject *runtime)
{
    PyObject *gone = PyObject_GetAttrString(type, "_gone");
    PyObject *slots = gone ? PyObject_GetAttrString(runtime, "slots") : NULL;
    PyObject *own = slots ? PyObject_GetAttrString(runtime, "__dict__") : NULL;
    Py_ssize_t n = own ? PyList_Size(slots) : -1;
    int result = n < 0 ? -1 : 0;
    for (Py_ssize_t i = 0; result == 0 && i < n; i++) {
        result = empty_slot(PyList_GetItem(slots, i), gone);
    }
    if (result == 0) {
        PyDict_Clear(own);
    }
    Py_XDECREF(gone);
    Py_XDECREF(slots);
    Py_XDECREF(own);
    return result;
}

static int handle_traverse(handle *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->runtime);
    return 0;
}

static int handle_clear(handle *self)
{
    Py_CLEAR(self->runtime);
    return 0;
}

static void handle_dealloc(handle *self)
{
    PyObject_GC_UnTrack(self);
    PyObject *runtime = self->runtime;
    self->runtime = NULL;
    if (runtime) { /* none if an interrupt came before */
        PyObject *error = gm_py_set_aside();
        int is_closed = gm_py_is_true(PyObject_GetAttrString(runtime, "closed"));
        if (is_closed < 0 ||
            (is_closed && forget((PyObject *)Py_TYPE((PyObject *)self), runtime) < 0)) {
            PyErr_Clear(); /* no memory for a list: then the cycle collector does it */
        }
        gm_py_put_back(error);
        Py_DECREF(runtime);
    }
    gm_py_free((PyObject *)self);
}

static PyMemberDef handle_members[] = {
    {"_runtime", T_OBJECT, offsetof(handle, runtime), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot handle_parts[] = {
    {Py_tp_new, (void *)PyType_GenericNew},
    {Py_tp_dealloc, (void *)handle_dealloc},
    {Py_tp_traverse, (void *)handle_traverse},
    {Py_tp_clear, (void *)handle_clear},
    {Py_tp_members, handle_members},
    {Py_tp_doc, "What a person holds of a runtime; base of engine.Engine."},
    {0, NULL},
};

int gm_py_handle_init(PyObject *module)
{
    return gm_py_add_type(module, "gemini_strategy._C.Handle", sizeof(handle),
                          Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, handle_parts)
               ? 0
               : -1;
}
