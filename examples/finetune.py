"""The whole path: a Hugging Face Llama, Lightning, a memory budget, and the proof that it changed no bit.

Downloads nothing.  The text is the Python standard library's own source, the tokenizer is trained
here, and the model starts from random weights.  Run it with `make demo`, or `--help` for the options.

What must hold for the proof:
1. Both runs start from the same seed and see the same batches in the same order.
2. Both runs use deterministic kernels and the same precision on the same device.
3. The unmanaged run uses nothing of the engine: a plain loop, plain tensors, and the optimizer alone.
"""

from __future__ import annotations

import os

# Read when the libraries load.  Threads that wait in a loop halt a machine whose cores others want too.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# One of cuBLAS's two ways to repeat itself exactly.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import argparse
import logging
import math
import sys
import sysconfig
import time
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from tqdm import tqdm

import gemini_strategy as gs
from gemini_strategy.lightning import GeminiStrategy

logging.disable(logging.WARNING)
try:  # it loads torchao where that is installed, which warns of parts for other GPUs that nothing here uses
    from transformers import LlamaConfig, LlamaForCausalLM
finally:
    logging.disable(logging.NOTSET)

PRECISIONS = ("32-true", "bf16-true", "bf16-mixed")
BYTES_PER_PARAMETER = 12  # in each of them: weight and remainder 4, Adam's moments 8
ACCUMULATE = 2  # micro-batches per optimizer step
CLIP = 1.0  # largest gradient norm
FILE_END = "<|file|>"


# ---- 1. text ----------------------------------------------------------------------------------


class Batches(list[Tensor]):
    """Micro-batches (batch, length) int64 in a fixed order; Lightning takes a plain list for several loaders."""


@dataclass
class Text:
    tokenizer: Tokenizer
    train: Batches
    held_out: Batches  # of files that training never sees
    files: int
    held_out_files: int
    characters: int


def standard_library() -> list[Path]:
    """The .py files of the standard library in sorted order, without tests, tables and giants."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "encodings", "pydoc_data", "lib2to3", "idlelib"}
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if any(part in skipped or "test" in part for part in parts):
            continue
        if path.stat().st_size <= 200_000:
            found.append(path)
    return found


def windows(tokens: Tensor, starts: Tensor, batch: int, length: int) -> Batches:
    rows = torch.stack([tokens[start : start + length] for start in starts.tolist()])
    return Batches(rows.split(batch))


def read_text(vocabulary: int, batch: int, length: int, steps: int, seed: int) -> Text:
    paths = standard_library()
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
    # A file is held out by a hash of its name, so that the choice is the same on every machine.
    is_held_out = [zlib.crc32(str(p.relative_to(root)).encode()) % 10 == 0 for p in paths]

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        (text for text, held in zip(texts, is_held_out, strict=True) if not held),
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[FILE_END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    end = tokenizer.token_to_id(FILE_END)
    streams: dict[bool, list[int]] = {False: [], True: []}
    for encoding, held in zip(tokenizer.encode_batch(texts), is_held_out, strict=True):
        streams[held] += [*encoding.ids, end]
    train, held_out = torch.tensor(streams[False]), torch.tensor(streams[True])

    generator = torch.Generator().manual_seed(seed)
    rows = steps * ACCUMULATE * batch
    starts = torch.randint(0, len(train) - length, (rows,), generator=generator)
    return Text(
        tokenizer=tokenizer,
        train=windows(train, starts, batch, length),
        held_out=windows(
            held_out, torch.linspace(0, len(held_out) - length, 16 * batch).long(), batch, length
        ),
        files=len(paths),
        held_out_files=sum(is_held_out),
        characters=sum(map(len, texts)),
    )


# ---- 2. model ---------------------------------------------------------------------------------


def parameter_groups(model: torch.nn.Module, lr: float) -> list[dict[str, Any]]:
    """Three groups, as one would use without Gemini: tables of tokens, other matrices, gains of norms."""
    groups: list[dict[str, Any]] = [
        # Embedding and head: rows see few tokens.
        {"params": [], "lr": 3 * lr, "weight_decay": 0.0},
        {"params": [], "lr": lr, "weight_decay": 0.1},
        {"params": [], "lr": lr, "weight_decay": 0.0},
    ]
    for name, p in model.named_parameters():
        is_table = "embed_tokens" in name or "lm_head" in name
        groups[0 if is_table else 1 if p.ndim >= 2 else 2]["params"].append(p)
    return groups


def warmup_cosine(step: int, steps: int) -> float:
    """Factor of the peak learning rate: linear to 1 over a tenth of the steps, then a half cosine."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


class CausalLM(L.LightningModule):
    """Next-token prediction.  Nothing here knows of Gemini."""

    def __init__(self, config: LlamaConfig, lr: float, steps: int, recompute: bool) -> None:
        super().__init__()
        self.lm = LlamaForCausalLM(config)
        if recompute:
            self.lm.gradient_checkpointing_enable()
        self.lr, self.steps = lr, steps
        self.losses: list[float] = []  # of each micro-batch, exact
        self.seconds = 0.0  # inside training batches, optimizer included
        self._began = 0.0

    def loss(self, ids: Tensor) -> Tensor:
        return self.lm(input_ids=ids, labels=ids, use_cache=False).loss

    def training_step(self, ids: Tensor, index: int) -> Tensor:
        loss = self.loss(ids)
        self.losses.append(loss.item())
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, ids: Tensor, index: int) -> None:
        self.log("val_loss", self.loss(ids), prog_bar=True, batch_size=len(ids))

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(parameter_groups(self, self.lr), betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: warmup_cosine(step, self.steps)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_start(self, batch: Tensor, index: int) -> None:
        self._began = time.perf_counter()

    def on_train_batch_end(self, outputs: Any, batch: Tensor, index: int) -> None:
        self.seconds += time.perf_counter() - self._began


@dataclass
class Size:
    layers: int
    hidden: int
    batch: int  # sequences per micro-batch
    length: int  # tokens per sequence
    lr: float
    budget: str


def size_for(device: torch.device) -> Size:
    """About 11 M parameters on a CPU; on a GPU about 0.5 G if its free memory holds the unmanaged run too.

    On a GPU the budget counts the activations as well, on the CPU only what the engine places there.
    """
    if device.type == "cpu":
        return Size(layers=3, hidden=448, batch=4, length=96, lr=2e-3, budget="0.15")
    free, _ = torch.cuda.mem_get_info(device)
    if free >= 16 * 2**30:
        return Size(layers=16, hidden=1536, batch=16, length=256, lr=5e-4, budget="0.5")
    return Size(layers=12, hidden=768, batch=8, length=256, lr=1e-3, budget="0.9")


def llama_config(size: Size, vocabulary: int, end_token: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=size.hidden,
        intermediate_size=64 * round(size.hidden * 8 / 3 / 64),
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 64,
        max_position_embeddings=1024,
        bos_token_id=end_token,
        eos_token_id=end_token,
        pad_token_id=end_token,
        initializer_range=0.8 / math.sqrt(size.hidden),  # leaves the start in fewer steps than 0.02
        # Written-out attention: the fused kernels' backward differs from run to run on a GPU.
        attn_implementation="eager",
    )


def faster_precision(device: torch.device, hidden: int) -> tuple[str, str]:
    """(precision, reason): bf16 where this machine multiplies it at least as fast as fp32."""
    if device.type != "cpu":
        return "bf16-true", "the GPU's native precision"
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.ones(1024, hidden, dtype=dtype), torch.ones(hidden, 4 * hidden, dtype=dtype)
        times = []
        for _ in range(8):
            began = time.perf_counter()
            torch.mm(a, b)
            times.append(time.perf_counter() - began)
        seconds[dtype] = min(times)
    ratio = seconds[torch.float32] / seconds[torch.bfloat16]
    reason = f"this processor multiplies bf16 at {ratio:.1f} x the speed of fp32, measured just now"
    return ("bf16-true" if ratio >= 1 else "32-true"), reason


# ---- 3. the run under a budget ----------------------------------------------------------------


@dataclass
class State:
    """What training produced, on the host in fp32, by parameter name."""

    masters: dict[str, Tensor]
    exp_avg: dict[str, Tensor]
    exp_avg_sq: dict[str, Tensor]
    losses: Tensor


def optimizer_order(module: torch.nn.Module) -> list[str]:
    """Names in the order in which an optimizer over parameter_groups() numbers its parameters."""
    names = {id(p): name for name, p in module.named_parameters()}
    return [names[id(p)] for group in parameter_groups(module, 0.0) for p in group["params"]]


def managed_state(module: CausalLM) -> State:
    engine = gs.engine_of(module)
    weights = engine.model_state_dict(masters=True)
    moments = engine.optimizer_state_dict()["state"]
    order = optimizer_order(module)
    return State(
        masters={name: weights[name].clone() for name in order},
        exp_avg={name: moments[i]["exp_avg"].cpu().clone() for i, name in enumerate(order)},
        exp_avg_sq={name: moments[i]["exp_avg_sq"].cpu().clone() for i, name in enumerate(order)},
        losses=torch.tensor(module.losses),
    )


def continue_text(module: CausalLM, text: Text, prompt: str, tokens: int) -> str:
    ids = torch.tensor([text.tokenizer.encode(prompt).ids], device=module.lm.device)
    module.lm.eval()
    with torch.no_grad():
        out = module.lm.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=True,
            temperature=0.6,
            top_k=20,
        )
    return text.tokenizer.decode(out[0].tolist())


# ---- 4. the same run without Gemini -----------------------------------------------------------


def fp32_masters(p: Tensor, state: dict[str, Tensor]) -> Tensor:
    """The fp32 weight that the optimizer keeps: hi and lo of a bf16 weight put together again."""
    if "remainder" in state:
        high = p.detach().view(torch.int16).to(torch.int32) << 16
        return (high + state["remainder"].to(torch.int32)).view(torch.float32)
    return p.detach()


def train_unmanaged(
    module: CausalLM, batches: list[Tensor], precision: str, device: torch.device, quiet: bool
) -> State:
    gs.cast_model_(module, precision)
    module.to(device).train()
    optimizer = gs.HybridAdam(parameter_groups(module, module.lr), betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warmup_cosine(step, module.steps)
    )
    for index, ids in enumerate(tqdm(batches, desc="No budget", disable=quiet, mininterval=2.0)):
        began = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=precision.endswith("mixed")):
            loss = module.loss(ids.to(device))
        module.losses.append(loss.item())
        (loss / ACCUMULATE).backward()
        if (index + 1) % ACCUMULATE == 0:
            optimizer.clip_grad_norm_(CLIP)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        module.seconds += time.perf_counter() - began
    parameters = dict(module.named_parameters())
    state = {name: optimizer.state[p] for name, p in parameters.items()}
    return State(
        masters={n: fp32_masters(p, state[n]).cpu() for n, p in parameters.items()},
        exp_avg={n: s["exp_avg"].cpu() for n, s in state.items()},
        exp_avg_sq={n: s["exp_avg_sq"].cpu() for n, s in state.items()},
        losses=torch.tensor(module.losses),
    )


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> int:
    """Elements whose 32 bits differ; NaN equals the same NaN and 0.0 differs from -0.0."""
    return sum(int((a[n].view(torch.int32) != b[n].view(torch.int32)).sum()) for n in b)


# ---- what the person sees ---------------------------------------------------------------------


def mb(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e10 else f"{count / 1e6:.1f} MB"


def headline(number: int, title: str) -> None:
    print(f"\n{number}. {title}", flush=True)


def line(name: str, value: str) -> None:
    print(f"   {name:<22} {value}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small Llama on Python's own source under a memory budget, and compare "
        "every weight with the same run without one."
    )
    parser.add_argument(
        "--steps", type=int, default=None, help="optimizer steps (default 200; 120 on a GPU)"
    )
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
    parser.add_argument(
        "--budget",
        help="device budget: a fraction of the training state or a size like 80MB "
        "(default 0.15 on a CPU, 0.5 or more on a GPU, where activations count)",
    )
    parser.add_argument("--layers", type=int, help="decoder layers")
    parser.add_argument("--hidden", type=int, help="width, a multiple of 64")
    parser.add_argument("--vocabulary", type=int, default=4096, help="tokens (default 4096)")
    parser.add_argument(
        "--precision",
        default="auto",
        choices=["auto", *PRECISIONS],
        help="default: bf16-true, or 32-true on a processor where that is faster",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--prompt", default="def __init__(self", help="what the trained model continues"
    )
    parser.add_argument("--no-proof", action="store_true", help="skip the run without Gemini")
    return parser.parse_args()


def settle_libraries() -> None:
    """Kernels that repeat themselves, and fewer notes."""
    # Equal bits need kernels that repeat themselves, with and without Gemini.
    torch.use_deterministic_algorithms(True)
    # Costs time and decides no bit here.
    torch.utils.deterministic.fill_uninitialized_memory = False
    # Lightning's notes about accelerators and its products are not this program's subject.
    for tree in ("lightning", "pytorch_lightning", "lightning_fabric"):
        for name in (tree, f"{tree}.pytorch", f"{tree}.fabric"):
            logging.getLogger(name).setLevel(logging.WARNING)
    # Lightning 2.6 asks torch 2.13's pytree a question in the old way.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")


def size_asked(args: argparse.Namespace, device: torch.device) -> Size:
    """That of the device, where the arguments do not say otherwise."""
    size = size_for(device)
    size.layers, size.hidden = args.layers or size.layers, args.hidden or size.hidden
    size.budget = args.budget or size.budget
    if size.hidden % 64:
        raise SystemExit(f"--hidden {size.hidden}: must be a multiple of 64")
    return size


def budget_bytes(budget: str, training_state: int) -> int:
    """--budget in bytes; a fraction is one of the training state."""
    is_fraction = budget.replace(".", "", 1).isdigit()
    try:
        return gs.parse_bytes(float(budget) if is_fraction else budget, training_state, "--budget")
    except ValueError as error:
        raise SystemExit(str(error)) from None


def make_trainer(budget: int, precision: str, device: torch.device, refresh_rate: int) -> L.Trainer:
    """Lightning's, with the device budget; all else is as without Gemini."""
    return L.Trainer(
        strategy=GeminiStrategy(device_budget=budget),
        accelerator="cpu" if device.type == "cpu" else "gpu",
        devices=1 if device.index is None else [device.index],
        precision=precision,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=CLIP,
        max_epochs=1,
        val_check_interval=0.5,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[TQDMProgressBar(refresh_rate=refresh_rate)],
    )


def tell(stats: dict[str, int | float], tokens: int, seconds: float) -> None:
    """How fast it was, and what moved."""
    line("speed", f"{tokens / seconds:,.0f} tokens/s over {seconds:.0f} s of training")
    line(
        "device peak",
        f"{mb(stats['device_peak_bytes'])} of a budget of {mb(stats['device_budget_bytes'])}",
    )
    line("fetched to the device", f"{mb(stats['fetched_bytes'])} in {stats['fetches']:,} fetches")
    line(
        "evicted from it",
        f"{stats['evictions']:,} times; {mb(stats['evicted_bytes'])} had changed and was written back",
    )


def compare(managed: State, plain: State, parameters: int, speed: float) -> bool:
    """Whether both runs have left the same bits; counts what differs."""
    weights = differing(managed.masters, plain.masters)
    moments = differing(managed.exp_avg, plain.exp_avg)
    moments += differing(managed.exp_avg_sq, plain.exp_avg_sq)
    # As bits: a loss that is NaN on both sides is the same loss.
    losses = int((managed.losses.view(torch.int64) != plain.losses.view(torch.int64)).sum())
    line("speed without Gemini", f"{speed:,.0f} tokens/s")
    line("fp32 weights", f"{weights:,} of {parameters:,} differ")
    line("Adam's moments", f"{moments:,} of {2 * parameters:,} differ")
    line("training losses", f"{losses} of {len(plain.losses)} differ")
    return weights + moments + losses == 0


def main() -> int:
    args = parse_arguments()
    began = time.perf_counter()
    settle_libraries()
    quiet = not sys.stderr.isatty()

    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(args.device)
    size = size_asked(args, device)
    precision, reason = args.precision, "as asked"
    if precision == "auto":
        precision, reason = faster_precision(device, size.hidden)

    print("Gemini: the same training run in less device memory.")

    headline(1, "Text: the Python standard library on this machine")
    if args.steps is None:  # the larger model diverges at this rate after some 165 steps
        args.steps = 200 if device.type == "cpu" else 120
    text = read_text(args.vocabulary, size.batch, size.length, args.steps, args.seed)
    line("files", f"{text.files}, of which {text.held_out_files} held out for validation")
    line("characters", f"{text.characters / 1e6:.1f} M")
    line("tokenizer", f"byte-level BPE trained here, {text.tokenizer.get_vocab_size()} tokens")

    config = llama_config(
        size, text.tokenizer.get_vocab_size(), text.tokenizer.token_to_id(FILE_END)
    )

    def build() -> CausalLM:
        torch.manual_seed(args.seed)
        return CausalLM(config, size.lr, args.steps, recompute=device.type == "cuda")

    headline(2, "Model: a Llama from Hugging Face transformers, random weights")
    module = build()
    parameters = sum(p.numel() for p in module.parameters())
    training_state = parameters * BYTES_PER_PARAMETER
    budget = budget_bytes(size.budget, training_state)
    line("parameters", f"{parameters / 1e6:.1f} M ({size.layers} layers of {size.hidden})")
    line("precision", f"{precision} ({reason})")
    line("training state", f"{mb(training_state)}: {BYTES_PER_PARAMETER} bytes per parameter")
    line("device", "CPU (device memory is simulated)" if device.type == "cpu" else str(device))
    line("device budget", f"{mb(budget)}, {budget / training_state:.0%} of the training state")

    headline(
        3, f"Training under the budget: Trainer(strategy=GeminiStrategy(...)), {args.steps} steps"
    )
    trainer = make_trainer(budget, precision, device, max(1, len(text.train) // 8) if quiet else 1)
    before = trainer.validate(module, text.held_out, verbose=False)[0]["val_loss"]
    trainer.fit(module, text.train, text.held_out)
    after = float(trainer.callback_metrics["val_loss"])

    tokens = args.steps * ACCUMULATE * size.batch * size.length
    headline(4, "Result")
    line("validation loss", f"{before:.3f} before, {after:.3f} after")
    tell(gs.engine_of(module).stats(), tokens, module.seconds)

    headline(5, f"What it writes after {args.prompt!r} (still under the budget)")
    torch.manual_seed(args.seed)
    for written in continue_text(module, text, args.prompt, 80).splitlines():
        print(f"   | {written}")

    if args.no_proof:
        return 0
    headline(6, "Proof: the same seed without Gemini, a plain PyTorch loop")
    managed = managed_state(module)
    gs.engine_of(module).close()
    del module, trainer
    reference = build()
    plain = train_unmanaged(reference, text.train, precision, device, quiet)
    is_equal = compare(managed, plain, parameters, tokens / reference.seconds)
    print(
        f"\n{'Bit-identical' if is_equal else 'NOT IDENTICAL'}: {args.steps} steps under "
        f"{budget / training_state:.0%} of the memory "
        f"{'gave exactly the run that' if is_equal else 'did not give the run that'} has it all. "
        f"({time.perf_counter() - began:.0f} s)"
    )
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
