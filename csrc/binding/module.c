/* module.c - the extension module gemini_strategy._C: slots, exceptions, constants, and the
 * translation of status codes.  Types and functions live in the other py_*.c files. */
#include "binding/common.h"

#include "binding/comm.h"
#include "binding/engine.h"
#include "binding/unit.h"
#include "base/workers.h"

static PyObject *gemini_error, *memory_error, *device_error;
static gm_workers *shared_workers;

PyObject *gm_py_raise(gm_status status)
{
    PyObject *type = PyExc_RuntimeError;
    switch (status) {
    case GM_OK: Py_RETURN_NONE; /* not reached: callers raise failures only */
    case GM_ERR_ARG: type = PyExc_ValueError; break;
    case GM_ERR_STATE: type = gemini_error; break;
    case GM_ERR_NOMEM: type = memory_error; break;
    case GM_ERR_DEVICE: type = device_error; break;
    case GM_ERR_UNSUPPORTED: type = PyExc_NotImplementedError; break;
    }
    PyErr_SetString(type, gm_last_error());
    return NULL;
}

gm_workers *gm_py_workers(void)
{
    if (!shared_workers) {
        gm_status status = gm_py_workers_new(0, &shared_workers);
        if (status != GM_OK) {
            gm_py_raise(status);
        }
    }
    return shared_workers;
}

/* The exceptions are classes of gemini_strategy.errors, so that they exist without this module. */
static int fetch_errors(void)
{
    PyObject *errors = PyImport_ImportModule("gemini_strategy.errors");
    if (!errors) {
        return -1;
    }
    gemini_error = PyObject_GetAttrString(errors, "GeminiError");
    memory_error = PyObject_GetAttrString(errors, "GeminiMemoryError");
    device_error = PyObject_GetAttrString(errors, "GeminiDeviceError");
    Py_DECREF(errors);
    return gemini_error && memory_error && device_error ? 0 : -1;
}

#ifdef GM_WITH_CUDA
#define HAS_CUDA 1
#else
#define HAS_CUDA 0
#endif
#ifdef GM_DEBUG
#define HAS_ASSERTIONS 1
#else
#define HAS_ASSERTIONS 0
#endif
#ifdef __SANITIZE_ADDRESS__
#define HAS_SANITIZER 1
#else
#define HAS_SANITIZER 0
#endif

/* How this build was made, for tests and reports. */
static const struct {
    const char *name;
    long value;
} built_with[] = {
    {"BUILT_WITH_CUDA", HAS_CUDA},
    {"BUILT_WITH_ASSERTIONS", HAS_ASSERTIONS},
    {"BUILT_WITH_SANITIZER", HAS_SANITIZER},
};

static int module_exec(PyObject *module)
{
    if (fetch_errors() < 0 || PyModule_AddFunctions(module, gm_py_arith_methods) < 0 ||
        PyModule_AddFunctions(module, gm_py_rates_methods) < 0 ||
        PyModule_AddFunctions(module, gm_py_host_methods) < 0 || gm_py_engine_init(module) < 0 ||
        gm_py_slot_init(module) < 0 || gm_py_unit_init(module) < 0 || gm_py_net_init(module) < 0 ||
        gm_py_comm_init(module) < 0) {
        return -1;
    }
    for (size_t i = 0; i < sizeof built_with / sizeof built_with[0]; i++) {
        if (PyModule_AddIntConstant(module, built_with[i].name, built_with[i].value) < 0) {
            return -1;
        }
    }
    return 0;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, (void *)module_exec},
    {0, NULL},
};

static struct PyModuleDef module_def = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "gemini_strategy._C",
    .m_doc = "The C core of gemini_strategy.",
    .m_size = 0,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__C(void)
{
    return PyModuleDef_Init(&module_def);
}
