/* fake_nccl.c - plays NCCL, and the few functions of the driver that comm/nccl.c depends on, as a test wishes: one
 * shared object under both names, whose state the test finds as gm_fake_state. */
#include "fake_nccl.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "device/cuda/driver.h"

#define HANDLE        ((void *)32)
#define IS_LIVE(comm) ((comm) == HANDLE && fake->n_live == 1)

gm_fake gm_fake_state = {.version = 22800, .is_device_done = 1};
static gm_fake *const fake = &gm_fake_state;
static _Thread_local int depth; /* of pushed contexts */

CUresult cuEventQuery(CUevent event)
{
    CHECK(event && fake->n_waiting == 0); /* with the driver's lock */
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

CUresult cuMemHostAlloc(void **out, size_t bytes, unsigned flags)
{
    static void *last[64]; /* what is kept on purpose is no leak */
    static atomic_size_t n;
    CHECK(depth > 0 && flags == 0);
    if (fake->has_no_room) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = malloc(bytes);
    __atomic_store_n(&last[n++ % 64], *out, __ATOMIC_RELAXED);
    fake->n_buffers++;
    return CUDA_SUCCESS;
}

CUresult cuMemFreeHost(void *data)
{
    free(data);
    fake->n_buffers--;
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
    if (fake->is_full) {
        for (fake->n_waiting++; fake->is_full;) {
            sched_yield();
        }
        fake->n_waiting--;
    }
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
    atomic_store(&fake->is_full, false);
    pthread_mutex_unlock(&later_lock);
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
    *out = HANDLE;
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
    gm_fake_finish(); /* its kernels return */
    fake->n_live--;
    fake->n_aborted++;
    return 0;
}

int ncclCommGetAsyncError(void *comm, int *out);
int ncclCommGetAsyncError(void *comm, int *out)
{
    CHECK(IS_LIVE(comm));
    *out = fake->polls > 0 ? 7 : atomic_load(&fake->async_error);
    fake->polls -= fake->polls > 0;
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

static int collective(const void *src, void *dst, size_t count, int dtype, int op, void *comm)
{
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
WITH_OP(ncclAllReduce)
