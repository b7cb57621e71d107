"""Steps of several ranks that clip: nobody waits for the norm, and the bits are those of one rank.

All ranks train on the same batch, whose mean over 2 or 4 ranks is exact, so every rank compares with the reference by
itself. `waits(run)` counts where the host has waited for the device or for other ranks' numbers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gemini_strategy as gs
from helpers import chaos
from helpers.pairs import turns
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
from helpers.scenario import MACHINES, budgeted
from helpers.zoo import mlp_case

pytestmark = pytest.mark.core  # make check runs these on a core with its own assertions

CASE = mlp_case(width=48, depth=4, p=0.1)
QUIET, FIRES = 1e3, 0.05
RECIPE = Recipe(precision="bf16-true", clip=QUIET)
PATIENT = 90.0


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    chaos.late(monkeypatch, 9)
    monkeypatch.setenv("GEMINI_RATES", MACHINES["host"])


def waits(run: Managed) -> int:
    return int(run.engine.stats()["host_waits"])


def steps(runs: tuple[Plain, ...], clips: list[float], first: int, case: Any = CASE) -> int:
    for step, clip in enumerate(clips, first):
        for run in runs:
            run.recipe = replace(run.recipe, clip=clip)
            drive(run, case, 1, first=step)
    return first + len(clips)


@contextlib.contextmanager
def both(recipe: Recipe = RECIPE, **how: Any) -> Iterator[tuple[Plain, Managed]]:
    """The reference and the managed run, whose bits are equal at the end."""
    want = plain(CASE.build, recipe)
    run = budgeted(CASE, recipe, 0.3, chunk_size=4096, timeout=PATIENT, **how)
    yield want, run
    got, wanted = run.outcome(), want.outcome()
    faults = chaos.faults()
    run.engine._runtime.core.check()
    run.engine.close()
    assert_same_outcome(got, wanted)
    assert faults == (0, "")


def count(rank: int, size: int, rates: str, seed: int | None) -> tuple[int, int]:
    os.environ["GEMINI_RATES"] = rates
    chaos.use(None if seed is None else 10 * seed + rank)
    with both() as runs:
        n = steps(runs, [QUIET] * 12, 0)  # passes that are timed end with waits
        before = waits(runs[1])
        n = steps(runs, [QUIET, QUIET, FIRES, QUIET, FIRES, FIRES, QUIET, QUIET], n)
        assert waits(runs[1]) == before
        stats = runs[1].engine.stats()
        assert stats["planned"] and stats["shards"] == size
        if rank == 0:  # one that drops its results and one that does not have the same bits
            runs[1].engine._runtime.core.announce([])
        steps(runs, [QUIET, QUIET], n)
        return int(stats["taken_updates"]), int(stats["redone_updates"])


@turns(rates=MACHINES, seed=[1, None])
def test_no_wait_in_a_step_that_clips(rates: str, seed: int | None, tmp_path: Path) -> None:
    """Planned steps of two ranks, whether the clip fires or not; speculated ones among them."""
    for taken, redone in values(run_ranks(2, tmp_path, count, MACHINES[rates], seed)):
        assert taken > 0 and redone > 0


def train(rank: int, size: int, precision: str, shape: tuple[int, int]) -> None:
    """Firing and quiet clips, a NaN or an infinity; the next step after such an accident is a clean run."""
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    recipe = Recipe(precision=precision, clip=QUIET)
    for accident in (None, float("nan" if shape[0] == 1 else "inf")):
        with both(recipe, mesh=mesh) as runs:
            n = steps(runs, [QUIET, FIRES, QUIET, QUIET, FIRES, QUIET], 0)
            for run in runs if accident is not None else ():
                torch.manual_seed(n)
                batch = CASE.batch(n)
                run.backward(CASE.loss(run, batch) * accident)
                run.finish()
            if accident is None:
                steps(runs, [FIRES, QUIET], n)
            else:  # all weights are NaN now
                assert not torch.isfinite(runs[1].norms[-1])


@pytest.mark.parametrize(
    ("precision", "shape"),  # shards, replicas, hybrid
    [("bf16-true", (1, 2)), ("32-true", (2, 1)), ("bf16-true", (2, 2))],
)
def test_bits(precision: str, shape: tuple[int, int], tmp_path: Path) -> None:
    values(run_ranks(shape[0] * shape[1], tmp_path, train, precision, shape))


BETWEEN = {
    "one rank looks": (QUIET, FIRES),
    "a checkpoint": (QUIET, FIRES),
    "zero_grad": (FIRES,),
    "a gradient is read": (FIRES,),
    "two clips": (FIRES,),
    "two clips at once": (FIRES,),
}


def between(rank: int, size: int, folder: str) -> None:
    """What may come between the clip and the step that it is for."""
    for what, limits in BETWEEN.items():
        for limit in limits:
            with both() as runs:
                want, run = runs
                n = steps(runs, [QUIET] * 4, 0)
                for each in runs:
                    torch.manual_seed(n)
                    each.backward(CASE.loss(each, CASE.batch(n)))
                norm = run.engine.clip_grad_norm_(limit)
                if what == "one rank looks" and rank == 1:
                    assert (run.engine._runtime.coming_step.factor < 1) == (limit == FIRES)
                elif what == "a checkpoint":
                    run.engine.save(f"{folder}/{limit}")
                elif what == "zero_grad":
                    for each in runs:
                        each.zero_grad()
                    n = steps(runs, [FIRES, QUIET], n + 1)
                    continue
                elif what == "a gradient is read":
                    factor = run.engine._runtime.coming_step.factor
                    for name, p in run.model.named_parameters():
                        own = want.model.get_parameter(name).grad
                        assert torch.equal(p.grad.clone(), own * factor), name
                elif what == "two clips":
                    with pytest.raises(gs.GeminiError, match="clip once in a step"):
                        run.engine.clip_grad_norm_(limit)
                elif what == "two clips at once":  # the host knows nothing of the first
                    norm = run.engine._runtime._clip_late(limit)
                assert_same_bits(norm, want._clip(limit, 1.0), "norm")
                for each in runs:
                    each.optimizer.step()
                    each.zero_grad()
                steps(runs, [FIRES, QUIET], n + 1)


def test_what_comes_between_clip_and_step(tmp_path: Path) -> None:
    values(run_ranks(2, tmp_path, between, str(tmp_path)))


def leave_alone(rank: int, size: int) -> None:
    """One rank has no room for gradients: it waits for its own, and the others do not know of it."""
    with both() as runs:
        n = steps(runs, [QUIET] * 8, 0)
        before = waits(runs[1])
        for clip in (QUIET, FIRES, QUIET):
            if rank == 1:
                runs[1].engine._runtime.core.shed(2**40)
            n = steps(runs, [clip], n)
        breaks = runs[1].engine.stats()["plan_breaks"]
        assert (breaks > 0 and waits(runs[1]) > before) if rank == 1 else breaks == 0


def test_one_rank_has_left_the_plan(tmp_path: Path) -> None:
    values(run_ranks(2, tmp_path, leave_alone))


def lose(rank: int, size: int, when: str) -> str:
    """Rank 1 dies; what the other says, where it gets to know."""
    run = managed(CASE.build, RECIPE, placement_policy="cpu", chunk_size=4096, timeout=PATIENT)
    n = steps((run,), [QUIET] * 4, 0)
    weights = run.engine.model_state_dict(masters=True)  # it came in fp32
    torch.manual_seed(n)
    run.backward(CASE.loss(run, CASE.batch(n)))
    if when == "after the clip":
        run.engine.clip_grad_norm_(FIRES)
    run.engine._runtime.core.catch_up()  # what is issued so far
    dist.barrier()
    if rank == 1:
        os._exit(3)
    with pytest.raises(gs.GeminiError) as found:
        if when == "before the clip":
            run.engine.clip_grad_norm_(FIRES)
        run.optimizer.step()
    with pytest.warns(RuntimeWarning, match="each rank has its part of the weights only"):
        run.engine.close()
    first, n = next((name, p) for name, p in run.model.named_parameters() if p.dim() == 2)
    own = torch.isfinite(n) & (n != 0)
    assert own.sum() > 0.4 * n.numel()  # its half; a weight may be 0
    assert torch.equal(n[own], weights[first][own])  # of the last step
    return str(found.value)


@pytest.mark.parametrize("when", ["before the clip", "after the clip"])
def test_a_rank_that_dies(when: str, tmp_path: Path) -> None:
    ended = run_ranks(2, tmp_path, lose, when)
    assert ended[1].exit_code == 3
    assert ended[0].error is None, ended[0].error
    assert "rank 1" in ended[0].value


def fail(rank: int, size: int, folder: str) -> None:
    """What came of a collective that has failed does not leave the engine, but for its end."""
    run = managed(
        CASE.build, RECIPE, chunk_size=4096, timeout=PATIENT, enable_distributed_storage=False
    )
    steps((run,), [QUIET] * 2, 0)
    run.engine.ranks._comms[0].core.abort("nothing comes any more")
    for leaves in (run.engine.model_state_dict, lambda: run.engine.save(folder, background=True)):
        with pytest.raises(gs.GeminiError, match="nothing comes any more"):
            leaves()
    with pytest.warns(RuntimeWarning, match="the weights are of no single step"):
        run.engine.close()
    assert all(torch.isfinite(p).all() for p in run.model.parameters())


def test_nothing_leaves_after_a_failure(tmp_path: Path) -> None:
    values(run_ranks(2, tmp_path, fail, str(tmp_path / "checkpoint")))
