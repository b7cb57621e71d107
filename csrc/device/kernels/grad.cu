/* grad.cu - dst = src or dst = dst + src (src divided first where asked) between fp32, bf16 and
 * fp16: the bits of gm_grad_add_host; and the same with the exact sum of squares of what is stored,
 * in the same pass.
 *
 * Invariant: every stored value went through fp32 and one rounding to nearest even, NaNs made
 * canonical, also where both dtypes agree and nothing is added. */
#include "device/kernels/band.cuh"

template <typename Dst, typename Src>
static __device__ __forceinline__ typename Dst::Bits
combine(typename Dst::Bits old, typename Src::Bits add, bool accumulate, float divisor)
{
    float value = Src::load(add);
    if (divisor != 1.0f) { /* the same for all threads */
        value = __fdiv_rn(value, divisor);
    }
    return Dst::store(accumulate ? __fadd_rn(Dst::load(old), value) : value);
}

template <typename Dst, typename Src>
static __device__ __forceinline__ void grad_add(const gm_grad_add_batch &batch)
{
    typename Dst::Bits *dst = (typename Dst::Bits *)batch.dst;
    const typename Src::Bits *src = (const typename Src::Bits *)batch.src;
    const bool accumulate = batch.accumulate != 0;
    const float divisor = batch.divisor;
    int64_t at = batch.origin + (int64_t)blockIdx.x * GM_TILE_ELEMENTS +
                 (int64_t)threadIdx.x * GM_THREAD_ELEMENTS;
    if (batch.is_aligned && at >= 0 && at + GM_THREAD_ELEMENTS <= batch.numel) {
        gm_eight<typename Dst::Bits> d;
        gm_eight<typename Src::Bits> s;
        s.load(src + at);
        if (accumulate) {
            d.load(dst + at);
        }
#pragma unroll
        for (int i = 0; i < GM_THREAD_ELEMENTS; i++) {
            d.element[i] = combine<Dst, Src>(d.element[i], s.element[i], accumulate, divisor);
        }
        d.store(dst + at);
        return;
    }
    int64_t first = at > 0 ? at : 0;
    int64_t last = at + GM_THREAD_ELEMENTS < batch.numel ? at + GM_THREAD_ELEMENTS : batch.numel;
#pragma unroll 1
    for (int64_t i = first; i < last; i++) {
        dst[i] = combine<Dst, Src>(accumulate ? dst[i] : (typename Dst::Bits)0, src[i], accumulate,
                                   divisor);
    }
}

/* A tile is GM_GRAD_SUM_EIGHTS rows of GM_TILE_ELEMENTS; all loads of a tile are issued before the
 * first use.  Elements outside the array take part as zeros, which no sum notices. */
template <typename Dst, typename Src>
static __device__ __forceinline__ void grad_add_sumsq(const gm_grad_sum_batch &batch)
{
    typedef typename Dst::Bits DstBits;
    typedef typename Src::Bits SrcBits;
    DstBits *dst = (DstBits *)batch.add.dst;
    const SrcBits *src = (const SrcBits *)batch.add.src;
    const bool accumulate = batch.add.accumulate != 0;
    const float divisor = batch.add.divisor;
    __shared__ block_sum sum;
    begin_sum(&sum);
    band<Dst> w;
    for (uint32_t tile = blockIdx.x; tile < batch.n_tiles; tile += gridDim.x) {
        gm_eight<DstBits> d[GM_GRAD_SUM_EIGHTS];
        gm_eight<SrcBits> s[GM_GRAD_SUM_EIGHTS];
        int64_t at[GM_GRAD_SUM_EIGHTS];
        bool is_whole[GM_GRAD_SUM_EIGHTS];
#pragma unroll
        for (int e = 0; e < GM_GRAD_SUM_EIGHTS; e++) {
            at[e] = batch.add.origin + ((int64_t)tile * GM_GRAD_SUM_EIGHTS + e) * GM_TILE_ELEMENTS +
                    (int64_t)threadIdx.x * GM_THREAD_ELEMENTS;
            is_whole[e] =
                batch.add.is_aligned && at[e] >= 0 && at[e] + GM_THREAD_ELEMENTS <= batch.add.numel;
            if (is_whole[e]) {
                s[e].load(src + at[e]);
                if (accumulate) {
                    d[e].load(dst + at[e]);
                }
            } else {
#pragma unroll
                for (int i = 0; i < GM_THREAD_ELEMENTS; i++) {
                    bool is_inside = at[e] + i >= 0 && at[e] + i < batch.add.numel;
                    s[e].element[i] = is_inside ? src[at[e] + i] : (SrcBits)0;
                    d[e].element[i] = is_inside && accumulate ? dst[at[e] + i] : (DstBits)0;
                }
            }
        }
#pragma unroll
        for (int e = 0; e < GM_GRAD_SUM_EIGHTS; e++) {
#pragma unroll
            for (int i = 0; i < GM_THREAD_ELEMENTS; i++) {
                d[e].element[i] =
                    combine<Dst, Src>(d[e].element[i], s[e].element[i], accumulate, divisor);
            }
            if (is_whole[e]) {
                d[e].store(dst + at[e]);
            } else {
#pragma unroll
                for (int i = 0; i < GM_THREAD_ELEMENTS; i++) {
                    if (at[e] + i >= 0 && at[e] + i < batch.add.numel) {
                        dst[at[e] + i] = d[e].element[i];
                    }
                }
            }
            const int64_t first = at[e];
            w.take(&sum, d[e].element, [=](uint32_t i) {
                bool is_inside = first + i >= 0 && first + i < batch.add.numel;
                return is_inside ? dst[first + i] : (DstBits)0;
            });
        }
    }
    w.end(&sum);
    end_sum(&sum, batch.sum, gridDim.x == 1);
}

#define GRAD_ADD(name, Dst, Src)                                                              \
    extern "C" __global__ void __launch_bounds__(GM_BLOCK_THREADS)                            \
        gm_grad_add_##name(const __grid_constant__ gm_grad_add_batch batch)                   \
    {                                                                                         \
        grad_add<Dst, Src>(batch);                                                            \
    }                                                                                         \
    extern "C" __global__ void __launch_bounds__(GM_BLOCK_THREADS, GM_GRAD_SUM_BLOCKS_PER_SM) \
        gm_grad_add_sumsq_##name(const __grid_constant__ gm_grad_sum_batch batch)             \
    {                                                                                         \
        grad_add_sumsq<Dst, Src>(batch);                                                      \
    }

GRAD_ADD(f32_f32, gm_type_f32, gm_type_f32)
GRAD_ADD(f32_bf16, gm_type_f32, gm_type_bf16)
GRAD_ADD(f32_f16, gm_type_f32, gm_type_f16)
GRAD_ADD(bf16_f32, gm_type_bf16, gm_type_f32)
GRAD_ADD(bf16_bf16, gm_type_bf16, gm_type_bf16)
GRAD_ADD(bf16_f16, gm_type_bf16, gm_type_f16)
GRAD_ADD(f16_f32, gm_type_f16, gm_type_f32)
GRAD_ADD(f16_bf16, gm_type_f16, gm_type_bf16)
GRAD_ADD(f16_f16, gm_type_f16, gm_type_f16)
