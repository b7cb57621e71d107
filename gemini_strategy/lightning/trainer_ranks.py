# What only the ranks of a Trainer do: answer a signal together, and end together.
#
# A class for the strategy of each Lightning tree to inherit from; nothing here imports Lightning.
#
# Invariants
#   1. What a rank alone sees (an error, a signal) decides nothing before the others know of it.
#   2. A rank that fails leaves no other waiting; the process that launched the others does not leave them behind.

import atexit
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterable
from typing import Any

from gemini_strategy.lightning.ranks import RankProcesses

# What launched ranks have, after an error in the process that launched them, to say theirs and to end.
GRACE = 20.0


class TrainerRanks(RankProcesses):
    """To be inherited from before the tree's `ParallelStrategy`."""

    _runner = "Trainer"
    engine: Any
    _has_started = False  # the stage's own loop runs, no search in a hook before it
    _requeue: "_Requeue | None" = None

    def _engines(self) -> Iterable[Any]:
        return () if self.engine is None else (self.engine,)

    def barrier(self, name: str | None = None) -> None:
        super().barrier(name)
        # "run-stage" is the Trainer's last call before the loop; it has its signal handlers. The batch size finder
        # trains before it, in on_fit_start, and goes on after an error in backward.
        if name == "run-stage":
            self._has_started = True
            self._defer_requeue()

    def _defer_requeue(self) -> None:
        """Take the signal by which SLURM asks for a checkpoint: it finds each rank at another place."""
        environment = self.cluster_environment
        asked_by = getattr(environment, "requeue_signal", None)
        self._requeue = None
        if not self.is_distributed or not getattr(environment, "auto_requeue", False):
            return
        if threading.current_thread() is threading.main_thread() and asked_by is not None:
            self._requeue = _Requeue(asked_by)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)  # type: ignore[misc]
        requeue = self._requeue
        if requeue is not None and self.reduce_boolean_decision(requeue.is_asked, all=False):
            requeue.answer()

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)  # type: ignore[misc]
        if not self.is_distributed:
            return
        engine = self.engine
        if engine is not None:
            engine.ranks.abort(f"{type(exception).__name__}: {exception}")
        launched = getattr(self.launcher, "procs", None)
        if launched:
            atexit.register(end_processes, list(launched))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_requeue": None}


class _Requeue:
    """Lightning's own answer to a signal, put off until all ranks can give it together."""

    def __init__(self, signum: signal.Signals) -> None:
        self.is_asked = False
        self._signum = signum
        self._handler: Any = signal.getsignal(signum)
        signal.signal(signum, self._note)

    def _note(self, signum: int, frame: Any) -> None:
        self.is_asked = True

    def answer(self) -> None:
        self.is_asked = False
        if callable(self._handler):
            self._handler(self._signum, None)


def end_processes(processes: Iterable[subprocess.Popen[Any]], grace: float = GRACE) -> None:
    """Wait for processes, and kill those that have not ended after `grace` seconds (a stopped one never does)."""
    end = time.monotonic() + grace
    for process in processes:
        try:
            process.wait(max(end - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
