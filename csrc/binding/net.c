/* net.c - the Python type Net, base of hooks.py's SavedTensorNet: packs and unpacks what autograd
 * saves in a unit's forward; see [Note: backward without backward hooks] there.
 *
 * Invariants
 *   1. Between push and pop our hooks are the innermost of their thread, and what the user's own
 *      would have got goes to them: the thread's last frame has the pair that was on top.
 *   2. A token's chunk is pinned from its unpacking until another node of the same graph task
 *      unpacks, and from then on by the storage itself if anybody still has it.
 *   3. What was saved is handed out only in the version in which it was saved, as torch does; a
 *      weight that a checkpoint would save again when it computes again, in that of then.
 *   4. No pointer into `outers` or `running` outlives a call that runs Python or drops the GIL. */
#include "binding/unit.h"

#include <stdlib.h>
#include <structmember.h>

#include "binding/core.h"
#include "binding/frames.h"
#include "binding/running.h"
#include "binding/saved.h"
#include "binding/task.h"
#include "torch/abi.h"

/* The saved-tensor hooks that were on top when a net pushed its own. */
typedef struct outer {
    unsigned long thread;
    PyObject *pack, *unpack; /* the user's hooks below ours; NULL: none */
    /* torch's checkpointing: it is to see no weights, whose memory it would keep. */
    bool is_blind;
} outer;

struct gm_py_net {
    PyObject_HEAD gm_py_net *next; /* in `started` */
    PyObject *core, *engine, *mark;
    PyObject *pack, *unpack; /* our methods, bound once */
    uintptr_t begin, end;    /* addresses of weights */
    PyObject *slots;         /* a tuple, ordered by address */
    uintptr_t *addresses;    /* of `slots` */
    int ordinal;             /* -1 on the host device */
    gm_running running;
    unsigned long running_thread; /* of its innermost task */
};

PyTypeObject *gm_py_net_type;
static gm_py_net *started; /* every net that is: the one on top packs what any of them manages */
/* Of all nets, as torch has one stack of hooks in a thread: what one has pushed another pops. */
static gm_frames outers = {.size = sizeof(outer)};

/* ---- the engine behind it ---- */

gm_engine *gm_py_net_engine(gm_py_net *net)
{
    return gm_py_core_engine(net->core);
}

bool gm_py_net_is_closed(gm_py_net *net)
{
    return gm_py_core_is_closed(net->core);
}

int gm_py_net_stream(gm_py_net *net, gm_stream *out)
{
    return gm_py_stream(net->ordinal, out);
}

/* Changes of the weight that a graph built before must not survive. */
static int changes_of(const gm_py_slot *slot, long long *out)
{
    gm_py_net *net = (gm_py_net *)slot->net;
    if (gm_py_version(slot->parameter, out) < 0) {
        return -1;
    }
    if (net && (PyObject *)net != Py_None && !gm_py_net_is_closed(net)) {
        /* updates in a backward */
        *out += (long long)gm_engine_n_immediate(gm_py_net_engine(net), (uint32_t)slot->id);
    }
    return 0;
}

/* Of the slots, the last that begins at or before `address`, which is within the weights. */
static gm_py_slot *slot_at(gm_py_net *net, uintptr_t address)
{
    size_t n =
        gm_up_to(net->addresses, (size_t)PyTuple_Size(net->slots), sizeof *net->addresses, address);
    return (gm_py_slot *)PyTuple_GetItem(net->slots, n ? (Py_ssize_t)n - 1 : 0);
}

/* ---- nodes of backward ---- */

/* What nodes that are done with have shown: somebody may still have it. */
static int end_uses(gm_py_net *net, gm_engine *engine)
{
    uintptr_t address;
    gm_stream stream;
    int result = gm_py_net_stream(net, &stream);
    while (gm_running_next_ended(&net->running, &address)) {
        gm_py_slot *slot = slot_at(net, address);
        slot->touch_count--;
        result = result < 0 ? result : gm_py_slot_end_use(slot, engine, stream);
    }
    return result;
}

static int release_touched(gm_py_net *net, uint32_t n_keep)
{
    gm_engine *engine = gm_py_net_engine(net);
    if (!engine) {
        return -1;
    }
    int ended = end_uses(net, engine);
    PyObject *error = gm_py_set_aside();
    gm_status status;
    GM_WITHOUT_GIL(engine, status = gm_engine_release_touched(engine, n_keep));
    int released = gm_py_raised(status);
    gm_py_put_back(error);
    return ended < 0 ? ended : released;
}

/* What a graph task that is over has pinned, nobody reads any more. */
static int end_task(PyObject *self, long long task)
{
    gm_py_net *net = (gm_py_net *)self;
    uint32_t n_keep;
    return gm_py_net_is_closed(net) || !gm_running_end(&net->running, task, &n_keep)
               ? 0
               : release_touched(net, n_keep);
}

/* A graph task unpacks for the first time.  Nothing else would say when it ends. */
static int begin_task(gm_py_net *net, long long task)
{
    PyObject *end = gm_py_task_end_new((PyObject *)net, task, end_task);
    int result = end ? gm_py_done(PyObject_CallMethodObjArgs(gm_torch.execution_engine,
                                                             gm_torch.s_queue_callback, end, NULL))
                     : -1;
    Py_XDECREF(end);
    return result;
}

/* Unpins what earlier nodes of this task have touched; 0 if the task is new to us, else 1. */
static int follow(gm_py_net *net, long long node, long long task)
{
    uint32_t n_keep;
    switch (gm_running_follow(&net->running, node, task, &n_keep)) {
    case GM_FOLLOW_NEW: return 0;
    case GM_FOLLOW_SAME: return 1;
    case GM_FOLLOW_NEXT: return release_touched(net, n_keep) < 0 ? -1 : 1;
    }
    return -1; /* not reached */
}

/* Makes the chunk at `address` readable for the running node. */
static int touch(gm_py_net *net, uintptr_t address)
{
    long long node, task;
    gm_stream stream;
    gm_engine *engine = gm_py_net_engine(net);
    if (!engine || gm_py_net_stream(net, &stream) < 0 || gm_py_node_key(&node) < 0 ||
        gm_py_task(&task) < 0) {
        return -1;
    }
    int is_known = follow(net, node, task);
    if (is_known < 0) {
        return -1;
    }
    bool is_new = !is_known || !net->running.n; /* another thread may have ended them all */
    uint32_t n_before = gm_engine_n_touched(engine);
    if (is_new) { /* on a GPU one thread runs the nodes of all */
        if (net->running.n && net->ordinal < 0 &&
            net->running_thread != PyThread_get_thread_ident()) {
            return gm_py_done(
                PyObject_CallMethod((PyObject *)net, "refuse_thread", "O", slot_at(net, address)));
        }
        if (task >= 0 &&
            begin_task(net, task) < 0) { /* one may be looked at outside any backward */
            return -1;
        }
        net->running_thread = PyThread_get_thread_ident();
    }
    if ((is_new && !gm_running_push(&net->running, node, task, n_before)) ||
        !gm_running_note(&net->running, address)) {
        PyErr_NoMemory();
        return -1;
    }
    slot_at(net, address)->touch_count++;
    gm_status status;
    for (bool is_last = false;; is_last = true) {
        GM_WITHOUT_GIL(engine, status = gm_engine_touch(engine, address, stream));
        if (status != GM_ERR_NOMEM) {
            break;
        }
        gm_py_raise(status);
        if (is_last || !gm_py_made_room((PyObject *)net, (PyObject *)slot_at(net, address))) {
            return gm_py_explain((PyObject *)net, "no_room", (PyObject *)slot_at(net, address));
        }
    }
    return status != GM_OK || net->mark == Py_None
               ? gm_py_raised(status)
               : gm_py_done(PyObject_CallFunctionObjArgs(net->mark, slot_at(net, address), NULL));
}

int gm_py_net_touch(gm_py_net *net, const gm_py_slot *slot)
{
    gm_engine *engine = gm_py_net_engine(net);
    return engine ? touch(net, gm_engine_address(engine, (uint32_t)slot->id)) : -1;
}

/* Outside backward nothing is needed any more but by tasks that other threads run, which say when
 * they end.  Inside, what earlier nodes have touched is not: a node may start with the
 * recomputation of an activation, before it has unpacked any weight. */
int gm_py_net_unpin(gm_py_net *net)
{
    if (net->running.n == 0) {
        return 0;
    }
    int in_backward = gm_py_in_backward();
    if (in_backward < 0) {
        return -1;
    }
    if (!in_backward) {
        if (net->running.nodes[0].task >= 0) {
            return 0;
        }
        gm_running_drop(&net->running, 0);
        return release_touched(net, 0);
    }
    long long key, task;
    if (gm_py_node_key(&key) < 0 || gm_py_task(&task) < 0) {
        return -1;
    }
    return follow(net, key, task) < 0 ? -1 : 0;
}

/* ---- saving ---- */

/* Whether the tensor is the parameter, or a view of it that shares its version: 1 or 0. */
static int is_of_parameter(const gm_py_slot *slot, PyObject *tensor)
{
    PyObject *base = PyObject_GetAttr(tensor, gm_torch.s_base);
    Py_XDECREF(base);
    return base ? base == slot->parameter : -1;
}

/* The place, never the tensor: that would keep storage and chunk until backward. */
static saved *pack_token(gm_py_net *net, PyObject *tensor, uintptr_t address, bool is_latest)
{
    gm_py_slot *slot = slot_at(net, address);
    saved *self = gm_py_saved_new(SAVED_TOKEN, (PyObject *)slot);
    GM_PY_TRY(self);
    self->address = address;
    int is_checked = 1;
    bool is_ok = true;
    if (tensor != slot->parameter) {
        self->shape = PyObject_GetAttr(tensor, gm_torch.s_shape);
        self->stride = PyObject_CallMethodObjArgs(tensor, gm_torch.s_stride, NULL);
        self->dtype = PyObject_GetAttr(tensor, gm_torch.s_dtype);
        self->content = is_latest ? NULL : Py_XNewRef(slot->content); /* of when it is unpacked */
        int is_conj = gm_py_is_true(PyObject_CallMethodObjArgs(tensor, gm_torch.s_is_conj, NULL));
        int is_neg = gm_py_is_true(PyObject_CallMethodObjArgs(tensor, gm_torch.s_is_neg, NULL));
        self->is_conj = is_conj > 0;
        self->is_neg = is_neg > 0;
        is_ok = self->shape && self->stride && self->dtype && is_conj >= 0 && is_neg >= 0;
        is_checked = is_ok ? is_of_parameter(slot, tensor) : -1;
    }
    self->is_checked = is_checked > 0 && !is_latest;
    if (!is_ok || is_checked < 0 || (self->is_checked && changes_of(slot, &self->version) < 0)) {
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    return self;
}

static saved *pack_delegated(const outer *below, PyObject *tensor)
{
    PyObject *pack = Py_NewRef(below->pack);
    saved *self = gm_py_saved_new(SAVED_DELEGATED, below->unpack);
    if (self && !(self->tensor = PyObject_CallFunctionObjArgs(pack, tensor, NULL))) {
        Py_DECREF((PyObject *)self);
        self = NULL;
    }
    Py_DECREF(pack);
    return self;
}

/* The net whose weights are there, or NULL. */
static gm_py_net *owner_of(uintptr_t address)
{
    gm_py_net *net = started;
    while (net && !(net->begin <= address && address < net->end && !gm_py_net_is_closed(net))) {
        net = net->next;
    }
    return net;
}

/* The user's hooks see weights, too; what they give back as it is becomes a token. */
static PyObject *pack_weight(gm_py_net *owner, PyObject *tensor, uintptr_t address)
{
    const outer *below = gm_frames_top(&outers);
    /* Not so what is borrowed: it may be absent when that is computed again. */
    bool is_blind =
        below && below->is_blind && !(owner && gm_py_slot_is_borrowed(slot_at(owner, address)));
    if (below && below->pack && !(is_blind && owner)) {
        saved *delegated = pack_delegated(below, tensor);
        if (!delegated || delegated->tensor != tensor) {
            return (PyObject *)delegated;
        }
        Py_DECREF((PyObject *)delegated);
    }
    /* What is absent holds no bytes, and is kept as it is. */
    return (PyObject *)(owner ? pack_token(owner, tensor, address, is_blind)
                              : gm_py_saved_plain(tensor));
}

static PyObject *net_pack(gm_py_net *net, PyObject *tensor)
{
    uintptr_t address;
    if (gm_py_data_ptr(tensor, &address) < 0) {
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) {
            return NULL;
        }
        PyErr_Clear(); /* tensors without plain storage cannot show our bytes */
        address = 0;
        int is_absent =
            gm_py_is_true(PyObject_CallMethod((PyObject *)net, "is_absent", "O", tensor));
        if (is_absent) {
            return is_absent < 0 ? NULL : pack_weight(NULL, tensor, 0);
        }
    }
    gm_py_net *owner = owner_of(address);
    if (owner) {
        return pack_weight(owner, tensor, address);
    }
    const outer *below = gm_frames_top(&outers);
    if (below && below->pack) {
        return (PyObject *)pack_delegated(below, tensor);
    }
    return (PyObject *)gm_py_saved_plain(tensor);
}

/* The user's unpack may run a forward (checkpointing): the node has launched nothing yet, so what
 * it has unpacked may go meanwhile, and comes back. */
static PyObject *unpack_delegated(gm_py_net *net, const saved *self)
{
    long long node = -1;
    size_t n_addresses;
    uint32_t n_keep;
    if (net->running.n && gm_py_node_key(&node) < 0) {
        return NULL;
    }
    uintptr_t *addresses = gm_running_take(&net->running, node, &n_addresses, &n_keep);
    if (!addresses) {
        return PyObject_CallFunctionObjArgs(self->owner, self->tensor, NULL);
    }
    PyObject *tensor = NULL;
    if (release_touched(net, n_keep) == 0) {
        tensor = PyObject_CallFunctionObjArgs(self->owner, self->tensor, NULL);
    }
    for (size_t i = 0; tensor && i < n_addresses; i++) {
        if (touch(net, addresses[i]) < 0) {
            Py_CLEAR(tensor);
        }
    }
    for (size_t i = 0; i < n_addresses; i++) {
        slot_at(net, addresses[i])->touch_count--; /* it has been counted again */
    }
    free(addresses);
    return tensor;
}

/* 1: pushed; 0: torch forbids hooks here.  It rarely does, so it is asked when it has refused. */
static int push_hooks(const gm_py_net *net)
{
    if (gm_py_done(
            PyObject_CallFunctionObjArgs(gm_torch.push_hooks, net->pack, net->unpack, NULL)) == 0) {
        return 1;
    }
    PyObject *error = gm_py_set_aside();
    int is_enabled = gm_py_is_true(PyObject_CallNoArgs(gm_torch.is_hooks_enabled));
    gm_py_put_back(error); /* hides one of its own */
    if (is_enabled) {
        return -1;
    }
    PyErr_Clear();
    return 0;
}

/* Where a backward is to be differentiated, what its node saves again is to be a token, too.  torch
 * ends the hooks with the node. */
static int net_node(const gm_py_net *net)
{
    int in_backward = gm_torch_is_grad_enabled() ? gm_py_in_backward() : 0;
    if (in_backward <= 0) {
        return in_backward;
    }
    PyObject *top = PyObject_CallFunctionObjArgs(gm_torch.top_hooks, Py_True, NULL);
    bool is_bare = top == Py_None;
    Py_XDECREF(top);
    return !top ? -1 : is_bare ? push_hooks(net) : 0;
}

/* The place as a tensor, readable for the running node. */
static PyObject *show_token(gm_py_net *net, const saved *self)
{
    gm_py_slot *slot = (gm_py_slot *)self->owner;
    bool has_left = self->content != NULL && self->content != slot->content;
    if (has_left) {
        return PyObject_CallMethod((PyObject *)slot, "left", "OOOOKii", self->content, self->shape,
                                   self->stride, self->dtype, (unsigned long long)self->address,
                                   self->is_conj, self->is_neg);
    }
    if (touch(net, self->address) < 0 || gm_py_slot_show(slot) < 0 || net_node(net) < 0) {
        return NULL;
    }
    if (!self->shape) {
        return Py_NewRef(slot->shown);
    }
    if (!self->is_conj && !self->is_neg && self->dtype == slot->dtype &&
        self->address == gm_engine_address(gm_py_net_engine(net), (uint32_t)slot->id)) {
        PyObject *shown = Py_NewRef(slot->shown); /* another thread may let go of it */
        PyObject *view = PyObject_CallMethodObjArgs(shown, gm_torch.s_as_strided, self->shape,
                                                    self->stride, NULL);
        Py_DECREF(shown);
        return view;
    }
    return PyObject_CallMethod((PyObject *)slot, "view", "OOOKii", self->shape, self->stride,
                               self->dtype, (unsigned long long)self->address, self->is_conj,
                               self->is_neg);
}

static PyObject *unpack(gm_py_net *net, const saved *self)
{
    if (self->kind == SAVED_DELEGATED) {
        return unpack_delegated(net, self);
    }
    long long now = self->version;
    if (self->kind == SAVED_TOKEN) {
        PyObject *own = ((gm_py_slot *)self->owner)->net;
        if (own && own != Py_None && gm_py_net_is_closed((gm_py_net *)own)) {
            return PyObject_CallMethod((PyObject *)net, "refuse_closed", "O", self->owner);
        }
        if (self->is_checked && changes_of((gm_py_slot *)self->owner, &now) < 0) {
            return NULL;
        }
    } else if (self->version >= 0 && gm_py_version(self->tensor, &now) < 0) {
        return NULL;
    }
    if (now != self->version) {
        PyObject *slot = self->kind == SAVED_TOKEN ? self->owner : Py_None;
        return PyObject_CallMethod((PyObject *)net, "refuse_modified", "OOLL",
                                   self->tensor ? self->tensor : Py_None, slot, now, self->version);
    }
    return self->kind == SAVED_TOKEN
               ? show_token((gm_py_net *)((gm_py_slot *)self->owner)->net, self)
               : Py_NewRef(self->tensor);
}

static PyObject *net_unpack(gm_py_net *net, PyObject *object)
{
    GM_PY_FAIL_IF(Py_TYPE(object) != gm_py_saved_type, PyExc_TypeError,
                  "unpack takes what pack has given");
    Py_INCREF(object); /* the user's unpack may end the graph that holds it */
    PyObject *tensor = unpack(net, (const saved *)object);
    Py_DECREF(object);
    return tensor;
}

/* ---- being on top ---- */

/* The net whose method it is, or none. */
static int net_of(PyObject *pack, const gm_py_net **out)
{
    PyObject *self = PyObject_GetAttrString(pack, "__self__");
    bool is_net = self && PyObject_TypeCheck(self, gm_py_net_type);
    Py_XDECREF(self); /* the method holds it */
    *out = is_net ? (const gm_py_net *)self : NULL;
    return gm_py_without(PyExc_AttributeError);
}

static void release_outer(const outer *frame)
{
    Py_XDECREF(frame->pack);
    Py_XDECREF(frame->unpack);
}

int gm_py_net_push(gm_py_net *net)
{
    if (gm_frames_reserve(&outers) < 0) {
        return -1;
    }
    PyObject *top = PyObject_CallFunctionObjArgs(gm_torch.top_hooks, Py_True, NULL);
    if (!top) {
        return -1;
    }
    outer frame = {.thread = PyThread_get_thread_ident()};
    if (top != Py_None) {
        frame.pack = PyTuple_GetItem(top, 0);
        frame.unpack = PyTuple_GetItem(top, 1);
        const gm_py_net *other = net;
        int is_blind = 0;
        if (!frame.pack || !frame.unpack ||
            (frame.pack != net->pack && net_of(frame.pack, &other) < 0) ||
            (!other && (is_blind = gm_py_is_checkpoint(frame.pack)) < 0)) {
            Py_DECREF(top);
            return -1;
        }
        const outer *below = other ? gm_frames_top(&outers) : NULL;
        frame.is_blind = is_blind;
        if (other) { /* nets delegate past each other: each has its units on top */
            frame = below ? *below : (outer){.thread = frame.thread};
        }
        Py_XINCREF(frame.pack);
        Py_XINCREF(frame.unpack);
    }
    Py_DECREF(top);
    int is_pushed = push_hooks(net);
    if (is_pushed > 0) {
        gm_frames_push(&outers, &frame);
    } else {
        release_outer(&frame);
    }
    return is_pushed;
}

/* This thread has a frame. */
static int pop_one(void)
{
    outer frame;
    gm_frames_pop(&outers, &frame);
    int result = gm_py_done(PyObject_CallNoArgs(gm_torch.pop_hooks));
    release_outer(&frame);
    return result;
}

size_t gm_py_nets_depth(void)
{
    return gm_frames_depth(&outers);
}

/* An interrupt passes units without their leaving: an outer unit takes its inner ones away. */
int gm_py_nets_pop_to(size_t depth)
{
    int result = 0;
    for (size_t n = gm_py_nets_depth(); n > depth; n--) {
        result = pop_one() < 0 ? -1 : result;
    }
    return result;
}

static PyObject *net_push(gm_py_net *net, PyObject *Py_UNUSED(unused))
{
    size_t depth = gm_py_nets_depth();
    int is_pushed = gm_py_net_push(net);
    return is_pushed < 0 ? NULL : is_pushed ? PyLong_FromSize_t(depth) : Py_NewRef(Py_None);
}

static PyObject *none_unless(int failed)
{
    return failed < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *net_pop_to(gm_py_net *Py_UNUSED(net), PyObject *depth)
{
    size_t wanted = PyLong_AsSize_t(depth);
    return PyErr_Occurred() ? NULL : none_unless(gm_py_nets_pop_to(wanted));
}

static PyObject *net_unpin(gm_py_net *net, PyObject *Py_UNUSED(unused))
{
    return none_unless(gm_py_net_unpin(net));
}

/* find(tensor) -> the slot whose bytes it shows, or None. */
static PyObject *net_find(gm_py_net *net, PyObject *tensor)
{
    uintptr_t address;
    if (gm_py_data_ptr(tensor, &address) < 0) {
        return NULL;
    }
    bool is_ours = net->begin <= address && address < net->end;
    return Py_NewRef(is_ours ? (PyObject *)slot_at(net, address) : Py_None);
}

/* ---- life ---- */

static PyObject *net_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    return gm_py_torch_init() < 0 ? NULL : PyType_GenericNew(type, args, kwargs);
}

/* start(engine, core, slots, ordinal, mark); slots: ordered by address, none of them empty. */
static PyObject *net_start(gm_py_net *net, PyObject *args)
{
    PyObject *engine, *owner, *slots, *mark;
    GM_PY_FAIL_IF(net->core, PyExc_RuntimeError, "a net is started once");
    GM_PY_TRY(PyArg_ParseTuple(args, "OOO!iO", &engine, &owner, &PyTuple_Type, &slots,
                               &net->ordinal, &mark));
    gm_engine *handle = gm_py_core_engine(owner);
    GM_PY_TRY(handle);
    size_t n = (size_t)PyTuple_Size(slots);
    net->addresses = calloc(n ? n : 1, sizeof *net->addresses);
    if (!net->addresses) {
        return PyErr_NoMemory();
    }
    for (size_t i = 0; i < n; i++) {
        PyObject *slot = PyTuple_GetItem(slots, (Py_ssize_t)i);
        GM_PY_FAIL_IF(!PyObject_TypeCheck(slot, gm_py_slot_type), PyExc_TypeError,
                      "a net has slots");
        net->addresses[i] = gm_engine_address(handle, (uint32_t)((gm_py_slot *)slot)->id);
    }
    if (n) {
        gm_engine_weight_span(handle, &net->begin, &net->end);
    }
    net->engine = Py_NewRef(engine);
    net->slots = Py_NewRef(slots);
    net->mark = Py_NewRef(mark);
    net->pack = PyObject_GetAttrString((PyObject *)net, "pack");
    net->unpack = PyObject_GetAttrString((PyObject *)net, "unpack");
    net->core = Py_NewRef(owner);
    net->next = started;
    started = net;
    return none_unless(net->pack && net->unpack ? 0 : -1);
}

/* Those that a clear lets go. */
#define NET_FIELDS(X) X(engine) X(mark) X(pack) X(unpack)

static int net_traverse(gm_py_net *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    NET_FIELDS(GM_PY_VISIT)
    Py_VISIT(self->core);
    Py_VISIT(self->slots);
    return 0;
}

static int net_clear(gm_py_net *self)
{
    NET_FIELDS(GM_PY_CLEAR)
    return 0;
}

static void net_dealloc(gm_py_net *net)
{
    PyObject_GC_UnTrack(net);
    net_clear(net);
    for (gm_py_net **link = &started; *link; link = &(*link)->next) {
        if (*link == net) {
            *link = net->next;
            break;
        }
    }
    gm_running_free(&net->running);
    Py_XDECREF(net->core);
    Py_XDECREF(net->slots);
    free(net->addresses);
    gm_py_free((PyObject *)net);
}

static PyMethodDef net_methods[] = {
    GM_PY_METHOD("start", net_start, METH_VARARGS, "start(engine, core, slots, ordinal, mark)"),
    GM_PY_METHOD("push", net_push, METH_NOARGS,
                 "push() -> how many were pushed before; None: torch forbids it"),
    GM_PY_METHOD("pop_to", net_pop_to, METH_O, "pop_to(depth): until as many are pushed"),
    GM_PY_METHOD("pack", net_pack, METH_O, "pack(tensor) -> what autograd keeps"),
    GM_PY_METHOD("unpack", net_unpack, METH_O, "unpack(packed) -> tensor, readable now"),
    GM_PY_METHOD("find", net_find, METH_O,
                 "find(tensor) -> the slot whose bytes it shows, or None"),
    GM_PY_METHOD("unpin", net_unpin, METH_NOARGS, "unpin(): what is no longer needed"),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot net_parts[] = {
    {Py_tp_new, (void *)net_new},
    {Py_tp_dealloc, (void *)net_dealloc},
    {Py_tp_traverse, (void *)net_traverse},
    {Py_tp_clear, (void *)net_clear},
    {Py_tp_methods, net_methods},
    {Py_tp_doc, "Packs and unpacks saved tensors; base of hooks.SavedTensorNet."},
    {0, NULL},
};

int gm_py_net_init(PyObject *module)
{
    gm_py_net_type = gm_py_add_type(module, "gemini_strategy._C.Net", sizeof(gm_py_net),
                                    Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, net_parts);
    return gm_py_net_type && gm_py_saved_init() == 0 ? gm_py_task_init() : -1;
}
