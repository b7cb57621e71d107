/* stay.h - chunks that stay on the device, from the beginning and in every plan, because the host
 * cannot hold the homes of all: host memory and device memory then add up. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Chooses those (stays: (n,) false) whose homes go, so that the others' fit `limit`: no more than
 * that takes, the first chunks before others, as their gradients come last and their weights are
 * needed first.  Depends on nothing else, so ranks with one limit choose alike. */
void gm_stay_choose(const size_t *home_bytes, uint32_t n, size_t limit, bool *stays);
