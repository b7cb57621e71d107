"""engine.save by two ranks whose streams run late and out of order: at any place in a loop it ends, with its bits.

There a collective runs inside a call of the device, and who runs one waits for the other rank. A rank that waits in
engine.save for the other one, and has not run what that one is in, would wait for ever. Rank 1 runs here what it has
issued before it saves, so it is in such a collective while rank 0 saves.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import chaos
from helpers.ranks import run_ranks, values
from helpers.reference import Plain, Recipe, assert_same_outcome, drive, managed, plain
from helpers.scenario import MACHINES, budgeted
from helpers.zoo import mlp_case

CASE = mlp_case(width=48, depth=4, p=0.1)
QUIET, FIRES = 1e3, 0.05
RECIPE = Recipe(precision="bf16-true", clip=QUIET)
RATES = MACHINES["host"]  # steps are speculated


def _play(run: Plain, save: Callable[[str], None]) -> None:
    """Saves at each meeting of a save and a loop, all of them in one run."""

    def step(number: int, clip: float = QUIET) -> None:
        run.recipe = replace(RECIPE, clip=clip)
        drive(run, CASE, 1, first=number)

    step(0)
    save("after the first step")
    for number in (1, 2, 3):
        step(number)
    save("after a planned step")
    save("again")
    run.recipe = RECIPE
    torch.manual_seed(4)
    run.backward(CASE.loss(run, CASE.batch(4)))
    save("between backward and step")
    run.finish()
    step(5)
    run.model.eval()
    with torch.no_grad():
        CASE.loss(run, CASE.batch(50))
    save("in an evaluation")
    run.model.train()
    save("at the edge of an epoch")
    step(6, FIRES)
    save("after a clip that fired")
    step(7)
    step(8)
    save("at the end")


def _job(rank: int, size: int, folder: str, is_background: bool) -> None:
    os.environ["GEMINI_RATES"] = RATES
    chaos.use(17 * is_background + rank)
    run = budgeted(CASE, RECIPE, 0.3, chunk_size=4096, timeout=60.0)
    engine = run.engine

    def save(name: str) -> None:
        if rank == 1:
            engine._runtime.core.settle()
        engine.save(f"{folder}/{name}", background=is_background)

    _play(run, save)
    core = engine._runtime.core
    assert core.plan_info()["n_speculated"] > 0 and chaos.faults() == (0, "")
    engine.close()


@pytest.mark.parametrize("is_background", [False, True])
def test_no_rank_waits_where_the_other_does_not(is_background: bool, tmp_path: Path) -> None:
    """The same batch on both: the mean is exact, and one rank's run is the reference."""
    values(run_ranks(2, tmp_path, _job, str(tmp_path), is_background))
    wanted: dict[str, Any] = {}
    want = plain(CASE.build, RECIPE)
    _play(want, lambda name: wanted.update({name: want.outcome()}))
    for name, outcome in wanted.items():
        other = managed(CASE.build, RECIPE, chunk_size=8192)
        other.engine.load(tmp_path / name)
        got = other.outcome()
        got.losses, got.norms = outcome.losses, outcome.norms
        try:
            assert_same_outcome(got, outcome)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
        other.engine.close()
