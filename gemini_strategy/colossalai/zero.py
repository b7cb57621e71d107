"""ZeRO's names: `ZeroInitContext`, and the shard strategies of a configuration."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from gemini_strategy.arguments import Arguments


class TensorShardStrategy:
    """Says that the ranks share parameters: each has 1/N of every chunk. It does nothing by itself."""


class BucketTensorShardStrategy(TensorShardStrategy):
    """The same: a chunk has many parameters in any case."""


class ZeroInitContext:
    """What is built inside comes up without memory, and gets its values in its chunks.

    Parameters are on the meta device, so no rank ever has the whole model. `initialize`, or manage(), makes their
    modules' own initial values, or reads weights from a file, one after the other, straight into the chunks of the rank
    that keeps them.

    Args:
        target_device: where modules are built with shard_param=False; an int is a CUDA device. With shard_param=True
            parameters are nowhere until they are in their chunks, and the engine decides where these are.
        shard_strategy: a TensorShardStrategy.
        seed: of the values that are drawn inside, and of those that `initialize` draws for what was built here.
            Random numbers outside go on as if none were drawn.
        shard_param: False: an ordinary model with values, which the engine shares later.
        default_dtype: torch's default dtype inside; None: as it is.
        model_numel_tensor: gets the number of elements that were built added, at the end.

    Raises:
        ValueError: an argument is not of its kind.
    """

    def __init__(
        self,
        target_device: torch.device | str | int,
        shard_strategy: TensorShardStrategy,
        seed: int = 2**10 - 1,
        shard_param: bool = False,
        default_dtype: torch.dtype | None = None,
        model_numel_tensor: torch.Tensor | None = None,
    ) -> None:
        given = dict(locals())
        arguments = Arguments("ZeroInitContext", given)
        arguments.check_bool("shard_param")
        is_strategy = isinstance(shard_strategy, TensorShardStrategy)
        arguments.check(is_strategy, "shard_strategy", "a TensorShardStrategy()")
        self.target_device = torch.device(target_device)
        self.seed = int(seed)
        self.shard_param = shard_param
        self.default_dtype = default_dtype
        self.model_numel_tensor = (
            torch.zeros(1, dtype=torch.int) if model_numel_tensor is None else model_numel_tensor
        )
        self._built: list[weakref.ref[nn.Parameter]] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> ZeroInitContext:
        with contextlib.ExitStack() as stack:
            if self.default_dtype is not None:
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self.default_dtype)
            devices = [self.target_device] if self.target_device.type == "cuda" else []
            stack.enter_context(torch.random.fork_rng(devices))
            torch.manual_seed(self.seed)
            stack.callback(register_module_parameter_registration_hook(self._note).remove)
            stack.enter_context(torch.device("meta" if self.shard_param else self.target_device))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()
        own = {id(p): p for built in self._built if (p := built()) is not None}
        self._built = []
        for parameter in own.values():
            parameter._gm_init_seed = self.seed  # type: ignore[attr-defined]
        self.model_numel_tensor += sum(parameter.numel() for parameter in own.values())

    def _note(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            self._built.append(weakref.ref(parameter))  # one that is tied away is none


def init_seed(model: nn.Module) -> int | None:
    """The seed of the context in which the model was built and left without values; None: there was none."""
    seeds = (getattr(p, "_gm_init_seed", None) for p in model.parameters() if p.is_meta)
    return next(seeds, None)
