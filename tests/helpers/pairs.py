"""Few cases of the many that parameters of a test have: `pairs`, where two of them decide something together, and
`turns`, where each decides by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

__all__ = ["pairs", "turns"]


def pairs(**values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test with few of all combinations, among which is every pair of two parameters' values."""
    left = {
        (a, i, b, j)
        for a, b in itertools.combinations(range(len(values)), 2)
        for i, j in itertools.product(*(range(len(list(values.values())[k])) for k in (a, b)))
    }
    every = list(itertools.product(*(range(len(v)) for v in values.values())))

    def new(case: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
        found = {(a, case[a], b, case[b]) for a, b in itertools.combinations(range(len(case)), 2)}
        return found & left

    cases = []
    while left:
        case = max(every, key=lambda case: len(new(case)))
        left -= new(case)
        cases.append(tuple(v[i] for v, i in zip(values.values(), case, strict=True)))
    return pytest.mark.parametrize(tuple(values), cases)


def turns(**values: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test with each value of each parameter, in turns: as many cases as the longest list has values."""
    lists = [list(v) for v in values.values()]
    most = max(map(len, lists))
    cases = [tuple(v[i % len(v)] for v in lists) for i in range(most)]
    return pytest.mark.parametrize(tuple(values), cases)
