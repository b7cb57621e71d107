"""What one rank writes of a checkpoint: the pieces of its fields, and what is beside them, into one file."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gemini_strategy.checkpoint import entries
from gemini_strategy.checkpoint.boxes import Box, boxes
from gemini_strategy.checkpoint.contents import Field, Model
from gemini_strategy.checkpoint.plain import encode
from gemini_strategy.checkpoint.random_numbers import random_state
from gemini_strategy.checkpoint.records import Record, RecordFile
from gemini_strategy.checkpoint.threads import Threads
from gemini_strategy.optim.several import parts_of

if TYPE_CHECKING:
    from gemini_strategy.runtime import Runtime

MOST_ELEMENTS = 1 << 22  # of a piece
_LEAST_BYTES = 1 << 20  # of a piece that is worth another thread


class Part:
    """What one rank writes: its file, and where in it the pieces of each tensor are.

    Large pieces are written by threads (threads.py), so the file has them in no order; `finish` tells them in order.

    Args:
        path: of the file, which is not there yet.
    """

    def __init__(self, path: Path) -> None:
        self._file = RecordFile(path)
        self._threads = Threads()
        self.stored: dict[str, dict[str, Any]] = {}  # for the manifest
        self.boxes: dict[str, list[Any]] = {}  # for torch's metadata
        self.paths: dict[str, tuple[str, ...]] = {}

    def begin(self, name: str, value: torch.dtype, shape: Any, order: Any = None) -> None:
        """A tensor, of which this rank may have pieces."""
        order = list(range(len(shape)) if order is None else order)
        kind = {"dtype": str(value).removeprefix("torch."), "shape": list(shape), "order": order}
        self.stored[name] = {**kind, "pieces": []}

    def begin_field(self, field: Field) -> None:
        """Of what this rank has nothing of, others tell."""
        if field.part()[1] or not field.numel:
            self.begin(field.key, field.dtype, field.shape, field.order)

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
        self.add_run(name, value, tuple(value.shape), 0, path)

    def add_run(
        self,
        name: str,
        value: torch.Tensor,
        shape: tuple[int, ...],
        first: int,
        path: tuple[str, ...],
    ) -> None:
        """The elements from `first` on of a tensor of that shape, row by row."""
        flat = value.detach().to("cpu").reshape(-1)
        self.begin(name, value.dtype, shape)
        begin = first
        for offsets, sizes in boxes(shape, first, first + flat.numel(), MOST_ELEMENTS):
            n = math.prod(sizes)
            values = flat[begin - first : begin - first + n].view(sizes)
            record = self.add(name, begin, n, values.clone())
            begin += n
            if path:
                self.add_for_tools(path, record, (offsets, sizes))

    def put(self, piece: Piece, values: torch.Tensor) -> None:
        """A piece of a field, from its flat values: it is in the file when `finish` returns.

        Raises:
            BaseException: what an earlier piece met.
        """
        if values.numel() * values.element_size() < _LEAST_BYTES:
            piece.put(self, values)
        else:
            self._threads.put(functools.partial(piece.put, self, values))

    def finish(self) -> dict[str, Any]:
        self._threads.finish()
        for told in self.stored.values():
            told["pieces"].sort(key=lambda piece: piece[2])
        for found in self.boxes.values():
            found.sort(key=lambda box: box[3] or ())
        self._file.finish()
        size = {self._file.name: self._file.size}
        return {"files": size, "stored": self.stored, "boxes": self.boxes, "paths": self.paths}

    def close(self) -> None:
        self._threads.close()
        self._file.close()


@dataclass(frozen=True)
class Piece:
    """The n elements of a field from `first` on, in the order of memory. `box`: the same in that order's dimensions."""

    field: Field
    first: int
    n: int
    box: Box

    def put(self, part: Part, values: torch.Tensor) -> None:
        """Writes `values`, which are flat."""
        order = self.field.order
        inverse = [order.index(d) for d in range(len(order))]
        offsets, sizes = self.box
        shaped = values.view(sizes).permute(inverse)
        record = part.add(self.field.key, self.first, self.n, shaped)
        box = tuple(offsets[i] for i in inverse), tuple(sizes[i] for i in inverse)
        part.add_for_tools(self.field.path, record, box)


def pieces(runtime: Runtime, field: Field) -> Iterator[Piece]:
    """What this rank writes of a field. Of several replicas of a shard one writes it."""
    ranks = runtime.ranks
    first, n = field.part()
    is_empty = field.numel == 0
    if ranks.replica.rank or (is_empty and ranks.shard.rank) or (n == 0 and not is_empty):
        return
    in_memory = tuple(field.shape[d] for d in field.order)
    for offsets, sizes in boxes(in_memory, first, first + n, MOST_ELEMENTS):
        count = math.prod(sizes)
        yield Piece(field, first, count, (offsets, sizes))
        first += count


def write_rest(
    runtime: Runtime, model: Model, part: Part, extra: Any, with_optimizer: bool
) -> dict[str, Any]:
    """What is no field of a slot; of what all ranks have alike, rank 0's.

    States of an optimizer that steps by itself are with "entries" of each rank, see entries.write.
    """
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
        rest["frozen"] = model.frozen
        if runtime.scaler is not None:
            rest["scaler"] = encode(runtime.scaler.state_dict(), "the loss scaler", tensors)
        if with_optimizer and runtime.optimizer is not None:
            rest["optimizer"] = _write_optimizer(runtime, part, tensors)
    if with_optimizer and runtime.opaque is not None:
        rest["entries"] = entries.write(runtime, part)
    for number, value in enumerate(tensors):
        part.add_whole(f"rank {rank}: {number}", value)
    return rest


def _write_optimizer(runtime: Runtime, part: Part, tensors: list[torch.Tensor]) -> dict[str, Any]:
    """Steps, groups, and what others have put into the optimizer's state."""
    optimizer: Any = runtime.optimizer
    names = {id(slot.parameter): slot.name for slot in runtime.slots}
    groups = [
        {k: v for k, v in group.items() if k != "params"}
        | {"params": [names[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    steps = {slot.name: slot.adam_step for slot in runtime.slots if slot.has_state}
    others: dict[str, Any] = {}
    opaque = runtime.opaque
    told: dict[str, Any] = {}
    if opaque is not None:
        pairs = list(zip(parts_of(optimizer), opaque.members, strict=True))
        own = [{name: vars(part)[name] for name in sorted(m.written)} for part, m in pairs]
        told["classes"] = [member.kind.__name__ for member in opaque.members]
        told["own"] = encode(own, "the optimizer's own attributes", tensors)
    for slot in runtime.slots:
        if opaque is not None and slot.has_moments:
            continue
        entry = optimizer.state.get(slot.parameter) or {}
        if slot.has_state:
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
        **told,
    }
