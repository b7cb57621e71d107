"""The threads that write and check a checkpoint's pieces, and files that they have written."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini_strategy as gs
from gemini_strategy.checkpoint import parts, threads
from gemini_strategy.checkpoint.manifest import Manifest
from gemini_strategy.checkpoint.records import RecordFile
from gemini_strategy.checkpoint.threads import Threads


def test_work_is_done_when_it_is_finished_and_the_threads_have_ended() -> None:
    before = threading.active_count()
    done: list[int] = []
    those = Threads()
    for number in range(50):
        those.put(lambda number=number: done.append(number))  # type: ignore[misc]
    those.finish()
    assert sorted(done) == list(range(50))
    assert threading.active_count() == before
    those.close()


def test_no_more_is_handed_over_than_there_is_room_for() -> None:
    those, gate = Threads(), threading.Event()
    handed: list[int] = []

    def hand_over() -> None:
        for number in range(12):
            those.put(gate.wait)
            handed.append(number)

    thread = threading.Thread(target=hand_over)
    thread.start()
    while len(handed) < threads._MOST:
        pass
    thread.join(0.2)  # if it could go on, it would be through
    assert len(handed) == threads._MOST
    gate.set()
    thread.join()
    those.finish()
    assert len(handed) == 12


def test_the_first_error_is_raised_and_nothing_is_begun_after_it() -> None:
    those = Threads()
    begun: list[int] = []

    def fail() -> None:
        raise OSError("no space left")

    those.put(fail)
    with pytest.raises(OSError, match="no space left"):
        for number in range(1000):
            those.put(lambda number=number: begun.append(number))  # type: ignore[misc]
    n = len(begun)
    with pytest.raises(OSError, match="no space left"):
        those.finish()
    those.close()
    assert len(begun) == n < 1000


def trained() -> tuple[nn.Module, torch.optim.Optimizer, gs.Engine]:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(5)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = gs.manage(model, optimizer, device_budget="16KB", precision="bf16-true")
    for _ in range(3):
        engine.backward(model(torch.ones(2, 24, dtype=torch.bfloat16)).sum())
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, engine


@pytest.mark.core
def test_what_threads_have_written_is_what_one_thread_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "MOST_ELEMENTS", 100)

    def told(folder: Path) -> dict[str, Any]:
        found = Manifest(folder).tensors
        return {
            k: (v.dtype, v.shape, [(p.first, p.n, p.crc) for p in v.pieces])
            for k, v in found.items()
        }

    _, _optimizer, engine = trained()
    engine.save(tmp_path / "one")
    monkeypatch.setattr(parts, "_LEAST_BYTES", 0)
    names = set()
    add = RecordFile.add

    def noted(file: RecordFile, value: torch.Tensor) -> Any:
        names.add(threading.current_thread().name)
        return add(file, value)

    monkeypatch.setattr(RecordFile, "add", noted)
    engine.save(tmp_path / "many")
    saving = engine.save(tmp_path / "background", background=True)
    saving.wait()
    assert "checkpoint" in names
    assert told(tmp_path / "one") == told(tmp_path / "many") == told(tmp_path / "background")
    want = {k: v.clone() for k, v in engine.model.state_dict().items()}
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.zero_()
    engine.load(tmp_path / "many")
    assert all(torch.equal(want[k], v) for k, v in engine.model.state_dict().items())
    engine.close()


@pytest.mark.parametrize("background", [False, True])
def test_a_disk_that_fills_up_in_a_thread_ends_the_saving_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    monkeypatch.setattr(parts, "_LEAST_BYTES", 0)
    model, optimizer, engine = trained()
    engine.save(tmp_path / "first")
    add, n = RecordFile.add, [0]

    def full(file: RecordFile, value: torch.Tensor) -> Any:
        n[0] += 1
        if n[0] > 7:
            raise OSError(28, "No space left on device")
        return add(file, value)

    with monkeypatch.context() as patch, pytest.raises(gs.GeminiError, match="No space left"):
        patch.setattr(RecordFile, "add", full)
        saved = engine.save(tmp_path / "second", background=background)
        saved.wait()  # type: ignore[union-attr]
    assert [path.name for path in tmp_path.iterdir()] == ["first"]
    engine.backward(model(torch.ones(2, 24, dtype=torch.bfloat16)).sum())
    optimizer.step()
    engine.save(tmp_path / "second")
    engine.close()


def test_a_piece_that_a_thread_finds_damaged_is_named_and_nothing_is_loaded(tmp_path: Path) -> None:
    _, _optimizer, engine = trained()
    engine.save(tmp_path / "it")
    stored = Manifest(tmp_path / "it").tensors["model.3.weight"].pieces[0]
    with (tmp_path / "it" / stored.file).open("r+b") as file:
        file.seek(stored.offset + 5)
        byte = file.read(1)
        file.seek(stored.offset + 5)
        file.write(bytes([byte[0] ^ 1]))
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.zero_()
    with pytest.raises(
        gs.GeminiError, match=rf"{stored.file} is damaged: the .* at {stored.offset} "
    ):
        engine.load(tmp_path / "it")
    assert not any(parameter.any() for parameter in engine.model.parameters())
    engine.close()
