/* host.c - functions of gemini_strategy._C about this host: its cores and nodes, their split among
 * ranks, and which of them this process's pools of threads use.
 *
 * What host_use() sets is a process's, as a rank is a process: every pool that is made from then on, of an
 * engine, for a measurement or for arithmetic, has it.  `share_lock` guards it. */
#include "binding/common.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

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
    PyObject *list = PyList_New((Py_ssize_t)n);
    for (size_t i = 0; list && i < n; i++) {
        PyObject *number = PyLong_FromUnsignedLong(numbers[i]);
        if (!number || PyList_SetItem(list, (Py_ssize_t)i, number) < 0) {
            Py_CLEAR(list);
        }
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

static int by_number(const void *a, const void *b)
{
    unsigned x = ((const gm_core *)a)->number, y = ((const gm_core *)b)->number;
    return (x > y) - (x < y);
}

/* (number, node, sibling) */
static int parse_core(PyObject *item, void *out)
{
    gm_core *core = out;
    return PyArg_ParseTuple(item, "IiI", &core->number, &core->node, &core->sibling);
}

static void free_ranks(gm_local_rank *ranks, unsigned **masks, size_t n)
{
    for (size_t i = 0; masks && i < n; i++) {
        free(masks[i]);
    }
    free(masks);
    free(ranks);
}

/* Pairs (mask, node). */
static int parse_ranks(PyObject *sequence, gm_local_rank **out, unsigned ***out_masks,
                       size_t *out_n)
{
    Py_ssize_t size = PySequence_Size(sequence);
    if (size < 0) {
        return -1;
    }
    size_t n = (size_t)size;
    gm_local_rank *ranks = calloc(n + 1, sizeof *ranks);
    unsigned **masks = calloc(n + 1, sizeof *masks);
    if (!ranks || !masks) {
        free_ranks(ranks, masks, n);
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < n; i++) {
        PyObject *item = PySequence_GetItem(sequence, (Py_ssize_t)i), *mask;
        if (item && PyArg_ParseTuple(item, "Oi", &mask, &ranks[i].node)) {
            masks[i] = gm_py_array(mask, sizeof *masks[i], parse_number, &ranks[i].n_mask);
        }
        Py_XDECREF(item);
        if (!masks[i]) {
            free_ranks(ranks, masks, n);
            return -1;
        }
        ranks[i].mask = masks[i];
    }
    *out = ranks;
    *out_masks = masks;
    *out_n = n;
    return 0;
}

/* ---- functions ---- */

PyDoc_STRVAR(host_topology_doc,
             "host_topology(root='') -> dict\n\n"
             "This host: 'cores', a list of (number, NUMA node or -1, lowest number among the\n"
             "hardware threads of the same core); 'mask', the cores that this thread may use;\n"
             "'quota', how many cores' time this process's control groups grant, 0.0 for no\n"
             "limit; 'memory', bytes of host memory that may still be taken, and 'total', that\n"
             "there are, within the control groups' limits.  All but the mask are read below the\n"
             "folder root.");
static PyObject *host_topology(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *root = "";
    if (!PyArg_ParseTuple(args, "|s:host_topology", &root)) {
        return NULL;
    }
    gm_core *cores = NULL;
    unsigned *mask = NULL;
    size_t n_cores = 0, n_mask = 0, available, total;
    gm_status status;
    PyObject *core_list = NULL, *mask_list = NULL, *result = NULL;
    if ((status = gm_topology_cores(root, &cores, &n_cores)) != GM_OK ||
        (status = gm_topology_mask(&mask, &n_mask)) != GM_OK ||
        (status = gm_host_memory_at(root, &available, &total)) != GM_OK) {
        gm_py_raise(status);
        goto done;
    }
    core_list = PyList_New((Py_ssize_t)n_cores);
    for (size_t i = 0; core_list && i < n_cores; i++) {
        PyObject *core = Py_BuildValue("IiI", cores[i].number, cores[i].node, cores[i].sibling);
        if (!core || PyList_SetItem(core_list, (Py_ssize_t)i, core) < 0) {
            Py_CLEAR(core_list);
        }
    }
    mask_list = list_of(mask, n_mask);
    if (core_list && mask_list) {
        result = Py_BuildValue("{s:O,s:O,s:d,s:n,s:n}", "cores", core_list, "mask", mask_list,
                               "quota", gm_topology_quota(root), "memory", (Py_ssize_t)available,
                               "total", (Py_ssize_t)total);
    }
done:
    Py_XDECREF(core_list);
    Py_XDECREF(mask_list);
    free(cores);
    free(mask);
    return result;
}

static PyObject *host_device_node(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *pci_bus_id, *root = "";
    if (!PyArg_ParseTuple(args, "s|s:host_device_node", &pci_bus_id, &root)) {
        return NULL;
    }
    int node;
    gm_status status = gm_topology_device_node(root, pci_bus_id, &node);
    return status == GM_OK ? PyLong_FromLong(node) : gm_py_raise(status);
}

static PyObject *host_split(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *core_list, *rank_list, *result = NULL;
    Py_ssize_t rank;
    if (!PyArg_ParseTuple(args, "OOn:host_split", &core_list, &rank_list, &rank)) {
        return NULL;
    }
    gm_local_rank *ranks = NULL;
    unsigned **masks = NULL, *mine = NULL;
    size_t n_cores, n_ranks = 0, n_mine = 0;
    gm_core *cores = gm_py_array(core_list, sizeof *cores, parse_core, &n_cores);
    if (!cores || parse_ranks(rank_list, &ranks, &masks, &n_ranks) < 0) {
        goto done;
    }
    qsort(cores, n_cores, sizeof *cores, by_number);
    size_t most = rank >= 0 && (size_t)rank < n_ranks ? ranks[rank].n_mask : 0;
    mine = calloc(most + 1, sizeof *mine);
    if (!mine) {
        PyErr_NoMemory();
        goto done;
    }
    gm_status status = gm_topology_split(cores, n_cores, ranks, n_ranks,
                                         rank < 0 ? n_ranks : (size_t)rank, mine, &n_mine);
    result = status == GM_OK ? list_of(mine, n_mine) : gm_py_raise(status);
done:
    free(mine);
    free_ranks(ranks, masks, n_ranks);
    free(cores);
    return result;
}

static PyObject *host_threads(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_ssize_t n_cores = 0;
    double quota = 0;
    if (!PyArg_ParseTuple(args, "|nd:host_threads", &n_cores, &quota)) {
        return NULL;
    }
    unsigned n = 0;
    if (n_cores > 0) {
        n = gm_topology_threads((size_t)n_cores, quota);
    } else {
        gm_status status = gm_workers_default(&n);
        if (status != GM_OK) {
            return gm_py_raise(status);
        }
    }
    return PyLong_FromUnsignedLong(n);
}

static PyObject *host_use(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *sequence;
    unsigned threads;
    size_t n;
    if (!PyArg_ParseTuple(args, "OI:host_use", &sequence, &threads)) {
        return NULL;
    }
    unsigned *cores = gm_py_array(sequence, sizeof *cores, parse_number, &n);
    if (!cores) {
        return NULL;
    }
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
    {"host_device_node", host_device_node, METH_VARARGS,
     "The NUMA node of a PCI device such as '0000:1b:00.0'; -1 where it is not known."},
    {"host_split", host_split, METH_VARARGS,
     "The cores of ranks[rank].  cores: as host_topology gives them; ranks: for each rank of this "
     "host the cores that it may use and the NUMA node of its GPU (-1: unknown)."},
    {"host_threads", host_threads, METH_VARARGS,
     "Threads worth running on n_cores cores under a quota of so many cores' time (0.0: no limit). "
     "n_cores 0: what this process runs by default, which is GEMINI_THREADS, else as many as the "
     "cores that it may use under its own quota."},
    {"host_use", host_use, METH_VARARGS,
     "Pools of threads that are made from now on run on these cores only (none: on any), with so "
     "many threads where no number is given (0: the default)."},
    {NULL, NULL, 0, NULL},
};
