# Callbacks that average weights: the average has the bits of the callback's own arithmetic over fp32 masters.

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from gemini_strategy.lightning import strategy_class
from helpers.ranks import run_ranks, values
from lightning_case import (
    cast_reference,
    fit,
    fit_reference,
    load_tree,
    make,
    make_reference,
    make_trainer,
    module_class,
    ranked_trainer,
    reference_weights,
    same,
    same_training,
    summable,
)

CALLBACKS = {
    "WeightAveraging": {},
    "EMAWeightAveraging": {"decay": 0.9, "update_every_n_steps": 2},
    "StochasticWeightAveraging": {"swa_lrs": 3e-3, "swa_epoch_start": 1},
}


def callback(tree: str, kind: str) -> Any:
    return getattr(load_tree(tree).callbacks, kind)(**CALLBACKS[kind])


def validating(cls: type) -> type:
    """The module with what its validation saw."""

    class Validating(cls):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.seen.append(float(self.loss(batch)))

    return Validating


@pytest.mark.parametrize("kind", CALLBACKS)
def test_in_fp32_everything_is_as_without_the_engine(tree: str, kind: str) -> None:
    """Losses, what validation sees of the average, the weights at the end, the states."""

    def case(reference: bool) -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        module = validating(module_class(tree))(reference=reference, schedule=None)
        go = fit_reference if reference else fit
        averaging = callback(tree, kind)
        trainer = go(
            tree, module, callbacks=[averaging], max_epochs=4, num_sanity_val_steps=1, seed=2
        )
        return trainer, module, averaging

    ours, theirs = case(False), case(True)
    same_training(*ours[:2], *theirs[:2])
    same(ours[1].seen, theirs[1].seen, "validation")
    assert len(ours[1].seen) == 1 + 4 * 2
    states = [c._average_model.state_dict() for c in (ours[2], theirs[2])]
    same(*map(dict, states), "average")
    assert all(value.device.type == "cpu" for value in states[0].values())


def averages_of_masters(tree: str, kind: str, precision: str, n_epochs: int) -> dict[str, Any]:
    """What torch's AveragedModel makes of the reference's masters, and so the weights after the last epoch."""
    torch.manual_seed(0)
    shadow = make(tree)
    options: dict[str, Any] = {"use_buffers": True}
    if kind == "EMAWeightAveraging":
        options["avg_fn"] = torch.optim.swa_utils.get_ema_avg_fn(0.9)
    average = AveragedModel(shadow, **options)

    class Shadow(load_tree(tree).Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            step = trainer.global_step - 1
            if kind == "EMAWeightAveraging" and step % 2:
                return
            masters = reference_weights(pl_module, trainer.optimizers[0])
            del masters["frozen"]  # rounded there
            shadow.load_state_dict(masters, strict=False)
            average.update_parameters(shadow)

    module = make_reference(tree, precision)
    fit_reference(tree, module, precision=precision, callbacks=[Shadow()], max_epochs=n_epochs)
    return {k.removeprefix("module."): v for k, v in average.state_dict().items() if "." in k}


@pytest.mark.parametrize("kind", ["WeightAveraging", "EMAWeightAveraging"])
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_in_half_precision_the_average_is_of_the_masters(kind: str, precision: str) -> None:
    expected = averages_of_masters("lightning", kind, precision, 2)
    for options in ({}, {"limit_val_batches": 0}):
        averaging = callback("lightning", kind)
        trainer = fit(
            "lightning",
            make("lightning"),
            precision=precision,
            callbacks=[averaging],
            max_epochs=2,
            **options,
        )
        found = averaging._average_model.module.state_dict()
        same(dict(found), expected, "average")
        # Training ends with the average in the module.
        same(trainer.strategy.lightning_module_state_dict(), expected, "weights")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_module_in_half_precision_has_a_whole_average(dtype: torch.dtype) -> None:
    """Validation swaps average and weights: in 16 bits the masters would not come back."""
    weights = []
    for options in ({"callbacks": [callback("lightning", "WeightAveraging")]}, {}):
        module = make("lightning").to(dtype)
        trainer = fit("lightning", module, precision="bf16-true", max_epochs=1, **options)
        weights.append(module.losses)
        del trainer
    same(*weights, "losses")
    averaging = callback("lightning", "WeightAveraging")
    fit("lightning", make("lightning").to(dtype), precision="bf16-true", callbacks=[averaging])
    trained = [p for p in averaging._average_model.parameters() if p.requires_grad]
    assert trained and all(p.dtype is torch.float32 for p in trained)


def run(tree: str, kind: str, precision: str, folder: Path, **options: Any) -> tuple[Any, Any, Any]:
    """A run of four epochs that saves after each, with dropout's numbers those of the epoch."""
    pl = load_tree(tree)

    class Seeding(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            torch.manual_seed(100 + trainer.current_epoch)

    averaging = callback(tree, kind)
    checkpoint = pl.callbacks.ModelCheckpoint(folder, "{epoch}", every_n_epochs=1, save_top_k=-1)
    module = make(tree, seed=6 if "ckpt_path" in options else 0, **options.pop("build", {}))
    go = fit_reference if module.reference else fit
    trainer = go(
        tree,
        module,
        precision=precision,
        callbacks=[Seeding(), averaging, checkpoint],
        enable_checkpointing=True,
        max_epochs=4,
        limit_val_batches=0,
        **options,
    )
    return trainer, module, averaging


@pytest.mark.parametrize("kind", CALLBACKS)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_an_average_is_resumed(tree: str, kind: str, precision: str, tmp_path: Path) -> None:
    straight, module, whole = run(tree, kind, precision, tmp_path)
    path = tmp_path / "epoch=1.ckpt"
    resumed, again, part = run(tree, kind, precision, tmp_path / "again", ckpt_path=path)
    assert again.losses == module.losses[-22:]
    same(*(t.strategy.lightning_module_state_dict() for t in (resumed, straight)), "weights")
    same(*(dict(c._average_model.state_dict()) for c in (part, whole)), "average")
    if precision == "32-true":  # plain Lightning reads the file, too
        plain = {"build": {"reference": True}, "ckpt_path": path}
        reference = run(tree, kind, precision, tmp_path / "plain", **plain)
        same_training(resumed, again, *reference[:2])


@pytest.mark.parametrize("kind", CALLBACKS)
def test_an_average_is_resumed_from_a_folder(tree: str, kind: str, tmp_path: Path) -> None:
    """And another stage gets the average as its weights, as from a file."""

    def sharded() -> Any:
        return strategy_class(tree)(state_dict_type="sharded")

    straight, module, whole = run(tree, kind, "bf16-true", tmp_path, strategy=sharded())
    path = tmp_path / "epoch=1.ckpt"
    more = {"strategy": sharded(), "ckpt_path": path}
    resumed, again, part = run(tree, kind, "bf16-true", tmp_path / "again", **more)
    assert again.losses == module.losses[-22:]
    same(*(t.strategy.engine.model_state_dict() for t in (resumed, straight)), "weights")
    same(*(dict(c._average_model.state_dict()) for c in (part, whole)), "average")
    if kind != "StochasticWeightAveraging":  # it has its average in its own state
        trainer = make_trainer(tree, sharded(), precision="bf16-true")
        trainer.validate(make(tree), ckpt_path=tmp_path / "epoch=3.ckpt", verbose=False)
        states = (
            trainer.strategy.engine.model_state_dict(),
            whole._average_model.module.state_dict(),
        )
        for state in states:
            del state["frozen"]  # rounded, here as with a file
        same(states[0], dict(states[1]), "average as weights")


def test_batch_norm_is_counted_anew_at_the_end(tree: str) -> None:
    """StochasticWeightAveraging adds an epoch without backward for it."""

    class Normed(module_class(tree)):
        def build(self) -> None:
            super().build()
            self.normed = nn.BatchNorm1d(16)

        def loss(self, batch: Any) -> Any:
            tokens, scale = batch
            return (
                super().loss((tokens, scale))
                + self.normed(self.body[0](tokens).flatten(0, 1)).square().mean() * scale.mean()
            )

    def case(reference: bool) -> tuple[Any, Any]:
        torch.manual_seed(0)
        module = Normed(reference=reference)
        go = fit_reference if reference else fit
        averaging = callback(tree, "StochasticWeightAveraging")
        return go(tree, module, callbacks=[averaging], max_epochs=3), module

    same_training(*case(False), *case(True))


@pytest.mark.parametrize("kind", CALLBACKS)
def test_a_callback_keeps_its_class_and_is_copied_as_it(tree: str, kind: str) -> None:
    averaging = callback(tree, kind)
    kept: list[Any] = []

    class Copying(load_tree(tree).Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            assert averaging.state_key == kind and isinstance(averaging, plain)
            averaging._average_model._trainer = None
            kept.append(copy.deepcopy(averaging))

    plain = type(averaging)
    fit(tree, make(tree), callbacks=[averaging, Copying()], max_epochs=2)
    assert type(averaging) is plain and [type(each) for each in kept] == [plain, plain]

    class Failing(module_class(tree)):
        def on_train_start(self) -> None:
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        fit(tree, Failing(), callbacks=[averaging], max_epochs=2)
    assert type(averaging) is plain
    assert type(pickle.loads(pickle.dumps(averaging.state_dict()))) is dict


def test_a_second_fit_and_evaluation_go_on() -> None:
    """The copy for the average is made of masters, as the module is ordinary by then."""
    averaging = callback("lightning", "WeightAveraging")
    module = make("lightning")
    first = fit("lightning", module, precision="bf16-true", callbacks=[averaging])
    masters = first.strategy.lightning_module_state_dict()
    trainer = make_trainer("lightning", precision="bf16-true", callbacks=[averaging], max_epochs=0)
    trainer.fit(module)
    copied = averaging._average_model.module.state_dict()
    same(dict(copied), masters)
    trainer.validate(module, verbose=False)
    after = trainer.strategy.lightning_module_state_dict()
    same(after, masters)


def test_weights_that_come_later_are_refused(tmp_path: Path) -> None:
    error = load_tree("lightning").utilities.exceptions.MisconfigurationException
    with torch.device("meta"):
        blank = make("lightning")
    with pytest.raises(error, match="WeightAveraging copies the module before its parameters"):
        fit("lightning", blank, callbacks=[callback("lightning", "WeightAveraging")])
    strategy = strategy_class("lightning")(weights=str(tmp_path / "some.safetensors"))
    with pytest.raises(error, match="EMAWeightAveraging copies.*weights="):
        fit(
            "lightning",
            make("lightning"),
            strategy,
            callbacks=[callback("lightning", "EMAWeightAveraging")],
        )


def on_ranks(rank: int, size: int) -> Any:
    averaging = load_tree("lightning").callbacks.EMAWeightAveraging(decay=0.75)
    trainer = ranked_trainer(
        rank, size, precision="bf16-mixed", callbacks=[averaging], max_epochs=2
    )
    module = summable("lightning", n_ranks=size)
    trainer.fit(module)
    average = dict(averaging._average_model.module.state_dict())
    return average, trainer.strategy.lightning_module_state_dict()


def test_several_ranks_have_the_same_average(tmp_path: Path) -> None:
    size = 2
    found = values(run_ranks(size, tmp_path, on_ranks))
    same(found[0][0], found[1][0], "the same on all ranks")
    same(found[0][1], found[0][0], "weights")
    shadow = summable("lightning", n_ranks=size)
    average = AveragedModel(
        shadow, avg_fn=torch.optim.swa_utils.get_ema_avg_fn(0.75), use_buffers=True
    )

    class Shadow(load_tree("lightning").Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            masters = reference_weights(pl_module, trainer.optimizers[0])
            del masters["frozen"]
            shadow.load_state_dict(masters, strict=False)
            average.update_parameters(shadow)

    module = summable("lightning", n_ranks=size, is_reference=True)
    cast_reference(module, "bf16-mixed")
    fit_reference("lightning", module, precision="bf16-mixed", callbacks=[Shadow()], max_epochs=2)
    same(found[0][0], dict(average.module.state_dict()), "average")
