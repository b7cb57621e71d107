"""Host memory for what goes there: homes come when a chunk leaves the device, and go when a plan keeps all of it there.

On the chaos device, whose copies from or to memory that is not pinned are faults. Bits are the reference's throughout.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gemini_strategy as gs
from helpers import chaos
from helpers.pairs import turns
from helpers.ranks import run_ranks, values
from helpers.reference import (
    Managed,
    Plain,
    Recipe,
    assert_same_outcome,
    drive,
    managed,
    plain,
    state_bytes,
)
from helpers.zoo import mlp_case

pytestmark = pytest.mark.core  # make check runs these on a core with its own assertions

CASE = mlp_case(width=48, depth=4, p=0.1)
RECIPE = Recipe(precision="bf16-true", clip=0.5)
CHUNK = 4096
BUDGET = (
    10**9
)  # of which it takes less than one: what tests hold beside it comes and goes as others' memory does
ROOMY: dict[str, Any] = {"chunk_size": CHUNK, "device_budget": BUDGET}


@pytest.fixture(autouse=True)
def _chaos(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    chaos.late(monkeypatch, 5)
    monkeypatch.setenv("GEMINI_RATES", "h2d=55e9,d2h=54e9")
    yield


def homes(run: Managed) -> int:
    return int(run.engine.stats()["host_bytes"])


def all_homes() -> int:
    run = managed(CASE.build, RECIPE, chunk_size=CHUNK, placement_policy="cpu")
    found = homes(run)
    run.engine.close()
    return found


def both(run: Managed, want: Plain, n: int, first: int = 0) -> int:
    for each in (want, run):
        drive(each, CASE, n, first)
    return first + n


def finish(run: Managed, want: Plain) -> None:
    try:
        assert_same_outcome(run.outcome(), want.outcome())
        run.engine._runtime.core.check()
        assert chaos.faults() == (0, "")
    finally:
        run.engine.close()


@turns(precision=["32-true", "bf16-true", "bf16-mixed", "16-mixed"], evaluates=[False, True])
def test_what_fits_has_none(precision: str, evaluates: bool, tmp_path: Path) -> None:
    """In no step, before and under a plan, nor for a checkpoint, a state dict or an evaluation that comes first."""
    recipe = Recipe(precision=precision, clip=0.5)
    run, want = managed(CASE.build, recipe, **ROOMY), plain(CASE.build, recipe)
    assert homes(run) == 0
    if evaluates:
        for each in (run, want):
            with torch.no_grad():
                each.model.eval()
                CASE.loss(each, CASE.batch(0))
                each.model.train()
        assert homes(run) == 0
    both(run, want, 4)
    assert run.engine.stats()["planned"] and homes(run) == 0
    run.engine.save(tmp_path / "checkpoint")
    run.model.state_dict()
    both(run, want, 1, 4)
    assert homes(run) == 0
    finish(run, want)


def test_what_does_not_fit_has_all() -> None:
    run = managed(
        CASE.build, RECIPE, chunk_size=CHUNK, device_budget=state_bytes(CASE.build, RECIPE) // 2
    )
    assert homes(run) == all_homes()
    run.engine.close()


def test_the_share_of_states_is_kept() -> None:
    run = managed(CASE.build, RECIPE, gpu_margin_mem_ratio=0.5, **ROOMY)
    assert homes(run) == all_homes()
    run.engine.close()


@pytest.mark.parametrize("at", [0, 1, 5])
def test_they_come_with_pressure_and_go_with_it(at: int) -> None:
    """Activations grow, in the first step or under a plan; chunks that leave have homes, and no others."""
    run, want = managed(CASE.build, RECIPE, **ROOMY), plain(CASE.build, RECIPE)
    core = run.engine._runtime.core
    n = both(run, want, at)
    held = int(run.engine.stats()["device_bytes"])
    core.set_external_bytes(BUDGET - held * 3 // 4)
    assert core.reserve(0) and core.refusal() == ""
    assert run.engine.stats()["device_bytes"] <= held * 3 // 4
    assert 0 < homes(run) < all_homes()
    n = both(run, want, 3, n)
    assert 0 < homes(run) < all_homes()
    core.set_external_bytes(0)
    n = both(run, want, 4, n)
    assert run.engine.stats()["planned"] and homes(run) == 0
    finish(run, want)


@pytest.mark.parametrize("room", [0, 1])
def test_where_the_host_has_none_nothing_is_lost(room: int) -> None:
    """Whoever asks for the room goes without; the text says what lacks; and training goes on, with the same bits."""
    budget = 4096 + room * all_homes() // 4
    run, want = managed(CASE.build, RECIPE, host_budget=budget, **ROOMY), plain(CASE.build, RECIPE)
    core = run.engine._runtime.core
    n = both(run, want, 2)
    before = int(run.engine.stats()["device_bytes"])
    assert not core.reserve(BUDGET - before // 4)
    assert "HOST" in core.refusal() and "host_budget is" in core.refusal()
    assert (0 < homes(run) <= budget) == (room > 0)
    n = both(run, want, 3, n)
    assert core.reserve(0) and core.refusal() == ""
    finish(run, want)


def test_a_pass_that_needs_the_room_says_what_lacks() -> None:
    """An engine on demand, chunks that cannot leave, and one that has to come."""
    budget = 4096 + all_homes() // 4
    run, want = managed(CASE.build, RECIPE, host_budget=budget, **ROOMY), plain(CASE.build, RECIPE)
    core = run.engine._runtime.core
    held = int(run.engine.stats()["device_bytes"])
    assert not core.reserve(BUDGET - held // 2)
    core.set_external_bytes(BUDGET - held // 2)
    with pytest.raises(gs.GeminiMemoryError, match="HOST.*host_budget"):
        drive(run, CASE, 1)
    core.set_external_bytes(0)
    run.losses.clear()
    both(run, want, 3)
    finish(run, want)


def _ranks(rank: int, size: int, presses: bool) -> tuple[int, list[int], dict[str, Any]]:
    """(homes at the start, after each step, masters); presses: memory of rank 0 is short for one step."""
    run = managed(CASE.build, RECIPE, **ROOMY)
    start, found = homes(run), []
    for step in range(4):
        core = run.engine._runtime.core
        if presses and rank == 0 and step in (1, 2):
            held = int(run.engine.stats()["device_bytes"])
            core.set_external_bytes(BUDGET - held * 3 // 4 if step == 1 else 0)
            assert core.reserve(0)
        drive(run, CASE, 1, step)
        found.append(homes(run))
    masters = run.outcome().masters
    run.engine.close()
    return start, found, masters


def test_on_two_ranks_of_which_one_is_short(tmp_path: Path) -> None:
    folders = tmp_path / "want", tmp_path / "got"
    for folder in folders:
        folder.mkdir()
    want = values(run_ranks(2, folders[0], _ranks, False))
    got = values(run_ranks(2, folders[1], _ranks, True))
    assert [start for start, _, _ in (*want, *got)] == [0] * 4
    assert [found for _, found, _ in want] == [[0] * 4] * 2
    short, other = (found for _, found, _ in got)
    assert other == [0] * 4
    assert short[1] > 0 and short[3] == 0
    for one, two in zip(want, got, strict=True):
        for name, master in one[2].items():
            assert torch.equal(master, two[2][name]), name
