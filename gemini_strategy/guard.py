"""The guard: what a managed parameter is outside its unit, and inside it.

A managed `nn.Parameter` keeps its identity for life; its class is swapped. Outside its unit it is a
*guarded* class whose `__torch_function__` sees every operation; inside (from enter to leave of its
unit) it is an *open* class that torch treats as a plain parameter.

Invariants
    1. No operation reads or writes the bytes behind a guarded parameter except through a lease,
       which keeps its chunk resident for as long as any tensor on those bytes lives.
    2. What is written through a lease reaches the fp32 master (by comparison, at its end).
    3. Shape, dtype, device and `requires_grad` are always true and cost no lease.
    4. `p.grad` shows the gradient that the engine holds, reads and in-place writes included.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _device
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from gemini_strategy.errors import GeminiError, GuardError
from gemini_strategy.slot import Slot

__all__ = ["close_side_doors", "guarded_class", "is_guarded", "open_class"]

_plain_torch = torch._C.DisableTorchFunctionSubclass


# ---- operations on guarded tensors ----


def _getters(*names: str) -> set[Any]:
    """The functions by which `__torch_function__` is told of reading these attributes."""
    return {getattr(torch.Tensor, n).__get__ for n in names if hasattr(torch.Tensor, n)}


def _methods(*names: str) -> set[Any]:
    return {getattr(torch.Tensor, n) for n in names if hasattr(torch.Tensor, n)}


# Facts about a tensor that are true without its bytes.
_FACT_GETTERS = """
    shape dtype device layout ndim is_leaf requires_grad grad_fn is_cuda is_cpu is_sparse is_sparse_csr
    is_quantized is_meta is_mps is_xpu is_xla is_mkldnn is_nested is_ipu is_hpu is_vulkan is_maia is_mtia
    is_ort itemsize nbytes names name output_nr _version _backward_hooks _post_accumulate_grad_hooks
    retains_grad _base volatile _cdata grad_dtype
"""
_FACT_METHODS = """
    size dim ndimension numel nelement element_size stride is_contiguous is_floating_point is_complex
    is_signed storage_offset get_device register_hook register_post_accumulate_grad_hook retain_grad
    __hash__ __len__ is_same_size is_shared is_inference has_names dim_order is_conj is_neg
    is_distributed is_pinned detach_ is_coalesced _is_view new_empty new_zeros new_ones new_full
    new_tensor is_set_to
"""
_FACT_FUNCTIONS = {
    torch.is_floating_point,
    torch.is_complex,
    torch.is_conj,
    torch.is_neg,
    torch.is_inference,
    torch.is_same_size,
    torch.is_signed,
    torch.numel,
    torch.empty_like,
    torch.zeros_like,
    torch.ones_like,
    torch.full_like,
    torch.rand_like,
    torch.randn_like,
    torch.randint_like,
    torch.result_type,
}
_FACTS: set[Any] = (
    _getters(*_FACT_GETTERS.split()) | _methods(*_FACT_METHODS.split()) | _FACT_FUNCTIONS
)

_REFUSED = {
    torch.Tensor.data_ptr: "a raw address cannot be guarded; use p.clone() or engine.full_parameter(p)",
    torch.Tensor.set_: "its storage is the engine's; use p.copy_() or p.data = value",
    torch.Tensor.resize_: "its size is fixed; engine.close() first",
    torch.Tensor.resize_as_: "its size is fixed; engine.close() first",
    torch.Tensor.share_memory_: "its memory is the engine's; engine.close() first",
    torch.Tensor.pin_memory: "its memory is the engine's; use p.clone().pin_memory()",
}

_GRAPH_FUNCTIONS = {torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward}


def _mutates_first(func: Any, kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    operator = name.startswith("__i") and name.endswith("__") and name != "__invert__"
    return in_place or operator or name == "__setitem__" or "out" in kwargs


def _storage_of(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # no storage: sparse and the like are never views
        return None


class _Attach(torch.autograd.Function):
    """Identity on values: gives the leased tensor a place in the graph behind its parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, holder: list[torch.Tensor]) -> torch.Tensor:
        return holder[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def _has_guarded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if not args and not kwargs:
        return False
    return any(isinstance(item, _Guarded) for item in tree_flatten((args, kwargs))[0])


@contextlib.contextmanager
def _netted(leased: dict[int, tuple[torch.Tensor, int, torch.Tensor, int]]) -> Iterator[None]:
    """What autograd saves of leased tensors becomes tokens, so that the leases can end."""
    nets = {t._gm_slot.engine.net for _, _, t, _ in leased.values()}
    pushed = []
    try:
        if torch.is_grad_enabled():
            pushed = [net for net in nets if net.push()]
        yield
    finally:
        for net in reversed(pushed):
            net.pop()


def _open_in_graph(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.autograd.grad and backward name parameters as leaves: identity counts, not bytes."""
    named = {id(t): t for t in tree_flatten((args, kwargs))[0] if isinstance(t, _Guarded)}
    for tensor in named.values():
        if not isinstance(tensor, nn.Parameter):
            raise GuardError(
                f"{tensor._gm_slot.name}: p.data and p.detach() are not part of a graph"
            )
    with _plain_torch():
        edges = {key: torch.autograd.graph.get_gradient_edge(t) for key, t in named.items()}
    args, kwargs = tree_map(lambda item: edges.get(id(item), item), (args, kwargs))
    return func(*args, **kwargs)


def _serve(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs `func` with each guarded tensor replaced by a leased one."""
    flat, spec = tree_flatten((args, kwargs))
    leased: dict[int, tuple[torch.Tensor, int, torch.Tensor, int]] = {}
    mutates = _mutates_first(func, kwargs)
    # torch.nn.init asks its arguments before it turns gradients off.
    is_init = getattr(func, "__module__", None) == "torch.nn.init"
    for i, item in enumerate(flat):
        if not isinstance(item, _Guarded):
            continue
        slot = item._gm_slot
        with _plain_torch():
            wants_grad = item.requires_grad and torch.is_grad_enabled() and not is_init
        if wants_grad and mutates and i == 0:
            raise RuntimeError(
                "a leaf Variable that requires grad is being used in an in-place operation. "
                f"({slot.name})"
            )
        if id(item) not in leased:
            plain, lease = slot.lease()
            shown = plain
            if wants_grad:
                with _plain_torch():
                    shown = _Attach.apply(item, [plain])
            leased[id(item)] = (shown, lease, item, shown._version)
        flat[i] = leased[id(item)][0]
    args, kwargs = tree_unflatten(flat, spec)
    with torch.no_grad() if is_init else _netted(leased):
        result = func(*args, **kwargs)
    by_storage = {_storage_of(shown): key for key, (shown, _, _, _) in leased.items()}
    escaped: set[int] = set()

    def settle(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and not isinstance(value, _Guarded):
            for shown, _, original, _ in leased.values():
                if value is shown and mutates:
                    return original  # in-place operations return their first argument
            key = by_storage.get(_storage_of(value))
            if key is not None:
                escaped.add(key)
        elif value is not None and not isinstance(value, bool | int | float | complex | str):
            escaped.update(leased)  # numpy arrays, storages: they may show the bytes
        return value

    result = tree_map(settle, result)
    for key, (shown, lease, original, version) in leased.items():
        is_written = shown._version != version
        if is_written and getattr(original, "_gm_counts", True):
            original._gm_slot.epoch += 1
        if not is_written and key not in escaped:
            original._gm_slot.engine.core.lease_unwatch(lease)
    return result


class _Guarded:
    """What guarded parameters and their aliases have in common."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FACTS and not _has_guarded(args[1:], kwargs):
            with _plain_torch():
                return func(*args, **kwargs)
        if func in _GRAPH_FUNCTIONS:
            return _open_in_graph(func, args, kwargs)
        first = args[0] if args else None
        if isinstance(first, _Guarded):
            slot = first._gm_slot
            if slot.engine.closed:
                raise GeminiError(f"{slot.name}: its engine is closed; this tensor went with it")
            if func in _REFUSED:
                raise GuardError(f"{slot.name}: {func.__name__}: {_REFUSED[func]}")
            special = _SPECIAL.get(func)
            if special is not None:
                return special(slot, first, *args[1:], **kwargs)
        return _serve(func, args, kwargs)

    # Two methods that torch does not tell __torch_function__ of:

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        raise GuardError(f"{self._gm_slot.name}: set_: {_REFUSED[torch.Tensor.set_]}")

    def as_subclass(self, cls: type) -> Any:
        raise GuardError(
            f"{self._gm_slot.name}: as_subclass: the result would not be guarded; use p.clone()"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) in memo:
            return memo[id(self)]
        result = memo[id(self)] = self._gm_plain_copy()
        return result

    def __copy__(self) -> torch.Tensor:
        return self._gm_plain_copy()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._gm_plain_copy().__reduce_ex__(protocol)

    def _gm_plain_copy(self) -> torch.Tensor:
        """An ordinary, unmanaged tensor or parameter with these values."""
        slot = self._gm_slot
        values = slot.read_weight()
        if not isinstance(self, nn.Parameter):
            return values
        with _plain_torch():
            requires_grad = self.requires_grad
        return nn.Parameter(values, requires_grad)


class GuardedTensor(_Guarded, torch.Tensor):
    """`p.data` or `p.detach()` of a managed parameter: guarded like the parameter itself."""


def _alias(slot: Slot, counts: bool) -> torch.Tensor:
    """What `p.data` and `p.detach()` are: as guarded as the parameter, without gradient.

    Writes through `p.detach()` count for autograd's check of versions, those through `p.data` do not.
    """
    plain = slot.blob(slot.engine.core.lease(slot.id, 0, 0, 0))
    with torch.inference_mode(False), _plain_torch():
        alias = torch.Tensor._make_subclass(GuardedTensor, plain, False)
    alias._gm_slot = slot
    alias._gm_counts = counts
    return alias


def _grad_of(slot: Slot) -> torch.Tensor | None:
    """The gradient that the engine holds, as a tensor that reads and writes it."""
    if not slot.has_grad_home:
        with _plain_torch():
            return torch.Tensor.grad.__get__(slot.parameter)
    if not slot.engine.core.has_grad(slot.id):
        return None
    grad = slot.grad_view() if slot.grad_view is not None else None
    if grad is None:
        grad = HeldGrad.make(slot)
        slot.grad_view = weakref.ref(grad)
    return grad


def _set_data(slot: Slot, owner: torch.Tensor, value: torch.Tensor) -> None:
    slot.assign(value)


def _set_requires_grad(slot: Slot, owner: torch.Tensor, value: bool) -> None:
    slot.engine.check_requires_grad(slot, bool(value))
    with _plain_torch():
        owner.requires_grad = value


def _requires_grad_(slot: Slot, owner: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
    _set_requires_grad(slot, owner, requires_grad)
    return owner


def _type(slot: Slot, owner: torch.Tensor, dtype: Any = None, **kwargs: Any) -> Any:
    if dtype is None:
        with _plain_torch():
            return owner.type()
    return _serve(torch.Tensor.type, (owner, dtype), kwargs)


_SPECIAL: dict[Any, Any] = {
    torch.Tensor.data.__get__: lambda slot, owner: _alias(slot, False),
    torch.Tensor.data.__set__: _set_data,
    torch.Tensor.detach: lambda slot, owner: _alias(slot, True),
    torch.detach: lambda slot, owner: _alias(slot, True),
    torch.Tensor.grad.__get__: lambda slot, owner: (
        _grad_of(slot) if isinstance(owner, nn.Parameter) else None
    ),
    torch.Tensor.grad.__set__: lambda slot, owner, value: slot.set_grad(value),
    torch.Tensor.grad.__delete__: lambda slot, owner: slot.set_grad(None),
    torch.Tensor.requires_grad.__set__: _set_requires_grad,
    torch.Tensor.requires_grad_: _requires_grad_,
    torch.Tensor.type: _type,
}
_FACTS -= set(_SPECIAL)


class _Open:
    """What a parameter is inside its unit: plain for torch, except for two attributes."""

    __slots__ = ()
    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def data(self) -> torch.Tensor:
        return self._gm_slot.lease()[0]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self._gm_slot.assign(value)

    @property
    def grad(self) -> torch.Tensor | None:
        return _grad_of(self._gm_slot)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self._gm_slot.set_grad(value)

    set_ = _Guarded.set_
    __deepcopy__ = _Guarded.__deepcopy__
    __copy__ = _Guarded.__copy__
    __reduce_ex__ = _Guarded.__reduce_ex__
    _gm_plain_copy = _Guarded._gm_plain_copy


_guarded_classes: dict[type, type] = {}
_open_classes: dict[type, type] = {}


def is_guarded(value: Any) -> bool:
    """Whether `value` is a managed parameter outside its unit, or an alias of one."""
    return isinstance(value, _Guarded)


def guarded_class(plain: type) -> type:
    """The class of parameters of class `plain` outside their unit."""
    if plain not in _guarded_classes:
        _guarded_classes[plain] = type(f"Guarded{plain.__name__}", (_Guarded, plain), {})
    return _guarded_classes[plain]


def open_class(plain: type) -> type:
    """The class of parameters of class `plain` inside their unit."""
    if plain not in _open_classes:
        _open_classes[plain] = type(f"Open{plain.__name__}", (_Open, plain), {})
    return _open_classes[plain]


# ---- functions that never ask ----


def close_side_doors() -> None:
    """Puts a check before torch functions that read tensors without asking __torch_function__.

    [Note: side doors] torch.tensor(p) and its kin read the bytes behind a tensor at once. While a parameter
    is guarded these are not its bytes, so a guarded argument is served or refused first; all other calls
    pass through. Done once per process, by the first manage().

    `with torch.device(...)` knows by identity the functions that it gives a device, and remembers them when it is
    first used: it has to remember torch's own, which the checks call.
    """
    _device._device_constructors()
    for owner, name in (
        (torch, "tensor"),
        (torch, "as_tensor"),
        (torch, "asarray"),
        (torch.Tensor, "new_tensor"),
        (torch.utils.dlpack, "to_dlpack"),
        (torch.utils, "swap_tensors"),
    ):
        original = getattr(owner, name)
        if not hasattr(original, "_gm_original"):
            setattr(owner, name, _checked(original, is_refused=name == "swap_tensors"))


def _guarded_in(values: Any) -> Iterator[Any]:
    """Guarded tensors in nested lists and tuples, as torch.tensor takes them."""
    for value in values:
        if isinstance(value, _Guarded):
            yield value
        elif isinstance(value, list | tuple):
            yield from _guarded_in(value)


def _checked(original: Any, is_refused: bool) -> Any:
    @functools.wraps(original)
    def checked(*args: Any, **kwargs: Any) -> Any:
        found = next(_guarded_in(args), None)
        if found is None:
            return original(*args, **kwargs)
        if is_refused:
            raise GuardError(
                f"{found._gm_slot.name}: {original.__name__} would replace its storage"
            )
        with torch.no_grad():
            return _serve(original, args, kwargs)

    checked._gm_original = original
    torch.jit._builtins._register_builtin(checked, f"aten::{original.__name__}")  # for scripts
    return checked


# ---- gradients ----


class _ReadOnlyGrad(torch.Tensor):
    """A view of a held gradient: a copy for reading; writing it would be lost and is refused."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def make(values: torch.Tensor, slot: Slot) -> _ReadOnlyGrad:
        view = torch.Tensor._make_wrapper_subclass(
            _ReadOnlyGrad,
            values.shape,
            strides=values.stride(),
            dtype=values.dtype,
            device=values.device,
        )
        view._gm_values = values
        view._gm_slot = slot
        return view

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _dispatch_grads(func, args, kwargs or {})


class HeldGrad(torch.Tensor):
    """`p.grad` of a managed parameter: operations read a copy, in-place ones write it back."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def make(slot: Slot) -> HeldGrad:
        with torch.inference_mode(False):
            grad = torch.Tensor._make_wrapper_subclass(
                HeldGrad, slot.shape, strides=slot.strides, dtype=slot.dtype, device=slot.device
            )
        grad._gm_slot = slot
        grad._gm_dropped = False
        return grad

    def read(self) -> torch.Tensor:
        """A copy of the gradient."""
        if self._gm_dropped:
            raise GuardError(
                f"{self._gm_slot.name}: this gradient was dropped (zero_grad, or p.grad = None); clone it "
                "to keep it"
            )
        return self._gm_slot.read_grad()

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _dispatch_grads(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(self.read(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return repr(self.read())


def _dispatch_grads(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs one operator on copies of held gradients; what it mutates is written back."""
    values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def open_grad(item: Any) -> Any:
        if isinstance(item, _ReadOnlyGrad):
            return item._gm_values
        if not isinstance(item, HeldGrad):
            return item
        if id(item) not in values:
            values[id(item)] = (item.read(), item)
        return values[id(item)][0]

    written: list[HeldGrad] = []
    schema = func._schema
    named = dict(zip([a.name for a in schema.arguments], args, strict=False)) | kwargs
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            for item in tree_flatten(named.get(argument.name))[0]:
                if isinstance(item, _ReadOnlyGrad):
                    raise GuardError(
                        f"{item._gm_slot.name}: a view of a managed gradient can only be read; write "
                        "the whole: p.grad.mul_(...), p.grad.copy_(...), p.grad = ..."
                    )
                if isinstance(item, HeldGrad):
                    written.append(item)
    plain_args, plain_kwargs = tree_map(open_grad, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    for item in written:
        item._gm_slot.write_grad(values[id(item)][0])
    by_storage = {_storage_of(v): (v, item) for v, item in values.values()}

    def close_grad(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        found = by_storage.get(_storage_of(value))
        if found is None:
            return value
        whole, item = found
        return item if value is whole else _ReadOnlyGrad.make(value, item._gm_slot)

    return tree_map(close_grad, result)
