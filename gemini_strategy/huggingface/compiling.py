"""Compiling a model's layers in place, before it is managed: torch_compile=True, dynamo_backend=..."""

from __future__ import annotations

from typing import Any

from torch import nn

from gemini_strategy.errors import GeminiError
from gemini_strategy.parameters.hooks import is_compiled


def compile_layers(model: nn.Module, arguments: dict[str, Any]) -> None:
    """Compiles each of the repeated layers of a model, those that are not compiled yet.

    A compiled layer has its weights on the device together; of a whole model that would be all of them.

    Args:
        model: not managed. The layers are those that transformers says must not be split, else what nn.ModuleLists
            have.
        arguments: of torch.compile.

    Raises:
        GeminiError: it has no such layers.
    """
    names: set[str] = set()
    for module in model.modules():
        names |= set(getattr(module, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        layers = [
            layer for each in lists for layer in each if any(True for _ in layer.parameters())
        ]
    if not layers:
        raise GeminiError(
            f"torch_compile: {type(model).__name__} has no repeated layers to compile, and a managed model is not "
            "compiled as a whole: compile parts of it before, `part.compile()`"
        )
    for layer in layers:
        if not is_compiled(layer):
            layer.compile(**arguments)
