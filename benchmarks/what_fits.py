"""Prints README's table of what fits: models and machines, and what `gemini-strategy estimate` says of them.

    python benchmarks/what_fits.py            prints it, after some minutes
    python benchmarks/what_fits.py --write    puts it into README.md, between the two comments

The shapes are those of the models' published config.json; no weights are read. A step has 8,192 tokens in two
micro-batches, with activation checkpointing, and clips. SYSTEM is left to the rest of the host.
"""

import argparse
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from table import put
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

import gemini_strategy as gs
from gemini_strategy.estimates.hugging_face import build_model

BEGIN, END = "<!-- fits -->\n", "<!-- /fits -->\n"
SEQUENCES, LENGTH, MICRO_BATCHES = 2, 2048, 2
SYSTEM = 18  # GB of the host
MACHINES = (("rtx4090", 64), ("rtx4090", 128), ("rtx4090", 256), ("h100", 256))  # GB of RAM


@dataclass(frozen=True)
class Row:
    """A model and what of it is trained; `how`: build_model's arguments."""

    what: str
    shape: PretrainedConfig
    how: dict[str, Any] = field(default_factory=dict)


LLAMA_3B = LlamaConfig(
    vocab_size=128256,
    hidden_size=3072,
    intermediate_size=8192,
    num_hidden_layers=28,
    num_attention_heads=24,
    num_key_value_heads=8,
    tie_word_embeddings=True,
    dtype="bfloat16",
)
LLAMA_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    dtype="bfloat16",
)
_QWEN3 = {
    "vocab_size": 151936,
    "hidden_size": 5120,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
QWEN3_14B = Qwen3Config(
    intermediate_size=17408, num_hidden_layers=40, num_attention_heads=40, **_QWEN3
)
QWEN3_32B = Qwen3Config(
    intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64, **_QWEN3
)
ROWS = (
    Row("Llama-3.2-3B, all weights", LLAMA_3B),
    Row("Llama-3.1-8B, all weights", LLAMA_8B),
    Row("Qwen3-14B, all weights", QWEN3_14B),
    Row("Qwen3-14B, LoRA", QWEN3_14B, {"lora": 16}),
    Row("Qwen3-32B, LoRA", QWEN3_32B, {"lora": 16}),
)


def model(row: Row) -> torch.nn.Module:
    with tempfile.TemporaryDirectory() as folder:
        row.shape.save_pretrained(folder)
        built: Any = build_model(Path(folder), None, **row.how)
    built.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if row.how:
        built.enable_input_require_grads()
    return built


def cell(built: torch.nn.Module, gpu: str, ram: int) -> str:
    """Tokens/s if it fits, and else the host's memory with which it would."""
    ids = torch.empty(SEQUENCES, LENGTH, dtype=torch.long, device="meta")
    found = gs.estimate(
        built,
        {"input_ids": ids, "labels": ids},
        gpu=gpu,
        host_budget=(ram - SYSTEM) * 10**9,
        precision="bf16-mixed",
        micro_batches=MICRO_BATCHES,
    )
    if found.fits:
        return f"{found.schedules[0].tokens_per_s:,.0f} tokens/s"
    (refusal,) = found.refusals
    assert refusal.what == "host" and refusal.enough is not None, refusal.text
    return f"no: {refusal.enough / 1e9 + SYSTEM:.0f} GB of RAM"


def head() -> str:
    names = {"rtx4090": "RTX 4090, 24 GB", "h100": "H100, 80 GB"}
    columns = " | ".join(f"{names[gpu]} + {ram} GB of RAM" for gpu, ram in MACHINES)
    return f"| | {columns} |\n|---|{'---|' * len(MACHINES)}\n"


def table() -> str:
    made = head()
    for row in ROWS:
        built = model(row)
        cells = [cell(built, gpu, ram) for gpu, ram in MACHINES]
        made += f"| {row.what} | {' | '.join(cells)} |\n"
        print(made.splitlines()[-1], file=sys.stderr)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace the table in README.md")
    is_written = parser.parse_args().write
    made = table()
    if is_written:
        put(made, BEGIN, END)
    else:
        print(made, end="")


if __name__ == "__main__":
    main()
