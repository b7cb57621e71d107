"""Plans that several ranks make together: what their steps show counts for all, and nobody keeps a plan alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helpers.ranks import run_ranks, values
from helpers.reference import Managed, Recipe, assert_same_outcome, drive, plain
from helpers.scenario import budgeted
from helpers.zoo import mlp_case

PATIENT = 90.0
SMALL = mlp_case(width=48, depth=4)


def same_everywhere(run: Managed, *mine: Any) -> None:
    got = run.engine._runtime.ranks.gather("what is compared", list(mine))
    assert all(each == got[0] for each in got), got


def both(case: Any, recipe: Recipe, share: float, **how: Any) -> tuple[Managed, Managed]:
    """The reference and one rank's managed run; all ranks are given the same batch, so that the mean is exact."""
    return plain(case.build, recipe), budgeted(case, recipe, share, timeout=PATIENT, **how)


def finish(want: Managed, run: Managed) -> None:
    assert_same_outcome(run.outcome(), want.outcome())
    run.engine._runtime.core.check()
    run.engine.close()


# ---- rates that steps correct --------------------------------------------------------------------


def check_rates(rank: int, size: int) -> None:
    """From a host that is said to be far too fast: all ranks believe the slowest."""
    run = budgeted(SMALL, Recipe(precision="bf16-true"), 0.3, timeout=PATIENT, chunk_size=4096)
    shown = [2e5, 1e5][rank]  # the core takes it in place of the times of updates
    run.engine._runtime.core.tell_host_rate(shown)
    drive(run, SMALL, 8)
    stats, plan = run.engine.stats(), run.engine._runtime.core.plan_info()
    assert not stats["settling"] and stats["plan_breaks"] == stats["replay_waits"] == 0
    assert 1 <= stats["plans"] <= 2, stats["plans"]  # a better known rate may give the same plan
    same_everywhere(run, plan["hash"], plan["rates"], stats["plans"])
    assert plan["rates"]["host_adam_beside"] == plan["rates"]["host_adam"] == pytest.approx(1e5)
    run.engine._runtime.core.check()
    run.engine.close()


def test_steps_correct_the_rate_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMINI_TUNE", "1")
    adam = "host_adam=1.5e13,host_adam_beside=1e13,device_adam=1e9"
    monkeypatch.setenv("GEMINI_RATES", f"h2d=1e9,d2h=1e9,{adam}")
    values(run_ranks(2, tmp_path, check_rates))


# ---- passes that a plan does not know ------------------------------------------------------------


def check_evaluation(rank: int, size: int) -> None:
    want, run = both(SMALL, Recipe(precision="bf16-true"), 0.5)

    def evaluate(step: int) -> None:
        for each in (want, run):
            each.model.eval()
            with torch.no_grad():
                each.losses.append(SMALL.loss(each, SMALL.batch(500 + step)).float())
            each.model.train()

    for step in range(6):
        for each in (want, run):
            drive(each, SMALL, 1, first=step)
    plans = run.engine.stats()["plans"]
    evaluate(0)  # the first, which the plan does not know
    for step in range(6, 9):
        for each in (want, run):
            drive(each, SMALL, 1, first=step)
    assert run.engine.stats()["plans"] == plans + 1
    waits = run.engine.stats()["replay_waits"]
    evaluate(1)
    for step in range(9, 12):
        for each in (want, run):
            drive(each, SMALL, 1, first=step)
    stats = run.engine.stats()
    assert stats["plans"] == plans + 1 and stats["replay_waits"] == waits
    assert stats["deviations"] == 0
    finish(want, run)


def check_replicas(rank: int, size: int) -> None:
    """Replicas have their weights whole: one of them may evaluate alone."""
    want, run = both(SMALL, Recipe(precision="bf16-true"), 0.9, enable_distributed_storage=False)
    for step in range(14):
        for each in (want, run):
            drive(each, SMALL, 1, first=step)
        if step in (4, 5, 9) and rank == 0:
            run.model.eval()
            with torch.no_grad():
                SMALL.loss(run, SMALL.batch(500 + step))
            run.model.train()
    same_everywhere(run, run.engine.stats()["plans"])
    assert run.engine.stats()["planned"]
    finish(want, run)


def test_a_replica_evaluates_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_TUNE", "1")
    monkeypatch.setenv("GEMINI_RATES", "h2d=55e9,d2h=54e9")
    values(run_ranks(2, tmp_path, check_replicas))


@pytest.mark.core
def test_an_evaluation_is_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_RATES", "h2d=55e9,d2h=54e9")
    values(run_ranks(2, tmp_path, check_evaluation))


# ---- what outlives its unit ----------------------------------------------------------------------


class _Escaping(nn.Module):
    """Weights that are in use longer than their units are entered.

    "recomputed": the last unit of each block is recomputed while the backward node that asked for it shows its
    weight. "view": a view of the first layer's weight lives on during two more units. "early": one is made before
    any unit is entered, and used when all have left.
    """

    def __init__(self, what: str, depth: int = 6, width: int = 48) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
            for _ in range(depth)
        )
        self.what = what

    def block(self, layers: Any, x: Tensor) -> Tensor:
        views: list[Tensor] = []
        if self.what == "view":
            hook = layers[0].register_forward_hook(lambda m, a, y: views.append(m.weight.t()))
        for layer in layers:
            x = x + layer(torch.tanh(x))
        if self.what == "view":
            hook.remove()
            x = x + 0 * x @ views.pop()
        return x

    def forward(self, x: Tensor) -> Tensor:
        early = self.blocks[3][1].weight.t() if self.what == "early" else None
        for layers in self.blocks:
            if self.what == "recomputed" and self.training:
                x = checkpoint(self.block, layers, x, use_reentrant=False)
            else:
                x = self.block(layers, x)
        return x if early is None else x + 0 * x @ early


def check_recomputed(rank: int, size: int) -> None:
    """A block's last unit is let go with the backward of that block, not with the next unit that is entered."""
    case = replace(SMALL, name="escaping", build=partial(_Escaping, "recomputed"))
    want, run = both(case, Recipe(precision="bf16-true"), 0.5, chunk_size=4096)
    held: list[int] = []

    def look(grad: Tensor) -> None:
        held.append(run.engine._runtime.core.stats()["leases"])

    def watch(module: nn.Module, args: Any) -> None:
        if run.model.training and not torch._C._current_autograd_node():  # not a recomputation
            args[0].register_hook(look)

    for layers in list(run.model.blocks)[1:]:
        layers[0].register_forward_pre_hook(watch)
    for each in (want, run):
        drive(each, case, 3)
    assert held and not any(held), held
    finish(want, run)


def test_recomputed_units_are_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_RATES", "h2d=55e9,d2h=54e9")
    values(run_ranks(2, tmp_path, check_recomputed))


def check_escaping(rank: int, size: int, what: str) -> None:
    case = replace(SMALL, name="escaping", build=partial(_Escaping, what))
    for share in (0.25, 0.7):
        want, run = both(case, Recipe(precision="bf16-true"), share, chunk_size=4096)
        for each in (want, run):
            drive(each, case, 4)
        settled = run.engine.stats()
        for each in (want, run):
            drive(each, case, 6, first=4)
        stats = run.engine.stats()
        assert stats["planned"] and stats["plan_breaks"] == stats["deviations"] == 0, (share, stats)
        assert stats["replay_waits"] == 0 and stats["plans"] - settled["plans"] <= 1
        finish(want, run)


# A view made before its unit's first tick is not known until then: with several ranks a gather may break the plan.
@pytest.mark.parametrize(
    ("size", "what"),
    [(1, "early"), *((size, what) for size in (1, 2) for what in ("recomputed", "view"))],
)
def test_what_outlives_its_unit_breaks_no_plan(
    size: int, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found on four GPUs: a plan that was left, and made again, in every step."""
    monkeypatch.setenv("GEMINI_RATES", "h2d=55e9,d2h=54e9")
    values(run_ranks(size, tmp_path, check_escaping, what))


class _Without(nn.Module):
    """Beside a layer one that nobody calls: trained parameters that share a chunk and never get a gradient."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.unused = layer, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def _without() -> nn.Module:
    model = SMALL.build()
    for i in (1, 3):
        model.blocks[i] = _Without(model.blocks[i])
    return model


def check_without(rank: int, size: int, clip: float | None, says_step: bool) -> None:
    case = replace(SMALL, name="without", build=_without)
    want, run = both(case, Recipe(precision="bf16-true", clip=clip), 0.5)
    if says_step:
        run.backward = partial(run.engine.backward, step=True)
    for each in (want, run):
        drive(each, case, 6)
    settled = run.engine.stats()
    for each in (want, run):
        drive(each, case, 10, first=6)
    stats = run.engine.stats()
    assert stats["planned"] and stats["replay_waits"] == 0, stats
    assert stats["plan_breaks"] == settled["plan_breaks"] and stats["plans"] - settled["plans"] <= 1
    same_everywhere(run, run.engine._runtime.core.plan_info()["hash"], stats["plan_breaks"])
    finish(want, run)


@pytest.mark.parametrize(("clip", "says_step"), [(None, False), (0.3, False), (None, True)])
@pytest.mark.parametrize("size", [1, 2])
def test_a_parameter_without_a_gradient_breaks_no_plan(
    size: int, clip: float | None, says_step: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every plan was left with several ranks, as the others' sum came when all arrivals had been waited for."""
    monkeypatch.setenv("GEMINI_RATES", "h2d=55e9,d2h=54e9")
    values(run_ranks(size, tmp_path, check_without, clip, says_step))
