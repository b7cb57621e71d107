/* module.c - the extension module gemini_strategy._C: its parts and constants.  Types and functions
 * live in the other files. */
#include "binding/common.h"

#include "binding/comm.h"
#include "binding/core.h"
#include "binding/unit.h"

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

static int add_enumerations(PyObject *module)
{
    static const char *const formats[] = {
        [GM_F32] = "float32", [GM_BF16] = "bfloat16", [GM_F16] = "float16"};
    static const char *const policies[] = {
        [GM_POLICY_AUTO] = "auto", [GM_POLICY_CPU] = "cpu", [GM_POLICY_CUDA] = "cuda"};
    static const char *const fields[] = {[GM_FIELD_WEIGHT] = "weight", [GM_FIELD_MASTER] = "master",
                                         [GM_FIELD_M] = "exp_avg",     [GM_FIELD_V] = "exp_avg_sq",
                                         [GM_FIELD_GRAD] = "gradient", [GM_FIELD_LOW] = "low"};
    return gm_py_add_numbers(module, "FORMATS", formats, GM_PY_N(formats)) < 0 ||
                   gm_py_add_numbers(module, "POLICIES", policies, GM_PY_N(policies)) < 0 ||
                   gm_py_add_numbers(module, "FIELDS", fields, GM_PY_N(fields)) < 0
               ? -1
               : 0;
}

static int module_exec(PyObject *module)
{
    if (gm_py_errors_init() < 0 || PyModule_AddFunctions(module, gm_py_arith_methods) < 0 ||
        gm_py_rates_init(module) < 0 || PyModule_AddFunctions(module, gm_py_host_methods) < 0 ||
        PyModule_AddFunctions(module, gm_py_signal_methods) < 0 || gm_py_engine_init(module) < 0 ||
        PyModule_AddFunctions(module, gm_py_gate_methods) < 0 || gm_py_slot_init(module) < 0 ||
        PyModule_AddFunctions(module, gm_py_grad_methods) < 0 ||
        PyModule_AddFunctions(module, gm_py_call_methods) < 0 ||
        PyModule_AddFunctions(module, gm_py_error_methods) < 0 || gm_py_unit_init(module) < 0 ||
        gm_py_call_init(module) < 0 || gm_py_handle_init(module) < 0 ||
        gm_py_net_init(module) < 0 || gm_py_comm_init(module) < 0 || add_enumerations(module) < 0) {
        return -1;
    }
    for (size_t i = 0; i < GM_PY_N(built_with); i++) {
        if (PyModule_AddIntConstant(module, built_with[i].name, built_with[i].value) < 0) {
            return -1;
        }
    }
    return 0;
}

static PyModuleDef_Slot module_parts[] = {
    {Py_mod_exec, (void *)module_exec},
    {0, NULL},
};

static struct PyModuleDef module_def = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "gemini_strategy._C",
    .m_doc = "The C core of gemini_strategy.",
    .m_size = 0,
    .m_slots = module_parts,
};

PyMODINIT_FUNC PyInit__C(void)
{
    return PyModuleDef_Init(&module_def);
}
