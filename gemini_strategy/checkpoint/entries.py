"""States of an optimizer that steps by itself, in a checkpoint: tensors by name, and how an entry is made of them.

Of each parameter's entry the checkpoint has every tensor that it leads to, once, under the parameter's name and the
tensor's path. A tensor that several parameters have (a table of a quantization) is there once, too, under the first of
them. The manifest has the rest of the entry as plain data, with names in the place of tensors. A tensor that is made of
others is made again by the class that this optimizer has there now: no class is named to be loaded.

Where ranks have parts of a parameter the checkpoint has the entry of the whole all the same: each rank writes what it
has of a divided leaf (opaque_parts.py), and the first that has a part writes the rest, tables that its own parameters
share among it. Each rank reads back what it has by then.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gemini_strategy import _torch
from gemini_strategy.checkpoint.contents import Field
from gemini_strategy.checkpoint.manifest import Manifest, Stored
from gemini_strategy.checkpoint.plain import decode, encode
from gemini_strategy.errors import GeminiError
from gemini_strategy.optim import opaque
from gemini_strategy.optim.opaque import Leaf
from gemini_strategy.parameters import order
from gemini_strategy.parameters.slot import Slot

if TYPE_CHECKING:
    from gemini_strategy.checkpoint.parts import Part
    from gemini_strategy.optim.opaque_parts import Division
    from gemini_strategy.runtime import Runtime

_ADDRESS = re.compile(r"0x[0-9a-f]+")


@dataclass(frozen=True)
class State(Field):
    """A leaf of a parameter's states that its chunk has, or what this rank has of it.

    Attributes:
        leaf: of the whole.
        own: as this rank has it; at: where that begins among the parameter's bytes in the chunk.
        run: (first, n), the elements of the whole that it is.

    Raises:
        GeminiError: its elements do not follow one another in the whole.
    """

    leaf: Leaf
    own: Leaf
    at: int
    run: tuple[int, int]

    def __post_init__(self) -> None:
        own = self.own
        if self._is_part and not order.is_same(own.shape, own.stride, order.row_major(own.shape)):
            raise GeminiError(
                f"{self.slot.name}: a rank has the part {own.shape} of its state {self.name}, with strides "
                f"{own.stride}, and only what lies row by row is saved in parts: use torch.save() with "
                "engine.state_dict(rank0_only=True), or enable_distributed_storage=False"
            )

    @property
    def _is_part(self) -> bool:
        return self.own.shape != self.leaf.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.leaf.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.leaf.shape

    @property
    def strides(self) -> tuple[int, ...]:
        return order.row_major(self.shape) if self._is_part else self.leaf.stride

    def part(self) -> tuple[int, int]:
        return self.run

    def read(self, first: int, n: int) -> torch.Tensor:
        return self._copied(self.slot.engine.core.states_read, first, n)[0]

    def read_saved(self, first: int, n: int) -> torch.Tensor | None:
        values, is_read = self._copied(self.slot.engine.core.save_states, first, n)
        return values if is_read else None

    def _copied(self, read: Callable[..., Any], first: int, n: int) -> tuple[torch.Tensor, Any]:
        values = torch.empty(n, dtype=self.dtype, device="cpu")
        return values, read(self.slot.id, *self._place(first, n), values.data_ptr())

    def fill(self, first: int, values: torch.Tensor) -> None:
        core, place = self.slot.engine.core, self._place(first, values.numel())
        values = values.to(self.dtype).contiguous()
        core.states_write(self.slot.id, *place, values.data_ptr(), self.slot.engine.stream())

    def _place(self, first: int, n: int) -> tuple[int, int]:
        """Bytes of the parameter's in the chunk: where they begin, and how many."""
        width = self.dtype.itemsize
        return self.at + (first - self.run[0]) * width, n * width


def _places(slot: Slot, entry: Any) -> dict[opaque.Path, tuple[str, ...]]:
    """Of each leaf, where it is in the nested state."""
    used: set[str] = set()
    found = {}
    for path, _ in opaque.leaves(entry):
        last = text = opaque.text(path)
        while last in used:  # a dict may have "a.b" beside "a" with "b" in it
            last += "'"
        used.add(last)
        parts = tuple(map(str, path)) if last == text else (last,)
        found[path] = _place(slot, *parts)
    return found


def _place(slot: Slot, *parts: str) -> tuple[str, ...]:
    return "optimizer_0", "state", slot.name, *parts


def fields(runtime: Runtime) -> Iterator[State]:
    """All that the chunks have, the same leaves on every rank.

    Raises:
        GeminiError: see State.
    """
    rank = runtime.ranks.shard.rank
    for slot in runtime.opaque.slots() if runtime.opaque is not None else ():
        owner = runtime.opaque.owner(slot)
        division, entry = owner.division(slot), owner.entry(slot)
        places, own = _places(slot, entry), _own_places(division, rank)
        for leaf, _ in division.whole.places:
            is_told = leaf.path in division.divided or rank == division.first
            is_here = leaf.path in places and leaf.path in own and is_told
            run = division.run(leaf.path, rank) if is_here else (0, 0)
            where = places.get(leaf.path, _place(slot, *map(str, leaf.path)))
            yield State(
                where, slot, opaque.text(leaf.path), leaf, *own.get(leaf.path, (leaf, 0)), run
            )


def _own_places(division: Division, rank: int) -> dict[opaque.Path, tuple[Leaf, int]]:
    """Leaves of the whole's chunk that a rank's own chunk has something of, as they are there, and where."""
    form = division.forms[rank]
    whole = {leaf.path for leaf, _ in division.whole.places}
    found = () if form is None else form.places
    return {leaf.path: (leaf, at) for leaf, at in found if leaf.path in whole}


def write(runtime: Runtime, part: Part) -> dict[str, Any]:
    """What this rank has beside `fields`; gives, by the parameter's name, how entries are made.

    Of all ranks that have something of a parameter the first one gives that.

    Raises:
        GeminiError: an entry cannot be kept.
    """
    ranks = runtime.ranks
    written: dict[int, str] = {}  # names of tensors, by their id()
    codes: dict[str, Any] = {}
    for slot in runtime.opaque.slots() if not ranks.replica.rank else ():
        owner, rank = runtime.opaque.owner(slot), ranks.shard.rank
        division, form = owner.division(slot), owner.division(slot).forms[rank]
        if form is None:
            continue
        entry = owner.entry(slot) or {}
        places, kept = _places(slot, entry), _own_places(division, rank)
        own: dict[int, str] = {}
        for path, tensor in opaque.leaves(entry):
            key = own[id(tensor)] = ".".join(places[path])
            if path in kept:
                continue
            if path in division.divided:
                _write_part(part, division, rank, path, tensor, places[path])
            elif rank == division.first:
                if id(tensor) not in written:
                    written[id(tensor)] = key
                    part.add_whole(key, tensor, places[path])
                own[id(tensor)] = written[id(tensor)]
        if rank != division.first:
            continue
        where, likes = f"optimizer.state of {slot.name}", (form.entry, division.whole.entry)
        codes[slot.name] = _encoded(entry, likes, where, own)
        for name, value in entry.items():
            if not opaque.leaves({"": value}):
                part.add_object(_place(slot, str(name)), value)
    return codes


def _write_part(
    part: Part,
    division: Division,
    rank: int,
    path: opaque.Path,
    tensor: torch.Tensor,
    place: tuple[str, ...],
) -> None:
    """What a rank has of a divided leaf, and its chunk has not: it may be one element."""
    (first, n), dtype = division.run(path, rank), division.whole.dtypes()[path]
    if (tensor.dtype, tensor.numel()) != (dtype, n):
        raise GeminiError(
            f"{division.name}: a rank has {tensor.numel()} elements of {tensor.dtype} of its state "
            f"{opaque.text(path)}, and should have {n} of {dtype}"
        )
    part.add_run(".".join(place), tensor, division.whole.shapes()[path], first, place)


def _encoded(value: Any, likes: tuple[Any, Any], where: str, names: Mapping[int, str]) -> Any:
    """`likes`: what the optimizer makes at this place, of what this rank has and of the whole."""
    if isinstance(value, torch.Tensor):
        if not _torch.is_wrapper_subclass(value):
            return {"stored": names[id(value)]}
        inner, said = value.__tensor_flatten__()[0], _said(value)
        if likes[0] is not likes[1]:
            if not all(map(_is_made, likes)) or said != _said(likes[0]):
                raise GeminiError(
                    f"{where} is made as {said} since its first step, and ranks have parts of it: use another "
                    "optimizer, or one rank"
                )
            said = _said(likes[1])
        parts = [
            [n, _encoded(getattr(value, n), _inside(likes, n), f"{where}.{n}", names)]
            for n in inner
        ]
        return {"made": [*said, parts]}
    if isinstance(value, dict):
        return {
            "dict": [
                [encode(k, where, []), _encoded(v, _inside(likes, k), f"{where}[{k!r}]", names)]
                for k, v in value.items()
            ]
        }
    if isinstance(value, list | tuple):
        items = [
            _encoded(v, _inside(likes, i), f"{where}[{i}]", names) for i, v in enumerate(value)
        ]
        return items if isinstance(value, list) else {"tuple": items}
    return encode(value, where, [])


def _is_made(value: Any) -> bool:
    """Of other tensors."""
    return isinstance(value, torch.Tensor) and _torch.is_wrapper_subclass(value)


def _said(tensor: Any) -> tuple[str, str]:
    """The class of a tensor that is made of others, and what it is made with, as text."""
    context = tensor.__tensor_flatten__()[1]
    return type(tensor).__name__, _ADDRESS.sub("", repr(context))


class Read:
    """An entry of a checkpoint, of a parameter of this engine; nothing of the engine has changed yet.

    Attributes:
        entry: of what this rank has of the parameter, with `views` of its chunk in it, or, where the engine has no
            place for states, whole tensors; None: it has nothing of it.
        fields: what these views are to be filled with.

    Raises:
        GeminiError: the optimizer makes another entry of the parameter.
        ValueError, KeyError, TypeError: `code` is none that `write` gives.
    """

    def __init__(self, slot: Slot, code: Any, manifest: Manifest) -> None:
        self._slot, self._manifest = slot, manifest
        owner: Any = slot.engine.opaque.owner(slot)
        self._rank, self._division = slot.engine.ranks.shard.rank, owner.division(slot)
        self._form = self._division.forms[self._rank]
        self._names = dict(_names(code, ()))
        self.fields: list[tuple[Field, Stored]] = []
        self._tensors: dict[str, torch.Tensor] = {}
        if slot.has_moments:
            self._keep({} if self._form is None else owner.views(slot))
        self.entry = None
        if self._form is not None:
            self.entry = self._decoded(code, (self._form.entry, self._division.whole.entry), ())

    def _keep(self, views: Mapping[opaque.Path, torch.Tensor]) -> None:
        """Leaves that go into chunks, and into which of this rank's views."""
        own, known = _own_places(self._division, self._rank), set()
        whole = self._division.whole
        for leaf, _ in whole.places:
            text, key = opaque.text(leaf.path), self._names.get(leaf.path)
            if key is None and not self._names:
                continue  # before a first step
            if key is None or key in known:
                raise GeminiError(f"{text} is no tensor of its own there")
            stored = self._manifest.tensors[key]
            if (stored.dtype, stored.shape) != (leaf.dtype, leaf.shape):
                raise GeminiError(
                    f"{text} is {stored.dtype} of shape {stored.shape} there and {leaf.dtype} of {leaf.shape} here"
                )
            known.add(key)
            if leaf.path in own:
                self._tensors[key] = views[leaf.path]
                run = self._division.run(leaf.path, self._rank)
                state = State((key,), self._slot, text, leaf, *own[leaf.path], run)
                self.fields.append((state, stored))
        known |= {key for path, key in self._names.items() if path in whole.devices}
        for path, key in self._names.items():
            if key not in known and self._manifest.tensors[key].numel > 1:
                raise GeminiError(f"{opaque.text(path)} is none that the optimizer makes here")

    def _stored(self, key: str, path: opaque.Path) -> torch.Tensor:
        """A tensor beside the chunk, or what this rank has of it, where the optimizer has it."""
        if key not in self._tensors:
            assert self._form is not None
            device = self._form.devices.get(path, torch.device("cpu"))
            is_part = path in self._division.divided
            made = self._part(key, path).to(device) if is_part else self._manifest.once(key, device)
            self._tensors[key] = made
        return self._tensors[key]

    def _part(self, key: str, path: opaque.Path) -> torch.Tensor:
        assert self._form is not None
        stored, shape = self._manifest.tensors[key], self._division.whole.shapes()[path]
        if stored.shape != shape:
            raise GeminiError(f"{opaque.text(path)} is of {stored.shape} there and of {shape} here")
        first, n = self._division.run(path, self._rank)
        if stored.order == tuple(range(len(shape))):
            values = self._manifest.run_of(stored, first, n)
        else:
            values = self._manifest.whole_of(stored).reshape(-1)[first : first + n].clone()
        return values.view(self._form.shapes()[path])

    def _decoded(self, code: Any, likes: tuple[Any, Any], path: opaque.Path) -> Any:
        """`likes`: as in _encoded."""
        if isinstance(code, list):
            return [self._decoded(c, _inside(likes, i), (*path, i)) for i, c in enumerate(code)]
        kind, content = _kind(code)
        if kind == "stored":
            return self._stored(content, path)
        if kind == "made":
            return self._made(*content, likes, path)
        if kind == "dict":
            pairs = [(decode(key, _no_tensor), value) for key, value in content]
            return {k: self._decoded(c, _inside(likes, k), (*path, k)) for k, c in pairs}
        if kind == "tuple":
            items = [self._decoded(c, _inside(likes, i), (*path, i)) for i, c in enumerate(content)]
            like: Any = likes[0]
            is_named = isinstance(like, tuple) and hasattr(like, "_fields")
            return type(like)(*items) if is_named else tuple(items)
        return decode(code, _no_tensor)

    def _made(
        self,
        name: str,
        context: str,
        parts: list[tuple[str, Any]],
        likes: tuple[Any, Any],
        path: opaque.Path,
    ) -> torch.Tensor:
        own, whole = likes
        if not (_is_made(own) and _is_made(whole)):
            raise GeminiError(f"{opaque.text(path)} is a {name} there, and no such tensor here")
        there = name, context, [part for part, _ in parts]
        here = *_said(whole), [*whole.__tensor_flatten__()[0]]
        if there != here:
            raise GeminiError(f"{opaque.text(path)} is made as {there} there and as {here} here")
        tensors = {p: self._decoded(c, _inside(likes, p), (*path, p)) for p, c in parts}
        made, context = type(own), own.__tensor_flatten__()[1]
        return made.__tensor_unflatten__(tensors, context, own.shape, own.stride())  # type: ignore[no-any-return]


def _kind(code: Any) -> tuple[str, Any]:
    """What a code is of, and its content; "": plain data."""
    if not isinstance(code, dict) or len(code) != 1:
        return "", code
    ((kind, content),) = code.items()
    return kind, content


def _names(code: Any, path: opaque.Path) -> Iterator[tuple[opaque.Path, str]]:
    """Names of tensors, by their places in an entry."""
    kind, content = _kind(code)
    if kind == "stored":
        yield path, content
    elif kind == "made":
        for part, inner in content[2]:
            yield from _names(inner, (*path, part))
    elif kind == "dict":
        for key, value in content:
            name = decode(key, _no_tensor)
            yield from _names(value, (*path, name))
    elif kind == "tuple" or isinstance(code, list):
        for index, item in enumerate(content):
            yield from _names(item, (*path, index))


def _inside(likes: tuple[Any, Any], key: Any) -> tuple[Any, Any]:
    return _at(likes[0], key), _at(likes[1], key)


def _at(like: Any, key: Any) -> Any:
    """What is under a key, an index or a name; None: nothing."""
    if isinstance(like, dict):
        return like.get(key)
    if isinstance(like, torch.Tensor):
        return getattr(like, key, None)
    return like[key] if isinstance(like, list | tuple) and key < len(like) else None


def _no_tensor(number: int) -> torch.Tensor:
    raise ValueError(f"tensor {number} has no name")
