/* comm.h - the Python type gemini_strategy._C.Comm. */
#pragma once

#include "binding/common.h"

#include "comm/comm.h"

/* A Comm's communicator, for as long as it is not given back (close() waits for that); NULL with an
 * exception set when it is closed or `object` is something else. */
gm_comm *gm_py_comm_take(PyObject *object);
void gm_py_comm_give(PyObject *object);

int gm_py_comm_init(PyObject *module); /* adds the type; -1 with an exception set on failure */
