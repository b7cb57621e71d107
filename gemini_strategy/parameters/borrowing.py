"""What a module has of parameters of modules below it, while it runs: see [Note: borrowing] in csrc/binding/call.c.

Invariants
    1. A unit that is borrowed has been entered by the thread in which the module runs, and leaves with it; sooner only
       for room, and only if nobody has an address of its bytes.
    2. To borrow makes room by nothing that is borrowed: of two that do not fit together neither takes the other's room
       for ever. What finds no room is served, operation by operation.
    3. What is written is not borrowed for that.
    4. While Dynamo traces, no net is on: it runs what it traces of torch.func, which forbids hooks. From its end on the
       net of the call is that has borrowed for the compiled function.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

import torch

from gemini_strategy import _C, _torch
from gemini_strategy.errors import GeminiMemoryError

if TYPE_CHECKING:
    from gemini_strategy.parameters.hooks import Unit
    from gemini_strategy.parameters.slot import Slot


def _running(slot: Slot) -> tuple[Unit, Any, list[Any]] | None:
    """(one of its units, the call of the innermost running module that has that below it, what it has borrowed)."""
    for unit in slot.units:
        found = _C.running(unit)
        if found is not None:
            return unit, *found
    return None


class _Tracing(threading.local):
    """What waits for Dynamo's end in this thread: hooks that were taken off, units whose borrower gets a net."""

    def __init__(self) -> None:
        self.taken: list[Any] = []
        self.units: list[Unit] = []


_tracing = _Tracing()


def take_nets() -> list[Any]:
    """Takes off the hooks of nets that are on top."""
    top, taken = _torch.top_saved_tensors_hooks, []
    while isinstance(getattr((top(True) or [None])[0], "__self__", None), _C.Net):
        taken.append(top(True))
        _torch.pop_saved_tensors_hooks()
    return taken


def put_nets(taken: list[Any]) -> None:
    while taken:
        _torch.push_saved_tensors_hooks(*taken.pop())


def _begin_tracing(_: Any) -> None:
    _tracing.taken += take_nets()


def _end_tracing(_: Any) -> None:
    put_nets(_tracing.taken)
    while _tracing.units:
        _C.catch_saved(_tracing.units.pop())


def _watch_compiler() -> None:
    """torch._dynamo.reset() forgets who watches."""
    callbacks = _torch.compiler_callbacks()
    if _begin_tracing not in callbacks.start_callbacks:
        callbacks.register_start_callback(_begin_tracing)
        callbacks.register_end_callback(_end_tracing)


def borrow(slot: Slot, by_compiled: bool = False) -> bool:
    """Enters its unit until the innermost running module leaves that has it; whether it did.

    by_compiled: from now on that module borrows it when it begins.
    """
    if slot.open_count or slot.engine.closed:
        return False
    found = _running(slot)
    if found is None or found[0].is_compiled or found[0].n_entered:
        return False
    unit, call, borrowed = found
    call.net = slot.net
    if by_compiled:
        _watch_compiler()
        unit.is_compiled_use = True
        if call.borrow_from_now_on(slot):  # the compiler runs
            _tracing.units.append(unit)
    borrowed.append(unit)  # before: an interrupt finds it there
    unit.is_borrowing = True
    try:
        unit.borrow(by_compiled)
    except GeminiMemoryError:
        borrowed.remove(unit)
        unit.leave()
        return False
    finally:
        unit.is_borrowing = False
    return True


def give_back() -> bool:
    """Lets those leave that this thread has borrowed for operations; whether there were any."""
    is_left = False
    for borrowed in _C.borrowed():
        for unit in [each for each in borrowed if isinstance(each, _C.Unit)]:
            has_address = unit.is_compiled_use or any(s.is_watched for s in unit.slots)
            if unit.n_entered == 1 and not has_address:
                borrowed.remove(unit)
                unit.leave()
                is_left = True
    return is_left


def is_in_node(slot: Slot) -> bool:
    """Whether a node of a backward runs and no module that has it below it: its bytes can stay until another node asks.

    What is computed again in a node may be many modules.
    """
    return _torch.current_task() != -1 and bool(math.prod(slot.shape)) and _running(slot) is None


def at_hand(slot: Slot) -> torch.Tensor | None:
    """Its bytes, which stay where they are while the innermost running module does that has it, or the node of a
    backward; None: nothing of that runs."""
    if is_in_node(slot):
        shown: torch.Tensor = slot.units[0].show(slot)
        slot.expose(shown)
        return shown
    found = _running(slot)
    if found is None:
        return None
    lease = slot.lease()
    found[2].append(lease)
    return lease
