/* adam_impl.h - what the host implementations of arith.h share: which instruction set is used, and
 * the span functions that each set provides.  Private to the host arithmetic. */
#pragma once

#include <fenv.h>

#include "arith/arith.h"

#if defined(__x86_64__)
#define GM_HAS_X86 1
#else
#define GM_HAS_X86 0
#endif

typedef enum gm_isa { GM_ISA_SCALAR = 0, GM_ISA_AVX2 = 1, GM_ISA_AVX512 = 2 } gm_isa;

/* The set in use (isa.c): forced by gm_isa_force, else by GEMINI_ISA, else the best there is. */
gm_status gm_isa_get(gm_isa *out);
/* For tests and benchmarks: "scalar", "avx2", "avx512", or NULL to choose anew. */
gm_status gm_isa_force(const char *name);
/* Where a function cannot fail: the set in use, or scalar when the forced set is missing. */
gm_isa gm_isa_or_scalar(void);

/* Elements [begin, end) of args with one set of scalars; args->ranges is not looked at. */
typedef void (*gm_adam_span_fn)(const gm_adam_args *args, const gm_adam_scalars *scalars,
                                size_t begin, size_t end);
void gm_adam_span_scalar(const gm_adam_args *args, const gm_adam_scalars *scalars, size_t begin,
                         size_t end);
#if GM_HAS_X86
void gm_adam_span_avx2(const gm_adam_args *args, const gm_adam_scalars *scalars, size_t begin,
                       size_t end);
void gm_adam_span_avx512(const gm_adam_args *args, const gm_adam_scalars *scalars, size_t begin,
                         size_t end);
/* args->from to aligned arrays, past the cache: a multiple of 16 elements from `begin`; returns
 * where it stopped. */
size_t gm_adam_from_avx512(const gm_adam_args *args, const gm_adam_scalars *scalars, size_t begin,
                           size_t end);
/* These handle a multiple of 8 elements from `begin` and return where they stopped. */
size_t gm_grad_add_avx2(const gm_grad_add_args *args, size_t begin, size_t end);
size_t gm_split_avx2(gm_dtype format, const float *master, void *weight, void *low, size_t begin,
                     size_t end);
/* bf16 only */
size_t gm_merge_avx2(const void *weight, const void *low, float *master, size_t begin, size_t end);
#endif

/* The floating-point environment that arith.h assumes (round to nearest, denormals kept), whatever
 * the calling thread has set (torch.set_flush_denormal, for one). */
static inline void gm_fenv_enter(fenv_t *saved)
{
    fegetenv(saved);
    fesetenv(FE_DFL_ENV);
}

static inline void gm_fenv_leave(const fenv_t *saved)
{
    fesetenv(saved);
}
