/* engine.h - the Python type gemini_strategy._C.Core. */
#ifndef GM_PY_ENGINE_H
#define GM_PY_ENGINE_H

#include "binding/common.h"

#include "engine/engine.h"

/* A Core's engine, borrowed; NULL with an exception set when it is closed or `core` is something else. */
gm_engine *gm_py_core_engine(PyObject *core);
bool gm_py_core_is_closed(PyObject *core);

int gm_py_engine_init(PyObject *module); /* adds the type; -1 with an exception set on failure */

#endif
