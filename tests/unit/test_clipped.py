"""Gradients after a clip by norm: `p.grad` shows them clipped, as torch does, though only the step multiplies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import gemini_strategy as gs
from helpers.pairs import pairs
from helpers.ranks import run_ranks, values
from helpers.reference import Plain, Recipe, assert_same_bits, assert_same_outcome, managed, plain
from helpers.sharded import Exact, ExactCase
from helpers.zoo import mlp_case

pytestmark = pytest.mark.core  # make check runs these on a core with its own assertions

CASE = mlp_case(width=32, depth=3)
LIMIT = 0.05  # every norm here is above it
PRECISIONS = ("32-true", "bf16-true", "bf16-mixed")


def _backward(run: Plain, step: int) -> None:
    torch.manual_seed(step)
    run.backward(CASE.loss(run, CASE.batch(step)))


def _clip(run: Plain) -> float:
    return float((run.engine or run.optimizer).clip_grad_norm_(LIMIT))


def _gradients(run: Plain) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in run.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("gradient_dtype", [None, torch.float32])
@pytest.mark.parametrize("precision", [*PRECISIONS, "16-mixed"])
def test_the_gradients_are_shown_clipped(
    precision: str, gradient_dtype: torch.dtype | None
) -> None:
    run = managed(
        CASE.build,
        Recipe(precision=precision, gradient_dtype=gradient_dtype),
        placement_policy="cpu",
        chunk_size=4096,
    )
    _backward(run, 0)
    before = _gradients(run)
    name, weight = next(iter(run.model.named_parameters()))
    taken = weight.grad.view(torch.int32 if weight.dtype is torch.float32 else torch.int16)
    norm = run.engine.grad_norm()
    assert norm > LIMIT and _clip(run) == pytest.approx(norm)
    factor = LIMIT / (norm + 1e-6)
    for when in ("before the step", "after the step"):
        after = _gradients(run)
        for key, grad in after.items():
            want = before[key].mul(factor)
            if gradient_dtype is None or precision == "32-true":
                assert_same_bits(grad, want, f"{key}, {when}")
            else:  # rounded once, from the sum in fp32
                torch.testing.assert_close(grad, want, rtol=2**-7, atol=0.0)
        shown = taken.view(after[name].dtype)
        assert_same_bits(shown, after[name], f"memory that was taken before the clip, {when}")
        run.optimizer.step()
    run.optimizer.zero_grad()
    assert all(p.grad is None for p in run.model.parameters())
    _backward(run, 0)
    scale = run.engine.stats()["loss_scale"]
    assert run.engine.grad_norm() > LIMIT and scale > 0  # nothing is left of the factor
    run.engine.close()


def _accumulate(run: Plain) -> None:
    for step in range(3):
        _backward(run, step)
        run.losses.append(torch.tensor(_clip(run)))
        run.optimizer.step()


def _step_twice(run: Plain) -> None:
    _backward(run, 0)
    _clip(run)
    run.optimizer.step()
    run.optimizer.step()


def _clip_twice(run: Plain) -> None:
    _backward(run, 0)
    for _ in range(2):
        run.losses.append(torch.tensor(_clip(run)))
        run.optimizer.step()


def _clamp(run: Plain) -> None:
    _backward(run, 0)
    _clip(run)
    run.optimizer.step()
    if run.engine:
        run.engine.clip_grad_value_(1e-4)
    else:
        torch.nn.utils.clip_grad_value_(run.model.parameters(), 1e-4)
    run.optimizer.step()


def _one_is_cleared(run: Plain) -> None:
    _backward(run, 0)
    _clip(run)
    run.optimizer.step()
    first = next(run.model.parameters())
    first.grad = None
    _backward(run, 1)
    run.losses.append(first.grad.float().norm())
    run.optimizer.step()


def _one_is_written(run: Plain) -> None:
    _backward(run, 0)
    _clip(run)
    run.optimizer.step()
    next(run.model.parameters()).grad.mul_(3)
    run.losses += [p.grad.float().norm() for p in run.model.parameters()]
    run.optimizer.step()


@pairs(
    script=[_accumulate, _step_twice, _clip_twice, _clamp, _one_is_cleared, _one_is_written],
    precision=PRECISIONS,
    policy=["cpu", "auto"],
)
def test_a_loop_that_keeps_its_gradients(
    script: Callable[[Plain], None], precision: str, policy: str
) -> None:
    """After the step they are clipped ones in both, whatever uses them next."""
    recipe = Recipe(precision=precision)
    reference = plain(CASE.build, recipe)
    run = managed(CASE.build, recipe, placement_policy=policy, chunk_size=4096)
    for which in (run, reference):
        script(which)
    assert_same_outcome(run.outcome(), reference.outcome())
    for got, want in zip(_gradients(run).values(), _gradients(reference).values(), strict=True):
        assert_same_bits(got, want, "gradient")
    run.engine.close()


def test_a_closed_engine_gives_clipped_gradients_back() -> None:
    run = managed(CASE.build, Recipe(), placement_policy="cpu", chunk_size=4096)
    _backward(run, 0)
    _clip(run)
    shown = _gradients(run)
    run.engine.close()
    for key, grad in _gradients(run).items():
        assert_same_bits(grad, shown[key], key)


def test_a_gradient_that_is_dropped_after_the_clip() -> None:
    """The others are stepped with the factor of the norm of all."""
    runs = [
        plain(CASE.build, Recipe()),
        managed(CASE.build, Recipe(), placement_policy="cpu", chunk_size=4096),
    ]
    for run in runs:
        _backward(run, 0)
        _clip(run)
        next(run.model.parameters()).grad = None
        run.optimizer.step()
    assert_same_outcome(runs[1].outcome(), runs[0].outcome())
    runs[1].engine.close()


def test_a_backward_between_clip_and_step_is_refused() -> None:
    """And zero_grad() makes all good again."""
    run = managed(CASE.build, Recipe(), placement_policy="cpu", chunk_size=4096)
    _backward(run, 0)
    _clip(run)
    _backward(run, 1)
    with pytest.raises(gs.GeminiError, match="gradients have come or were changed after"):
        run.optimizer.step()
    run.optimizer.zero_grad()
    _backward(run, 1)
    run.optimizer.step()
    run.engine.close()


def _check_ranks(rank: int, size: int, folder: Path) -> None:
    torch.manual_seed(3)
    model, case = Exact(), ExactCase(rank, size)
    optimizer = gs.HybridAdam(model.parameters(), lr=1e-2)
    engine = gs.manage(model, optimizer, device="cpu", chunk_size=4096, precision="bf16-true")
    for step in range(2):  # the second adds to what the first has clipped
        engine.backward(case.loss(engine.model, case.batch(step)))
        trained = [p for p in model.parameters() if p.grad is not None]
        before = [p.grad.clone() for p in trained]
        norm = engine.grad_norm()
        assert norm > LIMIT
        engine.clip_grad_norm_(LIMIT)
        for p, grad in zip(trained, before, strict=True):
            assert_same_bits(p.grad.clone(), grad.mul(LIMIT / (norm + 1e-6)), "gradient")
        engine.step()
    engine.close()
    torch.save([p.detach() for p in model.parameters()], folder / f"{rank}.pt")


def test_ranks(tmp_path: Path) -> None:
    weights = []
    for size in (1, 2):
        folder = tmp_path / str(size)
        folder.mkdir()
        values(run_ranks(size, folder, _check_ranks, folder))
        weights += [torch.load(folder / f"{rank}.pt") for rank in range(size)]
    for got in weights[1:]:
        for one, other in zip(got, weights[0], strict=True):
            assert_same_bits(one, other, "weight")
