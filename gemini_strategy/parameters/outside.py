"""Calls of a managed model's parts in mixed precision where the caller has no autocast: `model.lm_head(h)`, a method
that is not `forward`.

A plain model has fp32 weights there, and computes in fp32. Here the weights have 16 bits. So each module that owns
parameters computes under autocast of its own and gives fp32: between modules all is fp32, as in the plain model.

Invariants
    1. Inside a forward that has autocast nothing changes, nor where it switches that off, nor where the caller gives a
       module 16 bits.
    2. What checkpointing repeats in a backward is computed as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from gemini_strategy import _torch
from gemini_strategy._torch import tree_flatten, tree_map
from gemini_strategy.errors import GuardError
from gemini_strategy.precision import is_in_forward, to_fp32

if TYPE_CHECKING:
    from gemini_strategy.parameters.hooks import Unit


class Outside:
    """Calls one unit where autocast is off.

    Args:
        unit: of an engine in mixed precision.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._ways: set[bool] = set()  # how it was called since the last step of the engine
        self._step = -1

    def __call__(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._is_cast(args, kwargs):
            return call(*args, **kwargs)
        engine = self._unit.engine
        with torch.autocast(engine.device.type, dtype=engine.precision_plan.dtype):
            result = call(*args, **kwargs)
        return tree_map(to_fp32, result)

    def _is_cast(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        engine = self._unit.engine
        if not engine.serves_outside:
            return False
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        floats = {t.dtype for t in tensors if t.is_floating_point()}
        if floats and torch.float32 not in floats:
            return False
        if _torch.current_task() == -1:
            if self._step != engine.steps:
                self._step, self._ways = engine.steps, set()
            is_cast = not is_in_forward()
            self._ways.add(is_cast)
            return is_cast
        if len(self._ways) > 1:
            raise GuardError(
                f"module {self._unit.name!r} was called outside the model's forward and, without autocast, inside, and "
                "a backward that repeats one of the two cannot tell which: call it outside under torch.autocast"
            )
        return True in self._ways
