"""A rank's file of tensors: records as torch.save writes them, so that torch.distributed.checkpoint reads them, too.

In a record the bytes of the tensor lie in one run; `Record.raw` says where, so that they are read without the pickle
around them.

Invariants
    1. A large tensor's bytes go from its memory to the file: no copy of them is made, and their writer holds
       Python's lock only between system calls, so that training goes on beside it.
    2. Each record has a place of its own in the file from its first byte on. What it leaves of it, less than `_AROUND`
       bytes, is zeros.
"""

from __future__ import annotations

import io
import os
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gemini_strategy import _torch

_LARGE = 1 << 20  # bytes of a tensor
_AROUND = 1 << 14  # that torch.save writes around a tensor's bytes, at most


@dataclass(frozen=True)
class Record:
    """Where one record is: bytes [offset, offset + length) of the file; the tensor's own begin at `raw`."""

    offset: int
    length: int
    raw: int
    crc: int


class _Stream:
    """What torch.save writes into for one record: `n_bytes` of a large tensor, and little around them."""

    def __init__(self, file: int, offset: int, n_bytes: int) -> None:
        self._file, self._n_bytes = file, n_bytes
        self.at = self._offset = offset
        self.raw = self.crc = -1
        self.error: OSError | None = None  # torch.save makes another one of it

    def write(self, data: memoryview) -> int:
        """`data` is the tensor's own memory where it has all of its bytes."""
        try:
            if len(data) == self._n_bytes:
                self.raw, self.crc = self.at, zlib.crc32(data)
            if self.at + len(data) > self._offset + self._n_bytes + _AROUND:
                raise OSError(f"torch.save wrote more than {_AROUND} bytes around a tensor")
            write_at(self._file, data, self.at)
        except OSError as error:
            self.error = self.error or error
            raise
        self.at += len(data)
        return len(data)

    def flush(self) -> None:
        """Nothing is kept back."""


def write_at(file: int, data: memoryview, at: int) -> None:
    """All of `data`, from byte `at` of the file on."""
    while data:
        n = os.pwrite(file, data, at)
        at, data = at + n, data[n:]


class RecordFile:
    """Records one after the other, from several threads at once; then made durable."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 (closed by `close`)
        self._lock = threading.Lock()
        self.name = path.name
        self.size = 0

    def add(self, value: torch.Tensor) -> Record:
        """`value`: on the CPU; its elements are all of its storage, in the order of its memory."""
        n_bytes = value.numel() * value.element_size()
        if n_bytes >= _LARGE:
            return self._add_large(value, n_bytes)
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        data = buffer.getbuffer()
        raw = crc = 0
        if value.numel():
            raw = _torch.ArchiveReader(buffer).get_record_offset("data/0")
            crc = zlib.crc32(data[raw : raw + n_bytes])
        return self._put(data, raw, crc)

    def _add_large(self, value: torch.Tensor, n_bytes: int) -> Record:
        stream = _Stream(self._file.fileno(), offset := self._reserve(n_bytes + _AROUND), n_bytes)
        try:
            torch.save(value, stream)
        except (OSError, RuntimeError) as error:
            raise stream.error or error from None
        if stream.raw < 0:
            raise OSError("torch.save wrote a tensor's bytes in pieces")
        return Record(offset, stream.at - offset, stream.raw, stream.crc)

    def add_object(self, value: Any) -> Record:
        """Something else, for tools: this package never reads it."""
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return self._put(buffer.getbuffer(), 0, 0)

    def _put(self, data: memoryview, raw: int, crc: int) -> Record:
        offset = self._reserve(len(data))
        write_at(self._file.fileno(), data, offset)
        return Record(offset, len(data), offset + raw, crc)

    def _reserve(self, n_bytes: int) -> int:
        with self._lock:
            offset = self.size
            self.size += n_bytes
        return offset

    def finish(self) -> None:
        """The bytes are on the disk afterwards."""
        os.truncate(self._file.fileno(), self.size)  # the last record may have left some
        os.fsync(self._file.fileno())
        self._file.close()

    def close(self) -> None:
        self._file.close()
