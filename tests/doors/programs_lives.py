"""Programs in which a model lives several lives: managed, alone, copied, beside another one; and odd modules."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, functionalize, jacfwd, jvp

import gemini_strategy as gs
from programs import Run, Six, door, left

BF16 = ("bf16-true", "bf16-mixed")


class Life:
    """A loop over a model of one's own that may be managed, and again, or not."""

    def __init__(self, run: Run, model: nn.Module, precision: str | None, width: int = 24) -> None:
        self.run, self.precision, self.width, self.n = run, precision, width, 0
        self.managed = run.is_managed
        self.take(model.train(), gs.HybridAdam(model.parameters(), lr=5e-3, weight_decay=0.01))
        for _ in range(run.setup.warm // 2):
            self.step()

    def take(self, model: nn.Module, optimizer: Any) -> None:
        """Managed from now on."""
        self.model, self.optimizer = model, optimizer
        self.run.is_managed = self.managed
        if self.managed or self.run.model is None:  # a model is cast once
            self.run.manage(model, optimizer, precision=self.precision)

    def leave(self) -> None:
        """Alone from now on."""
        if self.run.engine is not None:
            self.run.engine.close()
        self.run.engine, self.run.is_managed = None, False
        self.model.to(self.run.device)

    def call(self, x: Tensor) -> Tensor:
        if self.run.is_managed or self.precision is None:
            return self.model(x)
        is_mixed = self.precision == "bf16-mixed"
        with torch.autocast(self.run.device, dtype=torch.bfloat16, enabled=is_mixed):
            return self.model(x if is_mixed else x.bfloat16())

    def x(self, seed: int) -> Tensor:
        return self.run.randn(6, self.width, seed=seed)

    def back(self, loss: Tensor) -> list[Any]:
        """Backward, clip and step."""
        loss.backward()
        norm = (self.run.engine or self.optimizer).clip_grad_norm_(0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [loss.detach(), norm]

    def step(self, n: int = 1) -> list[Any]:
        out: list[Any] = []
        for _ in range(n):
            self.n += 1
            out += self.back(self.call(self.x(100 + self.n)).float().square().mean())
        return out


def lives(
    name: str, build: Callable[[], nn.Module], *precisions: str | None
) -> Callable[[Callable[[Life], Any]], Callable[[Life], Any]]:
    """A row for each precision."""

    def add(body: Callable[[Life], Any]) -> Callable[[Life], Any]:
        for precision in precisions:

            def walk(run: Run, precision: str | None = precision) -> Any:
                torch.manual_seed(5)
                life = Life(run, build(), precision)
                return [body(life), left(run)]

            row = {"model": None, "trains": False, "needs_all": True}
            door(f"lives/{name}, {precision or '32-true'}", **row)(walk)
        return body

    return add


def _popped(life: Life) -> None:
    for p in list(life.model.parameters())[::2]:
        life.optimizer.state.pop(p)


def _copied(life: Life) -> None:
    life.model, life.optimizer = copy.deepcopy((life.model, life.optimizer))
    life.run.model, life.run.optimizer = life.model, life.optimizer


for _name, _between in {"states dropped": _popped, "a deep copy goes on": _copied}.items():

    @lives(f"closed, trained alone, {_name}, managed again", Six, *BF16)
    def _(life: Life, between: Callable[[Life], None] = _between) -> Any:
        out = life.step(2)
        life.leave()
        out += life.step(2)
        between(life)
        life.take(life.model, life.optimizer)
        return out + life.step(2)


@lives("states dropped, closed, trained alone", Six, *BF16)
def _(life: Life) -> Any:
    out = life.step(2)
    _popped(life)
    life.leave()
    out += life.step(1)
    life.optimizer.state.clear()
    return out + life.step(2)


@lives("a GAN of two engines", Six, *BF16)
def _(life: Life) -> Any:
    run = life.run
    torch.manual_seed(3)
    judge = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Linear(32, 1))
    judge = Life(
        Run(run.door, run.setup, run.device, run.is_managed), judge, life.precision, width=8
    )
    out: list[Any] = []
    for i in range(3):
        made, real = life.call(life.x(i)).float(), judge.x(i)
        apart = F.softplus(judge.call(made.detach())).mean() + F.softplus(-judge.call(real)).mean()
        out += judge.back(apart)
        judge.model.requires_grad_(False)
        out += life.back(F.softplus(-judge.call(made)).float().mean())
        judge.model.requires_grad_(True)
    judge.leave()
    return [out, dict(judge.model.state_dict())]


class Teacher(nn.Module):
    """DINO's two networks in one, and codes that the forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.student = Six()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("center", torch.zeros(8))
        self.codes = nn.Parameter(torch.randn(5, 8), requires_grad=False)
        self.count = nn.Parameter(torch.zeros(5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.student(x)
        with torch.no_grad():
            want = self.teacher(x)
            self.center.mul_(0.9).add_(want.float().mean(0), alpha=0.1)
            nearest = torch.cdist(y.float(), self.codes.float()).argmin(1)
            self.count.index_add_(0, nearest, torch.ones_like(nearest, dtype=self.count.dtype))
            self.codes[nearest] = self.codes[nearest] * 0.9 + 0.1 * y.to(self.codes.dtype)
        return (y - want) + (y - self.codes[nearest]) * self.count.mean()


@lives("a teacher in the model, and codes", Teacher, "bf16-true")
def _(life: Life) -> Any:
    out: list[Any] = []
    for _ in range(4):
        out += life.step()
        pairs = zip(life.model.teacher.parameters(), life.model.student.parameters(), strict=True)
        with torch.no_grad():
            for its, p in pairs:
                its.data.mul_(0.9).add_(p.detach().data, alpha=0.1)
    return out


class Slim(nn.Module):
    """Only the first `n` of its inner units compute."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.n = nn.Linear(24, 32), nn.Linear(32, 24), 32

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(x, self.a.weight[: self.n], self.a.bias[: self.n])
        return F.linear(torch.tanh(h), self.b.weight[:, : self.n], self.b.bias)


@lives("slimmable", Slim, "bf16-mixed")
def _(life: Life) -> Any:
    out: list[Any] = []
    for n in (32, 16, 8, 32):
        life.model.n = n
        life.call(life.x(n)).float().square().mean().backward()
        life.model.n = 32
        out += life.back(life.call(life.x(n + 1)).float().square().mean())
    return out


@lives("binary weights in the passes", Six, "bf16-true")
def _(life: Life) -> Any:
    out: list[Any] = []
    for i in range(4):
        kept = [p.data.clone() for p in life.model.parameters()]
        for p in life.model.parameters():
            if p.ndim > 1:
                p.data.copy_(p.data.sign() * p.data.abs().mean())
        loss = life.call(life.x(i)).float().square().mean()
        loss.backward()
        for p, k in zip(life.model.parameters(), kept, strict=True):
            p.data.copy_(k)
        life.optimizer.step()
        life.optimizer.zero_grad()
        out.append(loss.detach())
    return out


@lives("attributes of parameters, pickled", Six, None)
def _(life: Life) -> Any:
    life.model.head.weight.kind = "head"
    other = pickle.loads(pickle.dumps(life.model))
    is_copied = hasattr(copy.deepcopy(life.model.head.weight), "kind")
    return [is_copied, other.head.weight.kind, hasattr(other.head.bias, "kind"), life.step()]


@lives("an optimizer's dict with numbers for steps", Six, None)
def _(life: Life) -> Any:
    out = life.step()
    state = copy.deepcopy(life.optimizer.state_dict())
    for entry in state["state"].values():
        entry["step"] = int(entry["step"])
        entry["exp_avg"] = entry["exp_avg"].double()
    out += life.step()
    life.optimizer.load_state_dict(state)
    return out + life.step(2)


for _kind, _transform in {
    "jvp": lambda f, ps: jvp(f, (ps,), (ps,)),
    "jacfwd": lambda f, ps: jacfwd(lambda s: f({k: p * s for k, p in ps.items()}))(
        next(iter(ps.values())).new_ones(())
    ),
    "functionalize": lambda f, ps: functionalize(f)(ps),
}.items():

    @door(f"first use/in {_kind}", needs_all=True)
    def _(run: Run, transform: Any = _transform) -> Any:
        x, weights = run.x(), {k: p.detach() for k, p in run.model.named_parameters()}
        out = transform(lambda ps: functional_call(run.model, ps, (x,)), weights)
        return [out, transform(lambda _: run.model(x), weights), run.step(1)]


class Nest(nn.Module):
    """Modules whose parameters have the names of their parents'."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((8,), float(depth)))
        self.left = Nest(depth - 1) if depth else None


@door("lives/state dicts of parts with their parents' names", "4", model=None, trains=False)
def _(run: Run) -> Any:
    model = Nest()
    run.manage(model, gs.HybridAdam(model.parameters()))
    parts = (model, model.left, model.left.left)
    return [[v.clone() for v in part.state_dict().values()] for part in parts]


@door("lives/hooks from before manage see what is accumulated", "10", model=None, trains=False)
def _(run: Run) -> Any:
    model, seen = Six(), []
    model.head.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    run.manage(model, gs.HybridAdam(model.parameters()))
    run.backward(0)
    run.backward(1)
    return seen


@door("lives/a layer frozen after its steps", "19", model=None, trains=False, served=True)
def _(run: Run) -> Any:
    model = Six()
    optimizer = gs.HybridAdam(model.parameters(), lr=2e-3)
    model(run.x().cpu()).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.layers[3].requires_grad_(False)
    run.manage(model, optimizer)
    return [run.step(3), left(run)]
