"""What ran when, lane by lane, and what compute waited for: the answer of a timeline to "why is it slow".

Entries are as report/timeline.py describes them.

Invariants
    1. A tick is what it waits for, [start, work), and its own work, [work, end). Between the end of a pass and the next
       tick runs the loop.
    2. A wait's cause is the lane of which something ended last before the wait did.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gemini_strategy.report.verdict import WORDS, advice_for

Entry = Mapping[str, Any]
Span = tuple[float, float]

COMPUTE, STALL = "compute", "waits"
# Lane: (the kinds of entries in it, the resource of verdict.py).
_KINDS = {
    "copies in": (("fetch", "refresh", "state_in", "grad_in"), "h2d"),
    "copies out": (("weight_out", "grad_out", "state_out"), "d2h"),
    "Adam on the host": (("host_update",), "host"),
    "Adam on the device": (("device_update",), "device_adam"),
    "collectives": (("gather", "reduce"), "comm"),
}
_LANE_OF = {kind: lane for lane, (kinds, _) in _KINDS.items() for kind in kinds}
_RESOURCE_OF = {lane: resource for lane, (_, resource) in _KINDS.items()}
LOOP = "the loop"
_SHORT = 2e-5  # seconds: less is no wait, but the time between two events
_FEW = 0.05  # of the time recorded


@dataclass(frozen=True)
class Wait:
    """What compute waited for.

    Attributes:
        begin, end: seconds.
        cause: a lane, or LOOP.
    """

    begin: float
    end: float
    cause: str

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Lanes:
    """A recording.

    Attributes:
        seconds: from the first entry to the last.
        spans: of each lane with something in it, from the top down, compute first: (begin, end, what), in order.
        waits: of compute.
    """

    seconds: float
    spans: dict[str, list[tuple[float, float, str]]]
    waits: list[Wait]

    def busy(self, lane: str) -> float:
        """Seconds in which something of a lane ran."""
        total = last = 0.0
        for begin, end, _ in self.spans[lane]:
            total += max(end - max(begin, last), 0.0)
            last = max(last, end)
        return total

    def by_cause(self) -> dict[str, float]:
        """Seconds of waiting, the most first."""
        found: dict[str, float] = {}
        for wait in self.waits:
            found[wait.cause] = found.get(wait.cause, 0.0) + wait.seconds
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def sentence(self) -> str:
        """What binds, in words; "" where nothing was recorded."""
        if not self.seconds:
            return ""
        causes = self.by_cause()
        waited = sum(causes.values())
        share = f"{100 * waited / self.seconds:.0f} % of {_text(self.seconds)}"
        if waited <= _FEW * self.seconds:
            return f"Compute binds: it waits in {share}. {_sentence(advice_for('compute'))}"
        named = [f"{_text(s)} for {_words(c)}" for c, s in causes.items() if s > 0.1 * waited]
        return f"Compute waits in {share}: {', '.join(named)}. What helps: {_advice(next(iter(causes)))}."


def _words(cause: str) -> str:
    return WORDS.get(_RESOURCE_OF.get(cause, ""), cause)


def _advice(cause: str) -> str:
    if cause == LOOP:
        return "a faster loop: between passes it loads data, logs, or waits for a figure"
    return advice_for(_RESOURCE_OF[cause])


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _text(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def lanes_of(entries: Sequence[Entry]) -> Lanes:
    """The lanes of a recording."""
    timed = [entry for entry in entries if entry["kind"] not in ("lost", "held", "dropped")]
    spans: dict[str, list[tuple[float, float, str]]] = {COMPUTE: []}
    spans |= {lane: [] for lane in _KINDS}
    for entry in timed:
        if entry["kind"] in _LANE_OF and entry["end"] > entry["start"]:
            what = f"{entry['kind']} of chunk {entry['chunk']}"
            spans[_LANE_OF[entry["kind"]]].append((entry["start"], entry["end"], what))
    ends = sorted((end, lane) for lane in _KINDS for _, end, _ in spans[lane])
    waits: list[Wait] = []
    ticks = [entry for entry in timed if entry["kind"] == "tick"]
    is_backward = False
    for number, tick in enumerate(ticks):
        work = tick.get("work", tick["start"])
        before = ticks[number - 1] if number else None
        if before is not None and tick["start"] - before["end"] > _SHORT:
            waits.append(Wait(before["end"], tick["start"], LOOP))
        if work - tick["start"] > _SHORT:
            waits.append(Wait(tick["start"], work, _cause(ends, tick["start"], work)))
        if before is None or tick["tick"] <= before["tick"]:
            is_backward = False
        is_backward = is_backward or tick["tick_kind"] != "enter"
        if tick["end"] > work:
            spans[COMPUTE].append((work, tick["end"], "backward" if is_backward else "forward"))
    for lane in _KINDS:
        spans[lane].sort()
    seconds = max((entry["end"] for entry in timed), default=0.0)
    return Lanes(seconds, {lane: own for lane, own in spans.items() if own}, waits)


def _cause(ends: Sequence[tuple[float, str]], begin: float, end: float) -> str:
    """Invariant 2: what ends at the end of a wait, or a moment after it by another clock."""
    at = bisect.bisect_right(ends, (end + _SHORT, "~"))
    return ends[at - 1][1] if at and ends[at - 1][0] >= begin else LOOP
