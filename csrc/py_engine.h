/* py_engine.h - the Python type gemini_strategy._C.Core. */
#ifndef GM_PY_ENGINE_H
#define GM_PY_ENGINE_H

#include "py_common.h"

int gm_py_engine_init(PyObject *module); /* adds the type; -1 with an exception set on failure */

#endif
