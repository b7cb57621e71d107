/* stage.c - the streamed update: a chunk's states pass through the device slice by slice, so that
 * however large a parameter is, a little memory suffices and the copies of both directions and Adam
 * overlap.
 *
 * The stage is one range on the blocks of the plan's state ring, cut into slots (gm_slots_of).  A
 * slice of a chunk is a run of its elements; its remainder (low), m and v go into one slot, Adam
 * runs on them there, with weights and gradient where they are, and the three go home again.  A
 * speculation takes the slice's weights into the slot as well and leaves those of the chunk as they
 * are; all four go to the spares.
 *
 *     state      waits for the slot's last copy home and for the states' home, copies in      ->
 *                slot.in
 *     update     waits for slot.in, weights and gradient; Adam                                ->
 *                slot.done
 *     state_out  waits for slot.done; copies home                                             ->
 *                slot.out
 *
 * Invariant: between its slot.in and its slot.out a slot belongs to one slice.  Elements outside
 * every range travel with the slice and come home unchanged. */
#include <stdlib.h>

#include "engine/engine_impl.h"

typedef struct slot {
    uintptr_t address;
    gm_event in, done, out;
    bool has_out; /* `out` has been recorded */
} slot;

struct gm_stage {
    slot *slots;
    uint32_t n_slots, next;
    size_t slot_bytes;
    gm_adam_range *ranges; /* (n_params,) of one slice */
};

void gm_stage_free(gm_engine *engine)
{
    struct gm_stage *stage = engine->stage;
    for (uint32_t i = 0; stage && stage->slots && i < stage->n_slots; i++) {
        slot *s = &stage->slots[i];
        gm_free_event(engine->device, &s->in);
        gm_free_event(engine->device, &s->done);
        gm_free_event(engine->device, &s->out);
    }
    if (stage) {
        free(stage->slots);
        free(stage->ranges);
    }
    free(stage);
    engine->stage = NULL;
}

gm_status gm_stage_new(gm_engine *engine)
{
    gm_device *device = engine->device;
    uintptr_t address;
    size_t bytes;
    gm_stage_free(engine);
    gm_chunks_stage(engine->chunks, &address, &bytes);
    if (bytes == 0) {
        return GM_OK;
    }
    struct gm_stage *stage = calloc(1, sizeof *stage);
    engine->stage = stage;
    gm_slots shape = gm_slots_of(bytes);
    if (!stage || !(stage->slots = calloc(shape.n, sizeof *stage->slots)) ||
        !(stage->ranges = calloc((size_t)engine->n_params + 1, sizeof *stage->ranges))) {
        gm_stage_free(engine);
        return GM_FAIL(GM_ERR_NOMEM, "HOST: a stage of %u slots", shape.n);
    }
    stage->slot_bytes = shape.bytes;
    while (stage->n_slots < shape.n) {
        slot *s = &stage->slots[stage->n_slots];
        s->address = address + stage->n_slots++ * stage->slot_bytes;
        GM_TRY_ELSE(device->ops->event_new(device, false, &s->in), gm_stage_free(engine));
        GM_TRY_ELSE(device->ops->event_new(device, false, &s->done), gm_stage_free(engine));
        GM_TRY_ELSE(device->ops->event_new(device, false, &s->out), gm_stage_free(engine));
    }
    return GM_OK;
}

/* The part of a task's ranges that lies in [begin, begin + n), relative to begin. */
static size_t clip_ranges(struct gm_stage *stage, const gm_task *task, uint64_t begin, uint64_t n)
{
    size_t count = 0;
    for (size_t i = 0; i < task->n_ranges; i++) {
        const gm_adam_range *range = &task->ranges[i];
        uint64_t from = range->begin > begin ? range->begin : begin;
        uint64_t to = range->end < begin + n ? range->end : begin + n;
        if (from < to) {
            stage->ranges[count] = *range;
            stage->ranges[count].begin = (size_t)(from - begin);
            stage->ranges[count++].end = (size_t)(to - begin);
        }
    }
    return count;
}

/* The arrays of one slice: where they come from on the host, where they are on the device, where
 * they go to. */
typedef struct array {
    const uint8_t *from; /* NULL: they are there */
    uintptr_t device;
    uint8_t *to; /* NULL: they stay there */
    size_t bytes;
} array;

enum { WEIGHT, LOW, M, V, N_ARRAYS };

/* What one run of slices does. */
typedef struct pass_through {
    uint32_t chunk;
    const gm_task *task;
    const float *grad_scale;          /* NULL: that of the task */
    bool is_speculation, has_weights; /* which are on the device */
} pass_through;

static void describe(gm_engine *engine, const pass_through *p, uintptr_t slot_address,
                     uint64_t begin, uint64_t n, array *out)
{
    gm_chunks *chunks = engine->chunks;
    const gm_engine_param *spec = gm_chunk_spec(engine, p->chunk);
    uint64_t numel = gm_layout_chunk(engine->layout, p->chunk)->shard_numel;
    gm_state_shape whole = gm_state_shape_of(spec, numel), part = gm_state_shape_of(spec, n);
    size_t low = gm_low_bytes(spec), width = spec->weight_bytes;
    const uint8_t *from = gm_chunks_home(chunks, p->chunk, GM_STATE);
    uint8_t *to = p->is_speculation ? gm_chunks_spare(chunks, p->chunk, GM_STATE)
                                    : gm_chunks_home(chunks, p->chunk, GM_STATE);
    size_t m = whole.m + 4 * begin, v = whole.v + 4 * begin;
    out[WEIGHT] =
        (array){NULL, gm_chunks_address(chunks, p->chunk, GM_WEIGHT) + begin * width, NULL, 0};
    out[LOW] = (array){from + low * begin, slot_address, to + low * begin, low * n};
    out[M] = (array){from + m, slot_address + part.m, to + m, 4 * n};
    out[V] = (array){from + v, slot_address + part.v, to + v, 4 * n};
    if (p->is_speculation) {
        const uint8_t *home = gm_chunks_home(chunks, p->chunk, GM_WEIGHT) + width * begin;
        out[WEIGHT] =
            (array){p->has_weights ? NULL : home, slot_address + part.total,
                    gm_chunks_spare(chunks, p->chunk, GM_WEIGHT) + width * begin, width * n};
    }
}

static gm_status copy_arrays(gm_engine *engine, const array *arrays, uint32_t chunk, bool is_in,
                             gm_stream stream)
{
    gm_device *device = engine->device;
    size_t bytes = 0;
    for (int i = 0; i < N_ARRAYS; i++) {
        bytes += (is_in ? arrays[i].from : arrays[i].to) ? arrays[i].bytes : 0;
    }
    uint32_t entry =
        gm_timeline_begin(engine->timeline, is_in ? GM_LOG_STATE_IN : GM_LOG_STATE_OUT,
                          is_in ? GM_ON_STATE : GM_ON_STATE_OUT, chunk, GM_STATE, bytes, stream);
    for (int i = 0; i < N_ARRAYS; i++) {
        const array *a = &arrays[i];
        if (a->bytes > 0 && is_in && a->from) {
            GM_TRY(device->ops->copy_h2d(device, a->device, a->from, a->bytes, stream));
        } else if (a->bytes > 0 && !is_in && a->to) {
            GM_TRY(device->ops->copy_d2h(device, a->to, a->device, a->bytes, stream));
        }
    }
    gm_timeline_end(engine->timeline, entry, stream);
    gm_chunks_count_copy(engine->chunks, bytes, is_in);
    return GM_OK;
}

static gm_status update_slice(gm_engine *engine, const pass_through *p, uint64_t begin, uint64_t n)
{
    gm_device *device = engine->device;
    struct gm_stage *stage = engine->stage;
    uint32_t chunk = p->chunk;
    const gm_engine_param *spec = gm_chunk_spec(engine, chunk);
    size_t n_ranges = clip_ranges(stage, p->task, begin, n);
    if (n_ranges == 0) {
        return GM_OK; /* padding, or parameters without a gradient */
    }
    slot *s = &stage->slots[stage->next];
    stage->next = (stage->next + 1) % stage->n_slots;
    array arrays[N_ARRAYS];
    describe(engine, p, s->address, begin, n, arrays);
    gm_stream in, out, update = engine->update.stream;
    gm_chunks_state_streams(engine->chunks, &in, &out);
    if (s->has_out) {
        GM_TRY(device->ops->event_wait(device, s->out, in));
    }
    GM_TRY(copy_arrays(engine, arrays, chunk, true, in));
    GM_TRY(device->ops->event_record(device, s->in, in));
    GM_TRY(device->ops->event_wait(device, s->in, update));
    if (p->is_speculation && p->has_weights) {
        uintptr_t weights = gm_chunks_address(engine->chunks, chunk, GM_WEIGHT);
        GM_TRY(device->ops->copy_d2d(device, arrays[WEIGHT].device,
                                     weights + begin * spec->weight_bytes, arrays[WEIGHT].bytes,
                                     update));
    }
    uintptr_t grad = gm_chunks_address(engine->chunks, chunk, GM_GRAD);
    gm_dtype grad_dtype = gm_grad_dtype(engine, spec);
    gm_adam_args args = {
        .format = spec->format,
        .grad_dtype = grad_dtype,
        .weight = (void *)arrays[WEIGHT].device,
        .low = spec->has_low ? (void *)arrays[LOW].device : NULL,
        .m = (float *)arrays[M].device,
        .v = (float *)arrays[V].device,
        .grad = (const void *)(grad + begin * gm_dtype_bytes(grad_dtype)),
        .ranges = stage->ranges,
        .n_ranges = n_ranges,
        .grad_scale = p->grad_scale,
    };
    uint32_t entry = gm_timeline_begin(engine->timeline, GM_LOG_DEVICE_UPDATE, GM_ON_UPDATE, chunk,
                                       GM_STATE, gm_state_shape_of(spec, n).total, update);
    GM_TRY(device->ops->adam(device, &args, update));
    gm_timeline_end(engine->timeline, entry, update);
    GM_TRY(device->ops->event_record(device, s->done, update));
    GM_TRY(device->ops->event_wait(device, s->done, out));
    GM_TRY(copy_arrays(engine, arrays, chunk, false, out));
    s->has_out = true;
    return device->ops->event_record(device, s->out, out);
}

static gm_status update_slices(gm_engine *engine, const pass_through *p)
{
    const gm_engine_param *spec = gm_chunk_spec(engine, p->chunk);
    size_t width = gm_state_shape_of(spec, 1).total + (p->is_speculation ? spec->weight_bytes : 0);
    uint64_t numel = gm_layout_chunk(engine->layout, p->chunk)->shard_numel;
    uint64_t most = engine->stage->slot_bytes / width / GM_SLICE_UNIT * GM_SLICE_UNIT;
    GM_ASSERT(most > 0); /* gm_stage_least */
    for (uint64_t begin = 0; begin < numel; begin += most) {
        GM_TRY(update_slice(engine, p, begin, numel - begin < most ? numel - begin : most));
    }
    return GM_OK;
}

gm_status gm_stage_update(gm_engine *engine, uint32_t chunk, const gm_task *task)
{
    gm_chunks *chunks = engine->chunks;
    gm_stream in, out, update = engine->update.stream;
    gm_chunks_state_streams(chunks, &in, &out);
    GM_ASSERT(!gm_chunks_is_resident(chunks, chunk, GM_STATE));
    const gm_use uses[] = {{GM_STATE, GM_HOME_READ, in},
                           {GM_STATE, GM_HOME_WRITE, out},
                           {GM_WEIGHT, GM_WRITE, update},
                           {GM_GRAD, GM_READ, update}};
    GM_TRY(gm_chunks_begin_all(chunks, chunk, uses, 4));
    pass_through p = {.chunk = chunk, .task = task};
    if (task->factor != GM_FACTOR_KNOWN) { /* states come in before it: they do not wait for it */
        GM_TRY(gm_clip_order(engine, false, update, &p.grad_scale));
    }
    GM_TRY(update_slices(engine, &p));
    /* Each slice was read in before it went out: the last copy home is the last access to the
     * home. */
    return gm_chunks_end_all(chunks, chunk, uses + 1, 3);
}

gm_status gm_stage_speculate(gm_engine *engine, uint32_t chunk, const gm_task *task)
{
    gm_chunks *chunks = engine->chunks;
    gm_stream in, out, update = engine->update.stream;
    pass_through p = {.chunk = chunk,
                      .task = task,
                      .is_speculation = true,
                      .has_weights = gm_chunks_is_resident(chunks, chunk, GM_WEIGHT)};
    gm_chunks_state_streams(chunks, &in, &out);
    GM_ASSERT(!gm_chunks_is_resident(chunks, chunk, GM_STATE));
    const gm_use uses[] = {
        {GM_STATE, GM_HOME_READ, in},
        {GM_WEIGHT, p.has_weights ? GM_READ : GM_HOME_READ, p.has_weights ? update : in},
        {GM_GRAD, GM_READ, update},
        {GM_WEIGHT, GM_SPARE_WRITE, out},
        {GM_STATE, GM_SPARE_WRITE, out}};
    GM_TRY(gm_chunks_begin_all(chunks, chunk, uses, 5));
    GM_TRY(update_slices(engine, &p));
    return gm_chunks_end_all(chunks, chunk, uses, 5);
}
