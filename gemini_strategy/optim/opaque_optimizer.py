"""An optimizer that the engine does not compute: its own step() makes the updates, and its states are bytes.

The core calls `run` where it has weights, gradients and states of a chunk on the device (csrc/engine/opaque.c). There
stand-ins for these parameters, plain tensors at those addresses, are stepped by the optimizer's class. States that are
as large as their parameter lie in the chunk (opaque.py says which); counters and shared tables stay in Python.

Invariants
    1. A parameter has one stand-in for life. Outside `run` the bytes of stand-ins and of states in `_entries` may be
       another chunk's: nothing else reads them.
    2. All parts of a step begin with the values that groups and attributes of the optimizer had at its begin; the first
       part that ends sets them for all, and each later part must end with the same ones. Parts may run after the step,
       under the next forward, unless they write such values; all have run before the next step begins, or states are
       looked at.
    3. What a program has of states are copies. Before anything else uses a state, what was changed in them is taken
       back; what was changed in copies that are older than that is refused by name.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini_strategy import _torch
from gemini_strategy.errors import GeminiError
from gemini_strategy.optim import opaque, rehearsal
from gemini_strategy.optim.moments import Shown
from gemini_strategy.optim.opaque import Leaf, Path, is_kept_in_chunk, leaves, with_leaves
from gemini_strategy.weakly import weak_method

if TYPE_CHECKING:
    from gemini_strategy.parameters.slot import Slot
    from gemini_strategy.runtime import Runtime

_ALIGN = 512  # bytes: as torch's allocator places a tensor
_SAME = (
    0.0,
    0.9,
    0.999,
    1e-8,
    0.0,
)  # hyperparameters of Adam that the core takes and nothing reads


@dataclass(frozen=True)
class _Form:
    """Where the leaves of one parameter's states lie among its bytes in the chunk."""

    places: tuple[tuple[Leaf, int], ...]
    nbytes: int

    @classmethod
    def of(cls, found: tuple[Leaf, ...]) -> _Form:
        places, end = [], 0
        for leaf in found:
            places.append((leaf, end))
            end += (leaf.nbytes + _ALIGN - 1) // _ALIGN * _ALIGN
        return cls(tuple(places), end)


@dataclass
class _Given:
    """States of one parameter that a program has."""

    entry: dict[Any, Any]
    seen: dict[Path, tuple[torch.Tensor, int]]


@dataclass
class _Old:
    """Likewise, from before the last time that states were used: tensors that the program alone keeps."""

    name: str
    path: Path
    tensor: weakref.ref[torch.Tensor]
    version: int


def _at(
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """A plain tensor on dense memory of the engine, which does not own it."""
    n_bytes = torch.Size(shape).numel() * dtype.itemsize
    with torch.inference_mode(False), torch.no_grad():
        storage = _torch.storage_from_address(address, device, n_bytes)
        tensor = torch.empty(0, dtype=dtype, device=device)
        return tensor.set_(storage, 0, shape, strides)


class _StandIn:
    """What the optimizer's step() gets for one parameter."""

    def __init__(self, slot: Slot, core: Any, grad_dtype: torch.dtype) -> None:
        weight, low, grad, self.states = core.opaque_place(slot.id)
        where = slot.shape, slot.strides
        self.weight = _at(weight, *where, slot.dtype, slot.device)
        self.grad = _at(grad, *where, grad_dtype, slot.device)
        self.low = None
        if slot.has_low:
            kind = torch.int16 if slot.dtype is torch.bfloat16 else torch.float32
            self.low = _at(low, *where, kind, slot.device)
        own = {k: v for k, v in slot.parameter.__dict__.items() if not k.startswith("_gm")}
        self.parameter = nn.Parameter(self.weight)
        self.parameter.__dict__.update(own)

    def open(self, scale: torch.Tensor | float) -> torch.Tensor:
        """Gives the parameter its values and its gradient; gives that."""
        if self.low is not None:
            self.parameter.data = self._master()
        grad = self.grad.to(self.parameter.dtype)
        if isinstance(scale, torch.Tensor) or scale != 1.0:
            grad = grad * scale
        self.parameter.grad = grad
        return grad

    def close(self) -> None:
        """The values have become others."""
        self.parameter.grad = None
        if self.low is None:
            return
        master = self.parameter.data
        if self.low.dtype is torch.float32:
            self.weight.copy_(master)
        else:  # csrc/arith/format.h, gm_pack_bf16
            bits = master.view(torch.int32).masked_fill(master.isnan(), 0x7FC00000)
            high = (bits + 0x8000) >> 16
            self.weight.view(torch.int16).copy_(high)
            self.low.copy_(bits - (high << 16))
            self.parameter.data = self.weight  # the masters of a whole model are too many

    def _master(self) -> torch.Tensor:
        assert self.low is not None
        if self.low.dtype is torch.float32:
            return self.low
        bits = self.weight.view(torch.int16).to(torch.int32) << 16
        return (bits + self.low).view(torch.float32)


class OpaqueOptimizer:
    """The states and the steps of one such optimizer.

    Args:
        optimizer: not managed yet.

    Raises:
        GeminiError: its step() couples parameters, wants a closure or draws random numbers (rehearsal.py).
    """

    def __init__(self, runtime: Runtime, optimizer: torch.optim.Optimizer) -> None:
        if runtime.ranks.size > 1:
            raise GeminiError(
                f"{type(optimizer).__name__} on {runtime.ranks.size} ranks: on several ranks torch.optim.AdamW, "
                "torch.optim.Adam, gemini_strategy.HybridAdam and gemini_strategy.CPUAdam are supported; use one of "
                "them, or one rank"
            )
        self._runtime = weakref.ref(runtime)
        self._kind = type(optimizer)
        self._rehearsed = rehearsal.rehearse(optimizer)
        self._group_of = {
            id(p): number for number, g in enumerate(optimizer.param_groups) for p in g["params"]
        }
        self._forms: dict[Slot, _Form] = {}
        self._by_shape: dict[Any, _Form] = {}
        self._stand_ins: dict[Slot, _StandIn] = {}
        self._entries: dict[Slot, dict[Any, Any]] = {}
        self._given: dict[Slot, _Given] = {}
        self._old: list[_Old] = []
        self._optimizer = weakref.ref(optimizer)
        self._recipes: list[dict[str, Any]] = []
        self._start: rehearsal.Own | None = None
        self._end: rehearsal.Own | None = None
        self._autocast = (False, torch.bfloat16)  # of who steps: a part may run inside a forward's
        self._stream: int | None = None  # of updates
        self.error: BaseException | None = None  # that step() has raised

    # ---- what a chunk has ----

    def state_bytes(self, slot: Slot) -> int:
        """Of a parameter's states in its chunk, before there are any."""
        return self._form(slot).nbytes

    def _form(self, slot: Slot) -> _Form:
        form = self._forms.get(slot)
        if form is None:
            optimizer = self._optimizer()
            number = self._group_of.get(id(slot.parameter), 0)
            dtype = torch.float32 if slot.has_low else slot.dtype
            key = number, slot.shape, slot.strides, dtype
            form = self._by_shape.get(key)
            if form is None:
                found, _ = rehearsal.states_like(
                    optimizer, number, slot.shape, slot.strides, dtype, slot.device
                )
                form = self._by_shape[key] = _Form.of(found)
            self._forms[slot] = form
        return form

    def _stand_in(self, slot: Slot) -> _StandIn:
        made = self._stand_ins.get(slot)
        if made is None:
            runtime = slot.engine
            made = _StandIn(slot, runtime.core, runtime.grad_dtype(slot))
            self._stand_ins[slot] = made
        return made

    # ---- steps ----

    def core_arguments(self) -> dict[str, Any]:
        """Of the core (csrc/engine/opaque.c), which does not keep this."""
        return {
            "opaque": weak_method(self.run),
            "opaque_defers": not self._rehearsed.writes_itself,
        }

    def _issue(self) -> None:
        """Parts of the last step that are still to run do so now."""
        runtime = self._runtime()
        if runtime is not None and not runtime.closed:
            runtime.core.issue()

    def update(self, slot: Slot, divisor: float, factor: float) -> tuple[Any, ...]:
        """One parameter's part of a step, as the core takes it; equal as long as its group is."""
        recipe = self._recipe(self._group_of[id(slot.parameter)])
        return (slot.id, *_SAME, recipe, True, True, divisor, factor)

    def _recipe(self, number: int) -> int:
        """A number for the values of a group, from 1 on."""
        optimizer = self._optimizer()
        assert optimizer is not None
        now = {k: v for k, v in optimizer.param_groups[number].items() if k != "params"}
        for index, values in enumerate(self._recipes):
            if values.keys() == now.keys() and all(_is_same(values[k], now[k]) for k in now):
                return index + 1
        self._recipes.append({k: _copied(v) for k, v in now.items()})
        return len(self._recipes)

    def of(self, optimizer: torch.optim.Optimizer) -> OpaqueOptimizer:
        """As OpaqueSeveral.of."""
        return self

    def select(self, ids: list[int]) -> list[int]:
        """Those of its own parameters."""
        runtime = self._runtime()
        assert runtime is not None
        return [i for i in ids if id(runtime.slots_by_id[i].parameter) in self._group_of]

    def begin(self) -> None:
        """A step comes, or the backward that ends one: its groups are what they are now."""
        self.take_back()
        optimizer, runtime = self._optimizer(), self._runtime()
        assert optimizer is not None and runtime is not None
        self._group_of = {
            id(p): number for number, g in enumerate(optimizer.param_groups) for p in g["params"]
        }
        own = rehearsal.Own.of(optimizer)
        options = [{k: _copied(v) for k, v in group.items()} for group in own.options]
        self._start, self._end = rehearsal.Own(own.attributes, options), None
        kind = runtime.device.type
        self._autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self._recipes = self._recipes[-64:]

    def run(self, ids: list[int], scale: float, late_scale: int, stream: int) -> bool:
        """Steps these parameters; gives whether their gradients were written."""
        runtime = self._runtime()
        assert runtime is not None
        self._stream = stream
        try:
            returns = self._rehearsed.writes_itself
            enabled, dtype = self._autocast
            with (
                torch.inference_mode(False),
                torch.no_grad(),
                _torch.DisableFuncTorch(),
                torch.autocast(runtime.device.type, dtype, enabled),
                _on_stream(runtime.device, stream, returns),
            ):
                factor: Any = scale
                if late_scale:
                    factor = _at(late_scale, (), (), torch.float32, runtime.device)
                return self._run([runtime.slots_by_id[i] for i in ids], factor)
        except BaseException as error:
            self.error = error
            raise

    def _run(self, slots: list[Slot], factor: Any) -> bool:
        groups: dict[int, list[Slot]] = {}
        for slot in slots:
            groups.setdefault(self._group_of[id(slot.parameter)], []).append(slot)
        opened = {slot: self._stand_in(slot) for slot in slots}
        grads = {
            slot: (grad, grad._version) for slot in slots for grad in [opened[slot].open(factor)]
        }
        try:
            self._step(groups)
        finally:
            for stand_in in opened.values():
                stand_in.close()
        return any(
            grad._version != version and grad.data_ptr() == opened[slot].grad.data_ptr()
            for slot, (grad, version) in grads.items()
        )

    def _step(self, groups: Mapping[int, list[Slot]]) -> None:
        """A part: the optimizer's groups, with these parameters alone."""
        optimizer: Any = self._optimizer()
        assert self._start is not None
        state: defaultdict[Any, Any] = defaultdict(dict)
        own = self._start
        inner = rehearsal.stand_in(optimizer, [], state, self._kind)
        if self._rehearsed.writes_itself:
            own = own.copied(optimizer, inner)
        params = [
            [self._stand_in(slot).parameter for slot in groups.get(number, ())]
            for number in range(len(own.options))
        ]
        for slot in itertools.chain.from_iterable(groups.values()):
            if slot in self._entries:
                state[self._stand_in(slot).parameter] = self._entries[slot]
        inner.param_groups = [
            {"params": p, **options} for p, options in zip(params, own.options, strict=True)
        ]
        vars(inner).update(own.attributes)
        rehearsal.run(inner)
        self._commit(optimizer, rehearsal.Own.of(inner))
        for slot in itertools.chain.from_iterable(groups.values()):
            entry = inner.state.get(self._stand_in(slot).parameter)
            if entry:
                self._entries[slot] = self._adopted(slot, entry)

    def _commit(self, optimizer: Any, ended: rehearsal.Own) -> None:
        """Invariant 2."""
        if self._end is None:
            self._end = ended
            ended.put(optimizer)
            return
        found = self._end.difference(ended)
        if found is not None:
            raise GeminiError(
                f"{self._kind.__name__}.step() has left another {found[0]} after some parameters than after others: it "
                "does not treat each parameter by itself"
            )

    def _adopted(self, slot: Slot, entry: dict[Any, Any]) -> dict[Any, Any]:
        """The entry that a step has left, with its tensors in the chunk."""
        stand_in = self._stand_in(slot)
        form = self._form(slot)
        kept = {path: t for path, t in leaves(entry) if self._is_kept(t, slot)}
        self._check(slot, kept)
        moved: dict[Path, torch.Tensor] = {}
        for leaf, offset in form.places:
            address = stand_in.states + offset
            if kept[leaf.path].data_ptr() != address:
                view = _at(address, leaf.shape, leaf.stride, leaf.dtype, slot.device)
                moved[leaf.path] = view.copy_(kept[leaf.path])
        return with_leaves(entry, moved) if moved else entry

    def _is_kept(self, tensor: torch.Tensor, slot: Slot) -> bool:
        return is_kept_in_chunk(tensor, self._stand_in(slot).weight)

    def _check(self, slot: Slot, kept: Mapping[Path, torch.Tensor]) -> None:
        """The states have the forms that the chunk has places for."""
        wanted = {leaf.path: leaf for leaf, _ in self._form(slot).places}
        for path in sorted(wanted.keys() ^ kept.keys(), key=str):
            what = "is missing" if path in wanted else "is new"
            raise GeminiError(
                f"{slot.name}: its state {opaque.text(path)} of {self._kind.__name__} {what}: states are found at "
                "manage(), and stay what they are; close() the engine and manage() again where they change"
            )
        for path, tensor in kept.items():
            leaf = wanted[path]
            if (tensor.dtype, tuple(tensor.shape)) != (leaf.dtype, leaf.shape):
                raise GeminiError(
                    f"{slot.name}: its state {opaque.text(path)} of {self._kind.__name__} has become {tensor.dtype} of "
                    f"shape {tuple(tensor.shape)}, and was {leaf.dtype} of shape {leaf.shape}: states are found at "
                    "manage(), and stay what they are; close() the engine and manage() again where they change"
                )

    def take_error(self) -> BaseException | None:
        """What step() has raised, once."""
        error, self.error = self.error, None
        return error

    # ---- states, from outside ----

    def has(self, slot: Slot) -> bool:
        """Whether the parameter has an entry."""
        self._issue()
        return slot in self._given or slot in self._entries

    def slots(self) -> list[Slot]:
        """Those that have entries."""
        self._issue()
        return list({**dict.fromkeys(self._entries), **dict.fromkeys(self._given)})

    def read(self, slot: Slot) -> dict[Any, Any]:
        """A copy of the parameter's entry, on the host; empty: there is none."""
        self.take_back()
        entry = self._entries.get(slot)
        if entry is None:
            return {}
        form = self._form(slot)
        memory = torch.empty(form.nbytes, dtype=torch.uint8, device="cpu")
        slot.engine.core.states_read(slot.id, memory.data_ptr())
        if slot.device.type == "cuda" and self._stream is not None:  # counters on the device
            updates = torch.cuda.ExternalStream(self._stream, slot.device)
            torch.cuda.current_stream(slot.device).wait_stream(updates)
        views = {leaf.path: _view(memory, leaf, at).clone() for leaf, at in form.places}
        rest = {path: t.clone() for path, t in leaves(entry) if path not in views}
        return with_leaves(_forked(entry), {**rest, **views})

    def write(self, slot: Slot, entry: Mapping[Any, Any], what: str = "optimizer state") -> None:
        """Sets the parameter's entry; empty: it begins anew.

        Raises:
            GeminiError: its tensors are not those that this optimizer makes of such a parameter.
        """
        self._given.pop(slot, None)
        if not entry:
            self._entries.pop(slot, None)
            return
        self.check(slot, entry)
        form = self._form(slot)
        stand_in = self._stand_in(slot)
        places = {leaf.path: (leaf, at) for leaf, at in form.places}
        found = dict(leaves(entry))
        kept = {path: found[path] for path in places if path in found}
        device = slot.device
        memory = torch.zeros(form.nbytes, dtype=torch.uint8, device="cpu")
        for path, tensor in kept.items():
            _view(memory, *places[path]).copy_(tensor)
        if form.nbytes:
            core, stream = slot.engine.core, slot.engine.stream()
            core.states_write(slot.id, memory.data_ptr(), stream)
        views = {
            p: _at(stand_in.states + at, leaf.shape, leaf.stride, leaf.dtype, device)
            for p, (leaf, at) in places.items()
        }
        rest = {p: t.clone() for p, t in found.items() if p not in places}
        self._entries[slot] = with_leaves(_forked(entry), {**rest, **views})

    def check(self, slot: Slot, entry: Mapping[Any, Any]) -> None:
        """Refuses what cannot be an entry of this parameter.

        Raises:
            GeminiError: its tensors are not those that this optimizer makes of such a parameter.
        """
        if not isinstance(entry, Mapping):
            raise TypeError(
                f"{slot.name}: optimizer.state[p] is a dict, not {type(entry).__name__}"
            )
        found = dict(leaves(entry))
        places = {leaf.path: leaf for leaf, _ in self._form(slot).places}
        if entry:  # another floating-point dtype is what torch's load_state_dict() makes of it
            kept = {p: t for p, t in found.items() if p in places}
            self._check(
                slot,
                {p: t.to(places[p].dtype) if t.is_floating_point() else t for p, t in kept.items()},
            )

    def sent(self, slot: Slot, entry: Mapping[Any, Any], device: torch.device) -> dict[Any, Any]:
        """An entry of `read` with what went with the parameter on its device."""
        paths = self._paths(slot)
        return with_leaves(entry, {p: t.to(device) for p, t in leaves(entry) if p in paths})

    def release(self) -> None:
        """The engine closes: what a program has is its own from now on."""
        self._given, self._old, self._entries, self._stand_ins = {}, [], {}, {}

    def show(self, slot: Slot) -> dict[Any, Any]:
        """The parameter's entry as a program sees it: what it changes there is taken back before the next use."""
        given = self._given.get(slot)
        if given is None:
            entry = self.read(slot)  # takes the others back
            on_device = {p: t.to(slot.device) for p, t in leaves(entry) if p in self._paths(slot)}
            entry = with_leaves(entry, on_device)
            given = _Given(entry, {p: (t, t._version) for p, t in leaves(entry)})
            self._given[slot] = given
        return given.entry

    def _paths(self, slot: Slot) -> set[Path]:
        return {leaf.path for leaf, _ in self._form(slot).places}

    def take_back(self) -> None:
        """See invariant 3."""
        self._issue()
        for old in self._old:
            tensor = old.tensor()
            if tensor is not None and tensor._version != old.version:
                old.version = tensor._version
                raise GeminiError(
                    f"{old.name}: a tensor that was its state {opaque.text(old.path)} was written after that state had "
                    "been used again, so the write is lost: write to optimizer.state[p], taken anew each time"
                )
        self._old = [old for old in self._old if old.tensor() is not None]
        for slot, given in list(self._given.items()):
            now = dict(leaves(given.entry))
            is_same = now.keys() == given.seen.keys() and all(
                now[p] is t and t._version == version for p, (t, version) in given.seen.items()
            )
            del self._given[slot]
            if is_same and slot in self._entries:
                own = dict(leaves(self._entries[slot]))  # step() writes them: they are not given
                self._entries[slot] = with_leaves(_forked(given.entry), own)
            else:
                self.write(slot, given.entry)
            for path, tensor in now.items():
                self._old.append(_Old(slot.name, path, weakref.ref(tensor), tensor._version))


def _view(memory: torch.Tensor, leaf: Leaf, at: int) -> torch.Tensor:
    """A leaf among the bytes of its parameter's states, on the host."""
    flat = memory[at : at + leaf.nbytes].view(leaf.dtype)
    return flat.as_strided(leaf.shape, leaf.stride)


def _forked(entry: Mapping[Any, Any]) -> dict[Any, Any]:
    """Another dict with the same values."""
    return copy.copy(entry) if type(entry) is dict else dict(entry)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return copy.copy(value) if isinstance(value, dict | list | set) else value


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        is_both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        return is_both and a.dtype is b.dtype and a.shape == b.shape and bool(torch.equal(a, b))
    return a is b or bool(a == b)


@contextlib.contextmanager
def _on_stream(device: torch.device, stream: int, returns: bool) -> Iterator[None]:
    """Inside, work goes to the stream of updates, behind what the caller's stream has: options of groups and counters
    may be tensors on the device. `returns`: and the caller's stream goes on behind it, as step() writes some of them.
    """
    if device.type == "cpu":
        yield
        return
    caller, updates = torch.cuda.current_stream(device), torch.cuda.ExternalStream(stream, device)
    updates.wait_stream(caller)
    with torch.cuda.stream(updates):
        yield
    if returns:
        caller.wait_stream(updates)


class OpaqueStates(Shown, defaultdict[Any, Any]):
    """`optimizer.state`: entries of parameters whose states the engine has, and whatever else there is."""

    def __init__(self, owner: OpaqueOptimizer, slot_of: Callable[[Any], Slot | None]) -> None:
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
        slot = self._slot_of(key)
        if slot is None:
            dict.__setitem__(self, key, value)
        else:
            self._owner.write(slot, value)

    def __delitem__(self, key: Any) -> None:
        slot = self._slot_of(key)
        if slot is None:
            dict.__delitem__(self, key)
        elif not self._owner.has(slot):
            raise KeyError(key)
        else:
            self._owner.write(slot, {})

    def __iter__(self) -> Iterator[Any]:
        yield from (slot.parameter for slot in self._owner.slots())
        yield from dict.__iter__(self)

    def __len__(self) -> int:
        return len(self._owner.slots()) + dict.__len__(self)

    def __contains__(self, key: Any) -> bool:
        slot = self._slot_of(key)
        return dict.__contains__(self, key) if slot is None else self._owner.has(slot)

    def clear(self) -> None:
        for key in list(self):
            del self[key]

    def copy(self) -> defaultdict[Any, Any]:
        """An ordinary defaultdict with copies of these entries."""
        return defaultdict(dict, {key: self[key] for key in self})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.copy(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return defaultdict, (dict, dict(self.copy()))

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
        for key in [key for key in self if key not in given]:
            del self[key]
        for key, value in given.items():
            self[key] = value
