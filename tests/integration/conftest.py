"""Which of the two Lightning trees a test runs in."""

import pytest


@pytest.fixture
def tree() -> str:
    """One of them, where a test is not parametrized over both: the classes of both are made by the same code, and
    tests of registration, of one fit and of one checkpoint run in each."""
    return "lightning"
