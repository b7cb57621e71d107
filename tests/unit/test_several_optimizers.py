"""Several optimizers of one model, each of other parameters: Muon for its matrices, AdamW for the rest."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gemini_strategy as gs
from gemini_strategy.optim.adam import clip_coefficient

pytestmark = pytest.mark.core  # make check runs these on a core with its own assertions

STEPS = 6


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 48), nn.Linear(48, 8)]
    return nn.Sequential(*layers)


def _pair(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


def _loss(model: nn.Module, step: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return model(torch.randn(4, 32, generator=generator).to(dtype)).float().square().mean()


def _clip(model: nn.Module, limit: float) -> None:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    factor = clip_coefficient(gs.grad_norm(grads), limit)
    for grad in grads:
        grad.mul_(factor)


def _train(
    model: nn.Module,
    optimizers: list[Any],
    dtype: torch.dtype,
    backward: Callable[[torch.Tensor], object],
    clip: Callable[[], object],
) -> None:
    for step in range(STEPS):
        backward(_loss(model, step, dtype))
        clip()
        for number, optimizer in enumerate(optimizers):
            if number == 0 or step != 2:  # one of them leaves a step out, and gets both gradients
                optimizer.step()
                optimizer.zero_grad()


def _outcome(model: nn.Module, optimizers: list[Any]) -> dict[Any, Any]:
    found: dict[Any, Any] = {name: p.detach().clone() for name, p in model.named_parameters()}
    for number, optimizer in enumerate(optimizers):
        for index, entry in optimizer.state_dict()["state"].items():
            found |= {(number, index, key): value for key, value in entry.items()}
    return found


def _assert_same(found: dict[Any, Any], want: dict[Any, Any]) -> None:
    assert found.keys() == want.keys()
    for key, value in want.items():
        assert torch.equal(found[key].to(value.dtype), value), key


@pytest.mark.parametrize("how", ["plain", "clipped", "step=True"])
@pytest.mark.parametrize(
    "place",
    [{}, {"device_budget": 96 << 10}, {"placement_policy": "cpu"}],
    ids=["all", "budget", "cpu"],
)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_bits(precision: str, place: dict[str, Any], how: str) -> None:
    dtype = torch.float32 if precision == "32-true" else torch.bfloat16
    model = _model().to(dtype)
    optimizers = _pair(model)
    limit = 0.05

    def clip() -> None:
        if how == "clipped":
            _clip(model, limit)

    _train(model, optimizers, dtype, torch.Tensor.backward, clip)
    want = _outcome(model, optimizers)

    model = _model()
    optimizers = _pair(model)
    engine = gs.manage(
        model, optimizers, device="cpu", precision=precision, chunk_size=4096, **place
    )
    assert engine.optimizer == tuple(optimizers)

    def managed_clip() -> None:
        if how == "clipped":
            engine.clip_grad_norm_(limit)

    def backward(loss: torch.Tensor) -> None:
        engine.backward(loss, step=how == "step=True")

    _train(model, optimizers, dtype, backward, managed_clip)
    _assert_same(_outcome(model, optimizers), want)
    engine.close()
    _assert_same(_outcome(model, optimizers), want)
    assert [type(each) for each in optimizers] == [torch.optim.Muon, torch.optim.AdamW]


def test_a_step_is_of_its_own_parameters() -> None:
    model = _model()
    muon, adamw = _pair(model)
    with contextlib.closing(gs.manage(model, [muon, adamw], device="cpu")) as engine:
        engine.backward(_loss(model, 0, torch.float32))
        before = {name: p.clone() for name, p in model.named_parameters()}
        muon.step()
        muon.zero_grad()
        for name, p in model.named_parameters():
            assert torch.equal(p, before[name]) is (p.ndim != 2), name
            assert (p.grad is None) is (p.ndim == 2), name
        engine.step()  # both: Muon has no gradients now
        for name, p in model.named_parameters():
            assert not torch.equal(p, before[name]) or p.ndim == 2, name


class Slow(torch.optim.SGD):
    """Has few elements, and takes long for them."""

    def step(self, closure: Any = None) -> Any:
        time.sleep(2e-3)
        return super().step(closure)


@pytest.mark.parametrize("is_slow_first", [True, False])
def test_steps_and_rate(is_slow_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both make one step; and a plan's rate of updates is that of the larger ones."""
    monkeypatch.setenv("GEMINI_TUNE", "1")
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(80)])
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    optimizers = [torch.optim.SGD(matrices, lr=1e-4), Slow(rest, lr=1e-4)]
    if is_slow_first:
        optimizers.reverse()
    options: dict[str, Any] = {"chunk_size": 1 << 15, "device_budget": 1 << 19}
    with contextlib.closing(gs.manage(model, optimizers, device="cpu", **options)) as engine:
        for _ in range(STEPS):
            engine.backward(model(torch.randn(4, 64)).square().mean())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        stats = engine.stats()
    assert stats["steps"] == STEPS
    assert stats["planned"]
    # 128 elements of biases in 2 ms each would be 5 s for all
    assert stats["predicted_compute_seconds"] < 1


def test_one_list_of_one() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with contextlib.closing(gs.manage(model, [optimizer], device="cpu")) as engine:
        assert engine.optimizer is optimizer


def test_a_loss_scale_is_of_one_optimizer() -> None:
    model = _model()
    with pytest.raises(gs.GeminiError, match="2 optimizers of fp16 weights would share one loss"):
        gs.manage(model, _pair(model), device="cpu", precision="16-mixed")
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_states_go_and_come() -> None:
    model = _model()
    optimizers = _pair(model)
    engine = gs.manage(model, optimizers, device="cpu", chunk_size=4096)
    _train(model, optimizers, torch.float32, engine.backward, lambda: None)
    saved = engine.state_dict()
    want = _outcome(model, optimizers)
    engine.close()

    model = _model()
    optimizers = _pair(model)
    engine = gs.manage(model, optimizers, device="cpu", placement_policy="cpu", chunk_size=8192)
    engine.load_state_dict(saved)
    _assert_same(_outcome(model, optimizers), want)
    engine.close()
