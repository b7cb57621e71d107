/* claim.c - taking memory away: nothing that uses it may be under way. */
#include "device/chaos/chaos_impl.h"

static gm_status claim(gm_chaos_device *dev, gm_order *order, const char *what, uint64_t begin,
                       uint64_t end)
{
    for (uint32_t i = GM_CHAOS_FIRST_STREAM; i < GM_CHAOS_N_QUEUES; i++) {
        GM_TRY(gm_chaos_put_held(dev, &dev->queues[i]));
    }
    gm_clock *clock = &dev->queues[GM_CHAOS_HOST].clock;
    gm_access access = {.tick = ++clock->tick[GM_CHAOS_HOST],
                        .number = ++dev->last_number,
                        .bytes = end - begin,
                        .kind = what,
                        .actor = GM_CHAOS_HOST,
                        .is_write = true};
    uint32_t n_before = dev->n_faults;
    GM_TRY(gm_chaos_note(dev, order, &access, clock, begin, end));
    if (dev->n_faults >
        n_before) { /* found; what is queued must not run into memory that is gone */
        gm_chaos_run_all(dev);
    }
    return GM_OK;
}

gm_status gm_chaos_claim_range(gm_chaos_device *dev, const char *what, uintptr_t address,
                               size_t bytes)
{
    return claim(dev, dev->shown, what, address, address + bytes);
}

gm_status gm_chaos_claim_block(gm_chaos_device *dev, const char *what, gm_block block)
{
    uint64_t key = GM_CHAOS_KEY_BLOCKS + (block - 1) * dev->base.block_bytes;
    return claim(dev, dev->bytes, what, key, key + dev->base.block_bytes);
}

gm_status gm_chaos_claim_host(gm_chaos_device *dev, const char *what, uintptr_t address,
                              size_t bytes)
{
    return claim(dev, dev->bytes, what, address, address + bytes);
}
