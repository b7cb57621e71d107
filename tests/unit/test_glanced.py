"""Kernels that get the address of a weight inside its module (csrc/engine/glance.c): what they read, and write.

On a CPU a "kernel" is ctypes on the address."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gemini_strategy as gs
from helpers.ranks import run_ranks, values

pytestmark = pytest.mark.core  # make check runs these on a core with its own assertions

STEPS = 10
WIDTH = 64


class Scale(nn.Module):
    """Its kernel sums the weight; what else happens in step `now` is `then`'s."""

    now = 0

    def __init__(self, then: Callable[[nn.Parameter, int], None] | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        values = (ctypes.c_float * WIDTH).from_address(self.weight.data_ptr())
        total = sum(values)
        if self.then is not None:
            self.then(self.weight, Scale.now)
        return x * self.weight + total * 1e-3


def _model(then: Callable[[nn.Parameter, int], None] | None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        Scale(then),
        nn.Linear(WIDTH, WIDTH),
        Scale(None),
        nn.Linear(WIDTH, WIDTH),
    )


def _train(model: nn.Module, engine: gs.Engine | None, optimizer: torch.optim.Optimizer) -> None:
    for step in range(STEPS):
        Scale.now = step
        generator = torch.Generator().manual_seed(step)
        loss = model(torch.randn(8, WIDTH, generator=generator)).square().mean()
        if engine is None:
            loss.backward()
        else:
            engine.backward(loss, step=step % 3 == 2)
        optimizer.step()
        optimizer.zero_grad()


def _compare(then: Callable[[nn.Parameter, int], None] | None, policy: str) -> None:
    plain, model = _model(then), _model(then)
    _train(plain, None, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    budget = {} if policy == "cuda" else {"device_budget": 96 << 10}
    with gs.manage(
        model, optimizer, device="cpu", placement_policy=policy, chunk_size=4096, **budget
    ) as engine:
        _train(model, engine, optimizer)
    for name, p in plain.named_parameters():
        assert torch.equal(p, model.get_parameter(name)), name


@pytest.mark.parametrize("policy", ["auto", "cpu", "cuda"])
def test_kernels_that_read(policy: str) -> None:
    _compare(None, policy)


def _write(weight: nn.Parameter) -> None:
    values = (ctypes.c_float * WIDTH).from_address(weight.data_ptr())
    values[3] = values[3] * 0.5


@pytest.mark.parametrize("policy", ["auto", "cpu", "cuda"])
def test_a_kernel_that_writes_from_the_first_step(policy: str) -> None:
    """What it writes is a write like any other."""
    _compare(lambda weight, step: _write(weight) if step % 4 != 3 else None, policy)


def _scale(weight: nn.Parameter, step: int) -> None:
    if step in (5, 8):
        with torch.no_grad():
            weight[:7].mul_(0.75)


@pytest.mark.parametrize("policy", ["auto", "cpu", "cuda"])
def test_an_operation_that_writes_late(policy: str) -> None:
    """A version tells of it."""
    _compare(_scale, policy)


def check_an_operation(rank: int, size: int) -> None:
    _compare(_scale, "cpu")


def test_an_operation_that_writes_late_on_two_ranks(tmp_path: Path) -> None:
    """One of them has nothing of the weight's shard."""
    values(run_ranks(2, tmp_path, check_an_operation))


@pytest.mark.parametrize("write", [_write, lambda weight: weight.data.mul_(0.5)])
@pytest.mark.parametrize("policy", ["auto", "cpu", "cuda"])
def test_a_write_that_begins_late(policy: str, write: Callable[[nn.Parameter], None]) -> None:
    """It is refused by name, within two steps."""
    model = _model(lambda weight, step: write(weight) if step == 6 else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budget = {} if policy == "cuda" else {"device_budget": 96 << 10}
    engine = gs.manage(
        model, optimizer, device="cpu", placement_policy=policy, chunk_size=4096, **budget
    )
    with (
        contextlib.closing(engine),
        pytest.raises(gs.GeminiError, match=r"1\.weight: it was written"),
    ):
        _train(model, engine, optimizer)
    assert Scale.now in (7, 8)
