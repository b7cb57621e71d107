/* base.c - the error text of each thread, whose process this is, and how a debug build ends at a
 * broken invariant.
 *
 * 1. A thread's text changes only when that thread fails; no other thread ever writes it.
 * 2. The text is complete when gm_fail returns, also if its arguments quote the previous text. */
#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#include "base/base.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static _Thread_local char error_text[1024];

gm_status gm_fail(gm_status status, const char *format, ...)
{
    char text[sizeof error_text]; /* apart from error_text, which the arguments may quote */
    va_list args;
    va_start(args, format);
    (void)vsnprintf(text, sizeof text, format, args);
    va_end(args);
    memcpy(error_text, text, sizeof text);
    return status;
}

gm_status gm_check_process(int owner)
{
    GM_FAIL_IF(owner != getpid(), GM_ERR_STATE,
               "process %d was forked from process %d, which owns this memory; a forked process (a "
               "DataLoader worker, for example) cannot use managed parameters: copy what it needs "
               "before the fork",
               (int)getpid(), owner);
    return GM_OK;
}

static gm_size_text size_text(size_t bytes, bool is_up)
{
    static const char *const units[] = {"B", "kB", "MB", "GB", "TB", "PB", "EB"};
    gm_size_text out;
    size_t unit = 0, whole = 1; /* `whole` bytes are one of the unit */
    while (bytes / whole >= 1000) {
        whole *= 1000;
        unit++;
    }
    unsigned digits = bytes / whole >= 100 ? 1 : bytes / whole >= 10 ? 2 : 3;
    size_t step = whole; /* bytes of the last digit */
    for (unsigned i = 0; i < digits && step > 1; i++) {
        step /= 10;
    }
    size_t n = bytes / step + (is_up && bytes % step != 0);
    size_t of_unit = whole / step;
    if (of_unit == 1) {
        (void)snprintf(out.text, sizeof out.text, "%zu %s", n, units[unit]);
    } else {
        (void)snprintf(out.text, sizeof out.text, "%zu.%0*zu %s", n / of_unit, (int)digits,
                       n % of_unit, units[unit]);
    }
    return out;
}

gm_size_text gm_wanted(size_t bytes)
{
    return size_text(bytes, true);
}

gm_size_text gm_there(size_t bytes)
{
    return size_text(bytes, false);
}

const char *gm_last_error(void)
{
    return error_text;
}

void gm_assert_failed(const char *condition, const char *file, int line)
{
    (void)fprintf(stderr, "gemini: broken invariant at %s:%d: %s; last error: %s\n", file, line,
                  condition, error_text);
    abort();
}

/* `out` and `array` point to pointers to any objects, which C has no one type for. */
gm_status gm_new(void *out, size_t bytes, const char *text)
{
    void *fresh = calloc(1, bytes);
    memcpy(out, &fresh, sizeof fresh);
    return fresh ? GM_OK : GM_FAIL(GM_ERR_NOMEM, text, bytes);
}

gm_status gm_grow(void *array, size_t n, size_t *capacity, size_t bytes_each, const char *text)
{
    if (n < *capacity) {
        return GM_OK;
    }
    size_t wanted = *capacity ? 2 * *capacity : 16;
    char *grown;
    memcpy(&grown, array, sizeof grown);
    grown = realloc(grown, wanted * bytes_each);
    GM_FAIL_IF(!grown, GM_ERR_NOMEM, text, wanted);
    memset(grown + *capacity * bytes_each, 0, (wanted - *capacity) * bytes_each);
    memcpy(array, &grown, sizeof grown);
    *capacity = wanted;
    return GM_OK;
}

size_t gm_up_to(const void *table, size_t n, size_t bytes_each, uintptr_t address)
{
    size_t low = 0, high = n;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (*(const uintptr_t *)(const void *)((const char *)table + middle * bytes_each) <=
            address) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

double gm_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}
