"""Why a forecast and its measurement differ: reasons for each figure that is off by more than a tenth.

Invariants
    1. A reason says how the two are counted and what moves them. It says that something has happened in this run only
       where a figure of the run shows it.
    2. What is not known, or was not planned, has no reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_FAR = 0.1  # of the forecast; for a share, of the step
_LITTLE = 0.01  # of the step: no rate can be told from it


@dataclass(frozen=True)
class Compared:
    """A plan and what came of it.

    Attributes:
        planned, measured: figures by the same keys; those of StepMeter.figures(), and the peaks.
        plan: as `Core.plan_info` gives it.
        is_host_device: compute is on the CPU.
    """

    planned: Mapping[str, float]
    measured: Mapping[str, Any]
    plan: Mapping[str, Any]
    is_host_device: bool

    def ratio(self, key: str) -> float:
        """Measured by planned; 1 where one of them is not known or nothing was planned."""
        was, now = self.planned.get(key), self.measured.get(key)
        if was is None or now is None or math.isnan(was) or math.isnan(now) or not was:
            return 1.0
        return now / was

    def bytes_ratio(self, key: str) -> float:
        """Of a rate over the step: how many times the planned bytes went in a step; 1 where none were planned."""
        return self.ratio(key) * self.ratio("step_seconds") if self.planned.get(key) else 1.0


def is_far(found: Compared, key: str) -> bool:
    """Whether a figure is off by so much that the table gives a reason."""
    if key == "stall_percent":  # a share: points, not percent of percent
        was, now = found.planned.get(key, math.nan), found.measured.get(key, math.nan)
        return abs(now - was) > 100 * _FAR
    return abs(found.ratio(key) - 1.0) > _FAR


def reasons(found: Compared, figures: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """(name, reason) for each of the figures (name, key) that is far off."""
    return [(name, _REASONS[key](found, key)) for name, key in figures if is_far(found, key)]


def _step(found: Compared, key: str) -> str:
    if found.ratio(key) < 1:
        if found.measured[key] < found.plan["compute_seconds"]:
            return "shorter than the compute that the plan counts on, which it has from slower runs of the passes"
        return "compute, copies or updates were faster than when they were measured for the plan"
    causes = []
    breaks = "the plan was left {} times since the beginning, and then steps are served on demand"
    deviations = "{} passes since the beginning were not as traced"
    for count, text in (("plan_breaks", breaks), ("deviations", deviations)):
        if found.measured.get(count, 0):
            causes.append(text.format(found.measured[count]))
    is_enough, adam = bool(causes), "host_adam_seconds"
    if _adds(found, adam):
        causes.append(f"CPU Adam took {100 * (found.ratio(adam) - 1):.0f} % longer")
        is_enough = is_enough or _adds(found, adam, 0.5)
    for rate, where in (("h2d_gb_s", "to"), ("d2h_gb_s", "from")):
        times = found.bytes_ratio(rate)
        if times > 1 + _FAR:
            causes.append(f"{times:.1f} times the planned bytes went {where} the device")
            is_enough = True
    if is_enough:
        return "; ".join(causes)
    text = "it lasts from one step() to the next: data, logging and what else the loop does are in it, and in no plan"
    if found.is_host_device:
        text += "; on the CPU copies and updates take cores from compute"
    return "; besides, ".join([*causes, text])


def _adds(found: Compared, key: str, share: float = _FAR) -> bool:
    """Whether a part of the step took longer by more than this share of what the step took longer."""
    part = found.measured.get(key, math.nan) - found.planned.get(key, math.nan)
    whole = found.measured["step_seconds"] - found.planned["step_seconds"]
    return part > share * whole


def _with_step(found: Compared, key: str) -> str:
    if key == "stall_percent":
        return "as the step: all of it beyond the compute of the plan counts as stall"
    return "as the step"


def _rate(found: Compared, key: str) -> str:
    times = found.bytes_ratio(key)
    if abs(times - 1.0) <= _FAR:
        return f"the planned bytes in a {'longer' if found.ratio('step_seconds') > 1 else 'shorter'} step"
    why = "what was in its place already was not moved"
    if times > 1:
        why = "what the plan did not foresee was moved on demand"
    return f"{times:.2f} times the planned bytes: {why}"


def _host_adam(found: Compared, key: str) -> str:
    if not found.ratio(key):
        return "nothing was updated on the host in the steps that were measured"
    if found.measured[key] < _LITTLE * found.measured.get("step_seconds", 0.0):
        return "Adam took under 1 % of the step: that is mostly calls and threads that wake, and tells no rate"
    share = f"Adam ran at {100 / found.ratio(key):.0f} % of the speed that the plan counts on"
    if found.ratio(key) < 1:
        return f"{share}: less ran beside it"
    return f"{share}: other processes, DataLoader workers and compute on the CPU take cores from it"


def _device_peak(found: Compared, key: str) -> str:
    if found.ratio(key) < 1:
        return "less was held at one time than the plan allows"
    if "total_peak_bytes" in found.measured:
        return "measured is all that the device holds, other processes and torch's memory since the plan included"
    return "it is of all steps: the first one, on demand, or an earlier plan held more"


def _host_peak(found: Compared, key: str) -> str:
    if found.ratio(key) < 1:
        return "the plan adds the model's own memory, which goes as the engine's fills"
    return "all that the process has taken since manage() is in it: activations, data, libraries"


_REASONS: dict[str, Callable[[Compared, str], str]] = {
    "step_seconds": _step,
    "tokens_per_s": _with_step,
    "stall_percent": _with_step,
    "h2d_gb_s": _rate,
    "d2h_gb_s": _rate,
    "host_adam_seconds": _host_adam,
    "device_peak_bytes": _device_peak,
    "host_bytes": lambda *_: "the plan counts the homes that there were when it was made",
    "host_peak_bytes": _host_peak,
}
