/* nccl_impl.h - what the files of an NCCL communicator share: it, and the part of NCCL's interface
 * that is used, 2.18 and newer.
 *
 * NCCL's header is not needed to build: the few types and functions are declared here (ncclConfig_t
 * in its first form, of 2.14, which later versions read by the version that it names). */
#pragma once

#include "comm/comm_impl.h"
#include "device/cuda/driver.h"

enum { NCCL_OLDEST = 21800, NCCL_TOO_NEW = 30000 };
enum { NCCL_SUCCESS = 0, NCCL_IN_PROGRESS = 7 };
enum { NCCL_U8 = 1, NCCL_U64 = 5, NCCL_F16 = 6, NCCL_F32 = 7, NCCL_BF16 = 9 };
enum { NCCL_SUM = 0, NCCL_MAX = 2 };

typedef int nccl_result;
typedef void *nccl_handle; /* ncclComm_t */
typedef struct nccl_id {
    char bytes[GM_COMM_ID_BYTES];
} nccl_id;

typedef struct nccl_config { /* of 2.14 */
    size_t size;
    unsigned magic, version;
    int blocking;
} nccl_config;

typedef struct nccl_api {
    int version;
    nccl_result (*get_version)(int *version);
    nccl_result (*get_unique_id)(nccl_id *id);
    nccl_result (*init_rank)(nccl_handle *out, int size, nccl_id id, int rank,
                             const nccl_config *config);
    nccl_result (*finalize)(nccl_handle comm);
    nccl_result (*destroy)(nccl_handle comm);
    nccl_result (*stop)(nccl_handle comm); /* ncclCommAbort */
    nccl_result (*async_error)(nccl_handle comm, nccl_result *error);
    const char *(*error_string)(nccl_result result);
    const char *(*last_error)(nccl_handle comm);
    nccl_result (*all_gather)(const void *src, void *dst, size_t src_count, int dtype,
                              nccl_handle comm, CUstream stream);
    nccl_result (*reduce_scatter)(const void *src, void *dst, size_t dst_count, int dtype, int op,
                                  nccl_handle comm, CUstream stream);
    nccl_result (*all_reduce)(const void *src, void *dst, size_t count, int dtype, int op,
                              nccl_handle comm, CUstream stream);
} nccl_api;

/* The functions, looked up at the first call; `path` as for gm_comm_nccl_id. */
gm_status gm_nccl(const char *path, const nccl_api **out);

/* ---- a communicator; the invariants of nccl.c ---- */

enum { N_FLIGHTS = 256 };
typedef struct flight {
    gm_comm_call call;
    uint32_t number; /* 1, 2, ...; may wrap */
} flight;

typedef struct nccl_comm {
    gm_comm base; /* first: a gm_comm * is an nccl_comm * */
    const nccl_api *nccl;
    const gm_cuda_api *cuda;
    CUdevice device;
    CUcontext context;
    double timeout;
    atomic_bool is_ending; /* a failure is recorded: whoever waits under a lock gives up */

    pthread_mutex_t handle_lock;
    nccl_handle handle;

    pthread_mutex_t lock;
    bool is_untracked;         /* work is issued that no flight is behind */
    flight flights[N_FLIGHTS]; /* ring: head, head + 1, ... head + n - 1 */
    size_t head, n;
    atomic_uint n_flights;  /* the newest one's number */
    _Atomic double busy_at; /* when one was issued last while none was under way */
    uint32_t *done; /* of the newest that is over; pinned host memory, which the device writes */
    CUevent newest; /* behind the newest flight */
    bool has_watcher;
    pthread_t watcher;
    pthread_mutex_t rest; /* the watcher's: of is_stopping alone */
    pthread_cond_t wake;
    bool is_stopping;
} nccl_comm;

typedef struct trouble {
    bool is_there, has_call;
    gm_comm_call call;
    char why[400];
} trouble;

gm_status gm_nccl_enter(nccl_comm *c);
void gm_nccl_leave(nccl_comm *c);
void gm_nccl_rest(long nanoseconds);
/* What NCCL says of a result. */
void gm_nccl_tell(nccl_comm *c, trouble *t, nccl_result result);

/* In these the lock of the handle is held and the context current.  Waits until NCCL has done on
 * the host what `result` says is in progress. */
void gm_nccl_finish(nccl_comm *c, nccl_result result, double seconds, const char *what, trouble *t);
nccl_result gm_nccl_call(nccl_comm *c, const gm_comm_call *call, CUstream stream);
void gm_nccl_stop(nccl_comm *c);
