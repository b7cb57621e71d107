"""Steps with clipping whose updates run inside the backward, before anybody knows whether the clip fires.

The bits are those of the reference whatever comes between backward and step, on a device whose streams run late and
out of order. `counts(run)` says how many updates were speculated, taken and made again, so no test here passes because
nothing was speculated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from helpers.ranks import run_ranks, values
from helpers.reference import (
    Managed,
    Plain,
    Recipe,
    assert_same_outcome,
    drive,
    managed,
    plain,
)
from helpers.scenario import budgeted
from helpers.zoo import CASES, mlp_case

pytestmark = pytest.mark.core  # make check runs these on a core with its own assertions

CASE = mlp_case(width=48, depth=4, p=0.1)
QUIET, FIRES = 1e3, 0.05
#: Machines whose copies are so slow that it pays to begin early, by where updates run there.
_SLOW = "h2d=1e6,d2h=1e6"
MACHINES = {
    "host": _SLOW,
    "device": f"{_SLOW},host_adam=1e2,host_adam_beside=1e2",
    "both": f"{_SLOW},host_adam=1e5,host_adam_beside=1e5",
}
RECIPE = Recipe(precision="bf16-true", clip=QUIET)


@pytest.fixture(autouse=True)
def _chaos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_CHAOS", "9")
    monkeypatch.setenv("GEMINI_RATES", MACHINES["host"])


class Counts(NamedTuple):
    made: int
    taken: int
    redone: int


def counts(run: Managed) -> Counts:
    stats = run.engine.stats()
    return Counts(*(int(stats[f"{what}_updates"]) for what in ("speculated", "taken", "redone")))


def _steps(runs: tuple[Plain, ...], clips: list[float | None], first: int, case: Any = CASE) -> int:
    """One step for each of these limits of the norm; the number of the next step."""
    for step, clip in enumerate(clips, first):
        for run in runs:
            run.recipe = replace(run.recipe, clip=clip)
            drive(run, case, 1, first=step)
    return first + len(clips)


def _finish(run: Managed, want: Plain) -> None:
    try:
        assert_same_outcome(run.outcome(), want.outcome())
        run.engine._runtime.core.check()
        assert run.engine._runtime.core.chaos_faults() == (0, "")
    finally:
        run.engine.close()


def _planned(recipe: Recipe = RECIPE, share: float = 0.5, **how: Any) -> tuple[Plain, Managed]:
    """Both after three steps, the managed one with a plan that speculates, and does."""
    want = plain(CASE.build, recipe)
    run = budgeted(CASE, recipe, share, chunk_size=4096, **how)
    _steps((want, run), [QUIET] * 3, 0)
    _ = run.outcome()  # everything is issued
    assert run.engine._runtime.core.plan_info()["n_speculated"] > 0
    assert counts(run).taken > 0 and counts(run).redone == 0
    return want, run


# ---- the same bits -------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "32-true"])
@pytest.mark.parametrize("rates", list(MACHINES))
def test_clips_that_fire_and_do_not(
    rates: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a clip that fired the next step is not speculated; after one that did not it is."""
    monkeypatch.setenv("GEMINI_RATES", MACHINES[rates])
    recipe = Recipe(precision=precision, clip=QUIET)
    want = plain(CASE.build, recipe)
    run = budgeted(CASE, recipe, 0.3, chunk_size=4096)
    both = (want, run)
    n = _steps(both, [QUIET] * 4, 0)
    before = counts(run)
    assert before.taken > 0 and before.redone == 0
    n = _steps(both, [FIRES], n)
    fired = counts(run)
    assert fired.made > before.made
    n = _steps(both, [FIRES, FIRES, QUIET], n)
    assert counts(run).made == fired.made  # nothing is begun for nothing
    assert counts(run).redone > 0  # at the next step, or before, where somebody needed the bytes
    n = _steps(both, [QUIET, FIRES, QUIET, QUIET], n)
    assert counts(run).taken > fired.taken and counts(run).redone > fired.redone
    _finish(run, want)


@pytest.mark.parametrize("seed", range(6))
def test_late_streams(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_CHAOS", str(31 + seed))
    monkeypatch.setenv("GEMINI_RATES", list(MACHINES.values())[seed % 3])
    want, run = (plain(CASE.build, RECIPE), budgeted(CASE, RECIPE, 0.3, chunk_size=4096))
    _steps((want, run), [QUIET, QUIET, QUIET, FIRES, QUIET, QUIET, FIRES, QUIET, QUIET], 0)
    assert counts(run).taken > 0 and counts(run).redone > 0
    _finish(run, want)


@pytest.mark.parametrize("case", CASES[::3], ids=repr)
def test_zoo(case: Any) -> None:
    recipe = Recipe(precision=case.precisions[0], clip=QUIET)
    want = plain(case.build, recipe)
    run = budgeted(case, recipe, max(0.5, case.floor), chunk_size=4096)
    _steps((want, run), [QUIET, QUIET, QUIET, FIRES, QUIET, QUIET], 0, case)
    _finish(run, want)


@pytest.mark.parametrize("policy", ["cpu", "cuda"])
def test_policies(policy: str) -> None:
    want = plain(CASE.build, RECIPE)
    run = managed(CASE.build, RECIPE, placement_policy=policy, chunk_size=4096)
    _steps((want, run), [QUIET, QUIET, QUIET, FIRES, QUIET, QUIET], 0)
    assert (counts(run).taken > 0) == (counts(run).redone > 0) == (policy == "cpu")
    _finish(run, want)


def test_a_schedule_of_the_learning_rate() -> None:
    recipe = replace(RECIPE, schedule=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.7))
    want, run = _planned(recipe)
    before = counts(run)
    _steps((want, run), [QUIET] * 3, 3)
    assert counts(run).taken > before.taken and counts(run).redone == 0
    _finish(run, want)


# ---- which loops ---------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, FIRES], ids=["never clips", "always fires"])
def test_other_loops_pay_nothing(clip: float | None) -> None:
    want, run = (plain(CASE.build, RECIPE), budgeted(CASE, RECIPE, 0.5, chunk_size=4096))
    _steps((want, run), [clip] * 8, 0)
    assert counts(run) == (0, 0, 0) and run.engine.stats()["spare_bytes"] == 0
    _finish(run, want)


def test_a_loop_that_begins_to_fire_and_ends() -> None:
    """Plans change with it, and ever more seldom."""
    want, run = _planned()
    both = (want, run)
    n = _steps(both, [FIRES] * 6, 3)
    assert run.engine._runtime.core.plan_info()["n_speculated"] == 0
    before = counts(run)
    n = _steps(both, [QUIET] * 7, n)
    assert run.engine._runtime.core.plan_info()["n_speculated"] == 0
    n = _steps(both, [QUIET] * 3, n)
    assert run.engine._runtime.core.plan_info()["n_speculated"] > 0
    assert counts(run).taken > before.taken
    _finish(run, want)


@pytest.mark.parametrize("spare", [0, 100_000])
def test_spares_are_within_the_budget_of_the_host(spare: int) -> None:
    first = managed(CASE.build, RECIPE, chunk_size=4096, placement_policy="cpu")
    homes = int(first.engine.stats()["host_bytes"])
    first.engine.close()
    want = plain(CASE.build, RECIPE)
    run = budgeted(CASE, RECIPE, 0.5, chunk_size=4096, host_budget=homes + spare)
    _steps((want, run), [QUIET, QUIET, QUIET, FIRES, QUIET, QUIET], 0)
    stats = run.engine.stats()
    assert stats["host_bytes"] == homes + stats["spare_bytes"] <= homes + spare
    assert (counts(run).taken > 0) == (stats["spare_bytes"] > 0) == (spare > 0)
    _finish(run, want)


@pytest.mark.parametrize("accumulate", [2, 3])
def test_only_the_last_micro_batch(accumulate: int) -> None:
    recipe = replace(RECIPE, accumulate=accumulate)
    want, run = _planned(recipe)
    before = counts(run)
    n = _steps((want, run), [QUIET] * 2, 3)
    assert counts(run).taken > before.taken and counts(run).redone == 0
    _steps((want, run), [FIRES, QUIET, QUIET], n)
    _finish(run, want)


def test_one_micro_batch_more_and_less() -> None:
    """A gradient that comes after its chunk was speculated: that backward is waited for from then on."""
    want, run = _planned()
    for accumulate, first in ((2, 40), (2, 60), (1, 80), (2, 100)):
        before = counts(run)
        for each in (want, run):
            each.recipe = replace(RECIPE, accumulate=accumulate)
            drive(each, CASE, 1, first=first)
        _ = run.outcome()  # everything is issued
        after = counts(run)
        assert (after.redone > before.redone) == (first == 40)
        assert (after.taken > before.taken) == (first in (60, 100))
    _finish(run, want)


def test_fp16_is_not_speculated() -> None:
    recipe = Recipe(precision="16-mixed", clip=QUIET)
    want, run = (plain(CASE.build, recipe), budgeted(CASE, recipe, 0.5, chunk_size=4096))
    _steps((want, run), [QUIET] * 5, 0)
    assert counts(run) == (0, 0, 0) and run.engine.stats()["spare_bytes"] == 0
    assert run.engine._runtime.core.plan_info()["n_speculated"] == 0
    _finish(run, want)


# ---- what comes between backward and step --------------------------------------------------------


def _one(run: Plain) -> nn.Parameter:
    return [p for p in run.model.parameters() if p.requires_grad][-2]


def _backward(run: Plain, step: int, factor: float = 1.0) -> None:
    torch.manual_seed(1000 + step)
    loss = CASE.loss(run, CASE.batch(step))
    run.losses.append(loss.detach().float().clone())
    run.backward(loss * factor)


def _lr(run: Plain) -> None:
    run.optimizer.param_groups[0]["lr"] *= 0.5


def _betas(run: Plain) -> None:
    run.optimizer.param_groups[0]["betas"] = (0.8, 0.99)


def _decay(run: Plain) -> None:
    run.optimizer.param_groups[0]["weight_decay"] = 0.3


def _scale_gradient(run: Plain) -> None:
    _one(run).grad.mul_(0.5)


def _set_gradient(run: Plain) -> None:
    p = _one(run)
    p.grad = torch.full(tuple(p.shape), 0.25, dtype=p.dtype)


def _drop_gradient(run: Plain) -> None:
    _one(run).grad = None


def _clamp(run: Plain) -> None:
    for p in run.model.parameters():
        if p.grad is not None:
            p.grad.clamp_(-1e-3, 1e-3)


def _write_weight(run: Plain) -> None:
    p = _one(run)
    with torch.no_grad():
        p.fill_(3.0)
    if run.engine is None:  # under an engine the master follows by itself
        run.optimizer.state[p]["remainder"].zero_()


def _write_state(run: Plain) -> None:
    run.optimizer.state[_one(run)]["exp_avg"].mul_(0.5)


def _load_states(run: Plain) -> None:
    state = run.optimizer.state_dict()
    for entry in state["state"].values():
        entry["exp_avg_sq"] = entry["exp_avg_sq"].clone() * 2
    run.optimizer.load_state_dict(state)


def _again(run: Plain) -> None:
    _backward(run, 77)


def _other_gradients(run: Plain) -> None:
    run.zero_grad()
    _backward(run, 78)


def _no_number(run: Plain) -> None:
    run.zero_grad()
    _backward(run, 79, float("nan"))


CHANGES: dict[str, tuple[Callable[[Plain], None], bool]] = {  # and whether every update changes
    "learning rate": (_lr, True),
    "betas": (_betas, True),
    "decay": (_decay, True),
    "gradient scaled": (_scale_gradient, False),
    "gradient set": (_set_gradient, False),
    "gradient dropped": (_drop_gradient, False),
    "gradients clamped": (_clamp, True),
    "weight written": (_write_weight, False),
    "state written": (_write_state, False),
    "states loaded": (_load_states, True),
    "another backward": (_again, True),
    "other gradients": (_other_gradients, True),
    "no numbers": (_no_number, True),
}


@pytest.mark.parametrize("rates", ["host", "device"])
@pytest.mark.parametrize("what", list(CHANGES))
def test_a_change_before_the_step(what: str, rates: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever changes what an update reads, its chunk's speculation is dropped; those of other chunks are taken."""
    monkeypatch.setenv("GEMINI_RATES", MACHINES[rates])
    want, run = _planned(share=0.3)
    change, is_everywhere = CHANGES[what]
    before = counts(run)
    for each in (want, run):
        _backward(each, 3)
        change(each)
        each.finish()
    _ = run.outcome()  # everything is issued
    after = counts(run)
    n_made, n_taken = after.made - before.made, after.taken - before.taken
    assert n_made > 0 and n_taken < n_made
    assert (n_taken == 0) == is_everywhere
    assert after.redone > before.redone or what == "gradient dropped"  # which no step takes
    if what != "no numbers":
        _steps((want, run), [QUIET, QUIET], 4)
    _finish(run, want)


def _read(run: Plain) -> None:
    run.outcome()


def _evaluate(run: Plain) -> None:
    run.model.eval()
    with torch.no_grad():
        run.losses.append(CASE.loss(run, CASE.batch(50)).float())
    run.model.train()


def _forget(run: Plain) -> None:
    """An error before the step: the gradients go, and the step is another one."""
    run.zero_grad()
    _backward(run, 3)


@pytest.mark.parametrize("what", [_read, _evaluate, _forget], ids=lambda f: f.__name__)
def test_reading_before_the_step_sees_the_last_one(what: Callable[[Plain], None]) -> None:
    want, run = _planned()
    before = counts(run)
    for each in (want, run):
        _backward(each, 3)
    assert counts(run).made > before.made
    seen = [each.outcome() for each in (want, run)]
    assert_same_outcome(seen[1], seen[0])
    for each in (want, run):
        what(each)
        each.finish()
    _steps((want, run), [QUIET, FIRES, QUIET], 4)
    assert counts(run).taken > before.taken
    _finish(run, want)


@pytest.mark.parametrize("is_background", [False, True])
def test_a_checkpoint_before_the_step(is_background: bool, tmp_path: Path) -> None:
    """It has the last step's bytes, also where it is written while the step takes what was speculated."""
    want, run = _planned()
    for each in (want, run):
        _backward(each, 3)
    before = want.outcome()
    saved = run.engine.save(tmp_path / "checkpoint", background=is_background)
    for each in (want, run):
        each.finish()
    _steps((want, run), [QUIET, QUIET], 4)
    if is_background:
        saved.wait()
    other = managed(CASE.build, RECIPE, chunk_size=4096)
    other.engine.load(tmp_path / "checkpoint")
    got = other.outcome()
    other.engine.close()
    assert all(torch.equal(got.masters[k], before.masters[k]) for k in before.masters)
    assert all(torch.equal(got.exp_avg_sq[k], before.exp_avg_sq[k]) for k in before.exp_avg_sq)
    _finish(run, want)


def test_closing_before_the_step() -> None:
    want, run = _planned()
    for each in (want, run):
        _backward(each, 3)
    masters = want.outcome().weights
    run.engine.close()
    for name, value in run.model.state_dict().items():
        assert torch.equal(value.to(masters[name].dtype), masters[name]), name


# ---- several ranks -------------------------------------------------------------------------------


def _train(rank: int, size: int) -> Any:
    want = plain(CASE.build, RECIPE)
    run = budgeted(CASE, RECIPE, 0.3, chunk_size=4096, timeout=90.0)
    # Where a rank's workers get no core until the clip fires, it has nothing to do again: several times.
    limits = [QUIET, QUIET, *[QUIET, FIRES] * 8, QUIET, QUIET]
    _steps((want, run), limits, 0)
    if rank == 0:  # one that drops its results and one that does not have the same bits
        run.engine._runtime.core.announce([])
    _steps((want, run), [QUIET, QUIET], len(limits))
    found = counts(run)
    _finish(run, want)
    return tuple(found)


@pytest.mark.parametrize("rates", ["host", "device"])
def test_two_ranks(rates: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same batch on both: the mean is exact."""
    monkeypatch.setenv("GEMINI_RATES", MACHINES[rates])
    for _, taken, redone in values(run_ranks(2, tmp_path, _train)):
        assert taken > 0 and redone > 0
