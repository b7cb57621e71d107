# A Trainer, its strategy and its callbacks are copied, pickled and saved, before a fit, in it and after it.

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gemini_strategy as gs
from lightning_case import load_tree, make_trainer, same


def tiny_class(tree: str) -> type:
    """A module that pickle finds by its name."""

    class Tiny(load_tree(tree).LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body = torch.nn.Linear(4, 4)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            loss = self.body(batch).square().mean()
            self.log("loss", loss)
            return loss

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.ones(4, 4) / 3, batch_size=1)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    Tiny.__qualname__ = f"Tiny_{tree}"
    return globals().setdefault(Tiny.__qualname__, Tiny)


def saved(value: Any) -> Any:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": saved,
}


def everyday_callbacks(tree: str, folder: Path) -> list[Any]:
    callbacks = load_tree(tree).callbacks
    return [
        callbacks.TQDMProgressBar(),
        callbacks.LearningRateMonitor(),
        callbacks.Timer(),
        callbacks.ModelSummary(),
        callbacks.EarlyStopping("loss"),
        callbacks.StochasticWeightAveraging(1e-3),
        callbacks.ModelCheckpoint(folder, save_top_k=-1, every_n_epochs=1),
    ]


def trainer_of(tree: str, folder: Path, **options: Any) -> Any:
    return make_trainer(
        tree,
        logger=load_tree(tree).loggers.CSVLogger(folder),
        max_epochs=2,
        enable_checkpointing=True,
        enable_progress_bar=True,
        enable_model_summary=True,
        precision="bf16-mixed",
        **options,
    )


@pytest.mark.parametrize("way", WAYS)
def test_before_and_after_a_fit(tree: str, way: str, tmp_path: Path) -> None:
    """What comes back is ordinary; a copied Trainer goes on by itself, with the moments that there were."""
    copied = WAYS[way]
    trainer = trainer_of(tree, tmp_path, callbacks=everyday_callbacks(tree, tmp_path))
    kinds = [type(callback) for callback in trainer.callbacks]
    assert [type(callback) for callback in copied(trainer.callbacks)] == kinds
    assert (
        type(copied(trainer.strategy)) is type(copied(trainer).strategy) is type(trainer.strategy)
    )
    module = tiny_class(tree)()
    trainer.fit(module)
    engine = trainer.strategy.engine
    weights = trainer.strategy.lightning_module_state_dict()
    state = trainer.strategy.optimizer_state(trainer.optimizers[0])["state"]

    assert [type(callback) for callback in copied(trainer.callbacks)] == kinds
    strategy, again = copied(trainer.strategy), copied(trainer)
    for optimizer in (strategy.optimizers[0], again.optimizers[0]):
        assert type(optimizer) is torch.optim.AdamW
        for index, entry in optimizer.state_dict()["state"].items():
            for name, value in state[index].items():
                same(torch.as_tensor(entry[name]), torch.as_tensor(value), name)
    assert strategy.engine is None and gs.engine_of(again.lightning_module) is None
    again.fit_loop.max_epochs += 1
    again.fit(again.lightning_module)
    assert again.global_step == trainer.global_step + 4
    # The one that was copied has not changed, and goes on, too.
    assert trainer.strategy.engine is engine and not engine.closed
    same(trainer.strategy.lightning_module_state_dict(), weights)


def test_while_it_trains(tree: str, tmp_path: Path) -> None:
    class Copying(load_tree(tree).Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            kept.append(copy.deepcopy([c for c in trainer.callbacks if c is not self]))
            kept.append(copy.deepcopy(trainer.optimizers[0]))

    kept: list[Any] = []
    results = []
    for extra in ([], [Copying()]):
        callbacks = everyday_callbacks(tree, tmp_path) + extra
        trainer = trainer_of(tree, tmp_path, callbacks=callbacks)
        trainer.fit(tiny_class(tree)())
        results.append(trainer.strategy.lightning_module_state_dict())
    same(*results)
    assert len(kept) == 2 * 8 and {type(each) for each in kept[1::2]} == {torch.optim.AdamW}


def test_a_copied_optimizer_is_that_of_the_copied_model() -> None:
    """Copied together they are what they were together: the next step of both has the same bits."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 5)
    optimizer = gs.HybridAdam(model.parameters(), lr=0.1)
    engine = gs.manage(model, optimizer, device="cpu", precision="32-true")

    def step(model: Any, optimizer: Any) -> None:
        model(torch.ones(2, 6) / 7).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(model, optimizer)
    other_model, other = copy.deepcopy((model, optimizer))
    assert type(other) is gs.HybridAdam
    assert other.param_groups[0]["params"] == list(other_model.parameters())
    for _ in range(3):
        step(model, optimizer)
        step(other_model, other)
    same(engine.model_state_dict(), dict(other_model.state_dict()))
