# The strategy: how one Lightning tree hands its LightningModule, optimizer and stages to an engine.
#
# `build_strategy(tree)` joins `Strategy` with the base of one tree; nothing here imports Lightning.
#
# Invariants
#   1. The LightningModule is never wrapped: `strategy.model is strategy.lightning_module`, always.
#   2. The strategy owns no engine: it finds the one that manages the module, so a strategy can be torn down, replaced
#      or pickled while the engine lives on, and `trainer.save_checkpoint` works after `fit`.
#   3. An engine is reused only if every parameter of the module is in it and it was made with the same configuration;
#      otherwise it is closed to its fp32 masters and a new one starts from exactly those values.
#   4. `configure_optimizers` always sees ordinary parameters (on the meta device where the module was built there), and
#      its optimizer is the one that the engine takes over.
#   5. Whatever cannot be honoured is refused by name, at construction of the Trainer if it is known then.

import sys
from collections.abc import Callable
from typing import Any, ClassVar, Unpack

import torch
from lightning_utilities import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

import gemini_strategy as gs
from gemini_strategy.arguments import Arguments
from gemini_strategy.lightning.averaging import put_over_masters, take_from_masters
from gemini_strategy.lightning.checkpoints import Checkpoints
from gemini_strategy.lightning.engine_strategy import EngineStrategy, joined
from gemini_strategy.lightning.engines import engines_of_parts
from gemini_strategy.lightning.logs import StepLogs
from gemini_strategy.lightning.precision import cast_floating, plugin_property, precision_class
from gemini_strategy.lightning.schedule import StepSchedule, saves_after_errors
from gemini_strategy.lightning.settings import OfTrainer
from gemini_strategy.lightning.trainer_ranks import TrainerRanks
from gemini_strategy.lightning.trees import Tree
from gemini_strategy.weakly import WeakSet, WeakTable

# How each engine that a strategy made was configured: (device, precision, arguments of gs.manage).
_configurations: WeakTable[Any, tuple[Any, ...]] = WeakTable()


class Strategy(StepLogs, StepSchedule, Checkpoints, TrainerRanks):
    """Train, evaluate and predict with the model's state in chunks, on CUDA GPUs or on CPU hosts.

    ``Trainer(strategy="gemini")`` uses the defaults, ``"gemini_cpu"`` and ``"gemini_cuda"`` the placement
    policies of the same name. The engine stays with the LightningModule after a stage has ended;
    ``strategy.engine.close()`` makes it an ordinary module with the trained weights.

    With several devices (``Trainer(devices=N, num_nodes=M)``, torchrun, SLURM) each has a process, a rank, with
    batches of its own and 1/N of every chunk. All ranks begin with rank 0's values. Gradients are averaged over
    the ranks, in every micro-batch where they are accumulated. The ranks make a checkpoint together and rank 0
    writes it: all of them must call ``trainer.save_checkpoint`` and ``lightning_module_state_dict``, which is
    empty on the others. Buffers are rank 0's at the start and in checkpoints, and each rank's own in between.
    With one device no launcher is used, so notebooks work.

    Precision is the Trainer's: ``"32-true"`` (parameters made fp32), ``"bf16-true"``, ``"bf16-mixed"`` (weights
    and compute in bf16, fp32 masters in the engine), ``"16-mixed"`` (fp16 with a loss scale). Parameters are
    built in fp32 whatever the precision, so that the masters start from the values the model was made with.

    Sizes are bytes, as an int or a string (``"64MiB"``, ``"24GB"``); budgets also a fraction of what there is, in
    (0, 1].

    Args:
        given: OfTrainer, in settings.py.

    Raises:
        ValueError, TypeError: an argument outside what is listed above.
        MisconfigurationException: at construction of the Trainer, for other accelerators, and where the number of
            processes or the mesh does not fit its devices.
    """

    _call = "GeminiStrategy"
    _table = OfTrainer
    _precision_argument = "precision_plugin"
    _elsewhere = "strategy_class, for Fabric fabric_strategy_class"
    _loaded: ClassVar = WeakSet()
    _averaging: tuple[type, ...]  # callbacks that copy the module

    def __init__(self, **given: Unpack[OfTrainer]) -> None:
        super().__init__(dict(given))
        Arguments(self._call, given).check_number("min_scale", 0, None, is_exclusive=True)
        self.force_outputs_fp32 = given["force_outputs_fp32"]
        self.checkpoint_weights_only = given["checkpoint_weights_only"]
        self.state_dict_type = given["state_dict_type"]
        self.update_schedule = given["update_schedule"]

    precision_plugin = plugin_property("_precision_plugin", precision_class)

    # -- a stage ---------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Any:
        """The engine that manages the LightningModule, or None."""
        module = self.lightning_module
        found = None if module is None else gs.engine_of(module)
        return found if found is not None and found.model is module else None

    def setup_environment(self) -> None:
        module = self.lightning_module
        for callback in module.trainer.callbacks:
            is_blank = any(parameter.is_meta for parameter in module.parameters())
            if isinstance(callback, self._averaging) and (is_blank or self._weights_of(module)):
                raise self._misconfiguration(
                    f"strategy='gemini': the callback {type(callback).__name__} copies the module before its parameters"
                    " have values. Build it on the CPU and load its weights there, without"
                    " GeminiStrategy(weights=...)."
                )
            if self.is_distributed and saves_after_errors(callback, self._home.callbacks):
                raise self._misconfiguration(
                    "strategy='gemini' with several devices does not support that the callback"
                    f" {type(callback).__name__} saves a checkpoint after an error: it would need all ranks, and an"
                    " error is often one rank's. Save at intervals instead, with"
                    " ModelCheckpoint(every_n_train_steps=...)."
                )
        if module._compiler_ctx is not None:
            raise RuntimeError(
                "strategy='gemini' does not support a compiled LightningModule: compile its submodules in"
                " configure_model instead, for example self.block = torch.compile(self.block)."
            )
        super().setup_environment()
        if module.trainer.state.fn == self._home.trainer.states.TrainerFn.FITTING:
            # Here and not in `setup`: hooks and a checkpoint meet ordinary parameters.
            self._adopt(module, reuse=False)
        put_over_masters(module.trainer.callbacks, self._averaging)

    def setup(self, trainer: Any) -> None:
        module = self.lightning_module
        self._has_started = False
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        training = trainer.state.fn == self._home.trainer.states.TrainerFn.FITTING
        engine = self._adopt(module, reuse=not training)
        if training and self._layer_sync is not None and self.is_distributed:
            # For good: taking it back would change modules that the engine manages. Without a process group, and in
            # evaluation, the synchronised layers are the ordinary ones.
            self.model = self._layer_sync.apply(self.model)
        self._make_ready(module, moves_metrics=engine is None)
        if training:
            self.setup_optimizers(trainer)
            optimizer = self._only_optimizer()
            engine = self._manage(module, optimizer)
            # Wrapped anew: the engine changed the optimizer's class.
            self.optimizers = [optimizer]
        elif engine is None:
            engine = self._manage(module, None)
        self.precision_plugin.attach(engine, self.root_device)
        self._set_device_and_dtype(module)
        self.setup_precision_plugin()
        self._load_late(module)

    def setup_optimizers(self, trainer: Any) -> None:
        self._reset_optimizers_and_schedulers()
        super().setup_optimizers(trainer)

    def model_to_device(self) -> None:
        # The engine places the parameters and buffers.
        return

    def teardown(self) -> None:
        # Called after every stage and after failures, however little of setup has run. The engine, the module and
        # the optimizer stay as they are: users save and evaluate after `fit`.
        trainer = getattr(self.lightning_module, "_trainer", None)
        take_from_masters(() if trainer is None else trainer.callbacks)
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()
        if sys.exception() is None:
            self._end_saving()  # else engine.close(), or the end of the process, says what it met

    tensor_init_context = EngineStrategy._made_on_host

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        engine, module = self.engine, self.lightning_module
        if engine is not None and engine._runtime.thawed:
            is_first = batch_idx % module.trainer.accumulate_grad_batches == 0
            self._manage_again(engine, drops_grads=is_first and module.automatic_optimization)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._outputs(super().training_step, args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._outputs(super().validation_step, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._outputs(super().test_step, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._outputs(super().predict_step, args, kwargs)

    def _outputs(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self._explaining():
            outputs = step(*args, **kwargs)
            if not self.force_outputs_fp32:
                return outputs
            return apply_to_collection(outputs, Tensor, cast_floating, torch.float32)

    # -- the engine ------------------------------------------------------------------------------------------

    def _configuration(self) -> tuple[Any, ...]:
        return (
            self.root_device,
            self.precision_plugin.precision,
            tuple(sorted(self.engine_arguments.items(), key=lambda item: item[0])),
            (self.world_size, self.device_mesh, self.timeout),
        )

    def _adopt(self, module: nn.Module, reuse: bool) -> Any:
        """The engine of `module` when it can go on (invariant 3); every other engine over it is closed."""
        engine = self.engine
        managed = engines_of_parts(module)
        for found in managed:
            if found not in _configurations:
                raise gs.GeminiError(
                    f"{type(module).__name__} holds a model that gemini_strategy.manage() manages already, and"
                    " strategy='gemini' manages the whole LightningModule: call"
                    " gemini_strategy.engine_of(model).close() first, or pass the unmanaged model."
                )
        slots = [getattr(parameter, "_gm_slot", None) for parameter in module.parameters()]
        is_whole = all(slot is not None and slot.engine.engine is engine for slot in slots)
        goes_on = reuse and engine is not None and is_whole
        if goes_on and _configurations.get(engine) == self._configuration():
            return engine
        for found in managed:
            found.close(dtype=torch.float32)
        return None

    def _manage_again(self, engine: Any, drops_grads: bool) -> None:
        """Parameters are to be trained that were not, from exactly what the engine holds.

        `drops_grads`: the next backward begins with zero_grad, so what has a loss scale need not be kept.
        """
        optimizer = engine.optimizer
        scale = None if engine.scaler is None else engine.scaler.state_dict()
        if scale is not None and drops_grads:
            engine.zero_grad()
        engine.close(dtype=torch.float32, with_states=True)
        engine = self._manage(self.lightning_module, optimizer)
        if scale is not None:
            engine.scaler.load_state_dict(scale)
        self.precision_plugin.attach(engine, self.root_device)

    def _manage(self, module: nn.Module, optimizer: Optimizer | None) -> Any:
        half = sorted(
            str(dtype)
            for dtype in {parameter.dtype for parameter in module.parameters()}
            if dtype in (torch.float16, torch.bfloat16)
        )
        if half and self.precision_plugin.precision == "32-true":
            self._warn(
                f"precision='32-true' makes the model's {' and '.join(half)} parameters fp32. To compute in half"
                " precision, with fp32 masters, use Trainer(precision='bf16-true')."
            )
        engine = self._make_engine(module, optimizer, False)  # StepLogs reports
        if engine is None:
            return None
        _configurations[engine] = self._configuration()
        engine._runtime.takes_thawed = optimizer is not None
        engine._runtime.coming_step.is_served = True  # StepSchedule looks whether it was
        return engine

    def _only_optimizer(self) -> Optimizer:
        optimizers_of = self._home.core.optimizer
        optimizers = [
            found.optimizer if isinstance(found, optimizers_of.LightningOptimizer) else found
            for found in self.optimizers
        ]
        given = [each for each in optimizers if not isinstance(each, optimizers_of._MockOptimizer)]
        if len(optimizers) == len(given) == 1:
            return given[0]
        names = ", ".join(type(found).__name__ for found in given)
        self._reset_optimizers_and_schedulers()
        raise self._misconfiguration(
            f"strategy='gemini' trains with exactly one optimizer; configure_optimizers returned {names or 'none'}."
            " Put all trainable parameters into one, with a parameter group for each setting."
            + (
                " Models that are trained in turn, as a GAN's, are set up one by one: Fabric(strategy='gemini'), and"
                " fabric.setup(model, optimizer) for each."
            )
            * (len(given) > 1)
        )


def build_strategy(tree: Tree) -> type:
    """The strategy class of `tree` (see :data:`gemini_strategy.lightning.GeminiStrategy`)."""
    pl = tree.pl
    averaging = ("StochasticWeightAveraging", "WeightAveraging")
    return joined(
        Strategy,
        pl,
        tree,
        _say=staticmethod(pl.utilities.rank_zero.rank_zero_info),
        _averaging=tuple(
            getattr(pl.callbacks, name) for name in averaging if hasattr(pl.callbacks, name)
        ),
    )
