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

/* No memory is an error, before other ranks are met. */
static void check_full_host(void)
{
    uint8_t id[GM_COMM_ID_BYTES];
    gm_comm *comm;
    int n_aborted = fake->n_aborted;
    CHECK_OK(gm_comm_nccl_id(NULL, id));
    fake->has_no_room = true;
    check_refused(gm_comm_nccl_new(NULL, 0, id, 0, 2, PATIENT, &comm), GM_ERR_NOMEM,
                  "cuMemHostAlloc");
    fake->has_no_room = false;
    CHECK(!comm && !fake->n_live && !fake->n_contexts && !fake->n_events && !fake->n_buffers);
    CHECK(fake->n_aborted == n_aborted);
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

    comm = meet(0, 2, PATIENT); /* and the one that waits for the end sees it */
    atomic_store(&fake->is_device_done, 0);
    CHECK_OK(gm_comm_all_gather(comm, at, 8, 0));
    atomic_store(&fake->driver_error, 700);
    gm_comm_free(comm);
    CHECK(fake->n_live == 0);
    atomic_store(&fake->driver_error, 0);
    part(NULL);
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

static void *gather_again(void *comm)
{
    (void)gm_comm_all_gather(comm, at, 100, 0);
    return NULL;
}

/* Work that does not end, and with it a call of the driver, which has the communicator's lock: the watching thread ends
 * both, and asks the driver for nothing. */
static void check_locked(void)
{
    int n_aborted = fake->n_aborted;
    gm_comm *comm = meet(0, 2, 0.5);
    pthread_t thread;
    atomic_store(&fake->is_device_done, 0);
    CHECK_OK(gm_comm_all_gather(comm, at, 100, 0));
    fake->is_full = true;
    CHECK(pthread_create(&thread, NULL, gather_again, comm) == 0);
    await_aborted(n_aborted);
    CHECK(pthread_join(thread, NULL) == 0 && fake->n_waiting == 0 && !fake->is_full);
    check_refused(gm_comm_check(comm), GM_ERR_DEVICE, "not done after 0.5 s");
    part(comm);
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
    check_full_host();
    check_calls();
    check_timeout();
    check_not_early();
    check_errors();
    check_issue();
    check_locked();
    puts("fake_comm: ok");
    return 0;
}
