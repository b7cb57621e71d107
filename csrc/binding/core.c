/* core.c - what every method of a Core begins with: its engine and its arguments. */
#include "binding/core.h"

#include "binding/engine.h"

PyTypeObject *gm_py_core_type;

gm_engine *gm_py_engine_of(core *self)
{
    if (!self->engine) {
        (void)GM_FAIL(GM_ERR_STATE, "this engine is closed: call gemini_strategy.manage() again");
        gm_py_raise(GM_ERR_STATE);
    }
    return self->engine;
}

bool gm_py_core_is_closed(PyObject *object)
{
    return !object || Py_TYPE(object) != gm_py_core_type || !((core *)object)->engine;
}

gm_engine *gm_py_core_engine(PyObject *object)
{
    if (!object || Py_TYPE(object) != gm_py_core_type) {
        PyErr_SetString(PyExc_TypeError, "a Core is wanted");
        return NULL;
    }
    return gm_py_engine_of((core *)object);
}

gm_engine *gm_py_begin(core *self, const char *name, PyObject *const *args, Py_ssize_t n_args,
                       Py_ssize_t n_wanted, unsigned long long *out)
{
    gm_engine *engine = gm_py_engine_of(self);
    if (engine && n_args != n_wanted) {
        PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", name, n_wanted, n_args);
        return NULL;
    }
    for (Py_ssize_t i = 0; engine && i < n_args; i++) {
        out[i] = PyLong_AsUnsignedLongLong(args[i]);
        if (out[i] == (unsigned long long)-1 && PyErr_Occurred()) {
            return NULL;
        }
    }
    return engine;
}
