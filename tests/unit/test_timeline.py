"""Timelines: what is written says what was logged, and can be read by those for whom it is meant."""

import itertools
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gemini_strategy.errors import GeminiError
from gemini_strategy.report import timeline
from gemini_strategy.report.tables import CLASSES
from gemini_strategy.tools import lanes, svg

SVG = "{http://www.w3.org/2000/svg}"
MB = 1_000_000
CHUNK = 60 * MB  # of weights
RING = 4


class Log:
    """A log as the core makes one, of a model of one unit per chunk: a ring of 4 for the streamed weights."""

    def __init__(self, n_chunks: int) -> None:
        self.classes = [
            "R" if i < n_chunks * 0.3 else "C1" if i < n_chunks * 0.5 else "C2"
            for i in range(n_chunks)
        ]
        self.entries: list[dict[str, Any]] = []
        self.on_device = [i for i, name in enumerate(self.classes) if name != "C2"]
        self.ring: list[int] = []
        self.free = {"fetch": 0.0, "evict": 0.0, "host": 0.0}
        self.now = 0.0
        self.tick_of_pass = 0
        self.n_grads = 0
        for chunk in self.on_device:
            self.add("held", "compute", chunk)

    def add(self, kind: str, stream: str, chunk: int, piece: str = "weight", size: int = 0) -> None:
        seconds = size / 5e10
        start = max(self.now, self.free.get(stream, 0.0)) if size else self.now
        self.free[stream] = start + seconds
        self.entries.append(
            {"kind": kind, "stream": stream, "tick": self.tick_of_pass, "chunk": chunk}
            | {"piece": piece, "bytes": size, "start": start, "end": start + seconds}
        )

    def tick(self, kind: str, chunk: int, activations: int) -> None:
        device = dict.fromkeys(("R", "S1", "S2", "C1", "C2"), 0)
        for held in self.on_device + self.ring:
            device[self.classes[held]] += CHUNK
        n_resident = self.classes.count("R")
        others = {
            "states": n_resident * 5 * CHUNK,
            "grads": (n_resident + min(self.n_grads, 2)) * CHUNK,
            "outside": 300 * MB + activations,
            "free": (RING - len(self.ring)) * CHUNK,
        }
        self.entries.append(
            {"kind": "tick", "stream": "compute", "tick": self.tick_of_pass, "tick_kind": kind}
            | {"id": chunk, "start": self.now, "work": self.now, "end": self.now + 0.002}
            | {"device": device | others, "host": 7 * CHUNK * len(self.classes)}
        )
        self.tick_of_pass += 1
        self.now += 0.002

    def need(self, chunk: int) -> None:
        if self.classes[chunk] != "C2" or chunk in self.ring:
            return
        if len(self.ring) == RING:
            self.add("dropped", "compute", self.ring.pop(0))
        self.add("fetch", "fetch", chunk, size=CHUNK)
        self.ring.append(chunk)

    def step(self) -> None:
        n = len(self.classes)
        self.tick_of_pass = 0
        for i in range(n):
            self.tick("enter", i, 40 * MB * i)
            for ahead in range(i, min(i + 3, n)):
                self.need(ahead)
            if self.classes[i] == "R":
                self.add("device_update", "update", i, "state", size=CHUNK)
            else:
                self.add("host_update", "host", i, "state", size=4 * CHUNK)
                if self.classes[i] == "C1":
                    self.add("refresh", "fetch", i, size=CHUNK)
        for i in reversed(range(n)):
            self.tick("touch", i, 40 * MB * i)
            for ahead in range(i, max(i - 3, -1), -1):
                self.need(ahead)
            self.n_grads += 1
            self.tick("grad", i, 40 * MB * i)
            if self.classes[i] != "R":
                self.add("grad_out", "evict", i, "grad", size=CHUNK)
        self.n_grads = 0


def synthetic(n_chunks: int = 40, steps: int = 1) -> Log:
    log = Log(n_chunks)
    for _ in range(steps):
        log.step()
    return log


def layout(log: Log, **changes: Any) -> dict[str, Any]:
    return {
        "title": "OPTForCausalLM <3.44 G> on cuda:0",
        "n_chunks": len(log.classes),
        "classes": log.classes,
        "modules": [
            [f"decoder.layers.{i}.self_attention", f"decoder.layers.{i}.fc"]
            for i in range(len(log.classes))
        ],
        "when": "deferred",
        "step_seconds": 0.26,
        "device_budget": 225 * MB * len(log.classes),
        "host_budget": 120_000 * MB,
        "policy": "auto",
    } | changes


# ---- the Chrome trace ----


def chrome(entries: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    timeline.export_chrome(entries, folder / "trace.json")
    return json.loads((folder / "trace.json").read_text())


def test_chrome_trace_has_every_entry_on_its_own_thread(tmp_path: Path) -> None:
    log = synthetic(12, steps=2)
    trace = chrome(log.entries, tmp_path)
    names = {
        event["tid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert len(names) == 8 and [name.split(":")[0] for name in names.values()] == [
        "compute", "fetch", "state", "evict", "state_out", "update", "host", "comm",
    ]  # fmt: skip
    spans = [entry for entry in log.entries if entry["kind"] not in ("held", "dropped")]
    durations = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(durations) == len(spans)
    for event, entry in zip(durations, spans, strict=True):
        assert names[event["tid"]].split(":")[0] == entry["stream"]
        assert event["ts"] == round(entry["start"] * 1e6, 3) and event["dur"] >= 0
        assert event["dur"] == round((entry["end"] - entry["start"]) * 1e6, 3)
        if entry["kind"] != "tick":
            assert event["args"]["bytes"] == entry["bytes"]
    marks = [event for event in trace["traceEvents"] if event["ph"] == "i"]
    assert len(marks) == len(log.entries) - len(spans)


def test_chrome_counters_show_the_memory_of_each_tick(tmp_path: Path) -> None:
    log = synthetic(12)
    ticks = [entry for entry in log.entries if entry["kind"] == "tick"]
    counters = [e for e in chrome(log.entries, tmp_path)["traceEvents"] if e["ph"] == "C"]
    device = [event["args"] for event in counters if event["name"] == "device bytes"]
    host = [event["args"] for event in counters if event["name"] == "host bytes"]
    assert device == [tick["device"] for tick in ticks]
    assert host == [{"host": tick["host"]} for tick in ticks]


def test_what_found_the_log_full_is_said(tmp_path: Path) -> None:
    log = synthetic(6)
    entries = [*log.entries, {"kind": "lost", "n": 17}]
    trace = chrome(entries, tmp_path)
    assert list(trace["otherData"].values()) == [17]
    svg.export_svg(entries, layout(log), tmp_path / "a.svg")
    assert "17 entries found the log full" in (tmp_path / "a.svg").read_text()
    svg.export_svg(log.entries, layout(log), tmp_path / "a.svg")
    assert "log full" not in (tmp_path / "a.svg").read_text()


# ---- the picture ----


def drawn(log: Log, folder: Path, **changes: Any) -> ET.Element:
    svg.export_svg(log.entries, layout(log, **changes), folder / "picture.svg")
    return ET.parse(folder / "picture.svg").getroot()


def corners(path: ET.Element) -> list[tuple[float, float]]:
    pairs = re.findall(r"(-?[\d.]+) (-?[\d.]+)", path.attrib["d"])
    return [(float(x), float(y)) for x, y in pairs]


def extent(points: list[tuple[float, float]], x: float) -> tuple[float, float]:
    """(top, bottom) of a polygon of steps at x: the levels of its horizontal edges there."""
    closed = zip(points, points[1:] + points[:1], strict=True)
    ys = [y1 for (x1, y1), (x2, y2) in closed if y1 == y2 and min(x1, x2) < x < max(x1, x2)]
    assert len(ys) == 2
    return min(ys), max(ys)


def texts(root: ET.Element) -> list[str]:
    return ["".join(node.itertext()) for node in root.iter(f"{SVG}text")]


@pytest.mark.parametrize("n_chunks", [1, 6, 40])
def test_heights_of_bands_add_up_to_the_bytes_of_each_tick(n_chunks: int, tmp_path: Path) -> None:
    log = synthetic(n_chunks, steps=2)
    ticks = [entry for entry in log.entries if entry["kind"] == "tick"]
    totals = [sum(tick["device"].values()) for tick in ticks]
    budget = int(max(totals) * 1.1)
    root = drawn(log, tmp_path, device_budget=budget)
    bands = {
        path.attrib["data-band"]: corners(path)
        for path in root.iter(f"{SVG}path")
        if "data-band" in path.attrib
    }
    assert set(bands) == {
        key for tick in ticks for key, value in tick["device"].items() if value > 0
    }
    zero = max(y for points in bands.values() for _, y in points)
    (line,) = (path for path in root.iter(f"{SVG}path") if path.attrib.get("id") == "budget")
    per_pixel = budget / (zero - corners(line)[0][1])
    whole = max(entry["end"] for entry in log.entries)
    for index, tick in enumerate(ticks):
        x = svg._LEFT + svg._PLOT * (tick["start"] + tick["end"]) / 2 / whole
        heights = {key: extent(points, x) for key, points in bands.items()}
        for key, (top, bottom) in heights.items():
            # Coordinates are written with two digits.
            assert abs((bottom - top) * per_pixel - tick["device"][key]) <= 0.02 * per_pixel
        edges = sorted(heights.values(), reverse=True)
        assert edges[0][1] == zero
        assert abs((zero - edges[-1][0]) * per_pixel - totals[index]) <= 0.02 * per_pixel


def test_a_line_is_where_the_weights_are(tmp_path: Path) -> None:
    """Against the bytes that the log gives for each tick: another source for the same fact."""
    log = synthetic(40, steps=2)
    spans = svg.lives(log.entries, 40, log.classes)
    ticks = [entry for entry in log.entries if entry["kind"] == "tick"]
    held = [
        sum(begin <= index < end for chunk in spans for begin, end in chunk)
        for index in range(len(ticks))
    ]
    # A fetch is issued under a tick, so what the tick itself saw is what came before it.
    weights = [sum(tick["device"][name] for name in ("R", "C1", "C2")) // CHUNK for tick in ticks]
    assert [held[i - 1] for i in range(1, len(ticks))] == weights[1:]
    root = drawn(log, tmp_path)
    lines = {
        int(path.attrib["data-chunk"]): path.attrib["d"].count("Z")
        for path in root.iter(f"{SVG}path")
        if "data-chunk" in path.attrib
    }
    assert lines == {chunk: len(parts) for chunk, parts in enumerate(spans)}


def test_lives_of_a_log_by_hand() -> None:
    tick = {"kind": "tick", "tick": 0, "tick_kind": "enter"}

    def entry(kind: str, chunk: int, piece: str = "weight") -> dict[str, Any]:
        return {"kind": kind, "chunk": chunk, "piece": piece}

    log = [
        tick,
        entry("fetch", 2),
        tick,
        entry("fetch", 2),  # refilled: one life
        entry("dropped", 2, "grad"),  # another piece
        tick,
        entry("dropped", 2),
        entry("weight_out", 1),  # written home, and still there
        entry("dropped", 0),
        entry("dropped", 0),
        tick,
        entry("fetch", 0),
        entry("fetch", 9),  # a chunk that is not drawn
        tick,
    ]
    classes = ["R", "C2", "C2"]
    assert svg.lives(log, 3, classes) == [[(0, 2), (3, 5)], [], [(0, 2)]]
    assert svg.lives(log, 3, None) == [[(3, 5)], [], [(0, 2)]]
    held = [entry("held", 1), *log]
    assert svg.lives(held, 3, classes) == [[(3, 5)], [(0, 5)], [(0, 2)]]


def waiting() -> list[dict[str, Any]]:
    """Two ticks of a forward and one of its backward, 10 ms each, and what they waited for, in ms."""

    def tick(number: int, kind: str, start: float, work: float, end: float) -> dict[str, Any]:
        memory = {"device": {"R": CHUNK, "free": 0}, "host": 0}
        times = {"start": start / 1e3, "work": work / 1e3, "end": end / 1e3}
        return {"kind": "tick", "tick": number, "tick_kind": kind, "id": 0, **times, **memory}

    def entry(kind: str, start: float, end: float) -> dict[str, Any]:
        times = {"start": start / 1e3, "end": end / 1e3}
        return {"kind": kind, "tick": 0, "chunk": 0, "piece": "weight", "bytes": 1, **times}

    return [
        entry("fetch", 0, 4),
        tick(0, "enter", 0, 4, 14),
        entry("host_update", 2, 30),
        entry("grad_out", 2, 20),
        tick(1, "enter", 14, 30, 40),
        tick(2, "grad", 40, 40, 50),
        entry("pass_end", 50, 50),
        tick(0, "enter", 80, 80, 90),
    ]


def test_what_compute_waited_for_is_named() -> None:
    found = lanes.lanes_of(waiting())
    assert [(w.cause, round(w.begin * 1e3), round(w.end * 1e3)) for w in found.waits] == [
        ("copies in", 0, 4),
        ("Adam on the host", 14, 30),
        ("the loop", 50, 80),
    ]
    assert [(round(a * 1e3), round(b * 1e3), what) for a, b, what in found.spans["compute"]] == [
        (4, 14, "forward"), (30, 40, "forward"), (40, 50, "backward"), (80, 90, "forward"),
    ]  # fmt: skip
    assert list(found.spans) == ["compute", "copies in", "copies out", "Adam on the host"]
    assert found.busy("Adam on the host") == pytest.approx(0.028)
    assert found.sentence() == (
        "Compute waits in 56 % of 90 ms: 30 ms for the loop, 16 ms for Adam on the host. What helps: a faster loop: "
        "between passes it loads data, logs, or waits for a figure."
    )
    # Work that never waits is bound by compute, whatever else runs.
    busy = [entry for entry in waiting() if entry["kind"] != "tick"]
    busy.append(waiting()[1] | {"start": 0, "work": 0.001, "end": 0.05})
    assert (
        lanes.lanes_of(busy).sentence().startswith("Compute binds: it waits in 2 % of 50 ms. More")
    )
    assert lanes.lanes_of([]).sentence() == ""


def test_lanes_are_to_scale(tmp_path: Path) -> None:
    svg.export_svg(waiting(), layout(synthetic(1)), tmp_path / "a.svg")
    root = ET.parse(tmp_path / "a.svg").getroot()
    drawn_at = {
        path.attrib.get("data-lane") or path.attrib["data-wait"]: [
            tuple(round((float(x) - svg._LEFT) / svg._PLOT * 90) for x in pair)
            for pair in re.findall(r"M([\d.]+) [\d.]+H([\d.]+)", path.attrib["d"])
        ]
        for path in root.iter(f"{SVG}path")
        if {"data-lane", "data-wait"} & set(path.attrib)
        and path.attrib.get("data-lane") not in ("copies in", "Adam on the host")
    }
    assert drawn_at == {
        "forward": [(4, 14), (30, 40), (80, 90)],
        "backward": [(40, 50)],
        "copies out": [(2, 20)],
        "copies in": [(0, 4)],
        "Adam on the host": [(14, 30)],
        "the loop": [(50, 80)],
    }
    said = texts(root)
    assert "Adam on the host" in said and said.count("the loop") == 1
    assert lanes.lanes_of(waiting()).sentence() in said
    ticks = {e.text: float(e.attrib["x"]) for e in root.iter() if "data-time" in e.attrib}
    assert ticks["0"] == svg._LEFT
    for label, x in ticks.items():
        if label != "0":
            assert x == pytest.approx(svg._LEFT + svg._PLOT * float(label.split()[0]) / 90, abs=0.1)


def test_picture_is_self_contained_and_says_what_it_shows(tmp_path: Path) -> None:
    log = synthetic(40)
    root = drawn(log, tmp_path)
    text = (tmp_path / "picture.svg").read_text()
    assert not re.search(r"(href|src|url\(|@import|<script|<style|<image)", text)
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    said = texts(root)
    assert "OPTForCausalLM <3.44 G> on cuda:0" in said
    facts = said[2]
    for fact in ("budget 9 GB", 'policy "auto"', "deferred", "40 chunks: 12 R, 8 C1, 20 C2"):
        assert fact in facts
    for label in ("weights R", "states", "gradients", "outside: torch", "budget"):
        assert label in said
    assert {"Device memory", "compute", "waits", "copies in", "forward", "backward"} <= set(said)


def data(root: ET.Element, key: str) -> dict[int, ET.Element]:
    """Elements by a number that they have."""
    return {int(e.attrib[key]): e for e in root.iter() if key in e.attrib}


def test_chunks_have_the_names_of_their_modules(tmp_path: Path) -> None:
    root = drawn(synthetic(12), tmp_path)
    labels = data(root, "data-module")
    assert set(labels) == set(range(12))
    assert labels[7].text == "decoder.layers.7.self_attention and 1 more"
    title = data(root, "data-chunk")[7].find(f"{SVG}title")
    assert title is not None and title.text is not None
    assert title.text.splitlines()[1:] == ["decoder.layers.7.self_attention", "decoder.layers.7.fc"]
    short = drawn(synthetic(2), tmp_path, modules=[["head"]])
    assert [e.text for e in data(short, "data-module").values()] == [
        "head"
    ]  # and no more than said


@pytest.mark.parametrize("n_chunks", [1, 40])
def test_the_legend_has_what_there_is_and_no_more(n_chunks: int, tmp_path: Path) -> None:
    root = drawn(synthetic(n_chunks), tmp_path)
    (legend,) = (group for group in root.iter(f"{SVG}g") if group.attrib.get("id") == "legend")
    said = ["".join(node.itertext()) for node in legend.iter(f"{SVG}text")]
    assert set(said) == {f"{name}: {CLASSES[name]}" for name in synthetic(n_chunks).classes}
    bottom = max(float(node.attrib["y"]) for node in legend.iter(f"{SVG}text"))
    assert bottom < float(root.attrib["height"])


Box = tuple[float, float, float, float]


def boxes(root: ET.Element) -> list[tuple[str, Box]]:
    """What texts and the squares before them take, by the widest of fonts."""
    found: list[tuple[str, Box]] = []
    for node in root.iter(f"{SVG}text"):
        size = float(node.attrib.get("font-size", 12))
        text = "".join(node.itertext())
        wide = svg._width(text, size)
        left = float(node.attrib["x"])
        left -= {"end": wide, "middle": wide / 2}.get(node.attrib.get("text-anchor", ""), 0)
        y = float(node.attrib["y"])
        found.append((text, (left, y - 0.75 * size, left + wide, y + 0.1 * size)))
    for node in root.iter(f"{SVG}rect"):
        if node.attrib.get("rx"):
            x, y = float(node.attrib["x"]), float(node.attrib["y"])
            found.append(("a square", (x, y, x + 10, y + 10)))
    return found


@pytest.mark.parametrize("n_chunks", [1, 5, 40, 160])
def test_no_text_covers_another_or_a_square(n_chunks: int, tmp_path: Path) -> None:
    names = [[f"base_model.model.model.layers.{i}.self_attn.q_proj.lora_A.default"] * 3
             for i in range(n_chunks)]  # fmt: skip
    classes = [list(CLASSES)[i % 5] for i in range(n_chunks)]
    root = drawn(synthetic(n_chunks), tmp_path, classes=classes, modules=names)
    found = boxes(root)
    for (one, a), (other, b) in itertools.combinations(found, 2):
        is_apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
        assert is_apart, (one, other)
    for text, (left, _, right, _) in found:
        assert left >= 0 and right <= float(root.attrib["width"]), text


def test_spread_keeps_what_has_room() -> None:
    gap = svg._LABEL_GAP
    assert svg._spread([300, 200, 100], 0, 400) == [300, 200, 100]
    assert svg._spread([300, 299, 298], 0, 400) == [300, 300 - gap, 300 - 2 * gap]
    assert svg._spread([5, 4, 3], 0, 400) == [2 * gap, gap, 0]
    assert svg._spread([], 0, 400) == []


@pytest.mark.parametrize("top", [1, 7.7e9, 9.99e8, 24e9, 3.3e12])
@pytest.mark.parametrize("n", [3, 6])
def test_axis_has_round_steps_and_few(top: float, n: int) -> None:
    step = svg._nice_step(top, n)
    assert top / step <= n + 1e-9 and top / step > n / 2.6
    assert f"{step:e}"[0] in "125"


@pytest.mark.parametrize(
    "changes",
    [
        {"classes": None, "when": "on demand", "step_seconds": None},
        {"device_budget": -1, "host_budget": -1},
        {"device_budget": 10**15},  # far above what is used
        {"host_budget": 20_000 * MB},
    ],
)
def test_picture_without_a_plan_or_with_other_budgets(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    root = drawn(synthetic(8), tmp_path, **changes)
    lines = [path for path in root.iter(f"{SVG}path") if path.attrib.get("id") == "budget"]
    assert len(lines) == (0 if changes.get("device_budget") in (-1, 10**15) else 1)


def test_empty_log_makes_an_empty_picture(tmp_path: Path) -> None:
    log = synthetic(4)
    svg.export_svg([], layout(log), tmp_path / "a.svg")
    ET.parse(tmp_path / "a.svg")
    assert not [e for e in chrome([], tmp_path)["traceEvents"] if e["ph"] != "M"]


# ---- recording ----


class FakeCore:
    def __init__(self, log: Log) -> None:
        self.log = log
        self.capacities: list[int] = []
        self.n_ended = 0

    def stats(self) -> dict[str, Any]:
        return {"chunks": len(self.log.classes), "device_budget_bytes": 9_000 * MB}

    def plan_info(self) -> None:
        return None

    def timeline_begin(self, capacity: int) -> None:
        self.capacities.append(capacity)

    def timeline_end(self) -> list[dict[str, Any]]:
        self.n_ended += 1
        return self.log.entries


def fake_engine(n_chunks: int = 8) -> Any:
    model = SimpleNamespace(parameters=lambda: iter(()))
    settings = SimpleNamespace(policy="auto", device_budget=9_000 * MB, host_budget=-1)
    core = FakeCore(synthetic(n_chunks))
    return SimpleNamespace(
        core=core,
        model=model,
        device="cpu",
        precision=None,
        recording=None,
        settings=settings,
        slots=[],
    )


def test_recording_ends_after_its_steps(tmp_path: Path) -> None:
    engine = fake_engine()
    recording = timeline.record(engine, tmp_path / "a.json", tmp_path / "a.svg", 2, svg.export_svg)
    assert engine.recording is recording and engine.core.capacities[0] >= 4096
    recording.after_step()
    assert engine.recording is recording and not (tmp_path / "a.json").exists()
    recording.after_step()
    assert engine.recording is None and engine.core.n_ended == 1
    json.loads((tmp_path / "a.json").read_text())
    ET.parse(tmp_path / "a.svg")
    recording.finish()  # idempotent
    assert engine.core.n_ended == 1


def test_recording_of_a_block(tmp_path: Path) -> None:
    engine = fake_engine()
    with timeline.record(engine, str(tmp_path / "a.json")) as recording:
        for _ in range(5):
            recording.after_step()
        assert engine.core.n_ended == 0
    assert engine.core.n_ended == 1 and (tmp_path / "a.json").exists()
    with pytest.raises(KeyError, match="theirs"), timeline.record(engine, tmp_path / "b.json"):
        raise KeyError("theirs")
    assert engine.recording is None and (tmp_path / "b.json").exists()


def test_an_error_of_the_block_is_not_hidden(tmp_path: Path) -> None:
    engine = fake_engine()

    def fails() -> None:
        raise GeminiError("ours")

    engine.core.timeline_end = fails
    with pytest.raises(KeyError, match="theirs"), timeline.record(engine, tmp_path / "a.json"):
        raise KeyError("theirs")
    with pytest.raises(GeminiError, match="ours"), timeline.record(engine, tmp_path / "a.json"):
        pass


def test_recording_refuses(tmp_path: Path) -> None:
    engine = fake_engine()
    with pytest.raises(ValueError, match="steps=0"):
        timeline.record(engine, tmp_path / "a.json", steps=0)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        timeline.record(engine, tmp_path / "a.json", tmp_path / "nowhere" / "a.svg")
    assert engine.recording is None and not engine.core.capacities
    timeline.record(engine, tmp_path / "a.json")
    with pytest.raises(GeminiError, match="already"):
        timeline.record(engine, tmp_path / "b.json")


def test_room_grows_with_steps_and_chunks_within_bounds(tmp_path: Path) -> None:
    rooms = []
    for n_chunks, steps in ((4, 1), (4, 3), (40, 3), (40, 10_000)):
        engine = fake_engine(n_chunks)
        timeline.record(engine, tmp_path / "a.json", steps=steps)
        rooms += engine.core.capacities
    assert rooms == sorted(rooms) and rooms[1] < rooms[2] and rooms[-1] == 1 << 17
