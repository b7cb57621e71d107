"""Stand-ins: tensors for a checkpoint that read a master or a moment when they are asked for it.

Invariants
    1. A stand-in shows the values of the moment at which it was made, for as long as anybody has it, or raises. Before
       the engine changes a value (a step, a state that is loaded, close()), those that somebody still has become
       ordinary tensors (`settle`). What was changed otherwise since is found by its version.
    2. What is written to a stand-in is its own; the engine never sees it.
    3. One that nobody has any more costs nothing.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from gemini_strategy import _C
from gemini_strategy.errors import GuardError
from gemini_strategy.parameters import absent
from gemini_strategy.parameters.homes import SlotHome
from gemini_strategy.parameters.slot import Slot

if TYPE_CHECKING:
    from gemini_strategy.runtime import Runtime


class StandIn(SlotHome):
    """The home of one.

    Attributes:
        what: "master" (the weight of what has none), "exp_avg" or "exp_avg_sq".
        dtype: of the values, as they are kept: fp32, but for the weight of what has no master.
        numel: how many values.
        values: its own, once it has any.
    """

    def __init__(self, slot: Slot, what: str) -> None:
        super().__init__(slot, "")
        slot.check_assigned()
        self.what = what
        is_weight = what == "master" and not slot.has_low
        self.dtype = slot.dtype if is_weight else torch.float32
        self.values: torch.Tensor | None = None
        self.numel = math.prod(slot.shape)
        self._field = _C.FIELDS["weight" if is_weight else what]
        self._seen = self._version()
        self._shown: weakref.ref[torch.Tensor] | None = None

    def show(self) -> torch.Tensor:
        """The tensor: on the CPU, with the parameter's shape and strides."""
        slot = self.slot
        shown = absent.tensor(self, slot.shape, slot.strides, self.dtype, torch.device("cpu"))
        self._shown = weakref.ref(shown)
        slot.engine.stand_ins.add(self)
        return shown

    def _version(self) -> int:
        return self.slot.changes("weight" if self.what == "master" else self.what)

    def _check(self) -> Slot:
        slot = self.slot
        slot.check_assigned()
        if slot.engine.closed or self._version() != self._seen:
            raise GuardError(
                f"{self.name}: {self.what} in a checkpoint is what it was when the checkpoint was made, and it has "
                "changed since: clone what you keep in on_save_checkpoint, or write after the checkpoint is saved"
            )
        return slot

    def pieces(self, most: int) -> Iterator[torch.Tensor]:
        """The values, flat, in the order of memory, in pieces of at most `most` elements."""
        if self.values is not None:
            yield from torch.as_strided(self.values, (self.values.numel(),), (1,)).split(most)
            return
        slot = self._check()
        for first in range(0, self.numel, most):
            yield self._read(slot, first, min(most, self.numel - first))

    def _read(self, slot: Slot, first: int, n: int) -> torch.Tensor:
        values = torch.empty(n, dtype=self.dtype, device="cpu")
        slot.engine.core.read(slot.id, self._field, first, n, values.data_ptr())
        return values

    def open(self, is_written: bool) -> torch.Tensor:
        if self.values is not None:
            return self.values
        slot = self._check()
        values = self._read(slot, 0, self.numel).as_strided(slot.shape, slot.strides)
        if is_written:
            self.values = values
        return values

    def settle(self) -> None:
        """It is an ordinary tensor from now on, and its views show that."""
        values = self.open(True)
        shown = None if self._shown is None else self._shown()
        if shown is not None and absent.is_absent(shown):
            absent.set_data(shown, values)


def master(slot: Slot, root: int | None) -> torch.Tensor:
    """What slot.read_master(root) gives, as a stand-in where this rank has all of it."""
    if slot.engine.ranks.shard.size > 1:
        return slot.read_master(root)
    return _make(slot, "master")


def moments(slot: Slot, root: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What slot.read_moments(root) gives, likewise."""
    if slot.engine.ranks.shard.size > 1:
        return slot.read_moments(root)
    return _make(slot, "exp_avg"), _make(slot, "exp_avg_sq")


def _make(slot: Slot, what: str) -> torch.Tensor:
    with torch.no_grad():
        return StandIn(slot, what).show()


def home(value: object) -> StandIn | None:
    """What is behind a stand-in or a view of one; None: it is neither, or has values of its own."""
    if not isinstance(value, torch.Tensor) or not absent.is_absent(value):
        return None
    found = absent.home_of(value)
    return found if isinstance(found, StandIn) and found.values is None else None


def settle(engine: Runtime) -> None:
    """Those of the engine's that somebody still has become ordinary tensors."""
    if not engine.stand_ins:
        return
    absent.drop_unused()
    with torch.no_grad():
        for each in list(engine.stand_ins):
            if each.values is None:
                # What has changed already stays as it is, and says so to who reads it.
                with contextlib.suppress(GuardError):
                    each.settle()
    engine.stand_ins.clear()
