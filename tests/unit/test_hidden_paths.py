"""What only a process of its own shows of weights that are absent: what is refused by name, what is collected, and nets
of several engines beside each other.  What programs read and write is in tests/doors.
"""

from __future__ import annotations

import gc
import weakref
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


@pytest.mark.parametrize("change", ["half", "double", "bfloat16"])
def test_cast_after_manage_is_refused(change: str) -> None:
    model = linears()
    want = {k: v.clone() for k, v in model.state_dict().items()}
    manage(model)
    with pytest.raises(gs.GeminiError, match=r"\d\.(weight|bias)"):
        getattr(model, change)()
    for name, got in model.state_dict().items():
        assert torch.equal(got.clone(), want[name])


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_a_result_of_another_size_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 8))
    manage(model)
    p, other = model[0].weight, model[1].weight
    for out in (p, p.data, p.detach()):
        with torch.no_grad(), pytest.raises(gs.GeminiError, match=r"0.weight: .*size is fixed"):
            torch.mul(other, 1, out=out)
    with pytest.raises(gs.GeminiError, match=r"0.weight: its grad has shape .*sparse"):
        p.grad = torch.ones(64, 32).to_sparse()
    # torch's kernel has written the result by then.
    assert p.detach().flatten()[: other.numel()].equal(other.detach().flatten())


def test_all_is_collected_when_dropped_between_backward_and_step() -> None:
    model = linears(2)
    engine, optimizer = manage(model)
    model(torch.ones(1, 32)).sum().backward()
    alive = [weakref.ref(model), weakref.ref(engine)]
    del model, engine, optimizer
    gc.collect()
    assert [a() for a in alive] == [None, None]


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
        assert not any(unit.n_entered for unit in engine._runtime.units)
    other_engine.close()
    engine.close()
