# Logging with `sync_dist=True`, callbacks that log and a DataLoader with workers add no wait of the engine's.

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from gemini_strategy.lightning import strategy_class
from helpers.ranks import run_ranks, values
from lightning_case import load_tree, module_class, ranked_trainer

TREE = "lightning"
SETTINGS = {"device_budget": "160KiB", "chunk_size": 4096}
# Epochs: until a plan is followed that no measured time changes any more, and those that are looked at.
FIRST, LATER = 4, 2
# The calls of the core that may wait.
WAITING = ("drain", "catch_up", "sums", "read", "grad_sumsq", "clip_factor", "save_begin")


class Core:
    """A core that counts what is called of it."""

    def __init__(self, core: Any, calls: Counter[str]) -> None:
        self._core, self._calls = core, calls

    def __getattr__(self, name: str) -> Any:
        self._calls[name] += 1
        return getattr(self._core, name)


class Looks(load_tree(TREE).callbacks.Callback):
    """What the engine has counted in the epochs that are looked at."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == FIRST:
            self.calls: Counter[str] = Counter()
            self.runtime = trainer.strategy.engine._runtime
            self.before = self.runtime.core.stats()
            self.runtime.core = Core(self.runtime.core, self.calls)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == FIRST + LATER - 1:
            self.runtime.core = self.runtime.core._core
            after = self.runtime.core.stats()
            assert after["planned"] and after["plans"] == self.before["plans"]
            assert after["evictions"] > self.before["evictions"]
            assert after["host_waits"] == self.before["host_waits"]
            self.counts = {name: self.calls[name] for name in WAITING}


class Logs(load_tree(TREE).callbacks.Callback):
    def _log(self, trainer: Any, module: Any, name: str) -> None:
        for value in (trainer.global_step, torch.tensor(1.0), module.kept):
            module.log(
                f"{name}_{type(value).__name__}",
                value,
                sync_dist=True,
                on_step=True,
                on_epoch=True,
                batch_size=4,
            )

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        self._log(trainer, module, "start")

    def on_before_zero_grad(self, trainer: Any, module: Any, *_: Any) -> None:
        self._log(trainer, module, "zero")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self._log(trainer, module, "end")
        module.log("outputs", outputs["loss"], sync_dist=True, prog_bar=True, batch_size=4)


class Module(module_class(TREE)):
    """`is_loud`: logs over the ranks in each batch, which processes of its own make."""

    def __init__(self, is_loud: bool, **options: Any) -> None:
        super().__init__(**options)
        self.is_loud = is_loud
        self.kept = torch.zeros(())

    def forward(self, tokens: Any) -> Any:
        return self.body(tokens) @ self.body[0].weight.t()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.kept = loss.detach()
        if self.is_loud:
            options = {"sync_dist": True, "on_step": True, "on_epoch": True}
            self.log("loss", loss, **options)
            self.log_dict({"low": loss, "high": loss * 2}, reduce_fx="max", **options)
        return loss

    def train_dataloader(self) -> DataLoader:
        plain = super().train_dataloader()
        if not self.is_loud:
            return plain
        return DataLoader(plain.dataset, 4, num_workers=2, persistent_workers=True)


def counted(rank: int, size: int, folder: Path, schedule: str) -> dict[str, int]:
    is_loud = folder.name == "loud"
    torch.manual_seed(0)
    looks = Looks()
    trainer = ranked_trainer(
        rank,
        size,
        TREE,
        strategy_class(TREE)(**SETTINGS, report=False, update_schedule=schedule),
        max_epochs=FIRST + LATER,
        limit_val_batches=0,
        callbacks=[looks, Logs()] if is_loud else [looks],
        logger=load_tree(TREE).loggers.CSVLogger(folder) if is_loud else False,
        log_every_n_steps=1,
    )
    trainer.fit(Module(is_loud, width=512))
    return looks.counts


@pytest.mark.parametrize(("size", "schedule"), [(1, "auto"), (2, "auto"), (2, "deferred")])
def test_syncing_logs_callbacks_and_workers_add_no_wait(
    size: int, schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with them have no wait on the host, as those without, and ask the engine for no more."""
    monkeypatch.setenv("GEMINI_RATES", "h2d=10e9,d2h=10e9")
    folders = [tmp_path / "quiet", tmp_path / "loud"]
    for folder in folders:
        folder.mkdir()
    quiet, loud = (values(run_ranks(size, folder, counted, folder, schedule)) for folder in folders)
    assert loud == quiet
