"""Why a step is longer than its compute, and what would make it shorter: the same forecast with one thing changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gemini_strategy import _C

if TYPE_CHECKING:
    from gemini_strategy.estimates.forecast import Forecaster, Schedule
    from gemini_strategy.settings import Settings

_MORE_DEVICE = 4 * 10**9
_MORE_HOST = 16 * 10**9
_AT_ONCE = 1e4  # times the rate: it takes no time any more
_SHARE = 0.01  # of a step: what is less is not said


@dataclass(frozen=True)
class Part:
    """What makes a step longer than its compute.

    Attributes:
        what: in words, a plural.
        seconds: of a step.
    """

    what: str
    seconds: float


@dataclass(frozen=True)
class Gain:
    """What one thing more would make of the steps.

    Attributes:
        of: "device memory", "host memory" or "tokens".
        more: how much more, in words.
        seconds: of a step of each schedule that changes, by the schedule's `when`.
        tokens_per_s: the same; NaN where the inputs have no tokens.
    """

    of: str
    more: str
    seconds: dict[str, float]
    tokens_per_s: dict[str, float]


def _faster(settings: Settings, *begins: str) -> Settings:
    """The same where what these rates are of takes no time."""
    rates = (
        rate * _AT_ONCE if name.startswith(begins) else rate
        for name, rate in zip(_C.RATES, settings.rates, strict=True)
    )
    return replace(settings, rates=tuple(rates))


def parts(
    forecaster: Forecaster, settings: Settings, schedules: Sequence[Schedule]
) -> dict[str, tuple[Part, ...]]:
    """Of each schedule by its `when`: what it would save, one after the other, if updates did not wait for the norm,
    if updates on the host took no time, and if copies took none. What is left is the compute, and now and then a rest.
    """
    best = min(schedules, key=lambda schedule: schedule.seconds)
    at = best.seconds

    def saved(*begins: str) -> float:
        nonlocal at
        then = forecaster.try_budget(_faster(settings, *begins), best.when)
        if isinstance(then, str) or then.plan is None:
            return 0.0
        seconds = max(then.plan["step_seconds"], best.plan["compute_seconds"])
        at, before = min(at, seconds), at
        return before - at

    host = Part("updates on the host", saved("host_adam"))
    copies = Part("copies", saved("host_adam", "h2d", "d2h"))
    others = (host, copies, Part("collectives", at - best.plan["compute_seconds"]))
    if best.plan["comm_seconds"] == 0:
        others = others[:2]
    found = {}
    for schedule in schedules:
        waiting = Part("updates that wait for the norm", 0.0)
        if best.when == "immediate":
            waiting = replace(waiting, seconds=schedule.seconds - best.seconds)
        all_of_it = (waiting, *others)
        found[schedule.when] = tuple(
            part for part in all_of_it if part.seconds > _SHARE * schedule.seconds
        )
    return found


def gains(
    forecaster: Forecaster, settings: Settings, host_bytes: int, now: Sequence[Schedule]
) -> list[Gain]:
    """What the next memory buys, and twice the tokens in a step."""
    clipped = (now[0], forecaster.whens[0])  # with more of the host there may be spares
    ends = [clipped, *((one, one.when) for one in now[1:] if one.when == "immediate")]
    found: list[Gain] = []

    def add(of: str, more: str, by: Forecaster, then: Settings, of_steps: Sequence[Any]) -> None:
        seconds, rates = {}, {}
        for old, when in of_steps:
            new = by.schedule(then, when) or old
            # With more memory the old plan would do, too.
            best = old if of != "tokens" and new.seconds > old.seconds else new
            seconds[old.when], rates[old.when] = best.seconds, best.tokens_per_s
        found.append(Gain(of, more, seconds, rates))

    if settings.device_budget >= 0:
        more = replace(settings, device_budget=settings.device_budget + _MORE_DEVICE)
        add("device memory", f"{_MORE_DEVICE // 10**9} GB more", forecaster, more, ends)
    if settings.policy != "cuda":
        budget = max(settings.host_budget, host_bytes) + _MORE_HOST
        more = replace(settings, host_budget=budget, host_limit=budget)
        add("host memory", f"{_MORE_HOST // 10**9} GB more", forecaster, more, ends[:1])
    if not all(one.verdict.is_compute for one, _ in ends):
        twice = forecaster.with_micro_batches(2 * forecaster.micro_batches)
        words = f"{twice.micro_batches} such micro-batches in a step"
        add("tokens", words, twice, settings, ends)
    return found
