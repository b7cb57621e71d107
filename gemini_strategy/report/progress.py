"""How far long work is, for whoever watches a terminal: one of tqdm's bars, where tqdm is installed.

Invariants
    1. A bar counts bytes that are done, not those that were begun; at the end of the work it is full.
    2. However the work ends, its bar is closed, and what the work raises goes on as it was.
    3. Nothing is shown of work that ends within _DELAY, on other ranks than the first, where stderr is no terminal, or
       without tqdm. Then tqdm is not even imported: its bars start a thread.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Done", "nothing", "progress"]

Done = Callable[[int], object]  # is told how many bytes have been done since the last time

_DELAY = 2.0  # seconds


def nothing(n_bytes: int) -> None:
    """What is told of work that nobody watches."""


@contextlib.contextmanager
def progress(what: str, total: int, rank: int) -> Iterator[Done]:
    """Inside, a bar of the work.

    Args:
        what: in a few words, before the bar.
        total: its bytes on this rank.
        rank: of this process among those that do it together; 0 shows.

    Yields:
        What is to be called with the bytes of each part that is done.
    """
    bar = _bar(what, total) if rank == 0 and _is_watched() else None
    if bar is None:
        yield nothing
        return
    try:
        yield bar.update
    finally:
        bar.close()


def _is_watched() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _bar(what: str, total: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(
        desc=what,
        total=total,
        unit="B",
        unit_scale=True,
        delay=_DELAY,
        leave=False,
        file=sys.stderr,
    )
