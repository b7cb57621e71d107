"""A rank's file of tensors: records as torch.save writes them, so that torch.distributed.checkpoint reads them, too.

In a record the bytes of the tensor lie in one run; `Record.raw` says where, so that they are read without the pickle
around them.
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

__all__ = ["Record", "RecordFile"]


@dataclass(frozen=True)
class Record:
    """Where one record is: bytes [offset, offset + length) of the file; the tensor's own begin at `raw`."""

    offset: int
    length: int
    raw: int
    crc: int


class RecordFile:
    """Records one after the other, from several threads at once; then made durable."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 (closed by `close`)
        self._lock = threading.Lock()
        self.name = path.name
        self.size = 0

    def add(self, value: torch.Tensor) -> Record:
        """`value`: on the CPU; its elements are all of its storage, in the order of its memory."""
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        data = buffer.getbuffer()
        raw = crc = 0
        if value.numel():
            raw = _torch.ArchiveReader(buffer).get_record_offset("data/0")
            crc = zlib.crc32(data[raw : raw + value.numel() * value.element_size()])
        return self._put(data, raw, crc)

    def add_object(self, value: Any) -> Record:
        """Something else, for tools: this package never reads it."""
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return self._put(buffer.getbuffer(), 0, 0)

    def _put(self, data: memoryview, raw: int, crc: int) -> Record:
        with self._lock:
            offset = self.size
            self.size += len(data)
        at, rest = offset, data
        while rest:
            n = os.pwrite(self._file.fileno(), rest, at)
            at, rest = at + n, rest[n:]
        return Record(offset, len(data), offset + raw, crc)

    def finish(self) -> None:
        """The bytes are on the disk afterwards."""
        os.fsync(self._file.fileno())
        self._file.close()

    def close(self) -> None:
        self._file.close()
