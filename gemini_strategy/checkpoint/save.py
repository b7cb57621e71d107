"""Saving: every rank writes its own part of the engine's state, straight from where it is, into a folder.

Invariants
    1. The host holds one piece more than the engine does: a piece is read, written and forgotten.
    2. Nothing changes before the folder is whole (folder.py): an error anywhere leaves the old one, and training goes
       on.
    3. The ranks meet before the first file, after each GiB of tensors and before the folder gets its name. So an error
       on one rank ends the saving on all, and no rank waits longer for another than that takes.
"""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gemini_strategy.checkpoint import distcp, folder, manifest
from gemini_strategy.checkpoint.boxes import Box, boxes
from gemini_strategy.checkpoint.contents import Field, Model, memory_order
from gemini_strategy.checkpoint.plain import encode
from gemini_strategy.checkpoint.random_numbers import random_state
from gemini_strategy.checkpoint.records import Record, RecordFile
from gemini_strategy.checkpoint.together import in_stretches, together
from gemini_strategy.errors import GeminiError
from gemini_strategy.optim.managed import check_options

if TYPE_CHECKING:
    from gemini_strategy.runtime import Runtime

__all__ = ["objection", "save"]

MOST_ELEMENTS = 1 << 22  # of a piece
_OWN = re.compile(r"\.metadata|meta\.pt|manifest\.json|__\d+_\d+\.distcp")


class _Part:
    """What one rank writes: its file, and where in it the pieces of each tensor are."""

    def __init__(self, path: Path) -> None:
        self._file = RecordFile(path)
        self.stored: dict[str, dict[str, Any]] = {}  # for the manifest
        self.boxes: dict[str, list[Any]] = {}  # for torch's metadata
        self.paths: dict[str, tuple[str, ...]] = {}

    def begin(self, name: str, value: torch.dtype, shape: Any, order: Any = None) -> None:
        """A tensor, of which this rank may have pieces."""
        order = list(range(len(shape)) if order is None else order)
        kind = {"dtype": manifest.dtype_name(value), "shape": list(shape), "order": order}
        self.stored[name] = {**kind, "pieces": []}

    def add(self, name: str, first: int, n: int, values: torch.Tensor) -> Record:
        """n elements from `first` on; `values` has them in any shape."""
        record = self._file.add(values)
        if n:
            self.stored[name]["pieces"].append([self._file.name, record.raw, first, n, record.crc])
        return record

    def add_for_tools(self, path: tuple[str, ...], record: Record, box: Box | None) -> None:
        """The record is also what torch.distributed.checkpoint finds under a path."""
        key = ".".join(path)
        self.paths[key] = path
        where = [self._file.name, record.offset, record.length]
        self.boxes.setdefault(key, []).append([*where, *(box or (None, None))])

    def add_object(self, path: tuple[str, ...], value: Any) -> None:
        """For tools alone."""
        self.add_for_tools(path, self._file.add_object(value), None)

    def add_whole(self, name: str, value: torch.Tensor, path: tuple[str, ...] = ()) -> None:
        """A tensor that one rank has."""
        value = value.detach().to("cpu").contiguous()
        self.begin(name, value.dtype, value.shape)
        first = 0
        for offsets, sizes in boxes(value.shape, 0, value.numel(), MOST_ELEMENTS):
            values = value[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
            record = self.add(name, first, values.numel(), values.clone())
            first += values.numel()
            if path:
                self.add_for_tools(path, record, (offsets, sizes))

    def finish(self) -> dict[str, Any]:
        self._file.finish()
        size = {self._file.name: self._file.size}
        return {"files": size, "stored": self.stored, "boxes": self.boxes, "paths": self.paths}

    def close(self) -> None:
        self._file.close()


def save(
    runtime: Runtime,
    target: Path,
    extra: Any = None,
    keep_last: int | None = None,
    *,
    meta: Any = None,
    with_optimizer: bool = True,
    replaces_files: bool = False,
) -> Path:
    """See Engine.save.

    Args:
        runtime, target, extra, keep_last: as there.
        meta: what is in the file meta.pt; None: the loss scaler's state.
        with_optimizer: False: the model alone.
        replaces_files: an ordinary file of the target's name may be replaced, too.

    Returns:
        The checkpoint's folder.
    """
    runtime.check_open()
    ranks = runtime.ranks
    target = target.resolve()
    is_series = keep_last is not None
    what = f"saving {target}"
    model = together(ranks, what, lambda: _begin(runtime, keep_last))
    ranks.agree(_numbers(runtime), what)
    draft = together(ranks, what, lambda: _draft(runtime, target, is_series, replaces_files))
    try:
        place = None if draft is None else [str(draft.path), str(draft.target)]
        path, made = map(Path, ranks.gather(what, place)[0])
        own = _write_part(runtime, model, what, path, extra, with_optimizer)
        everyone = ranks.gather(what, own)

        def publish() -> None:
            if draft is not None:
                _write_manifest(runtime, path, everyone, model.names, meta)
                draft.publish()
                if keep_last is not None:
                    folder.point(target, made.name)
                    folder.keep(target, keep_last, manifest.is_checkpoint)

        together(ranks, what, publish)
    finally:
        if draft is not None:
            draft.close()
    return made


def _begin(runtime: Runtime, keep_last: int | None) -> Model:
    if keep_last is not None and keep_last < 1:
        raise ValueError(f"keep_last={keep_last!r} must be at least 1")
    runtime.step_in_backward.check_save()
    for number, group in enumerate(runtime.optimizer.param_groups if runtime.optimizer else ()):
        check_options(number, group)
    runtime.recover()
    runtime.collect()
    runtime.core.drain()
    return Model(runtime)


def _numbers(runtime: Runtime) -> dict[str, Any]:
    """What is the same on all ranks, or what they save is of no one step."""
    last = _last_step(runtime)
    scale = {} if runtime.scaler is None else {"the loss scale": runtime.scaler.scale}
    others = {
        f"the step of {slot.name}": slot.adam_step
        for slot in runtime.slots
        if slot.has_moments and slot.adam_step != last
    }
    return {"the last step": last, **scale, **others}


def _last_step(runtime: Runtime) -> int:
    return max((slot.adam_step for slot in runtime.slots), default=0)


def _draft(
    runtime: Runtime, target: Path, is_series: bool, replaces_files: bool
) -> folder.Draft | None:
    """Where rank 0 puts the checkpoint together."""
    if runtime.ranks.rank:
        return None
    claim = None
    if is_series:
        if manifest.is_checkpoint(target):
            raise GeminiError(f"{target} is a checkpoint itself: keep a series in another folder")
        claim = folder.Claim(target)
        target = target / folder.series_name(target, _last_step(runtime))
    try:
        return folder.Draft(target, lambda old: objection(old, replaces_files), claim)
    except BaseException:
        if claim is not None:
            claim.release()
        raise


def objection(old: Path, replaces_files: bool) -> str | None:
    """Why what has the name may not be replaced: only what a saving has made goes."""
    if old.is_file() and replaces_files:
        return None
    if not old.is_dir() or not (manifest.is_checkpoint(old) or (old / ".metadata").is_file()):
        return "is there already and is no checkpoint folder"
    names = sorted(path.name for path in old.iterdir() if not _OWN.fullmatch(path.name))
    return f"is a checkpoint with {names[0]!r} of somebody else in it" if names else None


def _write_part(
    runtime: Runtime, model: Model, what: str, path: Path, extra: Any, with_optimizer: bool
) -> dict[str, Any]:
    ranks = runtime.ranks

    def begin() -> _Part:
        if not path.is_dir():
            raise GeminiError(
                f"{path.parent} is not the same folder on all ranks: save where every host can write"
            )
        return _Part(path / f"__{ranks.rank}_0.distcp")

    part = together(ranks, what, begin)
    try:
        in_stretches(
            ranks,
            what,
            (
                (field.n_bytes, functools.partial(_write_field, runtime, part, field))
                for field in model.fields(runtime, with_optimizer)
            ),
        )

        def rest() -> dict[str, Any]:
            beside = _write_rest(runtime, model, part, extra, with_optimizer)
            return {**part.finish(), "rest": beside}

        return together(ranks, what, rest)
    finally:
        part.close()


def _write_field(runtime: Runtime, part: _Part, field: Field) -> None:
    """Of several replicas of a shard one writes it."""
    slot, ranks = field.slot, runtime.ranks
    order = memory_order(slot)
    part.begin(field.key, field.dtype, slot.shape, order)
    first, n = slot.part()
    is_empty = math.prod(slot.shape) == 0
    if ranks.replica.rank or (is_empty and ranks.shard.rank) or (n == 0 and not is_empty):
        return
    inverse = [order.index(d) for d in range(len(order))]
    in_memory = tuple(slot.shape[d] for d in order)
    for offsets, sizes in boxes(in_memory, first, first + n, MOST_ELEMENTS):
        count = math.prod(sizes)
        values = field.read(first, count)
        record = part.add(field.key, first, count, values.view(sizes).permute(inverse))
        box = tuple(offsets[i] for i in inverse), tuple(sizes[i] for i in inverse)
        part.add_for_tools(field.path, record, box)
        first += count


def _write_rest(
    runtime: Runtime, model: Model, part: _Part, extra: Any, with_optimizer: bool
) -> dict[str, Any]:
    """What is no field of a slot; of what all ranks have alike, rank 0's."""
    rank = runtime.ranks.rank
    tensors: list[torch.Tensor] = []
    rest: dict[str, Any] = {
        "extra": encode(extra, "extra", tensors),
        "random": encode(random_state(runtime.device), "random numbers", tensors),
    }
    if rank == 0:
        for name, value in model.tensors.items():
            part.add_whole(f"model.{name}", value, ("model", name))
        for name, value in model.others.items():
            rest.setdefault("model", {})[name] = encode(value, name, tensors)
            if isinstance(value, torch.Tensor):
                part.add_whole(f"other: {name}", value, ("model", name))
            else:
                part.add_object(("model", name), value)
        rest["aliases"] = model.aliases
        if runtime.scaler is not None:
            rest["scaler"] = encode(runtime.scaler.state_dict(), "the loss scaler", tensors)
        if with_optimizer and runtime.optimizer is not None:
            rest["optimizer"] = _write_optimizer(runtime, part, tensors)
    for number, value in enumerate(tensors):
        part.add_whole(f"rank {rank}: {number}", value)
    return rest


def _write_optimizer(runtime: Runtime, part: _Part, tensors: list[torch.Tensor]) -> dict[str, Any]:
    """Steps, groups, and what others have put into the optimizer's state."""
    optimizer: Any = runtime.optimizer
    names = {id(slot.parameter): slot.name for slot in runtime.slots}
    groups = [
        {k: v for k, v in group.items() if k != "params"}
        | {"params": [names[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    steps: dict[str, int] = {}
    others: dict[str, Any] = {}
    for slot in runtime.slots:
        entry = optimizer.state.get(slot.parameter) or {}
        if slot.has_state:
            steps[slot.name] = slot.adam_step
            path = ("optimizer_0", "state", slot.name, "step")
            step = torch.tensor(float(slot.adam_step), device="cpu")
            part.add_whole(".".join(path), step, path)
        known = ("step", "exp_avg", "exp_avg_sq", "remainder", "master") if slot.has_moments else ()
        others |= (
            {slot.name: more} if (more := {k: entry[k] for k in entry if k not in known}) else {}
        )
    part.add_object(("optimizer_0", "param_groups"), groups)
    return {
        "groups": encode(groups, "param_groups", tensors),
        "steps": steps,
        "others": encode(others, "optimizer.state", tensors),
    }


def _write_manifest(
    runtime: Runtime, path: Path, everyone: list[dict[str, Any]], names: list[str], meta: Any
) -> None:
    """Of all ranks' parts one folder: the manifest last."""
    stored: dict[str, dict[str, Any]] = {}
    parts: dict[str, list[distcp.Part]] = {}
    paths: dict[str, tuple[str, ...]] = {}
    for own in everyone:
        for name, code in own["stored"].items():
            stored.setdefault(name, {**code, "pieces": []})["pieces"] += code["pieces"]
        for key, found in own["boxes"].items():
            parts.setdefault(key, []).extend(distcp.Part(*one) for one in found)
            paths[key] = tuple(own["paths"][key])
    rest = dict(everyone[0]["rest"])
    same: dict[str, str] = {}  # keys for tools, by the tensors' names
    for alias, name in rest["aliases"].items():
        same[f"model.{alias}"] = f"model.{name}"
        parts[f"model.{alias}"] = parts[f"model.{name}"]
        paths[f"model.{alias}"] = ("model", alias)
    same |= {f"model.{name}": f"other: {name}" for name in names if f"other: {name}" in stored}
    order = [f"model.{name}" for name in names]  # as the model has them
    order += [*stored, *parts]
    parts = {key: parts[key] for key in dict.fromkeys(order) if key in parts}
    kinds = {
        key: manifest.kind_of(stored[name])
        for key in parts
        if (name := same.get(key, key)) in stored
    }
    if meta is None:
        scaler = runtime.scaler.state_dict() if runtime.scaler is not None else None
        meta = {"scaler": scaler}
    distcp.write(path, paths, kinds, parts, meta)
    rest["ranks"] = [{key: own["rest"][key] for key in ("extra", "random")} for own in everyone]
    del rest["extra"], rest["random"]
    sizes = {name: size for own in everyone for name, size in own["files"].items()}
    manifest.write(path, sizes, stored, rest)
