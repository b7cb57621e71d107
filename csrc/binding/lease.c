/* lease.c - methods of Core about leases, which Python has as numbers. */
#include "binding/core.h"

static PyObject *number_of(const gm_lease *lease)
{
    return PyLong_FromUnsignedLongLong((uintptr_t)lease);
}

GM_PY_CALL_OUT(lease, 1, gm_lease *, number_of, gm_lease_new(engine, (uint32_t)v[0], &out))
GM_PY_CALL_STATUS(lease_pin, 2, gm_lease_pin((gm_lease *)(uintptr_t)v[0], v[1]))
GM_PY_CALL_STATUS(lease_watch, 2, gm_lease_watch((gm_lease *)(uintptr_t)v[0], v[1]))
GM_PY_CALL_STATUS(lease_unwatch, 2, gm_lease_unwatch((gm_lease *)(uintptr_t)v[0]))

PyMethodDef gm_py_lease_methods[] = {
    GM_CORE_METHOD(lease, FASTCALL, "(param) -> lease"),
    GM_CORE_METHOD(lease_pin, FASTCALL, "(lease, stream)"),
    GM_CORE_METHOD(lease_watch, FASTCALL, "(lease, stream)"),
    GM_CORE_METHOD(lease_unwatch, FASTCALL, "(lease, stream)"),
    {NULL, NULL, 0, NULL},
};
