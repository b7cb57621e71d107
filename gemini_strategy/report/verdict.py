"""What a plan's step waits for, in words; for tables and estimates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Verdict", "verdict"]

_RESOURCES = {
    "compute": "compute on the device",
    "h2d": "copies to the device",
    "d2h": "copies to the host",
    "host": "Adam on the host",
    "comm": "collectives between ranks",
}
_FREE = 0.05  # of a step over compute: less is no reason to change anything


@dataclass(frozen=True)
class Verdict:
    """What binds.

    Attributes:
        resource: "compute", "h2d", "d2h", "host" or "comm": the one that a step uses longest.
        seconds: of it in a step.
        over_compute: how much longer than compute alone the step is, as a share of compute.
    """

    resource: str
    seconds: float
    over_compute: float

    @property
    def is_compute(self) -> bool:
        """Nothing that could be given would make the step shorter by much."""
        return self.over_compute <= _FREE

    @property
    def words(self) -> str:
        return _RESOURCES[self.resource]


def verdict(plan: Mapping[str, Any]) -> Verdict:
    """Of a plan, as `Core.plan_info` gives it."""
    resource = max(_RESOURCES, key=lambda name: plan[f"{name}_seconds"])
    compute = plan["compute_seconds"]
    over = plan["step_seconds"] / compute - 1.0 if compute > 0 else 0.0
    if over <= _FREE:
        resource = "compute"
    return Verdict(resource, plan[f"{resource}_seconds"], over)
