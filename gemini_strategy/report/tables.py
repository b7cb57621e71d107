"""What is about to happen and what has happened, for people: the meter of steps and the two tables.

Tables are pure functions of dicts: `about` (the engine's settings), `stats` (engine.stats()) and `plan`
(gm_plan_info of csrc/plan/plan.h as a dict; None while the engine serves on demand). Bytes are bytes, times seconds;
what is not known is absent or NaN and shown as a dash.
"""

from __future__ import annotations

import contextlib
import math
import resource
import statistics
import sys
import textwrap
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from gemini_strategy.report.differences import Compared, reasons
from gemini_strategy.report.verdict import MANY, sentence, verdict
from gemini_strategy.roots import title

_NAN = float("nan")
_STEPS = 32  # the last ones, of which figures are medians
_BREAK_STEPS = 8
_MOST_BREAKS = 3  # of them in which the plan was left, until the table says so
_WIDTH = 100  # columns
_LEAST = 20  # of the last column of a table
_DASH = "-"
_NO_PLAN = (
    "on demand: no plan yet; the budget has room for a module at a time, but not for what comes next: raise "
    "device_budget, or give a smaller chunk_size"
)
CLASSES = {
    "R": "weights and states on the device",
    "S1": "weights stay, states streamed",
    "S2": "weights and states streamed",
    "C1": "weights stay, updated on the host",
    "C2": "weights streamed, updated on the host",
}
_FROZEN = {  # the classes of chunks without states
    "R": "weights on the device, never updated",
    "C2": "weights streamed, never updated",
}
_SCHEDULES = {
    "deferred": "deferred (updates run under the next forward)",
    "immediate": "immediate (updates run under the backward)",
}


def _schedule(plan: Mapping[str, Any]) -> str:
    """When updates run; and which run earlier as long as no clip fires, in spares on the host."""
    n, text = plan.get("n_speculated", 0), _SCHEDULES[plan["when"]]
    of = f"{n} of {sum(plan['n_of_class'].values())} chunks"
    spares = bytes_text(plan.get("spare_bytes", 0))
    return f"{text}; {of} in the backward while no clip fires ({spares} of host)" if n else text


# ---- what a step was ----


def count_tokens(inputs: Any) -> int:
    """Elements of the token ids among a model's inputs; 0 if there are none.

    The tensor under the key "input_ids" counts; without one, the integer tensor with the most elements (for
    a model of images its labels, hence samples). Booleans are masks and do not count.
    """
    found = {"input_ids": 0, "": 0}

    def visit(value: Any, name: Any) -> None:
        if isinstance(value, torch.Tensor):
            if value.dtype is not torch.bool and not (
                value.is_floating_point() or value.is_complex()
            ):
                key = "input_ids" if name == "input_ids" else ""
                found[key] = max(found[key], value.numel())
        elif isinstance(value, Mapping):
            for key, part in value.items():
                visit(part, key)
        elif isinstance(value, list | tuple):
            for part in value:
                visit(part, "")

    visit(inputs, "")
    return found["input_ids"] or found[""]


def host_peak_bytes() -> int:
    """The most host memory that this process has had resident, shared memory included."""
    return _status_bytes("VmHWM:")


def host_resident_bytes() -> int:
    """The host memory that this process has resident now, shared memory included."""
    return _status_bytes("VmRSS:")


def _status_bytes(name: str) -> int:
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class StepMeter:
    """What optimizer steps cost, as medians over the last 32; for `engine.stats()`.

    A step lasts from one `step()` to the next, so the first call only starts the clock. Counters of `stats` are
    taken as differences, because work of a deferred update is counted in the step in which it is issued.

    Attributes:
        tokens_per_step: set by the user, or None: counted from the inputs of the root forward.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.tokens_per_step: int | None = None
        self._clock = clock
        self._steps: deque[dict[str, float]] = deque(maxlen=_STEPS)
        self._breaks: deque[int] = deque(maxlen=_BREAK_STEPS + 1)
        self._has_warned = False
        self._last: dict[str, float] | None = None
        self._tokens = 0
        self._is_counting = False

    @contextlib.contextmanager
    def counting(self, inputs: Any) -> Iterator[None]:
        """A forward of the model on `inputs`; a forward inside it is part of it.

        Only forwards with gradients count, so that evaluation between steps does not look like training.
        """
        is_outer = not self._is_counting and torch.is_grad_enabled()
        if is_outer:
            self._tokens += count_tokens(inputs)
            self._is_counting = True
        try:
            yield
        finally:
            if is_outer:
                self._is_counting = False

    def step(self, stats: Mapping[str, Any], compute_seconds: float | None = None) -> None:
        """An optimizer step has been issued.

        Args:
            stats: with fetched_bytes, evicted_bytes (all bytes copied to and from the device) and, where the
                engine counts it, host_adam_seconds and plan_breaks; all since the beginning.
            compute_seconds: of one step without any waiting; None: not known.
        """
        now = {
            "seconds": self._clock(),
            "h2d_bytes": float(stats.get("fetched_bytes", _NAN)),
            "d2h_bytes": float(stats.get("evicted_bytes", _NAN)),
            "host_adam_seconds": float(stats.get("host_adam_seconds", _NAN)),
        }
        if self._last is not None:
            step = {key: value - self._last[key] for key, value in now.items()}
            step["tokens"] = float(self.tokens_per_step or self._tokens)
            is_known = bool(compute_seconds) and step["seconds"] > 0
            share = compute_seconds / step["seconds"] if is_known and compute_seconds else _NAN
            step["stall_percent"] = 100.0 * max(0.0, 1.0 - share) if is_known else _NAN
            self._steps.append(step)
        self._last = now
        self._tokens = 0
        self._mind_breaks(stats.get("plan_breaks", 0))

    def _mind_breaks(self, n_breaks: int) -> None:
        """Warns, once, of a plan that is left again and again: such steps are many times slower."""
        self._breaks.append(n_breaks)
        if self._has_warned or n_breaks - self._breaks[0] <= _MOST_BREAKS:
            return
        self._has_warned = True
        warnings.warn(
            f"the plan was left {n_breaks - self._breaks[0]} times in the last {len(self._breaks) - 1} steps, for want "
            "of device memory, and made again; such steps are slow. Torch's memory grows from step to step, or "
            "something shows weights (a view that is kept) that no earlier pass has shown: raise device_budget, "
            'or see docs/tuning.md, "When there is no plan"',
            RuntimeWarning,
            stacklevel=4,
        )

    def figures(self) -> dict[str, float]:
        """Medians over the last steps.

        Keys: step_seconds, tokens_per_step, tokens_per_s, stall_percent (of the step, without compute),
        h2d_gb_s and d2h_gb_s (10^9 bytes per second of the step, not of the copy), host_adam_seconds (seconds of CPU
        Adam in a step), host_peak_bytes. NaN: not measured (yet).
        """
        seconds = self._median("seconds")
        per_second = 1.0 / seconds if seconds > 0 else _NAN
        tokens = self._median("tokens") or _NAN
        return {
            "step_seconds": seconds,
            "tokens_per_step": tokens,
            "tokens_per_s": tokens * per_second,
            "stall_percent": self._median("stall_percent"),
            "h2d_gb_s": self._median("h2d_bytes") * per_second / 1e9,
            "d2h_gb_s": self._median("d2h_bytes") * per_second / 1e9,
            "host_adam_seconds": self._median("host_adam_seconds"),
            "host_peak_bytes": host_peak_bytes(),
        }

    def _median(self, key: str) -> float:
        values = [step[key] for step in self._steps if not math.isnan(step[key])]
        return statistics.median(values) if values else _NAN


# ---- text of numbers ----


def _is_known(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def _scaled(value: float, units: tuple[str, ...], step: int = 1000) -> str:
    size = float(value)
    for unit in units[:-1]:
        if abs(size) < step * 0.9995:  # 999.6 would show as 1000
            return f"{size:.3g} {unit}".rstrip()
        size /= step
    return f"{size:.3g} {units[-1]}" if abs(size) < 1000 else f"{size:,.0f} {units[-1]}"


def bytes_text(value: float | None) -> str:
    """Bytes with three digits in powers of 1000: "19.8 MB"."""
    return _scaled(value, ("B", "kB", "MB", "GB", "TB")) if _is_known(value) else _DASH


def count_text(value: float | None) -> str:
    """A count with three digits in powers of 1000: "19.8 M"."""
    return _scaled(value, ("", "k", "M", "G", "T")) if _is_known(value) else _DASH


def seconds_text(value: float | None) -> str:
    """Seconds with three digits: "12.5 ms"."""
    if not _is_known(value):
        return _DASH
    if value == 0:
        return "0 s"
    if value < 0.9995e-3:
        return f"{value * 1e6:.3g} us"
    return f"{value * 1e3:.3g} ms" if value < 0.9995 else f"{value:.3f} s"


def _formatted(form: str) -> Callable[[Any], str]:
    """The text of a number; a dash for one that is not known."""
    return lambda value: form.format(value) if _is_known(value) else _DASH


_gb_s, _percent, _per_second = map(_formatted, ("{:.3g} GB/s", "{:.1f} %", "{:,.0f}"))


def _of_budget(total: float, budget: int) -> str:
    if budget < 0:
        return f"{bytes_text(total)}, no budget given"
    return f"{bytes_text(total)} of {bytes_text(budget)} ({100 * total / budget:.0f} %)"


# ---- the tables ----

Row = tuple[str, ...]


def _sizes(about: Mapping[str, Any]) -> str:
    of, trained = count_text(about["parameters"]), count_text(about["trainable"])
    return f"{of} parameters, {trained} trained"


def _budgets(about: Mapping[str, Any]) -> tuple[str, str]:
    device, host = (
        bytes_text(about[name]) if about[name] >= 0 else "what there is"
        for name in ("device_budget", "host_budget")
    )
    return device, host


def _is_simulated(about: Mapping[str, Any]) -> bool:
    return about["device"] == "cpu"


def _device(about: Mapping[str, Any]) -> str:
    """On the CPU its cores do the copies and updates, too, and no time there is that of a GPU."""
    return "cpu (simulated device)" if _is_simulated(about) else about["device"]


def _is_rough(stats: Mapping[str, Any]) -> bool:
    """The first plan has the times of passes on demand; the second has those of passes under a plan."""
    return stats.get("plans") == 1


def _about_rows(about: Mapping[str, Any]) -> list[Row]:
    device, host = _budgets(about)
    return [
        ("model", f"{about['model']}, {_sizes(about)}"),
        ("device", f"{_device(about)}, precision {about['precision'] or 'as built'}"),
        ("budget", f'device {device}, host {host}, placement_policy "{about["policy"]}"'),
    ]


def class_rows(plan: Mapping[str, Any]) -> list[Row]:
    """Of the classes that the plan has; frozen chunks, which are R or C2, have rows of their own."""
    rows = []
    for name, meaning in CLASSES.items():
        frozen, frozen_bytes = (
            plan.get(key, {}).get(name, 0) for key in ("n_frozen_of_class", "frozen_bytes_of_class")
        )
        n, held = plan["n_of_class"][name] - frozen, plan["bytes_of_class"][name] - frozen_bytes
        if n:
            rows.append(
                (f"class {name}", f"{_chunks(n)}, {bytes_text(held)} of weights: {meaning}")
            )
        if frozen:
            text = f"{_chunks(frozen)}, {bytes_text(frozen_bytes)} of weights"
            rows.append((f"class {name}, frozen", f"{text}: {_FROZEN[name]}"))
    return rows


def _chunks(n: int) -> str:
    return f"{n} chunk{'s' if n != 1 else ''}"


def _rate_rows(rates: Mapping[str, float] | None) -> list[Row]:
    if not rates:
        return []
    copies = [
        (
            f"rate {name}",
            f"{rates[key] / 1e9:.3g} GB/s alone, {rates[key + '_both'] / 1e9:.3g} both ways, "
            f"{rates[key + '_beside'] / 1e9:.3g} beside CPU Adam",
        )
        for name, key in (("H2D", "h2d"), ("D2H", "d2h"))
    ]
    adam = (
        f"parameters/s: CPU {count_text(rates['host_adam'])} alone, "
        f"{count_text(rates['host_adam_beside'])} beside copies; device {count_text(rates['device_adam'])}"
    )
    return [*copies, ("rate Adam", adam)]


def _outside_bytes(stats: Mapping[str, Any], plan: Mapping[str, Any]) -> float:
    return plan.get("outside_bytes", stats.get("outside_peak_bytes", 0))


def _expected(stats: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, float]:
    """What the plan says of a step, under the names of StepMeter.figures()."""
    step = plan["step_seconds"] or _NAN
    tokens = stats.get("tokens_per_step", _NAN)
    stall = 1.0 - plan["compute_seconds"] / step
    return {
        "step_seconds": step,
        "tokens_per_s": tokens / step if _is_known(tokens) else _NAN,
        "stall_percent": 100.0 * max(stall, 0.0),  # NaN stays NaN in this order
        "h2d_gb_s": plan["h2d_bytes"] / step / 1e9,
        "d2h_gb_s": plan["d2h_bytes"] / step / 1e9,
        "host_adam_seconds": plan["host_seconds"],
        "device_peak_bytes": plan["device_bytes"] + _outside_bytes(stats, plan),
        "host_bytes": plan.get("host_bytes", stats.get("host_bytes", _NAN)),
        "host_peak_bytes": stats.get("predicted_host_peak_bytes", _NAN),
    }


def rank_rows(stats: Mapping[str, Any], plan: Mapping[str, Any]) -> list[Row]:
    """What several ranks add: who shares, what is gathered, how long collectives take."""
    if stats.get("shards", 1) * stats.get("replicas", 1) == 1:
        return []
    collectives = (
        f"{seconds_text(plan['comm_seconds'])} of collectives in a step"
        if plan["comm_seconds"]
        else "collectives are taken to cost no time"
    )
    n = stats["replicas"]
    replicas = f", in each of {n} replicas" if n > 1 else ""
    return [
        ("ranks", f"{stats['shards']} share each chunk{replicas}; {collectives}"),
        (
            "whole chunks",
            f"{plan['n_kept']} stay gathered, {bytes_text(plan['kept_gathered_bytes'])}; rings: "
            f"gathered {bytes_text(plan['gathered_ring_bytes'])}, gradients before their sum "
            f"{bytes_text(plan['unreduced_ring_bytes'])}",
        ),
    ]


def plan_rows(
    about: Mapping[str, Any], stats: Mapping[str, Any], plan: Mapping[str, Any] | None
) -> list[Row]:
    """Rows (name, text) of the table before training."""
    rows = _about_rows(about)
    if plan is None:
        return [
            *rows,
            ("chunks", f"{stats['chunks']}, {bytes_text(stats['weight_bytes'])} of weights"),
            ("plan", _NO_PLAN if stats.get("steps", 0) > 1 else "on demand: no plan yet"),
            ("host memory", _of_budget(stats["host_bytes"], about["host_budget"])),
        ]
    expected = _expected(stats, plan)
    outside = _outside_bytes(stats, plan)
    rings = [
        f"{name} {bytes_text(plan[key])}"
        for name, key in (
            ("weights", "weight_ring_bytes"),
            ("states", "state_ring_bytes"),
            ("gradients", "grad_ring_bytes"),
        )
        if plan[key]
    ]
    if plan["resident_grad_bytes"]:
        rings.append(f"resident gradients {bytes_text(plan['resident_grad_bytes'])}")
    n = plan["prefetch"]
    prefetch = f"; {_chunks(n)} fetched ahead" if n else ""
    rough = "rough: " if _is_rough(stats) else ""
    later = "; the next plan, after two more steps, has better times of compute" if rough else ""
    parts = ", ".join(
        f"{name} {seconds_text(plan[key])}"
        for name, key in (
            ("compute", "compute_seconds"),
            ("H2D", "h2d_seconds"),
            ("D2H", "d2h_seconds"),
            ("Adam on the host", "host_seconds"),
        )
    )
    peak = (
        f"{bytes_text(plan['device_bytes'])} in blocks + {bytes_text(outside)} others = "
        f"{_of_budget(expected['device_peak_bytes'], about['device_budget'])}"
    )
    return [
        *rows,
        ("schedule", _schedule(plan)),
        *class_rows(plan),
        ("rings", (", ".join(rings) or "none") + prefetch),
        *rank_rows(stats, plan),
        ("device peak", peak),
        ("host memory", _of_budget(expected["host_bytes"], about["host_budget"])),
        (
            "moved in a step",
            f"to the device (H2D) {bytes_text(plan['h2d_bytes'])}, to the host (D2H) {bytes_text(plan['d2h_bytes'])}",
        ),
        *_rate_rows(plan.get("rates")),
        ("a step needs", rough + parts),
        (
            "perfect overlap",
            f"{rough}{seconds_text(plan['bound_seconds'])}: no step of this schedule is shorter",
        ),
        (
            "expected step",
            f"{rough}{seconds_text(expected['step_seconds'])}; stall {_percent(expected['stall_percent'])}{later}",
        ),
        ("what binds", rough + sentence(plan) if plan["step_seconds"] else _DASH),
    ]


_FIGURES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("step", "step_seconds", seconds_text),
    ("tokens/s", "tokens_per_s", _per_second),
    ("stall", "stall_percent", _percent),
    ("H2D over the step", "h2d_gb_s", _gb_s),
    ("D2H over the step", "d2h_gb_s", _gb_s),
    ("CPU Adam in a step", "host_adam_seconds", seconds_text),
    ("device peak", "device_peak_bytes", bytes_text),
    ("host memory", "host_bytes", bytes_text),
    ("host, whole process", "host_peak_bytes", bytes_text),
)


def _measured(stats: Mapping[str, Any]) -> dict[str, Any]:
    peak = stats.get("total_peak_bytes", stats["device_peak_bytes"])
    return {**stats, "device_peak_bytes": peak}


def result_rows(
    about: Mapping[str, Any], stats: Mapping[str, Any], plan: Mapping[str, Any] | None
) -> list[Row]:
    """Rows (name, planned, measured, difference) of the table after training."""
    expected = {} if plan is None else _expected(stats, plan)
    measured = _measured(stats)
    rows: list[Row] = []
    for name, key, text in _FIGURES:
        was, now = expected.get(key), measured.get(key)
        if not _is_known(was) and not _is_known(now):
            continue
        difference = _DASH
        if _is_known(was) and _is_known(now):
            if key == "stall_percent":  # a share: points, not percent of percent
                difference = f"{now - was:+.1f} points"
            elif was:
                over = now / was - 1
                difference = f"{100 * over:+.1f} %" if over < MANY else f"{over + 1:,.0f} x"
        if key == "stall_percent" and _is_simulated(about):
            name = "stall, simulated"
        rows.append((name, text(was), text(now), difference))
    if plan is not None and plan["bound_seconds"] and _is_known(stats.get("step_seconds")):
        bound = plan["bound_seconds"]
        ratios = [
            f"{value / bound:.2f} x" for value in (plan["step_seconds"], stats["step_seconds"])
        ]
        rows.insert(1, ("of perfect overlap", *ratios, _DASH))
    if about["device_budget"] >= 0:
        share = 100 * measured["device_peak_bytes"] / about["device_budget"]
        rows.append(("of the device budget", _DASH, f"{share:.0f} %", _DASH))
    return rows


def reason_rows(
    about: Mapping[str, Any], stats: Mapping[str, Any], plan: Mapping[str, Any] | None
) -> list[Row]:
    """Rows (name, reason) for what was planned and measured more than a tenth apart."""
    if plan is None:
        return []
    on_host = about["device"] == "cpu"
    found = Compared(_expected(stats, plan), _measured(stats), plan, on_host)
    return [*reasons(found, [(name, key) for name, key, _ in _FIGURES])]


def render(title: str, head: Row | None, rows: list[Row]) -> str:
    """A table as text; what is too long in the last column goes on below."""
    everything = [head, *rows] if head else rows
    widths = [max(map(len, column)) for column in zip(*everything, strict=True)]
    widths[-1] = min(widths[-1], max(_WIDTH - 2 - sum(width + 3 for width in widths[:-1]), _LEAST))

    def lines(row: Row) -> Iterator[str]:
        for part in textwrap.wrap(row[-1], widths[-1], break_on_hyphens=False) or [""]:
            cells = [
                cell.rjust(width) if head and column else cell.ljust(width)
                for column, (cell, width) in enumerate(zip((*row[:-1], part), widths, strict=True))
            ]
            yield f" {'   '.join(cells)}".rstrip()
            row = ("",) * len(row)

    text = [line for row in everything for line in lines(row)]
    rule = [" " + "-" * (len(text[0]) - 1)] if head else []
    return "\n".join([title, "", *text[: len(rule)], *rule, *text[len(rule) :]])


def about(engine: Any) -> dict[str, Any]:
    """What an engine was told: model (class name), parameters, trainable, device, precision, policy, budgets."""
    settings = engine.settings
    parameters = list(engine.model.parameters())
    return {
        "model": title(engine.model),
        "parameters": sum(p.numel() for p in parameters),
        "trainable": sum(p.numel() for p in parameters if p.requires_grad),
        "device": str(engine.device),
        "precision": engine.precision,
        "policy": settings.policy,
        "device_budget": settings.device_budget,
        "host_budget": settings.host_budget,
    }


def plan_of(engine: Any) -> dict[str, Any] | None:
    """The plan that the engine follows (gm_py_plan_info); None: on demand."""
    return engine.core.plan_info()


def plan_table(engine: Any) -> str:
    """The table before training: model, budget, classes, peaks, rates, expected step time."""
    return render(
        "Gemini: the plan", None, plan_rows(about(engine), engine.stats(), plan_of(engine))
    )


def result_table(engine: Any) -> str:
    """The table after training: what was planned beside what was measured, and why they differ where it is by much."""
    return result_text(about(engine), engine.stats(), plan_of(engine))


def result_text(
    facts: Mapping[str, Any], stats: Mapping[str, Any], plan: Mapping[str, Any] | None
) -> str:
    """The same of an engine that is gone."""
    steps = stats["steps"]
    head = (f"after {steps:,} step{'s' if steps > 1 else ''}", "planned", "measured", "difference")
    table = render("Gemini: the result", head, result_rows(facts, stats, plan))
    why = reason_rows(facts, stats, plan)
    if not why:
        return table
    return f"{table}\n\n{render('Gemini: why more than 10 % lie between', None, why)}"


def headline(engine: Any) -> str:
    """One line when training follows its first plan: parameters, policy, budgets, the expected step, what binds."""
    facts, plan = about(engine), plan_of(engine)
    device, host = _budgets(facts)
    line = (
        f'{facts["model"]}: {_sizes(facts)}, on {facts["device"]}, policy "{facts["policy"]}", device budget {device}, '
        f"host budget {host}"
    )
    if plan is None:
        return line
    rough = "roughly " if _is_rough(engine.stats()) else ""
    return f"{line}; {rough}{seconds_text(plan['step_seconds'])} a step expected, bound by {verdict(plan).words}"


def report(engine: Any) -> str:
    """The plan's table and, once there have been steps, the result's."""
    tables = [plan_table(engine)]
    if engine.stats()["steps"]:
        tables.append(result_table(engine))
    return "\n\n".join(tables)


def show(table: str) -> None:
    """Prints a table to stderr, below the line that the script's progress bar may have begun there."""
    print(f"\n{table}", file=sys.stderr, flush=True)
