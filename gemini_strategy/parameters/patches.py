"""What is patched in torch for the process: put on for the first engine, and torch's own again after the last.

Invariants
    1. Every patch is on while manage() runs, an engine is open, or a tensor is absent: one that
       outlives its engine is served, or refused by name, as before.
    2. What is taken off leaves the very object that was found, in the place where it was.
    3. Where another program has patched the attribute since, its patch stays on top and ours below:
       to take ours off would undo both. Without an engine ours calls what it was put before, and
       does nothing else. When the other program puts ours back, the next engine has it again.
    4. A child that is forked while another thread has the lock does not wait for that thread.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from gemini_strategy.parameters import absent
from gemini_strategy.weakly import WeakSet

_NOTHING = object()
# A signal's handler may come in a thread that has it.
_lock = threading.RLock()
_opening: WeakSet[_Opening] = WeakSet()
_patches: dict[tuple[int, str], _Patch] = {}  # in the order in which they are put on
_n_asked = 0  # calls of look_again since the last look


class _Opening:
    """A manage() that runs. It goes with its frame, wherever an error comes."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()


class _Worn(NamedTuple):
    """What was put in an attribute's place.

    Attributes:
        found: what its owner had itself; _NOTHING where it inherits.
        original: what it was, inherited or not.
    """

    own: Any
    found: Any
    original: Any


class _Patch:
    """One attribute of a class or a module, or what a cell holds.

    Attributes:
        makes: by their tags: each gets what the one before has made, the first the original.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name
        self.makes: dict[Any, Callable[[Any], Any]] = {}
        # One for each original: torch may know it by identity, and another program may put it back.
        self._worn: list[_Worn] = []

    def _there(self) -> Any:
        is_cell = not hasattr(self._owner, "__dict__")
        return self._owner.cell_contents if is_cell else vars(self._owner).get(self._name, _NOTHING)

    def _on_top(self) -> _Worn | None:
        there = self._there()
        return next((worn for worn in self._worn if worn.own is there), None)

    def put_on(self) -> None:
        if self._on_top() is not None:
            return
        found = self._there()
        original = getattr(self._owner, self._name) if found is _NOTHING else found
        worn = next((worn for worn in self._worn if worn.original is original), None)
        if worn is None:
            own = functools.reduce(lambda own, make: make(own), self.makes.values(), original)
            worn = _Worn(own, found, original)
            self._worn.append(worn)
        setattr(self._owner, self._name, worn.own)

    def make_also(self, make: Callable[[Any], Any], tag: Any) -> None:
        self.take_off()
        self._worn.clear()
        self.makes[tag] = make

    def take_off(self) -> None:
        worn = self._on_top()
        if worn is None:
            return
        if worn.found is _NOTHING:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, worn.found)


def add(owner: Any, name: str, make: Callable[[Any], Any], tag: Any = None) -> None:
    """`make` gets what `owner` has under `name`, and gives what takes its place while an engine is open.

    The second time for one owner, name and tag nothing is added.
    """
    with _lock:
        patch = _patches.setdefault((id(owner), name), _Patch(owner, name))
        if tag not in patch.makes:
            patch.make_also(make, tag)
            if _is_needed():
                patch.put_on()


def put_on() -> None:
    """Every patch is on: the caller has an absent tensor."""
    with _lock:
        for patch in list(_patches.values()):
            patch.put_on()


@contextlib.contextmanager
def opening() -> Iterator[None]:
    """Inside, an engine is made: every patch is on."""
    own = _Opening()
    _opening.add(own)
    try:
        put_on()
        yield
    finally:
        _opening.discard(own)
        take_off()


def _is_needed() -> bool:
    return len(_opening) > 0 or absent.is_in_use()


def take_off() -> None:
    """Every patch is off, unless something needs it."""
    with _lock:
        if not _is_needed():
            for patch in reversed(list(_patches.values())):
                patch.take_off()


def look_again() -> None:
    """The same, called by doors without an engine: no code runs when an absent tensor dies."""
    global _n_asked
    _n_asked += 1
    if _n_asked > absent.n_storages():  # which are all looked at
        _n_asked = 0
        take_off()


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()
    for each in list(_opening):
        if each.thread != threading.get_ident():
            _opening.discard(each)


os.register_at_fork(after_in_child=_after_fork)
