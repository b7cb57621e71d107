# Lightning chooses the schedule of updates by itself: inside backward only where nobody needs the gradients afterwards.
"""Every case also has the bits of the same fit without the engine."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import gemini_strategy as gs
from gemini_strategy.engine import Engine
from gemini_strategy.lightning import strategy_class
from lightning_case import (
    cast_reference,
    fit,
    fit_reference,
    load_fabric,
    load_tree,
    make_trainer,
    module_class,
    same,
    same_training,
    unwrapped,
)

WIDE = {"width": 512}  # more than the budget holds
SETTINGS = {"device_budget": "160KiB", "chunk_size": 4096}


@pytest.fixture(autouse=True)
def rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_RATES", "h2d=10e9,d2h=10e9")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each backward that was said to end its step: the steps before it."""
    calls: list[int] = []
    ends_step = Engine.ends_step

    def spy(self: Engine) -> Any:
        calls.append(self.stats()["steps"])
        return ends_step(self)

    monkeypatch.setattr(Engine, "ends_step", spy)
    return calls


def plain_class(tree: str, **methods: Any) -> type:
    """The module of the other tests without its hook for clipping, with these methods."""
    own = {
        "configure_gradient_clipping": load_tree(tree).LightningModule.configure_gradient_clipping
    }
    return type("Plain", (module_class(tree),), {**own, **methods})


def build(cls: type, reference: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    return cls(reference=reference, **{**WIDE, **options})


def strategy(tree: str, **options: Any) -> Any:
    return strategy_class(tree)(**SETTINGS, **options)


def compare(
    tree: str, cls: type | None = None, schedule: str = "auto", **options: Any
) -> tuple[Any, Any]:
    """Fits twice, with the bits of the reference; returns the managed trainer and its plan's schedule."""
    cls = cls or plain_class(tree)
    ours, theirs = build(cls), build(cls, reference=True)
    cast_reference(theirs, options.get("precision", "32-true"))
    trainer = fit(tree, ours, strategy(tree, update_schedule=schedule), **options)
    reference = fit_reference(tree, theirs, **options)
    same_training(trainer, ours, reference, theirs)
    assert trainer.global_step == reference.global_step
    stats = trainer.strategy.engine.stats()
    assert stats["planned"] and stats["replay_waits"] == 0
    return trainer, trainer.strategy.engine._runtime.core.plan_info()["when"]


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_updates_run_inside_backward(tree: str, precision: str, said: list[int]) -> None:
    trainer, when = compare(tree, precision=precision, max_epochs=2)
    assert when == "immediate" and trainer.strategy.deferred_because is None
    assert said == list(range(22))


def test_it_can_be_forbidden(tree: str, said: list[int]) -> None:
    trainer, when = compare(tree, schedule="deferred")
    assert when == "deferred" and not said
    assert "update_schedule" in trainer.strategy.deferred_because


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="update_schedule='immediate'.*'auto', 'deferred'"):
        strategy("lightning", update_schedule="immediate")
    with pytest.raises(ValueError, match="report=1"):
        strategy("lightning", report=1)


@pytest.mark.parametrize("accumulate", [2, 4])
def test_only_the_last_backward_of_a_window_ends_the_step(
    tree: str, accumulate: int, said: list[int]
) -> None:
    """11 batches: 5 windows and one of 1, or 2 and one of 3; each has one backward that is said to end it."""
    _, when = compare(tree, accumulate_grad_batches=accumulate, max_epochs=2)
    assert when == "immediate"
    assert said == list(range({2: 12, 4: 6}[accumulate]))


def test_a_window_that_changes_in_size(tree: str, said: list[int]) -> None:
    callbacks = load_tree(tree).callbacks
    trainer, when = compare(
        tree, callbacks=[callbacks.GradientAccumulationScheduler({0: 1, 1: 3})], max_epochs=2
    )
    assert when == "immediate" and len(said) == trainer.global_step == 11 + 4


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_defers(tree: str, algorithm: str, said: list[int]) -> None:
    cls = plain_class(
        tree, configure_gradient_clipping=module_class(tree).configure_gradient_clipping
    )
    limit = {"norm": 0.05, "value": 1e-3}[algorithm]
    trainer, when = compare(tree, cls, gradient_clip_val=limit, gradient_clip_algorithm=algorithm)
    assert when == "deferred" and not said
    assert trainer.strategy.deferred_because == f"gradient_clip_val is {limit}"


def test_lightnings_own_clipping_defers(said: list[int]) -> None:
    trainer = fit(
        "lightning",
        build(plain_class("lightning")),
        strategy("lightning"),
        gradient_clip_val=0.05,
    )
    assert trainer.strategy.engine._runtime.core.plan_info()["when"] == "deferred" and not said


def test_manual_optimization_defers(said: list[int]) -> None:
    cls = plain_class("lightning")
    module = build(cls, steps_are_manual=True)
    trainer = fit("lightning", module, strategy("lightning"))
    assert trainer.strategy.engine._runtime.core.plan_info()["when"] == "deferred" and not said
    automatic = build(cls)
    other = fit("lightning", automatic, strategy("lightning"))
    same(module.losses, automatic.losses, "losses")
    assert (
        other.strategy.engine._runtime.core.plan_info()["when"] == "immediate" and len(said) == 11
    )


def test_a_closure_in_manual_optimization_defers(said: list[int]) -> None:
    """Its backward runs inside the optimizer's step, but is the user's own."""

    class Closure(plain_class("lightning")):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> None:
            def closure() -> Any:
                loss = self.loss(batch)
                self.optimizers().zero_grad()
                self.manual_backward(loss)
                self.losses.append(float(loss.detach()))
                return loss

            self.optimizers().step(closure=closure)

    trainer = fit("lightning", build(Closure, steps_are_manual=True), strategy("lightning"))
    assert trainer.strategy.engine.stats()["steps"] == 11 and not said
    assert trainer.strategy.deferred_because == "optimization is manual"


@pytest.mark.parametrize("requeues", [True, False])
def test_requeueing_defers(
    tree: str, requeues: bool, said: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint may be taken between two lines of the program."""
    for name in ("PROCID", "LOCALID", "NODEID"):
        monkeypatch.setenv(f"SLURM_{name}", "0")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    environment = load_fabric(tree).plugins.environments.SLURMEnvironment(auto_requeue=requeues)
    trainer = fit(tree, build(plain_class(tree)), strategy(tree), plugins=[environment])
    assert len(said) == (0 if requeues else 11)
    assert ("SLURM" in str(trainer.strategy.deferred_because)) == requeues


def test_the_loss_scale_defers(tree: str, said: list[int]) -> None:
    pl = load_tree(tree)
    plugin = pl.plugins.MixedPrecision(
        "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024)
    )
    trainer = make_trainer(
        tree, strategy(tree, initial_scale=1024), plugins=[plugin_without_scaler(plugin)]
    )
    trainer.fit(build(plain_class(tree)))
    assert trainer.strategy.deferred_because == "the loss is scaled" and not said


def plugin_without_scaler(plugin: Any) -> Any:
    plugin.scaler = None  # the engine has its own
    return plugin


def _backward(self: Any, loss: Any, *args: Any, **kwargs: Any) -> None:
    loss.backward(*args, **kwargs)


def _hook(self: Any, *args: Any, **kwargs: Any) -> None:
    return


def _optimizer_step(
    self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
) -> None:
    optimizer.step(closure=optimizer_closure)


def _zero_grad(self: Any, epoch: int, batch_idx: int, optimizer: Any) -> None:
    optimizer.zero_grad()


def _clip(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
    for parameter in self.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


MODULE_HOOKS: dict[str, Callable[..., Any]] = {
    "backward": _backward,
    "on_after_backward": _hook,
    "on_before_optimizer_step": _hook,
    "configure_gradient_clipping": _clip,
    "optimizer_step": _optimizer_step,
    "optimizer_zero_grad": _zero_grad,
    "on_before_zero_grad": _hook,
}


@pytest.mark.parametrize("hook", MODULE_HOOKS)
def test_a_hook_of_the_module_defers(tree: str, hook: str, said: list[int]) -> None:
    trainer, when = compare(tree, plain_class(tree, **{hook: MODULE_HOOKS[hook]}))
    assert when == "deferred" and not said
    assert trainer.strategy.deferred_because == f"Plain has its own {hook}"


@pytest.mark.parametrize("hook", ["on_after_backward", "on_before_optimizer_step"])
def test_a_hook_set_on_the_module_defers(hook: str, said: list[int]) -> None:
    module = build(plain_class("lightning"))
    setattr(module, hook, lambda *args: module.seen.append(hook))
    trainer = fit("lightning", module, strategy("lightning"))
    assert len(module.seen) == 11 and not said
    assert trainer.strategy.deferred_because == f"Plain has its own {hook}"


def test_other_hooks_do_not_defer(said: list[int]) -> None:
    hooks = ("on_train_batch_start", "on_train_batch_end", "on_before_backward", "on_train_end")
    _, when = compare("lightning", plain_class("lightning", **dict.fromkeys(hooks, _hook)))
    assert when == "immediate" and len(said) == 11


@pytest.mark.parametrize(
    "hook", ["on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"]
)
@pytest.mark.parametrize("kind", ["class", "lambda"])
def test_a_hook_of_a_callback_defers(tree: str, hook: str, kind: str, said: list[int]) -> None:
    callbacks = load_tree(tree).callbacks
    if kind == "class":
        callback = type("Watching", (callbacks.Callback,), {hook: _hook})()
    else:
        callback = callbacks.LambdaCallback(**{hook: lambda *args: None})
    trainer, when = compare(tree, callbacks=[callback])
    assert when == "deferred" and not said
    assert trainer.strategy.deferred_because.endswith(f"{type(callback).__name__} has {hook}")


def test_the_epoch_of_batch_norms_steps_with_the_last_gradients(tree: str, said: list[int]) -> None:
    """StochasticWeightAveraging adds an epoch without a backward for them, the end of which steps all the same."""
    base = plain_class(tree)

    def make_norm(self: Any) -> None:
        base.build(self)
        self.norm = torch.nn.BatchNorm1d(16)

    cls = type("Normed", (base,), {"build": make_norm})
    ours, theirs = build(cls), build(cls, reference=True)

    def options() -> dict[str, Any]:
        swa = load_tree(tree).callbacks.StochasticWeightAveraging(3e-3, swa_epoch_start=1)
        window = {"limit_train_batches": 5, "accumulate_grad_batches": 2, "limit_val_batches": 0}
        return {"callbacks": [swa], "max_epochs": 3, **window}

    trainer = fit(tree, ours, strategy(tree), **options())
    same_training(trainer, ours, fit_reference(tree, theirs, **options()), theirs)
    assert not said and "StochasticWeightAveraging" in trainer.strategy.deferred_because


def test_lightnings_everyday_callbacks_do_not_defer(tmp_path: Any, said: list[int]) -> None:
    callbacks = load_tree("lightning").callbacks
    watched = [
        callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1),
        callbacks.LearningRateMonitor(),
        callbacks.DeviceStatsMonitor(),
        callbacks.EarlyStopping("train_loss"),
        callbacks.ModelSummary(),
        callbacks.TQDMProgressBar(),
    ]
    trainer = fit(
        "lightning",
        build(plain_class("lightning")),
        strategy("lightning"),
        callbacks=watched,
        logger=load_tree("lightning").loggers.CSVLogger(tmp_path),
        enable_checkpointing=True,
        enable_progress_bar=True,
        enable_model_summary=True,
        val_check_interval=2,
    )
    assert trainer.strategy.deferred_because is None and len(said) == 11


def test_who_saves_after_errors_defers(tree: str, tmp_path: Any, said: list[int]) -> None:
    callbacks = load_tree(tree).callbacks
    for callback in (
        callbacks.OnExceptionCheckpoint(tmp_path),
        callbacks.ModelCheckpoint(tmp_path, save_on_exception=True),
    ):
        trainer = fit(
            tree,
            build(plain_class(tree)),
            strategy(tree),
            callbacks=[callback],
            enable_checkpointing=True,
        )
        assert "saves a checkpoint after an error" in trainer.strategy.deferred_because
    assert not said


def test_validation_and_a_second_fit_go_on(tree: str, said: list[int]) -> None:
    """on_validation_model_zero_grad and close() meet gradients that updates have used up."""
    trainer, when = compare(tree, val_check_interval=2)
    assert when == "immediate"
    module = trainer.lightning_module
    engine = trainer.strategy.engine
    trainer = fit(tree, module, strategy(tree))
    assert engine.closed and not trainer.strategy.engine.closed
    trainer.strategy.engine.close()
    assert all(torch.isfinite(p).all() for p in module.parameters()) and len(said) == 22


def fail_in_backward(output: torch.Tensor, fail: Callable[[Any], None]) -> None:
    """When the gradient of a unit's output arrives, after those of later units' weights."""
    if output.requires_grad:
        output.register_hook(fail)


def test_an_error_in_such_a_backward_names_the_way_out(tree: str) -> None:
    class Failing(plain_class(tree)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 6:
                self.body[0].register_forward_hook(lambda *args: fail_in_backward(args[-1], fail))
            return super().training_step(batch, batch_idx)

    def fail(grad: Any) -> None:
        raise ZeroDivisionError("in backward")

    module = build(Failing)
    with pytest.raises(ZeroDivisionError, match="in backward") as error:
        fit(tree, module, strategy(tree))
    notes = "".join(error.value.__notes__)
    assert "failed after it had updated" in notes and "update_schedule='deferred'" in notes
    module = build(Failing)
    trainer = make_trainer(tree, strategy(tree, update_schedule="deferred"))
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module)
    assert trainer.strategy.engine.stats()["steps"] == 6
    assert len(trainer.strategy.engine.model_state_dict()) > 0  # it lives


@pytest.mark.parametrize("how", ["gradient", "norm"])
def test_gradients_after_the_step_name_the_way_out(tree: str, how: str) -> None:
    def look(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx < 3:  # too late: in the first step nobody has asked for them
            return
        if how == "norm":
            self.seen.append(self.trainer.strategy.engine.grad_norm())
        else:
            self.seen.append(float(self.body[5].weight.grad.norm()))

    cls = plain_class(tree, on_train_batch_end=look)
    with pytest.raises(gs.GeminiError, match="used up") as error:
        fit(tree, build(cls), strategy(tree))
    assert "update_schedule='deferred'" in "".join(error.value.__notes__)
    module = build(cls)
    fit(tree, module, strategy(tree, update_schedule="deferred"))
    assert len(module.seen) == 8 and min(module.seen) > 0


@pytest.mark.parametrize("who", ["module", "callback", "helper"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_reading_gradients_from_the_first_step_on_defers(
    tree: str, who: str, accumulate: int, said: list[int]
) -> None:
    """Every read has the gradient that the run without the engine has."""
    seen: dict[bool, list[Any]] = {True: [], False: []}

    def look(module: Any) -> None:
        if (len(module.losses) % accumulate == 0 or len(module.losses) == 11) and who == "helper":
            norms = load_tree(tree).utilities.grad_norm(module.body[5], 2)
            seen[module.reference].append({k: float(v) for k, v in norms.items()})
        elif len(module.losses) % accumulate == 0 or len(module.losses) == 11:
            grads = [p.grad.detach().clone() for p in module.body.parameters()]
            seen[module.reference].append(grads)

    class Watching(load_tree(tree).Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            look(pl_module)

    methods = {"on_train_batch_end": lambda self, *args: look(self)} if who != "callback" else {}
    options = {"callbacks": [Watching()] if who == "callback" else []}
    trainer, _ = compare(
        tree, plain_class(tree, **methods), accumulate_grad_batches=accumulate, **options
    )
    assert said == [0]
    assert trainer.strategy.deferred_because == "a gradient was read after its step"
    assert len(seen[False]) == len(seen[True]) == -(-11 // accumulate)
    same(seen[False], seen[True])


def _halve(*parameters: torch.Tensor) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def _hook_step(module: Any, optimizer: Any) -> str:
    optimizer.register_step_post_hook(lambda *args: _halve(*module.parameters()))
    return "the optimizer has hooks"


def _wrap_step(module: Any, optimizer: Any) -> str:
    plain = optimizer.step

    def step(closure: Any) -> Any:
        loss = closure()
        _halve(*module.parameters())
        plain()
        return loss

    optimizer.step = step
    return "the optimizer's step is wrapped"


def _wrap_lightnings_step(module: Any, optimizer: Any) -> str:
    wrapper = module.optimizers()
    plain = wrapper.step

    def step(closure: Any) -> Any:
        def halved() -> Any:
            loss = closure()
            _halve(*module.parameters())
            return loss

        return plain(closure=halved)

    wrapper.step = step
    return "the step of a LightningOptimizer is wrapped"


def _hook_all_steps(module: Any, optimizer: Any) -> str:
    HANDLES.append(register_optimizer_step_post_hook(lambda *args: _halve(*module.parameters())))
    return "all optimizers have hooks"


def _hook_gradient(module: Any, optimizer: Any) -> str:
    module.body[1].weight.register_post_accumulate_grad_hook(_halve)
    return "body.1.weight has a hook that gets its gradient"


HANDLES: list[Any] = []  # of hooks that would outlive their test


@pytest.mark.parametrize(
    "act", [_hook_step, _wrap_step, _wrap_lightnings_step, _hook_all_steps, _hook_gradient]
)
def test_what_is_put_on_the_optimizer_or_a_parameter_defers(act: Any, said: list[int]) -> None:
    why = []

    class Puts(load_tree("lightning").Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            if index == 5:
                why.append(act(module, unwrapped(trainer.optimizers[0])))

    try:
        trainer, _ = compare("lightning", callbacks=[Puts()])
    finally:
        while HANDLES:
            HANDLES.pop().remove()
    assert len(said) == 5 and trainer.strategy.deferred_because == why[0]


def test_a_scheduler_does_not_defer(said: list[int]) -> None:
    ours = build(plain_class("lightning"), schedule="onecycle")
    trainer = fit("lightning", ours, strategy("lightning"))
    assert len(said) == 11 and trainer.strategy.deferred_because is None


def test_another_optimizer_defers(said: list[int]) -> None:
    """Weights in fp32 are trained by any."""

    class Swaps(load_tree("lightning").Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            parameters = [p for p in module.parameters() if p.requires_grad]
            trainer.optimizers = [gs.HybridAdam(parameters, lr=1e-3)]

    ours, theirs = (build(plain_class("lightning"), reference=r) for r in (False, True))
    trainer = fit("lightning", ours, strategy("lightning"), callbacks=[Swaps()])
    fit_reference("lightning", theirs, callbacks=[Swaps()])
    assert not said and "another optimizer" in trainer.strategy.deferred_because
    same(ours.losses, theirs.losses)
    same(trainer.strategy.lightning_module_state_dict(), theirs.state_dict())


def test_the_batch_size_finder_may_fail_in_backward(tmp_path: Any, said: list[int]) -> None:
    """It trains in on_fit_start, and goes on with the engine after an error."""

    class Hungry(plain_class("lightning")):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.is_hungry = len(batch[0]) > 8
            return super().training_step(batch, batch_idx)

    def run_out(grad: Any) -> None:
        if module.is_hungry:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate everything")

    module = build(Hungry, batch_size=2)
    module.body[0].register_forward_hook(lambda *args: fail_in_backward(args[-1], run_out))
    trainer = make_trainer("lightning", strategy("lightning"), default_root_dir=tmp_path)
    tuner = load_tree("lightning").tuner.Tuner(trainer)
    size = tuner.scale_batch_size(module, steps_per_trial=3, max_trials=5)
    assert size == 8 and not said
    same(trainer.strategy.lightning_module_state_dict(), build(Hungry).state_dict())
    trainer.fit(module)
    assert said and trainer.strategy.deferred_because is None


def test_why_a_step_is_deferred_is_told_once(tree: str, caplog: pytest.LogCaptureFixture) -> None:
    cls = plain_class(tree, on_after_backward=_hook)
    for wanted in (True, False):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            fit(tree, build(cls), strategy(tree, report=wanted))
        why = [m for m in caplog.messages if "Plain has its own on_after_backward" in m]
        tables = [m for m in caplog.messages if "Gemini: the" in m]
        assert len(why) == wanted and len(tables) == 2 * wanted
    caplog.clear()
    with caplog.at_level(logging.INFO):
        fit(tree, build(plain_class(tree)), strategy(tree))
    assert "under the next forward:" not in caplog.text
    assert "immediate" in caplog.text
