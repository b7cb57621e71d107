/* step.c - methods of Core for the step and its figures, and the search for a chunk size. */
#include "binding/core.h"

#include <stdlib.h>

#include "plan/layout.h"

/* grad_sumsq(params, stream) -> (sum of squares as a double, non-finite elements) */
PyObject *gm_py_grad_sumsq(core *self, PyObject *args)
{
    PyObject *sequence;
    unsigned long long stream;
    gm_engine *engine = gm_py_engine_of(self);
    if (!engine || !PyArg_ParseTuple(args, "OK", &sequence, &stream)) {
        return NULL;
    }
    uint32_t *ids, n;
    if (gm_py_parse_ids(sequence, &ids, &n) < 0) {
        return NULL;
    }
    gm_status status;
    gm_sumsq sum;
    GM_WITHOUT_GIL(engine, status, gm_engine_sumsq(engine, ids, n, &sum, stream));
    free(ids);
    if (status != GM_OK) {
        return gm_py_raise(status);
    }
    return Py_BuildValue("dK", gm_sumsq_value(&sum), (unsigned long long)(sum.n_inf + sum.n_nan));
}

/* updates: sequence of (param, lr, beta1, beta2, eps, weight_decay, step, adamw, bias_correction, grad_divisor,
 * clip_factor).  NULL with an exception set on failure. */
static gm_update *parse_updates(PyObject *sequence, uint32_t *out_n)
{
    Py_ssize_t n = PySequence_Size(sequence);
    gm_update *updates = n < 0 ? NULL : calloc((size_t)n + 1, sizeof *updates);
    if (!updates) {
        if (n >= 0) {
            PyErr_NoMemory();
        }
        return NULL;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PySequence_GetItem(sequence, i);
        unsigned int id;
        long long step;
        int adamw, bias_correction;
        gm_adam_hyper h;
        int is_parsed = item && PyArg_ParseTuple(item, "IdddddLppdd", &id, &h.lr, &h.beta1,
                                                 &h.beta2, &h.eps, &h.weight_decay, &step, &adamw,
                                                 &bias_correction, &h.grad_divisor, &h.clip_factor);
        Py_XDECREF(item);
        if (!is_parsed) {
            free(updates);
            return NULL;
        }
        h.step = step;
        h.adamw = adamw;
        h.bias_correction = bias_correction;
        updates[i] = (gm_update){.param = id, .hyper = h};
    }
    *out_n = (uint32_t)n;
    return updates;
}

PyObject *gm_py_step(core *self, PyObject *args)
{
    PyObject *sequence;
    unsigned long long stream;
    uint32_t n;
    gm_engine *engine = gm_py_engine_of(self);
    if (!engine || !PyArg_ParseTuple(args, "OK", &sequence, &stream)) {
        return NULL;
    }
    gm_update *updates = parse_updates(sequence, &n);
    if (!updates) {
        return NULL;
    }
    gm_status status;
    GM_WITHOUT_GIL(engine, status, gm_engine_step(engine, updates, n, stream));
    free(updates);
    return gm_py_finish(status);
}

/* Of a call that has nothing else; NULL: an error is set. */
static gm_update *only_updates(PyObject *args, uint32_t *out_n)
{
    PyObject *sequence;
    return PyArg_ParseTuple(args, "O", &sequence) ? parse_updates(sequence, out_n) : NULL;
}

/* arm(updates) -> bool */
PyObject *gm_py_arm(core *self, PyObject *args)
{
    uint32_t n;
    bool is_armed = false;
    gm_engine *engine = gm_py_engine_of(self);
    gm_update *updates = engine ? only_updates(args, &n) : NULL;
    if (!updates) {
        return NULL;
    }
    gm_status status;
    GM_WITHOUT_GIL(engine, status, gm_engine_arm(engine, updates, n, &is_armed));
    free(updates);
    return status == GM_OK ? PyBool_FromLong(is_armed) : gm_py_raise(status);
}

/* announce(updates) */
PyObject *gm_py_announce(core *self, PyObject *args)
{
    uint32_t n;
    gm_engine *engine = gm_py_engine_of(self);
    gm_update *updates = engine ? only_updates(args, &n) : NULL;
    if (!updates) {
        return NULL;
    }
    gm_status status;
    GM_WITHOUT_GIL(engine, status, gm_engine_announce(engine, updates, n));
    free(updates);
    return gm_py_finish(status);
}

static int set_number(PyObject *dict, const char *key, PyObject *value)
{
    int result = value ? PyDict_SetItemString(dict, key, value) : -1;
    Py_XDECREF(value);
    return result;
}

PyObject *gm_py_stats(core *self, PyObject *Py_UNUSED(unused))
{
    gm_engine *engine = gm_py_engine_of(self);
    if (!engine) {
        return NULL;
    }
    gm_engine_stats s;
    gm_engine_ref(engine);
    Py_BEGIN_ALLOW_THREADS
    gm_engine_get_stats(engine, &s);
    gm_engine_unref(engine);
    Py_END_ALLOW_THREADS
    const struct {
        const char *key;
        unsigned long long value;
    } counts[] = {
        {"fetches", s.fetches},
        {"evictions", s.evictions},
        {"fetched_bytes", s.fetched_bytes},
        {"evicted_bytes", s.evicted_bytes},
        {"device_bytes", s.device_bytes},
        {"device_peak_bytes", s.device_peak_bytes},
        {"host_bytes", s.host_bytes},
        {"state_bytes", s.state_bytes},
        {"weight_bytes", s.weight_bytes},
        {"chunks", s.n_chunks},
        {"blocks", s.n_blocks},
        {"settled_chunks", s.n_with_states},
        {"leases", s.n_leases},
        {"layout_hash", s.layout_hash},
        {"plans", s.n_plans},
        {"plan_breaks", s.n_breaks},
        {"deviations", s.n_deviations},
        {"replay_waits", s.n_replay_waits},
        {"traces", s.n_traces},
        {"pending_updates", s.n_pending},
        {"immediate_updates", s.n_immediate},
        {"speculated_updates", s.n_speculated},
        {"taken_updates", s.n_taken},
        {"redone_updates", s.n_redone},
        {"spare_bytes", s.spare_bytes},
        {"leases_walked", s.n_leases_walked},
        {"outside_peak_bytes", s.outside_peak_bytes},
        {"planned", s.is_planned},
        {"settling", s.is_provisional},
        {"rank", s.rank},
        {"shards", s.n_shards},
        {"replicas", s.n_replicas},
        {"gathers", s.gathers},
        {"reduces", s.reduces},
        {"gathered_bytes", s.gathered_bytes},
        {"reduced_bytes", s.reduced_bytes},
    };
    PyObject *dict = PyDict_New();
    for (size_t i = 0; dict && i < sizeof counts / sizeof counts[0]; i++) {
        if (set_number(dict, counts[i].key, PyLong_FromUnsignedLongLong(counts[i].value)) < 0) {
            Py_DECREF(dict);
            return NULL;
        }
    }
    PyObject *budget = s.device_budget_bytes == SIZE_MAX ? PyLong_FromLong(-1)
                                                         : PyLong_FromSize_t(s.device_budget_bytes);
    if (dict &&
        (set_number(dict, "device_budget_bytes", budget) < 0 ||
         set_number(dict, "host_adam_seconds", PyFloat_FromDouble(s.host_adam_seconds)) < 0 ||
         set_number(dict, "host_pin_seconds", PyFloat_FromDouble(s.host_pin_seconds)) < 0 ||
         set_number(dict, "mapping_seconds", PyFloat_FromDouble(s.mapping_seconds)) < 0)) {
        Py_DECREF(dict);
        return NULL;
    }
    return dict;
}

/* chunk_search(params, min_bytes, range_bytes, n_grids) -> chunk bytes; params: (numel, weight_bytes, kind). */
PyObject *gm_py_chunk_search(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *sequence;
    Py_ssize_t min_bytes, range_bytes;
    unsigned int n_grids;
    if (!PyArg_ParseTuple(args, "OnnI", &sequence, &min_bytes, &range_bytes, &n_grids)) {
        return NULL;
    }
    Py_ssize_t n = PySequence_Size(sequence);
    gm_param_spec *specs = n < 0 ? NULL : calloc((size_t)n + 1, sizeof *specs);
    if (!specs) {
        return n < 0 ? NULL : PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PySequence_GetItem(sequence, i);
        unsigned long long numel;
        unsigned int weight_bytes, kind;
        int is_parsed = item && PyArg_ParseTuple(item, "KII", &numel, &weight_bytes, &kind);
        Py_XDECREF(item);
        if (!is_parsed) {
            free(specs);
            return NULL;
        }
        specs[i] = (gm_param_spec){.numel = numel, .weight_bytes = weight_bytes, .kind = kind};
    }
    size_t chunk_bytes = 0;
    gm_status status = gm_layout_search(specs, (uint32_t)n, (size_t)min_bytes, (size_t)range_bytes,
                                        n_grids, &chunk_bytes);
    free(specs);
    if (status != GM_OK) {
        return gm_py_raise(status);
    }
    return PyLong_FromSize_t(chunk_bytes);
}
