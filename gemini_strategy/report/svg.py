"""A timeline as one picture: device bytes by class, host bytes, and the life of every chunk, over ticks.

One self-contained SVG: no script, no font, nothing from elsewhere. Entries as timeline.py describes them.

Invariants
    1. At each tick the bands' heights add up to the device bytes of that tick, on the scale of the axis.
    2. A chunk's line is drawn for exactly the ticks at which the log says that its weights are on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from gemini_strategy.report.tables import CLASSES, bytes_text, seconds_text

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
    ("free", "free blocks", "#ecebe6"),
    ("outside", "outside: torch", "#b9b4be"),
)
_COLOURS = {key: colour for key, _, colour in _BANDS}
_TEXT, _FAINT, _GRID, _BUDGET = "#33373d", "#7b8088", "#e3e5e8", "#b5483a"
_HOST = "#c8b8a6"

# Marks on a chunk's line: kind of entry -> (name, colour, place within the tick, shape)
_MARKS = {
    "weights in": (("fetch", "refresh"), "#1f3f66", 0.10, "bar"),
    "states or gradients in": (("state_in", "grad_in"), "#97722a", 0.35, "top"),
    "device update": (("device_update",), "#2f7d4f", 0.60, "diamond"),
    "host update": (("host_update",), "#8a4fa3", 0.60, "diamond"),
    "gathered": (("gather",), "#35679a", 0.20, "bar"),
    "reduced": (("reduce",), "#8c5230", 0.75, "bottom"),
    "out": (("weight_out", "grad_out", "state_out"), "#b5483a", 0.85, "bottom"),
}

_SMALL: dict[str, Any] = {"fill": _FAINT, "font_size": 10.5}
_PHASE = {"stroke": "#8d939b", "stroke_width": 0.8, "stroke_dasharray": "2 3"}
_OUTLINE = {"stroke": "#ffffff", "stroke_width": 0.7, "paint_order": "stroke"}

_WIDTH, _LEFT, _RIGHT = 1280, 78, 196
_PLOT = _WIDTH - _LEFT - _RIGHT
_EDGE = _LEFT + _PLOT
_TOP, _DEVICE, _HOST_HEIGHT, _GAP = 120, 300, 84, 44
_LIFELINES = 560  # about; rows are 3 to 15 high
_LABEL_GAP = 17
_LEGEND_ROW = 22
_MOST_LETTERS = 26  # of a module's name beside its chunk


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


def _phases(ticks: Sequence[Entry]) -> list[tuple[int, str]]:
    """(first tick, "forward" or "backward") of each part of each pass."""
    phases: list[tuple[int, str]] = []
    is_backward = False
    for index, tick in enumerate(ticks):
        begins = index == 0 or tick["tick"] <= ticks[index - 1]["tick"]
        turns = not (is_backward and not begins) and tick["tick_kind"] != "enter"
        if turns:
            phases.append((index, "backward"))
            is_backward = True
        elif begins:
            phases.append((index, "forward"))
            is_backward = False
    return phases


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


class _Picture:
    """The panels, from the top down."""

    def __init__(self, entries: Sequence[Entry], layout: Mapping[str, Any]) -> None:
        self.entries = [entry for entry in entries if entry["kind"] != "lost"]
        self.n_lost = sum(entry["n"] for entry in entries if entry["kind"] == "lost")
        self.layout = layout
        self.ticks = [entry for entry in self.entries if entry["kind"] == "tick"]
        self.width = _PLOT / max(len(self.ticks), 1)
        self.xs = [_LEFT + i * self.width for i in range(len(self.ticks) + 1)]
        self.n_chunks = layout["n_chunks"]
        self.row = min(15.0, max(3.0, _LIFELINES / max(self.n_chunks, 1)))
        self.host_top = _TOP + _DEVICE + _GAP
        self.lives_top = self.host_top + _HOST_HEIGHT + _GAP
        self.lives_bottom = self.lives_top + self.row * self.n_chunks
        self.classes = [name for name in CLASSES if name in (layout["classes"] or ())]
        self.names: Sequence[Sequence[str]] = layout["modules"]
        kinds = {e["kind"] for e in self.entries if e.get("chunk", self.n_chunks) < self.n_chunks}
        self.marks = [name for name, (own, *_) in _MARKS.items() if kinds & set(own)]
        self.height = self.lives_bottom + 92 + _LEGEND_ROW * bool(self.classes)
        self.bands = stacked(self.ticks)
        self.peak = max(self.bands[-1][3]) if self.bands else 0.0
        self.canvas = _Canvas()

    def draw(self) -> str:
        self._titles()
        if self.ticks:
            self._device_panel()
            self._host_panel()
            self._life_panel()
            self._phase_lines()
            self._tick_axis()
        self._legend()
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_n(self.height)}" '
            f'viewBox="0 0 {_WIDTH} {_n(self.height)}" font-family="system-ui, -apple-system, '
            f"'Segoe UI', 'Helvetica Neue', 'DejaVu Sans', Arial, sans-serif\" font-size=\"12\" "
            f'fill="{_TEXT}" role="img">'
        )
        title = f"<title>{escape(self.layout['title'])}: timeline</title>"
        paper = f'<rect width="{_WIDTH}" height="{_n(self.height)}" fill="#ffffff"/>'
        return "\n".join([head, title, paper, *self.canvas.lines, "</svg>"]) + "\n"

    def _titles(self) -> None:
        layout = self.layout
        self.canvas.text(_LEFT, 34, layout["title"], font_size=20, font_weight=600)
        classes = layout["classes"] or []
        counts = ", ".join(f"{classes.count(name)} {name}" for name in _COLOURS if name in classes)
        seconds = max((entry["end"] for entry in self.entries), default=0.0)
        budget = layout["device_budget"]
        facts = [
            f"budget {bytes_text(budget)}" if budget >= 0 else "no budget",
            f'policy "{layout["policy"]}"',
            layout["when"],
            f"{self.n_chunks} chunks" + (f": {counts}" if counts else ""),
            f"peak {bytes_text(self.peak)}",
            f"{seconds:.3g} s recorded",
        ]
        if layout["step_seconds"]:
            facts.append(f"{layout['step_seconds']:.3g} s a step planned")
        if self.n_lost:
            facts.append(f"{self.n_lost} entries found the log full")
        self.canvas.text(_LEFT, 56, "  \u00b7  ".join(facts), fill=_FAINT, font_size=12.5)

    def _frame(self, top: float, height: float, limit: float, name: str, n: int) -> Callable:
        """Grid and labels of one panel of bytes; returns the map from bytes to y."""
        above = 30 if top == _TOP else 9  # the first panel has the names of the phases between
        self.canvas.text(_LEFT, top - above, name, font_weight=600)

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
        y_of = self._frame(_TOP, _DEVICE, limit, "Device memory", 6)
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
        places = _spread([label[0] for label in labels], _TOP - 4.0, _TOP + _DEVICE - 2.0)
        for y, (origin, name, most, colour, text) in zip(places, labels, strict=True):
            line = "#c3c7cc" if colour else _BUDGET
            self.canvas.line(_EDGE + 2, origin, _EDGE + 16, y, stroke=line)
            self._label(y, name, most, colour, fill=text)

    def _label(self, y: float, name: str, most: str, colour: str | None, **attributes: Any) -> None:
        """A name beside a panel, behind its colour, and how much that is."""
        if colour:
            self.canvas.square(_EDGE + 19, y - 5, colour)
        self.canvas.text(_EDGE + 35, y + 4, name, **attributes)
        self.canvas.text(_WIDTH - 12, y + 4, most, fill=_FAINT, text_anchor="end")

    def _host_panel(self) -> None:
        canvas, budget = self.canvas, self.layout["host_budget"]
        values = [tick["host"] for tick in self.ticks]
        shows_budget = 0 <= budget <= 3 * max(values)
        limit = 1.1 * max(max(values), budget if shows_budget else 0) or 1.0
        canvas.open(id="host")
        y_of = self._frame(self.host_top, _HOST_HEIGHT, limit, "Host memory", 3)
        top = _steps(self.xs, [y_of(value) for value in values])
        base = y_of(0)
        canvas.titled_path(
            _polygon([*top, (self.xs[-1], base), (self.xs[0], base)]),
            f"host: at most {bytes_text(max(values))}",
            fill=_HOST,
            data_band="host",
        )
        if shows_budget:
            y = y_of(budget)
            canvas.line(_LEFT, y, _EDGE, y, stroke=_BUDGET, stroke_dasharray="6 4")
            self._label(y, "budget", bytes_text(budget), None, fill=_BUDGET)
        self._label((y_of(values[-1]) + base) / 2, "homes", bytes_text(max(values)), _HOST)
        canvas.close()

    def _row_y(self, chunk: int) -> float:
        return self.lives_top + self.row * chunk

    def _life_panel(self) -> None:
        canvas, classes = self.canvas, self.layout["classes"]
        canvas.open(id="chunks")
        canvas.text(
            _LEFT, self.lives_top - 9, "Chunks: where weights are on the device", font_weight=600
        )
        every = max(1, math.ceil(13 / self.row))
        for chunk, spans in enumerate(lives(self.entries, self.n_chunks, classes)):
            y = self._row_y(chunk)
            middle = y + self.row / 2
            name = classes[chunk] if classes else "C2"
            if chunk % every == 0:
                canvas.text(_LEFT - 8, middle + 4, f"{chunk}", text_anchor="end", **_SMALL)
                self._module_label(chunk)
            canvas.line(_LEFT, middle, _EDGE, middle, stroke="#f0f1f3")
            pad = min(self.row * 0.14, 1.2) if self.row > 6 else 0.25
            d = "".join(
                f"M{_n(self.xs[a])} {_n(y + pad)}H{_n(self.xs[b])}V{_n(y + self.row - pad)}"
                f"H{_n(self.xs[a])}Z"
                for a, b in spans
            )
            if d:
                what = f"chunk {chunk}" + (f", class {name}" if classes else "")
                what += "".join(f"\n{module}" for module in self._modules(chunk))
                canvas.titled_path(d, what, fill=_COLOURS[name], data_chunk=chunk)
        for name in self.marks:
            kinds, colour, place, shape = _MARKS[name]
            d = self._marks(kinds, place, shape)
            canvas.add("path", d=d, fill=colour, **_OUTLINE, data_marks=name)
        if classes:
            self._class_labels(classes)
        canvas.close()

    def _modules(self, chunk: int) -> Sequence[str]:
        return self.names[chunk] if chunk < len(self.names) else ()

    def _module_label(self, chunk: int) -> None:
        """The first module of a chunk, and how many more there are; all of them are in its title."""
        modules = self._modules(chunk)
        if not modules:
            return
        more = f" +{len(modules) - 1}" if len(modules) > 1 else ""
        most = _MOST_LETTERS - len(more)
        first = modules[0] if len(modules[0]) <= most else f"\u2026{modules[0][1 - most :]}"
        y = self._row_y(chunk) + self.row / 2 + 4
        self.canvas.text(_EDGE + 34, y, first + more, **_SMALL, data_module=chunk)

    def _class_labels(self, classes: Sequence[str]) -> None:
        """The class beside each run of chunks that have it."""
        begin, free = 0, -math.inf
        for chunk in range(1, len(classes) + 1):
            if chunk < len(classes) and classes[chunk] == classes[begin]:
                continue
            y1, y2 = self._row_y(begin) + 1, self._row_y(chunk) - 1
            height, colour = _n(max(y2 - y1, 1)), _COLOURS[classes[begin]]
            self.canvas.add("rect", x=_EDGE + 6, y=_n(y1), width=3, height=height, fill=colour)
            middle = (y1 + y2) / 2
            if middle - free >= 12:
                self.canvas.text(
                    _EDGE + 15, middle + 4, classes[begin], font_size=10.5, fill=_FAINT
                )
                free = middle
            begin = chunk

    def _marks(self, kinds: Sequence[str], place: float, shape: str) -> str:
        """One path with a mark for each entry of these kinds."""
        parts, at = [], -1
        wide = min(2.2, max(1.0, self.width * 0.3))
        for entry in self.entries:
            if entry["kind"] == "tick":
                at += 1
            elif entry["kind"] in kinds and entry["chunk"] < self.n_chunks:
                x = self.xs[max(at, 0)] + place * self.width
                y = self._row_y(entry["chunk"])
                parts.append(_mark(shape, x, y, wide, self.row))
        return "".join(parts)

    def _phase_lines(self) -> None:
        phases = _phases(self.ticks)
        ends = [first for first, _ in phases[1:]] + [len(self.ticks)]
        for (first, name), end in zip(phases, ends, strict=True):
            if first:
                x = self.xs[first]
                self.canvas.line(x, _TOP - 22, x, self.lives_bottom, **_PHASE)
            if self.xs[end] - self.xs[first] > 62:
                middle = (self.xs[first] + self.xs[end]) / 2
                self.canvas.text(middle, _TOP - 10, name, text_anchor="middle", fill=_FAINT)

    def _tick_axis(self) -> None:
        y = self.lives_bottom + 4
        self.canvas.line(_LEFT, y, _EDGE, y, stroke="#c3c7cc")
        step = max(1, int(_nice_step(len(self.ticks), 12)))
        for index in range(0, len(self.ticks), step):
            x = self.xs[index]
            self.canvas.line(x, y, x, y + 4, stroke="#c3c7cc")
            self.canvas.text(x, y + 17, str(index), text_anchor="middle", fill=_FAINT)
            time = seconds_text(self.ticks[index]["start"] - self.ticks[0]["start"])
            self.canvas.text(x, y + 31, time, text_anchor="middle", fill=_FAINT, data_tick=index)
        self.canvas.text(_EDGE + 15, y + 17, "tick", fill=_FAINT)
        self.canvas.text(_EDGE + 15, y + 31, "time", fill=_FAINT)

    def _legend(self) -> None:
        x, y = float(_LEFT), self.lives_bottom + 62
        self.canvas.open(id="legend")
        for name in self.marks:
            _, colour, _, shape = _MARKS[name]
            self.canvas.add("path", d=_mark(shape, x + 4, y - 10, 2.2, 13), fill=colour)
            self.canvas.text(x + 14, y, name)
            x += 34 + 6.6 * len(name)
        x, y = float(_LEFT), y + _LEGEND_ROW
        for name in self.classes:
            self.canvas.square(x, y - 9, _COLOURS[name])
            text = f"{name}: {CLASSES[name]}"
            self.canvas.text(x + 14, y, text, font_size=11)
            x += 30 + 5.4 * len(text)
        self.canvas.close()


def _mark(shape: str, x: float, y: float, wide: float, row: float) -> str:
    """A mark at x on the row that begins at y: bars differ in which half they take, updates are diamonds."""
    if shape == "diamond":
        half = min(4.0, row / 2)
        middle = y + row / 2
        return _polygon(
            [(x, middle - half), (x + half, middle), (x, middle + half), (x - half, middle)]
        )
    top = y + (row / 2 if shape == "bottom" else 0)
    bottom = y + (row / 2 if shape == "top" else row)
    return _polygon([(x, top), (x + wide, top), (x + wide, bottom), (x, bottom)])


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
