"""A slot: what the engine knows of one managed parameter, and its fields wherever their bytes are.

A parameter has as many names as it is tied to, but one slot, found as `parameter._gm_slot`.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini_strategy import _C, _torch
from gemini_strategy.errors import GuardError
from gemini_strategy.parameters import absent, borrowing, gate, keyed, order
from gemini_strategy.parameters.given import Given
from gemini_strategy.parameters.homes import STATES, Weight
from gemini_strategy.parameters.low import merge, split_low
from gemini_strategy.precision import FORMATS

if TYPE_CHECKING:
    from gemini_strategy.parameters.hooks import Unit
    from gemini_strategy.runtime import Runtime

_NAMES = ("weight", "master", "exp_avg", "exp_avg_sq", "gradient", "low")
_WEIGHT, _MASTER, _M, _V, _GRAD, _LOW = (_C.FIELDS[name] for name in _NAMES)
_KEYS = {_WEIGHT: "weight", _MASTER: "weight", _M: "exp_avg", _V: "exp_avg_sq", _GRAD: "grad"}
_MOMENTS = {"exp_avg": _M, "exp_avg_sq": _V}


class Content:
    """Stands for the values of a weight between two assignments to `p.data`.

    Views that autograd has saved keep the one that they were made of, as in torch they keep the memory.
    """

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: torch.Tensor | None = (
            None  # once others were assigned, of what is still asked for
        )


class Slot(_C.Slot):
    """What the engine knows of one managed parameter; `parameter._gm_slot`.

    Of the core's Slot, which units and backward nodes use, are:

    * engine, net, parameter, id; dtype: the compute dtype, once managed; format: its number.
    * plain_class, managed_class: of the parameter before and after it is managed, and while.
    * open_count: units that have entered and not left; touch_count: backward nodes that may still run.
    * strides: of its elements, as torch counts them; dense, whatever their order.
    * version: of the parameter, when it was opened or last looked at.
    * content: see Content.
    * absent: the parameter's data outside its units. shown: its bytes, for all units and nodes; None: to be made.
    * inside: the same as the parameter's data in its units. readers: threads whose operations use the parameter.
    * shown_lease: what the storage of `shown` ends when it dies. shown_storage, shown_count: the address of its
      StorageImpl, and the references to that when nobody else has any.
    * is_watched: what is written through `shown` is looked for when its last user goes.
    * is_assigned: a program has a tensor that it assigned to the weight, and could write it.

    `given` has what others have of its fields (given.py).
    """

    __slots__ = (
        "__weakref__",
        "aliases",
        "device",
        "given",
        "has_grad_home",
        "has_low",
        "has_moments",
        "has_state",
        "is_raw",
        "is_settled",
        "is_whole",
        "low_changes",
        "n_same",
        "name",
        "names",
        "original_device",
        "original_dtype",
        "popped",
        "saved",
        "shape",
        "state_changes",
        "step_count",
        "step_tensor",
        "strides",
        "units",
    )

    def __init__(self, engine: Runtime, index: int, name: str, parameter: nn.Parameter) -> None:
        self.engine = engine
        self.id = index
        self.name = name
        self.names = [name]
        self.parameter = parameter
        self.plain_class = type(parameter)
        self.shape = tuple(parameter.shape)
        self.strides = parameter.stride()
        self.dtype = parameter.dtype
        self.device = parameter.device
        self.original_device = parameter.device
        self.original_dtype = parameter.dtype
        self.has_low = self.has_moments = self.has_grad_home = False
        # A quantized weight, whose bytes are moved as they are. It is served: open_count begins at 1, so no unit shows
        # it.
        self.is_raw = False
        self.aliases: list[torch.Tensor] = []  # other tensors that are its data
        self.has_state = False  # whether optimizer.state has an entry
        self.step_count, self.step_tensor = 0, None  # see adam_step
        self.state_changes = self.low_changes = 0
        self.given = Given(self)
        self.is_whole = False  # since the last update a whole master was loaded
        # In manage(): low parts of the optimizer's are of the weights of now.
        self.is_settled = False
        self.n_same = 0  # writes of what was there
        # a weak reference to what it lacks in an entry that was popped from optimizer.state, and the version then
        self.popped: tuple[Any, int] = ((lambda: None), 0)
        self.saved: Any = None  # a weak reference to its latest entry of a state dict
        self.shown = self.inside = self.absent = None
        self.units: list[Unit] = []  # of the modules that own it
        self.content = Content()

    @property
    def is_float(self) -> bool:
        """Whether its values are numbers that fp32 has."""
        return self.dtype in FORMATS and not self.is_raw

    @property
    def outer_dtype(self) -> torch.dtype:
        """In which its values leave the engine, unless another is asked for: what it came in, or was computed with,
        the wider of the two."""
        wider = (
            torch.promote_types(self.dtype, self.original_dtype) if self.is_float else self.dtype
        )
        return torch.float32 if self.is_float and wider is torch.float64 else wider

    @property
    def is_fp32(self) -> bool:
        return self.is_float and self.dtype is torch.float32

    @property
    def is_row_major(self) -> bool:
        """Whether the elements lie in memory as in a contiguous tensor."""
        return order.is_same(self.shape, self.strides, order.row_major(self.shape))

    def blob(self, lease: int) -> torch.Tensor:
        """A tensor on the parameter's bytes whose storage ends `lease` when it dies."""
        kind, index = (0, -1) if self.device.type == "cpu" else (1, self.device.index)
        with _torch.InferenceMode(False), absent.plainly():
            return torch.ops.gemini.blob(lease, self.shape, self.strides, self.dtype, kind, index)

    def lease(self, is_watched: bool = True) -> torch.Tensor:
        """The parameter's bytes as a plain tensor, fetched and kept until its storage is gone."""
        self.check_assigned()
        self.engine.begin_pass()
        core, stream = self.engine.core, self.engine.stream()
        lease = core.lease(self.id)
        tensor = self.blob(lease)
        for is_last in (False, True):
            try:
                core.lease_pin(lease, stream)
                break
            except MemoryError as error:
                if is_last or not borrowing.make_room(self.engine):
                    what = "using it outside its module"
                    raise self.engine.room_error(self, what, error) from None
        if is_watched:
            core.lease_watch(lease, stream)
        return tensor

    # ---- showing: called by units and backward nodes, which have the chunk pinned ----

    def hide(self) -> torch.Tensor:
        """What the parameter's data is while no unit is entered."""
        home = Weight(self)
        self.absent = absent.tensor(
            home, self.shape, self.strides, self.dtype, self.device, is_gated=True
        )
        return self.absent

    def make_shown(self) -> tuple[int, torch.Tensor, torch.Tensor, int, int]:
        """(shown_lease, shown, inside, shown_storage, shown_count), with the chunk pinned."""
        lease = self.engine.core.lease(self.id)
        with _torch.DisableFuncTorch():  # it outlives the transform that runs now
            shown = self.blob(lease)
            inside = gate.inside(shown)
        storage = _torch.storage_address(shown)
        return lease, shown, inside, storage, _torch.storage_use_count(storage)

    def await_readers(self) -> None:
        """Before the parameter gets other data (`swap`), while an operation of another thread uses it."""
        gate.await_readers(self)

    def view(
        self,
        shape: torch.Size,
        strides: tuple[int, ...],
        dtype: torch.dtype,
        address: int,
        is_conj: bool,
        is_neg: bool,
    ) -> torch.Tensor:
        """A view of `shown`, of any dtype."""
        return self._view(self.shown, shape, strides, dtype, address, is_conj, is_neg)

    def left(self, content: Content, *geometry: Any) -> torch.Tensor:
        """The same of the values that the weight had before others were assigned."""
        assert content.values is not None
        return self._view(content.values, *geometry)

    def _view(
        self,
        flat: torch.Tensor,
        shape: torch.Size,
        strides: tuple[int, ...],
        dtype: torch.dtype,
        address: int,
        is_conj: bool,
        is_neg: bool,
    ) -> torch.Tensor:
        if dtype != self.dtype:
            flat = flat.as_strided((flat.untyped_storage().nbytes() // self.dtype.itemsize,), (1,))
            flat = flat.view(dtype)
        offset = address - self.engine.core.address(self.id)
        view = flat.as_strided(shape, strides, offset // dtype.itemsize)
        return keyed.with_bits(view, is_conj, is_neg)

    def is_shown_elsewhere(self) -> bool:
        """Whether a tensor other than the parameter shows its bytes where units use them."""
        own = self.shown_count + 1  # the parameter's data is `shown`
        if self.shown is not None and _torch.storage_use_count(self.shown_storage) > own:
            return True
        return self.id in self.engine.core.leased()

    def expose(self, tensor: torch.Tensor) -> None:
        """Memory of `tensor`, which shows the parameter, is given away: what is written there counts for no version."""
        if self.shown is not None and _torch.storage_address(tensor) == self.shown_storage:
            self.engine.core.lease_watch(self.shown_lease, self.engine.stream())
            self.is_watched = True

    def note_change(self, is_same: bool = False) -> None:
        """The weight was written: graphs that have saved it must not go on. is_same: with what it was."""
        torch.autograd.graph.increment_version(self.parameter)
        self.version += 1  # a unit that another thread is in has nothing to find
        self.n_same += is_same

    def assign(self, value: torch.Tensor) -> None:
        """`p.data = value`: the bytes are copied; another shape, dtype, device or order in memory is refused."""
        if self.is_raw and self._is_own(value):  # bitsandbytes does that in each forward
            return
        if self.shows_master and value.dtype is self.absent.dtype is not self.dtype:
            self.write_master(value)  # beside its units: values alone
            return
        if tuple(value.shape) != self.shape or value.dtype is not self.dtype:
            raise GuardError(
                f"{self.name}: `.data` of a managed parameter takes values of shape {self.shape} and "
                f"{self.dtype}, got {tuple(value.shape)} and {value.dtype}; to change either, "
                f"{self.engine.called}.close(), change the model, and manage() it again"
            )
        if value.device.type != self.device.type:
            raise GuardError(
                f"{self.name}: a managed parameter stays on {self.device}, got a tensor on "
                f"{value.device}; {self.engine.called}.close() makes the model ordinary again"
            )
        if order.is_dense(value) and not order.is_same(self.shape, value.stride(), self.strides):
            raise GuardError(
                f"{self.name}: its elements keep the order in memory of manage(), strides {self.strides}, and `.data` "
                f"got strides {value.stride()}: kernels round by it; change it (memory_format=) before manage(), or "
                "copy the values alone, with p.data.copy_()"
            )
        self.given.become("weight", value, write=self._write_weight)

    def _is_own(self, value: torch.Tensor) -> bool:
        """Whether it is the weight as a whole."""
        if not absent.is_absent(value):
            return False
        geometry = (value.shape, value.stride(), value.storage_offset(), value.dtype)
        is_mine = absent.home_of(value) is absent.home_of(self.absent)
        return is_mine and geometry == (self.shape, self.strides, 0, self.dtype)

    def leave_data(self) -> None:
        """The parameter gets other data: what shows or has saved the present values goes on with them."""
        # Two are the slot and this call; others are what autograd has saved.
        if sys.getrefcount(self.content) > 2:
            with absent.plainly(), torch.no_grad():
                self.content.values = self.lease(is_watched=False).clone()
        self.content = Content()
        if absent.n_users(self.absent) > 2:  # the parameter and this
            self.given.keep("weight", self.absent)
            if self.shows_master:
                del self.engine.masters[self]
            data = self.hide()
            if self.open_count == self.is_raw:
                self.swap(data)

    @property
    def grad(self) -> torch.Tensor | None:
        """`p.grad`: the gradient that the engine holds, as a tensor that reads and writes it."""
        if not self.has_grad_home:
            return _torch.TensorBase.grad.__get__(self.parameter)
        return self.given.tensor("grad") if self.engine.core.has_grad(self.id) else None

    def set_grad(self, value: torch.Tensor | None) -> None:
        """`p.grad = value`."""
        if not self.has_grad_home:
            _torch.TensorBase.grad.__set__(self.parameter, value)
        elif value is None:
            self.drop_grad()
        else:
            self.given.become("grad", value)

    def drop_grad(self) -> None:
        """`p.grad = None`."""
        self.engine.coming_step.check_change(self)
        why = "this gradient was dropped (zero_grad, or p.grad = None); clone it to keep it"
        self.given.leave("grad", why)
        self.engine.written.forget_grad(self)
        # Before it: the next gradient would be clipped as this one.
        self.engine.coming_step.forget_clip(self)
        self.engine.core.grad_drop(self.id)

    def check_assigned(self) -> None:
        """Before the weight is used: see Given.check."""
        self.given.check("weight")

    # ---- fields ----
    #
    # A field's elements lie in the order of the parameter's own memory (its strides), and so do those of every tensor
    # that is given out. Of several ranks each has a part, counted in that order. Reading is a collective: all ranks get
    # the whole, or `root` alone. Writing is not: every rank writes its part of the same values.

    def part(self) -> tuple[int, int]:
        """(first, n): the elements that this rank has."""
        if self.engine.ranks.shard.size == 1:
            return 0, math.prod(self.shape)
        return self.engine.core.part(self.id)

    @property
    def part_bytes(self) -> int:
        """Of the weight: those that this rank has."""
        return self.part()[1] * self.dtype.itemsize

    def empty(self, dtype: torch.dtype) -> torch.Tensor:
        """On the host, for a field to be read into."""
        return torch.empty_strided(self.shape, self.strides, dtype=dtype, device="cpu")

    def _ordered(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Plain, on the host, as a field is written; may be `values` itself."""
        plain = values.detach().to("cpu", dtype)
        if absent.is_absent(plain):  # it has no address
            plain = plain.clone()
        return order.ordered(plain, self.strides)

    def fill_whole(self, values: torch.Tensor) -> None:
        """fill_part with all of the values, which have the parameter's shape."""
        self.fill_part(0, order.flat(order.ordered(values, self.strides)))

    def dtype_of(self, key: str) -> torch.dtype:
        """Of the tensors that show a field."""
        if key == "remainder":
            return torch.int16
        return torch.float32 if key in STATES else self.dtype

    def changes(self, key: str) -> int:
        """Another number when a field has changed, whoever wrote it."""
        if key in STATES:
            return self.state_changes
        found = self.engine.core.n_found(self.id, self.engine.stream())
        return self.parameter._version - self.n_same + found

    def read_field(self, key: str) -> torch.Tensor:
        """A copy on the engine's device, in the parameter's order."""
        if key == "grad":
            return self.read_grad()
        if key in _MOMENTS:
            values = self._read(_MOMENTS[key], torch.float32)
        elif key == "weight":
            values = self.read_weight()
        else:
            values = order.ordered(self.lack()[1], self.strides)
        return values.to(self.device)

    def write_field(self, key: str, values: torch.Tensor) -> None:
        """`values` have the shape and dtype of what is read."""
        if key == "grad":
            self.write_grad(values)
        elif key == "weight":
            self._write_weight(values)
            self.note_change()
        elif key in _MOMENTS:
            self.engine.settle()
            self._write_moment(_MOMENTS[key], values, self.adam_step)
            self.note_state_change()
        else:
            self.write_low(values)

    def _write_weight(self, values: torch.Tensor) -> None:
        """Counts for no version of the parameter, as `p.data = values` in torch."""
        self.engine.settle()
        with torch.no_grad():
            self.lease().copy_(values)

    def lack(self, root: int | None = None) -> tuple[str, torch.Tensor, bool]:
        """(key, what the weight lacks to be its master, whether that is anything)."""
        weight, master = self.read_weight(root), self.read_master(root)
        key, low = split_low(weight, master)
        nothing = weight.float() if key == "master" else torch.zeros_like(low)
        bits = torch.int32 if key == "master" else torch.int16
        return key, low, not torch.equal(low.view(bits), nothing.view(bits))

    def _read(self, field: int, dtype: torch.dtype, root: int | None = None) -> torch.Tensor:
        self.given.check(_KEYS[field])
        core, ranks = self.engine.core, self.engine.ranks
        values = self.empty(dtype)
        if root not in (None, ranks.rank):
            values.zero_()  # its part is all that this rank will have
        core.read(self.id, field, 0, values.numel(), values.data_ptr())
        if ranks.shard.size > 1:
            core.catch_up()
            what = f"{_NAMES[field]} of {self.name} (every rank has to read it)"
            ranks.assemble(order.flat(values), *self.part(), what, root)
        return values

    def read_own(self, is_master: bool) -> torch.Tensor:
        """The master or the weight as far as this rank has it; NaN (0 for integers) elsewhere."""
        self.check_assigned()
        is_fp32 = is_master and self.has_low
        dtype = torch.float32 if is_fp32 else self.dtype
        filler = float("nan") if dtype.is_floating_point else 0
        values = self.empty(dtype).fill_(filler)
        field = _MASTER if is_fp32 else _WEIGHT
        self.engine.core.read(self.id, field, 0, values.numel(), values.data_ptr())
        return values

    def fill(self, values: torch.Tensor, low: torch.Tensor | None) -> None:
        """The first bytes: from rank 0's parameter, with the rest that cast_model_ has kept."""
        ranks = self.engine.ranks
        if low is not None:
            values = merge(values.to("cpu"), low.to("cpu"))
        plain = self._ordered(values, values.dtype)  # what goes over the wire has no bit too many
        if ranks.rank and plain.data_ptr() == values.data_ptr():
            plain = torch.empty_like(plain)
        plain, (first, n) = order.flat(plain), self.part()
        if ranks.size > 1:
            ranks.share(plain, first, n, f"first values of {self.name}")
        self._put(first, plain[first : first + n])

    def fill_part(self, first: int, values: torch.Tensor) -> None:
        """The first bytes, part by part: flat `values` of the elements from `first` on, in the order of memory."""
        begin, n = self.part()
        values = values[max(begin - first, 0) : max(begin + n - first, 0)]
        first = max(begin, first)
        if values.numel() == 0:
            return
        if (values.dtype, self.original_dtype) != (torch.bfloat16, torch.float32):  # else the same
            values = values.to(self.original_dtype)  # what an ordinary parameter would hold
        self._put(first, values.to("cpu"))

    def _put(self, first: int, values: torch.Tensor) -> None:
        """Flat values on the host, of this rank's elements from `first` on."""
        field, dtype = (_MASTER, torch.float32) if self.is_float else (_WEIGHT, self.dtype)
        if self.is_float and values.dtype in (self.dtype, torch.bfloat16):
            dtype = values.dtype  # the core widens it as torch does, without a copy
        plain = values.to(dtype).contiguous()
        args = (first, plain.numel(), FORMATS.get(dtype, 0), plain.data_ptr(), self.engine.stream())
        self.engine.core.fill(self.id, field, *args)

    def read_weight(self, root: int | None = None) -> torch.Tensor:
        """A CPU copy of the weight, in its dtype; root: the rank that has all of it, others may have 0; None: all."""
        return self._read(_WEIGHT, self.dtype, root)

    @property
    def shows_master(self) -> bool:
        """Outside its units the parameter is its master for a while: see masters.py."""
        return self.absent is self.engine.masters.get(self)

    def read_master(self, root: int | None = None) -> torch.Tensor:
        """A CPU copy: fp32 for what is trained, the weight itself for what is not."""
        if not (self.has_low or self.is_fp32):
            return self.read_weight(root)
        return self._read(_MASTER, torch.float32, root)

    def write_master(self, values: torch.Tensor) -> None:
        """Sets weight and master from values of any floating-point dtype (weight dtype if frozen)."""
        if tuple(values.shape) != self.shape:
            raise ValueError(f"{self.name} has shape {self.shape}, got {tuple(values.shape)}")
        self.engine.settle()
        is_float = self.has_low or self.is_fp32
        plain = self._ordered(values, torch.float32 if is_float else self.dtype)
        field = _MASTER if is_float else _WEIGHT
        self.engine.written.note(self, _NAMES[field], plain)
        self.engine.core.write(self.id, field, plain.data_ptr(), self.engine.stream())
        self.note_change()

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """The weight of a master with these values."""
        plain = self._ordered(values, torch.float32)
        weight = self.empty(self.dtype)
        low = self.empty(torch.float32) if self.has_low else None  # wide enough for either
        addresses = (plain.data_ptr(), weight.data_ptr(), 0 if low is None else low.data_ptr())
        _C.split_host(self.format, *addresses, plain.numel())
        return weight

    def read_grad(self) -> torch.Tensor:
        """A copy on the engine's device, in the weight's dtype."""
        self.engine.coming_step.check_read((self,))
        values = self._read(_GRAD, self.engine.grad_dtype(self))
        factor = self.engine.coming_step.factor_of(self)
        if factor != 1.0:
            values.mul_(factor)
        return values.to(self.device, self.dtype)

    def clamp_grad(self, bound: float) -> None:
        """Each rank its part: no collective but the reduction that may be due."""
        values = self._own_grad().to(self.device, self.dtype).clamp_(-bound, bound)
        self._put_grad(self._ordered(values, self.engine.grad_dtype(self)))

    def clip_grad(self, factor: float) -> None:
        """It becomes what a clip by norm has made of it; each rank its part."""
        self._put_grad(self._own_grad().mul_(factor))

    def _own_grad(self) -> torch.Tensor:
        """This rank's part, on the host, as it is kept; zeros elsewhere."""
        values = self.empty(self.engine.grad_dtype(self)).zero_()
        self.engine.core.read(self.id, _GRAD, 0, values.numel(), values.data_ptr())
        return values

    def write_grad(self, values: torch.Tensor) -> None:
        plain = self._ordered(values, self.engine.grad_dtype(self))
        self.engine.written.note_grad(self, plain)
        self._put_grad(plain)

    def zero_grad(self) -> None:
        self.engine.written.forget_grad(self)
        self._put_grad(self.empty(self.engine.grad_dtype(self)).zero_())

    def _put_grad(self, plain: torch.Tensor) -> None:
        self.engine.coming_step.check_change(self)
        self.engine.core.write(self.id, _GRAD, plain.data_ptr(), self.engine.stream())
        self.engine.coming_step.forget_clip(self)

    def read_moments(self, root: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """CPU copies of (exp_avg, exp_avg_sq), fp32, in the parameter's shape."""
        return self._read(_M, torch.float32, root), self._read(_V, torch.float32, root)

    def write_moments(self, m: torch.Tensor, v: torch.Tensor, step: int) -> None:
        self.engine.settle()
        for field, values in ((_M, m), (_V, v)):
            self._write_moment(field, values, step)
        self.adam_step = step
        self.note_state_change()

    def _write_moment(self, field: int, values: torch.Tensor, step: int) -> None:
        if tuple(values.shape) != self.shape:
            raise ValueError(
                f"{self.name}: a moment has shape {tuple(values.shape)}, expected {self.shape}"
            )
        plain = self._ordered(values, torch.float32)
        self.engine.written.note(self, f"{_NAMES[field]} at step {step}", plain)
        self.engine.core.write(self.id, field, plain.data_ptr(), self.engine.stream())

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

    def assign_step(self, count: object) -> None:
        """The count becomes another: a tensor on the host that has it from now on, or a number."""
        self.step_count, self.step_tensor = checked_step(self.name, count), None
        if isinstance(count, torch.Tensor) and count.device.type == "cpu":
            self.step_tensor = count

    def shown_step(self) -> torch.Tensor:
        """The count as torch's Adam has it; whoever changes it changes the count."""
        if self.step_tensor is None:
            count = float(self.step_count)
            with _torch.InferenceMode(False):
                self.step_tensor = torch.tensor(count, dtype=torch.float32, device="cpu")
        return self.step_tensor

    def count_update(self) -> bool:
        """An update was made; gives whether it was the first."""
        if self.step_tensor is None:
            self.step_count += 1
        else:
            self.adam_step += 1
        self.is_whole = False
        self.note_state_change()
        is_first, self.has_state = not self.has_state, True
        return is_first

    def note_state_change(self) -> None:
        """Moments have changed, or what the weight lacks."""
        self.state_changes += 1

    def forget_state(self) -> None:
        """The next update is the first."""
        zeros = torch.zeros(self.shape, dtype=torch.float32, device="cpu")
        self.leave_state("it was dropped with its entry in optimizer.state; clone it to keep it")
        self.write_moments(zeros, zeros, 0)
        self.has_state = False
        self.popped = (lambda: None), 0

    def leave_state(self, why: str | None = None) -> None:
        """Another state takes the place of this one: see Given.leave."""
        self.step_tensor = None  # whoever has it keeps the count of now
        for key in STATES:
            self.given.leave(key, why)

    def load_low(self, low: torch.Tensor) -> None:
        """What the weight lacks to be its master, from a state whose weight has been loaded before, or comes after."""
        if self.is_whole:
            return
        if self.is_settled:
            self.write_master(merge(self.read_weight(), low.detach().to("cpu")))
        else:
            self.write_low(low)

    def write_low(self, low: torch.Tensor) -> None:
        """What the weight that the next update finds lacks to be its master."""
        self.engine.settle()
        plain = self._ordered(low, low.dtype)
        self.engine.written.note(self, "low part", plain)
        self.engine.core.write(self.id, _LOW, plain.data_ptr(), self.engine.stream())
        self.low_changes += 1
        self.note_state_change()

    def load_weight(self, value: torch.Tensor) -> torch.Tensor:
        """Takes a weight of a state dict, and gives its rounding.

        fp32 is the master. 16 bits are a write like any other: they are their own master where nothing was loaded for
        them and they are another weight than the last update has left.
        """
        self.engine.settle()
        value = value.detach().to("cpu", copy=True).contiguous()
        self.is_whole = value.dtype is not self.dtype
        if self.is_whole:
            self.write_master(value)
            return self.rounded(value)
        plain = self._ordered(value, self.dtype)
        self.engine.written.note(self, "loaded weight", value)
        self.engine.core.write(self.id, _WEIGHT, plain.data_ptr(), self.engine.stream())
        self.note_change()
        return value


def checked_step(name: str | None, step: object) -> int:
    """The number of updates in a state of Adam."""
    count = float(step)  # type: ignore[arg-type]
    if not (count >= 0 and count.is_integer()):
        raise ValueError(
            f"{name}: its optimizer state says step {count}: it must be a whole number"
        )
    return int(count)
