/* outer.h - the saved-tensor hooks that were on top when a net pushed its own: each thread has its frames, as it
 * has its stack of hooks in torch. */
#ifndef GM_PY_OUTER_H
#define GM_PY_OUTER_H

#include "binding/common.h"

typedef struct gm_py_outer {
    unsigned long thread;
    PyObject *pack, *unpack; /* the user's hooks below ours; NULL: none */
    /* They are to see no weights: torch's checkpointing would keep them. */
    bool is_blind;
} gm_py_outer;

typedef struct gm_py_outers {
    gm_py_outer *frames; /* of all threads, in the order of their pushing */
    size_t n, capacity;
} gm_py_outers;

/* This thread's last frame, or NULL; valid until the next push or pop. */
gm_py_outer *gm_py_outers_top(const gm_py_outers *outers);
/* How many frames this thread has. */
size_t gm_py_outers_depth(const gm_py_outers *outers);
/* Room for one more push; -1 with an exception set. */
int gm_py_outers_reserve(gm_py_outers *outers);
/* Takes over the references of `frame`. */
void gm_py_outers_push(gm_py_outers *outers, gm_py_outer frame);
/* This thread has a frame; its references are the caller's. */
gm_py_outer gm_py_outers_pop(gm_py_outers *outers);
void gm_py_outer_release(const gm_py_outer *frame);
int gm_py_outers_traverse(const gm_py_outers *outers, visitproc visit, void *arg);
void gm_py_outers_free(gm_py_outers *outers);

#endif
