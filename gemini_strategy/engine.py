"""The engine that a person holds: training, reading and writing parameters, state, and the way back.

The core (csrc/engine.h) moves bytes. manage.py makes engines, adopt.py moves a model in, hooks.py enters and
leaves units, absent.py serves parameters outside them, takeover.py is the optimizer's face.

Invariants
    1. Every managed parameter has one slot, however many names (tied weights) it has.
    2. The real `.grad` of a managed parameter is None except inside its accumulation hook.
    3. After close() the model has no trace of the engine.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from gemini_strategy import _C, absent, agreement, closing, foreign, order, state, takeover
from gemini_strategy.adopt import Adoption
from gemini_strategy.ending import Ending
from gemini_strategy.errors import GeminiDeviceError, GeminiError, GeminiMemoryError, GuardError
from gemini_strategy.hooks import RootForward, SavedTensorNet
from gemini_strategy.loading import Loading
from gemini_strategy.memory import DeviceMemory
from gemini_strategy.optim import clip_coefficient
from gemini_strategy.original import Original
from gemini_strategy.precision import LossScaler
from gemini_strategy.ranks import Ranks
from gemini_strategy.settings import POLICIES, Settings
from gemini_strategy.sharing import check_sharing
from gemini_strategy.slot import FORMATS, Slot
from gemini_strategy.timeline import Reporting

__all__ = ["Engine"]


class Engine(Reporting):
    """The engine of one managed model; made by `manage()`.

    Attributes:
        model: the model, in place.
        optimizer: the optimizer that was taken over, or None.
        device: where the model computes.
        precision: the precision's name, or None.
        scaler: the LossScaler of "16-mixed", or None.
        closed: True after close().
        ranks: those that train this model together; see ranks.py.
        core: the C engine (internal).
        ending: what `backward(step=True)` has announced (internal).

    With several ranks every rank makes the same calls in the same order, also those that only read: whole
    parameters, gradients and states are put together from the ranks' parts. What is written has to be the same on
    every rank, as each keeps its part of it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        settings: Settings,
        scaler: LossScaler,
        ranks: Ranks,
        original: Original,
    ) -> None:
        super().__init__()
        self.ranks = ranks
        self.written = agreement.Written(ranks)
        self.model = model
        self.optimizer = optimizer
        self.device = settings.device
        self.precision = settings.precision.name
        self.precision_plan = settings.precision
        self.closed = False
        self._settings = settings
        self._clip_factor = 1.0
        self._sumsq: tuple[list[int], tuple[float, int]] | None = None  # of which slots
        self._in_backward = False
        self._steps = self._skipped = 0
        self.ending = Ending(self)
        self.lent: set[Slot] = set()  # memory of them was given away: see loans.py
        grouped = takeover.check(optimizer, model) if optimizer is not None else set()
        foreign.check_modules(model, settings.device, settings.weights is not None)
        adoption = Adoption(self, grouped)
        check_sharing(model)
        loading = Loading(model, settings.weights, settings.missing)
        self._slots = adoption.slots
        self._slots_by_id = {slot.id: slot for slot in self._slots}
        is_half = any(s.has_grad_home and s.dtype is torch.float16 for s in self._slots)
        self.scaler = scaler if is_half else None
        self.choose_way()
        original.on_restore(self._abandon)
        self._memory = DeviceMemory(settings.device)
        self._make_core(adoption)
        loading.fill(adoption.slots, ranks)
        self._units, self._handles = adoption.attach(loading, original)
        self.ranks.named = agreement.unit_names(self)
        self._handles += state.install(self, model)
        self.net = SavedTensorNet(self, self._slots)
        self._root = RootForward(self, model, settings.convert_inputs, settings.force_outputs_fp32)
        if optimizer is not None:
            takeover.install(self, optimizer)
        self._settle()
        loading.finish()
        for slot in self._slots:
            if slot.original_device.type == "meta":  # it goes back to the host
                slot.original_device = torch.device("cpu")

    def _abandon(self) -> None:
        """manage() has failed: the model has nothing of this engine any more, and its memory is free."""
        self.closed = True
        if hasattr(self, "net"):
            absent.drop_net(self.net)
        for slot in self._slots:
            slot.shown = None
        try:
            if hasattr(self, "core"):
                self.core.close()
        finally:
            if hasattr(self, "_memory"):
                self._memory.close()

    def _make_core(self, adoption: Adoption) -> None:
        settings = self._settings
        specs = adoption.specs()
        kinds = list(dict.fromkeys(spec[1:] for spec in specs))
        shapes = [(spec[0], spec[1], kinds.index(spec[1:])) for spec in specs]
        is_cuda = self.device.type == "cuda"
        chunk_bytes, block_bytes = settings.sizes.choose(
            shapes, settings.device_budget, is_cuda, self.ranks.shard.size
        )
        unit_params, unit_begin = adoption.unit_tables()
        agreement.check_model(self, adoption.slots, (unit_params, unit_begin))
        external = self._memory.external_bytes(0)
        self.core = _C.Core(
            ordinal=self.device.index if is_cuda else -1,
            params=specs,
            unit_params=unit_params,
            unit_begin=unit_begin,
            chunk_bytes=chunk_bytes,
            block_bytes=block_bytes,
            device_budget=settings.device_budget,
            host_budget=settings.host_budget,
            policy=POLICIES[settings.policy],
            is_grad_f32=settings.is_grad_f32,
            threads=settings.threads,
            external_bytes=external,
            rates=settings.rates,
            state_share=1.0 if settings.margin is None else settings.margin,
            slack_bytes=self._memory.slack_bytes(settings.device_budget),
            is_tuned=settings.is_tuned,
            **self.ranks.communicators(self.device),
        )
        agreement.check_layout(self)
        if settings.device_budget >= 0 and settings.policy != "cuda":
            available = settings.device_budget - external
            spare = adoption.check_floor(settings.device_budget, available)
            reserve = min(self._memory.first_reserve_bytes(settings.device_budget), spare)
            self.core.set_external_bytes(external + reserve)

    def _settle(self) -> None:
        """Before there is a plan: uses what is left on the host device for optimizer states ("auto")."""
        if self._settings.policy != "auto" or self.device.type == "cuda":
            return  # on CUDA the activations are not known yet
        stats = self.core.stats()
        reserve = 0
        margin = self._settings.margin
        if margin is not None and stats["device_budget_bytes"] >= 0:
            spare = stats["device_budget_bytes"] - reserve - stats["weight_bytes"]
            reserve += int(max(spare, 0) * (1.0 - margin))
        elif margin == 0.0:
            return
        self.core.settle(reserve)

    def _refresh_memory(self) -> None:
        """Before a step, which may plan: what others hold on the device now."""
        if self.device.type != "cuda":
            return
        self._sample_device()
        if self._memory.tidy():
            self.core.forget_outside()
        chunk_bytes = self.core.stats()["device_bytes"]
        self.core.set_external_bytes(self._memory.external_bytes(chunk_bytes))
        if not self._steps:  # the first step's reserve is no need of a plan
            self.core.forget_outside()

    # ---- what hooks call ----

    def stream(self) -> int:
        """The raw handle of torch's current stream; 0 on the host device."""
        if self.device.type == "cpu":
            return 0
        return torch._C._cuda_getCurrentRawStream(self.device.index)

    def begin_pass(self) -> None:
        """Lets go of what earlier backward nodes no longer need."""
        self.net.settle()

    def note_write(self, slot: Slot) -> None:
        """The weight was written in place while its chunk was pinned: the master follows."""
        try:
            self.core.note_write(slot.id, self.stream())
        except GeminiError as error:
            raise GuardError(
                f"{slot.name}: {error}; write it outside its module's forward, or inside "
                "engine.full_parameter(p)"
            ) from None
        slot.refresh("weight")

    def make_room(self) -> bool:
        """A chunk finds no room: whether torch could give something back, or tensors that nobody reaches any more."""
        if self._memory.give_cached():
            self.core.forget_outside()  # what it held until now is no need
            return True
        leases = self.core.stats()["leases"]
        if leases:
            gc.collect()
        return self.core.stats()["leases"] < leases

    def room_error(self, slot: Slot, what: str, error: BaseException) -> GeminiMemoryError:
        leases = self.core.stats()["leases"]
        held = f" ({leases} tensors outside their modules hold chunks)" if leases else ""
        return GeminiMemoryError(
            f"no room on the device for {slot.name}, for {what}{held}: {error}"
        )

    def check_requires_grad(self, slot: Slot, value: bool) -> None:
        if value and self.optimizer is not None and not slot.has_grad_home:
            raise GeminiError(
                f"{slot.name} was frozen when the model was managed, so it has no place for a gradient; "
                "engine.close(), set requires_grad, and manage() again"
            )

    def choose_way(self) -> None:
        """Whether the core may take gradients without asking take_grad."""
        is_asked = self.ending.waits or self.ending.used or self.lent
        self.takes_plainly = self.scaler is None and not is_asked

    def collect(self) -> None:
        """Before fields of many parameters are used: see Slot.collect."""
        for slot in list(self.lent):
            slot.collect()

    def take_grad(self, slot: Slot, grad: torch.Tensor) -> None:
        """Adds one gradient to what the engine holds for a parameter."""
        if self.scaler is not None and not self._in_backward:
            raise GeminiError(
                f'{slot.name}: a gradient arrived from loss.backward(), but with fp16 weights ("16-mixed") the loss '
                "must be scaled: call engine.backward(loss) instead (and no torch.amp.GradScaler)"
            )
        if grad.layout is not torch.strided:
            raise GeminiError(
                f"{slot.name}: its gradient is {grad.layout}: build it with sparse=False"
            )
        self.ending.check_arrival(slot)
        if grad.requires_grad:
            raise GeminiError(
                f"{slot.name}: backward(create_graph=True) makes a gradient that can be differentiated, and the engine "
                "keeps numbers only: use torch.autograd.grad(loss, parameters, create_graph=True)"
            )
        grad = grad.detach().clone() if absent.is_absent(grad) else grad.detach()
        if grad.dtype not in FORMATS:
            grad = grad.float()
        grad = order.ordered(grad, slot.strides)
        slot.collect()
        self._sumsq = None
        self.net.settle()  # the node that used the weights is done: they may be updated
        try:
            self.core.grad_put(slot.id, grad.data_ptr(), FORMATS[grad.dtype], self.stream())
        except RuntimeError as error:
            raise GeminiError(f"{slot.name}: {error}") from None
        slot.refresh("grad")

    def grad_dtype(self, slot: Slot) -> torch.dtype:
        """The dtype in which a gradient is kept."""
        return torch.float32 if self._settings.is_grad_f32 else slot.dtype

    def forget_norm(self) -> None:
        """A gradient has changed: the norm must be computed again."""
        self._sumsq = None

    def _check_open(self) -> None:
        if self.closed:
            raise GeminiError("this engine is closed: call gemini_strategy.manage() again")

    def slot_of(self, parameter: torch.Tensor) -> Slot:
        """The slot of one of this engine's parameters."""
        slot = getattr(parameter, "_gm_slot", None)
        if slot is None or slot.engine is not self:
            raise GeminiError(
                f"a parameter of shape {tuple(parameter.shape)} is not managed by this engine: parameters "
                "replaced or added after manage() are unknown to it"
            )
        return slot

    # ---- training ----

    def backward(self, loss: torch.Tensor, *, step: bool = False, **kwargs: Any) -> None:
        """`loss.backward()`, with the loss multiplied by the loss scale in "16-mixed".

        Args:
            loss: a 0-dim tensor.
            step: this backward ends the step: `optimizer.step()` comes next, with nothing between that
                reads or changes gradients (no clipping). Weights may then be updated inside backward, as
                soon as their gradients are complete; the gradients are used up. See `ends_step`.
        """
        ends = self.ends_step() if step else contextlib.nullcontext()
        with self.ranks.explaining(), self.accept_scaled(), ends:
            self.scale(loss).backward(**kwargs)

    @contextlib.contextmanager
    def ends_step(self) -> Iterator[None]:
        """Inside, a backward ends the step: for loops that call backward themselves.

        Updates then overlap with backward where the plan can do that exactly; otherwise nothing changes.
        With a loss scaler it has no effect. The bits are those of the same loop without it.

        Any error inside keeps its type; where weights had been updated, a note says that the engine is closed.

        Raises:
            GeminiError: weights are needed again in the backward that has updated them; the engine is closed then.
                Or the gradients of the last such step are still there, or it has not come; see ending.py.
        """
        self._check_open()
        if self.optimizer is not None and self.ranks.size > 1:
            agreement.check_hyperparameters(self, "backward(step=True)", ())
        if self.optimizer is None or self.scaler is not None or self._clip_factor != 1.0:
            yield
            return
        updates = [self._update(slot, group, 1.0) for slot, group in self._stepped()]
        with self.ending.announced(updates):
            yield

    def _stepped(self) -> Iterator[tuple[Slot, dict[str, Any]]]:
        """What a step updates where there is a gradient: slots in the order of the groups, and their groups."""
        for group in self.optimizer.param_groups if self.optimizer is not None else ():
            for parameter in group["params"]:
                slot = self.slot_of(parameter)
                if slot.has_moments:
                    yield slot, group
                elif slot.has_grad_home:
                    raise GeminiError(
                        f"param_groups: {slot.name} {takeover.no_place(slot)}: take it out of its group, or "
                        "engine.close() and manage() again"
                    )

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` times the loss scale; itself without one. Backward belongs into `accept_scaled`."""
        return loss if self.scaler is None else loss * self.scaler.scale

    @contextlib.contextmanager
    def accept_scaled(self) -> Iterator[None]:
        """Inside, gradients are taken as scaled: for loops that call backward themselves."""
        self._check_open()
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False

    def _measure_grads(self) -> tuple[float, int]:
        """(exact sum of squares of the gradients to be stepped, non-finite elements), cached."""
        self._check_open()
        self.collect()
        slots = [slot for slot, _ in self._stepped() if self.core.has_grad(slot.id)]
        self.ending.check_read(slots)
        ids = sorted(slot.id for slot in slots)
        fields = {"is_known": self._sumsq is not None and self._sumsq[0] == ids}
        everyone = agreement.check_step(self, "gradient norm", slots, fields)
        if not all(own["is_known"] for own in everyone):
            self._sumsq = ids, self.core.grad_sumsq(ids, self.stream())
        return self._sumsq[1]

    def grad_norm(self) -> float:
        """The 2-norm of all gradients that the optimizer will use, unscaled, unclipped.

        The sum of squares is exact and rounded once, so the figure does not depend on chunks,
        placement or device. inf or nan with non-finite gradients.
        """
        squares, _ = self._measure_grads()
        return math.sqrt(squares) / (self.scaler.scale if self.scaler is not None else 1.0)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clips all gradients by their common 2-norm, in the next step.

        The factor min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ defines it, is
        fused into the next optimizer step; `p.grad` stays as it is.

        Args:
            max_norm: the largest norm allowed, not negative.
            norm_type: 2 only.
            error_if_nonfinite: raise on a non-finite norm (before anything is changed).

        Returns:
            The total norm before clipping, a 0-dim fp32 CPU tensor.

        Raises:
            ValueError: another norm_type, or a negative max_norm.
            RuntimeError: the norm is not finite and error_if_nonfinite is set.
        """
        if float(norm_type) != 2.0:
            raise ValueError(f"norm_type={norm_type!r}: clipping by the 2-norm is supported")
        if not max_norm >= 0:
            raise ValueError(f"max_norm={max_norm!r} must not be negative")
        norm = self.grad_norm()
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(
                f"The total norm of order 2.0 of the gradients is non-finite ({norm}), so it cannot be "
                "clipped; set error_if_nonfinite=False to go on"
            )
        if self.scaler is None or math.isfinite(norm):
            self._clip_factor = clip_coefficient(norm, float(max_norm))
        return torch.tensor(norm, dtype=torch.float32)

    def clip_grad_value_(self, value: float) -> None:
        """Clamps every gradient element (unscaled) to [-value, value], now."""
        if not value >= 0:
            raise ValueError(f"value={value!r} must not be negative")
        self._check_open()
        self.collect()
        bound = float(value) * (self.scaler.scale if self.scaler is not None else 1.0)
        slots = [s for s in self._slots if s.has_grad_home and self.core.has_grad(s.id)]
        self.ending.check_read(slots)
        for slot in slots:
            slot.clamp_grad(bound)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimizer step; also reached as `optimizer.step()`.

        With a loss scaler a step with non-finite gradients changes no bit of the model and its
        states; the scale is updated either way.
        """
        self._check_open()
        if self.optimizer is None:
            raise GeminiError("there is no optimizer: manage(model, optimizer) with one to train")
        return self.optimizer.step(closure)  # with its hooks; it comes back to _step

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        self._check_open()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.recover()
        self.collect()
        work = [item for item in self._stepped() if self.core.has_grad(item[0].id)]
        if self.ranks.size > 1:
            agreement.check_hyperparameters(self, "optimizer step", [slot for slot, _ in work])
        if not work:
            self.ending.give_up()
            return loss
        divisor = 1.0
        if self.scaler is not None:
            divisor = self.scaler.scale
            _, nonfinite = self._measure_grads()
            if nonfinite:
                self.scaler.update(True)
                self._skipped += 1
                self._clip_factor = 1.0
                self._note_step(self.core.stats())
                return loss
        updates = [self._update(slot, group, divisor) for slot, group in work]
        self.ending.check_step(updates)
        self._refresh_memory()
        self._run_step(updates)
        self.ending.done(slot for slot, _ in work)
        for slot, _ in work:
            if slot.count_update():
                _ = self.optimizer.state[slot.parameter]  # it has an entry from now on
            slot.note_change()
        if self.scaler is not None:
            self.scaler.update(False)
        self._clip_factor = 1.0
        self._steps += 1
        self.ranks.when = f" after step {self._steps}"
        self._note_step(self.core.stats())
        return loss

    def _run_step(self, updates: list[tuple[Any, ...]]) -> None:
        try:
            with agreement.naming_units(self), self.ranks.explaining():
                self.core.step(updates, self.stream())
        except (GeminiMemoryError, GeminiDeviceError) as error:  # the others go on with theirs
            self.ranks.abort(f"optimizer step: {error}")
            raise

    def _update(self, slot: Slot, group: dict[str, Any], divisor: float) -> tuple[Any, ...]:
        """One parameter's part of a step, as the core takes it."""
        numbers = (*takeover.hyperparameters(group), slot.adam_step + 1, *takeover.mode(group))
        return (slot.id, *numbers, divisor, self._clip_factor)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops every gradient (or zeroes it, with set_to_none=False), as torch's zero_grad does.

        A clip factor that no step has used is dropped too.
        """
        self.clear_grads(self._slots, set_to_none)

    def clear_grads(self, slots: list[Slot], set_to_none: bool) -> None:
        self._check_open()
        self.recover()
        slots = [s for s in slots if s.has_grad_home and self.core.has_grad(s.id)]
        for slot in slots:
            self.ending.check_change(slot)
        self._clip_factor = 1.0
        self._sumsq = None
        for slot in slots:
            if set_to_none:
                slot.drop_grad()
            else:
                slot.zero_grad()

    def recover(self) -> None:
        """Leaves units that an interrupt (KeyboardInterrupt in forward) has left entered."""
        self.begin_pass()
        for unit in self._units:
            while unit.is_entered:
                unit.leave()

    # ---- reading and writing parameters ----

    def __copy__(self) -> Any:
        raise GeminiError(
            "an engine cannot be copied: copy.deepcopy(engine.model) gives a plain model"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.__copy__()

    def __reduce__(self) -> Any:
        raise GeminiError("an engine cannot be pickled: save engine.state_dict()")

    @contextlib.contextmanager
    def full_parameter(self, parameter: nn.Parameter) -> Iterator[torch.Tensor]:
        """The parameter as a CPU tensor: the fp32 master if it is trained, else the weight.

        Changes made to the tensor are written back at the end of the context.
        """
        self._check_open()
        slot = self.slot_of(parameter)
        values = slot.read_master()
        before = values.clone()
        yield values
        now, then = (t.reshape(-1).view(torch.uint8) for t in (values, before))
        if not torch.equal(now, then):
            slot.write_master(values)

    @contextlib.contextmanager
    def full_parameters(
        self, module: nn.Module | None = None, writable: bool = True
    ) -> Iterator[None]:
        """Every parameter of `module` (default: the model) is a plain tensor inside the context.

        All of them are on the device at once, which needs room. In-place changes are kept.

        Args:
            module: the model or a submodule.
            writable: False saves the comparison that finds changes; making one is then an error.

        Raises:
            GeminiMemoryError: they do not fit the device budget together.
            GuardError: at the end, if a parameter was written although writable is False.
        """
        self._check_open()
        module = self.model if module is None else module
        slots = list(dict.fromkeys(self.slot_of(p) for p in module.parameters()))
        shown = [slot.lease(is_watched=writable) for slot in slots]
        for slot, data in zip(slots, shown, strict=True):
            slot.open_count += 1
            if slot.open_count == 1:
                absent.set_data(slot.parameter, data)
                slot.version = slot.parameter._version
        try:
            yield
        finally:
            written = []
            for slot in slots if not self.closed else ():
                if slot.parameter._version != slot.version and not writable:
                    written.append(slot)
                slot.version = slot.parameter._version  # the leases find the writes
                slot.open_count -= 1
                if slot.open_count == 0:
                    absent.set_data(slot.parameter, slot.absent)
            shown.clear()
            if not self.closed:
                for slot in written:  # what was written is kept, and said
                    self.note_write(slot)
                self.core.drain()
        if written:
            raise GuardError(
                f"{written[0].name} was written inside full_parameters(writable=False); use writable=True"
            )

    def model_state_dict(self, masters: bool = True, *, rank0_only: bool = False) -> dict[str, Any]:
        """The model's state on the CPU; keys and order as `model.state_dict()`.

        Args:
            masters: give trained parameters as fp32 masters; False: in compute dtype. Tied parameters share one tensor.
            rank0_only: all ranks call it, but only rank 0 gets the state, the others an empty dict (and no memory).
        """
        self._check_open()
        return state.model_state_dict(self, masters, 0 if rank0_only else None)

    def load_model_state_dict(self, state: dict[str, Any], strict: bool = True) -> Any:
        """`model.load_state_dict`; fp32 values become masters exactly. Every rank gives the whole state."""
        self._check_open()
        with self.ranks.revealing():
            return self.model.load_state_dict(state, strict=strict)

    def optimizer_state_dict(
        self, *, rank0_only: bool = False, with_lows: bool = True
    ) -> dict[str, Any]:
        """The optimizer's state in torch.optim.AdamW's form; tensors on the CPU.

        Args:
            rank0_only: as in model_state_dict.
            with_lows: with what 16-bit weights lack to be their masters; no need beside the masters themselves.
        """
        self._check_open()
        if self.optimizer is None:
            raise GeminiError("there is no optimizer")
        return takeover.state_dict(self, self.optimizer, 0 if rank0_only else None, with_lows)

    def load_optimizer_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the state_dict of torch.optim.AdamW, Adam, HybridAdam or a managed one; the whole, on every rank.

        An empty "state" resets moments and steps.
        """
        self._check_open()
        if self.optimizer is None:
            raise GeminiError("there is no optimizer")
        takeover.load_state_dict(self, self.optimizer, state)

    def state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """Everything for an exact resume: masters, buffers, moments, steps, loss scaler. See model_state_dict."""
        state: dict[str, Any] = {"model": self.model_state_dict(rank0_only=rank0_only)}
        if self.optimizer is not None:
            state["optimizer"] = self.optimizer_state_dict(rank0_only=rank0_only, with_lows=False)
        if self.scaler is not None:
            state["scaler"] = self.scaler.state_dict()
        return {} if rank0_only and self.ranks.rank else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of state_dict()."""
        self._check_open()
        self.load_model_state_dict(state["model"])
        if "optimizer" in state:
            self.load_optimizer_state_dict(state["optimizer"])
        if self.scaler is not None and "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])

    # ---- the rest ----

    def stats(self) -> dict[str, int | float]:
        """Plain numbers about the run so far. Bytes are bytes; counts are since manage().

        Keys: steps, skipped_steps, loss_scale, parameters, chunks, settled_chunks, blocks, fetches, evictions,
        fetched_bytes, evicted_bytes (written back), device_bytes and device_peak_bytes (of blocks),
        device_budget_bytes (-1: none), host_bytes, host_pin_seconds, mapping_seconds (of the host, for blocks),
        settling (1: another plan may come), state_bytes (the training state: weights, optimizer states and gradients,
        padding included), weight_bytes, leases, layout_hash; and the medians over the last 32 steps that
        report.StepMeter names (NaN: not measured). On CUDA total_peak_bytes: of everything on the device, others
        included, the driver's figure. With a plan what it foretells: predicted_step_seconds, predicted_bound_seconds
        (perfect overlap), compute_seconds, predicted_device_peak_bytes, predicted_host_peak_bytes (of the whole
        process; on the CPU without activations).
        """
        self._check_open()
        return {
            "steps": self._steps,
            "skipped_steps": self._skipped,
            "loss_scale": self.scaler.scale if self.scaler is not None else 1.0,
            "parameters": sum(math.prod(s.shape) for s in self._slots),
            **self.core.stats(),
            **self._figures(),
        }

    def close(self, dtype: torch.dtype | None = None, *, with_states: bool | None = None) -> None:
        """Makes model and optimizer ordinary again, with the trained weights, and frees everything. Idempotent.

        Several ranks close together, and each has the whole model then. Where the others do not come (this one is
        handling an exception, say, which they have not met) they are told, and this rank keeps its part of the weights.

        An engine that an error has closed can be closed, too: a RuntimeWarning then says what could not be given
        back (weights of one step, states of the optimizer).

        Args:
            dtype: None: parameters in compute dtype; torch.float32: trained parameters as their
                fp32 masters. Parameters return to the device they came from.
            with_states: give the optimizer its moments back, whole on every rank. None: if there is one rank.
        """
        closing.close(self, dtype, self.ranks.size == 1 if with_states is None else with_states)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.ranks.abort(f"{type(error).__name__}: {error}")
        self.close()
