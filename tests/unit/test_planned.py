"""Traces, plans and replay as a user meets them: what is planned, when it is made again, and that nothing shows.

Every training here is compared with the reference bit for bit; on top of that each test says what the engine
must have done meanwhile: followed a plan without waiting or mapping, kept a trace per shape of step, left a
plan that no longer fits and made another one.  All of it runs on the chaos device.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gemini_strategy as gs
from helpers import chaos
from helpers.pairs import pairs
from helpers.reference import (
    Managed,
    Plain,
    Recipe,
    assert_same_bits,
    assert_same_outcome,
    drive,
    plain,
    state_bytes,
)
from helpers.scenario import RATES, budgeted
from helpers.zoo import Case, mlp_case

pytestmark = pytest.mark.core  # make check runs these on a core with its own assertions

CASE = mlp_case(width=48, depth=4, p=0.1)
RECIPE = Recipe(precision="bf16-true", steps=6)


@pytest.fixture(autouse=True)
def _chaos(monkeypatch: pytest.MonkeyPatch) -> None:
    chaos.late(monkeypatch, 5)


def _rates(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("GEMINI_RATES", RATES[name])


def _finish(run: Managed, want: Plain) -> dict[str, Any]:
    """Compares, checks the device's findings, closes; the engine's stats."""
    engine = run.engine
    try:
        assert_same_outcome(run.outcome(), want.outcome())
        engine._runtime.core.check()
        assert chaos.faults() == (0, "")
        return engine.stats()
    finally:
        engine.close()


def _both(share: float, case: Case = CASE, recipe: Recipe = RECIPE, **how: Any) -> Iterator[Plain]:
    yield plain(case.build, recipe)
    yield budgeted(case, recipe, share, **{"chunk_size": 4096, **how})


def _evaluate(run: Plain, case: Case, step: int) -> None:
    run.model.eval()
    with torch.no_grad():
        run.losses.append(case.loss(run, case.batch(step)).float())
    run.model.train()


# ---- passes and traces ---------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_evaluation_first(share: float) -> None:
    """Evaluation is planned from its second batch on; training then gets a plan of its own."""
    want, run = _both(share)
    for each in (want, run):
        for step in range(4):
            _evaluate(each, CASE, 100 + step)
    before = run.engine.stats()
    assert before["planned"] and before["plans"] == 1 and before["traces"] == 1
    for each in (want, run):
        drive(each, CASE, 4)
        _evaluate(each, CASE, 200)
        drive(each, CASE, 2, first=4)
    stats = _finish(run, want)
    assert stats["planned"] and stats["plans"] >= 2 and stats["traces"] == 2


def test_evaluation_between_steps_has_its_own_trace() -> None:
    want, run = _both(0.5)
    for each in (want, run):
        for step in range(6):
            drive(each, CASE, 1, first=step)
            for batch in range(3):
                _evaluate(each, CASE, 100 + 3 * step + batch)
    stats = _finish(run, want)
    assert stats["traces"] == 2 and stats["planned"] and stats["deviations"] == 0


class _Decoder(nn.Module):
    """Called again and again on what it has produced, like a generation loop."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(29, 48)
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(5))
        self.head = nn.Linear(48, 29)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def _words(step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(400 + step)
    return torch.randint(0, 29, (3, 6), generator=g), torch.randint(0, 29, (3, 6), generator=g)


def _cross_entropy(run: Plain, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(run(batch[0]).float().flatten(0, 1), batch[1].flatten())


DECODER = Case("decoder", _Decoder, _words, _cross_entropy)


def _generate(run: Plain) -> list[int]:
    ids = torch.zeros(1, 1, dtype=torch.int64)
    with torch.inference_mode():
        for _ in range(9):
            ids = torch.cat((ids, run(ids)[:, -1:].argmax(-1)), dim=1)
    return ids.flatten().tolist()


def test_generation_between_steps() -> None:
    """Each token is one pass of one trace, and the plan holds."""
    want, run = _both(0.6, DECODER)
    words = []
    for each in (want, run):
        each.model.eval()
        words.append([_generate(each)])
        each.model.train()
        for step in range(4):
            drive(each, DECODER, 1, first=step)
            words[-1].append(_generate(each))
    assert words[0] == words[1]
    stats = _finish(run, want)
    assert stats["traces"] == 2 and stats["planned"]


class _Shapes(nn.Module):
    """The batch says which blocks run and in which order."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(48, 48)
        self.blocks = nn.ModuleList(nn.Linear(48, 48) for _ in range(6))
        self.head = nn.Linear(48, 48)

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        x = torch.tanh(self.stem(x))
        for i in order:
            x = x + torch.tanh(self.blocks[i](x))
        return self.head(x)


def _shapes_case(orders: list[tuple[int, ...]]) -> Case:
    def batch(step: int) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        g = torch.Generator().manual_seed(600 + step)
        x, y = torch.randn(4, 48, generator=g), torch.randn(4, 48, generator=g)
        return x, y, orders[step % len(orders)]

    def loss(run: Plain, batch: tuple[Tensor, Tensor, tuple[int, ...]]) -> Tensor:
        return F.mse_loss(run(batch[0], order=batch[2]).float(), batch[1])

    return Case("shapes", _Shapes, batch, loss)


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_two_shapes_of_step(share: float) -> None:
    """Each has its trace; both are known to the plan and are met again without a new one."""
    case = _shapes_case([(0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 4, 5), (5, 3, 1)])
    want, run = _both(share, case)
    for each in (want, run):
        drive(each, case, 9)
    settled = run.engine.stats()
    assert settled["traces"] == 2
    for each in (want, run):
        drive(each, case, 6, first=9)
    stats = _finish(run, want)
    assert stats["planned"] and stats["traces"] == 2
    assert stats["deviations"] - settled["deviations"] <= 6, "once per change of shape at most"


def test_every_step_is_another_shape() -> None:
    """No trace is ever met again; more shapes than traces are kept."""
    g = torch.Generator().manual_seed(3)
    orders = [tuple(torch.randperm(6, generator=g)[: 1 + i % 6].tolist()) for i in range(70)]
    case = _shapes_case(orders)
    want, run = _both(0.5, case)
    for each in (want, run):
        drive(each, case, 70)
    stats = _finish(run, want)
    assert stats["deviations"] > 0 and 2 <= stats["traces"] <= 64


def test_replanned_when_the_step_changes() -> None:
    """From one micro-batch to three, and back."""
    want, run = _both(0.5)
    plans = []
    for each in (want, run):
        for first, micro in ((0, 1), (4, 3), (8, 1)):
            each.recipe = Recipe(precision="bf16-true", accumulate=micro)
            drive(each, CASE, 4, first=first)
            plans.append(each.engine.stats()["plans"] if each.engine else 0)
    stats = _finish(run, want)
    assert stats["planned"] and stats["traces"] == 1
    assert plans[3] >= 1


# ---- what following a plan means -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "clip", "rates"),  # what the others do depends on no rate
    [
        *(("auto", (None, 0.3)[r % 2], rates) for r, rates in enumerate(RATES)),
        *((policy, clip, "slow host") for policy in ("cpu", "cuda") for clip in (None, 0.3)),
    ],
)
def test_no_wait_and_no_mapping(
    policy: str, clip: float | None, rates: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten planned steps: enter, leave, touch and gradients neither waited nor mapped."""
    _rates(monkeypatch, rates)
    recipe = Recipe(precision="bf16-true", clip=clip)
    want, run = _both(1.5 if policy == "cuda" else 0.5, recipe=recipe, placement_policy=policy)
    for each in (want, run):
        drive(each, CASE, 12)
    before = run.engine.stats()
    for each in (want, run):
        drive(each, CASE, 2, first=12)
    stats = run.engine.stats()
    if stats["plans"] == before["plans"]:  # a new one maps between two steps
        assert stats["mapping_seconds"] == before["mapping_seconds"] > 0
    plan = run.engine._runtime.core.plan_info()
    assert stats["planned"] and stats["plan_breaks"] == 0 and stats["deviations"] == 0
    assert stats["replay_waits"] == 0
    assert stats["device_peak_bytes"] <= stats["device_budget_bytes"]
    held = {c for c, n in plan["n_of_class"].items() if n}
    if policy == "cuda":
        assert held == {"R"}
    if policy == "cpu":
        assert held == {"C2"}
    _finish(run, want)


@pytest.mark.parametrize("says_step", [False, True])
@pytest.mark.parametrize("rates", list(RATES))
def test_predictions(rates: str, says_step: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures of a plan agree with each other, with what the engine holds and, to the byte, what steps copy."""
    _rates(monkeypatch, rates)
    for share in (0.3, 0.6, 1.2):
        run = budgeted(CASE, RECIPE, share, chunk_size=4096)
        engine = run.engine
        if says_step:
            run.backward = lambda loss, engine=engine: engine.backward(loss, step=True)
        drive(run, CASE, 6)
        plan, stats = engine._runtime.core.plan_info(), engine.stats()
        assert plan["when"] == ("immediate" if says_step else "deferred")
        assert 0 < plan["compute_seconds"] <= plan["step_seconds"] * 1.001
        assert 0 < plan["bound_seconds"] <= plan["step_seconds"] * 1.01
        for lane in ("h2d_seconds", "d2h_seconds", "host_seconds"):
            assert 0 <= plan[lane] <= plan["step_seconds"] * 1.05, lane
        assert plan["device_bytes"] <= stats["device_budget_bytes"]
        assert stats["device_bytes"] == plan["device_bytes"]
        assert sum(plan["n_of_class"].values()) == len(plan["classes"]) == stats["chunks"]
        rings = plan["weight_ring_bytes"] + plan["state_ring_bytes"] + plan["grad_ring_bytes"]
        assert rings <= plan["device_bytes"]
        before = engine._runtime.core.stats()
        drive(run, CASE, 2, first=6)
        after = engine._runtime.core.stats()
        where = f"share {share}: {plan['n_of_class']}"
        assert after["fetched_bytes"] - before["fetched_bytes"] == 2 * plan["h2d_bytes"], where
        assert after["evicted_bytes"] - before["evicted_bytes"] == 2 * plan["d2h_bytes"], where
        engine.close()


@pytest.mark.parametrize("rates", ["as measured", "slow towards the device"])
def test_more_memory_is_not_slower(rates: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what their measured ticks differ by, plans with more memory predict shorter steps."""
    _rates(monkeypatch, rates)
    last: dict[str, float] | None = None
    for share in (0.2, 0.4, 0.8, 1.6):
        run = budgeted(CASE, RECIPE, share, chunk_size=4096)
        drive(run, CASE, 6)
        plan = run.engine._runtime.core.plan_info()
        run.engine.close()
        if last is not None:
            noise = abs(plan["compute_seconds"] - last["compute_seconds"])
            most = last["step_seconds"] * 1.05 + 2 * noise
            assert plan["step_seconds"] <= most, f"share {share}"
        last = plan


def test_margin_zero_keeps_no_states_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    _rates(monkeypatch, "slow copies")
    want, run = _both(1.5, gpu_margin_mem_ratio=0.0)
    for each in (want, run):
        drive(each, CASE, 5)
    plan = run.engine._runtime.core.plan_info()
    assert plan["n_of_class"]["R"] == 0 and plan["n_of_class"]["C1"] > 0
    _finish(run, want)


def test_margin_one_uses_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    _rates(monkeypatch, "slow copies")
    want, run = _both(2.5, gpu_margin_mem_ratio=1.0)
    for each in (want, run):
        drive(each, CASE, 5)
    plan = run.engine._runtime.core.plan_info()
    assert plan["n_of_class"]["R"] == len(plan["classes"])
    _finish(run, want)


# ---- the step does not wait ----------------------------------------------------------------------


def _deferred(share: float = 0.3, chunk_size: int = 2048) -> tuple[Plain, Managed]:
    """Both after four steps, the managed one with updates that no pass has needed yet."""
    want, run = _both(share, chunk_size=chunk_size)
    for each in (want, run):
        drive(each, CASE, 4)
    stats = run.engine.stats()
    assert stats["planned"] and stats["pending_updates"] > 0
    return want, run


def test_step_leaves_updates_pending() -> None:
    want, run = _deferred()
    _finish(run, want)


def test_state_dict_right_after_step() -> None:
    want, run = _deferred()
    masters = run.engine.model_state_dict(masters=True)
    for name, value in want.outcome().masters.items():
        assert_same_bits(masters[name], value, name)
    assert run.engine.stats()["pending_updates"] == 0
    _finish(run, want)


def test_optimizer_state_right_after_step() -> None:
    want, run = _deferred()
    state, expected = run.optimizer.state_dict()["state"], want.optimizer.state_dict()["state"]
    for index, value in expected.items():
        assert_same_bits(state[index]["exp_avg"], value["exp_avg"], f"exp_avg {index}")
        assert_same_bits(state[index]["exp_avg_sq"], value["exp_avg_sq"], f"exp_avg_sq {index}")
    _finish(run, want)


def test_full_parameter_right_after_step() -> None:
    """Read for every parameter, last first; then one is written, and training goes on from there."""
    want, run = _deferred()
    expected = want.outcome().masters
    named = dict(run.model.named_parameters())
    for name in reversed(list(expected)):
        with run.engine.full_parameter(named[name]) as values:
            assert_same_bits(values, expected[name], name)
    _finish(run, want)


def test_parameter_read_outside_its_module_right_after_step() -> None:
    want, run = _deferred()
    expected = want.outcome().weights
    for name, p in reversed(list(run.model.named_parameters())):
        assert_same_bits((p * 1).detach(), expected[name], name)
    for each in (want, run):
        drive(each, CASE, 2, first=4)
    _finish(run, want)


def test_parameter_written_right_after_step() -> None:
    want, run = _deferred()
    for each in (want, run):
        p = each.model.head.weight
        if each.engine is None:
            low = each.optimizer.state[p]["remainder"]
            p.data.zero_()
            low.zero_()
        else:
            with each.engine.full_parameter(p) as values:
                values.zero_()
        drive(each, CASE, 3, first=4)
    _finish(run, want)


def test_evaluation_right_after_step() -> None:
    want, run = _deferred()
    for each in (want, run):
        _evaluate(each, CASE, 77)
        drive(each, CASE, 2, first=4)
    _finish(run, want)


def test_gradients_after_step_and_before_zero_grad() -> None:
    """`p.grad` shows what was stepped, also while the update that reads it is pending."""
    want, run = _both(0.3, chunk_size=2048)
    for step in range(5):
        for each in (want, run):
            torch.manual_seed(1000 + step)
            each.backward(CASE.loss(each, CASE.batch(step)))
            each.optimizer.step()
        theirs = dict(want.model.named_parameters())
        for name, p in run.model.named_parameters():
            assert_same_bits(p.grad, theirs[name].grad, f"step {step}: gradient of {name}")
        for each in (want, run):
            each.zero_grad()
    _finish(run, want)


def test_orders_of_zero_grad() -> None:
    """Before the pass, between forward and backward, right after the step, through the optimizer, to zeros."""
    want, run = _both(0.3, chunk_size=2048)
    for each in (want, run):
        for step in range(10):
            way = step % 5
            torch.manual_seed(1000 + step)
            if way == 0:
                each.optimizer.zero_grad()
            loss = CASE.loss(each, CASE.batch(step))
            if way == 1:
                each.optimizer.zero_grad()
            each.backward(loss)
            each.optimizer.step()
            if way in (1, 4):
                each.optimizer.zero_grad()
            elif way == 2:
                each.model.zero_grad(set_to_none=False)
            elif way == 3:
                each.optimizer.zero_grad(set_to_none=False)
    _finish(run, want)


def test_steps_without_zero_grad() -> None:
    """Gradients go on growing while updates that read them are pending."""
    want, run = _both(0.3, chunk_size=2048)
    for each in (want, run):
        for step in range(6):
            torch.manual_seed(1000 + step)
            each.backward(CASE.loss(each, CASE.batch(step)))
            each.optimizer.step()
        each.zero_grad()
    _finish(run, want)


def test_close_with_pending_updates() -> None:
    """The model that close() gives back has every update."""
    want, run = _deferred()
    run.engine.close()
    expected = want.outcome().masters  # it came in fp32
    for name, p in run.model.named_parameters():
        assert_same_bits(p.detach(), expected[name], name)


def test_optimizer_state_is_dropped_or_kept_by_close() -> None:
    """A second engine on the same model and optimizer goes on with the same bits."""
    want, run = _deferred()
    optimizer = run.optimizer
    run.engine.close()
    whole = state_bytes(CASE.build, RECIPE)
    engine = gs.manage(
        run.model,
        optimizer,
        precision="bf16-true",
        device="cpu",
        chunk_size=4096,
        device_budget=whole // 2,
    )
    again = Managed(engine, RECIPE)
    again.losses = run.losses
    for each in (want, again):
        drive(each, CASE, 3, first=4)
    _finish(again, want)


def test_copies_after_planned_steps() -> None:
    """copy.deepcopy and pickle of the model hold what the updates, also the pending ones, have made."""
    want, run = _deferred()
    copied = copy.deepcopy(run.model)
    pickled = pickle.loads(pickle.dumps(run.model))
    expected = want.outcome().masters  # it came in fp32
    for other in (copied, pickled):
        for name, p in other.named_parameters():
            assert_same_bits(p.detach(), expected[name], name)
    for each in (want, run):
        drive(each, CASE, 2, first=4)
    _finish(run, want)


def test_checkpoint_right_after_step() -> None:
    """A checkpoint of the moment, loaded into another engine, gives the same further steps."""
    want, run = _deferred()
    saved = copy.deepcopy(run.engine.state_dict())
    other = budgeted(CASE, RECIPE, 0.6, chunk_size=8192)
    drive(other, CASE, 3, first=50)  # planned, with other values
    other.engine.load_state_dict(saved)
    other.losses = list(run.losses)
    for each in (want, run, other):
        drive(each, CASE, 3, first=4)
    assert_same_outcome(other.outcome(), run.outcome())
    other.engine.close()
    _finish(run, want)


# ---- trouble -------------------------------------------------------------------------------------


class _Stop(Exception):
    pass


class _Bomb(nn.Module):
    """Raises in forward or in backward when told to."""

    def __init__(self):
        super().__init__()
        self.inner = CASE.build()
        self.tail = nn.Linear(48, 48)
        self.fuse: tuple[str, type[BaseException]] | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if self.fuse is not None and self.fuse[0] == "forward":
            raise self.fuse[1]
        if self.fuse is not None and self.fuse[0] == "backward" and x.requires_grad:
            error = self.fuse[1]

            def explode(grad: Tensor) -> None:
                raise error

            x.register_hook(explode)
        return self.tail(x)


def _bomb_loss(run: Plain, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(run(batch[0]).float(), batch[1])


BOMB = Case("bomb", _Bomb, CASE.batch, _bomb_loss)


@pairs(error=[_Stop, KeyboardInterrupt], where=["forward", "backward"], share=[0.3, 0.8])
def test_an_error_of_the_user(share: float, where: str, error: type[BaseException]) -> None:
    """The engine is usable after it and the bits are those of the same calls unmanaged."""
    want, run = _both(share, BOMB)
    for each in (want, run):
        for step in range(8):
            drive(each, BOMB, 1, first=step)
            if step in (0, 3, 4, 6):
                each.model.fuse = (where, error)
                torch.manual_seed(step)
                with pytest.raises(error):
                    each.backward(BOMB.loss(each, BOMB.batch(900 + step)))
                each.model.fuse = None
                each.zero_grad()
    stats = _finish(run, want)
    assert stats["planned"]


def test_an_error_between_backward_and_step() -> None:
    """Gradients that nobody steps are dropped by zero_grad, under a plan as without."""
    want, run = _both(0.4)
    for each in (want, run):
        drive(each, CASE, 4)
        torch.manual_seed(1)
        each.backward(CASE.loss(each, CASE.batch(500)))
        each.zero_grad()
        drive(each, CASE, 3, first=4)
    _finish(run, want)


def test_two_planned_engines() -> None:
    """Interleaved steps of two models under their own plans."""
    pairs = [tuple(_both(share)) for share in (0.3, 0.9)]
    for step in range(6):
        for want, run in pairs:
            for each in (want, run):
                drive(each, CASE, 1, first=step)
    for want, run in pairs:
        assert run.engine.stats()["planned"]
        _finish(run, want)


# ---- memory that moves ---------------------------------------------------------------------------


@pytest.mark.parametrize("rates", ["slow host", "slow copies"])
def test_others_take_memory_and_give_it_back(rates: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of the budget is asked for in the middle of a pass, and goes back later."""
    _rates(monkeypatch, rates)
    want, run = _both(0.9)
    for each in (want, run):
        drive(each, CASE, 4)
    core = run.engine._runtime.core
    before = run.engine.stats()
    third = before["device_budget_bytes"] // 3
    assert before["planned"]
    for each in (want, run):
        torch.manual_seed(42)
        loss = CASE.loss(each, CASE.batch(800))
        if each.engine is not None:
            assert core.reserve(third), "there is room when blocks are given back"
            core.set_external_bytes(third)
            assert core.stats()["device_bytes"] <= before["device_budget_bytes"] - third
        each.backward(loss)
        each.finish()
        drive(each, CASE, 4, first=4)
    during = run.engine.stats()
    assert during["planned"]
    if before["device_bytes"] > before["device_budget_bytes"] - third:
        assert during["plan_breaks"] > before["plan_breaks"]
    assert during["device_bytes"] <= before["device_budget_bytes"] - third
    core.set_external_bytes(0)
    for each in (want, run):
        drive(each, CASE, 4, first=8)
    _finish(run, want)


def test_more_than_there_is_is_refused() -> None:
    """What does not fit beside pinned weights is refused; the engine stays usable."""
    want, run = _both(0.6)
    for each in (want, run):
        drive(each, CASE, 4)
    budget = run.engine.stats()["device_budget_bytes"]
    assert not run.engine._runtime.core.reserve(budget + 1)
    for each in (want, run):
        drive(each, CASE, 4, first=4)
    stats = _finish(run, want)
    assert stats["planned"]


def test_below_the_floor_says_how_much() -> None:
    want, run = _both(0.5)
    for each in (want, run):
        drive(each, CASE, 3)
    core, budget = run.engine._runtime.core, run.engine.stats()["device_budget_bytes"]
    core.reserve(budget - 4096)
    core.set_external_bytes(budget - 4096)
    torch.manual_seed(5)
    with pytest.raises(gs.GeminiMemoryError, match=r"DEVICE: .*[kMG]B wanted"):
        CASE.loss(run, CASE.batch(3))
    core.set_external_bytes(0)
    run.zero_grad()
    for each in (want, run):
        drive(each, CASE, 4, first=3)
    _finish(run, want)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_torch_only_caches_is_asked_for(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that finds no room is tried once more after torch has given back what it does not use."""
    want, run = _both(0.5)
    for each in (want, run):
        drive(each, CASE, 3)
    core, budget = run.engine._runtime.core, run.engine.stats()["device_budget_bytes"]
    gave: list[int] = []

    def give_cached() -> bool:
        gave.append(core.stats()["device_bytes"])
        core.set_external_bytes(0)
        return True

    def take() -> None:
        core.reserve(budget - 4096)
        core.set_external_bytes(budget - 4096)

    monkeypatch.setattr(run.engine._runtime.memory, "give_cached", give_cached)
    for each in (want, run):
        torch.manual_seed(5)
        if each is run and where == "forward":
            take()
        loss = CASE.loss(each, CASE.batch(3))
        if each is run and where == "backward":
            take()
        each.backward(loss)
        each.finish()
        drive(each, CASE, 4, first=4)
    assert len(gave) == 1
    assert run.engine.stats()["traces"] == 1, "the second try is the same tick"
    _finish(run, want)


def test_asking_in_vain_still_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    want, run = _both(0.5)
    for each in (want, run):
        drive(each, CASE, 3)
    core, budget = run.engine._runtime.core, run.engine.stats()["device_budget_bytes"]
    monkeypatch.setattr(run.engine._runtime.memory, "give_cached", lambda: True)
    core.reserve(budget - 4096)
    core.set_external_bytes(budget - 4096)
    torch.manual_seed(5)
    with pytest.raises(gs.GeminiMemoryError, match=r"no room on the device for .*, for module "):
        CASE.loss(run, CASE.batch(3))
    core.set_external_bytes(0)
    run.zero_grad()
    for each in (want, run):
        drive(each, CASE, 4, first=3)
    _finish(run, want)


# ---- times --------------------------------------------------------------------------------------


class Sleeper(nn.Module):
    """A chain of which each forward uses the first `n` layers, and in which each layer takes its time."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(depth))
        self.seconds = 0.0
        for layer in self.layers:
            layer.register_forward_pre_hook(lambda *_: time.sleep(self.seconds))

    def forward(self, x: Tensor, n: int) -> Tensor:
        for layer in self.layers[:n]:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("n_shapes", [1, 3])
def test_compute_is_timed_under_a_plan(n_shapes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass of a step, however many differ, and not as fast as it was on demand."""
    chaos.late(monkeypatch, None)
    _rates(monkeypatch, "as measured")
    model = Sleeper(5)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = gs.manage(model, optimizer, device_budget=30_000, device="cpu", chunk_size=2048)
    lengths = [5 - shape for shape in range(n_shapes)]
    with contextlib.closing(engine):
        for _ in range(3 * n_shapes + 3):
            model.seconds = 0.012 if engine.stats()["planned"] else 0.001
            for n in lengths:
                model(torch.randn(2, 16), n).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert engine.stats()["traces"] == n_shapes
        assert engine._runtime.core.plan_info()["compute_seconds"] >= 0.012 * sum(lengths)


class Slow(torch.optim.SGD):
    """Each call of step() takes its time."""

    def step(self, closure: Any = None) -> None:
        time.sleep(0.05)
        super().step(closure)


def test_updates_of_the_step_are_no_compute_of_the_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the step issues at once is counted as updates, and not as work of the last gradient's tick, too."""
    chaos.late(monkeypatch, None)
    model = Sleeper(5)
    optimizer = Slow(model.parameters(), lr=0.01)
    engine = gs.manage(model, optimizer, device_budget=30_000, device="cpu", chunk_size=1200)
    with contextlib.closing(engine):
        for _ in range(5):
            model(torch.randn(2, 16), 5).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        plan = engine._runtime.core.plan_info()
        assert engine.stats()["chunks"] >= 8 and plan["when"] == "deferred"
        updates = sum(p.numel() for p in model.parameters()) / plan["rates"]["device_adam"]
        assert plan["compute_seconds"] - updates < 8 * 0.05  # the step issues eight


# ---- rates that steps correct --------------------------------------------------------------------


@pairs(policy=["auto", "cpu"], said=[5e4, 1e13], is_told=[False, True])  # too slow, too fast
def test_steps_correct_the_rate_of_the_host(
    monkeypatch: pytest.MonkeyPatch, is_told: bool, said: float, policy: str
) -> None:
    """After a host that is said to be too slow, or too fast, plans are made for the rate that its updates show.

    The core takes that rate in place of their times.  The plan that is made when a pass has run twice under the first
    one believes it, and stays.
    """
    shown = 1e6
    monkeypatch.setenv("GEMINI_TUNE", "1")
    rates = f"h2d=1e8,d2h=1e8,host_adam={1.5 * said},host_adam_beside={said},device_adam=1e8"
    monkeypatch.setenv("GEMINI_RATES", rates)
    want, run = _both(0.3, placement_policy=policy)
    run.engine._runtime.core.tell_host_rate(shown)
    assert run.engine.stats()["settling"]
    planned, settling, n_steps = [], [], 8
    drive(want, CASE, n_steps)
    for step in range(n_steps):
        torch.manual_seed(1000 + step)
        loss = CASE.loss(run, CASE.batch(step))
        run.losses.append(loss.detach().float())
        if is_told:
            run.engine.backward(loss, step=True)
        else:
            run.backward(loss)
        run.finish()
        plan = run.engine._runtime.core.plan_info()
        planned.append(round(plan["rates"]["host_adam_beside"]))
        settling.append(run.engine.stats()["settling"])
    stats = _finish(run, want)
    assert stats["plan_breaks"] == stats["replay_waits"] == 0
    assert settling == [1, 1] + [0] * 6
    assert 1 <= stats["plans"] <= 2  # a rate that makes the same plan again adopts none
    assert planned[:2] == [said] * 2 and planned[2:] in ([said] * 6, [shown] * 6)
    if policy == "cpu":  # all updates are the host's, whatever the plan is made from
        assert planned[2:] == [shown] * 6


def test_given_rates_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    _rates(monkeypatch, "as measured")
    want, run = _both(0.5)
    drive(want, CASE, 12)
    drive(run, CASE, 12)
    assert not run.engine.stats()["settling"]
    rates = run.engine._runtime.core.plan_info()["rates"]
    assert tuple(rates.values()) == run.engine._runtime.settings.rates and rates["h2d"] == 55e9
    _finish(run, want)
