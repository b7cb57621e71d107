"""What the layer under Hugging Face's libraries gives to `manage()`: one plugin per program, or per Accelerator."""

from __future__ import annotations

import inspect
import os
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gemini_strategy.arguments import Arguments, check_management
from gemini_strategy.inherited import told
from gemini_strategy.precision import LossScaler
from gemini_strategy.ranks.comm import DEFAULT_TIMEOUT

# What check_management() wants beside; accelerate's GradScalerKwargs say how an fp16 loss is scaled.
_ELSEWHERE = {
    **{name: p.default for name, p in inspect.signature(LossScaler).parameters.items()},
    "force_outputs_fp32": False,
    "weights": None,
    "missing": "refuse",
}


@dataclass(frozen=True, kw_only=True)
class GeminiPlugin:
    """The budgets and the policy of the models that an Accelerator or a Trainer trains.

    Device, precision and ranks are accelerate's: where it computes, its `mixed_precision` and its processes.

    Args:
        device_budget, host_budget, placement_policy, chunk_size, block_size, chunk_search_range,
            chunk_search_n_grids, min_chunk_size, gpu_margin_mem_ratio, gradient_dtype, threads, report,
            enable_distributed_storage, timeout: as in `gemini_strategy.manage`. Budgets are of each model.

    Raises:
        ValueError: a value out of its range.
    """

    device_budget: int | float | str | None = None
    host_budget: int | float | str | None = None
    placement_policy: str = "auto"
    chunk_size: int | str | None = None
    block_size: int | str | None = None
    chunk_search_range: int | str | None = None
    chunk_search_n_grids: int | None = None
    min_chunk_size: int | str | None = None
    gpu_margin_mem_ratio: float | None = None
    gradient_dtype: torch.dtype | None = None
    threads: int | None = None
    report: bool | None = None
    enable_distributed_storage: bool = True
    timeout: float = DEFAULT_TIMEOUT

    def __post_init__(self) -> None:
        given = {**_ELSEWHERE, **asdict(self)}
        check_management("GeminiPlugin", given)
        Arguments("GeminiPlugin", given).check_number("timeout", 0, None, is_exclusive=True)

    def arguments(self) -> dict[str, Any]:
        """Those of manage()."""
        return asdict(self)


_current: GeminiPlugin | None = None


def use(plugin: GeminiPlugin | None) -> None:
    """Makes it the plugin of every Accelerator and Trainer that is given none; None: what the environment says."""
    global _current
    _current = plugin


def current() -> GeminiPlugin:
    """The plugin of who is given none: what `use` was given, else what the run was told that this process comes of,
    else one with GEMINI_DEVICE_BUDGET, if that is set."""
    if _current is not None:
        return _current
    budget = os.environ.get("GEMINI_DEVICE_BUDGET") or None
    return GeminiPlugin(**told().get("plugin", {"device_budget": budget}))
