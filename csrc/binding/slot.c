/* slot.c - the Python type Slot, base of slot.py's: what units and backward nodes need of a parameter.
 *
 * Invariants
 *   1. A parameter's data is `inside` while a unit has it open, and `absent` at all other times.  It changes while no
 *      other thread's operation reads it.
 *   2. When the last user has gone, either nobody but the slot has the storage of `shown`, or that storage has pinned the
 *      chunk until it dies and the slot has let go of it. */
#include "binding/unit.h"

#include <stddef.h>
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
    if (slot->is_lent && gm_py_done(PyObject_CallMethod((PyObject *)slot, "collect", NULL)) < 0) {
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
        (is_plain && gm_py_set_class(slot->parameter, slot->plain_class) < 0)) {
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
    int result = is_plain ? gm_py_set_class(slot->parameter, slot->managed_class) : 0;
    return set_data(slot, slot->absent) < 0 ? -1 : result;
}

/* Somebody else has the storage: it keeps the chunk from now on.  Threads that come meanwhile make another. */
static int let_go(gm_py_slot *slot)
{
    PyObject *shown = slot->shown, *inside = slot->inside, *lease = Py_NewRef(slot->shown_lease);
    slot->shown = slot->inside = NULL;
    slot->is_watched = false;
    int result = gm_py_done(PyObject_CallMethod((PyObject *)slot, "let_go", "O", lease));
    Py_DECREF(lease);
    Py_XDECREF(inside);
    Py_XDECREF(shown);
    return result;
}

int gm_py_slot_end_use(gm_py_slot *slot)
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
        return let_go(slot);
    }
    return slot->is_watched ? gm_py_done(PyObject_CallMethod((PyObject *)slot, "unwatch", NULL))
                            : 0;
}

/* ---- the type ---- */

static int slot_traverse(gm_py_slot *slot, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)slot));
    Py_VISIT(slot->parameter);
    Py_VISIT(slot->engine);
    Py_VISIT(slot->net);
    Py_VISIT(slot->absent);
    Py_VISIT(slot->shown);
    Py_VISIT(slot->inside);
    return 0;
}

static int slot_clear(gm_py_slot *slot)
{
    Py_CLEAR(slot->parameter);
    Py_CLEAR(slot->engine);
    Py_CLEAR(slot->net);
    Py_CLEAR(slot->absent);
    Py_CLEAR(slot->shown);
    Py_CLEAR(slot->inside);
    return 0;
}

static void slot_dealloc(gm_py_slot *slot)
{
    PyObject_GC_UnTrack(slot);
    slot_clear(slot);
    Py_XDECREF(slot->shown_storage);
    Py_XDECREF(slot->shown_lease);
    Py_XDECREF(slot->readers);
    Py_XDECREF(slot->dtype);
    Py_XDECREF(slot->plain_class);
    Py_XDECREF(slot->managed_class);
    gm_py_free((PyObject *)slot);
}

static PyMemberDef slot_members[] = {
    GM_PY_MEMBER(gm_py_slot, id, T_LONGLONG),
    GM_PY_MEMBER(gm_py_slot, format, T_LONGLONG),
    GM_PY_MEMBER(gm_py_slot, version, T_LONGLONG),
    GM_PY_MEMBER(gm_py_slot, open_count, T_LONGLONG),
    GM_PY_MEMBER(gm_py_slot, touch_count, T_LONGLONG),
    GM_PY_MEMBER(gm_py_slot, parameter, T_OBJECT),
    GM_PY_MEMBER(gm_py_slot, engine, T_OBJECT),
    GM_PY_MEMBER(gm_py_slot, net, T_OBJECT),
    GM_PY_MEMBER(gm_py_slot, dtype, T_OBJECT),
    GM_PY_MEMBER(gm_py_slot, plain_class, T_OBJECT),
    GM_PY_MEMBER(gm_py_slot, managed_class, T_OBJECT),
    GM_PY_MEMBER(gm_py_slot, absent, T_OBJECT),
    GM_PY_MEMBER(gm_py_slot, shown, T_OBJECT),
    GM_PY_MEMBER(gm_py_slot, inside, T_OBJECT),
    GM_PY_MEMBER(gm_py_slot, readers, T_OBJECT),
    GM_PY_MEMBER(gm_py_slot, shown_storage, T_OBJECT),
    GM_PY_MEMBER(gm_py_slot, shown_lease, T_OBJECT),
    GM_PY_MEMBER(gm_py_slot, shown_count, T_LONGLONG),
    GM_PY_MEMBER(gm_py_slot, is_watched, T_BOOL),
    GM_PY_MEMBER(gm_py_slot, is_lent, T_BOOL),
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

static PyType_Spec slot_spec = {
    .name = "gemini_strategy._C.Slot",
    .basicsize = sizeof(gm_py_slot),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = slot_parts,
};

int gm_py_slot_init(PyObject *module)
{
    gm_py_slot_type = gm_py_add_type(module, &slot_spec);
    return gm_py_slot_type ? 0 : -1;
}
