/* step.c - the optimizer's step over all chunks, and arming the backward that ends one.
 *
 * Invariant: everything that can be refused is refused before the first task is prepared. */
#include "engine/engine_impl.h"

#include <stdlib.h>
#include <string.h>

enum { PATIENCE = 2 }; /* steps in a row that go another way than the plan until it is changed */

static int compare_updates(const void *a, const void *b)
{
    uint32_t left = ((const gm_update *)a)->param, right = ((const gm_update *)b)->param;
    return left < right ? -1 : left > right;
}

static gm_status check_updates(const gm_engine *engine, const gm_update *updates, uint32_t n,
                               bool needs_grads)
{
    for (uint32_t i = 0; i < n; i++) {
        GM_TRY(gm_engine_check_param(engine, updates[i].param));
        const gm_param *p = &engine->params[updates[i].param];
        GM_FAIL_IF(!p->spec.has_moments || (needs_grads && p->grad == GM_GRAD_NONE), GM_ERR_ARG,
                   "%s has no %s", gm_engine_name(engine, updates[i].param),
                   p->spec.has_moments ? "gradient" : "moments");
        gm_adam_scalars scalars;
        GM_TRY(gm_adam_scalars_init(&updates[i].hyper, &scalars));
    }
    return GM_OK;
}

/* What the last steps did decides whether updates are planned inside the backward.  A loop that
 * keeps changing its way gets ever fewer plans.  Ranks make the same calls, so they find the
 * same. */
static void follow_loop(gm_engine *engine)
{
    gm_steps *s = &engine->step;
    s->n_others = s->is_announced == s->wants_immediate ? 0 : s->n_others + 1;
    s->patience = s->patience ? s->patience : PATIENCE;
    bool is_changed = s->n_others >= s->patience;
    if (is_changed || s->n_calls == 1) { /* no plan is changed by the first */
        s->wants_immediate = s->is_announced;
        s->n_others = 0;
    }
    s->patience *= is_changed ? 2 : 1;
    gm_room_want_plan(engine, is_changed && !engine->arrive.has_repeats);
    s->is_announced = false;
}

/* Of the last step: chunks that no pass has used since. */
static gm_status issue_rest(gm_engine *engine)
{
    GM_TRY(gm_update_issue_all(engine));
    GM_TRY(gm_is_opaque(engine) ? gm_opaque_join(engine) : GM_OK);
    return gm_clip_note_issued(engine);
}

gm_status gm_engine_issue(gm_engine *engine, gm_stream stream)
{
    GM_TRY(gm_call_begin_on(engine, stream));
    return gm_call_end(engine, issue_rest(engine));
}

static gm_status run_step(gm_engine *engine, const gm_update *updates, uint32_t n)
{
    if (engine->update.is_armed) {
        /* what was not complete in backward becomes pending now, with the same numbers */
        gm_update_disarm(engine);
    } else {
        GM_TRY(issue_rest(engine));
        engine->step.n++;
    }
    GM_TRY(gm_update_prepare(engine, updates, n, false));
    gm_speculation_drop(engine);
    for (uint32_t chunk = 0; chunk < gm_layout_n_chunks(engine->layout); chunk++) {
        if (gm_chunks_pins(engine->chunks, chunk, GM_WEIGHT) > 0) { /* shown: read without asking */
            GM_TRY(gm_update_issue(engine, chunk));
        }
    }
    bool is_planned = engine->room.plan && !gm_watch_is_any(engine) &&
                      (!gm_is_opaque(engine) || engine->opaque.caller.when != GM_OPAQUE_AT_STEP);
    GM_TRY(gm_update_issue_some(engine, is_planned ? GM_ISSUED_BY_STEP : UINT32_MAX));
    return gm_watch_renew(engine);
}

static gm_status sort_updates(const gm_update *updates, uint32_t n, gm_update **out)
{
    *out = malloc((n ? n : 1) * sizeof **out);
    GM_FAIL_IF(!*out, GM_ERR_NOMEM, "HOST: step over %u parameters", n);
    if (n) {
        memcpy(*out, updates, n * sizeof **out);
        qsort(*out, n, sizeof **out, compare_updates);
    }
    for (uint32_t i = 1; i < n; i++) { /* a task has room for each parameter once */
        if ((*out)[i].param == (*out)[i - 1].param) {
            uint32_t id = (*out)[i].param;
            free(*out);
            return GM_FAIL(GM_ERR_ARG, "parameter %u is in the step twice", id);
        }
    }
    return GM_OK;
}

/* Gradients that are used up cannot be stepped a second time. */
static gm_status check_not_used_up(const gm_engine *engine, const gm_update *updates, uint32_t n)
{
    for (uint32_t i = 0; !engine->update.is_armed && i < n; i++) {
        GM_TRY(gm_gradient_check_unused(engine, updates[i].param));
    }
    return GM_OK;
}

/* What is refused does not depend on where updates ran: an announced step uses up all that it
 * steps. */
static void use_up(gm_engine *engine, const gm_update *updates, uint32_t n)
{
    for (uint32_t i = 0; engine->step.is_announced && i < n; i++) {
        gm_gradient_use_up(engine, &engine->params[updates[i].param]);
    }
}

/* What comes of a clip that nobody has seen is for the step that it was made for. */
static gm_status check_clip(const gm_engine *engine, bool is_late)
{
    bool is_its = engine->clip.step == engine->step.n + 1;
    return !is_late || (is_its && !engine->update.is_armed)
               ? GM_OK
               : GM_FAIL(GM_ERR_STATE, "the last clip was not for this step");
}

static gm_status step(gm_engine *engine, const gm_update *updates, uint32_t n, bool is_late,
                      gm_stream stream)
{
    gm_update *sorted;
    GM_TRY(check_updates(engine, updates, n, true));
    GM_TRY(sort_updates(updates, n, &sorted));
    gm_status status = gm_call_begin_on(engine, stream);
    if (status == GM_OK) { /* nothing is written before these have passed */
        gm_timer_stop(engine, stream);
        status = check_not_used_up(engine, sorted, n);
        status = status == GM_OK ? check_clip(engine, is_late) : status;
        status = status == GM_OK ? gm_opaque_check_room(engine, sorted, n) : status;
        engine->step.is_late = status == GM_OK && is_late;
        status = status == GM_OK ? gm_gradient_reduce_all(engine) : status;
        engine->step.n_calls++;
        status = status == GM_OK ? gm_watch_poll(engine) : status;
        status = status == GM_OK ? gm_glance_turn(engine) : status;
        if (status == GM_OK) {
            status = run_step(engine, sorted, n);
            if (status != GM_OK && engine->dead == GM_OK) {
                status = gm_engine_die(engine, status);
            }
        }
        if (status == GM_OK) {
            use_up(engine, sorted, n);
            gm_pass_end(engine);
            gm_gradient_note_step(engine);
            gm_speculation_note_step(engine, sorted, n);
            follow_loop(engine);
            gm_status planned = gm_planner_run(engine); /* without one it goes on, on demand */
            if (engine->ranks.stream && planned != GM_OK) {
                status = gm_engine_die(engine, planned);
            }
        }
#ifdef GM_DEBUG
        GM_ASSERT(status != GM_OK || gm_chunks_check_bytes(engine->chunks) == GM_OK);
#endif
        (void)gm_call_end(engine, status);
    }
    free(sorted);
    return status;
}

gm_status gm_engine_step(gm_engine *engine, const gm_update *updates, uint32_t n, gm_stream stream)
{
    return step(engine, updates, n, false, stream);
}

gm_status gm_engine_step_clipped(gm_engine *engine, const gm_update *updates, uint32_t n,
                                 gm_stream stream)
{
    return step(engine, updates, n, true, stream);
}

gm_status gm_engine_arm(gm_engine *engine, const gm_update *updates, uint32_t n, bool may_run,
                        bool *out)
{
    gm_update *sorted;
    *out = false;
    GM_TRY(check_updates(engine, updates, n, false));
    GM_TRY(sort_updates(updates, n, &sorted));
    gm_status status = gm_call_begin(engine);
    if (status == GM_OK) {
        for (uint32_t id = 0; status == GM_OK && id < engine->n_params; id++) {
            status = gm_gradient_check_unused(engine, id);
        }
        /* An update does not touch what tensors show. */
        bool is_apart = engine->shown == GM_GATHERED;
        status = status == GM_OK && is_apart ? gm_watch_poll(engine) : status;
        engine->step.is_announced = status == GM_OK;
        engine->step.is_late = false;
        bool has_watched = !is_apart && gm_watch_is_any(engine);
        /* A first step shows whether gradients come in parts; a plan may be older, from an
         * evaluation. */
        /* Ranks decide alike: by the plan that they share, not by whether this one still has room
         * for it. */
        const gm_plan *plan =
            engine->ranks.stream ? engine->weights.collectives : engine->room.plan;
        *out = plan && engine->step.n > 0 && !engine->arrive.has_repeats && !has_watched &&
               !engine->update.is_armed;
        *out = *out && may_run && status == GM_OK;
        if (*out) {
            status = issue_rest(engine);
            engine->step.n++;
            status = status == GM_OK ? gm_update_prepare(engine, sorted, n, true) : status;
            if (status != GM_OK && engine->dead == GM_OK) { /* some tasks wait, others do not */
                status = gm_engine_die(engine, status);
            }
            gm_pass_begin_armed(engine); /* arrivals are counted from here */
        }
        (void)gm_call_end(engine, status);
    }
    free(sorted);
    return status;
}

gm_status gm_engine_disarm(gm_engine *engine, const char *cause)
{
    GM_TRY(gm_call_begin(engine));
    engine->step.is_announced = false;
    bool has_updated = false;
    for (uint32_t chunk = 0; chunk < gm_layout_n_chunks(engine->layout); chunk++) {
        has_updated |= gm_update_is_done(engine, chunk);
    }
    gm_status status = GM_OK;
    if (has_updated) {
        (void)gm_engine_die(
            engine,
            GM_FAIL(GM_ERR_STATE,
                    "backward(step=True) failed after it had updated some of the weights: %s",
                    cause));
        status = gm_call_check(engine);
    } else if (engine->update.is_armed) {
        gm_update_disarm(engine);
        engine->step.n--;
    }
    return gm_call_end(engine, status);
}

bool gm_engine_wants_numbers(gm_engine *engine)
{
    pthread_mutex_lock(&engine->lock);
    bool wants = engine->dead == GM_OK && gm_speculation_wants_numbers(engine);
    gm_engine_unlock(engine);
    return wants;
}

gm_status gm_engine_announce(gm_engine *engine, const gm_update *updates, uint32_t n)
{
    gm_update *sorted;
    GM_TRY(check_updates(engine, updates, n, false));
    GM_TRY(sort_updates(updates, n, &sorted));
    gm_status status = gm_call_begin(engine);
    if (status == GM_OK) {
        status = gm_speculation_wants_numbers(engine) ? gm_update_number(engine, sorted, n) : GM_OK;
        (void)gm_call_end(engine, status);
    }
    free(sorted);
    return status;
}
