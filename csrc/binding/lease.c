/* lease.c - methods of Core about leases, which Python has as numbers. */
#include "binding/core.h"

PyObject *gm_py_lease(core *self, PyObject *const *args, Py_ssize_t n_args)
{
    unsigned long long v[1];
    gm_engine *engine = gm_py_engine_of(self);
    if (!engine || gm_py_parse_numbers("lease", args, n_args, 1, v) < 0) {
        return NULL;
    }
    gm_lease *lease = NULL;
    gm_status status;
    GM_WITHOUT_GIL(engine, status, gm_lease_new(engine, (uint32_t)v[0], &lease));
    return status == GM_OK ? PyLong_FromUnsignedLongLong((uintptr_t)lease) : gm_py_raise(status);
}

/* A call about a lease of this engine, on a stream. */
static PyObject *with_lease(core *self, const char *name, PyObject *const *args, Py_ssize_t n_args,
                            gm_status (*call)(gm_lease *lease, gm_stream stream))
{
    unsigned long long v[2];
    gm_engine *engine = gm_py_engine_of(self);
    if (!engine || gm_py_parse_numbers(name, args, n_args, 2, v) < 0) {
        return NULL;
    }
    gm_status status;
    GM_WITHOUT_GIL(engine, status, call((gm_lease *)(uintptr_t)v[0], v[1]));
    return gm_py_finish(status);
}

PyObject *gm_py_lease_pin(core *self, PyObject *const *args, Py_ssize_t n_args)
{
    return with_lease(self, "lease_pin", args, n_args, gm_lease_pin);
}

PyObject *gm_py_lease_watch(core *self, PyObject *const *args, Py_ssize_t n_args)
{
    return with_lease(self, "lease_watch", args, n_args, gm_lease_watch);
}

static gm_status unwatch(gm_lease *lease, gm_stream Py_UNUSED(stream))
{
    return gm_lease_unwatch(lease);
}

PyObject *gm_py_lease_unwatch(core *self, PyObject *const *args, Py_ssize_t n_args)
{
    return with_lease(self, "lease_unwatch", args, n_args, unwatch);
}
