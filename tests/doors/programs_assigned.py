"""Programs that put something in the place of a gradient or a state: itself, its data, or one of its names."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from programs import Run, door


def _moment(run: Run, key: str = "exp_avg") -> Tensor:
    return run.optimizer.state[run.w][key]


def _ones(run: Run, factor: float = 1.0) -> Tensor:
    return torch.full((32, 32), factor, device=run.device)


# ---- a gradient's data ---------------------------------------------------------------------------


@door("assigned/p.grad.data", "19", served=True)
def _(run: Run) -> Any:
    run.backward()
    run.w.grad.data = _ones(run)
    kept = run.w.grad
    norm = run.clip(1.0)
    run.optimizer.step()
    return [norm, kept.clone()]


@door("assigned/p.grad.data, by a loop over the model", "19", served=True)
def _(run: Run) -> Any:
    run.backward()
    for p in run.model.parameters():
        p.grad.data = p.grad.data.clamp(-1e-3, 1e-3)
    run.optimizer.step()
    return [p.grad.clone() for p in run.model.parameters()]


@door("assigned/p.grad.data before more of it", "19", served=True)
def _(run: Run) -> Any:
    run.backward()
    loss = run.loss(1)
    run.w.grad.data = _ones(run)
    loss.backward()
    return run.w.grad.clone()


@door("assigned/p.grad.data, then what it was given is written", "19")
def _(run: Run) -> Any:
    run.backward()
    kept, values = run.w.grad, _ones(run)
    view, alias = kept[3], kept.detach()
    kept.data = values
    values.mul_(0.5)
    first = run.w.grad.clone()
    run.backward(1)
    kept.add_(1.0)
    return [first, values.clone(), kept.clone(), view.clone(), alias.clone(), kept is run.w.grad]


@door("assigned/p.grad.data of a view", "19", served=True)
def _(run: Run) -> Any:
    run.backward()
    view, alias = run.w.grad[3], run.w.grad.detach()
    view.data = torch.zeros(32, device=run.device)
    alias.data = _ones(run)
    return [view.clone(), alias.clone(), run.w.grad.clone()]


@door("assigned/p.grad.data twice", "19")
def _(run: Run) -> Any:
    run.backward()
    first, second = _ones(run), _ones(run, 2.0)
    run.w.grad.data = first
    run.w.grad.data = second
    first.zero_()
    second.add_(0.5)
    return [run.w.grad.clone(), first.clone()]


@door("assigned/p.grad.data of another shape", "19")
def _(run: Run) -> Any:
    run.backward()
    run.w.grad.data = torch.ones(32, device=run.device)
    return nn.utils.clip_grad_norm_(run.model.parameters(), 1e9)


@door("assigned/p.grad.data of another dtype", "19")
def _(run: Run) -> Any:
    run.backward()
    run.w.grad.data = _ones(run).double()
    return [(run.w.grad + 0.1).norm(), nn.utils.clip_grad_norm_(run.model.parameters(), 1e9)]


@door("assigned/p.grad.data, a gradient's", "19")
def _(run: Run) -> Any:
    run.backward()
    other = run.param("layers.2.weight")
    run.w.grad.data = other.grad.data
    run.w.grad.mul_(0.5)
    norm = run.clip(1e9)
    return [norm, run.w.grad.clone(), other.grad.clone()]


@door("assigned/p.grad.data, a weight's", "19")
def _(run: Run) -> Any:
    run.backward()
    run.w.grad.data = run.w.data
    run.w.grad.mul_(0.5)
    norm = run.clip(1e9)
    return [norm, run.w.grad.clone(), run.w.detach().clone()]


@door("assigned/p.grad.data, its own", "19", served=True)
def _(run: Run) -> Any:
    run.backward()
    kept = run.w.grad
    run.w.grad.data = run.w.grad.data
    kept.mul_(0.5)
    return run.w.grad.clone()


@door("assigned/model.to", "19")
def _(run: Run) -> Any:
    run.backward()
    kept = run.w.grad
    run.model.to(torch.float32)
    run.model.to(run.device)
    kept.mul_(0.5)
    return [p.grad.clone() for p in run.model.parameters()]


# ---- a gradient ----------------------------------------------------------------------------------


@door("assigned/p.grad, then its data", "19")
def _(run: Run) -> Any:
    run.backward()
    given = _ones(run)
    run.w.grad = given
    given.data = _ones(run, 2.0)
    given.add_(0.5)
    run.backward(1)
    return [run.w.grad.clone(), given.clone()]


@door("assigned/p.grad, written, then another", "19")
def _(run: Run) -> Any:
    run.backward()
    given = _ones(run)
    run.w.grad = given
    kept = run.w.grad
    given.mul_(0.5)
    run.w.grad = _ones(run, 3.0)
    return [kept.clone(), run.w.grad.clone()]


@door("assigned/p.grad, its own under another name", "19", served=True)
def _(run: Run) -> Any:
    run.backward()
    kept = run.w.grad
    run.w.grad = kept.detach()
    kept.mul_(0.5)
    return run.w.grad.clone()


@door("assigned/p.grad, its own transposed", "19")
def _(run: Run) -> Any:
    run.backward()
    kept = run.w.grad
    run.w.grad = kept.t()
    kept[0].zero_()
    return run.w.grad.clone()


@door("assigned/p.grad, another, and back", "19")
def _(run: Run) -> Any:
    run.backward()
    kept = run.w.grad
    run.w.grad = _ones(run)
    first = run.w.grad.clone()
    run.w.grad = kept
    kept.mul_(0.5)
    return [first, run.w.grad.clone()]


@door("assigned/p.grad, the one of another", "19")
def _(run: Run) -> Any:
    run.backward()
    other = run.param("layers.2.weight")
    run.w.grad = other.grad
    other.grad.mul_(0.5)
    return [run.w.grad.clone(), other.grad.clone()]


@door("assigned/p.grad, those of two, swapped", "19", served=True)
def _(run: Run) -> Any:
    run.backward()
    other = run.param("layers.2.weight")
    run.w.grad, other.grad = other.grad, run.w.grad
    first = [run.w.grad.clone(), other.grad.clone()]
    run.optimizer.step()
    return [first, run.w.grad.clone()]


@door("assigned/p.grad, a weight", "19")
def _(run: Run) -> Any:
    run.w.grad = run.w.detach()
    run.w.grad.mul_(0.5)
    return [run.w.detach().clone(), run.w.grad.clone()]


@door("assigned/p.grad, one tensor for two", "19")
def _(run: Run) -> Any:
    given = _ones(run)
    other = run.param("layers.2.weight")
    run.w.grad = other.grad = given
    run.backward()
    return [given.clone(), run.w.grad.clone(), other.grad.clone()]


@door("assigned/p._grad read", "19", served=True)
def _(run: Run) -> Any:
    before = run.w._grad
    run.backward()
    return [before, run.w._grad.clone(), run.b._grad is run.b.grad]


@door("assigned/p._grad", "19", served=True)
def _(run: Run) -> Any:
    run.backward()
    run.w._grad = run.w._grad * 0.5
    run.b._grad = None
    run.w._grad.data.mul_(2.0)
    run.param("head.bias")._grad.zero_()
    return [run.w.grad.clone(), run.b.grad, run.param("head.bias").grad.clone()]


# ---- states --------------------------------------------------------------------------------------


@door("assigned/exp_avg.data", "5", served=True)
def _(run: Run) -> Any:
    run.step(1)
    kept = _moment(run)
    view = kept.detach()
    before = kept.clone()
    kept.data = _ones(run, 0.0)
    return [before, view.clone(), run.step(2), kept.clone(), _moment(run) is kept]


@door("assigned/exp_avg_sq.data, then what it was given is written", "5")
def _(run: Run) -> Any:
    run.step(1)
    values = _ones(run)
    _moment(run, "exp_avg_sq").data = values
    values.mul_(4.0)
    return [run.step(2), values.clone()]


@door("assigned/all states moved by data", "5", served=True)
def _(run: Run) -> Any:
    run.step(1)
    for state in run.optimizer.state.values():
        for value in state.values():
            value.data = value.data.to(run.device)
            if value._grad is not None:
                value._grad.data = value._grad.data.to(run.device)
    return [run.step(1), [v.clone() for v in run.optimizer.state[run.w].values()]]


@door("assigned/exp_avg.data of another shape", "5", trains=False)
def _(run: Run) -> Any:
    run.step(1)
    _moment(run).data = torch.ones(32, device=run.device)
    return list(_moment(run).shape)  # a step would be an error


@door("assigned/exp_avg.data, that of another", "5")
def _(run: Run) -> Any:
    run.step(1)
    _moment(run).data = run.optimizer.state[run.param("layers.2.weight")]["exp_avg"].data
    return run.step(2)


@door("assigned/exp_avg, then written", "5")
def _(run: Run) -> Any:
    run.step(1)
    old, given = _moment(run), _ones(run, 1e-3)
    run.optimizer.state[run.w]["exp_avg"] = given
    given.mul_(0.5)
    return [run.step(2), given.clone(), old.clone()]


@door("assigned/exp_avg, then its data", "5")
def _(run: Run) -> Any:
    run.step(1)
    given = _ones(run, 1e-3)
    run.optimizer.state[run.w]["exp_avg"] = given
    given.data = _ones(run, 2e-3)
    return [run.step(2), given.clone()]


@door("assigned/exp_avg, that of another", "5")
def _(run: Run) -> Any:
    run.step(1)
    state = run.optimizer.state
    state[run.w]["exp_avg"] = state[run.param("layers.2.weight")]["exp_avg"]
    return [run.step(2), [state[run.w]["exp_avg"].clone()]]


@door("assigned/exp_avg, its own under another name", "5", served=True)
def _(run: Run) -> Any:
    run.step(1)
    kept = _moment(run)
    run.optimizer.state[run.w]["exp_avg"] = kept.detach()
    kept.mul_(0.5)
    return run.step(2)


@door("assigned/exp_avg, a gradient", "5")
def _(run: Run) -> Any:
    run.step(1)
    run.backward()
    run.optimizer.state[run.w]["exp_avg"] = run.w.grad
    run.optimizer.step()
    return _moment(run).clone()


@door("assigned/step, then written", "5", served=True)
def _(run: Run) -> Any:
    run.step(1)
    old, given = _moment(run, "step"), torch.tensor(3.0)
    run.optimizer.state[run.w]["step"] = given
    given.add_(4.0)
    return [run.step(2), old.clone(), given.clone()]


@door("assigned/step.data", "5", served=True)
def _(run: Run) -> Any:
    run.step(1)
    _moment(run, "step").data = torch.tensor(30.0)
    return [run.step(2), _moment(run, "step").clone()]


@door("assigned/a state as a whole, then written", "5")
def _(run: Run) -> Any:
    run.step(1)
    old = dict(run.optimizer.state[run.w])
    given = {"step": torch.tensor(5.0), "exp_avg": _ones(run, 1e-3), "exp_avg_sq": _ones(run)}
    run.optimizer.state[run.w] = dict(given)
    given["exp_avg"].mul_(2.0)
    given["step"].fill_(9.0)
    losses = run.step(2)
    return [losses, given, [old[k].clone() for k in ("exp_avg", "exp_avg_sq", "step")]]


@door("assigned/states of two, swapped", "5", served=True)
def _(run: Run) -> Any:
    run.step(1)
    state, other = run.optimizer.state, run.param("layers.2.weight")
    mine = dict(state[run.w])
    state[run.w] = dict(state[other])
    state[other] = mine
    first = {k: v.clone() for k, v in state[run.w].items()}
    return [first, run.step(2), {k: v.clone() for k, v in state[other].items()}]


@door("assigned/a state of another", "5")
def _(run: Run) -> Any:
    run.step(1)
    state = run.optimizer.state
    state[run.w] = dict(state[run.param("layers.2.weight")])
    return [run.step(2), state[run.w]["exp_avg"].clone()]


@door("assigned/remainder.data", "2", precision="bf16-mixed")
def _(run: Run) -> Any:
    run.step(1)
    given = torch.zeros(32, 32, dtype=torch.int16, device=run.device)
    _moment(run, "remainder").data = given
    given.add_(5)
    return [run.step(2), given.clone()]


@door("assigned/remainder, then written", "2", precision="bf16-mixed")
def _(run: Run) -> Any:
    run.step(1)
    given = torch.zeros(32, 32, dtype=torch.int16, device=run.device)
    run.optimizer.state[run.w]["remainder"] = given
    given.add_(5)
    return [run.step(2), given.clone()]


# ---- what was taken before -----------------------------------------------------------------------


@door("assigned/moments kept over a load", "5", served=True)
def _(run: Run) -> Any:
    run.step(1)
    saved = copy.deepcopy(run.optimizer.state_dict())
    run.step(1)
    kept = dict(run.optimizer.state[run.w])
    run.optimizer.load_state_dict(saved)
    return [{k: v.clone() for k, v in kept.items()}, run.step(1)]


@door("assigned/state dict kept over a load", "5", served=True)
def _(run: Run) -> Any:
    run.step(1)
    first = copy.deepcopy(run.optimizer.state_dict())
    run.step(1)
    kept = run.optimizer.state_dict()
    run.optimizer.load_state_dict(first)
    values = kept["state"][8]["exp_avg"].clone()
    run.optimizer.load_state_dict(kept)
    return [values, run.step(1)]


@door("assigned/state dict kept over another moment", "5")
def _(run: Run) -> Any:
    run.step(1)
    kept = run.optimizer.state_dict()["state"][8]
    run.step(1)
    run.optimizer.state[run.w]["exp_avg"] = _ones(run, 0.0)
    first = kept["exp_avg"].clone()
    run.step(1)
    return [first, kept["exp_avg"].clone()]


@door("assigned/state dict kept over the data of a moment", "5")
def _(run: Run) -> Any:
    run.step(1)
    kept = run.optimizer.state_dict()["state"][8]
    run.optimizer.state[run.w]["exp_avg"].data = _ones(run, 0.0)
    return [kept["exp_avg"].clone(), run.step(1)]


@door("assigned/entry kept over a load", "5", served=True)
def _(run: Run) -> Any:
    run.step(1)
    kept = run.optimizer.state[run.w]
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    run.step(1)
    return [kept["exp_avg"].clone(), run.optimizer.state[run.w]["exp_avg"].clone()]


@door("assigned/entry kept over another", "5", served=True)
def _(run: Run) -> Any:
    run.step(1)
    state = run.optimizer.state
    kept = state[run.w]
    state[run.w] = {k: v.clone() for k, v in kept.items()}
    run.step(1)
    return [kept["exp_avg"].clone(), state[run.w]["exp_avg"].clone()]


@door("assigned/entry kept over a pop", "5", served=True)
def _(run: Run) -> Any:
    run.step(1)
    kept = run.optimizer.state[run.w]
    popped = run.optimizer.state.pop(run.w)
    run.step(1)
    return [kept["exp_avg"].clone(), popped["exp_avg"].clone(), float(kept["step"])]


@door("assigned/state dict kept over a clear", "5", served=True)
def _(run: Run) -> Any:
    run.step(1)
    kept = run.optimizer.state_dict()["state"][8]["exp_avg"]
    run.step(1)
    run.optimizer.state.clear()
    first = kept.clone()
    run.step(1)
    return [first, kept.clone()]


@door("assigned/moment kept over a clear", "5")
def _(run: Run) -> Any:
    run.step(1)
    kept = _moment(run)
    run.optimizer.state.clear()
    run.step(1)
    return [kept.clone(), _moment(run).clone()]


@door("assigned/state dict's moment by data", "5")
def _(run: Run) -> Any:
    run.step(1)
    run.optimizer.state_dict()["state"][8]["exp_avg"].data = _ones(run, 0.0)
    return run.step(2)


@door("assigned/state dicts kept over the end", "8", served=True, trains=False)
def _(run: Run) -> Any:
    run.step(1)
    weights, states = run.model.state_dict(), run.optimizer.state_dict()
    run.step(1)
    if run.engine is not None:
        run.engine.close()
    return [weights, states["state"]]


# ---- one piece of memory for two -----------------------------------------------------------------


@door("assigned/p.data, one tensor for two", "19")
def _(run: Run) -> Any:
    given = _ones(run, 1e-2)
    run.w.data = given
    run.param("layers.2.weight").data = given
    return run.step(2)


@door("assigned/exp_avg, one tensor for two", "5")
def _(run: Run) -> Any:
    run.step(1)
    given, state = _ones(run, 1e-3), run.optimizer.state
    state[run.w]["exp_avg"] = state[run.param("layers.2.weight")]["exp_avg"] = given
    return [run.step(2), given.clone()]


@door("assigned/p.grad and p.data, one tensor", "19")
def _(run: Run) -> Any:
    run.w.data = given = _ones(run, 1e-2)
    run.w.grad = given
    run.optimizer.step()
    return [given.clone(), run.w.detach().clone()]


@door("assigned/p.data, that of another in its unit", "19")
def _(run: Run) -> Any:
    def assign(module: nn.Module, args: Any) -> None:
        run.param("layers.2.weight").data = module.weight.data

    handle = run.model.layers[3].register_forward_pre_hook(assign)
    try:
        run.loss()
    finally:
        handle.remove()
    return run.step(2)


@door("assigned/p.data, its own in its unit", "19", served=True)
def _(run: Run) -> Any:
    def assign(module: nn.Module, args: Any) -> None:
        module.weight.data = module.weight.data

    handle = run.model.layers[3].register_forward_pre_hook(assign)
    losses = run.step(2)
    handle.remove()
    return losses


@door("assigned/p.grad.data, another part of one storage", "19")
def _(run: Run) -> Any:
    both = torch.arange(2048.0, device=run.device).mul_(1e-3)
    given = both[:1024].view(32, 32)
    run.w.grad = given
    given.data = both[1024:].view(32, 32)
    both.mul_(0.5)
    return [run.w.grad.clone(), both.clone()]


@door("assigned/p.grad, then its array is written", "19")
def _(run: Run) -> Any:
    if run.device != "cpu":
        return None
    run.backward()
    given = _ones(run)
    run.w.grad = given
    array = run.w.grad.numpy()
    array[0] = 5.0
    first = given.clone()
    given[1] = 7.0
    return [first, array.copy(), run.w.grad.clone()]
