"""Folders that are whole or not there: written under another name, made durable, then put in their place.

Invariants
    1. A folder of the given name is whole at every moment: the old one until the rename, the new one after it. Where
       the file system cannot exchange two names, the old one is `.NAME.old-*` for the moment between two renames, and
       `find` knows it.
    2. Before the rename all files and the folder itself are on the disk (fsync); after it the parent is.
    3. `latest` names a folder only when that is in its place and on the disk; folders that go, go after that.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from gemini_strategy.errors import GeminiError

__all__ = [
    "Draft",
    "clear",
    "find",
    "keep",
    "local",
    "other_name",
    "point",
    "series_name",
    "sync",
]

LATEST = "latest"
_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)
_AT_FDCWD = -100
_SERIES = re.compile(r"step-(\d{9,})")


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


class Draft:
    """A folder under another name, beside the one that it is to become.

    Args:
        target: where it goes; its parent is made if it is not there.
        objection: why what is there already may not be replaced; None: it may.

    Attributes:
        path: where to write.

    Raises:
        GeminiError: something else has the target's name.
        OSError: it cannot be made.
    """

    def __init__(self, target: Path, objection: Callable[[Path], str | None]) -> None:
        self._target = target
        is_empty = target.is_dir() and not any(target.iterdir())
        reason = objection(target) if target.exists() and not is_empty else None
        if is_empty and target == Path.cwd():
            reason = "is the current folder"
        if reason is not None:
            raise GeminiError(f"{target} {reason}: give another name, or remove it")
        target.parent.mkdir(parents=True, exist_ok=True)
        clear(target)
        self.path = other_name(target, "saving")
        self.path.mkdir()

    def publish(self) -> None:
        """Puts the folder, the files of which are on the disk, into its place."""
        sync(self.path)
        if not self._target.exists():
            self.path.rename(self._target)
            sync(self._target.parent)
        else:
            old = self._exchange()
            sync(self._target.parent)
            _remove(old)
        for old in _beside(self._target, "old"):
            _remove(old)

    def _exchange(self) -> Path:
        """Gives where the old folder is now."""
        if rename_exchange(self.path, self._target):
            return self.path
        old = other_name(self._target, "old")
        self._target.rename(old)
        self.path.rename(self._target)
        return old

    def discard(self) -> None:
        """Nothing of it is kept."""
        shutil.rmtree(self.path, ignore_errors=True)


def clear(target: Path) -> None:
    """Removes what killed processes have left of saving `target`."""
    for left in _beside(target, "saving"):
        if not _is_in_use(left):
            _remove(left)


def other_name(target: Path, what: str) -> Path:
    """A name beside `target` that nobody has."""
    mark = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    return target.with_name(f".{target.name}.{what}-{mark}")


def _beside(target: Path, what: str) -> list[Path]:
    """What `other_name` has given, of this process or another."""
    name = re.compile(rf"\.{re.escape(target.name)}\.{what}-.+-\d+-[0-9a-f]{{8}}")
    parent = target.parent
    return sorted(p for p in parent.iterdir() if name.fullmatch(p.name)) if parent.is_dir() else []


def _remove(path: Path) -> None:
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


def find(folder: Path, is_ours: Callable[[Path], bool]) -> Path:
    """The folder that is meant by `folder`: itself, the latest one in it, or what a killed save has left of it.

    Raises:
        GeminiError: there is none.
    """
    for path in (folder, folder / LATEST):
        if is_ours(path):
            return path.resolve()  # where it is, whatever `latest` names later
    for path in _beside(folder, "old"):
        if not folder.exists() and is_ours(path):
            return path
    what = "is no checkpoint folder" if folder.exists() else "does not exist"
    raise GeminiError(f"{folder} {what}: engine.save(folder) makes one")


# ---- a series of checkpoints in one folder ----


def series_name(step: int) -> str:
    """The name of a checkpoint in a series."""
    return f"step-{step:09d}"


def point(series: Path, name: str) -> None:
    """`latest` in `series` is `name` from now on."""
    link = series / f".{LATEST}"
    link.unlink(missing_ok=True)  # of a process that was killed
    link.symlink_to(name)
    link.replace(series / LATEST)
    sync(series)


def keep(series: Path, n: int, is_ours: Callable[[Path], bool]) -> None:
    """Removes all but the n checkpoints of a series that were saved last, whatever their steps."""
    found = [p for p in series.iterdir() if _SERIES.fullmatch(p.name) and is_ours(p)]
    newest = (series / LATEST).resolve()
    found.sort(key=lambda path: (path == newest, path.stat().st_mtime_ns, path.name))
    for path in found[: max(len(found) - n, 0)]:
        shutil.rmtree(path)
