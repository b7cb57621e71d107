# The strategy of Fabric: how one Lightning tree hands the models and optimizers of a loop of one's own to engines.
#
# `build_fabric_strategy(tree)` joins `FabricStrategy` with the base of one tree; nothing here imports Lightning.
#
# Invariants
#   1. Each model that is set up has an engine of its own, with one optimizer or none. The model keeps its class and is
#      wrapped for Fabric only, so that Fabric sends its steps through `forward`, where inputs are cast.
#   2. What a model has when it is set up, again or with an optimizer at last, are the values it had before, to the bit.
#   3. Checkpoints hold plain keys, fp32 masters and Adam's own state form: files are interchangeable with those of
#      Lightning's single-device and DDP strategies, and with those of a Trainer.
#   4. Whatever cannot be honoured is refused by name.

import functools
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gemini_strategy as gs
from gemini_strategy.lightning.engine_strategy import EngineStrategy, joined
from gemini_strategy.lightning.engines import (
    engine_of_optimizer,
    engines_of_parts,
    masters_of,
    states_of,
)
from gemini_strategy.lightning.precision import fabric_precision_class, plugin_property
from gemini_strategy.lightning.ranks import is_mappable, load_mapped
from gemini_strategy.lightning.settings import OfFabric
from gemini_strategy.lightning.trees import Tree
from gemini_strategy.roots import title
from gemini_strategy.weakly import WeakSet

# The engines that a Fabric's strategy made.
_made: "WeakSet[Any]" = WeakSet()


class FabricStrategy(EngineStrategy):
    """Train, evaluate and predict with Fabric and the models' state in chunks, on CUDA GPUs or on CPU hosts.

    ``Fabric(strategy="gemini")`` uses the defaults, ``"gemini_cpu"`` and ``"gemini_cuda"`` the placement policies of
    the same name. ``fabric.launch()`` comes first, with one device too. ``fabric.setup(model, optimizer)`` makes an
    engine, which ``gemini_strategy.engine_of(model)`` gives; its ``close()`` makes the model ordinary again.
    ``fabric.setup_module(model)`` makes one without an optimizer; ``fabric.setup_optimizers(optimizer)`` afterwards
    makes it anew, from the same values.

    With several devices each has a process, a rank, with batches of its own and 1/N of every chunk. All ranks begin
    with rank 0's values. Gradients are averaged over the ranks in every backward, also inside
    ``fabric.no_backward_sync``. ``fabric.save`` and ``strategy.get_module_state_dict`` are called by all ranks; rank 0
    writes the file, and the state dict is empty on the others.

    Precision is Fabric's: ``"32-true"`` (parameters made fp32), ``"bf16-true"``, ``"bf16-mixed"`` (weights and compute
    in bf16, fp32 masters in the engine), ``"16-mixed"`` (fp16 with a loss scale; each model has its own). Parameters
    are built in fp32 whatever the precision, so that the masters start from the values the model was made with.

    Sizes are bytes, as an int or a string (``"64MiB"``, ``"24GB"``); budgets also a fraction of what there is, in
    (0, 1]. They are of each model that is set up.

    Args:
        given: OfFabric, in settings.py.

    Raises:
        ValueError, TypeError: an argument outside what is listed above.
        MisconfigurationException: at construction of the Fabric, for other accelerators, and where the number of
            processes or the mesh does not fit its devices.
    """

    _call = "GeminiFabricStrategy"
    _table = OfFabric
    _runner = "Fabric"
    _precision_argument = "precision"
    _elsewhere = "fabric_strategy_class, for a Trainer strategy_class"
    _loaded: ClassVar = WeakSet()

    def __init__(self, **given: Unpack[OfFabric]) -> None:
        self._mine: WeakSet[Any] = WeakSet()
        super().__init__(dict(given))
        self._backward_sync_control = _EveryBackward()

    precision = plugin_property("_precision", fabric_precision_class)

    def _set_world_ranks(self) -> None:
        self.set_world_ranks()

    @property
    def distributed_sampler_kwargs(self) -> Any:
        # None: one device keeps the sampler that it is given.
        return super().distributed_sampler_kwargs if self.is_distributed else None

    def setup_environment(self) -> None:
        super().setup_environment()
        self.precision.device = self.root_device.type

    # -- models and optimizers -------------------------------------------------------------------------------

    def _engines(self) -> Iterable[Any]:
        return [engine for engine in self._mine if not engine.closed]

    def module_to_device(self, module: nn.Module) -> None:
        # The engine places parameters; a metric or a loss has none.
        if next(module.parameters(), None) is None:
            module.to(self.root_device)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        if len(optimizers) != 1:
            names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
            raise self._misconfiguration(
                f"strategy='gemini' trains a model with exactly one optimizer; fabric.setup() got {names}. Put all"
                " trainable parameters into one, with a parameter group for each setting."
            )
        return self._set_up(module, optimizers[0]), optimizers, scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        return self._set_up(module, None)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        slots = [getattr(parameter, "_gm_slot", None) for parameter in parameters]
        engines = {slot.engine.engine for slot in slots if slot is not None}
        if None in slots or len(engines) != 1 or not engines <= set(self._engines()):
            raise RuntimeError(
                "strategy='gemini': fabric.setup_optimizers(optimizer) needs an optimizer over parameters of one model"
                " that is set up. Set up the model first, model = fabric.setup_module(model), or both together, model,"
                " optimizer = fabric.setup(model, optimizer). Where one optimizer trains several, make them parts of"
                " one module, whose forward calls them, and set up that."
            )
        engine = engines.pop()
        if engine.optimizer is not None:
            raise self._misconfiguration(
                f"strategy='gemini' trains a model with exactly one optimizer, and {title(engine.model)} has"
                f" one: put the parameters of the new {type(optimizer).__name__} into a group of it, and set up both"
                " with fabric.setup(model, optimizer)."
            )
        self._set_up(engine.model, optimizer)
        return optimizer

    def _set_up(self, module: nn.Module, optimizer: Optimizer | None) -> nn.Module:
        for engine in engines_of_parts(module):
            if engine not in _made or engine.model is not module:
                raise gs.GeminiError(
                    f"{type(module).__name__} has parameters that an engine of {title(engine.model)} manages:"
                    " call gemini_strategy.engine_of(model).close() first, or set up the model that is managed."
                )
            engine.close(dtype=torch.float32)
        self._make_ready(module)
        engine = self._make_engine(module, optimizer, self.report)
        if engine is not None:
            _made.add(engine)
            self._loaded.add(module)
            self._mine.add(engine)
            self.precision.attach(engine)
        self._set_device_and_dtype(module)
        return Managed(module)

    module_init_context = EngineStrategy._made_on_host

    # -- a step ----------------------------------------------------------------------------------------------

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        engine = engine_of_optimizer(optimizer)
        if engine is None:
            return super().clip_gradients_norm(
                module, optimizer, max_norm, norm_type, error_if_nonfinite
            )
        return engine.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    def clip_gradients_value(
        self, module: nn.Module, optimizer: Optimizer, clip_val: float
    ) -> None:
        engine = engine_of_optimizer(optimizer)
        if engine is None:
            super().clip_gradients_value(module, optimizer, clip_val)
        else:
            engine.clip_grad_value_(clip_val)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean (or what `reduce_op` names) over the ranks; a tensor is changed in place, as Fabric has it."""
        reduced = self.reduce(tensor, group, reduce_op)
        if reduced is tensor or not isinstance(tensor, Tensor):
            return reduced
        with torch.no_grad():
            return tensor.copy_(reduced)

    # -- checkpoints -----------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Any = None,  # noqa: A002 (Lightning's name)
    ) -> None:
        """One file, written by rank 0; all ranks call this. Raises on every rank if it cannot be written."""
        saved = self._convert_stateful_objects_in_state(state, filter or {})

        def write() -> None:
            if not self._write_plain(saved, path, storage_options):
                self.checkpoint_io.save_checkpoint(
                    checkpoint=saved, path=path, storage_options=storage_options
                )

        self._on_rank_0("fabric.save", path, write)

    def _convert_stateful_objects_in_state(self, state: dict[str, Any], filters: Any) -> Any:
        modules = {id(obj.module) for obj in state.values() if isinstance(obj, Managed)}
        modules |= {id(obj) for obj in state.values() if isinstance(obj, nn.Module)}
        known = {}
        for key, obj in state.items():
            engine = engine_of_optimizer(obj) if isinstance(obj, Optimizer) else None
            if engine is not None and id(engine.model) in modules:  # the masters are beside it
                obj = states_of(engine, self.is_distributed, for_file=True)
            known[key] = obj
        return super()._convert_stateful_objects_in_state(known, filters)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return masters_of(_unwrapped(module), self.is_distributed, for_file=True)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        engine = engine_of_optimizer(optimizer)
        if engine is not None and self.is_distributed:
            return engine.optimizer_state_dict(rank0_only=True)
        return super().get_optimizer_state(optimizer)

    def load_module_state_dict(
        self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        module = _unwrapped(module)
        engine = gs.engine_of(module)
        with nullcontext() if engine is None else engine.ranks.revealing():
            module.load_state_dict(state_dict, strict=strict)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """See Fabric.load and Fabric.load_raw; every rank reads the file."""
        is_raw = isinstance(state, nn.Module | Optimizer)
        copied = [] if is_raw else [k for k, v in (state or {}).items() if _is_copied(v)]
        checkpoint = self._read(path, weights_only, None if is_raw else copied)
        if not state:
            return checkpoint
        if is_raw:
            self._load(state, checkpoint, strict)
            return {}
        missing = [key for key in state if key not in checkpoint]
        if missing and strict:
            raise KeyError(
                f"{path}: what fabric.load() is to fill contains a key {missing[0]!r} that does not exist in the"
                f" checkpoint, which has {', '.join(map(repr, checkpoint))}. strict=False loads what there is."
            )
        for key in [key for key in state if key in checkpoint]:
            value = checkpoint.pop(key)
            if hasattr(state[key], "state_dict") and hasattr(state[key], "load_state_dict"):
                self._load(state[key], value, strict)
            else:
                state[key] = value
        return checkpoint

    def _read(self, path: Any, weights_only: bool | None, copied: list[str] | None) -> Any:
        if self._has_plain_io and is_mappable(path):
            return load_mapped(path, weights_only, copied)
        return self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)

    def _load(self, target: Any, value: Any, strict: bool) -> None:
        if isinstance(target, nn.Module):
            self.load_module_state_dict(target, value, strict)
        else:
            target.load_state_dict(value)


class Managed(nn.Module):
    """A model as Fabric calls it.

    It is another module than the model, so that Fabric sends `training_step` and what `mark_forward_method` names
    through `forward`, with inputs cast and under autocast, and refuses other methods that would compute without.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        engine = gs.engine_of(self.module)
        if engine is None:
            return self.module(*args, **kwargs)
        # Here and not only in the model's `forward`, which a step may not call.
        with engine.meter.counting((args, kwargs)), engine.ranks.explaining():
            return self.module(*args, **kwargs)


class _EveryBackward:
    """Fabric's switch for accumulation: ranks share the memory of gradients, so each backward averages its own."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return nullcontext()


def _unwrapped(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, Managed) else module


def _is_copied(target: Any) -> bool:
    """Whether what is loaded into this is copied into chunks."""
    if isinstance(target, Optimizer):
        return engine_of_optimizer(target) is not None
    return isinstance(target, nn.Module) and gs.engine_of(target) is not None


def build_fabric_strategy(tree: Tree) -> type:
    """The Fabric strategy class of `tree` (see :data:`gemini_strategy.lightning.GeminiFabricStrategy`)."""
    fabric = tree.fabric
    base = fabric.strategies.ParallelStrategy

    # Wrapped: Fabric, which asks, then sees its own backward, and takes `loss.backward()` too where nothing is scaled.
    @functools.wraps(base.backward)
    def backward(self: Any, *args: Any, **kwargs: Any) -> None:
        with self._explaining():
            base.backward(self, *args, **kwargs)

    return joined(FabricStrategy, fabric, tree, backward=backward)
