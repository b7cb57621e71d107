# What the strategies of a Trainer and of Fabric have alike: their arguments, and how they make an engine.
#
# A class for both to inherit from; nothing here imports Lightning.

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from torchmetrics import Metric

import gemini_strategy as gs
from gemini_strategy.arguments import check_management
from gemini_strategy.checkpoint import one_file
from gemini_strategy.lightning.engines import ENGINE_ARGUMENTS, materialize
from gemini_strategy.lightning.ranks import RankProcesses, checked_timeout
from gemini_strategy.lightning.trees import Tree
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
    """To be inherited from before the tree's `ParallelStrategy`.

    Args:
        given: the arguments by name; `gradient_dtype` may be "float32".

    Raises:
        ValueError, TypeError: one of them cannot be.
    """

    strategy_name = "gemini"
    _tree: Tree
    _home: ModuleType  # the tree's module with Trainer or Fabric in it
    _precision_argument: str
    _elsewhere: str  # the functions that give other classes
    _loaded: "ClassVar[WeakSet[nn.Module]]"  # have taken their weights: what they hold since is worth more
    _warn: Callable[[str], None]  # the tree's rank_zero_warn
    checkpoint_io: Any
    is_global_zero: bool
    _takes_what_is_there = False  # nobody has said which accelerator

    def __init__(self, given: dict[str, Any]) -> None:
        if given["gradient_dtype"] == "float32":
            given["gradient_dtype"] = torch.float32
        check_management(self._call, given)
        self._check(given)
        self.timeout = checked_timeout(self._call, given)
        plugins, mesh = self._fabric.plugins, given["device_mesh"]
        for name, wanted in (
            ("cluster_environment", plugins.ClusterEnvironment),
            ("checkpoint_io", plugins.CheckpointIO),
        ):
            self._tree.check(name, given[name], wanted, self._call)
        self.enable_distributed_storage = given["enable_distributed_storage"]
        self.process_group_backend = given["process_group_backend"]
        self.device_mesh = tuple(mesh) if isinstance(mesh, list) else mesh
        self.report = given["report"]
        self.weights = given["weights"]
        self.missing = given["missing"]
        self.engine_arguments = {name: given[name] for name in ENGINE_ARGUMENTS}
        names = ("parallel_devices", "cluster_environment", "checkpoint_io")
        super().__init__(**{name: given[name] for name in (*names, self._precision_argument)})
        if given["accelerator"] is not None:
            self.accelerator = given["accelerator"]

    def _check(self, given: dict[str, Any]) -> None:
        """Raises ValueError for an argument that the other strategy does not have."""

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
            if isinstance(part, self._fabric.utilities.device_dtype_mixin._DeviceDtypeModuleMixin):
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


def joined(name: str, strategy: type, home: ModuleType, tree: Tree, **parts: Any) -> type:
    """The strategy class of a tree; `home`: its module with Trainer or Fabric in it."""
    common = {
        "__doc__": strategy.__doc__,
        "__module__": strategy.__module__,
        "_tree": tree,
        "_home": home,
        "_fabric": tree.fabric,
        "_warn": staticmethod(home.utilities.rank_zero.rank_zero_warn),
        "_launcher_class": home.strategies.launchers._SubprocessScriptLauncher,
        "_misconfiguration": home.utilities.exceptions.MisconfigurationException,
    }
    return type(name, (strategy, home.strategies.ParallelStrategy), common | parts)
