/* nccl_load.c - looks up NCCL's functions, once, in the copy that torch has loaded if there is one;
 * and what there is of NCCL in a build without CUDA. */
#include "comm/comm_impl.h"

#ifdef GM_WITH_CUDA

#include <dlfcn.h>
#include <string.h>

#include "comm/nccl_impl.h"

static pthread_mutex_t load_lock = PTHREAD_MUTEX_INITIALIZER;
static nccl_api api; /* under load_lock until is_loaded, then for life */
static bool is_loaded;

static gm_status look_up(void *library)
{
    nccl_api a = {0};
    const struct {
        const char *name;
        void *out;
    } symbols[] = {
        {"ncclGetVersion", (void *)&a.get_version},
        {"ncclGetUniqueId", (void *)&a.get_unique_id},
        {"ncclCommInitRankConfig", (void *)&a.init_rank},
        {"ncclCommFinalize", (void *)&a.finalize},
        {"ncclCommDestroy", (void *)&a.destroy},
        {"ncclCommAbort", (void *)&a.stop},
        {"ncclCommGetAsyncError", (void *)&a.async_error},
        {"ncclGetErrorString", (void *)&a.error_string},
        {"ncclGetLastError", (void *)&a.last_error},
        {"ncclAllGather", (void *)&a.all_gather},
        {"ncclReduceScatter", (void *)&a.reduce_scatter},
        {"ncclAllReduce", (void *)&a.all_reduce},
    };
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        void *address = dlsym(library, symbols[i].name);
        GM_FAIL_IF(!address, GM_ERR_UNSUPPORTED,
                   "NCCL: libnccl.so.2 has no %s; 2.18 or newer is needed", symbols[i].name);
        /* ISO C has no conversion from object to function pointer; POSIX guarantees that the bits
         * agree. */
        memcpy(symbols[i].out, &address, sizeof address);
    }
    nccl_result result = a.get_version(&a.version);
    GM_FAIL_IF(result != NCCL_SUCCESS || a.version < NCCL_OLDEST || a.version >= NCCL_TOO_NEW,
               GM_ERR_UNSUPPORTED, "NCCL: version code %d; this build knows 2.18 (%d) up to 2.99",
               a.version, NCCL_OLDEST);
    api = a;
    is_loaded = true;
    return GM_OK;
}

static gm_status load(const char *path)
{
    if (is_loaded) {
        return GM_OK;
    }
    /* Two copies in one process would each take device memory: torch's, wherever it came from, is
     * first. */
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (!library && path) {
        library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    }
    if (!library) {
        library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    }
    if (!library) {
        const char *reason = dlerror();
        return GM_FAIL(GM_ERR_UNSUPPORTED, "NCCL: none is loaded and none can be (%s)",
                       reason ? reason : "libnccl.so.2 not found");
    }
    gm_status status = look_up(library); /* the library stays open for life */
    if (status != GM_OK) {
        dlclose(library);
    }
    return status;
}

gm_status gm_nccl(const char *path, const nccl_api **out)
{
    *out = &api;
    pthread_mutex_lock(&load_lock);
    gm_status status = load(path);
    pthread_mutex_unlock(&load_lock);
    return status;
}

gm_status gm_comm_nccl_id(const char *path, uint8_t id[GM_COMM_ID_BYTES])
{
    const nccl_api *n;
    nccl_id made;
    GM_TRY(gm_nccl(path, &n));
    nccl_result result = n->get_unique_id(&made);
    GM_FAIL_IF(result != NCCL_SUCCESS, GM_ERR_DEVICE, "NCCL: no unique id: %s: %s",
               n->error_string(result), n->last_error(NULL));
    memcpy(id, made.bytes, sizeof made.bytes);
    return GM_OK;
}

#else

static gm_status not_built(void)
{
    return GM_FAIL(GM_ERR_UNSUPPORTED,
                   "NCCL: this build of gemini_strategy has no CUDA support; install a build made "
                   "with the CUDA toolkit, or use device=\"cpu\"");
}

gm_status gm_comm_nccl_id(const char *GM_UNUSED(path), uint8_t id[GM_COMM_ID_BYTES])
{
    (void)id;
    return not_built();
}

gm_status gm_comm_nccl_new(const char *GM_UNUSED(path), int GM_UNUSED(ordinal),
                           const uint8_t id[GM_COMM_ID_BYTES], int GM_UNUSED(rank),
                           int GM_UNUSED(size), double GM_UNUSED(timeout), gm_comm **out)
{
    (void)id;
    *out = NULL;
    return not_built();
}

#endif
