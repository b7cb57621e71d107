"""Runs a program in a fork (helpers/forked.py) as `python` would run it: a fresh `__main__`, a folder, arguments.

The fork ends as a process does: threads that are no daemons are waited for, then what is registered with atexit runs.
What a driver or launcher starts with this Python, where `started` or `launched` runs it, is a fork of it: it has
imported what that has.
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from helpers.forked import TESTS

__all__ = ["imported", "launched", "run", "started"]

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
        elif code := _code(folder, words):
            raise RuntimeError(f"it ended with {code}")
        sys.stdout.flush()
        out.seek(0)
        return out.read().decode()


def started(
    folder: str, words: list[str], paths: list[str], environment: dict[str, str]
) -> tuple[int, str, str]:
    """What stands after `python`, done in `folder` with `paths` in PYTHONPATH; so are the Pythons that it starts.

    Returns:
        The number that it ended with, its standard output and its standard error.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        code = _launch(folder, words, paths, environment, out.fileno(), err.fileno())
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode())
    return code, said[0], said[1]


def launched(
    folder: str, words: list[str], paths: list[str], environment: dict[str, str], said: str
) -> int:
    """Like `started`; all that is said goes to a file, which also has the words of who is killed."""
    with open(said, "wb") as file:
        return _launch(folder, words, paths, environment, file.fileno(), file.fileno())


def _launch(
    folder: str, words: list[str], paths: list[str], environment: dict[str, str], out: int, err: int
) -> int:
    subprocess.Popen.__init__ = _start  # of the class itself, which others have by its name
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), **environment}
    os.dup2(out, 1)
    os.dup2(err, 2)
    return _code(folder, words)


def imported(modules: list[str]) -> list[str]:
    """Those of them that the process that forks has imported."""
    return [name for name in modules if name in sys.modules]


_start_any = subprocess.Popen.__init__


def _start(self: Any, args: Any, *more: Any, **how: Any) -> None:
    """A process of this Python is a fork that never comes to start it; others are as always."""
    if isinstance(args, (list, tuple)) and args[0] == sys.executable:
        how["preexec_fn"] = functools.partial(_become, list(map(str, args[1:])), how.get("env"))
        sys.stdout.flush()
        sys.stderr.flush()
    _start_any(self, args, *more, **how)


def _become(words: list[str], environment: Mapping[str, str] | None) -> None:
    """In the fork: runs what stands after `python`, and ends; never returns."""
    os.closerange(3, 1 << 16)  # whoever starts it waits until one of them is closed
    gc.enable()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    # What the other process has to do at its end is not for this one.
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    code = 1
    try:
        code = _code(str(Path.cwd()), words)
    finally:
        os._exit(code)


def _code(folder: str, words: list[str]) -> int:
    """Runs it; what a process would end with, and says what it would say of an error."""
    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [path for path in added if path not in sys.path]
    words = words[1:] if words[0] == "-u" else words
    code = _python(folder, words)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _python(folder: str, words: list[str]) -> int:
    os.chdir(folder)
    tests = {str(TESTS), str(TESTS / "unit")}
    sys.path[:] = [entry for entry in sys.path if entry not in ("", *tests)]
    code = 0
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
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return code


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
        code = _python(folder, words)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
