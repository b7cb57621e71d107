"""What a plan's step waits for, in words; for tables and estimates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WORDS = {
    "compute": "compute on the device",
    "h2d": "copies to the device",
    "d2h": "copies to the host",
    "host": "Adam on the host",
    "comm": "collectives between ranks",
}
_SEVERAL = ("h2d", "d2h", "comm")  # whose words are a plural
_ADVICE = {
    "compute": "more memory buys little; fewer recomputed activations or faster kernels would help",
    "h2d": "a larger device_budget (fewer weights and states pass), or more tokens in a step",
    "d2h": "a larger device_budget (fewer weights and states pass), or more tokens in a step",
    "host": "a larger device_budget (fewer updates on the host), more cores, or more tokens in a step",
    "comm": "fewer and larger steps, or a larger device_budget (more gathered weights are kept)",
    "device_adam": "more tokens in a step",
}
_MIXED = "a larger device_budget (less is copied and updated while compute waits), or more tokens in a step"
_FREE = 0.05  # of a step over compute: less is no reason to change anything
MANY = 9.0  # of what was planned, beyond it: from here on percent are hard to read


@dataclass(frozen=True)
class Verdict:
    """What binds.

    Attributes:
        resource: "compute", "h2d", "d2h", "host" or "comm": the one that a step uses longest.
        seconds: of it in a step.
        over_compute: how much longer than compute alone the step is, as a share of compute.
        moves: whether anything is copied, updated on the host or summed over ranks.
    """

    resource: str
    seconds: float
    over_compute: float
    moves: bool = True

    @property
    def is_compute(self) -> bool:
        """Nothing that could be given would make the step shorter by much."""
        return self.over_compute <= _FREE or not self.moves

    @property
    def is_mixed(self) -> bool:
        """Compute takes longest, and yet some of the rest is not under it."""
        return self.resource == "compute" and not self.is_compute

    @property
    def advice(self) -> str:
        """What would make the step shorter."""
        return _MIXED if self.is_mixed else _ADVICE[self.resource]

    @property
    def words(self) -> str:
        return WORDS[self.resource]

    @property
    def binds(self) -> str:
        """The words with their verb."""
        return f"{self.words} {'bind' if self.resource in _SEVERAL else 'binds'}"


def verdict(plan: Mapping[str, Any]) -> Verdict:
    """Of a plan, as `Core.plan_info` gives it."""
    resource = max(WORDS, key=lambda name: plan.get(f"{name}_seconds", 0.0))
    compute = plan["compute_seconds"]
    over = plan["step_seconds"] / compute - 1.0 if compute > 0 else 0.0
    if over <= _FREE:
        resource = "compute"
    moves = any(plan.get(f"{name}_seconds", 0.0) > 0 for name in WORDS if name != "compute")
    return Verdict(resource, plan[f"{resource}_seconds"], over, moves)


def advice_for(resource: str) -> str:
    """What would make a step shorter that waits for it: of WORDS, or "device_adam"."""
    return _ADVICE[resource]


def sentence(plan: Mapping[str, Any]) -> str:
    """What binds, by how much, and what would help."""
    found = verdict(plan)
    if found.is_compute:
        return f"compute binds: {found.advice}"
    over = f"the step is {100 * found.over_compute:.0f} % longer than compute alone"
    if found.over_compute >= MANY:
        over = f"the step takes {found.over_compute + 1:,.0f} times as long as compute alone"
    if found.is_mixed:
        return f"nothing takes longer than compute, but {over}; what helps: {found.advice}"
    return f"{found.binds}, {over}; what helps: {found.advice}"
