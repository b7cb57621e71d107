"""Memory that somebody has who writes there without asking: NumPy, DLPack, an address.

A weight's own bytes can be given away (Slot.lease). A gradient, a moment, an entry of a state dict are fields of the
engine, and what is given away is memory beside them: a loan. So is what was assigned (`p.data = x`, `p.grad = x`), as
torch's parameter would be that memory. Field and memory are kept equal.

Invariants
    1. Before a field is used, what was written to its lent memory is the field's (Slot.collect). Comparison with the
       last common values finds it, element by element: what nobody has written never replaces a field.
    2. When a field has changed, its lent memory shows it (Slot.refresh).
    3. A loan ends when nobody else has its memory, and with the tensor that was given away (a dropped gradient). What
       was written to it before is collected first, unless the field became another.
    4. With several ranks there are no loans: to collect and to refresh is to read a field, which all ranks do together,
       and whether somebody has memory is known to one. What they give away is a copy that NumPy cannot write.
"""

from __future__ import annotations

import torch

from gemini_strategy import _torch
from gemini_strategy.parameters.absent import Home

__all__ = ["Loan"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Loan:
    """Memory beside one home, and what both had when they were compared last.

    Args:
        memory: with the home's values; None: the loan's own.
    """

    def __init__(self, home: Home, memory: torch.Tensor | None = None) -> None:
        if memory is None:
            memory = home.open(False)
        self.home = home
        self.memory = memory
        self._common = memory.clone()
        # Such a home keeps its memory itself, and an absent tensor does.
        self._n_own = 1 if home.memory is None else 2

    def is_held(self) -> bool:
        """Whether anybody else has the memory."""
        storage = _torch.storage_address(self.memory)
        return _torch.storage_use_count(storage) > self._n_own

    def collect(self) -> bool:
        """What was written becomes the home's; gives whether there was anything."""
        bits = _BITS[self.memory.element_size()]
        is_written = self.memory.view(bits) != self._common.view(bits)
        if not is_written.any():
            return False
        written = self.memory.clone()  # a home with memory of its own may bring it up to date
        self.home.write(torch.where(is_written, written, self.home.open(False)))
        self.refresh()
        return True

    def refresh(self) -> None:
        """The home has changed."""
        values = self.home.open(False)
        if values is not self.memory:
            self.memory.copy_(values)
        self._common.copy_(values)
