/* engine_impl.h - what engine.c, field.c and lease.c share: the engine's body and the helpers that each
 * offers the others.  Everything here expects the engine's lock to be held. */
#ifndef GM_ENGINE_IMPL_H
#define GM_ENGINE_IMPL_H

#include <pthread.h>
#include <stdatomic.h>

#include "chunk.h"
#include "engine.h"
#include "hostmem.h"
#include "layout.h"

typedef struct gm_param {
    gm_engine_param spec;
    gm_param_place place;
    bool has_grad; /* a gradient has arrived since the last drop */
} gm_param;

struct gm_lease {
    gm_engine *engine;
    gm_lease *next;
    uint32_t param;
    bool is_pinned;
    gm_stream stream; /* where its tensor is used */
    atomic_bool is_watched, is_ended;
    void *old; /* the weight's bytes when last compared; NULL unless watched */
};

struct gm_engine {
    pthread_mutex_t lock;
    atomic_uint references;
    gm_device *device;
    gm_workers *workers;
    gm_layout *layout;
    gm_chunks *chunks;
    gm_arena *arena;
    bool is_pinned_arena;
    gm_policy policy;
    bool is_grad_f32;
    size_t budget;
    size_t (*outside_bytes)(void *context);
    void *outside_context;

    gm_param *params; /* (n_params,) */
    uint32_t n_params;
    uint32_t *unit_chunks; /* chunk ids, unit after unit, each chunk once per unit */
    uint32_t *unit_begin;  /* (n_units + 1,) */
    uint32_t n_units;
    uint32_t *touched;         /* (n_chunks,) pinned by touch */
    gm_stream *touched_stream; /* (n_chunks,) of each of these pins */
    uint32_t n_touched;
    bool *is_touched; /* (n_chunks,) */
    gm_lease *leases;

    bool has_pending_grads; /* copies home in flight on pending_stream */
    gm_stream pending_stream;
    uint8_t *staging; /* pinned, GM_STAGING_BYTES; NULL on the host device */
    uintptr_t sums;   /* device memory for one gm_sumsq; 0 on the host device */
    gm_block sums_block;

    gm_status dead; /* GM_OK, or the first error inside a step */
    char dead_text[512];
};

static inline gm_dtype gm_grad_dtype(const gm_engine *engine, const gm_engine_param *spec)
{
    return engine->is_grad_f32 ? GM_F32 : spec->format;
}

static inline size_t gm_low_bytes(const gm_engine_param *spec)
{
    return !spec->has_low ? 0 : spec->format == GM_BF16 ? 2 : spec->format == GM_F16 ? 4 : 0;
}

/* Byte offsets of the arrays in a chunk's state piece: low, m, v. */
typedef struct gm_state_shape {
    size_t low, m, v, total;
} gm_state_shape;

static inline gm_state_shape gm_state_shape_of(const gm_engine_param *spec, uint64_t numel)
{
    gm_state_shape shape = {0};
    shape.m = gm_low_bytes(spec) * numel;
    shape.v = shape.m + (spec->has_moments ? 4 * numel : 0);
    shape.total = shape.v + (spec->has_moments ? 4 * numel : 0);
    return shape;
}

/* What the parameters of a chunk have in common. */
static inline const gm_engine_param *gm_chunk_spec(const gm_engine *engine, uint32_t chunk)
{
    return &engine->params[gm_layout_chunk(engine->layout, chunk)->first_param].spec;
}

enum { GM_STAGING_BYTES = 16 << 20 };

/* engine.c */
gm_status gm_engine_begin_call(gm_engine *engine); /* locks; drains ended leases */
gm_status gm_engine_end_call(gm_engine *engine,
                             gm_status status); /* unlocks; passes the status on */
gm_status gm_engine_check_param(const gm_engine *engine, uint32_t id);
gm_status gm_engine_pin_weights(gm_engine *engine, uint32_t chunk, gm_stream stream);
gm_status gm_engine_unpin_weights(gm_engine *engine, uint32_t chunk, gm_stream stream);

/* update.c: the host waits for gradients on their way home */
gm_status gm_engine_sync_grads(gm_engine *engine);

/* field.c */
typedef struct gm_slice {
    gm_piece piece;
    size_t offset, bytes;
} gm_slice;

/* Where one field of a parameter lies in its chunk; GM_FIELD_MASTER: the low part. */
gm_slice gm_field_slice(const gm_engine *engine, const gm_param *p, gm_field field);
/* The weight now holds new bytes (`weight`), before it held `old`: the master follows. */
gm_status gm_field_reset_low(gm_engine *engine, const gm_param *p, const void *old,
                             const void *weight, gm_stream stream);

/* lease.c */
gm_status gm_lease_process_ended(gm_engine *engine);
/* Finds what was written through watched leases since the last look. */
gm_status gm_lease_poll_watched(gm_engine *engine);
/* The engine itself has written weights: later looks compare with what is there now. */
gm_status gm_lease_renew_snapshots(gm_engine *engine);

#endif
