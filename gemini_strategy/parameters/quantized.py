"""Quantized weights: frozen parameters that are bytes, with whatever their class keeps beside these.

There are two kinds. A subclass of Parameter has its bytes as its own data (bitsandbytes: Int8Params, Params4bit). A
wrapper has none, and is made of plain tensors (torchao; `__tensor_flatten__`): its parts. What moves is bytes, in the
dtype that they have, whatever they mean. The class and what else it keeps (scales of bitsandbytes) stay with the
parameter, on the device.

Invariants
    1. A quantized weight is served: its data is absent in its units, too, and each operation gets the bytes of that
       moment. So what a forward keeps of it for its backward (autograd functions that do without save_for_backward)
       keeps no chunk.
    2. Its bytes are never converted: not to another dtype, not through fp32.
    3. Nothing here imports the packages.
    4. Its bytes are not laid out anew while it is managed (Unpacked).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from gemini_strategy import _torch
from gemini_strategy.errors import GeminiError

_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def is_wrapper(parameter: torch.Tensor) -> bool:
    """Whether it is made of other tensors."""
    return _torch.is_wrapper_subclass(parameter)


def parts(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors that a wrapper is made of, with their dotted attributes; of others nothing."""
    if not is_wrapper(tensor):
        return
    for name in tensor.__tensor_flatten__()[0]:
        inner = getattr(tensor, name)
        if is_wrapper(inner):
            yield from ((f"{name}.{rest}", part) for rest, part in parts(inner))
        elif isinstance(inner, torch.Tensor):
            yield name, inner


def is_bytes(parameter: torch.Tensor) -> bool:
    """Whether its data are bytes to which its class gives a meaning."""
    is_own = type(parameter) not in (torch.Tensor, nn.Parameter)
    has_state = getattr(parameter, "quant_state", None) is not None
    return is_own and not parameter.requires_grad and (parameter.dtype in _INTEGERS or has_state)


def check(name: str, parameter: torch.Tensor) -> None:
    """Refuses quantized weights that are trained, or not quantized yet.

    Raises:
        GeminiError: with the parameter's name and the way out.
    """
    kind = type(parameter).__name__
    if any(base.__name__ == "DTensor" for base in type(parameter).__mro__):
        raise GeminiError(
            f"{name} is a DTensor, a part of a parameter that another library shards: manage() shards parameters "
            "itself; use neither fully_shard() nor parallelize_module(), before it or after"
        )
    if is_wrapper(parameter) and parameter.requires_grad:
        raise GeminiError(
            f"{name} is a {kind} and trainable: weights that are made of other tensors are moved as bytes, and are not "
            "trained; freeze it (requires_grad_(False)), and train an adapter"
        )
    is_waiting = getattr(parameter, "bnb_quantized", None) is False
    is_int8 = parameter.dtype is torch.int8 or getattr(parameter, "has_fp16_weights", False)
    if is_waiting or (kind == "Int8Params" and not is_int8):
        raise GeminiError(
            f"{name} is a {kind} that has not been quantized yet, as that happens when the module is moved: "
            'model.to("cpu") or model.to("cuda") before manage()'
        )


def _kept(module: nn.Module, parameter: torch.Tensor) -> dict[int, torch.Tensor]:
    """The tensors that a class of bitsandbytes keeps beside a parameter, by id(); of other parameters nothing."""
    if not is_bytes(parameter):
        return {}
    tables = [vars(parameter)]
    for value in (*vars(module).values(), *vars(parameter).values()):
        is_theirs = type(value).__module__.startswith("bitsandbytes.")
        if is_theirs and not isinstance(value, torch.Tensor | nn.Module | type):
            tables.append(vars(value))
            inner = vars(value).get("state2")
            if inner is not None:
                tables.append(vars(inner))
    return {id(v): v for table in tables for v in table.values() if type(v) is torch.Tensor}


def aliases(module: nn.Module, parameter: torch.Tensor) -> list[torch.Tensor]:
    """Other tensors of a quantized parameter's class that are the whole of its data, each once."""
    if parameter.is_meta:
        return []
    return [value for value in _kept(module, parameter).values() if _is_same(value, parameter)]


def _is_same(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    if not _torch.has_storage(value) or not _torch.has_storage(parameter):
        return False
    geometry = [(t.shape, t.stride(), t.storage_offset(), t.dtype) for t in (value, parameter)]
    is_one = _torch.storage_address(value) == _torch.storage_address(parameter)
    return is_one and geometry[0] == geometry[1]


def companions(module: nn.Module, parameter: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a class of bitsandbytes keeps beside the bytes: scales, tables."""
    known = {id(alias) for alias in aliases(module, parameter)} | {id(parameter)}
    return [value for key, value in _kept(module, parameter).items() if key not in known]


def follow(wrapper: torch.Tensor) -> None:
    """A wrapper has the device of its parts, which have got another one; it stays the same object."""
    names, context = wrapper.__tensor_flatten__()
    inner = {name: getattr(wrapper, name) for name in names}
    device = next(iter(inner.values())).device
    if wrapper.device == device:
        return
    for value in inner.values():
        if is_wrapper(value):
            follow(value)
    made = type(wrapper).__tensor_unflatten__(inner, context, wrapper.shape, wrapper.stride())
    made.requires_grad_(wrapper.requires_grad)
    _torch.swap_tensor_impl(wrapper, made)


_PACKING = "support_avx512bf16_for_cpu"


def would_pack(module: nn.Module) -> bool:
    """bitsandbytes' Linear4bit packs its weight anew in the first forward that evaluates on a CPU with AVX512-BF16."""
    return bool(vars(module).get(_PACKING, False))


class Unpacked:
    """A layer that would pack its weight, and does not: a handle, whose remove() gives it its own way back."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        setattr(module, _PACKING, False)

    def remove(self) -> None:
        """Idempotent."""
        setattr(self._module, _PACKING, True)
