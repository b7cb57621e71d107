/* host.c - functions of gemini_strategy._C about this host: what this process may take of its cores
 * and memory, and which cores its pools of threads use.
 *
 * What host_use() sets is a process's, as a rank is a process: every pool that is made from then
 * on, of an engine, for a measurement or for arithmetic, has it.  `share_lock` guards it. */
#include "binding/common.h"

#include <pthread.h>
#include <stdlib.h>

#include "torch/absent.h"
#include "device/hostmem.h"
#include "base/topology.h"
#include "base/workers.h"

static gm_workers *shared_workers; /* see gm_py_workers */

static pthread_mutex_t share_lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned *share_cores; /* NULL: any */
static size_t n_share_cores;
static unsigned share_threads; /* of a pool for which no number is given; 0: the default */

gm_status gm_py_workers_new(unsigned n_threads, gm_workers **out)
{
    pthread_mutex_lock(&share_lock);
    gm_status status =
        gm_workers_new_on(share_cores, n_share_cores, n_threads ? n_threads : share_threads, out);
    pthread_mutex_unlock(&share_lock);
    return status;
}

gm_workers *gm_py_workers(void)
{
    if (!shared_workers) {
        gm_status status = gm_py_workers_new(0, &shared_workers);
        if (status != GM_OK) {
            gm_py_raise(status);
        }
    }
    return shared_workers;
}

/* ---- sequences ---- */

static PyObject *list_of(const unsigned *numbers, size_t n)
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < n; i++) {
        list = gm_py_append(list, PyLong_FromUnsignedLong(numbers[i]));
    }
    return list;
}

static int parse_number(PyObject *item, void *out)
{
    unsigned long number = PyLong_AsUnsignedLong(item);
    if (!PyErr_Occurred() && number >= 1 << 20) {
        PyErr_Format(PyExc_ValueError, "%lu is no number of a core", number);
    }
    *(unsigned *)out = (unsigned)number;
    return !PyErr_Occurred();
}

/* ---- functions ---- */

PyDoc_STRVAR(
    host_topology_doc,
    "host_topology(root='') -> dict\n\n"
    "This host: 'mask', the cores that this thread may use; 'quota', how many cores' time this\n"
    "process's control groups grant, 0.0 for no limit; 'memory', bytes of host memory that may\n"
    "still be taken, and 'total', that there are, within the control groups' limits.  All but\n"
    "the mask are read below the folder root.");
static PyObject *host_topology(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *root = "";
    if (!PyArg_ParseTuple(args, "|s:host_topology", &root)) {
        return NULL;
    }
    unsigned *mask = NULL;
    size_t n_mask = 0, available, total;
    gm_status status;
    PyObject *result = NULL;
    if ((status = gm_topology_mask(&mask, &n_mask)) != GM_OK ||
        (status = gm_host_memory_at(root, &available, &total)) != GM_OK) {
        gm_py_raise(status);
    } else {
        /* N takes the list's reference. */
        result = Py_BuildValue("{s:N,s:d,s:n,s:n}", "mask", list_of(mask, n_mask), "quota",
                               gm_topology_quota(root), "memory", (Py_ssize_t)available, "total",
                               (Py_ssize_t)total);
    }
    free(mask);
    return result;
}

static PyObject *host_threads(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_ssize_t n_cores = 0;
    double quota = 0;
    if (!PyArg_ParseTuple(args, "|nd:host_threads", &n_cores, &quota)) {
        return NULL;
    }
    unsigned n = n_cores > 0 ? gm_topology_threads((size_t)n_cores, quota) : 0;
    gm_status status = n_cores > 0 ? GM_OK : gm_workers_default(&n);
    return status == GM_OK ? PyLong_FromUnsignedLong(n) : gm_py_raise(status);
}

static PyObject *host_use(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *sequence;
    unsigned threads;
    size_t n;
    GM_PY_TRY(PyArg_ParseTuple(args, "OI:host_use", &sequence, &threads));
    unsigned *cores = gm_py_array(sequence, sizeof *cores, parse_number, &n);
    GM_PY_TRY(cores);
    pthread_mutex_lock(&share_lock);
    unsigned *before = share_cores;
    share_cores = cores;
    n_share_cores = n;
    share_threads = threads;
    pthread_mutex_unlock(&share_lock);
    free(before);
    Py_RETURN_NONE;
}

static PyObject *absent_range(PyObject *Py_UNUSED(module), PyObject *size)
{
    size_t bytes = PyLong_AsSize_t(size);
    if (bytes == (size_t)-1 && PyErr_Occurred()) {
        return NULL;
    }
    uintptr_t address;
    gm_status status = gm_absent_range(bytes, &address);
    return status == GM_OK ? PyLong_FromUnsignedLongLong(address) : gm_py_raise(status);
}

PyMethodDef gm_py_host_methods[] = {
    {"absent_range", absent_range, METH_O,
     "absent_range(bytes) -> int: an address from which so many read as NaN, and none can be "
     "written"},
    {"host_topology", host_topology, METH_VARARGS, host_topology_doc},
    {"host_threads", host_threads, METH_VARARGS,
     "Threads worth running on n_cores cores under a quota of so many cores' time (0.0: no limit). "
     "n_cores 0: what this process runs by default, which is GEMINI_THREADS, else as many as the "
     "cores that it may use under its own quota."},
    {"host_use", host_use, METH_VARARGS,
     "Pools of threads that are made from now on run on these cores only (none: on any), with so "
     "many threads where no number is given (0: the default)."},
    {NULL, NULL, 0, NULL},
};
