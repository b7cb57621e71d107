"""Memory of a training step of a model that does not fit: recorded on tensors without bytes, as `estimate()` does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gemini_strategy.arguments import Arguments
from gemini_strategy.elixir.search import NO_GRADIENT, PRECISION_OF, StepFunction
from gemini_strategy.estimates.paper import PaperModel
from gemini_strategy.estimates.step import record
from gemini_strategy.precision import Precision


@dataclass(frozen=True)
class MemoryProfile:
    """Bytes of one training step on one device that holds the whole model, without states of an optimizer.

    Attributes:
        param_occ: of the weights that are computed with, each parameter once.
        buffer_occ: of the buffers, each once, in their own dtypes.
        grad_occ: of the gradients that the step leaves, in the dtypes of their weights; a frozen or unused parameter
            has none.
        activation_occ: the most that all other tensors hold at one moment of the step: the inputs, what autograd saves,
            gradients of activations, temporary results, and gradients of parameters until they are complete. It is
            `activation_bytes` of `estimate()` without the buffers: each storage once, rounded up to 512 bytes as
            torch's allocator does. What kernels take for themselves and gaps in the allocator's memory are not in it.
    """

    param_occ: int
    buffer_occ: int
    grad_occ: int
    activation_occ: int


def cuda_memory_profiling(
    model: nn.Module, inp: Any, step_fn: StepFunction, dtype: torch.dtype = torch.float
) -> MemoryProfile:
    """The memory of a training step on CUDA, without a GPU and without the memory: nothing is allocated or computed.

    Args:
        model: on any device, the meta device best; it is afterwards as before.
        inp: an example batch for step_fn, of (meta) tensors; values do not count.
        step_fn: step_fn(model, inp) runs forward and backward, for which its tensors have no values; what it returns
            does not count.
        dtype: torch.float32, float16 or bfloat16; of the weights as ElixirModule(dtype=) has them.

    Raises:
        ValueError: `dtype` is another one, or step_fn leaves no gradient.
        GeminiError: manage() would refuse the model, or its forward or step_fn asks for values of tensors.
    """
    Arguments("cuda_memory_profiling", locals()).check_choice("dtype", tuple(PRECISION_OF))
    precision = Precision(PRECISION_OF[dtype])
    registration = PaperModel(model, None, torch.device("cuda", 0), precision).registration

    def step(model: nn.Module, inp: Any) -> None:
        step_fn(model, inp)

    recorded = record(model, inp, registration, precision, step_fn=step)
    if not recorded.parameters:
        raise ValueError(NO_GRADIENT)
    sizes = [slot.parameter.numel() * slot.dtype.itemsize for slot in registration.slots]
    return MemoryProfile(
        param_occ=sum(sizes),
        buffer_occ=sum(b.numel() * b.element_size() for b in model.buffers()),
        grad_occ=sum(sizes[number] for number in recorded.parameters),
        activation_occ=recorded.peak_bytes - recorded.kept_bytes,
    )
