"""Offloading: tokens per second under a device budget, beside the run in which everything fits.

    python benchmarks/bench_offload.py --preset A [--only resident,gemini-auto-clip] [--out FILE]

Each run is a process of its own. A run's name is SYSTEM[-POLICY][-clip][:OPTIMIZER]; the systems are
  resident  no offload, everything on the device: AdamW with bf16 weights and fp32 masters, torch's fused
  hybrid    no offload, HybridAdam's packed states (12 bytes per parameter); takes the place of
            "resident" where that does not fit
  gemini    under the budget, policy auto, cpu or cuda
  fsdp2     PyTorch's fully_shard with CPUOffloadPolicy and fused CPU AdamW, one rank, no budget
  deepspeed ZeRO-3 with parameters and optimizer on the CPU, where it is installed
  deepspeed-z2 ZeRO-2: the optimizer on the CPU, the weights on the device
  torchao   its CPUOffloadOptimizer, with torch's fused AdamW or another's class, where it is installed: the
            weights on the device, bf16 weights and moments without masters, and no clipping
and "-clip" clips the gradients' norm at --max-norm. OPTIMIZER, of optimizers.py, is --optimizer's unless the
name says it; hybrid, fsdp2 and deepspeed have AdamW. All but AdamW step the bf16 weights by their own step().
Model, batches, activation checkpointing, the optimizer's parameters and the first weights are the same in all.

One JSON line per run on standard output, appended to --out; a table at the end on standard error.
Times are medians over the measured steps, seconds between events of the compute stream. Ratios are
of tokens/s, to the run of the same command, of --optimizer, with the same clipping if there is one. "bits" are
those of the weights after the last step beside that resident run's (with AdamW, hybrid's). "of bound" is
the step over the perfect-overlap bound that the engine computed, "of plan" over the time it foretold.
Gemini's lines have "machine_rates", those that manage() took, and "host_is_slow", by Adam alone and
beside copies against the reference host's; one line below the table says the same.
"device_peak_bytes" is the driver's figure for the device from the first step on, warm-up included,
less what was in use before the process began; "host_peak_rss_bytes" is the process's largest
resident set, "host_used_peak_bytes" what the machine's available memory fell by.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from lines import (
    Process,
    budget,
    command,
    compare_with_plan,
    gigabytes,
    has_failed,
    keep_line,
    options,
    parse,
    show_errors,
    show_lines,
)
from measure import Peaks, host_used, open_driver_memory
from optimizers import OPTIMIZERS
from shapes import SHAPES

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # the package of this tree, installed or not
SYSTEMS = ("resident", "hybrid", "gemini", "fsdp2", "deepspeed", "deepspeed-z2", "torchao")
CHANGED = ("model", "budget", "sequences", "length", "micro_batches", "optimizer", "liger")
POLICIES = ("auto", "cpu", "cuda")
ANY = ("resident", "gemini", "torchao")  # systems that take any optimizer


@dataclass(frozen=True)
class Case:
    """A model, the tokens of one step, and the device budget."""

    title: str
    model: str
    runs: tuple[str, ...]
    budget: str = "24GB"
    sequences: int = 16  # per micro-batch
    length: int = 1024
    micro_batches: int = 1
    optimizer: str = "adamw"
    liger: bool = False  # its kernels, of which one never makes the logits
    host_budget: str | None = None  # Gemini's; the model is built on the meta device then


def _both(*names: str) -> tuple[str, ...]:
    return tuple(run for name in names for run in (name, f"{name}-clip"))


_PEERS = (*_both("fsdp2", "deepspeed", "deepspeed-z2"), "torchao")
_USUAL = _both("resident", "gemini-auto", "gemini-cpu")
PRESETS = {
    "A": Case(
        "A: 3.44 G parameters, T = 16K, 24 GB",
        "opt-3.4b",
        (*_both("resident"), *_PEERS, *_both("gemini-auto", "gemini-cpu")),
    ),
    "A48": Case("A': 3.44 G parameters, T = 16K, 48 GB", "opt-3.4b", _USUAL, budget="48GB"),
    "B": Case("B: 6.7 G parameters, T = 8K, 24 GB", "opt-6.7b", _USUAL, sequences=8),
    "C": Case(
        "C: 6.7 G parameters, T = 32K in 4 micro-batches, 24 GB",
        "opt-6.7b",
        _USUAL,
        sequences=8,
        micro_batches=4,
    ),
    "llama-8b": Case(
        "llama-8b: 8.0 G parameters, T = 8K, 24 GB, Liger, 8-bit AdamW",
        "llama-8b",
        (
            *_both("resident", "gemini-auto"),
            *("resident:bnb_paged_adamw8bit", "torchao:torchao_adamw8bit"),
        ),
        sequences=8,
        optimizer="bnb_adamw8bit",
        liger=True,
        host_budget="56500MB",
    ),
    "qwen-14b": Case(
        "qwen-14b: 14.8 G parameters, T = 16K, 24 GB, Liger, 8-bit AdamW",
        "qwen-14b",
        _both("gemini-auto"),
        optimizer="bnb_adamw8bit",
        liger=True,
        host_budget="105500MB",
    ),
    "full": Case(
        "full: 3.44 G parameters, T = 16K, everything fits",
        "opt-3.4b",
        _both("resident", "hybrid", "gemini-auto", "gemini-cuda"),
        budget="130GB",
    ),
    "tiny": Case(
        "tiny: 0.2 M parameters, T = 256 in 2 micro-batches",
        "tiny",
        (*_both("resident", "hybrid"), *_PEERS, *_both("gemini-auto", "gemini-cpu")),
        budget="1500KB",
        sequences=2,
        length=64,
        micro_batches=2,
    ),
}


def parse_run(name: str) -> dict[str, Any]:
    """{"system", "policy", "clip", "own"} of a run's name; ValueError says what is wrong with it.

    "own" is the optimizer, where --optimizer does not decide.
    """
    whole, _, own = name.partition(":")
    run = whole.removesuffix("-clip")
    system, *rest = [run] if run in SYSTEMS else run.split("-", 1)
    if system not in SYSTEMS:
        raise ValueError(f"run {name!r}: there is no {system!r}; choose from {', '.join(SYSTEMS)}")
    if (len(rest), system == "gemini") not in ((0, False), (1, True)):
        raise ValueError(f"run {name!r}: a policy goes with gemini, as in gemini-auto")
    if rest and rest[0] not in POLICIES:
        raise ValueError(f"run {name!r}: policy {rest[0]!r}; choose from {', '.join(POLICIES)}")
    if whole != name and (system not in ANY or own not in OPTIMIZERS):
        raise ValueError(
            f"run {name!r}: an optimizer goes with {', '.join(ANY)}; choose from {', '.join(OPTIMIZERS)}"
        )
    return {
        "system": system,
        "policy": rest[0] if rest else None,
        "clip": run != whole,
        "own": own or None,
    }


def budget_bytes(text: str) -> int | None:
    """Bytes of "24GB" or "24GiB"; None for a share of a device that only the run knows."""
    from gemini_strategy.sizes import parse_bytes

    number = float(text) if text.replace(".", "", 1).isdigit() else None
    return None if number is not None and number <= 1 else parse_bytes(number or text, 0, "budget")


# ---- one run ----------------------------------------------------------------------------------


def run_one(name: str, case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Starts one run, watches its memory, and returns its JSON line without ratios."""
    driver = open_driver_memory(args.device)
    sources: dict[str, Any] = {"host": host_used}
    if driver is not None:
        sources["device"] = driver.used
    with tempfile.TemporaryDirectory() as folder:
        result_path = Path(folder, "result.json")
        parsed = parse_run(name)
        usual = case.optimizer if parsed["system"] in ANY else "adamw"
        spec = {
            **asdict(case),
            **parsed,
            "optimizer": parsed["own"] or usual,
            "bits": args.bits,
            **({"settling": 0} if args.bits else {}),
            "device": args.device,
            "steps": args.steps,
            "warmup": args.warmup,
            "max_norm": args.max_norm,
            "threads": args.threads,
            "result": str(result_path),
            "timeline": str((args.timeline / f"{args.preset}-{name}.json").resolve())
            if args.timeline
            else None,
            "sample_here": args.device.startswith("cuda") and driver is None,
        }
        spec_path = Path(folder, "run.json")
        spec_path.write_text(json.dumps(spec), encoding="utf-8")
        with Peaks(sources) as peaks:
            began = time.perf_counter()
            run = Process([HERE / "loops.py", spec_path], result_path, peaks.enter)
            is_late = False
            try:
                run.process.wait(args.timeout)
            except subprocess.TimeoutExpired:
                is_late = True
            finally:
                said = run.end()
            seconds = time.perf_counter() - began
        result = run.result()
    if result is None:
        code = run.process.returncode
        error = f"ended with code {code}" + (": the system killed it" if code == -9 else "")
        if is_late:
            error = f"still running after {args.timeout:g} s, ended; --timeout gives more"
        result = {"available": True, "error": error}
    if has_failed(result):
        result["stderr_tail"] = said[-2000:]
        sys.stderr.write(said[-4000:])
    phases = result.pop("device_phases", None)
    if driver is not None:
        phases = {phase: peaks.above_start("device", phase) for phase in peaks.by_phase}
    phases = phases or {}
    in_steps = [phases[p] for p in ("warmup", "train") if phases.get(p) is not None]
    source = "driver" if driver else "cuda" if phases else None
    if args.device == "cpu" and "stats" in result:  # a simulated device: the engine alone knows it
        in_steps, source = [result["stats"]["device_peak_bytes"]], "engine"
    return {
        "benchmark": "offload",
        "case": args.preset,
        "name": name,
        **{key: spec[key] for key in ("system", "policy", "clip", "own", "optimizer", "model")},
        "max_norm": args.max_norm if spec["clip"] else None,
        **{key: spec[key] for key in ("sequences", "length", "micro_batches", "liger")},
        "budget": case.budget if spec["system"] == "gemini" else None,
        "budget_bytes": budget_bytes(case.budget) if spec["system"] == "gemini" else None,
        "steps": args.steps,
        **result,
        "device_peak_bytes": max(in_steps) if in_steps else None,
        "device_train_peak_bytes": phases.get("train"),
        "device_setup_peak_bytes": phases.get("setup"),
        "device_peak_source": source,
        "host_used_peak_bytes": peaks.above_start("host"),
        "pinned_bytes": result.get("stats", {}).get("host_bytes")
        or result.get("torch_pinned_peak_bytes"),
        "run_seconds": seconds,
        "command": command(args.out, args.timeline),
    }


# ---- all runs ---------------------------------------------------------------------------------


def base(
    lines: list[dict[str, Any]], key: str, systems: tuple[str, ...], clip: bool
) -> dict[str, Any]:
    """The first of `systems` that ran with the command's optimizer and has `key`; clipped alike if it ran so."""
    for system in systems:
        found = [each for each in lines if each["system"] == system and not each["own"]]
        found = [each for each in found if each.get(key)]
        if found:
            return max(found, key=lambda each: each["clip"] == clip)
    return {}


def compare_bits(line: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    """The hashes of weights become a hash of all, and the names of those that the resident run has otherwise."""
    systems = ("hybrid", "resident") if line["optimizer"] == "adamw" else ("resident",)
    hashes = line.get("weight_hashes")
    other = base(lines, "weight_hashes", systems, line["clip"]).get("weight_hashes")
    if hashes:
        line["weights_sha256"] = sha256("".join(hashes.values()).encode()).hexdigest()
    if hashes and other:
        line["differ"] = [name for name in other if hashes.get(name) != other[name]]
        n = len(line["differ"])
        line["bits"] = f"{n} of {len(other)} differ" if n else "equal"


def add_ratios(line: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    """Compares a run with the resident one, with FSDP2 and with its own bound."""
    speed, clip = line.get("tokens_per_s"), line["clip"]
    bases = {"ratio_to_resident": ("resident", "hybrid"), "ratio_to_fsdp2": ("fsdp2",)}
    for key, systems in bases.items():
        other = base([*lines, line], "tokens_per_s", systems, clip)
        line[key] = speed / other["tokens_per_s"] if speed and other else None
    compare_with_plan(line)
    line["budget_kept"] = None
    if line["budget_bytes"] and line["device_peak_bytes"]:
        line["budget_kept"] = line["device_peak_bytes"] <= line["budget_bytes"]


def run_all(case: Case, names: list[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every run in turn; each line is printed and kept as soon as it is there."""
    lines: list[dict[str, Any]] = []
    names = list(names)
    for name in names:
        print(f"{case.title}: {name}", file=sys.stderr, flush=True)
        line = run_one(name, case, args)
        add_ratios(line, lines)
        compare_bits(line, lines)
        lines.append(line)
        keep_line({key: line[key] for key in line if key != "weight_hashes"}, args.out)
        packed = name.replace("resident", "hybrid")
        is_too_large = line["system"] == "resident" and line.get("is_out_of_memory")
        if is_too_large and line["optimizer"] == "adamw" and packed not in names:
            names.insert(names.index(name) + 1, packed)
    return lines


COLUMNS = (
    ("run", "name", str),
    ("tokens/s", "tokens_per_s", "{:,.0f}".format),
    ("step s", "step_seconds", "{:.4f}".format),
    ("min", "step_seconds_min", "{:.4f}".format),
    ("max", "step_seconds_max", "{:.4f}".format),
    ("of resident", "ratio_to_resident", "{:.3f}".format),
    ("of FSDP2", "ratio_to_fsdp2", "{:.2f}".format),
    ("of bound", "of_bound", "{:.2f}".format),
    ("of plan", "of_predicted_step", "{:.2f}".format),
    ("device GB", "device_peak_bytes", gigabytes),
    ("torch's GB", "torch_peak_bytes", gigabytes),
    ("host GB", "host_used_peak_bytes", gigabytes),
    ("RSS GB", "host_peak_rss_bytes", gigabytes),
    ("pinned GB", "pinned_bytes", gigabytes),
    ("loss", "loss", "{:.4f}".format),
    ("bits", "bits", str),
)


def show_host(lines: list[dict[str, Any]]) -> None:
    """Whether the host is slow, as ratios between hosts differ; of the first run that knows."""
    for line in lines:
        if "machine_rates" in line:
            rates, share = line["machine_rates"], line["host_share"]
            print(
                f"host: Adam {rates['host_adam'] / 1e9:.2f} G parameters/s alone, "
                f"{rates['host_adam_beside'] / 1e9:.2f} beside copies, {share:.2f} of the "
                f"reference host's: {'slow' if line['host_is_slow'] else 'not slow'}",
                file=sys.stderr,
            )
            return


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = options(__doc__, PRESETS, "A")
    parser.add_argument("--device", default="cuda", help="cuda (default), cuda:N or cpu")
    parser.add_argument("--budget", type=budget, help="instead of the preset's, such as 32GB")
    parser.add_argument("--sequences", type=int, help="per micro-batch, instead of the preset's")
    parser.add_argument("--length", type=int, help="tokens per sequence, instead of the preset's")
    parser.add_argument("--micro-batches", type=int, help="instead of the preset's")
    parser.add_argument("--model", choices=SHAPES, help="of shapes.py, instead of the preset's")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help="instead of the preset's")
    parser.add_argument(
        "--liger", action=argparse.BooleanOptionalAction, help="Liger's kernels, or none of them"
    )
    parser.add_argument(
        "--bits",
        action="store_true",
        help="deterministic kernels, as many steps in all runs (Gemini settles for no plan), and\n"
        "weights hashed after the last",
    )
    parser.add_argument(
        "--max-norm", type=float, default=1.0, help="where gradients are clipped (1.0)"
    )
    parser.add_argument("--threads", type=int, default=0, help="torch's; default: as torch has it")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds per run (600)")
    args = parse(parser, PRESETS, parse_run)
    if not args.max_norm >= 0:
        parser.error("--max-norm must be at least 0")
    return args


def main() -> int:
    """Runs what was asked for; 1 if a run failed that this machine could have made."""
    args = parse_arguments()
    changes = {key: getattr(args, key) for key in CHANGED if getattr(args, key) is not None}
    case = replace(PRESETS[args.preset], **changes)
    if changes:
        changed = ", ".join(f"{key} {value}" for key, value in changes.items())
        case = replace(case, title=f"{case.title}, but {changed}")
    lines = run_all(case, args.runs, args)
    show_lines(case.title, COLUMNS, lines)
    show_host(lines)
    return show_errors(lines)


if __name__ == "__main__":
    sys.exit(main())
