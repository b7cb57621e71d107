"""Colossal-AI's OPT example, over Gemini: fine-tune an OPT-shaped model with a budget, on one rank or several.

    python examples/opt.py --model 125m --shrink 8                       # a CPU, a minute
    python examples/opt.py --model 1.3b --nprocs 2 --device-budget 24GB  # GPUs

The model has random weights of the published shape (--weights takes a Hugging Face folder instead), the text is the
Python standard library's own source, read as bytes: nothing is downloaded. More ranks than one are started here with
torchrun, each with batches of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoConfig, OPTConfig, OPTForCausalLM, get_linear_schedule_with_warmup

import gemini_strategy.colossalai as colossalai

# layers, hidden size, heads; the feed-forward size is four times the hidden one.
SHAPES = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "1.3b": (24, 2048, 32),
    "2.7b": (32, 2560, 32),
    "6.7b": (32, 4096, 32),
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune an OPT-shaped model.")
    parser.add_argument("--model", choices=SHAPES, default="125m", help="the published shape")
    parser.add_argument("--shrink", type=int, default=1, help="divide layers and sizes by this")
    parser.add_argument("--weights", help="a Hugging Face folder of an OPT, instead of --model")
    parser.add_argument("--nprocs", type=int, default=1, help="ranks to start on this machine")
    parser.add_argument("--pipeline", type=int, default=1, help="is refused if it is not 1")
    parser.add_argument("--tensor", type=int, default=1, help="is refused if it is not 1")
    parser.add_argument("--placement-policy", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--device-budget", help="device memory of each rank, such as 24GB")
    parser.add_argument("--precision", help="16-mixed with CUDA, else bf16-mixed")
    parser.add_argument("--batch-size", type=int, default=4, help="of each rank")
    parser.add_argument("--length", type=int, default=128, help="tokens of one sample")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--save", type=Path, help="a folder for the trained model")
    return parser.parse_args(argv)


def configuration(args: argparse.Namespace) -> dict[str, object]:
    """As the article's file has it."""
    return {
        "zero": {
            "model_config": {
                "shard_strategy": colossalai.TensorShardStrategy(),
                "tensor_placement_policy": args.placement_policy,
            },
            "optimizer_config": {"initial_scale": 2**10},
        },
        "parallel": {"pipeline": args.pipeline, "tensor": {"size": args.tensor, "mode": "1d"}},
        "clip_grad_norm": 1.0,
    }


def shape(args: argparse.Namespace) -> OPTConfig:
    if args.weights:
        return AutoConfig.from_pretrained(args.weights)
    layers, hidden, heads = SHAPES[args.model]
    hidden = max(hidden // args.shrink, 16)
    return OPTConfig(
        vocab_size=50272 if args.shrink == 1 else 256,
        hidden_size=hidden,
        word_embed_proj_dim=hidden,
        ffn_dim=4 * hidden,
        num_hidden_layers=max(layers // args.shrink, 1),
        num_attention_heads=max(heads // args.shrink, 1),
        max_position_embeddings=max(args.length, 16),
        dropout=0.0,
    )


def samples(length: int, n: int) -> list[Tensor]:
    """The standard library's source as bytes, in samples (length,) int64."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join((folder / name).read_bytes() for name in ("argparse.py", "typing.py", "ast.py"))
    found = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return list(found[: len(found) // length * length].view(-1, length)[:n])


def train(args: argparse.Namespace) -> list[float]:
    """The article's loop; the losses of this rank."""
    colossalai.launch_from_torch(config=configuration(args))
    device = colossalai.get_current_device()
    strategy = colossalai.TensorShardStrategy()
    with colossalai.ZeroInitContext(device, strategy, shard_param=True):
        model = OPTForCausalLM(shape(args))
    model.gradient_checkpointing_enable()
    optimizer = colossalai.HybridAdam(model.parameters(), lr=args.lr)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, 10 * args.steps)

    n_ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    data = samples(args.length, args.steps * args.batch_size * n_ranks)
    sampler = DistributedSampler(data, shuffle=False) if n_ranks > 1 else None
    engine, loader, _, schedule = colossalai.initialize(
        model=model,
        optimizer=optimizer,
        train_dataloader=DataLoader(data, batch_size=args.batch_size, sampler=sampler),
        lr_scheduler=schedule,
        device_budget=args.device_budget,
        precision=args.precision or ("16-mixed" if device.type == "cuda" else "bf16-mixed"),
        weights=args.weights,
    )
    gemini = engine.model.engine
    is_first = gemini.ranks.rank == 0
    losses = []
    engine.train()
    for step, tokens in enumerate(loader):
        tokens = tokens.to(device)
        start = time.monotonic()
        engine.zero_grad()
        outputs = engine(input_ids=tokens, labels=tokens, use_cache=False)
        engine.backward(outputs["loss"])
        engine.step()
        schedule.step()
        losses.append(outputs["loss"].item())
        if is_first:
            print(f"step {step + 1}  loss {losses[-1]:.4f}  {time.monotonic() - start:.2f} s")
    stats = gemini.stats()
    if is_first:
        print(
            f"{stats['parameters'] / 1e6:.1f} M parameters, {n_ranks} ranks, device peak "
            f"{stats['device_peak_bytes'] / 1e6:.1f} MB each"
        )
    if args.save:
        gemini.save_pretrained(args.save)
    engine.close()
    return losses


def main() -> int:
    args = parse()
    if args.nprocs == 1 or torch.distributed.is_torchelastic_launched():
        train(args)
        return 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, f"--nproc-per-node={args.nprocs}", *sys.argv]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
