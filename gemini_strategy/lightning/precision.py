# The precision plugin: how one Lightning tree casts, scales and clips when the engine holds the weights.
#
# Lightning knows no third-party precision, so a strategy is handed `Precision`, `MixedPrecision` or
# `HalfPrecision`; `precision_class(tree)` builds the plugin of one tree for its Trainer, `fabric_precision_class(tree)`
# that for its Fabric, and `plugin_property` turns those into them. Nothing here imports Lightning: a tree is given as
# modules.
#
# Invariants
#   1. A plugin that cannot be honoured exactly is refused by name, never replaced by a near one.
#   2. The plugin holds no tensors: gradients, scale and masters belong to the engine.
#   3. A checkpoint carries the scale twice, under our name and under Lightning's "MixedPrecision", so that it
#      resumes under either.

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning_utilities import apply_to_collection
from torch import Tensor

import gemini_strategy as gs
from gemini_strategy.choices import PRECISIONS
from gemini_strategy.lightning.trees import Tree, import_tree, made_for
from gemini_strategy.precision import Precision, in_forward
from gemini_strategy.weakly import WeakSet

_COMPUTE_DTYPE = {name: Precision(name).dtype or torch.float32 for name in PRECISIONS}
# Where other plugins of Lightning store a gradient scale, in the order in which they are looked for.
_FOREIGN_SCALES = ("MixedPrecision", "FSDPPrecision")
_SCALER_FIELDS = ("scale", "growth_factor", "backoff_factor", "growth_interval")


class EnginePrecision:
    """What a Trainer and Fabric have around an engine alike. To be inherited from before the tree's own plugin.

    `precision` is one of PRECISIONS.
    """

    _tree: Tree
    device = "cpu"  # where forward runs, as in MixedPrecision

    def __init__(self, precision: str = "32-true") -> None:
        self.precision = precision

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the weights that forward sees."""
        return _COMPUTE_DTYPE[self.precision]

    @property
    def module_dtype(self) -> torch.dtype:
        """What ``LightningModule.dtype`` says: as under Lightning's own plugins, only ``*-true`` changes it."""
        return self.compute_dtype if self.precision.endswith("-true") else torch.float32

    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        if self.precision.endswith("-mixed"):
            mixed = torch.autocast(self.device, dtype=self.compute_dtype, cache_enabled=False)
            with in_forward(), mixed:
                yield
            return
        previous = torch.get_default_dtype()
        if self.precision == "bf16-true":
            torch.set_default_dtype(self.compute_dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(previous)


class TrainerPrecision(EnginePrecision):
    """What happens around the engine in one of the precisions of PRECISIONS, under a Trainer.

    To be inherited from before the tree's own plugin; see `precision_class`.

    ``32-true``: nothing is cast. ``bf16-true``: floating inputs and new tensors are bf16. ``bf16-mixed``,
    ``16-mixed``: forward runs under autocast. ``16-mixed``: the loss is scaled by the engine's loss scale.
    """

    def __init__(self, precision: str = "32-true") -> None:
        super().__init__(precision)
        self._engine: Any = None  # whatever is trained has one
        self.ends_step = False  # the strategy's word on the backward that comes

    def attach(self, engine: Any, device: torch.device) -> None:
        """Serve `engine` (None: a module without parameters), whose forward runs on `device`."""
        self._engine = engine
        self.device = device.type

    def convert_input(self, data: Any) -> Any:
        if self.precision != "bf16-true":
            return data
        return apply_to_collection(data, Tensor, cast_floating, self.compute_dtype)

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        return super().pre_backward(self._engine._runtime.scale(tensor), module)

    def backward(
        self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        # Through LightningModule.backward, which users override.
        engine = self._engine
        ending = engine.ends_step() if self.ends_step else nullcontext()
        with engine._runtime.explaining(), engine._runtime.accept_scaled(), ending:
            super().backward(tensor, model, optimizer, *args, **kwargs)

    def optimizer_step(
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if self.precision != "16-mixed":
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        # The order of Lightning's MixedPrecision: backward, then the hooks and clipping, then a step that may be
        # skipped. `training_step` that returned None made no gradient, so there is nothing to judge.
        result = closure()
        self._after_closure(model, optimizer)
        if result is None and model.automatic_optimization:
            return result
        return optimizer.step(**kwargs)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        self._engine.clip_grad_norm_(clip_val)

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        self._engine.clip_grad_value_(clip_val)

    def state_dict(self) -> dict[str, Any]:
        scaler = None if self._engine is None else self._engine.scaler
        return {} if scaler is None else scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        scaler = None if self._engine is None else self._engine.scaler
        if scaler is not None:
            scaler.load_state_dict(state_dict)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = self.state_dict()
        if state:
            checkpoint["MixedPrecision"] = state

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if type(self).__qualname__ in checkpoint:
            return
        for name in _FOREIGN_SCALES:
            if checkpoint.get(name):
                self.load_state_dict(checkpoint[name])
                return

    def __getstate__(self) -> dict[str, Any]:
        # An engine cannot be copied or pickled; the copy is attached anew by the next setup.
        return {**vars(self), "_engine": None}

    def __reduce__(self) -> Any:
        # The classes of both trees have one name, under which checkpoints have the scale.
        return _plain_plugin, (self._tree.name,), self.__getstate__()


class FabricPrecision(EnginePrecision):
    """What happens around the engines in one of the precisions of PRECISIONS, under Fabric.

    To be inherited from before the tree's own plugin; see `fabric_precision_class`. Like Fabric's own plugins, it casts
    floating inputs of a model to the precision's dtype, and its floating outputs to torch's default dtype.
    ``bf16-mixed``, ``16-mixed``: forward runs under autocast.
    """

    def __init__(self, precision: str = "32-true") -> None:
        super().__init__(precision)
        self._engines: WeakSet[Any] = WeakSet()
        if precision == "16-mixed":
            # Of the instance: where it is the class's, Fabric refuses `loss.backward()`, which other precisions take.
            self.backward = self._scaled_backward

    def attach(self, engine: Any) -> None:
        """Serve `engine`, one of a Fabric's."""
        self._engines.add(engine)

    def tensor_init_context(self) -> Any:
        return self.forward_context() if self.precision == "bf16-true" else nullcontext()

    def convert_input(self, data: Any) -> Any:
        if self.precision == "32-true":
            return data
        return apply_to_collection(data, Tensor, cast_floating, self.compute_dtype)

    def convert_output(self, data: Any) -> Any:
        if self.precision == "32-true":
            return data
        return apply_to_collection(data, Tensor, cast_floating, torch.get_default_dtype())

    def _scaled_backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        engine = self._engine_of(model)
        if engine is None:
            tensor.backward(*args, **kwargs)
            return
        with engine._runtime.accept_scaled():
            engine._runtime.scale(tensor).backward(*args, **kwargs)

    def _engine_of(self, model: Any) -> Any:
        """The engine whose loss scale a backward has; each model that is trained has its own."""
        scaled = [engine for engine in self._engines if not engine.closed and engine.optimizer]
        found = scaled if model is None else [e for e in scaled if e is gs.engine_of(model)]
        if len(found) > 1:
            raise gs.GeminiError(
                f"fabric.backward(loss): {len(found)} models are trained in '16-mixed', each with a loss scale of its"
                " own: say whose loss it is, with fabric.backward(loss, model=model)."
            )
        return found[0] if found else None


@functools.cache
def precision_class(tree: Tree) -> type:
    """The precision plugin class of `tree`; made at the first call. Under this name checkpoints have the scale."""
    return made_for(tree, "GeminiPrecision", TrainerPrecision, tree.pl.plugins.Precision)


@functools.cache
def fabric_precision_class(tree: Tree) -> type:
    """The precision plugin class of the Fabric of `tree`; made at the first call."""
    plain = tree.fabric.plugins.precision.Precision
    return made_for(tree, "GeminiFabricPrecision", FabricPrecision, plain)


def plugin_property(attribute: str, class_of: Callable[[Tree], type]) -> Any:
    """A strategy's precision plugin, which is one of ours whatever Lightning sets; it keeps it as `attribute`."""

    def get(strategy: Any) -> Any:
        plugin = getattr(strategy, attribute)
        return class_of(strategy._tree)() if plugin is None else plugin

    def put(strategy: Any, plugin: Any) -> None:
        ours = class_of(strategy._tree)
        setattr(
            strategy, attribute, None if plugin is None else _translated(plugin, strategy, ours)
        )

    return property(get, put)


def _translated(plugin: Any, strategy: Any, ours: type) -> Any:
    """Our plugin for one of Lightning's (the strategy's tree), or the plugin itself when it is ours.

    Raises:
        TypeError: a plugin class that is not one of ``Precision``, ``MixedPrecision``, ``HalfPrecision``,
            or a plugin of the other tree.
        ValueError: a precision outside of PRECISIONS, or a gradient scaler with its own settings.
    """
    plugins, call, runner = strategy._home.plugins, strategy._call, strategy._runner
    strategy._tree.check(strategy._precision_argument, plugin, plugins.Precision, call)
    if isinstance(plugin, ours):
        return plugin
    refusal = (
        f"strategy='gemini' does not support {{}}. Supported: {runner}(precision=...) with"
        f" {', '.join(map(repr, PRECISIONS))}."
    )
    if type(plugin) not in (plugins.Precision, plugins.MixedPrecision, plugins.HalfPrecision):
        raise TypeError(refusal.format(f"the precision plugin {type(plugin).__qualname__}"))
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None and not _is_default_scaler(scaler):
        raise ValueError(
            "strategy='gemini' keeps its own loss scale and would ignore the settings of the gradient scaler"
            f" in MixedPrecision(scaler=...): pass {call}(initial_scale=..., growth_factor=..., backoff_factor=...,"
            f" growth_interval=..., hysteresis=...) and {runner}(precision='16-mixed')."
        )
    if plugin.precision not in PRECISIONS:
        raise ValueError(refusal.format(f"precision={plugin.precision!r}"))
    return ours(plugin.precision)


def _plain_plugin(tree: str) -> Any:
    """What is unpickled into; in a process that has no class of that tree yet, too."""
    return precision_class(import_tree(tree))()


def cast_floating(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` in `dtype` when it is floating point, itself otherwise."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _is_default_scaler(scaler: Any) -> bool:
    default = torch.amp.GradScaler(device="cpu")
    if type(scaler) is not torch.amp.GradScaler and not isinstance(
        scaler, torch.cuda.amp.GradScaler
    ):
        return False
    ours, theirs = default.state_dict(), scaler.state_dict()
    # A disabled scaler (no such device here) has an empty state.
    return not theirs or all(theirs[name] == ours[name] for name in _SCALER_FIELDS)
