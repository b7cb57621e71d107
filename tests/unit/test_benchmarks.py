"""The two benchmarks that compare training, on their tiny presets: each run ends as one line, whose losses and ratios
are those of its command. What they compute from the times of many steps and ranks is checked by itself.

Drivers and runs are forks of a process that has imported what they need (helpers/program.py).
"""

from __future__ import annotations

import math
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers.forked import Forks
from helpers.json_lines import json_lines

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OPTIMIZERS = runpy.run_path(str(BENCHMARKS / "optimizers.py"))["OPTIMIZERS"]
IMPORTED = (
    "transformers.models.auto.auto_factory",
    "transformers.models.opt.modeling_opt",
    "torch.distributed.fsdp",
    "helpers.program",
)
EAGER = {
    "TORCHDYNAMO_DISABLE": "1"
}  # in a fork torch.compile finds no vectors, and its code is wrong without
STEPS, WARMUP = 2, 2
COUNTS = ("--steps", str(STEPS), "--warmup", str(WARMUP))


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks((), IMPORTED, has_had_engine=False) as forks:
        yield forks


def drive(
    forks: Forks, folder: Path, driver: str, names: tuple[str, ...], *options: str
) -> tuple[dict[str, dict[str, Any]], int]:
    """Each run's line, and the exit status; the table and the file have every run, too."""
    out = folder / "results" / "tiny.jsonl"
    words = [
        *(str(BENCHMARKS / driver), "--device", "cpu", "--preset", "tiny", "--threads", "1"),
        *("--only", ",".join(names), "--out", str(out), *COUNTS, *options),
    ]
    paths = [str(folder), str(BENCHMARKS.parent)]
    (ended,) = forks.run("helpers.program:started", str(folder), words, paths, EAGER, timeout=280)
    assert ended.value is not None, ended.how
    code, printed, said = ended.value
    assert out.read_text() == printed
    for name in names:
        assert f"{name} " in said
    lines = {line["name"]: line for line in json_lines(printed)}
    assert sorted(lines) == sorted(names), said
    return lines, code


def check_figures(line: dict[str, Any], tokens: int) -> None:
    """A run that ended well says how fast it was, and its losses are those of one model that learns."""
    assert line["available"] and line["error"] is None, line
    assert 0 < line["step_seconds_min"] <= line["step_seconds"] <= line["step_seconds_max"]
    assert line["tokens_per_step"] == tokens
    assert line["tokens_per_s"] == pytest.approx(tokens / line["step_seconds"])
    assert len(line["losses"]) >= STEPS + WARMUP and all(map(math.isfinite, line["losses"]))
    assert line["losses"][WARMUP] < line["losses"][0]  # of the same batches
    assert line["host_peak_rss_bytes"] > 1e8 and line["environment"]["torch_threads"] == 1
    assert "--preset tiny" in line["command"] and "/results/" not in line["command"]


def test_drivers_start_without_torch() -> None:
    """Its import takes longer than all that a driver does for a run."""
    program = "import sys, bench_offload, bench_sharded; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=BENCHMARKS, check=True)


def test_bench_offload(forks: Forks, tmp_path: Path) -> None:
    """A run that does not fit and one whose library is not there come first: the others go on."""
    (tmp_path / "deepspeed.py").write_text("raise ImportError('not on this machine')\n")
    well = ("resident", "hybrid-clip", "fsdp2", "gemini-auto-clip", "gemini-cpu-clip")
    names = ("gemini-cuda", "deepspeed-clip", *well)
    lines, code = drive(forks, tmp_path, "bench_offload.py", names)
    assert code == 1
    assert lines["gemini-cuda"]["error"].startswith("GeminiMemoryError: ")
    assert lines["gemini-cuda"]["ratio_to_resident"] is None
    assert lines["deepspeed-clip"]["available"] is False
    assert "import deepspeed: ImportError: not on this machine" in lines["deepspeed-clip"]["error"]
    for name in well:
        check_figures(lines[name], 2 * 64 * 2)
        # The first pass has the same bits; later ones differ by the rounding of the updates.
        assert lines[name]["losses"][0] == lines["resident"]["losses"][0]
        assert lines[name]["losses"] == pytest.approx(lines["resident"]["losses"], abs=1e-3)
    for name in ("gemini-auto-clip", "gemini-cpu-clip"):
        line = lines[name]
        assert line["losses"] == lines["hybrid-clip"]["losses"]  # the same arithmetic
        assert line["budget_kept"] is True and 0 < line["device_peak_bytes"] <= 1_500_000
        for beside in ("resident", "fsdp2"):
            want = line["tokens_per_s"] / lines[beside]["tokens_per_s"]
            assert line[f"ratio_to_{beside}"] == pytest.approx(want)


@pytest.mark.parametrize("optimizer", sorted(set(OPTIMIZERS) - {"adamw"}))
def test_bench_offload_with_another_optimizer(optimizer: str, forks: Forks, tmp_path: Path) -> None:
    """Gemini's run ends with the weights of the resident one, and a peer may have an optimizer of its own."""
    names = ("resident", "gemini-auto", "resident:adamw")
    options = ("--optimizer", optimizer, "--bits", "--model", "llama-tiny")
    lines, code = drive(forks, tmp_path, "bench_offload.py", names, *options)
    assert code == 0, {name: line["error"] for name, line in lines.items()}
    for name in names:
        check_figures(lines[name], 2 * 64 * 2)
        assert len(lines[name]["losses"]) == STEPS + WARMUP and "weight_hashes" not in lines[name]
    resident, ours, other = (lines[name] for name in names)
    assert resident["optimizer"] == ours["optimizer"] == optimizer
    assert ours["bits"] == "equal" and ours["differ"] == []
    assert ours["losses"] == resident["losses"]
    assert ours["weights_sha256"] == resident["weights_sha256"]
    assert other["optimizer"] == "adamw"  # with masters: other bits
    assert other["bits"] == f"{len(other['differ'])} of 30 differ" and other["differ"]
    assert other["ratio_to_resident"] == pytest.approx(
        other["tokens_per_s"] / resident["tokens_per_s"]
    )


def test_bench_sharded(forks: Forks, tmp_path: Path) -> None:
    well = ("fsdp2", "gemini-auto", "gemini-cpu@500KB")
    names = ("gemini-cuda@100KB", *well)
    options = ("--gpus", "2", "--settling", "1", "--tokens", "64", "--checkpointing", "on")
    lines, code = drive(forks, tmp_path, "bench_sharded.py", names, *options)
    assert code == 1
    assert lines["gemini-cuda@100KB"]["error"].startswith("rank ")
    assert "GeminiMemoryError" in lines["gemini-cuda@100KB"]["error"]
    want = lines["fsdp2"]["losses"]
    for name in well:
        check_figures(lines[name], 2 * 64)
        losses = lines[name]["losses"][: len(want)]
        assert losses[0] == want[0] and losses == pytest.approx(want, abs=1e-3)
        ratio = lines[name]["tokens_per_s"] / lines["fsdp2"]["tokens_per_s"]
        assert lines[name]["ratio_to_fsdp2"] == pytest.approx(ratio)
    for name in well[1:]:
        assert lines[name]["stats"]["shards"] == 2 and lines[name]["stats"]["gathers"] > 0
    assert lines["gemini-cpu@500KB"]["device_peak_bytes"] <= 500_000


# ---- the parts -----------------------------------------------------------------------------------


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the modules of benchmarks are found."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.usefixtures("folder")
def test_runs_of_the_presets_have_names_and_others_are_refused() -> None:
    import bench_offload
    import bench_sharded

    wrong = {
        bench_offload: (
            "megatron",
            "gemini",
            "resident-auto",
            "gemini-best",
            "deepspeed-z3",
            "clip",
            "fsdp2:adamw",
            "resident:lamb",
        ),
        bench_sharded: ("zero3", "gemini", "fsdp2-auto", "gemini-best", "fsdp2@24GB"),
    }
    for bench, names in wrong.items():
        for case in bench.PRESETS.values():
            for name in case.runs:
                bench.parse_run(name)
        for name in names:
            with pytest.raises(
                ValueError, match=r"there is no|a (policy|budget)|policy '|an optimizer"
            ):
                bench.parse_run(name)


@pytest.mark.usefixtures("folder")
def test_a_step_takes_as_long_as_on_the_slowest_rank() -> None:
    import bench_sharded

    def rank(seconds: list[float], loss: float, peak: int) -> dict[str, Any]:
        line = {"error": None, "step_seconds_each": seconds, "losses": [9.0, loss], "loss": loss}
        line |= {"losses_finite": True, "tokens_per_step": 50, "torch_peak_bytes": peak}
        return {**line, "host_peak_rss_bytes": 1}

    line = bench_sharded.combine([rank([1.0, 4.0, 2.0], 2.0, 7), rank([3.0, 1.0, 2.0], 4.0, 5)])
    assert line["step_seconds_each"] == [3.0, 4.0, 2.0] and line["step_seconds"] == 3.0
    assert line["tokens_per_step"] == 100 and line["tokens_per_s"] == pytest.approx(100 / 3)
    assert line["losses"] == [9.0, 3.0] and line["torch_peak_bytes"] == 7


@pytest.mark.usefixtures("folder")
def test_what_json_cannot_say_is_null(tmp_path: Path) -> None:
    """Python would write NaN and Infinity, which other readers refuse with the whole file."""
    import bench_offload

    bench: ModuleType = bench_offload
    bench.keep_line({"loss": math.nan, "losses": [1.5, (math.inf, 2)]}, tmp_path / "lines.jsonl")
    assert json_lines((tmp_path / "lines.jsonl").read_text()) == [
        {"loss": None, "losses": [1.5, [None, 2]]}
    ]
