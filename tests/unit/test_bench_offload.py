"""The offload benchmark on its tiny preset: every run in a process of its own, one JSON line each.

Driver and runs are forks of a process that has imported what they need (helpers/program.py); one that has figures, one
without its library and one that is too slow are started as a person starts them.
"""

from __future__ import annotations

import math
import os
import queue
import select
import subprocess
import sys
import types
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from gemini_strategy import _C
from gemini_strategy.machine.rates import REFERENCE
from helpers.forked import Forks
from helpers.json_lines import json_lines

ROOT = Path(__file__).parents[2]
RUNS = ("resident", "hybrid-clip", "fsdp2", "gemini-auto-clip", "gemini-cpu-clip", "gemini-auto")
# Among them, so that it shows that the others go on: states that do not fit, and what cannot run here.
FAILING = "gemini-cuda"
MISSING = {
    "deepspeed-clip": "import deepspeed: ImportError: not on this machine",
    "deepspeed-z2-clip": "import deepspeed: ImportError: not on this machine",
    "torchao": "CPUOffloadOptimizer of torchao wants a GPU",
}
STEPS, WARMUP = 3, 2
IMPORTED = (
    "transformers.models.auto.auto_factory",
    "transformers.models.opt.modeling_opt",
    "torch.distributed.fsdp",
    "helpers.program",
)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The driver as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import bench_offload

    return bench_offload


def command(folder: Path, *options: str) -> tuple[list[str], list[str]]:
    """What stands after `python`, and the folders where it looks for modules."""
    (folder / "deepspeed.py").write_text("raise ImportError('not on this machine')\n")
    driver = str(ROOT / "benchmarks" / "bench_offload.py")
    words = [driver, "--device", "cpu", "--preset", "tiny", "--threads", "1", *options]
    return words, [str(folder), str(ROOT)]


def drive(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    words, paths = command(folder, *options)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def lines_of(text: str) -> dict[str, dict[str, Any]]:
    return {line["name"]: line for line in json_lines(text)}


def test_drivers_start_without_torch() -> None:
    """Its import takes longer than all that a driver does for a run."""
    program = "import sys, bench_offload, bench_sharded; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT / "benchmarks", check=True)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("bench")
    out = folder / "results" / "tiny.jsonl"
    names = (FAILING, *MISSING, *RUNS)
    options = ("--steps", str(STEPS), "--warmup", str(WARMUP), "--only", ",".join(names))
    words, paths = command(folder, *options, "--out", str(out))
    with Forks((), IMPORTED, has_had_engine=False) as forks:
        (ended,) = forks.run("helpers.program:started", str(folder), words, paths, {}, timeout=280)
    assert ended.value is not None, ended.how
    code, printed, said = ended.value
    assert code == 1, said  # of FAILING
    assert out.read_text() == printed
    for name in names:  # the table has every run
        assert f"{name} " in said
    assert said.count("host: Adam ") == 1
    lines = lines_of(printed)
    assert tuple(lines) == names
    return lines


def test_processes_of_their_own_leave_the_same_lines(
    measured: dict[str, Any], tmp_path: Path
) -> None:
    """As a person starts it: what the forks have imported is imported by who needs it."""
    names = ("deepspeed-clip", "gemini-auto-clip")
    options = ("--steps", str(STEPS), "--warmup", str(WARMUP), "--only", ",".join(names))
    done = drive(tmp_path, *options)
    assert done.returncode == 0, done.stderr
    lines = lines_of(done.stdout)
    assert tuple(lines) == names
    for name, line in lines.items():
        same = measured[name]
        assert line["available"] is same["available"] and line["error"] == same["error"]
        assert line.get("losses") == same.get("losses")
        assert line.keys() == same.keys()


@pytest.mark.parametrize("name", RUNS)
def test_line_says_what_ran_and_how_fast(measured: dict[str, Any], name: str) -> None:
    line = measured[name]
    assert line["available"] and line["error"] is None
    assert line["parameters"] == measured["resident"]["parameters"] > 1e5
    assert line["tokens_per_step"] == 2 * 64 * 2 and line["micro_batches"] == 2
    assert line["clip"] is name.endswith("-clip")
    assert 0 < line["step_seconds_min"] <= line["step_seconds"] <= line["step_seconds_max"]
    assert line["tokens_per_s"] == pytest.approx(256 / line["step_seconds"])
    parts = line["forward_seconds"] + line["backward_seconds"] + line["update_seconds"]
    assert parts == pytest.approx(line["step_seconds"], rel=0.5)
    assert len(line["losses"]) == STEPS + WARMUP and line["loss"] == line["losses"][-1]
    assert all(map(math.isfinite, line["losses"]))
    # The batches come back every second step: the same one again has a smaller loss.
    assert line["losses"][-1] < line["losses"][0]
    assert line["host_peak_rss_bytes"] > 1e8 and line["arithmetic"]
    environment = line["environment"]
    assert environment["torch"] and environment["cpu"] and environment["torch_threads"] == 1
    assert environment["cores"] >= 1 and environment["transformers"]
    assert "--preset tiny" in line["command"] and "/results/" not in line["command"]


def test_same_arithmetic_has_the_same_losses(measured: dict[str, Any]) -> None:
    want = measured["hybrid-clip"]["losses"]
    assert measured["gemini-auto-clip"]["losses"] == want
    assert measured["gemini-cpu-clip"]["losses"] == want


def test_every_loop_trains_the_same_model(measured: dict[str, Any]) -> None:
    """The first pass has the same bits; later ones differ by the rounding of the updates."""
    want = measured["resident"]["losses"]
    for name in RUNS:
        losses = measured[name]["losses"]
        assert losses[0] == want[0], name
        assert losses == pytest.approx(want, abs=1e-3), name
    assert measured["hybrid-clip"]["losses"] != measured["gemini-auto"]["losses"]  # it did clip


def test_gemini_runs_under_the_budget_and_tells_of_it(measured: dict[str, Any]) -> None:
    for name in ("gemini-auto-clip", "gemini-cpu-clip"):
        line = measured[name]
        assert line["budget_bytes"] == 1_500_000 and line["budget_kept"] is True
        assert line["device_peak_source"] == "engine"
        assert 0 < line["device_peak_bytes"] <= 1_500_000
        assert line["stats"]["steps"] == STEPS + WARMUP
        assert line["machine_rates"]["host_adam_beside"] > 0
        assert line["host_is_slow"] is (line["host_share"] < 0.75)
    assert measured["resident"]["budget_bytes"] is None
    assert "host_is_slow" not in measured["resident"]


@pytest.mark.parametrize(
    ("alone", "beside", "is_slow"), [(1.0, 1.0, False), (0.7, 1.0, True), (1.0, 0.7, True)]
)
def test_host_is_slow_by_the_worse_of_both_figures(
    bench: ModuleType,
    capsys: pytest.CaptureFixture[str],
    alone: float,
    beside: float,
    is_slow: bool,
) -> None:
    import loops

    shares = {"host_adam": alone, "host_adam_beside": beside}
    rates = [REFERENCE[name] * shares.get(name, 1.0) for name in _C.RATES]
    said = loops.host_speed(rates)
    assert said["host_is_slow"] is is_slow and said["host_share"] == pytest.approx(
        min(alone, beside)
    )
    bench.show_host([{"name": "resident"}, said, said])
    text = capsys.readouterr().err
    assert text == (
        f"host: Adam {5.3 * alone:.2f} G parameters/s alone, {3.5 * beside:.2f} beside copies, "
        f"{min(alone, beside):.2f} of the reference host's: {'slow' if is_slow else 'not slow'}\n"
    )


def test_ratios_are_to_the_runs_of_the_same_command(measured: dict[str, Any]) -> None:
    line = measured["gemini-auto-clip"]
    of_resident = line["tokens_per_s"] / measured["resident"]["tokens_per_s"]
    assert line["ratio_to_resident"] == pytest.approx(of_resident)
    of_fsdp2 = line["tokens_per_s"] / measured["fsdp2"]["tokens_per_s"]
    assert line["ratio_to_fsdp2"] == pytest.approx(of_fsdp2)
    assert measured["resident"]["ratio_to_resident"] == 1.0
    assert measured["resident"]["ratio_to_fsdp2"] is None


def test_failed_run_leaves_a_line(measured: dict[str, Any]) -> None:
    line = measured[FAILING]
    assert line["available"] and line["error"].startswith("GeminiMemoryError: ")
    assert "GeminiMemoryError" in line["stderr_tail"]
    assert "tokens_per_s" not in line and line["ratio_to_resident"] is None


@pytest.mark.parametrize("name", MISSING)
def test_what_cannot_run_here_is_no_failure(
    measured: dict[str, Any], bench: ModuleType, name: str
) -> None:
    line = measured[name]
    assert line["available"] is False and line["error"] == MISSING[name]
    assert not bench.has_failed(line) and bench.has_failed(measured[FAILING])


@pytest.mark.parametrize("ends_itself", [False, True])
def test_what_a_run_started_ends_with_it(
    bench: ModuleType, tmp_path: Path, ends_itself: bool
) -> None:
    """Compilers and loaders are processes of their own, and would hold memory beside the next run."""
    sleeper = "import signal; signal.pause()"
    program = f"""
import signal, subprocess, sys
for _ in range(2):
    child = subprocess.Popen([sys.executable, "-c", {sleeper!r}])
    print("@phase", child.pid, flush=True)
if not {ends_itself}:
    signal.pause()
"""
    told: queue.Queue[str] = queue.Queue()
    run = bench.Process(["-c", program], tmp_path / "result.json", told.put)
    children = [os.pidfd_open(int(told.get(timeout=60))) for _ in range(2)]
    if ends_itself:
        run.process.wait()
    assert ended(children, 0) == 0
    run.end()
    assert ended(children, 60) == 2
    for child in children:
        os.close(child)


def ended(processes: list[int], timeout: float) -> int:
    """How many of them have ended; waits for each."""
    return sum(bool(select.select([process], [], [], timeout)[0]) for process in processes)


def test_slow_run_is_ended(tmp_path: Path) -> None:
    done = drive(tmp_path, "--only", "hybrid", "--timeout", "0.3")
    assert done.returncode == 1
    assert "still running after 0.3 s" in lines_of(done.stdout)["hybrid"]["error"]


def test_what_json_cannot_say_is_null(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python would write NaN and Infinity, which other readers refuse with the whole file."""
    line = {"name": "x", "loss": math.nan, "losses": [1.5, math.inf, (math.nan, 2)]}
    line["plan"] = {"rates": {"gather": math.inf, "h2d": 5e10}, "when": None, "kept": True}
    bench.keep_line(line, tmp_path / "lines.jsonl")
    text = (tmp_path / "lines.jsonl").read_text()
    assert capsys.readouterr().out == text
    assert json_lines(text) == [
        {
            "name": "x",
            "loss": None,
            "losses": [1.5, None, [None, 2]],
            "plan": {"rates": {"gather": None, "h2d": 5e10}, "when": None, "kept": True},
        }
    ]
    with pytest.raises(ValueError, match="is no JSON"):
        json_lines('{"loss": NaN}')


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("megatron", "there is no 'megatron'"),
        ("gemini", "a policy goes with gemini"),
        ("resident-auto", "a policy goes with gemini"),
        ("gemini-best", "policy 'best'"),
        ("deepspeed-z3", "a policy goes with gemini"),
        ("resident-", "a policy goes with gemini"),
        ("clip", "there is no 'clip'"),
    ],
)
def test_wrong_names_are_refused(bench: ModuleType, name: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        bench.parse_run(name)


def test_names_of_the_presets_are_runs(bench: ModuleType) -> None:
    for case in bench.PRESETS.values():
        for name in case.runs:
            bench.parse_run(name)
        assert bench.budget_bytes(case.budget) > 0
    assert bench.parse_run("gemini-cpu-clip") == {
        "system": "gemini",
        "policy": "cpu",
        "clip": True,
    }
    for system in bench.SYSTEMS:
        if system != "gemini":
            for clip in (False, True):
                want = {"system": system, "policy": None, "clip": clip}
                assert bench.parse_run(system + "-clip" * clip) == want


SPEC = {"model": "tiny", "sequences": 2, "micro_batches": 1, "clip": False, "device": "cpu"}


@pytest.mark.parametrize(("system", "stage"), [("deepspeed", 3), ("deepspeed-z2", 2)])
def test_deepspeed_offloads_weights_in_stage_3_only(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, system: str, stage: int
) -> None:
    import loops

    asked: dict[str, Any] = {}

    def initialize(model: torch.nn.Module, config: dict[str, Any]) -> tuple[torch.nn.Module]:
        asked.update(config)
        return (model,)

    loop = loops.LOOPS[system](SPEC, torch.device("cpu"))
    monkeypatch.setitem(sys.modules, "deepspeed", types.SimpleNamespace(initialize=initialize))
    monkeypatch.setattr(os, "environ", dict(os.environ))  # the loop sets some of it
    loop.prepare()
    zero = asked["zero_optimization"]
    assert zero["stage"] == stage and zero["offload_optimizer"]["device"] == "cpu"
    assert ("offload_param" in zero) == (stage == 3)


@pytest.mark.parametrize(("micro_batches", "leave"), [(1, True), (4, False)])
def test_torchao_keeps_gradients_that_accumulate(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, micro_batches: int, leave: bool
) -> None:
    import loops

    made: list[dict[str, Any]] = []

    def optimizer(*args: Any, **options: Any) -> None:
        made.append(options)

    loop = loops.TorchAO({**SPEC, "micro_batches": micro_batches}, torch.device("cpu"))
    library = types.SimpleNamespace(CPUOffloadOptimizer=optimizer)
    monkeypatch.setitem(sys.modules, "torchao", types.SimpleNamespace(optim=library))
    monkeypatch.setitem(sys.modules, "torchao.optim", library)
    loop.prepare()
    assert made == [{"offload_gradients": leave, "fused": True, **loops.ADAM}]


def test_torchao_does_not_clip(bench: ModuleType) -> None:
    import loops

    with pytest.raises(loops.UnavailableError, match="does not support clipping"):
        loops.TorchAO.check_available({**SPEC, "device": "cuda", "clip": True})


def test_ratios_prefer_the_same_clipping(bench: ModuleType) -> None:
    def line(system: str, clip: bool, speed: float | None, **more: Any) -> dict[str, Any]:
        base = {"budget_bytes": None, "device_peak_bytes": None}
        return {**base, "system": system, "clip": clip, "tokens_per_s": speed, **more}

    before = [
        line("resident", False, 100.0),
        line("resident", True, 80.0),
        line("fsdp2", False, None),
    ]
    mine = line(
        "gemini",
        True,
        40.0,
        step_seconds=1.1,
        predicted_bound_seconds=1.0,
        predicted_step_seconds=1.25,
        predicted_device_peak_bytes=20,
        budget_bytes=24,
        device_peak_bytes=25,
    )
    bench.add_ratios(mine, before)
    assert mine["ratio_to_resident"] == 0.5 and mine["ratio_to_fsdp2"] is None
    assert mine["of_bound"] == pytest.approx(1.1) and mine["budget_kept"] is False
    assert mine["of_predicted_step"] == pytest.approx(0.88)
    assert mine["of_predicted_device_peak"] == 1.25
    other = line("gemini", False, 40.0)
    bench.add_ratios(other, before[1:])
    assert other["ratio_to_resident"] == 0.5 and other["of_bound"] is None
    packed = line("gemini", True, 40.0)
    bench.add_ratios(packed, [line("resident", True, None), line("hybrid", False, 50.0)])
    assert packed["ratio_to_resident"] == 0.8
