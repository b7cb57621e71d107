"""Models of transformers, with adapters of peft, from a configuration alone. Nothing else here imports the two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemini_strategy.errors import GeminiError

__all__ = ["build_model"]


def build_model(config: Path, attention: str, lora: int | None = None) -> nn.Module:
    """A causal language model on the meta device, in training mode.

    Args:
        config: a Hugging Face folder, or its config.json.
        attention: of transformers' implementations.
        lora: the rank of adapters on all linear layers, which alone are trained; None: everything is.

    Raises:
        GeminiError: transformers or peft is missing, or there is no configuration.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise GeminiError(
            "estimate needs transformers: pip install 'gemini-strategy[transformers]'"
        ) from error
    if not config.exists():
        raise GeminiError(f"{config} is not there: give a Hugging Face folder or its config.json")
    about = AutoConfig.from_pretrained(config, attn_implementation=attention, local_files_only=True)
    about.use_cache = False
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(about)
        if lora is not None:
            try:
                from peft import LoraConfig, get_peft_model
            except ImportError as error:
                raise GeminiError("--lora needs peft: pip install peft") from error
            model = get_peft_model(model, LoraConfig(r=lora, target_modules="all-linear"))
    return model.train()
