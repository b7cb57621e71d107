"""Folders that are whole or not there: written under another name, made durable, then put in their place.

Invariants
    1. A folder of the given name is whole at every moment: the old one until the rename, the new one after it. Where
       the file system cannot exchange two names, the old one is `.NAME.old-*` for the moment between two renames, and
       `find` knows it.
    2. Before the rename all files and the folder itself are on the disk (fsync); after it the parent is.
    3. `latest` names a folder only when that is in its place and on the disk; folders that go, go after that.
    4. One at a time writes under a name: who does holds the lock of `.NAME.lock`, which ends with the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import os
import re
import secrets
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from gemini_strategy.errors import GeminiError

MANIFEST = "manifest.json"
LATEST = "latest"
_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)
_AT_FDCWD = -100
_SERIES = re.compile(r"step-\d{9,}(-\d+)?")


def local(path: str | os.PathLike[str]) -> Path:
    """`path`, of which folders can be renamed and brought to the disk.

    Raises:
        GeminiError: it is the address of something else.
    """
    if "://" in os.fspath(path):
        raise GeminiError(
            f"{os.fspath(path)} is no folder of a file system: save to one and copy it"
        )
    return Path(path)


def is_checkpoint(folder: Path) -> bool:
    """Whether `folder` is a checkpoint folder; a killed save leaves none."""
    return (folder / MANIFEST).is_file()


def sync(path: Path) -> None:
    """What a file has, or the names in a folder, is on the disk afterwards."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system without it for folders
            raise
    finally:
        os.close(descriptor)


class Claim:
    """The right to write under a name, until `release` or the end of the process.

    Its parent is made if it is not there.

    Raises:
        GeminiError: another process writes there now.
        OSError: there can be no lock.
    """

    def __init__(self, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        self._path = target.with_name(f".{target.name}.lock")
        while True:
            # A file, which closes itself: an interrupt before this has it leaves no lock.
            self._file = self._path.open("a")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_current():
                    return
            except BlockingIOError:
                raise GeminiError(
                    f"{target} is being saved by another engine: save when it is done, or under another name"
                ) from None
            self._file.close()  # its last holder has removed it

    def _is_current(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Idempotent."""
        if self._file.closed:
            return
        with contextlib.suppress(OSError):
            self._path.unlink()
        with contextlib.suppress(OSError):
            # A process that was forked meanwhile has the file open, too.
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()


class Draft:
    """A folder under another name, beside the one that it is to become. No other process saves there until its end.

    Args:
        target: where it goes; its parent is made if it is not there.
        objection: why what is there already may not be replaced; None: it may.
        claim: of the series that it is for, which ends with it; None: of the target.

    Attributes:
        target: where it goes.
        path: where to write.

    Raises:
        GeminiError: something else has the target's name, or another process saves there.
        OSError: it cannot be made.
    """

    def __init__(
        self, target: Path, objection: Callable[[Path], str | None], claim: Claim | None = None
    ) -> None:
        self.target = target
        is_empty = target.is_dir() and not any(target.iterdir())
        reason = objection(target) if target.exists() and not is_empty else None
        if is_empty and target == Path.cwd():
            reason = "is the current folder"
        if reason is not None:
            raise GeminiError(f"{target} {reason}: give another name, or remove it")
        target.parent.mkdir(parents=True, exist_ok=True)
        self._claim = Claim(target) if claim is None else claim
        try:
            clear(target, None if claim is None else _SERIES.pattern)
            self.path = other_name(target, "saving")
            self.path.mkdir()
        except BaseException:
            self._claim.release()
            raise

    def publish(self) -> None:
        """Puts the folder, the files of which are on the disk, into its place."""
        sync(self.path)
        put(self.path, self.target)

    def close(self) -> None:
        """Others may save there. What has not been published is not kept. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._claim.release()


def put(draft: Path, target: Path) -> None:
    """What is on the disk as `draft`, a file or a folder, gets the name `target`; what had it, is removed."""
    if not draft.is_dir() and not target.is_dir():
        draft.replace(target)
        sync(target.parent)
    elif not target.exists():
        draft.rename(target)
        sync(target.parent)
    else:
        old = draft
        if not rename_exchange(draft, target):
            old = other_name(target, "old")
            target.rename(old)
            draft.rename(target)
        sync(target.parent)
        remove(old)
    for old in _beside(target, "old"):
        remove(old)


@contextlib.contextmanager
def aside(target: Path) -> Iterator[None]:
    """Inside, other code may write a file of the name; a checkpoint folder that has it goes when the file is there.

    Until then `find` knows it.
    """
    if not is_checkpoint(target):
        yield
        return
    old = other_name(target, "old")
    target.rename(old)
    try:
        yield
    finally:
        if target.exists():
            remove(old)
        elif sys.exception() is not None:
            old.rename(target)


def clear(target: Path, names: str | None = None) -> None:
    """Removes what killed processes have left of saving `target`, or what matches `names` beside it."""
    for left in _beside(target, "saving", names):
        if not _is_in_use(left):
            remove(left)


def other_name(target: Path, what: str) -> Path:
    """A name beside `target` that is free."""
    mark = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    return target.with_name(f".{target.name}.{what}-{mark}")


def _beside(target: Path, what: str, names: str | None = None) -> list[Path]:
    """What `other_name` has given, of this process or another."""
    names = re.escape(target.name) if names is None else names
    name = re.compile(rf"\.{names}\.{what}-.+-\d+-[0-9a-f]{{8}}")
    parent = target.parent
    return sorted(p for p in parent.iterdir() if name.fullmatch(p.name)) if parent.is_dir() else []


def remove(path: Path) -> None:
    """A file, a folder, a link; what is not there, too."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _is_in_use(left: Path) -> bool:
    """Whether the process that writes there may still do so."""
    host, pid, _ = left.name.split(".saving-")[-1].rsplit("-", 2)
    if host != socket.gethostname() or int(pid) == os.getpid():
        return host != socket.gethostname()
    with contextlib.suppress(PermissionError):
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return False
    return True


def rename_exchange(a: Path, b: Path) -> bool:
    """Exchanges two names at once; False where this system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(b))


def find(folder: Path) -> Path:
    """The folder that is meant by `folder`: itself, the latest one in it, or what a killed save has left of it.

    Raises:
        GeminiError: there is none.
    """
    for path in (folder, folder / LATEST):
        if is_checkpoint(path):
            return path.resolve()  # where it is, whatever `latest` names later
    left = left_of(folder)
    if left is not None:
        return left
    what = "is no checkpoint folder" if folder.exists() else "does not exist"
    raise GeminiError(f"{folder} {what}: engine.save(folder) makes one")


def left_of(folder: Path) -> Path | None:
    """Where the checkpoint is that had the name, if the process was killed between two renames."""
    found = (path for path in _beside(folder, "old") if not folder.exists() and is_checkpoint(path))
    return next(found, None)


# ---- a series of checkpoints in one folder ----


def series_name(series: Path, step: int) -> str:
    """The name of a checkpoint in a series. Before the first step each save has another one."""
    name = f"step-{step:09d}"
    if step or not (series / name).exists():
        return name
    return next(n for i in itertools.count(2) if not (series / (n := f"{name}-{i}")).exists())


def point(series: Path, name: str) -> None:
    """`latest` in `series` is `name` from now on."""
    link = series / f".{LATEST}"
    link.unlink(missing_ok=True)  # of a process that was killed
    link.symlink_to(name)
    link.replace(series / LATEST)
    sync(series)


def keep(series: Path, n: int) -> None:
    """Removes all but the n checkpoints of a series that were saved last, whatever their steps."""
    found = [p for p in series.iterdir() if _SERIES.fullmatch(p.name) and is_checkpoint(p)]
    newest = (series / LATEST).resolve()
    found.sort(key=lambda path: (path == newest, path.stat().st_mtime_ns, path.name))
    for path in found[: max(len(found) - n, 0)]:
        shutil.rmtree(path)
