"""Lightning, Fabric, accelerate and Trainer without a GPU: the CPU is said unless the user has asked for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import lightning as L
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, PartialState
from torch import nn

from gemini_strategy.huggingface import GeminiAccelerator, GeminiPlugin, GeminiTrainer
from gemini_strategy.machine import device as device_module

TOLD = "there is no CUDA device here"


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a process that has said nothing yet."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device_module, "_has_told", False)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


ROWS = torch.randn(8, 4)


def trainer(is_asked: bool, folder: Path) -> None:
    how = {"accelerator": "cpu"} if is_asked else {}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    fit = L.Trainer(
        strategy="gemini", devices=1, max_steps=1, default_root_dir=folder, **quiet, **how
    )
    fit.fit(Module(), torch.utils.data.DataLoader(ROWS, batch_size=4))


def fabric(is_asked: bool, folder: Path) -> None:
    how = {"accelerator": "cpu"} if is_asked else {}
    model = nn.Linear(4, 4)
    made = L.Fabric(strategy="gemini", devices=1, **how)
    made.launch()
    made.setup(model, torch.optim.AdamW(model.parameters()))


def accelerator(is_asked: bool, folder: Path) -> None:
    model = nn.Linear(4, 4)
    made = GeminiAccelerator(cpu=is_asked, gemini_plugin=GeminiPlugin(device_budget="1GB"))
    made.prepare(model, torch.optim.AdamW(model.parameters()))
    made.end_training()


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": ROWS[index]}


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).square().mean()}


def hugging_face(is_asked: bool, folder: Path) -> None:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=is_asked, max_steps=1, report_to=[], save_strategy="no"
    )
    GeminiTrainer(model=WithLoss(), args=arguments, train_dataset=Rows()).train()


@pytest.mark.parametrize("door", [trainer, fabric, accelerator, hugging_face])
@pytest.mark.parametrize("is_asked", [False, True], ids=["found", "asked"])
def test_said_unless_asked(
    door: Callable[[bool, Path], None], is_asked: bool, tmp_path: Path
) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        door(is_asked, tmp_path)
    told = [str(w.message) for w in found if TOLD in str(w.message)]
    assert len(told) == (0 if is_asked else 1), told


def test_a_launcher_that_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate launch --cpu says it by the environment."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        accelerator(False, tmp_path)
    assert not [w for w in found if TOLD in str(w.message)]
    assert PartialState()._cpu and accelerate.__version__
