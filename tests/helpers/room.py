"""Random small models and ways to train them, for the least budget that `manage()` accepts.

Everything is a pure function of a seed. A `Knot` has what makes room hard to foresee: modules with parameters of their
own around others, modules that several others have, tied weights, checkpointing of both kinds, odd sizes everywhere.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gemini_strategy as gs
from helpers.reference import Managed, Plain, Recipe, managed

__all__ = ["Program", "at_floor", "program", "run_program"]

WORDS = 23


class _Conv(nn.Module):
    """Channels last in meaning, as all blocks here: (batch, length, width)."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, kernel, padding=kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class _Group(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class _Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gru = nn.GRU(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0]


class _Around(nn.Module):
    """Parameters of its own, used before, between and after its children."""

    def __init__(self, width: int, *children: nn.Module) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(width) + 0.5)
        self.mix = nn.Parameter(torch.randn(width, width) / 8)
        self.inner = nn.ModuleList(children)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.mix)
        for child in self.inner:
            x = torch.tanh(child(x)) * self.gain
        return x


class _Chain(nn.Sequential):
    """Children one after the other, each in the graph behind a function without parameters, or not."""

    def __init__(self, *children: nn.Module, bends: bool) -> None:
        super().__init__(*children)
        self.bends = bends

    def forward(self, x: Tensor) -> Tensor:
        for child in self:
            x = torch.tanh(child(x)) if self.bends else child(x)
        return x


class Knot(nn.Module):
    """A model drawn from a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.width = width = draw.choice((7, 16, 31, 33, 48))
        self.embed = nn.Embedding(WORDS, width)
        self.shared: list[nn.Module] = []
        self.blocks = nn.ModuleList(
            self._block(draw, width, draw.randint(0, 2)) for _ in range(draw.randint(2, 4))
        )
        ways = ("plain", "plain", "again", "reentrant", "not reentrant", "not reentrant", "skipped")
        self.ways = [draw.choice(ways) for _ in self.blocks]
        self.head = nn.Linear(width, WORDS, bias=draw.random() < 0.5)
        if draw.random() < 0.4:
            self.head.weight = self.embed.weight
        if draw.random() < 0.3:
            self.scale = nn.Parameter(torch.ones(draw.choice((1, width))))
        del self.shared

    def _leaf(self, draw: random.Random, width: int) -> nn.Module:
        kind = draw.choice(
            ("linear", "linear", "wide", "norm", "group", "conv", "attention", "gru", "shared")
        )
        if kind == "shared" and self.shared:
            return draw.choice(self.shared)
        made: nn.Module = {
            "wide": lambda: nn.Sequential(
                nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width, bias=False)
            ),
            "norm": lambda: nn.LayerNorm(width),
            "group": lambda: _Group(width),
            "conv": lambda: _Conv(width, draw.choice((1, 3, 5))),
            "attention": lambda: _Attention(width),
            "gru": lambda: _Recurrent(width),
        }.get(kind, lambda: nn.Linear(width, width, bias=draw.random() < 0.6))()
        ties = [m for m in self.shared if isinstance(m, nn.Linear)]
        if isinstance(made, nn.Linear) and ties and draw.random() < 0.2:
            made.weight = draw.choice(ties).weight
        if draw.random() < 0.1:
            made.requires_grad_(False)
        self.shared.append(made)
        return made

    def _block(self, draw: random.Random, width: int, depth: int) -> nn.Module:
        if depth == 0:
            return self._leaf(draw, width)
        children = [self._block(draw, width, depth - 1) for _ in range(draw.randint(1, 3))]
        made: nn.Module = _Chain(*children, bends=draw.random() < 0.5)
        if draw.random() < 0.5:
            made = _Around(width, *children)
        if draw.random() < 0.4:
            self.shared.append(made)
        return made

    def forward(self, words: Tensor, call: int = 0) -> Tensor:
        x = self.embed(words)
        for block, way in zip(self.blocks, self.ways, strict=True):
            if way in ("reentrant", "not reentrant"):
                x = checkpoint(block, x, use_reentrant=way == "reentrant")
            elif way != "skipped" or call % 2 == 0:
                x = block(x)
                x = block(x) if way == "again" else x
        return self.head(x * self.scale if hasattr(self, "scale") else x)


@dataclass(frozen=True)
class Program:
    """One way of training one model."""

    seed: int
    recipe: Recipe
    policy: str
    chunk_size: int | None
    above: int  # blocks above the least budget
    says_step: bool
    acts: tuple[str, ...]  # after each step

    def build(self) -> Knot:
        return Knot(self.seed)

    def batch(self, step: int) -> Tensor:
        g = torch.Generator().manual_seed(997 * self.seed + step)
        return torch.randint(0, WORDS, (2, 5), generator=g)

    def loss(self, run: Plain, step: int) -> Tensor:
        words = self.batch(step)
        return F.cross_entropy(run(words, call=step).float().flatten(0, 1), words.flatten())


def program(seed: int) -> Program:
    """The program of a seed."""
    draw = random.Random(7919 * seed + 3)
    precision = draw.choice(("32-true", "32-true", "bf16-true", "bf16-mixed", "16-mixed"))
    clip = draw.choice((None, 0.3))
    acts = ("nothing", "nothing", "evaluate", "leave a graph", "grad twice")
    return Program(
        seed=seed,
        recipe=Recipe(
            precision=precision,
            steps=4,
            clip=clip,
            accumulate=draw.choice((1, 1, 2)),
            gradient_dtype=torch.float32
            if precision == "bf16-true" and draw.random() < 0.3
            else None,
        ),
        policy=draw.choice(("auto", "auto", "cpu")),
        chunk_size=draw.choice((4096, 4096, 8192, 20_000, 60_000, None)),
        above=draw.choice((0, 0, 0, 1, 3)),
        says_step=clip is None and draw.random() < 0.5,
        acts=tuple(draw.choice(acts) for _ in range(4)),
    )


def at_floor(build: Any, recipe: Recipe, above: int = 0, **how: Any) -> Managed:
    """The managed run under the budget that the error of a smaller one names, and `above` bytes."""
    try:
        managed(build, recipe, device_budget=1024, **how).engine.close()
        raise AssertionError("a budget of 1 KiB was accepted")
    except gs.GeminiMemoryError as error:
        named = re.search(r"at least .*\((\d+) bytes\)", str(error))
        assert named, error
    least = int(named.group(1))
    try:
        managed(build, recipe, device_budget=least - 1, **how).engine.close()
        raise AssertionError(f"{least} bytes were asked for, and less was accepted")
    except gs.GeminiMemoryError:
        return managed(build, recipe, device_budget=least + above, **how)


def _grad_twice(run: Plain, program: Program, step: int) -> list[Tensor]:
    """Gradients of two losses of one graph, for the embedded words."""
    if "reentrant" in run.model.ways:  # torch does not do that
        return []
    kept: list[Tensor] = []
    handle = run.model.embed.register_forward_hook(lambda m, a, out: kept.append(out))
    loss = program.loss(run, 500 + step)
    handle.remove()
    first = torch.autograd.grad(loss, kept[0], retain_graph=True)
    return [*first, *torch.autograd.grad(loss.square(), kept[0])]


def run_program(run: Plain, program: Program) -> list[Tensor]:
    """Trains; returns what was seen between the steps. The same calls whether managed or not."""
    recipe, seen = program.recipe, []
    for step in range(recipe.steps):
        torch.manual_seed(step)
        for micro in range(recipe.accumulate):
            loss = program.loss(run, step * recipe.accumulate + micro)
            run.losses.append(loss.detach().float().clone())
            part = loss / recipe.accumulate
            if run.engine is not None and program.says_step and micro == recipe.accumulate - 1:
                run.engine.backward(part, step=True)
            else:
                run.backward(part)
        run.finish()
        act = program.acts[step]
        if act == "evaluate":
            with torch.no_grad():
                seen.append(program.loss(run, 700 + step))
        elif act == "leave a graph":
            seen.append(program.loss(run, 900 + step).detach())
        elif act == "grad twice":
            seen.extend(_grad_twice(run, program, step))
    return [t.float() for t in seen]
