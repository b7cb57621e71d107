"""The table of programs (tests/doors) on the GPU, each under one of its set-ups, in turn.

A process takes seconds to reach the GPU: programs run some at a time in one, and what fails there runs again in a
process of its own, which decides.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "doors"))

from report import Walker
from walk import doors, judge

pytestmark = pytest.mark.gpu

AT_ONCE = 24
# They take a weight as an array or by its address, or call what torch has for the CPU alone.
HOST_ONLY = {
    "kept/array of an embedding with max_norm",
    "own optimizer/Adagrad, fused",
    "write/ctypes memset",
    "write/dlpack to numpy",
    "write/numpy out=",
    "write inside/memset",
    "write inside/np.clip out=",
    "write inside/numpy of data",
}
WALKS = [
    (door, row.setups[number % len(row.setups)])
    for number, (door, row) in enumerate(doors().items())
    if door not in HOST_ONLY
]


class Batches:
    """Verdicts of programs that share a process."""

    def __init__(self, walker: Walker) -> None:
        self._walker = walker
        self._is_right: dict[str, bool] = {}

    def verdict(self, number: int) -> str | None:
        """Why a program is wrong, or None."""
        door, setup = WALKS[number]
        if door not in self._is_right:
            self._run(WALKS[number - number % AT_ONCE :][:AT_ONCE])
        return None if self._is_right[door] else self._walker.verdict(door, setup)

    def _run(self, rows: list[tuple[str, str]]) -> None:
        want, got = (self._walker.walk_in_turn(rows, is_managed) for is_managed in (False, True))
        for (door, setup), a, b in zip(rows, got, want, strict=True):
            self._is_right[door] = bool(a and b) and judge(doors()[door], setup, a, b) is None


@pytest.fixture(scope="module")
def batches() -> Iterator[Batches]:
    with Walker("cuda") as walker:
        yield Batches(walker)


@pytest.mark.parametrize("number", range(len(WALKS)), ids=[door for door, _ in WALKS])
def test_program_on_the_gpu(number: int, batches: Batches) -> None:
    door, setup = WALKS[number]
    wrong = batches.verdict(number)
    assert wrong is None, f"{door} under {setup!r} ({doors()[door].item}): {wrong}"
