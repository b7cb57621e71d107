"""Every program of the table, managed and unmanaged: the same bits, or an error that names the parameter.

GEMINI_DOORS_DEVICE=cuda runs the table on the GPU. `python tests/doors/report.py` prints all of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from report import Walker
from walk import doors

WALKS = [(door, setup) for door, row in doors().items() for setup in row.setups]


@pytest.fixture(scope="session")
def walker() -> Iterator[Walker]:
    with Walker() as walker:
        yield walker


@pytest.mark.parametrize(("door", "setup"), WALKS)
def test_program(door: str, setup: str, walker: Walker) -> None:
    wrong = walker.verdict(door, setup)
    assert wrong is None, f"{door} under {setup!r} ({doors()[door].item}): {wrong}"
