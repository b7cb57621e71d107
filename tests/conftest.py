"""What every test gets: the marker `gpu`, and the same random numbers whatever ran before."""

import random

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU (make test-gpu)")


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    random.seed(1234)
    torch.manual_seed(1234)
