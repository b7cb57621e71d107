"""Chunks without homes on a GPU: the bits of the unmanaged loop where the host has room for half of the homes.

Deterministic kernels on both sides (see test_gpu_exact.py).
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from helpers.reference import (
    Managed,
    assert_same_outcome,
    drive,
    managed,
    plain,
)
from test_gpu_exact import MIB, _deterministic
from test_planned_gpu import CASE, FAST_HOST, SLOW_HOST, assert_planned, budget_of, recipe_of

pytestmark = pytest.mark.gpu

__all__ = ["_deterministic"]

STEPS = 14


def _half(clip: float | None) -> tuple[Managed, set[int]]:
    """Managed with a host for half of all homes, and the chunks that stay on the device."""
    recipe = recipe_of(clip, STEPS)
    run = managed(CASE.build, recipe, placement_policy="cpu", chunk_size=2 * MIB)
    homes = int(run.engine.stats()["host_bytes"])
    run.engine.close()
    how = {"device_budget": budget_of(0.6), "host_budget": homes // 2}
    run = managed(CASE.build, recipe, chunk_size=2 * MIB, **how)
    return run, _staying(run)


def _staying(run: Managed) -> set[int]:
    states = run.engine.chunk_states()
    return {one.chunk for one in states if set(one.pieces.values()) == {"DIRTY"}}


@pytest.mark.parametrize("clip", [0.35, 1e3, None])
@pytest.mark.parametrize("rates", [SLOW_HOST, FAST_HOST], ids=["slow host", "fast host"])
def test_bits(rates: str, clip: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_RATES", rates)
    want = plain(CASE.build, recipe_of(clip, STEPS))
    drive(want, CASE, STEPS)
    run, here = _half(clip)
    with contextlib.closing(run.engine):
        assert here and run.engine.stats()["staying_bytes"] > 0
        drive(run, CASE, STEPS)
        assert_planned(run)
        assert here <= _staying(run)
        stats = run.engine.stats()
        assert stats["fetches"] > 0
        limit = run.engine._runtime.settings.host_budget
        assert stats["host_bytes"] <= limit + 16 * MIB  # a staging area is beside the homes
        assert_same_outcome(run.outcome(), want.outcome())


def test_saved_and_loaded_by_a_larger_host(tmp_path: Path) -> None:
    want = plain(CASE.build, recipe_of(0.35, STEPS))
    drive(want, CASE, STEPS)
    run, _ = _half(0.35)
    with contextlib.closing(run.engine):
        drive(run, CASE, 6)
        losses, norms = list(run.losses), list(run.norms)
        saving = run.engine.save(tmp_path / "saved", background=True)
        drive(run, CASE, 2, first=6)
        saving.wait()
    other = managed(CASE.build, run.recipe, device_budget=budget_of(0.35), chunk_size=2 * MIB)
    with contextlib.closing(other.engine):
        other.engine.load(tmp_path / "saved")
        other.losses, other.norms = losses, norms
        drive(other, CASE, STEPS - 6, first=6)
        assert_same_outcome(other.outcome(), want.outcome())
