/* library.c - the chaos device as a library, for engines of the core that Python tests run on (csrc/device/library.h).
 *
 * Built by tests/c/Makefile, loaded by tests/helpers/chaos.py.  What the other files here call of the core goes on to the
 * core that has the engine, through the functions below that have its names.
 *
 * 1. How devices are made, and what they have found, is of the process: gm_chaos_use says the first and forgets the
 *    second.  Any thread may call. */
#include "chaos/chaos.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "device/library.h"

#define EXPORT __attribute__((visibility("default")))

static const gm_library_calls *core; /* set before any other file here has something to call */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    char how[128];
    uint32_t series, n_devices, n_faults; /* series: how often gm_chaos_use was called */
    char first[640];
} now;

/* ---- the core's names ---- */

gm_status gm_fail(gm_status status, const char *format, ...)
{
    char text[1024];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return core->fail(status, "%s", text);
}

const char *gm_last_error(void)
{
    return core->last_error();
}

void gm_assert_failed(const char *condition, const char *file, int line)
{
    (void)fprintf(stderr, "chaos device: broken invariant at %s:%d: %s; last error: %s\n", file,
                  line, condition, gm_last_error());
    __builtin_trap();
}

gm_status gm_new(void *out, size_t bytes, const char *text)
{
    return core->new_object(out, bytes, text);
}

gm_status gm_grow(void *array, size_t n, size_t *capacity, size_t bytes_each, const char *text)
{
    return core->grow(array, n, capacity, bytes_each, text);
}

size_t gm_up_to(const void *table, size_t n, size_t bytes_each, uintptr_t address)
{
    return core->up_to(table, n, bytes_each, address);
}

gm_status gm_device_host_new(size_t block_bytes, gm_workers *pool, gm_device **out)
{
    return core->host_new(block_bytes, pool, out);
}

/* ---- what tests call ---- */

static void count(uint32_t series, const char *text)
{
    pthread_mutex_lock(&lock);
    if (series == now.series && now.n_faults++ == 0) {
        (void)snprintf(now.first, sizeof now.first, "%s", text);
    }
    pthread_mutex_unlock(&lock);
}

/* Of the devices that are made from now on, as gm_chaos_parse reads it. */
EXPORT void gm_chaos_use(const char *how)
{
    pthread_mutex_lock(&lock);
    now.series++;
    now.n_devices = now.n_faults = 0;
    now.first[0] = 0;
    (void)snprintf(now.how, sizeof now.how, "%s", how);
    pthread_mutex_unlock(&lock);
}

/* Since gm_chaos_use: devices made, faults that these have found, and the first in words, cut to `size`. */
EXPORT void gm_chaos_found(uint32_t *out_devices, uint32_t *out_faults, char *first, size_t size)
{
    pthread_mutex_lock(&lock);
    *out_devices = now.n_devices;
    *out_faults = now.n_faults;
    (void)snprintf(first, size, "%s", now.first);
    pthread_mutex_unlock(&lock);
}

/* A gm_library_device_new. */
EXPORT gm_status gm_chaos_make(const gm_library_calls *calls, size_t block_bytes, gm_workers *pool,
                               gm_device **out)
{
    gm_chaos_options options;
    pthread_mutex_lock(&lock);
    core = calls;
    gm_status status = gm_chaos_parse(now.how, &options);
    now.n_devices += status == GM_OK;
    options.series = now.series;
    options.on_fault = count;
    pthread_mutex_unlock(&lock);
    return status == GM_OK ? gm_device_chaos_new(block_bytes, pool, &options, out) : status;
}
