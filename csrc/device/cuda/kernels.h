/* kernels.h - plain-C face of the CUDA kernels in csrc/kernels/: load once per context, launch.
 * Launches are asynchronous, allocate nothing, never wait.  Compiled only with GM_WITH_CUDA. */
#pragma once

#include "arith/arith.h"
#include "device/cuda/driver.h"

typedef struct gm_kernels gm_kernels; /* opaque; a loaded module of the current context */

gm_status gm_kernels_new(gm_kernels **out); /* loads the embedded fatbin into the current context */
void gm_kernels_free(gm_kernels *kernels);
gm_status gm_kernels_adam(gm_kernels *k, const gm_adam_args *args, CUstream stream);
/* sum: NULL, or overwritten with the exact sum of squares of the results. */
gm_status gm_kernels_grad_add(gm_kernels *k, const gm_grad_add_args *args, gm_sumsq *sum,
                              CUstream stream);
gm_status gm_kernels_sumsq(gm_kernels *k, const void *data, gm_dtype dtype, size_t numel,
                           gm_sumsq *sum, CUstream stream);
gm_status gm_kernels_clip(gm_kernels *k, const gm_clip_args *args, CUstream stream);
