"""Adapters on a frozen base under a budget, beside the same loop with everything on the device.

`python3 benchmarks/bench_lora.py --out FILE` trains LoRA adapters of a frozen bf16 model twice in one process, first
without an engine and then under `--budget`, from the same values on the same batches, and adds one line with the
figures of both (those of bench_offload.py). Both losses are the same to the bit where the device's kernels are
deterministic (`--deterministic`), which makes both runs slower.
"""

import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from lines import budget, keep_line, parser_of
from loops import Gemini, Hybrid, Loop, run
from shapes import SHAPES


def adapted(base: torch.nn.Module, rank: int) -> Any:
    """The model with adapters of this rank on every linear layer of its blocks."""
    from peft import LoraConfig, get_peft_model

    names = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
    torch.manual_seed(0)
    adapters = LoraConfig(r=rank, lora_alpha=16, target_modules=names)
    return get_peft_model(base, adapters).to(torch.bfloat16)


class Adapted(Loop):
    """Trains the adapters of a frozen model."""

    def build(self) -> Any:
        return adapted(super().build(), self.spec["rank"])

    def report(self) -> dict[str, Any]:
        return {"trained": sum(p.numel() for p in self.model.parameters() if p.requires_grad)}


class Resident(Adapted, Hybrid):
    """Everything on the device."""


class Managed(Adapted, Gemini):
    """Under the budget."""

    def report(self) -> dict[str, Any]:
        return super().report() | Gemini.report(self) | {"report": str(self.engine.report())}


def main() -> int:
    """Writes one line of JSON; 1 if a run failed, or if their losses differ under --deterministic."""
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a line is added")
    parser.add_argument("--model", choices=SHAPES, default="opt-14b")
    parser.add_argument("--budget", type=budget, default="24GB")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--warmup", type=int, default=3, help="steps that are not counted")
    parser.add_argument("--steps", type=int, default=5, help="steps that are")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    if args.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
    on_gpu = args.device.startswith("cuda")
    fixed = {"policy": "auto", "clip": False, "micro_batches": 1, "threads": 0, "timeline": None}
    found: dict[str, Any] = {}
    for name, loop in (("resident", Resident), ("gemini", Managed)):
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder, "result.json")
            spec = vars(args) | fixed | {"system": name, "sample_here": on_gpu}
            run(spec | {"result": str(result)}, {name: loop})
            found[name] = json.loads(result.read_text())
        if found[name]["error"]:
            print(f"{name}: {found[name]['error']}")
            return 1
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
    resident, gemini = found["resident"], found["gemini"]
    n = min(len(figures["losses"]) for figures in found.values())
    same = resident["losses"][:n] == gemini["losses"][:n]
    line = {
        **{key: str(value) for key, value in vars(args).items() if key != "out"},
        **found,
        "speed": gemini["tokens_per_s"] / resident["tokens_per_s"],
        "same_losses": same,
    }
    keep_line(line, args.out)
    print(f"{gemini['report']}\nspeed {line['speed']:.3f} of the resident run, same losses: {same}")
    return int(args.deterministic and not same)


if __name__ == "__main__":
    sys.exit(main())
