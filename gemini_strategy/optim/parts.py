"""Stepping some of an optimizer's parameters: a stand-in has these, and takes the class's own step.

Invariants
    1. A stand-in shares with its optimizer what is not said to be its own: parameters, states, groups.
    2. Where step() writes to the optimizer itself (a count in a group), each part of a step begins with the values of
       the step's beginning (`Own`), all have to end with the same ones, and the optimizer gets these.
    3. Equal means every bit, but for NaN, which equals NaN.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gemini_strategy import _torch
from gemini_strategy.optim import overrides

Group = dict[str, Any]
States = Mapping[torch.Tensor, Any]

_ANEW = ("state", "param_groups", "step")  # "step": an LR scheduler's around the class's own
# bitsandbytes would put states into memory that CUDA moves: no part does, here Gemini moves them.
_PAGES = "is_paged"
_RUNS_HOOKS = Optimizer.profile_hook_step(len).__code__  # type: ignore[attr-defined]
# Elements of a tensor that an optimizer has as an attribute; copies share larger ones.
MOST_COPIED = 1 << 16


def stand_in(
    optimizer: Optimizer, groups: list[Group], state: States, kind: type | None = None
) -> Optimizer:
    """An optimizer of these groups and states that shares all else with another, and has no hooks.

    `kind`: the plain class, where that of the object has been swapped.
    """
    kind = kind or type(optimizer)
    made: Any = object.__new__(kind)
    for name, value in vars(optimizer).items():
        if _is_hooks(name):
            value = OrderedDict()
        elif isinstance(value, types.MethodType) and value.__self__ is optimizer:
            value = types.MethodType(value.__func__, made)
        if name not in _ANEW and not name.startswith("_gm_"):
            made.__dict__[name] = value
    if _PAGES in made.__dict__:
        made.__dict__[_PAGES] = False
    made.__dict__.update(param_groups=groups, state=state)
    return made


def run(stepped: Optimizer) -> None:
    """Its own step, without a closure. No hooks run, nor those on all optimizers under a super().step()."""
    step: Any = type(stepped).step
    if getattr(step, "__code__", None) is _RUNS_HOOKS:
        step = step.__wrapped__
    tables = [_torch.optimizers_pre_hooks, _torch.optimizers_post_hooks]
    kept = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        with torch.no_grad(), overrides.placed(stepped):
            step(stepped)
    finally:
        for table, hooks in zip(tables, kept, strict=True):
            table.update(hooks)


def _is_hooks(name: str) -> bool:
    return name.startswith("_optimizer_") and name.endswith("_hooks")


@dataclass
class Own:
    """What an optimizer has besides parameters and states: its attributes and its groups' options."""

    attributes: dict[str, Any]
    options: list[Group]

    @classmethod
    def of(cls, optimizer: Optimizer) -> Own:
        """Shared with it."""
        attributes = {
            name: value
            for name, value in vars(optimizer).items()
            if name not in (*_ANEW, _PAGES, "_opt_called", "_zero_grad_profile_name")
            and not name.startswith("_gm_")
            and not _is_hooks(name)
            and not (isinstance(value, types.MethodType) and value.__self__ is optimizer)
        }
        skipped = ("params", "param_names")
        options = [
            {key: value for key, value in group.items() if key not in skipped}
            for group in optimizer.param_groups
        ]
        return cls(attributes, options)

    def copied(self, owner: Optimizer, target: Optimizer) -> Own:
        """For `target`, which stands where they had `owner`. What cannot be copied, and large tensors, are shared."""
        attributes, *options = copies([self.attributes, *self.options], owner, target)
        return Own(attributes, options)

    def put(self, optimizer: Optimizer) -> None:
        """The optimizer has these values from now on."""
        vars(optimizer).update(self.attributes)
        for group, options in zip(optimizer.param_groups, self.options, strict=True):
            group.update(options)

    def changed(self, other: Own) -> set[str]:
        """Names of attributes that the other has with other values, or alone."""
        mine, its = self.attributes, other.attributes
        return {n for n in its if n not in mine or difference(mine[n], its[n], n) is not None}

    def difference(self, other: Own) -> tuple[str, float] | None:
        """Where they differ first, and the largest difference there."""
        found = difference(self.attributes, other.attributes, "attribute")
        return found or difference(self.options, other.options, "param_groups")


def copies(
    values: list[Group],
    owner: Any,
    target: Any,
    shared: Iterable[Any] = (),
    missed: list[str] | None = None,
) -> list[Group]:
    """Of all that they lead to, but for `shared`; what is in several is copied once.

    Parameters are shared, and what Own.copied says; `missed` gets the names of what cannot be copied.
    """
    memo: dict[int, Any] = {id(owner): target, **{id(value): value for value in shared}}
    for value in reach(values, owner):
        is_large = isinstance(value, torch.Tensor) and value.numel() > MOST_COPIED
        if is_large or isinstance(value, nn.Parameter) or overrides.is_manager(value):
            memo[id(value)] = value
        elif isinstance(value, torch.Tensor) and value.is_cuda:  # it may go before it is read
            value.record_stream(torch.cuda.current_stream(value.device))
    made: list[Group] = [{} for _ in values]
    for one, other in zip(values, made, strict=True):
        for key, value in one.items():
            try:
                other[key] = copy.deepcopy(value, memo)
            except Exception:  # locks, process groups: classes say so in many ways
                other[key] = value
                if missed is not None:
                    missed.append(key)
    return made


def reach(value: Any, owner: Any) -> Iterator[Any]:
    """Everything that values lead to: through containers, and through the attributes of objects."""
    seen: dict[int, Any] = {id(owner): owner}
    left = [value]
    while left:
        value = left.pop()
        if id(value) in seen or isinstance(value, type | types.ModuleType | types.FunctionType):
            continue
        seen[id(value)] = value  # keeps ids apart
        yield value
        if overrides.is_manager(value):
            continue
        if isinstance(value, dict):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set | frozenset | deque):
            left += value
        elif isinstance(value, types.MethodType):
            left.append(value.__self__)
        elif not isinstance(value, torch.Tensor):
            left += getattr(value, "__dict__", {}).values()


def difference(one: Any, other: Any, where: str, depth: int = 0) -> tuple[str, float] | None:
    """Where two values differ first, and the largest difference there; bits count, and NaN equals NaN."""
    if one is other:
        return None
    if type(one) is not type(other):
        return where, math.inf
    if isinstance(one, torch.Tensor):
        return _tensor_difference(one, other, where, depth)
    pairs: list[tuple[str, Any, Any]] = []
    if isinstance(one, dict):
        if one.keys() != other.keys():
            keys = sorted(_key(key) for key in one.keys() ^ other.keys())
            return f"{where}.{keys[0]}", math.inf
        pairs = [
            (f"{where}.{_key(key)}", value, other[key])
            for key, value in one.items()
            if value is not other[key]
        ]
    elif isinstance(one, list | tuple | deque):
        if len(one) != len(other):
            return where, math.inf
        pairs = [(f"{where}.{i}", a, b) for i, (a, b) in enumerate(zip(one, other, strict=True))]
    elif isinstance(one, int | float | complex):
        is_equal = repr(one) == repr(other)  # two zeros differ, and NaN equals NaN
        return None if is_equal else (where, float(abs(one - other)))
    elif isinstance(one, str | bytes | set | frozenset | torch.dtype | torch.device | torch.Size):
        return None if one == other else (where, math.inf)
    elif isinstance(one, torch.Generator):
        return difference(one.get_state(), other.get_state(), where)
    elif hasattr(one, "tobytes"):  # numpy's
        return None if one.tobytes() == other.tobytes() else (where, math.inf)
    elif isinstance(one, functools.partial):
        mine, its = ((each.func, each.args, each.keywords) for each in (one, other))
        return difference(mine, its, where, depth + 1)
    elif isinstance(one, types.MethodType) and depth < 8:
        mine, its = ((each.__func__, each.__self__) for each in (one, other))
        return difference(mine, its, where, depth + 1)
    elif type(one).__eq__ is not object.__eq__ or isinstance(one, _KNOWN_BY_IDENTITY):
        with contextlib.suppress(Exception):  # of a dataclass with tensors, for one
            return None if bool(one == other) else (where, math.inf)
        return where, math.inf
    elif depth < 8:
        return difference(_inside(one), _inside(other), where, depth + 1)
    found = (difference(a, b, path, depth + 1) for path, a, b in pairs)
    return next((each for each in found if each is not None), None)


# Copies have the very ones.
_KNOWN_BY_IDENTITY = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
)


def _inside(value: Any) -> dict[str, Any]:
    """The attributes of an object, those in slots included."""
    slots = (getattr(kind, "__slots__", ()) for kind in type(value).__mro__)
    names = [n for own in slots for n in ([own] if isinstance(own, str) else own)]
    found = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return {**found, **getattr(value, "__dict__", {})}


def _key(key: Any) -> str:
    return "a tensor" if isinstance(key, torch.Tensor) else str(key)


def _tensor_difference(one: Any, other: Any, where: str, depth: int) -> tuple[str, float] | None:
    if _torch.is_wrapper_subclass(one):
        names, context = one.__tensor_flatten__()
        inner = [{name: getattr(each, name) for name in names} for each in (one, other)]
        found = difference(context, other.__tensor_flatten__()[1], where, depth)
        return found or difference(inner[0], inner[1], where, depth)
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return where, math.inf
    # bitsandbytes moves its tables with the first parameter that needs them
    if one.device != other.device:
        one, other = one.cpu(), other.cpu()
    one, other = one.detach().contiguous(), other.detach().contiguous()
    same = one.reshape(-1, 1).view(torch.uint8) == other.reshape(-1, 1).view(torch.uint8)
    if bool(same.all()):
        return None
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.to(wide).reshape(-1), other.to(wide).reshape(-1)
    unequal = ~same.all(-1) & ~(one.isnan() & other.isnan())
    if not bool(unequal.any()):
        return None
    return where, float((one - other).abs()[unequal].nan_to_num(nan=math.inf).max())
