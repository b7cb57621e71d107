"""Equal bits at size: a transformer of 0.4 billion parameters trained under every policy and several budgets.

    python benchmarks/check_bits.py [--steps 200] [--out FILE]

Each run trains with clipping and two micro-batches per step on deterministic kernels, then hashes (SHA-256) all
weights, fp32 masters, moments, losses and norms. The first run is the unmanaged loop: `cast_model_` and
`HybridAdam` on plain tensors. Budgets are shares of the training state, beside what torch and the driver hold.
"immediate" runs leave out clipping and say which backward ends the step; they have an unmanaged run of their own.

One JSON line per run on standard output, appended to --out; the last line says whether all of a kind are equal.
The exit status is 1 if any are not.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

# read by cuBLAS when its first handle is made
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from lines import keep_line
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gemini_strategy as gs

MICRO_BATCHES = 2
CLIP = 0.5
RUNS = [
    # kind, policy (None: unmanaged), share of the training state
    ("deferred", None, None),
    ("deferred", "cuda", None),
    ("deferred", "auto", 1.0),
    ("deferred", "auto", 0.6),
    ("deferred", "auto", 0.35),
    ("deferred", "cpu", 0.35),
    ("immediate", None, None),
    ("immediate", "auto", 0.6),
    ("immediate", "auto", 0.35),
]


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        heads = self.qkv(self.first(x)).view(rows, length, 3, width // 64, 64)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Transformer(nn.Module):
    def __init__(self, width: int, depth: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(self.norm(x))


def build(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """The same first weights in every run, drawn on the device because that is faster."""
    with torch.device("meta"):
        model = Transformer(args.width, args.depth, args.vocabulary)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(
                    float(name.endswith(("first.weight", "second.weight", "norm.weight")))
                )
    return model.train()


def digest(parts: list[Tensor]) -> str:
    sha = hashlib.sha256()
    for part in parts:
        sha.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return sha.hexdigest()[:24]


def merged(weight: Tensor, state: dict[str, Tensor]) -> Tensor:
    """The fp32 master of a bf16 weight on plain tensors: its bits are (hi << 16) + lo."""
    high = weight.detach().cpu().view(torch.int16).to(torch.int32) << 16
    return (high + state["remainder"].cpu().to(torch.int32)).view(torch.float32)


def result(model: nn.Module, optimizer: Any, engine: gs.Engine | None) -> dict[str, str]:
    """One hash of each kind of number, in the order of the parameters."""
    moments = optimizer.state_dict()["state"]
    names = [name for name, _ in model.named_parameters()]
    if engine is None:
        weights = [p.detach() for p in model.parameters()]
        masters = [merged(p, optimizer.state[p]) for p in model.parameters()]
    else:
        low, full = engine.model_state_dict(masters=False), engine.model_state_dict(masters=True)
        weights, masters = [low[n] for n in names], [full[n] for n in names]
    return {
        "weights": digest(weights),
        "masters": digest(masters),
        "exp_avg": digest([moments[i]["exp_avg"] for i in range(len(names))]),
        "exp_avg_sq": digest([moments[i]["exp_avg_sq"] for i in range(len(names))]),
    }


def train(
    args: argparse.Namespace, kind: str, policy: str | None, share: float | None
) -> dict[str, Any]:
    """One run, as a dict for its line."""
    device = torch.device(args.device)
    torch.manual_seed(0)
    model = build(args, device)
    parameters = sum(p.numel() for p in model.parameters())
    budget = engine = None
    if policy is None:
        gs.cast_model_(model, "bf16-true")
    else:
        model.cpu()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        if share is not None:
            budget = total - free + args.around + int(share * 12 * parameters)
    elif share is not None:
        budget = int((0.1 + share) * 12 * parameters)
    optimizer = gs.HybridAdam(model.parameters(), lr=1e-4, weight_decay=0.01)
    if policy is not None:
        engine = gs.manage(
            model,
            optimizer,
            device=device,
            device_budget=budget,
            placement_policy=policy,
            precision="bf16-true",
        )
    clips = kind == "deferred"
    numbers: list[Tensor] = []
    generator = torch.Generator().manual_seed(9)
    began = time.perf_counter()
    for _ in range(args.steps):
        for micro in range(MICRO_BATCHES):
            shape = (args.sequences, args.length)
            ids = torch.randint(args.vocabulary, shape, generator=generator).to(device)
            logits = model(ids)[:, :-1].float()
            loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            numbers.append(loss.detach())
            if engine is None:
                (loss / MICRO_BATCHES).backward()
            else:
                is_end = not clips and micro == MICRO_BATCHES - 1
                engine.backward(loss / MICRO_BATCHES, step=is_end)
        if clips:
            owner = optimizer if engine is None else engine
            numbers.append(torch.as_tensor(owner.clip_grad_norm_(CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    line: dict[str, Any] = {
        "kind": kind,
        "policy": policy or "unmanaged",
        "share": share,
        "device_budget_bytes": budget,
        "parameters": parameters,
        "steps": args.steps,
        "seconds": round(time.perf_counter() - began, 1),
        "last_loss": float(numbers[-2 if clips else -1]),
    }
    line["hashes"] = {
        **result(model, optimizer, engine),
        "losses": digest([n.float().cpu() for n in numbers]),
    }
    if engine is not None:
        stats, info = engine.stats(), engine._runtime.core.plan_info()
        keys = ("planned", "plans", "plan_breaks", "replay_waits", "device_peak_bytes")
        line.update({key: stats[key] for key in keys})
        line["classes"] = info and {name: n for name, n in info["n_of_class"].items() if n}
        line["when"] = info and info["when"]
        engine.close()
    return line


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Equal bits under every policy and budget.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--sequences", type=int, default=2, help="per micro-batch")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N; cpu for a try")
    parser.add_argument(
        "--around",
        type=int,
        default=1 << 30,
        help="bytes of a budget beside the training state: activations, workspaces, the driver's reserve",
    )
    parser.add_argument("--only", default="", help="deferred or immediate")
    parser.add_argument("--out", type=Path, help="a .jsonl file to append to")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs time and decides no bit
    for name in ("flash", "mem_efficient", "cudnn"):  # their backward differs from run to run
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(False)

    lines = []
    for kind, policy, share in RUNS:
        if args.only in ("", kind):
            lines.append(train(args, kind, policy, share))
            keep_line(lines[-1], args.out)
            if args.device.startswith("cuda"):
                torch.cuda.empty_cache()
    first = {line["kind"]: line["hashes"] for line in reversed(lines)}
    unequal = [
        f"{line['kind']} {line['policy']} {line['share']}"
        for line in lines
        if line["hashes"] != first[line["kind"]]
    ]
    summary = {
        "equal": not unequal,
        "unequal": unequal,
        "runs": len(lines),
        "steps": args.steps,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if args.device != "cpu" else platform.machine(),
    }
    keep_line(summary, args.out)
    return int(bool(unequal))


if __name__ == "__main__":
    sys.exit(main())
