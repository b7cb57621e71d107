"""Updates inside backward: `backward(loss, step=True)` and `ends_step()`.

Where they are used, the bits are those of the plain loop; where they cannot be exact they are not used; and
what would make them wrong is refused by name.  `immediate(run)` counts the updates that were really
made inside a backward, so no test here passes because nothing was immediate.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gemini_strategy as gs
from helpers import chaos
from helpers.reference import (
    Managed,
    Plain,
    Recipe,
    assert_same_bits,
    assert_same_outcome,
    drive,
    plain,
    train_plain,
)
from helpers.scenario import RATES, budgeted
from helpers.zoo import CASES, Case, mlp_case

pytestmark = pytest.mark.core  # make check runs these on a core with its own assertions

CASE = mlp_case(width=48, depth=4, p=0.1)
RECIPE = Recipe(precision="bf16-true", steps=6)
# Updates come after backward there: gradients come in parts.
DEFERRED = {"checkpoint_block_used_twice"}
# Here a graph keeps weights shown from one step to the next, until somebody collects it.
EITHER = {"side_effect_output"}


@pytest.fixture(autouse=True)
def _chaos(monkeypatch: pytest.MonkeyPatch) -> None:
    chaos.late(monkeypatch, 9)
    monkeypatch.setenv("GEMINI_RATES", RATES["slow copies"])


def immediate(run: Managed) -> int:
    """Updates of chunks made inside a backward so far."""
    return run.engine._runtime.core.stats()["immediate_updates"]


def _says_step(run: Managed) -> Managed:
    engine = run.engine
    run.backward = lambda loss: engine.backward(loss, step=True)
    return run


def _finish(run: Managed, want: Plain) -> None:
    try:
        assert_same_outcome(run.outcome(), want.outcome())
        run.engine._runtime.core.check()
        assert chaos.faults() == (0, "")
    finally:
        run.engine.close()


def _planned(
    share: float = 0.5, case: Case = CASE, recipe: Recipe = RECIPE
) -> tuple[Plain, Managed]:
    """Both after three steps, the managed one planned for immediate updates."""
    want = plain(case.build, recipe)
    run = _says_step(budgeted(case, recipe, share, chunk_size=4096))
    for each in (want, run):
        drive(each, case, 3)
    assert run.engine._runtime.core.plan_info()["when"] == "immediate"
    assert immediate(run) > 0
    return want, run


# ---- the same bits -------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.name for case in CASES])
def test_zoo(number: int) -> None:
    """The zoo with little memory and with enough; each micro-batch says that it ends a step."""
    case = CASES[number]
    precisions = case.precisions[:2]  # not 16-mixed, whose loss scale makes it deferred
    recipe = Recipe(precision=precisions[(number + 1) % len(precisions)], steps=5)
    after = train_plain(case, recipe)[1]
    for share in (max(0.5, case.floor), 2.0):
        run = _says_step(budgeted(case, recipe, share, chunk_size=4096))
        try:
            drive(run, case, recipe.steps)
            assert_same_outcome(run.outcome(), after)
            assert chaos.faults() == (0, "")
            if share == 2.0:
                assert run.engine.stats()["planned"]
                is_right = (immediate(run) > 0) == (case.name not in DEFERRED)
                assert is_right or case.name in EITHER, immediate(run)
        finally:
            run.engine.close()


@pytest.mark.parametrize("share", [0.3, 1.2])  # 0.5 and 0.8 are those of the tests below
@pytest.mark.parametrize("rates", list(RATES))
def test_every_machine(rates: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_RATES", RATES[rates])
    want, run = _planned(share)
    for each in (want, run):
        drive(each, CASE, 4, first=3)
    _finish(run, want)


def test_ends_step_around_a_backward_of_ones_own() -> None:
    want, run = _planned()
    engine = run.engine

    def backward(loss: Tensor) -> None:
        with engine.ends_step():
            loss.backward()

    run.backward = backward
    before = immediate(run)
    for each in (want, run):
        drive(each, CASE, 3, first=3)
    assert immediate(run) > before
    _finish(run, want)


@pytest.mark.parametrize("accumulate", [2, 3])
def test_last_micro_batch_of_several(accumulate: int) -> None:
    recipe = Recipe(precision="bf16-true", steps=6, accumulate=accumulate)
    want = plain(CASE.build, recipe)
    run = budgeted(CASE, recipe, 0.6, chunk_size=4096)
    n = 0

    def backward(loss: Tensor) -> None:
        nonlocal n
        n += 1
        run.engine.backward(loss, step=n % accumulate == 0)

    run.backward = backward
    for each in (want, run):
        drive(each, CASE, 6)
    assert immediate(run) > 0
    _finish(run, want)


def test_with_and_without_in_turns() -> None:
    """Steps with clipping say nothing, the others do."""
    want, run = _planned()
    for each in (want, run):
        for step in range(3, 11):
            if each.engine is not None:
                each.backward = lambda loss, says=step % 3 > 0: run.engine.backward(loss, step=says)
            each.recipe = Recipe(precision="bf16-true", clip=None if step % 3 else 0.2)
            drive(each, CASE, 1, first=step)
    _finish(run, want)


def test_loss_scale_makes_it_deferred() -> None:
    recipe = Recipe(precision="16-mixed", steps=6)
    want = plain(CASE.build, recipe)
    run = _says_step(budgeted(CASE, recipe, 0.6, chunk_size=4096))
    for each in (want, run):
        drive(each, CASE, 6)
    assert immediate(run) == 0 and run.engine._runtime.core.plan_info()["when"] == "deferred"
    _finish(run, want)


def test_evaluation_before_the_first_step() -> None:
    """The plan that evaluation has made says nothing about gradients: the first step is deferred."""
    case = next(c for c in CASES if c.name == "checkpoint_reentrant")
    recipe = Recipe(precision="32-true", steps=5)
    want = plain(case.build, recipe)
    run = _says_step(budgeted(case, recipe, 0.8, chunk_size=4096))
    for each in (want, run):
        each.model.eval()
        for step in range(3):
            with torch.no_grad():
                each.losses.append(case.loss(each, case.batch(70 + step)).float())
        each.model.train()
    assert run.engine.stats()["planned"]
    for each in (want, run):
        drive(each, case, 5)
    _finish(run, want)


def test_schedule_of_the_learning_rate() -> None:
    """The numbers of a step are those at its backward; a scheduler between steps changes the next one."""
    recipe = Recipe(
        precision="bf16-true",
        steps=7,
        schedule=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.7),
    )
    want, run = _planned(0.6, recipe=recipe)
    for each in (want, run):
        drive(each, CASE, 4, first=3)
    _finish(run, want)


class _InParts(nn.Module):
    """One weight in two re-entrant checkpoints: its gradient arrives twice in a backward."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(48, 48)
        self.a = nn.Linear(48, 48)
        self.b = nn.Linear(48, 48)
        self.b.weight = self.a.weight
        self.tail = nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        x = torch.tanh(checkpoint(self.a, x, use_reentrant=True))
        x = torch.tanh(checkpoint(self.b, x, use_reentrant=True))
        return self.tail(x)


def _mse(run: Plain, batch: tuple[Tensor, ...]) -> Tensor:
    return F.mse_loss(run(batch[0]).float(), batch[1])


@pytest.mark.parametrize(
    ("share", "evaluates"), [(0.5, False), (0.5, True), (1.0, True), (1.5, False)]
)
def test_gradient_in_parts_falls_back(share: float, evaluates: bool) -> None:
    case = Case("in_parts", _InParts, CASE.batch, _mse)
    want = plain(case.build, RECIPE)
    run = _says_step(budgeted(case, RECIPE, share, chunk_size=4096))
    for each in (want, run):
        if evaluates:
            with torch.no_grad():
                for step in range(3):
                    each.losses.append(case.loss(each, case.batch(70 + step)))
        drive(each, case, 6)
    assert immediate(run) == 0
    _finish(run, want)


class _Sparse(nn.Module):
    """Some of its blocks get no gradient in some steps; one parameter never moves."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(48, 48)
        self.blocks = nn.ModuleList(nn.Linear(48, 48) for _ in range(5))
        self.never = nn.Linear(48, 48)
        self.frozen = nn.Linear(48, 48)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(48, 48)

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = self.frozen(torch.tanh(self.stem(x)))
        for i, block in enumerate(self.blocks):
            if (i + step) % 3:
                x = x + torch.tanh(block(x))
        return self.head(x)


@pytest.mark.parametrize(
    ("share", "set_to_none", "chunk_size"),
    [(0.4, False, 4096), (0.8, True, 4096), (1.2, False, 16384), (0.4, True, 16384)],
)
def test_parameters_without_a_gradient(share: float, set_to_none: bool, chunk_size: int) -> None:
    """Their moments and counts stay, as torch's do, also beside others of their chunk."""

    def batch(step: int) -> tuple[Tensor, Tensor, int]:
        return (*CASE.batch(step), step)

    def loss(run: Plain, b: tuple[Tensor, Tensor, int]) -> Tensor:
        return F.mse_loss(run(b[0], step=b[2]).float(), b[1])

    case = Case("sparse", _Sparse, batch, loss)
    want = plain(case.build, RECIPE)
    run = _says_step(budgeted(case, RECIPE, share, chunk_size=chunk_size))
    if not set_to_none:
        want.zero_grad = lambda: want.model.zero_grad(set_to_none=False)
        run.zero_grad = lambda: run.engine.zero_grad(set_to_none=False)
    for each in (want, run):
        drive(each, case, 12)
    assert immediate(run) > 0
    _finish(run, want)


class _Drops(nn.Module):
    """Hooks drop the gradients of some biases while the block before each is still to have its own."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(48, 48) for _ in range(8))
        self.dropped: list[int] = []

    def forward(self, x: Tensor, step: int) -> Tensor:
        for i, block in enumerate(self.blocks):
            if i in self.dropped and step % 2:
                bias = block.bias
                x.register_hook(lambda _, bias=bias: setattr(bias, "grad", None))
            x = torch.tanh(block(x))
        return x


def test_a_gradient_that_is_dropped_in_the_backward_is_not_stepped() -> None:
    """Nor by the update of its chunk inside that backward: the step makes it, of what is left."""

    def batch(step: int) -> tuple[Tensor, Tensor, int]:
        return (*CASE.batch(step), step)

    def loss(run: Plain, b: tuple[Tensor, Tensor, int]) -> Tensor:
        return F.mse_loss(run(b[0], step=b[2]).float(), b[1])

    case = Case("drops", _Drops, batch, loss)
    want = plain(case.build, RECIPE)
    run = _says_step(budgeted(case, RECIPE, 0.8, chunk_size=16384))
    chunk = [
        [run.engine._runtime.core.chunk(p._gm_slot.id)[0] for p in block.parameters()]
        for block in run.model.blocks
    ]
    dropped = [i for i in range(1, 8) if chunk[i][1] in chunk[i - 1]]
    assert dropped
    for each in (want, run):
        drive(each, case, 5)
        each.model.dropped = dropped
        drive(each, case, 4, first=5)
    assert immediate(run) > 0
    _finish(run, want)


# ---- refusals ------------------------------------------------------------------------------------


def _backward(run: Managed, step: int) -> None:
    torch.manual_seed(1000 + step)
    before = immediate(run)
    run.backward(CASE.loss(run, CASE.batch(step)))
    assert immediate(run) > before


def test_clipping_after_it_is_refused() -> None:
    """And the step that follows is still the right one."""
    want, run = _planned()
    _backward(run, 3)
    with pytest.raises(gs.GeminiError, match=r"used up by the update inside backward\(step=True\)"):
        run.engine.clip_grad_norm_(1.0)
    run.engine.step()
    run.zero_grad()
    torch.manual_seed(1003)
    want.backward(CASE.loss(want, CASE.batch(3)))
    want.finish()
    for each in (want, run):
        drive(each, CASE, 2, first=4)
    _finish(run, want)


def test_changed_hyperparameters_are_refused() -> None:
    _, run = _planned()
    _backward(run, 3)
    run.optimizer.param_groups[0]["lr"] *= 0.5
    with pytest.raises(gs.GeminiError, match="between backward"):
        run.engine.step()
    with pytest.raises(gs.GeminiError, match="closed by an earlier error"):
        CASE.loss(run, CASE.batch(4))
    with pytest.warns(RuntimeWarning, match="of no single step"):
        run.engine.close()


def test_reading_a_gradient_after_it_is_refused() -> None:
    want, run = _planned()
    _backward(run, 3)
    with pytest.raises(gs.GeminiError, match=r"used up"):
        _ = run.model.head.weight.grad.sum()
    run.engine.step()
    run.zero_grad()
    assert run.model.head.weight.grad is None
    torch.manual_seed(1003)
    want.backward(CASE.loss(want, CASE.batch(3)))
    want.finish()
    _finish(run, want)


def test_second_backward_without_zero_grad_is_refused() -> None:
    _, run = _planned()
    _backward(run, 3)
    run.engine.step()
    with pytest.raises(gs.GeminiError, match=r"zero_grad\(\) before the next backward"):
        run.engine.backward(CASE.loss(run, CASE.batch(4)))
    run.engine.close()


def test_second_step_without_backward_is_refused() -> None:
    """Torch would apply the same gradient once more; here it is gone."""
    _, run = _planned()
    _backward(run, 3)
    run.engine.step()
    with pytest.raises(gs.GeminiError, match="used up"):
        run.engine.step()
    run.engine.close()


def test_zero_grad_instead_of_step_is_refused() -> None:
    """The weights have been updated: a step that does not come cannot be taken back."""
    _, run = _planned()
    _backward(run, 3)
    with pytest.raises(gs.GeminiError, match="step"):
        run.zero_grad()
        drive(run, CASE, 1, first=4)
    with pytest.warns(RuntimeWarning, match=r"no optimizer\.step\(\) followed"):
        run.engine.close()


def test_forward_between_backward_and_step() -> None:
    """It must see the weights of before the step, or be refused."""
    want, run = _planned()
    _backward(run, 3)
    torch.manual_seed(1003)
    want.backward(CASE.loss(want, CASE.batch(3)))
    torch.manual_seed(8)
    with torch.no_grad():
        expected = CASE.loss(want, CASE.batch(50))
    torch.manual_seed(8)
    with torch.no_grad():
        try:
            got = CASE.loss(run, CASE.batch(50))
        except gs.GeminiError as error:
            assert "step" in str(error)
        else:
            assert_same_bits(got, expected)
    with pytest.warns(RuntimeWarning, match=r"no optimizer\.step\(\) followed"):
        run.engine.close()


class _Detached(nn.Module):
    """Uses a weight a second time without its gradient, in front of the use that has one."""

    def __init__(self, way: str):
        super().__init__()
        self.way = way
        self.stem = nn.Linear(48, 48)
        self.mid = nn.Linear(48, 48)
        self.tail = nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        if self.way == "parent":
            x = torch.tanh(F.linear(x, self.mid.weight.detach()))
        elif self.way == "kept":
            kept = self.mid.weight
            x = torch.tanh(F.linear(x, kept.detach()))
        elif self.way == "frozen":
            for p in self.mid.parameters():
                p.requires_grad_(False)
            x = torch.tanh(self.mid(x))
            for p in self.mid.parameters():
                p.requires_grad_(True)
        return self.tail(torch.tanh(self.mid(x)))


class _Leaf(nn.Module):
    """The same inside the unit that owns the weight."""

    def __init__(self, way: str):
        super().__init__()
        self.way = way
        self.stem = nn.Linear(48, 48)
        self.mid = _Own(way)
        self.tail = nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        out, weight = self.mid(torch.tanh(self.stem(x)))
        if self.way == "escaped":
            out = F.linear(torch.tanh(F.linear(out, weight.detach())), weight)
        return self.tail(torch.tanh(out))


class _Own(nn.Module):
    def __init__(self, way: str):
        super().__init__()
        self.way = way
        self.weight = nn.Parameter(torch.randn(48, 48) / 7)

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        if self.way == "escaped":
            return x, self.weight
        x = torch.tanh(F.linear(x, self.weight.detach()))
        return F.linear(x, self.weight), None


@pytest.mark.parametrize(
    ("way", "rates", "share"),  # each pair of values
    [
        (way, rates, (0.6, 1.0, 2.5)[(w + r) % 3])
        for w, way in enumerate(("parent", "kept", "frozen", "own", "escaped"))
        for r, rates in enumerate(("slow host", "slow copies"))
    ],
)
def test_detached_reuse_is_never_wrong(
    way: str, rates: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either the bits are right, or it is refused and the engine is closed with that text."""
    monkeypatch.setenv("GEMINI_RATES", RATES[rates])
    kind = _Leaf if way in ("own", "escaped") else _Detached
    case = Case("detached", lambda: kind(way), CASE.batch, _mse)
    want = plain(case.build, RECIPE)
    run = _says_step(budgeted(case, RECIPE, share, chunk_size=4096))
    drive(want, case, 6)
    try:
        drive(run, case, 6)
    except RuntimeError as error:
        assert "backward(step=True)" in _told(error)
        with pytest.raises(gs.GeminiError, match="closed by an earlier error"):
            run.engine._runtime.core.check()
        with pytest.warns(RuntimeWarning, match="of no single step"):
            run.engine.close()
    else:
        _finish(run, want)


class _Stop(Exception):
    pass


def _told(error: BaseException) -> str:
    """Its text and its notes."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


class _Bomb(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = CASE.build()
        self.tail = nn.Linear(48, 48)
        self.is_armed = False
        self.error: Callable[[], BaseException] = lambda: _Stop("the user's own error")

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner.stem(x)
        if self.is_armed:

            def explode(grad: Tensor) -> None:
                raise self.error()

            x.register_hook(explode)
        for block in self.inner.blocks:
            x = x + block(x)
        return self.tail(self.inner.head(x))


@pytest.mark.parametrize(
    "error", [_Stop, KeyboardInterrupt, torch.OutOfMemoryError, gs.GeminiMemoryError]
)
def test_error_in_a_backward_that_has_updated(error: type[BaseException]) -> None:
    """Some weights are new and some are not: the engine is closed, and says why from then on.

    The error is the one that was raised: whoever waits for it (an out-of-memory handler) finds it.
    """
    case = Case("bomb", _Bomb, CASE.batch, _mse)
    _, run = _planned(0.8, case)
    run.model.is_armed = True
    run.model.error = lambda: error("mine")
    before = immediate(run)
    with pytest.raises(error, match="mine") as caught:
        drive(run, case, 1, first=3)
    assert immediate(run) > before
    assert type(caught.value) is error
    told = _told(caught.value)
    assert "failed after it had updated" in told and "engine.close()" in told
    assert "load a checkpoint" in told
    later = rf"failed after it had updated.*{error.__name__}: mine.*load a checkpoint"
    with pytest.raises(gs.GeminiError, match=later):
        run.engine._runtime.core.check()
    run.model.is_armed = False
    with pytest.raises(gs.GeminiError, match=later):
        drive(run, case, 1, first=4)
    with pytest.warns(RuntimeWarning, match="failed after it had updated"):
        run.engine.close()


def _device_maps() -> int:
    """Mappings of the host device's memory in this process."""
    return Path("/proc/self/maps").read_text().count("memfd:gemini-blocks")


@pytest.mark.parametrize(("share", "dtype"), [(0.5, None), (1.2, torch.float32)])
def test_close_after_an_error_in_a_backward_that_has_updated(
    share: float, dtype: torch.dtype | None, recwarn: pytest.WarningsRecorder
) -> None:
    """An ordinary model of weights from before or after the step, an ordinary optimizer, and all memory back."""
    gc.collect()
    maps = _device_maps()
    case = Case("bomb", _Bomb, CASE.batch, _mse)
    want, run = _planned(share, case)
    model, optimizer, engine = run.model, run.optimizer, run.engine
    names = [n for n, p in model.named_parameters()]
    before = engine.model_state_dict()
    model.is_armed = True
    with pytest.raises(_Stop, match="own error") as raised:
        drive(run, case, 1, first=3)
    assert "failed after it had updated" in _told(raised.value)
    del run, raised
    recwarn.clear()
    with pytest.warns(RuntimeWarning, match="failed after it had updated") as told:
        engine.close(dtype)
    assert len(told) == 1 and told[0].filename == __file__
    engine.close(dtype)  # idempotent, and silent
    assert engine.closed and not recwarn.list
    gone = weakref.ref(engine)

    drive(want, case, 1, first=3)
    after = want.outcome().masters
    n_changed = 0
    for name, p in model.named_parameters():
        assert type(p) is nn.Parameter and p.grad is None and not hasattr(p, "_gm_slot")
        assert p.dtype is torch.float32  # in which it came
        is_old, is_new = torch.equal(p, before[name]), torch.equal(p, after[name])
        assert is_old or is_new, name
        n_changed += not is_old
    assert 0 < n_changed < len(names)
    assert gs.engine_of(model) is None
    assert type(optimizer) is gs.HybridAdam and not optimizer.state

    model.is_armed = False
    x, y = CASE.batch(9)
    F.mse_loss(model(x.to(p.dtype)).float(), y).backward()  # ordinary hooks, ordinary gradients
    assert all(p.grad is not None for p in model.parameters())
    optimizer.step()
    del engine, optimizer
    gc.collect()
    assert gone() is None and _device_maps() == maps

    fresh, again = plain(case.build, RECIPE), budgeted(case, RECIPE, share, chunk_size=4096)
    for each in (fresh, _says_step(again)):
        drive(each, case, 5)
    _finish(again, fresh)


def test_close_after_an_error_manages_the_same_model_again() -> None:
    """A checkpoint makes the model of an engine that had died as good as new."""
    case = Case("bomb", _Bomb, CASE.batch, _mse)
    want, run = _planned(0.8, case)
    state = run.engine.state_dict()
    run.model.is_armed = True
    with pytest.raises(_Stop, match="own error"):
        drive(run, case, 1, first=3)
    with pytest.warns(RuntimeWarning):
        run.engine.close()
    run.model.is_armed = False
    again = Managed(
        gs.manage(
            run.model,
            run.optimizer,
            device="cpu",
            precision=RECIPE.precision,
            chunk_size=4096,
            device_budget=run.engine._runtime.settings.device_budget,
        ),
        RECIPE,
    )
    again.losses = run.losses[:3]
    again.engine.load_state_dict(state)
    for each in (want, _says_step(again)):
        drive(each, case, 3, first=3)
    _finish(again, want)


def test_error_before_the_first_update() -> None:
    """Nothing has changed: the engine goes on, and the next step is right."""
    case = Case("bomb", _Bomb, CASE.batch, _mse)
    want, run = _planned(0.8, case)
    with pytest.raises(_Stop), run.engine.ends_step():
        raise _Stop
    run.zero_grad()
    for each in (want, run):
        drive(each, case, 3, first=3)
    _finish(run, want)


# ---- the same refusals on demand -----------------------------------------------------------------


def _on_demand() -> tuple[Plain, Managed]:
    """Nothing is planned yet, so nothing is updated inside backward: what is refused is the same."""
    want = plain(CASE.build, RECIPE)
    run = _says_step(budgeted(CASE, RECIPE, 0.5, chunk_size=4096))
    for each in (want, run):
        torch.manual_seed(7)
        loss = CASE.loss(each, CASE.batch(0))
        each.losses.append(loss.detach().float())
        each.backward(loss)
    assert immediate(run) == 0
    return want, run


def _goes_on(want: Plain, run: Managed) -> None:
    for each in (want, run):
        each.finish()
        drive(each, CASE, 2, first=1)
    _finish(run, want)


USES = {
    "clip": lambda run: run.engine.clip_grad_norm_(1.0),
    "clip_of_optimizer": lambda run: run.optimizer.clip_grad_norm_(1.0),
    "clip_value": lambda run: run.engine.clip_grad_value_(1.0),
    "norm": lambda run: run.engine.grad_norm(),
    "torch_clip": lambda run: nn.utils.clip_grad_norm_(run.model.parameters(), 1.0),
    "read": lambda run: run.model.head.weight.grad.sum(),
    "write": lambda run: run.model.head.weight.grad.mul_(2),
    "set": lambda run: setattr(
        run.model.head.weight, "grad", torch.ones_like(run.model.head.weight)
    ),
    "drop": lambda run: setattr(run.model.head.weight, "grad", None),
    "zero_grad": lambda run: run.engine.zero_grad(),
    "zero_grad_of_optimizer": lambda run: run.optimizer.zero_grad(set_to_none=False),
    "zero_grad_of_model": lambda run: run.model.zero_grad(),
    "backward": lambda run: CASE.loss(run, CASE.batch(1)).backward(),
    "announced": lambda run: run.engine.backward(CASE.loss(run, CASE.batch(1)), step=True),
}


@pytest.mark.parametrize("use", USES)
def test_what_comes_between_backward_and_step_is_refused_on_demand(use: str) -> None:
    """By name, and nothing has changed."""
    want, run = _on_demand()
    with pytest.raises(gs.GeminiError, match=r"(weight|bias).*step\(\)") as error:
        USES[use](run)
    assert "backward(step=True)" in str(error.value)
    assert "or backward without" not in str(error.value)  # which would not help now
    _goes_on(want, run)


@pytest.mark.parametrize("use", ["clip", "read", "backward", "announced", "step"])
def test_gradients_that_a_step_has_used_are_refused_on_demand(use: str) -> None:
    want, run = _on_demand()
    run.engine.step()
    with pytest.raises(gs.GeminiError, match=r"(weight|bias) was used up.*zero_grad\(\)"):
        run.engine.step() if use == "step" else USES[use](run)
    run.zero_grad()
    want.finish()
    for each in (want, run):
        drive(each, CASE, 2, first=1)
    _finish(run, want)


def test_changed_hyperparameters_are_refused_on_demand() -> None:
    want, run = _on_demand()
    group = run.optimizer.param_groups[0]
    lr, group["lr"] = group["lr"], 0.5
    with pytest.raises(gs.GeminiError, match=r"stem\.weight: hyperparam.*Nothing has been updated"):
        run.engine.step()
    group["lr"] = lr
    _goes_on(want, run)


def test_after_changed_hyperparameters_the_next_step_takes_them() -> None:
    """As the refusal says."""
    want, run = _on_demand()
    for each in (want, run):
        each.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(gs.GeminiError, match=r"optimizer\.step\(\) now is a step with these"):
        run.engine.step()
    _goes_on(want, run)


def test_a_step_that_finds_nothing_to_step_after_updates_says_that_it_closes_the_engine() -> None:
    _, run = _planned()
    _backward(run, 3)
    run.optimizer.param_groups[0]["params"] = []
    with pytest.raises(gs.GeminiError, match="no gradient to step.*load a checkpoint"):
        run.engine.step()
    with pytest.warns(RuntimeWarning, match="of no single step"):
        run.engine.close()


def test_an_error_in_backward_announces_nothing() -> None:
    case = Case("bomb", _Bomb, CASE.batch, _mse)
    want = plain(case.build, RECIPE)
    run = _says_step(budgeted(case, RECIPE, 0.5, chunk_size=4096))
    run.model.is_armed = True
    with pytest.raises(_Stop) as error:
        drive(run, case, 1)
    assert not hasattr(error.value, "__notes__")
    run.model.is_armed = False
    run.losses.clear()
    run.zero_grad()
    for each in (want, run):
        drive(each, case, 3)
    _finish(run, want)


def test_a_clipped_gradient_that_the_announced_backward_does_not_reach_is_stepped_as_in_torch() -> (
    None
):
    """The step before has clipped it, and there was no zero_grad(): it is the product that is stepped."""
    losses: list[list[Tensor]] = []
    for is_managed in (False, True):
        torch.manual_seed(3)
        model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        optimizer = gs.HybridAdam(model.parameters(), lr=1e-2)
        engine = gs.manage(model, optimizer, device="cpu") if is_managed else None
        for step in range(3):
            reached = model if step == 0 else model[:1]
            loss = sum((each(torch.ones(2, 8)).square().sum() for each in reached), torch.zeros(()))
            if step == 0:
                loss.backward()
                optimizer.clip_grad_norm_(1e-3)
            elif engine is not None:
                engine.backward(loss, step=True)
            else:
                loss.backward()
            optimizer.step()
            for parameter in (*model[0].parameters(), *(model[1].parameters() if step else ())):
                parameter.grad = None
        if engine is not None:
            engine.close()
        losses.append([parameter.detach().clone() for parameter in model.parameters()])
    for ours, plains in zip(*losses, strict=True):
        assert torch.equal(ours, plains)


def test_a_step_without_gradients_is_no_step() -> None:
    want, run = _on_demand()
    run.optimizer.param_groups[0]["params"], kept = [], run.optimizer.param_groups[0]["params"]
    run.engine.step()
    run.optimizer.param_groups[0]["params"] = kept
    _goes_on(want, run)


def test_closing_before_the_step_gives_weights_and_gradients_back() -> None:
    want, run = _on_demand()
    run.engine.close()
    masters = want.outcome().masters
    for (name, expected), got in zip(
        want.model.named_parameters(), run.model.parameters(), strict=True
    ):
        assert_same_bits(got.detach(), masters[name], name)
        assert_same_bits(got.grad, expected.grad.float(), name)


# ---- the schedule follows the loop ---------------------------------------------------------------


def _when(run: Managed) -> str:
    return str(run.engine._runtime.core.plan_info()["when"])


@pytest.mark.parametrize("clip", [None, 0.05], ids=["plain", "clips"])
def test_a_loop_that_begins_to_say_step_and_ends(clip: float | None) -> None:
    """What the last steps did decides; one that is other than those around it changes no plan."""
    want = plain(CASE.build, replace(RECIPE, clip=clip))
    run = budgeted(CASE, want.recipe, 0.5, chunk_size=4096)
    ways = [False] * 4 + [True] + [False] * 2 + [True] * 4 + [False] * 6
    found = []
    for step, says in enumerate(ways):
        for each in (want, run):
            each.recipe = replace(each.recipe, clip=None if says else clip)
        run.backward = lambda loss, says=says: run.engine.backward(loss, step=says)
        before = immediate(run)
        for each in (want, run):
            drive(each, CASE, 1, first=step)
        found.append(_when(run))
        assert (immediate(run) > before) == says
    assert found[:7] == ["deferred"] * 7
    assert found[9:11] == ["immediate"] * 2
    assert found[-1] == "deferred"
    _finish(run, want)
