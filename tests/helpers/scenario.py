"""Random training: models, ways of training them, and the run that is compared with the reference.

Everything is a pure function of a seed, so a failing seed is a reproducer.  `RandomNet` draws its blocks; a
`Scenario` draws a model, a precision, a budget, a chunk size, clipping, accumulation, `step=True`, and what
happens between steps: evaluation, reading the state, another shape of step.  helpers/rank_scenario.py plays it on
ranks and on the reference, with the same calls in the same order.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gemini_strategy as gs
from helpers.reference import (
    Managed,
    Outcome,
    Plain,
    Recipe,
    assert_same_outcome,
    managed,
    state_bytes,
)
from helpers.zoo import CASES, Case

__all__ = [
    "MACHINES",
    "RATES",
    "Played",
    "RandomNet",
    "Scenario",
    "act",
    "assert_same_played",
    "budgeted",
    "case_of",
    "scenario",
]

#: Machines on which other classes are the best ones; the first is an H200's.
RATES = {
    "as measured": "h2d=55e9,d2h=54e9",
    "slow copies": "h2d=1e6,d2h=1e6",
    "slow towards the device": "h2d=1e5,d2h=54e9",
    "slow host": "h2d=55e9,d2h=54e9,host_adam=1e2,host_adam_beside=1e2",
    "fast host": "h2d=1e8,d2h=1e8,host_adam=1e15,host_adam_beside=1e15,device_adam=1e5",
}

_SLOW = "h2d=1e3,d2h=1e3"
#: Copies are so slow that it pays to begin updates early, however long a busy machine takes for an operation: plans are
#: always the same ones. Updates run on the host, on the device, on both.
MACHINES = {
    "host": _SLOW,
    "device": f"{_SLOW},host_adam=0.1,host_adam_beside=0.1",
    "both": f"{_SLOW},host_adam=1e2,host_adam_beside=1e2",
}


# ---- models --------------------------------------------------------------------------------------


class _Residual(nn.Module):
    """Norm, widening linear, dropout and back: nested units."""

    def __init__(self, width: int, factor: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, factor * width)
        self.drop = nn.Dropout(0.15)
        self.down = nn.Linear(factor * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(F.gelu(self.up(self.norm(x)))))


class _Hanging(nn.Module):
    """Parameters of its own beside a child, used before and after it."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / 8)
        self.gain = nn.Parameter(torch.ones(width))
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(F.linear(x, self.weight))) * self.gain + x


class RandomNet(nn.Module):
    """Blocks drawn from a seed: nested, tied, frozen, checkpointed, called twice, skipped in some calls."""

    def __init__(self, seed: int):
        super().__init__()
        draw = random.Random(seed)
        width = draw.choice((16, 24, 32, 40))
        self.width, self.has_words = width, draw.random() < 0.4
        self.embed = nn.Embedding(37, width) if self.has_words else nn.Linear(width, width)
        self.blocks = nn.ModuleList()
        self.ways: list[str] = []
        for _ in range(draw.randint(2, 6)):
            kind = draw.choice(("linear", "residual", "residual", "hanging", "tied", "norm"))
            if kind == "residual":
                block = _Residual(width, draw.choice((1, 2, 4)))
            elif kind == "hanging":
                block = _Hanging(width)
            elif kind == "norm":
                block = nn.Sequential(
                    nn.LayerNorm(width, bias=False), nn.Linear(width, width), nn.Dropout(0.1)
                )
            else:
                block = nn.Linear(width, width, bias=draw.random() < 0.7)
            ties = [b for b in self.blocks if isinstance(b, nn.Linear)]
            if kind == "tied" and ties:
                block.weight = draw.choice(ties).weight
            if draw.random() < 0.15:
                for p in block.parameters():
                    p.requires_grad_(False)
            self.blocks.append(block)
            ways = ("plain", "plain", "plain", "again", "reentrant", "not reentrant", "sometimes")
            self.ways.append(draw.choice(ways))
        self.head = nn.Linear(width, 37 if self.has_words else width, bias=False)
        if self.has_words and draw.random() < 0.6:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor, call: int = 0) -> Tensor:
        x = self.embed(x)
        for block, way in zip(self.blocks, self.ways, strict=True):
            if way == "reentrant":
                x = checkpoint(block, x, use_reentrant=True)
            elif way == "not reentrant":
                x = checkpoint(block, x, use_reentrant=False)
            elif way != "sometimes" or call % 3 != 1:
                x = torch.tanh(block(x))
                x = block(x) if way == "again" else x
        return self.head(x)


def case_of(seed: int) -> Case:
    """The case of `RandomNet(seed)`."""
    probe = RandomNet(seed)
    width, has_words = probe.width, probe.has_words

    def batch(step: int) -> tuple[Tensor, Tensor, int]:
        g = torch.Generator().manual_seed(70_000 + 997 * seed + step)
        if has_words:
            ids = torch.randint(0, 37, (3, 5), generator=g)
            return ids, torch.randint(0, 37, (3, 5), generator=g), step
        return torch.randn(5, width, generator=g), torch.randn(5, width, generator=g), step

    def loss(run: Any, batch: tuple[Tensor, Tensor, int]) -> Tensor:
        x, y, step = batch
        out = run(x, call=step).float()
        if has_words:
            return F.cross_entropy(out.reshape(-1, 37), y.reshape(-1))
        return F.mse_loss(out, y)

    return Case(
        f"random{seed}",
        lambda: RandomNet(seed),
        batch,
        loss,
        ("32-true", "bf16-true", "bf16-mixed", "16-mixed"),
    )


# ---- what happens --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """One way of training one model."""

    seed: int
    case: Case
    recipe: Recipe
    share: float  # of weights and states, that the budget is
    chunk_size: int
    policy: str
    rates: str
    says_step: bool  # backward(step=True) where a step follows
    between: tuple[str, ...]  # after each step


def scenario(seed: int) -> Scenario:
    """The scenario of a seed."""
    draw = random.Random(seed * 7919 + 1)
    case = draw.choice(CASES) if draw.random() < 0.4 else case_of(seed)
    precision = draw.choice(case.precisions)
    says_step = draw.random() < 0.5
    steps = draw.randint(4, 6)
    is_wide = precision == "bf16-true" and case not in CASES and draw.random() < 0.4
    recipe = Recipe(
        precision=precision,
        steps=steps,
        clip=None if (says_step and precision != "16-mixed") or draw.random() < 0.4 else 0.3,
        accumulate=draw.choice((1, 1, 2, 3)),
        gradient_dtype=torch.float32 if is_wide else None,
        adamw_mode=draw.random() < 0.7,
        seed=seed % 101,
    )
    acts = ("nothing", "nothing", "nothing", "evaluate", "read", "peek", "nothing")
    return Scenario(
        seed=seed,
        case=case,
        recipe=recipe,
        share=draw.choice((0.1, 0.25, 0.35, 0.45, 0.6, 0.8, 1.0, 1.3)),
        chunk_size=draw.choice((4096, 4096, 4096, 8192, 16384, 65536)),
        policy=draw.choice(("auto", "auto", "auto", "auto", "cpu")),
        rates=draw.choice(list(RATES.values())),
        says_step=says_step,
        between=tuple(
            "nothing" if act == "evaluate" and case.name == "gradient_penalty" else act
            for act in (draw.choice(acts) for _ in range(steps))
        ),
    )


def budgeted(case: Case, recipe: Recipe, share: float, *, room: int = 4096, **how: Any) -> Managed:
    """The managed run with this share of weights and states beside `room`, or the least more that is accepted."""
    whole = state_bytes(case.build, recipe)
    while True:
        try:
            return managed(case.build, recipe, device_budget=int(whole * share) + room, **how)
        except gs.GeminiMemoryError:
            if share > 3.0:
                raise
            share *= 1.25


@dataclass
class Played:
    """What a scenario left behind, and what was seen on the way."""

    outcome: Outcome
    seen: list[Tensor]


def act(run: Plain, what: str, scenario: Scenario, step: int, seen: list[Tensor]) -> None:
    """What happens after a step; what it shows is added to `seen`."""
    if what == "evaluate":
        run.model.eval()
        with torch.no_grad():
            seen.append(scenario.case.loss(run, scenario.case.batch(5000 + step)).float())
        run.model.train()
    elif what == "read":
        outcome = run.outcome()
        seen.extend(outcome.masters.values())
        seen.extend(outcome.exp_avg.values())
    elif what == "peek":
        for name, p in [(n, p) for n, p in run.model.named_parameters() if p.requires_grad][:2]:
            if run.engine is not None:
                with run.engine.full_parameter(p) as values:
                    seen.append(values.clone())
            else:
                seen.append(run.outcome().masters[name])


def assert_same_played(got: Played, want: Played) -> None:
    """The same bits at the end and at every look in between."""
    assert_same_outcome(got.outcome, want.outcome)
    assert len(got.seen) == len(want.seen)
    for i, (a, b) in enumerate(zip(got.seen, want.seen, strict=True)):
        assert torch.equal(a, b), f"look {i} between steps"
