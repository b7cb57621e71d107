"""The gate: operations on a parameter, and the changes of its data between them, by several threads.

A unit that is entered gives its parameters other data, and takes them away. torch runs operations without the GIL: one
that another thread has begun would go on with bytes that are gone, or wait in autograd for the GIL that the change has.
So parameters have a dispatch key above autograd, which brings every operation on them here first. The thread that
changes data (csrc/binding/gate.c) goes past it, and pays nothing.

Invariants
    1. While an operation of another thread uses a parameter, its data stays what it is (Slot.swap).
    2. If it is the bytes of another thread's unit, they are leased for that operation: it may be on another stream.
    3. Whoever waits to change the data is not overtaken by operations that begin later; what an operation that has
       passed does inside waits for nobody.

The key is one that torch reserves for a library that is no more (DispatchKey::DeferredInit).
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from gemini_strategy import _torch
from gemini_strategy.errors import GuardError
from gemini_strategy.parameters import keyed

if TYPE_CHECKING:
    from gemini_strategy.parameters.slot import Slot

KEY = _torch.dispatch_key("DeferredInit")
KEYS = _torch.DispatchKeySet(KEY)

# torch makes tensors of other classes of what these give, which must not have been in Python: see parameter.py. The
# last is asked when a parameter gets other data.
_TAKEN_FRESH = ("alias", "detach", "_has_compatible_shallow_copy_type")
# Below: slots' readers, and who waits. A signal's handler may come in a thread that has it.
_lock = (
    threading.RLock()
)  # itself: a Condition's own `with` is Python: an interrupt leaves it locked
_changed = threading.Condition(_lock)
_waiting: list[Slot] = []  # for each that waits to change the data of one
_name_of: Callable[[Any], str | None]
_borrow: Callable[[Any, tuple[Any, ...], dict[str, Any]], bool]
_passed: list[tuple[int, Slot]] = []  # threads whose operations have passed, with the parameters


def _slots(values: Any) -> Iterator[Slot]:
    """Of the parameters among the arguments of an operation."""
    for value in values:
        if isinstance(value, torch.Tensor):
            slot = value.__dict__.get("_gm_slot")
            if slot is not None:
                yield slot
        elif isinstance(value, list | tuple):
            yield from _slots(value)


def inside(shown: torch.Tensor) -> torch.Tensor:
    """A plain tensor that shows a parameter, as that parameter's data."""
    storage = _torch.TensorBase.untyped_storage(shown)
    return keyed.tensor(KEYS, storage, shown.shape, shown.stride(), shown.dtype, shown.device)


@contextlib.contextmanager
def passing(*slots: Slot) -> Iterator[None]:
    """Inside, the data of these slots' parameters stays what it is."""
    thread = threading.get_ident()
    leases: list[torch.Tensor] = []
    passed: list[Slot] = []
    try:
        with _lock:
            while not any(thread == each for each, _ in _passed) and any(
                slot in _waiting for slot in slots
            ):
                _changed.wait()
            for slot in slots:
                slot.readers = [*(slot.readers or ()), thread]
                _passed.append((thread, slot))
                passed.append(slot)
        in_units = [slot for slot in slots if slot.open_count > slot.is_raw]
        leases += [slot.lease(is_watched=False) for slot in in_units]
        yield
    finally:
        leases.clear()
        with _lock:
            for slot in passed:
                _end(thread, slot)
            _changed.notify_all()


def _end(thread: int, slot: Slot) -> None:
    slot.readers.remove(thread)
    slot.readers = slot.readers or None
    _passed.remove((thread, slot))


def _after_fork() -> None:
    """In the child, which has none of the other threads."""
    global _lock, _changed
    _lock = threading.RLock()
    _changed = threading.Condition(_lock)
    _waiting.clear()
    for thread, slot in list(_passed):
        if thread != threading.get_ident():
            _end(thread, slot)


os.register_at_fork(after_in_child=_after_fork)


def _pass(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The dispatcher's kernel for every operation on a parameter, or on a view of one, outside its thread's units."""
    if _torch.tracing_state() is not None:
        # The graph would name this file, and torch compares graphs.
        names = [_name_of(value) for value in (*args, *kwargs.values())]
        name = next((name for name in names if name is not None), "a parameter")
        raise GuardError(
            f"{name} is used outside its module in a function that torch.jit.trace records: give the function a clone "
            "of its own, p.detach().clone(), or trace before manage()"
        )
    if _borrow(op, args, kwargs):  # this thread changes data now, and passes
        return op(*args, **kwargs)
    # Not in a generator: an interrupt would leave the key off until that is collected.
    with passing(*_slots((*args, *kwargs.values()))), _torch.ExcludeDispatchKeyGuard(KEYS):
        return op(*args, **kwargs)


def await_readers(slot: Slot) -> None:
    """Lets the operations of other threads that use the parameter end; who calls it looks again."""
    thread = threading.get_ident()
    with _lock:
        _waiting.append(slot)
        try:
            while any(reader != thread for reader in slot.readers or ()):
                _changed.wait()
        finally:
            _waiting.remove(slot)
            _changed.notify_all()


def _pass_named(name: str, *args: Any, **kwargs: Any) -> Any:
    name, _, overload = name.partition(".")
    return _pass(getattr(getattr(torch.ops.aten, name), overload or "default"), *args, **kwargs)


def install(
    everything: torch.library.Library,
    aten: torch.library.Library,
    name_of: Callable[[Any], str | None],
    borrow: Callable[[Any, tuple[Any, ...], dict[str, Any]], bool],
) -> None:
    """Puts the kernel in place, once per process. torch has no way to call a fallback under a mode of the caller.

    `name_of`: of the parameter that a value is, or shows; None: of none. `borrow`: see absent.serve.
    """
    global _name_of, _borrow
    _name_of, _borrow = name_of, borrow
    everything.fallback(_pass, "DeferredInit")
    for full in _torch.all_operator_names():
        name = full.removeprefix("aten::")
        if name in _TAKEN_FRESH:
            aten.impl(name, torch.library.fallthrough_kernel, "DeferredInit")
        elif name != full:
            aten.impl(name, functools.partial(_pass_named, name), "DeferredInit")
