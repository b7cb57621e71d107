# Training with several ranks through the Trainer: the bits of one process that sees all batches, however shared.

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from gemini_strategy.lightning import strategy_class
from helpers.ranks import run_ranks, values
from lightning_case import (
    PRECISIONS,
    cast_reference,
    fit_reference,
    load_tree,
    make_trainer,
    ranked_trainer,
    reference_weights,
    same,
    same_adam,
    summable,
    unwrapped,
)

LIGHTNING = "lightning"


def plugins_for(tree: str, precision: str) -> dict[str, Any]:
    if precision != "16-mixed":
        return {"precision": precision}
    return {"plugins": [load_tree(tree).plugins.MixedPrecision("16-mixed", "cpu")]}


def train(
    rank: int,
    size: int,
    tree: str,
    precision: str,
    strategy: dict[str, Any],
    module_options: dict[str, Any],
    options: dict[str, Any],
    seed: int | None = 0,
    ckpt_path: Any = None,
) -> tuple[Any, Any]:
    """A trained module of `size` ranks and its trainer; seed None: each rank builds its own values."""
    module = summable(tree, rank if seed is None else seed, n_ranks=size, **module_options)
    trainer = ranked_trainer(
        rank,
        size,
        tree,
        strategy_class(tree)(report=False, **strategy),
        **plugins_for(tree, precision),
        **options,
    )
    trainer.fit(module, ckpt_path=ckpt_path)
    return trainer, module


def trained(rank: int, size: int, tree: str, cases: list[tuple[Any, ...]]) -> list[Any]:
    found = []
    for precision, strategy, module_options, options in cases:
        trainer, module = train(
            rank, size, tree, precision, strategy, module_options, options, seed=None
        )
        engine = trainer.strategy.engine
        found.append(
            {
                "weights": trainer.strategy.lightning_module_state_dict(),
                "adam": trainer.strategy.optimizer_state(trainer.optimizers[0]),
                "seen": module.seen,
                "loss": float(trainer.callback_metrics["loss"]),
                "steps": trainer.global_step,
                "part": sum(
                    engine._runtime.core.part(slot.id)[1] for slot in engine._runtime.slots
                ),
                "deferred": trainer.strategy.deferred_because,
            }
        )
        engine.close()
    return found


def reference(size: int, tree: str, case: tuple[Any, ...]) -> dict[str, Any]:
    precision, _, module_options, options = case
    built = {**module_options, "is_late": False}
    module = summable(tree, 0, n_ranks=size, is_reference=True, **built)
    cast_reference(module, precision)
    trainer = fit_reference(tree, module, precision=precision, **options)
    return {
        "weights": reference_weights(module, trainer.optimizers[0]),
        "adam": unwrapped(trainer.optimizers[0]).state_dict(),
        "seen": module.seen,
        "loss": float(trainer.callback_metrics["loss"]),
        "steps": trainer.global_step,
        "n": sum(parameter.numel() for parameter in module.parameters()),
    }


def check(size: int, tree: str, cases: list[tuple[Any, ...]], folder: Path) -> list[list[Any]]:
    found = values(run_ranks(size, folder, trained, tree, cases))
    for number, case in enumerate(cases):
        expected = reference(size, tree, case)
        ours = [rank[number] for rank in found]
        where = f"{case[0]} {case[1]} {case[3]}"
        same(ours[0]["weights"], expected["weights"], f"{where} weights")
        same_adam(ours[0]["adam"], expected["adam"])
        assert all(not rank["weights"] and not rank["adam"] for rank in ours[1:])
        assert all(rank["steps"] == expected["steps"] for rank in ours), where
        assert len({rank["loss"] for rank in ours}) == 1, where
        assert ours[0]["loss"] == pytest.approx(expected["loss"], rel=1e-5), where
        seen = [number for rank in ours for number in rank["seen"]]
        assert sorted(seen) == sorted(expected["seen"]), where
        parts = [rank["part"] for rank in ours]
        whole = expected["n"] * size if not case[1].get("enable_distributed_storage", True) else 0
        replicas = case[1].get("device_mesh", (1, size))[0]
        assert sum(parts) == (whole or expected["n"] * replicas), where
    return found


PLAIN: list[tuple[Any, ...]] = [(precision, {}, {}, {}) for precision in PRECISIONS]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_bits_are_those_of_one_process(size: int, tmp_path: Path) -> None:
    cases = [
        *PLAIN,
        ("bf16-mixed", {"placement_policy": "cpu"}, {}, {}),
        ("bf16-true", {"chunk_size": 256, "device_budget": 65536}, {}, {}),
        ("32-true", {"enable_distributed_storage": False}, {}, {}),
        ("bf16-mixed", {"update_schedule": "deferred"}, {"is_late": True}, {}),
        ("bf16-mixed", {}, {}, {"gradient_clip_val": 0.5}),
    ]
    found = check(size, LIGHTNING, cases, tmp_path)
    assert found[0][0]["deferred"] is None and found[0][6]["deferred"] is not None


@pytest.mark.parametrize("size", [2, 4])
def test_accumulated_and_clipped_bits(size: int, tmp_path: Path) -> None:
    cases = [
        ("32-true", {}, {}, {"accumulate_grad_batches": 2}),
        ("bf16-mixed", {"gradient_dtype": "float32"}, {}, {"accumulate_grad_batches": 4}),
        (
            "bf16-mixed",
            {},
            {},
            {"gradient_clip_val": 0.25, "gradient_clip_algorithm": "value"},
        ),
        ("32-true", {}, {"is_manual": True}, {}),
    ]
    if size == 4:
        cases.append(("bf16-mixed", {"device_mesh": (2, 2)}, {}, {"gradient_clip_val": 0.5}))
    check(size, "pytorch_lightning", cases, tmp_path)


# ---- evaluation, files ---------------------------------------------------------------------------


def go_through_files(rank: int, size: int, folder: str) -> dict[str, Any]:
    checkpoint = load_tree(LIGHTNING).callbacks.ModelCheckpoint(
        folder, filename="one", save_on_train_epoch_end=True
    )
    saving = {"max_epochs": 1, "callbacks": [checkpoint], "enable_checkpointing": True}
    straight, _ = train(rank, size, LIGHTNING, "bf16-mixed", {}, {}, {"max_epochs": 2})
    first, module = train(rank, size, LIGHTNING, "bf16-mixed", {}, {}, saving)
    path = str(Path(folder) / "one.ckpt")
    evaluated = first.validate(module, verbose=False)[0]
    predicted = first.predict(module)
    second, _ = train(
        rank, size, LIGHTNING, "bf16-mixed", {}, {}, {"max_epochs": 2}, seed=9, ckpt_path=path
    )
    again = summable(LIGHTNING, 5, n_ranks=size)
    fresh = ranked_trainer(rank, size, precision="bf16-mixed")
    return {
        "straight": straight.strategy.lightning_module_state_dict(),
        "resumed": second.strategy.lightning_module_state_dict(),
        "adam": [t.strategy.optimizer_state(t.optimizers[0]) for t in (straight, second)],
        "evaluated": [evaluated, fresh.validate(again, ckpt_path=path, verbose=False)[0]],
        "predicted": predicted,
    }


def test_files_and_evaluation(tmp_path: Path) -> None:
    found = values(run_ranks(2, tmp_path, go_through_files, str(tmp_path / "files")))
    same(found[0]["resumed"], found[0]["straight"], "weights")
    same(*found[0]["adam"], "adam")
    for rank in found:
        same(*rank["evaluated"], "evaluated")
        same(rank["evaluated"], found[0]["evaluated"], "the same on all ranks")
    # Plain Lightning reads the file, and sees the same.
    path = tmp_path / "files" / "one.ckpt"
    assert [file.name for file in path.parent.iterdir()] == ["one.ckpt"]
    module = summable(LIGHTNING, 3, n_ranks=2)
    trainer = load_tree(LIGHTNING).Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False
    )
    expected = trainer.validate(module, ckpt_path=path, verbose=False)[0]
    for name, value in found[0]["evaluated"][0].items():
        assert value == pytest.approx(expected[name], rel=1e-2)
    ordinary = summable(LIGHTNING, 3, n_ranks=2)
    ordinary.load_state_dict(torch.load(path, weights_only=False)["state_dict"])


def go_alone(rank: int, size: int) -> Any:
    together, module = train(rank, size, LIGHTNING, "32-true", {}, {}, {})
    shared = together.strategy.engine
    alone = make_trainer(LIGHTNING)
    metrics = alone.validate(module, verbose=False)[0]
    engine = alone.strategy.engine
    assert shared.closed and engine.ranks.size == 1 and alone.strategy.launcher is None
    return metrics, alone.strategy.lightning_module_state_dict()


def test_one_device_after_several(tmp_path: Path) -> None:
    found = values(run_ranks(2, tmp_path, go_alone))
    module = summable(LIGHTNING, 0, n_ranks=2, is_reference=True)
    trainer = fit_reference(LIGHTNING, module)
    for metrics, weights in found:
        same(weights, reference_weights(module, trainer.optimizers[0]), "weights")
        assert metrics == found[0][0]


CLIPPED = {"gradient_clip_val": 0.5, "limit_val_batches": 0}


def go_on(trainer: Any, module: Any) -> tuple[Any, Any]:
    """Nothing drops the gradients of a clipped step but a validation: a second `fit` begins with them."""
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    return trainer, module


def fit_twice(rank: int, size: int) -> Any:
    trainer, _ = go_on(*train(rank, size, LIGHTNING, "32-true", {}, {}, CLIPPED))
    return trainer.strategy.lightning_module_state_dict()


def test_a_second_fit_of_two_ranks(tmp_path: Path) -> None:
    found = values(run_ranks(2, tmp_path, fit_twice))
    module = summable(LIGHTNING, 0, n_ranks=2, is_reference=True)
    trainer, _ = go_on(fit_reference(LIGHTNING, module, **CLIPPED), module)
    same(found[0], reference_weights(module, trainer.optimizers[0]), "weights")


def layers_in_sync(rank: int, size: int) -> Any:
    pl = load_tree(LIGHTNING)

    class Swap(pl.plugins.LayerSync):
        def apply(self, model: Any) -> Any:
            kept = model.layers[0]
            model.layers[0] = Stretched(6, 5)
            model.layers[0].weight, model.layers[0].bias = kept.weight, kept.bias
            return model

        def revert(self, model: Any) -> Any:
            raise AssertionError("modules of the engine were taken away")

    trainer, module = train(rank, size, LIGHTNING, "32-true", {}, {}, {"plugins": [Swap()]})
    trainer.validate(module, verbose=False)
    return type(module.layers[0]).__name__, trainer.strategy.lightning_module_state_dict()


class Stretched(torch.nn.Linear):
    """Twice what a Linear gives: its gradients are twice as large."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return 2.0 * super().forward(inputs)


def test_synchronised_layers_are_put_in_before_the_engine(tmp_path: Path) -> None:
    found = values(run_ranks(2, tmp_path, layers_in_sync))
    module = summable(LIGHTNING, 0, n_ranks=2, is_reference=True)
    kept, module.layers[0] = module.layers[0], Stretched(6, 5)
    module.layers[0].weight, module.layers[0].bias = kept.weight, kept.bias
    trainer = fit_reference(LIGHTNING, module)
    same(found[0][1], reference_weights(module, trainer.optimizers[0]), "weights")
    assert [name for name, _ in found] == ["Stretched"] * 2


# ---- decisions of one rank -----------------------------------------------------------------------


def overflow(rank: int, size: int) -> dict[str, Any]:
    trainer, _ = train(
        rank,
        size,
        LIGHTNING,
        "16-mixed",
        {"hysteresis": 1, "initial_scale": 16},
        {"overflows_on": 1},
        {},
    )
    stats = trainer.strategy.engine.stats()
    return {name: stats[name] for name in ("steps", "skipped_steps", "loss_scale")}


def test_overflow_on_one_rank_skips_on_all(tmp_path: Path) -> None:
    found = values(run_ranks(3, tmp_path, overflow))
    assert found[0] == found[1] == found[2]
    assert found[0]["skipped_steps"] == 1 and found[0]["loss_scale"] == 8.0


def requeue(rank: int, size: int, folder: str) -> Any:
    pl = load_tree(LIGHTNING)

    class Ask(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
            if rank == 1 and trainer.global_step == 2:
                os.kill(os.getpid(), signal.SIGUSR1)

    os.environ.update(
        SLURM_JOB_ID="1",
        SLURM_JOB_NAME="train",
        SLURM_NTASKS=str(size),
        SLURM_NTASKS_PER_NODE=str(size),
        SLURM_PROCID=str(rank),
        SLURM_LOCALID=str(rank),
        SLURM_NODEID="0",
    )
    trainer, _ = train(
        rank,
        size,
        LIGHTNING,
        "32-true",
        {},
        {},
        {"callbacks": [Ask()], "default_root_dir": folder},
    )
    return type(trainer.strategy.cluster_environment).__name__, trainer.global_step


def test_a_checkpoint_for_slurm_is_made_by_all_ranks(tmp_path: Path) -> None:
    found = values(run_ranks(2, tmp_path, requeue, str(tmp_path)))
    assert found == [("SLURMEnvironment", 6)] * 2
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=False)
    assert saved["global_step"] == 2 and len(saved["state_dict"])
