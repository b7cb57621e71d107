"""Every shape of trouble trains to the bits of plain torch with most of it evicted."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.reference import (
    Outcome,
    Recipe,
    assert_same_outcome,
    assert_trained,
    drive,
    managed,
    tightly,
    train_plain,
)
from helpers.zoo import CASES, Case

STEPS = 6
CHUNK = 4096
BY_NAME = {case.name: case for case in CASES}
GRID = [(case.name, precision) for case in CASES for precision in case.precisions]


def _recipe(precision: str) -> Recipe:
    return Recipe(precision=precision, steps=STEPS, clip=1.0, lr=3e-3)


@functools.cache
def _reference(name: str, precision: str) -> tuple[Outcome, Outcome]:
    return train_plain(BY_NAME[name], _recipe(precision))


def _moved(case: Case, before: Outcome) -> list[str]:
    return [n for n, t in before.masters.items() if t.numel() and n not in case.untrained]


@pytest.mark.parametrize(("name", "precision"), GRID)
def test_reference_trains(name: str, precision: str) -> None:
    """Guards the guard: equality of bits means nothing if nothing moves."""
    before, after = _reference(name, precision)
    assert_trained(before, after, _moved(BY_NAME[name], before))
    assert after.skipped == 0


@pytest.mark.parametrize(("name", "precision"), GRID)
def test_tight_budget(name: str, precision: str) -> None:
    """Policy "auto" under the smallest budget that is accepted."""
    case, recipe = BY_NAME[name], _recipe(precision)
    run = tightly(case.build, recipe, floor=case.floor, chunk_size=CHUNK)
    try:
        drive(run, case, STEPS)
        assert_same_outcome(run.outcome(), _reference(name, precision)[1])
        stats = run.engine.stats()
        assert stats["device_peak_bytes"] <= stats["device_budget_bytes"]
        assert not torch.is_autocast_enabled("cpu")
    finally:
        run.engine.close()


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_cpu_policy(name: str) -> None:
    """Policy "cpu": everything evicted at the end of every unit; the model left behind is plain."""
    case = BY_NAME[name]
    precision = case.precisions[-1]
    run = managed(case.build, _recipe(precision), chunk_size=CHUNK, placement_policy="cpu")
    reference = _reference(name, precision)[1]
    drive(run, case, STEPS)
    assert_same_outcome(run.outcome(), reference)
    if len(reference.masters) > 4:
        assert run.engine.stats()["evictions"] > 0
    run.engine.close()
    left = run.model.state_dict()
    assert list(left) == list(reference.weights)
    names = {
        p: n for n, p in reversed(list(run.model.named_parameters()))
    }  # of tied ones the first
    kept = dict(run.model.named_parameters(remove_duplicate=False))
    for key, want in reference.weights.items():
        if key not in kept:
            assert left[key].dtype == want.dtype, key
        else:  # the model came in fp32
            assert left[key].dtype is torch.float32, key
            want = reference.masters.get(names[kept[key]], want)
        assert torch.equal(left[key].to(want.dtype), want), key  # what is frozen was never rounded


def test_forwards_without_backward_leave_nothing() -> None:
    """Graphs that are dropped, not backpropagated, give back their activations and hold no chunk."""

    class Activations(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(32, 32)
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.softmax(torch.tanh(self.lin(x) * self.scale), dim=-1)
            return torch.relu(x - 0.01) * self.scale

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    case = Case("activations", Activations, lambda step: None, lambda run, batch: None)
    run = managed(case.build, _recipe("32-true"), placement_policy="cpu")
    try:
        x = torch.randn(8192, 32)
        for _ in range(5):
            run(x)
            run.model.lin.weight.norm()
        before = resident()
        for _ in range(40):
            run(x)
            run.model.lin.weight.norm()
        assert resident() < before + (40 << 20), "each pass saves about 4 MiB"
        assert run.engine.stats()["leases"] == 0
    finally:
        run.engine.close()
