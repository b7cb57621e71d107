"""The tensors of one parameter's state, whatever its optimizer makes of it: `optimizer.state[parameter]`, an entry.

An entry is a tree: dicts, lists and tuples, and tensors that are made of other tensors (`__tensor_flatten__`). Its
leaves are the plain tensors at the ends. What is no tensor, objects that hold tensors included, stays as it is.

Invariants
    1. The order of leaves depends on their paths alone, not on which key came first into a dict.
    2. A tensor that stands in several places is one leaf, at the first of its paths, and its replacement goes to all
       of them. Different tensors of one entry that have bytes in common are refused: apart, they would differ.
    3. A leaf that is kept in a chunk has its own strides there, so these must be those of memory without holes. Where
       it lies in its storage does not matter.
"""

from __future__ import annotations

import copy
import enum
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gemini_strategy import _torch
from gemini_strategy.errors import GeminiError

Path = tuple[str | int, ...]


class How(enum.IntEnum):
    """What the core asks for (csrc/engine/engine.h, gm_opaque_how)."""

    STEP = 0
    AHEAD = 1  # what the step may be, in the same place
    TAKE = 2  # the step is what was made ahead


class When(enum.IntEnum):
    """When the core may ask for it (gm_opaque_when)."""

    AT_STEP = 0
    DEFERRED = 1
    SPECULATED = 2


_ALIGN = 512  # bytes: as torch's allocator places a tensor


@dataclass(frozen=True)
class Leaf:
    """A plain tensor of an entry, without its values."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, path: Path, tensor: torch.Tensor) -> Leaf:
        """What is to be kept of a tensor.

        Raises:
            GeminiError: its elements share bytes, or have bytes of others between them.
        """
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        dense = 1
        for step, n in sorted(zip(stride, shape, strict=True)):
            if n > 1 and step != dense:
                raise GeminiError(
                    f"state {text(path)} of shape {shape} has strides {stride}, which leave holes between elements or "
                    "let them share memory: keep .contiguous() of it in the optimizer's state"
                )
            dense *= n
        return cls(path, tensor.dtype, shape, stride)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def text(path: Path) -> str:
    """As people write it: exp_avg.codes."""
    return ".".join(str(part) for part in path)


def is_kept_in_chunk(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a leaf goes where its parameter goes.

    Counters, what is on another device, and all of a parameter without elements, which goes nowhere, stay where they
    are.
    """
    is_large = tensor.numel() > 1 and parameter.numel() > 0
    return is_large and tensor.device == parameter.device


@dataclass(frozen=True)
class Form:
    """What an optimizer makes of one parameter.

    Attributes:
        places: the leaves that its chunk has, and where each begins among the parameter's bytes there.
        nbytes: of all of them.
        entry: with meta tensors as leaves.
        devices: where the leaves are.
        shared: paths of tensors that stay in Python, whatever their size.
    """

    places: tuple[tuple[Leaf, int], ...]
    nbytes: int
    entry: Any
    devices: Mapping[Path, torch.device]
    shared: frozenset[Path]

    def shapes(self) -> dict[Path, tuple[int, ...]]:
        """Likewise."""
        return {path: tuple(tensor.shape) for path, tensor in leaves(self.entry)}

    def dtypes(self) -> dict[Path, torch.dtype]:
        """Of all leaves, in the chunk or not."""
        return {path: tensor.dtype for path, tensor in leaves(self.entry)}

    def __str__(self) -> str:
        found = (
            f"{text(leaf.path)} ({leaf.dtype} of shape {leaf.shape})" for leaf, _ in self.places
        )
        return ", ".join(found) or "none"

    @classmethod
    def of(cls, found: tuple[Leaf, ...], entry: Any, devices: Mapping[Path, torch.device]) -> Form:
        places, end = [], 0
        for leaf in found:
            places.append((leaf, end))
            end += (leaf.nbytes + _ALIGN - 1) // _ALIGN * _ALIGN
        own = {leaf.path for leaf in found}
        shared = frozenset(path for path in devices if path not in own)
        return cls(tuple(places), end, entry, devices, shared)


def leaves(entry: Any) -> list[tuple[Path, torch.Tensor]]:
    """Paths and plain tensors.

    Raises:
        GeminiError: a tensor of a class that cannot be taken apart, a sparse one, two with bytes in common, or a key of
            a dict that is neither text nor a number.
    """
    found: dict[int, tuple[Path, torch.Tensor]] = {}
    for path, tensor in _walk(entry, ()):
        found.setdefault(id(tensor), (path, tensor))
    spans: dict[int, list[tuple[int, int, Path]]] = {}
    for path, tensor in found.values():
        first = int(tensor.storage_offset()) * tensor.itemsize
        reach = sum(
            int((n - 1) * step) for n, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
        if tensor.numel():
            span = first, first + (reach + 1) * tensor.itemsize, path
            spans.setdefault(_torch.storage_id(tensor.untyped_storage()), []).append(span)
    for together in spans.values():
        together.sort(key=lambda span: span[:2])
        for (_, end, one), (begin, _, other) in itertools.pairwise(together):
            if begin < end:
                raise GeminiError(
                    f"states {text(one)} and {text(other)} of one parameter share memory ({end - begin} bytes), and "
                    "would be kept apart: clone one of them in the optimizer's state"
                )
    return list(found.values())


def with_leaves(entry: Any, replacements: Mapping[Path, torch.Tensor]) -> Any:
    """An entry of the same form that has these tensors in place of leaves; leaves that are not named stay.

    Raises:
        GeminiError: a path that names no leaf.
    """
    found = leaves(entry)
    unknown = replacements.keys() - {path for path, _ in found}
    if unknown:
        raise GeminiError(
            f"state {text(min(unknown, key=str))} is none of the parameter's, which are "
            f"{', '.join(text(path) for path, _ in found) or 'none'}"
        )
    return _rebuilt(entry, {id(tensor): replacements.get(path, tensor) for path, tensor in found})


def shared(entries: Iterable[Any]) -> set[Path]:
    """Paths of leaves that several parameters' entries have in one storage, such as tables of a quantization.

    They belong to the optimizer, not to a parameter.
    """
    owners: dict[int, list[tuple[int, Path]]] = {}
    for number, entry in enumerate(entries):
        for path, tensor in leaves(entry):
            if tensor.numel():
                owner = owners.setdefault(_torch.storage_id(tensor.untyped_storage()), [])
                owner.append((number, path))
    return {
        path
        for owner in owners.values()
        if len({number for number, _ in owner}) > 1
        for _, path in owner
    }


def _inner(tensor: Any) -> dict[str, torch.Tensor]:
    """What a tensor is made of."""
    return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}


def _walk(value: Any, path: Path) -> Iterator[tuple[Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if _torch.is_wrapper_subclass(value):
            yield from _walk(_inner(value), path)
            return
        if type(value) not in (torch.Tensor, nn.Parameter, _torch.FakeTensor):
            raise GeminiError(
                f"state {text(path)} is a {type(value).__name__}, a class of tensors without __tensor_flatten__, which "
                "cannot be taken apart: use an optimizer whose states are plain tensors"
            )
        if value.layout is not torch.strided:
            raise GeminiError(
                f"state {text(path)} has the layout {value.layout}, and only strided tensors are kept: use an "
                "optimizer whose states are dense"
            )
        yield path, value
    elif isinstance(value, dict):
        for key in sorted(value, key=lambda key: (type(key).__name__, str(key))):
            inside = _walk(value[key], (*path, key))
            if isinstance(key, str | int):
                yield from inside
            elif next(inside, None) is not None:
                raise GeminiError(
                    f"state {text(path)} has tensors under {key!r}, a {type(key).__name__}, and a state is named by "
                    "text and whole numbers: use an optimizer whose states are so"
                )
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _walk(item, (*path, index))


def _rebuilt(value: Any, tensors: Mapping[int, torch.Tensor]) -> Any:
    """`tensors`: what stands for each plain tensor, by its id(). What has no tensors in it is shared."""
    if isinstance(value, torch.Tensor):
        if not _torch.is_wrapper_subclass(value):
            return tensors[id(value)]
        wrapper: Any = value
        inner = _rebuilt(_inner(value), tensors)
        context = wrapper.__tensor_flatten__()[1]
        return type(wrapper).__tensor_unflatten__(inner, context, value.shape, value.stride())
    if not isinstance(value, dict | list | tuple) or next(_walk(value, ()), None) is None:
        return value
    if isinstance(value, tuple):
        items = [_rebuilt(item, tensors) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    made: Any = copy.copy(value)
    for key in value if isinstance(value, dict) else range(len(value)):
        made[key] = _rebuilt(value[key], tensors)
    return made
