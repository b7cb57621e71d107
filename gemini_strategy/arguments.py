"""Arguments, checked: each that is refused raises ValueError with the call, its name, its value and what is allowed.

What manage() and the Lightning strategy both take is checked here once.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

import torch

from gemini_strategy.choices import POLICIES
from gemini_strategy.sizes import parse_bytes

LOSS_SCALING = (  # the arguments of LossScaler, which all that make one take too
    "initial_scale",
    "min_scale",
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "hysteresis",
    "max_scale",
)
MISSING = ("refuse", "init")  # for parameters on the meta device that the weights do not name


class Arguments:
    """What one call was given, by name.

    Args:
        call: what was called, for the errors.
        given: the arguments; others than those that are checked may be among them.
    """

    def __init__(self, call: str, given: Mapping[str, Any]) -> None:
        self.call = call
        self.given = given

    def check(self, is_valid: bool, name: str, allowed: str) -> None:
        if not is_valid:
            raise ValueError(f"{self.call}({name}={self.given[name]!r}): expected {allowed}.")

    def check_bool(self, *names: str) -> None:
        for name in names:
            self.check(isinstance(self.given[name], bool), name, "True or False")

    def check_choice(self, name: str, choices: tuple[Any, ...]) -> None:
        value = self.given[name]
        is_valid = any(value is choice or value == choice for choice in choices)
        self.check(is_valid, name, f"one of {', '.join(repr(choice) for choice in choices)}")

    def check_count(self, name: str, is_optional: bool = False) -> None:
        value = self.given[name]
        is_valid = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        allowed = f"{'None or ' if is_optional else ''}an int of at least 1"
        self.check(is_valid or (is_optional and value is None), name, allowed)

    def check_number(
        self, name: str, low: float, high: float | None, is_exclusive: bool = False
    ) -> None:
        value = self.given[name]
        is_valid = isinstance(value, int | float) and not isinstance(value, bool)
        if is_valid and is_exclusive:
            is_valid = value > low and (high is None or value < high)
        elif is_valid:
            is_valid = value >= low and (high is None or value <= high)
        between = "more than" if is_exclusive else "at least"
        below = "" if high is None else f" and {'less than' if is_exclusive else 'at most'} {high}"
        self.check(is_valid and value == value, name, f"a number {between} {low}{below}")

    def check_size(self, name: str, of_total: bool = False) -> None:
        if self.given[name] is None:
            return
        fraction = ", or a fraction of what there is in (0, 1]" if of_total else ""
        try:
            parse_bytes(self.given[name], 1 << 40 if of_total else None, name)
        except (ValueError, TypeError) as error:
            _, asks, meant = str(error).partition(": did you mean ")
            raise ValueError(
                f"{self.call}({name}={self.given[name]!r}): expected None, a positive int of bytes, or a string such "
                f"as '64MiB' or '24GB'{fraction}.{asks.replace(': d', ' D')}{meant}"
            ) from error

    def check_paths(self, name: str) -> None:
        value = self.given[name]
        paths = value.values() if isinstance(value, Mapping) else [value]
        is_valid = value is None or all(isinstance(path, str | os.PathLike) for path in paths)
        self.check(is_valid, name, "None, a path, or a mapping of submodules' names to paths")


Call = TypeVar("Call", bound=Callable[..., Any])


def refuse_unknown(call: str, function: Callable[..., Any], given: Iterable[str]) -> None:
    """Raises TypeError for a name that `function` does not take, with the one that is most like it."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]
    for name in given:
        if name not in known:
            parts = [each for each in known if name in each]  # 'budget' is a part of two
            near = " or ".join(map(repr, parts or difflib.get_close_matches(name, known, n=1)))
            meant = f"; did you mean {near}?" if near else f"; there are {', '.join(known)}"
            raise TypeError(f"{call}() has no argument {name!r}{meant}")


def suggesting(function: Call) -> Call:
    """The function, whose unknown arguments are refused with the one that was probably meant."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        refuse_unknown(function.__name__, function, kwargs)
        _refuse_unnamed(function, args)
        return function(*args, **kwargs)

    return cast(Call, called)


def _refuse_unnamed(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Raises TypeError for an argument that has to be named, with the name of a budget for what may be one."""
    kinds = inspect.signature(function).parameters.values()
    names = [each.name for each in kinds if each.kind is each.POSITIONAL_OR_KEYWORD]
    if len(args) <= len(names):
        return
    first = args[len(names)]
    is_size = isinstance(first, int | float | str) and not isinstance(first, bool)
    meant = f": did you mean device_budget={first!r}?" if is_size else ""
    raise TypeError(
        f"{function.__name__}() takes {' and '.join(names)} by their place, and all else by name, got {first!r}{meant}"
    )


def check_management(call: str, given: Mapping[str, Any]) -> None:
    """The arguments that manage() and the strategy both take, but timeout and mesh, whose forms differ."""
    arguments = Arguments(call, given)
    booleans = ("enable_distributed_storage", "force_outputs_fp32", "convert_inputs")
    arguments.check_bool(*(name for name in booleans if name in given))
    arguments.check_choice("placement_policy", tuple(POLICIES))
    if given["gpu_margin_mem_ratio"] is not None:
        arguments.check_number("gpu_margin_mem_ratio", 0, 1)
        if given["placement_policy"] != "auto":
            raise ValueError(
                f"{call}(gpu_margin_mem_ratio={given['gpu_margin_mem_ratio']!r}, placement_policy="
                f"{given['placement_policy']!r}): the ratio acts with placement_policy='auto' only; leave it None."
            )
    check_sizes(call, given)
    arguments.check_choice("gradient_dtype", (None, torch.float32))
    arguments.check_count("threads", is_optional=True)
    arguments.check_choice("report", (None, True, False))
    arguments.check_paths("weights")
    arguments.check_choice("missing", MISSING)
    check_loss_scaling(call, given)


def check_sizes(call: str, given: Mapping[str, Any]) -> None:
    """The arguments of ChunkSizes, and the budgets."""
    arguments = Arguments(call, given)
    search = ("chunk_search_range", "chunk_search_n_grids", "min_chunk_size")
    asked = [name for name in search if given[name] is not None]
    if given["chunk_size"] is not None and asked:
        raise ValueError(
            f"{call}(chunk_size={given['chunk_size']!r}, {asked[0]}={given[asked[0]]!r}): give the size of a chunk, or "
            "arguments of the search for one, not both."
        )
    for name in ("chunk_size", "chunk_search_range", "min_chunk_size", "block_size"):
        arguments.check_size(name)
    for name in ("device_budget", "host_budget"):
        arguments.check_size(name, of_total=True)
    arguments.check_count("chunk_search_n_grids", is_optional=True)


def check_loss_scaling(call: str, given: Mapping[str, Any]) -> None:
    """The arguments of LossScaler."""
    arguments = Arguments(call, given)
    arguments.check_number("min_scale", 0, None)
    arguments.check_number("max_scale", given["min_scale"], None)
    arguments.check_number("initial_scale", 0, None, is_exclusive=True)
    low, high = given["min_scale"], given["max_scale"]
    within = f"a number at least {low} (min_scale) and at most {high} (max_scale)"
    arguments.check(low <= given["initial_scale"] <= high, "initial_scale", within)
    arguments.check_number("growth_factor", 1, None, is_exclusive=True)
    arguments.check_number("backoff_factor", 0, 1, is_exclusive=True)
    arguments.check_count("growth_interval")
    arguments.check_count("hysteresis")


def bound_of_clip(name: str, value: Any) -> float:
    """What a clip was given, as a number."""
    with contextlib.suppress(TypeError, ValueError):
        if float(value) >= 0:
            return float(value)
    raise ValueError(f"{name}={value!r}: expected a number of at least 0; parameters are not given")
