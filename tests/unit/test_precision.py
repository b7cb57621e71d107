"""What precision means: dtypes, rounding, casts at the root, the loss scale and overflow.

The scale trace is compared with `torch.amp.GradScaler` where the parameters have the same meaning
(hysteresis 1, no floor, no ceiling).  An overflow must leave every bit as it was.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gemini_strategy as gs
from helpers.pairs import pairs, turns
from helpers.reference import (
    Plain,
    Recipe,
    assert_same_bits,
    assert_same_outcome,
    bits,
    compute_dtype,
    drive,
    managed,
    plain,
)
from helpers.zoo import CASES, Case, Mlp, mlp_case

CASE = mlp_case(width=32, depth=3)
PRECISIONS = ("32-true", "bf16-true", "bf16-mixed", "16-mixed")


# ---- the scaler alone ----------------------------------------------------------------------------------


def _torch_trace(overflows: list[bool], **how: Any) -> list[float]:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", **how)
    trace = []
    for overflow in overflows:
        scaler.scale(weight.sum()).backward()
        if overflow:
            weight.grad.fill_(math.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        trace.append(scaler.get_scale())
    return trace


@pairs(rate=[0.05, 0.3, 1.0], interval=[1, 2, 7], factors=[(2.0, 0.5), (4.0, 0.25), (1.5, 0.75)])
def test_trace_equals_torch(rate: float, interval: int, factors: tuple[float, float]) -> None:
    growth, backoff = factors
    chance = random.Random(f"{rate}{interval}{growth}")
    overflows = [chance.random() < rate for _ in range(60)]
    want = _torch_trace(
        overflows,
        init_scale=2.0**16,
        growth_factor=growth,
        backoff_factor=backoff,
        growth_interval=interval,
    )
    scaler = gs.LossScaler(
        initial_scale=2.0**16,
        min_scale=2.0**-140,
        growth_factor=growth,
        backoff_factor=backoff,
        growth_interval=interval,
        hysteresis=1,
        max_scale=2.0**120,
    )
    got = []
    for overflow in overflows:
        scaler.update(overflow)
        got.append(scaler.scale)
    exact = growth in (2.0, 4.0)
    for step, (a, b) in enumerate(zip(got, want, strict=True)):
        if not math.isfinite(b) or b > 2.0**119 or b < 2.0**-120:
            break
        assert a == b if exact else math.isclose(a, b, rel_tol=1e-5), f"step {step}: {a} and {b}"


def test_hysteresis_counts_since_the_last_growth() -> None:
    scaler = gs.LossScaler(initial_scale=1024, growth_interval=3, hysteresis=2)
    trace = []
    for overflow in (True, False, True, True, False, False, False, True, True):
        scaler.update(overflow)
        trace.append(scaler.scale)
    assert trace == [1024, 1024, 512, 256, 256, 256, 512, 512, 256]


def test_floor_and_ceiling() -> None:
    scaler = gs.LossScaler(
        initial_scale=8, min_scale=4, max_scale=16, growth_interval=1, hysteresis=1
    )
    for _ in range(4):
        scaler.update(False)
    assert scaler.scale == 16
    for _ in range(6):
        scaler.update(True)
    assert scaler.scale == 4


def test_state_round_trip() -> None:
    one = gs.LossScaler(growth_interval=5)
    for overflow in (False, True, False, False):
        one.update(overflow)
    two = gs.LossScaler(growth_interval=5)
    two.load_state_dict(one.state_dict())
    for overflow in (False, False, False, True, False, True, True):
        one.update(overflow)
        two.update(overflow)
        assert one.scale == two.scale
    torch_scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=9)
    torch_scaler.scale(torch.ones(()))
    two.load_state_dict(torch_scaler.state_dict())
    assert two.scale == 128.0


# ---- dtypes and rounding -----------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_round_the_masters(precision: str) -> None:
    recipe = Recipe(precision=precision)
    run = managed(CASE.build, recipe, placement_policy="cpu", chunk_size=4096)
    try:
        assert run.engine.precision == precision
        drive(run, CASE, 5)
        result = run.outcome()
        dtype = compute_dtype(precision)
        for name, master in result.masters.items():
            weight = result.weights[name]
            owner = run.model.get_submodule(name.rpartition(".")[0])
            keeps = precision.endswith("mixed") and isinstance(owner, nn.LayerNorm)
            assert weight.dtype == (torch.float32 if keeps else dtype), name
            if weight.dtype == torch.bfloat16:
                wide = bits(master).to(torch.int64)
                high = ((wide + 0x8000) >> 16) & 0xFFFF
                assert torch.equal(high, bits(weight).to(torch.int64) & 0xFFFF), name
            else:
                assert_same_bits(weight, master.to(weight.dtype), name)
    finally:
        run.engine.close()


def test_initial_masters_are_the_users_weights() -> None:
    """Nothing of an fp32 model is lost by training it in bf16 or fp16."""
    for precision in PRECISIONS:
        recipe = Recipe(precision=precision)
        torch.manual_seed(recipe.seed)
        want = Mlp(depth=3).state_dict()
        run = managed(CASE.build, recipe, placement_policy="cpu", chunk_size=4096)
        got = run.engine.model_state_dict(masters=True)
        run.engine.close()
        assert list(got) == list(want)
        for name, value in want.items():
            assert_same_bits(got[name], value, f"{precision} {name}")


@pairs(
    source=[torch.float64, torch.float32, torch.bfloat16, torch.float16],
    precision=PRECISIONS,
    policy=["cpu", "cuda"],
)
def test_first_values_are_rounded_as_their_fp32_values_are(
    source: torch.dtype, precision: str, policy: str
) -> None:
    """Whatever dtype they have; every bf16 value is among them, and an fp32 value between any two."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
    every = torch.cat([every << 16, (every << 16) + 0x8000 - every % 3]).view(torch.float32)
    model = nn.Sequential(*(nn.Linear(256, 512, bias=False) for _ in range(3))).to(source)
    with torch.no_grad():
        for layer in model:
            layer.weight.copy_(every.to(source).reshape(512, 256))
    model[1].weight.data = model[1].weight.data.t().contiguous().t()  # another order
    model[2].weight.requires_grad_(False)
    want = [layer.weight.detach().clone().float() for layer in model]
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    engine = gs.manage(model, optimizer, precision=precision, device="cpu", placement_policy=policy)
    for layer, values in zip(model, want, strict=True):
        slot = layer.weight._gm_slot
        assert_same_bits(slot.read_weight(), slot.rounded(values), slot.name)
        if slot.has_low:
            values = torch.where(values.isnan(), torch.tensor(math.nan), values)
            assert_same_bits(slot.read_master(), values, slot.name)
    engine.close()


def test_close_in_fp32_gives_the_masters() -> None:
    recipe = Recipe(precision="bf16-true")
    run = managed(CASE.build, recipe, placement_policy="cpu", chunk_size=4096)
    drive(run, CASE, 3)
    masters = run.outcome().masters
    run.engine.close(dtype=torch.float32)
    for name, value in run.model.state_dict().items():
        assert_same_bits(value, masters[name], name)


def test_none_keeps_dtypes() -> None:
    """precision=None: a model that is partly bf16 trains as it is, without any cast at the root."""

    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(32, 32)
            self.b = nn.Linear(32, 32).bfloat16()
            self.c = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            assert x.dtype == torch.float32
            x = torch.tanh(self.a(x))
            return self.c(self.b(x.bfloat16()).float())

    def train(managed_run: bool) -> tuple[dict, list]:
        torch.manual_seed(0)
        model = Parts()
        optimizer = gs.HybridAdam(model.parameters(), lr=1e-2)
        engine = None
        if managed_run:
            engine = gs.manage(
                model, optimizer, device="cpu", placement_policy="cpu", chunk_size=4096
            )
        losses = []
        for step in range(6):
            x, y = CASE.batch(step)
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        if engine is not None:
            engine.close()
        return model.state_dict(), losses

    got, want = train(True), train(False)
    for a, b in zip(got[1], want[1], strict=True):
        assert_same_bits(a, b, "loss")
    for name in want[0]:
        assert_same_bits(got[0][name], want[0][name], name)


class _Probe(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(4))
        self.saw: list[Any] = []

    def forward(self, x: Tensor, more: dict[str, Any], *, ids: Tensor) -> dict[str, Any]:
        self.saw = [x.dtype, more["y"][0].dtype, ids.dtype, torch.is_autocast_enabled("cpu")]
        return {"out": self.lin(x.to(self.lin.weight.dtype)), "ids": ids, "text": "kept"}


@pytest.mark.parametrize(
    ("precision", "convert", "want"),
    [
        ("32-true", True, [torch.float32, torch.float32, torch.int64, False]),
        ("bf16-true", True, [torch.bfloat16, torch.bfloat16, torch.int64, False]),
        ("bf16-true", False, [torch.float32, torch.float32, torch.int64, False]),
        ("bf16-mixed", True, [torch.float32, torch.float32, torch.int64, True]),
        ("16-mixed", True, [torch.float32, torch.float32, torch.int64, True]),
    ],
)
def test_inputs_at_the_root(precision: str, convert: bool, want: list) -> None:
    model = _Probe()
    engine = gs.manage(
        model,
        gs.HybridAdam(model.parameters()),
        device="cpu",
        precision=precision,
        convert_inputs=convert,
        placement_policy="cpu",
    )
    out = model(torch.ones(2, 4), {"y": [torch.ones(1)]}, ids=torch.ones(3, dtype=torch.int64))
    assert model.saw == want
    assert out["out"].dtype == compute_dtype(precision)
    assert out["text"] == "kept" and out["ids"].dtype == torch.int64
    assert not torch.is_autocast_enabled("cpu")
    assert model.table.dtype == torch.float32
    engine.close()


def test_outputs_in_fp32() -> None:
    model = _Probe()
    engine = gs.manage(
        model,
        gs.HybridAdam(model.parameters()),
        device="cpu",
        precision="bf16-true",
        force_outputs_fp32=True,
        placement_policy="cpu",
    )
    out = model(torch.ones(2, 4), {"y": [torch.ones(1)]}, ids=torch.ones(3, dtype=torch.int64))
    assert out["out"].dtype == torch.float32 and out["ids"].dtype == torch.int64
    out["out"].sum().backward()
    engine.step()
    engine.close()


def test_running_statistics_keep_fp32() -> None:
    case = next(c for c in CASES if c.name == "batch_norm")
    for precision in ("bf16-true", "bf16-mixed"):
        run = managed(case.build, Recipe(precision=precision), placement_policy="cpu")
        drive(run, case, 1)
        weights = run.outcome().weights
        run.engine.close()
        assert weights["bn1.weight"].dtype == weights["bn1.running_var"].dtype == torch.float32
        assert weights["bn1.num_batches_tracked"].dtype == torch.int64
        assert weights["conv1.weight"].dtype == torch.bfloat16


# ---- overflow -------------------------------------------------------------------------------------------


def _bad(case: Case, where: int, value: float) -> Case:
    """The case with an input element of one batch replaced."""

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = case.batch(step)
        if step == where:
            x = x.clone()
            x[-1, -1] = value
        return x, y

    return Case("bad", case.build, batch, case.loss)


@pairs(policy=["cpu", "cuda"], clip=[None, 0.5], accumulate=[1, 3])
def test_natural_overflow(policy: str, clip: float | None, accumulate: int) -> None:
    """A scale that starts far too high, and grows often: skips, backs off, trains; bits as unmanaged."""
    recipe = Recipe(
        precision="16-mixed",
        clip=clip,
        accumulate=accumulate,
        initial_scale=2.0**24,
        growth_interval=3,
        hysteresis=1,
    )
    reference = plain(CASE.build, recipe)
    run = managed(CASE.build, recipe, placement_policy=policy, chunk_size=4096)
    try:
        for which in (run, reference):
            drive(which, CASE, 24)
        want = reference.outcome()
        assert 0 < want.skipped < 20
        assert_same_outcome(run.outcome(), want)
        stats = run.engine.stats()
        assert stats["skipped_steps"] == want.skipped and stats["loss_scale"] == want.scales[-1]
    finally:
        run.engine.close()


@turns(value=[math.inf, -math.inf, math.nan], micro=[0, 2])
def test_skip_leaves_every_bit(value: float, micro: int) -> None:
    recipe = Recipe(precision="16-mixed", accumulate=3, clip=1.0, hysteresis=1)
    case = _bad(CASE, 3 * 2 + micro, value)
    run = managed(case.build, recipe, placement_policy="cpu", chunk_size=4096)
    try:
        drive(run, case, 2)
        before = run.outcome()
        drive(run, case, 1, first=2)
        after = run.outcome()
        assert after.skipped == 1
        assert after.scales[-1] == before.scales[-1] / 2
        for part in ("weights", "masters", "exp_avg", "exp_avg_sq"):
            for key, want in getattr(before, part).items():
                assert_same_bits(getattr(after, part)[key], want, f"{part} {key}")
        assert after.counts == before.counts
        drive(run, case, 1, first=3)
        assert run.outcome().counts != before.counts
    finally:
        run.engine.close()


def test_engine_trace_equals_torch() -> None:
    """The engine's scales follow torch's GradScaler when both see the same overflows."""
    recipe = Recipe(precision="16-mixed", initial_scale=2.0**22, growth_interval=4, hysteresis=1)
    run = managed(
        CASE.build,
        recipe,
        placement_policy="cpu",
        min_scale=2.0**-20,
        max_scale=2.0**60,
    )
    try:
        overflows = []
        for step in range(30):
            before = run.skipped
            drive(run, CASE, 1, first=step)
            overflows.append(run.skipped > before)
        assert True in overflows and False in overflows
        assert run.scales == _torch_trace(overflows, init_scale=2.0**22, growth_interval=4)
    finally:
        run.engine.close()


@turns(value=[math.inf, math.nan], precision=["32-true", "bf16-true"])
def test_nonfinite_without_scaling_is_as_unmanaged(value: float, precision: str) -> None:
    """Without a loss scale nothing is skipped: NaNs arrive exactly as in the reference."""
    case = _bad(CASE, 2, value)
    recipe = Recipe(precision=precision)
    reference = plain(case.build, recipe)
    run = managed(case.build, recipe, placement_policy="cpu", chunk_size=4096)
    try:
        for which in (run, reference):
            drive(which, case, 3)
        got, want = run.outcome(), reference.outcome()
        got.losses, want.losses = got.losses[:3], want.losses[:3]
        assert_same_outcome(got, want)
        assert got.skipped == 0
    finally:
        run.engine.close()


def test_backward_verbs() -> None:
    """engine.backward scales in 16-mixed and is loss.backward() elsewhere; engine.scaler says so."""

    def gradient(run: Plain, plain_verb: bool) -> Tensor:
        torch.manual_seed(1)
        loss = CASE.loss(run, CASE.batch(0))
        loss.backward() if plain_verb else run.engine.backward(loss)
        norm = run.engine.grad_norm()
        run.zero_grad()
        return torch.tensor(norm)

    for precision in PRECISIONS[:3]:
        run = managed(CASE.build, Recipe(precision=precision), placement_policy="cpu")
        assert run.engine.scaler is None
        assert_same_bits(gradient(run, True), gradient(run, False))
        run.engine.close()
    run = managed(CASE.build, Recipe(precision="16-mixed"), placement_policy="cpu")
    assert run.engine.scaler.scale == Recipe().initial_scale
    full = managed(CASE.build, Recipe(precision="32-true"), placement_policy="cpu")
    a, b = gradient(run, False).item(), gradient(full, False).item()
    assert math.isclose(a, b, rel_tol=0.02), "grad_norm is of unscaled gradients"
    run.engine.close()
    full.engine.close()
