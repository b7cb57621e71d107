/* fake_driver.c - every function of the driver that the core looks up, doing nothing; those that a test looks at are
 * in fake_nccl.c, whose symbols are strong. */
#include "device/cuda/driver.h"

CUresult gm_fake_nothing(void);
CUresult gm_fake_nothing(void)
{
    return CUDA_SUCCESS;
}

#pragma GCC diagnostic ignored "-Wattribute-alias"
#define X(name) extern __typeof__(name) name __attribute__((weak, alias("gm_fake_nothing")));
/* clang-format off */
GM_CUDA_FUNCTIONS(X)
