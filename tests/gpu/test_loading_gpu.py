"""Models on the meta device whose first bytes go to a GPU's chunks: as from an ordinary model, under every policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import gemini_strategy as gs
from helpers.reference import Managed, Recipe, assert_same_bits, assert_same_outcome, drive
from helpers.zoo import Mlp, mlp_case
from test_gpu_exact import _deterministic

pytestmark = pytest.mark.gpu

__all__ = ["_deterministic"]

CASE = mlp_case(width=256, depth=4)


def _manage(model: torch.nn.Module, **how: Any) -> gs.Engine:
    optimizer = gs.HybridAdam(model.parameters(), lr=1e-2)
    return gs.manage(model, optimizer, device="cuda", chunk_size="1MiB", **how)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "16-mixed"])
@pytest.mark.parametrize("policy", ["auto", "cpu", "cuda"])
@pytest.mark.parametrize("source", ["file", "modules"])
def test_first_bytes(source: str, policy: str, precision: str, tmp_path: Path) -> None:
    how = {"precision": precision, "placement_policy": policy}
    torch.manual_seed(3)
    ordinary = Mlp(width=256)
    if source == "file":
        save_file(ordinary.state_dict(), tmp_path / "some.safetensors")
        ordinary.load_state_dict(load_file(tmp_path / "some.safetensors"))
    with torch.device("meta"):
        model = Mlp(width=256)
    torch.manual_seed(3)
    engine = _manage(
        model, weights=tmp_path / "some.safetensors" if source == "file" else None, **how
    )
    assert all(p.device.type == "cuda" for p in model.parameters())
    outcomes, states = [], []
    for run in (engine, None):  # one engine at a time on a device
        run = run or _manage(ordinary, **how)
        states.append(run.model_state_dict())
        driver = Managed(run, Recipe(precision=precision, steps=3, clip=1.0, device="cuda"))
        drive(driver, CASE, 3)
        outcomes.append(driver.outcome())
        run.close()
    for name, want in states[1].items():
        assert_same_bits(states[0][name], want, name)
    assert_same_outcome(*outcomes)
