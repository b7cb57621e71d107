/* unit.c - entering and leaving units, and the chunks that backward nodes touch. */
#include "engine/engine_impl.h"

#include <stdlib.h>

gm_status gm_unit_new(gm_engine *engine)
{
    size_t n = (size_t)gm_layout_n_chunks(engine->layout) + 1;
    engine->unit.touched = calloc(n, sizeof *engine->unit.touched);
    engine->unit.is_touched = calloc(n, sizeof *engine->unit.is_touched);
    return engine->unit.touched && engine->unit.is_touched
               ? GM_OK
               : GM_FAIL(GM_ERR_NOMEM, "HOST: table of %zu chunks", n - 1);
}

void gm_unit_free(gm_engine *engine)
{
    free(engine->unit.touched);
    free(engine->unit.is_touched);
}

static gm_status check_unit(const gm_engine *engine, uint32_t unit)
{
    return unit < engine->n_units ? GM_OK : GM_FAIL(GM_ERR_ARG, "unit %u does not exist", unit);
}

/* Leases want to know since when the open pass uses the chunk. */
static void note_taken(gm_engine *engine, uint32_t chunk)
{
    gm_chunk_state *state = &engine->chunk_states[chunk];
    state->tick = engine->pass.tick;
    state->first_tick = state->first_tick == GM_NO_TICK ? engine->pass.tick : state->first_tick;
}

static gm_status pin_unit(gm_engine *engine, uint32_t unit, gm_stream stream, bool in_backward)
{
    gm_status status = GM_OK;
    uint32_t i = engine->unit_begin[unit];
    for (; i < engine->unit_begin[unit + 1] && status == GM_OK; i++) {
        uint32_t chunk = engine->unit_chunks[i];
        status = in_backward ? gm_update_check_reuse(engine, chunk)
                             : gm_update_check_between(engine, chunk);
        status = status == GM_OK ? gm_weights_pin(engine, chunk, stream, true) : status;
        note_taken(engine, chunk);
    }
    if (status != GM_OK) { /* all or nothing; the first error's text is what counts */
        for (i--; i-- > engine->unit_begin[unit];) {
            uint32_t chunk = engine->unit_chunks[i];
            (void)gm_weights_unpin_for_retry(engine, chunk, stream);
        }
    }
    return status;
}

gm_status gm_engine_enter(gm_engine *engine, uint32_t unit, gm_stream stream, uint32_t flags)
{
    GM_TRY(check_unit(engine, unit));
    GM_TRY(gm_pass_begin_call(engine, stream));
    gm_status status = gm_pass_enter(engine, unit, stream, flags);
    bool has_tick = status == GM_OK;
    if (status == GM_OK) {
        status = pin_unit(engine, unit, stream, (flags & GM_ENTER_IN_BACKWARD) != 0);
    }
    gm_pass_note_refusal(engine, GM_TICK_ENTER, unit, has_tick, status);
    if (status == GM_OK) {
        engine->unit.n_entered++;
        gm_timer_start(engine, stream);
    }
    return gm_pass_end_call(engine, status);
}

gm_status gm_engine_leave(gm_engine *engine, uint32_t unit, gm_stream stream)
{
    GM_TRY(check_unit(engine, unit));
    GM_TRY(gm_pass_begin_call(engine, stream));
    gm_status status = GM_OK;
    for (uint32_t i = engine->unit_begin[unit]; i < engine->unit_begin[unit + 1]; i++) {
        gm_status one = gm_weights_unpin(engine, engine->unit_chunks[i], stream, true);
        status = status == GM_OK ? one : status;
    }
    engine->unit.n_entered -= engine->unit.n_entered > 0;
    gm_book_release(engine->pass.book, engine->pass.unit_tick[unit]);
    return gm_pass_end_call(engine, status);
}

/* The pin is there; it comes to end on this stream, behind the readers that it had on others. */
static gm_status touch_again(gm_engine *engine, uint32_t chunk, gm_stream stream)
{
    gm_touch *touch = &engine->unit.touched[engine->unit.n_touched - 1];
    while (touch->chunk != chunk) {
        touch--;
    }
    if (touch->stream != stream) {
        GM_TRY(gm_chunks_note_readers(engine->chunks, chunk, engine->shown, touch->stream));
        touch->stream = stream;
    }
    return gm_chunks_wait_ready(engine->chunks, chunk, engine->shown, stream);
}

static gm_status touch(gm_engine *engine, uintptr_t address, gm_stream stream)
{
    uint32_t chunk = gm_chunks_at(engine->chunks, address);
    GM_FAIL_IF(chunk == UINT32_MAX, GM_ERR_ARG, "no chunk shows address %#zx", (size_t)address);
    GM_TRY(gm_update_check_reuse(engine, chunk));
    if (engine->unit.is_touched[chunk]) {
        return touch_again(engine, chunk, stream);
    }
    gm_status status = gm_pass_tick(engine, GM_TICK_TOUCH, chunk, stream);
    bool has_tick = status == GM_OK;
    status = status == GM_OK ? gm_weights_pin(engine, chunk, stream, true) : status;
    gm_pass_note_refusal(engine, GM_TICK_TOUCH, chunk, has_tick, status);
    GM_TRY(status);
    engine->unit.is_touched[chunk] = true;
    note_taken(engine, chunk);
    engine->unit.touched[engine->unit.n_touched++] = (gm_touch){chunk, engine->pass.tick, stream};
    gm_timer_start(engine, stream);
    return GM_OK;
}

gm_status gm_engine_touch(gm_engine *engine, uintptr_t address, gm_stream stream)
{
    GM_TRY(gm_pass_begin_call(engine, stream));
    return gm_pass_end_call(engine, touch(engine, address, stream));
}

uint32_t gm_engine_n_touched(const gm_engine *engine)
{
    return engine->unit.n_touched;
}

gm_status gm_engine_release_touched(gm_engine *engine, uint32_t n_keep)
{
    GM_TRY(gm_call_begin(engine));
    gm_status status = GM_OK;
    while (engine->unit.n_touched > n_keep) {
        const gm_touch *touch = &engine->unit.touched[--engine->unit.n_touched];
        engine->unit.is_touched[touch->chunk] = false;
        gm_book_release(engine->pass.book, touch->tick);
        gm_status one = gm_weights_unpin(engine, touch->chunk, touch->stream, true);
        status = status == GM_OK ? one : status;
    }
    return gm_call_end(engine, status);
}
