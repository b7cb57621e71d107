/* comm.c - the Python type Comm: one gm_comm, over NCCL or over a transport that is written in
 * Python.
 *
 * The GIL is released around every call: a collective may wait for other ranks, and the transport's
 * functions take it back.  Numbers of calls inside are counted under the GIL, so that close() on
 * one thread lets a collective on another come back first.
 *
 * A transport in Python wants the GIL inside a collective, on the thread that issues or runs it:
 * whoever calls the core's functions of a communicator, and whoever waits for a lock that is held
 * around them, must not hold the GIL.  Debug builds assert the first, which is what makes the
 * second possible. */
#include "binding/comm.h"

#include <stdio.h>
#include <stdlib.h>
#include <structmember.h>

typedef struct python_transport {
    PyObject *exchange, *close; /* callables */
    PyObject *cause;            /* what exchange raised last, until it is reported */
    int size;
} python_transport;

typedef struct comm {
    PyObject_HEAD gm_comm *comm; /* NULL after close() */
    python_transport *transport; /* the gm_comm's; NULL with NCCL */
    int rank, size;
    size_t n_inside; /* calls that run without the GIL */
    bool is_closing; /* the last of them frees */
} comm;

static PyTypeObject *comm_type;

/* ---- the transport ---- */

static PyObject *pieces(const gm_comm_piece *piece, int size)
{
    PyObject *list = PyList_New(0);
    for (int r = 0; list && r < size; r++) {
        list = gm_py_append(list, Py_BuildValue("(Nn)", PyLong_FromVoidPtr(piece[r].data),
                                                (Py_ssize_t)piece[r].bytes));
    }
    return list;
}

/* Takes the current exception: its words into why, itself into *cause. */
static void take_exception(PyObject **cause, char *why, size_t why_bytes)
{
    PyObject *error = gm_py_set_aside();
    PyObject *words = error ? PyObject_Str(error) : NULL;
    if (words && PyObject_Size(words) == 0) { /* an interrupt has none */
        Py_DECREF(words);
        words = PyObject_Repr(error);
    }
    PyObject *bytes = words ? PyUnicode_AsEncodedString(words, "utf-8", "replace") : NULL;
    const char *text = bytes ? PyBytes_AsString(bytes) : NULL;
    (void)snprintf(why, why_bytes, "%s", text && *text ? text : "the transport failed");
    PyErr_Clear();
    Py_XDECREF(words);
    Py_XDECREF(bytes);
    PyObject *earlier = *cause;
    *cause = error;
    Py_XDECREF(earlier);
}

/* For a thread that may be inside locks of the core: with the GIL it would have held up whoever
 * waits for those. */
static PyGILState_STATE take_gil(void)
{
    PyGILState_STATE state = PyGILState_Ensure();
    GM_ASSERT(state == PyGILState_UNLOCKED); /* the caller had released it */
    return state;
}

static bool python_exchange(void *context, const gm_comm_piece *out, const gm_comm_piece *in,
                            char *why, size_t why_bytes)
{
    python_transport *t = context;
    PyGILState_STATE state = take_gil();
    PyObject *sent = pieces(out, t->size), *received = sent ? pieces(in, t->size) : NULL;
    PyObject *done =
        received ? PyObject_CallFunctionObjArgs(t->exchange, sent, received, NULL) : NULL;
    bool is_done = done != NULL;
    if (!is_done) {
        take_exception(&t->cause, why, why_bytes);
    }
    Py_XDECREF(sent);
    Py_XDECREF(received);
    Py_XDECREF(done);
    PyGILState_Release(state);
    return is_done;
}

static void python_close(void *context)
{
    python_transport *t = context;
    PyGILState_STATE state = take_gil();
    PyObject *done = PyObject_CallNoArgs(t->close);
    if (!done) {
        PyErr_WriteUnraisable(t->close);
    }
    Py_XDECREF(done);
    PyGILState_Release(state);
}

static void python_free(void *context)
{
    python_transport *t = context;
    PyGILState_STATE state = take_gil();
    Py_XDECREF(t->exchange);
    Py_XDECREF(t->close);
    Py_XDECREF(t->cause);
    free(t);
    PyGILState_Release(state);
}

/* ---- calls ---- */

static gm_comm *begin(comm *self)
{
    GM_PY_FAIL_IF(!self->comm || self->is_closing, PyExc_ValueError, "this communicator is closed");
    self->n_inside++;
    return self->comm;
}

/* Also with an exception set, which it leaves as it is. */
static void release(comm *self)
{
    gm_comm *taken = self->comm;
    if (taken && self->n_inside == 0) {
        PyObject *error = gm_py_set_aside();
        self->comm = NULL;
        self->transport = NULL;
        GM_NO_GIL(gm_comm_free(taken));
        gm_py_put_back(error);
    }
}

/* None, or the exception; what the transport raised is its cause. */
static PyObject *end(comm *self, gm_status status)
{
    PyObject *result = status == GM_OK ? Py_NewRef(Py_None) : gm_py_raise(status);
    PyObject *cause = status != GM_OK && self->transport ? self->transport->cause : NULL;
    if (cause) {
        self->transport->cause = NULL;
        if (!PyObject_IsInstance(cause, PyExc_Exception)) { /* KeyboardInterrupt, SystemExit */
            PyErr_SetObject((PyObject *)Py_TYPE(cause), cause);
            Py_DECREF(cause);
        } else {
            PyObject *error = gm_py_set_aside();
            PyException_SetCause(error, cause); /* takes the reference */
            gm_py_put_back(error);
        }
    }
    self->n_inside--;
    if (self->is_closing) {
        release(self);
    }
    return result;
}

/* Returns from a method with what a call of the communicator, named c in it, comes to without the
 * GIL. */
#define RETURN_CALL(self, c, call) \
    do {                           \
        gm_status status;          \
        gm_comm *c = begin(self);  \
        GM_PY_TRY(c);              \
        GM_NO_GIL(status = call);  \
        return end(self, status);  \
    } while (0)

/* A method that takes numbers, v[], one for each K of `format`. */
#define COMM_CALL(name, format, call)                                                           \
    static PyObject *comm_##name(comm *self, PyObject *args)                                    \
    {                                                                                           \
        unsigned long long v[5];                                                                \
        GM_PY_TRY(PyArg_ParseTuple(args, format ":" #name, &v[0], &v[1], &v[2], &v[3], &v[4])); \
        RETURN_CALL(self, c, call);                                                             \
    }

COMM_CALL(all_gather, "KKK", gm_comm_all_gather(c, (uintptr_t)v[0], (size_t)v[1], v[2]))
COMM_CALL(reduce_scatter, "KKKK",
          gm_comm_reduce_scatter(c, (uintptr_t)v[0], (size_t)v[1], (gm_comm_dtype)v[2], v[3]))
COMM_CALL(all_reduce, "KKKKK",
          gm_comm_all_reduce(c, (uintptr_t)v[0], (size_t)v[1], (gm_comm_dtype)v[2],
                             (gm_comm_op)v[3], v[4]))

/* ---- words ---- */

COMM_CALL(label, "K", (gm_comm_label(c, v[0]), GM_OK))

static PyObject *comm_name_ranks(comm *self, PyObject *args)
{
    PyObject *list;
    int n;
    GM_PY_TRY(PyArg_ParseTuple(args, "O!i:name_ranks", &PyList_Type, &list, &n));
    gm_comm *c = begin(self);
    GM_PY_TRY(c);
    Py_ssize_t size = gm_comm_size(c);
    int *names = calloc((size_t)size, sizeof *names);
    gm_status status = names ? GM_OK : GM_FAIL(GM_ERR_NOMEM, "HOST: the names of %zd ranks", size);
    if (names && PyList_Size(list) != size) {
        status =
            GM_FAIL(GM_ERR_ARG, "name_ranks: %zd names for %zd ranks", PyList_Size(list), size);
    }
    for (Py_ssize_t r = 0; r < size && status == GM_OK; r++) {
        names[r] = (int)PyLong_AsLong(PyList_GetItem(list, r));
    }
    if (status == GM_OK) {
        status = gm_comm_name_ranks(c, names, n);
    }
    free(names);
    return end(self, status);
}

/* Empty once it is freed; the GIL is held throughout, so nobody frees it meanwhile. */
static PyObject *comm_history(comm *self, PyObject *Py_UNUSED(unused))
{
    gm_comm *c = self->comm;
    PyObject *list = PyList_New(0);
    uint64_t last = 0, hash;
    char words[GM_COMM_WORDS];
    if (c) {
        gm_comm_calls(c, &last, &hash);
    }
    for (uint64_t n = last > 512 ? last - 511 : 1; list && n <= last; n++) {
        if (gm_comm_recall(c, n, words)) {
            list =
                gm_py_append(list, Py_BuildValue("(KN)", (unsigned long long)n, gm_py_text(words)));
        }
    }
    return list;
}

static PyObject *comm_calls(comm *self, PyObject *Py_UNUSED(unused))
{
    uint64_t number = 0, hash = 0;
    if (self->comm) {
        gm_comm_calls(self->comm, &number, &hash);
    }
    return Py_BuildValue("(KK)", (unsigned long long)number, (unsigned long long)hash);
}

static PyObject *comm_failed_at(comm *self, void *Py_UNUSED(unused))
{
    return PyLong_FromUnsignedLongLong(self->comm ? gm_comm_failed_at(self->comm) : 0);
}

static PyObject *comm_check(comm *self, PyObject *Py_UNUSED(unused))
{
    RETURN_CALL(self, c, gm_comm_check(c));
}

static PyObject *comm_is_over(comm *self, PyObject *Py_UNUSED(unused))
{
    bool is_over;
    if (!self->comm || self->is_closing) {
        Py_RETURN_TRUE;
    }
    gm_comm *c = begin(self);
    GM_PY_TRY(c);
    GM_NO_GIL(is_over = gm_comm_is_over(c));
    Py_XDECREF(end(self, GM_OK));
    return PyBool_FromLong(is_over);
}

/* Nothing after close(). */
static PyObject *comm_abort(comm *self, PyObject *args)
{
    const char *reason;
    GM_PY_TRY(PyArg_ParseTuple(args, "s:abort", &reason));
    if (!self->comm || self->is_closing) {
        Py_RETURN_NONE;
    }
    RETURN_CALL(self, c, (gm_comm_abort(c, reason), GM_OK));
}

static PyObject *comm_close(comm *self, PyObject *Py_UNUSED(unused))
{
    self->is_closing = true;
    release(self);
    Py_RETURN_NONE;
}

static void comm_dealloc(comm *self)
{
    release(self);
    gm_py_free((PyObject *)self);
}

gm_comm *gm_py_comm_take(PyObject *object)
{
    GM_PY_FAIL_IF(!object || Py_TYPE(object) != comm_type, PyExc_TypeError, "a Comm is wanted");
    gm_comm *taken = begin((comm *)object);
    if (taken) {
        Py_INCREF(object);
    }
    return taken;
}

void gm_py_comm_give(PyObject *object)
{
    comm *self = (comm *)object;
    self->n_inside--;
    if (self->is_closing) {
        release(self);
    }
    Py_DECREF(object);
}

/* ---- construction ---- */

static comm *new_object(int rank, int size)
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(comm_type, Py_tp_alloc);
    comm *self = (comm *)allocate(comm_type, 0);
    if (self) {
        self->rank = rank;
        self->size = size;
    }
    return self;
}

/* The object with what was made for it; where that has failed, the exception. */
static PyObject *finish_new(comm *self, gm_status status, gm_comm *made)
{
    self->comm = made;
    if (status != GM_OK) {
        Py_DECREF((PyObject *)self);
        return gm_py_raise(status);
    }
    return (PyObject *)self;
}

static PyObject *comm_host(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *exchange, *close;
    int rank, size;
    GM_PY_TRY(PyArg_ParseTuple(args, "OOii:comm_host", &exchange, &close, &rank, &size));
    comm *self = new_object(rank, size);
    python_transport *t = self ? calloc(1, sizeof *t) : NULL;
    if (!t) {
        Py_XDECREF((PyObject *)self);
        return self ? PyErr_NoMemory() : NULL;
    }
    t->exchange = Py_NewRef(exchange);
    t->close = Py_NewRef(close);
    t->size = size;
    gm_comm_transport transport = {python_exchange, python_close, python_free, t};
    gm_status status;
    gm_comm *made = NULL;
    GM_NO_GIL(status = gm_comm_host_new(&transport, rank, size, &made));
    self->transport = status == GM_OK ? t : NULL;
    return finish_new(self, status, made);
}

static PyObject *comm_nccl_id(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *path;
    uint8_t id[GM_COMM_ID_BYTES];
    gm_status status;
    GM_PY_TRY(PyArg_ParseTuple(args, "z:comm_nccl_id", &path));
    GM_NO_GIL(status = gm_comm_nccl_id(path, id));
    return status == GM_OK ? PyBytes_FromStringAndSize((const char *)id, sizeof id)
                           : gm_py_raise(status);
}

static PyObject *comm_nccl(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *path, *id;
    Py_ssize_t id_bytes;
    int ordinal, rank, size;
    double timeout;
    gm_status status;
    GM_PY_TRY(PyArg_ParseTuple(args, "ziy#iid:comm_nccl", &path, &ordinal, &id, &id_bytes, &rank,
                               &size, &timeout));
    GM_PY_FAIL_IF(id_bytes != GM_COMM_ID_BYTES, PyExc_ValueError,
                  "id has %zd bytes; comm_nccl_id() makes %d", id_bytes, GM_COMM_ID_BYTES);
    comm *self = new_object(rank, size);
    GM_PY_TRY(self);
    gm_comm *made = NULL;
    GM_NO_GIL(status =
                  gm_comm_nccl_new(path, ordinal, (const uint8_t *)id, rank, size, timeout, &made));
    return finish_new(self, status, made);
}

static PyObject *comm_paper(PyObject *Py_UNUSED(module), PyObject *args)
{
    int size;
    GM_PY_TRY(PyArg_ParseTuple(args, "i:comm_paper", &size));
    comm *self = new_object(0, size);
    gm_comm *made = NULL;
    gm_status status = self ? gm_comm_paper_new(size, &made) : GM_OK;
    return self ? finish_new(self, status, made) : NULL;
}

/* ---- the type ---- */

#define COMM_METHOD(name, flags, doc) GM_PY_METHOD(#name, comm_##name, METH_##flags, doc)

static PyMethodDef comm_methods[] = {
    COMM_METHOD(all_gather, VARARGS, "(address, shard_bytes, stream)"),
    COMM_METHOD(reduce_scatter, VARARGS, "(address, shard_count, dtype, stream)"),
    COMM_METHOD(all_reduce, VARARGS, "(address, count, dtype, op, stream)"),
    COMM_METHOD(label, VARARGS, "(label): of the collectives from here on."),
    COMM_METHOD(name_ranks, VARARGS, "(names, n): rank r is names[r] of n."),
    COMM_METHOD(history, NOARGS, "The last 512: [(number, words)]."),
    COMM_METHOD(calls, NOARGS, "(how many so far, a hash of them)."),
    COMM_METHOD(is_over, NOARGS, "Whether nothing that was issued is under way any more."),
    COMM_METHOD(check, NOARGS, "Raises the first failure, if there is one."),
    COMM_METHOD(abort, VARARGS, "(reason): ends it, here and for the others."),
    COMM_METHOD(close, NOARGS, "Waits for what is issued, and frees it."),
    {NULL, NULL, 0, NULL},
};

static PyMemberDef comm_members[] = {
    {"rank", T_INT, offsetof(comm, rank), READONLY, NULL},
    {"size", T_INT, offsetof(comm, size), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef comm_properties[] = {
    {"failed_at", (getter)comm_failed_at, NULL, "The failure's collective, or 0.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot comm_parts[] = {
    {Py_tp_doc, "One rank's end of the collectives in csrc/comm.h."},
    {Py_tp_dealloc, (void *)comm_dealloc},
    {Py_tp_methods, comm_methods},
    {Py_tp_members, comm_members},
    {Py_tp_getset, comm_properties},
    {0, NULL},
};

static PyMethodDef module_methods[] = {
    {"comm_host", comm_host, METH_VARARGS,
     "exchange(out, into) gets two lists with one (address, bytes) for each rank, sends the first, "
     "receives the second, and raises where it cannot, naming the rank; close() ends it, any "
     "number of times."},
    {"comm_nccl_id", comm_nccl_id, METH_VARARGS,
     "What rank 0 makes for all ranks.  path: a libnccl.so.2 to open if none is loaded, or None."},
    {"comm_nccl", comm_nccl, METH_VARARGS,
     "Returns when all ranks have come, raises after timeout seconds."},
    {"comm_paper", comm_paper, METH_VARARGS,
     "Rank 0 of `size` that all do the same, for a Core on paper alone."},
    {NULL, NULL, 0, NULL},
};

int gm_py_comm_init(PyObject *module)
{
    comm_type = gm_py_add_type(module, "gemini_strategy._C.Comm", sizeof(comm),
                               Py_TPFLAGS_DISALLOW_INSTANTIATION, comm_parts);
    return comm_type ? PyModule_AddFunctions(module, module_methods) : -1;
}
