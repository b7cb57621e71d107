/* check.h - what the C unit tests share: a check that says where it failed, and random numbers. */
#pragma once

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                                  \
    do {                                                                                  \
        if (!(condition)) {                                                               \
            fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                                      \
        }                                                                                 \
    } while (0)

/* CHECK for a call that returns gm_status (base.h) and must succeed. */
#define CHECK_OK(call)                                                                             \
    do {                                                                                           \
        if ((call) != GM_OK) {                                                                     \
            fprintf(stderr, "%s:%d: %s failed: %s\n", __FILE__, __LINE__, #call, gm_last_error()); \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

/* splitmix64: the same numbers on every machine. */
static inline uint64_t next_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}
