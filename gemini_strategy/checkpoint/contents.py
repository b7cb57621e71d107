"""What a checkpoint of an engine has: its tensors by name, and what is beside them.

The names are those of torch.distributed.checkpoint for {"model": ..., "optimizer_0": ...}, flattened with dots, where
states of the optimizer go by the parameter's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini_strategy import _C
from gemini_strategy.errors import GeminiError
from gemini_strategy.parameters import order, quantized
from gemini_strategy.parameters.homes import MOMENTS
from gemini_strategy.parameters.slot import Slot

if TYPE_CHECKING:
    from gemini_strategy.runtime import Runtime


@dataclass(frozen=True)
class Field:
    """A field of a slot: its master (the weight of what has none) or a moment.

    Attributes:
        path: in the nested state.
        name: "master", "exp_avg" or "exp_avg_sq".
    """

    path: tuple[str, ...]
    slot: Slot
    name: str

    @property
    def key(self) -> str:
        return ".".join(self.path)

    @property
    def dtype(self) -> torch.dtype:
        """In which it is kept."""
        is_weight = self.name == "master" and not self.slot.has_low
        return self.slot.dtype if is_weight else torch.float32

    @property
    def shape(self) -> tuple[int, ...]:
        return self.slot.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Of its elements, dense, whatever their order."""
        return self.slot.strides

    @property
    def order(self) -> tuple[int, ...]:
        """Its dimensions, the slowest first, as its elements lie in memory."""
        if order.is_same(self.shape, self.strides, order.row_major(self.shape)):
            return tuple(range(len(self.shape)))
        return tuple(sorted(range(len(self.shape)), key=lambda d: (-self.strides[d], d)))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def part(self) -> tuple[int, int]:
        """(first, n): the elements that this rank has."""
        return self.slot.part()

    @property
    def n_bytes(self) -> int:
        """Of all ranks' parts together."""
        return self.numel * self.dtype.itemsize

    @property
    def part_bytes(self) -> int:
        """Of this rank's part."""
        return self.part()[1] * self.dtype.itemsize

    def read(self, first: int, n: int) -> torch.Tensor:
        """The n elements from `first` on, which this rank has: flat, on the CPU, in the order of memory."""
        return self._read(self.slot.engine.core.read, first, n)[0]

    def read_saved(self, first: int, n: int) -> torch.Tensor | None:
        """The same as it was when the core's save_begin was called; None: other chunks come first."""
        values, is_read = self._read(self.slot.engine.core.save_read, first, n)
        return values if is_read else None

    def _read(self, read: Callable[..., Any], first: int, n: int) -> tuple[torch.Tensor, Any]:
        name = "weight" if self.name == "master" and not self.slot.has_low else self.name
        values = torch.empty(n, dtype=self.dtype, device="cpu")
        return values, read(self.slot.id, _C.FIELDS[name], first, n, values.data_ptr())

    def fill(self, first: int, values: torch.Tensor) -> None:
        """The elements from `first` on become `values`, flat."""
        slot = self.slot
        is_float = slot.is_float
        name = "weight" if self.name == "master" and not is_float else self.name
        values = values.to(torch.float32 if is_float else slot.dtype)
        numbers = values.numel(), _C.FORMATS["float32"], values.data_ptr(), slot.engine.stream()
        slot.engine.core.fill(slot.id, _C.FIELDS[name], first, *numbers)


class Model:
    """A model's state, by the names of `model.state_dict()`, and all parameters that are trained.

    Args:
        runtime: of the model.
        module: a module in it, of which alone the state is; None: the model.
        frozen: with parameters that have no place for states, as they are not trained.

    Attributes:
        names: all of them, in order.
        slots: of managed parameters, by their first name there.
        aliases: other names of them, with that first name.
        tensors: buffers.
        others: what else there is: extra states, and what hooks of the module make.
        frozen: as it was given.

    Raises:
        GeminiError: something that cannot be kept, by name.
    """

    def __init__(
        self, runtime: Runtime, module: nn.Module | None = None, frozen: bool = True
    ) -> None:
        self.slots: dict[str, Slot] = {}
        self.aliases: dict[str, str] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.others: dict[str, Any] = {}
        self.frozen = frozen
        model = runtime.model if module is None else module
        # A hook may have put copies there.
        parameters = dict(model.named_parameters(remove_duplicate=False))
        buffers = dict(model.named_buffers(remove_duplicate=False))
        known = {id(buffer) for buffer in buffers.values()}
        state = model.state_dict(keep_vars=True)
        first: dict[int, str] = {}
        for name, value in list(state.items()):
            inner = list(quantized.parts(value)) if isinstance(value, torch.Tensor) else []
            if any(hasattr(part, "_gm_slot") for _, part in inner):
                del state[name]
                state |= {f"{name}.{rest}": part for rest, part in inner}
        self.names = list(state)
        for name, value in state.items():
            slot = getattr(value, "_gm_slot", getattr(parameters.get(name), "_gm_slot", None))
            if slot is not None and slot.id in first:
                self.aliases[name] = first[slot.id]
            elif slot is not None:
                first[slot.id] = name
                self.slots[name] = slot
            elif isinstance(value, torch.Tensor) and (id(value) in known or name in buffers):
                buffer = value if id(value) in known else buffers[name]
                self.tensors[name] = _checked(name, buffer)
            else:
                self.others[name] = value
        for slot in runtime.slots if module is None else ():
            if slot.has_moments and slot.id not in first:
                self.names.append(slot.name)
                self.slots[slot.name] = slot
        if not frozen:
            self.drop({name for name, slot in self.slots.items() if not slot.has_moments})

    def drop(self, names: set[str]) -> None:
        """Without the slots of these names, and what belongs to them."""
        # What is kept beside a quantized weight, its scales say, goes with it.
        beside = tuple(f"{name.rpartition('.')[0]}." for name in names if self.slots[name].is_raw)
        self.others = {n: v for n, v in self.others.items() if not n.startswith(beside)}
        gone = names | {alias for alias, name in self.aliases.items() if name in names}
        kept = {*self.slots, *self.tensors, *self.others, *self.aliases} - gone
        self.names = [name for name in self.names if name in kept]
        self.slots = {name: slot for name, slot in self.slots.items() if name not in gone}
        self.aliases = {alias: name for alias, name in self.aliases.items() if alias not in gone}

    def fields(self, runtime: Runtime, with_optimizer: bool) -> Iterator[Field]:
        """Weights, and the moments of Adam of what has been updated."""
        for name, slot in self.slots.items():
            yield Field(("model", name), slot, "master")
        for slot in runtime.slots if with_optimizer and runtime.opaque is None else ():
            for key in MOMENTS if slot.has_state else ():
                yield moment(slot, key)


def moment(slot: Slot, key: str) -> Field:
    """One of MOMENTS."""
    return Field(("optimizer_0", "state", slot.name, key), slot, key)


def _checked(name: str, buffer: torch.Tensor) -> torch.Tensor:
    if buffer.layout is not torch.strided or buffer.is_quantized or buffer.is_meta:
        raise GeminiError(
            f"the buffer {name} is {'on the meta device' if buffer.is_meta else buffer.layout}: engine.save() and "
            "engine.load() know ordinary tensors only"
        )
    return buffer.detach()
