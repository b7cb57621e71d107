"""Tensor subclasses that are made of others: what they do with their parts is served, too.

Before torch 2.13 a class's `__torch_dispatch__` runs without the keys above Python's, and the key of absent tensors is
one of them: an operation on a part that is absent (a quantized weight of torchao, a subclass of a user around a
parameter) would read no bytes of it. In every such class the key is put back.

Invariant: of every class that has an object, `__torch_dispatch__` has the key: classes that are there at `install` get
it then, and others when an object of them is made.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from gemini_strategy import _torch

_FOREIGN = ("FakeTensor", "FunctionalTensor")  # torch's own tracers, which have no absent parts


def install(keys: Any) -> None:
    """Once per process. keys: what is put back."""
    for cls in _below(torch.Tensor):
        _serve(cls, keys)
    for name in ("_make_subclass", "_make_wrapper_subclass"):
        setattr(torch.Tensor, name, staticmethod(_maker(getattr(torch.Tensor, name), keys)))


def _below(cls: type) -> Iterator[type]:
    for inner in type.__subclasses__(cls):
        yield inner
        yield from _below(inner)


def _maker(original: Any, keys: Any) -> Any:
    @functools.wraps(original)
    def make(cls: type, *args: Any, **kwargs: Any) -> Any:
        _serve(cls, keys)
        return original(cls, *args, **kwargs)

    return make


def _serve(cls: type, keys: Any) -> None:
    owner = next((c for c in cls.__mro__ if "__torch_dispatch__" in vars(c)), torch.Tensor)
    own = vars(owner).get("__torch_dispatch__")
    is_one = isinstance(own, classmethod | staticmethod) and owner.__name__ not in _FOREIGN
    if owner is torch.Tensor or not is_one or hasattr(own.__func__, "_gm_original"):
        return
    dispatch = own.__func__

    @functools.wraps(dispatch)
    def served(*args: Any, **kwargs: Any) -> Any:
        excluded = _torch.excluded_keys()
        with _torch.ForceDispatchKeyGuard(_torch.included_keys(), excluded - keys):
            return dispatch(*args, **kwargs)

    served._gm_original = dispatch  # type: ignore[attr-defined]
    owner.__torch_dispatch__ = type(own)(served)  # type: ignore[attr-defined]
