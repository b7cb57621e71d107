/* glance.c - what a kernel does with the address of a small weight inside its unit, seen without a
 * wait.
 *
 * Such a kernel (Triton's, say) may write, and no version tells.  watch.c finds what it writes at
 * once, and the host waits for the device at each use, twice.  A weight that it has looked at a few
 * times in vain is only glanced at from then on: the device copies its bytes before and after the
 * use into a page, in the order of the stream, and the host compares them when the page is full, or
 * with the next step.  A first write then comes out too late to be taken as one: it closes the
 * engine by name.
 *
 *            begin, for each use           step, or no room          its copy is at home
 *     FILLED --------------------> FILLED -------------------> GONE --------------------> compared,
 *                                                                                   and FILLED next
 * Invariants
 *   1. Only a weight that was looked at GM_LOOKS times is glanced at, and none that was ever found
 *      written.
 *   2. Both copies are issued to the stream of the use while its chunk is pinned, one before the
 *      address is given away and one behind the last user.
 *   3. A page is written again only after the host has compared what it had.
 *   4. A use counts for nothing where the engine knows of a write of that weight since it began (an
 *      operation of torch, which a version tells; what watch.c finds).  An update is behind the
 *      copies of the uses before it. */
#include "engine/engine_impl.h"

#include <stdlib.h>
#include <string.h>

enum {
    GM_LOOKS = 3,           /* a forward, its repetition by a checkpoint, the backward */
    MOST_BYTES = 256 << 10, /* of one weight */
    USES = 8,               /* a page has room for two copies of each such weight so many times */
    MOST_PAGE = 32 << 20
};

static size_t bytes_of(const gm_engine *engine, uint32_t param)
{
    return gm_field_shown(engine, &engine->params[param]).bytes;
}

static size_t page_bytes(const gm_engine *engine)
{
    size_t bytes = 0, blocks = engine->device->block_bytes;
    for (uint32_t id = 0; id < engine->n_params; id++) {
        size_t own = bytes_of(engine, id);
        bytes += own <= MOST_BYTES ? 2 * USES * gm_round_up(own, GM_ALIGN) : 0;
    }
    return gm_round_up(bytes < MOST_PAGE ? bytes : MOST_PAGE, blocks);
}

static gm_status pages_new(gm_engine *engine)
{
    gm_glances *g = &engine->glance;
    gm_device *device = engine->device;
    g->bytes = page_bytes(engine);
    size_t n = 2 * g->bytes / device->block_bytes;
    uintptr_t address;
    GM_TRY(gm_new(&g->home, 2 * g->bytes, "HOST: %zu bytes to find writes"));
    GM_TRY(device->ops->pin(device, g->home, 2 * g->bytes));
    g->is_pinned = true;
    g->blocks = calloc(n + 1, sizeof *g->blocks);
    GM_FAIL_IF(!g->blocks, GM_ERR_NOMEM, "HOST: %zu blocks", n);
    GM_TRY(device->ops->range_new(device, n * device->block_bytes, &address));
    g->there = address;
    for (; g->n_blocks < n; g->n_blocks++) {
        GM_TRY(device->ops->block_new(device, &g->blocks[g->n_blocks]));
    }
    GM_TRY(device->ops->map(device, address, g->blocks, n));
    GM_TRY(device->ops->stream_new(device, &g->stream));
    for (int page = 0; page < 2; page++) {
        GM_TRY(device->ops->event_new(device, false, &g->pages[page].end));
    }
    return GM_OK;
}

void gm_glance_free(gm_engine *engine)
{
    gm_glances *g = &engine->glance;
    gm_device *device = engine->device;
    if (g->stream) {
        (void)device->ops->stream_sync(device, g->stream);
        gm_free_stream(device, &g->stream);
    }
    for (int page = 0; page < 2; page++) {
        gm_free_event(device, &g->pages[page].end);
        free(g->pages[page].glances);
    }
    if (g->there) {
        device->ops->range_free(device, g->there, 2 * g->bytes);
    }
    for (size_t i = 0; i < g->n_blocks; i++) {
        device->ops->block_free(device, g->blocks[i]);
    }
    if (g->is_pinned) {
        device->ops->unpin(device, g->home);
    }
    free(g->home);
    free(g->blocks);
    *g = (gm_glances){0};
}

static bool is_written(const gm_engine *engine, const gm_glance *glance, const uint8_t *home)
{
    bool is_known = engine->params[glance->param].n_writes != glance->n_writes; /* invariant 4 */
    return !is_known && memcmp(home + glance->before, home + glance->after, glance->bytes) != 0;
}

static gm_status compare(gm_engine *engine, int turn)
{
    gm_glances *g = &engine->glance;
    gm_glance_page *page = &g->pages[turn];
    size_t n = page->n;
    page->n = page->used = 0;
    for (size_t i = 0; i < n; i++) {
        if (is_written(engine, &page->glances[i], g->home + (size_t)turn * g->bytes)) {
            return gm_engine_die(
                engine,
                GM_FAIL(GM_ERR_STATE,
                        "%s: it was written inside its module, by a kernel that got its address "
                        "or through .data, and in the first steps it was not: write it by an "
                        "operation on the parameter (p.copy_), or give the kernel a copy",
                        gm_engine_name(engine, page->glances[i].param)));
        }
    }
    return GM_OK;
}

/* Waits for what has gone home a page ago, which is over as a rule. */
static gm_status take(gm_engine *engine, int turn)
{
    gm_glances *g = &engine->glance;
    if (!g->pages[turn].is_gone) {
        return GM_OK;
    }
    g->pages[turn].is_gone = false;
    GM_TRY(engine->device->ops->event_sync(engine->device, g->pages[turn].end));
    gm_note_access(engine->device, g->home + (size_t)turn * g->bytes, g->bytes, false,
                   GM_STREAM_HOST);
    return compare(engine, turn);
}

/* A use that is not over ends in the page that has its beginning. */
static gm_status end_all(gm_engine *engine)
{
    gm_lease *lease = engine->glance.n_open > 0 ? engine->watch.leases : NULL;
    for (; lease; lease = lease->next) {
        GM_TRY(gm_glance_end(lease));
    }
    return GM_OK;
}

gm_status gm_glance_turn(gm_engine *engine)
{
    gm_glances *g = &engine->glance;
    const gm_device_ops *ops = engine->device->ops;
    gm_glance_page *page = &g->pages[g->turn];
    GM_TRY(take(engine, !g->turn));
    GM_TRY(end_all(engine));
    if (page->n == 0) {
        return GM_OK;
    }
    size_t at = (size_t)g->turn * g->bytes;
    GM_TRY(ops->event_record(engine->device, page->end, page->stream));
    GM_TRY(ops->event_wait(engine->device, page->end, g->stream));
    GM_TRY(ops->copy_d2h(engine->device, g->home + at, g->there + at, page->used, g->stream));
    GM_TRY(ops->event_record(engine->device, page->end, g->stream));
    page->is_gone = true;
    g->turn = !g->turn;
    return GM_OK;
}

gm_status gm_glance_settle(gm_engine *engine)
{
    GM_TRY(gm_glance_turn(engine));
    return take(engine, !engine->glance.turn);
}

static bool is_eligible(const gm_engine *engine, const gm_lease *lease)
{
    const gm_param *p = &engine->params[lease->param];
    size_t bytes = bytes_of(engine, lease->param);
    return !engine->glance.is_refused && !lease->is_pinned && p->n_found == 0 &&
           p->n_looks >= GM_LOOKS && bytes > 0 && bytes <= MOST_BYTES;
}

static gm_status copy(gm_engine *engine, const gm_lease *lease, size_t at)
{
    const gm_param *p = &engine->params[lease->param];
    gm_slice s = gm_field_shown(engine, p);
    uintptr_t weight = gm_chunks_address(engine->chunks, p->place.chunk, s.piece) + s.offset;
    uintptr_t to = engine->glance.there + (size_t)lease->glance_turn * engine->glance.bytes + at;
    return engine->device->ops->copy_d2d(engine->device, to, weight, s.bytes, lease->stream);
}

bool gm_glance_is_full(const gm_lease *lease)
{
    const gm_glances *g = &lease->engine->glance;
    size_t step = gm_round_up(bytes_of(lease->engine, lease->param), GM_ALIGN);
    return g->there && !lease->is_glanced && g->n_open == 0 && is_eligible(lease->engine, lease) &&
           g->pages[g->turn].used + 2 * step > g->bytes;
}

/* All uses of a page are on one stream: gm_glance_turn waits for that of the first. */
gm_status gm_glance_begin(gm_lease *lease, gm_stream stream, bool *out)
{
    gm_engine *engine = lease->engine;
    gm_glances *g = &engine->glance;
    *out = lease->is_glanced;
    if (lease->is_glanced || !is_eligible(engine, lease)) {
        return GM_OK;
    }
    if (!g->there && pages_new(engine) != GM_OK) { /* then watch.c goes on */
        gm_glance_free(engine);
        g->is_refused = true;
        return GM_OK;
    }
    size_t bytes = bytes_of(engine, lease->param), step = gm_round_up(bytes, GM_ALIGN);
    gm_glance_page *page = &g->pages[g->turn];
    bool is_other_stream = page->n > 0 && page->stream != stream;
    if (page->used + 2 * step > g->bytes || is_other_stream) {
        return GM_OK;
    }
    GM_TRY(GM_GROW(page->glances, page->n, page->capacity, "HOST: %zu glances"));
    const gm_param *p = &engine->params[lease->param];
    GM_TRY(gm_chunks_wait_ready(engine->chunks, p->place.chunk, engine->shown, stream));
    page->glances[page->n] = (gm_glance){.param = lease->param,
                                         .before = page->used,
                                         .after = page->used + step,
                                         .bytes = bytes,
                                         .n_writes = p->n_writes};
    lease->stream = page->stream = stream;
    lease->glance = page->n++;
    lease->glance_turn = g->turn;
    page->used += 2 * step;
    lease->is_glanced = *out = true;
    g->n_open++;
    return copy(engine, lease, page->glances[lease->glance].before);
}

gm_status gm_glance_end(gm_lease *lease)
{
    gm_engine *engine = lease->engine;
    if (!lease->is_glanced) {
        return GM_OK;
    }
    gm_glance *glance = &engine->glance.pages[lease->glance_turn].glances[lease->glance];
    uint32_t chunk = engine->params[lease->param].place.chunk;
    if (gm_chunks_pins(engine->chunks, chunk, engine->shown) == 0) { /* left after an error */
        gm_glance_drop(lease);
        return GM_OK;
    }
    lease->is_glanced = false;
    engine->glance.n_open--;
    GM_TRY(copy(engine, lease, glance->after));
    return gm_chunks_note_readers(engine->chunks, chunk, engine->shown, lease->stream);
}

void gm_glance_drop(gm_lease *lease)
{
    gm_glances *g = &lease->engine->glance;
    if (lease->is_glanced) {
        lease->is_glanced = false;
        g->n_open--;
        g->pages[lease->glance_turn].glances[lease->glance].bytes = 0;
    }
}

gm_status gm_glance_end_of(gm_engine *engine, uint32_t chunk)
{
    gm_lease *lease = engine->glance.n_open > 0 ? engine->watch.leases : NULL;
    for (; lease; lease = lease->next) {
        if (lease->is_glanced && engine->params[lease->param].place.chunk == chunk) {
            GM_TRY(gm_glance_end(lease));
        }
    }
    return GM_OK;
}
