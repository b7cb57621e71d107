"""Paths by which other bytes could reach a computation unnoticed: each gives torch's result or an error."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gemini_strategy as gs

pytestmark = pytest.mark.core  # make check runs these on a core with its own assertions


def manage(model: nn.Module, **options: Any) -> tuple[gs.Engine, Any]:
    optimizer = gs.HybridAdam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    options = {"placement_policy": "cpu", "chunk_size": 4096, **options}
    return gs.manage(model, optimizer, device="cpu", **options), optimizer


def linears(n: int = 4, width: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(n)))


class Scale(nn.Module):
    """Saves its parameter itself, not a view of it."""

    def __init__(self, around: Callable[[], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4096))
        self.around = around

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.around():
            return (x * self.weight).sin()


def input_grad(model: nn.Module) -> torch.Tensor:
    x = torch.linspace(-1, 1, 8192).reshape(2, 4096).requires_grad_()
    with torch.no_grad():
        y = model(x)
    if not y.requires_grad:
        y = model(x)
    return torch.autograd.grad(y.sum(), x)[0]


@pytest.mark.parametrize(
    "around",
    [
        torch.enable_grad,
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        torch.autograd.graph.save_on_cpu,
    ],
    ids=["enable_grad", "identity_hooks", "save_on_cpu"],
)
def test_contexts_inside_a_forward_keep_the_net(around: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Scale(around) for _ in range(4)))
    want = input_grad(model)
    engine, _ = manage(model)
    assert torch.equal(input_grad(model), want)
    engine._runtime.core.check()


class SelfCheckpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).tanh() * self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def test_checkpoint_of_a_part_of_a_forward() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(SelfCheckpointed(), SelfCheckpointed())
    x = torch.randn(3, 64, requires_grad=True)
    model(x).sum().backward()
    want = [x.grad, *(p.grad.clone() for p in model.parameters())]
    model.zero_grad()
    x.grad = None
    _, _ = manage(model)
    model(x).sum().backward()
    for got, wanted in zip(
        [x.grad, *(p.grad.clone() for p in model.parameters())], want, strict=True
    ):
        assert torch.equal(got, wanted)


def test_data_of_one_parameter_assigned_to_another() -> None:
    model = linears()
    third = model[3].weight.detach().clone()
    first = model[1].weight.detach().clone()
    manage(model)
    with pytest.raises(gs.GuardError, match="0.weight.* would be the memory of 3.weight"):
        model[0].weight.data = model[3].weight.data  # torch would tie the two
    model[0].weight.data = model[3].weight.data.clone()
    assert torch.equal(model[0].weight.clone(), third)
    with pytest.raises(gs.GuardError, match="1.weight: its elements keep the order in memory"):
        model[1].weight.data = model[1].weight.data.t()
    model[1].weight.data = model[1].weight.data.t().clone(memory_format=torch.contiguous_format)
    assert torch.equal(model[1].weight.clone(), first.t())


def test_state_dict_of_a_submodule_with_names_like_its_parents() -> None:
    class Node(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.full((8,), float(depth)))
            self.left = Node(depth - 1) if depth else None

    model = Node(3)
    manage(model)
    for depth, part in ((3, model), (2, model.left), (1, model.left.left)):
        want = [float(d) for d in range(depth, -1, -1)]
        assert [v[0].item() for v in part.state_dict().values()] == want


def test_a_dropped_gradient_does_not_show_the_next_one() -> None:
    model = nn.Linear(4, 4)
    _, optimizer = manage(model)
    model(torch.ones(2, 4)).sum().backward()
    kept = model.weight.grad
    optimizer.zero_grad()
    model(3 * torch.ones(2, 4)).sum().backward()
    with pytest.raises(gs.GuardError, match=r"weight.*dropped"):
        kept.sum()
    assert model.weight.grad.sum().item() == 96.0


def test_gradient_assigned_from_something_else_of_the_same_parameter() -> None:
    model = nn.Linear(6, 6)
    weight = model.weight.detach().clone()
    manage(model)
    model(torch.randn(2, 6)).sum().backward()
    grad = model.weight.grad.clone()
    model.weight.grad = model.weight.grad.t()
    assert torch.equal(model.weight.grad.clone(), grad.t())
    model.weight.grad = model.weight.detach()
    with pytest.raises(gs.GuardError, match="weight: its grad would be the memory of weight"):
        model.weight.grad.clone()
    model.weight.grad = model.weight.detach().clone()
    assert torch.equal(model.weight.grad.clone(), weight)


def test_autograd_grad_while_a_hook_reads_another_parameter() -> None:
    model = linears(4, 32)

    def grads() -> list[torch.Tensor]:
        h = model[0](torch.ones(2, 32))
        h.register_hook(lambda g: g @ model[3].weight)
        return list(torch.autograd.grad(model[1:](h).sum(), list(model.parameters())))

    want = grads()
    manage(model)
    for got, wanted in zip(grads(), want, strict=True):
        assert torch.equal(got, wanted)


def test_user_hooks_registered_before_see_the_accumulated_gradient() -> None:
    model = nn.Linear(4, 4)
    seen: list[float] = []
    model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum().item()))
    manage(model)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    assert seen == [32.0, 64.0]


def test_in_place_write_before_use_inside_forward_trains() -> None:
    class Clamped(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.clamp_(-0.05, 0.05)
            return super().forward(x)

    torch.manual_seed(0)
    plain, managed = nn.Sequential(Clamped(16, 16)), nn.Sequential(Clamped(16, 16))
    managed.load_state_dict(plain.state_dict())
    reference = gs.HybridAdam(plain.parameters(), lr=1e-2)
    engine, optimizer = manage(managed)
    for _ in range(4):
        x = torch.randn(4, 16)
        for model, step in ((plain, reference), (managed, optimizer)):
            model(x).square().sum().backward()
            step.step()
            step.zero_grad()
    engine.close()
    assert torch.equal(plain[0].weight, managed[0].weight)


def test_all_is_collected_when_dropped_between_backward_and_step() -> None:
    model = linears(2)
    engine, optimizer = manage(model)
    model(torch.ones(1, 32)).sum().backward()
    alive = [weakref.ref(model), weakref.ref(engine)]
    del model, engine, optimizer
    gc.collect()
    assert [a() for a in alive] == [None, None]


def test_a_layer_frozen_after_a_step_can_be_managed() -> None:
    model = linears(2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 32)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model[0].requires_grad_(False)
    engine = gs.manage(model, optimizer, device="cpu")
    model(torch.ones(1, 32)).sum().backward()
    optimizer.step()
    engine.close()
    assert "exp_avg" in optimizer.state[model[0].weight]
    assert int(optimizer.state[model[1].weight]["step"]) == 2


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_loading_a_state_dict_refuses_what_manage_refuses(option: str) -> None:
    model = linears(1)
    engine, optimizer = manage(model)
    state = optimizer.state_dict()
    before = dict(optimizer.param_groups[0])
    state["param_groups"][0] = {**state["param_groups"][0], option: True, "lr": 9.0}
    with pytest.raises(ValueError, match=option):
        engine.load_optimizer_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == before["lr"]


def test_checkpointing_beside_another_engine_and_after_an_interrupt() -> None:
    """Nets of several engines delegate past each other; an interrupt leaves none of them on top."""
    other = linears(1)
    other_engine, _ = manage(other)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = linears(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    class Interrupt(BaseException):
        pass

    model = Checkpointed()
    engine, optimizer = manage(model)

    def interrupt(*_: object) -> None:
        raise Interrupt

    x = torch.ones(2, 32)
    for first in (model, other):  # the engine that was used last differs
        first(x)
        handle = model.layers[2].register_forward_hook(interrupt)
        with pytest.raises(Interrupt):
            model(x)
        handle.remove()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert not any(unit.is_entered for unit in engine._runtime.units)
    other_engine.close()
    engine.close()
