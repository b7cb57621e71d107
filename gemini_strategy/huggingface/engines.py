"""Which engine trains which model: what an Accelerator needs to know of them.

Invariants
    1. A model has at most one open engine, with one optimizer or none; a new one begins with exactly the values that
       the last one held, masters included, and with the dtypes that the model came in.
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
from gemini_strategy.huggingface.compiling import compile_layers
from gemini_strategy.huggingface.plugin import GeminiPlugin
from gemini_strategy.huggingface.refusals import check_model
from gemini_strategy.parameters.registration import keeping_fp32
from gemini_strategy.precision import Precision
from gemini_strategy.weakly import WeakSet

# The engines that this layer has made in this process.
_made: WeakSet[Engine] = WeakSet()
_n_made = 0


def all_made() -> int:
    """How many engines this layer has made in this process."""
    return _n_made


@dataclass(eq=False)
class Engines:
    """Makes engines with one plugin, on one device and in one precision.

    Attributes:
        plugin: what manage() is given.
        device: where models compute.
        precision: manage()'s; None keeps the dtypes of a model.
        scaling: manage()'s arguments of the loss scale.
        compiling: torch.compile's arguments for the layers of a model; None: they are not compiled.
    """

    plugin: GeminiPlugin
    device: torch.device
    precision: str | None
    scaling: dict[str, Any]
    compiling: dict[str, Any] | None

    def train(self, model: nn.Module, optimizer: Optimizer) -> Engine:
        """The engine that trains `model` with `optimizer`; see the invariants.

        Raises:
            GeminiError: the model or the optimizer cannot be managed, by name.
        """
        check_model(model)
        if optimizer.__dict__.get("_gm_replaced") and not optimizer.state:
            raise GeminiError(
                f"this {type(optimizer).__name__} has lost its moments: another one of the same model was prepared "
                "after it had stepped. Prepare a new one (trainer.optimizer = None makes a Trainer do so), or keep its "
                "state_dict() before and load that into it"
            )
        engine = self._found(model)
        if engine is not None:
            if engine.optimizer is optimizer and _is_complete(engine, model):
                return engine
            if engine not in _made:
                raise GeminiError(
                    f"{type(model).__name__} is managed already, without this {type(optimizer).__name__}: give the "
                    "model to the Accelerator or the Trainer before gemini_strategy.manage(), or close() its engine"
                )
            if engine.optimizer not in (None, optimizer):
                states = engine.optimizer.state.values()
                engine.optimizer._gm_replaced = any("exp_avg" in each for each in states)
            close_for_another(engine, with_states=engine.optimizer is optimizer)
        engine = self._manage(model, optimizer, self.precision)
        optimizer.__dict__.pop("_gm_replaced", None)
        model.zero_grad = ZeroGrad(model)  # type: ignore[method-assign]
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
        return self._manage(model, None, precision or self.precision)

    def _found(self, model: nn.Module) -> Engine | None:
        engine = engine_of(model)
        if engine is not None and engine.model is not model:
            raise GeminiError(
                f"{type(model).__name__} has parameters that an engine of {type(engine.model).__name__} manages: "
                "close() it first, or prepare the model that is managed"
            )
        return engine

    def _manage(
        self, model: nn.Module, optimizer: Optimizer | None, precision: str | None
    ) -> Engine:
        global _n_made
        if self.compiling is not None:
            compile_layers(model, self.compiling)
        arguments = {**self.plugin.arguments(), **self.scaling}
        is_mixed = precision is not None and precision.endswith("-mixed")
        with _whole(model, precision is not None):
            engine = manage(
                model,
                optimizer,
                device=self.device,
                precision=precision,
                convert_inputs=True,
                force_outputs_fp32=is_mixed,
                **arguments,
            )
        _made.add(engine)
        _n_made += 1
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
                "of each model by themselves"
            )
        engine: Engine = engines.pop()
        groups = engine.optimizer.param_groups if engine.optimizer is not None else ()
        trained = {id(p) for group in groups for p in group["params"] if p.requires_grad}
        ids = {id(parameter) for parameter in given if parameter.requires_grad}
        if ids != trained:
            raise GeminiError(
                f"accelerator.{call} was given {len(ids)} trainable parameters, and the optimizer of "
                f"{type(engine.model).__name__} has {len(trained)}, {len(ids & trained)} of them: Gemini clips all "
                "gradients of a model together. Give model.parameters(), and all that is trainable to the optimizer"
            )
        return engine


class ZeroGrad:
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


def model_of(optimizer: Optimizer, models: Iterable[nn.Module]) -> nn.Module:
    """The model that has all of an optimizer's parameters.

    Raises:
        GeminiError: there is none.
    """
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for model in models:
        if wanted and wanted <= {id(p) for p in model.parameters()}:
            return model
    raise GeminiError(
        f"no model that was given to accelerator.prepare() has all the parameters of this {type(optimizer).__name__}: "
        "prepare the model with its optimizer, model, optimizer = accelerator.prepare(model, optimizer); an optimizer "
        "trains one model"
    )


@contextlib.contextmanager
def _whole(model: nn.Module, is_cast: bool) -> Iterator[None]:
    """Inside, manage() keeps the fp32 values of frozen parameters, which are saved, or trained later.

    The base of adapters is not: it is as large as the model, and its own files have it. What a manage() that fails has
    left of the masters before is dropped: other weights may be loaded until the next.
    """
    is_base = bool(getattr(model, "peft_config", None))
    frozen = [p for p in model.parameters() if not p.requires_grad and p.dtype is torch.float32]
    try:
        with keeping_fp32(frozen if is_cast and not is_base else ()):
            yield
    except BaseException:
        for parameter in model.parameters():
            parameter.__dict__.pop("_gm_low", None)
        raise


def is_replaced(optimizer: Optimizer) -> bool:
    """Whether its model is trained with another one that was prepared later."""
    return "_gm_replaced" in optimizer.__dict__


def _is_complete(engine: Engine, model: nn.Module) -> bool:
    """Whether the engine has every parameter, with a place for the gradient of each that is trained."""
    for parameter in model.parameters():
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
    if engine.precision is not None:
        engine.close(dtype=torch.float32, with_states=with_states)
        return
    # 16-bit weights keep their dtype, so what they lack goes beside them, where manage() finds it.
    lows = {s.parameter: s.lack()[1] for s in engine._runtime.slots if s.has_low}
    engine.close(with_states=with_states)
    for parameter, low in lows.items():
        parameter._gm_low = low


def masters_of(model: nn.Module, rank0_only: bool) -> dict[str, Any] | None:
    """`model.state_dict()` with fp32 masters, on the CPU; None if the model is not managed.

    Args:
        rank0_only: all ranks call it, but only rank 0 gets the state, the others an empty dict.
    """
    engine = engine_of(model)
    if engine is None:
        return None
    if engine.model is model:
        return engine.model_state_dict(rank0_only=rank0_only)
    state = dict(model.state_dict())
    for name, parameter in model.named_parameters(remove_duplicate=False):
        slot = getattr(parameter, "_gm_slot", None)
        if slot is not None and name in state:
            state[name] = slot.read_master(0 if rank0_only else None)
    return {} if rank0_only and engine.ranks.rank else state
