"""Optimizers that step by themselves on several ranks: the bits of one, whatever a rank has of a parameter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gemini_strategy as gs
from gemini_strategy.optim import rehearsal
from gemini_strategy.optim.adam import clip_coefficient
from helpers.ranks import run_ranks, values
from helpers.sharded import Exact, ExactCase

PATIENT = 900.0  # longer than run_ranks waits: whoever sits out this timeout fails
STEPS = 4


class Elementwise(torch.optim.Optimizer):
    """Lion, with a state that is a list, one that is a number, and a counter on the host."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(count=0, step=torch.tensor(0.0), kept=[torch.zeros_like(p)])
                state["count"] += 1
                state["step"] += 1
                m = state["kept"][0]
                p.add_((m * group["beta"] + p.grad * 0.1).sign(), alpha=-group["lr"])
                m.mul_(0.99).add_(p.grad, alpha=0.01)


class Counting(torch.optim.Optimizer):
    """Writes its groups and itself."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "k": 0})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            rate = group["lr"] / (group["k"] + self.calls)
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("z", p.detach().clone()).sub_(p.grad, alpha=rate)
                    p.lerp_(self.state[p]["z"], 0.5)
            group["k"] += 1


class Blockwise(torch.optim.Optimizer):
    """A momentum in 8 bits, with a scale for each block of elements, and a table that all parameters share."""

    BLOCK = 128

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        self.table = torch.linspace(-1, 1, 255)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, n = self.state[p], p.numel()
                n_blocks = -(-n // self.BLOCK)
                if not state:
                    state["codes"] = torch.full((n,), 127, dtype=torch.uint8, device=p.device)
                    state["scales"] = torch.zeros(n_blocks, device=p.device)
                    state["table"] = self.table
                m = torch.zeros(n_blocks * self.BLOCK, device=p.device)
                m[:n] = self.table[state["codes"].long()]
                m = m.view(n_blocks, self.BLOCK) * state["scales"][:, None]
                grad = torch.zeros(n_blocks * self.BLOCK, device=p.device)
                grad[:n] = p.grad.reshape(-1).float()
                m = m * 0.9 + grad.view(n_blocks, self.BLOCK)
                scales = m.abs().amax(1)
                codes = (m / scales.clamp(min=1e-8)[:, None] * 127).round() + 127
                state["scales"].copy_(scales)
                state["codes"].copy_(codes.view(-1)[:n])
                p.sub_((m.view(-1)[:n] * group["lr"]).view(p.shape).to(p.dtype))


class Rowwise(torch.optim.Optimizer):
    """Gradients by the root of their mean square, of a row or of all that has no rows."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                rows = p.grad.float().flatten(1) if p.dim() > 1 else p.grad.float().reshape(1, -1)
                found = torch.stack([row.square().sum() for row in rows]) / max(rows.shape[1], 1)
                if "mean" not in state:
                    state["mean"] = torch.zeros_like(found)
                state["mean"].mul_(0.9).add_(found)
                scaled = rows / (state["mean"].sqrt()[:, None] + 1e-6)
                p.sub_((scaled * group["lr"]).view(p.shape).to(p.dtype))


class Whole(torch.optim.Optimizer):
    """A step as long as the parameter."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("m", torch.zeros_like(p)).lerp_(p.grad, 0.5)
                    p.sub_(m * (group["lr"] * p.norm() / (m.norm() + 1e-6)))


def muon(model: nn.Module) -> list[Any]:
    """As its users have it."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]  # of which one is empty
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.SGD(rest, lr=1e-2, momentum=0.9)]


WHOLES: dict[str, Callable[[nn.Module], Any]] = {
    "blocks": lambda m: Blockwise(m.parameters()),
    "rows": lambda m: Rowwise(m.parameters()),
    "whole": lambda m: Whole(m.parameters()),
    # It divides by the number of elements.
    "adafactor": lambda m: torch.optim.Adafactor([p for p in m.parameters() if p.numel()], lr=1e-2),
    "muon": muon,
}
CUTS = {"own": "element", "blocks": "block", "rows": "row", "whole": "whole", "adafactor": "whole"}
ELEMENTS: dict[str, Callable[[nn.Module], Any]] = {
    "own": lambda m: Elementwise(m.parameters()),
    "counting": lambda m: Counting(m.parameters()),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-2, momentum=0.9),
    "amsgrad": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, amsgrad=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2),
    "sgd": lambda m: torch.optim.SGD(
        [
            {"params": [p for p in m.parameters() if p.dim() < 2], "momentum": 0.0},
            {"params": [p for p in m.parameters() if p.dim() > 1], "momentum": 0.9},
        ],
        lr=1e-2,
    ),
}
PRECISIONS = ("32-true", "bf16-true", "bf16-mixed")


def built(precision: str | None, seed: int = 7) -> nn.Module:
    """precision: that the model is cast to, as an ordinary one; None: of what manage() makes one."""
    torch.manual_seed(seed)
    model = Exact().train()
    if precision == "bf16-true":
        gs.cast_model_(model, precision)
    return model


def all_of(optimizer: Any) -> list[Any]:
    return optimizer if isinstance(optimizer, list) else [optimizer]


def same(got: Any, want: Any, what: str) -> None:
    """The same tree, and the same bits."""
    assert type(got) is type(want), f"{what}: {type(got)}, expected {type(want)}"
    if isinstance(want, Tensor):
        assert got.dtype == want.dtype and got.shape == want.shape, what
        assert torch.equal(got, want), f"{what}: {(got != want).sum()} of {want.numel()} differ"
    elif isinstance(want, dict):
        assert list(got) == list(want), f"{what}: {list(got)}, expected {list(want)}"
        for key in want:
            same(got[key], want[key], f"{what}.{key}")
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), what
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            same(a, b, f"{what}.{i}")
    else:
        assert got == want, f"{what}: {got}, expected {want}"


class Reference:
    """The same loop without an engine."""

    def __init__(self, make: Callable[[nn.Module], Any], precision: str) -> None:
        self.model = built(precision)
        self.optimizers = all_of(make(self.model))
        self.case = ExactCase()

    def backward(self, number: int, part: float = 1.0) -> None:
        (self.case.loss(self.model, self.case.batch(number)) * part).backward()

    def finish(self, limit: float | None = None) -> None:
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        if limit is not None:
            norm = sum(g.double().square().sum().item() for g in grads) ** 0.5
            for g in grads:
                g.mul_(clip_coefficient(norm, limit))
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def check(self, engine: Any, precision: str) -> None:
        state = engine.model_state_dict(masters=precision != "bf16-true")
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                same(state[name], p.detach(), name)
        for got, want in zip(engine.optimizers(), self.optimizers, strict=True):
            same(got.state_dict(), want.state_dict(), type(want).__name__)
            for key, value in vars(want).items():
                if type(value) in (int, float):
                    assert getattr(got, key) == value, key


class Run:
    """The managed run of one rank."""

    def __init__(
        self, make: Callable[[nn.Module], Any], precision: str, rank: int, size: int, **how: Any
    ) -> None:
        model = built("bf16-true" if precision == "bf16-true" else None, 7 + 100 * rank)
        self.made = make(model)
        how = {"timeout": PATIENT, "chunk_size": 4096, "device": "cpu"} | how
        self.engine = gs.manage(model, self.made, precision=precision, **how)
        self.engine.optimizers = lambda: all_of(self.made)
        self.case = ExactCase(rank, size)
        self.batches = ExactCase()

    def loss(self, number: int, part: float = 1.0) -> Tensor:
        return self.case.loss(self.engine.model, self.batches.batch(number)) * part

    def finish(self, limit: float | None = None) -> None:
        if limit is not None:
            self.engine.clip_grad_norm_(limit)
        for optimizer in all_of(self.made):
            optimizer.step()
        self.engine.zero_grad()


def train(
    make: Callable[[nn.Module], Any], precision: str, rank: int, size: int, **how: Any
) -> Run:
    """Accumulates, clips, and leaves the engine open."""
    want, run = Reference(make, precision), Run(make, precision, rank, size, **how)
    for step in range(STEPS):
        for micro in range(2):
            want.backward(2 * step + micro, 0.5)
            run.engine.backward(run.loss(2 * step + micro, 0.5))
        limit = 1.0 if step % 2 else None
        want.finish(limit)
        run.finish(limit)
    want.check(run.engine, precision)
    return run


def check_bits(rank: int, size: int, makes: dict[str, Callable[[nn.Module], Any]]) -> None:
    for name, make in makes.items():
        for precision in PRECISIONS:
            try:
                train(make, precision, rank, size).engine.close()
            except AssertionError as error:
                raise AssertionError(f"{name}, {precision}: {error}") from error


def check_elements(rank: int, size: int) -> None:
    check_bits(rank, size, ELEMENTS)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_elements(size: int, tmp_path: Path) -> None:
    values(run_ranks(size, tmp_path, check_elements))


def check_wholes(rank: int, size: int) -> None:
    check_bits(rank, size, WHOLES)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_wholes(size: int, tmp_path: Path) -> None:
    """What may be cut at blocks, between rows, or nowhere."""
    values(run_ranks(size, tmp_path, check_wholes))


def test_cuts_are_what_they_are_taken_for() -> None:
    for name, cut in CUTS.items():
        optimizer = {**ELEMENTS, **WHOLES}[name](built(None))
        assert rehearsal.rehearse(optimizer).cut == cut, name
