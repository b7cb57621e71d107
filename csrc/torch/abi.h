/* abi.h - the part of libtorch's C ABI that we use, looked up in the already loaded libtorch.
 *
 * libtorch's own header for these functions does not compile as C, so the dozen that we need are
 * declared in abi.c.  They are looked up when the module is imported (torch must have been imported
 * before); a missing one is GM_ERR_UNSUPPORTED with its name.
 *
 * What it gives Python: the operator  gemini::blob(int lease, int[] sizes, int[] strides,
 * ScalarType dtype, int device_type, int device_index) -> Tensor, a tensor that begins at the
 * lease's address.  The tensor's storage ends the lease when it dies (any thread).  device_type: 0
 * CPU (device_index -1), 1 CUDA, as in c10::DeviceType. */
#pragma once

#include "base/base.h"

/* Idempotent; registers the operator once per process. */
gm_status gm_torch_abi_init(void);
bool gm_torch_is_grad_enabled(void); /* on this thread; after the former */
