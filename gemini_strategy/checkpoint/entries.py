"""States of an optimizer that steps by itself, in a checkpoint: tensors by name, and how an entry is made of them.

Of each parameter's entry the checkpoint has every tensor that it leads to, once, under the parameter's name and the
tensor's path. A tensor that several parameters have (a table of a quantization) is there once, too, under the first of
them. The manifest has the rest of the entry as plain data, with names in the place of tensors. A tensor that is made of
others is made again by the class that this optimizer has there now: no class is named to be loaded.
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
from gemini_strategy.parameters.slot import Slot

if TYPE_CHECKING:
    from gemini_strategy.checkpoint.parts import Part
    from gemini_strategy.runtime import Runtime

_ADDRESS = re.compile(r"0x[0-9a-f]+")


@dataclass(frozen=True)
class State(Field):
    """A leaf of a parameter's states that its chunk has.

    Attributes:
        leaf: what it is; at: where it begins among the parameter's bytes there.
    """

    leaf: Leaf
    at: int

    @property
    def dtype(self) -> torch.dtype:
        return self.leaf.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.leaf.shape

    @property
    def strides(self) -> tuple[int, ...]:
        return self.leaf.stride

    def part(self) -> tuple[int, int]:
        return 0, self.numel

    def read(self, first: int, n: int) -> torch.Tensor:
        return self._copied(self.slot.engine.core.states_read, first, n)[0]

    def read_saved(self, first: int, n: int) -> torch.Tensor | None:
        values, is_read = self._copied(self.slot.engine.core.save_states, first, n)
        return values if is_read else None

    def _copied(self, read: Callable[..., Any], first: int, n: int) -> tuple[torch.Tensor, Any]:
        values = torch.empty(n, dtype=self.dtype, device="cpu")
        at, width = self.at, self.dtype.itemsize
        return values, read(self.slot.id, at + first * width, n * width, values.data_ptr())

    def fill(self, first: int, values: torch.Tensor) -> None:
        core, width = self.slot.engine.core, self.dtype.itemsize
        values = values.to(self.dtype).contiguous()
        place = self.at + first * width, values.numel() * width
        core.states_write(self.slot.id, *place, values.data_ptr(), self.slot.engine.stream())


def check(runtime: Runtime) -> None:
    """Refuses what cannot be saved or loaded yet.

    Raises:
        GeminiError: several ranks have parts of the states.
    """
    if runtime.opaque is not None and runtime.ranks.shard.size > 1:
        kinds = " and ".join(member.kind.__name__ for member in runtime.opaque.members)
        raise GeminiError(
            f"the states of {kinds} are in parts on {runtime.ranks.shard.size} ranks, and engine.save() and load() "
            "take those of ranks that have the whole alone: use torch.save() with engine.state_dict(rank0_only=True), "
            "or enable_distributed_storage=False"
        )


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
        found[path] = ("optimizer_0", "state", slot.name, *parts)
    return found


def fields(runtime: Runtime) -> Iterator[State]:
    """All that the chunks have."""
    for slot in runtime.opaque.slots() if runtime.opaque is not None else ():
        owner = runtime.opaque.owner(slot)
        places = _places(slot, owner.entry(slot))
        for leaf, at in owner.form(slot).places:
            if leaf.path in places:
                yield State(places[leaf.path], slot, opaque.text(leaf.path), leaf, at)


def write(runtime: Runtime, part: Part) -> dict[str, Any]:
    """What is beside `fields`; gives, by the parameter's name, how entries are made."""
    written: dict[int, str] = {}  # names of tensors, by their id()
    codes = {}
    for slot in runtime.opaque.slots():
        owner = runtime.opaque.owner(slot)
        entry = owner.entry(slot) or {}
        places = _places(slot, entry)
        kept = {leaf.path for leaf, _ in owner.form(slot).places}
        own: dict[int, str] = {}
        for path, tensor in opaque.leaves(entry):
            key = ".".join(places[path])
            if path not in kept and id(tensor) not in written:
                written[id(tensor)] = key
                part.add_whole(key, tensor, places[path])
            own[id(tensor)] = key if path in kept else written[id(tensor)]
        codes[slot.name] = _encoded(entry, f"optimizer.state of {slot.name}", own)
        for name, value in entry.items():
            if not opaque.leaves({"": value}):
                part.add_object(("optimizer_0", "state", slot.name, str(name)), value)
    return codes


def _encoded(value: Any, where: str, names: Mapping[int, str]) -> Any:
    if isinstance(value, torch.Tensor):
        if not _torch.is_wrapper_subclass(value):
            return {"stored": names[id(value)]}
        inner, context = value.__tensor_flatten__()
        parts = [[n, _encoded(getattr(value, n), f"{where}.{n}", names)] for n in inner]
        return {"made": [*_said(value, context), parts]}
    if isinstance(value, dict):
        return {
            "dict": [
                [encode(k, where, []), _encoded(v, f"{where}[{k!r}]", names)]
                for k, v in value.items()
            ]
        }
    if isinstance(value, list | tuple):
        items = [_encoded(v, f"{where}[{i}]", names) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    return encode(value, where, [])


def _said(tensor: torch.Tensor, context: Any) -> tuple[str, str]:
    """The class of a tensor that is made of others, and what it is made with, as text."""
    return type(tensor).__name__, _ADDRESS.sub("", repr(context))


class Read:
    """An entry of a checkpoint, of a parameter of this engine; nothing of the engine has changed yet.

    Attributes:
        entry: with `views` of the parameter's chunk in it, or, where the engine has no place for states, whole tensors.
        fields: what these views are to be filled with.

    Raises:
        GeminiError: the optimizer makes another entry of the parameter.
        ValueError, KeyError, TypeError: `code` is none that `write` gives.
    """

    def __init__(self, slot: Slot, code: Any, manifest: Manifest) -> None:
        self._slot, self._manifest = slot, manifest
        owner: Any = slot.engine.opaque.owner(slot)
        self._form = owner.form(slot)
        self._names = dict(_names(code, ()))
        self.fields: list[tuple[Field, Stored]] = []
        self._tensors: dict[str, torch.Tensor] = {}
        if slot.has_moments:
            self._keep(owner.views(slot))
        self.entry = self._decoded(code, self._form.entry, ())

    def _keep(self, views: Mapping[opaque.Path, torch.Tensor]) -> None:
        """Leaves that go into the chunk."""
        for leaf, at in self._form.places:
            text, key = opaque.text(leaf.path), self._names.get(leaf.path)
            if key is None and not self._names:
                continue  # before a first step
            if key is None or key in self._tensors:
                raise GeminiError(f"{text} is no tensor of its own there")
            stored = self._manifest.tensors[key]
            if (stored.dtype, stored.shape) != (leaf.dtype, leaf.shape):
                raise GeminiError(
                    f"{text} is {stored.dtype} of shape {stored.shape} there and {leaf.dtype} of {leaf.shape} here"
                )
            self._tensors[key] = views[leaf.path]
            self.fields.append((State((key,), self._slot, text, leaf, at), stored))
        for path, key in self._names.items():
            is_large = self._manifest.tensors[key].numel > 1
            if key not in self._tensors and path not in self._form.devices and is_large:
                raise GeminiError(f"{opaque.text(path)} is none that the optimizer makes here")

    def _stored(self, key: str, path: opaque.Path) -> torch.Tensor:
        """A tensor beside the chunk, where the optimizer has it."""
        if key not in self._tensors:
            device = self._form.devices.get(path, torch.device("cpu"))
            self._tensors[key] = self._manifest.once(key, device)
        return self._tensors[key]

    def _decoded(self, code: Any, like: Any, path: opaque.Path) -> Any:
        """`like`: what the optimizer makes at this place."""
        if isinstance(code, list):
            return [self._decoded(c, _at(like, i), (*path, i)) for i, c in enumerate(code)]
        kind, content = _kind(code)
        if kind == "stored":
            return self._stored(content, path)
        if kind == "made":
            return self._made(*content, like, path)
        if kind == "dict":
            pairs = [(decode(key, _no_tensor), value) for key, value in content]
            return {k: self._decoded(c, _at(like, k), (*path, k)) for k, c in pairs}
        if kind == "tuple":
            items = [self._decoded(c, _at(like, i), (*path, i)) for i, c in enumerate(content)]
            is_named = isinstance(like, tuple) and hasattr(like, "_fields")
            return type(like)(*items) if is_named else tuple(items)
        return decode(code, _no_tensor)

    def _made(
        self, name: str, context: str, parts: list[tuple[str, Any]], like: Any, path: opaque.Path
    ) -> torch.Tensor:
        if not (isinstance(like, torch.Tensor) and _torch.is_wrapper_subclass(like)):
            raise GeminiError(f"{opaque.text(path)} is a {name} there, and no such tensor here")
        inner, own = like.__tensor_flatten__()
        there, here = (name, context, [part for part, _ in parts]), (*_said(like, own), [*inner])
        if there != here:
            raise GeminiError(f"{opaque.text(path)} is made as {there} there and as {here} here")
        tensors = {
            part: self._decoded(code, getattr(like, part), (*path, part)) for part, code in parts
        }
        made: Any = type(like)
        return made.__tensor_unflatten__(tensors, own, like.shape, like.stride())  # type: ignore[no-any-return]


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


def _at(like: Any, key: Any) -> Any:
    """What is under a key or an index; None: nothing."""
    if isinstance(like, dict):
        return like.get(key)
    return like[key] if isinstance(like, list | tuple) and key < len(like) else None


def _no_tensor(number: int) -> torch.Tensor:
    raise ValueError(f"tensor {number} has no name")
