/* cuda_impl.h - what the files of device_cuda share: the device's struct, its context, and the
 * operations that the table in cuda.c names.  Included only where GM_WITH_CUDA is set. */
#pragma once

#include "device/cuda/driver.h"
#include "device/cuda/kernels.h"
#include "device/ops.h"

#define CHECK(call) gm_cuda_check((call), #call)

typedef struct cuda_range cuda_range;

typedef struct cuda_device {
    gm_device base; /* first: a gm_device * is a cuda_device * */
    const gm_cuda_api *api;
    int ordinal;
    CUdevice device;
    CUcontext context;
    CUmemAllocationProp allocation;
    CUmemAccessDesc access;
    gm_kernels *kernels;
    CUstream stream;           /* for the fill of the poison block only */
    gm_block poison;           /* 0 until first needed */
    uintptr_t poison_view;     /* where the fill writes */
    cuda_range *ranges;        /* sorted by addr */
    size_t n_ranges, capacity; /* of ranges[] */
    bool has_host_calls;       /* some may be outstanding when the device goes */
} cuda_device;

static inline cuda_device *gm_cuda_self(gm_device *dev)
{
    return (cuda_device *)dev;
}

static inline CUstream gm_cuda_stream(gm_stream stream)
{
    return (CUstream)(uintptr_t)stream;
}

static inline CUevent gm_cuda_event(gm_event event)
{
    return (CUevent)(uintptr_t)event;
}

/* Makes the device's context current on this thread; gm_cuda_leave undoes what was done. */
gm_status gm_cuda_enter(cuda_device *d, bool *is_pushed);
void gm_cuda_leave(cuda_device *d, bool is_pushed);

/* Evaluates a gm_status expression about `d`, which is gm_cuda_self(dev), in the device's context,
 * and returns it from the function. */
#define IN_CONTEXT(dev, expression)                  \
    do {                                             \
        cuda_device *d = gm_cuda_self(dev);          \
        bool is_pushed_;                             \
        GM_TRY(gm_cuda_enter(d, &is_pushed_));       \
        gm_status in_context_status_ = (expression); \
        gm_cuda_leave(d, is_pushed_);                \
        return in_context_status_;                   \
    } while (0)
/* Runs a statement about `d` that frees something in the device's context. */
#define FREE_IN_CONTEXT(dev, statement)               \
    do {                                              \
        cuda_device *d = gm_cuda_self(dev);           \
        bool is_pushed_;                              \
        if (gm_cuda_enter(d, &is_pushed_) == GM_OK) { \
            statement;                                \
            gm_cuda_leave(d, is_pushed_);             \
        }                                             \
    } while (0)

/* ---- stream.c ---- */
GM_DEVICE_SYNC(GM_DEVICE_DECLARED, gm_cuda)
GM_DEVICE_WORK(GM_DEVICE_DECLARED, gm_cuda)
