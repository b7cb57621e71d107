/* saved.h - the Python type Saved: what autograd keeps in place of a saved tensor. */
#pragma once

#include "binding/unit.h"

typedef enum saved_kind { SAVED_PLAIN, SAVED_TOKEN, SAVED_DELEGATED } saved_kind;

/* A saved tensor.  Not tracked by the cycle collector: autograd, which holds it, is not either. */
typedef struct saved {
    PyObject_HEAD saved_kind kind;
    /* Detached, so that no node lives by its own output; what the user's pack gave; of a token
     * NULL. */
    PyObject *tensor;
    PyObject *owner;                  /* a token's slot, the user's unpack */
    uintptr_t address;                /* of a token, with */
    PyObject *shape, *stride, *dtype; /* NULL: it is the whole parameter */
    PyObject *content;    /* the slot's then; NULL as well: torch reads what `.data` is */
    bool is_conj, is_neg; /* how its elements are read */
    bool is_checked;      /* its version is the parameter's */
    long long version; /* of the tensor, or the parameter and its updates; -1: none (inference) */
} saved;

extern PyTypeObject *gm_py_saved_type;
int gm_py_saved_init(void);
saved *gm_py_saved_new(saved_kind kind, PyObject *owner); /* NULL with an exception set, as next */
saved *gm_py_saved_plain(PyObject *tensor);               /* keeps the tensor, detached */
