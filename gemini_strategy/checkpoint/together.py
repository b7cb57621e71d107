"""What all ranks do, or none: an error on one is an error on every one, and no rank waits for one that has failed.

Long work is done in stretches, after each of which the ranks meet: none waits longer for another than one takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from gemini_strategy.errors import GeminiError
from gemini_strategy.ranks.ranks import Ranks

T = TypeVar("T")
_STRETCH = 1 << 30  # bytes of tensors between two meetings


def together(ranks: Ranks, what: str, work: Callable[[], T]) -> T:
    """`work()` on every rank.

    Raises:
        GeminiError: here, with this rank's error or with the first of another rank, and the rank's number.
    """
    error: BaseException | None = None
    try:
        result = work()
    except BaseException as raised:
        error = raised
    text = None if error is None else str(error) or type(error).__name__
    told = ranks.gather(what, text)
    if error is not None:
        where = f"rank {ranks.rank}: " if ranks.size > 1 else ""
        if isinstance(error, OSError | GeminiError):
            raise GeminiError(f"{what}: {where}{error}") from error
        raise error
    for rank, other in enumerate(told):
        if other is not None:
            raise GeminiError(f"{what}: rank {rank}: {other}")
    return result


def in_stretches(ranks: Ranks, what: str, work: Iterable[tuple[int, Callable[[], object]]]) -> None:
    """Does all of `work`: (bytes of tensors, of whatever rank; what to do), the same list on every rank.

    Raises:
        GeminiError: as `together`, at the end of a stretch.
    """
    todo: list[Callable[[], object]] = []
    n_bytes = 0

    def stretch() -> None:
        for one in todo:
            one()

    for size, one in work:
        todo.append(one)
        n_bytes += size
        if n_bytes >= _STRETCH:
            together(ranks, what, stretch)
            todo.clear()
            n_bytes = 0
    together(ranks, what, stretch)
