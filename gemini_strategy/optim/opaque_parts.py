"""The states of one parameter that several ranks have in parts, each of them stepped as a parameter of its own.

Invariants
    1. A leaf of the parameter's entry is either *divided*: those of the parts, one after the other, are the elements of
       the whole's; or *common*: each part has all of it, with the same values.
    2. What an entry has besides tensors (numbers, containers) is the same in all parts, and the first part's counts.
"""

from __future__ import annotations

import base64
import copy
import functools
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gemini_strategy import _torch
from gemini_strategy.errors import GeminiError
from gemini_strategy.optim import opaque
from gemini_strategy.optim.opaque import Form, Leaf, Path, leaves, with_leaves
from gemini_strategy.optim.parts import Own
from gemini_strategy.ranks.ranks import fingerprint

if TYPE_CHECKING:
    from gemini_strategy.parameters.slot import Slot
    from gemini_strategy.ranks.ranks import Ranks


@dataclass(frozen=True)
class Part:
    """What one rank has of a parameter, as it is stepped: elements [first, first + n), flat unless it is whole."""

    first: int
    n: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_whole: bool

    @classmethod
    def of(
        cls, shape: tuple[int, ...], strides: tuple[int, ...], first: int, n: int, has_rows: bool
    ) -> Part | None:
        """None: it has nothing of it. What has no elements is on every rank. has_rows: it is cut between rows."""
        numel = math.prod(shape)
        if n == numel:
            return cls(first, n, shape, strides, True)
        if n == 0:
            return None
        if not has_rows:
            return cls(first, n, (n,), (1,), False)
        rest = shape[1:]
        steps = tuple(math.prod(rest[i:]) for i in range(len(shape)))
        return cls(first, n, (n // math.prod(rest), *rest), steps, False)


class Division:
    """The states of one parameter: as a whole, and as this rank has them.

    Args:
        parts: of all ranks of the shard group.
        form_of: what a step makes of a part's states.
    """

    def __init__(
        self, name: str, whole: Form, parts: Sequence[Part | None], form_of: Callable[[Part], Form]
    ) -> None:
        self.name, self.whole, self.parts = name, whole, parts
        self.forms = [None if part is None else form_of(part) for part in parts]

    @functools.cached_property
    def divided(self) -> dict[Path, list[int]]:
        """Paths of divided leaves, and the elements of them that each rank has.

        Raises:
            GeminiError: parts have other states than the whole.
        """
        owners = [form for form in self.forms if form is not None]
        placed = {leaf.path for leaf, _ in self.whole.places}
        for leaf in (leaf for form in owners for leaf, _ in form.places):
            if leaf.path not in placed:
                raise GeminiError(
                    f"{self.name}: its state {opaque.text(leaf.path)} is there only where ranks have parts of the "
                    "parameter, which cannot be put together: use another optimizer, or one rank"
                )
        found: dict[Path, list[int]] = {}
        if len(owners) == 1:  # what stays in Python is common to as many parts
            return {
                leaf.path: [math.prod(leaf.shape) if form else 0 for form in self.forms]
                for leaf, _ in self.whole.places
            }
        for path, shape in self.whole.shapes().items():
            numel = math.prod(shape)
            sizes = [math.prod(f.shapes().get(path, ())) if f else 0 for f in self.forms]
            dtype = self.whole.dtypes()[path]
            is_alike = all(f.dtypes().get(path) is dtype for f in owners)
            if is_alike and all(f.shapes()[path] == shape for f in owners):
                continue
            if sum(sizes) != numel or not is_alike:
                raise GeminiError(
                    f"{self.name}: its state {opaque.text(path)} has {numel} elements, and {sizes} where ranks have "
                    "parts of the parameter, which cannot be put together: use another optimizer, or one rank"
                )
            found[path] = sizes
        return found

    @property
    def is_whole(self) -> bool:
        """Whether every rank of the group has all of it."""
        return all(part is not None and part.is_whole for part in self.parts)

    def spans(self) -> list[tuple[int, int]]:
        """(first, n) of all parts."""
        return [(0, 0) if part is None else (part.first, part.n) for part in self.parts]

    @property
    def first(self) -> int:
        """The first rank that has a part."""
        return next(i for i, part in enumerate(self.parts) if part is not None)

    def run(self, path: Path, rank: int) -> tuple[int, int]:
        """(first, n): the elements of one of the whole's leaves that a rank has, row by row."""
        sizes = self.divided.get(path)
        if sizes is not None:
            return sum(sizes[:rank]), sizes[rank]
        has_it = self.parts[rank] is not None
        return 0, math.prod(self.whole.shapes()[path]) if has_it else 0

    def own_entry(self, rank: int, entry: Any, device: torch.device) -> dict[Any, Any]:
        """An entry of the whole as a rank with a part has it; its tensors may be views of those."""
        part, form = self.parts[rank], self.forms[rank]
        assert part is not None and form is not None
        if part.is_whole:
            return entry
        kept = {leaf.path for leaf, _ in form.places}
        own = {}
        for path, tensor in leaves(entry):
            if path in self.divided:
                begin, n = self.run(path, rank)
                tensor = tensor.reshape(-1)[begin : begin + n].reshape(form.shapes()[path])
                tensor = tensor if path in kept else tensor.to(device, copy=True)
            own[path] = tensor
        return _filled(framed(entry), form.entry, own, self.name)

    def joined(
        self, ranks: Ranks, entry: Any, device: torch.device, root: int | None
    ) -> dict[Any, Any]:
        """The entry of the whole, of the entries of all ranks' parts, on the host; `root` alone has it, or all."""
        what = f"optimizer state of {self.name} (every rank has to read it)"
        rank, teller = ranks.shard.rank, ranks.shard.members[self.first]
        own = dict(leaves(entry))
        common = {path: t for path, t in own.items() if path not in self.divided}
        packed = _packed(framed(entry), list(own), common) if ranks.rank == teller else None
        told = ranks.gather(what, packed)[teller]
        if "error" in told:
            raise GeminiError(
                f"{self.name}: its optimizer state cannot be told to other ranks: {told['error']}"
            )
        tree, present, found = _unpacked(told, device)
        for path in self.divided:
            if path not in present:
                continue
            like = dict(leaves(self.whole.entry))[path]
            flat = torch.zeros(like.numel(), dtype=like.dtype, device="cpu")
            begin, n = self.run(path, rank)
            if n:
                flat[begin : begin + n] = own[path].reshape(-1)
            ranks.assemble(flat, begin, n, what, root)
            values = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
            found[path] = values.copy_(flat.view(like.shape))
        return _filled(tree, self.whole.entry, found, self.name)


class Divisions:
    """Those of all parameters of one optimizer.

    Args:
        form_of: what it makes of a part.
        has_rows: parameters are cut between rows.
    """

    def __init__(self, form_of: Callable[[Slot, Part], Form], has_rows: bool) -> None:
        self._form_of, self._has_rows = form_of, has_rows
        self.made: dict[Slot, Division] = {}

    def divide(self, slot: Slot, parts: Sequence[tuple[int, int]]) -> Division:
        """parts: (first, n), the elements that each rank has.

        Raises:
            GeminiError: parts have other states than the whole.
        """
        where, form_of = (slot.shape, slot.strides), functools.partial(self._form_of, slot)
        whole = Part(0, math.prod(slot.shape), *where, True)
        made = [Part.of(*where, first, n, self._has_rows) for first, n in parts]
        division = Division(slot.name, form_of(whole), made, form_of)
        _ = division.divided  # refuses
        self.made[slot] = division
        return division

    def of(self, slot: Slot) -> Division:
        if slot not in self.made:  # it has no place in a chunk
            self.divide(slot, [(0, math.prod(slot.shape))] * slot.engine.ranks.shard.size)
        return self.made[slot]

    def part(self, slot: Slot) -> Part | None:
        """What this rank has of a parameter."""
        return self.of(slot).parts[slot.engine.ranks.shard.rank]

    def form(self, slot: Slot) -> Form:
        """Of that."""
        form = self.of(slot).forms[slot.engine.ranks.shard.rank]
        assert form is not None
        return form

    def places(self, slot: Slot) -> tuple[tuple[Leaf, int], ...]:
        """In the chunk."""
        return () if self.part(slot) is None else self.form(slot).places


def forked(entry: Mapping[Any, Any]) -> dict[Any, Any]:
    """Another dict with the same values."""
    return copy.copy(entry) if type(entry) is dict else dict(entry)


# ---- entries without their tensors ----


@dataclass(frozen=True)
class _Hole:
    """Stands for a tensor of an entry."""

    path: Path


def framed(entry: Any) -> Any:
    """An entry with something that stands for each tensor."""
    return _with_holes(entry, (), {id(t): path for path, t in reversed(leaves(entry))})


def _with_holes(value: Any, path: Path, firsts: Mapping[int, Path]) -> Any:
    if isinstance(value, torch.Tensor):
        return _Hole(firsts.get(id(value), path))
    if not isinstance(value, dict | list | tuple) or not leaves(value):
        return value
    keys = value if isinstance(value, dict) else range(len(value))
    made = {key: _with_holes(value[key], (*path, key), firsts) for key in keys}
    return _like(value, made)


def _like(value: Any, items: Mapping[Any, Any]) -> Any:
    """A container of the same kind with these items in the place of its own."""
    if isinstance(value, tuple):
        return (
            type(value)(*items.values())
            if hasattr(value, "_fields")
            else type(value)(items.values())
        )
    made = copy.copy(value)
    for key, item in items.items():
        made[key] = item
    return made


def _filled(tree: Any, like: Any, made: Mapping[Path, torch.Tensor], name: str) -> Any:
    """The entry with these leaves; tensors that are made of others are as those of `like`."""
    made_of = dict(_wrappers(like, ()))
    firsts = {id(tensor): path for path, tensor in leaves(like)}

    def filled(value: Any) -> Any:
        if isinstance(value, _Hole):
            wrapper = made_of.get(value.path)
            if wrapper is not None:
                inner = {path: made[firsts[id(t)]] for path, t in leaves(wrapper)}
                return with_leaves(wrapper, inner)
            if value.path not in made:
                raise GeminiError(
                    f"{name}: its state {opaque.text(value.path)} is made of other tensors since its first step, "
                    "and ranks have parts of it: use another optimizer, or one rank"
                )
            return made[value.path]
        if isinstance(value, dict | list | tuple) and any(True for _ in _holes(value)):
            keys = value if isinstance(value, dict) else range(len(value))
            return _like(value, {key: filled(value[key]) for key in keys})
        return value

    return filled(tree)


def _holes(value: Any) -> Iterator[_Hole]:
    if isinstance(value, _Hole):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _holes(item)


def _wrappers(value: Any, path: Path) -> Iterator[tuple[Path, torch.Tensor]]:
    """Tensors that are made of others, and their paths."""
    if isinstance(value, torch.Tensor):
        if _torch.is_wrapper_subclass(value):
            yield path, value
    elif isinstance(value, dict | list | tuple):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _wrappers(value[key], (*path, key))


def _packed(tree: Any, present: list[Path], common: Mapping[Path, torch.Tensor]) -> dict[str, str]:
    """As ranks can tell it each other."""
    there = [path for path, t in common.items() if t.device.type != "cpu"]
    buffer = io.BytesIO()
    try:
        torch.save((tree, present, {path: t.cpu() for path, t in common.items()}, there), buffer)
    except Exception as error:  # what cannot be pickled says so in many ways
        return {"error": f"{type(error).__name__}: {error}"}
    return {"entry": base64.b64encode(buffer.getvalue()).decode()}


def _unpacked(
    told: Mapping[str, str], device: torch.device
) -> tuple[Any, list[Path], dict[Path, torch.Tensor]]:
    buffer = io.BytesIO(base64.b64decode(told["entry"]))
    tree, present, common, there = torch.load(buffer, weights_only=False)
    return tree, present, {p: t.to(device) if p in there else t for p, t in common.items()}


# ---- what ranks compare ----


def values_of(own: Own, has_attributes: bool) -> dict[str, str]:
    """What an optimizer has besides parameters and states, by names."""
    found = {
        f"{key} of param group {number}": _told(value)
        for number, options in enumerate(own.options)
        for key, value in options.items()
    }
    if has_attributes:
        found |= {f"optimizer.{key}": _told(value) for key, value in own.attributes.items()}
    return found


def _told(value: Any) -> str:
    """The same for equal values, whatever process has them."""
    if isinstance(value, torch.Tensor) and not _torch.is_wrapper_subclass(value):
        said = value.item() if value.numel() == 1 else fingerprint(value, of_all=True)
        return f"{said} ({value.dtype} of shape {tuple(value.shape)})"
    if isinstance(value, dict):
        return str({str(key): _told(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return str([_told(item) for item in value])
    is_plain = isinstance(value, bool | int | float | complex | str | torch.dtype | None)
    return repr(value) if is_plain else type(value).__name__
