/* driver.h - the CUDA driver functions that we use, looked up in libcuda.so.1 at first use.
 * Compiled only where the CUDA toolkit is present (GM_WITH_CUDA); nothing links against libcuda. */
#pragma once

#include <cuda.h>

#include "base/base.h"

/* clang-format off */
#define GM_CUDA_FUNCTIONS(X)                                                                     \
    X(cuInit) X(cuDriverGetVersion) X(cuGetErrorName) X(cuGetErrorString) X(cuDeviceGet)         \
    X(cuDeviceGetAttribute) X(cuDeviceGetName) X(cuDevicePrimaryCtxRetain)                       \
    X(cuDevicePrimaryCtxRelease) X(cuCtxPushCurrent) X(cuCtxPopCurrent) X(cuCtxGetCurrent)       \
    X(cuCtxSetCurrent) X(cuCtxGetDevice) X(cuMemGetInfo) X(cuMemAlloc) X(cuMemFree)              \
    X(cuMemAddressReserve) X(cuMemAddressFree) X(cuMemCreate) X(cuMemRelease) X(cuMemMap)        \
    X(cuMemUnmap) X(cuMemSetAccess) X(cuMemGetAllocationGranularity) X(cuMemHostRegister)        \
    X(cuMemHostUnregister) X(cuStreamCreate) X(cuStreamDestroy) X(cuStreamSynchronize)           \
    X(cuStreamWaitEvent) X(cuEventCreate) X(cuEventDestroy) X(cuEventRecord)                     \
    X(cuEventSynchronize) X(cuEventQuery) X(cuMemcpyHtoDAsync) X(cuMemcpyDtoHAsync)              \
    X(cuMemcpyDtoDAsync) X(cuMemsetD8Async) X(cuModuleLoadData) X(cuModuleUnload)                \
    X(cuModuleGetFunction) X(cuLaunchKernel) X(cuLaunchHostFunc) X(cuEventElapsedTime)           \
    X(cuMemHostAlloc) X(cuMemFreeHost) X(cuCtxSynchronize) X(cuStreamWriteValue32)
/* clang-format on */

typedef struct gm_cuda_api {
#define X(name) __typeof__(name) *name;
    GM_CUDA_FUNCTIONS(X)
#undef X
} gm_cuda_api;

/* Loads libcuda once (thread-safe) and calls cuInit.  GM_ERR_UNSUPPORTED names what is missing. */
gm_status gm_cuda(const gm_cuda_api **out);
/* Turns a CUresult into a status: "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY (out of memory)".
 * Out of memory gives GM_ERR_NOMEM, all else GM_ERR_DEVICE. */
gm_status gm_cuda_check(CUresult result, const char *call);
#define GM_CU(call) GM_TRY(gm_cuda_check((call), #call))
