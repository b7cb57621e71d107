/* task.c - see task.h.
 *
 * An error ends a task without the call, and then drops the object: that ends it, too.
 *
 * Invariant: no Python runs here.  The call and the drop come where torch's C++ returns to its
 * caller after all of a backward, so a signal may wait to be handled.  Python handles signals where
 * Python code runs on the main thread, and drops what their handlers raise in a destructor: the
 * user's frame has to be the first one. */
#include "binding/task.h"

typedef struct task_end {
    PyObject_HEAD PyObject *owner; /* NULL once the task has ended */
    long long task;
    gm_py_end_task end;
} task_end;

static PyTypeObject *task_end_type;

static int end_once(task_end *self)
{
    PyObject *owner = self->owner;
    self->owner = NULL;
    int result = owner ? self->end(owner, self->task) : 0;
    Py_XDECREF(owner);
    return result;
}

static PyObject *task_end_call(task_end *self, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kw))
{
    return end_once(self) < 0 ? NULL : Py_NewRef(Py_None);
}

static void task_end_dealloc(task_end *self)
{
    PyObject *error = gm_py_set_aside();
    if (end_once(self) < 0) {
        PyErr_Clear(); /* The engine keeps it: the backward that ended here has raised it. */
    }
    gm_py_put_back(error);
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_Free(self);
    Py_DECREF((PyObject *)type);
}

PyObject *gm_py_task_end_new(PyObject *owner, long long task, gm_py_end_task end)
{
    task_end *self = PyObject_New(task_end, task_end_type);
    if (self) {
        self->owner = Py_NewRef(owner);
        self->task = task;
        self->end = end;
    }
    return (PyObject *)self;
}

static PyType_Slot parts[] = {
    {Py_tp_dealloc, (void *)task_end_dealloc},
    {Py_tp_call, (void *)task_end_call},
    {Py_tp_doc, "What autograd calls when a graph task has run its last node."},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "gemini_strategy._C.TaskEnd",
    .basicsize = sizeof(task_end),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = parts,
};

int gm_py_task_init(void)
{
    task_end_type = (PyTypeObject *)PyType_FromSpec(&spec);
    return task_end_type ? 0 : -1;
}
