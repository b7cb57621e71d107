/* peers.c - each rank shows its shards in memory that the others read.
 *
 * A gather is made of rounds: a rank copies at most SLOT_BYTES of its own shard into a slot, says so to all others,
 * waits until they have said so, and reads their slots.  It says so by writing the round's number into a word of the
 * other rank's, in the order of the stream; a stream waits on its own rank's words.  They are in host memory: whoever
 * gives up sets them by a plain store, whatever the device, its queues and the driver's locks wait for.
 *
 * Invariants
 *   1. Rounds follow each other on every rank (nccl.c, 3), and all issue the same gathers in one order (comm.h).
 *   2. A slot is read for round n only when its rank has written it for round n.
 *   3. Round n uses slot n % N_SLOTS, which are two.  Who says that round n - 1 is written has read all slots of round
 *      n - 2, by 1.  So a rank that has heard it of all others may write its slot for round n.
 *   4. Numbers begin at 1 and are compared as differences of 32 bits, so they may wrap.  A release is beyond all that
 *      are in use.
 *   5. A release stays: a rank that comes late writes the words of the rounds that it comes to, and no others, as each
 *      of N_NUMBERS rounds has words of its own.  Fewer are under way (nccl.c, 7).
 *   6. A rank's words are zero before another rank has its card.
 *   7. 2 and 3 hold until a rank gives up.  If that ends a wait, or a round is issued behind it, the rank's words from
 *      itself, which nobody waits for, say so first: who looks there after a gather, and finds 0, has read what it was to
 *      read.  A rank that ends when all its rounds were heard spoils nothing, and says nothing: memory whose process has
 *      ended is there until those that see it close it, as drivers have it. */
#include "comm/comm_impl.h"

#ifdef GM_WITH_CUDA

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/peers.h"

enum { N_SLOTS = 2, N_NUMBERS = 4096 };
static const size_t SLOT_BYTES = (size_t)32 << 20;

struct gm_peers {
    const gm_cuda_api *cuda;
    int rank, size;
    CUdeviceptr slots[GM_PEERS_MOST];    /* of each rank, as seen here; 0: not open */
    gm_words words[GM_PEERS_MOST];       /* likewise */
    CUdeviceptr words_at[GM_PEERS_MOST]; /* where the device finds them; 0: nowhere */
    CUstream stream;
    CUevent event;
    atomic_uint n_rounds;
    atomic_bool is_released;
};

static size_t n_words(const gm_peers *p)
{
    return (size_t)p->size * N_NUMBERS;
}

/* The word, of a rank's, by which rank `from` tells it that it has written its slot for a round. */
static size_t index_of(int from, uint32_t number)
{
    return (size_t)from * N_NUMBERS + number % N_NUMBERS;
}

static CUdeviceptr word_of(const gm_peers *p, int to, int from, uint32_t number)
{
    return p->words_at[to] + index_of(from, number) * sizeof(uint32_t);
}

/* Where a rank says that it has given up. */
static uint32_t *mark_of(const gm_peers *p, int rank)
{
    return &p->words[rank].at[index_of(rank, 0)];
}

uint32_t gm_peers_rounds(gm_peers *p)
{
    return atomic_load(&p->n_rounds);
}

size_t gm_peers_rounds_of(size_t shard_bytes)
{
    return (shard_bytes + SLOT_BYTES - 1) / SLOT_BYTES;
}

/* ---- a gather ---- */

/* Tells every other rank that this one's slot is written, by all that is in the stream before; and waits until every
 * other has told that. */
static gm_status exchange(const gm_peers *p, uint32_t number, CUstream stream)
{
    CUstreamBatchMemOpParams ops[2 * GM_PEERS_MOST]; /* the driver takes 256 */
    unsigned n = 0, n_others = (unsigned)p->size - 1;
    memset(ops, 0, sizeof ops);
    for (int r = 0; r < p->size; r++) {
        if (r == p->rank) {
            continue;
        }
        ops[n].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
        ops[n].writeValue.address = word_of(p, r, p->rank, number);
        ops[n].writeValue.value = number;
        ops[n].writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
        ops[n + n_others].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
        ops[n + n_others].waitValue.address = word_of(p, p->rank, r, number);
        ops[n + n_others].waitValue.value = number;
        ops[n + n_others].waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
        n++;
    }
    GM_CU(p->cuda->cuStreamBatchMemOp(stream, 2 * n_others, ops, 0));
    return GM_OK;
}

/* One round: bytes [offset, offset + bytes) of every shard. */
static gm_status gather_part(gm_peers *p, uintptr_t base, size_t shard_bytes, size_t offset,
                             size_t bytes, CUstream stream)
{
    const gm_cuda_api *cuda = p->cuda;
    uint32_t number = atomic_fetch_add(&p->n_rounds, 1) + 1;
    size_t slot = number % N_SLOTS * SLOT_BYTES; /* invariant 3 */
    if (atomic_load(&p->is_released)) {          /* invariant 7: one of the two sees the other */
        __atomic_store_n(mark_of(p, p->rank), 1, __ATOMIC_SEQ_CST);
    }
    GM_CU(cuda->cuMemcpyDtoDAsync(p->slots[p->rank] + slot,
                                  base + (size_t)p->rank * shard_bytes + offset, bytes, stream));
    GM_TRY(exchange(p, number, stream));
    for (int i = 1; i < p->size; i++) { /* no two ranks read the same one at a time */
        int r = (p->rank + i) % p->size;
        GM_CU(cuda->cuMemcpyDtoDAsync(base + (size_t)r * shard_bytes + offset, p->slots[r] + slot,
                                      bytes, stream));
    }
    return GM_OK;
}

gm_status gm_peers_gather(gm_peers *p, uintptr_t base, size_t shard_bytes, CUstream stream)
{
    for (size_t offset = 0; offset < shard_bytes; offset += SLOT_BYTES) {
        size_t left = shard_bytes - offset;
        GM_TRY(gather_part(p, base, shard_bytes, offset, left < SLOT_BYTES ? left : SLOT_BYTES,
                           stream));
    }
    return GM_OK;
}

/* ---- meeting ---- */

/* The same on processes that run under one kernel, unless the user tells NCCL otherwise; 0: not known. */
static uint64_t host_number(void)
{
    char id[256] = "";
    const char *told = getenv("NCCL_HOSTID");
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "r");
    if (file) {
        (void)!fgets(id, 64, file);
        (void)fclose(file);
    }
    size_t n = strlen(id);
    if (n == 0 && !told) {
        return 0;
    }
    (void)snprintf(id + n, sizeof id - n, "%s", told ? told : "");
    uint64_t hash = 0xcbf29ce484222325; /* FNV-1a */
    for (const char *c = id; *c; c++) {
        hash = (hash ^ (unsigned char)*c) * 0x100000001b3;
    }
    return hash;
}

/* Unless the user knows of a machine where it does not work. */
static bool is_wanted(void)
{
    const char *off = getenv("NCCL_P2P_DISABLE");
    return !off || !*off || strcmp(off, "0") == 0;
}

/* The device, too, sees a rank's words. */
static bool show_words(gm_peers *p, int rank)
{
    gm_words *words = &p->words[rank];
    unsigned flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
    if (p->cuda->cuMemHostRegister(words->at, words->bytes, flags) != CUDA_SUCCESS) {
        return false;
    }
    if (p->cuda->cuMemHostGetDevicePointer(&p->words_at[rank], words->at, 0) == CUDA_SUCCESS) {
        return true;
    }
    (void)p->cuda->cuMemHostUnregister(words->at);
    p->words_at[rank] = 0;
    return false;
}

static void leave_words(gm_peers *p, int rank)
{
    if (p->words_at[rank]) {
        (void)p->cuda->cuMemHostUnregister(p->words[rank].at);
        p->words_at[rank] = 0;
    }
    gm_words_close(&p->words[rank]);
}

gm_status gm_peers_new(const gm_cuda_api *cuda, int rank, int size, gm_peers **out)
{
    gm_peers *p;
    *out = NULL;
    GM_ASSERT(size > 1 && size <= GM_PEERS_MOST);
    GM_TRY(gm_new(&p, sizeof *p, "HOST: no %zu bytes for a communicator"));
    *out = p;
    p->cuda = cuda;
    p->rank = rank;
    p->size = size;
    for (int r = 0; r < size; r++) {
        p->words[r] = GM_NO_WORDS;
    }
    GM_CU(cuda->cuStreamCreate(&p->stream, CU_STREAM_NON_BLOCKING));
    GM_CU(cuda->cuEventCreate(&p->event, CU_EVENT_DISABLE_TIMING));
    if (is_wanted() && gm_words_new(n_words(p), &p->words[rank]) && show_words(p, rank) &&
        cuda->cuMemAlloc(&p->slots[rank], N_SLOTS * SLOT_BYTES) != CUDA_SUCCESS) {
        p->slots[rank] = 0; /* NCCL needs less */
    }
    return GM_OK;
}

gm_peers_card gm_peers_card_of(gm_peers *p)
{
    gm_peers_card card;
    memset(&card, 0, sizeof card);
    card.host = host_number();
    card.words = gm_words_card_of(&p->words[p->rank]);
    card.is_there = card.host != 0 && p->slots[p->rank] != 0 &&
                    p->cuda->cuIpcGetMemHandle(&card.handle, p->slots[p->rank]) == CUDA_SUCCESS;
    return card;
}

CUstream gm_peers_stream(const gm_peers *p)
{
    return p->stream;
}

CUevent gm_peers_event(const gm_peers *p)
{
    return p->event;
}

bool gm_peers_open(gm_peers *p, const gm_peers_card *cards)
{
    bool is_open = true;
    for (int r = 0; r < p->size && is_open; r++) {
        const gm_peers_card *card = &cards[r];
        is_open = card->is_there == 1 && card->host == cards[p->rank].host;
        if (is_open && r != p->rank) {
            CUresult result = p->cuda->cuIpcOpenMemHandle(&p->slots[r], card->handle,
                                                          CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
            is_open = result == CUDA_SUCCESS;
            p->slots[r] = is_open ? p->slots[r] : 0;
            is_open =
                is_open && gm_words_open(card->words, n_words(p), &p->words[r]) && show_words(p, r);
        }
    }
    return is_open;
}

/* ---- the end ---- */

/* All others have written their slots for all rounds that are issued here. */
static bool has_heard_all(const gm_peers *p, uint32_t number)
{
    for (int r = 0; number > 0 && r < p->size; r++) {
        const uint32_t *word = &p->words[p->rank].at[index_of(r, number)];
        if (r != p->rank && (int32_t)(__atomic_load_n(word, __ATOMIC_ACQUIRE) - number) < 0) {
            return false;
        }
    }
    return true;
}

void gm_peers_release(gm_peers *p)
{
    const gm_words *words = &p->words[p->rank];
    if (!words->at) {
        return;
    }
    atomic_store(&p->is_released, true);
    uint32_t number = gm_peers_rounds(p);
    if (!has_heard_all(p, number)) {
        __atomic_store_n(mark_of(p, p->rank), 1, __ATOMIC_SEQ_CST); /* invariant 7 */
    }
    for (size_t i = 0; i < words->n; i++) {
        if (i / N_NUMBERS != (size_t)p->rank) {
            __atomic_store_n(&words->at[i], number + (1u << 30), __ATOMIC_RELEASE);
        }
    }
}

int gm_peers_lost(const gm_peers *p)
{
    for (int r = 0; r < p->size; r++) {
        if (r != p->rank && __atomic_load_n(mark_of(p, r), __ATOMIC_ACQUIRE) != 0) {
            return r;
        }
    }
    return -1;
}

void gm_peers_close(gm_peers *p)
{
    for (int r = 0; r < p->size; r++) {
        if (r != p->rank) {
            if (p->slots[r]) {
                (void)p->cuda->cuIpcCloseMemHandle(p->slots[r]);
                p->slots[r] = 0;
            }
            leave_words(p, r);
        }
    }
}

void gm_peers_free(gm_peers *p, bool is_seen)
{
    if (p->slots[p->rank] && !is_seen) {
        (void)p->cuda->cuMemFree(p->slots[p->rank]);
    }
    leave_words(p, p->rank);
    if (p->event) {
        (void)p->cuda->cuEventDestroy(p->event);
    }
    if (p->stream) {
        (void)p->cuda->cuStreamDestroy(p->stream);
    }
    free(p);
}

#endif
