/* step.c - methods of Core for the step and its figures, and the search for a chunk size. */
#include "binding/core.h"

#include <stdlib.h>

#include "plan/layout.h"

static PyObject *core_grad_sumsq(core *self, PyObject *args)
{
    PyObject *sequence;
    unsigned long long stream;
    size_t n;
    gm_engine *engine = gm_py_engine_of(self);
    bool is_parsed = engine && PyArg_ParseTuple(args, "OK", &sequence, &stream);
    uint32_t *ids = is_parsed ? gm_py_ids(sequence, &n) : NULL;
    GM_PY_TRY(ids);
    gm_status status;
    gm_sumsq sum;
    GM_WITHOUT_GIL(engine, status = gm_engine_sumsq(engine, ids, (uint32_t)n, &sum, stream));
    free(ids);
    return status == GM_OK ? Py_BuildValue("dK", gm_sumsq_value(&sum),
                                           (unsigned long long)(sum.n_inf + sum.n_nan))
                           : gm_py_raise(status);
}

GM_PY_CALL_STATUS(sum, 5,
                  gm_engine_sum(engine, (uint32_t)v[0], (uintptr_t)v[1], (size_t)v[2],
                                (gm_dtype)v[3], (gm_stream)v[4]))

/* clip(params, max_norm, address of the norm, stream) -> whether the host has waited */
static PyObject *core_clip(core *self, PyObject *args)
{
    PyObject *sequence;
    unsigned long long stream, norm;
    double max_norm;
    size_t n;
    gm_engine *engine = gm_py_engine_of(self);
    bool is_parsed = engine && PyArg_ParseTuple(args, "OdKK", &sequence, &max_norm, &norm, &stream);
    uint32_t *ids = is_parsed ? gm_py_ids(sequence, &n) : NULL;
    GM_PY_TRY(ids);
    gm_status status;
    bool has_waited;
    GM_WITHOUT_GIL(engine, status = gm_engine_clip(engine, ids, (uint32_t)n, max_norm,
                                                   (float *)(uintptr_t)norm, stream, &has_waited));
    free(ids);
    return status == GM_OK ? PyBool_FromLong(has_waited) : gm_py_raise(status);
}

/* (params) */
static PyObject *ask_grads(core *self, PyObject *sequence, bool keeps)
{
    size_t n;
    gm_engine *engine = gm_py_engine_of(self);
    uint32_t *ids = engine ? gm_py_ids(sequence, &n) : NULL;
    GM_PY_TRY(ids);
    gm_status status;
    bool was_used = false;
    GM_WITHOUT_GIL(engine, status = keeps
                                        ? gm_engine_keep_grads(engine, ids, (uint32_t)n, &was_used)
                                        : gm_engine_check_grads(engine, ids, (uint32_t)n));
    free(ids);
    return status == GM_OK ? PyBool_FromLong(was_used) : gm_py_raise(status);
}

static PyObject *core_check_grads(core *self, PyObject *sequence)
{
    return ask_grads(self, sequence, false);
}

static PyObject *core_keep_grads(core *self, PyObject *sequence)
{
    return ask_grads(self, sequence, true);
}

GM_PY_CALL(grads_version, 0, uint64_t, PyLong_FromUnsignedLongLong, gm_engine_grads_version(engine))

static PyObject *factor_of(gm_clip clip)
{
    return PyFloat_FromDouble(clip.factor);
}

GM_PY_CALL_OUT(clip_factor, 0, gm_clip, factor_of, gm_engine_clip_wait(engine, &out))

/* (param, lr, beta1, beta2, eps, weight_decay, step, adamw, bias_correction, grad_divisor,
 * clip_factor) */
static int parse_update(PyObject *item, void *out)
{
    unsigned int id;
    long long step;
    int adamw, bias_correction;
    gm_adam_hyper h;
    if (!PyArg_ParseTuple(item, "IdddddLppdd", &id, &h.lr, &h.beta1, &h.beta2, &h.eps,
                          &h.weight_decay, &step, &adamw, &bias_correction, &h.grad_divisor,
                          &h.clip_factor)) {
        return 0;
    }
    h.step = step;
    h.adamw = adamw;
    h.bias_correction = bias_correction;
    *(gm_update *)out = (gm_update){.param = id, .hyper = h};
    return 1;
}

/* Of a call with updates and, where `format` says so, one thing more.  NULL with an exception
 * set. */
static gm_update *parse_updates(PyObject *args, const char *format, uint32_t *out_n, void *out)
{
    PyObject *sequence;
    size_t n = 0;
    gm_update *updates = NULL;
    if (PyArg_ParseTuple(args, format, &sequence, out)) {
        updates = gm_py_array(sequence, sizeof *updates, parse_update, &n);
    }
    *out_n = (uint32_t)n;
    return updates;
}

typedef gm_status step_fn(gm_engine *engine, const gm_update *updates, uint32_t n,
                          gm_stream stream);

static PyObject *run_step(core *self, PyObject *args, const char *format, step_fn *step)
{
    uint32_t n;
    unsigned long long stream = 0;
    gm_engine *engine = gm_py_engine_of(self);
    gm_update *updates = engine ? parse_updates(args, format, &n, &stream) : NULL;
    GM_PY_TRY(updates);
    gm_status status;
    GM_WITHOUT_GIL(engine, status = step(engine, updates, n, stream));
    free(updates);
    return gm_py_finish(status);
}

static PyObject *core_step(core *self, PyObject *args)
{
    return run_step(self, args, "OK", gm_engine_step);
}

static PyObject *core_step_clipped(core *self, PyObject *args)
{
    return run_step(self, args, "OK", gm_engine_step_clipped);
}

static PyObject *core_arm(core *self, PyObject *args)
{
    uint32_t n;
    bool is_armed = false;
    int may_run = 0;
    gm_engine *engine = gm_py_engine_of(self);
    gm_update *updates = engine ? parse_updates(args, "Op", &n, &may_run) : NULL;
    GM_PY_TRY(updates);
    gm_status status;
    GM_WITHOUT_GIL(engine, status = gm_engine_arm(engine, updates, n, may_run, &is_armed));
    free(updates);
    return status == GM_OK ? PyBool_FromLong(is_armed) : gm_py_raise(status);
}

static gm_status announce(gm_engine *engine, const gm_update *updates, uint32_t n,
                          gm_stream GM_UNUSED(stream))
{
    return gm_engine_announce(engine, updates, n);
}

static PyObject *core_announce(core *self, PyObject *args)
{
    return run_step(self, args, "O", announce);
}

GM_PY_CALL(wants_numbers, 0, bool, PyBool_FromLong, gm_engine_wants_numbers(engine))

static PyObject *core_disarm(core *self, PyObject *args)
{
    const char *cause;
    gm_engine *engine = gm_py_engine_of(self);
    GM_PY_TRY(engine && PyArg_ParseTuple(args, "s", &cause));
    gm_status status;
    GM_WITHOUT_GIL(engine, status = gm_engine_disarm(engine, cause));
    return gm_py_finish(status);
}

static PyObject *core_stats(core *self, PyObject *Py_UNUSED(unused))
{
    gm_engine *engine = gm_py_engine_of(self);
    GM_PY_TRY(engine);
    gm_engine_stats s;
    GM_WITHOUT_GIL(engine, gm_engine_get_stats(engine, &s));
#define X(type, name, value) {#name, s.name},
    const gm_py_count counts[] = {GM_ENGINE_COUNTS(X)};
    const gm_py_figure seconds[] = {GM_ENGINE_SECONDS(X)};
#undef X
    PyObject *dict = PyDict_New();
    int failed = !dict || gm_py_put_counts(dict, counts, GM_PY_N(counts)) < 0 ||
                 gm_py_put_figures(dict, seconds, GM_PY_N(seconds)) < 0;
    if (!failed && s.device_budget_bytes == SIZE_MAX) {
        failed = gm_py_put(dict, "device_budget_bytes", PyLong_FromLong(-1)) < 0;
    }
    return gm_py_unless(dict, failed);
}

/* (numel, weight_bytes, kind) */
static int parse_spec(PyObject *item, void *out)
{
    unsigned long long numel;
    unsigned int weight_bytes, kind;
    if (!PyArg_ParseTuple(item, "KII", &numel, &weight_bytes, &kind)) {
        return 0;
    }
    *(gm_param_spec *)out =
        (gm_param_spec){.numel = numel, .weight_bytes = weight_bytes, .kind = kind};
    return 1;
}

PyObject *gm_py_chunk_search(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *sequence;
    Py_ssize_t min_bytes, range_bytes;
    unsigned int n_grids;
    size_t n;
    GM_PY_TRY(PyArg_ParseTuple(args, "OnnI", &sequence, &min_bytes, &range_bytes, &n_grids));
    gm_param_spec *specs = gm_py_array(sequence, sizeof *specs, parse_spec, &n);
    GM_PY_TRY(specs);
    size_t chunk_bytes = 0;
    gm_status status = gm_layout_search(specs, (uint32_t)n, (size_t)min_bytes, (size_t)range_bytes,
                                        n_grids, &chunk_bytes);
    free(specs);
    return status == GM_OK ? PyLong_FromSize_t(chunk_bytes) : gm_py_raise(status);
}

PyMethodDef gm_py_step_methods[] = {
    GM_CORE_METHOD(grad_sumsq, VARARGS,
                   "(params, stream) -> (sum of squares as a float, non-finite elements)"),
    GM_CORE_METHOD(check_grads, O, "(params)"),
    GM_CORE_METHOD(keep_grads, O, "(params) -> whether there were some that are used up"),
    GM_CORE_METHOD(grads_version, FASTCALL, "() -> int"),
    GM_CORE_METHOD(sum, FASTCALL, "(param, address, elements, dtype, stream)"),
    GM_CORE_METHOD(
        clip, VARARGS,
        "(params, max_norm, address of the norm, stream) -> whether the host has waited"),
    GM_CORE_METHOD(clip_factor, FASTCALL, "() -> float"),
    GM_CORE_METHOD(step, VARARGS, "(updates, stream)"),
    GM_CORE_METHOD(step_clipped, VARARGS, "(updates, stream)"),
    GM_CORE_METHOD(arm, VARARGS, "(updates, may_run) -> bool"),
    GM_CORE_METHOD(wants_numbers, FASTCALL, "() -> bool"),
    GM_CORE_METHOD(announce, VARARGS, "(updates)"),
    GM_CORE_METHOD(disarm, VARARGS, "(cause)"),
    GM_CORE_METHOD(stats, NOARGS, "() -> dict"),
    {NULL, NULL, 0, NULL},
};
