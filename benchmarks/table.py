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
    tokens = run.get("tokens_per_gpu") or run["tokens_per_step"]
    per_gpu = " per GPU" if run.get("gpus", 1) > 1 else ""
    return f"{run['parameters'] / 1e9:.2f} G parameters, {tokens:,} tokens{per_gpu}"


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


def against(what: str, ours: Run, others: dict[str, Run], file: str) -> str:
    ratio = "; ".join(f"{o['step_seconds'] / ours['step_seconds']:.2f}" for o in others.values())
    beside = "; ".join(f"{name}: {figures(other)}" for name, other in others.items())
    return row(what, machine(ours), figures(ours), beside, ratio, file)


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
        f"{parameters:.2f} G parameters, {steps} steps: hashes of weights, masters, moments, losses",
        f"1 x {device}",
        f"{len(equal)} of {len(managed)} budgets and policies equal",
        "the same run without Gemini",
        "",
        file,
    )


def table() -> str:
    peers, offload = "offload_h100.jsonl", "offload_h200.jsonl"
    resident, ours, torchao = latest(peers, "A", "resident", "gemini-auto", "torchao")
    clipped, zero2 = latest(peers, "A", "gemini-auto-clip", "deepspeed-z2-clip")
    below_resident, below = latest(offload, "A", "resident-clip", "gemini-auto-clip", max_norm=1000)
    large_resident, large = latest(offload, "B", "resident", "gemini-auto")
    four_gpus = "four_gpus_2026-11-26.jsonl"
    fields = {"gpus": 4, "checkpointing": True, "tokens_per_gpu": 4096}
    fsdp2, four = latest(four_gpus, "8b", "fsdp2", "gemini-auto@fsdp2", **fields)
    (more,) = latest(four_gpus, "30b", "gemini-auto@24GB")
    state = f"the training state is {14 * more['parameters'] / 1e9:.0f} GB, four budgets 96 GB"
    rows = [
        "| what, and the budget | hardware | Gemini | beside it | speed | kept |",
        "|---|---|---|---|---|---|",
        bits(),
        against(
            f"{model(ours)}, 24 GB",
            ours,
            {"all on the GPU": resident, "torchao, which has no masters": torchao},
            peers,
        ),
        against(
            f"{model(clipped)}, each step clipped, 24 GB",
            clipped,
            {"DeepSpeed ZeRO-2 offload": zero2},
            peers,
        ),
        against(
            f"{model(below)}, norm below the limit, 24 GB",
            below,
            {"all on the GPU": below_resident},
            offload,
        ),
        against(f"{model(large)}, 24 GB", large, {"all on the GPU": large_resident}, offload),
        against(
            f"{model(four)}, {int(four['budget']) / 1e9:.0f} GB", four, {"FSDP2": fsdp2}, four_gpus
        ),
        row(f"{model(more)}, 24 GB", machine(more), figures(more), state, "", four_gpus),
    ]
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace the table in README.md")
    if not parser.parse_args().write:
        print(table(), end="")
        return
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    readme.write_text(before + BEGIN + table() + END + after)


if __name__ == "__main__":
    main()
