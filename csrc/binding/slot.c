/* slot.c - the Python type Slot, base of slot.py's: what units and backward nodes need of a
 * parameter.
 *
 * Invariants
 *   1. A parameter's data is `inside` while a unit has it open, and `absent` at all other times.
 *      It changes while no other thread's operation reads it.
 *   2. When the last user has gone, either nobody but the slot has the storage of `shown`, or that
 *      storage has pinned the chunk until it dies and the slot has let go of it. */
#include "binding/unit.h"

#include <structmember.h>

PyTypeObject *gm_py_slot_type;

/* ---- showing ---- */

/* Whether an operation of another thread uses the parameter. */
static bool is_read(const gm_py_slot *slot)
{
    Py_ssize_t n = slot->readers && slot->readers != Py_None ? PyList_Size(slot->readers) : 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *reader = PyList_GetItem(slot->readers, i);
        if (reader && PyLong_AsUnsignedLong(reader) != PyThread_get_thread_ident()) {
            return true;
        }
    }
    return false;
}

/* Gives the parameter other data.  From the last look to the change nobody else has the GIL. */
static int set_data(const gm_py_slot *slot, PyObject *data)
{
    Py_INCREF(data);
    PyObject *type = NULL, *error = NULL, *trace = NULL; /* an interrupt: at the end */
    while (is_read(slot)) {
        int waited = gm_py_done(PyObject_CallMethod((PyObject *)slot, "await_readers", NULL));
        if (waited < 0 && !type) {
            PyErr_Fetch(&type, &error, &trace);
        }
        PyErr_Clear();
    }
    int done = gm_py_set(gm_torch.data, slot->parameter, data);
    Py_DECREF(data);
    if (done == 0 && type) {
        PyErr_Restore(type, error, trace);
        return -1;
    }
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    return done;
}

static PyObject *slot_swap(gm_py_slot *slot, PyObject *data)
{
    return gm_py_torch_init() < 0 || set_data(slot, data) < 0 ? NULL : Py_NewRef(Py_None);
}

static bool is_shown(const gm_py_slot *slot)
{
    return slot->shown && slot->shown != Py_None;
}

/* What `make_shown` gives, unless another thread has made it meanwhile: all of it at once. */
static int adopt_shown(gm_py_slot *slot, PyObject *made)
{
    if (is_shown(slot)) {
        return 0;
    }
    PyObject **const places[] = {&slot->shown_lease, &slot->shown, &slot->inside,
                                 &slot->shown_storage};
    long long count = PyLong_AsLongLong(PyTuple_GetItem(made, 4));
    if (count == -1 && PyErr_Occurred()) {
        return -1;
    }
    PyObject *before[4];
    for (int i = 0; i < 4; i++) {
        before[i] = *places[i];
        *places[i] = Py_NewRef(PyTuple_GetItem(made, i));
    }
    slot->shown_count = count;
    for (int i = 0; i < 4; i++) {
        Py_XDECREF(before[i]);
    }
    return 0;
}

int gm_py_slot_show(gm_py_slot *slot)
{
    if (slot->is_assigned &&
        gm_py_done(PyObject_CallMethod((PyObject *)slot, "check_assigned", NULL)) < 0) {
        return -1;
    }
    if (is_shown(slot)) {
        return 0;
    }
    PyObject *made = PyObject_CallMethod((PyObject *)slot, "make_shown", NULL);
    int result = made ? adopt_shown(slot, made) : -1;
    Py_XDECREF(made);
    return result;
}

int gm_py_slot_open(gm_py_slot *slot, bool is_plain)
{
    slot->open_count++;
    if (slot->open_count > 1) {
        return 0;
    }
    if (gm_py_slot_show(slot) < 0 || set_data(slot, slot->inside) < 0 ||
        (is_plain && PyObject_SetAttr(slot->parameter, gm_torch.s_class, slot->plain_class) < 0)) {
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
    int result =
        is_plain ? PyObject_SetAttr(slot->parameter, gm_torch.s_class, slot->managed_class) : 0;
    return set_data(slot, slot->absent) < 0 ? -1 : result;
}

/* Whether there are bytes to keep: 1 or 0; -1 with an exception set. */
static int has_bytes(gm_py_slot *slot)
{
    PyObject *shape = PyObject_GetAttrString((PyObject *)slot, "shape");
    PyObject *zero = shape ? PyLong_FromLong(0) : NULL;
    int has_zero = zero ? PySequence_Contains(shape, zero) : -1;
    Py_XDECREF(shape);
    Py_XDECREF(zero);
    return has_zero < 0 ? -1 : !has_zero;
}

static int lease_of(const gm_py_slot *slot, gm_lease **out)
{
    unsigned long long lease = PyLong_AsUnsignedLongLong(slot->shown_lease);
    *out = (gm_lease *)(uintptr_t)lease;
    return PyErr_Occurred() ? -1 : 0;
}

/* Somebody else has the storage: it keeps the chunk from now on, and writes through it are found.
 * Threads that come meanwhile make another. */
static int let_go(gm_py_slot *slot, gm_engine *engine, gm_stream stream)
{
    gm_lease *lease;
    int keeps = has_bytes(slot); /* autograd keeps tensors that have none */
    if (keeps < 0 || lease_of(slot, &lease) < 0) {
        return -1;
    }
    PyObject *shown = slot->shown, *inside = slot->inside; /* they keep the lease */
    slot->shown = slot->inside = NULL;
    slot->is_watched = false;
    gm_status status = GM_OK;
    if (keeps) {
        GM_WITHOUT_GIL(engine, status = gm_lease_keep(lease, stream));
    }
    int result = gm_py_raised(status);
    Py_XDECREF(inside);
    Py_XDECREF(shown);
    return result;
}

/* The last user has gone: what was written is found now. */
static int unwatch(gm_py_slot *slot, gm_engine *engine)
{
    gm_lease *lease;
    if (lease_of(slot, &lease) < 0) {
        return -1;
    }
    PyObject *shown = Py_NewRef(slot->shown); /* it keeps the lease */
    gm_status status;
    GM_WITHOUT_GIL(engine, status = gm_lease_unwatch(lease));
    Py_DECREF(shown);
    slot->is_watched = status == GM_OK ? false : slot->is_watched;
    return gm_py_raised(status);
}

int gm_py_slot_end_use(gm_py_slot *slot, gm_engine *engine, gm_stream stream)
{
    if (slot->open_count > 0 || slot->touch_count > 0 || !is_shown(slot)) {
        return 0;
    }
    long long uses;
    if (gm_py_long(PyObject_CallFunctionObjArgs(gm_torch.use_count, slot->shown_storage, NULL),
                   &uses) < 0) {
        return -1;
    }
    if (uses > slot->shown_count) {
        return let_go(slot, engine, stream);
    }
    return slot->is_watched ? unwatch(slot, engine) : 0;
}

bool gm_py_slot_is_borrowed(const gm_py_slot *slot)
{
    return slot->borrow_count > 0 && slot->borrow_count == slot->open_count;
}

/* ---- the type ---- */

/* Through which it may hold itself, and the others. */
#define SLOT_CYCLES(X) X(parameter) X(engine) X(net) X(absent) X(shown) X(inside)
#define SLOT_OTHERS(X) \
    X(content) X(shown_storage) X(shown_lease) X(readers) X(dtype) X(plain_class) X(managed_class)

static int slot_traverse(gm_py_slot *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    SLOT_CYCLES(GM_PY_VISIT)
    return 0;
}

static int slot_clear(gm_py_slot *self)
{
    SLOT_CYCLES(GM_PY_CLEAR)
    return 0;
}

static void slot_dealloc(gm_py_slot *self)
{
    PyObject_GC_UnTrack(self);
    slot_clear(self);
    SLOT_OTHERS(GM_PY_DROP)
    gm_py_free((PyObject *)self);
}

#define OBJECT(field) GM_PY_MEMBER(gm_py_slot, field, T_OBJECT),
static PyMemberDef slot_members[] = {
    SLOT_CYCLES(OBJECT) SLOT_OTHERS(OBJECT) GM_PY_MEMBER(gm_py_slot, id, T_LONGLONG),
    GM_PY_MEMBER(gm_py_slot, format, T_LONGLONG),
    GM_PY_MEMBER(gm_py_slot, version, T_LONGLONG),
    GM_PY_MEMBER(gm_py_slot, open_count, T_LONGLONG),
    GM_PY_MEMBER(gm_py_slot, touch_count, T_LONGLONG),
    GM_PY_MEMBER(gm_py_slot, shown_count, T_LONGLONG),
    GM_PY_MEMBER(gm_py_slot, is_watched, T_BOOL),
    GM_PY_MEMBER(gm_py_slot, is_assigned, T_BOOL),
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef slot_methods[] = {
    GM_PY_METHOD("swap", slot_swap, METH_O, "swap(data): gives the parameter other data"),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slot_parts[] = {
    {Py_tp_new, (void *)PyType_GenericNew},
    {Py_tp_dealloc, (void *)slot_dealloc},
    {Py_tp_traverse, (void *)slot_traverse},
    {Py_tp_clear, (void *)slot_clear},
    {Py_tp_members, slot_members},
    {Py_tp_methods, slot_methods},
    {Py_tp_doc, "What every unit needs of a parameter; base of slot.Slot."},
    {0, NULL},
};

int gm_py_slot_init(PyObject *module)
{
    gm_py_slot_type = gm_py_add_type(module, "gemini_strategy._C.Slot", sizeof(gm_py_slot),
                                     Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slot_parts);
    return gm_py_slot_type ? 0 : -1;
}
