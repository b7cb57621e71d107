"""A file of records: each is what torch.save writes, whether a tensor is large and streamed, or small and buffered."""

from __future__ import annotations

import errno
import io
import os
import threading
import zlib
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gemini_strategy.checkpoint import records
from gemini_strategy.checkpoint.records import Record, RecordFile
from gemini_strategy.checkpoint.threads import Threads
from helpers.saving import make, train

VALUES = {
    "fp32": torch.arange(1 << 19, dtype=torch.float32),
    "bf16": torch.arange(3 << 18, dtype=torch.float32).bfloat16().view(3, -1),
    "transposed": torch.arange(1 << 19, dtype=torch.int64).view(1 << 9, -1).t(),
    "just large": torch.arange(1 << 20, dtype=torch.uint8),
    "just small": torch.arange((1 << 20) - 1, dtype=torch.uint8),
    "small": torch.ones(3, 4),
    "empty": torch.ones(0, 4),
    "scalar": torch.tensor(3.0),
}


def saved(value: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def check(data: bytes, record: Record, value: torch.Tensor) -> None:
    own = data[record.offset : record.offset + record.length]
    found = torch.load(io.BytesIO(own), weights_only=True)
    assert torch.equal(found, value) and found.stride() == value.stride()
    assert len(own) == len(saved(value))
    n_bytes = value.numel() * value.element_size()
    if n_bytes:
        raw = data[record.raw : record.raw + n_bytes]
        flat = value.as_strided((value.numel(),), (1,)).view(torch.uint8).numpy().tobytes()
        assert raw == flat and record.crc == zlib.crc32(flat)


@pytest.mark.parametrize("name", VALUES)
def test_a_record_is_what_torch_saves(name: str, tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "file")
    first = file.add(VALUES["small"])
    record = file.add(VALUES[name])
    file.finish()
    data = (tmp_path / "file").read_bytes()
    assert len(data) == file.size  # what a manifest says of it
    check(data, first, VALUES["small"])
    check(data, record, VALUES[name])


def test_records_of_several_threads(tmp_path: Path) -> None:
    file, threads = RecordFile(tmp_path / "file"), Threads()
    found: dict[str, Record] = {}
    for name, value in VALUES.items():
        threads.put(lambda name=name, value=value: found.setdefault(name, file.add(value)))
    threads.finish()
    file.finish()
    data = (tmp_path / "file").read_bytes()
    assert len(data) == file.size
    for name, record in found.items():
        check(data, record, VALUES[name])
    ends = sorted((r.offset, r.offset + r.length) for r in found.values())
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ends))


def test_no_copy_of_a_large_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise AssertionError("a buffer")

    monkeypatch.setattr(records, "io", SimpleNamespace(BytesIO=none))
    file = RecordFile(tmp_path / "file")
    file.add(VALUES["fp32"])
    file.finish()
    with pytest.raises(AssertionError, match="a buffer"):
        RecordFile(tmp_path / "other").add(VALUES["small"])


def test_more_around_a_tensor_than_there_is_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record behind it is not written over."""
    monkeypatch.setattr(records, "_AROUND", 512)
    file = RecordFile(tmp_path / "file")
    with pytest.raises(OSError, match="more than 512 bytes around a tensor"):
        file.add(VALUES["fp32"])


def test_a_full_disk_is_said_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, data: memoryview, at: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = RecordFile(tmp_path / "file")
    monkeypatch.setattr(records.os, "pwrite", full)
    with pytest.raises(OSError, match="No space left on device"):
        file.add(VALUES["fp32"])


def test_writers_in_the_background_stand_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training's own threads do not."""
    nice: set[tuple[bool, int]] = set()
    add = RecordFile.add

    def noted(file: RecordFile, value: torch.Tensor) -> Record:
        is_main = threading.current_thread() is threading.main_thread()
        nice.add((is_main, os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
        return add(file, value)

    monkeypatch.setattr(RecordFile, "add", noted)
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    with make() as engine:
        train(engine, 1)
        engine.save(tmp_path / "back", background=True).wait()
        train(engine, 1)
    assert {n for is_main, n in nice if not is_main} == {min(own + 10, 19)}
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own
