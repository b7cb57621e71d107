/* stage.c - the streamed update: a chunk's states pass through the device slice by slice, so that however large a
 * parameter is, a little memory suffices and the copies of both directions and Adam overlap.
 *
 * The stage is one range on the blocks of the plan's state ring, cut into slots (gm_slots_of).  A slice of a chunk is a run of its
 * elements; its remainder (low), m and v go into one slot, Adam runs on them there, with weights and gradient where
 * they are, and the three go home again.
 *
 *     state      waits for the slot's last copy home and for the states' home, copies in      -> slot.in
 *     update     waits for slot.in, weights and gradient; Adam                                -> slot.done
 *     state_out  waits for slot.done; copies home                                             -> slot.out
 *
 * Invariant: between its slot.in and its slot.out a slot belongs to one slice.  Elements outside every range travel
 * with the slice and come home unchanged. */
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

static size_t element_bytes(const gm_engine *engine, uint32_t chunk)
{
    return gm_state_shape_of(gm_chunk_spec(engine, chunk), 1).total;
}

void gm_stage_free(gm_engine *engine)
{
    struct gm_stage *stage = engine->stage;
    for (uint32_t i = 0; stage && stage->slots && i < stage->n_slots; i++) {
        slot *s = &stage->slots[i];
        gm_event events[] = {s->in, s->done, s->out};
        for (int k = 0; k < 3; k++) {
            if (events[k]) {
                engine->device->ops->event_free(engine->device, events[k]);
            }
        }
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
    for (; stage->n_slots < shape.n; stage->n_slots++) {
        slot *s = &stage->slots[stage->n_slots];
        s->address = address + stage->n_slots * stage->slot_bytes;
        gm_status status = device->ops->event_new(device, false, &s->in);
        status = status == GM_OK ? device->ops->event_new(device, false, &s->done) : status;
        status = status == GM_OK ? device->ops->event_new(device, false, &s->out) : status;
        if (status != GM_OK) {
            stage->n_slots++;
            gm_stage_free(engine);
            return status;
        }
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

/* The arrays of one slice: where they are at home and in the slot. */
typedef struct array {
    uint8_t *home;
    uintptr_t device;
    size_t bytes;
} array;

static gm_status copy_arrays(gm_engine *engine, const array *arrays, uint32_t chunk, size_t bytes,
                             bool is_in, gm_stream stream)
{
    gm_device *device = engine->device;
    uint32_t entry =
        gm_timeline_begin(engine->timeline, is_in ? GM_LOG_STATE_IN : GM_LOG_STATE_OUT,
                          is_in ? GM_ON_STATE : GM_ON_STATE_OUT, chunk, GM_STATE, bytes, stream);
    for (int i = 0; i < 3; i++) {
        if (arrays[i].bytes > 0) {
            GM_TRY(is_in ? device->ops->copy_h2d(device, arrays[i].device, arrays[i].home,
                                                 arrays[i].bytes, stream)
                         : device->ops->copy_d2h(device, arrays[i].home, arrays[i].device,
                                                 arrays[i].bytes, stream));
        }
    }
    gm_timeline_end(engine->timeline, entry, stream);
    gm_chunks_count_copy(engine->chunks, bytes, is_in);
    return GM_OK;
}

static gm_status update_slice(gm_engine *engine, uint32_t chunk, const gm_task *task,
                              uint64_t begin, uint64_t n)
{
    gm_device *device = engine->device;
    struct gm_stage *stage = engine->stage;
    const gm_engine_param *spec = gm_chunk_spec(engine, chunk);
    gm_state_shape whole =
        gm_state_shape_of(spec, gm_layout_chunk(engine->layout, chunk)->shard_numel);
    gm_state_shape part = gm_state_shape_of(spec, n);
    size_t low = gm_low_bytes(spec), n_ranges = clip_ranges(stage, task, begin, n);
    if (n_ranges == 0) {
        return GM_OK; /* padding, or parameters without a gradient */
    }
    slot *s = &stage->slots[stage->next];
    stage->next = (stage->next + 1) % stage->n_slots;
    uint8_t *home = gm_chunks_home(engine->chunks, chunk, GM_STATE);
    const array arrays[3] = {
        {home + low * begin, s->address, low * n},
        {home + whole.m + 4 * begin, s->address + part.m, 4 * n},
        {home + whole.v + 4 * begin, s->address + part.v, 4 * n},
    };
    gm_stream in, out, update = engine->update.stream;
    gm_chunks_state_streams(engine->chunks, &in, &out);
    if (s->has_out) {
        GM_TRY(device->ops->event_wait(device, s->out, in));
    }
    GM_TRY(copy_arrays(engine, arrays, chunk, part.total, true, in));
    GM_TRY(device->ops->event_record(device, s->in, in));
    GM_TRY(device->ops->event_wait(device, s->in, update));
    uintptr_t weight = gm_chunks_address(engine->chunks, chunk, GM_WEIGHT);
    uintptr_t grad = gm_chunks_address(engine->chunks, chunk, GM_GRAD);
    gm_dtype grad_dtype = gm_grad_dtype(engine, spec);
    gm_adam_args args = {
        .format = spec->format,
        .grad_dtype = grad_dtype,
        .weight = (void *)(weight + begin * spec->weight_bytes),
        .low = spec->has_low ? (void *)arrays[0].device : NULL,
        .m = (float *)arrays[1].device,
        .v = (float *)arrays[2].device,
        .grad = (const void *)(grad + begin * gm_dtype_bytes(grad_dtype)),
        .ranges = stage->ranges,
        .n_ranges = n_ranges,
    };
    uint32_t entry = gm_timeline_begin(engine->timeline, GM_LOG_DEVICE_UPDATE, GM_ON_UPDATE, chunk,
                                       GM_STATE, part.total, update);
    GM_TRY(device->ops->adam(device, &args, update));
    gm_timeline_end(engine->timeline, entry, update);
    GM_TRY(device->ops->event_record(device, s->done, update));
    GM_TRY(device->ops->event_wait(device, s->done, out));
    GM_TRY(copy_arrays(engine, arrays, chunk, part.total, false, out));
    s->has_out = true;
    return device->ops->event_record(device, s->out, out);
}

gm_status gm_stage_update(gm_engine *engine, uint32_t chunk, const gm_task *task)
{
    gm_chunks *chunks = engine->chunks;
    gm_stream in, out, update = engine->update.stream;
    gm_chunks_state_streams(chunks, &in, &out);
    GM_ASSERT(!gm_chunks_is_resident(chunks, chunk, GM_STATE));
    GM_TRY(gm_chunks_begin_home_read(chunks, chunk, GM_STATE, in));
    GM_TRY(gm_chunks_begin_home_write(chunks, chunk, GM_STATE, out));
    GM_TRY(gm_chunks_begin_write(chunks, chunk, GM_WEIGHT, update));
    GM_TRY(gm_chunks_begin_read(chunks, chunk, GM_GRAD, update));
    uint64_t numel = gm_layout_chunk(engine->layout, chunk)->shard_numel;
    uint64_t most =
        engine->stage->slot_bytes / element_bytes(engine, chunk) / GM_SLICE_UNIT * GM_SLICE_UNIT;
    GM_ASSERT(most > 0); /* gm_stage_least */
    for (uint64_t begin = 0; begin < numel; begin += most) {
        GM_TRY(
            update_slice(engine, chunk, task, begin, numel - begin < most ? numel - begin : most));
    }
    GM_TRY(gm_chunks_end_write(chunks, chunk, GM_WEIGHT, update));
    GM_TRY(gm_chunks_end_read(chunks, chunk, GM_GRAD, update));
    /* Each slice was read in before it went out: the last copy home is the last access to the home. */
    return gm_chunks_end_home_write(chunks, chunk, GM_STATE, out);
}
