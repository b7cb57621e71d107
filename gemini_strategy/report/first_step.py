"""How far the first step is: it is served on demand and slow, and until it ends nothing else shows that it goes on.

Invariants
    1. In each of its passes a module counts once when it is first entered, and once when its first gradient has come.
    2. Units are watched from manage() to the end of the first step, and only where a terminal shows the bar.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from gemini_strategy import _torch
from gemini_strategy.report.progress import Bar, bar, is_watched

if TYPE_CHECKING:
    from gemini_strategy.parameters.hooks import Unit
    from gemini_strategy.parameters.slot import Slot


class FirstStep:
    """The bar of a first step, a new one for each pass: how many passes there will be is not known.

    Args:
        units: of the engine; those without trained parameters count in the forward only.
        rank: of this process; 0 shows.

    Attributes:
        is_watched: whether gradients should be told to `note_grad`.
    """

    def __init__(self, units: Iterable[Unit], rank: int) -> None:
        self._units = [unit for unit in units if not unit.is_for_evaluation]
        self._units_of: dict[Slot, list[Unit]] = {}
        for unit in self._units:
            for slot in unit.slots:
                if slot.has_grad_home:
                    self._units_of.setdefault(slot, []).append(unit)
        with_grads = {unit for found in self._units_of.values() for unit in found}
        self._total = len(self._units) + len(with_grads)
        self._bar: Bar | None = None
        self._n_passes = 0
        self._entered: set[Unit] = set()
        self._got: set[Unit] = set()
        self.is_watched = is_watched(rank)
        for unit in self._units if self.is_watched else ():
            unit.enter_by(types.MethodType(functools.partial(self._enter, unit.enter), unit))

    def interrupt(self) -> None:
        """The pass has ended, by an error or otherwise."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self._entered.clear()
        self._got.clear()

    def end(self) -> None:
        """The step has ended, or never will. Idempotent."""
        self.interrupt()
        for unit in self._units if self.is_watched else ():
            unit.enter_by(None)
        self.is_watched = False

    def _enter(self, enter: Any, unit: Unit) -> None:
        enter()
        if not torch.is_grad_enabled():
            return
        if self._got and _torch.current_node() is None:  # a forward after a backward
            self.interrupt()
        if self._bar is None:
            self._n_passes += 1
            number = f", pass {self._n_passes}" if self._n_passes > 1 else ""
            self._bar = bar(f"Gemini: the first step{number}", self._total, " modules")
        self._note(unit, self._entered)

    def note_grad(self, slot: Slot) -> None:
        for unit in self._units_of.get(slot, ()):
            self._note(unit, self._got)

    def _note(self, unit: Unit, known: set[Unit]) -> None:
        if unit not in known:
            known.add(unit)
            if self._bar is not None:
                self._bar.update(1)
