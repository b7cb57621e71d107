/* unit.h - what torch.c, gate.c, slot.c, net.c, grad.c, unit.c and hook.c share, each of which calls those before it: slots, the net that catches what autograd saves, and the
 * functions of torch that both call for every unit and every backward node.
 *
 * These types are the bases of the Python classes of hooks.py and slot.py: C does what every unit does every
 * time, and calls a method of the Python class for everything that is rare. */
#ifndef GM_PY_UNIT_H
#define GM_PY_UNIT_H

#include "binding/common.h"

#include <stdint.h>

#include "engine/engine.h"

/* One managed parameter (slot.py has the fields' meanings). */
typedef struct gm_py_slot {
    /* What every unit looks at comes first: few lines of a cache. */
    PyObject_HEAD char is_watched;     /* what is written through `shown` is looked for */
    char is_lent;                      /* somebody may have written the weight beside the chunk */
    long long open_count, touch_count; /* units, backward nodes that use `shown` */
    long long version;                 /* of the parameter, when last looked at */
    PyObject *parameter;
    PyObject *absent; /* what the parameter's data is outside its units */
    PyObject *inside; /* `shown` with the gate's key: what the parameter's data is in its units */
    PyObject *shown;  /* its bytes: one tensor for all users; None: to be made */
    PyObject *shown_storage; /* the address of its StorageImpl, an int */
    long long shown_count;   /* references to that when nobody else has any */
    PyObject
        *readers; /* a list of threads whose operations on it have passed the gate; None: none */
    PyObject *shown_lease; /* which the storage of `shown` ends when it dies */
    long long id, format;
    PyObject *engine, *net, *dtype, *plain_class, *managed_class;
} gm_py_slot;

typedef struct gm_py_net gm_py_net; /* net.c */

/* Functions and names of torch, looked up once. */
typedef struct gm_py_torch {
    PyObject *current_node, *current_task, *is_hooks_enabled, *top_hooks, *push_hooks, *pop_hooks,
        *use_count, *raw_stream, *strided, *tensor_class, *get_data_ptr, *set_excluded, *gate_key,
        *n_modes, *is_tracing, *without_subclasses;
    PyObject *data, *grad, *version; /* the attributes, as torch.TensorBase has them */
    PyObject *s_detach, *s_sequence_nr, *s_class, *s_layout, *s_dtype, *s_shape, *s_stride, *s_base,
        *s_as_strided, *s_requires_grad, *s_module, *s_begin, *s_end;
} gm_py_torch;
extern gm_py_torch gm_torch;
int gm_py_torch_init(void); /* idempotent; -1 with an exception set */

/* With a MemoryError set: whether object.make_room(about) found some; the error is then gone. */
bool gm_py_made_room(PyObject *object, PyObject *about);
/* Hands the pending exception, an error of memory, to `object.<method>(about, error)`, which raises a better
 * one; any other stays. Returns -1. */
int gm_py_explain(PyObject *object, const char *method, PyObject *about);

/* torch looks for __torch_function__ of a parameter's class at every access, to find that it has none: not between these,
 * on this thread.  Gives what ends it; NULL, and torch looks.  Both leave a pending exception as it is. */
PyObject *gm_py_without_subclasses(void);
void gm_py_with_subclasses(PyObject *context);

/* Every function below: -1 (or NULL) with an exception set on failure. */
PyObject *gm_py_get(PyObject *attribute, PyObject *tensor); /* of gm_torch's attributes */
int gm_py_set(PyObject *attribute, PyObject *tensor, PyObject *value);
int gm_py_long(PyObject *number, long long *out); /* takes the reference, NULL is a failure */
int gm_py_version(PyObject *tensor, long long *out);
int gm_py_data_ptr(PyObject *tensor, uintptr_t *out);
int gm_py_node_key(
    long long *out); /* the running node's place in its thread's order; -1: outside backward */
int gm_py_in_backward(void);              /* whether a node runs on this thread: 1 or 0 */
bool gm_py_is_checkpoint(PyObject *pack); /* a hook of torch's checkpointing */
int gm_py_stream(int ordinal,
                 gm_stream *out); /* torch's current one on a GPU; 0 on the host device */
int gm_py_task(long long *out);   /* the graph task that runs */
/* 1: this thread may change the data of parameters, and gm_py_gate_hide() follows; 0: another does. */
int gm_py_gate_show(void);
int gm_py_gate_hide(void);             /* a pending exception stays and hides one of its own */
int gm_py_slot_show(gm_py_slot *slot); /* `shown` is there */
int gm_py_slot_open(gm_py_slot *slot, bool is_plain);  /* one user more: its data is `inside` */
int gm_py_slot_close(gm_py_slot *slot, bool is_plain); /* one less; the last makes it absent */
/* The chunk is still pinned, and users may have gone: if none is left, a storage that somebody else has pins it itself,
 * and what may have been written is found. */
int gm_py_slot_end_use(gm_py_slot *slot);
int gm_py_set_class(PyObject *parameter, PyObject *class);
int gm_py_is_true(PyObject *result); /* 1 or 0; takes the reference, NULL is a failure */
int gm_py_done(PyObject *result);    /* 0; takes the reference, NULL is a failure */
int gm_py_raised(gm_status status);  /* 0 if it is GM_OK */

/* The net's engine; NULL with an exception set when it is closed. */
gm_engine *gm_py_net_engine(gm_py_net *net);
bool gm_py_net_is_closed(gm_py_net *net);
int gm_py_net_stream(gm_py_net *net, gm_stream *out); /* torch's current one */
int gm_py_net_push(gm_py_net *net);                   /* 1: pushed; 0: torch forbids hooks here */
size_t gm_py_net_depth(const gm_py_net *net);
int gm_py_net_pop_to(gm_py_net *net, size_t depth); /* until as many are pushed; fewer stay */
/* Lets go of the chunks that earlier nodes of this backward (outside one: all nodes) have touched. */
int gm_py_net_unpin(gm_py_net *net);

int gm_py_gate_init(PyObject *module);
int gm_py_net_init(PyObject *module);
int gm_py_slot_init(PyObject *module);
int gm_py_unit_init(PyObject *module);
int gm_py_hook_init(PyObject *module);
int gm_py_grad_init(PyObject *module);

extern PyTypeObject *gm_py_slot_type, *gm_py_net_type;

#define GM_PY_MEMBER(type, field, kind) {#field, kind, offsetof(type, field), 0, NULL}

#endif
