"""Unread tensors: ordinary to their users, with bytes that are still in a safetensors file.

One has shape, dtype and device, and its first use reads the file. manage() takes the values of unread parameters from
the file straight into their homes.

Invariants
    1. An unread tensor has the values that the file has at the moment it is made: a file that was changed since is
       refused by name.
    2. Once a caller writes it, or uses it a second time, it has memory of its own, and is unread no more: one use is
       that of an adapter that takes its first values from it, more are those of a model that is not managed.
"""

from __future__ import annotations

import math
import os
import threading
from pathlib import Path

import torch

from gemini_strategy.errors import GeminiError
from gemini_strategy.parameters import absent, order, patches
from gemini_strategy.weights.files import WeightFiles


class UnreadFile(WeightFiles):
    """One safetensors file, that must not change while tensors of it are unread.

    Raises:
        GeminiError: it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._mark = _mark(self.path)
        self._lock = threading.Lock()

    def read(self, key: str, dtype: torch.dtype) -> torch.Tensor:
        """A tensor in memory of its own; on any thread."""
        with self._lock:
            self.check()
            values = self.tensor(key).to(dtype)
            self.close()
        return values

    def check(self) -> None:
        """The file is the one that it was."""
        if _mark(self.path) != self._mark:
            raise GeminiError(
                f"{self.path} has changed or gone since from_pretrained(), and weights of it have not been read yet: "
                "manage() the model before its folder is written again, or load it outside "
                "gemini_strategy.huggingface.loading()"
            )


def _mark(path: Path) -> tuple[int, ...]:
    """Another one when the file is another, or was written."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class _Unread(absent.Home):
    """The home of one.

    Attributes:
        files, entry: where its values are, in the file's dtype.
        dtype: its own.
        values: its own, once it was written or used twice.
    """

    def __init__(self, files: UnreadFile, key: str, dtype: torch.dtype) -> None:
        self.name = key
        self.files = files
        self.entry = key
        self.dtype = dtype
        self.values: torch.Tensor | None = None
        self._is_used = False
        self._lock = threading.Lock()

    def open(self, is_written: bool) -> torch.Tensor:
        if self.values is not None:
            return self.values
        read = self.files.read(self.entry, self.dtype)
        with self._lock:  # the first thread to come has made the memory that all others use
            if self.values is None and (is_written or self._is_used):
                self.values = read
            self._is_used = True
            return read if self.values is None else self.values


def tensor(files: UnreadFile, key: str, dtype: torch.dtype) -> torch.Tensor:
    """The tensor `key` of a file in `dtype`, on the CPU, row-major, unread; after doors.install()."""
    shape = files.shapes[key]
    geometry = shape, order.row_major(shape), dtype, torch.device("cpu")
    shown = absent.tensor(_Unread(files, key, dtype), *geometry)
    patches.put_on()
    return shown


def home(value: torch.Tensor) -> _Unread | None:
    """What is behind an unread tensor as a whole; None: it is none, a part of one, or has been written."""
    if not absent.is_absent(value):
        return None
    found = absent.home_of(value)
    if not isinstance(found, _Unread) or found.values is not None or value.dtype is not found.dtype:
        return None
    shape = found.files.shapes[found.entry]
    is_whole = tuple(value.shape) == shape and value.storage_offset() == 0
    is_whole = is_whole and order.is_same(shape, value.stride(), order.row_major(shape))
    return found if is_whole or not math.prod(shape) else None
