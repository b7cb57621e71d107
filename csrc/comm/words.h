/* words.h - words of 32 bits in host memory that processes of one host share: each rank has some, which others write and
 * a device may wait for.  Nothing of them is left when the last process ends. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct gm_words {
    uint32_t *at;    /* NULL: none */
    size_t n, bytes; /* words; whole pages */
    int file;        /* -1: somebody else's words */
} gm_words;

/* How another process finds them. */
typedef struct gm_words_card {
    uint64_t process, file, secret;
} gm_words_card;

static const gm_words GM_NO_WORDS = {.file = -1};

/* n words of 0.  False, and GM_NO_WORDS: the system refuses. */
bool gm_words_new(size_t n, gm_words *out);
gm_words_card gm_words_card_of(const gm_words *words);
/* The n words of the process that made the card.  False, and GM_NO_WORDS: this one cannot see them. */
bool gm_words_open(gm_words_card card, size_t n, gm_words *out);
/* The owner's words live on where others have them open. */
void gm_words_close(gm_words *words);
