"""Steps that clip, of optimizers that step by themselves: parts are made inside the backward, before the norm is known.

The bits are those of the loop without an engine, whatever comes between backward and step. `counts` says how many
updates were made ahead, taken and made again, so no test passes because there were none.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import json
import math
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import gemini_strategy as gs
from gemini_strategy import GeminiError
from gemini_strategy.optim.adam import clip_coefficient
from helpers import chaos
from helpers.scenario import MACHINES

pytestmark = pytest.mark.core  # make check runs these on a core with its own assertions

QUIET, FIRES = 1e3, 0.05
Make = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def _chaos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_RATES", MACHINES["host"])


class Counts(NamedTuple):
    made: int
    taken: int
    redone: int


def counts(run: Run) -> Counts:
    stats = run.engine.stats()
    return Counts(*(int(stats[f"{what}_updates"]) for what in ("speculated", "taken", "redone")))


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.LayerNorm(48)) for _ in range(6)]
    return nn.Sequential(*layers, nn.Linear(48, 4))


class Run:
    """The loop, with an engine or without one."""

    def __init__(self, make: Make, managed: bool, share: float = 0.45, **how: Any) -> None:
        self.model = build()
        named = list(self.model.named_parameters())
        self.optimizer = make(
            [
                {"params": [p for _, p in named if p.dim() > 1]},
                {"params": [p for _, p in named if p.dim() <= 1], "lr": 0.004},
            ]
        )
        self.engine: Any = None
        self.n = 0
        self.seen: list[Any] = []
        if managed:
            how = {"chunk_size": 4096, **how}
            trial = gs.manage(self.model, self.optimizer, device="cpu", **how)
            whole = int(trial.stats()["state_bytes"])
            trial.close()
            self.engine = gs.manage(
                self.model, self.optimizer, device="cpu", device_budget=int(share * whole), **how
            )

    def backward(self) -> None:
        source = torch.Generator().manual_seed(self.n)
        self.n += 1
        x, y = torch.randn(8, 48, generator=source), torch.randn(8, 4, generator=source)
        loss = (self.model(x) - y).square().mean()
        loss.backward() if self.engine is None else self.engine.backward(loss)

    def clip(self, limit: float) -> None:
        if self.engine is not None:
            self.engine.clip_grad_norm_(limit)
            return
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        squares = (v * v for grad in grads for v in grad.double().flatten().tolist())
        factor = clip_coefficient(math.sqrt(math.fsum(squares)), limit)
        for grad in grads if factor < 1.0 else ():
            grad.mul_(factor)

    def steps(self, *limits: float) -> None:
        for limit in limits:
            self.backward()
            self.clip(limit)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def outcome(self) -> dict[str, Any]:
        state = self.optimizer.state
        return {
            "weights": {n: p.detach().clone() for n, p in self.model.named_parameters()},
            "states": [copy.deepcopy(dict(state[p])) for p in self.model.parameters()],
            "groups": [
                {k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups
            ],
        }


def assert_same(got: Any, want: Any, what: str = "") -> None:
    if isinstance(want, Tensor):
        assert (got.dtype, got.shape) == (want.dtype, want.shape), what
        flat = [t.contiguous().reshape(-1, 1).view(torch.uint8) for t in (got, want)]
        assert torch.equal(*flat), what
    elif isinstance(want, dict):
        assert got.keys() == want.keys(), what
        for key in want:
            assert_same(got[key], want[key], f"{what}.{key}")
    elif isinstance(want, list):
        assert len(got) == len(want), what
        for i, pair in enumerate(zip(got, want, strict=True)):
            assert_same(*pair, f"{what}.{i}")
    else:
        assert got == want, what


def both(make: Make, act: Callable[[Run], None], **how: Any) -> Counts:
    """Three quiet steps, then `act`, of both; the counts of the managed one behind these steps."""
    plain, managed = Run(make, False), Run(make, True, **how)
    try:
        for run in (plain, managed):
            run.steps(QUIET, QUIET, QUIET)
        before = counts(managed)
        assert managed.engine._runtime.core.plan_info()["n_speculated"] > 0
        for run in (plain, managed):
            act(run)
        after = counts(managed)
        assert_same(managed.outcome(), plain.outcome())
        managed.engine._runtime.core.check()
        return Counts(*(b - a for a, b in zip(before, after, strict=True)))
    finally:
        managed.engine.close()


class Counting(torch.optim.Optimizer):
    """Momentum, a count in Python and one in a tensor."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})
        self.scale, self.factors, self.zero = 1.0, {"all": [torch.tensor(1.0)]}, 0.0
        self.function = functools.partial(torch.mul, other=1.0)
        for group in self.param_groups:
            group["inside"] = {"rates": [torch.tensor(1.0)]}
            for p in group["params"]:
                p.given = types.SimpleNamespace(factor=1.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(n=0, t=torch.tensor(0.0), m=torch.zeros_like(p))
                state["n"] += 1
                state["t"] += 1
                state["m"].mul_(0.9).add_(p.grad)
                factor = self.scale * self.factors["all"][0] * getattr(p, "factor", 1.0)
                factor *= self.defaults["lr"] * 100 * math.copysign(1.0, self.zero)
                factor *= group["inside"]["rates"][0] * getattr(
                    getattr(p, "given", None), "factor", 1.0
                )
                factor = self.function(factor)
                p.sub_(state["m"] * (factor * group["lr"] / state["t"]))


def sgd(params: Any) -> Any:
    return torch.optim.SGD(params, lr=0.01)


def nadam(params: Any) -> Any:
    return torch.optim.NAdam(params, lr=0.01)


def adamw8bit(params: Any) -> Any:
    from torchao.optim import AdamW8bit

    return AdamW8bit(params, lr=0.01, block_size=64)


MAKES: list[Make] = [Counting, nadam, sgd, adamw8bit, torch.optim.Adagrad]


@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_clips_that_fire_and_do_not(make: Make, precision: str) -> None:
    limits = [QUIET] * 4 + [FIRES, QUIET, QUIET, QUIET, FIRES, FIRES] + [QUIET] * 6
    managed = Run(make, True, precision=precision, placement_policy="cpu")  # all streamed
    want = Run(make, True, share=5.0, precision=precision)  # all resident
    try:
        for run in (want, managed):
            run.steps(*limits)
        seen = counts(managed)
        assert seen.taken > 0
        assert seen.redone > 0
        assert counts(want).made == 0
        assert_same(managed.outcome(), want.outcome())
    finally:
        managed.engine.close()
        want.engine.close()


#: Of all bytes: weights pass through the device; or some have blocks of their own, and wait there for their step.
SHARES = [0.45, 0.5]


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_bits_of_the_loop_without_an_engine(make: Make, share: float) -> None:
    seen = both(make, lambda run: run.steps(QUIET, QUIET, FIRES, QUIET, QUIET), share=share)
    assert seen.taken > 0 and seen.redone > 0


def _between(act: Callable[[Run], Any]) -> Callable[[Run], None]:
    """A step with something between its backward and it, and one more."""

    def steps(run: Run) -> None:
        run.backward()
        act(run)
        run.clip(QUIET)
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.steps(QUIET)

    return steps


def _other_lr(run: Run) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] *= 0.5


def _other_attribute(run: Run) -> None:
    run.optimizer.scale = 0.25


def _in_place(run: Run) -> None:
    run.optimizer.factors["all"][0].mul_(0.5)


def _function(run: Run) -> None:
    run.optimizer.function = functools.partial(torch.mul, other=0.5)


def _zero(run: Run) -> None:
    run.optimizer.zero = -0.0


def _inside_an_option(run: Run) -> None:
    for group in run.optimizer.param_groups:
        group["inside"]["rates"][0].mul_(0.5)


def _object_on_a_parameter(run: Run) -> None:
    for p in run.model.parameters():
        p.given.factor = 0.5


def _counter_through_numpy(run: Run) -> None:
    for seen in run.seen:
        seen += 2


def _default(run: Run) -> None:
    run.optimizer.defaults["lr"] *= 0.5


def _mark(run: Run) -> None:
    for p in run.model.parameters():
        p.factor = 0.5


def _counter(run: Run) -> None:
    for p in run.model.parameters():
        run.optimizer.state[p]["t"].add_(3)
    gc.collect()


def _state(run: Run) -> None:
    for p in run.model.parameters():
        run.optimizer.state[p]["m"].mul_(0.5)


def _python_state(run: Run) -> None:
    for p in list(run.model.parameters())[::2]:
        run.optimizer.state[p]["n"] += 10


def _weights(run: Run) -> None:
    with torch.no_grad():
        for p in run.model.parameters():
            p.mul_(1.001)


def _grads(run: Run) -> None:
    for p in run.model.parameters():
        p.grad.mul_(0.5)


def _no_grad(run: Run) -> None:
    next(iter(run.model.parameters())).grad = None


def _loaded(run: Run) -> None:
    state = copy.deepcopy(run.optimizer.state_dict())
    for entry in state["state"].values():
        entry["m"] = entry["m"] * 2
    run.optimizer.load_state_dict(state)


def _second(run: Run) -> None:
    run.backward()


def _evaluated(run: Run) -> None:
    with torch.no_grad():
        run.model(torch.ones(2, 48))


CHANGES = [
    _other_lr,
    _other_attribute,
    _in_place,
    _function,
    _zero,
    _inside_an_option,
    _object_on_a_parameter,
    _default,
    _mark,
    _counter,
    _state,
    _python_state,
    _weights,
    _grads,
    _loaded,
    _second,
]


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("act", CHANGES, ids=lambda act: act.__name__)
def test_what_changes_between_backward_and_step_counts(
    act: Callable[[Run], Any], share: float
) -> None:
    seen = both(Counting, _between(act), share=share)
    assert seen.made > 0
    assert seen.redone > 0


def test_what_numpy_has_of_a_counter_is_the_counter() -> None:
    def act(run: Run) -> None:
        run.seen = [run.optimizer.state[p]["t"].numpy() for p in run.model.parameters()]
        gc.collect()
        run.steps(QUIET, QUIET)
        _between(_counter_through_numpy)(run)

    both(Counting, act)


def test_a_list_in_a_state_stays_the_programs() -> None:
    """Nothing is made ahead there: the step would write another one."""

    class Listing(Counting):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            for p in itertools.chain.from_iterable(g["params"] for g in self.param_groups):
                if p.grad is not None:
                    self.state[p].setdefault("seen", []).append(self.state[p]["n"])

    held: dict[bool, Any] = {}

    def act(run: Run) -> None:
        held[run.engine is not None] = run.optimizer.state[next(iter(run.model.parameters()))][
            "seen"
        ]
        gc.collect()
        run.steps(QUIET, QUIET, QUIET)

    assert both(Listing, act).taken == 0
    assert held[True] == held[False] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("act", [_evaluated, _no_grad], ids=lambda act: act.__name__)
def test_what_changes_little_is_taken(act: Callable[[Run], Any]) -> None:
    assert both(Counting, _between(act)).taken > 0


def test_weights_that_are_read_before_the_step_are_stepped_again() -> None:
    """Weights with blocks of their own wait there for the step: who reads them meanwhile gets the old ones back."""
    seen: dict[bool, list[Any]] = {False: [], True: []}

    def read(run: Run) -> None:
        seen[run.engine is not None] += [p.detach().clone() for p in run.model.parameters()]

    def act(run: Run) -> None:
        if run.engine is not None:
            assert run.engine._runtime.core.plan_info()["n_of_class"]["S1"] > 2
        _between(read)(run)

    counted = both(Counting, act, share=0.5)
    assert counted.redone > 2 and counted.taken > 2
    assert_same(seen[True], seen[False])


def test_a_picture_shows_where_weights_wait(tmp_path: Path) -> None:
    """Those that are made ahead where they are leave the device for the step, and are there again without a copy."""
    run = Run(nadam, True, share=0.45)
    try:
        run.steps(QUIET, QUIET, QUIET, QUIET)
        classes = run.engine._runtime.core.plan_info()["classes"]
        with run.engine.timeline(tmp_path / "steps.json"):
            run.steps(QUIET, QUIET, QUIET)
    finally:
        run.engine.close()
    chunk = {f" {number}" for number, name in enumerate(classes) if name == "S1"}
    events = json.loads((tmp_path / "steps.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event["args"].get("piece") == "weight"]
    for number in chunk:
        mine = [name.removesuffix(number) for name in names if name.endswith(number)]
        assert mine.count("held") >= mine.count("dropped") and "fetch" not in mine
    assert sum(name.startswith("dropped") for name in names) > 3


def test_a_look_at_states_shows_the_last_step() -> None:
    seen: dict[bool, list[Any]] = {False: [], True: []}

    def look(run: Run) -> None:
        states = [run.optimizer.state[p] for p in run.model.parameters()]
        seen[run.engine is not None].append(copy.deepcopy([dict(state) for state in states]))

    both(Counting, _between(look))
    assert_same(seen[True], seen[False])


def test_a_look_that_is_over_costs_no_later_step_anything() -> None:
    def act(run: Run) -> None:
        for p in run.model.parameters():
            _ = float(run.optimizer.state[p]["t"])
        gc.collect()
        run.steps(QUIET, QUIET, QUIET)

    assert both(Counting, act).taken > 0


def test_states_that_a_program_holds_follow_each_step() -> None:
    """Then nothing is made ahead: a counter is the very tensor that the program has."""
    kept: dict[bool, Any] = {}

    def act(run: Run) -> None:
        p = next(iter(run.model.parameters()))
        held = run.optimizer.state[p]["t"]
        shown = [float(held)]
        for _ in range(3):
            run.steps(QUIET)
            shown.append(float(held))
        kept[run.engine is not None] = shown

    seen = both(Counting, act)
    assert kept[True] == kept[False] == [3.0, 4.0, 5.0, 6.0]
    assert seen.made == 0


class Marking(Counting):
    """Writes to parameters and gradients in the steps of `when`; a rehearsal sees none of them."""

    when: Sequence[int] = ()
    what = ""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or self.state[p]["n"] not in self.when:
                    continue
                if self.what == "attribute":
                    p.mark = self.state[p]["n"]
                elif self.what == "grad":
                    p.grad.mul_(0.5)
                elif self.what == "none":
                    p.grad = None


@pytest.mark.parametrize("what", ["attribute", "grad", "none"])
def test_what_only_a_step_may_write_is_made_at_the_step(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Marking, "what", what)
    monkeypatch.setattr(Marking, "when", (12, 13))
    plain, managed = Run(Marking, False), Run(Marking, True)
    try:
        for _ in range(15):
            shown = []
            for run in (plain, managed):
                run.backward()
                run.clip(QUIET)
                marks = [getattr(p, "mark", 0) for p in run.model.parameters()]
                run.optimizer.step()
                shown.append(marks)
                run.optimizer.zero_grad()
            assert shown[0] == shown[1]
        assert counts(managed).taken > 0
        assert_same(managed.outcome(), plain.outcome())
    finally:
        managed.engine.close()


class Refusing(Counting):
    """Raises where a gradient is no number."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and not p.grad.isfinite().all():
                    raise ValueError("no number")
        super().step(closure)


def test_an_error_in_a_part_is_its_steps() -> None:
    """Where that never comes, as a program skips it, nothing has happened."""

    def skip(run: Run) -> None:
        loss = run.model(torch.full((2, 48), math.inf)).sum()
        loss.backward() if run.engine is None else run.engine.backward(loss)
        run.optimizer.zero_grad()
        run.steps(QUIET, QUIET)

    seen = both(Refusing, skip)
    assert seen.taken > 0

    def raises(run: Run) -> None:
        run.backward()
        for p in run.model.parameters():
            p.grad.fill_(math.nan)
        with pytest.raises(ValueError if run.engine is None else GeminiError, match="no number"):
            run.optimizer.step()

    managed = Run(Refusing, True)
    managed.steps(QUIET, QUIET, QUIET)
    raises(managed)
    managed.engine.close()


def test_late_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that comes as late as its fences allow."""
    chaos.late(monkeypatch, 9)
    seen = both(sgd, lambda run: run.steps(QUIET, QUIET, FIRES, QUIET, QUIET))
    assert seen.taken > 0
    assert chaos.faults() == (0, "")


class Decaying(Counting):
    """Weight decay in the gradient, past the version of a tensor."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and group.get("decay"):
                    p.grad.data.add_(p.data, alpha=group["decay"])
        super().step(closure)


def test_a_step_that_begins_to_write_gradients() -> None:
    """Its groups are edited in mid-run, and nothing is made ahead from then on."""

    def act(run: Run) -> None:
        for group in run.optimizer.param_groups:
            group["decay"] = 0.5
        run.steps(QUIET, FIRES, QUIET, FIRES, QUIET, QUIET)

    for chunk_size in (4096, 16384):
        both(Decaying, act, chunk_size=chunk_size)


@pytest.mark.parametrize("clips", [True, False])
def test_parts_that_wait_run_as_at_their_step(clips: bool) -> None:
    """Then the program changes what they read, skips some layers, and announces another step."""
    plain, managed = Run(Counting, False), Run(Counting, True)
    try:
        for step in range(10):
            for run in (plain, managed):
                _other_lr(run)
                _in_place(run) if step % 3 == 2 else None
                for layer in list(run.model)[1:3] if step > 3 and step % 2 else ():
                    layer.forward = lambda x: x
                run.backward()
                for layer in run.model:
                    vars(layer).pop("forward", None)
                if clips:
                    run.clip(QUIET)
                run.optimizer.step()
                run.optimizer.zero_grad()
                _default(run) if step % 4 == 1 else None
                _mark(run) if step % 4 == 3 else None
        assert counts(managed).taken > 0 or not clips
        assert_same(managed.outcome(), plain.outcome())
    finally:
        managed.engine.close()


class _Doubling(TorchDispatchMode):
    """Every sum under it is twice as large."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 2 if "sub" in func.__name__ and isinstance(found, Tensor) else found


class Looking(Counting):
    """Says under what its step() runs."""

    seen: ClassVar[list[tuple[int, bool]]] = []

    def step(self, closure: Any = None) -> None:
        is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python)
        self.seen.append((torch._C._len_torch_dispatch_stack(), is_excluded))
        super().step(closure)


def test_a_part_that_runs_inside_an_operation_is_apart_from_it() -> None:
    """A weight is read where updates still wait: the operation excludes keys, and the program has a mode."""
    plain, managed = Run(Looking, False), Run(Looking, True)
    try:
        for run in (plain, managed):
            for _ in range(3):
                run.backward()
                run.optimizer.step()
                run.optimizer.zero_grad()
            Looking.seen.clear()
            with _Doubling():
                for p in run.model.parameters():
                    p.detach().clone()
        assert Looking.seen
        assert set(Looking.seen) == {(0, False)}
        assert_same(managed.outcome(), plain.outcome())
    finally:
        managed.engine.close()


def test_plans_know_how_fast_the_optimizer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not Adam's rate: that at which the updates of the first step ran, as long as each of them took at least."""
    monkeypatch.setenv("GEMINI_TUNE", "1")
    seconds = 0.005

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            time.sleep(seconds)
            super().step(closure)

    managed = Run(Slow, True)
    try:
        managed.steps(QUIET)
        rates = managed.engine._runtime.core.plan_info()["rates"]
        assert 0 < rates["device_adam"] < 48 * 48 / seconds
        assert rates["h2d"] == 1e3  # as given
    finally:
        managed.engine.close()
