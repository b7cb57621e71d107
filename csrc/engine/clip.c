/* clip.c - the factor of a clip, which nobody waits for: kernels read it on the device, updates on
 * the host at home.
 *
 * Two words take turns, of even and of odd steps, on the device and at home.
 *
 *     the caller's stream  behind the total (arrive.c): factor -> the word there        -> there
 *     who changes sums     waits for `there`, or has come behind the update that read the gradient
 *     stream               waits for `there`; copies the word home                      -> home
 *     update               waits for `there`; Adam reads the word there
 *     host_stream          waits for `home`; Adam reads the word at home
 *     stream               behind the copy home: updates again what was stepped as if no clip
 *                          fired, if it did (update.c)
 *
 * Invariants
 *   1. A word is written again behind the last update that reads it: all updates of a step are
 *      issued when the next one begins, where `used` is recorded, and the word is that of the step
 *      after it.
 *   2. The host looks at a word once `home` has come, which it asks without waiting
 *      (gm_clip_is_known).
 *
 * The host waits in: gm_clip_wait. */
#include "engine/engine_impl.h"

_Static_assert(sizeof(gm_clip) <= sizeof(gm_sumsq), "a word takes the place of a sum");

/* On the host device both arrays are one: so the words there lie before those at home. */
static gm_clip *word_there(const gm_engine *engine, uint64_t step)
{
    return (gm_clip *)(void *)&engine->sums.there[gm_sums_clip(engine) + (step & 1)];
}

static gm_clip *word_home(const gm_engine *engine, uint64_t step)
{
    return (gm_clip *)(void *)&engine->sums.home[gm_sums_clip(engine) + 2 + (step & 1)];
}

gm_status gm_clip_new(gm_engine *engine)
{
    const gm_device_ops *ops = engine->device->ops;
    gm_clips *c = &engine->clip;
    for (int turn = 0; turn < 2; turn++) {
        GM_TRY(ops->event_new(engine->device, false, &c->there[turn]));
        GM_TRY(ops->event_new(engine->device, false, &c->home[turn]));
        GM_TRY(ops->event_new(engine->device, false, &c->used[turn][0]));
        GM_TRY(ops->event_new(engine->device, false, &c->used[turn][1]));
    }
    return ops->stream_new(engine->device, &c->stream);
}

void gm_clip_free(gm_engine *engine)
{
    gm_clips *c = &engine->clip;
    for (int turn = 0; turn < 2; turn++) {
        gm_free_event(engine->device, &c->there[turn]);
        gm_free_event(engine->device, &c->home[turn]);
        gm_free_event(engine->device, &c->used[turn][0]);
        gm_free_event(engine->device, &c->used[turn][1]);
    }
    gm_free_stream(engine->device, &c->stream);
}

gm_status gm_clip_order_sums(gm_engine *engine, gm_stream stream)
{
    const gm_clips *c = &engine->clip;
    for (int turn = 0; turn < 2; turn++) {
        if (c->has_word[turn]) {
            GM_TRY(engine->device->ops->event_wait(engine->device, c->there[turn], stream));
        }
    }
    return GM_OK;
}

gm_status gm_clip_issue(gm_engine *engine, double max_norm, float *norm, gm_stream stream)
{
    gm_device *device = engine->device;
    const gm_device_ops *ops = device->ops;
    gm_clips *c = &engine->clip;
    uint64_t step = engine->step.n + 1, turn = step & 1;
    if (c->is_used[turn]) { /* invariant 1; there may be a clip before that no step has used */
        GM_TRY(ops->event_wait(device, c->used[turn][0], stream));
        GM_TRY(ops->event_wait(device, c->used[turn][1], c->stream));
    }
    if (c->has_word[turn]) {
        GM_TRY(ops->event_wait(device, c->home[turn], stream));
    }
    c->has_word[turn] = true;
    c->step = step;
    gm_clip_args args = {.sums = &engine->sums.there[gm_sums_total(engine)],
                         .n = 1,
                         .max_norm = max_norm,
                         .out = word_there(engine, step),
                         .norm = norm};
    GM_TRY(ops->clip(device, &args, stream));
    GM_TRY(ops->event_record(device, c->there[turn], stream));
    GM_TRY(ops->event_wait(device, c->there[turn], c->stream));
    GM_TRY(ops->copy_d2h(device, word_home(engine, step), (uintptr_t)word_there(engine, step),
                         sizeof(gm_clip), c->stream));
    return ops->event_record(device, c->home[turn], c->stream);
}

gm_status gm_clip_note_issued(gm_engine *engine)
{
    gm_clips *c = &engine->clip;
    uint64_t turn = engine->step.n & 1;
    if (!c->has_word[turn]) {
        return GM_OK;
    }
    const gm_device_ops *ops = engine->device->ops;
    gm_stream updates = gm_is_opaque(engine) ? engine->call.stream : engine->update.stream;
    GM_TRY(ops->event_record(engine->device, c->used[turn][0], updates));
    c->is_used[turn] = true;
    return ops->event_record(engine->device, c->used[turn][1], engine->update.host_stream);
}

static void look(gm_engine *engine, uint64_t step, gm_clip *out)
{
    gm_note_access(engine->device, word_home(engine, step), sizeof *out, false, GM_STREAM_HOST);
    *out = *word_home(engine, step);
}

bool gm_clip_is_known(gm_engine *engine, uint64_t step, float *out_scale)
{
    bool is_known;
    gm_clip now;
    gm_event home = engine->clip.home[step & 1];
    if (engine->device->ops->event_query(engine->device, home, &is_known) != GM_OK || !is_known) {
        return false;
    }
    look(engine, step, &now);
    *out_scale = now.scale;
    return true;
}

gm_status gm_clip_wait(gm_engine *engine, uint64_t step, gm_clip *out)
{
    engine->clip.n_waits++;
    GM_TRY(engine->device->ops->event_sync(engine->device, engine->clip.home[step & 1]));
    look(engine, step, out);
    return GM_OK;
}

gm_status gm_clip_order(gm_engine *engine, bool is_at_home, gm_stream stream, const float **out)
{
    uint64_t step = engine->step.n;
    *out = is_at_home ? &word_home(engine, step)->scale : &word_there(engine, step)->scale;
    return engine->device->ops->event_wait(
        engine->device, (is_at_home ? engine->clip.home : engine->clip.there)[step & 1], stream);
}
