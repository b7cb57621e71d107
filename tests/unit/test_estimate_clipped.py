"""Estimates of steps that clip beside runs: the same spares, the same speculated chunks, the same seconds."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gemini_strategy as gs
from gemini_strategy.estimates.machines import Machine, machine_of
from gemini_strategy.estimates.paper import PROCESS_BYTES
from gemini_strategy.machine.rates import REFERENCE
from gemini_strategy.report.tables import host_resident_bytes
from gemini_strategy.sizes import physical_memory
from helpers.profiled import small_llama as llama
from helpers.ranks import run_ranks, values

ROOT = Path(__file__).resolve().parents[2]
IDS = torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(0))
INPUTS = {"input_ids": IDS, "labels": IDS}
#: A machine so slow that compute, which a run measures and an estimate does not, does not count.
SLOW = {name: rate * 1e-13 for name, rate in REFERENCE.items()}
MACHINE = Machine("test", None, SLOW, 1e12, 1e12, 1e11)
QUIET, FIRES = 1e6, 1e-6
TIGHT: dict[str, Any] = {"precision": "bf16-mixed", "device_budget": "0.8MB"}
#: Of the host, beside the homes: for no spares, for some, for all.
ROOMS = {"none": 0, "some": 700_000, "all": 10**9}


def estimated(make: Any = torch.optim.AdamW, **how: Any) -> Any:
    arguments: dict[str, Any] = {"device": "cpu", "gpu": MACHINE, **TIGHT, **how}
    model = llama()
    return gs.estimate(model, INPUTS, optimizer=make(model.parameters()), **arguments)


@functools.cache
def homes(**how: Any) -> int:
    """Bytes of the host that homes take, whatever else it has."""
    return int(estimated(**how).host_bytes)


def trained(
    limit: float,
    n_steps: int = 1,
    micro_batches: int = 1,
    make: Any = torch.optim.AdamW,
    **how: Any,
) -> dict[str, Any]:
    """What a run with this limit of the norm plans."""
    model = llama()
    arguments: dict[str, Any] = {"device": "cpu", **TIGHT, **how}
    engine = gs.manage(model, make(model.parameters()), **arguments)
    for _ in range(n_steps):
        for _ in range(micro_batches):
            engine.backward(model(**INPUTS).loss)
        engine.clip_grad_norm_(limit)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    stats, plan = engine.stats(), engine._runtime.core.plan_info()
    engine.close()
    assert plan is not None
    return {**figures(plan), "taken": stats["spare_bytes"], "host_bytes": stats["host_bytes"]}


def figures(plan: Any) -> dict[str, Any]:
    names = ("hash", "n_speculated", "spare_bytes", "device_bytes", "h2d_bytes", "d2h_bytes")
    return {**{name: plan[name] for name in names}, "seconds": plan["step_seconds"]}


def same(run: dict[str, Any], schedule: Any) -> None:
    mine, run = figures(schedule.plan), dict(run)
    # A run measures compute: it takes milliseconds of these days.
    assert run.pop("seconds") == pytest.approx(mine.pop("seconds"), rel=1e-6)
    assert {key: run[key] for key in mine} == mine
    assert schedule.seconds == schedule.plan["step_seconds"]


@pytest.fixture(autouse=True)
def _slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_RATES", ",".join(f"{key}={value}" for key, value in SLOW.items()))


@pytest.mark.parametrize(("room", "policy"), [*((room, "auto") for room in ROOMS), ("some", "cpu")])
def test_a_clipped_step_is_planned_as_in_a_run(room: str, policy: str) -> None:
    budget = homes(placement_policy=policy) + ROOMS[room]
    result = estimated(placement_policy=policy, host_budget=budget)
    run = trained(QUIET, placement_policy=policy, host_budget=budget)
    same(run, result.schedules[0])
    assert run["taken"] == run["spare_bytes"] == result.spare_bytes
    assert run["host_bytes"] == result.host_bytes <= budget
    whens = ["speculated", "deferred", "immediate"]
    assert [s.when for s in result.schedules] == (whens[1:] if room == "none" else whens)
    n, of = run["n_speculated"], sum(result.schedules[0].plan["n_of_class"].values())
    assert (n > 0) == (room != "none")
    assert room != "some" or n < of
    deferred = next(s for s in result.schedules if s.when == "deferred")
    same(trained(FIRES, placement_policy=policy, host_budget=budget), deferred)
    assert (result.schedules[0].seconds < deferred.seconds) == (room != "none")


@pytest.mark.parametrize("room", ROOMS)
def test_a_clipped_step_of_another_optimizer_is_planned_as_in_a_run(room: str) -> None:
    """Of one whose own step() makes the updates."""
    how: dict[str, Any] = {"make": torch.optim.Adagrad, "device_budget": "0.6MB"}
    how["host_budget"] = homes(**how) + ROOMS[room]
    result, run = estimated(**how), trained(QUIET, **how)
    assert result.is_opaque
    same(run, result.schedules[0])
    assert run["taken"] == run["spare_bytes"] == result.spare_bytes
    assert (run["n_speculated"] > 0) == (room != "none")
    same(trained(FIRES, **how), next(s for s in result.schedules if s.when == "deferred"))


@pytest.mark.parametrize("policy", ["auto", "cpu"])
def test_micro_batches(policy: str) -> None:
    how: dict[str, Any] = {"placement_policy": policy}
    how["host_budget"] = homes(**how) + ROOMS["all"]
    result = estimated(micro_batches=2, **how)
    run = trained(QUIET, n_steps=4, micro_batches=2, **how)
    same(run, result.schedules[0])
    assert run["taken"] == result.spare_bytes > 0
    assert (run["n_speculated"] > 0) == (policy == "cpu")  # the first plan had spares on both


def _rank(rank: int, size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return trained(QUIET, **arguments)


def test_two_ranks(tmp_path: Path) -> None:
    budget = homes(ranks=2) + ROOMS["some"]
    result = estimated(ranks=2, host_budget=budget)
    assert result.schedules[0].when == "speculated"
    for run in values(run_ranks(2, tmp_path, _rank, {"host_budget": budget})):
        same(run, result.schedules[0])
        assert run["taken"] == result.spare_bytes
    text = " ".join(str(result).split())
    assert "for each rank" in text and "for clipping" in text


@functools.cache
def _of_an_unknown_host() -> Any:
    return estimated()


@pytest.mark.parametrize("half", [0, 700_000])
def test_without_a_budget_half_of_what_the_host_has_free(half: int) -> None:
    """Beside the process and the homes, as a run takes it; and nothing of a host that is not known."""
    free = -(-homes() * 64 // 63)  # so much that all homes are there beside what is left to others
    result = estimated(gpu=replace(MACHINE, host_memory=PROCESS_BYTES + free + 2 * half))
    told = estimated(host_budget=homes() + (free - homes()) // 2 + half)
    assert figures(result.schedules[0].plan) == figures(told.schedules[0].plan)
    assert result.spare_bytes == told.spare_bytes
    assert (result.spare_bytes > 0) == (half > 0)
    unknown = _of_an_unknown_host()
    assert unknown.spare_bytes == 0 and unknown.schedules[0].when == "deferred"
    assert "half of what this host has free" in " ".join(str(result).split())
    assert "of an unknown host" in " ".join(str(unknown).split())


def test_ranks_without_a_budget_have_even_shares_of_the_host() -> None:
    """As manage() gives them one."""
    host = 2 * (homes(ranks=2) + 300_000)
    result = estimated(ranks=2, gpu=replace(MACHINE, host_memory=host))
    told = estimated(ranks=2, host_budget=host // 2)
    assert result.schedules[0].when == "speculated"
    assert figures(result.schedules[0].plan) == figures(told.schedules[0].plan)


def test_the_host_device_is_this_machine() -> None:
    rates = {**SLOW, "half": 1e12, "single": 1e12, "bandwidth": 1e11}
    result = estimated(gpu="h100", rates=rates)
    same(trained(QUIET), result.schedules[0])
    assert result.spare_bytes > 0


def test_the_memory_of_a_host_is_known_where_its_gpu_is_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments: dict[str, Any] = {"device": "cuda", "device_budget": "3GB"}
    assert estimated(gpu="h100", **arguments).machine.host_memory is None
    about = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=85 * 10**9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    for gpu in (None, "h100"):
        found = estimated(gpu=gpu, **arguments).machine.host_memory
        assert host_resident_bytes() < found <= physical_memory()
    for gpu in ("h100-pcie", "rtx4090", machine_of("h100")):
        assert estimated(gpu=gpu, **arguments).machine.host_memory is None


def test_host_memory_buys_clipped_steps_and_no_others() -> None:
    whole = homes()
    results = [estimated(host_budget=whole + room) for room in ROOMS.values()]
    none, some, all_ = (result.schedules[0].seconds for result in results)
    assert some < none and all_ < none
    assert len({result.schedules[-1].seconds for result in results}) == 1
    gain = next(gain for gain in results[0].gains if gain.of == "host memory")
    assert gain.seconds == {"deferred": all_}
    of = [result.host_peak_bytes - result.spare_bytes for result in results]
    assert max(of) - min(of) < 1_000_000  # blocks, which are host memory here


def test_what_makes_a_step_longer_than_its_compute_is_named() -> None:
    """Part by part, until compute is left."""
    rates = {name: rate * 1e-5 for name, rate in REFERENCE.items()} | {"half": 1e9, "single": 1e9}
    result = estimated(gpu=machine_of("rtx4090", rates))
    assert [s.when for s in result.schedules] == list(result.parts) == ["deferred", "immediate"]
    for schedule in result.schedules:
        named = {part.what: part.seconds for part in result.parts[schedule.when]}
        assert ("updates that wait for the norm" in named) == (schedule.when == "deferred")
        assert named["updates on the host"] > 0 and named["copies"] > 0
        whole = sum(named.values()) + schedule.plan["compute_seconds"]
        assert whole == pytest.approx(schedule.seconds, rel=0.03)  # less than 1 % each is not named
    text = " ".join(str(result).split())
    for said in (
        "measured PCIe 0.00055 GB/s to the device and 0.00054 back; Adam on the host 5.3e-05 G",
        "s updates that wait for the norm, ",
        "more tokens 2 such micro-batches in a step: clipped",
    ):
        assert said in text
    (tokens,) = (gain for gain in result.gains if gain.of == "tokens")
    twice = estimated(gpu=machine_of("rtx4090", rates), micro_batches=2)
    assert tokens.tokens_per_s == {s.when: s.tokens_per_s for s in twice.schedules}


def test_what_is_assumed_of_a_machine_is_said() -> None:
    arguments: dict[str, Any] = {"device": "cuda", "device_budget": "3GB", "host_budget": "64GB"}
    text = " ".join(str(estimated(gpu="rtx4090", **arguments)).split())
    assert "assumed a desktop with two channels of DDR5: PCIe 27.5 GB/s" in text
    assert "Adam on the host 2.69 G parameters/s" in text and "products 121 TFLOPS" in text
    assert "host budget? if that is all that the host has, give 56GB: the system" in text
    arguments["host_budget"] = "50GB"
    text = " ".join(str(estimated(gpu="h100", **arguments)).split())
    assert "assumed a server of 16 cores: PCIe 55 GB/s" in text and "host budget?" not in text
    given = dict.fromkeys(REFERENCE, 1000000000.0)
    text = " ".join(str(estimated(gpu="h100", rates=given, **arguments)).split())
    assert "measured PCIe 1 GB/s" in text and "assumed products 722 TFLOPS" in text


def test_a_budget_that_is_all_of_this_host_is_questioned() -> None:
    whole = physical_memory()
    result = estimated(gpu=replace(MACHINE, host_memory=whole), host_budget=whole - 10**9)
    assert "host budget? this host has" in " ".join(str(result).split())


def test_what_the_text_says() -> None:
    result = estimated(host_budget=homes() + ROOMS["some"], sweep=["0.7MB", "1MB", "20kB"])
    n = result.schedules[0].plan["n_speculated"]
    text = " ".join(str(result).split())
    for said in (
        " step, clipped ",
        " step, the clip fires ",
        f" clipping {n} of ",
        "700 kB of the",
    ):
        assert said in text
    assert "Other budgets device budget clipped clip fires step=True tokens/s what binds" in text
    for one in result.sweep[:2]:
        speculated, deferred, _ = (schedule.seconds for schedule in one.schedules)
        assert speculated < deferred
    assert not result.sweep[2].fits and "missing" in text


@pytest.mark.parametrize("how", [{"precision": "16-mixed"}, {"placement_policy": "cuda"}])
def test_what_is_never_speculated(how: dict[str, Any]) -> None:
    arguments = {"device_budget": "8MB", "host_budget": "1GB", **how}
    result = estimated(**arguments)
    assert result.schedules[0].when == "deferred" and result.spare_bytes == 0
    assert "clipping" not in str(result)
    assert trained(QUIET, **arguments)["taken"] == 0


def test_clipped_steps_of_three_billion_parameters_on_an_h100(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside runs that are kept: case A of benchmarks/bench_offload.py, with a norm below its limit and above it."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from models import build_model
    from shapes import SHAPES

    meta = torch.device("meta")
    lines = (ROOT / "benchmarks/results/speculative_h100.jsonl").read_text().splitlines()
    quiet, fires = [run for run in map(json.loads, lines) if run["system"] == "gemini"][1:3]
    assert quiet["max_norm"] > 1 > fires["max_norm"]
    ids = torch.empty((quiet["sequences"], quiet["length"]), dtype=torch.long, device=meta)
    machine = machine_of("h100", quiet["plan"]["rates"])
    result = gs.estimate(
        build_model(SHAPES[quiet["model"]], meta, meta, torch.bfloat16),
        {"input_ids": ids, "labels": ids},
        gpu=replace(machine, host_memory=quiet["environment"]["host_memory_bytes"]),
        precision="bf16-true",
        device_budget=quiet["budget"],
    )
    clipped, fired, _ = result.schedules
    assert (clipped.when, fired.when) == ("speculated", "deferred")
    assert abs(clipped.seconds / quiet["step_seconds"] - 1) < 0.15
    assert abs(fired.seconds / fires["step_seconds"] - 1) < 0.15
    assert abs(result.device_peak_bytes / quiet["device_peak_bytes"] - 1) < 0.02
    assert abs(result.host_peak_bytes / quiet["host_peak_rss_bytes"] - 1) < 0.03
    # The other run had the model on the CPU first, which was more than it took afterwards.
    built = result.host_peak_bytes - result.spare_bytes + result.model_bytes
    assert abs(built / fires["host_peak_rss_bytes"] - 1) < 0.01
