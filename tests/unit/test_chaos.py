"""The planned engine on a device whose streams run late and out of order: the same bits, and no unordered access.

Plans with every class of update are trained on the chaos device and compared with the reference, bit for bit; the
device itself reports accesses that nothing orders (random programs do so in tests/random, several ranks in
test_sharded_chaos.py).  The other half shows that this can fail: each fault that the device can be told to make is
found in a run that is otherwise right.
"""

from __future__ import annotations

import functools
import itertools

import pytest

import gemini_strategy as gs
from helpers import chaos
from helpers.reference import Outcome, Recipe, assert_same_outcome, drive, train_plain
from helpers.scenario import RATES, budgeted
from helpers.zoo import mlp_case

CASE = mlp_case(width=48, depth=4, p=0.1)
STEPS = 5
FAULTS = (
    "no-wait-for-compute",
    "no-wait-of-compute",
    "no-wait-between",
    "early-record",
    "no-h2d",
    "no-d2h",
    "half-copy",
    "early-call",
    "early-release",
    "no-event-sync",
    "adam-twice",
    "swap",
)


# ---- every class, both schedules -----------------------------------------------------------------


@functools.cache
def _reference(precision: str) -> Outcome:
    return train_plain(CASE, Recipe(precision=precision, steps=STEPS))[1]


def _train(precision: str, share: float, says_step: bool, chunk_size: int = 4096) -> dict:
    """Trains CASE on the chaos device; what it left, its plan, and what the device found."""
    recipe = Recipe(precision=precision, steps=STEPS)
    run = budgeted(CASE, recipe, share, chunk_size=chunk_size)
    engine = run.engine
    try:
        if says_step:
            run.backward = lambda loss: engine.backward(loss, step=True)
        drive(run, CASE, STEPS)
        plan = engine._runtime.core.plan_info()
        outcome = run.outcome()
        engine._runtime.core.check()
        faults = chaos.faults()
        return {"outcome": outcome, "plan": plan, "faults": faults, "stats": engine.stats()}
    finally:
        engine.close()


def test_every_class_under_both_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every machine, schedule and share together; and each of them, and each two, with each precision, by turns."""
    met: dict[tuple[str, str], int] = {}
    shares = (0.2, 0.4, 0.5, 0.9)
    cases = itertools.product(enumerate(RATES.values()), (False, True), enumerate(shares))
    for seed, ((i, rates), says_step, (k, share)) in enumerate(cases, 1):
        precision = ("bf16-true", "32-true")[(i + says_step + k) % 2]
        monkeypatch.setenv("GEMINI_RATES", rates)
        chaos.late(monkeypatch, seed)
        got = _train(precision, share, says_step)
        where = f"{precision}, {rates}, step={says_step}, share {share}"
        assert got["faults"] == (0, ""), where
        assert_same_outcome(got["outcome"], _reference(precision))
        plan = got["plan"]
        if plan is None:
            continue
        assert plan["when"] == ("immediate" if says_step else "deferred"), where
        for name, n in plan["n_of_class"].items():
            key = (name, plan["when"])
            met[key] = met.get(key, 0) + (n > 0)
    for name in ("R", "S1", "S2", "C1", "C2"):
        for when in ("deferred", "immediate"):
            assert met.get((name, when), 0) >= 2, f"class {name} under {when} was hardly met: {met}"


@pytest.mark.parametrize("says_step", [False, True])
def test_states_in_slices(says_step: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk whose states are larger than a slot of the stage passes in several slices."""
    monkeypatch.setenv("GEMINI_RATES", RATES["slow host"])
    chaos.late(monkeypatch, 11)
    recipe = Recipe(precision="bf16-true", steps=STEPS)
    run = budgeted(CASE, recipe, 0.5, chunk_size=4096)
    engine = run.engine
    try:
        if says_step:
            run.backward = lambda loss: engine.backward(loss, step=True)
        drive(run, CASE, STEPS - 1)
        assert sum(engine._runtime.core.plan_info()["n_of_class"][c] for c in ("S1", "S2")) > 0
        engine._runtime.core.timeline_begin(10_000)
        drive(run, CASE, 1, first=STEPS - 1)
        run.engine.state_dict()
        entries = engine._runtime.core.timeline_end()
        per_chunk: dict[int, int] = {}
        for e in entries:
            if e["kind"] == "state_in" and e["tick"] >= 0:
                per_chunk[e["chunk"]] = per_chunk.get(e["chunk"], 0) + 1
        assert max(per_chunk.values(), default=0) >= 2, per_chunk
        assert_same_outcome(run.outcome(), _reference("bf16-true"))
        assert chaos.faults() == (0, "")
    finally:
        engine.close()


# ---- faults --------------------------------------------------------------------------------------


def _is_caught(precision: str, share: float, says_step: bool) -> bool:
    """Whether the device found something, the bits differ, or the engine gave up."""
    try:
        got = _train(precision, share, says_step)
    except gs.GeminiError:
        return True
    if got["faults"][0] > 0:
        assert got["faults"][1]
        return True
    try:
        assert_same_outcome(got["outcome"], _reference(precision))
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On plans that have rings, streamed states and updates on the host, when each occurrence is faulty.

    Times of compute are measured here: on another machine one of the plans may have no place for a fault.
    """
    plans = (("slow host", 0.4), ("slow host", 0.5), ("as measured", 0.25))
    runs = list(itertools.product(plans, ((1, False), (2, True))))
    enough, n_caught = len(runs) // 2, 0
    for (rates, share), (seed, says_step) in runs:
        monkeypatch.setenv("GEMINI_RATES", RATES[rates])
        chaos.late(monkeypatch, f"{seed}:{fault}")
        n_caught += _is_caught("bf16-true", share, says_step)
        if n_caught == enough:  # whatever comes of the others
            return
    pytest.fail(f"{fault}: caught in {n_caught} of {len(runs)} runs, not in {enough}")
