/* gpu_check.h - what the GPU programs share: device memory, numbers of every kind, time. */
#pragma once

#include <stdlib.h>
#include <time.h>

#include "arith/arith.h"
#include "check.h"
#include "device/device.h"
#include "arith/format.h"

#define MIB ((size_t)1 << 20)

static uint64_t seed = 1;

/* ---- device memory for tests: a range with blocks of its own ---- */

typedef struct memory {
    uintptr_t addr;
    size_t bytes, n_blocks;
    gm_block *blocks;
} memory;

static inline memory memory_new(gm_device *dev, size_t bytes)
{
    memory m = {.bytes = gm_round_up(bytes ? bytes : 1, dev->block_bytes)};
    m.n_blocks = m.bytes / dev->block_bytes;
    m.blocks = calloc(m.n_blocks, sizeof *m.blocks);
    CHECK(m.blocks);
    CHECK_OK(dev->ops->range_new(dev, m.bytes, &m.addr));
    for (size_t i = 0; i < m.n_blocks; i++) {
        CHECK_OK(dev->ops->block_new(dev, &m.blocks[i]));
    }
    CHECK_OK(dev->ops->map(dev, m.addr, m.blocks, m.n_blocks));
    return m;
}

static inline void memory_free(gm_device *dev, memory *m)
{
    dev->ops->range_free(dev, m->addr, m->bytes);
    for (size_t i = 0; i < m->n_blocks; i++) {
        dev->ops->block_free(dev, m->blocks[i]);
    }
    free(m->blocks);
}

static inline void put(gm_device *dev, uintptr_t dst, const void *src, size_t bytes)
{
    CHECK_OK(dev->ops->copy_h2d(dev, dst, src, bytes, 0));
    CHECK_OK(dev->ops->stream_sync(dev, 0));
}

static inline void get(gm_device *dev, void *dst, uintptr_t src, size_t bytes)
{
    CHECK_OK(dev->ops->copy_d2h(dev, dst, src, bytes, 0));
    CHECK_OK(dev->ops->stream_sync(dev, 0));
}

/* ---- values: every kind that arithmetic could treat differently ---- */

enum { N_KINDS = 8 };

static inline uint32_t special_bits(uint64_t random)
{
    static const uint32_t bits[] = {
        0,          0x80000000, 1,          0x807fffff, 0x00800000, 0x7f800000,
        0xff800000, 0x7fc00001, 0xff923456, 0x7f7fffff, 0x3f800000, 0x3f80ffff,
        0x33000000, 0x33000001, 0x477fefff, 0x477ff000, 0x38800000, 0x387fffff,
    };
    return bits[random % (sizeof bits / sizeof *bits)];
}

/* A sum of uniform numbers: bell-shaped, as gradients and weights are. */
static inline float bell(uint64_t random)
{
    double sum = 0;
    for (int i = 0; i < 4; i++) {
        sum += (double)((random >> (16 * i)) & 0xffff) / 65536.0 - 0.5;
    }
    return (float)sum;
}

static inline uint32_t value_bits(int kind)
{
    uint64_t r = next_random(&seed);
    uint32_t low = (uint32_t)r;
    switch (kind) {
    case 0: return low; /* any bits */
    case 1: return gm_f32_bits(bell(r));
    case 2: return gm_f32_bits(bell(r) * 1e-4f);
    case 3: return r >> 61 ? gm_f32_bits(bell(r)) : special_bits(low);
    case 4: return r >> 62 ? 0 : gm_f32_bits(bell(r));                         /* mostly zeros */
    case 5: return low & 0x807fffffu;                                          /* denormals */
    case 6: return (low & 0x807fffffu) | (uint32_t)(r >> 63 ? 20 : 200) << 23; /* two scales */
    default:
        return (low & 0x807fffffu) | (uint32_t)((r >> 40) % 255) << 23; /* every finite scale */
    }
}

static inline void fill(void *data, gm_dtype dtype, size_t numel, int kind)
{
    for (size_t i = 0; i < numel; i++) {
        uint32_t bits = value_bits(kind);
        if (dtype == GM_F32) {
            ((uint32_t *)data)[i] = bits;
        } else if (dtype == GM_BF16) {
            ((uint16_t *)data)[i] = (uint16_t)(bits >> 16);
        } else {
            ((uint16_t *)data)[i] = kind == 0 ? (uint16_t)bits : gm_bits_to_f16(bits);
        }
    }
}

static inline gm_adam_scalars some_scalars(bool adamw, int64_t step)
{
    gm_adam_hyper hyper = {.lr = 1e-3,
                           .beta1 = 0.9,
                           .beta2 = 0.999,
                           .eps = step % 2 ? 1e-8 : 0.0,
                           .weight_decay = 0.1,
                           .step = step,
                           .adamw = adamw,
                           .bias_correction = step % 3 != 0,
                           .grad_divisor = step % 5 ? 1.0 : 1024.0,
                           .clip_factor = step % 7 ? 1.0 : 0.37};
    gm_adam_scalars scalars;
    CHECK_OK(gm_adam_scalars_init(&hyper, &scalars));
    return scalars;
}

/* ---- time ---- */

static inline double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static inline void nap(long microseconds)
{
    nanosleep(&(struct timespec){.tv_sec = microseconds / 1000000,
                                 .tv_nsec = microseconds % 1000000 * 1000},
              NULL);
}
