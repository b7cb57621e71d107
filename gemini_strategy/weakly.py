"""Objects that are known for as long as a program has them.

The containers of Python's `weakref` run a function of Python when an object dies, wherever that is: between torch's C++
and its caller, say, where Python drops what a signal's handler raises. Here nothing runs then. What has died is passed
over, and goes when something is added.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class WeakTable(Generic[K, V]):
    """Objects by their identity, each with a value, in the order in which they came."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[K], V]] = {}
        self._most = 16  # entries, before those that have died are looked for

    def __setitem__(self, key: K, value: V) -> None:
        if len(self._entries) >= self._most:
            for number, (reference, _) in list(self._entries.items()):
                if reference() is None:
                    self._entries.pop(number, None)
            self._most = 2 * len(self._entries) + 16
        self._entries[id(key)] = weakref.ref(key), value

    def get(self, key: K) -> V | None:
        entry = self._entries.get(id(key))
        return entry[1] if entry is not None and entry[0]() is key else None

    def discard(self, key: K) -> None:
        if key in self:
            self._entries.pop(id(key), None)

    def clear(self) -> None:
        self._entries.clear()

    def __contains__(self, key: K) -> bool:
        entry = self._entries.get(id(key))
        return entry is not None and entry[0]() is key

    def __iter__(self) -> Iterator[K]:
        for reference, _ in list(self._entries.values()):
            key = reference()
            if key is not None:
                yield key

    def __len__(self) -> int:
        return sum(1 for _ in self)


class WeakSet(WeakTable[K, None]):
    """The same without values."""

    def add(self, key: K) -> None:
        if key not in self:
            self[key] = None


def weak_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls a bound method, and does not keep its object."""
    reference, function = weakref.ref(method.__self__), method.__func__  # type: ignore[attr-defined]

    def call(*args: Any) -> Any:
        return function(reference(), *args)

    return call
