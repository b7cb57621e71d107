"""engine.save where it meets something else in a loop: a checkpoint has the bits of the step at which it is asked for.

What these are says the reference. No other save goes before, which would wait for updates and copies that are under
way. What is written meanwhile is held by a gate, so that all orders are those of the test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from gemini_strategy.checkpoint import parts
from gemini_strategy.checkpoint.background import Saving
from helpers import chaos
from helpers.pairs import turns
from helpers.reference import (
    Managed,
    Outcome,
    Plain,
    Recipe,
    assert_same_outcome,
    drive,
    managed,
    plain,
)
from helpers.saving import Gate
from helpers.scenario import MACHINES, budgeted
from helpers.zoo import Case, mlp_case

pytestmark = pytest.mark.core  # make check runs these on a core with its own assertions

CASE = mlp_case(width=48, depth=4, p=0.1)
QUIET, FIRES = 1e3, 0.05
RECIPE = Recipe(precision="bf16-true", clip=QUIET)
#: Where updates run, and what a budget is of weights and states. With such rates no time of this machine counts.
HOWS = {
    "host": (MACHINES["host"], 0.3),
    "device": (MACHINES["device"], 0.3),
    "both": ("h2d=1e4,d2h=1e4,host_adam=1e2,host_adam_beside=1e2", 0.7),  # some weights stay there
}
DEVICES = (None, 9)  # in order, and late
FIRST = 4  # steps before


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field is read in several, at different times."""
    monkeypatch.setattr(parts, "MOST_ELEMENTS", 700)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


def _step(run: Plain, number: int, clip: float = QUIET, case: Case = CASE) -> None:
    run.recipe = replace(RECIPE, clip=clip)
    drive(run, case, 1, first=number)


def _backward(run: Plain, number: int) -> None:
    torch.manual_seed(1000 + number)
    loss = CASE.loss(run, CASE.batch(number))
    run.losses.append(loss.detach().float().clone())
    run.backward(loss)


# ---- moments -------------------------------------------------------------------------------------

_Save = Callable[[], None]


def _after_a_step(run: Plain, save: _Save) -> None:
    """Updates are pending, or have been taken from what was speculated, and copies home are under way."""
    save()


def _before_a_step(run: Plain, save: _Save) -> None:
    """Results are in the spares, and are taken while it is written."""
    _backward(run, FIRST)
    save()
    run.finish()


def _in_a_backward(run: Plain, save: _Save) -> None:
    def at_its_gradient(module: nn.Module, args: tuple, out: torch.Tensor) -> None:
        out.register_hook(lambda grad: save())

    layers = [m for m in run.model.modules() if isinstance(m, nn.Linear)]
    hook = layers[2].register_forward_hook(at_its_gradient)
    _backward(run, FIRST)
    hook.remove()
    run.finish()


def _after_a_clip(run: Plain, save: _Save) -> None:
    """What was speculated is made again, behind the factor."""
    _step(run, FIRST, FIRES)
    save()


def _after_a_step_in_place(run: Plain, save: _Save) -> None:
    """Nor is the next one speculated: nothing else waits for states that are coming home."""
    for number in (FIRST, FIRST + 9):
        _step(run, number, FIRES)
        if run.engine is not None:
            run.engine._runtime.core.clip_factor()  # it is known when the next one begins
    save()


def _after_a_forward(run: Plain, save: _Save) -> None:
    """It has issued the updates: results were taken, and weights have come back to the device."""
    run.model.eval()
    with torch.no_grad():
        CASE.loss(run, CASE.batch(50))
    run.model.train()
    save()


MOMENTS = [
    _after_a_step,
    _before_a_step,
    _in_a_backward,
    _after_a_clip,
    _after_a_step_in_place,
    _after_a_forward,
]
# With each place of updates; the devices take turns.
MEETINGS = [
    pytest.param(moment, how, DEVICES[(i + j) % 2], id=f"{moment.__name__.strip('_')}-{how}")
    for i, moment in enumerate(MOMENTS)
    for j, how in enumerate([*HOWS, "cpu"])
]


# ---- one save ------------------------------------------------------------------------------------


def _planned(how: str, patch: pytest.MonkeyPatch) -> Managed:
    """After some steps, the last of which was speculated."""
    rates, share = HOWS.get(how, HOWS["host"])
    patch.setenv("GEMINI_RATES", rates)
    run = (
        managed(CASE.build, RECIPE, placement_policy="cpu", chunk_size=4096)
        if how == "cpu"
        else budgeted(CASE, RECIPE, share, chunk_size=4096)
    )
    for number in range(FIRST):
        _step(run, number)
    assert run.engine.stats()["speculated_updates"] > 0
    return run


def _reference() -> Plain:
    run = plain(CASE.build, RECIPE)
    for number in range(FIRST):
        _step(run, number)
    return run


def _assert_saved(folder: Path, want: Outcome, case: Case = CASE) -> None:
    other = managed(case.build, RECIPE, chunk_size=8192)
    other.engine.load(folder)
    got = other.outcome()
    other.engine.close()
    got.losses, got.norms = want.losses, want.norms
    assert_same_outcome(got, want)


def _finish(run: Managed, want: Plain) -> None:
    try:
        assert_same_outcome(run.outcome(), want.outcome())
        run.engine._runtime.core.check()
        assert chaos.faults() == (0, "")
    finally:
        run.engine.close()


@pytest.mark.parametrize(("moment", "how", "device"), MEETINGS)
def test_a_slow_writer(
    moment: Callable[[Plain, _Save], None],
    how: str,
    device: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gate: Gate,
) -> None:
    """Some pieces are written at once, some after the next step, most after two steps more, of which one fires."""
    chaos.late(monkeypatch, device)
    want, run = _reference(), _planned(how, monkeypatch)
    outcomes: list[Outcome] = []
    savings: list[Saving] = []

    def save() -> None:
        savings.append(run.engine.save(tmp_path / "saved", background=True))
        gate.reached.acquire()

    moment(want, lambda: outcomes.append(want.outcome()))
    moment(run, save)
    for number, clip in enumerate((QUIET, FIRES, QUIET), FIRST + 1):
        gate.let(1)
        for each in (want, run):
            _step(each, number, clip)
    assert not savings[0].done
    gate.open()
    savings[0].wait()
    _assert_saved(tmp_path / "saved", outcomes[0])
    _finish(run, want)


@pytest.mark.parametrize(("moment", "how", "device"), MEETINGS[::3])  # all of either
def test_in_the_foreground(
    moment: Callable[[Plain, _Save], None],
    how: str,
    device: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chaos.late(monkeypatch, device)
    want, run = _reference(), _planned(how, monkeypatch)
    outcomes: list[Outcome] = []
    moment(want, lambda: outcomes.append(want.outcome()))

    def save() -> None:
        run.engine.save(tmp_path / "saved")

    moment(run, save)
    for number, clip in enumerate((QUIET, FIRES), FIRST + 1):
        for each in (want, run):
            _step(each, number, clip)
    _assert_saved(tmp_path / "saved", outcomes[0])
    _finish(run, want)


@turns(how=[*HOWS, "cpu"], device=DEVICES)
def test_one_after_the_other(
    how: str, device: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    """Each has the bits of its own step."""
    chaos.late(monkeypatch, device)
    want, run = _reference(), _planned(how, monkeypatch)
    for time, clip in enumerate((QUIET, FIRES, QUIET)):
        gate.close()
        folder, outcome = tmp_path / f"saved{time}", want.outcome()
        saving = run.engine.save(folder, background=True)
        gate.reached.acquire()
        for each in (want, run):
            _step(each, FIRST + 2 * time, clip)
        gate.let(2)
        for each in (want, run):
            _step(each, FIRST + 2 * time + 1)
        gate.open()
        saving.wait()
        _assert_saved(folder, outcome)
    before = run.engine.stats()["taken_updates"]
    for number in (20, 21):
        for each in (want, run):
            _step(each, number)
    _ = run.outcome()  # everything is issued
    # Elsewhere times that are measured may have given a plan without them.
    assert run.engine.stats()["taken_updates"] > before or how != "cpu"
    _finish(run, want)


class Turned(nn.Module):
    """Its layers may run the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48, bias=False) for _ in range(8))
        self.is_turned = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers) if self.is_turned else self.layers:
            x = torch.tanh(layer(x)) + x
        return x


def _batch(number: int) -> torch.Tensor:
    return torch.randn(4, 48, generator=torch.Generator().manual_seed(number))


TURNED = Case("turned", Turned, _batch, lambda run, x: run(x).float().square().mean())


def test_a_plan_that_wants_the_spares_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    """There are few, for the last layers of a forward, and then others are the last."""
    monkeypatch.setenv("GEMINI_RATES", MACHINES["host"])
    first = managed(TURNED.build, RECIPE, chunk_size=4608, placement_policy="cpu")
    homes = int(first.engine.stats()["host_bytes"])
    first.engine.close()
    for seed in DEVICES:
        chaos.late(monkeypatch, seed)
        want = plain(TURNED.build, RECIPE)
        run = budgeted(TURNED, RECIPE, 0.3, chunk_size=4608, host_budget=homes + 120_000)
        engine, both = run.engine, (want, run)
        for number in range(FIRST):
            for each in both:
                _step(each, number, case=TURNED)
        assert 0 < engine._runtime.core.plan_info()["n_speculated"] < engine.stats()["chunks"] // 2
        gate.close()
        outcome = want.outcome()
        saving = engine.save(tmp_path / f"saved{seed}", background=True)
        gate.reached.acquire()
        for number in range(FIRST, FIRST + 8):
            for each in both:
                each.model.is_turned = number > FIRST
                _step(each, number, case=TURNED)
        assert not saving.done
        gate.open()
        saving.wait()
        _assert_saved(tmp_path / f"saved{seed}", outcome, TURNED)
        _finish(run, want)
