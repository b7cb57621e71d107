"""Optimizers of others as people come by them: transformers' names, settings of single parameters, two modes.

The reference is the same loop without us, with the same optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gemini_strategy as gs


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 16), nn.LayerNorm(16))


def batch(number: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(number)).to(dtype)


def manage(model: nn.Module, optimizer: Any, **given: Any) -> gs.Engine:
    return gs.manage(
        model, optimizer, device="cpu", device_budget="24KB", block_size="4KiB", **given
    )


class ScheduleFree(torch.optim.Optimizer):
    """Weights are one mean of two series while it trains, another while it does not, as schedulefree has it."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9, "k": 0, "train_mode": False})

    @torch.no_grad()
    def _move(self, to_train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not to_train:
                weight = 1 - group["beta"] if to_train else 1 - 1 / group["beta"]
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(end=self.state[p]["z"], weight=weight)
                group["train_mode"] = to_train

    def train(self) -> None:
        self._move(True)

    def eval(self) -> None:
        self._move(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("not in train mode")
            weight = 1 / (group["k"] + 1)
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.detach().clone())
                p.lerp_(end=z, weight=weight)
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - weight) - 1))
                z.sub_(p.grad, alpha=group["lr"])
            group["k"] += 1


def trained(
    make: Callable[[Any], Any], *, is_managed: bool, steps_inside: bool, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Losses, of training and between, and the weights of both modes."""
    model = net().to(dtype)
    optimizer = make(model.parameters())
    engine = manage(model, optimizer) if is_managed else None
    found = []
    for number in range(6):
        optimizer.train()
        loss = model(batch(number, dtype)).square().mean()
        if engine is not None:
            engine.backward(loss, step=steps_inside)
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().clone())
        if number % 2:
            optimizer.eval()
            with torch.no_grad():
                found.append(model(batch(number, dtype)).sum())
    found += [p.detach().clone() for p in model.state_dict().values()]
    optimizer.train()
    if engine is not None:
        engine.close()
    return [*found, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("steps_inside", [False, True])
def test_an_optimizer_with_two_modes(steps_inside: bool, dtype: torch.dtype) -> None:
    given: Any = {"steps_inside": steps_inside, "dtype": dtype}
    one = trained(ScheduleFree, is_managed=True, **given)
    other = trained(ScheduleFree, is_managed=False, **given)
    assert all(map(torch.equal, one, other))
    assert len(one) == len(other)
