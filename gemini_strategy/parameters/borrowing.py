"""What a module has of parameters of modules below it, while it runs: see [Note: borrowing] in csrc/binding/call.c.

Invariants
    1. A unit that is borrowed has been entered by the thread in which the module runs, and leaves with it; sooner only
       for room, and only if no address of its bytes was given out.
    2. To borrow for an operation makes room by nothing that is borrowed: of two that do not fit together neither takes
       the other's room for ever. A module that lacks the room once is served, operation by operation, from then on.
    3. What is written is not borrowed for that, nor what operations read while modules run in another thread: each
       has as little as it can.
    4. While Dynamo traces, no net is on: it runs what it traces of torch.func, which forbids hooks. From its end on the
       net of the call is that has borrowed for the compiled function.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import math
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from gemini_strategy import _C, _torch
from gemini_strategy.errors import GeminiMemoryError
from gemini_strategy.parameters import patches

if TYPE_CHECKING:
    from gemini_strategy.parameters.hooks import Unit
    from gemini_strategy.parameters.slot import Slot
    from gemini_strategy.runtime import Runtime


def _running(slot: Slot) -> tuple[Unit, Any, list[Any]] | None:
    """(one of its units, the call of the innermost running module that has that below it, what it has borrowed)."""
    for unit in slot.units:
        found = _C.running(unit)
        if found is not None:
            return unit, *found
    return None


_PATIENCE = 10.0  # seconds for which a thread waits for what another one has borrowed


class _Here(threading.local):
    """Of a thread: whether it enters a unit to borrow it for an operation or an address; and the units that what
    Dynamo compiles now has borrowed, whose borrower gets a net after that."""

    def __init__(self) -> None:
        self.borrows = False
        self.units: list[Unit] = []


_here = _Here()


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


def _without_nets(original: Any) -> Any:
    """Dynamo's context around what it compiles, in the thread that does."""

    @contextlib.contextmanager
    @functools.wraps(original)
    def compiling(*args: Any, **kwargs: Any) -> Iterator[None]:
        taken, before, _here.units = take_nets(), _here.units, []
        try:
            with original(*args, **kwargs):
                yield
        finally:
            put_nets(taken)
            units, _here.units = _here.units, before
            for unit in units:
                _catch_saved(unit)

    return compiling


def _catch_saved(unit: Unit) -> None:
    """Not in a node of a backward: torch ends with it what hooks it has."""
    watch_compiler()
    if _torch.current_task() == -1:
        _C.catch_saved(unit)


def watch_compiler() -> None:
    """Is there while Dynamo traces, if a program has imported it."""
    callbacks = _torch.compiler_callbacks()
    if callbacks is not None:
        patches.add(callbacks, "install_callbacks", _without_nets)


class Use(enum.Enum):
    """What a parameter is borrowed for."""

    OPERATION = "operation"
    ADDRESS = "address"
    COMPILED = "compiled"  # a function: from now on the module borrows it when it begins


def borrow(slot: Slot, use: Use = Use.OPERATION) -> bool:
    """Enters its unit until the innermost running module leaves that has it; whether it did.

    Raises:
        GeminiMemoryError: there is no room for what a compiled function uses.
    """
    if slot.open_count or slot.engine.closed:
        return False
    found = _running(slot)
    if found is None or found[0].is_compiled or found[0].n_entered:
        return False
    unit, call, borrowed = found
    if use is Use.OPERATION and (call.lacks_room or _C.others_run()):
        return False
    call.net = slot.net
    if use is Use.COMPILED:
        watch_compiler()
        unit.is_compiled_use = True
        if call.borrow_from_now_on(slot):  # the compiler runs
            _here.units.append(unit)
    borrowed.append(unit)  # before: an interrupt finds it there
    _here.borrows = use is not Use.COMPILED
    try:
        unit.borrow(use is Use.COMPILED)
    except GeminiMemoryError:
        borrowed.remove(unit)
        unit.leave()
        if use is Use.COMPILED:
            raise
        call.lacks_room = True
        return False
    finally:
        _here.borrows = False
    if use is not Use.COMPILED:
        _catch_saved(unit)
    if use is Use.OPERATION:
        slot.engine.borrowers.add(call)
    return True


def judge(engine: Runtime, is_planned: bool) -> None:
    """After a step: where no plan has room for what operations hold, they are served one by one."""
    if not is_planned:
        for call in engine.borrowers:
            call.lacks_room = True
        engine.borrowers.clear()


def make_room(engine: Runtime) -> bool:
    """A chunk finds no room: whether there is more now."""
    if _here.borrows:
        return engine.make_room()
    return _give_back() or engine.make_room() or _await_others()


def _give_back() -> bool:
    """Lets those leave that this thread has borrowed for operations; whether there were any.

    From then on each operation of such a module is served by itself, as a plan knows it.
    """
    is_left = False
    for call, borrowed in _C.borrowed()[0]:
        for unit in [each for each in borrowed if isinstance(each, _C.Unit)]:
            has_address = unit.is_compiled_use or any(s.is_watched for s in unit.slots)
            if unit.n_entered == 1 and not has_address:
                borrowed.remove(unit)
                unit.leave()
                call.lacks_room = is_left = True
    return is_left


def _await_others() -> bool:
    """Whether another thread has given something back in time. It may wait for this one: not for ever."""
    n_before, end = _C.borrowed()[1], time.monotonic() + _PATIENCE
    while n_before and time.monotonic() < end:
        time.sleep(0.001)
        if _C.borrowed()[1] < n_before:
            return True
    return False


def for_node(slot: Slot) -> torch.Tensor | None:
    """Its bytes, until another node of the backward asks, where a node runs and no module that has it below it.

    What is computed again in a node may be many modules, which would keep it all.
    """
    if _torch.current_task() == -1 or not math.prod(slot.shape) or _running(slot) is not None:
        return None
    shown: torch.Tensor = slot.units[0].show(slot)
    return shown


def at_hand(slot: Slot) -> torch.Tensor | None:
    """Its bytes, which stay where they are while the innermost running module does that has it, or the node of a
    backward; None: nothing of that runs."""
    shown = for_node(slot)
    if shown is not None:
        slot.expose(shown)
        return shown
    found = _running(slot)
    if found is None:
        return None
    lease = slot.lease()
    found[2].append(lease)
    return lease
