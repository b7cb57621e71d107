/* task.h - the Python type TaskEnd: what autograd calls when a graph task has run its last node. */
#pragma once

#include "binding/common.h"

/* Ends what `owner` has of the task; 0, or -1 with an exception set.  It runs no Python (see
 * task.c). */
typedef int (*gm_py_end_task)(PyObject *owner, long long task);

int gm_py_task_init(void);
/* For torch's queue_callback; holds the owner.  NULL with an exception set. */
PyObject *gm_py_task_end_new(PyObject *owner, long long task, gm_py_end_task end);
