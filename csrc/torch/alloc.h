/* alloc.h - the raw allocator under torch's CUDA caching allocator, so that what torch takes
 * counts against the budget and chunks give way to it.
 *
 * Used as torch.cuda.memory.CUDAPluggableAllocator(path, "gm_torch_alloc", "gm_torch_free") under a
 * torch.cuda.MemPool (gemini_strategy/memory/torch_pool.py).  torch calls with the lock of its
 * caching allocator held, from whichever thread allocates; nothing here touches Python. In a build
 * without CUDA every allocation fails and the figures are 0. */
#pragma once

#include "base/base.h"

#define GM_TORCH_EXPORT __attribute__((visibility("default")))

/* Makes room for `bytes` of device memory; false: it cannot.  is_full: the budget has allowed it,
 * but the device itself has not as much left (others hold it): memory must really be given back.
 * Called with torch's lock held: it must not call torch or Python, nor wait for a lock whose holder
 * may. */
typedef bool (*gm_torch_reserve_fn)(void *context, size_t bytes, bool is_full);

/* Registers what is asked before each allocation on `device`; fn NULL: nothing is asked.
 * On return no call of the previous function is running and none will start, so its context may be
 * freed.  Hence it waits for a running call: do not hold a lock that the function takes, and do not
 * call it from the function. */
void gm_torch_alloc_set_reserve(int device, gm_torch_reserve_fn fn, void *context);

/* Bytes that torch holds through gm_torch_alloc on `device`.  Lock-free. */
GM_TORCH_EXPORT size_t gm_torch_alloc_bytes(int device);
/* The most that it held since the last call with `reset` (or the start); a reset begins anew with
 * what is held now. */
GM_TORCH_EXPORT size_t gm_torch_alloc_peak_bytes(int device, bool reset);

/* How many allocations have failed so far.  Lock-free. */
GM_TORCH_EXPORT size_t gm_torch_alloc_refusals(int device);

/* NULL when the reserve function refuses or the device is full and stays so: torch then frees what
 * it has cached, where it can, tries again, and at last raises its OutOfMemoryError.  stream is not
 * used: memory belongs to the device, and the order of its uses is the caching allocator's
 * business. */
GM_TORCH_EXPORT void *gm_torch_alloc(size_t size, int device, void *stream);
GM_TORCH_EXPORT void gm_torch_free(void *ptr, size_t size, int device, void *stream);
