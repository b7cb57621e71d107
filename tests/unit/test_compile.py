"""Compiled submodules: one unit each, entered around their graph, the bits of the unmanaged run."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn

import gemini_strategy as gs

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x)).tanh()


def build(backend: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block(), nn.Linear(WIDTH, 4))
    model[1] = torch.compile(model[1], backend=backend)
    model[2].compile(backend=backend)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(8, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_blocks_train_to_the_same_bits(backend: str) -> None:
    torch._dynamo.reset()
    plain, managed = build(backend), build(backend)
    reference = gs.HybridAdam(plain.parameters(), lr=1e-2)
    optimizer = gs.HybridAdam(managed.parameters(), lr=1e-2)
    engine = gs.manage(
        managed,
        optimizer,
        device="cpu",
        placement_policy="cpu",
        chunk_size=4096,
    )
    assert train(managed, optimizer, 6) == train(plain, reference, 6)
    assert engine.stats()["evictions"] > 0
    engine._runtime.core.check()
    engine.close()
    for left, right in zip(managed.parameters(), plain.parameters(), strict=True):
        assert torch.equal(left, right)
    assert train(managed, optimizer, 2) == train(plain, reference, 2)  # close() left it compiled


def test_a_copy_of_a_model_with_compiled_blocks_is_unmanaged() -> None:
    model = build("eager")
    engine = gs.manage(model, None, device="cpu")
    twin = copy.deepcopy(model)
    x = torch.randn(3, WIDTH)
    want = model(x)
    engine.close()
    assert torch.equal(twin(x), want)
    assert gs.engine_of(twin) is None


@pytest.mark.parametrize("what", ["optimizer.step", "a whole step", "a whole step in backward"])
def test_a_compiled_step_of_the_optimizer_is_the_engines(what: str) -> None:
    """The engine's own work is in no graph."""
    torch._dynamo.reset()
    results = []
    for is_managed in (False, True):
        model = build("eager")
        optimizer = gs.HybridAdam(model.parameters(), lr=1e-2)
        engine = None
        if is_managed:
            engine = gs.manage(
                model, optimizer, device="cpu", placement_policy="cpu", chunk_size=4096
            )
        whole = functools.partial(_step, model, optimizer, engine, what == "a whole step")
        if is_managed and what == "optimizer.step":
            optimizer.step = torch.compile(optimizer.step, backend="eager")
        elif is_managed:
            whole = torch.compile(whole, backend="eager")
        torch.manual_seed(1)
        results.append([whole(torch.randn(8, WIDTH)).tolist() for _ in range(4)])
        if engine is not None:
            engine.close()
    assert results[0] == results[1]


def _step(model: Any, optimizer: Any, engine: Any, clips: bool, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    if engine is None:
        loss.backward()
    else:
        engine.backward(loss, step=not clips)
    if clips:
        optimizer.clip_grad_norm_(0.1)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
