# Parameters that begin to train while training: the engine is made again from exactly what it held.

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import gemini_strategy as gs
from gemini_strategy.lightning import strategy_class
from helpers.ranks import run_ranks, values
from lightning_case import (
    cast_reference,
    fit,
    fit_reference,
    load_tree,
    make,
    make_reference,
    module_class,
    ranked_trainer,
    reference_weights,
    same,
    same_adam,
    same_training,
    summable,
    unwrapped,
)

KINDS = ("gemini", "reference")


def unfreezing(tree: str, at: dict[int, str]) -> Any:
    """A callback that freezes these parts of the module, and unfreezes each in its epoch."""

    class Unfreeze(load_tree(tree).callbacks.BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            for name in at.values():
                self.freeze(pl_module.get_submodule(name))

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch in at:
                part = pl_module.get_submodule(at[epoch])
                self.unfreeze_and_add_param_group(part, optimizer, lr=3e-3)

    return Unfreeze()


def run(kind: str, tree: str, precision: str, build: dict[str, Any], **options: Any) -> Any:
    """(trainer, module) of one fit."""
    if kind == "reference":
        module = make_reference(tree, precision, **build)
        return fit_reference(tree, module, precision=precision, **options), module
    module = make(tree, **build)
    return fit(tree, module, precision=precision, **options), module


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_unfreezing_at_an_epoch(tree: str, precision: str, accumulate: int) -> None:
    """In half precision the fp32 values from before the freeze are what is trained on."""
    results = [
        run(
            kind,
            tree,
            precision,
            {"schedule": "step"},
            callbacks=[unfreezing(tree, {1: "body.1", 2: "body.5"})],
            max_epochs=4,
            accumulate_grad_batches=accumulate,
        )
        for kind in KINDS
    ]
    trainer = results[0][0]
    groups = trainer.optimizers[0].param_groups
    assert len(groups) == 4
    assert all(p.requires_grad for group in groups for p in group["params"])
    (trainer, module), (reference_trainer, reference) = results
    same(module.losses, reference.losses)
    weights = trainer.strategy.lightning_module_state_dict()
    assert weights["frozen"].dtype is torch.float32
    optimizer = reference_trainer.optimizers[0]
    same(weights, reference_weights(reference, optimizer))
    same_adam(
        trainer.strategy.optimizer_state(trainer.optimizers[0]), unwrapped(optimizer).state_dict()
    )


def test_backbone_finetuning(tree: str) -> None:
    class Backbone(module_class(tree)):
        @property
        def backbone(self) -> Any:
            return self.body

    def case(reference: bool) -> tuple[Any, Any]:
        torch.manual_seed(0)
        module = Backbone(reference=reference)
        callback = load_tree(tree).callbacks.BackboneFinetuning(2, backbone_initial_lr=1e-3)
        go = fit_reference if reference else fit
        return go(tree, module, callbacks=[callback], max_epochs=5), module

    same_training(*case(False), *case(True))


def test_parameters_that_were_in_a_group_and_frozen() -> None:
    """No group is added: setting requires_grad is all."""

    class Thawing(module_class("lightning")):
        def configure_optimizers(self) -> Any:
            self.body[1].requires_grad_(False)
            return gs.HybridAdam(self.parameters(), lr=self.lr)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 4:
                self.body[1].requires_grad_(True)

    def case(reference: bool) -> tuple[Any, Any]:
        torch.manual_seed(0)
        module = Thawing(reference=reference)
        return (fit_reference if reference else fit)("lightning", module), module

    same_training(*case(False), *case(True))


def test_a_window_of_accumulated_batches_keeps_its_gradients() -> None:
    class Thawing(module_class("lightning")):
        def on_fit_start(self) -> None:
            assert not self.body[1].weight.requires_grad

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 4:
                self.body[1].requires_grad_(True)
                parameters = list(self.body[1].parameters())
                self.optimizers().optimizer.add_param_group({"params": parameters, "lr": 1e-3})

    def case(reference: bool) -> tuple[Any, Any]:
        torch.manual_seed(0)
        module = Thawing(reference=reference)
        module.body[1].requires_grad_(False)
        go = fit_reference if reference else fit
        return go("lightning", module, accumulate_grad_batches=3), module

    same_training(*case(False), *case(True))


def test_the_loss_scale_goes_on() -> None:
    settings = {"initial_scale": 2.0**18, "growth_interval": 4, "hysteresis": 1}
    strategy = strategy_class("lightning")(**settings)
    plugin = load_tree("lightning").plugins.MixedPrecision("16-mixed", "cpu")
    scales: list[float] = []

    class Watching(load_tree("lightning").Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            scales.append(trainer.strategy.engine.scaler.scale)

    trainer = fit(
        "lightning",
        make("lightning"),
        strategy,
        plugins=[plugin],
        callbacks=[unfreezing("lightning", {1: "body.1"}), Watching()],
        max_epochs=2,
    )
    assert scales[10] != settings["initial_scale"]
    # Each step's scale follows from the one before: halved, kept or doubled.
    assert all(b / a in (0.5, 1.0, 2.0) for a, b in itertools.pairwise(scales))
    assert len(trainer.optimizers[0].param_groups) == 3


def test_a_run_that_unfroze_resumes(tree: str, tmp_path: Path) -> None:
    """Lightning freezes again what a checkpoint had unfrozen, until the callback unfreezes it once more."""
    results = []
    for kind in KINDS:
        path = tmp_path / f"{kind}.ckpt"
        first, _ = run(
            kind, tree, "32-true", {}, callbacks=[unfreezing(tree, {1: "body.1"})], max_epochs=2
        )
        first.save_checkpoint(path)
        results.append(
            run(
                kind,
                tree,
                "32-true",
                {"seed": 5},
                callbacks=[unfreezing(tree, {1: "body.1", 3: "body.1"})],
                max_epochs=4,
                ckpt_path=path,
            )
        )
    same_training(*results[0], *results[1])


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_folder_resumes_as_a_file_does(precision: str, tmp_path: Path) -> None:
    """The state of what is frozen again waits beside the engine, in the next checkpoint too."""

    class Seeding(load_tree("lightning").Callback):
        """A folder brings random numbers of its own."""

        def on_train_start(self, *args: Any) -> None:
            torch.manual_seed(3)

    def train(form: Any, until: int, at: dict[int, str], **options: Any) -> Any:
        trainer = fit(
            "lightning",
            make("lightning", seed=until),
            strategy_class("lightning")(state_dict_type=form),
            precision=precision,
            callbacks=[unfreezing("lightning", at), Seeding()],
            max_epochs=until,
            **options,
        )
        trainer.save_checkpoint(tmp_path / form)
        return trainer.strategy.engine.state_dict()

    def case(form: Any) -> Any:
        train(form, 2, {1: "body.1"})
        frozen = train(form, 3, {1: "body.1"}, ckpt_path=tmp_path / form)
        again = {1: "body.1", 4: "body.1"}
        return frozen, train(form, 5, again, ckpt_path=tmp_path / form)

    files, folders = case("full"), case("sharded")
    same(folders, files, "state")
    steps = [int(entry["step"]) for entry in files[1]["optimizer"]["state"].values()]
    assert min(steps) < max(steps)


def test_what_was_frozen_without_a_callback_is_trained_from_its_own_values() -> None:
    """Nothing was rounded when it was frozen."""
    seen = {}

    class Thawing(module_class("lightning")):
        def on_train_epoch_start(self) -> None:
            seen["begin"] = gs.engine_of(self).model_state_dict()["body.1.weight"]
            self.body[1].requires_grad_(True)
            group = {"params": list(self.body[1].parameters())}
            self.trainer.optimizers[0].add_param_group(group)

    module = Thawing()
    module.body[1].requires_grad_(False)
    came = module.body[1].weight.detach().clone()
    trainer = fit("lightning", module, precision="bf16-true")
    same({"w": seen["begin"]}, {"w": came})
    end = trainer.strategy.lightning_module_state_dict()["body.1.weight"]
    assert end.dtype is torch.float32 and not torch.equal(end, came)


def test_unfreezing_inside_a_step_is_refused() -> None:
    class Thawing(module_class("lightning")):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.body[1].requires_grad_(True)
            return super().training_step(batch, batch_idx)

    module = Thawing()
    module.body[1].requires_grad_(False)
    with pytest.raises(gs.GeminiError, match="body.1.weight was unfrozen inside a step"):
        fit("lightning", module)


def test_held_optimizers_stay_in_use() -> None:
    """What a module has kept of `self.optimizers()` shows the states of the new engine."""

    class Keeping(module_class("lightning")):
        def on_train_start(self) -> None:
            self.kept = self.optimizers()

        def on_train_batch_end(self, *args: Any) -> None:
            own = self.kept.state_dict()
            same(own, self.trainer.optimizers[0].state_dict())
            self.seen.append(f"{len(own['param_groups'])} {len(self.kept.state)}")

    module = Keeping()
    fit("lightning", module, callbacks=[unfreezing("lightning", {1: "body.1"})], max_epochs=2)
    assert module.seen[10].startswith("2 ") and module.seen[-1].startswith("3 ")
    assert int(module.seen[-1][2:]) == int(module.seen[10][2:]) + 2


def on_ranks(rank: int, size: int, precision: str) -> Any:
    trainer = ranked_trainer(
        rank,
        size,
        precision=precision,
        callbacks=[unfreezing("lightning", {1: "layers.1", 2: "layers.3"})],
        max_epochs=3,
    )
    trainer.fit(summable("lightning", n_ranks=size))
    state = trainer.strategy.optimizer_state(trainer.optimizers[0])
    return trainer.strategy.lightning_module_state_dict(), state


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_several_ranks_unfreeze_together(precision: str, tmp_path: Path) -> None:
    size = 2
    (weights, state), *_ = values(run_ranks(size, tmp_path, on_ranks, precision))
    module = summable("lightning", n_ranks=size, is_reference=True)
    cast_reference(module, precision)
    trainer = fit_reference(
        "lightning",
        module,
        precision=precision,
        callbacks=[unfreezing("lightning", {1: "layers.1", 2: "layers.3"})],
        max_epochs=3,
    )
    same(weights, reference_weights(module, trainer.optimizers[0]))
    same_adam(state, unwrapped(trainer.optimizers[0]).state_dict())


def test_a_part_that_a_hook_calls_computes_without_the_autocast_of_a_step() -> None:
    """In mixed precision a plain module has fp32 weights there."""
    seen = []

    class Calling(module_class("lightning")):
        def on_train_epoch_end(self) -> None:
            seen.append(self.body[1](torch.ones(2, self.body[1].in_features)))

    fit("lightning", Calling(), precision="bf16-mixed")
    assert seen[0].dtype is torch.float32 and seen[0].isfinite().all()
