"""Tables and timelines of real engines: what is said is what happened, and saying it changes no bit."""

import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini_strategy as gs

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
    assert (engine.core.plan_info() is None) == ("no plan yet" in engine.report())
    engine.close()


def test_close_ends_a_recording(tmp_path: Path) -> None:
    engine, _ = trained(None)
    engine.timeline(tmp_path / "a.json")
    with pytest.raises(gs.GeminiError, match="already"):
        engine.timeline(tmp_path / "b.json")
    engine.close()
    assert engine.recording is None
    json.loads((tmp_path / "a.json").read_text())
