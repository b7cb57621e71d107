"""Threads for the bytes of a checkpoint: checksums and records take one processor longer than the disk takes.

Invariants
    1. At most `_MOST` pieces of work are handed over and not done: the call that hands over another one waits.
    2. The first error of a thread is raised by the next call of `put` or `finish`; nothing is begun after it.
    3. The threads are started with the first piece of work, and have ended when `finish` or `close` returns.
    4. What a signal's handler raises while a call waits here leaves no lock behind that a thread waits for: what is
       waited on is a queue in C. Those of `threading` are Python, and stay locked where they are interrupted.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable

from gemini_strategy import _C

_MOST = 4


class Thread(threading.Thread):
    """A thread for which an interrupted wait is harmless: threading's own counts as ended then."""

    def __init__(
        self, target: Callable[..., object], args: tuple[object, ...] = (), name: str = ""
    ):
        super().__init__(target=target, args=args, name=name, daemon=False)
        self._is_over = False
        self._ends: queue.SimpleQueue[None] = queue.SimpleQueue()

    def start(self) -> None:
        _C.uninterrupted(super().start)

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._is_over = True
            self._ends.put(None)

    def join(self, timeout: float | None = None) -> None:
        if self.is_alive() and not self._is_over:
            with contextlib.suppress(queue.Empty):
                self._ends.get(timeout=timeout)
                self._ends.put(None)  # for others that wait
        if self.is_alive() and self._is_over:
            super().join()


class Threads:
    """Does work in threads of its own, in no order."""

    def __init__(self) -> None:
        self._todo: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()  # as many as may be handed over
        self._threads: list[Thread] = []
        self._error: BaseException | None = None

    def put(self, work: Callable[[], object]) -> None:
        """Hands `work` over; waits until there is room for it.

        Raises:
            BaseException: what earlier work has raised.
        """
        if not self._threads:
            _C.uninterrupted(self._start)
        self._room.get()
        self._check()
        self._todo.put(work)

    def _start(self) -> None:
        n = min(_MOST, len(os.sched_getaffinity(0)))
        self._threads = [Thread(self._run, name="checkpoint") for _ in range(n)]
        for thread in self._threads:
            thread.start()
        for _ in range(_MOST):
            self._room.put(None)

    def finish(self) -> None:
        """All work is done afterwards.

        Raises:
            BaseException: what it has raised.
        """
        self.close()
        self._check()

    def close(self) -> None:
        """As `finish`, and raises nothing. Idempotent."""
        for _ in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (work := self._todo.get()) is not None:
            try:
                if self._error is None:
                    work()
            except BaseException as error:
                self._error = self._error or error
            finally:
                del work  # it holds a tensor
                self._room.put(None)
