/* chunk.h - the chunk table: where the bytes of each chunk are, and moving them between DEVICE and HOST.
 *
 * A chunk has three pieces: its weights, its optimizer states, its gradient.  A piece has one device
 * address range for life and, unless the table was made without homes, one home on the host.  Behind the
 * address are blocks, taken from a pool while the piece is resident.
 *
 *             fetch                 note_write
 *     HOME ----------> CLEAN ---------------------> DIRTY     HOME   only the home holds the bytes
 *       ^               |  ^                          |       CLEAN  resident; home and device agree
 *       +----evict------+  +--------write_back--------+       DIRTY  resident; only the device is right
 *                 (evict of DIRTY writes back first)
 *
 * Threads: one caller at a time (the engine's lock).  Device work is ordered by events; every place
 * where the host waits is a call of wait_idle() or *_sync in chunk.c. */
#ifndef GM_CHUNK_H
#define GM_CHUNK_H

#include "base.h"
#include "device.h"

typedef struct gm_chunks gm_chunks; /* opaque; owns ranges, blocks, events, a copy stream */

typedef enum gm_piece { GM_WEIGHT = 0, GM_STATE = 1, GM_GRAD = 2, GM_N_PIECES = 3 } gm_piece;

typedef struct gm_chunks_options {
    gm_device *device; /* borrowed; outlives the table */
    uint32_t n_chunks;
    const size_t (*piece_bytes)[GM_N_PIECES]; /* (n_chunks,) bytes of each piece; 0 = none */
    bool has_homes;                           /* false: all pieces stay resident */
    uint8_t *homes;      /* the arena, gm_chunks_home_bytes() long; NULL: all resident */
    size_t device_limit; /* bytes of blocks */
    bool is_strict;      /* evicting maps the range to poison */
} gm_chunks_options;

typedef struct gm_chunks_stats {
    uint64_t fetches, evictions, fetched_bytes, evicted_bytes; /* evicted: written back D2H */
    size_t device_bytes, device_peak_bytes;                    /* of blocks */
    uint32_t n_blocks;
} gm_chunks_stats;

/* Bytes of arena that the pieces' homes take. */
size_t gm_chunks_home_bytes(const size_t (*piece_bytes)[GM_N_PIECES], uint32_t n_chunks);
/* Bytes of blocks that one piece takes. */
size_t gm_chunks_block_bytes(const gm_device *device, size_t piece_bytes);

gm_status gm_chunks_new(const gm_chunks_options *options, gm_chunks **out);
void gm_chunks_free(gm_chunks *chunks); /* waits for the copies in flight; NULL is fine */

uintptr_t gm_chunks_address(const gm_chunks *chunks, uint32_t id, gm_piece piece);
/* The one address range that holds every weight piece. */
void gm_chunks_weight_span(const gm_chunks *chunks, uintptr_t *begin, uintptr_t *end);
/* The chunk whose weights are at `address`, or UINT32_MAX. */
uint32_t gm_chunks_at(const gm_chunks *chunks, uintptr_t address);
bool gm_chunks_is_resident(const gm_chunks *chunks, uint32_t id, gm_piece piece);
bool gm_chunks_is_dirty(const gm_chunks *chunks, uint32_t id, gm_piece piece);
uint32_t gm_chunks_pins(const gm_chunks *chunks, uint32_t id, gm_piece piece);

/* Makes the piece resident, readable by work that `stream` gets from now on, and pins it.  Evicts others
 * (least recently used first, settled chunks last) when the limit asks for it; GM_ERR_NOMEM has the numbers. */
gm_status gm_chunks_pin(gm_chunks *chunks, uint32_t id, gm_piece piece, gm_stream stream);
/* Orders work that `stream` gets from now on behind the fetch of a pinned piece. */
gm_status gm_chunks_wait_ready(gm_chunks *chunks, uint32_t id, gm_piece piece, gm_stream stream);
/* Ends one pin; the piece may be overwritten once `stream` passes this point. */
gm_status gm_chunks_unpin(gm_chunks *chunks, uint32_t id, gm_piece piece, gm_stream stream);
/* The device copy was or will be written by work on the stream it is pinned for. */
void gm_chunks_note_write(gm_chunks *chunks, uint32_t id, gm_piece piece);
/* Evicts now if unpinned (no-op when not resident).  GM_ERR_STATE without homes or when pinned. */
gm_status gm_chunks_evict(gm_chunks *chunks, uint32_t id, gm_piece piece);
/* Makes the home current (host waits when the piece is DIRTY). */
gm_status gm_chunks_write_back(gm_chunks *chunks, uint32_t id, gm_piece piece);
/* The home; current only unless gm_chunks_is_dirty().  NULL without homes. */
uint8_t *gm_chunks_home(const gm_chunks *chunks, uint32_t id, gm_piece piece);
/* Makes the home current and waits for copies from it, so that the host may rewrite it. */
gm_status gm_chunks_claim_home(gm_chunks *chunks, uint32_t id, gm_piece piece);
/* The home was rewritten by the host: a resident copy is refreshed behind its last reader;
 * of a pinned one the readers are on `stream`, before and after. */
gm_status gm_chunks_home_written(gm_chunks *chunks, uint32_t id, gm_piece piece, gm_stream stream);

/* The authoritative bytes, wherever they are; the host waits.  `bytes` may be 0. */
gm_status gm_chunks_read(gm_chunks *chunks, uint32_t id, gm_piece piece, size_t offset,
                         size_t bytes, void *dst);
/* The bytes that the device shows for a resident piece, whatever its state. */
gm_status gm_chunks_read_device(gm_chunks *chunks, uint32_t id, gm_piece piece, size_t offset,
                                size_t bytes, void *dst);
gm_status gm_chunks_write(gm_chunks *chunks, uint32_t id, gm_piece piece, size_t offset,
                          size_t bytes, const void *src, gm_stream stream);

/* A settled chunk has weights, states and gradient on the device and is evicted last (which unsettles it). */
gm_status gm_chunks_settle(gm_chunks *chunks, uint32_t id);
bool gm_chunks_is_settled(const gm_chunks *chunks, uint32_t id);

/* Changes the limit; evicts and gives blocks back until it holds, or as far as pins allow:
 * *out_bytes (may be NULL) says what is held afterwards. */
gm_status gm_chunks_set_limit(gm_chunks *chunks, size_t device_limit, size_t *out_bytes);
void gm_chunks_get_stats(const gm_chunks *chunks, gm_chunks_stats *out);
/* Checks every invariant of chunk.c; GM_ERR_STATE names the first that is broken. */
gm_status gm_chunks_check(const gm_chunks *chunks);

#endif
