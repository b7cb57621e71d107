/* call.c - the Python type UnitCall, base of hooks.py's: a call of a module with its unit entered
 * around it.
 *
 * torch asks every module for `_compiled_call_impl`, and calls that where it is not None.  So a
 * unit needs no hooks: what counts hooks, or goes another way where there are some, finds those of
 * the module's owner only.
 *
 * Invariants
 *   1. Every enter has its leave, whatever is raised in between.
 *   2. The error of the call hides one of the leave. */
#include "binding/unit.h"

#include <structmember.h>

typedef struct call {
    PyObject_HEAD PyObject *module;
    PyObject *enter, *leave; /* of the unit */
    PyObject *compiled;      /* what torch.compile made of the module's call; None */
    PyObject *outside; /* makes the call where autocast is off on `device`; None: as any other */
    PyObject *device;  /* the type of the engine's device */
    char is_for_evaluation; /* while the module trains, its unit is not entered */
} call;

/* Whether the call may run to be written down: 1 or 0; -1 with an exception set. */
static int may_be_traced(void)
{
    int has_modes = gm_py_is_true(PyObject_CallNoArgs(gm_torch.n_modes));
    return has_modes ? has_modes : gm_py_is_true(PyObject_CallNoArgs(gm_torch.is_tracing));
}

static int refuse_if_traced(call *self)
{
    int may_be = may_be_traced();
    return may_be > 0 ? gm_py_done(PyObject_CallMethod((PyObject *)self, "refuse_if_traced", NULL))
                      : may_be;
}

/* The module that is called, a new reference.  Somebody who makes a second module of a copy of the
 * first one's dict (torch.nn.parallel.replicate) has copied this, too: then it is the one that the
 * caller, Module.__call__, names. */
static PyObject *called_module(const call *self)
{
    PyFrameObject *frame = PyEval_GetFrame(); /* the caller's */
    PyObject *names = frame ? PyObject_GetAttr((PyObject *)frame, gm_torch.s_locals) : PyDict_New();
    PyObject *module = names ? PyObject_GetItem(names, gm_torch.s_self) : NULL;
    Py_XDECREF(names);
    if (module == self->module) {
        return module;
    }
    PyObject *own = module ? PyObject_GetAttr(module, gm_torch.s_compiled_call) : NULL;
    Py_XDECREF(own);
    if (own == (const PyObject *)self) {
        return module;
    }
    Py_XDECREF(module);
    /* Another caller: it has no such name, or what it has no such call. */
    bool is_other = gm_py_without(PyExc_KeyError) == 0 || gm_py_without(PyExc_AttributeError) == 0;
    return is_other ? Py_NewRef(self->module) : NULL;
}

/* What the call of the module is without its unit, a new reference. */
static PyObject *inner_call(const call *self)
{
    if (self->compiled && self->compiled != Py_None) {
        return Py_NewRef(self->compiled);
    }
    PyObject *module = called_module(self);
    PyObject *inner = module ? PyObject_GetAttr(module, gm_torch.s_call) : NULL;
    Py_XDECREF(module);
    return inner;
}

/* Whether `outside` makes the call: 1 or 0; -1 with an exception set. */
static int is_outside(const call *self)
{
    if (!self->outside || self->outside == Py_None) {
        return 0;
    }
    PyObject *is_on = PyObject_CallFunctionObjArgs(gm_torch.has_autocast, self->device, NULL);
    int result = gm_py_is_true(is_on);
    return result < 0 ? -1 : !result;
}

static PyObject *run(const call *self, PyObject *args, PyObject *kwargs)
{
    PyObject *inner = inner_call(self), *result = NULL;
    int outside = inner ? is_outside(self) : -1;
    if (outside > 0) {
        result = PyObject_CallFunctionObjArgs(self->outside, inner, args, kwargs ? kwargs : Py_None,
                                              NULL);
    } else if (outside == 0) {
        result = PyObject_Call(inner, args, kwargs);
    }
    Py_XDECREF(inner);
    return result;
}

static PyObject *call_call(call *self, PyObject *args, PyObject *kwargs)
{
    int skips = self->is_for_evaluation
                    ? gm_py_is_true(PyObject_GetAttr(self->module, gm_torch.s_training))
                    : 0;
    if (skips) {
        return skips > 0 ? run(self, args, kwargs) : NULL;
    }
    if (refuse_if_traced(self) < 0) {
        return NULL;
    }
    PyObject *result =
        gm_py_done(PyObject_CallNoArgs(self->enter)) < 0 ? NULL : run(self, args, kwargs);
    PyObject *error = gm_py_set_aside();
    if (gm_py_done(PyObject_CallNoArgs(self->leave)) < 0) {
        Py_CLEAR(result);
    }
    gm_py_put_back(error);
    return result;
}

static PyObject *call_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    return gm_py_torch_init() < 0 ? NULL : PyType_GenericNew(type, args, kwargs);
}

#define CALL_FIELDS(X) X(module) X(enter) X(leave) X(compiled) X(outside) X(device)

static int call_traverse(call *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    CALL_FIELDS(GM_PY_VISIT)
    return 0;
}

static int call_clear(call *self)
{
    CALL_FIELDS(GM_PY_CLEAR)
    return 0;
}

static void call_dealloc(call *self)
{
    PyObject_GC_UnTrack(self);
    call_clear(self);
    gm_py_free((PyObject *)self);
}

static PyMemberDef call_members[] = {
    GM_PY_MEMBER(call, module, T_OBJECT),          GM_PY_MEMBER(call, enter, T_OBJECT),
    GM_PY_MEMBER(call, leave, T_OBJECT),           GM_PY_MEMBER(call, compiled, T_OBJECT),
    GM_PY_MEMBER(call, outside, T_OBJECT),         GM_PY_MEMBER(call, device, T_OBJECT),
    GM_PY_MEMBER(call, is_for_evaluation, T_BOOL), {NULL, 0, 0, 0, NULL},
};

static PyType_Slot call_parts[] = {
    {Py_tp_new, (void *)call_new},
    {Py_tp_dealloc, (void *)call_dealloc},
    {Py_tp_traverse, (void *)call_traverse},
    {Py_tp_clear, (void *)call_clear},
    {Py_tp_members, call_members},
    {Py_tp_call, (void *)call_call},
    {Py_tp_doc, "Enters a unit, calls its module, leaves it; base of hooks._UnitCall."},
    {0, NULL},
};

int gm_py_call_init(PyObject *module)
{
    return gm_py_add_type(module, "gemini_strategy._C.UnitCall", sizeof(call),
                          Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, call_parts)
               ? 0
               : -1;
}
