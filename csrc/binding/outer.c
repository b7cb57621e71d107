/* outer.c - see outer.h. */
#include "binding/outer.h"

#include <stdlib.h>
#include <string.h>

#include "binding/running.h"

gm_py_outer *gm_py_outers_top(const gm_py_outers *outers)
{
    unsigned long thread = PyThread_get_thread_ident();
    size_t n = outers->n;
    while (n && outers->frames[n - 1].thread != thread) {
        n--;
    }
    return n ? &outers->frames[n - 1] : NULL;
}

size_t gm_py_outers_depth(const gm_py_outers *outers)
{
    unsigned long thread = PyThread_get_thread_ident();
    size_t depth = 0;
    for (size_t i = 0; i < outers->n; i++) {
        depth += outers->frames[i].thread == thread;
    }
    return depth;
}

int gm_py_outers_reserve(gm_py_outers *outers)
{
    gm_py_outer *grown =
        gm_with_room(outers->frames, outers->n, &outers->capacity, sizeof *outers->frames);
    if (!grown) {
        PyErr_NoMemory();
        return -1;
    }
    outers->frames = grown;
    return 0;
}

void gm_py_outers_push(gm_py_outers *outers, gm_py_outer frame)
{
    outers->frames[outers->n++] = frame;
}

gm_py_outer gm_py_outers_pop(gm_py_outers *outers)
{
    gm_py_outer *top = gm_py_outers_top(outers), frame = *top;
    size_t n_above = (size_t)(outers->frames + outers->n-- - top) - 1;
    memmove(top, top + 1, n_above * sizeof *top);
    return frame;
}

void gm_py_outer_release(const gm_py_outer *frame)
{
    Py_XDECREF(frame->pack);
    Py_XDECREF(frame->unpack);
}

int gm_py_outers_traverse(const gm_py_outers *outers, visitproc visit, void *arg)
{
    for (size_t i = 0; i < outers->n; i++) {
        Py_VISIT(outers->frames[i].pack);
        Py_VISIT(outers->frames[i].unpack);
    }
    return 0;
}

void gm_py_outers_free(gm_py_outers *outers)
{
    for (size_t i = 0; i < outers->n; i++) {
        gm_py_outer_release(&outers->frames[i]);
    }
    free(outers->frames);
}
