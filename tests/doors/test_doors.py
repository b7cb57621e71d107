"""Every program of the table, managed and unmanaged: the same bits, or an error that names the parameter.

Each program runs under one of its set-ups, in turn; GEMINI_DOORS=all runs it under every one. GEMINI_DOORS_DEVICE=cuda
runs the table on the GPU. `python tests/doors/report.py` prints all of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from report import Walker
from walk import doors

pytestmark = pytest.mark.core  # make check runs these on a core with its own assertions

EVERY = os.environ.get("GEMINI_DOORS") == "all"
WALKS = [
    (door, setup)
    for number, (door, row) in enumerate(doors().items())
    for turn, setup in enumerate(row.setups)
    if EVERY or turn == number % len(row.setups)
]


@pytest.fixture(scope="session")
def walker() -> Iterator[Walker]:
    with Walker() as walker:
        yield walker


@pytest.mark.parametrize(("door", "setup"), WALKS)
def test_program(door: str, setup: str, walker: Walker) -> None:
    wrong = walker.verdict(door, setup)
    assert wrong is None, f"{door} under {setup!r} ({doors()[door].item}): {wrong}"
