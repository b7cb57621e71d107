"""The table of programs: what a row is, what a program is given, and the models that most of them use.

A program is an ordinary piece of a training script. It gets a `Run`, which is the same managed and unmanaged: a model
that has trained a few steps, its optimizer, and the verbs of a training loop. What it returns (tensors, arrays,
numbers, in any nesting) has to have the same bits in both. `programs_*.py` hold the rows, by what they are about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import gemini_strategy as gs

__all__ = ["TABLE", "Door", "Run", "Setup", "door", "left", "rows"]

WIDTH = 32


class Six(nn.Module):
    """Six layers of one size, so that what an evicted one shows is another one's."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(24, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Setup:
    """How a program's model is managed, and how many steps it has trained before."""

    name: str
    policy: str
    share: float  # of what weights and states take; the least budget that is accepted where more is needed
    warm: int

    def __repr__(self) -> str:
        return self.name


#: A fresh model of which a unit at a time is there; one that follows a plan; the least that is accepted; and, for
#: programs that show many weights at once, room for all of them, which are evicted after their units all the same.
SETUPS = (
    Setup("cpu", "cpu", 0.15, 0),
    Setup("auto", "auto", 0.45, 5),
    Setup("tight", "auto", 0.02, 5),
    Setup("room", "cpu", 2.0, 5),
)


class Run:
    """What a program is given. `engine` is None where nothing is managed."""

    def __init__(self, door: Door, setup: Setup, device: str, is_managed: bool) -> None:
        self.door, self.setup, self.device, self.is_managed = door, setup, device, is_managed
        self.engine: gs.Engine | None = None
        self.model: nn.Module | None = None
        self.optimizer: Any = None
        self.steps = 0

    # ---- the verbs of a loop ----

    def manage(self, model: nn.Module, optimizer: Any = None, **how: Any) -> gs.Engine | None:
        """`gs.manage` under this set-up; without it the cast alone. `run.model` and `run.optimizer` from now on."""
        self.model, self.optimizer = model, optimizer
        if not self.is_managed:
            if self.device != "cpu":
                model.to(self.device)
            gs.cast_model_(model, how.get("precision"))
            return None
        if all(p.dtype is torch.float32 for p in model.parameters()):
            # A model that came in fp32 leaves in fp32; the other one is in 16 bits.
            gs.cast_model_(model, how.get("precision"))
        whole = sum(p.numel() * 12 for p in model.parameters())
        share = self.setup.share
        while True:
            budget = int(whole * share) + 4096
            try:
                self.engine = gs.manage(
                    model,
                    optimizer,
                    device_budget=budget if self.device == "cpu" else None,
                    placement_policy=self.setup.policy if self.device == "cpu" else "cpu",
                    chunk_size=4096,
                    device=self.device,
                    **how,
                )
                return self.engine
            except gs.GeminiMemoryError:
                if share > 3.0:
                    raise
                share *= 1.15

    def param(self, name: str = "layers.3.weight") -> nn.Parameter:
        """A parameter by name."""
        return self.model.get_parameter(name)

    @property
    def w(self) -> nn.Parameter:
        """layers.3.weight, of which most programs speak."""
        return self.param()

    @property
    def b(self) -> nn.Parameter:
        """layers.3.bias."""
        return self.param("layers.3.bias")

    def randn(self, *shape: int, seed: int = 0) -> Tensor:
        """The same numbers on every device."""
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.device)

    def x(self, seed: int = 0) -> Tensor:
        """An input of Six."""
        return self.randn(5, 24, seed=seed)

    def h(self, seed: int = 0) -> Tensor:
        """An input of one of its layers."""
        return self.randn(5, WIDTH, seed=100 + seed)

    def call(self, x: Tensor) -> Tensor:
        """The model's output; what a managed model casts by itself is cast here for the other."""
        precision = self.door.precision
        if self.is_managed or precision is None:
            return self.model(x)
        if precision.endswith("mixed"):
            with torch.autocast(self.device, dtype=torch.bfloat16):
                return self.model(x)
        return self.model(x.bfloat16())

    def loss(self, seed: int = 0) -> Tensor:
        """A loss of the model."""
        return self.call(self.x(seed)).float().square().mean()

    def backward(self, seed: int = 0) -> Tensor:
        """Forward and backward."""
        loss = self.loss(seed)
        loss.backward()
        return loss.detach()

    def clip(self, max_norm: float) -> Tensor:
        """Clips all gradients by their norm, the engine's way or the optimizer's."""
        return (self.engine or self.optimizer).clip_grad_norm_(max_norm)

    def finish(self, clip: float | None = None) -> Tensor | None:
        """What follows backward: clip, step, zero_grad; the norm if it clips."""
        norm = None
        if clip is not None:
            norm = self.clip(clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def step(self, n: int = 1, clip: float | None = None) -> list[Tensor]:
        """n steps on new batches; the losses."""
        losses = []
        for _ in range(n):
            losses.append(self.backward(1000 + self.steps))
            self.finish(clip)
            self.steps += 1
        return losses


@dataclass(frozen=True)
class Door:
    """One row: a program, what it shows, and what it needs."""

    name: str
    walk: Callable[[Run], Any]
    item: str = ""  # of the list of programs that were wrong once
    model: Callable[[], nn.Module] | None = Six
    optimizer: str = "hybrid"  # "none": the program's own
    precision: str | None = None
    served: bool = False  # has to give the same bits: a refusal by name is a failure, too
    needs_all: bool = False  # shows many weights at once: a small budget may refuse it by name
    whole: bool = False  # about the model as a whole: a refusal may name the way out alone
    trains: bool = True  # afterwards training goes on, with the same bits
    setups: tuple[str, ...] = ("cpu", "auto", "tight")

    def __repr__(self) -> str:
        return self.name


TABLE: dict[str, Door] = {}


def door(name: str, item: str = "", **how: Any) -> Callable[[Callable], Callable]:
    """Registers the decorated program as a row."""

    def add(walk: Callable[[Run], Any]) -> Callable[[Run], Any]:
        assert name not in TABLE, f"two programs are called {name}"
        row = Door(name, walk, item, **how)
        if row.needs_all:
            row = replace(row, setups=(*row.setups, "room"))
        TABLE[name] = row
        return walk

    return add


def rows(prefix: str, item: str, bodies: dict[str, Callable[[Run], Any]], **how: Any) -> None:
    """Registers several one-line programs."""
    for name, body in bodies.items():
        door(f"{prefix}/{name}", item, **how)(body)


def start(door: Door, setup: Setup, device: str, is_managed: bool) -> Run:
    """The run that a program is given."""
    torch.manual_seed(7)
    run = Run(door, setup, device, is_managed)
    if door.model is None:
        return run
    model = door.model().train()
    optimizer = None
    if door.optimizer == "hybrid":
        optimizer = gs.HybridAdam(model.parameters(), lr=2e-3, weight_decay=0.02)
    run.manage(model, optimizer, precision=door.precision)
    if optimizer is not None:
        run.step(setup.warm)
    else:
        for seed in range(setup.warm):
            run.backward(seed)
            model.zero_grad()
    return run


def left(run: Run) -> Any:
    """What training left: weights and buffers, and of what has stepped the moments and what 16-bit weights lack."""
    steps = run.optimizer.state_dict()["state"]
    return [
        {k: v.detach().clone() for k, v in run.model.state_dict().items()},
        {
            i: {k: torch.as_tensor(v).clone() for k, v in sorted(state.items())}
            for i, state in sorted(steps.items())
            if int(state["step"])
        },
    ]


def names_of(model: nn.Module | None) -> Iterator[str]:
    """What an error may name: parameters, and modules that own some."""
    if model is None:
        return
    for name, module in model.named_modules(remove_duplicate=False):
        owned = [n for n, p in module._parameters.items() if p is not None]
        if owned and name:
            yield name
        yield from (f"{name}.{n}" if name else n for n in owned)
