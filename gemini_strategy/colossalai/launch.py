"""`launch_from_torch`: the process group of torchrun, the seed, and the configuration that `initialize` reads."""

from __future__ import annotations

import logging
import os
import random
import runpy
from collections.abc import Mapping
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from gemini_strategy.arguments import Arguments
from gemini_strategy.wrapper import group_size, is_first_rank

_log = logging.getLogger("gemini_strategy")
_TIMEOUT = timedelta(seconds=300)
# Keys with a meaning that nothing here has: (why, the way out).
_REFUSED = {
    "torch_ddp": "the engine averages gradients over the ranks itself; leave it out",
    "gradient_handler": "the engine averages gradients over the ranks itself; leave it out",
    "sync_batchnorm": "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before initialize() does that",
}


class AMP_TYPE(Enum):  # noqa: N801 (the original's name)
    """For fp16=dict(mode=...): there is one way to train in fp16, and all of them mean it."""

    APEX = "apex"
    TORCH = "torch"
    NAIVE = "naive"


class Config(dict[str, Any]):
    """A configuration, whose keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the configuration has no {name!r}") from None


class _Context:
    """What launch_from_torch has found; `global_context` is the one of this process."""

    def __init__(self) -> None:
        self.config = Config()


global_context = _Context()


def get_current_device() -> torch.device:
    """Where this process computes: its CUDA device if there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def launch_from_torch(
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    backend: str | None = None,
    seed: int = 1024,
    verbose: bool = True,
) -> None:
    """Joins the ranks that torchrun has started; without torchrun there is this process alone.

    Args:
        config: a dict, or the path of a Python file whose names are the configuration. Keys with a meaning are `zero`,
            `fp16`, `gradient_accumulation` and `clip_grad_norm` (see `initialize`) and `parallel`; others are the
            program's own.
        backend: of torch.distributed; None: "nccl" with CUDA, "gloo" without.
        seed: of torch's and Python's random numbers, on every rank.
        verbose: rank 0 logs what there is, at level INFO of the logger gemini_strategy.

    Raises:
        ValueError: the configuration asks for what is not here, by name.
    """
    Arguments("launch_from_torch", locals()).check_bool("verbose")
    found = Config(_read(config))
    _check(found)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ and not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            backend or ("nccl" if cuda else "gloo"), timeout=_TIMEOUT
        )
    random.seed(seed)
    torch.manual_seed(seed)
    global_context.config = found
    if verbose and is_first_rank():
        _log.info("%d ranks, %s, seed %d", group_size(), get_current_device(), seed)


def _read(config: Any) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return dict(config)
    if isinstance(config, str | os.PathLike):
        if not Path(config).is_file():
            raise ValueError(f"launch_from_torch(config={str(config)!r}): there is no such file")
        names = runpy.run_path(str(config))
        return {name: value for name, value in names.items() if not name.startswith("__")}
    raise ValueError(
        f"launch_from_torch(config={config!r}): give a dict, or the path of a Python file"
    )


def _check(config: Config) -> None:
    for key, reason in _REFUSED.items():
        if config.get(key):
            raise ValueError(f"config: {key}={config[key]!r} is not taken: {reason}.")
    for kind, value in (config.get("parallel") or {}).items():
        size = value.get("size", 1) if isinstance(value, Mapping) else value
        if kind != "data" and size not in (None, 1):
            raise ValueError(
                f"config: parallel=dict({kind}={value!r}) is not taken: a model larger than a GPU "
                f"is trained here by moving chunks, with data parallelism alone: leave {kind}= out, give "
                "initialize(device_budget=...) and start as many ranks as there are GPUs."
            )
