"""Which models train on which GPU beside how much host memory, and how fast: by estimate, as a table in Markdown.

    python benchmarks/fits.py [--micro-batches 4] [--lora 16]

Each cell is what `gemini-strategy estimate MODEL --tokens 4x1024 --checkpointing --gpu GPU --host-budget BUDGET` says
of a clipped step and of one that ends with backward(step=True), in tokens/s; "-" where the model does not fit. Nothing
is measured and nothing is allocated. A model has the shape that its publisher gives; no file of theirs is read.
"""

from __future__ import annotations

import argparse
import inspect
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from gemini_strategy.estimates.forecast import Forecaster, estimate, settings_of
from gemini_strategy.estimates.machines import machine_of
from gemini_strategy.estimates.paper import PaperModel
from gemini_strategy.estimates.step import record

MODELS: dict[str, Any] = {
    "Llama-3.2-1B": LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
        num_attention_heads=32, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True,
    ),
    "Llama-3.2-3B": LlamaConfig(
        vocab_size=128256, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28,
        num_attention_heads=24, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    ),
    "Qwen2.5-7B": Qwen2Config(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
        num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False,
    ),
    "Llama-3.1-8B": LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=False,
    ),
    "Qwen3-14B": Qwen3Config(
        vocab_size=151936, hidden_size=5120, intermediate_size=17408, num_hidden_layers=40,
        num_attention_heads=40, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
    ),
}  # fmt: skip
GPUS = ("rtx3090", "rtx4090", "rtx5090", "l40s", "h100")
HOSTS = {"32 GB": "24GB", "64 GB": "46GB", "128 GB": "110GB", "256 GB": "238GB"}


def model_of(name: str, lora: int | None) -> Any:
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(MODELS[name], dtype=torch.bfloat16)
        model.config.use_cache = False
        if lora:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=lora, target_modules="all-linear"))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if lora:
        model.enable_input_require_grads()
    return model.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--lora", type=int)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    arguments = parser.parse_args()
    head = ("model", "GPU", *HOSTS)
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    ids = torch.empty((4, 1024), dtype=torch.long, device="meta")
    for name in arguments.models:
        model = model_of(name, arguments.lora)
        names = inspect.signature(estimate).parameters.items()
        given = {key: parameter.default for key, parameter in names} | {"precision": "bf16-mixed"}
        first = settings_of(given, machine_of(GPUS[0]))
        paper = PaperModel(model, None, first.device, first.precision)
        inputs = {"input_ids": ids, "labels": ids}
        recorded = record(
            model, inputs, paper.registration, first.precision, is_cuda=True, convert_inputs=True
        )
        for gpu in GPUS:
            machine = machine_of(gpu)
            cells = []
            for budget in HOSTS.values():
                settings = settings_of({**given, "host_budget": budget}, machine)
                forecaster = Forecaster(paper, recorded, machine, arguments.micro_batches)
                schedules, _ = forecaster.schedules(settings)
                rates = dict.fromkeys(
                    f"{s.tokens_per_s:,.0f}" for s in schedules[:: len(schedules) - 1 or 1]
                )
                cells.append(" / ".join(rates) or "-")
            print(f"| {name} | {gpu} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
