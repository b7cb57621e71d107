"""Tables of the originals' arguments: each has an effect, or one value that is taken; others are refused by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Only(NamedTuple):
    """In a table: the one value that is taken; why there is no other, and the way out."""

    value: Any
    reason: str


def taken(call: str, given: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the given arguments that have an effect.

    Args:
        call: what was called, for errors.
        table: defaults by name. What is Only(...) has no effect; what is True or False is nothing else.

    Raises:
        ValueError: a name that is not in the table, or a value that is not taken.
    """
    found = {}
    for name, value in given.items():
        if name not in table:
            raise ValueError(f"{call} has no {name!r}; it has {', '.join(sorted(table))}")
        wanted = table[name]
        if isinstance(wanted, Only):
            is_taken = value is wanted.value or (
                not isinstance(value, bool) and value == wanted.value  # 1 is 1.0, and no True
            )
            if not is_taken:
                text = f"only {wanted.value!r} is taken: {wanted.reason}"
                raise ValueError(f"{call}({name}={value!r}): {text}.")
        elif isinstance(wanted, bool) and not isinstance(value, bool):
            raise ValueError(f"{call}({name}={value!r}): expected True or False.")
        else:
            found[name] = value
    return found


def takes(**table: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: the function has the arguments of the table behind its own, and is given those with an effect.

    A call raises what `taken` does, and a TypeError for an argument of another name.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = inspect.signature(function).parameters.values()
        own = [p for p in parameters if p.kind is kind and p.name not in table]
        for name, default in table.items():
            value = default.value if isinstance(default, Only) else default
            own.append(inspect.Parameter(name, kind, default=value))
        signature = inspect.Signature(own)
        call = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            for name in kwargs.keys() - signature.parameters.keys():
                raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = {name: bound.arguments.pop(name) for name in table}
            return function(**bound.arguments, **taken(call, given, table))

        called.__signature__ = signature  # type: ignore[attr-defined]
        return called

    return decorate


def chosen(call: str, name: str, value: Any, table: Mapping[Any, str]) -> str:
    """What an argument means; a ValueError if it is not in the table."""
    if value not in table:
        raise ValueError(
            f"{call}({name}={value!r}): expected one of {', '.join(map(repr, table))}."
        )
    return table[value]


def counted(call: str, name: str, value: Any) -> int:
    """An argument that counts; a ValueError if it does not."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{call}({name}={value!r}): expected an int of at least 1.")
    return value
