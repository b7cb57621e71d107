"""Memory that moves under a run: blocks that the device wants back in the middle of a pass change no bit.

Any device may refuse what the budget allows, because others hold its memory.  Then the engine gives blocks back
wherever it is, goes on without its plan, and plans again at the end of the step.
"""

from __future__ import annotations

import contextlib
import functools
import random

import pytest

import gemini_strategy as gs
from helpers import chaos
from helpers.pairs import pairs
from helpers.reference import (
    Managed,
    Outcome,
    Recipe,
    assert_same_outcome,
    drive,
    managed,
    state_bytes,
    train_plain,
)
from helpers.zoo import mlp_case

pytestmark = pytest.mark.core  # make check runs these on a core with its own assertions

STEPS = 12
CASE = mlp_case(width=48, depth=3, p=0.1)
RATES = "h2d=10e9,d2h=10e9"


def _recipe(clip: float | None) -> Recipe:
    return Recipe(precision="bf16-true", steps=STEPS, clip=clip, accumulate=2)


@functools.cache
def _reference(clip: float | None) -> Outcome:
    return train_plain(CASE, _recipe(clip))[1]


def _run(clip: float | None, share: float, monkeypatch: pytest.MonkeyPatch, seed: int) -> Managed:
    monkeypatch.setenv("GEMINI_RATES", RATES)
    if seed:
        chaos.late(monkeypatch, seed)
    budget = int(share * state_bytes(CASE.build, _recipe(clip)))
    return managed(CASE.build, _recipe(clip), device_budget=budget, chunk_size=12 * 1024)


@pairs(seed=[0, 1, 2, 3], share=[1.2, 0.8], clip=[0.35, None])
def test_blocks_are_given_back_anywhere(
    clip: float | None, seed: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after modules and as gradients arrive, from none to all that can go."""
    run = _run(clip, share, monkeypatch, seed)
    core, dice = run.engine._runtime.core, random.Random(seed)
    given: list[int] = []

    def shed(*_: object) -> None:
        if dice.random() < 0.05:
            before = core.stats()["device_bytes"]
            done = core.shed(int(dice.random() * 1.5 * before))
            after = core.stats()["device_bytes"]
            assert done == (after < before)
            given.append(before - after)
            core.check()

    for module in run.model.modules():
        module.register_forward_pre_hook(shed)
        module.register_forward_hook(shed)
    for parameter in run.model.parameters():
        parameter.register_post_accumulate_grad_hook(shed)
    with contextlib.closing(run.engine):
        drive(run, CASE, STEPS)
        stats = run.engine.stats()
        assert_same_outcome(run.outcome(), _reference(clip))
        assert chaos.faults() == (0, "")
    assert sum(amount > 0 for amount in given) >= 5
    assert stats["plans"] > 1
    assert stats["plan_breaks"] > 0


def test_a_plan_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """One refusal costs one step: the next one is planned again, with all that was there before."""
    run = _run(0.35, 1.2, monkeypatch, 0)
    with contextlib.closing(run.engine):
        drive(run, CASE, 3)
        before = run.engine.stats()
        assert before["planned"]
        assert run.engine._runtime.core.shed(before["device_bytes"] // 2)
        given = run.engine.stats()
        assert not given["planned"]
        assert given["device_bytes"] <= before["device_bytes"] // 2
        drive(run, CASE, 1, first=3)
        after = run.engine.stats()
        assert after["planned"]
        assert after["device_bytes"] == before["device_bytes"]
        drive(run, CASE, STEPS - 4, first=4)
        assert run.engine.stats()["plan_breaks"] == 1
        assert_same_outcome(run.outcome(), _reference(0.35))


def test_nothing_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without homes nothing can go, and all stays as it is."""
    monkeypatch.setenv("GEMINI_RATES", RATES)
    run = managed(CASE.build, _recipe(0.35), placement_policy="cuda", chunk_size=12 * 1024)
    with contextlib.closing(run.engine):
        drive(run, CASE, 2)
        before = run.engine.stats()["device_bytes"]
        assert not run.engine._runtime.core.shed(1 << 20)
        assert run.engine.stats()["device_bytes"] == before
        drive(run, CASE, STEPS - 2, first=2)
        assert_same_outcome(run.outcome(), _reference(0.35))


def test_an_error_in_the_forward_leaves_the_engine_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's OutOfMemoryError may strike: in any pass, after any module; the step is then repeated."""
    run = _run(0.35, 0.8, monkeypatch, 0)
    dice = random.Random(5)
    is_armed = False

    def fail(*_: object) -> None:
        if is_armed and dice.random() < 0.2:
            run.engine._runtime.core.shed(1 << 30)
            raise MemoryError("no memory")

    for module in run.model.modules():
        module.register_forward_hook(fail)
    for parameter in run.model.parameters():
        parameter.register_post_accumulate_grad_hook(fail)
    n_failed = 0
    with contextlib.closing(run.engine):
        for step in range(STEPS):
            is_armed = True
            kept = len(run.losses)
            try:
                drive(run, CASE, 1, first=step)
                done = True
            except MemoryError:
                n_failed += 1
                done = False
            is_armed = False
            if not done:
                del run.losses[kept:]
                run.zero_grad()
                drive(run, CASE, 1, first=step)
        assert n_failed > STEPS // 3
        assert_same_outcome(run.outcome(), _reference(0.35))
        assert run.engine.stats()["planned"]


def test_below_the_floor_says_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_RATES", RATES)
    with pytest.raises(
        gs.GeminiMemoryError, match=r"needs [\d.]+ kB .* leaves [\d.]+ kB .* at least [\d.]+ kB"
    ):
        managed(CASE.build, _recipe(None), device_budget=8192, chunk_size=4096)
