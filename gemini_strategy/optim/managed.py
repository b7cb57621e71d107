"""Taking over the user's optimizer: same object, same groups, same state_dict form; the engine steps.

The object's class is swapped for a subclass that delegates, so that isinstance checks, LR schedulers
(made before or after), hooks and class names keep working; `releasing` undoes it.
"""

from __future__ import annotations

import functools
import math
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini_strategy import _torch
from gemini_strategy.errors import GeminiError
from gemini_strategy.optim.adam import CPUAdam, HybridAdam
from gemini_strategy.optim.moments import States, check_entry, saved_entry
from gemini_strategy.optim.opaque_states import OpaqueStates
from gemini_strategy.optim.several import Several, parts_of
from gemini_strategy.optim.state_dicts import REFUSED_OPTIONS, load_state_dict, state_dict
from gemini_strategy.parameters import masters, quantized
from gemini_strategy.parameters.homes import LOWS, MOMENTS
from gemini_strategy.parameters.low import note_seen, settled_low
from gemini_strategy.parameters.slot import Slot
from gemini_strategy.precision import weight_dtypes
from gemini_strategy.report.progress import Done, nothing

if TYPE_CHECKING:
    from gemini_strategy.optim.opaque_optimizer import OpaqueOptimizer
    from gemini_strategy.runtime import Runtime

_SUPPORTED = (torch.optim.AdamW, torch.optim.Adam, HybridAdam, CPUAdam)


def check(optimizer: torch.optim.Optimizer, model: nn.Module) -> set[int]:
    """id() of the optimizer's parameters; refuses what the engine cannot do exactly.

    Raises:
        GeminiError: another kind of optimizer, an unsupported option, or parameters that are not the
            model's.
    """
    if isinstance(optimizer, Several):
        return optimizer.check(lambda part: check(part, model), model)
    if isinstance(optimizer, type):
        name = optimizer.__name__
        raise GeminiError(
            f"optimizer is the class {name}, and an object is wanted: {name}(model.parameters())"
        )
    if isinstance(optimizer, _Managed):
        name = type(optimizer).__name__
        raise GeminiError(
            f"this {name} is managed already, with another model: close() that model's engine first, and where it "
            f"trains both, manage([model, other], optimizer); or make one {name} for each model"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise GeminiError(
            f"optimizer is a {type(optimizer).__name__}, and no torch.optim.Optimizer"
        )
    if not is_opaque(optimizer):
        _check_class(type(optimizer))
    if isinstance(optimizer, HybridAdam) and optimizer._gm_clip.seen:
        raise GeminiError(
            "the optimizer has clipped gradients that its step has not used yet, and the engine would use them "
            "unclipped: call optimizer.step() or zero_grad() before manage()"
        )
    names = {id(p): n for n, p in model.named_parameters(remove_duplicate=False)}
    grouped: set[int] = set()
    for number, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise GeminiError(
                f"param group {number}: differentiable=True is not supported, as no graph goes through a managed step: "
                "build the optimizer without it"
            )
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise GeminiError(
                    f"param group {number} has a parameter of shape {tuple(parameter.shape)} that is not "
                    "the model's: build the optimizer from model.parameters(); where it is another model's, or the "
                    "loss's own, manage both, with manage([model, other], optimizer) or as parts of one module; or "
                    "give it another optimizer"
                )
            if quantized.is_wrapper(parameter):
                quantized.check(names[id(parameter)], parameter)
                raise GeminiError(
                    f"param group {number} has {names[id(parameter)]}, a frozen {type(parameter).__name__}: build the "
                    "optimizer from the parameters that are trained"
                )
            grouped.add(id(parameter))
    for parameter, entry in optimizer.state.items():
        name = names.get(id(parameter))
        if id(parameter) not in grouped:
            raise GeminiError(
                f"the optimizer has a state for {name or 'a parameter'} of shape {tuple(parameter.shape)}, which "
                "is in none of its groups: build a new optimizer"
            )
        if not is_opaque(optimizer):
            check_entry(name, tuple(parameter.shape), entry)
    return grouped


def is_opaque(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its own step() makes the updates: it is none of Adam's, or does what ours does not."""
    return _plain_class(optimizer) not in _SUPPORTED or any(
        group.get(option) for group in optimizer.param_groups for option in REFUSED_OPTIONS
    )


def check_options(number: int, group: Mapping[str, Any]) -> None:
    """Raises GeminiError if a param group asks for what the engine does not do, whenever that was set."""
    for option in REFUSED_OPTIONS:
        if group.get(option):
            raise GeminiError(
                f"param group {number}: {option}=True is not supported; build the optimizer without it"
            )


def each_once(
    groups: list[dict[str, Any]], is_opaque: bool
) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
    """Parameters and their groups, which may have been edited."""
    seen: set[int] = set()
    for number, group in enumerate(groups):
        if not is_opaque:
            check_options(number, group)
        for parameter in group["params"]:
            if id(parameter) in seen:
                raise GeminiError(f"param_groups: {parameter._gm_slot.name} is in them twice")
            seen.add(id(parameter))
            yield parameter, group


def _until_close(method: Any) -> Any:
    """Who took the method from the optimizer while that was managed, calls the plain class's after close()."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(self, "_gm_engine"):  # Lightning's wrapper has it from the optimizer
            return method(self, *args, **kwargs)
        plain = getattr(_plain_class(self), method.__name__)
        # Hooks of a step have run already.
        return (plain.__wrapped__ if method.__name__ == "step" else plain)(self, *args, **kwargs)

    return call


class _Managed:
    """What a taken-over optimizer does instead of its own step."""

    @_until_close
    def step(self, closure: Any = None) -> Any:
        if self._gm_engine.opaque is None:
            _check_class(_plain_class(self))
        is_one = self._gm_engine.optimizer is self
        return self._gm_engine.step(closure, None if is_one else self)

    def _go_past_the_engine(self, *_: Any, **__: Any) -> Any:
        """What the plain class's own step and clip call."""
        raise GeminiError(
            "optimizer.step or clip_grad_norm_ was taken from the optimizer before manage(), and would go past the "
            "engine: take it, wrap it or compile it after manage()"
        )

    _with_grads = _init_group = _go_past_the_engine

    @_torch.untraced
    @_until_close
    def zero_grad(self, set_to_none: bool = True) -> None:
        engine = self._gm_engine
        engine.check_open()
        slots = [engine.slot_of(p) for g in self.param_groups for p in g["params"]]
        engine.clear_grads(slots, set_to_none)

    @_until_close
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, **kwargs: Any) -> Any:
        return self._gm_engine.clip_grad_norm_(max_norm, norm_type, **kwargs)

    @property
    def state(self) -> States:
        return self._gm_state

    @state.setter
    def state(self, states: Any) -> None:
        self._gm_state.replace(states)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """torch's own load_state_dict ends here; it has rounded what it found to the parameters' dtypes."""
        if self._gm_engine.opaque or any(slot.has_low for slot in self._gm_engine.slots):
            raise GeminiError(
                "optimizer.load_state_dict was taken from the optimizer before manage(), and would round its states to "
                "16 bits: take it after manage()"
            )
        super().__setstate__({k: v for k, v in state.items() if k != "state"})
        if "state" in state:
            self.state = state["state"]

    @_until_close
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _check_group(self._gm_engine, param_group)
        super().add_param_group(param_group)

    @_until_close
    def state_dict(self) -> dict[str, Any]:
        return state_dict(self._gm_engine, self, is_live=True)

    @_until_close
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        load_state_dict(self._gm_engine, self, state_dict)

    def __reduce__(self) -> Any:
        """As an ordinary optimizer with the states of now: what holds one (a Trainer) is copied and pickled."""
        return object.__new__, (_plain_class(self),), self.__getstate__()


def _in_mode(name: str) -> Any:
    """An optimizer's train() or eval(), which may move weights between two means of theirs, as schedule-free ones do.

    It sees what step() sees: masters, where there are some.
    """

    def call(self: Any) -> Any:
        engine, act = self._gm_engine, getattr(_plain_class(self), name)
        slots = [engine.slot_of(p) for group in self.param_groups for p in group["params"]]
        with masters.shown(engine, [slot for slot in slots if slot.has_low], engine.device):
            return act(self)

    call.__name__ = name
    return _until_close(call)


_MODES = {name: _in_mode(name) for name in ("train", "eval")}


def _plain_class(optimizer: torch.optim.Optimizer) -> type:
    """Of a managed one; the user may have put a class over it or in its place."""
    kinds = type(optimizer).__mro__
    return kinds[kinds.index(_Managed) + 1] if _Managed in kinds else kinds[0]


def _check_class(plain: type) -> None:
    """The engine does what the class's own step and zero_grad do, and calls neither."""
    for kind, name in ((plain, "step"), (plain, "zero_grad"), (torch.optim.Optimizer, "zero_grad")):
        function = getattr(kind, name)
        while function is not None:  # torch wraps its own
            module = getattr(function, "__globals__", {}).get("__name__", "")
            if module.partition(".")[0] not in ("torch", __package__.partition(".")[0]):
                raise GeminiError(
                    f"{kind.__name__}.{name} is a function of {module or 'another kind'}, and a managed optimizer "
                    f"does not call it: after manage() wrap optimizer.{name}, the object's"
                )
            function = getattr(function, "__wrapped__", None)


@functools.cache
def _managed_class(plain: type) -> type:
    # The name is the plain one's, and a search for optimizers by module and name finds it once.
    names: dict[str, Any] = {
        "__module__": __name__,
        "__qualname__": f"{_Managed.__qualname__}.{plain.__name__}",
    }
    modes = {name: mode for name, mode in _MODES.items() if callable(getattr(plain, name, None))}
    return type(plain.__name__, (_Managed, plain), names | modes)


def no_place(slot: Slot) -> str:
    """Why the engine has no states of a parameter."""
    which = "in no param group" if slot.has_grad_home else "frozen"
    return f"was {which} when the model was managed, and has no place for its states"


def closing(engine: Runtime) -> str:
    """The call that closes an engine where another is to go on, to the bit."""
    called = engine.called
    scale = " (keep its scaler.state_dict() for the next)" if engine.scaler else ""
    if not any(slot.has_low and slot.outer_dtype is slot.dtype for slot in engine.slots):
        return f"{called}.close(){scale}"
    if engine.precision is not None:
        return f"{called}.close(dtype=torch.float32){scale}"
    dtypes = weight_dtypes(engine.model, "bf16-true")
    if any(slot.dtype is not dtypes.get(slot.parameter, slot.dtype) for slot in engine.slots):
        return f"{called}.close()"  # no precision has these dtypes
    return f'{called}.close(dtype=torch.float32) (manage() takes precision="bf16-true" then)'


def _check_group(engine: Runtime, group: dict[str, Any]) -> None:
    """Refuses parameters for whose states the engine has no place."""
    for option in REFUSED_OPTIONS:
        if group.get(option) and engine.opaque is None:
            raise GeminiError(f"add_param_group: {option}=True is not supported")
    given = group["params"]
    given = group["params"] = [given] if isinstance(given, torch.Tensor) else list(given)
    for item in given:
        parameter = item[1] if isinstance(item, tuple) else item
        slot = getattr(parameter, "_gm_slot", None)
        if slot is not None and slot.engine is engine and (slot.has_moments or engine.takes_thawed):
            if parameter.requires_grad and not slot.has_moments:
                engine.thaw(slot)
            continue
        what = f"a parameter of shape {tuple(parameter.shape)} is not the model's"
        if slot is not None and slot.engine is engine:
            what = f"{slot.name} {no_place(slot)}"
        raise GeminiError(
            f"add_param_group on a managed optimizer: {what}; {closing(engine)}, add the group, and manage() "
            "again (parameters that were in a group then may leave it and be added again)"
        )


def is_wrapped(optimizer: torch.optim.Optimizer, step: Any) -> bool:
    """Whether the instance has a step that is not an LR scheduler's around the class's `step`."""
    own = optimizer.__dict__.get("step")
    is_schedulers = getattr(own, "_wrapped_by_lr_sched", False)
    return own is not None and not (is_schedulers and getattr(own, "__wrapped__", None) is step)


def who_needs_gradients(engine: Runtime) -> str | None:
    """Of what the user has put on the optimizer and the parameters: what may need gradients until their step."""
    optimizers: list[Any] = parts_of(engine.optimizer)
    if any(o._optimizer_step_pre_hooks or o._optimizer_step_post_hooks for o in optimizers):
        return "the optimizer has hooks"
    for hook in (*_torch.optimizers_pre_hooks.values(), *_torch.optimizers_post_hooks.values()):
        if not str(getattr(hook, "__module__", None)).startswith("torch."):  # its profilers'
            return "all optimizers have hooks"
    if any(is_wrapped(o, type(o).step) for o in optimizers):
        return "the optimizer's step is wrapped"
    for slot in engine.slots:  # one hook is the engine's
        if slot.has_grad_home and len(slot.parameter._post_accumulate_grad_hooks) > 1:
            return f"{slot.name} has a hook that gets its gradient"
    return None


def _rewrap_step(optimizer: torch.optim.Optimizer, before: Any) -> None:
    """An LR scheduler made earlier has wrapped the old class's step in the instance: wrap the new one.

    The wrapper tells schedulers that a step was taken (their order check), like torch's own. One of the user's stays.
    """
    if "step" not in optimizer.__dict__ or is_wrapped(optimizer, before):
        return
    del optimizer.__dict__["step"]
    reference = weakref.ref(optimizer)
    function = type(optimizer).step

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        target = reference()
        target._opt_called = True
        return function.__get__(target, type(target))(*args, **kwargs)

    wrapper._wrapped_by_lr_sched = True
    optimizer.step = wrapper


def _swap_class(optimizer: torch.optim.Optimizer, target: type) -> None:
    before = type(optimizer).step
    optimizer.__class__ = target
    optimizer._patch_step_function()
    _rewrap_step(optimizer, before)


def settle(optimizer: torch.optim.Optimizer) -> None:
    """Weights may have been written since the optimizer's last step: their masters follow, as in its next one.

    What is in no entry any more goes to its parameter.
    """
    if isinstance(optimizer, Several):
        return  # none of them is ours
    is_ours = isinstance(optimizer, HybridAdam)
    for parameter, (low, _) in optimizer._gm_lows.items() if is_ours else ():
        if optimizer._lacks(parameter, low):
            parameter._gm_low = low
    for parameter, state in optimizer.state.items():
        low = state.get("remainder")
        is_its = low is not None and parameter.dtype is torch.bfloat16 and low.dtype is torch.int16
        if is_its and low.shape == parameter.shape:
            if is_ours:
                optimizer._look(parameter, low)
            if hasattr(parameter, "_gm_seen"):  # else its weight may come yet
                low.copy_(settled_low(parameter, low))
                note_seen(parameter)
                if is_ours:
                    optimizer._gm_lows[parameter] = low, low._version


def install(engine: Runtime, optimizer: torch.optim.Optimizer) -> None:
    """Moves the optimizer's state into the engine and swaps its class."""
    opaque = engine.opaque
    if isinstance(optimizer, Several):
        for part in optimizer.parts:
            install(engine, part)
        optimizer.state = OpaqueStates(opaque, engine.slot_of_states)
        return
    states: Any = States(engine, {})
    if opaque is not None:
        states = OpaqueStates(opaque.of(optimizer), engine.slot_of_states)
    for parameter, state in optimizer.state.items():
        slot = engine.slot_of(parameter)
        if not slot.has_moments:  # a frozen parameter's stays as it is
            states[parameter] = state
        elif opaque is not None:
            opaque.of(optimizer).move_in(slot, state)
        elif "exp_avg" in state:
            states[parameter].assign(_with_true_low(slot, state), is_copied=True)
    for slot in engine.slots:
        slot.is_whole = slot.is_settled = False
    del optimizer.__dict__["state"]
    if isinstance(optimizer, HybridAdam):
        optimizer._gm_lows = type(optimizer._gm_lows)()
    optimizer._gm_state = states
    optimizer._gm_engine = engine
    _swap_class(optimizer, _managed_class(type(optimizer)))


def _with_true_low(slot: Slot, state: dict[str, Any]) -> dict[str, Any]:
    """A state loaded before manage() may have what 16-bit weights lack; one that trained on in fp32 since, no more."""
    low = state.get("remainder")
    if not slot.has_low or slot.original_dtype is slot.dtype or not {*LOWS} & {*state}:
        return state
    if slot.lack()[2]:  # weights that lack something have not come from 16 bits
        return {key: value for key, value in state.items() if key not in LOWS}
    return state if low is None else {**state, "remainder": low.to(torch.int16)}


def moment_bytes(slot: Slot) -> int:
    """Of both moments of a parameter, all ranks' parts together; or of the states that an optimizer of its own has."""
    if slot.engine.opaque is not None:
        return int(slot.engine.opaque.state_bytes(slot))
    return len(MOMENTS) * math.prod(slot.shape) * torch.float32.itemsize


def releasing(
    engine: Runtime, is_fp32: bool, with_states: bool, done: Done = nothing
) -> Callable[[], None]:
    """What gives the optimizer its class and state back; until it is called nothing has changed.

    `done` is told the bytes of the moments. The state is on the host until `send_states`: the engine still has its
    memory on the device.
    """
    optimizer = engine.optimizer
    if optimizer is None:
        return lambda: None
    is_ours = isinstance(optimizer, HybridAdam)
    states: dict[nn.Parameter, dict[str, Any]] = {}
    slots = {slot.parameter: slot for slot in engine.slots}
    lows: dict[nn.Parameter, torch.Tensor] = {}
    twins: dict[int, torch.Tensor] = {}
    for slot in engine.opaque.slots() if engine.opaque is not None and with_states else ():
        states[slot.parameter] = engine.opaque.read(slot, twins)
        done(moment_bytes(slot))
    for slot in engine.slots if engine.opaque is None else ():
        parameter = slot.parameter
        is_whole = is_fp32 or slot.outer_dtype is torch.float32  # its master is given back
        gives_low = is_ours and slot.has_low and not is_whole
        if gives_low and not slot.has_state:
            lows[parameter] = slot.lack()[1]
        if with_states and slot.has_state:
            state = states[parameter] = saved_entry(
                slot, optimizer.state[parameter], gives_low, None
            )
            dtype = torch.float32 if is_ours or is_whole else slot.dtype
            state |= {key: state[key].to(dtype) for key in ("exp_avg", "exp_avg_sq")}
            done(moment_bytes(slot))

    def release() -> None:
        for parameter, low in lows.items():
            parameter._gm_low = low
        order = {id(p): i for i, p in enumerate(optimizer.state)}
        let_go(optimizer)
        for part in parts_of(optimizer):
            mine = sorted(states.items(), key=lambda item: order[id(item[0])])
            if isinstance(optimizer, Several):
                own = engine.opaque.of(part)
                mine = [item for item in mine if engine.opaque.owner(slots[item[0]]) is own]
            part.state.update(mine)

    return release


def send_states(
    optimizer: torch.optim.Optimizer, slots: Iterable[Slot], opaque: OpaqueOptimizer | None
) -> None:
    """What `releasing` has given back follows the parameters to their devices; what has no room stays on the host."""
    slots = list(slots)
    twins: dict[int, torch.Tensor] = {}
    try:
        for slot in slots:
            parameter = slot.parameter
            if opaque is not None:
                for part in parts_of(optimizer):
                    entry = part.state.get(parameter)
                    if entry:
                        device = slot.original_device
                        part.state[parameter] = opaque.sent(slot, entry, device, twins)
                continue
            entry = optimizer.state.get(parameter, {})
            for key, value in entry.items():
                if key != "step":
                    optimizer.state[parameter][key] = value.to(slot.original_device)
            if hasattr(parameter, "_gm_low"):
                parameter._gm_low = parameter._gm_low.to(slot.original_device)
    except torch.OutOfMemoryError as error:
        text = f"the optimizer's states from {slot.name} on stay on the host: {error}"
        warnings.warn(text, RuntimeWarning, stacklevel=5)
    for parameter in (slot.parameter for slot in slots if opaque is None):
        if hasattr(parameter, "_gm_low") or "remainder" in optimizer.state.get(parameter, {}):
            note_seen(parameter)
    if isinstance(optimizer, HybridAdam):
        optimizer._note_lows()


def let_go(optimizer: torch.optim.Optimizer) -> None:
    """Gives the optimizer its class back; what the engine has of its state stays there."""
    if isinstance(optimizer, Several):
        for part in optimizer.parts:
            let_go(part)
        return
    kind = type(optimizer)
    rest = optimizer._gm_state.rest()
    if optimizer._gm_engine.opaque is not None:
        optimizer._gm_engine.opaque.of(optimizer).release()
    del optimizer._gm_engine, optimizer._gm_state
    _swap_class(optimizer, _plain_class(optimizer))
    optimizer.state = defaultdict(dict, rest)
    if kind.__module__ != __name__:
        name = kind.__name__
        text = (
            f"the optimizer's class became {name} while it was managed: set it again after close()"
        )
        warnings.warn(text, RuntimeWarning, stacklevel=7)
