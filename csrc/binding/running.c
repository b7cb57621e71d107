/* running.c - see running.h. Plain C: no call here runs Python or drops the GIL. */
#include "binding/running.h"

#include <stdlib.h>

static const char no_room[] = "HOST: %zu entries about the nodes of a backward";

/* Room for them was made when they were noted. */
static void end_node(gm_running *running, gm_running_node *node)
{
    for (size_t i = 0; i < node->n_addresses; i++) {
        running->ended[running->n_ended++] = node->addresses[i];
    }
    node->n_addresses = 0;
}

bool gm_running_next_ended(gm_running *running, uintptr_t *out)
{
    if (running->n_ended == 0) {
        return false;
    }
    *out = running->ended[--running->n_ended];
    return true;
}

/* How deep the task is; 0: it is not known. */
static size_t depth_of(const gm_running *running, int64_t task)
{
    size_t depth = running->n;
    while (depth && running->nodes[depth - 1].task != task) {
        depth--;
    }
    return depth;
}

gm_follow gm_running_follow(gm_running *running, int64_t node, int64_t task, uint32_t *out_keep)
{
    size_t depth = depth_of(running, task);
    if (depth == 0) {
        return GM_FOLLOW_NEW;
    }
    gm_running_drop(running, depth);
    gm_running_node *top = &running->nodes[depth - 1];
    if (top->node == node) {
        return GM_FOLLOW_SAME;
    }
    top->node = node;
    end_node(running, top);
    *out_keep = top->n_before;
    return GM_FOLLOW_NEXT;
}

bool gm_running_push(gm_running *running, int64_t node, int64_t task, uint32_t n_before)
{
    if (GM_GROW(running->nodes, running->n, running->capacity, no_room) != GM_OK) {
        return false;
    }
    running->nodes[running->n++] =
        (gm_running_node){.task = task, .node = node, .n_before = n_before};
    return true;
}

bool gm_running_end(gm_running *running, int64_t task, uint32_t *out_keep)
{
    size_t depth = depth_of(running, task);
    if (depth == 0) {
        return false;
    }
    *out_keep = running->nodes[depth - 1].n_before;
    gm_running_drop(running, depth - 1);
    return true;
}

bool gm_running_note(gm_running *running, uintptr_t address)
{
    gm_running_node *top = &running->nodes[running->n - 1];
    size_t n_noted = running->n_ended;
    for (size_t i = 0; i < running->n; i++) {
        n_noted += running->nodes[i].n_addresses;
    }
    if (GM_GROW(top->addresses, top->n_addresses, top->capacity, no_room) != GM_OK ||
        GM_GROW(running->ended, n_noted, running->ended_capacity, no_room) != GM_OK) {
        return false;
    }
    top->addresses[top->n_addresses++] = address;
    return true;
}

uintptr_t *gm_running_take(gm_running *running, int64_t node, size_t *n_addresses,
                           uint32_t *out_keep)
{
    gm_running_node *top = running->n ? &running->nodes[running->n - 1] : NULL;
    if (!top || top->node != node || !top->n_addresses) {
        return NULL;
    }
    uintptr_t *addresses = top->addresses;
    *n_addresses = top->n_addresses;
    *out_keep = top->n_before;
    top->addresses = NULL;
    top->n_addresses = top->capacity = 0;
    return addresses;
}

void gm_running_drop(gm_running *running, size_t n_keep)
{
    while (running->n > n_keep) {
        gm_running_node *node = &running->nodes[--running->n];
        end_node(running, node);
        free(node->addresses);
    }
}

void gm_running_free(gm_running *running)
{
    gm_running_drop(running, 0);
    free(running->nodes);
    free(running->ended);
}
