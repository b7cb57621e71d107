/* hook.c - the Python types EnterHook and LeaveHook, bases of hooks.py's: what torch calls before and after a module's
 * forward. */
#include "binding/unit.h"

#include <stddef.h>
#include <structmember.h>

typedef struct hook {
    PyObject_HEAD PyObject *call; /* of the unit; None: a copy of a module enters nothing */
} hook;

static PyObject *call_unit(const hook *self)
{
    return self->call && self->call != Py_None ? PyObject_CallNoArgs(self->call)
                                               : Py_NewRef(Py_None);
}

/* Whether the call may run to be written down: 1 or 0; -1 with an exception set. */
static int may_be_traced(void)
{
    int has_modes = gm_py_is_true(PyObject_CallNoArgs(gm_torch.n_modes));
    return has_modes ? has_modes : gm_py_is_true(PyObject_CallNoArgs(gm_torch.is_tracing));
}

static PyObject *enter_call(hook *self, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    int may_be = self->call && self->call != Py_None ? may_be_traced() : 0;
    if (may_be < 0 || (may_be > 0 && gm_py_done(PyObject_CallMethod(
                                         (PyObject *)self, "refuse_if_traced", "O", args)) < 0)) {
        return NULL;
    }
    return call_unit(self);
}

static PyObject *leave_call(hook *self, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    return call_unit(self);
}

static PyObject *hook_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    return gm_py_torch_init() < 0 ? NULL : PyType_GenericNew(type, args, kwargs);
}

static int hook_traverse(hook *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->call);
    return 0;
}

static int hook_clear(hook *self)
{
    Py_CLEAR(self->call);
    return 0;
}

static void hook_dealloc(hook *self)
{
    PyObject_GC_UnTrack(self);
    hook_clear(self);
    gm_py_free((PyObject *)self);
}

static PyMemberDef hook_members[] = {
    GM_PY_MEMBER(hook, call, T_OBJECT),
    {NULL, 0, 0, 0, NULL},
};

static int add_type(PyObject *module, const char *name, ternaryfunc call, const char *doc)
{
    PyType_Slot parts[] = {
        {Py_tp_new, (void *)hook_new},           {Py_tp_dealloc, (void *)hook_dealloc},
        {Py_tp_traverse, (void *)hook_traverse}, {Py_tp_clear, (void *)hook_clear},
        {Py_tp_members, hook_members},           {Py_tp_call, (void *)call},
        {Py_tp_doc, (void *)(uintptr_t)doc},     {0, NULL},
    };
    PyType_Spec spec = {
        .name = name,
        .basicsize = sizeof(hook),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
        .slots = parts,
    };
    return gm_py_add_type(module, &spec) ? 0 : -1;
}

int gm_py_hook_init(PyObject *module)
{
    return add_type(module, "gemini_strategy._C.EnterHook", (ternaryfunc)enter_call,
                    "Enters a unit; base of hooks._Enter.") < 0
               ? -1
               : add_type(module, "gemini_strategy._C.LeaveHook", (ternaryfunc)leave_call,
                          "Leaves it; base of hooks._Leave.");
}
