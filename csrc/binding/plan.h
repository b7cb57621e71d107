/* plan.h - plans and timelines as Python objects. */
#pragma once

#include "plan/plan.h"
#include "binding/common.h"
#include "engine/engine.h"
#include "memory/timeline.h"

/* A new dict by name (rates.c). */
PyObject *gm_py_rates(const gm_rates *rates);
/* Figures in the order of RATES; -1 with an exception set. */
int gm_py_rates_parse(PyObject *sequence, gm_rates *out);
/* A new dict of gm_plan_info and the class of every chunk; keys in plan.c.  NULL with an exception
 * set. */
PyObject *gm_py_plan_info(const gm_plan_info *info, const gm_class *classes, uint32_t n_chunks);
/* A new dict of one chunk; keys in plan.c.  NULL with an exception set. */
PyObject *gm_py_chunk(const gm_engine_chunk *chunk);
/* A new list of one dict per entry; keys in plan.c.  For a finished timeline. */
PyObject *gm_py_timeline(const gm_timeline *timeline);
