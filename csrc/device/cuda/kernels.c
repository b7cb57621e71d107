/* kernels.c - loads the embedded kernels into the current context and launches them.
 *
 * Invariants
 *   1. Whatever a launch needs travels by value in its parameters, so that the caller's arguments
 *      (ranges included) may be reused at once, and no launch needs device memory of its own.
 *   2. The kernels trust their arguments: pointers, alignment and lengths are checked here.
 *   3. Alignment decides speed, never the result. */
#ifdef GM_WITH_CUDA

#include "device/cuda/kernels.h"

#include <stdio.h>
#include <stdlib.h>

#include "device/kernels/args.h"

#define N_DTYPES  3
#define MAX_TILES UINT32_C(0x7fffffff) /* the driver's limit on gridDim.x */

extern const unsigned char gm_fatbin[]; /* made at build time from the .cu files of csrc/kernels */

struct gm_kernels {
    const gm_cuda_api *api;
    CUmodule module;
    CUfunction adam[N_DTYPES][2]; /* by format; gradient in fp32 or in the format's dtype */
    CUfunction grad_add[N_DTYPES][N_DTYPES]; /* by dst, src */
    CUfunction grad_add_sumsq[N_DTYPES][N_DTYPES];
    CUfunction sumsq[N_DTYPES];
    CUfunction clip;
    uint32_t sumsq_blocks, grad_sum_blocks; /* as many as run at once */
};

enum { GRAD_F32 = 0, GRAD_SAME = 1 };

/* ---- life ---- */

static gm_status get_function(const gm_kernels *k, const char *name, CUfunction *out)
{
    return gm_cuda_check(k->api->cuModuleGetFunction(out, k->module, name), name);
}

static gm_status load(gm_kernels *k)
{
    static const struct {
        gm_dtype format;
        int grad;
        const char *name;
    } adam[] = {
        {GM_F32, GRAD_F32, "gm_adam_f32"},
        {GM_F32, GRAD_SAME, "gm_adam_f32"},
        {GM_BF16, GRAD_F32, "gm_adam_bf16_grad_f32"},
        {GM_BF16, GRAD_SAME, "gm_adam_bf16"},
        {GM_F16, GRAD_F32, "gm_adam_f16_grad_f32"},
        {GM_F16, GRAD_SAME, "gm_adam_f16"},
    };
    static const char *const dtypes[N_DTYPES] = {
        [GM_F32] = "f32", [GM_BF16] = "bf16", [GM_F16] = "f16"};
    CUdevice device;
    int n_multiprocessors = 0;
    char name[64];
    GM_TRY(gm_cuda(&k->api));
    GM_CU(k->api->cuCtxGetDevice(&device));
    GM_CU(k->api->cuDeviceGetAttribute(&n_multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
                                       device));
    CUresult result = k->api->cuModuleLoadData(&k->module, gm_fatbin);
    GM_FAIL_IF(result == CUDA_ERROR_NO_BINARY_FOR_GPU ||
                   result == CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
               GM_ERR_UNSUPPORTED,
               "CUDA: this build has no kernels for this GPU (compute capability 8.0 or later is "
               "needed), or the driver is older than the toolkit of the build");
    GM_TRY(gm_cuda_check(result, "cuModuleLoadData"));
    for (size_t i = 0; i < sizeof adam / sizeof *adam; i++) {
        GM_TRY(get_function(k, adam[i].name, &k->adam[adam[i].format][adam[i].grad]));
    }
    for (size_t dst = 0; dst < N_DTYPES; dst++) {
        for (size_t src = 0; src < N_DTYPES; src++) {
            (void)snprintf(name, sizeof name, "gm_grad_add_%s_%s", dtypes[dst], dtypes[src]);
            GM_TRY(get_function(k, name, &k->grad_add[dst][src]));
            (void)snprintf(name, sizeof name, "gm_grad_add_sumsq_%s_%s", dtypes[dst], dtypes[src]);
            GM_TRY(get_function(k, name, &k->grad_add_sumsq[dst][src]));
        }
        (void)snprintf(name, sizeof name, "gm_sumsq_%s", dtypes[dst]);
        GM_TRY(get_function(k, name, &k->sumsq[dst]));
    }
    GM_TRY(get_function(k, "gm_clip_norm", &k->clip));
    k->sumsq_blocks = GM_SUMSQ_BLOCKS_PER_SM * (uint32_t)n_multiprocessors;
    k->grad_sum_blocks = GM_GRAD_SUM_BLOCKS_PER_SM * (uint32_t)n_multiprocessors;
    return GM_OK;
}

gm_status gm_kernels_new(gm_kernels **out)
{
    *out = NULL;
    gm_kernels *k;
    GM_TRY(GM_NEW(k, "HOST: no %zu bytes for the table of kernels"));
    GM_TRY_ELSE(load(k), gm_kernels_free(k));
    *out = k;
    return GM_OK;
}

void gm_kernels_free(gm_kernels *kernels)
{
    if (!kernels) {
        return;
    }
    if (kernels->module) {
        (void)kernels->api->cuModuleUnload(kernels->module);
    }
    free(kernels);
}

/* ---- launches ---- */

static gm_status launch(const gm_kernels *k, CUfunction function, uint32_t n_blocks, void *batch,
                        CUstream stream)
{
    void *parameters[] = {batch};
    GM_CU(k->api->cuLaunchKernel(function, n_blocks, 1, 1, GM_BLOCK_THREADS, 1, 1, 0, stream,
                                 parameters, NULL));
    return GM_OK;
}

static bool is_dtype(gm_dtype dtype)
{
    return dtype == GM_F32 || dtype == GM_BF16 || dtype == GM_F16;
}

static gm_status check_pointer(const char *what, const void *pointer, size_t element_bytes)
{
    GM_FAIL_IF(!pointer || (uintptr_t)pointer % element_bytes != 0, GM_ERR_ARG,
               "%s: address %p is not that of elements of %zu bytes", what, pointer, element_bytes);
    return GM_OK;
}

/* Elements from the last point where eight elements are 16-byte aligned up to element `begin`. */
static int64_t misalignment(const void *array, size_t element_bytes, size_t begin)
{
    return (int64_t)(((uintptr_t)array / element_bytes + begin) % GM_THREAD_ELEMENTS);
}

/* element may be negative: unsigned arithmetic wraps to the right address. */
static bool is_aligned(const void *array, size_t element_bytes, int64_t element)
{
    return ((uintptr_t)array + (uintptr_t)element * element_bytes) % 16 == 0;
}

static uint32_t n_tiles(int64_t elements)
{
    return (uint32_t)((elements + GM_TILE_ELEMENTS - 1) / GM_TILE_ELEMENTS);
}

static size_t low_bytes(gm_dtype format)
{
    return format == GM_BF16 ? 2 : 4;
}

static gm_status check_adam(const gm_adam_args *a)
{
    GM_FAIL_IF(a->from, GM_ERR_ARG, "adam: out of place on the host alone");
    GM_FAIL_IF(!is_dtype(a->format), GM_ERR_ARG, "adam: weight format %d is not known",
               (int)a->format);
    GM_FAIL_IF(
        a->grad_dtype != GM_F32 && a->grad_dtype != a->format, GM_ERR_ARG,
        "adam: gradient dtype %d does not go with weight format %d; use the format's dtype or fp32",
        (int)a->grad_dtype, (int)a->format);
    GM_TRY(check_pointer("adam: weight", a->weight, gm_dtype_bytes(a->format)));
    if (a->format != GM_F32) {
        GM_TRY(check_pointer("adam: low", a->low, low_bytes(a->format)));
    }
    GM_TRY(check_pointer("adam: m", a->m, 4));
    GM_TRY(check_pointer("adam: v", a->v, 4));
    GM_TRY(check_pointer("adam: grad", a->grad, gm_dtype_bytes(a->grad_dtype)));
    for (size_t i = 0; i < a->n_ranges; i++) {
        const gm_adam_range *range = &a->ranges[i];
        GM_FAIL_IF(range->begin > range->end || range->end > (size_t)INT64_MAX / 8, GM_ERR_ARG,
                   "adam: range %zu is [%zu, %zu), which is no range", i, range->begin, range->end);
        GM_FAIL_IF((range->end - range->begin) / GM_TILE_ELEMENTS >= MAX_TILES - 1, GM_ERR_ARG,
                   "adam: range %zu has %zu elements; split it", i, range->end - range->begin);
    }
    return GM_OK;
}

static gm_adam_piece make_piece(const gm_adam_args *a, const gm_adam_range *range)
{
    size_t weight_bytes = gm_dtype_bytes(a->format);
    int64_t origin = (int64_t)range->begin - misalignment(a->weight, weight_bytes, range->begin);
    bool aligned = is_aligned(a->weight, weight_bytes, origin) && is_aligned(a->m, 4, origin) &&
                   is_aligned(a->v, 4, origin) &&
                   is_aligned(a->grad, gm_dtype_bytes(a->grad_dtype), origin) &&
                   (a->format == GM_F32 || is_aligned(a->low, low_bytes(a->format), origin));
    return (gm_adam_piece){.origin = origin,
                           .begin = (int64_t)range->begin,
                           .end = (int64_t)range->end,
                           .is_aligned = aligned,
                           .scalars = range->scalars};
}

static gm_status launch_adam(gm_kernels *k, const gm_adam_args *a, gm_adam_batch *batch,
                             CUstream stream)
{
    if (batch->n_tiles == 0) {
        return GM_OK;
    }
    CUfunction function = k->adam[a->format][a->grad_dtype == GM_F32 ? GRAD_F32 : GRAD_SAME];
    GM_TRY(launch(k, function, batch->n_tiles, batch, stream));
    batch->n_pieces = batch->n_tiles = 0;
    return GM_OK;
}

gm_status gm_kernels_adam(gm_kernels *k, const gm_adam_args *args, CUstream stream)
{
    _Static_assert(sizeof(gm_adam_batch) <= 4096, "kernel parameters");
    if (args->n_ranges == 0) {
        return GM_OK;
    }
    GM_TRY(check_adam(args));
    gm_adam_batch batch = {.weight = args->weight,
                           .low = args->low,
                           .m = args->m,
                           .v = args->v,
                           .grad = args->grad,
                           .grad_scale = args->grad_scale};
    for (size_t i = 0; i < args->n_ranges; i++) {
        if (args->ranges[i].begin == args->ranges[i].end) {
            continue;
        }
        gm_adam_piece piece = make_piece(args, &args->ranges[i]);
        uint32_t tiles = n_tiles(piece.end - piece.origin);
        if (batch.n_pieces == GM_ADAM_PIECES || batch.n_tiles > MAX_TILES - tiles) {
            GM_TRY(launch_adam(k, args, &batch, stream));
        }
        piece.first_tile = batch.n_tiles;
        batch.piece[batch.n_pieces++] = piece;
        batch.n_tiles += tiles;
    }
    return launch_adam(k, args, &batch, stream);
}

static gm_status check_sum(const char *what, const gm_sumsq *sum)
{
    GM_FAIL_IF(!sum || (uintptr_t)sum % 16 != 0, GM_ERR_ARG,
               "%s: the sum is at %p, which is not 16-byte aligned", what, (const void *)sum);
    return GM_OK;
}

static gm_status launch_grad_sum(gm_kernels *k, const gm_grad_add_args *args,
                                 const gm_grad_add_batch *add, gm_sumsq *sum, CUstream stream)
{
    _Static_assert(sizeof(gm_grad_sum_batch) <= 4096, "kernel parameters");
    int64_t elements = add->numel - add->origin;
    gm_grad_sum_batch batch = {.add = *add,
                               .n_tiles = (uint32_t)((elements + GM_GRAD_SUM_TILE_ELEMENTS - 1) /
                                                     GM_GRAD_SUM_TILE_ELEMENTS),
                               .sum = sum};
    uint32_t n_blocks = batch.n_tiles < k->grad_sum_blocks ? batch.n_tiles : k->grad_sum_blocks;
    if (n_blocks != 1) { /* one block overwrites; several (or none) need zeros */
        GM_CU(k->api->cuMemsetD8Async((CUdeviceptr)(uintptr_t)sum, 0, sizeof *sum, stream));
    }
    if (n_blocks == 0) {
        return GM_OK;
    }
    return launch(k, k->grad_add_sumsq[args->dst_dtype][args->src_dtype], n_blocks, &batch, stream);
}

gm_status gm_kernels_grad_add(gm_kernels *k, const gm_grad_add_args *args, gm_sumsq *sum,
                              CUstream stream)
{
    _Static_assert(sizeof(gm_grad_add_batch) <= 4096, "kernel parameters");
    GM_FAIL_IF(!is_dtype(args->dst_dtype) || !is_dtype(args->src_dtype), GM_ERR_ARG,
               "grad_add: dtypes %d and %d: one is not known", (int)args->dst_dtype,
               (int)args->src_dtype);
    if (sum) {
        GM_TRY(check_sum("grad_add", sum));
    }
    if (args->numel == 0) {
        const gm_grad_add_batch nothing = {.divisor = 1};
        return sum ? launch_grad_sum(k, args, &nothing, sum, stream) : GM_OK;
    }
    size_t dst_bytes = gm_dtype_bytes(args->dst_dtype), src_bytes = gm_dtype_bytes(args->src_dtype);
    GM_TRY(check_pointer("grad_add: dst", args->dst, dst_bytes));
    GM_TRY(check_pointer("grad_add: src", args->src, src_bytes));
    GM_FAIL_IF(args->numel / GM_TILE_ELEMENTS >= MAX_TILES - 1, GM_ERR_ARG,
               "grad_add: %zu elements; split the call", args->numel);
    int64_t origin = -misalignment(args->dst, dst_bytes, 0);
    gm_grad_add_batch batch = {.dst = args->dst,
                               .src = args->src,
                               .origin = origin,
                               .numel = (int64_t)args->numel,
                               .is_aligned = is_aligned(args->dst, dst_bytes, origin) &&
                                             is_aligned(args->src, src_bytes, origin),
                               .accumulate = args->accumulate,
                               .divisor = gm_grad_is_divided(args) ? args->divisor : 1};
    if (sum) {
        return launch_grad_sum(k, args, &batch, sum, stream);
    }
    CUfunction function = k->grad_add[args->dst_dtype][args->src_dtype];
    return launch(k, function, n_tiles(batch.numel - origin), &batch, stream);
}

gm_status gm_kernels_sumsq(gm_kernels *k, const void *data, gm_dtype dtype, size_t numel,
                           gm_sumsq *sum, CUstream stream)
{
    _Static_assert(sizeof(gm_sumsq_batch) <= 4096, "kernel parameters");
    GM_FAIL_IF(!is_dtype(dtype), GM_ERR_ARG, "sumsq: dtype %d is not known", (int)dtype);
    GM_TRY(check_sum("sumsq", sum));
    if (numel == 0) {
        return GM_OK;
    }
    size_t element_bytes = gm_dtype_bytes(dtype);
    GM_TRY(check_pointer("sumsq: data", data, element_bytes));
    size_t per_vector = 16 / element_bytes;
    size_t head = (per_vector - (uintptr_t)data / element_bytes % per_vector) % per_vector;
    head = head < numel ? head : numel;
    gm_sumsq_batch batch = {.data = data,
                            .head = head,
                            .n_vectors = (numel - head) / per_vector,
                            .tail = (numel - head) % per_vector,
                            .sum = sum};
    size_t wanted = (batch.n_vectors + GM_SUMSQ_BLOCK_VECTORS - 1) / GM_SUMSQ_BLOCK_VECTORS;
    uint32_t n_blocks = wanted < k->sumsq_blocks ? (uint32_t)wanted : k->sumsq_blocks;
    return launch(k, k->sumsq[dtype], n_blocks ? n_blocks : 1, &batch, stream);
}

gm_status gm_kernels_clip(gm_kernels *k, const gm_clip_args *args, CUstream stream)
{
    GM_TRY(check_sum("clip", args->sums));
    GM_TRY(args->total ? check_sum("clip", args->total)
                       : check_pointer("clip: out", args->out, sizeof(double)));
    gm_clip_args copy = *args;
    return launch(k, k->clip, 1, &copy, stream);
}

#endif
