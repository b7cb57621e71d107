"""The table of programs (tests/doors) on the GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "doors"))

from report import Walker
from walk import doors

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def walker() -> Iterator[Walker]:
    with Walker("cuda") as walker:
        yield walker


@pytest.mark.parametrize("door", list(doors()))
def test_program_on_the_gpu(door: str, walker: Walker) -> None:
    for setup in doors()[door].setups:
        wrong = walker.verdict(door, setup)
        assert wrong is None, f"{door} under {setup!r} ({doors()[door].item}): {wrong}"
