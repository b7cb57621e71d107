/* plan_model.h - random models and the traces of their passes, for the tests of the plan. */
#pragma once

#include <string.h>

#include "check.h"
#include "plan/plan.h"

#define MOST_TRACES 3

typedef struct model {
    uint32_t n_chunks, n_units;
    gm_plan_chunk *chunks;
    uint32_t *unit_chunks, *unit_begin;
    uint32_t *parent; /* of a unit, itself for a top one; children follow their parents */
    gm_book *book;
    const gm_trace *traces[MOST_TRACES];
    uint32_t n_runs[MOST_TRACES], n_traces;
    gm_plan_input input;
} model;

typedef struct shape {
    uint32_t n_units, most_chunks_of_unit; /* chunks that a unit begins */
    uint32_t n_blocks;                     /* of a chunk's weights, at most */
    bool is_odd; /* nested units, tied and frozen and unused chunks, checkpointing, shared chunks */
    bool has_evaluation, has_second;
    /* Some units, or all, are used by backward alone: their forward was another pass (reentrant checkpointing), or
     * their parameters are used outside units. */
    bool is_cut;
    uint32_t n_runs;
    double seconds; /* compute of one pass */
} shape;

static inline uint64_t below(uint64_t *seed, uint64_t bound)
{
    return next_random(seed) % bound;
}

#define MODEL_BLOCK ((size_t)1 << 21)

static inline void size_chunk(gm_plan_chunk *chunk, uint64_t numel, bool is_frozen)
{
    static const uint32_t bytes_per[GM_N_PIECES] = {2, 10, 2};
    *chunk = (gm_plan_chunk){.numel = is_frozen ? 0 : numel};
    for (uint32_t piece = 0; piece < GM_N_PIECES; piece++) {
        chunk->bytes[piece] = is_frozen && piece != GM_WEIGHT ? 0 : numel * bytes_per[piece];
        chunk->blocks[piece] = (uint32_t)((chunk->bytes[piece] + MODEL_BLOCK - 1) / MODEL_BLOCK);
    }
}

static inline gm_rates usual_rates(void)
{
    return (gm_rates){.h2d = 55e9,
                      .d2h = 55e9,
                      .h2d_both = 50e9,
                      .d2h_both = 50e9,
                      .host_adam = 4.8e9,
                      .host_adam_beside = 3.4e9,
                      .h2d_beside = 50e9,
                      .d2h_beside = 50e9,
                      .device_adam = 145e9};
}

typedef struct pass_writer {
    model *m;
    uint32_t trace;
    uint32_t open_touch; /* tick of the touch that is still held */
} pass_writer;

static inline uint32_t model_tick(pass_writer *w, gm_tick_kind kind, uint32_t id)
{
    uint32_t tick;
    CHECK_OK(gm_book_tick(w->m->book, kind, id, 0, &w->trace, &tick));
    return tick;
}

static inline void enter_unit(pass_writer *w, uint32_t unit, uint32_t end, uint32_t skip)
{
    if (unit == skip) {
        return;
    }
    uint32_t tick = model_tick(w, GM_TICK_ENTER, unit);
    for (uint32_t child = unit + 1; child < end; child++) {
        if (w->m->parent[child] == unit) {
            enter_unit(w, child, end, skip);
        }
    }
    gm_book_release(w->m->book, tick);
}

/* A forward (units in order, one of them skipped, and none before `forward_from`) and a backward; is_checkpointed:
 * units are entered again. */
static inline uint32_t write_pass(model *m, uint64_t *seed, bool has_backward, bool is_checkpointed,
                                  uint32_t forward_from, uint32_t skip)
{
    pass_writer w = {.m = m, .open_touch = GM_NO_TICK};
    uint32_t trace;
    CHECK_OK(gm_book_begin(m->book, has_backward));
    for (uint32_t unit = forward_from; unit < m->n_units; unit++) {
        if (m->parent[unit] == unit) {
            enter_unit(&w, unit, m->n_units, skip);
        }
    }
    bool *is_skipped = calloc(m->n_units, sizeof *is_skipped);
    for (uint32_t unit = 0; unit < m->n_units; unit++) {
        is_skipped[unit] = unit == skip || (m->parent[unit] != unit && is_skipped[m->parent[unit]]);
    }
    for (uint32_t unit = m->n_units; unit-- > 0 && has_backward;) {
        if (is_skipped[unit]) {
            continue;
        }
        uint32_t tick = GM_NO_TICK;
        if (is_checkpointed) {
            tick = model_tick(&w, GM_TICK_ENTER, unit);
            gm_book_release(m->book, tick);
        }
        for (uint32_t i = m->unit_begin[unit + 1]; i-- > m->unit_begin[unit];) {
            uint32_t c = m->unit_chunks[i];
            bool is_first_unit = true;
            if (below(seed, 8) != 0 || !has_backward) {
                uint32_t touch = model_tick(&w, GM_TICK_TOUCH, c);
                if (w.open_touch != GM_NO_TICK) {
                    gm_book_release(m->book, w.open_touch);
                }
                w.open_touch = touch;
                if (below(seed, 2) == 0) {
                    gm_book_release(m->book, touch);
                    w.open_touch = GM_NO_TICK;
                }
            }
            for (uint32_t j = 0; j < m->unit_begin[unit]; j++) {
                bool is_earlier = m->unit_chunks[j] == c;
                for (uint32_t u = 0; is_earlier && u < unit; u++) {
                    is_first_unit &=
                        is_skipped[u] || j < m->unit_begin[u] || j >= m->unit_begin[u + 1];
                }
            }
            for (uint32_t j = m->unit_begin[unit]; j < i; j++) {
                is_first_unit &= m->unit_chunks[j] != c;
            }
            if (is_first_unit && m->chunks[c].bytes[GM_GRAD] > 0) {
                (void)model_tick(&w, GM_TICK_GRAD, c);
            }
        }
    }
    if (w.open_touch != GM_NO_TICK && below(seed, 2) == 0) {
        gm_book_release(m->book, w.open_touch);
    }
    free(is_skipped);
    CHECK_OK(gm_book_end(m->book, &trace));
    return trace;
}

static inline void time_trace(model *m, uint32_t trace, double seconds)
{
    const gm_trace *timed = gm_book_trace(m->book, trace);
    for (uint32_t t = 0; t < timed->n; t++) {
        gm_book_time(m->book, timed->hash, t, seconds / timed->n, false);
    }
}

static inline void model_new(model *m, const shape *s, uint64_t *seed)
{
    *m = (model){.n_units = s->n_units};
    uint32_t most = s->n_units * (s->most_chunks_of_unit + 2) + 2, n = 0, n_owned = 0;
    m->chunks = calloc(most, sizeof *m->chunks);
    m->unit_chunks = calloc(most, sizeof *m->unit_chunks);
    m->unit_begin = calloc(s->n_units + 1, sizeof *m->unit_begin);
    m->parent = calloc(s->n_units, sizeof *m->parent);
    for (uint32_t unit = 0; unit < s->n_units; unit++) {
        m->parent[unit] =
            s->is_odd && unit > 0 && below(seed, 3) == 0 ? (uint32_t)below(seed, unit) : unit;
        if (s->is_odd && unit > 0 && n > 0 && below(seed, 4) == 0) {
            m->unit_chunks[n_owned++] = n - 1; /* a chunk that two units share */
        } else if (s->is_odd && n > 2 && below(seed, 8) == 0) {
            m->unit_chunks[n_owned++] = (uint32_t)below(seed, n - 1); /* tied */
        }
        uint32_t count = 1 + (uint32_t)below(seed, s->most_chunks_of_unit);
        for (uint32_t i = 0; i < count; i++) {
            uint64_t blocks = s->is_odd ? 1 + below(seed, s->n_blocks) : s->n_blocks;
            uint64_t numel = blocks * MODEL_BLOCK / 2;
            numel -= s->is_odd ? below(seed, MODEL_BLOCK / 4) : 0;
            size_chunk(&m->chunks[n], numel, s->is_odd && below(seed, 6) == 0);
            m->chunks[n].must_reside = s->is_odd && below(seed, 12) == 0;
            m->unit_chunks[n_owned++] = n++;
        }
        m->unit_begin[unit + 1] = n_owned;
    }
    if (s->is_odd && below(seed, 3) == 0) {
        size_chunk(&m->chunks[n++], MODEL_BLOCK, false); /* nobody uses it */
    }
    m->n_chunks = n;
    CHECK_OK(gm_book_new(&m->book));
    uint32_t from = s->is_cut ? 1 + (uint32_t)below(seed, s->n_units) : 0;
    bool is_checkpointed = (s->is_cut && from < s->n_units) || !s->is_odd || below(seed, 2) == 0;
    uint32_t ids[MOST_TRACES], k = 0;
    ids[k] = write_pass(m, seed, true, is_checkpointed, from, UINT32_MAX);
    m->n_runs[k++] = s->n_runs;
    if (s->has_second && s->n_units > 1) {
        ids[k] =
            write_pass(m, seed, true, is_checkpointed, from, (uint32_t)below(seed, s->n_units));
        m->n_runs[k++] = 1;
    }
    if (s->has_evaluation) {
        ids[k] = write_pass(m, seed, false, false, 0, s->is_odd && s->n_units > 1 ? 1 : UINT32_MAX);
        m->n_runs[k++] = 1;
    }
    m->n_traces = 0;
    for (uint32_t i = 0; i < k; i++) {
        bool is_known = ids[i] == GM_NO_TRACE;
        for (uint32_t j = 0; j < i; j++) {
            is_known |= ids[j] == ids[i];
        }
        if (!is_known) {
            time_trace(m, ids[i], s->seconds);
            m->n_runs[m->n_traces] = m->n_runs[i];
            m->traces[m->n_traces++] = gm_book_trace(m->book, ids[i]);
        }
    }
    m->input = (gm_plan_input){.chunks = m->chunks,
                               .n_chunks = m->n_chunks,
                               .unit_chunks = m->unit_chunks,
                               .unit_begin = m->unit_begin,
                               .n_units = m->n_units,
                               .traces = m->traces,
                               .n_runs = m->n_runs,
                               .n_traces = m->n_traces,
                               .block_bytes = MODEL_BLOCK,
                               .state_share = 1,
                               .rates = usual_rates()};
}

/* A model of equal units one after the other, each entered again in backward; a quarter of the time is forward. */
static inline void model_of_units(model *m, uint32_t n, uint64_t numel, double seconds)
{
    uint32_t trace, tick;
    *m = (model){.n_chunks = n, .n_units = n, .n_traces = 1, .n_runs = {1}};
    m->chunks = calloc(n, sizeof *m->chunks);
    m->unit_chunks = calloc(n, sizeof *m->unit_chunks);
    m->unit_begin = calloc(n + 1, sizeof *m->unit_begin);
    for (uint32_t c = 0; c < n; c++) {
        size_chunk(&m->chunks[c], numel, false);
        m->unit_chunks[c] = c;
        m->unit_begin[c + 1] = c + 1;
    }
    CHECK_OK(gm_book_new(&m->book));
    CHECK_OK(gm_book_begin(m->book, true));
    for (uint32_t i = 0; i < 2 * n; i++) {
        uint32_t c = i < n ? i : 2 * n - 1 - i;
        CHECK_OK(gm_book_tick(m->book, GM_TICK_ENTER, c, 0, &trace, &tick));
        gm_book_release(m->book, tick);
        if (i >= n) {
            CHECK_OK(gm_book_tick(m->book, GM_TICK_TOUCH, c, 0, &trace, &tick));
            gm_book_release(m->book, tick);
            CHECK_OK(gm_book_tick(m->book, GM_TICK_GRAD, c, 0, &trace, &tick));
        }
    }
    CHECK_OK(gm_book_end(m->book, &trace));
    for (uint32_t t = 0; t < 4 * n; t++) {
        bool is_touch = t >= n && (t - n) % 3 == 1, is_grad = t >= n && (t - n) % 3 == 2;
        gm_book_time(m->book, gm_book_trace(m->book, trace)->hash, t,
                     is_grad ? 0 : seconds / 4 / n * (is_touch ? 2 : 1), false);
    }
    m->traces[0] = gm_book_trace(m->book, trace);
    m->input = (gm_plan_input){.chunks = m->chunks,
                               .n_chunks = n,
                               .unit_chunks = m->unit_chunks,
                               .unit_begin = m->unit_begin,
                               .n_units = n,
                               .traces = m->traces,
                               .n_runs = m->n_runs,
                               .n_traces = 1,
                               .block_bytes = MODEL_BLOCK,
                               .state_share = 1,
                               .rates = usual_rates()};
}

/* The model's chunks are shared by n_ranks ranks, all but one in `one_in` (0: every one); or each has them whole and only
 * sums gradients.  Links between ranks as of a host with NVLink. */
static inline void share_model(model *m, uint32_t n_ranks, bool is_replicated, uint32_t one_in,
                               uint64_t *seed)
{
    m->input.n_ranks = n_ranks;
    m->input.rates.gather = 280e9;
    m->input.rates.reduce = 250e9;
    for (uint32_t c = 0; c < m->n_chunks; c++) {
        gm_plan_chunk *chunk = &m->chunks[c];
        if (one_in > 0 && below(seed, one_in) == 0) {
            continue;
        }
        chunk->bytes[GM_UNREDUCED] = chunk->bytes[GM_GRAD];
        chunk->bytes[GM_GATHERED] = is_replicated ? 0 : chunk->bytes[GM_WEIGHT];
        for (uint32_t piece = 0; piece < GM_N_OWN_PIECES && !is_replicated; piece++) {
            chunk->bytes[piece] = (chunk->bytes[piece] + n_ranks - 1) / n_ranks;
        }
        chunk->numel = is_replicated ? chunk->numel : (chunk->numel + n_ranks - 1) / n_ranks;
        for (uint32_t piece = 0; piece < GM_N_PIECES; piece++) {
            chunk->blocks[piece] =
                (uint32_t)((chunk->bytes[piece] + MODEL_BLOCK - 1) / MODEL_BLOCK);
        }
    }
}

static inline void model_free(model *m)
{
    free(m->chunks);
    free(m->unit_chunks);
    free(m->unit_begin);
    free(m->parent);
    gm_book_free(m->book);
}

/* Bytes with which everything is on the device. */
static inline size_t whole_bytes(const model *m)
{
    size_t blocks = 0;
    for (uint32_t c = 0; c < m->n_chunks; c++) {
        for (uint32_t piece = 0; piece < GM_N_PIECES; piece++) {
            blocks += m->chunks[c].blocks[piece];
        }
    }
    return blocks * MODEL_BLOCK;
}

static inline shape random_shape(uint64_t *seed)
{
    return (shape){.n_units = 1 + (uint32_t)below(seed, 14),
                   .most_chunks_of_unit = 1 + (uint32_t)below(seed, 3),
                   .n_blocks = 1 + (uint32_t)below(seed, 9),
                   .is_odd = below(seed, 4) != 0,
                   .has_evaluation = below(seed, 2) == 0,
                   .has_second = below(seed, 3) == 0,
                   .n_runs = below(seed, 2) == 0 ? 1 : 1 + (uint32_t)below(seed, 5),
                   .seconds = below(seed, 5) == 0 ? 0 : 1e-3 * (double)(1 + below(seed, 40))};
}
