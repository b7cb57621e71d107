"""Cases in which each value of a parameter meets each value of each other one, and not all of them at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

__all__ = ["pairs"]


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
