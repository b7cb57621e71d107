"""A process of its own for each job, without the seconds that starting one takes.

`Forks` starts one process that imports torch and the package and then only forks: each job runs in a fork of it, so a
crash, a patch of torch or an engine that is dead in one job does not reach another. The process starts no threads
(OpenMP's pool among them), as a fork would lack them. A job is a function by name, its arguments are pickled, and with
several ranks it runs once in each of as many forks. Run as a program, this file is that process.

Unless told otherwise that process has trained a managed model once (helpers/warm.py), so that no fork pays for what the
first engine of a process sets up.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

TESTS = Path(__file__).resolve().parents[1]
RATES = "h2d=55e9,d2h=54e9"
# torch's optimizers import torch._dynamo when the first is made, and a save torch.distributed.checkpoint: each takes a
# second.
PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.func",
    "numpy",
    "safetensors.torch",
    "gemini_strategy",
)


@dataclass
class Ended:
    """How a job ended: what it returned, or the text of what it raised, or neither: it died."""

    exit_code: int
    value: Any = None
    error: str | None = None
    output: str = ""  # the end of what it printed

    @property
    def how(self) -> str:
        """In words, where there is no value."""
        if self.error is not None:
            return self.error
        if self.exit_code < 0:
            how = f"the process was ended by {signal.Signals(-self.exit_code).name}"
        else:
            how = f"the process ended with {self.exit_code} before it was done"
        return f"{how}\n{self.output}"


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
        modules = [*PRELOADED, *preload, *(["helpers.warm"] if has_had_engine else [])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "helpers.forked", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )

    def run(
        self,
        job: str,
        *args: Any,
        ranks: int = 1,
        timeout: float = 60.0,
        environment: dict[str, str] | None = None,
    ) -> list[Ended]:
        """job ("module:function") with these arguments, after the number of its rank where there are several."""
        assert self._process.stdin is not None and self._process.stdout is not None
        _send(self._process.stdin, (job, args, ranks, timeout, environment or {}))
        return _receive(self._process.stdout)

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10.0)

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


def _main() -> None:
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints does not print into the channel
    for name in sys.argv[1:]:
        importlib.import_module(name)
    # A collection in a fork would walk all that was imported, and by that copy most of its pages.
    gc.collect()
    gc.freeze()
    while True:
        try:
            request = _receive(sys.stdin.buffer)
        except EOFError:
            return
        _send(channel, _serve(*request))


if __name__ == "__main__":
    # Under its real name, so that what is pickled here is known there.
    importlib.import_module("helpers.forked")._main()
