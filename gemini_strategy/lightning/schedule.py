# When updates may run inside backward: the strategy says so by itself, or says why not.
#
# A class for the strategy of each Lightning tree to inherit from; nothing here imports Lightning.
#
# Lightning runs forward, zero_grad and backward in the closure of the optimizer's step.  So a backward under
# `Strategy.optimizer_step` ends the step: batches that only accumulate call the closure elsewhere, and so do the last,
# if they are fewer.
#
# Invariants
#   1. The immediate schedule is chosen only if nothing that Lightning or the user runs between that backward and the
#      next zero_grad is known to need gradients, and nobody counts on the weights of before a backward that fails.
#   2. In doubt the step is deferred: that costs time, never bits.
#   3. Who reads gradients after the first step of a fit gets them, in that step and in all that follow. Who begins
#      later is told what to do.

from types import ModuleType
from typing import Any

from gemini_strategy.errors import GeminiError
from gemini_strategy.lightning.engine_strategy import EngineStrategy
from gemini_strategy.optim.managed import is_wrapped, who_needs_gradients

# Hooks that may read or change gradients between their backward and the next one.
_MODULE_HOOKS = (
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
    "on_before_zero_grad",
)
_WAY_OUT = (
    "Updates ran inside this backward; with GeminiStrategy(update_schedule='deferred') they run after it, and"
    " gradients stay until zero_grad."
)
_CALLBACK_HOOKS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")


class StepSchedule(EngineStrategy):
    """To be inherited from before the tree's own strategy.

    Attributes:
        update_schedule: "auto" or "deferred".
        deferred_because: why the last step was deferred; None: its updates could run inside backward.
    """

    update_schedule: str
    deferred_because: str | None = None

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)  # type: ignore[misc]
        # The engine's errors, and its notes on those of others, name what a loop of one's own would have written.
        texts = [str(exception)] if isinstance(exception, GeminiError) else []
        texts += getattr(exception, "__notes__", ())
        if any("backward(step=True)" in text for text in texts):
            exception.add_note(_WAY_OUT)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        self.deferred_because = self._why_deferred()
        self.precision_plugin.ends_step = self.deferred_because is None
        try:
            return super().optimizer_step(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.precision_plugin.ends_step = False

    def _why_deferred(self) -> str | None:
        module = self.lightning_module
        trainer = module.trainer
        engine = self.engine
        if engine is None:
            return "there is nothing to train"
        if self.update_schedule == "deferred":
            return "update_schedule='deferred' was asked for"
        if not module.automatic_optimization:
            return "optimization is manual"
        if engine.scaler is not None:
            return "the loss is scaled"
        if engine._runtime.coming_step.was_served:
            return "a gradient was read after its step"
        if trainer.gradient_clip_val:
            return f"gradient_clip_val is {trainer.gradient_clip_val}"
        if not self._has_started:
            return "a search before the training goes on after errors"
        if getattr(self.cluster_environment, "auto_requeue", False):
            return "SLURM may ask for a checkpoint at any moment"
        for hook in _MODULE_HOOKS:
            if _is_changed(module, self._home.LightningModule, hook):
                return f"{type(module).__name__} has its own {hook}"
        if trainer.optimizers[0] is not engine.optimizer:
            return "the Trainer was given another optimizer"
        if any(is_wrapped(each, type(each).step) for each in self._lightning_optimizers):
            return "the step of a LightningOptimizer is wrapped"
        because = _because_of(trainer.callbacks, self._home.callbacks)
        return because or who_needs_gradients(engine._runtime)


def _because_of(callbacks: Any, known: ModuleType) -> str | None:
    for callback in callbacks:
        name = type(callback).__name__
        for hook in _CALLBACK_HOOKS:
            if _is_changed(callback, known.Callback, hook):
                return f"the callback {name} has {hook}"
        if saves_after_errors(callback, known):
            return f"the callback {name} saves a checkpoint after an error"
        if isinstance(callback, getattr(known, "StochasticWeightAveraging", ())):
            return f"the callback {name} may end with an epoch that steps with the last gradients"
    return None


def saves_after_errors(callback: Any, known: ModuleType) -> bool:
    """Whether a callback saves a checkpoint in its on_exception; `known` is the tree's module of callbacks."""
    return bool(getattr(callback, "save_on_exception", False)) or isinstance(
        callback, getattr(known, "OnExceptionCheckpoint", ())
    )


def _is_changed(instance: object, base: type, name: str) -> bool:
    """Whether a method is not the one of `base`: overridden, or set on the instance."""
    return getattr(getattr(instance, name), "__func__", None) is not getattr(base, name)
