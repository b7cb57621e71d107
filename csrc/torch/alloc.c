/* alloc.c - cuMemAlloc and cuMemFree in the primary context, counted, behind a question to the
 * engine.
 *
 * Invariants
 *   1. held_bytes of a device is the sum of the sizes of what gm_torch_alloc gave, or is about to
 *      give after the engine agreed, and gm_torch_free has not yet taken back; the caller names the
 *      same size at both.
 *   2. The reserve function runs under the device's lock for reading, and is replaced under the
 *      lock for writing: after gm_torch_alloc_set_reserve() the old function is not running.
 *   3. The primary context is retained at first use and never released: torch may free memory until
 *      the process ends. */
#define _POSIX_C_SOURCE 200809L

#include "torch/alloc.h"

#include <pthread.h>
#include <stdatomic.h>

#define MAX_DEVICES 64

static struct torch_device {
    pthread_rwlock_t lock; /* of reserve and context */
    gm_torch_reserve_fn reserve;
    void *context;
    atomic_size_t held_bytes, peak_bytes, n_refusals;
} devices[MAX_DEVICES];

static pthread_once_t init_once = PTHREAD_ONCE_INIT;

static void init(void)
{
    for (size_t i = 0; i < MAX_DEVICES; i++) {
        pthread_rwlock_init(&devices[i].lock, NULL);
    }
}

static struct torch_device *find(int device)
{
    if (device < 0 || device >= MAX_DEVICES) {
        return NULL;
    }
    pthread_once(&init_once, init);
    return &devices[device];
}

void gm_torch_alloc_set_reserve(int device, gm_torch_reserve_fn fn, void *context)
{
    struct torch_device *d = find(device);
    if (!d) {
        return;
    }
    pthread_rwlock_wrlock(&d->lock);
    d->reserve = fn;
    d->context = context;
    pthread_rwlock_unlock(&d->lock);
}

size_t gm_torch_alloc_bytes(int device)
{
    struct torch_device *d = find(device);
    return d ? atomic_load(&d->held_bytes) : 0;
}

size_t gm_torch_alloc_peak_bytes(int device, bool reset)
{
    struct torch_device *d = find(device);
    if (!d) {
        return 0;
    }
    return reset ? atomic_exchange(&d->peak_bytes, atomic_load(&d->held_bytes))
                 : atomic_load(&d->peak_bytes);
}

size_t gm_torch_alloc_refusals(int device)
{
    struct torch_device *d = find(device);
    return d ? atomic_load(&d->n_refusals) : 0;
}

#ifdef GM_WITH_CUDA

#include "device/cuda/driver.h"

static pthread_mutex_t retain_lock = PTHREAD_MUTEX_INITIALIZER;
static CUcontext primary[MAX_DEVICES]; /* under retain_lock */

static bool retain(const gm_cuda_api *api, int device, CUcontext *out)
{
    CUdevice handle;
    pthread_mutex_lock(&retain_lock);
    if (!primary[device] && api->cuDeviceGet(&handle, device) == CUDA_SUCCESS &&
        api->cuDevicePrimaryCtxRetain(&primary[device], handle) != CUDA_SUCCESS) {
        primary[device] = NULL;
    }
    *out = primary[device];
    pthread_mutex_unlock(&retain_lock);
    return *out != NULL;
}

static bool enter(int device, const gm_cuda_api **out)
{
    CUcontext context;
    return gm_cuda(out) == GM_OK && retain(*out, device, &context) &&
           (*out)->cuCtxPushCurrent(context) == CUDA_SUCCESS;
}

static void leave(const gm_cuda_api *api)
{
    CUcontext popped;
    (void)api->cuCtxPopCurrent(&popped);
}

static bool reserve(struct torch_device *d, size_t size, bool is_full)
{
    pthread_rwlock_rdlock(&d->lock);
    bool has_room = d->reserve ? d->reserve(d->context, size, is_full) : !is_full;
    pthread_rwlock_unlock(&d->lock);
    return has_room;
}

static void hold(struct torch_device *d, size_t size)
{
    size_t held = atomic_fetch_add(&d->held_bytes, size) + size;
    size_t peak = atomic_load(&d->peak_bytes);
    while (held > peak && !atomic_compare_exchange_weak(&d->peak_bytes, &peak, held)) {
    }
}

void *gm_torch_alloc(size_t size, int device, void *GM_UNUSED(stream))
{
    struct torch_device *d = find(device);
    const gm_cuda_api *api;
    CUdeviceptr address = 0;
    if (!d || size == 0 || !enter(device, &api)) {
        return NULL;
    }
    if (reserve(d, size, false)) {
        hold(d, size); /* before the slow call: from here on the engine counts it */
        CUresult result = api->cuMemAlloc(&address, size);
        if (result == CUDA_ERROR_OUT_OF_MEMORY && reserve(d, size, true)) {
            result = api->cuMemAlloc(&address, size);
        }
        if (result != CUDA_SUCCESS) {
            atomic_fetch_sub(&d->held_bytes, size);
            address = 0;
        }
    }
    atomic_fetch_add(&d->n_refusals, address == 0);
    leave(api);
    return (void *)(uintptr_t)address;
}

void gm_torch_free(void *ptr, size_t size, int device, void *GM_UNUSED(stream))
{
    struct torch_device *d = find(device);
    const gm_cuda_api *api;
    if (!d || !ptr || !enter(device, &api)) {
        return;
    }
    /* It can fail only where the process ends or the context is lost: the memory is gone either
     * way. */
    (void)api->cuMemFree((CUdeviceptr)(uintptr_t)ptr);
    atomic_fetch_sub(&d->held_bytes, size);
    leave(api);
}

#else

void *gm_torch_alloc(size_t GM_UNUSED(size), int GM_UNUSED(device), void *GM_UNUSED(stream))
{
    return NULL;
}

void gm_torch_free(void *GM_UNUSED(ptr), size_t GM_UNUSED(size), int GM_UNUSED(device),
                   void *GM_UNUSED(stream))
{
}

#endif
