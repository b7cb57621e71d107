"""Arguments: what calls take, said once, and checked.

A table is a TypedDict under `@table`: each field is annotated with an Argument, its default and its check, and the
docstring says what it is. `def call(..., **given: Unpack[Table])` under `@taking(Table)` has them in its signature, its
hints and its docstring, as if each stood there; a type checker reads the same from the TypedDict. settings.py has the
tables of manage().

What is refused raises ValueError with the call, the argument's name, its value and what is allowed.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast, get_type_hints

from gemini_strategy.sizes import parse_bytes


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


@dataclass
class Argument:
    """One argument of a table.

    Attributes:
        default: what it is where it is not given.
        check: raises ValueError for a value that cannot be; None: what uses the value checks it.
        text: its lines of the table's docstring.
    """

    default: Any
    check: Callable[[Arguments, str], None] | None = None
    text: list[str] = field(default_factory=list)


Kind = TypeVar("Kind", bound=type)


def table(kind: Kind) -> Kind:
    """A TypedDict whose arguments have their texts from its docstring; inherited ones have theirs already."""
    text: list[str] = []
    for line in inspect.cleandoc(kind.__doc__ or "").partition("Args:\n")[2].splitlines():
        line = line[4:]
        if not line.startswith(" "):
            text = arguments_of(kind)[line.partition(":")[0]][1].text
        text.append(line)
    return kind


Check = Callable[[Arguments, str], None]


def number(low: float, high: float | None, is_exclusive: bool = False) -> Check:
    """The check of an argument that is a number."""
    return lambda arguments, name: arguments.check_number(name, low, high, is_exclusive)


def choice(*choices: Any) -> Check:
    """The check of an argument that is one of these."""
    return lambda arguments, name: arguments.check_choice(name, choices)


@functools.cache
def arguments_of(table: type) -> dict[str, tuple[Any, Argument]]:
    """The type of each argument of a table, and what is said of it."""
    hints = get_type_hints(table, include_extras=True)
    return {name: (hint.__origin__, hint.__metadata__[0]) for name, hint in hints.items()}


def check_table(call: str, given: Mapping[str, Any], table: type) -> None:
    """Raises ValueError for an argument of the table that cannot be."""
    arguments = Arguments(call, given)
    for name, (_, argument) in arguments_of(table).items():
        if argument.check is not None:
            argument.check(arguments, name)


def described(text: str | None, table: type) -> str | None:
    """A docstring in which the arguments of a table stand in the place of the line that names it, `given: ...`."""
    before, given, after = (text or "").partition("        given: ")
    lines = [
        f"        {line}" for _, argument in arguments_of(table).values() for line in argument.text
    ]
    return before + "\n".join(lines) + after[after.index("\n") :] if given else text


Taker = TypeVar("Taker", bound=Callable[..., Any])


def taking(
    table: type, positional: Iterable[str] = (), types: Mapping[str, Any] | None = None
) -> Callable[[Taker], Taker]:
    """For a function with `**given`, or a class with such a constructor: it takes the arguments of a table, gets all of
    them, and has them in its signature and its docstring.

    Args:
        table: of the arguments.
        positional: those that may be given by their place too, in this order.
        types: of arguments for which the table has a wider one.
    """

    def decorate(taker: Taker) -> Taker:
        if isinstance(taker, type):
            kind: Any = taker
            kind.__init__ = _taking(kind.__init__, kind.__name__, table, positional, types or {})
            kind.__doc__ = described(kind.__doc__, table)
            return taker
        return cast(Taker, _taking(taker, taker.__name__, table, positional, types or {}))

    return decorate


def _taking(
    function: Callable[..., Any],
    call: str,
    table: type,
    positional: Iterable[str],
    types: Mapping[str, Any],
) -> Callable[..., Any]:
    kinds, told = inspect.Parameter, arguments_of(table)
    hints = {name: hint for name, (hint, _) in told.items()} | dict(types)
    plain = inspect.signature(function)
    own = [each for each in plain.parameters.values() if each.kind is not kinds.VAR_KEYWORD]
    places = dict.fromkeys(positional, kinds.POSITIONAL_OR_KEYWORD)
    rest = {name: places.get(name, kinds.KEYWORD_ONLY) for name in (*places, *told)}
    taken = [
        kinds(name, kind, default=told[name][1].default, annotation=hints[name])
        for name, kind in rest.items()
    ]
    signature = plain.replace(parameters=[*own, *taken])

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        _refuse_unfit(call, signature, args, kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        first = [bound.arguments.pop(each.name) for each in own]
        return function(*first, **bound.arguments)

    hints = {n: h for n, h in function.__annotations__.items() if n != "given"} | hints
    called.__annotations__ = hints
    called.__doc__ = described(function.__doc__, table)
    called.__signature__ = signature  # type: ignore[attr-defined]
    return called


def suggesting(function: Taker) -> Taker:
    """The function, whose unknown arguments are refused with the one that was probably meant."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        _refuse_unfit(function.__name__, signature, args, kwargs)
        return function(*args, **kwargs)

    return cast(Taker, called)


def _refuse_unfit(
    call: str, signature: inspect.Signature, args: tuple[Any, ...], given: Iterable[str]
) -> None:
    """Raises TypeError for a name that there is not, with the one that is most like it, and for an argument that has to
    be named, with the name of a budget for what may be one."""
    known = [name for name in signature.parameters if name != "self"]
    for name in given:
        if name not in known:
            parts = [each for each in known if name in each]  # 'budget' is a part of two
            near = " or ".join(map(repr, parts or difflib.get_close_matches(name, known, n=1)))
            meant = f"; did you mean {near}?" if near else f"; there are {', '.join(known)}"
            raise TypeError(f"{call}() has no argument {name!r}{meant}")
    kinds = signature.parameters.values()
    names = [each.name for each in kinds if each.kind is each.POSITIONAL_OR_KEYWORD]
    if len(args) <= len(names):
        return
    first = args[len(names)]
    is_size = isinstance(first, int | float | str) and not isinstance(first, bool)
    meant = f": did you mean device_budget={first!r}?" if is_size else ""
    named = " and ".join(name for name in names if name != "self") or "nothing"
    raise TypeError(
        f"{call}() takes {named} by their place, and all else by name, got {first!r}{meant}"
    )


def bound_of_clip(name: str, value: Any) -> float:
    """What a clip was given, as a number."""
    with contextlib.suppress(TypeError, ValueError):
        if float(value) >= 0:
            return float(value)
    raise ValueError(f"{name}={value!r}: expected a number of at least 0; parameters are not given")
