/* test_words.c - words that processes share: who sees them, who is refused, and that nothing is left. */
#define _GNU_SOURCE
#include <dirent.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "comm/words.h"

enum { N = 5000 }; /* not a page */

static int n_open_files(void)
{
    int n = 0;
    DIR *folder = opendir("/proc/self/fd");
    CHECK(folder);
    while (readdir(folder)) {
        n++;
    }
    CHECK(closedir(folder) == 0);
    return n;
}

static void check_refused(gm_words_card card, size_t n)
{
    gm_words words;
    int before = n_open_files();
    CHECK(!gm_words_open(card, n, &words));
    CHECK(!words.at && words.n == 0 && words.file == -1 && n_open_files() == before);
}

/* Another process writes words of this one's, and waits for one that this one writes. */
static void check_two_processes(gm_words *words)
{
    gm_words_card card = gm_words_card_of(words);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        gm_words theirs;
        alarm(240);
        CHECK(gm_words_open(card, N, &theirs) && theirs.n == N && theirs.file == -1);
        for (uint32_t i = 0; i + 1 < N; i++) {
            __atomic_store_n(&theirs.at[i], i + 1, __ATOMIC_RELEASE);
        }
        while (__atomic_load_n(&theirs.at[N - 1], __ATOMIC_ACQUIRE) != 77) {
            usleep(1000);
        }
        gm_words_close(&theirs);
        _exit(0);
    }
    for (uint32_t i = 0; i + 1 < N; i++) {
        while (__atomic_load_n(&words->at[i], __ATOMIC_ACQUIRE) != i + 1) {
            usleep(1000);
        }
    }
    __atomic_store_n(&words->at[N - 1], 77, __ATOMIC_RELEASE);
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void check_strangers(const gm_words *words)
{
    gm_words_card right = gm_words_card_of(words), card = right;
    check_refused(right, N + 4096); /* made for other ranks */
    card.secret++;
    check_refused(card, N); /* of another process with this one's number */
    card = right;
    card.process = 1u << 30;
    check_refused(card, N); /* nobody has it */
    card = right;
    card.file = 0;
    check_refused(card, N); /* no file of words */
    int other = memfd_create("gemini-words", MFD_CLOEXEC);
    CHECK(other >= 0 && ftruncate(other, 100) == 0);
    card.file = (uint64_t)other;
    check_refused(card, N); /* a shorter one */
    CHECK(close(other) == 0);
    check_refused(card, N);
}

int main(void)
{
    alarm(240); /* a hang is a failure */
    int before = n_open_files();
    gm_words words, again;
    CHECK(gm_words_new(N, &words) && words.n == N);
    for (uint32_t i = 0; i < N; i++) {
        CHECK(words.at[i] == 0);
    }
    CHECK(gm_words_new(N, &again)); /* no two have one secret */
    CHECK(gm_words_card_of(&again).secret != gm_words_card_of(&words).secret);
    gm_words_close(&again);
    check_strangers(&words);
    check_two_processes(&words);
    gm_words_card card = gm_words_card_of(&words);
    CHECK(gm_words_open(card, N, &again));
    gm_words_close(&words); /* they live on where they are open */
    CHECK(again.at[0] == 1 && again.at[N - 1] == 77);
    check_refused(card, N);
    gm_words_close(&again);
    gm_words_close(&again);
    CHECK(n_open_files() == before);
    puts("words: ok");
    return 0;
}
