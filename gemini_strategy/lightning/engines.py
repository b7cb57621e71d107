# What the strategies of a Trainer and of Fabric do alike around gemini_strategy.manage().

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import gemini_strategy as gs
from gemini_strategy import state
from gemini_strategy.optim.state_dicts import state_dict as optimizer_state_dict
from gemini_strategy.weights.initial_values import silent_modules


def engines_of_parts(module: nn.Module) -> list[Any]:
    """Every engine that manages `module`, a part of it, or more than it."""
    found = dict.fromkeys(map(gs.engine_of, module.modules()))
    return [engine for engine in found if engine is not None]


def engine_of_optimizer(optimizer: Optimizer) -> Any:
    """The open engine that has taken an optimizer over, or None."""
    runtime = getattr(optimizer, "_gm_engine", None)
    return None if runtime is None or runtime.closed else runtime.engine


def states_of(engine: Any, rank0_only: bool, for_file: bool = False) -> dict[str, Any]:
    """The state of the engine's optimizer, as it stands beside `masters_of` in a file."""
    runtime, root = engine._runtime, 0 if rank0_only else None
    return optimizer_state_dict(runtime, engine.optimizer, root, with_lows=False, for_file=for_file)


def masters_of(module: nn.Module, rank0_only: bool, for_file: bool = False) -> dict[str, Any]:
    """What `module.state_dict()` has, with the fp32 masters of managed parameters, on the CPU.

    Args:
        module: a managed model, a part of one, or any other module.
        rank0_only: all ranks call it, but only rank 0 gets the state, the others an empty dict.
        for_file: stand-ins, which are read when they are asked for; False: copies.
    """
    engine = gs.engine_of(module)
    if engine is None:
        return module.state_dict()
    return state.masters_of(engine._runtime, module, 0 if rank0_only else None, for_file)


def materialize(module: nn.Module, warn: Callable[[str], None]) -> None:
    """Give memory on the CPU to what is on the meta device and for which manage() would find no initial values.

    Such modules keep uninitialised memory and are named in a warning: a checkpoint that holds every key makes up for
    it. Tied parameters stay tied.
    """
    silent = silent_modules(module)
    silent_ids = {id(part) for part in silent}
    others = [part for part in module.modules() if id(part) not in silent_ids]
    spoken_for = {id(p) for part in others for p in part._parameters.values()}
    made: dict[int, nn.Parameter] = {}
    named = set()
    for part in silent:
        for name, tensor in part._parameters.items():
            if tensor is None or not tensor.is_meta or id(tensor) in spoken_for:
                continue
            if id(tensor) not in made:
                values = torch.empty_like(tensor, device="cpu")
                made[id(tensor)] = nn.Parameter(values, tensor.requires_grad)
            part._parameters[name] = made[id(tensor)]
            named.add(type(part).__name__)
        for name, tensor in part._buffers.items():
            if tensor is not None and tensor.is_meta:
                part._buffers[name] = torch.empty_like(tensor, device="cpu")
                named.add(type(part).__name__)
    if named:
        warn(
            "These modules were built without memory and have no reset_parameters(), so their parameters and buffers"
            f" are uninitialised unless a checkpoint fills them: {', '.join(sorted(named))}."
        )
