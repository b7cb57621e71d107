"""What every GPU test finds, whatever ran before it: no engine, no compiled code, no cached memory.

Memory that a test frees too late (a cycle that nobody has collected, an engine that a failed test left open, the
workspace that cuBLAS took while torch's memory answered to an engine) would be counted as the next test's."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import gemini_strategy as gs


def clear_device() -> None:
    """Closes what is open, and gives back all that nobody holds."""
    gc.collect()
    for engine in [one for one in gc.get_objects() if type(one) is gs.Engine]:
        engine.close()
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _device_of_its_own(request: pytest.FixtureRequest) -> Iterator[None]:
    is_on_gpu = request.node.get_closest_marker("gpu") is not None
    if is_on_gpu:
        clear_device()
    yield
    if is_on_gpu:
        clear_device()
