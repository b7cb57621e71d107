"""Taking over the user's optimizer: same object, same groups, same state_dict form; the engine steps.

The object's class is swapped for a subclass that delegates, so that isinstance checks, LR schedulers
(made before or after), hooks and class names keep working; `release` undoes it.
"""

from __future__ import annotations

import copy
import functools
import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini_strategy.errors import GeminiError
from gemini_strategy.optim import CPUAdam, HybridAdam
from gemini_strategy.slot import Slot, merge, split_low

if TYPE_CHECKING:
    from gemini_strategy.engine import Engine

__all__ = [
    "check",
    "hyperparameters",
    "install",
    "let_go",
    "load_state_dict",
    "mode",
    "release",
    "state_dict",
]

_SUPPORTED = (torch.optim.AdamW, torch.optim.Adam, HybridAdam, CPUAdam)
_REFUSED_OPTIONS = ("amsgrad", "maximize", "capturable", "differentiable")


def check(optimizer: torch.optim.Optimizer, model: nn.Module) -> set[int]:
    """id() of the optimizer's parameters; refuses what the engine cannot do exactly.

    Raises:
        GeminiError: another kind of optimizer, an unsupported option, or parameters that are not the
            model's.
    """
    if isinstance(optimizer, list | tuple):
        raise GeminiError(
            f"got {len(optimizer)} optimizers: one engine has one optimizer; put the parameters into "
            "several groups of one AdamW"
        )
    if type(optimizer) not in _SUPPORTED:
        raise GeminiError(
            f"optimizer {type(optimizer).__name__} is not supported: use torch.optim.AdamW, torch.optim.Adam, "
            "gemini_strategy.HybridAdam or gemini_strategy.CPUAdam"
        )
    names = {id(p): n for n, p in model.named_parameters(remove_duplicate=False)}
    grouped: set[int] = set()
    for number, group in enumerate(optimizer.param_groups):
        for option in _REFUSED_OPTIONS:
            if group.get(option):
                raise GeminiError(
                    f"param group {number}: {option}=True is not supported; build the optimizer without it"
                )
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise GeminiError(
                    f"param group {number} has a parameter of shape {tuple(parameter.shape)} that is not "
                    "the model's: build the optimizer from model.parameters()"
                )
            grouped.add(id(parameter))
    for parameter, entry in optimizer.state.items():
        name = names.get(id(parameter))
        if id(parameter) not in grouped:
            raise GeminiError(
                f"the optimizer has a state for {name or 'a parameter'} of shape {tuple(parameter.shape)}, which "
                "is in none of its groups: build a new optimizer"
            )
        _check_entry(name, tuple(parameter.shape), entry)
    return grouped


def _check_entry(name: str | None, shape: tuple[int, ...], entry: dict[str, Any]) -> None:
    if "exp_avg" not in entry:
        return
    if "step" not in entry or "exp_avg_sq" not in entry:
        raise ValueError(f"{name}: its optimizer state lacks step or exp_avg_sq")
    for moment in ("exp_avg", "exp_avg_sq"):
        if entry[moment].is_meta:
            raise GeminiError(
                f"{name}: its optimizer state is on the meta device: build a new optimizer, or load its state first"
            )
        if tuple(entry[moment].shape) != shape:
            raise ValueError(
                f"{name}: {moment} in the optimizer state has shape {tuple(entry[moment].shape)}, expected "
                f"{shape}"
            )


def hyperparameters(group: dict[str, Any]) -> tuple[float, float, float, float, float]:
    """(lr, beta1, beta2, eps, weight_decay) as they stand now."""
    beta1, beta2 = group["betas"]
    return (
        float(group["lr"]),
        float(beta1),
        float(beta2),
        float(group["eps"]),
        float(group["weight_decay"]),
    )


def mode(group: dict[str, Any]) -> tuple[bool, bool]:
    """(decoupled weight decay, bias correction)."""
    decoupled = group.get("adamw_mode", group.get("decoupled_weight_decay", False))
    return bool(decoupled), bool(group.get("bias_correction", True))


class _Managed:
    """What a taken-over optimizer does instead of its own step."""

    def step(self, closure: Any = None) -> Any:
        return self._gm_engine._step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        engine = self._gm_engine
        engine._check_open()
        slots = [p._gm_slot for g in self.param_groups for p in g["params"]]
        engine.clear_grads(slots, set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, **kwargs: Any) -> Any:
        return self._gm_engine.clip_grad_norm_(max_norm, norm_type, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise GeminiError(
            "add_param_group on a managed optimizer is not supported: parameters get their optimizer "
            "states when the model is managed; engine.close(), add the group, and manage() again"
        )

    def state_dict(self) -> dict[str, Any]:
        return state_dict(self._gm_engine, self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        load_state_dict(self._gm_engine, self, state_dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise GeminiError("a managed optimizer cannot be copied; copy optimizer.state_dict()")

    def __reduce__(self) -> Any:
        raise GeminiError("a managed optimizer cannot be pickled; save optimizer.state_dict()")


class _States(defaultdict[nn.Parameter, dict[str, Any]]):
    """`optimizer.state` of a managed optimizer: the states are the engine's, here is what frozen parameters have.

    True where there are any, wherever: torch.distributed.checkpoint's get_state_dict asks, and makes a first step with
    gradients of zero if not; in a run that has states that would be a step too many.
    """

    def __init__(self, engine: Engine, rest: dict[nn.Parameter, dict[str, Any]]) -> None:
        super().__init__(dict, rest)
        self._engine = weakref.ref(engine)

    def __bool__(self) -> bool:
        engine = self._engine()
        return len(self) > 0 or (engine is not None and any(s.adam_step for s in engine._slots))


@functools.cache
def _managed_class(plain: type) -> type:
    return type(plain.__name__, (_Managed, plain), {"__module__": plain.__module__})


def _rewrap_step(optimizer: torch.optim.Optimizer) -> None:
    """An LR scheduler made earlier has wrapped the old class's step in the instance: wrap the new one.

    The wrapper tells schedulers that a step was taken (their order check), like torch's own.
    """
    if "step" not in optimizer.__dict__:
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
    optimizer.__class__ = target
    optimizer._patch_step_function()
    _rewrap_step(optimizer)


def install(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """Moves the optimizer's state into the engine and swaps its class."""
    for parameter, state in list(optimizer.state.items()):
        slot = engine.slot_of(parameter)
        if slot.has_moments:  # a frozen parameter's state stays where it is
            if "exp_avg" in state:
                _load_entry(slot, state)
            del optimizer.state[parameter]
    optimizer.state = _States(engine, optimizer.state)
    optimizer._gm_engine = engine
    _swap_class(optimizer, _managed_class(type(optimizer)))


def release(
    engine: Engine, optimizer: torch.optim.Optimizer, is_fp32: bool, with_states: bool
) -> None:
    """Gives the optimizer its class and state back; parameters are still managed. All of it, or nothing.

    The state is on the host until `send_states`: the engine still has its memory on the device.
    """
    is_ours = issubclass(type(optimizer).__mro__[2], HybridAdam)
    states: dict[nn.Parameter, dict[str, Any]] = {}
    lows: dict[nn.Parameter, torch.Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            slot = engine.slot_of(parameter)
            if is_ours and slot.has_low and slot.adam_step == 0 and not is_fp32:
                lows[parameter] = split_low(slot.read_weight(), slot.read_master())[1]
            if slot.adam_step == 0 or not slot.has_moments or not with_states:
                continue
            m, v = slot.read_moments()
            state: dict[str, Any] = {"step": torch.tensor(float(slot.adam_step))}
            dtype = torch.float32 if is_ours or is_fp32 else slot.dtype
            state["exp_avg"], state["exp_avg_sq"] = m.to(dtype), v.to(dtype)
            if is_ours and slot.has_low and not is_fp32:
                key, state[key] = split_low(slot.read_weight(), slot.read_master())
            states[parameter] = state
    for parameter, low in lows.items():
        parameter._gm_low = low
    optimizer.state.update(states)
    let_go(optimizer)


def send_states(optimizer: torch.optim.Optimizer, slots: Iterable[Slot]) -> None:
    """What `release` has given back follows the parameters to their devices; what has no room stays on the host."""
    try:
        for slot in slots:
            parameter = slot.parameter
            for key, value in optimizer.state.get(parameter, {}).items():
                if key != "step":
                    optimizer.state[parameter][key] = value.to(slot.original_device)
            if hasattr(parameter, "_gm_low"):
                parameter._gm_low = parameter._gm_low.to(slot.original_device)
    except torch.OutOfMemoryError as error:
        text = f"the optimizer's states from {slot.name} on stay on the host: {error}"
        warnings.warn(text, RuntimeWarning, stacklevel=4)


def let_go(optimizer: torch.optim.Optimizer) -> None:
    """Gives the optimizer its class back; what the engine has of its state stays there."""
    del optimizer._gm_engine
    optimizer.state = defaultdict(dict, optimizer.state)
    _swap_class(optimizer, type(optimizer).__mro__[2])


def state_dict(engine: Engine, optimizer: Any, root: int | None = None) -> dict[str, Any]:
    """torch.optim.AdamW's form: indices in group order, moments as fp32 CPU tensors.

    Of several ranks `root` alone gets it, the others an empty dict; None: all get it.
    """
    is_mine = root is None or root == engine.ranks.rank
    for hook in optimizer._optimizer_state_dict_pre_hooks.values():
        hook(optimizer)
    state: dict[int, dict[str, torch.Tensor]] = {}
    groups = []
    index = 0
    for group in optimizer.param_groups:
        packed = {k: v for k, v in group.items() if k != "params"}
        packed["params"] = list(range(index, index + len(group["params"])))
        groups.append(packed)
        for parameter in group["params"]:
            slot = engine.slot_of(parameter)
            if slot.adam_step > 0:
                m, v = slot.read_moments(root)
                step = torch.tensor(float(slot.adam_step))
                if is_mine:
                    state[index] = {"step": step, "exp_avg": m, "exp_avg_sq": v}
            index += 1
    if not is_mine:
        return {}
    result: dict[str, Any] = {"state": state, "param_groups": groups}
    for hook in optimizer._optimizer_state_dict_post_hooks.values():
        changed = hook(optimizer, result)
        result = result if changed is None else changed
    return result


def _load_entry(slot: Slot, entry: dict[str, Any]) -> None:
    slot.write_moments(entry["exp_avg"], entry["exp_avg_sq"], int(entry["step"]))
    low = entry.get("remainder", entry.get("master"))
    if low is not None and slot.has_low:
        slot.write_master(merge(slot.read_weight(), low.cpu()))


def load_state_dict(engine: Engine, optimizer: Any, state: dict[str, Any]) -> None:
    """Loads groups as torch does, and moments into the engine; parameters without an entry are reset.

    Raises:
        ValueError: groups or shapes do not match; nothing has been changed then.
    """
    state = dict(state)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = hook(optimizer, state)
        state = state if changed is None else changed
    saved, groups = state["param_groups"], optimizer.param_groups
    if [len(g["params"]) for g in saved] != [len(g["params"]) for g in groups]:
        raise ValueError(
            f"loaded state dict has param groups of {[len(g['params']) for g in saved]} parameters, the "
            f"optimizer of {[len(g['params']) for g in groups]}"
        )
    work = []
    for number, (saved_group, group) in enumerate(zip(saved, groups, strict=True)):
        for option in _REFUSED_OPTIONS:
            if saved_group.get(option):
                raise ValueError(
                    f"param group {number} of the state dict: {option}=True is not supported"
                )
        for key, parameter in zip(saved_group["params"], group["params"], strict=True):
            slot, entry = engine.slot_of(parameter), state["state"].get(key)
            _check_entry(slot.name, slot.shape, entry or {})
            work.append((slot, entry))
    for saved_group, group in zip(saved, groups, strict=True):
        group.update(copy.deepcopy({k: v for k, v in saved_group.items() if k != "params"}))
    for slot, entry in work:
        if not slot.has_moments:
            continue
        if entry is None or "exp_avg" not in entry:
            zeros = torch.zeros(slot.shape, dtype=torch.float32)
            slot.write_moments(zeros, zeros, 0)
        else:
            _load_entry(slot, entry)
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        hook(optimizer)
