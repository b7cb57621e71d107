"""Gradients that torch keeps, of an engine without an optimizer: on several ranks each becomes their mean.

So torch's own optimizer steps alike on every rank, as it has to: each rank keeps its part of what is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gemini_strategy.errors import GeminiError
from gemini_strategy.precision import FORMATS

if TYPE_CHECKING:
    from gemini_strategy.parameters.slot import Slot


def average_grad(parameter: Any) -> None:
    """An accumulation hook. What was there before is the mean already, and stays so; an error leaves nothing there."""
    slot: Slot = parameter._gm_slot
    grad, parameter.grad = parameter.grad, None
    _check(slot, grad)
    size = slot.engine.ranks.size
    before = 1 << (size.bit_length() - 1)  # exact, and as gradients of an optimizer are divided
    mean = grad.div(before).contiguous()
    where = slot.id, mean.data_ptr(), mean.numel(), FORMATS[mean.dtype], slot.engine.stream()
    try:
        with slot.engine.ranks.explaining():
            slot.engine.core.sum(*where)
    except GeminiError as error:
        text = f"{slot.name}: the mean of its gradients over the ranks: {error}"
        raise type(error)(text) from None
    if before < size:
        mean.copy_(mean.float() / (size / before))
    parameter.grad = grad.copy_(mean)


def _check(slot: Slot, grad: torch.Tensor) -> None:
    if grad.layout is not torch.strided or grad.dtype not in FORMATS:
        raise GeminiError(
            f"{slot.name}: its gradient is {grad.layout} and {grad.dtype}, of which {slot.engine.ranks.size} ranks "
            "cannot take the mean: build it with sparse=False, in fp32, bf16 or fp16"
        )
    if grad.requires_grad:
        raise GeminiError(
            f"{slot.name}: backward(create_graph=True) makes a gradient that can be differentiated, and ranks average "
            "numbers only: use torch.autograd.grad(loss, parameters, create_graph=True)"
        )
