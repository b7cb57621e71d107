"""The device budget on CUDA: what is not ours counts too, and torch's own memory answers to it.

The core asks for chunks; torch's caching allocator asks through cuda_pool.py; the rest of what this process
holds (driver context, modules, memory from before manage()) is read from the driver. On the host device there
is nothing around the chunks, and everything here is 0.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from gemini_strategy.errors import GeminiError

__all__ = ["DeviceMemory"]

_LEAST_SLACK = 64 << 20
_DRIVER_RESERVE = 128 << 20  # what the driver may still take: modules, library handles

# CUDA device index -> the memory of its engine
_in_use: weakref.WeakValueDictionary[int, DeviceMemory] = weakref.WeakValueDictionary()


class DeviceMemory:
    """What surrounds the chunks of one engine on its device.

    Raises:
        GeminiError: the CUDA device has an open engine already.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._trimmed_bytes = 0
        if device.type != "cuda":
            return
        if device.index in _in_use:
            raise GeminiError(
                f"{device} has an open engine already, and torch's memory can answer to one only: "
                "close() that engine first"
            )
        from gemini_strategy.cuda_pool import TorchPool

        torch.cuda.empty_cache()
        self._pool = TorchPool(device)
        self._pool.begin()
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

    def trim(self, is_settled: bool) -> None:
        """Between steps: gives back what torch merely caches, once it holds more than it did.

        A pool in use never gives cached segments back by itself, and they count.

        Args:
            is_settled: the first steps are over, whose memory is what later ones are compared with.
        """
        if self._pool is None:
            return
        held = self._pool.bytes()
        if not is_settled:
            self._trimmed_bytes = held
        elif held > 1.1 * self._trimmed_bytes:
            self._pool.trim()
            self._trimmed_bytes = max(self._pool.bytes(), held // 2)
