# Checks of the strategy's arguments: each raises ValueError with the argument, its value and what is allowed.
#
# Nothing here imports Lightning.

import os
from collections.abc import Mapping
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

import gemini_strategy as gs


def check(valid: bool, name: str, value: Any, allowed: str) -> None:
    if not valid:
        raise ValueError(f"GeminiStrategy({name}={value!r}): expected {allowed}.")


def check_bool(name: str, value: Any) -> None:
    check(isinstance(value, bool), name, value, "True or False")


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    check(
        any(value is choice or value == choice for choice in choices),
        name,
        value,
        f"one of {', '.join(repr(choice) for choice in choices)}",
    )


def check_count(name: str, value: Any, optional: bool = False) -> None:
    valid = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    allowed = f"{'None or ' if optional else ''}an int of at least 1"
    check(valid or (optional and value is None), name, value, allowed)


def check_mesh(name: str, value: Any) -> None:
    valid = value is None or value == "hybrid" or isinstance(value, DeviceMesh)
    if isinstance(value, tuple | list):
        valid = len(value) == 2 and all(type(size) is int and size >= 1 for size in value)
    elif isinstance(value, DeviceMesh):
        valid = value.ndim in (1, 2)
    allowed = "None, (replicas, shards), 'hybrid' or a DeviceMesh of one or two dimensions"
    check(valid, name, value, allowed)


def check_number(
    name: str, value: Any, low: float, high: float | None, exclusive: bool = False
) -> None:
    valid = isinstance(value, int | float) and not isinstance(value, bool)
    if valid and exclusive:
        valid = value > low and (high is None or value < high)
    elif valid:
        valid = value >= low and (high is None or value <= high)
    between = "more than" if exclusive else "at least"
    below = "" if high is None else f" and {'less than' if exclusive else 'at most'} {high}"
    check(valid and value == value, name, value, f"a number {between} {low}{below}")


def check_size(name: str, value: Any, of_total: bool = False) -> None:
    if value is None:
        return
    fraction = ", or a fraction of what there is in (0, 1]" if of_total else ""
    try:
        gs.parse_bytes(value, 1 << 40 if of_total else None)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"GeminiStrategy({name}={value!r}): expected None, a positive int of bytes, or a string such as '64MiB' or"
            f" '24GB'{fraction}."
        ) from error


def check_paths(name: str, value: Any) -> None:
    paths = value.values() if isinstance(value, Mapping) else [value]
    valid = value is None or all(isinstance(path, str | os.PathLike) for path in paths)
    check(valid, name, value, "None, a path, or a mapping of submodules' names to paths")
