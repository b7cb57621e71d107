/* ops.h - the operations of a device by name: for the table of an implementation, and to declare
 * its functions, which are named alike. */
#pragma once

#include "device/device.h"

/* X(prefix, operation) for each of a kind: what is where, what waits for what, what streams do. */
/* clang-format off */
#define GM_DEVICE_MEMORY(X, prefix)                                                              \
    X(prefix, range_new) X(prefix, range_free) X(prefix, block_new) X(prefix, block_free)        \
    X(prefix, map) X(prefix, poison) X(prefix, unmap) X(prefix, pin) X(prefix, unpin)            \
    X(prefix, memory)
#define GM_DEVICE_SYNC(X, prefix)                                                                \
    X(prefix, stream_new) X(prefix, stream_free) X(prefix, stream_sync) X(prefix, event_new)     \
    X(prefix, event_free) X(prefix, event_record) X(prefix, event_wait) X(prefix, event_sync)    \
    X(prefix, event_query) X(prefix, event_elapsed)
#define GM_DEVICE_WORK(X, prefix)                                                                \
    X(prefix, host_call) X(prefix, copy_h2d) X(prefix, copy_d2h) X(prefix, copy_d2d)             \
    X(prefix, fill) X(prefix, adam) X(prefix, grad_add) X(prefix, sumsq) X(prefix, clip)
/* clang-format on */

/* Its declaration, and PREFIX_OPERATION in the table of operations. */
#define GM_DEVICE_DECLARED(prefix, operation) \
    __typeof__(*((gm_device_ops *)0)->operation) prefix##_##operation;
#define GM_DEVICE_ENTRY(prefix, operation) .operation = prefix##_##operation,
/* A table: NAME_free, and each kind by its prefix. */
#define GM_DEVICE_OPS(name_, memory, sync, work)                                    \
    .name = #name_, .free = name_##_free,                                           \
    GM_DEVICE_MEMORY(GM_DEVICE_ENTRY, memory) GM_DEVICE_SYNC(GM_DEVICE_ENTRY, sync) \
        GM_DEVICE_WORK(GM_DEVICE_ENTRY, work)
