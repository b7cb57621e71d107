"""Programs that write weights between the forward and backward of a checkpoint, which computes with those of then."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from programs import Run, door


def _weights(run: Run) -> list[nn.Parameter]:
    return list(run.model.parameters())


def _assign(run: Run) -> None:
    for p in _weights(run):
        p.data = p.data * 0.5


def _swap(run: Run) -> None:
    one, other = run.w.data.clone(), run.param("layers.2.weight").data.clone()
    run.w.data, run.param("layers.2.weight").data = other, one


def _step(run: Run) -> None:
    for p in _weights(run):
        p.grad = torch.ones_like(p)
    run.finish()


_WRITES: dict[str, Callable[[Run], Any]] = {
    "data =": _assign,
    "data swapped": _swap,
    "mul_": lambda r: [p.mul_(0.5) for p in _weights(r)],
    "data.mul_": lambda r: [p.data.mul_(0.5) for p in _weights(r)],
    "detach().add_": lambda r: r.w.detach().add_(0.1),
    "foreach": lambda r: torch._foreach_mul_(_weights(r), 0.5),
    "an item": lambda r: r.w.__setitem__(0, 0.0),
    "load_state_dict": lambda r: r.model.load_state_dict(
        {k: v * 0.5 for k, v in r.model.state_dict().items()}
    ),
    "step": _step,
}
_ROUNDS: dict[str, Callable[[Run, Tensor], Tensor]] = {
    "the model": lambda r, x: checkpoint(r.model, x, use_reentrant=False),
    "reentrant": lambda r, x: checkpoint(r.model, x, use_reentrant=True),
    "one in another": lambda r, x: checkpoint(
        lambda x: checkpoint(r.model, x, use_reentrant=False).tanh(), x, use_reentrant=False
    ),
    "weights outside": lambda r, x: checkpoint(
        lambda x: r.model(x) @ r.param("layers.2.weight")[:8] @ r.w, x, use_reentrant=False
    ),
}


def _written_between(round_: Callable[[Run, Tensor], Tensor], write: Callable[[Run], Any]) -> Any:
    def program(run: Run) -> Any:
        x = run.x().requires_grad_()
        loss = round_(run, x).square().mean()
        with torch.no_grad():
            write(run)
        loss.backward()
        grads = [x.grad, *(p.grad.clone() for p in _weights(run) if p.grad is not None)]
        run.optimizer.zero_grad()
        return [grads, run.step(2)]

    return program


for _round, _write in itertools.product(_ROUNDS, _WRITES):
    door(f"checkpoint of {_round}, then {_write}", "17", served=True)(
        _written_between(_ROUNDS[_round], _WRITES[_write])
    )
