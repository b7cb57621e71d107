/* rates.c - rates for Python, and the function of gemini_strategy._C that measures those of this
 * machine. */
#include "binding/plan.h"

static gm_status measure(int ordinal, unsigned threads, size_t block_bytes, gm_rates *out)
{
    gm_workers *workers = NULL;
    gm_device *device = NULL;
    gm_status status = GM_OK;
    GM_TRY_GOTO(status, done, gm_py_workers_new(threads, &workers));
    if (ordinal < 0) {
        GM_TRY_GOTO(status, done, gm_device_host_new(block_bytes, workers, &device));
    } else {
        GM_TRY_GOTO(status, done, gm_device_cuda_new(ordinal, block_bytes, &device));
    }
    status = gm_rates_measure(device, workers, out);
done:
    if (device) {
        device->ops->free(device);
    }
    gm_workers_free(workers);
    return status;
}

/* Those that are measured, in the order of RATES. */
static const struct {
    const char *name;
    size_t offset;
} figures[] = {
    {"h2d", offsetof(gm_rates, h2d)},
    {"d2h", offsetof(gm_rates, d2h)},
    {"h2d_both", offsetof(gm_rates, h2d_both)},
    {"d2h_both", offsetof(gm_rates, d2h_both)},
    {"host_adam", offsetof(gm_rates, host_adam)},
    {"host_adam_beside", offsetof(gm_rates, host_adam_beside)},
    {"h2d_beside", offsetof(gm_rates, h2d_beside)},
    {"d2h_beside", offsetof(gm_rates, d2h_beside)},
    {"device_adam", offsetof(gm_rates, device_adam)},
};
enum { N_FIGURES = GM_PY_N(figures) };

PyObject *gm_py_rates(const gm_rates *r)
{
    PyObject *dict = PyDict_New();
    int failed = !dict;
    for (size_t i = 0; !failed && i < N_FIGURES; i++) {
        double figure = *(const double *)(const void *)((const char *)r + figures[i].offset);
        failed = gm_py_put(dict, figures[i].name, PyFloat_FromDouble(figure)) < 0;
    }
    return gm_py_unless(dict, failed);
}

int gm_py_rates_parse(PyObject *sequence, gm_rates *out)
{
    if (PySequence_Size(sequence) != N_FIGURES) {
        PyErr_Format(PyExc_ValueError, "rates are %d figures", (int)N_FIGURES);
        return -1;
    }
    for (size_t i = 0; i < N_FIGURES; i++) {
        PyObject *item = PySequence_GetItem(sequence, (Py_ssize_t)i);
        double figure = item ? PyFloat_AsDouble(item) : -1;
        Py_XDECREF(item);
        if (PyErr_Occurred()) {
            return -1;
        }
        *(double *)(void *)((char *)out + figures[i].offset) = figure;
    }
    return 0;
}

static PyObject *rates_measure(PyObject *Py_UNUSED(module), PyObject *args)
{
    int ordinal;
    unsigned threads;
    Py_ssize_t block_bytes;
    GM_PY_TRY(PyArg_ParseTuple(args, "iIn:rates_measure", &ordinal, &threads, &block_bytes));
    GM_PY_FAIL_IF(block_bytes <= 0, PyExc_ValueError, "block_bytes is %zd; it must be positive",
                  block_bytes);
    gm_rates r;
    gm_status status;
    GM_NO_GIL(status = measure(ordinal, threads, (size_t)block_bytes, &r));
    return status == GM_OK ? gm_py_rates(&r) : gm_py_raise(status);
}

static PyMethodDef methods[] = {
    {"rates_measure", rates_measure, METH_VARARGS,
     "Measures copies (bytes/s) and Adam (parameters/s) for about a second, under the names of "
     "RATES.  ordinal -1 is the host device; threads 0 takes the default."},
    {NULL, NULL, 0, NULL},
};

int gm_py_rates_init(PyObject *module)
{
    PyObject *names = PyTuple_New(N_FIGURES);
    for (size_t i = 0; names && i < N_FIGURES; i++) {
        PyObject *text = PyUnicode_FromString(figures[i].name);
        if (!text || PyTuple_SetItem(names, (Py_ssize_t)i, text) < 0) {
            Py_CLEAR(names);
        }
    }
    int result = names ? PyModule_AddObjectRef(module, "RATES", names) : -1;
    Py_XDECREF(names);
    return result < 0 ? -1 : PyModule_AddFunctions(module, methods);
}
