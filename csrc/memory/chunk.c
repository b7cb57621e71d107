/* chunk.c - the chunk table and its state machine: moving bytes, behind fences; see chunk.h for the
 * diagram and chunk_impl.h for the fences.  Blocks and mapping are in block.c and place.c.
 *
 * Invariants (gm_chunks_check executes 1 and 2, gm_chunks_check_bytes 5, an assertion where blocks
 * are made 3, and a device that checks accesses 4: note_access in device.h)
 *   1. A block is free or owned by exactly one resident piece.
 *   2. A piece is resident (CLEAN, DIRTY) exactly when it owns as many blocks as its bytes need.
 *   3. n_blocks * block_bytes <= limit, except for what pins hold after the limit was lowered.
 *   4. A block is overwritten only behind the fences of its last owner: on a stream under a
 *      placement, on the host without one.
 *   5. A piece's bytes are right in exactly one place, or in both and equal (CLEAN), in the order
 *      of issue.
 *   6. Work never waits for work that is issued later: fences refer to the past, so streams cannot
 *      deadlock.
 *
 * The host waits in: wait_fence_on_host() and nowhere else in this file; counted in
 * stats.n_host_waits. */
#include "memory/chunk_impl.h"

#include <string.h>

static const bool may_move[N_STATES][N_STATES] = {
    [HOME] = {[CLEAN] = true, [DIRTY] = true}, /* HOME -> DIRTY: claimed, taken next, no home */
    [CLEAN] = {[HOME] = true, [DIRTY] = true},
    [DIRTY] = {[CLEAN] = true, [HOME] = true}, /* DIRTY -> HOME: discarded, or rolled back */
};

void gm_piece_move(piece *p, piece_state to)
{
    GM_ASSERT(may_move[p->state][to]);
    p->state = to;
    p->shows_next = false;
}

/* Every write of a piece, on the device or at home, begins here. */
static gm_status begin_change(gm_chunks *chunks, uint32_t id, gm_piece kind)
{
    gm_piece_at(chunks, id, kind)->version++;
    gm_piece_at(chunks, id, kind)->shows_next = false;
    return chunks->on_change && kind <= GM_STATE ? chunks->on_change(chunks->context, id) : GM_OK;
}

static void make_dirty(piece *p)
{
    p->version++;
    if (p->state == CLEAN) {
        gm_piece_move(p, DIRTY);
    }
}

/* ---- reading the table ---- */

uintptr_t gm_chunks_address(const gm_chunks *chunks, uint32_t id, gm_piece kind)
{
    return gm_piece_at(chunks, id, kind)->address;
}

void gm_chunks_weight_span(const gm_chunks *chunks, uintptr_t *begin, uintptr_t *end)
{
    *begin = chunks->span[chunks->shown];
    *end = *begin + chunks->span_bytes[chunks->shown];
}

uint32_t gm_chunks_at(const gm_chunks *chunks, uintptr_t address)
{
    uint32_t low = 0, high = chunks->n_chunks;
    while (low < high) { /* first chunk whose weights end beyond the address */
        uint32_t middle = low + (high - low) / 2;
        const piece *p = gm_piece_at(chunks, middle, chunks->shown);
        if (p->address + (size_t)p->n_blocks * chunks->device->block_bytes > address) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    bool is_inside =
        low < chunks->n_chunks && gm_piece_at(chunks, low, chunks->shown)->address <= address;
    return is_inside ? low : UINT32_MAX;
}

bool gm_chunks_is_resident(const gm_chunks *chunks, uint32_t id, gm_piece kind)
{
    return gm_is_resident(gm_piece_at(chunks, id, kind));
}

bool gm_chunks_is_dirty(const gm_chunks *chunks, uint32_t id, gm_piece kind)
{
    return gm_piece_at(chunks, id, kind)->state == DIRTY;
}

uint32_t gm_chunks_pins(const gm_chunks *chunks, uint32_t id, gm_piece kind)
{
    return gm_piece_at(chunks, id, kind)->pins;
}

uint8_t *gm_chunks_home(const gm_chunks *chunks, uint32_t id, gm_piece kind)
{
    return gm_piece_at(chunks, id, kind)->home;
}

bool gm_chunks_has_placement(const gm_chunks *chunks)
{
    return chunks->has_placement;
}

void gm_chunks_get_stats(const gm_chunks *chunks, gm_chunks_stats *out)
{
    *out = chunks->stats;
    out->n_blocks = chunks->n_blocks;
    out->device_bytes = (size_t)chunks->n_blocks * chunks->device->block_bytes;
}

void gm_chunks_stage(const gm_chunks *chunks, uintptr_t *address, size_t *bytes)
{
    *address = chunks->stage;
    *bytes = chunks->has_placement ? chunks->stage_blocks * chunks->device->block_bytes : 0;
}

void gm_chunks_state_streams(const gm_chunks *chunks, gm_stream *in, gm_stream *out)
{
    *in = chunks->in[GM_STATE];
    *out = chunks->out[GM_STATE];
}

void gm_chunks_count_copy(gm_chunks *chunks, size_t bytes, bool is_in)
{
    chunks->stats.fetched_bytes += is_in ? bytes : 0;
    chunks->stats.evicted_bytes += is_in ? 0 : bytes;
}

/* ---- fences ---- */

/* An open fence is recorded now: later than the work that it stands for, which is safe, and close
 * to it, because those who need it are issued soon after. */
static gm_status close_fence(gm_chunks *chunks, fence *f)
{
    if (f->is_open) {
        GM_TRY(chunks->device->ops->event_record(chunks->device, f->event, f->stream));
        f->is_open = false;
    }
    return GM_OK;
}

/* Work that `stream` gets from now on comes after the fence. */
static gm_status wait_fence(gm_chunks *chunks, fence *f, gm_stream stream)
{
    if (!f->is_set || f->stream == stream || (f->has_seen && f->seen == stream)) {
        return GM_OK;
    }
    GM_TRY(close_fence(chunks, f));
    GM_TRY(chunks->device->ops->event_wait(chunks->device, f->event, stream));
    f->seen = stream;
    f->has_seen = true;
    return GM_OK;
}

static gm_status wait_fence_on_host(gm_chunks *chunks, fence *f)
{
    if (!f->is_set) {
        return GM_OK;
    }
    GM_TRY(close_fence(chunks, f));
    chunks->stats.n_host_waits++;
    return chunks->device->ops->event_sync(chunks->device, f->event);
}

/* The fence comes to mean: what it meant so far, and all that `stream` has now. */
static gm_status set_fence(gm_chunks *chunks, fence *f, gm_stream stream, bool is_open)
{
    GM_TRY(wait_fence(chunks, f, stream));
    f->is_set = true;
    f->is_open = true;
    f->has_seen = false;
    f->stream = stream;
    return is_open ? GM_OK : close_fence(chunks, f);
}

gm_status gm_piece_order_write(gm_chunks *chunks, piece *p, gm_stream stream)
{
    GM_TRY(wait_fence(chunks, &p->filled, stream));
    GM_TRY(wait_fence(chunks, &p->used, stream));
    return wait_fence(chunks, &p->homed, stream);
}

/* is_home_late: a copy to the home, under way, may read what a user that has the piece pinned
 * writes in place.  Once a user has written so (is_written_inside), each pin comes after such a
 * copy. */
gm_status gm_piece_note_home(gm_chunks *chunks, piece *p, gm_stream stream)
{
    fence *f = &p->homed;
    p->is_home_late &= p->pins > 0;
    if (p->is_written_inside) {
        GM_TRY(wait_fence(chunks, f, stream));
    }
    if (f->is_set && f->stream != stream && !(f->has_seen && f->seen == stream)) {
        bool is_done = false;
        if (!f->is_open) {
            GM_TRY(chunks->device->ops->event_query(chunks->device, f->event, &is_done));
        }
        f->is_set = !is_done;
        p->is_home_late |= !is_done;
    }
    return GM_OK;
}

static gm_status order_home_write(gm_chunks *chunks, piece *p, gm_stream stream)
{
    GM_TRY(wait_fence(chunks, &p->homed, stream));
    GM_TRY(wait_fence(chunks, &p->home_used, stream));
    return wait_fence(chunks, &p->filled, stream);
}

static gm_status order_spare_write(gm_chunks *chunks, piece *p, gm_stream stream)
{
    GM_ASSERT(p->spare);
    p->shows_next = false;
    GM_TRY(wait_fence(chunks, &p->spare_homed, stream));
    GM_TRY(wait_fence(chunks, &p->spare_used, stream));
    GM_TRY(wait_fence(chunks, &p->filled, stream));
    return wait_fence(chunks, &p->homed, stream);
}

gm_status gm_piece_claim(gm_chunks *chunks, piece *p, gm_stream stream)
{
    p->version++;
    GM_TRY(gm_piece_order_write(chunks, p, stream));
    /* If nothing is written, it stands for the last owner's. */
    return set_fence(chunks, &p->filled, stream, true);
}

gm_status gm_piece_wait_idle(gm_chunks *chunks, piece *p)
{
    GM_TRY(wait_fence_on_host(chunks, &p->filled));
    GM_TRY(wait_fence_on_host(chunks, &p->used));
    GM_TRY(wait_fence_on_host(chunks, &p->homed));
    GM_TRY(wait_fence_on_host(chunks, &p->home_used));
    GM_TRY(wait_fence_on_host(chunks, &p->spare_homed));
    return wait_fence_on_host(chunks, &p->spare_used);
}

gm_status gm_chunks_sync(gm_chunks *chunks)
{
    for (size_t i = 0; i < (size_t)chunks->n_chunks * GM_N_PIECES; i++) {
        GM_TRY(gm_piece_wait_idle(chunks, &chunks->pieces[i]));
    }
    return GM_OK;
}

/* ---- copies ---- */

static const gm_log_kind log_of_send[GM_N_OWN_PIECES] = {GM_LOG_WEIGHT_OUT, GM_LOG_STATE_OUT,
                                                         GM_LOG_GRAD_OUT};

void gm_chunks_set_timeline(gm_chunks *chunks, gm_timeline *timeline)
{
    chunks->timeline = timeline;
    for (size_t i = 0; timeline && i < (size_t)chunks->n_chunks * GM_N_PIECES; i++) {
        if (gm_is_resident(&chunks->pieces[i]) && chunks->pieces[i].n_blocks > 0) {
            gm_timeline_mark(timeline, GM_LOG_HELD, (uint32_t)(i / GM_N_PIECES),
                             (gm_piece)(i % GM_N_PIECES));
        }
    }
}

gm_status gm_piece_fetch(gm_chunks *chunks, piece *p, gm_piece kind, gm_log_kind log,
                         gm_stream stream)
{
    gm_device *device = chunks->device;
    GM_TRY(wait_fence(chunks, &p->homed, stream));
    GM_TRY(gm_piece_order_write(chunks, p, stream));
    uint32_t entry =
        gm_timeline_begin(chunks->timeline, log, kind == GM_WEIGHT ? GM_ON_FETCH : GM_ON_STATE,
                          gm_piece_chunk(chunks, p), kind, p->bytes, stream);
    GM_TRY(device->ops->copy_h2d(device, p->address, p->home, p->bytes, stream));
    gm_timeline_end(chunks->timeline, entry, stream);
    GM_TRY(set_fence(chunks, &p->filled, stream, false));
    chunks->stats.fetched_bytes += p->bytes;
    return GM_OK;
}

static gm_status copy_out(gm_chunks *chunks, const piece *p, gm_piece kind, uint8_t *to,
                          gm_stream stream)
{
    uint32_t entry = gm_timeline_begin(chunks->timeline, log_of_send[kind],
                                       kind == GM_STATE ? GM_ON_STATE_OUT : GM_ON_EVICT,
                                       gm_piece_chunk(chunks, p), kind, p->bytes, stream);
    GM_TRY(chunks->device->ops->copy_d2h(chunks->device, to, p->address, p->bytes, stream));
    gm_timeline_end(chunks->timeline, entry, stream);
    chunks->stats.evicted_bytes += p->bytes;
    return GM_OK;
}

gm_status gm_chunks_send_home(gm_chunks *chunks, uint32_t id, gm_piece kind)
{
    piece *p = gm_piece_at(chunks, id, kind);
    if (p->state != DIRTY) {
        return GM_OK;
    }
    GM_ASSERT(!gm_is_transient(kind));
    GM_FAIL_IF(gm_has_to_stay(chunks, id), GM_ERR_STATE,
               "chunk %u stays on the device and has no home on the host", id);
    GM_TRY(gm_home_give(chunks, id, id + 1)); /* nothing has changed if there are none */
    gm_stream stream = chunks->out[kind];
    /* Its users may be writers (a unit that changes its weights): the copy comes after them too. */
    GM_TRY(wait_fence(chunks, &p->used, stream));
    GM_TRY(order_home_write(chunks, p, stream));
    GM_TRY(copy_out(chunks, p, kind, p->home, stream));
    GM_TRY(set_fence(chunks, &p->homed, stream, false));
    p->is_home_late |= p->pins > 0;
    gm_piece_move(p, CLEAN);
    return GM_OK;
}

gm_status gm_piece_send_to_spare(gm_chunks *chunks, piece *p, gm_piece kind)
{
    gm_stream stream = chunks->out[kind];
    GM_TRY(wait_fence(chunks, &p->used, stream));
    GM_TRY(order_spare_write(chunks, p, stream));
    GM_TRY(copy_out(chunks, p, kind, p->spare, stream));
    GM_TRY(set_fence(chunks, &p->used, stream, false)); /* it reads the device's bytes */
    return set_fence(chunks, &p->spare_homed, stream, false);
}

/* ---- pins ---- */

gm_status gm_chunks_wait_ready(gm_chunks *chunks, uint32_t id, gm_piece kind, gm_stream stream)
{
    return wait_fence(chunks, &gm_piece_at(chunks, id, kind)->filled, stream);
}

gm_status gm_chunks_unpin(gm_chunks *chunks, uint32_t id, gm_piece kind, gm_stream stream)
{
    piece *p = gm_piece_at(chunks, id, kind);
    GM_FAIL_IF(p->pins == 0, GM_ERR_STATE, "chunk %u: unpinned more often than pinned", id);
    gm_note_access(chunks->device, (const void *)p->address, p->bytes, false, stream);
    GM_TRY(set_fence(chunks, &p->used, stream, true));
    gm_chunks_unpin_ordered(chunks, id, kind);
    return GM_OK;
}

void gm_chunks_unpin_ordered(gm_chunks *chunks, uint32_t id, gm_piece kind)
{
    piece *p = gm_piece_at(chunks, id, kind);
    GM_ASSERT(p->pins > 0);
    p->pins--;
    p->last_use = ++chunks->clock;
}

bool gm_chunks_has_old_weight(const gm_chunks *chunks, uint32_t id)
{
    const piece *p = gm_piece_at(chunks, id, GM_WEIGHT);
    return p->state != DIRTY && !p->is_home_late;
}

void gm_chunks_note_written_inside(gm_chunks *chunks, uint32_t id)
{
    piece *p = gm_piece_at(chunks, id, GM_WEIGHT);
    p->is_written_inside = true;
    if (p->is_home_late) { /* it may have some of the new bytes */
        make_dirty(p);
    }
}

gm_status gm_chunks_note_write(gm_chunks *chunks, uint32_t id, gm_piece kind)
{
    GM_TRY(begin_change(chunks, id, kind));
    make_dirty(gm_piece_at(chunks, id, kind));
    return GM_OK;
}

/* ---- work on pieces ---- */

gm_status gm_chunks_begin(gm_chunks *chunks, uint32_t id, gm_piece kind, gm_work work,
                          gm_stream stream)
{
    piece *p = gm_piece_at(chunks, id, kind);
    GM_ASSERT(work > GM_WRITE || gm_is_resident(p));
    GM_ASSERT(work <= GM_WRITE || work == GM_SPARE_READ || p->state != DIRTY);
    GM_TRY(work == GM_WRITE || work == GM_HOME_WRITE ? begin_change(chunks, id, kind) : GM_OK);
    switch (work) {
    case GM_READ: return wait_fence(chunks, &p->filled, stream);
    case GM_WRITE: return gm_piece_order_write(chunks, p, stream);
    case GM_HOME_READ: return wait_fence(chunks, &p->homed, stream);
    case GM_HOME_WRITE: return order_home_write(chunks, p, stream);
    case GM_SPARE_READ: return wait_fence(chunks, &p->spare_homed, stream);
    default: return order_spare_write(chunks, p, stream);
    }
}

gm_status gm_chunks_end(gm_chunks *chunks, uint32_t id, gm_piece kind, gm_work work,
                        gm_stream stream)
{
    piece *p = gm_piece_at(chunks, id, kind);
    fence *const done[GM_N_WORKS] = {&p->used,  &p->filled,     &p->home_used,
                                     &p->homed, &p->spare_used, &p->spare_homed};
    if (work == GM_WRITE) {
        make_dirty(p);
    }
    return set_fence(chunks, done[work], stream, false);
}

gm_status gm_chunks_begin_all(gm_chunks *chunks, uint32_t id, const gm_use *uses, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        GM_TRY(gm_chunks_begin(chunks, id, uses[i].piece, uses[i].work, uses[i].stream));
    }
    return GM_OK;
}

gm_status gm_chunks_end_all(gm_chunks *chunks, uint32_t id, const gm_use *uses, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        GM_TRY(gm_chunks_end(chunks, id, uses[i].piece, uses[i].work, uses[i].stream));
    }
    return GM_OK;
}

gm_status gm_chunks_note_readers(gm_chunks *chunks, uint32_t id, gm_piece kind, gm_stream stream)
{
    piece *p = gm_piece_at(chunks, id, kind);
    return p->pins > 0 ? set_fence(chunks, &p->used, stream, true) : GM_OK;
}

/* ---- spares ---- */

uint64_t gm_chunks_version(const gm_chunks *chunks, uint32_t id, gm_piece kind)
{
    return gm_piece_at(chunks, id, kind)->version;
}

uint8_t *gm_chunks_spare(const gm_chunks *chunks, uint32_t id, gm_piece kind)
{
    return gm_piece_at(chunks, id, kind)->spare;
}

gm_status gm_chunks_give_spare(gm_chunks *chunks, uint32_t id, gm_piece kind, uint8_t *spare)
{
    piece *p = gm_piece_at(chunks, id, kind);
    gm_device *device = chunks->device;
    GM_ASSERT(p->home && !p->spare && !gm_is_transient(kind));
    if (!p->spare_homed.event) {
        GM_TRY(device->ops->event_new(device, false, &p->spare_homed.event));
    }
    if (!p->spare_used.event) {
        GM_TRY(device->ops->event_new(device, false, &p->spare_used.event));
    }
    p->spare_homed.is_set = p->spare_used.is_set = false;
    p->spare = spare;
    return GM_OK;
}

uint8_t *gm_chunks_given(const gm_chunks *chunks, uint32_t id, gm_piece kind)
{
    const piece *p = gm_piece_at(chunks, id, kind);
    return p->spare && p->home != gm_home_made(chunks, p) ? p->home : p->spare;
}

gm_status gm_chunks_take_back_spare(gm_chunks *chunks, uint32_t id, gm_piece kind)
{
    piece *p = gm_piece_at(chunks, id, kind);
    GM_TRY(gm_piece_wait_idle(chunks, p));
    if (p->home != gm_home_made(chunks, p)) {
        GM_ASSERT(p->spare == gm_home_made(chunks, p));
        if (p->state != DIRTY) {
            gm_workers_copy(chunks->workers, p->spare, p->home, p->bytes);
        }
        p->home = p->spare;
    }
    p->spare = NULL;
    p->shows_next = false;
    return GM_OK;
}

/* The blocks are the piece's place, and nothing has taken them since it left. */
static bool shows_next(const gm_chunks *chunks, const piece *p)
{
    bool is_own = p->shows_next && p->is_placed;
    for (uint32_t b = 0; is_own && b < p->n_blocks; b++) {
        is_own = chunks->owners[p->blocks[b]] == gm_piece_index(chunks, p);
    }
    return is_own;
}

bool gm_chunks_has_next(const gm_chunks *chunks, uint32_t id, gm_piece kind)
{
    const piece *p = gm_piece_at(chunks, id, kind);
    return p->spare || p->bytes == 0 || shows_next(chunks, p);
}

gm_status gm_chunks_take_next(gm_chunks *chunks, uint32_t id, gm_piece kind, bool *is_stale)
{
    piece *p = gm_piece_at(chunks, id, kind);
    GM_ASSERT(p->state != DIRTY && gm_chunks_has_next(chunks, id, kind));
    bool is_there = shows_next(chunks, p);
    *is_stale = gm_is_resident(p) && p->n_blocks > 0;
    GM_TRY(begin_change(chunks, id, kind));
    if (p->spare) {
        uint8_t *home = p->home;
        fence homed = p->homed, home_used = p->home_used;
        p->home = p->spare;
        p->homed = p->spare_homed;
        p->home_used = p->spare_used;
        p->spare = home;
        p->spare_homed = homed;
        p->spare_used = home_used;
    }
    if (is_there) {
        gm_timeline_mark(chunks->timeline, GM_LOG_HELD, id, kind);
        gm_piece_move(p, p->spare ? CLEAN : DIRTY);
    }
    return gm_chunks_send_home(chunks, id, kind);
}

/* ---- the host's own access ---- */

gm_status gm_chunks_write_back(gm_chunks *chunks, uint32_t id, gm_piece kind)
{
    piece *p = gm_piece_at(chunks, id, kind);
    GM_TRY(gm_chunks_send_home(chunks, id, kind));
    GM_TRY(wait_fence_on_host(chunks, &p->homed));
    gm_note_access(chunks->device, p->home, p->bytes, false, GM_STREAM_HOST);
    return GM_OK;
}

gm_status gm_chunks_claim_home(gm_chunks *chunks, uint32_t id, gm_piece kind)
{
    piece *p = gm_piece_at(chunks, id, kind);
    GM_TRY(begin_change(chunks, id, kind));
    GM_TRY(gm_chunks_send_home(chunks, id, kind));
    GM_TRY(wait_fence_on_host(chunks, &p->homed));
    GM_TRY(wait_fence_on_host(chunks, &p->home_used));
    GM_TRY(wait_fence_on_host(chunks, &p->filled));
    gm_note_access(chunks->device, p->home, p->bytes, true, GM_STREAM_HOST);
    return GM_OK;
}

gm_status gm_chunks_home_written(gm_chunks *chunks, uint32_t id, gm_piece kind, gm_stream stream)
{
    piece *p = gm_piece_at(chunks, id, kind);
    GM_ASSERT(p->state != DIRTY);
    if (p->state != CLEAN || p->n_blocks == 0) {
        return GM_OK;
    }
    GM_TRY(gm_chunks_note_readers(chunks, id, kind, stream));
    GM_TRY(gm_piece_fetch(chunks, p, kind, GM_LOG_REFRESH, chunks->refresh));
    return p->pins > 0 ? wait_fence(chunks, &p->filled, stream) : GM_OK;
}

gm_status gm_chunks_read_device(gm_chunks *chunks, uint32_t id, gm_piece kind, size_t offset,
                                size_t bytes, void *dst)
{
    gm_device *device = chunks->device;
    piece *p = gm_piece_at(chunks, id, kind);
    gm_stream stream = chunks->out[gm_is_transient(kind) ? GM_WEIGHT : kind];
    GM_ASSERT(gm_is_resident(p) && offset + bytes <= p->bytes);
    GM_TRY(wait_fence(chunks, &p->filled, stream));
    GM_TRY(wait_fence(chunks, &p->used, stream));
    GM_TRY(device->ops->copy_d2h(device, dst, p->address + offset, bytes, stream));
    GM_TRY(set_fence(chunks, &p->used, stream, false));
    return wait_fence_on_host(chunks, &p->used);
}

gm_status gm_chunks_read(gm_chunks *chunks, uint32_t id, gm_piece kind, size_t offset, size_t bytes,
                         void *dst, gm_workers *pool)
{
    piece *p = gm_piece_at(chunks, id, kind);
    GM_ASSERT(offset + bytes <= p->bytes);
    if (bytes == 0) {
        return GM_OK;
    }
    if (p->state != DIRTY) {
        GM_TRY(wait_fence_on_host(chunks, &p->homed));
        gm_note_access(chunks->device, p->home + offset, bytes, false, GM_STREAM_HOST);
        gm_workers_copy(pool, dst, p->home + offset, bytes);
        return GM_OK;
    }
    return gm_chunks_read_device(chunks, id, kind, offset, bytes, dst);
}

gm_status gm_chunks_write(gm_chunks *chunks, uint32_t id, gm_piece kind, size_t offset,
                          size_t bytes, const void *src, gm_stream stream)
{
    gm_device *device = chunks->device;
    piece *p = gm_piece_at(chunks, id, kind);
    GM_ASSERT(offset + bytes <= p->bytes);
    if (bytes == 0) {
        return GM_OK;
    }
    GM_TRY(begin_change(chunks, id, kind));
    if (gm_is_resident(p)) {
        GM_TRY(gm_chunks_note_readers(chunks, id, kind, stream));
        gm_stream in = chunks->in[gm_is_transient(kind) ? GM_WEIGHT : kind];
        GM_TRY(gm_piece_order_write(chunks, p, in));
        GM_TRY(device->ops->copy_h2d(device, p->address + offset, src, bytes, in));
        GM_TRY(set_fence(chunks, &p->filled, in, false));
        GM_TRY(wait_fence_on_host(chunks, &p->filled)); /* src is the caller's */
    }
    if (p->state != DIRTY) {
        GM_TRY(wait_fence_on_host(chunks, &p->homed));
        GM_TRY(wait_fence_on_host(chunks, &p->home_used));
        GM_TRY(wait_fence_on_host(chunks, &p->filled));
        gm_note_access(chunks->device, p->home + offset, bytes, true, GM_STREAM_HOST);
        memcpy(p->home + offset, src, bytes);
    }
    return GM_OK;
}
