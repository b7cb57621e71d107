"""The benchmark of several ranks on its tiny preset: each run a set of processes, one JSON line, none left behind.

Driver and ranks are forks of a process that has imported what they need (helpers/program.py), but for the run of one
rank and where ranks are ended: those are started as a person starts them.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers.forked import Forks
from helpers.json_lines import json_lines

ROOT = Path(__file__).parents[2]
GPUS, STEPS, WARMUP, TOKENS = 2, 2, 2, 64
TRAINING = ("fsdp2", "gemini-auto", "gemini-cpu@500KB")
FAILING = "gemini-cuda@100KB"  # before others, so that it shows that they go on
WORDS = [
    *(str(ROOT / "benchmarks" / "bench_sharded.py"), "--device", "cpu"),
    *("--preset", "tiny", "--threads", "1", "--gpus", str(GPUS)),
]
COMMAND = [sys.executable, *WORDS]
IMPORTED = (
    "transformers.models.auto.auto_factory",
    "torch.distributed.fsdp",
    "helpers.program",
)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The driver as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import bench_sharded

    return bench_sharded


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def drive(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *options],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )


def lines_of(text: str) -> dict[str, dict[str, Any]]:
    return {line["name"]: line for line in json_lines(text)}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("bench")
    out = folder / "results" / "tiny.jsonl"
    names = (FAILING, *TRAINING, "nccl")
    words = [
        *(*WORDS, "--steps", str(STEPS), "--warmup", str(WARMUP), "--settling", "1"),
        *("--tokens", str(TOKENS), "--checkpointing", "on", "--only", ",".join(names)),
        *("--timeline", str(folder / "timeline"), "--out", str(out)),
    ]
    with Forks((), IMPORTED, has_had_engine=False) as forks:
        (ended,) = forks.run(
            *("helpers.program:started", str(folder), words, [str(ROOT)], {}), timeout=280
        )
    assert ended.value is not None, ended.how
    code, printed, said = ended.value
    assert code == 1, said  # of FAILING
    assert out.read_text() == printed
    for name in (FAILING, *TRAINING):  # the table has every run
        assert f"{name} " in said
    lines = lines_of(printed)
    assert sorted(lines) == sorted(names)
    for name in ("gemini-auto", "gemini-cpu-500KB"):
        trace = folder / "timeline" / f"tiny-{name}-{TOKENS}-on.json"
        assert json.loads(trace.read_text())["traceEvents"], name
    return lines


@pytest.mark.parametrize("name", TRAINING)
def test_line_says_what_ran_and_how_fast(measured: dict[str, Any], name: str) -> None:
    line = measured[name]
    assert line["available"] and line["error"] is None and not line["is_cut_short"]
    assert "watch_error" not in line, line["stderr_tail"]
    assert line["gpus"] == GPUS and line["checkpointing"] is True and line["clip"] is True
    assert line["tokens_per_gpu"] == TOKENS and line["length"] == 32
    assert line["parameters"] > 1e5
    assert line["tokens_per_step"] == GPUS * TOKENS
    assert 0 < line["step_seconds_min"] <= line["step_seconds"] <= line["step_seconds_max"]
    assert len(line["step_seconds_each"]) == STEPS
    speed = GPUS * TOKENS / line["step_seconds"]
    assert line["tokens_per_s"] == pytest.approx(speed)
    assert line["tokens_per_s_per_gpu"] == pytest.approx(speed / GPUS)
    assert len(line["losses"]) == STEPS + line["warmup"]
    assert WARMUP <= line["warmup"] <= WARMUP + 1
    assert line["loss"] == pytest.approx(line["losses"][WARMUP + STEPS - 1])
    assert line["losses"][WARMUP] < line["losses"][0]  # of the same batches
    assert all(map(math.isfinite, line["losses"])) and line["losses_finite"]
    assert line["environment"]["torch"] and line["environment"]["cpu"]
    assert line["environment"]["torch_threads"] == 1 and line["host_peak_rss_bytes"] > 1e8
    assert "--preset tiny" in line["command"] and "/results/" not in line["command"]


def test_every_loop_trains_the_same_model_on_the_same_data(measured: dict[str, Any]) -> None:
    """The first pass has the same bits; later ones differ by the rounding of the updates."""
    want = measured["fsdp2"]["losses"]
    for name in TRAINING:
        losses = measured[name]["losses"]
        assert losses[0] == want[0], name
        assert losses[: len(want)] == pytest.approx(want, abs=1e-3), name
    auto, cpu = (measured[name]["losses"][: len(want)] for name in TRAINING[1:])
    assert auto == cpu  # one of them may have taken a step more to settle


def test_gemini_is_sharded_over_the_ranks(measured: dict[str, Any]) -> None:
    for name in TRAINING[1:]:
        line = measured[name]
        assert line["stats"]["shards"] == GPUS and line["stats"]["gathers"] > 0
        assert line["device_peak_source"] == "engine"
        peaks = line["device_peak_bytes_each"]
        assert len(peaks) == GPUS and max(peaks) == line["device_peak_bytes"] > 0
    assert measured["gemini-cpu@500KB"]["device_peak_bytes"] <= 500_000


def test_ratios_are_to_fsdp2(measured: dict[str, Any]) -> None:
    want = measured["gemini-auto"]["tokens_per_s"] / measured["fsdp2"]["tokens_per_s"]
    assert measured["gemini-auto"]["ratio_to_fsdp2"] == pytest.approx(want)
    assert measured["fsdp2"]["ratio_to_fsdp2"] == 1.0
    assert measured["nccl"]["ratio_to_fsdp2"] is None


def test_collectives_alone(measured: dict[str, Any]) -> None:
    line = measured["nccl"]
    assert line["error"] is None and "tokens_per_gpu" not in line
    assert line["collectives"]
    for figures in line["collectives"].values():
        for word in ("all_gather", "reduce_scatter"):
            ours, theirs = (figures[f"{word}_{way}_bytes_per_s"] for way in ("gemini", "torch"))
            assert ours > 0 and theirs > 0
            assert figures[f"{word}_ratio"] == pytest.approx(ours / theirs)


def test_failed_run_leaves_a_line(measured: dict[str, Any]) -> None:
    line = measured[FAILING]
    assert line["available"] and "GeminiMemoryError" in line["error"]
    assert line["error"].startswith("rank ")
    assert "GeminiMemoryError" in line["stderr_tail"]
    assert "tokens_per_s" not in line and line["ratio_to_fsdp2"] is None


# ---- processes -----------------------------------------------------------------------------------


def ranks_of(driver: int) -> list[int]:
    """The processes of runs that say that `driver` started them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode().split("\0")
            if len(words) < 4 or not words[1].endswith("sharded_loops.py"):
                continue
            if json.loads(Path(words[2]).read_text())["driver"] == driver:
                found.append(int(path.parent.name))
        except (OSError, ValueError):
            continue
    return found


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def test_slow_run_is_ended(tmp_path: Path) -> None:
    done = drive(tmp_path, "--only", "fsdp2", "--timeout", "0.3", "--tokens", "32")
    assert done.returncode == 1
    line = lines_of(done.stdout)["fsdp2"]
    assert "still ran and were ended, --timeout 0.3 s" in line["error"] and line["is_cut_short"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_no_rank_outlives_the_driver(how: signal.Signals, tmp_path: Path) -> None:
    with open(tmp_path / "output", "w") as output:
        driver = subprocess.Popen(
            [*COMMAND, "--only", "fsdp2", "--steps", "100000"],
            cwd=tmp_path,
            env=environment(),
            stdout=output,
            stderr=output,
        )
        end = time.monotonic() + 60.0
        ranks: list[int] = []
        try:
            while len(ranks) < GPUS and time.monotonic() < end:
                time.sleep(0.1)
                ranks = ranks_of(driver.pid)
            assert len(ranks) == GPUS, (tmp_path / "output").read_text()
            driver.send_signal(how)
            driver.wait(30.0)
        finally:
            driver.kill()
            driver.wait()
    while any(map(is_running, ranks)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(is_running, ranks))


# ---- the parts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("zero3", "there is no 'zero3'"),
        ("gemini", "a policy goes with gemini"),
        ("fsdp2-auto", "a policy goes with gemini"),
        ("gemini-best", "policy 'best'"),
        ("gemini-", "policy ''"),
        ("fsdp2@24GB", "a budget goes with gemini"),
        ("gemini-auto@much", "budget"),
    ],
)
def test_wrong_names_are_refused(bench: ModuleType, name: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        bench.parse_run(name)


def test_presets_are_whole(bench: ModuleType) -> None:
    import llama
    import shapes

    for case in bench.PRESETS.values():
        assert (case.model in llama.LLAMAS) != (case.model in shapes.SHAPES)
        assert all(tokens % case.length == 0 for tokens in case.tokens)
        for name in case.runs:
            bench.parse_run(name)
    assert bench.parse_run("gemini-cpu@24GB") == {
        "system": "gemini",
        "policy": "cpu",
        "budget": "24GB",
    }


@pytest.mark.parametrize(
    ("name", "billions"), [("llama-18b", 18.06), ("llama-8b", 8.03), ("llama-1b", 1.50)]
)
def test_size_of_the_models(bench: ModuleType, name: str, billions: float) -> None:
    import llama
    import torch

    model = llama.meta_llama(llama.LLAMAS[name], 4096, True, torch.bfloat16)
    count = sum(p.numel() for p in model.parameters())
    assert count / 1e9 == pytest.approx(billions, abs=0.005)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())


def test_a_step_takes_as_long_as_on_the_slowest_rank(bench: ModuleType) -> None:
    def rank(seconds: list[float], loss: float, peak: int) -> dict[str, Any]:
        return {
            "error": None,
            "step_seconds_each": seconds,
            "losses": [9.0, loss, loss],
            "loss": loss,
            "losses_finite": True,
            "tokens_per_step": 50,
            "torch_peak_bytes": peak,
            "host_peak_rss_bytes": 1,
        }

    line = bench.combine([rank([1.0, 4.0, 2.0], 2.0, 7), rank([3.0, 1.0, 2.0], 4.0, 5)])
    assert line["step_seconds_each"] == [3.0, 4.0, 2.0] and line["step_seconds"] == 3.0
    assert line["tokens_per_step"] == 100 and line["tokens_per_s"] == pytest.approx(100 / 3)
    assert line["losses"] == [9.0, 3.0, 3.0] and line["loss"] == 3.0
    assert line["torch_peak_bytes"] == 7


def test_ratios_need_the_same_tokens_and_checkpointing(bench: ModuleType) -> None:
    def line(system: str, tokens: int, is_on: bool, speed: float, **more: Any) -> dict[str, Any]:
        common = {"tokens_per_gpu": tokens, "checkpointing": is_on, "tokens_per_s": speed}
        return {"system": system, **common, **more}

    before = [
        line("fsdp2", 4096, False, 50.0, device_peak_bytes=40),
        line("fsdp2", 8192, False, 80.0),
        line("fsdp2", 4096, True, 20.0),
        line("gemini", 4096, False, 70.0),
    ]
    mine = line("gemini", 4096, False, 60.0, device_peak_bytes=30, step_seconds=1.2)
    mine["predicted_step_seconds"] = 1.0
    bench.add_ratios(mine, before)
    assert mine["ratio_to_fsdp2"] == pytest.approx(1.2)
    assert mine["peak_to_fsdp2"] == pytest.approx(0.75)
    assert mine["of_predicted_step"] == pytest.approx(1.2) and mine["of_bound"] is None
    other = line("gemini", 8192, True, 60.0)
    bench.add_ratios(other, before)
    assert other["ratio_to_fsdp2"] is None


def test_budget_of_what_fsdp2_took(bench: ModuleType) -> None:
    assert bench.parse_run("gemini-auto@fsdp2")["budget"] == "fsdp2"
    work = {"tokens_per_gpu": 4096, "checkpointing": True}
    other = {**work, "checkpointing": False}
    lines = [
        {"system": "fsdp2", **other, "device_peak_bytes": 7},
        {"system": "gemini", **work, "device_peak_bytes": 8},
        {"system": "fsdp2", **work, "device_peak_bytes": 50_000},
    ]
    assert bench.budget_beside(work, lines) == "48500"
    with pytest.raises(ValueError, match="needs the peak of a run fsdp2"):
        bench.budget_beside(work, lines[:2])


def test_budget_of_no_fsdp2_is_an_error_of_that_run(tmp_path: Path) -> None:
    done = drive(tmp_path, "--tokens", str(TOKENS), "--only", "gemini-auto@fsdp2")
    assert done.returncode == 1
    for line in map(json.loads, done.stdout.splitlines()):
        assert line["error"].startswith("a budget of fsdp2 needs the peak of a run fsdp2")
    assert "needs the peak" in done.stderr  # below the table


def test_exposed_communication(bench: ModuleType) -> None:
    from overlap import overlap

    def kernel(name: str, stream: int, begin: float, length: float) -> dict[str, Any]:
        times = {"ts": begin * 1e6, "dur": length * 1e6}
        return {"ph": "X", "cat": "kernel", "name": name, "tid": stream, **times}

    events = [
        kernel("gemm", 7, 0.0, 2.0),
        kernel("ncclDevKernel_AllGather", 20, 1.0, 3.0),  # exposed from 2 to 4
        kernel("gemm", 7, 4.0, 2.0),
        kernel("ncclDevKernel_ReduceScatter", 20, 5.5, 0.5),
        kernel("adam", 30, 6.0, 2.0),
        kernel("ncclDevKernel_AllReduce", 20, 6.5, 2.5),  # exposed from 8 to 9
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 8.5e6, "dur": 1.5e6},
        {"ph": "X", "cat": "cpu_op", "name": "nccl", "ts": 0.0, "dur": 99e6},
        {"ph": "M", "name": "process_name"},
    ]
    figures = overlap(events, 2)
    assert figures is not None
    assert figures.pop("exposed_longest") == [[2.0, 2.0], [8.0, 1.0]]
    assert figures == pytest.approx(
        {
            "profiled_step_seconds": 5.0,
            "comm_seconds": 3.0,
            "exposed_comm_seconds": 1.5,
            "compute_idle_seconds": 3.0,
            "copy_seconds": 0.75,
        }
    )
    assert overlap(events[-2:], 2) is None


def test_gpt2_on_one_rank(tmp_path: Path) -> None:
    """The originals' models: tied embeddings and biases, drawn where they will lie."""
    options = ("--preset", "gpt2-tiny", "--gpus", "1", "--tokens", "128")
    done = drive(tmp_path, *options, "--steps", "1", "--warmup", "1", "--settling", "0")
    assert done.returncode == 0, done.stderr
    (line,) = json_lines(done.stdout)
    assert line["model"] == "gpt2-tiny" and line["gpus"] == line["stats"]["shards"] == 1
    assert line["losses"][0] == pytest.approx(math.log(512), abs=0.1)  # of small random weights
    assert line["losses"][1] < line["losses"][0]
