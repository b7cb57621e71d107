/* paper.c - the method of Core that plays a recorded pass on a device on paper: what Unit and Net
 * would ask the engine for in that pass, in the same order, without a tensor. */
#include "binding/core.h"

#include <stdlib.h>

#include "binding/running.h"
#include "device/paper.h"

/* What stands for the addresses of tensors: nothing reads them. */
#define SOMEWHERE ((const void *)4096)

/* Each event is (kind, a, b, c); RECORDED in the module has the names. */
typedef enum kind {
    ENTER,   /* unit, flags (GM_ENTER_*) */
    LEAVE,   /* unit */
    UNPACK,  /* parameter, node, task: a backward node unpacks what shows the parameter */
    UNPIN,   /* node, task: what earlier nodes of the task have unpacked is done with */
    SUSPEND, /* node: a hook of the user's runs in the node's unpacking (checkpointing) */
    RESUME,  /* node, task: it has ended */
    END,     /* task */
    GRAD,    /* parameter, dtype */
    ELAPSE,  /* nanoseconds of compute */
    OUTSIDE, /* bytes of device memory that are not the engine's, from now on */
    N_KINDS
} kind;

static const char *const kind_names[N_KINDS] = {"ENTER",  "LEAVE", "UNPACK", "UNPIN",  "SUSPEND",
                                                "RESUME", "END",   "GRAD",   "ELAPSE", "OUTSIDE"};

/* What a hook has interrupted: the addresses come back when it has ended. */
typedef struct interruption {
    uintptr_t *addresses; /* NULL: there were none */
    size_t n;
} interruption;

typedef struct player {
    core *self;
    gm_engine *engine;
    gm_running running;
    interruption *interruptions;
    size_t n_interruptions, capacity;
} player;

/* As in net.c. */
static gm_status follow(player *p, int64_t node, int64_t task, bool *out_is_known)
{
    uint32_t n_keep;
    gm_follow what = gm_running_follow(&p->running, node, task, &n_keep);
    *out_is_known = what != GM_FOLLOW_NEW;
    return what == GM_FOLLOW_NEXT ? gm_engine_release_touched(p->engine, n_keep) : GM_OK;
}

static gm_status touch(player *p, uintptr_t address, int64_t node, int64_t task)
{
    bool is_known;
    GM_TRY(follow(p, node, task, &is_known));
    uint32_t n_before = gm_engine_n_touched(p->engine);
    GM_FAIL_IF((!is_known && !gm_running_push(&p->running, node, task, n_before)) ||
                   !gm_running_note(&p->running, address),
               GM_ERR_NOMEM, "HOST: a recorded pass");
    return gm_engine_touch(p->engine, address, 0);
}

static gm_status suspend(player *p, int64_t node)
{
    uint32_t n_keep;
    GM_TRY(GM_GROW(p->interruptions, p->n_interruptions, p->capacity,
                   "HOST: a recorded pass with %zu interruptions"));
    interruption *last = &p->interruptions[p->n_interruptions++];
    last->addresses = gm_running_take(&p->running, node, &last->n, &n_keep);
    return last->addresses ? gm_engine_release_touched(p->engine, n_keep) : GM_OK;
}

static gm_status resume(player *p, int64_t node, int64_t task)
{
    GM_FAIL_IF(p->n_interruptions == 0, GM_ERR_ARG, "replay: RESUME without SUSPEND");
    interruption last = p->interruptions[--p->n_interruptions];
    gm_status status = GM_OK;
    for (size_t i = 0; last.addresses && i < last.n && status == GM_OK; i++) {
        status = touch(p, last.addresses[i], node, task);
    }
    free(last.addresses);
    return status;
}

static gm_status end_task(player *p, int64_t task)
{
    uint32_t n_keep;
    return gm_running_end(&p->running, task, &n_keep) ? gm_engine_release_touched(p->engine, n_keep)
                                                      : GM_OK;
}

static gm_status play(player *p, const long long *v)
{
    bool is_known;
    switch (v[0]) {
    case ENTER: return gm_engine_enter(p->engine, (uint32_t)v[1], 0, (uint32_t)v[2]);
    case LEAVE: return gm_engine_leave(p->engine, (uint32_t)v[1], 0);
    case UNPACK:
        return v[1] < (long long)p->self->n_params
                   ? touch(p, gm_engine_address(p->engine, (uint32_t)v[1]), v[2], v[3])
                   : GM_FAIL(GM_ERR_ARG, "replay: parameter %lld does not exist", v[1]);
    case UNPIN: return follow(p, v[1], v[2], &is_known);
    case SUSPEND: return suspend(p, v[1]);
    case RESUME: return resume(p, v[1], v[2]);
    case END: return end_task(p, v[1]);
    case GRAD: return gm_engine_grad_put(p->engine, (uint32_t)v[1], SOMEWHERE, (gm_dtype)v[2], 0);
    case ELAPSE: gm_device_paper_elapse(p->self->paper, (double)v[1] * 1e-9); return GM_OK;
    case OUTSIDE: atomic_store(&p->self->outside->external_bytes, (size_t)v[1]); return GM_OK;
    default: return GM_FAIL(GM_ERR_ARG, "replay: %lld is no kind of event", v[0]);
    }
}

static int parse(PyObject *item, long long *v)
{
    v[1] = v[2] = v[3] = 0;
    int is_parsed = item && PyArg_ParseTuple(item, "L|LLL", &v[0], &v[1], &v[2], &v[3]);
    Py_XDECREF(item);
    return is_parsed ? 0 : -1;
}

/* On a device on paper alone.  An error ends it where it is. */
static PyObject *core_replay(core *self, PyObject *events)
{
    player p = {.self = self, .engine = gm_py_engine_of(self)};
    if (!p.engine) {
        return NULL;
    }
    GM_PY_FAIL_IF(!self->paper, PyExc_RuntimeError, "replay: this engine's device is not on paper");
    Py_ssize_t n = PySequence_Size(events);
    gm_status status = GM_OK;
    for (Py_ssize_t i = 0; i < n && status == GM_OK; i++) {
        long long v[4];
        if (parse(PySequence_GetItem(events, i), v) < 0) {
            n = -1;
            break;
        }
        status = play(&p, v);
    }
    gm_running_free(&p.running);
    for (size_t i = 0; i < p.n_interruptions; i++) {
        free(p.interruptions[i].addresses);
    }
    free(p.interruptions);
    return n < 0 ? NULL : gm_py_finish(status);
}

PyMethodDef gm_py_paper_methods[] = {
    GM_CORE_METHOD(replay, O, "(events): on a device on paper"),
    {NULL, NULL, 0, NULL},
};

int gm_py_paper_init(PyObject *module)
{
    return gm_py_add_numbers(module, "RECORDED", kind_names, N_KINDS);
}
