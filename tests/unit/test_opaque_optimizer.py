"""Optimizers that step by themselves, under an engine: the bits of the same loop unmanaged, with the same optimizer.

Both run side by side, and after every step weights, masters, states, groups and gradients are compared. Of mixed
precisions the unmanaged loop is written out here: fp32 masters that the optimizer steps, gradients of the compute
weights summed in fp32, and compute weights rounded from masters as csrc/arith/format.h, gm_pack_bf16, rounds.
"""

from __future__ import annotations

import copy
import gc
import math
import pickle
import re
import signal
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gemini_strategy as gs
from gemini_strategy.optim.adam import clip_coefficient

pytestmark = pytest.mark.core  # make check runs these on a core with its own assertions

S = torch.optim.lr_scheduler
HALF = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
Make = Callable[[Any], torch.optim.Optimizer]


class Net(nn.Module):
    """Tied, frozen, rarely used, 0-dim and empty parameters, a convolution in channels_last, halves of bf16's steps."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.a = nn.Linear(128, 64)
        self.n = nn.LayerNorm(64)
        self.b, self.c = nn.Linear(64, 64), nn.Linear(64, 64)
        self.c.weight = self.b.weight
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.rare = nn.Linear(64, 64)
        self.head = nn.Linear(64, 5)
        self.gain = nn.Parameter(torch.tensor(1.3))
        self.none = nn.Parameter(torch.empty(0))
        with torch.no_grad():
            for layer in (self.a, self.frozen):
                bits = (layer.weight[0].view(torch.int32) & -0x10000) + 0x8000
                layer.weight[0] = bits.view(torch.float32)

    def forward(self, x: Tensor, is_rare: bool) -> Tensor:
        x = self.n(torch.relu(self.a(self.conv(x).flatten(1))))
        x = torch.tanh(self.c(torch.tanh(self.b(x))))
        x = x + self.frozen(x)
        x = x + self.rare(x) if is_rare else x
        return self.head(x * self.gain + self.none.sum())


def batch(i: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(100 + i)
    return torch.randn(6, 3, 4, 4, generator=source), torch.randn(6, 5, generator=source)


def rounded(master: Tensor) -> Tensor:
    """To the nearest bf16, ties away from zero."""
    bits = master.contiguous().reshape(-1).view(torch.int32).to(torch.int64)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16).reshape(master.shape)


def two_groups(named: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"params": [p for _, p in named if p.dim() > 1]},
        {"params": [p for _, p in named if p.dim() <= 1], "lr": 0.004},
    ]


class Plain:
    """The loop without an engine."""

    def __init__(self, make: Make, precision: str = "32-true", groups: Any = two_groups) -> None:
        torch.manual_seed(0)
        self.model, self.precision = Net(), precision
        self.is_mixed = precision in HALF
        before = {
            n: p.detach().clone(memory_format=torch.preserve_format)
            for n, p in self.model.named_parameters()
        }
        # Nobody keeps masters: torch's own rounding, ties to even.
        for p in self.model.parameters():
            if precision == "bf16-true" and p.requires_grad:
                p.data = p.data.to(torch.bfloat16)
        gs.cast_model_(self.model, precision)
        self.weights = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.stepped = dict(self.weights)
        for name, p in self.weights.items() if self.is_mixed else ():
            self.stepped[name] = nn.Parameter(before[name])
            p.grad_dtype = None
            p.register_post_accumulate_grad_hook(self._taker(self.stepped[name]))
        self.optimizer = make(groups(list(self.stepped.items())))
        is_scaled = precision == "16-mixed"
        self.scaler = gs.LossScaler(initial_scale=4096.0, growth_interval=3) if is_scaled else None

    def _taker(self, master: nn.Parameter) -> Callable[[nn.Parameter], None]:
        def take(p: nn.Parameter) -> None:
            grad, p.grad = p.grad.float(), None
            master.grad = grad if master.grad is None else master.grad + grad

        return take

    def forward(self, x: Tensor, is_rare: bool) -> Tensor:
        if self.is_mixed:
            with torch.autocast("cpu", dtype=HALF[self.precision]):
                return self.model(x, is_rare)
        return self.model(x.bfloat16() if self.precision == "bf16-true" else x, is_rare)

    def backward(self, loss: Tensor, step: bool = False) -> None:
        (loss * self.scaler.scale if self.scaler else loss).backward()

    def grads(self) -> dict[str, Tensor]:
        return {n: p.grad for n, p in self.stepped.items() if p.grad is not None}

    def clip(self, limit: float) -> Tensor:
        scale = self.scaler.scale if self.scaler else 1.0
        squares = (v * v for g in self.grads().values() for v in g.double().flatten().tolist())
        norm = math.sqrt(math.fsum(squares)) / scale
        factor = clip_coefficient(norm, limit)
        if factor < 1.0:
            for grad in self.grads().values():
                grad.mul_(factor)
        return torch.tensor(norm, dtype=torch.float32)

    def step(self) -> None:
        is_finite = all(bool(grad.isfinite().all()) for grad in self.grads().values())
        if is_finite or not self.scaler:
            for p in self.stepped.values() if self.scaler else ():
                p.grad = None if p.grad is None else p.grad / self.scaler.scale
            self.optimizer.step()
        if self.scaler:
            self.scaler.update(not is_finite)
        for name, p in self.weights.items() if self.is_mixed else ():
            master = self.stepped[name].detach()
            p.data.copy_(rounded(master) if p.dtype is torch.bfloat16 else master)

    def zero_grad(self, to_none: bool = True) -> None:
        for p in self.stepped.values():
            p.grad = None if to_none or p.grad is None else torch.zeros_like(p.grad)

    def outcome(self, with_grads: bool) -> dict[str, Any]:
        state = self.optimizer.state
        return {
            "weights": {k: v.detach() for k, v in self.model.state_dict().items()},
            "masters": {n: p.detach().float() for n, p in self.stepped.items()},
            "states": {n: dict(state[p]) for n, p in self.stepped.items() if p in state},
            "groups": [
                {k: v for k, v in group.items() if k != "params"}
                for group in self.optimizer.param_groups
            ],
            "grads": self.grads() if with_grads and not self.is_mixed else {},
        }


class Managed(Plain):
    def __init__(
        self,
        make: Make,
        precision: str = "32-true",
        groups: Any = two_groups,
        prepare: Callable[[nn.Module, Any], Any] = lambda model, optimizer: None,
        **how: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model, self.precision, self.is_mixed = Net(), precision, precision in HALF
        self.weights = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.stepped = self.weights
        self.optimizer = make(groups(list(self.weights.items())))
        self.prepared = prepare(self.model, self.optimizer)
        how = {"device_budget": 224 << 10, "chunk_size": 4096, **how}
        if how.get("placement_policy") == "cuda":
            del how["device_budget"]
        if precision == "16-mixed":
            how |= {"initial_scale": 4096.0, "growth_interval": 3}
        self.engine = gs.manage(
            self.model, self.optimizer, precision=precision, device="cpu", **how
        )
        self.scaler = self.engine.scaler

    def forward(self, x: Tensor, is_rare: bool) -> Tensor:
        return self.model(x, is_rare)

    def backward(self, loss: Tensor, step: bool = False) -> None:
        self.engine.backward(loss, step=step)

    def clip(self, limit: float) -> Tensor:
        return self.engine.clip_grad_norm_(limit)

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self, to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=to_none)

    def outcome(self, with_grads: bool) -> dict[str, Any]:
        found = super().outcome(with_grads)
        masters = self.engine.model_state_dict(masters=True)
        found["weights"] = self.engine.model_state_dict(masters=False)
        found["masters"] = {n: masters[n].float() for n in self.weights}
        return found


def assert_same(got: Any, want: Any, what: str) -> None:
    """To the bit: NaN equals NaN of the same bits."""
    if isinstance(want, Tensor):
        assert isinstance(got, Tensor), what
        assert (got.dtype, got.shape) == (want.dtype, want.shape), what
        flat = [t.detach().contiguous().reshape(-1, 1).view(torch.uint8) for t in (got, want)]
        assert torch.equal(*flat), what
    elif isinstance(want, dict):
        assert got.keys() == want.keys(), what
        for key in want:
            assert_same(got[key], want[key], f"{what}.{key}")
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), what
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_same(a, b, f"{what}.{i}")
    else:
        assert type(got) is type(want), what
        assert got == want, what


def one(run: Plain, i: int, *, step: bool = False, is_rare: bool = True, scale: float = 1) -> None:
    x, y = batch(i)
    loss = ((run.forward(x, is_rare).float() - y) ** 2).mean() * scale
    run.backward(loss, step)


def train(run: Plain, *batches: int) -> None:
    for i in batches:
        one(run, i)
        run.step()
        run.zero_grad()


def compare(
    make: Make,
    precision: str = "32-true",
    steps: int = 5,
    *,
    clip: float | None = None,
    accumulate: int = 1,
    inside: bool = False,
    to_none: bool = True,
    overflow: tuple[int, ...] = (),
    then: Callable[[Plain, int], Any] = lambda run, i: None,
    prepare: Callable[[nn.Module, Any], Any] = lambda model, optimizer: None,
    **how: Any,
) -> Managed:
    """Trains both; gives the managed run. `then` comes after each step of each; `inside`: backward(step=True)."""
    groups = how.pop("groups", two_groups)
    plain = Plain(make, precision, groups)
    plain.prepared = prepare(plain.model, plain.optimizer)
    managed = Managed(make, precision, groups, prepare, **how)
    try:
        for i in range(steps):
            norms, shown = [], []
            for run in (plain, managed):
                for j in range(accumulate):
                    is_last = j == accumulate - 1
                    one(
                        run,
                        i * accumulate + j,
                        step=inside and is_last,
                        is_rare=i != 1,
                        scale=1e30 if i in overflow else 1,
                    )
                norms.append(run.clip(clip) if clip and i not in overflow else None)
                run.step()
                shown.append(then(run, i))
            assert_same(norms[1], norms[0], f"norm {i}")
            assert_same(shown[1], shown[0], f"shown {i}")
            with_grads = not inside
            assert_same(managed.outcome(with_grads), plain.outcome(with_grads), f"step {i}")
            for run in (plain, managed):
                run.zero_grad(to_none)
        stats = managed.engine.stats()
        if stats["device_budget_bytes"] >= 0:
            assert stats["device_peak_bytes"] <= stats["device_budget_bytes"]
        return managed
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            managed.engine.close()


# ---- optimizers of a user ----


class Own(torch.optim.Optimizer):
    """A loop over parameters, whose body is `update`."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.before()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group, self.state[p])
        return loss

    def before(self) -> None:
        pass

    def update(self, p: Any, group: Any, state: Any) -> None:
        p.add_(p.grad, alpha=-group["lr"])


class OldStyle(Own):
    def before(self) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1

    def update(self, p: Any, group: Any, state: Any) -> None:
        grad = p.grad.data.add_(p.data, alpha=0.01)
        average = state.setdefault("average", torch.zeros_like(p.data).float())
        average.mul_(0.9).add_(grad)
        p.data.add_(average.to(p.dtype), alpha=-group["lr"] / group["count"])


class ReplacesGrad(Own):
    def update(self, p: Any, group: Any, state: Any) -> None:
        p.grad = p.grad * 0.5
        super().update(p, group, state)
        p.grad = p.grad if p.dim() > 1 else None


class OnParameter(Own):
    calls = 0

    def before(self) -> None:
        self.calls += 1

    def update(self, p: Any, group: Any, state: Any) -> None:
        p.count = getattr(p, "count", 0) + 1
        p.add_(p.grad, alpha=-group["lr"] / (p.count + self.calls))


class Rotates(Own):
    """A list of gradients, newest first, and states of other dtypes than the parameter's."""

    def update(self, p: Any, group: Any, state: Any) -> None:
        if not state:
            state["last"] = [torch.zeros_like(p) for _ in range(2)]
            state["wide"] = {"sum": (torch.zeros_like(p, dtype=torch.float64), 1)}
            state["signs"] = torch.zeros_like(p, dtype=torch.int64)
        state["last"] = [p.grad.clone(), *state["last"][:-1]]
        state["wide"]["sum"][0].add_(p.grad)
        state["signs"] += p.grad > 0
        p.sub_((sum(state["last"]) + state["wide"]["sum"][0].to(p.dtype)) * group["lr"])


TABLE = torch.linspace(0, 1, 256)


class Table(Own):
    def update(self, p: Any, group: Any, state: Any) -> None:
        state.setdefault("table", TABLE)
        if p.dim() > 1:
            rows = state.setdefault("rows", p.new_zeros(p.shape[:1]))
            rows.add_((p.grad**2).flatten(1).mean(1))
        p.add_(p.grad, alpha=-group["lr"] * float(state["table"][17]))


class Bomb(Own):
    error: BaseException | None = None

    def update(self, p: Any, group: Any, state: Any) -> None:
        if self.error is not None and tuple(p.shape) == (5,):
            raise self.error
        super().update(p, group, state)


class Late(Own):
    """A state that comes when no rehearsal looks any more."""

    def update(self, p: Any, group: Any, state: Any) -> None:
        state["step"] = state.get("step", 0) + 1
        if state["step"] > 8:
            state["average"] = p.clone()
        super().update(p, group, state)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


TORCHS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, foreach=True),
    "nesterov": lambda p: torch.optim.SGD(
        p, 0.05, 0.9, nesterov=True, weight_decay=0.1, foreach=False
    ),
    "lr tensor": lambda p: torch.optim.SGD(p, lr=torch.tensor(0.01), momentum=0.9, maximize=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, fused=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, foreach=True),
    "maximize": lambda p: torch.optim.Adam(p, lr=0.01, maximize=True, foreach=False),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, foreach=True),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01, t0=2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}
PRECISIONS = ("32-true", "bf16-true", "bf16-mixed", "16-mixed")
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"clip": 0.3},
    {"inside": True},
    {"clip": 1e3, "accumulate": 2, "to_none": False},
)


@pytest.mark.parametrize("name", TORCHS)
def test_torchs(name: str) -> None:
    """Each in two precisions and ways, so that precisions, ways and policies all meet."""
    index = list(TORCHS).index(name)
    full = lambda named: [p for _, p in named if p.numel()]  # noqa: E731
    for i in (index, index + 1 + index // 4):
        precision = PRECISIONS[i % 4]
        compare(
            TORCHS[name],
            precision,
            4,
            **WAYS[(i + i // 4) % 4],
            overflow=(2,) if precision == "16-mixed" else (),
            groups=full
            if name == "adafactor"
            else two_groups,  # it divides by the number of elements
            placement_policy=("auto", "cpu", "auto", "cuda")[index % 4],
        )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", [OldStyle, ReplacesGrad, OnParameter, Rotates, Table])
def test_of_a_user(kind: type[Own], precision: str) -> None:
    def seen(run: Plain, i: int) -> Any:
        return [getattr(p, "count", None) for p in run.stepped.values()]

    first = PRECISIONS.index(precision) % 2
    for way in WAYS[first::2]:
        compare(kind, precision, 3, **way, then=seen, device_budget=320 << 10)


@pytest.mark.parametrize("inside", [False, True])
def test_groups_that_change(inside: bool) -> None:
    """Schedulers made before manage(), momentum and betas cycled, a warm-up from 0, edits by hand."""

    def then(run: Plain, i: int) -> None:
        if i == 2:
            run.optimizer.param_groups[0]["weight_decay"] = 0.1
        run.prepared.step()

    cycle = lambda _, o: S.OneCycleLR(o, max_lr=0.1, total_steps=12)  # noqa: E731
    warm_up = lambda _, o: S.LambdaLR(o, lambda i: min(1.0, i / 3))  # noqa: E731
    for make, prepare in ((sgd, cycle), (TORCHS["amsgrad"], cycle), (sgd, warm_up)):
        compare(make, "bf16-mixed", inside=inside, then=then, prepare=prepare)


def test_states_that_the_engine_has_no_place_for() -> None:
    run = Managed(lambda p: torch.optim.SGD(p, lr=0.1))
    train(run, 0)
    one(run, 1)
    run.optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(gs.GeminiError, match=r"conv\.weight: with param group 0 .*momentum_buffer"):
        run.step()
    run.optimizer.param_groups[0]["momentum"] = 0  # nothing has changed
    run.step()
    run.engine.close()


def test_a_state_that_comes_late() -> None:
    run = Managed(Late)
    with pytest.raises(gs.GeminiError, match=r"state average of Late, .* is new: "):
        train(run, *range(10))
    with pytest.warns(RuntimeWarning, match="is new"):
        run.engine.close()


@pytest.mark.parametrize("way", [{}, {"inside": True}, {"clip": 0.3}])
@pytest.mark.parametrize("precision", PRECISIONS[:3])
def test_what_a_program_does_to_states(precision: str, way: dict[str, Any]) -> None:
    """It keeps tensors and entries, writes them, also through .data, and assigns, drops and replaces entries."""

    def then(run: Any, i: int) -> Any:
        state, p = run.optimizer.state, run.stepped
        a, b = p["a.weight"], p["b.weight"]
        if i == 0:
            run.held = [state[each]["momentum_buffer"] for each in p.values() if each.numel()]
            run.entry = state[a]
        elif i == 1:
            run.held[3].mul_(0.5)
            run.entry["extra"] = 3
        elif i == 2:
            run.held[4].data.mul_(0.5)
            run.entry["momentum_buffer"].data.zero_()
        elif i == 3:
            state[b]["momentum_buffer"] = torch.ones_like(state[b]["momentum_buffer"])
        elif i == 4:
            state[b] = {"momentum_buffer": torch.ones_like(state[b]["momentum_buffer"])}
        elif i == 5:
            del state[b]
            run.popped = state.pop(p["b.bias"])
            state[a].clear()
        elif i == 6:
            state.clear()
        elif i == 7:
            run.copied = list(copy.deepcopy(state).values())
            run.optimizer.state = {k: copy.deepcopy(v) for k, v in state.items()}
        entries = [dict(run.entry), getattr(run, "popped", {}), getattr(run, "copied", [])]
        return [*[t.clone() for t in run.held], *entries, len(state), b in state]

    compare(sgd, precision, 9, then=then, **way)


def test_between_a_backward_that_steps_and_its_step() -> None:
    run = Managed(sgd)
    train(run, 0)
    state, p = run.optimizer.state, run.weights["a.weight"]
    held = state[p]["momentum_buffer"]
    one(run, 1, step=True)
    for ask in (lambda: state[p], lambda: state.clear(), run.optimizer.state_dict):
        with pytest.raises(gs.GeminiError, match=r"call optimizer\.step\(\) first"):
            ask()
    held.zero_()
    with pytest.raises(gs.GeminiError, match=r"a\.weight: its state momentum_buffer was written"):
        run.step()


def test_an_assigned_state_of_another_dtype() -> None:
    run = Managed(sgd, "bf16-true")
    train(run, 0)
    p = run.weights["a.weight"]
    with pytest.raises(gs.GeminiError, match=r"momentum_buffer of SGD has become torch\.float32"):
        run.optimizer.state[p] = {"momentum_buffer": torch.ones(64, 128)}
    run.engine.close()


@pytest.mark.parametrize("make", [sgd, TORCHS["adagrad"], TORCHS["amsgrad"]])
def test_before_and_after(make: Make) -> None:
    """It has stepped before manage(), and goes on after close(), without a word."""
    plain = Plain(make)

    def alone(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for i in range(2):
            x, y = batch(50 + i)
            ((model(x, True) - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    alone(plain.model, plain.optimizer)
    run = Managed(make, prepare=alone)
    for each in (plain, run):
        train(each, 0, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.engine.close()
    for each in (plain, run):
        alone(each.model, each.optimizer)
    assert_same(Plain.outcome(run, True), plain.outcome(True), "after close()")
    assert type(run.optimizer) is type(plain.optimizer)
    assert "step" not in vars(run.optimizer)


def test_copies_and_state_dicts() -> None:
    plain, run = Plain(sgd), Managed(sgd)
    for each in (plain, run):
        train(each, 0)
    for copied in (copy.deepcopy(run.optimizer), pickle.loads(pickle.dumps(run.optimizer))):
        assert type(copied) is torch.optim.SGD
        assert_same(
            list(map(dict, copied.state.values())),
            list(map(dict, plain.optimizer.state.values())),
            "copy",
        )
    saved = plain.optimizer.state_dict()
    assert_same(run.optimizer.state_dict(), saved, "state_dict")
    for each in (plain, run):
        each.optimizer.load_state_dict(copy.deepcopy(saved))
        one(each, 1)
        each.step()
    assert_same(run.outcome(True), plain.outcome(True), "loaded")
    run.engine.close()


def test_hooks_and_closures() -> None:
    """Hooks see the whole step, before and after; a closure is called once, before the step."""
    seen: dict[str, list[Any]] = {}
    for kind in (Plain, Managed):
        run: Any = kind(sgd)
        log = seen[kind.__name__] = []

        def look(o: Any, *_: Any, log: Any = log) -> None:
            params = [p for group in o.param_groups for p in group["params"]]
            grads = [None if p.grad is None else p.grad.clone() for p in params]
            states = [o.state[p]["momentum_buffer"].clone() for p in params if p in o.state]
            log.append([[p.detach().clone() for p in params], grads, states])

        run.optimizer.register_step_pre_hook(look)
        run.optimizer.register_step_post_hook(look)
        for i in range(3):

            def closure(run: Any = run, i: int = i) -> Tensor:
                run.zero_grad()
                loss = ((run.forward(batch(i)[0], True) - batch(i)[1]) ** 2).mean()
                run.backward(loss)
                return loss

            log.append([run.optimizer.step(closure).detach()])
        if kind is Managed:
            run.engine.close()
    assert_same(seen["Managed"], seen["Plain"], "seen")


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("error", [ValueError("as it says"), KeyboardInterrupt()])
def test_an_error_in_step(error: BaseException, inside: bool) -> None:
    """It is the cause of what closes the engine, or that itself."""
    run = Managed(Bomb)
    Bomb.error = error
    try:
        with pytest.raises((gs.GeminiError, KeyboardInterrupt)) as raised:
            one(run, 0, step=inside)
            run.step()
            run.zero_grad()
            one(run, 1)
    finally:
        Bomb.error = None
    assert error in (raised.value, raised.value.__cause__)
    with pytest.raises(gs.GeminiError, match="closed by an earlier error: the optimizer's step"):
        one(run, 2)
    with pytest.warns(RuntimeWarning, match="ended inside a step"):
        run.engine.close()


def test_an_interrupt_in_step() -> None:
    """It waits until the step is whole."""
    sent: list[signal.Signals] = []

    class Interrupted(Own):
        def before(self) -> None:
            if sent:
                signal.raise_signal(sent.pop())

    plain, run = Plain(Interrupted), Managed(Interrupted)
    for i in range(3):
        one(plain, i)
        plain.step()
        plain.zero_grad()
        one(run, i)
        if i == 1:
            sent.append(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                run.step()
        else:
            run.step()
        run.zero_grad()
    assert_same(run.outcome(False), plain.outcome(False), "after an interrupt")
    run.engine.close()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("make", [sgd, TORCHS["amsgrad"], Rotates])
def test_the_budget_that_an_error_names_suffices(make: Make, precision: str) -> None:
    with pytest.raises(gs.GeminiMemoryError) as raised:
        Managed(make, precision, device_budget=8 << 10)
    found = re.findall(r"\((\d+) bytes\)", str(raised.value))
    compare(make, precision, 2, device_budget=int(found[-1]))


@pytest.mark.parametrize("is_closed", [True, False])
def test_nothing_lives_on(is_closed: bool) -> None:
    run = Managed(OnParameter)
    for i in range(3):
        one(run, i, step=i == 2)
        run.step()
        run.zero_grad()
    runtime = run.engine._runtime
    gone = [weakref.ref(each) for each in (run.engine, runtime, runtime.opaque, run.model)]
    entry = run.optimizer.state[run.weights["a.weight"]]  # a program may have it
    del runtime
    if is_closed:
        run.engine.close()
    del run
    gc.collect()
    assert [each() for each in gone] == [None] * len(gone)
    assert entry is not None
