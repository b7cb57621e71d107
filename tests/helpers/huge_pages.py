"""Importing this puts what the process has in memory on huge pages, for the processes that are forked afterwards.

A fork copies the table of all pages, and its end goes through them again: with 60,000 of 4 KiB that took more time than
many a test. Where the kernel cannot (Linux before 6.1, no memory in one piece) nothing changes.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

__all__: list[str] = []

_MADV_COLLAPSE = 25
_HUGE = 2 << 20


def _collapse() -> None:
    """Takes half a second for a process that has imported torch."""
    library = ctypes.CDLL(None)
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, _, _, _, *name = line.split()
        if access == "rw-p" and (not name or name == ["[heap]"]):
            begin, end = (int(address, 16) // _HUGE * _HUGE for address in span.split("-"))
            begin += _HUGE  # the first one may begin before it
            if begin < end:
                library.madvise(begin, end - begin, _MADV_COLLAPSE)


_collapse()
