/* py_engine.c - the Python type Core: one gm_engine.  Parses, calls, translates; no policy.
 *
 * The GIL is released around every call that may copy, compute or wait. */
#include "py_engine.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"
#include "layout.h"
#include "torch_abi.h"
#include "torch_alloc.h"
#include "workers.h"

/* What others of this process hold on the device: torch's pool, counted by our allocator, and the rest
 * (driver context, modules, memory from before), told by Python. */
typedef struct outside {
    int ordinal; /* -1 on the host device */
    atomic_size_t external_bytes;
} outside;

typedef struct core {
    PyObject_HEAD gm_engine *engine; /* NULL after close() */
    gm_workers *workers;             /* owned when the caller chose a thread count, else NULL */
    outside *around;
    uint32_t n_params;
} core;

static size_t outside_bytes(void *context)
{
    outside *around = context;
    return atomic_load(&around->external_bytes) + gm_torch_alloc_bytes(around->ordinal);
}

static bool reserve_for_torch(void *context, size_t bytes)
{
    return gm_engine_reserve(context, bytes);
}

static gm_engine *engine_of(core *self)
{
    if (!self->engine) {
        (void)GM_FAIL(GM_ERR_STATE, "this engine is closed: call gemini_strategy.manage() again");
        gm_py_raise(GM_ERR_STATE);
    }
    return self->engine;
}

/* ---- construction ---- */

/* params: sequence of (numel, weight_bytes, format, has_low, has_moments, has_grad). */
static gm_engine_param *parse_params(PyObject *sequence, uint32_t *out_n)
{
    Py_ssize_t n = PySequence_Size(sequence);
    if (n < 0) {
        return NULL;
    }
    gm_engine_param *params = calloc((size_t)n + 1, sizeof *params);
    if (!params) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PySequence_GetItem(sequence, i);
        unsigned long long numel;
        unsigned int weight_bytes;
        int format, has_low, has_moments, has_grad;
        int is_parsed = item && PyArg_ParseTuple(item, "KIippp", &numel, &weight_bytes, &format,
                                                 &has_low, &has_moments, &has_grad);
        Py_XDECREF(item);
        if (!is_parsed) {
            free(params);
            return NULL;
        }
        params[i] = (gm_engine_param){
            .numel = numel,
            .weight_bytes = weight_bytes,
            .format = (gm_dtype)format,
            .has_low = has_low,
            .has_moments = has_moments,
            .has_grad = has_grad,
        };
    }
    *out_n = (uint32_t)n;
    return params;
}

/* A sequence of non-negative integers; *out has room for one more than *out_n. */
static int parse_ids(PyObject *sequence, uint32_t **out, uint32_t *out_n)
{
    Py_ssize_t n = PySequence_Size(sequence);
    uint32_t *ids = n < 0 ? NULL : calloc((size_t)n + 1, sizeof *ids);
    if (!ids) {
        if (n >= 0) {
            PyErr_NoMemory();
        }
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PySequence_GetItem(sequence, i);
        unsigned long id = item ? PyLong_AsUnsignedLong(item) : 0;
        Py_XDECREF(item);
        if (!item || PyErr_Occurred()) {
            free(ids);
            return -1;
        }
        ids[i] = (uint32_t)id;
    }
    *out = ids;
    *out_n = (uint32_t)n;
    return 0;
}

static gm_status make_engine(core *self, gm_engine_options *options, int ordinal,
                             size_t block_bytes)
{
    gm_device *device;
    if (ordinal < 0) {
        GM_TRY(gm_device_host_new(block_bytes, options->workers, &device));
    } else {
        GM_TRY(gm_device_cuda_new(ordinal, block_bytes, &device));
        options->outside_bytes = outside_bytes;
        options->outside_context = self->around;
    }
    options->device = device; /* the engine's from here, also when it fails */
    return gm_engine_new(options, &self->engine);
}

static PyObject *core_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"ordinal",        "params",      "unit_params",   "unit_begin",
                            "chunk_bytes",    "block_bytes", "device_budget", "host_budget",
                            "policy",         "is_strict",   "is_grad_f32",   "threads",
                            "external_bytes", NULL};
    PyObject *params, *unit_params, *unit_begin;
    int ordinal, policy, is_strict, is_grad_f32;
    unsigned int threads;
    Py_ssize_t chunk_bytes, block_bytes, device_budget, host_budget, external_bytes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iOOOnnnnippIn", names, &ordinal, &params,
                                     &unit_params, &unit_begin, &chunk_bytes, &block_bytes,
                                     &device_budget, &host_budget, &policy, &is_strict,
                                     &is_grad_f32, &threads, &external_bytes)) {
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    core *self = (core *)allocate(type, 0);
    gm_engine_options options = {
        .chunk_bytes = (size_t)chunk_bytes,
        .device_budget = device_budget < 0 ? SIZE_MAX : (size_t)device_budget,
        .host_budget = host_budget < 0 ? SIZE_MAX : (size_t)host_budget,
        .policy = (gm_policy)policy,
        .is_strict = is_strict,
        .is_grad_f32 = is_grad_f32,
    };
    uint32_t *ids = NULL, *begins = NULL, n_ids = 0, n_begins = 0;
    gm_engine_param *table = NULL;
    if (!self || !(table = parse_params(params, &options.n_params)) ||
        parse_ids(unit_params, &ids, &n_ids) < 0 || parse_ids(unit_begin, &begins, &n_begins) < 0) {
        goto fail;
    }
    self->around = calloc(1, sizeof *self->around);
    if (!self->around) {
        PyErr_NoMemory();
        goto fail;
    }
    self->around->ordinal = ordinal;
    atomic_init(&self->around->external_bytes, (size_t)external_bytes);
    self->n_params = options.n_params;
    options.params = table;
    options.unit_params = ids;
    options.unit_begin = begins;
    options.n_units = n_begins ? n_begins - 1 : 0;
    if (threads > 0) {
        gm_status made = gm_workers_new(threads, &self->workers);
        if (made != GM_OK) {
            gm_py_raise(made);
            goto fail;
        }
        options.workers = self->workers;
    } else if (!(options.workers = gm_py_workers())) {
        goto fail;
    }
    gm_status status;
    Py_BEGIN_ALLOW_THREADS
    status = make_engine(self, &options, ordinal, (size_t)block_bytes);
    Py_END_ALLOW_THREADS
    if (status != GM_OK) {
        gm_py_raise(status);
        goto fail;
    }
    if (ordinal >= 0) {
        gm_torch_alloc_set_reserve(ordinal, reserve_for_torch, self->engine);
    }
    free(table);
    free(ids);
    free(begins);
    return (PyObject *)self;
fail:
    free(table);
    free(ids);
    free(begins);
    Py_XDECREF((PyObject *)self);
    return NULL;
}

/* The engine's memory outlives this as long as tensors show it (leases hold references); with it must live
 * its workers and `around`, which is why both are freed only with the object and never used after close. */
static void core_release(core *self)
{
    if (self->engine) {
        if (self->around->ordinal >= 0) {
            gm_torch_alloc_set_reserve(self->around->ordinal, NULL, NULL);
        }
        gm_engine *engine = self->engine;
        self->engine = NULL;
        Py_BEGIN_ALLOW_THREADS
        gm_engine_unref(engine);
        Py_END_ALLOW_THREADS
    }
}

static PyObject *core_close(core *self, PyObject *unused)
{
    (void)unused;
    core_release(self);
    Py_RETURN_NONE;
}

static void core_dealloc(core *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    core_release(self);
    gm_workers_free(self->workers);
    free(self->around);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF((PyObject *)type);
}

/* ---- calls with integer arguments ---- */

static int parse_numbers(const char *name, PyObject *const *args, Py_ssize_t n_args,
                         Py_ssize_t n_wanted, unsigned long long *out)
{
    if (n_args != n_wanted) {
        PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", name, n_wanted, n_args);
        return -1;
    }
    for (Py_ssize_t i = 0; i < n_args; i++) {
        out[i] = PyLong_AsUnsignedLongLong(args[i]);
        if (out[i] == (unsigned long long)-1 && PyErr_Occurred()) {
            return -1;
        }
    }
    return 0;
}

static PyObject *finish(gm_status status)
{
    if (status != GM_OK) {
        return gm_py_raise(status);
    }
    Py_RETURN_NONE;
}

/* Calls that take only numbers: parsed, called without the GIL, translated. */
typedef gm_status (*number_call)(gm_engine *engine, const unsigned long long *v);

static PyObject *call_numbers(core *self, const char *name, number_call call, PyObject *const *args,
                              Py_ssize_t n_args, Py_ssize_t n_wanted)
{
    unsigned long long v[4];
    gm_engine *engine = engine_of(self);
    if (!engine || parse_numbers(name, args, n_args, n_wanted, v) < 0) {
        return NULL;
    }
    gm_status status;
    gm_engine_ref(engine); /* close() on another thread must not take it away */
    Py_BEGIN_ALLOW_THREADS
    status = call(engine, v);
    gm_engine_unref(engine);
    Py_END_ALLOW_THREADS
    return finish(status);
}

/* One method of that kind: the C call as an expression of engine and v[]. */
#define NUMBER_METHOD(name, n_wanted, expression)                                      \
    static gm_status call_##name(gm_engine *engine, const unsigned long long *v)       \
    {                                                                                  \
        return expression;                                                             \
    }                                                                                  \
    static PyObject *core_##name(core *self, PyObject *const *args, Py_ssize_t n_args) \
    {                                                                                  \
        return call_numbers(self, #name, call_##name, args, n_args, n_wanted);         \
    }

NUMBER_METHOD(enter, 2, gm_engine_enter(engine, (uint32_t)v[0], v[1]))
NUMBER_METHOD(leave, 2, gm_engine_leave(engine, (uint32_t)v[0], v[1]))
NUMBER_METHOD(touch, 2, gm_engine_touch(engine, (uintptr_t)v[0], v[1]))
NUMBER_METHOD(release_touched, 1, gm_engine_release_touched(engine, (uint32_t)v[0]))
NUMBER_METHOD(grad_put, 4,
              gm_engine_grad_put(engine, (uint32_t)v[0], (const void *)(uintptr_t)v[1],
                                 (gm_dtype)v[2], v[3]))
NUMBER_METHOD(grad_drop, 1, gm_engine_grad_drop(engine, (uint32_t)v[0]))
NUMBER_METHOD(note_write, 2, gm_engine_note_write(engine, (uint32_t)v[0], v[1]))
NUMBER_METHOD(read, 3,
              gm_engine_read(engine, (uint32_t)v[0], (gm_field)v[1], (void *)(uintptr_t)v[2]))
NUMBER_METHOD(write, 4,
              gm_engine_write(engine, (uint32_t)v[0], (gm_field)v[1], (const void *)(uintptr_t)v[2],
                              v[3]))
NUMBER_METHOD(settle, 1, gm_engine_settle(engine, (size_t)v[0]))

static PyObject *core_drain(core *self, PyObject *unused)
{
    (void)unused;
    gm_engine *engine = engine_of(self);
    if (!engine) {
        return NULL;
    }
    gm_status status;
    gm_engine_ref(engine);
    Py_BEGIN_ALLOW_THREADS
    status = gm_engine_drain(engine);
    gm_engine_unref(engine);
    Py_END_ALLOW_THREADS
    return finish(status);
}

static PyObject *core_n_touched(core *self, PyObject *unused)
{
    (void)unused;
    gm_engine *engine = engine_of(self);
    return engine ? PyLong_FromUnsignedLong(gm_engine_n_touched(engine)) : NULL;
}

static PyObject *core_has_grad(core *self, PyObject *const *args, Py_ssize_t n_args)
{
    unsigned long long v[1];
    gm_engine *engine = engine_of(self);
    if (!engine || parse_numbers("has_grad", args, n_args, 1, v) < 0) {
        return NULL;
    }
    return PyBool_FromLong(gm_engine_has_grad(engine, (uint32_t)v[0]));
}

static PyObject *core_set_external(core *self, PyObject *const *args, Py_ssize_t n_args)
{
    unsigned long long v[1];
    if (!engine_of(self) || parse_numbers("set_external_bytes", args, n_args, 1, v) < 0) {
        return NULL;
    }
    atomic_store(&self->around->external_bytes, (size_t)v[0]);
    Py_RETURN_NONE;
}

static PyObject *core_address(core *self, PyObject *const *args, Py_ssize_t n_args)
{
    unsigned long long v[1];
    gm_engine *engine = engine_of(self);
    if (!engine || parse_numbers("address", args, n_args, 1, v) < 0) {
        return NULL;
    }
    if (v[0] >= self->n_params) {
        return PyErr_Format(PyExc_ValueError, "parameter %llu does not exist", v[0]);
    }
    return PyLong_FromUnsignedLongLong(gm_engine_address(engine, (uint32_t)v[0]));
}

static PyObject *core_chunk(core *self, PyObject *const *args, Py_ssize_t n_args)
{
    unsigned long long v[1];
    gm_engine *engine = engine_of(self);
    if (!engine || parse_numbers("chunk", args, n_args, 1, v) < 0) {
        return NULL;
    }
    if (v[0] >= self->n_params) {
        return PyErr_Format(PyExc_ValueError, "parameter %llu does not exist", v[0]);
    }
    uint32_t chunk = gm_engine_chunk_of(engine, (uint32_t)v[0]);
    return Py_BuildValue("In", (unsigned int)chunk,
                         (Py_ssize_t)gm_engine_chunk_bytes(engine, chunk));
}

static PyObject *core_weight_span(core *self, PyObject *unused)
{
    (void)unused;
    gm_engine *engine = engine_of(self);
    if (!engine) {
        return NULL;
    }
    uintptr_t begin, end;
    gm_engine_weight_span(engine, &begin, &end);
    return Py_BuildValue("KK", (unsigned long long)begin, (unsigned long long)end);
}

static PyObject *core_lease(core *self, PyObject *const *args, Py_ssize_t n_args)
{
    unsigned long long v[4];
    gm_engine *engine = engine_of(self);
    if (!engine || parse_numbers("lease", args, n_args, 4, v) < 0) {
        return NULL;
    }
    gm_status status;
    gm_lease *lease = NULL;
    gm_engine_ref(engine);
    Py_BEGIN_ALLOW_THREADS
    status = gm_lease_new(engine, (uint32_t)v[0], v[1] != 0, v[2] != 0, v[3], &lease);
    gm_engine_unref(engine);
    Py_END_ALLOW_THREADS
    if (status != GM_OK) {
        return gm_py_raise(status);
    }
    return PyLong_FromUnsignedLongLong((uintptr_t)lease);
}

static PyObject *core_lease_end(core *self, PyObject *const *args, Py_ssize_t n_args)
{
    unsigned long long v[1];
    if (parse_numbers("lease_end", args, n_args, 1, v) < 0) {
        return NULL;
    }
    (void)self;
    gm_lease_end((gm_lease *)(uintptr_t)v[0]);
    Py_RETURN_NONE;
}

static PyObject *core_lease_unwatch(core *self, PyObject *const *args, Py_ssize_t n_args)
{
    unsigned long long v[1];
    if (parse_numbers("lease_unwatch", args, n_args, 1, v) < 0) {
        return NULL;
    }
    (void)self;
    gm_lease_unwatch((gm_lease *)(uintptr_t)v[0]);
    Py_RETURN_NONE;
}

/* ---- the step ---- */

/* grad_sumsq(params, stream) -> (sum of squares as a double, non-finite elements) */
static PyObject *core_grad_sumsq(core *self, PyObject *args)
{
    PyObject *sequence;
    unsigned long long stream;
    gm_engine *engine = engine_of(self);
    if (!engine || !PyArg_ParseTuple(args, "OK", &sequence, &stream)) {
        return NULL;
    }
    uint32_t *ids, n;
    if (parse_ids(sequence, &ids, &n) < 0) {
        return NULL;
    }
    gm_status status;
    gm_sumsq sum;
    gm_engine_ref(engine);
    Py_BEGIN_ALLOW_THREADS
    status = gm_engine_sumsq(engine, ids, n, &sum, stream);
    gm_engine_unref(engine);
    Py_END_ALLOW_THREADS
    free(ids);
    if (status != GM_OK) {
        return gm_py_raise(status);
    }
    return Py_BuildValue("dK", gm_sumsq_value(&sum), (unsigned long long)(sum.n_inf + sum.n_nan));
}

/* step(updates, stream); updates: sequence of (param, lr, beta1, beta2, eps, weight_decay, step, adamw,
 * bias_correction, grad_divisor, clip_factor). */
static PyObject *core_step(core *self, PyObject *args)
{
    PyObject *sequence;
    unsigned long long stream;
    gm_engine *engine = engine_of(self);
    if (!engine || !PyArg_ParseTuple(args, "OK", &sequence, &stream)) {
        return NULL;
    }
    Py_ssize_t n = PySequence_Size(sequence);
    gm_update *updates = n < 0 ? NULL : calloc((size_t)n + 1, sizeof *updates);
    if (!updates) {
        return n < 0 ? NULL : PyErr_NoMemory();
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
    gm_status status;
    gm_engine_ref(engine);
    Py_BEGIN_ALLOW_THREADS
    status = gm_engine_step(engine, updates, (uint32_t)n, stream);
    gm_engine_unref(engine);
    Py_END_ALLOW_THREADS
    free(updates);
    return finish(status);
}

static PyObject *core_stats(core *self, PyObject *unused)
{
    (void)unused;
    gm_engine *engine = engine_of(self);
    if (!engine) {
        return NULL;
    }
    gm_engine_stats s;
    Py_BEGIN_ALLOW_THREADS
    gm_engine_get_stats(engine, &s);
    Py_END_ALLOW_THREADS
    Py_ssize_t budget = s.device_budget_bytes == SIZE_MAX ? -1 : (Py_ssize_t)s.device_budget_bytes;
    return Py_BuildValue(
        "{s:K,s:K,s:K,s:K,s:n,s:n,s:n,s:n,s:n,s:n,s:I,s:I,s:I,s:I,s:K}", "fetches",
        (unsigned long long)s.fetches, "evictions", (unsigned long long)s.evictions,
        "fetched_bytes", (unsigned long long)s.fetched_bytes, "evicted_bytes",
        (unsigned long long)s.evicted_bytes, "device_bytes", (Py_ssize_t)s.device_bytes,
        "device_peak_bytes", (Py_ssize_t)s.device_peak_bytes, "device_budget_bytes", budget,
        "host_bytes", (Py_ssize_t)s.host_bytes, "state_bytes", (Py_ssize_t)s.state_bytes,
        "weight_bytes", (Py_ssize_t)s.weight_bytes, "chunks", (unsigned int)s.n_chunks, "blocks",
        (unsigned int)s.n_blocks, "settled_chunks", (unsigned int)s.n_settled, "leases",
        (unsigned int)s.n_leases, "layout_hash", (unsigned long long)s.layout_hash);
}

static PyObject *core_check(core *self, PyObject *unused)
{
    (void)unused;
    gm_engine *engine = engine_of(self);
    if (!engine) {
        return NULL;
    }
    gm_status status;
    Py_BEGIN_ALLOW_THREADS
    status = gm_engine_check(engine);
    Py_END_ALLOW_THREADS
    return finish(status);
}

/* chunk_search(params, min_bytes, range_bytes, n_grids) -> chunk bytes; params: (numel, weight_bytes, kind). */
static PyObject *chunk_search(PyObject *module, PyObject *args)
{
    (void)module;
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

static PyObject *torch_abi_init(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return finish(gm_torch_abi_init());
}

#define METHOD(name, function, flags, doc) \
    {name, (PyCFunction)(void (*)(void))(function), flags, doc}

static PyMethodDef core_methods[] = {
    METHOD("enter", core_enter, METH_FASTCALL, "enter(unit, stream)"),
    METHOD("leave", core_leave, METH_FASTCALL, "leave(unit, stream)"),
    METHOD("touch", core_touch, METH_FASTCALL, "touch(address, stream)"),
    METHOD("release_touched", core_release_touched, METH_FASTCALL, "release_touched(n_keep)"),
    METHOD("n_touched", core_n_touched, METH_NOARGS, "n_touched() -> int"),
    METHOD("grad_put", core_grad_put, METH_FASTCALL, "grad_put(param, address, dtype, stream)"),
    METHOD("has_grad", core_has_grad, METH_FASTCALL, "has_grad(param) -> bool"),
    METHOD("grad_drop", core_grad_drop, METH_FASTCALL, "grad_drop(param)"),
    METHOD("grad_sumsq", core_grad_sumsq, METH_VARARGS,
           "grad_sumsq(params, stream) -> (sum, n_nonfinite)"),
    METHOD("note_write", core_note_write, METH_FASTCALL, "note_write(param, stream)"),
    METHOD("read", core_read, METH_FASTCALL, "read(param, field, host_address)"),
    METHOD("write", core_write, METH_FASTCALL, "write(param, field, host_address, stream)"),
    METHOD("drain", core_drain, METH_NOARGS, "drain()"),
    METHOD("settle", core_settle, METH_FASTCALL, "settle(reserve_bytes)"),
    METHOD("set_external_bytes", core_set_external, METH_FASTCALL, "set_external_bytes(bytes)"),
    METHOD("address", core_address, METH_FASTCALL, "address(param) -> int"),
    METHOD("chunk", core_chunk, METH_FASTCALL, "chunk(param) -> (id, bytes of its weights)"),
    METHOD("weight_span", core_weight_span, METH_NOARGS, "weight_span() -> (begin, end)"),
    METHOD("lease", core_lease, METH_FASTCALL,
           "lease(param, is_pinned, is_watched, stream) -> lease"),
    METHOD("lease_end", core_lease_end, METH_FASTCALL, "lease_end(lease)"),
    METHOD("lease_unwatch", core_lease_unwatch, METH_FASTCALL, "lease_unwatch(lease)"),
    METHOD("step", core_step, METH_VARARGS, "step(updates, stream)"),
    METHOD("stats", core_stats, METH_NOARGS, "stats() -> dict"),
    METHOD("check", core_check, METH_NOARGS, "check(): raises if an invariant is broken"),
    METHOD("close", core_close, METH_NOARGS, "close(): idempotent"),
    {NULL, NULL, 0, NULL},
};

static PyMethodDef module_methods[] = {
    METHOD("chunk_search", chunk_search, METH_VARARGS,
           "chunk_search(params, min_bytes, range_bytes, n_grids) -> chunk bytes"),
    METHOD("torch_abi_init", torch_abi_init, METH_NOARGS,
           "registers gemini::blob; torch must be loaded"),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot core_slots[] = {
    {Py_tp_new, (void *)core_new},
    {Py_tp_dealloc, (void *)core_dealloc},
    {Py_tp_methods, core_methods},
    {Py_tp_doc, "One engine of the C core; see csrc/engine.h."},
    {0, NULL},
};

static PyType_Spec core_spec = {
    .name = "gemini_strategy._C.Core",
    .basicsize = sizeof(core),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = core_slots,
};

int gm_py_engine_init(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&core_spec);
    if (!type) {
        return -1;
    }
    int result = PyModule_AddObjectRef(module, "Core", type);
    Py_DECREF(type);
    if (result < 0 || PyModule_AddFunctions(module, module_methods) < 0) {
        return -1;
    }
    return PyModule_AddIntConstant(module, "HOST_GRANULARITY", (long)gm_device_host_granularity());
}
