"""What transformers says of its models: names in files, ties, patterns that are ignored.

Nothing here imports transformers: a program that has a model of it has loaded it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = [
    "base_prefix",
    "declared_ties",
    "ignores_missing",
    "ignores_unused",
    "is_transformer",
    "renaming",
]

_ROTARY = re.compile(r"rotary_emb\.inv_freq")
_POSITIONS = re.compile(r"(^|\.)position_ids$")


def _loaded(module: str, name: str) -> Any:
    """A name of one of its modules; None where that is not loaded or has no such name."""
    return getattr(sys.modules.get(f"transformers.{module}"), name, None)


def is_transformer(module: nn.Module) -> bool:
    """Whether `module` is a model of the package transformers, as a whole."""
    model_class = _loaded("modeling_utils", "PreTrainedModel")
    return model_class is not None and isinstance(module, model_class)


def base_prefix(module: nn.Module) -> str:
    """What the names of a model without its head lack ("" without such a thing)."""
    return getattr(module, "base_model_prefix", "") if is_transformer(module) else ""


def renaming(module: nn.Module) -> Callable[[str], str | None]:
    """Its new names for those of older files; None for what it would compute from several tensors."""
    mapping = _loaded("conversion_mapping", "get_model_conversion_mapping")
    rename_key = _loaded("core_model_loading", "rename_source_key")
    converter_class = _loaded("core_model_loading", "WeightConverter")
    if not is_transformer(module) or None in (mapping, rename_key, converter_class):
        return lambda name: name
    changes = mapping(module)
    converters = [change for change in changes if isinstance(change, converter_class)]
    renamings = [change for change in changes if not isinstance(change, converter_class)]

    def rename(name: str) -> str | None:
        now, converter = rename_key(name, renamings, converters)
        return None if converter is not None else now

    return rename


def declared_ties(model: nn.Module) -> dict[str, str]:
    """Names that the configuration ties, and to what, of every transformers model in `model`."""
    ties: dict[str, str] = {}
    for prefix, part in model.named_modules():
        if is_transformer(part) and hasattr(part, "get_expanded_tied_weights_keys"):
            start = f"{prefix}." if prefix else ""
            found = part.get_expanded_tied_weights_keys(all_submodels=False)
            ties.update((start + name, start + source) for name, source in found.items())
    return ties


def ignores_missing(module: nn.Module, name: str) -> bool:
    """Whether a file may lack `name`."""
    patterns = getattr(module, "_keys_to_ignore_on_load_missing", None) or ()
    return is_transformer(module) and any(re.search(pattern, name) for pattern in patterns)


def ignores_unused(module: nn.Module, name: str) -> bool:
    """Whether a file may have `name` without a place for it, as older versions have written some buffers."""
    if not is_transformer(module):
        return False
    patterns = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    if any(re.search(pattern, name) for pattern in patterns):
        return True
    buffers = [buffer for buffer, _ in module.named_buffers()]
    if _ROTARY.search(name):
        return any(buffer.endswith("rotary_emb.inv_freq") for buffer in buffers)
    return bool(_POSITIONS.search(name)) and any(b.endswith("position_ids") for b in buffers)
