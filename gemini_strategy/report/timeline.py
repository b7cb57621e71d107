"""The timeline of some steps, for people: recorded by the core, written as a Chrome trace and as a picture.

Entries are what csrc/binding/plan.c makes of csrc/memory/timeline.h, in issue order. A tick has kind "tick", stream,
tick (its position in the pass), tick_kind ("enter", "touch" or "grad"), id, start, work (what it waited for is there),
end (seconds), device (bytes by class) and host (bytes). Everything else has kind, stream, tick, chunk, piece, bytes,
start, end. The kinds "held", "dropped" and "pass_end" are marks without length; a last entry of kind "lost" says in n
how many found the log full.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gemini_strategy.errors import GeminiError
from gemini_strategy.report import tables

Entry = Mapping[str, Any]
Draw = Callable[[Sequence[Entry], Mapping[str, Any], Path], None]  # export_svg of tools/svg.py

_STREAMS = {
    "compute": "compute: ticks",
    "fetch": "fetch: weights H2D",
    "state": "state: states and gradients H2D",
    "evict": "evict: gradients and weights D2H",
    "state_out": "state_out: states D2H",
    "update": "update: device Adam",
    "host": "host: CPU Adam",
    "comm": "comm: gathers and reductions",
}
_CAPACITY_MIN, _CAPACITY_MAX = 1 << 12, 1 << 17  # entries
_ENTRIES_PER_CHUNK = 64  # in one step: ticks and operations, with room for micro-batches


class Recording:
    """A timeline that is being recorded; see Engine.timeline."""

    def __init__(
        self,
        engine: Any,
        path: str | Path,
        svg: str | Path | None,
        steps: int | None,
        draw: Draw | None,
    ) -> None:
        self._engine = engine
        self._path = Path(path)
        self._svg = None if svg is None else Path(svg)
        self._draw = draw
        self._left = steps
        self._is_done = False
        wanted = _ENTRIES_PER_CHUNK * (steps or 1) * (engine.core.stats()["chunks"] + 64)
        engine.core.timeline_begin(min(max(wanted, _CAPACITY_MIN), _CAPACITY_MAX))

    def after_step(self) -> None:
        """The engine has issued an optimizer step."""
        if self._left is not None:
            self._left -= 1
            if self._left <= 0:
                self.finish()

    def finish(self) -> None:
        """Ends the recording and writes the files; the host waits for the device. Idempotent."""
        if self._is_done:
            return
        self._is_done = True
        self._engine.recording = None
        entries = self._engine.core.timeline_end()
        export_chrome(entries, self._path)
        if self._svg is not None and self._draw is not None:
            self._draw(entries, layout_of(self._engine), self._svg)

    def __enter__(self) -> Recording:
        self._left = None  # the block says how long
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.finish()
            return
        with contextlib.suppress(GeminiError, OSError):  # the first error is the one to see
            self.finish()


def record(
    engine: Any,
    path: str | Path,
    svg: str | Path | None = None,
    steps: int = 1,
    draw: Draw | None = None,
) -> Recording:
    """Engine.timeline of an engine's Runtime; `draw` writes the picture."""
    if not (isinstance(steps, int) and steps >= 1):
        raise ValueError(f"steps={steps!r} must be an int of at least 1")
    if engine.recording is not None:
        raise GeminiError(
            "a timeline is being recorded already: let its steps pass, or call finish() on it"
        )
    for file in (path, svg):
        if file is not None and not Path(file).resolve().parent.is_dir():
            raise FileNotFoundError(f"timeline: the folder of {file} does not exist: make it first")
        if file is not None and Path(file).is_dir():
            raise IsADirectoryError(f"timeline: {file} is a folder: give a file's name")
    engine.recording = Recording(engine, path, svg, steps, draw)
    return engine.recording


def layout_of(engine: Any) -> dict[str, Any]:
    """What the picture says beside the entries; keys as tools/svg.py takes them."""
    about = tables.about(engine)
    stats = engine.core.stats()
    plan = tables.plan_of(engine)
    return {
        "title": f"{about['model']} on {about['device']}",
        "n_chunks": stats["chunks"],
        "classes": None if plan is None else plan["classes"],
        "modules": _modules(engine, stats["chunks"]),
        "when": "on demand" if plan is None else plan["when"],
        "step_seconds": None if plan is None else plan["step_seconds"],
        "device_budget": stats["device_budget_bytes"],
        "host_budget": about["host_budget"],
        "policy": about["policy"],
    }


def _modules(engine: Any, n_chunks: int) -> list[list[str]]:
    """The names of the modules that have parameters in each chunk."""
    names: list[dict[str, None]] = [{} for _ in range(n_chunks)]
    for slot in engine.slots:
        module = slot.name.rpartition(".")[0] or "the model"
        names[engine.core.chunk(slot.id)[0]][module] = None
    return [list(of_chunk) for of_chunk in names]


def _chrome_name(entry: Entry) -> str:
    if entry["kind"] == "tick":
        what = "unit" if entry["tick_kind"] == "enter" else "chunk"
        return f"{entry['tick_kind']} {what} {entry['id']}"
    return f"{entry['kind']} {entry['chunk']}"


def chrome_events(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Trace events: durations per stream, counters of memory per tick, marks as instants; microseconds."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": "Gemini"}}
    ]
    threads = {stream: number for number, stream in enumerate(_STREAMS, 1)}
    for stream, thread in threads.items():
        common = {"ph": "M", "pid": 1, "tid": thread}
        events.append({**common, "name": "thread_name", "args": {"name": _STREAMS[stream]}})
        events.append({**common, "name": "thread_sort_index", "args": {"sort_index": thread}})
    for entry in entries:
        if entry["kind"] in ("lost", "pass_end"):
            continue
        start = entry.get("work", entry["start"])  # a gap before a tick is what it waited for
        event: dict[str, Any] = {
            "pid": 1,
            "tid": threads[entry["stream"]],
            "name": _chrome_name(entry),
            "cat": entry["kind"],
            "ts": round(start * 1e6, 3),
        }
        if entry["kind"] in ("held", "dropped"):
            events.append({**event, "ph": "i", "s": "t", "args": {"piece": entry["piece"]}})
            continue
        seconds = entry["end"] - start
        args: dict[str, Any] = {"tick": entry["tick"]}
        if entry["kind"] != "tick":
            args |= {"chunk": entry["chunk"], "piece": entry["piece"], "bytes": entry["bytes"]}
            if seconds > 0:
                args["GB/s"] = round(entry["bytes"] / seconds / 1e9, 2)
        events.append({**event, "ph": "X", "dur": round(seconds * 1e6, 3), "args": args})
        if entry["kind"] == "tick":
            counter = {"ph": "C", "pid": 1, "tid": 0, "ts": round(entry["start"] * 1e6, 3)}
            events.append({**counter, "name": "device bytes", "args": dict(entry["device"])})
            events.append({**counter, "name": "host bytes", "args": {"host": entry["host"]}})
    return events


def export_chrome(entries: Sequence[Entry], path: str | Path) -> None:
    """Writes entries as a Chrome trace (JSON), one thread per stream, for Perfetto or chrome://tracing.

    Format: "Trace Event Format", JSON object form; unknown top-level keys are kept as metadata by readers.
    """
    lost = sum(entry["n"] for entry in entries if entry["kind"] == "lost")
    trace = {
        "traceEvents": chrome_events(entries),
        "displayTimeUnit": "ms",
        "otherData": {"entries that found the log full": lost},
    }
    Path(path).write_text(json.dumps(trace, separators=(",", ":")), encoding="utf-8")
