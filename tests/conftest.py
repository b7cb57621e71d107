"""What every test gets: the markers, the same random numbers whatever ran before, and the rates of one machine.

The rates are given and not measured, so that plans do not depend on who else uses this machine, no test takes a
second to measure and none reads or writes the cache of a user.  A test of the measurement itself asks for it.
"""

import os
import random

import pytest
import torch

RATES = "h2d=55e9,d2h=54e9"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU (make test-gpu)")
    os.environ.setdefault("GEMINI_RATES", RATES)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    random.seed(1234)
    torch.manual_seed(1234)
