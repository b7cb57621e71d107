"""What the tests of the guard share: doors, and walking one managed and unmanaged.

A door is a function of a run.  It is walked under the engine and on the unmanaged reference at the same
point of the same training.  Under the engine it must give the same value, bit for bit, or refuse with an
error that names the parameter (only where `refusable`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

import gemini_strategy as gs
from helpers.reference import Plain, Recipe, assert_same_bits, managed, tightly
from helpers.zoo import Case, mlp_case

CASE = mlp_case(width=32, depth=3)
WEIGHT = "blocks.1.1.weight"
OTHER = "head.weight"
PLACEMENTS = ("cpu", "tight")


@dataclass(frozen=True)
class Door:
    name: str
    walk: Callable[[Plain], Any]
    refusable: bool = False
    needs_all: bool = False  # shows all weights at once: a tight budget may refuse it by name

    def __repr__(self) -> str:
        return self.name


def door(doors: list[Door], **how: Any) -> Callable[[Callable], Callable]:
    """Adds the decorated function to a list of doors."""

    def add(walk: Callable) -> Callable:
        doors.append(Door(walk.__name__.strip("_"), walk, **how))
        return walk

    return add


def param(run: Plain, name: str = WEIGHT) -> nn.Parameter:
    """A parameter by name."""
    return run.model.get_parameter(name)


def params(run: Plain) -> list[nn.Parameter]:
    """All parameters."""
    return list(run.model.parameters())


def same(got: Any, want: Any, what: str = "value") -> None:
    """Equal values; tensors by their bits."""
    if isinstance(want, Tensor):
        assert_same_bits(got, want, what)
    elif isinstance(want, dict):
        assert list(got) == list(want), what
        for key in want:
            same(got[key], want[key], f"{what}[{key}]")
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), what
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            same(a, b, f"{what}[{i}]")
    elif isinstance(want, np.ndarray):
        assert got.dtype == want.dtype and np.array_equal(got, want), what
    else:
        assert got == want, f"{what}: {got!r}, expected {want!r}"


def start_at(placement: str, recipe: Recipe, case: Case = CASE, floor: float = 0.05) -> Plain:
    """A managed run: policy "cpu", or "tight": the smallest budget that is accepted.

    The model comes in the dtypes of the reference, which is cast: so both leave in the same ones.
    """

    def build() -> nn.Module:
        return gs.cast_model_(case.build(), recipe.precision)

    if placement == "cpu":
        return managed(build, recipe, chunk_size=4096, placement_policy="cpu")
    return tightly(build, recipe, floor=floor, chunk_size=4096)


def names_a_parameter(run: Plain, error: Exception) -> bool:
    """Whether the text has a parameter's name."""
    return any(name in str(error) for name, _ in run.model.named_parameters())


def walk_both(door: Door, run: Plain, reference: Plain) -> None:
    """The same value from both, or a refusal that may be."""
    try:
        got = door.walk(run)
    except gs.GeminiError as error:
        has_no_room = door.needs_all and isinstance(error, gs.GeminiMemoryError)
        assert door.refusable or has_no_room, f"{door.name} was refused: {error}"
        assert names_a_parameter(run, error), f"the refusal names no parameter: {error}"
        return
    except TypeError as error:
        assert door.refusable, f"{door.name} was refused: {error}"
        return
    same(got, door.walk(reference), door.name)
