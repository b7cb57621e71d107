# Checkpoint files: exact resume, exchange with plain Lightning, and what is refused.

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import gemini_strategy as gs
from gemini_strategy.lightning import strategy_class
from lightning_case import (
    TREES,
    fit,
    fit_reference,
    load_tree,
    make,
    make_reference,
    make_trainer,
    module_class,
    reference_weights,
    same,
    same_adam,
    same_training,
    unwrapped,
)

ALL_PRECISIONS = ("32-true", "bf16-true", "bf16-mixed", "16-mixed")


def seeding(tree: str) -> Any:
    """Lightning restores no random state, so each epoch starts from its own seed."""

    class Seeding(load_tree(tree).Callback):
        def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
            torch.manual_seed(100 + trainer.current_epoch)

    return Seeding()


def run(
    tree: str,
    module: Any,
    precision: str,
    strategy: Any = "gemini",
    ckpt_path: Any = None,
    **options: Any,
) -> Any:
    if precision == "16-mixed":
        options["plugins"] = [load_tree(tree).plugins.MixedPrecision("16-mixed", "cpu")]
    else:
        options["precision"] = precision
    options["callbacks"] = [*options.get("callbacks", []), seeding(tree)]
    return fit(tree, module, strategy, ckpt_path=ckpt_path, **options)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("precision", ALL_PRECISIONS)
def test_resume_equals_going_on(tree: str, precision: str, tmp_path: Path) -> None:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    module_options = {"schedule": "onecycle", "optimizer": "AdamW"}
    settings = {"initial_scale": 2.0**24, "growth_interval": 3}
    whole = make(tree, **module_options)
    straight = run(
        tree, whole, precision, strategy_class(tree)(**settings), max_epochs=2, **options
    )

    first = make(tree, **module_options)
    checkpoint = load_tree(tree).callbacks.ModelCheckpoint(tmp_path, filename="one")
    run(
        tree,
        first,
        precision,
        strategy_class(tree)(**settings),
        max_epochs=1,
        callbacks=[checkpoint],
        enable_checkpointing=True,
        **options,
    )
    second = make(tree, seed=99, **module_options)
    resumed = run(
        tree,
        second,
        precision,
        strategy_class(tree)(**settings),
        max_epochs=2,
        ckpt_path=checkpoint.best_model_path,
        **options,
    )
    same(first.losses + second.losses, whole.losses, "losses")
    same(
        resumed.strategy.lightning_module_state_dict(),
        straight.strategy.lightning_module_state_dict(),
        "weights",
    )
    same(
        resumed.strategy.optimizer_state(resumed.optimizers[0]),
        straight.strategy.optimizer_state(straight.optimizers[0]),
        "optimizer",
    )
    same(resumed.precision_plugin.state_dict(), straight.precision_plugin.state_dict(), "scale")
    assert bool(resumed.precision_plugin.state_dict()) == (precision == "16-mixed")
    assert resumed.global_step == straight.global_step == 12


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_resume_in_the_middle_of_an_epoch(precision: str, tmp_path: Path) -> None:
    def scenario(kind: str) -> tuple[Any, Any]:
        reference = kind == "reference"
        build = (
            (lambda **o: make_reference("lightning", precision, **o))
            if reference
            else (lambda **o: make("lightning", **o))
        )
        go = fit_reference if reference else fit
        callbacks = load_tree("lightning").callbacks
        checkpoint = callbacks.ModelCheckpoint(
            tmp_path / kind, every_n_train_steps=4, save_top_k=-1
        )
        go(
            "lightning",
            build(schedule="step"),
            precision=precision,
            callbacks=[checkpoint],
            enable_checkpointing=True,
        )
        path = next(p for p in (tmp_path / kind).iterdir() if "step=4" in p.name)
        module = build(seed=3, schedule="step")
        return go("lightning", module, precision=precision, ckpt_path=path), module

    same_training(*scenario("gemini"), *scenario("reference"))


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_our_file_in_plain_lightning(tree: str, precision: str, tmp_path: Path) -> None:
    module = make(tree, optimizer="AdamW", schedule="step")
    trainer = run(tree, module, precision)
    path = tmp_path / "ours.ckpt"
    trainer.save_checkpoint(path)
    weights = trainer.strategy.lightning_module_state_dict()

    content = torch.load(path, weights_only=True)
    plain = make(tree, seed=5, optimizer="AdamW", schedule="step")
    assert list(content["state_dict"]) == list(plain.state_dict())
    assert all(
        value.dtype == torch.float32 and value.device.type == "cpu"
        for name, value in content["state_dict"].items()
        if name != "frozen"
    )
    same(content["state_dict"], weights, "file")
    assert list(content["optimizer_states"][0]) == ["state", "param_groups"]

    same(
        dict(module_class(tree).load_from_checkpoint(path).state_dict())["gain"],
        weights["gain"],
        "load_from_checkpoint",
    )

    seen: dict[str, Any] = {}

    class Look(load_tree(tree).Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen["weights"] = {
                k: v.clone() for k, v in pl_module.state_dict().items() if k != "frozen"
            }
            seen["adam"] = copy.deepcopy(trainer.optimizers[0].state_dict())

    resumed = fit(tree, plain, "auto", ckpt_path=path, max_epochs=2, callbacks=[Look()])
    same(seen["weights"], {k: v for k, v in weights.items() if k != "frozen"}, "weights")
    ours = trainer.strategy.optimizer_state(trainer.optimizers[0])
    same_adam(ours, seen["adam"])
    assert resumed.global_step == 22


def test_a_plain_file_in_ours_goes_on_with_the_same_bits(tree: str, tmp_path: Path) -> None:
    path = tmp_path / "plain.ckpt"
    plain = make(tree, optimizer="AdamW", schedule="step")
    fit(tree, plain, "auto").save_checkpoint(path)

    ours, theirs = (
        make(tree, seed=8, optimizer="AdamW", schedule="step"),
        make(tree, seed=9, schedule="step"),
    )
    trainer = fit(tree, ours, ckpt_path=path, max_epochs=2)
    theirs.reference = True
    reference = fit_reference(tree, theirs, ckpt_path=path, max_epochs=2)
    same_training(trainer, ours, reference, theirs)


def test_plain_weights_become_the_masters_in_half_precision(tmp_path: Path) -> None:
    path = tmp_path / "plain.ckpt"
    plain = make("lightning", optimizer="AdamW")
    fit("lightning", plain, "auto").save_checkpoint(path)
    for precision in ("bf16-true", "bf16-mixed"):
        module = make("lightning", seed=4)
        trainer = make_trainer("lightning", precision=precision)
        trainer.validate(module, ckpt_path=path, verbose=False)
        weights = trainer.strategy.lightning_module_state_dict()
        expected = {k: v for k, v in plain.state_dict().items() if k != "frozen"}
        same({k: v for k, v in weights.items() if k != "frozen"}, expected, precision)


def test_scale_is_exchanged_with_mixed_precision(tree: str, tmp_path: Path) -> None:
    module = make(tree)
    settings = {"initial_scale": 2.0**18, "growth_interval": 4, "hysteresis": 1}
    trainer = run(tree, module, "16-mixed", strategy_class(tree)(**settings))
    path = tmp_path / "fp16.ckpt"
    trainer.save_checkpoint(path)
    content = torch.load(path, weights_only=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(content["MixedPrecision"])
    scaler.scale(torch.ones(()))
    assert (
        scaler.get_scale()
        == trainer.strategy.engine.scaler.scale
        == content["GeminiPrecision"]["scale"]
    )

    foreign = {
        **content,
        "MixedPrecision": {**torch.amp.GradScaler("cpu", init_scale=512.0).state_dict()},
    }
    del foreign["GeminiPrecision"]
    torch.save(foreign, path)
    resumed = run(tree, make(tree, seed=2), "16-mixed", ckpt_path=path, max_epochs=1)
    assert resumed.strategy.engine.scaler.scale == 512.0
    assert resumed.strategy.engine.scaler.growth_interval == 2000


def test_saving_after_other_stages(tree: str, tmp_path: Path) -> None:
    module = make(tree)
    trainer = make_trainer(tree, precision="bf16-mixed")
    trainer.validate(module, verbose=False)
    trainer.save_checkpoint(tmp_path / "untrained.ckpt")
    content = torch.load(tmp_path / "untrained.ckpt", weights_only=True)
    fresh = make(tree).state_dict()
    same(
        {k: v for k, v in content["state_dict"].items() if k != "frozen"},
        {k: v for k, v in fresh.items() if k != "frozen"},
    )
    assert content["optimizer_states"] == []

    trainer = fit(tree, module, precision="bf16-mixed")
    trainer.save_checkpoint(tmp_path / "fit.ckpt")
    trainer.test(module, verbose=False)
    trainer.save_checkpoint(tmp_path / "test.ckpt")
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    saved = {
        name: torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
        for name in ("fit", "test", "weights")
    }
    same(saved["fit"]["state_dict"], saved["test"]["state_dict"], "state_dict")
    same(saved["fit"]["optimizer_states"], saved["test"]["optimizer_states"], "optimizer_states")
    same(saved["fit"]["state_dict"], saved["weights"]["state_dict"], "state_dict")
    assert "optimizer_states" not in saved["weights"]

    trainer.strategy.engine.close(dtype=torch.float32)
    assert trainer.strategy.engine is None
    trainer.save_checkpoint(tmp_path / "closed.ckpt")
    closed = torch.load(tmp_path / "closed.ckpt", weights_only=True)
    same(
        {k: v for k, v in closed["state_dict"].items() if k != "frozen"},
        {k: v for k, v in saved["fit"]["state_dict"].items() if k != "frozen"},
        "closed",
    )


def test_weights_of_a_file_serve_every_stage(tree: str, tmp_path: Path) -> None:
    checkpoint = load_tree(tree).callbacks.ModelCheckpoint(tmp_path, save_weights_only=True)
    module = make(tree)
    trainer = fit(tree, module, callbacks=[checkpoint], enable_checkpointing=True)
    expected = trainer.test(module, verbose=False)
    predictions = trainer.predict(module)
    for target in (module, make(tree, seed=6)):
        same(trainer.test(target, ckpt_path="best", verbose=False), expected, "test")
    target, trained_after = make(tree, seed=7), make(tree, seed=7)
    with torch.inference_mode():
        other = make_trainer(tree)
        same(
            other.test(target, ckpt_path=checkpoint.best_model_path, verbose=False),
            expected,
            "test",
        )
        same(other.predict(target, ckpt_path=checkpoint.best_model_path), predictions, "predict")
    target.load_state_dict(trained_after.state_dict())
    same(
        fit(tree, target).strategy.lightning_module_state_dict(),
        fit(tree, trained_after).strategy.lightning_module_state_dict(),
    )
    with pytest.raises(KeyError, match="contains only the model"):
        fit(tree, make(tree), ckpt_path=checkpoint.best_model_path)


def test_edits_in_on_load_checkpoint_count(tmp_path: Path) -> None:
    path = tmp_path / "one.ckpt"
    fit("lightning", make("lightning")).save_checkpoint(path)

    class Editing(module_class("lightning")):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"]["gain"] = torch.full((16,), 3.0)

    module = Editing()
    trainer = make_trainer("lightning")
    trainer.validate(module, ckpt_path=path, verbose=False)
    same(trainer.strategy.lightning_module_state_dict()["gain"], torch.full((16,), 3.0))


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_checkpoint_is_filled_from_the_module(precision: str, tmp_path: Path) -> None:
    """As where a layer is new: its tensors in the checkpoint show the module's memory when manage() comes."""
    path = tmp_path / "one.ckpt"
    fit("lightning", make("lightning"), precision=precision).save_checkpoint(path)

    class Filling(module_class("lightning")):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            own = self.state_dict()
            for name in ("gain", "body.1.weight"):
                checkpoint["state_dict"][name] = own[name]
            self.filled = own["body.1.weight"].clone()

    torch.manual_seed(5)
    module = Filling()
    trainer = make_trainer("lightning", precision=precision)
    trainer.validate(module, ckpt_path=path, verbose=False)
    saved = torch.load(path, weights_only=True)["state_dict"]
    weights = trainer.strategy.lightning_module_state_dict()
    same(weights["body.1.weight"], module.filled.float())
    same(weights["body.0.weight"], saved["body.0.weight"])
    assert not torch.equal(module.filled, saved["body.1.weight"])


def test_strictness(tmp_path: Path) -> None:
    path = tmp_path / "one.ckpt"
    fit("lightning", make("lightning")).save_checkpoint(path)
    content = torch.load(path, weights_only=True)
    content["state_dict"]["stranger"] = content["state_dict"].pop("gain")
    torch.save(content, path)
    module = make("lightning")
    with pytest.raises(RuntimeError, match="(?s)gain.*stranger|stranger.*gain"):
        make_trainer("lightning").validate(module, ckpt_path=path, verbose=False)
    module = make("lightning")
    module.strict_loading = False
    trainer = make_trainer("lightning")
    trainer.validate(module, ckpt_path=path, verbose=False)
    weights = trainer.strategy.lightning_module_state_dict()
    same(weights["gain"], torch.ones(16))
    same(weights["body.1.weight"], content["state_dict"]["body.1.weight"])


def test_own_state_dict_chooses_the_keys(tmp_path: Path) -> None:
    class Choosing(module_class("lightning")):
        def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            state = super().state_dict(*args, **kwargs)
            return {"version": 3, **{k: v for k, v in state.items() if "body" in k}}

    module = Choosing()
    trainer = fit("lightning", module, precision="bf16-mixed")
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    content = torch.load(tmp_path / "one.ckpt", weights_only=True)["state_dict"]
    assert content.pop("version") == 3
    assert content and all(key.startswith("body.") for key in content)
    masters = trainer.strategy.engine.model_state_dict(masters=True)
    same(content, {key: masters[key] for key in content})


def test_own_load_state_dict_is_called_and_restores_masters(tmp_path: Path) -> None:
    path = tmp_path / "one.ckpt"
    first = fit("lightning", make("lightning"), precision="bf16-true")
    first.save_checkpoint(path)

    class Loading(module_class("lightning")):
        def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
            self.seen.append("load")
            return super().load_state_dict(
                {**state, "gain": torch.full((16,), 0.3)}, *args, **kwargs
            )

    module = Loading()
    trainer = make_trainer("lightning", precision="bf16-true")
    trainer.validate(module, ckpt_path=path, verbose=False)
    expected = {**first.strategy.lightning_module_state_dict(), "gain": torch.full((16,), 0.3)}
    same(trainer.strategy.lightning_module_state_dict(), expected)
    assert module.seen == ["load"]


def test_other_number_of_optimizers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "one.ckpt"
    fit("lightning", make("lightning")).save_checkpoint(path)
    content = torch.load(path, weights_only=True)
    content["optimizer_states"] *= 2
    torch.save(content, path)
    with pytest.raises(
        RuntimeError, match="state of 2 optimizers, but strategy='gemini' trains with 1"
    ):
        fit("lightning", make("lightning"), ckpt_path=path, max_epochs=2)


def test_empty_optimizer_state_resets(tmp_path: Path) -> None:
    path = tmp_path / "one.ckpt"
    trainer = fit("lightning", make("lightning"))
    trainer.save_checkpoint(path)
    content = torch.load(path, weights_only=True)
    content["optimizer_states"][0]["state"] = {}
    torch.save(content, path)
    module = make("lightning")
    resumed = fit("lightning", module, ckpt_path=path, max_epochs=2)
    state = resumed.strategy.optimizer_state(resumed.optimizers[0])["state"]
    assert {float(entry["step"]) for entry in state.values()} == {11.0}


def test_objects_in_a_file_need_the_argument(tmp_path: Path) -> None:
    class Storing(module_class("lightning")):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["path"] = Path("somewhere")

    path = tmp_path / "one.ckpt"
    fit("lightning", Storing()).save_checkpoint(path)
    with pytest.raises(Exception, match="(?i)weights.only"):
        make_trainer("lightning").validate(make("lightning"), ckpt_path=path, verbose=False)
    trainer = make_trainer("lightning", strategy_class("lightning")(checkpoint_weights_only=False))
    trainer.validate(make("lightning"), ckpt_path=path, verbose=False)


def test_storage_options_are_left_to_the_checkpoint_io(tmp_path: Path) -> None:
    trainer = fit("lightning", make("lightning"))
    with pytest.raises(TypeError, match="storage_options"):
        trainer.save_checkpoint(tmp_path / "one.ckpt", storage_options={"a": 1})


def test_asynchronous_checkpoints(tmp_path: Path) -> None:
    plugins = load_tree("lightning").plugins
    checkpoint = load_tree("lightning").callbacks.ModelCheckpoint(
        tmp_path, every_n_train_steps=5, save_top_k=-1
    )
    options = {"callbacks": [checkpoint], "enable_checkpointing": True, "precision": "bf16-mixed"}
    fit("lightning", make("lightning"), plugins=[plugins.AsyncCheckpointIO()], **options)
    files = sorted(tmp_path.iterdir())
    theirs = make_reference("lightning", "bf16-mixed")
    weights: list[Any] = []

    class Collect(load_tree("lightning").Callback):
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if trainer.global_step % 5 == 0:
                state = reference_weights(pl_module, unwrapped(trainer.optimizers[0]))
                weights.append({k: v.clone() for k, v in state.items()})

    fit_reference("lightning", theirs, precision="bf16-mixed", callbacks=[Collect()])
    assert len(files) == len(weights) == 2
    by_step = {torch.load(f, weights_only=True)["global_step"]: f for f in files}
    for step, expected in zip((5, 10), weights, strict=True):
        same(torch.load(by_step[step], weights_only=True)["state_dict"], expected, f"step {step}")


def test_scaler_of_gs_takes_the_file(tmp_path: Path) -> None:
    trainer = run("lightning", make("lightning"), "16-mixed")
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    state = torch.load(tmp_path / "one.ckpt", weights_only=True)["GeminiPrecision"]
    scaler = gs.LossScaler()
    scaler.load_state_dict(state)
    assert scaler.state_dict() == trainer.strategy.engine.scaler.state_dict()
