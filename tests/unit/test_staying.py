"""Chunks that stay on the device because the host has no room for all homes: host memory and device memory add up.

On the chaos device, as others. `half(...)` has a host with half of what the homes of all chunks take, and a device that
has room for three quarters of them: for what stays there, and for some of the rest at a time. Bits are the reference's
throughout.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gemini_strategy as gs
from gemini_strategy.estimates.machines import Machine
from gemini_strategy.estimates.paper import PROCESS_BYTES
from gemini_strategy.machine.rates import REFERENCE
from gemini_strategy.sizes import host_limit
from helpers import chaos
from helpers.pairs import turns
from helpers.profiled import small_llama
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
from helpers.saving import Gate, contents
from helpers.scenario import MACHINES, RATES, budgeted
from helpers.zoo import CASES, Case, mlp_case

pytestmark = pytest.mark.core  # make check runs these on a core with its own assertions

CASE = mlp_case(width=48, depth=4, p=0.1)
RECIPE = Recipe(precision="bf16-true", clip=0.5)
CHUNK = 4096
QUIET = 1e3  # a limit of the norm that never fires


@pytest.fixture(autouse=True)
def _chaos(monkeypatch: pytest.MonkeyPatch) -> None:
    chaos.late(monkeypatch, 5)
    monkeypatch.setenv("GEMINI_RATES", "h2d=55e9,d2h=54e9")


def all_homes(case: Case = CASE, recipe: Recipe = RECIPE, chunk_size: int = CHUNK) -> int:
    run = managed(case.build, recipe, chunk_size=chunk_size, placement_policy="cpu")
    found = int(run.engine.stats()["host_bytes"])
    run.engine.close()
    return found


def staying(run: Managed) -> set[int]:
    """Chunks all of which is on the device, and only there."""
    found = run.engine.chunk_states()
    return {one.chunk for one in found if set(one.pieces.values()) == {"DIRTY"}}


def half(
    case: Case = CASE, recipe: Recipe = RECIPE, host: float = 0.5, share: float = 0.75, **how: Any
) -> tuple[Managed, set[int]]:
    """Managed with these shares of what all homes take, and the chunks that stay."""
    homes = all_homes(case, recipe)
    budget, share = int(homes * host), share * homes / state_bytes(case.build, recipe)
    run = budgeted(case, recipe, share, chunk_size=CHUNK, host_budget=budget, **how)
    stats, here = run.engine.stats(), staying(run)
    assert stats["staying_bytes"] > 0 and stats["host_bytes"] <= budget
    assert 0 < len(here) <= stats["chunks"]
    return run, here


def both(run: Managed, want: Plain, n: int, first: int = 0, case: Case = CASE) -> int:
    for each in (want, run):
        drive(each, case, n, first)
    return first + n


def check(run: Managed, here: set[int]) -> None:
    """Nothing of what stays has left, or has got a home."""
    core, stats = run.engine._runtime.core, run.engine.stats()
    assert here <= staying(run)
    assert stats["host_bytes"] <= run.engine._runtime.settings.host_budget
    assert stats["device_peak_bytes"] <= stats["device_budget_bytes"]
    core.check()
    assert chaos.faults() == (0, "")


def finish(run: Managed, want: Plain, here: set[int]) -> None:
    try:
        check(run, here)
        assert_same_outcome(run.outcome(), want.outcome())
        check(run, here)
    finally:
        run.engine.close()


# ---- the same bits -------------------------------------------------------------------------------


@turns(precision=["32-true", "bf16-true", "bf16-mixed", "16-mixed"], clip=[None, 0.5])
def test_bits(precision: str, clip: float | None) -> None:
    """Before the plan and under it, of which the rest of the chunks is a part that leaves."""
    recipe = Recipe(precision=precision, clip=clip)
    want = plain(CASE.build, recipe)
    run, here = half(CASE, recipe)
    n = both(run, want, 1)
    check_steps = 4 if precision != "16-mixed" else 8  # some are skipped
    for _ in range(check_steps):
        n = both(run, want, 1, n)
        assert here <= staying(run)
    stats, plan = run.engine.stats(), run.engine._runtime.core.plan_info()
    assert stats["planned"] and stats["evictions"] + stats["fetches"] > 0
    assert plan["n_of_class"]["R"] < stats["chunks"]
    assert all(plan["classes"][chunk] == "R" for chunk in here)
    finish(run, want, here)


@turns(accumulate=[2, 3], gradient_dtype=[None, torch.float32])
def test_accumulation(accumulate: int, gradient_dtype: torch.dtype | None) -> None:
    recipe = replace(RECIPE, accumulate=accumulate, gradient_dtype=gradient_dtype)
    want = plain(CASE.build, recipe)
    run, here = half(CASE, recipe, share=0.9)
    both(run, want, 5)
    finish(run, want, here)


@pytest.mark.parametrize("case", CASES[1::3], ids=repr)
def test_models_of_the_zoo(case: Case) -> None:
    recipe = Recipe(precision=case.precisions[-1])
    want = plain(case.build, recipe)
    budget = all_homes(case, recipe, 2048) // 2
    run = budgeted(case, recipe, 0.9, chunk_size=2048, host_budget=budget)
    here = staying(run)
    assert run.engine.stats()["staying_bytes"] > 0
    both(run, want, 4, case=case)
    finish(run, want, here)


@pytest.mark.parametrize("rates", ["slow host", "slow copies"])
def test_updates_inside_the_backward(rates: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_RATES", RATES[rates])
    recipe = Recipe(precision="bf16-true")
    want = plain(CASE.build, recipe)
    run, here = half(CASE, recipe)
    engine = run.engine
    run.backward = lambda loss: engine.backward(loss, step=True)
    both(run, want, 6)
    assert engine.stats()["immediate_updates"] > 0
    finish(run, want, here)


@pytest.mark.parametrize("limits", [[QUIET] * 6, [QUIET, QUIET, QUIET, 0.05, QUIET, QUIET]])
def test_speculation(limits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the chunks that may leave; the host has room for spares, as where memory was freed since manage()."""
    monkeypatch.setenv("GEMINI_RATES", MACHINES["host"])
    homes, recipe = all_homes(), replace(RECIPE, clip=QUIET)
    manage = sys.modules["gemini_strategy.management"]
    monkeypatch.setattr(manage, "host_limit", lambda budget, free: homes // 2)
    want = plain(CASE.build, recipe)
    run = budgeted(CASE, recipe, 0.8, chunk_size=CHUNK, host_budget=homes)
    here = staying(run)
    for step, limit in enumerate(limits):
        for each in (want, run):
            each.recipe = replace(recipe, clip=limit)
            drive(each, CASE, 1, step)
    stats = run.engine.stats()
    assert here and stats["staying_bytes"] > 0
    assert stats["taken_updates"] > 0 and stats["spare_bytes"] > 0
    assert (stats["redone_updates"] > 0) == (0.05 in limits)
    finish(run, want, here)


def test_without_spares_a_clipped_step_is_deferred() -> None:
    want = plain(CASE.build, replace(RECIPE, clip=QUIET))
    run, here = half(recipe=replace(RECIPE, clip=QUIET))
    both(run, want, 5)
    assert run.engine.stats()["host_bytes"] <= run.engine._runtime.settings.host_budget
    finish(run, want, here)


def test_evaluation_first_and_in_between() -> None:
    want = plain(CASE.build, RECIPE)
    run, here = half()
    n = 0
    for _ in range(3):
        losses = []
        for each in (want, run):
            each.model.eval()
            with torch.no_grad():
                losses.append(CASE.loss(each, CASE.batch(n)).float().clone())
            each.model.train()
        assert torch.equal(*losses)
        n = both(run, want, 2, n)
    finish(run, want, here)


def test_inference() -> None:
    torch.manual_seed(3)
    model = CASE.build()
    batch = CASE.batch(0)[0]
    model.eval()
    with torch.no_grad():
        want = model(batch)
    how: dict[str, Any] = {"device": "cpu", "chunk_size": CHUNK}
    engine = gs.manage(model, placement_policy="cpu", **how)
    n_bytes = int(engine.stats()["host_bytes"])
    engine.close()
    engine = gs.manage(model, device_budget=n_bytes * 3 // 4, host_budget=n_bytes // 2, **how)
    assert engine.stats()["staying_bytes"] > 0
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(model(batch), want)
    engine._runtime.core.check()
    engine.close()
    with torch.no_grad():
        assert torch.equal(model(batch), want)


def test_frozen_parameters() -> None:
    """Of which a chunk has weights alone."""

    def build() -> torch.nn.Module:
        model = CASE.build()
        for i, parameter in enumerate(model.parameters()):
            parameter.requires_grad_(i % 3 > 0)
        return model

    case = replace(CASE, build=build)
    want = plain(build, RECIPE)
    run, here = half(case)
    both(run, want, 4, case=case)
    finish(run, want, here)


# ---- what reads and writes parameters ------------------------------------------------------------


def test_states_are_read_and_written_where_they_are() -> None:
    """state_dict, full parameters, loading, in-place writes outside modules: with the reference's bits."""
    want = plain(CASE.build, RECIPE)
    run, here = half()
    n = both(run, want, 2)
    whole = run.engine.state_dict()
    n = both(run, want, 1, n)
    later = plain(CASE.build, RECIPE)
    drive(later, CASE, 2, 0)
    run.engine.load_state_dict(whole)
    run.losses, run.norms = run.losses[:2], run.norms[:2]
    for each in (later, run):
        with torch.no_grad():
            for parameter in each.model.parameters():
                parameter.mul_(1.5)
    both(run, later, 3, 2)
    finish(run, later, here)


@pytest.mark.parametrize("to", [None, 0.2, 2.0])
def test_saved_and_loaded_on_another_host(to: float | None, tmp_path: Path) -> None:
    """to: of homes, that the other host has; None: all is on the device."""
    want = plain(CASE.build, RECIPE)
    run, here = half()
    n = both(run, want, 3)
    run.engine.save(tmp_path / "saved")
    check(run, here)
    run.engine.close()
    budget = None if to is None else int(all_homes() * to)
    device = 10**9 if to is None else int(all_homes() * 1.1)
    other = managed(CASE.build, RECIPE, chunk_size=CHUNK, device_budget=device, host_budget=budget)
    here = staying(other) if to == 0.2 else set()
    other.engine.load(tmp_path / "saved")
    other.losses, other.norms = run.losses, run.norms
    both(other, want, 3, n)
    assert here <= staying(other)
    assert_same_outcome(other.outcome(), want.outcome())
    other.engine.close()


@pytest.mark.parametrize("says_step", [False, True])
def test_saved_in_the_background(
    says_step: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(precision="bf16-true")
    for name in ("front", "back"):
        gate = Gate(monkeypatch) if name == "back" else None
        want = plain(CASE.build, recipe)
        run, here = half(CASE, recipe)
        engine = run.engine
        if says_step:
            run.backward = lambda loss, engine=engine: engine.backward(loss, step=True)
        n = both(run, want, 3)
        torch.manual_seed(5)
        if gate is None:
            engine.save(tmp_path / name)
            engine.close()
            continue
        saving = engine.save(tmp_path / name, background=True)
        gate.reached.acquire()
        for _ in range(3):
            gate.let(1)
            n = both(run, want, 1, n)
        gate.open()
        saving.wait()
        assert contents(tmp_path / "back") == contents(tmp_path / "front")
        finish(run, want, here)


def test_closed_engine_leaves_the_values() -> None:
    want = plain(CASE.build, RECIPE)
    run, _ = half()
    both(run, want, 3)
    run.engine.close()
    masters = want.outcome().masters  # the model came in fp32
    for name, p in run.model.named_parameters():
        assert torch.equal(p.detach(), masters[name]), name


# ---- pressure ------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 4])
def test_pressure_takes_the_others(at: int) -> None:
    """All that may leave does; who asks for more goes without, is told why, and training goes on."""
    want = plain(CASE.build, RECIPE)
    run, here = half(share=0.9)
    core = run.engine._runtime.core
    n = both(run, want, at)
    stats = run.engine.stats()
    budget, staying_bytes = stats["device_budget_bytes"], stats["staying_bytes"]
    assert not core.reserve(budget - staying_bytes // 2)
    assert re.search(r"HOST: .* host_budget is .* stay on the device", core.refusal())
    check(run, here)
    n = both(run, want, 3, n)
    assert core.reserve(0) and core.refusal() == ""
    n = both(run, want, 2, n)
    finish(run, want, here)


def test_a_module_that_finds_no_room_says_why() -> None:
    want = plain(CASE.build, RECIPE)
    run, here = half()
    core, stats = run.engine._runtime.core, run.engine.stats()
    core.set_external_bytes(int(stats["device_budget_bytes"] - stats["staying_bytes"] - 4096))
    with pytest.raises(gs.GeminiMemoryError, match="DEVICE.*HOST: .*stay on the device"):
        drive(run, CASE, 1)
    core.set_external_bytes(0)
    run.losses.clear()
    run.engine.optimizer.zero_grad()
    both(run, want, 3)
    finish(run, want, here)


# ---- several ranks -------------------------------------------------------------------------------


def _rank(rank: int, size: int, host_budgets: list[int], recipe: Recipe, sharded: bool) -> Any:
    run = budgeted(
        CASE,
        recipe,
        1.0 if sharded else 1.3,
        chunk_size=CHUNK,
        host_budget=host_budgets[rank],
        enable_distributed_storage=sharded,
        timeout=90.0,
    )
    here = staying(run)
    want = plain(CASE.build, recipe)
    for step in range(5):
        both(run, want, 1, step)
        own = {one.chunk: set(list(one.pieces.values())[:3]) for one in run.engine.chunk_states()}
        assert all(own[chunk] == {"DIRTY"} for chunk in here)
    stats, plan = run.engine.stats(), run.engine._runtime.core.plan_info()
    assert_same_outcome(run.outcome(), want.outcome())
    run.engine._runtime.core.check()
    run.engine.close()
    assert plan is not None and stats["host_bytes"] <= min(host_budgets)
    return stats["staying_bytes"], plan["hash"]


@turns(recipe=[RECIPE, Recipe(precision="32-true", accumulate=2)], sharded=[True, False])
def test_ranks_agree_on_the_least_host(recipe: Recipe, sharded: bool, tmp_path: Path) -> None:
    """The same chunks stay on both, though one has a larger host."""
    homes = all_homes(recipe=recipe) // (2 if sharded else 1)
    got = values(run_ranks(2, tmp_path, _rank, [homes // 2, homes * 2], recipe, sharded))
    assert got[0] == got[1] and got[0][0] > 0


# ---- what is refused, and what a host has --------------------------------------------------------


def _budgets(text: str) -> dict[str, int]:
    found = re.findall(r"(\w+_budget) to at least [\d.]+ \w+ \((\d+) bytes\)", text)
    return {name: int(size) for name, size in found}


@pytest.mark.parametrize("raises", ["host_budget", "device_budget"])
def test_what_does_not_fit_both_is_refused_with_the_bytes(raises: str) -> None:
    """On either side what it says suffices, and a little less does not."""
    homes, state = all_homes(), state_bytes(CASE.build, RECIPE)
    how: dict[str, Any] = {"chunk_size": CHUNK}
    budgets = {"host_budget": homes // 5, "device_budget": state // 3}
    with pytest.raises(gs.GeminiMemoryError) as error:
        managed(CASE.build, RECIPE, **how, **budgets)
    text = str(error.value)
    assert re.match(r"HOST: .* wanted for weights, states and gradients, host_budget is ", text)
    assert "freeze parameters" in text and len(re.findall(r"[\d.]+ kB", text)) >= 6
    enough = _budgets(text)
    assert set(enough) == {"host_budget", "device_budget"}
    want = plain(CASE.build, RECIPE)
    run = managed(CASE.build, RECIPE, **how, **budgets | {raises: enough[raises]})
    here = staying(run)
    both(run, want, 3)
    finish(run, want, here)
    with pytest.raises(gs.GeminiMemoryError):
        managed(CASE.build, RECIPE, **how, **budgets | {raises: int(enough[raises] * 0.9)})


@pytest.mark.parametrize(
    "how", [{"placement_policy": "cpu"}, {"gpu_margin_mem_ratio": 0.5}], ids=str
)
def test_who_says_what_is_where_is_refused_as_before(how: dict[str, Any]) -> None:
    with pytest.raises(gs.GeminiMemoryError, match="HOST: .* wanted for .* host_budget is"):
        managed(
            CASE.build,
            RECIPE,
            chunk_size=CHUNK,
            host_budget=all_homes() // 2,
            device_budget=state_bytes(CASE.build, RECIPE),
            **how,
        )


@pytest.mark.parametrize("budget", [0.0, 0.3, 1.0])
def test_what_fits_the_device_needs_no_host(budget: float) -> None:
    """All of it begins there; what the host could not hold never leaves."""
    want = plain(CASE.build, RECIPE)
    limit = max(int(all_homes() * budget), 1000)
    run = managed(CASE.build, RECIPE, chunk_size=CHUNK, device_budget=10**9, host_budget=limit)
    stats = run.engine.stats()
    assert (stats["staying_bytes"] > 0) == (budget < 1.0) and stats["host_bytes"] == 0
    both(run, want, 3)
    assert run.engine.stats()["host_bytes"] == 0
    finish(run, want, staying(run))


def test_what_homes_may_take() -> None:
    assert host_limit(None, 6400) == 6300  # a little is the process's, loaders' and checkpoints'
    assert host_limit(6400, 6400) == 6400  # who gives a budget is believed
    assert host_limit(100, 6400) == 100
    assert host_limit(7000, 6400) == 6300
    assert host_limit(None, 0) == 0


# ---- the estimate --------------------------------------------------------------------------------


@pytest.mark.parametrize("says_step", [False, True])
@pytest.mark.parametrize("share", [0.3, 0.6])
def test_an_estimate_foretells_it(
    share: float, says_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same chunks, homes and plan as the run."""
    slow = dict.fromkeys(REFERENCE, 1.0)
    monkeypatch.setenv("GEMINI_RATES", ",".join(f"{key}={value}" for key, value in slow.items()))
    machine = Machine("test", None, REFERENCE | slow, 1e12, 1e12, 1e11)
    ids = torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "labels": ids}
    budgets: dict[str, Any] = {"precision": "bf16-true", "device_budget": "2MB"}
    whole = gs.estimate(small_llama(), inputs, device="cpu", gpu=machine, **budgets)
    cpu = {**budgets, "placement_policy": "cpu"}
    homes = gs.estimate(small_llama(), inputs, device="cpu", gpu=machine, **cpu).host_bytes
    budgets["host_budget"] = int(homes * share)
    result = gs.estimate(small_llama(), inputs, device="cpu", gpu=machine, **budgets)
    assert whole.staying_bytes == 0 and "without homes" not in str(whole)
    assert result.fits and result.staying_bytes > 0
    assert "stay on the device whole" in " ".join(str(result).split())
    model = small_llama()
    engine = gs.manage(model, torch.optim.AdamW(model.parameters()), device="cpu", **budgets)
    engine.backward(model(**inputs).loss, step=says_step)
    engine.optimizer.step()
    stats, plan = engine.stats(), engine._runtime.core.plan_info()
    engine.close()
    assert stats["staying_bytes"] == result.staying_bytes
    assert stats["host_bytes"] == result.host_bytes <= budgets["host_budget"]
    schedule = next(s for s in result.schedules if (s.when == "immediate") == says_step)
    assert plan["classes"] == schedule.plan["classes"] and plan["hash"] == schedule.plan["hash"]


def test_an_estimate_knows_the_free_memory_of_this_host() -> None:
    """Without a budget: the process needs some of it, and a little is left."""
    machine = Machine(
        "test", None, REFERENCE, 1e12, 1e12, 1e11, host_memory=PROCESS_BYTES + 640_000
    )
    ids = torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "labels": ids}
    how: dict[str, Any] = {"device": "cpu", "gpu": machine, "precision": "bf16-true"}
    result = gs.estimate(small_llama(), inputs, device_budget="2MB", **how)
    assert result.staying_bytes > 0 and result.host_bytes <= 630_000
    result = gs.estimate(small_llama(), inputs, device_budget="0.7MB", **how)
    assert [refusal.what for refusal in result.refusals] == ["host"]
    text = " ".join(str(result).split())
    assert "a host with" in text and "or raise device_budget" in text
