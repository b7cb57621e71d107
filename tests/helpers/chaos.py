"""The chaos device under engines of the core as it is shipped: a host device that runs late and checks the order.

It is a library of its own (tests/c/chaos), which tests/c/Makefile builds and `_C.Core` takes as its host device. `use`
and `late` say how it is made, "seed[:fault[:period]]" (tests/c/chaos/chaos.h), for engines that begin from now on.

Invariants
    1. `faults` is of all engines since then, closed ones too; it fails where there was none, so that no test passes on
       another device.
    2. Only one process at a time builds the library, and only where something has changed.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gemini_strategy import _C

__all__ = ["faults", "in_use", "late", "load", "use"]

ROOT = Path(__file__).resolve().parents[2]
_Core = _C.Core
_how: str | None = None


@functools.cache
def load() -> ctypes.CDLL:
    """The library, instrumented as the core is. A process that forks loads it once for all its forks."""
    sanitize = "address,undefined" if _C.BUILT_WITH_SANITIZER else ""
    folder = ROOT / "build" / "tests-c" / (sanitize or "plain")
    folder.mkdir(parents=True, exist_ok=True)
    # What the sanitizer's runtime is preloaded for is this process, not the compiler.
    environment = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "MAKEFLAGS")}
    with (folder / "chaos.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = ["make", "-s", "-C", ROOT / "tests" / "c", "chaos.so", f"SAN={sanitize}"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{folder / 'chaos.so'} cannot be built:\n{done.stdout}{done.stderr}")
    library = ctypes.CDLL(str(folder / "chaos.so"))
    number = ctypes.POINTER(ctypes.c_uint32)
    library.gm_chaos_use.argtypes = [ctypes.c_char_p]
    library.gm_chaos_use.restype = None
    library.gm_chaos_found.argtypes = [number, number, ctypes.c_char_p, ctypes.c_size_t]
    library.gm_chaos_found.restype = None
    return library


def _late_core(*args: Any, **kwargs: Any) -> _C.Core:
    address = ctypes.cast(load().gm_chaos_make, ctypes.c_void_p).value
    return _Core(*args, **kwargs, host_device=address)


def _on(how: str | int | None) -> tuple[Any, str | None]:
    """What makes cores, and how in words, once the library knows."""
    if how is None:
        return _Core, None
    load().gm_chaos_use(str(how).encode())
    return _late_core, str(how)


def use(how: str | int | None) -> None:
    """For what is left of this process, which is a test's own; None: engines are on the host device."""
    global _how
    _C.Core, _how = _on(how)


def late(monkeypatch: pytest.MonkeyPatch, how: str | int | None) -> None:
    """As `use`, for what is left of a test."""
    core, words = _on(how)
    monkeypatch.setattr(_C, "Core", core)
    monkeypatch.setattr(sys.modules[__name__], "_how", words)


def in_use() -> str | None:
    """What another process has to `use` for the same device."""
    return _how


def faults() -> tuple[int, str]:
    """How many accesses nothing has ordered, and the first in words; (0, "") where engines are on the host device."""
    if _how is None:
        return 0, ""
    devices, found = ctypes.c_uint32(), ctypes.c_uint32()
    first = ctypes.create_string_buffer(640)
    load().gm_chaos_found(ctypes.byref(devices), ctypes.byref(found), first, len(first))
    assert devices.value > 0, "no engine has begun on the chaos device"
    return found.value, first.value.decode(errors="replace")
