"""Optimizers by their names, for an estimate from the command line: those of a Trainer, and classes."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch import nn

from gemini_strategy.errors import GeminiError
from gemini_strategy.estimates.hugging_face import optimizer_of_trainer

_LR = 1e-4  # changes no byte


def build_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer over what is trained of a model on the meta device, with the settings that a Trainer gives it.

    Args:
        name: as in `TrainingArguments(optim=name)`, or module:Class.

    Raises:
        GeminiError: there is no such optimizer, a package is missing, or it would be refused.
    """
    kind, options = _class(name) if ":" in name else optimizer_of_trainer(name, model)
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise GeminiError(f"--optimizer {name}: nothing of the model is trained")
    try:
        made: torch.optim.Optimizer = kind(trained, **options)
    except Exception as error:  # constructors say in many ways what they lack
        raise GeminiError(f"--optimizer {name}: {type(error).__name__}: {error}") from error
    manager = getattr(made, "mng", None)
    if options.get("optim_bits") == 8 and manager is not None:  # as a Trainer has it
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                manager.register_module_override(module, "weight", {"optim_bits": 32})
    return made


def _class(name: str) -> tuple[Any, dict[str, Any]]:
    module, _, called = name.partition(":")
    try:
        kind = getattr(importlib.import_module(module), called, None)
    except ModuleNotFoundError as error:
        raise GeminiError(
            f"--optimizer {name} needs {error.name}, which is not installed"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise GeminiError(f"--optimizer {name}: {module} has no optimizer of that name")
    needs_lr = "lr" in inspect.signature(kind).parameters
    return kind, {"lr": _LR} if needs_lr else {}
