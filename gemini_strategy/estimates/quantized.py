"""Quantized weights in an estimate: what a linear layer with one does in a step, and layers taken to have one.

Such a weight is bytes, and its package's kernels know no tensors without values. What they do is known: the weight is
made floating-point and multiplied. bitsandbytes drops it then, and makes it again in the backward, for which it keeps
bytes alone; its kernels for 8 bit multiply integers, and hold a little more or less. A weight that is a wrapper
(torchao) is made by operations that autograd sees, and stays until the backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gemini_strategy.errors import GeminiError
from gemini_strategy.estimates.tensors import Live
from gemini_strategy.parameters import quantized
from gemini_strategy.parameters.registration import Registration

_BLOCK = 64  # elements of one scale, 4 bit
_SCALES = 256  # scales of one scale of theirs, where these are quantized too

Touch = Callable[[Sequence[int]], None]
"""A backward node needs the parameters with these numbers."""


class _Product(torch.autograd.Function):
    """x (..., inputs) times a weight (outputs, inputs) that has to be made floating-point first."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, n_outputs: int, touch: Touch, numbers: Any) -> Any:  # type: ignore[override]
        ctx.rest = n_outputs, x.shape[-1], touch, numbers
        return functional.linear(x, x.new_empty(n_outputs, x.shape[-1]))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        n_outputs, n_inputs, touch, numbers = ctx.rest
        touch(numbers)
        return grad @ grad.new_empty(n_outputs, n_inputs), None, None, None


def _forward(module: nn.Linear, touch: Touch, numbers: Sequence[int]) -> Callable[..., Any]:
    keeps = quantized.is_wrapper(module.weight)

    def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        dtype = getattr(module, "compute_dtype", None) or x.dtype
        if keeps:
            made = x.new_empty(module.out_features, module.in_features, dtype=dtype)
            y = functional.linear(x.to(dtype), made)
        else:
            y = _Product.apply(x.to(dtype), module.out_features, touch, tuple(numbers))
        if module.bias is not None:
            y = y + module.bias.to(y.dtype)
        return y.to(x.dtype)

    return forward


@contextlib.contextmanager
def multiplied(registration: Registration, live: Live, touch: Touch) -> Iterator[None]:
    """Inside, linear layers with quantized weights do what they do in a step.

    What their classes keep beside the bytes counts as tensors that stay.

    Raises:
        GeminiError: another module has such a weight.
    """
    params, begins = registration.unit_tables()
    with contextlib.ExitStack() as stack:
        for unit, (name, module) in enumerate(registration.modules()):
            own = dict.fromkeys(params[begins[unit] : begins[unit + 1]])
            numbers = [i for i in own if registration.slots[i].is_raw]
            if not numbers:
                continue
            if not isinstance(module, nn.Linear):
                raise GeminiError(
                    f"module {name!r} is a {type(module).__name__} with a quantized weight: an estimate knows what "
                    "linear layers do with theirs, and of others nothing; keep this one in bf16"
                )
            for number in numbers:
                for tensor in quantized.companions(module, registration.slots[number].parameter):
                    live.note(tensor)
            stack.enter_context(calling(module, _forward(module, touch, numbers)))
        yield


@contextlib.contextmanager
def calling(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, the module has another forward."""
    own = module.__dict__.get("forward")
    module.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


# ---- models from a configuration alone ----


class _Packed(nn.Parameter):
    """Bytes to which a package would give a meaning: parameters/quantized.py takes them for what they are."""


def pack_linears(model: nn.Module, kind: str, keeps: Sequence[str], is_double: bool) -> None:
    """Gives the linear layers of a model on the meta device weights of as many bytes as bitsandbytes' have.

    Args:
        model: its other parameters stay as they are, and all are frozen.
        kind: of choices.QUANTIZED.
        keeps: last parts of the names of layers that keep theirs, such as "lm_head".
        is_double: scales of 4 bit are quantized, too.
    """
    model.requires_grad_(False)
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or name.rpartition(".")[2] in keeps:
            continue
        n, rows = module.weight.numel(), module.out_features
        if kind == "int8":
            packed = torch.empty(module.weight.shape, dtype=torch.int8, device="meta")
            scales = [torch.empty(rows, device="meta")]
        else:
            packed = torch.empty(-(-n // 2), 1, dtype=torch.uint8, device="meta")
            scales = _scales(-(-n // _BLOCK), is_double)
        module.weight = _Packed(packed, requires_grad=False)
        for number, tensor in enumerate(scales):
            module.register_buffer(f"scales_{number}", tensor, persistent=False)


def _scales(n_blocks: int, is_double: bool) -> list[torch.Tensor]:
    if not is_double:
        return [torch.empty(n_blocks, device="meta")]
    first = torch.empty(n_blocks, dtype=torch.uint8, device="meta")
    return [first, torch.empty(-(-n_blocks // _SCALES), device="meta")]
