# Callbacks that keep an average of the weights: they work on the fp32 masters, and their average is on the host.
#
# `StochasticWeightAveraging`, `WeightAveraging` and what derives from them copy the module before it is managed, and
# read and write its parameters in some of their hooks. Around those hooks the engine shows masters in the place of
# weights (parameters/masters.py), so the arithmetic is the callback's own. Nothing here imports Lightning.
#
# Invariants
#   1. A callback is of its own class again after a stage, and is copied and pickled as of that class at any time.
#   2. An average is as precise as the masters that go into it and come out of it.

import functools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch

from gemini_strategy.lightning.checkpoints import InFolder

# The hooks in which such callbacks reach the module's parameters.
_HOOKS = (
    "on_train_batch_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_end",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
)
_HOST = torch.device("cpu")


def put_over_masters(callbacks: Iterable[Any], kinds: tuple[type, ...]) -> None:
    """For one stage: those of `callbacks` that are of `kinds` average masters."""
    for callback in callbacks:
        if isinstance(callback, kinds) and not isinstance(callback, _OverMasters):
            callback.__class__ = _class_over_masters(type(callback))


def take_from_masters(callbacks: Iterable[Any]) -> None:
    """The stage has ended: the callbacks are of their own classes again."""
    for callback in callbacks:
        if isinstance(callback, _OverMasters):
            callback.__class__ = type(callback).__mro__[2]


class _OverMasters:
    """What comes before the callback's own class."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        device, self._device = self._device, self._device or _HOST  # where the average goes
        try:
            super().setup(trainer, pl_module, stage)  # type: ignore[misc]
        finally:
            self._device = device
        average = getattr(self, "_average_model", None)
        for parameter in () if average is None else average.parameters():
            if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
                parameter.data = parameter.data.float()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        state = checkpoint.get("current_model_state")
        if isinstance(state, InFolder):  # read when there is an engine
            trainer.strategy.load_model_state_dict({"state_dict": state})
            checkpoint = {**checkpoint, "current_model_state": pl_module.state_dict()}
        super().on_load_checkpoint(trainer, pl_module, checkpoint)  # type: ignore[misc]

    def __reduce__(self) -> Any:
        return object.__new__, (type(self).__mro__[2],), self.__getstate__()  # type: ignore[attr-defined]


@functools.cache
def _class_over_masters(plain: type) -> type:
    names: dict[str, Any] = {hook: _over_masters(getattr(plain, hook)) for hook in _HOOKS}
    # Checkpoints have a callback's state under its class's name.
    names |= {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
    return type(plain.__name__, (_OverMasters, plain), names)


def _over_masters(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def method(self: Any, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> Any:
        engine = trainer.strategy.engine
        with nullcontext() if engine is None else engine.masters():
            return hook(self, trainer, pl_module, *args, **kwargs)

    return method
