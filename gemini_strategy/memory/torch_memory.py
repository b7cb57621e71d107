"""What torch's caching allocator holds of one CUDA device while engines are open there.

Invariants
    1. Torch holds little more than its tensors need: after the first step, and whenever it has grown, the segments
       that it only caches are given back for few that serve the same step (segments.py).
       A segment in which a tensor lives is not given back, and may be most of a step's memory: then all stay.
       cuBLAS's workspaces live for good. They are taken before the first step, and so lie in none of its segments.
    2. An allocation that failed leaves nothing behind: what was cached until then is given back before the
       next forward.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch

from gemini_strategy import _torch
from gemini_strategy.memory.segments import choose_segments, events_of, staying_bytes
from gemini_strategy.memory.torch_pool import TorchPool

LEAST_KEPT = 64 << 20  # what torch may hold in any case
_LEAST_GAIN = 32 << 20  # less is not worth the trouble
_LEAST_GIVEN = 2 << 20  # torch's smallest segments
_GROWTH = 1.05  # of what torch holds, until it is put in order again
_HISTORY = 40_000  # allocations and ends of tensors that torch remembers, of the last steps


def is_worth(sizes: list[int], staying: int, held: int) -> bool:
    """Whether torch's pool, which holds `held` bytes, should be these segments; `staying` bytes it cannot give back."""
    return bool(sizes) and sum(sizes) + staying + max(_LEAST_GAIN, held // 32) < held


class _History:
    """Torch's record of its allocations, kept while an engine is open, unless the script keeps one already."""

    def __init__(self) -> None:
        self._is_ours = not _torch.is_history_enabled()
        self._start()

    def _start(self) -> None:
        if self._is_ours:
            _torch.record_memory_history(max_entries=_HISTORY, context=None)

    def end(self) -> None:
        """Idempotent."""
        if self._is_ours:
            self._is_ours = False
            _torch.record_memory_history(enabled=None)

    def forget(self) -> None:
        """What was until now says nothing about what comes."""
        if self._is_ours:
            _torch.record_memory_history(enabled=None)
            self._start()

    def segments(self, device: torch.device, snapshot: dict[str, Any]) -> list[int]:
        """Sizes of segments that serve what is remembered; [] where torch's own do as well, or not known."""
        if not self._is_ours:
            return []
        traces = snapshot["device_traces"]
        entries = traces[device.index] if device.index < len(traces) else []
        return choose_segments(events_of(entries, torch.cuda.current_stream(device).cuda_stream))


class _BlasHandle(torch.autograd.Function):
    """cuBLAS's handle of this thread, then of the one that runs backwards; each takes its workspace at once."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        torch.cuda.current_blas_handle()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        torch.cuda.current_blas_handle()
        return grad


def _take_workspaces(device: torch.device) -> None:
    with torch.cuda.device(device), _torch.InferenceMode(False), torch.enable_grad():
        _BlasHandle.apply(torch.zeros((), device=device, requires_grad=True)).backward()


class TorchMemory:
    """Torch's allocations on one device go through the core, from here until this object is freed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept_bytes = 0  # what torch held after it was last put in order
        torch.cuda.empty_cache()
        _take_workspaces(device)
        self._pool = TorchPool(device)
        self._pool.begin()
        self._refusals = self._pool.refusals()
        self._history = _History()
        weakref.finalize(self, _end, self._pool, self._history)

    def bytes(self) -> int:
        """Bytes that torch holds, cached or not."""
        return self._pool.bytes()

    def tidy(self) -> bool:
        """Between steps: invariant 1. True: what torch held until now says nothing about the next step."""
        held = self._pool.bytes()
        self._refusals = self._pool.refusals()  # the step did without
        if held <= self._kept_bytes * _GROWTH:
            return False
        snapshot = _torch.memory_snapshot()
        sizes = self._history.segments(self._device, snapshot)
        staying = staying_bytes(snapshot["segments"], self._device.index)
        is_gain = is_worth(sizes, staying, held)
        live = torch.cuda.memory_allocated(self._device)
        # A segment that stays serves nothing but the tensors in it once the pool is another one.
        if is_gain or (self._kept_bytes and staying <= live + _LEAST_GAIN):
            self._pool.trim()
        if is_gain:
            self._pool.prepare(sizes)
            self._history.forget()
            self._refusals = self._pool.refusals()
        self._kept_bytes = max(self._pool.bytes(), LEAST_KEPT)
        return is_gain

    def give_cached(self) -> bool:
        """Torch gives back what it only caches; False: nothing."""
        held = self._pool.bytes()
        if held <= torch.cuda.memory_allocated(self._device) + _LEAST_GIVEN:
            return False
        self._pool.trim()
        return self._pool.bytes() < held

    def recover(self) -> bool:
        """Before a forward: invariant 2. True: as in tidy()."""
        if self._pool.refusals() == self._refusals:
            return False
        gc.collect()  # copies of models, and frames of the error, may be cycles
        self._pool.trim()
        self._history.forget()
        self._refusals = self._pool.refusals()
        self._kept_bytes = 0
        return True


def _end(pool: TorchPool, history: _History) -> None:
    pool.end()
    history.end()
