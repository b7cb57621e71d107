"""The memory that torch takes on a CUDA device, routed through the core so that it counts.

While a :class:`TorchPool` has begun, every new segment that torch's caching allocator asks for on
its device, from any thread (autograd's included), comes from ``gm_torch_alloc`` of the core, which
lets the engine give up blocks first and refuses what the budget does not allow.  A refusal reaches
the user as torch's own ``torch.OutOfMemoryError``.

Invariants
    1. The allocator object is made once per process and is immortal, and the extension is never
       unloaded: torch may return a segment at any time, also after :meth:`TorchPool.end`, after the
       pool is gone and while the interpreter shuts down, and does so through ``gm_torch_free``.
    2. Each begin is undone once: ``end`` stops the routing and gives back the use that begin took.

What torch does while a pool has begun (it treats this like the capture of a graph; seen on 2.11): the
memory of a tensor with ``record_stream`` is not reused, and segments that torch merely caches are
released neither by ``torch.cuda.empty_cache()`` nor to satisfy a request that was refused.
:meth:`TorchPool.trim`, called between steps, gives both back.
"""

import contextlib
import ctypes
import functools

import torch

from gemini_strategy import _C, _torch


@functools.cache
def _core() -> ctypes.CDLL:
    """The extension as a C library, for the functions that torch calls without Python."""
    library = ctypes.CDLL(_C.__file__)
    library.gm_torch_alloc_bytes.argtypes = [ctypes.c_int]
    library.gm_torch_alloc_bytes.restype = ctypes.c_size_t
    library.gm_torch_alloc_peak_bytes.argtypes = [ctypes.c_int, ctypes.c_bool]
    library.gm_torch_alloc_peak_bytes.restype = ctypes.c_size_t
    library.gm_torch_alloc_refusals.argtypes = [ctypes.c_int]
    library.gm_torch_alloc_refusals.restype = ctypes.c_size_t
    return library


@functools.cache
def _allocator() -> object:
    """torch's handle of our allocator; the one of this process (invariant 1)."""
    allocator = torch.cuda.memory.CUDAPluggableAllocator(
        _core()._name, "gm_torch_alloc", "gm_torch_free"
    ).allocator()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(allocator))
    return allocator


class TorchPool:
    """Routes torch's allocations on one CUDA device through the core.

    Args:
        device: a CUDA device; without an index, the current one.

    Raises:
        ValueError: ``device`` is not a CUDA device.
    """

    def __init__(self, device: torch.device | str | int) -> None:
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device.type != "cuda":
            raise ValueError(f"device is {device}: a TorchPool needs a CUDA device")
        self.index: int = torch.cuda.current_device() if device.index is None else device.index
        self._has_begun = False
        self._pool: torch.cuda.MemPool | None = self._new_pool()
        self.reset_peak()

    def _new_pool(self) -> torch.cuda.MemPool:
        # A MemPool belongs to the device that is current when it is made.
        with torch.cuda.device(self.index):
            return torch.cuda.MemPool(_allocator())

    def begin(self) -> None:
        """Starts routing, for all threads.  No-op when begun."""
        if not self._has_begun:
            _torch.begin_allocate_to_pool(self.index, self._pool.id)
            self._has_begun = True

    def end(self) -> None:
        """Stops routing.  Tensors stay valid; their memory counts until torch gives it back."""
        if self._has_begun:
            self._has_begun = False
            _torch.end_allocate_to_pool(self.index, self._pool.id)
            _torch.release_pool(self.index, self._pool.id)

    def trim(self) -> None:
        """Gives the segments that torch only caches back to the device; waits for the device.

        torch releases cached segments of a pool only when the pool is no longer in use, so the pool
        is replaced; segments with living tensors stay and are released by a later trim.
        """
        had_begun = self._has_begun
        self.end()
        self._pool = None  # torch releases what this pool cached, and keeps what is in use
        torch.cuda.empty_cache()  # the same for pools replaced earlier
        self._pool = self._new_pool()
        if had_begun:
            self.begin()

    def prepare(self, sizes: list[int]) -> None:
        """Makes cached segments of these bytes, out of which tensors of the current stream are served.

        Those that the budget does not allow are left out.
        """
        with torch.cuda.device(self.index), contextlib.suppress(torch.OutOfMemoryError):
            _ = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]

    def bytes(self) -> int:
        """Bytes of device memory that torch holds through the core on this device, cached or not.

        All pools of the process on this device are counted together.
        """
        return _core().gm_torch_alloc_bytes(self.index)

    def refusals(self) -> int:
        """How many segments torch has asked for in vain on this device, so far."""
        return _core().gm_torch_alloc_refusals(self.index)

    def peak_bytes(self) -> int:
        """The most that :meth:`bytes` was since this pool was made or :meth:`reset_peak`."""
        return _core().gm_torch_alloc_peak_bytes(self.index, False)

    def reset_peak(self) -> None:
        """Begins a new peak with what is held now."""
        _core().gm_torch_alloc_peak_bytes(self.index, True)
