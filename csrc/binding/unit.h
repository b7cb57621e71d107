/* unit.h - what torch.c, gate.c, slot.c, net.c, grad.c, unit.c and call.c share, each of which
 * calls those before it: slots, the net that catches what autograd saves, and the functions of
 * torch that both call for every unit and every backward node.
 *
 * These types are the bases of the Python classes of hooks.py and slot.py: C does what every unit
 * does every time, and calls a method of the Python class for everything that is rare. */
#pragma once

#include "binding/common.h"

#include "engine/engine.h"

/* One managed parameter (slot.py has the fields' meanings). */
typedef struct gm_py_slot {
    /* What every unit looks at comes first: few lines of a cache. */
    PyObject_HEAD char is_watched;     /* what is written through `shown` is looked for */
    char is_assigned;                  /* what was assigned to it may have been written since */
    long long open_count, touch_count; /* units, backward nodes that use `shown` */
    long long borrow_count;            /* of open_count, those for another module */
    long long version;                 /* of the parameter, when last looked at */
    PyObject *parameter;
    PyObject *absent; /* what the parameter's data is outside its units */
    PyObject *inside; /* `shown` with the gate's key: what the parameter's data is in its units */
    PyObject *shown;  /* its bytes: one tensor for all users; None: to be made */
    PyObject *shown_storage; /* the address of its StorageImpl, an int */
    long long shown_count;   /* references to that when nobody else has any */
    PyObject *readers;     /* a list of threads whose operations have passed the gate; None: none */
    PyObject *shown_lease; /* which the storage of `shown` ends when it dies */
    long long id, format;
    PyObject *content; /* stands for the values that the weight has until others are assigned */
    PyObject *engine, *net, *dtype, *plain_class, *managed_class;
} gm_py_slot;

typedef struct gm_py_net gm_py_net; /* net.c */

/* Of torch, each looked up once: its functions and classes that are not public (as _torch.py has
 * them), attributes of every tensor (whatever stands in their places on torch.Tensor or on a
 * parameter's class), and names. */
/* clang-format off */
#define GM_TORCH_PRIVATE(X)                                                                      \
    X(current_node, "current_node") X(current_task, "current_task")                              \
    X(is_hooks_enabled, "has_saved_tensors_hooks") X(top_hooks, "top_saved_tensors_hooks")       \
    X(push_hooks, "push_saved_tensors_hooks") X(pop_hooks, "pop_saved_tensors_hooks")            \
    X(use_count, "storage_use_count") X(raw_stream, "current_raw_stream")                        \
    X(set_excluded, "exclude_key") X(n_modes, "n_dispatch_modes") X(is_tracing, "is_tracing")    \
    X(has_autocast, "has_autocast") X(without_subclasses, "DisableTorchFunctionSubclass")        \
    X(tensor_base, "TensorBase") X(execution_engine, "execution_engine")
#define GM_TORCH_OF_TENSORS(X)                                                                   \
    X(get_data_ptr, "data_ptr") X(data, "data") X(grad, "grad") X(version, "_version")
#define GM_TORCH_NAMES(X)                                                                        \
    X(s_detach, "detach") X(s_sequence_nr, "_sequence_nr") X(s_class, "__class__")               \
    X(s_layout, "layout") X(s_dtype, "dtype") X(s_shape, "shape") X(s_stride, "stride")          \
    X(s_is_conj, "is_conj") X(s_is_neg, "is_neg") X(s_base, "_base")                             \
    X(s_as_strided, "as_strided") X(s_requires_grad, "requires_grad")                            \
    X(s_module, "__module__") X(s_begin, "__enter__") X(s_end, "__exit__")                       \
    X(s_locals, "f_locals") X(s_self, "self") X(s_call, "_call_impl")                            \
    X(s_compiled_call, "_compiled_call_impl") X(s_training, "training")                          \
    X(s_queue_callback, "queue_callback")
/* clang-format on */
typedef struct gm_py_torch {
    PyObject *strided, *tensor_class, *gate_key;
#define X(field, name) PyObject *field;
    GM_TORCH_PRIVATE(X) GM_TORCH_OF_TENSORS(X) GM_TORCH_NAMES(X)
#undef X
} gm_py_torch;
extern gm_py_torch gm_torch;
int gm_py_torch_init(void); /* idempotent; -1 with an exception set */

/* With a MemoryError set: whether object.make_room(about) found some; the error is then gone. */
bool gm_py_made_room(PyObject *object, PyObject *about);
/* Hands the pending exception, an error of memory, to `object.<method>(about, error)`, which raises
 * a better one; any other stays. Returns -1. */
int gm_py_explain(PyObject *object, const char *method, PyObject *about);

/* torch looks for __torch_function__ of a parameter's class at every access, to find that it has
 * none: not between these, on this thread.  Gives what ends it; NULL, and torch looks.  Both leave
 * a pending exception as it is. */
PyObject *gm_py_without_subclasses(void);
void gm_py_with_subclasses(PyObject *context);

/* Every function below: -1 (or NULL) with an exception set on failure. */
PyObject *gm_py_get(PyObject *attribute, PyObject *tensor); /* of gm_torch's attributes */
int gm_py_set(PyObject *attribute, PyObject *tensor, PyObject *value);
int gm_py_long(PyObject *number, long long *out); /* takes the reference, NULL is a failure */
int gm_py_version(PyObject *tensor, long long *out);
int gm_py_data_ptr(PyObject *tensor, uintptr_t *out);
/* The running node's place in its thread's order of creation; -1: outside backward. */
int gm_py_node_key(long long *out);
int gm_py_in_backward(void);             /* whether a node runs on this thread: 1 or 0 */
int gm_py_without(PyObject *missing);    /* a pending exception is let go if it is one of these */
int gm_py_is_checkpoint(PyObject *pack); /* whether it is a hook of torch's checkpointing: 1 or 0 */
int gm_py_stream(int ordinal, gm_stream *out); /* torch's current one; 0 on the host device */
int gm_py_task(long long *out);                /* the graph task that runs */
/* 1: this thread may change the data of parameters, and gm_py_gate_hide() follows; 0: another
 * does. */
int gm_py_gate_show(void);
int gm_py_gate_hide(void);             /* a pending exception stays and hides one of its own */
int gm_py_slot_show(gm_py_slot *slot); /* `shown` is there */
int gm_py_slot_open(gm_py_slot *slot, bool is_plain);  /* one user more: its data is `inside` */
int gm_py_slot_close(gm_py_slot *slot, bool is_plain); /* one less; the last makes it absent */
/* The chunk is still pinned, and users may have gone: if none is left, a storage that somebody else
 * has pins it itself, and what may have been written is found.  Runs no Python: a signal's handler
 * would raise in here, and the rest of a task's or a unit's end would not be. */
int gm_py_slot_end_use(gm_py_slot *slot, gm_engine *engine, gm_stream stream);
/* Whether its units are entered by those alone that borrow it. */
bool gm_py_slot_is_borrowed(const gm_py_slot *slot);
int gm_py_is_true(PyObject *result); /* 1 or 0; takes the reference, NULL is a failure */
int gm_py_done(PyObject *result);    /* 0; takes the reference, NULL is a failure */
int gm_py_raised(gm_status status);  /* 0 if it is GM_OK */

/* The net's engine; NULL with an exception set when it is closed. */
gm_engine *gm_py_net_engine(gm_py_net *net);
bool gm_py_net_is_closed(gm_py_net *net);
int gm_py_net_stream(gm_py_net *net, gm_stream *out); /* torch's current one */
int gm_py_net_push(gm_py_net *net);                   /* 1: pushed; 0: torch forbids hooks here */
/* How many pushes of nets this thread has not popped. */
size_t gm_py_nets_depth(void);
int gm_py_nets_pop_to(size_t depth); /* until there are as many; fewer stay */
/* Lets go of the chunks that earlier nodes of this backward (outside one: all nodes) have
 * touched. */
int gm_py_net_unpin(gm_py_net *net);

/* The slot's chunk can be read by the node that runs, until another one touches. */
int gm_py_net_touch(gm_py_net *net, const gm_py_slot *slot);

int gm_py_net_init(PyObject *module);
int gm_py_slot_init(PyObject *module);
int gm_py_unit_init(PyObject *module);
int gm_py_call_init(PyObject *module);
int gm_py_handle_init(PyObject *module);

extern PyTypeObject *gm_py_slot_type, *gm_py_net_type, *gm_py_unit_type;
extern PyMethodDef gm_py_gate_methods[], gm_py_grad_methods[], gm_py_call_methods[];

/* For lists of the fields that are references, X(field) for each: what is done with all. */
#define GM_PY_VISIT(field)              Py_VISIT(self->field);
#define GM_PY_CLEAR(field)              Py_CLEAR(self->field);
#define GM_PY_DROP(field)               Py_XDECREF(self->field);
#define GM_PY_MEMBER(type, field, kind) {#field, kind, offsetof(type, field), 0, NULL}
