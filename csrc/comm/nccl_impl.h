/* nccl_impl.h - the part of NCCL's interface that nccl.c uses, 2.18 and newer.
 *
 * NCCL's header is not needed to build: the few types and functions are declared here (ncclConfig_t in its first
 * form, of 2.14, which later versions read by the version that it names). */
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
