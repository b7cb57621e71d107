"""Tables and timelines of real engines: what is said is what happened, and saying it changes no bit."""

import json
import logging
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini_strategy as gs
from gemini_strategy.report import reporting, tables
from helpers import scripts
from helpers.scenario import MACHINES

BUDGET = 3_000_000
STEPS = 7


def trained(folder: Path | None, budget: int = BUDGET) -> tuple[Any, dict[str, torch.Tensor]]:
    """An engine after 7 steps, the last two recorded if there is a folder, and its weights."""
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = gs.manage(model, optimizer, device_budget=budget, device="cpu")
    for step in range(STEPS):
        if folder is not None and step == STEPS - 2:
            engine.timeline(folder / "steps.json", folder / "steps.svg", steps=2)
        loss = model(torch.randn(16, 256)).square().mean()
        loss.backward()
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return engine, engine.model_state_dict()


@pytest.mark.parametrize("budget", [BUDGET, 60_000_000])
def test_recording_changes_nothing_and_stays_within_the_budget(budget: int, tmp_path: Path) -> None:
    engine, weights = trained(tmp_path, budget)
    engine.close()
    plain, expected = trained(None, budget)
    plain.close()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    events = json.loads((tmp_path / "steps.json").read_text())["traceEvents"]
    memory = [event["args"] for event in events if event["name"] == "device bytes"]
    assert len(memory) >= 2 * 8  # two steps, at least a tick for each unit
    assert max(sum(bytes_of.values()) for bytes_of in memory) <= budget
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in events if event["ph"] == "X")
    ET.parse(tmp_path / "steps.svg")


def test_report_compares_the_plan_with_what_was_measured() -> None:
    engine, _ = trained(None)
    assert "after 7 steps" in engine.report()
    stats = engine.stats()
    assert stats["step_seconds"] > 0 and stats["h2d_gb_s"] > 0 and stats["d2h_gb_s"] > 0
    assert math.isnan(stats["tokens_per_s"])  # inputs without token ids
    assert (engine._runtime.core.plan_info() is None) == ("no plan yet" in engine.report())
    engine.close()


def test_close_ends_a_recording(tmp_path: Path) -> None:
    engine, _ = trained(None)
    engine.timeline(tmp_path / "a.json")
    with pytest.raises(gs.GeminiError, match="already"):
        engine.timeline(tmp_path / "b.json")
    engine.close()
    assert engine._runtime.recording is None
    json.loads((tmp_path / "a.json").read_text())


def test_stall_is_known_while_a_plan_is_followed() -> None:
    engine, _ = trained(None)
    stats = engine.stats()
    assert stats["planned"] and stats["predicted_compute_seconds"] > 0
    assert 0 <= stats["stall_percent"] < 100
    assert "total_peak_bytes" not in stats  # there is no driver to ask
    engine.close()


def test_a_step_asks_for_no_table_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has an entry for every chunk: the step that prints a line of the first plan asks, and no other."""
    asked: set[object] = set()  # a core for each step that did
    note_step = reporting.Reporting.note_step

    class Counted:
        def __init__(self, core: Any) -> None:
            self._core = core

        def __getattr__(self, name: str) -> Any:
            if name == "plan_info":
                asked.add(self)
            return getattr(self._core, name)

    def counted(self: Any, stats: Any) -> None:
        core = self.core
        self.core = Counted(core)
        note_step(self, stats)
        self.core = core

    monkeypatch.setattr(reporting.Reporting, "note_step", counted)
    engine, _ = trained(None)
    assert engine.stats()["planned"] and len(asked) == 1
    engine.close()


@pytest.mark.parametrize(
    ("wanted", "variable", "prints"),
    [(None, None, False), (True, None, True), (None, "1", True), (False, "1", False)],
)
def test_tables_are_printed_once_each_if_wanted(
    wanted: bool | None,
    variable: str | None,
    prints: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("GEMINI_REPORT", raising=False)
    if variable is not None:
        monkeypatch.setenv("GEMINI_REPORT", variable)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    engine = gs.manage(model, optimizer, device_budget=BUDGET, device="cpu", report=wanted)
    for step in range(6):  # it plans after the first, and again when times are known
        if step == 1:
            table = capsys.readouterr().err
            assert table.count("Gemini: the plan") == prints
        model(torch.randn(4, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert capsys.readouterr().err == ""
    engine.close()
    engine.close()
    result = capsys.readouterr()
    assert result.out == "" and result.err.count("after 6 steps") == prints


_LOOP = """
import os, sys, torch
from torch import nn
import gemini_strategy as gs

def train():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    engine = gs.manage(model, optimizer, device_budget="80KB", device="cpu", report=True)
    for _ in range(3):
        model(torch.randn(2, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return engine
"""


ENDS = {  # and how many engines have trained
    "import gc; train(); gc.collect()": 1,  # the engine is gone
    "train(); sys.exit(3)": 1,
    "train(); train(); 1 / 0": 2,
    "train().close()": 1,
    "train(); os.fork() or sys.exit(); os.wait()": 1,
    "pid = os.fork()\nif pid == 0: train()\nelse: os.waitpid(pid, 0)": 1,
}


def test_the_result_is_told_however_the_program_ends(tmp_path: Path) -> None:
    programs = {f"{number}": f"{_LOOP}\n{end}" for number, end in enumerate(ENDS)}
    imports = "import torch, torch._dynamo, gemini_strategy"
    ended = scripts.run_to_the_end(tmp_path, programs, imports)
    for (end, n_results), one in zip(ENDS.items(), ended.values(), strict=True):
        for said in ("Gemini: the plan", "Gemini: the result", "after 3 steps"):
            assert one.stderr.count(said) == n_results, f"{end}: {one.stderr}"


def test_one_line_is_logged_when_the_first_plan_is_followed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="gemini_strategy"):
        engine, _ = trained(None)
    (line,) = (r.getMessage() for r in caplog.records if r.name == "gemini_strategy")
    assert line.startswith(
        'Sequential: 526 k parameters, 526 k trained, on cpu, policy "auto", device budget 3 MB, '
        "host budget what there is; "
    )
    words = "compute on the device|copies to the|Adam on the host"
    assert re.search(rf" m?s a step expected, bound by ({words})", line)
    engine.close()


def test_nothing_is_printed_at_the_end_of_no_training(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(8, 8)
    gs.manage(model, torch.optim.AdamW(model.parameters()), device="cpu", report=True).close()
    assert capsys.readouterr().err == ""


def test_a_skipped_step_counts_as_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Embedding(16, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = gs.manage(model, optimizer, precision="16-mixed", device="cpu", initial_scale=2.0**10)
    for factor in (1.0, math.inf, math.inf, 1.0):
        engine.backward(model(torch.arange(16)).float().square().mean() * factor)
        optimizer.step()
        optimizer.zero_grad()
    stats = engine.stats()
    assert stats["skipped_steps"] == 2 and stats["steps"] == 2
    assert stats["tokens_per_step"] == 16  # not those of three steps in one
    engine.close()


def test_close_after_updates_inside_backward() -> None:
    """Gradients that were used up are not given back; the weights are."""
    results = []
    for ends_step in (True, False):
        torch.manual_seed(3)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine = gs.manage(model, optimizer, device_budget=BUDGET, device="cpu")
        for _ in range(4):
            optimizer.zero_grad()
            engine.backward(model(torch.randn(16, 256)).square().mean(), step=ends_step)
            optimizer.step()
        engine.close()
        results.append([p.detach().clone() for p in model.parameters()])
        grads = [p.grad for p in model.parameters()]
        assert any(g is None for g in grads) == ends_step
    assert all(map(torch.equal, *results))


HOST_PEAK = """
import torch, gemini_strategy as gs
model = torch.nn.Sequential(*[torch.nn.Linear(1536, 1536) for _ in range(20)])
optimizer = torch.optim.AdamW(model.parameters())
engine = gs.manage(model, optimizer, device_budget="200MB", device="cpu", precision="bf16-true")
for _ in range(3):
    engine.model(torch.randn(2, 1536)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
stats = engine.stats()
print(stats["predicted_host_peak_bytes"], stats["host_peak_bytes"])
"""


def test_predicted_host_peak(tmp_path: Path) -> None:
    """Of a process of its own: what it held before, the homes, and the device, which is host memory here.

    The model's tensors go one by one while the homes fill, before the blocks are taken: up to their size less.
    """
    (tmp_path / "peak.py").write_text(HOST_PEAK)
    run = scripts.run(tmp_path, ["peak.py"])
    assert run.returncode == 0, run.stderr
    predicted, measured = map(int, run.stdout.split())
    weights = 20 * 1536 * 1537 * 4
    assert predicted - 1.5 * weights <= measured <= 1.05 * predicted


@pytest.mark.parametrize("width", [16, 256])
def test_spares_take_the_place_of_the_model(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come with the first clipped step, when manage() has long let go of the tensors that it was given."""
    monkeypatch.setenv("GEMINI_RATES", MACHINES["host"])
    monkeypatch.setattr(tables, "host_resident_bytes", lambda: 10**9)
    n_model = 8 * width * (width + 1) * 4
    for device, n_freed in (("cpu", n_model), ("meta", 0)):
        with torch.device(device):
            model = nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))
        budget = {"device_budget": "1.5MB", "precision": "bf16-true", "missing": "init"}
        engine = gs.manage(model, torch.optim.AdamW(model.parameters()), device="cpu", **budget)
        engine.backward(model(torch.randn(4, width)).float().square().mean())
        engine.clip_grad_norm_(1e9)
        engine.optimizer.step()
        stats, plan = engine.stats(), engine._runtime.core.plan_info()
        engine.close()
        assert plan is not None
        spares = stats["spare_bytes"]
        assert (spares > n_model) == (width > 16)  # the small one is all on the device
        beside = plan["device_bytes"] + max(spares - n_freed, 0)
        assert stats["predicted_host_peak_bytes"] == 10**9 + stats["host_bytes"] - spares + beside
