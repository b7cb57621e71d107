"""The modules of one engine that a program calls: its roots.

One model is its own root. Of several, which one optimizer trains, each is one; an nn.ModuleList holds them, and gives
their parameters the names that errors, reports and checkpoints know: "0.layer.weight", "1.layer.weight".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

_FEW = 4


def joined(model: Any) -> nn.Module:
    """The module that has what manage() or estimate() was given: a model, or a list or tuple of models.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(model, nn.Module):
        return model
    if not isinstance(model, list | tuple):
        raise TypeError(
            f"model must be a torch.nn.Module, or a list of them, got {type(model).__name__}"
        )
    wrong = [type(each).__name__ for each in model if not isinstance(each, nn.Module)]
    if wrong or not model:
        raise TypeError(
            f"model is a list of {', '.join(wrong) or 'nothing'}: give torch.nn.Modules"
        )
    return nn.ModuleList(model)


def roots(model: nn.Module) -> list[nn.Module]:
    """The model; of an nn.ModuleList or nn.ModuleDict, which is never called, those of what it holds.

    What has no parameters is none (a loss, a metric), nor is a part of another root.
    """
    found = list(_found(model))
    inner = {id(part) for root in found for part in root.modules() if part is not root}
    return [root for root in dict.fromkeys(found) if id(root) not in inner]


def _found(model: nn.Module) -> Iterator[nn.Module]:
    is_holder = isinstance(model, nn.ModuleList | nn.ModuleDict)
    if not is_holder or type(model).forward is not nn.Module.forward:
        yield model
        return
    for part in model.children():
        if next(part.parameters(), None) is not None:
            yield from _found(part)


def title(model: nn.Module) -> str:
    """What reports and errors call it: its class, or those of the models that it only holds."""
    if type(model) not in (nn.ModuleList, nn.ModuleDict):
        return type(model).__name__
    names = [type(root).__name__ for root in roots(model)]
    return " + ".join(names) if 0 < len(names) <= _FEW else type(model).__name__
