/* absent.c - see absent.h.  A few pages of a memfd, mapped again and again. */
#define _GNU_SOURCE /* memfd_create */
#include "torch/absent.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PIECE_BYTES = 8 << 20 }; /* a process may have some 65,000 mappings */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uintptr_t range;
static size_t range_bytes;

static gm_status fill(int fd)
{
    void *piece = MAP_FAILED;
    if (ftruncate(fd, PIECE_BYTES) == 0) {
        piece = mmap(NULL, PIECE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    }
    GM_FAIL_IF(piece == MAP_FAILED, GM_ERR_NOMEM, "HOST: %d bytes that show NaN: %s",
               (int)PIECE_BYTES, strerror(errno));
    memset(piece, 0xff, PIECE_BYTES);
    (void)munmap(piece, PIECE_BYTES);
    return GM_OK;
}

static gm_status map(int fd, size_t bytes)
{
    char *base = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    bool is_ok = base != MAP_FAILED;
    for (size_t at = 0; is_ok && at < bytes; at += PIECE_BYTES) {
        is_ok =
            mmap(base + at, PIECE_BYTES, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0) != MAP_FAILED;
    }
    if (!is_ok) {
        gm_status status = GM_FAIL(GM_ERR_NOMEM, "HOST: %zu bytes of addresses that show NaN: %s",
                                   bytes, strerror(errno));
        if (base != MAP_FAILED) {
            (void)munmap(base, bytes);
        }
        return status;
    }
    range = (uintptr_t)base;
    range_bytes = bytes;
    return GM_OK;
}

static gm_status grow(size_t bytes)
{
    int fd = memfd_create("gemini-absent", MFD_CLOEXEC);
    GM_FAIL_IF(fd < 0, GM_ERR_NOMEM, "HOST: memfd_create: %s", strerror(errno));
    gm_status status = fill(fd);
    if (status == GM_OK) {
        status = map(fd, (bytes / PIECE_BYTES + 1) * PIECE_BYTES);
    }
    (void)close(fd);
    return status;
}

gm_status gm_absent_range(size_t bytes, uintptr_t *out)
{
    pthread_mutex_lock(&lock);
    gm_status status = bytes < range_bytes ? GM_OK : grow(bytes);
    *out = range;
    pthread_mutex_unlock(&lock);
    return status;
}
