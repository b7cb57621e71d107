"""Steps with clipping whose updates run inside the backward, before anybody knows whether the clip fires.

The bits are those of the reference whatever comes between backward and step, on a device whose streams run late and
out of order. `counts(run)` says how many updates were speculated, taken and made again, so no test here passes because
nothing was speculated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Timer
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import gemini_strategy as gs
from gemini_strategy.machine.host import Share
from helpers import chaos
from helpers.pairs import pairs, turns
from helpers.ranks import run_ranks, values
from helpers.reference import (
    Managed,
    Plain,
    Recipe,
    assert_same_bits,
    assert_same_outcome,
    drive,
    managed,
    plain,
)
from helpers.saving import Gate, contents
from helpers.scenario import MACHINES, budgeted
from helpers.zoo import CASES, mlp_case

pytestmark = pytest.mark.core  # make check runs these on a core with its own assertions

CASE = mlp_case(width=48, depth=4, p=0.1)
PRECISIONS = ("bf16-true", "bf16-mixed", "32-true")
QUIET, FIRES = 1e3, 0.05
RECIPE = Recipe(precision="bf16-true", clip=QUIET)


@pytest.fixture(autouse=True)
def _chaos(monkeypatch: pytest.MonkeyPatch) -> None:
    chaos.late(monkeypatch, 9)
    monkeypatch.setenv("GEMINI_RATES", MACHINES["host"])


class Counts(NamedTuple):
    made: int
    taken: int
    redone: int


def counts(run: Managed) -> Counts:
    stats = run.engine.stats()
    return Counts(*(int(stats[f"{what}_updates"]) for what in ("speculated", "taken", "redone")))


def _steps(
    runs: tuple[Plain, ...],
    clips: list[float | None],
    first: int,
    case: Any = CASE,
    waits: bool = False,
) -> int:
    """One step for each of these limits of the norm; the number of the next step.

    `waits`: after each step it is known whether its clip fired; else that comes to light when it does.
    """
    for step, clip in enumerate(clips, first):
        for run in runs:
            run.recipe = replace(run.recipe, clip=clip)
            drive(run, case, 1, first=step)
            if waits and run.engine is not None:
                run.engine._runtime.core.clip_factor()
    return first + len(clips)


def _finish(run: Managed, want: Plain) -> None:
    try:
        assert_same_outcome(run.outcome(), want.outcome())
        run.engine._runtime.core.check()
        assert chaos.faults() == (0, "")
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


@turns(rates=MACHINES, precision=PRECISIONS)  # each pair: test_a_save_copies_what_changes
def test_clips_that_fire_and_do_not(
    rates: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a clip that fired the next step is not speculated; after one that did not it is."""
    monkeypatch.setenv("GEMINI_RATES", MACHINES[rates])
    recipe = Recipe(precision=precision, clip=QUIET)
    want = plain(CASE.build, recipe)
    run = budgeted(CASE, recipe, 0.3, chunk_size=4096)
    both = (want, run)
    n = _steps(both, [QUIET], 0)  # a first step measures at home
    n = _steps(both, [QUIET] * 3, n, waits=True)
    before = counts(run)
    n = _steps(both, [FIRES], n, waits=True)
    fired = counts(run)
    assert before.taken > 0 and before.redone == 0
    assert fired.made > before.made
    n = _steps(both, [FIRES, FIRES, QUIET], n, waits=True)
    assert counts(run).made == fired.made  # nothing is begun for nothing
    assert counts(run).redone > 0  # at the next step, or before, where somebody needed the bytes
    n = _steps(both, [QUIET, FIRES, QUIET, QUIET], n)
    assert counts(run).taken > fired.taken and counts(run).redone > fired.redone
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
    n = _steps(both, [FIRES] * 6, 3, waits=True)
    assert run.engine._runtime.core.plan_info()["n_speculated"] == 0
    before = counts(run)
    n = _steps(both, [QUIET] * 7, n, waits=True)
    assert run.engine._runtime.core.plan_info()["n_speculated"] == 0
    n = _steps(both, [QUIET] * 3, n, waits=True)
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


def _share_job(rank: int, size: int, homes: int) -> int:
    """Each rank's share of the host is twice what its homes take, and nobody gave a budget."""
    share = 2 * homes
    manage = sys.modules["gemini_strategy.management"]
    manage.share_of_host = lambda *args, **how: Share((), 1, share)  # type: ignore[attr-defined]
    run = budgeted(CASE, RECIPE, 0.5, chunk_size=4096)
    for number in range(4):
        run.recipe = replace(RECIPE, clip=QUIET)
        drive(run, CASE, 1, first=number)
    stats = run.engine.stats()
    run.engine.close()
    return int(stats["spare_bytes"])


def test_ranks_leave_half_of_what_the_host_has(tmp_path: Path) -> None:
    """Two of them took all that was free, and the system ended one."""
    first = managed(CASE.build, RECIPE, chunk_size=4096, placement_policy="cpu")
    homes = int(first.engine.stats()["host_bytes"])
    first.engine.close()
    for spare in values(run_ranks(2, tmp_path, _share_job, homes // 2)):
        assert 0 < spare <= homes // 4


@pytest.mark.parametrize("accumulate", [2, 3])
def test_only_the_last_micro_batch(accumulate: int) -> None:
    recipe = replace(RECIPE, accumulate=accumulate)
    want, run = _planned(recipe, 0.3)
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


# ---- nobody waits for the norm -------------------------------------------------------------------


def _waits(run: Managed) -> int:
    return int(run.engine._runtime.core.stats()["host_waits"])


@pytest.mark.parametrize("seed", [None, *range(2)])
@pytest.mark.parametrize("rates", list(MACHINES))
def test_no_wait_in_a_step_that_clips(
    rates: str, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned steps, whether the clip fires or not: forward, backward, norm, step."""
    chaos.late(monkeypatch, None)
    if seed is not None:
        chaos.late(monkeypatch, 50 + seed)
    monkeypatch.setenv("GEMINI_RATES", MACHINES[rates])
    want, run = (plain(CASE.build, RECIPE), budgeted(CASE, RECIPE, 0.3, chunk_size=4096))
    n = _steps((want, run), [QUIET] * 12, 0)  # passes that are timed end with waits
    before, speculated = _waits(run), counts(run)
    _steps((want, run), [QUIET, QUIET, FIRES, QUIET, FIRES, FIRES, QUIET, QUIET], n)
    assert _waits(run) == before
    assert counts(run).taken > speculated.taken and counts(run).redone > speculated.redone
    run.engine._runtime.core.check()
    assert chaos.faults() == (0, "")
    assert_same_outcome(run.outcome(), want.outcome())
    run.engine.close()


@pytest.mark.parametrize("rates", list(MACHINES))
def test_what_was_taken_is_taken_back_behind_it(
    rates: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole forward is issued before anybody knows that the clip has fired."""
    monkeypatch.setenv("GEMINI_RATES", MACHINES[rates])
    want, run = _planned(share=0.3)
    before = counts(run)
    _steps((want, run), [FIRES] * 4, 3)
    _steps((want, run), [QUIET], 7)
    found = counts(run)
    assert found.redone > before.redone
    _finish(run, want)


@pytest.mark.parametrize("what", ["reads the gradients", "reads the norm", "saves", "closes"])
@pytest.mark.parametrize("limit", [QUIET, FIRES])
def test_what_comes_between_clip_and_step(limit: float, what: str, tmp_path: Path) -> None:
    want, run = _planned()
    for each in (want, run):
        _backward(each, 3)
    before = want.outcome()
    norm = run.engine.clip_grad_norm_(limit)
    if what == "reads the gradients":
        shown = {name: p.grad.clone() for name, p in run.model.named_parameters()}
        factor = run.engine._runtime.core.clip_factor()
        assert (factor < 1) == (limit == FIRES)
        for name, p in want.model.named_parameters():
            assert torch.equal(shown[name], p.grad * factor), name
    elif what == "saves":
        run.engine.save(tmp_path / "checkpoint")
    elif what == "closes":
        run.engine.close()
        for name, value in run.model.state_dict().items():
            assert torch.equal(value.to(before.weights[name].dtype), before.weights[name]), name
        return
    assert_same_bits(norm, want._clip(limit, 1.0), "norm")
    for each in (want, run):
        each.optimizer.step()
        each.zero_grad()
    _steps((want, run), [QUIET, FIRES, QUIET], 4)
    _finish(run, want)


def test_a_clip_without_a_step() -> None:
    """Its factor is of no step: neither of the next one, nor of that after it."""
    want, run = _planned()
    for factor in (1.0, 3.0):
        _backward(run, 3, factor)
        run.engine.clip_grad_norm_(FIRES)
        run.zero_grad()
    run.losses.clear()
    want.losses.clear()
    _steps((want, run), [None, QUIET, None, FIRES, QUIET], 4)
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
        p.neg_()
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


@turns(what=CHANGES, rates=["host", "device"])
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


# ---- checkpoints that are written beside it ------------------------------------------------------


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


def _beside(
    runs: tuple[Plain, Managed],
    folder: Path,
    gate: Gate,
    act: Callable[[], object],
    pieces: int = 0,
) -> int:
    """What `act` makes a background save copy, which has the bits of the call; `pieces` are written before it."""
    engine = runs[1].engine
    torch.manual_seed(5)
    engine.save(folder / "front")
    torch.manual_seed(5)
    gate.close()
    saving = engine.save(folder / "back", background=True)
    gate.reached.acquire()
    gate.let(pieces)
    act()
    assert not saving.done
    gate.open()
    saving.wait()
    assert contents(folder / "back") == contents(folder / "front")
    return saving.copied_bytes


@pairs(rates=list(MACHINES), clip=[QUIET, FIRES], precision=PRECISIONS)
def test_a_save_copies_what_changes(
    rates: str,
    clip: float,
    precision: str,
    tmp_path: Path,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before an update is taken from what was speculated, or is made again."""
    monkeypatch.setenv("GEMINI_RATES", MACHINES[rates])
    recipe = Recipe(precision=precision, clip=QUIET)
    want, run = both = _planned(recipe, share=0.3)
    for pieces, first in ((0, 3), (3, 6)):
        clips = [clip, QUIET, FIRES] if first == 3 else [QUIET, clip, QUIET]

        def act(clips: list[float | None] = clips, first: int = first) -> None:
            _steps(both, clips, first)
            _ = run.outcome()  # everything is issued

        whole = 12 * sum(p.numel() for p in run.model.parameters())  # without what pads chunks
        before = counts(run)
        copied = _beside(both, tmp_path, gate, act, pieces)
        assert counts(run).made > before.made
        assert copied >= whole if pieces == 0 else copied > 0
    _steps(both, [QUIET, QUIET], 9)
    before = counts(run)
    _steps(both, [QUIET], 11)
    assert counts(run).taken > before.taken
    _finish(run, want)


class _Stop(Exception):
    pass


def _error(run: Plain) -> None:
    """In the middle of a backward: what has arrived was speculated already."""

    def stop(_: Any) -> None:
        raise _Stop

    layers = [m for m in run.model.modules() if isinstance(m, nn.Linear)]
    hook = layers[1].register_forward_hook(
        lambda module, args, out: out.register_hook(stop) and None
    )
    with pytest.raises(_Stop):
        _other_gradients(run)
    hook.remove()
    run.zero_grad()
    _backward(run, 80)


# On the other machine than in test_a_change_before_the_step.
@turns(what=[*CHANGES, "error"], rates=["device", "host"])
def test_a_change_beside_a_save(
    what: str, rates: str, tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first step beside it and before the next one."""
    monkeypatch.setenv("GEMINI_RATES", MACHINES[rates])
    want, run = _planned(share=0.3)

    def act() -> None:
        for step in (3, 4):
            for each in (want, run):
                _backward(each, step)
                (_error if what == "error" else CHANGES[what][0])(each)
                each.finish()
            _ = run.outcome()

    _beside((want, run), tmp_path, gate, act, pieces=2)
    if what != "no numbers":
        _steps((want, run), [QUIET, QUIET], 5)
    _finish(run, want)


def test_a_plan_that_changes_beside_a_save(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spares go from chunk to chunk while old bytes are written."""
    monkeypatch.setenv("GEMINI_RATES", MACHINES["both"])
    want, run = both = _planned(share=0.7)
    core, budget = run.engine._runtime.core, run.engine.stats()["device_budget_bytes"]
    plan = core.plan_info()["hash"]

    def act() -> None:
        n = _steps(both, [QUIET, *[FIRES] * 8], 3)
        assert core.plan_info()["n_speculated"] == 0
        core.set_external_bytes(budget // 2)
        _steps(both, [QUIET] * 9, n)

    _beside(both, tmp_path, gate, act)
    assert core.plan_info()["hash"] != plan and core.plan_info()["n_speculated"] > 0
    _finish(run, want)


NEXT: dict[str, Callable[[gs.Engine, Path], Any]] = {
    "save": lambda engine, folder: engine.save(folder / "next", background=True).wait(),
    "load": lambda engine, folder: engine.load(folder / "front"),
    "close": lambda engine, folder: engine.close(),
}


@pytest.mark.parametrize("what", NEXT)
def test_what_comes_next_waits_for_the_save(what: str, tmp_path: Path, gate: Gate) -> None:
    want, run = both = _planned()
    run.engine.save(tmp_path / "front")
    saving = run.engine.save(tmp_path / "back", background=True)
    gate.reached.acquire()
    _steps(both, [QUIET], 3)
    Timer(0.05, gate.open).start()
    NEXT[what](run.engine, tmp_path)
    assert saving.done and contents(tmp_path / "back") == contents(tmp_path / "front")
    if what == "save":
        assert contents(tmp_path / "next") != contents(tmp_path / "front")
        _steps(both, [QUIET, QUIET], 4)
        _finish(run, want)
    run.engine.close()


def test_a_failed_save_ends_no_speculation(tmp_path: Path, gate: Gate) -> None:
    want, run = both = _planned()
    saving = run.engine.save(tmp_path / "back", background=True)
    gate.reached.acquire()
    _steps(both, [QUIET], 3)
    gate.open(OSError(28, "No space left on device"))
    with pytest.raises(gs.GeminiError, match="No space left"):
        saving.wait()
    gate.open()
    before = counts(run)
    _steps(both, [QUIET, QUIET], 4)
    assert counts(run).taken > before.taken
    _finish(run, want)


def test_the_writer_begins_with_copies(tmp_path: Path, gate: Gate) -> None:
    """A step may wait for their memory."""
    want = plain(CASE.build, RECIPE)
    run = managed(CASE.build, RECIPE, placement_policy="cpu", chunk_size=4096)
    n = _steps((want, run), [QUIET] * 3, 0)
    core = run.engine._runtime.core
    run.engine.save(tmp_path / "front")
    saving = run.engine.save(tmp_path / "back", background=True)
    gate.reached.acquire()
    assert core.save_next() < 0
    for each in (want, run):
        _write_state(each)
    assert core.save_next() > 0
    _steps((want, run), [QUIET], n)
    _ = run.outcome()  # everything is issued, and chunk 0 has a copy
    assert core.save_next() == 0
    gate.open()
    saving.wait()
    assert contents(tmp_path / "back")[0] == contents(tmp_path / "front")[0]
    _finish(run, want)


# ---- several ranks -------------------------------------------------------------------------------


def _save_beside(rank: int, size: int, folder: str) -> tuple[int, int]:
    want = plain(CASE.build, RECIPE)
    run = managed(CASE.build, RECIPE, placement_policy="cpu", chunk_size=4096, timeout=90.0)
    n = _steps((want, run), [QUIET] * 3, 0)
    spares = int(run.engine.stats()["spare_bytes"])
    torch.manual_seed(5)
    run.engine.save(f"{folder}/front")
    torch.manual_seed(5)
    patch = pytest.MonkeyPatch()
    gate = Gate(patch)
    saving = run.engine.save(f"{folder}/back", background=True)
    gate.allow(rank)  # so the ranks are at different pieces
    n = _steps((want, run), [QUIET, FIRES, QUIET], n)
    gate.open()
    saving.wait()
    patch.undo()
    _steps((want, run), [QUIET, QUIET], n)
    _finish(run, want)
    return spares, saving.copied_bytes


def test_two_ranks_save_beside_it(tmp_path: Path) -> None:
    for spares, copied in values(run_ranks(2, tmp_path, _save_beside, str(tmp_path))):
        assert spares > 0 and copied > 0
    assert contents(tmp_path / "back") == contents(tmp_path / "front")
