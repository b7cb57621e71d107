"""`gemini-strategy estimate`: the forecast for a Hugging Face folder or its config.json, from the command line."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import torch

from gemini_strategy.arguments import POLICIES
from gemini_strategy.errors import GeminiError
from gemini_strategy.estimates.forecast import estimate
from gemini_strategy.estimates.hugging_face import build_model
from gemini_strategy.estimates.machines import GPUS
from gemini_strategy.estimates.quantized import KINDS
from gemini_strategy.precision import PRECISIONS

_SWEEP = ("6GB", "8GB", "12GB", "16GB", "24GB", "32GB", "48GB", "80GB")


def _tokens(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if match is None or not int(match[1]) or not int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r}: give sequences x length, as in 8x1024")
    return int(match[1]), int(match[2])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("config", help="a Hugging Face folder, or its config.json")
    add("--tokens", type=_tokens, default=(1, 1024), metavar="SEQUENCESxLENGTH",
        help="of one micro-batch (1x1024)")  # fmt: skip
    add("--micro-batches", type=int, default=1, help="of one optimizer step (1)")
    add("--ranks", type=int, default=1, help="that train together on one host, each with a GPU (1)")
    add("--device-budget", help='such as "24GB"; the GPU\'s memory if not given')
    add(
        "--host-budget",
        help='such as "64GB"; no limit for homes if not given, and spares only if the GPU is here',
    )
    add("--precision", choices=PRECISIONS, default="bf16-mixed")
    add("--policy", choices=tuple(POLICIES), default="auto")
    add("--checkpointing", action="store_true", help="activation checkpointing is on")
    add(
        "--lora",
        type=int,
        metavar="RANK",
        help="train adapters of this rank alone, on all linear layers",
    )
    add("--quantized", choices=KINDS, help="the linear layers' weights, with --lora: QLoRA")
    add("--attention", help="attn_implementation of the model (sdpa, or eager if it has no other)")
    add("--gpu", help=f"one of {', '.join(GPUS)} (the one that is here)")
    add("--rates", metavar="FILE", help="measured rates as JSON, in the place of the table's")
    add("--sweep", nargs="*", metavar="SIZE", help="a line for each of these device budgets")


def execute(arguments: argparse.Namespace) -> int:
    """Prints the estimate; 0 if it fits, 1 if not, 2 where there is none."""
    try:
        model: Any = build_model(
            Path(arguments.config), arguments.attention, arguments.lora, arguments.quantized
        )
        if arguments.checkpointing:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
            if arguments.lora is not None:
                model.enable_input_require_grads()
        ids = torch.empty(arguments.tokens, dtype=torch.long, device="meta")
        sweep = _SWEEP if arguments.sweep == [] else arguments.sweep or ()
        result = estimate(
            model,
            {"input_ids": ids, "labels": ids},
            gpu=arguments.gpu,
            rates=arguments.rates,
            device_budget=arguments.device_budget,
            host_budget=arguments.host_budget,
            placement_policy=arguments.policy,
            precision=arguments.precision,
            micro_batches=arguments.micro_batches,
            ranks=arguments.ranks,
            sweep=sweep,
        )
        print(result, flush=True)
    except (GeminiError, ValueError, OSError) as error:
        print(f"gemini-strategy estimate: {error}", file=sys.stderr)
        return 2
    return 0 if result.fits else 1
