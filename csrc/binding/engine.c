/* engine.c - the Python type Core: one gm_engine.  Parses, calls, translates; no policy.
 *
 * The GIL is released around every call that may copy, compute or wait. */
#include "binding/core.h"

#include <stdlib.h>
#include <string.h>

#include "device/library.h"
#include "device/paper.h"
#include "binding/comm.h"
#include "binding/plan.h"
#include "torch/abi.h"
#include "torch/alloc.h"

static size_t outside_bytes(void *context)
{
    outside *others = context;
    return atomic_load(&others->external_bytes) +
           (atomic_load(&others->answers) ? gm_torch_alloc_bytes(others->ordinal) : 0);
}

/* ---- construction ---- */

/* (numel, weight_bytes, format, has_low, has_moments, has_grad, name, cut); the name is the item's,
 * and cut may be missing. */
static int parse_param(PyObject *item, void *out)
{
    unsigned long long numel, cut = 0;
    unsigned int weight_bytes;
    int format, has_low, has_moments, has_grad;
    const char *name;
    if (!PyArg_ParseTuple(item, "KIippps|K", &numel, &weight_bytes, &format, &has_low, &has_moments,
                          &has_grad, &name, &cut)) {
        return 0;
    }
    *(gm_engine_param *)out = (gm_engine_param){
        .numel = numel,
        .weight_bytes = weight_bytes,
        .format = (gm_dtype)format,
        .has_low = has_low,
        .has_moments = has_moments,
        .has_grad = has_grad,
        .name = name,
        .cut = cut,
    };
    return 1;
}

static int parse_bytes(PyObject *item, void *out)
{
    *(uint64_t *)out = PyLong_AsUnsignedLongLong(item);
    return !PyErr_Occurred();
}

/* A pointer into a string, which the caller keeps. */
static int parse_name(PyObject *item, void *out)
{
    *(const char **)out = PyUnicode_AsUTF8AndSize(item, NULL);
    return *(const char **)out != NULL;
}

static const gm_library_calls library_calls = {.fail = gm_fail,
                                               .last_error = gm_last_error,
                                               .new_object = gm_new,
                                               .grow = gm_grow,
                                               .up_to = gm_up_to,
                                               .host_new = gm_device_host_new};

static gm_status make_engine(core *self, gm_engine_options *options, int ordinal, bool is_paper,
                             size_t host_bytes, size_t block_bytes, gm_library_device_new *library)
{
    gm_device *device;
    if (is_paper) {
        GM_TRY(gm_device_paper_new(block_bytes, ordinal < 0, host_bytes, &device));
        self->paper = device;
    } else if (ordinal < 0 && library) {
        GM_TRY(library(&library_calls, block_bytes, options->workers, &device));
    } else if (ordinal < 0) {
        GM_TRY(gm_device_host_new(block_bytes, options->workers, &device));
    } else {
        GM_TRY(gm_device_cuda_new(ordinal, block_bytes, &device));
    }
    options->outside_bytes = outside_bytes;
    options->outside_context = self->outside;
    options->device = device; /* the engine's from here, also when it fails */
    return gm_engine_new(options, &self->engine);
}

/* None: alone. */
static int take_comm(core *self, int which, PyObject *object, gm_comm **out)
{
    if (object == Py_None) {
        return 0;
    }
    *out = gm_py_comm_take(object);
    self->comms[which] = *out ? object : NULL;
    return *out ? 0 : -1;
}

static void give_comms(core *self)
{
    for (int which = 0; which < 2; which++) {
        PyObject *comm = self->comms[which];
        self->comms[which] = NULL;
        if (comm) {
            gm_py_comm_give(comm);
        }
    }
}

static int make_outside(core *self, int ordinal, Py_ssize_t external_bytes)
{
    self->outside = calloc(1, sizeof *self->outside);
    if (!self->outside) {
        PyErr_NoMemory();
        return -1;
    }
    self->outside->ordinal = ordinal;
    atomic_init(&self->outside->external_bytes, (size_t)external_bytes);
    return 0;
}

/* A pool of its own where a number of threads is given, else the process's. */
static int take_workers(core *self, unsigned threads, gm_workers **out)
{
    gm_status made = threads > 0 ? gm_py_workers_new(threads, &self->workers) : GM_OK;
    if (made != GM_OK) {
        gm_py_raise(made);
        return -1;
    }
    *out = threads > 0 ? self->workers : gm_py_workers();
    return *out ? 0 : -1;
}

/* What Core takes, each once: its format for PyArg_Parse, its type and its name. */
#define GM_CORE_REQUIRED(X)            \
    X("i", int, ordinal)               \
    X("O", PyObject *, params)         \
    X("O", PyObject *, unit_params)    \
    X("O", PyObject *, unit_begin)     \
    X("O", PyObject *, unit_names)     \
    X("n", Py_ssize_t, chunk_bytes)    \
    X("n", Py_ssize_t, block_bytes)    \
    X("n", Py_ssize_t, device_budget)  \
    X("n", Py_ssize_t, host_budget)    \
    X("i", int, policy)                \
    X("p", int, is_grad_f32)           \
    X("I", unsigned, threads)          \
    X("n", Py_ssize_t, external_bytes) \
    X("O", PyObject *, rates)          \
    X("d", double, state_share)        \
    X("n", Py_ssize_t, slack_bytes)    \
    X("p", int, is_tuned)
#define GM_CORE_OPTIONAL(X)          \
    X("O", PyObject *, shard_comm)   \
    X("O", PyObject *, replica_comm) \
    X("d", double, gather_rate)      \
    X("d", double, reduce_rate)      \
    X("p", int, is_paper)            \
    X("n", Py_ssize_t, host_bytes)   \
    X("n", Py_ssize_t, host_limit)   \
    X("O", PyObject *, opaque)       \
    X("i", int, opaque_when)         \
    X("O", PyObject *, state_bytes)  \
    X("K", unsigned long long, host_device)

#define FORMAT(format, type, name) format
#define NAME(format, type, name)   #name,
#define FIELD(format, type, name)  type name;
#define TARGET(format, type, name) , &out->name

typedef struct core_options {
    GM_CORE_REQUIRED(FIELD) GM_CORE_OPTIONAL(FIELD)
} core_options;

static int parse_options(PyObject *args, PyObject *kwargs, core_options *out)
{
    static char *names[] = {GM_CORE_REQUIRED(NAME) GM_CORE_OPTIONAL(NAME) NULL};
    return PyArg_ParseTupleAndKeywords(args, kwargs,
                                       GM_CORE_REQUIRED(FORMAT) "|" GM_CORE_OPTIONAL(FORMAT),
                                       names GM_CORE_REQUIRED(TARGET) GM_CORE_OPTIONAL(TARGET));
}

static PyObject *core_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    core_options o = {.shard_comm = Py_None,
                      .replica_comm = Py_None,
                      .opaque = Py_None,
                      .state_bytes = Py_None,
                      .host_bytes = -1,
                      .host_limit = -1};
    gm_rates rates = {0};
    if (!parse_options(args, kwargs, &o) || gm_py_rates_parse(o.rates, &rates) < 0) {
        return NULL;
    }
    rates.gather = o.gather_rate;
    rates.reduce = o.reduce_rate;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    core *self = (core *)allocate(type, 0);
    gm_engine_options options = {
        .chunk_bytes = (size_t)o.chunk_bytes,
        .device_budget = o.device_budget < 0 ? SIZE_MAX : (size_t)o.device_budget,
        .host_budget = o.host_budget < 0 ? SIZE_MAX : (size_t)o.host_budget,
        .host_limit = o.host_limit < 0 ? SIZE_MAX : (size_t)o.host_limit,
        .policy = (gm_policy)o.policy,
        .is_grad_f32 = o.is_grad_f32,
        .rates = rates,
        .state_share = o.state_share,
        .slack_bytes = (size_t)o.slack_bytes,
        .is_tuned = o.is_tuned,
    };
    size_t n_params = 0, n_ids, n_begins = 0, n_names = 0;
    gm_engine_param *table =
        self ? gm_py_array(o.params, sizeof *table, parse_param, &n_params) : NULL;
    uint32_t *ids = table ? gm_py_ids(o.unit_params, &n_ids) : NULL;
    uint32_t *begins = ids ? gm_py_ids(o.unit_begin, &n_begins) : NULL;
    const char **of_units =
        begins ? gm_py_array(o.unit_names, sizeof *of_units, parse_name, &n_names) : NULL;
    size_t n_units = n_begins ? n_begins - 1 : 0, n_bytes = 0;
    uint64_t *state_bytes =
        of_units && o.state_bytes != Py_None
            ? gm_py_array(o.state_bytes, sizeof *state_bytes, parse_bytes, &n_bytes)
            : NULL;
    if (of_units && n_names != n_units) {
        PyErr_Format(PyExc_ValueError, "%zu names for %zu units", n_names, n_units);
    }
    options.params = table;
    options.n_params = (uint32_t)n_params;
    options.unit_params = ids;
    options.unit_begin = begins;
    options.n_units = (uint32_t)n_units;
    options.unit_names = of_units;
    options.state_bytes = state_bytes;
    bool is_made = of_units && n_names == n_units && !PyErr_Occurred() &&
                   make_outside(self, o.is_paper ? -1 : o.ordinal, o.external_bytes) == 0 &&
                   take_workers(self, o.threads, &options.workers) == 0 &&
                   take_comm(self, 0, o.shard_comm, &options.shard_comm) == 0 &&
                   take_comm(self, 1, o.replica_comm, &options.replica_comm) == 0;
    size_t n_shards = options.shard_comm ? (size_t)gm_comm_size(options.shard_comm) : 1;
    if (is_made && state_bytes && n_bytes != n_params * n_shards) {
        PyErr_Format(PyExc_ValueError, "state_bytes: %zu numbers for %zu parts", n_bytes,
                     n_params * n_shards);
        is_made = false;
    }
    if (is_made) {
        self->n_params = options.n_params;
        if (o.opaque != Py_None) {
            self->opaque = Py_NewRef(o.opaque);
            options.opaque = (gm_opaque){gm_py_run_opaque, self, (gm_opaque_when)o.opaque_when};
        }
        gm_status status;
        GM_NO_GIL(status = make_engine(self, &options, o.ordinal, o.is_paper,
                                       o.host_bytes < 0 ? SIZE_MAX : (size_t)o.host_bytes,
                                       (size_t)o.block_bytes,
                                       (gm_library_device_new *)(uintptr_t)o.host_device));
        is_made = status == GM_OK || gm_py_raise(status);
    }
    free(table);
    free(ids);
    free(begins);
    free(of_units);
    free(state_bytes);
    return gm_py_unless((PyObject *)self, !is_made);
}

/* [[(first, n) of each shard's part] of each parameter] */
static PyObject *list_parts(const gm_layout *layout, uint32_t n_params, uint32_t n_shards)
{
    PyObject *all = PyList_New(0);
    for (uint32_t id = 0; all && id < n_params; id++) {
        PyObject *parts = PyList_New(0);
        for (uint32_t shard = 0; parts && shard < n_shards; shard++) {
            gm_part part = gm_layout_part(layout, id, shard);
            parts = gm_py_append(parts, Py_BuildValue("(KK)", (unsigned long long)part.first,
                                                      (unsigned long long)part.numel));
        }
        all = gm_py_append(all, parts);
    }
    return all;
}

static PyObject *parts_of(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *sequence, *parts = NULL;
    Py_ssize_t chunk_bytes;
    unsigned int n_shards;
    size_t n;
    gm_layout *layout;
    GM_PY_TRY(PyArg_ParseTuple(args, "OnI", &sequence, &chunk_bytes, &n_shards));
    gm_engine_param *table = gm_py_array(sequence, sizeof *table, parse_param, &n);
    GM_PY_TRY(table);
    gm_status status =
        gm_engine_lay_out(table, (uint32_t)n, (size_t)chunk_bytes, n_shards, &layout);
    if (status == GM_OK) {
        parts = list_parts(layout, (uint32_t)n, n_shards);
        gm_layout_free(layout);
    }
    free(table);
    return status == GM_OK ? parts : gm_py_raise(status);
}

/* The engine's memory outlives this as long as tensors show it (leases hold references); with it
 * must live its workers and `outside`, which is why both are freed only with the object and never
 * used after close. */
static void core_release(core *self)
{
    if (self->engine) {
        gm_engine *engine = self->engine;
        self->engine = NULL;
        self->paper = NULL;
        gm_py_stop_answering(self);
        Py_BEGIN_ALLOW_THREADS
        gm_engine_finish_updates(engine);
        gm_engine_leave_ranks(engine);
        gm_engine_unref(engine);
        Py_END_ALLOW_THREADS
    }
    give_comms(self);
}

static PyObject *core_close(core *self, PyObject *Py_UNUSED(unused))
{
    core_release(self);
    Py_RETURN_NONE;
}

static void core_dealloc(core *self)
{
    core_release(self);
    gm_workers_free(self->workers);
    free(self->outside);
    Py_CLEAR(self->opaque);
    gm_py_free((PyObject *)self);
}

/* ---- calls ---- */

GM_PY_CALL_STATUS(grad_put, 4,
                  gm_engine_grad_put(engine, (uint32_t)v[0], (const void *)(uintptr_t)v[1],
                                     (gm_dtype)v[2], v[3]))
GM_PY_CALL_STATUS(grad_drop, 1, gm_engine_grad_drop(engine, (uint32_t)v[0]))
GM_PY_CALL_STATUS(note_write, 2, gm_engine_note_write(engine, (uint32_t)v[0], v[1]))
GM_PY_CALL_OUT(n_found, 2, uint64_t, PyLong_FromUnsignedLongLong,
               gm_engine_n_found(engine, (uint32_t)v[0], v[1], &out))
GM_PY_CALL_STATUS(read, 5,
                  gm_engine_read(engine, (uint32_t)v[0], (gm_field)v[1], v[2], v[3],
                                 (void *)(uintptr_t)v[4]))
GM_PY_CALL_STATUS(write, 4,
                  gm_engine_write(engine, (uint32_t)v[0], (gm_field)v[1],
                                  (const void *)(uintptr_t)v[2], v[3]))
GM_PY_CALL_STATUS(fill, 7,
                  gm_engine_fill(engine, (uint32_t)v[0], (gm_field)v[1], v[2], v[3], (gm_dtype)v[4],
                                 (const void *)(uintptr_t)v[5], v[6]))
GM_PY_CALL_STATUS(limit_unreduced, 1, gm_engine_limit_unreduced(engine, (size_t)v[0]))
GM_PY_CALL_STATUS(timeline_begin, 1, gm_engine_timeline_begin(engine, (uint32_t)v[0]))
GM_PY_CALL_STATUS(check, 0, gm_engine_check(engine))
GM_PY_CALL_STATUS(drain, 0, gm_engine_drain(engine))
GM_PY_CALL_STATUS(catch_up, 0, gm_engine_catch_up(engine))
GM_PY_CALL_STATUS(settle, 0, gm_engine_settle(engine))
GM_PY_CALL_STATUS(issue, 1, gm_engine_issue(engine, v[0]))

/* Leases are numbers in Python. */
static PyObject *number_of(const gm_lease *lease)
{
    return PyLong_FromUnsignedLongLong((uintptr_t)lease);
}

GM_PY_CALL_OUT(lease, 1, gm_lease *, number_of, gm_lease_new(engine, (uint32_t)v[0], &out))
GM_PY_CALL_STATUS(lease_pin, 2, gm_lease_pin((gm_lease *)(uintptr_t)v[0], v[1]))
GM_PY_CALL_STATUS(lease_watch, 2, gm_lease_watch((gm_lease *)(uintptr_t)v[0], v[1]))

static PyObject *core_part(core *self, PyObject *const *args, Py_ssize_t n_args)
{
    unsigned long long v[1];
    uint64_t first, n;
    gm_engine *engine = gm_py_begin(self, "part", args, n_args, 1, v);
    GM_PY_TRY(engine);
    gm_status status = gm_engine_part(engine, (uint32_t)v[0], &first, &n);
    return status == GM_OK ? Py_BuildValue("KK", (unsigned long long)first, (unsigned long long)n)
                           : gm_py_raise(status);
}

/* With the GIL, as it waits for nothing: it is asked of every parameter in a step, and another
 * thread that wants the GIL would get it each time. */
static PyObject *core_has_grad(core *self, PyObject *const *args, Py_ssize_t n_args)
{
    unsigned long long v[1];
    const gm_engine *engine = gm_py_begin(self, "has_grad", args, n_args, 1, v);
    return engine ? PyBool_FromLong(gm_engine_has_grad(engine, (uint32_t)v[0])) : NULL;
}

static PyObject *core_leased(core *self, PyObject *Py_UNUSED(unused))
{
    gm_engine *engine = gm_py_engine_of(self);
    bool *is_leased = engine ? malloc((size_t)self->n_params + 1) : NULL;
    if (!is_leased) {
        return engine ? PyErr_NoMemory() : NULL;
    }
    GM_WITHOUT_GIL(engine, gm_engine_leased(engine, is_leased));
    PyObject *result = PyList_New(0);
    for (uint32_t id = 0; result && id < self->n_params; id++) {
        if (is_leased[id]) {
            result = gm_py_append(result, PyLong_FromUnsignedLong(id));
        }
    }
    free(is_leased);
    return result;
}

/* tell_host_rate(parameters per second): see gm_engine_tell_host_rate */
static PyObject *core_tell_host_rate(core *self, PyObject *rate)
{
    gm_engine *engine = gm_py_engine_of(self);
    GM_PY_TRY(engine);
    double value = PyFloat_AsDouble(rate);
    if (PyErr_Occurred()) {
        return NULL;
    }
    gm_engine_tell_host_rate(engine, value);
    Py_RETURN_NONE;
}

/* plan_info() -> dict, or None while units are served on demand */
static PyObject *core_plan_info(core *self, PyObject *Py_UNUSED(unused))
{
    gm_engine *engine = gm_py_engine_of(self);
    GM_PY_TRY(engine);
    gm_engine_stats stats;
    gm_class *classes = NULL;
    gm_plan_info info;
    bool has_plan = false;
    GM_WITHOUT_GIL(engine, gm_engine_get_stats(engine, &stats),
                   classes = malloc(((size_t)stats.chunks + 1) * sizeof *classes),
                   has_plan = classes && gm_engine_plan(engine, &info, classes));
    PyObject *result = !classes    ? PyErr_NoMemory()
                       : !has_plan ? Py_NewRef(Py_None)
                                   : gm_py_plan_info(&info, classes, stats.chunks);
    free(classes);
    return result;
}

/* free() them; NULL: no memory. */
static gm_engine_chunk *states_of(gm_engine *engine, uint32_t *out_n)
{
    gm_engine_stats stats;
    gm_engine_get_stats(engine, &stats);
    gm_engine_chunk *chunks = malloc(((size_t)stats.chunks + 1) * sizeof *chunks);
    if (chunks) {
        gm_engine_chunks(engine, chunks);
    }
    *out_n = stats.chunks;
    return chunks;
}

static PyObject *core_chunk_states(core *self, PyObject *Py_UNUSED(unused))
{
    gm_engine *engine = gm_py_engine_of(self);
    GM_PY_TRY(engine);
    uint32_t n;
    gm_engine_chunk *chunks;
    GM_WITHOUT_GIL(engine, chunks = states_of(engine, &n));
    PyObject *list = chunks ? PyList_New(0) : PyErr_NoMemory();
    for (uint32_t id = 0; list && id < n; id++) {
        list = gm_py_append(list, gm_py_chunk(&chunks[id]));
    }
    free(chunks);
    return list;
}

/* timeline_end() -> list of dicts */
static PyObject *core_timeline_end(core *self, PyObject *Py_UNUSED(unused))
{
    gm_engine *engine = gm_py_engine_of(self);
    gm_timeline *timeline = NULL;
    GM_PY_TRY(engine);
    gm_status status;
    GM_WITHOUT_GIL(engine, status = gm_engine_timeline_end(engine, &timeline));
    PyObject *entries = status == GM_OK ? gm_py_timeline(timeline) : gm_py_raise(status);
    gm_timeline_free(timeline);
    return entries;
}

/* The first of the numbers is a parameter. */
static gm_engine *begin_param(core *self, const char *name, PyObject *const *args,
                              Py_ssize_t n_args, unsigned long long *out)
{
    gm_engine *engine = gm_py_begin(self, name, args, n_args, 1, out);
    GM_PY_FAIL_IF(engine && *out >= self->n_params, PyExc_ValueError,
                  "parameter %llu does not exist", *out);
    return engine;
}

static PyObject *core_address(core *self, PyObject *const *args, Py_ssize_t n_args)
{
    unsigned long long param;
    const gm_engine *engine = begin_param(self, "address", args, n_args, &param);
    return engine ? PyLong_FromUnsignedLongLong(gm_engine_address(engine, (uint32_t)param)) : NULL;
}

static PyObject *core_chunk(core *self, PyObject *const *args, Py_ssize_t n_args)
{
    unsigned long long param;
    const gm_engine *engine = begin_param(self, "chunk", args, n_args, &param);
    GM_PY_TRY(engine);
    uint32_t chunk = gm_engine_chunk_of(engine, (uint32_t)param);
    gm_engine_need need;
    gm_engine_chunk_need(engine, chunk, &need);
    return Py_BuildValue("Innnn", (unsigned int)chunk, (Py_ssize_t)need.shown,
                         (Py_ssize_t)need.gathering, (Py_ssize_t)need.unreduced,
                         (Py_ssize_t)need.updating);
}

static PyObject *core_sums(core *self, PyObject *Py_UNUSED(unused))
{
    gm_engine *engine = gm_py_engine_of(self);
    GM_PY_TRY(engine);
    Py_ssize_t bytes = (Py_ssize_t)(self->n_params * sizeof(uint64_t));
    PyObject *sums = PyBytes_FromStringAndSize(NULL, bytes);
    if (sums) {
        gm_engine_sums(engine, (uint64_t *)(void *)PyBytes_AsString(sums));
    }
    return sums;
}

static PyObject *core_salvage(core *self, PyObject *Py_UNUSED(unused))
{
    gm_engine *engine = gm_py_engine_of(self);
    GM_PY_TRY(engine);
    char text[512];
    bool was_dead;
    GM_WITHOUT_GIL(engine, was_dead = gm_engine_salvage(engine, text, sizeof text));
    return was_dead ? gm_py_text(text) : Py_NewRef(Py_None);
}

static PyObject *torch_abi_init(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    return gm_py_finish(gm_torch_abi_init());
}

static PyMethodDef core_methods[] = {
    GM_CORE_METHOD(grad_put, FASTCALL, "(param, address, dtype, stream)"),
    GM_CORE_METHOD(part, FASTCALL, "(param) -> (first, n), the elements in this rank's shard"),
    GM_CORE_METHOD(has_grad, FASTCALL, "(param) -> bool"),
    GM_CORE_METHOD(lease, FASTCALL, "(param) -> lease"),
    GM_CORE_METHOD(lease_pin, FASTCALL, "(lease, stream)"),
    GM_CORE_METHOD(lease_watch, FASTCALL, "(lease, stream)"),
    GM_CORE_METHOD(leased, NOARGS, "() -> parameters that tensors show"),
    GM_CORE_METHOD(grad_drop, FASTCALL, "(param)"),
    GM_CORE_METHOD(note_write, FASTCALL, "(param, stream)"),
    GM_CORE_METHOD(n_found, FASTCALL, "(param, stream) -> writes that comparison has found"),
    GM_CORE_METHOD(read, FASTCALL, "(param, field, host_address)"),
    GM_CORE_METHOD(write, FASTCALL, "(param, field, host_address, stream)"),
    GM_CORE_METHOD(fill, FASTCALL, "(param, field, first, n, dtype, host_address, stream)"),
    GM_CORE_METHOD(drain, FASTCALL, "()"),
    GM_CORE_METHOD(catch_up, FASTCALL, "()"),
    GM_CORE_METHOD(settle, FASTCALL, "()"),
    GM_CORE_METHOD(issue, FASTCALL, "(stream)"),
    GM_CORE_METHOD(sums, NOARGS, "() -> bytes of (params,) uint64"),
    GM_CORE_METHOD(limit_unreduced, FASTCALL, "(bytes)"),
    GM_CORE_METHOD(address, FASTCALL, "(param) -> int"),
    GM_CORE_METHOD(chunk, FASTCALL,
                   "(param) -> (id, bytes while it is used, beside them while it is gathered, of "
                   "its gradients that wait, all in all while an opaque update runs)"),
    GM_CORE_METHOD(plan_info, NOARGS, "() -> dict or None"),
    GM_CORE_METHOD(chunk_states, NOARGS, "() -> list of dicts"),
    GM_CORE_METHOD(timeline_begin, FASTCALL, "(capacity)"),
    GM_CORE_METHOD(timeline_end, NOARGS, "() -> list of dicts"),
    GM_CORE_METHOD(tell_host_rate, O, "(rate)"),
    GM_CORE_METHOD(salvage, NOARGS, "() -> the error that has closed the engine, or None"),
    GM_CORE_METHOD(check, FASTCALL, "(): raises if an invariant is broken"),
    GM_CORE_METHOD(close, NOARGS, "(): idempotent"),
    {NULL, NULL, 0, NULL},
};

static PyMethodDef module_methods[] = {
    GM_PY_METHOD("parts", parts_of, METH_VARARGS,
                 "parts(params, chunk_bytes, n_shards) -> (first, n) in each shard, of each"),
    GM_PY_METHOD("chunk_search", gm_py_chunk_search, METH_VARARGS,
                 "chunk_search(params, min_bytes, range_bytes, n_grids) -> chunk bytes"),
    GM_PY_METHOD("torch_abi_init", torch_abi_init, METH_NOARGS,
                 "registers gemini::blob; torch must be loaded"),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot core_parts[] = {
    {Py_tp_new, (void *)core_new},
    {Py_tp_dealloc, (void *)core_dealloc},
    {Py_tp_methods, core_methods},
    {Py_tp_doc, "One engine of the C core; see csrc/engine.h."},
    {0, NULL},
};

static int add_methods(PyMethodDef *methods)
{
    PyObject *type = (PyObject *)gm_py_core_type;
    int result = 0;
    for (; methods->ml_name && result == 0; methods++) {
        PyObject *method = PyDescr_NewMethod(gm_py_core_type, methods);
        result = method ? PyObject_SetAttrString(type, methods->ml_name, method) : -1;
        Py_XDECREF(method);
    }
    return result;
}

int gm_py_engine_init(PyObject *module)
{
    gm_py_core_type =
        gm_py_add_type(module, "gemini_strategy._C.Core", sizeof(core), 0, core_parts);
    if (!gm_py_core_type || add_methods(gm_py_step_methods) < 0 ||
        add_methods(gm_py_save_methods) < 0 || add_methods(gm_py_room_methods) < 0 ||
        add_methods(gm_py_paper_methods) < 0 || add_methods(gm_py_opaque_methods) < 0 ||
        gm_py_paper_init(module) < 0 || PyModule_AddFunctions(module, module_methods) < 0) {
        return -1;
    }
    return PyModule_AddIntConstant(module, "HOST_GRANULARITY", (long)gm_device_host_granularity());
}
