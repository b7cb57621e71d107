"""What all ranks do, or none: an error on one is an error on every one, and no rank waits for one that has failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gemini_strategy.errors import GeminiError
from gemini_strategy.ranks.ranks import Ranks

__all__ = ["together"]

T = TypeVar("T")


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
