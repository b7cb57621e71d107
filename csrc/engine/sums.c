/* sums.c - the small numbers on the device: of each parameter the exact sum of squares of its gradient, one place for the
 * sum over ranks, and a few through which ranks tell each other numbers (ranks.c); and all of them again on the host. */
#include "engine/engine_impl.h"

#include <stdlib.h>

gm_status gm_sums_new(gm_engine *engine)
{
    gm_device *device = engine->device;
    size_t bytes = gm_sums_bytes(engine);
    if (device->is_host) {
        engine->sums = calloc(1, bytes);
        engine->sums_home = engine->sums;
        return engine->sums ? GM_OK : GM_FAIL(GM_ERR_NOMEM, "HOST: %zu bytes of sums", bytes);
    }
    size_t n = gm_round_up(bytes, device->block_bytes) / device->block_bytes;
    uintptr_t address;
    engine->sums_blocks = calloc(n, sizeof *engine->sums_blocks);
    if (!engine->sums_blocks) {
        return GM_FAIL(GM_ERR_NOMEM, "HOST: %zu blocks of sums", n);
    }
    GM_TRY(device->ops->range_new(device, n * device->block_bytes, &address));
    engine->sums = (gm_sumsq *)address;
    for (; engine->n_sums_blocks < n; engine->n_sums_blocks++) {
        GM_TRY(device->ops->block_new(device, &engine->sums_blocks[engine->n_sums_blocks]));
    }
    return device->ops->map(device, address, engine->sums_blocks, n);
}

void gm_sums_free(gm_engine *engine)
{
    gm_device *device = engine->device;
    if (device && device->is_host) {
        free(engine->sums);
        return;
    }
    size_t n = gm_round_up(gm_sums_bytes(engine), device ? device->block_bytes : 1);
    if (engine->sums) {
        device->ops->range_free(device, (uintptr_t)engine->sums, n);
    }
    for (size_t i = 0; i < engine->n_sums_blocks; i++) {
        device->ops->block_free(device, engine->sums_blocks[i]);
    }
    free(engine->sums_blocks);
}
