"""`optimizer.state` where the engine keeps states as bytes: what a program sees of it, and writes there.

What a program has of a state that lies in a chunk is a copy. It is kept like the state itself: what the program writes
there is taken before the state is used, and what a step makes of the state is written to the copy at the step's end.
What lies in no chunk, a counter for one, is the optimizer's own tensor.

Invariants
    1. An entry that was given last is kept until the next use: what was written to it counts, even if the program has
       dropped it. Others live as long as the program has them, or a tensor of theirs.
    2. Copies are compared by their bytes: `.data` and NumPy write without telling.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from gemini_strategy import _torch
from gemini_strategy.errors import GeminiError
from gemini_strategy.optim.moments import ShownStates
from gemini_strategy.optim.opaque import Path, leaves, text, with_leaves
from gemini_strategy.optim.opaque_parts import framed
from gemini_strategy.ranks.ranks import fingerprint

if TYPE_CHECKING:
    from gemini_strategy.parameters.slot import Slot


class Kept(Protocol):
    """Who has the states."""

    def entry(self, slot: Slot) -> dict[Any, Any] | None:
        """The optimizer's own, with tensors on the chunk."""

    def kept(self, slot: Slot) -> dict[Path, torch.Tensor]:
        """What of it lies in the chunk, copied to the host."""

    def put(self, slot: Slot, entry: Mapping[Any, Any]) -> None:
        """Another one, of which the chunk has the bytes."""

    def store(self, slot: Slot, entry: Mapping[Any, Any]) -> None:
        """Another one, whose bytes go to the chunk."""

    def read(self, slot: Slot) -> dict[Any, Any]:
        """A copy, on the host."""

    def sent(
        self,
        slot: Slot,
        entry: Mapping[Any, Any],
        device: torch.device,
        twins: dict[int, torch.Tensor],
    ) -> dict[Any, Any]:
        """The same where it is with the parameter on that device."""


class _Entry(dict[Any, Any]):
    """`optimizer.state[p]`, a dict that may be known weakly."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(dict(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)


def _references(reference: weakref.ref[torch.Tensor]) -> int:
    """To a tensor and its storage, which NumPy may have, too; what this function adds differs with Python's version."""
    tensor = reference()
    if tensor is None:
        return 0
    storage = _torch.storage_id(tensor.untyped_storage())
    return sys.getrefcount(tensor) + int(_torch.storage_use_count(storage))


_entry = {"one": torch.empty(0)}
_MOST_OWN = _references(weakref.ref(_entry["one"]))  # of a tensor that an entry alone has


def _is_shared(reference: weakref.ref[torch.Tensor]) -> bool:
    """Whether there is more that has the tensor than the optimizer's entry."""
    return _references(reference) > _MOST_OWN


class _Copy:
    """What a program may have of one parameter's states."""

    def __init__(self, entry: _Entry | None, tensors: Mapping[Path, torch.Tensor]) -> None:
        self.entry = None if entry is None else weakref.ref(entry)
        self.tensors = {path: weakref.ref(tensor) for path, tensor in tensors.items()}
        self.others = [weakref.ref(tensor) for _, tensor in leaves(entry)]
        self.versions: dict[Path, int] = {}  # when states were used last

    def is_any(self) -> bool:
        """The program has something of it, counters included: those are the optimizer's own tensors."""
        known = [self.entry, *self.tensors.values()]
        return any(each is not None and each() is not None for each in known) or any(
            _is_shared(each) for each in self.others
        )

    def alive(self) -> tuple[_Entry | None, dict[Path, torch.Tensor]]:
        entry = None if self.entry is None else self.entry()
        found = {path: tensor() for path, tensor in self.tensors.items()}
        return entry, {path: tensor for path, tensor in found.items() if tensor is not None}


@dataclass
class _Watched:
    """A tensor of a state dict, which is a copy: it would cost a copy of all states to renew it at each step's end.

    What the program writes to it counts until the states are used next, and is refused later (`is_past`).
    """

    slot: Slot
    path: Path
    tensor: weakref.ref[torch.Tensor]
    version: int
    fresh: torch.Tensor | None  # alive until it has been looked at
    is_past: bool = False


class Copies:
    """Those of all parameters."""

    def __init__(self, owner: Kept) -> None:
        self._owner = weakref.ref(owner)
        self._copies: dict[Slot, _Copy] = {}
        self._last: tuple[Slot, _Entry] | None = None
        self._watched: list[_Watched] = []

    def watch(self, slot: Slot, entry: Mapping[Any, Any]) -> None:
        """A program gets tensors of a state dict: see _Watched."""
        for path, tensor in leaves(entry):
            known = slot, path, weakref.ref(tensor), tensor._version
            self._watched.append(_Watched(*known, fresh=tensor))

    def _take_watched(self) -> None:
        written: dict[Slot, dict[Path, torch.Tensor]] = {}
        for each in self._watched:
            tensor, each.fresh = each.tensor(), None
            if tensor is None or tensor._version == each.version:
                continue
            each.version = tensor._version
            if each.is_past:
                raise GeminiError(
                    f"{each.slot.name}: its state {text(each.path)} was written in a state dict that was made before "
                    "that state was used again, and the write would be lost: make optimizer.state_dict() anew, or "
                    "write to optimizer.state[p]"
                )
            written.setdefault(each.slot, {})[each.path] = tensor
        for each in self._watched:
            each.is_past = True
        self._watched = [each for each in self._watched if each.tensor() is not None]
        owner = self._owner()
        for slot, tensors in written.items() if owner is not None else ():
            own = owner.entry(slot) or {}
            rest = {path: tensors[path].to(t.device) for path, t in leaves(own) if path in tensors}
            owner.store(slot, with_leaves(own, {**owner.kept(slot), **rest}))

    def show(self, slot: Slot) -> dict[Any, Any]:
        """The parameter's entry for a program."""
        if self._last is not None and self._last[0] is not slot:
            self.take(self._last[0])
        known = self._copies.get(slot)
        entry, tensors = (None, {}) if known is None else known.alive()
        if entry is None:
            self.take(slot)
            owner = self._owner()
            assert owner is not None
            missing = {
                p: t.to(slot.device) for p, t in owner.kept(slot).items() if p not in tensors
            }
            tensors = {**missing, **tensors}
            entry = _Entry(with_leaves(owner.entry(slot) or {}, tensors))
            self._copies[slot] = _Copy(entry, tensors)
        self._last = slot, entry
        return entry

    def note(self, slot: Slot, entry: Mapping[Any, Any], kept: Mapping[Path, Any]) -> None:
        """A program has assigned an entry, and may go on writing to its tensors."""
        self.forget(slot)
        given = {
            path: tensor
            for path, tensor in leaves(entry)
            if path in kept and tensor.device == slot.device
        }
        self._copies[slot] = _Copy(entry if isinstance(entry, _Entry) else None, given)

    def forget(self, slot: Slot) -> None:
        """What a program has of the parameter's states is its own from now on."""
        self._copies.pop(slot, None)
        if self._last is not None and self._last[0] is slot:
            self._last = None

    def take_all(self) -> None:
        """States are used next."""
        self._take_watched()
        for slot in list(self._copies):
            self.take(slot)
        for known in self._copies.values():
            known.versions = {path: tensor._version for path, tensor in known.alive()[1].items()}

    def take(self, slot: Slot) -> None:
        """What the program has written becomes the parameter's states."""
        if any(not each.is_past and each.slot is slot for each in self._watched):
            self._take_watched()
        self._take(slot)
        if self._last is not None and self._last[0] is slot:
            self._last = None

    def _take(self, slot: Slot) -> None:
        known, owner = self._copies.get(slot), self._owner()
        if known is None or owner is None:
            return
        entry, tensors = known.alive()
        if not known.is_any():
            del self._copies[slot]
        if entry is None and not tensors:
            return
        own, kept = owner.entry(slot) or {}, owner.kept(slot)
        if entry is None:
            written = {p: t for p, t in tensors.items() if p in kept and not _is_same(t, kept[p])}
            if written:
                owner.store(slot, with_leaves(own, {**kept, **written}))
            return
        now = dict(leaves(entry))
        was = dict(leaves(own))
        is_same = now.keys() == was.keys() and all(
            (tensors.get(path) is tensor and _is_same(tensor, kept[path]))
            if path in kept
            else tensor is was[path]
            for path, tensor in now.items()
        )
        if is_same:
            owner.put(slot, entry)
            return
        owner.store(slot, entry)
        self._copies[slot] = _Copy(entry, {p: t for p, t in now.items() if p in owner.kept(slot)})

    def check(self) -> None:
        """Refuses what was written since take_all."""
        for slot, known in self._copies.items():
            for path, tensor in known.alive()[1].items():
                if tensor._version != known.versions.get(path, tensor._version):
                    raise GeminiError(
                        f"{slot.name}: its state {text(path)} was written between backward(step=True) and "
                        "optimizer.step(): write it before that backward, or call backward without step=True"
                    )

    def any(self) -> bool:
        """Whether a program has something of a state."""
        return any(known.is_any() for known in self._copies.values())

    def renew(self) -> None:
        """States have been used: copies that a program has become what they are now."""
        owner = self._owner()
        for slot, known in list(self._copies.items()):
            entry, tensors = known.alive()
            own = None if owner is None else owner.entry(slot)
            if owner is None or own is None or not known.is_any():
                del self._copies[slot]
                continue
            kept = owner.kept(slot)
            for path, tensor in tensors.items():
                if path in kept:
                    with torch.no_grad():
                        tensor.copy_(kept[path])
            if entry is None:
                continue
            missing = {p: t.to(slot.device) for p, t in kept.items() if p not in tensors}
            tensors = {**missing, **{p: t for p, t in tensors.items() if p in kept}}
            _become(entry, with_leaves(own, tensors))
            known.tensors = {path: weakref.ref(tensor) for path, tensor in tensors.items()}

    def release(self) -> None:
        self._copies, self._last, self._watched = {}, None, []


class Snapshots:
    """The same where ranks have parts of a parameter: what a program is shown is what the states are then.

    What it writes there is taken, once, before states are used the next time. What it writes later is refused.
    """

    def __init__(self, owner: Kept) -> None:
        self._owner = weakref.ref(owner)
        self._shown: dict[Slot, tuple[dict[Any, Any], Any, dict[Path, str]]] = {}
        self._old: list[tuple[str, Path, weakref.ref[torch.Tensor], str]] = []

    def show(self, slot: Slot) -> dict[Any, Any]:
        self.take_all()
        owner = self._owner()
        assert owner is not None
        entry = owner.sent(slot, owner.read(slot), slot.device, {})
        self._shown[slot] = entry, framed(entry), _digests(entry)
        return entry

    def watch(self, slot: Slot, entry: Mapping[Any, Any]) -> None:
        """A state dict is a copy."""

    def note(self, slot: Slot, entry: Mapping[Any, Any], kept: Mapping[Path, Any]) -> None:
        self._remember(slot, {p: t for p, t in leaves(entry) if p in kept})

    def forget(self, slot: Slot) -> None:
        self._shown.pop(slot, None)

    def take_all(self) -> None:
        for slot in list(self._shown):
            self.take(slot)
        for name, path, tensor, digest in self._old:
            now = tensor()
            if now is not None and fingerprint(now, of_all=True) != digest:
                self._old = []
                raise GeminiError(
                    f"{name}: a tensor that was its state {text(path)} was written after that state had been used "
                    "again, so the write is lost: write to optimizer.state[p], taken anew each time"
                )
        self._old = [old for old in self._old if old[2]() is not None]

    def take(self, slot: Slot) -> None:
        owner, shown = self._owner(), self._shown.pop(slot, None)
        if owner is None or shown is None:
            return
        entry, frame, digests = shown
        if not (_is_equal(framed(entry), frame) and _digests(entry) == digests):
            own = {path: tensor.clone() for path, tensor in leaves(entry)}  # a step writes them
            owner.store(slot, with_leaves(entry, own))
        self._remember(slot, dict(leaves(entry)))

    def _remember(self, slot: Slot, tensors: Mapping[Path, torch.Tensor]) -> None:
        for path, t in tensors.items():
            self._old.append((slot.name, path, weakref.ref(t), fingerprint(t, of_all=True)))

    def check(self) -> None:
        """What is written between a backward that begins a step and the step is refused as a late write."""

    def any(self) -> bool:
        return False

    def renew(self) -> None:
        """They are what the states were."""

    def release(self) -> None:
        self._shown, self._old = {}, []


def _digests(entry: Any) -> dict[Path, str]:
    return {path: fingerprint(tensor, of_all=True) for path, tensor in leaves(entry)}


def _is_equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # arrays have no truth, for one
        return False


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """The same bytes, wherever they are."""
    if one.dtype is not other.dtype or one.shape != other.shape:
        return False
    flat = [t.detach().cpu().contiguous().reshape(-1, 1).view(torch.uint8) for t in (one, other)]
    return bool(torch.equal(*flat))


def _become(entry: dict[Any, Any], now: Mapping[Any, Any]) -> None:
    """The dict has these values; what has the same tensors in it stays the same object."""
    for key in [key for key in entry if key not in now]:
        del entry[key]
    for key, value in now.items():
        ids = [id(tensor) for _, tensor in leaves({"": value})]
        if not ids or ids != [id(tensor) for _, tensor in leaves({"": entry.get(key)})]:
            entry[key] = value


class OpaqueStates(ShownStates):
    """`optimizer.state`: entries of parameters whose states the engine has, and whatever else there is."""

    def __init__(self, owner: Any, slot_of: Callable[[Any], Slot | None]) -> None:
        super().__init__(dict)
        self._owner, self._slot_of = owner, slot_of

    def __getitem__(self, key: Any) -> Any:
        slot = self._slot_of(key)
        if slot is not None:
            return self._owner.show(slot)
        if not dict.__contains__(self, key):
            dict.__setitem__(self, key, {})
        return dict.__getitem__(self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.assign(key, value, is_copied=False)

    def assign(
        self,
        key: Any,
        value: Any,
        is_copied: bool,
        twins: dict[int, torch.Tensor] | None = None,
    ) -> None:
        """`is_copied`: what is written to its tensors later counts no more. `twins`: as in OpaqueOptimizer.read."""
        slot = self._slot_of(key)
        if slot is None:
            dict.__setitem__(self, key, value)
        else:
            self._owner.write(slot, value, is_copied, twins)

    def __delitem__(self, key: Any) -> None:
        slot = self._slot_of(key)
        if slot is None:
            dict.__delitem__(self, key)
        elif not self._owner.has(slot):
            raise KeyError(key)
        else:
            self._owner.drop(slot)

    def __iter__(self) -> Iterator[Any]:
        yield from (slot.parameter for slot in self._owner.slots())
        yield from dict.__iter__(self)

    def __len__(self) -> int:
        return len(self._owner.slots()) + dict.__len__(self)

    def __contains__(self, key: Any) -> bool:
        slot = self._slot_of(key)
        return dict.__contains__(self, key) if slot is None else self._owner.has(slot)

    def pop(self, key: Any, *default: Any) -> Any:
        if key not in self:
            return dict.pop(self, key, *default)
        value = self[key]
        del self[key]
        return value

    def rest(self) -> dict[Any, Any]:
        """What is not of the engine."""
        return {key: dict.__getitem__(self, key) for key in dict.__iter__(self)}

    def replace(self, states: Any, is_copied: bool = False) -> None:
        """`optimizer.state = states`: its entries; what it has no entry for begins anew."""
        if states is self:
            return
        if not isinstance(states, Mapping):
            raise TypeError(f"optimizer.state is a mapping, not {type(states).__name__}")
        given = dict(states.items())
        for key, value in given.items():
            slot = self._slot_of(key)
            if slot is not None:
                self._owner.check(slot, value)
        for key in [key for key in self if key not in given]:
            del self[key]
        twins: dict[int, torch.Tensor] = {}
        for key, value in given.items():
            self.assign(key, value, is_copied, twins)
