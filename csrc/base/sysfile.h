/* sysfile.h - small text files in which the kernel tells about this machine: /proc, /sys, and the
 * folders of the control groups that this process is in.
 *
 * Everything is read below a folder `root` in place of "/" (tests bring a /proc and /sys of their
 * own); "" is this machine. */
#pragma once

#include "base/base.h"

/* Reads at most `bytes` - 1 bytes of the file root + folder + name as text; false if it cannot be
 * read. */
bool gm_sysfile_read(const char *root, const char *folder, const char *name, char *text,
                     size_t bytes);

/* One folder, below the root, of a control group that limits this process. */
typedef void (*gm_cgroup_fn)(void *context, const char *root, const char *folder, bool is_v2);
/* Calls fn for every folder, from this process's own up to where the hierarchy is mounted, of every
 * hierarchy (version 2, or version 1 with `controller`): each of them limits this process. */
void gm_sysfile_cgroups(const char *root, const char *controller, gm_cgroup_fn fn, void *context);
