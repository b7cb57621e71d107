"""The layer at accelerate, through which Trainer, trl, peft and plain accelerate scripts all go.

Invariants
    1. A model is managed in place: it is not moved, not wrapped, and its forward is not wrapped a second time. Its
       layers are compiled before, if that is asked for.
    2. The optimizer that the engine has taken over is wrapped for accelerate's schedulers, and its state makes no round
       trip.
    3. What reads whole fields (states, masters) is called by all ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from accelerate.accelerator import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import PartialState
from torch import Tensor, nn
from torch.optim import Optimizer

from gemini_strategy import Engine, GeminiError, engine_of
from gemini_strategy.huggingface.engines import Engines, is_replaced, models_of
from gemini_strategy.huggingface.plugin import GeminiPlugin, current
from gemini_strategy.huggingface.refusals import check_accelerator, check_plugins
from gemini_strategy.optim.state_dicts import state_dict as optimizer_state_dict
from gemini_strategy.state import masters_of

_PRECISIONS = {"no": None, "bf16": "bf16-mixed", "fp16": "16-mixed"}


class GeminiOptimizer(AcceleratedOptimizer):
    """An optimizer that an engine has taken over, as accelerate wants to have it."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self._is_accelerate_prepared = True
        # None: not now. Else all ranks save it for rank 0: whether with what 16-bit weights lack.
        self._saves_lows: bool | None = None

    def step(self, closure: Any = None) -> None:
        """Steps where accelerate synchronises; `step_was_skipped` says whether an fp16 step changed nothing."""
        if is_replaced(self.optimizer):
            raise GeminiError(
                f"this {type(self.optimizer).__name__} trains no model any more: another one of the same model was "
                "prepared after it. A model has one optimizer: put its parameters into several groups of one"
            )
        runtime = getattr(self.optimizer, "_gm_engine", None)
        before = 0 if runtime is None else runtime.skipped_steps
        super().step(closure)
        self._is_overflow = runtime is not None and runtime.skipped_steps > before

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own; in `save_state` rank 0 gets it, without what the model's file has."""
        runtime = getattr(self.optimizer, "_gm_engine", None)
        if runtime is None or self._saves_lows is None:
            return super().state_dict()
        return optimizer_state_dict(runtime, self.optimizer, 0, with_lows=self._saves_lows)

    @contextlib.contextmanager
    def saved(self, with_lows: bool) -> Iterator[None]:
        """Inside, `state_dict` is for a file; with_lows: the model's own may not have masters."""
        self._saves_lows = with_lows
        try:
            yield
        finally:
            self._saves_lows = None


class GeminiAccelerator(Accelerator):
    """An Accelerator whose models train within a budget; all else is accelerate's.

    `prepare(model, optimizer, ...)` manages the model in place. A model that is prepared without an optimizer runs
    under an engine too, and is managed anew, from the same values, when its optimizer comes.

    Args:
        gemini_plugin: budgets and policy; None: those of the runner or the environment.
        args, kwargs: accelerate's own.

    Raises:
        GeminiError: a plugin or a setting asks for what cannot be honoured, by name.
    """

    # Of the loop around it: no gradient is needed after the backward that comes.
    ends_step = False

    def __init__(
        self, *args: Any, gemini_plugin: GeminiPlugin | None = None, **kwargs: Any
    ) -> None:
        check_plugins(kwargs)
        super().__init__(*args, **kwargs)
        self._begin(gemini_plugin)

    def _begin(self, plugin: GeminiPlugin | None) -> None:
        check_accelerator(self)
        self.gemini_plugin = current() if plugin is None else plugin
        if not isinstance(self.gemini_plugin, GeminiPlugin):
            raise TypeError(f"gemini_plugin={plugin!r}: expected a GeminiPlugin, or None")
        self.scaler = None  # the engine's, when there is one
        self.native_amp = self.mixed_precision != "no"
        self._engines = Engines(
            self.gemini_plugin,
            _asked_device(self.device),
            _PRECISIONS[self.mixed_precision],
            _scaling(self.scaler_handler),
            _compiling(self.state.dynamo_plugin),
        )

    # ---- models and optimizers ----

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """accelerate's; models are managed, each with the optimizer over its parameters, or several with one."""
        models = [each for each in args if isinstance(each, nn.Module)]
        known = [*models, *(model for model in self._models if model not in models)]
        wrapped: dict[int, Any] = {}
        for given in args:
            if isinstance(given, Optimizer):
                wrapped[id(given)] = self._take_over(given, known)
        for model in models:
            self._place(model)
        return super().prepare(
            *(wrapped.get(id(each), each) for each in args), device_placement=device_placement
        )

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Manages the model, if nobody does; it is neither moved nor wrapped."""
        self._place(model)
        if getattr(
            model, "_is_accelerate_prepared", False
        ):  # before accelerate 1.13 it looks at nothing
            if model not in self._models:
                self._models.append(model)
            return model
        return super().prepare_model(
            model, device_placement=device_placement, evaluation_mode=evaluation_mode
        )

    def prepare_optimizer(
        self, optimizer: Optimizer, device_placement: bool | None = None
    ) -> GeminiOptimizer:
        """Takes the optimizer of a model over that was prepared before it."""
        if not getattr(optimizer, "_is_accelerate_prepared", False):
            optimizer = self._take_over(optimizer, self._models)
        return super().prepare_optimizer(optimizer, device_placement=device_placement)

    def _take_over(self, given: Optimizer, models: Iterable[nn.Module]) -> GeminiOptimizer:
        optimizer = given
        while isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        trained = models_of(optimizer, models)
        engine = self._engines.train(trained, optimizer)
        for model in trained:  # for accelerate's own prepare_model: nothing is left to do
            model._is_accelerate_prepared = True
        if engine.scaler is not None:
            self.scaler = engine.scaler  # save_state and load_state know it
        is_ours = isinstance(given, GeminiOptimizer) and given.optimizer is optimizer
        return given if is_ours else GeminiOptimizer(optimizer)

    def _place(self, model: nn.Module) -> None:
        if next(model.parameters(), None) is None:  # a loss, say: accelerate moves its buffers
            return
        self._engines.evaluate(model)
        model._is_accelerate_prepared = True

    def evaluate_in(self, model: nn.Module, precision: str) -> None:
        """From now on the model runs with weights in the dtype of `precision`, until it is trained again."""
        self._engines.evaluate(model, precision)

    def free_memory(self, *objects: Any) -> Any:
        """accelerate's; models among `objects` are ordinary again, with the trained weights."""
        for each in objects:
            engine = engine_of(each) if isinstance(each, nn.Module) else None
            if engine is not None:
                engine.close()
        self.scaler = None
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """accelerate's; the report has its second table."""
        for engine in self._trained():
            engine._runtime.measured.tell()
        super().end_training()

    # ---- a step ----

    def _trained(self) -> list[Engine]:
        engines = dict.fromkeys(engine_of(model) for model in self._models)
        return [engine for engine in engines if engine is not None and engine.optimizer is not None]

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Divides by the number of accumulation steps and calls backward, with the engine's loss scale.

        Raises:
            GeminiError: in fp16, with several models that are trained: whose loss scale is it?
        """
        engines = self._trained()
        if not engines:
            super().backward(loss, **kwargs)
            return
        loss = loss / self.gradient_accumulation_steps
        if len(engines) == 1:
            engines[0].backward(loss, step=self.ends_step, **kwargs)
            return
        if any(engine.scaler is not None for engine in engines):
            raise GeminiError(
                f"accelerator.backward(loss): {len(engines)} models are trained with mixed_precision='fp16', each with "
                "a loss scale of its own: use 'bf16'"
            )
        with engines[0].ranks.explaining():
            loss.backward(**kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Nothing: the engine clips unscaled gradients.

        Raises:
            GeminiError: in fp16, where gradients are scaled until the step.
        """
        if any(engine.scaler is not None for engine in self._trained()):
            raise GeminiError(
                "accelerator.unscale_gradients() with mixed_precision='fp16': under Gemini gradients stay scaled until "
                "the step: clip with accelerator.clip_grad_norm_() or clip_grad_value_(), which know the scale"
            )

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """Clips all gradients that one optimizer steps by their common norm, in the next step.

        Returns:
            The norm before clipping, a 0-dim fp32 tensor on the engine's device.

        Raises:
            GeminiError: these are not all the parameters that one optimizer has; or it is called between the
                micro-batches of a step.
        """
        given = _listed(parameters)
        engine = self._engines.clipped(given, "clip_grad_norm_")
        if engine is None:
            return super().clip_grad_norm_(given, max_norm, norm_type=norm_type)
        if max_norm == math.inf and norm_type == 2:
            norm, device = engine.grad_norm(), engine._runtime.device
            return torch.tensor(norm, dtype=torch.float32, device=device)
        if not self.sync_gradients:
            raise GeminiError(
                "accelerator.clip_grad_norm_ between the micro-batches of a step: Gemini clips the sum of a step's "
                "gradients, once: call it `if accelerator.sync_gradients:`"
            )
        return engine.clip_grad_norm_(max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamps every element of all gradients that one optimizer steps, now. Raises as clip_grad_norm_ does."""
        given = _listed(parameters)
        engine = self._engines.clipped(given, "clip_grad_value_")
        if engine is None:
            super().clip_grad_value_(given, clip_value)
        else:
            engine.clip_grad_value_(clip_value)

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Any:
        """accelerate's for one process. Raises GeminiError for several: each has the same number of batches."""
        if self.num_processes > 1:
            raise GeminiError(
                "accelerator.join_uneven_inputs: all ranks make the same passes under Gemini: leave it out, "
                "accelerate's loaders give each rank as many batches (even_batches)"
            )
        return super().join_uneven_inputs(joinables, even_batches)

    # ---- states ----

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The model's state with fp32 masters, on the CPU. All ranks call it, and rank 0 gets it."""
        plain = self.unwrap_model(model) if unwrap else model
        engine = engine_of(plain)
        if engine is None:
            return super().get_state_dict(model, unwrap=unwrap)
        return masters_of(engine._runtime, plain, 0 if self.num_processes > 1 else None)

    def save_state(
        self,
        output_dir: str | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: Any,
    ) -> Any:
        """accelerate's, with fp32 masters. All ranks call it, and rank 0 holds what it writes.

        A hook of the script's may write the model's own state_dict() in the place of the masters, which of a model that
        came in 16 bits has these: then the optimizer's file has what they lack.
        """
        with contextlib.ExitStack() as stack:
            for optimizer in self._optimizers:
                if isinstance(optimizer, GeminiOptimizer):
                    stack.enter_context(optimizer.saved(bool(self._save_model_state_pre_hook)))
            return super().save_state(output_dir, safe_serialization, **save_model_func_kwargs)

    def load_state(
        self,
        input_dir: str | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """accelerate's; states come over the CPU, as every rank keeps only its part of them."""
        load_model_func_kwargs.setdefault("map_location", "cpu")
        super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)


def adopt(accelerator: Accelerator, plugin: GeminiPlugin | None) -> None:
    """Makes an Accelerator that has prepared nothing yet one of ours, in place.

    Raises:
        GeminiError: it cannot be honoured, by name.
    """
    if not isinstance(accelerator, GeminiAccelerator):
        kind = type(accelerator)
        is_plain = kind is Accelerator
        # Methods of the user's own class come first, and ours where these ask for accelerate's.
        accelerator.__class__ = (
            GeminiAccelerator if is_plain else type(kind.__name__, (kind, GeminiAccelerator), {})
        )
    elif plugin is None or plugin == accelerator.gemini_plugin:
        return
    accelerator._begin(plugin)


def _listed(parameters: Any) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _compiling(plugin: Any) -> dict[str, Any] | None:
    """torch.compile's arguments; None: accelerate is not asked to compile."""
    is_asked = str(getattr(plugin.backend, "value", plugin.backend)).upper() != "NO"
    return plugin.to_kwargs() if is_asked else None


def _asked_device(device: torch.device) -> torch.device | None:
    """None: the CPU is what there is, and neither Accelerator(cpu=True) nor a Trainer's use_cpu has asked for it."""
    is_asked = PartialState()._cpu or torch.cuda.is_available()
    return None if device.type == "cpu" and not is_asked else device


def _scaling(handler: Any) -> dict[str, Any]:
    """manage()'s arguments for what accelerate's GradScalerKwargs say: torch's own rule, without hysteresis."""
    if handler is None:
        return {}
    return {
        "initial_scale": handler.init_scale,
        "growth_factor": handler.growth_factor,
        "backoff_factor": handler.backoff_factor,
        "growth_interval": handler.growth_interval,
        "hysteresis": 1,
        "min_scale": 0,
        "max_scale": math.inf,
    }
