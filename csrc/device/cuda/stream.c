/* stream.c - streams, events, host calls, copies and kernels of the CUDA device: one driver call
 * each. */
#ifdef GM_WITH_CUDA

#include "device/cuda/cuda_impl.h"

/* ---- streams and events ---- */

static gm_status stream_new(cuda_device *d, gm_stream *out)
{
    CUstream stream = NULL;
    /* Non-blocking: torch's default stream is the legacy one, which would otherwise order
     * everything. */
    GM_TRY(CHECK(d->api->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING)));
    *out = (gm_stream)(uintptr_t)stream;
    return GM_OK;
}

gm_status gm_cuda_stream_new(gm_device *dev, gm_stream *out)
{
    *out = 0;
    IN_CONTEXT(dev, stream_new(d, out));
}

void gm_cuda_stream_free(gm_device *dev, gm_stream stream)
{
    if (stream != 0) {
        FREE_IN_CONTEXT(dev, (void)d->api->cuStreamDestroy(gm_cuda_stream(stream)));
    }
}

gm_status gm_cuda_stream_sync(gm_device *dev, gm_stream stream)
{
    IN_CONTEXT(dev, CHECK(d->api->cuStreamSynchronize(gm_cuda_stream(stream))));
}

static gm_status event_new(cuda_device *d, bool is_timed, gm_event *out)
{
    CUevent event = NULL;
    unsigned flags = is_timed ? CU_EVENT_DEFAULT : CU_EVENT_DISABLE_TIMING;
    GM_TRY(CHECK(d->api->cuEventCreate(&event, flags)));
    *out = (gm_event)(uintptr_t)event;
    return GM_OK;
}

gm_status gm_cuda_event_new(gm_device *dev, bool is_timed, gm_event *out)
{
    *out = 0;
    IN_CONTEXT(dev, event_new(d, is_timed, out));
}

void gm_cuda_event_free(gm_device *dev, gm_event event)
{
    if (event != 0) {
        FREE_IN_CONTEXT(dev, (void)d->api->cuEventDestroy(gm_cuda_event(event)));
    }
}

gm_status gm_cuda_event_record(gm_device *dev, gm_event event, gm_stream stream)
{
    IN_CONTEXT(dev, CHECK(d->api->cuEventRecord(gm_cuda_event(event), gm_cuda_stream(stream))));
}

gm_status gm_cuda_event_wait(gm_device *dev, gm_event event, gm_stream stream)
{
    IN_CONTEXT(dev, CHECK(d->api->cuStreamWaitEvent(gm_cuda_stream(stream), gm_cuda_event(event),
                                                    CU_EVENT_WAIT_DEFAULT)));
}

gm_status gm_cuda_event_sync(gm_device *dev, gm_event event)
{
    IN_CONTEXT(dev, CHECK(d->api->cuEventSynchronize(gm_cuda_event(event))));
}

static gm_status event_query(cuda_device *d, CUevent event, bool *out)
{
    CUresult result = d->api->cuEventQuery(event);
    *out = result == CUDA_SUCCESS;
    return result == CUDA_ERROR_NOT_READY ? GM_OK : gm_cuda_check(result, "cuEventQuery");
}

gm_status gm_cuda_event_query(gm_device *dev, gm_event event, bool *out)
{
    *out = false;
    IN_CONTEXT(dev, event_query(d, gm_cuda_event(event), out));
}

static gm_status event_elapsed(cuda_device *d, CUevent start, CUevent end, double *seconds)
{
    float milliseconds = 0;
    GM_TRY(CHECK(d->api->cuEventSynchronize(start)));
    GM_TRY(CHECK(d->api->cuEventSynchronize(end)));
    CUresult result = d->api->cuEventElapsedTime(&milliseconds, start, end);
    GM_FAIL_IF(result == CUDA_ERROR_INVALID_HANDLE, GM_ERR_ARG,
               "event_elapsed: an event was made without is_timed or was never recorded");
    GM_TRY(gm_cuda_check(result, "cuEventElapsedTime"));
    *seconds = 1e-3 * (double)milliseconds;
    return GM_OK;
}

gm_status gm_cuda_event_elapsed(gm_device *dev, gm_event start, gm_event end, double *seconds)
{
    *seconds = 0;
    IN_CONTEXT(dev, event_elapsed(d, gm_cuda_event(start), gm_cuda_event(end), seconds));
}

/* The driver's callback: on an H200 1.4 to 5 us to issue, however many calls are outstanding, and
 * 12 us from a stream to the host and back.  The driver drops a call whose stream has failed before
 * it, and says so at every later call. */
static gm_status host_call(cuda_device *d, void (*fn)(void *context), void *context,
                           CUstream stream)
{
    d->has_host_calls = true;
    return CHECK(d->api->cuLaunchHostFunc(stream, fn, context));
}

gm_status gm_cuda_host_call(gm_device *dev, void (*fn)(void *context), void *context,
                            gm_stream stream)
{
    IN_CONTEXT(dev, host_call(d, fn, context, gm_cuda_stream(stream)));
}

/* ---- copies ---- */

gm_status gm_cuda_copy_h2d(gm_device *dev, uintptr_t dst, const void *src, size_t bytes,
                           gm_stream s)
{
    if (bytes == 0) {
        return GM_OK;
    }
    IN_CONTEXT(dev,
               CHECK(d->api->cuMemcpyHtoDAsync((CUdeviceptr)dst, src, bytes, gm_cuda_stream(s))));
}

gm_status gm_cuda_copy_d2h(gm_device *dev, void *dst, uintptr_t src, size_t bytes, gm_stream s)
{
    if (bytes == 0) {
        return GM_OK;
    }
    IN_CONTEXT(dev,
               CHECK(d->api->cuMemcpyDtoHAsync(dst, (CUdeviceptr)src, bytes, gm_cuda_stream(s))));
}

gm_status gm_cuda_copy_d2d(gm_device *dev, uintptr_t dst, uintptr_t src, size_t bytes, gm_stream s)
{
    if (bytes == 0) {
        return GM_OK;
    }
    IN_CONTEXT(dev, CHECK(d->api->cuMemcpyDtoDAsync((CUdeviceptr)dst, (CUdeviceptr)src, bytes,
                                                    gm_cuda_stream(s))));
}

gm_status gm_cuda_fill(gm_device *dev, uintptr_t dst, uint8_t byte, size_t bytes, gm_stream s)
{
    if (bytes == 0) {
        return GM_OK;
    }
    IN_CONTEXT(dev,
               CHECK(d->api->cuMemsetD8Async((CUdeviceptr)dst, byte, bytes, gm_cuda_stream(s))));
}

/* ---- arithmetic ---- */

gm_status gm_cuda_adam(gm_device *dev, const gm_adam_args *args, gm_stream s)
{
    IN_CONTEXT(dev, gm_kernels_adam(d->kernels, args, gm_cuda_stream(s)));
}

gm_status gm_cuda_grad_add(gm_device *dev, const gm_grad_add_args *args, gm_sumsq *sum, gm_stream s)
{
    IN_CONTEXT(dev, gm_kernels_grad_add(d->kernels, args, sum, gm_cuda_stream(s)));
}

gm_status gm_cuda_sumsq(gm_device *dev, const void *data, gm_dtype dtype, size_t numel,
                        gm_sumsq *sum, gm_stream s)
{
    IN_CONTEXT(dev, gm_kernels_sumsq(d->kernels, data, dtype, numel, sum, gm_cuda_stream(s)));
}

gm_status gm_cuda_clip(gm_device *dev, const gm_clip_args *args, gm_stream s)
{
    IN_CONTEXT(dev, gm_kernels_clip(d->kernels, args, gm_cuda_stream(s)));
}

#endif
