"""`gemini-strategy estimate`: the forecast for a Hugging Face folder or its config.json, from the command line.

What a person may have mistyped is looked at before torch and transformers are imported, which takes seconds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

from gemini_strategy.choices import POLICIES, PRECISIONS, QUANTIZED
from gemini_strategy.errors import GeminiError
from gemini_strategy.estimates.gpus import GPUS, NO_GPU, may_be_here, name_of, read_rates
from gemini_strategy.sizes import parse_bytes, physical_memory

_SWEEP = ("6GB", "8GB", "12GB", "16GB", "24GB", "32GB", "48GB", "80GB")
_AS_BF16 = "none"
_CONFIG = "config.json"


def _tokens(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if match is None or not int(match[1]) or not int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r}: give sequences x length, as in 8x1024")
    return int(match[1]), int(match[2])


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of at least 1")
    return int(text)


def _gpu(text: str) -> str:
    try:
        return name_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("config", help="a Hugging Face folder, or its config.json")
    add("--tokens", type=_tokens, default=(1, 1024), metavar="SEQUENCESxLENGTH",
        help="of one micro-batch (1x1024)")  # fmt: skip
    add("--micro-batches", type=_count, default=1, help="of one optimizer step (1)")
    add("--ranks", type=_count, default=1,
        help="that train together on one host, each with a GPU (1)")  # fmt: skip
    add("--device-budget", help='such as "24GB"; the GPU\'s memory if not given')
    add(
        "--host-budget",
        help='such as "54GB", without what the system needs; if not given: what the homes of weights and states want, '
        "and for clipping what is free here, if the GPU is here",
    )
    add("--precision", choices=PRECISIONS, default="bf16-mixed")
    add("--policy", choices=tuple(POLICIES), default="auto")
    add("--checkpointing", action="store_true", help="activation checkpointing is on")
    add(
        "--lora",
        type=_count,
        metavar="RANK",
        help="train adapters of this rank alone, on all linear layers",
    )
    add("--lora-targets", type=_names, metavar="NAMES",
        help="the layers that get adapters, such as q_proj,v_proj")  # fmt: skip
    add(
        "--quantized",
        choices=(*QUANTIZED, _AS_BF16),
        help="the linear layers' weights, with --lora: QLoRA; none: dequantized, whatever the configuration says",
    )
    add(
        "--optimizer",
        metavar="NAME",
        help="a name of TrainingArguments(optim=NAME), such as adamw_8bit or adafactor, or module:Class (AdamW)",
    )
    add("--attention", help="attn_implementation of the model (sdpa, or eager if it has no other)")
    add("--gpu", type=_gpu, help=f"one of {', '.join(GPUS)} (the one that is here)")
    add("--rates", metavar="FILE", help="measured rates as JSON, in the place of the table's")
    add("--sweep", nargs="*", metavar="SIZE", help="a line for each of these device budgets")


def check(arguments: argparse.Namespace) -> None:
    """What can be said without torch.

    Raises:
        GeminiError, ValueError: there is no such configuration, or an argument is not possible.
    """
    _check_config(Path(arguments.config))
    memory = int(GPUS[arguments.gpu].memory) if arguments.gpu else None
    on_device = memory or 1 << 40  # of a GPU that torch knows: any fraction is one of something
    for size in (arguments.device_budget, *(arguments.sweep or ())):
        if size is not None:
            parse_bytes(size, on_device, "device_budget")
    if arguments.host_budget is not None:
        parse_bytes(arguments.host_budget, physical_memory(), "host_budget")
    if arguments.rates is not None:
        read_rates(arguments.rates)
    if arguments.lora is None and arguments.lora_targets is not None:
        raise GeminiError("--lora-targets names layers for adapters: give --lora RANK, too")
    if arguments.lora is None and arguments.quantized in QUANTIZED:
        raise GeminiError(
            f"weights that are quantized ({arguments.quantized}) are not trained: give --lora RANK, for adapters that "
            "are"
        )
    for package, why in (("transformers", "estimate"), ("peft", "--lora" * bool(arguments.lora))):
        if why and importlib.util.find_spec(package) is None:
            extra = "'gemini-strategy[transformers]'" if package == "transformers" else package
            raise GeminiError(f"{why} needs {package}: pip install {extra}")
    if arguments.gpu is None and not may_be_here():
        raise ValueError(NO_GPU)


def _check_config(given: Path) -> None:
    """Whether there is a configuration: JSON, and an object."""
    if not given.exists():
        hub = f"; names of the Hub are not looked up: `hf download {given} {_CONFIG} --local-dir FOLDER` does that"
        is_name = re.fullmatch(r"[\w.-]+/[\w.-]+", str(given)) and given.suffix != ".json"
        raise GeminiError(
            f"{given} is not there: give a Hugging Face folder or its {_CONFIG}{hub if is_name else ''}"
        )
    path = given / _CONFIG if given.is_dir() else given
    if not path.exists():
        raise GeminiError(f"{given} has no {_CONFIG}: give the folder of a model, or that file")
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise GeminiError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise GeminiError(
            f"{path} holds a {type(found).__name__}, no JSON object: a configuration is one, with a model_type"
        )


def execute(arguments: argparse.Namespace) -> int:
    """Prints the estimate; 0 if it fits, 1 if not, 2 where there is none."""
    try:
        check(arguments)
        return _estimated(arguments)
    except (GeminiError, ValueError, OSError) as error:
        print(f"gemini-strategy estimate: {error}", file=sys.stderr)
        return 2


def _estimated(arguments: argparse.Namespace) -> int:
    import torch

    from gemini_strategy.estimates.forecast import estimate
    from gemini_strategy.estimates.hugging_face import build_model
    from gemini_strategy.estimates.optimizers import build_optimizer

    model: Any = build_model(
        Path(arguments.config),
        arguments.attention,
        arguments.lora,
        arguments.quantized,
        arguments.lora_targets,
    )
    if arguments.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if arguments.lora is not None:
            model.enable_input_require_grads()
    ids = torch.empty(arguments.tokens, dtype=torch.long, device="meta")
    sweep = _SWEEP if arguments.sweep == [] else arguments.sweep or ()
    result = estimate(
        model,
        {"input_ids": ids, "labels": ids},
        optimizer=build_optimizer(arguments.optimizer, model) if arguments.optimizer else None,
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
    return 0 if result.fits else 1
