"""The promise: the same bits for every policy, budget, chunk size and precision.

Each managed run trains 24 steps in train mode with dropout and is compared with the unmanaged reference:
losses, gradient norms, loss scales, weights, fp32 masters and both moments, bit for bit.  Clipping,
accumulation, the gradient dtype and the Adam mode alternate over the grid so that every pair of values
meets.  Policy "cuda" below the training state must refuse before the first step.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import nn

import gemini_strategy as gs
from helpers.reference import (
    Outcome,
    Recipe,
    assert_same_bits,
    assert_same_outcome,
    assert_trained,
    drive,
    managed,
    tightly,
    train_plain,
)
from helpers.zoo import mlp_case

pytestmark = pytest.mark.core  # make check runs these on a core with its own assertions

STEPS = 24
CASE = mlp_case(width=48, depth=3, p=0.1)
POLICIES = ("cuda", "cpu", "auto")
BUDGETS = (1.0, 0.6, 0.35)
CHUNKS = (4096, 12 * 1024, 40 * 1024)
PRECISIONS = ("32-true", "bf16-true", "bf16-mixed", "16-mixed")


def _recipe(precision: str, index: int) -> Recipe:
    """One of six recipes per precision."""
    return Recipe(
        precision=precision,
        steps=STEPS,
        clip=(None, 0.35)[index % 2],
        accumulate=(1, 2, 2)[index % 3],
        gradient_dtype=(None, None, torch.float32)[index % 3],
        adamw_mode=index % 3 != 1,
    )


@functools.cache
def _reference(precision: str, index: int) -> tuple[Outcome, Outcome]:
    before, after = train_plain(CASE, _recipe(precision, index))
    assert_trained(before, after)
    return before, after


@functools.cache
def _whole(precision: str, chunk: int, index: int) -> int:
    """Bytes that policy "cuda" needs: the training state as the engine lays it out."""
    recipe = _recipe(precision, index)
    run = managed(CASE.build, recipe, chunk_size=chunk, placement_policy="cuda")
    try:
        return run.engine.stats()["device_bytes"]
    finally:
        run.engine.close()


def _grid() -> list[tuple[str, float, int, str, int]]:
    """Policy, budget, chunk size, precision and recipe: each pair of values once, each precision with every recipe."""
    cases = []
    for r, precision in enumerate(PRECISIONS):
        n_trained = 0
        for c, chunk in enumerate(CHUNKS):
            for p, policy in enumerate(POLICIES):
                budget = BUDGETS[(c + r + p) % 3]
                cases.append((policy, budget, chunk, precision, n_trained % 6))
                n_trained += policy != "cuda" or budget == 1.0
    return cases


@pytest.mark.parametrize(("policy", "budget", "chunk", "precision", "index"), _grid())
def test_bits(policy: str, budget: float, chunk: int, precision: str, index: int) -> None:
    recipe = _recipe(precision, index)
    how = {
        "placement_policy": policy,
        "chunk_size": chunk,
        "device_budget": int(budget * _whole(precision, chunk, index)),
    }
    if policy == "cuda" and budget < 1.0:
        with pytest.raises(gs.GeminiMemoryError, match=r"\d"):
            managed(CASE.build, recipe, **how)
        return
    run = managed(CASE.build, recipe, **how)
    try:
        drive(run, CASE, STEPS)
        stats = run.engine.stats()
        assert_same_outcome(run.outcome(), _reference(precision, index)[1])
        assert stats["device_peak_bytes"] <= stats["device_budget_bytes"] == how["device_budget"]
        assert stats["steps"] + stats["skipped_steps"] == STEPS
    finally:
        run.engine.close()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_bits_under_pressure(chunk: int, precision: str) -> None:
    """The smallest budget that is accepted: weights themselves come and go within a pass."""
    index = (CHUNKS.index(chunk) + 1) % 6
    recipe = _recipe(precision, index)
    run = tightly(CASE.build, recipe, floor=0.05, chunk_size=chunk)
    try:
        drive(run, CASE, STEPS)
        stats = run.engine.stats()
        assert_same_outcome(run.outcome(), _reference(precision, index)[1])
        assert stats["device_peak_bytes"] <= stats["device_budget_bytes"]
        if chunk < CHUNKS[-1]:
            assert stats["evictions"] > STEPS
    finally:
        run.engine.close()


def test_grid_is_complete() -> None:
    """What trains in the grid above has each pair of values, and every recipe with every precision."""
    trained = [case for case in _grid() if case[0] != "cuda" or case[1] == 1.0]
    axes: tuple[tuple[object, ...], ...] = (POLICIES, BUDGETS, CHUNKS, PRECISIONS, tuple(range(6)))
    for a, b in [*itertools.combinations(range(4), 2), (3, 4)]:
        want = set(itertools.product(axes[a], axes[b]))
        if (a, b) == (0, 1):  # the others are refused
            want -= {("cuda", budget) for budget in BUDGETS if budget < 1.0}
        assert {(case[a], case[b]) for case in trained} == want, (a, b)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_do_not_matter(threads: int) -> None:
    recipe = _recipe("bf16-true", 1)
    run = managed(CASE.build, recipe, chunk_size=4096, placement_policy="cpu", threads=threads)
    try:
        drive(run, CASE, STEPS)
        assert_same_outcome(run.outcome(), _reference("bf16-true", 1)[1])
    finally:
        run.engine.close()


@pytest.mark.parametrize(
    ("precision", "each"), [("32-true", 16), ("bf16-true", 14), ("16-mixed", 16)]
)
def test_state_bytes_per_parameter(precision: str, each: int) -> None:
    """Weights, masters and moments 12 (fp16: 14) bytes, the gradient 4 or 2, padding within two per cent."""
    recipe = Recipe(precision=precision)

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))

    run = managed(build, recipe, chunk_size=1 << 20, placement_policy="cpu")
    try:
        stats = run.engine.stats()
        raw = stats["parameters"] * each
        assert raw <= stats["state_bytes"] <= raw * 1.02
    finally:
        run.engine.close()


def test_torch_adamw_real_gradients() -> None:
    """On a regression whose gradients follow the weights: as near to exact arithmetic as torch's own in fp32.

    Rounding comes back through the gradients, and how much of it depends on the processor's matrix products; so the
    measure is what torch's fp32 run itself is away from the same run in fp64.
    """

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 8))

    plain_model, model, exact_model = build(), build(), build().double()
    theirs = torch.optim.AdamW(plain_model.parameters(), lr=1e-3, weight_decay=0.01)
    exact = torch.optim.AdamW(exact_model.parameters(), lr=1e-3, weight_decay=0.01)
    engine = gs.manage(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01),
        device="cpu",
        placement_policy="cpu",
        chunk_size=4096,
    )
    x, y = torch.randn(64, 24), torch.randn(64, 8)
    for _ in range(1000):
        for module, opt in ((plain_model, theirs), (model, engine.optimizer), (exact_model, exact)):
            dtype = next(module.parameters()).dtype
            nn.functional.mse_loss(module(x.to(dtype)), y.to(dtype)).backward()
            opt.step()
            opt.zero_grad()
    want, ours = exact_model.state_dict(), engine.model_state_dict()
    for name, torchs in plain_model.state_dict().items():
        gap, torchs_gap = ((w.double() - want[name]).norm() for w in (ours[name], torchs))
        assert gap <= 2 * torchs_gap, name
        assert torchs_gap <= 1e-4 * want[name].norm(), name  # it is rounding that is compared
    engine.close()


def test_two_managed_models_do_not_meet() -> None:
    """Two engines in one process train as each would alone."""
    recipes = (_recipe("32-true", 1), _recipe("bf16-true", 1))
    runs = [managed(CASE.build, r, chunk_size=4096, placement_policy="cpu") for r in recipes]
    try:
        for step in range(STEPS):
            for run in runs:
                drive(run, CASE, 1, first=step)
        for run, recipe in zip(runs, recipes, strict=True):
            assert_same_outcome(run.outcome(), _reference(recipe.precision, 1)[1])
    finally:
        for run in runs:
            run.engine.close()


def test_same_twice() -> None:
    """Two identical managed runs leave identical bits, moments included."""
    recipe = _recipe("bf16-true", 1)
    outcomes = []
    for _ in range(2):
        run = tightly(CASE.build, recipe, floor=0.05, chunk_size=4096)
        drive(run, CASE, 10)
        outcomes.append(run.outcome())
        run.engine.close()
    assert_same_outcome(outcomes[0], outcomes[1])
    assert_same_bits(outcomes[0].losses[-1], outcomes[1].losses[-1])
