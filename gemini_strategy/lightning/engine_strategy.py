# What the strategies of a Trainer and of Fabric have alike: their arguments, and how they make an engine.
#
# A class for both to inherit from; nothing here imports Lightning.

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from torchmetrics import Metric

import gemini_strategy as gs
from gemini_strategy.arguments import arguments_of, taking
from gemini_strategy.checkpoint import one_file
from gemini_strategy.lightning.engines import materialize
from gemini_strategy.lightning.ranks import RankProcesses
from gemini_strategy.lightning.settings import ORIGINALS, TO_MANAGE
from gemini_strategy.lightning.trees import Tree, made_for
from gemini_strategy.settings import check
from gemini_strategy.weakly import WeakSet
from gemini_strategy.weights.loading import Weights


def _is_chosen_by_default() -> bool:
    """Inside what sets an accelerator: whether Lightning has chosen it, as Trainer(accelerator="auto") was called.

    It keeps what it was given in the frames of its connector's constructor alone.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "__init__":
        frame = frame.f_back
    return frame is not None and frame.f_locals.get("accelerator") == "auto"


class EngineStrategy(RankProcesses):
    """To be inherited from before the tree's `ParallelStrategy`. What is made of it has its arguments by `joined`."""

    strategy_name = "gemini"
    _table: type  # of its arguments
    _home: ModuleType  # the tree's module with Trainer or Fabric in it
    _precision_argument: str
    _elsewhere: str  # the functions that give other classes
    _loaded: "ClassVar[WeakSet[nn.Module]]"  # have taken their weights: what they hold since is worth more
    _warn: Callable[[str], None]  # the tree's rank_zero_warn
    engine: Any  # a Trainer's, as is what follows it
    lightning_module: Any
    precision_plugin: Any
    checkpoint_io: Any
    is_global_zero: bool
    _takes_what_is_there = False  # nobody has said which accelerator

    def __init__(self, given: dict[str, Any]) -> None:
        check(self._call, given, self._table)
        timeout = given["timeout"]
        self.timeout = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        plugins, mesh = self._tree.fabric.plugins, given["device_mesh"]
        for name, wanted in (
            ("cluster_environment", plugins.ClusterEnvironment),
            ("checkpoint_io", plugins.CheckpointIO),
        ):
            self._tree.check(name, given[name], wanted, self._call)
        self.process_group_backend = given["process_group_backend"]
        self.device_mesh = tuple(mesh) if isinstance(mesh, list) else mesh
        self.report = given["report"]
        self.weights = given["weights"]
        self.missing = given["missing"]
        self.engine_arguments = {name: given[name] for name in TO_MANAGE if name in given}
        if given["gradient_dtype"] is not None:
            self.engine_arguments["gradient_dtype"] = torch.float32
        names = ("parallel_devices", "cluster_environment", "checkpoint_io")
        super().__init__(**{name: given[name] for name in (*names, self._precision_argument)})
        if given["accelerator"] is not None:
            self.accelerator = given["accelerator"]

    def __repr__(self) -> str:
        # Lightning prints this when a strategy is given to the other tree's Trainer or Fabric.
        return (
            f"<{type(self).__name__} for the {self._runner} of `{self._tree.name}`; for another installation of"
            f" Lightning see gemini_strategy.lightning.{self._elsewhere}>"
        )

    @property
    def accelerator(self) -> Any:
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        accelerators = self._home.accelerators
        self._tree.check("accelerator", accelerator, accelerators.Accelerator, self._call)
        known = (accelerators.CPUAccelerator, accelerators.CUDAAccelerator)
        if accelerator is not None and not isinstance(accelerator, known):
            raise self._misconfiguration(
                f"strategy='gemini' does not run on {type(accelerator).__name__}. Supported:"
                f" {self._runner}(accelerator='cpu') and {self._runner}(accelerator='cuda')."
            )
        if accelerator is not getattr(self, "_accelerator", None):
            self._takes_what_is_there = _is_chosen_by_default()
        self._accelerator = accelerator

    @property
    def _asked_device(self) -> torch.device | None:
        """None: nobody has asked for the CPU, and there is nothing else: manage() says it."""
        is_default = self._takes_what_is_there and not torch.cuda.is_available()
        return None if is_default and self.root_device.type == "cpu" else self.root_device

    @property
    def _casting(self) -> Any:
        """The precision plugin."""
        return getattr(self, self._precision_argument)

    def _set_device_and_dtype(self, module: nn.Module) -> None:
        for part in module.modules():
            if isinstance(
                part, self._tree.fabric.utilities.device_dtype_mixin._DeviceDtypeModuleMixin
            ):
                part._device = self.root_device
                part._dtype = self._casting.module_dtype

    @contextmanager
    def _made_on_host(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # Never the GPU, and fp32: the engine decides what goes there, and casts.
        with torch.device("meta") if empty_init else nullcontext():
            yield

    # -- the engine ------------------------------------------------------------------------------------------

    def _make_ready(self, module: nn.Module, moves_metrics: bool = True) -> None:
        """What manage() leaves alone or refuses: what has no values or was built under inference mode, and metrics."""
        with torch.inference_mode(False):
            for parameter in module.parameters():
                if parameter.is_inference():
                    ordinary = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                    torch.utils.swap_tensors(parameter, ordinary)
        if self.weights is None:
            materialize(module, self._warn)
        for metric in module.modules() if moves_metrics else ():
            if isinstance(metric, Metric):
                metric.to(self.root_device)

    def _weights_of(self, module: nn.Module) -> Weights | None:
        """The file of weights that manage() has to read for `module`."""
        is_blank = any(parameter.is_meta for parameter in module.parameters())
        return self.weights if is_blank or module not in self._loaded else None

    def _make_engine(
        self, module: nn.Module, optimizer: Optimizer | None, report: bool | None
    ) -> Any:
        """An engine; None for a module without parameters."""
        if next(module.parameters(), None) is None and optimizer is None:
            module.to(self.root_device)
            return None
        engine = gs.manage(
            module,
            optimizer,
            weights=self._weights_of(module),
            missing=self.missing,
            device=self._asked_device,
            precision=self._casting.precision,
            convert_inputs=False,
            report=report,
            **self.engine_arguments,
            **self._rank_arguments(),
        )
        engine._runtime.called = "gemini_strategy.engine_of(model)"
        engine._runtime.serves_outside = True  # steps have autocast, other hooks of the module none
        return engine

    # -- files -----------------------------------------------------------------------------------------------

    @property
    def _has_plain_io(self) -> bool:
        """Whether files are written and read as Lightning's own IO does, which need not be asked then."""
        # A method that was set on it or on its class (by a mock, for example) is somebody's own.
        plain, io = self._home.plugins.TorchCheckpointIO, self.checkpoint_io
        methods = (getattr(io, name, None) for name in ("save_checkpoint", "load_checkpoint"))
        own = vars(sys.modules[plain.__module__])
        return type(io) is plain and all(getattr(m, "__globals__", None) is own for m in methods)

    def _on_rank_0(self, name: str, path: Any, write: Callable[[], None]) -> None:
        """Rank 0 writes a file while the others wait for it. Raises on every rank if it cannot be written.

        So whoever catches that goes on with all ranks at the same place.
        """
        failure: BaseException | None = None
        if self.is_global_zero:
            try:
                write()
            except BaseException as error:
                failure = error
        if self._is_connected:
            self._meet_after_file(name)
            own = None if failure is None else f"{type(failure).__name__}: {failure}"
            said = self.broadcast(own)
            if said is not None and failure is None:
                raise gs.GeminiError(f"rank 0 could not write the checkpoint {path}: {said}")
        if failure is not None:
            raise failure

    def _write_plain(self, checkpoint: Any, path: Any, storage_options: Any) -> bool:
        """Whether it is written, piece by piece; False: another has to, and may read from now on."""
        if self._has_plain_io and storage_options is None and one_file.is_local(path):
            one_file.write(checkpoint, Path(path))
            return True
        for engine in self._engines():
            engine._runtime.settle()  # nobody knows when others read
        return False


def joined(strategy: type, home: ModuleType, tree: Tree, **parts: Any) -> type:
    """The strategy class of a tree; `home`: its module with Trainer or Fabric in it.

    Its arguments are annotated with the classes of the tree: LightningCLI makes what a config file asks for from these.
    """
    table, plugins = strategy._table, tree.fabric.plugins
    types = {
        "accelerator": home.accelerators.Accelerator | None,
        "cluster_environment": plugins.ClusterEnvironment | None,
        "checkpoint_io": plugins.CheckpointIO | None,
        strategy._precision_argument: home.plugins.Precision | None,
    }
    positional = [name for name in ORIGINALS if name in arguments_of(table)]
    common = {
        "_home": home,
        "_warn": staticmethod(home.utilities.rank_zero.rank_zero_warn),
        "_launcher_class": home.strategies.launchers._SubprocessScriptLauncher,
        "_misconfiguration": home.utilities.exceptions.MisconfigurationException,
    }
    plain = home.strategies.ParallelStrategy
    made = made_for(tree, strategy._call, strategy, plain, **common, **parts)
    return taking(table, positional, types)(made)
