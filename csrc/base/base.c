/* base.c - the error text of each thread, and how a debug build ends at a broken invariant.
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

double gm_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}
