"""What others have of a parameter's fields: tensors that show them, and memory that was given away.

A weight's own bytes can be given away (Slot.lease). A gradient, a moment, an entry of a state dict are fields of the
engine; what NumPy, DLPack or an address gets is memory beside them, a loan. So is what was assigned (`p.data = x`,
`p.grad = x`, `state[p]["exp_avg"].data = x`), as in torch the field would be that memory. Nobody asks when such memory
is written: field and memory are kept equal.

Invariants
    1. Before a field is used, what was written to its memory is the field's (Given.collect). Comparison with the last
       common values finds it, element by element: what nobody has written never replaces a field.
    2. When a field has changed, its memory shows it (Given.refresh).
    3. A loan ends when nobody else has its memory, and when another tensor takes the field's place. What was written to
       it before is collected first, unless the field became another.
    4. A tensor in whose place another was assigned goes on with its values, or says that it cannot.
    5. One piece of memory is one field's: two that share some would each take the other's values for writes. Two
       gradients may, as nothing but a program writes them between a backward and a step.
    6. With several ranks there are no loans: to collect and to refresh is to read a field, which all ranks do together,
       and whether somebody has memory is known to one. What they give away is a copy that NumPy cannot write.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from gemini_strategy import _torch
from gemini_strategy.errors import GeminiError, GuardError
from gemini_strategy.parameters import absent
from gemini_strategy.parameters.homes import LOWS, Entry, Field
from gemini_strategy.weakly import WeakSet

if TYPE_CHECKING:
    from gemini_strategy.parameters.slot import Slot

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Loan:
    """Memory beside one home, and what both had when they were compared last.

    Args:
        memory: with the home's values; None: the loan's own.
        given: the tensor that torch would have as the field: it may get other memory.
        tied: the same while its bytes are another field's, which it may be only until a field is used.
    """

    def __init__(
        self,
        home: absent.Home,
        memory: torch.Tensor | None = None,
        given: torch.Tensor | None = None,
        tied: torch.Tensor | None = None,
    ) -> None:
        self.home = home
        self.memory = home.open(False) if memory is None else memory
        self._given = None if given is None else weakref.ref(given)
        self._tied = tied
        self._common = self.memory.clone()
        # Such a home keeps its memory itself, and an absent tensor does.
        self._n_own = 1 if home.memory is None else 2

    def stands_for(self, home: absent.Home) -> bool:
        """Whether its memory can be given away as that of `home`, which is of the same slot."""
        if self.home is home:
            return True
        if self.home.key != home.key or self.home.memory is not None or home.memory is not None:
            return False
        assert isinstance(home, Field)
        return self.memory.stride() == home.slot.strides and self.memory.storage_offset() == 0

    def is_held(self) -> bool:
        """Whether anybody else has the memory."""
        storage = _torch.storage_address(self.memory)
        return self._tied is not None or _torch.storage_use_count(storage) > self._n_own

    def _look_up(self, key: str | None) -> None:
        """Which memory it is now: that of the tensor that was assigned (`p.grad = x`, then `x.data = y`)."""
        given = self._tied if self._given is None else self._given()
        if given is None:
            return
        if absent.is_absent(given):
            other = absent.home_of(given)
            if other.key and key in (None, self.home.key):
                raise GuardError(_tie(self.home, other))
            if other.key:
                return
            self._given, self._tied = weakref.ref(given), None
        memory = _memory_of(given)
        if _span(memory) == _span(self.memory) and memory.stride() == self.memory.stride():
            return
        geometry, was = ((t.shape, t.dtype, t.device) for t in (memory, self.memory))
        if geometry != was:
            raise GuardError(
                f"{self.home.name}: what was assigned to its {self.home.key} has other data now, of shape "
                f"{tuple(memory.shape)} and {memory.dtype} on {memory.device}: assign it again"
            )
        assert isinstance(self.home, Field)
        _check_alone(self.home, memory)
        self.memory = memory

    def collect(self, key: str | None) -> bool:
        """What was written becomes the home's; gives whether there was anything. key: see Given.collect."""
        self._look_up(key)
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


def _memory_of(value: torch.Tensor) -> torch.Tensor:
    """`value` is no field of a slot."""
    return (absent.plain(value, is_written=True) if absent.is_absent(value) else value).detach()


def _memory_for(home: Field, value: torch.Tensor) -> torch.Tensor | None:
    """What a field shares with what was assigned, which is no field; None: nothing can be shared."""
    memory = _memory_of(value)
    strides = zip(memory.shape, memory.stride(), strict=True)
    if memory.device != home.slot.device or not all(step for n, step in strides if n > 1):
        return None
    _check_alone(home, memory)
    return memory


def _span(memory: torch.Tensor) -> tuple[int, int]:
    """The addresses of its bytes, from and to."""
    start, size = _torch.TensorBase.data_ptr(memory), memory.element_size()
    last = sum((n - 1) * step for n, step in zip(memory.shape, memory.stride(), strict=True))
    return start, start + (last + 1) * size if memory.numel() else start


def _check_alone(home: Field, memory: torch.Tensor) -> None:
    """Refuses memory for a field that is another field's: see invariant 5."""
    slot, (start, end) = home.slot, _span(memory)
    for loan in [loan for each in slot.engine.lent for loan in each.given.loans]:
        if loan.home.key == home.key == "grad" or loan.home.is_of(slot, home.key):
            continue  # first: a loop that assigns all gradients comes here for each pair of them
        first, last = _span(loan.memory)
        if first < end and start < last:
            raise GuardError(_tie(home, loan.home))


def _tie(one: absent.Home, other: absent.Home | Slot) -> str:
    return f"{one.name}: its {one.key} would be the memory of {other.name}, which ties them: assign a clone()"


class Given:
    """Of one slot.

    Attributes:
        entries: homes of state dicts' entries.
        loans: in the order in which they were made.
    """

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self.entries: WeakSet[Entry] = WeakSet()
        self._tensors: dict[str, torch.Tensor] = {}  # `p.grad`, and those of optimizer.state[p]
        self.loans: list[_Loan] = []
        self._is_busy = False  # with loans: what is called meanwhile leaves them alone

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
        """`value` was assigned in a field's place: the field has its values, and follows it while somebody has it.

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
        home, is_alone = Field(slot, key), slot.engine.ranks.size == 1
        why = memory = tied = None
        other, owner = absent.Home(), None
        if absent.is_absent(value):
            other = absent.home_of(value)
        else:
            owner = absent.slot_behind(value)  # a weight in its unit
        if other.is_of(slot, key) or (owner is slot and key == "weight"):
            if value.stride() == slot.strides and value.storage_offset() == 0:
                return  # `p.grad = p.grad`
            why = "it was assigned in another order; clone it first to keep it"
        elif owner is not None:
            raise GuardError(_tie(home, owner))
        elif other.key:  # two may be swapped: whether they are tied is seen when one is used
            if key == "weight" or not is_alone:
                raise GuardError(_tie(home, other))
            tied = value
        elif is_alone and not other.is_gone:
            memory = _memory_for(home, value)
        if key == "weight" and slot.is_shown_elsewhere():
            raise GuardError(
                f"{slot.name}: a tensor that was taken inside its module shows its memory, and would show what is "
                "assigned to `.data`; in torch it keeps the old values: drop it, or clone it inside the module"
            )
        source = value.detach().clone()  # it may overlap with what is left
        self.leave(key, why, stays)
        (home.write if write is None else write)(source)
        for each in list(slot.engine.lent):  # what other assignments have left
            if not all(loan.is_held() for loan in each.given.loans):
                each.given.collect("")
        if tied is not None:
            self._add(_Loan(home, source, tied=tied))
        elif memory is not None:  # in torch `p.grad` is what was assigned; `p` only has its memory
            self._add(_Loan(home, memory, None if key == "weight" else value))

    def leave(self, key: str, why: str | None = None, stays: torch.Tensor | None = None) -> None:
        """Another tensor takes the place of a field's, or none does: whoever has the old one goes on with its values.

        Args:
            why: what they are told instead.
            stays: the tensor that shows the field and goes on to do so; its views and aliases do not.
        """
        if why is None:
            self.collect("")  # the old tensor goes on with what was written
        self.loans = [each for each in self.loans if each.home.key != key]
        self._note()
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
        else:  # what gave its address away has memory of its own
            self._tensors.pop(key, None)

    def end(self) -> None:
        """The engine is about to close: what state dicts have stays, gradients and states are given back apart."""
        for entry in list(self.entries):
            entry.leave()
        for shown in filter(absent.is_absent, self._tensors.values()):
            absent.forget(
                shown, "it was dropped with its engine, which is closed; clone it to keep it"
            )

    def keep(self, key: str, anchor: torch.Tensor, why: str | None = None) -> None:
        """Whoever has the storage of an absent tensor that showed a field keeps the values of now, or is told `why`."""
        if absent.n_users(anchor) <= 0:
            return
        if why is None and self._slot.engine.ranks.shard.size == 1:
            with contextlib.suppress(GeminiError):  # a step may have used it up
                absent.keep(anchor, self._slot.read_field(key))
                return
        absent.forget(anchor, why or "another was assigned in its place; clone it to keep it")

    # ---- loans ----

    def lend(self, home: absent.Home) -> torch.Tensor | None:
        """Memory with the bytes of a home of this slot, which counts what is written there.

        None: there are several ranks, and one that finds a write cannot bring it to the others.
        """
        if self._slot.engine.ranks.size > 1:
            return None
        loan = next((each for each in self.loans if each.stands_for(home)), None)
        return (loan or self._add(_Loan(home))).memory

    def _add(self, loan: _Loan) -> _Loan:
        self.loans.append(loan)
        self._note()
        return loan

    def _note(self) -> None:
        slot = self._slot
        slot.is_lent = bool(self.loans)
        (slot.engine.lent.add if self.loans else slot.engine.lent.discard)(slot)
        slot.engine.choose_way()

    def collect(self, key: str | None = None) -> None:
        """What was written to memory that was given away is the field's.

        Args:
            key: of the field that is about to be used; None: all are.
        """
        if not self.loans or self._is_busy:
            return
        kept, self._is_busy = self.loans, True
        try:
            with absent.plainly(), torch.no_grad():
                written = {loan.home.key for loan in kept if loan.collect(key)}
            kept = [loan for loan in kept if loan.is_held()]
        finally:
            self.loans, self._is_busy = kept, False
            self._note()
        self.refresh(*written, *(LOWS if "weight" in written else ()))

    def refresh(self, *keys: str) -> None:
        """Fields have changed: memory of them that was given away shows it."""
        if not self.loans or self._is_busy:
            return
        self._is_busy = True
        try:
            with absent.plainly(), torch.no_grad():
                for loan in self.loans:
                    if loan.home.key in keys:
                        loan.refresh()
        finally:
            self._is_busy = False
