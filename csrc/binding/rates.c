/* rates.c - rates for Python, and the function of gemini_strategy._C that measures those of this machine. */
#include "binding/plan.h"

#include "engine/rates.h"

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

PyObject *gm_py_rates(const gm_rates *r)
{
    return Py_BuildValue("{s:d,s:d,s:d,s:d,s:d,s:d,s:d,s:d,s:d}", "h2d", r->h2d, "d2h", r->d2h,
                         "h2d_both", r->h2d_both, "d2h_both", r->d2h_both, "host_adam",
                         r->host_adam, "host_adam_beside", r->host_adam_beside, "h2d_beside",
                         r->h2d_beside, "d2h_beside", r->d2h_beside, "device_adam", r->device_adam);
}

PyDoc_STRVAR(rates_measure_doc,
             "rates_measure(ordinal, threads, block_bytes) -> dict[str, float]\n\n"
             "Measures copies and Adam for about a second: h2d, d2h, h2d_both, d2h_both,\n"
             "h2d_beside, d2h_beside in bytes/s; host_adam, host_adam_beside, device_adam in\n"
             "parameters/s.  ordinal -1 is the host device; threads 0 takes the default.");
static PyObject *rates_measure(PyObject *module, PyObject *args)
{
    (void)module;
    int ordinal;
    unsigned threads;
    Py_ssize_t block_bytes;
    if (!PyArg_ParseTuple(args, "iIn:rates_measure", &ordinal, &threads, &block_bytes)) {
        return NULL;
    }
    if (block_bytes <= 0) {
        PyErr_Format(PyExc_ValueError, "block_bytes is %zd; it must be positive", block_bytes);
        return NULL;
    }
    gm_rates r;
    gm_status status;
    Py_BEGIN_ALLOW_THREADS
    status = measure(ordinal, threads, (size_t)block_bytes, &r);
    Py_END_ALLOW_THREADS
    if (status != GM_OK) {
        return gm_py_raise(status);
    }
    return gm_py_rates(&r);
}

PyMethodDef gm_py_rates_methods[] = {
    {"rates_measure", rates_measure, METH_VARARGS, rates_measure_doc},
    {NULL, NULL, 0, NULL},
};
