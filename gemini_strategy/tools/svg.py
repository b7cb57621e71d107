"""A timeline as one picture: what ran in each lane, what compute waited for, device memory, and the life of each chunk.

One self-contained SVG: no script, no font, nothing from elsewhere. Entries as report/timeline.py describes them.

Invariants
    1. Time is to scale: a second is as wide everywhere.
    2. At each tick the bands' heights add up to the device bytes of that tick, on the scale of the axis.
    3. A chunk's line is drawn for exactly the ticks at which the log says that its weights are on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from gemini_strategy.report.tables import CLASSES, bytes_text, seconds_text
from gemini_strategy.tools.lanes import COMPUTE, LOOP, STALL, lanes_of

Entry = Mapping[str, Any]

# Bands from the bottom up: (key, name, colour). What is outside tops them: it is what swells.
_BANDS = (
    ("R", "weights R", "#5b7fa6"),
    ("S1", "weights S1", "#83a3c3"),
    ("C1", "weights C1", "#a9c1d8"),
    ("S2", "weights S2", "#7fb0a6"),
    ("C2", "weights C2", "#a8cdc4"),
    ("states", "states", "#d3b574"),
    ("grads", "gradients", "#cf9a86"),
    ("gathered", "gathered weights", "#8fa8c9"),
    ("unreduced", "unreduced gradients", "#e0b7a8"),
    ("free", "blocks between uses", "#ecebe6"),
    ("outside", "outside: torch", "#b9b4be"),
)
_COLOURS = {key: colour for key, _, colour in _BANDS}
_TEXT, _FAINT, _GRID, _BUDGET = "#33373d", "#7b8088", "#e3e5e8", "#b5483a"
_RED, _LOOP = "#c8382b", "#d98a80"  # what compute waits for
_LANE_COLOURS = {
    "forward": "#4a77a8",
    "backward": "#2c4f79",
    "copies in": "#3f9a8b",
    "copies out": "#7a9a3f",
    "Adam on the host": "#8a4fa3",
    "Adam on the device": "#2f7d4f",
    "collectives": "#b07a2a",
}

_SMALL: dict[str, Any] = {"fill": _FAINT, "font_size": 10.5}
_PHASE = {"stroke": "#8d939b", "stroke_width": 0.8, "stroke_dasharray": "2 3"}

_LEFT, _PLOT, _COLUMN = 160, 1010, 190  # names; the plot; figures beside it
_EDGE = _LEFT + _PLOT
_TOP, _LANE, _LANE_GAP, _DEVICE, _GAP = 144, 22, 6, 240, 50
_LIFELINES = 560  # about; rows are 3 to 15 high
_LABEL_GAP = 17
_LEGEND_ROW = 18
_LEAST_WIDE = 0.3  # pixels; nearer spans of a lane are drawn as one
_LETTER = 0.64  # of the font's size: no sans-serif font's letters are wider on average


def stacked(ticks: Sequence[Entry]) -> list[tuple[str, str, list[float], list[float]]]:
    """(key, name, lower, upper) in bytes per tick for each band that is not empty, from the bottom up."""
    below = [0.0] * len(ticks)
    bands = []
    for key, name, _ in _BANDS:
        upper = [low + tick["device"].get(key, 0) for low, tick in zip(below, ticks, strict=True)]
        if upper != below:
            bands.append((key, name, below, upper))
            below = upper
    return bands


def lives(
    entries: Iterable[Entry], n_chunks: int, classes: Sequence[str] | None
) -> list[list[tuple[int, int]]]:
    """For each chunk the spans [from, to) of ticks at which its weights are on the device.

    Weights are there from a "held" mark or a fetch to a "dropped" mark. A log without "held" marks starts with the
    chunks whose class keeps weights on the device.
    """
    entries = list(entries)
    since: list[int | None] = [None] * n_chunks
    if classes and not any(entry["kind"] == "held" for entry in entries):
        since = [0 if name in ("R", "S1", "C1") else None for name in classes]
    spans: list[list[tuple[int, int]]] = [[] for _ in range(n_chunks)]
    at = -1

    def end(chunk: int, tick: int) -> None:
        begin = since[chunk]
        if begin is not None and tick > begin:
            spans[chunk].append((begin, tick))
        since[chunk] = None

    for entry in entries:
        kind = entry["kind"]
        if kind == "tick":
            at += 1
        elif kind == "lost" or entry["piece"] != "weight" or entry["chunk"] >= n_chunks:
            continue
        elif kind in ("held", "fetch") and since[entry["chunk"]] is None:
            since[entry["chunk"]] = max(at, 0)
        elif kind == "dropped":
            end(entry["chunk"], max(at, 0))
    for chunk in range(n_chunks):
        end(chunk, at + 1)
    return spans


def _nice_step(top: float, n: int) -> float:
    """A step of 1, 2 or 5 times a power of ten that divides [0, top] into at most n parts."""
    if top <= 0:
        return 1.0
    raw = top / n
    power = 10.0 ** math.floor(math.log10(raw))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))


def _spread(wanted: Sequence[float], low: float, high: float) -> list[float]:
    """Heights as near to `wanted` (descending: bottom up) as labels allow that must not touch."""
    placed: list[float] = []
    for y in wanted:  # upwards: each at least a gap above the one before
        placed.append(min(y, high, placed[-1] - _LABEL_GAP if placed else high))
    if placed and placed[-1] < low:  # too high: push down from the top
        floor = low
        for i in reversed(range(len(placed))):
            placed[i] = max(placed[i], floor)
            floor = placed[i] + _LABEL_GAP
    return placed


class _Canvas:
    """SVG elements as text, with the few shapes that are needed."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, name: str, text: str | None = None, **attributes: Any) -> None:
        self.lines.append(_tag(name, attributes) + (f">{escape(text)}</{name}>" if text else "/>"))

    def text(self, x: float, y: float, text: str, **attributes: Any) -> None:
        self.add("text", text, x=_n(x), y=_n(y), **attributes)

    def line(self, x1: float, y1: float, x2: float, y2: float, **attributes: Any) -> None:
        self.add("path", d=f"M{_n(x1)} {_n(y1)}L{_n(x2)} {_n(y2)}", fill="none", **attributes)

    def square(self, x: float, y: float, colour: str) -> None:
        self.add("rect", x=_n(x), y=_n(y), width=10, height=10, rx=2, fill=colour)

    def rect(self, x: float, y: float, width: float, height: float, **attributes: Any) -> None:
        self.add("rect", x=_n(x), y=_n(y), width=_n(width), height=_n(height), **attributes)

    def open(self, **attributes: Any) -> None:
        self.lines.append(_tag("g", attributes) + ">")

    def close(self) -> None:
        self.lines.append("</g>")

    def titled_path(self, d: str, title: str, **attributes: Any) -> None:
        tag = _tag("path", {"d": d, **attributes})
        self.lines.append(f"{tag}><title>{escape(title)}</title></path>")


def _tag(name: str, attributes: Mapping[str, Any]) -> str:
    pairs = (f" {key.replace('_', '-')}={quoteattr(str(v))}" for key, v in attributes.items())
    return f"<{name}{''.join(pairs)}"


def _n(value: float) -> str:
    """A coordinate: a hundredth of a pixel is enough."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _steps(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    """The corners of a line that is at ys[i] from xs[i] to xs[i + 1]."""
    corners = [(xs[0], ys[0])]
    for i in range(1, len(ys)):
        if ys[i] != ys[i - 1]:
            corners += [(xs[i], ys[i - 1]), (xs[i], ys[i])]
    return [*corners, (xs[len(ys)], ys[-1])]


def _polygon(corners: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in corners) + "Z"


def _time(seconds: float) -> str:
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.3g} us" if seconds else "0"
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def _width(text: str, size: float = 12) -> float:
    """Pixels that a text may take, in whatever font."""
    return _LETTER * size * len(text)


def _boxes(xs: Sequence[tuple[float, float]], top: float, height: float) -> str:
    """A path of boxes; those that nearly touch are one."""
    parts: list[list[float]] = []
    for x1, x2 in xs:
        if parts and x1 - parts[-1][1] < _LEAST_WIDE:
            parts[-1][1] = max(parts[-1][1], x2)
        else:
            parts.append([x1, max(x2, x1 + _LEAST_WIDE)])
    y1, y2 = _n(top), _n(top + height)
    return "".join(f"M{_n(a)} {y1}H{_n(b)}V{y2}H{_n(a)}Z" for a, b in parts)


class _Picture:
    """The panels, from the top down."""

    def __init__(self, entries: Sequence[Entry], layout: Mapping[str, Any]) -> None:
        self.entries = [entry for entry in entries if entry["kind"] != "lost"]
        self.n_lost = sum(entry["n"] for entry in entries if entry["kind"] == "lost")
        self.layout = layout
        self.ticks = [entry for entry in self.entries if entry["kind"] == "tick"]
        self.lanes = lanes_of(self.entries)
        self.seconds = self.lanes.seconds or 1.0
        self.xs = [self.x_of(t["start"]) for t in self.ticks] + [self.x_of(self.lanes.seconds)]
        self.n_chunks = layout["n_chunks"]
        self.row = min(15.0, max(3.0, _LIFELINES / max(self.n_chunks, 1)))
        self.names = list(self.lanes.spans)
        self.names[1:1] = [STALL]
        self.device_top = _TOP + len(self.names) * (_LANE + _LANE_GAP) + _GAP
        self.lives_top = self.device_top + _DEVICE + _GAP
        self.lives_bottom = self.lives_top + self.row * self.n_chunks
        self.classes = [name for name in CLASSES if name in (layout["classes"] or ())]
        self.modules: Sequence[Sequence[str]] = layout["modules"]
        labels = [self._module_text(chunk) for chunk in range(self.n_chunks)]
        beside = 34 + max((_width(text, 10.5) for text in labels), default=0.0)
        self.width = _EDGE + max(_COLUMN + 44, beside + 12, 78 + _width(self._waits_text()))
        self.height = self.lives_bottom + 64 + _LEGEND_ROW * len(self.classes)
        self.bands = stacked(self.ticks)
        self.peak = max(self.bands[-1][3]) if self.bands else 0.0
        self.canvas = _Canvas()

    def x_of(self, seconds: float) -> float:
        return _LEFT + _PLOT * seconds / self.seconds

    def draw(self) -> str:
        self._titles()
        if self.ticks:
            self._time_axis()
            self._lane_panel()
            self._device_panel()
            self._life_panel()
        self._legend()
        size = f'width="{_n(self.width)}" height="{_n(self.height)}"'
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
            f'viewBox="0 0 {_n(self.width)} {_n(self.height)}" font-family="system-ui, -apple-system, '
            f"'Segoe UI', 'Helvetica Neue', 'DejaVu Sans', Arial, sans-serif\" font-size=\"12\" "
            f'fill="{_TEXT}" role="img">'
        )
        title = f"<title>{escape(self.layout['title'])}: timeline</title>"
        paper = f'<rect {size} fill="#ffffff"/>'
        return "\n".join([head, title, paper, *self.canvas.lines, "</svg>"]) + "\n"

    def _titles(self) -> None:
        layout = self.layout
        self.canvas.text(20, 34, layout["title"], font_size=20, font_weight=600)
        self.canvas.text(20, 58, self.lanes.sentence(), font_size=14, id="binds")
        classes = layout["classes"] or []
        counts = ", ".join(f"{classes.count(name)} {name}" for name in _COLOURS if name in classes)
        budget = layout["device_budget"]
        host = max((tick["host"] for tick in self.ticks), default=0)
        host_budget = layout["host_budget"]
        facts = [
            f"budget {bytes_text(budget)}" if budget >= 0 else "no budget",
            f'policy "{layout["policy"]}"',
            layout["when"],
            f"{self.n_chunks} chunks" + (f": {counts}" if counts else ""),
            f"device peak {bytes_text(self.peak)}",
            f"host {bytes_text(host)}"
            + (f" of {bytes_text(host_budget)}" if host_budget >= 0 else ""),
        ]
        if layout["step_seconds"]:
            facts.append(f"{layout['step_seconds']:.3g} s a step planned")
        if self.n_lost:
            facts.append(f"{self.n_lost} entries found the log full")
        self.canvas.text(20, 79, "  \u00b7  ".join(facts), fill=_FAINT, font_size=12)

    def _time_axis(self) -> None:
        """Lines through all panels, with the time above the first and below the last."""
        step = _nice_step(self.seconds, 12)
        for index in range(int(self.seconds / step + 1e-9) + 1):
            x, text = self.x_of(index * step), _time(index * step)
            self.canvas.line(x, _TOP - 18, x, self.lives_bottom + 4, stroke=_GRID)
            for y in (_TOP - 24, self.lives_bottom + 19):
                self.canvas.text(x, y, text, text_anchor="middle", fill=_FAINT, data_time=index)

    def _lane_panel(self) -> None:
        canvas = self.canvas
        canvas.open(id="lanes")
        for number, name in enumerate(self.names):
            y = _TOP + number * (_LANE + _LANE_GAP)
            canvas.text(_LEFT - 10, y + 15, name, text_anchor="end", font_weight=600)
            canvas.rect(_LEFT, y, _PLOT, _LANE, fill="#f6f7f8")
            if name == STALL:
                busy = self._wait_lane(y)
            else:
                busy = self.lanes.busy(name)
                self._span_lane(name, y)
            share = f"{100 * busy / self.seconds:.0f} %"
            canvas.text(_EDGE + 54, y + 15, share, text_anchor="end")
            text = self._waits_text() if name == STALL else seconds_text(busy)
            canvas.text(_EDGE + 66, y + 15, text, fill=_FAINT)
        canvas.close()

    def _span_lane(self, name: str, y: float) -> None:
        """The lane of compute has forward and backward in two colours, with their names above it."""
        kinds = ("forward", "backward") if name == COMPUTE else (name,)
        for kind in kinds:
            spans = [s for s in self.lanes.spans[name] if name != COMPUTE or s[2] == kind]
            if not spans:
                continue
            xs = [(self.x_of(begin), self.x_of(end)) for begin, end, _ in spans]
            path = {"fill": _LANE_COLOURS[kind], "data_lane": kind}
            self.canvas.titled_path(_boxes(xs, y, _LANE), f"{kind}: {len(spans)}", **path)
        if name == COMPUTE:
            for begin, end, kind in self._phases():
                self._word(kind, self.x_of(begin), self.x_of(end), y - 4, _LANE_COLOURS[kind])

    def _waits_text(self) -> str:
        causes = self.lanes.by_cause()
        if not causes:
            return "0 s"
        parts = ", ".join(f"{cause} {seconds_text(s)}" for cause, s in causes.items())
        return f"{seconds_text(sum(causes.values()))}: {parts}"

    def _phases(self) -> list[tuple[float, float, str]]:
        """(begin, end, "forward" or "backward") of runs of ticks."""
        found: list[tuple[float, float, str]] = []
        for begin, end, kind in self.lanes.spans[COMPUTE]:
            if found and found[-1][2] == kind:
                found[-1] = (found[-1][0], end, kind)
            else:
                found.append((begin, end, kind))
        return found

    def _wait_lane(self, y: float) -> float:
        """What compute waited for, in red, with the cause below where it has room; the seconds of it."""
        runs: list[tuple[float, float, str]] = []
        for wait in self.lanes.waits:
            x1, x2 = self.x_of(wait.begin), self.x_of(wait.end)
            if runs and runs[-1][2] == wait.cause and x1 - runs[-1][1] < _LEAST_WIDE:
                runs[-1] = (runs[-1][0], x2, wait.cause)
            else:
                runs.append((x1, x2, wait.cause))
        for cause, seconds in self.lanes.by_cause().items():
            d = _boxes([(a, b) for a, b, own in runs if own == cause], y, _LANE)
            title = f"waits for {cause}: {seconds_text(seconds)}"
            colour = _LOOP if cause == LOOP else _RED
            self.canvas.titled_path(d, title, fill=colour, data_wait=cause)
        for x1, x2, cause in runs:
            self._word(cause, x1, x2, y + 15, "#ffffff")
        return sum(wait.seconds for wait in self.lanes.waits)

    def _word(self, word: str, x1: float, x2: float, y: float, colour: str) -> None:
        if x2 - x1 > _width(word, 11) + 6:
            middle = {"text_anchor": "middle", "font_size": 11, "fill": colour}
            self.canvas.text((x1 + x2) / 2, y, word, **middle)

    def _frame(self, top: float, height: float, limit: float, name: str, n: int) -> Callable:
        """Grid and labels of one panel of bytes; returns the map from bytes to y."""
        self.canvas.text(20, top - 12, name, font_weight=600)

        def y_of(value: float) -> float:
            return top + height * (1 - value / limit)

        step = _nice_step(limit, n)
        for i in range(int(limit / step + 1e-9) + 1):
            y = y_of(i * step)
            self.canvas.line(_LEFT, y, _EDGE, y, stroke=_GRID if i else "#c3c7cc")
            self.canvas.text(
                _LEFT - 8, y + 4, bytes_text(i * step) if i else "0", text_anchor="end", fill=_FAINT
            )
        return y_of

    def _device_panel(self) -> None:
        canvas, budget = self.canvas, self.layout["device_budget"]
        # A budget far above what is used would press everything into a line.
        shows_budget = 0 <= budget <= 3 * self.peak
        limit = 1.04 * max(self.peak, budget if shows_budget else 0) or 1.0
        canvas.open(id="device")
        y_of = self._frame(self.device_top, _DEVICE, limit, "Device memory", 6)
        for key, name, lower, upper in self.bands:
            top = _steps(self.xs, [y_of(v) for v in upper])
            bottom = _steps(self.xs, [y_of(v) for v in lower])
            most = max(high - low for low, high in zip(lower, upper, strict=True))
            canvas.titled_path(
                _polygon([*top, *reversed(bottom)]),
                f"{name}: at most {bytes_text(most)}",
                fill=_COLOURS[key],
                data_band=key,
            )
        if shows_budget:
            y = y_of(budget)
            canvas.line(_LEFT, y, _EDGE, y, stroke=_BUDGET, stroke_dasharray="6 4", id="budget")
        self._band_labels(y_of, budget if shows_budget else None)
        canvas.close()

    def _band_labels(self, y_of: Callable, budget: int | None) -> None:
        """Names beside the bands' right ends, each with the most that the band ever was."""
        labels = []
        for key, name, lower, upper in self.bands:
            most = max(high - low for low, high in zip(lower, upper, strict=True))
            middle = y_of((lower[-1] + upper[-1]) / 2)
            labels.append((middle, name, bytes_text(most), _COLOURS[key], _TEXT))
        if budget is not None:
            labels.append((y_of(budget), "budget", bytes_text(budget), None, _BUDGET))
        labels.sort(key=lambda label: -label[0])
        top = self.device_top
        places = _spread([label[0] for label in labels], top - 4.0, top + _DEVICE - 2.0)
        for y, (origin, name, most, colour, text) in zip(places, labels, strict=True):
            self.canvas.line(_EDGE + 2, origin, _EDGE + 16, y, stroke="#c3c7cc" if colour else text)
            if colour:
                self.canvas.square(_EDGE + 19, y - 5, colour)
            self.canvas.text(_EDGE + 35, y + 4, name, fill=text)
            most_at = _EDGE + _COLUMN + 40
            self.canvas.text(most_at, y + 4, most, fill=_FAINT, text_anchor="end")

    def _row_y(self, chunk: int) -> float:
        return self.lives_top + self.row * chunk

    def _life_panel(self) -> None:
        canvas, classes = self.canvas, self.layout["classes"]
        canvas.open(id="chunks")
        canvas.text(
            20, self.lives_top - 12, "Chunks: where weights are on the device", font_weight=600
        )
        every = max(1, math.ceil(13 / self.row))
        for chunk, spans in enumerate(lives(self.entries, self.n_chunks, classes)):
            y = self._row_y(chunk)
            middle = y + self.row / 2
            name = classes[chunk] if classes else "C2"
            if chunk % every == 0:
                canvas.text(_LEFT - 8, middle + 4, f"{chunk}", text_anchor="end", **_SMALL)
                if text := self._module_text(chunk):
                    canvas.text(_EDGE + 34, middle + 4, text, **_SMALL, data_module=chunk)
            canvas.line(_LEFT, middle, _EDGE, middle, stroke="#f0f1f3")
            pad = min(self.row * 0.14, 1.2) if self.row > 6 else 0.25
            d = _boxes([(self.xs[a], self.xs[b]) for a, b in spans], y + pad, self.row - 2 * pad)
            if d:
                what = f"chunk {chunk}" + (f", class {name}" if classes else "")
                what += "".join(f"\n{module}" for module in self._modules(chunk))
                canvas.titled_path(d, what, fill=_COLOURS[name], data_chunk=chunk)
        if classes:
            self._class_labels(classes)
        canvas.close()

    def _modules(self, chunk: int) -> Sequence[str]:
        return self.modules[chunk] if chunk < len(self.modules) else ()

    def _module_text(self, chunk: int) -> str:
        """The first module of a chunk, and how many more there are; all of them are in its title."""
        modules = self._modules(chunk)
        more = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
        return f"{modules[0]}{more}" if modules else ""

    def _class_labels(self, classes: Sequence[str]) -> None:
        """The class beside each run of chunks that have it."""
        begin, free = 0, -math.inf
        for chunk in range(1, len(classes) + 1):
            if chunk < len(classes) and classes[chunk] == classes[begin]:
                continue
            y1, y2 = self._row_y(begin) + 1, self._row_y(chunk) - 1
            self.canvas.rect(
                _EDGE + 6, y1, 3, max(y2 - y1, 1), fill=_COLOURS[classes[begin]], data_class=begin
            )
            middle = (y1 + y2) / 2
            if middle - free >= 12:
                self.canvas.text(
                    _EDGE + 15, middle + 4, classes[begin], font_size=10.5, fill=_FAINT
                )
                free = middle
            begin = chunk

    def _legend(self) -> None:
        """Of the classes, one below the other."""
        self.canvas.open(id="legend")
        for number, name in enumerate(self.classes):
            y = self.lives_bottom + 50 + number * _LEGEND_ROW
            self.canvas.square(_LEFT, y - 9, _COLOURS[name])
            self.canvas.text(_LEFT + 16, y, f"{name}: {CLASSES[name]}", font_size=11)
        self.canvas.close()


def export_svg(entries: Sequence[Entry], layout: Mapping[str, Any], path: str | Path) -> None:
    """Writes the picture.

    Args:
        entries: of a recording, in issue order.
        layout: title (text), n_chunks, classes (class per chunk, or None on demand), modules (names per chunk, or
            nothing), when (text),
            step_seconds (planned, or None), device_budget and host_budget (bytes, -1: none), policy (text).
        path: the file.
    """
    Path(path).write_text(_Picture(entries, layout).draw(), encoding="utf-8")
