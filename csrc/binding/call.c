/* call.c - the Python type UnitCall, base of hooks.py's: a call of a module with its unit, if it is
 * one, entered around it.
 *
 * torch asks every module for `_compiled_call_impl`, and calls that where it is not None.  So a
 * unit needs no hooks: what counts hooks, or goes another way where there are some, finds those of
 * the module's owner only.
 *
 * [Note: borrowing]
 *     A module may use a parameter of one below it: a loss in chunks reads the head's weight, a
 *     kernel takes its address.  At the first touch the parameter's unit is entered until the
 *     innermost call leaves whose module has it.  What a compiled function was given is entered
 *     when that module is called again: guards look before anything is touched.
 *
 * Invariants
 *   1. Every enter has its leave, whatever is raised in between; what a call has borrowed leaves
 *      before the call's own unit, the last first.
 *   2. The error of the call hides one of the leave.
 *   3. Where a call has borrowed before, the net is on top from its beginning: what it saves of a
 *      borrowed weight is a token. */
#include "binding/unit.h"

#include <structmember.h>

#include "binding/frames.h"

typedef struct call {
    PyObject_HEAD PyObject *module;
    PyObject *enter, *leave; /* of the unit */
    PyObject *compiled;      /* what torch.compile made of the module's call; None */
    PyObject *outside;  /* makes the call where autocast is off on `device`; None: as any other */
    PyObject *device;   /* the type of the engine's device */
    PyObject *reach;    /* a frozenset of the units of the module and below it */
    PyObject *net;      /* of what it has borrowed; None: nothing yet */
    char borrows_again; /* from its beginning: a compiled function has borrowed */
    char is_for_evaluation; /* while the module trains, its unit is not entered */
} call;

/* Of a call: the net is on top for its unit, or was pushed for what it borrows. */
typedef enum net_state { NET_OFF, NET_OF_UNIT, NET_PUSHED } net_state;

/* One call that runs. */
typedef struct scope {
    unsigned long thread;
    call *of;
    PyObject *borrowed; /* a list of units that are entered, and of leases; NULL: nothing */
    size_t depth;       /* of the net, before it was pushed */
    net_state net;
} scope;

static gm_frames scopes = {.size = sizeof(scope)};

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

/* ---- borrowing ---- */

static int leave(PyObject *unit)
{
    PyObject *error = gm_py_set_aside();
    int left = gm_py_done(PyObject_CallMethod(unit, "leave", NULL));
    gm_py_put_back(error); /* hides one of its own */
    return left;
}

static gm_py_net *net_of(const call *self)
{
    bool is_one = self->net && self->net != Py_None;
    gm_py_net *net = is_one ? (gm_py_net *)self->net : NULL;
    return net && !gm_py_net_is_closed(net) ? net : NULL;
}

/* This thread's innermost scope whose module has the unit in its reach, or NULL; valid until the
 * next push or pop.  PySet_Contains goes by identity here, and runs no Python. */
static scope *scope_of(PyObject *unit)
{
    for (size_t i = scopes.n; i > 0; i--) {
        scope *at = (scope *)(void *)scopes.at + i - 1;
        if (at->thread == PyThread_get_thread_ident() && PySet_Contains(at->of->reach, unit) > 0) {
            return at;
        }
    }
    return NULL;
}

static int push_net(const call *self, scope *out)
{
    gm_py_net *net = net_of(self);
    if (!net || out->net != NET_OFF) {
        return 0;
    }
    out->depth = gm_py_nets_depth();
    int pushed = gm_py_net_push(net);
    out->net = pushed > 0 ? NET_PUSHED : NET_OFF;
    return pushed < 0 ? -1 : 0;
}

static int begin(call *self, bool has_unit)
{
    scope begun = {
        .thread = PyThread_get_thread_ident(), .of = self, .net = has_unit ? NET_OF_UNIT : NET_OFF};
    if (gm_frames_reserve(&scopes) < 0 || push_net(self, &begun) < 0) {
        return -1;
    }
    gm_frames_push(&scopes, &begun);
    return 0;
}

/* Everything borrowed leaves, whatever fails; a pending exception stays. */
static int end(void)
{
    scope ended;
    gm_frames_pop(&scopes, &ended);
    PyObject *error = gm_py_set_aside();
    int result = 0;
    for (Py_ssize_t i = ended.borrowed ? PyList_Size(ended.borrowed) : 0; i > 0; i--) {
        PyObject *each = PyList_GetItem(ended.borrowed, i - 1);
        int left = PyObject_TypeCheck(each, gm_py_unit_type) ? leave(each) : 0;
        result = result < 0 ? result : left;
    }
    bool is_netted = ended.net == NET_PUSHED;
    int popped = is_netted ? gm_py_nets_pop_to(ended.depth) : 0;
    Py_XDECREF(ended.borrowed);
    gm_py_put_back(error);
    return result < 0 ? result : popped;
}

/* running(unit) -> (its call, the list of what that has borrowed) of the innermost module that runs
 * in this thread and has the unit in its reach, or None. */
static PyObject *running(PyObject *Py_UNUSED(module), PyObject *unit)
{
    PyObject *made = PyList_New(0); /* first: it may run finalizers */
    scope *at = scope_of(unit);
    if (!made || !at) {
        Py_XDECREF(made);
        return made ? Py_NewRef(Py_None) : NULL;
    }
    if (at->borrowed) {
        Py_DECREF(made);
    } else {
        at->borrowed = made;
    }
    return Py_BuildValue("OO", (PyObject *)at->of, at->borrowed);
}

/* catch_saved(unit): what that call saves from now on is a token where it shows managed bytes. */
static PyObject *catch_saved(PyObject *Py_UNUSED(module), PyObject *unit)
{
    const scope *at = scope_of(unit);
    scope netted = at ? *at : (scope){.net = NET_OF_UNIT};
    if (netted.net == NET_OFF && push_net(netted.of, &netted) < 0) {
        return NULL;
    }
    scope *then = scope_of(unit); /* the same: pushing has ended what it began */
    if (then) {
        then->depth = netted.depth;
        then->net = netted.net;
    }
    return Py_NewRef(Py_None);
}

/* borrowed() -> ([(call, what it has borrowed)] of this thread, how much others have). */
static PyObject *borrowed(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    PyObject *mine = PyList_New(0);
    Py_ssize_t n_others = 0;
    for (size_t i = 0; mine && i < scopes.n; i++) {
        const scope *at = (const scope *)(void *)scopes.at + i;
        if (!at->borrowed) {
            continue;
        }
        if (at->thread != PyThread_get_thread_ident()) {
            n_others += PyList_Size(at->borrowed);
            continue;
        }
        PyObject *pair = Py_BuildValue("OO", (PyObject *)at->of, at->borrowed);
        if (!pair || PyList_Append(mine, pair) < 0) {
            Py_CLEAR(mine);
        }
        Py_XDECREF(pair);
    }
    return mine ? Py_BuildValue("Nn", mine, n_others) : NULL;
}

/* others_run() -> whether a module runs in another thread. */
static PyObject *others_run(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    bool is_any = false;
    for (size_t i = 0; i < scopes.n; i++) {
        const scope *at = (const scope *)(void *)scopes.at + i;
        is_any = is_any || at->thread != PyThread_get_thread_ident();
    }
    return PyBool_FromLong(is_any);
}

PyMethodDef gm_py_call_methods[] = {
    GM_PY_METHOD("others_run", others_run, METH_NOARGS, "others_run() -> bool"),
    GM_PY_METHOD("borrowed", borrowed, METH_NOARGS, "borrowed() -> (pairs, n)"),
    GM_PY_METHOD("running", running, METH_O,
                 "running(unit) -> (call, what it has borrowed) | None"),
    GM_PY_METHOD("catch_saved", catch_saved, METH_O, "catch_saved(unit): the net is on top"),
    {NULL, NULL, 0, NULL},
};

static PyObject *call_call(call *self, PyObject *args, PyObject *kwargs)
{
    int has_unit = self->enter && self->enter != Py_None;
    if (has_unit && self->is_for_evaluation) {
        int trains = gm_py_is_true(PyObject_GetAttr(self->module, gm_torch.s_training));
        has_unit = trains < 0 ? -1 : !trains;
    }
    if (has_unit < 0 || (has_unit && refuse_if_traced(self) < 0) || begin(self, has_unit) < 0) {
        return NULL;
    }
    int entered = has_unit ? gm_py_done(PyObject_CallNoArgs(self->enter)) : 0;
    if (entered == 0 && self->borrows_again) {
        entered = gm_py_done(PyObject_CallMethod((PyObject *)self, "borrow_again", NULL));
    }
    PyObject *result = entered < 0 ? NULL : run(self, args, kwargs);
    if (end() < 0) {
        Py_CLEAR(result);
    }
    PyObject *error = gm_py_set_aside();
    if (has_unit && gm_py_done(PyObject_CallNoArgs(self->leave)) < 0) {
        Py_CLEAR(result);
    }
    gm_py_put_back(error);
    return result;
}

static PyObject *call_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    return gm_py_torch_init() < 0 ? NULL : PyType_GenericNew(type, args, kwargs);
}

#define CALL_FIELDS(X) X(module) X(enter) X(leave) X(compiled) X(outside) X(device) X(reach) X(net)

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
    GM_PY_MEMBER(call, module, T_OBJECT),
    GM_PY_MEMBER(call, enter, T_OBJECT),
    GM_PY_MEMBER(call, leave, T_OBJECT),
    GM_PY_MEMBER(call, compiled, T_OBJECT),
    GM_PY_MEMBER(call, outside, T_OBJECT),
    GM_PY_MEMBER(call, device, T_OBJECT),
    GM_PY_MEMBER(call, reach, T_OBJECT),
    GM_PY_MEMBER(call, net, T_OBJECT),
    GM_PY_MEMBER(call, borrows_again, T_BOOL),
    GM_PY_MEMBER(call, is_for_evaluation, T_BOOL),
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot call_parts[] = {
    {Py_tp_new, (void *)call_new},
    {Py_tp_dealloc, (void *)call_dealloc},
    {Py_tp_traverse, (void *)call_traverse},
    {Py_tp_clear, (void *)call_clear},
    {Py_tp_members, call_members},
    {Py_tp_call, (void *)call_call},
    {Py_tp_doc, "Calls a module, in its unit if it is one; base of hooks._UnitCall."},
    {0, NULL},
};

int gm_py_call_init(PyObject *module)
{
    return gm_py_add_type(module, "gemini_strategy._C.UnitCall", sizeof(call),
                          Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, call_parts)
               ? 0
               : -1;
}
