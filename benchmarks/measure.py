"""What a benchmark reads off the machine: memory as the driver and the system count it, and times.

Invariants
1. Device memory is the driver's figure for the whole device less what it was before the run, so it
   counts the context, the allocators' reserves and what no allocator of torch knows of.
2. Reading never makes the measured process wait: memory is read by the process that started it, or
   where that has no access to the driver by a thread of the measured process.
3. Times on a GPU lie between events of the compute stream; nothing waits before the last step.
"""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import threading
import time
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psutil

if TYPE_CHECKING:
    import torch  # at run time where it is used: a driver reads memory without it

SAMPLE_SECONDS = 0.004


class DriverMemory:
    """Bytes in use on one GPU as the driver's management library counts them, of all processes."""

    class _Info(ctypes.Structure):
        _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]

    def __init__(self, index: int) -> None:
        """Raises OSError where there is no such library or device."""
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._device = ctypes.c_void_p()
        self._check(self._library.nvmlInit_v2())
        wanted = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        name = wanted[index].strip() if index < len(wanted) else ""
        device = ctypes.byref(self._device)
        if name.startswith("GPU-"):
            self._check(self._library.nvmlDeviceGetHandleByUUID(name.encode(), device))
        else:
            number = int(name) if name.isdigit() else index
            self._check(self._library.nvmlDeviceGetHandleByIndex_v2(number, device))

    @staticmethod
    def _check(code: int) -> None:
        if code:
            raise OSError(f"NVML error {code}")

    def used(self) -> int:
        """Bytes in use now."""
        info = self._Info()
        self._check(self._library.nvmlDeviceGetMemoryInfo(self._device, ctypes.byref(info)))
        return int(info.used)


def open_driver_memory(device: str) -> DriverMemory | None:
    """The driver's view of "cuda" or "cuda:N"; None without a GPU or without the library."""
    if not device.startswith("cuda"):
        return None
    try:
        return DriverMemory(int(device.partition(":")[2] or 0))
    except OSError:
        return None


def host_used() -> int:
    """Bytes of the machine's memory that are not available, of all processes, pinned included."""
    memory = psutil.virtual_memory()
    return memory.total - memory.available


class Peaks:
    """Largest readings of named sources in each phase, taken by a thread: `with Peaks(...) as p`."""

    def __init__(self, sources: dict[str, Any]) -> None:
        self._sources = sources
        self.before = {name: read() for name, read in sources.items()}
        self.by_phase: dict[str, dict[str, int]] = {}
        self._phase = "start"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def enter(self, phase: str) -> None:
        """From now on readings count for `phase`."""
        self._phase = phase

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            peaks = self.by_phase.setdefault(self._phase, {})
            for name, read in self._sources.items():
                peaks[name] = max(peaks.get(name, 0), read())

    def above_start(self, name: str, phase: str | None = None) -> int | None:
        """The peak of a source above its first reading, bytes; in one phase or in all of them."""
        phases = self.by_phase.values() if phase is None else [self.by_phase.get(phase, {})]
        seen = [peaks[name] for peaks in phases if name in peaks]
        return max(seen) - self.before[name] if seen else None


class Clock:
    """Marks on the compute stream; seconds between them once everything has run."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[tuple[str, Any]] = []

    def mark(self, name: str) -> None:
        """One moment: on a GPU when the stream reaches it, else now."""
        if self.device.type == "cuda":
            import torch

            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((name, event))
        else:
            self.marks.append((name, time.perf_counter()))

    def spans(self) -> list[tuple[str, float]]:
        """(name of the mark that ends it, seconds since the mark before), in order; waits."""
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)
            spans = ((name, a.elapsed_time(b) / 1e3) for (_, a), (name, b) in pairwise(self.marks))
        else:
            spans = ((name, b - a) for (_, a), (name, b) in pairwise(self.marks))
        return list(spans)


def _output(*command: str) -> str | None:
    """What a command prints, stripped; None if it is missing or fails."""
    root = Path(__file__).parents[1]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def environment(device: torch.device) -> dict[str, Any]:
    """Hardware, driver, versions, threads and the commit, for a result that must stand alone."""
    import torch

    from gemini_strategy.machine.rates import cpu_name

    gpu = driver = None
    if device.type == "cuda":
        gpu = torch.cuda.get_device_name(device)
        query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        driver = (_output(*query) or "").partition("\n")[0] or None
    versions = {one.name: one.version for one in metadata.distributions()}
    return {
        "gpu": gpu,
        "driver": driver,
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "host_memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": versions.get("transformers"),
        **{n: versions.get(n) for n in ("deepspeed", "torchao", "bitsandbytes", "liger_kernel")},
        "commit": os.environ.get("GEMINI_COMMIT") or _output("git", "rev-parse", "HEAD"),
        "changed_files": len((_output("git", "status", "--porcelain") or "").splitlines()),
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
        "kernel": f"{platform.system()} {platform.release()}",
    }
