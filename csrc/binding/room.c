/* room.c - the methods of Core that are about the device's memory.
 *
 * The GIL is released around every call that takes the engine's lock: who holds that may want the
 * GIL. */
#include "binding/core.h"

#include "torch/alloc.h"

static gm_status set_external(const core *self, gm_engine *engine, size_t bytes)
{
    enum { FALL = 64 << 20 }; /* less is the driver's own coming and going */
    /* What other models held while a pass was traced is no need of that pass. */
    bool has_fallen = atomic_exchange(&self->outside->external_bytes, bytes) > bytes + FALL;
    return has_fallen ? gm_engine_regain(engine) : GM_OK;
}

GM_PY_CALL_STATUS(set_external_bytes, 1, set_external(self, engine, (size_t)v[0]))
/* As for torch on a device that is full. */
GM_PY_CALL(shed, 1, bool, PyBool_FromLong, gm_engine_shed(engine, (size_t)v[0]))
/* What torch's allocator asks before it takes memory of the device. */
GM_PY_CALL(reserve, 1, bool, PyBool_FromLong, gm_engine_reserve(engine, (size_t)v[0]))
GM_PY_CALL_STATUS(forget_outside, 0, gm_engine_forget_outside(engine))

/* refusal(): why the last of these two gave less than it was asked for, where the host is the
 * reason. */
static PyObject *core_refusal(core *self, PyObject *Py_UNUSED(unused))
{
    gm_engine *engine = gm_py_engine_of(self);
    GM_PY_TRY(engine);
    char text[512];
    GM_WITHOUT_GIL(engine, gm_engine_refusal(engine, text, sizeof text));
    return gm_py_text(text);
}

static bool reserve_for_torch(void *context, size_t bytes, bool is_full)
{
    return is_full ? gm_engine_shed(context, bytes) : gm_engine_reserve(context, bytes);
}

void gm_py_stop_answering(core *self)
{
    if (atomic_exchange(&self->outside->answers, false)) {
        /* Without the GIL: it waits for torch's question, which may wait for a thread that wants
         * the GIL. */
        GM_NO_GIL(gm_torch_alloc_set_reserve(self->outside->ordinal, NULL, NULL));
    }
}

/* answer_for_torch(bool): whether torch's pool counts in this engine's budget, and asks it before
 * it grows. One engine of a device at a time: the one before has to be told first. */
static PyObject *core_answer_for_torch(core *self, PyObject *yes)
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
        GM_NO_GIL(gm_torch_alloc_set_reserve(self->outside->ordinal, reserve_for_torch, engine));
        if (self->engine != engine) { /* close() on another thread */
            gm_py_stop_answering(self);
        }
        GM_NO_GIL(gm_engine_unref(engine));
    }
    Py_RETURN_NONE;
}

PyMethodDef gm_py_room_methods[] = {
    GM_CORE_METHOD(set_external_bytes, FASTCALL, "(bytes)"),
    GM_CORE_METHOD(reserve, FASTCALL, "(bytes) -> bool"),
    GM_CORE_METHOD(answer_for_torch, O, "(bool)"),
    GM_CORE_METHOD(refusal, NOARGS, "() -> str"),
    GM_CORE_METHOD(shed, FASTCALL, "(bytes) -> bool"),
    GM_CORE_METHOD(forget_outside, FASTCALL, "()"),
    {NULL, NULL, 0, NULL},
};
