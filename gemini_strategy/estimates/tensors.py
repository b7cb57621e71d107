"""The tensors of a step that has no bytes: how much of them is alive at each moment, and what each operation works.

Invariants
    1. Bytes are those of storages: views add none, and a storage counts from the operation that made it until nothing
       holds it any more, autograd's saved tensors included.
    2. Parameters are not counted: they are in chunks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from gemini_strategy import _torch
from gemini_strategy._torch import tree_flatten, tree_map

_ROUNDED = 512  # what torch's allocator on CUDA rounds to
HALF = (torch.bfloat16, torch.float16)
_HALFWAY = torch.full((), 0.5)  # what a single random number is taken for


@dataclass(frozen=True, slots=True)
class Work:
    """What one operation does.

    Attributes:
        flops: of matrix products and attention; 0 for others.
        is_half: its products have bf16 or fp16 operands.
        moved: bytes that it reads and writes.
    """

    flops: float
    is_half: bool
    moved: int


class _Reference(weakref.ref):  # type: ignore[type-arg]
    """To a storage. key: its id; number: its own; size: bytes that are counted."""

    __slots__ = ("key", "number", "size")
    key: int
    number: int
    size: int


class Live:
    """Storages that are alive, of which each is counted once.

    Attributes:
        now, most: bytes, rounded as torch's allocator does.
        events: (storage, bytes) where one begins, (storage, 0) where it ends; see memory/segments.py.
    """

    def __init__(self) -> None:
        self._now = self.most = 0
        self._events: list[tuple[int, int]] = []
        self._known: dict[int, _Reference] = {}  # by the storage's id
        self._ended: list[_Reference] = []  # since it was last looked at
        self._exempt: set[int] = set()
        self._n = 0

    def exempt(self, tensor: torch.Tensor) -> None:
        """The tensor's storage is not counted; it has to live as long as this."""
        self._exempt.add(_torch.storage_id(tensor.untyped_storage()))

    def note(self, tensor: torch.Tensor) -> bool:
        """Counts the tensor's storage, unless it is known; whether it is new."""
        self._settle()
        storage = tensor.untyped_storage()
        key = _torch.storage_id(storage)
        if key in self._known or key in self._exempt:
            return False
        size = -(-storage.nbytes() // _ROUNDED) * _ROUNDED
        if size == 0:
            return False
        # C puts what dies into the list: a function of Python would run inside torch's C++, where Python drops what a
        # signal's handler raises.
        reference = self._known[key] = _Reference(storage, self._ended.append)
        reference.key, reference.number, reference.size = key, self._n, size
        self._n += 1
        self._now += size
        self.most = max(self.most, self._now)
        self._events.append((reference.number, size))
        return True

    def _settle(self) -> None:
        """Counts what has died since."""
        while self._ended:
            reference = self._ended.pop(0)
            del self._known[reference.key]
            self._now -= reference.size
            self._events.append((reference.number, 0))

    @property
    def now(self) -> int:
        self._settle()
        return self._now

    @property
    def events(self) -> list[tuple[int, int]]:
        self._settle()
        return self._events

    def kept(self) -> set[int]:
        """Those that are alive now, by their numbers in `events`."""
        self._settle()
        return {reference.number for reference in self._known.values()}


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor))


def _bytes(tensor: torch.Tensor) -> int:
    """That an operation moves: an expanded tensor is read as often as it has elements of its own."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _with_all_heads(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Of attention with grouped heads the arguments as if each head had a key of its own: that many products it takes.

    Not every torch's counter knows groups.
    """
    if "dot_product" not in func.overloadpacket.__name__:
        return args
    heads = max(t.shape[1] for t in _tensors(args) if t.dim() == 4)

    def widened(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() != 4 or value.shape[1] == heads:
            return value
        return value.new_empty(value.shape[0], heads, *value.shape[2:])

    return tree_map(widened, args)


class Operations(_torch.DispatchMode):
    """Sees every operation below autograd, while it is entered inside a FakeTensorMode.

    Args:
        live: counts what they make.
        note: called with the work of each operation that does any.
    """

    def __init__(self, live: Live, note: Callable[[Work], None]) -> None:
        super().__init__()
        self._live = live
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        made = [t for t in _tensors(out) if not t.is_sparse]
        if func is torch.ops.aten.rand.default and made[0].dim() == 0:
            # Of FakeTensor: a layer is dropped if chance says so more often than not.
            made[0].constant = _HALFWAY
        is_new = False
        for tensor in made:
            is_new |= self._live.note(tensor)
        counter = flop_registry.get(func.overloadpacket)
        is_written = func.overloadpacket.__name__.endswith("_") or "out" in kwargs
        if is_new or is_written or counter is not None:
            read = list(_tensors((args, kwargs)))
            flops = 0.0
            if counter is not None:
                flops = float(counter(*_with_all_heads(func, args), **kwargs, out_val=out))
            is_half = any(t.dtype in HALF for t in read)
            self._note(Work(flops, is_half, sum(map(_bytes, read)) + sum(map(_bytes, made))))
        return out
