"""What torch before 2.13 needs, all of it: GPUs in use have 2.11. This file goes with the last of these.

There the key of absent tensors stands above Python's, in two ways:

* torch cannot call a fallback of such a key under a mode of the caller. So each of torch's operators has a kernel of
  its own.
* A class's `__torch_dispatch__` runs without the keys above Python's: an operation on a part that is absent (a
  quantized weight of torchao, a subclass of a user around a parameter) would read no bytes of it. In every such class
  the key is put back.

Invariant: of every class that has an object, `__torch_dispatch__` has the key while an engine is open: classes that
are there at `install` get it then, and others when an object of them is made.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from gemini_strategy import _torch
from gemini_strategy.parameters import absent, patches

_FOREIGN = ("FakeTensor", "FunctionalTensor")  # torch's own tracers, which have no absent parts
_libraries: list[torch.library.Library] = []


def is_needed() -> bool:
    return int(absent.KEY.__int__()) > _torch.DispatchKey.Python.value


def install() -> None:
    """After absent.install."""
    if not _libraries:
        _libraries.append(torch.library.Library("aten", "IMPL"))
        _serve_each_operator(_libraries[0])
    for cls in _below(torch.Tensor):
        _serve_class(cls)
    for name in ("_make_subclass", "_make_wrapper_subclass"):
        patches.add(torch.Tensor, name, _maker)


def _serve_each_operator(library: torch.library.Library) -> None:
    passed = {f"aten::{name}" for name in absent.PASSED}
    for full in _torch.all_operator_names():
        if full.startswith("aten::") and full not in passed:
            name, _, overload = full.removeprefix("aten::").partition(".")
            op = getattr(getattr(torch.ops.aten, name, None), overload or "default", None)
            if op is not None:
                kernel = functools.partial(absent.serve, op)
                library.impl(full.removeprefix("aten::"), kernel, "Fake")


def _below(cls: type) -> Iterator[type]:
    for inner in type.__subclasses__(cls):
        yield inner
        yield from _below(inner)


def _maker(plain: Any) -> Any:
    original = plain.__func__ if isinstance(plain, staticmethod) else plain

    @functools.wraps(original)
    def make(cls: type, *args: Any, **kwargs: Any) -> Any:
        _serve_class(cls)
        return original(cls, *args, **kwargs)

    return staticmethod(make)


def _serve_class(cls: type) -> None:
    owner = next((c for c in cls.__mro__ if "__torch_dispatch__" in vars(c)), torch.Tensor)
    own = vars(owner).get("__torch_dispatch__")
    is_one = isinstance(own, classmethod | staticmethod) and owner.__name__ not in _FOREIGN
    if owner is not torch.Tensor and is_one:
        patches.add(owner, "__torch_dispatch__", _served)


def _served(plain: Any) -> Any:
    dispatch = plain.__func__

    @functools.wraps(dispatch)
    def served(*args: Any, **kwargs: Any) -> Any:
        excluded = _torch.excluded_keys()
        with _torch.ForceDispatchKeyGuard(_torch.included_keys(), excluded - absent.KEYS):
            return dispatch(*args, **kwargs)

    return type(plain)(served)
