/* peers.h - all-gathers by copy engines, between GPUs of one host that reach each other's memory: no multiprocessor is
 * taken from the model's kernels, which NCCL's take some twenty of. */
#pragma once

#include "comm/words.h"
#include "device/cuda/driver.h"

typedef struct gm_peers gm_peers;

/* What a rank lets the others know; the same bytes on every rank once they are gathered. */
typedef struct gm_peers_card {
    CUipcMemHandle handle;
    gm_words_card words;
    uint64_t host;     /* equal on ranks that share a host */
    uint64_t is_there; /* whether this rank has memory for others to read */
} gm_peers_card;

enum { GM_PEERS_MOST = 64 }; /* ranks */

/* One thread at a time, with the context of the rank's device; gm_peers_release and gm_peers_lost need neither.
 * size: 2 to GM_PEERS_MOST.  On failure, too, *out is to be freed. */
gm_status gm_peers_new(const gm_cuda_api *cuda, int rank, int size, gm_peers **out);
gm_peers_card gm_peers_card_of(gm_peers *peers);
/* A stream and an event for the meeting. */
CUstream gm_peers_stream(const gm_peers *peers);
CUevent gm_peers_event(const gm_peers *peers);
/* cards: (size,).  Whether every other rank's memory can be read; to be used only if that is so on every rank. */
bool gm_peers_open(gm_peers *peers, const gm_peers_card *cards);
/* As gm_comm_all_gather.  Behind every gather before it, whatever their streams: the caller sees to that. */
gm_status gm_peers_gather(gm_peers *peers, uintptr_t base, size_t shard_bytes, CUstream stream);
/* Rounds issued so far, and those of a gather: each takes some entries of the stream's queue, which is bounded. */
uint32_t gm_peers_rounds(gm_peers *peers);
size_t gm_peers_rounds_of(size_t shard_bytes);
/* After a failure: streams that wait for another rank go on.  What they read is not to be believed, nor what others read
 * of this rank, who see it in gm_peers_lost. */
void gm_peers_release(gm_peers *peers);
/* Another rank that has given up what others may read, or -1: all gathers that are over have brought what they should. */
int gm_peers_lost(const gm_peers *peers);
/* Nothing of this rank is under way any more: it does not see the others' memory from here on. */
void gm_peers_close(gm_peers *peers);
/* After a close.  is_seen: another rank may still see this one's memory, so that stays. */
void gm_peers_free(gm_peers *peers, bool is_seen);
