"""`optimizer.state` of a managed optimizer: a mapping that shows, and takes, what the engine holds.

Invariants
    1. A parameter has an entry exactly when torch's Adam would have one: from its first update, or load, on.
    2. The engine has all three of step, exp_avg and exp_avg_sq of a parameter, or none: zeros before update 1.
    3. What the entry shows is live; what is taken out of it (pop, copies) is ordinary. No tensor keeps the engine.
    4. What a 16-bit weight lacks to be its master is the fourth, as in HybridAdam's state: checkpoints take what they
       find here. No write to it changes the weight: a program that sets all states to zero does not mean weights.
"""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch

from gemini_strategy.errors import GeminiError
from gemini_strategy.parameters import absent, stand_in
from gemini_strategy.parameters.homes import LOWS, MOMENTS, Entry
from gemini_strategy.parameters.parameter import kept
from gemini_strategy.parameters.slot import Slot, checked_step

if TYPE_CHECKING:
    from gemini_strategy.runtime import Runtime

_KEYS = ("step", *MOMENTS)


class Shown(MutableMapping[Any, Any], dict[Any, Any]):
    """A dict whose content is not only in it: no method of dict itself reads it."""

    def __repr__(self) -> str:
        return repr(self.copy())

    def __copy__(self) -> Any:
        return self.copy()

    def __or__(self, other: Any) -> Any:
        return self.copy() | dict(other)

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc,override]
        self.update(other)
        return self


class _Entry(Shown):
    """`optimizer.state[p]`. What others put beside the states of Adam is in the dict itself."""

    def __init__(self, slot: Slot) -> None:
        super().__init__()
        self.slot = slot
        self.is_dropped = False
        self._keys = (*_KEYS, *_low_keys(slot))

    @property
    def is_live(self) -> bool:
        return self.slot.has_state and not self.is_dropped

    def __getitem__(self, key: Any) -> Any:
        if key not in self._keys or not self.is_live:
            return dict.__getitem__(self, key)
        return self.slot.shown_step() if key == "step" else self.slot.given.tensor(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        slot = self.slot
        if self.is_dropped or key not in (*_KEYS, *LOWS):
            dict.__setitem__(self, key, value)
        elif key == "step":
            slot.assign_step(value)
            slot.has_state = True
        else:
            _check_moment(slot.name, slot.shape, key, value)
            if key not in LOWS:
                slot.given.become(key, value.to(slot.device, torch.float32))
                slot.has_state = True
            elif self._is_popped(value):
                pass  # the engine has kept it, with what it knows of the weight that it belongs to
            elif key in self._keys and value.dtype is slot.dtype_of(key):
                slot.given.become(key, value.to(slot.device), slot.load_low)

    def __delitem__(self, key: Any) -> None:
        if key in self._keys and self.is_live:
            raise GeminiError(
                f"{self.slot.name}: step, exp_avg and exp_avg_sq of a managed optimizer go together: "
                "del optimizer.state[p] (or optimizer.state[p].clear()), or write the one"
            )
        dict.__delitem__(self, key)

    def __iter__(self) -> Iterator[Any]:
        yield from self._keys if self.is_live else ()
        yield from dict.__iter__(self)

    def __len__(self) -> int:
        return (len(self._keys) if self.is_live else 0) + dict.__len__(self)

    def __contains__(self, key: Any) -> bool:
        return (key in self._keys and self.is_live) or dict.__contains__(self, key)

    def clear(self) -> None:
        if self.is_live:
            self.slot.forget_state()
        dict.clear(self)

    def copy(self) -> dict[Any, Any]:
        """Beside the engine: an ordinary dict with the tensors of this one."""
        return {key: self[key] for key in self}

    def taken(self) -> dict[Any, Any]:
        """An ordinary dict with the values of now."""
        return {k: v.detach().clone() if k in self._keys else v for k, v in self.items()}

    def drop(self, taken: Mapping[Any, Any] | None = None) -> None:
        """taken: what the script has of it then, and may put back."""
        if self.is_live:
            shown = self.copy()  # whose tensors say that they were dropped
            self.slot.forget_state()
            dict.update(self, taken or shown)
            for key in _low_keys(self.slot) if taken else ():
                self.slot.popped = weakref.ref(taken[key]), taken[key]._version
        self.is_dropped = True

    def part(self) -> None:
        """Another takes its place, and a program has this one: an ordinary dict with the tensors that it showed."""
        dict.update(self, self.copy())
        self.is_dropped = True

    def _is_popped(self, low: torch.Tensor) -> bool:
        """It is put back as it was taken out, and no update or load has come in between."""
        popped, version = self.slot.popped
        return popped() is low and low._version == version and not self.slot.has_state

    def assign(self, values: Mapping[str, Any], is_copied: bool) -> None:
        """`optimizer.state[p] = values`: checked before."""
        if isinstance(values, _Entry) and values.slot is not self.slot:
            values = values.taken()  # it may be written next
        rest = {k: v for k, v in values.items() if k not in (*_KEYS, *LOWS)}
        if "exp_avg" in values and is_copied:
            load_entry(self.slot, values)
        elif "exp_avg" in values:
            for key in (*LOWS, *MOMENTS, "step"):  # see _is_popped
                if key in values:
                    self[key] = values[key]
        elif self.is_live:
            self.slot.forget_state()
        dict.clear(self)
        dict.update(self, rest)

    def _left(self) -> dict[Any, Any]:
        """What a copy or a pickle of the optimizer has, beside parameters as leaving.py gives them."""
        is_whole = self.slot.outer_dtype is not self.slot.dtype
        return {k: v for k, v in self.taken().items() if not (is_whole and k in LOWS)}

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._left(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (kept(self._left()),)


class ShownStates(Shown, defaultdict[Any, Any]):
    """`optimizer.state`: what a program does with it beside reading and writing entries."""

    def get(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            return default
        return self[key]

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def clear(self) -> None:
        for key in list(self):
            del self[key]

    def copy(self) -> defaultdict[Any, Any]:
        """An ordinary defaultdict with these entries, or copies of them."""
        return defaultdict(dict, {key: self[key] for key in self})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return defaultdict(
            dict, {copy.deepcopy(k, memo): copy.deepcopy(v, memo) for k, v in self.items()}
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return defaultdict, (dict, dict(self.copy()))


class States(ShownStates):
    """`optimizer.state`: entries of parameters whose states the engine has, and whatever else there is.

    True where there are any: torch.distributed.checkpoint's get_state_dict asks, and makes a first step with gradients
    of zero if not; in a run that has states that would be a step too many.
    """

    def __init__(self, engine: Runtime, rest: Mapping[Any, Any]) -> None:
        super().__init__(dict)
        self._engine = weakref.ref(engine)
        dict.update(self, rest)

    def _slot_of(self, key: Any) -> Slot | None:
        """Of a parameter whose states the engine has."""
        slot = getattr(key, "_gm_slot", None)
        engine = self._engine()
        is_ours = slot is not None and slot.engine is engine and slot.has_moments
        return slot if is_ours and engine is not None and not engine.closed else None

    def __getitem__(self, key: Any) -> Any:
        if not dict.__contains__(self, key):
            slot = self._slot_of(key)
            dict.__setitem__(self, key, {} if slot is None else _Entry(slot))
        return dict.__getitem__(self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._assign(key, value, is_copied=False)

    def _assign(self, key: Any, value: Any, is_copied: bool) -> None:
        slot = self._slot_of(key)
        if slot is None:
            dict.__setitem__(self, key, value)
        else:
            check_entry(slot.name, slot.shape, value)
            if dict.get(self, key) is value:
                return
            if not is_copied:
                _check_tie(slot, value)
            self._let_go(key)
            self[key].assign(value, is_copied)

    def _let_go(self, key: Any) -> None:
        """Another entry takes the place of this one, whose values stay where a program has it, and only there."""
        if key in self:
            reference = weakref.ref(dict.pop(self, key))
            kept = reference()
            if kept is not None:
                kept.part()

    def __delitem__(self, key: Any) -> None:
        entry = dict.__getitem__(self, key)
        if isinstance(entry, _Entry):
            entry.drop()
        dict.__delitem__(self, key)

    # All that it has is in the dict itself.
    __iter__, __len__, __contains__ = dict.__iter__, dict.__len__, dict.__contains__

    def pop(self, key: Any, *default: Any) -> Any:
        if key not in self:
            return dict.pop(self, key, *default)
        entry = self[key]
        if not isinstance(entry, _Entry):
            return dict.pop(self, key)
        taken = entry.taken()
        entry.drop(taken)
        dict.__delitem__(self, key)
        return taken

    def rest(self) -> dict[Any, Any]:
        """What is not of the engine."""
        return {k: v for k, v in self.items() if not isinstance(v, _Entry)}

    def replace(self, states: Any, is_copied: bool = False) -> None:
        """`optimizer.state = states`: its entries, or copies; what it has no entry for begins anew."""
        if states is self:
            return
        if not isinstance(states, Mapping):
            raise TypeError(f"optimizer.state is a mapping, not {type(states).__name__}")
        given = dict(states.items())
        for key, value in given.items():
            slot = self._slot_of(key)
            if slot is not None:
                check_entry(slot.name, slot.shape, value)
        for key in [key for key in self if key not in given]:
            del self[key]
        for key, value in given.items():
            self._assign(key, value, is_copied)


# ---- entries ----


def _check_moment(name: str | None, shape: tuple[int, ...], key: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: {key} in the optimizer state is no tensor, but {value!r}")
    if value.is_meta:
        raise GeminiError(
            f"{name}: its optimizer state is on the meta device: build a new optimizer, or load its state first"
        )
    if tuple(value.shape) != shape:
        raise ValueError(
            f"{name}: {key} in the optimizer state has shape {tuple(value.shape)}, expected {shape}"
        )


def check_entry(name: str | None, shape: tuple[int, ...], entry: Mapping[str, Any]) -> None:
    """Refuses what cannot be a state of Adam of this parameter."""
    if not isinstance(entry, Mapping):
        raise TypeError(f"{name}: optimizer.state[p] is a dict, not {type(entry).__name__}")
    missing = [key for key in _KEYS if key not in entry]
    if len(missing) == len(_KEYS):
        return
    if missing:
        raise ValueError(f"{name}: its optimizer state lacks {' and '.join(missing)}")
    checked_step(name, entry["step"])
    for key in MOMENTS:
        _check_moment(name, shape, key, entry[key])


def _check_tie(slot: Slot, values: Mapping[str, Any]) -> None:
    """Refuses the live entry of another parameter."""
    if not isinstance(values, _Entry) or values.slot is slot or not values.is_live:
        return
    if values.slot.engine is slot.engine:
        raise GeminiError(
            f"{slot.name}: its optimizer state would be the dict of {values.slot.name}, which ties them: "
            "assign dict(optimizer.state[p]) to swap the two, or copy.deepcopy() of it"
        )


def load_entry(slot: Slot, entry: Mapping[str, Any]) -> None:
    """Sets the state of one parameter; `entry` has been checked."""
    # Copies: they may be tensors without bytes.
    moments = [entry[key].detach().to("cpu", torch.float32, copy=True) for key in MOMENTS]
    step = checked_step(slot.name, entry["step"])
    slot.leave_state()
    slot.write_moments(*moments, step)
    slot.has_state = True
    _load_low(slot, entry)


def _low_keys(slot: Slot) -> tuple[str, ...]:
    if not slot.has_low:
        return ()
    return ("remainder",) if slot.dtype is torch.bfloat16 else ("master",)


def _load_low(slot: Slot, entry: Mapping[str, Any]) -> None:
    """What the weight lacks, unless it is of another weight than this one."""
    key = next((key for key in _low_keys(slot) if entry.get(key) is not None), None)
    if key is None:
        return
    low = entry[key]
    _check_moment(slot.name, slot.shape, key, low)
    # A torch.optim.AdamW that has loaded it keeps it, and trains on: a remainder is then no int16 any more.
    if low.dtype is not slot.dtype_of(key):
        return
    slot.load_low(low)


def live_entry(slot: Slot, saved: dict[str, Any]) -> dict[str, Any]:
    """What `saved_entry` gives, but that step and moments are the engine's themselves, as in a state dict of torch's.

    What the weight lacks is not: a loop that loads into it in place may have another weight to load.
    """
    live = dict(saved, step=slot.shown_step())
    for key in MOMENTS:
        values = saved[key]
        home = Entry(slot, key, values)
        live[key] = absent.tensor(home, values.shape, values.stride(), values.dtype, values.device)
    return live


def saved_entry(
    slot: Slot, entry: Mapping[str, Any], with_low: bool, root: int | None, for_file: bool = False
) -> Any:
    """What a state dict has of one parameter; None: nothing.

    A weight that was never updated has an entry when it lacks something: what torch's Adam would begin with.
    """
    low = None
    if with_low and slot.has_low:
        key, low, is_any = slot.lack(root)
    if not slot.has_state and (low is None or not is_any):
        return None
    saved: dict[str, Any] = {"step": torch.tensor(float(slot.adam_step), device="cpu")}
    if slot.has_state:
        read = stand_in.moments if for_file else Slot.read_moments
        saved |= zip(MOMENTS, read(slot, root), strict=True)
    else:
        saved |= {key: torch.zeros(slot.shape, device="cpu") for key in MOMENTS}
    if low is not None:
        saved[key] = low
    return saved | {k: v for k, v in entry.items() if k not in (*_KEYS, *LOWS)}
