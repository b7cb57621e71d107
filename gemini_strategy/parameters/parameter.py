"""What a managed parameter answers itself; everything else about it is torch's own.

Its class is a subclass of the one it had, for as long as it is managed: the same object, in its unit and outside.
Operations are not watched here (absent.py serves them): only what would replace its storage, and its gradient, which
the engine holds.
"""

from __future__ import annotations

import copy
import functools
import gc
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch
from torch import nn

from gemini_strategy import _torch
from gemini_strategy._torch import proxy_tensor
from gemini_strategy.errors import GuardError
from gemini_strategy.parameters import gate, patches

_base = _torch.TensorBase


def _refuse(name: str, way_out: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        way = way_out.replace("engine.close()", f"{self._gm_slot.engine.called}.close()")
        raise GuardError(f"{self._gm_slot.name}: {name}: {way}")

    return method


def _reshape(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        changed = getattr(self.detach(), name)(*args, **kwargs)
        if (changed.shape, changed.stride()) != (self.shape, self.stride()):
            raise GuardError(f"{self._gm_slot.name}: {name}: its shape is fixed; use a view of it")
        return self

    return method


def kept(pickled: Any) -> Any:
    """A process that is being started takes memory by descriptors, which whoever starts it has to have until then."""
    popen = get_spawning_popen()
    if popen is not None:
        vars(popen).setdefault("_gm_kept", []).append(pickled)
    return pickled


class _Managed:
    __slots__ = ()

    @property
    def data(self) -> torch.Tensor:
        value = _base.data.__get__(self)
        # What is written through it counts for no version of the parameter.
        self._gm_slot.expose(value)
        return value

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self._gm_slot.assign(value)

    @property
    def grad(self) -> torch.Tensor | None:
        return self._gm_slot.grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self._gm_slot.set_grad(value)

    @grad.deleter
    def grad(self) -> None:
        self._gm_slot.set_grad(None)

    _grad = grad  # torch's other name for it

    @property
    def requires_grad(self) -> bool:
        return _base.requires_grad.__get__(self)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self._gm_slot.engine.check_requires_grad(self._gm_slot, bool(value))
        _base.requires_grad.__set__(self, value)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        self.requires_grad = requires_grad
        return self

    def __repr__(self, *args: Any, **kwargs: Any) -> str:
        plain = self._gm_slot.plain_class
        if plain is not nn.Parameter:
            return plain.__repr__(self, *args, **kwargs)
        # torch names the class of what is no plain Parameter, and for such a one twice.
        shown = self.detach().requires_grad_(self.requires_grad)
        return "Parameter containing:\n" + repr(shown)

    def detach(self) -> torch.Tensor:
        with gate.passing(self._gm_slot), _torch.ExcludeDispatchKeyGuard(gate.KEYS):
            return _base.detach(self)

    def as_subclass(self, cls: type) -> torch.Tensor:
        with gate.passing(self._gm_slot), _torch.ExcludeDispatchKeyGuard(gate.KEYS):
            return _base.as_subclass(self, cls)

    def set_(self, source: Any = None, *args: Any, **kwargs: Any) -> Any:
        # torch.nn.utils.parametrize sets a parameter to itself, and at the end to a tensor like it.
        if source is self and not (args or kwargs):
            return self
        is_alike = isinstance(source, torch.Tensor) and not (args or kwargs)
        is_alike = is_alike and (source.shape, source.dtype) == (self.shape, self.dtype)
        if not is_alike or torch.is_grad_enabled():
            return self._gm_refuse_set()
        self.data = source.detach()
        return self

    _gm_refuse_set = _refuse("set_", "its storage is the engine's; use p.copy_() or p.data = value")
    resize_ = _refuse("resize_", "its size is fixed; engine.close() first")
    share_memory_ = _refuse("share_memory_", "its memory is the engine's; engine.close() first")

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            try:
                try:
                    memo[id(self)] = self._gm_plain_copy(memo, self.device)
                except torch.OutOfMemoryError:
                    gc.collect()  # a model copied before is a cycle: it holds its own bound forward
                    memo[id(self)] = self._gm_plain_copy(memo, self.device)
            except torch.OutOfMemoryError as error:
                error.add_note(
                    f"gemini: a copy of {self._gm_slot.name} lies on its device, as torch's do. For a copy on the host "
                    "pickle and unpickle the model, or load model.state_dict() into another one"
                )
                raise
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = kept(self._gm_plain_copy({}, torch.device("cpu")))
        if not self._gm_slot.is_raw:  # else it has them
            plain.__dict__.update({k: v for k, v in vars(self).items() if k != "_gm_slot"})
        return plain.__reduce_ex__(protocol)

    def _gm_quantized_copy(self, values: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        """The same class on `values`, with copies of all that it keeps."""
        slot = self._gm_slot
        plain = _torch.make_subclass(slot.plain_class, values, False)
        memo[id(self)] = plain
        memo |= {id(alias): plain.data for alias in slot.aliases}
        own = {key: value for key, value in vars(self).items() if key != "_gm_slot"}
        plain.__dict__.update(copy.deepcopy(own, memo))
        return plain

    def _gm_plain_copy(self, memo: dict[int, Any], device: torch.device) -> torch.Tensor:
        """An ordinary, unmanaged parameter with the values that are shown."""
        slot = self._gm_slot
        dtype = self.dtype if slot.shows_master else slot.outer_dtype
        values = slot.read_weight() if dtype is slot.dtype else slot.read_master()
        values = values.to(device, dtype)
        if not isinstance(self, nn.Parameter):
            return values
        if slot.is_raw:
            return self._gm_quantized_copy(values, memo)
        return nn.Parameter(values, self.requires_grad)


for _op in ("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "as_strided_"):
    setattr(_Managed, _op, _reshape(_op))
_classes: dict[type, type] = {}


def _with_managed(managed: type, known: Any) -> Any:
    return type(known)((*known, managed))


def managed_class(plain: type) -> type:
    """The class of managed parameters of class `plain`."""
    if plain not in _classes:
        # Its base has it, too, but torch looks for it at every use, and here first.
        own = {"__torch_function__": _torch.disabled_torch_function}
        # Libraries know quantized weights by the names of their classes.
        own |= {key: getattr(plain, key) for key in ("__module__", "__qualname__")}
        _classes[plain] = type(plain.__name__, (_Managed, plain), own)
        # make_fx and torch's optimizers know parameters by their very class.
        known = functools.partial(_with_managed, _classes[plain])
        patches.add(proxy_tensor, "HANDLED_TYPES", known, plain)
        if plain in vars(_torch.optimizer)[_torch.FOREACH_TYPES]:
            patches.add(_torch.optimizer, _torch.FOREACH_TYPES, known, plain)
    return _classes[plain]
