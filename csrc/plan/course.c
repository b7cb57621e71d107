/* course.c - reads the traces: when each chunk's weights are needed, when its gradient grows and is
 * complete, and the orders that follow from it.
 *
 * 1. The uses of one chunk in one course do not overlap: touching ones are joined.
 * 2. Everything is linear in ticks, apart from sorting, and depends on the input alone. */
#include <stdlib.h>
#include <string.h>

#include "plan/plan_impl.h"

/* Gradients may be open this many completed gradients ahead of their own, where no touch tells when
 * they begin. */
#define OPEN_AHEAD 2u

void gm_course_free(gm_course *course)
{
    free(course->uses);
    free(course->opens);
    free(course->sums);
    free(course->first);
    free(course->grad);
    free(course->ready);
    memset(course, 0, sizeof *course);
}

static uint32_t n_chunks_of(const gm_plan_input *input, const gm_tick *tick, const uint32_t **out)
{
    if (tick->kind == GM_TICK_ENTER) {
        *out = input->unit_chunks + input->unit_begin[tick->id];
        return input->unit_begin[tick->id + 1] - input->unit_begin[tick->id];
    }
    *out = &tick->id;
    return 1;
}

static gm_status check_trace(const gm_plan_input *input, const gm_trace *trace, size_t *n_uses)
{
    *n_uses = 0;
    for (uint32_t t = 0; t < trace->n; t++) {
        const gm_tick *tick = &trace->ticks[t];
        uint32_t limit = tick->kind == GM_TICK_ENTER ? input->n_units : input->n_chunks;
        GM_FAIL_IF(tick->kind > GM_TICK_GRAD || tick->id >= limit, GM_ERR_ARG,
                   "plan: tick %u of a trace names %s %u of %u", t,
                   tick->kind == GM_TICK_ENTER ? "unit" : "chunk", tick->id, limit);
        const uint32_t *chunks;
        *n_uses += tick->kind == GM_TICK_GRAD ? 0 : n_chunks_of(input, tick, &chunks);
    }
    return GM_OK;
}

static void read_uses(const gm_plan_input *input, gm_course *course, uint32_t *latest)
{
    for (uint32_t c = 0; c < input->n_chunks; c++) {
        latest[c] = UINT32_MAX;
    }
    for (uint32_t t = 0; t < course->n; t++) {
        const gm_tick *tick = &course->trace->ticks[t];
        if (tick->kind == GM_TICK_GRAD) {
            continue;
        }
        uint32_t end = tick->until > t + 1 ? tick->until : t + 1;
        end = end > course->n ? course->n : end;
        const uint32_t *chunks;
        uint32_t n = n_chunks_of(input, tick, &chunks);
        for (uint32_t i = 0; i < n; i++) {
            uint32_t c = chunks[i];
            if (latest[c] != UINT32_MAX && course->uses[latest[c]].end >= t) {
                gm_use *use = &course->uses[latest[c]];
                use->end = end > use->end ? end : use->end;
                continue;
            }
            if (latest[c] == UINT32_MAX) {
                course->first[c] = t;
            }
            latest[c] = course->n_uses;
            course->uses[course->n_uses++] = (gm_use){c, t, end};
        }
    }
}

int gm_by_begin(const void *left, const void *right)
{
    const gm_use *a = left, *b = right;
    if (a->begin != b->begin) {
        return a->begin < b->begin ? -1 : 1;
    }
    return a->end != b->end ? (a->end < b->end ? -1 : 1)
                            : (a->chunk > b->chunk) - (a->chunk < b->chunk);
}

static uint32_t first_touch(const gm_plan_input *input, uint32_t unit, uint32_t first,
                            const uint32_t *touched)
{
    for (uint32_t i = input->unit_begin[unit]; i < input->unit_begin[unit + 1]; i++) {
        uint32_t c = input->unit_chunks[i];
        first = touched[c] < first ? touched[c] : first;
    }
    return first;
}

static void begin_unit(const gm_plan_input *input, uint32_t unit, uint32_t begin, uint32_t *out)
{
    for (uint32_t i = input->unit_begin[unit]; i < input->unit_begin[unit + 1]; i++) {
        uint32_t c = input->unit_chunks[i];
        out[c] = begin < out[c] ? begin : out[c];
    }
}

/* (n_chunks,) When the gradient of a chunk may begin to grow; n: no tick tells.  The gradients of a
 * unit's parameters come with the node that touches one of them, also those that are not needed
 * themselves (a bias); a unit of which nothing is touched may give gradients from when it is
 * entered again.  `touched` is scratch, (n_chunks,). */
static void find_begins(const gm_plan_input *input, const gm_course *course, uint32_t *touched,
                        uint32_t *out)
{
    const gm_tick *ticks = course->trace->ticks;
    for (uint32_t c = 0; c < input->n_chunks; c++) {
        touched[c] = out[c] = course->n;
    }
    for (uint32_t t = course->n; t-- > course->backward;) {
        if (ticks[t].kind == GM_TICK_TOUCH) {
            touched[ticks[t].id] = out[ticks[t].id] = t;
        }
    }
    for (uint32_t unit = 0; unit < input->n_units; unit++) {
        begin_unit(input, unit, first_touch(input, unit, course->n, touched), out);
    }
    for (uint32_t t = course->backward; t < course->n; t++) {
        if (ticks[t].kind == GM_TICK_ENTER &&
            first_touch(input, ticks[t].id, course->n, touched) == course->n) {
            begin_unit(input, ticks[t].id, t, out);
        }
    }
}

/* The tick at which so many other gradients are complete, or as many as there are. */
static uint32_t behind_others(const gm_course *course, uint32_t ready, uint32_t n)
{
    uint32_t tick = ready;
    for (uint32_t t = ready + 1; t < course->n && n > 0; t++) {
        if (course->trace->ticks[t].kind == GM_TICK_GRAD) {
            tick = t;
            n--;
        }
    }
    return tick;
}

static void read_opens(const gm_plan_input *input, gm_course *course, const uint32_t *begins)
{
    uint32_t recent[OPEN_AHEAD];
    for (uint32_t i = 0; i < OPEN_AHEAD; i++) {
        recent[i] = course->backward;
    }
    for (uint32_t t = course->backward; t < course->n; t++) {
        const gm_tick *tick = &course->trace->ticks[t];
        if (tick->kind != GM_TICK_GRAD) {
            continue;
        }
        if (course->grad[tick->id] == t && input->chunks[tick->id].bytes[GM_GRAD] > 0) {
            uint32_t begin = begins[tick->id] < recent[0] ? begins[tick->id] : recent[0];
            bool may_be_early =
                input->when == GM_IMMEDIATE || (input->is_opaque && input->spare_bytes > 0);
            uint32_t last = may_be_early ? course->ready[tick->id] : t;
            uint32_t end = last < course->n ? last + 1 : course->n;
            bool is_reduced = gm_is_reduced(input, tick->id);
            /* What was summed before has to be there when the sum comes, so it comes back a tick
             * earlier. */
            course->sums[course->n_opens] = (gm_use){tick->id,
                                                     !is_reduced ? begin
                                                     : t > 0     ? t - 1
                                                                 : 0,
                                                     end};
            course->opens[course->n_opens++] = (gm_use){tick->id, begin, is_reduced ? t + 1 : end};
        }
        memmove(recent, recent + 1, sizeof recent - sizeof recent[0]);
        recent[OPEN_AHEAD - 1] = t;
    }
    qsort(course->opens, course->n_opens, sizeof *course->opens, gm_by_begin);
    qsort(course->sums, course->n_opens, sizeof *course->sums, gm_by_begin);
}

gm_status gm_course_new(const gm_plan_input *input, const gm_trace *trace, uint32_t n_runs,
                        uint32_t n_behind, gm_course *out)
{
    *out = (gm_course){.trace = trace, .n = trace->n, .n_runs = n_runs, .backward = trace->n};
    size_t n_uses;
    GM_TRY(check_trace(input, trace, &n_uses));
    out->uses = calloc(n_uses + 1, sizeof *out->uses);
    out->opens = calloc((size_t)input->n_chunks + 1, sizeof *out->opens);
    out->sums = calloc((size_t)input->n_chunks + 1, sizeof *out->sums);
    out->first = calloc((size_t)input->n_chunks + 1, sizeof *out->first);
    out->grad = calloc((size_t)input->n_chunks + 1, sizeof *out->grad);
    out->ready = calloc((size_t)input->n_chunks + 1, sizeof *out->ready);
    uint32_t *latest = calloc((size_t)input->n_chunks + 1, sizeof *latest);
    uint32_t *begins = calloc((size_t)input->n_chunks + 1, sizeof *begins);
    if (!out->ready || !out->uses || !out->opens || !out->sums || !out->first || !out->grad ||
        !latest || !begins) {
        free(latest);
        free(begins);
        gm_course_free(out);
        return GM_FAIL(GM_ERR_NOMEM, "host: no room to plan a trace of %u ticks", trace->n);
    }
    for (uint32_t c = 0; c < input->n_chunks; c++) {
        out->first[c] = out->n;
        out->grad[c] = GM_NO_TICK;
    }
    for (uint32_t t = out->n; t-- > 0;) {
        const gm_tick *tick = &trace->ticks[t];
        if (tick->kind != GM_TICK_ENTER) {
            out->backward = t;
        }
        if (tick->kind == GM_TICK_GRAD && out->grad[tick->id] == GM_NO_TICK) {
            out->grad[tick->id] = t;
        }
    }
    read_uses(input, out, latest);
    for (uint32_t c = 0; c < input->n_chunks; c++) {
        uint32_t end = latest[c] == UINT32_MAX ? 0 : out->uses[latest[c]].end;
        uint32_t grad = out->grad[c] == GM_NO_TICK ? out->n : out->grad[c];
        uint32_t ready = end > grad ? end : grad;
        out->ready[c] = behind_others(out, ready, n_behind);
    }
    find_begins(input, out, latest, begins);
    read_opens(input, out, begins);
    free(latest);
    free(begins);
    return GM_OK;
}

void gm_problem_free(gm_problem *problem)
{
    for (uint32_t i = 0; i < problem->n_courses; i++) {
        gm_course_free(&problem->courses[i]);
    }
    free(problem->courses);
    free(problem->order);
    free(problem->grad_order);
    free(problem->is_trained);
    memset(problem, 0, sizeof *problem);
}

static gm_status check_input(const gm_plan_input *input)
{
    GM_FAIL_IF(input->n_chunks == 0 || input->n_traces == 0 || input->block_bytes == 0, GM_ERR_ARG,
               "plan: %u chunks, %u traces, blocks of %zu bytes; all must be positive",
               input->n_chunks, input->n_traces, input->block_bytes);
    const double *rates = (const double *)&input->rates;
    for (size_t i = 0; i < offsetof(gm_rates, gather) / sizeof *rates; i++) {
        GM_FAIL_IF(!(rates[i] > 0), GM_ERR_ARG,
                   "plan: rate %zu of this machine is %g; measure it first", i, rates[i]);
    }
    for (uint32_t i = 0; i < input->unit_begin[input->n_units]; i++) {
        GM_FAIL_IF(input->unit_chunks[i] >= input->n_chunks, GM_ERR_ARG,
                   "plan: a unit has chunk %u of %u", input->unit_chunks[i], input->n_chunks);
    }
    for (uint32_t c = 0; c < input->n_chunks; c++) {
        for (uint32_t piece = 0; piece < GM_N_PIECES; piece++) {
            GM_FAIL_IF(input->chunks[c].bytes[piece] >
                           (size_t)input->chunks[c].blocks[piece] * input->block_bytes,
                       GM_ERR_ARG, "plan: chunk %u has %zu bytes in %u blocks", c,
                       input->chunks[c].bytes[piece], input->chunks[c].blocks[piece]);
        }
        GM_FAIL_IF(input->n_ranks <= 1 && (gm_is_gathered(input, c) || gm_is_reduced(input, c)),
                   GM_ERR_ARG, "plan: chunk %u is shared by ranks, but there is one", c);
    }
    return GM_OK;
}

gm_status gm_sort_chunks(const uint32_t *key, uint32_t limit, const uint32_t *from, uint32_t n,
                         uint32_t *out)
{
    uint32_t *count = calloc((size_t)limit + 2, sizeof *count);
    GM_FAIL_IF(!count, GM_ERR_NOMEM, "host: no room to sort %u chunks", n);
    for (uint32_t c = 0; c < n; c++) {
        count[(key[c] < limit ? key[c] : limit) + 1]++;
    }
    for (uint32_t i = 0; i <= limit; i++) {
        count[i + 1] += count[i];
    }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t c = from ? from[i] : i;
        out[count[key[c] < limit ? key[c] : limit]++] = c;
    }
    free(count);
    return GM_OK;
}

static gm_status read_problem(const gm_plan_input *input, gm_problem *out)
{
    out->courses = calloc(input->n_traces, sizeof *out->courses);
    out->order = calloc(input->n_chunks, sizeof *out->order);
    out->grad_order = calloc(input->n_chunks, sizeof *out->grad_order);
    out->is_trained = calloc(input->n_chunks, sizeof *out->is_trained);
    GM_FAIL_IF(!out->courses || !out->order || !out->grad_order || !out->is_trained, GM_ERR_NOMEM,
               "host: no room to plan %u chunks", input->n_chunks);
    bool has_main = false;
    for (uint32_t c = 0; c < input->n_chunks; c++) {
        out->has_gathered |= gm_is_gathered(input, c);
        out->has_unreduced |= gm_is_reduced(input, c);
    }
    for (uint32_t i = 0; i < input->n_traces; i++) {
        gm_course *course = &out->courses[i];
        uint32_t n_runs = input->n_runs ? input->n_runs[i] : 1;
        GM_TRY(gm_course_new(input, input->traces[i], n_runs, out->n_behind, course));
        out->n_courses++;
        out->most_ticks = course->n > out->most_ticks ? course->n : out->most_ticks;
        if (!input->traces[i]->has_backward || course->n_runs == 0) {
            course->n_runs = 0;
            continue;
        }
        out->n_passes += course->n_runs;
        if (!has_main || course->n_runs > out->courses[out->main].n_runs) {
            out->main = i;
            has_main = true;
        }
        for (uint32_t c = 0; c < input->n_chunks; c++) {
            out->is_trained[c] |= course->grad[c] != GM_NO_TICK && input->chunks[c].numel > 0 &&
                                  input->chunks[c].bytes[GM_GRAD] > 0;
        }
    }
    const gm_course *main = &out->courses[out->main];
    GM_TRY(gm_sort_chunks(main->first, main->n, NULL, out->n, out->order));
    return gm_sort_chunks(main->grad, main->n, NULL, out->n, out->grad_order);
}

gm_status gm_problem_new(const gm_plan_input *input, uint32_t n_behind, gm_problem *out)
{
    *out = (gm_problem){.input = input, .n = input->n_chunks, .n_behind = n_behind};
    GM_TRY(check_input(input));
    size_t n_blocks = input->device_bytes / input->block_bytes;
    out->n_blocks = n_blocks > INT32_MAX ? INT32_MAX : (uint32_t)n_blocks;
    gm_status status = read_problem(input, out);
    if (status != GM_OK) {
        gm_problem_free(out);
    }
    return status;
}
