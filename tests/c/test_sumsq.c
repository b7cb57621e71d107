/* test_sumsq.c - the exact sum of squares: every path gives the same bytes for every split, order,
 * dtype and range of exponents, and the rounding to double is right. */
#include <math.h>
#include <string.h>

#include "arith/adam_impl.h"
#include "check.h"
#include "arith/format.h"
#include "arith/sumsq_impl.h"

enum { CAPACITY = 40000 };

static uint32_t data[CAPACITY];
static uint64_t random_state = UINT64_C(0x2545f4914f6cdd1d);

static uint32_t random32(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 32);
}

/* fp32 bits with exponent field in [least, least + spread). */
static void fill_f32(uint32_t least, uint32_t spread)
{
    for (size_t i = 0; i < CAPACITY; i++) {
        data[i] = (random32() & 0x807fffffu) | ((least + random32() % spread) << 23);
    }
}

static gm_sumsq sum_of(const void *at, gm_dtype dtype, size_t numel, const char *isa,
                       gm_workers *pool)
{
    gm_sumsq sum = {.n_inf = 0};
    CHECK(gm_isa_force(isa) == GM_OK);
    gm_sumsq_host(at, dtype, numel, &sum, pool);
    CHECK(gm_isa_force(NULL) == GM_OK);
    return sum;
}

static bool equal(const gm_sumsq *a, const gm_sumsq *b)
{
    return memcmp(a, b, sizeof *a) == 0;
}

/* All paths against the scalar reference on what `data` holds. */
static void check_paths(gm_dtype dtype, gm_workers *pool)
{
    size_t offset = 3 * gm_dtype_bytes(dtype);
    const char *at = (const char *)data + offset;
    size_t numel = CAPACITY - 8;
    gm_sumsq reference = sum_of(at, dtype, numel, "scalar", NULL);
    gm_sumsq best = sum_of(at, dtype, numel, NULL, NULL);
    gm_sumsq threads = sum_of(at, dtype, numel, NULL, pool);
    CHECK(equal(&reference, &best));
    CHECK(equal(&reference, &threads));
    gm_sumsq parts = {.n_inf = 0};
    for (size_t i = 0; i < numel;) {
        size_t n = 1 + random32() % 9000;
        n = n < numel - i ? n : numel - i;
        gm_sumsq part = sum_of(at + i * gm_dtype_bytes(dtype), dtype, n, NULL, NULL);
        gm_sumsq_merge(&parts, &part);
        i += n;
    }
    CHECK(equal(&reference, &parts));
}

static void check_ranges_of_exponents(gm_workers *pool)
{
    static const struct {
        uint32_t least, spread;
    } fills[] = {{0, 1},    {0, 2},    {0, 20},   {0, 255},  {254, 1},  {230, 25}, {127, 1},
                 {110, 17}, {110, 19}, {100, 22}, {100, 40}, {60, 100}, {19, 3},   {21, 30}};
    for (size_t i = 0; i < sizeof fills / sizeof *fills; i++) {
        fill_f32(fills[i].least, fills[i].spread);
        check_paths(GM_F32, pool);
        check_paths(GM_BF16,
                    pool); /* the same bits read as other formats: infinities and NaNs too */
        check_paths(GM_F16, pool);
    }
    /* few elements far below the others: they are set aside */
    for (size_t many = 1; many <= 4096; many *= 4) {
        fill_f32(120, 4);
        for (size_t i = 0; i < CAPACITY; i += many) {
            data[i] = random32() & 0x83ffffffu;
        }
        check_paths(GM_F32, pool);
    }
    /* the largest magnitude in every place fills a band to its bound */
    for (size_t i = 0; i < CAPACITY; i++) {
        data[i] = 0x7f7fffffu;
    }
    check_paths(GM_F32, pool);
    memset(data, 0, sizeof data);
    check_paths(GM_F32, pool);
    CHECK(gm_sumsq_value(&(gm_sumsq){.n_inf = 0}) == 0.0);
}

static void check_non_finite(void)
{
    fill_f32(120, 4);
    data[5] = 0x7f800000u;
    data[4000] = 0xff800000u;
    gm_sumsq sum = sum_of(data, GM_F32, CAPACITY, NULL, NULL);
    CHECK(sum.n_inf == 2 && sum.n_nan == 0 && isinf(gm_sumsq_value(&sum)));
    data[9000] = 0xffc00001u;
    sum = sum_of(data, GM_F32, CAPACITY, NULL, NULL);
    CHECK(sum.n_inf == 2 && sum.n_nan == 1 && isnan(gm_sumsq_value(&sum)));
}

/* Carries that a device left pending, up to full 64-bit limbs. */
static void check_pending_carries(void)
{
    gm_sumsq full = {.n_inf = 0};
    for (int i = 0; i < GM_SUMSQ_LIMBS - 4; i++) {
        full.limb[i] = UINT64_MAX;
    }
    gm_sumsq twice = full;
    gm_sumsq_merge(&twice, &full);
    /* the sum is (2^64 - 1) * sum of 2^(32 i - 298): top digit 2^(32 * 15) scaled by 2^64 */
    double one = 0.0;
    for (int i = GM_SUMSQ_LIMBS - 5; i >= 0; i--) {
        one += ldexp(18446744073709551615.0, 32 * i + GM_SUMSQ_LEAST);
    }
    CHECK(fabs(gm_sumsq_value(&full) / one - 1.0) < 1e-15);
    CHECK(gm_sumsq_value(&twice) == 2.0 * gm_sumsq_value(&full));
    for (int i = 0; i < GM_SUMSQ_LIMBS; i++) {
        CHECK(twice.limb[i] <= UINT32_MAX);
    }
}

static gm_sumsq of_bits(int position, uint64_t value)
{
    gm_sumsq sum = {.n_inf = 0};
    gm_sumsq_acc acc = {.deposits = 0};
    gm_sumsq_deposit(&acc, (unsigned)position, value, false);
    for (int i = 0; i < GM_SUMSQ_LIMBS; i++) {
        sum.limb[i] = (uint64_t)acc.limb[i];
    }
    return sum;
}

/* One bit below or above a tie decides, however far below it lies. */
static void check_rounding(void)
{
    for (int position = 0; position + 120 < 32 * GM_SUMSQ_LIMBS - 64; position++) {
        gm_sumsq tie = of_bits(position + 60, (UINT64_C(1) << 53) | 1u); /* half a unit over 2^53 */
        double down = ldexp(1.0, position + 113 + GM_SUMSQ_LEAST);
        CHECK(gm_sumsq_value(&tie) == down);
        gm_sumsq above = tie;
        gm_sumsq least = of_bits(position % 60, 1);
        gm_sumsq_merge(&above, &least);
        CHECK(gm_sumsq_value(&above) == nextafter(down, INFINITY));
        gm_sumsq odd = of_bits(position + 60, (UINT64_C(1) << 53) | 3u);
        CHECK(gm_sumsq_value(&odd) == down + ldexp(4.0, position + 60 + GM_SUMSQ_LEAST));
    }
    CHECK(gm_sumsq_value(&(gm_sumsq){.limb = {1}}) == 0x1p-298);
}

/* The factor of a clip is torch's formula, in double, of the sum of all sums. */
static void check_clip(void)
{
    gm_sumsq sums[3] = {sum_of(data, GM_F32, 1000, "scalar", NULL),
                        sum_of(data, GM_F32, 7, "scalar", NULL),
                        {.n_inf = 0}};
    gm_sumsq all = sums[0];
    gm_sumsq_merge(&all, &sums[1]);
    const double norm = sqrt(gm_sumsq_value(&all)), limits[] = {0, norm / 3, norm, 2 * norm};
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        gm_clip clip;
        float shown;
        gm_clip_host(&(gm_clip_args){sums, 3, limits[i], &clip, &shown, NULL});
        double factor = limits[i] / (norm + 1e-6);
        factor = factor > 1 ? 1 : factor;
        CHECK(clip.factor == factor && clip.scale == (float)factor && shown == (float)norm);
    }
    gm_clip clip;
    float shown;
    gm_sumsq pending = all, total;
    for (int i = 0; i + 1 < GM_SUMSQ_LIMBS && pending.limb[i + 1] > 0; i++) {
        pending.limb[i + 1]--;
        pending.limb[i] += UINT64_C(1) << 32;
    }
    gm_clip_host(&(gm_clip_args){.sums = &pending, .n = 1, .total = &total});
    CHECK(memcmp(&total, &all, sizeof all) == 0);
    sums[2].n_inf = 1;
    gm_clip_host(&(gm_clip_args){sums, 3, 1, &clip, &shown, NULL});
    CHECK(clip.factor == 0 && clip.scale == 0 && isinf(shown));
    sums[1].n_nan = 1;
    gm_clip_host(&(gm_clip_args){sums, 3, 1, &clip, &shown, NULL});
    uint32_t bits;
    memcpy(&bits, &shown, sizeof bits);
    CHECK(isnan(clip.factor) && isnan(clip.scale) && bits == 0x7fc00000u);
    gm_clip_host(&(gm_clip_args){NULL, 0, 1, &clip, NULL, NULL});
    CHECK(clip.factor == 1 && clip.scale == 1);
}

int main(void)
{
    gm_workers *pool;
    CHECK(gm_workers_new(3, &pool) == GM_OK);
    check_ranges_of_exponents(NULL);
    check_ranges_of_exponents(pool);
    check_non_finite();
    check_pending_carries();
    check_rounding();
    fill_f32(100, 30);
    check_clip();
    gm_workers_free(pool);
    printf("test_sumsq: ok\n");
    return 0;
}
