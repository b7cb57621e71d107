/* gate.c - the one thread that may change what data parameters have.
 *
 * torch reads a parameter's data without the GIL, and no kernel keeps it.  So operations on
 * parameters pass a gate (parameters/gate.py), which nobody changes their data behind.  In its
 * units a training thread is spared that.
 *
 * Invariants
 *   1. One thread at a time shows parameters: the first that enters a unit, until it has left all
 *      of its own.
 *   2. That thread's operations go past the gate, for as long as it shows any; those of all others
 *      pass it. */
#include "binding/unit.h"

static unsigned long shower; /* while n_shown > 0 */
static size_t n_shown;       /* units and the like that it has entered */

static int skip_gate(bool is_skipped)
{
    static PyObject *args[2]; /* made once: a unit calls this twice */
    PyObject **of = &args[is_skipped];
    if (!*of && !(*of = Py_BuildValue("OO", gm_torch.gate_key, is_skipped ? Py_True : Py_False))) {
        return -1;
    }
    return gm_py_done(PyObject_Call(gm_torch.set_excluded, *of, NULL));
}

int gm_py_gate_show(void)
{
    unsigned long thread = PyThread_get_thread_ident();
    if (n_shown && shower != thread) {
        return 0;
    }
    /* Each time: what has begun inside a transform or a graph task of torch ends with that. */
    if (skip_gate(true) < 0) {
        return -1;
    }
    shower = thread;
    n_shown++;
    return 1;
}

int gm_py_gate_hide(void)
{
    n_shown -= n_shown > 0;
    if (n_shown) {
        return 0;
    }
    PyObject *error = gm_py_set_aside();
    int result = skip_gate(false);
    gm_py_put_back(error);
    return result;
}

static PyObject *begin_showing(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    int shows = gm_py_torch_init() < 0 ? -1 : gm_py_gate_show();
    return shows < 0 ? NULL : PyBool_FromLong(shows);
}

static PyObject *end_showing(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    return gm_py_gate_hide() < 0 ? NULL : Py_NewRef(Py_None);
}

PyMethodDef gm_py_gate_methods[] = {
    GM_PY_METHOD("begin_showing", begin_showing, METH_NOARGS,
                 "begin_showing(): whether this thread may change the data of parameters; if so,\n"
                 "end_showing() follows"),
    GM_PY_METHOD("end_showing", end_showing, METH_NOARGS, "end_showing()"),
    {NULL, NULL, 0, NULL},
};
