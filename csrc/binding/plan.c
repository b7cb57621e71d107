/* plan.c - plans and timelines as plain Python dicts, for tables, charts and tests.
 *
 * Nothing here keeps a reference to what it reads. */
#include "binding/plan.h"

static const char *const class_names[GM_N_CLASSES] = {"R", "S1", "S2", "C1", "C2"};
static const char *const piece_names[GM_N_PIECES] = {"weight", "state", "grad", "gathered",
                                                     "unreduced"};
static const char *const tick_names[] = {"enter", "touch", "grad"}; /* of gm_tick_kind */

static PyObject *names_of(const gm_class *classes, uint32_t n_chunks)
{
    PyObject *list = PyList_New(0);
    for (uint32_t chunk = 0; list && chunk < n_chunks; chunk++) {
        list = gm_py_append(list, PyUnicode_FromString(class_names[classes[chunk]]));
    }
    return list;
}

/* {"R": value, ...} of a number for each class. */
static PyObject *by_class(const size_t *values)
{
    PyObject *dict = PyDict_New();
    int failed = !dict;
    for (int i = 0; !failed && i < GM_N_CLASSES; i++) {
        failed = gm_py_put(dict, class_names[i], PyLong_FromSize_t(values[i])) < 0;
    }
    return gm_py_unless(dict, failed);
}

/* What Python has of gm_plan_info under the same names. */
#define GM_PLAN_SECONDS(X)                                                                \
    X(step_seconds), X(compute_seconds), X(h2d_seconds), X(d2h_seconds), X(host_seconds), \
        X(bound_seconds), X(comm_seconds)
#define GM_PLAN_COUNTS(X)                                                                        \
    X(device_bytes), X(h2d_bytes), X(d2h_bytes), X(n_blocks), X(weight_ring_bytes),              \
        X(state_ring_bytes), X(grad_ring_bytes), X(resident_grad_bytes), X(gathered_ring_bytes), \
        X(kept_gathered_bytes), X(unreduced_ring_bytes), X(n_kept), X(n_speculated),             \
        X(spare_bytes), X(prefetch), X(n_ops), X(hash)

PyObject *gm_py_plan_info(const gm_plan_info *info, const gm_class *classes, uint32_t n_chunks)
{
#define ROW(name)         \
    {                     \
        #name, info->name \
    }
    const gm_py_figure doubles[] = {GM_PLAN_SECONDS(ROW),
                                    {"gather_rate", info->rates.gather},
                                    {"reduce_rate", info->rates.reduce}};
    const gm_py_count sizes[] = {GM_PLAN_COUNTS(ROW)};
#undef ROW
    size_t counts[GM_N_CLASSES], frozen[GM_N_CLASSES];
    for (int i = 0; i < GM_N_CLASSES; i++) {
        counts[i] = info->n_of_class[i];
        frozen[i] = info->n_frozen_of_class[i];
    }
    const char *when = info->when == GM_IMMEDIATE ? "immediate" : "deferred";
    PyObject *dict = PyDict_New();
    int failed =
        !dict || gm_py_put_figures(dict, doubles, GM_PY_N(doubles)) < 0 ||
        gm_py_put_counts(dict, sizes, GM_PY_N(sizes)) < 0 ||
        gm_py_put(dict, "n_of_class", by_class(counts)) < 0 ||
        gm_py_put(dict, "bytes_of_class", by_class(info->bytes_of_class)) < 0 ||
        gm_py_put(dict, "n_frozen_of_class", by_class(frozen)) < 0 ||
        gm_py_put(dict, "frozen_bytes_of_class", by_class(info->frozen_bytes_of_class)) < 0 ||
        gm_py_put(dict, "classes", names_of(classes, n_chunks)) < 0 ||
        gm_py_put(dict, "rates", gm_py_rates(&info->rates)) < 0 ||
        gm_py_put(dict, "when", PyUnicode_FromString(when)) < 0;
    return gm_py_unless(dict, failed);
}

/* {"weight": "CLEAN", "state": "HOME", ..., "uses", "trained", "gradients", "pending"}; pieces
 * without bytes are not in it. */
PyObject *gm_py_chunk(const gm_engine_chunk *chunk)
{
    const gm_py_count counts[] = {
        {"uses", chunk->n_uses}, {"trained", chunk->n_trained}, {"gradients", chunk->n_done}};
    PyObject *dict = PyDict_New();
    int failed = !dict || gm_py_put_counts(dict, counts, GM_PY_N(counts)) < 0 ||
                 gm_py_put(dict, "pending", PyBool_FromLong(chunk->is_pending)) < 0;
    for (int i = 0; !failed && i < GM_N_PIECES; i++) {
        const char *where = !chunk->is_resident[i] ? "HOME"
                            : chunk->is_dirty[i]   ? "DIRTY"
                                                   : "CLEAN";
        failed =
            chunk->bytes[i] > 0 && gm_py_put(dict, piece_names[i], PyUnicode_FromString(where)) < 0;
    }
    return gm_py_unless(dict, failed);
}

/* Bytes on the device: {"R": ..., "S1": ..., ..., "states", "grads", "gathered", "unreduced",
 * "outside", "free"}. */
static PyObject *memory_of(const gm_log_memory *memory)
{
    const gm_py_count sizes[] = {
        {"states", memory->states},     {"grads", memory->grads},
        {"gathered", memory->gathered}, {"unreduced", memory->unreduced},
        {"outside", memory->outside},   {"free", memory->free_blocks},
    };
    PyObject *dict = by_class(memory->weights);
    return gm_py_unless(dict, !dict || gm_py_put_counts(dict, sizes, GM_PY_N(sizes)) < 0);
}

/* Of a tick: kind, stream, tick, tick_kind, id, start, work, end, device (bytes by class), host
 * (bytes).  Of all else: kind, stream, tick, chunk, piece, bytes, start, end.  Seconds. */
static PyObject *entry_dict(const gm_log_entry *entry)
{
    const gm_py_figure times[] = {{"start", entry->start}, {"end", entry->end}};
    PyObject *dict = PyDict_New();
    int failed =
        !dict || gm_py_put(dict, "kind", PyUnicode_FromString(gm_log_kind_name(entry->kind))) < 0 ||
        gm_py_put(dict, "stream", PyUnicode_FromString(gm_log_stream_name(entry->stream))) < 0 ||
        gm_py_put(dict, "tick", PyLong_FromUnsignedLong(entry->tick)) < 0 ||
        gm_py_put_figures(dict, times, GM_PY_N(times)) < 0;
    if (!failed && entry->kind == GM_LOG_TICK) {
        failed =
            gm_py_put(dict, "tick_kind", PyUnicode_FromString(tick_names[entry->tick_kind])) < 0 ||
            gm_py_put(dict, "id", PyLong_FromUnsignedLong(entry->chunk)) < 0 ||
            gm_py_put(dict, "device", memory_of(&entry->memory)) < 0 ||
            gm_py_put(dict, "host", PyLong_FromSize_t(entry->memory.host)) < 0 ||
            gm_py_put(dict, "work", PyFloat_FromDouble(entry->work)) < 0;
    } else if (!failed) {
        failed = gm_py_put(dict, "chunk", PyLong_FromUnsignedLong(entry->chunk)) < 0 ||
                 gm_py_put(dict, "piece", PyUnicode_FromString(piece_names[entry->piece])) < 0 ||
                 gm_py_put(dict, "bytes", PyLong_FromSize_t(entry->bytes)) < 0;
    }
    return gm_py_unless(dict, failed);
}

/* When the log was full, its last element is {"kind": "lost", "n": entries that did not fit}. */
PyObject *gm_py_timeline(const gm_timeline *timeline)
{
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list && i < gm_timeline_n(timeline); i++) {
        list = gm_py_append(list, entry_dict(gm_timeline_entry(timeline, i)));
    }
    uint64_t n_lost = gm_timeline_n_dropped(timeline);
    return !list || n_lost == 0 ? list
                                : gm_py_append(list, Py_BuildValue("{s:s,s:K}", "kind", "lost", "n",
                                                                   (unsigned long long)n_lost));
}
