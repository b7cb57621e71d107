/* chunk.h - the chunk table: where the bytes of each chunk are, and moving them between DEVICE and
 * HOST.
 *
 * A chunk has three pieces, its weights, its optimizer states and its gradient, and with several
 * ranks up to two that are transient (below).  A piece has one device address range for life and,
 * unless the table was made without homes, one home on the host.  A chunk has homes for all its
 * pieces or for none: without, all are on the device.  It gets them when the first piece is to go
 * home.  A chunk that stays (plan/stay.h) never does: none of its pieces leaves, once it is there.
 *
 *             fetch                 note_write
 *     HOME ----------> CLEAN ---------------------> DIRTY   HOME   only the home holds the bytes
 *       ^               |  ^                          |     CLEAN  resident; home and device agree
 *       +----evict------+  +---------send_home--------+     DIRTY  resident; only the device's hold
 *
 * A transient piece (layout.h) has no home: it is claimed (HOME -> DIRTY), and discarded after
 * its last use.
 *
 * States are those of the order of issue: a piece is CLEAN once its copy home is issued.  Who looks
 * at bytes waits for the piece's fences (chunk_impl.h), on a stream or on the host.
 *
 * Behind the addresses are blocks.  Without a placement they come from a pool, mapping changes with
 * every fetch, and the host waits.  With one (gm_chunks_adopt) every piece has its blocks for good:
 * fetching overwrites what other pieces showed there, behind their fences, and neither maps nor
 * waits.
 *
 * Threads: one caller at a time (the engine's lock).
 *
 * Above the length budget because it is the table's whole face. */
#pragma once

#include "base/base.h"
#include "base/workers.h"
#include "device/device.h"
#include "device/hostmem.h"
#include "plan/layout.h"
#include "plan/plan.h"
#include "memory/timeline.h"

typedef struct gm_chunks gm_chunks; /* opaque; owns ranges, blocks, events, the streams of copies */

typedef struct gm_chunks_options {
    gm_device *device; /* borrowed; outlives the table */
    uint32_t n_chunks;
    const size_t (*piece_bytes)[GM_N_PIECES]; /* (n_chunks,) bytes of each piece; 0 = none */
    bool has_homes;                           /* false: all pieces stay resident */
    gm_arena *homes;     /* begins with gm_chunks_home_bytes() free bytes; NULL: all resident */
    size_t home_limit;   /* bytes of homes */
    const bool *stays;   /* (n_chunks,) borrowed; NULL: none does */
    bool places_states;  /* those that pass have their own addresses, as other pieces; no stage */
    gm_workers *workers; /* that touch them first */
    /* Called before weights or states of a chunk change, or NULL.  It may read both, and wait. */
    gm_status (*on_change)(void *context, uint32_t id);
    void *context;
    size_t device_limit; /* bytes of blocks */
} gm_chunks_options;

typedef struct gm_chunks_stats {
    uint64_t fetches, evictions;
    uint64_t fetched_bytes, evicted_bytes; /* copied H2D, D2H */
    uint64_t n_host_waits, n_maps; /* places where the host waited; map, poison and unmap calls */
    double mapping_seconds;        /* of the host: making, mapping and giving back blocks */
    size_t device_bytes, device_peak_bytes; /* of blocks */
    uint32_t n_blocks;
    size_t home_bytes;   /* that are held */
    double home_seconds; /* of the host: touching and pinning them */
} gm_chunks_stats;

/* Bytes of arena that all homes take. */
size_t gm_chunks_home_bytes(const size_t (*piece_bytes)[GM_N_PIECES], uint32_t n_chunks);

gm_status gm_chunks_new(const gm_chunks_options *options, gm_chunks **out);
void gm_chunks_free(gm_chunks *chunks); /* waits for the copies in flight; NULL is fine */

uintptr_t gm_chunks_address(const gm_chunks *chunks, uint32_t id, gm_piece piece);
/* The one address range that tensors show: of gathered weights where there are some, else of
 * weights. */
void gm_chunks_weight_span(const gm_chunks *chunks, uintptr_t *begin, uintptr_t *end);
/* The chunk that shows `address` in that range, or UINT32_MAX. */
uint32_t gm_chunks_at(const gm_chunks *chunks, uintptr_t address);
bool gm_chunks_is_resident(const gm_chunks *chunks, uint32_t id, gm_piece piece);
bool gm_chunks_is_dirty(const gm_chunks *chunks, uint32_t id, gm_piece piece);
uint32_t gm_chunks_pins(const gm_chunks *chunks, uint32_t id, gm_piece piece);
bool gm_chunks_has_placement(const gm_chunks *chunks);

/* ---- residence ---- */

/* Makes the piece resident (a transient one is claimed, for `stream` to write), readable by work
 * that `stream` gets from now on, and pins it.  Without a placement others are evicted as the limit
 * asks (least recently used first, chunks that are all resident last).  GM_ERR_NOMEM has the
 * numbers; with a placement it means that a pinned piece holds the blocks
 * (gm_chunks_leave_placement is the way out). */
gm_status gm_chunks_pin(gm_chunks *chunks, uint32_t id, gm_piece piece, gm_stream stream);
/* Orders work that `stream` gets from now on behind the last write of a resident piece. */
gm_status gm_chunks_wait_ready(gm_chunks *chunks, uint32_t id, gm_piece piece, gm_stream stream);
/* Ends one pin; the piece may be overwritten once `stream` passes this point. */
gm_status gm_chunks_unpin(gm_chunks *chunks, uint32_t id, gm_piece piece, gm_stream stream);
/* The same where every access was put between a begin and an end below: it adds no order. */
void gm_chunks_unpin_ordered(gm_chunks *chunks, uint32_t id, gm_piece piece);
/* Whether the home has, for certain, none of what users of a pinned weight may have written in
 * place. */
bool gm_chunks_has_old_weight(const gm_chunks *chunks, uint32_t id);
/* They have.  From now on who pins the weight comes after what copies it to its home. */
void gm_chunks_note_written_inside(gm_chunks *chunks, uint32_t id);
/* The device copy was or will be written by work on the stream it is pinned for. */
gm_status gm_chunks_note_write(gm_chunks *chunks, uint32_t id, gm_piece piece);
/* With a placement: begins to fetch a piece that is not resident.  *out is false, and nothing has
 * happened, when its blocks are in use or it has none. */
gm_status gm_chunks_prefetch(gm_chunks *chunks, uint32_t id, gm_piece piece, bool *out);
/* The same of all own pieces, for an update, in the stream of states: weights last, whose place
 * compute gives free. */
gm_status gm_chunks_bring(gm_chunks *chunks, uint32_t id, bool *out);
/* The same without fetching: the bytes are undefined, the state is DIRTY, `stream` may write.  A
 * transient piece can be claimed without a placement too, as gm_chunks_pin() takes blocks. */
gm_status gm_chunks_claim(gm_chunks *chunks, uint32_t id, gm_piece piece, gm_stream stream,
                          bool *out);
/* Evicts now if unpinned (no-op when not resident).  GM_ERR_STATE without homes, when it stays, or
 * when pinned. */
gm_status gm_chunks_evict(gm_chunks *chunks, uint32_t id, gm_piece piece);
/* The device copy is forgotten, its bytes lost (no-op when not resident or pinned; of pieces that
 * are not transient also without homes or without a placement). */
gm_status gm_chunks_discard(gm_chunks *chunks, uint32_t id, gm_piece piece);

/* ---- work on pieces, ordered by fences ---- */

/* Between begin and end, work issued on `stream` reads or writes the device copy of a resident
 * piece, its home, or its spare.  After a home was written a resident copy is stale: home_written
 * or discard. */
typedef enum gm_work {
    GM_READ,
    GM_WRITE,
    GM_HOME_READ,
    GM_HOME_WRITE,
    GM_SPARE_READ,
    GM_SPARE_WRITE,
    GM_N_WORKS
} gm_work;
gm_status gm_chunks_begin(gm_chunks *chunks, uint32_t id, gm_piece piece, gm_work work,
                          gm_stream stream);
gm_status gm_chunks_end(gm_chunks *chunks, uint32_t id, gm_piece piece, gm_work work,
                        gm_stream stream);
/* Several at once. */
typedef struct gm_use {
    gm_piece piece;
    gm_work work;
    gm_stream stream;
} gm_use;
gm_status gm_chunks_begin_all(gm_chunks *chunks, uint32_t id, const gm_use *uses, size_t n);
gm_status gm_chunks_end_all(gm_chunks *chunks, uint32_t id, const gm_use *uses, size_t n);
/* The users that have the piece pinned read it on `stream` up to now. */
gm_status gm_chunks_note_readers(gm_chunks *chunks, uint32_t id, gm_piece piece, gm_stream stream);
/* If DIRTY: issues the copy. */
gm_status gm_chunks_send_home(gm_chunks *chunks, uint32_t id, gm_piece piece);

/* ---- spares: memory beside a home, for the bytes that come next ---- */

/* Counts what may have changed the piece's bytes: each write of them passes a function of this
 * file.  Moving them, to the device or home, changes nothing. */
uint64_t gm_chunks_version(const gm_chunks *chunks, uint32_t id, gm_piece piece);
/* The piece gets a spare, as long as its home, which outlives the table. */
gm_status gm_chunks_give_spare(gm_chunks *chunks, uint32_t id, gm_piece piece, uint8_t *spare);
/* It has none any more, and its home is where it was made; waits for users of both. */
gm_status gm_chunks_take_back_spare(gm_chunks *chunks, uint32_t id, gm_piece piece);
uint8_t *gm_chunks_spare(const gm_chunks *chunks, uint32_t id, gm_piece piece); /* NULL: none */
/* The memory that was given, which may be the home by now; NULL: none. */
uint8_t *gm_chunks_given(const gm_chunks *chunks, uint32_t id, gm_piece piece);
/* The bytes of an unpinned piece are those of its home again, which has what there was before work
 * on the device wrote it; it is not resident any more.  If it `keeps` what that wrote, these bytes
 * come next: they go to the spare, if there is one, and are at the piece's place until something
 * takes it. */
gm_status gm_chunks_roll_back(gm_chunks *chunks, uint32_t id, gm_piece piece, bool keeps);
/* Whether it has the bytes that come next: a spare, or its place. */
bool gm_chunks_has_next(const gm_chunks *chunks, uint32_t id, gm_piece piece);
/* The bytes of a piece that is not DIRTY are those from here on: home and spare change places, or
 * those at its place go home.  It is resident where they are there.  *is_stale: a copy on the
 * device has the bytes from before; home_written. */
gm_status gm_chunks_take_next(gm_chunks *chunks, uint32_t id, gm_piece piece, bool *is_stale);

/* ---- the host's own access; it may wait ---- */

/* Makes the home current and readable. */
gm_status gm_chunks_write_back(gm_chunks *chunks, uint32_t id, gm_piece piece);
/* The home; current only unless gm_chunks_is_dirty().  NULL without. */
uint8_t *gm_chunks_home(const gm_chunks *chunks, uint32_t id, gm_piece piece);
/* Makes the home current and waits for copies from it, so that the host may rewrite it. */
gm_status gm_chunks_claim_home(gm_chunks *chunks, uint32_t id, gm_piece piece);
/* The home was rewritten by the host: a resident copy is refreshed behind its last reader;
 * of a pinned one the readers are on `stream`, before and after. */
gm_status gm_chunks_home_written(gm_chunks *chunks, uint32_t id, gm_piece piece, gm_stream stream);
/* The authoritative bytes, wherever they are.  `bytes` may be 0; `pool` copies what is at home,
 * NULL: the caller. */
gm_status gm_chunks_read(gm_chunks *chunks, uint32_t id, gm_piece piece, size_t offset,
                         size_t bytes, void *dst, gm_workers *pool);
/* The bytes that the device shows for a resident piece, whatever its state. */
gm_status gm_chunks_read_device(gm_chunks *chunks, uint32_t id, gm_piece piece, size_t offset,
                                size_t bytes, void *dst);
gm_status gm_chunks_write(gm_chunks *chunks, uint32_t id, gm_piece piece, size_t offset,
                          size_t bytes, const void *src, gm_stream stream);
gm_status gm_chunks_sync(gm_chunks *chunks); /* waits for everything that was issued on pieces */

/* ---- memory ---- */

/* All chunks but those that stay have homes from now on, for good; GM_ERR_NOMEM has the bytes that
 * lack, and nothing has changed. */
gm_status gm_chunks_give_homes(gm_chunks *chunks);
/* Why some chunks stay, as errors say it; "": none does. */
void gm_chunks_say_staying(const gm_chunks *chunks, char *out, size_t bytes);
/* Homes that came later, of chunks that the adopted plan keeps on the device, go back, but where
 * spares are beside them.  Fetches what is not there yet, and waits. */
gm_status gm_chunks_drop_homes(gm_chunks *chunks, const gm_plan *plan);

/* All of a chunk becomes resident, weights, states and gradient, and is evicted last (which ends
 * this), or never. */
gm_status gm_chunks_make_resident(gm_chunks *chunks, uint32_t id);
/* Changes the limit; evicts and gives blocks back until it holds, or as far as pins allow (a
 * placement that is too large is left): *out_bytes (may be NULL) says what is held afterwards. */
gm_status gm_chunks_set_limit(gm_chunks *chunks, size_t device_limit, size_t *out_bytes);
/* Every piece gets the plan's blocks, mapped once; what is resident and stays so keeps its blocks.
 * Waits.  No piece that the plan does not keep resident may be pinned (GM_ERR_STATE, nothing
 * changed).  GM_ERR_NOMEM: the device has not enough; there is no placement then, and *out_blocks
 * is how many could be had. */
gm_status gm_chunks_adopt(gm_chunks *chunks, const gm_plan *plan, uint32_t *out_blocks);
/* The range that shows the placement's state ring, for states in passing; 0 bytes without one.  And
 * the streams that copy states in and out. */
void gm_chunks_stage(const gm_chunks *chunks, uintptr_t *address, size_t *bytes);
void gm_chunks_state_streams(const gm_chunks *chunks, gm_stream *in, gm_stream *out);
/* Copied by others, for the stats. */
void gm_chunks_count_copy(gm_chunks *chunks, size_t bytes, bool is_in);
/* Back to the pool: waits, keeps what is resident. */
gm_status gm_chunks_leave_placement(gm_chunks *chunks);

/* Moves are logged there from now on; NULL: no longer. */
void gm_chunks_set_timeline(gm_chunks *chunks, gm_timeline *timeline);
void gm_chunks_get_stats(const gm_chunks *chunks, gm_chunks_stats *out);
/* Checks every invariant of chunk.c; GM_ERR_STATE names the first that is broken. */
gm_status gm_chunks_check(const gm_chunks *chunks);
/* On the host device, where all work has run when a call returns: what is CLEAN and not pinned has
 * the same bytes on both sides.  On other devices nothing is compared. */
gm_status gm_chunks_check_bytes(const gm_chunks *chunks);
