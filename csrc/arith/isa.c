/* isa.c - which instruction set the host arithmetic uses: chosen once, forced by GEMINI_ISA.
 *
 * All sets give the same bits (arith.h), so the choice is about speed only. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "arith/adam_impl.h"

#define NOT_CHOSEN (-1)

static const char *const names[] = {"scalar", "avx2", "avx512"};
static _Atomic int chosen = NOT_CHOSEN;

/* NULL when the processor has the set, else the name of the first feature that is missing. */
static const char *missing_feature(gm_isa isa)
{
#if GM_HAS_X86
#define NEED(feature)                           \
    do {                                        \
        if (!__builtin_cpu_supports(feature)) { \
            return feature;                     \
        }                                       \
    } while (0)
    __builtin_cpu_init();
    if (isa != GM_ISA_SCALAR) {
        NEED("avx2");
        NEED("fma");
        NEED("f16c");
    }
    if (isa == GM_ISA_AVX512) {
        NEED("avx512f");
        NEED("avx512bw");
        NEED("avx512dq");
        NEED("avx512vl");
    }
#undef NEED
    return NULL;
#else
    return isa == GM_ISA_SCALAR ? NULL : "x86-64";
#endif
}

static gm_status choose(const char *forced, gm_isa *out)
{
    if (!forced || !*forced) {
        gm_isa best = GM_ISA_AVX512;
        while (best != GM_ISA_SCALAR && missing_feature(best)) {
            best = (gm_isa)((int)best - 1);
        }
        *out = best;
        return GM_OK;
    }
    for (int i = 0; i < 3; i++) {
        if (strcmp(forced, names[i]) == 0) {
            const char *missing = missing_feature((gm_isa)i);
            GM_FAIL_IF(missing, GM_ERR_UNSUPPORTED,
                       "GEMINI_ISA=%s: this processor lacks %s; unset GEMINI_ISA to use the best "
                       "set that it has",
                       forced, missing);
            *out = (gm_isa)i;
            return GM_OK;
        }
    }
    return GM_FAIL(GM_ERR_ARG,
                   "GEMINI_ISA=%s is not known; use scalar, avx2 or avx512, or unset it", forced);
}

gm_status gm_isa_get(gm_isa *out)
{
    int isa = atomic_load(&chosen);
    if (isa == NOT_CHOSEN) {
        gm_isa fresh;
        GM_TRY(choose(getenv("GEMINI_ISA"), &fresh));
        isa = (int)fresh;
        atomic_store(&chosen, isa);
    }
    *out = (gm_isa)isa;
    return GM_OK;
}

gm_status gm_isa_force(const char *name)
{
    gm_isa isa;
    if (!name) {
        atomic_store(&chosen, NOT_CHOSEN);
        return GM_OK;
    }
    GM_TRY(choose(name, &isa));
    atomic_store(&chosen, (int)isa);
    return GM_OK;
}

gm_isa gm_isa_or_scalar(void)
{
    gm_isa isa;
    return gm_isa_get(&isa) == GM_OK ? isa : GM_ISA_SCALAR;
}

gm_status gm_isa_name(const char **out)
{
    gm_isa isa;
    GM_TRY(gm_isa_get(&isa));
    *out = names[isa];
    return GM_OK;
}
