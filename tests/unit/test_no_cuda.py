"""A machine without a GPU: training on the simulated device is said, once, unless it was asked for."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import gemini_strategy as gs
from gemini_strategy.machine import device as device_module
from gemini_strategy.machine.device import find_device, why_no_cuda


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process that has said nothing yet."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device_module, "_has_told", False)


def report(**how: object) -> str:
    model = nn.Linear(8, 8)
    engine = gs.manage(model, torch.optim.AdamW(model.parameters()), device_budget="24GB", **how)
    text = engine.report()
    engine.close()
    return text


def test_one_warning_that_names_the_way_out() -> None:
    with pytest.warns(RuntimeWarning, match="there is no CUDA device here") as found:
        assert "cpu (simulated device)" in report()
        report()
    (told,) = [str(w.message) for w in found if "CUDA" in str(w.message)]
    assert f"({why_no_cuda()})" in told and 'device="cpu"' in told and "simulated" in told
    assert found[0].filename == __file__


def test_nothing_where_it_was_asked_for() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "cpu (simulated device)" in report(device="cpu")
        assert find_device(None, tells=False) == torch.device("cpu")  # another rank of the host


def fails(text: str) -> None:
    raise RuntimeError(text)


@pytest.mark.parametrize(
    ("text", "visible", "why"),
    [
        (
            "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and ...",
            None,
            "Found no NVIDIA driver on your system",
        ),
        (
            "No CUDA GPUs are available",
            "",
            "No CUDA GPUs are available; CUDA_VISIBLE_DEVICES is ''",
        ),
    ],
)
def test_why(text: str, visible: str | None, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", lambda: fails(text))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert why_no_cuda() == why
    with pytest.raises(gs.GeminiError) as found:
        find_device("cuda")
    assert f"({why})" in str(found.value) and 'device="cpu"' in str(found.value)


def test_why_of_a_build_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert why_no_cuda() == f"torch {torch.__version__} is built without CUDA"
