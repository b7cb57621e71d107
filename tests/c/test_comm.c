/* test_comm.c - communicators without Python: arguments, failures, and ranks as threads, each with a device of
 * its own whose streams run late, whose bytes travel through memory. */
#include "comm/comm.h"

#include <math.h>
#include <pthread.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "chaos/chaos.h"

enum { MOST_RANKS = 5 };

/* ---- a transport through memory: one box for each pair of ranks ---- */

typedef struct box {
    const void *data; /* NULL: empty */
    size_t bytes;
} box;

typedef struct world {
    pthread_mutex_t lock;
    pthread_cond_t change;
    box boxes[MOST_RANKS][MOST_RANKS]; /* [from][to] */
    int size;
    bool is_closed[MOST_RANKS];
} world;

typedef struct end {
    world *world;
    int rank, n_exchanges, n_closed, n_freed;
    int fails_at; /* the exchange that is refused, 1 the first; 0 none */
} end;

static void open_world(world *w, int size)
{
    memset(w, 0, sizeof *w);
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->change, NULL);
    w->size = size;
}

static bool refuse(char *why, size_t why_bytes, int rank)
{
    (void)snprintf(why, why_bytes, "rank %d is gone", rank);
    return false;
}

static bool memory_exchange(void *context, const gm_comm_piece *out, const gm_comm_piece *in,
                            char *why, size_t why_bytes)
{
    end *e = context;
    world *w = e->world;
    int gone = -1; /* a rank that closed its end before it gave or took its bytes */
    CHECK(out[e->rank].bytes == 0 && in[e->rank].bytes == 0);
    if (++e->n_exchanges == e->fails_at) {
        return refuse(why, why_bytes, e->rank);
    }
    pthread_mutex_lock(&w->lock);
    for (int r = 0; r < w->size; r++) {
        if (out[r].bytes) {
            CHECK(!w->boxes[e->rank][r].data);
            w->boxes[e->rank][r] = (box){out[r].data, out[r].bytes};
        }
    }
    pthread_cond_broadcast(&w->change);
    for (int r = 0; r < w->size; r++) {
        box *theirs = &w->boxes[r][e->rank];
        while (in[r].bytes && !theirs->data && !w->is_closed[r] && !w->is_closed[e->rank]) {
            pthread_cond_wait(&w->change, &w->lock);
        }
        if (in[r].bytes && !theirs->data) {
            gone = r;
        } else if (in[r].bytes) {
            CHECK(theirs->bytes == in[r].bytes); /* both sides name the same bytes */
            memcpy(in[r].data, theirs->data, in[r].bytes);
            *theirs = (box){0};
            pthread_cond_broadcast(&w->change);
        }
    }
    for (int r = 0; r < w->size; r++) { /* what is sent may change once it is taken */
        box *mine = &w->boxes[e->rank][r];
        while (mine->data && !w->is_closed[r] && !w->is_closed[e->rank]) {
            pthread_cond_wait(&w->change, &w->lock);
        }
        gone = mine->data ? r : gone;
        *mine = (box){0};
    }
    pthread_mutex_unlock(&w->lock);
    return gone < 0 || refuse(why, why_bytes, gone);
}

static void memory_close(void *context)
{
    end *e = context;
    e->n_closed++;
    pthread_mutex_lock(&e->world->lock);
    e->world->is_closed[e->rank] = true;
    pthread_cond_broadcast(&e->world->change);
    pthread_mutex_unlock(&e->world->lock);
}

static void memory_free(void *context)
{
    ((end *)context)->n_freed++;
}

static gm_comm *new_comm(end *e, world *w, int rank)
{
    *e = (end){.world = w, .rank = rank};
    gm_comm_transport transport = {memory_exchange, memory_close, memory_free, e};
    gm_comm *comm = NULL;
    CHECK_OK(gm_comm_host_new(&transport, rank, w->size, &comm));
    CHECK(gm_comm_rank(comm) == rank && gm_comm_size(comm) == w->size);
    return comm;
}

/* ---- one rank ---- */

static void check_refused(gm_status status, gm_status wanted, const char *words)
{
    CHECK(status == wanted);
    if (!strstr(gm_last_error(), words)) {
        fprintf(stderr, "\"%s\" is not in \"%s\"\n", words, gm_last_error());
        exit(1);
    }
}

static void check_arguments(void)
{
    world w;
    end e = {.world = &w};
    open_world(&w, 1);
    gm_comm_transport transport = {memory_exchange, memory_close, memory_free, &e};
    gm_comm *comm = (gm_comm *)&w;
    check_refused(gm_comm_host_new(&transport, 2, 2, &comm), GM_ERR_ARG, "rank 2 of 2");
    CHECK(!comm && e.n_freed == 1);
    check_refused(gm_comm_host_new(&transport, 0, 0, &comm), GM_ERR_ARG, "rank 0 of 0");
    check_refused(gm_comm_host_new(&transport, -1, 2, &comm), GM_ERR_ARG, "rank -1 of 2");

    comm = new_comm(&e, &w, 0);
    float x[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    uintptr_t at = (uintptr_t)x;
    check_refused(gm_comm_all_gather(comm, 0, 4, 0), GM_ERR_ARG,
                  "all_gather, rank 0 of 1: the addr");
    check_refused(gm_comm_reduce_scatter(comm, at + 2, 4, GM_COMM_F32, 0), GM_ERR_ARG, "multiple");
    check_refused(gm_comm_reduce_scatter(comm, at, 4, GM_COMM_U64, 0), GM_ERR_ARG, "fp32, bf16");
    check_refused(gm_comm_reduce_scatter(comm, at, SIZE_MAX / 2, GM_COMM_F32, 0), GM_ERR_ARG,
                  "longer than the address space");
    check_refused(gm_comm_all_reduce(comm, at, 4, (gm_comm_dtype)4, GM_COMM_SUM, 0), GM_ERR_ARG,
                  "the dtype");
    check_refused(gm_comm_all_reduce(comm, at, 4, GM_COMM_F32, GM_COMM_MAX, 0), GM_ERR_ARG,
                  "sum, or max of u64");
    check_refused(gm_comm_all_reduce(comm, at, 2, GM_COMM_U64, (gm_comm_op)2, 0), GM_ERR_ARG,
                  "the operation");

    CHECK_OK(gm_comm_all_gather(comm, at, sizeof x, 0));
    CHECK_OK(gm_comm_reduce_scatter(comm, at, 8, GM_COMM_F32, 0));
    CHECK_OK(gm_comm_all_reduce(comm, at, 8, GM_COMM_F32, GM_COMM_SUM, 0));
    CHECK_OK(gm_comm_check(comm));
    for (int i = 0; i < 8; i++) {
        CHECK(x[i] == (float)(i + 1));
    }
    CHECK(e.n_exchanges == 0 && e.n_closed == 0);
    gm_comm_free(comm);
    CHECK(e.n_closed == 1 && e.n_freed == 1);
    gm_comm_free(NULL);
    gm_comm_abort(NULL, "nothing");
}

/* The first failure stands, whatever comes later; nothing travels any more. */
static void check_first_failure(void)
{
    world w;
    end e;
    open_world(&w, 2);
    gm_comm *comm = new_comm(&e, &w, 1);
    e.fails_at = 1;
    float x[2] = {1, 2};
    const char *words = "all_gather number 1 of 2 x 4 bytes, rank 1 of 2: rank 1 is gone";
    check_refused(gm_comm_all_gather(comm, (uintptr_t)x, 4, 0), GM_ERR_DEVICE, words);
    CHECK(e.n_closed == 1);
    check_refused(gm_comm_all_reduce(comm, (uintptr_t)x, 2, GM_COMM_F32, GM_COMM_SUM, 0),
                  GM_ERR_DEVICE, words);
    gm_comm_abort(comm, "later");
    check_refused(gm_comm_check(comm), GM_ERR_DEVICE, words);
    CHECK(e.n_exchanges == 1 && x[0] == 1 && x[1] == 2);
    gm_comm_free(comm);

    open_world(&w, 2);
    comm = new_comm(&e, &w, 0);
    CHECK_OK(gm_comm_check(comm));
    gm_comm_abort(comm, "had enough");
    gm_comm_abort(comm, "later");
    check_refused(gm_comm_check(comm), GM_ERR_STATE, "rank 0 of 2: had enough");
    check_refused(gm_comm_all_gather(comm, (uintptr_t)x, 4, 0), GM_ERR_STATE, "had enough");
    CHECK(e.n_exchanges == 0);

    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        check_refused(gm_comm_check(comm), GM_ERR_STATE, "forked");
        check_refused(gm_comm_all_gather(comm, (uintptr_t)x, 4, 0), GM_ERR_STATE, "forked");
        gm_comm_abort(comm, "in the child");
        int before = e.n_closed;
        gm_comm_free(comm);
        CHECK(e.n_closed == before && e.n_freed == 0);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    gm_comm_free(comm);
    CHECK(e.n_freed == 1);
}

static void check_without_cuda(void)
{
#ifndef GM_WITH_CUDA
    uint8_t id[GM_COMM_ID_BYTES];
    gm_comm *comm = NULL;
    check_refused(gm_comm_nccl_id(NULL, id), GM_ERR_UNSUPPORTED, "no CUDA support");
    check_refused(gm_comm_nccl_new(NULL, 0, id, 0, 1, 1.0, &comm), GM_ERR_UNSUPPORTED,
                  "no CUDA support");
    CHECK(!comm);
#endif
}

/* ---- ranks as threads ---- */

typedef struct member {
    pthread_t thread;
    world *world;
    int rank;
    uint64_t seed;     /* of the chaos device; 0: no device */
    bool is_hasty;     /* leaves out the wait in front of a collective */
    uint32_t n_faults; /* that the device found */
    char text[1024];   /* of a failure */
} member;

static void run_ranks(int size, void *(*body)(void *), uint64_t seed, bool is_hasty, member *ranks)
{
    static world w;
    open_world(&w, size);
    for (int r = 0; r < size; r++) {
        ranks[r] = (member){.world = &w,
                            .rank = r,
                            .is_hasty = is_hasty,
                            .seed = seed ? seed * MOST_RANKS + (uint64_t)r : 0};
        CHECK(pthread_create(&ranks[r].thread, NULL, body, &ranks[r]) == 0);
    }
    for (int r = 0; r < size; r++) {
        CHECK(pthread_join(ranks[r].thread, NULL) == 0);
    }
}

enum { SHARD = 37, ROUNDS = 12 };

static double term_of(int rank, size_t i, int round)
{
    return (double)((rank * 31 + (int)i * 7 + round * 3) % 17 - 8) / 4;
}

static double sum_of(int size, size_t i, int round)
{
    double sum = 0;
    for (int r = 0; r < size; r++) {
        sum += term_of(r, i, round);
    }
    return sum;
}

/* Rounds of reduce-scatter and all-gather on two streams with a device in between: the copies to and from the
 * host are on streams of their own, ordered by events only, and run late. */
static void *late_rounds(void *context)
{
    member *me = context;
    int size = me->world->size;
    size_t n = (size_t)(SHARD * size), bytes = n * sizeof(float);
    gm_chaos_options how = {.seed = me->seed};
    gm_device *dev;
    CHECK_OK(gm_device_chaos_new(bytes, NULL, &how, &dev));
    const gm_device_ops *ops = dev->ops;
    gm_stream reduces, gathers, copies;
    gm_event done[3];
    gm_block block;
    uintptr_t addr;
    CHECK_OK(ops->stream_new(dev, &reduces));
    CHECK_OK(ops->stream_new(dev, &gathers));
    CHECK_OK(ops->stream_new(dev, &copies));
    for (int i = 0; i < 3; i++) {
        CHECK_OK(ops->event_new(dev, false, &done[i]));
    }
    CHECK_OK(ops->block_new(dev, &block));
    CHECK_OK(ops->range_new(dev, dev->block_bytes, &addr));
    CHECK_OK(ops->map(dev, addr, &block, 1));
    float *home = aligned_alloc(4096, gm_round_up(bytes, 4096));
    uint64_t *norm = aligned_alloc(4096, 4096);
    CHECK(home && norm);
    CHECK_OK(ops->pin(dev, home, bytes));
    CHECK_OK(ops->pin(dev, norm, sizeof *norm));
    end e;
    gm_comm *comm = new_comm(&e, me->world, me->rank);
    CHECK_OK(gm_comm_attach(comm, dev));

    for (int round = 0; round < ROUNDS; round++) {
        for (size_t i = 0; i < n; i++) {
            home[i] = (float)term_of(me->rank, i, round);
        }
        gm_note_access(dev, home, bytes, true, GM_STREAM_HOST);
        CHECK_OK(ops->copy_h2d(dev, addr, home, bytes, copies));
        CHECK_OK(ops->event_record(dev, done[0], copies));
        if (!me->is_hasty) {
            CHECK_OK(ops->event_wait(dev, done[0], reduces));
        }
        CHECK_OK(gm_comm_reduce_scatter(comm, addr, SHARD, GM_COMM_F32, reduces));
        CHECK_OK(ops->event_record(dev, done[1], reduces));
        CHECK_OK(ops->event_wait(dev, done[1], gathers));
        *norm = (uint64_t)me->rank + 1;
        gm_note_access(dev, norm, sizeof *norm, true, GM_STREAM_HOST);
        CHECK_OK(gm_comm_all_reduce(comm, (uintptr_t)norm, 1, GM_COMM_U64, GM_COMM_SUM, copies));
        CHECK_OK(gm_comm_all_gather(comm, addr, SHARD * sizeof(float), gathers));
        CHECK_OK(ops->event_record(dev, done[2], gathers));
        CHECK_OK(ops->event_wait(dev, done[2], copies));
        CHECK_OK(ops->copy_d2h(dev, home, addr, bytes, copies));
        CHECK_OK(ops->stream_sync(dev, copies));
        gm_note_access(dev, home, bytes, false, GM_STREAM_HOST);
        gm_note_access(dev, norm, sizeof *norm, false, GM_STREAM_HOST);
        CHECK_OK(gm_comm_check(comm));
        CHECK(*norm == (uint64_t)(size * (size + 1) / 2));
        for (size_t i = 0; i < n; i++) {
            CHECK(me->is_hasty || home[i] == (float)sum_of(size, i, round));
        }
    }
    const char *first;
    CHECK_OK(gm_device_chaos_faults(dev, &me->n_faults, &first));
    (void)snprintf(me->text, sizeof me->text, "%s", first);
    CHECK_OK(gm_comm_attach(comm, NULL));
    gm_comm_free(comm);
    ops->unpin(dev, home);
    ops->unpin(dev, norm);
    ops->range_free(dev, addr, dev->block_bytes);
    ops->block_free(dev, block);
    for (int i = 0; i < 3; i++) {
        ops->event_free(dev, done[i]);
    }
    ops->stream_free(dev, reduces);
    ops->stream_free(dev, gathers);
    ops->stream_free(dev, copies);
    ops->free(dev);
    free(home);
    free(norm);
    return NULL;
}

static void check_late_streams(void)
{
    member ranks[MOST_RANKS];
    for (uint64_t seed = 1; seed <= 40; seed++) {
        int size = 2 + (int)(seed % 3);
        run_ranks(size, late_rounds, seed, false, ranks);
        for (int r = 0; r < size; r++) {
            if (ranks[r].n_faults) {
                fprintf(stderr, "seed %d rank %d: %s\n", (int)seed, r, ranks[r].text);
            }
            CHECK(ranks[r].n_faults == 0);
        }
    }
    run_ranks(2, late_rounds, 1, true,
              ranks); /* the device sees what a collective reads and writes */
    CHECK(ranks[0].n_faults > 0 && ranks[1].n_faults > 0);
    CHECK(strstr(ranks[0].text, "host_call"));
}

/* Without a device: every kind at once, sizes that leave ranks without elements, and bytes around the range. */
static void *plain_rounds(void *context)
{
    member *me = context;
    int size = me->world->size;
    end e;
    gm_comm *comm = new_comm(&e, me->world, me->rank);
    for (size_t count = 1; count < 20; count++) {
        uint64_t words[22], most[22];
        for (size_t i = 0; i < 22; i++) {
            words[i] = UINT64_MAX / 2 + (uint64_t)me->rank * i;
            most[i] = UINT64_MAX - (uint64_t)((me->rank + (int)i) % size);
        }
        CHECK_OK(
            gm_comm_all_reduce(comm, (uintptr_t)(words + 1), count, GM_COMM_U64, GM_COMM_SUM, 0));
        CHECK_OK(
            gm_comm_all_reduce(comm, (uintptr_t)(most + 1), count, GM_COMM_U64, GM_COMM_MAX, 0));
        for (size_t i = 0; i < 22; i++) {
            bool is_in = i >= 1 && i <= count;
            uint64_t sum = 0;
            for (int r = 0; r < size; r++) {
                sum += UINT64_MAX / 2 + (uint64_t)r * i;
            }
            CHECK(words[i] == (is_in ? sum : UINT64_MAX / 2 + (uint64_t)me->rank * i));
            CHECK(most[i] ==
                  (is_in ? UINT64_MAX : UINT64_MAX - (uint64_t)((me->rank + (int)i) % size)));
        }
    }
    CHECK((e.n_exchanges > 0) == (size > 1));
    gm_comm_free(comm);
    return NULL;
}

/* NaNs are canonical, fp16 overflows as it should, and the order of the sum is that of the ranks. */
static void *odd_numbers(void *context)
{
    member *me = context;
    static const float terms[3] = {1e8f, 1.0f, -1e8f}; /* (1e8 + 1) - 1e8 = 0 in fp32 */
    static const uint16_t bf16_nan[3] = {0xffc1, 0x3f80, 0x3f80};
    end e;
    gm_comm *comm = new_comm(&e, me->world, me->rank);
    float x = terms[me->rank];
    uint16_t b = bf16_nan[me->rank], h = 0x7bff /* 65504 */;
    CHECK_OK(gm_comm_all_reduce(comm, (uintptr_t)&x, 1, GM_COMM_F32, GM_COMM_SUM, 0));
    CHECK_OK(gm_comm_all_reduce(comm, (uintptr_t)&b, 1, GM_COMM_BF16, GM_COMM_SUM, 0));
    CHECK_OK(gm_comm_all_reduce(comm, (uintptr_t)&h, 1, GM_COMM_F16, GM_COMM_SUM, 0));
    CHECK(x == 0.0f && !signbit(x));
    CHECK(b == 0x7fc0);
    CHECK(h == 0x7c00);
    gm_comm_free(comm);
    return NULL;
}

static void *different_calls(void *context)
{
    member *me = context;
    end e;
    gm_comm *comm = new_comm(&e, me->world, me->rank);
    float x[3] = {1, 2, 3};
    CHECK_OK(gm_comm_all_reduce(comm, (uintptr_t)x, 3, GM_COMM_F32, GM_COMM_SUM, 0));
    float before[3];
    memcpy(before, x, sizeof x);
    gm_status status = me->rank == 2
                           ? gm_comm_all_reduce(comm, (uintptr_t)x, 3, GM_COMM_F32, GM_COMM_SUM, 0)
                           : gm_comm_all_gather(comm, (uintptr_t)x, 4, 0);
    CHECK(status == GM_ERR_STATE);
    (void)snprintf(me->text, sizeof me->text, "%s", gm_last_error());
    CHECK(memcmp(before, x, sizeof x) == 0);
    CHECK(gm_comm_check(comm) == status && strcmp(gm_last_error(), me->text) == 0);
    gm_comm_free(comm);
    return NULL;
}

static void name_label(void *context, uint64_t label, char *out, size_t bytes)
{
    (void)snprintf(out, bytes, "%s's chunk %d", (const char *)context, (int)label);
}

static uint64_t n_calls(gm_comm *comm)
{
    uint64_t n, hash;
    gm_comm_calls(comm, &n, &hash);
    return n;
}

/* The same bytes for something else: only the label says so. */
static void *different_labels(void *context)
{
    member *me = context;
    static char ours[] = "a", theirs[] = "b";
    end e;
    gm_comm *comm = new_comm(&e, me->world, me->rank);
    float x[3] = {1, 2, 3}, before[3];
    gm_comm_set_namer(comm, name_label, me->rank == 1 ? theirs : ours, NULL);
    gm_comm_label(comm, 5);
    CHECK_OK(gm_comm_all_gather(comm, (uintptr_t)x, 4, 0));
    memcpy(before, x, sizeof x);
    gm_comm_label(comm, me->rank == 1 ? 7 : 6);
    CHECK(gm_comm_all_gather(comm, (uintptr_t)x, 4, 0) == GM_ERR_STATE);
    (void)snprintf(me->text, sizeof me->text, "%s", gm_last_error());
    CHECK(memcmp(before, x, sizeof x) == 0 && gm_comm_failed_at(comm) == 2);
    CHECK(gm_comm_all_gather(comm, (uintptr_t)x, 4, 0) == GM_ERR_STATE);
    CHECK(n_calls(comm) == 2);
    gm_comm_free(comm);
    return NULL;
}

/* Collectives of no bytes meet nobody; the next one of some finds the rank that had another one. */
static void *different_nothings(void *context)
{
    member *me = context;
    end e;
    gm_comm *comm = new_comm(&e, me->world, me->rank);
    float x[3] = {1, 2, 3};
    for (int step = 0; step < 3; step++) {
        CHECK_OK(gm_comm_all_gather(comm, 0, 0, 0));
        CHECK_OK(gm_comm_all_gather(comm, (uintptr_t)x, 4, 0));
    }
    CHECK(e.n_exchanges == 6); /* headers and bytes */
    CHECK_OK(me->rank == 2 ? gm_comm_reduce_scatter(comm, 0, 0, GM_COMM_F32, 0)
                           : gm_comm_all_gather(comm, 0, 0, 0));
    CHECK(gm_comm_all_gather(comm, (uintptr_t)x, 4, 0) == GM_ERR_STATE);
    (void)snprintf(me->text, sizeof me->text, "%s", gm_last_error());
    CHECK(e.n_closed > 0);
    gm_comm_free(comm);
    return NULL;
}

/* The last 512 have words; a name goes with its namer. */
static void check_records(void)
{
    static char ours[] = "a";
    char words[GM_COMM_WORDS];
    world w;
    end e;
    open_world(&w, 1);
    gm_comm *comm = new_comm(&e, &w, 0);
    float x[4];
    CHECK(n_calls(comm) == 0 && !gm_comm_recall(comm, 0, words));
    CHECK(!gm_comm_recall(comm, 1, words));
    for (uint64_t i = 1; i <= 1300; i++) {
        gm_comm_label(comm, i % 3 ? i : 0);
        CHECK_OK(gm_comm_all_reduce(comm, (uintptr_t)x, i % 4, GM_COMM_BF16, GM_COMM_SUM, 0));
        CHECK(n_calls(comm) == i && gm_comm_recall(comm, i, words));
        CHECK(!gm_comm_recall(comm, i + 1, words));
        CHECK(gm_comm_recall(comm, i - 511, words) == (i >= 512));
        CHECK(!gm_comm_recall(comm, i - 512, words));
    }
    CHECK(gm_comm_recall(comm, 1000, words));
    CHECK(strcmp(words, "all_reduce number 1000 of 0 bytes (sum of bf16; label 1000)") == 0);
    gm_comm_set_namer(comm, name_label, ours, NULL);
    CHECK(gm_comm_recall(comm, 1001, words));
    CHECK(strcmp(words, "all_reduce number 1001 of 2 bytes (sum of bf16; a's chunk 1001)") == 0);
    CHECK(gm_comm_recall(comm, 1002, words)); /* 3 * 334 */
    CHECK(strcmp(words, "all_reduce number 1002 of 4 bytes (sum of bf16)") == 0);
    gm_comm_set_namer(comm, NULL, NULL, NULL);
    CHECK(gm_comm_recall(comm, 1001, words) && strstr(words, "label 1001"));
    gm_comm_free(comm);
}

static void check_plain(void)
{
    member ranks[MOST_RANKS];
    for (int size = 1; size <= MOST_RANKS; size++) {
        run_ranks(size, plain_rounds, 0, false, ranks);
    }
    run_ranks(3, odd_numbers, 0, false, ranks);
    run_ranks(3, different_calls, 0, false, ranks);
    for (int r = 0; r < 3; r++) {
        CHECK(strstr(ranks[r].text, "number 2 of"));
        CHECK(strstr(ranks[r].text,
                     r < 2 ? "rank 2 is at all_reduce number 2 of 12 bytes (sum of fp32); all ranks"
                           : "ranks 0, 1 are at all_gather number 2 of 3 x 4 bytes; all ranks"));
    }
    for (int round = 0; round < 30; round++) {
        run_ranks(3, different_labels, 0, false, ranks);
        for (int r = 0; r < 3; r++) {
            char wanted[200];
            (void)snprintf(wanted, sizeof wanted,
                           "all_gather number 2 of 3 x 4 bytes (%s), rank %d of 3: %s at "
                           "all_gather number 2 of 3 x 4 bytes (%s); all ranks must",
                           r == 1 ? "b's chunk 7" : "a's chunk 6", r,
                           r == 1 ? "ranks 0, 2 are" : "rank 1 is",
                           r == 1 ? "a's chunk 6" : "b's chunk 7");
            CHECK(strstr(ranks[r].text, wanted) == ranks[r].text);
        }
    }
    run_ranks(3, different_nothings, 0, false, ranks);
    for (int r = 0; r < 3; r++) {
        CHECK(strstr(ranks[r].text, "all_gather number 8 of 3 x 4 bytes, rank"));
        CHECK(strstr(ranks[r].text, "what the ranks have issued before it (of 0 bytes) differs"));
    }
}

int main(void)
{
    alarm(300); /* a hang is a failure */
    check_arguments();
    check_first_failure();
    check_without_cuda();
    check_plain();
    check_records();
    check_late_streams();
    puts("test_comm: ok");
    return 0;
}
