/* base.h - status codes, error text, checked arithmetic: what every other file may use.
 *
 * Errors.  Every fallible function returns gm_status and gives results through out-parameters,
 * last. The text is thread-local, written once at the failing site (GM_FAIL); GM_TRY passes it up
 * untouched. Nothing here exits the process; GM_ASSERT is for our own bugs only and is free in
 * release builds. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum gm_status {
    GM_OK = 0,
    GM_ERR_ARG,         /* the caller's argument is wrong                     -> ValueError */
    GM_ERR_STATE,       /* the call does not fit the present state            -> RuntimeError */
    GM_ERR_NOMEM,       /* no room; text has tier, bytes wanted and available -> MemoryError */
    GM_ERR_DEVICE,      /* the driver, the system or another rank failed -> GeminiDeviceError */
    GM_ERR_UNSUPPORTED, /* this build or machine cannot do it             -> NotImplementedError */
} gm_status;

/* Writes the thread's error text (printf style, prefixed by nothing) and returns `status`. */
gm_status gm_fail(gm_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3), cold));
/* The text of this thread's latest failure; never NULL; valid until the thread's next failure. */
const char *gm_last_error(void);

/* Whether this is still the process that `owner` is: a forked one does not have its memory. */
gm_status gm_check_process(int owner);

/* A size for people, with four digits in powers of 1000, as budgets are given: "25.77 GB".  What is
 * wanted is rounded up (gm_wanted) and what there is down (gm_there), so that the two never read
 * alike where one exceeds the other. */
typedef struct gm_size_text {
    char text[72];
} gm_size_text;
gm_size_text gm_wanted(size_t bytes);
gm_size_text gm_there(size_t bytes);

/* A parameter that a function takes for its type's sake alone. */
#define GM_UNUSED(name) unused_##name __attribute__((unused))

#define GM_FAIL(status, ...) gm_fail((status), __VA_ARGS__)
/* What a function that gives a status has to refuse: the condition, then as GM_FAIL. */
#define GM_FAIL_IF(condition, status, ...)         \
    do {                                           \
        if (condition) {                           \
            return GM_FAIL((status), __VA_ARGS__); \
        }                                          \
    } while (0)
#define GM_TRY(call)                       \
    do {                                   \
        gm_status gm_try_status_ = (call); \
        if (gm_try_status_ != GM_OK) {     \
            return gm_try_status_;         \
        }                                  \
    } while (0)
/* The same, after `undo`. */
#define GM_TRY_ELSE(call, undo)            \
    do {                                   \
        gm_status gm_try_status_ = (call); \
        if (gm_try_status_ != GM_OK) {     \
            undo;                          \
            return gm_try_status_;         \
        }                                  \
    } while (0)
#define GM_TRY_GOTO(status, label, call) \
    do {                                 \
        (status) = (call);               \
        if ((status) != GM_OK) {         \
            goto label;                  \
        }                                \
    } while (0)

#ifdef GM_DEBUG
#define GM_ASSERT(condition) \
    ((condition) ? (void)0 : gm_assert_failed(#condition, __FILE__, __LINE__))
#else
#define GM_ASSERT(condition) ((void)sizeof(condition)) /* keeps what it names in use */
#endif
/* Prints the broken invariant and aborts: a debug build must not continue with wrong state. */
void gm_assert_failed(const char *condition, const char *file, int line);

/* *(pointer) becomes an object of zeros, or the failure has the text, which has the bytes
 * wanted. */
#define GM_NEW(pointer, text) gm_new(&(pointer), sizeof *(pointer), (text))
/* Room for one more element behind the n of `array`; `capacity` (size_t) doubles where it is
 * reached, new places are zeros. The text has how many elements were wanted. */
#define GM_GROW(array, n, capacity, text) \
    gm_grow(&(array), (n), &(capacity), sizeof *(array), (text))
gm_status gm_new(void *out, size_t bytes, const char *text);
gm_status gm_grow(void *array, size_t n, size_t *capacity, size_t bytes_each, const char *text);

/* How many elements of a table begin at or below `address`: each has where it begins as its first
 * member (uintptr_t), and they ascend. */
size_t gm_up_to(const void *table, size_t n, size_t bytes_each, uintptr_t address);

/* Seconds of a clock that only goes forward. */
double gm_seconds(void);

/* FNV-1a, one 64-bit value further. */
static inline uint64_t gm_fnv1a(uint64_t hash, uint64_t value)
{
    for (int i = 0; i < 8; i++) {
        hash = (hash ^ ((value >> (8 * i)) & 0xff)) * UINT64_C(0x100000001b3);
    }
    return hash;
}

/* Rounds up to a multiple of `unit` (> 0).  The caller guarantees value + unit does not
 * overflow. */
static inline size_t gm_round_up(size_t value, size_t unit)
{
    return (value + unit - 1) / unit * unit;
}

/* Element types that the core computes with.  Values are part of the Python binding. */
typedef enum gm_dtype { GM_F32 = 0, GM_BF16 = 1, GM_F16 = 2 } gm_dtype;

static inline size_t gm_dtype_bytes(gm_dtype dtype)
{
    return dtype == GM_F32 ? 4 : 2;
}
