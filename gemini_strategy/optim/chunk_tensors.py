"""What an optimizer's own step() gets for a managed parameter: plain tensors at the addresses of its chunk."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini_strategy import _torch
from gemini_strategy.optim import parts
from gemini_strategy.optim.opaque import Leaf
from gemini_strategy.optim.opaque_parts import Part

if TYPE_CHECKING:
    from gemini_strategy.parameters.slot import Slot


def tensor_at(
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """A plain tensor on dense memory of the engine, which does not own it."""
    n_bytes = torch.Size(shape).numel() * dtype.itemsize
    if n_bytes == 0:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)
    with _torch.InferenceMode(False), torch.no_grad():
        storage = _torch.storage_from_address(address, device, n_bytes)
        tensor = torch.empty(0, dtype=dtype, device=device)
        return tensor.set_(storage, 0, shape, strides)


class StandIn:
    """What the optimizer's step() gets for one parameter."""

    def __init__(self, slot: Slot, part: Part, core: Any, grad_dtype: torch.dtype) -> None:
        weight, low, grad, self.states = core.opaque_place(slot.id)
        where = part.shape, part.strides
        self.weight = tensor_at(weight, *where, slot.dtype, slot.device)
        self.grad = tensor_at(grad, *where, grad_dtype, slot.device)
        self.low = None
        if slot.has_low:
            kind = torch.int16 if slot.dtype is torch.bfloat16 else torch.float32
            self.low = tensor_at(low, *where, kind, slot.device)
        self.parameter = nn.Parameter(self.weight)
        self.original = slot.parameter
        own = [tensor for tensor in (self.weight, self.low, self.grad) if tensor is not None]
        self._spans = [(_torch.place(tensor)[0], tensor.nbytes) for tensor in own]

    def open(self, scale: torch.Tensor | float, marks: Mapping[str, Any]) -> torch.Tensor:
        """Gives the parameter its values, these attributes and its gradient; gives that."""
        self._marks = marks
        if self.low is not None:
            self.parameter.data = self._master()
        for name in marks_of(self.parameter):
            del vars(self.parameter)[name]
        vars(self.parameter).update(copy_of_marks(marks))
        grad = self.grad.to(self.parameter.dtype)
        if isinstance(
            scale, torch.Tensor
        ):  # a product with it alone would round it to 16 bits on CUDA
            grad = (grad.float() * scale).to(grad.dtype)
        elif scale != 1.0:
            grad = grad * scale
        self.parameter.grad = grad
        return grad

    def has_marks(self) -> bool:
        """Whether the attributes are what they were."""
        return parts.difference(marks_of(self.parameter), dict(self._marks), "") is None

    def close(self, is_ahead: bool = False) -> None:
        """The values have become others, and attributes may have: of a step, the program's, too."""
        self.parameter.grad = None
        left, before = marks_of(self.parameter), self._marks
        left = before if is_ahead else left
        for name in before.keys() - left.keys():
            vars(self.original).pop(name, None)
        changed = {
            name: self.apart(value)
            for name, value in left.items()
            if name not in before or parts.difference(value, before[name], "") is not None
        }
        vars(self.original).update(changed)
        if self.low is None:
            return
        master = self.parameter.data
        if self.low.dtype is torch.float32:
            self.weight.copy_(master)
        else:  # csrc/arith/format.h, gm_pack_bf16
            bits = master.view(torch.int32).masked_fill(master.isnan(), 0x7FC00000)
            high = (bits + 0x8000) >> 16
            self.weight.view(torch.int16).copy_(high)
            self.low.copy_(bits - (high << 16))
            self.parameter.data = self.weight  # the masters of a whole model are too many

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a plain tensor is in the weight, its low part or the gradient."""
        address = _torch.place(tensor)[0]
        return any(begin <= address < begin + n_bytes for begin, n_bytes in self._spans)

    def apart(self, value: Any) -> Any:
        """What outlives the step has no bytes of the chunk."""
        if not isinstance(value, torch.Tensor) or _torch.is_wrapper_subclass(value):
            return value
        return value.clone() if self.has(value) else value

    def _master(self) -> torch.Tensor:
        assert self.low is not None
        if self.low.dtype is torch.float32:
            return self.low
        bits = self.weight.view(torch.int16).to(torch.int32) << 16
        return (bits + self.low).view(torch.float32)


def marks_of(parameter: torch.Tensor) -> dict[str, Any]:
    """Attributes that programs have set on it."""
    return {k: v for k, v in vars(parameter).items() if not k.startswith("_gm")}


def copy_of_marks(marks: Mapping[str, Any]) -> dict[str, Any]:
    """What of them may be written in place is copied, but for modules."""
    fixed = (bool, int, float, complex, str, bytes, type(None), nn.Module)
    own = {name: value for name, value in marks.items() if not isinstance(value, fixed)}
    return {**marks, **parts.copies([own], None, None)[0]} if own else dict(marks)


@functools.cache
def _keys_of_a_thread() -> tuple[Any, Any]:
    """What torch's dispatcher includes and excludes in a new one."""
    with ThreadPoolExecutor(1) as pool:
        keys = pool.submit(_torch.included_keys), pool.submit(_torch.excluded_keys)
        return keys[0].result(), keys[1].result()


@contextlib.contextmanager
def in_plain_torch() -> Iterator[None]:
    """Inside, torch is as in a new thread. A part of a step may run inside an operation on a parameter (absent.py),
    where keys are excluded that torch.compile needs, and under a mode of the program's that is not meant for the step.
    """
    modes = _torch.without_modes() if _torch.n_dispatch_modes() else contextlib.nullcontext()
    with _torch.ForceDispatchKeyGuard(*_keys_of_a_thread()), modes:
        yield


@contextlib.contextmanager
def on_stream(device: torch.device, stream: int) -> Iterator[None]:
    """Inside, the device and its stream are the ones that the core has said, which as a rule are the caller's. Where
    that is not CUDA's default one, work that is launched there nevertheless (as bitsandbytes does) is in order, too.
    """
    if device.type == "cpu":
        yield
        return
    own, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    if own.cuda_stream != stream:  # an ExternalStream of 0 would be another one
        own = torch.cuda.ExternalStream(stream, device) if stream else default
    is_other = own.cuda_stream != default.cuda_stream
    if is_other:
        default.wait_stream(own)
    try:
        with torch.cuda.stream(own):
            yield
    finally:  # of a step that has failed, too: what it has launched comes before the blocks' next use
        if is_other:
            own.wait_stream(default)


def room(leaf: Leaf) -> torch.Tensor:
    """For its values, on the host."""
    return torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device="cpu")


def twin(
    tensor: torch.Tensor, device: torch.device, twins: dict[int, torch.Tensor]
) -> torch.Tensor:
    """A copy there, one of each tensor."""
    if id(tensor) not in twins:
        twins[id(tensor)] = tensor.detach().to(device, copy=True)
    return twins[id(tensor)]
