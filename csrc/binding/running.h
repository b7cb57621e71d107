/* running.h - which backward nodes have unpacked managed tensors, innermost graph task last.
 *
 * Nodes of one graph task run one after the other, so that what a node has touched is done with
 * when another one of its task unpacks. A node may run a backward of its own (re-entrant
 * checkpointing): a task nested in it, whose end shows when the outer one goes on. */
#pragma once

#include "base/base.h"

/* The node of one task that unpacked last. */
typedef struct gm_running_node {
    int64_t task, node;   /* the node's key: the node itself would keep the graph alive */
    uint32_t n_before;    /* chunks that nodes of enclosing tasks have touched */
    uintptr_t *addresses; /* what it has touched */
    size_t n_addresses, capacity;
} gm_running_node;

typedef struct gm_running {
    gm_running_node *nodes;
    size_t n, capacity;
    uintptr_t *ended; /* what nodes had touched that are done with, until it is asked for */
    size_t n_ended, ended_capacity;
} gm_running;

typedef enum gm_follow {
    GM_FOLLOW_NEW,  /* the task is new */
    GM_FOLLOW_SAME, /* the node is the task's last one */
    GM_FOLLOW_NEXT  /* another node of the task: all but *out_keep pins are to be released */
} gm_follow;

/* Ends tasks nested in `task`, and makes `node` the last of it if it is known. */
gm_follow gm_running_follow(gm_running *running, int64_t node, int64_t task, uint32_t *out_keep);
/* One more address that an ended node had touched; false: there is none. */
bool gm_running_next_ended(gm_running *running, uintptr_t *out);
/* A new task; false: no memory. */
bool gm_running_push(gm_running *running, int64_t node, int64_t task, uint32_t n_before);
/* The task has ended, and those nested in it; false: it is not known.  All but *out_keep pins are
 * to be released. */
bool gm_running_end(gm_running *running, int64_t task, uint32_t *out_keep);
/* The last node has touched `address`; false: no memory. */
bool gm_running_note(gm_running *running, uintptr_t address);
/* The last node is to have touched nothing; NULL, or what it had touched: n_addresses of them, the
 * caller's. */
uintptr_t *gm_running_take(gm_running *running, int64_t node, size_t *n_addresses,
                           uint32_t *out_keep);
/* All tasks but the `n_keep` outermost have ended. */
void gm_running_drop(gm_running *running, size_t n_keep);
void gm_running_free(gm_running *running);
