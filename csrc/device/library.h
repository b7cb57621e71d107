/* library.h - a device that a library outside of the core makes, in place of the one of this host.
 *
 * For tests: they put a device under an engine that checks what the engine asks of it.  The library
 * is built from the same headers.  What it calls of the core it gets as a table, since the core
 * exports nothing, and since the text of an error has one home (base.h). */
#pragma once

#include "device/device.h"

typedef struct gm_library_calls {
    gm_status (*fail)(gm_status status, const char *format, ...)
        __attribute__((format(printf, 2, 3)));
    const char *(*last_error)(void);
    gm_status (*new_object)(void *out, size_t bytes, const char *text);
    gm_status (*grow)(void *array, size_t n, size_t *capacity, size_t bytes_each, const char *text);
    size_t (*up_to)(const void *table, size_t n, size_t bytes_each, uintptr_t address);
    gm_status (*host_new)(size_t block_bytes, gm_workers *pool, gm_device **out);
} gm_library_calls;

/* As gm_device_host_new.  The table lives as long as the process. */
typedef gm_status gm_library_device_new(const gm_library_calls *core, size_t block_bytes,
                                        gm_workers *pool, gm_device **out);
