/* fake_comm.c - comm/nccl.c against an NCCL and a driver that are played (fake_nccl.c): what it calls, when it gives
 * up, and that nothing is left.  Needs cuda.h to build and no GPU to run; tests/unit/test_played_nccl.py does both.
 *
 * Seconds stand only where a wait has to end by itself: nothing else here is over sooner or later than another thing. */
#define _GNU_SOURCE /* usleep */
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "comm/nccl_impl.h"
#include "fake_nccl.h"

static gm_fake *fake;
static void (*finish)(void); /* gm_fake_finish */
static char range[4096];
static const uintptr_t at = (uintptr_t)range;

static const double PATIENT = 3600; /* seconds: it never comes to that */

/* The watching thread, which looks several times a second, has given up one more communicator. */
static void await_aborted(int before)
{
    while (fake->n_aborted == before) {
        usleep(10000);
    }
    CHECK(fake->n_aborted == before + 1);
}

static void check_refused(gm_status status, gm_status wanted, const char *words)
{
    CHECK(status == wanted);
    if (!strstr(gm_last_error(), words)) {
        fprintf(stderr, "\"%s\" is not in \"%s\"\n", words, gm_last_error());
        exit(1);
    }
}

static gm_comm *meet(int rank, int size, double timeout)
{
    uint8_t id[GM_COMM_ID_BYTES];
    gm_comm *comm;
    CHECK_OK(gm_comm_nccl_id(NULL, id));
    CHECK_OK(gm_comm_nccl_new(NULL, 0, id, rank, size, timeout, &comm));
    return comm;
}

static void part(gm_comm *comm)
{
    gm_comm_free(comm);
    CHECK(fake->n_live == 0 && fake->n_events == 0 && fake->n_contexts == 0);
    CHECK(fake->n_buffers == 0);
}

static void check_arguments(void)
{
    uint8_t id[GM_COMM_ID_BYTES];
    gm_comm *comm;
    fake->version = 21700;
    check_refused(gm_comm_nccl_id(NULL, id), GM_ERR_UNSUPPORTED, "version code 21700");
    fake->version = 23203;
    CHECK_OK(gm_comm_nccl_id(NULL, id));
    check_refused(gm_comm_nccl_new(NULL, 0, id, 0, 2, 0, &comm), GM_ERR_ARG, "timeout is 0 s");
    check_refused(gm_comm_nccl_new(NULL, 0, id, 2, 2, 1, &comm), GM_ERR_ARG, "rank 2 of 2");
    atomic_store(&fake->polls, 1 << 30);
    check_refused(gm_comm_nccl_new(NULL, 0, id, 0, 2, 0.3, &comm), GM_ERR_DEVICE,
                  "new communicator, rank 0 of 2: meeting the other ranks took longer than 0.3 s");
    atomic_store(&fake->polls, 0);
    CHECK(!comm && fake->n_live == 0 && fake->n_contexts == 0 && fake->n_aborted == 1);
}

/* A full device: there is an error, or gathers are NCCL's, as one is where only the slots have no room. */
static void check_full_device(void)
{
    uint8_t id[GM_COMM_ID_BYTES];
    gm_comm *comm;
    CHECK_OK(gm_comm_nccl_id(NULL, id));
    for (int n = 1; n <= 5; n++) {
        int n_aborted = fake->n_aborted;
        fake->n_allocs = n;
        gm_status status = gm_comm_nccl_new(NULL, 0, id, 0, 2, PATIENT, &comm);
        CHECK(fake->n_allocs == 0 && (status == GM_OK) == (n == 2));
        if (status == GM_OK) {
            CHECK_OK(gm_comm_all_gather(comm, at, 100, 0));
            part(comm);
        } else {
            check_refused(status, GM_ERR_NOMEM, "cuMemAlloc");
            CHECK(fake->n_aborted == n_aborted + (n > 1)); /* others who meet are told */
        }
        CHECK(!fake->n_live && !fake->n_contexts && !fake->n_events && fake->n_buffers <= 1);
        fake->n_buffers = 0; /* what others might see stays */
    }
}

static void check_calls(void)
{
    int n_destroyed = fake->n_destroyed;
    fake->polls = 20;
    gm_comm *comm = meet(1, 3, PATIENT);
    CHECK_OK(gm_comm_all_gather(comm, at, 100, 0));
    CHECK(fake->src == range + 100 && fake->dst == range && fake->count == 100);
    CHECK(fake->dtype == 1);
    CHECK_OK(gm_comm_reduce_scatter(comm, at, 50, GM_COMM_BF16, 0));
    CHECK(fake->src == range && fake->dst == range + 100 && fake->count == 50);
    CHECK(fake->dtype == 9 && fake->op == 0);
    static const int dtypes[] = {7, 9, 6, 5};
    for (int d = GM_COMM_F32; d <= GM_COMM_U64; d++) {
        CHECK_OK(gm_comm_all_reduce(comm, at, 5, (gm_comm_dtype)d, GM_COMM_SUM, 0));
        CHECK(fake->src == range && fake->dst == range && fake->count == 5);
        CHECK(fake->dtype == dtypes[d] && fake->op == 0);
    }
    CHECK_OK(gm_comm_all_reduce(comm, at, 5, GM_COMM_U64, GM_COMM_MAX, 0));
    CHECK(fake->op == 2);
    atomic_store(&fake->is_device_done, 0); /* many are under way */
    for (int i = 0; i < 1000; i++) {
        CHECK_OK(gm_comm_all_gather(comm, at, 100, 0));
    }
    CHECK(fake->n_events == 1);
    CHECK_OK(gm_comm_check(comm));
    CHECK(!gm_comm_is_over(comm));
    finish();
    CHECK(gm_comm_is_over(comm));
    CHECK_OK(gm_comm_check(comm));
    int n_aborted = fake->n_aborted;
    part(comm);
    CHECK(fake->n_destroyed == n_destroyed + 1 && fake->n_aborted == n_aborted);
}

/* The watching thread alone ends a collective that does not. */
static void check_timeout(void)
{
    int n_aborted = fake->n_aborted;
    gm_comm *comm = meet(0, 2, 1);
    atomic_store(&fake->is_device_done, 0);
    CHECK_OK(gm_comm_all_gather(comm, at, 100, 0));
    await_aborted(n_aborted);
    const char *words = "all_gather number 1 of 2 x 100 bytes, rank 0 of 2: not done after 1 s";
    check_refused(gm_comm_check(comm), GM_ERR_DEVICE, words);
    check_refused(gm_comm_all_gather(comm, at, 5, 0), GM_ERR_DEVICE, words);
    CHECK(gm_comm_is_over(comm)); /* nothing to wait for */
    part(comm);

    comm = meet(0, 2, 0.5); /* an end with work that never ends is bounded, too */
    atomic_store(&fake->is_device_done, 0);
    CHECK_OK(gm_comm_all_gather(comm, at, 100, 0));
    part(comm);
    CHECK(fake->n_aborted == n_aborted + 2);
}

/* Time runs from when a collective was issued, and not from when the thread looked last. */
static void check_not_early(void)
{
    for (unsigned i = 0; i < 10; i++) {
        int n_aborted = fake->n_aborted;
        gm_comm *comm = meet(0, 2, 0.2);
        atomic_store(&fake->is_device_done, 0);
        usleep(150000 + 10000 * i);
        double began = gm_seconds();
        CHECK_OK(gm_comm_all_gather(comm, at, 100, 0));
        await_aborted(n_aborted);
        CHECK(gm_seconds() - began > 0.2);
        part(comm);
    }
}

static void check_errors(void)
{
    gm_comm *comm = meet(0, 2, PATIENT);
    atomic_store(&fake->async_error, 6);
    check_refused(gm_comm_check(comm), GM_ERR_DEVICE, "remote process exited: the details");
    atomic_store(&fake->async_error, 0);
    part(comm);

    comm = meet(0, 2, PATIENT);
    fake->call_result = 4;
    check_refused(gm_comm_all_gather(comm, at, 5, 0), GM_ERR_DEVICE,
                  "all_gather number 1 of 2 x 5 bytes, rank 0 of 2: NCCL: invalid argument");
    fake->call_result = 0;
    part(comm);

    comm = meet(0, 2, PATIENT);
    atomic_store(&fake->is_device_done, 0);
    CHECK_OK(gm_comm_all_gather(comm, at, 8, 0));
    atomic_store(&fake->driver_error, 700);
    check_refused(gm_comm_check(comm), GM_ERR_DEVICE, "cuEventQuery: CUDA_ERROR_ILLEGAL_ADDRESS");
    atomic_store(&fake->driver_error, 0);
    part(comm);

    for (int i = 0; i < 2; i++) { /* and whoever waits here sees it: for a slot, for the end */
        comm = meet(0, 2, PATIENT);
        atomic_store(&fake->is_device_done, 0);
        for (int k = 0; k < 16; k++) {
            CHECK_OK(gm_comm_agree(comm, 0));
        }
        atomic_store(&fake->driver_error, 700);
        if (i == 0) {
            check_refused(gm_comm_agree(comm, 0), GM_ERR_DEVICE, "CUDA_ERROR_ILLEGAL_ADDRESS");
        }
        gm_comm_free(comm);
        CHECK(fake->n_live == 0);
        fake->n_buffers = 0;
        atomic_store(&fake->driver_error, 0);
    }
}

static void *abort_later(void *comm)
{
    usleep(200000);
    gm_comm_abort(comm, "the user has had enough");
    return NULL;
}

/* NCCL meets other ranks while a collective is issued: that has an end, and can be ended. */
static void check_issue(void)
{
    gm_comm *comm = meet(0, 2, 0.5);
    fake->call_result = 7;
    atomic_store(&fake->polls, 1 << 30);
    check_refused(gm_comm_all_gather(comm, at, 5, 0), GM_ERR_DEVICE,
                  "issuing it took longer than 0.5 s");
    atomic_store(&fake->polls, 0);
    part(comm);

    comm = meet(0, 2, PATIENT);
    atomic_store(&fake->polls, 1 << 30);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, abort_later, comm) == 0);
    check_refused(gm_comm_all_gather(comm, at, 5, 0), GM_ERR_STATE, "had enough");
    CHECK(pthread_join(thread, NULL) == 0);
    atomic_store(&fake->polls, 0);
    fake->call_result = 0;
    part(comm);
}

static void name_label(void *context, uint64_t label, char *out, size_t bytes)
{
    (void)snprintf(out, bytes, "%s of chunk %d", (const char *)context, (int)label);
}

/* Issues some and an agreement; what another rank sends is what this one sent, but for `change`. */
static gm_comm *agree_with_other(int change, bool is_late)
{
    static char words[] = "gather";
    gm_comm *comm = meet(0, 2, PATIENT);
    gm_comm_set_namer(comm, name_label, words, NULL);
    for (uint64_t i = 1; i <= 3; i++) {
        gm_comm_label(comm, i);
        CHECK_OK(gm_comm_all_gather(comm, at, 100, 0));
    }
    CHECK_OK(gm_comm_agree(comm, 0)); /* alone: to know what it sends */
    CHECK_OK(gm_comm_check(comm));
    CHECK(fake->words[0] == ~fake->words[1] && fake->words[2] == 4 && fake->words[3] == ~4ull);
    fake->other[0] = fake->words[0];
    fake->other[2] = fake->words[2];
    gm_comm_free(comm);

    comm = meet(0, 2, PATIENT);
    gm_comm_set_namer(comm, name_label, words, NULL);
    for (uint64_t i = 1; i <= 3; i++) {
        gm_comm_label(comm, change == 1 && i == 2 ? 9 : i);
        CHECK_OK(gm_comm_all_gather(comm, at, change == 2 && i == 2 ? 99 : 100, 0));
    }
    if (change == 3) {
        CHECK_OK(gm_comm_all_gather(comm, at, 0, 0)); /* nothing to send, and counted */
    }
    fake->other[1] = ~fake->other[0];
    fake->other[3] = ~fake->other[2];
    atomic_store(&fake->has_other, true);
    atomic_store(&fake->is_device_done, !is_late);
    CHECK_OK(gm_comm_agree(comm, 0));
    atomic_store(&fake->has_other, false);
    return comm;
}

static void check_agreement(void)
{
    gm_comm *comm = agree_with_other(0, false);
    CHECK_OK(gm_comm_check(comm));
    CHECK_OK(gm_comm_all_gather(comm, at, 8, 0));
    CHECK(gm_comm_count(comm) == 5 && gm_comm_failed_at(comm) == 0);
    part(comm);
    for (int change = 1; change <= 3; change++) {
        int n_aborted = fake->n_aborted;
        comm = agree_with_other(change, false);
        check_refused(gm_comm_check(comm), GM_ERR_STATE,
                      change == 3 ? "agreement number 5 (gather of chunk 3), rank 0"
                                  : "agreement number 4 (gather of chunk 3), rank 0");
        check_refused(gm_comm_check(comm), GM_ERR_STATE,
                      change == 3 ? "after number 0: 5 here, 4 to 5"
                                  : "after number 0: 4 here, 4 to 4");
        CHECK(fake->n_aborted == n_aborted + 1);
        CHECK(gm_comm_failed_at(comm) == (change == 3 ? 5 : 4));
        check_refused(gm_comm_agree(comm, 0), GM_ERR_STATE, "the same collectives");
        part(comm);
    }
    /* The next collective finds it, and is not issued. */
    comm = agree_with_other(1, false);
    gm_status status = gm_comm_all_gather(comm, at, 8, 0);
    check_refused(status, GM_ERR_STATE, "the same collectives");
    CHECK(fake->count != 8);
    part(comm);
    /* The watching thread finds it, once the device has come that far. */
    int n_aborted = fake->n_aborted;
    comm = agree_with_other(2, true);
    usleep(300000);
    CHECK_OK(gm_comm_check(comm));
    finish();
    await_aborted(n_aborted);
    check_refused(gm_comm_check(comm), GM_ERR_STATE, "agreement number 4");
    part(comm);
}

static void *finish_later(void *unused)
{
    (void)unused;
    usleep(300000);
    finish();
    return NULL;
}

/* Sixteen may be under way without a wait, the next waits for the oldest, with an end. */
static void check_many_agreements(void)
{
    gm_comm *comm = meet(1, 2, PATIENT);
    atomic_store(&fake->is_device_done, 0); /* whoever waits for the device waits for good */
    int n_buffers = fake->n_buffers;
    for (int i = 0; i < 16; i++) {
        CHECK_OK(gm_comm_agree(comm, 0));
    }
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, finish_later, NULL) == 0);
    CHECK_OK(gm_comm_agree(comm, 0));
    CHECK(fake->is_device_done && fake->n_buffers == n_buffers);
    CHECK(pthread_join(thread, NULL) == 0);
    for (int i = 0; i < 100; i++) {
        CHECK_OK(gm_comm_agree(comm, 0));
    }
    CHECK_OK(gm_comm_check(comm));
    part(comm);

    comm = meet(1, 2, 0.5);
    atomic_store(&fake->is_device_done, 0);
    gm_status status = GM_OK;
    for (int i = 0; i < 17 && status == GM_OK; i++) {
        status = gm_comm_agree(comm, 0);
    }
    check_refused(status, GM_ERR_DEVICE, "agreement number 1, rank 1 of 2: not done after 0.5 s");
    part(comm);
}

/* ---- gathers by copies: each rank is a thread ---- */

enum { N_RANKS = GM_FAKE_RANKS, N_GATHERS = 8, MOST_BYTES = (33 << 20) + 7 };

static pthread_barrier_t meeting;
static gm_peers_card cards[N_RANKS];
static gm_peers *all_peers[N_RANKS];
static bool does_last_stay_away;

/* What byte `at` of a rank's shard is: constant in a stretch, and stretches end where no slot does. */
enum { STRETCH = 5 << 20 };

/* comm: NULL for a gather by peers alone. */
static void check_gather(gm_comm *comm, int rank, int number, size_t bytes, unsigned char *data)
{
    for (int is_over = 0; is_over < 2; is_over++) {
        for (int r = is_over ? 0 : rank; r < (is_over ? N_RANKS : rank + 1); r++) {
            for (size_t i = 0; i < bytes; i += STRETCH) {
                unsigned char *at = data + (size_t)r * bytes + i;
                size_t n = bytes - i < STRETCH ? bytes - i : STRETCH;
                unsigned char value = (unsigned char)(31 * r + 7 * number + (int)(i / STRETCH));
                if (!is_over) {
                    memset(at, value, n);
                }
                CHECK(*at == value && memcmp(at, at + 1, n - 1) == 0);
            }
        }
        if (!is_over) {
            CHECK_OK(comm ? gm_comm_all_gather(comm, (uintptr_t)data, bytes, 0)
                          : gm_peers_gather(all_peers[rank], (uintptr_t)data, bytes, NULL));
        }
    }
}

static void *be_rank(void *argument)
{
    static const size_t sizes[] = {1, MOST_BYTES, 4099, 512, 1, 32 << 20, MOST_BYTES, 9};
    int rank = (int)(intptr_t)argument;
    const gm_cuda_api *cuda;
    CUcontext context;
    CHECK_OK(gm_cuda(&cuda));
    CHECK(cuda->cuCtxPushCurrent((CUcontext)fake) == CUDA_SUCCESS);
    CHECK_OK(gm_peers_new(cuda, rank, N_RANKS, &all_peers[rank]));
    cards[rank] = gm_peers_card_of(all_peers[rank]);
    pthread_barrier_wait(&meeting);
    CHECK(gm_peers_open(all_peers[rank], cards));
    pthread_barrier_wait(&meeting);
    unsigned char *data = malloc((size_t)N_RANKS * MOST_BYTES);
    CHECK(data);
    for (int i = 0; i < N_GATHERS; i++) {
        check_gather(NULL, rank, i, sizes[i], data);
    }
    pthread_barrier_wait(&meeting); /* who waits from here on waits in the next gather */
    if (does_last_stay_away &&
        rank == N_RANKS - 1) { /* it lets the others go on, and then comes to one of two */
        while (fake->n_waiting < N_RANKS - 1) {
            usleep(10000);
        }
        for (int r = 0; r < N_RANKS; r++) {
            gm_peers_release(all_peers[r]);
        }
        CHECK(gm_peers_lost(all_peers[rank]) == 0 && gm_peers_lost(all_peers[0]) == 1);
    }
    for (int i = 0; does_last_stay_away && i < (rank == N_RANKS - 1 ? 1 : 2); i++) {
        CHECK_OK(gm_peers_gather(all_peers[rank], (uintptr_t)data, 77, NULL));
        usleep(200000);
    }
    free(data);
    pthread_barrier_wait(&meeting); /* memory that others look at has to live */
    gm_peers_close(all_peers[rank]);
    pthread_barrier_wait(&meeting);
    gm_peers_free(all_peers[rank], false);
    CHECK(cuda->cuCtxPopCurrent(&context) == CUDA_SUCCESS);
    return NULL;
}

static void check_peers(bool stays_away)
{
    pthread_t threads[N_RANKS];
    does_last_stay_away = stays_away;
    CHECK(pthread_barrier_init(&meeting, NULL, N_RANKS) == 0);
    for (int r = 0; r < N_RANKS; r++) {
        CHECK(pthread_create(&threads[r], NULL, be_rank, (void *)(intptr_t)r) == 0);
    }
    for (int r = 0; r < N_RANKS; r++) {
        CHECK(pthread_join(threads[r], NULL) == 0);
    }
    CHECK(pthread_barrier_destroy(&meeting) == 0);
    CHECK(fake->n_opened == 0 && fake->n_buffers == 0 && fake->n_events == 0);
}

/* The same by communicators that meet: n_nccl gathers of each are NCCL's. */
static void *be_member(void *argument)
{
    static const size_t sizes[] = {1, MOST_BYTES, 4099, 16};
    int rank = (int)(intptr_t)argument;
    gm_comm *comm = meet(rank, N_RANKS, PATIENT);
    unsigned char *data = malloc((size_t)N_RANKS * MOST_BYTES);
    uint64_t *words = (uint64_t *)(void *)data;
    CHECK(data);
    for (int i = 0; i < 4; i++) {
        check_gather(comm, rank, i, sizes[i], data);
        words[0] = (uint64_t)(rank + i);
        CHECK_OK(gm_comm_all_reduce(comm, (uintptr_t)words, 1, GM_COMM_U64, GM_COMM_MAX, 0));
        CHECK(words[0] == (uint64_t)(N_RANKS - 1 + i));
        CHECK_OK(gm_comm_agree(comm, 0));
    }
    CHECK_OK(gm_comm_check(comm));
    gm_comm_free(comm);
    free(data);
    return NULL;
}

static int n_aborted_before;

static void start_ranks(pthread_t *threads, gm_fake_ranks *ranks, unsigned n_meeting,
                        void *(*body)(void *))
{
    n_aborted_before = fake->n_aborted;
    CHECK(pthread_barrier_init(&ranks->meeting, NULL, N_RANKS) == 0);
    CHECK(pthread_barrier_init(&meeting, NULL, n_meeting) == 0);
    fake->ranks = ranks;
    for (int r = 0; r < N_RANKS; r++) {
        CHECK(pthread_create(&threads[r], NULL, body, (void *)(intptr_t)r) == 0);
    }
}

static void end_ranks(pthread_t *threads, gm_fake_ranks *ranks, int n_kept)
{
    for (int r = 0; r < N_RANKS; r++) {
        CHECK(pthread_join(threads[r], NULL) == 0);
    }
    fake->ranks = NULL;
    CHECK(pthread_barrier_destroy(&ranks->meeting) == 0);
    CHECK(pthread_barrier_destroy(&meeting) == 0);
    CHECK(fake->n_live == 0 && fake->n_opened == 0 && fake->n_buffers == n_kept);
}

static atomic_int n_issued;

/* The device has not come to any gather: the host waits before the driver's queue is full. */
static void *be_ahead(void *argument)
{
    int rank = (int)(intptr_t)argument;
    char bytes[N_RANKS];
    gm_comm *comm = meet(rank, N_RANKS, PATIENT);
    pthread_barrier_wait(&meeting);
    pthread_barrier_wait(&meeting);
    for (int i = 0; i < 100; i++) {
        CHECK_OK(gm_comm_all_gather(comm, (uintptr_t)bytes, 1, 0));
        n_issued++;
    }
    gm_comm_free(comm);
    return NULL;
}

static void check_ahead(void)
{
    pthread_t threads[N_RANKS];
    gm_fake_ranks ranks;
    start_ranks(threads, &ranks, N_RANKS + 1, be_ahead);
    pthread_barrier_wait(&meeting);
    atomic_store(&fake->is_device_done, 0);
    pthread_barrier_wait(&meeting);
    while (n_issued < N_RANKS * 48) {
        usleep(10000);
    }
    usleep(100000);
    CHECK(n_issued == N_RANKS * 48);
    finish();
    end_ranks(threads, &ranks, 0);
    CHECK(n_issued == N_RANKS * 100);
}

static void check_members(int n_nccl)
{
    pthread_t threads[N_RANKS];
    gm_fake_ranks ranks;
    int n_aborted = fake->n_aborted;
    fake->n_gathers = 0;
    CHECK(pthread_barrier_init(&ranks.meeting, NULL, N_RANKS) == 0);
    fake->ranks = &ranks;
    for (int r = 0; r < N_RANKS; r++) {
        CHECK(pthread_create(&threads[r], NULL, be_member, (void *)(intptr_t)r) == 0);
    }
    for (int r = 0; r < N_RANKS; r++) {
        CHECK(pthread_join(threads[r], NULL) == 0);
    }
    fake->ranks = NULL;
    CHECK(pthread_barrier_destroy(&ranks.meeting) == 0);
    CHECK(fake->n_gathers == N_RANKS * (1 + n_nccl)); /* one of cards */
    CHECK(fake->n_opened == 0 && fake->n_buffers == 0 && fake->n_events == 0);
    CHECK(fake->n_live == 0 && fake->n_contexts == 0 && fake->n_aborted == n_aborted);
}

static void check_all_members(void)
{
    check_members(0);
    fake->n_openings = 4; /* one of six is refused */
    check_members(4);
    fake->n_openings = 0;
    fake->drops_copies = true;
    check_members(4);
    fake->drops_copies = false;
}

/* Nobody comes to the gather of rank 0, who waits in the driver with the communicator's lock: whoever ends that needs
 * neither.  The others see that it has given up.  What another rank might read stays. */
static gm_comm *left;

static void *be_left(void *argument)
{
    int rank = (int)(intptr_t)argument;
    char bytes[N_RANKS];
    gm_comm *comm = meet(rank, N_RANKS, PATIENT);
    if (rank == 0) {
        left = comm;
    }
    pthread_barrier_wait(&meeting);
    gm_status status = rank == 0 ? gm_comm_all_gather(comm, (uintptr_t)bytes, 1, 0) : GM_OK;
    pthread_barrier_wait(&meeting);
    if (rank == 0) {
        status = status == GM_OK ? gm_comm_check(comm) : status;
        check_refused(status, GM_ERR_STATE, "had enough");
    } else if (rank == 1) {
        check_refused(gm_comm_all_gather(comm, (uintptr_t)bytes, 1, 0), GM_ERR_DEVICE,
                      "rank 0 has given up");
    } else { /* the watching thread sees it, too */
        while (fake->n_aborted < n_aborted_before + N_RANKS) {
            usleep(10000);
        }
        check_refused(gm_comm_check(comm), GM_ERR_DEVICE, "rank 0 has given up");
    }
    gm_comm_free(comm);
    return NULL;
}

/* One that ends behind the last gather of all leaves the others in peace. */
static void *be_done(void *argument)
{
    int rank = (int)(intptr_t)argument;
    char bytes[N_RANKS];
    gm_comm *comm = meet(rank, N_RANKS, PATIENT);
    for (int i = 0; i < 3; i++) {
        CHECK_OK(gm_comm_all_gather(comm, (uintptr_t)bytes, 1, 0));
    }
    pthread_barrier_wait(&meeting);
    if (rank == 0) {
        gm_comm_abort(comm, "its process ends");
    } else {
        usleep(300000); /* the watching thread has looked */
        CHECK_OK(gm_comm_check(comm));
    }
    pthread_barrier_wait(&meeting);
    gm_comm_abort(comm, "and so do these");
    gm_comm_free(comm);
    return NULL;
}

static void check_left(void)
{
    pthread_t threads[N_RANKS];
    gm_fake_ranks ranks;
    start_ranks(threads, &ranks, N_RANKS, be_done);
    end_ranks(threads, &ranks, N_RANKS);
    start_ranks(threads, &ranks, N_RANKS + 1, be_left);
    pthread_barrier_wait(&meeting);
    while (fake->n_waiting == 0) {
        usleep(10000);
    }
    fake->kept_out = (unsigned long)pthread_self();
    gm_comm_abort(left, "the user has had enough");
    fake->kept_out = 0;
    pthread_barrier_wait(&meeting);
    end_ranks(threads, &ranks, 2 * N_RANKS);
}

/* Work that does not end, and with it a call of the driver, which has the communicator's lock: the watching thread ends
 * both, and asks the driver for nothing. */
static void *be_locked(void *argument)
{
    int rank = (int)(intptr_t)argument;
    char bytes[N_RANKS];
    gm_comm *comm = meet(rank, N_RANKS, PATIENT);
    nccl_comm *c = (nccl_comm *)comm;
    pthread_mutex_lock(&c->rest); /* the watching thread does not look */
    c->timeout = 0.5;
    pthread_mutex_unlock(&c->rest);
    pthread_barrier_wait(&meeting);
    pthread_barrier_wait(&meeting);
    CHECK_OK(gm_comm_all_gather(comm, (uintptr_t)bytes, 1, 0));
    if (rank == 0) {
        (void)gm_comm_all_gather(comm, (uintptr_t)bytes, 1, 0);
    }
    pthread_barrier_wait(&meeting);
    pthread_barrier_wait(&meeting);
    check_refused(gm_comm_check(comm), GM_ERR_DEVICE, rank == 0 ? "not done after 0.5 s" : "");
    gm_comm_free(comm);
    return NULL;
}

static void check_locked(void)
{
    pthread_t threads[N_RANKS];
    gm_fake_ranks ranks;
    start_ranks(threads, &ranks, N_RANKS + 1, be_locked);
    pthread_barrier_wait(&meeting);
    atomic_store(&fake->is_device_done, 0);
    fake->is_locked = true;
    pthread_barrier_wait(&meeting);
    pthread_barrier_wait(&meeting);
    while (fake->n_aborted < n_aborted_before + N_RANKS) {
        usleep(10000);
    }
    fake->is_locked = false;
    finish();
    pthread_barrier_wait(&meeting);
    end_ranks(threads, &ranks, 3 * N_RANKS);
}

/* A rank elsewhere, or one that has nothing to show: nobody copies. */
static void check_strangers(void)
{
    const gm_cuda_api *cuda;
    gm_peers *peers;
    CUcontext context;
    CHECK_OK(gm_cuda(&cuda));
    CHECK(cuda->cuCtxPushCurrent((CUcontext)fake) == CUDA_SUCCESS);
    for (int change = 0; change < 3; change++) {
        CHECK(change < 2 || setenv("NCCL_P2P_DISABLE", "1", 1) == 0);
        CHECK_OK(gm_peers_new(cuda, 1, 2, &peers));
        cards[0] = cards[1] = gm_peers_card_of(peers);
        cards[0].host += change == 0;
        cards[0].is_there = change == 1 ? 0 : cards[0].is_there;
        CHECK(!gm_peers_open(peers, cards));
        gm_peers_close(peers);
        gm_peers_free(peers, false);
        CHECK(fake->n_opened == 0 && fake->n_buffers == 0 && fake->n_events == 0);
    }
    CHECK(unsetenv("NCCL_P2P_DISABLE") == 0);
    CHECK(cuda->cuCtxPopCurrent(&context) == CUDA_SUCCESS);
}

int main(void)
{
    alarm(240); /* a hang is a failure */
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    CHECK(library);
    fake = dlsym(library, "gm_fake_state");
    CHECK(fake); /* and no real NCCL */
    void *found = dlsym(library, "gm_fake_finish");
    memcpy(&finish, &found, sizeof finish);
    check_arguments();
    check_full_device();
    check_calls();
    check_timeout();
    check_not_early();
    check_errors();
    check_issue();
    check_agreement();
    check_many_agreements();
    check_peers(false);
#ifndef __SANITIZE_THREAD__ /* what ranks read that were let go on is written meanwhile */
    check_peers(true);
#endif
    check_strangers();
    check_all_members();
    check_ahead();
    check_left();
    check_locked();
    puts("fake_comm: ok");
    return 0;
}
