/* words.c - see words.h: a memfd, which others open by way of /proc.
 *
 * Who opens a card may see another process under its number (a container's), so the file has to be one of these and to
 * show the card's secret, which stands behind the words. */
#define _GNU_SOURCE /* memfd_create, MADV_DONTFORK */
#include "comm/words.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/base.h"

static const char LINK[] = "/memfd:gemini-words"; /* what /proc says of the file */

static uint64_t *secret_of(const gm_words *words)
{
    return (uint64_t *)(void *)((char *)words->at + words->bytes) - 1;
}

static size_t whole_pages(size_t n)
{
    return gm_round_up(n * sizeof(uint32_t) + sizeof(uint64_t), (size_t)sysconf(_SC_PAGESIZE));
}

/* A child that is forked has no part in it: its copy of the driver's state is worth nothing. */
static bool map(int file, gm_words *words)
{
    void *mapped = mmap(NULL, words->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped == MAP_FAILED) {
        return false;
    }
    words->at = mapped;
    return madvise(mapped, words->bytes, MADV_DONTFORK) == 0;
}

bool gm_words_new(size_t n, gm_words *out)
{
    gm_words words = {.n = n, .bytes = whole_pages(n)};
    uint64_t secret;
    words.file = memfd_create(LINK + strlen("/memfd:"), MFD_CLOEXEC);
    bool is_there = words.file >= 0 && ftruncate(words.file, (off_t)words.bytes) == 0 &&
                    map(words.file, &words) &&
                    getrandom(&secret, sizeof secret, 0) == (ssize_t)sizeof secret;
    if (is_there) {
        memset(words.at, 0, words.bytes); /* its pages are there from here on */
        *secret_of(&words) = secret;
    } else {
        gm_words_close(&words);
    }
    *out = words;
    return is_there;
}

gm_words_card gm_words_card_of(const gm_words *words)
{
    gm_words_card card = {.process = (uint64_t)getpid(), .file = (uint64_t)words->file};
    card.secret = words->at ? *secret_of(words) : 0;
    return card;
}

bool gm_words_open(gm_words_card card, size_t n, gm_words *out)
{
    gm_words words = {.n = n, .bytes = whole_pages(n), .file = -1};
    char path[64], link[64] = "";
    struct stat about;
    (void)snprintf(path, sizeof path, "/proc/%llu/fd/%llu", (unsigned long long)card.process,
                   (unsigned long long)card.file);
    bool is_there =
        readlink(path, link, sizeof link - 1) > 0 && strncmp(link, LINK, strlen(LINK)) == 0;
    int file = is_there ? open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY) : -1;
    is_there = file >= 0 && fstat(file, &about) == 0 && about.st_size == (off_t)words.bytes &&
               map(file, &words) && *secret_of(&words) == card.secret;
    if (file >= 0) {
        (void)close(file);
    }
    if (!is_there) {
        gm_words_close(&words);
    }
    *out = words;
    return is_there;
}

void gm_words_close(gm_words *words)
{
    if (words->at) {
        (void)munmap(words->at, words->bytes);
    }
    if (words->file >= 0) {
        (void)close(words->file);
    }
    *words = GM_NO_WORDS;
}
