/* abi.c - registers gemini::blob through libtorch's C ABI; see abi.h.
 * Runs on whatever thread calls the operator; the deleter runs on whatever thread drops the
 * storage. */
#include "torch/abi.h"

#include <dlfcn.h>
#include <string.h>

#include "engine/engine.h"

/* Facts of the ABI: a call's arguments and results are 64-bit cells; integers and dtypes sit in the
 * low bytes, tensors, lists and libraries are handles (pointers); 0 means success. */
typedef uint64_t cell;

/* Of libtorch. */
static struct {
    int32_t (*library_init_fragment)(const char *ns, const char *file, uint32_t line, void **out);
    int32_t (*library_init_impl)(const char *ns, const char *key, const char *file, uint32_t line,
                                 void **out);
    int32_t (*library_def)(void *library, const char *schema);
    int32_t (*library_impl)(void *library, const char *name,
                            void (*kernel)(cell *stack, uint64_t n_in, uint64_t n_out));
    int32_t (*from_blob)(void *data, int64_t ndim, const int64_t *sizes, const int64_t *strides,
                         int64_t storage_offset, int32_t dtype, int32_t device_type,
                         int32_t device_index, void **out, int32_t layout, const uint8_t *opaque,
                         int64_t opaque_bytes, void (*deleter)(void *data, void *context),
                         void *context);
    int32_t (*list_size)(void *list, size_t *out);
    int32_t (*list_get)(void *list, size_t index, cell *out);
    int32_t (*list_delete)(void *list);
    int32_t (*layout_strided)(void);
    bool (*grad_mode_is_enabled)(void);
} torch;

enum { MAX_DIMS = 64 }; /* what torch itself allows a dense tensor to have in its iterators */

static void end_lease(void *GM_UNUSED(data), void *context)
{
    gm_lease_end(context);
}

/* The numbers of a list that belongs to the caller; false if they are too many. */
static bool take_list(void *list, int64_t *out, size_t *n_out)
{
    bool is_ok = torch.list_size(list, n_out) == 0 && *n_out <= MAX_DIMS;
    for (size_t i = 0; is_ok && i < *n_out; i++) {
        cell item;
        is_ok = torch.list_get(list, i, &item) == 0;
        out[i] = (int64_t)item;
    }
    (void)torch.list_delete(list);
    return is_ok;
}

/* The caller has checked what can be wrong (a live lease, at most MAX_DIMS sizes, dense strides): a
 * kernel behind the C ABI has no way to raise. */
static void blob_kernel(cell *stack, uint64_t GM_UNUSED(n_in), uint64_t GM_UNUSED(n_out))
{
    gm_lease *lease = (gm_lease *)(uintptr_t)stack[0];
    void *tensor = NULL;
    int32_t dtype, device_type = (int32_t)(int64_t)stack[4],
                   device_index = (int32_t)(int64_t)stack[5];
    memcpy(&dtype, &stack[3], sizeof dtype);
    int64_t sizes[MAX_DIMS], strides[MAX_DIMS];
    size_t n_dims = 0, n_strides = 0;
    bool has_sizes = take_list((void *)(uintptr_t)stack[1], sizes, &n_dims);
    bool has_strides = take_list((void *)(uintptr_t)stack[2], strides, &n_strides);
    if (has_sizes && has_strides && n_dims == n_strides) {
        (void)torch.from_blob((void *)gm_lease_address(lease), (int64_t)n_dims, sizes, strides, 0,
                              dtype, device_type, device_index, &tensor, torch.layout_strided(),
                              NULL, 0, end_lease, lease);
    }
    stack[0] = (cell)(uintptr_t)tensor;
}

static gm_status look_up(void *library, const char *name, void *out_function)
{
    void *symbol = dlsym(library, name);
    GM_FAIL_IF(
        !symbol, GM_ERR_UNSUPPORTED,
        "the loaded libtorch has no %s: gemini_strategy needs torch >= 2.11, imported before it",
        name);
    memcpy(out_function, &symbol, sizeof symbol); /* a function pointer, as POSIX allows */
    return GM_OK;
}

bool gm_torch_is_grad_enabled(void)
{
    return torch.grad_mode_is_enabled();
}

gm_status gm_torch_abi_init(void)
{
    static bool is_registered;
    if (is_registered) {
        return GM_OK;
    }
    void *self = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
    GM_FAIL_IF(!self, GM_ERR_UNSUPPORTED, "libtorch_cpu.so is not loaded: import torch first");
    GM_TRY(look_up(self, "aoti_torch_library_init_fragment", &torch.library_init_fragment));
    GM_TRY(look_up(self, "aoti_torch_library_init_impl", &torch.library_init_impl));
    GM_TRY(look_up(self, "aoti_torch_library_def", &torch.library_def));
    GM_TRY(look_up(self, "aoti_torch_library_impl", &torch.library_impl));
    GM_TRY(look_up(self, "torch_from_blob", &torch.from_blob));
    GM_TRY(look_up(self, "torch_list_size", &torch.list_size));
    GM_TRY(look_up(self, "torch_list_get_item", &torch.list_get));
    GM_TRY(look_up(self, "torch_delete_list", &torch.list_delete));
    GM_TRY(look_up(self, "aoti_torch_layout_strided", &torch.layout_strided));
    GM_TRY(look_up(self, "aoti_torch_grad_mode_is_enabled", &torch.grad_mode_is_enabled));
    void *library;
    GM_FAIL_IF(torch.library_init_fragment("gemini", __FILE__, __LINE__, &library) != 0 ||
                   torch.library_def(library,
                                     "blob(int lease, int[] sizes, int[] strides, ScalarType "
                                     "dtype, int device_type, int device_index) -> Tensor") != 0 ||
                   torch.library_init_impl("gemini", "CompositeExplicitAutograd", __FILE__,
                                           __LINE__, &library) != 0 ||
                   torch.library_impl(library, "blob", blob_kernel) != 0,
               GM_ERR_UNSUPPORTED, "libtorch refused to register gemini::blob");
    is_registered = true; /* the library objects live as long as the process */
    return GM_OK;
}
