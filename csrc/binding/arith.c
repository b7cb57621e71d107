/* arith.c - the arithmetic of arith.h for Python: tensors come as addresses, ranges as tuples,
 * scalars and sums as opaque bytes.  No policy, no knowledge of tensors.
 *
 * Invariants
 *   1. The GIL is released around everything that runs over elements.
 *   2. One device per CUDA ordinal, made at first use while the GIL is held, and kept: it allocates
 *      nothing, so that keeping it costs nothing. */
#include "binding/common.h"

#include <stdlib.h>
#include <string.h>

#include "arith/adam_impl.h"
#include "device/device.h"

#define MAX_ORDINALS     64
#define CUDA_BLOCK_BYTES ((size_t)2 << 20)

static gm_device *cuda_devices[MAX_ORDINALS];

/* O& converters: 1 on success, 0 with an exception set. */
static int to_address(PyObject *object, void *out)
{
    void *address = PyLong_AsVoidPtr(object);
    if (!address && PyErr_Occurred()) {
        return 0;
    }
    *(void **)out = address;
    return 1;
}

static int to_size(PyObject *object, void *out)
{
    size_t size = PyLong_AsSize_t(object);
    if (size == (size_t)-1 && PyErr_Occurred()) {
        return 0;
    }
    *(size_t *)out = size;
    return 1;
}

static int to_dtype(PyObject *object, void *out)
{
    long value = PyLong_AsLong(object);
    if (value == -1 && PyErr_Occurred()) {
        return 0;
    }
    if (value < GM_F32 || value > GM_F16) {
        PyErr_Format(PyExc_ValueError, "dtype is %ld; use 0 (fp32), 1 (bf16) or 2 (fp16)", value);
        return 0;
    }
    *(gm_dtype *)out = (gm_dtype)value;
    return 1;
}

/* NULL with an exception set on failure. */
static gm_device *cuda_device(int ordinal)
{
    GM_PY_FAIL_IF(ordinal < 0 || ordinal >= MAX_ORDINALS, PyExc_ValueError,
                  "ordinal is %d; it must be in [0, %d)", ordinal, MAX_ORDINALS);
    if (!cuda_devices[ordinal]) {
        gm_status status = gm_device_cuda_new(ordinal, CUDA_BLOCK_BYTES, &cuda_devices[ordinal]);
        if (status != GM_OK) {
            cuda_devices[ordinal] = NULL;
            gm_py_raise(status);
        }
    }
    return cuda_devices[ordinal];
}

static PyObject *isa_name(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    const char *name;
    gm_status status = gm_isa_name(&name);
    return status == GM_OK ? PyUnicode_FromString(name) : gm_py_raise(status);
}

static PyObject *isa_force(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *name;
    return PyArg_ParseTuple(args, "z:isa_force", &name) ? gm_py_finish(gm_isa_force(name)) : NULL;
}

static PyObject *adam_scalars(PyObject *Py_UNUSED(module), PyObject *args)
{
    gm_adam_hyper hyper;
    gm_adam_scalars scalars;
    long long step;
    int adamw, bias_correction;
    GM_PY_TRY(PyArg_ParseTuple(args, "dddddLppdd:adam_scalars", &hyper.lr, &hyper.beta1,
                               &hyper.beta2, &hyper.eps, &hyper.weight_decay, &step, &adamw,
                               &bias_correction, &hyper.grad_divisor, &hyper.clip_factor));
    hyper.step = step;
    hyper.adamw = adamw != 0;
    hyper.bias_correction = bias_correction != 0;
    memset(&scalars, 0, sizeof scalars);
    gm_status status = gm_adam_scalars_init(&hyper, &scalars);
    return status == GM_OK ? PyBytes_FromStringAndSize((const char *)&scalars, sizeof scalars)
                           : gm_py_raise(status);
}

static int parse_range(PyObject *item, void *out)
{
    gm_adam_range *range = out;
    const char *scalars;
    Py_ssize_t bytes;
    if (!PyArg_ParseTuple(item, "O&O&y#;a range is (begin, end, scalars)", to_size, &range->begin,
                          to_size, &range->end, &scalars, &bytes)) {
        return 0;
    }
    if (bytes != (Py_ssize_t)sizeof range->scalars) {
        PyErr_Format(PyExc_ValueError, "scalars are %zd bytes; adam_scalars() gives %zu", bytes,
                     sizeof range->scalars);
        return 0;
    }
    memcpy(&range->scalars, scalars, sizeof range->scalars);
    return 1;
}

/* One update; ordinal -1: of host arrays. */
static PyObject *adam(PyObject *Py_UNUSED(module), PyObject *args)
{
    gm_adam_args adam = {0};
    int ordinal;
    unsigned long long stream;
    void *grad;
    PyObject *ranges;
    GM_PY_TRY(PyArg_ParseTuple(args, "iKO&O&O&O&O&O&O&O:adam", &ordinal, &stream, to_dtype,
                               &adam.format, to_dtype, &adam.grad_dtype, to_address, &adam.weight,
                               to_address, &adam.low, to_address, &adam.m, to_address, &adam.v,
                               to_address, &grad, &ranges));
    gm_device *device = ordinal == -1 ? NULL : cuda_device(ordinal);
    gm_workers *pool = ordinal == -1 ? gm_py_workers() : NULL;
    gm_adam_range *parsed = NULL;
    if (device || pool) {
        parsed = gm_py_array(ranges, sizeof *parsed, parse_range, &adam.n_ranges);
    }
    GM_PY_TRY(parsed);
    adam.grad = grad;
    adam.ranges = parsed;
    gm_status status;
    GM_NO_GIL(status =
                  device ? device->ops->adam(device, &adam, stream) : gm_adam_host(&adam, pool));
    free(parsed);
    return gm_py_finish(status);
}

static PyObject *grad_add_host(PyObject *Py_UNUSED(module), PyObject *args)
{
    gm_grad_add_args add = {.divisor = 1};
    void *src;
    int accumulate;
    if (!PyArg_ParseTuple(args, "O&O&O&O&O&p|f:grad_add_host", to_address, &add.dst, to_dtype,
                          &add.dst_dtype, to_address, &src, to_dtype, &add.src_dtype, to_size,
                          &add.numel, &accumulate, &add.divisor)) {
        return NULL;
    }
    add.src = src;
    add.accumulate = accumulate != 0;
    gm_workers *pool = gm_py_workers();
    GM_PY_TRY(pool);
    GM_NO_GIL(gm_grad_add_host(&add, pool));
    Py_RETURN_NONE;
}

static PyObject *sum_to_bytes(const gm_sumsq *sum)
{
    return PyBytes_FromStringAndSize((const char *)sum, sizeof *sum);
}

/* O& converter: bytes of a gm_sumsq, or None for the empty sum. */
static int to_sum(PyObject *object, void *out)
{
    if (object == Py_None) {
        memset(out, 0, sizeof(gm_sumsq));
        return 1;
    }
    char *bytes;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(object, &bytes, &length) < 0) {
        return 0;
    }
    if (length != (Py_ssize_t)sizeof(gm_sumsq)) {
        PyErr_Format(PyExc_ValueError, "a sum of squares is %zu bytes, not %zd", sizeof(gm_sumsq),
                     length);
        return 0;
    }
    memcpy(out, bytes, sizeof(gm_sumsq));
    return 1;
}

static PyObject *sumsq_host(PyObject *Py_UNUSED(module), PyObject *args)
{
    void *data;
    gm_dtype dtype;
    size_t numel;
    gm_sumsq sum;
    GM_PY_TRY(PyArg_ParseTuple(args, "O&O&O&O&:sumsq_host", to_address, &data, to_dtype, &dtype,
                               to_size, &numel, to_sum, &sum));
    gm_workers *pool = gm_py_workers();
    GM_PY_TRY(pool);
    GM_NO_GIL(gm_sumsq_host(data, dtype, numel, &sum, pool));
    return sum_to_bytes(&sum);
}

static PyObject *sumsq_cuda(PyObject *Py_UNUSED(module), PyObject *args)
{
    int ordinal;
    unsigned long long stream;
    void *data, *sum;
    gm_dtype dtype;
    size_t numel;
    GM_PY_TRY(PyArg_ParseTuple(args, "iKO&O&O&O&:sumsq_cuda", &ordinal, &stream, to_address, &data,
                               to_dtype, &dtype, to_size, &numel, to_address, &sum));
    gm_device *device = cuda_device(ordinal);
    GM_PY_TRY(device);
    gm_status status;
    GM_NO_GIL(status = device->ops->sumsq(device, data, dtype, numel, sum, stream));
    return gm_py_finish(status);
}

static PyObject *sumsq_merge(PyObject *Py_UNUSED(module), PyObject *args)
{
    gm_sumsq a, b;
    GM_PY_TRY(PyArg_ParseTuple(args, "O&O&:sumsq_merge", to_sum, &a, to_sum, &b));
    gm_sumsq_merge(&a, &b);
    return sum_to_bytes(&a);
}

static PyObject *sumsq_value(PyObject *Py_UNUSED(module), PyObject *bytes)
{
    gm_sumsq sum;
    return to_sum(bytes, &sum) ? PyFloat_FromDouble(gm_sumsq_value(&sum)) : NULL;
}

static PyObject *sumsq_read(PyObject *Py_UNUSED(module), PyObject *args)
{
    void *address;
    GM_PY_TRY(PyArg_ParseTuple(args, "O&:sumsq_read", to_address, &address));
    GM_PY_FAIL_IF(!address, PyExc_ValueError,
                  "address is 0; it must point at a sum in host memory");
    return sum_to_bytes(address);
}

/* Of host arrays, both ways between masters and what a model has of them. */
static PyObject *convert(PyObject *args, bool splits)
{
    gm_dtype format;
    void *a, *b, *c;
    size_t numel;
    GM_PY_TRY(PyArg_ParseTuple(args, "O&O&O&O&O&", to_dtype, &format, to_address, &a, to_address,
                               &b, to_address, &c, to_size, &numel));
    gm_workers *pool = gm_py_workers();
    GM_PY_TRY(pool);
    Py_BEGIN_ALLOW_THREADS
    if (splits) {
        gm_split_host(format, GM_F32, a, b, c, numel, pool);
    } else {
        gm_merge_host(format, a, b, c, numel, pool);
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *split_host(PyObject *Py_UNUSED(module), PyObject *args)
{
    return convert(args, true);
}

static PyObject *merge_host(PyObject *Py_UNUSED(module), PyObject *args)
{
    return convert(args, false);
}

/* _C.pyi has the arguments; arrays are given by their addresses. */
PyMethodDef gm_py_arith_methods[] = {
    {"isa_name", isa_name, METH_NOARGS, "The instruction set that host arithmetic uses."},
    {"isa_force", isa_force, METH_VARARGS,
     "Forces \"scalar\", \"avx2\" or \"avx512\"; None chooses anew (GEMINI_ISA, else the best)."},
    {"adam_scalars", adam_scalars, METH_VARARGS,
     "Hyperparameters to the fp32 scalars of one update, opaque."},
    {"adam", adam, METH_VARARGS,
     "One update of host arrays (ordinal -1), or on a CUDA device, asynchronously, on a CUstream "
     "given as an integer."},
    {"grad_add_host", grad_add_host, METH_VARARGS,
     "dst = src / divisor, or dst += src / divisor when accumulate, of host arrays."},
    {"sumsq_host", sumsq_host, METH_VARARGS,
     "`total` (None: the empty sum) plus the exact squares of a host array."},
    {"sumsq_cuda", sumsq_cuda, METH_VARARGS,
     "Adds, asynchronously, to a sum in device memory: its address, 16-byte aligned; as many bytes "
     "as sumsq_merge(None, None) has."},
    {"sumsq_merge", sumsq_merge, METH_VARARGS, "The sum of two sums, exact."},
    {"sumsq_value", sumsq_value, METH_O,
     "The sum rounded once to double; nan or inf if such elements were seen."},
    {"sumsq_read", sumsq_read, METH_VARARGS, "Copies a sum out of host memory."},
    {"split_host", split_host, METH_VARARGS,
     "fp32 masters to weights and low parts (arith.h), of host arrays."},
    {"merge_host", merge_host, METH_VARARGS,
     "Weights and low parts to fp32 masters, exact, of host arrays."},
    {NULL, NULL, 0, NULL},
};
