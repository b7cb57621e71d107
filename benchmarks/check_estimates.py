"""How far are estimates from the runs that benchmarks/results keeps? Needs no GPU.

Each kept run of bench_offload.py with a plan is estimated twice: with the figures of the table of GPUs, and with the
rates that its plan was made from. Prints one line of Markdown for each.

    python benchmarks/check_estimates.py > benchmarks/results/estimates_2026-11-23.md
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lines import parser_of
from models import build_model
from shapes import SHAPES

import gemini_strategy as gs
from gemini_strategy.estimates.machines import machine_of

RESULTS = Path(__file__).resolve().parent / "results"
FILES = {
    "offload_h200.jsonl": "h200",
    "absent_h100.jsonl": "h100",
    "speculative_h100.jsonl": "h100",
}
HEAD = (
    "| GPU | case | budget, schedule | rates | step: run, estimate | device: run, estimate | host: run, estimate |\n"
    "|---|---|---|---|---|---|---|"
)


def kept() -> Iterator[tuple[str, dict[str, Any]]]:
    """Name of the GPU and line of every run of ours that has a plan."""
    for name, gpu in FILES.items():
        for line in (RESULTS / name).read_text().splitlines():
            run = json.loads(line)
            if run["system"] == "gemini" and run.get("plan") and run["model"] in SHAPES:
                yield gpu, run


def beside(run: float, estimated: float, unit: str) -> str:
    if run <= 0:  # the run's own figure is not to be used
        return f"-, {estimated:.3g} {unit}"
    return f"{run:.4g}, {estimated:.4g} {unit} ({100 * (estimated / run - 1):+.1f} %)"


def estimated(run: dict[str, Any], gpu: str, name: str, rates: Any, model: Any) -> str:
    """The cells from the schedule on."""
    shape = (run["sequences"], run["length"])
    ids = torch.empty(shape, dtype=torch.long, device="meta")
    forecast = gs.estimate(
        model,
        {"input_ids": ids, "labels": ids},
        gpu=replace(machine_of(gpu, rates), host_memory=run["environment"]["host_memory_bytes"]),
        precision="bf16-true",
        device_budget=run["budget"],
        placement_policy=run["policy"],
        micro_batches=run["micro_batches"],
    )
    has_spares = run["stats"]["host_bytes"] > 1.01 * (forecast.host_bytes - forecast.spare_bytes)
    is_speculated = has_spares and not run["stats"].get("redone_updates")  # its clip did not fire
    when = "speculated" if is_speculated else run["plan"]["when"]
    schedule = next(s for s in forecast.schedules if s.when == when)
    # These runs had the model on the CPU first, and not all had spares.
    host = forecast.host_peak_bytes - forecast.spare_bytes + forecast.model_bytes
    host = max(host, forecast.host_peak_bytes) if has_spares else host
    cells = (
        when,
        name,
        beside(run["step_seconds"], schedule.seconds, "s"),
        beside(run["device_train_peak_bytes"] / 1e9, forecast.device_peak_bytes / 1e9, "GB"),
        beside(run["host_peak_rss_bytes"] / 1e9, host / 1e9, "GB"),
    )
    return " | ".join(cells)


def main() -> None:
    parser_of(__doc__).parse_args()
    meta = torch.device("meta")
    models: dict[str, Any] = {}
    print(HEAD)
    for gpu, run in kept():
        if run["model"] not in models:
            models[run["model"]] = build_model(SHAPES[run["model"]], meta, meta, torch.bfloat16)
        for name, rates in (("table", None), ("the run's", run["plan"]["rates"])):
            cells = estimated(run, gpu, name, rates, models[run["model"]])
            print(f"| {gpu} | {run['case']} | {run['budget']}, {cells} |", flush=True)


if __name__ == "__main__":
    main()
