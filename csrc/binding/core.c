/* core.c - what every method of a Core begins with: its engine and its arguments. */
#include "binding/core.h"

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
    GM_PY_FAIL_IF(!object || Py_TYPE(object) != gm_py_core_type, PyExc_TypeError,
                  "a Core is wanted");
    return gm_py_engine_of((core *)object);
}

gm_engine *gm_py_begin(core *self, const char *name, PyObject *const *args, Py_ssize_t n_args,
                       Py_ssize_t n_wanted, unsigned long long *out)
{
    gm_engine *engine = gm_py_engine_of(self);
    GM_PY_FAIL_IF(engine && n_args != n_wanted, PyExc_TypeError, "%s takes %zd arguments, got %zd",
                  name, n_wanted, n_args);
    for (Py_ssize_t i = 0; engine && i < n_args; i++) {
        out[i] = PyLong_AsUnsignedLongLong(args[i]);
        if (out[i] == (unsigned long long)-1 && PyErr_Occurred()) {
            return NULL;
        }
    }
    return engine;
}
