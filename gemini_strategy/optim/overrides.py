"""What bitsandbytes' optimizers have outside of themselves, for the time of a step over some parameters.

Settings of single parameters it looks up by a parameter's place in its group. Where some parameters are stepped, or
what stands for them, places are others. So each of these parameters has its own settings with it, and for the time of
the step the one manager of the process has those of what is stepped.

Behind each parameter its step() waits for the device (`sync_gpu`), for the sake of states that CUDA pages. Here none
are paged, and a host that waits issues the next copies too late. So for the time of the step its thread does not wait.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
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
        with _waits.left_out(inspect.unwrap(type(stepped).step).__globals__):  # type: ignore[attr-defined]
            yield
    finally:
        manager.__dict__.update(kept)


class _Waits:
    """The function by which the module of optimizers waits; while threads are inside they do not wait, others do."""

    NAME = "sync_gpu"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: list[int] = []
        self._original: Callable[[Any], None] | None = None
        self._names: dict[str, Any] = {}

    def _wait(self, tensor: Any) -> None:
        original = self._original
        if threading.get_ident() not in self._inside and original is not None:
            original(tensor)

    @contextlib.contextmanager
    def left_out(self, names: dict[str, Any]) -> Iterator[None]:
        """`names`: the globals of that module; other modules have no such function."""
        if self.NAME not in names:
            yield
            return
        with self._lock:
            if not self._inside:
                self._names, self._original = names, names[self.NAME]
                names[self.NAME] = self._wait
            self._inside.append(threading.get_ident())
        try:
            yield
        finally:
            with self._lock:
                self._inside.remove(threading.get_ident())
                if not self._inside:
                    self._names[self.NAME] = self._original


_waits = _Waits()
