"""An optimizer that the engine does not compute: its own step() makes the updates, and its states are bytes.

The core calls `run` where it has weights, gradients and states of a chunk on the device (csrc/engine/opaque.c). There
stand-ins for these parameters, plain tensors at those addresses, are stepped by the optimizer's class. States that are
as large as their parameter lie in the chunk (opaque.py says which); counters and shared tables stay in Python.

Invariants
    1. All parts of a step begin with the values that groups and attributes of the optimizer had at its begin; the first
       part that ends sets them for all, and each later part must end with the same ones. Parts may run after the step,
       under the next forward, unless they write such values; all have run before the next step begins, or states are
       looked at.
    2. What runs AHEAD of its step leaves nothing but bytes in the chunk, which the core takes back (ahead.py).
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from gemini_strategy import _torch
from gemini_strategy.errors import GeminiError
from gemini_strategy.optim import overrides, parts, rehearsal
from gemini_strategy.optim.ahead import Setting, entry_apart, is_plain
from gemini_strategy.optim.chunk_tensors import (
    copy_of_marks,
    in_plain_torch,
    marks_of,
    on_stream,
    tensor_at,
)
from gemini_strategy.optim.opaque import Form, How, When
from gemini_strategy.optim.opaque_entries import OpaqueEntries
from gemini_strategy.optim.opaque_parts import Divisions, Part, values_of
from gemini_strategy.optim.stage import sorts_of
from gemini_strategy.precision import weight_dtypes
from gemini_strategy.weakly import weak_method

if TYPE_CHECKING:
    from gemini_strategy.parameters.slot import Slot
    from gemini_strategy.runtime import Runtime

# Hyperparameters of Adam that the core takes and nothing reads.
_SAME = 0.0, 0.9, 0.999, 1e-8, 0.0
_NAMES = ("params", "param_names")


def _group_of(optimizer: Any) -> dict[int, int]:
    groups = optimizer.param_groups
    return {id(p): number for number, group in enumerate(groups) for p in group["params"]}


def _is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return parts.difference(one, other, "") is None


class OpaqueOptimizer(OpaqueEntries):
    """The steps of one such optimizer, and their states.

    Args:
        optimizer: not managed yet.

    Raises:
        GeminiError: its step() couples parameters, wants a closure or draws random numbers (rehearsal.py).
    """

    def __init__(self, runtime: Runtime, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(runtime, optimizer)
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
        self._dropped: list[Slot] = []
        self._recipes: dict[int, tuple[int, dict[str, Any]]] = {}  # of each group, the last
        self._numbers = itertools.count(1)
        self._start: Setting | None = None
        self._end: parts.Own | None = None
        self._autocast = (False, torch.bfloat16)  # of who steps: a part may run inside a forward's
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

    # ---- steps ----

    def core_arguments(self) -> dict[str, Any]:
        """Of the core (csrc/engine/opaque.c), which does not keep this."""
        when = When.AT_STEP if self._writes else When.SPECULATED
        return {"opaque": weak_method(self.run), "opaque_when": when}

    @property
    def _writes(self) -> bool:
        """Whether step() writes what only a step may: then it runs in the step's call."""
        return self._rehearsed.writes_itself or self._rehearsed.writes_gradients

    def update(self, slot: Slot, divisor: float, factor: float) -> tuple[Any, ...]:
        """One parameter's part of a step, as the core takes it; equal as long as its group is."""
        recipe = self._recipe(self._group_of[id(slot.parameter)])
        return (slot.id, *_SAME, recipe, True, True, divisor, factor)

    def _renumber(self) -> None:
        self._recipes.clear()

    def _recipe(self, number: int) -> int:
        """A number for the values of a group: another as soon as one of them is another."""
        optimizer: Any = self._optimizer()
        now = {k: v for k, v in optimizer.param_groups[number].items() if k not in _NAMES}
        if self._end is not None and _is_same(now, self._end.options[number]):
            now = self._start.own.options[number]  # the step that runs has written the others
        recipe, values = self._recipes.get(number, (0, None))
        if values is None or not _is_same(values, now):
            recipe = next(self._numbers)
            self._recipes[number] = recipe, parts.copies([now], optimizer, optimizer)[0]
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
        kind = runtime.device.type
        self._autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self._start, self._end = self._setting(optimizer), None
        self._ahead.check(self._start)

    def _setting(self, optimizer: Any) -> Setting:
        every = [p for group in optimizer.param_groups for p in group["params"]]
        marks = {id(p): copy_of_marks(found) for p in every if (found := marks_of(p))}
        return Setting.of(optimizer, marks, self._settings, self._autocast)

    def announce(self) -> bool:
        """Parts of the coming step may run before it, with the groups of now; False: they may not."""
        self._issue()  # what the last one has made ahead is taken first
        optimizer: Any = self._optimizer()
        now = sorts_of(optimizer), _group_of(optimizer), overrides.settings_of(optimizer)
        # A counter that a program has is the very tensor.
        if (
            self._writes
            or self._copies.any()
            or now != (self._sorts, self._group_of, self._settings)
        ):
            return False
        setting = self._setting(optimizer)
        if setting.missed:  # what cannot be copied cannot be compared
            return False
        self._ahead.begin(setting)
        return True

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

    def run(
        self, ids: list[int], scale: float, late_scale: int, stream: int, how: int = How.STEP
    ) -> bool:
        """Steps these parameters; gives whether their gradients were written, or AHEAD what only a step may write."""
        runtime: Any = self._runtime()
        slots = [runtime.slots_by_id[i] for i in ids]
        if how == How.TAKE:
            assert self._start is not None
            self._commit(self._optimizer(), self._start.own, self._start.own)
            self._entries.update(self._ahead.take(slots))
            return False
        try:
            enabled, dtype = self._autocast
            with (
                in_plain_torch(),
                _torch.InferenceMode(False),
                torch.no_grad(),
                _torch.DisableFuncTorch(),
                torch.autocast(runtime.device.type, dtype, enabled),
                on_stream(runtime.device, stream),
            ):
                factor: Any = scale
                if late_scale:
                    factor = tensor_at(late_scale, (), (), torch.float32, runtime.device)
                return self._run(slots, factor, is_ahead=how == How.AHEAD)
        except BaseException as error:
            if how == How.AHEAD and isinstance(error, Exception):
                return True  # the step says it, if it comes
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

    def _run(self, slots: list[Slot], factor: Any, is_ahead: bool) -> bool:
        groups: dict[int, list[Slot]] = {}
        for slot in slots:
            groups.setdefault(self._group_of[id(slot.parameter)], []).append(slot)
        opened = {slot: self._stand_in(slot) for slot in slots}
        setting = self._ahead.setting if is_ahead else self._start
        if setting is None:
            return True
        grads = {}
        for slot in slots:
            grad = opened[slot].open(factor, setting.marks.get(id(slot.parameter), {}))
            grads[slot] = grad, grad._version
        try:
            if is_ahead:
                return not self._step_ahead(groups, grads, setting)
            self._step(groups)
            wrote = [self._follow(slot, *grads[slot]) for slot in slots]
        finally:
            for stand_in in opened.values():
                stand_in.close(is_ahead)
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
        """A part of the step."""
        optimizer: Any = self._optimizer()
        assert self._start is not None
        own = self._start.own if self._rehearsed.writes_itself else self._start.values(optimizer)
        ended, found = self._stepped(groups, own, self._entries)
        self._commit(optimizer, own, ended)
        self._entries.update(found)

    def _step_ahead(
        self,
        groups: Mapping[int, list[Slot]],
        grads: Mapping[Slot, tuple[torch.Tensor, int]],
        setting: Setting,
    ) -> bool:
        """A part of the coming step; whether it can be kept."""
        known = {slot: self._entries[slot] for slot in grads if slot in self._entries}
        if not all(map(is_plain, known.values())):
            return False
        entries = {slot: entry_apart(e, self._paths_here(slot)) for slot, e in known.items()}
        own = setting.values(self._optimizer())  # type: ignore[arg-type]
        ended, found = self._stepped(groups, own, entries)
        for slot, (grad, version) in grads.items():
            stand_in = self._stand_in(slot)
            left = stand_in.parameter.grad
            if left is not grad or left._version != version or not stand_in.has_marks():
                return False
        if own.difference(ended) is not None or not found.keys() >= entries.keys():
            return False
        if not all(map(is_plain, found.values())):
            return False
        self._ahead.keep(grads, found)
        return True

    def _stepped(
        self, groups: Mapping[int, list[Slot]], own: parts.Own, entries: Mapping[Slot, Any]
    ) -> tuple[parts.Own, dict[Slot, dict[Any, Any]]]:
        """The optimizer's groups, with these parameters alone, after a step: its values and their entries."""
        optimizer: Any = self._optimizer()
        state: defaultdict[Any, Any] = defaultdict(dict)
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
            if slot in entries:
                state[stepped] = entries[slot]
        inner.param_groups = [
            {"params": p, **options} for p, options in zip(params, own.options, strict=True)
        ]
        for name in parts.Own.of(inner).attributes.keys() - own.attributes.keys():
            del vars(inner)[name]  # an earlier part has set it first
        vars(inner).update(own.attributes)
        parts.run(inner)
        found = {
            slot: self._adopted(slot, inner.state[self._stand_in(slot).parameter])
            for slot in itertools.chain.from_iterable(groups.values())
            if self._stand_in(slot).parameter in inner.state
        }
        return parts.Own.of(inner), found

    def _commit(self, optimizer: Any, begun: parts.Own, ended: parts.Own) -> None:
        """Invariant 1."""
        if self._end is None:
            assert self._start is not None
            if begun.difference(ended) is None:
                self._end = self._start.own  # which a program does not write in place
                return
            self._end = ended
            if self._rehearsed.writes_itself:
                self.written |= begun.changed(ended)
            ended.put(optimizer)
            return
        found = self._end.difference(ended)
        if found is not None:
            raise GeminiError(
                f"{self.kind.__name__}.step() has left another {found[0]} after some parameters than after others: it "
                "does not treat each parameter by itself"
            )

    def take_error(self) -> BaseException | None:
        """What step() has raised, once."""
        error, self.error = self.error, None
        return error
