"""Models of transformers, with adapters of peft, from a configuration alone. Nothing else here imports the two."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from gemini_strategy.errors import GeminiError
from gemini_strategy.estimates.quantized import pack_linears
from gemini_strategy.optim.names import check_name

_HEADS = ("lm_head",)  # which no package quantizes if it is not asked to


def build_model(
    config: Path,
    attention: str | None,
    lora: int | None = None,
    quantized: str | None = None,
    targets: Sequence[str] | None = None,
) -> nn.Module:
    """A causal language model on the meta device, in training mode.

    Args:
        config: a Hugging Face folder, or its config.json.
        attention: of transformers' implementations; None: what transformers takes in a run.
        lora: the rank of adapters, which alone are trained; None: everything is.
        quantized: the linear layers' weights are of this kind (of choices.QUANTIZED); "none": of no kind; None: as the
            configuration says.
        targets: last parts of the names of the layers that have adapters; None: all linear layers.

    Raises:
        GeminiError: transformers or peft is missing, there is no configuration, or it has quantized weights of another
            kind, or weights that are quantized and to be trained, or transformers or peft make no model of it.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise GeminiError(
            "estimate needs transformers: pip install 'gemini-strategy[transformers]'"
        ) from error
    with _refusing(config):
        about = AutoConfig.from_pretrained(
            config, attn_implementation=attention, local_files_only=True
        )
    about.use_cache = False
    kind, keeps, is_double = _quantization(about, quantized)
    if kind is not None and lora is None:
        raise GeminiError(
            f"weights that are quantized ({kind}) are not trained: give --lora RANK, for adapters that are"
        )
    with torch.device("meta"), _refusing(config):
        model: Any = AutoModelForCausalLM.from_config(about)
        if kind is not None:
            pack_linears(model, kind, keeps, is_double)
        if lora is not None:
            try:
                from peft import LoraConfig, get_peft_model
            except ImportError as error:
                raise GeminiError("--lora needs peft: pip install peft") from error
            wanted = "all-linear" if targets is None else list(targets)
            model = get_peft_model(model, LoraConfig(r=lora, target_modules=wanted))
    return model.train()


@contextlib.contextmanager
def _refusing(config: Path) -> Iterator[None]:
    """What transformers and peft raise of a configuration has many types and some pages."""
    try:
        yield
    except GeminiError:
        raise
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        raise GeminiError(
            f"{config}: no causal language model can be made of it: {type(error).__name__}: {first}"
        ) from error


def _quantization(about: Any, asked: str | None) -> tuple[str | None, tuple[str, ...], bool]:
    """(kind or None, layers that keep their weights, whether scales are quantized): asked for, or as configured."""
    own = getattr(about, "quantization_config", None) or {}
    own = own if isinstance(own, dict) else own.to_dict()
    keeps = tuple(own.get("llm_int8_skip_modules") or _HEADS)
    if asked == "none":
        about.quantization_config = None
        return None, keeps, False
    if asked is not None or not own:
        return asked, keeps, bool(own.get("bnb_4bit_use_double_quant"))
    if own.get("load_in_4bit"):
        return "nf4", keeps, bool(own.get("bnb_4bit_use_double_quant"))
    if own.get("load_in_8bit"):
        return "int8", keeps, False
    raise GeminiError(
        f"the configuration has weights quantized by {own.get('quant_method')!r}, of which nothing is known here: "
        "--quantized nf4 or int8 says how many bytes they have (with --lora), and --quantized none that they are "
        "dequantized to bf16"
    )


def optimizer_of_trainer(name: str, model: nn.Module) -> tuple[Any, dict[str, Any]]:
    """The class and the arguments of a Trainer's `optim=name`.

    Raises:
        GeminiError: there is none of that name, its package is missing, or it would be refused.
    """
    from transformers import Trainer
    from transformers.training_args import OptimizerNames, ParallelMode

    known = [each.value for each in OptimizerNames]
    if name not in known:
        raise GeminiError(
            f"--optimizer {name} is none of a Trainer's ({', '.join(known)}): a class is given as module:Class"
        )
    check_name(name, f"--optimizer {name}")
    arguments: Any = SimpleNamespace(
        optim=OptimizerNames(name),
        optim_args=None,
        optim_target_modules=None,
        learning_rate=1e-4,
        weight_decay=0.0,
        warmup_steps=0,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        gradient_accumulation_steps=1,
        parallel_mode=ParallelMode.NOT_PARALLEL,
    )
    try:
        kind, options = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    except (ImportError, ValueError) as error:  # the text names the package
        raise GeminiError(f"--optimizer {name}: {error}") from error
    options.pop("fused", None)  # asks where parameters are, and has the same states
    return kind, options
