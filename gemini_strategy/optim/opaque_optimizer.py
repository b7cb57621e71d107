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
    3. What a program has of states are copies (opaque_states.py), which are taken back before states are used.
    4. Of several ranks each steps its part of a parameter (opaque_parts.py). Reading is a collective: all ranks get the
       entry of the whole. Writing is not: every rank takes its part of the same entry. All know who has an entry.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from gemini_strategy import _torch
from gemini_strategy.errors import GeminiError
from gemini_strategy.optim import opaque, overrides, parts, rehearsal
from gemini_strategy.optim.chunk_tensors import (
    StandIn,
    copied,
    is_equal,
    on_stream,
    room,
    tensor_at,
    twin,
)
from gemini_strategy.optim.opaque import Form, Leaf, Path, is_kept_in_chunk, leaves, with_leaves
from gemini_strategy.optim.opaque_parts import Division, Divisions, Part, forked, values_of
from gemini_strategy.optim.opaque_states import Copies, Snapshots
from gemini_strategy.optim.stage import sorts_of
from gemini_strategy.precision import weight_dtypes
from gemini_strategy.weakly import weak_method

if TYPE_CHECKING:
    from gemini_strategy.parameters.slot import Slot
    from gemini_strategy.runtime import Runtime

# Hyperparameters of Adam that the core takes and nothing reads.
_SAME = (0.0, 0.9, 0.999, 1e-8, 0.0)
_NAMES = ("params", "param_names")


def _group_of(optimizer: Any) -> dict[int, int]:
    groups = optimizer.param_groups
    return {id(p): number for number, group in enumerate(groups) for p in group["params"]}


class OpaqueOptimizer:
    """The states and the steps of one such optimizer.

    Args:
        optimizer: not managed yet.

    Raises:
        GeminiError: its step() couples parameters, wants a closure or draws random numbers (rehearsal.py).
    """

    def __init__(self, runtime: Runtime, optimizer: torch.optim.Optimizer) -> None:
        self._runtime = weakref.ref(runtime)
        self.kind = type(optimizer)
        self._device = runtime.device
        # Those that it will step: weights in 32 bits where there are masters, else in the compute dtype.
        is_mixed = runtime.precision_plan.is_mixed
        dtypes = weight_dtypes(runtime.model, None if is_mixed else runtime.precision_plan.name)
        self._dtypes = {
            p: torch.float32 if is_mixed and p.is_floating_point() else dtype
            for p, dtype in dtypes.items()
        }
        self._rehearsed = rehearsal.rehearse(optimizer, self._dtypes, self._device)
        self._group_of, self._sorts = _group_of(optimizer), sorts_of(optimizer)
        self._settings = overrides.settings_of(optimizer)
        self._divisions = Divisions(self._form_of, self._rehearsed.cut == "row")
        self._by_shape: dict[Any, Form] = {}
        self._stand_ins: dict[Slot, StandIn] = {}
        self._entries: dict[Slot, dict[Any, Any]] = {}  # of this rank's parts
        self._known: set[Slot] = set()  # several ranks: who has one, on whichever rank
        self._has_shards = runtime.ranks.shard.size > 1
        self._copies: Copies | Snapshots = Snapshots(self) if self._has_shards else Copies(self)
        self._dropped: list[Slot] = []
        self._optimizer = weakref.ref(optimizer)
        self._recipes: dict[int, tuple[int, dict[str, Any]]] = {}  # of each group, the last
        self._numbers = itertools.count(1)
        self._start: parts.Own | None = None
        self._end: parts.Own | None = None
        self._autocast = (False, torch.bfloat16)  # of who steps: a part may run inside a forward's
        self._stream: int | None = None  # of updates
        self.written: set[str] = set()  # attributes of the optimizer that its step() changes
        self.error: BaseException | None = None  # that step() has raised

    # ---- what a chunk has ----

    def cut(self, slot: Slot) -> int:
        """Elements of a parameter between the places where it may be cut, as the rehearsal has found them."""
        kind, numel = self._rehearsed.cut, max(math.prod(slot.shape), 1)
        if kind == "whole" or not slot.is_row_major:
            return numel  # a part's elements would lie otherwise than the whole's
        if kind == "row":
            return numel // slot.shape[0] if len(slot.shape) > 1 and numel > 1 else numel
        return self._rehearsed.block

    def divide(self, slot: Slot, parts: Sequence[tuple[int, int]]) -> list[int]:
        """Bytes of a parameter's states in its chunk on each rank, before there are any. See Divisions."""
        forms = self._divisions.divide(slot, parts).forms
        return [0 if form is None else form.nbytes for form in forms]

    def state_bytes(self, slot: Slot) -> int:
        """Of a parameter's states in chunks, on all ranks together."""
        return self.form(slot).nbytes

    def dtype(self, slot: Slot) -> torch.dtype:
        """Of the parameter that step() gets."""
        return torch.float32 if slot.has_low else slot.dtype

    def form(self, slot: Slot) -> Form:
        """See Form; of the whole, wherever its parts are."""
        return self.division(slot).whole

    def division(self, slot: Slot) -> Division:
        """Of the parameter's states among ranks."""
        return self._divisions.of(slot)

    def _form_of(self, slot: Slot, part: Part) -> Form:
        number, dtype = self._group_of.get(id(slot.parameter), 0), self.dtype(slot)
        settings = self._settings.get(id(slot.parameter), {})
        key = number, part.shape, part.strides, dtype, repr(sorted(settings.items()))
        if key not in self._by_shape:
            plain, where = self._plain(self._optimizer()), (part.shape, part.strides)
            found = rehearsal.states_like(plain, number, *where, dtype, slot.device, settings)
            self._by_shape[key] = Form.of(*found)
        return self._by_shape[key]

    def _plain(self, optimizer: Any) -> Any:
        """As it was before manage()."""
        if type(optimizer) is self.kind:
            return optimizer
        states = {0: {}} if self._entries else {}  # which they are is not asked
        return parts.stand_in(optimizer, optimizer.param_groups, states, self.kind)

    def _stand_in(self, slot: Slot) -> StandIn:
        made = self._stand_ins.get(slot)
        if made is None:
            runtime, part = slot.engine, self._divisions.part(slot)  # which it has
            made = StandIn(slot, part, runtime.core, runtime.grad_dtype(slot))
            self._stand_ins[slot] = made
        return made

    # ---- steps ----

    def core_arguments(self) -> dict[str, Any]:
        """Of the core (csrc/engine/opaque.c), which does not keep this."""
        return {
            "opaque": weak_method(self.run),
            "opaque_defers": not (
                self._rehearsed.writes_itself or self._rehearsed.writes_gradients
            ),
        }

    def _issue(self) -> None:
        """Parts of the last step that are still to run do so now."""
        runtime = self._runtime()
        if runtime is not None and not runtime.closed:
            runtime.core.issue()

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

    def update(self, slot: Slot, divisor: float, factor: float) -> tuple[Any, ...]:
        """One parameter's part of a step, as the core takes it; equal as long as its group is."""
        recipe = self._recipe(self._group_of[id(slot.parameter)])
        return (slot.id, *_SAME, recipe, True, True, divisor, factor)

    def _recipe(self, number: int) -> int:
        """A number for the values of a group: another as soon as one of them is another."""
        optimizer: Any = self._optimizer()
        now = {k: v for k, v in optimizer.param_groups[number].items() if k not in _NAMES}
        if self._end is not None and is_equal(now, self._end.options[number]):
            now = self._start.options[number]  # the step that runs has written the others
        recipe, values = self._recipes.get(number, (0, None))
        if values is None or not is_equal(values, now):
            recipe = next(self._numbers)
            self._recipes[number] = recipe, {k: copied(v) for k, v in now.items()}
        return recipe

    @property
    def members(self) -> list[OpaqueOptimizer]:
        """As OpaqueSeveral's."""
        return [self]

    def of(self, optimizer: torch.optim.Optimizer) -> OpaqueOptimizer:
        """As OpaqueSeveral.of."""
        return self

    def owner(self, slot: Slot) -> OpaqueOptimizer:
        """As OpaqueSeveral.owner."""
        return self

    def select(self, ids: list[int]) -> list[int]:
        """Those of its own parameters."""
        runtime: Any = self._runtime()
        return [i for i in ids if id(runtime.slots_by_id[i].parameter) in self._group_of]

    def begin(self) -> None:
        """A step comes, or the backward that ends one: its groups are what they are now.

        Raises:
            GeminiError: with these groups the states are others, or parameters are coupled. Nothing has changed then.
        """
        self._issue()
        self._copies.take_all()
        optimizer: Any = self._optimizer()
        runtime: Any = self._runtime()
        self._settings = overrides.settings_of(optimizer)
        self._regroup(optimizer)
        own = parts.Own.of(optimizer)
        options = [{k: copied(v) for k, v in group.items()} for group in own.options]
        self._start, self._end = parts.Own(own.attributes, options), None
        kind = runtime.device.type
        self._autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def _regroup(self, optimizer: Any) -> None:
        """Groups may have been edited: what was rehearsed has to hold for them, too."""
        sorts, group_of = sorts_of(optimizer), _group_of(optimizer)
        if sorts == self._sorts and group_of == self._group_of:
            return
        rehearsed = rehearsal.rehearse(self._plain(optimizer), self._dtypes, self._device)
        was = self._rehearsed
        if self._has_shards and not rehearsed.has_cuts_of(was):
            raise GeminiError(
                f"with param groups as they are, {self.kind.__name__} may be cut at each {rehearsed.cut}, and ranks "
                f"have parts that are cut at each {was.cut}: put the groups back, or close() and manage() again"
            )
        before = self._group_of, self._by_shape, self._divisions
        self._group_of, self._by_shape = group_of, {}
        self._divisions = Divisions(self._form_of, was.cut == "row")
        try:
            for slot, division in before[2].made.items():
                form = division.whole
                now = self._divisions.divide(slot, division.spans()).whole
                more = {leaf for leaf, _ in now.places} - {leaf for leaf, _ in form.places}
                if slot.has_moments and more:
                    raise GeminiError(
                        f"{slot.name}: with param group {group_of.get(id(slot.parameter), 0)} as it is now its states "
                        f"are {now}, and the engine has place for {form}: states are found at manage(); put the group "
                        "back as it was, or close() the engine and manage() again"
                    )
            self._divisions = before[2]  # what is not used any more stays, as in torch
        except BaseException:
            self._group_of, self._by_shape, self._divisions = before
            raise
        self._sorts = sorts
        self._rehearsed = replace(rehearsed, cut=was.cut, block=was.block)  # as ranks have parts

    def values(self) -> dict[str, str]:
        """What the optimizer has besides parameters and states, by names, for ranks to compare."""
        return values_of(parts.Own.of(self._optimizer()), self._rehearsed.writes_itself)  # type: ignore[arg-type]

    def run(self, ids: list[int], scale: float, late_scale: int, stream: int) -> bool:
        """Steps these parameters; gives whether their gradients were written."""
        runtime: Any = self._runtime()
        self._stream = stream
        try:
            returns = self._rehearsed.writes_itself
            enabled, dtype = self._autocast
            with (
                torch.inference_mode(False),
                torch.no_grad(),
                _torch.DisableFuncTorch(),
                torch.autocast(runtime.device.type, dtype, enabled),
                on_stream(runtime.device, stream, returns),
            ):
                factor: Any = scale
                if late_scale:
                    factor = tensor_at(late_scale, (), (), torch.float32, runtime.device)
                return self._run([runtime.slots_by_id[i] for i in ids], factor)
        except BaseException as error:
            self.error = error
            runtime.ranks.abort(f"the optimizer's step(): {type(error).__name__}: {error}")
            raise

    def end(self, slots: Iterable[Slot], stream: int) -> None:
        """The core has stepped these parameters, on all ranks: what of a step is not in bytes follows."""
        slots = list(slots)
        ids = [slot.id for slot in slots if math.prod(slot.shape) == 0]  # the core updates bytes
        # What step() writes to the optimizer it writes where a rank has nothing of all these, too.
        is_idle = slots and self._end is None and self._rehearsed.writes_itself
        if ids or is_idle:
            self.run(ids, 1.0, 0, stream)
        self._known.update(slot for slot in slots if self.form(slot).entry)

    def finish(self) -> None:
        """The step is taken: what a program has of states and gradients follows."""
        optimizer = self._optimizer()
        if self._end is not None:  # what it counts itself is no change of groups
            self._sorts = sorts_of(optimizer)
        dropped, self._dropped = self._dropped, []
        for slot in dropped:
            if slot.engine.core.has_grad(slot.id):
                slot.drop_grad()
        if self._copies.any():
            self._issue()
            self._copies.renew()

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
            wrote = [self._follow(slot, *grads[slot]) for slot in slots]
        finally:
            for stand_in in opened.values():
                stand_in.close()
        return any(wrote)

    def _follow(self, slot: Slot, grad: torch.Tensor, version: int) -> bool:
        """Whether step() has written the gradient; the engine's is what it has left."""
        stand_in = self._stand_in(slot)
        left = stand_in.parameter.grad
        if left is None:
            self._dropped.append(slot)
            return False
        if left is grad and grad._version == version and not self._rehearsed.writes_gradients:
            return False
        if left.data_ptr() != stand_in.grad.data_ptr():
            if slot.engine.scaler is not None:  # the engine's is times the loss scale
                return False
            stand_in.grad.copy_(left)
            slot.engine.coming_step.forget_clip(slot)
        return True

    def _step(self, groups: Mapping[int, list[Slot]]) -> None:
        """A part: the optimizer's groups, with these parameters alone."""
        optimizer: Any = self._optimizer()
        assert self._start is not None
        state: defaultdict[Any, Any] = defaultdict(dict)
        own = self._start
        inner = parts.stand_in(optimizer, [], state, self.kind)
        if self._rehearsed.writes_itself:
            own = own.copied(optimizer, inner)
        params = [
            [self._stand_in(slot).parameter for slot in groups.get(number, ())]
            for number in range(len(own.options))
        ]
        for slot in itertools.chain.from_iterable(groups.values()):
            stepped: Any = self._stand_in(slot).parameter
            stepped._gm_settings = self._settings.get(id(slot.parameter), {})
            if slot in self._entries:
                state[stepped] = self._entries[slot]
        inner.param_groups = [
            {"params": p, **options} for p, options in zip(params, own.options, strict=True)
        ]
        for name in parts.Own.of(inner).attributes.keys() - own.attributes.keys():
            del vars(inner)[name]  # an earlier part has set it first
        vars(inner).update(own.attributes)
        parts.run(inner)
        self._commit(optimizer, parts.Own.of(inner))
        for slot in itertools.chain.from_iterable(groups.values()):
            entry = inner.state.get(self._stand_in(slot).parameter)
            if entry is not None:
                self._entries[slot] = self._adopted(slot, entry)

    def _commit(self, optimizer: Any, ended: parts.Own) -> None:
        """Invariant 2."""
        if self._end is None:
            self._end = ended
            assert self._start is not None
            if self._start.difference(ended) is None:
                return  # its tensors, which are copies, would be the groups' own
            if self._rehearsed.writes_itself:
                self.written |= self._start.changed(ended)
            ended.put(optimizer)
            return
        found = self._end.difference(ended)
        if found is not None:
            raise GeminiError(
                f"{self.kind.__name__}.step() has left another {found[0]} after some parameters than after others: it "
                "does not treat each parameter by itself"
            )

    def _adopted(self, slot: Slot, entry: dict[Any, Any]) -> dict[Any, Any]:
        """The entry that a step has left, with its tensors in the chunk."""
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
        return with_leaves(entry, views) if views else entry

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

    def take_error(self) -> BaseException | None:
        """What step() has raised, once."""
        error, self.error = self.error, None
        return error

    # ---- states, from outside ----

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
        for slot in self._entries:
            self._wait(slot)
            break  # all of one device wait for one stream

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
        self._wait(slot)
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
        self._entries, self._stand_ins, self._known = {}, {}, set()

    def show(self, slot: Slot) -> dict[Any, Any]:
        """The parameter's entry as a program sees it, and may write it."""
        self._look()
        if not self._has_shards:
            self._entries.setdefault(slot, {})
        self._wait(slot)
        return self._copies.show(slot)

    def _wait(self, slot: Slot) -> None:
        """Counters on the device are written by the stream of updates."""
        if slot.device.type == "cuda" and self._stream is not None:
            updates = torch.cuda.ExternalStream(self._stream, slot.device)
            torch.cuda.current_stream(slot.device).wait_stream(updates)

    def _paths(self, slot: Slot) -> dict[Path, Leaf]:
        return {leaf.path: leaf for leaf, _ in self.form(slot).places}
