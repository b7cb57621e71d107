"""Programs that `gemini-strategy run` is given: which this Python runs, and those that get a process of their own.

Invariants
    1. What runs beside this process gets its signals, ends before it, and ends with it, however that ends.
    2. A terminal's signals go to both already, and are not passed on.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

_PYTHONS = (".py", ".pyc", ".pyw", ".pyz", ".zip")
_PR_SET_PDEATHSIG = 1
_PASSED_ON = {
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
}


def find(word: str) -> tuple[str, bool]:
    """What a person means by a word: a file, else a program, as a shell finds it.

    Returns:
        Its path, and whether this Python can run it.

    Raises:
        FileNotFoundError: there is neither.
    """
    path = Path(word)
    if path.is_file() or (path / "__main__.py").is_file():
        interpreter = None if path.suffix in _PYTHONS else _interpreter(path)
        return str(path.absolute()), interpreter is None or "python" in Path(interpreter).name
    found = None if os.sep in word else shutil.which(word)
    if found is None:
        raise FileNotFoundError(word)
    interpreter = _interpreter(Path(found))
    here = Path(sys.executable).parent.resolve()
    return found, interpreter is not None and Path(interpreter).parent.resolve() == here


def _interpreter(path: Path) -> str | None:
    """What the first line of a file names, or "" for a file of machine code; None: it says nothing."""
    if path.is_dir():
        return None
    with open(path, "rb") as file:
        first = file.readline(512)
    if first.startswith(b"\x7fELF"):
        return ""
    if not first.startswith(b"#!"):
        return None
    words = os.fsdecode(first[2:]).split() or [""]
    if Path(words[0]).name == "env":
        name = next((w for w in words[1:] if not w.startswith("-") and "=" not in w), "")
        return shutil.which(name) or name
    return words[0]


def run_beside(
    path: str, words: Sequence[Any], environment: Mapping[Any, Any] | None = None
) -> int:
    """Runs a program in a process of its own, and waits for it.

    Args:
        path: its file.
        words: its arguments, with its own name first.
        environment: None: this process's.

    Returns:
        Its exit status, or minus the number of the signal that ended it.

    Raises:
        OSError: it cannot be started.
    """
    libc, pid = ctypes.CDLL(None), os.getpid()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    waited = {signal.SIGCHLD, *_PASSED_ON}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)

    def begin() -> None:  # in the new process
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != pid:  # it was killed before that
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        child = subprocess.Popen(
            list(words),
            executable=path,
            env=environment,
            close_fds=False,
            restore_signals=False,
            preexec_fn=begin,
        )
        if threading.current_thread() is not threading.main_thread():
            return child.wait()  # signals come to the main thread
        while child.poll() is None:
            came = signal.sigtimedwait(waited, 1.0)
            # Of the kernel's, a terminal's among them, the code is positive.
            if came is not None and came.si_signo in _PASSED_ON and came.si_code <= 0:
                child.send_signal(came.si_signo)
        return child.returncode
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def staying(end: Callable[[int], int]) -> Iterator[None]:
    """Inside, a program that is to take the place of this process runs beside it.

    So this process can say what came of it, and ends as that does.

    Args:
        end: is told how it ended, as run_beside() returns that, and returns the status for this process.
    """
    pid = os.getpid()
    execv, execve = os.execv, os.execve

    def stay(path: Any, words: Any, environment: Any, plain: Callable[[], NoReturn]) -> NoReturn:
        if os.getpid() != pid or isinstance(path, int):  # a fork's place, or a file by its number
            plain()
        status = end(run_beside(os.fspath(path), words, environment))
        sys.stdout.flush()
        sys.stderr.flush()
        if status < 0:
            with contextlib.suppress(OSError):  # of SIGKILL there is no other
                signal.signal(-status, signal.SIG_DFL)
            os.kill(pid, -status)
        os._exit(status if status >= 0 else 128 - status)  # as it would be after exec: no handlers

    def stay_v(path: Any, words: Any) -> NoReturn:
        stay(path, words, None, lambda: execv(path, words))

    def stay_ve(path: Any, words: Any, environment: Any) -> NoReturn:
        stay(path, words, environment, lambda: execve(path, words, environment))

    os.execv, os.execve = stay_v, stay_ve  # type: ignore[assignment]
    try:
        yield
    finally:
        os.execv, os.execve = execv, execve
