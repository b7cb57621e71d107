"""While an optimizer's own step() runs other threads get what they ask of the engine; its own is refused the model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gemini_strategy as gs
from gemini_strategy.errors import GeminiError


class _Calling(torch.optim.Optimizer):
    """SGD with momentum that calls a function in its step()."""

    inside: Callable[[], Any] | None = None

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state.setdefault("buffer", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                    p.add_(state["buffer"], alpha=-group["lr"])
        if _Calling.inside is not None:
            _Calling.inside()


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    yield
    _Calling.inside = None


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, n: int) -> None:
    for number in range(n):
        optimizer.zero_grad()
        x = torch.randn(3, 16, generator=torch.Generator().manual_seed(number))
        model(x).square().sum().backward()
        optimizer.step()


def test_other_threads_are_served() -> None:
    """The engine's lock is free: torch's allocator, which asks for room, may be waited for inside step()."""
    model, plain = _model(), _model()
    optimizer = _Calling(model.parameters())
    _train(plain, _Calling(plain.parameters()), 5)
    with gs.manage(model, optimizer, device="cpu") as engine:
        core = engine._runtime.core
        seen = []

        def ask() -> None:
            seen.append((core.stats()["chunks"], core.reserve(1), core.plan_info(), core.leased()))

        def wait_for_other() -> None:
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()

        _Calling.inside = wait_for_other
        _train(model, optimizer, 5)
        core.issue(0)
        _Calling.inside = None
        n_chunks = core.stats()["chunks"]
        assert len(seen) == 5 * n_chunks
        assert all(chunks == n_chunks and has_room for chunks, has_room, _, _ in seen)
        assert any(plan is not None for _, _, plan, _ in seen)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("what", ["read", "call", "close", "state_dict"])
def test_its_own_thread_is_refused(what: str) -> None:
    """By name, and the engine is closed with that as the cause."""
    model = _model()
    optimizer = _Calling(model.parameters())
    engine = gs.manage(model, optimizer, device="cpu")
    acts: dict[str, Callable[[], Any]] = {
        "read": lambda: model[0].weight.sum(),
        "call": lambda: model(torch.zeros(1, 16)),
        "close": engine.close,
        "state_dict": optimizer.state_dict,
    }
    _train(model, optimizer, 1)
    _Calling.inside = acts[what]
    with pytest.raises(GeminiError, match="has used the managed model or its engine"):
        _train(model, optimizer, 1)
    _Calling.inside = None
    with pytest.raises(GeminiError, match="closed by an earlier error"):
        _train(model, optimizer, 1)
    with pytest.warns(RuntimeWarning, match="ended inside a step"):
        engine.close()
