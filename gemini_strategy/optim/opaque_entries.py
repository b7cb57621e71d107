"""What one optimizer has made of each parameter: `optimizer.state[parameter]`, an entry, with its tensors in the chunk.

Invariants
    1. A parameter has one stand-in for life. Outside `run` the bytes of stand-ins and of states in `_entries` may be
       another chunk's: nothing else reads them.
    2. What a program has of states are copies (opaque_states.py), which are taken back before states are used.
    3. Of several ranks each has the states of its part of a parameter (opaque_parts.py). Reading is a collective: all
       ranks get the entry of the whole. Writing is not: every rank takes its part of the same entry. All know who has
       an entry.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from gemini_strategy import _torch
from gemini_strategy.errors import GeminiError
from gemini_strategy.optim import opaque
from gemini_strategy.optim.ahead import VALUES, Ahead
from gemini_strategy.optim.chunk_tensors import StandIn, room, tensor_at, twin
from gemini_strategy.optim.opaque import Form, Leaf, Path, is_kept_in_chunk, leaves, with_leaves
from gemini_strategy.optim.opaque_parts import Division, Divisions, forked
from gemini_strategy.optim.opaque_states import Copies, Snapshots

if TYPE_CHECKING:
    from gemini_strategy.parameters.slot import Slot
    from gemini_strategy.runtime import Runtime


class OpaqueEntries:
    """Those of all parameters of one optimizer."""

    _divisions: Divisions

    def __init__(self, runtime: Runtime, optimizer: torch.optim.Optimizer) -> None:
        self._runtime = weakref.ref(runtime)
        self._optimizer = weakref.ref(optimizer)
        self.kind = type(optimizer)
        self._stand_ins: dict[Slot, StandIn] = {}
        self._entries: dict[Slot, dict[Any, Any]] = {}  # of this rank's parts
        self._known: set[Slot] = set()  # several ranks: who has one, on whichever rank
        self._has_shards = runtime.ranks.shard.size > 1
        self._copies: Copies | Snapshots = Snapshots(self) if self._has_shards else Copies(self)
        self._ahead = Ahead(self._renumber)
        # Where entries that are no more than tensors and values have their large tensors.
        self._adopted_as: dict[Slot, dict[Any, tuple[Any, ...]]] = {}

    def _renumber(self) -> None:
        """No step has the numbers of one before."""
        raise NotImplementedError

    def dtype(self, slot: Slot) -> torch.dtype:
        """Of the parameter that step() gets."""
        return torch.float32 if slot.has_low else slot.dtype

    def form(self, slot: Slot) -> Form:
        """See Form; of the whole, wherever its parts are."""
        return self.division(slot).whole

    def division(self, slot: Slot) -> Division:
        """Of the parameter's states among ranks."""
        return self._divisions.of(slot)

    def state_bytes(self, slot: Slot) -> int:
        """Of a parameter's states in chunks, on all ranks together."""
        return self.form(slot).nbytes

    def _stand_in(self, slot: Slot) -> StandIn:
        made = self._stand_ins.get(slot)
        if made is None:
            runtime, part = slot.engine, self._divisions.part(slot)  # which it has
            made = StandIn(slot, part, runtime.core, runtime.grad_dtype(slot))
            self._stand_ins[slot] = made
        return made

    def _paths(self, slot: Slot) -> dict[Path, Leaf]:
        return {leaf.path: leaf for leaf, _ in self.form(slot).places}

    def _paths_here(self, slot: Slot) -> set[Path]:
        """Of leaves that a part of a step need not have for itself: in the chunk, or tables of many parameters."""
        form = self._divisions.form(slot)
        tables = {path for path, shape in form.shapes().items() if math.prod(shape) > 1}
        return {leaf.path for leaf, _ in form.places} | (form.shared & tables)

    def _issue(self) -> None:
        """Parts of the last step that are still to run do so now."""
        runtime = self._runtime()
        if runtime is not None and not runtime.closed:
            runtime.core.issue(runtime.stream())

    def _look(self) -> None:
        """States are asked for, or set.

        Raises:
            GeminiError: some parameters' may be of this step, and others' of the last one.
        """
        runtime = self._runtime()
        if runtime is not None and runtime.coming_step.is_under_way:
            raise GeminiError(
                "optimizer.state is asked for between backward(step=True) and optimizer.step(), which may have changed "
                "some of it already: call optimizer.step() first"
            )
        self._issue()

    # ---- as a step leaves them ----

    def _adopted(self, slot: Slot, entry: dict[Any, Any]) -> dict[Any, Any]:
        """The entry that a step has left, with its tensors in the chunk."""
        if self._is_as_adopted(slot, entry):
            return entry
        stand_in = self._stand_in(slot)
        form = self._divisions.form(slot)
        kept = self._kept(slot, entry)
        self._check(slot, {leaf.path: leaf for leaf, _ in form.places}, kept)
        moved = {}
        for leaf, offset in form.places:
            tensor = kept.get(leaf.path)
            address = stand_in.states + offset
            place = address, leaf.stride
            if tensor is not None and (tensor.data_ptr(), tensor.stride()) != place:
                inside = 0 <= tensor.data_ptr() - stand_in.states < form.nbytes
                moved[leaf] = address, tensor.clone() if inside else tensor  # of another state
        views = {
            leaf.path: tensor_at(address, leaf.shape, leaf.stride, leaf.dtype, slot.device).copy_(
                tensor
            )
            for leaf, (address, tensor) in moved.items()
        }
        for path, tensor in leaves(entry):
            apart = tensor if path in kept else stand_in.apart(tensor)
            if apart is not tensor:
                views[path] = apart
        entry = with_leaves(entry, views) if views else entry
        self._adopted_as[slot] = {
            key: _torch.place(value)
            for key, value in entry.items()
            if type(value) is torch.Tensor and value.numel() > 1
        }
        return entry

    def _is_as_adopted(self, slot: Slot, entry: dict[Any, Any]) -> bool:
        """Whether it has large tensors where it had them, and besides only what is not in the chunk: so it is in every
        step but the first, and this sees it without a walk.
        """
        places, stand_in = self._adopted_as.get(slot), self._stand_in(slot)
        if places is None or not places.keys() <= entry.keys():
            return False
        n_bytes = self._divisions.form(slot).nbytes
        for key, value in entry.items():
            if type(value) is not torch.Tensor:
                if isinstance(value, torch.Tensor) or not isinstance(value, VALUES):
                    return False
            elif value.numel() > 1:
                if places.get(key) != _torch.place(value):
                    return False
            elif stand_in.has(value) or 0 <= _torch.place(value)[0] - stand_in.states < n_bytes:
                return False
        return True

    def _kept(self, slot: Slot, entry: Mapping[Any, Any]) -> dict[Path, torch.Tensor]:
        """What of an entry belongs into the chunk."""
        shared, weight = self._divisions.form(slot).shared, self._stand_in(slot).weight
        found = leaves(entry)
        return {p: t for p, t in found if p not in shared and is_kept_in_chunk(t, weight)}

    def _check(
        self, slot: Slot, wanted: Mapping[Path, Leaf], kept: Mapping[Path, torch.Tensor]
    ) -> None:
        """The states have the forms that there are places for."""
        again = "states are found at manage(), and stay what they are; close() the engine and manage() again"
        for path, tensor in kept.items():
            what = f"{slot.name}: its state {opaque.text(path)} of {self.kind.__name__}"
            now = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            leaf = wanted.get(path)
            if leaf is None:
                raise GeminiError(f"{what}, {now}, is new: {again} when it is there")
            if (tensor.dtype, tuple(tensor.shape)) != (leaf.dtype, leaf.shape):
                raise GeminiError(
                    f"{what} has become {now}, and was {leaf.dtype} of shape {leaf.shape}: {again}"
                )

    # ---- as a program has them ----

    def has(self, slot: Slot) -> bool:
        """Whether the parameter has an entry."""
        return slot in (self._known if self._has_shards else self._entries)

    def slots(self) -> list[Slot]:
        """Those that have entries, in the order of the groups."""
        self._look()
        optimizer = self._optimizer()
        groups = () if optimizer is None else optimizer.param_groups
        order = {id(p): i for i, p in enumerate(p for group in groups for p in group["params"])}
        known = self._known if self._has_shards else self._entries
        return sorted(known, key=lambda slot: order.get(id(slot.parameter), len(order)))

    def settle(self) -> None:
        """Entries are what the last step and the program have made of them, and may be looked at."""
        self._issue()
        self._copies.take_all()

    def entry(self, slot: Slot) -> dict[Any, Any] | None:
        """The optimizer's own, of this rank's part; None: there is none."""
        return self._entries.get(slot)

    def kept(self, slot: Slot) -> dict[Path, torch.Tensor]:
        """What of the parameter's entry is in its chunk, copied to the host."""
        own = {path for path, _ in leaves(self._entries.get(slot, {}))}
        found: dict[Path, torch.Tensor] = {}
        for leaf, at in self._divisions.places(slot):
            if leaf.path in own:
                values = room(leaf)
                slot.engine.core.states_read(slot.id, at, leaf.nbytes, values.data_ptr())
                found[leaf.path] = values
        return found

    def read(
        self, slot: Slot, twins: dict[int, torch.Tensor] | None = None, root: int | None = None
    ) -> dict[Any, Any]:
        """A copy of the parameter's entry, on the host; empty: there is none.

        Args:
            twins: one for all reads that are to have one copy of what several parameters share.
            root: the rank that gets it, other ranks have zeros in it; None: all get it.
        """
        self._look()
        self._copies.take(slot)
        entry = self._entries.get(slot, {})
        kept, twins = self.kept(slot), {} if twins is None else twins
        cpu = torch.device("cpu")
        rest = {path: twin(t, cpu, twins) for path, t in leaves(entry) if path not in kept}
        own = with_leaves(forked(entry), {**rest, **kept})
        division = self.division(slot)
        if division.is_whole or not self.has(slot):
            return own
        slot.engine.core.catch_up()
        return division.joined(slot.engine.ranks, own, slot.device, root)

    def snapshot(
        self, slot: Slot, twins: dict[int, torch.Tensor], root: int | None = None
    ) -> dict[Any, Any]:
        """The same; what the program writes to it before the next use becomes the states'."""
        entry = self.read(slot, twins, root)
        self._copies.watch(slot, entry)
        return entry

    def show(self, slot: Slot) -> dict[Any, Any]:
        """The parameter's entry as a program sees it, and may write it."""
        self._look()
        self._ahead.forget()  # counters are the very tensors
        if not self._has_shards:
            self._entries.setdefault(slot, {})
        return self._copies.show(slot)

    def put(self, slot: Slot, entry: Mapping[Any, Any]) -> None:
        """Sets what is no tensor of the chunk."""
        views = {path: t for path, t in self.views(slot).items() if path in dict(leaves(entry))}
        self._entries[slot] = with_leaves(forked(entry), views)
        self._note(slot)

    def adopt(self, slot: Slot, entry: dict[Any, Any] | None) -> None:
        """This is the parameter's entry, which has `views`, whose bytes the chunk has; None: other ranks have it."""
        self._copies.forget(slot)
        self._known.add(slot)
        if entry is not None:
            self._entries[slot] = entry
        self._note(slot)

    def _note(self, slot: Slot) -> None:
        self._ahead.forget()
        slot.has_state = self.has(slot) if self._has_shards else bool(self._entries.get(slot))
        slot.note_state_change()

    def views(self, slot: Slot) -> dict[Path, torch.Tensor]:
        """The tensors in the chunk."""
        at, device = self._stand_in(slot).states, slot.device
        return {
            leaf.path: tensor_at(at + offset, leaf.shape, leaf.stride, leaf.dtype, device)
            for leaf, offset in self._divisions.places(slot)
        }

    def store(self, slot: Slot, entry: Mapping[Any, Any]) -> None:
        """Sets the parameter's entry.

        Raises:
            GeminiError: its tensors are not those that this optimizer makes of such a parameter.
        """
        self._known.add(slot)
        for path, tensor in leaves(entry):
            slot.engine.written.note(slot, f"state {opaque.text(path)}", tensor)
        if self._divisions.part(slot) is None:
            self._note(slot)
            return
        rank, form = slot.engine.ranks.shard.rank, self._divisions.form(slot)
        entry = self.division(slot).own_entry(rank, entry, slot.device)
        self._check(slot, {leaf.path: leaf for leaf, _ in form.places}, self._kept(slot, entry))
        found = dict(leaves(entry))
        core, stream = slot.engine.core, slot.engine.stream()
        for leaf, at in form.places:
            if leaf.path in found:
                values = room(leaf).copy_(found[leaf.path])
                core.states_write(slot.id, at, leaf.nbytes, values.data_ptr(), stream)
        self.put(slot, entry)

    def write(
        self,
        slot: Slot,
        entry: Mapping[Any, Any],
        is_copied: bool = True,
        twins: dict[int, torch.Tensor] | None = None,
    ) -> None:
        """Sets the parameter's entry for a program; `is_copied`: and is done with its tensors. `twins`: as in `read`.

        Raises:
            GeminiError: its tensors are not those that this optimizer makes of such a parameter.
        """
        self._look()
        if is_copied:
            self.check(slot, entry)
            entry = self._converted(slot, entry, {} if twins is None else twins)
        self.check(slot, entry)
        self._copies.forget(slot)
        self.store(slot, entry)
        if not is_copied:
            self._copies.note(slot, entry, self._paths(slot))

    def _converted(
        self, slot: Slot, entry: Mapping[Any, Any], twins: dict[int, torch.Tensor]
    ) -> dict[Any, Any]:
        """In the dtypes that this optimizer makes; what the chunk does not have is copied."""
        form, places, made = self.form(slot), self._paths(slot), {}
        dtypes = form.dtypes()
        for path, tensor in leaves(entry):
            dtype = dtypes.get(path, tensor.dtype) if tensor.is_floating_point() else tensor.dtype
            if path in places:
                made[path] = tensor.detach().to(dtype)
            else:
                made[path] = twin(tensor, form.devices.get(path, tensor.device), twins).to(dtype)
        return with_leaves(forked(entry), made)

    def move_in(self, slot: Slot, entry: Mapping[Any, Any]) -> None:
        """The engine begins with this entry; the program may keep its tensors, unless they are in another dtype."""
        dtypes = self.form(slot).dtypes()
        is_same = all(t.dtype is dtypes.get(path, t.dtype) for path, t in leaves(entry))
        self.write(slot, entry, is_copied=not is_same)

    def drop(self, slot: Slot) -> None:
        """The parameter has no entry any more."""
        self._look()
        self._copies.forget(slot)
        self._entries.pop(slot, None)
        self._known.discard(slot)
        self._note(slot)

    def check_unwritten(self) -> None:
        """A step comes whose backward has begun it.

        Raises:
            GeminiError: a program has written states since.
        """
        self._copies.check()

    def check(self, slot: Slot, entry: Mapping[Any, Any], is_whole: bool = False) -> None:
        """Refuses what cannot be an entry of this parameter; `is_whole`: or what a step has not left.

        Raises:
            GeminiError: its tensors are not those that this optimizer makes of such a parameter.
        """
        if not isinstance(entry, Mapping):
            raise TypeError(
                f"{slot.name}: optimizer.state[p] is a dict, not {type(entry).__name__}"
            )
        places, shared, kept = self._paths(slot), self.form(slot).shared, {}
        for path, tensor in leaves(entry):
            if path in places:  # torch's load_state_dict() gives it another floating-point dtype
                is_float = tensor.is_floating_point()
                kept[path] = tensor.to(places[path].dtype) if is_float else tensor
            elif path not in shared and tensor.numel() > 1:
                kept[path] = tensor
        self._check(slot, places, kept)
        missing = sorted(opaque.text(path) for path in places.keys() - kept.keys())
        if is_whole and entry and missing:
            raise GeminiError(
                f"{slot.name}: its state has {', '.join(map(str, entry))} and lacks {' and '.join(missing)}, which "
                f"{self.kind.__name__} makes with the options of now: it is of another optimizer, or of other options"
            )

    def sent(
        self,
        slot: Slot,
        entry: Mapping[Any, Any],
        device: torch.device,
        twins: dict[int, torch.Tensor],
    ) -> dict[Any, Any]:
        """An entry of `read` where it is with the parameter on that device."""
        on_device = {p for p, t in self.form(slot).devices.items() if t == slot.device}
        goes = self._paths(slot).keys() | (on_device if slot.device.type != "cpu" else set())
        found = leaves(entry)
        moved = {p: twin(t, device, twins) for p, t in found if p in goes and t.device != device}
        return with_leaves(entry, moved)

    def release(self) -> None:
        """The engine closes: what a program has is its own from now on."""
        self._copies.release()
        self._entries, self._stand_ins, self._known, self._adopted_as = {}, {}, set(), {}
