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
from datetime import timedelta
from types import FunctionType
from typing import Any, ClassVar, Literal

import torch
from lightning_utilities import apply_to_collection
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

import gemini_strategy as gs
from gemini_strategy.arguments import Arguments
from gemini_strategy.lightning.averaging import put_over_masters, take_from_masters
from gemini_strategy.lightning.checkpoints import Checkpoints
from gemini_strategy.lightning.engine_strategy import EngineStrategy, joined
from gemini_strategy.lightning.engines import engines_of_parts
from gemini_strategy.lightning.logs import StepLogs
from gemini_strategy.lightning.precision import cast_floating, plugin_property, precision_class
from gemini_strategy.lightning.schedule import UPDATE_SCHEDULES, StepSchedule, saves_after_errors
from gemini_strategy.lightning.trainer_ranks import TrainerRanks
from gemini_strategy.lightning.trees import Tree
from gemini_strategy.weakly import WeakSet, WeakTable
from gemini_strategy.weights.loading import Weights

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
        use_chunk: must be True: parameters always live in chunks.
        chunk_size: bytes of weights in one chunk; None: chosen from the model and the budget, or searched for.
        enable_distributed_storage: whether ranks share the chunks (True) or each keeps all (False). One device
            holds every chunk either way, so both values are the same there.
        placement_policy: ``"auto"`` (within the budget), ``"cuda"`` (everything on the device), ``"cpu"`` (a
            unit's chunks leave the device when the unit has run: least device memory).
        force_outputs_fp32: cast half-precision tensors to fp32 in what the module's ``forward`` and its
            ``*_step`` methods return.
        gpu_margin_mem_ratio: share, 0 to 1, of the device memory left beside all weights that optimizer states
            may use; None: all of it. With ``placement_policy="auto"`` only.
        chunk_search_range: how far above `min_chunk_size` chunk sizes are searched, bytes of weights. Giving this
            or one of the next two asks for the search; what is then left None is 64 MiB, 4096 or 32 MiB.
        chunk_search_n_grids: number of steps in that range.
        min_chunk_size: smallest chunk size that the search considers, bytes of weights.
        initial_scale: first loss scale (``"16-mixed"`` only, like the six that follow).
        min_scale: the loss scale never falls below this.
        growth_factor: factor of growth, more than 1.
        backoff_factor: factor after an overflow, between 0 and 1.
        growth_interval: steps without overflow before the scale grows.
        hysteresis: overflows in a row that are forgiven before the scale shrinks (1: none).
        max_scale: the loss scale never rises above this.
        accelerator: the tree's ``CPUAccelerator`` or ``CUDAAccelerator``; normally ``Trainer(accelerator=...)``.
        parallel_devices: this machine's devices; normally ``Trainer(devices=...)``.
        cluster_environment: a cluster environment of the tree; None: the one that Lightning finds.
        checkpoint_io: how checkpoint files are written and read.
        precision_plugin: ``Precision``, ``MixedPrecision`` or ``HalfPrecision`` of the tree; it wins over
            ``Trainer(precision=...)``.
        device_budget: most memory on the device; None: what is there. On CUDA it counts everything this process
            holds on the GPU, on a CPU host what the engine places on the host device.
        host_budget: most host memory that the engine takes; None: what is there.
        gradient_dtype: dtype in which gradients are kept and accumulated: None for the parameter's compute
            dtype, or fp32 (``torch.float32`` or ``"float32"``).
        block_size: size of a block of device memory; None lets the engine choose.
        threads: threads for the update on the CPU; None: the cores this process may use, less two beside a GPU.
        update_schedule: ``"auto"``: updates run inside the backward that ends a step when nothing needs its
            gradients afterwards (no clipping, no loss scale, no hook of the module or a callback that may read
            them), and under the next forward otherwise; ``"deferred"``: always under the next forward. The bits
            are the same. An error inside a backward that updates closes the engine.
        weights: a safetensors file or a Hugging Face folder that the module begins with, or such paths by the name
            of the submodule that each is of; see ``gemini_strategy.manage``. A checkpoint comes after it. Best
            with a module that ``configure_model`` builds on the meta device.
        missing: a parameter on the meta device that `weights` do not name is refused (``"refuse"``) or gets its
            module's own initial values (``"init"``).
        report: tell the table of the plan when there is one, and at the end what was planned beside what was
            measured, at Lightning's log level INFO.
        timeout: how long one collective between several devices may take, a timedelta or seconds. One device makes
            none.
        process_group_backend: what torch.distributed uses for the collectives of Lightning and the module, with
            several devices: ``"nccl"``, ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``; None: as the devices are. The
            engine's own collectives do not use it.
        device_mesh: how several devices share the chunks: ``(replicas, shards)``, a ``DeviceMesh`` of one
            dimension (shards) or two (replicas, shards), or ``"hybrid"`` for a replica on each machine, shared by
            its devices. None: all devices share them.
        checkpoint_weights_only: `weights_only` of ``torch.load`` where ``fit``, ``validate``, ``test`` or
            ``predict`` were given none. None: torch's default, which loads nothing but tensors and plain values;
            False for trusted files with other objects in them.
        state_dict_type: ``"full"``: a checkpoint is one file, which rank 0 writes and any strategy loads.
            ``"sharded"``: it is a folder, to which each rank writes its part straight from where it is: the host
            needs no second copy of the model. Any number of devices goes on from it, random numbers included, and
            ``python -m lightning.pytorch.utilities.consolidate_checkpoint`` makes one file of it.

    Raises:
        ValueError, TypeError: an argument outside what is listed above.
        MisconfigurationException: at construction of the Trainer, for other accelerators, and where the number of
            processes or the mesh does not fit its devices.
    """

    _call = "GeminiStrategy"
    _precision_argument = "precision_plugin"
    _elsewhere = "strategy_class, for Fabric fabric_strategy_class"
    _loaded: ClassVar = WeakSet()
    _averaging: tuple[type, ...]  # callbacks that copy the module

    def __init__(
        self,
        use_chunk: bool = True,
        chunk_size: int | str | None = None,
        enable_distributed_storage: bool = True,
        placement_policy: Literal["auto", "cpu", "cuda"] = "auto",
        force_outputs_fp32: bool = False,
        gpu_margin_mem_ratio: float | None = None,
        chunk_search_range: int | str | None = None,
        chunk_search_n_grids: int | None = None,
        min_chunk_size: int | str | None = None,
        initial_scale: float = 2**16,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        device_budget: int | float | str | None = None,
        host_budget: int | float | str | None = None,
        gradient_dtype: torch.dtype | str | None = None,
        block_size: int | str | None = None,
        threads: int | None = None,
        timeout: timedelta | float = timedelta(seconds=300),
        process_group_backend: str | None = None,
        checkpoint_weights_only: bool | None = None,
        state_dict_type: Literal["full", "sharded"] = "full",
        update_schedule: Literal["auto", "deferred"] = "auto",
        report: bool = True,
        weights: Weights | None = None,
        missing: Literal["refuse", "init"] = "refuse",
        device_mesh: tuple[int, int] | DeviceMesh | Literal["hybrid"] | None = None,
    ) -> None:
        super().__init__(dict(locals()))
        self.force_outputs_fp32 = force_outputs_fp32
        self.checkpoint_weights_only = checkpoint_weights_only
        self.state_dict_type = state_dict_type
        self.update_schedule = update_schedule

    def _check(self, given: dict[str, Any]) -> None:
        arguments = Arguments(self._call, given)
        arguments.check_number("min_scale", 0, None, is_exclusive=True)
        is_true = given["use_chunk"] is True
        arguments.check(is_true, "use_chunk", "True: parameters always live in chunks")
        arguments.check_choice("checkpoint_weights_only", (None, True, False))
        arguments.check_choice("state_dict_type", ("full", "sharded"))
        arguments.check_choice("update_schedule", UPDATE_SCHEDULES)
        arguments.check_bool("report")

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
            (self.world_size, self.device_mesh, self.enable_distributed_storage, self.timeout),
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
        engine._runtime.step_in_backward.is_served = True  # StepSchedule looks whether it was
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
            " Put all trainable parameters into one torch.optim.AdamW, torch.optim.Adam,"
            " gemini_strategy.HybridAdam or gemini_strategy.CPUAdam, with a parameter group for each setting."
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
        "GeminiStrategy",
        Strategy,
        pl,
        tree,
        __init__=_init_for(tree),
        _say=staticmethod(pl.utilities.rank_zero.rank_zero_info),
        _averaging=tuple(
            getattr(pl.callbacks, name) for name in averaging if hasattr(pl.callbacks, name)
        ),
    )


def _init_for(tree: Tree) -> FunctionType:
    """Strategy's, annotated with the classes of `tree`, from which LightningCLI makes what a config file asks for."""
    plain = Strategy.__init__
    init = FunctionType(
        plain.__code__, plain.__globals__, "__init__", plain.__defaults__, plain.__closure__
    )
    init.__annotations__ = plain.__annotations__ | {
        "accelerator": tree.pl.accelerators.Accelerator | None,
        "cluster_environment": tree.fabric.plugins.ClusterEnvironment | None,
        "checkpoint_io": tree.fabric.plugins.CheckpointIO | None,
        "precision_plugin": tree.pl.plugins.Precision | None,
    }
    return init
