"""Clipped steps that update inside their backward, on a GPU: the bits of the unmanaged loop, and updates did run there.

Of where updates run (on the host, on the device, on both) the rates decide, so each test gives them. Deterministic
kernels on both sides (see test_gpu_exact.py).
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.reference import Managed, Plain, assert_same_outcome, drive, managed, plain
from helpers.saving import contents
from helpers.zoo import Case
from test_gpu_exact import MIB, _deterministic
from test_planned_gpu import CASE, assert_planned, budget_of, recipe_of

pytestmark = pytest.mark.gpu

__all__ = ["_deterministic"]

QUIET, FIRES = 1e3, 0.05  # limits of the norm
_SLOW = "h2d=1e9,d2h=1e9"
MACHINES = {
    "host": _SLOW,
    "device": f"{_SLOW},host_adam=1e5,host_adam_beside=1e5",
    "both": f"{_SLOW},host_adam=1e8,host_adam_beside=1e8",
}
#: By step: steps that fire one by one and in a row, and what follows them.
LIMITS = [QUIET] * 8 + [FIRES, QUIET, QUIET, FIRES, FIRES, FIRES, QUIET, QUIET, QUIET, FIRES]


def _drive(run: Plain, case: Case) -> None:
    for step, limit in enumerate(LIMITS):
        run.recipe = replace(run.recipe, clip=limit)
        drive(run, case, 1, first=step)


def _counts(run: Managed) -> dict[str, int]:
    stats: Any = run.engine.stats()
    return {what: int(stats[f"{what}_updates"]) for what in ("speculated", "taken", "redone")}


CASES = [  # machine, share of the state that the budget has room for, micro-batches
    ("host", 0.6, 1),
    ("host", 0.6, 2),
    ("host", 0.35, 1),
    ("host", 0.35, 2),
    ("device", 0.35, 1),
    ("both", 0.6, 1),
    ("both", 0.35, 1),
    ("both", 0.35, 2),
]


@pytest.mark.parametrize(("machine", "share", "accumulate"), CASES)
def test_bits_whether_the_clip_fires(
    machine: str, share: float, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMINI_RATES", MACHINES[machine])
    recipe = replace(recipe_of(QUIET, len(LIMITS)), accumulate=accumulate)
    want = plain(CASE.build, recipe)
    _drive(want, CASE)
    run = managed(CASE.build, recipe, device_budget=budget_of(share), chunk_size=2 * MIB)
    with contextlib.closing(run.engine):
        _drive(run, CASE)
        info, counts = assert_planned(run), _counts(run)
        print(machine, share, info["n_speculated"], counts)
        assert_same_outcome(run.outcome(), want.outcome())
        assert info["n_speculated"] > 0
        assert counts["taken"] > 0 and counts["redone"] > 0


@pytest.mark.parametrize("machine", list(MACHINES))
def test_a_save_beside_spares(
    machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of the call, also where homes are what the device copies to."""
    monkeypatch.setenv("GEMINI_RATES", MACHINES[machine])
    recipe = recipe_of(QUIET, 14)
    want = plain(CASE.build, recipe)
    drive(want, CASE, 14)
    run = managed(CASE.build, recipe, device_budget=budget_of(0.35), chunk_size=2 * MIB)
    with contextlib.closing(run.engine):
        drive(run, CASE, 8)
        spares = run.engine.stats()["spare_bytes"]
        torch.manual_seed(5)
        run.engine.save(tmp_path / "front")
        torch.manual_seed(5)
        saving = run.engine.save(tmp_path / "back", background=True)
        drive(run, CASE, 6, first=8)
        saving.wait()
        print(machine, spares, saving.copied_bytes)
        assert spares > 0
        assert contents(tmp_path / "back") == contents(tmp_path / "front")
        assert_same_outcome(run.outcome(), want.outcome())
