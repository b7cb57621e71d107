"""Doors: what takes memory or numbers of a tensor past torch's dispatcher asks here first.

Each is a method of tensors, or a function, that is patched while an engine is open (patches.py).

Invariants
    1. What is taken of an absent field is a copy that cannot be written, or a refusal by name.
    2. A weight's storage is a lease, and is compared afterwards: no version counts what is written
       through it. So is the memory of a weight inside its unit that is given away.
    3. Every other tensor passes through.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from gemini_strategy import _torch
from gemini_strategy._torch import tree_map
from gemini_strategy.errors import GuardError
from gemini_strategy.parameters import absent, before_213, borrowing, patches
from gemini_strategy.parameters.absent import (
    home_of,
    is_absent,
    like,
    nets,
    plain,
    plainly,
    set_data,
    slot_behind,
)

_WAY_OUT = (
    "use it inside the forward of a managed module that has it, itself or below it (make what uses it such a module, "
    "or a method that one calls), or give it p.clone()"
)


def _expose(value: Any) -> None:
    """Memory of a plain tensor is given away: if it is managed, it is compared afterwards."""
    slot = slot_behind(value)
    if slot is not None:
        slot.expose(value)


def _door(original: Any, name: str) -> Any:
    """`original`, a method of tensors that takes their memory, with the bytes in place."""

    @functools.wraps(original)
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not is_absent(self):
            if nets:
                _expose(self)
            else:
                patches.look_again()
            return original(self, *args, **kwargs)
        home = home_of(self)
        is_compiler = sys._getframe(1).f_globals.get("__name__") == _torch.META_CONVERTER
        is_parameter = hasattr(self, "_gm_slot")
        is_asked = is_compiler or name == "__dlpack__" or (name == "data_ptr" and is_parameter)
        if is_asked and home.unit is not None:
            use = borrowing.Use.COMPILED if is_compiler else borrowing.Use.ADDRESS
            borrowing.borrow(home.slot, use)
            if not is_absent(self):
                return method(self, *args, **kwargs)
            at_hand = None if is_compiler else borrowing.at_hand(home.slot)
            if at_hand is not None:
                shown = like(at_hand.detach(), self).requires_grad_(self.requires_grad)
                return original(shown, *args, **kwargs)
        if is_compiler:
            raise GuardError(
                f"{home.name}: a compiled or traced function takes addresses, and this tensor has none outside its "
                f"module: {_WAY_OUT}"
            )
        if name == "data_ptr" and is_parameter:
            raise GuardError(f"{home.name}: data_ptr: it has no address here: {_WAY_OUT}")
        with plainly(), torch.no_grad():
            if home.memory is not None and name in ("data_ptr", "untyped_storage"):
                home.open(False)
                return original(self, *args, **kwargs)
            if home.key and name in ("data_ptr", "__dlpack__"):
                raise GuardError(
                    f"{home.name}: {name}: what is written there would be lost; use clone()"
                )
            plain = like(home.open(not home.key or name == "untyped_storage"), self)
            if home.key and name == "numpy":
                plain = plain.clone()
        if name == "data_ptr":
            set_data(self, plain)  # from now on this tensor keeps the bytes here
            return original(self)
        result = original(plain.requires_grad_(self.requires_grad), *args, **kwargs)
        if home.key and name == "numpy":
            result.flags.writeable = False
        return result

    return method


def _value_door(original: Any) -> Any:
    """A method that gives values as Python's own. torch.tensor turns the key off and asks each element of a list so."""

    @functools.wraps(original)
    def method(self: torch.Tensor, *args: Any) -> Any:
        if not is_absent(self):
            return original(self, *args)
        return original(plain(self).requires_grad_(self.requires_grad), *args)

    return method


def _kin_door(original: Any) -> Any:
    """A method that makes another tensor of the same dtype and device."""

    @functools.wraps(original)
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        kin = torch.empty(0, dtype=self.dtype, device=self.device) if is_absent(self) else self
        return original(kin, *args, **kwargs)

    return method


def _loop_door(original: Any) -> Any:
    """A method that runs a Python function over elements, in place."""

    @functools.wraps(original)
    def method(self: torch.Tensor, *args: Any) -> torch.Tensor:
        others = [torch.clone(a) if is_absent(a) else a for a in args]
        if not is_absent(self):
            return original(self, *others)
        home = home_of(self)
        with plainly(), torch.no_grad():
            base = home.open(True)
            plain = like(base, self)
        original(plain.requires_grad_(self.requires_grad), *others)
        home.write(base)
        return self

    return method


def _scatter_door(original: Any) -> Any:
    """The dispatcher does not look into lists of lists, and gloo and NCCL take an address of what is scattered."""
    read = functools.partial(tree_map, lambda v: v.detach().clone() if is_absent(v) else v)
    return functools.wraps(original)(
        lambda self, *args, **kwargs: original(self, *args[:1], *map(read, args[1:]), **kwargs)
    )


def _data_door(original: Any) -> Any:
    """The attribute that replaces a tensor's memory. What shows a field goes on to show it."""

    def assign(self: torch.Tensor, value: torch.Tensor) -> None:
        if is_absent(self):
            home_of(self).replace(self, value)
        else:
            original.__set__(self, value)

    return property(original.__get__, assign, original.__delete__, original.__doc__)


def _parameter_door(original: Any) -> Any:
    """torch asks for the very class of what a parameter is made of."""

    @functools.wraps(original)
    def new(cls: type, data: Any = None, requires_grad: bool = True) -> Any:
        is_managed = hasattr(data, "_gm_slot")
        return original(
            cls, _torch.TensorBase.data.__get__(data) if is_managed else data, requires_grad
        )

    return staticmethod(new)


def _norm_door(original: Any) -> Any:
    """Normalizations write running statistics, and no version counts that."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if nets and not torch.compiler.is_compiling():
            for statistics in args[3:5]:
                if isinstance(statistics, torch.Tensor) and not is_absent(statistics):
                    _expose(statistics)
        return original(*args, **kwargs)

    _torch.register_builtin(function, f"aten::{original.__name__}")  # for scripts
    return function


def _refuse_swap(original: Any) -> Any:
    @functools.wraps(original)
    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        for value in (t1, t2):
            slot = getattr(value, "_gm_slot", None)
            if slot is not None or is_absent(value):
                name = slot.name if slot is not None else home_of(value).name
                raise GuardError(f"{name}: swap_tensors would replace its storage; use copy_()")
        original(t1, t2)

    return swap_tensors


def _recording_door(original: Any, why: str) -> Any:
    """A function that keeps what modules compute, to go past their calls, which enter units."""

    @functools.wraps(original)
    def recording(*args: Any, **kwargs: Any) -> Any:
        is_traced = kwargs.get("is_tracing", False)  # then the model's own calls refuse
        for value in () if is_traced else (*args, *kwargs.values()):
            for given in value if isinstance(value, tuple) else (value,):
                module = getattr(given, "__self__", given)
                for parameter in module.parameters() if isinstance(module, torch.nn.Module) else ():
                    slot = getattr(parameter, "_gm_slot", None)
                    if slot is not None:
                        raise GuardError(f"{why}: {slot.name} is managed")
        result = original(*args, **kwargs)
        borrowing.watch_compiler()  # torch.compile imports it
        return result

    return recording


def _dlpack_door(original: Any) -> Any:
    method = _door(original, "__dlpack__")
    return functools.wraps(original)(lambda value: method(value))


_DOORS: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    *(
        (torch.Tensor, name, functools.partial(_door, name=name))
        for name in ("numpy", "data_ptr", "untyped_storage", "__dlpack__")
    ),
    *(
        (torch.Tensor, name, _value_door)
        for name in ("tolist", "__float__", "__int__", "__index__", "__bool__", "__complex__")
    ),
    (torch.Tensor, "data", _data_door),
    *((torch.Tensor, name, _kin_door) for name in ("new", "new_tensor")),
    *((torch.Tensor, name, _loop_door) for name in ("apply_", "map_", "map2_")),
    (torch.distributed.ProcessGroup, "scatter", _scatter_door),
    (torch.nn.Parameter, "__new__", _parameter_door),
    (torch.utils.dlpack, "to_dlpack", _dlpack_door),
    (torch, "to_dlpack", _dlpack_door),
    *((torch, name, _norm_door) for name in ("batch_norm", "instance_norm", "native_batch_norm")),
    (torch.utils, "swap_tensors", _refuse_swap),
    *(
        (owner, name, functools.partial(_recording_door, why=why))
        for owner, name, why in (
            (
                torch,
                "compile",
                "torch.compile() after manage() is not possible: compile modules before it (close() the engine first, "
                "gemini_strategy.engine_of(model) is it)",
            ),
            (
                _torch.recursive_scripting,
                "create_script_module",
                "a managed model has no code that could be scripted: gemini_strategy.engine_of(model).close() first, "
                "which makes it ordinary again",
            ),
            (
                torch.cuda,
                "make_graphed_callables",
                "a CUDA graph enters no unit: its weights would not be there when it runs: "
                "gemini_strategy.engine_of(model).close() first",
            ),
        )
    ),
)


def install() -> None:
    """Puts the kernel in place, once per process, and the doors, for as long as something needs them.

    Raises:
        GeminiError: see absent.install.
    """
    absent.install()
    if before_213.is_needed():
        before_213.install()
    for owner, name, make in _DOORS:
        patches.add(owner, name, make)
