"""What refusals say of the way out."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import gemini_strategy as gs
from helpers.ranks import run_ranks, values


def test_an_argument_without_its_name() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(TypeError) as found:
        gs.manage(model, optimizer, "24GB")
    assert str(found.value).startswith("manage() takes model and optimizer by their place")
    assert "did you mean device_budget='24GB'?" in str(found.value)


@pytest.mark.parametrize(
    ("size", "meant"),
    [("50%", "0.5"), ("24 gigs", '"24GB"'), ("1.5 Gigabytes", '"1.5GB"'), ("200 meg", '"200MB"')],
)
def test_sizes_as_people_say_them(size: str, meant: str) -> None:
    with pytest.raises(ValueError) as found:
        gs.manage(nn.Linear(2, 2), device="cpu", device_budget=size)
    assert str(found.value).endswith(f" Did you mean {meant}?")


def test_a_share_of_nothing_is_not_meant() -> None:
    with pytest.raises(ValueError) as found:
        gs.manage(nn.Linear(2, 2), device="cpu", chunk_size="50%")
    assert "mean" not in str(found.value)


def test_compiling_a_managed_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    engine = gs.manage(model, torch.optim.AdamW(model.parameters()), device="cpu")
    with pytest.raises(gs.GuardError) as found:
        torch.compile(model)
    text = str(found.value)
    assert text.startswith("torch.compile() after manage() is not possible: compile modules before")
    assert "0.weight is managed" in text
    engine.close()


def test_a_checkpoint_of_another_size(tmp_path: Path) -> None:
    def managed(width: int) -> gs.Engine:
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))
        return gs.manage(model, torch.optim.AdamW(model.parameters()), device="cpu")

    with managed(8) as engine:
        engine.save(tmp_path / "saved")
    with managed(4) as engine, pytest.raises(gs.GeminiError) as found:
        engine.load(tmp_path / "saved")

    assert str(found.value).endswith(" more")
    shown = [f"{i}.{kind} has shape" for i in range(8) for kind in ("bias", "weight")]
    places = [str(found.value).find(each) for each in shown if each in str(found.value)]
    assert places == sorted(places) and len(places) < len(shown)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.experts[which](x)


def check_experts(rank: int, size: int) -> str:
    model = Experts()
    optimizer = torch.optim.AdamW(model.parameters())
    engine = gs.manage(
        model, optimizer, device="cpu", device_budget="200kB", chunk_size=4096, timeout=900
    )
    with pytest.raises(gs.GeminiError) as found:
        model(torch.ones(2, 32), rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.close()
    return str(found.value)


def test_expert_modules_on_ranks(tmp_path: Path) -> None:
    """The fact, the way out, and who is where: each once."""
    for rank, text in enumerate(values(run_ranks(2, tmp_path, check_experts))):
        assert text.startswith("the ranks run different modules, or in another order: ")
        assert "every rank has to run all of them" in text
        for other in range(2):
            assert text.count(f"(unit experts.{other})") == 1
        assert f"rank {rank} of 2" in text and len(text) < 600


@pytest.mark.parametrize("is_dropped", [False, True])
@pytest.mark.parametrize("budget", ["80kB", "10MB"])
def test_backward_of_a_graph_whose_engine_was_closed(budget: str, is_dropped: bool) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    engine = gs.manage(model, optimizer, device="cpu", device_budget=budget)
    loss = model(torch.ones(2, 64)).sum()
    engine.close()
    if is_dropped:
        del engine
    with pytest.raises(gs.GeminiError) as found:
        loss.backward()
    text = str(found.value)
    assert text.startswith("backward needs ") and ".weight, of a forward that ran before" in text
    assert "Run backward before close(), or the forward again" in text
    model(torch.ones(2, 64)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
