"""Estimates beside runs: the same layout, homes, passes and plans, and the memory of a pass that a run measures."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import BloomConfig

import gemini_strategy as gs
from gemini_strategy import cli
from gemini_strategy.estimates import forecast
from gemini_strategy.estimates.machines import GPUS, Machine, machine_of
from gemini_strategy.estimates.tensors import Live, Operations
from gemini_strategy.machine.rates import REFERENCE
from gemini_strategy.report.tables import host_resident_bytes
from helpers.profiled import small_llama as llama
from helpers.ranks import run_ranks, values

ROOT = Path(__file__).resolve().parents[2]
IDS = torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(0))
INPUTS = {"input_ids": IDS, "labels": IDS}
RUN_SAYS = ("layout_hash", "chunks", "host_bytes", "state_bytes", "weight_bytes")


def lora() -> Any:
    return peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules="all-linear"))


def reentrant() -> Any:
    """Its backward runs a backward inside a backward node."""
    model = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "dense": llama,
    "tied": lambda: llama(is_tied=True),
    "checkpointed": lambda: llama(is_checkpointed=True),
    "lora": lora,
    "reentrant": reentrant,
}


def machine(**rates: float) -> Machine:
    return Machine("test", None, REFERENCE | rates, 1e12, 1e12, 1e11)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize(
    ("name", "policy"), [*((name, "auto") for name in MODELS), ("lora", "cpu"), ("tied", "cuda")]
)
def test_what_is_planned_is_what_a_run_plans(
    name: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Places, classes and operations of every tick, on the host device.

    A plan also depends on how long the modules compute, which a run measures and an estimate does not: here all else
    takes so long that it does not count.
    """
    slow = dict.fromkeys(REFERENCE, 1.0)
    monkeypatch.setenv("GEMINI_RATES", ",".join(f"{key}={value}" for key, value in slow.items()))
    arguments: dict[str, Any] = {
        "precision": "bf16-mixed",
        "placement_policy": policy,
        "device_budget": None if policy == "cuda" else "1.5MB",
    }
    model = MODELS[name]()
    result = gs.estimate(model, INPUTS, device="cpu", gpu=machine(**slow), **arguments)
    assert [schedule.when for schedule in result.schedules] == ["deferred", "immediate"]
    for schedule in result.schedules:
        model = MODELS[name]()
        optimizer = torch.optim.AdamW(trained(model))
        engine = gs.manage(model, optimizer, device="cpu", **arguments)
        engine.backward(model(**INPUTS).loss, step=schedule.when == "immediate")
        optimizer.step()
        stats, plan = engine.stats(), engine._runtime.core.plan_info()
        engine.close()
        assert {key: stats[key] for key in RUN_SAYS} == {key: result.stats[key] for key in RUN_SAYS}
        assert plan["classes"] == schedule.plan["classes"]
        assert plan["hash"] == schedule.plan["hash"]
        assert plan["device_bytes"] == schedule.plan["device_bytes"]
        assert result.host_bytes == stats["host_bytes"]


def planned_rank(rank: int, size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    model = llama()
    engine = gs.manage(model, torch.optim.AdamW(trained(model)), device="cpu", **arguments)
    engine.backward(model(**INPUTS).loss)
    engine.optimizer.step()
    stats, plan = engine.stats(), engine._runtime.core.plan_info()
    engine.close()
    assert plan is not None
    return {
        **{key: stats[key] for key in RUN_SAYS},
        "hash": plan["hash"],
        "shards": stats["shards"],
    }


def test_ranks_plan_what_is_planned_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = dict.fromkeys(REFERENCE, 1.0)
    monkeypatch.setenv("GEMINI_RATES", ",".join(f"{key}={value}" for key, value in slow.items()))
    arguments = {"precision": "bf16-mixed", "device_budget": "0.8MB"}
    result = gs.estimate(llama(), INPUTS, device="cpu", gpu=machine(**slow), ranks=2, **arguments)
    plan = result.schedules[0].plan
    expected = {**{key: result.stats[key] for key in RUN_SAYS}, "hash": plan["hash"], "shards": 2}
    assert values(run_ranks(2, tmp_path, planned_rank, arguments)) == [expected] * 2
    assert result.tokens == 2 * IDS.numel()
    assert " 2 x test" in str(result) and "2 share each chunk" in str(result)
    alone = gs.estimate(llama(), INPUTS, device="cpu", gpu=machine(**slow), **arguments)
    assert 0.5 < result.host_bytes / alone.host_bytes < 0.55  # and some padding


def test_micro_batches_are_counted_as_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = dict.fromkeys(REFERENCE, 1.0)
    monkeypatch.setenv("GEMINI_RATES", ",".join(f"{key}={value}" for key, value in slow.items()))
    arguments: dict[str, Any] = {"precision": "bf16-true", "device_budget": "1.5MB"}
    result = gs.estimate(
        llama(), INPUTS, device="cpu", gpu=machine(**slow), micro_batches=3, **arguments
    )
    model = llama()
    optimizer = torch.optim.AdamW(trained(model))
    engine = gs.manage(model, optimizer, device="cpu", **arguments)
    for _ in range(4):  # the first plan is made within the first step, of one pass alone
        for _ in range(3):
            model(**INPUTS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    plan = engine._runtime.core.plan_info()
    engine.close()
    assert plan["hash"] == result.schedules[0].plan["hash"]
    assert plan["h2d_bytes"] == result.schedules[0].plan["h2d_bytes"]
    assert result.tokens == 3 * IDS.numel()


@pytest.mark.parametrize("name", MODELS)
def test_memory_of_a_pass_is_what_a_run_measures(name: str) -> None:
    result = gs.estimate(MODELS[name](), INPUTS, device="cpu", gpu=machine(), precision="32-true")
    model = MODELS[name]()
    live = Live()
    for parameter in model.parameters():
        live.exempt(parameter)
        if parameter.requires_grad:  # the engine takes gradients as they come
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    for tensor in {id(b): b for b in [*model.buffers(), IDS]}.values():
        live.note(tensor)
    with Operations(live, lambda work: None):
        model(**INPUTS).loss.backward()
    assert result.activation_bytes == live.most

    before = live.now
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        model(**INPUTS).loss.backward()
    now = most = 0
    for event in profiled.profiler.kineto_results.events():
        if (
            event.name() == "[memory]"
        ):  # the profiler counts bytes as asked for, not in pieces of 512
            pieces = -(-abs(event.nbytes()) // 512) * 512
            now += pieces if event.nbytes() > 0 else -pieces
            most = max(most, now)
    # It also counts what kernels take for themselves, such as a product's copies of its operands: so never less.
    assert 0.9 < result.activation_bytes / (most + before) <= 1


def test_checkpointing_is_seen() -> None:
    figures = [
        gs.estimate(MODELS[name](), INPUTS, device="cpu", gpu=machine()).activation_bytes
        for name in ("checkpointed", "dense")
    ]
    assert figures[0] < figures[1] / 2


def test_a_model_is_as_before() -> None:
    with torch.device("meta"):
        model = llama(is_checkpointed=True)
    before = {name: id(p) for name, p in model.named_parameters()}
    buffers = {name: id(b) for name, b in model.named_buffers()}
    gs.estimate(model, {key: value.to("meta") for key, value in INPUTS.items()}, gpu="h100")
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert {name: id(b) for name, b in model.named_buffers()} == buffers
    assert all(p.grad is None and p.is_meta for p in model.parameters())
    kinds = ("_forward_hooks", "_forward_pre_hooks")  # transformers leaves some of its own
    hooks = [h for m in model.modules() for kind in kinds for h in getattr(m, kind).values()]
    assert not any("Recorder" in repr(hook) for hook in hooks)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    # Neither has anything stayed on, nor is a model that ran refused afterwards.
    model = llama()
    engine = gs.manage(model, torch.optim.AdamW(model.parameters()), device="cpu")
    engine.backward(model(**INPUTS).loss)
    engine.close()


def kept(case: str) -> dict[str, Any]:
    """The last kept run of benchmarks/bench_offload.py under 24 GB, unclipped."""
    found = {}
    for line in (ROOT / "benchmarks/results/offload_h200.jsonl").read_text().splitlines():
        run = json.loads(line)
        if (run["case"], run["name"]) == (case, "gemini-auto") and run["budget"] == "24GB":
            found = run
    return found


@pytest.fixture
def _asks_for_no_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    """What more memory would buy is searched for again with each: a third of these tests, and not in question there.

    test_estimate_clipped.py has it.
    """
    monkeypatch.setattr(forecast, "_changed", lambda *_: {})


@pytest.mark.usefixtures("_asks_for_no_gains")
def test_a_model_is_let_go() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    forecast = gs.estimate(model, torch.empty(2, 4), gpu="h100")
    assert forecast.fits
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_bytes_around_the_chunks() -> None:
    """Of a model with a frozen weight and a buffer; the search for a chunk size is that of manage()."""
    model = nn.Sequential(nn.Linear(512, 256, bias=False), nn.BatchNorm1d(256))
    model[1].bias.requires_grad_(False)
    x = torch.empty(8, 512)
    found = gs.estimate(model, x, gpu="h100", device="cpu", precision="bf16-true")
    assert found.weight_bytes == 2 * 512 * 256 + 4 * 2 * 256  # norms keep fp32
    assert found.gradient_bytes == 2 * 512 * 256 + 4 * 256
    assert found.buffer_bytes == 2 * 1024 + 512  # running statistics, and their count
    wide = gs.estimate(model, x, gpu="h100", device="cpu", gradient_dtype=torch.float32)
    assert wide.gradient_bytes == 4 * (512 * 256 + 256)
    search = {"chunk_search_range": "16KiB", "chunk_search_n_grids": 4, "min_chunk_size": "8KiB"}
    found = gs.estimate(model, x, gpu="h100", device="cpu", **search)
    engine = gs.manage(model, device="cpu", **search)
    assert found.chunk_bytes == engine._runtime.chunk_bytes
    engine.close()
    with pytest.raises(ValueError, match="chunk_size=4096.*not both"):
        gs.estimate(model, x, gpu="h100", chunk_size=4096, min_chunk_size=4096)


def test_a_run_of_seven_billion_parameters_on_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a run that is kept: 6.66 G parameters under 24 GB, 8,192 tokens, checkpointing."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from models import build_model
    from shapes import SHAPES

    run, meta = kept("B"), torch.device("meta")
    model = build_model(SHAPES[run["model"]], meta, meta, torch.bfloat16)
    ids = torch.empty((run["sequences"], run["length"]), dtype=torch.long, device=meta)
    resident = host_resident_bytes()
    operations: list[Any] = []
    original = Operations.__torch_dispatch__

    def counted(self: Any, func: Any, *rest: Any) -> Any:
        operations.append(func)
        return original(self, func, *rest)

    monkeypatch.setattr(Operations, "__torch_dispatch__", counted)
    result = gs.estimate(
        model,
        {"input_ids": ids, "labels": ids},
        gpu="h200",
        rates=run["plan"]["rates"],
        precision="bf16-true",
        device_budget="24GB",
    )
    # Of 13.3 GB of weights and 93 GB of homes nothing is there.
    assert host_resident_bytes() - resident < 1 << 30
    assert result.stats["layout_hash"] == run["stats"]["layout_hash"]
    assert result.stats["chunks"] == run["stats"]["chunks"]
    # Sums of squares have places of their own since that run, and nothing else has changed: 1,408 bytes.
    assert 0 <= result.host_bytes - run["stats"]["host_bytes"] < 4096
    # torch's allocator and the driver are no computation: what they took of the GPU is known to a percent.
    assert abs(result.activation_bytes / run["torch_peak_bytes"] - 1) < 0.015
    measured = run["stats"]["outside_peak_bytes"]
    assert abs((result.pool_bytes + result.context_bytes) / measured - 1) < 0.01
    assert abs(result.planned_peak_bytes / run["device_train_peak_bytes"] - 1) < 0.011
    assert abs(result.device_peak_bytes / run["device_peak_bytes"] - 1) < 0.02
    # What the host and the copies do to each other is not wholly in the rates: most runs take longer.
    assert -0.15 < result.schedules[1].seconds / run["step_seconds"] - 1 < 0.05
    # Of 32 layers, each run twice and once backwards. No seconds are asked for: machines differ.
    assert 10_000 < len(operations) < 25_000


@pytest.mark.usefixtures("_asks_for_no_gains")
def test_adapters_beside_a_run_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """14 G frozen parameters under 24 GB: the first steps, on demand, fill the budget, and planned ones do not."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from bench_lora import adapted
    from models import build_model
    from shapes import SHAPES

    (line,) = (ROOT / "benchmarks/results/lora_h100.jsonl").read_text().splitlines()
    run, meta = json.loads(line), torch.device("meta")
    base = build_model(SHAPES[run["model"]], meta, meta, torch.bfloat16)
    model = adapted(base, int(run["rank"]))
    ids = torch.empty((int(run["sequences"]), int(run["length"])), dtype=torch.long, device=meta)
    result = gs.estimate(
        model,
        {"input_ids": ids, "labels": ids},
        gpu="h100",
        rates=run["gemini"]["rates"],
        precision="bf16-true",
        device_budget=run["budget"],
    )
    measured = float(re.search(r"device peak +[\d.]+ GB +([\d.]+) GB", run["gemini"]["report"])[1])
    assert measured == 23.5
    assert abs(result.device_peak_bytes / 1e9 / measured - 1) < 0.03
    assert result.planned_peak_bytes < 21e9
    host = result.host_peak_bytes + result.model_bytes  # which was built there
    assert abs(host / run["gemini"]["host_peak_bytes_above_start"] - 1) < 0.05
    assert abs(result.schedules[-1].seconds / run["gemini"]["step_seconds"] - 1) < 0.05
    then = f"{result.planned_peak_bytes / 1e9:.1f} GB"
    assert f"24 GB in the first steps, on demand; then {then}" in str(result)


@pytest.mark.usefixtures("_asks_for_no_gains")
def test_a_run_of_eight_billion_parameters_on_four_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a run that is kept: 72 GB for each rank, 4,096 tokens, clipped."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from models import build_model
    from shapes import SHAPES

    lines = (ROOT / "benchmarks/results/sharded_h200.jsonl").read_text().splitlines()
    run = next(r for r in map(json.loads, lines) if r["name"] == "gemini-auto@72GB")
    meta = torch.device("meta")
    model = build_model(SHAPES[run["model"]], meta, meta, torch.bfloat16, checkpointing=False)
    ids = torch.empty((1, run["length"]), dtype=torch.long, device="meta")
    result = gs.estimate(
        model,
        {"input_ids": ids, "labels": ids},
        gpu="h200",
        ranks=run["gpus"],
        rates=run["plan"]["rates"],
        precision="bf16-true",
        device_budget=run["budget"],
    )
    assert result.stats["layout_hash"] == run["stats"]["layout_hash"]
    # Since that run what is all on the device has no homes: staging and sums are left.
    assert result.host_bytes < 32 << 20 < run["stats"]["host_bytes"]
    assert abs(result.planned_peak_bytes / run["device_peak_bytes"] - 1) < 0.002
    assert abs(result.device_peak_bytes / run["device_peak_bytes"] - 1) < 0.02
    # The time of compute is too short by more, of which the ranks are no part: collectives run under it.
    assert 0.75 < result.schedules[0].seconds / run["step_seconds"] < 1
    assert result.tokens == run["gpus"] * run["tokens_per_gpu"]


def test_links_are_what_collectives_get() -> None:
    assert machine_of("h200").collective_rate(4) == pytest.approx(300e9)  # measured: 294 to 304
    assert machine_of("rtx4090").collective_rate(2) == pytest.approx(32e9)
    assert machine_of("h200", {"link": 1e9}).collective_rate(2) == 2e9
    assert machine().collective_rate(2) == 0.0


@pytest.mark.parametrize(
    ("budgets", "what"),
    [
        ({"host_budget": "100kB", "device_budget": "1MB"}, "host"),
        ({"device_budget": "20kB"}, "device"),
    ],
)
def test_a_budget_that_cannot_work_says_what_lacks(budgets: dict[str, str], what: str) -> None:
    arguments: dict[str, Any] = {"device": "cpu", "gpu": machine(), "precision": "bf16-true"}
    result = gs.estimate(llama(), INPUTS, **arguments, **budgets)
    assert not result.fits
    assert [refusal.what for refusal in result.refusals] == [what]
    refusal = result.refusals[0]
    assert refusal.missing == refusal.enough - (100_000 if what == "host" else 20_000)
    assert f"raise {what}_budget to" in str(result)
    option = f"{what}_budget"
    assert gs.estimate(llama(), INPUTS, **arguments, **budgets | {option: refusal.enough}).fits
    less = int(refusal.enough * 0.97)
    assert not gs.estimate(llama(), INPUTS, **arguments, **budgets | {option: less}).fits


def test_more_memory_never_takes_longer() -> None:
    sizes = ["0.8MB", "1MB", "1.2MB", "1.5MB", "2MB", "3MB"]  # of 1.5 MB of weights and states
    slow = machine_of("h100", {"h2d": 1e8, "d2h": 1e8, "host_adam": 1e6})
    # Blocks of 2 MiB are large beside this model; what is around them is not in question here.
    result = gs.estimate(llama(), INPUTS, device="cpu", gpu=slow, sweep=sizes)
    seconds = [one.schedules[0].seconds for one in result.sweep]
    assert seconds == sorted(set(seconds), reverse=True)  # these copies bind: each size counts


def test_a_model_that_asks_for_values_is_refused() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) if x.sum() > 0 else x

    with pytest.raises(gs.GeminiError, match="asks for values of its tensors"):
        gs.estimate(Asks(), torch.randn(2, 4), gpu="h100")


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_a_loss_outside_the_model_is_computed_as_under_manage(precision: str) -> None:
    """Precision is the model's forward's alone: a loss around it has the caller's inputs and no autocast."""
    seen: list[Any] = []

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((x.dtype, torch.is_autocast_enabled("cpu")))
            return super().forward(x)

    def step_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = (model(x) * x).sum()
        seen.append((x.dtype, torch.is_autocast_enabled("cpu")))
        return loss

    x, asked = torch.randn(4, 8), {"device": "cpu", "precision": precision}
    gs.estimate(Model(8, 8), x, gpu="h100", step_fn=step_fn, **asked)
    model = Model(8, 8)
    with gs.manage(model, torch.optim.AdamW(model.parameters()), **asked) as engine:
        engine.backward(step_fn(model, x))
    assert seen[:2] == seen[2:]
    assert seen[0] != seen[1]


def test_machines() -> None:
    assert set(machine_of("h100").rates) == set(REFERENCE)
    assert machine_of("NVIDIA GeForce RTX 4090").name == "rtx4090"
    with pytest.raises(ValueError, match="none is here, so name the one that is meant: v100"):
        machine_of(None)
    with pytest.raises(ValueError, match="no figures for the GPU 'rtx9999': known are v100"):
        machine_of("rtx9999")
    measured = machine_of("h200", {"rates": {"h2d": 1e9}, "machine": {}})
    assert measured.rates["h2d"] == 1e9
    assert measured.rates["h2d_both"] == pytest.approx(REFERENCE["h2d_both"] / 55)
    assert machine_of("h200", {"half": 5e14}).half == 5e14
    with pytest.raises(ValueError, match="'speed' is no rate"):
        machine_of("h200", {"speed": 1.0})
    assert all(gpu.half > gpu.single for gpu in GPUS.values())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    llama().config.save_pretrained(tmp_path)
    return tmp_path


def test_a_model_without_sdpa_is_estimated_as_it_runs(tmp_path: Path) -> None:
    BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4).save_pretrained(tmp_path)
    assert cli.main(["estimate", str(tmp_path), "--tokens", "2x16", "--gpu", "rtx4090"]) == 0


def test_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["estimate", str(folder), "--tokens", "2x16", "--gpu", "rtx4090"]
    assert (
        cli.main([*words, "--device-budget", "2GB", "--checkpointing", "--sweep", "1GB", "3GB"])
        == 0
    )
    text = capsys.readouterr().out
    for said in ("LlamaForCausalLM", "rtx4090", "device peak", "host peak", "tokens/s", "binds"):
        assert said in text
    assert "missing" in text  # 1 GB has no room for what the driver takes
    full = open("/dev/full", "w")  # noqa: SIM115
    with pytest.raises(OSError), full, contextlib.redirect_stdout(full):
        assert cli.main(words) == 2  # 1 says that it does not fit
    assert "No space left" in capsys.readouterr().err
    assert cli.main([*words, "--device-budget", "500MB"]) == 1
    assert "way out" in capsys.readouterr().out
    assert cli.main([*words, "--lora", "4"]) == 0
    assert "trained, bf16-mixed" in capsys.readouterr().out
    assert cli.main([*words, "--lora", "4", "--quantized", "nf4", "--ranks", "2"]) == 0
    assert " 2 x rtx4090" in capsys.readouterr().out
    assert cli.main([*words, "--quantized", "nf4"]) == 2
    assert "give --lora RANK" in capsys.readouterr().err
    assert cli.main([*words, "--device-budget", "24"]) == 2
    assert 'did you mean "24GB"?' in capsys.readouterr().err
    assert cli.main([*words, "--lora-targets", "q_proj"]) == 2
    assert "give --lora RANK" in capsys.readouterr().err
    assert cli.main([*words, "--lora", "4", "--lora-targets", "nothing"]) == 2
    assert "Target modules {'nothing'} not found" in capsys.readouterr().err


def trained_by(words: list[str], capsys: pytest.CaptureFixture[str]) -> float:
    assert cli.main(words) == 0
    found = re.search(r"([\d.]+) k trained", capsys.readouterr().out)
    assert found is not None
    return float(found[1])


def test_adapters_of_some_layers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["estimate", str(folder), "--tokens", "2x16", "--gpu", "rtx4090", "--lora", "4"]
    n = sum(4 * (m.in_features + m.out_features) for name, m in llama().named_modules()
            if name.endswith(("q_proj", "v_proj")))  # fmt: skip
    assert trained_by([*words, "--lora-targets", "q_proj,v_proj"], capsys) == round(n / 1000, 2)
    assert trained_by(words, capsys) > n / 1000


MISTYPED = {
    "list.json": "list.json holds a list, no JSON object",
    "text.json": "text.json holds a str, no JSON object",
    "torn.json": "torn.json cannot be read as JSON: Expecting property name",
    "bytes.json": "bytes.json cannot be read as JSON: ",
    "empty": "empty has no config.json",
    "nothing": "nothing is not there: give a Hugging Face folder or its config.json\n",
    "owner/name-8B": "names of the Hub are not looked up: `hf download owner/name-8B config.json",
    ". --device-budget 24": 'did you mean "24GB"?',
    ". --device-budget 1.5GX": "cannot read '1.5GX'",
    ". --host-budget 0": "host_budget: give bytes",
    ". --sweep 8GB none": "cannot read 'none'",
    ". --rates list.json": "list.json holds no object of figures",
    ". --gpu rtx9999": "no figures for the GPU 'rtx9999': known are v100",
    ". --tokens 8": "give sequences x length",
    ". --lora 0": "give a number of at least 1",
    ". --quantized nf4": "give --lora RANK",
    ". --lora-targets q_proj": "give --lora RANK",
}


def test_what_is_mistyped_is_said_before_torch_is_imported(folder: Path) -> None:
    (folder / "list.json").write_text("[1]")
    (folder / "text.json").write_text('"text"')
    (folder / "torn.json").write_text("{")
    (folder / "bytes.json").write_bytes(b"\xff\xfe")
    (folder / "empty").mkdir()
    program = """
import contextlib, io, json, sys
from gemini_strategy import cli
found = {}
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
        try:
            code = cli.main(words)
        except SystemExit as end:
            code = end.code
    assert "torch" not in sys.modules and "transformers" not in sys.modules, words
    found[" ".join(words)] = code, said.getvalue()
print(json.dumps(found))
"""
    asked = [["--version"], ["--help"], ["estimate", "--help"]]
    asked += [["estimate", *words.split()] for words in MISTYPED]
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(asked)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for words, text in MISTYPED.items():
        code, said = found[f"estimate {words}"]
        assert code == 2 and text in said, words
    assert found["--version"] == [0, f"gemini-strategy {gs.__version__}\n"]
    assert "COMMAND" in found["--help"][1] and "rtx4090" in found["estimate --help"][1]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"a": 1}, "Unrecognized model"),
        ({"model_type": "llama", "hidden_size": "many"}, "no causal language model"),
        ({"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 7}, "no causal language"),
        ({"model_type": "t5"}, "no causal language model can be made of it"),
    ],
)
def test_an_object_that_is_no_model(
    config: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.main(["estimate", str(tmp_path), "--gpu", "rtx4090"]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and str(tmp_path) in error


def test_the_package_without_transformers(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert cli.main(["estimate", str(folder)]) == 2
    assert "pip install 'gemini-strategy[transformers]'" in capsys.readouterr().err
