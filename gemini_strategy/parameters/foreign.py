"""Modules whose weights something else holds or serves: refused by name before anything changes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from gemini_strategy.errors import GeminiError

_WAY_OUT = (
    "load the model without device_map (on the CPU), or build it on the meta device and give manage() weights=, "
    "so that the engine places its weights"
)


def check_modules(model: nn.Module, device: torch.device, has_weights: bool) -> None:
    """Refuses scripted modules, and modules whose weights torch's first FSDP or accelerate keeps elsewhere.

    Args:
        device: where the engine computes.
        has_weights: values come from files, whatever is in the model.

    Raises:
        GeminiError: names the module, what holds its weights, and the way out.
    """
    for name, module in model.named_modules():
        label = f"module {name!r}" if name else "the model"
        is_script = isinstance(module, torch.jit.ScriptModule)
        if is_script and any(True for _ in chain(module.parameters(), module.buffers())):
            raise GeminiError(
                f"{label} is a {type(module).__name__} (torch.jit.script, trace or load), whose graph reads its "
                "parameters itself: manage the model before it is scripted, or keep this module outside of it"
            )
        if any(base.__name__ == "FullyShardedDataParallel" for base in type(module).__mro__):
            raise GeminiError(
                f"{label} is a {type(module).__name__}, which has its parameters in memory of its own: manage() shards "
                "parameters itself; give it the model before it is wrapped, and an optimizer over that"
            )
        for hook in _hooks(getattr(module, "_hf_hook", None)):
            trouble = _trouble(hook, device)
            if trouble is not None:
                raise GeminiError(
                    f"{label} has accelerate's {type(hook).__name__}: {trouble}; {_WAY_OUT}"
                )
    for name, module in () if has_weights else model.named_modules():
        places = getattr(module, "hf_device_map", None)
        for inner, parameter in module.named_parameters() if isinstance(places, dict) else ():
            if parameter.is_meta:
                found = [k for k in places if k == "" or inner == k or inner.startswith(f"{k}.")]
                place = places[max(found, key=len)] if found else "nowhere"
                raise GeminiError(
                    f"{name}{'.' if name else ''}{inner} has no values (it is on the meta device), and hf_device_map "
                    f"says that they are on {place!r}: {_WAY_OUT}"
                )


def _hooks(hook: Any) -> Iterator[Any]:
    """A module's hook of accelerate, or those that a SequentialHook has."""
    if hook is None:
        return
    inner = getattr(hook, "hooks", None)
    if not isinstance(inner, list | tuple):
        yield hook
        return
    for each in inner:
        yield from _hooks(each)


def _trouble(hook: Any, device: torch.device) -> str | None:
    """Why a module with this hook cannot be managed. Classes are known by name: importing them takes a second."""
    kinds = [c.__name__ for c in type(hook).__mro__ if c.__module__.startswith("accelerate.")]
    if "AlignDevicesHook" not in kinds:
        # A person's own hook stands on ModelHook alone.
        is_harmless = not kinds or kinds[0] == "ModelHook"
        return None if is_harmless else "it moves or casts the module's weights in each forward"
    if hook.offload:
        source = getattr(hook.weights_map, "dataset", hook.weights_map)
        folder = getattr(source, "save_folder", None)
        place = "in host memory" if folder is None else f"on disk, in {folder}"
        return f"it holds the weights {place}, and the module has none but in its forward"
    if hook.execution_device is None:
        return None
    where = torch.device(hook.execution_device)
    if where.type == device.type and where.index in (None, device.index):
        return None  # it moves inputs to where they are wanted
    return f"it moves the module's inputs to {where}, and the engine computes on {device}"
