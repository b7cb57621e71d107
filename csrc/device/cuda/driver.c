/* driver.c - looks up the CUDA driver's functions in libcuda.so.1, once.
 *
 * Invariants
 *   1. libcuda is opened at most once and never closed: function pointers stay valid for life.
 *   2. A failure is remembered and reported with the same words to every later caller.
 *   3. The symbol looked up is the one that cuda.h declares: cuda.h renames functions by macro
 *      (cuMemAlloc is cuMemAlloc_v2), so a name is expanded before it becomes a string. */
#ifdef GM_WITH_CUDA

#include "device/cuda/driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define EXPANDED_STRING(name) #name
#define SYMBOL(name)          EXPANDED_STRING(name)

static pthread_once_t load_once = PTHREAD_ONCE_INIT;
static gm_cuda_api api;
static bool is_loaded;
static char load_error[256];

/* ISO C has no conversion from object to function pointer; POSIX guarantees that the bits agree. */
static bool look_up(void *library, const char *symbol, void *function_out)
{
    void *address = dlsym(library, symbol);
    if (!address) {
        snprintf(load_error, sizeof load_error,
                 "CUDA: libcuda.so.1 has no %s; the driver is older than this build needs (12.0)",
                 symbol);
        return false;
    }
    memcpy(function_out, &address, sizeof address);
    return true;
}

static void load(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *reason = dlerror();
        snprintf(load_error, sizeof load_error, "CUDA: no driver on this machine (%s)",
                 reason ? reason : "libcuda.so.1 not found");
        return;
    }
#define X(name)                                               \
    if (!look_up(library, SYMBOL(name), (void *)&api.name)) { \
        return;                                               \
    }
    GM_CUDA_FUNCTIONS(X)
#undef X
    CUresult result = api.cuInit(0);
    if (result != CUDA_SUCCESS) {
        const char *name = NULL;
        if (api.cuGetErrorName(result, &name) != CUDA_SUCCESS || !name) {
            name = "unknown error";
        }
        snprintf(load_error, sizeof load_error, "CUDA: cuInit failed with %s (%d)", name,
                 (int)result);
        return;
    }
    is_loaded = true;
}

gm_status gm_cuda(const gm_cuda_api **out)
{
    *out = NULL;
    pthread_once(&load_once, load);
    GM_FAIL_IF(!is_loaded, GM_ERR_UNSUPPORTED, "%s", load_error);
    *out = &api;
    return GM_OK;
}

gm_status gm_cuda_check(CUresult result, const char *call)
{
    if (result == CUDA_SUCCESS) {
        return GM_OK;
    }
    /* `call` is the source text of the call: "api->cuMemCreate(&handle, ...)" */
    const char *arrow = strstr(call, "->");
    const char *name = arrow && arrow < call + strcspn(call, "(") ? arrow + 2 : call;
    int name_length = (int)strcspn(name, "(");
    const char *code = NULL, *words = NULL;
    if (is_loaded) {
        if (api.cuGetErrorName(result, &code) != CUDA_SUCCESS) {
            code = NULL;
        }
        if (api.cuGetErrorString(result, &words) != CUDA_SUCCESS) {
            words = NULL;
        }
    }
    gm_status status = result == CUDA_ERROR_OUT_OF_MEMORY ? GM_ERR_NOMEM : GM_ERR_DEVICE;
    return gm_fail(status, "%.*s: %s (%s)", name_length, name, code ? code : "unknown CUDA error",
                   words ? words : "no description");
}

#endif
