"""Gradient accumulation and unusual orders of forward, backward, zero_grad and step.

The bits are those of autograd's own accumulation in the gradient's dtype, whatever the placement; with
`gradient_dtype=torch.float32` they are those of adding each micro-batch's gradient in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gemini_strategy as gs
from helpers.reference import (
    Plain,
    Recipe,
    assert_same_bits,
    assert_same_outcome,
    drive,
    managed,
    plain,
    tightly,
)
from helpers.zoo import CASES, Case, mlp_case

pytestmark = pytest.mark.core  # make check runs these on a core with its own assertions

CASE = mlp_case(width=32, depth=3)
BY_NAME = {case.name: case for case in CASES}


def _both(
    script: Callable[[Plain], None], recipe: Recipe, case: Case = CASE, **how: Any
) -> tuple[Plain, Plain]:
    """Runs the script managed and unmanaged and compares everything."""
    how = {"placement_policy": "cpu", "chunk_size": 4096, **how}
    reference, run = plain(case.build, recipe), managed(case.build, recipe, **how)
    try:
        for which in (run, reference):
            script(which)
        assert_same_outcome(run.outcome(), reference.outcome())
    finally:
        run.engine.close()
    return run, reference


def _micro(run: Plain, step: int, case: Case = CASE) -> None:
    torch.manual_seed(step)
    run.backward(case.loss(run, case.batch(step)))


def test_fp32_accumulation_differs_from_bf16() -> None:
    """Guards test_exact.py, which trains with both: the two gradient dtypes really are two things."""
    outcomes = []
    for dtype in (None, torch.float32):
        run = plain(CASE.build, Recipe(precision="bf16-true", accumulate=4, gradient_dtype=dtype))
        drive(run, CASE, 3)
        outcomes.append(run.outcome())
    name = "blocks.1.1.weight"
    assert not torch.equal(outcomes[0].masters[name], outcomes[1].masters[name])


def test_tight_budget_and_uneven_last_window() -> None:
    recipe = Recipe(precision="bf16-mixed", clip=0.3)
    reference = plain(CASE.build, recipe)
    run = tightly(CASE.build, recipe, floor=0.05, chunk_size=4096)
    try:
        for which in (run, reference):
            step = 0
            for window in (3, 3, 3, 2, 1):
                for _ in range(window):
                    _micro(which, step)
                    step += 1
                which.finish()
        assert_same_outcome(run.outcome(), reference.outcome())
    finally:
        run.engine.close()


@pytest.mark.parametrize(
    "name",
    [
        "conditional_branch",
        "tied_weights",
        "checkpoint_reentrant",
        "module_called_twice",
        "child_weight_in_parent",
        "lora",
    ],
)
def test_shapes_of_trouble(name: str) -> None:
    case = BY_NAME[name]
    recipe = Recipe(precision="32-true", accumulate=3, clip=1.0)
    _both(lambda run: drive(run, case, 4), recipe, case)


def test_zero_grad_in_a_window_drops_it() -> None:
    def script(run: Plain) -> None:
        for step in range(4):
            _micro(run, 10 * step)
            run.zero_grad()
            _micro(run, 10 * step + 1)
            run.finish()

    _both(script, Recipe(clip=0.5))


def test_step_without_backward_changes_nothing() -> None:
    recipe = Recipe(precision="bf16-true")
    run = managed(CASE.build, recipe, placement_policy="cpu", chunk_size=4096)
    try:
        drive(run, CASE, 2)
        before = run.outcome()
        run.optimizer.step()
        run.engine.step()
        after = run.outcome()
        assert_same_outcome(after, before)
    finally:
        run.engine.close()


def test_step_twice_uses_the_gradients_twice() -> None:
    """As torch: without zero_grad the gradients are still there."""

    def script(run: Plain) -> None:
        _micro(run, 0)
        run.optimizer.step()
        run.optimizer.step()
        _micro(run, 1)
        run.optimizer.step()
        run.zero_grad()
        drive(run, CASE, 2)

    _both(script, Recipe())


def test_zero_grad_to_zeros_updates_with_zero() -> None:
    def script(run: Plain) -> None:
        drive(run, CASE, 2)
        _micro(run, 3)
        run.optimizer.zero_grad(set_to_none=False)
        run.optimizer.step()
        run.zero_grad()

    _both(script, Recipe())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_retained_graph(precision: str) -> None:
    def script(run: Plain) -> None:
        for step in range(3):
            torch.manual_seed(step)
            loss = CASE.loss(run, CASE.batch(step))
            if run.scaler is not None and run.engine is not None:
                run.engine.backward(loss, retain_graph=True)
                run.engine.backward(loss * 0.5)
            else:
                scale = run.scaler.scale if run.scaler is not None else 1.0
                (loss * scale).backward(retain_graph=True)
                (loss * 0.5 * scale).backward()
            run.finish()

    _both(script, Recipe(precision=precision, clip=0.5))


def test_forward_forward_backward_backward() -> None:
    """Two graphs alive at once, with everything evicted between."""

    def script(run: Plain) -> None:
        for step in range(3):
            torch.manual_seed(step)
            one, two = CASE.loss(run, CASE.batch(step)), CASE.loss(run, CASE.batch(step + 50))
            two.backward()
            one.backward()
            run.finish()

    _both(script, Recipe())


def test_one_backward_of_several_losses() -> None:
    def script(run: Plain) -> None:
        for step in range(3):
            torch.manual_seed(step)
            losses = [CASE.loss(run, CASE.batch(step + 9 * i)) for i in range(3)]
            torch.autograd.backward(losses, [torch.tensor(w) for w in (1.0, 0.5, -0.25)])
            run.finish()

    _both(script, Recipe(clip=0.5))


def test_autograd_grad_of_parameters() -> None:
    """`torch.autograd.grad` returns gradients and accumulates none."""

    def script(run: Plain) -> None:
        torch.manual_seed(0)
        params = [run.model.get_parameter(n) for n in ("stem.weight", "blocks.1.1.weight")]
        grads = torch.autograd.grad(CASE.loss(run, CASE.batch(0)), params)
        run.losses += [g.norm() for g in grads]
        assert params[0].grad is None
        drive(run, CASE, 2)

    run, reference = _both(script, Recipe())
    assert_same_bits(run.losses[0], reference.losses[0])


def test_backward_of_a_part() -> None:
    """A window in which some parameters get no gradient: they keep moments and step count."""

    def script(run: Plain) -> None:
        drive(run, CASE, 2)
        for step in range(2):
            hidden = run.model.blocks[0](run.model.stem(CASE.batch(step)[0]))
            hidden.square().mean().backward()
            run.finish()
        drive(run, CASE, 1, first=7)

    _, reference = _both(script, Recipe())
    assert len(set(reference.outcome().counts.values())) == 2


def test_gradient_with_respect_to_the_input() -> None:
    def script(run: Plain) -> None:
        for step in range(2):
            torch.manual_seed(step)
            x, y = CASE.batch(step)
            x.requires_grad_()
            (run(x) - y).square().mean().backward()
            run.losses.append(x.grad.clone())
            run.finish()

    _both(script, Recipe())


def test_freezing_between_steps() -> None:
    """requires_grad switched at a step edge works as in torch, or is refused by name."""

    def script(run: Plain) -> None:
        drive(run, CASE, 2)
        for p in run.model.blocks[0].parameters():
            p.requires_grad_(False)
        drive(run, CASE, 2, first=2)
        for p in run.model.blocks[0].parameters():
            p.requires_grad_(True)
        drive(run, CASE, 2, first=4)

    try:
        _both(script, Recipe())
    except gs.GeminiError as error:
        assert "blocks.0" in str(error)


def test_detached_target_network() -> None:
    """A frozen, unmanaged copy beside the managed model (a target network) and its soft update."""

    def script(run: Plain) -> None:
        torch.manual_seed(3)
        target = CASE.build()
        for step in range(3):
            torch.manual_seed(step)
            x, _ = CASE.batch(step)
            with torch.no_grad():
                wanted = target(x)
            (run(x) - wanted).square().mean().backward()
            run.finish()
            with torch.no_grad():
                for t, p in zip(target.parameters(), run.model.parameters(), strict=True):
                    t.lerp_(p, 0.3)
        run.losses.append(sum(t.detach().double().sum() for t in target.parameters()))

    _both(script, Recipe())


def test_clip_verbs() -> None:
    """clip_grad_norm_ of the engine: a large bound changes nothing, zero stops all, and it resets."""

    def script(run: Plain) -> None:
        for step, bound in enumerate((1e9, 0.0, 0.01, 1e9, None)):
            _micro(run, step)
            if bound is not None:
                clipper = run.optimizer if run.engine is None else run.engine
                run.norms.append(torch.as_tensor(clipper.clip_grad_norm_(bound)).float())
            run.optimizer.step()
            run.zero_grad()

    _both(script, Recipe(weight_decay=0.0))


def test_clip_value_equals_torch() -> None:
    def script(run: Plain) -> None:
        for step in range(3):
            _micro(run, step)
            if run.engine is not None:
                run.engine.clip_grad_value_(1e-3)
            else:
                nn.utils.clip_grad_value_(run.model.parameters(), 1e-3)
            run.optimizer.step()
            run.zero_grad()

    _both(script, Recipe())
    _both(script, Recipe(precision="bf16-true"))


def test_other_norms_are_refused() -> None:
    """Only the 2-norm is independent of order; another one is refused, and nothing is clipped."""

    def script(run: Plain) -> None:
        _micro(run, 0)
        if run.engine is not None:
            for norm_type in (1.0, float("inf")):
                with pytest.raises(ValueError, match="norm_type"):
                    run.engine.clip_grad_norm_(1e-3, norm_type=norm_type)
            with pytest.raises(ValueError, match="max_norm"):
                run.engine.clip_grad_norm_(-1.0)
        run.optimizer.step()
        run.zero_grad()

    _both(script, Recipe())


def test_grad_norm_is_exact() -> None:
    """grad_norm() does not depend on placement or chunking, and equals the function on plain tensors."""
    values = set()
    for chunk in (4096, 20_000):
        for policy in ("cpu", "cuda"):
            run = managed(CASE.build, Recipe(), placement_policy=policy, chunk_size=chunk)
            _micro(run, 0)
            values.add(run.engine.grad_norm())
            run.engine.close()
    reference = plain(CASE.build, Recipe())
    _micro(reference, 0)
    values.add(gs.grad_norm([p.grad for p in reference.model.parameters()]))
    assert len(values) == 1
