"""The arguments of manage(), checked: what an engine is made of besides a model and an optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gemini_strategy.choices import POLICIES
from gemini_strategy.precision import Precision
from gemini_strategy.sizes import ChunkSizes
from gemini_strategy.weights.loading import Weights

if TYPE_CHECKING:
    from gemini_strategy.parameters.registration import Registration


@dataclass(frozen=True, kw_only=True)
class Settings:
    """In bytes (-1: no limit)."""

    device: torch.device
    precision: Precision
    policy: str
    device_budget: int
    host_budget: int
    host_limit: int = -1  # of homes
    sizes: ChunkSizes
    is_grad_f32: bool
    margin: float | None = None
    convert_inputs: bool
    force_outputs_fp32: bool = False
    threads: int
    rates: tuple[float, ...]
    is_tuned: bool = False
    report: bool | None = None
    weights: Weights | None = None
    missing: str = "refuse"

    def core_arguments(self, registration: Registration, n_shards: int = 1) -> dict[str, Any]:
        """What the core is made of for a model, by the names of its arguments; a run and an estimate begin here.

        Args:
            registration: of the model.
            n_shards: ranks that share a chunk.
        """
        specs = registration.specs()
        kinds = list(dict.fromkeys(spec[1:] for spec in specs))
        shapes = [(spec[0], spec[1], kinds.index(spec[1:])) for spec in specs]
        is_cuda = self.device.type == "cuda"
        chunk_bytes, block_bytes = self.sizes.choose(shapes, self.device_budget, is_cuda, n_shards)
        unit_params, unit_begin = registration.unit_tables()
        return {
            "ordinal": self.device.index if is_cuda else -1,
            "params": [(*s, slot.name) for s, slot in zip(specs, registration.slots, strict=True)],
            "unit_params": unit_params,
            "unit_begin": unit_begin,
            "unit_names": registration.unit_names(),
            "chunk_bytes": chunk_bytes,
            "block_bytes": block_bytes,
            "device_budget": self.device_budget,
            "host_budget": self.host_budget,
            "host_limit": self.host_limit,
            "policy": POLICIES[self.policy],
            "is_grad_f32": self.is_grad_f32,
            "rates": self.rates,
            "state_share": 1.0 if self.margin is None else self.margin,
            "is_tuned": self.is_tuned,
        }
