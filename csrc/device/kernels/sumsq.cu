/* sumsq.cu - exact sum of squares of one array: the same number as gm_sumsq_host (see band.cuh). */
#include "device/kernels/band.cuh"

template <typename Type> static __device__ __forceinline__ void sumsq(const gm_sumsq_batch &batch)
{
    typedef typename Type::Bits Bits;
    constexpr uint32_t UNROLL = GM_SUMSQ_UNROLL;
    constexpr uint32_t PER_VECTOR = 16 / sizeof(Bits);
    constexpr uint32_t N = UNROLL * PER_VECTOR; /* elements that a thread reads at a time */
    __shared__ block_sum sum;
    const uint32_t lane = threadIdx.x % WARP;
    begin_sum(&sum);

    const Bits *data = (const Bits *)batch.data;
    if (blockIdx.x == 0 && threadIdx.x < batch.head + batch.tail) {
        uint64_t i =
            threadIdx.x < batch.head ? threadIdx.x : batch.n_vectors * PER_VECTOR + threadIdx.x;
        add_exact(&sum, magnitude<Type>(data[i]));
    }

    const uint4 *vectors = (const uint4 *)(data + batch.head);
    const uint64_t warp = ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    const uint64_t n_warps = (uint64_t)gridDim.x * blockDim.x / WARP;
    band<Type> w;
    for (uint64_t first = warp * WARP * UNROLL; first < batch.n_vectors;
         first += n_warps * WARP * UNROLL) {
        union {
            uint4 vector[UNROLL];
            Bits element[N];
        } in;
#pragma unroll
        for (uint32_t i = 0; i < UNROLL; i++) {
            uint64_t at = first + i * WARP + lane;
            in.vector[i] = at < batch.n_vectors ? __ldg(vectors + at) : make_uint4(0, 0, 0, 0);
        }
        w.take(&sum, in.element, [=](uint32_t i) {
            uint64_t at = first + i / PER_VECTOR * WARP + lane;
            return at < batch.n_vectors ? data[batch.head + at * PER_VECTOR + i % PER_VECTOR]
                                        : (Bits)0;
        });
    }
    w.end(&sum);
    end_sum(&sum, batch.sum, false);
}

#define SUMSQ(name, Type)                                                                  \
    extern "C" __global__ void __launch_bounds__(GM_BLOCK_THREADS, GM_SUMSQ_BLOCKS_PER_SM) \
        name(const __grid_constant__ gm_sumsq_batch batch)                                 \
    {                                                                                      \
        sumsq<Type>(batch);                                                                \
    }

SUMSQ(gm_sumsq_f32, gm_type_f32)
SUMSQ(gm_sumsq_bf16, gm_type_bf16)
SUMSQ(gm_sumsq_f16, gm_type_f16)
