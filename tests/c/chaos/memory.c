/* memory.c - the chaos device's ranges, blocks and mappings: the inner device's, watched.
 *
 * 1. The table of ranges says what the inner device maps: an address shows blocks[i], or nothing.
 * 2. A new block is poisoned, so that nobody relies on the zeros that fresh pages happen to hold.
 * 3. Before memory is shown elsewhere or given back, it is claimed: what may still use it is a fault. */
#include "chaos/chaos_impl.h"

#include <string.h>

enum { POISON_BYTE = 0xeb };

gm_status gm_chaos_check_owner(gm_chaos_device *dev)
{
    GM_ASSERT(!dev->is_running); /* a function of host_call has called the device */
    return dev->inner->ops->stream_sync(dev->inner, 0);
}

gm_status gm_chaos_range_new(gm_device *base, size_t bytes, uintptr_t *out)
{
    gm_chaos_device *dev = gm_chaos_self(base);
    uintptr_t address;
    GM_TRY(dev->inner->ops->range_new(dev->inner, bytes, &address));
    GM_TRY_ELSE(gm_chaos_range_add(dev, address, bytes),
                dev->inner->ops->range_free(dev->inner, address, bytes));
    *out = address;
    return GM_OK;
}

void gm_chaos_range_free(gm_device *base, uintptr_t address, size_t bytes)
{
    gm_chaos_device *dev = gm_chaos_self(base);
    if (gm_chaos_check_owner(dev) == GM_OK) {
        (void)gm_chaos_claim(dev, dev->shown, "range_free", address, bytes);
    }
    gm_chaos_range_remove(dev, address);
    dev->inner->ops->range_free(dev->inner, address, bytes);
}

gm_status gm_chaos_block_new(gm_device *base, gm_block *out)
{
    gm_device *inner = gm_chaos_self(base)->inner;
    gm_block block;
    GM_TRY(inner->ops->block_new(inner, &block));
    gm_status status = inner->ops->map(inner, gm_chaos_self(base)->view, &block, 1);
    if (status == GM_OK) {
        memset((void *)gm_chaos_self(base)->view, POISON_BYTE, base->block_bytes);
        status = inner->ops->unmap(inner, gm_chaos_self(base)->view, 1);
    }
    GM_TRY_ELSE(status, inner->ops->block_free(inner, block));
    *out = block;
    return GM_OK;
}

void gm_chaos_block_free(gm_device *base, gm_block block)
{
    gm_chaos_device *dev = gm_chaos_self(base);
    if (gm_chaos_check_owner(dev) == GM_OK) {
        (void)gm_chaos_claim(dev, dev->bytes, "block_free",
                             GM_CHAOS_KEY_BLOCKS + (block - 1) * base->block_bytes,
                             base->block_bytes);
        for (size_t i = 0; i < dev->n_ranges; i++) {
            const gm_chaos_range *range = &dev->ranges[i];
            for (size_t slot = 0; slot < range->bytes / base->block_bytes; slot++) {
                if (range->blocks[slot] == block) {
                    uintptr_t at = range->address + slot * base->block_bytes;
                    gm_chaos_fault_found(dev, "block_free of block %llu, which address %#zx shows",
                                         (unsigned long long)block, (size_t)at);
                    (void)dev->inner->ops->poison(dev->inner, at, 1);
                    range->blocks[slot] = 0;
                }
            }
        }
    }
    dev->inner->ops->block_free(dev->inner, block);
}

/* What the table says afterwards; blocks NULL: nothing. */
static void set_shown(gm_chaos_device *dev, uintptr_t address, const gm_block *blocks, size_t n)
{
    const gm_chaos_range *range = n ? gm_chaos_range_at(dev, address) : NULL;
    for (size_t i = 0; range && i < n; i++) {
        size_t slot = (address - range->address) / dev->base.block_bytes + i;
        range->blocks[slot] = blocks ? blocks[i] : 0;
    }
}

/* The addresses may show something else now.  Part of a block's worth of them cannot be told apart here, so mappings
 * start at whole ones. */
static gm_status claim_slots(gm_chaos_device *dev, const char *what, uintptr_t address, size_t n)
{
    GM_TRY(gm_chaos_check_owner(dev));
    const gm_chaos_range *range = n ? gm_chaos_range_at(dev, address) : NULL;
    GM_FAIL_IF(n && (!range || (address - range->address) % dev->base.block_bytes != 0), GM_ERR_ARG,
               "chaos device: %zu blocks at %#zx do not start at a block of a range", n,
               (size_t)address);
    return gm_chaos_claim(dev, dev->shown, what, address, n * dev->base.block_bytes);
}

gm_status gm_chaos_map(gm_device *base, uintptr_t address, const gm_block *blocks, size_t n)
{
    gm_chaos_device *dev = gm_chaos_self(base);
    GM_TRY(claim_slots(dev, "map", address, n));
    GM_TRY(dev->inner->ops->map(dev->inner, address, blocks, n));
    set_shown(dev, address, blocks, n);
    return GM_OK;
}

gm_status gm_chaos_poison(gm_device *base, uintptr_t address, size_t n)
{
    gm_chaos_device *dev = gm_chaos_self(base);
    GM_TRY(claim_slots(dev, "poison", address, n));
    GM_TRY(dev->inner->ops->poison(dev->inner, address, n));
    set_shown(dev, address, NULL, n);
    return GM_OK;
}

gm_status gm_chaos_unmap(gm_device *base, uintptr_t address, size_t n)
{
    gm_chaos_device *dev = gm_chaos_self(base);
    GM_TRY(claim_slots(dev, "unmap", address, n));
    GM_TRY(dev->inner->ops->unmap(dev->inner, address, n));
    set_shown(dev, address, NULL, n);
    return GM_OK;
}

gm_status gm_chaos_pin(gm_device *base, void *region, size_t bytes)
{
    gm_chaos_device *dev = gm_chaos_self(base);
    GM_TRY(gm_chaos_check_owner(dev));
    GM_TRY(GM_GROW(dev->pinned, dev->n_pinned, dev->pinned_capacity,
                   "host memory: no room for a table of %zu regions"));
    GM_TRY(dev->inner->ops->pin(dev->inner, region, bytes));
    dev->pinned[dev->n_pinned++] = (gm_chaos_use){(uintptr_t)region, bytes, false};
    return GM_OK;
}

void gm_chaos_unpin(gm_device *base, void *region)
{
    gm_chaos_device *dev = gm_chaos_self(base);
    for (size_t i = 0; i < dev->n_pinned; i++) {
        if (dev->pinned[i].address == (uintptr_t)region) {
            if (gm_chaos_check_owner(dev) == GM_OK) {
                (void)gm_chaos_claim(dev, dev->bytes, "unpin", dev->pinned[i].address,
                                     dev->pinned[i].bytes);
            }
            dev->pinned[i] = dev->pinned[--dev->n_pinned];
            break;
        }
    }
    dev->inner->ops->unpin(dev->inner, region);
}

gm_status gm_chaos_memory(gm_device *base, size_t *free_bytes, size_t *total_bytes)
{
    gm_device *inner = gm_chaos_self(base)->inner;
    return inner->ops->memory(inner, free_bytes, total_bytes);
}
