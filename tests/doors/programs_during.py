"""Programs that look and write while a pass runs, and forwards with contexts of torch of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from programs import Run, Six, door, left, rows

# ---- hooks that read everything ------------------------------------------------------------------

Look = Callable[[], None]


def _of_outputs(model: nn.Module, look: Look) -> list[Any]:
    def attach(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda g: look())

    return [m.register_forward_hook(attach) for m in (model.layers[0], model.layers[4], model)]


def _of_all_modules(model: nn.Module, look: Look) -> list[Any]:
    modules = nn.modules.module
    return [
        modules.register_module_forward_hook(lambda *_: look()),
        modules.register_module_forward_pre_hook(lambda *_: look()),
    ]


HOOKS: dict[str, Callable[[nn.Module, Look], list[Any]]] = {
    "forward": lambda m, look: [c.register_forward_hook(lambda *_: look()) for c in m.modules()],
    "before a forward": lambda m, look: [
        c.register_forward_pre_hook(lambda *_: look()) for c in m.modules()
    ],
    "backward": lambda m, look: [
        c.register_full_backward_hook(lambda *_: look()) for c in m.layers
    ],
    "before a backward": lambda m, look: [
        c.register_full_backward_pre_hook(lambda *_: look()) for c in m.layers
    ],
    "of outputs' gradients": _of_outputs,
    "of all modules": _of_all_modules,
}


def _looking(attach: Callable[[nn.Module, Look], list[Any]]) -> Callable[[Run], Any]:
    def program(run: Run) -> Any:
        seen: list[Any] = []

        def look() -> None:
            with torch.no_grad():
                names = ("layers.3.weight", "head.weight", "layers.0.bias")
                seen.append([run.param(n).clone() for n in names])
                seen.append(sum(p.detach().double().sum() for p in run.model.parameters()))

        handles = attach(run.model, look)
        losses = run.step(3, clip=1.0)
        for handle in handles:
            handle.remove()
        return [losses, seen, left(run)]

    return program


rows(
    "during",
    "10",
    {f"hooks that read, {name}": _looking(attach) for name, attach in HOOKS.items()},
    precision="bf16-true",
    served=True,
    needs_all=True,
)


@door("during/a hook that writes into a layer to come", "2", served=True, needs_all=True)
def _(run: Run) -> Any:
    def write(*_: Any) -> None:
        with torch.no_grad():
            run.model.head.weight.mul_(0.99)

    handle = run.model.layers[0].register_forward_hook(write)
    losses = run.step(3)
    handle.remove()
    return [losses, left(run)]


@door("during/autograd.grad while a hook reads another layer", "8", served=True)
def _(run: Run) -> Any:
    h = run.model.layers[0](run.h())
    h.register_hook(lambda g: g @ run.w)
    for layer in run.model.layers[1:]:
        h = layer(h)
    return torch.autograd.grad(h.sum(), list(run.model.layers.parameters()))


# ---- contexts inside a forward -------------------------------------------------------------------


class Scale(nn.Module):
    """Saves its parameter itself, not a view of it, inside a context."""

    def __init__(self, around: Callable[[], Any]) -> None:
        super().__init__()
        self.weight, self.around = nn.Parameter(torch.randn(4096)), around

    def forward(self, x: Tensor) -> Tensor:
        with self.around():
            return (x * self.weight).sin()


def _gradient_of_an_input(run: Run) -> Any:
    x = run.randn(2, 4096).requires_grad_()
    with torch.no_grad():
        y = run.model(x)
    if not y.requires_grad:
        y = run.model(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    if run.engine is not None:
        run.engine._runtime.core.check()
    return grad


for _name, _around in {
    "enable_grad": torch.enable_grad,
    "hooks of saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda t: t, lambda t: t
    ),
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
}.items():
    door(
        f"during/a forward under {_name}",
        "17",
        model=lambda around=_around: nn.Sequential(*(Scale(around) for _ in range(4))),
        served=True,
        trains=False,
        setups=("cpu",),
    )(_gradient_of_an_input)


class PartlyComputedAgain(Six):
    """Six, whose weights are used in checkpointed functions of the model and outside of them."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        for layer in self.layers:
            x = checkpoint(self._inner, layer, x, use_reentrant=False)
        return self.head(self.norm(x))

    def _inner(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return torch.tanh(x * layer.weight[0]) * layer.bias + x


@door("during/a part of a forward is computed again", "17", model=PartlyComputedAgain, served=True)
def _(run: Run) -> Any:
    return [run.step(3, clip=1.0), left(run)]


class ClampsItself(nn.Linear):
    """Writes its weight in its forward, before it uses it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.05, 0.05)
        return super().forward(x)


class Clamping(Six):
    """Six of such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ClampsItself(32, 32) for _ in range(6))


@door("during/a layer that clamps its weight first", "2", model=Clamping, served=True)
def _(run: Run) -> Any:
    return [run.step(4, clip=1.0), left(run)]


# ---- between backward and step -------------------------------------------------------------------


@door("during/reads between backward and step", "8", needs_all=True)
def _(run: Run) -> Any:
    run.backward()
    seen = [[p.norm(), p.clone(), p.data.sum(), p.grad.norm()] for p in run.model.parameters()]
    seen.append(nn.utils.parameters_to_vector(run.model.parameters()).detach())
    run.finish()
    return [seen, run.step(2), left(run)]


@door("during/frozen and not between backward and step", "19", served=True)
def _(run: Run) -> Any:
    run.backward()
    run.w.requires_grad_(False)
    run.w.requires_grad_(True)
    run.finish()
    return [run.step(2), left(run)]


@door("during/gradients dropped between backward and step", "19", served=True)
def _(run: Run) -> Any:
    run.backward()
    run.model.zero_grad()
    run.finish()
    return [run.step(2), left(run)]


@door("during/a closure that reads and trains", "8", served=True)
def _(run: Run) -> Any:
    def closure() -> Tensor:
        run.optimizer.zero_grad()
        loss = run.loss(4) + 0 * run.w.detach().sum()
        loss.backward()
        return loss

    return [[run.optimizer.step(closure).detach(), run.w.detach().clone()] for _ in range(3)]


# ---- a penalty over all weights ------------------------------------------------------------------


for _precision in (None, "bf16-true", "bf16-mixed"):

    @door(
        f"during/a penalty over all weights, {_precision or 'fp32'}",
        "1",
        precision=_precision,
        needs_all=True,
    )
    def _(run: Run) -> Any:
        losses = []
        for seed in range(3):
            penalty = sum(p.float().square().sum() for p in run.model.parameters())
            tie = (run.w * run.param("layers.1.weight")).float().mean()
            loss = run.loss(seed) + 1e-3 * penalty + torch.tanh(tie)
            loss.backward()
            run.finish(clip=1.0)
            losses.append(loss.detach())
        return [losses, left(run)]
