"""Backward nodes that write the gradient themselves, as fused kernels do: the bits without an engine, or a refusal by
name at the first such backward; and fp8, whose nodes save another form of the weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

import gemini_strategy as gs
from helpers.reference import assert_same_bits

WIDTH, STEPS = 64, 4


def _into_grad(weight: Any, grad: Tensor) -> Tensor | None:
    """`p.grad` is written in the node, and the node gives none."""
    if weight.grad is None:
        weight.grad = grad
    else:
        weight.grad.add_(grad)
    return None


def _through_grad(weight: Any, grad: Tensor) -> Tensor | None:
    """quack's: the sum is made in `p.grad`'s memory, which is then given as the gradient."""
    if weight.grad is None:
        return grad
    total = weight.grad.add_(grad)
    weight.grad = None
    return total


def _into_main_grad(weight: Any, grad: Tensor) -> Tensor | None:
    """Transformer Engine's: a tensor of the program's beside the parameter."""
    weight.main_grad.add_(grad)
    return None


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, put: Callable[..., Tensor | None]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.put = weight, put
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        return grad @ weight, ctx.put(ctx.weight, grad.t() @ x), None


class _Linear(nn.Module):
    def __init__(self, put: Callable[..., Tensor | None]) -> None:
        super().__init__()
        self.weight, self.put = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8), put

    def forward(self, x: Tensor) -> Tensor:
        return _Fused.apply(x, self.weight, self.put)


def _manage(model: nn.Module, optimizer: Any, precision: str = "32-true") -> gs.Engine:
    return gs.manage(
        model,
        optimizer,
        device="cpu",
        precision=precision,
        placement_policy="cpu",
        device_budget=100_000,
        chunk_size=20_000,
    )


def _x(step: int) -> Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))


def _train(put: Callable[..., Tensor | None], is_managed: bool, has_step: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(_Linear(put) for _ in range(5)))
    optimizer = gs.HybridAdam(model.parameters(), lr=1e-2)
    for p in model.parameters() if put is _into_main_grad else ():
        p.main_grad = torch.zeros_like(p)
    engine = _manage(model, optimizer) if is_managed else None
    for step in range(STEPS):
        for part in range(2):
            loss = model(_x(2 * step + part)).square().mean()
            if engine is None:
                loss.backward()
            else:
                engine.backward(loss, step=has_step and part == 1)
        for p in model.parameters() if put is _into_main_grad else ():
            p.grad = p.main_grad.clone()
            p.main_grad.zero_()
        optimizer.step()
        optimizer.zero_grad()
    if engine is not None:
        engine.close()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("has_step", [False, True])
@pytest.mark.parametrize("put", [_into_grad, _into_main_grad])
def test_a_gradient_that_a_node_writes_is_not_lost(put: Any, has_step: bool) -> None:
    want = _train(put, False, has_step)
    for a, b in zip(_train(put, True, has_step), want, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("has_step", [False, True])
def test_a_gradient_that_is_taken_away_in_a_node_is_refused_by_name(has_step: bool) -> None:
    with pytest.raises(gs.GuardError, match=r"\d\.weight: this gradient was dropped"):
        _train(_through_grad, True, has_step)


def _fp8(is_gathered: bool) -> nn.Module:
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=is_gathered)
    return convert_to_float8_training(nn.Sequential(*layers), config=config)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_fp8_trains_with_the_bits_of_the_plain_run(precision: str) -> None:
    outcomes = []
    for is_managed in (False, True):
        model = _fp8(False)
        if not is_managed:
            gs.cast_model_(model, precision)
        optimizer = gs.HybridAdam(model.parameters(), lr=1e-2)
        engine = _manage(model, optimizer, precision) if is_managed else None
        for step in range(STEPS):
            loss = model(_x(step).to(next(model.parameters()).dtype)).float().square().mean()
            loss.backward() if engine is None else engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        outcomes.append([p.detach().clone() for p in model.parameters()])
        if engine is not None:
            assert engine.stats()["planned"] and engine.stats()["evictions"] > STEPS
            engine.close()
    for a, b in zip(*outcomes, strict=True):
        assert_same_bits(a, b)


def test_fp8_weights_of_the_all_gather_are_refused_by_name() -> None:
    model = _fp8(True)
    with pytest.raises(gs.GeminiError, match=r"0\.weight is a WeightWithDynamicFloat8CastTensor"):
        _manage(model, gs.HybridAdam(model.parameters(), lr=1e-2))
