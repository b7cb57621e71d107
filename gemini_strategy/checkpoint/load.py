"""Loading: every rank reads what it keeps of a checkpoint folder, of any number of ranks.

Invariants
    1. Nothing changes before names, shapes and files have been compared and every byte that is wanted has been checked:
       a checkpoint is loaded whole or not at all, on all ranks or on none. What is interrupted after that says so
       (Runtime.half_done), and is not trained on.
    2. The host holds a few pieces more than the engine does. A parameter whose elements lie in another order than those
       saved is there as a whole for a moment.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini_strategy.checkpoint import entries
from gemini_strategy.checkpoint.contents import Field, Model, moment
from gemini_strategy.checkpoint.folder import find
from gemini_strategy.checkpoint.manifest import Manifest, Stored
from gemini_strategy.checkpoint.plain import decode
from gemini_strategy.checkpoint.random_numbers import set_random_state
from gemini_strategy.checkpoint.threads import Threads
from gemini_strategy.checkpoint.together import together
from gemini_strategy.errors import GeminiError
from gemini_strategy.optim.managed import check_options
from gemini_strategy.optim.several import parts_of
from gemini_strategy.parameters import order as orders
from gemini_strategy.parameters.homes import MOMENTS
from gemini_strategy.parameters.slot import Slot
from gemini_strategy.report.progress import Done, progress

if TYPE_CHECKING:
    from gemini_strategy.runtime import Runtime

_FEW = 10
EVERYTHING = frozenset({"model", "optimizer", "random"})


def load(runtime: Runtime, folder: Path, parts: Set[str] = EVERYTHING) -> Any:
    """See Engine.load; parts: of EVERYTHING, where the loss scaler goes with the optimizer."""
    if runtime.half_done is None:
        runtime.check_open()
    what, was = f"loading {folder}", runtime.half_done
    ranks = runtime.ranks
    together(ranks, what, runtime.end_saving)
    manifest = together(ranks, what, lambda: Manifest(find(folder)))
    try:
        loading = together(ranks, what, lambda: _Loading(runtime, manifest, parts))
        ranks.agree({"manifest": manifest.digest, "parts": sorted(parts)}, what)
        # Every byte is read twice.
        with progress("Gemini: loading", 2 * loading.n_bytes, ranks.rank) as done:
            together(ranks, what, lambda: loading.check_bytes(done))
            runtime.half_done = what
            together(ranks, what, lambda: loading.apply(done))
        if parts == EVERYTHING or was is None:
            runtime.half_done = None
    finally:
        manifest.close()
    return loading.extra


class _Loading:
    """A checkpoint that fits the model; nothing has changed yet.

    Raises:
        GeminiError: it does not fit, or is damaged.
    """

    def __init__(self, runtime: Runtime, manifest: Manifest, parts: Set[str]) -> None:
        self._runtime = runtime
        self._parts = parts
        self.manifest = manifest
        manifest.open_files()
        self._model = Model(runtime)
        self._with_optimizer = "optimizer" in parts and runtime.optimizer is not None
        self._rest = self.manifest.rest
        if not self._rest.get("frozen", True):  # a model keeps its own
            stored = self.manifest.tensors
            frozen = {name for name, slot in self._model.slots.items() if not slot.has_moments}
            self._model.drop({name for name in frozen if f"model.{name}" not in stored})
        try:
            self._check_model()
            optimizer = self._rest.get("optimizer") or {}
            self._groups = self._decoded(optimizer.get("groups"), 0)
            self._states = self._decoded(optimizer.get("others"), 0)
            self._steps: dict[str, int] = {}  # of the moments that the engine takes
            # Of an optimizer that steps by itself.
            self._entries: dict[Slot, dict[Any, Any] | None] = {}
            self._fields: list[tuple[Field, Stored]] = []
            self._own: list[dict[str, Any]] = []
            if self._with_optimizer:
                self._check_optimizer()
            # Of each rank; at another number of ranks rank 0's, without its random numbers.
            saved, ranks = self._rest["ranks"], runtime.ranks
            is_alike = len(saved) == ranks.size
            rank = ranks.rank if is_alike else 0
            self.extra = self._decoded(saved[rank]["extra"], rank)
            self._random = self._decoded(saved[rank]["random"], rank) if is_alike else None
            self._others = {
                name: self._decoded(code, 0) for name, code in self._rest.get("model", {}).items()
            }
            self._scaler = self._decoded(self._rest.get("scaler"), 0)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise GeminiError(
                f"{self.manifest.folder}: its manifest is no checkpoint of a model: {type(error).__name__}: {error}"
            ) from None
        runtime.recover()
        runtime.settle()
        leased = runtime.core.leased()
        if leased:
            name = runtime.slots_by_id[leased[0]].name
            raise GeminiError(
                f"{name}: a tensor outside its module shows it (inside engine.full_parameters(), or its NumPy array): "
                "load when nobody has one"
            )

    def _decoded(self, code: Any, rank: int) -> Any:
        return decode(code, lambda number: self.manifest.whole(f"rank {rank}: {number}"))

    # ---- does it fit? ----

    def _check_model(self) -> None:
        model, tensors = self._model, self.manifest.tensors
        saved = {name.removeprefix("model.") for name in tensors if name.startswith("model.")}
        known = {*model.slots, *model.tensors}
        aliases = self._rest["aliases"]
        others = set(self._rest.get("model", {}))
        lacking = [n for n in [*known, *model.aliases] if n not in saved and n not in aliases]
        lacking += [name for name in model.others if name not in others]
        more = [n for n in [*saved, *aliases] if n not in known and n not in model.aliases]
        more += [name for name in others if name not in model.others]
        wrong = []
        for name in known & saved:
            stored = tensors[f"model.{name}"]
            slot = model.slots.get(name)
            here = model.tensors[name] if slot is None else slot
            shape, dtype = tuple(here.shape), here.dtype
            is_float = slot is not None and slot.is_float
            if stored.shape != shape:
                wrong.append(f"{name} has shape {stored.shape} there and {shape} here")
            elif not (
                stored.dtype.is_floating_point
                if is_float
                else stored.dtype is dtype or (slot is None and torch.can_cast(stored.dtype, dtype))
            ):
                wrong.append(f"{name} is of {stored.dtype} there and of {dtype} here")
            elif slot is None and any(
                step == 0 < size - 1 for step, size in zip(here.stride(), shape, strict=True)
            ):
                wrong.append(f"{name} is expanded here, and cannot be written")
        for name, first in model.aliases.items():
            if name in saved and self._first(name) != self._first(first):
                wrong.append(f"{first} and {name} are one parameter here and two there")
        wrong += self._quantized_otherwise()
        self._refuse("the model", lacking, more, wrong)

    def _quantized_otherwise(self) -> list[str]:
        """Scales that are kept beside quantized weights, and differ from the model's: these do not change."""
        model, wrong = self._model, []
        prefixes = tuple(
            f"{name.rpartition('.')[0]}." for name, slot in model.slots.items() if slot.is_raw
        )
        for name, code in self._rest.get("model", {}).items() if prefixes else ():
            here = model.others.get(name)
            if name.startswith(prefixes) and isinstance(here, torch.Tensor):
                there = self._decoded(code, 0)
                if not (isinstance(there, torch.Tensor) and torch.equal(there, here.cpu())):
                    wrong.append(f"{name}, which belongs to a quantized weight, has other values")
        return wrong

    def _check_optimizer(self) -> None:
        saved = self._rest.get("optimizer")
        if saved is None:
            raise GeminiError(
                f"{self.manifest.folder} has no state of an optimizer: model_only=True loads the weights alone"
            )
        self._check_classes(saved.get("classes"))
        optimizer: Any = self._runtime.optimizer
        names = {id(slot.parameter): slot.name for slot in self._runtime.slots}
        here = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        there = [list(group["params"]) for group in self._groups]
        if here != there:
            mine, its = {n for g in here for n in g}, {n for g in there for n in g}
            texts = [f"groups of {[len(g) for g in there]} there and {[len(g) for g in here]} here"]
            self._refuse("the optimizer", sorted(mine - its), sorted(its - mine), texts)
        if self._runtime.opaque is not None:
            self._check_entries(saved)
            return
        for number, group in enumerate(self._groups):
            check_options(number, group)
        by_name = {slot.name: slot for slot in self._runtime.slots}
        wrong = []
        for name, step in saved["steps"].items():
            slot = by_name.get(name)
            if slot is None:
                wrong.append(f"{name} has a state there and is no parameter here")
            elif type(step) is not int or step < 0:
                wrong.append(f"{name} is at step {step!r}")
            else:
                moments = {key: self.manifest.tensors[moment(slot, key).key] for key in MOMENTS}
                wrong += [
                    f"{key} of {name} is of {stored.dtype}, {stored.shape} there"
                    for key, stored in moments.items()
                    if stored.shape != slot.shape or stored.dtype is not torch.float32
                ]
                if slot.has_moments:
                    self._steps[name] = step
                elif not wrong:
                    # Frozen here: its state waits beside the engine, as load_state_dict leaves it.
                    own = {"step": torch.tensor(float(step), device="cpu")}
                    own |= {key: self.manifest.whole_of(stored) for key, stored in moments.items()}
                    self._states[name] = own | self._states.get(name, {})
        self._refuse("the optimizer", [], [], wrong)

    def _check_classes(self, there: list[str] | None) -> None:
        """`there`: of optimizers that step by themselves; None: the states are Adam's."""
        opaque = self._runtime.opaque
        here = None if opaque is None else [member.kind.__name__ for member in opaque.members]
        if there != here:
            adam = ["an AdamW or Adam that the engine steps"]
            raise GeminiError(
                f"{self.manifest.folder} has states of {' and '.join(there or adam)}, and here is "
                f"{' and '.join(here or adam)}: build the optimizer as it was when it was saved, or load "
                "the weights alone, with model_only=True"
            )

    def _check_entries(self, saved: dict[str, Any]) -> None:
        """The states of an optimizer that steps by itself."""
        opaque: Any = self._runtime.opaque
        opaque.settle()
        self._own = self._decoded(saved["own"], 0)
        by_name = {slot.name: slot for slot in self._runtime.slots}
        wrong = []
        for name, code in saved["entries"].items():
            slot, step = by_name.get(name), saved["steps"].get(name, 0)
            if slot is None:
                wrong.append(f"{name} has a state there and is no parameter here")
            elif type(step) is not int or step < 0:
                wrong.append(f"{name} is at step {step!r}")
            else:
                try:
                    read = entries.Read(slot, code, self.manifest)
                except GeminiError as error:
                    wrong.append(f"the state of {name}: {error}")
                    continue
                self._steps[name] = step
                self._entries[slot] = read.entry
                self._fields += read.fields
        self._refuse("the optimizer", [], [], wrong)

    def _refuse(self, what: str, lacking: list[str], more: list[str], wrong: list[str]) -> None:
        texts = [
            f"{text} {', '.join(sorted(names)[:_FEW])}"
            + (f", ... and {len(names) - _FEW} more" * (len(names) > _FEW))
            for text, names in (
                ("it lacks", lacking),
                ("it has, and this model does not,", more),
                ("they differ:", wrong),
            )
            if names
        ]
        if texts:
            raise GeminiError(f"{self.manifest.folder} does not fit {what}: {'; '.join(texts)}")

    # ---- bytes ----

    def _wanted(self) -> Iterator[tuple[Field, Stored]]:
        """Fields of this model, and what is stored of them."""
        tensors = self.manifest.tensors
        for name, slot in self._model.slots.items() if "model" in self._parts else ():
            yield Field(("model", name), slot, "master"), tensors[f"model.{self._first(name)}"]
        yield from self._fields
        if self._with_optimizer and self._runtime.opaque is None:
            for slot in self._runtime.slots:
                for key in MOMENTS if slot.name in self._steps else ():
                    yield moment(slot, key), tensors[moment(slot, key).key]

    def _first(self, name: str) -> str:
        """Under which of a tied parameter's names it is stored."""
        return name if f"model.{name}" in self.manifest.tensors else self._rest["aliases"][name]

    @property
    def n_bytes(self) -> int:
        """Of this rank's parts of the fields that are wanted, as the engine keeps them."""
        return sum(field.part_bytes for field, _ in self._wanted())

    def check_bytes(self, done: Done) -> None:
        """Reads all that `apply` will read."""
        threads = Threads()
        try:
            for field, stored in self._wanted():
                is_same = stored.order == field.order
                part = field.part() if is_same else (0, stored.numel)
                threads.put(functools.partial(self._check, stored, *part))
                done(field.part_bytes)
            for name in self._model.tensors if "model" in self._parts else ():
                stored = self.manifest.tensors[f"model.{name}"]
                threads.put(functools.partial(self._check, stored, 0, stored.numel))
            threads.finish()
        finally:
            threads.close()

    def _check(self, stored: Stored, first: int, n: int) -> None:
        for _ in self.manifest.read(stored, first, n):
            pass

    def apply(self, done: Done) -> None:
        """What is wanted becomes what was saved."""
        runtime = self._runtime
        runtime.check_assigned()
        for field, stored in self._wanted():
            self._fill(field, stored)
            done(field.part_bytes)
        if "model" in self._parts:
            for slot in runtime.slots:
                slot.is_whole = False
                slot.note_change()
            with torch.no_grad():
                for name, buffer in self._model.tensors.items():
                    buffer.copy_(self.manifest.whole(f"model.{name}"))
            if self._others:
                nn.Module.load_state_dict(runtime.model, self._others, strict=False)
        if self._with_optimizer:
            self._apply_optimizer()
        if self._random is not None and "random" in self._parts:
            set_random_state(self._random, runtime.device)

    def _fill(self, field: Field, stored: Stored) -> None:
        first, n = field.part()
        if stored.order != field.order:
            whole = orders.ordered(self.manifest.whole_of(stored), field.strides)
            field.fill(first, orders.flat(whole)[first : first + n])
            return
        if n == 0:  # all the same what is gathered of its chunk is old, on all ranks alike
            field.fill(first, torch.empty(0))
        for begin, values in self.manifest.read(stored, first, n):
            skip = max(first - begin, 0)
            field.fill(begin + skip, values[skip : first + n - begin])

    def _apply_optimizer(self) -> None:
        runtime = self._runtime
        optimizer: Any = runtime.optimizer
        for slot in runtime.slots:
            if runtime.opaque is not None and slot.has_moments:
                owner = runtime.opaque.owner(slot)
                if slot in self._entries:
                    owner.adopt(slot, self._entries[slot])
                elif owner.has(slot):
                    owner.drop(slot)
                slot.adam_step = self._steps.get(slot.name, 0)
            elif slot in self._entries:
                optimizer.state[slot.parameter] = self._entries[slot]
            else:
                self._note_state(slot, self._steps.get(slot.name))
        members = () if runtime.opaque is None else runtime.opaque.members
        for part, member, own in zip(parts_of(optimizer), members, self._own, strict=False):
            member.written |= own.keys()
            vars(part).update(own)
        if runtime.scaler is not None and self._scaler is not None:
            runtime.scaler.load_state_dict(self._scaler)
        for group, saved in zip(optimizer.param_groups, self._groups, strict=True):
            group.update({k: v for k, v in saved.items() if k != "params"})

    def _note_state(self, slot: Slot, step: int | None) -> None:
        """The moments are those of so many updates; None: there are none."""
        states: Any = self._runtime.optimizer.state  # type: ignore[union-attr]
        own = self._states.get(slot.name, {})
        if step is not None:
            slot.adam_step = step
            slot.has_state = True
            slot.note_state_change()
        elif slot.parameter in states:
            del states[slot.parameter]
        if step is None and not own:
            return
        entry = states[slot.parameter]  # there is one from now on
        for key in [key for key in dict.keys(entry) if key not in own]:
            dict.__delitem__(entry, key)
        entry.update(own)
