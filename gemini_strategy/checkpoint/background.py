"""Saving while training goes on: a thread of each rank writes its part of what there was when it was asked for.

Invariants
    1. What the core has is read as it was at the call, or not at all (csrc/engine/saving.c): a chunk that changes
       before it has been written is copied as it was. Everything else (buffers, steps,
       groups, the loss scale, random numbers, `extra`) is in the rank's file when the call returns.
    2. Copies take at most `limit` bytes, or one chunk's if that is larger. Chunks with a copy are written before all
       others, and a thread that waits for one waits for the disk alone: the writer waits for no other rank before it
       has written all chunks.
    3. The ranks' writers meet over connections of their own (Ranks.twin), after their last chunk. The folder gets its
       name there, so `latest` never names what is not on the disk.
    4. What a writer met is raised once: by `wait`, the next save or load, or close(); if none of them comes, it is said
       when the process ends. The process does not end before the writer.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemini_strategy import _C
from gemini_strategy.checkpoint.parts import Piece, pieces, write_rest
from gemini_strategy.checkpoint.save import Wanted, Writing
from gemini_strategy.checkpoint.threads import Thread
from gemini_strategy.checkpoint.together import together
from gemini_strategy.errors import GeminiError
from gemini_strategy.ranks.ranks import Ranks
from gemini_strategy.weakly import WeakSet

if TYPE_CHECKING:
    from gemini_strategy.runtime import Runtime

_SHARE = 0.5  # of the host's memory that is left, for copies
_LESS = 10  # that a writer's thread is nicer than training
_all: WeakSet[Saving] = WeakSet()


@dataclass(frozen=True)
class _Work:
    """What a writer's thread has to do. It alone holds this: a Saving may be kept for long.

    Attributes:
        ranks: where the writers meet.
        todo: by chunk, what is to be written.
        beside: what is written already.
    """

    runtime: Runtime
    writing: Writing
    ranks: Ranks
    todo: dict[int, deque[Piece]]
    beside: dict[str, Any]


def save_in_background(runtime: Runtime, wanted: Wanted) -> Saving:
    """See Engine.save and save.save."""
    writing = Writing(runtime, wanted)
    ranks, part = runtime.ranks, writing.part
    twin: Ranks | None = None
    try:
        todo: dict[int, deque[Piece]] = {}
        for field in writing.fields:
            part.begin_field(field)
            for piece in pieces(runtime, field):
                todo.setdefault(runtime.core.chunk(field.slot.id)[0], deque()).append(piece)

        def rest() -> dict[str, Any]:
            writing.write_meta(wanted.meta)
            return write_rest(runtime, writing.model, part, wanted.extra, wanted.with_optimizer)

        beside = together(ranks, writing.what, rest)
        twin = ranks.twin()
        ids = [own[0].field.slot.id for own in todo.values()]
        limit = int(_C.host_topology("")["memory"] * _SHARE) // ranks.local_size
        together(ranks, writing.what, lambda: runtime.core.save_begin(ids, limit))
        return Saving(_Work(runtime, writing, twin, dict(sorted(todo.items())), beside))
    except BaseException:
        if runtime.saving is not None and not runtime.saving.done:
            raise  # an interrupt: the writer goes on
        runtime.saving = None
        with contextlib.suppress(GeminiError):
            runtime.core.save_end()
        if twin is not None and twin is not ranks:
            twin.close()
        writing.close()
        raise


def _stand_back() -> None:
    """The thread, and those that it starts, run where training leaves a processor: a step waits for its slowest one."""
    me = threading.get_native_id()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, me, os.getpriority(os.PRIO_PROCESS, me) + _LESS)


class Saving:
    """A checkpoint that is being written.

    Attributes:
        folder: what it will be.
        copied_bytes: that were copied so far because they changed before they were written; most_bytes: of these at one
            time. Known when it is done.
        waits: changes that had to wait for the disk.
    """

    def __init__(self, work: _Work) -> None:
        self.folder = work.writing.made
        self.copied_bytes = self.most_bytes = self.waits = 0
        # A text: an exception holds frames, and they what was to be written.
        self._error: str | None = None
        self._is_told = False
        self._lock = threading.Lock()
        self._acts: list[Callable[[], object]] = []
        self._is_over = False  # nothing is added to them any more
        self._pid = os.getpid()
        self._ranks = weakref.ref(work.runtime.ranks)
        _all.add(self)
        name = f"saving {self.folder.name}"
        self._thread = Thread(self._run, (work,), name)
        work.runtime.saving = self
        self._thread.start()

    @property
    def done(self) -> bool:
        """It is in its place on the disk, or has failed: `wait` does not wait any more."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Waits until it is in its place on the disk.

        Returns:
            Its folder.

        Raises:
            GeminiError: it could not be written, on which rank and why. The checkpoint before is whole.
        """
        self.join()
        if self._error is not None:
            self._is_told = True
            raise GeminiError(self._error)
        return self.folder

    def then(self, act: Callable[[], object]) -> None:
        """`act()` when it is in its place on the disk, in whatever thread; never, if it cannot be written."""
        with self._lock:
            if not self._is_over:
                self._acts.append(act)
                return
        if self._error is None:
            act()

    def join(self, seconds: float | None = None) -> None:
        """Waits, at most so long, and raises nothing."""
        ranks = self._ranks()
        if ranks is not None and seconds is None and not self.done:
            ranks.settle()  # another rank's writer may be in a collective that this thread has issued
        self._thread.join(seconds)

    def finish(self) -> None:
        """`wait`, unless its error has been raised already."""
        self.join()
        if not self._is_told:
            self.wait()

    def __repr__(self) -> str:
        how = "being written" if not self.done else self._error or "on the disk"
        return f"<Saving {self.folder}: {how}>"

    # ---- in the thread ----

    def _run(self, work: _Work) -> None:
        _stand_back()
        ranks, writing = work.ranks, work.writing
        try:
            try:
                own = together(ranks, writing.what, lambda: self._write(work))
                writing.publish(ranks, {**own, "rest": work.beside})
            finally:
                writing.close()
                if ranks is not work.runtime.ranks:
                    ranks.close()
            while self._next_act():
                pass
        except BaseException as error:
            is_ours = isinstance(error, GeminiError)
            self._error = str(error) if is_ours else f"{type(error).__name__}: {error}"
            with self._lock:
                self._is_over = True
                self._acts.clear()

    def _next_act(self) -> bool:
        with self._lock:
            act = self._acts.pop(0) if self._acts else None
            self._is_over = act is None
        if act is not None:
            act()
        return act is not None

    def _write(self, work: _Work) -> dict[str, Any]:
        core, todo, part = work.runtime.core, work.todo, work.writing.part
        try:
            while todo:
                chunk = core.save_next()
                chunk = next(iter(todo)) if chunk < 0 else chunk
                piece = todo[chunk][0]
                values = piece.field.read_saved(piece.first, piece.n)
                if values is None:
                    continue
                todo[chunk].popleft()
                part.put(piece, values)
                del values
                if not todo[chunk]:
                    del todo[chunk]
                    core.save_done(chunk)
        except BaseException:
            with contextlib.suppress(GeminiError):
                core.save_end()
            raise
        self.copied_bytes, self.most_bytes, self.waits = core.save_end()
        return part.finish()


@atexit.register
def _tell() -> None:
    """Errors that no call has raised."""
    for saving in list(_all):
        if saving._pid == os.getpid() and saving.done and saving._error and not saving._is_told:
            warnings.warn(
                f"a checkpoint was not written: {saving._error}", RuntimeWarning, stacklevel=2
            )
