/* field.c - the bytes of one parameter's fields (weight, master, moments, gradient), wherever they
 * are.
 *
 * A master is (weight, low part); whatever changes one of the two goes through here, so that they
 * never disagree.  All calls may wait for the device. */
#include "engine/engine_impl.h"

#include <stdlib.h>
#include <string.h>

/* Elements of a master on their way to the device: weights and low parts have at most 4 bytes
 * each. */
enum { SLICE = GM_STAGING_BYTES / 8 };

gm_slice gm_field_slice(const gm_engine *engine, const gm_param *p, gm_field field)
{
    const gm_chunk_shape *chunk = gm_layout_chunk(engine->layout, p->place.chunk);
    gm_state_shape shape = gm_state_shape_of(&p->spec, chunk->shard_numel);
    size_t grad_bytes = gm_dtype_bytes(gm_grad_dtype(engine, &p->spec));
    uint64_t offset = p->part_offset, numel = p->part_numel;
    switch (field) {
    case GM_FIELD_M: return (gm_slice){GM_STATE, shape.m + 4 * offset, 4 * numel};
    case GM_FIELD_V: return (gm_slice){GM_STATE, shape.v + 4 * offset, 4 * numel};
    case GM_FIELD_GRAD: return (gm_slice){GM_GRAD, grad_bytes * offset, grad_bytes * numel};
    case GM_FIELD_LOW:
    case GM_FIELD_MASTER: /* the low part of it */
        return (gm_slice){GM_STATE, gm_low_bytes(&p->spec) * offset,
                          gm_low_bytes(&p->spec) * numel};
    case GM_FIELD_WEIGHT: break;
    }
    return (gm_slice){GM_WEIGHT, p->spec.weight_bytes * offset, p->spec.weight_bytes * numel};
}

gm_slice gm_field_shown(const gm_engine *engine, const gm_param *p)
{
    size_t width = p->spec.weight_bytes;
    return (gm_slice){engine->shown, width * p->place.offset, width * p->spec.numel};
}

/* Of elements [first, first + n) of the part. */
static gm_slice slice_of(const gm_engine *engine, const gm_param *p, gm_field field, uint64_t first,
                         uint64_t n)
{
    gm_slice s = gm_field_slice(engine, p, field);
    size_t width = p->part_numel ? s.bytes / p->part_numel : 0;
    return (gm_slice){s.piece, s.offset + width * first, width * n};
}

static gm_status read_slice(gm_engine *engine, const gm_param *p, gm_field field, uint64_t first,
                            uint64_t n, void *dst)
{
    gm_slice s = slice_of(engine, p, field, first, n);
    return gm_chunks_read(engine->chunks, p->place.chunk, s.piece, s.offset, s.bytes, dst, NULL);
}

static gm_status write_slice(gm_engine *engine, const gm_param *p, gm_field field, const void *src,
                             gm_stream stream)
{
    gm_slice s = gm_field_slice(engine, p, field);
    return gm_chunks_write(engine->chunks, p->place.chunk, s.piece, s.offset, s.bytes, src, stream);
}

/* Two scratch arrays for `n` elements of a parameter: weight and low part.  Not one: malloc keeps a
 * freed piece that is larger than any before it for the process, and this is the largest that a
 * save asks for. */
static gm_status scratch_new(const gm_param *p, uint64_t n, uint8_t **out_weight, uint8_t **out_low)
{
    *out_weight = malloc(n * p->spec.weight_bytes + 1);
    *out_low = malloc(n * 4 + 1); /* the widest low part */
    if (!*out_weight || !*out_low) {
        free(*out_weight);
        free(*out_low);
        return GM_FAIL(GM_ERR_NOMEM, "HOST: %llu elements of scratch for a parameter",
                       (unsigned long long)n);
    }
    return GM_OK;
}

static gm_status read_master(gm_engine *engine, const gm_param *p, uint64_t first, uint64_t n,
                             float *dst)
{
    uint8_t *weight, *low;
    GM_TRY(scratch_new(p, n, &weight, &low));
    gm_status status = read_slice(engine, p, GM_FIELD_WEIGHT, first, n, weight);
    if (status == GM_OK && p->spec.has_low) {
        status = read_slice(engine, p, GM_FIELD_MASTER, first, n, low);
    } else if (status == GM_OK) { /* no low part: the weight is all there is */
        gm_grad_add_host(&(gm_grad_add_args){.dst = dst,
                                             .src = weight,
                                             .dst_dtype = GM_F32,
                                             .src_dtype = p->spec.format,
                                             .numel = n},
                         engine->workers);
    }
    if (status == GM_OK && p->spec.has_low) {
        gm_merge_host(p->spec.format, weight, low, dst, n, engine->workers);
    }
    free(weight);
    free(low);
    return status;
}

gm_status gm_field_read(gm_engine *engine, const gm_param *p, gm_field field, uint64_t first,
                        uint64_t n, void *dst)
{
    return field == GM_FIELD_MASTER ? read_master(engine, p, first, n, dst)
                                    : read_slice(engine, p, field, first, n, dst);
}

static bool is_spilled(const gm_engine *engine, const gm_param *p)
{
    return engine->chunk_states[p->place.chunk].gathered == GM_GATHERED_SPILLED;
}

/* Tensors that show the parameter see its new bytes (`src`, whole) without another gathering. */
static gm_status show(gm_engine *engine, const gm_param *p, const void *src, gm_stream stream)
{
    gm_slice s = gm_field_shown(engine, p);
    if (is_spilled(engine, p)) {
        memcpy(engine->chunk_states[p->place.chunk].spilled + s.offset, src, s.bytes);
    }
    return s.piece == GM_GATHERED && gm_chunks_is_resident(engine->chunks, p->place.chunk, s.piece)
               ? gm_chunks_write(engine->chunks, p->place.chunk, s.piece, s.offset, s.bytes, src,
                                 stream)
               : GM_OK;
}

void gm_field_forget_before(gm_param *p)
{
    free(p->before);
    p->before = NULL;
    p->is_low_given = false;
}

/* Elements [first, first + n) of the part, from masters: weights and low parts. */
static gm_status put_master(gm_engine *engine, const gm_param *p, uint64_t first, uint64_t n,
                            gm_dtype source, const void *src, gm_stream stream)
{
    gm_chunks *chunks = engine->chunks;
    uint32_t chunk = p->place.chunk;
    gm_slice to = slice_of(engine, p, GM_FIELD_WEIGHT, first, n);
    gm_slice rest = slice_of(engine, p, GM_FIELD_MASTER, first, n);
    bool has_low = p->spec.has_low;
    if (gm_chunks_home(chunks, chunk, GM_WEIGHT) &&
        !gm_chunks_is_resident(chunks, chunk, GM_WEIGHT) &&
        !(has_low && gm_chunks_is_resident(chunks, chunk, GM_STATE))) { /* at start-up: no detour */
        GM_TRY(gm_chunks_claim_home(chunks, chunk, GM_WEIGHT));
        GM_TRY(has_low ? gm_chunks_claim_home(chunks, chunk, GM_STATE) : GM_OK);
        gm_split_host(p->spec.format, source, src,
                      gm_chunks_home(chunks, chunk, GM_WEIGHT) + to.offset,
                      has_low ? gm_chunks_home(chunks, chunk, GM_STATE) + rest.offset : NULL, n,
                      engine->workers);
        return GM_OK;
    }
    uint8_t *weight = engine->staging, *low = weight ? weight + 4 * SLICE : NULL;
    uint64_t most = n < SLICE ? n : SLICE, done = 0;
    GM_TRY(weight ? GM_OK : scratch_new(p, most, &weight, &low));
    gm_status status = GM_OK;
    for (; status == GM_OK && done < n; done += most) {
        uint64_t now = n - done < most ? n - done : most;
        gm_split_host(p->spec.format, source, (const char *)src + done * gm_dtype_bytes(source),
                      weight, has_low ? low : NULL, now, engine->workers);
        to = slice_of(engine, p, GM_FIELD_WEIGHT, first + done, now);
        status = gm_chunks_write(chunks, chunk, to.piece, to.offset, to.bytes, weight, stream);
        if (status == GM_OK && has_low) {
            rest = slice_of(engine, p, GM_FIELD_MASTER, first + done, now);
            status =
                gm_chunks_write(chunks, chunk, rest.piece, rest.offset, rest.bytes, low, stream);
        }
    }
    if (weight != engine->staging) {
        free(weight);
        free(low);
    }
    return status;
}

/* src: whole.  Of a sharded parameter the whole weight is rounded only where it is shown. */
static gm_status write_master(gm_engine *engine, gm_param *p, const float *src, gm_stream stream)
{
    gm_field_forget_before(p);
    bool is_shown = engine->shown == GM_GATHERED &&
                    (gm_chunks_is_resident(engine->chunks, p->place.chunk, GM_GATHERED) ||
                     is_spilled(engine, p));
    if (!is_shown) {
        return put_master(engine, p, 0, p->part_numel, GM_F32, src + p->part_first, stream);
    }
    uint8_t *weight, *low;
    uint64_t skip = p->part_first;
    GM_TRY(scratch_new(p, p->spec.numel, &weight, &low));
    gm_split_host(p->spec.format, GM_F32, src, weight, p->spec.has_low ? low : NULL, p->spec.numel,
                  engine->workers);
    gm_status status =
        write_slice(engine, p, GM_FIELD_WEIGHT, weight + skip * p->spec.weight_bytes, stream);
    if (status == GM_OK && p->spec.has_low) {
        status =
            write_slice(engine, p, GM_FIELD_MASTER, low + skip * gm_low_bytes(&p->spec), stream);
    }
    status = status == GM_OK ? show(engine, p, weight, stream) : status;
    free(weight);
    free(low);
    return status;
}

/* bf16 weights that lack nothing: whatever is written to them lacks nothing either, and nothing of
 * them can come back. So loading before the first update keeps nothing. */
static bool is_own_master(const gm_param *p, const uint8_t *low)
{
    size_t n = p->part_numel * gm_low_bytes(&p->spec);
    return p->spec.format == GM_BF16 && low[0] == 0 && memcmp(low, low + 1, n - 1) == 0;
}

/* The first write since the master has changed: keeps what can come back, if anything. */
static gm_status keep_before(gm_engine *engine, gm_param *p, const void *old)
{
    size_t weight_bytes = p->part_numel * p->spec.weight_bytes;
    uint8_t *before = malloc(weight_bytes + p->part_numel * gm_low_bytes(&p->spec));
    GM_FAIL_IF(!before, GM_ERR_NOMEM, "HOST: %llu elements of a parameter that is written",
               (unsigned long long)p->part_numel);
    memcpy(before, old, weight_bytes);
    gm_status status =
        read_slice(engine, p, GM_FIELD_MASTER, 0, p->part_numel, before + weight_bytes);
    if (status != GM_OK || is_own_master(p, before + weight_bytes)) {
        free(before);
        return status;
    }
    p->before = before;
    return GM_OK;
}

gm_status gm_field_reset_low(gm_engine *engine, gm_param *p, const void *old, const void *weight,
                             gm_stream stream)
{
    if (!p->spec.has_low || p->part_numel == 0) {
        return GM_OK;
    }
    size_t low_bytes = p->part_numel * gm_low_bytes(&p->spec);
    if (!p->before) {
        GM_TRY(keep_before(engine, p, old));
        if (!p->before) {
            return GM_OK;
        }
    }
    uint8_t *low = malloc(low_bytes);
    GM_FAIL_IF(!low, GM_ERR_NOMEM, "HOST: %llu elements of scratch for a parameter",
               (unsigned long long)p->part_numel);
    memcpy(low, p->before + p->part_numel * p->spec.weight_bytes, low_bytes);
    if (p->is_low_given) {
        gm_fit_low_host(p->spec.format, weight, low, p->part_numel);
    } else {
        gm_reconcile_host(p->spec.format, p->before, weight, low, p->part_numel);
    }
    gm_status status = write_slice(engine, p, GM_FIELD_MASTER, low, stream);
    free(low);
    return status;
}

static gm_status write_low(gm_engine *engine, gm_param *p, const void *part, gm_stream stream)
{
    size_t weight_bytes = p->part_numel * p->spec.weight_bytes;
    size_t low_bytes = p->part_numel * gm_low_bytes(&p->spec);
    uint8_t *before = malloc(weight_bytes + low_bytes + 1), *low = malloc(low_bytes + 1);
    gm_status status = before && low
                           ? read_slice(engine, p, GM_FIELD_WEIGHT, 0, p->part_numel, before)
                           : GM_FAIL(GM_ERR_NOMEM, "HOST: %zu bytes of low parts", low_bytes);
    if (status == GM_OK) {
        memcpy(before + weight_bytes, part, low_bytes);
        memcpy(low, part, low_bytes);
        gm_fit_low_host(p->spec.format, before, low, p->part_numel);
        status = write_slice(engine, p, GM_FIELD_MASTER, low, stream);
    }
    if (status == GM_OK) {
        gm_field_forget_before(p);
        p->is_low_given = true;
        if (memcmp(low, part, low_bytes) !=
            0) { /* another weight, which is to come, may have them */
            p->before = before;
            before = NULL;
        }
    }
    free(before);
    free(low);
    return status;
}

/* src: whole. */
static gm_status write_weight(gm_engine *engine, gm_param *p, const void *src, gm_stream stream)
{
    const uint8_t *part = (const uint8_t *)src + p->part_first * p->spec.weight_bytes;
    uint8_t *old = malloc(p->part_numel * p->spec.weight_bytes + 1);
    GM_FAIL_IF(!old, GM_ERR_NOMEM, "HOST: %llu elements of scratch for a parameter",
               (unsigned long long)p->part_numel);
    gm_status status = read_slice(engine, p, GM_FIELD_WEIGHT, 0, p->part_numel, old);
    status = status == GM_OK ? gm_field_reset_low(engine, p, old, part, stream) : status;
    status = status == GM_OK ? write_slice(engine, p, GM_FIELD_WEIGHT, part, stream) : status;
    status = status == GM_OK ? show(engine, p, src, stream) : status;
    free(old);
    return status;
}

size_t gm_field_width(const gm_engine *engine, const gm_param *p, gm_field field)
{
    return field == GM_FIELD_WEIGHT ? p->spec.weight_bytes
           : field == GM_FIELD_LOW  ? gm_low_bytes(&p->spec)
           : field == GM_FIELD_GRAD ? gm_dtype_bytes(gm_grad_dtype(engine, &p->spec))
                                    : 4;
}

gm_status gm_field_write(gm_engine *engine, gm_param *p, gm_field field, const void *src,
                         gm_stream stream)
{
    const void *part = (const uint8_t *)src + p->part_first * gm_field_width(engine, p, field);
    return field == GM_FIELD_MASTER   ? write_master(engine, p, src, stream)
           : field == GM_FIELD_WEIGHT ? write_weight(engine, p, src, stream)
           : field == GM_FIELD_LOW    ? write_low(engine, p, part, stream)
                                      : write_slice(engine, p, field, part, stream);
}

gm_status gm_field_fill(gm_engine *engine, gm_param *p, gm_field field, uint64_t first, uint64_t n,
                        gm_dtype source, const void *src, gm_stream stream)
{
    if (field == GM_FIELD_MASTER) {
        gm_field_forget_before(p);
        return put_master(engine, p, first, n, source, src, stream);
    }
    gm_slice s = slice_of(engine, p, field, first, n);
    return gm_chunks_write(engine->chunks, p->place.chunk, s.piece, s.offset, s.bytes, src, stream);
}

gm_status gm_field_take_back(gm_engine *engine, gm_param *p, const void *old, const void *weight,
                             gm_stream stream)
{
    if (p->part_numel == 0) {
        return GM_OK;
    }
    size_t width = p->spec.weight_bytes, at = p->part_first * width;
    const uint8_t *before = (const uint8_t *)old + at, *after = (const uint8_t *)weight + at;
    gm_slice s = gm_field_slice(engine, p, GM_FIELD_WEIGHT);
    uint8_t *present = malloc(2 * s.bytes);
    GM_FAIL_IF(!present, GM_ERR_NOMEM, "HOST: %zu bytes of scratch", 2 * s.bytes);
    uint8_t *wanted = present + s.bytes;
    gm_status status =
        gm_chunks_read(engine->chunks, p->place.chunk, GM_WEIGHT, s.offset, s.bytes, present, NULL);
    if (status == GM_OK) { /* what nobody wrote may be newer in the shard than in the tensor */
        memcpy(wanted, present, s.bytes);
        for (size_t i = 0; i < s.bytes; i += width) {
            if (memcmp(before + i, after + i, width) != 0) {
                memcpy(wanted + i, after + i, width);
            }
        }
        status = gm_field_reset_low(engine, p, present, wanted, stream);
    }
    if (status == GM_OK) {
        status = gm_chunks_write(engine->chunks, p->place.chunk, GM_WEIGHT, s.offset, s.bytes,
                                 wanted, stream);
    }
    free(present);
    return status;
}
