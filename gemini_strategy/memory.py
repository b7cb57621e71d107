"""The device budget on CUDA: what is not ours counts too, and torch's own memory answers to it.

The core asks for chunks; torch's caching allocator asks through cuda_pool.py; the rest of what this process
holds (driver context, modules, memory from before manage()) is read from the driver. On the host device there
is nothing around the chunks, and everything here is 0.

Invariants
    1. What torch holds beyond its tensors is little: after the first step, and whenever it has grown, the
       segments it only caches are given back and one segment takes their place, as large as the tensors of a
       step were together. Segments of their own size each would add up: a pool in use gives none back, and
       one that is free serves no tensor that is larger (a quarter of what torch held, in a step of OPT).
    2. An allocation that failed leaves nothing behind: what was cached until then is given back before the
       next forward.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from gemini_strategy.errors import GeminiError

__all__ = ["DeviceMemory"]

_LEAST_SLACK = 64 << 20
_DRIVER_RESERVE = 128 << 20  # what the driver may still take: modules, library handles
_LEAST_ROOM = 64 << 20  # less is not worth a segment
_SPARE_ROOM = 1 / 32  # of the segment: gaps between tensors in it
_GROWTH = 1.05  # of what torch holds, until it is put in order again

# CUDA device index -> the memory of its engine
_in_use: weakref.WeakValueDictionary[int, DeviceMemory] = weakref.WeakValueDictionary()


class DeviceMemory:
    """What surrounds the chunks of one engine on its device.

    Torch's figures of its own peak (torch.cuda.max_memory_allocated) begin anew with it.

    Raises:
        GeminiError: the CUDA device has an open engine already.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._kept_bytes = 0  # what torch held after it was last put in order
        self._wanted_bytes = 0  # the peak for which that was done
        self._refusals = 0
        if device.type != "cuda":
            return
        if device.index in _in_use:
            raise GeminiError(
                f"{device} has an open engine already, and torch's memory can answer to one only: "
                "close() that engine first"
            )
        from gemini_strategy.cuda_pool import TorchPool

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        self._pool = TorchPool(device)
        self._pool.begin()
        self._refusals = self._pool.refusals()
        self._end = weakref.finalize(self, self._pool.end)
        _in_use[device.index] = self

    def close(self) -> None:
        """Torch's memory is torch's again. Idempotent."""
        if self._pool is not None:
            self._end()
            self._pool = None
            _in_use.pop(self._device.index, None)

    def external_bytes(self, chunk_bytes: int) -> int:
        """Device memory in use that is neither chunks nor torch's pool, with room for the driver."""
        if self._pool is None:
            return 0
        free, total = torch.cuda.mem_get_info(self._device)
        return max(total - free - chunk_bytes - self._pool.bytes(), 0) + _DRIVER_RESERVE

    def slack_bytes(self, device_budget: int) -> int:
        """What a plan leaves free within the budget, for torch's memory to grow a little without a new plan."""
        if self._pool is None:
            return 0
        return max(_LEAST_SLACK, device_budget // 128)

    def tidy(self) -> bool:
        """Between steps: invariant 1. True: what torch held until now says nothing about the next step."""
        if self._pool is None:
            return False
        held = self._pool.bytes()
        self._refusals = self._pool.refusals()  # the step did without
        if held <= self._kept_bytes * _GROWTH:
            return False
        figures = torch.cuda.memory_stats(self._device)
        peak = figures["allocated_bytes.large_pool.peak"]
        room = peak - figures["allocated_bytes.large_pool.current"]
        room += int(room * _SPARE_ROOM)
        self._pool.trim()
        if peak <= self._wanted_bytes * _GROWTH:  # the gaps are larger than thought
            room = held - self._pool.bytes()
        room = min(room, held - self._pool.bytes())
        if room >= _LEAST_ROOM:
            self._pool.prepare(room)
        self._wanted_bytes = peak
        self._kept_bytes = max(self._pool.bytes(), _LEAST_ROOM)
        self._refusals = self._pool.refusals()
        return True

    def recover(self) -> None:
        """Before a forward: invariant 2."""
        if self._pool is not None and self._pool.refusals() != self._refusals:
            self._pool.trim()
            self._refusals = self._pool.refusals()
            torch.cuda.reset_peak_memory_stats(self._device)  # it was the failed attempt's
            self._kept_bytes = self._wanted_bytes = 0
