"""Which engine trains which model: what an Accelerator needs to know of them.

Invariants
    1. A model has at most one open engine, with one optimizer or none; a new one begins with exactly the values that
       the last one held, masters included, and with the dtypes that the model came in. Models that one optimizer trains
       have one together; a model that was in another's engine, and is not in the new one, gets its own.
    2. An engine that somebody else made is used if it has the optimizer that is asked for, and refused otherwise.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gemini_strategy import Engine, GeminiError, engine_of, manage
from gemini_strategy.close import close
from gemini_strategy.huggingface.compiling import compile_layers
from gemini_strategy.huggingface.plugin import GeminiPlugin
from gemini_strategy.huggingface.refusals import check_model
from gemini_strategy.parameters.leaving import Attached
from gemini_strategy.precision import Precision
from gemini_strategy.roots import roots, title
from gemini_strategy.weakly import WeakTable

# The engines that this layer has made in this process, and of how many models each. Models would keep theirs alive.
_made: WeakTable[Engine, int] = WeakTable()


@dataclass(eq=False)
class Engines:
    """Makes engines with one plugin, on one device and in one precision.

    Attributes:
        plugin: what manage() is given.
        device: where models compute; None: nobody has asked for the CPU, and there is nothing else.
        precision: manage()'s; None keeps the dtypes of a model.
        scaling: manage()'s arguments of the loss scale.
        compiling: torch.compile's arguments for the layers of a model; None: they are not compiled.
    """

    plugin: GeminiPlugin
    device: torch.device | None
    precision: str | None
    scaling: dict[str, Any]
    compiling: dict[str, Any] | None

    def train(self, models: list[nn.Module], optimizer: Optimizer) -> Engine:
        """The engine that trains all of `models` with `optimizer`; see the invariants.

        Raises:
            GeminiError: a model or the optimizer cannot be managed, by name.
        """
        for model in models:
            check_model(model)
        if optimizer.__dict__.get("_gm_replaced") and not optimizer.state:
            raise GeminiError(
                f"this {type(optimizer).__name__} has lost its states: another one of the same model was prepared "
                "after it had stepped. Prepare a new one (trainer.optimizer = None makes a Trainer do so), or keep its "
                "state_dict() before and load that into it"
            )
        found = {model: self._found(model) for model in models}
        engines = [engine for engine in dict.fromkeys(found.values()) if engine is not None]
        for engine in engines:
            if engine.optimizer is optimizer and _is_complete(engine, models):
                return engine
        for model, own in found.items():
            if own is not None and own not in _made:
                raise GeminiError(
                    f"{type(model).__name__} is managed already, without this {type(optimizer).__name__}: give the "
                    "model to the Accelerator or the Trainer before gemini_strategy.manage(), or close() its engine"
                )
        others = [model for engine in engines for model in _models(engine) if model not in found]
        for engine in engines:
            if engine.optimizer not in (None, optimizer):
                states = engine.optimizer.state
                has_stepped = bool(states)
                if engine._runtime.opaque is None:
                    has_stepped = any("exp_avg" in each for each in states.values())
                engine.optimizer._gm_replaced = has_stepped
            close_for_another(engine, with_states=engine.optimizer is optimizer)
        engine = self._manage(models, optimizer, self.precision)
        optimizer.__dict__.pop("_gm_replaced", None)
        for model in models if len(models) == 1 else ():
            model.zero_grad = ZeroGrad(model)  # type: ignore[method-assign]
        for model in others:
            self.evaluate(model)
        return engine

    def evaluate(self, model: nn.Module, precision: str | None = None) -> Engine:
        """The engine under which `model` runs; one without an optimizer, if there is none.

        Args:
            precision: the weights are to be computed with in its dtype; None: whatever the engine has.
        """
        check_model(model)
        engine = self._found(model)
        if engine is not None:
            if precision is None or _computes_in(engine, Precision(precision).dtype):
                return engine
            close_for_another(engine, with_states=True)
        models = [model] if engine is None else _models(engine)
        return self._manage(models, None, precision or self.precision)

    def _found(self, model: nn.Module) -> Engine | None:
        engine = engine_of(model)
        if engine is not None and model not in (engine.model, *roots(engine.model)):
            raise GeminiError(
                f"{type(model).__name__} has parameters that an engine of {title(engine.model)} manages: "
                "close() it first, or prepare the model that is managed"
            )
        return engine

    def _manage(
        self, models: list[nn.Module], optimizer: Optimizer | None, precision: str | None
    ) -> Engine:
        for model in models if self.compiling is not None else ():
            compile_layers(model, self.compiling)
        arguments = {**self.plugin.arguments(), **self.scaling}
        is_mixed = precision is not None and precision.endswith("-mixed")
        with _dropping_lows(models):
            engine = manage(
                models[0] if len(models) == 1 else models,
                optimizer,
                device=self.device,
                precision=precision,
                convert_inputs=True,
                force_outputs_fp32=is_mixed,
                **arguments,
            )
        engine._runtime.called = "gemini_strategy.engine_of(model)"
        engine._runtime.unfreezing = (
            "unfreeze it before trainer.train() or accelerator.prepare() (of a TrainerCallback on_init_end is early "
            "enough, on_train_begin is not)"
        )
        _made[engine] = len(models)
        return engine

    # ---- gradients ----

    def clipped(self, parameters: Iterable[Tensor], call: str) -> Engine | None:
        """The engine whose gradients are to be clipped; None: the parameters are managed by none.

        Raises:
            GeminiError: they are of several engines, or not all that one engine trains.
        """
        given = list(parameters)
        slots = [getattr(parameter, "_gm_slot", None) for parameter in given]
        engines = {slot.engine.engine for slot in slots if slot is not None}
        if not engines:
            return None
        if len(engines) > 1:
            raise GeminiError(
                f"accelerator.{call}: the parameters are of {len(engines)} models that are trained apart: clip those "
                "of each model by themselves, or give both to one optimizer"
            )
        engine: Engine = engines.pop()
        groups = engine.optimizer.param_groups if engine.optimizer is not None else ()
        trained = {id(p) for group in groups for p in group["params"] if p.requires_grad}
        ids = {id(parameter) for parameter in given if parameter.requires_grad}
        if ids != trained:
            raise GeminiError(
                f"accelerator.{call} was given {len(ids)} trainable parameters, and the optimizer of "
                f"{title(engine.model)} has {len(trained)}, {len(ids & trained)} of them: Gemini clips all gradients "
                "of a model together, and those of models that share an optimizer. Give model.parameters() (of each), "
                "and all that is trainable to the optimizer"
            )
        return engine


class ZeroGrad(Attached):
    """A model's `zero_grad` while it is trained: all gradients at once, as a Trainer drops them after each step.

    nn.Module's own reads the gradient of every parameter first, which takes the host milliseconds. A deep copy of the
    model, and a model without an engine, have their class's own.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, set_to_none: bool = True) -> None:
        engine = engine_of(self._model)
        if engine is None or engine.optimizer is None or engine.model is not self._model:
            type(self._model).zero_grad(self._model, set_to_none)
        else:
            engine.zero_grad(set_to_none)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return types.MethodType(type(self._model).zero_grad, memo[id(self._model)])

    def __reduce__(self) -> Any:
        return getattr, (self._model, "zero_grad")


def _models(engine: Engine) -> list[nn.Module]:
    """What it was made of."""
    return [*engine.model.children()] if (_made.get(engine) or 1) > 1 else [engine.model]


def models_of(optimizer: Optimizer, models: Iterable[nn.Module]) -> list[nn.Module]:
    """The models that have an optimizer's parameters, in their order; no part of another is one.

    Raises:
        GeminiError: there is none, or some parameters are in none.
    """
    known = list(models)
    inner = {part for model in known for part in model.modules() if part is not model}
    wanted = {p for group in optimizer.param_groups for p in group["params"]}
    own = {model: wanted.intersection(model.parameters()) for model in known if model not in inner}
    lacking = wanted.difference(*own.values())
    if wanted and not lacking:
        return [model for model, found in own.items() if found]
    some = f"{len(lacking)} of the {len(wanted)}" if len(lacking) < len(wanted) else "the"
    raise GeminiError(
        f"no model that was given to accelerator.prepare() has {some} parameters of this {type(optimizer).__name__}: "
        "prepare the models with their optimizer, model, optimizer = accelerator.prepare(model, optimizer)"
    )


@contextlib.contextmanager
def _dropping_lows(models: list[nn.Module]) -> Iterator[None]:
    """What a manage() that fails inside has left of the masters before is dropped: other weights may be loaded until
    the next."""
    try:
        yield
    except BaseException:
        for parameter in (p for model in models for p in model.parameters()):
            parameter.__dict__.pop("_gm_low", None)
        raise


def is_replaced(optimizer: Optimizer) -> bool:
    """Whether its model is trained with another one that was prepared later."""
    return "_gm_replaced" in optimizer.__dict__


def _is_complete(engine: Engine, models: list[nn.Module]) -> bool:
    """Whether the engine has every parameter, with a place for the gradient of each that is trained."""
    for parameter in (p for model in models for p in model.parameters()):
        slot = getattr(parameter, "_gm_slot", None)
        if slot is None or slot.engine.engine is not engine:
            return False
        if parameter.requires_grad and not slot.has_grad_home:
            return False
    return not engine._runtime.thawed


def _computes_in(engine: Engine, dtype: torch.dtype | None) -> bool:
    matrices = [s.dtype for s in engine._runtime.slots if len(s.shape) > 1]
    return all(each is dtype for each in matrices if each.is_floating_point)


def close_for_another(engine: Engine, with_states: bool) -> None:
    """Closes an engine so that the next one begins with exactly its values (invariant 1)."""
    # Weights that leave in 16 bits keep their dtype, so what they lack goes beside them, where manage() finds it.
    slots = [s for s in engine._runtime.slots if s.has_low and s.outer_dtype is s.dtype]
    lows = {slot.parameter: slot.lack()[1] for slot in slots}
    close(engine._runtime, None, with_states, is_told=False)
    for parameter, low in lows.items():
        parameter._gm_low = low
