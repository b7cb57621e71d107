# Stages in any order, modules built anyhow, callbacks, failures: the engine follows and the bits stay.

import copy
import csv
import gc
import math
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

import gemini_strategy as gs
from lightning_case import (
    PRECISIONS,
    cast_reference,
    fit,
    fit_reference,
    load_tree,
    loader,
    make,
    make_reference,
    make_reference_trainer,
    make_trainer,
    module_class,
    reference_weights,
    same,
    same_training,
    unwrapped,
)


def keep_masters(module: Any, optimizer: Any) -> None:
    """What a new reference optimizer needs to start from the old one's masters."""
    for parameter, state in unwrapped(optimizer).state.items():
        low = state.get("remainder", state.get("master"))
        if low is not None:
            parameter._gm_low = low


@pytest.mark.parametrize("precision", PRECISIONS)
def test_stages_in_any_order(tree: str, precision: str) -> None:
    ours, theirs = make(tree), make_reference(tree, precision)
    results: dict[str, list[Any]] = {"ours": [], "theirs": []}
    optimizer = None
    for stage in ("validate", "fit", "test", "predict", "fit", "validate", "fit"):
        for side, module in (("ours", ours), ("theirs", theirs)):
            if side == "ours":
                trainer = make_trainer(tree, precision=precision)
            else:
                reference = trainer = make_reference_trainer(tree, precision)
            torch.manual_seed(2)
            if stage == "fit":
                if side == "theirs" and optimizer is not None:
                    keep_masters(theirs, optimizer)
                trainer.fit(module)
                optimizer = trainer.optimizers[0] if side == "theirs" else optimizer
            elif stage == "predict":
                results[side].append(trainer.predict(module))
            else:
                results[side].append(getattr(trainer, stage)(module, verbose=False))
        if stage == "fit":
            same(ours.losses, theirs.losses, "losses")
            weights = gs.engine_of(ours).model_state_dict(masters=True)
            same(weights, reference_weights(theirs, reference.optimizers[0]), "weights")
    same(results["ours"], results["theirs"], "results")


def test_one_trainer_keeps_its_engine(tree: str) -> None:
    module = make(tree)
    trainer = make_trainer(tree)
    trainer.validate(module, verbose=False)
    evaluating = trainer.strategy.engine
    assert evaluating.optimizer is None and evaluating is gs.engine_of(module)
    trainer.predict(module)
    assert trainer.strategy.engine is evaluating
    trainer.fit(module)
    training = trainer.strategy.engine
    assert evaluating.closed and training.optimizer is trainer.optimizers[0]
    trainer.test(module, verbose=False)
    trainer.validate(module, verbose=False)
    assert trainer.strategy.engine is training and not training.closed
    assert trainer.strategy.model is trainer.strategy.lightning_module is module


def test_a_second_trainer_adopts_or_remakes_the_engine(tree: str) -> None:
    module = make(tree)
    first = fit(tree, module, precision="bf16-mixed")
    engine = first.strategy.engine
    weights = first.strategy.lightning_module_state_dict()
    second = make_trainer(tree, precision="bf16-mixed")
    second.test(module, verbose=False)
    assert second.strategy.engine is engine
    third = make_trainer(tree, "gemini_cpu", precision="bf16-true")
    third.test(module, verbose=False)
    assert engine.closed and third.strategy.engine is not engine
    trainable = {name for name, p in module.named_parameters() if p.requires_grad}
    remade = third.strategy.lightning_module_state_dict()
    same({k: remade[k] for k in trainable}, {k: weights[k] for k in trainable}, "masters")
    assert first.strategy.engine is third.strategy.engine
    assert type(first.optimizers[0]).__name__ == "HybridAdam"


def test_module_becomes_ordinary_when_the_engine_is_closed() -> None:
    module = make("lightning")
    trainer = fit("lightning", module, precision="bf16-mixed")
    expected = trainer.strategy.lightning_module_state_dict()
    trainer.strategy.engine.close(dtype=torch.float32)
    same(
        {k: v for k, v in module.state_dict().items() if k != "frozen"},
        {k: v for k, v in expected.items() if k != "frozen"},
    )
    tokens, _ = next(iter(loader(1)))
    assert module.eval()(tokens).dtype == torch.float32
    fit("lightning", module)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_sanity_check_and_validation_inside_fit(precision: str) -> None:
    options = {
        "num_sanity_val_steps": 2,
        "val_check_interval": 4,
        "precision": precision,
        "max_epochs": 2,
    }
    ours, theirs = make("lightning"), make_reference("lightning", precision)
    trainer, reference = (
        fit("lightning", ours, **options),
        fit_reference("lightning", theirs, **options),
    )
    same_training(trainer, ours, reference, theirs)
    same(dict(trainer.callback_metrics), dict(reference.callback_metrics), "metrics")


@pytest.mark.parametrize("hook", ["configure_model", "configure_sharded_model"])
def test_late_modules_in_every_stage(tree: str, hook: str) -> None:
    module = make(tree, hook=hook)
    trainer = make_trainer(tree, precision="bf16-true")
    trainer.validate(module, verbose=False)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    trainer.fit(module)
    weights = trainer.strategy.lightning_module_state_dict()
    trainer.test(module, verbose=False)
    trainer.predict(module)
    same(trainer.strategy.lightning_module_state_dict(), weights)
    assert weights["body.1.weight"].dtype == torch.float32


def test_a_module_built_in_inference_mode_is_evaluated_and_trained(tree: str) -> None:
    weights = []
    for mode in (torch.no_grad, torch.inference_mode):
        module = make(tree, hook="configure_model")
        with mode():
            make_trainer(tree).validate(module, verbose=False)
        weights.append(fit(tree, module).strategy.lightning_module_state_dict())
    same(*weights)


def test_module_that_is_rebuilt_is_managed_anew() -> None:
    class Rebuilding(module_class("lightning")):
        def configure_model(self) -> None:
            self.body = None
            self.build()

    module = Rebuilding(build="late")
    trainer = make_trainer("lightning")
    trainer.validate(module, verbose=False)
    first = trainer.strategy.engine
    trainer.validate(module, verbose=False)
    assert first.closed and trainer.strategy.engine is not first
    fit("lightning", module)


def test_modules_built_without_memory() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4))

    def build(tied: bool) -> Any:
        class Empty(load_tree("lightning").LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.one = nn.Linear(4, 4)
                self.two = nn.Linear(4, 4)
                if tied:
                    self.two.weight = self.one.weight
                else:
                    self.block = Block()

            def test_step(self, batch: Any, batch_idx: int) -> None:
                self.log("x", self.two(self.one(batch)).sum())

            def test_dataloader(self) -> Any:
                return torch.utils.data.DataLoader(torch.ones(2, 4))

        return Empty

    trainer = make_trainer("lightning")
    with trainer.init_module(empty_init=True):
        module = build(tied=True)()
    assert all(p.is_meta for p in module.parameters())
    trainer.test(module, verbose=False)
    assert module.one.weight is module.two.weight
    assert all(
        torch.isfinite(v).all() for v in trainer.strategy.lightning_module_state_dict().values()
    )
    trainer = make_trainer("lightning")
    with trainer.init_module(empty_init=True):
        module = build(tied=False)()
    with pytest.warns(UserWarning, match="no reset_parameters.*Block"):
        trainer.test(module, verbose=False)
    with trainer.init_module():
        assert build(tied=True)().one.weight.device.type == "cpu"


@pytest.mark.parametrize("manual", [False, True])
def test_hooks_come_in_lightnings_order(tree: str, manual: bool) -> None:
    pl = load_tree(tree)

    def record(names: Iterator[str], owner: str, calls: list[str]) -> dict[str, Any]:
        def wrap(name: str) -> Any:
            def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
                calls.append(f"{owner}.{name}")
                return getattr(super(kinds[owner], self), name)(*args, **kwargs)

            return hook

        return {name: wrap(name) for name in names}

    kinds: dict[str, type] = {}

    def run(strategy: str) -> list[str]:
        calls: list[str] = []
        hooks = [n for n in dir(pl.Callback) if n.startswith("on_") or n in ("setup", "teardown")]
        steps = [
            "backward",
            "configure_callbacks",
            "configure_gradient_clipping",
            "configure_optimizers",
            "lr_scheduler_step",
            "optimizer_step",
            "optimizer_zero_grad",
            "prepare_data",
            "training_step",
            "transfer_batch_to_device",
            "validation_step",
            "zero_grad",
        ]
        module_hooks = [n for n in hooks if hasattr(pl.LightningModule, n)] + steps
        kinds["callback"] = type("Recorder", (pl.Callback,), {})
        kinds["module"] = type("Recorded", (module_class(tree),), {})
        for owner, names in (("callback", hooks), ("module", module_hooks)):
            for name, hook in record(iter(names), owner, calls).items():
                setattr(kinds[owner], name, hook)
        module = kinds["module"](steps_are_manual=manual, schedule="step")
        trainer = make_trainer(
            tree,
            strategy,
            callbacks=[kinds["callback"]()],
            limit_train_batches=3,
            num_sanity_val_steps=1,
            accumulate_grad_batches=1 if manual else 2,
        )
        trainer.fit(module)
        trainer.test(module, verbose=False)
        return calls

    ours, plain = run("gemini"), run("auto")
    assert ours == plain
    assert "callback.on_before_optimizer_step" in ours and "callback.on_after_backward" in ours


def test_logger_and_callbacks(tree: str, tmp_path: Path) -> None:
    pl = load_tree(tree)

    def run(strategy: str, module: Any) -> tuple[Any, Any]:
        logger = pl.loggers.CSVLogger(tmp_path / strategy)
        checkpoint = pl.callbacks.ModelCheckpoint(
            tmp_path / strategy, monitor="val_loss", save_top_k=1
        )
        callbacks = [
            pl.callbacks.LearningRateMonitor("step"),
            pl.callbacks.EarlyStopping("val_loss", patience=1, min_delta=10.0),
            pl.callbacks.ModelSummary(max_depth=2),
            pl.callbacks.GradientAccumulationScheduler({0: 2, 1: 3}),
            checkpoint,
        ]
        trainer = (make_trainer if strategy == "gemini" else make_reference_trainer)(
            tree,
            logger=logger,
            callbacks=callbacks,
            enable_checkpointing=True,
            max_epochs=5,
            log_every_n_steps=1,
            enable_model_summary=True,
        )
        torch.manual_seed(1)
        trainer.fit(module)
        return trainer, logger.metrics if hasattr(logger, "metrics") else logger.experiment.metrics

    ours, theirs = make(tree, schedule="step"), make_reference(tree, "32-true", schedule="step")
    trainer, _ = run("gemini", ours)
    reference, _ = run("auto", theirs)
    same_training(trainer, ours, reference, theirs)
    assert trainer.current_epoch == reference.current_epoch < 5
    assert trainer.lr_scheduler_configs[0].scheduler.get_last_lr() == pytest.approx(
        reference.lr_scheduler_configs[0].scheduler.get_last_lr(), rel=0, abs=0
    )
    logs = {}
    for kind in ("gemini", "auto"):
        with open(tmp_path / kind / "lightning_logs/version_0/metrics.csv", newline="") as file:
            rows = [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]
        # What the engine adds is in the rows of the steps.
        logs[kind] = [{k: v for k, v in r.items() if not k.startswith("gemini/")} for r in rows]
        assert (rows != logs[kind]) == (kind == "gemini")
    assert logs["gemini"] == logs["auto"]
    assert any("lr-HybridAdam/pg1" in row for row in logs["gemini"])


def test_learning_rates_carry_the_name_of_the_users_optimizer(tmp_path: Path) -> None:
    pl = load_tree("lightning")
    logger = pl.loggers.CSVLogger(tmp_path)
    fit(
        "lightning",
        make("lightning", optimizer="AdamW", schedule="step"),
        logger=logger,
        log_every_n_steps=1,
        callbacks=[pl.callbacks.LearningRateMonitor()],
    )
    assert "lr-AdamW/pg1" in (tmp_path / "lightning_logs/version_0/metrics.csv").read_text()


def test_learning_rate_finder(tree: str, tmp_path: Path) -> None:
    module = make(tree)
    trainer = make_trainer(tree, default_root_dir=tmp_path, precision="bf16-mixed")
    tuner = load_tree(tree).tuner.Tuner(trainer)
    finder = tuner.lr_find(
        module,
        num_training=8,
        min_lr=1e-5,
        max_lr=1e-1,
        early_stop_threshold=None,
        update_attr=False,
    )
    assert len(finder.results["loss"]) == 8 and all(map(math.isfinite, finder.results["loss"]))
    fresh = make(tree).state_dict()
    weights = trainer.strategy.lightning_module_state_dict()
    same(
        {k: v for k, v in weights.items() if k != "frozen"},
        {k: v for k, v in fresh.items() if k != "frozen"},
    )
    assert not list(tmp_path.glob(".lr_find*"))
    module.losses.clear()
    torch.manual_seed(1)
    trainer.fit(module)
    theirs = make_reference(tree, "bf16-mixed")
    reference = fit_reference(tree, theirs, precision="bf16-mixed")
    same_training(trainer, module, reference, theirs)


def test_batch_size_finder_sees_memory_errors(tmp_path: Path) -> None:
    class Hungry(module_class("lightning")):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if len(batch[0]) > 8:
                self.loss(batch)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate everything")
            return super().training_step(batch, batch_idx)

    torch.manual_seed(0)
    module = Hungry(batch_size=2)
    trainer = make_trainer("lightning", default_root_dir=tmp_path)
    size = (
        load_tree("lightning")
        .tuner.Tuner(trainer)
        .scale_batch_size(module, steps_per_trial=1, max_trials=5)
    )
    assert size == 8 and module.batch_size == 8
    fresh = make("lightning").state_dict()
    same(trainer.strategy.lightning_module_state_dict(), fresh)
    module.batch_size = 4
    module.losses.clear()
    torch.manual_seed(1)
    trainer.fit(module)
    theirs = make_reference("lightning", "32-true", batch_size=4)
    same_training(trainer, module, fit_reference("lightning", theirs), theirs)


@pytest.mark.parametrize("where", ["forward", "backward", "hook"])
def test_an_exception_leaves_engine_and_weights(tree: str, where: str) -> None:
    class Failing(module_class(tree)):
        is_failing = True

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.is_failing and batch_idx == 3 and where == "forward":
                self.body[0](batch[0])
                raise ZeroDivisionError("forward")
            return super().training_step(batch, batch_idx)

        def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if self.is_failing and where == "backward" and len(self.losses) == 4:

                def fail(_: Any) -> None:
                    raise ZeroDivisionError("backward")

                loss.grad_fn.register_prehook(fail)
            super().backward(loss, *args, **kwargs)

        def on_after_backward(self) -> None:
            if self.is_failing and where == "hook" and len(self.losses) == 4:
                raise ZeroDivisionError("hook")

        def on_exception(self, exception: BaseException) -> None:
            self.seen.append("exception")

    torch.manual_seed(0)
    ours = Failing()
    with pytest.raises(ZeroDivisionError, match=where):
        fit(tree, ours)
    ours.is_failing = False
    engine = gs.engine_of(ours)
    assert engine is not None and not engine.closed
    theirs = make_reference(tree, "32-true")
    fit_reference(tree, theirs, limit_train_batches=3)
    same(engine.model_state_dict(), dict(theirs.state_dict()), "weights")
    trainer, reference = fit(tree, ours, seed=3), fit_reference(tree, theirs, seed=3)
    ours.losses, theirs.losses = ours.losses[-11:], theirs.losses[-11:]
    same_training(trainer, ours, reference, theirs)


@pytest.mark.parametrize(
    "where", ["prepare_data", "setup", "configure_model", "configure_optimizers"]
)
def test_a_failure_before_training_surfaces_as_itself(tree: str, where: str) -> None:
    def fail(self: Any, *args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError(where)

    module = type("Failing", (module_class(tree),), {where: fail})()
    with pytest.raises(ZeroDivisionError, match=where):
        fit(tree, module)


def test_checkpoint_on_exception(tmp_path: Path) -> None:
    class Failing(module_class("lightning")):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 5:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    callback = load_tree("lightning").callbacks.OnExceptionCheckpoint(tmp_path)
    torch.manual_seed(0)
    ours = Failing()
    with pytest.raises(ZeroDivisionError):
        fit(
            "lightning",
            ours,
            precision="bf16-mixed",
            callbacks=[callback],
            enable_checkpointing=True,
        )
    theirs = make_reference("lightning", "bf16-mixed")
    reference = fit_reference("lightning", theirs, precision="bf16-mixed", limit_train_batches=5)
    content = torch.load(callback.ckpt_path, weights_only=True)
    same(content["state_dict"], reference_weights(theirs, reference.optimizers[0]), "weights")


def test_half_precision_model_in_fp32_is_announced() -> None:
    module = make("lightning").to(torch.bfloat16)
    with pytest.warns(UserWarning, match="makes the model's torch.bfloat16 parameters fp32"):
        make_trainer("lightning").validate(module, verbose=False)
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_nothing_to_run_is_torn_down() -> None:
    trainer = make_trainer("lightning")
    trainer.strategy.teardown()
    trainer.strategy.teardown()


def test_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    fit("lightning", make("lightning"))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("precision", PRECISIONS)
def test_buffers_metrics_and_properties(tree: str, precision: str) -> None:
    seen: dict[str, Any] = {}

    class Measuring(module_class(tree)):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(16)
            self.metric = MeanMetric()
            self.metric.persistent(True)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            logits = super().forward(tokens)
            return logits + self.norm(self.body[0](tokens).mean(1)).mean()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.metric(loss)
            self.log("mean", self.metric)
            seen["default dtype"] = torch.get_default_dtype()
            seen["batch dtype"] = batch[1].dtype
            return loss

        def configure_optimizers(self) -> Any:
            seen["device"] = self.device
            seen["steps"] = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    def run(reference: bool) -> tuple[Any, Any]:
        torch.manual_seed(0)
        module = Measuring()
        if not reference:
            return fit(tree, module, precision=precision, sync_batchnorm=True), module
        cast_reference(module, precision)
        return fit_reference(tree, module, precision=precision), module

    trainer, ours = run(False)
    true_half = precision == "bf16-true"
    assert seen == {
        "device": torch.device("cpu"),
        "steps": 11,
        "default dtype": torch.bfloat16 if true_half else torch.float32,
        "batch dtype": torch.bfloat16 if true_half else torch.float32,
    }
    assert torch.get_default_dtype() == torch.float32
    assert ours.dtype == (torch.bfloat16 if true_half else torch.float32)
    assert ours.norm.running_mean.dtype == ours.offset.dtype == torch.float32
    assert not isinstance(ours.norm, nn.SyncBatchNorm)
    same_training(trainer, ours, *run(True))


def test_default_dtype_returns_after_an_exception() -> None:
    class Failing(module_class("lightning")):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit("lightning", Failing(), precision="bf16-true")
    assert torch.get_default_dtype() == torch.float32


def test_module_without_parameters(tree: str) -> None:
    class Bare(load_tree(tree).LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.metric = MeanMetric()
            self.register_buffer("one", torch.ones(1))

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.metric(batch[1] * self.one)
            self.log("mean", self.metric)

    trainer = make_trainer(tree)
    results = trainer.test(Bare(), loader(2), verbose=False)
    assert 0.5 < results[0]["mean"] < 1.5
    assert trainer.strategy.engine is None


def test_modules_that_share_a_model() -> None:
    first, second = make("lightning"), make("lightning", seed=1)
    trainer = fit("lightning", first, precision="bf16-mixed")
    engine = trainer.strategy.engine
    expected = engine.model_state_dict(masters=True)
    second.body = first.body
    other = make_trainer("lightning", precision="bf16-mixed")
    other.validate(second, verbose=False)
    assert engine.closed
    weights = other.strategy.lightning_module_state_dict()
    same(
        {k: v for k, v in weights.items() if "body" in k},
        {k: v for k, v in expected.items() if "body" in k},
    )


def test_optimizer_that_the_module_keeps_goes_on() -> None:
    def run(reference: bool) -> tuple[Any, Any]:
        class Keeping(module_class("lightning")):
            def configure_optimizers(self) -> Any:
                if not hasattr(self, "kept"):
                    self.kept = super().configure_optimizers()
                return self.kept

        torch.manual_seed(0)
        module = Keeping()
        go = fit_reference if reference else fit
        go("lightning", module)
        make_trainer("lightning", "auto" if reference else "gemini").validate(module, verbose=False)
        return go("lightning", module, seed=4), module

    trainer, ours = run(False)
    state = trainer.strategy.optimizer_state(trainer.optimizers[0])["state"]
    assert 22.0 in {float(entry["step"]) for entry in state.values()}
    same_training(trainer, ours, *run(True))


# -- refusals ----------------------------------------------------------------------------------------------------


def test_number_and_kind_of_optimizers(tree: str) -> None:
    error = load_tree(tree).utilities.exceptions.MisconfigurationException

    def module(configure: Any) -> Any:
        return type("Own", (module_class(tree),), {"configure_optimizers": configure})(
            steps_are_manual=True
        )

    def several(self: Any) -> list[Any]:
        parameters = [p for p in self.parameters() if p.requires_grad]
        return [torch.optim.AdamW(parameters[:2]), torch.optim.SGD(parameters[2:], lr=0.1)]

    with pytest.raises(
        error, match="exactly one optimizer; configure_optimizers returned AdamW, SGD"
    ):
        fit(tree, module(several))
    for nothing in (lambda self: None, lambda self: []):
        with pytest.raises(
            error, match="exactly one optimizer; configure_optimizers returned none"
        ):
            fit(tree, module(nothing))
    with pytest.raises(gs.GeminiError, match=r"step\(\) of LBFGS needs 'closure'"):
        fit(tree, module(lambda self: torch.optim.LBFGS(self.parameters(), lr=0.1)))
    # Without training no optimizer is asked for.
    make_trainer(tree).test(module(several), verbose=False)


def test_compiled_module_is_refused() -> None:
    module = make("lightning")
    compiled = torch.compile(module)
    with pytest.raises(RuntimeError, match="GeminiStrategy"):
        fit("lightning", compiled)


def test_model_that_the_user_manages_is_refused() -> None:
    module = make("lightning")
    engine = gs.manage(module.body)
    with pytest.raises(gs.GeminiError, match="manages already.*close\\(\\) first"):
        fit("lightning", module)
    engine.close()
    fit("lightning", module)


def test_engine_goes_with_its_module() -> None:
    module = make("lightning")
    trainer = fit("lightning", module)
    trainer.test(module, verbose=False)
    alive = [weakref.ref(module), weakref.ref(trainer.strategy.engine)]
    del module, trainer
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


def test_copy_of_a_managed_module_is_ordinary() -> None:
    module = make("lightning")
    fit("lightning", module)
    duplicate = copy.deepcopy(module)
    assert gs.engine_of(duplicate) is None
    tokens, _ = next(iter(loader(1)))
    same(duplicate.eval()(tokens).detach(), module.eval()(tokens).detach())
