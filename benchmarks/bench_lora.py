"""Adapters on a frozen base under a budget, beside the same loop with everything on the device.

`python3 benchmarks/bench_lora.py --out FILE` trains LoRA adapters of a frozen bf16 model twice in one process, first
without an engine and then under `--budget`, from the same values on the same batches, and adds one line: seconds per
step, tokens per second, peaks of the device and the losses of both. Both losses are the same to the bit where the
device's kernels are deterministic (`--deterministic`), which makes both runs slower.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lines import keep_line
from loops import ADAM, MOST_WARMUP
from measure import Peaks, environment, host_used, open_driver_memory
from models import Batches, build_model
from shapes import SHAPES

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package of this tree


def adapted(args: argparse.Namespace, home: torch.device, device: torch.device) -> Any:
    """The model with adapters of `--rank` on every linear layer of its blocks."""
    from peft import LoraConfig, get_peft_model

    base = build_model(SHAPES[args.model], home, device, torch.bfloat16)
    names = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
    torch.manual_seed(0)
    model = get_peft_model(base, LoraConfig(r=args.rank, lora_alpha=16, target_modules=names))
    return model.to(torch.bfloat16)


def run(args: argparse.Namespace, is_managed: bool) -> dict[str, Any]:
    """Trains one of the two."""
    import gemini_strategy as gs

    device = torch.device(args.device)
    model = adapted(args, torch.device("cpu") if is_managed else device, device)
    counts = [
        sum(p.numel() for p in model.parameters() if p.requires_grad is is_trained)
        for is_trained in (False, True)
    ]
    trained = [p for p in model.parameters() if p.requires_grad]
    if not is_managed:
        gs.cast_model_(model, "bf16-true")
    optimizer = gs.HybridAdam(trained, **ADAM)
    begin = time.perf_counter()
    engine = None
    if is_managed:
        engine = gs.manage(
            model, optimizer, device_budget=args.budget, precision="bf16-true", device=device
        )
    prepared = time.perf_counter() - begin
    print(f"prepared in {prepared:.1f} s", flush=True)
    batches = Batches(SHAPES[args.model], args.sequences, args.length, 1, device)
    losses, seconds = [], []
    steps = 0
    while len(seconds) < args.steps:
        still_changes = engine is not None and engine.stats()["settling"]
        is_warm = steps < args.warm or (still_changes and steps < args.warm + MOST_WARMUP)
        begin = time.perf_counter()
        ids = batches(steps, 0)
        loss = model(input_ids=ids, labels=ids).loss
        if engine is None:
            loss.backward()
        else:
            engine.backward(loss, step=True)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken = time.perf_counter() - begin
        if not is_warm:
            seconds.append(taken)
        print(f"step {steps}: {taken:.3f} s{', warming' if is_warm else ''}", flush=True)
        steps += 1
    figures = {
        "frozen": counts[0],
        "trained": counts[1],
        "manage_seconds": prepared if is_managed else None,
        "step_seconds": median(seconds),
        "steps": seconds,
        "tokens_per_second": args.sequences * args.length / median(seconds),
        "losses": losses,
        "torch_peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
    }
    if engine is not None:
        stats = engine.stats()
        figures |= {
            k: stats[k]
            for k in ("host_bytes", "device_peak_bytes", "outside_peak_bytes")
            if k in stats
        }
        figures["rates"] = (engine._runtime.core.plan_info() or {}).get("rates")
        figures["report"] = str(engine.report())
    return figures


def main() -> int:
    """Writes one line of JSON; 1 if the losses of the first steps differ under --deterministic."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="a line is added")
    parser.add_argument("--model", choices=SHAPES, default="opt-14b")
    parser.add_argument("--budget", default="24GB")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--warm", type=int, default=3, help="steps that are not counted")
    parser.add_argument("--steps", type=int, default=5, help="steps that are")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    if args.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
    device = torch.device(args.device)
    found: dict[str, Any] = {}
    for name in ("resident", "gemini"):
        print(name, flush=True)
        driver = open_driver_memory(args.device)
        sources: dict[str, Any] = {"host": host_used}
        if driver is not None:
            sources["device"] = driver.used
        with Peaks(sources) as peaks:
            found[name] = run(args, name == "gemini")
        for source in sources:
            found[name][f"{source}_peak_bytes_above_start"] = peaks.above_start(source)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    n = min(len(found[name]["losses"]) for name in found)
    same = found["resident"]["losses"][:n] == found["gemini"]["losses"][:n]
    line = {
        **{k: str(v) for k, v in vars(args).items() if k != "out"},
        **found,
        "speed": found["gemini"]["tokens_per_second"] / found["resident"]["tokens_per_second"],
        "same_losses": same,
        "environment": environment(device),
    }
    keep_line(line, args.out)
    print(found["gemini"].get("report"))
    for name, figures in found.items():
        print(name, {k: v for k, v in figures.items() if k != "report"})
    print(f"speed {line['speed']:.3f} of the resident run, same losses: {same}")
    return 1 if args.deterministic and not same else 0


if __name__ == "__main__":
    sys.exit(main())
