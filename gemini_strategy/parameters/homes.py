"""Where the tensors have their bytes that show a field of a slot: the homes (absent.py) of a parameter.

Fields go by keys: "weight", "grad", and those of `optimizer.state[p]`.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from gemini_strategy.errors import GeminiError, GuardError
from gemini_strategy.parameters import absent, borrowing, order

if TYPE_CHECKING:
    from gemini_strategy.parameters.slot import Slot

MOMENTS = ("exp_avg", "exp_avg_sq")
LOWS = ("remainder", "master")  # what bf16, fp16 weights lack to be masters: see low.split_low
STATES = (*MOMENTS, *LOWS)  # what a step changes beside the weight


class SlotHome(absent.Home):
    """A home of a slot, which it does not keep. key: of the field that it is; "" for none."""

    def __init__(self, slot: Slot, key: str) -> None:
        self.name = f"{slot.name}: {key}" if key in STATES else slot.name
        self.key = key
        self._slot = weakref.ref(slot)

    @property
    def slot(self) -> Slot:
        slot = self._slot()
        if slot is None:
            raise GuardError(
                f"{self.name}: the model that it was a part of is gone, and its bytes with it"
            )
        return slot

    def is_of(self, slot: Slot, key: str) -> bool:
        return self._slot() is slot and self.key == key


class Weight(SlotHome):
    """The chunk, for as long as the tensor that is opened lives."""

    def __init__(self, slot: Slot) -> None:
        super().__init__(slot, "weight")

    def open(self, is_written: bool) -> torch.Tensor:
        slot = self.slot
        if not slot.engine.closed:
            if is_written:
                slot.engine.settle()
            shown = None if is_written else borrowing.for_node(slot)
            return slot.lease(is_watched=is_written) if shown is None else shown
        # The model is ordinary again, and its parameter is this.
        now = slot.parameter.detach()
        if (now.dtype, now.device, now.stride()) != (slot.dtype, slot.device, slot.strides):
            raise GeminiError(f"{slot.name}: its engine is closed; this tensor went with it")
        return now

    @property
    def unit(self) -> Any:
        slot = self._slot()
        return slot.units[0] if slot is not None and slot.units else None

    def borrow(self) -> bool:
        return borrowing.borrow(self.slot)

    def note_same(self) -> None:
        self.slot.n_same += 1

    def takes_late(self) -> bool:
        return True  # the lease's end counts


class Field(SlotHome):
    """Any field, beside the chunk: what is opened is a copy on the engine's device."""

    def open(self, is_written: bool) -> torch.Tensor:
        return self.slot.read_field(self.key)

    def write(self, values: torch.Tensor) -> None:
        self.slot.write_field(self.key, values)

    def replace(self, shown: torch.Tensor, value: torch.Tensor) -> None:
        if not self.slot.given.replace(self.key, shown, value):
            super().replace(shown, value)


class Entry(Field):
    """An entry of a state dict: memory on the host that follows a field, and that the field follows.

    One of several ranks cannot read a field alone: there an entry ends when the field changes. Nor can it write one
    alone: bytes that are what they were are not written, as those that the root of a broadcast sends.
    """

    memory: torch.Tensor

    def __init__(self, slot: Slot, key: str, memory: torch.Tensor) -> None:
        super().__init__(slot, key)
        self.memory = memory
        self._seen = self._changes()
        self._before: torch.Tensor | None = None  # of several ranks: while it is written
        slot.given.entries.add(self)

    def _changes(self) -> Any:
        return self.slot.changes(self.key)

    def _read(self) -> torch.Tensor:
        return self.slot.read_field(self.key)

    def _write(self, values: torch.Tensor) -> None:
        self.slot.write_field(self.key, values)

    def open(self, is_written: bool) -> torch.Tensor:
        slot = self._slot()
        if slot is None:
            return self.memory
        if self._changes() != self._seen:
            if slot.engine.ranks.shard.size > 1:
                raise GuardError(
                    f"{self.name}: this entry of a state dict shows the weight as it was, and the weight has changed "
                    "since: several ranks have it in parts, and an entry cannot follow it. Clone what you keep when "
                    "you take it, or call model.state_dict() again on every rank"
                )
            self.memory.copy_(self._read())
            self._seen = self._changes()
        keeps = is_written and slot.engine.ranks.size > 1
        self._before = self.memory.clone() if keeps else None
        return self.memory

    def write(self, values: torch.Tensor) -> None:
        slot, before, self._before = self._slot(), self._before, None
        if slot is None:
            return
        if before is None or not order.same_bytes(values, before):
            self._write(values)
            self._seen = self._changes()

    def replace(self, shown: torch.Tensor, value: torch.Tensor) -> None:
        if self.key in STATES:  # in torch it is the very tensor of optimizer.state
            raise GuardError(
                f"{self.name}: `.data` of an entry of a state dict: set it in optimizer.state[p]"
            )
        absent.set_data(shown, value)

    def is_whole(self, value: torch.Tensor) -> bool:
        """Whether `value`, which has this home, is the entry itself and no part or view of another form."""
        mine, its = self.memory, (value.dtype, value.shape, value.stride(), value.storage_offset())
        return its == (mine.dtype, mine.shape, mine.stride(), 0)

    def leave(self) -> None:
        """The field becomes another: the memory goes on with what the field is now, unless the entry has ended."""
        try:
            absent.keep(self.memory, self.open(False))
        except GeminiError as error:
            absent.forget(self.memory, str(error).removeprefix(f"{self.name}: "))


class Whole(Entry):
    """An entry of a weight that shows its fp32 master, in `dtype`."""

    def __init__(self, slot: Slot, dtype: torch.dtype) -> None:
        super().__init__(slot, "weight", slot.read_master().to(dtype))

    def _changes(self) -> Any:
        slot = self.slot
        return slot.changes("weight"), slot.low_changes  # what the weight lacks is in it, too

    def _read(self) -> torch.Tensor:
        return self.slot.read_master().to(self.memory.dtype)

    def _write(self, values: torch.Tensor) -> None:
        self.slot.write_master(values)
