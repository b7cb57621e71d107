/* sums.c - the small numbers on the device: of each parameter the exact sum of squares of its
 * gradient, one for gradients at home, the total, and a few through which ranks tell each other
 * numbers (ranks.c); and all of them again on the host. */
#include "engine/engine_impl.h"

#include <stdlib.h>

gm_status gm_sums_new(gm_engine *engine)
{
    gm_device *device = engine->device;
    size_t bytes = gm_sums_bytes(engine);
    if (device->is_host || device->is_paper) {
        GM_TRY(gm_new(&engine->sums.home, bytes, "HOST: %zu bytes of sums"));
    }
    if (device->is_host) {
        engine->sums.there = engine->sums.home;
        return device->ops->pin(device, engine->sums.home, bytes);
    }
    size_t n = gm_round_up(bytes, device->block_bytes) / device->block_bytes;
    uintptr_t address;
    engine->sums.blocks = calloc(n, sizeof *engine->sums.blocks);
    GM_FAIL_IF(!engine->sums.blocks, GM_ERR_NOMEM, "HOST: %zu blocks of sums", n);
    GM_TRY(device->ops->range_new(device, n * device->block_bytes, &address));
    engine->sums.there = (gm_sumsq *)address;
    for (; engine->sums.n_blocks < n; engine->sums.n_blocks++) {
        GM_TRY(device->ops->block_new(device, &engine->sums.blocks[engine->sums.n_blocks]));
    }
    return device->ops->map(device, address, engine->sums.blocks, n);
}

void gm_sums_place_home(gm_engine *engine, void *home)
{
    if (!engine->device->is_paper) { /* whose homes have no bytes: these have their own */
        engine->sums.home = home;
    }
}

void gm_sums_free(gm_engine *engine)
{
    gm_device *device = engine->device;
    if (device && device->is_host && engine->sums.there) {
        device->ops->unpin(device, engine->sums.home);
    }
    if (device && (device->is_host || device->is_paper)) {
        free(engine->sums.home);
    }
    if (device && device->is_host) {
        return;
    }
    size_t n = gm_round_up(gm_sums_bytes(engine), device ? device->block_bytes : 1);
    if (engine->sums.there) {
        device->ops->range_free(device, (uintptr_t)engine->sums.there, n);
    }
    for (size_t i = 0; i < engine->sums.n_blocks; i++) {
        device->ops->block_free(device, engine->sums.blocks[i]);
    }
    free(engine->sums.blocks);
}
