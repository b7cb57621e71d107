"""Several GPUs, or one: tokens per second of a large model, beside PyTorch's FSDP2 in the same command.

    python benchmarks/bench_sharded.py --preset 8b --gpus 2 [--only fsdp2,gemini-auto@24GB] [--out FILE]

Each run is a set of processes of its own, one per GPU, that ends within --timeout. A run's name is
  gemini-POLICY[@BUDGET]  chunks sharded over the ranks; policy auto, cpu or cuda; under a budget per GPU,
                          24GB or fsdp2: 0.97 of what FSDP2 took, of the same command, tokens and checkpointing
  fsdp2                   fully_shard per decoder layer and root, fp32 parameters, torch's fused AdamW
  nccl                    collectives of single chunks: torch.distributed's and ours, no training
and each but nccl runs once for every --tokens (per GPU and step) and --checkpointing. Model, first bf16
values, batches (each rank its own), bf16 for compute and reduction, AdamW's parameters and clipping the
norm at 1.0 are the same in all of them.

One JSON line per run on standard output, appended to --out; a table at the end on standard error. A step
takes as long as on the slowest rank; times are medians over the measured steps, seconds between events of
the compute stream. "of FSDP2" compares tokens/s with the run of the same command, tokens and
checkpointing. "of bound" is the step over the perfect-overlap bound that the engine computed, "of plan"
over the time it foretold. "GPU GB" is the driver's figure from the first step on, of the GPU that used
most, less what was in use before the run; "torch GB" what torch's allocator reserved of it.
"comm s" is how long a kernel of NCCL ran in a step, "exposed" how long one ran and no other kernel did, in
two more steps under torch's profiler. There each of our collectives costs milliseconds of the host, since NCCL issues
it from a new thread; with --blocking it does not. "tok/s" is of one GPU. Losses are means over the ranks.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from lines import (
    Process,
    command,
    compare_with_plan,
    gigabytes,
    has_failed,
    keep_line,
    options,
    parse,
    show_errors,
    show_lines,
    show_rows,
)
from measure import Peaks, host_used, open_driver_memory

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # the package of this tree, installed or not
SYSTEMS = ("gemini", "fsdp2", "nccl")
POLICIES = ("auto", "cpu", "cuda")
MIB = 1 << 20
SHARE_OF_FSDP2 = 0.97  # of its peak, the budget "fsdp2"
GRACE_SECONDS = 20.0  # for the other ranks once one has failed
WORDS_SECONDS = 1.0  # for ranks that are late to write where they are
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Case:
    """A model, how long its sequences are, and what is run."""

    title: str
    model: str
    runs: tuple[str, ...]
    length: int = 4096
    tokens: tuple[int, ...] = (4096, 8192)  # per GPU and step
    checkpointing: tuple[str, ...] = ("off", "on")


_SMALL = ("gemini-auto@24GB",)
PRESETS = {
    "1b": Case("1b: 1.50 G parameters", "llama-1b", ("nccl", "fsdp2", "gemini-auto")),
    "8b": Case(
        "8b: 8.03 G parameters", "llama-8b", ("nccl", "fsdp2", "gemini-auto@fsdp2", "gemini-auto")
    ),
    "13b": Case(
        "13b: 13.0 G parameters, 24 GB per GPU", "llama-13b", _SMALL, checkpointing=("on",)
    ),
    "18b": Case(
        "18b: 18.1 G parameters, 24 GB per GPU",
        "llama-18b",
        _SMALL,
        tokens=(16384,),
        checkpointing=("on",),
    ),
    "30b": Case(
        "30b: 32.5 G parameters, 24 GB per GPU", "llama-30b", _SMALL, checkpointing=("on",)
    ),
    **{
        f"gpt2-{size}": Case(
            f"gpt2-{size}: the originals' GPT-2",
            f"gpt2-{size}",
            (run,),
            length=length,
            tokens=(4 * length, 16 * length),
            checkpointing=("on",),
        )
        for size, run, length in (
            *(
                (size, "gemini-auto@32GB", 1024)
                for size in ("4b", "10b", "15b", "19b", "20b", "21b")
            ),
            ("tiny", "gemini-auto@500KB", 32),
        )
    },
    "tiny": Case(
        "tiny: 0.2 M parameters",
        "llama-tiny",
        ("nccl", "fsdp2", "gemini-auto", "gemini-cpu@500KB"),
        length=32,
        tokens=(32, 64),
    ),
}


def parse_run(name: str) -> dict[str, Any]:
    """{"system", "policy", "budget"} of a run's name; ValueError says what is wrong with it."""
    from gemini_strategy.sizes import parse_bytes

    head, has_budget, budget = name.partition("@")
    system, has_policy, policy = head.partition("-")
    if system not in SYSTEMS:
        raise ValueError(f"run {name!r}: there is no {system!r}; choose from {', '.join(SYSTEMS)}")
    if bool(has_policy) != (system == "gemini"):
        raise ValueError(f"run {name!r}: a policy goes with gemini, as in gemini-auto")
    if has_policy and policy not in POLICIES:
        raise ValueError(f"run {name!r}: policy {policy!r}; choose from {', '.join(POLICIES)}")
    if has_budget and system != "gemini":
        raise ValueError(f"run {name!r}: a budget goes with gemini, as in gemini-auto@24GB")
    if has_budget and budget != "fsdp2":
        parse_bytes(budget, 0, f"run {name!r}: budget")
    return {"system": system, "policy": policy or None, "budget": budget or None}


# ---- one run ----------------------------------------------------------------------------------


def has_given_up(rank: Process) -> bool:
    """Whether the process has ended without figures."""
    if rank.process.poll() is None:
        return False
    result = rank.result()
    return result is None or result["error"] is not None


def wait_for(ranks: list[Process], timeout: float) -> bool:
    """Waits until all ranks have ended; False if they were not given all the time they wanted."""
    latest = time.monotonic() + timeout
    is_cut = False
    while any(rank.process.poll() is None for rank in ranks):
        if time.monotonic() >= latest:
            return False
        if not is_cut and any(map(has_given_up, ranks)):
            is_cut, latest = True, min(latest, time.monotonic() + GRACE_SECONDS)
        time.sleep(POLL_SECONDS)
    return True


def figures_of(ranks: list[Process], timeout: float, is_late: bool) -> dict[str, Any]:
    """The run's figures from its ranks'; else the error of the first that has one, and who ended without a word."""
    results = [rank.result() for rank in ranks]
    silent = [
        f"rank {number} ended with code {rank.process.returncode}"
        for number, rank in enumerate(ranks)
        if results[number] is None
    ]
    if silent and is_late:
        silent = [f"some ranks still ran and were ended, --timeout {timeout:g} s"]
    for number, result in enumerate(results):
        if result is not None and result["error"]:
            result["error"] = "; ".join([f"rank {number}: {result['error']}", *silent])
            is_out_of_memory = any(r and r.get("is_out_of_memory") for r in results)
            return {**result, "is_out_of_memory": is_out_of_memory}
    if silent:
        return {"available": True, "error": "; ".join(silent)}
    return combine([result for result in results if result is not None])


def combine(results: list[dict[str, Any]]) -> dict[str, Any]:
    """One line of all ranks' figures: the slowest's times, the largest peaks, the mean of the losses.

    "loss" is of the step that is the same in every run, however many steps one took until it was measured.
    """
    first = dict(results[0])
    if "collectives" in first:
        return first
    each = [
        max(seconds) for seconds in zip(*(r["step_seconds_each"] for r in results), strict=True)
    ]
    losses = [mean(loss) for loss in zip(*(r["losses"] for r in results), strict=True)]
    tokens = sum(r["tokens_per_step"] for r in results)
    step = median(each)
    largest = {
        key: max(r[key] for r in results)
        for key in ("torch_peak_bytes", "torch_reserved_peak_bytes", "host_peak_rss_bytes")
        if key in first
    }
    return {
        **first,
        **largest,
        "tokens_per_step": tokens,
        "step_seconds": step,
        "step_seconds_min": min(each),
        "step_seconds_max": max(each),
        "step_seconds_each": each,
        "tokens_per_s": tokens / step,
        "tokens_per_s_per_gpu": tokens / step / len(results),
        "losses": losses,
        "loss": mean(r["loss"] for r in results),
        "losses_finite": all(r["losses_finite"] for r in results),
    }


def peak_bytes(
    args: argparse.Namespace, peaks: Peaks, results: list[dict[str, Any]], has_driver: bool
) -> dict[str, Any]:
    """Device peaks of each GPU, from the first step on, and who counted them."""
    source, by_gpu = None, []
    for gpu in range(args.gpus):
        if has_driver:
            source = "driver"
            phases = {p: peaks.above_start(f"gpu{gpu}", p) for p in peaks.by_phase}
        else:
            phases = results[gpu].get("device_phases") or {} if gpu < len(results) else {}
            source = "cuda" if phases else source
        seen = [phases[p] for p in ("warmup", "train") if phases.get(p) is not None]
        by_gpu.append(max(seen) if seen else None)
    if args.device == "cpu":  # a simulated device: the engine alone knows it
        stats = [r["stats"]["device_peak_bytes"] for r in results if "stats" in r]
        source, by_gpu = ("engine", stats) if stats else (None, [])
    known = [peak for peak in by_gpu if peak is not None]
    return {
        "device_peak_bytes": max(known) if known else None,
        "device_peak_bytes_each": by_gpu,
        "device_peak_source": source,
    }


def spec_of(
    what: dict[str, Any], case: Case, tokens: int, checkpointing: str, args: argparse.Namespace
) -> dict[str, Any]:
    """What each rank of a run is told, but for files and samples."""
    cores = len(os.sched_getaffinity(0))
    return {
        **vars(args),
        **what,
        **asdict(case),
        "sequences": tokens // case.length,
        "checkpointing": checkpointing == "on",
        "clip": not args.no_clip,
        "threads": args.threads or max(cores // args.gpus, 1),
        "driver": os.getpid(),
        "profile": not args.no_profile,
        "chunk_bytes": [16 * MIB, 64 * MIB, 256 * MIB] if args.device == "cuda" else [MIB // 16],
    }


def run_one(
    name: str,
    what: dict[str, Any],
    case: Case,
    tokens: int,
    checkpointing: str,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Starts one run's ranks, watches their memory, and returns its JSON line without ratios; `what`: parse_run's."""
    drivers = [open_driver_memory(f"{args.device}:{gpu}") for gpu in range(args.gpus)]
    has_driver = all(driver is not None for driver in drivers)
    sources: dict[str, Any] = {"host": host_used}
    if has_driver:
        sources |= {f"gpu{gpu}": driver.used for gpu, driver in enumerate(drivers) if driver}
    is_training = what["system"] != "nccl"
    label = f"{args.preset}-{name}-{tokens}-{checkpointing}".replace("@", "-")
    kept = args.timeline.resolve() if args.timeline and is_training else None
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        spec = spec_of(what, case, tokens, checkpointing, args) | {
            "folder": str(folder),
            "timeline": str(kept / f"{label}.json")
            if kept and what["system"] == "gemini"
            else None,
            "kernels": str(kept / f"{label}-kernels.json.gz") if kept else None,
            "sample_here": args.device == "cuda" and not has_driver,
        }
        if kept:
            kept.mkdir(parents=True, exist_ok=True)
        (folder / "run.json").write_text(json.dumps(spec, default=str), encoding="utf-8")
        ranks: list[Process] = []
        with Peaks(sources) as peaks:
            began = time.perf_counter()
            is_late = False
            try:
                for gpu in range(args.gpus):
                    words = [HERE / "sharded_loops.py", folder / "run.json", str(gpu)]
                    enter = None if gpu else peaks.enter  # the phase of rank 0 is the run's
                    ranks.append(Process(words, folder / f"result-{gpu}.json", enter))
                is_late = not wait_for(ranks, args.timeout)
                if is_late:
                    for rank in ranks:
                        rank.say_where()
                    time.sleep(WORDS_SECONDS)
            finally:
                said = [rank.end() for rank in ranks]
            seconds = time.perf_counter() - began
        result = figures_of(ranks, args.timeout, is_late)
        each = [rank.result() or {} for rank in ranks]
    if has_failed(result) or result.get("watch_error"):
        result["stderr_tail"] = "\n".join(text[-2000:] for text in said)
        for rank, text in enumerate(said):
            sys.stderr.write(f"---- rank {rank} ----\n{text[-4000:]}\n")
    result.pop("device_phases", None)
    of_model = {"model": case.model, "length": case.length, "tokens_per_gpu": tokens}
    return {
        "benchmark": "sharded",
        "case": args.preset,
        "name": name,
        **what,
        "gpus": args.gpus,
        **(of_model if is_training else {}),
        "checkpointing": checkpointing == "on" if is_training else None,
        "micro_batches": args.micro_batches,
        "clip": not args.no_clip,
        "nccl_blocking": args.blocking,
        "chunk_size": args.chunk_size,
        "steps": args.steps,
        **result,
        **peak_bytes(args, peaks, each, has_driver),
        "host_used_peak_bytes": peaks.above_start("host"),
        "is_cut_short": is_late,
        "phases": list(peaks.by_phase),
        "run_seconds": seconds,
        "command": command(args.out),
    }


# ---- all runs ---------------------------------------------------------------------------------


def is_same_work(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two lines are of the same tokens and checkpointing."""
    return all(a.get(key) == b.get(key) for key in ("tokens_per_gpu", "checkpointing"))


def budget_beside(work: Mapping[str, Any], lines: list[dict[str, Any]]) -> str:
    """The budget in bytes that "fsdp2" stands for; ValueError where there is no run of FSDP2 to go by."""
    for line in lines:
        if line["system"] == "fsdp2" and is_same_work(line, work) and line["device_peak_bytes"]:
            return str(int(SHARE_OF_FSDP2 * line["device_peak_bytes"]))
    raise ValueError(
        "a budget of fsdp2 needs the peak of a run fsdp2 before it, in the same command"
    )


def add_ratios(line: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    """Compares a run with FSDP2's of the same tokens and checkpointing, with its plan and its bound."""
    line["ratio_to_fsdp2"] = line["peak_to_fsdp2"] = None
    for other in [*lines, line]:
        if other["system"] == "fsdp2" and line["system"] != "nccl" and is_same_work(line, other):
            for ratio, key in (
                ("ratio_to_fsdp2", "tokens_per_s"),
                ("peak_to_fsdp2", "device_peak_bytes"),
            ):
                if line.get(key) and other.get(key):
                    line[ratio] = line[key] / other[key]
    compare_with_plan(line)


def run_all(case: Case, names: list[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every run in turn; each line is printed and kept as soon as it is there."""
    lines: list[dict[str, Any]] = []
    settings = [
        (name, tokens, checkpointing)
        for checkpointing in case.checkpointing
        for tokens in case.tokens
        for name in names
        if name != "nccl"
    ]
    if "nccl" in names:
        settings.insert(0, ("nccl", case.tokens[0], case.checkpointing[0]))
    for name, tokens, checkpointing in settings:
        about = "" if name == "nccl" else f", T = {tokens}, checkpointing {checkpointing}"
        print(f"{case.title} on {args.gpus}: {name}{about}", file=sys.stderr, flush=True)
        what = parse_run(name)
        if what["budget"] == "fsdp2":
            work = {"tokens_per_gpu": tokens, "checkpointing": checkpointing == "on"}
            try:
                what["budget"] = budget_beside(work, lines)
            except ValueError as error:
                line = {"name": name, **what, **work, "available": True, "error": str(error)}
                lines.append(line)
                keep_line(line, args.out)
                continue
        line = run_one(name, what, case, tokens, checkpointing, args)
        add_ratios(line, lines)
        lines.append(line)
        keep_line(line, args.out)
    return lines


COLUMNS = (
    ("run", "name", str),
    ("T", "tokens_per_gpu", str),
    ("ckpt", "checkpointing", {True: "on", False: "off"}.__getitem__),
    ("tok/s", "tokens_per_s_per_gpu", "{:,.0f}".format),
    ("step s", "step_seconds", "{:.4f}".format),
    ("min", "step_seconds_min", "{:.4f}".format),
    ("max", "step_seconds_max", "{:.4f}".format),
    ("of FSDP2", "ratio_to_fsdp2", "{:.3f}".format),
    ("of bound", "of_bound", "{:.2f}".format),
    ("of plan", "of_predicted_step", "{:.2f}".format),
    ("comm s", "comm_seconds", "{:.4f}".format),
    ("exposed", "exposed_comm_seconds", "{:.4f}".format),
    ("GPU GB", "device_peak_bytes", gigabytes),
    ("torch GB", "torch_reserved_peak_bytes", gigabytes),
    ("host GB", "host_used_peak_bytes", gigabytes),
    ("loss", "loss", "{:.4f}".format),
)


def print_table(title: str, lines: list[dict[str, Any]]) -> int:
    """The runs side by side, on standard error; collectives alone; then why some have no figures. The exit status."""
    show_lines(title, COLUMNS, [line for line in lines if line["system"] != "nccl"])
    for line in lines:
        rows = [
            [
                f"{int(chunk) / MIB:g} MiB",
                name,
                format(of[f"{name}_torch_bytes_per_s"] / 1e9, ".1f"),
                format(of[f"{name}_gemini_bytes_per_s"] / 1e9, ".1f"),
                format(of[f"{name}_ratio"], ".3f"),
            ]
            for chunk, of in line.get("collectives", {}).items()
            for name in ("all_gather", "reduce_scatter")
        ]
        if rows:
            columns = ("chunk", "collective", "torch GB/s", "ours GB/s", "ratio")
            show_rows(f"each rank sends, {line['gpus']} ranks", columns, rows)
    return show_errors(lines)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = options(__doc__, PRESETS, "8b")
    add = parser.add_argument
    add("--gpus", type=int, default=0, help="ranks; default: all GPUs")
    add("--tokens", help="per GPU and step, separated by commas: 4096,8192")
    add("--checkpointing", choices=("on", "off", "both"), help="of activations")
    add("--host-budget", help="of each rank with gemini; default: a share of the host")
    add("--chunk-size", help="of Gemini: 256MB; default: its own choice")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--micro-batches", type=int, default=1, help="per step, each of --tokens")
    add("--no-clip", action="store_true", help="do not clip the gradients' norm")
    add(
        "--settling",
        type=int,
        default=24,
        help="how many steps more Gemini may take to warm up (default 24)",
    )
    add("--threads", type=int, default=0, help="torch's, per rank; default: a share")
    add("--timeout", type=float, default=300.0, help="seconds per run (300)")
    add(
        "--blocking",
        action="store_true",
        help="NCCL_COMM_BLOCKING=1: NCCL issues in the thread that calls it, for the profiler's sake",
    )
    add("--no-profile", action="store_true", help="do not look at exposed kernels")
    args = parse(parser, PRESETS, parse_run)
    if not args.gpus and args.device == "cuda":
        import torch

        args.gpus = torch.cuda.device_count()
    if args.gpus < 1:
        parser.error("--gpus must be at least 1, and with --device cuda there must be a GPU")
    if args.micro_batches < 1:
        parser.error("--micro-batches must be at least 1")
    return args


def main() -> int:
    """Runs what was asked for; 1 if a run failed that this machine could have made."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks are ended
    args = parse_arguments()
    if args.blocking:
        os.environ["NCCL_COMM_BLOCKING"] = "1"
    case = PRESETS[args.preset]
    if args.tokens:
        case = replace(case, tokens=tuple(int(text) for text in args.tokens.split(",")))
    if args.checkpointing:
        ways = ("off", "on") if args.checkpointing == "both" else (args.checkpointing,)
        case = replace(case, checkpointing=ways)
    for tokens in case.tokens:
        if tokens < 1 or tokens % case.length:
            sys.exit(f"--tokens {tokens}: sequences have {case.length} tokens")
    return print_table(case.title, run_all(case, args.runs, args))


if __name__ == "__main__":
    sys.exit(main())
