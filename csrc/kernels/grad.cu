/* grad.cu - dst = src or dst = dst + src between fp32, bf16 and fp16: the bits of gm_grad_add_host.
 *
 * Invariant: every stored value went through fp32 and one rounding to nearest even, NaNs made
 * canonical, also where both dtypes agree and nothing is added. */
#include "common.cuh"

template <typename Dst, typename Src>
static __device__ __forceinline__ typename Dst::Bits
combine(typename Dst::Bits old, typename Src::Bits add, bool accumulate)
{
    float value = Src::load(add);
    return Dst::store(accumulate ? __fadd_rn(Dst::load(old), value) : value);
}

template <typename Dst, typename Src>
static __device__ __forceinline__ void grad_add(const gm_grad_add_batch &batch)
{
    typename Dst::Bits *dst = (typename Dst::Bits *)batch.dst;
    const typename Src::Bits *src = (const typename Src::Bits *)batch.src;
    const bool accumulate = batch.accumulate != 0;
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
            d.element[i] = combine<Dst, Src>(d.element[i], s.element[i], accumulate);
        }
        d.store(dst + at);
        return;
    }
    int64_t first = at > 0 ? at : 0;
    int64_t last = at + GM_THREAD_ELEMENTS < batch.numel ? at + GM_THREAD_ELEMENTS : batch.numel;
#pragma unroll 1
    for (int64_t i = first; i < last; i++) {
        dst[i] = combine<Dst, Src>(accumulate ? dst[i] : (typename Dst::Bits)0, src[i], accumulate);
    }
}

#define GRAD_ADD(name, Dst, Src)                                   \
    extern "C" __global__ void __launch_bounds__(GM_BLOCK_THREADS) \
        name(const __grid_constant__ gm_grad_add_batch batch)      \
    {                                                              \
        grad_add<Dst, Src>(batch);                                 \
    }

GRAD_ADD(gm_grad_add_f32_f32, gm_type_f32, gm_type_f32)
GRAD_ADD(gm_grad_add_f32_bf16, gm_type_f32, gm_type_bf16)
GRAD_ADD(gm_grad_add_f32_f16, gm_type_f32, gm_type_f16)
GRAD_ADD(gm_grad_add_bf16_f32, gm_type_bf16, gm_type_f32)
GRAD_ADD(gm_grad_add_bf16_bf16, gm_type_bf16, gm_type_bf16)
GRAD_ADD(gm_grad_add_bf16_f16, gm_type_bf16, gm_type_f16)
GRAD_ADD(gm_grad_add_f16_f32, gm_type_f16, gm_type_f32)
GRAD_ADD(gm_grad_add_f16_bf16, gm_type_f16, gm_type_bf16)
GRAD_ADD(gm_grad_add_f16_f16, gm_type_f16, gm_type_f16)
