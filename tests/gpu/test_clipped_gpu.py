"""On a GPU: `p.grad` shows clipped gradients after a clip, and what uses them after the step has clipped ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.reference import Plain, Recipe, assert_same_bits, assert_same_outcome, managed, plain
from test_gpu_exact import _deterministic
from test_planned_gpu import CASE

pytestmark = pytest.mark.gpu

__all__ = ["_deterministic"]

LIMIT = 0.05


def _backward(run: Plain, step: int) -> Any:
    torch.manual_seed(step)
    run.backward(CASE.loss(run, CASE.batch(step).to("cuda")))
    return {n: p.grad.clone() for n, p in run.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("policy", ["cpu", "auto", "cuda"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_gradients_after_a_clip(precision: str, policy: str) -> None:
    recipe = Recipe(precision=precision, device="cuda")
    reference, run = plain(CASE.build, recipe), managed(CASE.build, recipe, placement_policy=policy)
    for step in range(3):  # the later ones add to what the first has clipped
        before = _backward(run, step)
        norm = run.engine.grad_norm()
        assert norm > LIMIT
        run.engine.clip_grad_norm_(LIMIT)
        for name, grad in before.items():
            shown = run.model.get_parameter(name).grad.clone()
            assert_same_bits(shown, grad.mul(LIMIT / (norm + 1e-6)), name)
        _backward(reference, step)
        reference.optimizer.clip_grad_norm_(LIMIT)
        for which in (run, reference):
            which.optimizer.step()
    assert_same_outcome(run.outcome(), reference.outcome())
    run.engine.close()
