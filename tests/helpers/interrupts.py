"""Signals that come at chosen places: at the n-th step of a call at which Python looks for them."""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


class Stop(BaseException):
    """What the handler raises, and nobody else."""


def arriving() -> Any:
    """A hook of a tensor in which a SIGINT arrives.

    No Python runs in it, so that the signal waits until some does, as one that arrives inside a kernel.
    """
    return ctypes.PYFUNCTYPE(None, ctypes.py_object)(("PyErr_SetInterrupt", ctypes.pythonapi))


@contextlib.contextmanager
def handled(number: int = signal.SIGUSR1) -> Iterator[None]:
    """The signal's handler raises Stop."""

    def stop(*_: Any) -> None:
        raise Stop

    before = signal.signal(number, stop)
    try:
        yield
    finally:
        signal.signal(number, before)


class _Arrival:
    """A profile function: where it is called, Python might have handled a signal, too.

    That is where a function begins, and where one of C has returned. Not where a generator goes on: closing one looks
    the same, and no signal is handled there.
    """

    def __init__(self, n: int | None) -> None:
        self._n = n
        self.count = 0

    def __call__(self, frame: FrameType, event: str, what: Any) -> None:
        is_generator = bool(frame.f_code.co_flags & inspect.CO_GENERATOR)
        if event == "c_return" or (event == "call" and not is_generator):
            self.count += 1
            if self.count == self._n:
                signal.raise_signal(signal.SIGUSR1)


def _run(act: Callable[[], Any], n: int | None) -> tuple[int, bool]:
    arrival = _Arrival(n)
    try:
        sys.setprofile(arrival)
        try:
            act()
        finally:
            sys.setprofile(None)
    except Stop:
        return arrival.count, True
    return arrival.count, False


def places(act: Callable[[], Any]) -> int:
    """At how many places a signal could come in the call."""
    count, was_stopped = _run(act, None)
    assert not was_stopped
    return count


def interrupted(act: Callable[[], Any], n: int) -> bool:
    """Runs `act` with a signal at its n-th place; whether there was one. What its handler raises has to be raised."""
    with handled():
        count, was_stopped = _run(act, n)
    assert was_stopped == (count >= n), f"the signal at {n} of {count} was lost"
    return was_stopped
