"""How far long work is, for a person at a terminal: one of tqdm's bars, where tqdm is installed.

Invariants
    1. A bar counts what is done (bytes, but in the first step), and of a checkpoint the few pieces that threads have in
       hand; at the end of the work it is full.
    2. However the work ends, its bar is closed, and what the work raises goes on as it was.
    3. Nothing is shown of work that ends within _DELAY, on other ranks than the first, where stderr is no terminal, or
       without tqdm. Then tqdm is not even imported: its bars start a thread.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

Bar = Any  # tqdm's: update(n), close()

Done = Callable[[int], object]  # is told how many bytes have been done since the last time

_DELAY = 2.0  # seconds


def nothing(n_bytes: int) -> None:
    """What is told of work that is not watched."""


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
    if not is_watched(rank):
        yield nothing
        return
    shown = bar(what, total)
    try:
        yield shown.update
    finally:
        shown.close()


def is_watched(rank: int) -> bool:
    """Whether this rank's bars are seen by anybody."""
    if rank != 0 or sys.stderr is None or not sys.stderr.isatty():
        return False
    try:
        import tqdm  # noqa: F401
    except ImportError:
        return False
    return True


def bar(what: str, total: int, unit: str = "B") -> Bar:
    """For work that no block of code encloses, where `is_watched`: a bar, which its holder closes.

    Args:
        what, total: as for `progress`; total in units.
        unit: what is counted.
    """
    from tqdm import tqdm

    where = {"delay": _DELAY, "leave": False, "file": sys.stderr}
    return tqdm(desc=what, total=total, unit=unit, unit_scale=unit == "B", **where)
