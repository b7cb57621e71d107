"""Loading: every rank reads what it keeps of a checkpoint folder, whoever wrote it.

Invariants
    1. Nothing changes before names, shapes and files have been compared and every byte that is wanted has been checked:
       a checkpoint is loaded whole or not at all, on all ranks or on none.
    2. The host holds one piece more than the engine does. A parameter whose elements lie in another order than those
       saved is there as a whole for a moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gemini_strategy.checkpoint.contents import MOMENTS, Field, Model, memory_order, moment
from gemini_strategy.checkpoint.manifest import Manifest, Stored, find
from gemini_strategy.checkpoint.plain import decode
from gemini_strategy.checkpoint.random_numbers import set_random_state
from gemini_strategy.checkpoint.together import together
from gemini_strategy.errors import GeminiError
from gemini_strategy.parameters import order as orders
from gemini_strategy.parameters.slot import FORMATS, Slot

if TYPE_CHECKING:
    from gemini_strategy.runtime import Runtime

__all__ = ["EVERYTHING", "load"]

_FEW = 10


EVERYTHING = frozenset({"model", "optimizer", "random"})


def load(runtime: Runtime, folder: Path, parts: Set[str] = EVERYTHING) -> Any:
    """See Engine.load; parts: of EVERYTHING, where the loss scaler goes with the optimizer."""
    runtime.check_open()
    what = f"loading {folder}"
    ranks = runtime.ranks
    loading = together(ranks, what, lambda: _Loading(runtime, folder, parts))
    ranks.agree({"manifest": loading.manifest.digest}, what)
    together(ranks, what, loading.check_bytes)
    started = f"{what}, which is loaded in part now (load again before training on)"
    together(ranks, started, loading.apply)
    return loading.extra


class _Loading:
    """A checkpoint that fits the model; nothing has changed yet.

    Raises:
        GeminiError: it does not fit, or is damaged.
    """

    def __init__(self, runtime: Runtime, folder: Path, parts: Set[str]) -> None:
        self._runtime = runtime
        self._parts = parts
        self.manifest = Manifest(find(folder))
        self.manifest.check_files()
        self._model = Model(runtime)
        self._with_optimizer = "optimizer" in parts and runtime.optimizer is not None
        self._rest = self.manifest.rest
        try:
            self._check_model()
            if self._with_optimizer:
                self._check_optimizer()
            own = self._own()
            self.extra = self._decoded(own["extra"], own["rank"])
            self._random = self._decoded(own["random"], own["rank"])
            self._others = {
                name: self._decoded(code, 0) for name, code in self._rest.get("model", {}).items()
            }
            self._scaler = self._decoded(self._rest.get("scaler"), 0)
            optimizer = self._rest.get("optimizer") or {}
            self._groups = self._decoded(optimizer.get("groups"), 0)
            self._states = self._decoded(optimizer.get("others"), 0)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise GeminiError(
                f"{self.manifest.folder}: its manifest is no checkpoint of a model: {type(error).__name__}: {error}"
            ) from None
        runtime.recover()
        leased = runtime.core.leased()
        if leased:
            name = runtime.slots_by_id[leased[0]].name
            raise GeminiError(
                f"{name}: a tensor outside its module shows it (inside engine.full_parameters(), say): load when "
                "nobody has one"
            )

    def _own(self) -> dict[str, Any]:
        """What was kept for each rank: at another number of ranks rank 0's, without its random numbers."""
        saved, ranks = self._rest["ranks"], self._runtime.ranks
        if len(saved) == ranks.size:
            return {**saved[ranks.rank], "rank": ranks.rank}
        return {"extra": saved[0]["extra"], "random": None, "rank": 0}

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
        wrong = []
        for name in known & saved:
            stored = tensors[f"model.{name}"]
            slot = model.slots.get(name)
            shape = tuple(model.tensors[name].shape) if slot is None else slot.shape
            dtype = model.tensors[name].dtype if slot is None else slot.dtype
            if stored.shape != shape:
                wrong.append(f"{name} has shape {stored.shape} there and {shape} here")
            elif stored.dtype.is_floating_point != dtype.is_floating_point or (
                slot is not None and slot.dtype not in FORMATS and stored.dtype is not slot.dtype
            ):
                wrong.append(f"{name} is of {stored.dtype} there and of {dtype} here")
        self._refuse("the model", lacking, more, wrong)

    def _check_optimizer(self) -> None:
        saved = self._rest.get("optimizer")
        if saved is None:
            raise GeminiError(
                f"{self.manifest.folder} has no state of an optimizer: model_only=True loads the weights alone"
            )
        optimizer: Any = self._runtime.optimizer
        names = {id(slot.parameter): slot.name for slot in self._runtime.slots}
        here = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        groups = self._decoded(saved["groups"], 0)
        there = [list(group["params"]) for group in groups]
        if here != there:
            mine, its = {n for g in here for n in g}, {n for g in there for n in g}
            texts = [f"groups of {[len(g) for g in there]} there and {[len(g) for g in here]} here"]
            self._refuse("the optimizer", sorted(mine - its), sorted(its - mine), texts)
        by_name = {slot.name: slot for slot in self._runtime.slots}
        for name, step in saved["steps"].items():
            slot = by_name.get(name)
            wrong = []
            if slot is None or not slot.has_moments:
                wrong.append(f"{name} has a state there and no place for one here")
            elif type(step) is not int or step < 0:
                wrong.append(f"{name} is at step {step!r}")
            else:
                for key in MOMENTS:
                    stored = self.manifest.tensors[moment(slot, key).key]
                    if stored.shape != slot.shape or stored.dtype is not torch.float32:
                        wrong.append(f"{key} of {name} is of {stored.dtype}, {stored.shape} there")
            self._refuse("the optimizer", [], [], wrong)

    def _refuse(self, what: str, lacking: list[str], more: list[str], wrong: list[str]) -> None:
        texts = [
            f"{text} {', '.join(names[:_FEW])}"
            + (f" and {len(names) - _FEW} more" * (len(names) > _FEW))
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
            stored = name if f"model.{name}" in tensors else self._rest["aliases"][name]
            yield Field(("model", name), slot, "master"), tensors[f"model.{stored}"]
        if self._with_optimizer:
            for slot in self._runtime.slots:
                for key in MOMENTS if slot.name in self._rest["optimizer"]["steps"] else ():
                    yield moment(slot, key), tensors[moment(slot, key).key]

    def check_bytes(self) -> None:
        """Reads all that `apply` will read."""
        for field, stored in self._wanted():
            is_same = stored.order == memory_order(field.slot)
            for _ in self.manifest.read(
                stored, *(field.slot.part() if is_same else (0, stored.numel))
            ):
                pass
        for name in self._model.tensors if "model" in self._parts else ():
            stored = self.manifest.tensors[f"model.{name}"]
            for _ in self.manifest.read(stored, 0, stored.numel):
                pass

    def apply(self) -> None:
        """What is wanted becomes what was saved."""
        runtime = self._runtime
        runtime.collect()
        for field, stored in self._wanted():
            self._fill(field, stored)
        if "model" in self._parts:
            for slot in runtime.slots:
                slot.loaded = slot.low = None
                slot.note_change()
            tensors = {name: self.manifest.whole(f"model.{name}") for name in self._model.tensors}
            runtime.model.load_state_dict({**tensors, **self._others}, strict=False)
        if self._with_optimizer:
            self._apply_optimizer()
        if self._random is not None and "random" in self._parts:
            set_random_state(self._random, runtime.device)

    def _fill(self, field: Field, stored: Stored) -> None:
        slot = field.slot
        first, n = slot.part()
        if stored.order != memory_order(slot):
            whole = orders.ordered(self.manifest.whole_of(stored), slot.strides)
            field.fill(first, orders.flat(whole)[first : first + n])
            return
        for begin, values in self.manifest.read(stored, first, n):
            skip = max(first - begin, 0)
            field.fill(begin + skip, values[skip : first + n - begin])

    def _apply_optimizer(self) -> None:
        runtime = self._runtime
        optimizer: Any = runtime.optimizer
        steps = self._rest["optimizer"]["steps"]
        for slot in runtime.slots:
            _note_state(slot, steps.get(slot.name))
        if runtime.scaler is not None and self._scaler is not None:
            runtime.scaler.load_state_dict(self._scaler)
        for group, saved in zip(optimizer.param_groups, self._groups, strict=True):
            group.update({k: v for k, v in saved.items() if k != "params"})
        by_name = {slot.name: slot for slot in runtime.slots}
        for slot in runtime.slots:
            if slot.has_state:
                _ = optimizer.state[slot.parameter]  # it has an entry from now on
        for name, more in self._states.items():
            optimizer.state[by_name[name].parameter].update(more)


def _note_state(slot: Slot, step: int | None) -> None:
    """The moments are those of so many updates; None: there are none."""
    if step is None and slot.has_state:
        slot.forget_state()
    elif step is not None:
        slot.adam_step = step
        slot.has_state = True
        slot.note_state_change()
