/* cuda.c - gm_device on CUDA: the driver's virtual memory calls in the primary context of one
 * GPU (the one that torch uses), and the device's life.  Streams, events, host calls, copies and
 * kernels are in stream.c.
 *
 * Invariants
 *   1. Every operation runs in the primary context and leaves the thread's current context as it
 *      was found: calls come from the caller's thread and from autograd's.
 *   2. granule[] of a range mirrors the driver's page tables: a mapping occupies one FIRST granule
 *      and REST granules up to block_bytes, and is mapped and unmapped as a whole.
 *   3. A failed map leaves the whole span unmapped, never partly mapped.
 *   4. Poisoned ranges show one shared block, which is refilled with 0xff at each poison(): a stray
 *      write into an evicted range cannot turn poison into data for later readers. */
#include "device/device.h"

#ifdef GM_WITH_CUDA

#include <stdlib.h>
#include <string.h>

#include "device/cuda/cuda_impl.h"

enum { UNMAPPED = 0, FIRST = 1, REST = 2 };

struct cuda_range {
    uintptr_t addr;
    size_t bytes;
    uint8_t *granule; /* (bytes / granularity,) UNMAPPED, FIRST or REST */
};

/* ---- context ---- */

gm_status gm_cuda_enter(cuda_device *d, bool *is_pushed)
{
    CUcontext current = NULL;
    *is_pushed = false;
    /* torch has made our context current in nearly every thread: asking is cheaper than pushing */
    if (d->api->cuCtxGetCurrent(&current) == CUDA_SUCCESS && current == d->context) {
        return GM_OK;
    }
    GM_TRY(CHECK(d->api->cuCtxPushCurrent(d->context)));
    *is_pushed = true;
    return GM_OK;
}

void gm_cuda_leave(cuda_device *d, bool is_pushed)
{
    CUcontext popped;
    if (is_pushed) {
        (void)d->api->cuCtxPopCurrent(&popped);
    }
}

/* ---- address ranges and blocks ---- */

/* Index of the first range that begins after addr. */
static size_t upper_range(const cuda_device *d, uintptr_t addr)
{
    return gm_up_to(d->ranges, d->n_ranges, sizeof *d->ranges, addr);
}

/* The range that holds all of [addr, addr + n_blocks * block_bytes). */
static gm_status find_span(cuda_device *d, uintptr_t addr, size_t n_blocks, const char *what,
                           cuda_range **out)
{
    size_t i = upper_range(d, addr);
    size_t block_bytes = d->base.block_bytes;
    GM_FAIL_IF(i == 0 || addr - d->ranges[i - 1].addr >= d->ranges[i - 1].bytes, GM_ERR_ARG,
               "%s: address 0x%zx is in no range of cuda:%d", what, (size_t)addr, d->ordinal);
    cuda_range *range = &d->ranges[i - 1];
    size_t offset = addr - range->addr;
    GM_FAIL_IF(offset % d->base.granularity != 0, GM_ERR_ARG,
               "%s: address 0x%zx is not a multiple of %zu bytes", what, (size_t)addr,
               d->base.granularity);
    GM_FAIL_IF(n_blocks > (range->bytes - offset) / block_bytes, GM_ERR_ARG,
               "%s: %zu blocks of %zu bytes at offset %zu end after the range of %zu bytes", what,
               n_blocks, block_bytes, offset, range->bytes);
    *out = range;
    return GM_OK;
}

/* Unmaps every mapping in [first, last) granules; the span must not cut a mapping. */
static gm_status unmap_granules(cuda_device *d, cuda_range *range, size_t first, size_t last,
                                const char *what)
{
    size_t n_granules = range->bytes / d->base.granularity;
    size_t per_block = d->base.block_bytes / d->base.granularity;
    GM_FAIL_IF(first < last && (range->granule[first] == REST ||
                                (last < n_granules && range->granule[last] == REST)),
               GM_ERR_ARG,
               "%s: [%zu, %zu) of the range at 0x%zx cuts a mapped block of %zu bytes; blocks are "
               "mapped and unmapped as a whole",
               what, first * d->base.granularity, last * d->base.granularity, (size_t)range->addr,
               d->base.block_bytes);
    for (size_t i = first; i < last;) {
        if (range->granule[i] == UNMAPPED) {
            i++;
            continue;
        }
        CUdeviceptr at = (CUdeviceptr)(range->addr + i * d->base.granularity);
        GM_TRY(CHECK(d->api->cuMemUnmap(at, d->base.block_bytes)));
        memset(&range->granule[i], UNMAPPED, per_block);
        i += per_block;
    }
    return GM_OK;
}

/* blocks[i * stride] goes to slot i: stride 0 maps one block everywhere. */
static gm_status map_span(cuda_device *d, uintptr_t addr, const gm_block *blocks, size_t stride,
                          size_t n, const char *what)
{
    cuda_range *range = NULL;
    size_t block_bytes = d->base.block_bytes;
    size_t per_block = block_bytes / d->base.granularity;
    GM_TRY(find_span(d, addr, n, what, &range));
    for (size_t i = 0; i < n; i++) {
        GM_FAIL_IF(blocks[i * stride] == 0, GM_ERR_ARG, "%s: blocks[%zu] is 0, which is no block",
                   what, i);
    }
    if (n == 0) {
        return GM_OK;
    }
    size_t first = (addr - range->addr) / d->base.granularity;
    GM_TRY(unmap_granules(d, range, first, first + n * per_block, what));
    gm_status status = GM_OK;
    size_t mapped = 0;
    for (; mapped < n && status == GM_OK; mapped++) {
        CUdeviceptr at = (CUdeviceptr)(addr + mapped * block_bytes);
        CUmemGenericAllocationHandle block = blocks[mapped * stride];
        status = CHECK(d->api->cuMemMap(at, block_bytes, 0, block, 0));
        if (status != GM_OK) {
            break;
        }
        range->granule[first + mapped * per_block] = FIRST;
        memset(&range->granule[first + mapped * per_block + 1], REST, per_block - 1);
    }
    if (status == GM_OK) {
        status = CHECK(d->api->cuMemSetAccess((CUdeviceptr)addr, n * block_bytes, &d->access, 1));
    }
    if (status != GM_OK) {
        for (size_t i = 0; i < mapped; i++) {
            (void)d->api->cuMemUnmap((CUdeviceptr)(addr + i * block_bytes), block_bytes);
            memset(&range->granule[first + i * per_block], UNMAPPED, per_block);
        }
    }
    return status;
}

static gm_status add_range(cuda_device *d, uintptr_t addr, size_t bytes)
{
    GM_TRY(GM_GROW(d->ranges, d->n_ranges, d->capacity,
                   "HOST: no room for a table of %zu address ranges"));
    uint8_t *granule = calloc(bytes / d->base.granularity, 1);
    GM_FAIL_IF(!granule, GM_ERR_NOMEM, "HOST: no %zu bytes for the state of an address range",
               bytes / d->base.granularity);
    size_t at = upper_range(d, addr);
    memmove(&d->ranges[at + 1], &d->ranges[at], (d->n_ranges - at) * sizeof *d->ranges);
    d->ranges[at] = (cuda_range){.addr = addr, .bytes = bytes, .granule = granule};
    d->n_ranges++;
    return GM_OK;
}

static gm_status range_new(cuda_device *d, size_t bytes, uintptr_t *out)
{
    CUdeviceptr addr = 0;
    GM_TRY(CHECK(d->api->cuMemAddressReserve(&addr, bytes, d->base.granularity, 0, 0)));
    GM_TRY_ELSE(add_range(d, (uintptr_t)addr, bytes), (void)d->api->cuMemAddressFree(addr, bytes));
    *out = (uintptr_t)addr;
    return GM_OK;
}

static gm_status cuda_range_new(gm_device *dev, size_t bytes, uintptr_t *out)
{
    *out = 0;
    GM_FAIL_IF(bytes == 0 || bytes % dev->granularity != 0, GM_ERR_ARG,
               "range_new: %zu bytes is not a positive multiple of %zu", bytes, dev->granularity);
    IN_CONTEXT(dev, range_new(d, bytes, out));
}

static void range_free(cuda_device *d, uintptr_t addr)
{
    size_t i = upper_range(d, addr);
    if (i == 0 || d->ranges[i - 1].addr != addr) {
        return;
    }
    cuda_range *range = &d->ranges[i - 1];
    (void)unmap_granules(d, range, 0, range->bytes / d->base.granularity, "range_free");
    (void)d->api->cuMemAddressFree((CUdeviceptr)addr, range->bytes);
    free(range->granule);
    memmove(range, range + 1, (d->n_ranges - i) * sizeof *range);
    d->n_ranges--;
}

/* How many bytes it has the table knows. */
static void cuda_range_free(gm_device *dev, uintptr_t addr, size_t GM_UNUSED(bytes))
{
    FREE_IN_CONTEXT(dev, range_free(d, addr));
}

static gm_status block_new(cuda_device *d, gm_block *out)
{
    CUmemGenericAllocationHandle handle = 0;
    size_t bytes = d->base.block_bytes;
    CUresult result = d->api->cuMemCreate(&handle, bytes, &d->allocation, 0);
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
        size_t free_bytes = 0, total = 0;
        (void)d->api->cuMemGetInfo(&free_bytes, &total);
        return GM_FAIL(GM_ERR_NOMEM,
                       "DEVICE (cuda:%d): a block of %s does not fit, %s of %s are free; lower "
                       "device_budget or free memory on the device",
                       d->ordinal, gm_wanted(bytes).text, gm_there(free_bytes).text,
                       gm_there(total).text);
    }
    GM_TRY(gm_cuda_check(result, "cuMemCreate"));
    *out = handle;
    return GM_OK;
}

static gm_status cuda_block_new(gm_device *dev, gm_block *out)
{
    *out = 0;
    IN_CONTEXT(dev, block_new(d, out));
}

static void cuda_block_free(gm_device *dev, gm_block block)
{
    if (block != 0) {
        FREE_IN_CONTEXT(dev, (void)d->api->cuMemRelease(block));
    }
}

static gm_status cuda_map(gm_device *dev, uintptr_t addr, const gm_block *blocks, size_t n)
{
    IN_CONTEXT(dev, map_span(d, addr, blocks, 1, n, "map"));
}

static gm_status unmap_span(cuda_device *d, uintptr_t addr, size_t n_blocks)
{
    cuda_range *range = NULL;
    GM_TRY(find_span(d, addr, n_blocks, "unmap", &range));
    size_t first = (addr - range->addr) / d->base.granularity;
    size_t last = first + n_blocks * (d->base.block_bytes / d->base.granularity);
    return unmap_granules(d, range, first, last, "unmap");
}

static gm_status cuda_unmap(gm_device *dev, uintptr_t addr, size_t n_blocks)
{
    IN_CONTEXT(dev, unmap_span(d, addr, n_blocks));
}

static void drop_poison(cuda_device *d)
{
    if (d->poison_view != 0) {
        range_free(d, d->poison_view);
        d->poison_view = 0;
    }
    if (d->poison != 0) {
        (void)d->api->cuMemRelease(d->poison);
        d->poison = 0;
    }
}

static gm_status make_poison(cuda_device *d)
{
    gm_status status = GM_OK;
    GM_TRY_GOTO(status, fail, block_new(d, &d->poison));
    GM_TRY_GOTO(status, fail, range_new(d, d->base.block_bytes, &d->poison_view));
    GM_TRY_GOTO(status, fail, map_span(d, d->poison_view, &d->poison, 0, 1, "poison"));
    return GM_OK;
fail:
    drop_poison(d);
    return status;
}

static gm_status poison_span(cuda_device *d, uintptr_t addr, size_t n_blocks)
{
    if (d->poison == 0) {
        GM_TRY(make_poison(d));
    }
    GM_TRY(CHECK(d->api->cuMemsetD8Async((CUdeviceptr)d->poison_view, 0xff, d->base.block_bytes,
                                         d->stream)));
    GM_TRY(CHECK(d->api->cuStreamSynchronize(d->stream)));
    return map_span(d, addr, &d->poison, 0, n_blocks, "poison");
}

static gm_status cuda_poison(gm_device *dev, uintptr_t addr, size_t n_blocks)
{
    IN_CONTEXT(dev, poison_span(d, addr, n_blocks));
}

/* ---- host memory, figures ---- */

static gm_status pin(cuda_device *d, void *base, size_t bytes)
{
    CUresult result = d->api->cuMemHostRegister(base, bytes, CU_MEMHOSTREGISTER_PORTABLE);
    GM_FAIL_IF(result == CUDA_ERROR_OUT_OF_MEMORY, GM_ERR_NOMEM,
               "HOST: the driver cannot pin %s; lower host_budget, or raise the limit on locked "
               "memory (ulimit -l)",
               gm_wanted(bytes).text);
    return gm_cuda_check(result, "cuMemHostRegister");
}

static gm_status cuda_pin(gm_device *dev, void *base, size_t bytes)
{
    if (bytes == 0) {
        return GM_OK;
    }
    IN_CONTEXT(dev, pin(d, base, bytes));
}

static void cuda_unpin(gm_device *dev, void *base)
{
    if (base) {
        FREE_IN_CONTEXT(dev, (void)d->api->cuMemHostUnregister(base));
    }
}

static gm_status cuda_memory(gm_device *dev, size_t *free_bytes, size_t *total_bytes)
{
    IN_CONTEXT(dev, CHECK(d->api->cuMemGetInfo(free_bytes, total_bytes)));
}

/* ---- life ---- */

/* The context is entered.  Undoes whatever open_device did, as far as it got. */
static void close_device(cuda_device *d)
{
    drop_poison(d);
    gm_kernels_free(d->kernels);
    if (d->stream) {
        (void)d->api->cuStreamDestroy(d->stream);
    }
}

static void cuda_free(gm_device *dev)
{
    if (!dev) {
        return;
    }
    cuda_device *d = gm_cuda_self(dev);
    bool is_pushed;
    if (gm_cuda_enter(d, &is_pushed) == GM_OK) {
        if (d->has_host_calls) { /* they may use what the caller frees next */
            (void)d->api->cuCtxSynchronize();
        }
        close_device(d);
        gm_cuda_leave(d, is_pushed);
    }
    (void)d->api->cuDevicePrimaryCtxRelease(d->device);
    free(d->ranges);
    free(d);
}

static const gm_device_ops cuda_ops = {GM_DEVICE_OPS(cuda, cuda, gm_cuda, gm_cuda)};

static gm_status open_device(cuda_device *d, size_t block_bytes)
{
    size_t granularity = 0;
    GM_TRY(CHECK(d->api->cuMemGetAllocationGranularity(&granularity, &d->allocation,
                                                       CU_MEM_ALLOC_GRANULARITY_MINIMUM)));
    GM_FAIL_IF(block_bytes == 0 || block_bytes > SIZE_MAX - granularity, GM_ERR_ARG,
               "block_bytes is %zu; it must be positive and fit the device", block_bytes);
    d->base.granularity = granularity;
    d->base.block_bytes = gm_round_up(block_bytes, granularity);
    GM_TRY(CHECK(d->api->cuStreamCreate(&d->stream, CU_STREAM_NON_BLOCKING)));
    return gm_kernels_new(&d->kernels);
}

/* Its primary context is retained. */
static gm_status find_device(cuda_device *d, int ordinal)
{
    int has_virtual_memory = 0;
    GM_TRY(gm_cuda(&d->api));
    d->ordinal = ordinal;
    CUresult result = d->api->cuDeviceGet(&d->device, ordinal);
    GM_FAIL_IF(result == CUDA_ERROR_INVALID_DEVICE, GM_ERR_ARG,
               "device: there is no cuda:%d; see CUDA_VISIBLE_DEVICES", ordinal);
    GM_TRY(gm_cuda_check(result, "cuDeviceGet"));
    GM_TRY(CHECK(d->api->cuDeviceGetAttribute(
        &has_virtual_memory, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, d->device)));
    GM_FAIL_IF(!has_virtual_memory, GM_ERR_UNSUPPORTED,
               "cuda:%d: the driver offers no virtual memory management for this GPU", ordinal);
    d->allocation.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    d->allocation.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    d->allocation.location.id = ordinal;
    d->access.location = d->allocation.location;
    d->access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return CHECK(d->api->cuDevicePrimaryCtxRetain(&d->context, d->device));
}

gm_status gm_device_cuda_new(int ordinal, size_t block_bytes, gm_device **out)
{
    *out = NULL;
    cuda_device *d;
    GM_TRY(GM_NEW(d, "HOST: no %zu bytes for a device"));
    GM_TRY_ELSE(find_device(d, ordinal), free(d));
    d->base.ops = &cuda_ops;
    bool is_pushed;
    gm_status status = gm_cuda_enter(d, &is_pushed);
    if (status == GM_OK) {
        status = open_device(d, block_bytes);
        gm_cuda_leave(d, is_pushed);
    }
    GM_TRY_ELSE(status, cuda_free(&d->base));
    *out = &d->base;
    return GM_OK;
}

#else

gm_status gm_device_cuda_new(int ordinal, size_t GM_UNUSED(block_bytes), gm_device **out)
{
    *out = NULL;
    return GM_FAIL(GM_ERR_UNSUPPORTED,
                   "device cuda:%d: this build of gemini_strategy has no CUDA support; install a "
                   "build made with the CUDA toolkit, or use device=\"cpu\"",
                   ordinal);
}

#endif
