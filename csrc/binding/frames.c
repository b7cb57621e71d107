/* frames.c - see frames.h. */
#include "binding/frames.h"

#include <string.h>

static bool is_mine(const void *frame)
{
    return *(const unsigned long *)frame == PyThread_get_thread_ident();
}

void *gm_frames_top(const gm_frames *frames)
{
    size_t n = frames->n;
    while (n && !is_mine(frames->at + (n - 1) * frames->size)) {
        n--;
    }
    return n ? frames->at + (n - 1) * frames->size : NULL;
}

size_t gm_frames_depth(const gm_frames *frames)
{
    size_t depth = 0;
    for (size_t i = 0; i < frames->n; i++) {
        depth += is_mine(frames->at + i * frames->size);
    }
    return depth;
}

int gm_frames_reserve(gm_frames *frames)
{
    if (gm_grow(&frames->at, frames->n, &frames->capacity, frames->size, "%zu frames") != GM_OK) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

void gm_frames_push(gm_frames *frames, const void *frame)
{
    memcpy(frames->at + frames->n++ * frames->size, frame, frames->size);
}

void gm_frames_pop(gm_frames *frames, void *out)
{
    char *top = gm_frames_top(frames), *end = frames->at + frames->n-- * frames->size;
    memcpy(out, top, frames->size);
    memmove(top, top + frames->size, (size_t)(end - top) - frames->size);
}
