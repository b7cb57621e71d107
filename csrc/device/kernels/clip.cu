/* clip.cu - the factor of a clip from the sums of squares that gradients have left: the bits of
 * gm_clip_host.
 *
 * Invariant: integers are added, in any order; one thread does the rest. */
#include "arith/clip.h"
#include "device/kernels/exact.cuh"

extern "C" __global__ void __launch_bounds__(GM_BLOCK_THREADS)
    gm_clip_norm(const __grid_constant__ gm_clip_args args)
{
    constexpr uint32_t WORDS = sizeof(gm_sumsq) / sizeof(limb_t);
    __shared__ block_sum sum;
    begin_sum(&sum);
    for (uint64_t i = threadIdx.x; i < args.n * WORDS; i += GM_BLOCK_THREADS) {
        limb_t word = ((const limb_t *)args.sums)[i];
        if (word) {
            atomicAdd((limb_t *)&sum + i % WORDS, word);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        gm_clip_of((const gm_sumsq *)&sum, &args);
    }
}
