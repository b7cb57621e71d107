"""Parts of a step that are stepped inside its backward, before a clip is known (csrc/engine/speculation.c).

Invariants
    1. Until the core takes a part, what it has made is in no entry, group or attribute: all find the last step's.
    2. A part is taken only by a step with its numbers (OpaqueOptimizer.update). What numbers do not tell is compared
       here, or calls `forget`: then no step has these numbers any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from gemini_strategy.errors import GeminiError
from gemini_strategy.optim import parts
from gemini_strategy.optim.opaque import Path, leaves, with_leaves

if TYPE_CHECKING:
    from gemini_strategy.parameters.slot import Slot


class Setting(NamedTuple):
    """What parts of a step read besides weights, gradients and states, as it is when the step begins.

    Attributes:
        own: groups and attributes of the optimizer.
        marks: what the program has set on parameters.
        overrides: settings of single parameters (overrides.py).
        autocast: of the thread that steps.
        shared: tensors among attributes that are large, or on a device that a comparison would wait for, and their
            versions.
        missed: attributes that cannot be copied.
    """

    own: parts.Own
    marks: dict[Any, Any]
    overrides: Mapping[Any, Any]
    autocast: tuple[bool, torch.dtype]
    shared: tuple[tuple[torch.Tensor, int], ...]
    missed: tuple[str, ...]

    @classmethod
    def of(
        cls,
        optimizer: Optimizer,
        marks: dict[Any, Any],
        overrides: Mapping[Any, Any],
        autocast: tuple[bool, torch.dtype],
    ) -> Setting:
        """Copies: what a program writes in place is not theirs. `marks` are copies."""
        own = parts.Own.of(optimizer)
        shared = [each for each in parts.reach(own.attributes, optimizer) if _is_shared(each)]
        missed: list[str] = []
        attributes = parts.copies([own.attributes], optimizer, optimizer, shared, missed)[0]
        options = parts.copies(own.options, optimizer, optimizer, missed=missed)
        versions = tuple((tensor, tensor._version) for tensor in shared)
        kept = parts.Own(attributes, options)
        return cls(kept, marks, overrides, autocast, versions, tuple(missed))

    def is_as(self, other: Setting) -> bool:
        """But for options, which numbers tell."""
        mine, its = (
            [each.own.attributes, each.marks, each.overrides, each.autocast]
            for each in (self, other)
        )
        versions = [[(id(t), version) for t, version in each.shared] for each in (self, other)]
        return versions[0] == versions[1] and parts.difference(mine, its, "") is None

    def values(self, optimizer: Optimizer) -> parts.Own:
        """For a part of the step: the optimizer's very attributes, tables and all, where they are what they were.

        Raises:
            GeminiError: of one there is no copy.
        """
        live, kept = parts.Own.of(optimizer).attributes, self.own.attributes
        if any(tensor._version != version for tensor, version in self.shared):
            raise GeminiError(
                "a tensor that the optimizer has as an attribute was written in place behind optimizer.step(), before "
                "all of the step had run: bind another tensor to the attribute instead"
            )
        attributes = {
            name: live[name]
            if name in live and parts.difference(value, live[name], "") is None
            else value
            for name, value in kept.items()
        }
        return parts.Own(attributes, self.own.options)


def _is_shared(value: Any) -> bool:
    is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
    return is_tensor and (value.numel() > parts.MOST_COPIED or value.is_cuda)


class Ahead:
    """What one optimizer has of them.

    Args:
        renumber: from now on no step has numbers that one has had before.

    Attributes:
        setting: what parts begin with; None: none may run.
    """

    def __init__(self, renumber: Callable[[], None]) -> None:
        self.setting: Setting | None = None
        self._renumber = renumber
        self._made: dict[Slot, dict[Any, Any] | None] = {}

    def begin(self, setting: Setting) -> None:
        """A step is announced."""
        self.check(setting)
        self.setting = setting

    def check(self, setting: Setting) -> None:
        """The step comes, or another announcement."""
        if self.setting is not None and not self.setting.is_as(setting):
            self.forget()

    def forget(self) -> None:
        """No part of a step that is still to come is taken, and none is made until the next announcement."""
        self.setting = None
        self._renumber()

    def keep(self, slots: Iterable[Slot], entries: Mapping[Slot, dict[Any, Any]]) -> None:
        """The entries that a part of these parameters has made; some have none."""
        self._made.update((slot, entries.get(slot)) for slot in slots)

    def take(self, slots: Iterable[Slot]) -> dict[Slot, dict[Any, Any]]:
        """Those of a part that is the step's now."""
        entries = {slot: self._made.pop(slot) for slot in slots}
        return {slot: entry for slot, entry in entries.items() if entry is not None}


# Nothing writes them in place, and no tensors are in them.
VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype)


def is_plain(entry: Mapping[Any, Any]) -> bool:
    """Whether it has tensors and numbers alone: a list or an object that a program has would be another one than the
    step's.
    """
    return all(isinstance(value, (torch.Tensor, *VALUES)) for value in entry.values())


def entry_apart(entry: Mapping[Any, Any], stays: set[Path]) -> dict[Any, Any]:
    """Another plain entry, which a step may write: leaves that stay have the same bytes, others have their own."""
    if all(
        type(value) is torch.Tensor or not isinstance(value, torch.Tensor)
        for value in entry.values()
    ):
        clones = {
            id(value): _clone(value)
            for key, value in entry.items()
            if isinstance(value, torch.Tensor) and (key,) not in stays
        }
        return {key: clones.get(id(value), value) for key, value in entry.items()}
    apart = {path: t if path in stays else _clone(t) for path, t in leaves(entry)}
    return with_leaves(dict(entry), apart)  # type: ignore[no-any-return]


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    """The caching allocator gives the bytes of the original, which may go now, to nobody before it is copied."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor.clone()
