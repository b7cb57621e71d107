/* gather.c - when a pass gathers weights, and what it then asks of the shards.
 *
 * 1. Gathers are issued in the order of the uses they serve, each no later than its use and no
 *    earlier than the last use of what it overwrites has ended.  So no gather that is needed stands
 *    behind one that is not yet, and of reduces only those stand before it whose gradients were
 *    complete when it could begin.
 * 2. A chunk's gathered weights, once gathered in a pass, are gathered again only after their
 *    blocks were taken. */
#include <stdlib.h>
#include <string.h>

#include "plan/plan_impl.h"
#include "plan/ring.h"

/* Gathers that are issued ahead of the use that needs one, where memory does not bind: at least so
 * many, and so large a part of all. */
#define AHEAD_LEAST 12u
#define AHEAD_PART  16u

void gm_needs_free(gm_needs *needs)
{
    free(needs->uses);
    free(needs->first);
    free(needs->gathers);
    memset(needs, 0, sizeof *needs);
}

/* Whether an update of streamed weights, or what speculates it in their place, comes at its
 * gradient's tick. */
static bool is_updated_in_pass(const gm_plan *plan, const gm_plan_input *input,
                               const gm_course *course, uint32_t c)
{
    bool is_early = input->when == GM_IMMEDIATE ? !plan->is_late[c]
                                                : input->is_opaque && plan->is_speculated[c];
    return is_early && course->grad[c] != GM_NO_TICK && plan->class_of[c] == GM_CLASS_S2;
}

/* The uses of the course's chunks without gathered weights, prolonged where an update on the device
 * needs streamed weights until the gradient's tick.  `latest` is scratch, (n_chunks,). */
static void prolong(const gm_plan *plan, const gm_plan_input *input, const gm_course *course,
                    uint32_t *latest, gm_needs *out)
{
    memset(latest, 0xff, plan->n * sizeof *latest);
    for (uint32_t i = 0; i < out->n_uses; i++) {
        latest[out->uses[i].chunk] = i;
    }
    for (uint32_t c = 0; c < plan->n; c++) {
        if (!is_updated_in_pass(plan, input, course, c)) {
            continue;
        }
        uint32_t end = course->ready[c] < course->n ? course->ready[c] + 1 : course->n;
        bool is_unused = latest[c] == UINT32_MAX; /* its forward was a pass of its own */
        if (gm_is_gathered(input, c) || is_unused) {
            out->uses[out->n_uses++] = (gm_use){c, end - 1, end};
        } else {
            gm_use *use = &out->uses[latest[c]];
            use->end = use->end > end ? use->end : end;
        }
    }
}

static void find_gathers(const gm_plan_input *input, const gm_plan *plan, const gm_course *course,
                         gm_rings *rings, gm_needs *out)
{
    uint32_t ahead = plan->n / AHEAD_PART > AHEAD_LEAST ? plan->n / AHEAD_PART : AHEAD_LEAST;
    uint32_t latest = 0;
    for (uint32_t i = 0; i < course->n_uses; i++) {
        const gm_use *use = &course->uses[i];
        uint32_t c = use->chunk, from = 0;
        if (gm_is_gathered(input, c)) {
            const gm_place *place = &plan->places[c * GM_N_PIECES + GM_GATHERED];
            bool is_kept = place->length == 0 || place->is_resident; /* its place may come later */
            if (is_kept) {
                from = out->first[c] < course->n ? GM_NO_TICK : 0;
            } else {
                uint32_t n_blocks = input->chunks[c].blocks[GM_GATHERED];
                from = gm_rings_claim(rings, place, n_blocks, c, use->end);
            }
            if (from == GM_NO_TICK) {
                continue;
            }
            if (from > use->begin) {
                out->misfit = c;
                from = use->begin;
            }
            uint32_t soonest =
                out->n_gathers < ahead ? 0 : out->gathers[out->n_gathers - ahead].end;
            latest = from > latest ? from : latest;
            latest = soonest > latest ? soonest : latest;
            out->gathers[out->n_gathers++] = (gm_use){c, latest, use->begin};
            out->uses[out->n_uses++] = (gm_use){c, latest, latest + 1};
        } else {
            out->uses[out->n_uses++] = *use;
        }
        uint32_t begin = out->uses[out->n_uses - 1].begin;
        out->first[c] = begin < out->first[c] ? begin : out->first[c];
    }
}

static bool is_sorted(const gm_needs *needs)
{
    for (uint32_t i = 1; i < needs->n_uses; i++) {
        if (needs->uses[i].begin < needs->uses[i - 1].begin) {
            return false;
        }
    }
    return true;
}

gm_status gm_needs_new(const gm_plan_input *input, const gm_plan *plan, const gm_course *course,
                       gm_needs *out)
{
    size_t n_uses = (size_t)course->n_uses + plan->n + 1;
    *out = (gm_needs){.uses = malloc(n_uses * sizeof(gm_use)),
                      .first = malloc(((size_t)plan->n + 1) * sizeof(uint32_t)),
                      .gathers = malloc(((size_t)course->n_uses + 1) * sizeof(gm_use)),
                      .misfit = GM_NO_TICK};
    gm_rings rings;
    gm_status status = gm_rings_new(plan->n_blocks, &rings);
    uint32_t *latest = malloc(((size_t)plan->n + 1) * sizeof *latest);
    if (status == GM_OK && (!out->uses || !out->first || !out->gathers || !latest)) {
        status = GM_FAIL(GM_ERR_NOMEM, "host: no room for %zu uses of weights", n_uses);
    }
    if (status != GM_OK) {
        gm_needs_free(out);
    } else {
        for (uint32_t c = 0; c < plan->n; c++) {
            out->first[c] = course->n;
        }
        find_gathers(input, plan, course, &rings, out);
        if (input->when == GM_IMMEDIATE || input->is_opaque) {
            prolong(plan, input, course, latest, out);
        }
        if (!is_sorted(out)) {
            qsort(out->uses, out->n_uses, sizeof *out->uses, gm_by_begin);
        }
    }
    gm_rings_free(&rings);
    free(latest);
    return status;
}
