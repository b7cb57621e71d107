"""Masters in the place of weights: each parameter's data is its fp32 master for as long as that is asked, on the host.

Invariants
    1. A master is absent, too (absent.py): an operation reads those of its own arguments and no others, and what it
       writes is the master, and the weight its rounding, before the operation returns.
    2. A unit that is entered meanwhile has its weights, and leaves masters behind.
    3. Afterwards every parameter's data is what it was before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from gemini_strategy.errors import GeminiError
from gemini_strategy.parameters import absent
from gemini_strategy.parameters.homes import SlotHome
from gemini_strategy.parameters.slot import Slot

if TYPE_CHECKING:
    from gemini_strategy.runtime import Runtime


class _Master(SlotHome):
    """The master; of what has none the weight, in the dtype that it came in. What `open` gives is a copy."""

    def __init__(self, slot: Slot, device: torch.device) -> None:
        super().__init__(slot, "weight")
        self._device = device

    def open(self, is_written: bool) -> torch.Tensor:
        if self.slot.engine.closed:
            raise GeminiError(f"{self.name}: its engine is closed; this tensor went with it")
        return self.slot.read_master().to(self._device, _dtype(self.slot))

    def write(self, values: torch.Tensor) -> None:
        self.slot.write_master(values)

    def note_same(self) -> None:
        self.slot.n_same += 1


@contextlib.contextmanager
def shown(
    engine: Runtime, only: Iterable[Slot] | None = None, device: torch.device | None = None
) -> Iterator[None]:
    """See Engine.masters; only: those of these slots; device: where they are for once, if that is not the host."""
    slots = list(engine.slots if only is None else only)
    slots = [slot for slot in slots if not slot.is_raw]  # bytes have no masters
    entered = [slot.name for slot in slots if slot.open_count]
    if entered:
        raise GeminiError(
            f"{entered[0]}: engine.masters() inside a forward: call it between passes"
        )
    before = {slot: slot.absent for slot in slots}
    kept = engine.masters
    if device is not None:
        engine.masters = {}
    device = device or torch.device("cpu")
    for slot in slots:
        if slot not in engine.masters:
            geometry = slot.shape, slot.strides, _dtype(slot), device
            engine.masters[slot] = absent.tensor(_Master(slot, device), *geometry, is_gated=True)
        _show(slot, engine.masters[slot])
    try:
        yield
    finally:
        for slot in slots if not engine.closed else ():
            if slot.shows_master:  # else it was assigned inside
                _show(slot, before[slot])
        engine.masters = kept


def _dtype(slot: Slot) -> torch.dtype:
    return torch.float32 if slot.has_low or slot.dtype is torch.float32 else slot.original_dtype


def _show(slot: Slot, data: torch.Tensor) -> None:
    slot.absent = data
    slot.swap(data)
