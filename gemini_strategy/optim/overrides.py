"""bitsandbytes' settings of single parameters, which its optimizers look up by a parameter's place in its group.

Where some parameters are stepped, or what stands for them, places are others. So each of these parameters has its own
settings with it, and for the time of a step the one manager of the process has those of what is stepped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch.optim import Optimizer

Settings = Mapping[str, Any]
_TABLES = ("index2config", "pid2config", "module_weight_config_triple")


def is_manager(value: Any) -> bool:
    """Whether it is bitsandbytes' GlobalOptimManager, which has settings and modules of all optimizers."""
    return all(name in getattr(value, "__dict__", ()) for name in _TABLES)


def settings_of(optimizer: Optimizer) -> dict[int, Settings]:
    """Of the parameters that have some, by their id(): as the optimizer's own step would find them."""
    manager = vars(optimizer).get("mng")
    if not is_manager(manager):
        return {}
    found: dict[int, Settings] = {}
    own = {
        id(getattr(module, name)): its for module, name, its in manager.module_weight_config_triple
    }
    for number, group in enumerate(optimizer.param_groups):
        for index, p in enumerate(group["params"]):
            by_place = manager.index2config.get((number, index), {})
            its = {**by_place, **manager.pid2config.get(id(p), {}), **own.get(id(p), {})}
            if its:
                found[id(p)] = its
    return found


@contextlib.contextmanager
def placed(stepped: Optimizer) -> Iterator[None]:
    """Inside, its parameters have the settings that are with them."""
    manager = vars(stepped).get("mng")
    if not is_manager(manager):
        yield
        return
    kept = {name: getattr(manager, name) for name in _TABLES}
    places = {
        (number, index): getattr(p, "_gm_settings", {})
        for number, group in enumerate(stepped.param_groups)
        for index, p in enumerate(group["params"])
    }
    manager.__dict__.update(zip(_TABLES, (places, {}, []), strict=True))
    try:
        yield
    finally:
        manager.__dict__.update(kept)
