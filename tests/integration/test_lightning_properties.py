# What Lightning's own tests ask of its sharded strategies, and the other files of tests here do not.

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gemini_strategy as gs
from helpers.ranks import run_ranks, values
from lightning_case import (
    PRECISIONS,
    cast_reference,
    fit,
    fit_reference,
    load_fabric,
    load_tree,
    make_trainer,
    module_class,
    ranked_trainer,
    same,
    same_training,
)


def variant(tree: str, base: type | None = None, **methods: Any) -> type:
    return type("Variant", (base or module_class(tree),), methods)


def both(
    tree: str, cls: type, precision: str = "32-true", **options: Any
) -> tuple[Any, Any, Any, Any]:
    """(trainer, module) of a fit with the strategy and of one without, which have the same bits."""
    found: list[Any] = []
    for is_reference in (False, True):
        torch.manual_seed(0)
        module = cls(reference=is_reference)
        if is_reference:
            cast_reference(module, precision)
        run = fit_reference if is_reference else fit
        found += [run(tree, module, precision=precision, **options), module]
    same_training(*found)
    return tuple(found)  # type: ignore[return-value]


# ---- modules -------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(16, 16, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0]


class Recomputed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("block", [Recurrent, lambda: Recomputed(nn.Linear(16, 16), nn.GELU())])
def test_recurrent_and_recomputed_blocks(block: Any, precision: str) -> None:
    def build(self: Any) -> None:
        self.body = nn.Sequential(nn.Embedding(32, 16), block(), nn.Linear(16, 16))

    both("lightning", variant("lightning", build=build), precision, max_epochs=2)


@pytest.mark.parametrize("hook", ["__init__", "configure_model"])
def test_compiled_blocks_are_saved_under_the_names_that_a_plain_trainer_gives(
    hook: str, tree: str, tmp_path: Path
) -> None:
    """And files go both ways, each with `_orig_mod` in its keys."""

    def build(self: Any) -> None:
        if self.body is None:
            layers = [nn.Embedding(32, 16), nn.Linear(16, 33), nn.Linear(33, 16)]
            self.body = nn.Sequential(*(torch.compile(each, backend="eager") for each in layers))

    methods = {"build": build if hook == "__init__" else lambda self: None}
    cls = variant(tree, **methods, **({} if hook == "__init__" else {hook: build}))
    if hook == "__init__":
        both(tree, cls)
    files = {}
    for strategy in ("gemini", "auto"):
        torch.manual_seed(0)
        trainer = fit(tree, cls(optimizer="AdamW"), strategy, limit_val_batches=0)
        files[strategy] = tmp_path / f"{strategy}.ckpt"
        trainer.save_checkpoint(files[strategy])
    ours, theirs = (torch.load(file)["state_dict"] for file in files.values())
    assert list(ours) == list(theirs) and any("_orig_mod" in name for name in ours)
    for strategy, file in zip(("auto", "gemini"), files.values(), strict=True):
        torch.manual_seed(1)
        module = cls(optimizer="AdamW")
        options = {"max_epochs": 1, "limit_val_batches": 0}  # which the file has
        fit(tree, module, strategy, ckpt_path=file, **options)
        same(dict(module.state_dict()), torch.load(file)["state_dict"])


# ---- optimizers and losses -----------------------------------------------------------------------


def test_an_optimizer_over_parameters_of_others_is_refused(tree: str) -> None:
    def configure_optimizers(self: Any) -> Any:
        return torch.optim.AdamW([*self.parameters(), *self.others])

    others = list(nn.Linear(2, 2).parameters())
    cls = variant(tree, configure_optimizers=configure_optimizers, others=others)
    with pytest.raises(gs.GeminiError, match="not the model.s: .*as parts of one module"):
        fit(tree, cls())


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluation_asks_for_no_optimizer(stage: str) -> None:
    def configure_optimizers(self: Any) -> Any:
        raise AssertionError("nothing is trained")

    cls = variant("lightning", configure_optimizers=configure_optimizers)
    getattr(make_trainer("lightning"), stage)(cls())


def no_loss(rank: int, size: int) -> str:
    cls = variant("lightning", training_step=lambda self, batch, batch_idx: None)
    with pytest.raises(Exception) as failure:
        ranked_trainer(rank, size).fit(cls())
    return str(failure.value)


def test_a_step_without_loss_is_refused_on_several_ranks(tmp_path: Path) -> None:
    for text in values(run_ranks(2, tmp_path, no_loss)):
        assert "Skipping the `training_step` by returning None" in text, text


def test_the_plugin_says_where_autocast_is_as_that_of_lightning_does(tree: str) -> None:
    seen = []

    def on_train_start(self: Any) -> None:
        seen.append(self.trainer.precision_plugin.device)

    fit(tree, variant(tree, on_train_start=on_train_start)(), precision="bf16-mixed")
    assert seen == ["cpu"]


# ---- where it runs -------------------------------------------------------------------------------


def test_an_environment_of_kubeflow(tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {
        "KUBERNETES_PORT": "tcp://127.0.0.1:443",
        "MASTER_ADDR": "1.2.3.4",
        "MASTER_PORT": "500",
        "WORLD_SIZE": "20",
        "RANK": "1",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    kubeflow = load_fabric(tree).plugins.environments.KubeflowEnvironment()
    before = load_tree(tree).utilities.rank_zero.rank_zero_only.rank
    try:
        trainer = make_trainer(tree, devices=1, num_nodes=20, plugins=[kubeflow])
    finally:
        load_tree(tree).utilities.rank_zero.rank_zero_only.rank = before
    assert trainer.strategy.cluster_environment is kubeflow
    assert (trainer.world_size, trainer.global_rank, trainer.local_rank) == (20, 1, 0)
    assert trainer.distributed_sampler_kwargs == {"num_replicas": 20, "rank": 1}
