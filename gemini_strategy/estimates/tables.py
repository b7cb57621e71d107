"""An estimate as text: what fits where, what binds, and what would help."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from gemini_strategy.report.tables import bytes_text, class_rows, count_text, rank_rows, render
from gemini_strategy.sizes import size_text

if TYPE_CHECKING:
    from gemini_strategy.estimates.forecast import Estimate, Refusal, Schedule

_WHEN = {
    "speculated": "step, clipped",
    "deferred": "step, the clip fires",
    "immediate": "step, backward(step=True)",
}


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _budget(size: int) -> str:
    return "no limit" if size < 0 else bytes_text(size)


def _step(schedule: Schedule, ranks: int) -> str:
    if math.isnan(schedule.tokens_per_s):
        return _seconds(schedule.seconds)
    together = f" on {ranks} ranks together" if ranks > 1 else ""
    return f"{_seconds(schedule.seconds)}, {schedule.tokens_per_s:,.0f} tokens/s{together}"


def _binds(schedule: Schedule) -> str:
    found = schedule.verdict
    if found.is_compute:
        return "compute binds: more memory buys little"
    compute = f"compute alone takes {_seconds(schedule.plan['compute_seconds'])}"
    if found.is_mixed:
        return f"nothing takes longer than compute; {compute}"
    return f"{found.binds} ({_seconds(found.seconds)} in a step); {compute}"


def _refusal_rows(estimate: Estimate, refusal: Refusal) -> list[tuple[str, str]]:
    text = re.sub(r"^(DEVICE|HOST): ", "", refusal.text)
    # Without the run's own way out: that would be enough for steps on demand only.
    reason = re.split(r"[:;] (?:raise|use) ", text)[0]
    rows = [(f"{refusal.what} memory", f"does not fit: {reason}")]
    if refusal.missing is None or refusal.enough is None:
        return [*rows, ("way out", "no budget suffices for this model and these inputs")]
    enough = size_text(refusal.enough, is_wanted=True)
    missing = size_text(refusal.missing, is_wanted=True)
    rows.append(("missing", f"{missing}: {enough} suffice"))
    option = f"{refusal.what}_budget"
    ways = [f"raise {option} to {enough}"]
    if refusal.what == "host" and estimate.settings.host_budget < 0:
        ways = [f"a host with {enough} free for them"]
    if refusal.what == "device" and estimate.pool_bytes:
        ways.append(
            f"or fewer tokens in a micro-batch: torch holds {bytes_text(estimate.pool_bytes)} for activations"
        )
        ways.append("or activation checkpointing, if the model has it off")
    if refusal.what == "host":
        if estimate.settings.policy == "auto":
            ways.append("or raise device_budget: what the host has no room for stays there")
        ways.append(
            "or freeze parameters (LoRA): of trained ones states and gradients are there, too"
        )
    return [*rows, ("way out", "; ".join(ways))]


def _head_rows(estimate: Estimate) -> list[tuple[str, str]]:
    settings, n = estimate.settings, estimate.ranks
    packed = "; quantized ones count as they are stored" if estimate.is_quantized else ""
    each, of_each = (f"{n} x ", " for each rank") if n > 1 else ("", "")
    return [
        (
            "model",
            f"{estimate.model}, {count_text(estimate.parameters)} parameters, {count_text(estimate.trained)} trained, "
            f"{settings.precision.name or 'as built'}{packed}",
        ),
        (
            "machine",
            f"{each}{estimate.machine.name}; device budget {_budget(settings.device_budget)}, host budget "
            f'{_budget(settings.host_budget)}{of_each}, placement_policy "{settings.policy}"',
        ),
    ]


def _together(estimate: Estimate, size: int) -> str:
    """What the ranks of a host have together."""
    n = estimate.ranks
    return f" for each rank, {bytes_text(n * size)} for all {n}" if n > 1 else ""


def _host_peak(estimate: Estimate) -> str:
    spares = f" ({bytes_text(estimate.spare_bytes)} for clipping)" if estimate.spare_bytes else ""
    built = estimate.host_peak_bytes - estimate.spare_bytes + estimate.model_bytes
    return (
        f"{bytes_text(estimate.host_peak_bytes)}{_together(estimate, estimate.host_peak_bytes)}, of it "
        f"{bytes_text(estimate.host_bytes)} pinned{spares}; until manage() is done {bytes_text(built)} if the model is "
        "built on the CPU"
    )


def _clipping(estimate: Estimate) -> list[tuple[str, str]]:
    """What a clipped step gets of the host, and why; where there is something to get."""
    settings, plan = estimate.settings, estimate.schedules[0].plan
    n, of = plan["n_speculated"], sum(plan["n_of_class"].values())
    is_trained = any(schedule.when == "immediate" for schedule in estimate.schedules)
    if not is_trained or plan["n_of_class"]["R"] == of:
        return []
    left = max(settings.host_budget - estimate.host_bytes + estimate.spare_bytes, 0)
    within = f"the {bytes_text(left)} of the host budget beside the homes"
    if settings.host_budget < 0:
        within = "half of what this host has free beside the homes"
    text = f"every update waits for the norm: in {within} no spares would help"
    if n > 0:
        text = f"{n} of {of} chunks are updated in the backward while no clip fires; spares may take {within}"
    elif settings.host_budget < 0 and estimate.machine.host_memory is None:
        text = "every update waits for the norm: without a host budget nothing of an unknown host counts as free"
    return [("clipping", text)]


def _rows(estimate: Estimate) -> list[tuple[str, str]]:
    rows = _head_rows(estimate)
    if estimate.refusals:
        for refusal in estimate.refusals:
            rows += _refusal_rows(estimate, refusal)
        return rows
    first = estimate.schedules[0]
    blocks = estimate.planned_peak_bytes - estimate.pool_bytes - estimate.context_bytes
    peak, planned = (
        bytes_text(n) for n in (estimate.device_peak_bytes, estimate.planned_peak_bytes)
    )
    if peak != planned:
        planned = f"{peak} in the first steps, on demand; then {planned}"
    rows += [
        (
            "device peak",
            f"{planned}: {bytes_text(blocks)} weights, states and gradients, "
            f"{bytes_text(estimate.pool_bytes)} torch (activations {bytes_text(estimate.activation_bytes)}), "
            f"{bytes_text(estimate.context_bytes)} driver",
        ),
        ("host peak", _host_peak(estimate)),
    ]
    if estimate.staying_bytes:
        limit = bytes_text(estimate.settings.host_limit)
        text = f"{bytes_text(estimate.staying_bytes)} stay on the device whole, as {limit} of the host hold the rest"
        rows.append(("without homes", text))
    rows += [
        (
            "host peak, saving",
            f"{bytes_text(estimate.saving_peak_bytes)} with engine.save; "
            f"{bytes_text(estimate.state_dict_peak_bytes)} with a state dict",
        ),
    ]
    for schedule in estimate.schedules:
        name = _WHEN["speculated" if schedule is first else schedule.when]
        rows += [(name, _step(schedule, estimate.ranks)), ("  what binds", _binds(schedule))]
    rows += _clipping(estimate)
    rows += rank_rows(estimate.stats, first.plan)
    rows += class_rows(first.plan)
    rows += [("more memory", gain) for gain in estimate.gains]
    return rows


def _sweep_rows(estimate: Estimate) -> list[tuple[str, ...]]:
    rows = []
    for one in estimate.sweep:
        cells = [bytes_text(one.settings.device_budget)]
        if one.refusals:
            lacks = one.refusals[0].missing
            missing = "no budget suffices" if lacks is None else f"{bytes_text(lacks)} missing"
            rows.append((*cells, "-", "-", "-", "-", f"{one.refusals[0].what}: {missing}"))
            continue
        by_when = {schedule.when: schedule for schedule in one.schedules}
        by_when["speculated"] = one.schedules[0]
        steps = [_seconds(by_when[when].seconds) if when in by_when else "-" for when in _WHEN]
        binds = one.schedules[0].verdict.words
        tokens = one.schedules[-1].tokens_per_s
        rate = "-" if math.isnan(tokens) else f"{tokens:,.0f}"
        rows.append((*cells, *steps, rate, binds))
    return rows


def table(estimate: Estimate) -> str:
    """The estimate, and a line for each budget of its sweep."""
    text = render("Gemini: the estimate", None, list(_rows(estimate)))
    if estimate.sweep:
        steps = ("clipped", "clip fires", "step=True")
        head = ("device budget", *steps, "tokens/s", "what binds")
        text += "\n\n" + render("Other budgets", head, list(_sweep_rows(estimate)))
    return text
