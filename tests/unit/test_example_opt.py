"""examples/opt.py: the article's OPT example, shrunk."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import gemini_strategy.colossalai as colossalai
from gemini_strategy.colossalai import Config

ROOT = Path(__file__).parents[2]
TINY = ["--shrink", "12", "--steps", "4", "--lr", "1e-2", "--batch-size", "2", "--length", "16"]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import opt

    yield opt
    colossalai.global_context.config = Config()


def test_it_trains_alike_under_every_policy(example: ModuleType, tmp_path: Path) -> None:
    losses = [
        example.train(example.parse([*TINY, "--placement-policy", policy, *more]))
        for policy, more in (
            ("cuda", []),
            ("auto", ["--device-budget", "1MB"]),
            ("cpu", ["--save", str(tmp_path / "saved")]),
        )
    ]
    assert losses[0] == losses[1] == losses[2]
    assert losses[0][-1] < losses[0][0]
    saved = example.train(example.parse([*TINY, "--weights", str(tmp_path / "saved")]))
    assert saved[0] < losses[0][0]


@pytest.mark.parametrize("kind", ["pipeline", "tensor"])
def test_other_parallelism_is_refused_with_the_way_out(example: ModuleType, kind: str) -> None:
    with pytest.raises(ValueError, match=f"{kind}=.*leave {kind}= out.*device_budget"):
        example.train(example.parse([*TINY, f"--{kind}", "2"]))


def test_ranks_are_started_with_torchrun(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        seen.append(command)
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["opt.py", "--nprocs", "2"])
    assert example.main() == 3
    assert seen[0][-4:] == ["--nproc-per-node=2", "opt.py", "--nprocs", "2"]


def test_the_large_shapes_are_the_published_ones(example: ModuleType) -> None:
    config = example.shape(example.parse(["--model", "1.3b"]))
    assert (config.hidden_size, config.num_hidden_layers, config.ffn_dim) == (2048, 24, 8192)
    assert (config.vocab_size, config.num_attention_heads) == (50272, 32)
