# GeminiStrategy(state_dict_type="sharded"): checkpoints that are folders, written and read by all ranks.

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint

import gemini_strategy as gs
from gemini_strategy.lightning import strategy_class
from helpers.ranks import run_ranks, values
from helpers.saving import Gate, contents
from lightning_case import (
    fit,
    fit_reference,
    load_tree,
    make,
    make_reference,
    make_trainer,
    module_class,
    ranked_trainer,
    same,
    summable,
)

ALL_PRECISIONS = ("32-true", "bf16-true", "bf16-mixed", "16-mixed")


def sharded(tree: str, **settings: Any) -> Any:
    return strategy_class(tree)(state_dict_type="sharded", **settings)


def state_of(trainer: Any) -> dict[str, Any]:
    return trainer.strategy.engine.state_dict()  # type: ignore[no-any-return]


def run(tree: str, module: Any, precision: str, strategy: Any, **options: Any) -> Any:
    if precision == "16-mixed":
        options["plugins"] = [load_tree(tree).plugins.MixedPrecision("16-mixed", "cpu")]
    else:
        options["precision"] = precision
    return fit(tree, module, strategy, **options)


@pytest.mark.parametrize("precision", ALL_PRECISIONS)
def test_resume_equals_going_on(tree: str, precision: str, tmp_path: Path) -> None:
    """Random numbers, too: nobody seeds an epoch."""
    how = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    module_how = {"schedule": "onecycle", "optimizer": "AdamW"}
    whole = make(tree, **module_how)
    torch.manual_seed(5)
    straight = run(tree, whole, precision, sharded(tree), max_epochs=2, **how)

    first = make(tree, **module_how)
    checkpoint = load_tree(tree).callbacks.ModelCheckpoint(tmp_path, filename="one")
    torch.manual_seed(5)
    run(
        tree,
        first,
        precision,
        sharded(tree),
        max_epochs=1,
        callbacks=[checkpoint],
        enable_checkpointing=True,
        **how,
    )
    folder = Path(checkpoint.best_model_path)
    assert sorted(p.name for p in folder.iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "manifest.json",
        "meta.pt",
    ]
    meta = torch.load(folder / "meta.pt", weights_only=True)
    assert {"callbacks", "epoch", "loops"} <= set(meta)
    assert not {"state_dict", "optimizer_states"} & set(meta)
    second = make(tree, seed=99, **module_how)
    resumed = run(
        tree,
        second,
        precision,
        sharded(tree, placement_policy="cpu", chunk_size=4096),
        max_epochs=2,
        ckpt_path=folder,
        **how,
    )
    same(first.losses + second.losses, whole.losses, "losses")
    same(state_of(resumed), state_of(straight), "state")
    assert resumed.global_step == straight.global_step == 12


def test_a_full_strategy_goes_on_from_a_folder_and_the_other_way_round(tmp_path: Path) -> None:
    first = make("lightning")
    trainer = fit("lightning", first, sharded("lightning"), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    want = state_of(trainer)
    full = fit(
        "lightning",
        make("lightning", seed=9),
        "gemini",
        max_epochs=1,
        ckpt_path=tmp_path / "one.ckpt",
    )
    same(state_of(full), want, "state")
    full.save_checkpoint(tmp_path / "one.ckpt")  # in the folder's place
    assert (tmp_path / "one.ckpt").is_file()
    again = fit(
        "lightning",
        make("lightning", seed=8),
        sharded("lightning"),
        max_epochs=1,
        ckpt_path=tmp_path / "one.ckpt",
    )
    same(state_of(again), want, "state")
    again.save_checkpoint(tmp_path / "one.ckpt")  # in the file's place
    assert (tmp_path / "one.ckpt").is_dir()


def test_lightnings_tool_makes_a_file_for_its_own_strategies(tmp_path: Path) -> None:
    module = make("lightning", optimizer="AdamW")
    trainer = fit("lightning", module, sharded("lightning"), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "folder")
    want = state_of(trainer)
    torch.save(
        _format_checkpoint(_load_distributed_checkpoint(tmp_path / "folder")), tmp_path / "one.ckpt"
    )
    plain = make("lightning", seed=7, optimizer="AdamW")
    fit("lightning", plain, "auto", max_epochs=1, ckpt_path=tmp_path / "one.ckpt")
    for name, value in plain.state_dict().items():
        assert torch.equal(value, want["model"][name]), name
    state = plain.trainer.optimizers[0].state_dict()["state"]
    for index, entry in want["optimizer"]["state"].items():
        for key, value in entry.items():
            assert torch.equal(state[index][key], value), (index, key)


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluating_from_a_folder(stage: str, tmp_path: Path) -> None:
    module = make("lightning")
    trainer = fit("lightning", module, sharded("lightning"), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "all")
    trainer.save_checkpoint(tmp_path / "weights", weights_only=True)
    want = state_of(trainer)["model"]
    for name in ("all", "weights"):
        other = make("lightning", seed=6)
        evaluating = make_trainer("lightning", sharded("lightning"), max_epochs=1)
        getattr(evaluating, stage)(other, ckpt_path=tmp_path / name)
        same(evaluating.strategy.engine.model_state_dict(), want, name)
    assert not list((tmp_path / "weights").glob("*optimizer*"))
    keys = torch.load(tmp_path / "weights" / "meta.pt", weights_only=True)
    assert "optimizer_states" not in keys


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_finder_leaves_no_trace(precision: str, tmp_path: Path) -> None:
    """It saves, trains, loads and removes the folder within one stage, with the engine alive."""
    pl = load_tree("lightning")

    class Finder(pl.callbacks.LearningRateFinder):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            super().on_fit_start(trainer, module)
            assert len(module.losses) == 7
            module.losses.clear()

    class Seeds(pl.Callback):
        def on_train_start(self, *_: Any) -> None:
            torch.manual_seed(3)

    finder = Finder(num_training_steps=7, early_stop_threshold=None, update_attr=False)
    how = {"precision": precision, "default_root_dir": tmp_path}
    ours, theirs = make("lightning"), make_reference("lightning", precision)
    trainer = fit("lightning", ours, sharded("lightning"), callbacks=[finder, Seeds()], **how)
    fit_reference("lightning", theirs, callbacks=[Seeds()], **how)
    same(ours.losses, theirs.losses, "losses")
    full = state_of(fit("lightning", make("lightning"), callbacks=[Seeds()], **how))
    same(state_of(trainer)["model"], full["model"], "weights")
    same(state_of(trainer)["optimizer"]["state"], full["optimizer"]["state"], "moments")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_restoring_within_a_stage(precision: str, tmp_path: Path) -> None:
    """What is there after it is the folder's, at once: weights, moments and steps."""

    class Restoring(module_class("lightning")):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                self.trainer.save_checkpoint(tmp_path / "all")
                self.want = state_of(self.trainer)
            if batch_idx == 7:
                self.trainer._checkpoint_connector.restore(tmp_path / "all")
                same(state_of(self.trainer), self.want, "state")

    torch.manual_seed(0)
    fit("lightning", Restoring(), sharded("lightning"), precision=precision)


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    """ModelCheckpoint removes folders as it removes files."""
    checkpoint = load_tree("lightning").callbacks.ModelCheckpoint(
        tmp_path, every_n_train_steps=1, save_top_k=2, monitor="step", mode="max", save_last=True
    )
    fit(
        "lightning",
        make("lightning"),
        sharded("lightning"),
        max_epochs=1,
        callbacks=[checkpoint],
        enable_checkpointing=True,
    )
    assert len(list(tmp_path.iterdir())) == 3
    assert all((p / "manifest.json").is_file() for p in tmp_path.iterdir())


def test_what_is_refused_by_name(tmp_path: Path) -> None:
    module = make("lightning")
    trainer = make_trainer("lightning", sharded("lightning"), max_epochs=1)
    trainer.strategy.connect(module)
    with pytest.raises(gs.GeminiError, match="no stage has begun"):
        trainer.save_checkpoint(tmp_path / "early")
    trainer.fit(module)
    with pytest.raises(TypeError, match="storage_options have no use"):
        trainer.save_checkpoint(tmp_path / "options", storage_options={})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(gs.GeminiError, match="is there already and is no checkpoint folder"):
        trainer.save_checkpoint(tmp_path / "mine")
    trainer.strategy.engine.save(tmp_path / "plain")
    other = make_trainer("lightning", sharded("lightning"), max_epochs=1)
    with pytest.raises(gs.GeminiError, match=r"was saved by engine.save\(\)"):
        other.fit(make("lightning"), ckpt_path=tmp_path / "plain")
    with pytest.raises(ValueError, match="state_dict_type"):
        strategy_class("lightning")(state_dict_type="both")


@pytest.mark.parametrize("is_plain", [True, False])
def test_a_file_takes_a_folders_place(is_plain: bool, tmp_path: Path) -> None:
    """Also where a checkpoint_io writes it, which knows nothing of folders; its error leaves the folder."""
    lightning = load_tree("lightning")
    fails = []

    class Other(lightning.plugins.TorchCheckpointIO):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            if fails:
                raise OSError(28, "No space left on device")
            super().save_checkpoint(*args, **kwargs)

    path = tmp_path / "one.ckpt"
    fit("lightning", make("lightning"), sharded("lightning")).save_checkpoint(path)
    plugins = [] if is_plain else [Other()]
    trainer = fit("lightning", make("lightning"), strategy_class("lightning")(), plugins=plugins)
    if not is_plain:
        fails.append(1)
        with pytest.raises(OSError, match="No space left"):
            trainer.save_checkpoint(path)
        assert (path / "manifest.json").is_file()
        fails.clear()
    trainer.save_checkpoint(path)
    same(torch.load(path)["state_dict"], state_of(trainer)["model"], "masters")
    assert [p.name for p in tmp_path.iterdir()] == ["one.ckpt"]


def test_in_the_background(tree: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Lightning's AsyncCheckpointIO: the same bytes; the one before goes when the new one is on the disk."""
    lightning = load_tree(tree)
    gate = Gate(monkeypatch)
    seen: list[list[str]] = []

    class Saves(lightning.Callback):
        def __init__(self, folder: Path) -> None:
            self.folder = folder

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            old, new = self.folder / "old", self.folder / "new"
            saving = trainer.strategy.engine._runtime.saving
            if trainer.global_step == 2:
                gate.open()
                trainer.save_checkpoint(old)
            elif trainer.global_step == 3:
                if saving is not None:
                    saving.wait()
                gate.close()
                trainer.save_checkpoint(new)
                trainer.strategy.remove_checkpoint(old)
            elif trainer.global_step == 5 and saving is not None:
                gate.reached.acquire()
                seen.append([p.name for p in self.folder.iterdir() if p.name[0] != "."])
                gate.open()

    def saved(name: str, **options: Any) -> tuple[Any, Any]:
        (tmp_path / name).mkdir()
        module, callbacks = make(tree, optimizer="AdamW"), [Saves(tmp_path / name)]
        trainer = run(tree, module, "bf16-mixed", sharded(tree), callbacks=callbacks, **options)
        assert [p.name for p in (tmp_path / name).iterdir()] == ["new"]
        meta = torch.load(tmp_path / name / "new" / "meta.pt", weights_only=False)
        return (contents(tmp_path / name / "new"), meta["loops"]), state_of(trainer)

    front, state = saved("front")
    back, other_state = saved("back", plugins=[lightning.plugins.AsyncCheckpointIO()])
    assert seen == [["old"]]
    assert back == front
    same(other_state, state, "state")


def test_an_error_in_the_background_ends_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lightning = load_tree("lightning")
    gate = Gate(monkeypatch)
    gate.open(OSError(28, "No space left on device"))
    checkpoint = lightning.callbacks.ModelCheckpoint(tmp_path)
    with pytest.raises(gs.GeminiError, match="No space left on device"):
        fit(
            "lightning",
            make("lightning"),
            sharded("lightning"),
            callbacks=[checkpoint],
            enable_checkpointing=True,
            plugins=[lightning.plugins.AsyncCheckpointIO()],
        )
    assert not list(tmp_path.iterdir())


def on_ranks(rank: int, size: int, folder: str, first: str | None) -> Any:
    """The engine's state after two epochs, or of another model that has gone on from the first one's folder."""
    module = summable("lightning", 0 if first is None else 4, n_ranks=size)
    checkpoint = load_tree("lightning").callbacks.ModelCheckpoint(
        folder, filename="{epoch}", save_top_k=-1
    )
    trainer = ranked_trainer(
        rank,
        size,
        "lightning",
        sharded("lightning", report=False),
        precision="bf16-mixed",
        max_epochs=2,
        callbacks=[checkpoint] if first is None else [],
        enable_checkpointing=first is None,
    )
    trainer.fit(module, ckpt_path=first)
    return trainer.strategy.engine.state_dict()


def test_ranks_write_their_parts_and_go_on(tmp_path: Path) -> None:
    for name in ("a", "b", "saved"):
        (tmp_path / name).mkdir()
    saved = str(tmp_path / "saved")
    want = values(run_ranks(2, tmp_path / "a", on_ranks, saved, None))
    assert len(list((tmp_path / "saved" / "epoch=0.ckpt").glob("*.distcp"))) == 2
    got = values(run_ranks(2, tmp_path / "b", on_ranks, saved, f"{saved}/epoch=0.ckpt"))
    for one in (want[1], *got):
        same(one, want[0], "state")
