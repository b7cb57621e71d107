/* lease.c - methods of Core about leases, which Python has as numbers. */
#include "binding/core.h"

static PyObject *core_lease(core *self, PyObject *const *args, Py_ssize_t n_args)
{
    unsigned long long v[1];
    gm_lease *lease = NULL;
    gm_engine *engine = gm_py_begin(self, "lease", args, n_args, 1, v);
    if (!engine) {
        return NULL;
    }
    gm_status status;
    GM_WITHOUT_GIL(engine, status = gm_lease_new(engine, (uint32_t)v[0], &lease));
    return status == GM_OK ? PyLong_FromUnsignedLongLong((uintptr_t)lease) : gm_py_raise(status);
}

GM_PY_CALL_STATUS(lease_pin, 2, gm_lease_pin((gm_lease *)(uintptr_t)v[0], v[1]))
GM_PY_CALL_STATUS(lease_watch, 2, gm_lease_watch((gm_lease *)(uintptr_t)v[0], v[1]))
GM_PY_CALL_STATUS(lease_unwatch, 2, gm_lease_unwatch((gm_lease *)(uintptr_t)v[0]))

PyMethodDef gm_py_lease_methods[] = {
    GM_PY_METHOD("lease", core_lease, METH_FASTCALL, "lease(param) -> lease"),
    GM_PY_METHOD("lease_pin", core_lease_pin, METH_FASTCALL, "lease_pin(lease, stream)"),
    GM_PY_METHOD("lease_watch", core_lease_watch, METH_FASTCALL, "lease_watch(lease, stream)"),
    GM_PY_METHOD("lease_unwatch", core_lease_unwatch, METH_FASTCALL,
                 "lease_unwatch(lease, stream)"),
    {NULL, NULL, 0, NULL},
};
