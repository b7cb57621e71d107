"""What an engine is made of: the core, slots and units of one model, and what a step does with them.

The core (csrc/engine/engine.h) moves bytes. management.py makes engines, parameters/registration.py moves a
model in, parameters/hooks.py enters and leaves units, parameters/absent.py serves parameters outside them,
optim/managed.py is the optimizer's face, and engine.py what a person sees of all this.

Invariants
    1. Every managed parameter has one slot, however many names (tied weights) it has.
    2. The real `.grad` of a managed parameter is None except inside its accumulation hook.
    3. After close() the model has no trace of the engine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from gemini_strategy import _C, _torch, agreement, state
from gemini_strategy.arguments import bound_of_clip
from gemini_strategy.errors import GeminiDeviceError, GeminiError, GeminiMemoryError, GuardError
from gemini_strategy.memory.budget import DeviceMemory
from gemini_strategy.optim import managed
from gemini_strategy.optim.adam import clip_coefficient, hyperparameters, mode
from gemini_strategy.optim.opaque_optimizer import OpaqueOptimizer
from gemini_strategy.optim.several import OpaqueSeveral, Several
from gemini_strategy.parameters import absent, borrowing, foreign, order, stand_in
from gemini_strategy.parameters.hooks import SavedTensorNet, root_forwards
from gemini_strategy.parameters.original import Original
from gemini_strategy.parameters.registration import Registration
from gemini_strategy.parameters.sharing import check_sharing
from gemini_strategy.parameters.slot import Slot
from gemini_strategy.precision import FORMATS, LossScaler
from gemini_strategy.ranks.ranks import Ranks
from gemini_strategy.report.progress import progress
from gemini_strategy.report.reporting import STATS, Reporting
from gemini_strategy.roots import title
from gemini_strategy.settings import Settings
from gemini_strategy.step import Clip, State, Step
from gemini_strategy.weakly import WeakSet
from gemini_strategy.weights.loading import Loading
from gemini_strategy.weights.transformers import adapter_parameters


class Uncopied:
    """What neither copies nor pickles: a model's bytes are in one engine."""

    def __copy__(self) -> Any:
        raise GeminiError(
            "an engine cannot be copied: copy.deepcopy(engine.model) gives a plain model"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.__copy__()

    def __reduce__(self) -> Any:
        raise GeminiError("an engine cannot be pickled: save engine.state_dict()")


class Runtime(Uncopied, Reporting):
    """One model in its chunks, from manage() to close().

    Attributes:
        engine: the Engine on it, which a person holds.
        core: the C engine.
        slots, units: of the model; net: what catches the tensors that autograd saves.
        coming_step: what has been decided of it.
        written: what this rank has written since the ranks compared it.
        memory: the device memory that is not in chunks.
        chunk_bytes: of weights, in a chunk at most, but for larger parameters.
        assigned: slots with fields of which a program has the tensor that it assigned (parameters/given.py).
        takes_thawed: whoever made this engine makes another one before the next pass when parameters are to be trained
            for which it has no place; thawed: those parameters.
        serves_outside: whether units that are called without autocast bring their own (parameters/outside.py).
        takes_plainly: whether ordinary gradients go to the core without a call of ordinary_grad.
        The others are those of Engine, and what they are made of.
    """

    engine: Any = None  # none when it is closed
    closed = True
    half_done: str | None = None  # what a load or a step has begun and not ended
    called, unfreezing = "engine", ""  # how readers of a text come by it, and where they unfreeze
    saving: Any = None  # the checkpoint that is being written in the background

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Several | None,
        settings: Settings,
        scaler: LossScaler,
        ranks: Ranks,
        original: Original,
    ) -> None:
        super().__init__(settings.device)
        self.ranks = ranks
        self.written = agreement.Written(ranks)
        self.model, self.optimizer = model, optimizer
        self.device = settings.device
        self.precision = settings.precision.name
        self.precision_plan = settings.precision
        self.closed = False
        self.settings = settings
        self._norm: tuple[int, list[int], tuple[float, int]] | None = None  # of which gradients
        self._in_backward = False
        self.steps = self.skipped_steps = 0
        self.borrowers: set[Any] = set()  # calls of modules whose operations have borrowed
        self._counted: set[Slot] = set()  # those that the last of several optimizers' steps were of
        self.coming_step = Step(self)
        self.assigned: set[Slot] = set()
        # Those that have been shown: see parameters/masters.py and parameters/stand_in.py.
        self.masters: dict[Slot, torch.Tensor] = {}
        self.stand_ins: WeakSet[stand_in.StandIn] = WeakSet()
        self.takes_thawed = False
        self.serves_outside = settings.convert_inputs
        self.thawed: set[Slot] = set()
        grouped = managed.check(optimizer, model) if optimizer is not None else set()
        if optimizer is not None:
            managed.settle(optimizer)
        foreign.check_modules(model, settings.device, settings.weights is not None)
        self.opaque: OpaqueOptimizer | OpaqueSeveral | None = None
        if isinstance(optimizer, Several):
            self.opaque = OpaqueSeveral(self, optimizer)
        elif optimizer is not None and managed.is_opaque(optimizer):
            self.opaque = OpaqueOptimizer(self, optimizer)
        if self.opaque is not None and settings.precision.is_mixed:  # as beside fp32 weights
            self.settings = settings = dataclasses.replace(settings, is_grad_f32=True)
        loading = Loading(model, settings.weights, settings.missing)
        registration = Registration(self, grouped, adapter_parameters(model), loading)
        check_sharing(model)
        self.slots = registration.slots
        self.note_model()
        self.slots_by_id = {slot.id: slot for slot in self.slots}
        is_half = any(s.has_grad_home and s.dtype is torch.float16 for s in self.slots)
        self.scaler = scaler if is_half else None
        if is_half and isinstance(optimizer, Several):  # each step() would update the one scale
            raise GeminiError(
                f"{len(optimizer.parts)} optimizers of fp16 weights would share one loss scale: use "
                'precision="bf16-mixed" or "bf16-true", or one optimizer'
            )
        self.choose_way()
        original.on_restore(self._abandon)
        self._make_core(registration)
        n_bytes = sum(slot.part_bytes for slot in self.slots)
        with progress("Gemini: taking the weights", n_bytes, ranks.rank) as done:
            loading.fill(registration.slots, ranks, done)
            self.units, self.handles = registration.attach(loading, original, done)
        self.handles += state.install(self, model)
        self.net = SavedTensorNet(self, self.slots)
        self.roots = root_forwards(self)
        if optimizer is not None:
            managed.install(self, optimizer)
            self.watch_first_step()
        loading.finish()
        for slot in self.slots:
            if slot.original_device.type == "meta":  # it goes back to the host
                slot.original_device = torch.device("cpu")

    def _abandon(self) -> None:
        """manage() has failed: the model has nothing of this engine any more, and its memory is free."""
        self.closed = True
        self.end_first_step()
        if hasattr(self, "net"):
            absent.nets.discard(self.net)
        for slot in self.slots:
            slot.shown = slot.inside = slot.absent = None
        try:
            if hasattr(self, "core"):
                self.core.close()
        finally:
            if hasattr(self, "memory"):
                self.memory.close()

    def _make_core(self, registration: Registration) -> None:
        settings = self.settings
        arguments = settings.core_arguments(registration, self.ranks.shard.size)
        self.chunk_bytes = arguments["chunk_bytes"]
        tables = arguments["unit_params"], arguments["unit_begin"]
        agreement.check_model(self, registration.slots, tables)
        # What they take of the device, and what measuring them took, is known before anybody looks what is left.
        communicators = self.ranks.communicators(self.device)
        self.memory = DeviceMemory(settings.device)
        external = self.memory.external_bytes(0)
        if settings.policy == "auto":  # looks at what fits beside the model that is there
            external += self.memory.torch_bytes()
        self.core = _C.Core(
            **arguments,
            threads=settings.threads,
            external_bytes=external,
            slack_bytes=self.memory.slack_bytes(settings.device_budget),
            **communicators,
            **({} if self.opaque is None else self.opaque.core_arguments()),
        )
        if self.device.type == "cpu":
            self.ranks.settles_by(self.core.settle)
        agreement.check_layout(self)
        budget = -1 if settings.policy == "cuda" else settings.device_budget
        name, trains = title(self.model), self.optimizer is not None
        self.memory.join(self.core, name, budget, registration.floor_bytes(), trains)
        if budget >= 0:
            held = self.core.stats()["device_bytes"]  # where everything fits it is there already
            spare = registration.check_floor(budget, self.memory.left_bytes(budget, held))
            self.memory.reserve = self.memory.first_reserve_bytes(budget, spare)
            self.core.set_external_bytes(self.memory.external_bytes(held))

    def _refresh_memory(self) -> None:
        """Before a step, which may plan: what others hold on the device now."""
        if self.device.type != "cuda":
            return
        self.sample_device()
        self.memory.reserve = 0
        if self.memory.tidy():
            self.core.forget_outside()
        chunk_bytes = self.core.stats()["device_bytes"]
        self.core.set_external_bytes(self.memory.external_bytes(chunk_bytes))
        if not self.steps:  # the first step's reserve is no need of a plan
            self.core.forget_outside()

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """An error inside says what is known of it here: the other ranks' part in it, and what fills the budget."""
        with self.ranks.explaining():
            try:
                yield
            except torch.OutOfMemoryError as error:
                self.memory.explain(error)
                raise

    @contextlib.contextmanager
    def explaining_step(self) -> Iterator[None]:
        """An error of the optimizer's own step() is the cause of what the core says about it."""
        try:
            yield
        except Exception as error:
            cause = self.opaque.take_error() if self.opaque is not None else None
            if cause is None or cause is error:
                raise
            if not isinstance(cause, Exception):  # KeyboardInterrupt, SystemExit
                raise cause from error
            raise error from cause

    # ---- what hooks call ----

    def stream(self) -> int:
        """The raw handle of torch's current stream; 0 on the host device."""
        return 0 if self.device.type == "cpu" else _torch.current_raw_stream(self.device.index)

    def begin_pass(self) -> None:
        """Lets go of what earlier backward nodes no longer need."""
        self.net.unpin()

    def note_write(self, slot: Slot) -> None:
        """The weight was written in place while its chunk was pinned: the master follows."""
        try:
            self.core.note_write(slot.id, self.stream())
        except GeminiError as error:
            raise GuardError(
                f"{slot.name}: {error}; write it outside its module's forward, or inside "
                "engine.full_parameter(p)"
            ) from None

    def settle(self) -> None:
        """Before a weight or a state changes: checkpoints that somebody still has keep what they had."""
        stand_in.settle(self)

    def end_saving(self) -> None:
        """Waits for the checkpoint that is being written, and raises its error, unless somebody has got that."""
        if self.saving is not None:
            self.saving.finish()
            self.saving = None

    def make_room(self) -> bool:
        """A chunk finds no room: whether torch could give something back, or tensors that nobody reaches any more."""
        if self.memory.give_cached():
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
        if not value:
            self.thawed.discard(slot)
        elif self.optimizer is not None and not slot.has_grad_home:
            if not self.takes_thawed:
                again = "set requires_grad, see that a group of the optimizer has it, and manage() again"
                raise GeminiError(
                    f"{slot.name} was frozen when the model was managed, so it has no place for a gradient; "
                    f"{self.unfreezing or f'{managed.closing(self)}, {again}'}"
                )
            self.thaw(slot)

    def thaw(self, slot: Slot) -> None:
        """The parameter is to be trained from the next pass on, by another engine."""
        self.thawed.add(slot)

    def choose_way(self) -> None:
        """Whether ordinary gradients go to the core without a call of ordinary_grad: C looks at an attribute."""
        is_watched = self.first_step is not None and self.first_step.is_watched
        is_seen = is_watched or self.scaler is not None or self.assigned
        self.takes_plainly = not is_seen and not self.coming_step.sees_gradients

    def check_assigned(self) -> None:
        """Before fields of many parameters are used: see Given.check."""
        for slot in list(self.assigned):
            slot.given.check()

    def _announce(self) -> None:
        """The numbers that the coming step would have now: the core may begin with it (csrc/engine/speculation.c)."""
        self.coming_step.wants_numbers = False
        self.choose_way()
        with contextlib.suppress(GeminiError):  # the step says it
            if self.opaque is None or self.opaque.announce():
                updates = [self._update(*item, 1.0) for item in self._stepped()]
                self.core.announce(updates)

    def ordinary_grad(self, slot: Slot, grad: torch.Tensor) -> tuple[torch.Tensor, int]:
        """What the core takes for a gradient that it does not take as it comes, and its format."""
        if self.coming_step.wants_numbers:
            self._announce()
        if self.scaler is not None and not self._in_backward:
            raise GeminiError(
                f'{slot.name}: a gradient arrived from loss.backward(), but with fp16 weights ("16-mixed") the loss '
                "must be scaled: call engine.backward(loss) instead (and no torch.amp.GradScaler)"
            )
        if grad.layout is not torch.strided:
            raise GeminiError(
                f"{slot.name}: its gradient is {grad.layout}: build it with sparse=False"
            )
        self.coming_step.check_arrival(slot)
        if grad.requires_grad:
            raise GeminiError(
                f"{slot.name}: backward(create_graph=True) makes a gradient that can be differentiated, and the engine "
                "keeps numbers only: use torch.autograd.grad(loss, parameters, create_graph=True)"
            )
        grad = grad.detach().clone() if absent.is_absent(grad) else grad.detach()
        if grad.dtype not in FORMATS:
            grad = grad.float()
        grad = order.ordered(grad, slot.strides)
        slot.given.check_arrival()
        self.coming_step.shorten_one(slot)  # it is added to: there was no zero_grad()
        if self.first_step is not None:
            self.first_step.note_grad(slot)
        return grad, FORMATS[grad.dtype]

    def grad_dtype(self, slot: Slot) -> torch.dtype:
        """The dtype in which a gradient is kept."""
        return torch.float32 if self.settings.is_grad_f32 else slot.dtype

    def check_open(self) -> None:
        if self.closed:
            raise GeminiError("this engine is closed: call gemini_strategy.manage() again")
        if self.half_done is not None:
            raise GeminiError(
                f"{self.half_done} was interrupted, and the model is partly of one state and partly of another: "
                "engine.load() a checkpoint first"
            )

    def slot_of(self, parameter: torch.Tensor) -> Slot:
        """The slot of one of this engine's parameters."""
        slot = getattr(parameter, "_gm_slot", None)
        if slot is None or slot.engine is not self:
            is_tensor = isinstance(parameter, torch.Tensor)
            which = f"a parameter of shape {tuple(parameter.shape)}" if is_tensor else parameter
            raise GeminiError(
                f"{which} is not managed by this engine: parameters "
                "replaced or added after manage() are unknown to it"
            )
        return slot

    def slot_of_states(self, key: Any) -> Slot | None:
        """Of a parameter whose states the engine has; None: it is none of them."""
        slot = getattr(key, "_gm_slot", None)
        is_ours = slot is not None and slot.engine is self and slot.has_moments and not self.closed
        return slot if is_ours else None

    # ---- training ----

    @contextlib.contextmanager
    def ends_step(self) -> Iterator[None]:
        """See Engine.ends_step."""
        self.check_open()
        if self.optimizer is not None and self.ranks.size > 1:
            agreement.check_hyperparameters(self, "backward(step=True)", ())
        # Of several optimizers the first step() is not the whole step.
        is_one = self.optimizer is not None and not isinstance(self.optimizer, Several)
        if not is_one or self.scaler is not None or self.coming_step.factor != 1.0:
            yield
            return
        self.settle()
        if self.opaque is not None:
            self.opaque.begin()
        updates = [self._update(*item, 1.0) for item in self._stepped()]
        with self.explaining_step(), self.coming_step.announced(updates):
            yield

    def _stepped(self, of: Any = None) -> Iterator[tuple[Slot, dict[str, Any]]]:
        """What a step updates where there is a gradient: slots in the order of the groups, and their groups.

        `of`: the optimizer, if it is one of several; None: all of them.
        """
        if self.thawed:
            slot = min(self.thawed, key=lambda slot: slot.id)
            raise GeminiError(
                f"{slot.name} was unfrozen inside a step, and has no place for a gradient yet: unfreeze before a batch "
                "begins, in on_train_epoch_start or on_train_batch_start"
            )
        groups = self.optimizer.param_groups if self.optimizer is not None else ()
        groups = groups if of is None else of.param_groups
        for parameter, group in managed.each_once(groups, self.opaque is not None):
            slot = self.slot_of(parameter)
            if slot.has_moments:
                yield slot, group
            elif slot.has_grad_home or slot.grad is not None:  # torch steps whatever has one
                way = "" if slot.has_grad_home else "drop its gradient (zero_grad()), "
                raise GeminiError(
                    f"param_groups: {slot.name} {managed.no_place(slot)}: {way}take it out of its group, or "
                    f"{managed.closing(self)} and manage() again"
                )

    def _to_step(self) -> list[Slot]:
        """What has a gradient for the next step."""
        return [slot for slot, _ in self._stepped() if self.core.has_grad(slot.id)]

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` times the loss scale; itself without one. Backward belongs into `accept_scaled`."""
        return loss if self.scaler is None else loss * self.scaler.scale

    @contextlib.contextmanager
    def accept_scaled(self) -> Iterator[None]:
        """Inside, gradients are taken as scaled: for loops that call backward themselves."""
        self.check_open()
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False

    def _to_measure(self) -> list[Slot]:
        """What has a gradient for the next step, as it will be stepped."""
        self.check_open()
        self.check_assigned()
        slots = self._to_step()
        self.coming_step.check_read(slots)
        self.coming_step.shorten(slots)
        return slots

    def _measure_grads(self) -> tuple[float, int]:
        """(exact sum of squares of the gradients to be stepped, non-finite elements), cached."""
        slots = self._to_measure()
        ids = sorted(slot.id for slot in slots)
        wanted = self.core.grads_version(), ids
        fields = {"is_known": self._norm is not None and self._norm[:2] == wanted}
        everyone = agreement.check_step(self, "gradient norm", slots, fields)
        if not all(own["is_known"] for own in everyone):
            self._norm = *wanted, self.core.grad_sumsq(ids, self.stream())
        return self._norm[2]

    @_torch.untraced
    def grad_norm(self) -> float:
        """See Engine.grad_norm."""
        squares, _ = self._measure_grads()
        return math.sqrt(squares) / (self.scaler.scale if self.scaler is not None else 1.0)

    @_torch.untraced
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """See Engine.clip_grad_norm_."""
        max_norm = bound_of_clip("max_norm", max_norm)
        if float(norm_type) != 2.0:
            raise ValueError(f"norm_type={norm_type!r}: clipping by the 2-norm is supported")
        self.coming_step.check_unclipped("clip_grad_norm_()")
        if self.scaler is None and not error_if_nonfinite:
            return self._clip_late(max_norm)
        norm = self.grad_norm()
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(
                f"The total norm of order 2.0 of the gradients is non-finite ({norm}), so it cannot be "
                "clipped; set error_if_nonfinite=False to go on"
            )
        if self.scaler is None or math.isfinite(norm):
            factor = clip_coefficient(norm, max_norm)
            clip = Clip(max_norm, self.core.grads_version(), factor)
            self.coming_step.clipped(self._to_step(), clip)
        return torch.tensor(norm, dtype=torch.float32, device=self.device)

    def _clip_late(self, max_norm: float) -> torch.Tensor:
        """Clips without waiting for the norm: it, as the stream will have it.

        All ranks do the same here, whatever each of them has to wait for.
        """
        slots = self._to_measure()
        self.coming_step.settle()
        norm = torch.empty((), dtype=torch.float32, device=self.device)
        ids = sorted(slot.id for slot in slots)
        with self.ranks.explaining():
            has_waited = self.core.clip(ids, max_norm, norm.data_ptr(), self.stream())
        self.coming_step.clipped(slots, Clip(max_norm, self.core.grads_version()))
        # A plan is made from what it came to; without gradients no step will ask.
        if has_waited or not slots:
            self.coming_step.settle()
        return norm

    @_torch.untraced
    def clip_grad_value_(self, value: float) -> None:
        """See Engine.clip_grad_value_."""
        value = bound_of_clip("value", value)
        self.coming_step.check_unclipped("clip_grad_value_()")
        self.check_open()
        self.check_assigned()
        bound = value * (self.scaler.scale if self.scaler is not None else 1.0)
        slots = [s for s in self.slots if s.has_grad_home and self.core.has_grad(s.id)]
        self.coming_step.check_read(slots)
        self.coming_step.shorten(slots)
        for slot in slots:
            slot.clamp_grad(bound)

    @_torch.untraced
    def step(self, closure: Callable[[], Any] | None, of: Any = None) -> Any:
        """What is behind `optimizer.step()`; `of`: as in _stepped."""
        self.check_open()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self.check_open()
        self.recover()
        self.check_assigned()
        self.coming_step.check_unchanged()
        work = [item for item in self._stepped(of) if self.core.has_grad(item[0].id)]
        self.coming_step.shorten(slot for slot, _ in work)
        shown: list[Slot] = []
        if self.ranks.size > 1:
            present = [slot for slot, _ in work]
            shown = agreement.check_hyperparameters(self, "optimizer step", present)
        if not work:
            self._check_unknown()
            closed = self.coming_step.give_up("optimizer.step() found no gradient to step")
            if closed is not None:
                raise GeminiError(closed)
            return loss
        divisor = 1.0
        if self.scaler is not None:
            divisor = self.scaler.scale
            _, nonfinite = self._measure_grads()
            if nonfinite:
                self.scaler.update(True)
                self.skipped_steps += 1
                self.coming_step.drop_clip()
                self.note_step(self.core.stats())
                return loss
        self.settle()
        is_late = self.coming_step.is_late
        if self.opaque is not None and self.coming_step.state is State.ARMED:
            self.opaque.check_unwritten()
        elif self.opaque is not None:
            self.opaque.begin()
        updates = [self._update(*item, divisor) for item in work]
        self.coming_step.check_announced(updates)
        self._refresh_memory()
        taken: list[None] = []
        n_steps = self.steps
        try:
            self.half_done = "optimizer.step()"
            self._run_step(updates, is_late, taken)
            if self.opaque is not None:
                with self.explaining_step():
                    self.opaque.end((slot for slot, _ in work), self.stream())
        finally:  # an interrupt that has waited for the core is raised when all is said and done
            if taken:
                _C.uninterrupted(self._note_taken, work)
            else:
                self.half_done = None
        for slot in shown if self.ranks.shard.size > 1 else ():
            slot.lease()  # gathers: whoever still shows it shows the new weight, as with one rank
        if self.steps > n_steps:
            stats = self.core.stats()
            self.note_step(stats)
            borrowing.judge(self, bool(stats["planned"]))
        absent.sweep()
        return loss

    def _note_taken(self, work: list[tuple[Slot, dict[str, Any]]]) -> None:
        """The core has taken a step."""
        for slot, group in work:
            if slot.count_update() and self.opaque is None:
                _ = self.optimizer.state[slot.parameter]  # it has an entry from now on
            # torch's get_state_dict() makes such a step behind the model's state dict.
            slot.note_change(is_same=self.opaque is None and float(group["lr"]) == 0.0)
        if self.scaler is not None:
            self.scaler.update(False)
        self.coming_step.taken(self.scaler is None and self.core.wants_numbers())
        self.steps += self._is_new_step(work)
        self.half_done = None
        self.ranks.when = f" after step {self.steps}"
        if self.opaque is not None:
            self.opaque.finish()

    def _is_new_step(self, work: list[tuple[Slot, dict[str, Any]]]) -> bool:
        """Several optimizers make one step together, each of its own parameters."""
        if not isinstance(self.optimizer, Several):
            return True
        slots = {slot for slot, _ in work}
        is_new = not self._counted or not self._counted.isdisjoint(slots)
        self._counted = slots if is_new else self._counted | slots
        return is_new

    def _check_unknown(self) -> None:
        """A step finds no gradient of its own: nor has anybody put trained parameters into the model since manage()."""
        for name, parameter in self.model.named_parameters():
            if getattr(parameter, "_gm_slot", None) is None and parameter.grad is not None:
                raise GeminiError(
                    f"optimizer step: {name} has a gradient, and nothing that is managed has one: it was added after "
                    f"manage() (an adapter, a new head), and this engine does not train it: {managed.closing(self)}, "
                    "make the optimizer over what is trained now, and manage() the model again"
                )

    def _run_step(self, updates: list[tuple[Any, ...]], is_late: bool, taken: list[None]) -> None:
        """`taken` has an element when the core has taken it: no interrupt comes between these two."""
        step = self.core.step_clipped if is_late else self.core.step
        try:
            with self.ranks.explaining(), self.explaining_step():
                taken.extend(map(step, (updates,), (self.stream(),)))
        except (GeminiMemoryError, GeminiDeviceError) as error:  # the others go on with theirs
            self.ranks.abort(f"optimizer step: {error}")
            raise

    def _update(self, slot: Slot, group: dict[str, Any], divisor: float) -> tuple[Any, ...]:
        """One parameter's part of a step, as the core takes it."""
        factor = 1.0 if self.coming_step.is_late else self.coming_step.factor
        if self.opaque is not None:
            return self.opaque.update(slot, divisor, factor)
        numbers = (*hyperparameters(group), slot.adam_step + 1, *mode(group))
        return (slot.id, *numbers, divisor, factor)

    @_torch.untraced
    def clear_grads(self, slots: list[Slot], set_to_none: bool) -> None:
        self.check_open()
        self.recover()
        own = [s for s in slots if not s.has_grad_home and s.grad is not None]  # frozen
        slots = [s for s in slots if s.has_grad_home and self.core.has_grad(s.id)]
        for slot in slots:
            self.coming_step.check_change(slot)
        for slot in own:
            slot.set_grad(None if set_to_none else torch.zeros_like(slot.grad))
        self.coming_step.drop_clip()
        for slot in slots:
            if set_to_none:
                slot.drop_grad()
            else:
                slot.zero_grad()

    def recover(self) -> None:
        """Leaves units that an interrupt (KeyboardInterrupt in forward) has left entered."""
        self.begin_pass()
        for unit in self.units:
            while unit.n_entered:
                unit.leave()
        for _, borrowed in _C.borrowed()[0]:
            borrowed.clear()

    # ---- the rest ----

    def stats(self) -> dict[str, int | float]:
        """See Engine.stats."""
        self.check_open()
        found = {
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "loss_scale": self.scaler.scale if self.scaler is not None else 1.0,
            "parameters": sum(math.prod(s.shape) for s in self.slots),
            **self.core.stats(),
            **self.figures(),
        }
        return {name: found[name] for names in STATS.values() for name in names if name in found}
