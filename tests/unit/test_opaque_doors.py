"""Optimizers of others as people come by them: transformers' names, settings of single parameters, two modes.

The reference is the same loop without us, with the same optimizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar

import bitsandbytes as bnb
import pytest
import torch
from torch import nn
from transformers import Adafactor

import gemini_strategy as gs


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 16), nn.LayerNorm(16))


def batch(number: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(number)).to(dtype)


def manage(model: nn.Module, optimizer: Any, **given: Any) -> gs.Engine:
    return gs.manage(
        model, optimizer, device="cpu", device_budget="28KB", block_size="4KiB", **given
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


class Cast:
    """A loop without us in which weights are the roundings of fp32 masters, which the optimizer has."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.model = gs.cast_model_(net(), "bf16-mixed")
        self.masters = [nn.Parameter(p.detach().clone()) for p in net().parameters()]
        self.optimizer = make(self.masters)

    def step(self) -> None:
        for p, master in zip(self.model.parameters(), self.masters, strict=True):
            master.grad, p.grad = p.grad.float(), None
        self.optimizer.step()

    def round(self) -> None:
        with torch.no_grad():
            for p, master in zip(self.model.parameters(), self.masters, strict=True):
                p.copy_(master)


def trained(is_managed: bool, precision: str, steps_inside: bool) -> list[torch.Tensor]:
    """Losses, of training and between, and the weights of both modes."""
    dtype = torch.float32 if precision == "32-true" else torch.bfloat16
    cast = Cast(ScheduleFree) if precision == "bf16-mixed" and not is_managed else None
    model = net() if cast is None else cast.model
    if precision == "bf16-true":
        model.to(dtype)
    optimizer: Any = ScheduleFree(model.parameters()) if cast is None else cast.optimizer
    engine = manage(model, optimizer, precision=precision) if is_managed else None
    found = []

    def move(name: str) -> None:
        getattr(optimizer, name)()
        if cast is not None:
            cast.round()

    for number in range(6):
        move("train")
        loss = model(batch(number, dtype)).float().square().mean()
        if engine is not None:
            engine.backward(loss, step=steps_inside)
        else:
            loss.backward()
        optimizer.step() if cast is None else cast.step()
        optimizer.zero_grad()
        if cast is not None:
            cast.round()
        found.append(loss.detach().clone())
        if number % 2:
            move("eval")
            with torch.no_grad():
                found.append(model(batch(number, dtype)).float().sum())
    for name in ("eval", "train"):
        move(name)
        if engine is not None:
            found += engine.model_state_dict().values()
        else:
            found += [
                p.detach().clone() for p in (model.parameters() if cast is None else cast.masters)
            ]
    return found


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("steps_inside", [False, True])
def test_an_optimizer_with_two_modes(steps_inside: bool, precision: str) -> None:
    one = trained(True, precision, steps_inside)
    other = trained(False, precision, steps_inside)
    assert len(one) == len(other)
    assert all(map(torch.equal, one, other))


def settings_of_bitsandbytes(is_managed: bool) -> list[torch.Tensor]:
    """8 bits for all but one weight, which is registered by its module as a Trainer does it."""
    model = net()
    optimizer = bnb.optim.AdamW(model.parameters(), lr=1e-2, optim_bits=8, min_8bit_size=256)
    optimizer.mng.register_module_override(
        model[2], "weight", {"optim_bits": 32, "betas": (0.5, 0.5)}
    )
    engine = manage(model, optimizer) if is_managed else None
    for number in range(4):
        loss = model(batch(number)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dtypes = [optimizer.state[p]["state1"].dtype for p in model.parameters()]
    assert dtypes[0] is torch.uint8
    assert dtypes[2] is torch.float32
    if engine is not None:
        engine.close()
    return [p.detach().clone() for p in model.parameters()]


def test_settings_of_one_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bnb.optim.GlobalOptimManager, "_instance", None)
    one = settings_of_bitsandbytes(True)
    manager = bnb.optim.GlobalOptimManager.get_instance()
    assert len(manager.module_weight_config_triple) == 1
    assert not manager.index2config
    monkeypatch.setattr(bnb.optim.GlobalOptimManager, "_instance", None)
    assert all(map(torch.equal, one, settings_of_bitsandbytes(False)))


class Seeded(torch.optim.Optimizer):
    """Its constructor begins a state, which its first step completes."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for number, p in enumerate(group["params"]):
                self.state[p]["seed"] = number

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "mean" not in state:
                    state["mean"] = torch.full_like(p, 0.01 * state.get("seed", 0))
                state["mean"].lerp_(p.grad, 0.5)
                p.add_(state["mean"], alpha=-group["lr"])


def test_a_state_that_the_constructor_begins() -> None:
    def run(is_managed: bool) -> list[torch.Tensor]:
        model = net()
        optimizer = Seeded(model.parameters())
        engine = manage(model, optimizer) if is_managed else None
        first = optimizer.state_dict()["state"]
        assert list(first.values()) == [{"seed": i} for i in range(6)]
        for number in range(3):
            model(batch(number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if engine is not None:
            engine.close()
        return [p.detach().clone() for p in model.parameters()]

    assert all(map(torch.equal, run(True), run(False)))


def test_an_optimizer_that_finds_its_own_lr() -> None:
    """transformers' Adafactor with `lr=None`: its groups have no number as their lr."""

    def make(model: nn.Module) -> Adafactor:
        return Adafactor(model.parameters(), lr=None, relative_step=True, warmup_init=True)

    ours, theirs = net(), net()
    optimizer, reference = make(ours), make(theirs)
    with manage(ours, optimizer) as engine:
        for i in range(3):
            engine.backward(ours(batch(i)).square().mean())
            optimizer.step()
            theirs(batch(i)).square().mean().backward()
            reference.step()
            optimizer.zero_grad()
            reference.zero_grad()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)


class Paged(torch.optim.SGD):
    """As bitsandbytes' paged ones say it of themselves: on a GPU they ask CUDA for pages, and crash beside fakes."""

    seen: ClassVar[list[bool]] = []

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.is_paged = True

    def step(self, closure: Any = None) -> None:
        self.seen.append(self.is_paged)
        super().step()


@pytest.mark.parametrize("steps_inside", [False, True])
def test_no_part_is_paged(steps_inside: bool) -> None:
    """Neither of a rehearsal nor of a step, wherever that is made; the optimizer is what it was."""
    model = net()
    optimizer = Paged(model.parameters())
    Paged.seen.clear()
    engine = manage(model, optimizer)
    with contextlib.closing(engine):
        for number in range(5):
            engine.backward(model(batch(number)).square().mean(), step=steps_inside)
            if not steps_inside:
                engine.clip_grad_norm_(1e3)
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.is_paged
    assert len(Paged.seen) > 10 and not any(Paged.seen)
