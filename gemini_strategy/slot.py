"""A slot: what the engine knows of one managed parameter, and its fields wherever their bytes are.

A parameter has as many names as it is tied to, but one slot, found as `parameter._gm_slot`.
"""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING

import torch
from torch import nn

from gemini_strategy import _C
from gemini_strategy.errors import GuardError

if TYPE_CHECKING:
    from gemini_strategy.engine import Engine

__all__ = ["FORMATS", "Slot", "checked_step", "merge", "split_low"]

FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as csrc/base.h numbers them
_WEIGHT, _MASTER, _M, _V, _GRAD = range(5)  # as csrc/engine.h numbers fields
_NAMES = ("weight", "master", "exp_avg", "exp_avg_sq", "gradient")
_plain_torch = torch._C.DisableTorchFunctionSubclass


class Slot(_C.Slot):
    """What the engine knows of one managed parameter; `parameter._gm_slot`.

    Of the core's Slot, which units and backward nodes use, are:

    * engine, net, parameter, id; dtype: the compute dtype, once managed; format: its number.
    * plain_class, open_class, guarded_class: of the parameter, inside its unit, outside.
    * open_count: units that have entered and not left.
    * version: of the parameter, when it was opened or last looked at; epoch: see `epoch_now()`.
    * storage: the address of its StorageImpl. base_count: references to it when nothing shows it but the
      parameter; view_tokens: views that autograd has saved, and that keep the storage too.
    """

    __slots__ = (
        "__weakref__",
        "device",
        "grad_view",
        "has_grad_home",
        "has_low",
        "has_moments",
        "has_state",
        "loaded",
        "low",
        "name",
        "names",
        "original_device",
        "original_dtype",
        "saved",
        "shape",
        "step_count",
        "step_tensor",
    )

    def __init__(self, engine: Engine, index: int, name: str, parameter: nn.Parameter) -> None:
        self.engine = engine
        self.id = index
        self.name = name
        self.names = [name]
        self.parameter = parameter
        self.plain_class = type(parameter)
        self.shape = tuple(parameter.shape)
        self.dtype = parameter.dtype
        self.device = parameter.device
        self.original_device = parameter.device
        self.original_dtype = parameter.dtype
        self.has_low = self.has_moments = self.has_grad_home = False
        self.has_state = False  # whether optimizer.state has an entry
        self.step_count, self.step_tensor = 0, None  # see adam_step
        self.loaded: str | None = None  # since the last update: "weight", "master", "low" or "both"
        self.low: torch.Tensor | None = None  # loaded before the weight that it belongs to
        self.saved: weakref.ref[torch.Tensor] | None = None  # its latest copy in a state dict
        self.grad_view: weakref.ref[torch.Tensor] | None = None

    def blob(self, lease: int) -> torch.Tensor:
        """A tensor on the parameter's bytes whose storage ends `lease` when it dies."""
        kind, index = (0, -1) if self.device.type == "cpu" else (1, self.device.index)
        with torch.inference_mode(False), _plain_torch():
            return torch.ops.gemini.blob(lease, list(self.shape), self.dtype, kind, index)

    def lease(self, is_watched: bool = True) -> tuple[torch.Tensor, int]:
        """The parameter's bytes as a plain tensor, fetched and kept until the tensor is gone."""
        core, stream = self.engine.core, self.engine.stream()
        try:
            lease = core.lease(self.id, 1, int(is_watched), stream)
        except MemoryError as error:
            raise self.engine.room_error(self, "using it outside its module", error) from None
        return self.blob(lease), lease

    def assign(self, value: torch.Tensor) -> None:
        """`p.data = value`: the bytes are copied; another shape, dtype or device is refused."""
        if tuple(value.shape) != self.shape or value.dtype is not self.dtype:
            raise GuardError(
                f"{self.name}: `.data` of a managed parameter takes values of shape {self.shape} and "
                f"{self.dtype}, got {tuple(value.shape)} and {value.dtype}; to change either, "
                "engine.close(), change the model, and manage() it again"
            )
        if value.device.type != self.device.type:
            raise GuardError(
                f"{self.name}: a managed parameter stays on {self.device}, got a tensor on "
                f"{value.device}; engine.close() makes the model ordinary again"
            )
        # A copy first: `value` may be guarded, a gradient of ours, or overlap with the target.
        source = value.detach().clone()
        target, _ = self.lease()
        with torch.no_grad():
            target.copy_(source)

    def set_grad(self, value: torch.Tensor | None) -> None:
        """`p.grad = value`."""
        if not self.has_grad_home:
            with _plain_torch():
                torch.Tensor.grad.__set__(self.parameter, value)
        elif value is None:
            self.drop_grad()
        elif self.grad_view is not None and value is self.grad_view():
            pass  # `p.grad = p.grad`
        elif tuple(value.shape) != self.shape or value.dtype is not self.dtype:
            raise GuardError(
                f"{self.name}: its gradient has shape {self.shape} and {self.dtype}, got "
                f"{tuple(value.shape)} and {value.dtype}"
            )
        else:
            self.write_grad(value.detach().clone())

    def drop_grad(self) -> None:
        """`p.grad = None`; a tensor that showed the gradient shows nothing from now on."""
        self.engine.ending.check_change(self)
        view = self.grad_view() if self.grad_view is not None else None
        if view is not None:
            view._gm_dropped = True
        self.grad_view = None
        self.engine.written.forget_grad(self)
        self.engine.core.grad_drop(self.id)

    # ---- fields ----
    #
    # Of several ranks each has a part. Reading is a collective: all ranks get the whole, or `root` alone. Writing is
    # not: every rank writes its part of the same values.

    def part(self) -> tuple[int, int]:
        """(first, n): the elements that this rank has."""
        if self.engine.ranks.shard.size == 1:
            return 0, math.prod(self.shape)
        return self.engine.core.part(self.id)

    def _read(self, field: int, dtype: torch.dtype, root: int | None = None) -> torch.Tensor:
        core, ranks = self.engine.core, self.engine.ranks
        values = torch.empty(self.shape, dtype=dtype)
        core.read(self.id, field, values.data_ptr())
        if ranks.shard.size > 1:
            core.catch_up()
            what = f"{_NAMES[field]} of {self.name} (every rank has to read it)"
            ranks.assemble(values, *self.part(), what, root)
        return values

    def read_own(self, is_master: bool) -> torch.Tensor:
        """The master or the weight as far as this rank has it; NaN (0 for integers) elsewhere."""
        is_fp32 = is_master and self.has_low
        dtype = torch.float32 if is_fp32 else self.dtype
        filler = float("nan") if dtype.is_floating_point else 0
        values = torch.full(self.shape, filler, dtype=dtype)
        self.engine.core.read(self.id, _MASTER if is_fp32 else _WEIGHT, values.data_ptr())
        return values

    def fill(self, values: torch.Tensor, low: torch.Tensor | None) -> None:
        """The first bytes: from rank 0's parameter, with the rest that cast_model_ has kept."""
        ranks, core = self.engine.ranks, self.engine.core
        field = _WEIGHT
        if self.dtype not in FORMATS:
            plain = values.to("cpu", self.dtype).contiguous()
        else:
            field = _MASTER
            if low is None:
                plain = values.to("cpu", torch.float32).contiguous()
            else:
                plain = merge(values.to("cpu"), low.to("cpu")).contiguous()
        if ranks.size > 1:
            plain = plain.clone() if plain.data_ptr() == values.data_ptr() else plain
            ranks.share(plain, *self.part(), f"first values of {self.name}")
        core.write(self.id, field, plain.data_ptr(), self.engine.stream())

    def fill_part(self, first: int, values: torch.Tensor) -> None:
        """The first bytes, part by part: flat `values` of the elements from `first` on."""
        begin, n = self.part()
        values = values[max(begin - first, 0) : max(begin + n - first, 0)]
        first = max(begin, first)
        if values.numel() == 0:
            return
        values = values.to("cpu", self.original_dtype)  # what an ordinary parameter would hold
        is_float = self.dtype in FORMATS
        plain = values.to(torch.float32 if is_float else self.dtype).contiguous()
        field = _MASTER if is_float else _WEIGHT
        stream = self.engine.stream()
        self.engine.core.fill(self.id, field, first, plain.numel(), plain.data_ptr(), stream)

    def read_weight(self, root: int | None = None) -> torch.Tensor:
        """A CPU copy of the weight, in its dtype."""
        return self._read(_WEIGHT, self.dtype, root)

    def read_master(self, root: int | None = None) -> torch.Tensor:
        """A CPU copy: fp32 for what is trained, the weight itself for what is not."""
        if not (self.has_low or self.dtype is torch.float32):
            return self.read_weight(root)
        return self._read(_MASTER, torch.float32, root)

    def write_master(self, values: torch.Tensor) -> None:
        """Sets weight and master from values of any floating-point dtype (weight dtype if frozen)."""
        if tuple(values.shape) != self.shape:
            raise ValueError(f"{self.name} has shape {self.shape}, got {tuple(values.shape)}")
        is_float = self.has_low or self.dtype is torch.float32
        plain = values.detach().to("cpu", torch.float32 if is_float else self.dtype).contiguous()
        field = _MASTER if is_float else _WEIGHT
        self.engine.written.note(self, _NAMES[field], plain)
        self.engine.core.write(self.id, field, plain.data_ptr(), self.engine.stream())
        self.epoch += 1

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """The weight of a master with these values."""
        plain = values.detach().to("cpu", torch.float32).contiguous()
        weight = torch.empty(self.shape, dtype=self.dtype)
        low = torch.empty(self.shape, dtype=torch.float32)  # wide enough for either
        addresses = (plain.data_ptr(), weight.data_ptr(), low.data_ptr())
        _C.split_host(self.format, *addresses, plain.numel())
        return weight

    def read_grad(self) -> torch.Tensor:
        """A copy on the engine's device, in the weight's dtype."""
        self.engine.ending.check_read((self,))
        return self._read(_GRAD, self.engine.grad_dtype(self)).to(self.device, self.dtype)

    def clamp_grad(self, bound: float) -> None:
        """Each rank its part: no collective but the reduction that may be due."""
        dtype = self.engine.grad_dtype(self)
        values = torch.zeros(self.shape, dtype=dtype)
        self.engine.core.read(self.id, _GRAD, values.data_ptr())
        values = values.to(self.device, self.dtype).clamp_(-bound, bound)
        self._put_grad(values.to("cpu", dtype))

    def write_grad(self, values: torch.Tensor) -> None:
        plain = values.detach().to("cpu", self.engine.grad_dtype(self)).contiguous()
        self.engine.written.note_grad(self, plain)
        self._put_grad(plain)

    def zero_grad(self) -> None:
        self.engine.written.forget_grad(self)
        self._put_grad(torch.zeros(self.shape, dtype=self.engine.grad_dtype(self)))

    def _put_grad(self, plain: torch.Tensor) -> None:
        self.engine.ending.check_change(self)
        self.engine.core.write(self.id, _GRAD, plain.data_ptr(), self.engine.stream())
        self.engine.forget_norm()

    def read_moments(self, root: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """CPU copies of (exp_avg, exp_avg_sq), fp32, in the parameter's shape."""
        return self._read(_M, torch.float32, root), self._read(_V, torch.float32, root)

    def write_moments(self, m: torch.Tensor, v: torch.Tensor, step: int) -> None:
        for field, values in ((_M, m), (_V, v)):
            if tuple(values.shape) != self.shape:
                raise ValueError(
                    f"{self.name}: a moment has shape {tuple(values.shape)}, expected {self.shape}"
                )
            plain = values.detach().to("cpu", torch.float32).contiguous()
            self.engine.written.note(self, f"{_NAMES[field]} at step {step}", plain)
            self.engine.core.write(self.id, field, plain.data_ptr(), self.engine.stream())
        self.adam_step = step

    # ---- the optimizer's state, and what a 16-bit weight lacks ----

    @property
    def adam_step(self) -> int:
        """Updates so far. Once they have been shown as a tensor, that tensor has the count."""
        tensor = self.step_tensor
        return self.step_count if tensor is None else checked_step(self.name, tensor)

    @adam_step.setter
    def adam_step(self, count: int) -> None:
        self.step_count = count
        if self.step_tensor is not None:
            self.step_tensor.fill_(count)

    def shown_step(self) -> torch.Tensor:
        """The count as torch's Adam has it; whoever changes it changes the count."""
        if self.step_tensor is None:
            self.step_tensor = torch.tensor(
                float(self.step_count), dtype=torch.float32, device="cpu"
            )
        return self.step_tensor

    def count_update(self) -> bool:
        """An update was made; gives whether it was the first."""
        if self.step_tensor is None:
            self.step_count += 1
        else:
            self.adam_step += 1
        self.loaded = self.low = None
        is_first, self.has_state = not self.has_state, True
        return is_first

    def forget_state(self) -> None:
        """The next update is the first."""
        zeros = torch.zeros(self.shape, dtype=torch.float32, device="cpu")
        self.step_tensor = None  # whoever has it keeps the count of now
        self.write_moments(zeros, zeros, 0)
        self.has_state = False

    def read_moment(self, index: int) -> torch.Tensor:
        """A CPU copy of exp_avg (0) or exp_avg_sq (1)."""
        return self._read((_M, _V)[index], torch.float32)

    def write_moment(self, index: int, values: torch.Tensor) -> None:
        pair = list(self.read_moments())
        pair[index] = values
        self.write_moments(*pair, self.adam_step)

    def load_low(self, low: torch.Tensor) -> None:
        """What the weight lacks to be its master, from a state whose weight has been loaded before, or comes after."""
        if self.loaded == "master":
            return  # the weight came whole
        is_whole = self.set_low(low)
        self.low = None if is_whole or self.loaded == "weight" else low.clone()
        self.loaded = "both" if self.loaded == "weight" else "low"

    def set_low(self, low: torch.Tensor) -> bool:
        """The weight stays: where it is not the rounding of its master with `low`, it lacks nothing then.

        Gives whether that is so nowhere.
        """
        weight = self.read_weight()
        master = low if low.dtype is torch.float32 else merge(weight, low)
        fits = self.rounded(master).view(torch.int16) == weight.view(torch.int16)
        self.write_master(torch.where(fits, master, weight.float()))
        return bool(fits.all())

    def load_weight(self, value: torch.Tensor) -> torch.Tensor:
        """Takes a weight of a state dict, and gives its rounding: fp32 is the master, 16 bits go with a loaded low."""
        value = value.detach().to("cpu", copy=True).contiguous()
        if value.dtype is not self.dtype or self.loaded not in ("low", "both"):
            self.write_master(value)
            self.loaded = "weight" if value.dtype is self.dtype else "master"
            self.low = None
            return self.rounded(value)
        weight, master = self._own_parts()
        own = slice(self.part()[0], sum(self.part()))
        is_new = not torch.equal(*(t.reshape(-1)[own].view(torch.int16) for t in (value, weight)))
        if self.loaded == "low":
            low = split_low(weight, master)[1] if self.low is None else self.low
            master = merge(value, low).contiguous()
        elif is_new:  # than the one that has come with its low: this one came alone
            master = value.float()
        self.loaded, self.low = "both" if self.loaded == "low" or not is_new else "weight", None
        self.engine.written.note(self, "loaded weight", value)
        self.engine.core.write(self.id, _MASTER, master.data_ptr(), self.engine.stream())
        self.epoch += 1
        return value

    def _own_parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight and master where they are this rank's: no collective."""
        parts = [torch.zeros(self.shape, dtype=t) for t in (self.dtype, torch.float32)]
        for field, values in zip((_WEIGHT, _MASTER), parts, strict=True):
            self.engine.core.read(self.id, field, values.data_ptr())
        return parts[0], parts[1]


def checked_step(name: str | None, step: object) -> int:
    """The number of updates in a state of Adam."""
    count = float(step)  # type: ignore[arg-type]
    if not (count >= 0 and count.is_integer()):
        raise ValueError(
            f"{name}: its optimizer state says step {count}: it must be a whole number"
        )
    return int(count)


def merge(weight: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The fp32 master of a 16-bit weight and its low part (csrc/arith.h); CPU tensors.

    An fp16 weight that is not its master's rounding was written since, and is the master.
    """
    if low.dtype is torch.float32:
        is_rounding = low.half().view(torch.int16) == weight.view(torch.int16)
        return torch.where(is_rounding, low, weight.float())
    bits = weight.contiguous().view(torch.int16).to(torch.int32) << 16
    return (bits + low.to(torch.int32)).view(torch.float32)


def split_low(weight: torch.Tensor, master: torch.Tensor) -> tuple[str, torch.Tensor]:
    """(key in HybridAdam's state, what `weight` lacks to be `master`): the inverse of merge."""
    if weight.dtype is torch.float16:
        return "master", master
    bits = weight.view(torch.int16).to(torch.int32) << 16
    return "remainder", (master.view(torch.int32) - bits).to(torch.int16)
