/* room.c - the methods of Core that are about the device's memory.
 *
 * The GIL is released around every call that takes the engine's lock: who holds that may want the GIL. */
#include "binding/core.h"

#include "torch/alloc.h"

PyObject *gm_py_set_external(core *self, PyObject *const *args, Py_ssize_t n_args)
{
    enum { FALL = 64 << 20 }; /* less is the driver's own coming and going */
    unsigned long long v[1];
    gm_engine *engine = gm_py_engine_of(self);
    if (!engine || gm_py_parse_numbers("set_external_bytes", args, n_args, 1, v) < 0) {
        return NULL;
    }
    gm_status status = GM_OK;
    /* What somebody else held while a pass was traced is no need of that pass. */
    if (atomic_exchange(&self->outside->external_bytes, (size_t)v[0]) > v[0] + FALL) {
        GM_WITHOUT_GIL(engine, status, gm_engine_regain(engine));
    }
    return gm_py_finish(status);
}

/* True or False: whether there are so many bytes now. */
static PyObject *ask_for_bytes(core *self, const char *name, PyObject *const *args,
                               Py_ssize_t n_args, bool (*ask)(gm_engine *, size_t))
{
    unsigned long long v[1];
    gm_engine *engine = gm_py_engine_of(self);
    if (!engine || gm_py_parse_numbers(name, args, n_args, 1, v) < 0) {
        return NULL;
    }
    bool is_given;
    GM_WITHOUT_GIL(engine, is_given, ask(engine, (size_t)v[0]));
    return PyBool_FromLong(is_given);
}

/* shed(bytes) -> bool: as for torch on a device that is full */
PyObject *gm_py_shed(core *self, PyObject *const *args, Py_ssize_t n_args)
{
    return ask_for_bytes(self, "shed", args, n_args, gm_engine_shed);
}

/* reserve(bytes) -> bool: what torch's allocator asks before it takes memory of the device */
PyObject *gm_py_reserve(core *self, PyObject *const *args, Py_ssize_t n_args)
{
    return ask_for_bytes(self, "reserve", args, n_args, gm_engine_reserve);
}

PyObject *gm_py_forget_outside(core *self, PyObject *Py_UNUSED(unused))
{
    gm_engine *engine = gm_py_engine_of(self);
    if (!engine) {
        return NULL;
    }
    gm_status status;
    GM_WITHOUT_GIL(engine, status, gm_engine_forget_outside(engine));
    return gm_py_finish(status);
}

static bool reserve_for_torch(void *context, size_t bytes, bool is_full)
{
    return is_full ? gm_engine_shed(context, bytes) : gm_engine_reserve(context, bytes);
}

void gm_py_stop_answering(core *self)
{
    if (atomic_exchange(&self->outside->answers, false)) {
        /* Without the GIL: it waits for torch's question, which may wait for whoever wants the GIL. */
        Py_BEGIN_ALLOW_THREADS
        gm_torch_alloc_set_reserve(self->outside->ordinal, NULL, NULL);
        Py_END_ALLOW_THREADS
    }
}

/* answer_for_torch(bool): whether torch's pool counts in this engine's budget, and asks it before it grows.
 * One engine of a device at a time: the one before has to be told first. */
PyObject *gm_py_answer(core *self, PyObject *yes)
{
    gm_engine *engine = gm_py_engine_of(self);
    int answers = PyObject_IsTrue(yes);
    if (!engine || answers < 0) {
        return NULL;
    }
    if (!answers) {
        gm_py_stop_answering(self);
    } else if (self->outside->ordinal >= 0 && !atomic_exchange(&self->outside->answers, true)) {
        gm_engine_ref(engine);
        Py_BEGIN_ALLOW_THREADS
        gm_torch_alloc_set_reserve(self->outside->ordinal, reserve_for_torch, engine);
        Py_END_ALLOW_THREADS
        if (self->engine != engine) { /* close() on another thread */
            gm_py_stop_answering(self);
        }
        Py_BEGIN_ALLOW_THREADS
        gm_engine_unref(engine);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}
