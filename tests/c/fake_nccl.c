/* fake_nccl.c - plays NCCL, and the few functions of the driver that comm/nccl.c depends on, as a test wishes: one
 * shared object under both names, whose state the test finds as gm_fake_state. */
#define _GNU_SOURCE /* pthread_barrier_t */
#include "fake_nccl.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "device/cuda/driver.h"

#define HANDLE ((void *)32)
#define IS_LIVE(comm)                                                  \
    (fake->ranks ? rank_of(comm) >= 0 && rank_of(comm) < GM_FAKE_RANKS \
                 : (comm) == HANDLE && fake->n_live == 1)

gm_fake gm_fake_state = {.version = 22800, .is_device_done = 1};
static gm_fake *const fake = &gm_fake_state;
static _Thread_local int depth; /* of pushed contexts */

static int rank_of(const void *comm)
{
    return (int)(uintptr_t)comm - 1;
}

CUresult cuEventQuery(CUevent event)
{
    CHECK(event && !(fake->is_locked && fake->n_waiting > 0));
    return fake->driver_error     ? (CUresult)atomic_load(&fake->driver_error)
           : fake->is_device_done ? CUDA_SUCCESS
                                  : CUDA_ERROR_NOT_READY;
}

CUresult cuEventCreate(CUevent *out, unsigned flags)
{
    CHECK(flags == CU_EVENT_DISABLE_TIMING && depth > 0);
    *out = malloc(1);
    fake->n_events++;
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent event)
{
    free(event);
    fake->n_events--;
    return CUDA_SUCCESS;
}

/* Memory of the device is host memory, copies are over at once. */
CUresult cuMemAlloc(CUdeviceptr *out, size_t bytes)
{
    static void *last[4096]; /* what is kept on purpose is no leak */
    static atomic_size_t n;
    CHECK(depth > 0);
    if (fake->n_allocs > 0 && atomic_fetch_sub(&fake->n_allocs, 1) == 1) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    void *data = malloc(bytes);
    __atomic_store_n(&last[n++ % 4096], data, __ATOMIC_RELAXED);
    *out = (CUdeviceptr)(uintptr_t)data;
    fake->n_buffers++;
    return CUDA_SUCCESS;
}

CUresult cuMemFree(CUdeviceptr data)
{
    free((void *)(uintptr_t)data);
    fake->n_buffers--;
    return CUDA_SUCCESS;
}

CUresult cuMemHostAlloc(void **out, size_t bytes, unsigned flags)
{
    CHECK(depth > 0 && flags == 0);
    *out = malloc(bytes);
    fake->n_buffers++;
    return CUDA_SUCCESS;
}

CUresult cuMemFreeHost(void *data)
{
    free(data);
    fake->n_buffers--;
    return CUDA_SUCCESS;
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr dst, const void *src, size_t bytes, CUstream stream)
{
    (void)stream;
    fake->n_copies++;
    memcpy((void *)(uintptr_t)dst, src, bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoHAsync(void *dst, CUdeviceptr src, size_t bytes, CUstream stream)
{
    (void)stream;
    fake->n_copies++;
    memcpy(dst, (const void *)(uintptr_t)src, bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream)
{
    (void)stream;
    if (!fake->drops_copies) {
        memcpy((void *)(uintptr_t)dst, (const void *)(uintptr_t)src, bytes);
    }
    return CUDA_SUCCESS;
}

CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t bytes, CUstream stream)
{
    (void)stream;
    memset((void *)(uintptr_t)dst, value, bytes);
    return CUDA_SUCCESS;
}

static _Thread_local void *registered; /* the last */
static _Thread_local size_t registered_bytes;

CUresult cuMemHostRegister(void *at, size_t bytes, unsigned flags)
{
    CHECK(depth > 0 && at && bytes % 4096 == 0);
    CHECK(flags == (CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP));
    registered = at;
    registered_bytes = bytes;
    fake->n_opened++;
    return CUDA_SUCCESS;
}

CUresult cuMemHostUnregister(void *at)
{
    CHECK(at);
    fake->n_opened--;
    return CUDA_SUCCESS;
}

/* Pages have one address on the device, however often the host maps them: here where their owner, who registers them
 * first, has mapped them.  They are told by their last bytes, which no others share. */
CUresult cuMemHostGetDevicePointer(CUdeviceptr *out, void *at, unsigned flags)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static struct {
        uint64_t secret;
        void *at;
    } pages[256];
    static size_t n;
    uint64_t secret;
    size_t i = 0;
    CHECK(flags == 0 && at == registered);
    memcpy(&secret, (char *)at + registered_bytes - sizeof secret, sizeof secret);
    pthread_mutex_lock(&lock);
    while (i < n && pages[i].secret != secret) {
        i++;
    }
    CHECK(i < sizeof pages / sizeof *pages);
    if (i == n) {
        pages[n].secret = secret;
        pages[n++].at = at;
    }
    *out = (CUdeviceptr)(uintptr_t)pages[i].at;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

/* A stream that waits is a thread that waits: each rank is one. */
CUresult cuStreamBatchMemOp(CUstream stream, unsigned n, CUstreamBatchMemOpParams *ops,
                            unsigned flags)
{
    (void)stream;
    CHECK(flags == 0 && n <= 256);
    for (unsigned i = 0; i < n; i++) {
        uint32_t *at = (uint32_t *)(uintptr_t)ops[i].writeValue.address;
        uint32_t value = ops[i].writeValue.value;
        if (ops[i].operation == CU_STREAM_MEM_OP_WRITE_VALUE_32) {
            CHECK(ops[i].writeValue.flags == CU_STREAM_WRITE_VALUE_DEFAULT);
            __atomic_store_n(at, value, __ATOMIC_RELEASE);
            continue;
        }
        CHECK(ops[i].operation == CU_STREAM_MEM_OP_WAIT_VALUE_32);
        CHECK(ops[i].waitValue.flags == CU_STREAM_WAIT_VALUE_GEQ);
        fake->n_waiting++;
        while ((int32_t)(__atomic_load_n(at, __ATOMIC_ACQUIRE) - value) < 0) {
            sched_yield();
        }
        fake->n_waiting--;
    }
    return CUDA_SUCCESS;
}

/* A device that is not done writes later. */
static pthread_mutex_t later_lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    uint32_t *at;
    uint32_t value;
} later[64];
static size_t n_later;

CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr data, cuuint32_t value, unsigned flags)
{
    uint32_t *at = (uint32_t *)(uintptr_t)data;
    size_t i = 0;
    (void)stream;
    CHECK(flags == CU_STREAM_WRITE_VALUE_DEFAULT && depth > 0);
    pthread_mutex_lock(&later_lock);
    while (i < n_later && later[i].at != at) {
        i++;
    }
    CHECK(i < sizeof later / sizeof *later);
    if (fake->is_device_done) {
        __atomic_store_n(at, value, __ATOMIC_RELEASE);
    } else {
        later[i].at = at;
        later[i].value = value;
        n_later += i == n_later;
    }
    pthread_mutex_unlock(&later_lock);
    return CUDA_SUCCESS;
}

void gm_fake_finish(void)
{
    pthread_mutex_lock(&later_lock);
    for (size_t i = 0; i < n_later; i++) {
        __atomic_store_n(later[i].at, later[i].value, __ATOMIC_RELEASE);
    }
    n_later = 0;
    atomic_store(&fake->is_device_done, 1);
    pthread_mutex_unlock(&later_lock);
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr data)
{
    memcpy(out, &data, sizeof data);
    return CUDA_SUCCESS;
}

CUresult cuIpcOpenMemHandle(CUdeviceptr *out, CUipcMemHandle handle, unsigned flags)
{
    CHECK(flags == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    if (fake->n_openings > 0 && atomic_fetch_sub(&fake->n_openings, 1) == 1) {
        return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    }
    memcpy(out, &handle, sizeof *out);
    fake->n_opened++;
    return CUDA_SUCCESS;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr data)
{
    CHECK(data);
    fake->n_opened--;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device)
{
    CHECK(device == 0);
    *out = (CUcontext)fake;
    fake->n_contexts++;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device)
{
    CHECK(device == 0);
    fake->n_contexts--;
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context)
{
    CHECK(context == (CUcontext)fake);
    while (fake->kept_out == (unsigned long)pthread_self() && fake->n_waiting > 0) {
        sched_yield();
    }
    depth++;
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext *out)
{
    CHECK(depth-- > 0);
    *out = (CUcontext)fake;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **out)
{
    *out = error == CUDA_ERROR_ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "another";
    return CUDA_SUCCESS;
}

/* ---- NCCL, as its header of 2.28 has it ---- */

typedef struct nccl_id {
    char bytes[128];
} nccl_id;

typedef struct nccl_config {
    size_t size;
    unsigned magic, version;
    int blocking;
} nccl_config;

int ncclGetVersion(int *out);
int ncclGetVersion(int *out)
{
    *out = fake->version;
    return 0;
}

int ncclGetUniqueId(nccl_id *out);
int ncclGetUniqueId(nccl_id *out)
{
    memset(out, 7, sizeof *out);
    return 0;
}

int ncclCommInitRankConfig(void **out, int size, nccl_id id, int rank, const nccl_config *config);
int ncclCommInitRankConfig(void **out, int size, nccl_id id, int rank, const nccl_config *config)
{
    CHECK(config->size == 24 && config->magic == 0xcafebeef && config->version == 21400);
    CHECK(config->blocking == 0 && rank < size && id.bytes[0] == 7 && id.bytes[127] == 7);
    CHECK(depth > 0);
    *out = fake->ranks ? (void *)(uintptr_t)(rank + 1) : HANDLE;
    fake->n_live++;
    return 7;
}

int ncclCommFinalize(void *comm);
int ncclCommFinalize(void *comm)
{
    CHECK(IS_LIVE(comm));
    return 7;
}

int ncclCommDestroy(void *comm);
int ncclCommDestroy(void *comm)
{
    CHECK(IS_LIVE(comm));
    fake->n_live--;
    fake->n_destroyed++;
    return 0;
}

int ncclCommAbort(void *comm);
int ncclCommAbort(void *comm)
{
    CHECK(IS_LIVE(comm));
    if (!fake->ranks) {
        gm_fake_finish(); /* its kernels return */
    }
    fake->n_live--;
    fake->n_aborted++;
    return 0;
}

int ncclCommGetAsyncError(void *comm, int *out);
int ncclCommGetAsyncError(void *comm, int *out)
{
    CHECK(IS_LIVE(comm));
    *out = fake->polls > 0 ? 7 : atomic_load(&fake->async_error);
    if (!fake->ranks) {
        fake->polls -= fake->polls > 0;
    }
    return 0;
}

const char *ncclGetErrorString(int result);
const char *ncclGetErrorString(int result)
{
    return result == 6 ? "remote process exited" : "invalid argument";
}

const char *ncclGetLastError(void *comm);
const char *ncclGetLastError(void *comm)
{
    CHECK(!comm || IS_LIVE(comm));
    return "the details";
}

/* Ranks that are threads: shards of bytes, or the largest of words. */
static int meet(const void *src, void *dst, size_t count, int dtype, int op, void *comm)
{
    gm_fake_ranks *ranks = fake->ranks;
    int rank = rank_of(comm);
    uint64_t most[8] = {0};
    CHECK(depth > 0);
    ranks->src[rank] = src;
    pthread_barrier_wait(&ranks->meeting);
    for (int r = 0; r < GM_FAKE_RANKS; r++) {
        if (dtype == 1 && r != rank) {
            memcpy((char *)dst + (size_t)r * count, ranks->src[r], count);
        }
        for (size_t i = 0; dtype == 5 && op == 2 && i < count; i++) {
            uint64_t word = ((const uint64_t *)ranks->src[r])[i];
            CHECK(count <= 8);
            most[i] = word > most[i] ? word : most[i];
        }
    }
    pthread_barrier_wait(&ranks->meeting);
    if (dtype == 5) {
        memcpy(dst, most, count * sizeof *most);
    }
    fake->n_gathers += dtype == 1;
    return 0;
}

static int collective(const void *src, void *dst, size_t count, int dtype, int op, void *comm)
{
    if (fake->ranks) {
        return meet(src, dst, count, dtype, op, comm);
    }
    CHECK(IS_LIVE(comm) && depth > 0);
    fake->src = src;
    fake->dst = dst;
    fake->count = count;
    fake->dtype = dtype;
    fake->op = op;
    return fake->call_result;
}

int ncclAllGather(const void *src, void *dst, size_t count, int dtype, void *comm, void *stream);
int ncclAllGather(const void *src, void *dst, size_t count, int dtype, void *comm, void *stream)
{
    (void)stream;
    return collective(src, dst, count, dtype, 0, comm);
}

#define WITH_OP(name)                                                                 \
    int name(const void *src, void *dst, size_t count, int dtype, int op, void *comm, \
             void *stream);                                                           \
    int name(const void *src, void *dst, size_t count, int dtype, int op, void *comm, \
             void *stream)                                                            \
    {                                                                                 \
        (void)stream;                                                                 \
        return collective(src, dst, count, dtype, op, comm);                          \
    }
WITH_OP(ncclReduceScatter)

int ncclAllReduce(const void *src, void *dst, size_t count, int dtype, int op, void *comm,
                  void *stream);
int ncclAllReduce(const void *src, void *dst, size_t count, int dtype, int op, void *comm,
                  void *stream)
{
    (void)stream;
    if (!fake->ranks && dtype == 5 && op == 2 && count == 4) {
        uint64_t *words = dst;
        memcpy(fake->words, src, sizeof fake->words);
        for (int i = 0; i < 4 && fake->has_other; i++) {
            words[i] = words[i] > fake->other[i] ? words[i] : fake->other[i];
        }
    }
    return collective(src, dst, count, dtype, op, comm);
}
