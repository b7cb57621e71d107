"""Parts of a step that are stepped inside its backward, before a clip is known (csrc/engine/speculation.c).

Invariants
    1. Until the core takes a part, what it has made is in no entry, group or attribute: all find the last step's.
    2. A part is taken only by a step with its numbers (OpaqueOptimizer.update). What numbers do not tell is compared
       here, or calls `forget`: then no step has these numbers any more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gemini_strategy.optim import parts
from gemini_strategy.optim.chunk_tensors import copied
from gemini_strategy.optim.opaque import Path, leaves, with_leaves

if TYPE_CHECKING:
    from gemini_strategy.parameters.slot import Slot


@dataclass(frozen=True)
class Setting:
    """What a part reads besides weights, gradients, states and the options of its group."""

    attributes: Mapping[str, Any]
    overrides: Mapping[Any, Any]
    autocast: tuple[bool, torch.dtype]

    def is_as(self, other: Setting) -> bool:
        mine, its = ([each.attributes, each.overrides] for each in (self, other))
        return self.autocast == other.autocast and parts.difference(mine, its, "") is None


class Ahead:
    """What one optimizer has of them.

    Args:
        renumber: from now on no step has numbers that one has had before.

    Attributes:
        own: values of groups and attributes that parts begin with; None: none may run.
    """

    def __init__(self, renumber: Callable[[], None]) -> None:
        self.own: parts.Own | None = None
        self._renumber = renumber
        self._setting: Setting | None = None
        self._made: dict[Slot, dict[Any, Any] | None] = {}

    def begin(self, own: parts.Own, setting: Setting) -> None:
        """A step is announced, with these values."""
        self.check(setting)
        options = [{k: copied(v) for k, v in group.items()} for group in own.options]
        self.own, self._setting = parts.Own(own.attributes, options), setting

    def check(self, setting: Setting) -> None:
        """The step comes, or another announcement."""
        if self._made and not (self._setting and self._setting.is_as(setting)):
            self.forget()

    def forget(self) -> None:
        """No part is taken any more."""
        if self._made:
            self._made = {}
            self._renumber()

    def keep(self, slots: Iterable[Slot], entries: Mapping[Slot, dict[Any, Any]]) -> None:
        """The entries that a part of these parameters has made; some have none."""
        self._made.update((slot, entries.get(slot)) for slot in slots)

    def take(self, slots: Iterable[Slot]) -> dict[Slot, dict[Any, Any]]:
        """Those of a part that is the step's now."""
        entries = {slot: self._made.pop(slot) for slot in slots}
        return {slot: entry for slot, entry in entries.items() if entry is not None}


def entry_apart(entry: Mapping[Any, Any], stays: set[Path]) -> dict[Any, Any]:
    """Another entry, which a step may write: leaves that stay have the same bytes, others have their own.

    Raises:
        Exception: of its objects one cannot be copied; their classes say so in many ways.
    """
    apart = {path: t if path in stays else t.clone() for path, t in leaves(entry)}
    made = with_leaves(dict(entry), apart)
    return copy.deepcopy(made, {id(t): t for t in _tensors(made)})  # containers and objects, too


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Those that leaves are of."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
