"""A run of a tensor's elements as boxes: what torch's checkpoints know as the parts of a tensor.

A box is (offsets, sizes), one of each for every dimension. In row-major order the elements of each box given here
follow one another without a gap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

Box = tuple[tuple[int, ...], tuple[int, ...]]


def boxes(shape: Sequence[int], begin: int, end: int, most: int) -> Iterator[Box]:
    """The elements [begin, end) in row-major order, in boxes of at most `most` elements (a row of the last dimension
    that is longer is cut).

    A tensor without elements is one box without any.
    """
    shape = tuple(shape)
    if math.prod(shape) == 0 or not shape:
        if not shape and begin >= end:
            return
        yield (0,) * len(shape), shape
        return
    while begin < end:
        n = _run(shape, begin, end, most)
        yield place(shape, begin, n)
        begin += n


def _run(shape: tuple[int, ...], begin: int, end: int, most: int) -> int:
    """How many elements from `begin` on are the largest box."""
    inner = 1  # elements of one index of the dimension
    n = 1
    for size in reversed(shape):
        if begin % inner:
            break
        count = min(size - begin // inner % size, (end - begin) // inner, max(most // inner, 1))
        if count == 0 or inner > most:
            break
        n = count * inner
        if count < size:
            break
        inner *= size
    return n


def place(shape: Sequence[int], begin: int, n: int) -> Box:
    """The box of the n elements from `begin` on, which are one."""
    offsets, sizes = [], []
    inner = math.prod(shape)
    for size in shape:
        inner //= size
        offsets.append(begin // inner % size)
        sizes.append(max(min(n // inner, size), 1))
    return tuple(offsets), tuple(sizes)
