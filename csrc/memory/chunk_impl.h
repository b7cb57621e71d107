/* chunk_impl.h - what chunk.c (moving bytes), block.c (blocks, on demand), place.c (a plan's),
 * residence.c and table.c share.
 *
 * Fences.  Each piece has four, and two more for its spare, and they say all that is ever needed
 * about order:
 *     filled     the last write of its device bytes, hence also the last copy from home for that
 *     used       the last reader of its device bytes other than a copy home
 *     homed      the last write of its home, hence also the last copy of device bytes for that
 *     home_used  the last reader of its home other than a fetch
 * So: reading device bytes comes after filled; writing them after filled, used, homed; reading a
 * home after homed; writing it after homed, home_used, filled.  Taking over a block is writing the
 * device bytes of its last owner.
 *
 * A spare has fences of the same kind as a home, and the two change places with their memory.
 * Writing a spare comes after both of its own, after filled, which may have read it when it was the
 * home, and after homed: so that behind the spare's last write there is no copy to the home either,
 * and `homed` keeps its meaning.  It is read after its homed. */
#pragma once

#include "memory/chunk.h"
#include "plan/ring.h"

typedef enum piece_state { HOME, CLEAN, DIRTY, N_STATES } piece_state;

/* A point in the work of a stream. */
typedef struct fence {
    gm_event event;
    gm_stream stream;
    gm_stream seen; /* the stream that has been made to wait for it since it was set */
    bool is_set, has_seen;
    bool is_open; /* set, but the event is recorded only when a stream waits for it */
} fence;

typedef struct piece {
    piece_state state;
    bool is_mapped; /* the range shows blocks[], owned or stale */
    bool is_placed; /* blocks[] are the placement's */
    uint32_t pins, n_blocks;
    uint32_t *blocks; /* (n_blocks,) owned when resident, the placement's, or stale once evicted */
    uint64_t last_use;
    size_t bytes;
    uintptr_t address;
    uint8_t *home;    /* NULL: none, the piece is resident */
    size_t home_from; /* where the arena has a place for it */
    fence filled, used, homed, home_used;
    bool is_home_late, is_written_inside; /* gm_piece_note_home */
    bool shows_next;  /* HOME, and its place has the bytes that come next, unless taken */
    uint64_t version; /* changes with whatever may have changed the piece's bytes */
    uint8_t *spare;   /* as large as the home, for its next bytes; NULL: none */
    fence spare_homed, spare_used;
} piece;

struct gm_chunks {
    gm_device *device;
    uint32_t n_chunks;
    piece *pieces;          /* (n_chunks, GM_N_PIECES) */
    uint32_t *piece_blocks; /* (capacity,) their blocks[], one behind the other */
    bool *is_all_resident;  /* (n_chunks,) */
    const bool *stays;      /* (n_chunks,) or NULL */
    bool has_homes, keeps_homes, has_placement, places_states;
    gm_piece shown; /* what tensors show */
    gm_arena *homes;
    gm_workers *workers;
    gm_status (*on_change)(void *context, uint32_t id); /* NULL: nothing is told */
    void *context;
    uintptr_t span[GM_N_PIECES];
    size_t span_bytes[GM_N_PIECES];
    /* A stream for each kind of copy, so that one that waits (for an update, for a slot) holds up
     * no other.  Where states have places one has what updates need, in that order: a stream with
     * many copies ready keeps the device from one with a needed one. */
    gm_stream in[GM_N_OWN_PIECES], out[GM_N_OWN_PIECES], refresh;

    gm_block *blocks;      /* (capacity,) handles */
    uint32_t *free_blocks; /* (capacity,) stack of indices; unused under a placement */
    uint32_t *free_at;     /* (capacity,) where in it an index would be */
    uint32_t *holes;       /* (capacity,) stack of indices whose block was destroyed */
    gm_block *scratch;     /* (capacity,) handles for one map call */
    uintptr_t stage;       /* range of stage_capacity blocks for states in passing */
    uint32_t stage_capacity, stage_blocks; /* blocks mapped there now */
    uint32_t *owners; /* (capacity,) under a placement: the last piece there, or GM_NO_OWNER */
    uint32_t capacity, n_blocks, n_free, n_holes, n_indices;
    size_t limit, home_limit;
    uint64_t clock;
    gm_chunks_stats stats;
    gm_timeline *timeline; /* NULL: off */
};

static inline piece *gm_piece_at(const gm_chunks *chunks, uint32_t id, gm_piece kind)
{
    GM_ASSERT(id < chunks->n_chunks);
    return &chunks->pieces[(size_t)id * GM_N_PIECES + (size_t)kind];
}

static inline uint32_t gm_piece_chunk(const gm_chunks *chunks, const piece *p)
{
    return (uint32_t)((size_t)(p - chunks->pieces) / GM_N_PIECES);
}

static inline uint32_t gm_piece_index(const gm_chunks *chunks, const piece *p)
{
    return (uint32_t)(p - chunks->pieces);
}

static inline bool gm_is_resident(const piece *p)
{
    return p->state != HOME;
}

/* chunk.c */
void gm_piece_move(piece *p, piece_state to);
/* The host waits until no work on the device can touch the piece or its home any more. */
gm_status gm_piece_wait_idle(gm_chunks *chunks, piece *p);
/* Copies the device's bytes there, not to the home. */
gm_status gm_piece_send_to_spare(gm_chunks *chunks, piece *p, gm_piece kind);
/* Copies; the piece owns its blocks. */
gm_status gm_piece_fetch(gm_chunks *chunks, piece *p, gm_piece kind, gm_log_kind log,
                         gm_stream stream);
/* Orders `stream` behind the users of the device bytes: to write them, or to take their blocks. */
gm_status gm_piece_order_write(gm_chunks *chunks, piece *p, gm_stream stream);
gm_status gm_piece_note_home(gm_chunks *chunks, piece *p, gm_stream stream); /* before a pin */
/* `stream`, ordered behind the last owner of the piece's blocks, may write them. */
gm_status gm_piece_claim(gm_chunks *chunks, piece *p, gm_stream stream);

/* home.c */
size_t gm_home_after(size_t from, const size_t *piece_bytes, int n);
gm_status gm_home_give(gm_chunks *chunks, uint32_t begin, uint32_t end); /* to [begin, end) */
uint8_t *gm_home_made(const gm_chunks *chunks, const piece *p); /* where its home is first */
bool gm_has_to_stay(const gm_chunks *chunks, uint32_t id);      /* it has no home, and gets none */
void gm_home_drop(gm_chunks *chunks, uint32_t id); /* nothing uses them; its pieces are resident */

/* block.c */
extern const gm_log_kind gm_log_of_fetch[GM_N_OWN_PIECES];
gm_status gm_block_map(gm_chunks *chunks, piece *p);   /* the range shows blocks[] */
void gm_block_push(gm_chunks *chunks, uint32_t index); /* onto the free ones */
uint32_t gm_block_pop(gm_chunks *chunks);
bool gm_block_may_grow(const gm_chunks *chunks);
gm_status gm_block_grow(gm_chunks *chunks); /* one free block more */
/* The piece, which is not resident, takes the blocks that its range still shows, if all are
 * free. */
bool gm_block_take_shown(gm_chunks *chunks, const piece *p);
gm_status gm_block_shrink(gm_chunks *chunks); /* gives one free block back to the device */
/* Evicts the piece that is needed last: the least recently used weights of a chunk that is not all
 * resident; then (the last such chunk first) the states and gradient of a chunk.  *out is false if
 * nothing can go. */
gm_status gm_block_evict_one(gm_chunks *chunks, bool *out);
/* Without a placement: the piece gets blocks, by creating or by evicting, and its bytes. */
gm_status gm_block_make_resident(gm_chunks *chunks, piece *p, gm_piece kind);

/* place.c: takes the piece's own blocks, behind their fences; *out false: they are in use. */
gm_status gm_place_take(gm_chunks *chunks, piece *p, gm_stream stream, bool *out);
