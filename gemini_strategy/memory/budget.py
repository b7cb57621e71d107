"""The device budget on CUDA: what is not ours counts too, and torch's own memory answers to it.

The core asks for chunks; torch's caching allocator asks through torch_pool.py; the rest of what this process
holds (driver context, modules, memory from before manage()) is read from the driver. On the host device there
is nothing around the chunks, and everything here is 0.

Invariants
    1. Torch holds little more than its tensors need: after the first step, and whenever it has grown, the segments
       that it only caches are given back for few that serve the same step (segments.py).
       A segment in which a tensor lives is not given back, and may be most of a step's memory: then all stay.
    2. An allocation that failed leaves nothing behind: what was cached until then is given back before the
       next forward.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch

from gemini_strategy import _torch
from gemini_strategy.errors import GeminiError
from gemini_strategy.memory.segments import choose_segments, events_of, staying_bytes
from gemini_strategy.memory.torch_pool import TorchPool
from gemini_strategy.sizes import size_text

__all__ = ["DRIVER_RESERVE", "DeviceMemory", "first_reserve", "is_worth", "slack"]

_LEAST_SLACK = 64 << 20
DRIVER_RESERVE = 128 << 20  # what the driver may still take: modules, library handles
# In the first step it takes most: kernels are loaded when they are first used (230 MB on an H200).
_FIRST_RESERVE = 384 << 20
_LEAST_GAIN = 32 << 20  # less is not worth the trouble
_LEAST_GIVEN = 2 << 20  # torch's smallest segments
_GROWTH = 1.05  # of what torch holds, until it is put in order again
_HISTORY = 40_000  # allocations and ends of tensors that torch remembers, of the last steps

# CUDA device index -> the memory of its engine
_in_use: weakref.WeakValueDictionary[int, DeviceMemory] = weakref.WeakValueDictionary()


def first_reserve(device_budget: int) -> int:
    """Bytes of more room for the driver until the first step is over; little where the budget is small."""
    return max(0, min(_FIRST_RESERVE, device_budget // 32))


def slack(device_budget: int) -> int:
    """Bytes that a plan leaves free within the budget, for torch's memory to grow a little without a new plan."""
    return max(_LEAST_SLACK, device_budget // 128)


def is_worth(sizes: list[int], staying: int, held: int) -> bool:
    """Whether torch's pool, which holds `held` bytes, should be these segments; `staying` bytes it cannot give back."""
    return bool(sizes) and sum(sizes) + staying + max(_LEAST_GAIN, held // 32) < held


class _History:
    """Torch's record of its allocations, kept while an engine is open, unless somebody keeps one already."""

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


class DeviceMemory:
    """What surrounds the chunks of one engine on its device.

    Raises:
        GeminiError: the CUDA device has an open engine already.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._kept_bytes = 0  # what torch held after it was last put in order
        self._refusals = 0
        if device.type != "cuda":
            return
        if device.index in _in_use:
            gc.collect()  # a model that nobody has any more is part of a cycle with its engine
        if device.index in _in_use:
            raise GeminiError(
                f"{device} has an open engine already, and torch's memory can answer to one only: "
                "close() that engine first"
            )
        torch.cuda.empty_cache()
        self._pool = TorchPool(device)
        self._pool.begin()
        self._refusals = self._pool.refusals()
        self._history = _History()
        self._end = weakref.finalize(self, _end, self._pool, self._history)
        _in_use[device.index] = self

    def close(self) -> None:
        """Torch's memory is torch's again. Idempotent."""
        if self._pool is not None:
            self._end()
            self._pool = None
            _in_use.pop(self._device.index, None)

    def external_bytes(self, chunk_bytes: int) -> int:
        """Device memory in use that is neither chunks nor torch's pool, with room for the driver, in bytes."""
        if self._pool is None:
            return 0
        free, total = torch.cuda.mem_get_info(self._device)
        return max(total - free - chunk_bytes - self._pool.bytes(), 0) + DRIVER_RESERVE

    def first_reserve_bytes(self, device_budget: int) -> int:
        """`first_reserve` where there is a GPU."""
        return 0 if self._pool is None else first_reserve(device_budget)

    def slack_bytes(self, device_budget: int) -> int:
        """`slack` where there is a GPU."""
        return 0 if self._pool is None else slack(device_budget)

    def tidy(self) -> bool:
        """Between steps: invariant 1. True: what torch held until now says nothing about the next step."""
        if self._pool is None:
            return False
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
        self._kept_bytes = max(self._pool.bytes(), _LEAST_SLACK)
        return is_gain

    def give_cached(self) -> bool:
        """In a pass that has no room for its chunks: torch gives back what it only caches; False: nothing."""
        if self._pool is None:
            return False
        held = self._pool.bytes()
        if held <= torch.cuda.memory_allocated(self._device) + _LEAST_GIVEN:
            return False
        self._pool.trim()
        return self._pool.bytes() < held

    def explain(self, error: torch.OutOfMemoryError, device_budget: int, chunk_bytes: int) -> None:
        """Adds to torch's text, which knows the whole device alone, what the budget is used for. Once."""
        if self._pool is None or device_budget < 0 or hasattr(error, "__notes__"):
            return
        error.add_note(
            f"gemini: within device_budget, {size_text(device_budget)}, chunks of parameters hold "
            f"{size_text(chunk_bytes)} and torch {size_text(self._pool.bytes())}, activations and what the loop keeps, "
            "beside the driver's and others' memory. Fewer tokens at a time, activation checkpointing or a larger "
            "device_budget make room"
        )

    def recover(self) -> bool:
        """Before a forward: invariant 2. True: as in tidy()."""
        if self._pool is None or self._pool.refusals() == self._refusals:
            return False
        self._pool.trim()
        self._history.forget()
        self._refusals = self._pool.refusals()
        self._kept_bytes = 0
        return True


def _end(pool: Any, history: _History) -> None:
    pool.end()
    history.end()
