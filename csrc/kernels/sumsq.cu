/* sumsq.cu - exact sum of squares: the same number as gm_sumsq_host, whatever the order.
 *
 * A finite fp32 value is m * 2^(k - 149), m < 2^24 an integer and k = max(exponent field, 1) - 1;
 * its square is m^2 shifted left by 2k bits above the accumulator's lowest bit, 2^-298.
 *
 * Fast path: a warp agrees on a 128-bit window of the accumulator, whose base it takes from the
 * largest exponent it has just read; each thread adds the squares that lie in the window to two
 * registers.  Everything else (far smaller values, denormals) goes to the block's limbs in shared
 * memory by atomics; infinities and NaNs are only counted.  Each block adds its limbs to the result
 * once.
 *
 * Invariants
 *   1. Integers only: no operation rounds, so no order, split or grid can change the result.
 *   2. A window takes at most 2^14 squares per thread between flushes, each below 2^114.
 *   3. Windows are bases of a warp, never of a thread: a flush is a reduction over the warp.
 *   4. Block limbs are carried before they are added to the result, so that each addition is below
 *      2^32 and the result takes 2^32 of them. */
#include "common.cuh"

#define WARP          32u
#define FULL          0xffffffffu
#define UNROLL        GM_SUMSQ_UNROLL
#define MAX_ADDS      16384u /* squares per thread between flushes */
#define HEADROOM      8u     /* bits kept free above the largest square when a window is placed */
#define MIN_HEIGHT    24u /* a largest square nearer than this to the base moves the window down */
#define INFINITY_BITS 0x7f800000u
#define LEAST_NORMAL_BITS 0x00800000u

typedef unsigned long long limb_t;

/* gm_sumsq in shared memory. */
struct block_sum {
    limb_t limb[GM_SUMSQ_LIMBS];
    limb_t n_inf, n_nan;
};

/* SIGNIFICAND: bits of a value's significand, the implicit one included. */
template <typename Type> struct element;
template <> struct element<gm_type_f32> {
    static constexpr uint32_t SIGNIFICAND = 24;
};
template <> struct element<gm_type_bf16> {
    static constexpr uint32_t SIGNIFICAND = 8;
};
template <> struct element<gm_type_f16> {
    static constexpr uint32_t SIGNIFICAND = 11;
};

/* |value| as fp32 bits; exact. */
template <typename Type>
static __device__ __forceinline__ uint32_t magnitude(typename Type::Bits bits)
{
    return __float_as_uint(Type::load(bits)) & 0x7fffffffu;
}

/* Any value, exactly, straight into the block's limbs. */
static __device__ void add_exact(block_sum *sum, uint32_t bits)
{
    if (bits == 0) {
        return;
    }
    if (bits >= INFINITY_BITS) {
        atomicAdd(bits == INFINITY_BITS ? &sum->n_inf : &sum->n_nan, (limb_t)1);
        return;
    }
    uint32_t field = bits >> 23;
    uint32_t m = field ? (bits & 0x7fffffu) | 0x800000u : bits;
    uint32_t position = 2u * (field ? field - 1u : 0u);
    uint32_t limb = position >> 5, shift = position & 31u; /* even: 0..30 */
    uint64_t square = (uint64_t)m * m;
    uint32_t low = (uint32_t)(square << shift);
    uint32_t middle = (uint32_t)(square >> (32u - shift));
    uint32_t high = (uint32_t)((square >> 32) >> (32u - shift));
    if (low) {
        atomicAdd(&sum->limb[limb], (limb_t)low);
    }
    if (middle) {
        atomicAdd(&sum->limb[limb + 1], (limb_t)middle);
    }
    if (high) {
        atomicAdd(&sum->limb[limb + 2], (limb_t)high);
    }
}

/* 128 bits of the accumulator, the lowest at bit `base`; `base` is the same in all of a warp. */
struct window {
    uint64_t low, high;
    uint32_t base;
    uint32_t n_adds;

    /* += square << shift; shift < 128 unless square is 0.  Shifts by 64 or more give 0. */
    __device__ __forceinline__ void add(uint64_t square, uint32_t shift)
    {
        asm("{\n\t"
            ".reg .u64 a, b, c;\n\t"
            ".reg .u32 n;\n\t"
            "shl.b64 a, %2, %3;\n\t"
            "sub.u32 n, 64, %3;\n\t"
            "shr.u64 b, %2, n;\n\t"
            "sub.u32 n, %3, 64;\n\t"
            "shl.b64 c, %2, n;\n\t"
            "or.b64 b, b, c;\n\t"
            "add.cc.u64 %0, %0, a;\n\t"
            "addc.u64 %1, %1, b;\n\t"
            "}"
            : "+l"(low), "+l"(high)
            : "l"(square), "r"(shift));
    }
};

/* Adds the warp's windows to the block's limbs. */
static __device__ __noinline__ void flush(block_sum *sum, uint64_t low, uint64_t high,
                                          uint32_t base)
{
    const uint32_t lane = threadIdx.x % WARP;
    uint32_t mine = 0;
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
        uint64_t half = i < 4 ? low : high;
        uint32_t total = __reduce_add_sync(FULL, (uint32_t)(half >> (16u * (i & 3u))) & 0xffffu);
        mine = lane == i ? total : mine;
    }
    if (mine) {
        uint32_t position = base + 16u * lane;
        limb_t value = (limb_t)mine << (position & 31u); /* below 2^52 */
        atomicAdd(&sum->limb[position >> 5], value & 0xffffffffu);
        atomicAdd(&sum->limb[(position >> 5) + 1], value >> 32);
    }
}

template <typename Type> static __device__ __forceinline__ void sumsq(const gm_sumsq_batch &batch)
{
    typedef typename Type::Bits Bits;
    constexpr uint32_t PER_VECTOR = 16 / sizeof(Bits);
    constexpr uint32_t N = UNROLL * PER_VECTOR; /* elements that a thread reads at a time */
    constexpr uint32_t DROP =
        24u - element<Type>::SIGNIFICAND; /* low zero bits of an fp32 significand */
    constexpr uint32_t LIMIT = 128u - 14u - 2u * element<Type>::SIGNIFICAND;
    __shared__ block_sum sum;
    const uint32_t lane = threadIdx.x % WARP;
    if (threadIdx.x < sizeof(sum) / sizeof(limb_t)) {
        ((limb_t *)&sum)[threadIdx.x] = 0;
    }
    __syncthreads();

    const Bits *data = (const Bits *)batch.data;
    if (blockIdx.x == 0 && threadIdx.x < batch.head + batch.tail) {
        uint64_t i =
            threadIdx.x < batch.head ? threadIdx.x : batch.n_vectors * PER_VECTOR + threadIdx.x;
        add_exact(&sum, magnitude<Type>(data[i]));
    }

    const uint4 *vectors = (const uint4 *)(data + batch.head);
    const uint64_t warp = ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    const uint64_t n_warps = (uint64_t)gridDim.x * blockDim.x / WARP;
    window w = {0, 0, 0x80000000u, 0}; /* a base that no value is in: the first one places it */
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
        uint32_t largest = 0;
#pragma unroll
        for (uint32_t i = 0; i < N; i++) {
            largest = max(largest, magnitude<Type>(in.element[i]));
        }
        largest = __reduce_max_sync(FULL, largest);
        if (largest >= INFINITY_BITS) {
            uint32_t n_inf = 0, n_nan = 0;
            largest = 0;
#pragma unroll
            for (uint32_t i = 0; i < N; i++) {
                uint32_t bits = magnitude<Type>(in.element[i]);
                n_inf += bits == INFINITY_BITS;
                n_nan += bits > INFINITY_BITS;
                in.element[i] = bits < INFINITY_BITS ? in.element[i] : (Bits)0;
                largest = max(largest, bits < INFINITY_BITS ? bits : 0u);
            }
            largest = __reduce_max_sync(FULL, largest);
            n_inf = __reduce_add_sync(FULL, n_inf);
            n_nan = __reduce_add_sync(FULL, n_nan);
            if (lane == 0) {
                atomicAdd(&sum.n_inf, (limb_t)n_inf);
                atomicAdd(&sum.n_nan, (limb_t)n_nan);
            }
        }
        if (largest == 0) {
            continue;
        }
        if (largest >= LEAST_NORMAL_BITS) {
            /* A normal value's square is (m >> DROP)^2 at bit 2 (field - 1 + DROP). */
            uint32_t top = 2u * ((largest >> 23) - 1u + DROP);
            bool is_outside = top - w.base > LIMIT; /* above the window or, wrapped, below it */
            bool is_low = top - w.base < MIN_HEIGHT && w.base > 2u * DROP;
            if (is_outside || is_low || w.n_adds + N > MAX_ADDS) {
                flush(&sum, w.low, w.high, w.base);
                uint32_t height = LIMIT - HEADROOM;
                w.low = w.high = 0;
                w.base = top > 2u * DROP + height ? top - height : 2u * DROP;
                w.n_adds = 0;
            }
        }
        uint32_t others = 0; /* elements that are not in the window */
#pragma unroll
        for (uint32_t i = 0; i < N; i++) {
            uint32_t bits = magnitude<Type>(in.element[i]);
            /* base >= 2 DROP, so that zeros and denormals (field 0) wrap to beyond the limit */
            uint32_t shift = 2u * ((bits >> 23) - 1u + DROP) - w.base;
            bool is_inside = shift <= LIMIT;
            uint32_t m = is_inside ? ((bits & 0x7fffffu) | 0x800000u) >> DROP : 0u;
            w.add((uint64_t)m * m, shift);
            others |= !is_inside && bits != 0 ? 1u << i : 0u;
        }
        w.n_adds += N;
        for (; others; others &= others - 1u) {
            uint32_t i = (uint32_t)__ffs((int)others) - 1u;
            uint64_t at = first + i / PER_VECTOR * WARP + lane;
            if (at < batch.n_vectors) {
                add_exact(&sum,
                          magnitude<Type>(data[batch.head + at * PER_VECTOR + i % PER_VECTOR]));
            }
        }
    }
    flush(&sum, w.low, w.high, w.base);

    __syncthreads();
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i + 1 < GM_SUMSQ_LIMBS; i++) {
            sum.limb[i + 1] += sum.limb[i] >> 32;
            sum.limb[i] &= 0xffffffffu;
        }
    }
    __syncthreads();
    if (threadIdx.x < sizeof(sum) / sizeof(limb_t)) {
        limb_t value = ((limb_t *)&sum)[threadIdx.x];
        if (value) {
            atomicAdd((limb_t *)batch.sum + threadIdx.x, value);
        }
    }
}

static_assert(sizeof(block_sum) == sizeof(gm_sumsq), "one layout");

#define SUMSQ(name, Type)                                                                  \
    extern "C" __global__ void __launch_bounds__(GM_BLOCK_THREADS, GM_SUMSQ_BLOCKS_PER_SM) \
        name(const __grid_constant__ gm_sumsq_batch batch)                                 \
    {                                                                                      \
        sumsq<Type>(batch);                                                                \
    }

SUMSQ(gm_sumsq_f32, gm_type_f32)
SUMSQ(gm_sumsq_bf16, gm_type_bf16)
SUMSQ(gm_sumsq_f16, gm_type_f16)
