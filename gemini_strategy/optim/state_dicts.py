"""An optimizer's state dict, and the way back: what of it fits is known before anything changes.

Of an optimizer that the engine steps the form is that of torch's Adam. One that steps by itself has its class's own
(opaque_saved.py); several have one each.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from gemini_strategy.optim.moments import check_entry, live_entry, saved_entry
from gemini_strategy.optim.opaque_saved import Loaded, entries_of, packed
from gemini_strategy.optim.several import Several
from gemini_strategy.parameters.homes import MOMENTS
from gemini_strategy.parameters.slot import Slot

if TYPE_CHECKING:
    from gemini_strategy.runtime import Runtime

_SEVERAL = "optimizers"  # of a state dict of several: the state dict of each
_LOWS = "remainders"  # beside "state": see _opaque_state
# Of Adam's those that the engine does not do.
REFUSED_OPTIONS = ("amsgrad", "maximize", "capturable", "differentiable")


def state_dict(
    engine: Runtime,
    optimizer: Any,
    root: int | None = None,
    with_lows: bool = True,
    is_live: bool = False,
    for_file: bool = False,
) -> dict[str, Any]:
    """torch.optim.AdamW's form: indices in group order, moments as fp32 CPU tensors.

    `with_lows`: with what 16-bit weights lack to be their masters, as HybridAdam has it: an int16 "remainder" beside
    bf16, an fp32 "master" beside fp16. torch's optimizers load that, too, and do not look at it.
    Of several ranks `root` alone gets the state, the others an empty dict; None: all get it.
    `for_file`: moments come as stand_in.moments gives them.
    `is_live`: what is written to its tensors is written to the states, unless several ranks have them.
    """
    is_mine = root is None or root == engine.ranks.rank
    if isinstance(optimizer, Several):
        parts = [state_dict(engine, p, root, with_lows, is_live, for_file) for p in optimizer.parts]
        return {_SEVERAL: parts} if is_mine else {}
    for hook in optimizer._optimizer_state_dict_pre_hooks.values():
        hook(optimizer)
    state: dict[int, dict[str, Any]] = {}
    if engine.opaque is not None:
        made = _opaque_state(engine, optimizer, root, with_lows, is_live)
        return _hooked(optimizer, made) if is_mine else {}
    groups = []
    index = 0
    for group in optimizer.param_groups:
        packed = {k: v for k, v in group.items() if k != "params"}
        packed["params"] = list(range(index, index + len(group["params"])))
        groups.append(packed)
        for parameter in group["params"]:
            slot, entry = engine.slot_of(parameter), optimizer.state.get(parameter, {})
            if slot.has_moments:
                saved = saved_entry(slot, entry, with_lows, root, for_file)
                is_alone = engine.ranks.shard.size == 1
                has_more = is_live and slot.has_state and is_alone
                entry = live_entry(slot, saved) if has_more else saved
            if is_mine and entry:
                state[index] = entry
            index += 1
    return _hooked(optimizer, {"state": state, "param_groups": groups}) if is_mine else {}


def _opaque_state(
    engine: Runtime, optimizer: Any, root: int | None, with_lows: bool, is_live: bool
) -> dict[str, Any]:
    """As the optimizer's own class makes it, with its tensors on the host.

    Beside it is what weights lack that leave in 16 bits, by the numbers of their parameters.
    """
    opaque, twins = engine.opaque.of(optimizer), {}
    read = opaque.snapshot if is_live else opaque.read
    entries = {slot.parameter: read(slot, twins, root) for slot in opaque.slots()}
    entries |= optimizer._gm_state.rest()
    grouped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    entries = {p: e for p, e in entries.items() if id(p) in grouped}
    made, lows = packed(optimizer, opaque.kind, entries), {}
    for number, parameter in enumerate(p for g in optimizer.param_groups for p in g["params"]):
        slot = engine.slot_of(parameter)
        if with_lows and slot.has_low and slot.has_moments and slot.outer_dtype is slot.dtype:
            _, low, is_any = slot.lack(root)
            lows |= {number: low} if is_any else {}
    return {**made, **({_LOWS: lows} if lows else {})}


def _hooked(optimizer: Any, result: dict[str, Any]) -> dict[str, Any]:
    """What the user's hooks make of a state dict."""
    for hook in optimizer._optimizer_state_dict_post_hooks.values():
        changed = hook(optimizer, result)
        result = result if changed is None else changed
    return result


def load_state_dict(engine: Runtime, optimizer: Any, state: dict[str, Any]) -> None:
    """Loads groups as torch does, and moments into the engine; parameters without an entry are reset.

    Raises:
        ValueError: groups or shapes do not match; nothing has been changed then.
    """
    prepared(engine, optimizer, state)()


def prepared(engine: Runtime, optimizer: Any, state: Mapping[str, Any]) -> Callable[[], None]:
    """What loads a state dict; until it is called nothing has changed.

    Raises:
        ValueError: as load_state_dict.
    """
    if not isinstance(optimizer, Several):
        return _prepared(engine, optimizer, state)
    return _prepared_several(engine, optimizer, state)


def _prepared_several(
    engine: Runtime, optimizers: Several, state: Mapping[str, Any]
) -> Callable[[], None]:
    states = state.get(_SEVERAL) or ()
    if len(states) != len(optimizers.parts):
        raise ValueError(
            f"this engine has {len(optimizers.parts)} optimizers, and the state dict is of {len(states) or 'one'}: "
            "load what engine.state_dict() gave of as many"
        )
    pairs = zip(optimizers.parts, states, strict=True)
    loads = [_prepared(engine, part, each) for part, each in pairs]

    def load() -> None:
        for each in loads:
            each()

    return load


def _prepared(engine: Runtime, optimizer: Any, given: Mapping[str, Any]) -> Callable[[], None]:
    state = dict(given)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = hook(optimizer, state)
        state = state if changed is None else changed
    if not state.keys() >= {"param_groups", "state"}:
        raise ValueError(f"no optimizer's state_dict(): it has {', '.join(state) or 'nothing'}")
    saved, groups = state["param_groups"], optimizer.param_groups
    if [len(g["params"]) for g in saved] != [len(g["params"]) for g in groups]:
        raise ValueError(
            f"loaded state dict has param groups of {[len(g['params']) for g in saved]} parameters, the "
            f"optimizer of {[len(g['params']) for g in groups]}"
        )
    if engine.opaque is not None:
        return _prepared_opaque(engine, optimizer, state)
    work = []
    for number, (saved_group, group) in enumerate(zip(saved, groups, strict=True)):
        for option in REFUSED_OPTIONS:
            if saved_group.get(option):
                raise ValueError(
                    f"param group {number} of the state dict: {option}=True is not supported"
                )
        for key, parameter in zip(saved_group["params"], group["params"], strict=True):
            slot, entry = engine.slot_of(parameter), state["state"].get(key)
            if slot.has_moments and entry:
                _check_kind(slot, entry)
            check_entry(slot.name, slot.shape, entry or {})
            work.append((parameter, entry))
    options = copy.deepcopy([{k: v for k, v in each.items() if k != "params"} for each in saved])
    entries = {parameter: entry for parameter, entry in work if entry}
    return functools.partial(_load, optimizer, options, entries)


def _load(optimizer: Any, options: list[dict[str, Any]], states: Mapping[Any, Any]) -> None:
    for group, values in zip(optimizer.param_groups, options, strict=True):
        group.update(values)
    optimizer.state.replace(states, is_copied=True)
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        hook(optimizer)


def _check_kind(slot: Slot, entry: Mapping[Any, Any]) -> None:
    """Refuses what another optimizer than Adam has made of a parameter."""
    is_large = any(isinstance(v, torch.Tensor) and v.numel() > 1 for v in entry.values())
    if is_large and not {"step", *MOMENTS} & {*entry}:
        raise ValueError(
            f"{slot.name}: the state dict has {', '.join(map(str, entry))} of it, and Adam's states are step, "
            f"{' and '.join(MOMENTS)}: it is another optimizer's; load it into an optimizer of that class"
        )


def _prepared_opaque(engine: Runtime, optimizer: Any, state: dict[str, Any]) -> Callable[[], None]:
    opaque = engine.opaque.of(optimizer)
    dtypes = {slot.parameter: opaque.dtype(slot) for slot in engine.slots}
    try:
        loaded = Loaded.of(optimizer, opaque.kind, state, dtypes)
    except Exception as error:  # its class may raise anything
        _check_entries(engine, entries_of(optimizer, state))
        name = opaque.kind.__name__
        raise ValueError(
            f"{name}.load_state_dict() raises {type(error).__name__} for this state dict: {error}; the optimizer is as "
            f"it was: load what a {name} has saved"
        ) from error
    _check_entries(engine, loaded.entries)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    lows = {engine.slot_of(parameters[i]): low for i, low in state.get(_LOWS, {}).items()}
    for slot, low in lows.items():
        if tuple(low.shape) != slot.shape:
            raise ValueError(
                f"{slot.name}: what it lacks has shape {tuple(low.shape)} in the state dict"
            )

    def load() -> None:
        for slot, low in lows.items():
            key = "remainder" if slot.dtype is torch.bfloat16 else "master"
            if slot.has_low and low.dtype is slot.dtype_of(key):
                slot.load_low(low)
        vars(optimizer).update(loaded.attributes)
        given = {parameter: entry for parameter, entry in loaded.entries.items() if entry}
        _load(optimizer, loaded.options, {**given, **loaded.others})

    return load


def _check_entries(engine: Runtime, entries: Mapping[Any, Any]) -> None:
    for parameter, entry in entries.items():
        slot = engine.slot_of_states(parameter)
        if slot is not None:
            engine.opaque.check(slot, entry, is_whole=True)
