"""The arguments of manage(), checked: what an engine is made of besides a model and an optimizer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gemini_strategy import _C
from gemini_strategy.loading import Weights
from gemini_strategy.precision import Precision
from gemini_strategy.sizes import ChunkSizes

__all__ = ["POLICIES", "Settings"]

POLICIES = _C.POLICIES


@dataclass(frozen=True)
class Settings:
    """In bytes (-1: no limit)."""

    device: torch.device
    precision: Precision
    policy: str
    device_budget: int
    host_budget: int
    sizes: ChunkSizes
    is_grad_f32: bool
    margin: float | None
    convert_inputs: bool
    force_outputs_fp32: bool
    threads: int
    rates: tuple[float, ...]
    is_tuned: bool
    report: bool | None
    weights: Weights | None
    missing: str
