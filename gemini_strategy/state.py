"""Model state in and out: what `model.state_dict()` and `load_state_dict()` do on a managed model."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini_strategy.errors import GuardError
from gemini_strategy.parameters import absent, leaving, quantized, stand_in
from gemini_strategy.parameters.homes import Entry, Whole
from gemini_strategy.parameters.slot import Slot
from gemini_strategy.roots import roots

if TYPE_CHECKING:
    from gemini_strategy.runtime import Runtime


def install(engine: Runtime, model: nn.Module) -> list[Any]:
    """Hooks every module that owns parameters; returns the handles."""
    leaving.install(model)
    owners = [m for m in model.modules() if any(p is not None for p in m._parameters.values())]
    saves = [m._register_state_dict_hook(_SaveHook(engine)) for m in owners]
    loads = [
        m._register_load_state_dict_pre_hook(_LoadHook(engine), with_module=True) for m in owners
    ]
    return saves + loads


def model_state_dict(
    engine: Runtime,
    masters: bool,
    root: int | None,
    for_file: bool = False,
    module: nn.Module | None = None,
) -> dict[str, Any]:
    """See Engine.model_state_dict; root: the rank that gets it, the others get nothing; None: all.

    `for_file`: masters come as stand_in.master gives them. `module`: one of several models.
    """
    copies: dict[int, torch.Tensor] = {}
    result = (engine.model if module is None else module).state_dict(keep_vars=True)
    is_mine = root is None or root == engine.ranks.rank
    for key, value in result.items():
        slot = getattr(value, "_gm_slot", None)
        if slot is not None:
            if slot.id not in copies:
                if for_file:
                    values = stand_in.master(slot, root)
                else:
                    values = slot.read_master(root) if masters else slot.read_weight(root)
                copies[slot.id] = values if is_mine else value
            result[key] = copies[slot.id]
        elif isinstance(value, torch.Tensor) and is_mine and quantized.is_wrapper(value):
            result[key] = value.detach().clone().to("cpu")  # not every class can do both at once
        elif isinstance(value, torch.Tensor) and is_mine:
            result[key] = value.detach().to("cpu", copy=True)
    return result if is_mine else {}


def masters_of(
    engine: Runtime, module: nn.Module, root: int | None, for_file: bool = False
) -> dict[str, Any]:
    """What `module.state_dict()` has, with the fp32 masters of managed parameters, on the CPU.

    The engine manages the module, or more than it, which may have its own idea of what is saved: keys and shapes are
    the module's. root, for_file: as for model_state_dict.
    """
    is_root = module in (engine.model, *roots(engine.model))
    if is_root and type(module).state_dict is nn.Module.state_dict:
        return model_state_dict(engine, True, root, for_file, module)
    state = dict(module.state_dict())
    read = stand_in.master if for_file else Slot.read_master
    masters: dict[nn.Parameter, torch.Tensor] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        value, slot = state.get(name), getattr(parameter, "_gm_slot", None)
        if slot is None or not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
            continue
        if parameter not in masters:
            masters[parameter] = read(slot, root)
        state[name] = masters[parameter]
    return state if root is None or root == engine.ranks.rank else {}


class _StateHook(leaving.Attached):
    """A state-dict hook that copies as nothing: a deep copy of a managed model is unmanaged."""

    def __init__(self, engine: Runtime | None) -> None:
        self.engine = engine

    def __deepcopy__(self, memo: dict[int, Any]) -> _StateHook:
        return type(self)(None)

    def __reduce__(self) -> Any:
        return type(self), (None,)


class _SaveHook(_StateHook):
    """Replaces the absent entries of one module's state by entries on the host; tied ones share one."""

    def __call__(self, module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        for name, parameter in module._parameters.items():
            value = state.get(prefix + name)
            slot = getattr(parameter, "_gm_slot", None)
            if slot is None or value is parameter or not absent.is_absent(value):
                continue
            entry = slot.saved() if slot.saved is not None else None
            if entry is None or not any(other is entry for other in state.values()):
                # The first of its names in this state.
                home = _entry(slot)
                memory = home.memory
                geometry = memory.shape, memory.stride(), memory.dtype, memory.device
                entry = absent.tensor(home, *geometry)
                slot.saved = weakref.ref(entry)
            state[prefix + name] = entry


def _entry(slot: Slot) -> Entry:
    """In the dtype in which the weight leaves the engine, or that the parameter shows (masters.py)."""
    dtype = slot.absent.dtype if slot.shows_master else slot.outer_dtype
    return Entry(slot, "weight", slot.read_weight()) if dtype is slot.dtype else Whole(slot, dtype)


class _LoadHook(_StateHook):
    """Loads fp32 values into masters exactly, before torch copies the rounded weights."""

    def __call__(
        self, module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *rest: Any
    ) -> None:
        if self.engine is None:
            return
        for name, parameter in module._parameters.items():
            value = state.get(prefix + name)
            slot = getattr(parameter, "_gm_slot", None)
            if slot is None or not isinstance(value, torch.Tensor):
                continue
            if metadata.get("assign_to_params_buffers", False):
                raise GuardError(
                    f"{slot.name}: load_state_dict(assign=True) would replace a managed parameter; use "
                    "assign=False, or load before manage()"
                )
            home = absent.home_of(value) if absent.is_absent(value) else None
            if isinstance(home, Entry) and home.is_of(slot, "weight") and home.is_whole(value):
                home.open(False)  # unless it ended, it shows what the weight is
                state[prefix + name] = parameter
            elif slot.shows_master:
                pass  # torch copies into it
            elif slot.has_low and value.is_floating_point() and tuple(value.shape) == slot.shape:
                state[prefix + name] = slot.load_weight(value)
            else:
                self.engine.written.note(slot, "loaded weight", value)
