"""What others have of a parameter's fields: tensors that show them, and tensors that were assigned to them.

A field is the engine's. What is assigned (`p.data = x`, `p.grad = x`, `state[p]["exp_avg"].data = x`) is copied. In
torch the field would be the memory of `x`, and a write to that memory would be a write to the field.

Invariants
    1. While the field has not been assigned or dropped since, its next use looks whether the memory that was assigned
       has been written (Given.check). A write is refused by name, once; the field keeps the values of the assignment.
    2. A gradient that arrives while a program has the tensor that it assigned to `p.grad` is refused: in torch that
       tensor would get the sum. An assignment of the same tensor again is refused where the field has changed since. To
       weights and moments that change, such a tensor does not follow.
    3. A tensor in whose place another was assigned goes on with its values, or says that it cannot.
    4. One piece of memory is one field's: in torch it would tie two. Two gradients may share some, as nothing but a
       program writes them between a backward and a step. Two gradients or moments may be swapped: that they are not
       tied is seen when one is used.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from gemini_strategy import _torch
from gemini_strategy.errors import GeminiError, GuardError
from gemini_strategy.parameters import absent, sharing
from gemini_strategy.parameters.homes import STATES, Entry, Field
from gemini_strategy.weakly import WeakSet

if TYPE_CHECKING:
    from gemini_strategy.parameters.slot import Slot

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 20  # elements that are looked at together


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """Odd numbers of 64 bits without a pattern: an element that changes always changes a sum over it."""
    with _torch.InferenceMode(False):
        mixed = torch.arange(1, _PIECE + 1, dtype=torch.int64, device=device) * 0x1E3779B97F4A7C15
        mixed = (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9
        return mixed ^ (mixed >> 32) | 1


def _digest(memory: torch.Tensor) -> int:
    """64 bits that two different contents have in common by chance alone."""
    total = torch.zeros((), dtype=torch.int64, device=memory.device)
    memory = memory.resolve_conj().resolve_neg()
    if memory.is_complex():
        memory = torch.view_as_real(memory)
    for piece in memory.view(_BITS[memory.element_size()]).reshape(-1).split(_PIECE):
        total = total * 0x1000193 + (piece * _weights(memory.device)[: piece.numel()]).sum()
    return int(total)


class _Assigned:
    """A tensor that was assigned to a field, of which the field has a copy.

    Args:
        given: itself, if in torch the field would be this tensor; detached, if it would have its memory alone.
        source: the copy.

    Attributes:
        span: the addresses of its bytes, from and to; (0, 0) if it is absent.
    """

    def __init__(self, home: Field, given: torch.Tensor, source: torch.Tensor) -> None:
        self.home = home
        self.span = _span(given)
        self._given = given
        self._digest = _digest(source)

    def is_held(self) -> bool:
        """Whether a program has the tensor or its memory, too, and could use it."""
        if sys.getrefcount(self._given) > 2:  # this and the call
            return True
        if absent.is_absent(self._given):
            return absent.n_users(self._given) > 1
        return sharing.n_others(self._given) > 0

    def is_written(self) -> bool:
        try:
            self.check()
        except GuardError:
            return True
        return False

    def has_left(self, values: torch.Tensor) -> bool:
        """Whether the field, which has these values, has changed since."""
        return _digest(values) != self._digest

    def check(self) -> None:
        """Refuses a write to the memory since it was assigned."""
        memory = self._given
        if absent.is_absent(memory):
            home = absent.home_of(memory)
            if home.key:  # it shows a field, which two would be
                raise GuardError(_tie(self.home, home))
            if home.is_gone:
                return
            memory = absent.plain(memory)
        if _digest(memory) != self._digest:
            raise GuardError(
                f"{self.home.name}: the tensor that was assigned to its {self.home.key} has been written since. What "
                f"is assigned is copied, so the {self.home.key} has the values of the assignment: assign the tensor "
                "again after it is written, or write the parameter's own"
            )


def _span(memory: torch.Tensor) -> tuple[int, int]:
    if absent.is_absent(memory):
        return 0, 0
    start, size = _torch.TensorBase.data_ptr(memory), memory.element_size()
    last = sum((n - 1) * step for n, step in zip(memory.shape, memory.stride(), strict=True))
    return start, start + (last + 1) * size if memory.numel() else start


def _tie(one: absent.Home, other: absent.Home | Slot) -> str:
    return f"{one.name}: its {one.key} would be the memory of {other.name}, which ties them: assign a clone()"


class Given:
    """Of one slot.

    Attributes:
        entries: homes of state dicts' entries.
        assigned: what was assigned, by the key of the field.
    """

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self.entries: WeakSet[Entry] = WeakSet()
        self.assigned: dict[str, _Assigned] = {}
        self._tensors: dict[str, torch.Tensor] = {}  # `p.grad`, and those of optimizer.state[p]

    def tensor(self, key: str) -> torch.Tensor:
        """The one tensor that shows a field other than the weight."""
        if key not in self._tensors:
            slot, dtype = self._slot, self._slot.dtype_of(key)
            home = Field(slot, key)
            self._tensors[key] = absent.tensor(home, slot.shape, slot.strides, dtype, slot.device)
        return self._tensors[key]

    # ---- assigning ----

    def replace(self, key: str, shown: torch.Tensor, value: torch.Tensor) -> bool:
        """`shown.data = value`; False: `shown` is another tensor than the one that shows the field."""
        is_it = self._tensors.get(key) is shown
        if is_it:
            self.become(key, value, stays=shown)
        return is_it

    def become(
        self,
        key: str,
        value: torch.Tensor,
        write: Callable[[torch.Tensor], Any] | None = None,
        stays: torch.Tensor | None = None,
    ) -> None:
        """`value` was assigned in a field's place: the field has its values.

        Args:
            write: what takes the values, where that is not a write like any other.
            stays: see `leave`.

        Raises:
            GuardError: it has another shape, dtype or device; or it is another field's, which would tie the two.
        """
        slot, dtype = self._slot, self._slot.dtype_of(key)
        wanted = (slot.shape, dtype, slot.device.type, torch.strided)
        if (tuple(value.shape), value.dtype, value.device.type, value.layout) != wanted:
            raise GuardError(
                f"{slot.name}: its {key} has shape {slot.shape} and {dtype} on {slot.device}, got "
                f"{tuple(value.shape)} and {value.dtype} on {value.device} ({value.layout})"
            )
        home, why, other, owner = Field(slot, key), None, absent.Home(), None
        if absent.is_absent(value):
            other = absent.home_of(value)
        else:
            owner = absent.slot_behind(value)  # a weight in its unit
            self._check_alone(home, value)
            self._check_same(home, value)
        if other.is_of(slot, key) or (owner is slot and key == "weight"):
            if value.stride() == slot.strides and value.storage_offset() == 0:
                return  # `p.grad = p.grad`
            why = "it was assigned in another order; clone it first to keep it"
        elif owner is not None:
            raise GuardError(_tie(home, owner))
        elif other.key and key == "weight":
            raise GuardError(_tie(home, other))  # entries of state dicts would follow the other now
        if key == "weight" and slot.is_shown_elsewhere():
            raise GuardError(
                f"{slot.name}: a tensor that was taken inside its module shows its memory, and would show what is "
                "assigned to `.data`; in torch it keeps the old values: drop it, or clone it inside the module"
            )
        source = value.detach().clone()  # it may overlap with what is left
        if key in STATES:
            self._end_entries(key)
        self.leave(key, why, stays)
        (home.write if write is None else write)(source)
        if why is None:
            with absent.plainly(), torch.no_grad():
                is_it = key != "weight" and stays is None
                self.assigned[key] = _Assigned(home, value if is_it else value.detach(), source)
        for each in {slot, *slot.engine.assigned}:
            each.given.drop_unheld()

    def _check_alone(self, home: Field, value: torch.Tensor) -> None:
        """Refuses memory for a field that is another field's: see invariant 4."""
        start, end = _span(value)
        given = [
            each for slot in self._slot.engine.assigned for each in slot.given.assigned.values()
        ]
        for each in given:
            if each.home.key == home.key == "grad" or each.home.is_of(self._slot, home.key):
                continue  # first: a loop that assigns all gradients comes here for each pair of them
            first, last = each.span
            if first < end and start < last and each.is_held():
                raise GuardError(_tie(home, each.home))

    def _check_same(self, home: Field, value: torch.Tensor) -> None:
        """Refuses what was assigned before, where that is not what the field is."""
        before = self.assigned.get(home.key)
        if before is None or before.span != _span(value) or not value.numel():
            return
        if before.has_left(self._slot.read_field(home.key)):
            raise GuardError(
                f"{home.name}: this tensor was assigned to its {home.key} before, which has changed since. In torch "
                "they would be one, and here the tensor has the old values: assign a clone of what is meant"
            )

    def drop_unheld(self) -> None:
        """Forgets what no program can write any more, or has written."""
        with absent.plainly(), torch.no_grad():
            self.assigned = {
                key: each
                for key, each in self.assigned.items()
                if each.is_held() or each.is_written()
            }
        self._note()

    def _note(self) -> None:
        slot = self._slot
        slot.is_assigned = "weight" in self.assigned
        (slot.engine.assigned.add if self.assigned else slot.engine.assigned.discard)(slot)
        slot.engine.choose_way()

    def check(self, key: str | None = None) -> None:
        """Before a field is used: see invariant 1.

        Args:
            key: of the field; None: all are.

        Raises:
            GuardError: what was assigned to it has been written since.
        """
        for its in [its for its in self.assigned if key in (None, its)]:
            each = self.assigned.pop(its)
            try:
                with absent.plainly(), torch.no_grad():
                    each.check()
                if each.is_held():
                    self.assigned[its] = each
            finally:
                self._note()

    def check_arrival(self) -> None:
        """Before a gradient is added: see invariant 2.

        Raises:
            GuardError: a program has the tensor that it assigned to `p.grad`.
        """
        self.check("grad")
        if "grad" in self.assigned:
            raise GuardError(
                f"{self._slot.name}: a gradient arrives, and the program has the tensor that it assigned to .grad. In "
                "torch that tensor would get the sum, and here it does not follow (so gradients do not lie in a flat "
                "buffer): assign its clone(), or let go of it before backward"
            )

    def leave(self, key: str, why: str | None = None, stays: torch.Tensor | None = None) -> None:
        """Another tensor takes the place of a field's, or none does: whoever has the old one goes on with its values.

        Args:
            why: what they are told instead.
            stays: the tensor that shows the field and goes on to do so; its views and aliases do not.
        """
        for entry in [each for each in self.entries if each.key == key]:
            entry.leave()
        if key == "weight":
            self._slot.leave_data()
        elif key in self._tensors and absent.is_absent(self._tensors[key]):
            anchor = absent.anchor_of(self._tensors.pop(key))
            if stays is not None:
                absent.set_data(stays, self.tensor(key))
                self._tensors[key] = stays
            self.keep(key, anchor, why)
        else:  # it was given other memory
            self._tensors.pop(key, None)
        if self.assigned.pop(key, None) is not None:
            self._note()

    def _end_entries(self, key: str) -> None:
        """Of a kept optimizer.state_dict(): in torch the dict has what was assigned, unlike its tensor of before."""
        for entry in [each for each in self.entries if each.key == key]:
            self.entries.discard(entry)
            absent.forget(
                entry.memory,
                f"another {key} was assigned in optimizer.state, which in torch a kept state dict has and its tensors "
                "of before have not: take optimizer.state_dict() again, or clone() first what is to stay",
            )

    def end(self) -> None:
        """The engine is about to close: what state dicts have stays, gradients and states are given back apart."""
        self.assigned.clear()
        for entry in list(self.entries):
            entry.leave()
        for shown in filter(absent.is_absent, self._tensors.values()):
            absent.forget(
                shown, "it was dropped with its engine, which is closed; clone it to keep it"
            )
        self._tensors.clear()

    def keep(self, key: str, anchor: torch.Tensor, why: str | None = None) -> None:
        """Whoever has the storage of an absent tensor that showed a field keeps the values of now, or is told `why`."""
        if absent.n_users(anchor) <= 0:
            return
        if why is None and self._slot.engine.ranks.shard.size == 1:
            with contextlib.suppress(GeminiError):  # a step may have used it up
                absent.keep(anchor, self._slot.read_field(key))
                return
        absent.forget(anchor, why or "another was assigned in its place; clone it to keep it")
