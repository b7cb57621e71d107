"""A model with everything that is hard to save, its engine, and what two of them have in common, for tests of files."""

from __future__ import annotations

import ctypes
import json
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gemini_strategy as gs
from gemini_strategy.checkpoint import manifest
from gemini_strategy.checkpoint.records import RecordFile
from helpers.reference import assert_same_bits

__all__ = [
    "Gate",
    "Odd",
    "OddParts",
    "assert_same_model",
    "contents",
    "make",
    "peak_resident_bytes",
    "state_of",
    "train",
]

_M_MMAP_THRESHOLD = -3  # malloc.h


class OddParts(nn.Module):
    """Transposed and channels-last weights, an empty one, a scalar, tied ones, a frozen one, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(7, 13).t())
        self.kernel = nn.Conv2d(3, 6, 3).to(memory_format=torch.channels_last)
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.a, self.b = nn.Linear(13, 13), nn.Linear(13, 13)
        self.b.weight = self.a.weight
        self.frozen = nn.Parameter(torch.randn(13), requires_grad=False)
        self.norm = nn.BatchNorm1d(13)


class Odd(OddParts):
    """The same in a model that can be trained, with extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "kind": ("odd", None)}

    def set_extra_state(self, state: Any) -> None:
        assert state["kind"] == ("odd", None)
        self.calls = state["calls"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.b(torch.relu(self.a(x))) @ self.transposed
        image = self.kernel(x[:, :1, None, None].expand(-1, 3, 3, 3) * self.scalar)
        y = self.norm(nn.functional.pad(y, (0, 6)) * self.frozen)
        return y.sum() + image.sum() + self.empty.sum()


def make(seed: int = 0, build: Callable[[], nn.Module] = Odd, **how: Any) -> gs.Engine:
    torch.manual_seed(seed)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return gs.manage(model, optimizer, device="cpu", **{"precision": "bf16-true"} | how)


def train(engine: gs.Engine, steps: int) -> list[float]:
    """The batches come from the global random numbers."""
    losses = []
    for _ in range(steps):
        loss = engine.model(torch.randn(4, 13).to(engine.model.a.weight.dtype)).float()
        losses.append(float(loss))
        engine.backward(loss)
        engine.clip_grad_norm_(1.0)
        engine.step()
        engine.zero_grad()
    return losses


def state_of(engine: gs.Engine) -> list[Any]:
    """Everything that a step uses, flat; equal lists are equal bits."""
    state = engine.state_dict()
    result: list[Any] = [torch.get_rng_state().tolist(), random.getstate()]
    for name, value in state["model"].items():
        result += [name, _bits(value)]
    for index, entry in state["optimizer"]["state"].items():
        result += [index, *(_bits(entry[key]) for key in sorted(entry))]
    return [*result, state["optimizer"]["param_groups"], state.get("scaler")]


def assert_same_model(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert list(got) == list(want)
    for name, value in want.items():
        if isinstance(value, torch.Tensor):
            assert_same_bits(got[name].contiguous(), value.contiguous(), name)
        else:
            assert got[name] == value


def _bits(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.shape, value.dtype, value.contiguous().view(-1).view(torch.uint8).tolist()


def peak_resident_bytes(work: Callable[[], Any]) -> int:
    """The kernel's own count, begun anew.

    glibc maps what is large and gives it back when it is freed, but each time that a larger piece is freed it takes
    what is as large as that from its heap from then on, and a heap keeps what is freed below its end. A limit that is
    given does not move, so that what is counted is what is in use.
    """
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 17)
    Path("/proc/self/clear_refs").write_text("5")
    work()
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


class Gate:
    """Before each piece that a writer's thread puts into its file it asks here; it may go on when it is open.

    Args:
        patch: pytest's.
    """

    def __init__(self, patch: Any) -> None:
        self._open = threading.Event()
        self._free = threading.Semaphore(0)
        self.reached = threading.Semaphore(0)
        self.error: OSError | None = None
        add = RecordFile.add

        def gated(file: RecordFile, value: torch.Tensor) -> Any:
            if threading.current_thread() is not threading.main_thread():
                self.reached.release()
                if not self._open.is_set():
                    self._free.acquire()
                if self.error is not None:
                    raise self.error
            return add(file, value)

        patch.setattr(RecordFile, "add", gated)

    def allow(self, pieces: int) -> None:
        """So many more pieces."""
        for _ in range(pieces):
            self._free.release()

    def let(self, pieces: int) -> None:
        """So many more pieces; returns when the writer asks for the one after them."""
        for _ in range(pieces):
            self._free.release()
            self.reached.acquire()

    def close(self) -> None:
        """As at first; no writer is there."""
        self._open.clear()
        while self._free.acquire(blocking=False) or self.reached.acquire(blocking=False):
            pass

    def open(self, error: OSError | None = None) -> None:
        self.error = error
        self._open.set()
        self._free.release()


def contents(folder: Path) -> Any:
    """What there is in a checkpoint, wherever it lies there: checksums of all bytes, and all that is no tensor."""
    found = manifest.Manifest(folder)
    tensors = {
        name: (
            stored.dtype,
            stored.shape,
            stored.order,
            [(p.first, p.n, p.crc) for p in stored.pieces],
        )
        for name, stored in found.tensors.items()
    }
    return list(tensors.items()), json.dumps(found.rest)
