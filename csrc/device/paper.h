/* paper.h - a device on paper: the engine runs on it as on any other, but nothing has bytes.
 *
 * For estimates.  Addresses, blocks, streams and events are numbers; copies, kernels and functions
 * for the host's threads do nothing.  So the engine's own layout, passes and plans can be had for a
 * model and a budget of any size, on a machine that has neither.  Time passes when
 * gm_device_paper_elapse says so.
 *
 * What may be asked of an engine on it: units, chunks touched, gradients, steps, plans and figures.
 * Fields of parameters may not: there are none. */
#pragma once

#include "device/device.h"

/* is_host: it stands for the host device (granularity: page size), else for a CUDA device (2 MiB).
 * host_bytes: that its host has for the engine. */
gm_status gm_device_paper_new(size_t block_bytes, bool is_host, size_t host_bytes, gm_device **out);
/* The compute stream worked for so long. */
void gm_device_paper_elapse(gm_device *dev, double seconds);
