/* access.c - reading and writing the fields of one parameter from outside.  All calls may wait for
 * the device. */
#include "engine/engine_impl.h"

#include <stdlib.h>
#include <string.h>

static gm_status check_field(const gm_engine *engine, uint32_t id, gm_field field)
{
    const gm_param *p = &engine->params[id];
    bool is_moment = field == GM_FIELD_M || field == GM_FIELD_V;
    GM_FAIL_IF((is_moment && !p->spec.has_moments) ||
                   (field == GM_FIELD_GRAD && !p->spec.has_grad) ||
                   (field == GM_FIELD_LOW && !p->spec.has_low),
               GM_ERR_STATE, "%s has no %s", gm_engine_name(engine, id),
               is_moment               ? "moments"
               : field == GM_FIELD_LOW ? "low part"
                                       : "gradient");
    return GM_OK;
}

/* Of elements [first, first + n) those that this rank has; begin counts in its part. */
typedef struct span {
    uint64_t begin, n, skip; /* skip: of what was asked for, before them */
} span;

static gm_status span_of(const gm_engine *engine, uint32_t id, uint64_t first, uint64_t n,
                         span *out)
{
    const gm_param *p = &engine->params[id];
    GM_FAIL_IF(first > p->spec.numel || n > p->spec.numel - first, GM_ERR_ARG,
               "elements %llu to %llu of %s, which has %llu of them", (unsigned long long)first,
               (unsigned long long)(first + n), gm_engine_name(engine, id),
               (unsigned long long)p->spec.numel);
    uint64_t part_end = p->part_first + p->part_numel;
    uint64_t begin = first > p->part_first ? first : p->part_first;
    uint64_t end = first + n < part_end ? first + n : part_end;
    *out =
        begin < end ? (span){begin - p->part_first, end - begin, begin - first} : (span){0, 0, 0};
    return GM_OK;
}

gm_status gm_engine_read(gm_engine *engine, uint32_t id, gm_field field, uint64_t first, uint64_t n,
                         void *dst)
{
    GM_TRY(gm_engine_check_param(engine, id));
    const gm_param *p = &engine->params[id];
    GM_TRY(check_field(engine, id, field));
    span part = {0};
    GM_TRY(span_of(engine, id, first, n, &part));
    GM_TRY(gm_call_begin(engine));
    gm_status status = field == GM_FIELD_GRAD ? gm_gradient_check_unused(engine, id) : GM_OK;
    status = status == GM_OK ? gm_update_check_between(engine, p->place.chunk) : status;
    if (status == GM_OK && (field != GM_FIELD_GRAD || gm_is_opaque(engine))) {
        status = gm_watch_poll(engine);
        status = status == GM_OK ? gm_glance_settle(engine) : status;
        status = status == GM_OK ? gm_update_issue(engine, p->place.chunk) : status;
    }
    if (status == GM_OK && field == GM_FIELD_GRAD) {
        status = gm_gradient_reduce(engine, p->place.chunk);
    }
    if (status == GM_OK && part.n > 0) {
        uint8_t *to = (uint8_t *)dst + part.skip * gm_field_width(engine, p, field);
        status = gm_field_read(engine, p, field, part.begin, part.n, to);
        status = status == GM_OK ? gm_ranks_check(engine) : status;
    }
    return gm_call_end(engine, status);
}

static gm_status begin_write(gm_engine *engine, uint32_t chunk)
{
    GM_TRY(gm_update_check_between(engine, chunk));
    GM_TRY(gm_watch_poll(engine));
    return gm_update_issue(engine, chunk);
}

gm_status gm_engine_write(gm_engine *engine, uint32_t id, gm_field field, const void *src,
                          gm_stream stream)
{
    GM_TRY(gm_engine_check_param(engine, id));
    gm_param *p = &engine->params[id];
    GM_TRY(check_field(engine, id, field));
    GM_TRY(gm_call_begin_on(engine, stream));
    p->n_writes += field != GM_FIELD_GRAD;
    gm_status status = begin_write(engine, p->place.chunk);
    if (status == GM_OK && field == GM_FIELD_GRAD) {
        status = gm_gradient_drop(engine, p);
    }
    if (status == GM_OK && p->spec.numel > 0) {
        status = gm_field_write(engine, p, field, src, stream);
    }
    if (status == GM_OK && field == GM_FIELD_GRAD) {
        gm_gradient_note_written(engine, p);
    }
    status = status == GM_OK ? gm_watch_renew(engine) : status;
    return gm_call_end(engine, status);
}

gm_status gm_engine_fill(gm_engine *engine, uint32_t id, gm_field field, uint64_t first, uint64_t n,
                         gm_dtype source, const void *src, gm_stream stream)
{
    GM_TRY(gm_engine_check_param(engine, id));
    gm_param *p = &engine->params[id];
    GM_TRY(check_field(engine, id, field));
    GM_FAIL_IF(field == GM_FIELD_GRAD || (field == GM_FIELD_WEIGHT && p->spec.has_low), GM_ERR_ARG,
               "field %d of %s cannot be filled in parts", (int)field, gm_engine_name(engine, id));
    span part = {0};
    GM_TRY(span_of(engine, id, first, n, &part));
    GM_TRY(gm_call_begin_on(engine, stream));
    p->n_writes++;
    gm_status status = begin_write(engine, p->place.chunk);
    if (status == GM_OK && part.n > 0) {
        size_t width =
            field == GM_FIELD_MASTER ? gm_dtype_bytes(source) : gm_field_width(engine, p, field);
        const uint8_t *from = (const uint8_t *)src + part.skip * width;
        status = gm_field_fill(engine, p, field, part.begin, part.n, source, from, stream);
    }
    gm_gathered_outdate(engine, p->place.chunk);
    return gm_call_end(engine, status);
}

/* A unit has written gathered weights: what the shard still holds is the old bytes. */
static gm_status take_back(gm_engine *engine, uint32_t id, gm_stream stream)
{
    gm_param *p = &engine->params[id];
    gm_slice s = gm_field_shown(engine, p);
    gm_gathered_state now = engine->chunk_states[p->place.chunk].gathered;
    GM_FAIL_IF(now == GM_GATHERED_NONE || now == GM_GATHERED_OLD, GM_ERR_STATE,
               "gathered weights were written after a step had made them old; write them inside "
               "their unit, or through the engine");
    uint8_t *weight = malloc(2 * s.bytes + 1);
    GM_FAIL_IF(!weight, GM_ERR_NOMEM, "HOST: %zu bytes of scratch", 2 * s.bytes);
    uint8_t *old = weight + s.bytes;
    gm_status status =
        engine->device->ops->stream_sync(engine->device, stream); /* the write itself */
    if (status == GM_OK) {
        status = gm_chunks_read_device(engine->chunks, p->place.chunk, s.piece, s.offset, s.bytes,
                                       weight);
    }
    if (status == GM_OK && p->part_numel > 0) {
        status = gm_field_read(engine, p, GM_FIELD_WEIGHT, 0, p->part_numel,
                               old + p->part_first * p->spec.weight_bytes);
    }
    status = status == GM_OK ? gm_field_take_back(engine, p, old, weight, stream) : status;
    if (status == GM_OK) {
        gm_watch_note_seen(engine, id, weight);
    }
    free(weight);
    return status;
}

static gm_status note_write(gm_engine *engine, uint32_t id, gm_stream stream)
{
    gm_param *p = &engine->params[id];
    uint32_t chunk = p->place.chunk;
    if (p->spec.numel == 0) {
        return GM_OK;
    }
    if (engine->shown == GM_GATHERED) {
        return take_back(engine, id, stream);
    }
    gm_saving_note_unseen(engine, id);
    if (!p->spec.has_low) { /* who reads it while it is still pinned comes after the write */
        gm_status read = gm_chunks_note_readers(engine->chunks, chunk, GM_WEIGHT, stream);
        gm_status noted = gm_chunks_note_write(engine->chunks, chunk, GM_WEIGHT);
        GM_TRY(read == GM_OK ? noted : read);
        return gm_watch_look_at(engine, id, stream);
    }
    gm_chunks_note_written_inside(engine->chunks, chunk);
    GM_FAIL_IF(
        !gm_chunks_has_old_weight(engine->chunks, chunk), GM_ERR_STATE,
        "a 16-bit weight was written in place inside its unit while its chunk had no current "
        "home, so its fp32 master cannot follow");
    gm_slice s = gm_field_slice(engine, p, GM_FIELD_WEIGHT);
    uint8_t *weight = malloc(s.bytes);
    GM_FAIL_IF(!weight, GM_ERR_NOMEM, "HOST: %zu bytes of scratch", s.bytes);
    gm_status status;
    /* the write itself */
    GM_TRY_GOTO(status, done, engine->device->ops->stream_sync(engine->device, stream));
    GM_TRY_GOTO(status, done,
                gm_chunks_read_device(engine->chunks, chunk, GM_WEIGHT, s.offset, s.bytes, weight));
    /* the home is current: it holds the old bytes, and gets the new ones */
    GM_TRY_GOTO(status, done, gm_chunks_claim_home(engine->chunks, chunk, GM_WEIGHT));
    uint8_t *home = gm_chunks_home(engine->chunks, chunk, GM_WEIGHT) + s.offset;
    GM_TRY_GOTO(status, done, gm_field_reset_low(engine, p, home, weight, stream));
    memcpy(home, weight, s.bytes);
    gm_watch_note_seen(engine, id, weight);
done:
    free(weight);
    return status;
}

gm_status gm_engine_note_write(gm_engine *engine, uint32_t id, gm_stream stream)
{
    GM_TRY(gm_engine_check_param(engine, id));
    GM_TRY(gm_call_begin_on(engine, stream));
    engine->params[id].n_writes++;
    return gm_call_end(engine, note_write(engine, id, stream));
}

/* ---- opaque states ---- */

static gm_status begin_states(gm_engine *engine, uint32_t id, uint64_t first, uint64_t n)
{
    GM_TRY(gm_opaque_check_states(engine, id, first, n));
    GM_TRY(gm_call_begin(engine));
    uint32_t chunk = engine->params[id].place.chunk;
    gm_status status = begin_write(engine, chunk);
    return status == GM_OK ? GM_OK : gm_call_end(engine, status);
}

gm_status gm_engine_states_read(gm_engine *engine, uint32_t id, uint64_t first, uint64_t n,
                                void *dst)
{
    GM_TRY(begin_states(engine, id, first, n));
    const gm_param *p = &engine->params[id];
    return gm_call_end(engine, gm_chunks_read(engine->chunks, p->place.chunk, GM_STATE,
                                              p->state_offset + first, n, dst, NULL));
}

gm_status gm_engine_states_write(gm_engine *engine, uint32_t id, uint64_t first, uint64_t n,
                                 const void *src, gm_stream stream)
{
    GM_TRY(begin_states(engine, id, first, n));
    const gm_param *p = &engine->params[id];
    return gm_call_end(engine, gm_chunks_write(engine->chunks, p->place.chunk, GM_STATE,
                                               p->state_offset + first, n, src, stream));
}
