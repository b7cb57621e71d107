"""What leaves a managed model by methods and pickles that know nothing of an engine: what would leave a plain one.

Invariants
    1. A copy (copy.deepcopy) or a pickle (torch.save, a process that is spawned) of a managed module refers to nothing
       of this package: its dict has the keys that it had before manage(). parameter.py gives the values.
    2. A method that writes files or merges adapters (`_METHODS`), of whatever library, finds parameters that came in
       fp32 as their fp32 masters. So what it computes, the tensors of its files and the dtype in its configuration
       agree.
    3. Without an engine both are as they were.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from gemini_strategy import _torch
from gemini_strategy.parameters import absent, masters, patches
from gemini_strategy.parameters.slot import Slot

_METHODS = ("save_pretrained", "merge_and_unload", "merge_adapter", "unmerge_adapter")


class Attached:
    """What a module has for as long as it is managed.

    Attributes:
        own: what the module had in its place; None: nothing.
    """

    own: Any = None


def _is_attached(key: Any, value: Any) -> bool:
    return (
        key == _torch.COMPILED_CALL
        or isinstance(value, Attached)
        or isinstance(getattr(value, "hook", None), Attached)  # as torch wraps hooks
    )


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """A module's dict as it was before manage()."""
    result = {}
    for name, value in state.items():
        if isinstance(value, Attached):
            if value.own is not None:
                result[name] = value.own
        elif isinstance(value, dict) and name.endswith(("_hooks", "_hooks_with_kwargs")):
            kept = {k: v for k, v in value.items() if not _is_attached(k, v)}
            result[name] = value if len(kept) == len(value) else type(value)(kept)
        else:
            result[name] = value
    return result


def _reducing(plain: Callable[..., Any]) -> Callable[..., Any]:
    """nn.Module.__reduce_ex__; copy.copy shares what is there, hooks too."""

    @functools.wraps(plain)
    def reduce(module: nn.Module, protocol: Any) -> Any:
        reduced = plain(module, protocol)
        if not absent.nets or sys._getframe(1).f_code is copy.copy.__code__:
            return reduced
        if not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
            return reduced
        return (*reduced[:2], _plain(reduced[2]), *reduced[3:])

    return reduce


def _slots(module: nn.Module, given: Mapping[str, Any] | None) -> list[Slot]:
    """Those that are to be their masters; given: the values that a file gets instead of the module's own."""
    slots = dict.fromkeys(getattr(p, "_gm_slot", None) for p in module.parameters())
    lows = [s for s in slots if s is not None and s.has_low and not s.engine.closed]
    if any(slot.open_count for slot in lows):  # inside a forward
        return []
    if given is None:
        return [slot for slot in lows if slot.outer_dtype is not slot.dtype]
    values = (v for v in given.values() if isinstance(v, torch.Tensor))
    return lows if any(v.dtype is torch.float32 for v in values) else []


def _showing(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a module that finds masters (invariant 2)."""

    @functools.wraps(plain)
    def method(self: Any, *args: Any, **given: Any) -> Any:
        state = given.get("state_dict")
        is_state = isinstance(state, Mapping)
        slots = _slots(self, state if is_state else None) if isinstance(self, nn.Module) else []
        if not slots:
            return plain(self, *args, **given)
        with masters.shown(slots[0].engine, slots):
            return plain(self, *args, **given)

    return method


def install(model: nn.Module) -> None:
    """Makes both so for the classes of this model and for nn.Module, while an engine is open."""
    patches.add(nn.Module, "__reduce_ex__", _reducing)
    for kind in {kind for module in model.modules() for kind in type(module).__mro__}:
        for name in _METHODS:
            if callable(vars(kind).get(name)):
                patches.add(kind, name, _showing)
