"""The guard, continued: doors to gradients, changes of the model, and the doors that we offer.

As in test_guard.py: the same bits as the reference that did the same, or a refusal by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gemini_strategy as gs
from helpers.doors import (
    CASE,
    OTHER,
    PLACEMENTS,
    WEIGHT,
    Door,
    door,
    names_a_parameter,
    param,
    same,
    start_at,
    walk_both,
)
from helpers.reference import (
    Plain,
    Recipe,
    assert_same_bits,
    assert_same_outcome,
    drive,
    plain,
)
from helpers.zoo import Case

pytestmark = pytest.mark.core  # make check runs these on a core with its own assertions

GRADIENTS: list[Door] = []


# ---- doors to gradients, between backward and step --------------------------------------------------


@door(GRADIENTS, refusable=True)
def _read_grad(run: Plain) -> Any:
    return param(run).grad.clone(), [p.grad.norm() for p in run.model.parameters()]


@door(GRADIENTS, refusable=True)
def _grad_is_there(run: Plain) -> Any:
    return [p.grad is not None for p in run.model.parameters()]


@door(GRADIENTS, refusable=True)
def _grad_to_none(run: Plain) -> Any:
    param(run).grad = None


@door(GRADIENTS, refusable=True)
def _grad_assign(run: Plain) -> Any:
    param(run).grad = torch.full_like(param(run), 0.03)


@door(GRADIENTS, refusable=True)
def _grad_inplace(run: Plain) -> Any:
    for p in run.model.parameters():
        p.grad.mul_(0.25)


@door(GRADIENTS, refusable=True)
def _grad_inplace_one(run: Plain) -> Any:
    param(run).grad.zero_()


@door(GRADIENTS, refusable=True)
def _grad_data_inplace(run: Plain) -> Any:
    for p in run.model.parameters():
        p.grad.data.mul_(-2.0)


@door(GRADIENTS, refusable=True)
def _torch_clip_grad_norm(run: Plain) -> Any:
    return nn.utils.clip_grad_norm_(run.model.parameters(), 0.01)


@door(GRADIENTS, refusable=True)
def _torch_clip_grad_norm_not_foreach(run: Plain) -> Any:
    return nn.utils.clip_grad_norm_(run.model.parameters(), 0.01, foreach=False)


@door(GRADIENTS, refusable=True)
def _torch_clip_grad_value(run: Plain) -> Any:
    nn.utils.clip_grad_value_(run.model.parameters(), 0.001)


@door(GRADIENTS, refusable=True)
def _torch_clip_some(run: Plain) -> Any:
    return nn.utils.clip_grad_norm_(run.model.blocks.parameters(), 0.01)


@door(GRADIENTS)
def _zero_grad_of_model(run: Plain) -> Any:
    run.model.zero_grad()


@door(GRADIENTS)
def _zero_grad_of_optimizer(run: Plain) -> Any:
    run.optimizer.zero_grad()


@door(GRADIENTS, refusable=True)
def _zero_grad_of_submodule(run: Plain) -> Any:
    run.model.blocks[1].zero_grad()


@door(GRADIENTS, refusable=True)
def _zero_grad_to_zeros(run: Plain) -> Any:
    run.optimizer.zero_grad(set_to_none=False)


@door(GRADIENTS, refusable=True)
def _requires_grad_off(run: Plain) -> Any:
    param(run).requires_grad_(False)
    param(run).requires_grad_(True)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("door", GRADIENTS, ids=repr)
def test_gradient_door(door: Door, precision: str) -> None:
    recipe = Recipe(precision=precision)
    reference, run = plain(CASE.build, recipe), start_at("cpu", recipe)
    try:
        for step in range(3):
            for which in (run, reference):
                torch.manual_seed(step)
                which.backward(CASE.loss(which, CASE.batch(step)))
            walk_both(door, run, reference)
            for which in (run, reference):
                which.finish()
        assert_same_outcome(run.outcome(), reference.outcome())
    finally:
        run.engine.close()


def test_no_gradient_before_backward() -> None:
    recipe = Recipe(precision="32-true")
    run = start_at("cpu", recipe)
    try:
        assert all(p.grad is None for p in run.model.parameters())
        drive(run, CASE, 1)
        assert all(p.grad is None for p in run.model.parameters())
    finally:
        run.engine.close()


def test_user_hooks_see_the_gradient() -> None:
    """Tensor hooks and post-accumulate hooks on parameters, set after manage, see the true bytes."""
    recipe = Recipe(precision="32-true")
    reference, run = plain(CASE.build, recipe), start_at("cpu", recipe)
    seen: dict[Plain, list] = {run: [], reference: []}

    def attach(which: Plain) -> list:
        p = param(which)
        return [
            p.register_hook(lambda g: seen[which].append(g.clone())),
            p.register_post_accumulate_grad_hook(lambda q: seen[which].append(q.grad.clone())),
        ]

    try:
        for which in (run, reference):
            handles = attach(which)
            drive(which, CASE, 2)
            for handle in handles:
                handle.remove()
        same(seen[run], seen[reference])
        assert len(seen[run]) == 4
    finally:
        run.engine.close()


# ---- doors that change the model ---------------------------------------------------------------------


@pytest.mark.parametrize("change", ["half", "double", "bfloat16"])
def test_cast_after_manage_is_refused(change: str) -> None:
    recipe = Recipe(precision="32-true")
    reference, run = plain(CASE.build, recipe), start_at("cpu", recipe)
    try:
        drive(run, CASE, 1)
        with pytest.raises(gs.GeminiError) as refusal:
            getattr(run.model, change)()
        assert names_a_parameter(run, refusal.value)
        drive(run, CASE, 2, first=1)
        drive(reference, CASE, 3)
        assert_same_outcome(run.outcome(), reference.outcome())
    finally:
        run.engine.close()


def test_moves_that_change_nothing() -> None:
    recipe = Recipe(precision="32-true")
    reference, run = plain(CASE.build, recipe), start_at("cpu", recipe)
    try:
        drive(run, CASE, 1)
        run.model.to("cpu").cpu().float().to(torch.float32)
        run.model.train(False).train(True)
        run.model.requires_grad_(True)
        drive(run, CASE, 2, first=1)
        drive(reference, CASE, 3)
        assert_same_outcome(run.outcome(), reference.outcome())
    finally:
        run.engine.close()


def test_parameter_replaced_after_manage() -> None:
    """A replaced parameter behaves as in torch (used, not updated) or is refused by name."""
    recipe = Recipe(precision="32-true")
    reference, run = plain(CASE.build, recipe), start_at("cpu", recipe)

    def replace(which: Plain) -> None:
        drive(which, CASE, 1)
        torch.manual_seed(6)
        which.model.head.weight = nn.Parameter(torch.randn(32, 32) / 6)
        drive(which, CASE, 2, first=1)

    try:
        try:
            replace(run)
        except gs.GeminiError as error:
            assert "head.weight" in str(error)
            return
        replace(reference)
        same(run.losses, reference.losses)
        for name, want in reference.model.state_dict().items():
            assert_same_bits(run.model.state_dict()[name].clone(), want, name)
    finally:
        run.engine.close()


def test_module_added_after_manage() -> None:
    """A module added later behaves as in torch (a gradient, no update) or is refused by name."""
    recipe = Recipe(precision="32-true")
    reference, run = plain(CASE.build, recipe), start_at("cpu", recipe)

    def add(which: Plain) -> None:
        torch.manual_seed(5)
        which.model.blocks.append(nn.Linear(32, 32))
        drive(which, CASE, 2)

    try:
        try:
            add(run)
        except gs.GeminiError as error:
            assert "blocks.3" in str(error)
            return
        add(reference)
        same(run.losses, reference.losses)
        assert_same_bits(param(run).clone(), param(reference))
    finally:
        run.engine.close()


# ---- the doors we offer ------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "16-mixed"])
def test_full_parameter(precision: str, placement: str) -> None:
    recipe = Recipe(precision=precision)
    run = start_at(placement, recipe)
    try:
        drive(run, CASE, 2)
        before = run.outcome()
        for name, p in run.model.named_parameters():
            with run.engine.full_parameter(p) as value:
                assert value.dtype == torch.float32 and value.device.type == "cpu"
                assert_same_bits(value, before.masters[name], name)
        assert_same_outcome(run.outcome(), before)
        with run.engine.full_parameter(param(run)) as value:
            value[0].fill_(1 / 3)
        after = run.outcome()
        want = before.masters[WEIGHT].clone()
        want[0] = 1 / 3
        assert_same_bits(after.masters[WEIGHT], want)
        assert_same_bits(after.masters[OTHER], before.masters[OTHER])
        dtype = after.weights[WEIGHT].dtype
        assert_same_bits(after.weights[WEIGHT][0], torch.full((32,), 1 / 3).to(dtype))
    finally:
        run.engine.close()


def test_full_parameters() -> None:
    """Inside the context parameters are plain: every door is open, and writes stay."""
    recipe = Recipe(precision="32-true")
    reference, run = plain(CASE.build, recipe), start_at("cpu", recipe)

    def change(which: Plain) -> list:
        kept = []
        for p in which.model.parameters():
            kept.append(p.detach().numpy().copy())
            p.data.mul_(0.5)
            p.detach().numpy()[...] += 0.25
        return kept

    try:
        drive(run, CASE, 2)
        drive(reference, CASE, 2)
        with run.engine.full_parameters():
            got = change(run)
        same(got, change(reference))
        with run.engine.full_parameters(run.model.blocks[1], writable=False):
            assert_same_bits(param(run).clone(), param(reference).detach())
        drive(run, CASE, 2, first=2)
        drive(reference, CASE, 2, first=2)
        assert_same_outcome(run.outcome(), reference.outcome())
    finally:
        run.engine.close()


class _Peeking(nn.Module):
    """A parent that looks at the weights of all its children around every call."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with torch.no_grad():
                self.seen.append(torch.stack([m.weight.sum() for m in self.layers]))
            scale = self.layers[0].weight.detach().abs().max() + self.layers[4].bias.mean()
            x = torch.tanh(layer(x) * scale)
            self.seen.append(layer.weight.data[0].clone())
        return x


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_parent_reads_children(precision: str, placement: str) -> None:
    case = Case("peeking", _Peeking, CASE.batch, CASE.loss)
    recipe = Recipe(precision=precision, clip=0.5)
    reference, run = plain(case.build, recipe), start_at(placement, recipe, case)
    try:
        for which in (run, reference):
            drive(which, case, 3)
        same(run.model.seen, reference.model.seen)
        assert_same_outcome(run.outcome(), reference.outcome())
    finally:
        run.engine.close()


def test_closure_reads_and_trains() -> None:
    """`optimizer.step(closure)`: the closure runs forward, backward and reads weights."""
    recipe = Recipe(precision="32-true")
    reference, run = plain(CASE.build, recipe), start_at("cpu", recipe)

    def steps(which: Plain) -> Iterator[Any]:
        for step in range(3):

            def closure(step: int = step) -> Tensor:
                torch.manual_seed(step)
                which.optimizer.zero_grad()
                loss = CASE.loss(which, CASE.batch(step)) + 0 * param(which).detach().sum()
                loss.backward()
                return loss

            yield which.optimizer.step(closure).detach(), param(which).clone()
        which.zero_grad()

    try:
        same(list(steps(run)), list(steps(reference)))
        assert_same_outcome(run.outcome(), reference.outcome())
    finally:
        run.engine.close()
