/* signals.c - what must not be left half done: a call in which no handler of a signal runs.
 *
 * Python handles a signal between any two steps of its code on the main thread, and what the
 * handler raises comes out there.  Most of this package can end anywhere; what cannot (the accounts
 * of a step that the core has taken, the way back of manage() and close()) is called by
 * uninterrupted().  It is not for what waits for others.
 *
 * Invariants
 *   1. Signals that Python has handlers for are noted while the call runs, and raised again when it
 *      has returned.
 *   2. One that has come before the call is handled before it, and what its handler raises is
 *      raised after it.
 *   3. Other threads handle no signals: for them, and inside another such call, this is an ordinary
 *      call.
 *   4. A handler that the call has put in the place of ours stays, and may put ours back when it
 *      has run, as LLVM's does, which a compiler of kernels brings: outside a call ours is
 *      Python's. */
#define _GNU_SOURCE /* gettid */
#include "binding/common.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <unistd.h>

enum { N_SIGNALS = 64 };

static _Atomic uint64_t arrived, held;         /* bit n - 1: signal n */
static struct sigaction before[N_SIGNALS + 1]; /* the main thread's */

static uint64_t bit(int signal)
{
    return UINT64_C(1) << (signal - 1);
}

/* It notes first and looks then, as release() lets go first and looks then. */
static void note(int signal)
{
    atomic_fetch_or(&arrived, bit(signal));
    if (!(held & bit(signal)) && (atomic_fetch_and(&arrived, ~bit(signal)) & bit(signal))) {
        int error = errno;
        struct sigaction plain = {.sa_handler = note}; /* what waits for the system returns */
        (void)sigemptyset(&plain.sa_mask);
        (void)sigaction(signal, &plain, NULL);
        (void)PyErr_SetInterruptEx(signal);
        errno = error;
    }
}

/* What comes of an instruction cannot wait. */
static bool is_synchronous(int signal)
{
    return signal == SIGSEGV || signal == SIGBUS || signal == SIGFPE || signal == SIGILL ||
           signal == SIGTRAP || signal == SIGABRT || signal == SIGSYS;
}

/* Whether a handler in Python is called: 1 or 0; -1 with an exception set. */
static int is_handled(int signal)
{
    static PyObject *get; /* in C, unlike that of the module `signal` */
    if (!get) {
        PyObject *module = PyImport_ImportModule("_signal");
        get = module ? PyObject_GetAttrString(module, "getsignal") : NULL;
        Py_XDECREF(module);
    }
    PyObject *handler = get ? PyObject_CallFunction(get, "i", signal) : NULL;
    int result = handler ? PyCallable_Check(handler) : -1;
    Py_XDECREF(handler);
    return result;
}

static void release(void)
{
    for (int signal = 1; signal <= N_SIGNALS; signal++) {
        struct sigaction now;
        if ((held & bit(signal)) && sigaction(signal, NULL, &now) == 0 && now.sa_handler == note) {
            (void)sigaction(signal, &before[signal], NULL); /* else the call has set another */
        }
    }
    held = 0;
    uint64_t came = atomic_exchange(&arrived, 0);
    for (int signal = 1; signal <= N_SIGNALS; signal++) {
        if (came & bit(signal)) {
            (void)raise(signal);
        }
    }
}

static int hold(void)
{
    for (int signal = 1; signal <= N_SIGNALS; signal++) {
        /* The C library has some of its own, and two that no handler can catch. */
        bool is_free = !is_synchronous(signal) && signal != SIGKILL && signal != SIGSTOP &&
                       (signal < 32 || signal >= SIGRTMIN);
        int handled = is_free ? is_handled(signal) : 0;
        struct sigaction ours = {.sa_handler = note, .sa_flags = SA_RESTART};
        (void)sigemptyset(&ours.sa_mask);
        if (handled < 0) {
            release();
            return -1;
        }
        held |= handled ? bit(signal) : 0;
        if (handled && sigaction(signal, &ours, &before[signal]) != 0) {
            held &= ~bit(signal);
        }
    }
    return 0;
}

PyObject *gm_py_call_uninterrupted(PyObject *function, PyObject *args, PyObject **out_error)
{
    static bool is_inside; /* the main thread's */
    bool holds = gettid() == getpid() && !is_inside;
    *out_error = NULL;
    if (holds) {
        if (hold() < 0) {
            return NULL;
        }
        is_inside = true;
        if (PyErr_CheckSignals() < 0) {
            *out_error = gm_py_set_aside();
        }
    }
    PyObject *result = PyObject_CallObject(function, args);
    if (holds) {
        is_inside = false;
        release();
    }
    return result;
}

/* uninterrupted(function, *arguments) -> what it gives. */
static PyObject *uninterrupted(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *error = NULL;
    GM_PY_FAIL_IF(PyTuple_Size(args) < 1, PyExc_TypeError, "uninterrupted takes a function");
    PyObject *rest = PyTuple_GetSlice(args, 1, PyTuple_Size(args));
    PyObject *result =
        rest ? gm_py_call_uninterrupted(PyTuple_GetItem(args, 0), rest, &error) : NULL;
    Py_XDECREF(rest);
    if (error) { /* of a handler: it comes last, and has what the call has raised as its context */
        Py_CLEAR(result);
        PyObject *own = gm_py_set_aside();
        if (own) {
            PyException_SetContext(error, own);
        }
        gm_py_put_back(error);
    }
    return result;
}

PyMethodDef gm_py_signal_methods[] = {
    GM_PY_METHOD("uninterrupted", uninterrupted, METH_VARARGS,
                 "uninterrupted(function, *arguments) -> what it gives; handlers of signals wait "
                 "until then"),
    {NULL, NULL, 0, NULL},
};
