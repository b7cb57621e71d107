"""Runs a program in a fork (helpers/forked.py) as `python` would run it: a fresh `__main__`, a folder, arguments.

The fork ends as a process does: threads that are no daemons are waited for, then what is registered with atexit runs.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from types import ModuleType

from helpers.forked import TESTS

__all__ = ["run"]

LONGEST = 200  # seconds of a rank whose process was ended from outside


def run(folder: str, words: list[str], ranks: int = 0) -> str:
    """What stands after `python`, done in `folder`; with `ranks`, in as many processes as torchrun would start.

    Returns:
        Its standard output.

    Raises:
        RuntimeError: it ended with another number than 0.
    """
    with tempfile.TemporaryFile() as out:
        os.dup2(out.fileno(), 1)
        if ranks:
            _torchrun(folder, words, ranks)
        else:
            _python(folder, words)
        sys.stdout.flush()
        out.seek(0)
        return out.read().decode()


def _python(folder: str, words: list[str]) -> None:
    os.chdir(folder)
    tests = {str(TESTS), str(TESTS / "unit")}
    sys.path[:] = [entry for entry in sys.path if entry not in ("", *tests)]
    try:
        if words[0] == "-m":
            sys.path.insert(0, folder)
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            script = Path(words[0])
            sys.path.insert(0, str(script.resolve().parent))
            sys.argv = list(words)
            main = ModuleType("__main__")
            main.__file__ = str(script.resolve())
            sys.modules["__main__"] = main
            exec(compile(script.read_text(), main.__file__, "exec"), vars(main))
    except SystemExit as end:
        if end.code not in (None, 0):
            raise RuntimeError(f"it ended with {end.code}") from end
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def _torchrun(folder: str, words: list[str], ranks: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    count = str(ranks)
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": count}
    os.environ |= {**here, "LOCAL_WORLD_SIZE": count}
    running = set()
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            _rank(folder, words, rank)
        running.add(pid)
    failed = []
    while running:
        pid, status = os.wait()
        running.discard(pid)
        if status and not failed:
            failed.append(os.waitstatus_to_exitcode(status))
            for other in running:
                os.kill(other, signal.SIGKILL)
    if failed:
        raise RuntimeError(f"a rank ended with {failed[0]}")


def _rank(folder: str, words: list[str], rank: int) -> None:
    """In the rank's process: never returns."""
    code = 1
    try:
        signal.alarm(LONGEST)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        _python(folder, words)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
