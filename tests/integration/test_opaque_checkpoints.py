"""Checkpoints of Lightning and of transformers' Trainer with an optimizer that steps by itself resume to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from gemini_strategy.huggingface import GeminiTrainer
from gemini_strategy.lightning import GeminiStrategy
from helpers.ranks import run_ranks, values
from helpers.reference import bits
from lightning_case import ranked_trainer

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
}
DATA = torch.randn(24, 16, generator=torch.Generator().manual_seed(1))
each = pytest.mark.parametrize("name", OPTIMIZERS)


class Module(L.LightningModule):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
        self.name = name

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.net(batch).float().square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.name](self.net.parameters())


def _fit(
    name: str, folder: Path, strategy: Any, precision: Any = "32-true", resumed: Path | None = None
) -> list[Any]:
    """Three epochs, a checkpoint after each; gives everything that the last one has of model and optimizer."""
    callback = ModelCheckpoint(folder, every_n_epochs=1, save_top_k=-1, filename="{epoch}")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=1,
        precision=precision,
        strategy=strategy,
        callbacks=[callback],
        **quiet,
    )
    trainer.fit(Module(name), DataLoader(DATA, batch_size=8), ckpt_path=resumed)
    path = folder / "end.ckpt"
    trainer.save_checkpoint(path)
    if path.is_dir():
        return []
    found = torch.load(path)
    return [_flat(found["state_dict"]), _flat(found["optimizer_states"])]


def _flat(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), bits(value).tolist()
    if isinstance(value, dict):
        return [[key, _flat(value[key])] for key in sorted(value, key=str)]
    return [_flat(item) for item in value] if isinstance(value, list | tuple) else value


@each
def test_lightning_resumes(name: str, tmp_path: Path) -> None:
    """Here, in Lightning's own strategy and from its checkpoints, with the bits of the run that was not interrupted."""
    want = _fit(name, tmp_path / "whole", GeminiStrategy())
    saved = tmp_path / "whole" / "epoch=1.ckpt"
    other = GeminiStrategy(placement_policy="cpu", chunk_size=4096)
    assert _fit(name, tmp_path / "again", other, resumed=saved) == want
    assert _fit(name, tmp_path / "theirs", "auto", resumed=saved) == want
    theirs = tmp_path / "theirs" / "epoch=2.ckpt"
    assert _fit(name, tmp_path / "back", GeminiStrategy(), resumed=theirs) == want


@each
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_lightning_resumes_from_folders(name: str, precision: str, tmp_path: Path) -> None:
    want = _fit(name, tmp_path / "whole", GeminiStrategy(), precision)
    _fit(name, tmp_path / "folders", GeminiStrategy(state_dict_type="sharded"), precision)
    saved = tmp_path / "folders" / "epoch=1.ckpt"
    assert saved.is_dir()
    other = GeminiStrategy(placement_policy="cpu")
    assert _fit(name, tmp_path / "again", other, precision, saved) == want


def _of_ranks(
    rank: int, size: int, name: str, epochs: int, resumed: str | None, folder: str, how: Any
) -> Any:
    """What all ranks have in the end, saved in `folder`, too."""
    strategy = GeminiStrategy(state_dict_type="sharded", **how)
    trainer = ranked_trainer(rank, size, strategy=strategy, max_epochs=epochs)
    trainer.fit(Module(name), DataLoader(DATA, batch_size=4), ckpt_path=resumed)
    trainer.save_checkpoint(Path(folder) / f"{epochs}.ckpt")
    strategy.state_dict_type = "full"  # to look at
    weights = trainer.strategy.lightning_module_state_dict()
    return [_flat(weights), _flat(trainer.strategy.optimizer_state(trainer.optimizers[0]))]


@each
def test_lightning_resumes_where_ranks_have_parts(name: str, tmp_path: Path) -> None:
    """On as many ranks, with another budget, to the bit of the run that was not interrupted; and one finds the same."""
    folder, other = str(tmp_path), {"placement_policy": "cpu", "chunk_size": 4096}
    places = [tmp_path / which for which in ("want", "then", "again", "one")]
    for place in places:
        place.mkdir()
    want = values(run_ranks(2, places[0], _of_ranks, name, 3, None, folder, {}))[0]
    then = values(run_ranks(2, places[1], _of_ranks, name, 2, None, folder, {}))[0]
    saved = str(tmp_path / "2.ckpt")
    assert Path(saved).is_dir()
    again = values(run_ranks(2, places[2], _of_ranks, name, 3, saved, folder, other))[0]
    assert again == want != then
    one = run_ranks(1, places[3], _of_ranks, name, 2, saved, folder, other)
    assert values(one)[0] == then


def _train(folder: Path, resumed: bool, bf16: bool, **how: Any) -> list[Any]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    model = LlamaForCausalLM(config)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=2,
        use_cpu=True,
        bf16=bf16,
        report_to=[],
        disable_tqdm=True,
        **how,
    )
    tokens = torch.randint(0, 64, (16, 12), generator=torch.Generator().manual_seed(2))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = GeminiTrainer(model=model, args=arguments, train_dataset=data)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resumed else None)
    state = torch.load(folder / "checkpoint-4" / "optimizer.pt")
    masters = dict(trainer.model.state_dict())
    return [_flat(masters), _flat(state["state"])]


@pytest.mark.parametrize("optim", ["adafactor", "sgd", "rmsprop"])
@pytest.mark.parametrize("bf16", [False, True])
def test_transformers_trainer_resumes(optim: str, bf16: bool, tmp_path: Path) -> None:
    want = _train(tmp_path, False, bf16, optim=optim)
    assert _train(tmp_path, True, bf16, optim=optim) == want
