"""What was wrong in the originals, each with a test that it is not here; and their wrappers on two ranks.

D1 and so on are the defects in the order of docs/originals.md. D12, of Lightning's strategy, is in
tests/integration/test_lightning_colossalai.py.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import gemini_strategy as gs
from gemini_strategy import colossalai, elixir
from helpers.ranks import run_ranks, values
from helpers.reference import merge_master
from helpers.saving import assert_same_model

ROOT = Path(__file__).parents[2]
RATES = "h2d=55e9,d2h=54e9"


@pytest.fixture(autouse=True)
def given_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_RATES", RATES)  # the ranks inherit it
    monkeypatch.setenv("GEMINI_THREADS", "1")


def layers(n: int = 6, width: int = 32) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(n)])


def managed(
    model: nn.Module, lr: float = 1e-2, **arguments: Any
) -> tuple[torch.optim.Optimizer, gs.Engine]:
    optimizer = gs.HybridAdam(model.parameters(), lr=lr)
    return optimizer, gs.manage(model, optimizer, device="cpu", **arguments)


def step(engine: gs.Engine, *losses: Tensor) -> None:
    for loss in losses:
        engine.backward(loss)
    engine.step()
    engine.zero_grad()


def test_every_name_is_in_the_tables() -> None:
    """Of the originals' arguments, and what the two packages offer."""
    page = (ROOT / "docs" / "originals.md").read_text()
    calls = [
        elixir.minimum_waste_search, elixir.optimal_search, elixir.ElixirModule,
        elixir.ElixirOptimizer, colossalai.GeminiDDP, colossalai.GeminiPlugin,
        colossalai.GeminiOptimizer, colossalai.ZeroInitContext, colossalai.Booster,
    ]  # fmt: skip
    names = {name for call in calls for name in inspect.signature(call).parameters}
    objects = {
        "m",
        "inp",
        "module",
        "model",
        "optimizer",
        "optim",
        "plugin",
        "process_group",
        "search_result",
    }
    ours = {*elixir.__all__, *colossalai.__all__} - {"SearchResult", "AMP_TYPE"}
    said = set(re.findall(r"\w+", page))
    assert sorted((names | ours) - objects - said) == []


# ---- one rank ----


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_d1_shares_are_of_bytes_and_each_chunk_counts_once(share: float) -> None:
    """Many parameters to a chunk: a sum over parameters would count each chunk sixteen times."""
    model = layers(64, 16)
    budget = 6 * sum(4 * p.numel() for p in model.parameters())
    _, engine = managed(
        model,
        chunk_size=12 << 10,
        block_size=4096,
        device_budget=budget,
        gpu_margin_mem_ratio=share,
    )
    for _ in range(3):
        step(engine, model(torch.ones(2, 16)).square().mean())
    stats, plan = engine.stats(), engine._runtime.core.plan_info()
    assert sum(plan["bytes_of_class"].values()) == stats["weight_bytes"]
    assert sum(plan["n_of_class"].values()) == stats["chunks"] == 8
    states = 2 * plan["bytes_of_class"]["R"]  # two moments in fp32 beside a weight in fp32
    assert states <= share * (budget - stats["weight_bytes"])
    assert (plan["n_of_class"]["R"] == 8) == (share == 1.0)
    engine.close()


def test_d2_an_overflow_in_accumulation_is_gone_after_its_step() -> None:
    def run(overflows: bool) -> dict[str, Tensor]:
        model = layers()
        _, engine = managed(model, precision="16-mixed", initial_scale=4.0, hysteresis=9)
        torch.manual_seed(1)
        for i in range(4):
            x = torch.randn(2, 4, 32)
            parts = [model(part).square().mean() for part in x]
            if i == 1:
                if not overflows:
                    continue
                parts[0] = parts[0] * 1e30
            step(engine, *parts)
        assert engine.stats()["skipped_steps"] == int(overflows)
        assert engine.stats()["steps"] == 3
        state = engine.model_state_dict()
        engine.close()
        return state

    assert_same_model(run(True), run(False))


def test_d3_clipping_holds_for_bf16_on_the_host() -> None:
    """The bits of HybridAdam with its own clipping, not those without."""

    def run(is_managed: bool, clip: float) -> dict[str, Tensor]:
        model = layers()
        optimizer = None
        if is_managed:
            optimizer, engine = managed(model, precision="bf16-true", placement_policy="cpu")
        else:
            gs.cast_model_(model, "bf16-true")
            optimizer = gs.HybridAdam(model.parameters(), lr=1e-2)
        torch.manual_seed(1)
        for _ in range(4):
            model(torch.randn(4, 32).bfloat16()).float().square().sum().backward()
            assert optimizer.clip_grad_norm_(clip) > 1e-2
            optimizer.step()
            optimizer.zero_grad()
        if is_managed:
            engine.close()
            return model.state_dict()
        lows = {name: optimizer.state[p]["remainder"] for name, p in model.named_parameters()}
        return {name: merge_master(p.detach(), lows[name]) for name, p in model.named_parameters()}

    clipped = run(True, 1e-2)
    assert_same_model(clipped, run(False, 1e-2))
    free = run(True, math.inf)
    assert any(not torch.equal(clipped[name], free[name]) for name in clipped)


@pytest.mark.parametrize("precision", ["bf16-true", "16-mixed"])
def test_d4_a_checkpoint_has_masters_and_the_scaler(tmp_path: Path, precision: str) -> None:
    model = layers()
    _, engine = managed(model, precision=precision, growth_interval=2, initial_scale=8.0)
    x = torch.ones(2, 32, dtype=torch.bfloat16 if precision == "bf16-true" else torch.float32)
    for _ in range(3):
        step(engine, model(x).float().square().mean())
    saved = engine.model_state_dict()
    half = saved["0.weight"].to(next(model.parameters()).dtype).float()
    assert saved["0.weight"].dtype is torch.float32
    assert not torch.equal(half, saved["0.weight"])  # more than a half-precision file would keep
    engine.save(tmp_path / "checkpoint")
    scale = None if engine.scaler is None else engine.scaler.state_dict()
    step(engine, model(x).float().square().mean())
    want = engine.model_state_dict()
    engine.close()
    model = layers()
    _, engine = managed(model, precision=precision, growth_interval=2, initial_scale=8.0)
    engine.load(tmp_path / "checkpoint")
    assert scale is None or engine.scaler.state_dict() == scale
    assert scale is None or scale["scale"] == 16
    assert_same_model(engine.model_state_dict(), saved)
    step(engine, model(x).float().square().mean())
    assert_same_model(engine.model_state_dict(), want)
    engine.close()


def test_d5_evaluation_between_steps_changes_nothing() -> None:
    """Passes of other lengths: the plan of the steps stays, and so do the bits."""

    def run(evaluates: bool) -> dict[str, Tensor]:
        model = layers(12)
        _, engine = managed(model, device_budget="60KB")
        torch.manual_seed(1)
        for i in range(8):
            x = torch.randn(4, 32)
            if evaluates:
                with torch.no_grad():
                    for part in (model, model[:5], model[2:4]) if i % 2 else (model[:1],):
                        part(x)
            step(engine, model(x).square().mean())
        stats = engine.stats()
        assert stats["planned"]
        assert stats["device_peak_bytes"] <= 60_000
        state = engine.model_state_dict()
        engine.close()
        return state

    assert_same_model(run(True), run(False))


def test_d7_a_growing_scale_is_the_one_that_was_used() -> None:
    """Powers of two change no bit of these gradients: growing at every other step gives what a fixed scale gives."""

    def run(**scaling: Any) -> tuple[Tensor, float]:
        model = Summed(8)
        optimizer = gs.HybridAdam(model.parameters(), lr=1e-2, eps=1.0)  # sizes of gradients count
        engine = gs.manage(model, optimizer, device="cpu", precision="16-mixed", **scaling)
        torch.manual_seed(1)
        for _ in range(5):
            engine.backward(model(torch.randint(1, 9, (8,)).float()))
            engine.clip_grad_norm_(0.5)
            step(engine)
        assert engine.stats()["skipped_steps"] == 0
        scale = engine.scaler.scale
        master = engine.model_state_dict()["weight"]
        engine.close()
        return master, scale

    growing, scale = run(initial_scale=4.0, growth_interval=2)
    fixed, same = run(initial_scale=4.0, growth_interval=1000)
    assert (scale, same) == (16, 4)
    assert torch.equal(growing, fixed)


def test_d9_clipping_by_an_argument_clips_and_what_is_unknown_is_no_argument() -> None:
    wrappers: dict[str, Callable[[nn.Module, Any], Any]] = {
        "elixir": lambda m, clip: elixir.ElixirOptimizer(
            elixir.ElixirModule(m, elixir.minimum_waste_search(m, 1)),
            gs.HybridAdam(m.parameters(), lr=1e-2),
            max_norm=clip,
        ),
        "gemini": lambda m, clip: (
            colossalai.Booster(plugin=colossalai.GeminiPlugin(max_norm=clip, precision="bf16"))
            .boost(m, gs.HybridAdam(m.parameters(), lr=1e-2))[1]
        ),
    }  # fmt: skip
    for make in wrappers.values():
        moments = []
        for clip in (0.0, 1e-4):
            model = layers()
            optimizer = make(model, clip)
            optimizer.backward(model(torch.ones(2, 32)).float().square().sum())
            optimizer.step()
            entry = optimizer.engine.optimizer_state_dict()["state"][0]
            moments.append(entry["exp_avg"].norm().item())
            optimizer.module.close()
        assert moments[1] < 1e-4 < moments[0]
    for call in (colossalai.GeminiPlugin, colossalai.GeminiDDP, elixir.ElixirModule):
        with pytest.raises(TypeError, match="unexpected keyword argument 'clipping_norm'"):
            call(clipping_norm=1.0)


def test_d10_a_norm_is_one_exact_sum_and_waits_for_no_chunk() -> None:
    model = layers(12)
    _, engine = managed(model, device_budget="60KB")
    for _ in range(4):
        engine.backward(model(torch.ones(4, 32)).square().mean())
        grads = [p.grad + 0 for p in model.parameters()]
        total = math.fsum(float(g) ** 2 for grad in grads for g in grad.double().flatten())
        assert engine.grad_norm() == math.sqrt(total)
        engine.clip_grad_norm_(1e-3)
        step(engine)
    assert engine.stats()["replay_waits"] == 0
    engine.close()


class Mixed(nn.Module):
    """Operations over parameters of several modules, baddbmm and addbmm, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.three = nn.Parameter(torch.randn(2, 8, 8))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.linear(x, self.a.weight, self.b.bias))
        y = torch.baddbmm(self.three, x.expand(2, 8, 8), self.three)
        return torch.addbmm(self.b.weight, y, self.three.transpose(1, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_d11_elixirs_search_and_states(dtype: torch.dtype) -> None:
    """Operations that its profiler refused, buffers that its load forgot, and clipping that it asserted away."""
    torch.manual_seed(0)
    model = Mixed()
    x = torch.randn(8, 8)
    found = elixir.optimal_search(
        model, 1, unified_dtype=dtype, inp=x,
        step_fn=lambda m, inp: m(inp).float().square().mean().backward(),
    )  # fmt: skip
    assert found.predicted is not None
    module = elixir.ElixirModule(model, found, dtype=dtype)
    adam = gs.HybridAdam(model.parameters())
    optimizer = elixir.ElixirOptimizer(module, adam, max_norm=0.1, initial_scale=4)
    for _ in range(2):
        optimizer.backward(module(x).float().square().mean())
        optimizer.step()
    assert optimizer.engine.stats()["steps"] == 2
    saved = module.state_dict()
    assert saved["norm.num_batches_tracked"] == 2
    other = Mixed()
    wrapped = elixir.ElixirModule(other, found, dtype=dtype)
    elixir.ElixirOptimizer(wrapped, gs.HybridAdam(other.parameters()))
    wrapped.load_state_dict(saved)
    assert_same_model(wrapped.state_dict(), saved)
    for each in (module, wrapped):
        each.close()


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_d13_buffers_and_inputs_keep_their_dtype(precision: str) -> None:
    seen: list[Tensor] = []

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
            self.stats = nn.BatchNorm1d(4)
            self.register_buffer("inv_freq", torch.tensor([1.0, 1e-3, 1e-5, 1 + 2**-20]))

        def forward(self, x: Tensor) -> Tensor:
            seen.append(x)
            return self.norm(self.stats(self.layer(x)) + self.inv_freq)

    model = Positions()
    frequencies = model.inv_freq.clone()
    _, engine = managed(model, precision=precision)
    out = model(torch.full((2, 4), 1 + 2**-20))
    assert seen[0].dtype is torch.float32
    assert out.dtype is torch.float32  # norms are computed in it
    assert torch.equal(model.inv_freq, frequencies)
    assert model.stats.running_mean.dtype is torch.float32
    assert next(model.stats.parameters()).dtype is torch.float32
    engine.close()


def test_d14_medians_are_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import bench_sharded
    import loops
    import sharded_loops

    modules: list[ModuleType] = [bench_sharded, loops, sharded_loops]
    for module in modules:
        assert module.median([5.0, 1.0, 2.0, 4.0, 3.0]) == 3.0
        assert module.median([4.0, 1.0, 2.0, 3.0]) == 2.5


# ---- two ranks ----


class Summed(nn.Module):
    """The gradient of the weight is the input."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum(dtype=torch.float32)


def reference(gradients: list[list[Tensor]]) -> Tensor:
    """Adam on one weight; each step has the gradients of its micro-batches, averaged over the ranks already."""
    weight = nn.Parameter(torch.zeros_like(gradients[0][0]))
    optimizer = gs.HybridAdam([weight], lr=1e-2)
    for parts in gradients:
        weight.grad = sum(parts[1:], parts[0].clone())
        optimizer.step()
    return weight.detach()


def d6_lengths_that_differ(rank: int) -> list[int]:
    """Every rank has its own number of tokens in every step, and its own peaks."""
    model = layers(12)
    _, engine = managed(model, device_budget="60KB")
    torch.manual_seed(7)
    for i in range(6):
        batches = [torch.randn(1 + (5 * i + 17 * r) % 24, 32) for r in range(2)]
        step(engine, model(batches[rank]).square().mean())
    plan, stats = engine._runtime.core.plan_info(), engine.stats()
    got = engine.model_state_dict()
    engine.close()
    plain = layers(12)
    optimizer = gs.HybridAdam(plain.parameters(), lr=1e-2)
    torch.manual_seed(7)
    for i in range(6):
        sums: list[Tensor] = []
        for r in range(2):
            plain(torch.randn(1 + (5 * i + 17 * r) % 24, 32)).square().mean().backward()
            grads = [p.grad / 2 for p in plain.parameters()]
            sums = grads if r == 0 else [a + b for a, b in zip(sums, grads, strict=True)]
            plain.zero_grad()
        for p, grad in zip(plain.parameters(), sums, strict=True):
            p.grad = grad
        optimizer.step()
        plain.zero_grad()
    assert_same_model(got, plain.state_dict())
    return [plan["hash"], stats["layout_hash"], stats["plan_breaks"]]


def d8_sums_of_large_halves(rank: int) -> None:
    """40,000 on each rank: their sum is no fp16, their mean is."""
    model = Summed(8)
    _, engine = managed(model, precision="16-mixed", initial_scale=1.0)
    engine.backward(model(torch.full((8,), 40_000.0)))
    assert engine.grad_norm() == math.sqrt(8 * 40_000.0**2)
    step(engine)
    assert engine.stats()["skipped_steps"] == 0
    engine.close()


def d11_an_overflow_on_one_rank(rank: int) -> list[float]:
    """All ranks skip, or none."""
    model = Summed(8)
    _, engine = managed(model, precision="16-mixed", initial_scale=4.0, hysteresis=1)
    for i in range(3):
        step(engine, model(torch.full((8,), math.inf if (i, rank) == (1, 1) else 1.0)))
    assert engine.stats()["skipped_steps"] == 1
    one = torch.ones(8)
    assert torch.equal(engine.model_state_dict()["weight"], reference([[one], [one]]))
    scale = engine.scaler.scale
    engine.close()
    return [scale]


def d15_accumulation_in_one_small_chunk(rank: int) -> None:
    """g1 + g2, whatever the number of ranks."""
    model = Summed(8)
    _, engine = managed(model)
    assert engine.stats()["chunks"] == 1
    torch.manual_seed(4)
    everything = torch.randn(3, 2, 2, 8)  # step, micro-batch, rank
    for parts in everything:
        step(engine, *[model(part[rank]) for part in parts])
    means = [[part[0] / 2 + part[1] / 2 for part in parts] for parts in everything]
    assert torch.equal(engine.model_state_dict()["weight"], reference(means))
    engine.close()


def elixir_is_manage(rank: int) -> list[Any]:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    found = elixir.optimal_search(
        layers(), 2, inp=torch.ones(4, 32), device_budget="64KB",
        step_fn=lambda m, x: loss_of(m, x).backward(),
    )  # fmt: skip
    model, plain = layers(), layers()
    module = elixir.ElixirModule(model, found, dist.GroupMember.WORLD)
    optimizer = elixir.ElixirOptimizer(
        module, gs.HybridAdam(model.parameters(), lr=1e-2), max_norm=0.05
    )
    _, engine = managed(plain, precision="32-true")
    torch.manual_seed(rank)
    for _ in range(3):
        x = torch.randn(4, 32)
        optimizer.backward(loss_of(module, x))
        optimizer.step()
        engine.backward(loss_of(plain, x))
        engine.clip_grad_norm_(0.05)
        step(engine)
    assert_same_model(module.state_dict(), engine.model_state_dict())
    assert bool(module.state_dict(only_rank_0=True)) == (rank == 0)
    assert module.engine.ranks.size == 2
    states = module.engine.chunk_states()
    assert all({"weight", "gathered", "unreduced"} <= {*found.pieces} for found in states)
    assert {found.state for found in states} <= {"FREE", "HOLD", "UPDATE"}
    module.close()
    engine.close()
    for size in (1, 3):
        with pytest.raises(ValueError, match=f"for {size} ranks, and the group has 2"):
            elixir.ElixirModule(layers(), elixir.minimum_waste_search(layers(), size))
    return [found.chunk_size, found.predicted["hash"]]


def colossalai_is_manage(rank: int, folder: Path) -> None:
    shards = colossalai.TensorShardStrategy()
    zero = {
        "model_config": {"shard_strategy": shards, "tensor_placement_policy": "auto"},
        "optimizer_config": {"initial_scale": 16},
    }
    colossalai.launch_from_torch({"zero": zero}, verbose=False)
    assert dist.get_world_size() == 2
    with colossalai.ZeroInitContext("cpu", shards, shard_param=True):
        model = layers()
    engine, *_ = colossalai.initialize(model, colossalai.HybridAdam(model.parameters(), lr=1e-2))
    first = engine.model.state_dict()
    plain = layers()
    plain.load_state_dict(first)
    _, own = managed(plain, precision="16-mixed", initial_scale=16.0)
    torch.manual_seed(rank)
    for _ in range(3):
        x = torch.randn(4, 32)
        engine.zero_grad()
        engine.backward(engine(x).square().mean())
        engine.step()
        step(own, plain(x).square().mean())
    want = own.model_state_dict()
    assert_same_model(engine.model.state_dict(), want)
    own.close()
    engine.close()
    booster = colossalai.Booster(plugin=colossalai.GeminiPlugin())
    wrapped, optimizer, *_ = booster.boost(model, gs.HybridAdam(model.parameters()))
    booster.save_model(wrapped, folder / "model")
    booster.save_optimizer(optimizer, folder / "optimizer")
    want = wrapped.state_dict()
    wrapped.load_state_dict({name: value + 1 for name, value in want.items()})
    booster.load_model(wrapped, folder / "model")
    booster.load_optimizer(optimizer, folder / "optimizer")
    assert_same_model(wrapped.state_dict(), want)
    with pytest.raises(gs.GeminiError, match="rank 0"):
        booster.save_model(wrapped, folder / "model" / "below a file")
    wrapped.close()


def _rank(rank: int, size: int, folder: str) -> list[Any]:
    os.environ["RANK"] = str(rank)
    d8_sums_of_large_halves(rank)
    d15_accumulation_in_one_small_chunk(rank)
    told: list[Any] = [d6_lengths_that_differ(rank), d11_an_overflow_on_one_rank(rank)]
    told.append(elixir_is_manage(rank))
    colossalai_is_manage(rank, Path(folder))
    return told


def test_d6_d8_d11_d15_and_the_wrappers_on_two_ranks(tmp_path: Path) -> None:
    """One start for all: processes cost more than what they do."""
    first, second = values(run_ranks(2, tmp_path, _rank, str(tmp_path)))
    assert first == second
    assert first[1] == [2.0]
