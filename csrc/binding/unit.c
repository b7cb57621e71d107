/* unit.c - the Python type Unit, base of hooks.py's: entering and leaving.
 *
 * Invariants
 *   1. From enter to leave, and only then, a unit's parameters show their bytes and its chunks are
 *      pinned; whatever fails on the way is undone, except the frame, which leave() takes away.
 *      Where torch forbids hooks on what is saved (torch.func), and where another thread shows
 *      parameters (gate.c), they stay absent, and every operation is served.
 *   2. `leave` always unpins, whatever it finds or fails at; its first error is the one raised. */
#include "binding/unit.h"

#include <stdlib.h>
#include <structmember.h>

#include "binding/frames.h"
#include "torch/abi.h"

typedef enum frame_state { FRAME_FAILED, FRAME_BARE, FRAME_NETTED } frame_state;

/* One enter without its leave yet: its own thread's to take away. */
typedef struct frame {
    unsigned long thread;
    frame_state state;
    bool is_open;      /* the parameters show their bytes */
    bool is_shower;    /* for this thread may: see gate.c */
    bool is_borrowed;  /* open for another module */
    size_t depth;      /* of the net, before */
    PyObject *watched; /* leased tensors that find what the forward writes; NULL: none */
} frame;

typedef struct unit {
    PyObject_HEAD PyObject *engine, *slots;
    gm_py_net *net;
    unsigned int id;
    char watches_writes, is_compiled;
    gm_frames frames; /* of `frame` */
} unit;

/* ---- entering ---- */

static Py_ssize_t n_slots(const unit *self)
{
    return PyTuple_Size(self->slots);
}

static gm_py_slot *slot_at(const unit *self, Py_ssize_t i)
{
    return (gm_py_slot *)PyTuple_GetItem(self->slots, i);
}

/* Of the first `n` slots; the first error counts. */
static int close_slots(const unit *self, Py_ssize_t n)
{
    int result = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        int closed = gm_py_slot_close(slot_at(self, i), self->is_compiled);
        result = result < 0 ? result : closed;
    }
    return result;
}

static int open_slots(const unit *self)
{
    PyObject *context = gm_py_without_subclasses();
    int result = 0;
    for (Py_ssize_t i = 0; result == 0 && i < n_slots(self); i++) {
        /* Compiled code is specialized on plain parameters. */
        result = gm_py_slot_open(slot_at(self, i), self->is_compiled);
        if (result < 0) {
            PyObject *error = gm_py_set_aside();
            (void)close_slots(self, i + 1);
            gm_py_put_back(error);
        }
    }
    gm_py_with_subclasses(context);
    return result;
}

/* Unpins; a pending exception stays and hides one of its own. */
static int leave_core(const unit *self)
{
    PyObject *error = gm_py_set_aside();
    gm_engine *engine = gm_py_net_engine(self->net);
    gm_stream stream;
    int result = -1;
    if (engine && gm_py_net_stream(self->net, &stream) == 0) {
        gm_status status;
        GM_WITHOUT_GIL(engine, status = gm_engine_leave(engine, self->id, stream));
        result = gm_py_raised(status);
    }
    gm_py_put_back(error);
    return error ? -1 : result;
}

static int enter_core(const unit *self, bool *out_has_grad, bool *out_in_backward)
{
    gm_engine *engine = gm_py_net_engine(self->net);
    gm_stream stream;
    int in_backward;
    if (!engine || gm_py_net_stream(self->net, &stream) < 0 ||
        (in_backward = gm_py_in_backward()) < 0) {
        return -1;
    }
    *out_in_backward = in_backward;
    *out_has_grad = gm_torch_is_grad_enabled();
    uint32_t flags =
        (*out_in_backward ? GM_ENTER_IN_BACKWARD : 0u) | (*out_has_grad ? GM_ENTER_GRAD : 0u);
    for (bool is_last = false;; is_last = true) {
        gm_status status;
        GM_WITHOUT_GIL(engine, status = gm_engine_enter(engine, self->id, stream, flags));
        if (status != GM_ERR_NOMEM) {
            return gm_py_raised(status);
        }
        gm_py_raise(status);
        if (is_last || !gm_py_made_room((PyObject *)self, (PyObject *)slot_at(self, 0))) {
            return gm_py_explain((PyObject *)self, "no_room", (PyObject *)slot_at(self, 0));
        }
    }
}

/* Shows the parameters, unless another thread shows some. */
static int show_slots(unit *self, bool in_backward, frame *out)
{
    int shows = gm_py_gate_show();
    if (shows < 0) {
        return -1;
    }
    out->is_shower = shows;
    /* In a backward the other thread is the one that waits for this. */
    out->is_open = shows || (self->is_compiled && in_backward);
    if (self->is_compiled && !out->is_open) {
        return gm_py_done(PyObject_CallMethod((PyObject *)self, "refuse_thread", NULL));
    }
    if (out->is_open && open_slots(self) < 0) {
        (void)(shows ? gm_py_gate_hide() : 0);
        return -1;
    }
    return 0;
}

static void count_borrows(const unit *self, int change)
{
    for (Py_ssize_t i = 0; i < n_slots(self); i++) {
        slot_at(self, i)->borrow_count += change;
    }
}

/* The same of a unit that is borrowed, without a net: it may leave before others that have come
 * later, and its call has one (call.c). */
static int open_borrowed(unit *self, bool has_grad, bool in_backward, frame *out)
{
    int is_shown = has_grad ? gm_py_is_true(PyObject_CallNoArgs(gm_torch.is_hooks_enabled)) : 1;
    if (is_shown < 0 || (is_shown && show_slots(self, in_backward, out) < 0)) {
        return -1;
    }
    out->state = FRAME_BARE;
    out->is_borrowed = out->is_open;
    count_borrows(self, out->is_borrowed);
    return 0;
}

/* For a compiled function, which is traced now: what forbids hooks is a part of that. */
static int open_compiled(unit *self, bool has_grad, bool in_backward, frame *out)
{
    (void)has_grad;
    return open_borrowed(self, false, in_backward, out);
}

/* The chunks are pinned: what else entering is.  On failure nothing of it is left. */
static int open_unit(unit *self, bool has_grad, bool in_backward, frame *out)
{
    if (self->watches_writes) {
        out->watched = PyObject_CallMethod((PyObject *)self, "watch", NULL);
        if (!out->watched) {
            return -1;
        }
    }
    out->depth = gm_py_nets_depth();
    int is_netted = gm_py_net_push(self->net); /* without grad too: the forward may turn it on */
    if (is_netted == 0 && has_grad) {
        out->state = FRAME_BARE;
        return 0;
    }
    if (is_netted < 0 || show_slots(self, in_backward, out) < 0) {
        PyObject *error = gm_py_set_aside();
        (void)gm_py_nets_pop_to(out->depth);
        Py_CLEAR(out->watched);
        gm_py_put_back(error);
        return -1;
    }
    out->state = is_netted ? FRAME_NETTED : FRAME_BARE;
    return 0;
}

static PyObject *enter(unit *self, int (*open)(unit *, bool, bool, frame *))
{
    GM_PY_FAIL_IF(!self->net, PyExc_RuntimeError, "unit %u is entered before its start()",
                  self->id);
    bool has_grad, in_backward;
    frame entered = {.thread = PyThread_get_thread_ident(), .state = FRAME_FAILED};
    if (gm_frames_reserve(&self->frames) < 0) {
        return NULL;
    }
    gm_frames_push(&self->frames, &entered);
    if (gm_py_net_unpin(self->net) < 0 || enter_core(self, &has_grad, &in_backward) < 0) {
        return NULL;
    }
    if (open(self, has_grad, in_backward, &entered) < 0) {
        (void)leave_core(self);
        return NULL;
    }
    frame *top = gm_frames_top(&self->frames);
    if (top) { /* unless a signal's handler has taken it away */
        *top = entered;
    }
    return Py_NewRef(Py_None);
}

static PyObject *unit_enter(unit *self, PyObject *Py_UNUSED(unused))
{
    return enter(self, open_unit);
}

static PyObject *unit_borrow(unit *self, PyObject *by_compiled)
{
    return enter(self, by_compiled == Py_True ? open_compiled : open_borrowed);
}

/* ---- leaving ---- */

static int find_writes(const unit *self, bool is_compared)
{
    for (Py_ssize_t i = 0; i < n_slots(self); i++) {
        gm_py_slot *slot = slot_at(self, i);
        long long version;
        if (gm_py_version(slot->parameter, &version) < 0) {
            return -1;
        }
        if (version == slot->version) {
            continue;
        }
        slot->version = version;
        int has_low = gm_py_is_true(PyObject_GetAttrString((PyObject *)slot, "has_low"));
        if (has_low < 0) {
            return -1;
        }
        if ((!is_compared || !has_low) &&
            gm_py_done(PyObject_CallMethod(self->engine, "note_write", "O", slot)) < 0) {
            return -1;
        }
    }
    return 0;
}

/* See [Note: storages that stay] in hooks.py. */
static int end_uses(const unit *self)
{
    gm_engine *engine = gm_py_net_engine(self->net);
    gm_stream stream;
    if (!engine || gm_py_net_stream(self->net, &stream) < 0) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < n_slots(self); i++) {
        if (gm_py_slot_end_use(slot_at(self, i), engine, stream) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Runs `step` unless an exception is pending already. */
#define UNLESS_FAILED(result, step) ((result) < 0 ? (result) : (step))

static PyObject *unit_leave(unit *self, PyObject *Py_UNUSED(unused))
{
    frame left = {.state = FRAME_FAILED};
    if (gm_frames_top(&self->frames)) {
        gm_frames_pop(&self->frames, &left);
    }
    if (left.state == FRAME_FAILED) {
        return Py_NewRef(Py_None); /* enter failed: there is nothing to undo */
    }
    count_borrows(self, -left.is_borrowed);
    int result = left.state == FRAME_NETTED ? gm_py_nets_pop_to(left.depth) : 0;
    if (!gm_py_net_is_closed(self->net)) {
        PyObject *context = left.is_open ? gm_py_without_subclasses() : NULL;
        result = UNLESS_FAILED(result, left.is_open ? find_writes(self, left.watched != NULL) : 0);
        PyObject *error = gm_py_set_aside();
        int closed = left.is_open ? close_slots(self, n_slots(self)) : 0;
        gm_py_with_subclasses(context);
        closed = UNLESS_FAILED(closed, end_uses(self));
        Py_CLEAR(left.watched); /* its leases compare the bytes */
        gm_py_put_back(error);
        result = UNLESS_FAILED(result, closed);
        int unpinned = leave_core(self);
        result = UNLESS_FAILED(result, unpinned);
    }
    Py_XDECREF(left.watched);
    if (left.is_shower) {
        int hidden = gm_py_gate_hide();
        result = UNLESS_FAILED(result, hidden);
    }
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

/* show(slot) -> the bytes of one of its parameters, for the node of a backward that runs. */
static PyObject *unit_show(const unit *self, PyObject *object)
{
    GM_PY_FAIL_IF(!PyObject_TypeCheck(object, gm_py_slot_type), PyExc_TypeError,
                  "show takes a slot");
    gm_py_slot *slot = (gm_py_slot *)object;
    bool is_shown = gm_py_net_touch(self->net, slot) == 0 && gm_py_slot_show(slot) == 0;
    return is_shown ? Py_NewRef(slot->shown) : NULL;
}

/* ---- types ---- */

/* start(net, slots): before the first enter(). */
static PyObject *unit_start(unit *self, PyObject *args)
{
    PyObject *net, *slots;
    GM_PY_TRY(PyArg_ParseTuple(args, "OO!", &net, &PyTuple_Type, &slots));
    GM_PY_FAIL_IF(self->slots || !PyObject_TypeCheck(net, gm_py_net_type), PyExc_TypeError,
                  "a unit is started once, with a Net");
    for (Py_ssize_t i = 0; i < PyTuple_Size(slots); i++) {
        GM_PY_FAIL_IF(!PyObject_TypeCheck(PyTuple_GetItem(slots, i), gm_py_slot_type),
                      PyExc_TypeError, "a unit has slots");
    }
    self->frames.size = sizeof(frame);
    self->slots = Py_NewRef(slots);
    self->net = (gm_py_net *)Py_NewRef(net);
    return Py_NewRef(Py_None);
}

static PyObject *unit_n_entered(unit *self, void *Py_UNUSED(unused))
{
    return PyLong_FromSize_t(gm_frames_depth(&self->frames));
}

static int unit_traverse(unit *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->engine);
    Py_VISIT(self->slots);
    Py_VISIT((PyObject *)self->net);
    for (size_t i = 0; i < self->frames.n; i++) {
        Py_VISIT(((const frame *)(void *)self->frames.at)[i].watched);
    }
    return 0;
}

static int unit_clear(unit *self)
{
    Py_CLEAR(self->engine);
    Py_CLEAR(self->net);
    return 0;
}

static void unit_dealloc(unit *self)
{
    PyObject_GC_UnTrack(self);
    unit_clear(self);
    Py_XDECREF(self->slots);
    for (size_t i = 0; i < self->frames.n; i++) {
        Py_XDECREF(((const frame *)(void *)self->frames.at)[i].watched);
    }
    free(self->frames.at);
    gm_py_free((PyObject *)self);
}

static PyMemberDef unit_members[] = {
    GM_PY_MEMBER(unit, id, T_UINT),
    GM_PY_MEMBER(unit, engine, T_OBJECT),
    GM_PY_MEMBER(unit, watches_writes, T_BOOL),
    GM_PY_MEMBER(unit, is_compiled, T_BOOL),
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef unit_getset[] = {
    {"n_entered", (getter)unit_n_entered, NULL,
     "how many enters of this thread wait for their leaves", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef unit_methods[] = {
    GM_PY_METHOD("enter", unit_enter, METH_NOARGS, "enter(): chunks pinned, parameters open"),
    GM_PY_METHOD("borrow", unit_borrow, METH_O, "borrow(by_compiled): the same without the net"),
    GM_PY_METHOD("show", unit_show, METH_O, "show(slot) -> its bytes, until another node asks"),
    GM_PY_METHOD("leave", unit_leave, METH_NOARGS, "leave(): the inverse of the last enter()"),
    GM_PY_METHOD("start", unit_start, METH_VARARGS, "start(net, slots): before the first enter()"),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot unit_parts[] = {
    {Py_tp_new, (void *)PyType_GenericNew},
    {Py_tp_dealloc, (void *)unit_dealloc},
    {Py_tp_traverse, (void *)unit_traverse},
    {Py_tp_clear, (void *)unit_clear},
    {Py_tp_members, unit_members},
    {Py_tp_getset, unit_getset},
    {Py_tp_methods, unit_methods},
    {Py_tp_doc, "Enters and leaves; base of hooks.Unit."},
    {0, NULL},
};

PyTypeObject *gm_py_unit_type;

int gm_py_unit_init(PyObject *module)
{
    gm_py_unit_type = gm_py_add_type(module, "gemini_strategy._C.Unit", sizeof(unit),
                                     Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, unit_parts);
    return gm_py_unit_type ? 0 : -1;
}
