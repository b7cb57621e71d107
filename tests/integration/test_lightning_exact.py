# A fit with strategy="gemini" leaves the bits of the same fit without it.

from types import MethodType
from typing import Any

import pytest
import torch

import gemini_strategy as gs
from gemini_strategy.lightning import strategy_class
from lightning_case import (
    PRECISIONS,
    TREES,
    cast_reference,
    fit,
    fit_reference,
    load_tree,
    loader,
    make,
    make_reference,
    make_reference_trainer,
    make_trainer,
    reference_weights,
    same,
    same_adam,
    same_training,
)


def compare(
    tree: str,
    precision: str,
    strategy: object = "gemini",
    module: dict | None = None,
    **options: object,
) -> None:
    module_options = module or {}
    ours = make(tree, **module_options)
    trainer = fit(tree, ours, strategy, precision=precision, **options)
    theirs = make_reference(tree, precision, **{**module_options, "optimizer": "HybridAdam"})
    reference = fit_reference(tree, theirs, precision=precision, **options)
    same_training(trainer, ours, reference, theirs)
    assert trainer.global_step == reference.global_step


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_fit(tree: str, precision: str) -> None:
    compare(tree, precision, max_epochs=2)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("name", ["SGD", "Adafactor", "RMSprop"])
def test_an_optimizer_that_is_not_adam(name: str, precision: str, tree: str) -> None:
    """The bits of Lightning's own strategy with it."""
    given = {"optimizer": name, "schedule": "step"}
    ours = make(tree, **given)
    fit(tree, ours, precision=precision, max_epochs=2)
    theirs = make_reference(tree, precision, **given)
    fit_reference(tree, theirs, precision=precision, max_epochs=2)
    assert ours.losses == theirs.losses
    state = ours.state_dict()
    for key, value in theirs.state_dict().items():
        assert torch.equal(state[key].to(value.dtype), value), key


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("policy", ["gemini_cpu", "gemini_cuda"])
def test_fit_under_each_policy(precision: str, policy: str) -> None:
    compare("lightning", precision, policy)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_fit_with_small_chunks(precision: str) -> None:
    strategy = strategy_class("lightning")(
        chunk_size=4096,
        placement_policy="cpu",
        threads=1,
        enable_distributed_storage=False,
    )
    compare("lightning", precision, strategy)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_fit_within_a_device_budget(precision: str) -> None:
    wide = {"width": 512}
    settings = {"device_budget": "64KiB", "chunk_size": 4096}
    options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    strategy = strategy_class("lightning")(**settings)
    compare("lightning", precision, strategy, module=wide, **options)
    trainer = fit("lightning", make("lightning", **wide), strategy_class("lightning")(**settings))
    stats = trainer.strategy.engine.stats()
    assert stats["evictions"] > 0
    assert stats["device_peak_bytes"] <= stats["device_budget_bytes"] < stats["state_bytes"]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "accumulate", [2, 4]
)  # 11 batches: 5 + a leftover of 1, 2 + a leftover of 3
def test_accumulation_with_leftovers(precision: str, accumulate: int) -> None:
    compare("lightning", precision, accumulate_grad_batches=accumulate, max_epochs=2)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping(precision: str, algorithm: str) -> None:
    limit = {"norm": 0.05, "value": 1e-3}[algorithm]
    compare(
        "lightning",
        precision,
        gradient_clip_val=limit,
        gradient_clip_algorithm=algorithm,
        accumulate_grad_batches=3,
    )


@pytest.mark.parametrize("schedule", ["onecycle", "step"])
def test_schedules(tree: str, schedule: str) -> None:
    compare(tree, "bf16-mixed", module={"schedule": schedule}, gradient_clip_val=0.5)


@pytest.mark.parametrize("optimizer", ["AdamW", "CPUAdam"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_optimizers_are_taken_over(optimizer: str, precision: str) -> None:
    compare("lightning", precision, module={"optimizer": optimizer, "schedule": "step"})


def test_adam_is_taken_over() -> None:
    # torch.optim.Adam adds weight decay to the gradient, as HybridAdam does with adamw_mode=False.
    ours = make("lightning", optimizer="Adam")
    trainer = fit("lightning", ours)

    class Reference(type(ours)):
        def configure_optimizers(self) -> object:
            groups = [
                {"params": group["params"], "weight_decay": group["weight_decay"]}
                for group in super().configure_optimizers().param_groups
            ]
            return gs.HybridAdam(groups, lr=self.lr, adamw_mode=False)

    torch.manual_seed(0)
    theirs = Reference(reference=True)
    reference = fit_reference("lightning", theirs)
    same(ours.losses, theirs.losses, "losses")
    same(
        trainer.strategy.lightning_module_state_dict(),
        reference_weights(theirs, reference.optimizers[0]),
        "weights",
    )


@pytest.mark.parametrize("precision", PRECISIONS)
def test_manual_optimization(tree: str, precision: str) -> None:
    compare(tree, precision, module={"steps_are_manual": True})


def test_a_clip_by_the_wrapper_of_the_optimizer(tree: str) -> None:
    """Lightning's wrapper runs the methods of HybridAdam on itself, where only `step` goes to the optimizer."""
    weights = []
    for make_one, is_plain in ((make, False), (make, True), (make_reference, False)):

        def step(module: Any, batch: Any, batch_idx: int, is_plain: bool = is_plain) -> None:
            optimizer = module.optimizers()
            loss = module.loss(batch) * (10.0 if batch_idx % 2 else 0.1)
            module.manual_backward(loss)
            (optimizer.optimizer if is_plain else optimizer).clip_grad_norm_(0.05)
            optimizer.step()
            optimizer.zero_grad()

        given = ("32-true",) if make_one is make_reference else ()
        module = make_one(tree, *given, steps_are_manual=True)
        module.training_step = MethodType(step, module)
        (fit if make_one is make else fit_reference)(tree, module)
        weights.append({name: p.detach().clone() for name, p in module.named_parameters()})
    for name, value in weights[0].items():
        assert all(torch.equal(value, other[name]) for other in weights[1:]), name


@pytest.mark.parametrize("hook", ["configure_model", "configure_sharded_model"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_modules_built_late(hook: str, precision: str) -> None:
    ours = make("lightning", hook=hook)
    torch.manual_seed(5)
    trainer = fit("lightning", ours, seed=5, precision=precision)
    torch.manual_seed(0)
    theirs = make("lightning", reference=True)
    torch.manual_seed(5)
    theirs.body = None
    theirs.build()
    cast_reference(theirs, precision)
    reference = make_reference_trainer("lightning", precision)
    reference.fit(theirs)
    same_training(trainer, ours, reference, theirs)


def fp16(tree: str) -> list[object]:
    return [load_tree(tree).plugins.MixedPrecision("16-mixed", "cpu")]


def reference_fp16(
    module: object, clip: float | None, accumulate: int, scaler: gs.LossScaler
) -> list[float]:
    """The loop that 16-mixed stands for: scaled backward, unscaled clip, a step skipped on overflow. One epoch."""
    cast_reference(module, "16-mixed")
    optimizer = module.configure_optimizers()
    scales = []
    batches = list(loader(11))
    for index, batch in enumerate(batches):
        with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
            loss = module.loss(batch)
        module.losses.append(float(loss.detach()))
        if index % accumulate == 0:
            optimizer.zero_grad()
        (loss / accumulate * scaler.scale).backward()
        if (index + 1) % accumulate and index + 1 < len(batches):
            continue
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        overflow = not all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
        if not overflow:
            if clip is not None:
                optimizer.clip_grad_norm_(clip * scaler.scale)
            optimizer.step(grad_divisor=scaler.scale)
        scaler.update(overflow)
        scales.append(scaler.scale)
    module.reference_optimizer = optimizer
    return scales


@pytest.mark.parametrize("accumulate", [1, 3])
def test_fp16_skips_overflows_and_keeps_the_bits(tree: str, accumulate: int) -> None:
    settings = {"initial_scale": 2.0**26, "growth_interval": 2, "hysteresis": 1}
    scales: list[float] = []

    class Recording(type(make(tree))):
        def on_train_batch_end(self, *_: object) -> None:
            if self.trainer.fit_loop.epoch_loop._should_accumulate():
                return
            scales.append(self.trainer.strategy.engine.scaler.scale)

    torch.manual_seed(0)
    ours = Recording()
    trainer = make_trainer(
        tree,
        strategy_class(tree)(**settings),
        plugins=fp16(tree),
        accumulate_grad_batches=accumulate,
    )
    torch.manual_seed(1)
    trainer.fit(ours)
    theirs = make(tree, reference=True)
    torch.manual_seed(1)
    theirs.train()
    expected = reference_fp16(theirs, None, accumulate, gs.LossScaler(**settings))
    assert scales == expected
    assert min(expected) < settings["initial_scale"], "the case must overflow at least once"
    same(ours.losses, theirs.losses, "losses")
    same(
        trainer.strategy.lightning_module_state_dict(),
        reference_weights(theirs, theirs.reference_optimizer),
        "weights",
    )
    same_adam(trainer.optimizers[0].state_dict(), theirs.reference_optimizer.state_dict())


def test_fp16_manual_optimization_and_own_backward() -> None:
    class Own(type(make("lightning"))):
        def backward(self, loss: torch.Tensor, *args: object, **kwargs: object) -> None:
            self.seen.append("backward")
            loss.backward(*args, **kwargs)

    results = []
    for cls, manual in ((type(make("lightning")), False), (Own, False), (Own, True)):
        torch.manual_seed(0)
        module = cls(steps_are_manual=manual)
        trainer = make_trainer(
            "lightning", strategy_class("lightning")(initial_scale=1024), plugins=fp16("lightning")
        )
        torch.manual_seed(1)
        trainer.fit(module)
        results.append((module.losses, trainer.strategy.lightning_module_state_dict()))
        assert len(module.seen) == (11 if cls is Own else 0)
    same(results[0], results[1], "own backward")
    same(results[0], results[2], "manual")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_force_outputs_fp32(precision: str) -> None:
    module = make("lightning")
    trainer = make_trainer(
        "lightning", strategy_class("lightning")(force_outputs_fp32=True), precision=precision
    )
    outputs = trainer.predict(module)
    assert {output.dtype for output in outputs} == {torch.float32}
    plain = make("lightning")
    trainer = make_trainer("lightning", precision=precision)
    expected = trainer.predict(plain)
    half = torch.float32 if precision == "32-true" else torch.bfloat16
    assert {output.dtype for output in expected} == {half}
    same(outputs, [output.float() for output in expected], "outputs")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_evaluation_matches_and_changes_nothing(precision: str) -> None:
    ours, theirs = make("lightning"), make_reference("lightning", precision)
    trainer = make_trainer("lightning", precision=precision)
    reference = make_reference_trainer("lightning", precision)
    before = None
    for stage in ("validate", "test"):
        same(
            getattr(trainer, stage)(ours, verbose=False),
            getattr(reference, stage)(theirs, verbose=False),
            stage,
        )
        state = trainer.strategy.lightning_module_state_dict()
        before = before or state
        same(state, before, "weights")
    same(trainer.predict(ours), reference.predict(theirs), "predict")


def test_a_step_without_loss_changes_nothing() -> None:
    class Sometimes(type(make("lightning"))):
        def training_step(self, batch: object, batch_idx: int) -> torch.Tensor | None:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx in (0, 3, 4) else loss

    def run(reference: bool) -> tuple[object, object]:
        torch.manual_seed(0)
        module = Sometimes(reference=reference)
        trainer = make_trainer("lightning", "auto" if reference else "gemini")
        torch.manual_seed(1)
        trainer.fit(module)
        return trainer, module

    same_training(*run(False), *run(True))
