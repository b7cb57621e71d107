/* frames.h - a stack for each thread, all in one array: what a thread has begun and not ended. */
#pragma once

#include "binding/common.h"

typedef struct gm_frames {
    size_t size; /* of one, which begins with its thread: an unsigned long */
    char *at;    /* in the order of their pushing */
    size_t n, capacity;
} gm_frames;

/* This thread's last frame, or NULL; valid until the next push or pop. */
void *gm_frames_top(const gm_frames *frames);
/* How many frames this thread has. */
size_t gm_frames_depth(const gm_frames *frames);
/* Room for one more push; -1 with an exception set. */
int gm_frames_reserve(gm_frames *frames);
void gm_frames_push(gm_frames *frames, const void *frame);
/* Takes this thread's last frame, which it has, into *out. */
void gm_frames_pop(gm_frames *frames, void *out);
