/* track.c - what the operations of the chaos device use, byte by byte, and whether it is ordered.
 *
 * A device address means the block that it shows when the operation is issued: two addresses on one block are the
 * same bytes.  The map `bytes` has blocks above GM_CHAOS_KEY_BLOCKS and pinned host memory at its own addresses.  The map
 * `shown` has device addresses as they are, and holds only reads: a use of an address conflicts with nothing but a
 * change of what the address shows. */
#include "chaos/chaos_impl.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FORGET_SPANS = 1024 };

static const char *const kind_names[GM_CHAOS_N_KINDS] = {
    [GM_CHAOS_COPY_H2D] = "copy_h2d",   [GM_CHAOS_COPY_D2H] = "copy_d2h",
    [GM_CHAOS_COPY_D2D] = "copy_d2d",   [GM_CHAOS_FILL] = "fill",
    [GM_CHAOS_ADAM] = "adam",           [GM_CHAOS_GRAD_ADD] = "grad_add",
    [GM_CHAOS_SUMSQ] = "sumsq",         [GM_CHAOS_CLIP] = "clip",
    [GM_CHAOS_HOST_CALL] = "host_call", [GM_CHAOS_FOREIGN] = "noted access",
    [GM_CHAOS_RECORD] = "event_record", [GM_CHAOS_WAIT] = "event_wait",
};

/* ---- address ranges ---- */

static size_t ranges_up_to(const gm_chaos_device *dev, uintptr_t address)
{
    return gm_up_to(dev->ranges, dev->n_ranges, sizeof *dev->ranges, address);
}

gm_chaos_range *gm_chaos_range_at(gm_chaos_device *dev, uintptr_t address)
{
    size_t count = ranges_up_to(dev, address);
    gm_chaos_range *range = count ? &dev->ranges[count - 1] : NULL;
    return range && address - range->address < range->bytes ? range : NULL;
}

gm_status gm_chaos_range_add(gm_chaos_device *dev, uintptr_t address, size_t bytes)
{
    size_t n_slots = (bytes + dev->base.block_bytes - 1) / dev->base.block_bytes;
    GM_TRY(GM_GROW(dev->ranges, dev->n_ranges, dev->range_capacity,
                   "host memory: no room for a table of %zu ranges"));
    gm_block *blocks = calloc(n_slots, sizeof *blocks);
    GM_FAIL_IF(!blocks, GM_ERR_NOMEM, "host memory: no room for a table of %zu blocks", n_slots);
    size_t at = ranges_up_to(dev, address);
    memmove(&dev->ranges[at + 1], &dev->ranges[at], (dev->n_ranges - at) * sizeof dev->ranges[0]);
    dev->ranges[at] = (gm_chaos_range){address, bytes, blocks};
    dev->n_ranges++;
    return GM_OK;
}

void gm_chaos_range_remove(gm_chaos_device *dev, uintptr_t address)
{
    gm_chaos_range *range = gm_chaos_range_at(dev, address);
    if (!range) {
        return;
    }
    free(range->blocks);
    size_t at = (size_t)(range - dev->ranges);
    dev->n_ranges--;
    memmove(range, range + 1, (dev->n_ranges - at) * sizeof *range);
}

bool gm_chaos_is_pinned(const gm_chaos_device *dev, uintptr_t address, size_t bytes)
{
    for (size_t i = 0; i < dev->n_pinned; i++) {
        uintptr_t offset = address - dev->pinned[i].address;
        if (offset < dev->pinned[i].bytes && bytes <= dev->pinned[i].bytes - offset) {
            return true;
        }
    }
    return false;
}

/* ---- faults in words ---- */

void gm_chaos_fault_found(gm_chaos_device *dev, const char *format, ...)
{
    char text[sizeof dev->first_fault];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (dev->n_faults++ == 0) {
        memcpy(dev->first_fault, text, sizeof text);
    }
    if (dev->options.on_fault) {
        dev->options.on_fault(dev->options.series, text);
    }
}

static const char *actor_name(const gm_chaos_device *dev, uint32_t actor, char text[32])
{
    switch (actor) {
    case GM_CHAOS_HOST: return "the host";
    case GM_CHAOS_COMPUTE: return "the compute stream";
    case GM_CHAOS_RELEASED: return "no stream";
    default:
        snprintf(text, 32, "stream %llu", (unsigned long long)dev->queues[actor].stream);
        return text;
    }
}

static void describe(const gm_chaos_device *dev, const gm_access *access, char text[128])
{
    char name[32];
    snprintf(text, 128, "%s #%llu on %s (%s %llu bytes)", access->kind,
             (unsigned long long)access->number, actor_name(dev, access->actor, name),
             access->is_write ? "writes" : "reads", (unsigned long long)access->bytes);
}

static void report(gm_chaos_device *dev, const gm_access *access, const gm_conflict *conflict)
{
    char later[128], earlier[128], place[96];
    describe(dev, access, later);
    describe(dev, &conflict->earlier, earlier);
    if (conflict->begin >= GM_CHAOS_KEY_BLOCKS) {
        uint64_t at = conflict->begin - GM_CHAOS_KEY_BLOCKS;
        snprintf(place, sizeof place, "byte %llu of block %llu",
                 (unsigned long long)(at % dev->base.block_bytes),
                 (unsigned long long)(at / dev->base.block_bytes + 1));
    } else {
        snprintf(place, sizeof place, "address %#llx", (unsigned long long)conflict->begin);
    }
    gm_chaos_fault_found(dev, "nothing orders %s behind %s: both touch %llu bytes from %s", later,
                         earlier, (unsigned long long)(conflict->end - conflict->begin), place);
}

/* ---- noting ---- */

gm_status gm_chaos_note(gm_chaos_device *dev, gm_order *order, const gm_access *access,
                        const gm_clock *clock, uint64_t begin, uint64_t end)
{
    gm_conflict conflict;
    GM_TRY(gm_order_note(order, access, clock, begin, end, &conflict));
    if (conflict.is_found) {
        report(dev, access, &conflict);
    }
    return GM_OK;
}

/* Every later operation inherits what the host knows, so what happened before that can conflict with nothing. */
static void forget_if_many(gm_chaos_device *dev)
{
    if (gm_order_n_spans(dev->bytes) + gm_order_n_spans(dev->shown) > dev->forget_at) {
        gm_order_forget(dev->bytes, &dev->queues[GM_CHAOS_HOST].clock);
        gm_order_forget(dev->shown, &dev->queues[GM_CHAOS_HOST].clock);
        dev->forget_at =
            FORGET_SPANS + 2 * (gm_order_n_spans(dev->bytes) + gm_order_n_spans(dev->shown));
    }
}

/* The bytes of a device address range, run by run of blocks that follow each other. */
static gm_status note_blocks(gm_chaos_device *dev, const gm_chaos_range *range,
                             const gm_chaos_use *use, const gm_access *access,
                             const gm_clock *clock)
{
    size_t block_bytes = dev->base.block_bytes, offset = use->address - range->address;
    size_t end = offset + use->bytes;
    for (size_t at = offset, run_end; at < end; at = run_end) {
        size_t slot = at / block_bytes;
        uint64_t key =
            GM_CHAOS_KEY_BLOCKS + (range->blocks[slot] - 1) * block_bytes + at % block_bytes;
        run_end = (slot + 1) * block_bytes;
        while (run_end < end && range->blocks[run_end / block_bytes] ==
                                    range->blocks[slot] + (run_end / block_bytes - slot)) {
            run_end += block_bytes;
        }
        run_end = run_end < end ? run_end : end;
        GM_TRY(gm_chaos_note(dev, dev->bytes, access, clock, key, key + (run_end - at)));
    }
    return GM_OK;
}

static gm_status check_shown(gm_chaos_device *dev, const gm_chaos_op *op, const gm_chaos_use *use)
{
    const gm_chaos_range *range = gm_chaos_range_at(dev, use->address);
    if (!range || use->bytes == 0) {
        return GM_OK;
    }
    size_t offset = use->address - range->address, block_bytes = dev->base.block_bytes;
    bool is_inside = use->bytes <= range->bytes - offset;
    for (size_t slot = offset / block_bytes;
         is_inside && slot <= (offset + use->bytes - 1) / block_bytes; slot++) {
        is_inside = range->blocks[slot] != 0;
    }
    if (is_inside) {
        return GM_OK;
    }
    gm_chaos_fault_found(dev, "%s #%llu uses %zu bytes at %#zx, not all of which show a block",
                         kind_names[op->kind], (unsigned long long)op->number, use->bytes,
                         (size_t)use->address);
    return GM_FAIL(GM_ERR_STATE,
                   "chaos device: %s of %zu bytes at %#zx, not all of which show a block",
                   kind_names[op->kind], use->bytes, (size_t)use->address);
}

gm_status gm_chaos_track(gm_chaos_device *dev, const gm_chaos_op *op, uint32_t actor,
                         const gm_clock *clock)
{
    for (size_t i = 0; i < op->n_uses; i++) {
        GM_TRY(check_shown(dev, op, &op->uses[i]));
    }
    for (size_t i = 0; i < op->n_uses; i++) {
        const gm_chaos_use *use = &op->uses[i];
        gm_access access = {.tick = clock->tick[actor],
                            .number = op->number,
                            .bytes = use->bytes,
                            .kind = kind_names[op->kind],
                            .actor = actor,
                            .is_write = use->is_write};
        const gm_chaos_range *range = gm_chaos_range_at(dev, use->address);
        if (range) {
            GM_TRY(note_blocks(dev, range, use, &access, clock));
            access.is_write = false;
            GM_TRY(gm_chaos_note(dev, dev->shown, &access, clock, use->address,
                                 use->address + use->bytes));
        } else if (gm_chaos_is_pinned(dev, use->address, use->bytes)) {
            GM_TRY(gm_chaos_note(dev, dev->bytes, &access, clock, use->address,
                                 use->address + use->bytes));
        }
    }
    forget_if_many(dev);
    return GM_OK;
}
