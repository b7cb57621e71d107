"""What a signal's handler raises reaches the caller, wherever it comes, and the engine works on."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import gemini_strategy as gs

WIDTH = 32
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


class _Stop(BaseException):
    """What a handler raises that nobody else does."""


class _LateError(Exception):
    """What the handler of an alarm raises."""


KINDS = [KeyboardInterrupt, SystemExit, _LateError, _Stop]


@pytest.fixture
def handle() -> Iterator[Callable[[type[BaseException]], None]]:
    """Sets what the handler of SIGINT raises."""
    before = signal.getsignal(signal.SIGINT)

    def set_kind(kind: type[BaseException]) -> None:
        def raise_it(*_: Any) -> None:
            raise kind("of a handler")

        signal.signal(signal.SIGINT, raise_it)

    yield set_kind
    signal.signal(signal.SIGINT, before)


def arriving() -> Any:
    """A hook of a tensor in which a SIGINT arrives.

    No Python runs in it, so that the signal waits until some does, as one that arrives inside a kernel.
    """
    return ctypes.PYFUNCTYPE(None, ctypes.py_object)(("PyErr_SetInterrupt", ctypes.pythonapi))


def layers() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def managed(policy: str = "cpu") -> tuple[nn.Module, torch.optim.Optimizer, gs.Engine]:
    model, optimizer = layers()
    engine = gs.manage(
        model,
        optimizer,
        device_budget="24kB",
        device="cpu",
        chunk_size=WIDTH * (WIDTH + 1),
        placement_policy=policy,
    )
    return model, optimizer, engine


def loss_with(model: nn.Module, place: int | None, hook: Any = None) -> torch.Tensor:
    """A loss at whose layer `place` the hook is called in the backward."""
    hidden = X
    for i, layer in enumerate(model):
        hidden = layer(hidden)
        if i == place:
            hidden.register_hook(hook)
    return hidden.square().mean()


WAYS: dict[str, Callable[[gs.Engine, torch.Tensor], None]] = {
    "loss.backward": lambda engine, loss: loss.backward(),
    "engine.backward": lambda engine, loss: engine.backward(loss),
    "step=True": lambda engine, loss: engine.backward(loss, step=True),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, engine: gs.Engine, way: str) -> None:
    WAYS[way](engine, loss_with(model, None))
    optimizer.step()
    optimizer.zero_grad()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def uninterrupted(way: str, policy: str, n: int) -> list[torch.Tensor]:
    model, optimizer, engine = managed(policy)
    for _ in range(n):
        step(model, optimizer, engine, way)
    engine.close()
    return weights(model)


# ---- a signal that arrives inside torch's C++ ----


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["loss.backward", "engine.backward"])
@pytest.mark.parametrize("place", [0, 1, 3])
def test_what_a_handler_raises_in_a_backward_is_raised_by_it(
    place: int, way: str, kind: type[BaseException], handle: Any
) -> None:
    handle(kind)
    model, optimizer, engine = managed()
    for _ in range(3):
        step(model, optimizer, engine, way)
    loss = loss_with(model, place, arriving())
    with pytest.raises(kind, match="of a handler"):
        WAYS[way](engine, loss)
    optimizer.zero_grad()
    step(model, optimizer, engine, way)
    engine.close()
    for got, want in zip(weights(model), uninterrupted(way, "cpu", 4), strict=True):
        assert torch.equal(got, want)
