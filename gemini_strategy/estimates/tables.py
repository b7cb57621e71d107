"""An estimate as text: what fits where, what binds, and what would help."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gemini_strategy.report.tables import bytes_text, class_rows, count_text, rank_rows, render
from gemini_strategy.sizes import physical_memory, size_text

if TYPE_CHECKING:
    from gemini_strategy.estimates.causes import Gain, Part
    from gemini_strategy.estimates.forecast import Estimate, Refusal, Schedule
    from gemini_strategy.estimates.machines import Machine

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


def _binds(schedule: Schedule, parts: Sequence[Part]) -> str:
    found = schedule.verdict
    if found.is_compute:
        return "compute binds: more memory buys little"
    compute = f"compute alone takes {_seconds(schedule.plan['compute_seconds'])}"
    rest = ", ".join(f"{_seconds(part.seconds)} {part.what}" for part in parts)
    rest = f"; the rest: {rest}" if rest else ""
    if found.is_mixed:
        return f"{compute}{rest}"
    return f"{found.binds} ({_seconds(found.seconds)} in a step); {compute}{rest}"


def _gain(gain: Gain) -> str:
    """Seconds of a step; of more tokens what a second makes of them."""
    is_rate = gain.of == "tokens" and not any(map(math.isnan, gain.tokens_per_s.values()))
    steps = []
    for number, when in enumerate(gain.seconds):
        name = "clipped" if number == 0 else "step=True"
        rate, seconds = gain.tokens_per_s[when], gain.seconds[when]
        steps.append(f"{name} {f'{rate:,.0f} tokens/s' if is_rate else _seconds(seconds)}")
    return f"{gain.more}: {', '.join(steps)}"


def _optimizer_rows(estimate: Estimate) -> list[tuple[str, str]]:
    """Of what is not stepped by the engine."""
    if not estimate.is_opaque:
        return []
    each = estimate.state_bytes / max(estimate.trained, 1)
    return [
        (
            "optimizer",
            f"{estimate.optimizer}, {bytes_text(estimate.state_bytes)} of states, {each:.3g} bytes per trained "
            "parameter; its own step() runs on the device, and is timed here as Adam's, not measured",
        )
    ]


def _rate_rows(machine: Machine, steps_on_host: bool) -> list[tuple[str, str]]:
    """What copies, updates and products are taken to get, and what of it is no measurement."""
    rates, known = machine.rates, machine.measured
    copies = f"PCIe {rates['h2d'] / 1e9:.3g} GB/s to the device and {rates['d2h'] / 1e9:.3g} back"
    adam = (
        f"Adam on the host {rates['host_adam'] / 1e9:.3g} G parameters/s, beside copies "
        f"{rates['host_adam_beside'] / 1e9:.3g}"
    )
    products = f"products {machine.half / 1e12:.3g} TFLOPS"
    texts = {copies: {"h2d", "d2h"}, adam: {"host_adam"}, products: {"half"}}
    if not steps_on_host:
        del texts[adam]
    assumed = [text for text, names in texts.items() if not names <= known]
    rows = [("measured", "; ".join(text for text in texts if text not in assumed))]
    if machine.host and assumed:
        of_host = any(text is not products for text in assumed)
        text = f"{machine.host}: {'; '.join(assumed)}" if of_host else assumed[0]
        if of_host:
            what = "copies and Adam" if steps_on_host else "copies"
            text += f". `gemini-strategy profile --json FILE` there and --rates FILE replace {what}"
        rows.append(("assumed", text))
    return [row for row in rows if row[1]]


#: Memory that hosts are sold with, in GB or GiB.
_SOLD = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
_SYSTEM = (
    8 * 10**9
)  # of a host, beside the budget: the system, loaders, and what of the process is no home


def _host_budget_rows(estimate: Estimate) -> list[tuple[str, str]]:
    """A budget that leaves nothing to the system ends a run after hours."""
    budget = estimate.settings.host_budget * estimate.ranks
    here = physical_memory() if estimate.machine.host_memory is not None else None
    sold = {n * unit for n in _SOLD for unit in (10**9, 1 << 30)}
    if budget < 0 or (here is None and budget not in sold) or (here and budget + _SYSTEM <= here):
        return []
    whole = here or budget
    why = f"this host has {bytes_text(whole)}" if here else "if that is all that the host has"
    left = bytes_text(max(whole - _SYSTEM, 0) // estimate.ranks).replace(" ", "")
    text = f"{why}, give {left}: the system, loaders and what else the process holds want some {bytes_text(_SYSTEM)}"
    return [("host budget?", text)]


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
        *_optimizer_rows(estimate),
        *_rate_rows(estimate.machine, not estimate.is_opaque),
        *_host_budget_rows(estimate),
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
        why = _binds(schedule, estimate.parts.get(schedule.when, ()))
        rows += [(name, _step(schedule, estimate.ranks)), ("  what binds", why)]
    rows += _clipping(estimate)
    rows += rank_rows(estimate.stats, first.plan)
    rows += class_rows(first.plan)
    if estimate.unquantized[0]:
        n, size, name = estimate.unquantized
        text = f"{bytes_text(size)} of {n} tensors that no linear layer has, as {name}: they stay as they are"
        rows.append(("not quantized", text))
    rows += [(f"more {gain.of}", _gain(gain)) for gain in estimate.gains]
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
