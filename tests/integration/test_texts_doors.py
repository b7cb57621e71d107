"""What refusals tell people who have no `engine` in sight: the way out is something that they can type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import transformers
from torch import nn

import gemini_strategy as gs
import gemini_strategy.lightning
from gemini_strategy.huggingface import GeminiTrainer

ROWS = [{"x": torch.randn(4)} for _ in range(8)]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(self.other(x)).square().mean()}


class Unfreezes(transformers.TrainerCallback):
    def __init__(self, when: str) -> None:
        setattr(self, when, self._act)

    def _act(self, *_: Any, model: nn.Module, **__: Any) -> None:
        model.other.requires_grad_(True)


def trainer_of(model: nn.Module, folder: Path, *callbacks: Any) -> GeminiTrainer:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, max_steps=2, report_to=[], save_strategy="no"
    )
    return GeminiTrainer(model=model, args=arguments, train_dataset=ROWS, callbacks=list(callbacks))


def test_unfreezing_in_a_callback(tmp_path: Path) -> None:
    with pytest.raises(gs.GeminiError) as found:
        trainer_of(Model(), tmp_path, Unfreezes("on_train_begin")).train()
    assert str(found.value).startswith("other.weight was frozen when the model was managed")
    assert "before trainer.train()" in str(found.value) and "on_init_end" in str(found.value)
    model = Model()
    before = model.other.weight.detach().clone()
    trainer_of(model, tmp_path, Unfreezes("on_init_end")).train()
    assert not torch.equal(before, model.other.weight.detach())


def test_behind_a_trainer_the_engine_is_found_by_its_model(tmp_path: Path) -> None:
    model = Model()
    trainer = trainer_of(model, tmp_path)
    trainer.train()
    with pytest.raises(gs.GuardError) as found:
        model.layer.weight.resize_(2, 2)
    assert "gemini_strategy.engine_of(model).close() first" in str(found.value)
    with pytest.raises(gs.GuardError, match=r"^torch.compile\(\) after manage\(\) is not possible"):
        torch.compile(model)
    gs.engine_of(model).close()
    torch.compile(model)


class Gan(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.other(self.one(batch)).sum()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters()) for part in (self.one, self.other)], []


def test_a_gan_in_a_lightning_module(tmp_path: Path) -> None:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = L.Trainer(
        strategy="gemini", accelerator="cpu", devices=1, default_root_dir=tmp_path, **quiet
    )
    with pytest.raises(Exception, match="exactly one optimizer") as found:
        trainer.fit(Gan(), torch.utils.data.DataLoader(torch.randn(8, 4)))
    assert "fabric.setup(model, optimizer) for each" in str(found.value)
