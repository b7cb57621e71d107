"""Every shape of trouble trains to the bits of plain torch with most of it evicted."""

from __future__ import annotations

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


def _recipe(precision: str) -> Recipe:
    return Recipe(precision=precision, steps=STEPS, clip=1.0, lr=3e-3)


def _reference(case: Case, precision: str) -> Outcome:
    """Of which everything has moved: else equality of bits means nothing."""
    before, after = train_plain(case, _recipe(precision))
    moved = [n for n, t in before.masters.items() if t.numel() and n not in case.untrained]
    assert_trained(before, after, moved)
    assert after.skipped == 0
    return after


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.name for case in CASES])
def test_bits(number: int) -> None:
    """Under the smallest budget that is accepted, and where everything is evicted at the end of every unit.

    The precisions are in turns, and test_immediate.py has each model's next one.
    """
    case = CASES[number]
    precision = case.precisions[number % len(case.precisions)]
    reference = _reference(case, precision)
    run = tightly(case.build, _recipe(precision), floor=case.floor, chunk_size=CHUNK)
    try:
        drive(run, case, STEPS)
        assert_same_outcome(run.outcome(), reference)
        stats = run.engine.stats()
        assert stats["device_peak_bytes"] <= stats["device_budget_bytes"]
        assert not torch.is_autocast_enabled("cpu")
    finally:
        run.engine.close()
    run = managed(case.build, _recipe(precision), chunk_size=CHUNK, placement_policy="cpu")
    drive(run, case, STEPS)
    assert_same_outcome(run.outcome(), reference)
    if len(reference.masters) > 4:
        assert run.engine.stats()["evictions"] > 0
    run.engine.close()
    _assert_plain(run.model, reference)


def _assert_plain(model: nn.Module, reference: Outcome) -> None:
    """What close() has left behind."""
    left = model.state_dict()
    assert list(left) == list(reference.weights)
    names = {p: n for n, p in reversed(list(model.named_parameters()))}  # of tied ones the first
    kept = dict(model.named_parameters(remove_duplicate=False))
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
