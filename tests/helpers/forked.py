"""A process of its own for each job, without the seconds that starting one takes.

`Forks` has a process that has imported torch and the package and only forks: each job runs in a fork of it, so a
crash, a patch of torch or an engine that is dead in one job does not reach another. The process starts no threads
(OpenMP's pool among them), as a fork would lack them. A job is a function by name, its arguments are pickled, and with
several ranks it runs once in each of as many forks.

Unless told otherwise that process has trained a managed model once (helpers/warm.py), so that no fork pays for what the
first engine of a process sets up.

It is itself a fork. One process of each of ours has imported torch, and stays; a fork of that has trained, and forks of
either have what else tests ask for. So what takes seconds happens once, however many files of tests want it. Run as a
program, this file is the first of them.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

TESTS = Path(__file__).resolve().parents[1]
RATES = "h2d=55e9,d2h=54e9"
MANY = 64  # jobs of one process, from which on they shall cost less: see helpers/huge_pages.py
# torch's optimizers import torch._dynamo when the first is made, and a save torch.distributed.checkpoint: each takes a
# second.
PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.func",
    "numpy",
    "pytest",
    "safetensors.torch",
    "helpers.seeds",
    "gemini_strategy",
)


@dataclass
class Ended:
    """How a job ended: what it returned, or the text of what it raised, or neither: it died (None: had no time)."""

    exit_code: int | None
    value: Any = None
    error: str | None = None
    output: str = ""  # the end of what it printed

    @property
    def how(self) -> str:
        """In words, where there is no value."""
        if self.error is not None:
            return self.error
        if self.exit_code is None:
            how = "the process was not done in time"
        elif self.exit_code < 0:
            how = f"the process was ended by {signal.Signals(-self.exit_code).name}"
        else:
            how = f"the process ended with {self.exit_code} before it was done"
        return f"{how}\n{self.output}"


def values(ended: list[Ended]) -> list[Any]:
    """What the ranks returned; fails with how each rank ended that returned nothing, those that died first."""
    failed = [(r, e) for r, e in enumerate(ended) if e.error is not None or e.exit_code != 0]
    failed.sort(key=lambda one: one[1].error is not None)
    assert not failed, "\n".join(f"rank {rank}: {end.how}" for rank, end in failed)
    return [end.value for end in ended]


class _Server:
    """A process that takes requests: jobs, and to fork another such process."""

    def __init__(self, requests: BinaryIO, answers: BinaryIO) -> None:
        self._requests, self._answers = requests, answers
        self._lock = threading.Lock()
        atexit.register(self.close)

    def ask(self, *request: Any) -> Any:
        """One at a time, whichever thread asks."""
        with self._lock:
            _send(self._requests, request)
            return _receive(self._answers)

    def fork(self, paths: list[str], modules: list[str], environment: dict[str, str]) -> _Server:
        """Another one, which has imported these modules beside, with this environment."""
        with tempfile.TemporaryDirectory() as folder:
            pipes = [f"{folder}/requests", f"{folder}/answers"]
            for pipe in pipes:
                os.mkfifo(pipe)
            self.ask(_FORK, pipes, paths, modules, environment)
            return _Server(open(pipes[0], "wb"), open(pipes[1], "rb"))

    def close(self) -> None:
        """Ends it; returns when it has ended. Any number of times."""
        if self._requests.closed:
            return
        self._requests.close()
        select.select([self._answers], [], [], 10.0)  # what a job has left behind may have it, too
        self._answers.close()


# Servers to fork others from, by what they may see and what they have imported beside PRELOADED; they stay.
_parents: dict[tuple[Any, ...], _Server] = {}
_parents_lock = threading.Lock()


def _parent(environment: dict[str, str], modules: tuple[str, ...]) -> _Server:
    visible = environment.get("CUDA_VISIBLE_DEVICES") if Path("/dev/nvidia0").exists() else None
    key = (os.getpid(), visible, *modules)
    if key in _parents:
        return _parents[key]
    if modules:
        made = _parent(environment, modules[:-1]).fork([], [modules[-1]], environment)
    else:
        process = subprocess.Popen(
            [sys.executable, "-m", "helpers.forked", *PRELOADED],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        assert process.stdin is not None and process.stdout is not None
        atexit.register(process.wait, 60.0)
        made = _Server(process.stdin, process.stdout)
    _parents[key] = made
    return made


class Forks:
    """The process that forks; one job at a time, from one thread."""

    def __init__(
        self,
        folders: tuple[Path, ...] = (),
        preload: tuple[str, ...] = (),
        *,
        has_had_engine: bool = True,
    ) -> None:
        environment = dict(os.environ)
        environment |= {
            "OMP_NUM_THREADS": "1",
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asks for a GPU without a context
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "GEMINI_RATES": environment.get("GEMINI_RATES", RATES),
        }
        paths = [str(TESTS.parent), str(TESTS), *map(str, folders)]
        environment["PYTHONPATH"] = os.pathsep.join([*paths, environment.get("PYTHONPATH", "")])
        own = [name for name in preload if any((f / f"{name}.py").exists() for f in folders)]
        shared = tuple(name for name in preload if name not in own)
        with _parents_lock:
            parent = _parent(environment, ("helpers.warm",) * has_had_engine + shared)
        self._server = parent.fork([str(folder) for folder in folders], own, environment)

    def run(
        self,
        job: str,
        *args: Any,
        ranks: int = 1,
        timeout: float = 200.0,
        environment: dict[str, str] | None = None,
    ) -> list[Ended]:
        """job ("module:function") with these arguments, after the number of its rank where there are several."""
        return self._server.ask(job, args, ranks, timeout, environment or {})

    def close(self) -> None:
        """Ends the process."""
        self._server.close()

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _send(file: BinaryIO, value: Any) -> None:
    raw = pickle.dumps(value)
    file.write(len(raw).to_bytes(8, "little") + raw)
    file.flush()


def _receive(file: BinaryIO) -> Any:
    head = file.read(8)
    if len(head) < 8:
        raise EOFError("the process that forks has ended")
    return pickle.loads(file.read(int.from_bytes(head, "little")))


# ---- the process ---------------------------------------------------------------------------------


def _job(
    job: str, args: tuple[Any, ...], rank: int, ranks: int, folder: str, pipe: int, env: dict
) -> None:
    """In the fork: does the job and leaves; never returns."""
    code = 1
    try:
        os.environ.update(env)
        output = os.open(f"{folder}/{rank}.output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(output, stream)
        if ranks > 1:
            let_finish()
            _join(rank, ranks, folder)
            args = (rank, *args)
        module, _, name = job.partition(":")
        ended = Ended(0, getattr(importlib.import_module(module), name)(*args))
        raw = pickle.dumps(ended)
        code = 0
    except BaseException:
        raw = pickle.dumps(Ended(1, error=traceback.format_exc()))
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if code == 0:
            while raw:
                raw = raw[os.write(pipe, raw) :]
        os._exit(code)  # an orderly end would wait for other ranks and for threads


def let_finish() -> None:
    """Of the calling rank and of threads that it starts: none takes a core from another when it is woken.

    Gloo's loop wakes while the thread that sends holds the lock of a connection, and asks again and again until it gets
    it: with more ranks than cores, most of the ranks' time went there.
    """
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _join(rank: int, ranks: int, folder: str) -> None:
    from datetime import timedelta

    import torch.distributed as dist

    store = dist.FileStore(f"{folder}/store", ranks)
    patience = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=patience)


def _serve(job: str, args: tuple[Any, ...], ranks: int, timeout: float, env: dict) -> list[Ended]:
    with tempfile.TemporaryDirectory() as folder:
        pids, pipes = [], []
        for rank in range(ranks):
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(read)
                _job(job, args, rank, ranks, folder, write, env)
            os.close(write)
            pids.append(pid)
            pipes.append(read)
        said = dict.fromkeys(pipes, b"")
        waiting, end = set(pipes), time.monotonic() + timeout
        while waiting and time.monotonic() < end:
            for pipe in select.select(list(waiting), [], [], max(0.0, end - time.monotonic()))[0]:
                part = os.read(pipe, 1 << 20)
                said[pipe] += part
                if not part:
                    waiting.discard(pipe)
        ended = []
        for rank, (pid, pipe) in enumerate(zip(pids, pipes, strict=True)):
            is_late = pipe in waiting
            if is_late:
                os.kill(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.close(pipe)
            output = Path(f"{folder}/{rank}.output")
            tail = output.read_text(errors="replace")[-3000:] if output.exists() else ""
            if is_late:
                ended.append(Ended(code, error=f"not done after {timeout:g} s\n{tail}"))
                continue
            one = pickle.loads(said[pipe]) if said[pipe] else Ended(code)
            one.output = tail
            ended.append(one)
        return ended


_FORK = "fork"  # in the place of a job


def _begin(
    pipes: list[str], paths: list[str], modules: list[str], environment: dict[str, str]
) -> tuple[BinaryIO, BinaryIO]:
    """In a fork that takes requests itself: where they come from and where answers go."""
    requests, answers = open(pipes[0], "rb"), open(pipes[1], "wb")  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = paths
    _import(modules)
    return requests, answers


def _import(modules: list[str]) -> None:
    for name in modules:
        importlib.import_module(name)
    # A collection in a fork would walk all that was imported, and by that copy most of its pages.
    gc.collect()
    gc.freeze()


def _main() -> None:
    requests: BinaryIO = sys.stdin.buffer
    answers: BinaryIO = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints does not print into the channel
    _import(sys.argv[1:])
    n_jobs = 0
    while True:
        try:
            job, *request = _receive(requests)
        except EOFError:
            break
        if job != _FORK:
            n_jobs += 1
            if n_jobs == MANY:
                importlib.import_module("helpers.huge_pages")
            _send(answers, _serve(job, *request))
        elif os.fork():
            _send(answers, None)
        else:  # whoever waits for the others' ends shall not wait for this one
            requests.close()
            answers.close()
            requests, answers = _begin(*request)
    answers.close()
    with contextlib.suppress(ChildProcessError):  # the processes that were forked end before it
        while True:
            os.wait()


if __name__ == "__main__":
    # Under its real name, so that what is pickled here is known there.
    importlib.import_module("helpers.forked")._main()
