/* adam.cu - Adam on device memory: the sequence of arith.h, the bits of adam_scalar.c.
 *
 * Bandwidth-bound: each thread moves eight elements with 16-byte accesses, all loads issued before
 * the first use; a block handles one tile, and finds the tile's range among the launch's pieces.
 *
 * Invariants
 *   1. One rounding intrinsic per operation of arith.h, in its order; nothing else touches a value.
 *   2. An element outside [begin, end) of its piece is neither read nor written. */
#include "device/kernels/common.cuh"

static __device__ __forceinline__ float update(const gm_adam_scalars &s, float p, float g, float &m,
                                               float &v)
{
    g = __fmul_rn(g, s.grad_scale);
    if (s.is_adamw) {
        p = __fmul_rn(p, s.decay);
    } else {
        g = __fmaf_rn(s.weight_decay, p, g);
    }
    m = __fmaf_rn(__fsub_rn(g, m), s.one_minus_beta1, m);
    v = __fmaf_rn(__fmul_rn(g, g), s.one_minus_beta2, __fmul_rn(v, s.beta2));
    float d = __fmaf_rn(__fsqrt_rn(v), s.inv_sqrt_bias2, s.eps);
    p = __fmaf_rn(-s.step_size, __fdiv_rn(m, d), p);
    m = gm_canonical(m);
    v = gm_canonical(v);
    return p;
}

/* A weight format: the arrays that hold the master, and how an element of them is updated. */
struct format_f32 {
    typedef uint32_t Weight;
    typedef uint32_t Low;
    static constexpr bool reads_weight = true, has_low = false;
    static __device__ __forceinline__ void step(const gm_adam_scalars &s, Weight &weight, Low &,
                                                float g, float &m, float &v)
    {
        weight = gm_type_f32::store(update(s, __uint_as_float(weight), g, m, v));
    }
};

struct format_bf16 {
    typedef uint16_t Weight;
    typedef uint16_t Low;
    static constexpr bool reads_weight = true, has_low = true;
    static __device__ __forceinline__ void step(const gm_adam_scalars &s, Weight &weight, Low &low,
                                                float g, float &m, float &v)
    {
        uint32_t master = ((uint32_t)weight << 16) + (uint32_t)(int32_t)(int16_t)low;
        uint32_t bits = __float_as_uint(gm_canonical(update(s, __uint_as_float(master), g, m, v)));
        weight = (Weight)((bits + 0x8000u) >> 16);
        low = (Low)bits; /* bits - (weight << 16), modulo 2^16 */
    }
};

struct format_f16 {
    typedef uint16_t Weight;
    typedef uint32_t Low;
    static constexpr bool reads_weight = false, has_low = true;
    static __device__ __forceinline__ void step(const gm_adam_scalars &s, Weight &weight, Low &low,
                                                float g, float &m, float &v)
    {
        float p = update(s, __uint_as_float(low), g, m, v);
        weight = gm_type_f16::store(p);
        low = gm_type_f32::store(p);
    }
};

template <typename Format, typename Grad> struct arrays {
    typename Format::Weight *weight;
    typename Format::Low *low;
    uint32_t *m, *v;
    const typename Grad::Bits *grad;

    __device__ __forceinline__ void eight(const gm_adam_scalars &s, int64_t at) const
    {
        gm_eight<typename Format::Weight> w;
        gm_eight<typename Format::Low> l;
        gm_eight<uint32_t> m8, v8;
        gm_eight<typename Grad::Bits> g;
        g.load(grad + at);
        if (Format::reads_weight) {
            w.load(weight + at);
        }
        if (Format::has_low) {
            l.load(low + at);
        }
        m8.load(m + at);
        v8.load(v + at);
#pragma unroll
        for (int i = 0; i < GM_THREAD_ELEMENTS; i++) {
            float new_m = __uint_as_float(m8.element[i]), new_v = __uint_as_float(v8.element[i]);
            Format::step(s, w.element[i], l.element[i], Grad::load(g.element[i]), new_m, new_v);
            m8.element[i] = __float_as_uint(new_m);
            v8.element[i] = __float_as_uint(new_v);
        }
        w.store(weight + at);
        if (Format::has_low) {
            l.store(low + at);
        }
        m8.store(m + at);
        v8.store(v + at);
    }

    __device__ __forceinline__ void one(const gm_adam_scalars &s, int64_t at) const
    {
        typename Format::Weight w = 0;
        typename Format::Low l = 0;
        if (Format::reads_weight) {
            w = weight[at];
        }
        if (Format::has_low) {
            l = low[at];
        }
        float new_m = __uint_as_float(m[at]), new_v = __uint_as_float(v[at]);
        Format::step(s, w, l, Grad::load(grad[at]), new_m, new_v);
        weight[at] = w;
        if (Format::has_low) {
            low[at] = l;
        }
        m[at] = __float_as_uint(new_m);
        v[at] = __float_as_uint(new_v);
    }
};

/* The last piece whose first tile is not after `tile`. */
static __device__ __forceinline__ uint32_t find_piece(const gm_adam_batch &batch, uint32_t tile)
{
    uint32_t low = 0, high = batch.n_pieces;
    while (high - low > 1) {
        uint32_t middle = (low + high) / 2;
        if (batch.piece[middle].first_tile <= tile) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

template <typename Format, typename Grad>
static __device__ __forceinline__ void adam(const gm_adam_batch &batch)
{
    const gm_adam_piece &piece = batch.piece[find_piece(batch, blockIdx.x)];
    gm_adam_scalars s = piece.scalars;
    if (batch.grad_scale) {
        s.grad_scale = *batch.grad_scale;
    }
    const arrays<Format, Grad> a = {(typename Format::Weight *)batch.weight,
                                    (typename Format::Low *)batch.low, (uint32_t *)batch.m,
                                    (uint32_t *)batch.v, (const typename Grad::Bits *)batch.grad};
    int64_t at = piece.origin + (int64_t)(blockIdx.x - piece.first_tile) * GM_TILE_ELEMENTS +
                 (int64_t)threadIdx.x * GM_THREAD_ELEMENTS;
    if (piece.is_aligned && at >= piece.begin && at + GM_THREAD_ELEMENTS <= piece.end) {
        a.eight(s, at);
        return;
    }
    int64_t first = at > piece.begin ? at : piece.begin;
    int64_t last = at + GM_THREAD_ELEMENTS < piece.end ? at + GM_THREAD_ELEMENTS : piece.end;
#pragma unroll 1
    for (int64_t i = first; i < last; i++) {
        a.one(s, i);
    }
}

#define ADAM(name, Format, Grad)                                   \
    extern "C" __global__ void __launch_bounds__(GM_BLOCK_THREADS) \
        name(const __grid_constant__ gm_adam_batch batch)          \
    {                                                              \
        adam<Format, Grad>(batch);                                 \
    }

ADAM(gm_adam_f32, format_f32, gm_type_f32)
ADAM(gm_adam_bf16, format_bf16, gm_type_bf16)
ADAM(gm_adam_bf16_grad_f32, format_bf16, gm_type_f32)
ADAM(gm_adam_f16, format_f16, gm_type_f16)
ADAM(gm_adam_f16_grad_f32, format_f16, gm_type_f32)
