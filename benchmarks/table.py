"""Prints README's table of measurements, from the lines that benchmarks/results/ keeps.

    python benchmarks/table.py            prints it
    python benchmarks/table.py --write    puts it into README.md, between the two comments

A row compares runs of one command only, as the hosts of two machines differ by up to a factor of two: the last
command in a file that has all of the row's runs.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path("benchmarks/results")
BEGIN, END = "<!-- measured -->\n", "<!-- /measured -->\n"

Run = dict[str, Any]


def lines(name: str) -> list[Run]:
    return [json.loads(line) for line in (ROOT / RESULTS / name).read_text().splitlines()]


def commands(runs: list[Run]) -> Iterator[dict[str, Run]]:
    """The runs of each command, by name; runs of one command stand together."""
    group: dict[str, Run] = {}
    last = None
    for run in runs:
        key = (run["command"], run["case"], run.get("checkpointing"), run.get("tokens_per_gpu"))
        if (key != last or run["name"] in group) and group:
            yield group
            group = {}
        group[run["name"]] = run
        last = key
    if group:
        yield group


def latest(name: str, case: str, *names: str, **fields: Any) -> list[Run]:
    """The runs `names` of the last command of `case` that has them all, measured to the end."""
    found = None
    for group in commands([run for run in lines(name) if run["case"] == case]):
        runs = [group[n] for n in names if n in group]
        is_whole = len(runs) == len(names) and all(run["available"] for run in runs)
        if is_whole and all(run[key] == value for run in runs for key, value in fields.items()):
            found = runs
    if found is None:
        raise SystemExit(f"{name}: no command has {', '.join(names)} of case {case}")
    return found


def model(run: Run) -> str:
    per_gpu = " per GPU" if run.get("gpus", 1) > 1 else ""
    tokens = run.get("tokens_per_gpu") or run["tokens_per_step"]
    return f"{run['parameters'] / 1e9:.1f}B parameters, {tokens:,} tokens{per_gpu}"


def machine(run: Run) -> str:
    gpus = run.get("gpus", 1)
    name = run["environment"]["gpu"].removeprefix("NVIDIA ")
    return f"{gpus} x {name}, {run['environment']['cores']} vCPU"


def figures(run: Run) -> str:
    peak = run["device_peak_bytes"] / 1e9
    each = " each" if run.get("gpus", 1) > 1 else ""
    return f"{run['step_seconds']:.3f} s, {peak:.1f} GB{each}"


def row(what: str, hardware: str, ours: str, other: str, ratio: str, file: str) -> str:
    return f"| {what} | {hardware} | {ours} | {other} | {ratio} | [lines]({RESULTS / file}) |"


def against(what: str, ours: Run, name: str, other: Run, file: str) -> str:
    ratio = f"{other['step_seconds'] / ours['step_seconds']:.2f}"
    return row(what, machine(ours), figures(ours), f"{name}: {figures(other)}", ratio, file)


def bits() -> str:
    """All runs under a budget have the hashes of the unmanaged ones, as in test_planned_gpu.py today."""
    file = "bits_h200.jsonl"
    everything = lines(file)
    runs = [run for run in everything if "kind" in run]
    reference = {run["kind"]: run["hashes"] for run in runs if run["policy"] == "unmanaged"}
    managed = [run for run in runs if run["policy"] != "unmanaged"]
    equal = [run for run in managed if run["hashes"] == reference[run["kind"]]]
    steps, parameters = runs[0]["steps"], runs[0]["parameters"] / 1e9
    device = everything[-1]["device"].removeprefix("NVIDIA ")
    return row(
        f"{parameters:.1f}B parameters, {steps} steps, {len(managed)} budgets and policies",
        f"1 x {device}",
        f"{len(equal)} of {len(managed)} have every bit of weights, masters, moments and losses",
        "the same run without Gemini",
        "",
        file,
    )


def table() -> str:
    offload, four_gpus = "offload_h200.jsonl", "four_gpus_2026-11-26.jsonl"
    two_gpus = "two_gpus_2026-11-28.jsonl"
    below_whole, below = latest(offload, "A", "resident-clip", "gemini-auto-clip", max_norm=1000)
    large_whole, large = latest(offload, "B", "resident", "gemini-auto")
    fields = {"gpus": 2, "checkpointing": True, "tokens_per_gpu": 4096}
    fsdp2, two = latest(two_gpus, "8b", "fsdp2", "gemini-auto@fsdp2", **fields)
    (more,) = latest(four_gpus, "30b", "gemini-auto@24GB")
    state = f"four times 24 GB are 96 GB, training takes {14 * more['parameters'] / 1e9:.0f} GB"
    everything = "everything on the GPU"
    rows = [
        "| model, tokens per step, GPU budget | hardware | Gemini | compared with | speed | from |",
        "|---|---|---|---|---|---|",
        bits(),
        against(
            f"{model(below)}, clipped at a norm that is not reached, 24 GB",
            below,
            everything,
            below_whole,
            offload,
        ),
        against(f"{model(large)}, not clipped, 24 GB", large, everything, large_whole, offload),
        against(
            f"{model(two)}, clipped, {int(two['budget']) / 1e9:.0f} GB",
            two,
            "FSDP2",
            fsdp2,
            two_gpus,
        ),
        row(f"{model(more)}, clipped, 24 GB", machine(more), figures(more), state, "", four_gpus),
    ]
    return "\n".join(rows) + "\n"


def put(made: str, begin: str, end: str) -> None:
    """Into README.md, between the two comments."""
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text().partition(begin)
    _, _, after = rest.partition(end)
    readme.write_text(before + begin + made + end + after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace the table in README.md")
    if parser.parse_args().write:
        put(table(), BEGIN, END)
    else:
        print(table(), end="")


if __name__ == "__main__":
    main()
