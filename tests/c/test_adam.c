/* test_adam.c - every implementation of Adam, gradient addition, split and merge gives the bits of
 * the scalar reference: all formats, modes, lengths, alignments and special values. */
#include <math.h>
#include <string.h>

#include "arith/adam_impl.h"
#include "check.h"
#include "arith/format.h"

#if GM_HAS_X86
#include <immintrin.h>
#endif

enum { CAPACITY = 1 << 16, BIG = 50021, MAX_SHORT = 70 };

static uint64_t random_state = UINT64_C(0x9e3779b97f4a7c15);

static uint32_t random32(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 32);
}

/* Random bits; one in four is a special value or a tie of a bf16 or fp16 rounding. */
static uint32_t random_f32(void)
{
    static const uint32_t special[] = {
        0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007fffff, 0x00800000, 0x7f7fffff,
        0xff7fffff, 0x7f800000, 0xff800000, 0x7fc00000, 0xffc00000, 0x7f800001, 0xffffffff,
        0x7fc12345, 0x3f800000, 0xbf800000, 0x477ff000, 0x477fefff, 0x33000000, 0x33000001,
        0x387fe000, 0x38800000, 0x3f808000, 0x3f818000, 0x7f7f8000, 0x00008000, 0x7f7f7fff,
    };
    uint32_t bits = random32();
    switch (random32() % 8) {
    case 0: return special[bits % (sizeof special / sizeof *special)];
    case 1: return (bits & 0xffff0000u) | 0x8000u;
    case 2: return (bits & 0x807fffffu) | ((100u + (bits >> 8) % 50u) << 23);
    case 3: return bits & 0x807fffffu; /* denormal */
    case 4: return bits;
    default: return (bits & 0x80ffffffu) | 0x3b000000u; /* ordinary: about 0.002 .. 0.03 */
    }
}

typedef struct arrays {
    uint32_t weight[CAPACITY], low[CAPACITY], m[CAPACITY], v[CAPACITY], grad[CAPACITY];
} arrays;

static _Alignas(64) arrays start, expected, got;

static void fill(uint32_t *out, size_t words)
{
    for (size_t i = 0; i < words; i++) {
        out[i] = random_f32();
    }
}

static void fill_start(size_t words)
{
    fill(start.weight, words);
    fill(start.low, words);
    fill(start.m, words);
    fill(start.v, words);
    fill(start.grad, words);
    for (size_t i = 0; i < words; i++) {
        if (random32() % 8) {
            start.v[i] &= 0x7fffffffu; /* mostly what a variance can be; else its root is NaN */
        }
        if (random32() % 16 == 0) {
            start.v[i] = 0;
            start.grad[i] = 0;
        }
    }
}

static void copy_arrays(arrays *to, const arrays *from, size_t words)
{
    memcpy(to->weight, from->weight, words * 4);
    memcpy(to->low, from->low, words * 4);
    memcpy(to->m, from->m, words * 4);
    memcpy(to->v, from->v, words * 4);
    memcpy(to->grad, from->grad, words * 4);
}

static bool equal_arrays(const arrays *a, const arrays *b, size_t words)
{
    return memcmp(a->weight, b->weight, words * 4) == 0 && memcmp(a->low, b->low, words * 4) == 0 &&
           memcmp(a->m, b->m, words * 4) == 0 && memcmp(a->v, b->v, words * 4) == 0 &&
           memcmp(a->grad, b->grad, words * 4) == 0;
}

/* Arrays that begin `offset` elements in: every misalignment that an element allows. */
static gm_adam_args args_of(arrays *a, gm_dtype format, gm_dtype grad_dtype, size_t offset)
{
    return (gm_adam_args){
        .format = format,
        .grad_dtype = grad_dtype,
        .weight = (char *)a->weight + offset * gm_dtype_bytes(format),
        .low = format == GM_F32 ? NULL : (char *)a->low + offset * (format == GM_BF16 ? 2 : 4),
        .m = (float *)(void *)a->m + offset,
        .v = (float *)(void *)a->v + offset,
        .grad = (char *)a->grad + offset * gm_dtype_bytes(grad_dtype),
    };
}

static gm_adam_scalars scalars_of(bool adamw, bool bias_correction, double eps, int64_t step)
{
    gm_adam_hyper hyper = {.lr = 1e-3,
                           .beta1 = 0.9,
                           .beta2 = 0.999,
                           .eps = eps,
                           .weight_decay = 0.01,
                           .step = step,
                           .adamw = adamw,
                           .bias_correction = bias_correction,
                           .grad_divisor = 4.0,
                           .clip_factor = 0.75};
    gm_adam_scalars scalars;
    CHECK(gm_adam_scalars_init(&hyper, &scalars) == GM_OK);
    return scalars;
}

static void check_span(gm_adam_span_fn span, gm_dtype format, gm_dtype grad_dtype,
                       const gm_adam_scalars *scalars, size_t offset, size_t begin, size_t end)
{
    size_t words = offset + end + 16; /* what lies behind the range must stay as it was */
    copy_arrays(&expected, &start, words);
    copy_arrays(&got, &start, words);
    gm_adam_args reference = args_of(&expected, format, grad_dtype, offset);
    gm_adam_args other = args_of(&got, format, grad_dtype, offset);
    gm_adam_span_scalar(&reference, scalars, begin, end);
    span(&other, scalars, begin, end);
    CHECK(equal_arrays(&expected, &got, words));
}

/* Out of place gives the bits of in place, and leaves the old values as they were. */
static void check_from(gm_dtype format, gm_dtype grad_dtype, const gm_adam_scalars *scalars,
                       size_t first)
{
    static arrays old;
    size_t words = 9000;
    gm_adam_range range = {.begin = first, .end = 8997, .scalars = *scalars};
    copy_arrays(&expected, &start, words);
    copy_arrays(&old, &start, words);
    copy_arrays(&got, &start, words);
    memset(got.weight, 0xa5, 4 * words);
    memset(got.low, 0xa5, 4 * words);
    memset(got.m, 0xa5, 4 * words);
    memset(got.v, 0xa5, 4 * words);
    gm_adam_args args = args_of(&expected, format, grad_dtype, 0);
    args.ranges = &range;
    args.n_ranges = 1;
    CHECK(gm_adam_host(&args, NULL) == GM_OK);
    gm_adam_from from = {old.weight, old.low, (float *)(void *)old.m, (float *)(void *)old.v};
    args = args_of(&got, format, grad_dtype, 0);
    args.ranges = &range;
    args.n_ranges = 1;
    args.from = &from;
    CHECK(gm_adam_host(&args, NULL) == GM_OK);
    size_t width = gm_dtype_bytes(format), low = format == GM_F16 ? 4 : 2,
           n = range.end - range.begin;
    CHECK(!memcmp((char *)expected.weight + width * range.begin,
                  (char *)got.weight + width * range.begin, width * n));
    CHECK(format == GM_F32 || !memcmp((char *)expected.low + low * range.begin,
                                      (char *)got.low + low * range.begin, low * n));
    CHECK(!memcmp(expected.m + range.begin, got.m + range.begin, 4 * n));
    CHECK(!memcmp(expected.v + range.begin, got.v + range.begin, 4 * n));
    CHECK(((unsigned char *)got.m)[0] == 0xa5 && ((unsigned char *)got.weight)[0] == 0xa5);
    CHECK(equal_arrays(&old, &start, words));
}

static const struct {
    gm_dtype format, grad_dtype;
} kinds[] = {
    {GM_F32, GM_F32}, {GM_BF16, GM_BF16}, {GM_BF16, GM_F32}, {GM_F16, GM_F16}, {GM_F16, GM_F32}};

static void check_implementation(gm_adam_span_fn span)
{
    for (size_t kind = 0; kind < sizeof kinds / sizeof *kinds; kind++) {
        for (int mode = 0; mode < 8; mode++) {
            gm_adam_scalars scalars =
                scalars_of(mode & 1, mode & 2, mode & 4 ? 0.0 : 1e-8, 1 + mode);
            for (size_t length = 0; length <= MAX_SHORT; length++) {
                fill_start(MAX_SHORT + 80);
                check_span(span, kinds[kind].format, kinds[kind].grad_dtype, &scalars, length % 18,
                           length % 23, length % 23 + length);
            }
            for (size_t offset = 0; offset < 18; offset++) {
                fill_start(256);
                check_span(span, kinds[kind].format, kinds[kind].grad_dtype, &scalars, offset,
                           offset * 5 % 17, 200);
            }
            fill_start(CAPACITY);
            check_span(span, kinds[kind].format, kinds[kind].grad_dtype, &scalars, 3, 5, BIG);
        }
    }
}

/* Several ranges with their own scalars through the public function, with and without threads. */
static void check_ranges(gm_workers *pool)
{
    for (size_t kind = 0; kind < sizeof kinds / sizeof *kinds; kind++) {
        fill_start(CAPACITY);
        copy_arrays(&expected, &start, CAPACITY);
        copy_arrays(&got, &start, CAPACITY);
        gm_adam_range ranges[] = {
            {40000, 61001, scalars_of(true, true, 1e-8, 7)},
            {1, 1, scalars_of(true, true, 1e-8, 1)},
            {3, 77, scalars_of(false, true, 1e-8, 3)},
            {77, 39999, scalars_of(true, false, 0.0, 1)},
        };
        size_t n = sizeof ranges / sizeof *ranges;
        gm_adam_args reference = args_of(&expected, kinds[kind].format, kinds[kind].grad_dtype, 1);
        for (size_t i = 0; i < n; i++) {
            gm_adam_span_scalar(&reference, &ranges[i].scalars, ranges[i].begin, ranges[i].end);
        }
        gm_adam_args args = args_of(&got, kinds[kind].format, kinds[kind].grad_dtype, 1);
        args.ranges = ranges;
        args.n_ranges = n;
        CHECK(gm_adam_host(&args, pool) == GM_OK);
        CHECK(equal_arrays(&expected, &got, CAPACITY));
        fill_start(9000);
        for (size_t i = 0; i < 3; i++) { /* any place, one of a vector, one of a cache line */
            static const size_t begins[] = {3, 16, 64};
            check_from(kinds[kind].format, kinds[kind].grad_dtype, &ranges[2].scalars, begins[i]);
            check_from(kinds[kind].format, kinds[kind].grad_dtype, &ranges[0].scalars, begins[i]);
        }
    }
}

static void check_grad(gm_workers *pool)
{
    static const size_t lengths[] = {0, 1, 7, 8, 9, 63, 64, 65, 70, 4097, BIG};
    for (int mode = 0; mode < 18; mode++) {
        for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++) {
            gm_dtype dst = (gm_dtype)(mode % 3);
            gm_dtype src = (gm_dtype)(mode / 3 % 3);
            size_t offset = l % 5;
            fill_start(lengths[l] + 32);
            copy_arrays(&expected, &start, lengths[l] + 32);
            copy_arrays(&got, &start, lengths[l] + 32);
            gm_grad_add_args args = {.dst = (char *)expected.weight + offset * gm_dtype_bytes(dst),
                                     .src = (char *)start.grad + offset * gm_dtype_bytes(src),
                                     .dst_dtype = dst,
                                     .src_dtype = src,
                                     .numel = lengths[l],
                                     .accumulate = mode >= 9};
            CHECK(gm_isa_force("scalar") == GM_OK);
            gm_grad_add_host(&args, NULL);
            CHECK(gm_isa_force(NULL) == GM_OK);
            args.dst = (char *)got.weight + offset * gm_dtype_bytes(dst);
            gm_grad_add_host(&args, pool);
            CHECK(equal_arrays(&expected, &got, lengths[l] + 32));
        }
    }
}

static void check_split(gm_workers *pool)
{
    static const gm_dtype formats[] = {GM_F32, GM_BF16, GM_F16};
    fill_start(CAPACITY);
    for (int f = 0; f < 3; f++) {
        float *master = (float *)(void *)(start.m + 1);
        size_t low_bytes = formats[f] == GM_BF16 ? 2 : 4;
        copy_arrays(&expected, &start, CAPACITY);
        copy_arrays(&got, &start, CAPACITY);
        CHECK(gm_isa_force("scalar") == GM_OK);
        gm_split_host(formats[f], GM_F32, master,
                      (char *)expected.weight + gm_dtype_bytes(formats[f]),
                      (char *)expected.low + low_bytes, BIG, NULL);
        CHECK(gm_isa_force(NULL) == GM_OK);
        gm_split_host(formats[f], GM_F32, master, (char *)got.weight + gm_dtype_bytes(formats[f]),
                      (char *)got.low + low_bytes, BIG, pool);
        CHECK(equal_arrays(&expected, &got, CAPACITY));
        gm_merge_host(formats[f], (char *)got.weight + gm_dtype_bytes(formats[f]),
                      (char *)got.low + low_bytes, (float *)(void *)(got.v + 1), BIG, pool);
        for (size_t i = 1; i <= BIG; i++) {
            uint32_t bits = formats[f] == GM_F32 ? start.m[i] : gm_canonical_bits(start.m[i]);
            CHECK(got.v[i] == bits);
        }
        CHECK(got.v[0] == start.v[0] && got.v[BIG + 1] == start.v[BIG + 1]);
    }
}

/* Masters of 16 bits are split as their fp32 values are, with and without a place for what the weight lacks. */
static void check_split_sources(gm_workers *pool)
{
    static const gm_dtype formats[] = {GM_F32, GM_BF16, GM_F16};
    for (int f = 0; f < 9; f++) {
        gm_dtype format = formats[f / 3], source = formats[f % 3];
        fill_start(CAPACITY);
        copy_arrays(&expected, &start, CAPACITY);
        copy_arrays(&got, &start, CAPACITY);
        const char *master = (const char *)start.m + gm_dtype_bytes(source);
        for (size_t i = 0; i < BIG; i++) {
            start.v[i + 1] = gm_load_bits(master, source, i);
        }
        gm_split_host(format, GM_F32, start.v + 1, (char *)expected.weight + 2,
                      (char *)expected.low + 4, BIG, NULL);
        gm_split_host(format, source, master, (char *)got.weight + 2, (char *)got.low + 4, BIG,
                      pool);
        CHECK(equal_arrays(&expected, &got, CAPACITY));
        copy_arrays(&got, &start, CAPACITY);
        gm_split_host(format, source, master, (char *)got.weight + 2, NULL, BIG, pool);
        /* without low parts ties go to even */
        for (size_t i = 0; i < BIG && format != GM_F32; i++) {
            uint32_t bits = gm_canonical_bits(start.v[i + 1]);
            uint16_t half = format == GM_BF16 ? gm_bits_to_bf16(bits) : gm_bits_to_f16(bits);
            memcpy((char *)(void *)expected.weight + 2 + 2 * i, &half, sizeof half);
        }
        CHECK(memcmp(got.weight, expected.weight, sizeof got.weight) == 0);
    }
}

static void check_reconcile(void)
{
    uint16_t was[] = {0x3f80, 0x3f80, 0x8000, 0x7fc0};
    uint16_t is[] = {0x3f80, 0x3f81, 0x0000, 0x7fc0};
    int16_t remainder[] = {5, 5, 5, 5};
    gm_reconcile_host(GM_BF16, was, is, remainder, 4);
    CHECK(remainder[0] == 5 && remainder[1] == 0 && remainder[2] == 0 && remainder[3] == 5);
    uint16_t old_half[] = {0x3c00, 0x3c00};
    uint16_t half[] = {0x3c00, 0x0001};
    float master[] = {1.0001f, 1.0001f};
    gm_reconcile_host(GM_F16, old_half, half, master, 2);
    CHECK(master[0] == 1.0001f && master[1] == 0x1p-24f);
}

/* A bf16 weight is its master rounded to nearest, ties away from zero, and nothing is lost. */
static void check_packing(void)
{
    for (uint32_t i = 0; i < 2000000; i++) {
        uint32_t bits = i < 400000 ? random_f32() : random32();
        uint16_t hi;
        int16_t lo;
        gm_pack_bf16(bits, &hi, &lo);
        if (gm_bits_are_nan(bits)) {
            CHECK(hi == GM_BF16_NAN && lo == 0);
            continue;
        }
        CHECK(gm_merge_bf16(hi, lo) == bits);
        uint32_t down = bits & 0x7fff0000u;
        uint32_t up_if = (bits & 0xffffu) >= 0x8000u ? 0x10000u : 0u;
        CHECK(((uint32_t)hi << 16) == ((bits & 0x80000000u) | (down + up_if)));
    }
}

static void check_format(void)
{
    for (uint32_t h = 0; h < 65536; h++) {
        uint32_t bits = gm_f16_to_bits((uint16_t)h);
        bool nan = (h & 0x7fffu) > 0x7c00u;
        CHECK(gm_bits_to_f16(bits) == (nan ? GM_F16_NAN : h));
        CHECK(gm_bits_are_nan(bits) == nan);
        if (!nan && (h & 0x7fffu) < 0x7c00u) {
            double fraction = (double)(h & 0x3ffu);
            int exponent = (int)(h >> 10 & 31u);
            double value =
                exponent ? ldexp(1024.0 + fraction, exponent - 25) : ldexp(fraction, -24);
            CHECK((double)gm_f32_from_bits(bits) == (h & 0x8000u ? -value : value));
        }
    }
}

#if GM_HAS_X86
/* The processor's own conversion agrees on every fp16 boundary and on random bits. */
__attribute__((target("f16c"))) static void check_f16c(void)
{
    for (uint32_t i = 0; i < 4000000; i++) {
        uint32_t bits = random32();
        if (i < 65536 * 3) {
            uint32_t low = gm_f16_to_bits((uint16_t)(i / 3 & 0x7fff));
            uint32_t next = gm_f16_to_bits((uint16_t)((i / 3 + 1) & 0x7fff));
            bits = low + (next - low) / 2 + i % 3 - 1; /* the tie and its neighbours */
        }
        if (!gm_bits_are_nan(bits)) {
            __m128i half = _mm_cvtps_ph(_mm_castsi128_ps(_mm_set1_epi32((int)bits)),
                                        _MM_FROUND_TO_NEAREST_INT);
            CHECK((uint16_t)_mm_extract_epi16(half, 0) == gm_bits_to_f16(bits));
        }
    }
}
#endif

/* The caller's flush-to-zero and rounding mode change nothing, and come back as they were. */
static void check_environment(gm_workers *pool)
{
    gm_adam_range range = {0, 4096, scalars_of(true, true, 1e-8, 2)};
    fill_start(4096);
    for (int run = 0; run < 2; run++) {
        arrays *a = run ? &got : &expected;
        copy_arrays(a, &start, 4096);
        gm_adam_args args = args_of(a, GM_BF16, GM_BF16, 0);
        args.ranges = &range;
        args.n_ranges = 1;
        if (run) {
            fesetround(FE_UPWARD);
#if GM_HAS_X86
            _mm_setcsr(_mm_getcsr() | 0x8040u);
#endif
            range.scalars = scalars_of(true, true, 1e-8, 2);
        }
        CHECK(gm_adam_host(&args, pool) == GM_OK);
    }
    CHECK(fegetround() == FE_UPWARD);
    fesetenv(FE_DFL_ENV);
    CHECK(equal_arrays(&expected, &got, 4096));
}

static void check_refusals(void)
{
    gm_adam_hyper good = {.lr = 1e-3,
                          .beta1 = 0.9,
                          .beta2 = 0.999,
                          .eps = 1e-8,
                          .step = 1,
                          .grad_divisor = 1.0,
                          .clip_factor = 1.0};
    gm_adam_scalars scalars;
    gm_adam_hyper bad = good;
    bad.lr = -1.0;
    CHECK(gm_adam_scalars_init(&bad, &scalars) == GM_ERR_ARG);
    bad = good;
    bad.beta2 = 1.0;
    CHECK(gm_adam_scalars_init(&bad, &scalars) == GM_ERR_ARG);
    bad = good;
    bad.step = 0;
    CHECK(gm_adam_scalars_init(&bad, &scalars) == GM_ERR_ARG);
    bad = good;
    bad.grad_divisor = 0.0;
    CHECK(gm_adam_scalars_init(&bad, &scalars) == GM_ERR_ARG);
    gm_adam_args args = args_of(&got, GM_BF16, GM_F16, 0);
    CHECK(gm_adam_host(&args, NULL) == GM_ERR_ARG);
    CHECK(gm_isa_force("sse9") == GM_ERR_ARG);
}

int main(void)
{
    gm_workers *pool;
    CHECK(gm_workers_new(3, &pool) == GM_OK);
    check_format();
    check_packing();
    check_implementation(gm_adam_span_scalar);
#if GM_HAS_X86
    if (__builtin_cpu_supports("f16c")) {
        check_f16c();
    }
    if (gm_isa_force("avx2") == GM_OK) {
        check_implementation(gm_adam_span_avx2);
        check_ranges(NULL);
    }
    if (gm_isa_force("avx512") == GM_OK) {
        check_implementation(gm_adam_span_avx512);
    }
#endif
    CHECK(gm_isa_force(NULL) == GM_OK);
    check_ranges(NULL);
    check_ranges(pool);
    check_grad(NULL);
    check_grad(pool);
    check_split(NULL);
    check_split(pool);
    check_split_sources(pool);
    check_reconcile();
    check_environment(pool);
    check_refusals();
    const char *name;
    CHECK(gm_isa_name(&name) == GM_OK);
    gm_workers_free(pool);
    printf("test_adam: ok (best set: %s)\n", name);
    return 0;
}
